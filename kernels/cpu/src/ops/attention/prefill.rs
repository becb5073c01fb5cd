//! Attention of many queries, which lie in the lanes.

use super::lines::{Lines, Pages, with_pages};
use super::{BLOCK, CHUNK, MASKED, PITCH, Softmax, finish, merged, soften};
use crate::kv::KvView;
use crate::linear::float::tile;
use crate::simd::{LANES, Simd};
use nq_kernels::pages::PAGE;

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
    // Between 0 and 1, by maxima alone: this module has no minimum.
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
