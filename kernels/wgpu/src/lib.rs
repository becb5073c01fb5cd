//! nq's models on GPUs over Vulkan, Metal and Direct3D 12, by kernels in WGSL that the driver compiles when a model is
//! loaded. `wgpu` finds the drivers when the program runs: a machine without one runs as before.
//!
//! `pack` says how weights lie in memory, `linear` of which buffers they are, `product` which kernel multiplies with
//! them, `recurrence`, `experts` and `kernels` which others there are, `program` what a pass launches, `session` what
//! it is fed, `ahead` how the device draws tokens. Keys and values are pairs of f16 in words of 32 bits, so that no
//! adapter needs 16-bit types.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.

#![forbid(unsafe_code)]

mod adapter;
mod ahead;
mod buffers;
mod engine;
mod experts;
mod gpu;
mod kept;
mod kernels;
mod linear;
mod meter;
mod model;
mod pack;
mod product;
mod program;
mod recurrence;
mod rows;
mod session;
mod sizes;
mod source;
#[cfg(test)]
mod tests;
mod timer;

pub use adapter::{FoundAdapter, adapters};
pub use engine::WgpuEngine;
pub use meter::AdapterMeter;
pub use program::unserved;
