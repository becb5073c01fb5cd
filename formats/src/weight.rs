//! Weights in canonical form: the form that readers return, methods produce and devices repack.

use crate::error::{Error, Result};
use crate::exl3::Exl3Weight;
use crate::pack;
use crate::scheme::{AffineScheme, Bits, Group, Levels, Scales, Scheme, TwoLevel, Zeros};
use crate::tensor::Tensor;
use crate::trellis::TrellisWeight;
use bytes::Bytes;
use half::f16;
use nq_model::Dims;
use rayon::prelude::*;
use std::sync::Arc;

/// The weight of a Linear or an embedding, `[out, in]` row-major.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Unquantized: a tensor of a float type with two dimensions.
    Dense(Tensor),
    /// Quantized.
    Quantized(QuantizedWeight),
}

/// A quantized weight in a device-neutral form.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum QuantizedWeight {
    /// Integer codes with scales (and zero-points) per group.
    Affine(AffineWeight),
    /// Paths through a trellis, with scales of rows and inputs.
    Trellis(TrellisWeight),
    /// In a code of EXL3, whose outputs are transformed too.
    Exl3(Exl3Weight),
}

impl QuantizedWeight {
    /// How it is stored.
    pub fn scheme(&self) -> Scheme {
        match self {
            QuantizedWeight::Affine(a) => Scheme::Affine(a.scheme()),
            QuantizedWeight::Trellis(t) => Scheme::Trellis(t.scheme()),
            QuantizedWeight::Exl3(w) => Scheme::Exl3(w.scheme()),
        }
    }
}

impl Weight {
    /// `(out_features, in_features)`.
    pub fn dims(&self) -> Dims {
        match self {
            Weight::Dense(t) => Dims::new(t.shape()[0], t.shape()[1]),
            Weight::Quantized(QuantizedWeight::Affine(a)) => {
                Dims::new(a.out_features(), a.in_features())
            }
            Weight::Quantized(QuantizedWeight::Trellis(t)) => {
                Dims::new(t.out_features(), t.in_features())
            }
            Weight::Quantized(QuantizedWeight::Exl3(w)) => w.dims(),
        }
    }

    /// Bytes of the weight in nq's own format, or in that of its file if nq's has no such scheme.
    pub fn bytes(&self) -> usize {
        match self {
            Weight::Dense(t) => t.data().len(),
            Weight::Quantized(QuantizedWeight::Affine(a)) => {
                a.scheme().bytes(a.out_features(), a.in_features())
                    + a.g_idx().map_or(0, |g| 4 * g.len())
            }
            Weight::Quantized(QuantizedWeight::Trellis(t)) => t.bytes(),
            Weight::Quantized(QuantizedWeight::Exl3(w)) => w.bytes(),
        }
    }

    /// Writes row `row` as f32 to `out` (`in_features` long).
    ///
    /// # Errors
    /// [`Error::Weight`] if a dense tensor is not of a float type.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Weight::Dense(t) => t.copy_f32(row * out.len(), out),
            Weight::Quantized(QuantizedWeight::Affine(a)) => {
                a.dequantize_row(row, out);
                Ok(())
            }
            Weight::Quantized(QuantizedWeight::Trellis(t)) => {
                t.dequantize_row(row, out);
                Ok(())
            }
            Weight::Quantized(QuantizedWeight::Exl3(w)) => {
                w.dequantize_row(row, out);
                Ok(())
            }
        }
    }

    /// Lets the system take back the memory of a weight that was copied elsewhere, if it is a view of
    /// a mapped file ([`crate::mapping::release`]).
    pub fn release(&self) {
        match self {
            Weight::Dense(t) => crate::mapping::release(t.data()),
            Weight::Quantized(QuantizedWeight::Affine(a)) => crate::mapping::release(a.codes()),
            Weight::Quantized(QuantizedWeight::Trellis(t)) => crate::mapping::release(t.words()),
            Weight::Quantized(QuantizedWeight::Exl3(w)) => crate::mapping::release(w.tiles()),
        }
    }

    /// A short name of the scheme for tables and errors, e.g. `BF16` or `int4 g64 asymmetric`.
    pub fn scheme_name(&self) -> String {
        match self {
            Weight::Dense(t) => t.dtype().to_string(),
            Weight::Quantized(q) => q.scheme().to_string(),
        }
    }
}

