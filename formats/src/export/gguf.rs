//! Exports a checkpoint as one GGUF file, with tokenizer and chat template.

use super::engines;
use super::options::{ExportOptions, OTHERWISE};
use super::report::{Change, ExportReport, Exported};
use crate::checkpoint::Checkpoint;
use crate::durable::{check_space, parent};
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::gguf::affine::{self, Blocks};
use crate::gguf::order::{Heads, paired, pairs_of};
use crate::gguf::writer::{GgufPlan, TensorPlan};
use crate::gguf::{BlockType, ROPE_FACTORS, TABLE, encode, metadata, names};
use crate::progress::Progress;
use crate::scheme::{AffineScheme, Bits, Levels, Zeros};
use crate::stored::StoredWeight;
use crate::weight::{QuantizedWeight, Weight};
use half::f16;
use nq_model::names::{
    MIX_DOWN, MIX_UP, Shape, is_kept, layer_matrix, layer_vector, parameters, stack,
};
use nq_model::{
    DType, Dims, LinearKind, ModelConfig, NgramTable, OutputGate, RopeScaling, VectorKind,
    tensor_name,
};
use rayon::prelude::*;
use std::ops::Range;
use std::path::Path;

/// Elements per block of the types that canonical weights fit into.
const BLOCK: usize = 32;

/// Number of values dequantized and rounded at a time.
const CHUNK: usize = 1 << 22;

/// The type for rows that are not a whole number of blocks of `kind`.
fn for_width(kind: BlockType, cols: usize) -> BlockType {
    match (cols.is_multiple_of(kind.elements()), kind) {
        (true, kind) => kind,
        (false, _) if !cols.is_multiple_of(BLOCK) => BlockType::F16,
        (false, BlockType::Q4_K) => BlockType::Q5_0,
        (false, _) => BlockType::Q8_0,
    }
}

/// How a parameter is written to the file.
pub(super) struct ParameterPlan {
    pub(super) name: String, // Hugging Face; of several that a tensor holds, the first
    pub(super) shape: Shape,
    /// The rows that the tensor holds, if not all.
    pub(super) rows: Option<Range<usize>>,
    pub(super) kind: BlockType,
    pub(super) how: How,
    pub(super) from: String,
    pub(super) change: Change,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Copies the source's bytes.
    Copy,
    /// Reorders its codes.
    Repack,
    /// Dequantizes and rounds.
    Encode,
}

