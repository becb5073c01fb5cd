//! Weights in EXL3's codes ([`nq_formats::exl3`]): their layout, and their product with rows of x that are not rounded.
//!
//! A strip has 128 outputs, whose transform mixes them all; a span of it 32 inputs, and so 16 tiles: eight along the outputs,
//! twice. A vector is a word of all 16, so that states are made without a look at other lanes: words lie `[strips][spans]
//! [words of a tile][16]`, lane `8 p + m` being the tile of inputs `16 p ..` and outputs `16 m ..` of the span. An eighth
//! of a tile's sequence has outputs `g` and `g + 8`; of all tiles these are the 16 rows of a panel: `16 m + g` in lane
//! `m`, `16 m + g + 8` in lane `8 + m`.

use super::kernel::PanelProduct;
use super::pack::PanelWeight;
use super::trellis::pack::{InputScales, PANELS};
use super::trellis::strips;
use crate::memory::Buffer;
use crate::simd::{LANES, Simd};
use crate::team::{Team, spread};
use crate::with_scratch;
use nq_formats::exl3::{
    BYTES_FACTOR, BYTES_OFFSET, HALVES_FLIPPED, HALVES_MASK, LANES as CHUNKS, TILE, VALUES, place,
};
use nq_formats::trellis::{BLOCK, state, transform};
use nq_formats::{Exl3Code, Exl3Scheme, Exl3Weight};
use nq_model::Dims;
use std::ops::Range;

/// Inputs of a span.
const SPAN: usize = 2 * TILE;

/// Spans whose values are written out at once: 32 KiB of floats.
const SPANS: usize = 2;

/// What a packed EXL3 weight has beside its words and the scales of its outputs.
pub(crate) struct PackedExl3 {
    pub(crate) scheme: Exl3Scheme,
    /// Bits of a weight.
    bits: usize,
    /// Factors of the inputs, before they are transformed.
    pub(crate) input_scales: InputScales,
}

impl PackedExl3 {
    /// Of `w`; `None` if kernels do not read its scheme.
    pub(super) fn of(w: &Exl3Weight) -> Option<Self> {
        Some(PackedExl3 {
            scheme: w.scheme(),
            bits: w.scheme().whole_bits()?,
            input_scales: InputScales(w.input_scales().clone()),
        })
    }

    /// Words of a span.
    fn span_words(&self) -> usize {
        self.bits * VALUES / 32 * LANES
    }
}

/// Words of a weight `[rows, inputs]`.
pub(super) fn words(scheme: Exl3Scheme, Dims { rows, cols }: Dims) -> usize {
    (rows / TILE) * (cols / TILE) * scheme.tile_bytes() / 4
}

