//! The one error type of this crate.

use nq_formats::human_bytes;
use nq_kernels::cpu::PAGE;
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
    /// The pages for keys and values are used up.
    #[error(
        "keys and values: {free} of {pages} pages of {PAGE} tokens are free, {needed} more are needed"
    )]
    PagesFull {
        /// Pages wanted.
        needed: usize,
        /// Pages that no sequence has.
        free: usize,
        /// All pages of the session.
        pages: usize,
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
    /// Whoever waited for a result no longer does.
    #[error("interrupted")]
    Interrupted,
    /// The reference engine failed.
    #[error("candle: {why}")]
    Candle {
        /// What it said.
        why: String,
    },
    /// There is nothing to sample from.
    #[error("logits: expected finite numbers, found {found}")]
    Logits {
        /// The first that is not, or that there is none.
        found: String,
    },
    /// Nothing is left to sample from.
    #[error(
        "none of {vocab} tokens may follow: the token mask and the logit biases exclude every \
         one that the model does not"
    )]
    NoTokenAllowed {
        /// Tokens of the vocabulary.
        vocab: usize,
    },
    /// A device that was asked for is absent or unusable.
    #[error("device {device}: {why}")]
    Device {
        /// The device.
        device: String,
        /// What is missing.
        why: String,
    },
    /// An engine does not do what was asked of it.
    #[error("engine {engine}: {what}: expected {expected}, found {found}")]
    Unsupported {
        /// The engine.
        engine: &'static str,
        /// Which part of the model or request.
        what: &'static str,
        /// What it does.
        expected: String,
        /// What was asked for.
        found: String,
    },
    /// Something does not fit a device's memory.
    #[error(
        "{what} needs {}; {} are available",
        human_bytes(*needed), human_bytes(*available)
    )]
    Memory {
        /// What was to be allocated.
        what: &'static str,
        /// Its bytes.
        needed: u64,
        /// Bytes that the device can still hand out.
        available: u64,
    },
    /// A model and its session do not fit a GPU's free memory.
    #[error(
        "the GPU has {} free, and {} are needed ({parts}): what fits is {help}",
        human_bytes(*free), human_bytes(*needed)
    )]
    DeviceMemory {
        /// Bytes of all of it.
        needed: u64,
        /// What they are for.
        parts: String,
        /// Bytes that the driver has free.
        free: u64,
        /// What would fit, as flags of the program.
        help: String,
    },
    /// The layers' output is finite, the head's is not.
    #[error("logits are not finite: the head's weights or activations overflow")]
    LogitsNotFinite,
    /// Numbers stopped being numbers.
    #[error("{what} of layer {layer} is not finite: the weights or activations overflow")]
    NotFinite {
        /// What was looked at.
        what: &'static str,
        /// The layer, counted from 0.
        layer: usize,
    },
}
