//! All tests of the GPU's kernels: one program, so that it is linked once.

mod cuda;
