//! Memory of a quantization: estimated beforehand, measured afterwards.
//!
//! A run has three stages that never hold memory at the same time: the source samples text;
//! layers are quantized one by one; source and result are measured side by side. The steps of each
//! stage are counted on an account, and the largest of the three peaks counts.

use crate::calibration::{SAMPLING_ROWS, SEQUENCE, sampling_slots};
use crate::linalg::factor_bytes;
use crate::methods::Needs;
use crate::rounding::PIECE;
use crate::schemes::Schemes;
use crate::sensitivity;
use crate::tower::tower_bytes;
use nq_cpu::plan::{WeightSource, hold_model, hold_session, program_bytes};
use nq_cpu::stepper_bytes;
use nq_formats::{Checkpoint, Scheme, StoredWeight, Weight};
use nq_kernels::Account;
use nq_kernels::registry::WeightKind;
use nq_model::names::{self, EMBEDDING, Shape};
use nq_model::{DType, Dims, ModelConfig, NgramTable, Product};
use nq_runtime::weights::Kinds;
use nq_runtime::{KvType, LayerWeights, SessionSpec};
use serde::Serialize;

/// Memory and disk space that a run needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// Peak resident memory of the process.
    #[serde(rename = "peak_bytes")]
    pub peak: u64,
    /// The part of it that is mapped source files. Mapped pages are given back as soon as they have
    /// been read, except those of a model built into the program.
    #[serde(rename = "mapped_bytes")]
    pub mapped: u64,
    /// The stage with the peak.
    pub stage: &'static str,
    /// Peak while text is sampled or quality is measured, whichever is greater.
    #[serde(rename = "running_bytes")]
    pub running: u64,
    /// Peak while layers are quantized.
    #[serde(rename = "quantizing_bytes")]
    pub quantizing: u64,
    /// Size of the weight files to be written.
    pub file_bytes: u64,
}

/// The parts of a run that its memory depends on.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// Schemes to be written.
    pub schemes: &'a Schemes,
    /// True if the tower that sees images is to have 8-bit codes.
    pub vision_8: bool,
    /// Statistics that the method needs.
    pub needs: Needs,
    /// Number of calibration tokens.
    pub calibration: usize,
    /// Most sequences sampled at once.
    pub sampled: usize,
    /// Number of weight groups whose sensitivity is measured; 0 if it is not.
    pub groups: usize,
    /// Number of tokens that quality is measured on.
    pub eval_tokens: usize,
    /// Models run on a GPU, where second moments are too: only what is copied there passes through the
    /// host's memory.
    pub on_gpu: bool,
}

/// Memory given back by earlier stages that the allocator keeps in the arenas of the threads: the
/// measured excess over the sum of allocations, for models of 10 to 14 million parameters.
const KEPT: u64 = 26 << 20;

/// Most bytes of logits, of one model, that evaluation asks for at once.
const LOGITS: usize = 128 << 20;

/// Rows of one forward of the evaluation.
pub(crate) const ROWS: usize = 512;

impl Estimate {
    /// Estimates the quantization of `checkpoint`.
    pub fn new(checkpoint: &Checkpoint, work: Work<'_>) -> Self {
        let (c, dtype) = (checkpoint.config(), dense_type(checkpoint));
        let sampling = host_peak(|a| sample(a, c, &work, dtype));
        let quantizing = host_peak(|a| quantize(a, c, &work, dtype));
        let measuring = host_peak(|a| measure(a, c, &work, dtype));
        let stages = [
            (sampling, "sampling text"),
            (quantizing, "quantizing a layer"),
            (measuring, "measuring quality"),
        ];
        let (most, stage) = stages.into_iter().max().unwrap_or_default();
        let (program, mapped) = program_bytes(checkpoint);
        Estimate {
            peak: program + KEPT + mapped + most,
            mapped,
            stage,
            running: sampling.max(measuring),
            quantizing,
            file_bytes: file_bytes(checkpoint, work.schemes)
                + tower_bytes(checkpoint, work.vision_8),
        }
    }
}

/// Most bytes of the host's memory that `stage` holds.
fn host_peak(stage: impl FnOnce(&Account)) -> u64 {
    let account = Account::host();
    stage(&account);
    account.peak() as u64
}

/// The session in which calibration or evaluation runs its sequences.
pub(crate) fn session(c: &ModelConfig, slots: usize, max_rows: usize) -> SessionSpec {
    SessionSpec {
        slots,
        ctx: SEQUENCE.min(c.max_position_embeddings),
        max_rows,
        ..SessionSpec::default()
    }
}

/// Stage: the source samples text.
fn sample(a: &Account, c: &ModelConfig, work: &Work<'_>, dtype: DType) {
    if work.sampled == 0 {
        return;
    }
    let length = SEQUENCE.min(c.max_position_embeddings);
    let slots = sampling_slots(c, work.sampled, length, None);
    let spec = session(c, slots, slots.max(SAMPLING_ROWS));
    if work.on_gpu {
        return copy_to_gpu(a, c, dtype);
    }
    let source = |_: &str| WeightKind::Dense(dtype);
    let _model = hold_model(a, c, &source, WeightSource::Mapped, slots * length);
    let _session = hold_session(a, c, &spec, slots);
}

