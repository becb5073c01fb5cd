//! What a run must know after being killed, beside the staged weights.

use crate::allocation::Menu;
use crate::calibration::Sequences;
use crate::device_memory::SampledFrom;
use crate::error::Result;
use crate::report::LayerReport;
use crate::schemes::Schemes;
use crate::train::record::Tuning;
use nq_evals::KldStats;
use nq_formats::names::EMBEDDING;
use nq_formats::nq::Writer;
use nq_formats::{AffineScheme, ModelConfig, hash};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Schemes by weight, where they are not those asked for.
pub(super) type Overrides = BTreeMap<String, AffineScheme>;

/// Where a run is.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct State {
    /// Calibration text, one string of ids for each sequence.
    pub(super) calibration: Option<Text>,
    /// Held-out text.
    pub(super) held_out: Option<Text>,
    /// What text was sampled from, if not from the source as it is.
    pub(super) sampled_from: SampledFrom,
    /// What can be chosen for each group of weights, if it was measured.
    pub(super) menus: Option<Vec<Menu>>,
    /// The source against itself, if it was measured.
    pub(super) noise: Option<KldStats>,
    /// What was made and measured, in order.
    pub(super) attempts: Vec<Attempt>,
    /// The set of steps at work in.
    pub(super) set: usize,
    /// The schemes that it is of; `None` before it is begun.
    pub(super) overrides: Option<Overrides>,
    /// Other sets, to be returned to.
    pub(super) kept: Vec<Kept>,
    /// Reports of finished steps, by name.
    pub(super) steps: BTreeMap<String, Step>,
    /// Tuning, once its schedule is chosen.
    #[serde(default)]
    pub(super) tuning: Option<Tuning>,
}

/// A whole model that was made and measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Attempt {
    /// Schemes that deviate from those asked for.
    pub(super) overrides: Overrides,
    /// Bytes of all tensors.
    pub(super) bytes: u64,
    /// Mean KL divergence.
    pub(super) kld: f64,
    /// Share of positions with the same best token.
    pub(super) same_top1: f64,
    /// Mean KL divergence before it was tuned, if it was measured and then tuned.
    #[serde(default)]
    pub(super) untuned: Option<f64>,
    /// Measured as the method made it, and left so: tuning could not have been enough.
    #[serde(default)]
    pub(super) out_of_reach: bool,
}

/// Sequences as they are kept in the state.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Text {
    name: String,
    ids: Vec<String>,
}

/// What a step reports.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Step {
    pub(super) rows: Vec<LayerReport>,
    pub(super) fallbacks: Vec<String>,
    /// Of everything that the step depends on; the staged step is of no use under another.
    #[serde(default)]
    pub(super) key: String,
}

/// What is staged of schemes other than those at work on.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    /// The set of steps.
    pub(super) set: usize,
    /// Schemes that deviate from those asked for.
    pub(super) overrides: Overrides,
    /// Reports of its steps.
    pub(super) steps: BTreeMap<String, Step>,
    /// Its tuning.
    pub(super) tuning: Option<Tuning>,
}

impl Text {
    pub(super) fn new(sequences: &Sequences) -> Self {
        let join = |s: &Vec<u32>| {
            let words: Vec<String> = s.iter().map(u32::to_string).collect();
            words.join(" ")
        };
        Text {
            name: sequences.name.clone(),
            ids: sequences.ids.iter().map(join).collect(),
        }
    }

    pub(super) fn sequences(&self) -> Option<Sequences> {
        let parse = |s: &String| s.split(' ').map(|w| w.parse().ok()).collect();
        Some(Sequences {
            name: self.name.clone(),
            ids: self.ids.iter().map(parse).collect::<Option<_>>()?,
        })
    }
}

/// Keeps the state, durably.
pub(super) fn save(writer: &Writer, state: &State) -> Result<()> {
    let value = serde_json::to_value(state).expect("string keys and finite numbers");
    Ok(writer.set_state(&value)?)
}

/// The step that stages the final norm, the embedding and the head.
pub(super) const ENDS: &str = "ends";

/// Names what the first `layers` layers depend on, besides the plan: the schemes of the
/// embedding and of these layers.
pub(super) fn key(config: &ModelConfig, schemes: &Schemes, layers: usize) -> Result<String> {
    let mut text = format!("{:?}", schemes.of(EMBEDDING));
    for layer in 0..layers {
        let grids = schemes.grids(config, layer)?;
        let schemes: Vec<AffineScheme> = grids.values().map(|g| g.scheme()).collect();
        text += &format!("{schemes:?}");
    }
    Ok(hash::sha256_hex(text.as_bytes()))
}

/// The step that stages layer `index`.
pub(super) fn step_name(index: usize) -> String {
    format!("layer-{index:03}")
}
