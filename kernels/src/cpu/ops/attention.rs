//! Softmax attention over keys and values as they are stored (f32, f16 or int8).
//!
//! Both kernels keep a running maximum and sum (online softmax, arXiv 2205.14135), so that
//! no full row of scores is ever stored. [`prefill`] puts 16 queries in the lanes and walks the
//! cache in blocks that all queries of a tile share. [`decode`] has only the few heads of
//! one token that share a key head: it puts the head's dimensions in the lanes and reads
//! every key and value once.

use crate::cpu::kv::{KvData, KvView};
use crate::cpu::linear::float::tile;
use crate::cpu::simd::{LANES, Simd};
use crate::pages::PAGE;
use half::f16;
use std::ops::Range;

/// Positions covered by one task of [`decode`]. The split over the cache's length is fixed,
/// so that the order of sums does not depend on the number of threads.
pub(crate) const CHUNK: usize = 256;

/// Positions in a block of [`prefill`].
const BLOCK: usize = 64;

// A block is inside one page.
const _: () = assert!(PAGE.is_multiple_of(BLOCK));

/// Floats from one row of a block to the next; longer heads are cut into parts of this length.
const PITCH: usize = 128;

/// Added to the scores of positions that a query must not see; finite, because infinities
/// could cancel to NaN.
const MASKED: f32 = -1e30;

/// Access to the rows of one head in a page.
trait Rows: Copy {
    /// 16 values of row `row` from dimension `i` on, before scaling.
    unsafe fn load<S: Simd>(self, s: S, row: usize, i: usize) -> S::F;
    /// One value.
    unsafe fn value(self, row: usize, i: usize) -> f32;
    /// The factor of the row's values.
    unsafe fn scale(self, row: usize) -> f32;
}

#[derive(Clone, Copy)]
struct F32Rows(*const f32, usize);
#[derive(Clone, Copy)]
struct F16Rows(*const f16, usize);
#[derive(Clone, Copy)]
struct Int8Rows(*const i8, *const f16, usize);

impl Rows for F32Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, row: usize, i: usize) -> S::F {
        // SAFETY: the caller keeps `row` and `i .. i + 16` inside the page.
        unsafe { s.load(self.0.add(row * self.1 + i)) }
    }
    #[inline(always)]
    unsafe fn value(self, row: usize, i: usize) -> f32 {
        // SAFETY: as above.
        unsafe { *self.0.add(row * self.1 + i) }
    }
    #[inline(always)]
    unsafe fn scale(self, _: usize) -> f32 {
        1.0
    }
}

impl Rows for F16Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, row: usize, i: usize) -> S::F {
        // SAFETY: the caller keeps `row` and `i .. i + 16` inside the page.
        unsafe { s.load_f16(self.0.add(row * self.1 + i)) }
    }
    #[inline(always)]
    unsafe fn value(self, row: usize, i: usize) -> f32 {
        // SAFETY: as above.
        unsafe { *self.0.add(row * self.1 + i) }.to_f32()
    }
    #[inline(always)]
    unsafe fn scale(self, _: usize) -> f32 {
        1.0
    }
}

impl Rows for Int8Rows {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, row: usize, i: usize) -> S::F {
        // SAFETY: the caller keeps `row` and `i .. i + 16` inside the page.
        unsafe { s.load_i8(self.0.add(row * self.2 + i)) }
    }
    #[inline(always)]
    unsafe fn value(self, row: usize, i: usize) -> f32 {
        // SAFETY: as above.
        f32::from(unsafe { *self.0.add(row * self.2 + i) })
    }
    #[inline(always)]
    unsafe fn scale(self, row: usize) -> f32 {
        // SAFETY: as above.
        unsafe { *self.1.add(row) }.to_f32()
    }
}

/// The pages of one head; page `i` of the sequence as [`Rows`].
trait Pages: Copy {
    type Rows: Rows;
    unsafe fn page(self, i: usize) -> Self::Rows;
}

#[derive(Clone, Copy)]
struct F32Pages<'a>(KvView<'a>, &'a [f32]);
#[derive(Clone, Copy)]
struct F16Pages<'a>(KvView<'a>, &'a [f16]);
#[derive(Clone, Copy)]
struct Int8Pages<'a>(KvView<'a>, &'a [i8], &'a [f16]);

impl Pages for F32Pages<'_> {
    type Rows = F32Rows;
    #[inline(always)]
    unsafe fn page(self, i: usize) -> F32Rows {
        let d = self.0.head_dim;
        // SAFETY: a sequence's pages lie in the pool.
        F32Rows(unsafe { self.1.as_ptr().add(self.0.page_row(i) * d) }, d)
    }
}

