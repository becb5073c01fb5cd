//! Operations on residuals of several streams, and on what tables of n-grams give (formulas:
//! [`HyperSpec`](nq_model::HyperSpec), [`NgramsSpec`](nq_model::NgramsSpec)).

use super::SMALL;
use crate::Cpu;

/// Elements of a task.
const PIECE: usize = 512;

/// `1 / (1 + e^-x)`
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

impl Cpu {
    /// RMSNorm of each stream by itself: `x` and `y` are `[m, streams, width]`, `gains` `[streams, width]`.
    pub(crate) fn stream_norm(
        &self,
        x: &[f32],
        gains: &[f32],
        width: usize,
        eps: f32,
        y: &mut [f32],
    ) {
        assert_eq!(x.len(), y.len(), "stream_norm: x and y");
        let streams = gains.len() / width;
        self.team().run_chunks(y, width, |i, y| {
            let gains = &gains[i % streams * width..][..width];
            (self.table.rms_norm)(&x[i * width..][..width], gains, eps, y);
        });
    }

    /// The means over the streams `n` `[m, streams, width]` of each, times the sigmoid of `gates`, of the same shape:
    /// `[m, width]`.
    pub(crate) fn mix_streams(&self, n: &[f32], gates: &[f32], width: usize, out: &mut [f32]) {
        assert_eq!(n.len(), gates.len(), "mix_streams: n and gates");
        let streams = n.len() / out.len().max(1);
        self.team().run_chunks(out, PIECE, |piece, out| {
            for (i, out) in (piece * PIECE..).zip(out) {
                let first = i / width * streams * width + i % width;
                let of_stream = |s: usize| {
                    let at = first + s * width;
                    n[at] * sigmoid(gates[at])
                };
                *out = (0..streams).map(of_stream).sum::<f32>() / streams as f32;
            }
        });
    }

    /// Adds `y` `[m, width]` to each stream of `x` `[m, streams, width]`, times its one of `weights` `[m, streams]`.
    pub(crate) fn inject(&self, y: &[f32], weights: &[f32], width: usize, x: &mut [f32]) {
        let streams = x.len() / y.len().max(1);
        self.team().run_chunks(x, width, |i, x| {
            let y = &y[i / streams * width..][..width];
            let add = |(x, y): (&mut f32, &f32)| *x += weights[i] * y;
            x.iter_mut().zip(y).for_each(add);
        });
    }

    /// Of each stream's key and query, both normalized `[m, streams, width]`, the gate of its value, times the value
    /// `[m, width]`: `out` `[m, streams, width]`.
    pub(crate) fn gate_ngrams(
        &self,
        keys: &[f32],
        queries: &[f32],
        values: &[f32],
        width: usize,
        out: &mut [f32],
    ) {
        let streams = out.len() / values.len().max(1);
        self.team().run_chunks(out, width, |i, out| {
            let row = i * width..(i + 1) * width;
            let score = dot(&keys[row.clone()], &queries[row]) / (width as f32).sqrt();
            // The sign of 0 is 0.
            let sign = if score == 0.0 { 0.0 } else { score.signum() };
            let gate = sigmoid(sign * score.abs().max(1e-6).sqrt());
            let values = &values[i / streams * width..][..width];
            out.iter_mut().zip(values).for_each(|(o, v)| *o = gate * v);
        });
    }

    /// Adds to each row of `x` `[m, width]` the same row of `gated`, and SiLU of a causal convolution of each channel with
    /// `taps` `[width, n]` over `window` `[(n - 1) dilation + m, width]`, whose last rows are those of `x`.
    pub(crate) fn convolve_ngrams(
        &self,
        window: &[f32],
        taps: &[f32],
        dilation: usize,
        gated: &[f32],
        (width, x): (usize, &mut [f32]),
    ) {
        let n = taps.len() / width;
        assert_eq!(window.len(), x.len() + (n - 1) * dilation * width);
        self.team().run_chunks(x, width, |r, x| {
            for (channel, x) in x.iter_mut().enumerate() {
                let at = |tap: usize| window[(r + tap * dilation) * width + channel];
                let sum: f32 = (0..n).map(|tap| taps[channel * n + tap] * at(tap)).sum();
                *x += gated[r * width + channel] + silu(sum);
            }
        });
    }

    /// The scores of an indexer's blocks: of each key that `key` gives, the sum over the heads of `queries`
    /// `[heads, width]` of the greater of 0 and query times key, by the root of `width`.
    pub(crate) fn index_scores<'k>(
        &self,
        queries: &[f32],
        width: usize,
        key: impl Fn(usize) -> &'k [f32] + Sync + Send,
        scores: &mut [f32],
    ) {
        const BLOCKS: usize = 64;
        let scale = (width as f32).sqrt().recip();
        let grain = if scores.len() * queries.len() < SMALL {
            scores.len()
        } else {
            BLOCKS
        };
        self.team().run_chunks(scores, grain, |piece, scores| {
            for (block, score) in (piece * grain.max(1)..).zip(scores) {
                let key = key(block);
                let of_head = |q: &[f32]| dot(q, key).max(0.0);
                *score = queries.chunks_exact(width).map(of_head).sum::<f32>() * scale;
            }
        });
    }
}

/// The sum of products, in sixteen lanes that are added up at the end.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, rest), (b, others)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut lanes = [0.0; 16];
    for (a, b) in a.iter().zip(b) {
        for i in 0..16 {
            lanes[i] += a[i] * b[i];
        }
    }
    let tail = rest.iter().zip(others).map(|(a, b)| a * b).sum::<f32>();
    lanes.iter().sum::<f32>() + tail
}

/// In place, what the first matrix gives of streams becomes the input of the second: SiLU of a mean.
pub(crate) fn activate(low: &mut [f32], streams: usize) {
    low.iter_mut().for_each(|v| *v = silu(*v / streams as f32));
}

/// In place, what `inject` gives of streams becomes their weights.
pub(crate) fn weigh(inject: &mut [f32], streams: usize) {
    let weight = |v: &mut f32| *v = 2.0 * sigmoid(*v / streams as f32);
    inject.iter_mut().for_each(weight);
}
