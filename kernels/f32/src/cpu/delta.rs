//! Gated DeltaNets, token by token as their formulas say, and their gradients.

use nq_kernels::delta::DeltaShape;
use nq_kernels::grad::{DeltaGrads, DeltaInputs, DeltaStepAt, enough};
use nq_kernels::{Error, Result};
use rayon::prelude::*;

/// Added to the sum of squares of a query or a key before the root.
const UNIT_EPS: f32 = 1e-6;
/// Tokens between two states that the backward keeps of a sequence; it computes those between them again.
const KEPT_EVERY: usize = 32;

type Inputs<'a> = DeltaInputs<'a, Vec<f32>>;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The derivative of SiLU.
fn silu_slope(x: f32) -> f32 {
    let s = sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Refuses inputs that are too short for their shape.
fn check(inputs: &Inputs<'_>) -> Result<()> {
    let (s, rows) = (&inputs.shape, inputs.rows());
    for (what, expected, found) in [
        ("qkvz", rows * s.stride(), inputs.qkvz.len()),
        ("rates", rows * 2 * s.value_heads, inputs.ba.len()),
        ("convolution", s.channels() * s.conv, inputs.conv.len()),
        ("decay", s.value_heads, inputs.decay.len()),
        ("biases of time steps", s.value_heads, inputs.dt_bias.len()),
        ("gain", s.value_dim, inputs.norm.len()),
    ] {
        enough("delta", what, expected, found)?;
    }
    Ok(())
}

/// [`LayerOps::delta`](nq_kernels::grad::LayerOps::delta).
pub(super) fn run(inputs: &Inputs<'_>, out: &mut [f32]) -> Result<()> {
    check(inputs)?;
    let s = &inputs.shape;
    enough("delta", "output", inputs.rows() * s.values(), out.len())?;
    let heads = (0..inputs.batch * s.value_heads).into_par_iter();
    let heads: Vec<_> = heads
        .map(|i| {
            let sequence = DeltaSequence {
                inputs,
                index: i / s.value_heads,
                before: &[],
            };
            let mut state = vec![0.0; s.key_dim * s.value_dim];
            sequence.outputs(i % s.value_heads, &mut state)
        })
        .collect();
    for (i, head) in heads.iter().enumerate() {
        let first = i / s.value_heads * inputs.seq;
        let rows = &mut out[first * s.values()..(first + inputs.seq) * s.values()];
        put_columns(rows, s.values(), i % s.value_heads * s.value_dim, head);
    }
    Ok(())
}

/// Writes `from` `[rows, n]` to columns `at ..` of `to` `[rows, width]`.
fn put_columns(to: &mut [f32], width: usize, at: usize, from: &[f32]) {
    let rows = to.len() / width;
    let n = from.len() / rows.max(1);
    for (to, from) in to.chunks_exact_mut(width).zip(from.chunks_exact(n.max(1))) {
        to[at..at + n].copy_from_slice(from);
    }
}

/// The states of sequences that go on token by token: in each layer, for each sequence, a matrix for every head of
/// values and the last inputs of the convolution.
pub struct CpuStates {
    shape: DeltaShape,
    slots: usize,
    matrices: Vec<f32>, // [layers, slots, value_heads, key_dim * value_dim]
    inputs: Vec<f32>,   // [layers, slots, conv, channels], the oldest first
}

impl CpuStates {
    pub(super) fn new(shape: DeltaShape, layers: usize, slots: usize) -> Self {
        let (matrix, taps) = (shape.key_dim * shape.values(), shape.conv);
        CpuStates {
            shape,
            slots,
            matrices: vec![0.0; layers * slots * matrix],
            inputs: vec![0.0; layers * slots * taps * shape.channels()],
        }
    }
}

/// [`GradOps::delta_step`](nq_kernels::grad::GradOps::delta_step).
pub(super) fn step(
    inputs: &Inputs<'_>,
    states: &mut CpuStates,
    at: DeltaStepAt,
    out: &mut [f32],
) -> Result<()> {
    check(inputs)?;
    let s = inputs.shape;
    let (matrix, before) = (s.key_dim * s.value_dim, s.conv * s.channels());
    let first = at.layer * states.slots;
    for (what, expected, found) in [
        ("output", inputs.rows() * s.values(), out.len()),
        ("slots", inputs.batch, states.slots),
        (
            "matrices",
            (first + inputs.batch) * s.value_heads * matrix,
            states.matrices.len(),
        ),
    ] {
        enough("delta_step", what, expected, found)?;
    }
    if (states.shape, inputs.seq) != (s, 1) {
        return Err(Error::Shape {
            op: "delta_step",
            what: "tokens of a sequence",
            expected: format!("1, of {:?}", states.shape),
            found: format!("{}, of {s:?}", inputs.seq),
        });
    }
    let matrices = &mut states.matrices[first * s.value_heads * matrix..];
    let kept = &mut states.inputs[first * before..];
    let sequences = matrices
        .par_chunks_exact_mut(s.value_heads * matrix)
        .zip(kept.par_chunks_exact_mut(before))
        .zip(out.par_chunks_exact_mut(s.values()));
    sequences
        .take(inputs.batch)
        .enumerate()
        .for_each(|(index, ((matrices, kept), out))| {
            if at.position == 0 {
                matrices.fill(0.0);
                kept.fill(0.0);
            }
            let sequence = DeltaSequence {
                inputs,
                index,
                before: kept,
            };
            let heads = matrices.chunks_exact_mut(matrix);
            for (h, (state, out)) in heads.zip(out.chunks_exact_mut(s.value_dim)).enumerate() {
                out.copy_from_slice(&sequence.outputs(h, state));
            }
            let newest = sequence.row(0)[..s.channels()].to_vec();
            kept.copy_within(s.channels().., 0);
            kept[before - s.channels()..].copy_from_slice(&newest);
        });
    Ok(())
}

/// One of the sequences of [`DeltaInputs`].
struct DeltaSequence<'a> {
    inputs: &'a Inputs<'a>,
    index: usize,
    before: &'a [f32], // [_, channels], inputs of the convolution in front of the first token; beyond them stand zeros
}

