//! How much memory a quantization takes: estimated before, measured after.
//!
//! A run has three stages that never hold memory at the same time: the source samples text;
//! layers are quantized one by one; source and result are measured side by side. The peak is
//! that of the greediest.

use crate::calibration::{SAMPLING_ROWS, SEQUENCE, sampling_slots};
use crate::error::Result;
use crate::layers::PIECE;
use crate::methods::Needs;
use crate::schemes::Schemes;
use crate::sensitivity;
use nq_formats::models::LinearSpec;
use nq_formats::names::{EMBEDDING, HEAD};
use nq_formats::{Checkpoint, DType, Files, ModelConfig, Weight};
use nq_kernels::registry::WeightKind;
use nq_runtime::{KvType, LayerWeights, MemoryEstimate, SessionSpec, WeightSource, weight_kinds};
use serde::Serialize;

/// What a run needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// Greatest resident memory of the process.
    #[serde(rename = "peak_bytes")]
    pub peak: u64,
    /// Of it, the source's files as they are read, without what is copied from them. Mapped
    /// pages are given back as soon as they were read; a model built into the program stays.
    #[serde(rename = "mapped_bytes")]
    pub mapped: u64,
    /// Where the peak is reached.
    pub stage: &'static str,
    /// While text is sampled or quality measured, whichever takes more.
    #[serde(rename = "running_bytes")]
    pub running: u64,
    /// While layers are quantized.
    #[serde(rename = "quantizing_bytes")]
    pub quantizing: u64,
    /// The weight files to be written.
    pub file_bytes: u64,
}

/// What a run does, as far as memory depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// What is written.
    pub schemes: &'a Schemes,
    /// What the method must know.
    pub needs: Needs,
    /// Calibration tokens.
    pub calibration: usize,
    /// Sequences sampled at once, at most.
    pub sampled: usize,
    /// Groups of weights whose sensitivity is measured; 0 if it is not.
    pub groups: usize,
    /// Tokens that quality is measured on.
    pub eval_tokens: usize,
}

/// The program as far as it runs, its threads, and a tokenizer of a few thousand tokens.
const BASE: u64 = 22 << 20;

/// What the allocator keeps, in an arena of each thread, of the memory that earlier stages gave back:
/// so much more than the sum of what is allocated did models of 10 to 14 million parameters take.
const KEPT: u64 = 20 << 20;

/// Bytes that a tokenizer takes in memory for each of its file's.
const TOKENIZER: u64 = 9;

/// Bytes of the logits that evaluation asks for at once, of one model.
const LOGITS: usize = 128 << 20;

/// Rows of one forward of the evaluation or the layer stepper.
const ROWS: usize = 512;

impl Estimate {
    /// For quantizing `checkpoint`.
    pub fn new(checkpoint: &Checkpoint, work: Work<'_>) -> Self {
        let config = checkpoint.config();
        let dtype = dense_type(checkpoint);
        let file_bytes = file_bytes(config, work.schemes, dtype.size());
        let source = |_: &str| WeightKind::Dense(dtype);
        let result = |name: &str| work.schemes.kind(name, dtype);
        let length = SEQUENCE.min(config.max_position_embeddings);
        let memory = |kinds: &dyn Fn(&str) -> WeightKind, spec: SessionSpec, logits| {
            MemoryEstimate::new(config, kinds, WeightSource::Mapped, &spec, logits)
        };
        let sampling = match work.sampled {
            0 => 0,
            n => {
                let slots = sampling_slots(config, n, length, None);
                let spec = SessionSpec {
                    slots,
                    ctx: length,
                    pages: None,
                    kv: KvType::F16,
                    max_rows: slots.max(SAMPLING_ROWS),
                };
                memory(&source, spec, slots).peak()
            }
        };
        let spec = SessionSpec {
            slots: 1,
            ctx: length,
            pages: None,
            kv: KvType::F16,
            max_rows: ROWS,
        };
        let logits = (LOGITS / (4 * config.vocab_size)).clamp(1, length.div_ceil(2));
        let (a, b) = (memory(&source, spec, logits), memory(&result, spec, logits));
        let measuring = a
            .peak()
            .max(a.weights + b.peak())
            .max(a.running() + b.running());
        // The source against itself, its distribution kept for two windows.
        let noise = a.running() + 2 * 4 * length.div_ceil(2) * config.vocab_size;
        let measuring = measuring.max(noise);
        let running = sampling.max(measuring) as u64;
        let quantizing = quantizing(config, &work, dtype.size()) as u64;
        let (most, stage) = if quantizing > running {
            (quantizing, "quantizing a layer")
        } else if sampling > measuring {
            (running, "sampling text")
        } else {
            (running, "measuring quality")
        };
        let (program, mapped) = fixed(checkpoint);
        Estimate {
            peak: program + KEPT + mapped + most,
            mapped,
            stage,
            running,
            quantizing,
            file_bytes,
        }
    }
}

/// What running a model takes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Greatest resident memory of the process, loading included, once the context is full.
    pub peak: u64,
    /// Of it, keys and values. They take memory as the context fills.
    pub kv: u64,
}

/// What a process takes that loads `checkpoint`, quantized at load by `at_load` if given, and
/// runs it on the CPU in sessions of `spec`, which ask for the logits of one row at a time.
/// Reads the kind of every weight, which unpacks those of other tools' formats.
///
/// # Errors
/// A missing or misshapen tensor.
pub fn running(
    checkpoint: &Checkpoint,
    at_load: Option<&Schemes>,
    spec: &SessionSpec,
) -> Result<Running> {
    let config = checkpoint.config();
    let estimate = match at_load {
        Some(schemes) => {
            let dtype = dense_type(checkpoint);
            let kinds = |name: &str| schemes.kind(name, dtype);
            MemoryEstimate::new(config, &kinds, WeightSource::Made, spec, 1)
        }
        None => {
            let kinds = weight_kinds(config, checkpoint.store())?;
            let kinds = |name: &str| kinds[name];
            MemoryEstimate::new(config, &kinds, WeightSource::Mapped, spec, 1)
        }
    };
    let (program, mapped) = fixed(checkpoint);
    Ok(Running {
        peak: program + mapped + estimate.peak() as u64,
        kv: estimate.kv as u64,
    })
}

