//! Weights in canonical form: what readers produce, methods emit and devices repack.

use crate::error::{Error, Result};
use crate::pack;
use crate::scheme::{AffineScheme, Bits, Group, Zeros};
use crate::tensor::Tensor;
use bytes::Bytes;
use half::f16;
use std::sync::Arc;

/// The weight of a Linear or an embedding, `[out, in]` row-major.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Unquantized, in a float type; two dimensions.
    Dense(Tensor),
    /// Quantized.
    Quantized(QuantizedWeight),
}

/// A quantized weight, device-neutral.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum QuantizedWeight {
    /// Integer codes with scales (and zero-points) per group.
    Affine(AffineWeight),
}

impl Weight {
    /// `(out_features, in_features)`.
    pub fn dims(&self) -> (usize, usize) {
        match self {
            Weight::Dense(t) => (t.shape()[0], t.shape()[1]),
            Weight::Quantized(QuantizedWeight::Affine(a)) => (a.out_features(), a.in_features()),
        }
    }

    /// Bytes of the weight as nq stores it.
    pub fn bytes(&self) -> usize {
        match self {
            Weight::Dense(t) => t.data().len(),
            Weight::Quantized(QuantizedWeight::Affine(a)) => {
                a.scheme().bytes(a.out_features(), a.in_features())
                    + a.g_idx().map_or(0, |g| 4 * g.len())
            }
        }
    }

    /// Writes row `row` as f32 into `out` (`in_features` long).
    ///
    /// # Errors
    /// [`Error::Weight`] if a dense tensor's type is no float.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Weight::Dense(t) => t.copy_f32(row * out.len(), out),
            Weight::Quantized(QuantizedWeight::Affine(a)) => {
                a.dequantize_row(row, out);
                Ok(())
            }
        }
    }

    /// Lets the system take back the memory of a weight that was copied elsewhere, where it
    /// is a view of a mapped file ([`crate::mapping::release`]).
    pub fn release(&self) {
        match self {
            Weight::Dense(t) => crate::mapping::release(t.data()),
            Weight::Quantized(QuantizedWeight::Affine(a)) => crate::mapping::release(a.codes()),
        }
    }

    /// A short name of the scheme for tables and errors, e.g. `BF16` or `int4 g64 asymmetric`.
    pub fn scheme_name(&self) -> String {
        match self {
            Weight::Dense(t) => t.dtype().to_string(),
            Weight::Quantized(QuantizedWeight::Affine(a)) => a.scheme().to_string(),
        }
    }
}

/// The stored zero-points of an [`AffineWeight`]; the variant agrees with [`Zeros`].
#[derive(Clone, Debug)]
pub enum ZeroPoints {
    /// Symmetric: nothing stored.
    None,
    /// Integer zero-points `[out, groups]`, packed like codes ([`pack::pack_row`]).
    Integer(Bytes),
    /// Float offsets `[out, groups]`.
    Offset(Arc<[f16]>),
}

/// Codes and scales of an affine scheme: `w = s * q + o` per group (see [`AffineScheme`]).
/// Parts are checked against each other on construction, so a value is always consistent.
#[derive(Clone, Debug)]
pub struct AffineWeight {
    scheme: AffineScheme,
    out_features: usize,
    in_features: usize,
    codes: Bytes,              // [out, bits.bytes(in)]
    scales: Arc<[f16]>,        // [out, groups]
    zeros: ZeroPoints,         // [out, groups]
    g_idx: Option<Arc<[u32]>>, // [in]
}

impl AffineWeight {
    /// Assembles a weight `[out_features, in_features]`.
    ///
    /// `codes` are packed rows, `scales` is `[out, groups]`, `zeros` must match
    /// `scheme.zeros`. `g_idx`, if given, maps each input to its group (activation
    /// order); otherwise input `i` is in group `i / group size`.
    ///
    /// # Errors
    /// [`Error::Weight`] naming the part whose length does not fit, a scale or offset
    /// that is not finite, or a `g_idx` entry past the last group.
    pub fn new(
        scheme: AffineScheme,
        (out_features, in_features): (usize, usize),
        codes: Bytes,
        scales: Arc<[f16]>,
        zeros: ZeroPoints,
        g_idx: Option<Arc<[u32]>>,
    ) -> Result<Self> {
        if scheme.group == Group::Size(0) {
            return Err(Error::Scheme {
                expected: "a group size above 0".into(),
                found: "0".into(),
            });
        }
        let weight = AffineWeight {
            scheme,
            out_features,
            in_features,
            codes,
            scales,
            zeros,
            g_idx,
        };
        weight.check()?;
        Ok(weight)
    }

    /// Checks the parts against the scheme and the dimensions.
    fn check(&self) -> Result<()> {
        let row = self.scheme.bits.bytes(self.in_features);
        let codes = self.out_features.checked_mul(row);
        self.check_length("codes", "bytes", codes, self.codes.len())?;
        let values = self.out_features.checked_mul(self.groups());
        self.check_length("scales", "values", values, self.scales.len())?;
        self.check_finite("scales", &self.scales)?;
        self.check_zeros(values)?;
        let Some(g_idx) = &self.g_idx else {
            return Ok(());
        };
        self.check_length("g_idx", "entries", Some(self.in_features), g_idx.len())?;
        let groups = self.groups();
        match g_idx.iter().position(|&g| g as usize >= groups) {
            None => Ok(()),
            Some(i) => Err(Error::Weight {
                what: "g_idx",
                expected: format!("groups below {groups}"),
                found: format!("{} at input {i}", g_idx[i]),
            }),
        }
    }

