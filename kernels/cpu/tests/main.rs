//! All tests of kernels: one program, so that it is linked once.

mod common;
mod cuda;
mod delta;
mod linear;
mod ops;
mod trellis;