/// What every process that uses `checkpoint` takes: the program and the tokenizer; and the
/// files, where they are built into the program.
fn fixed(checkpoint: &Checkpoint) -> (u64, u64) {
    let mapped = match checkpoint.files() {
        Files::Embedded { files, .. } => files.iter().map(|f| f.1.len() as u64).sum(),
        _ => 0,
    };
    let tokenizer = match checkpoint
        .files()
        .get(nq_runtime::tokenizer::TOKENIZER_FILE)
    {
        Ok(Some(json)) => TOKENIZER * json.len() as u64,
        _ => 0,
    };
    (BASE + tokenizer, mapped)
}

/// The type of the source's weights.
pub(crate) fn dense_type(checkpoint: &Checkpoint) -> DType {
    let layer = LayerWeights::read(checkpoint.store(), checkpoint.config(), 0);
    match layer.ok().and_then(|l| l.linears.into_values().next()) {
        Some(Weight::Dense(t)) => t.dtype(),
        _ => DType::BF16,
    }
}

/// Bytes of all tensors to be written; `dense` bytes an element where they are kept.
pub fn file_bytes(config: &ModelConfig, schemes: &Schemes, dense: usize) -> u64 {
    let ends = (config.vocab_size, config.hidden_size);
    let mut total = schemes.bytes(EMBEDDING, ends, dense);
    if !config.tie_word_embeddings {
        total += schemes.bytes(HEAD, ends, dense);
    }
    let spec = config.layer();
    let norms: usize = spec.norms().iter().map(|n| n.len.of(config)).sum();
    for layer in 0..config.num_hidden_layers {
        total += (norms * dense) as u64;
        for linear in spec.linears() {
            total += schemes.bytes(&linear.name(layer), linear.dims(config), dense);
        }
    }
    total + (config.hidden_size * dense) as u64
}

/// The residual stream, and the greater of: the embedding or head on its way from the source
/// to its codes; a layer packed to be run, with what is gathered; a layer in f32, with the
/// method's work on its largest weight.
fn quantizing(config: &ModelConfig, work: &Work<'_>, dense: usize) -> usize {
    let (linears, products) = (config.layer().linears(), config.layer().products());
    let layer: usize = linears.iter().map(|l| l.elements(config)).sum();
    let stream = 4 * work.calibration * config.hidden_size;
    let gathered: usize = match work.needs {
        Needs::Hessian => (products.iter()).map(|p| 4 * p.inputs(config).pow(2)).sum(),
        Needs::Squares | Needs::Nothing => 0,
    };

    let ends = config.vocab_size * config.hidden_size;
    let end = dense * ends
        + work
            .schemes
            .bytes(EMBEDDING, (config.vocab_size, config.hidden_size), dense) as usize
        + match work.needs {
            // A piece in f32, its codes, its errors and their product with the moments, beside these
            // and their factor.
            Needs::Hessian => 14 * ends.min(PIECE) + 28 * config.hidden_size.pow(2),
            Needs::Squares | Needs::Nothing => 0,
        };

    let widths =
        config.hidden_size + 2 * config.q_dim() + 2 * config.kv_dim() + config.intermediate_size;
    let rows = if work.calibration > 0 { ROWS } else { 0 };
    // The packed layer beside its source, scratch, a copied piece of the stream and its keys
    // and values.
    let run =
        2 * dense * layer + rows * (4 * widths + 4 * config.hidden_size + 4 * config.kv_dim());

    let rounding = linears.iter().map(|linear| {
        let scheme = work.schemes.of(&linear.name(0));
        let scheme = scheme.unwrap_or(work.schemes.linears);
        let (out, inputs) = linear.dims(config);
        let n = out * inputs;
        // A code of one byte each, and parameters of eight a group.
        let rounded = n + 8 * out * scheme.group.count(inputs);
        let factoring = match work.needs {
            // A copy of the moments, two f64 matrices, the one that factoring them works in, and
            // the factor; all but this are gone when columns are rounded, on row tiles of each
            // thread.
            Needs::Hessian => (4 + 8 + 8 + 8 + 4) * inputs * inputs,
            _ => 0,
        };
        // The weight's error and, by moments, what that does to outputs: for the report.
        let reported = match work.needs {
            Needs::Hessian => 8 * n,
            Needs::Squares | Needs::Nothing => 4 * n,
        };
        factoring.max(rounded + reported)
    });
    let codes = |l: &&LinearSpec| work.schemes.bytes(&l.name(0), l.dims(config), dense) as usize;
    let packed: usize = linears.iter().map(codes).sum();
    let most = rounding.max().unwrap_or(0);
    // In f32, as read, and as rounded so far.
    let round = 4 * layer + dense * layer + packed + most;
    let widest = products.iter().map(|p| p.inputs(config)).max().unwrap_or(0);
    let factoring = match work.needs {
        Needs::Hessian => 20 * widest.pow(2),
        Needs::Squares | Needs::Nothing => 0,
    };
    let probing = match work.groups {
        0 => 0,
        groups => {
            let streams = sensitivity::bytes(config, groups, work.eval_tokens) + stream;
            // The source's layer, and as rounded.
            streams + gathered + factoring + 4 * dense * layer
        }
    };
    (stream + end.max(gathered + run.max(round))).max(probing)
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
