//! Softmax attention over keys and values as they are stored (f32, f16 or int8).
//!
//! Both kernels keep a running maximum and sum (online softmax, arXiv 2205.14135), so that
//! no full row of scores is ever stored. [`prefill`] puts 16 queries in the lanes and walks the
//! cache in blocks that all queries of a tile share. [`decode`] has only the few heads of
//! one token that share a key head: it reads every key and value once, with 16 positions in the lanes for scores
//! and 16 of the head's dimensions for outputs.
//!
//! A row has the same bits from both, whatever rows are computed with it, as all sums have one order. A score adds its
//! products dimension by dimension. Positions are taken in chunks of [`CHUNK`], each begun anew, and in a
//! chunk in blocks of [`BLOCK`], after each of which what came before is rescaled ([`Softmax::fade`]). The sum of a block's weights
//! is that of four sums of every fourth weight; an output adds position by position. Chunks are merged in their order ([`Softmax::merge`]).

mod lines;
mod prefill;

use crate::kv::KvView;
use crate::simd::{LANES, Simd};
use lines::{Lines, Pages, with_pages};
use nq_kernels::pages::PAGE;
pub(crate) use prefill::{prefill, prefill_scratch};

/// Positions covered by one task of [`decode`]. The split over the cache's length is fixed,
/// so that the order of sums does not depend on the number of threads.
pub(crate) const CHUNK: usize = 256;

/// Positions after which the softmax is rescaled.
const BLOCK: usize = 64;

/// Blocks of a chunk.
const BLOCKS: usize = CHUNK / BLOCK;

// A chunk is whole pages, and a block is inside one page and whole vectors.
const _: () = assert!(CHUNK.is_multiple_of(PAGE) && PAGE.is_multiple_of(BLOCK));
const _: () = assert!(BLOCK.is_multiple_of(LANES));

/// Floats from one row of a block to the next; longer heads are cut into parts of this length.
const PITCH: usize = 128;

/// Added to the scores of positions that a query must not see, and the maximum before any score; finite, because
/// infinities could cancel to NaN.
const MASKED: f32 = -1e30;

/// Softmax of some positions in progress: outputs are relative to `exp(max)`, and before the division by `sum`.
#[derive(Clone, Copy)]
struct Softmax<F> {
    max: F,
    sum: F,
}

impl<F: Copy> Softmax<F> {
    /// Of no positions.
    #[inline(always)]
    fn new<S: Simd<F = F>>(s: S) -> Self {
        Softmax {
            max: s.splat(MASKED),
            sum: s.splat(0.0),
        }
    }

    /// Goes over to the maximum `top` of a further block: returns the factor of what came before.
    #[inline(always)]
    fn fade<S: Simd<F = F>>(&mut self, s: S, top: F) -> F {
        let fade = s.exp(s.sub(self.max, top));
        self.max = top;
        self.sum = s.mul(self.sum, fade);
        fade
    }

    /// Merges a further chunk: returns the factors of the outputs before and of those of the chunk.
    #[inline(always)]
    fn merge<S: Simd<F = F>>(&mut self, s: S, chunk: Self) -> [F; 2] {
        let fade = self.fade(s, s.max(self.max, chunk.max));
        let share = s.exp(s.sub(chunk.max, self.max));
        self.sum = s.add(self.sum, s.mul(chunk.sum, share));
        [fade, share]
    }
}

/// An output of several chunks, after a merge with factors `by`.
#[inline(always)]
fn merged<S: Simd>(s: S, before: S::F, chunk: S::F, [fade, share]: [S::F; 2]) -> S::F {
    s.fma(chunk, share, s.mul(before, fade))
}

/// The weight of a score. The maximum and the exponential lose a NaN; zero times it does not.
#[inline(always)]
fn soften<S: Simd>(s: S, score: S::F, max: S::F) -> S::F {
    s.fma(score, s.splat(0.0), s.exp(s.sub(score, max)))
}

/// An output of unit scale. Adding zero makes a negative zero, which one more merge would turn, positive.
#[inline(always)]
fn finish<S: Simd>(s: S, output: S::F, inverse: S::F) -> S::F {
    s.add(s.mul(output, inverse), s.splat(0.0))
}

/// Result for a query before the division by `sum`: `out` is relative to `exp(max)`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Partial {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

