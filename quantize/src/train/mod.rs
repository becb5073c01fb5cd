//! Training: tunes a quantized model against the logits of the model it was made from.
//!
//! A method chooses the best codes it can, layer by layer. Here the whole quantized model, the
//! student, is trained to give the logits of the unquantized one, the teacher: scales and
//! gains directly, codes through latent weights whose rounding the gradient passes straight
//! through (Bengio et al., arXiv 1308.3432). The text is the teacher's own, sampled anew for
//! every step, so that there is nothing to memorize; text that no step uses decides which
//! state is kept. The file's format does not change.
//!
//! The forward of a layer is the runtime's ([`nq_runtime::full_precision`]), whose tape the backward
//! in [`graph`] uses; this module adds operations for the backward and for sampling ([`sample`]).

pub mod graph;
pub mod params;
pub mod plan;
pub mod record;
pub mod sample;
pub mod strays;
#[cfg(test)]
mod tests;
pub mod trainer;

pub use plan::{Effort, TuneOptions};
pub use record::Tuning;

/// The error for a mixture of experts: training supports one MLP per layer.
pub(crate) fn no_experts() -> crate::Error {
    crate::Error::Request {
        what: "tuning",
        expected: "a dense model".into(),
        found: "a mixture of experts".into(),
    }
}
