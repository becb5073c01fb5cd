//! How formats store quantized Linears, and what they share in doing so.

use crate::exactness::Exactness;
use crate::pack;
use crate::scheme::{AffineScheme, Bits, Zeros};
use crate::weight::{AffineWeight, ZeroPoints};
use half::{bf16, f16};
use nq_model::{DType, Dims};
use serde_json::Value;

/// One tensor of a packed Linear.
pub(super) struct PackedTensor {
    /// Suffix after the Linear's name, e.g. `qweight`.
    pub(super) suffix: &'static str,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

impl PackedTensor {
    pub(super) fn new(suffix: &'static str, dtype: DType, shape: Vec<usize>) -> Self {
        PackedTensor {
            suffix,
            dtype,
            shape,
        }
    }
}

/// How a format stores a quantized Linear.
pub(super) struct Packing {
    /// Name of the format for messages.
    pub(super) format: &'static str,
    /// True if all Linears must have the same scheme.
    pub(super) uniform: bool,
    /// Checks that the format can hold weights `[out, in]` of a scheme, with or without an activation
    /// order; the error says why not.
    pub(super) holds: fn(AffineScheme, Dims, bool) -> Result<(), String>,
    /// Checks that the format can hold this weight, whose scheme it supports, and says how exactly. The
    /// type is that of unquantized parameters.
    pub(super) check: fn(&AffineWeight, DType) -> Result<Exactness, String>,
    /// The tensors of a weight that passed `check`.
    pub(super) parts: fn(&AffineWeight, DType) -> Vec<PackedTensor>,
    /// The contents of one of these tensors.
    pub(super) pack: fn(&AffineWeight, &PackedTensor) -> Vec<u8>,
    /// Makes config.json's `quantization_config`, and further files.
    pub(super) describe: fn(&[Linear]) -> Result<Description, String>,
}

impl Packing {
    /// Says how exactly the format can hold the weight; the error says why it cannot.
    pub(super) fn fits(&self, a: &AffineWeight, dense: DType) -> Result<Exactness, String> {
        let dims = Dims::new(a.out_features(), a.in_features());
        (self.holds)(a.scheme(), dims, a.g_idx().is_some())?;
        (self.check)(a, dense)
    }
}

/// `quantization_config` and files (name, contents) beside it.
pub(super) type Description = (Value, Vec<(&'static str, Value)>);

/// A Linear of the layers, for the `quantization_config`.
pub(super) struct Linear {
    pub(super) name: String,
    /// `None` if it is unquantized.
    pub(super) scheme: Option<LinearScheme>,
}

/// The scheme of a packed Linear, with the properties that formats list besides.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct LinearScheme {
    pub(super) bits: usize,
    /// Inputs in a group; `None`: the whole row.
    pub(super) group: Option<usize>,
    pub(super) symmetric: bool,
    pub(super) activation_order: bool,
}

impl LinearScheme {
    pub(super) fn of(a: &AffineWeight) -> Self {
        let size = a.scheme().group.size(a.in_features());
        LinearScheme {
            bits: a.scheme().bits.width(),
            group: (size < a.in_features()).then_some(size),
            symmetric: a.scheme().zeros == Zeros::None,
            activation_order: a.g_idx().is_some(),
        }
    }
}

/// Appends `values`, converted to the float type `dtype`.
pub(super) fn float_bytes(values: &[f32], dtype: DType, out: &mut Vec<u8>) {
    for &v in values {
        match dtype {
            DType::F16 => out.extend(f16::from_f32(v).to_le_bytes()),
            DType::F32 => out.extend(v.to_le_bytes()),
            _ => out.extend(bf16::from_f32(v).to_le_bytes()),
        }
    }
}

/// Checks that a format with 4-bit and 8-bit codes can hold a scheme. Two-level scales become f16.
pub(super) fn even_codes(scheme: AffineScheme) -> Result<(), String> {
    let fitting = AffineScheme::new(scheme.value_bits().held(), scheme.group, scheme.zeros);
    if fitting.bits == scheme.bits {
        return Ok(());
    }
    Err(format!(
        "it has codes of 4 and 8 bits with even steps only, such as {fitting}"
    ))
}

/// All codes `[out, in]`, one per byte.
pub(super) fn codes(a: &AffineWeight) -> Vec<u8> {
    let mut codes = vec![0; a.out_features() * a.in_features()];
    for (row, codes) in codes.chunks_mut(a.in_features().max(1)).enumerate() {
        pack::unpack_row(a.scheme().bits, a.row_codes(row), codes);
    }
    codes
}

/// All zero-points `[out, groups]`, one per byte; the midpoint for symmetric schemes.
pub(super) fn zero_points(a: &AffineWeight) -> Vec<u8> {
    let (bits, groups) = (a.scheme().bits, a.groups());
    let mut zeros = vec![bits.midpoint(); a.out_features() * groups];
    if let ZeroPoints::Integer(packed) = a.zeros() {
        let rows = packed
            .chunks(bits.bytes(groups))
            .zip(zeros.chunks_mut(groups));
        rows.for_each(|(packed, zeros)| pack::unpack_row(bits, packed, zeros));
    }
    zeros
}

/// The scales `[groups, out]` as f16.
pub(super) fn transposed_scales(a: &AffineWeight) -> Vec<u8> {
    let (rows, groups) = (a.out_features(), a.groups());
    let at = |g: usize| (0..rows).map(move |row| a.scales()[row * groups + g]);
    (0..groups)
        .flat_map(at)
        .flat_map(f16::to_le_bytes)
        .collect()
}

/// A 32-bit word of `bits`-wide fields; `field(i)` is the i-th from the low end.
pub(super) fn word(bits: Bits, field: impl Fn(usize) -> u32) -> u32 {
    let mask = u32::from(bits.max_code());
    (0..32 / bits.width()).fold(0, |w, i| w | (field(i) & mask) << (i * bits.width()))
}

/// The common scheme of all quantized Linears.
///
/// # Errors
/// A message with two Linears that differ.
pub(super) fn uniform(linears: &[Linear]) -> Result<LinearScheme, String> {
    let mut quantized = linears.iter().filter_map(|l| Some((&l.name, l.scheme?)));
    let Some((first, scheme)) = quantized.next() else {
        return Err("no Linear is quantized".into());
    };
    match quantized.find(|(_, s)| *s != scheme) {
        None => Ok(scheme),
        Some((other, _)) => Err(format!(
            "it has one scheme for all, but {first} and {other} differ"
        )),
    }
}