/// Attention of one token's query heads that share a key head, over positions `from .. to`, a chunk of [`CHUNK`] or less
/// of the last one. `q` is `[heads, d]`, `out` `[heads, d]` unnormalized, `scores` scratch
/// `[4, CHUNK]`; `d` is a multiple of 16.
///
/// # Safety
/// `from` is a multiple of [`CHUNK`], `to` is within the views' positions and the slices have these lengths.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
pub(crate) unsafe fn decode<S: Simd>(
    s: S,
    keys: KvView<'_>,
    values: KvView<'_>,
    from: usize,
    to: usize,
    q: &[f32],
    scale: f32,
    scores: &mut [f32],
    out: &mut [f32],
    partials: &mut [Partial],
) {
    let d = keys.head_dim;
    let heads = partials.len();
    let mut h = 0;
    while h < heads {
        let n = (heads - h).min(4);
        let (q, out) = (&q[h * d..], &mut out[h * d..]);
        let partials = &mut partials[h..];
        macro_rules! columns {
            ($c:literal x $w:literal) => {
                // SAFETY: by this function's contract.
                unsafe {
                    with_pages!(keys, |pages| decode_scores::<S, _, $c, $w>(
                        s, pages, d, from, to, q, scale, scores
                    ));
                    let mut fades = [[s.splat(0.0); BLOCKS]; $c];
                    for c in 0..$c {
                        let scores = &mut scores[c * CHUNK..(c + 1) * CHUNK];
                        partials[c] = soften_chunk(s, scores, to - from, &mut fades[c]);
                    }
                    with_pages!(values, |pages| decode_values::<S, _, $c>(
                        s, pages, d, from, to, scores, &fades, out
                    ));
                }
            };
        }
        match n {
            1 => columns!(1 x 4),
            2 => columns!(2 x 2),
            3 => columns!(3 x 1),
            _ => columns!(4 x 1),
        }
        h += n;
    }
}

/// Scores of `C` heads, `[C, CHUNK]`, up to the next multiple of 16 behind `to`; `W` panels of keys at a time.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
unsafe fn decode_scores<S: Simd, K: Pages, const C: usize, const W: usize>(
    s: S,
    pages: K,
    d: usize,
    from: usize,
    to: usize,
    q: &[f32],
    scale: f32,
    scores: &mut [f32],
) {
    debug_assert!(q.len() >= C * d && scores.len() >= C * CHUNK);
    let mut at = from;
    while at < to {
        // SAFETY: the caller keeps the positions within the views; panels do not cross pages, as pages are whole multiples of
        // `W` panels.
        unsafe {
            let keys = pages.page(at / PAGE, LANES);
            if at + (W - 1) * LANES < to {
                score_panels::<S, _, C, W>(s, keys, d, at, q, scale, &mut scores[at - from..]);
                at += W * LANES;
            } else {
                score_panels::<S, _, C, 1>(s, keys, d, at, q, scale, &mut scores[at - from..]);
                at += LANES;
            }
        }
    }
}

/// Scores of `W` panels of keys from position `at` on.
#[inline(always)]
unsafe fn score_panels<S: Simd, K: Lines, const C: usize, const W: usize>(
    s: S,
    keys: K,
    d: usize,
    at: usize,
    q: &[f32],
    scale: f32,
    scores: &mut [f32],
) {
    let first = at % PAGE;
    // SAFETY: panels are inside the page, `c * d + i` inside q, and scores are as many as positions.
    unsafe {
        let mut acc = [[s.splat(0.0); W]; C];
        for i in 0..d {
            let mut k = [s.splat(0.0); W];
            for (w, k) in k.iter_mut().enumerate() {
                *k = keys.load(s, (first / LANES + w) * d + i, 0);
            }
            for (c, acc) in acc.iter_mut().enumerate() {
                let q = s.splat(*q.get_unchecked(c * d + i));
                for (acc, k) in acc.iter_mut().zip(k) {
                    *acc = s.fma(k, q, *acc);
                }
            }
        }
        for w in 0..W {
            let scale = s.mul(s.splat(scale), keys.scales(s, first + w * LANES));
            for (c, acc) in acc.iter().enumerate() {
                let to = scores.as_mut_ptr().add(c * CHUNK + w * LANES);
                s.store(to, s.mul(acc[w], scale));
            }
        }
    }
}

/// Replaces the `n` scores of a chunk by their weights relative to the greatest up to the end of their block, and gives the
/// factor of what came before each block.
#[inline(always)]
fn soften_chunk<S: Simd>(
    s: S,
    scores: &mut [f32],
    n: usize,
    fades: &mut [S::F; BLOCKS],
) -> Partial {
    let blocks = n.div_ceil(BLOCK);
    scores[n..blocks * BLOCK].fill(MASKED);
    let mut softmax = Softmax::new(s);
    for (i, block) in scores[..blocks * BLOCK].chunks_exact_mut(BLOCK).enumerate() {
        let (vectors, _) = block.as_chunks_mut::<LANES>();
        let mut greatest = softmax.max;
        for v in &*vectors {
            // SAFETY: an array of 16.
            greatest = s.max(greatest, unsafe { s.load(v.as_ptr()) });
        }
        fades[i] = softmax.fade(s, s.splat(s.max_lane(greatest)));
        for v in vectors {
            // SAFETY: an array of 16.
            unsafe {
                let weight = soften(s, s.load(v.as_ptr()), softmax.max);
                s.store(v.as_mut_ptr(), weight);
            }
        }
        block[(n - i * BLOCK).min(BLOCK)..].fill(0.0);
        let mut fourths = [0f32; 4];
        for weights in block.as_chunks::<4>().0 {
            for (sum, weight) in fourths.iter_mut().zip(weights) {
                *sum += weight;
            }
        }
        let [a, b, c, d] = fourths;
        softmax.sum = s.add(softmax.sum, s.splat((a + b) + (c + d)));
    }
    let (mut max, mut sum) = ([0.0; LANES], [0.0; LANES]);
    // SAFETY: arrays of 16.
    unsafe {
        s.store(max.as_mut_ptr(), softmax.max);
        s.store(sum.as_mut_ptr(), softmax.sum);
    }
    Partial {
        max: max[0],
        sum: sum[0],
    }
}

