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

use super::{SMALL, Span};
use crate::cpu::memory::{Buffer, SharedSlice};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::{Cpu, with_scratch};

/// Added to the sum of squares of a query or a key before the root.
const UNIT_EPS: f32 = 1e-6;

/// Shape of a gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Number of heads of queries and keys; divides `value_heads`.
    pub key_heads: usize,
    /// Number of heads of values, each with a state.
    pub value_heads: usize,
    /// Width of a query or a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Width of the causal convolution, at least 1.
    pub conv: usize,
    /// True if value head `h` uses key head `h % key_heads`; otherwise the value heads of a key head are
    /// neighbours.
    pub tiled: bool,
}

impl DeltaShape {
    /// Width of all keys of a token.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values of a token.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Number of channels that the convolution runs over: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Number of f32 values of a sequence's state in one layer: the matrices, as tiles `[value_heads,
    /// value_dim / 16 rounded up, key_dim, 16]`, then the last inputs of the convolution
    /// `[conv - 1, channels]`.
    pub fn state_len(&self) -> usize {
        self.matrices_len() + self.conv.saturating_sub(1) * self.channels()
    }

    /// The key head that a value head uses.
    pub(crate) fn key_head(&self, value_head: usize) -> usize {
        match self.tiled {
            true => value_head % self.key_heads,
            false => value_head / (self.value_heads / self.key_heads),
        }
    }

    /// Number of tiles of a head's matrix.
    fn tiles(&self) -> usize {
        self.value_dim.div_ceil(LANES)
    }

    fn tile_len(&self) -> usize {
        self.key_dim * LANES
    }

    fn matrices_len(&self) -> usize {
        self.value_heads * self.tiles() * self.tile_len()
    }

    /// Values in a row of [`DeltaRows::qkvz`].
    fn stride(&self) -> usize {
        self.channels() + self.values()
    }
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
    /// one per span, of [`DeltaShape::state_len`] values; zeros for a new sequence). `out` is
    /// `[m, values]`: each head's output after RMSNorm, times `silu(z)`. Rows outside all spans are not
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
        let bytes = size_of::<f32>() * shape.state_len() * spans.len();
        let heads = (shape.value_heads, shape.value_dim);
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
                let from = shape.matrices_len() + j * shape.channels() + first;
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
        let (tiles, tile_len) = (shape.tiles(), shape.tile_len());
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

    /// RMSNorm of each head's output, times `silu(z)`. A task is a value head of a span.
    fn gate(&self, qkvz: &[f32], eps: f32, out: &mut [f32]) {
        let (shape, d) = (self.shape, self.shape.value_dim);
        let out = SharedSlice::new(out);
        self.run(shape.value_heads, 2 * d, |span, _, h| {
            for r in span.row..span.row + span.len {
                let z = &qkvz[r * shape.stride() + shape.channels() + h * d..][..d];
                let from = r * shape.values() + h * d;
                // SAFETY: each head of a row has one task.
                let y = unsafe { out.part(from..from + d) };
                (self.cpu.table.delta_gate)(y, self.vectors.norm, z, eps);
            }
        });
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
    assert!(states.iter().all(|s| s.len() == shape.state_len()));
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

/// `y = silu(sum over j of window[j] * taps[j])`, scaled to `length` if there is one. `window` and
/// `taps` are `[conv, n]`, `y` `[n]`; `n` is a multiple of 16.
#[inline(always)]
pub(crate) fn conv<S: Simd>(
    s: S,
    window: &[f32],
    taps: &[f32],
    length: Option<f32>,
    y: &mut [f32],
) {
    let n = y.len() / LANES;
    let (window, _) = window.as_chunks::<LANES>();
    let (taps, _) = taps.as_chunks::<LANES>();
    let (y, _) = y.as_chunks_mut::<LANES>();
    let mut squares = s.splat(0.0);
    for (i, y) in y.iter_mut().enumerate() {
        let mut acc = s.splat(0.0);
        let columns = window[i..].iter().step_by(n);
        for (x, w) in columns.zip(taps[i..].iter().step_by(n)) {
            // SAFETY: arrays of 16.
            acc = unsafe { s.fma(s.load(x.as_ptr()), s.load(w.as_ptr()), acc) };
        }
        let v = s.silu_mul(acc, s.splat(1.0));
        squares = s.fma(v, v, squares);
        // SAFETY: an array of 16.
        unsafe { s.store(y.as_mut_ptr(), v) };
    }
    let Some(length) = length else { return };
    let scale = s.splat(length / (s.sum(squares) + UNIT_EPS).sqrt());
    for y in y {
        // SAFETY: an array of 16.
        unsafe { s.store(y.as_mut_ptr(), s.mul(s.load(y.as_ptr()), scale)) };
    }
}

/// Rows whose queries, keys and values of a head are copied side by side before its tiles read them: in the
/// rows of a pass they are far apart, often by a power of two, where they would push each other out of the caches.
const BLOCK: usize = 32;

/// What a tile reads: a block of rows, and the tile's values in each.
pub(crate) struct TileRows<'a> {
    /// `[rows, width]`: a query, a key and the values of the head.
    block: &'a [f32],
    key_dim: usize,
    width: usize,
    /// The first of the tile's values.
    column: usize,
    /// Number of the tile's values, at most 16.
    values: usize,
    /// Decay and beta of each row.
    gates: &'a [[f32; 2]],
}

impl TileRows<'_> {
    #[inline(always)]
    fn query(&self, r: usize) -> &[f32] {
        &self.block[r * self.width..][..self.key_dim]
    }