/// Writes `checkpoint` as the GGUF file `out`.
pub fn export(
    checkpoint: &Checkpoint,
    out: &Path,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<ExportReport> {
    if checkpoint.config().experts.is_some_and(|e| !e.normalized) {
        return Err(Error::Unsupported {
            path: out.into(),
            what: "norm_topk_prob false in GGUF".into(),
            why: "its readers divide the weights of a token's experts by their sum".into(),
        });
    }
    let untruncated = |s| {
        matches!(
            s,
            RopeScaling::Yarn {
                truncate: false,
                ..
            }
        )
    };
    if untruncated(checkpoint.config().rope.scaling) {
        return Err(Error::Unsupported {
            path: out.into(),
            what: "truncate false of YaRN in GGUF".into(),
            why: "its readers round the dimensions between which the stretch grows".into(),
        });
    }
    if let Some(d) = checkpoint
        .config()
        .delta
        .filter(|d| d.key_dim != d.value_dim)
    {
        return Err(Error::Unsupported {
            path: out.into(),
            what: format!(
                "key heads of {} and value heads of {} in GGUF",
                d.key_dim, d.value_dim
            ),
            why: "its readers take them to be equally wide".into(),
        });
    }
    if let Some(tables) = checkpoint
        .config()
        .ngrams
        .as_ref()
        .map(|n| n.layers.len())
        .filter(|n| *n > 1)
    {
        return Err(Error::Unsupported {
            path: out.into(),
            what: format!("{tables} tables of n-grams in GGUF"),
            why: "its files hold one".into(),
        });
    }
    let c = checkpoint.config();
    if c.architecture.sigmoid_gates && c.delta.is_some_and(|d| d.gate != OutputGate::Sigmoid) {
        return Err(Error::Unsupported {
            path: out.into(),
            what: "output_gate_type silu in GGUF".into(),
            why: "its readers gate recurrences of these models by a sigmoid".into(),
        });
    }
    let plans = plan(checkpoint, out, options)?;
    let mut file = GgufPlan::new();
    let name = checkpoint.files().root();
    let name = name.file_stem().map(|n| n.to_string_lossy().into_owned());
    let file_type = options.mix.file_type(|| most_common(&plans));
    metadata::describe_model(
        &mut file,
        checkpoint,
        name.as_deref().unwrap_or("model"),
        file_type,
    );
    metadata::describe_tokenizer(&mut file, checkpoint)?;
    if let Some(quantization) = checkpoint.store().quantization() {
        file.set("nq.source_quantization", quantization.to_string().as_str());
    }
    for p in &plans {
        let config = checkpoint.config();
        let taps = match layer_vector(&p.name).map(|v| v.kind) {
            Some(VectorKind::Conv) => config.delta.map(|d| d.conv),
            Some(VectorKind::NgramConv) => config.ngrams.as_ref().map(|n| n.taps),
            Some(VectorKind::Decay | VectorKind::TimeStep) | None => None,
        };
        let dims = match (stack(&p.name), p.shape, config.experts, taps) {
            (Some(_), Shape::Matrix(rows, cols), Some(e), _) => vec![e.count, rows / e.count, cols],
            (_, Shape::Matrix(1, cols), ..) => vec![cols],
            (_, Shape::Vector(len), _, Some(taps)) => vec![len / taps, taps],
            _ => p.shape.dims(),
        };
        file.add(stored_name(config, p), p.kind, dims)?;
    }
    let divisors = rope_divisors(checkpoint.config());
    if let Some(divisors) = &divisors {
        file.add(ROPE_FACTORS.into(), BlockType::F32, vec![divisors.len()])?;
    }
    check_space(&parent(out), file.file_bytes())?;
    let mut next = plans.iter();
    file.write(out, progress, &mut |tensor, sink| match next.next() {
        Some(plan) => write_parameter(checkpoint, plan, tensor, &mut |bytes| sink.write(bytes)),
        None => sink.write(bytemuck::cast_slice(divisors.as_deref().unwrap_or(&[]))),
    })?;
    let matrices = plans.iter().zip(file.tensors());
    let matrices = matrices.filter(|(p, _)| matches!(p.shape, Shape::Matrix(..)));
    let weights = matrices.map(|(p, t)| Exported {
        name: p.name.clone(),
        from: p.from.clone(),
        to: p.kind.name().into(),
        change: p.change,
        bytes: t.bytes(),
    });
    Ok(ExportReport {
        weights: weights.collect(),
        tensor_bytes: file.tensor_bytes(),
        file_bytes: file.file_bytes(),
        notes: vec![engines::GGUF.into()],
    })
}

/// The divisors of the rotary frequencies, which files of Llama's architecture have as a tensor; `None`
/// without scaling.
fn rope_divisors(c: &ModelConfig) -> Option<Vec<f32>> {
    if !matches!(c.rope.scaling, RopeScaling::Llama3 { .. }) {
        return None;
    }
    let frequency = |i: usize| c.rope.theta.powf(-2.0 * i as f64 / c.head_dim as f64);
    let divisor = |i| Some(c.rope.scaling.divisor(frequency(i))? as f32);
    (0..c.head_dim / 2).map(divisor).collect()
}

/// What a tensor of the file holds.
struct StoredPart {
    /// The parameter, or of several the first.
    name: String,
    /// Of all that it holds.
    shape: Shape,
    /// The rows of the parameter, if not all.
    rows: Option<Range<usize>>,
}

/// What tensors of the file hold of the parameters `all`: queries and key of an indexer apart, and a table of n-grams whole.
fn held(c: &ModelConfig, all: Vec<(String, Shape)>) -> Vec<StoredPart> {
    let (indexer, parts) = (c.indexer, c.ngrams.as_ref().map_or(1, |n| n.parts));
    let of_parameter = |(name, shape): (String, Shape)| {
        let whole = |shape| StoredPart {
            name: name.clone(),
            shape,
            rows: None,
        };
        let Shape::Matrix(rows, cols) = shape else {
            return vec![whole(shape)];
        };
        let kind = layer_matrix(&name).map(|l| l.kind);
        match (NgramTable::part_of(&name), kind, indexer) {
            (Some(0), ..) => vec![whole(Shape::Matrix(rows * parts, cols))],
            (Some(_), ..) => Vec::new(),
            (None, Some(LinearKind::IndexQk), Some(indexer)) => {
                let queries = indexer.heads * indexer.head_dim;
                let part = |held: Range<usize>| StoredPart {
                    name: name.clone(),
                    shape: Shape::Matrix(held.len(), cols),
                    rows: Some(held),
                };
                vec![part(0..queries), part(queries..rows)]
            }
            _ => vec![whole(shape)],
        }
    };
    all.into_iter().flat_map(of_parameter).collect()
}

/// The parameters that hold the rows of a tensor whose first one is `name`, with their dimensions: all parts of a table.
fn sources(c: &ModelConfig, name: &str, shape: Shape) -> Vec<(String, Dims)> {
    let (rows, cols) = match shape {
        Shape::Matrix(rows, cols) => (rows, cols),
        Shape::Vector(len) => (1, len),
    };
    let whole = |rows| vec![(name.to_owned(), Dims::new(rows, cols))];
    match (&c.ngrams, &c.indexer, layer_matrix(name).map(|l| l.kind)) {
        (Some(table), ..) if NgramTable::part_of(name).is_some() => {
            let dims = Dims::new(rows / table.parts, cols);
            let parts = table.parameters();
            parts.map(|(name, _)| (name, dims)).collect()
        }
        (_, Some(indexer), Some(LinearKind::IndexQk)) => {
            whole((indexer.heads + 1) * indexer.head_dim)
        }
        _ => whole(rows),
    }
}

/// The name of the tensor of a plan.
fn stored_name(c: &ModelConfig, plan: &ParameterPlan) -> String {
    if NgramTable::part_of(&plan.name).is_some() {
        return TABLE.into();
    }
    let stored = names::to_gguf(c.architecture, c.num_hidden_layers, &plan.name)
        .expect("every parameter of the model has a name");
    let stored = tensor_name(&stored);
    match &plan.rows {
        None => stored,
        Some(held) => names::index_names(&stored)[usize::from(held.start > 0)].clone(),
    }
}

/// True for the kept matrices of models whose residual has several streams, which readers take in any type.
fn is_of_streams(name: &str) -> bool {
    let kinds = [
        LinearKind::AttentionMixDown,
        LinearKind::AttentionMixUp,
        LinearKind::AttentionInject,
        LinearKind::MlpMixDown,
        LinearKind::MlpMixUp,
        LinearKind::MlpInject,
        LinearKind::IndexQk,
        LinearKind::NgramKey,
        LinearKind::NgramValue,
    ];
    let behind = [MIX_DOWN, MIX_UP].contains(&name) || NgramTable::part_of(name).is_some();
    behind || layer_matrix(name).is_some_and(|l| kinds.contains(&l.kind))
}

/// Chooses every parameter's type.
fn plan(
    checkpoint: &Checkpoint,
    out: &Path,
    options: &ExportOptions,
) -> Result<Vec<ParameterPlan>> {
    let (config, store) = (checkpoint.config(), checkpoint.store());
    let mut plans = Vec::new();
    let mut refused = Vec::new();
    let rounded = |kind, to| {
        let change = Change::Kept(Exactness::ValuesRounded(to));
        (kind, How::Encode, change)
    };
    for StoredPart {
        name,
        shape,
        rows: held,
    } in held(config, fused_rates(config, parameters(config)))
    {
        let Shape::Matrix(rows, cols) = shape else {
            plans.push(ParameterPlan {
                name,
                shape,
                rows: held,
                kind: BlockType::F32,
                how: How::Encode,
                from: String::new(),
                change: Change::Kept(Exactness::Exact),
            });
            continue;
        };
        let weight = match rates_of(&name) {
            None => {
                let (_, dims) = sources(config, &name, shape).swap_remove(0);
                store.stored(&name, dims)?
            }
            Some([b, _]) => store.stored(&b, Dims::new(rows / 2, cols))?,
        };
        if is_kept(&name) || rates_of(&name).is_some() {
            // Readers of this format expect F32 here, which holds every float exactly, but not of several streams.
            let own = own_type(&weight, cols).filter(|_| is_of_streams(&name));
            let exact = (BlockType::F32, How::Encode, Exactness::Exact);
            let (kind, how, exactness) = own.unwrap_or(exact);
            plans.push(ParameterPlan {
                name,
                shape,
                rows: held,
                kind,
                how,
                from: weight.scheme_name(),
                change: Change::Kept(exactness),
            });
            continue;
        }
        // Blocks of more than a head cannot be put into another order.
        let heads = columns_of(config, &name);
        let whole = |kind: BlockType| {
            (heads.as_ref()).is_none_or(|h| h.each().is_multiple_of(kind.elements()))
        };
        let own = own_type(&weight, cols).filter(|(kind, ..)| whole(*kind));
        let wanted = options
            .mix
            .kind(&name, config.num_hidden_layers, config.tie_word_embeddings)
            .map(|k| for_width(k, cols));
        let dense = matches!(weight, StoredWeight::Canonical(Weight::Dense(_)));
        let (kind, how, change) = match (own, wanted) {
            (Some((kind, how, exact)), None) => (kind, how, Change::Kept(exact)),
            (Some((kind, how, exact)), Some(w)) if kind == w => (kind, how, Change::Kept(exact)),
            (_, Some(w)) if w == BlockType::F32 => (w, How::Encode, Change::Kept(Exactness::Exact)),
            (_, Some(BlockType::F16)) if dense => rounded(BlockType::F16, DType::F16),
            (_, Some(BlockType::BF16)) if dense => rounded(BlockType::BF16, DType::BF16),
            (_, Some(w)) if dense => (w, How::Encode, Change::Quantized),
            (_, wanted) => {
                let kind = wanted.unwrap_or_else(|| nearest(&weight, cols));
                if !options.requantize {
                    refused.push(format!("{name} ({})", weight.scheme_name()));
                }
                (kind, How::Encode, Change::Requantized)
            }
        };
        plans.push(ParameterPlan {
            name,
            shape,
            rows: held,
            kind,
            how,
            from: weight.scheme_name(),
            change,
        });
    }
    match refused.as_slice() {
        [] => Ok(plans),
        [first, rest @ ..] => {
            let others = match rest.len() {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            Err(Error::Unsupported {
                path: out.into(),
                what: format!("{first}{others} in these GGUF types"),
                why: format!("no block holds the same numbers; {OTHERWISE}"),
            })
        }
    }
}

/// The type that holds a weight's numbers, and how to write it; `None` if no type does.
pub(super) fn own_type(weight: &StoredWeight, cols: usize) -> Option<(BlockType, How, Exactness)> {
    let exact = |kind, how| Some((kind, how, Exactness::Exact));
    let a = match weight {
        StoredWeight::GgufBlocks(b) => return exact(b.kind(), How::Copy),
        StoredWeight::Fp8(_) => {
            let rounded = Exactness::ValuesRounded(DType::BF16);
            return Some((BlockType::BF16, How::Encode, rounded));
        }
        StoredWeight::Canonical(Weight::Dense(t)) => {
            return match t.dtype() {
                DType::F32 => exact(BlockType::F32, How::Copy),
                DType::F16 => exact(BlockType::F16, How::Copy),
                DType::BF16 => exact(BlockType::BF16, How::Copy),
                _ => None,
            };
        }
        StoredWeight::Canonical(Weight::Quantized(QuantizedWeight::Affine(a))) => a,
        StoredWeight::Canonical(Weight::Quantized(
            QuantizedWeight::Trellis(_) | QuantizedWeight::Exl3(_),
        )) => return None,
    };
    let scheme = a.scheme();
    holds(
        scheme,
        Dims::new(a.out_features(), cols),
        a.g_idx().is_some(),
    )
    .ok()?;
    if let Some(kind) = affine::kind_of(scheme) {
        // Readers of blocks round no products of scales, where the canonical weight has f16.
        let change = match scheme.scales.is_half() {
            true => Exactness::Exact,
            false => Exactness::ScalesRounded(DType::F16),
        };
        return Some((kind, How::Repack, change));
    }
    match (scheme.bits, scheme.zeros) {
        (Bits::B4, Zeros::None) => exact(BlockType::Q4_0, How::Repack),
        (Bits::B8, Zeros::None) => exact(BlockType::Q8_0, How::Repack),
        (Bits::B4, Zeros::Offset) => exact(BlockType::Q4_1, How::Repack),
        (Bits::B4, Zeros::Integer) => {
            let groups = a.groups();
            let finite = |i| f16::from_f32(a.affine(i / groups, i % groups).1).is_finite();
            let all = (0..a.scales().len()).all(finite);
            let change = Exactness::ScalesRounded(DType::F16);
            all.then_some((BlockType::Q4_1, How::Repack, change))
        }
        (Bits::B8, Zeros::Offset) if a.codes().iter().all(|&q| q < 32) => {
            exact(BlockType::Q5_1, How::Repack)
        }
        (Bits::B5, Zeros::None) => exact(BlockType::Q5_0, How::Repack),
        (Bits::B5, Zeros::Offset) => exact(BlockType::Q5_1, How::Repack),
        _ => None,
    }
}

/// Checks that a block type can hold weights `[out, in]` of a scheme, with or without an activation
/// order; the error says why not. 8-bit codes with offsets fit if all are below 32 (Q5_1).
pub(super) fn holds(
    scheme: AffineScheme,
    Dims { cols, .. }: Dims,
    order: bool,
) -> Result<(), String> {
    if order {
        return Err("it has no activation order".into());
    }
    if affine::kind_of(scheme).is_some_and(|kind| cols.is_multiple_of(kind.elements())) {
        return Ok(());
    }
    if !scheme.group.size(cols).is_multiple_of(BLOCK) || !cols.is_multiple_of(BLOCK) {
        return Err(format!(
            "groups of {} in rows of {cols} are not whole blocks of {BLOCK}",
            scheme.group.size(cols)
        ));
    }
    if scheme.levels == Levels::Table {
        return Err("its blocks have tables of their own; even steps would fit".into());
    }
    match (scheme.bits, scheme.zeros) {
        (Bits::B4, _) | (Bits::B5 | Bits::B8, Zeros::None | Zeros::Offset) => Ok(()),
        (Bits::B8, _) => Err("its 8-bit blocks have no zero-points".into()),
        (Bits::B5, _) => Err("its 5-bit blocks have no zero-points; offsets or none fit".into()),
        (bits, _) => Err(format!(
            "it has no such blocks of {} bits; 4, 5 and 8 bits fit, and int6 g16 symmetric scales8/256",
            bits.width()
        )),
    }
}

/// The type to requantize to: with as many bits as the weight has.
fn nearest(weight: &StoredWeight, cols: usize) -> BlockType {
    let bits = match weight {
        StoredWeight::Canonical(Weight::Quantized(q)) => q.scheme().bits(),
        _ => 4.0,
    };
    let kind = match bits {
        bits if bits > 6.0 => BlockType::Q8_0,
        bits if bits > 4.0 => BlockType::Q6_K,
        _ => BlockType::Q4_K,
    };
    for_width(kind, cols)
}

pub(super) fn most_common(plans: &[ParameterPlan]) -> BlockType {
    let matrices = || {
        plans
            .iter()
            .filter(|p| matches!(p.shape, Shape::Matrix(..)))
    };
    let count = |kind| matrices().filter(|p| p.kind == kind).count();
    let most = matrices().map(|p| p.kind).max_by_key(|&k| count(k));
    most.unwrap_or(BlockType::F32)
}

/// Writes a parameter, its rows in the order that the architecture's files have.
pub(super) fn write_parameter(
    checkpoint: &Checkpoint,
    plan: &ParameterPlan,
    tensor: &TensorPlan,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let config = checkpoint.config();
    let Shape::Matrix(rows, _) = plan.shape else {
        return sink(bytemuck::cast_slice(&vector(checkpoint, plan)?));
    };
    let pairs = pairs_of(config.architecture, &plan.name);
    let heads = rows_of(config, &plan.name);
    if !pairs && heads.is_none() {
        return write_rows(checkpoint, plan, tensor, sink);
    }
    let mut all = Vec::with_capacity(tensor.bytes() as usize);
    write_rows(checkpoint, plan, tensor, &mut |bytes| {
        all.extend_from_slice(bytes);
        Ok(())
    })?;
    match heads {
        Some(heads) => sink(&heads.tiled(&all, all.len() / rows.max(1))),
        None => sink(&paired(&all, rows, config.head_dim)),
    }
}

/// The heads of a recurrence in the rows of a parameter, or in its columns, if a file of the architecture has
/// them in another order than the checkpoint.
fn rows_of(c: &ModelConfig, name: &str) -> Option<Heads> {
    reorders(c).then(|| Heads::of_rows(c, name)).flatten()
}

fn columns_of(c: &ModelConfig, name: &str) -> Option<Heads> {
    reorders(c).then(|| Heads::of_columns(c, name)).flatten()
}

fn reorders(c: &ModelConfig) -> bool {
    c.architecture.gguf_tiled && c.delta.is_some_and(|d| !d.tiled)
}

/// The values of a vector as files of the architecture have them.
fn vector(checkpoint: &Checkpoint, plan: &ParameterPlan) -> Result<Vec<f32>> {
    let (config, name) = (checkpoint.config(), &plan.name);
    let mut values = checkpoint
        .store()
        .vector(name, plan.shape.elements())?
        .to_f32()?;
    if layer_vector(name).is_some_and(|v| v.kind == VectorKind::Decay) {
        values.iter_mut().for_each(|v| *v = -v.exp());
    }
    Ok(match rows_of(config, name) {
        Some(heads) => heads.tiled(&values, 1),
        None => values,
    })
}

/// The parameters with `b` and `a` of each recurrence in one, where files of the architecture have them so.
fn fused_rates(c: &ModelConfig, all: Vec<(String, Shape)>) -> Vec<(String, Shape)> {
    if !c.architecture.fused_delta {
        return all;
    }
    let fused = |(name, shape): (String, Shape)| match (name.strip_suffix("in_proj_b"), shape) {
        (Some(start), Shape::Matrix(heads, cols)) => {
            Some((format!("{start}{RATES}"), Shape::Matrix(2 * heads, cols)))
        }
        _ if name.ends_with("in_proj_a") => None,
        _ => Some((name, shape)),
    };
    all.into_iter().filter_map(fused).collect()
}

/// The name of a matrix that holds `b` and `a` of a recurrence.
const RATES: &str = "in_proj_ba";

/// The names of `b` and `a`, if `name` is that of both.
fn rates_of(name: &str) -> Option<[String; 2]> {
    let start = name.strip_suffix(RATES)?;
    Some(["b", "a"].map(|part| format!("{start}in_proj_{part}")))
}

/// `b` and `a` in one matrix: for each key head, the rows of its value heads in the one and in the other.
fn write_rates(
    checkpoint: &Checkpoint,
    [b, a]: [String; 2],
    Dims { rows, cols }: Dims,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let dims = Dims::new(rows / 2, cols);
    let parts = [b, a].map(|name| checkpoint.store().stored(&name, dims));
    let [b, a] = parts;
    let (b, a) = (b?, a?);
    let shared = (checkpoint.config().delta).map_or(1, |d| d.value_heads / d.key_heads);
    let mut values = vec![0f32; cols];
    for first in (0..rows / 2).step_by(shared) {
        for part in [&b, &a] {
            for row in first..first + shared {
                part.dequantize_row(row, &mut values)?;
                sink(bytemuck::cast_slice(&values))?;
            }
        }
    }
    Ok(())
}

/// Writes a parameter, its rows in their usual order.
fn write_rows(
    checkpoint: &Checkpoint,
    plan: &ParameterPlan,
    tensor: &TensorPlan,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let (rows, cols) = match plan.shape {
        Shape::Vector(_) => return sink(bytemuck::cast_slice(&vector(checkpoint, plan)?)),
        Shape::Matrix(rows, cols) => (rows, cols),
    };
    if let Some(names) = rates_of(&plan.name) {
        return write_rates(checkpoint, names, Dims::new(rows, cols), sink);
    }
    let heads = columns_of(checkpoint.config(), &plan.name);
    let row_bytes = (tensor.bytes() / rows as u64) as usize;
    // Each row's bytes, whose blocks are within heads.
    let ordered = |bytes: &[u8], sink: &mut dyn FnMut(&[u8]) -> Result<()>| match &heads {
        None => sink(bytes),
        Some(heads) => {
            let unit = |row: &[u8]| heads.tiled_bytes(row, cols);
            let rows: Vec<u8> = bytes.chunks_exact(row_bytes).flat_map(unit).collect();
            sink(&rows)
        }
    };
    for (name, dims) in sources(checkpoint.config(), &plan.name, plan.shape) {
        let weight = checkpoint.store().stored(&name, dims)?;
        let wrap = |e: Error| e.in_tensor(checkpoint.files().root(), &name);
        let held = plan.rows.clone().unwrap_or(0..dims.rows);
        let bytes = held.start * row_bytes..held.end * row_bytes;
        match (plan.how, &weight) {
            (How::Copy, StoredWeight::GgufBlocks(b)) => ordered(&b.data()[bytes], sink)?,
            (How::Copy, StoredWeight::Canonical(Weight::Dense(t))) => {
                ordered(&t.data()[bytes], sink)?
            }
            (
                How::Repack,
                StoredWeight::Canonical(Weight::Quantized(QuantizedWeight::Affine(a))),
            ) => {
                let blocks = Blocks::new(a, plan.kind);
                let mut bytes = vec![0u8; held.len() * row_bytes];
                bytes
                    .par_chunks_mut(row_bytes)
                    .zip(held)
                    .for_each(|(out, row)| blocks.row(row, out));
                ordered(&bytes, sink)?;
            }
            _ => {
                let step = (CHUNK / cols).max(1);
                for start in held.clone().step_by(step) {
                    let encode = |row| -> Result<Vec<u8>> {
                        let mut values = vec![0f32; cols];
                        weight.dequantize_row(row, &mut values)?;
                        if let Some(heads) = &heads {
                            values = heads.tiled(&values, 1);
                        }
                        let mut out = Vec::with_capacity(row_bytes);
                        encode::encode_row(plan.kind, &values, &mut out)?;
                        Ok(out)
                    };
                    let end = (start + step).min(held.end);
                    let rows: Result<Vec<_>> = (start..end).into_par_iter().map(encode).collect();
                    for row in rows.map_err(wrap)? {
                        sink(&row)?;
                    }
                }
            }
        }
    }
    Ok(())
}
