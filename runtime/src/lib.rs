//! The engine, without devices: KV cache, batches, speculation, tokenizer, chat template, sampling and
//! generation.
//!
//! [`Engine`] and [`Session`] are the interfaces that devices implement (`nq-cpu`, `nq-cuda`) and that all
//! crates above use; `nq_load::load` makes an [`Engine`] from a checkpoint.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.
//!
//! [`generate::generate`] makes an answer from a session's logits, a [`Batch`] several at once.

#![forbid(unsafe_code)]

pub mod batch;
pub mod chat_template;
pub mod checks;
mod detokenizer;
pub mod embedding;
mod encoder;
mod error;
pub mod generate;
pub mod host;
pub mod images;
pub mod interface;
pub mod kv;
pub mod models;
pub mod ngrams;
pub mod rerank;
pub mod rope;
pub mod sampler;
pub mod speculation;
pub mod stacks;
pub mod states;
pub mod stepper;
mod stop;
pub mod thinking;
pub mod tokenizer;
pub mod tower_parts;
pub mod weights;

pub use batch::{Batch, Continuation, Piece, Ran};
pub use chat_template::{ChatTemplate, Message};
pub use detokenizer::Detokenizer;
pub use encoder::{Encoder, Row};
pub use error::{Error, Result};
pub use generate::{Generated, GenerationLimits, Sequence, Stats, StopReason};
pub use images::ImagePrompt;
pub use interface::{
    ActivationChoice, AppliedAdapter, Chunk, DeviceChoice, DeviceMemory, DraftLayer, DraftedBy,
    Drafter, Engine, EngineDescription, EngineKind, ImageRows, LoadOptions, Logits, LogitsWanted,
    Observer, Ordinals, Pages, PlacedImage, Session, SessionSpec, Split, StepsAhead, Streams,
    Tower,
};
pub use models::LayerWeights;
pub use nq_kernels::pages::KvType;
pub use nq_kernels::profile::OpTiming;
pub use sampler::{LogitBias, Sampler, SamplingChoices, SamplingParams, TokenLogprobs};
pub use speculation::{Costs, DraftModel, Speculation};
pub use states::{is_recurrent, pass_end, resting_points};
pub use stepper::{Head, Hidden, LayerStepper, ProductMoments};
pub use stop::StopTexts;
pub use tokenizer::Tokenizer;