/// `out = weights * values` for `C` heads; the weights are `[C, CHUNK]`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
unsafe fn decode_values<S: Simd, V: Pages, const C: usize>(
    s: S,
    pages: V,
    d: usize,
    from: usize,
    to: usize,
    weights: &[f32],
    fades: &[[S::F; BLOCKS]; C],
    out: &mut [f32],
) {
    debug_assert!(out.len() >= C * d && weights.len() >= C * CHUNK);
    const WIDE: usize = 4;
    let mut i = 0;
    while i < d {
        // SAFETY: rows, dimensions and weights as in `decode_scores`.
        unsafe {
            if i + WIDE * LANES <= d {
                weigh::<S, V, C, WIDE>(s, pages, d, i, from, to, weights, fades, out);
                i += WIDE * LANES;
            } else {
                weigh::<S, V, C, 1>(s, pages, d, i, from, to, weights, fades, out);
                i += LANES;
            }
        }
    }
}

/// Dimensions `i .. i + 16 W` of [`decode_values`].
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
unsafe fn weigh<S: Simd, V: Pages, const C: usize, const W: usize>(
    s: S,
    pages: V,
    d: usize,
    i: usize,
    from: usize,
    to: usize,
    weights: &[f32],
    fades: &[[S::F; BLOCKS]; C],
    out: &mut [f32],
) {
    // SAFETY: by the caller's contract.
    unsafe {
        let mut acc = [[s.splat(0.0); W]; C];
        for block in 0..(to - from).div_ceil(BLOCK) {
            for (acc, fades) in acc.iter_mut().zip(fades) {
                for acc in acc {
                    *acc = s.mul(*acc, fades[block]);
                }
            }
            let first = from + block * BLOCK;
            let values = pages.page(first / PAGE, d);
            for at in first..(first + BLOCK).min(to) {
                let row = at % PAGE;
                let scale = values.scale(row);
                let mut v = [s.splat(0.0); W];
                for (j, v) in v.iter_mut().enumerate() {
                    *v = values.load(s, row, i + j * LANES);
                }
                for (c, acc) in acc.iter_mut().enumerate() {
                    let weight = weights.get_unchecked(c * CHUNK + at - from);
                    let weight = s.splat(scale * weight);
                    for (acc, v) in acc.iter_mut().zip(v) {
                        *acc = s.fma(v, weight, *acc);
                    }
                }
            }
        }
        for (c, acc) in acc.iter().enumerate() {
            for (j, &acc) in acc.iter().enumerate() {
                s.store(out.as_mut_ptr().add(c * d + i + j * LANES), acc);
            }
        }
    }
}

/// Merges the partial results of consecutive chunks of one query into `y` `[d]`; `d` is a multiple of 16.
#[inline(always)]
pub(crate) fn merge<S: Simd>(s: S, partials: &[Partial], outs: &[f32], y: &mut [f32]) {
    let d = y.len();
    let mut all = Softmax::new(s);
    y.fill(0.0);
    let (ys, _) = y.as_chunks_mut::<LANES>();
    for (p, out) in partials.iter().zip(outs.chunks_exact(d)) {
        let by = all.merge(
            s,
            Softmax {
                max: s.splat(p.max),
                sum: s.splat(p.sum),
            },
        );
        for (y, o) in ys.iter_mut().zip(out.as_chunks::<LANES>().0) {
            // SAFETY: arrays of 16.
            unsafe {
                let v = merged(s, s.load(y.as_ptr()), s.load(o.as_ptr()), by);
                s.store(y.as_mut_ptr(), v);
            }
        }
    }
    let inverse = s.div(s.splat(1.0), all.sum);
    for y in ys {
        // SAFETY: an array of 16.
        unsafe { s.store(y.as_mut_ptr(), finish(s, s.load(y.as_ptr()), inverse)) };
    }
}