/// Stage: the source is measured against itself, then the result against the source.
fn measure(a: &Account, c: &ModelConfig, work: &Work<'_>, dtype: DType) {
    if work.on_gpu {
        return copy_to_gpu(a, c, dtype);
    }
    let spec = session(c, 1, ROWS);
    let scored = spec.ctx.div_ceil(2);
    let logits = (LOGITS / (4 * c.vocab_size)).clamp(1, scored);
    let model = |kinds: Kinds<'_>| hold_model(a, c, kinds, WeightSource::Mapped, spec.ctx);
    let session = || hold_session(a, c, &spec, logits);
    let _source = model(&|_| WeightKind::Dense(dtype));
    // The source's distributions are kept for two windows.
    drop((session(), a.hold(2 * 4 * scored * c.vocab_size)));
    let result = model(&|name| work.schemes.kind(name, dtype));
    drop((session(), session()));
    if work.schemes.tables.is_some() {
        // The source again, with rounded tables.
        drop(result);
        let tables = |name: &str| match NgramTable::part_of(name) {
            Some(_) => work.schemes.kind(name, dtype),
            None => WeightKind::Dense(dtype),
        };
        let _again = model(&tables);
        drop((session(), session()));
    }
}

/// A model is copied to a GPU: of its weights, the largest is read and packed at a time.
fn copy_to_gpu(a: &Account, c: &ModelConfig, dtype: DType) {
    let products = c.largest_layer().products().into_iter();
    let product = |p: &Product| p.linears.iter().map(|l| l.elements(c)).sum();
    let largest = products
        .map(product)
        .fold(c.vocab_size * c.hidden_size, usize::max);
    drop(a.hold(2 * dtype.size() * largest));
}

/// Stage: embedding and head are quantized, then the layers.
fn quantize(a: &Account, c: &ModelConfig, work: &Work<'_>, dtype: DType) {
    let spec = c.largest_layer();
    let (linears, products) = (spec.linears(), spec.products());
    let hessian = work.needs == Needs::Hessian;
    let if_hessian = |bytes: usize| if hessian { bytes } else { 0 };
    let if_moments_here = |bytes: usize| if work.on_gpu { 0 } else { if_hessian(bytes) };
    let values: usize = linears.iter().map(|l| l.elements(c)).sum();
    let layer = dtype.size() * values;
    let rounded = |name: &str, dims| work.schemes.kind(name, dtype).bytes(dims);
    let _stream = a.hold(4 * work.calibration * c.stream_width());

    // The embedding or head as read and as written. With moments, also a piece in f32, its
    // codes, its errors and their product with the moments, besides the moments and their factor.
    let (dims, n) = (Dims::new(c.vocab_size, c.hidden_size), c.hidden_size);
    let piece = 14 * dims.elements().min(PIECE);
    let end = dtype.size() * dims.elements() + rounded(EMBEDDING, dims);
    drop(a.hold(end + if_hessian(piece) + if_moments_here(factor_bytes(n))));
    // A part of a table of n-grams, likewise, and its codes before they are packed.
    for (name, dims) in nq_runtime::ngrams::parts(c).take(1) {
        let codes = work.schemes.tables.map_or(0, |_| dims.elements());
        drop(a.hold(dtype.size() * dims.elements() + rounded(&name, dims) + codes));
    }

    let of_product = |p: &&Product| 4 * p.shares(c) * p.inputs(c).pow(2);
    let moments = products.iter().map(of_product).sum();
    let _moments = a.hold(if_moments_here(moments));
    // A layer packed for running, besides its source.
    let running = if work.calibration > 0 && !work.on_gpu {
        stepper_bytes(c, KvType::F16)
    } else {
        0
    };
    drop(a.hold(2 * layer + running));

    // A layer as read, in f32, and as rounded so far, with the method's work on one weight.
    let packed: usize = linears.iter().map(|l| rounded(&l.name(0), l.dims(c))).sum();
    let _layer = a.hold(layer + 4 * values + packed);
    for linear in &linears {
        let scheme = work
            .schemes
            .of(&linear.name(0))
            .unwrap_or(work.schemes.linears);
        let (out, inputs) = linear.dims(c).pair();
        // A copy of the moments, freed like all but the factor before columns are rounded, which works on
        // row tiles of each thread.
        drop(a.hold(if_moments_here(4 * inputs.pow(2) + factor_bytes(inputs))));
        let codes = match scheme {
            // One byte each, and parameters of eight bytes a group.
            Scheme::Affine(s) => out * inputs + 8 * out * s.group.count(inputs),
            // The transformed weight and the values chosen for it, the transformed moments and their factor, and
            // the sequences in two orders.
            Scheme::Trellis(s) => {
                8 * out * inputs + if_moments_here(8 * inputs.pow(2)) + 2 * s.bytes(out, inputs)
            }
            Scheme::Exl3(_) => unreachable!("nq does not quantize to EXL3"),
        };
        // For the report, the weight's error and, with moments, its effect on outputs.
        drop(a.hold(codes + 4 * out * inputs + if_hessian(4 * out * inputs)));
    }
    drop(_layer);
    if work.groups > 0 {
        // All streams, with the source's layer and its rounded form.
        let widest = products.iter().map(|p| p.inputs(c)).max().unwrap_or(0);
        let streams = sensitivity::bytes(c, work.groups, work.eval_tokens);
        drop(a.hold(streams + if_hessian(factor_bytes(widest)) + 4 * layer));
    }
}

