//! Weights and checkpoints as files: numeric schemes, canonical weights, packing,
//! and the readers and writers of checkpoint formats.
//!
//! This crate knows no device and no model graph. A weight leaves it in canonical
//! form ([`Weight`]): row-major `[out, in]`, the same whatever file it came from.

#![forbid(unsafe_op_in_unsafe_fn)]

pub mod checkpoint;
pub mod config;
pub mod dense;
pub mod dtype;
pub mod durable;
pub mod error;
pub mod export;
pub mod gguf;
pub mod hash;
pub mod hub;
pub mod import;
pub mod mapping;
pub mod names;
pub mod nq;
pub mod pack;
pub mod parquet;
pub mod progress;
pub mod safetensors;
pub mod scheme;
pub mod serialize;
pub mod shards;
pub mod stored;
pub mod synth;
pub mod tensor;
pub mod tokenizer;
pub mod weight;

pub use checkpoint::{Checkpoint, Exactness, Files, TensorEntry, VirtualFiles, WeightStore};
pub use config::{GenerationDefaults, ModelConfig, Rope, RopeScaling};
pub use dtype::DType;
pub use error::{Error, HubProblem, Result};
pub use progress::{Progress, Unit};
pub use scheme::{AffineScheme, Bits, Group, Zeros};
pub use stored::StoredWeight;
pub use tensor::Tensor;
pub use weight::{AffineWeight, QuantizedWeight, Weight, ZeroPoints};
