//! Record of a tuning, for the run's state and the file.

use super::trainer::{Check, Settings};
use crate::report::TuningReport;
use serde::{Deserialize, Serialize};

/// Record of a tuning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Hash of the schemes that were tuned under.
    pub key: String,
    /// The device that did it.
    pub device: String,
    /// Settings that determined the result; `None` if nothing was done.
    pub settings: Option<Settings>,
    /// Held-out KL divergence along the way.
    pub checks: Vec<Check>,
    /// Bytes of device memory that were planned.
    pub device_bytes: u64,
    /// True if finished: the staged weights are the tuned ones.
    pub done: bool,
    /// Why nothing was tuned, or how it deviated from the request.
    pub fallback: Option<String>,
}

impl Tuning {
    /// Its summary for the report; `None` if the method's weights were kept.
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
