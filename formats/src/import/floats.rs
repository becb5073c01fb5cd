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
//!
//! The experts of a layer may be in one tensor of three dimensions, whose first is the expert. Its name and those of its
//! scales have no `.weight`; the scale of the tensor is one for all, one for each expert, or one for the gate and one for
//! the up projection of each.
//!
//! | | compressed-tensors | ModelOpt | or |
//! |---|---|---|---|
//! | U8 `[experts, out, in / 2]`; FP8 `[experts, out, in]` | `X_packed` (FP8: `X`) | `X` | `X` |
//! | F8_E4M3 `[experts, out, in / 16]`; FP8: of an expert, a row or a block | `X_scale` | `X_weight_scale` | `X_scale` |
//! | F32 `[]`, `[1]`, `[experts]` or `[experts, 2]` | `X_global_scale` | `X_weight_scale_2` | `X_scale_2` |

use super::weight::ImportedWeight;
use crate::blocks::FP4_VALUES;
use crate::e4m3::e4m3;
use crate::error::Result;
use crate::experts::PACKED_STACK;
use crate::scheme::{AffineScheme, Bits, Group, Levels, Zeros};
use crate::shards::Shards;
use crate::tensor::Tensor;
use crate::weight::{AffineWeight, GroupValues, Parts};
use half::{bf16, f16};
use nq_model::{DType, Dims, FLOATS};
use rayon::prelude::*;

/// How a weight, or those of all experts of a layer, is stored in a small float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SmallFloat {
    /// What the names of its tensors end in: codes, scales, and for NVFP4 the scale of the whole.
    parts: &'static [&'static str],
    /// The scale of the whole divides.
    divided: bool,
}

const fn nvfp4(parts: &'static [&'static str; 3], divided: bool) -> SmallFloat {
    SmallFloat { parts, divided }
}

const fn fp8(parts: &'static [&'static str; 2]) -> SmallFloat {
    let divided = false;
    SmallFloat { parts, divided }
}

const FORMS: [SmallFloat; 8] = [
    nvfp4(
        &[".weight_packed", ".weight_scale", ".weight_global_scale"],
        true,
    ),
    nvfp4(&[".weight", ".weight_scale", ".weight_scale_2"], false),
    fp8(&[".weight", ".weight_scale"]),
    nvfp4(&[PACKED_STACK, "_scale", "_global_scale"], true),
    nvfp4(&["", "_scale", "_scale_2"], false),
    fp8(&["", "_scale"]),
    nvfp4(&["", "_weight_scale", "_weight_scale_2"], false),
    fp8(&["", "_weight_scale"]),
];

/// The projections of experts that are two in one tensor, gate above up.
const GATE_UP: &str = ".gate_up_proj";

/// Rows and columns of a block of FP8 that has one scale.
const BLOCK: usize = 128;

impl SmallFloat {
    /// The form of the weight `name`, or of the experts' tensor of this name; `None` if it is in no small float.
    pub(super) fn of(shards: &Shards, name: &str) -> Option<SmallFloat> {
        let has_codes = |form: &&SmallFloat| {
            let dtype = if form.is_fp8() {
                DType::F8E4M3
            } else {
                DType::U8
            };
            let codes = shards.get(&format!("{name}{}", form.parts[0]));
            codes.is_some_and(|t| t.dtype() == dtype)
        };
        let has_scales = |form: &&SmallFloat| shards.contains(&format!("{name}{}", form.parts[1]));
        // The last of those without scales, so that its error names ModelOpt's.
        let mut forms = FORMS.iter().filter(has_codes);
        let found = forms.clone().find(has_scales).or(forms.next_back());
        found.copied()
    }

    /// True of the weights of all experts of a layer.
    pub(super) fn is_stack(self) -> bool {
        !self.parts[0].starts_with('.')
    }

    pub(super) fn is_fp8(self) -> bool {
        self.parts.len() == 2
    }

