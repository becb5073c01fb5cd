//! The oracle: every operation in its plainest form, accumulating in f64, taking canonical
//! weights. Other kernels are tested against it; it is never chosen for speed.

use nq_formats::Weight;

/// `y[m, out] = x[m, in] * w^T`.
///
/// # Errors
/// If a dense weight is not of a float type.
pub fn linear(x: &[f32], w: &Weight, y: &mut [f32]) -> crate::Result<()> {
    let (out, inp) = w.dims().pair();
    let mut row = vec![0.0; inp];
    for o in 0..out {
        w.dequantize_row(o, &mut row)?;
        for (x, y) in x.chunks_exact(inp).zip(y.chunks_exact_mut(out)) {
            y[o] = dot(x, &row);
        }
    }
    Ok(())
}

/// Dot product, accumulated in f64.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
    products.sum::<f64>() as f32
}

/// RMSNorm (arXiv 1910.07467) of each row: `x / sqrt(mean(x^2) + eps) * weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let n = weight.len();
    for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
        let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / n as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
            *y = (f64::from(x) * scale * f64::from(w)) as f32;
        }
    }
}

/// Rotary embedding (arXiv 2104.09864) of one head at one position, in place, pairing
/// element `i` with `i + d/2`. `cos_sin` is `[d/2]` pairs for that position.
pub fn rope(head: &mut [f32], cos_sin: &[(f32, f32)]) {
    let half = head.len() / 2;
    for (i, &(c, s)) in cos_sin.iter().enumerate() {
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * c - b * s;
        head[i + half] = b * c + a * s;
    }
}

/// `x / (1 + e^-x)`
pub fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

/// `silu(gate) * up`, elementwise.
pub fn silu_mul(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
        let g = f64::from(g);
        *y = (g / (1.0 + (-g).exp()) * f64::from(u)) as f32;
    }
}

/// Softmax attention of one query over `len` keys and values `[len, d]`, scaled by `1/sqrt(d)`.
pub fn attend(q: &[f32], keys: &[f32], values: &[f32], y: &mut [f32]) {
    let d = q.len();
    let scale = 1.0 / (d as f64).sqrt();
    let scores: Vec<f64> = keys
        .chunks_exact(d)
        .map(|k| {
            q.iter()
                .zip(k)
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum::<f64>()
                * scale
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    for (i, y) in y.iter_mut().enumerate() {
        let sum: f64 = weights
            .iter()
            .zip(values.chunks_exact(d))
            .map(|(w, v)| w * f64::from(v[i]))
            .sum();
        *y = (sum / total) as f32;
    }
}

/// Rounds each row of `x` (`k` long) in place to the values that a Linear with these activations uses:
/// for int8 and int16, `scale * code` with codes of -127 to 127 or -32512 to 32512 and one
/// f32 scale per group (the last of a row may be shorter).
pub fn round_activations(x: &mut [f32], k: usize, activations: crate::Activations) {
    use crate::Activations;
    let (group, greatest) = match activations {
        Activations::F32 => return,
        Activations::Bf16 => {
            x.iter_mut()
                .for_each(|v| *v = half::bf16::from_f32(*v).to_f32());
            return;
        }
        Activations::Int8 { group } => (group, INT8_GREATEST),
        Activations::Int16 { group } => (group, INT16_GREATEST),
    };
    for group in x.chunks_mut(k).flat_map(|row| row.chunks_mut(group)) {
        let absmax = group.iter().fold(0f32, |m, v| m.max(v.abs()));
        let (inverse, scale) = code_scale(absmax, greatest);
        for v in group {
            *v = (*v * inverse).round_ties_even() * scale;
        }
    }
}

/// Greatest code of int8 activations.
pub const INT8_GREATEST: f32 = 127.0;

/// Weight of the high one of an int16 code's two signed bytes: with 255, both stay between
/// -127 and 127, which every instruction set's dot products support.
pub const INT16_BASE: f32 = 255.0;

/// Greatest code of int16 activations: two bytes of 127.
pub const INT16_GREATEST: f32 = 127.0 * INT16_BASE + 127.0;

/// Factors for values up to `absmax`: from values to codes of `-greatest` to
/// `greatest`, and from codes to values. Both are 0 if `absmax`
/// is so small that its inverse overflows.
pub fn code_scale(absmax: f32, greatest: f32) -> (f32, f32) {
    if absmax > 1e-33 {
        (greatest / absmax, absmax / greatest)
    } else {
        (0.0, 0.0)
    }
}
