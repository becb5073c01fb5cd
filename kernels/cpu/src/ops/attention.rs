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

use crate::kv::{KvData, KvView};
use crate::linear::float::tile;
use crate::simd::{LANES, Simd};
use half::f16;
use nq_kernels::pages::PAGE;

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

/// Access to the vectors of one head in a page, as they are stored: lines of a stride, which are dimensions of 16
/// keys, or values.
trait Lines: Copy {
    /// True if vectors have factors.
    const SCALED: bool;
    /// 16 stored values of line `line` from `i` on.
    unsafe fn load<S: Simd>(self, s: S, line: usize, i: usize) -> S::F;
    /// One of them.
    unsafe fn value(self, line: usize, i: usize) -> f32;
    /// The factor of the vector of position `at`.
    unsafe fn scale(self, at: usize) -> f32;
    /// Those of 16 positions.
    unsafe fn scales<S: Simd>(self, s: S, at: usize) -> S::F;
}

#[derive(Clone, Copy)]
struct F32Lines(*const f32, usize);
#[derive(Clone, Copy)]
struct F16Lines(*const f16, usize);
#[derive(Clone, Copy)]
struct Int8Lines(*const i8, *const f16, usize);

/// [`Lines`] of values without factors.
macro_rules! plain_lines {
    ($name:ident, $load:ident, $value:expr) => {
        impl Lines for $name {
            const SCALED: bool = false;
            #[inline(always)]
            unsafe fn load<S: Simd>(self, s: S, line: usize, i: usize) -> S::F {
                // SAFETY: the caller keeps the line and `i .. i + 16` inside the page.
                unsafe { s.$load(self.0.add(line * self.1 + i)) }
            }
            #[inline(always)]
            unsafe fn value(self, line: usize, i: usize) -> f32 {
                // SAFETY: as above.
                $value(unsafe { *self.0.add(line * self.1 + i) })
            }
            #[inline(always)]
            unsafe fn scale(self, _: usize) -> f32 {
                1.0
            }
            #[inline(always)]
            unsafe fn scales<S: Simd>(self, s: S, _: usize) -> S::F {
                s.splat(1.0)
            }
        }
    };
}
plain_lines!(F32Lines, load, f32::from);
plain_lines!(F16Lines, load_f16, f16::to_f32);

impl Lines for Int8Lines {
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, line: usize, i: usize) -> S::F {
        // SAFETY: the caller keeps the line and `i .. i + 16` inside the page.
        unsafe { s.load_i8(self.0.add(line * self.2 + i)) }
    }
    #[inline(always)]
    unsafe fn value(self, line: usize, i: usize) -> f32 {
        // SAFETY: as above.
        f32::from(unsafe { *self.0.add(line * self.2 + i) })
    }
    #[inline(always)]
    unsafe fn scale(self, at: usize) -> f32 {
        // SAFETY: as above, of the position.
        unsafe { *self.1.add(at) }.to_f32()
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(self, s: S, at: usize) -> S::F {
        // SAFETY: as above, of 16 positions.
        unsafe { s.load_f16(self.1.add(at)) }
    }
}

/// The pages of one head; page `i` of the sequence as [`Lines`] of `stride` values.
trait Pages: Copy {
    type Lines: Lines;
    unsafe fn page(self, i: usize, stride: usize) -> Self::Lines;
}

#[derive(Clone, Copy)]
struct F32Pages<'a>(KvView<'a>, &'a [f32]);
#[derive(Clone, Copy)]
struct F16Pages<'a>(KvView<'a>, &'a [f16]);
#[derive(Clone, Copy)]
struct Int8Pages<'a>(KvView<'a>, &'a [i8], &'a [f16]);

impl Pages for F32Pages<'_> {
    type Lines = F32Lines;
    #[inline(always)]
    unsafe fn page(self, i: usize, stride: usize) -> F32Lines {
        let at = self.0.page_row(i) * self.0.head_dim;
        // SAFETY: a sequence's pages lie in the pool.
        F32Lines(unsafe { self.1.as_ptr().add(at) }, stride)
    }
}

