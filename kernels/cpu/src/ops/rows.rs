//! Operations on single rows, generic over the instruction set.

use crate::simd::{LANES, Simd};
use nq_kernels::reference::{INT8_GREATEST, INT16_BASE, INT16_GREATEST, code_scale};

/// A sum over the bytes of the words, in 16 lanes of 4: reads every byte and does little else.
/// Uses integers, since arbitrary bits as floats may be slow ones.
#[inline(always)]
pub(crate) fn checksum<S: Simd>(s: S, words: &[u32]) -> f32 {
    let (lines, _) = words.as_chunks::<LANES>();
    let (fours, _) = lines.as_chunks::<4>();
    let mut sums = [s.splat_i(0); 4];
    for four in fours {
        for (sum, line) in sums.iter_mut().zip(four) {
            // SAFETY: an array of 16 words.
            let v = unsafe { s.load_bits(line.as_ptr()) };
            *sum = s.dot4_bytes(*sum, v, 0x0101_0101);
        }
    }
    let [a, b, c, d] = sums.map(|sum| s.to_f32(sum));
    s.sum(s.add(s.add(a, b), s.add(c, d)))
}

/// Sum of squares of `x`, in a fixed order.
#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (whole, rest) = x.as_chunks::<LANES>();
    let (fours, ones) = whole.as_chunks::<4>();
    let mut acc = [s.splat(0.0); 4];
    for four in fours {
        for (acc, x) in acc.iter_mut().zip(four) {
            // SAFETY: an array of 16.
            let v = unsafe { s.load(x.as_ptr()) };
            *acc = s.fma(v, v, *acc);
        }
    }
    for x in ones {
        // SAFETY: an array of 16.
        let v = unsafe { s.load(x.as_ptr()) };
        acc[0] = s.fma(v, v, acc[0]);
    }
    let total = s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3]));
    rest.iter().fold(s.sum(total), |a, x| a + x * x)
}

/// The factor of an RMSNorm: `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn rms_scale<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(s, x) / x.len() as f32 + eps).sqrt()
}

/// RMSNorm of one row: `x / sqrt(mean(x^2) + eps) * weight`; all three of one length.
#[inline(always)]
pub(crate) fn rms_norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let n = x.len();
    let (weight, y) = (&weight[..n], &mut y[..n]);
    let scale = rms_scale(s, x, eps);
    let mut i = 0;
    while i + LANES <= n {
        // SAFETY: 16 elements from `i` on are inside all three.
        unsafe {
            let v = s.mul(s.load(x.as_ptr().add(i)), s.splat(scale));
            let v = s.mul(v, s.load(weight.as_ptr().add(i)));
            s.store(y.as_mut_ptr().add(i), v);
        }
        i += LANES;
    }
    for ((y, x), w) in y[i..].iter_mut().zip(&x[i..]).zip(&weight[i..]) {
        *y = x * scale * w;
    }
}

