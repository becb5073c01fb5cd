//! nq in a program: quantize a model, load it, talk to it, compare it with its source.
//!
//! ```no_run
//! use nq_llm::{Bits, Model, quantize};
//!
//! nq_llm::isolate_templates();
//! let made = quantize("assets/demo", "demo-int4", Bits::B4)?;
//! let model = Model::open("demo-int4")?;
//! let mut chat = model.chat()?;
//! let answer = chat.ask("Name a river.", |piece| print!("{piece}"))?;
//! let quality = model.compare(&Model::open("assets/demo")?, "A text to compare them on ...")?;
//! # let _ = (made, answer, quality);
//! # Ok::<(), nq_llm::Error>(())
//! ```
//!
//! Everything that a program needs is in this crate; a minor version before 1.0 may change it, a patch version does not.
//! The crates below it (`nq-model`, `nq-formats`, `nq-kernels`, `nq-runtime`, `nq-cpu`, `nq-f32`, `nq-cuda`, `nq-wgpu`, `nq-load`, `nq-evals`, `nq-quantize`, `nq-answers`, `nq-serve`) may change in
//! any version. The program `nq` is the feature `cli`: without it, this crate needs neither a terminal nor a server.

#![forbid(unsafe_code)]
#![allow(
    unreachable_pub,
    reason = "the modules of the program are private: nothing in them is the library's"
)]
#![cfg_attr(
    not(feature = "cli"),
    allow(
        dead_code,
        reason = "the program uses more of these modules than the library"
    )
)]

pub use nq_answers::{Answer, Call, End, Format, Piece, Prompt, ToolChoice};
pub use nq_evals::{Comparison, EvalReport, EvalSpec, Protocol};
pub use nq_formats::export::ExportFormat;
pub use nq_formats::{Bits, Group, Progress, TrellisScheme, Unit, Zeros};
pub use nq_quantize::{
    CalibrationSource, Codes, Effort, QualityLimits, QuantizeOptions, QuantizeReport, Recipe,
    TargetSize, TuneOptions, group_named,
};
pub use nq_runtime::chat_template::integers;
pub use nq_runtime::embedding::{DEFAULT_TASK, Purpose};
pub use nq_runtime::{
    ActivationChoice, DeviceChoice, KvType, LoadOptions, Message, SamplingChoices, SamplingParams,
    Stats, StopReason, TokenLogprobs,
};

pub use draft::DraftFrom;
pub use library::{
    AdapterFile, Chat, Embedder, Error, ErrorKind, Model, OpenOptions, QuantizeSource, Reranker,
    Result, quantize, quantize_with,
};
#[cfg(feature = "cli")]
pub use program::program;
pub use serde_json::Value;
pub use templates::{isolate_templates, isolate_templates_by, serve_templates};

mod adapters;
mod at_load;
mod demo;
mod draft;
mod library;
mod names;
mod templates;
mod written;

/// The examples of the page about programs.
#[cfg(doctest)]
#[doc = include_str!("../docs/library.md")]
struct Page;

// The program; it alone parses arguments, prints and draws progress.
#[cfg(feature = "cli")]
mod chat;
#[cfg(feature = "cli")]
mod cli;
#[cfg(feature = "cli")]
mod commands;
#[cfg(feature = "cli")]
mod fit;
#[cfg(feature = "cli")]
mod flags;
#[cfg(feature = "cli")]
mod heat;
#[cfg(feature = "cli")]
mod machine;
#[cfg(feature = "cli")]
mod model;
#[cfg(feature = "cli")]
mod program;
#[cfg(feature = "cli")]
mod sight;
#[cfg(feature = "cli")]
mod system;
#[cfg(feature = "cli")]
mod terminal;
#[cfg(feature = "cli")]
mod texts;