impl Pages for F16Pages<'_> {
    type Lines = F16Lines;
    #[inline(always)]
    unsafe fn page(self, i: usize, stride: usize) -> F16Lines {
        let at = self.0.page_row(i) * self.0.head_dim;
        // SAFETY: a sequence's pages lie in the pool.
        F16Lines(unsafe { self.1.as_ptr().add(at) }, stride)
    }
}

impl Pages for Int8Pages<'_> {
    type Lines = Int8Lines;
    #[inline(always)]
    unsafe fn page(self, i: usize, stride: usize) -> Int8Lines {
        let row = self.0.page_row(i);
        // SAFETY: a sequence's pages lie in the pool.
        unsafe {
            let codes = self.1.as_ptr().add(row * self.0.head_dim);
            Int8Lines(codes, self.2.as_ptr().add(row), stride)
        }
    }
}

/// Calls `$body` with the view's [`Pages`].
macro_rules! with_pages {
    ($view:expr, |$pages:ident| $body:expr) => {
        match $view.data {
            KvData::F32(d) => {
                let $pages = F32Pages($view, d);
                $body
            }
            KvData::F16(d) => {
                let $pages = F16Pages($view, d);
                $body
            }
            KvData::Int8 { codes, scales } => {
                let $pages = Int8Pages($view, codes, scales);
                $body
            }
        }
    };
}

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

/// Scratch of one [`prefill`] tile: floats needed for `P` panels of queries.
pub(crate) const fn prefill_scratch(panels: usize, head_dim: usize) -> usize {
    let parts = head_dim.div_ceil(PITCH);
    let lanes = panels * LANES;
    // Queries, outputs of a chunk and of all, scores, a block of keys or values.
    3 * parts * PITCH * lanes + BLOCK * lanes + parts * BLOCK * PITCH
}

