//! Unpacks, like [`super`], the GGUF block types whose codes index a grid of points (IQ1, IQ2,
//! IQ3), and those with few values (TQ1, TQ2, MXFP4, NVFP4): every value is a small
//! integer times a scale, so all become 4- or 8-bit codes.
//!
//! The types and the points of their grids are those of ggml's block formats (`ggml-common.h`,
//! `ggml-quants.c`; MIT licence). A point has 4 or 8 values; its number has the indices of these
//! values as digits, the first as the lowest. A grid lists its points in ascending order of this
//! number. `grids.bin` holds one bit per possible number, set if the grid has that point; it is
//! written by `tests/fixtures/gguf/make.py`.

use super::{BlockLayout, Factors, NarrowCodes, crumbs, f16_at, nibbles};
use crate::scheme::Bits;
use half::f16;
use std::sync::LazyLock;

static BITMAPS: &[u8] = include_bytes!("grids.bin");

/// Possible values in IQ2's points.
const IQ2_VALUES: [i8; 3] = [8, 25, 43];
/// Possible values in IQ3_XXS's points.
const IQ3_XXS_VALUES: [i8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
/// Possible values in IQ3_S's points.
const IQ3_S_VALUES: [i8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];
/// Possible values in IQ1's points.
const IQ1_VALUES: [i8; 3] = [-1, 0, 1];

/// A grid: points of `N` values each.
type Grid<const N: usize> = LazyLock<Vec<[i8; N]>>;

/// Bytes of the bitmap of a grid with 8 values of 3 per point. With 4 values of 8, it has 512 bytes.
const TERNARY: usize = 3usize.pow(8).div_ceil(8);

static IQ2_XXS_GRID: Grid<8> = LazyLock::new(|| points(0, &IQ2_VALUES));
static IQ2_XS_GRID: Grid<8> = LazyLock::new(|| points(TERNARY, &IQ2_VALUES));
static IQ2_S_GRID: Grid<8> = LazyLock::new(|| points(2 * TERNARY, &IQ2_VALUES));
static IQ1_GRID: Grid<8> = LazyLock::new(|| points(3 * TERNARY, &IQ1_VALUES));
static IQ3_XXS_GRID: Grid<4> = LazyLock::new(|| points(4 * TERNARY, &IQ3_XXS_VALUES));
static IQ3_S_GRID: Grid<4> = LazyLock::new(|| points(4 * TERNARY + 512, &IQ3_S_VALUES));

/// The points of the grid whose bitmap starts at byte `at`.
fn points<const N: usize>(at: usize, values: &[i8]) -> Vec<[i8; N]> {
    let numbers = values.len().pow(N as u32);
    let bitmap = &BITMAPS[at..][..numbers.div_ceil(8)];
    let listed = (0..numbers).filter(|n| bitmap[n / 8] >> (n % 8) & 1 == 1);
    listed
        .map(|mut n| {
            std::array::from_fn(|_| {
                let value = values[n % values.len()];
                n /= values.len();
                value
            })
        })
        .collect()
}

/// The 8-bit code of the signed value `v`.
fn centred(v: i8) -> u8 {
    v as u8 ^ 0x80
}

/// Writes the codes of one point; values with a set bit in `signs` are negated.
fn signed(codes: &mut [u8], point: &[i8], signs: u8) {
    for (i, (q, &v)) in codes.iter_mut().zip(point).enumerate() {
        *q = centred(if signs >> i & 1 == 1 { -v } else { v });
    }
}

/// Eight signs from 7 bits: the eighth makes the number of negative signs even.
fn even_signs(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | ((bits.count_ones() as u8 & 1) << 7)
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from(u16_at(block, at)) | u32::from(u16_at(block, at + 2)) << 16
}

/// Nibble `g` of `bytes`, low nibbles first.
fn nibble(bytes: &[u8], g: usize) -> u8 {
    bytes[g / 2] >> (4 * (g % 2)) & 15
}

/// The values of IQ2's codes.
const IQ2_LEVELS: [i8; 6] = [-43, -25, -8, 8, 25, 43];
/// The values of IQ3_XXS's codes.
const IQ3_XXS_LEVELS: [i8; 16] = with_signs(IQ3_XXS_VALUES);
/// The values of IQ3_S's codes.
const IQ3_S_LEVELS: [i8; 16] = with_signs(IQ3_S_VALUES);
/// The values of IQ1's codes, in eighths.
const IQ1_LEVELS: [i8; 6] = [-9, -7, -1, 1, 7, 9];
/// The values of FP4's codes times two.
const FP4_LEVELS: [i8; 15] = [-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12];

/// These values and their negatives, in ascending order.
const fn with_signs(values: [i8; 8]) -> [i8; 16] {
    let (mut all, mut i) = ([0; 16], 0);
    while i < 8 {
        (all[7 - i], all[8 + i]) = (-values[i], values[i]);
        i += 1;
    }
    all
}

/// Layout with 8-bit codes for small integers times one scale per `group`.
const fn of_points(group: u32, narrow: Option<NarrowCodes>, unpack: super::Unpack) -> BlockLayout {
    BlockLayout {
        bits: Bits::B8,
        group,
        offsets: false,
        plain_scales: false,
        narrow,
        unpack,
    }
}

const IQ2: Option<NarrowCodes> = NarrowCodes::table(Bits::B3, &IQ2_LEVELS, 0.125);

/// f16 d, then for each 32: 4 bytes that index points of 8, and 32 bits of four times 7 signs and
/// a scale of 4 bits; `d * (sc + 1/2) / 4 * value`.
pub(super) const IQ2_XXS: BlockLayout = of_points(32, IQ2, |block, codes, scales, _| {
    let d = f16_at(block, 0);
    for (g, (codes, s)) in codes.chunks_mut(32).zip(scales).enumerate() {
        let points = &block[2 + 8 * g..][..4];
        let word = u32_at(block, 6 + 8 * g);
        *s = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (k, codes) in codes.chunks_mut(8).enumerate() {
            let point = &IQ2_XXS_GRID[usize::from(points[k])];
            signed(codes, point, even_signs(word >> (7 * k)));
        }
    }
});

/// f16 d, 32 words of a point's index (9 bits) and 7 signs, 8 bytes of 4-bit scales per 16;
/// `d * (sc + 1/2) / 4 * value`.
pub(super) const IQ2_XS: BlockLayout = of_points(16, IQ2, |block, codes, scales, _| {
    let d = f16_at(block, 0);
    for (g, s) in scales.iter_mut().enumerate() {
        *s = d * (0.5 + f32::from(nibble(&block[66..74], g))) * 0.25;
    }
    for (k, codes) in codes.chunks_mut(8).enumerate() {
        let word = u16_at(block, 2 + 2 * k);
        let point = &IQ2_XS_GRID[usize::from(word & 511)];
        signed(codes, point, even_signs(u32::from(word >> 9)));
    }
});

/// f16 d, 32 bytes of low bits of points' indices, 32 of signs, 8 of two high bits each, 8 of
/// 4-bit scales per 16; `d * (sc + 1/2) / 4 * value`.
pub(super) const IQ2_S: BlockLayout = of_points(16, IQ2, |block, codes, scales, _| {
    let d = f16_at(block, 0);
    for (g, s) in scales.iter_mut().enumerate() {
        *s = d * (0.5 + f32::from(nibble(&block[74..82], g))) * 0.25;
    }
    for (k, codes) in codes.chunks_mut(8).enumerate() {
        let high = usize::from(block[66 + k / 4] >> (2 * (k % 4)) & 3);
        let point = &IQ2_S_GRID[usize::from(block[2 + k]) | high << 8];
        signed(codes, point, block[34 + k]);
    }
});

/// f16 d, 64 bytes that index points of 4, then for each 32: 32 bits of four times 7 signs and a
/// scale of 4 bits; `d * (sc + 1/2) / 2 * value`.
pub(super) const IQ3_XXS: BlockLayout = of_points(
    32,
    NarrowCodes::table(Bits::B4, &IQ3_XXS_LEVELS, 0.25),
    |block, codes, scales, _| {
        let d = f16_at(block, 0);
        for (g, (codes, s)) in codes.chunks_mut(32).zip(scales).enumerate() {
            let points = &block[2 + 8 * g..][..8];
            let word = u32_at(block, 66 + 4 * g);
            *s = d * (0.5 + (word >> 28) as f32) * 0.5;
            for (k, codes) in codes.chunks_mut(4).enumerate() {
                let signs = even_signs(word >> (7 * (k / 2))) >> (4 * (k % 2));
                signed(codes, &IQ3_XXS_GRID[usize::from(points[k])], signs);
            }
        }
    },
);

/// f16 d, 64 bytes of low bits of points' indices, 8 of a high bit each, 32 of signs, 4 of 4-bit
/// scales per 32; `d * (1 + 2 sc) * value`.
pub(super) const IQ3_S: BlockLayout = of_points(
    32,
    NarrowCodes::table(Bits::B4, &IQ3_S_LEVELS, 1.0),
    |block, codes, scales, _| {
        let d = f16_at(block, 0);
        for (g, s) in scales.iter_mut().enumerate() {
            *s = d * f32::from(1 + 2 * nibble(&block[106..110], g));
        }
        for (k, codes) in codes.chunks_mut(4).enumerate() {
            let high = usize::from(block[66 + k / 8] >> (k % 8) & 1);
            let point = &IQ3_S_GRID[usize::from(block[2 + k]) | high << 8];
            signed(codes, point, block[74 + k / 2] >> (4 * (k % 2)));
        }
    },
);

/// Codes of a point of IQ1, in eighths: `value + 1/8`, or `value - 1/8` if `negative`.
fn shifted(codes: &mut [u8], point: &[i8; 8], negative: bool) {
    let delta = if negative { -1 } else { 1 };
    for (q, &v) in codes.iter_mut().zip(point) {
        *q = centred(8 * v + delta);
    }
}

/// f16 d, 32 bytes of low bits of points' indices, then a word for each 32: four times 3 high
/// bits, a scale of 3 bits, the sign of a shift; `d * (2 sc + 1) * (value +- 1/8)`.
pub(super) const IQ1_S: BlockLayout = of_points(
    32,
    NarrowCodes::table(Bits::B3, &IQ1_LEVELS, 0.125),
    |block, codes, scales, _| {
        let d = f16_at(block, 0);
        for (g, (codes, s)) in codes.chunks_mut(32).zip(scales).enumerate() {
            let word = u16_at(block, 34 + 2 * g);
            *s = d * f32::from(2 * (word >> 12 & 7) + 1) / 8.0;
            for (k, codes) in codes.chunks_mut(8).enumerate() {
                let high = usize::from(word >> (3 * k) & 7);
                let point = &IQ1_GRID[usize::from(block[2 + 4 * g + k]) | high << 8];
                shifted(codes, point, word >> 15 == 1);
            }
        }
    },
);

const IQ1_M_LEVELS: Option<NarrowCodes> = Some(NarrowCodes {
    width: Bits::B3,
    values: &IQ1_LEVELS,
    factors: Some(Factors {
        of_block: |block| [factor_of_iq1_m(block), f16::ZERO],
        step: 0.125,
    }),
});

/// The f16 in the highest nibbles of the last four words.
fn factor_of_iq1_m(block: &[u8]) -> f16 {
    let bits = (0..4).map(|i| (u16_at(block, 48 + 2 * i) >> 12) << (4 * i));
    f16::from_bits(bits.fold(0, |all, nibble| all | nibble))
}

/// 32 bytes of low bits of points' indices, 16 of nibbles of three high bits and the sign of a
/// shift, then four words of four 3-bit scales per 16 and, in their highest nibbles, an f16 d;
/// `d * (2 sc + 1) * (value +- 1/8)`.
pub(super) const IQ1_M: BlockLayout = of_points(16, IQ1_M_LEVELS, |block, codes, scales, _| {
    let word = |i: usize| u16_at(block, 48 + 2 * i);
    let d = factor_of_iq1_m(block).to_f32();
    for (g, s) in scales.iter_mut().enumerate() {
        let scale = word(g / 4) >> (3 * (g % 4)) & 7;
        *s = d * f32::from(2 * scale + 1) / 8.0;
    }
    for (k, codes) in codes.chunks_mut(8).enumerate() {
        let high = nibble(&block[32..48], k);
        let index = usize::from(block[k]) | usize::from(high & 7) << 8;
        shifted(codes, &IQ1_GRID[index], high & 8 != 0);
    }
});

/// Layout with codes -1, 0 and 1 (TQ2_0: also 2) around the midpoint of 4 bits.
const fn ternary(unpack: super::Unpack) -> BlockLayout {
    BlockLayout {
        bits: Bits::B4,
        group: 128, // two groups of the same scale: 256 is wider than kernels' groups
        offsets: false,
        plain_scales: true,
        narrow: None,
        unpack,
    }
}

/// The base-3 digit at `place` after the point in `byte`, a fraction of 256, as a code.
fn digit(byte: u8, place: u32) -> u8 {
    let shifted = byte.wrapping_mul(3u8.pow(place));
    ((u16::from(shifted) * 3) >> 8) as u8 + 7
}

/// 32 + 16 bytes of five digits of 3 each, 4 of four, f16 d; `d * (digit - 1)`.
pub(super) const TQ1_0: BlockLayout = ternary(|block, codes, scales, _| {
    scales.fill(f16_at(block, 52));
    let (wide, rest) = codes.split_at_mut(160);
    let (narrow, last) = rest.split_at_mut(80);
    for (codes, bytes) in [
        (wide, &block[..32]),
        (narrow, &block[32..48]),
        (last, &block[48..52]),
    ] {
        for (place, codes) in codes.chunks_mut(bytes.len()).enumerate() {
            for (q, b) in codes.iter_mut().zip(bytes) {
                *q = digit(*b, place as u32);
            }
        }
    }
});

/// 64 bytes of 2-bit codes, f16 d; `d * (q - 1)`.
pub(super) const TQ2_0: BlockLayout = ternary(|block, codes, scales, _| {
    scales.fill(f16_at(block, 64));
    crumbs(&block[..64], codes);
    codes.iter_mut().for_each(|q| *q += 7);
});

/// The values of FP4 (E2M1) times two, by their bits.
pub(crate) const FP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Converts FP4 nibbles to codes, low nibbles first.
fn fp4(bytes: &[u8], codes: &mut [u8]) {
    nibbles(bytes, codes);
    for q in codes {
        *q = centred(FP4_VALUES[usize::from(*q)]);
    }
}

/// 8 bits of exponent, 16 bytes of FP4; `2^(e - 127) * value`, OCP's microscaling format.
pub(super) const MXFP4: BlockLayout = of_points(
    32,
    NarrowCodes::plain(&FP4_LEVELS),
    |block, codes, scales, _| {
        // Half of the power, since codes are twice the values.
        scales[0] = match u32::from(block[0]) {
            e @ 0..2 => f32::from_bits(0x0020_0000 << e), // subnormal
            e => f32::from_bits((e - 1) << 23),
        };
        fp4(&block[1..], codes);
    },
);

/// Four scales of 8 bits (E4M3 without a sign), for each 16 values 8 bytes of FP4;
/// `scale * value`.
pub(super) const NVFP4: BlockLayout = BlockLayout {
    plain_scales: true, // every such float is an f16
    ..of_points(16, NarrowCodes::plain(&FP4_LEVELS), nvfp4)
};

fn nvfp4(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
    for (g, s) in scales.iter_mut().enumerate() {
        let (exponent, mantissa) = (block[g] >> 3 & 15, f32::from(block[g] & 7));
        *s = match (block[g], exponent) {
            (0x7F, _) => 0.0, // not a number
            (_, 0) => mantissa / 1024.0,
            (_, e) => (8.0 + mantissa) * 2f32.powi(i32::from(e) - 11),
        };
    }
    for (codes, bytes) in codes.chunks_mut(16).zip(block[4..].chunks(8)) {
        fp4(bytes, codes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_have_as_many_points_as_indices() {
        assert_eq!(BITMAPS.len(), 4 * TERNARY + 2 * 512);
        let eights = [&IQ2_XXS_GRID, &IQ2_XS_GRID, &IQ2_S_GRID, &IQ1_GRID];
        assert_eq!(eights.map(|g| g.len()), [256, 512, 1024, 2048]);
        assert_eq!([&IQ3_XXS_GRID, &IQ3_S_GRID].map(|g| g.len()), [256, 512]);
    }
}
