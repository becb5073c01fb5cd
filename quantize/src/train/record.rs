//! What a run and a file keep of a tuning.

use super::trainer::{Check, Settings};
use crate::report::TuningReport;
use serde::{Deserialize, Serialize};

/// What a tuning did, for the record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Names the schemes that were tuned under.
    pub key: String,
    /// Where.
    pub device: String,
    /// What decided the result; `None` if nothing was done.
    pub settings: Option<Settings>,
    /// Held-out KL divergence along the way.
    pub checks: Vec<Check>,
    /// Bytes that were planned on the device.
    pub device_bytes: u64,
    /// Finished: the staged weights are the tuned ones.
    pub done: bool,
    /// Why nothing was tuned, or what was not done as asked.
    pub fallback: Option<String>,
}

impl Tuning {
    /// What it did; `None` if it left the method's weights.
    pub fn report(&self) -> Option<TuningReport> {
        let (settings, last) = (self.settings.as_ref()?, self.checks.last()?);
        let held_out = self.checks.iter().map(|c| c.held_out);
        let done = self.done && self.fallback.is_none();
        done.then(|| TuningReport {
            device: self.device.clone(),
            codes: settings.codes,
            steps: last.step,
            batch: settings.batch,
            length: settings.length,
            held_out_before: self.checks[0].held_out,
            held_out_after: held_out.fold(f64::INFINITY, f64::min),
        })
    }
}
