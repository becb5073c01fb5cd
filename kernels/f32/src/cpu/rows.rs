//! Work on one row, head or group of values, compiled for several instruction sets: the best that the machine
//! has runs.

use super::lanes::{dot, log_sum_exp, sigmoid, sum, sum2, sum3};
use nq_kernels::grad::Adam;
use nq_kernels::math::{exp, nearest};

/// Functions that are compiled for each of these sets besides the baseline. What they call must be
/// `#[inline(always)]`, as only code within them is compiled so.
macro_rules! vectorized {
    ($($function:item)*) => {$(
        #[multiversion::multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
            "x86_64+avx2+fma",
        ))]
        $function
    )*};
}

/// `1 / sqrt(mean(x^2) + eps)`
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    (1.0 / (square_norm(x) / x.len() as f64 + f64::from(eps)).sqrt()) as f32
}

/// The code less the zero-point, the value before that was clamped and rounded, and 1 if it is within the
/// codes' range, else 0.
#[inline(always)]
fn rounded(latent: f32, group: RoundingGroup) -> (f32, f32, f32) {
    let v = latent / group.scale;
    let clamped = v.clamp(-group.zero, group.max - group.zero);
    let inside = if v == clamped { 1.0 } else { 0.0 };
    (nearest(clamped), v, inside)
}

/// How a group of weights is rounded.
#[derive(Clone, Copy)]
pub(super) struct RoundingGroup {
    /// Scale as stored; not 0 where values are rounded.
    pub scale: f32,
    /// Zero-point.
    pub zero: f32,
    /// Greatest code.
    pub max: f32,
}

