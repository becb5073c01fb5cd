//! Compute kernels over quantized and dense weights, one room per device, and the
//! scalar reference that every one of them is tested against.
//!
//! This crate knows no file and no model: it multiplies, normalizes and attends.
//! [`registry`] says which kernel serves which operation, scheme, activation type,
//! row count and instruction set; nothing outside it decides.

pub mod account;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod error;
pub mod grad;
pub mod reference;
pub mod registry;
pub mod rng;
pub mod routing;
pub mod second_order;

pub use account::{Account, Held};
pub use error::{Error, Result};
pub use registry::{Activations, KernelSet};
pub use routing::Routes;
