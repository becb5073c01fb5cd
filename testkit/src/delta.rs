//! A gated DeltaNet's random parameters and rows, and its formulas in f64.

use crate::weights::normal;
use nq_kernels::DeltaShape;

/// What the norms of the outputs add to the mean square.
pub const EPS: f32 = 1e-6;

/// A shape whose value heads of a key head are neighbours.
pub fn shape([key_heads, value_heads, key_dim, value_dim, conv]: [usize; 5]) -> DeltaShape {
    DeltaShape {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv,
        tiled: false,
    }
}

/// The vectors of a layer.
pub struct Vectors {
    /// Taps `[channels, conv]`.
    pub conv: Vec<f32>,
    /// `-exp(log A)` of each value head.
    pub decay: Vec<f32>,
    /// What is added to a value head's time step.
    pub dt_bias: Vec<f32>,
    /// Gains of the norm of a value head's outputs.
    pub norm: Vec<f32>,
}

/// The random vectors of a layer of this shape.
pub fn vectors(shape: &DeltaShape) -> Vectors {
    let scaled =
        |n, seed, by: f32, plus: f32| normal(n, seed).iter().map(|v| v * by + plus).collect();
    let logs: Vec<f32> = normal(shape.value_heads, 12);
    Vectors {
        conv: scaled(shape.channels() * shape.conv, 11, 0.6, 0.1),
        decay: logs.iter().map(|v| -v.exp()).collect(),
        dt_bias: normal(shape.value_heads, 13),
        norm: scaled(shape.value_dim, 14, 0.2, 1.0),
    }
}

/// The projections of `m` rows: `qkvz` and `ba`.
pub fn rows(shape: &DeltaShape, m: usize, seed: u64) -> [Vec<f32>; 2] {
    let mut ba = normal(m * 2 * shape.value_heads, seed + 1);
    // Rows past the threshold of softplus, and one that decays to nothing.
    for (i, a) in ba.iter_mut().enumerate() {
        *a += [0.0, 0.0, 24.0, -9.0, 0.0, 0.0, 0.0][i % 7];
    }
    [normal(m * (shape.channels() + shape.values()), seed), ba]
}

/// The outputs `[m, values]` of a new sequence.
pub fn reference(shape: &DeltaShape, w: &Vectors, [qkvz, ba]: &[Vec<f32>; 2]) -> Vec<f32> {
    let &DeltaShape {
        value_heads: heads,
        key_dim,
        value_dim,
        conv,
        ..
    } = shape;
    let (keys, channels) = (shape.keys(), shape.channels());
    let stride = channels + shape.values();
    let m = qkvz.len() / stride;
    let f = |x: f32| f64::from(x);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let convolved = |r: usize, c: usize| {
        let tap = |j: usize| {
            let from = (r + j + 1).checked_sub(conv);
            from.map_or(0.0, |i| f(w.conv[c * conv + j]) * f(qkvz[i * stride + c]))
        };
        let x: f64 = (0..conv).map(tap).sum();
        x * sigmoid(x)
    };
    let unit = |r: usize, first: usize| -> Vec<f64> {
        let x: Vec<f64> = (0..key_dim).map(|i| convolved(r, first + i)).collect();
        let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|x| x / length).collect()
    };
    let mut out = Vec::new();
    let mut states = vec![vec![0.0; key_dim * value_dim]; heads];
    for r in 0..m {
        for (h, state) in states.iter_mut().enumerate() {
            let key_head = match shape.tiled {
                true => h % shape.key_heads,
                false => h / (heads / shape.key_heads),
            };
            let q = unit(r, key_head * key_dim);
            let k = unit(r, keys + key_head * key_dim);
            let ba = &ba[r * 2 * heads..(r + 1) * 2 * heads];
            let beta = sigmoid(f(ba[h]));
            let x = f(ba[heads + h]) + f(w.dt_bias[h]);
            let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
            let decay = (f(w.decay[h]) * softplus).exp();
            state.iter_mut().for_each(|s| *s *= decay);
            let mut o = vec![0.0; value_dim];
            for (c, o) in o.iter_mut().enumerate() {
                let v = convolved(r, 2 * keys + h * value_dim + c);
                let held: f64 = (0..key_dim).map(|i| state[i * value_dim + c] * k[i]).sum();
                let delta = beta * (v - held);
                for i in 0..key_dim {
                    state[i * value_dim + c] += k[i] * delta;
                    *o += state[i * value_dim + c] * q[i] / (key_dim as f64).sqrt();
                }
            }
            let squares = o.iter().map(|o| o * o).sum::<f64>() / value_dim as f64;
            for (c, o) in o.iter().enumerate() {
                let z = f(qkvz[r * stride + channels + h * value_dim + c]);
                let normed = o / (squares + f(EPS)).sqrt() * f(w.norm[c]);
                out.push((normed * z * sigmoid(z)) as f32);
            }
        }
    }
    out
}

/// Published widths, more value heads than key heads, and widths that fill no vectors.
pub fn shapes() -> Vec<DeltaShape> {
    let all = [
        [2, 2, 128, 128, 4],
        [2, 6, 128, 128, 4],
        [1, 2, 64, 32, 4],
        [1, 1, 1, 1, 4],
        [2, 4, 20, 36, 3],
        [3, 3, 17, 5, 1],
        [1, 3, 33, 16, 6],
    ];
    let tiled = all.map(|s| DeltaShape {
        tiled: true,
        ..shape(s)
    });
    all.map(shape).into_iter().chain(tiled).collect()
}
