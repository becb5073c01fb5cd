//! Reads EXL3, the format of exllamav3: Linears in a trellis code of its own, between Hadamard transforms of their
//! inputs and outputs. No kernel of nq multiplies that code, so weights are expanded to f16.
//!
//! | tensor | shape |
//! |---|---|
//! | `X.trellis` | I16 `[in / 16, out / 16, 16 K]`, `K` bits a weight: 1 to 8, and 1.5, 2.5, 3.5 with `mul1` |
//! | `X.suh`, `X.svh` | F16 `[in]`, `[out]`: signed scales of inputs and outputs |
//! | `X.su`, `X.sv` | I16 `[in / 16]`, `[out / 16]`: in older files signs alone, a bit each, set where negative |
//! | `X.mcg`, `X.mul1` | I32, one element: says which code, by its multiplier; neither: the first one |
//!
//! The weight is `diag(suh) H T H diag(svh)`, transposed, with `H` the transform of each 128 ([`transform`]). `T` is cut
//! into tiles of 16 inputs and 16 outputs, each a cyclic sequence of 256 values whose states are the last 16 bits, as in
//! [`crate::trellis`]; a value is the sum of two halves that the state's product is masked to, or of its bytes.

use super::expanded::{ExpandedType, Expansion, open_with};
use super::quantization::QuantizationConfig;
use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::shards::Shards;
use crate::tensor::Tensor;
use crate::trellis::{BLOCK, state, transform};
use half::f16;
use nq_model::{DType, Dims};
use rayon::prelude::*;

/// The `quant_method` of this format.
pub const METHOD: &str = "exl3";

/// Inputs, and outputs, of a tile.
const TILE: usize = 16;
/// Values of a tile.
const VALUES: usize = TILE * TILE;

/// The suffixes of a weight's tensors.
const TRELLIS: &str = ".trellis";
const PARTS: [&str; 7] = [TRELLIS, ".suh", ".svh", ".su", ".sv", ".mcg", ".mul1"];

/// How a value follows from a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codebook {
    /// Two halves, masked from the product with a multiplier and an addend.
    Halves { multiplier: u32, addend: u32 },
    /// The sum of the bytes of the product with a multiplier.
    Bytes { multiplier: u32 },
}

const FIRST: Codebook = Codebook::Halves {
    multiplier: 89_226_354,
    addend: 64_248_484,
};
const MCG: u32 = 0xCBAC_1FED;
const MUL1: u32 = 0x83DC_D12D;

impl Codebook {
    /// The value of a state, as kernels compute it in f16.
    fn value(self, state: u16) -> f16 {
        let state = u32::from(state);
        match self {
            Codebook::Halves { multiplier, addend } => {
                let product = state.wrapping_mul(multiplier).wrapping_add(addend);
                let both = product & 0x8FFF_8FFF ^ 0x3B60_3B60;
                let half = |bits: u32| f16::from_bits(bits as u16).to_f32();
                f16::from_f32(half(both) + half(both >> 16))
            }
            Codebook::Bytes { multiplier } => {
                let bytes = state.wrapping_mul(multiplier).to_le_bytes();
                let sum: u16 = bytes.into_iter().map(u16::from).sum();
                // About 1 / 147.7, and -510 of it less 1,024, which the sum is added to.
                let (factor, offset) = (f16::from_bits(0x1EEE), f16::from_bits(0xC931));
                let value = f64::from(1024 + sum) * factor.to_f64() + offset.to_f64();
                f16::from_f64(value)
            }
        }
    }
}

/// A weight's code and twice its bits.
#[derive(Clone, Copy, Debug)]
struct Coding {
    code: Codebook,
    half_bits: usize,
}

impl Coding {
    /// The values of a tile in order of its sequence.
    fn values(self, words: &[u32]) -> [f16; VALUES] {
        let mut values = [f16::ZERO; VALUES];
        for (t, value) in values.iter_mut().enumerate() {
            // In halves of bits, odd values have the extra one.
            let end = (t + 1) * self.half_bits / 2;
            *value = self.code.value(state(words, end));
        }
        values
    }
}

