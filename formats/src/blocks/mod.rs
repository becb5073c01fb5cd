//! Unpacks GGUF's integer block types into codes, and a scale and an offset per group.
//!
//! Every one of these types means `w = s * q + o` within a group of 16 to 128, which is also nq's
//! canonical form ([`crate::AffineScheme`]); so one function per type serves both
//! dequantization and loading, without a second rounding. The products that make up a
//! scale are exact in f32: an 11-bit significand times at most 8 bits.

mod grids;
pub(crate) mod types;
pub(crate) mod weight;

pub(crate) use grids::FP4_VALUES;
pub use types::BlockType;
pub use weight::BlockWeight;

use crate::scheme::{AffineScheme, Bits, Group, Levels, Scales, TwoLevel, Zeros};
use half::f16;

/// Layout of a block type.
pub struct BlockLayout {
    /// Width of a canonical code: 4 if all codes fit, otherwise 8.
    pub bits: Bits,
    /// Elements that share a scale.
    pub group: u32,
    /// True if groups have offsets; otherwise codes are centred on `bits.midpoint()`.
    pub offsets: bool,
    /// True if a group's scale is an f16; false if it is a product that may not fit one.
    pub plain_scales: bool,
    /// How codes become narrower.
    pub(crate) narrow: Option<NarrowCodes>,
    /// Unpacks one block: canonical codes (one per element), scales and offsets (one
    /// per group; not written if the type has none).
    pub unpack: Unpack,
}

/// How devices hold a type in fewer bits than canonical codes have, with the same values.
#[derive(Clone, Copy)]
pub(crate) struct NarrowCodes {
    /// Width of codes: those of the block, centred on its midpoint where there are no offsets, or indices of values.
    width: Bits,
    /// The values that centred codes have, in ascending order; all of the width if there are none here.
    values: &'static [i8],
    /// Of scales (and offsets) that are small integers times an f16 of the block.
    factors: Option<Factors>,
}

/// The f16 of a block that small integers are multiplied by.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    /// The factor of scales and that of minima in a block.
    of_block: fn(&[u8]) -> [f16; 2],
    /// Scales are multiples of the factor times this power of two.
    step: f32,
}

impl NarrowCodes {
    /// Codes of `width`, whose factors of scales and of minima stand at these bytes.
    const fn even(width: Bits, of_block: fn(&[u8]) -> [f16; 2]) -> Option<Self> {
        let factors = Factors {
            of_block,
            step: 1.0,
        };
        Some(NarrowCodes {
            width,
            values: &[],
            factors: Some(factors),
        })
    }

    /// Few `values`; scales are multiples of `step` times the f16 at the block's begin.
    const fn table(width: Bits, values: &'static [i8], step: f32) -> Option<Self> {
        let factors = Factors {
            of_block: |block| half_at(block, 0),
            step,
        };
        Some(NarrowCodes {
            width,
            values,
            factors: Some(factors),
        })
    }

    /// Few values; scales are any numbers.
    const fn plain(values: &'static [i8]) -> Option<Self> {
        Some(NarrowCodes {
            width: Bits::B4,
            values,
            factors: None,
        })
    }
}

/// The f16 at a byte of a block, of scales, where there are no minima.
fn half_at(block: &[u8], at: usize) -> [f16; 2] {
    [f16::from_le_bytes([block[at], block[at + 1]]), f16::ZERO]
}

/// The f16 of scales and, behind it, that of minima.
fn halves_at(block: &[u8], at: usize) -> [f16; 2] {
    [half_at(block, at)[0], half_at(block, at + 2)[0]]
}

/// `(block, codes, scales, offsets)`.
pub(crate) type Unpack = fn(&[u8], &mut [u8], &mut [f32], &mut [f32]);

impl BlockLayout {
    /// The canonical scheme.
    pub const fn scheme(&self) -> AffineScheme {
        AffineScheme::new(
            self.bits,
            Group::Size(self.group),
            if self.offsets {
                Zeros::Offset
            } else {
                Zeros::None
            },
        )
    }

