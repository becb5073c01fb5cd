//! Gated DeltaNets, token by token as their formulas say.

use nq_kernels::Result;
use nq_kernels::grad::{DeltaInputs, enough};
use rayon::prelude::*;

/// Added to the sum of squares of a query or a key before the root.
const UNIT_EPS: f32 = 1e-6;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// [`LayerOps::delta`](nq_kernels::grad::LayerOps::delta).
pub(super) fn run(inputs: &DeltaInputs<'_, Vec<f32>>, out: &mut [f32]) -> Result<()> {
    let (s, rows) = (&inputs.shape, inputs.rows());
    let stride = s.channels() + s.values();
    for (what, expected, found) in [
        ("qkvz", rows * stride, inputs.qkvz.len()),
        ("rates", rows * 2 * s.value_heads, inputs.ba.len()),
        ("convolution", s.channels() * s.conv, inputs.conv.len()),
        ("decay", s.value_heads, inputs.decay.len()),
        ("biases of time steps", s.value_heads, inputs.dt_bias.len()),
        ("gain", s.value_dim, inputs.norm.len()),
        ("output", rows * s.values(), out.len()),
    ] {
        enough("delta", what, expected, found)?;
    }
    let heads = (0..inputs.batch * s.value_heads).into_par_iter();
    let heads: Vec<_> = heads
        .map(|i| head(inputs, i / s.value_heads, i % s.value_heads))
        .collect();
    for (i, head) in heads.iter().enumerate() {
        let (sequence, h) = (i / s.value_heads, i % s.value_heads);
        for (t, values) in head.chunks_exact(s.value_dim).enumerate() {
            let at = (sequence * inputs.seq + t) * s.values() + h * s.value_dim;
            out[at..at + s.value_dim].copy_from_slice(values);
        }
    }
    Ok(())
}

/// The outputs of a value head of a sequence, `[seq, value_dim]`.
fn head(inputs: &DeltaInputs<'_, Vec<f32>>, sequence: usize, h: usize) -> Vec<f32> {
    let s = &inputs.shape;
    let (stride, d) = (s.channels() + s.values(), s.value_dim);
    let key = s.key_head(h) * s.key_dim;
    let value = 2 * s.keys() + h * d;
    let row = |t: usize| &inputs.qkvz[(sequence * inputs.seq + t) * stride..][..stride];
    // Channels `first ..` of token `t` after the convolution and SiLU.
    let mixed = |t: usize, first: usize, n: usize| -> Vec<f32> {
        let channel = |c: usize| {
            let tap = |j: usize| (t + j + 1).checked_sub(s.conv).map_or(0.0, |t| row(t)[c]);
            let taps = inputs.conv[c * s.conv..][..s.conv].iter().enumerate();
            let x: f32 = taps.map(|(j, w)| w * tap(j)).sum();
            x * sigmoid(x)
        };
        (first..first + n).map(channel).collect()
    };
    let unit = |t: usize, first: usize, length: f32| -> Vec<f32> {
        let x = mixed(t, first, s.key_dim);
        let scale = length / (x.iter().map(|x| x * x).sum::<f32>() + UNIT_EPS).sqrt();
        x.into_iter().map(|x| x * scale).collect()
    };
    let mut state = vec![0.0; s.key_dim * d];
    let mut out = Vec::with_capacity(inputs.seq * d);
    for t in 0..inputs.seq {
        let q = unit(t, key, (s.key_dim as f32).sqrt().recip());
        let k = unit(t, s.keys() + key, 1.0);
        let mut delta = mixed(t, value, d);
        let ba = &inputs.ba[(sequence * inputs.seq + t) * 2 * s.value_heads..];
        let step = ba[s.value_heads + h] + inputs.dt_bias[h];
        let step = if step > 20.0 {
            step
        } else {
            step.exp().ln_1p()
        };
        let (decay, beta) = ((inputs.decay[h] * step).exp(), sigmoid(ba[h]));
        for (state, k) in state.chunks_exact_mut(d).zip(&k) {
            for (s, delta) in state.iter_mut().zip(&mut delta) {
                *s *= decay;
                *delta -= *s * k;
            }
        }
        let mut o = vec![0.0; d];
        for ((state, k), q) in state.chunks_exact_mut(d).zip(&k).zip(&q) {
            for ((s, delta), o) in state.iter_mut().zip(&delta).zip(&mut o) {
                *s += k * beta * delta;
                *o += *s * q;
            }
        }
        let inv = super::rows::inverse_rms(&o, inputs.eps);
        let z = &row(t)[s.channels() + h * d..][..d];
        let gated = o.iter().zip(&inputs.norm[..d]).zip(z);
        out.extend(gated.map(|((o, gain), z)| o * inv * gain * z * sigmoid(*z)));
    }
    out
}