/// Channels of all tokens of a sequence, `[seq, n]`: what the convolution gives, and SiLU of that.
struct Mixed {
    convolved: Vec<f32>,
    out: Vec<f32>,
}

/// Queries or keys of a head of all tokens.
struct UnitVectors {
    mixed: Mixed,
    scales: Vec<f32>, // [seq], what makes each vector as long as it should be
    units: Vec<f32>,  // [seq, key_dim]
}

/// The factor of a token's state, and of what is written to it.
#[derive(Clone, Copy)]
struct Gates {
    decay: f32,
    beta: f32,
}

/// What a sequence's tokens write to the state of a head of values.
struct Writes<'a> {
    keys: &'a [f32],       // [seq, key_dim]
    deltas: Vec<f32>,      // [seq, value_dim]: values less what the state says already
    gates: Vec<Gates>,     // [seq]
    outputs: Vec<f32>,     // [seq, value_dim], before the norm
    states: Vec<Vec<f32>>, // in front of every KEPT_EVERY-th token
}

impl DeltaSequence<'_> {
    fn shape(&self) -> &DeltaShape {
        &self.inputs.shape
    }

    fn row(&self, t: usize) -> &[f32] {
        let stride = self.shape().stride();
        &self.inputs.qkvz[(self.index * self.inputs.seq + t) * stride..][..stride]
    }

    /// Channel `c` of the token `back` tokens in front of `t`.
    fn tap(&self, t: usize, back: usize, c: usize) -> f32 {
        let channels = self.shape().channels();
        match t.checked_sub(back) {
            Some(t) => self.row(t)[c],
            None => (self.before.len() / channels)
                .checked_sub(back - t)
                .map_or(0.0, |row| self.before[row * channels + c]),
        }
    }

    /// Channels `first .. first + n` of token `t` after the convolution.
    fn convolved(&self, t: usize, first: usize, n: usize) -> impl Iterator<Item = f32> {
        let conv = self.shape().conv;
        (first..first + n).map(move |c| {
            let taps = self.inputs.conv[c * conv..][..conv].iter().enumerate();
            taps.map(|(j, w)| w * self.tap(t, conv - 1 - j, c)).sum()
        })
    }

    fn mixed(&self, first: usize, n: usize) -> Mixed {
        let tokens = 0..self.inputs.seq;
        let convolved: Vec<f32> = tokens.flat_map(|t| self.convolved(t, first, n)).collect();
        let out = convolved.iter().map(|x| x * sigmoid(*x)).collect();
        Mixed { convolved, out }
    }

    fn units(&self, first: usize, length: f32) -> UnitVectors {
        let dim = self.shape().key_dim;
        let mixed = self.mixed(first, dim);
        let scale = |x: &[f32]| length / (x.iter().map(|x| x * x).sum::<f32>() + UNIT_EPS).sqrt();
        let scales: Vec<f32> = mixed.out.chunks_exact(dim).map(scale).collect();
        let scaled = mixed.out.iter().enumerate();
        let units = scaled.map(|(i, x)| x * scales[i / dim]).collect();
        UnitVectors {
            mixed,
            scales,
            units,
        }
    }

    fn queries(&self, key_head: usize) -> UnitVectors {
        let s = self.shape();
        self.units(key_head * s.key_dim, (s.key_dim as f32).sqrt().recip())
    }

    fn keys(&self, key_head: usize) -> UnitVectors {
        let s = self.shape();
        self.units(s.keys() + key_head * s.key_dim, 1.0)
    }

    fn values(&self, h: usize) -> Mixed {
        let s = self.shape();
        self.mixed(2 * s.keys() + h * s.value_dim, s.value_dim)
    }

    /// `b` and `a` of token `t`, the latter with its bias.
    fn rates(&self, t: usize, h: usize) -> (f32, f32) {
        let heads = self.shape().value_heads;
        let ba = &self.inputs.ba[(self.index * self.inputs.seq + t) * 2 * heads..];
        (ba[h], ba[heads + h] + self.inputs.dt_bias[h])
    }

    fn gates(&self, t: usize, h: usize) -> Gates {
        let (b, step) = self.rates(t, h);
        let step = if step > 20.0 {
            step
        } else {
            step.exp().ln_1p()
        };
        Gates {
            decay: (self.inputs.decay[h] * step).exp(),
            beta: sigmoid(b),
        }
    }

    /// Sends all tokens through `state`; keeps what the backward needs if `keep`.
    fn scan<'k>(
        &self,
        h: usize,
        (queries, keys): (&[f32], &'k [f32]),
        state: &mut [f32],
        keep: bool,
    ) -> Writes<'k> {
        let (dim, d) = (self.shape().key_dim, self.shape().value_dim);
        let mut writes = Writes {
            keys,
            deltas: self.values(h).out,
            gates: (0..self.inputs.seq).map(|t| self.gates(t, h)).collect(),
            outputs: vec![0.0; self.inputs.seq * d],
            states: Vec::new(),
        };
        for t in 0..self.inputs.seq {
            if keep && t.is_multiple_of(KEPT_EVERY) {
                writes.states.push(state.to_vec());
            }
            let (q, k) = (&queries[t * dim..][..dim], &keys[t * dim..][..dim]);
            let Gates { decay, beta } = writes.gates[t];
            let delta = &mut writes.deltas[t * d..][..d];
            for (state, k) in state.chunks_exact_mut(d).zip(k) {
                for (s, delta) in state.iter_mut().zip(&mut *delta) {
                    *s *= decay;
                    *delta -= *s * k;
                }
            }
            let o = &mut writes.outputs[t * d..][..d];
            for ((state, k), q) in state.chunks_exact_mut(d).zip(k).zip(q) {
                for ((s, delta), o) in state.iter_mut().zip(&*delta).zip(&mut *o) {
                    *s += k * beta * delta;
                    *o += *s * q;
                }
            }
        }
        writes
    }

    /// The outputs of a head of values, `[seq, value_dim]`; `state` is brought forward.
    fn outputs(&self, h: usize, state: &mut [f32]) -> Vec<f32> {
        let (s, d) = (self.shape(), self.shape().value_dim);
        let (queries, keys) = (self.queries(s.key_head(h)), self.keys(s.key_head(h)));
        let writes = self.scan(h, (&queries.units, &keys.units), state, false);
        let mut out = Vec::with_capacity(writes.outputs.len());
        for (t, o) in writes.outputs.chunks_exact(d).enumerate() {
            let inv = super::rows::inverse_rms(o, self.inputs.eps);
            let z = &self.row(t)[s.channels() + h * d..][..d];
            let gated = o.iter().zip(&self.inputs.norm[..d]).zip(z);
            out.extend(gated.map(|((o, gain), z)| o * inv * gain * z * sigmoid(*z)));
        }
        out
    }

    /// From the gradient at the convolution's output after SiLU, `[seq, n]`, that at its inputs.
    fn unmixed(&self, mixed: &Mixed, first: usize, gradient: &[f32]) -> Vec<f32> {
        let (seq, conv) = (self.inputs.seq, self.shape().conv);
        let n = gradient.len() / seq;
        let before_silu = gradient.iter().zip(&mixed.convolved);
        let before_silu: Vec<f32> = before_silu.map(|(g, x)| g * silu_slope(*x)).collect();
        let at = |t: usize, c: usize| {
            let taps = self.inputs.conv[(first + c) * conv..][..conv].iter().rev();
            let later = taps.enumerate().take(seq - t);
            later
                .map(|(ahead, w)| w * before_silu[(t + ahead) * n + c])
                .sum::<f32>()
        };
        (0..seq * n).map(|i| at(i / n, i % n)).collect()
    }

    /// From the gradient at vectors of unit length that at the convolution's inputs.
    fn unmixed_units(
        &self,
        x: &UnitVectors,
        first: usize,
        gradient: &[f32],
        length: f32,
    ) -> Vec<f32> {
        let dim = self.shape().key_dim;
        let mut raw = gradient.to_vec();
        for (t, dx) in raw.chunks_exact_mut(dim).enumerate() {
            let (out, scale) = (&x.mixed.out[t * dim..][..dim], x.scales[t]);
            // The scale is length / sqrt(squares): its own derivative takes away what is along the vector.
            let along = dot(out, dx) * (scale / length).powi(2);
            for (dx, x) in dx.iter_mut().zip(out) {
                *dx = scale * (*dx - x * along);
            }
        }
        self.unmixed(&x.mixed, first, &raw)
    }

    /// The gradients of a key head and its heads of values, from `gradient` `[seq, values]` at the outputs.
    fn gradients(&self, key_head: usize, gradient: &[f32]) -> KeyHeadGradients {
        let (s, seq) = (*self.shape(), self.inputs.seq);
        let (queries, keys) = (self.queries(key_head), self.keys(key_head));
        let mut dq = vec![0.0; seq * s.key_dim];
        let mut dk = vec![0.0; seq * s.key_dim];
        let heads = (0..s.value_heads).filter(|&h| s.key_head(h) == key_head);
        let heads = heads
            .map(|h| {
                let mut state = vec![0.0; s.key_dim * s.value_dim];
                let units = (&queries.units[..], &keys.units[..]);
                let writes = self.scan(h, units, &mut state, true);
                let (z, outputs) = self.ungated(h, &writes, gradient);
                let (values, gates) =
                    self.back(h, &queries.units, &writes, &outputs, (&mut dq, &mut dk));
                let first = 2 * s.keys() + h * s.value_dim;
                ValueHeadGradients {
                    head: h,
                    z,
                    values: self.unmixed(&self.values(h), first, &values),
                    rates: gates,
                }
            })
            .collect();
        let length = (s.key_dim as f32).sqrt().recip();
        let at = key_head * s.key_dim;
        KeyHeadGradients {
            queries: self.unmixed_units(&queries, at, &dq, length),
            keys: self.unmixed_units(&keys, s.keys() + at, &dk, 1.0),
            heads,
        }
    }

    /// From the gradient at the gated output, those at `z` and at the recurrence's outputs, `[seq, value_dim]`.
    fn ungated(&self, h: usize, writes: &Writes<'_>, gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (s, d) = (self.shape(), self.shape().value_dim);
        let (mut dz, mut outputs) = (Vec::new(), Vec::new());
        for (t, o) in writes.outputs.chunks_exact(d).enumerate() {
            let dy = &gradient[t * s.values() + h * d..][..d];
            let z = &self.row(t)[s.channels() + h * d..][..d];
            let gain = &self.inputs.norm[..d];
            let inv = super::rows::inverse_rms(o, self.inputs.eps);
            let normed: Vec<f32> = (dy.iter().zip(z).zip(gain))
                .map(|((dy, z), gain)| dy * gain * z * sigmoid(*z))
                .collect();
            let along = dot(&normed, o) * inv * inv / d as f32;
            outputs.extend(normed.iter().zip(o).map(|(n, o)| inv * (n - o * along)));
            let by_z = dy.iter().zip(o).zip(gain).zip(z);
            dz.extend(by_z.map(|(((dy, o), gain), z)| dy * o * inv * gain * silu_slope(*z)));
        }
        (dz, outputs)
    }

    /// From the gradient at the recurrence's outputs, those at values `[seq, value_dim]` and at `b` and `a` of each token;
    /// adds those at queries and keys.
    fn back(
        &self,
        h: usize,
        queries: &[f32],
        writes: &Writes<'_>,
        outputs: &[f32],
        (dq, dk): (&mut [f32], &mut [f32]),
    ) -> (Vec<f32>, Vec<[f32; 2]>) {
        let (dim, d, seq) = (
            self.shape().key_dim,
            self.shape().value_dim,
            self.inputs.seq,
        );
        let mut values = vec![0.0; seq * d];
        let mut rates = vec![[0.0; 2]; seq];
        let mut ds = vec![0.0; dim * d];
        for segment in (0..writes.states.len()).rev() {
            let tokens = segment * KEPT_EVERY..seq.min((segment + 1) * KEPT_EVERY);
            let states = writes.again(&writes.states[segment], tokens.clone());
            for (t, before) in tokens.zip(states).rev() {
                let (of_key, of_value) = (t * dim..(t + 1) * dim, t * d..(t + 1) * d);
                let token = Token {
                    query: &queries[of_key.clone()],
                    key: &writes.keys[of_key.clone()],
                    delta: &writes.deltas[of_value.clone()],
                    gates: writes.gates[t],
                    output: &outputs[of_value.clone()],
                };
                let at = (&mut dq[of_key.clone()], &mut dk[of_key]);
                let gates = token.back(&before, &mut ds, at, &mut values[of_value]);
                let (b, step) = self.rates(t, h);
                let s = sigmoid(b);
                let rate = gates.decay * token.gates.decay * self.inputs.decay[h];
                rates[t] = [gates.beta * s * (1.0 - s), rate * sigmoid(step)];
            }
        }
        (values, rates)
    }
}

