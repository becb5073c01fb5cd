//! The operations of a layer besides the Linear.

pub(crate) mod attention;
pub(crate) mod rows;

use super::memory::{Buffer, Shared};
use super::simd::LANES;
use super::{Cpu, KvSequence, with_scratch};
use attention::{CHUNK, Partial};

/// Consecutive new tokens of one sequence within a batch's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub row: usize,
    /// Rows.
    pub len: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
}

/// Rows of a span up to which attention computes each as if it were alone, bit for bit, where heads
/// are whole vectors.
pub const FEW_ROWS: usize = 8;

/// Values below which an operation on rows is not worth waking the team for.
const SMALL: usize = 8_192;

impl Cpu {
    /// RMSNorm of each row of `x` `[m, n]` with `weight` `[n]` into `y` `[m, n]`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        assert_eq!(x.len(), y.len(), "rms_norm: x and y");
        let begin = self.profile.begin();
        let y = Shared::new(y);
        self.team()
            .run_ranges(x.len() / n.max(1), SMALL.div_ceil(n.max(1)), |rows| {
                for i in rows {
                    let span = i * n..(i + 1) * n;
                    // SAFETY: each row is written once.
                    let y = unsafe { y.part(span.clone()) };
                    (self.table.rms_norm)(&x[span], weight, eps, y);
                }
            });
        self.profile
            .end(begin, "rms_norm", self.isa.name(), (1, n), 4 * x.len());
    }

    /// Per-head RMSNorm (`weight` `[head_dim]`), then rotary embedding, of `heads`
    /// consecutive heads that start at column `start` of each row of `x` `[m, stride]`,
    /// in place. `cos_sin` is `[positions, head_dim / 2]`, `positions[i]` the position of
    /// row `i`.
    #[allow(
        clippy::too_many_arguments,
        reason = "one flat description of a strided view"
    )]
    pub fn qk_norm_rope(
        &self,
        x: &mut [f32],
        stride: usize,
        start: usize,
        heads: usize,
        weight: &[f32],
        eps: f32,
        cos_sin: &[(f32, f32)],
        positions: &[usize],
    ) {
        let d = weight.len();
        let rows = x.len() / stride.max(1);
        let begin = self.profile.begin();
        let x = Shared::new(x);
        let grain = SMALL.div_ceil((heads * d).max(1));
        self.team().run_ranges(rows, grain, |rows| {
            for i in rows {
                let table = &cos_sin[positions[i] * (d / 2)..(positions[i] + 1) * (d / 2)];
                // SAFETY: each row is written once.
                let row = unsafe { x.part(i * stride..(i + 1) * stride) };
                for head in row[start..start + heads * d].chunks_exact_mut(d) {
                    (self.table.norm_rope)(head, weight, eps, table);
                }
            }
        });
        let bytes = 4 * rows * heads * d;
        let isa = self.isa.name();
        self.profile
            .end(begin, "qk_norm_rope", isa, (heads, d), bytes);
    }

    /// Causal attention of one sequence's new tokens over its cache, which already holds
    /// their keys and values. Row `r` of `qkv` `[m, stride]` starts with the query heads;
    /// output `y` is `[m, heads * head_dim]`. Scores are scaled by `1/sqrt(head_dim)`.
    ///
    /// # Panics
    /// If the cache's heads do not divide `heads`, its width is not `head_dim`, or it has
    /// no room for the span's positions.
    #[allow(
        clippy::too_many_arguments,
        reason = "one flat description of a strided view"
    )]
    pub fn attention(
        &self,
        qkv: &[f32],
        stride: usize,
        span: Span,
        heads: usize,
        head_dim: usize,
        kv: KvSequence<'_>,
        y: &mut [f32],
    ) {
        if span.len == 0 {
            return;
        }
        let width = heads * head_dim;
        let q = &qkv[span.row * stride..];
        let y = &mut y[span.row * width..(span.row + span.len) * width];
        let begin = self.profile.begin();
        self.attend(q, stride, span, heads, head_dim, kv, y);
        let bytes = cache_bytes(span, kv);
        let shape = (heads, head_dim);
        self.profile
            .end(begin, "attention", self.isa.name(), shape, bytes);
    }

    /// [`Cpu::attention`] of several sequences, whose `spans` lie one behind another; the
    /// keys and values of `spans[i]` are `kv(i)`. Many sequences are shared out whole, so
    /// that the team works in step once and not once for each.
    ///
    /// # Panics
    /// As [`Cpu::attention`], and if spans overlap or run backwards.
    #[allow(
        clippy::too_many_arguments,
        reason = "one flat description of a strided view"
    )]
    pub fn attention_batch<'a>(
        &self,
        qkv: &[f32],
        stride: usize,
        spans: &[Span],
        heads: usize,
        head_dim: usize,
        kv: impl Fn(usize) -> KvSequence<'a> + Send + Sync,
        y: &mut [f32],
    ) {
        if spans.len() < 2 * self.threads() {
            for (i, &span) in spans.iter().enumerate() {
                self.attention(qkv, stride, span, heads, head_dim, kv(i), y);
            }
            return;
        }
        let ordered = |s: &[Span]| s[0].row + s[0].len <= s[1].row;
        assert!(spans.windows(2).all(ordered), "attention_batch: spans");
        let width = heads * head_dim;
        let begin = self.profile.begin();
        let y = Shared::new(y);
        self.team().run_ranges(spans.len(), 1, |tasks| {
            for i in tasks.filter(|&i| spans[i].len > 0) {
                let span = spans[i];
                let q = &qkv[span.row * stride..];
                // SAFETY: spans do not overlap, and each is one task.
                let y = unsafe { y.part(span.row * width..(span.row + span.len) * width) };
                self.attend(q, stride, span, heads, head_dim, kv(i), y);
            }
        });
        let bytes_of = |(i, &span)| cache_bytes(span, kv(i));
        let bytes = spans.iter().enumerate().map(bytes_of).sum();
        let shape = (heads, head_dim);
        self.profile
            .end(begin, "attention", self.isa.name(), shape, bytes);
    }

    /// Attention of the rows of one span: `q` starts and `y` lies at its first row.
    #[allow(clippy::too_many_arguments, reason = "one flat description")]
    fn attend(
        &self,
        q: &[f32],
        stride: usize,
        span: Span,
        heads: usize,
        head_dim: usize,
        kv: KvSequence<'_>,
        y: &mut [f32],
    ) {
        assert!(heads.is_multiple_of(kv.pages().kv_heads()));
        assert!(kv.pages().head_dim() == head_dim);
        assert!(span.position + span.len <= kv.capacity());
        if span.len <= FEW_ROWS && head_dim.is_multiple_of(LANES) {
            let width = heads * head_dim;
            for (r, y) in y.chunks_exact_mut(width).enumerate() {
                let q = &q[r * stride..][..width];
                self.attend_one(q, span.position + r + 1, kv, y);
            }
        } else {
            self.attend_many(q, stride, span, heads, kv, y);
        }
    }

    /// One token: a task is a key head and a chunk of positions.
    fn attend_one(&self, q: &[f32], len: usize, kv: KvSequence<'_>, y: &mut [f32]) {
        let d = kv.pages().head_dim();
        let kv_heads = kv.pages().kv_heads();
        let group = q.len() / d / kv_heads;
        let chunks = len.div_ceil(CHUNK);
        let scale = 1.0 / (d as f32).sqrt();
        with_scratch!(DecodeScratch, |scratch| {
            let outs = scratch.outs.reserve(kv_heads * chunks * group * d);
            let empty = Partial { max: 0.0, sum: 0.0 };
            scratch.partials.clear();
            scratch.partials.resize(kv_heads * chunks * group, empty);
            {
                let outs = Shared::new(outs);
                let partials = Shared::new(&mut scratch.partials);
                self.team().run_ranges(kv_heads * chunks, 1, |tasks| {
                    with_scratch!(Buffer<f32>, |scores| {
                        for task in tasks {
                            let (head, chunk) = (task / chunks, task % chunks);
                            let (from, to) = (chunk * CHUNK, ((chunk + 1) * CHUNK).min(len));
                            let q = &q[head * group * d..(head + 1) * group * d];
                            // SAFETY: each task has parts of its own; `to` is within the
                            // capacity that `attention` checked; this CPU has the table's
                            // instructions; `d` is a multiple of 16.
                            unsafe {
                                let outs = outs.part(task * group * d..(task + 1) * group * d);
                                let partials = partials.part(task * group..(task + 1) * group);
                                let [keys, values] = kv.head(head);
                                (self.table.decode)(
                                    keys,
                                    values,
                                    from,
                                    to,
                                    q,
                                    scale,
                                    scores.reserve(4 * CHUNK),
                                    outs,
                                    partials,
                                );
                            }
                        }
                    });
                });
            }
            // Merge each query head's chunks, in their order.
            let mut own = Vec::new();
            let mut own_outs = Vec::new();
            for (i, y) in y.chunks_exact_mut(d).enumerate() {
                let (head, j) = (i / group, i % group);
                own.clear();
                own_outs.clear();
                for chunk in 0..chunks {
                    let at = (head * chunks + chunk) * group + j;
                    own.push(scratch.partials[at]);
                    own_outs.extend_from_slice(&scratch.outs[at * d..(at + 1) * d]);
                }
                (self.table.merge)(&own, &own_outs, y);
            }
        });
    }

    /// Many tokens: a task is a key head and a tile of (row, query head) pairs.
    #[allow(clippy::too_many_arguments, reason = "one flat description")]
    fn attend_many(
        &self,
        q: &[f32],
        stride: usize,
        span: Span,
        heads: usize,
        kv: KvSequence<'_>,
        y: &mut [f32],
    ) {
        let d = kv.pages().head_dim();
        let kv_heads = kv.pages().kv_heads();
        let group = heads / kv_heads;
        let panels = self.table.query_panels;
        let tile = panels * LANES;
        let queries = span.len * group;
        let tiles = queries.div_ceil(tile);
        let scale = 1.0 / (d as f32).sqrt();
        assert!(q.len() >= (span.len - 1) * stride + heads * d);
        let y = Shared::new(y);
        self.team().run_ranges(kv_heads * tiles, 1, |tasks| {
            with_scratch!(Buffer<f32>, |scratch| {
                let scratch = scratch.reserve(attention::prefill_scratch(panels, d));
                for task in tasks {
                    // Heads inner: a member's share holds early (short) and late tiles.
                    let (tile_index, head) = (task / kv_heads, task % kv_heads);
                    let first = tile_index * tile;
                    let count = tile.min(queries - first);
                    let mut qs = [std::ptr::null(); MOST_QUERIES];
                    let mut ys = [std::ptr::null_mut(); MOST_QUERIES];
                    let mut limits = [0; MOST_QUERIES];
                    for j in 0..count {
                        let (row, h) = ((first + j) / group, (first + j) % group);
                        let column = (head * group + h) * d;
                        qs[j] = q[row * stride + column..][..d].as_ptr();
                        let at = row * heads * d + column;
                        // SAFETY: each query's output is written by one task.
                        ys[j] = unsafe { y.part(at..at + d) }.as_mut_ptr();
                        limits[j] = span.position + row + 1;
                    }
                    // SAFETY: limits are within the capacity that `attention` checked; the
                    // pointers are to `d` floats each; this CPU has the table's
                    // instructions.
                    unsafe {
                        let [keys, values] = kv.head(head);
                        (self.table.prefill)(
                            keys,
                            values,
                            &qs[..count],
                            &limits[..count],
                            scale,
                            &ys[..count],
                            scratch,
                        );
                    }
                }
            });
        });
    }
}

/// Bytes of keys and values that the last token of a span attends over.
fn cache_bytes(span: Span, kv: KvSequence<'_>) -> usize {
    let pages = kv.pages();
    let rows = 2 * pages.kv_heads() * (span.position + span.len);
    rows * pages.kind().bytes(pages.head_dim())
}

/// Queries in a tile of any instruction set, at most.
const MOST_QUERIES: usize = 4 * LANES;

#[derive(Default)]
struct DecodeScratch {
    outs: Buffer<f32>,
    partials: Vec<Partial>,
}
