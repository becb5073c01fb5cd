//! Weights and checkpoints as files: numeric schemes, canonical weights, packing,
//! and the readers and writers of checkpoint formats.
//!
//! This crate does not know devices, and of models what [`nq_model`] says. Readers return weights in canonical
//! form ([`Weight`]): row-major `[out, in]`, the same for every file format.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.
//!
//! ```
//! use nq_formats::Checkpoint;
//! use nq_model::Dims;
//! use std::path::Path;
//!
//! let checkpoint = Checkpoint::open(Path::new("../assets/demo"))?;
//! assert_eq!(checkpoint.config().num_hidden_layers, 5);
//! let config = checkpoint.config();
//! let shape = Dims::new(config.intermediate_size, config.hidden_size);
//! let weight = checkpoint.store().matrix("model.layers.0.mlp.up_proj", shape)?;
//! assert_eq!(weight.dims(), shape);
//! # Ok::<(), nq_formats::Error>(())
//! ```

#![forbid(unsafe_op_in_unsafe_fn)]

mod account;
pub mod adapter;
mod blocks;
pub mod checkpoint;
pub mod config;
mod dense;
pub mod durable;
mod e4m3;
pub mod eagle;
mod error;
mod exactness;
pub mod exl3;
mod experts;
pub mod export;
pub mod files;
pub mod gguf;
pub mod hash;
pub mod hub;
mod hyper;
pub mod import;
pub mod keys;
pub mod left_over;
pub mod mapping;
pub mod mtp;
pub mod nq;
mod object;
mod open;
pub mod pack;
pub mod parquet;
mod progress;
mod published;
mod random_tower;
mod recurrence;
mod rope;
pub mod safetensors;
mod scheme;
pub mod serialize;
mod shard;
pub mod shards;
mod store;
mod stored;
pub mod synth;
pub mod task;
mod tensor;
pub mod tokenizer;
pub mod trellis;
mod units;
mod vision;
mod weight;

pub use checkpoint::Checkpoint;
pub use config::GenerationDefaults;
pub use error::{Error, HubProblem, Result};
pub use exactness::Exactness;
pub use exl3::{Exl3Code, Exl3Scheme, Exl3Weight};
pub use files::{Files, VirtualFiles};
pub use progress::{Progress, Unit};
pub use scheme::{AffineScheme, Bits, Group, HeldSize, Levels, Scales, Scheme, TwoLevel, Zeros};
pub use shard::Shard;
pub use store::{Overlay, TensorEntry, WeightStore};
pub use stored::{Fp8Rows, StoredWeight};
pub use task::Task;
pub use tensor::Tensor;
pub use trellis::{TrellisScheme, TrellisWeight};
pub use units::human_bytes;
pub use weight::{AffineWeight, GroupValues, Parts, QuantizedWeight, Weight, ZeroPoints, product};