/// Attention of up to `16 P` queries that share a key head. Query `j` is `q(j)`, `[d]`, and sees the
/// first `limits[j]` positions (at least one); its output goes to `y(j)`.
///
/// # Safety
/// The limits lie within the views; `q` and `y` yield pointers valid for `d` floats, the
/// latter for writing; `scratch` is [`prefill_scratch`] long.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
pub(crate) unsafe fn prefill<S: Simd, const P: usize, const C: usize>(
    s: S,
    keys: KvView<'_>,
    values: KvView<'_>,
    q: &[*const f32],
    limits: &[usize],
    scale: f32,
    y: &[*mut f32],
    scratch: &mut [f32],
) {
    let d = keys.head_dim;
    let parts = d.div_ceil(PITCH);
    let lanes = P * LANES;
    let (queries, rest) = scratch.split_at_mut(parts * PITCH * lanes);
    let (outputs, rest) = rest.split_at_mut(parts * PITCH * lanes);
    let (all_outputs, rest) = rest.split_at_mut(parts * PITCH * lanes);
    let (scores, block) = rest.split_at_mut(BLOCK * lanes);
    let block = &mut block[..parts * BLOCK * PITCH];

    // Queries `[P][dimension][16]`.
    queries.fill(0.0);
    for (j, &q) in q.iter().enumerate() {
        let to = &mut queries[j / LANES * parts * PITCH * LANES + j % LANES..];
        for i in 0..d {
            // SAFETY: `q` is valid for d floats.
            to[i * LANES] = unsafe { *q.add(i) };
        }
    }
    all_outputs.fill(0.0);
    let mut limit = [[0f32; LANES]; P];
    for (j, &l) in limits.iter().enumerate() {
        limit[j / LANES][j % LANES] = l as f32;
    }
    let end = limits.iter().copied().max().unwrap_or(0);
    let all_see = limits.iter().copied().min().unwrap_or(0);
    // SAFETY: arrays of 16; blocks stay below `end`; strides are those of the scratch parts.
    unsafe {
        let mut all = [Softmax::new(s); P];
        for chunk in (0..end).step_by(CHUNK) {
            outputs.fill(0.0);
            let mut softmax = [Softmax::new(s); P];
            for from in (chunk..(chunk + CHUNK).min(end)).step_by(BLOCK) {
                let n = BLOCK.min(end - from);
                with_pages!(keys, |pages| unpack_keys(s, pages, d, from, n, block));
                for p in (0..n).step_by(C) {
                    tile::<S, P, C, LANES, 1>(
                        s,
                        d,
                        queries.as_ptr(),
                        parts * PITCH * LANES,
                        block.as_ptr().add(p / LANES * d * LANES + p % LANES),
                        scores.as_mut_ptr().add(p * LANES),
                        BLOCK * LANES,
                        LANES,
                        false,
                    );
                }
                for p in 0..P {
                    // Not if all queries of the tile see all of the block.
                    let limit = (from + n > all_see).then_some(&limit[p]);
                    let scores = scores.as_mut_ptr().add(p * BLOCK * LANES);
                    let outputs = outputs.as_mut_ptr().add(p * parts * PITCH * LANES);
                    let top = softmax[p].max;
                    let top = with_pages!(keys, |pages| scaled::<S, _>(
                        s, pages, scores, from, n, scale, limit, top
                    ));
                    fold(s, scores, from, n, limit, outputs, d, top, &mut softmax[p]);
                    with_pages!(values, |pages| weighed::<S, _>(s, pages, scores, from, n));
                }
                with_pages!(values, |pages| unpack(s, pages, d, from, n, block));
                for part in 0..parts {
                    let width = PITCH.min(d - part * PITCH);
                    for i in (0..width).step_by(C) {
                        tile::<S, P, C, PITCH, 1>(
                            s,
                            n,
                            scores.as_ptr(),
                            BLOCK * LANES,
                            block.as_ptr().add(part * BLOCK * PITCH + i),
                            outputs.as_mut_ptr().add((part * PITCH + i) * LANES),
                            parts * PITCH * LANES,
                            LANES,
                            true,
                        );
                    }
                }
            }
            for p in 0..P {
                let by = all[p].merge(s, softmax[p]);
                for i in 0..d {
                    let at = (p * parts * PITCH + i) * LANES;
                    let to = all_outputs.as_mut_ptr().add(at);
                    s.store(
                        to,
                        merged(s, s.load(to), s.load(outputs.as_ptr().add(at)), by),
                    );
                }
            }
        }
        for (p, softmax) in all.iter().enumerate() {
            let inverse = s.div(s.splat(1.0), softmax.sum);
            for i in 0..d {
                let at = all_outputs
                    .as_mut_ptr()
                    .add((p * parts * PITCH + i) * LANES);
                s.store(at, finish(s, s.load(at), inverse));
            }
        }
        for (j, &y) in y.iter().enumerate() {
            let from = &all_outputs[j / LANES * parts * PITCH * LANES + j % LANES..];
            for i in 0..d {
                *y.add(i) = from[i * LANES];
            }
        }
    }
}

/// 1 for queries that do not see position `at`, because their limit is at or before it, and 0 for the others.
#[inline(always)]
fn unseen<S: Simd>(s: S, at: usize, limit: &[f32; LANES]) -> S::F {
    // SAFETY: an array of 16.
    let limit = unsafe { s.load(limit.as_ptr()) };
    let past = s.sub(s.splat((at + 1) as f32), limit);
    // The lesser of it and 1.
    let past = s.max(past, s.splat(0.0));
    s.neg(s.max(s.neg(past), s.splat(-1.0)))
}

/// Scales the products of `n` keys from position `from` on with queries, `[position][16]`, and makes those of positions
/// that a query does not see, by `limit`, negligible. Returns the greatest of them and `top`.
///
/// # Safety
/// `scores` is valid for 16 floats per position; the positions are in the pages, all in one.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
unsafe fn scaled<S: Simd, K: Pages>(
    s: S,
    pages: K,
    scores: *mut f32,
    from: usize,
    n: usize,
    scale: f32,
    limit: Option<&[f32; LANES]>,
    top: S::F,
) -> S::F {
    let mut top = top;
    // SAFETY: by contract.
    unsafe {
        let keys = pages.page(from / PAGE, LANES);
        for i in 0..n {
            let at = scores.add(i * LANES);
            let scale = s.splat(scale * keys.scale(from % PAGE + i));
            let mut score = s.mul(s.load(at), scale);
            if let Some(limit) = limit {
                let bias = s.mul(unseen(s, from + i, limit), s.splat(2.0 * MASKED));
                score = s.add(score, bias);
            }
            s.store(at, score);
            top = s.max(top, score);
        }
    }
    top
}