    /// The suffixes of the tensors that such a weight is read from.
    pub(super) fn parts(self) -> &'static [&'static str] {
        self.parts
    }

    /// The shape of an NVFP4 weight, `[out, in]` or `[experts, out, in]`, by the shape of its codes.
    pub(super) fn shape(self, shards: &Shards, name: &str) -> Option<Vec<usize>> {
        let codes = shards.get(&format!("{name}{}", self.parts[0]))?;
        let (bytes, outer) = codes.shape().split_last()?;
        Some([outer, &[2 * bytes]].concat())
    }

    /// Inputs of a group of the NVFP4 weight `name` with so many inputs, as the shape of its scales says.
    fn group(self, shards: &Shards, name: &str, cols: usize) -> usize {
        let scales = shards.get(&format!("{name}{}", self.parts[1]));
        match scales.and_then(|t| t.shape().last().copied()) {
            Some(n) if n > 0 && n * 32 == cols => 32,
            _ => 16,
        }
    }

    /// The scheme of [`SmallFloat::read`]; `None` for FP8.
    pub(super) fn scheme(self, shards: &Shards, name: &str) -> Option<AffineScheme> {
        let shape = self.shape(shards, name).filter(|_| !self.is_fp8())?;
        let group = Group::Size(self.group(shards, name, *shape.last()?) as u32);
        Some(AffineScheme::new(Bits::B8, group, Zeros::None))
    }

    /// The NVFP4 weight whose `parts` [`SmallFloat::read`] returned, in the codes that the file has and a table of their
    /// values.
    ///
    /// # Errors
    /// [`crate::Error::Weight`] for a scale that no f16 holds.
    pub(super) fn in_levels(
        self,
        shards: &Shards,
        name: &str,
        parts: ImportedWeight,
        dims: Dims,
    ) -> Result<AffineWeight> {
        let codes = format!("{name}{}", self.parts[0]);
        let codes = shards.require(&codes, &[DType::U8], &[dims.rows, dims.cols / 2])?;
        let scheme = levels_scheme(parts.group);
        let scales = parts.scales.iter().map(|&s| f16::from_f32(s));
        let parts = Parts {
            codes: codes.data().clone(),
            scales: GroupValues::Half(scales.collect()),
            zeros: None,
            offsets: None,
            levels: Some(FP4_VALUES.map(level).into()),
            g_idx: None,
        };
        AffineWeight::assemble(scheme, dims, parts)
    }

    /// Reads an NVFP4 weight of this shape, `[out, in]` or `[experts, out, in]`.
    ///
    /// # Errors
    /// A missing or misshapen tensor, a group of other than 16 or 32 inputs, a scale of the whole that is no positive
    /// number.
    pub(super) fn read(
        self,
        shards: &Shards,
        name: &str,
        shape: &[usize],
    ) -> Result<ImportedWeight> {
        let names: Vec<String> = self.parts.iter().map(|s| format!("{name}{s}")).collect();
        let [codes, scale, global] = &names[..] else {
            unreachable!("NVFP4 weights have three tensors");
        };
        let (&cols, outer) = shape.split_last().unwrap_or((&0, &[]));
        let of_row = |n: usize| [outer, &[n]].concat();
        let bytes = shards.require(codes, &[DType::U8], &of_row(cols.div_ceil(2)))?;
        let group = self.group(shards, name, cols);
        if !cols.is_multiple_of(group) {
            let expected = format!("inputs that {group} divides");
            return Err(shards.error(codes, expected, format!("{cols} inputs")));
        }
        let scales = shards.require(scale, &[DType::F8E4M3], &of_row(cols / group))?;
        let wholes = wholes(shards, global, name, outer)?;
        // Half of it, since codes are twice the values.
        let factor = |i: usize| match self.divided {
            true => 0.5 / wholes[i],
            false => 0.5 * wholes[i],
        };
        let each = (scales.len() / wholes.len()).max(1);
        let scales = (0..).zip(scales.data().iter());
        let code = |bits: u8| level(FP4_VALUES[usize::from(bits)]);
        let pairs = bytes.data().iter();
        let codes: Vec<u8> = pairs.flat_map(|b| [code(b & 15), code(b >> 4)]).collect();
        Ok(ImportedWeight {
            bits: Bits::B8,
            group: Group::Size(group as u32),
            codes: codes.into(),
            scales: scales.map(|(i, &b)| e4m3(b) * factor(i / each)).collect(),
            zeros: None,
            g_idx: None,
        })
    }

    /// An FP8 weight of this shape, `[out, in]` or `[experts, out, in]`, in BF16, or exactly in F32.
    ///
    /// # Errors
    /// A missing or misshapen tensor, values that are not finite.
    pub(super) fn fp8(
        self,
        shards: &Shards,
        name: &str,
        shape: &[usize],
        exactly: bool,
    ) -> Result<Tensor> {
        let [weight, scale] = [0, 1].map(|i| format!("{name}{}", self.parts[i]));
        let (experts, rows, cols) = match *shape {
            [experts, rows, cols] => (experts, rows, cols),
            _ => (1, shape[0], shape[1]),
        };
        let [down, across] = [rows, cols].map(|n| n.div_ceil(BLOCK));
        let found = shards.get(&scale).map(|t| t.shape().to_vec());
        // Dimensions of one say nothing: ModelOpt gives each block dimensions of its own.
        let sides =
            |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|&n| n != 1).collect() };
        let half = [experts, 2];
        let halves = name
            .ends_with(GATE_UP)
            .then_some((&half[..], (rows / 2, cols)));
        let known = [
            (&[][..], (rows, cols)),
            (&[experts], (rows, cols)),
            (&[experts, rows], (1, cols)),
            (&[experts, down, across], (BLOCK, BLOCK)),
        ];
        let known = known.into_iter().chain(halves);
        let given = found.as_deref().map(sides);
        let fits = |(shape, _): &(&[usize], _)| given.as_ref() == Some(&sides(shape));
        let (shape_found, block) = match (known.clone().find(fits), found) {
            (Some((_, block)), Some(found)) => (found, block),
            _ => ([&shape[..shape.len() - 1], &[1]].concat(), (1, cols)),
        };
        let mut scales = shards.require(&scale, &FLOATS, &shape_found)?.to_f32()?;
        if let [one] = scales[..] {
            scales = vec![one; experts];
        }
        let scaled = ScaledFp8 {
            shards,
            codes: &weight,
            scale: &scale,
            shape,
            rows: block.0.max(1),
            cols: block.1.max(1),
            scales,
        };
        scaled.held(exactly)
    }
}

