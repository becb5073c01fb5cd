//! Weights in EXL3's codes on a device.

use crate::driver::{Buffer, Gpu};
use crate::pack::{PartBits, Stack};
use nq_formats::exl3::TILE;
use nq_formats::trellis::{LANES, STRIP, TILE as COLUMNS, word_place};
use nq_formats::{Exl3Code, Exl3Weight, QuantizedWeight, Weight};
use nq_kernels::{Error, Result};
use rayon::prelude::*;

/// Least bits of a weight that kernels read.
pub(super) const LEAST_BITS: usize = 2;

/// What of a device's weight is in EXL3's codes: `codes` are the words of all parts, `meta` of each the scales of its outputs, then
/// those of its inputs.
pub(crate) struct Exl3Parts {
    pub(crate) parts: Vec<Exl3Part>,
    /// They are gate and up.
    pub(crate) gated: bool,
    /// Weights that each part is a stack of, one after the other; those of several experts have scales of inputs of their
    /// own.
    pub(crate) experts: usize,
}

/// A part of a product.
pub(crate) struct Exl3Part {
    pub(super) code: Exl3Code,
    pub(super) bits: usize,
    /// Of each strip its first output row, and how many of its rows there are.
    pub(super) places: Buffer<[i32; 2]>,
    /// Of an expert.
    pub(crate) strips: usize,
    /// Its first output row.
    pub(super) first_row: usize,
    /// Where its words and its scales begin, in bytes.
    pub(super) codes_at: usize,
    pub(super) meta_at: usize,
}

/// u32 words of a lane in a tile of a strip.
const fn words(bits: usize) -> usize {
    bits * STRIP / 32
}

/// Bytes of a tile of a strip.
pub(super) const fn unit_bytes(bits: usize) -> usize {
    words(bits) * LANES * size_of::<u32>()
}

impl Exl3Parts {
    /// Allocates the parts of a stack of `heights` rows and so many inputs, each of `experts` weights; also returns the bytes of
    /// words and of scales.
    pub(crate) fn zeros(
        gpu: &Gpu,
        bits: PartBits,
        heights: &[usize],
        inputs: usize,
        experts: usize,
    ) -> Result<(Self, usize, usize)> {
        let (mut first_row, mut codes_at, mut meta_at) = (0, 0usize, 0);
        let mut parts = Vec::new();
        for (&height, bits) in heights.iter().zip(bits) {
            let (bits, strips) = (usize::from(bits), height / experts / STRIP);
            parts.push(Exl3Part {
                code: Exl3Code::ThreeInst,
                bits,
                places: gpu.zeros("weights", strips)?,
                strips,
                first_row,
                codes_at,
                meta_at,
            });
            // A size that no memory has is refused, not wrapped to a small one.
            let size = (height / STRIP * (inputs / COLUMNS)).saturating_mul(unit_bytes(bits));
            codes_at = codes_at.saturating_add(size);
            meta_at += (height + experts * inputs) * 2;
            first_row += height;
        }
        let parts = Exl3Parts {
            parts,
            gated: false,
            experts,
        };
        Ok((parts, codes_at, meta_at))
    }

    /// Strips of all parts, of an expert.
    pub(crate) fn strips(&self) -> usize {
        self.parts.iter().map(|part| part.strips).sum()
    }