    #[inline(always)]
    fn key(&self, r: usize) -> &[f32] {
        &self.block[r * self.width + self.key_dim..][..self.key_dim]
    }

    #[inline(always)]
    fn values(&self, r: usize) -> &[f32] {
        &self.block[r * self.width + 2 * self.key_dim + self.column..][..self.values]
    }
}

/// Rows of a span through one tile `[key_dim, 16]` of its state; `put(r, o)` takes the outputs of row
/// `r`.
#[inline(always)]
pub(crate) fn tile<S: Simd>(
    s: S,
    tile: &mut [f32],
    rows: &TileRows<'_>,
    put: &dyn Fn(usize, &[f32; LANES]),
) {
    let (tile, _) = tile.as_chunks_mut::<LANES>();
    let len = rows.gates.len();
    if len == 0 {
        return;
    }
    let mut product = times(s, tile, rows.key(0));
    for (r, &[decay, beta]) in rows.gates.iter().enumerate() {
        let mut values = [0.0; LANES];
        values[..rows.values].copy_from_slice(rows.values(r));
        // SAFETY: an array of 16.
        let v = unsafe { s.load(values.as_ptr()) };
        let decay = s.splat(decay);
        let delta = s.mul(s.splat(beta), s.sub(v, s.mul(decay, product)));
        let (q, k) = (rows.query(r), rows.key(r));
        let o;
        if r + 1 < len {
            let next = rows.key(r + 1);
            (o, product) = update::<S, true>(s, tile, decay, delta, k, q, next);
        } else {
            (o, _) = update::<S, false>(s, tile, decay, delta, k, q, k);
        }
        // SAFETY: an array of 16.
        unsafe { s.store(values.as_mut_ptr(), o) };
        put(r, &values);
    }
}

/// `tile^T k`, in the order of [`update`].
#[inline(always)]
fn times<S: Simd>(s: S, tile: &[[f32; LANES]], k: &[f32]) -> S::F {
    let (twos, rest) = tile.as_chunks::<2>();
    let (keys, last) = k[..tile.len()].as_chunks::<2>();
    let mut acc = [s.splat(0.0); 2];
    for (lines, k) in twos.iter().zip(keys) {
        for j in 0..2 {
            // SAFETY: an array of 16.
            let line = unsafe { s.load(lines[j].as_ptr()) };
            acc[j] = s.fma(line, s.splat(k[j]), acc[j]);
        }
    }
    for (line, &k) in rest.iter().zip(last) {
        // SAFETY: an array of 16.
        let line = unsafe { s.load(line.as_ptr()) };
        acc[0] = s.fma(line, s.splat(k), acc[0]);
    }
    s.add(acc[0], acc[1])
}

