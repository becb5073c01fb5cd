//! CUDA kernels compiled for compute capability 9.0 (H100, H200), a part of
//! [nq-cuda](https://docs.rs/nq-cuda): with them, building nq needs no CUDA toolkit.
//!
//! The build of nq-cuda compares the code with its own manifest: which sources it was compiled from, by which
//! compiler. A part of nq that may change in any version: programs use `nq-llm`.

#![no_std]
#![forbid(unsafe_code)]

/// Code by target: an xz file of fatbins, one after another, a fatbin and a block per source.
pub static CODE: &[(&str, &[u8])] = &[("sm_90a", include_bytes!("../sm_90a.xz"))];
