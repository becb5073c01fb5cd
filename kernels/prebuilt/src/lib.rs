//! Machine code of the CUDA kernels of [nq-kernels](https://docs.rs/nq-kernels), so that building it
//! needs no CUDA toolkit.
//!
//! The sources are in nq-kernels' folder `cuda`. The script `build` beside this crate's manifest
//! compiles them for each architecture with nvcc, and writes the file `manifest`: the hash of every
//! source and header, the compiler's version, its flags and the hash of each result. The build of
//! nq-kernels refuses code that was compiled from other sources than its own.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.

#![forbid(unsafe_code)]

/// Code by target: `sm_90a` is machine code for compute capability 9.0, `compute_100` is PTX, which a
/// driver compiles for devices of 10.0 and newer. Each is a zstd frame of fatbins, one after another,
/// a fatbin per source.
pub static CODE: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/code.rs"));
