//! A model on a device: weights, KV cache, forward pass, tokenizer, chat template, sampling
//! and generation.
//!
//! [`Engine`] and [`Session`] are the interfaces that everything above this crate uses;
//! [`load()`](load::load) makes an [`Engine`] of a checkpoint. Only this crate places data on
//! devices.

#![forbid(unsafe_code)]

pub mod batch;
mod candle;
pub mod chat_template;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod detokenizer;
pub mod device;
mod engine;
mod error;
mod forward;
pub mod generate;
mod kv;
pub mod load;
mod memory;
pub mod models;
pub mod rope;
pub mod sampler;
pub mod speculation;
mod stop;
pub mod thinking;
pub mod tokenizer;
mod weights;

#[cfg(feature = "cuda")]
pub use cuda::session_bytes as gpu_session_bytes;

pub use batch::{Batch, Continuation, Piece, StepsAhead};
pub use chat_template::{ChatTemplate, Message};
pub use detokenizer::Detokenizer;
pub use engine::{
    Chunk, DeviceMemory, Engine, EngineDescription, Hidden, LayerStepper, Logits, LogitsWanted,
    Observer, Session, SessionSpec,
};
pub use error::{Error, Result};
pub use generate::{Generated, Limits, Sequence, Stats, StopReason};
pub use load::{ActivationChoice, DeviceChoice, EngineKind, LoadOptions, cpu_stepper, load};
pub use memory::{MemoryEstimate, WeightSource, weight_kinds};
pub use models::LayerWeights;
pub use nq_kernels::cpu::{KvType, OpTiming};
pub use sampler::{LogitBias, Sampler, SamplingParams, TokenLogprobs};
pub use speculation::Drafting;
pub use stop::StopTexts;
pub use tokenizer::Tokenizer;
