//! Reads compressed-tensors as vLLM's llm-compressor writes it: `pack-quantized` (4 and 8 bits) and
//! `int-quantized` (8 bits), and the floats that `floats` describes.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `X.weight_packed` | I32 `[out, ceil(in / pf)]` | along in, low bits first, stored as `q + 2^(bits-1)` |
//! | `X.weight` (int-quantized) | I8 `[out, in]` | signed |
//! | `X.weight_scale` | `[out, groups]`, or `[1]` for a whole tensor | |
//! | `X.weight_zero_point` | I32 `[ceil(out / pf), groups]`, packed along out; I8 `[out, groups]` | asymmetric only |
//! | `X.weight_g_idx` | I32 `[in]` | activation order by group |
//! | `X.weight_shape` | I64 or I32 `[2]` | |

use super::quantization::QuantizationConfig;
use super::rotation::Rotation;
use super::weight::{self, ImportedWeight};
use super::{Layout, in_word, listed_groups, open_with, per_word, shape_of, words};
use crate::account::{ACTIVATIONS, CACHE};
use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::left_over::LeftOver;
use crate::scheme::{AffineScheme, Bits, Group};
use crate::shards::Shards;
use crate::tensor::Tensor;
use nq_model::{DType, Dims, FLOATS};
use serde_json::Value;
use std::fmt;

/// The `quant_method` of this format.
pub(crate) const METHOD: &str = "compressed-tensors";

/// How the weights of one of the `config_groups` are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupScheme {
    bits: Bits,
    symmetric: bool,
    strategy: Strategy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strategy {
    Group(u32),
    Channel,
    Tensor,
}

impl GroupScheme {
    fn group(self) -> Group {
        match self.strategy {
            Strategy::Group(n) => Group::Size(n),
            Strategy::Channel | Strategy::Tensor => Group::Channel,
        }
    }
}

impl fmt::Display for GroupScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zeros = if self.symmetric { "without" } else { "with" };
        let groups = match self.strategy {
            Strategy::Group(n) => format!("groups of {n}"),
            Strategy::Channel => "a scale per row".into(),
            Strategy::Tensor => "one scale".into(),
        };
        let bits = self.bits.width();
        write!(
            f,
            "{bits} bits in {groups} {zeros} zero-points (symmetric {})",
            self.symmetric
        )
    }
}

struct CompressedTensors {
    /// The declared schemes; a weight's shapes tell which of them it has.
    schemes: Vec<GroupScheme>,
    /// True if some weights are declared as small floats.
    floats: bool,
    rotations: Vec<Rotation>,
}

/// Opens a checkpoint whose `quant_method` is `compressed-tensors`.
///
/// # Errors
/// [`crate::Error::Unsupported`], naming it, for a format, type or strategy that nq does not read;
/// [`crate::Error::Malformed`] for missing settings; otherwise errors of [`Shards::open`].
pub(crate) fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    const FORMATS: [&str; 5] = [
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "nvfp4-pack-quantized",
        "mixed-precision",
    ];
    let known = |s: &QuantizationConfig<'_>| match s.str("format")? {
        Some(f) if !FORMATS.contains(&f) => {
            let what = format!("compressed-tensors format {f}");
            let why =
                "nq reads pack-quantized, int-quantized, float-quantized and nvfp4-pack-quantized";
            Err(s.unsupported(what, why))
        }
        _ => Ok(()),
    };
    known(&settings)?;
    let mut left = Vec::new();
    let groups = settings.get("config_groups").and_then(Value::as_object);
    let Some(groups) = groups.filter(|g| !g.is_empty()) else {
        return Err(settings.malformed("config_groups", "an object of groups"));
    };
    // An empty object is what its library writes where nothing is sparse.
    if let Some(sparsity) = settings.get("sparsity_config")
        && sparsity.as_object().is_none_or(|s| !s.is_empty())
        && sparsity["format"].as_str() != Some("dense")
    {
        let what = format!("sparsity_config of format {}", sparsity["format"]);
        return Err(settings.unsupported(what, "nq reads weights that are kept whole"));
    }
    if settings.get("kv_cache_scheme").is_some() {
        let name = "config.json: quantization_config: kv_cache_scheme";
        left.push(LeftOver::new(name, CACHE));
    }
    let rotations = Rotation::read_all(&settings)?;
    let (mut schemes, mut floats) = (Vec::new(), false);
    for group in groups.values() {
        let group = settings.within(group);
        known(&group)?;
        for key in ["input_activations", "output_activations"] {
            if group.get(key).is_some() {
                let name = format!("config.json: quantization_config: {key}");
                left.push(LeftOver::new(name, ACTIVATIONS));
            }
        }
        if let Some(weights) = group.get("weights") {
            let weights = group.within(weights);
            match is_float(&weights)? {
                true => floats = true,
                false => schemes.push(scheme(&weights)?),
            }
            left.extend(weights.left_over(WEIGHT_RECORDS));
        } // else: activations or the cache alone
        left.extend(group.left_over(&["targets"]));
    }
    if schemes.is_empty() && !floats {
        return Err(settings.malformed("config_groups", "a group with weights"));
    }
    left.extend(settings.left_over(&[
        "global_compression_ratio",
        "ignore",
        "quantization_status",
        "version",
    ]));
    left.dedup();
    source.left_over = left;
    let layout = CompressedTensors {
        schemes,
        floats,
        rotations,
    };
    open_with(source, layout)
}

