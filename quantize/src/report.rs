//! The report of `nq quantize`, as it stands in JSON. Fields may be added, never renamed.

use crate::stages::Stage;
use nq_evals::{EvalReport, KldStats};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a quantization made and what it cost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuantizeReport {
    /// The folder written.
    pub out: PathBuf,
    /// File format.
    pub format: String,
    /// Method asked for.
    pub method: String,
    /// Bits asked for.
    pub bits: u32,
    /// Group size, or "channel".
    pub group_size: nq_formats::Group,
    /// `8 * tensor_bytes / parameters`, embedding and head included, a tied one once.
    pub bits_per_weight: f64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of the weight files, headers included.
    pub file_bytes: u64,
    /// Bytes of the source's weight files.
    pub source_bytes: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// Greatest resident memory of the process.
    pub peak_rss_bytes: u64,
    /// Greatest memory that was held on a GPU, without what its driver takes for itself; 0
    /// without one.
    #[serde(default)]
    pub peak_device_bytes: u64,
    /// What was announced of it before the work, tuning included.
    #[serde(default)]
    pub estimated_device_bytes: u64,
    /// What took the time, in the order of first occurrence.
    #[serde(default)]
    pub stages: Vec<Stage>,
    /// Everything that was not done as asked, and why.
    pub fallbacks: Vec<String>,
    /// Every quantized weight.
    pub layers: Vec<LayerReport>,
    /// Measured quality against the source.
    pub quality: Option<EvalReport>,
    /// The peak that was announced before the work.
    #[serde(default)]
    pub estimated_peak_bytes: u64,
    /// The positions where the model strays most from the source, worst first.
    #[serde(default)]
    pub worst_tokens: Vec<WorstToken>,
    /// Which scheme each group of weights got, where schemes were chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allocation: Vec<Choice>,
    /// What tuning did, where it was asked for and left its weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<TuningReport>,
    /// KL divergence of the source from itself, keys and values in FP16 against none rounded.
    #[serde(default)]
    pub self_noise: Option<KldStats>,
}

/// What end-to-end tuning did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TuningReport {
    /// Where, and what multiplied.
    pub device: String,
    /// Codes were tuned, not scales and gains alone.
    pub codes: bool,
    /// Steps done.
    pub steps: usize,
    /// Sequences of each.
    pub batch: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Mean KL divergence in nats on text that no step saw, before.
    pub held_out_before: f64,
    /// That of the state that was kept.
    pub held_out_after: f64,
}

/// A position where the model strays far from the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstToken {
    /// KL divergence in nats.
    pub kld: f64,
    /// The text up to the position.
    pub context: String,
    /// The token that follows in the text.
    pub target: String,
    /// The model's best token.
    pub model_top: String,
    /// The source's best token.
    pub reference_top: String,
}

impl QuantizeReport {
    /// The `n` weights with the greatest error at their output (or, where that is unknown, of
    /// their own), as `name (error)`.
    pub fn worst_layers(&self, n: usize) -> Vec<String> {
        let show = |l: &LayerReport| format!("{} ({:.2} %)", l.name, 100.0 * l.error());
        self.worst(n).into_iter().map(show).collect()
    }

    /// The same weights' rows.
    pub fn worst(&self, n: usize) -> Vec<&LayerReport> {
        let mut layers: Vec<&LayerReport> = self.layers.iter().collect();
        layers.sort_by(|a, b| b.error().total_cmp(&a.error()));
        layers.truncate(n);
        layers
    }
}

/// One quantized weight.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerReport {
    /// Its name.
    pub name: String,
    /// Bits of its codes (16: kept).
    pub bits: u32,
    /// Method that was used.
    pub method: String,
    /// `|W - Q|_F / |W|_F`.
    pub rel_error: f64,
    /// `|(W - Q) X|_F / |W X|_F` over the calibration's inputs, where they were gathered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error: Option<f64>,
}

impl LayerReport {
    /// The error at the output or, where that is unknown, of the weight.
    fn error(&self) -> f64 {
        self.output_error.unwrap_or(self.rel_error)
    }
}

/// A group's chosen scheme, as reports and records show it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The group.
    pub group: String,
    /// Its scheme, e.g. `int4 g32 asymmetric`.
    pub scheme: String,
    /// Bytes.
    #[serde(rename = "tensor_bytes", alias = "bytes")]
    pub bytes: u64,
    /// Predicted loss in nats of KL divergence.
    pub loss: f64,
}