/// The code of 8 bits for a value, from which the midpoint is taken.
fn level(value: i8) -> u8 {
    value.cast_unsigned() ^ 0x80
}

/// The scheme of NVFP4 in such groups, in the codes that files have.
pub(super) fn levels_scheme(group: Group) -> AffineScheme {
    AffineScheme {
        levels: Levels::Table,
        ..AffineScheme::new(Bits::B4, group, Zeros::None)
    }
}

/// The scales of a whole NVFP4 tensor with rows in `outer` dimensions, each for an equal part of them.
fn wholes(shards: &Shards, global: &str, name: &str, outer: &[usize]) -> Result<Vec<f32>> {
    let shape = shards.get(global).map(|t| t.shape().to_vec());
    let sides = shape.iter().flatten().copied().filter(|&n| n != 1);
    let sides: Vec<usize> = sides.collect();
    let is_stack = outer.len() == 2;
    let fits = match sides[..] {
        [] => true,
        [experts] => is_stack && experts == outer[0],
        [experts, 2] => is_stack && experts == outer[0] && name.ends_with(GATE_UP),
        _ => false,
    };
    let expected = match shape {
        Some(shape) if fits => shape,
        _ if is_stack => vec![outer[0]],
        _ => vec![1],
    };
    let wholes = shards.require(global, &[DType::F32], &expected)?.to_f32()?;
    match (wholes.iter()).find(|whole| !(whole.is_finite() && **whole > 0.0)) {
        Some(wrong) => Err(shards.error(global, "a number above 0".into(), wrong.to_string())),
        None => Ok(wholes),
    }
}

/// An FP8 tensor `[rows, cols]` or `[experts, rows, cols]` with a scale for each block of a matrix.
pub(super) struct ScaledFp8<'a> {
    pub(super) shards: &'a Shards,
    /// Names of the tensors of codes and scales.
    pub(super) codes: &'a str,
    pub(super) scale: &'a str,
    pub(super) shape: &'a [usize],
    /// Rows and columns of a block, above 0.
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) scales: Vec<f32>,
}

impl ScaledFp8<'_> {
    /// The values in BF16, or exactly in F32.
    ///
    /// # Errors
    /// Those of [`ScaledFp8::expand`].
    pub(super) fn held(&self, exactly: bool) -> Result<Tensor> {
        if exactly {
            return self.expand(DType::F32, f32::to_le_bytes);
        }
        self.expand(DType::BF16, |v| bf16::from_f32(v).to_le_bytes())
    }

    /// The values in elements of `N` bytes; `encode` converts an f32 to one.
    ///
    /// # Errors
    /// A missing or misshapen tensor; values or scales that are not finite.
    pub(super) fn expand<const N: usize>(
        &self,
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor> {
        let (shards, shape, all) = (self.shards, self.shape, &self.scales);
        let tensor = shards.require(self.codes, &[DType::F8E4M3], shape)?;
        let mut sides = shape.iter().rev().copied();
        let (cols, height) = (sides.next().unwrap_or(0), sides.next().unwrap_or(0));
        let (down, across) = (height.div_ceil(self.rows), cols.div_ceil(self.cols));
        if let Some(i) = all.iter().position(|s| !s.is_finite()) {
            let found = format!("{} in block {}, {}", all[i], i / across, i % across);
            return Err(shards.error(self.scale, "finite values".into(), found));
        }
        let table: Vec<f32> = (0..=255).map(e4m3).collect();
        if let Some(i) = tensor.data().iter().position(|b| b & 0x7F == 0x7F) {
            let found = format!("NaN in row {}, column {}", i / cols, i % cols);
            return Err(shards.error(self.codes, "finite values".into(), found));
        }
        let mut bytes = vec![0; tensor.len() * N];
        bytes
            .par_chunks_mut(cols.max(1) * N)
            .enumerate()
            .for_each(|(r, out)| {
                let row = &tensor.data()[r * cols..(r + 1) * cols];
                let place = r / height * down + r % height / self.rows;
                let scales = &all[place * across..][..across];
                let values = row.iter().enumerate();
                for ((i, b), o) in values.zip(out.as_chunks_mut::<N>().0) {
                    *o = encode(table[usize::from(*b)] * scales[i / self.cols]);
                }
            });
        Tensor::new(dtype, shape.to_vec(), bytes.into())
    }
}
