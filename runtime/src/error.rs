//! The one error type of this crate.

use nq_formats::human_bytes;
use nq_kernels::pages::PAGE;
use std::path::PathBuf;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of loading a model and generating from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading a checkpoint failed.
    #[error(transparent)]
    Format(#[from] nq_formats::Error),
    /// A kernel failed.
    #[error(transparent)]
    Kernel(#[from] nq_kernels::Error),
    /// The context is full.
    #[error("the context of {capacity} tokens is full: {needed} are needed")]
    ContextFull {
        /// Positions that the cache has room for.
        capacity: usize,
        /// Positions needed.
        needed: usize,
    },
    /// A text has more tokens than anybody reads.
    #[error("expected a text of at most {most} tokens, found one of {at_least} or more")]
    TooLong {
        /// The tokens that were counted before its end.
        at_least: usize,
        /// The most.
        most: usize,
    },
    /// The pages for keys and values are used up.
    #[error(
        "keys and values: {free} of {pages} pages of {PAGE} tokens are free, {needed} more are needed"
    )]
    PagesFull {
        /// Pages needed in addition.
        needed: usize,
        /// Pages that no sequence uses.
        free: usize,
        /// All pages of the session.
        pages: usize,
    },
    /// A request does not fit the engine.
    #[error("{what}: expected {expected}, found {found}")]
    Request {
        /// Part of the request.
        what: &'static str,
        /// Values that fit.
        expected: String,
        /// Value given.
        found: String,
    },
    /// A tokenizer or chat template is unusable.
    #[error("{}: {what}: {why}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Tokenizer or chat template.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The caller that waited for a result has stopped waiting.
    #[error("interrupted")]
    Interrupted,
    /// The reference engine failed.
    #[error("candle: {why}")]
    Candle {
        /// Its message.
        why: String,
    },
    /// The logits do not define a distribution.
    #[error("logits: expected finite numbers, found {found}")]
    Logits {
        /// The first logit that is not finite, or a note that there is none.
        found: String,
    },
    /// Mask and biases exclude all tokens.
    #[error(
        "none of {vocab} tokens may follow: the token mask and the logit biases exclude every \
         one that the model does not"
    )]
    NoTokenAllowed {
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A requested device is absent or unusable.
    #[error("device {device}: {why}")]
    Device {
        /// The device.
        device: String,
        /// What is missing.
        why: String,
    },
    /// An engine does not support what was requested.
    #[error("engine {engine}: {what}: expected {expected}, found {found}")]
    Unsupported {
        /// The engine.
        engine: &'static str,
        /// Part of the model or request.
        what: &'static str,
        /// What it supports.
        expected: String,
        /// What was requested.
        found: String,
    },
    /// An allocation does not fit a device's memory.
    #[error(
        "{what} needs {}; {} are available",
        human_bytes(*needed), human_bytes(*available)
    )]
    Memory {
        /// Purpose of the allocation.
        what: &'static str,
        /// Its size in bytes.
        needed: u64,
        /// Bytes still available on the device.
        available: u64,
    },
    /// A model and its session do not fit a GPU's free memory.
    #[error(
        "the GPU has {} free, and {} are needed ({parts}): what fits is {help}",
        human_bytes(*free), human_bytes(*needed)
    )]
    DeviceMemory {
        /// Bytes of all parts together.
        needed: u64,
        /// What the bytes are for.
        parts: String,
        /// Bytes that the driver reports free.
        free: u64,
        /// Requests that would fit, as flags of the program.
        help: String,
    },
    /// The layers' output is finite, but the head's is not.
    #[error("logits are not finite: the head's weights or activations overflow")]
    LogitsNotFinite,
    /// Activations contain NaN or infinity.
    #[error("{what} of layer {layer} is not finite: the weights or activations overflow")]
    NotFinite {
        /// The activations that were checked.
        what: &'static str,
        /// The layer, counted from 0.
        layer: usize,
    },
}

impl Error {
    /// The error for a model with recurrences on an engine that has no kernels for them.
    pub fn no_recurrences(engine: &'static str) -> Self {
        Error::Unsupported {
            engine,
            what: "layers with recurrences (gated DeltaNet)",
            expected: "the CPU, which has kernels for them (--device cpu)".into(),
            found: "another device".into(),
        }
    }

    /// The error for a model whose residual has several streams on an engine that has no kernels for them.
    pub fn no_streams(engine: &'static str) -> Self {
        Error::Unsupported {
            engine,
            what: "layers with several residual streams (hyper-connections)",
            expected:
                "the CPU or one NVIDIA GPU, which have kernels for them (--device cpu or cuda:0)"
                    .into(),
            found: "another device".into(),
        }
    }

    /// The error for adapters beside a model's weights on a device that computes merged ones only.
    pub fn no_adapters(device: &str) -> Self {
        Error::Unsupported {
            engine: "nq",
            what: "adapters beside a model's weights",
            expected: "one GPU, the CPU (--device cpu), or the unquantized model, which --adapter FOLDER is merged into"
                .into(),
            found: device.into(),
        }
    }

    /// True for activations or logits that are not finite: an error of the sequence that they belong to.
    pub fn is_not_finite(&self) -> bool {
        matches!(
            self,
            Error::NotFinite { .. } | Error::LogitsNotFinite | Error::Logits { .. }
        )
    }
}
