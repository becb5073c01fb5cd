//! Quality and speed, measured: perplexity, KL divergence, tokens per second, and the
//! reports that state them.
//!
//! KL divergence is computed here alone; the guard of `nq-quantize` calls it.

#![forbid(unsafe_code)]

pub mod report;

pub use report::{BenchRow, EvalReport, KldStats, Protocol};
