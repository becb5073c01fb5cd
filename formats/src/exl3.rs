//! Weights in EXL3's codes, as exllamav3 makes them: trellis codes whose inputs and outputs are transformed.
//!
//! A weight `[out, in]` is `diag(output scales) H T H diag(input scales)`, with `H` the orthonormal Hadamard transform of
//! each 128 inputs and of each 128 outputs ([`transform`]). `T` is cut into tiles of 16 inputs and 16 outputs. A tile is a
//! cyclic sequence of 256 values, each of which follows from a state, the last 16 bits of the sequence before its
//! end, as in [`crate::trellis`]. Value `t` lies where lane `t / 8` of a warp has value `t % 8` of the right operand of
//! mma.m16n8k16 ([`place`]), so a tile is 32 chunks of eight values, one of each lane.

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::trellis::{BLOCK, state, transform};
use bytes::Bytes;
use half::f16;
use nq_model::{DType, Dims};
use rayon::prelude::*;
use serde::{Serialize, Serializer};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Inputs, and outputs, of a tile.
pub const TILE: usize = 16;
/// Values of a tile.
pub const VALUES: usize = TILE * TILE;
/// Lanes that have a chunk of a tile.
pub const LANES: usize = 32;

/// How a value follows from a state, of which exllamav3 calls the kinds so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Exl3Code {
    /// `3inst`: two halves, masked from the product with a multiplier, plus an addend; the first code, which no tensor
    /// names.
    ThreeInst,
    /// `mcg`: the same with another multiplier and no addend.
    Mcg,
    /// `mul1`: the sum of the bytes of the product with a multiplier.
    Mul1,
}

impl Exl3Code {
    /// Every code.
    pub const ALL: [Exl3Code; 3] = [Exl3Code::ThreeInst, Exl3Code::Mcg, Exl3Code::Mul1];

    /// What states are multiplied by, modulo 2^32.
    pub const fn multiplier(self) -> u32 {
        match self {
            Exl3Code::ThreeInst => 89_226_354,
            Exl3Code::Mcg => 0xCBAC_1FED,
            Exl3Code::Mul1 => 0x83DC_D12D,
        }
    }

    /// What is added to the product.
    pub const fn addend(self) -> u32 {
        match self {
            Exl3Code::ThreeInst => 64_248_484,
            Exl3Code::Mcg | Exl3Code::Mul1 => 0,
        }
    }

    /// The value of a state, rounded to f16 as exllamav3's kernels round it.
    #[inline]
    pub fn value(self, state: u16) -> f16 {
        let product = u32::from(state).wrapping_mul(self.multiplier());
        let product = product.wrapping_add(self.addend());
        match self {
            Exl3Code::ThreeInst | Exl3Code::Mcg => {
                let both = product & HALVES_MASK ^ HALVES_FLIPPED;
                let half = |bits: u32| f16::from_bits(bits as u16).to_f32();
                f16::from_f32(half(both) + half(both >> 16))
            }
            Exl3Code::Mul1 => {
                let sum: u16 = product.to_le_bytes().into_iter().map(u16::from).sum();
                // The product has 22 bits and the sum fewer than 24: f32 rounds neither.
                f16::from_f32(f32::from(1024 + sum) * BYTES_FACTOR.to_f32() + BYTES_OFFSET.to_f32())
            }
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Exl3Code::ThreeInst => "3inst",
            Exl3Code::Mcg => "mcg",
            Exl3Code::Mul1 => "mul1",
        }
    }
}

/// The bits of a product that two halves keep: signs, two bits of the exponents, mantissas.
pub const HALVES_MASK: u32 = 0x8FFF_8FFF;
/// Those that are then flipped, so that exponents are those of values around 1.
pub const HALVES_FLIPPED: u32 = 0x3B60_3B60;
/// About 1 / 147.7, by which a sum of bytes plus 1,024 is multiplied.
pub const BYTES_FACTOR: f16 = f16::from_bits(0x1EEE);
/// -1,534 of that factor, which centres the sum.
pub const BYTES_OFFSET: f16 = f16::from_bits(0xC931);

