//! What a document says.

use crate::evaluate::{Evaluation, Probability};
use crate::report::KldStats;

/// The content of a document.
pub struct Document<'a> {
    /// Name and version of the program that measured.
    pub program: String,
    /// The command that measured, quoted for a shell.
    pub command: String,
    /// Date in words.
    pub date: String,
    /// Description of the text.
    pub text: String,
    /// The reference, if any.
    pub reference: Option<Reference>,
    /// The models, in the order given.
    pub models: Vec<Section<'a>>,
    /// True if it shows quality by depth.
    pub by_depth: bool,
}

/// What the models of a document are compared with.
pub struct Reference {
    /// Its name.
    pub name: String,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Bytes of its tensors over its parameters, times 8.
    pub bits_per_weight: f64,
}

/// One model of a document.
pub struct Section<'a> {
    /// Its name.
    pub name: String,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Bytes of its tensors over its parameters, times 8.
    pub bits_per_weight: f64,
    /// Description of the engine and device.
    pub engine: String,
    /// Type that inputs of the Linears are rounded to.
    pub activations: String,
    /// The measurement.
    pub evaluation: &'a Evaluation,
    /// The positions at which it differs most from the reference.
    pub worst: Vec<WorstLine>,
    /// KL divergence of the reference from itself with other rounding, and in pieces of other sizes.
    pub self_noise: Option<KldStats>,
}

/// A worst position, as text.
#[derive(Clone, Debug)]
pub struct WorstLine {
    /// KL divergence in nats.
    pub kld: f64,
    /// Window, counted from 0.
    pub window: usize,
    /// Position in the window, counted from 0.
    pub position: usize,
    /// The text up to the position.
    pub context: String,
    /// The next token of the text.
    pub target: String,
    /// The reference's best token.
    pub reference_top: String,
    /// The model's best token.
    pub model_top: String,
    /// Probability of `target`.
    pub target_p: Probability,
    /// Probability of `reference_top`.
    pub reference_top_p: Probability,
    /// Probability of `model_top`.
    pub model_top_p: Probability,
}

impl WorstLine {
    /// Its tokens, in the order of the header, each with its probability according to the reference and to the model.
    pub fn tokens(&self) -> [(&str, String); 3] {
        let shown = |p: Probability| {
            let percent = |v: f32| match 100.0 * v {
                v if v < 0.95 => format!("{v:.1}"),
                v => format!("{v:.0}"),
            };
            format!("{} → {} %", percent(p.reference), percent(p.model))
        };
        [
            (&self.target, shown(self.target_p)),
            (&self.reference_top, shown(self.reference_top_p)),
            (&self.model_top, shown(self.model_top_p)),
        ]
    }
}
