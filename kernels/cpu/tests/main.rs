//! All tests of the CPU's kernels: one program, so that it is linked once.

mod common;
mod delta;
mod exl3;
mod linear;
mod ops;
mod trellis;