impl Writes<'_> {
    /// The states in front of each of `tokens`, of which `first` is the first.
    fn again(&self, first: &[f32], tokens: std::ops::Range<usize>) -> Vec<Vec<f32>> {
        let (dim, d) = (
            self.keys.len() / self.gates.len(),
            self.deltas.len() / self.gates.len(),
        );
        let mut states = vec![first.to_vec()];
        for t in tokens.start..tokens.end - 1 {
            let Gates { decay, beta } = self.gates[t];
            let mut state = states[states.len() - 1].clone();
            let keys = &self.keys[t * dim..][..dim];
            for (state, k) in state.chunks_exact_mut(d).zip(keys) {
                for (s, delta) in state.iter_mut().zip(&self.deltas[t * d..][..d]) {
                    *s = *s * decay + k * beta * delta;
                }
            }
            states.push(state);
        }
        states
    }
}

/// A token of a head of values, and the gradient at its output.
struct Token<'a> {
    query: &'a [f32],
    key: &'a [f32],
    delta: &'a [f32],
    gates: Gates,
    output: &'a [f32],
}

impl Token<'_> {
    /// Brings `ds`, the gradient at the state behind the token, to the state `before` it. Adds the gradients at query and
    /// key, writes that at the value, and returns those at the gates.
    ///
    /// With S = g S0 + k (beta d)^T, d = v - g S0^T k and o = S^T q these follow from o's gradient by the chain rule.
    fn back(
        &self,
        before: &[f32],
        ds: &mut [f32],
        (dq, dk): (&mut [f32], &mut [f32]),
        value: &mut [f32],
    ) -> Gates {
        let Gates { decay, beta } = self.gates;
        let d = self.delta.len();
        let written: Vec<f32> = self.delta.iter().map(|x| beta * x).collect();
        let of_written = dot(&written, self.output);
        let mut du = vec![0.0; d];
        for (((ds, before), (q, k)), (dq, dk)) in (ds.chunks_exact_mut(d))
            .zip(before.chunks_exact(d))
            .zip(self.query.iter().zip(self.key))
            .zip(dq.iter_mut().zip(dk.iter_mut()))
        {
            *dq += decay * dot(before, self.output) + k * of_written;
            for ((ds, o), du) in ds.iter_mut().zip(self.output).zip(&mut du) {
                *ds += q * o;
                *du += *ds * k;
            }
            *dk += dot(ds, &written);
        }
        let of_beta = dot(&du, self.delta);
        for (value, du) in value.iter_mut().zip(&du) {
            *value = beta * du;
        }
        let mut of_decay = 0.0;
        for (((ds, before), k), dk) in (ds.chunks_exact_mut(d))
            .zip(before.chunks_exact(d))
            .zip(self.key)
            .zip(dk)
        {
            *dk -= decay * dot(before, value);
            for ((ds, before), value) in ds.iter_mut().zip(before).zip(&*value) {
                *ds -= k * value;
                of_decay += *ds * before;
                *ds *= decay;
            }
        }
        Gates {
            decay: of_decay,
            beta: of_beta,
        }
    }
}

