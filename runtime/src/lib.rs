//! Qwen3 on a device: weights, KV cache, forward pass, tokenizer, chat template, sampling
//! and generation.
//!
//! [`engine`] holds the interfaces that everything above this crate uses; [`load`] makes an
//! [`Engine`] of a checkpoint. Only this crate places data on devices.

#![forbid(unsafe_code)]

pub mod engine;
pub mod error;
pub mod load;
pub mod models;

pub use engine::{
    Chunk, Engine, EngineDescription, Hidden, LayerStepper, LayerWeights, LinearId, LinearKind,
    Logits, LogitsWanted, Observer, Session, SessionSpec,
};
pub use error::{Error, Result};
pub use load::{ActivationChoice, DeviceChoice, EngineKind, LoadOptions};
pub use nq_kernels::cpu::KvType;
