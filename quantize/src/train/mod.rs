//! Training: tuning of a quantized model against the logits of the model it came from.
//!
//! The codes that a method leaves are the best it can do layer by layer. Here the whole
//! quantized model is trained, as a student, to give the unquantized one's logits: scales and
//! gains directly, codes through latent weights whose rounding the gradient passes straight
//! through (Bengio et al., arXiv 1308.3432). The text is the teacher's own, sampled anew for
//! every step, so that there is nothing to learn by heart; text that no step sees decides which
//! state is kept. The file's format does not change.
//!
//! The forward of a layer is the runtime's ([`nq_runtime::full_precision`]), whose tape the backward
//! in [`graph`] goes by; operations of its own are here for that and for sampling ([`sample`]).

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

/// What is trained has one MLP a layer.
pub(crate) fn no_experts() -> crate::Error {
    crate::Error::Request {
        what: "tuning",
        expected: "a dense model".into(),
        found: "a mixture of experts".into(),
    }
}
