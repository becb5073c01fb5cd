//! Weights in EXL3's codes ([`nq_formats::exl3`]) and products with them.
//!
//! The parts of a product (q, k and v; gate and up) have scales of inputs, and often bits, of their own, so each is multiplied
//! by itself: of up to [`MOST_TRELLIS_ROWS`](crate::MOST_TRELLIS_ROWS) rows by codes as they are, which the kernels of
//! trellis codes do with FP16 instead of digits; of more, after all values became FP16, by other kernels.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Operands, Stream};
use super::kernel::kernels;
use super::linear::DeviceLinear;
use super::pack::{SPAN, Stack, TILE as RECORD_ROWS};
use super::product::{Epilogue, PlannedRows, Product, ProductOutput, Shares};
use super::trellis::exl3_inputs;
use super::trellis::room::{GROUPS, grouped};
use super::trellis::rows::CodedProduct;
use crate::cuda::exl3_expand::{EXL3_WARPS, EXPANDED_ROW, Exl3ExpandArgs};
use crate::cuda::trellis_rows::TrellisRowsArgs;
use nq_formats::exl3::TILE;
use nq_formats::trellis::{Code, LANES, STRIP, TILE as COLUMNS, word_place};
use nq_formats::{Exl3Code, Exl3Weight, QuantizedWeight, Weight};
use nq_kernels::{Error, Result};
use nq_model::Dims;
use rayon::prelude::*;

/// Least bits of a weight that kernels read.
const LEAST_BITS: usize = 2;

/// Most parts of a product.
pub(super) const MOST_PARTS: usize = 4;

/// Bits of the parts of a product, in order; 0: there is no such part.
pub(crate) type PartBits = [u8; MOST_PARTS];

kernels! {
    EXL3_ROWS: TrellisRowsArgs = "exl3_rows" in "exl3_rows.cu",
        test "kernels/cuda/tests/cuda/exl3.rs::products_of_a_step", bench "trellis",
        instances &[
            "exl3_rows_2_4", "exl3_rows_3_4", "exl3_rows_4_4", "exl3_rows_5_4",
            "exl3_rows_6_4", "exl3_rows_7_4", "exl3_rows_8_4",
            "exl3_rows_2_16", "exl3_rows_3_16", "exl3_rows_4_16", "exl3_rows_5_16",
            "exl3_rows_6_16", "exl3_rows_7_16", "exl3_rows_8_16",
        ];
    EXL3_EXPAND: Exl3ExpandArgs = "exl3_expand" in "exl3_expand.cu",
        test "kernels/cuda/tests/cuda/exl3.rs::products_of_many_rows", bench "trellis",
        instances &[
            "exl3_expand_2", "exl3_expand_3", "exl3_expand_4", "exl3_expand_5",
            "exl3_expand_6", "exl3_expand_7", "exl3_expand_8",
        ];
}

/// What of a device's weight is in EXL3's codes: `codes` are the words of all parts, `meta` of each the scales of its outputs, then
/// those of its inputs.
pub(crate) struct Exl3Parts {
    parts: Vec<Exl3Part>,
    /// They are gate and up.
    gated: bool,
}

/// A part of a product.
struct Exl3Part {
    code: Exl3Code,
    bits: usize,
    /// Of each strip its first output row, and how many of its rows there are.
    places: Buffer<[i32; 2]>,
    strips: usize,
    /// Its first output row.
    first_row: usize,
    /// Where its words and its scales begin, in bytes.
    codes_at: usize,
    meta_at: usize,
}

/// u32 words of a lane in a tile of a strip.
const fn words(bits: usize) -> usize {
    bits * STRIP / 32
}

/// Bytes of a tile of a strip.
const fn unit_bytes(bits: usize) -> usize {
    words(bits) * LANES * size_of::<u32>()
}

impl Exl3Parts {
    /// Allocates the parts of a stack of `heights` rows and so many inputs; also returns the bytes of words and of scales.
    pub(crate) fn zeros(
        gpu: &Gpu,
        bits: PartBits,
        heights: &[usize],
        inputs: usize,
    ) -> Result<(Self, usize, usize)> {
        let (mut first_row, mut codes_at, mut meta_at) = (0, 0usize, 0);
        let mut parts = Vec::new();
        for (&height, bits) in heights.iter().zip(bits) {
            let (bits, strips) = (usize::from(bits), height / STRIP);
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
            let size = (strips * (inputs / COLUMNS)).saturating_mul(unit_bytes(bits));
            codes_at = codes_at.saturating_add(size);
            meta_at += (height + inputs) * 2;
            first_row += height;
        }
        let gated = false;
        Ok((Exl3Parts { parts, gated }, codes_at, meta_at))
    }

    /// Strips of all parts.
    pub(super) fn strips(&self) -> usize {
        self.parts.iter().map(|part| part.strips).sum()
    }

    /// Calls `write` with the codes of each strip of the `weights` and where they belong, and fills in the parts. Returns the
    /// scales.
    ///
    /// # Errors
    /// [`Error::NoKernel`] if a weight is not in a code of EXL3.
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
            part.code = w.scheme().code();
            let size = w.dims().cols / COLUMNS * unit_bytes(part.bits);
            packed.resize(size, 0);
            for strip in 0..part.strips {
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

/// A part as an operand.
struct PartOperand<'w> {
    w: &'w DeviceLinear,
    part: &'w Exl3Part,
}

impl PartOperand<'_> {
    fn height(&self) -> usize {
        self.part.strips * STRIP
    }