    /// `expected` is `None` where it overflows.
    fn check_length(
        &self,
        what: &'static str,
        unit: &str,
        expected: Option<usize>,
        found: usize,
    ) -> Result<()> {
        if expected == Some(found) {
            return Ok(());
        }
        let (rows, cols, scheme) = (self.out_features, self.in_features, self.scheme);
        let expected = expected.map_or("a size in range".into(), |n| n.to_string());
        Err(Error::Weight {
            what,
            expected: format!("{expected} {unit} for [{rows}, {cols}] {scheme}"),
            found: format!("{found} {unit}"),
        })
    }

    /// `values` are `[out, groups]`.
    fn check_finite(&self, what: &'static str, values: &[f16]) -> Result<()> {
        let groups = self.groups();
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(i) => Err(Error::Weight {
                what,
                expected: "finite values".into(),
                found: format!("{} in row {}, group {}", values[i], i / groups, i % groups),
            }),
        }
    }

    /// `values` is the number of groups in all rows.
    fn check_zeros(&self, values: Option<usize>) -> Result<()> {
        let found = match (&self.zeros, self.scheme.zeros) {
            (ZeroPoints::None, Zeros::None) => return Ok(()),
            (ZeroPoints::Integer(z), Zeros::Integer) => {
                let row = self.scheme.bits.bytes(self.groups());
                let bytes = self.out_features.checked_mul(row);
                return self.check_length("zero-points", "bytes", bytes, z.len());
            }
            (ZeroPoints::Offset(o), Zeros::Offset) => {
                self.check_length("offsets", "values", values, o.len())?;
                return self.check_finite("offsets", o);
            }
            (ZeroPoints::None, _) => "none",
            (ZeroPoints::Integer(_), _) => "integer zero-points",
            (ZeroPoints::Offset(_), _) => "float offsets",
        };
        Err(Error::Weight {
            what: "zero-points",
            expected: format!("{:?}", self.scheme.zeros),
            found: found.into(),
        })
    }

    /// Bits, grouping and zero-points.
    pub fn scheme(&self) -> AffineScheme {
        self.scheme
    }

    /// Rows.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns: the reduction dimension.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Groups in a row.
    pub fn groups(&self) -> usize {
        self.scheme.group.count(self.in_features)
    }

    /// Packed codes of all rows, `[out, bits.bytes(in)]`.
    pub fn codes(&self) -> &Bytes {
        &self.codes
    }

    /// Packed codes of one row.
    pub fn row_codes(&self, row: usize) -> &[u8] {
        let n = self.scheme.bits.bytes(self.in_features);
        &self.codes[row * n..(row + 1) * n]
    }

    /// Scales `[out, groups]`.
    pub fn scales(&self) -> &[f16] {
        &self.scales
    }

    /// Stored zero-points.
    pub fn zeros(&self) -> &ZeroPoints {
        &self.zeros
    }

    /// Group of each input, if it is not `i / group size`.
    pub fn g_idx(&self) -> Option<&[u32]> {
        self.g_idx.as_deref()
    }

    /// Group of input `i`.
    #[inline]
    pub fn group_of(&self, i: usize) -> usize {
        match &self.g_idx {
            Some(g) => g[i] as usize,
            None => i / self.scheme.group.size(self.in_features),
        }
    }

    /// `(s, o)` of `w = s * q + o` for one group, in f32. The product `-s * z` is
    /// exact: an 11-bit significand times at most 8 bits fits f32.
    pub fn affine(&self, row: usize, group: usize) -> (f32, f32) {
        let at = row * self.groups() + group;
        let s = self.scales[at].to_f32();
        let o = match &self.zeros {
            ZeroPoints::None => -s * f32::from(self.scheme.bits.midpoint()),
            ZeroPoints::Integer(z) => {
                let stride = self.scheme.bits.bytes(self.groups());
                let row = &z[row * stride..(row + 1) * stride];
                -s * f32::from(pack::code_at(self.scheme.bits, row, group))
            }
            ZeroPoints::Offset(o) => o[at].to_f32(),
        };
        (s, o)
    }

    /// Writes row `row` as f32 into `out` (`in_features` long): `s * q + o`, one rounding, as
    /// the product of an f16 and 8 bits is exact.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let (bits, packed) = (self.scheme.bits, self.row_codes(row));
        if self.g_idx.is_some() {
            let affine: Vec<_> = (0..self.groups()).map(|g| self.affine(row, g)).collect();
            for (i, w) in out.iter_mut().enumerate() {
                let (s, o) = affine[self.group_of(i)];
                *w = s * f32::from(pack::code_at(bits, packed, i)) + o;
            }
            return;
        }
        let size = self.scheme.group.size(self.in_features).max(1);
        for (g, values) in out.chunks_mut(size).enumerate() {
            let (s, o) = self.affine(row, g);
            let start = g * size;
            match bits {
                Bits::B8 => {
                    for (w, &q) in values.iter_mut().zip(&packed[start..]) {
                        *w = s * f32::from(q) + o;
                    }
                }
                Bits::B4 if start.is_multiple_of(2) => {
                    let (pairs, last) = values.as_chunks_mut::<2>();
                    let bytes = &packed[start / 2..];
                    for ([low, high], &b) in pairs.iter_mut().zip(bytes) {
                        *low = s * f32::from(b & 15) + o;
                        *high = s * f32::from(b >> 4) + o;
                    }
                    for w in last {
                        *w = s * f32::from(bytes[pairs.len()] & 15) + o;
                    }
                }
                Bits::B4 => {
                    for (i, w) in values.iter_mut().enumerate() {
                        *w = s * f32::from(pack::code_at(bits, packed, start + i)) + o;
                    }
                }
            }
        }
    }
}