/// A code at a number of bits a weight: 1 to 8, and with `mul1` 1.5, 2.5 and 3.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Exl3Scheme {
    code: Exl3Code,
    half_bits: usize,
}

impl Exl3Scheme {
    /// The code `code` whose weights have `half_bits` halves of a bit; `None` if there is no such scheme.
    pub fn new(code: Exl3Code, half_bits: usize) -> Option<Self> {
        let known = match half_bits % 2 {
            0 => (2..=16).contains(&half_bits),
            _ => code == Exl3Code::Mul1 && (3..=7).contains(&half_bits),
        };
        known.then_some(Exl3Scheme { code, half_bits })
    }

    /// The code.
    pub const fn code(self) -> Exl3Code {
        self.code
    }

    /// Bits of a weight.
    pub const fn bits(self) -> f32 {
        self.half_bits as f32 / 2.0
    }

    /// Bits of a weight, if chunks of lanes are whole bytes and hold a state, as kernels need them: 2 to 8.
    pub const fn whole_bits(self) -> Option<usize> {
        match self.half_bits.is_multiple_of(2) && self.half_bits >= 4 {
            true => Some(self.half_bits / 2),
            false => None,
        }
    }

    /// Bytes of a tile.
    pub const fn tile_bytes(self) -> usize {
        VALUES * self.half_bits / 16
    }

    /// Bytes of the codes and scales of a weight `[out_features, in_features]`.
    pub const fn bytes(self, out_features: usize, in_features: usize) -> usize {
        (out_features / TILE) * (in_features / TILE) * self.tile_bytes()
            + 2 * (out_features + in_features)
    }

    /// The values of a tile in the order of its sequence, whose bytes are `tile`: little-endian words of 32 bits, the
    /// first bit the highest of the first word.
    ///
    /// # Panics
    /// If `tile` has another length.
    pub fn values(self, tile: &[u8]) -> [f16; VALUES] {
        assert_eq!(tile.len(), self.tile_bytes(), "bytes of a tile");
        let mut words = [0u32; VALUES * 8 / 32];
        let (packed, _) = tile.as_chunks::<4>();
        for (word, packed) in words.iter_mut().zip(packed) {
            *word = u32::from_le_bytes(*packed);
        }
        let words = &words[..packed.len()];
        // In halves of bits, odd values have the extra one.
        std::array::from_fn(|t| self.code.value(state(words, (t + 1) * self.half_bits / 2)))
    }
}

impl fmt::Display for Exl3Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exl3 {} {}", self.bits(), self.code.name())
    }
}

impl Serialize for Exl3Scheme {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Record {
            exl3: &'static str,
            bits: f32,
        }
        let record = Record {
            exl3: self.code.name(),
            bits: self.bits(),
        };
        record.serialize(to)
    }
}

/// The input and the output of value `t` in its tile.
#[inline]
pub const fn place(t: usize) -> (usize, usize) {
    let (lane, j) = (t / 8, t % 8);
    (
        lane % 4 * 2 + j % 2 + 8 * (j / 2 % 2),
        lane / 4 + 8 * (j / 4),
    )
}

/// A weight `[out, in]` in an EXL3 code, or a stack of those of several experts, each of which has scales of inputs of its
/// own. Parts are checked on construction.
#[derive(Clone, Debug)]
pub struct Exl3Weight {
    scheme: Exl3Scheme,
    dims: Dims,
    experts: usize,
    tiles: Bytes,              // [experts, in / 16, out / experts / 16, bytes of a tile]
    input_scales: Arc<[f16]>,  // [experts, in]
    output_scales: Arc<[f16]>, // [out]
}

