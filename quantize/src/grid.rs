//! Grids: the values that a stored group can take, which is all that a method knows of a format.
//!
//! A group of consecutive inputs of one row has a scale and a zero-point; code `q` stands for
//! `s * (q - z)`. Scales are rounded to what can be stored, an f16 or a product in two levels,
//! before anything is rounded *to* them, so what a method sees is exactly what a file stores and a
//! kernel computes.

use crate::error::{Error, Result};
use crate::linalg::Matrix;
use half::f16;
use nq_formats::models::LinearKind;
use nq_formats::{AffineScheme, AffineWeight, Weight, Zeros, pack, product};
use nq_formats::{Bits, Group, GroupValues, Levels, Parts, QuantizedWeight, TwoLevel};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The grids of a layer's Linears.
pub type Grids = BTreeMap<LinearKind, Grid>;

/// Scale and zero-point of one group, as stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupParams {
    /// Step between neighbouring codes: exactly an f16 value, finite; negative where the
    /// greatest magnitude of a symmetric group is positive and takes the lowest code.
    pub scale: f32,
    /// The code that stands for zero.
    pub zero: u8,
}

impl GroupParams {
    /// The value of code `q`.
    #[inline]
    pub fn value(self, q: u8) -> f32 {
        // Exact: the difference has at most 9 bits, the scale 11.
        self.scale * (f32::from(q) - f32::from(self.zero))
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
    /// [`Error::Request`] for schemes that nq reads but does not make: float offsets, tables of levels.
    pub fn new(scheme: AffineScheme) -> Result<Self> {
        scheme.check()?;
        if scheme.levels == Levels::Table {
            return Err(Error::Request {
                what: "levels",
                expected: "even steps".into(),
                found: "a table".into(),
            });
        }
        if scheme.zeros == Zeros::Offset {
            return Err(Error::Request {
                what: "zero-points",
                expected: "none or integers".into(),
                found: "float offsets".into(),
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

    /// How scales are kept, if in two levels.
    pub fn two_level(&self) -> Option<TwoLevel> {
        self.scheme.scales.into()
    }

    /// Spans in a row of `cols` columns: 0 if every group has its own f16.
    pub fn spans(&self, cols: usize) -> usize {
        self.two_level().map_or(0, |two| two.span.count(cols))
    }

    /// Groups per span in a row of `cols` columns.
    pub fn groups_of_span(&self, cols: usize) -> usize {
        let span = self.two_level().map_or(cols, |two| two.span.size(cols));
        span.div_ceil(self.group().size(cols).max(1)).max(1)
    }

    /// The least and the greatest integer that the f16 factor of a span is multiplied by.
    pub fn small_range(&self) -> (i16, i16) {
        let bits = self.two_level().map_or(Bits::B8, |two| two.bits);
        let middle = i16::from(bits.midpoint());
        if self.symmetric() {
            (-middle, middle - 1)
        } else {
            (0, bits.max_code().into())
        }
    }

    /// The f16 factor of a span whose scale of greatest magnitude is `greatest`.
    pub fn of_span(&self, greatest: f32) -> f16 {
        let (_, most) = self.small_range();
        // Keeps products finite, and not all zero.
        let greatest = greatest.abs().min(0.99 * f16::MAX.to_f32());
        match f16::from_f32(greatest / f32::from(most)) {
            of_span if of_span == f16::ZERO && greatest > 0.0 => f16::from_bits(1),
            of_span => of_span,
        }
    }

    /// The integer whose product with a span's factor is nearest to `scale`.
    pub fn small(&self, of_span: f16, scale: f32) -> i16 {
        let (least, most) = self.small_range();
        let ratio = scale / of_span.to_f32();
        if ratio.is_finite() {
            ratio.round_ties_even().clamp(least.into(), most.into()) as i16
        } else {
            0
        }
    }

    /// Takes the scales of a row's groups to the nearest that two levels hold, and gives the f16 of
    /// each span in `spans`. Does nothing where scales are f16 each.
    pub fn snap(&self, params: &mut [GroupParams], spans: &mut [f16]) {
        if spans.is_empty() {
            return;
        }
        let per_span = params.len().div_ceil(spans.len());
        for (params, of_span) in params.chunks_mut(per_span).zip(spans) {
            *of_span = self.of_span(params.iter().fold(0.0, |m, p| p.scale.abs().max(m)));
            for p in params {
                p.scale = product(*of_span, self.small(*of_span, p.scale)).to_f32();
            }
        }
    }

    /// The greatest code.
    pub fn max_code(&self) -> u8 {
        self.scheme.bits.max_code()
    }

    /// The code nearest to `w` (ties to even), 0 if the group's scale is 0.
    #[inline]
    pub fn code(&self, p: GroupParams, w: f32) -> u8 {
        if p.scale == 0.0 {
            return p.zero;
        }
        let q = (w / p.scale).round_ties_even() + f32::from(p.zero);
        q.clamp(0.0, f32::from(self.max_code())) as u8
    }

    /// Rounds a group of weights to codes.
    pub fn round(&self, p: GroupParams, w: &[f32], codes: &mut [u8]) {
        for (c, &w) in codes.iter_mut().zip(w) {
            *c = self.code(p, w);
        }
    }
}

/// A weight rounded to a grid: what a method makes.
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
    /// What the scales of a span are multiples of, `[rows, spans]`; empty where scales are f16 each.
    pub spans: Vec<f16>,
}

impl Rounded {
    /// Allocates `[rows, cols]` codes.
    pub fn new(grid: Grid, rows: usize, cols: usize) -> Self {
        let groups = grid.group().count(cols);
        let zero = GroupParams {
            scale: 0.0,
            zero: grid.bits().midpoint(),
        };
        Rounded {
            grid,
            cols,
            codes: vec![0; rows * cols],
            params: vec![zero; rows * groups],
            spans: vec![f16::ZERO; rows * grid.spans(cols)],
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

    /// The integers of scales in two levels as they are stored, `[rows, groups]`.
    fn small_scales(&self) -> Vec<u8> {
        let (groups, per_span) = (self.groups(), self.grid.groups_of_span(self.cols));
        let spans = self.grid.spans(self.cols);
        let (least, _) = self.grid.small_range();
        let small = |(i, p): (usize, &GroupParams)| {
            let of_span = self.spans[i / groups * spans + i % groups / per_span];
            let small = self.grid.small(of_span, p.scale);
            debug_assert_eq!(product(of_span, small).to_f32(), p.scale);
            (small - least) as u8
        };
        self.params.iter().enumerate().map(small).collect()
    }

    /// Splits it into pieces of `n` rows; the last may be shorter.
    pub fn rows_mut(&mut self, n: usize) -> Vec<RowsMut<'_>> {
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

    /// Appends the rows of `more`, which must have the same width and grid.
    pub fn append(&mut self, more: Rounded) {
        self.codes.extend_from_slice(&more.codes);
        self.params.extend_from_slice(&more.params);
        self.spans.extend_from_slice(&more.spans);
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

    /// The weight in canonical form.
    ///
    /// # Errors
    /// Errors of [`AffineWeight::new`]; the methods of this crate cause none.
    pub fn to_weight(&self) -> Result<Weight> {
        let mut packer = Packer::new(self.grid, self.cols);
        packer.push(self);
        packer.finish()
    }
}

/// Some rows of a [`Rounded`], for writing.
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// `[rows, cols]`
    pub codes: &'a mut [u8],
    /// `[rows, groups]`
    pub params: &'a mut [GroupParams],
    /// `[rows, spans]`
    pub spans: &'a mut [f16],
}

/// A weight put together from rounded pieces of its rows, in canonical form.
#[derive(Clone, Debug)]
pub struct Packer {
    grid: Grid,
    cols: usize,
    rows: usize,
    codes: Vec<u8>,
    scales: Vec<f16>,
    small: Vec<u8>,
    zeros: Vec<u8>,
}

impl Packer {
    /// No rows yet, of `cols` columns.
    pub fn new(grid: Grid, cols: usize) -> Self {
        Packer {
            grid,
            cols,
            rows: 0,
            codes: Vec::new(),
            scales: Vec::new(),
            small: Vec::new(),
            zeros: Vec::new(),
        }
    }

    /// Appends rows, of the same grid and columns.
    pub fn push(&mut self, rows: &Rounded) {
        debug_assert!(rows.grid == self.grid && rows.cols == self.cols);
        let scheme = self.grid.scheme();
        let codes = pack::pack_rows(scheme.bits, &rows.codes, self.cols);
        self.codes.extend_from_slice(&codes);
        match self.grid.two_level() {
            None => {
                let scales = rows.params.iter().map(|p| f16::from_f32(p.scale));
                self.scales.extend(scales);
            }
            Some(two) => {
                let small = pack::pack_rows(two.bits, &rows.small_scales(), rows.groups());
                self.small.extend_from_slice(&small);
                self.scales.extend_from_slice(&rows.spans);
            }
        }
        if scheme.zeros == Zeros::Integer {
            let zeros: Vec<u8> = rows.params.iter().map(|p| p.zero).collect();
            let packed = pack::pack_rows(scheme.bits, &zeros, rows.groups());
            self.zeros.extend_from_slice(&packed);
        }
        self.rows += rows.rows();
    }

    /// Appends what another of the same grid and columns has.
    pub fn append(&mut self, more: Packer) {
        debug_assert!(more.grid == self.grid && more.cols == self.cols);
        self.codes.extend(more.codes);
        self.scales.extend(more.scales);
        self.small.extend(more.small);
        self.zeros.extend(more.zeros);
        self.rows += more.rows;
    }

    /// The weight.
    ///
    /// # Errors
    /// As [`AffineWeight::assemble`].
    pub fn finish(self) -> Result<Weight> {
        let scheme = self.grid.scheme();
        let scales = match self.grid.two_level() {
            None => GroupValues::Half(self.scales.into()),
            Some(_) => GroupValues::TwoLevel {
                small: self.small.into(),
                of_spans: self.scales.into(),
            },
        };
        let parts = Parts {
            codes: self.codes.into(),
            scales,
            zeros: (scheme.zeros == Zeros::Integer).then(|| self.zeros.into()),
            offsets: None,
            levels: None,
            g_idx: None,
        };
        let weight = AffineWeight::assemble(scheme, (self.rows, self.cols), parts)?;
        Ok(Weight::Quantized(QuantizedWeight::Affine(weight)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        };
        assert_eq!(p.value(grid.code(p, 3.0)), 0.0);
    }

    #[test]
    fn float_offsets_are_refused() {
        let scheme = AffineScheme::new(Bits::B4, Group::Channel, Zeros::Offset);
        let error = Grid::new(scheme).unwrap_err().to_string();
        assert_eq!(
            error,
            "zero-points: expected none or integers, found float offsets"
        );
    }

    /// What a method computes with is what a reader gets back, bit for bit.
    #[test]
    fn canonical_weight_dequantizes_to_the_same_values() {
        let zeros = [Zeros::None, Zeros::Integer];
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
                if zeros == Zeros::Integer {
                    p.zero = (i * 5 % max) as u8;
                    p.scale = p.scale.abs(); // what such grids have
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