    /// The scheme of [`BlockWeight::to_levels`], of blocks of so many elements.
    pub fn narrow_scheme(&self, elements: usize) -> AffineScheme {
        let Some(narrow) = self.narrow else {
            return self.scheme();
        };
        // Signed where there are no offsets.
        let bits = match self.offsets {
            true => Bits::B6,
            false => Bits::B8,
        };
        let span = Group::Size(elements as u32);
        AffineScheme {
            bits: narrow.width,
            scales: match narrow.factors {
                Some(_) => Scales::TwoLevel(TwoLevel { bits, span }),
                None => Scales::Half,
            },
            levels: match narrow.values {
                [] => Levels::Even,
                _ => Levels::Table,
            },
            ..self.scheme()
        }
    }

    /// Bits of a weight as a CPU holds it: in canonical codes, or with a table where these are few and uneven, and an f16 scale
    /// (and offset) for each group.
    pub fn bits_on_cpu(&self) -> f64 {
        let table = self.narrow.filter(|narrow| !narrow.values.is_empty());
        let bits = table.map_or(self.bits, |table| table.width.held());
        let parts = if self.offsets { 2.0 } else { 1.0 };
        bits.width() as f64 + 16.0 * parts / f64::from(self.group)
    }

    /// Bits of a weight in the fewest that hold the values of blocks of so many elements, as GPUs do.
    pub fn bits_on_gpu(&self, elements: usize) -> f64 {
        const ROWS: usize = 1024; // so many that a table of levels hardly counts
        let bytes = self.narrow_scheme(elements).bytes(ROWS, elements);
        8.0 * bytes as f64 / (ROWS * elements) as f64
    }

    /// Dequantizes one block into `out`, which has its length. `scratch` keeps its buffers from call
    /// to call.
    pub(crate) fn dequantize(&self, block: &[u8], scratch: &mut BlockBuffers, out: &mut [f32]) {
        let groups = out.len() / self.group as usize;
        let BlockBuffers {
            codes,
            scales,
            offsets,
        } = scratch;
        codes.resize(out.len(), 0);
        scales.resize(groups, 0.0);
        offsets.resize(groups, 0.0);
        (self.unpack)(block, codes, scales, offsets);
        let middle = i32::from(self.bits.midpoint());
        let group = self.group as usize;
        for (g, out) in out.chunks_mut(group).enumerate() {
            let codes = &codes[g * group..][..group];
            if self.offsets {
                for (w, &q) in out.iter_mut().zip(codes) {
                    *w = scales[g] * f32::from(q) + offsets[g];
                }
            } else {
                for (w, &q) in out.iter_mut().zip(codes) {
                    *w = scales[g] * (i32::from(q) - middle) as f32;
                }
            }
        }
    }
}

/// Buffers of [`BlockLayout::dequantize`].
#[derive(Default)]
pub(crate) struct BlockBuffers {
    codes: Vec<u8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
}

pub(super) fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes low nibbles to the first half of `codes`, high nibbles to the second.
pub(super) fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((&b, l), h) in bytes.iter().zip(low).zip(high) {
        *l = b & 15;
        *h = b >> 4;
    }
}

/// f16 d, 16 bytes of nibbles; `d * (q - 8)`.
pub(super) const Q4_0: BlockLayout = BlockLayout {
    bits: Bits::B4,
    group: 32,
    offsets: false,
    plain_scales: true,
    narrow: None,
    unpack: |block, codes, scales, _| {
        scales[0] = f16_at(block, 0);
        nibbles(&block[2..], codes);
    },
};

/// f16 d, f16 m, 16 bytes of nibbles; `d * q + m`.
pub(super) const Q4_1: BlockLayout = BlockLayout {
    bits: Bits::B4,
    group: 32,
    offsets: true,
    plain_scales: true,
    narrow: None,
    unpack: |block, codes, scales, offsets| {
        scales[0] = f16_at(block, 0);
        offsets[0] = f16_at(block, 2);
        nibbles(&block[4..], codes);
    },
};

/// Adds the fifth bits: bit `i` of the 32-bit `high` belongs to element `i`.
fn fifth_bits(high: &[u8], codes: &mut [u8]) {
    for (i, q) in codes.iter_mut().enumerate() {
        *q |= (high[i / 8] >> (i % 8) & 1) << 4;
    }
}

/// f16 d, 4 bytes of fifth bits, 16 bytes of nibbles; `d * (q - 16)`.
pub(super) const Q5_0: BlockLayout = BlockLayout {
    bits: Bits::B8,
    group: 32,
    offsets: false,
    plain_scales: true,
    narrow: None,
    unpack: |block, codes, scales, _| {
        scales[0] = f16_at(block, 0);
        nibbles(&block[6..], codes);
        fifth_bits(&block[2..6], codes);
        codes.iter_mut().for_each(|q| *q += 128 - 16);
    },
};

