//! Measures quality and speed: perplexity, KL divergence, tokens per second; and writes
//! reports.
//!
//! KL divergence is computed only here; the guard of `nq-quantize` calls this crate.
//!
//! [`evaluate()`] measures perplexity, [`compare`] compares a model with a reference in lockstep,
//! [`ReferenceLogits`] compares several candidates with one pass of the reference. Work on rows of
//! logits is spread over the caller's rayon pool; results do not depend on its size.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.
//!
//! ```
//! use nq_evals::{EvalSpec, Protocol, evaluate};
//! use nq_formats::Checkpoint;
//! use nq_load::load;
//! use nq_runtime::{LoadOptions, Tokenizer};
//! use std::path::Path;
//!
//! let checkpoint = Checkpoint::open(Path::new("../assets/demo"))?;
//! let engine = load(checkpoint.config(), checkpoint.store(), &LoadOptions::default(), &())?;
//! let text = std::fs::read_to_string("../assets/demo-eval.txt")?;
//! let tokens = Tokenizer::from_files(checkpoint.files())?.encode(&text)?;
//! let spec = EvalSpec { max_windows: Some(2), ..EvalSpec::new(Protocol::Llama, 64, "demo-eval") };
//! let measured = evaluate(engine.as_ref(), &tokens, &spec, &())?;
//! assert_eq!(measured.report.windows, 2);
//! assert!(measured.report.ppl > 1.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod bench;
mod depth;
mod error;
mod evaluate;
mod images;
pub mod rank;
mod record;
mod reference;
pub mod render;
mod report;
mod rows;
mod softmax;
mod spread;
pub mod stats;
mod windows;

pub use depth::{DepthBucket, DepthComparison};
pub use error::{Error, Result};
pub use evaluate::{Evaluation, PairScore, Probability, WorstToken, compare, evaluate};
pub use images::{SeeingModel, SeenEvaluation, evaluate_seen};
pub use record::{RECORD_FORM, Record, RecordMachine, RecordModel};
pub use reference::{Precision, ReferenceLogits, self_noise};
pub use report::{
    BenchRow, Breakdown, Comparison, DraftRow, EvalReport, ExpertsRow, ImageTimes, KldStats, OpRow,
    Protocol,
};
pub use rows::kld_rows;
pub use spread::{Over, QuantileErrors, StandardErrors};
pub use windows::EvalSpec;
