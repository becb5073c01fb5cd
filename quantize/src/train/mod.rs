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
use nq_model::{Mixer, ModelConfig};

pub mod plan;
pub(crate) mod record;
pub(crate) mod sample;
pub(crate) mod strays;
#[cfg(test)]
mod tests;
pub mod trainer;
pub mod trellis;
pub mod values;

pub use plan::{Effort, TuneOptions};
pub use record::Tuning;

/// What keeps a model from being tuned, if anything does: training supports attention or a recurrence, and one MLP per
/// layer.
pub fn untrainable(c: &ModelConfig) -> Option<&'static str> {
    let blocks = c.architecture.kinds.iter().flat_map(|k| k.blocks);
    blocks.rev().find_map(|b| match b.hyper {
        Some(_) => Some("a model with several residual streams"),
        None => untrainable_mixer(&b.mixer),
    })
}

fn untrainable_mixer(mixer: &Mixer) -> Option<&'static str> {
    match mixer {
        Mixer::Attention(_) | Mixer::Delta(_) | Mixer::Mlp(_) => None,
        Mixer::Experts(_) => Some("a mixture of experts"),
        Mixer::Ngrams(_) => Some("a model with a table of n-grams"),
    }
}

/// The error for a model of which `found` keeps it from being tuned.
pub(crate) fn refused(found: &str) -> crate::Error {
    crate::Error::Request {
        what: "tuning",
        expected: "a dense model, whose layers have an MLP".into(),
        found: found.into(),
    }
}