vectorized! {
    fn square_norm(x: &[f32]) -> f64 {
        sum(x, |v| v * v)
    }

    /// `y = x inv gain`
    pub(super) fn norm(x: &[f32], gain: &[f32], inv: f32, y: &mut [f32]) {
        for ((y, x), g) in y.iter_mut().zip(x).zip(gain) {
            *y = x * inv * g;
        }
    }

    /// The gradient of `y = x inv gain`: sets `dx` to, or adds to it, `inv (t - xhat mean(t xhat))` with
    /// `t = dy gain` and `xhat = x inv`, and adds to `dgain`.
    pub(super) fn norm_grad(
        x: &[f32],
        gain: &[f32],
        inv: f32,
        dy: &[f32],
        dgain: &mut [f32],
        dx: &mut [f32],
        add: bool,
    ) {
        for ((dgain, dy), x) in dgain.iter_mut().zip(dy).zip(x) {
            *dgain += dy * (x * inv);
        }
        let total = sum3(dy, gain, x, |dy, gain, x| dy * gain * (x * inv));
        let mean = (total / x.len() as f64) as f32;
        let values = dx.iter_mut().zip(x).zip(dy.iter().zip(gain));
        if add {
            for ((dx, x), (dy, gain)) in values {
                *dx += inv * (dy * gain - x * inv * mean);
            }
        } else {
            for ((dx, x), (dy, gain)) in values {
                *dx = inv * (dy * gain - x * inv * mean);
            }
        }
    }

    /// `y = x inv gain`, rotated: pairs are a value of the first half and one of the second.
    pub(super) fn norm_rope(x: &[f32], gain: &[f32], inv: f32, cos_sin: &[f32], y: &mut [f32]) {
        let half = x.len() / 2;
        let ((x0, x1), (gain0, gain1)) = (x.split_at(half), gain.split_at(half));
        let (y0, y1) = y.split_at_mut(half);
        let inputs = x0.iter().zip(x1).zip(gain0.iter().zip(gain1));
        let turns = cos_sin.as_chunks::<2>().0;
        for ((y, (x, gain)), [cos, sin]) in y0.iter_mut().zip(y1).zip(inputs).zip(turns) {
            let (a, b) = (x.0 * inv * gain.0, x.1 * inv * gain.1);
            *y.0 = a * cos - b * sin;
            *y.1 = b * cos + a * sin;
        }
    }

    /// The gradient of a rotation: one by the negative angles.
    pub(super) fn rope_grad(dy: &[f32], cos_sin: &[f32], dx: &mut [f32]) {
        let half = dy.len() / 2;
        let ((dy0, dy1), (dx0, dx1)) = (dy.split_at(half), dx.split_at_mut(half));
        let pairs = dx0.iter_mut().zip(dx1).zip(dy0.iter().zip(dy1));
        for ((dx, dy), [cos, sin]) in pairs.zip(cos_sin.as_chunks::<2>().0) {
            *dx.0 = dy.0 * cos + dy.1 * sin;
            *dx.1 = dy.1 * cos - dy.0 * sin;
        }
    }

    /// Replaces logits by their probabilities. Returns the logarithm of the sum of their exponentials.
    pub(super) fn softmax(x: &mut [f32]) -> f32 {
        let total = log_sum_exp(x);
        for v in x {
            *v = exp(*v - total);
        }
        total
    }

    /// Replaces the gradient at probabilities `p` by that at their logits.
    pub(super) fn softmax_grad(p: &[f32], dp: &mut [f32]) {
        let total = sum2(p, dp, |p, d| p * d) as f32;
        for (d, p) in dp.iter_mut().zip(p) {
            *d = p * (*d - total);
        }
    }

    /// `gate sigmoid(gate) up`
    pub(super) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = g * sigmoid(g) * u;
        }
    }

    /// Replaces `gate` and `up` by the gradients at them.
    pub(super) fn silu_mul_grad(gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
        for ((g, u), &d) in gate.iter_mut().zip(up).zip(dout) {
            let sigmoid = sigmoid(*g);
            let dgate = d * *u * sigmoid * (1.0 + *g * (1.0 - sigmoid));
            *u = d * *g * sigmoid;
            *g = dgate;
        }
    }

    /// The attention of one query: replaces `scores` by the weights of the keys, and writes the weighted sum of
    /// the values to `out`.
    pub(super) fn attend(
        q: &[f32],
        keys: &[f32],
        values: &[f32],
        scores: &mut [f32],
        out: &mut [f32],
    ) {
        let scale = 1.0 / (q.len() as f32).sqrt();
        for (score, k) in scores.iter_mut().zip(keys.chunks(q.len())) {
            *score = dot(k, q) * scale;
        }
        let total = log_sum_exp(scores);
        out.fill(0.0);
        for (v, score) in values.chunks(q.len()).zip(scores) {
            *score = exp(*score - total);
            for (o, v) in out.iter_mut().zip(v) {
                *o += *score * v;
            }
        }
    }

    /// The KL divergence of `logits` from those of the teacher; replaces `logits` by its gradient times
    /// `weight`.
    pub(super) fn kl_divergence(teacher: &[f32], logits: &mut [f32], weight: f32) -> f32 {
        let (zl, zt) = (log_sum_exp(logits), log_sum_exp(teacher));
        let loss = sum2(logits, teacher, |l, t| exp(t - zt) * ((t - zt) - (l - zl)));
        for (l, t) in logits.iter_mut().zip(teacher) {
            *l = (exp(*l - zl) - exp(t - zt)) * weight;
        }
        loss as f32
    }

    /// The values of a group's rounded latent weights.
    pub(super) fn round(latent: &[f32], group: RoundingGroup, w: &mut [f32]) {
        for (w, &l) in w.iter_mut().zip(latent) {
            *w = group.scale * rounded(l, group).0;
        }
    }

    /// Adds the gradients at a group's latent weights, taken through the rounding as if it were none, to
    /// theirs. Returns that at its scale.
    pub(super) fn round_grad(latent: &[f32], group: RoundingGroup, dw: &[f32], dlatent: &mut [f32]) -> f32 {
        for ((dl, &dw), &l) in dlatent.iter_mut().zip(dw).zip(latent) {
            *dl += dw * rounded(l, group).2;
        }
        let dscale = sum2(dw, latent, |dw, l| {
            let (code, v, inside) = rounded(l, group);
            dw * (code - v * inside)
        });
        dscale as f32
    }

    /// The values of a group's codes.
    pub(super) fn dequantize(codes: &[u8], scale: f32, zero: f32, w: &mut [f32]) {
        for (w, &q) in w.iter_mut().zip(codes) {
            *w = scale * (f32::from(q) - zero);
        }
    }

    /// A step of Adam; clears the gradients.
    pub(super) fn adam(
        step: Adam,
        value: &mut [f32],
        mean: &mut [f32],
        square: &mut [f32],
        grad: &mut [f32],
    ) {
        let moments = mean.iter_mut().zip(square);
        for ((p, g), (m, v)) in value.iter_mut().zip(grad).zip(moments) {
            *m = step.beta1 * *m + (1.0 - step.beta1) * *g;
            *v = step.beta2 * *v + (1.0 - step.beta2) * *g * *g;
            let root = (*v / step.correction2).sqrt();
            *p -= step.rate * (*m / step.correction1) / (root + step.epsilon);
            *g = 0.0;
        }
    }
}
