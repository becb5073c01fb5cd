//! The operations of a layer besides the Linear.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod delta_kernels;
pub(crate) mod rows;
pub(crate) mod streams;

use super::memory::{Buffer, SharedSlice};
use super::simd::LANES;
use super::{Cpu, KvSequence, with_scratch};
use attention::{CHUNK, Partial};
pub use delta::{DeltaRows, DeltaVectors, state_len};
use nq_model::Dims;

/// Consecutive new tokens of one sequence within a batch's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub row: usize,
    /// Number of rows.
    pub len: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
}

/// Which positions of its sequence a row of a span sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visible {
    /// Its own and those before it.
    Before,
    /// All up to the span's last.
    Whole,
}

/// Most rows of a span that attention computes one by one, if heads are whole vectors; more share what they read. The
/// bits are the same.
pub const FEW_ROWS: usize = 8;

/// With fewer values than this, an operation on rows is not worth waking the team.
const SMALL: usize = 8_192;

impl Cpu {
    /// RMSNorm of each row of `x` `[m, n]` with `weight` `[n]` into `y` `[m, n]`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        assert_eq!(x.len(), y.len(), "rms_norm: x and y");
        let begin = self.profile.begin();
        let y = SharedSlice::new(y);
        self.team()
            .run_ranges(x.len() / n.max(1), SMALL.div_ceil(n.max(1)), |rows| {
                for i in rows {
                    let span = i * n..(i + 1) * n;
                    // SAFETY: each row is written once.
                    let y = unsafe { y.part(span.clone()) };
                    (self.table.rms_norm)(&x[span], weight, eps, y);
                }
            });
        self.profile.end(
            begin,
            "rms_norm",
            self.isa.name(),
            Dims::new(1, n),
            4 * x.len(),
        );
    }

    /// GELU of each value in the form with tanh, in place: `x / 2 (1 + tanh(z / 2))` is `x sigmoid(z)`, and that is
    /// `silu(z)` by `z / x`, which is never 0.
    pub(crate) fn gelu_tanh(&self, x: &mut [f32]) {
        const SCALE: f32 = 1.595_769; // 2 sqrt(2 / pi)
        const CUBE: f32 = 0.044_715;
        let begin = self.profile.begin();
        self.team().run_chunks(x, SMALL, |_, values| {
            let mut inverse = [0.0; 64];
            for values in values.chunks_mut(inverse.len()) {
                for (x, inverse) in values.iter_mut().zip(&mut inverse) {
                    let ratio = SCALE * (1.0 + CUBE * *x * *x);
                    *x *= ratio;
                    *inverse = 1.0 / ratio;
                }
                (self.table.silu_mul)(values, &inverse[..values.len()]);
            }
        });
        self.profile.end(
            begin,
            "gelu",
            self.isa.name(),
            Dims::new(1, x.len()),
            4 * x.len(),
        );
    }

    /// Per-head RMSNorm, if there are gains `[head_dim]` for it, then rotary embedding, of `heads`
    /// consecutive heads of `d` values that start at column `start` of each row of `x`
    /// `[m, stride]`, in place. The first `2 half` values of a head are rotated: `cos_sin` is
    /// `[positions, half]`, `positions[i]` the position of row `i`.
    pub fn turn_heads(
        &self,
        x: &mut [f32],
        stride: usize,
        (start, heads, d): (usize, usize, usize),
        (gains, eps): (Option<&[f32]>, f32),
        (cos_sin, half): (&[(f32, f32)], usize),
        positions: &[usize],
    ) {
        let rows = x.len() / stride.max(1);
        let begin = self.profile.begin();
        let x = SharedSlice::new(x);
        let grain = SMALL.div_ceil((heads * d).max(1));
        self.team().run_ranges(rows, grain, |rows| {
            for i in rows {
                let table = &cos_sin[positions[i] * half..(positions[i] + 1) * half];
                // SAFETY: each row is written once.
                let row = unsafe { x.part(i * stride..(i + 1) * stride) };
                for head in row[start..start + heads * d].chunks_exact_mut(d) {
                    match gains {
                        Some(gains) => (self.table.norm_rope)(head, gains, eps, table),
                        None => rows::rope(head, table),
                    }
                }
            }
        });
        let bytes = 4 * rows * heads * d;
        let isa = self.isa.name();
        self.profile
            .end(begin, "turn_heads", isa, Dims::new(heads, d), bytes);
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
        self.attention_batch(qkv, stride, &[span], heads, head_dim, |_| kv, y);
    }

    /// [`Cpu::attention`] of several sequences, whose `spans` are in the order of their rows; the
    /// keys and values of `spans[i]` are `kv(i)`. Sequences with few rows are split into tasks
    /// together, so that pages that they share are read from memory once. Many sequences with more
    /// rows become one task each, so that the team is woken once and not once for each sequence.
    ///
    /// # Panics
    /// Like [`Cpu::attention`]; also if spans overlap or are not in order.
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
        let ordered = |s: &[Span]| s[0].row + s[0].len <= s[1].row;
        assert!(spans.windows(2).all(ordered), "attention: spans");
        // Asked once: what is checked is what is read.
        let kv: Vec<KvSequence<'a>> = (0..spans.len()).map(kv).collect();
        for (kv, span) in kv.iter().zip(spans) {
            let pages = kv.pages();
            assert!(heads.is_multiple_of(pages.kv_heads()));
            assert!(pages.head_dim() == head_dim);
            let end = span.position.checked_add(span.len);
            assert!(end.is_some_and(|end| end <= kv.capacity()));
        }
        let begin = self.profile.begin();
        let few = |s: &Span| s.len <= FEW_ROWS && head_dim.is_multiple_of(LANES);
        let width = heads * head_dim;
        if spans.iter().all(few) {
            self.attend_few(qkv, stride, spans, heads, &kv, y);
        } else {
            let all = SharedSlice::new(y);
            let attend = |i: usize| {
                let span = spans[i];
                // SAFETY: spans do not overlap, and each is attended once.
                let y = unsafe { all.part(span.row * width..(span.row + span.len) * width) };
                if few(&span) {
                    let first = Span { row: 0, ..span };
                    let q = &qkv[span.row * stride..];
                    self.attend_few(q, stride, &[first], heads, &kv[i..=i], y);
                } else {
                    let q = &qkv[span.row * stride..];
                    self.attend(q, stride, span, heads, kv[i], Visible::Before, y);
                }
            };
            if spans.len() < 2 * self.threads() {
                (0..spans.len()).for_each(attend)
            } else {
                self.team()
                    .run_ranges(spans.len(), 1, |tasks| tasks.for_each(attend))
            }
        }
        let bytes_of = |(i, &span)| cache_bytes(span, kv[i]);
        let bytes = spans.iter().enumerate().map(bytes_of).sum();
        let shape = Dims::new(heads, head_dim);
        self.profile
            .end(begin, "attention", self.isa.name(), shape, bytes);
    }

    /// Computes each row as if it were alone. A task is a key head, a chunk of positions and a row;
    /// rows that see the same positions are consecutive, so that shared keys and values are read from
    /// memory once and then found in the cache.
    fn attend_few(
        &self,
        qkv: &[f32],
        stride: usize,
        spans: &[Span],
        heads: usize,
        kv: &[KvSequence<'_>],
        y: &mut [f32],
    ) {
        let Some(pages) = kv.first().map(KvSequence::pages) else {
            return;
        };
        let (d, kv_heads) = (pages.head_dim(), pages.kv_heads());
        let group = heads / kv_heads;
        let scale = 1.0 / (d as f32).sqrt();
        with_scratch!(DecodeScratch, |scratch| {
            scratch.plan(spans);
            let DecodeScratch {
                rows,
                tasks,
                outs,
                partials,
            } = scratch;
            let each = tasks.len();
            let outs = outs.reserve(kv_heads * each * group * d);
            partials.resize(kv_heads * each * group, Partial::default());
            {
                let outs = SharedSlice::new(outs);
                let partials = SharedSlice::new(partials);
                self.team().run_ranges(kv_heads * each, 1, |range| {
                    with_scratch!(Buffer<f32>, |scores| {
                        for i in range {
                            let (head, Task { row, chunk }) = (i / each, tasks[i % each]);
                            let row = &rows[row];
                            let (from, to) = (chunk * CHUNK, ((chunk + 1) * CHUNK).min(row.len));
                            let q = &qkv[row.row * stride + head * group * d..][..group * d];
                            let at = head * each + row.first + chunk;
                            // SAFETY: each task has parts of its own; `to` is within the
                            // capacity that `attention_batch` checked; this CPU has the table's
                            // instructions; `d` is a multiple of 16.
                            unsafe {
                                let outs = outs.part(at * group * d..(at + 1) * group * d);
                                let partials = partials.part(at * group..(at + 1) * group);
                                let [keys, values] = kv[row.span].head(head);
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
            let y = SharedSlice::new(y);
            let grain = SMALL.div_ceil(each * d).max(1);
            self.team().run_ranges(rows.len() * heads, grain, |range| {
                with_scratch!(MergeScratch, |own| {
                    for i in range {
                        let (row, h) = (&rows[i / heads], i % heads);
                        own.partials.clear();
                        own.outs.clear();
                        for chunk in 0..row.chunks() {
                            let at = (h / group * each + row.first + chunk) * group + h % group;
                            own.partials.push(partials[at]);
                            own.outs.extend_from_slice(&outs[at * d..(at + 1) * d]);
                        }
                        let to = (row.row * heads + h) * d;
                        // SAFETY: each head of a row is merged once.
                        let y = unsafe { y.part(to..to + d) };
                        (self.table.merge)(&own.partials, &own.outs, y);
                    }
                });
            });
        });
    }

    /// Attention of many tokens of one sequence: a task is a key head and a tile of (row, query head) pairs. The first row
    /// of `q` is the span's, whatever its [`Span::row`].
    ///
    /// # Panics
    /// If the cache has no room for the span's positions, or its heads do not divide `heads`.
    #[allow(clippy::too_many_arguments, reason = "one flat description")]
    pub(crate) fn attend(
        &self,
        q: &[f32],
        stride: usize,
        span: Span,
        heads: usize,
        kv: KvSequence<'_>,
        visible: Visible,
        y: &mut [f32],
    ) {
        let d = kv.pages().head_dim();
        let kv_heads = kv.pages().kv_heads();
        let end = span.position + span.len;
        assert!(heads.is_multiple_of(kv_heads) && end <= kv.capacity() && span.len > 0);
        let group = heads / kv_heads;
        let panels = self.table.query_panels;
        let tile = panels * LANES;
        let queries = span.len * group;
        let tiles = queries.div_ceil(tile);
        let scale = 1.0 / (d as f32).sqrt();
        assert!(q.len() >= (span.len - 1) * stride + heads * d);
        let y = SharedSlice::new(y);
        self.team().run_ranges(kv_heads * tiles, 1, |tasks| {
            with_scratch!(Buffer<f32>, |scratch| {
                let scratch = scratch.reserve(attention::prefill_scratch(panels, d));
                for task in tasks {
                    // Heads in the inner loop: a member's share then has early (short) and late tiles.
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
                        limits[j] = match visible {
                            Visible::Before => span.position + row + 1,
                            Visible::Whole => end,
                        };
                    }
                    // SAFETY: limits are within the capacity checked above; the
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

/// Most queries in a tile of any instruction set.
const MOST_QUERIES: usize = 4 * LANES;

/// One of few rows, and the chunks of positions that it sees.
struct FewRow {
    row: usize,
    span: usize,
    /// Number of positions that it sees.
    len: usize,
    /// Index of its first chunk among those of all rows.
    first: usize,
}

impl FewRow {
    fn chunks(&self) -> usize {
        self.len.div_ceil(CHUNK)
    }
}

/// A chunk of the positions that a row sees.
#[derive(Clone, Copy)]
struct Task {
    row: usize,
    chunk: usize,
}

/// Buffers for attention of few rows.
#[derive(Default)]
struct DecodeScratch {
    rows: Vec<FewRow>,
    tasks: Vec<Task>,
    outs: Buffer<f32>, // [kv_heads, chunks of all rows, query heads of each, d]
    partials: Vec<Partial>, // the same, without d
}

impl DecodeScratch {
    /// Lists the rows of `spans`, and their chunks by positions.
    fn plan(&mut self, spans: &[Span]) {
        self.rows.clear();
        self.tasks.clear();
        let mut first = 0;
        for (i, span) in spans.iter().enumerate() {
            for r in 0..span.len {
                let row = FewRow {
                    row: span.row + r,
                    span: i,
                    len: span.position + r + 1,
                    first,
                };
                first += row.chunks();
                self.rows.push(row);
            }
        }
        let longest = self.rows.iter().map(FewRow::chunks).max().unwrap_or(0);
        for chunk in 0..longest {
            let rows = self.rows.iter().enumerate();
            let those = rows.filter(|(_, r)| chunk < r.chunks());
            self.tasks.extend(those.map(|(row, _)| Task { row, chunk }));
        }
    }
}

/// The chunks of one query head.
#[derive(Default)]
struct MergeScratch {
    partials: Vec<Partial>,
    outs: Vec<f32>,
}
