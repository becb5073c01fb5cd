//! Gated DeltaNet (Yang et al., [arXiv 2412.06464](https://arxiv.org/abs/2412.06464)).
//!
//! A sequence has a matrix `S` `[key_dim, value_dim]` per value head. A token with key `k`, query `q` (both of
//! length 1 before `q` is divided by the root of `key_dim`), value `v`, decay `g` and gate `beta` makes
//!
//! ```text
//! S = g S;  S = S + k (beta (v - S^T k))^T;  o = S^T q
//! ```
//!
//! Columns of `S` do not depend on each other: a tile of 16 columns stays in the first-level cache for a block of
//! tokens, which go through it one by one, also in a long prompt. A result then has the same bits however a sequence
//! is cut into passes. The tile is read and written once per token, since
//! the update for one token also multiplies by the key of the next.

use super::delta_kernels::{BLOCK, TileRows};
use super::streams::sigmoid;
use super::{SMALL, Span};
use crate::memory::{Buffer, SharedSlice};
use crate::simd::LANES;
use crate::{Cpu, with_scratch};
use nq_kernels::delta::DeltaShape;
use nq_model::{Dims, OutputGate};

/// Number of f32 values of a sequence's state in one layer: the matrices, as tiles `[value_heads,
/// value_dim / 16 rounded up, key_dim, 16]`, then the last inputs of the convolution
/// `[conv - 1, channels]`.
pub fn state_len(shape: &DeltaShape) -> usize {
    matrices_len(shape) + shape.conv.saturating_sub(1) * shape.channels()
}

/// Number of tiles of a head's matrix.
fn tiles(shape: &DeltaShape) -> usize {
    shape.value_dim.div_ceil(LANES)
}

fn tile_len(shape: &DeltaShape) -> usize {
    shape.key_dim * LANES
}

fn matrices_len(shape: &DeltaShape) -> usize {
    shape.value_heads * tiles(shape) * tile_len(shape)
}

/// The vectors of a gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaVectors<'a> {
    /// Weights of the convolution `[channels, conv]`, that of the current token last.
    pub conv: &'a [f32],
    /// `-exp(A_log)` `[value_heads]`.
    pub decay: &'a [f32],
    /// Added to the projection `a` `[value_heads]`.
    pub dt_bias: &'a [f32],
    /// Gains of the norm of each head's output `[value_dim]`.
    pub norm: &'a [f32],
    /// The function of `z` that each head's output is multiplied by.
    pub gate: OutputGate,
}

/// The projections of the rows of a pass.
pub struct DeltaRows<'a> {
    /// `[m, channels + values]`: queries, keys and values, and the gate `z` of the output. Queries,
    /// keys and values are replaced by those after the convolution and the norms.
    pub qkvz: &'a mut [f32],
    /// `[m, 2 value_heads]`: `b`, of which the gate `beta` is the sigmoid, and `a`, which sets the decay.
    pub ba: &'a [f32],
}

impl Cpu {
    /// Runs the rows of each span, in order, from and to the state of the span's sequence (`states`,
    /// one per span, of [`state_len`] values; zeros for a new sequence). `out` is
    /// `[m, values]`: each head's output after RMSNorm, times the gate of `z`. Rows outside all spans are not
    /// changed.
    ///
    /// Every row has the same bits for any number of threads and any cut of its sequence into spans.
    ///
    /// # Panics
    /// If a length is not that of the shape, if key heads do not divide value heads, or if spans overlap
    /// or are not in order.
    #[allow(clippy::too_many_arguments, reason = "one flat description of a pass")]
    pub fn delta(
        &self,
        shape: &DeltaShape,
        vectors: &DeltaVectors<'_>,
        rows: DeltaRows<'_>,
        spans: &[Span],
        states: &mut [&mut [f32]],
        eps: f32,
        out: &mut [f32],
    ) {
        check(shape, vectors, &rows, spans, states, out);
        let begin = self.profile.begin();
        let DeltaRows { qkvz, ba } = rows;
        let states: Vec<SharedSlice<'_, f32>> =
            states.iter_mut().map(|s| SharedSlice::new(s)).collect();
        let pass = DeltaPass {
            cpu: self,
            shape,
            vectors,
            spans,
            states: &states,
            m: out.len() / shape.values(),
        };
        with_scratch!(Buffer<f32>, |gates| {
            let gates = gates.reserve(2 * shape.value_heads * pass.m);
            pass.prepare(qkvz, ba, gates);
            pass.recur(qkvz, gates, out);
        });
        pass.gate(qkvz, eps, out);
        let bytes = size_of::<f32>() * state_len(shape) * spans.len();
        let heads = Dims::new(shape.value_heads, shape.value_dim);
        self.profile
            .end(begin, "delta", self.isa.name(), heads, bytes);
    }
}

