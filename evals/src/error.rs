//! The one error type of this crate.

use std::path::PathBuf;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a measurement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model could not be run.
    #[error(transparent)]
    Runtime(#[from] nq_runtime::Error),
    /// A kernel failed.
    #[error(transparent)]
    Kernel(#[from] nq_kernels::Error),
    /// A text or an image that cannot be read, with the reason.
    #[error("{0}")]
    Text(String),
    /// An invalid specification.
    #[error("{what}: expected {expected}, found {found}")]
    Spec {
        /// The part of the request.
        what: &'static str,
        /// Valid values.
        expected: String,
        /// The value given.
        found: String,
    },
    /// The text is shorter than one window.
    #[error(
        "text {text}: expected at least one window of {ctx} tokens, found {tokens} tokens; \
         give a longer text or a smaller context"
    )]
    TextTooShort {
        /// Name of the text.
        text: String,
        /// Its length in tokens.
        tokens: usize,
        /// Length of a window in tokens.
        ctx: usize,
    },
    /// A model's logits hold NaN or infinity.
    #[error(
        "the {role}'s logits at position {position} of window {window}: expected finite numbers, \
         found NaN or infinity; its weights or activations overflow"
    )]
    NotFinite {
        /// `model` or `reference`.
        role: &'static str,
        /// Window, counted from 0.
        window: usize,
        /// Position in the window, counted from 0.
        position: usize,
    },
    /// Figures computed from finite logits are not finite.
    #[error(
        "{what}: expected a finite number, found {found}{}",
        match layer {
            Some(l) => format!("; the first numbers that are not finite are in layer {l}"),
            None => String::new(),
        }
    )]
    ResultNotFinite {
        /// The figure.
        what: &'static str,
        /// Its value.
        found: f64,
        /// The first layer in which the input of a Linear or the layer's output is not finite; `None` if
        /// all are finite.
        layer: Option<usize>,
    },
    /// Reference log-probabilities would exceed their limit.
    #[error(
        "reference log-probabilities of {windows} windows: expected at most {limit} bytes, \
         found {needed} at 16 bits each; {fit} windows would fit"
    )]
    CacheTooLarge {
        /// Windows requested.
        windows: usize,
        /// Bytes they need at 16 bits a number.
        needed: u64,
        /// Bytes allowed.
        limit: u64,
        /// Windows that fit.
        fit: usize,
    },
    /// A file of kept log-probabilities is not what it should be.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Kept {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// A file could not be put into its place.
    #[error(transparent)]
    Format(#[from] nq_formats::Error),
    /// A report could not be written.
    #[error("{}: {cause}", path.display())]
    Write {
        /// The report's path.
        path: PathBuf,
        /// The error.
        cause: std::io::Error,
    },
    /// A plot could not be drawn.
    #[error("plot of {what}: {why}")]
    Plot {
        /// The quantity that it plots.
        what: &'static str,
        /// Why it failed.
        why: String,
    },
}