/// Keys of a group's weights that record how they were found, or concern other programs.
const WEIGHT_RECORDS: &[&str] = &[
    "actorder",
    "block_structure",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
];

/// True for weights in a small float that nq reads, false for integers.
fn is_float(weights: &QuantizationConfig<'_>) -> Result<bool> {
    if weights.bool("dynamic")?.unwrap_or(false) {
        return Err(
            weights.unsupported("weights with dynamic true".into(), "nq reads stored codes")
        );
    }
    if weights.str("type")? != Some("float") {
        return Ok(false);
    }
    let bits = weights.get("num_bits").and_then(Value::as_u64);
    let strategy = weights.str("strategy")?.unwrap_or("tensor");
    // The tensors' shapes tell the rest.
    for key in ["group_size", "symmetric", "block_structure"] {
        weights.get(key);
    }
    match (bits, strategy) {
        (Some(8), "tensor" | "channel" | "block") | (Some(4), "tensor_group") => Ok(true),
        _ => {
            let bits = bits.map_or("unknown".into(), |b| b.to_string());
            let what = format!("float weights of {bits} bits with strategy {strategy}");
            let why = "nq reads 8 bits by tensor, channel or block, and 4 by tensor_group (NVFP4)";
            Err(weights.unsupported(what, why))
        }
    }
}

fn scheme(weights: &QuantizationConfig<'_>) -> Result<GroupScheme> {
    if let Some(other) = weights.str("type")?.filter(|t| *t != "int") {
        return Err(
            weights.unsupported(format!("weights of type {other}"), "nq reads int and float")
        );
    }
    let strategy = match weights.str("strategy")? {
        Some("channel") => Strategy::Channel,
        Some("tensor") => Strategy::Tensor,
        Some("group") | None => match weights.group("group_size")? {
            Group::Size(n) => Strategy::Group(n),
            Group::Channel => Strategy::Channel,
        },
        Some(other) => {
            let what = format!("strategy {other}");
            return Err(weights.unsupported(what, "nq reads group, channel and tensor"));
        }
    };
    Ok(GroupScheme {
        bits: weights.bits("num_bits")?,
        symmetric: weights.bool("symmetric")?.unwrap_or(true),
        strategy,
    })
}

const PACKED: &str = ".weight_packed";
const SCALE: &str = ".weight_scale";
const ZERO: &str = ".weight_zero_point";
const GROUP_INDEX: &str = ".weight_g_idx";
const SHAPE: &str = ".weight_shape";