/// Gradients at what a key head has: of queries and keys `[seq, key_dim]`, and of its heads of values.
struct KeyHeadGradients {
    queries: Vec<f32>,
    keys: Vec<f32>,
    heads: Vec<ValueHeadGradients>,
}

/// Gradients at what a head of values has: `[seq, value_dim]` each, and of `b` and `a` `[seq]`.
struct ValueHeadGradients {
    head: usize,
    z: Vec<f32>,
    values: Vec<f32>,
    rates: Vec<[f32; 2]>,
}

/// [`GradOps::delta_grad`](nq_kernels::grad::GradOps::delta_grad).
pub(super) fn gradient(
    inputs: &Inputs<'_>,
    gradient: &[f32],
    to: DeltaGrads<'_, Vec<f32>>,
) -> Result<()> {
    check(inputs)?;
    let (s, rows, seq) = (&inputs.shape, inputs.rows(), inputs.seq);
    for (what, expected, found) in [
        ("gradient of the output", rows * s.values(), gradient.len()),
        ("gradient of qkvz", rows * s.stride(), to.qkvz.len()),
        ("gradient of rates", rows * 2 * s.value_heads, to.ba.len()),
    ] {
        enough("delta_grad", what, expected, found)?;
    }
    let heads = (0..inputs.batch * s.key_heads).into_par_iter();
    let heads: Vec<_> = heads
        .map(|i| {
            let index = i / s.key_heads;
            let sequence = DeltaSequence {
                inputs,
                index,
                before: &[],
            };
            let of_sequence = &gradient[index * seq * s.values()..][..seq * s.values()];
            sequence.gradients(i % s.key_heads, of_sequence)
        })
        .collect();
    for (i, found) in heads.iter().enumerate() {
        let (first, key) = (i / s.key_heads * seq, i % s.key_heads * s.key_dim);
        let qkvz = &mut to.qkvz[first * s.stride()..][..seq * s.stride()];
        put_columns(qkvz, s.stride(), key, &found.queries);
        put_columns(qkvz, s.stride(), s.keys() + key, &found.keys);
        let ba = &mut to.ba[first * 2 * s.value_heads..][..seq * 2 * s.value_heads];
        for of_head in &found.heads {
            let at = of_head.head * s.value_dim;
            put_columns(qkvz, s.stride(), 2 * s.keys() + at, &of_head.values);
            put_columns(qkvz, s.stride(), s.channels() + at, &of_head.z);
            for (ba, rates) in ba.chunks_exact_mut(2 * s.value_heads).zip(&of_head.rates) {
                (ba[of_head.head], ba[s.value_heads + of_head.head]) = (rates[0], rates[1]);
            }
        }
    }
    Ok(())
}
