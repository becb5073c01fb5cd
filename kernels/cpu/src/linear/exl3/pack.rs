//! The layout of packed weights in EXL3's codes: [`super`] describes it.

use crate::linear::trellis::pack::{InputScales, PANELS};
use crate::memory::Buffer;
use crate::simd::LANES;
use crate::team::{Team, spread};
use nq_formats::exl3::{LANES as CHUNKS, TILE, VALUES, place};
use nq_formats::trellis::{BLOCK, state, transform};
use nq_formats::{Exl3Scheme, Exl3Weight};
use nq_model::Dims;

/// Inputs of a span.
pub(super) const SPAN: usize = 2 * TILE;

/// What a packed EXL3 weight has beside its words and the scales of its outputs.
pub(crate) struct PackedExl3 {
    pub(crate) scheme: Exl3Scheme,
    /// Bits of a weight.
    pub(super) bits: usize,
    /// Factors of the inputs, before they are transformed.
    pub(crate) input_scales: InputScales,
}

impl PackedExl3 {
    /// Of `w`; `None` if kernels do not read its scheme.
    pub(in crate::linear) fn of(w: &Exl3Weight) -> Option<Self> {
        Some(PackedExl3 {
            scheme: w.scheme(),
            bits: w.scheme().whole_bits()?,
            input_scales: InputScales(w.input_scales().clone()),
        })
    }

    /// Words of a span.
    pub(super) fn span_words(&self) -> usize {
        self.bits * VALUES / 32 * LANES
    }

    /// Writes row `row` of a weight with these words, times `scale`, with the values of [`Exl3Weight::dequantize_row`].
    pub(in crate::linear) fn dequantize_row(
        &self,
        words: &[u32],
        row: usize,
        scale: f32,
        out: &mut [f32],
    ) {
        let (code, bits, size) = (self.scheme.code(), self.bits, self.span_words());
        let spans = words[row / BLOCK * (out.len() / SPAN) * size..].chunks_exact(size);
        for (out, span) in out.chunks_exact_mut(SPAN).zip(spans) {
            let mut columns = [[0.0; BLOCK]; SPAN];
            for lane in 0..LANES {
                let words: Vec<u32> = span[lane..].iter().step_by(LANES).copied().collect();
                for t in 0..8 * CHUNKS {
                    let (input, output) = place(t);
                    let column = &mut columns[TILE * (lane / PANELS) + input];
                    column[TILE * (lane % PANELS) + output] =
                        code.value(state(&words, (t + 1) * bits)).to_f32();
                }
            }
            for (out, column) in out.iter_mut().zip(&mut columns) {
                transform(column);
                *out = column[row % BLOCK];
            }
        }
        transform(out);
        for (v, of_input) in out.iter_mut().zip(&*self.input_scales.0) {
            *v = *v * of_input.to_f32() * scale;
        }
    }
}

/// Words of a weight `[rows, inputs]`.
pub(in crate::linear) fn words(scheme: Exl3Scheme, Dims { rows, cols }: Dims) -> usize {
    (rows / TILE) * (cols / TILE) * scheme.tile_bytes() / 4
}

/// The words of `w` in the layout of this module, in parallel.
pub(in crate::linear) fn pack(team: &Team, w: &Exl3Weight) -> Buffer<u32> {
    let mut data = Buffer::weights(words(w.scheme(), w.dims()));
    let spans = w.dims().cols / SPAN;
    spread(
        team,
        &mut data,
        w.scheme().tile_bytes() / 4 * LANES,
        |index, data| {
            let (strip, span) = (index / spans, index % spans);
            for lane in 0..LANES {
                let tile = w.tile(2 * span + lane / PANELS, PANELS * strip + lane % PANELS);
                let (words, _) = tile.as_chunks::<4>();
                for (to, word) in data[lane..].iter_mut().step_by(LANES).zip(words) {
                    *to = u32::from_le_bytes(*word);
                }
            }
        },
    );
    data
}