    fn words(&self, o: &Operands<'_>) -> Result<Address> {
        let (bits, inputs) = (self.part.bits, self.w.inputs());
        let shape = [self.part.strips, inputs / COLUMNS, unit_bytes(bits)];
        o.part("codes", &self.w.codes, self.part.codes_at, &shape)
    }

    fn output_scales(&self, o: &Operands<'_>) -> Result<Address> {
        let at = self.part.meta_at;
        o.part("scales of outputs", &self.w.meta, at, &[self.height(), 2])
    }

    fn input_scales(&self, o: &Operands<'_>) -> Result<Address> {
        let at = self.part.meta_at + self.height() * 2;
        o.part("scales of inputs", &self.w.meta, at, &[self.w.inputs(), 2])
    }

    /// The instance for its bits among those of a kernel.
    fn index(&self) -> usize {
        self.part.bits - LEAST_BITS
    }
}

impl Stream {
    /// A product with a weight in EXL3's codes. More rows of FP16 than the stream has room for are multiplied by values of
    /// FP16.
    pub(super) fn multiply_exl3(
        &self,
        p: &Product<'_>,
        w: &Exl3Parts,
        output: ProductOutput<'_>,
    ) -> Result<()> {
        let room = self.trellis_room(&p.o)?;
        if matches!(p.asked, PlannedRows::Many(_)) && p.m > room.sizes.rows {
            return self.exl3_many(p, w, output);
        }
        let shares = Shares {
            parts: 1,
            bests: w.strips(),
        };
        let to = output.written(&p.o, p.m, p.w.rows(), shares)?;
        if (to.epilogue == Epilogue::Silu) != w.gated {
            let expected = "gate and up for their epilogue alone";
            return p.o.refuse("a weight", expected, "another");
        }
        if to.epilogue == Epilogue::Head && w.parts.len() > 1 {
            return p.o.refuse("a head", "one weight", "several");
        }
        for (i, part) in w.parts.iter().enumerate() {
            let operand = PartOperand { w: p.w, part };
            let mut args = TrellisRowsArgs {
                words: operand.words(&p.o)?,
                row_scales: operand.output_scales(&p.o)?,
                places: p.o.of("places", &part.places, &[part.strips])?,
                scales: operand.input_scales(&p.o)?,
                out: to.y,
                half: to.half,
                best: to.best,
                rows: p.w.rows() as i32,
                strips: part.strips as i32,
                epilogue: to.epilogue as i32,
                bytes: i32::from(part.code == Exl3Code::Mul1),
                multiplier: part.code.multiplier(),
                addend: part.code.addend(),
                ..TrellisRowsArgs::default()
            };
            if w.gated {
                args.gate = p.o.of("the gate", &room.gate, &[p.m, to.width])?;
                if i == 0 {
                    (args.out, args.gate) = (args.gate, Address::NULL);
                    (args.half, args.rows) = (Address::NULL, to.width as i32);
                    args.epilogue = Epilogue::Store as i32;
                }
            }
            let instances = EXL3_ROWS.row.instances.len() / GROUPS.len();
            let coded = CodedProduct {
                prepare: exl3_inputs(),
                multiply: EXL3_ROWS.instance(grouped(p.m).1 * instances + operand.index()),
                code: Code::Octagon,
                unit: unit_bytes(part.bits),
                together: 1,
                args,
            };
            let p = Product {
                holds_dependents: p.holds_dependents && i == 0,
                ..*p
            };
            self.coded_rows(&p, &to, coded)?;
        }
        Ok(())
    }

    /// A product of more rows: the values of all parts become FP16.
    fn exl3_many(&self, p: &Product<'_>, w: &Exl3Parts, output: ProductOutput<'_>) -> Result<()> {
        let o = &p.o;
        let room = self.trellis_room(o)?;
        let (inputs, rows) = (p.w.inputs(), p.w.rows());
        let spans = inputs.div_ceil(SPAN);
        let records = [rows.div_ceil(RECORD_ROWS), spans, RECORD_ROWS * SPAN * 2];
        let codes = o.of("expanded weights", &room.expanded, &records)?;
        for (i, part) in w.parts.iter().enumerate() {
            let operand = PartOperand { w: p.w, part };
            let args = Exl3ExpandArgs {
                words: operand.words(o)?,
                row_scales: operand.output_scales(o)?,
                scales: operand.input_scales(o)?,
                codes,
                tiles: (inputs / COLUMNS) as i32,
                spans: spans as i32,
                first_row: if w.gated { 0 } else { part.first_row as i32 },
                half: if w.gated { i as i32 } else { -1 },
                bytes: i32::from(part.code == Exl3Code::Mul1),
                multiplier: part.code.multiplier(),
                addend: part.code.addend(),
                padding: [0; 1],
            };
            let shape = LaunchShape::new([2 * spans, part.strips, 1], EXL3_WARPS * 32)
                .shared(STRIP * EXPANDED_ROW * size_of::<f32>())
                .overlapping();
            // SAFETY: the operands were checked.
            unsafe { self.launch(EXL3_EXPAND.instance(operand.index()), shape, &args)? };
        }
        let expanded =
            DeviceLinear::of_halves(&room.expanded, &room.no_meta, Dims::new(rows, inputs));
        let p = Product { w: &expanded, ..*p };
        self.multiply(p, output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use nq_formats::Exl3Scheme;

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
