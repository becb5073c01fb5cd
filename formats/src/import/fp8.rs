//! Reads block-wise FP8 as in the official Qwen3-FP8 checkpoints: `w = fp8 * scale_inv` per
//! block of `weight_block_size`, read as BF16, the type in which these models compute. Without blocks, as AutoFP8 and
//! vLLM write it, it is the FP8 of `super::floats`.
//!
//! | tensor | shape |
//! |---|---|
//! | `X.weight` | F8_E4M3 `[out, in]` |
//! | `X.weight_scale_inv` | F32 or BF16 `[ceil(out / 128), ceil(in / 128)]` |
//!
//! transformers keeps the experts of a layer in one tensor, which has no `.weight` in its name:
//!
//! | tensor | shape |
//! |---|---|
//! | `X` | F8_E4M3 `[experts, out, in]` |
//! | `X_scale_inv` | F32 or BF16 `[experts, ceil(out / 128), ceil(in / 128)]` |

use super::expanded::{ExpandedType, Expansion, open_with};
use super::modelopt::small_floats;
use super::quantization::QuantizationConfig;
use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::shards::Shards;
use crate::tensor::Tensor;
use half::bf16;
use nq_model::{DType, FLOATS, tensor_name};
use rayon::prelude::*;

/// The `quant_method` of this format.
pub const METHOD: &str = "fp8";

/// The suffix of the tensor that holds a weight's scales.
const SCALES: &str = ".weight_scale_inv";

/// The same for a tensor of all experts.
pub(crate) const STACK_SCALES: &str = "_scale_inv";

struct Fp8 {
    /// Rows and columns of a block.
    block: (usize, usize),
}

/// Opens a checkpoint whose `quant_method` is `fp8`.
///
/// # Errors
/// [`crate::Error::Unsupported`] for another float format;
/// otherwise errors of [`Shards::open`].
pub fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    if let Some(other) = settings.str("fmt")?.filter(|f| *f != "e4m3") {
        return Err(settings.unsupported(format!("FP8 format {other}"), "nq reads e4m3"));
    }
    const RECORDS: [&str; 4] = [
        "activation_scheme",
        "ignored_layers",
        "modules_to_not_convert",
        "scale_fmt",
    ];
    let Some(block) = settings.get("weight_block_size") else {
        source.left_over = settings.left_over(&RECORDS);
        return small_floats(source, METHOD);
    };
    let side = |i: usize| block.get(i)?.as_u64().filter(|n| (1..1 << 28).contains(n));
    let (Some(rows), Some(cols), None) = (side(0), side(1), block.get(2)) else {
        return Err(settings.malformed("weight_block_size", "two sizes above 0"));
    };
    source.left_over = settings.left_over(&RECORDS);
    let block = (rows as usize, cols as usize);
    open_with(source, Fp8 { block })
}

/// The value of an FP8 E4M3 number (OCP 8-bit floating point specification): sign, 4 exponent
/// bits with bias 7, 3 mantissa bits; no infinities, and NaN if all other bits are set.
pub fn e4m3(byte: u8) -> f32 {
    let mantissa = f32::from(byte & 7);
    let magnitude = match (byte >> 3) & 15 {
        15 if byte & 7 == 7 => f32::NAN,
        0 => mantissa / 512.0,
        e => (1.0 + mantissa / 8.0) * f32::powi(2.0, i32::from(e) - 7),
    };
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

impl Expansion for Fp8 {
    const FORMAT: &'static str = METHOD;
    const HELD: ExpandedType = ExpandedType::Bf16;

    fn is_expanded(&self, shards: &Shards, name: &str) -> bool {
        self.is_stack(shards, &tensor_name(name))
    }

    fn is_stack(&self, shards: &Shards, name: &str) -> bool {
        let tensor = shards.get(name);
        tensor.is_some_and(|t| t.dtype() == DType::F8E4M3)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        vec![tensor_name(name), format!("{name}{SCALES}")]
    }

    fn expand<const N: usize>(
        &self,
        shards: &Shards,
        name: &str,
        (rows, cols): (usize, usize),
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor> {
        let (down, across) = (rows.div_ceil(self.block.0), cols.div_ceil(self.block.1));
        let scale = format!("{name}{SCALES}");
        let scales = shards.require(&scale, &FLOATS, &[down, across])?;
        let names = (&tensor_name(name)[..], &scale[..]);
        let scales = (self.block, scales.to_f32()?);
        dequantize(shards, names, &[rows, cols], scales, dtype, encode)
    }

    fn stack(&self, shards: &Shards, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let &[experts, rows, cols] = shape else {
            return shards.floats(name, shape);
        };
        if !self.is_stack(shards, name) {
            return shards.floats(name, shape);
        }
        let blocks = [
            experts,
            rows.div_ceil(self.block.0),
            cols.div_ceil(self.block.1),
        ];
        let scale = format!("{name}{STACK_SCALES}");
        let scales = shards.require(&scale, &FLOATS, &blocks)?.to_f32()?;
        let encode = |v| bf16::from_f32(v).to_le_bytes();
        let (names, scales) = ((name, &scale[..]), (self.block, scales));
        dequantize(shards, names, shape, scales, DType::BF16, encode).map(Some)
    }
}

/// The FP8 tensor `[rows, cols]` or `[experts, rows, cols]` of the first name, times `scales` of the second, one for each
/// `block` (rows, columns) of a matrix, in elements of `N` bytes; `encode` converts an f32 to one.
///
/// # Errors
/// A missing or misshapen tensor; values or scales that are not finite.
pub(super) fn dequantize<const N: usize>(
    shards: &Shards,
    (name, scale_name): (&str, &str),
    shape: &[usize],
    (block, scales): ((usize, usize), Vec<f32>),
    dtype: DType,
    encode: impl Fn(f32) -> [u8; N] + Sync,
) -> Result<Tensor> {
    let tensor = shards.require(name, &[DType::F8E4M3], shape)?;
    let mut sides = shape.iter().rev().copied();
    let (cols, height) = (sides.next().unwrap_or(0), sides.next().unwrap_or(0));
    let (down, across) = (height.div_ceil(block.0), cols.div_ceil(block.1));
    if let Some(i) = scales.iter().position(|s| !s.is_finite()) {
        let found = format!("{} in block {}, {}", scales[i], i / across, i % across);
        return Err(shards.error(scale_name, "finite values".into(), found));
    }
    let table: Vec<f32> = (0..=255).map(e4m3).collect();
    if let Some(i) = tensor.data().iter().position(|b| b & 0x7F == 0x7F) {
        let found = format!("NaN in row {}, column {}", i / cols, i % cols);
        return Err(shards.error(name, "finite values".into(), found));
    }
    let mut bytes = vec![0; tensor.len() * N];
    bytes
        .par_chunks_mut(cols.max(1) * N)
        .enumerate()
        .for_each(|(r, out)| {
            let row = &tensor.data()[r * cols..(r + 1) * cols];
            let place = r / height * down + r % height / block.0;
            let scales = &scales[place * across..][..across];
            let values = row.iter().enumerate();
            for ((i, b), o) in values.zip(out.as_chunks_mut::<N>().0) {
                *o = encode(table[usize::from(*b)] * scales[i / block.1]);
            }
        });
    Tensor::new(dtype, shape.to_vec(), bytes.into())
}