/// What the steps of a pass share.
struct DeltaPass<'a> {
    cpu: &'a Cpu,
    shape: &'a DeltaShape,
    vectors: &'a DeltaVectors<'a>,
    spans: &'a [Span],
    states: &'a [SharedSlice<'a, f32>],
    /// Number of rows.
    m: usize,
}

impl DeltaPass<'_> {
    /// Runs `f(span, state, task)` for `each` tasks of every span, which have `values` values per row.
    fn run(
        &self,
        each: usize,
        values: usize,
        f: impl Fn(Span, &SharedSlice<'_, f32>, usize) + Sync + Send,
    ) {
        let rows = self.spans.iter().map(|s| s.len).min().unwrap_or(1);
        let grain = SMALL.div_ceil((values * rows).max(1));
        let tasks = self.spans.len() * each;
        self.cpu.team().run_ranges(tasks, grain, |tasks| {
            for task in tasks {
                let i = task / each;
                f(self.spans[i], &self.states[i], task % each);
            }
        });
    }

    /// Convolution, SiLU and norms of queries and keys, in place, and the gates, decay and beta,
    /// `[value_heads, m, 2]`. A task is a key head (its queries and keys) or a value head of a span.
    fn prepare(&self, qkvz: &mut [f32], ba: &[f32], gates: &mut [f32]) {
        let (shape, vectors) = (self.shape, self.vectors);
        let DeltaShape {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            conv,
            tiled: _,
        } = *shape;
        let qkvz = SharedSlice::new(qkvz);
        let gates = SharedSlice::new(gates);
        self.run(
            key_heads + value_heads,
            conv * key_dim,
            |span, state, head| {
                let convolve = |first, n, length| {
                    self.convolve(&qkvz, span, state, Channels { first, n, length });
                };
                if head < key_heads {
                    let first = head * key_dim;
                    convolve(first, key_dim, Some((key_dim as f32).sqrt().recip()));
                    convolve(shape.keys() + first, key_dim, Some(1.0));
                    return;
                }
                let h = head - key_heads;
                convolve(2 * shape.keys() + h * value_dim, value_dim, None);
                let from = 2 * (h * self.m + span.row);
                // SAFETY: each row of a value head has one task.
                let gates = unsafe { gates.part(from..from + 2 * span.len) };
                let ba = ba.chunks_exact(2 * value_heads).skip(span.row);
                for (gates, ba) in gates.chunks_exact_mut(2).zip(ba) {
                    let (b, a) = (ba[h], ba[value_heads + h]);
                    gates[0] = (vectors.decay[h] * softplus(a + vectors.dt_bias[h])).exp();
                    gates[1] = 1.0 / (1.0 + (-b).exp());
                }
            },
        );
    }

    /// Convolution, SiLU and, for queries and keys, the norm of some channels of a span's rows; the
    /// state's last inputs of these channels are replaced.
    fn convolve(
        &self,
        qkvz: &SharedSlice<'_, f32>,
        span: Span,
        state: &SharedSlice<'_, f32>,
        Channels { first, n, length }: Channels,
    ) {
        let (shape, conv) = (self.shape, self.shape.conv);
        let weights = &self.vectors.conv[first * conv..][..n * conv];
        // Whole vectors, whose last lanes are zeros: the kernel needs no tails.
        let width = n.next_multiple_of(LANES);
        with_scratch!(Buffer<f32>, |scratch| {
            let scratch = scratch.reserve((2 * conv + 1) * width);
            scratch.fill(0.0);
            let (taps, scratch) = scratch.split_at_mut(conv * width);
            let (window, y) = scratch.split_at_mut(conv * width);
            transpose(weights, conv, taps, width);
            let last = |j: usize| {
                let from = matrices_len(shape) + j * shape.channels() + first;
                // SAFETY: each channel of a state has one task, which holds one part at a time.
                unsafe { state.part(from..from + n) }
            };
            for j in 0..conv - 1 {
                window[(j + 1) * width..][..n].copy_from_slice(last(j));
            }
            for r in span.row..span.row + span.len {
                let from = r * shape.stride() + first;
                // SAFETY: each channel of a row has one task.
                let row = unsafe { qkvz.part(from..from + n) };
                window.copy_within(width.., 0);
                window[(conv - 1) * width..][..n].copy_from_slice(row);
                (self.cpu.table.delta_conv)(window, taps, length, y);
                row.copy_from_slice(&y[..n]);
            }
            for j in 0..conv - 1 {
                last(j).copy_from_slice(&window[(j + 1) * width..][..n]);
            }
        });
    }

    /// The recurrence. A task is a value head of a span, whose tiles take a block of rows in turn.
    fn recur(&self, qkvz: &[f32], gates: &[f32], out: &mut [f32]) {
        let shape = self.shape;
        let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
        let (tiles, tile_len) = (tiles(shape), tile_len(shape));
        let out = SharedSlice::new(out);
        let each = tiles * tile_len;
        self.run(shape.value_heads, each, |span, state, h| {
            let q = shape.key_head(h) * key_dim;
            let (k, v) = (shape.keys() + q, 2 * shape.keys() + h * value_dim);
            // SAFETY: each head of a state has one task.
            let state = unsafe { state.part(h * each..(h + 1) * each) };
            with_scratch!(Buffer<f32>, |scratch| {
                let width = 2 * key_dim + value_dim;
                for first in (0..span.len).step_by(BLOCK) {
                    let len = BLOCK.min(span.len - first);
                    let block = scratch.reserve(BLOCK * width);
                    for (r, to) in block.chunks_exact_mut(width).take(len).enumerate() {
                        let row = &qkvz[(span.row + first + r) * shape.stride()..];
                        to[..key_dim].copy_from_slice(&row[q..][..key_dim]);
                        to[key_dim..2 * key_dim].copy_from_slice(&row[k..][..key_dim]);
                        to[2 * key_dim..].copy_from_slice(&row[v..][..value_dim]);
                    }
                    let gates = &gates[2 * (h * self.m + span.row + first)..][..2 * len];
                    for (tile, state) in state.chunks_exact_mut(tile_len).enumerate() {
                        let column = tile * LANES;
                        let rows = TileRows {
                            block: &*block,
                            key_dim,
                            width,
                            column,
                            values: LANES.min(value_dim - column),
                            gates: gates.as_chunks().0,
                        };
                        let from = (span.row + first) * shape.values() + h * value_dim + column;
                        let put = |r: usize, o: &[f32; LANES]| {
                            let from = from + r * shape.values();
                            // SAFETY: each head of a row has one task.
                            let y = unsafe { out.part(from..from + rows.values) };
                            y.copy_from_slice(&o[..rows.values]);
                        };
                        (self.cpu.table.delta_tile)(state, &rows, &put);
                    }
                }
            });
        });
    }

    /// RMSNorm of each head's output, times the gate of `z`. A task is a value head of a span.
    fn gate(&self, qkvz: &[f32], eps: f32, out: &mut [f32]) {
        let (shape, d) = (self.shape, self.shape.value_dim);
        let out = SharedSlice::new(out);
        self.run(shape.value_heads, 2 * d, |span, _, h| {
            for r in span.row..span.row + span.len {
                let z = &qkvz[r * shape.stride() + shape.channels() + h * d..][..d];
                let from = r * shape.values() + h * d;
                // SAFETY: each head of a row has one task.
                let y = unsafe { out.part(from..from + d) };
                match self.vectors.gate {
                    OutputGate::Silu => {
                        (self.cpu.table.delta_gate)(y, self.vectors.norm, z, eps);
                    }
                    OutputGate::Sigmoid => gate_by_sigmoid(y, self.vectors.norm, z, eps),
                }
            }
        });
    }
}

