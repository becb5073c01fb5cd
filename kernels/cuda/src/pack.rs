//! Packs canonical weights into the device's layout (described in `cuda/weights.cuh`).

mod kind;
mod layout;
mod order;
mod shape;

use half::f16;
use half::slice::HalfFloatSliceExt;
use nq_formats::pack::unpack_row;
use nq_formats::{AffineWeight, Bits, GroupValues, QuantizedWeight, Scales, Weight, Zeros};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Error, Result};
use nq_model::{DType, Dims};
use rayon::prelude::*;
use std::borrow::Cow;

pub use kind::PackedKind;
pub(crate) use kind::PartBits;
pub use layout::{SPAN, Stack, TILE, operand_index};
pub use order::StackKind;
pub(crate) use shape::PackedShape;

/// Several weights with the same inputs that are packed as one.
pub struct Packing<'a> {
    kind: PackedKind,
    parts: Vec<Cow<'a, Weight>>,
    /// The input that each column is, if they are sorted by group.
    order: Option<Vec<u32>>,
    stack: Stack,
    rows: usize,
    inputs: usize,
    exponent: i32,
}

impl<'a> Packing<'a> {
    /// Plans the packing of `parts`; with values of FP16 if `plain` and if they are in trellis codes or an order of their
    /// own. Those in an order of their own are sorted by group, but where that differs between them, they are FP16, too.
    ///
    /// # Errors
    /// [`Error::NoKernel`] if a part has no kernel; [`Error::Shape`] if inputs, schemes or, for
    /// interleaving, heights differ.
    pub fn new(parts: &[&'a Weight], stack: Stack, plain: bool) -> Result<Self> {
        let shape = |what, expected: String, found: String| Error::Shape {
            op: "linear",
            what,
            expected,
            found,
        };
        let first = *parts
            .first()
            .ok_or_else(|| shape("stacked weights", "at least one".into(), "none".into()))?;
        let (height, inputs) = first.dims().pair();
        for part in parts {
            if part.dims().cols != inputs {
                let found = part.dims().cols.to_string();
                return Err(shape(
                    "inputs of a stacked weight",
                    inputs.to_string(),
                    found,
                ));
            }
            let interleaved = stack == Stack::Interleave;
            if interleaved && (part.dims().rows != height || !height.is_multiple_of(8)) {
                let expected = format!("{height}, a multiple of 8, like the first");
                let found = part.dims().rows.to_string();
                return Err(shape("rows of an interleaved weight", expected, found));
            }
        }
        if stack == Stack::Interleave && parts.len() != 2 {
            let found = parts.len().to_string();
            return Err(shape("interleaved weights", "2".into(), found));
        }
        let kinds = parts.iter().map(|part| WeightKind::of(part));
        let StackKind { mut kind, sorted } = StackKind::new(kinds, inputs, plain)?;
        let (mut sorted_parts, mut order) = (None, None);
        if sorted {
            (sorted_parts, order) = order::sorted(parts).unzip();
            if order.is_none() {
                kind = PackedKind::Fp16;
            }
        }
        // Offsets of weights without zero-points are their scales times the midpoint.
        let offsets = matches!(
            kind,
            PackedKind::Affine {
                zeros: Zeros::Offset,
                two_level: false,
                ..
            }
        );
        for part in parts.iter().filter(|_| offsets) {
            if let Weight::Quantized(QuantizedWeight::Affine(a)) = part
                && a.scheme().zeros == Zeros::None
                && let Some(scale) = a.scales().iter().find(|s| {
                    let middle = f32::from(a.scheme().value_bits().midpoint());
                    s.to_f32().abs() * middle > f16::MAX.to_f32()
                })
            {
                return Err(shape(
                    "scales of a stacked weight",
                    "offsets within f16".into(),
                    scale.to_string(),
                ));
            }
        }
        if kind.has_table() && stack == Stack::Concat {
            let mut rows = 0;
            for pair in parts.windows(2) {
                rows += pair[0].dims().rows;
                if rows % 8 > 0 && table_of(pair[0]) != table_of(pair[1]) {
                    let expected = "a multiple of 8 where the next weight has other levels";
                    return Err(shape(
                        "rows of a stacked weight",
                        expected.into(),
                        rows.to_string(),
                    ));
                }
            }
        }
        let exponent = match kind {
            PackedKind::Fp16 => common_exponent(parts)?,
            PackedKind::Affine { .. } | PackedKind::Trellis(_) | PackedKind::Exl3(_) => 0,
        };
        Ok(Packing {
            kind,
            parts: match sorted_parts {
                Some(sorted) => sorted.into_iter().map(Cow::Owned).collect(),
                None => parts.iter().map(|&part| Cow::Borrowed(part)).collect(),
            },
            order,
            stack,
            rows: parts.iter().map(|p| p.dims().rows).sum(),
            inputs,
            exponent,
        })
    }

    /// The kind of the result.
    pub fn kind(&self) -> PackedKind {
        self.kind
    }

    /// The input that each column is, `[inputs]`, if they are sorted by group.
    pub fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    /// Number of rows of all parts together.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Number of tiles of 16 rows.
    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// Number of spans of 256 inputs.
    pub fn spans(&self) -> usize {
        self.inputs.div_ceil(SPAN)
    }

    /// Factor of packed values: 16-bit weights are stored times a power of two,
    /// so that bfloat16 and f32 values keep their exponents.
    pub fn scale(&self) -> f32 {
        2f32.powi(-self.exponent)
    }

    /// Packs tiles `first ..` into `codes` and `meta`, which hold the same number of whole tiles.
    ///
    /// # Errors
    /// A dense weight that is not of a float type.
    pub fn pack(&self, first: usize, codes: &mut [u8], meta: &mut [u8]) -> Result<()> {
        let code_tile = self.spans() * self.kind.code_bytes();
        let meta_tile = self.spans() * self.kind.meta_bytes();
        let tiles = codes.len() / code_tile.max(1);
        if meta_tile == 0 {
            return (codes.par_chunks_mut(code_tile).enumerate())
                .try_for_each(|(i, c)| self.pack_tile(first + i, c, &mut []));
        }
        let (codes, meta) = (
            &mut codes[..tiles * code_tile],
            &mut meta[..tiles * meta_tile],
        );
        (codes
            .par_chunks_mut(code_tile)
            .zip(meta.par_chunks_mut(meta_tile)))
        .enumerate()
        .try_for_each(|(i, (c, m))| self.pack_tile(first + i, c, m))
    }

    /// The part, and its row, at packed row `row`.
    fn source(&self, row: usize) -> Option<(&Weight, usize)> {
        if row >= self.rows {
            return None;
        }
        if self.stack == Stack::Interleave {
            let (tile, within) = (row / TILE, row % TILE);
            return Some((&self.parts[within / 8], tile * 8 + within % 8));
        }
        let mut at = row;
        for part in &self.parts {
            let n = part.dims().rows;
            if at < n {
                return Some((part, at));
            }
            at -= n;
        }
        None
    }

    fn pack_tile(&self, tile: usize, codes: &mut [u8], meta: &mut [u8]) -> Result<()> {
        let record = self.kind.code_bytes();
        meta.fill(0);
        for upper in 0..2 {
            for g in 0..8 {
                let place = TilePlace { g, upper };
                let Some((weight, row)) = self.source(tile * TILE + 8 * upper + g) else {
                    for codes in codes.chunks_exact_mut(record) {
                        place.fill_zero(self.kind, codes);
                    }
                    continue;
                };
                match weight {
                    Weight::Quantized(QuantizedWeight::Affine(a))
                        if self.kind != PackedKind::Fp16 =>
                    {
                        self.pack_affine(a, row, place, codes, meta);
                    }
                    _ => self.pack_halves(weight, row, place, codes)?,
                }
            }
        }
        Ok(())
    }

    fn pack_halves(
        &self,
        weight: &Weight,
        row: usize,
        place: TilePlace,
        codes: &mut [u8],
    ) -> Result<()> {
        let factor = 2f32.powi(self.exponent);
        let mut values = [0f32; SPAN];
        let mut halves = [f16::ZERO; SPAN];
        let mut dequantized = Vec::new();
        if matches!(weight, Weight::Quantized(_)) {
            dequantized.resize(self.inputs, 0.0);
            weight.dequantize_row(row, &mut dequantized)?;
        }
        for (span, codes) in codes.chunks_exact_mut(self.kind.code_bytes()).enumerate() {
            let n = SPAN.min(self.inputs - span * SPAN);
            values[n..].fill(0.0);
            match weight {
                Weight::Dense(t) => {
                    t.copy_f32(row * self.inputs + span * SPAN, &mut values[..n])?
                }
                Weight::Quantized(_) => {
                    values[..n].copy_from_slice(&dequantized[span * SPAN..][..n])
                }
            }
            values.iter_mut().for_each(|v| *v *= factor);
            halves.convert_from_f32_slice(&values);
            // Two inputs at a time, which are adjacent.
            for (pair, [low, high]) in halves.as_chunks::<2>().0.iter().enumerate() {
                let (c, t, i) = (pair / 16, pair % 16 / 4, pair % 4);
                let word = ((2 * c + i / 2) * 32 + place.lane(t)) * 16;
                let at = word + (i % 2 * 2 + place.upper) * 4;
                let both = u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
                codes[at..at + 4].copy_from_slice(&both.to_le_bytes());
            }
        }
        Ok(())
    }

    fn pack_affine(
        &self,
        a: &AffineWeight,
        row: usize,
        place: TilePlace,
        codes: &mut [u8],
        meta: &mut [u8],
    ) {
        let PackedKind::Affine {
            bits,
            zeros,
            groups,
            two_level,
            table,
        } = self.kind
        else {
            return;
        };
        let own = a.scheme();
        let record = self.kind.code_bytes();
        let levels = table.then(|| levels_of(a));
        if table {
            let mut indices = vec![0; self.inputs.next_multiple_of(SPAN)];
            unpack_row(own.bits, a.row_codes(row), &mut indices[..self.inputs]);
            let spans = indices.as_chunks::<SPAN>().0;
            for (indices, codes) in spans.iter().zip(codes.chunks_exact_mut(record)) {
                place.indices(indices, codes, bits);
            }
        } else {
            self.pack_codes(a, row, place, codes);
        }
        let kept = a.two_levels().filter(|_| two_level);
        let scales = kept.and_then(|(scales, _)| RowLevels::of(scales, a, row));
        let offsets = kept.and_then(|(_, offsets)| RowLevels::of(offsets?, a, row));
        // Signed scales have the midpoint of their bytes added.
        let middle = if zeros == Zeros::None || groups == 16 {
            128
        } else {
            0
        };
        let added = match (own.scales, own.zeros) {
            (Scales::TwoLevel(two), Zeros::None) => 128 - two.bits.midpoint(),
            _ => middle,
        };
        let scale_bytes = if two_level { 16 } else { 32 };
        let per_zero = self.kind.groups_of_point();
        let in_row = a.groups();
        let size = own.group.size(self.inputs).max(1);
        let half = place.g * 2 + place.upper;
        for (span, meta) in meta.chunks_exact_mut(self.kind.meta_bytes()).enumerate() {
            let (rows, meta) = meta.split_at_mut(self.kind.rows_bytes());
            if let Some(levels) = &levels {
                let half = 1 << bits.width();
                let at = rows.len() - (2 - place.upper) * half;
                rows[at..at + half].copy_from_slice(&levels[..half]);
            }
            let count = match zeros {
                _ if !two_level => 0,
                Zeros::Offset => 2,
                _ => 1,
            };
            let factors = [&scales, &offsets].into_iter().take(count);
            for (rows, levels) in rows.chunks_exact_mut(32).zip(factors) {
                let factor = levels.as_ref().map_or(f16::ZERO, |l| l.factor(span));
                rows[half * 2..half * 2 + 2].copy_from_slice(&factor.to_le_bytes());
            }
            let (to_scales, to_points) = meta.split_at_mut(groups * scale_bytes);
            for group in 0..groups {
                // The group of the first input in this part of the span.
                let index = (span * SPAN + group * SPAN / groups) / size;
                let at = group * 8 + place.g;
                let point = group / per_zero * 8 + place.g;
                if index >= in_row {
                    if two_level {
                        to_scales[at * 2 + place.upper] = middle; // which stands for zero
                    }
                    continue;
                }
                match &scales {
                    Some(levels) => {
                        to_scales[at * 2 + place.upper] = levels.small[index].wrapping_add(added);
                    }
                    None => {
                        let scale = a.scales()[row * in_row + index];
                        let to = (at * 2 + place.upper) * 2;
                        to_scales[to..to + 2].copy_from_slice(&scale.to_le_bytes());
                    }
                }
                match &offsets {
                    Some(levels) => {
                        to_points[point * 2 + place.upper] = levels.small[index];
                    }
                    _ if zeros == Zeros::Offset && !two_level => {
                        let to = (point * 2 + place.upper) * 2;
                        let offset = f16::from_f32(a.affine(row, index).1);
                        to_points[to..to + 2].copy_from_slice(&offset.to_le_bytes());
                    }
                    _ if zeros == Zeros::Integer => {
                        let middle = own.value_bits().midpoint();
                        let z = a.zero_point(row, index).unwrap_or(middle);
                        match bits {
                            Bits::B4 => to_points[point] |= z << (4 * place.upper),
                            _ => to_points[point * 2 + place.upper] = z,
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    /// Writes a row's codes, not indices of a table, into records.
    fn pack_codes(&self, a: &AffineWeight, row: usize, place: TilePlace, codes: &mut [u8]) {
        let PackedKind::Affine { bits, .. } = self.kind else {
            return;
        };
        let own = a.scheme();
        // Without zero-points midpoints meet.
        let shift = match own.zeros {
            _ if !self.kind.is_centred() => 0,
            Zeros::None => bits.midpoint() - own.value_bits().midpoint(),
            _ => bits.midpoint(),
        };
        let mut scratch = Vec::new();
        let source = a.row_in(bits, shift, row, &mut scratch);
        // Planes of codes: the lowest four bits (of 2 bits two), then those above; or whole bytes.
        let (low, upper) = match bits {
            Bits::B2 | Bits::B8 => (source, &[][..]),
            _ => source.split_at(self.inputs.div_ceil(2)),
        };
        let part = |plane: &[u8], span: usize, width: usize| {
            let (mut bytes, width) = ([0u8; SPAN], SPAN * width / 8);
            let from = &plane[(span * width).min(plane.len())..plane.len().min((span + 1) * width)];
            bytes[..from.len()].copy_from_slice(from);
            bytes
        };
        let record = self.kind.code_bytes();
        for (span, codes) in codes.chunks_exact_mut(record).enumerate() {
            match (bits, self.kind.order()) {
                (Bits::B2, _) => place.int2(&part(low, span, 2), codes),
                (Bits::B8, 4) => place.wide(&part(low, span, 8), codes),
                (Bits::B8, _) => place.int8(&part(low, span, 8), codes),
                _ => place.int4(&part(low, span, 4), codes, bits),
            }
            match bits {
                Bits::B5 => place.upper::<1>(&part(upper, span, 1), codes),
                Bits::B6 => place.upper::<2>(&part(upper, span, 2), codes),
                _ => {}
            }
        }
    }
}

/// The table of a weight's levels as signed bytes; of even levels, how far codes are from the midpoint.
fn levels_of(a: &AffineWeight) -> [u8; 16] {
    let middle = a.scheme().bits.midpoint();
    std::array::from_fn(|code| match a.levels() {
        Some(levels) => levels.get(code).map_or(0, |level| level ^ 0x80),
        None => (code as u8).wrapping_sub(middle),
    })
}

/// That of a weight of integer codes.
fn table_of(weight: &Weight) -> Option<[u8; 16]> {
    match weight {
        Weight::Quantized(QuantizedWeight::Affine(a)) => Some(levels_of(a)),
        _ => None,
    }
}

/// The scales or offsets of a row in two levels.
struct RowLevels<'a> {
    /// `[groups]`
    small: Vec<u8>,
    /// `[spans]`, the f16 of each span of the row.
    factors: &'a [f16],
    /// Inputs of a span.
    span: usize,
}

impl<'a> RowLevels<'a> {
    /// Those of row `row` among the `values` of weight `a`; `None` if these are not in two levels.
    fn of(values: &'a GroupValues, a: &AffineWeight, row: usize) -> Option<Self> {
        let (GroupValues::TwoLevel { small, of_spans }, Scales::TwoLevel(two)) =
            (values, a.scheme().scales)
        else {
            return None;
        };
        let (inputs, groups) = (a.in_features(), a.groups());
        let (bytes, spans) = (two.bits.bytes(groups), two.span.count(inputs));
        let mut unpacked = vec![0; groups];
        unpack_row(
            two.bits,
            &small[row * bytes..(row + 1) * bytes],
            &mut unpacked,
        );
        Some(RowLevels {
            small: unpacked,
            factors: &of_spans[row * spans..(row + 1) * spans],
            span: two.span.size(inputs),
        })
    }

    /// The factor of a span of 256 inputs.
    fn factor(&self, span: usize) -> f16 {
        self.factors[(span * SPAN / self.span.max(1)).min(self.factors.len() - 1)]
    }
}

/// A row's place in its tile.
#[derive(Clone, Copy)]
struct TilePlace {
    g: usize,
    upper: usize,
}

impl TilePlace {
    fn lane(self, t: usize) -> usize {
        self.g * 4 + t
    }

    /// Writes the lowest four bits of 256 codes of `bits`, two per byte, into a record.
    fn int4(self, bytes: &[u8; SPAN], codes: &mut [u8], bits: Bits) {
        let unit = bits.width() * 128;
        for c in 0..8 {
            for t in 0..4 {
                let from = c * 16 + t * 4;
                let w = u32::from_le_bytes([
                    bytes[from],
                    bytes[from + 1],
                    bytes[from + 2],
                    bytes[from + 3],
                ]);
                let at = c / 2 * unit + self.lane(t) * 16 + (c % 2 * 2 + self.upper) * 4;
                codes[at..at + 4].copy_from_slice(&lane_word(w).to_le_bytes());
            }
        }
    }

    /// Writes the `WIDTH` bits above four of 256 codes into a record.
    fn upper<const WIDTH: usize>(self, bytes: &[u8; SPAN], codes: &mut [u8]) {
        let unit = (4 + WIDTH) * 128;
        for i in 0..SPAN {
            let value = bytes[i * WIDTH / 8] >> (i * WIDTH % 8) & ((1 << WIDTH) - 1);
            let (c, t, high) = (i / 32, i % 32 / 8, i % 8 / 4);
            let byte = [0, 2, 1, 3][i % 4];
            let bit = ((c % 2 * 2 + self.upper) * 2 + high) * WIDTH;
            let word = c / 2 * unit + 512 + (self.lane(t) * WIDTH + bit / 8) * 4;
            let to = &mut codes[word + byte];
            *to = *to & !(((1 << WIDTH) - 1) << (bit % 8)) | value << (bit % 8);
        }
    }

    /// Writes 256 codes of 8 bits into a record, as planes of four.
    fn wide(self, bytes: &[u8; SPAN], codes: &mut [u8]) {
        let mut planes = [[0; SPAN]; 2];
        for (i, two) in bytes.as_chunks::<2>().0.iter().enumerate() {
            planes[0][i] = two[0] & 15 | two[1] << 4;
            planes[1][i] = two[0] >> 4 | two[1] & 0xf0;
        }
        self.int4(&planes[0], codes, Bits::B8);
        self.upper::<4>(&planes[1], codes);
    }

    /// Writes 256 codes of 2 bits into a record.
    fn int2(self, bytes: &[u8; SPAN], codes: &mut [u8]) {
        for i in 0..SPAN {
            let (c, t, high) = (i / 32, i % 32 / 8, i % 8 / 4);
            let j = c % 2 * 2 + self.upper;
            let at = c / 2 * 256 + self.lane(t) * 8 + j / 2 * 4 + [0, 2, 1, 3][i % 4];
            let (to, shift) = (&mut codes[at], j % 2 * 4 + high * 2);
            *to = *to & !(3 << shift) | (bytes[i / 4] >> (i % 4 * 2) & 3) << shift;
        }
    }

    /// Writes 256 indices of a table of levels into a record.
    fn indices(self, indices: &[u8; SPAN], codes: &mut [u8], bits: Bits) {
        let unit = bits.width() * 128;
        for (n, eight) in indices.as_chunks::<8>().0.iter().enumerate() {
            let (c, t) = (n / 4, n % 4);
            let (j, codes) = (c % 2 * 2 + self.upper, &mut codes[c / 2 * unit..][..unit]);
            // Bits of each index, from `low` on, in its nibble of a word, where they begin at bit `to`.
            let mut put = |at: usize, mask: u8, low: u32, to: u32| {
                let (mut word, mut places) = (0, 0);
                for (nibble, &i) in [0, 2, 1, 3, 4, 6, 5, 7].iter().enumerate() {
                    let shift = 4 * nibble as u32 + to;
                    word |= u32::from(eight[i] >> low & mask) << shift;
                    places |= u32::from(mask) << shift;
                }
                let bytes = &mut codes[at..at + 4];
                let old = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                bytes.copy_from_slice(&(old & !places | word).to_le_bytes());
            };
            if bits == Bits::B3 {
                put(self.lane(t) * 8 + j / 2 * 4, 3, 0, (j % 2 * 2) as u32);
                put(256 + self.lane(t) * 4, 1, 2, j as u32);
            } else {
                put(self.lane(t) * 16 + j * 4, 15, 0, 0);
            }
        }
    }

    /// Writes 256 codes into a record.
    fn int8(self, bytes: &[u8; SPAN], codes: &mut [u8]) {
        for c in 0..8 {
            for t in 0..4 {
                let from = c * 32 + t * 8;
                let to = (c * 32 + self.lane(t)) * 16 + self.upper * 4;
                codes[to..to + 4].copy_from_slice(&bytes[from..from + 4]);
                codes[to + 8..to + 12].copy_from_slice(&bytes[from + 4..from + 8]);
            }
        }
    }

    /// Zero codes: with the zero scale of an absent row, zero weights.
    fn fill_zero(self, kind: PackedKind, codes: &mut [u8]) {
        match kind.bits() {
            2 => self.int2(&[0; SPAN], codes),
            3 => self.indices(&[0; SPAN], codes, Bits::B3),
            4 => self.int4(&[0; SPAN], codes, Bits::B4),
            5 => {
                self.int4(&[0; SPAN], codes, Bits::B5);
                self.upper::<1>(&[0; SPAN], codes);
            }
            6 => {
                self.int4(&[0; SPAN], codes, Bits::B6);
                self.upper::<2>(&[0; SPAN], codes);
            }
            8 if kind.order() == 4 => self.wide(&[0; SPAN], codes),
            8 => self.int8(&[0; SPAN], codes),
            _ => {
                for product in codes.chunks_exact_mut(512) {
                    for t in 0..4 {
                        let at = self.lane(t) * 16 + self.upper * 4;
                        product[at..at + 4].fill(0);
                        product[at + 8..at + 12].fill(0);
                    }
                }
            }
        }
    }
}

/// Reorders eight 4-bit codes, low nibbles first, to a lane's word: codes 0, 1, 2, 3 in the
/// low nibbles of bytes 0, 2, 1, 3, codes 4 .. 7 in the high ones.
fn lane_word(w: u32) -> u32 {
    let spread = |x: u32| {
        let x = (x | x << 8) & 0x00ff_00ff;
        (x | x << 4) & 0x0f0f_0f0f
    };
    let w = spread(w & 0xffff) | spread(w >> 16) << 4;
    (w & 0xff00_00ff) | (w & 0x0000_ff00) << 8 | (w & 0x00ff_0000) >> 8
}

/// The power of two that brings the greatest magnitude of all parts into [2^13, 2^14), so that
/// values down to 2^-27 of it are normal FP16 numbers. Zero if all parts are FP16.
fn common_exponent(parts: &[&Weight]) -> Result<i32> {
    let is_half = |w: &&Weight| matches!(w, Weight::Dense(t) if t.dtype() == DType::F16);
    let mut greatest = 0f32;
    for part in parts.iter().filter(|w| !is_half(w)) {
        greatest = greatest.max(greatest_of(part)?);
    }
    if greatest == 0.0 || !greatest.is_finite() {
        return Ok(0);
    }
    let exponent = 13 - greatest.log2().floor() as i32;
    // FP16 parts among other types must not overflow.
    let most = if parts.iter().any(is_half) { 0 } else { 100 };
    Ok(exponent.clamp(-100, most))
}

/// The greatest magnitude in a weight; NaN is ignored.
fn greatest_of(w: &Weight) -> Result<f32> {
    let Dims { rows, cols: inputs } = w.dims();
    (0..rows)
        .into_par_iter()
        .map_init(
            || vec![0f32; inputs],
            |values, row| {
                w.dequantize_row(row, values)?;
                Ok(values.iter().fold(0f32, |m, v| m.max(v.abs())))
            },
        )
        .try_reduce(|| 0f32, |a, b| Ok(a.max(b)))
}

#[cfg(test)]
mod tests;