/// `tile = decay tile + k delta^T`; then `tile^T q` and, if there is `MORE`, `tile^T next`.
#[inline(always)]
fn update<S: Simd, const MORE: bool>(
    s: S,
    tile: &mut [[f32; LANES]],
    decay: S::F,
    delta: S::F,
    k: &[f32],
    q: &[f32],
    next: &[f32],
) -> (S::F, S::F) {
    let n = tile.len();
    let mut sums = [[s.splat(0.0); 2]; 2];
    let (twos, rest) = tile.as_chunks_mut::<2>();
    let (keys, last_key) = k[..n].as_chunks::<2>();
    let (queries, last_query) = q[..n].as_chunks::<2>();
    let (nexts, last_next) = next[..n].as_chunks::<2>();
    for (((lines, k), q), next) in twos.iter_mut().zip(keys).zip(queries).zip(nexts) {
        let ([a, b], [first, second]) = (lines, sums);
        let by = (decay, delta);
        sums = [
            update_line::<S, MORE>(s, a, by, [k[0], q[0], next[0]], first),
            update_line::<S, MORE>(s, b, by, [k[1], q[1], next[1]], second),
        ];
    }
    for (((line, &k), &q), &next) in rest.iter_mut().zip(last_key).zip(last_query).zip(last_next) {
        sums[0] = update_line::<S, MORE>(s, line, (decay, delta), [k, q, next], sums[0]);
    }
    let [[o, product], [other_o, other_product]] = sums;
    (s.add(o, other_o), s.add(product, other_product))
}

/// A line of [`update`], which adds to the sums. A function and not a closure: a closure may become a call,
/// which then runs without the instructions that its caller enables.
#[inline(always)]
fn update_line<S: Simd, const MORE: bool>(
    s: S,
    line: &mut [f32; LANES],
    (decay, delta): (S::F, S::F),
    [k, q, next]: [f32; 3],
    [o, product]: [S::F; 2],
) -> [S::F; 2] {
    // SAFETY: an array of 16.
    let old = unsafe { s.load(line.as_ptr()) };
    let new = s.fma(s.splat(k), delta, s.mul(decay, old));
    // SAFETY: an array of 16.
    unsafe { s.store(line.as_mut_ptr(), new) };
    let o = s.fma(new, s.splat(q), o);
    let product = if MORE {
        s.fma(new, s.splat(next), product)
    } else {
        product
    };
    [o, product]
}

/// `y = rms_norm(y) * silu(z)`, all of one length.
#[inline(always)]
pub(crate) fn gate<S: Simd>(s: S, y: &mut [f32], norm: &[f32], z: &[f32], eps: f32) {
    let scale = super::rows::rms_scale(s, y, eps);
    let (whole, rest) = y.as_chunks_mut::<LANES>();
    let (norms, norm_rest) = norm.as_chunks::<LANES>();
    let (zs, z_rest) = z.as_chunks::<LANES>();
    for ((y, w), z) in whole.iter_mut().zip(norms).zip(zs) {
        gate_line(s, y, w, z, scale);
    }
    if !rest.is_empty() {
        let [mut last, mut w, mut z] = [[0.0; LANES]; 3];
        last[..rest.len()].copy_from_slice(rest);
        w[..rest.len()].copy_from_slice(norm_rest);
        z[..rest.len()].copy_from_slice(z_rest);
        gate_line(s, &mut last, &w, &z, scale);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// 16 values of [`gate`].
#[inline(always)]
fn gate_line<S: Simd>(s: S, y: &mut [f32; LANES], w: &[f32; LANES], z: &[f32; LANES], scale: f32) {
    // SAFETY: arrays of 16.
    unsafe {
        let v = s.mul(s.load(y.as_ptr()), s.splat(scale));
        let v = s.mul(v, s.load(w.as_ptr()));
        s.store(y.as_mut_ptr(), s.silu_mul(s.load(z.as_ptr()), v));
    }
}
