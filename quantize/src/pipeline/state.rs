//! What a run must know after being killed, beside the staged weights.

use crate::calibration::Sequences;
use crate::error::Result;
use crate::report::LayerReport;
use nq_formats::nq::Writer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where a run is.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct State {
    /// Calibration text, one string of ids for each sequence.
    pub(super) calibration: Option<Text>,
    /// Held-out text.
    pub(super) held_out: Option<Text>,
    /// Reports of finished steps, by name.
    pub(super) steps: BTreeMap<String, Step>,
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
