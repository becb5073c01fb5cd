//! Weights in small floats, as compressed-tensors (`float-quantized`, `nvfp4-pack-quantized`) and ModelOpt write them.
//! Which of them a weight is in is told by its tensors, since lists of exceptions name fused projections in many
//! ways.
//!
//! FP8: F8_E4M3 `X.weight` `[out, in]` times the float `X.weight_scale` of a tensor, a row, or a block of 128 x 128.
//! Read as BF16.
//!
//! NVFP4: values of FP4 (E2M1) in groups of 16 times an FP8 scale, and a float for the tensor by which
//! compressed-tensors divides and ModelOpt multiplies. Read as integers of 8 bits, twice the FP4 values.
//!
//! | | compressed-tensors | ModelOpt |
//! |---|---|---|
//! | U8 `[out, in / 2]`, the lower four bits first | `X.weight_packed` | `X.weight` |
//! | F8_E4M3 `[out, in / 16]` | `X.weight_scale` | `X.weight_scale` |
//! | F32 `[]` or `[1]` | `X.weight_global_scale` | `X.weight_scale_2` |

use super::fp8::{self, e4m3};
use super::weight::ImportedWeight;
use crate::blocks::FP4_VALUES;
use crate::error::Result;
use crate::scheme::{Bits, Group};
use crate::shards::Shards;
use crate::tensor::Tensor;
use half::bf16;
use nq_model::{DType, FLOATS, tensor_name};

/// The small float that a weight is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SmallFloat {
    /// FP8.
    Fp8,
    /// NVFP4 of compressed-tensors.
    PackedNvfp4,
    /// NVFP4 of ModelOpt.
    PlainNvfp4,
}

const SCALE: &str = ".weight_scale";

/// Rows and columns of a block of FP8 that has one scale.
const BLOCK: usize = 128;

impl SmallFloat {
    /// The kind of the weight `name`; `None` if it is in no small float.
    pub(super) fn of(shards: &Shards, name: &str) -> Option<SmallFloat> {
        let dtype = |suffix: &str| Some(shards.get(&format!("{name}{suffix}"))?.dtype());
        match (dtype(".weight_packed"), dtype(".weight")) {
            (Some(DType::U8), _) => Some(SmallFloat::PackedNvfp4),
            (None, Some(DType::U8)) => Some(SmallFloat::PlainNvfp4),
            (None, Some(DType::F8E4M3)) => Some(SmallFloat::Fp8),
            _ => None,
        }
    }

    /// The suffixes of the tensors that such a weight is read from.
    pub(super) fn parts(self) -> &'static [&'static str] {
        match self {
            SmallFloat::Fp8 => &[".weight", SCALE],
            SmallFloat::PackedNvfp4 => &[".weight_packed", SCALE, ".weight_global_scale"],
            SmallFloat::PlainNvfp4 => &[".weight", SCALE, ".weight_scale_2"],
        }
    }

    /// Outputs and inputs of an NVFP4 weight, by the shape of its codes.
    pub(super) fn dims(self, shards: &Shards, name: &str) -> Option<(usize, usize)> {
        match *shards.get(&format!("{name}{}", self.parts()[0]))?.shape() {
            [rows, bytes] => Some((rows, 2 * bytes)),
            _ => None,
        }
    }

    /// Reads an NVFP4 weight `[rows, cols]`.
    ///
    /// # Errors
    /// A missing or misshapen tensor, a group of other than 16 or 32 inputs, a scale of the tensor that is no positive
    /// number.
    pub(super) fn read(
        self,
        shards: &Shards,
        name: &str,
        (rows, cols): (usize, usize),
    ) -> Result<ImportedWeight> {
        let [codes, scale, global] = self.parts() else {
            unreachable!("NVFP4 weights have three tensors");
        };
        let [codes, scale, global] = [codes, scale, global].map(|s| format!("{name}{s}"));
        let bytes = shards.require(&codes, &[DType::U8], &[rows, cols.div_ceil(2)])?;
        let found = shards.get(&scale).map(|t| t.shape().to_vec());
        let group = match found.as_deref() {
            Some(&[_, n]) if n > 0 && n * 32 == cols => 32,
            _ => 16,
        };
        if !cols.is_multiple_of(group) {
            let expected = format!("inputs that {group} divides");
            return Err(shards.error(&codes, expected, format!("{cols} inputs")));
        }
        let groups = cols / group;
        let scales = shards.require(&scale, &[DType::F8E4M3], &[rows, groups])?;
        let whole = scalar(shards, &global)?;
        if !(whole.is_finite() && whole > 0.0) {
            return Err(shards.error(&global, "a number above 0".into(), whole.to_string()));
        }
        // Half of it, since codes are twice the values.
        let factor = match self {
            SmallFloat::PackedNvfp4 => 0.5 / whole,
            _ => 0.5 * whole,
        };
        let code = |bits: u8| FP4_VALUES[usize::from(bits)].cast_unsigned() ^ 0x80;
        let pairs = bytes.data().iter();
        let codes: Vec<u8> = pairs.flat_map(|b| [code(b & 15), code(b >> 4)]).collect();
        Ok(ImportedWeight {
            bits: Bits::B8,
            group: Group::Size(group as u32),
            codes: codes.into(),
            scales: scales.data().iter().map(|&b| e4m3(b) * factor).collect(),
            zeros: None,
            g_idx: None,
        })
    }
}

/// The only value of a tensor of one float.
fn scalar(shards: &Shards, name: &str) -> Result<f32> {
    let shape = match shards.get(name) {
        Some(t) if t.shape().is_empty() => vec![],
        _ => vec![1],
    };
    Ok(shards.require(name, &[DType::F32], &shape)?.to_f32()?[0])
}

/// An FP8 weight `[rows, cols]` in BF16, or exactly in F32.
///
/// # Errors
/// A missing or misshapen tensor, values that are not finite.
pub(super) fn fp8(
    shards: &Shards,
    name: &str,
    (rows, cols): (usize, usize),
    exactly: bool,
) -> Result<Tensor> {
    let (weight, scale) = (tensor_name(name), format!("{name}{SCALE}"));
    let blocks = [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
    let found = shards.get(&scale).map(|t| t.shape().to_vec());
    let (shape, block) = match found.as_deref() {
        Some(shape @ ([] | [1] | [1, 1])) => (shape.to_vec(), (rows, cols)),
        Some(shape) if *shape == blocks => (shape.to_vec(), (BLOCK, BLOCK)),
        // ModelOpt's, of which each block has dimensions of its own.
        Some(shape @ &[down, 1, across, 1]) if [down, across] == blocks => {
            (shape.to_vec(), (BLOCK, BLOCK))
        }
        Some(shape @ [n]) if *n == rows => (shape.to_vec(), (1, cols)),
        _ => (vec![rows, 1], (1, cols)),
    };
    let scales = shards.require(&scale, &FLOATS, &shape)?.to_f32()?;
    let names = (&weight[..], &scale[..]);
    let block = (block.0.max(1), block.1.max(1));
    let (dims, scales) = (&[rows, cols], (block, scales));
    if exactly {
        return fp8::dequantize(shards, names, dims, scales, DType::F32, f32::to_le_bytes);
    }
    let encode = |v| bf16::from_f32(v).to_le_bytes();
    fp8::dequantize(shards, names, dims, scales, DType::BF16, encode)
}
