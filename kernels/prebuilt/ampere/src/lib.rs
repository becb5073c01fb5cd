//! CUDA kernels compiled for compute capability 8.x (A100, RTX 30 and 40, L4, L40S), a part of
//! [nq-cuda](https://docs.rs/nq-cuda): with them, building nq needs no CUDA toolkit.
//!
//! The build of nq-cuda compares the code with its own manifest: which sources it was compiled from, by which
//! compiler. A part of nq that may change in any version: programs use `nq-llm`.

#![no_std]
#![forbid(unsafe_code)]

/// Code by target: an xz file of fatbins, one after another, a fatbin and a block per source. `sm_8x` has the sources of
/// which 8.0 and 8.6 run the same code.
pub static CODE: &[(&str, &[u8])] = &[
    ("sm_80", include_bytes!("../sm_80.xz")),
    ("sm_86", include_bytes!("../sm_86.xz")),
    ("sm_8x", include_bytes!("../sm_8x.xz")),
];