/// RMSNorm of `y` with `gains`, times `sigmoid(z)`, in place.
fn gate_by_sigmoid(y: &mut [f32], gains: &[f32], z: &[f32], eps: f32) {
    let square = y.iter().map(|v| v * v).sum::<f32>() / y.len() as f32;
    let inverse = (square + eps).sqrt().recip();
    for ((y, gain), z) in y.iter_mut().zip(gains).zip(z) {
        *y *= inverse * gain * sigmoid(*z);
    }
}

fn check(
    shape: &DeltaShape,
    vectors: &DeltaVectors<'_>,
    rows: &DeltaRows<'_>,
    spans: &[Span],
    states: &[&mut [f32]],
    out: &[f32],
) {
    let heads = shape.value_heads;
    assert!(shape.keys() > 0 && shape.values() > 0 && shape.conv > 0);
    assert!(heads.is_multiple_of(shape.key_heads), "delta: heads");
    assert_eq!(vectors.conv.len(), shape.channels() * shape.conv);
    assert_eq!([vectors.decay.len(), vectors.dt_bias.len()], [heads; 2]);
    assert_eq!(vectors.norm.len(), shape.value_dim);
    let m = out.len() / shape.values();
    assert_eq!(out.len(), m * shape.values(), "delta: out");
    assert_eq!(rows.qkvz.len(), m * shape.stride(), "delta: qkvz");
    assert_eq!(rows.ba.len(), m * 2 * heads, "delta: ba");
    let ordered = |s: &[Span]| s[0].row + s[0].len <= s[1].row;
    assert!(spans.windows(2).all(ordered), "delta: spans");
    assert!(spans.last().is_none_or(|s| s.row + s.len <= m));
    assert_eq!(spans.len(), states.len(), "delta: states");
    assert!(states.iter().all(|s| s.len() == state_len(shape)));
}

/// `ln(1 + e^x)`; from 20 on `x`, as the models were trained with.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Writes `weights` `[n, conv]` as `taps` `[conv, width]`.
fn transpose(weights: &[f32], conv: usize, taps: &mut [f32], width: usize) {
    // The usual width, known to the compiler, becomes shuffles.
    if let (4, (rows, _)) = (conv, weights.as_chunks::<4>()) {
        let (a, taps) = taps.split_at_mut(width);
        let (b, taps) = taps.split_at_mut(width);
        let (c, d) = taps.split_at_mut(width);
        for ((((row, a), b), c), d) in rows.iter().zip(a).zip(b).zip(c).zip(d) {
            [*a, *b, *c, *d] = *row;
        }
        return;
    }
    for (i, row) in weights.chunks_exact(conv).enumerate() {
        for (j, &w) in row.iter().enumerate() {
            taps[j * width + i] = w;
        }
    }
}

/// Channels that are convolved together: a head of queries, keys or values.
struct Channels {
    first: usize,
    n: usize,
    /// Length that the head gets; `None`: its own.
    length: Option<f32>,
}
