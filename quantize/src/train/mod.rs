//! Training: tunes a quantized model against the logits of the model it was made from.
//!
//! A method chooses the best codes it can, layer by layer. Here the whole quantized model, the
//! student, is trained to give the logits of the unquantized one, the teacher: scales and
//! gains directly, codes through latent weights whose rounding the gradient passes straight
//! through (Bengio et al., arXiv 1308.3432). The text is the teacher's own, sampled anew for
//! every step, so that there is nothing to memorize; text that no step uses decides which
//! state is kept. The file's format does not change.
//!
//! The forward of a layer is the runtime's ([`nq_f32`]), whose tape the backward
//! in [`graph`] uses; this module adds operations for the backward and for sampling (`sample`).

pub mod graph;
pub mod params;
pub mod plan;
pub(crate) mod record;
pub(crate) mod sample;
pub(crate) mod strays;
#[cfg(test)]
mod tests;
pub mod trainer;
pub mod trellis;
pub mod values;

pub(crate) use graph::refused;
pub use graph::untrainable;
pub use plan::{Effort, TuneOptions};
pub use record::Tuning;