    /// Calls `write` with the codes of each strip of the `weights` and where they belong, and fills in the parts. Returns the
    /// scales.
    ///
    /// # Errors
    /// [`Error::NoKernel`] if a weight is not in a code of EXL3, [`Error::Shape`] if it is of another number of experts.
    pub(crate) fn upload(
        &mut self,
        weights: &[&Weight],
        stack: Stack,
        mut write: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<Vec<u16>> {
        self.gated = stack == Stack::Interleave;
        let mut scales = Vec::new();
        let mut packed = Vec::new();
        for (part, weight) in self.parts.iter_mut().zip(weights) {
            let Weight::Quantized(QuantizedWeight::Exl3(w)) = weight else {
                return Err(Error::NoKernel {
                    op: "linear",
                    scheme: weight.scheme_name(),
                    activations: "f32".into(),
                    device: "cuda beside weights in EXL3's codes".into(),
                });
            };
            if w.experts() != self.experts {
                return Err(Error::Shape {
                    op: "linear",
                    what: "experts of a part",
                    expected: self.experts.to_string(),
                    found: w.experts().to_string(),
                });
            }
            part.code = w.scheme().code();
            let size = w.dims().cols / COLUMNS * unit_bytes(part.bits);
            packed.resize(size, 0);
            for strip in 0..self.experts * part.strips {
                pack_strip(w, part.bits, strip, &mut packed);
                write(part.codes_at + strip * size, &packed)?;
            }
            // Of gate and up, rows are those of the result.
            let first = if self.gated { 0 } else { part.first_row };
            let place = |strip| [(first + strip * STRIP) as i32, STRIP as i32];
            let places: Vec<[i32; 2]> = (0..part.strips).map(place).collect();
            part.places.write(0, &places)?;
            scales.extend(w.output_scales().iter().map(|s| s.to_bits()));
            scales.extend(w.input_scales().iter().map(|s| s.to_bits()));
        }
        Ok(scales)
    }
}

/// The words of strip `strip` of `w`, `[tiles][32 * words of a lane]`, little-endian: of each lane its chunks of eight values, of the
/// file's tiles along the outputs, then of the 16 inputs further.
fn pack_strip(w: &Exl3Weight, bits: usize, strip: usize, to: &mut [u8]) {
    let tiles = to.par_chunks_exact_mut(unit_bytes(bits)).enumerate();
    tiles.for_each(|(tile, to)| {
        for chunk in 0..COLUMNS / TILE * (STRIP / TILE) {
            let (part, m) = (chunk / (STRIP / TILE), chunk % (STRIP / TILE));
            let from = w.tile(COLUMNS / TILE * tile + part, STRIP / TILE * strip + m);
            for lane in 0..LANES {
                for byte in 0..bits {
                    // In the order of bits, in which a word begins with its last byte.
                    let at = chunk * bits + byte;
                    let place = 4 * word_place(words(bits), lane, at / 4) + (3 - at % 4);
                    to[place] = from[(lane * bits + byte) ^ 3];
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use nq_formats::Exl3Scheme;
    use nq_model::Dims;

    /// A lane finds its chunks where the kernels look for them, and what is before them in those of the lane before.
    #[test]
    fn lanes_have_chunks_of_the_files_tiles() {
        for bits in LEAST_BITS..=8 {
            let dims = Dims::new(2 * STRIP, STRIP);
            let scheme = Exl3Scheme::new(Exl3Code::Mcg, 2 * bits).unwrap();
            let mut state = 1u32;
            let mut byte = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            let size = dims.rows / TILE * (dims.cols / TILE) * scheme.tile_bytes();
            let tiles: Vec<u8> = (0..size).map(|_| byte()).collect();
            let ones = |n| vec![f16::ONE; n].into();
            let w = Exl3Weight::new(scheme, dims, tiles.into(), ones(STRIP), ones(2 * STRIP));
            let w = w.unwrap();
            let mut packed = vec![0; dims.cols / COLUMNS * unit_bytes(bits)];
            pack_strip(&w, bits, 1, &mut packed);
            for (tile, unit) in packed.chunks_exact(unit_bytes(bits)).enumerate() {
                let (unit, _) = unit.as_chunks::<4>();
                let bit = |lane: usize, i: usize| {
                    let word = unit[word_place(words(bits), lane, i / 32)];
                    u32::from_le_bytes(word) >> (31 - i % 32) & 1
                };
                for chunk in 0..16 {
                    let values = scheme.values(w.tile(2 * tile + chunk / 8, 8 + chunk % 8));
                    for (t, &expected) in values.iter().enumerate() {
                        let (lane, end) = (t / 8, (t % 8 + 1) * bits);
                        let first = chunk * 8 * bits;
                        let of_state = |i: usize| match (end + i).checked_sub(16) {
                            Some(at) => bit(lane, first + at),
                            None => bit((lane + 31) % 32, first + 8 * bits + end + i - 16),
                        };
                        let state = (0..16).fold(0, |state, i| state << 1 | of_state(i));
                        let value = scheme.code().value(state as u16);
                        assert_eq!(value, expected, "{bits} bits, chunk {chunk}, value {t}");
                    }
                }
            }
        }
    }
}