impl Exl3Weight {
    /// Assembles a weight of dimensions `(out, in)`: `tiles` `[in / 16, out / 16, bytes of a tile]`, signed scales of
    /// inputs `[in]` and of outputs `[out]`.
    ///
    /// # Errors
    /// [`Error::Weight`], naming the part that has another length or a scale that is not finite, or if `in` or `out` is
    /// not a multiple of [`BLOCK`] above 0.
    pub fn new(
        scheme: Exl3Scheme,
        dims: Dims,
        tiles: Bytes,
        input_scales: Arc<[f16]>,
        output_scales: Arc<[f16]>,
    ) -> Result<Self> {
        let wrong = |what, expected: String, found: String| Error::Weight {
            what,
            expected: format!("{expected} for [{}, {}] {scheme}", dims.rows, dims.cols),
            found,
        };
        let fits = |n: usize| n > 0 && n.is_multiple_of(BLOCK);
        if !fits(dims.rows) || !fits(dims.cols) {
            let found = format!("[{}, {}]", dims.rows, dims.cols);
            return Err(wrong("codes", format!("multiples of {BLOCK}"), found));
        }
        let count = (dims.rows / TILE).checked_mul(dims.cols / TILE);
        let bytes = count.and_then(|n| n.checked_mul(scheme.tile_bytes()));
        let lengths = [
            ("codes", bytes, tiles.len()),
            ("input scales", Some(dims.cols), input_scales.len()),
            ("output scales", Some(dims.rows), output_scales.len()),
        ];
        for (what, expected, found) in lengths {
            if expected != Some(found) {
                let expected = expected.map_or("a size in range".into(), |n| n.to_string());
                return Err(wrong(what, expected, found.to_string()));
            }
        }
        let scales = [
            ("input scales", &input_scales),
            ("output scales", &output_scales),
        ];
        for (what, scales) in scales {
            if let Some(i) = scales.iter().position(|s| !s.is_finite()) {
                let found = format!("{} at {i}", scales[i]);
                return Err(wrong(what, "finite values".into(), found));
            }
        }
        Ok(Exl3Weight {
            scheme,
            dims,
            experts: 1,
            tiles,
            input_scales,
            output_scales,
        })
    }

    /// A stack of the experts of all `parts`, in their order; `None` if these differ in scheme or shape, or if there are none.
    pub fn stack(parts: &[&Exl3Weight]) -> Option<Exl3Weight> {
        let first = parts.first()?;
        if !parts.iter().all(|w| w.is_like(first)) {
            return None;
        }
        let mut tiles = Vec::with_capacity(parts.iter().map(|w| w.tiles.len()).sum());
        for part in parts {
            tiles.extend_from_slice(&part.tiles);
            crate::mapping::release(&part.tiles);
        }
        let scales = |of_part: fn(&Exl3Weight) -> &[f16]| -> Arc<[f16]> {
            parts.iter().flat_map(|w| of_part(w)).copied().collect()
        };
        Some(Exl3Weight {
            scheme: first.scheme,
            dims: Dims::new(parts.iter().map(|w| w.dims.rows).sum(), first.dims.cols),
            experts: parts.iter().map(|w| w.experts).sum(),
            tiles: tiles.into(),
            input_scales: scales(|w| &w.input_scales),
            output_scales: scales(|w| &w.output_scales),
        })
    }

    /// True if the experts of both have one scheme and one shape.
    pub(crate) fn is_like(&self, other: &Exl3Weight) -> bool {
        let each = |w: &Exl3Weight| (w.scheme, w.dims.cols, w.expert_rows());
        each(self) == each(other)
    }

    /// Number of experts that it is a stack of; 1 for a weight of its own.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Outputs of an expert.
    fn expert_rows(&self) -> usize {
        self.dims.rows / self.experts
    }

    /// Code and bits.
    pub fn scheme(&self) -> Exl3Scheme {
        self.scheme
    }

    /// `(out, in)`.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// All tiles, `[experts, in / 16, outputs of an expert / 16, bytes of a tile]`.
    pub fn tiles(&self) -> &Bytes {
        &self.tiles
    }

