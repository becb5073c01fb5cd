//! A model on a device: weights, KV cache, forward pass, tokenizer, chat template, sampling
//! and generation.
//!
//! [`Engine`] and [`Session`] are the interfaces that all crates above this one use;
//! [`load()`](load::load) makes an [`Engine`] from a checkpoint. Only this crate places data on
//! devices.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.
//!
//! ```
//! use nq_formats::Checkpoint;
//! use nq_runtime::{Chunk, KvType, LoadOptions, LogitsWanted, DraftedBy, SessionSpec, Tokenizer, load};
//! use std::path::Path;
//!
//! let checkpoint = Checkpoint::open(Path::new("../assets/demo"))?;
//! let tokenizer = Tokenizer::from_files(checkpoint.files())?;
//! let engine = load(checkpoint.config(), checkpoint.store(), &LoadOptions::default(), &())?;
//! let mut session = engine.session(SessionSpec {
//!     slots: 1,
//!     ctx: 128,
//!     pages: None,
//!     kv: KvType::F16,
//!     max_rows: 64,
//!     snapshots: None,
//!     drafts: DraftedBy::Nothing,
//! })?;
//! let tokens = tokenizer.encode("The capital of France is")?;
//! let chunk = Chunk { slot: 0, tokens: &tokens, logits: LogitsWanted::Last };
//! let logits = session.forward(&[chunk], None)?;
//! assert_eq!(logits.row(0).len(), checkpoint.config().vocab_size);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`generate::generate_text`] makes an answer from such logits, a [`Batch`] several at once.

#![forbid(unsafe_code)]

pub mod batch;
pub mod chat_template;
pub mod checks;
pub mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod detokenizer;
pub mod embedding;
mod encoder;
mod error;
pub mod full_precision;
pub mod generate;
pub mod host;
pub mod interface;
pub mod kv;
pub mod load;
pub mod models;
pub mod rerank;
pub mod rope;
pub mod sampler;
pub mod speculation;
pub mod states;
pub mod stepper;
mod stop;
pub mod thinking;
pub mod tokenizer;
pub mod weights;

pub use batch::{Batch, Continuation, Piece, Ran};
pub use chat_template::{ChatTemplate, Message};
pub use cpu::{state_bytes, stepper_bytes};
pub use detokenizer::Detokenizer;
pub use encoder::{Encoder, Row};
pub use error::{Error, Result};
pub use generate::{Generated, Limits, Sequence, Stats, StopReason};
pub use interface::{
    ActivationChoice, Chunk, DeviceChoice, DeviceMemory, DraftLayer, DraftedBy, Drafter, Engine,
    EngineDescription, EngineKind, LoadOptions, Logits, LogitsWanted, Observer, Ordinals, Pages,
    Session, SessionSpec, Split, StepsAhead, Streams,
};
pub use load::{Eagle, Mtp, device, gpu, load, stepper};
pub use models::LayerWeights;
pub use nq_kernels::pages::KvType;
pub use nq_kernels::profile::OpTiming;
pub use nq_model::forward;
pub use sampler::{LogitBias, Sampler, SamplingParams, TokenLogprobs};
pub use speculation::{DraftModel, Speculation};
pub use states::{is_recurrent, pass_end, resting_points};
pub use stepper::{Head, Hidden, LayerStepper, ProductMoments};
pub use stop::StopTexts;
pub use tokenizer::Tokenizer;