impl Pages for F16Pages<'_> {
    type Rows = F16Rows;
    #[inline(always)]
    unsafe fn page(self, i: usize) -> F16Rows {
        let d = self.0.head_dim;
        // SAFETY: a sequence's pages lie in the pool.
        F16Rows(unsafe { self.1.as_ptr().add(self.0.page_row(i) * d) }, d)
    }
}

impl Pages for Int8Pages<'_> {
    type Rows = Int8Rows;
    #[inline(always)]
    unsafe fn page(self, i: usize) -> Int8Rows {
        let (d, row) = (self.0.head_dim, self.0.page_row(i));
        // SAFETY: a sequence's pages lie in the pool.
        unsafe { Int8Rows(self.1.as_ptr().add(row * d), self.2.as_ptr().add(row), d) }
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

/// Splits `positions` at page boundaries: page, rows in it, and the index of the first row's
/// position in `positions`.
#[inline(always)]
fn parts(positions: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
    let Range { start, end } = positions;
    (start / PAGE..end.div_ceil(PAGE)).map(move |page| {
        let first = start.max(page * PAGE);
        let last = end.min((page + 1) * PAGE);
        (page, first - page * PAGE..last - page * PAGE, first - start)
    })
}

/// Result for a query before the division by `sum`: `out` is relative to `exp(max)`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Partial {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

/// Attention of one token's query heads that share a key head, over positions `from .. to` (at most
/// [`CHUNK`]). `q` is `[heads, d]`, `out` `[heads, d]` unnormalized, `scores` scratch
/// `[4, CHUNK]`; `d` is a multiple of 16.
///
/// # Safety
/// `to` is within the views' positions and the slices have these lengths.
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
            ($c:literal) => {
                // SAFETY: by this function's contract.
                unsafe {
                    with_pages!(keys, |pages| decode_scores::<S, _, $c>(
                        s, pages, d, from, to, q, scale, scores
                    ));
                    for c in 0..$c {
                        partials[c] = soften(s, &mut scores[c * CHUNK..(c + 1) * CHUNK], to - from);
                    }
                    with_pages!(values, |pages| decode_values::<S, _, $c>(
                        s, pages, d, from, to, scores, out
                    ));
                }
            };
        }
        match n {
            1 => columns!(1),
            2 => columns!(2),
            3 => columns!(3),
            _ => columns!(4),
        }
        h += n;
    }
}

/// Scores of `C` heads, `[C, CHUNK]`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "operands of one flat kernel")]
unsafe fn decode_scores<S: Simd, K: Pages, const C: usize>(
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
    for (page, rows, at) in parts(from..to) {
        let first = rows.start;
        // SAFETY: the caller keeps the positions within the views; `i .. i + 16` lie inside the
        // head, `c * d + i + 16` inside q, and scores are as many as positions.
        unsafe {
            let keys = pages.page(page);
            for row in rows {
                let mut acc = [[s.splat(0.0); 2]; C];
                let mut i = 0;
                while i < d {
                    let k = keys.load(s, row, i);
                    for (c, acc) in acc.iter_mut().enumerate() {
                        acc[0] = s.fma(k, s.load(q.as_ptr().add(c * d + i)), acc[0]);
                    }
                    i += LANES;
                    if i < d {
                        let k = keys.load(s, row, i);
                        for (c, acc) in acc.iter_mut().enumerate() {
                            acc[1] = s.fma(k, s.load(q.as_ptr().add(c * d + i)), acc[1]);
                        }
                        i += LANES;
                    }
                }
                let scale = scale * keys.scale(row);
                for (c, acc) in acc.iter().enumerate() {
                    *scores.get_unchecked_mut(c * CHUNK + at + row - first) =
                        s.sum(s.add(acc[0], acc[1])) * scale;
                }
            }
        }
    }
}