/// Scales or offsets of groups as they are stored; the variant matches [`Scales`].
#[derive(Clone, Debug)]
pub enum GroupValues {
    /// `[out, groups]`
    Half(Arc<[f16]>),
    /// In two levels.
    TwoLevel {
        /// Small integers `[out, groups]`, packed like codes ([`pack::pack_row`]).
        small: Bytes,
        /// The shared factors of the spans, `[out, spans]`.
        of_spans: Arc<[f16]>,
    },
}

/// The stored zero-points of an [`AffineWeight`]; the variant matches [`Zeros`].
#[derive(Clone, Debug)]
pub enum ZeroPoints {
    /// Symmetric: nothing stored.
    None,
    /// Integer zero-points `[out, groups]`, packed like codes ([`pack::pack_row`]).
    Integer(Bytes),
    /// Float offsets `[out, groups]`.
    Offset(Arc<[f16]>),
}

/// The parts of an [`AffineWeight`].
#[derive(Clone, Debug)]
pub struct Parts {
    /// Packed rows, `[out, bits.bytes(in)]`.
    pub codes: Bytes,
    /// Scales of groups.
    pub scales: GroupValues,
    /// Integer zero-points `[out, groups]`, packed, if the scheme has them.
    pub zeros: Option<Bytes>,
    /// Offsets of groups, if the scheme has them.
    pub offsets: Option<GroupValues>,
    /// The 8-bit code of each level, `[2^bits]`, if the scheme has a table.
    pub levels: Option<Arc<[u8]>>,
    /// Group of each input `[in]`, if it is not `i / group size` (activation order).
    pub g_idx: Option<Arc<[u32]>>,
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
    levels: Option<Arc<[u8]>>, // [2^bits]
    g_idx: Option<Arc<[u32]>>, // [in]
    /// `scales` and float offsets as they are stored, if that is in two levels.
    two_level: Option<Box<(GroupValues, Option<GroupValues>)>>,
}

impl AffineWeight {
    /// Assembles a weight `[out_features, in_features]` with f16 scales and even steps.
    ///
    /// `codes` are packed rows, `scales` is `[out, groups]`, `zeros` must match
    /// `scheme.zeros`. `g_idx`, if given, maps each input to its group (activation
    /// order); otherwise input `i` is in group `i / group size`.
    pub fn new(
        scheme: AffineScheme,
        dims: Dims,
        codes: Bytes,
        scales: Arc<[f16]>,
        zeros: ZeroPoints,
        g_idx: Option<Arc<[u32]>>,
    ) -> Result<Self> {
        let (zeros, offsets) = match zeros {
            ZeroPoints::None => (None, None),
            ZeroPoints::Integer(z) => (Some(z), None),
            ZeroPoints::Offset(o) => (None, Some(GroupValues::Half(o))),
        };
        let parts = Parts {
            codes,
            scales: GroupValues::Half(scales),
            zeros,
            offsets,
            levels: None,
            g_idx,
        };
        Self::assemble(scheme, dims, parts)
    }

    /// Assembles a weight `[out_features, in_features]` of any scheme.
    ///
    /// # Errors
    /// [`Error::Scheme`] for parameters that do not fit together; [`Error::Weight`], naming the part that
    /// is missing, superfluous or has another length, a scale or offset that is not finite, or a
    /// `g_idx` entry past the last group.
    pub fn assemble(scheme: AffineScheme, dims: Dims, parts: Parts) -> Result<Self> {
        let (out_features, in_features) = dims.pair();
        scheme.check()?;
        let check = Check {
            scheme,
            rows: out_features,
            cols: in_features,
        };
        check.lengths(&parts)?;
        let signed = scheme.zeros == Zeros::None;
        let scales = check.values("scales", &parts.scales, signed)?;
        let zeros = match (parts.zeros, &parts.offsets) {
            (Some(z), _) => ZeroPoints::Integer(z),
            (None, Some(o)) => ZeroPoints::Offset(check.values("offsets", o, false)?),
            (None, None) => ZeroPoints::None,
        };
        let two_level = (!scheme.scales.is_half()).then(|| Box::new((parts.scales, parts.offsets)));
        Ok(AffineWeight {
            scheme,
            out_features,
            in_features,
            codes: parts.codes,
            scales,
            zeros,
            levels: parts.levels,
            g_idx: parts.g_idx,
            two_level,
        })
    }

