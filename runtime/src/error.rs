//! The one error type of this crate.

use std::path::PathBuf;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between a checkpoint and a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading a checkpoint failed.
    #[error(transparent)]
    Format(#[from] nq_formats::Error),
    /// A kernel refused.
    #[error(transparent)]
    Kernel(#[from] nq_kernels::Error),
    /// The context is full.
    #[error("the context of {capacity} tokens is full: {needed} are needed")]
    ContextFull {
        /// Positions the cache has room for.
        capacity: usize,
        /// Positions that were asked for.
        needed: usize,
    },
    /// A request to an engine does not fit it.
    #[error("{what}: expected {expected}, found {found}")]
    Request {
        /// Which part of the request.
        what: &'static str,
        /// What fits.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A tokenizer or chat template is unusable.
    #[error("{}: {what}: {why}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Tokenizer or chat template.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// The reference engine failed.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
    /// There is nothing to sample from.
    #[error("logits: expected finite numbers, found {found}")]
    Logits {
        /// The first that is not, or that there is none.
        found: String,
    },
    /// Numbers stopped being numbers.
    #[error("{what} of layer {layer} is not finite: the weights or activations overflow")]
    NotFinite {
        /// What was looked at.
        what: &'static str,
        /// The layer, counted from 0.
        layer: usize,
    },
}
