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
    /// An image that cannot be read.
    #[error(transparent)]
    Image(#[from] nq_pictures::Error),
    /// What should be an image in a message, and is none.
    #[error("image: {0}")]
    NoImage(String),
    /// Images for a model, by its name, that reads text alone.
    #[error(
        "{0} reads text alone here: a model with a vision tower, such as Qwen/Qwen3.5-4B, sees images"
    )]
    Blind(String),
    /// A schema, a grammar or tools that no answer can be held to.
    #[error("format: {0}")]
    Format(String),
    /// The constraint on an answer failed while it was drawn.
    #[error("the answer's format: {0}")]
    Constraint(String),
}