    /// The parts that it was assembled from.
    pub fn parts(&self) -> Parts {
        let half = |values: &Arc<[f16]>| GroupValues::Half(values.clone());
        let offsets = match &self.zeros {
            ZeroPoints::Offset(o) => Some(half(o)),
            _ => None,
        };
        let (scales, offsets) = match self.two_level.as_deref() {
            Some(kept) => kept.clone(),
            None => (half(&self.scales), offsets),
        };
        Parts {
            codes: self.codes.clone(),
            scales,
            zeros: match &self.zeros {
                ZeroPoints::Integer(z) => Some(z.clone()),
                _ => None,
            },
            offsets,
            levels: self.levels.clone(),
            g_idx: self.g_idx.clone(),
        }
    }

    /// Scales, and offsets if there are any, as they are stored where that is in two levels.
    pub fn two_levels(&self) -> Option<(&GroupValues, Option<&GroupValues>)> {
        let (scales, offsets) = self.two_level.as_deref()?;
        Some((scales, offsets.as_ref()))
    }

    /// Bits, grouping and zero-points.
    pub fn scheme(&self) -> AffineScheme {
        self.scheme
    }

    /// Number of rows.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of columns: the reduction dimension.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Number of groups in a row.
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

    /// Packed codes of one row in the form that devices hold ([`AffineScheme::held`]): the stored codes,
    /// or converted ones in `scratch`.
    pub fn held_row<'a>(&'a self, row: usize, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        let held = self.scheme.held();
        // The midpoint of fewer bits becomes the midpoint of more.
        let shift = match self.scheme.zeros {
            Zeros::None => held.bits.midpoint() - self.scheme.value_bits().midpoint(),
            _ => 0,
        };
        self.row_in(held.bits, shift, row, scratch)
    }

    /// Packed values of the codes of one row in `bits`, which have room for them, each more by `shift`: the stored
    /// codes, or converted ones in `scratch`.
    pub fn row_in<'a>(
        &'a self,
        bits: Bits,
        shift: u8,
        row: usize,
        scratch: &'a mut Vec<u8>,
    ) -> &'a [u8] {
        let packed = self.row_codes(row);
        if bits == self.scheme.bits && shift == 0 {
            return packed;
        }
        let n = self.in_features;
        scratch.resize(n + bits.bytes(n), 0);
        let (codes, out) = scratch.split_at_mut(n);
        pack::unpack_row(self.scheme.bits, packed, codes);
        if let Some(levels) = &self.levels {
            codes.iter_mut().for_each(|c| *c = levels[usize::from(*c)]);
        }
        codes.iter_mut().for_each(|c| *c += shift);
        pack::pack_row(bits, codes, out);
        out
    }

    /// The 8-bit code of each level, if the scheme has a table.
    pub fn levels(&self) -> Option<&[u8]> {
        self.levels.as_deref()
    }

    /// Integer zero-point of one group, if the scheme has them.
    pub fn zero_point(&self, row: usize, group: usize) -> Option<u8> {
        let ZeroPoints::Integer(z) = &self.zeros else {
            return None;
        };
        let (bits, groups) = (self.scheme.value_bits(), self.groups());
        let stride = bits.bytes(groups);
        let row = &z[row * stride..(row + 1) * stride];
        Some(pack::code_at(bits, row, groups, group))
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

    /// The same weight with its inputs sorted by group, so that input `i` is in group `i / group size`, and which of
    /// this weight's inputs each of them is, `[in]`. `None` without a `g_idx`, and where groups are not as large as the
    /// scheme says.
    pub fn in_group_order(&self) -> Option<(Self, Vec<u32>)> {
        let groups = self.g_idx()?;
        let mut order: Vec<u32> = (0..groups.len() as u32).collect();
        order.sort_by_key(|&i| groups[i as usize]);
        let size = self.scheme.group.size(self.in_features).max(1);
        let mut places = order.iter().enumerate();
        if !places.all(|(place, &i)| groups[i as usize] as usize == place / size) {
            return None;
        }
        let (bits, inputs) = (self.scheme.bits, self.in_features);
        let mut codes = vec![0; self.codes.len()];
        let rows = codes.par_chunks_mut(bits.bytes(inputs).max(1)).enumerate();
        rows.for_each_init(
            || [vec![0; inputs], vec![0; inputs]],
            |[from, sorted], (row, to)| {
                pack::unpack_row(bits, self.row_codes(row), from);
                for (code, &i) in sorted.iter_mut().zip(&order) {
                    *code = from[i as usize];
                }
                pack::pack_row(bits, sorted, to);
            },
        );
        let sorted = AffineWeight {
            codes: codes.into(),
            g_idx: None,
            ..self.clone()
        };
        Some((sorted, order))
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
            ZeroPoints::Offset(o) => o[at].to_f32(),
            ZeroPoints::None => -s * f32::from(self.scheme.value_bits().midpoint()),
            ZeroPoints::Integer(_) => {
                -s * f32::from(self.zero_point(row, group).unwrap_or_default())
            }
        };
        (s, o)
    }

    /// Writes row `row` as f32 to `out` (`in_features` long): `s * q + o` with one rounding, as
    /// the product of an f16 and 8 bits is exact.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let mut codes = vec![0; out.len()];
        pack::unpack_row(self.scheme.bits, self.row_codes(row), &mut codes);
        if let Some(levels) = &self.levels {
            codes.iter_mut().for_each(|c| *c = levels[usize::from(*c)]);
        }
        if self.g_idx.is_some() {
            let affine: Vec<_> = (0..self.groups()).map(|g| self.affine(row, g)).collect();
            for (i, (w, &q)) in out.iter_mut().zip(&codes).enumerate() {
                let (s, o) = affine[self.group_of(i)];
                *w = s * f32::from(q) + o;
            }
            return;
        }
        let size = self.scheme.group.size(self.in_features).max(1);
        for (g, (values, codes)) in out.chunks_mut(size).zip(codes.chunks(size)).enumerate() {
            let (s, o) = self.affine(row, g);
            for (w, &q) in values.iter_mut().zip(codes) {
                *w = s * f32::from(q) + o;
            }
        }
    }
}

