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
pub mod forward;
pub mod full_precision;
pub mod generate;
pub mod gpu;
mod kv;
pub mod load;
mod memory;
pub mod models;
pub mod rope;
pub mod sampler;
pub mod speculation;
mod stepper;
mod stop;
pub mod thinking;
pub mod tokenizer;
mod weights;

pub use batch::{Batch, Continuation, Piece, Ran, StepsAhead};
pub use chat_template::{ChatTemplate, Message};
pub use cpu::stepper_bytes;
pub use detokenizer::Detokenizer;
pub use engine::{
    Chunk, DeviceMemory, Engine, EngineDescription, Hidden, Logits, LogitsWanted, Observer,
    Session, SessionSpec,
};
pub use error::{Error, Result};
pub use generate::{Generated, Limits, Sequence, Stats, StopReason};
pub use load::{ActivationChoice, DeviceChoice, EngineKind, LoadOptions, load, stepper};
pub use memory::{Kinds, WeightSource, hold_model, hold_session, kv_bytes, weight_kinds};
pub use models::LayerWeights;
pub use nq_kernels::cpu::{KvType, OpTiming};
pub use sampler::{LogitBias, Sampler, SamplingParams, TokenLogprobs};
pub use speculation::Drafting;
pub use stepper::{Head, LayerStepper, ProductMoments};
pub use stop::StopTexts;
pub use tokenizer::Tokenizer;
