//! The report of `nq quantize`, as it stands in JSON. Fields may be added, never renamed.

use nq_evals::EvalReport;
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
    /// Everything that was not done as asked, and why.
    pub fallbacks: Vec<String>,
    /// Every quantized weight.
    pub layers: Vec<LayerReport>,
    /// Measured quality against the source.
    pub quality: Option<EvalReport>,
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
}
