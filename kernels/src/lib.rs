//! What kernels of every device have in common: the scalar reference that all of them are tested against,
//! the keys by which a registry chooses one, and what training and rounding need of a device, as traits
//! ([`grad`], [`second_order`]). The devices are crates beside this one: `nq-cpu`, `nq-cuda`, `nq-f32`, `nq-wgpu`.
//!
//! This crate does not know files or models.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.

pub mod account;
pub mod delta;
mod error;
pub mod grad;
pub mod isa;
pub mod math;
pub mod matrix;
pub mod pages;
pub mod profile;
pub mod reference;
pub mod registry;
pub mod rng;
pub mod routing;
pub mod second_order;

pub use account::{Account, Held};
pub use delta::DeltaShape;
pub use error::{Error, Result};
pub use isa::{Isa, IsaChoice};
pub use registry::{Activations, KernelSet};
pub use routing::Routes;
