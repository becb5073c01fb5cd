//! Sensitivity: the measured cost of rounding each group of weights, as the KL divergence of the model
//! with that group alone rounded from the unrounded model.
//!
//! All variants run side by side through one pass over the layers: a group's variant branches
//! off the source's stream at its layer and continues through the layers after it, unrounded.
//! So each layer is read once, half of the work of whole runs is saved, and only one
//! layer is held at a time. Each group is rounded to one scheme, the probe; the cost of its other
//! schemes is in proportion to their output errors, `sum(E[x_j^2] (w_ij - q_ij)^2)`, since a
//! divergence is quadratic in small changes.
//!
//! Here the probe is rounded to nearest, and each group alone; a real run rounds by its method, and
//! all layers together. So losses are scaled by the share of the probe's output error that the method
//! leaves, `tr(E H E^T)` on some of its rows, and those of layers also by the ratio of the cost of
//! rounding all layers to the sum over the groups. The method is given the calibration text, as in
//! a real run, and its error is measured on the probing text: on its own text it would look better
//! than it is.

mod errors;
mod probe;
mod run;

use crate::allocation::{Candidate, Menu};
use crate::error::Result;
use crate::groups::WeightGroup;
use errors::Found;
use nq_formats::Unit;
use nq_model::ModelConfig;
use nq_runtime::{LayerStepper, models};
use probe::LOGITS;
pub(crate) use probe::Probe;
use run::SensitivityRun;

/// Most tokens of a window. The second half is scored.
const WINDOW: usize = 256;

/// Most multiplications of a measurement, counting the forwards of all variants.
const WORK: u64 = 40_000_000_000_000;

/// (number, length) of the windows to measure on: `tokens` tokens in all, if `WORK` allows, and
/// from 2 to 16 windows.
pub(crate) fn shape(config: &ModelConfig, groups: usize, tokens: usize) -> (usize, usize) {
    let length = WINDOW.min(config.max_position_embeddings);
    let window = config.trunk_parameters() as u64 / 2 * groups as u64 * length as u64;
    let n = (WORK / window.max(1)).min((tokens / length) as u64);
    let n = n.clamp(2, 16) as usize;
    (n, length)
}

/// Rows that go through a layer while a text of `tokens` is measured, and `calibration` tokens run for a method.
pub(crate) fn rows(config: &ModelConfig, tokens: usize, calibration: usize) -> u64 {
    // The source, the embedding's variant and that of all layers. Each layer runs the variants that branched off before
    // it, then those of its own groups.
    let mut variants = 3;
    let runs = config.layers().map(|layer| {
        variants += layer.products().len();
        variants
    });
    let runs: usize = runs.sum();
    (tokens * runs + calibration * config.num_hidden_layers) as u64
}

/// Weights whose ranges are searched while a weight `[rows, cols]` of a layer is measured: all once, and a sample of its rows
/// in the probe's scheme and in each of so many candidates.
pub(crate) fn fitted(rows: usize, cols: usize, candidates: usize) -> usize {
    cols * (rows + rows.min(errors::SAMPLE) * (1 + candidates))
}

impl Probe<'_> {
    /// Measures every group. Candidates whose groups do not fill a weight's rows are left out.
    ///
    /// # Errors
    /// Errors of reading and running the model; logits with NaN or infinity.
    pub(crate) fn menus(&self, stepper: &mut dyn LayerStepper) -> Result<Vec<Menu>> {
        let tokens = |text: &[Vec<u32>]| text.iter().map(Vec::len).sum();
        let calibration = tokens(self.calibration.unwrap_or_default());
        let work = rows(stepper.config(), tokens(self.text), calibration);
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

    /// Measurements of every group, and the ratio of the cost of rounding all layers together to the
    /// sum over their groups.
    fn run(&self, stepper: &mut dyn LayerStepper) -> Result<(Vec<Found>, f64)> {
        let config = stepper.config().clone();
        let embedding = models::embedding(self.store, &config)?;
        let mut run = SensitivityRun::new(self, stepper, &config, &embedding)?;
        for index in 0..config.num_hidden_layers {
            run.layer(index)?;
        }
        let result = run.finish(&embedding);
        embedding.release();
        result
    }
}

/// Bytes of the streams of all variants, and of the layers and the head besides.
pub(crate) fn bytes(config: &ModelConfig, groups: usize, tokens: usize) -> usize {
    let (n, length) = shape(config, groups, tokens);
    let stream = 4 * n * length * config.stream_width();
    let streams = (groups + 5) * stream; // with the source's own, all layers' and copies
    // The reference's logits, those of its first tile, and those of one variant.
    let logits = 3 * LOGITS.min(4 * config.vocab_size * length.div_ceil(2));
    let head = logits + 2 * config.vocab_size * config.hidden_size;
    streams + head
}
