//! Grids: the values that a stored group can take, which is all that a method knows of a format.
//!
//! A group of consecutive inputs of one row has a scale, and a zero-point or an offset; code `q`
//! stands for `s * (q - z) + o`. Scales and offsets are rounded to what can be stored, an f16 or a
//! product in two levels, before anything is rounded *to* them, so what a method sees is exactly
//! what a file stores and a kernel computes.

use crate::error::{Error, Result};
use crate::linalg::Matrix;
use half::f16;
use nq_formats::{AffineScheme, Bits, Group, Levels, TwoLevel, Zeros, product};
use nq_model::LinearKind;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The grids of a layer's Linears.
pub(crate) type Grids = BTreeMap<LinearKind, Grid>;

/// Scale, zero-point and offset of one group, as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupParams {
    /// Step between neighbouring codes: exactly an f16 value, finite; negative where the
    /// greatest magnitude of a symmetric group is positive and takes the lowest code.
    pub scale: f32,
    /// The code of the value zero; 0 in schemes with float offsets.
    pub zero: u8,
    /// The value of code `zero`: exactly an f16 value, finite; 0 except in schemes with float offsets.
    pub offset: f32,
}

impl GroupParams {
    /// The value of code `q`.
    #[inline]
    pub fn value(self, q: u8) -> f32 {
        // Rounded once: the difference has at most 9 bits, the scale 11.
        self.scale * (f32::from(q) - f32::from(self.zero)) + self.offset
    }
}

/// The values that a scheme can store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grid {
    scheme: AffineScheme,
}

impl Grid {
    /// The grid of `scheme`.
    ///
    /// # Errors
    /// [`Error::Request`] for tables of levels, which nq reads but does not make.
    pub fn new(scheme: AffineScheme) -> Result<Self> {
        scheme.check()?;
        if scheme.levels == Levels::Table {
            return Err(Error::Request {
                what: "levels",
                expected: "even steps".into(),
                found: "a table".into(),
            });
        }
        Ok(Grid { scheme })
    }

    /// The scheme.
    pub fn scheme(&self) -> AffineScheme {
        self.scheme
    }

    /// Width of a code in bits.
    pub fn bits(&self) -> Bits {
        self.scheme.bits
    }

    /// Number of inputs in a group.
    pub fn group(&self) -> Group {
        self.scheme.group
    }

    /// True if every zero-point is the midpoint of the codes.
    pub fn symmetric(&self) -> bool {
        self.scheme.zeros == Zeros::None
    }

    /// True if groups have float offsets.
    pub fn offsets(&self) -> bool {
        self.scheme.zeros == Zeros::Offset
    }

    /// How scales are kept, if in two levels.
    pub(crate) fn two_level(&self) -> Option<TwoLevel> {
        self.scheme.scales.into()
    }

    /// Number of spans in a row of `cols` columns: 0 if every group has an f16 scale of its own.
    pub(crate) fn spans(&self, cols: usize) -> usize {
        self.two_level().map_or(0, |two| two.span.count(cols))
    }

    /// Groups per span in a row of `cols` columns.
    pub(crate) fn groups_of_span(&self, cols: usize) -> usize {
        let span = self.two_level().map_or(cols, |two| two.span.size(cols));
        span.div_ceil(self.group().size(cols).max(1)).max(1)
    }

    /// The least and the greatest integer scale of a group, in units of its span's f16 factor.
    pub(crate) fn small_range(&self) -> (i16, i16) {
        let bits = self.two_level().map_or(Bits::B8, |two| two.bits);
        let middle = i16::from(bits.midpoint());
        if self.symmetric() {
            (-middle, middle - 1)
        } else {
            (0, bits.max_code().into())
        }
    }

    /// The f16 factor of a span whose scale of greatest magnitude is `greatest`.
    pub fn factor(&self, greatest: f32) -> f16 {
        let (_, most) = self.small_range();
        // Keeps products finite, and not all zero.
        let greatest = greatest.abs().min(0.99 * f16::MAX.to_f32());
        match f16::from_f32(greatest / f32::from(most)) {
            factor if factor == f16::ZERO && greatest > 0.0 => f16::from_bits(1),
            factor => factor,
        }
    }

