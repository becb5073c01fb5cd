//! Weights in EXL3's codes ([`nq_formats::exl3`]) and products with them.
//!
//! The parts of a product (q, k and v; gate and up) have scales of inputs, and often bits, of their own, so each is multiplied
//! by itself: of up to [`MOST_TRELLIS_ROWS`](crate::MOST_TRELLIS_ROWS) rows by codes as they are, which the kernels of
//! trellis codes do with FP16 instead of digits; of more, after all values became FP16, by other kernels.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Operands, Stream};
use super::kernel::kernels;
use super::linear::DeviceLinear;
use super::pack::{SPAN, Stack, TILE as RECORD_ROWS};
use super::product::{Asked, Epilogue, Inputs, OutputAddresses, Product, ProductOutput, Shares};
use super::trellis::room::{GROUPS, TrellisRoom, grouped, octagon_bytes};
use super::trellis::{MOST_INPUTS, THREADS, exl3_inputs, rows_shared_of};
use crate::cuda::exl3_expand::{EXL3_WARPS, EXPANDED_ROW, Exl3ExpandArgs};
use crate::cuda::trellis_inputs::TrellisInputsArgs;
use crate::cuda::trellis_rows::TrellisRowsArgs;
use nq_formats::exl3::TILE;
use nq_formats::trellis::{BLOCK, LANES, STRIP, TILE as COLUMNS, word_place};
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

/// Where a part's product goes.
#[derive(Clone, Copy)]
struct PartOutput {
    epilogue: Epilogue,
    /// Outputs of a row of x.
    rows: usize,
    y: Address,
    half: Address,
    best: Address,
    gate: Address,
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
        if matches!(p.asked, Asked::Many(_)) && p.m > room.sizes.rows {
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
        let whole = PartOutput {
            epilogue: to.epilogue,
            rows: p.w.rows(),
            y: to.y,
            half: to.half,
            best: to.best,
            gate: Address::NULL,
        };
        for (i, part) in w.parts.iter().enumerate() {
            let own = match w.gated {
                false => whole,
                true => {
                    let gate = p.o.of("the gate", &room.gate, &[p.m, to.width])?;
                    match i {
                        0 => PartOutput {
                            epilogue: Epilogue::Store,
                            rows: to.width,
                            y: gate,
                            half: Address::NULL,
                            ..whole
                        },
                        _ => PartOutput { gate, ..whole },
                    }
                }
            };
            let holds_dependents = p.holds_dependents && i == 0;
            let p = Product {
                holds_dependents,
                ..*p
            };
            self.exl3_rows(&p, &PartOperand { w: p.w, part }, &to, own)?;
        }
        Ok(())
    }

    /// The product of a part: two kernels, of which the first prepares the inputs. One row that fits in shared memory needs the
    /// second alone.
    fn exl3_rows(
        &self,
        p: &Product<'_>,
        w: &PartOperand<'_>,
        norm: &OutputAddresses<'_>,
        to: PartOutput,
    ) -> Result<()> {
        let (o, m, inputs) = (&p.o, p.m, p.w.inputs());
        let room: &TrellisRoom = self.trellis_room(o)?;
        o.at_least("rows", 1, m)?;
        o.at_most("rows", room.sizes.rows, m)?;
        o.multiple("inputs", BLOCK, inputs)?;
        o.at_most("inputs", MOST_INPUTS, inputs)?;
        let (groups, which) = grouped(m);
        let group = GROUPS[which];
        let padded = inputs.next_multiple_of(SPAN);
        let (full, half) = match p.x {
            Inputs::Full(_) => (p.x()?, Address::NULL),
            Inputs::Half(_) => (Address::NULL, p.x()?),
            Inputs::Prepared => return o.refuse("x", "rows", "columns"),
        };
        let digits = [groups, octagon_bytes(group, inputs)];
        let mut digits = o.of("digits", &room.digits, &digits)?;
        let mut steps = o.of("steps", &room.steps, &[groups, group])?;
        let (gain, scales, eps) = (norm.gain(o, inputs)?, w.input_scales(o)?, norm.eps());
        // Of one row the blocks of the product prepare it themselves, where there is room for it.
        let has_room = o.gpu().info().shared_memory;
        let mut shared = rows_shared_of(unit_bytes(w.part.bits), which);
        let with_row = shared + inputs * size_of::<f32>();
        let owns = m == 1 && matches!(p.x, Inputs::Full(_)) && with_row <= has_room;
        if owns {
            shared = with_row;
            (digits, steps) = (Address::NULL, Address::NULL);
        } else {
            let args = TrellisInputsArgs {
                x: full,
                half,
                gain,
                scales,
                digits,
                steps,
                m: m as i32,
                inputs: inputs as i32,
                padded: padded as i32,
                group: group as i32,
                eps,
                holds_dependents: i32::from(p.holds_dependents),
            };
            // `trellis_inputs.cu`: a row, padded against bank conflicts.
            let row = inputs * 5 + 256;
            o.at_most("bytes of a row of x", has_room, row)?;
            let shape = LaunchShape::new([m, 1, 1], 512).shared(row).overlapping();
            // SAFETY: the operands were checked.
            unsafe { self.launch(exl3_inputs(), shape, &args)? };
        }
        let (strips, tiles) = (w.part.strips, inputs / COLUMNS);
        // Blocks whose warps have not one unit each would only add parts.
        let blocks = (strips * tiles)
            .div_ceil(THREADS[which] / LANES)
            .clamp(1, o.gpu().info().multiprocessors);
        let args = TrellisRowsArgs {
            words: w.words(o)?,
            row_scales: w.output_scales(o)?,
            places: o.of("places", &w.part.places, &[strips])?,
            digits,
            steps,
            x: if owns { full } else { Address::NULL },
            gain,
            scales,
            out: to.y,
            half: to.half,
            best: to.best,
            parts: o.of("parts", &room.parts, &[groups, blocks * 2, STRIP, group])?,
            gate: to.gate,
            m: m as i32,
            rows: to.rows as i32,
            strips: strips as i32,
            tiles: tiles as i32,
            padded: (to.rows / 2).next_multiple_of(SPAN) as i32,
            epilogue: to.epilogue as i32,
            eps,
            // Otherwise the kernel before held its dependents already.
            holds_dependents: i32::from(p.holds_dependents && owns),
            bytes: i32::from(w.part.code == Exl3Code::Mul1),
            multiplier: w.part.code.multiplier(),
            addend: w.part.code.addend(),
            padding: [0; 1],
        };
        let shape = LaunchShape::new([blocks, groups, 1], THREADS[which])
            .shared(shared)
            .overlapping();
        let instance = EXL3_ROWS.instance(which * EXL3_ROWS.row.instances.len() / 2 + w.index());
        // SAFETY: the operands were checked.
        unsafe { self.launch(instance, shape, &args) }
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
