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
//! This is a small part of what the crates below can do: `nq-formats`, `nq-runtime`, `nq-evals`, `nq-quantize`
//! and `nq-serve`, which this one exports under those names. Their interfaces change more often.

#![forbid(unsafe_code)]
#![allow(
    unreachable_pub,
    reason = "the modules of the program are private: nothing in them is the library's"
)]

pub use nq_evals::{Comparison, EvalReport, EvalSpec, Protocol};
pub use nq_formats::{Bits, Progress};
pub use nq_quantize::{QuantizeOptions, QuantizeReport};
pub use nq_runtime::embedding::Purpose;
pub use nq_runtime::{DeviceChoice, LoadOptions, Message, SamplingParams};

pub use nq_evals;
pub use nq_formats;
pub use nq_quantize;
pub use nq_runtime;
pub use nq_serve;

pub use library::{
    Answer, Chat, Embedder, Error, Model, Reranker, Result, quantize, quantize_with,
};
pub use program::program;
pub use templates::{isolate_templates, isolate_templates_by, serve_templates};

mod library;
mod names;

/// The examples of the page about programs.
#[cfg(doctest)]
#[doc = include_str!("../docs/library.md")]
struct Page;

// The program; it alone parses arguments, prints and draws progress.
mod at_load;
mod chat;
mod cli;
mod commands;
mod demo;
mod draft;
mod flags;
mod model;
mod program;
mod system;
mod templates;
mod terminal;
mod texts;
mod written;