/// Checks parts against a scheme and dimensions.
struct Check {
    scheme: AffineScheme,
    rows: usize,
    cols: usize,
}

impl Check {
    fn groups(&self) -> usize {
        self.scheme.group.count(self.cols)
    }

    fn lengths(&self, parts: &Parts) -> Result<()> {
        let (scheme, groups) = (self.scheme, self.groups());
        self.length(
            "codes",
            "bytes",
            scheme.bits.bytes(self.cols),
            parts.codes.len(),
        )?;
        self.group_values("scales", &parts.scales)?;
        self.present("zero-points", scheme.zeros == Zeros::Integer, &parts.zeros)?;
        if let Some(zeros) = &parts.zeros {
            let row = scheme.value_bits().bytes(groups);
            self.length("zero-points", "bytes", row, zeros.len())?;
        }
        self.present("offsets", scheme.zeros == Zeros::Offset, &parts.offsets)?;
        if let Some(offsets) = &parts.offsets {
            self.group_values("offsets", offsets)?;
        }
        self.present("levels", scheme.levels == Levels::Table, &parts.levels)?;
        if let Some(levels) = &parts.levels {
            let expected = 1 << scheme.bits.width();
            self.exact("levels", "bytes", Some(expected), levels.len())?;
        }
        let Some(g_idx) = &parts.g_idx else {
            return Ok(());
        };
        self.exact("g_idx", "entries", Some(self.cols), g_idx.len())?;
        match g_idx.iter().position(|&g| g as usize >= groups) {
            None => Ok(()),
            Some(i) => Err(Error::Weight {
                what: "g_idx",
                expected: format!("groups below {groups}"),
                found: format!("{} at input {i}", g_idx[i]),
            }),
        }
    }

    fn present<T>(&self, what: &'static str, wanted: bool, part: &Option<T>) -> Result<()> {
        let words = |there| if there { "some" } else { "none" };
        if part.is_some() == wanted {
            return Ok(());
        }
        Err(Error::Weight {
            what,
            expected: format!("{} for {}", words(wanted), self.scheme),
            found: words(part.is_some()).into(),
        })
    }

