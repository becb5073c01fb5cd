//! How much memory a quantization takes: estimated before, measured after.

use crate::calibration::sampling_slots;
use crate::methods::Needs;
use crate::pipeline::SEQUENCE;
use crate::schemes::Schemes;
use nq_formats::{Checkpoint, ModelConfig, Weight};
use nq_runtime::models::qwen3::{EMBEDDING, HEAD};
use nq_runtime::{LayerWeights, LinearId, LinearKind};
use serde::Serialize;

/// What a run needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// Greatest resident memory, the mapped source included.
    pub peak: u64,
    /// Of it, pages of the memory-mapped source: they give way where memory is short.
    pub mapped: u64,
    /// Where the peak is reached.
    pub stage: &'static str,
    /// While text is sampled and quality measured, without the mapped source.
    pub running: u64,
    /// While layers are quantized, without the mapped source.
    pub quantizing: u64,
    /// The weight files to be written.
    pub file_bytes: u64,
}

/// What a process of this kind takes before it does anything.
const BASE: u64 = 24 << 20;

impl Estimate {
    /// For a run with `tokens` of calibration text, sampled from the model if `sampled`.
    pub fn new(
        checkpoint: &Checkpoint,
        schemes: &Schemes,
        needs: Needs,
        tokens: usize,
        sampled: bool,
    ) -> Self {
        let config = checkpoint.config();
        let dense = match LayerWeights::read(checkpoint.store(), config, 0) {
            Ok(layer) => match layer.linear(LinearKind::Q) {
                Weight::Dense(t) => t.dtype().size(),
                Weight::Quantized(_) => 2,
            },
            Err(_) => 2,
        };
        let source = checkpoint.store().file_bytes();
        let file_bytes = file_bytes(config, schemes, dense);
        let running = source + session(config, tokens, sampled).max(file_bytes);
        let quantizing = quantizing(config, needs, tokens);
        let (most, stage) = if running >= quantizing {
            (running, "running the whole model")
        } else {
            (quantizing, "quantizing a layer")
        };
        Estimate {
            peak: BASE + source + most,
            mapped: source,
            stage,
            running,
            quantizing,
            file_bytes,
        }
    }
}

/// Bytes of all tensors to be written; `dense` bytes an element where they are kept.
fn file_bytes(config: &ModelConfig, schemes: &Schemes, dense: usize) -> u64 {
    let ends = (config.vocab_size, config.hidden_size);
    let mut total = schemes.bytes(EMBEDDING, ends, dense);
    if !config.tie_word_embeddings {
        total += schemes.bytes(HEAD, ends, dense);
    }
    let norms = (2 * config.hidden_size + 2 * config.head_dim) * dense;
    for layer in 0..config.num_hidden_layers {
        total += norms as u64;
        for kind in LinearKind::ALL {
            let name = LinearId { layer, kind }.to_string();
            total += schemes.bytes(&name, kind.dims(config), dense);
        }
    }
    total + (config.hidden_size * dense) as u64
}

/// KV cache and scratch while text is sampled.
fn session(config: &ModelConfig, tokens: usize, sampled: bool) -> u64 {
    let length = SEQUENCE.min(config.max_position_embeddings);
    let sequences = if sampled { tokens.div_ceil(length) } else { 0 };
    let slots = sampling_slots(config, sequences, length);
    let kv = slots * length * 4 * config.num_hidden_layers * config.kv_dim();
    let row = 4 * (config.vocab_size + 4 * config.hidden_size + 3 * config.intermediate_size);
    (kv + slots * row) as u64
}

/// One layer in f32 and repacked, statistics of its inputs, the residual stream twice.
fn quantizing(config: &ModelConfig, needs: Needs, tokens: usize) -> u64 {
    let elements = |k: LinearKind| k.dims(config).0 * k.dims(config).1;
    let layer: usize = LinearKind::ALL.into_iter().map(elements).sum();
    let widest = LinearKind::ALL.map(|k| k.dims(config).1).into_iter().max();
    let widest = widest.unwrap_or(0);
    let largest = LinearKind::ALL.map(elements).into_iter().max().unwrap_or(0);
    let statistics = match needs {
        Needs::Hessian => {
            let moments: usize = LinearKind::INPUTS
                .map(|k| k[0].dims(config).1.pow(2))
                .into_iter()
                .sum();
            // The moments, then a copy, two f64 matrices and the factor of the widest.
            4 * moments + (4 + 8 + 8 + 4) * widest * widest
        }
        Needs::Squares | Needs::Nothing => 0,
    };
    let streams = 2 * 4 * tokens * config.hidden_size;
    // The layer as f32, and the error of its largest weight with its codes.
    let weights = 4 * layer + (4 + 4 + 1) * largest + layer;
    (statistics + streams + weights) as u64
}

/// The greatest resident memory of this process so far, in bytes; 0 where the system does
/// not say.
pub fn peak_rss() -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else {
        return 0;
    };
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