    /// The tile of inputs `16 down ..` and outputs `16 across ..`.
    ///
    /// # Panics
    /// If there is no such tile.
    pub fn tile(&self, down: usize, across: usize) -> &[u8] {
        let (size, width) = (self.scheme.tile_bytes(), self.expert_rows() / TILE);
        let line = across / width * (self.dims.cols / TILE) + down;
        &self.tiles[(line * width + across % width) * size..][..size]
    }

    /// Signed scales of inputs, `[experts, in]`.
    pub fn input_scales(&self) -> &Arc<[f16]> {
        &self.input_scales
    }

    /// Signed scales of outputs, `[out]`.
    pub fn output_scales(&self) -> &Arc<[f16]> {
        &self.output_scales
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> usize {
        self.tiles.len() + 2 * (self.input_scales.len() + self.output_scales.len())
    }

    /// The values of rows `128 block ..`, `[128, in]`.
    fn block(&self, block: usize) -> Vec<f32> {
        let cols = self.dims.cols;
        let mut values = vec![0f32; BLOCK * cols];
        for down in 0..cols / TILE {
            for tile in 0..BLOCK / TILE {
                let packed = self.tile(down, block * (BLOCK / TILE) + tile);
                for (t, value) in self.scheme.values(packed).into_iter().enumerate() {
                    let (input, output) = place(t);
                    values[(tile * TILE + output) * cols + down * TILE + input] = value.to_f32();
                }
            }
        }
        let mut column = [0f32; BLOCK];
        for input in 0..cols {
            for (row, v) in column.iter_mut().enumerate() {
                *v = values[row * cols + input];
            }
            transform(&mut column);
            for (row, v) in column.iter().enumerate() {
                values[row * cols + input] = *v;
            }
        }
        let of_outputs = &self.output_scales[block * BLOCK..];
        let of_inputs = &self.input_scales[block * BLOCK / self.expert_rows() * cols..][..cols];
        for (row, scale) in values.chunks_exact_mut(cols).zip(of_outputs) {
            transform(row);
            for (v, of_input) in row.iter_mut().zip(of_inputs) {
                *v = *v * of_input.to_f32() * scale.to_f32();
            }
        }
        values
    }

    /// The values of the weight as a tensor of `dtype`, whose elements have `N` bytes; `encode` converts an f32 to one.
    ///
    /// # Errors
    /// [`Error`] if elements of `dtype` have another size.
    pub fn expand<const N: usize>(
        &self,
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor> {
        let Dims { rows, cols } = self.dims;
        let mut bytes = vec![0; rows * cols * N];
        let blocks = bytes.par_chunks_mut(BLOCK * cols * N).enumerate();
        blocks.for_each(|(block, out)| {
            let (out, _) = out.as_chunks_mut::<N>();
            for (out, v) in out.iter_mut().zip(self.block(block)) {
                *out = encode(v);
            }
        });
        Tensor::new(dtype, vec![rows, cols], bytes.into())
    }

    /// The values of the weight, rounded to f16.
    ///
    /// # Errors
    /// None that a checked weight has.
    pub fn to_f16(&self) -> Result<Tensor> {
        self.expand(DType::F16, |v| f16::from_f32(v).to_le_bytes())
    }

    /// The values of the weight as f32.
    ///
    /// # Errors
    /// None that a checked weight has.
    pub fn to_f32(&self) -> Result<Tensor> {
        self.expand(DType::F32, f32::to_le_bytes)
    }

    /// Writes row `row` as f32 to `out` (`in` long). All 128 rows of its block have to be decoded for this: whoever wants
    /// all rows takes [`Exl3Weight::expand`].
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let cols = self.dims.cols;
        assert!(row < self.dims.rows && out.len() == cols);
        let values = self.block(row / BLOCK);
        out.copy_from_slice(&values[row % BLOCK * cols..][..cols]);
    }

    /// The rows `ranges`, one range after another, as a weight of its own; `None` unless they are whole blocks of 128, and of
    /// a stack one range of whole experts.
    pub fn rows(&self, ranges: &[Range<usize>]) -> Option<Exl3Weight> {
        let whole = |rows: &Range<usize>| {
            let blocks = rows.start.is_multiple_of(BLOCK) && rows.end.is_multiple_of(BLOCK);
            blocks && !rows.is_empty() && rows.end <= self.dims.rows
        };
        if !ranges.iter().all(whole) {
            return None;
        }
        if self.experts > 1 {
            return match ranges {
                [rows] => self.experts_in(rows.clone()),
                _ => None,
            };
        }
        let size = self.scheme.tile_bytes();
        let of_tiles = |rows: &Range<usize>| rows.start / TILE * size..rows.end / TILE * size;
        let lines = self.tiles.chunks_exact(self.dims.rows / TILE * size);
        let tiles = lines.flat_map(|line| ranges.iter().flat_map(move |r| &line[of_tiles(r)]));
        let scales = ranges.iter().flat_map(|r| &self.output_scales[r.clone()]);
        let output_scales: Vec<f16> = scales.copied().collect();
        Some(Exl3Weight {
            scheme: self.scheme,
            dims: Dims::new(output_scales.len(), self.dims.cols),
            experts: 1,
            tiles: tiles.copied().collect::<Vec<u8>>().into(),
            input_scales: self.input_scales.clone(),
            output_scales: output_scales.into(),
        })
    }

    /// The experts of a stack whose rows these are, whose tiles share its memory; `None` unless they are whole ones.
    fn experts_in(&self, rows: Range<usize>) -> Option<Exl3Weight> {
        let (each, cols) = (self.expert_rows(), self.dims.cols);
        if !rows.start.is_multiple_of(each) || !rows.end.is_multiple_of(each) {
            return None;
        }
        let some = rows.start / each..rows.end / each;
        let size = self.tiles.len() / self.experts;
        Some(Exl3Weight {
            scheme: self.scheme,
            dims: Dims::new(rows.len(), cols),
            experts: some.len(),
            tiles: self.tiles.slice(some.start * size..some.end * size),
            input_scales: self.input_scales[some.start * cols..some.end * cols].into(),
            output_scales: self.output_scales[rows].into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums over a tile of random words, as exllamav3 1.6.5 decodes it: bits, code, the values times their places
    /// counted from 1, and their squares.
    const SUMS: [(f64, usize, f64, f64); 25] = [
        (1.0, 0, -730.372314453, 426.723406181),
        (2.0, 0, 1533.559204102, 377.568038911),
        (3.0, 0, -2142.8046875, 348.454208508),
        (4.0, 0, -853.788696289, 370.64245452),
        (5.0, 0, -3567.505126953, 368.746449888),
        (6.0, 0, -4450.941162109, 404.79385756),
        (7.0, 0, 4619.948486328, 341.271893471),
        (8.0, 0, 807.60546875, 372.021851107),
        (2.0, 1, 1503.814453125, 387.163368985),
        (3.0, 1, 3368.752197266, 442.570873246),
        (4.0, 1, 619.396972656, 381.316405803),
        (5.0, 1, 951.926147461, 409.827047676),
        (6.0, 1, -874.293823242, 434.276641488),
        (8.0, 1, 5549.243896484, 413.385777414),
        (1.0, 2, -2530.37197876, 247.475156585),
        (2.0, 2, 1267.737121582, 245.246562959),
        (3.0, 2, -2462.915924072, 248.886939218),
        (4.0, 2, 1130.440223694, 260.512198233),
        (5.0, 2, -405.679908752, 256.135462541),
        (6.0, 2, 9.78604126, 256.839211519),
        (7.0, 2, -2679.753471375, 288.733535873),
        (8.0, 2, 5.158935547, 265.206514008),
        (1.5, 2, -608.356323242, 252.333424865),
        (2.5, 2, -610.769508362, 230.259807227),
        (3.5, 2, -1910.523445129, 276.672216802),
    ];

    #[test]
    fn tiles_are_decoded_as_by_the_program_that_made_them() {
        for (bits, code, by_place, squares) in SUMS {
            let half_bits = (2.0 * bits) as usize;
            let mut random = 12_345u64;
            let words: Vec<u32> = std::iter::repeat_with(|| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (random >> 32) as u32
            })
            .take(4 * half_bits)
            .collect();
            let tile: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let code = Exl3Code::ALL[code];
            let values = Exl3Scheme::new(code, half_bits).unwrap().values(&tile);
            let values = values.map(f16::to_f64);
            let places = values.iter().zip(1u32..).map(|(v, t)| v * f64::from(t));
            let sum: f64 = places.sum();
            assert!((sum - by_place).abs() < 1e-6, "{bits} {code:?}: {sum}");
            let sum: f64 = values.iter().map(|v| v * v).sum();
            assert!((sum - squares).abs() < 1e-6, "{bits} {code:?}: {sum}");
        }
    }

    /// A stack has the rows of its parts, whatever their scales of inputs, and gives its experts back as they were.
    #[test]
    fn stacks_have_the_rows_of_their_experts() {
        let dims = Dims::new(2 * BLOCK, BLOCK);
        let scheme = Exl3Scheme::new(Exl3Code::Mcg, 6).unwrap();
        let expert = |scheme: Exl3Scheme, nth: usize| {
            let size = dims.rows / TILE * (dims.cols / TILE) * scheme.tile_bytes();
            let tiles: Vec<u8> = (0..size)
                .map(|i| ((i * (2 * nth + 31)) >> 3) as u8)
                .collect();
            let scales = |n: usize, by: usize| {
                let scale = |i: usize| f16::from_f32(((i + nth) % by + 1) as f32);
                (0..n).map(scale).collect()
            };
            let (inputs, outputs) = (scales(dims.cols, 5), scales(dims.rows, 7));
            Exl3Weight::new(scheme, dims, tiles.into(), inputs, outputs).unwrap()
        };
        let experts: Vec<Exl3Weight> = (0..3).map(|nth| expert(scheme, nth)).collect();
        let pair = Exl3Weight::stack(&[&experts[0], &experts[1]]).unwrap();
        let stack = Exl3Weight::stack(&[&pair, &experts[2]]).unwrap();
        assert_eq!((stack.experts(), stack.dims().rows), (3, 3 * dims.rows));
        let values = |w: &Exl3Weight| w.to_f32().unwrap().data().to_vec();
        assert_eq!(
            values(&stack),
            experts.iter().map(values).collect::<Vec<_>>().concat()
        );
        let bytes: usize = experts.iter().map(Exl3Weight::bytes).sum();
        assert_eq!(stack.bytes(), bytes);
        let part = |rows: Range<usize>| stack.rows(std::slice::from_ref(&rows));
        let last = part(2 * dims.rows..3 * dims.rows).unwrap();
        assert_eq!(last.tiles(), experts[2].tiles());
        assert_eq!(values(&last), values(&experts[2]));
        assert!(part(BLOCK..3 * BLOCK).is_none());
        let wider = expert(Exl3Scheme::new(Exl3Code::Mcg, 8).unwrap(), 0);
        assert!(Exl3Weight::stack(&[&experts[0], &wider]).is_none());
        assert!(Exl3Weight::stack(&[]).is_none());
    }

    #[test]
    fn every_value_of_a_tile_has_its_own_place() {
        let mut seen = [false; VALUES];
        for t in 0..VALUES {
            let (input, output) = place(t);
            assert!(!std::mem::replace(&mut seen[input * TILE + output], true));
        }
        assert_eq!(
            (place(0), place(1), place(3), place(4), place(8), place(32)),
            ((0, 0), (1, 0), (9, 0), (0, 8), (2, 0), (0, 1))
        );
    }
}