impl CompressedTensors {
    /// The declared scheme that matches the shapes of the tensors of `name`.
    fn declared(&self, shards: &Shards, name: &str, cols: usize) -> Result<GroupScheme> {
        let shape = |suffix: &str| Some(shards.get(&format!("{name}{suffix}"))?.shape().to_vec());
        let packed = shape(PACKED);
        let scale = shape(SCALE).unwrap_or_default();
        let asymmetric = shards.contains(&format!("{name}{ZERO}"));
        let fits = |s: &&GroupScheme| {
            let bits = match &packed {
                Some(p) => p.get(1) == Some(&cols.div_ceil(per_word(s.bits))),
                None => s.bits == Bits::B8,
            };
            let groups = match s.strategy {
                Strategy::Group(n) => scale.get(1) == Some(&cols.div_ceil(n as usize)),
                Strategy::Channel => scale.len() == 1 || scale.get(1) == Some(&1),
                Strategy::Tensor => scale.iter().all(|&d| d == 1),
            };
            bits && groups && s.symmetric != asymmetric
        };
        self.schemes.iter().find(fits).copied().ok_or_else(|| {
            let declared: Vec<String> = self.schemes.iter().map(ToString::to_string).collect();
            let expected = format!("tensors of a declared scheme, {}", declared.join(" or "));
            let zeros = if asymmetric { "with" } else { "without" };
            let found = format!("codes {packed:?} and scales {scale:?} {zeros} zero-points");
            shards.error(&format!("{name}{SCALE}"), expected, found)
        })
    }

    /// The zero-points of a weight, `[out, groups]`, if it has any.
    fn zeros(
        &self,
        shards: &Shards,
        name: &str,
        bits: Bits,
        [rows, groups]: [usize; 2],
    ) -> Result<Option<Vec<u8>>> {
        let zero = format!("{name}{ZERO}");
        if !shards.contains(&zero) {
            return Ok(None);
        }
        if !shards.contains(&format!("{name}{PACKED}")) {
            let zeros = shards.require(&zero, &[DType::I8], &[rows, groups])?;
            return Ok(Some(unsigned(&zeros)));
        }
        let pf = per_word(bits);
        let words = words(&shards.require(&zero, &[DType::I32], &[rows.div_ceil(pf), groups])?);
        let zero = |i: usize| {
            let (r, g) = (i / groups, i % groups);
            in_word(bits, words[r / pf * groups + g], r % pf)
        };
        Ok(Some((0..rows * groups).map(zero).collect()))
    }
}