/// The type of the source's weights.
pub fn dense_type(checkpoint: &Checkpoint) -> DType {
    let layer = LayerWeights::read(checkpoint.store(), checkpoint.config(), 0);
    match layer.ok().and_then(|l| l.linears.into_values().next()) {
        Some(Weight::Dense(t)) => t.dtype(),
        _ => DType::BF16,
    }
}

/// Bytes of all tensors of the text model to be written. What is kept has the type that it is read as, which differs within a model: gains
/// of norms that the source holds less 1 are f32.
pub fn file_bytes(checkpoint: &Checkpoint, schemes: &Schemes) -> u64 {
    let (store, dense) = (checkpoint.store(), dense_type(checkpoint));
    let bytes = |(name, shape): (String, Shape)| match (shape, schemes.of(&name)) {
        (Shape::Matrix(out, inputs), Some(scheme)) => scheme.bytes(out, inputs),
        // Parts of a table are read one by one, those in FP8 as bf16.
        (Shape::Matrix(out, inputs), None) if NgramTable::part_of(&name).is_some() => {
            match store.rows(&name, Dims::new(out, inputs)) {
                Ok(StoredWeight::Canonical(weight)) => weight.bytes(),
                _ => out * inputs * dense.size(),
            }
        }
        (Shape::Matrix(out, inputs), None) => match store.matrix(&name, Dims::new(out, inputs)) {
            Ok(weight) => weight.bytes(),
            Err(_) => out * inputs * dense.size(),
        },
        (Shape::Vector(n), _) => n * store.vector(&name, n).map_or(dense, |t| t.dtype()).size(),
    };
    let parameters = names::parameters(checkpoint.config()).into_iter();
    parameters.map(bytes).sum::<usize>() as u64
}

/// The peak resident memory of this process so far, in bytes; 0 if the system does not say.
pub(crate) fn peak_rss() -> u64 {
    nq_runtime::host::peak_memory().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schemes::table_scheme;
    use nq_formats::Bits;
    use nq_model::Preset;

    /// With a GPU, 30B-A3B is quantized on a computer of 24 GB; a whole source does not fit there.
    #[test]
    fn models_on_a_gpu_take_no_memory_of_the_host() {
        let config = Preset::find("qwen3-30b-a3b").expect("a published shape");
        let (config, schemes) = (config.config(), Schemes::defaults(Bits::B4));
        let peaks = |on_gpu| {
            let work = Work {
                schemes: &schemes,
                vision_8: false,
                needs: Needs::Hessian,
                calibration: 64 * SEQUENCE,
                sampled: 64,
                groups: 0,
                eval_tokens: 8192,
                on_gpu,
            };
            [sample, measure, quantize]
                .map(|stage| host_peak(|a| stage(a, &config, &work, DType::BF16)))
        };
        assert!(peaks(true).into_iter().all(|bytes| bytes < 8 << 30));
        assert!(peaks(false)[0] > 56 << 30);
    }

    /// Of the whole shape with experts of about 3 bits, the table of n-grams, which is larger than many a memory, takes what its
    /// rows do that a text reads.
    #[test]
    fn tables_of_n_grams_are_no_part_of_memory() {
        let preset = Preset::find("qwen3.8-flash-next").expect("a published shape");
        let config = preset.config();
        let table = config.ngrams.clone().expect("it has one");
        let schemes = Schemes {
            tables: Some(table_scheme(Bits::B4, table.row_width()).into()),
            ..Schemes::defaults(Bits::B3)
        };
        let kinds = |name: &str| schemes.kind(name, DType::BF16);
        let held = |c: &ModelConfig| {
            host_peak(|a| drop(hold_model(a, c, &kinds, WeightSource::Mapped, 4096)))
        };
        let without = ModelConfig {
            ngrams: None,
            ..config.clone()
        };
        let (with, without) = (held(&config), held(&without));
        assert!((48 << 30..72 << 30).contains(&with), "{with}");
        let parts = nq_runtime::ngrams::parts(&config);
        let bytes: usize = parts.map(|(name, dims)| kinds(&name).bytes(dims)).sum();
        let more = with - without;
        assert!(8 * more < bytes as u64, "{more} of {bytes}");
        let bits = 8.0 * bytes as f64 / (320_001_536.0 * 160.0);
        assert!((4.5..4.75).contains(&bits), "{bits} bits");
    }
}
