//! Compute kernels over quantized and dense weights, one module per device, and the
//! scalar reference that all of them are tested against.
//!
//! This crate does not know files or models: it multiplies, normalizes and attends.
//! [`registry`] alone decides which kernel serves an operation, scheme, activation type,
//! row count and instruction set.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.

pub mod account;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod delta;
pub mod error;
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