impl Layout for CompressedTensors {
    fn format(&self) -> &'static str {
        METHOD
    }

    fn has_floats(&self) -> bool {
        self.floats
    }

    fn is_quantized(&self, shards: &Shards, name: &str) -> bool {
        let is_int = |t: Tensor| t.dtype() == DType::I8;
        shards.contains(&format!("{name}{PACKED}"))
            || shards.get(&format!("{name}.weight")).is_some_and(is_int)
    }

    fn parts(&self, shards: &Shards, name: &str) -> &'static [&'static str] {
        match shards.contains(&format!("{name}{PACKED}")) {
            true => &[PACKED, SCALE, ZERO, GROUP_INDEX, SHAPE],
            false => &[".weight", SCALE, ZERO, GROUP_INDEX, SHAPE],
        }
    }

    fn rotations(&self, name: &str) -> Vec<&Rotation> {
        self.rotations.iter().filter(|r| r.holds(name)).collect()
    }

    fn scales(&self) -> &'static str {
        SCALE
    }

    fn scheme(&self, shards: &Shards, name: &str) -> Option<AffineScheme> {
        let packed = format!("{name}{PACKED}");
        // The width of packed codes says nothing of the inputs in their last word.
        let dims = match shards.contains(&packed) {
            true => stated_shape(shards, &format!("{name}{SHAPE}")).ok()??,
            false => shape_of::<2>(shards, &format!("{name}.weight"))?
                .map(|n| n as i64)
                .into(),
        };
        let &[rows, cols] = &dims[..] else {
            return None;
        };
        let (rows, cols) = (usize::try_from(rows).ok()?, usize::try_from(cols).ok()?);
        let declared = self.declared(shards, name, cols).ok()?;
        let (bits, group) = (declared.bits, declared.group());
        let zeros = self.zeros(shards, name, bits, [rows, group.count(cols)]);
        Some(weight::scheme(bits, group, zeros.ok()?.as_deref()))
    }

    fn read(
        &self,
        shards: &Shards,
        name: &str,
        Dims { rows, cols }: Dims,
    ) -> Result<ImportedWeight> {
        let tensor = |suffix: &str| format!("{name}{suffix}");
        check_shape(shards, &tensor(SHAPE), Dims::new(rows, cols))?;
        let declared = self.declared(shards, name, cols)?;
        let (bits, group) = (declared.bits, declared.group());
        let groups = group.count(cols);
        let packed = shards.contains(&tensor(PACKED));
        let codes = if packed {
            let width = cols.div_ceil(per_word(bits));
            let words = shards.require(&tensor(PACKED), &[DType::I32], &[rows, width])?;
            // A row's bytes are already canonical, except for the padding of its last word.
            let (have, want) = (4 * width, bits.bytes(cols));
            if have == want {
                words.data().clone()
            } else {
                trim_rows(bits, words.data(), have, want, cols).into()
            }
        } else {
            let signed = shards.require(&tensor(".weight"), &[DType::I8], &[rows, cols])?;
            unsigned(&signed).into()
        };
        let scale_name = tensor(SCALE);
        let shape = match shards.get(&scale_name) {
            Some(t) if declared.strategy == Strategy::Tensor && t.len() == 1 => t.shape().to_vec(),
            Some(t) if groups == 1 && t.shape() == [rows] => vec![rows],
            _ => vec![rows, groups],
        };
        let mut scales = shards.require(&scale_name, &FLOATS, &shape)?.to_f32()?;
        if scales.len() == 1 {
            scales = vec![scales[0]; rows];
        }
        let zeros = self.zeros(shards, name, bits, [rows, groups])?;
        let g_idx = tensor(GROUP_INDEX);
        let g_idx = match shards.get(&g_idx) {
            // An index of -1 throughout means that there is none.
            Some(t) if t.data().iter().any(|b| *b != 0xFF) => {
                listed_groups(shards, &g_idx, cols, group)?
            }
            _ => None,
        };
        Ok(ImportedWeight {
            bits,
            group,
            codes,
            scales,
            zeros,
            g_idx,
        })
    }
}

/// Converts signed bytes to unsigned codes by adding 128.
fn unsigned(tensor: &Tensor) -> Vec<u8> {
    tensor.data().iter().map(|b| b ^ 0x80).collect()
}

/// Cuts rows of `have` bytes to the `want` bytes that their codes take.
fn trim_rows(bits: Bits, data: &[u8], have: usize, want: usize, cols: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() / have.max(1) * want);
    for row in data.chunks(have) {
        out.extend_from_slice(&row[..want]);
        if bits == Bits::B4
            && cols % 2 == 1
            && let Some(last) = out.last_mut()
        {
            *last &= 15;
        }
    }
    out
}

/// The shape that the file states for a weight before packing, in the tensor `name`.
fn stated_shape(shards: &Shards, name: &str) -> Result<Option<Vec<i64>>> {
    let Some(tensor) = shards.get(name) else {
        return Ok(None);
    };
    let bytes = tensor.data();
    let wide = || bytes.as_chunks::<8>().0.iter();
    let narrow = || bytes.as_chunks::<4>().0.iter();
    match tensor.dtype() {
        DType::I64 => Ok(Some(wide().map(|b| i64::from_le_bytes(*b)).collect())),
        DType::I32 => Ok(Some(
            narrow().map(|b| i32::from_le_bytes(*b).into()).collect(),
        )),
        other => Err(shards.error(name, "I64 or I32".into(), other.to_string())),
    }
}

/// Checks that shape.
fn check_shape(shards: &Shards, name: &str, Dims { rows, cols }: Dims) -> Result<()> {
    match stated_shape(shards, name)? {
        Some(values) if values != [rows as i64, cols as i64] => {
            let expected = format!("[{rows}, {cols}]");
            Err(shards.error(name, expected, format!("{values:?}")))
        }
        _ => Ok(()),
    }
}
