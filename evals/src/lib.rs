//! Quality and speed, measured: perplexity, KL divergence, tokens per second, and the
//! reports that state them.
//!
//! KL divergence is computed here alone; the guard of `nq-quantize` calls it.
//!
//! [`evaluate()`] measures perplexity, [`compare`] a model against a reference in lockstep,
//! [`ReferenceLogits`] several candidates against one pass of the reference. Work on rows of
//! logits is spread over the caller's rayon pool; results do not depend on its size.

#![forbid(unsafe_code)]

pub mod bench;
pub mod error;
pub mod evaluate;
pub mod reference;
pub mod render;
pub mod report;
pub mod rows;
pub mod softmax;
pub mod stats;
pub mod windows;

pub use error::{Error, Result};
pub use evaluate::{Evaluation, PairScore, WorstToken, compare, evaluate};
pub use reference::{Precision, ReferenceLogits, self_noise};
pub use report::{BenchRow, Comparison, EvalReport, KldStats, Protocol};
pub use rows::kld_rows;
pub use windows::EvalSpec;