/// Adds `n` positions' scores `[position][16]`, the greatest of which is `top`, to an online softmax: scores become
/// weights, zero for positions that a query does not see, and `outputs` `[d][16]` are rescaled to the new maximum.
///
/// # Safety
/// `scores` is valid for 16 floats per position, `outputs` for 16 per dimension.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
unsafe fn fold<S: Simd>(
    s: S,
    scores: *mut f32,
    from: usize,
    n: usize,
    limit: Option<&[f32; LANES]>,
    outputs: *mut f32,
    d: usize,
    top: S::F,
    softmax: &mut Softmax<S::F>,
) {
    // SAFETY: by contract.
    unsafe {
        let fade = softmax.fade(s, top);
        let mut fourths = [s.splat(0.0); 4];
        for i in 0..n {
            let at = scores.add(i * LANES);
            let mut weight = soften(s, s.load(at), top);
            if let Some(limit) = limit {
                let seen = s.sub(s.splat(1.0), unseen(s, from + i, limit));
                weight = s.mul(weight, seen);
            }
            s.store(at, weight);
            fourths[i % 4] = s.add(fourths[i % 4], weight);
        }
        let [a, b, c, e] = fourths;
        softmax.sum = s.add(softmax.sum, s.add(s.add(a, b), s.add(c, e)));
        for i in 0..d {
            let at = outputs.add(i * LANES);
            s.store(at, s.mul(s.load(at), fade));
        }
    }
}

/// Multiplies `n` weights `[position][16]` from position `from` on by the factors of their values.
///
/// # Safety
/// `weights` is valid for 16 floats per position; the positions are in the pages, all in one.
#[inline(always)]
unsafe fn weighed<S: Simd, V: Pages>(s: S, pages: V, weights: *mut f32, from: usize, n: usize) {
    if !V::Lines::SCALED {
        return;
    }
    // SAFETY: by contract.
    unsafe {
        let values = pages.page(from / PAGE, LANES);
        for i in 0..n {
            let at = weights.add(i * LANES);
            let scale = s.splat(values.scale(from % PAGE + i));
            s.store(at, s.mul(s.load(at), scale));
        }
    }
}

/// The panels of `n` keys from position `from` on as floats, `[panel][d][16]`. What lies behind the keys in the last panel
/// may be anything: it affects only its own scores, which are not read.
///
/// # Safety
/// `from` is the first position of a panel, and the keys are in one page.
#[inline(always)]
unsafe fn unpack_keys<S: Simd, K: Pages>(
    s: S,
    pages: K,
    d: usize,
    from: usize,
    n: usize,
    block: &mut [f32],
) {
    // SAFETY: by contract; a block has room for the panels of `BLOCK` keys.
    unsafe {
        let keys = pages.page(from / PAGE, LANES);
        let first = from % PAGE / LANES * d;
        for line in 0..n.div_ceil(LANES) * d {
            let v = keys.load(s, first + line, 0);
            s.store(block.as_mut_ptr().add(line * LANES), v);
        }
    }
}

/// Values `from .. from + n`, without their factors, as floats `[part][BLOCK][PITCH]`. Up to 15 dimensions past `d`
/// may hold anything: they affect only their own outputs, which are not read.
///
/// # Safety
/// The rows are inside the view and in one page.
#[inline(always)]
unsafe fn unpack<S: Simd, V: Pages>(
    s: S,
    pages: V,
    d: usize,
    from: usize,
    n: usize,
    block: &mut [f32],
) {
    // SAFETY: by contract.
    let rows = unsafe { pages.page(from / PAGE, d) };
    for row in 0..n {
        let at = from % PAGE + row;
        // SAFETY: by contract; `to` stays inside the block.
        unsafe {
            let mut i = 0;
            while i + LANES <= d {
                let to = (i / PITCH * BLOCK + row) * PITCH + i % PITCH;
                s.store(block.as_mut_ptr().add(to), rows.load(s, at, i));
                i += LANES;
            }
            while i < d {
                let to = (i / PITCH * BLOCK + row) * PITCH + i % PITCH;
                block[to] = rows.value(at, i);
                i += 1;
            }
        }
    }
}