    /// The integer scale that is nearest to `scale` in units of a span's factor.
    pub fn small(&self, factor: f16, scale: f32) -> i16 {
        let (least, most) = self.small_range();
        let ratio = scale / factor.to_f32();
        if ratio.is_finite() {
            ratio.round_ties_even().clamp(least.into(), most.into()) as i16
        } else {
            0
        }
    }

    /// The nearest parameters whose scale and offset are multiples of the span's factors.
    pub fn near(&self, factors: SpanFactors, p: GroupParams) -> GroupParams {
        let nearest = |factor, v| product(factor, self.small(factor, v)).to_f32();
        GroupParams {
            scale: nearest(factors.scale, p.scale),
            offset: nearest(factors.offset, p.offset),
            ..p
        }
    }

    /// Rounds the scales and offsets of a row's groups to the nearest that two levels can store, and writes
    /// the factors of each span to `spans`. Does nothing if every group has an f16 scale of its own.
    pub(crate) fn snap(&self, params: &mut [GroupParams], spans: &mut [SpanFactors]) {
        if spans.is_empty() {
            return;
        }
        let per_span = params.len().div_ceil(spans.len());
        for (params, factors) in params.chunks_mut(per_span).zip(spans) {
            let greatest = |part: fn(&GroupParams) -> f32| {
                self.factor(params.iter().map(part).fold(0.0, |m, v| v.abs().max(m)))
            };
            *factors = SpanFactors {
                scale: greatest(|p| p.scale),
                offset: -greatest(|p| p.offset),
            };
            for p in params {
                *p = self.near(*factors, *p);
            }
        }
    }

    /// Parameters of a group of zeros.
    pub fn zeros(&self) -> GroupParams {
        GroupParams {
            zero: match self.offsets() {
                true => 0,
                false => self.bits().midpoint(),
            },
            ..GroupParams::default()
        }
    }

    /// The greatest code.
    pub(crate) fn max_code(&self) -> u8 {
        self.scheme.bits.max_code()
    }

    /// The code nearest to `w` (ties to even), 0 if the group's scale is 0.
    #[inline]
    pub fn code(&self, p: GroupParams, w: f32) -> u8 {
        if p.scale == 0.0 {
            return p.zero;
        }
        let zero = f32::from(p.zero);
        let (low, high) = (-zero, f32::from(self.max_code()) - zero);
        (round_within((w - p.offset) / p.scale, low, high) + zero) as u8
    }

    /// Rounds a group of weights to codes.
    pub fn round(&self, p: GroupParams, w: &[f32], codes: &mut [u8]) {
        for (c, &w) in codes.iter_mut().zip(w) {
            *c = self.code(p, w);
        }
    }
}

/// Adding and subtracting this rounds a small f32 to an integer, ties to even, in two
/// instructions that every vector unit has.
const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23

/// The integer nearest to `v` among `low ..= high`, ties to even. The limits take two instructions on any
/// vector unit; [`f32::clamp`] takes more because it preserves NaN, which weights never are.
#[inline(always)]
pub(crate) fn round_within(v: f32, low: f32, high: f32) -> f32 {
    let v = if v > low { v } else { low };
    let v = if v < high { v } else { high };
    v + ROUNDER - ROUNDER
}

/// The f16 factors of a span: the scales and offsets of its groups are multiples of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpanFactors {
    /// The factor of scales.
    pub scale: f16,
    /// The factor of offsets, at most 0.
    pub offset: f16,
}

/// A weight rounded to a grid, the result of a method.
#[derive(Clone, Debug)]
pub struct Rounded {
    /// The grid.
    pub grid: Grid,
    /// Number of columns.
    pub cols: usize,
    /// One code per element, `[rows, cols]`, not packed.
    pub codes: Vec<u8>,
    /// `[rows, groups]`.
    pub params: Vec<GroupParams>,
    /// `[rows, spans]`; empty where scales are f16 each.
    pub spans: Vec<SpanFactors>,
}