    fn group_values(&self, what: &'static str, values: &GroupValues) -> Result<()> {
        let groups = self.groups();
        match (values, self.scheme.scales) {
            (GroupValues::Half(values), Scales::Half) => {
                self.length(what, "values", groups, values.len())
            }
            (GroupValues::TwoLevel { small, of_spans }, Scales::TwoLevel(two)) => {
                self.length(what, "bytes", two.bits.bytes(groups), small.len())?;
                self.length(what, "spans", two.span.count(self.cols), of_spans.len())
            }
            (GroupValues::Half(_), _) => self.unlike(what, "f16 values"),
            (GroupValues::TwoLevel { .. }, _) => self.unlike(what, "values in two levels"),
        }
    }

    fn unlike(&self, what: &'static str, found: &str) -> Result<()> {
        Err(Error::Weight {
            what,
            expected: format!("those of {}", self.scheme),
            found: found.into(),
        })
    }

    /// Checks that a part has `row` units per row, `found` in all.
    fn length(&self, what: &'static str, unit: &str, row: usize, found: usize) -> Result<()> {
        self.exact(what, unit, self.rows.checked_mul(row), found)
    }

    /// Checks that a part has `expected` units; `None` stands for an overflow.
    fn exact(
        &self,
        what: &'static str,
        unit: &str,
        expected: Option<usize>,
        found: usize,
    ) -> Result<()> {
        if expected == Some(found) {
            return Ok(());
        }
        let (rows, cols, scheme) = (self.rows, self.cols, self.scheme);
        let expected = expected.map_or("a size in range".into(), |n| n.to_string());
        Err(Error::Weight {
            what,
            expected: format!("{expected} {unit} for [{rows}, {cols}] {scheme}"),
            found: format!("{found} {unit}"),
        })
    }

    /// The values of all groups, checked to be finite.
    fn values(&self, what: &'static str, kept: &GroupValues, signed: bool) -> Result<Arc<[f16]>> {
        let groups = self.groups();
        let values = match (kept, self.scheme.scales) {
            (GroupValues::TwoLevel { small, of_spans }, Scales::TwoLevel(two)) => {
                self.finite(what, of_spans, two.span.count(self.cols))?;
                self.products(two, small, of_spans, signed)
            }
            (GroupValues::Half(values), _) => values.clone(),
            (GroupValues::TwoLevel { .. }, Scales::Half) => unreachable!("lengths were checked"),
        };
        self.finite(what, &values, groups)?;
        Ok(values)
    }

    /// The products of each small integer and its span's f16, rounded to f16.
    fn products(&self, two: TwoLevel, small: &[u8], of_spans: &[f16], signed: bool) -> Arc<[f16]> {
        let (groups, spans) = (self.groups(), two.span.count(self.cols));
        let per_span = match two.span {
            Group::Channel => groups,
            Group::Size(n) => n as usize / self.scheme.group.size(self.cols).max(1),
        };
        let middle = if signed { two.bits.midpoint() } else { 0 };
        let stride = two.bits.bytes(groups);
        let mut values = Vec::with_capacity(self.rows * groups);
        let mut integers = vec![0; groups];
        for row in 0..self.rows {
            let packed = &small[row * stride..(row + 1) * stride];
            pack::unpack_row(two.bits, packed, &mut integers);
            for (g, &q) in integers.iter().enumerate() {
                let of_span = of_spans[row * spans + g / per_span.max(1)];
                values.push(product(of_span, i16::from(q) - i16::from(middle)));
            }
        }
        values.into()
    }

    /// Checks that `values` `[out, per_row]` are finite.
    fn finite(&self, what: &'static str, values: &[f16], per_row: usize) -> Result<()> {
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(i) => Err(Error::Weight {
                what,
                expected: "finite values".into(),
                found: format!(
                    "{} in row {}, group {}",
                    values[i],
                    i / per_row,
                    i % per_row
                ),
            }),
        }
    }
}

/// A two-level scale: the f16 nearest to the product, which is exact in f32.
#[inline]
pub fn product(of_span: f16, small: i16) -> f16 {
    f16::from_f32(of_span.to_f32() * f32::from(small))
}