/// Rotary embedding of the first values of one head, pairing `i` with `i + half`, in place. `cos_sin` is
/// `[half]`.
pub(crate) fn rope(head: &mut [f32], cos_sin: &[(f32, f32)]) {
    let (low, high) = head[..2 * cos_sin.len()].split_at_mut(cos_sin.len());
    for ((a, b), &(cos, sin)) in low.iter_mut().zip(high).zip(cos_sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// RMSNorm of one head, then [`rope`], in place.
#[inline(always)]
pub(crate) fn norm_rope<S: Simd>(
    s: S,
    head: &mut [f32],
    weight: &[f32],
    eps: f32,
    cos_sin: &[(f32, f32)],
) {
    let (n, half) = (head.len(), cos_sin.len());
    let scale = rms_scale(s, head, eps);
    let (turned, others) = head.split_at_mut(2 * half);
    let (weight, weight_others) = weight[..n].split_at(2 * half);
    for (x, w) in others.iter_mut().zip(weight_others) {
        *x *= scale * w;
    }
    let (low, high) = turned.split_at_mut(half);
    let (weight_low, weight_high) = weight.split_at(half);
    let pairs = low.iter_mut().zip(high).zip(cos_sin);
    for (((a, b), &(cos, sin)), (wa, wb)) in pairs.zip(weight_low.iter().zip(weight_high)) {
        let (x, y) = (*a * scale * wa, *b * scale * wb);
        *a = x * cos - y * sin;
        *b = y * cos + x * sin;
    }
}

/// `gate = silu(gate) * up`
#[inline(always)]
pub(crate) fn silu_mul<S: Simd>(s: S, gate: &mut [f32], up: &[f32]) {
    let up = &up[..gate.len()];
    let (gates, gate_rest) = gate.as_chunks_mut::<LANES>();
    let (ups, up_rest) = up.as_chunks::<LANES>();
    for (g, u) in gates.iter_mut().zip(ups) {
        // SAFETY: arrays of 16.
        unsafe {
            let y = s.silu_mul(s.load(g.as_ptr()), s.load(u.as_ptr()));
            s.store(g.as_mut_ptr(), y);
        }
    }
    if !gate_rest.is_empty() {
        let (mut g, mut u) = ([0.0; LANES], [0.0; LANES]);
        g[..gate_rest.len()].copy_from_slice(gate_rest);
        u[..up_rest.len()].copy_from_slice(up_rest);
        // SAFETY: arrays of 16.
        unsafe {
            let y = s.silu_mul(s.load(g.as_ptr()), s.load(u.as_ptr()));
            s.store(g.as_mut_ptr(), y);
        }
        gate_rest.copy_from_slice(&g[..gate_rest.len()]);
    }
}

/// The factor that turns a group of values into codes of magnitude up to `most`, and the scale
/// of the codes: NaN if a value is not finite, so that the damage shows.
#[inline(always)]
fn scale_of<S: Simd>(s: S, x: &[f32], most: f32) -> (f32, f32) {
    let (whole, rest) = x.as_chunks::<LANES>();
    let (mut greatest, mut poison) = (s.splat(0.0), s.splat(0.0));
    for x in whole {
        // SAFETY: an array of 16.
        let v = unsafe { s.load(x.as_ptr()) };
        greatest = s.max(greatest, s.abs(v));
        poison = s.fma(v, s.splat(0.0), poison);
    }
    let mut absmax = s.max_lane(greatest);
    let mut poison = s.sum(poison);
    for x in rest {
        absmax = absmax.max(x.abs());
        poison += x * 0.0;
    }
    let (inverse, step) = code_scale(absmax, most);
    (inverse, step + poison)
}

/// Rounds `x` to 8-bit codes with one scale, absmax / 127, per `group` (a multiple of 16;
/// the last may be shorter): `x ~ scale * code`. A group with a value that is not finite
/// gets a NaN scale.
#[inline(always)]
pub(crate) fn quantize<S: Simd>(
    s: S,
    x: &[f32],
    group: usize,
    codes: &mut [i8],
    scales: &mut [f32],
) {
    for ((x, codes), scale) in x
        .chunks(group)
        .zip(codes.chunks_mut(group))
        .zip(scales.iter_mut())
    {
        let inverse;
        (inverse, *scale) = scale_of(s, x, INT8_GREATEST);
        let (whole, rest) = x.as_chunks::<LANES>();
        let (whole_codes, rest_codes) = codes.as_chunks_mut::<LANES>();
        for (x, c) in whole.iter().zip(whole_codes) {
            // SAFETY: arrays of 16.
            unsafe {
                let v = s.round(s.mul(s.load(x.as_ptr()), s.splat(inverse)));
                s.store_i8(c.as_mut_ptr(), v);
            }
        }
        for (x, c) in rest.iter().zip(rest_codes) {
            *c = (x * inverse).round_ties_even() as i8;
        }
    }
}

/// Rounds `x` to codes of two bytes, `high * 255 + low`, both within -127 and 127, with one
/// scale, absmax / 32512, per `group`; otherwise as [`quantize`].
#[inline(always)]
pub(crate) fn quantize_wide<S: Simd>(
    s: S,
    x: &[f32],
    group: usize,
    high: &mut [i8],
    low: &mut [i8],
    scales: &mut [f32],
) {
    // A code is an integer, so no quotient is within 1/510 of the middle between two high
    // bytes: rounding the product with 1/255 finds the nearest.
    let (base, inverse_base) = (s.splat(INT16_BASE), s.splat(1.0 / INT16_BASE));
    for (i, x) in x.chunks(group).enumerate() {
        let (inverse, scale) = scale_of(s, x, INT16_GREATEST);
        scales[i] = scale;
        let range = i * group..i * group + x.len();
        let (high, low) = (&mut high[range.clone()], &mut low[range]);
        let mut place = |at: usize, x: &[f32; LANES], n: usize| {
            let (mut h, mut l) = ([0; LANES], [0; LANES]);
            // SAFETY: arrays of 16.
            unsafe {
                let code = s.mul(s.load(x.as_ptr()), s.splat(inverse));
                // Codes exceed the greatest integer that `round` supports only if they are
                // damaged already, which the scale shows.
                let code = s.round(code);
                let top = s.round(s.mul(code, inverse_base));
                s.store_i8(h.as_mut_ptr(), top);
                s.store_i8(l.as_mut_ptr(), s.sub(code, s.mul(top, base)));
            }
            high[at..at + n].copy_from_slice(&h[..n]);
            low[at..at + n].copy_from_slice(&l[..n]);
        };
        let (whole, rest) = x.as_chunks::<LANES>();
        for (j, x) in whole.iter().enumerate() {
            place(j * LANES, x, LANES);
        }
        if !rest.is_empty() {
            let mut padded = [0.0; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            place(whole.len() * LANES, &padded, rest.len());
        }
    }
}

/// Rounds `x`, of even length, to bf16 (ties to even; NaN stays NaN) and writes the pairs
/// to column `c` of a block of `width` columns: pair `i` goes to place `i * width + c`.
#[inline(always)]
pub(crate) fn pair_bf16<S: Simd>(_: S, x: &[f32], to: &mut [u32], c: usize, width: usize) {
    let round = |x: f32| {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let nan = bits & 0x7fff_ffff > 0x7f80_0000;
        if nan { (bits >> 16) | 0x40 } else { rounded }
    };
    let (pairs, _) = x.as_chunks::<2>();
    for (to, [a, b]) in to[c..].iter_mut().step_by(width).zip(pairs) {
        *to = round(*a) | round(*b) << 16;
    }
}

/// Sums of the codes over each run of `share`.
#[inline(always)]
pub(crate) fn total<S: Simd>(_: S, codes: &[i8], share: usize, totals: &mut [i32]) {
    for (codes, total) in codes.chunks_exact(share).zip(totals) {
        *total = codes.iter().map(|&c| i32::from(c)).sum();
    }
}

/// Writes a row's codes to column `c` of a block of `width` columns: quad `i` goes to
/// place `i * width + c`. For weights in nibbles, the even ones of each 8 codes come first, as the
/// low nibbles of a unit are its even inputs.
#[inline(always)]
pub(crate) fn interleave<S: Simd>(
    _: S,
    codes: &[i8],
    nibbles: bool,
    to: &mut [i8],
    c: usize,
    width: usize,
) {
    let (quads, _) = codes.as_chunks::<4>();
    let (to, _) = to.as_chunks_mut::<4>();
    let to = &mut to[c..];
    if !nibbles {
        if width == 1 {
            to[..quads.len()].copy_from_slice(quads);
        } else {
            for (to, &quad) in to.iter_mut().step_by(width).zip(quads) {
                *to = quad;
            }
        }
        return;
    }
    let (pairs, _) = quads.as_chunks::<2>();
    let split = |&[a, b]: &[[i8; 4]; 2]| [[a[0], a[2], b[0], b[2]], [a[1], a[3], b[1], b[3]]];
    if width == 1 {
        // Moves whole pairs: a shuffle of bytes.
        let (to, _) = to.as_chunks_mut::<2>();
        for (to, pair) in to.iter_mut().zip(pairs) {
            *to = split(pair);
        }
    } else {
        for (i, pair) in pairs.iter().enumerate() {
            let [even, odd] = split(pair);
            to[2 * i * width] = even;
            to[(2 * i + 1) * width] = odd;
        }
    }
}

/// As [`interleave`], for codes in one piece of 16 bits, `high` or `255 high + low`: of quad `i`, the first and third
/// code go to place `2 i * width + c`, the others to place `(2 i + 1) * width + c`.
#[inline(always)]
pub(crate) fn interleave_pairs<S: Simd>(
    _: S,
    high: &[i8],
    low: Option<&[i8]>,
    nibbles: bool,
    to: &mut [i8],
    c: usize,
    width: usize,
) {
    let (to, _) = to.as_chunks_mut::<4>();
    // Inputs of a quad are two apart in nibbles.
    let order = match nibbles {
        false => [[0, 2], [1, 3], [4, 6], [5, 7]],
        true => [[0, 4], [2, 6], [1, 5], [3, 7]],
    };
    let (highs, _) = high.as_chunks::<8>();
    let lows = low.map(|low| low.as_chunks::<8>().0);
    for (i, high) in highs.iter().enumerate() {
        let mut codes = high.map(i16::from);
        if let Some(lows) = lows {
            for (code, low) in codes.iter_mut().zip(lows[i]) {
                *code = *code * INT16_BASE as i16 + i16::from(low);
            }
        }
        let to = to[4 * i * width + c..].iter_mut().step_by(width);
        for (to, [a, b]) in to.zip(order) {
            let [a, b] = [codes[a].to_le_bytes(), codes[b].to_le_bytes()];
            *to = [a[0] as i8, a[1] as i8, b[0] as i8, b[1] as i8];
        }
    }
}