impl Rounded {
    /// Allocates `[rows, cols]` codes.
    pub fn new(grid: Grid, rows: usize, cols: usize) -> Self {
        let groups = grid.group().count(cols);
        let zero = grid.zeros();
        Rounded {
            grid,
            cols,
            codes: vec![0; rows * cols],
            params: vec![zero; rows * groups],
            spans: vec![SpanFactors::default(); rows * grid.spans(cols)],
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.codes.len() / self.cols.max(1)
    }

    /// Number of groups in a row.
    pub fn groups(&self) -> usize {
        self.grid.group().count(self.cols)
    }

    /// The stored integers that, times a factor of their span, give a value of each group, `[rows, groups]`.
    pub(crate) fn small(&self, value: impl Fn(GroupParams, SpanFactors) -> (f32, f16)) -> Vec<u8> {
        let (groups, per_span) = (self.groups(), self.grid.groups_of_span(self.cols));
        let spans = self.grid.spans(self.cols);
        let (least, _) = self.grid.small_range();
        let small = |(i, p): (usize, &GroupParams)| {
            let factors = self.spans[i / groups * spans + i % groups / per_span];
            let (value, factor) = value(*p, factors);
            let small = self.grid.small(factor, value);
            debug_assert_eq!(product(factor, small).to_f32(), value);
            (small - least) as u8
        };
        self.params.iter().enumerate().map(small).collect()
    }

    /// Splits it into pieces of `n` rows; the last may be shorter.
    pub(crate) fn rows_mut(&mut self, n: usize) -> Vec<RowsMut<'_>> {
        let (cols, groups, spans) = (self.cols, self.groups(), self.grid.spans(self.cols));
        let mut spans = self.spans.chunks_mut((n * spans).max(1));
        let params = self.params.chunks_mut((n * groups).max(1));
        let codes = self.codes.chunks_mut((n * cols).max(1));
        let pieces = codes.zip(params).map(|(codes, params)| RowsMut {
            codes,
            params,
            spans: spans.next().unwrap_or_default(),
        });
        pieces.collect()
    }

    /// Writes the values of row `row` to `out` (`cols` long).
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let size = self.grid.group().size(self.cols);
        let codes = &self.codes[row * self.cols..(row + 1) * self.cols];
        let params = &self.params[row * self.groups()..(row + 1) * self.groups()];
        for ((out, codes), &p) in out
            .chunks_mut(size)
            .zip(codes.chunks(size))
            .zip(params.iter())
        {
            for (o, &q) in out.iter_mut().zip(codes) {
                *o = p.value(q);
            }
        }
    }

    /// The difference of its values from those of `weight`.
    pub fn change(&self, weight: &Matrix) -> Matrix {
        let mut change = Matrix::zeros(weight.rows, weight.cols);
        let rows = change.data.par_chunks_mut(self.cols.max(1));
        rows.enumerate().for_each(|(i, e)| {
            self.dequantize_row(i, e);
            e.iter_mut().zip(weight.row(i)).for_each(|(e, w)| *e -= w);
        });
        change
    }
}