/// Replaces `n` scores by their exponentials relative to the greatest.
#[inline(always)]
fn soften<S: Simd>(s: S, scores: &mut [f32], n: usize) -> Partial {
    let padded = n.next_multiple_of(LANES);
    scores[n..padded].fill(MASKED);
    let (scores, _) = scores[..padded].as_chunks_mut::<LANES>();
    let mut greatest = s.splat(MASKED);
    for v in &*scores {
        // SAFETY: an array of 16.
        greatest = s.max(greatest, unsafe { s.load(v.as_ptr()) });
    }
    let max = s.max_lane(greatest);
    let mut sum = s.splat(0.0);
    for v in scores {
        // SAFETY: an array of 16.
        unsafe {
            let score = s.load(v.as_ptr());
            let e = s.exp(s.sub(score, s.splat(max)));
            s.store(v.as_mut_ptr(), e);
            // The maximum and the exponential lose a NaN; zero times it does not.
            sum = s.add(sum, s.fma(score, s.splat(0.0), e));
        }
    }
    Partial {
        max,
        sum: s.sum(sum),
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
    out: &mut [f32],
) {
    debug_assert!(out.len() >= C * d && weights.len() >= C * CHUNK);
    const WIDE: usize = 4;
    let mut i = 0;
    while i < d {
        // SAFETY: rows, dimensions and weights as in `decode_scores`.
        unsafe {
            if i + WIDE * LANES <= d {
                weigh::<S, V, C, WIDE>(s, pages, d, i, from, to, weights, out);
                i += WIDE * LANES;
            } else {
                weigh::<S, V, C, 1>(s, pages, d, i, from, to, weights, out);
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
    out: &mut [f32],
) {
    // SAFETY: by the caller's contract.
    unsafe {
        let mut acc = [[s.splat(0.0); W]; C];
        for (page, rows, at) in parts(from..to) {
            let (values, first) = (pages.page(page), rows.start);
            for row in rows {
                let scale = values.scale(row);
                let mut v = [s.splat(0.0); W];
                for (j, v) in v.iter_mut().enumerate() {
                    *v = values.load(s, row, i + j * LANES);
                }
                for (c, acc) in acc.iter_mut().enumerate() {
                    let weight = weights.get_unchecked(c * CHUNK + at + row - first);
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

/// Merges the partial results of consecutive chunks of one query into `y` `[d]`.
#[inline(always)]
pub(crate) fn merge<S: Simd>(s: S, partials: &[Partial], outs: &[f32], y: &mut [f32]) {
    let d = y.len();
    let max = partials.iter().fold(MASKED, |m, p| m.max(p.max));
    let share = |p: &Partial| (p.max - max).exp();
    let total: f32 = partials.iter().map(|p| p.sum * share(p)).sum();
    y.fill(0.0);
    for (p, out) in partials.iter().zip(outs.chunks_exact(d)) {
        let weight = s.splat(share(p) / total);
        let (ys, _) = y.as_chunks_mut::<LANES>();
        for (y, o) in ys.iter_mut().zip(out.as_chunks::<LANES>().0) {
            // SAFETY: arrays of 16.
            unsafe {
                let v = s.fma(s.load(o.as_ptr()), weight, s.load(y.as_ptr()));
                s.store(y.as_mut_ptr(), v);
            }
        }
    }
}

/// Scratch of one [`prefill`] tile: floats needed for `P` panels of queries.
pub(crate) const fn prefill_scratch(panels: usize, head_dim: usize) -> usize {
    let parts = head_dim.div_ceil(PITCH);
    let lanes = panels * LANES;
    // Queries, outputs, scores, a block of keys or values.
    2 * parts * PITCH * lanes + BLOCK * lanes + parts * BLOCK * PITCH
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
    let (scores, block) = rest.split_at_mut(BLOCK * lanes);
    let block = &mut block[..parts * BLOCK * PITCH];

    // Queries `[P][dimension][16]`, scaled.
    queries.fill(0.0);
    for (j, &q) in q.iter().enumerate() {
        let to = &mut queries[j / LANES * parts * PITCH * LANES + j % LANES..];
        for i in 0..d {
            // SAFETY: `q` is valid for d floats.
            to[i * LANES] = unsafe { *q.add(i) } * scale;
        }
    }
    outputs.fill(0.0);
    let mut limit = [[0f32; LANES]; P];
    for (j, &l) in limits.iter().enumerate() {
        limit[j / LANES][j % LANES] = l as f32;
    }
    let end = limits.iter().copied().max().unwrap_or(0);
    let all_see = limits.iter().copied().min().unwrap_or(0);
    // SAFETY: arrays of 16; blocks stay below `end`; strides are those of the scratch parts.
    unsafe {
        let mut max = [s.splat(MASKED); P];
        let mut sum = [s.splat(0.0); P];
        let mut from = 0;
        while from < end {
            let n = BLOCK.min(end - from);
            with_pages!(keys, |pages| unpack(s, pages, d, from, n, block));
            for part in 0..parts {
                let width = PITCH.min(d - part * PITCH);
                for p in (0..n).step_by(C) {
                    tile::<S, P, C, 1, PITCH>(
                        s,
                        width,
                        queries.as_ptr().add(part * PITCH * LANES),
                        parts * PITCH * LANES,
                        block.as_ptr().add((part * BLOCK + p) * PITCH),
                        scores.as_mut_ptr().add(p * LANES),
                        BLOCK * LANES,
                        LANES,
                        part > 0,
                    );
                }
            }
            for p in 0..P {
                let scores = scores.as_mut_ptr().add(p * BLOCK * LANES);
                if from + n > all_see {
                    // At least one query of the tile does not see all of the block.
                    mask(s, scores, from..from + n, &limit[p]);
                }
                let outputs = outputs.as_mut_ptr().add(p * parts * PITCH * LANES);
                fold(s, scores, n, outputs, d, &mut max[p], &mut sum[p]);
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
            from += n;
        }
        for (j, &y) in y.iter().enumerate() {
            let mut sums = [0f32; LANES];
            s.store(sums.as_mut_ptr(), sum[j / LANES]);
            let inverse = 1.0 / sums[j % LANES];
            let from = &outputs[j / LANES * parts * PITCH * LANES + j % LANES..];
            for i in 0..d {
                *y.add(i) = from[i * LANES] * inverse;
            }
        }
    }
}

/// Makes the scores of positions `at`, `[position][16]`, negligible for queries whose limit is
/// at or before them.
///
/// # Safety
/// `scores` is valid for 16 floats per position.
#[inline(always)]
unsafe fn mask<S: Simd>(s: S, scores: *mut f32, at: Range<usize>, limit: &[f32; LANES]) {
    // SAFETY: by contract; `limit` is 16 long.
    unsafe {
        let limit = s.load(limit.as_ptr());
        for (i, position) in at.enumerate() {
            let at = scores.add(i * LANES);
            // Positive if the position is at or past the limit.
            let past = s.sub(s.splat(position as f32 + 0.5), limit);
            let bias = s.mul(s.max(past, s.splat(0.0)), s.splat(2.0 * MASKED));
            s.store(at, s.add(s.load(at), bias));
        }
    }
}

/// Adds `n` positions' scores `[position][16]` to an online softmax: scores become weights, and
/// `outputs` `[d][16]`, `max` and `sum` are rescaled to the new greatest score.
///
/// # Safety
/// `scores` is valid for 16 floats per position, `outputs` for 16 per dimension.
#[inline(always)]
unsafe fn fold<S: Simd>(
    s: S,
    scores: *mut f32,
    n: usize,
    outputs: *mut f32,
    d: usize,
    max: &mut S::F,
    sum: &mut S::F,
) {
    // SAFETY: by contract.
    unsafe {
        let mut top = *max;
        for i in 0..n {
            top = s.max(top, s.load(scores.add(i * LANES)));
        }
        let fade = s.exp(s.sub(*max, top));
        *max = top;
        let mut total = s.mul(*sum, fade);
        for i in 0..n {
            let at = scores.add(i * LANES);
            let score = s.load(at);
            let e = s.exp(s.sub(score, top));
            s.store(at, e);
            // As in `soften`.
            total = s.add(total, s.fma(score, s.splat(0.0), e));
        }
        *sum = total;
        for i in 0..d {
            let at = outputs.add(i * LANES);
            s.store(at, s.mul(s.load(at), fade));
        }
    }
}

/// Rows `from .. from + n` as floats `[part][BLOCK][PITCH]`. Up to 15 dimensions past `d`
/// may hold anything: they affect only their own outputs, which are not read.
///
/// # Safety
/// The rows are inside the view and in one page.
#[inline(always)]
unsafe fn unpack<S: Simd, K: Pages>(
    s: S,
    pages: K,
    d: usize,
    from: usize,
    n: usize,
    block: &mut [f32],
) {
    // SAFETY: by contract.
    let rows = unsafe { pages.page(from / PAGE) };
    for row in 0..n {
        let at = from % PAGE + row;
        // SAFETY: by contract; `to` stays inside the block.
        unsafe {
            let scale = rows.scale(at);
            let mut i = 0;
            while i + LANES <= d {
                let v = s.mul(rows.load(s, at, i), s.splat(scale));
                let to = (i / PITCH * BLOCK + row) * PITCH + i % PITCH;
                s.store(block.as_mut_ptr().add(to), v);
                i += LANES;
            }
            while i < d {
                let to = (i / PITCH * BLOCK + row) * PITCH + i % PITCH;
                block[to] = rows.value(at, i) * scale;
                i += 1;
            }
        }
    }
}