/// The words of `w` in the layout of this module, in parallel.
pub(super) fn pack(team: &Team, w: &Exl3Weight) -> Buffer<u32> {
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

/// Products of any number of columns: values of a few spans of a strip are written out and multiplied, and at the end of
/// the strip its outputs are transformed and scaled.
///
/// # Safety
/// That of [`RunPanels`](super::kernel::RunPanels).
pub(super) unsafe fn gemm(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (table, w, x, panels) = (p.table, p.w, p.x, &p.panels);
    let stride = x.columns() * LANES;
    let spans = w.inputs / SPAN;
    with_scratch!(Buffer<f32>, |values| {
        for (strip, own) in strips(panels) {
            assert_eq!(own.len(), PANELS, "a strip is whole");
            let out = &mut out[own.start * stride..own.end * stride];
            for from in (0..spans).step_by(SPANS) {
                let spans = from..(from + SPANS).min(spans);
                let (first, inputs) = (from * SPAN, spans.len() * SPAN);
                let values = values.reserve(PANELS * inputs * LANES);
                (table.exl3_values)(w, strip, spans, values);
                for panel in (0..PANELS).step_by(table.panels) {
                    for block in 0..x.blocks() {
                        let out = &mut out[panel * stride + block * x.width * LANES..];
                        // SAFETY: panels are a multiple of those that kernels take; block `block` holds
                        // `w.inputs * width` values, of which those of `inputs` are used; a panel's outputs of the
                        // block start at its columns.
                        unsafe {
                            (table.tile[table.panels - 1][x.width - 1])(
                                inputs,
                                values.as_ptr().add(panel * inputs * LANES),
                                inputs * LANES,
                                x.floats.as_ptr().add((block * w.inputs + first) * x.width),
                                out.as_mut_ptr(),
                                stride,
                                LANES,
                                first > 0,
                            );
                        }
                    }
                }
            }
            finish(w, strip, stride, out);
        }
    });
}

/// Transforms the outputs of a strip, `[panels][columns][16]` in the order of panels, scales them and puts them in order.
fn finish(w: &PanelWeight, strip: usize, stride: usize, out: &mut [f32]) {
    let scales = &w.scales[strip * BLOCK..][..BLOCK];
    for column in (0..stride).step_by(LANES) {
        let mut outputs = [0.0; BLOCK];
        let at =
            |row: usize| row % PANELS * stride + column + row / PANELS % 2 * PANELS + row / LANES;
        for (row, to) in outputs.iter_mut().enumerate() {
            *to = out[at(row)];
        }
        transform(&mut outputs);
        for (row, (v, scale)) in outputs.iter().zip(scales).enumerate() {
            out[row / LANES * stride + column + row % LANES] = scale.to_f32() * v;
        }
    }
}

/// Writes the values of spans `spans` of a strip, `[panels][inputs][16 rows]`.
///
/// # Panics
/// If the weight has no such strip or spans, or `out` is too short.
#[inline(always)]
pub(crate) fn values<S: Simd>(
    s: S,
    w: &PanelWeight,
    strip: usize,
    spans: Range<usize>,
    out: &mut [f32],
) {
    match w.exl3().scheme.code() {
        Exl3Code::ThreeInst | Exl3Code::Mcg => values_of_code::<S, false>(s, w, strip, spans, out),
        Exl3Code::Mul1 => values_of_code::<S, true>(s, w, strip, spans, out),
    }
}

/// As [`values`], with values that are sums of bytes if `BYTES`, else of halves.
#[inline(always)]
fn values_of_code<S: Simd, const BYTES: bool>(
    s: S,
    w: &PanelWeight,
    strip: usize,
    spans: Range<usize>,
    out: &mut [f32],
) {
    match w.exl3().bits {
        2 => values_of::<S, BYTES, 2>(s, w, strip, spans, out),
        3 => values_of::<S, BYTES, 3>(s, w, strip, spans, out),
        4 => values_of::<S, BYTES, 4>(s, w, strip, spans, out),
        5 => values_of::<S, BYTES, 5>(s, w, strip, spans, out),
        6 => values_of::<S, BYTES, 6>(s, w, strip, spans, out),
        7 => values_of::<S, BYTES, 7>(s, w, strip, spans, out),
        _ => values_of::<S, BYTES, 8>(s, w, strip, spans, out),
    }
}

/// As [`values_of_code`], of `K` bits.
#[inline(always)]
fn values_of<S: Simd, const BYTES: bool, const K: usize>(
    s: S,
    w: &PanelWeight,
    strip: usize,
    spans: Range<usize>,
    out: &mut [f32],
) {
    let (packed, words) = (w.exl3(), K * VALUES / 32);
    let size = packed.span_words();
    let code = packed.scheme.code();
    let inputs = spans.len() * SPAN;
    let strip = &w.data[strip * (w.inputs / SPAN) * size..][..w.inputs / SPAN * size];
    for (nth, span) in spans.enumerate() {
        let (data, _) = strip[span * size..][..size].as_chunks::<LANES>();
        for panel in 0..PANELS {
            let (out, _) = out[(panel * inputs + nth * SPAN) * LANES..][..SPAN * LANES]
                .as_chunks_mut::<LANES>();
            // No closures: code in them would be compiled without the instructions.
            for t in 0..4 {
                for pair in 0..4 {
                    // Of one input, the values of outputs `g` and `g + 8`.
                    let mut both = [[0.0; LANES]; 2];
                    for (half, lanes) in both.iter_mut().enumerate() {
                        let end = (8 * t + pair + 4 * half + 1) * K;
                        // The words of the panel, and the one before: a sequence is cyclic.
                        let at = panel * K + (end - 1) / 32;
                        let before = &data[(at + words - 1) % words];
                        // SAFETY: arrays of 16.
                        unsafe {
                            let (before, own) =
                                (s.load_bits(before.as_ptr()), s.load_bits(data[at].as_ptr()));
                            let state = s.state(before, own, end);
                            s.store(lanes.as_mut_ptr(), value::<S, BYTES>(s, code, state));
                        }
                    }
                    let (input, _) = place(8 * t + pair);
                    for p in 0..2 {
                        let to = &mut out[TILE * p + input];
                        for (to, lanes) in to.chunks_exact_mut(PANELS).zip(&both) {
                            to.copy_from_slice(&lanes[PANELS * p..][..PANELS]);
                        }
                    }
                }
            }
        }
    }
}

/// [`Exl3Code::value`] of 16 states.
#[inline(always)]
fn value<S: Simd, const BYTES: bool>(s: S, code: Exl3Code, state: S::I) -> S::F {
    let product = s.mul_i(state, s.splat_i(code.multiplier() as i32));
    if BYTES {
        // Bytes less 128, so that the sum lacks 512.
        let [a, b, c, d] = s.byte_units(product);
        let sum = s.add(s.add(a, b), s.add(c, d));
        let sum = s.add(sum, s.splat(1024.0 + 512.0));
        // Neither the product nor the sum is rounded.
        let (factor, offset) = (BYTES_FACTOR.to_f32(), BYTES_OFFSET.to_f32());
        return s.round_f16(s.fma(sum, s.splat(factor), s.splat(offset)));
    }
    let product = s.add_i(product, s.splat_i(code.addend() as i32));
    let halves = s.mask_and_flip(product, HALVES_MASK as i32, HALVES_FLIPPED as i32);
    let [low, high] = s.f16_units(halves);
    s.round_f16(s.add(low, high))
}

/// Writes row `row` of a packed weight, with the values of [`Exl3Weight::dequantize_row`].
pub(super) fn dequantize_row(w: &PanelWeight, row: usize, out: &mut [f32]) {
    let packed = w.exl3();
    let (code, bits, size) = (packed.scheme.code(), packed.bits, packed.span_words());
    let spans = w.data[row / BLOCK * (w.inputs / SPAN) * size..].chunks_exact(size);
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
    let scale = w.scales[row].to_f32();
    for (v, of_input) in out.iter_mut().zip(&*packed.input_scales.0) {
        *v = *v * of_input.to_f32() * scale;
    }
}