/// The input and the output of value `t` in its tile: those that the lanes of a warp hold of B in mma.m16n8k16.
const fn place(t: usize) -> (usize, usize) {
    let (lane, j) = (t / 8, t % 8);
    (
        lane % 4 * 2 + j % 2 + 8 * (j / 2 % 2),
        lane / 4 + 8 * (j / 4),
    )
}

struct Exl3;

/// Opens a checkpoint whose `quant_method` is `exl3`.
pub fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    source.left_over = settings.left_over(&[
        "bits",
        "calibration",
        "codebook",
        "head_bits",
        "mtp_bits",
        "original_quantization_config",
        "out_scales",
        "tensor_storage",
        "version",
        "vision_bits",
    ]);
    open_with(source, Exl3)
}

/// The tensors of the weight `name`.
struct Exl3Tensors<'a> {
    shards: &'a Shards,
    name: &'a str,
}

impl Exl3Tensors<'_> {
    /// The code that the scalar tensors of a weight name.
    fn code(&self) -> Result<Codebook> {
        let name = self.name;
        let multiplier = |suffix: &str, known: u32| -> Result<bool> {
            let tensor = format!("{name}{suffix}");
            let Some(found) = self.shards.get(&tensor) else {
                return Ok(false);
            };
            let found = match (found.dtype(), found.data().first_chunk::<4>()) {
                (DType::I32 | DType::U32, Some(bytes)) => u32::from_le_bytes(*bytes),
                (other, _) => {
                    let expected = "one 32-bit integer".into();
                    return Err(self.shards.error(&tensor, expected, other.to_string()));
                }
            };
            match found == known {
                true => Ok(true),
                false => Err(self.shards.error(
                    &tensor,
                    format!("the multiplier {known:#X}"),
                    format!("{found:#X}"),
                )),
            }
        };
        Ok(if multiplier(".mul1", MUL1)? {
            Codebook::Bytes { multiplier: MUL1 }
        } else if multiplier(".mcg", MCG)? {
            Codebook::Halves {
                multiplier: MCG,
                addend: 0,
            }
        } else {
            FIRST
        })
    }

    /// The scales of inputs or outputs: values, or signs alone.
    fn scales(&self, values: &str, signs: &str, n: usize) -> Result<Vec<f32>> {
        let name = self.name;
        let values = format!("{name}{values}");
        let signs = format!("{name}{signs}");
        let scales = if self.shards.contains(&values) || !self.shards.contains(&signs) {
            let tensor = self.shards.require(&values, &[DType::F16], &[n])?;
            tensor.to_f32()?
        } else {
            let tensor = self.shards.require(&signs, &[DType::I16], &[n / 16])?;
            let bit = |i: usize| tensor.data()[i / 8] >> (i % 8) & 1;
            (0..n).map(|i| 1.0 - 2.0 * f32::from(bit(i))).collect()
        };
        match scales.iter().position(|s| !s.is_finite()) {
            None => Ok(scales),
            Some(i) => {
                let found = format!("{} at {i}", scales[i]);
                Err(self.shards.error(&values, "finite values".into(), found))
            }
        }
    }

    /// The code of a weight, checked against the shape of its trellis.
    fn coding(&self, Dims { rows, cols }: Dims) -> Result<(Coding, Tensor)> {
        let tensor = format!("{}{TRELLIS}", self.name);
        let code = self.code()?;
        let fits = |n: usize| n > 0 && n.is_multiple_of(BLOCK);
        let found = self.shards.get(&tensor);
        let width = found.and_then(|t| t.shape().get(2).copied()).unwrap_or(0);
        let half_bits = width / 8;
        let halves = half_bits % 2 == 1;
        let known = match (code, halves) {
            (Codebook::Bytes { .. }, true) => half_bits <= 7 && half_bits > 1,
            (_, true) => false,
            (_, false) => (2..=16).contains(&half_bits),
        };
        if !known || !width.is_multiple_of(8) || !fits(rows) || !fits(cols) {
            let expected = format!(
                "16 values for each of 1 to 8 bits, or 1.5, 2.5 or 3.5 with mul1, and [{rows}, {cols}] of \
                 multiples of {BLOCK}"
            );
            let found = format!("{width} values");
            return Err(self.shards.error(&tensor, expected, found));
        }
        let shape = [cols / TILE, rows / TILE, width];
        let tensor = self.shards.require(&tensor, &[DType::I16], &shape)?;
        Ok((Coding { code, half_bits }, tensor))
    }

    /// The values of a weight `[rows, cols]`, in elements of `N` bytes; `encode` converts an f32 to one.
    fn expand<const N: usize>(
        &self,
        Dims { rows, cols }: Dims,
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor> {
        let (coding, trellis) = self.coding(Dims::new(rows, cols))?;
        let of_inputs = self.scales(".suh", ".su", cols)?;
        let of_outputs = self.scales(".svh", ".sv", rows)?;
        let width = 8 * coding.half_bits;
        let across = rows / TILE;
        let mut bytes = vec![0; rows * cols * N];
        // Outputs that are transformed together.
        let blocks = bytes.par_chunks_mut(BLOCK * cols * N).enumerate();
        blocks.for_each(|(block, out)| {
            let mut values = vec![0f32; BLOCK * cols];
            let mut words = vec![0u32; width / 2];
            for down in 0..cols / TILE {
                for tile in 0..BLOCK / TILE {
                    let at = 2 * width * (down * across + block * (BLOCK / TILE) + tile);
                    let packed = trellis.data()[at..at + 2 * width].as_chunks::<4>().0;
                    for (word, packed) in words.iter_mut().zip(packed) {
                        *word = u32::from_le_bytes(*packed);
                    }
                    for (t, value) in coding.values(&words).into_iter().enumerate() {
                        let (input, output) = place(t);
                        let row = tile * TILE + output;
                        values[row * cols + down * TILE + input] = value.to_f32();
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
            let of_outputs = &of_outputs[block * BLOCK..];
            let rows = values.chunks_exact_mut(cols).zip(of_outputs);
            for ((row, scale), out) in rows.zip(out.chunks_exact_mut(cols * N)) {
                transform(row);
                for ((v, of_input), out) in
                    row.iter().zip(&of_inputs).zip(out.as_chunks_mut::<N>().0)
                {
                    *out = encode(v * of_input * scale);
                }
            }
        });
        Tensor::new(dtype, vec![rows, cols], bytes.into())
    }
}

impl Expansion for Exl3 {
    const FORMAT: &'static str = METHOD;
    const HELD: ExpandedType = ExpandedType::F16;

    fn is_expanded(&self, shards: &Shards, name: &str) -> bool {
        shards.contains(&format!("{name}{TRELLIS}"))
    }

    fn sources(&self, name: &str) -> Vec<String> {
        PARTS.map(|suffix| format!("{name}{suffix}")).into()
    }

    fn expand<const N: usize>(
        &self,
        shards: &Shards,
        name: &str,
        dims: Dims,
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor> {
        Exl3Tensors { shards, name }.expand(dims, dtype, encode)
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
        let mcg = Codebook::Halves {
            multiplier: MCG,
            addend: 0,
        };
        let codes = [FIRST, mcg, Codebook::Bytes { multiplier: MUL1 }];
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
            let code = codes[code];
            let values = Coding { code, half_bits }.values(&words);
            let values = values.map(f16::to_f64);
            let places = values.iter().zip(1u32..).map(|(v, t)| v * f64::from(t));
            let sum: f64 = places.sum();
            assert!((sum - by_place).abs() < 1e-6, "{bits} {code:?}: {sum}");
            let sum: f64 = values.iter().map(|v| v * v).sum();
            assert!((sum - squares).abs() < 1e-6, "{bits} {code:?}: {sum}");
        }
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
