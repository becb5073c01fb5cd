//! State that a run needs after being killed, besides the staged weights.

use crate::allocation::Menu;
use crate::calibration::Sequences;
use crate::device_memory::SampledFrom;
use crate::error::Result;
use crate::report::{LayerReport, TableLoss};
use crate::schemes::Schemes;
use crate::stages::Took;
use crate::train::record::Tuning;
use nq_evals::KldStats;
use nq_formats::nq::Writer;
use nq_formats::{Scheme, hash};
use nq_model::ModelConfig;
use nq_model::names::EMBEDDING;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Schemes by weight name, where they differ from those requested.
pub(super) type Overrides = BTreeMap<String, Scheme>;

/// The state of a run.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct State {
    /// Calibration text, one string of ids per sequence.
    pub(super) calibration: Option<StoredText>,
    /// Held-out text.
    pub(super) held_out: Option<StoredText>,
    /// The model that text was sampled from.
    pub(super) sampled_from: SampledFrom,
    /// The candidates of each group of weights, if they were measured.
    pub(super) menus: Option<Vec<Menu>>,
    /// The source measured against itself, if that was done.
    pub(super) noise: Option<KldStats>,
    /// What rounded tables of n-grams cost in the model that was measured last.
    pub(super) table_loss: Option<TableLoss>,
    /// The models made and measured, in order.
    pub(super) attempts: Vec<Attempt>,
    /// The current set of steps.
    pub(super) set: usize,
    /// The overrides of its schemes; `None` before it is begun.
    pub(super) overrides: Option<Overrides>,
    /// Other sets that the run may return to.
    pub(super) kept: Vec<Kept>,
    /// Reports of finished steps, by name.
    pub(super) steps: BTreeMap<String, StepReport>,
    /// How long stages took so far.
    pub(super) took: BTreeMap<String, Took>,
    /// Tuning, once its schedule is chosen.
    #[serde(default)]
    pub(super) tuning: Option<Tuning>,
}

/// A whole model that was made and measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Attempt {
    /// Its schemes, where they differ from those requested.
    pub(super) overrides: Overrides,
    /// Bytes of all tensors.
    pub(super) bytes: u64,
    /// Mean KL divergence.
    pub(super) kld: f64,
    /// Share of positions at which the best token is the same.
    pub(super) same_top1: f64,
    /// Mean KL divergence before tuning, if that was measured and it was then tuned.
    #[serde(default)]
    pub(super) untuned: Option<f64>,
    /// Measured untuned and left so: tuning would not have been enough.
    #[serde(default)]
    pub(super) out_of_reach: bool,
}

/// Sequences as stored in the state.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredText {
    name: String,
    ids: Vec<String>,
}

/// The report of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct StepReport {
    pub(super) rows: Vec<LayerReport>,
    pub(super) fallbacks: Vec<String>,
    /// A hash of everything that the step depends on; under another key the staged step is invalid.
    #[serde(default)]
    pub(super) key: String,
}

/// A staged model with other schemes than the current one.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    /// Its set of steps.
    pub(super) set: usize,
    /// Its schemes, where they differ from those requested.
    pub(super) overrides: Overrides,
    /// Reports of its steps.
    pub(super) steps: BTreeMap<String, StepReport>,
    /// Its tuning.
    pub(super) tuning: Option<Tuning>,
}

impl StoredText {
    pub(super) fn new(sequences: &Sequences) -> Self {
        let join = |s: &Vec<u32>| {
            let words: Vec<String> = s.iter().map(u32::to_string).collect();
            words.join(" ")
        };
        StoredText {
            name: sequences.name.clone(),
            ids: sequences.ids.iter().map(join).collect(),
        }
    }

    pub(super) fn sequences(&self) -> Option<Sequences> {
        let parse = |s: &String| s.split(' ').map(|w| w.parse().ok()).collect();
        Some(Sequences {
            name: self.name.clone(),
            ids: self.ids.iter().map(parse).collect::<Option<_>>()?,
            images: Vec::new(),
        })
    }
}

/// Saves the state durably.
pub(super) fn save(writer: &Writer, state: &State) -> Result<()> {
    let value = serde_json::to_value(state).expect("string keys and finite numbers");
    Ok(writer.set_state(&value)?)
}

/// The step that stages the final norm, the embedding and the head.
pub(super) const ENDS: &str = "ends";

/// The step that stages an MTP layer.
pub(super) const MTP: &str = "mtp";

/// A hash of what the first `layers` layers depend on, besides the plan: the schemes of the
/// embedding and of these layers.
pub(super) fn key(config: &ModelConfig, schemes: &Schemes, layers: usize) -> String {
    let mut text = format!("{:?}", schemes.of(EMBEDDING));
    for layer in 0..layers {
        let of_layer: Vec<Scheme> = schemes.of_layer(config, layer).into_values().collect();
        text += &format!("{of_layer:?}");
    }
    hash::sha256_hex(text.as_bytes())
}

/// The step that stages layer `index`.
pub(super) fn step_name(index: usize) -> String {
    format!("layer-{index:03}")
}