/// f16 d, f16 m, 4 bytes of fifth bits, 16 bytes of nibbles; `d * q + m`.
pub(super) const Q5_1: BlockLayout = BlockLayout {
    bits: Bits::B8,
    group: 32,
    offsets: true,
    plain_scales: true,
    narrow: None,
    unpack: |block, codes, scales, offsets| {
        scales[0] = f16_at(block, 0);
        offsets[0] = f16_at(block, 2);
        nibbles(&block[8..], codes);
        fifth_bits(&block[4..8], codes);
    },
};

/// f16 d, 32 signed bytes; `d * q`.
pub(super) const Q8_0: BlockLayout = BlockLayout {
    bits: Bits::B8,
    group: 32,
    offsets: false,
    plain_scales: true,
    narrow: None,
    unpack: |block, codes, scales, _| {
        scales[0] = f16_at(block, 0);
        for (q, b) in codes.iter_mut().zip(&block[2..]) {
            *q = b ^ 0x80; // signed to offset by 128
        }
    },
};

/// Two-bit fields of 32 bytes per half of 128: element `32 k + l` of a half is bits `2k` of
/// byte `l`.
pub(super) fn crumbs(bytes: &[u8], codes: &mut [u8]) {
    for (half, bytes) in codes.chunks_mut(128).zip(bytes.chunks(32)) {
        for (k, codes) in half.chunks_mut(32).enumerate() {
            for (q, b) in codes.iter_mut().zip(bytes) {
                *q = b >> (2 * k) & 3;
            }
        }
    }
}

/// 16 bytes of (scale, minimum) nibbles, 64 bytes of 2-bit codes, f16 d, f16 dmin;
/// `d * sc * q - dmin * m` per 16.
pub(super) const Q2_K: BlockLayout = BlockLayout {
    bits: Bits::B4,
    group: 16,
    offsets: true,
    plain_scales: false,
    narrow: NarrowCodes::even(Bits::B2, |block| halves_at(block, 80)),
    unpack: |block, codes, scales, offsets| {
        let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
        for (g, sm) in block[..16].iter().enumerate() {
            scales[g] = d * f32::from(sm & 15);
            offsets[g] = -(dmin * f32::from(sm >> 4));
        }
        crumbs(&block[16..80], codes);
    },
};

/// 32 bytes of high bits (set: no 4 subtracted), 64 bytes of 2-bit codes, 12 bytes of
/// 6-bit scales, f16 d; `d * (sc - 32) * q` per 16, q in -4 to 3.
pub(super) const Q3_K: BlockLayout = BlockLayout {
    bits: Bits::B4,
    group: 16,
    offsets: false,
    plain_scales: false,
    narrow: NarrowCodes::even(Bits::B3, |block| half_at(block, 108)),
    unpack: |block, codes, scales, _| {
        let (high, packed, d) = (&block[..32], &block[96..108], f16_at(block, 108));
        for (g, s) in scales.iter_mut().enumerate() {
            let low = packed[g % 8] >> (4 * (g / 8)) & 15;
            let top = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
            *s = d * (i32::from(low | top << 4) - 32) as f32;
        }
        crumbs(&block[32..96], codes);
        for (i, q) in codes.iter_mut().enumerate() {
            *q += 4 + 4 * (high[i % 32] >> (i / 32) & 1); // q - 4 + 4 * bit, centred on 8
        }
    },
};

/// The 6-bit scales and minima of Q4_K and Q5_K, eight of each in 12 bytes.
fn scales_and_minima(block: &[u8], scales: &mut [f32], offsets: &mut [f32]) {
    let (d, dmin, s) = (f16_at(block, 0), f16_at(block, 2), &block[4..16]);
    for j in 0..8 {
        let (sc, m) = match j {
            0..4 => (s[j] & 63, s[j + 4] & 63),
            _ => (
                s[j + 4] & 15 | s[j - 4] >> 6 << 4,
                s[j + 4] >> 4 | s[j] >> 6 << 4,
            ),
        };
        scales[j] = d * f32::from(sc);
        offsets[j] = -(dmin * f32::from(m));
    }
}

