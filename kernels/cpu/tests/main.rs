//! All tests of the CPU's kernels: one program, so that it is linked once.

#[allow(
    dead_code,
    reason = "the tests of a CPU and of a GPU share it, and each use a part"
)]
mod common;
mod delta;
mod linear;
mod ops;
mod trellis;
