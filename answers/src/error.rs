//! The one error type of this crate.

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of an answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The prompt, the sampler or the device.
    #[error(transparent)]
    Runtime(#[from] nq_runtime::Error),
    /// A schema, a grammar or tools that no answer can be held to.
    #[error("format: {0}")]
    Format(String),
    /// The constraint on an answer failed while it was drawn.
    #[error("the answer's format: {0}")]
    Constraint(String),
}