/// f16 d, f16 dmin, 12 bytes of scales and minima, 128 bytes of nibbles;
/// `d * sc * q - dmin * m` per 32.
pub(super) const Q4_K: BlockLayout = BlockLayout {
    bits: Bits::B4,
    group: 32,
    offsets: true,
    plain_scales: false,
    narrow: NarrowCodes::even(Bits::B4, |block| halves_at(block, 0)),
    unpack: |block, codes, scales, offsets| {
        scales_and_minima(block, scales, offsets);
        for (codes, bytes) in codes.chunks_mut(64).zip(block[16..].chunks(32)) {
            nibbles(bytes, codes);
        }
    },
};

/// As Q4_K, with 32 bytes of fifth bits before the nibbles: bit `g` of byte `l` belongs to
/// element `l` of group `g`.
pub(super) const Q5_K: BlockLayout = BlockLayout {
    bits: Bits::B8,
    group: 32,
    offsets: true,
    plain_scales: false,
    narrow: NarrowCodes::even(Bits::B5, |block| halves_at(block, 0)),
    unpack: |block, codes, scales, offsets| {
        scales_and_minima(block, scales, offsets);
        let high = &block[16..48];
        for (codes, bytes) in codes.chunks_mut(64).zip(block[48..].chunks(32)) {
            nibbles(bytes, codes);
        }
        for (i, q) in codes.iter_mut().enumerate() {
            *q |= (high[i % 32] >> (i / 32) & 1) << 4;
        }
    },
};

/// 128 bytes of low nibbles, 64 bytes of high crumbs, 16 signed scales, f16 d;
/// `d * sc * (q - 32)` per 16.
pub(super) const Q6_K: BlockLayout = BlockLayout {
    bits: Bits::B8,
    group: 16,
    offsets: false,
    plain_scales: false,
    narrow: NarrowCodes::even(Bits::B6, |block| half_at(block, 208)),
    unpack: |block, codes, scales, _| {
        let d = f16_at(block, 208);
        for (s, b) in scales.iter_mut().zip(&block[192..208]) {
            *s = d * f32::from(*b as i8);
        }
        crumbs(&block[128..192], codes);
        for (half, low) in codes.chunks_mut(128).zip(block[..128].chunks(64)) {
            for (i, q) in half.iter_mut().enumerate() {
                let nibble = low[i % 64] >> (4 * (i / 64)) & 15;
                *q = (*q << 4 | nibble) + (128 - 32);
            }
        }
    },
};

/// The values of the 4-bit codes of IQ4_NL and IQ4_XS.
const IQ4_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Replaces table codes by their values, centred on 128.
fn iq4_values(codes: &mut [u8]) {
    for q in codes {
        *q = IQ4_VALUES[usize::from(*q)] as u8 ^ 0x80;
    }
}

/// f16 d, 16 bytes of nibbles that index [`IQ4_VALUES`]; `d * value`.
pub(super) const IQ4_NL: BlockLayout = BlockLayout {
    bits: Bits::B8,
    group: 32,
    offsets: false,
    plain_scales: true,
    narrow: NarrowCodes::plain(&IQ4_VALUES),
    unpack: |block, codes, scales, _| {
        scales[0] = f16_at(block, 0);
        nibbles(&block[2..], codes);
        iq4_values(codes);
    },
};

/// f16 d, 2 bytes of high and 4 of low scale bits, 128 bytes of nibbles that index
/// [`IQ4_VALUES`]; `d * (sc - 32) * value` per 32.
pub(super) const IQ4_XS: BlockLayout = BlockLayout {
    bits: Bits::B8,
    group: 32,
    offsets: false,
    plain_scales: false,
    narrow: NarrowCodes::table(Bits::B4, &IQ4_VALUES, 1.0),
    unpack: |block, codes, scales, _| {
        let d = f16_at(block, 0);
        for (g, s) in scales.iter_mut().enumerate() {
            let low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
            let high = block[2 + g / 4] >> (2 * (g % 4)) & 3;
            *s = d * (i32::from(low | high << 4) - 32) as f32;
        }
        for (codes, bytes) in codes.chunks_mut(32).zip(block[8..].chunks(16)) {
            nibbles(bytes, codes);
        }
        iq4_values(codes);
    },
};
