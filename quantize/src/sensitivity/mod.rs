//! What rounding each group of weights costs, measured: the KL divergence of the model with
//! that group alone rounded from the model as it is.
//!
//! All variants run side by side through one pass over the layers: a group's variant branches
//! off the source's stream at its layer and goes on through the layers after it, unrounded.
//! So each layer is read once, half of the work of whole runs falls away, and no more than one
//! layer is held. Each group is rounded to one scheme, the probe; the cost of its other
//! schemes is in proportion to their output errors, `sum(E[x_j^2] (w_ij - q_ij)^2)`, since a
//! divergence is quadratic in small changes.
//!
//! The probe is rounded to nearest, and alone; a run rounds by its method, and all layers
//! together. So losses are scaled by what the method leaves of the probe's output error,
//! `tr(E H E^T)` on some of its rows, and those of layers also by what rounding all of them
//! costs against the sum over the groups alone. The method goes by the calibration text, as it
//! will, and its error is taken on the text to measure on: on its own text it would look better
//! than it is.

mod errors;
mod probe;
mod run;

use crate::allocation::{Candidate, Menu, WeightGroup};
use crate::error::Result;
use errors::Found;
use nq_formats::{ModelConfig, Unit};
use nq_runtime::{LayerStepper, models};
use probe::LOGITS;
pub use probe::Probe;
use run::Run;

/// Tokens of a window, at most. The second half is scored.
const WINDOW: usize = 256;

/// Multiplications that a measurement may take: the forwards of all variants.
const WORK: u64 = 40_000_000_000_000;

/// (number, length) of the windows to measure on: of `tokens` in all, if `WORK` allows as
/// many, and from 2 to 16.
pub fn shape(config: &ModelConfig, groups: usize, tokens: usize) -> (usize, usize) {
    let length = WINDOW.min(config.max_position_embeddings);
    let window = config.parameters() as u64 / 2 * groups as u64 * length as u64;
    let n = (WORK / window.max(1)).min((tokens / length) as u64);
    let n = n.clamp(2, 16) as usize;
    (n, length)
}

impl Probe<'_> {
    /// Rows that the progress will count.
    fn work(&self, config: &ModelConfig) -> u64 {
        let layers = config.num_hidden_layers;
        let tokens: usize = self.text.iter().map(Vec::len).sum();
        let per_layer = config.layer().products().len();
        let begin = 3; // the source, the embedding's variant and that of all layers
        // Each layer runs what branched off before it, then its own groups.
        let runs: usize = (0..layers).map(|l| begin + per_layer * l + per_layer).sum();
        let calibration = self.calibration.unwrap_or_default();
        let calibration: usize = calibration.iter().map(Vec::len).sum();
        (tokens * runs + calibration * layers) as u64
    }

    /// Measures every group. Candidates whose groups do not fill a weight's rows are left out.
    ///
    /// # Errors
    /// What reading and running the model report; logits that are no numbers.
    pub fn menus(&self, stepper: &mut dyn LayerStepper) -> Result<Vec<Menu>> {
        let work = self.work(stepper.config());
        self.progress
            .begin("measuring sensitivity", work, Unit::Tokens);
        let run = self.run(stepper);
        self.progress.end();
        let (found, together) = run?;
        let menu = |(group, found): (&WeightGroup, Found)| Menu {
            group: group.name.clone(),
            weights: group.weights.iter().map(|w| w.0.clone()).collect(),
            candidates: self
                .candidates
                .iter()
                .zip(&found.candidates)
                .filter(|(scheme, _)| group.fits(**scheme))
                .map(|(&scheme, error)| Candidate {
                    scheme,
                    bytes: group.bytes(scheme),
                    loss: found.unit(together) * error,
                })
                .collect(),
        };
        Ok(self.groups.iter().zip(found).map(menu).collect())
    }

    /// What is known of every group, and what rounding all layers together costs as a share
    /// of the sum over their groups.
    fn run(&self, stepper: &mut dyn LayerStepper) -> Result<(Vec<Found>, f64)> {
        let config = stepper.config().clone();
        let embedding = models::embedding(self.store, &config)?;
        let mut run = Run::new(self, stepper, &config, &embedding)?;
        for index in 0..config.num_hidden_layers {
            run.layer(index)?;
        }
        let result = run.finish(&embedding);
        embedding.release();
        result
    }
}

/// Bytes of the streams of all variants, and of what the layers and the head take beside.
pub fn bytes(config: &ModelConfig, groups: usize, tokens: usize) -> usize {
    let (n, length) = shape(config, groups, tokens);
    let stream = 4 * n * length * config.hidden_size;
    let streams = (groups + 5) * stream; // with the source's own, all layers' and copies
    // The reference's logits, those of its first tile and a variant's.
    let logits = 3 * LOGITS.min(4 * config.vocab_size * length.div_ceil(2));
    let head = logits + 2 * config.vocab_size * config.hidden_size;
    streams + head
}
