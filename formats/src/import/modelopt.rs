//! Reads what NVIDIA's ModelOpt exports: NVFP4 and FP8 weights beside unquantized ones. `floats`
//! has the layouts; which one a weight is in is told by its tensors.

use super::quantization::QuantizationConfig;
use super::weight::ImportedWeight;
use super::{Layout, open_with};
use crate::account::{ACTIVATIONS, CACHE};
use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::left_over::LeftOver;
use crate::scheme::AffineScheme;
use crate::shards::Shards;
use nq_model::Dims;
use serde_json::Value;

/// The `quant_method` of this format.
pub(crate) const METHOD: &str = "modelopt";

/// The algorithms whose weights are stored as small floats with scales and nothing else.
#[rustfmt::skip]
const ALGORITHMS: [&str; 6] = [
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION", "NVFP4", "W4A16_NVFP4",
];

/// Weights of which each is unquantized or in small floats, as its tensors show.
struct SmallFloats {
    format: &'static str,
}

/// Opens a checkpoint of such weights, whose `quant_method` is `format`.
pub(super) fn small_floats(source: Source, format: &'static str) -> Result<Checkpoint> {
    open_with(source, SmallFloats { format })
}

/// Opens a checkpoint whose `quant_method` is `modelopt`.
///
/// # Errors
/// [`crate::Error::Unsupported`], naming it, for another algorithm; otherwise errors of [`Shards::open`].
pub(crate) fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    let Some(algorithm) = settings.str("quant_algo")? else {
        return Err(settings.malformed("quant_algo", "the name of an algorithm"));
    };
    if !ALGORITHMS.contains(&algorithm.to_ascii_uppercase().as_str()) {
        let what = format!("ModelOpt quant_algo {algorithm}");
        let known = ALGORITHMS.join(", ");
        return Err(settings.unsupported(what, &format!("nq reads {known}")));
    }
    let mut left = settings.left_over(&[
        "config_groups",
        "exclude_modules",
        "group_size",
        "ignore",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "producer",
        "quantized_layers",
    ]);
    for key in ["kv_cache_quant_algo", "kv_cache_scheme"] {
        if settings.get(key).is_some() {
            let name = format!("config.json: quantization_config: {key}");
            left.push(LeftOver::new(name, CACHE));
        }
    }
    let groups = settings.get("config_groups").and_then(Value::as_object);
    let rounds = |group: &Value| group.get("input_activations").is_some_and(|a| !a.is_null());
    if groups.is_some_and(|groups| groups.values().any(rounds)) {
        let name = "config.json: quantization_config: input_activations";
        left.push(LeftOver::new(name, ACTIVATIONS));
    }
    source.left_over = left;
    small_floats(source, METHOD)
}

impl Layout for SmallFloats {
    fn format(&self) -> &'static str {
        self.format
    }

    fn has_floats(&self) -> bool {
        true
    }

    fn is_quantized(&self, _: &Shards, _: &str) -> bool {
        false
    }

    fn parts(&self, _: &Shards, _: &str) -> &'static [&'static str] {
        &[]
    }

    fn scales(&self) -> &'static str {
        ".weight_scale"
    }

    fn scheme(&self, _: &Shards, _: &str) -> Option<AffineScheme> {
        None
    }

    fn read(&self, shards: &Shards, name: &str, _: Dims) -> Result<ImportedWeight> {
        Err(shards.error(name, "NVFP4 or FP8".into(), "other codes".into()))
    }
}
