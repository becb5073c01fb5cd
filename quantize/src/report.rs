//! The report of `nq quantize` as written in JSON. Fields may be added, but never renamed.

use crate::stages::Stage;
use nq_evals::{EvalReport, KldStats};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Result and cost of a quantization.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuantizeReport {
    /// The folder written.
    pub out: PathBuf,
    /// File format.
    pub format: String,
    /// Method requested.
    pub method: String,
    /// What the codes are called: `4-bit mix`.
    #[serde(default)]
    pub codes: String,
    /// Bits requested, rounded up.
    pub bits: u32,
    /// Group size, or "channel", which a trellis has too.
    pub group_size: nq_formats::Group,
    /// `8 * tensor_bytes / parameters`, including embedding and head; tied ones count once.
    pub bits_per_weight: f64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of the weight files, including headers.
    pub file_bytes: u64,
    /// Bytes of the source's weight files.
    pub source_bytes: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// Peak resident memory of the process, in bytes.
    pub peak_rss_bytes: u64,
    /// Peak memory held on a GPU, in bytes, without the memory that its driver takes; 0 without a
    /// GPU.
    #[serde(default)]
    pub peak_device_bytes: u64,
    /// Estimate of `peak_device_bytes` before the work, including tuning.
    #[serde(default)]
    pub estimated_device_bytes: u64,
    /// Time of each stage, in the order of first occurrence.
    #[serde(default)]
    pub stages: Vec<Stage>,
    /// All deviations from the request, with their reasons.
    pub fallbacks: Vec<String>,
    /// Every quantized weight.
    pub layers: Vec<LayerReport>,
    /// Measured quality against the source.
    pub quality: Option<EvalReport>,
    /// Estimate of the peak memory before the work, in bytes.
    #[serde(default)]
    pub estimated_peak_bytes: u64,
    /// The positions at which the model differs most from the source, worst first.
    #[serde(default)]
    pub worst_tokens: Vec<WorstToken>,
    /// The scheme of each group of weights, if schemes were chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allocation: Vec<Choice>,
    /// Summary of tuning, if it was requested and its weights were kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<TuningReport>,
    /// KL divergence of the source from itself, with keys and values in FP16 and unrounded.
    #[serde(default)]
    pub self_noise: Option<KldStats>,
    /// The divergence by rounded tables of n-grams and that by the rest of the model, each measured without the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table_loss: Option<TableLoss>,
}

/// KL divergences from the source, of models of which one part alone is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableLoss {
    /// With the tables of n-grams alone rounded; `None` where the source is run layer by layer, from its own files.
    pub tables: Option<KldStats>,
    /// With all but the tables rounded.
    pub body: Option<KldStats>,
}

/// Summary of end-to-end tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TuningReport {
    /// The device, and the implementation of its products.
    pub device: String,
    /// True if codes were tuned, not only scales and gains.
    pub codes: bool,
    /// Steps done.
    pub steps: usize,
    /// Sequences per step.
    pub batch: usize,
    /// Tokens per sequence.
    pub length: usize,
    /// Mean KL divergence in nats before tuning, on text that no step used.
    pub held_out_before: f64,
    /// The same for the state that was kept.
    pub held_out_after: f64,
}

/// A position at which the model differs far from the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstToken {
    /// KL divergence in nats.
    pub kld: f64,
    /// The text up to the position.
    pub context: String,
    /// The next token of the text.
    pub target: String,
    /// The model's best token.
    pub model_top: String,
    /// The source's best token.
    pub reference_top: String,
}

impl QuantizeReport {
    /// The `n` weights with the greatest output error (or, where that is unknown, the greatest error
    /// of the weight), as `name (error)`.
    pub(crate) fn worst_layers(&self, n: usize) -> Vec<String> {
        let show = |l: &LayerReport| format!("{} ({:.2} %)", l.name, 100.0 * l.error());
        self.worst(n).into_iter().map(show).collect()
    }

    /// The rows of those weights.
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
    /// Bits of its codes (16: not quantized).
    pub bits: u32,
    /// Method used.
    pub method: String,
    /// `|W - Q|_F / |W|_F`.
    pub rel_error: f64,
    /// `|(W - Q) X|_F / |W X|_F` over the calibration's inputs, if they were gathered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error: Option<f64>,
}

impl LayerReport {
    /// The output error or, if that is unknown, the error of the weight.
    fn error(&self) -> f64 {
        self.output_error.unwrap_or(self.rel_error)
    }
}

/// The scheme chosen for a group, as shown in reports and records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Name of the group.
    pub group: String,
    /// Its scheme, e.g. `int4 g32 asymmetric`.
    pub scheme: String,
    /// Bytes of the group.
    #[serde(rename = "tensor_bytes", alias = "bytes")]
    pub bytes: u64,
    /// Predicted loss in nats of KL divergence.
    pub loss: f64,
}
