//! All tests of the GPU's kernels: one program, so that it is linked once.

#[allow(
    dead_code,
    reason = "the tests of a CPU and of a GPU share it, and each use a part"
)]
#[path = "../../cpu/tests/common/mod.rs"]
mod common;
mod cuda;
