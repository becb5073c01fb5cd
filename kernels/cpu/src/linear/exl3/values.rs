//! The values of packed weights in EXL3's codes, generic over the instruction set.

use super::pack::SPAN;
use crate::linear::pack::PanelWeight;
use crate::linear::trellis::pack::PANELS;
use crate::simd::{LANES, Simd};
use nq_formats::Exl3Code;
use nq_formats::exl3::{
    BYTES_FACTOR, BYTES_OFFSET, HALVES_FLIPPED, HALVES_MASK, TILE, VALUES, place,
};
use std::ops::Range;

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