/// Some rows of a [`Rounded`], for writing.
#[derive(Debug)]
pub(crate) struct RowsMut<'a> {
    /// `[rows, cols]`
    pub codes: &'a mut [u8],
    /// `[rows, groups]`
    pub params: &'a mut [GroupParams],
    /// `[rows, spans]`
    pub spans: &'a mut [SpanFactors],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packer::Packer;

    fn grid(bits: Bits, zeros: Zeros) -> Grid {
        let group = Group::Size(4);
        Grid::new(AffineScheme::new(bits, group, zeros)).unwrap()
    }

    #[test]
    fn codes_of_a_symmetric_group_by_hand() {
        let grid = grid(Bits::B4, Zeros::None);
        let p = GroupParams {
            scale: 0.5,
            zero: 8,
            offset: 0.0,
        };
        // 0.75 / 0.5 = 1.5 and 1.25 / 0.5 = 2.5: ties go to the even neighbour, 2.
        let w = [0.75, 1.25, -9.0, 9.0];
        let mut codes = [0; 4];
        grid.round(p, &w, &mut codes);
        assert_eq!(codes, [10, 10, 0, 15]);
        assert_eq!(codes.map(|q| p.value(q)), [1.0, 1.0, -4.0, 3.5]);
    }

    #[test]
    fn pieces_of_rows_make_the_whole() {
        for zeros in [Zeros::None, Zeros::Integer] {
            let grid = grid(Bits::B4, zeros);
            let (rows, cols) = (5, 12);
            let mut whole = Rounded::new(grid, rows, cols);
            let codes = (0..rows * cols).map(|i| (i * 7 % 16) as u8);
            whole.codes = codes.collect();
            let params = (0..whole.params.len()).map(|i| GroupParams {
                scale: 0.25 * i as f32,
                zero: if zeros == Zeros::None { 8 } else { i as u8 },
                offset: 0.0,
            });
            whole.params = params.collect();
            let mut packer = Packer::new(grid, cols);
            for piece in [0..2, 2..5] {
                let mut part = Rounded::new(grid, piece.len(), cols);
                part.codes = whole.codes[piece.start * cols..piece.end * cols].to_vec();
                part.params = whole.params[piece.start * 3..piece.end * 3].to_vec();
                packer.push(&part);
            }
            let weight = packer.finish().unwrap();
            let mut row = vec![0.0; cols];
            let mut want = row.clone();
            for i in 0..rows {
                weight.dequantize_row(i, &mut row).unwrap();
                whole.dequantize_row(i, &mut want);
                assert_eq!(row, want);
            }
        }
    }

    #[test]
    fn zero_scale_gives_zeros() {
        let grid = grid(Bits::B8, Zeros::Integer);
        let p = GroupParams {
            scale: 0.0,
            zero: 7,
            offset: 0.0,
        };
        assert_eq!(p.value(grid.code(p, 3.0)), 0.0);
    }

    /// What a method computes with is what a reader gets back, bit for bit.
    #[test]
    fn canonical_weight_dequantizes_to_the_same_values() {
        let zeros = [Zeros::None, Zeros::Integer, Zeros::Offset];
        let spans = [None, Some(Group::Channel), Some(Group::Size(8))];
        let all = Bits::ALL.into_iter().flat_map(|bits| {
            let with_zeros = zeros.into_iter();
            with_zeros.flat_map(move |zeros| spans.map(|span| (bits, zeros, span)))
        });
        for (bits, zeros, span) in all {
            let two = |span| TwoLevel {
                bits: Bits::B6,
                span,
            };
            let grid = Grid::new(AffineScheme {
                scales: span.map(two).into(),
                ..grid(bits, zeros).scheme()
            })
            .unwrap();
            let (rows, cols) = (3, 10); // the last group is short
            let mut r = Rounded::new(grid, rows, cols);
            let max = usize::from(grid.max_code()) + 1;
            for (i, c) in r.codes.iter_mut().enumerate() {
                *c = (i * 37 % max) as u8;
            }
            for (i, p) in r.params.iter_mut().enumerate() {
                p.scale = f16::from_f32(0.013 * (i as f32 - 3.0)).to_f32();
                if zeros != Zeros::None {
                    p.scale = p.scale.abs(); // what such grids have
                }
                if zeros == Zeros::Integer {
                    p.zero = (i * 5 % max) as u8;
                }
                if zeros == Zeros::Offset {
                    p.offset = f16::from_f32(-0.09 * (i % 4) as f32).to_f32();
                }
            }
            let spans = r.grid.spans(cols);
            let rows_of = r.params.chunks_mut(3).zip(r.spans.chunks_mut(spans.max(1)));
            rows_of.for_each(|(params, spans)| grid.snap(params, spans));
            let weight = r.to_weight().unwrap();
            let (mut a, mut b) = (vec![0.0; cols], vec![0.0; cols]);
            for row in 0..rows {
                r.dequantize_row(row, &mut a);
                weight.dequantize_row(row, &mut b).unwrap();
                assert_eq!(a, b, "{bits:?} {zeros:?} row {row}");
            }
        }
    }
}
