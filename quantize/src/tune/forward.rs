//! One layer over whole sequences, on any device of `kernels::grad`.
//!
//! Heads are laid out `[sequence, kv head, query head of its group, token, dim]`, so that the
//! queries that share a key head are one matrix, and attention is a batch of plain products.

use super::params::Layer;
use crate::error::Result;
use nq_formats::ModelConfig;
use nq_formats::models::{LinearKind, MlpSpec, NormKind};
use nq_kernels::grad::{Allocate, Gemm, GradOps, HeadShape};
use nq_runtime::rope::Rotary;

/// What the forward of one layer leaves for the backward.
pub struct Saved<O: Allocate> {
    /// `[rows]`, of the norm before attention.
    pub inv1: O::Floats,
    /// `[rows]`, of the norm before the MLP.
    pub inv2: O::Floats,
    /// `[rows, q_dim]`, before norm and rotation.
    pub q: O::Floats,
    /// `[rows, kv_dim]`, the same of keys.
    pub k: O::Floats,
    /// `[rows, heads]`
    pub inv_q: O::Floats,
    /// `[rows, kv_heads]`
    pub inv_k: O::Floats,
    /// `[batch, heads, seq, dim]`
    pub qh: O::Floats,
    /// `[batch, kv_heads, seq, dim]`
    pub kh: O::Floats,
    /// `[batch, kv_heads, seq, dim]`
    pub vh: O::Floats,
    /// `[rows, q_dim]`, what `o_proj` sees.
    pub o: O::Floats,
    /// `[rows, hidden]`, after attention.
    pub mid: O::Floats,
    /// `[rows, intermediate]`
    pub gate: O::Floats,
    /// `[rows, intermediate]`
    pub up: O::Floats,
}

impl<O: Allocate> Saved<O> {
    /// Room for `rows` tokens.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(ops: &O, c: &ModelConfig, rows: usize) -> Result<Self> {
        let floats = |width: usize| ops.floats("activations of a layer", rows * width);
        let (q, kv) = (c.q_dim(), c.kv_dim());
        Ok(Saved {
            inv1: floats(1)?,
            inv2: floats(1)?,
            q: floats(q)?,
            k: floats(kv)?,
            inv_q: floats(c.num_attention_heads)?,
            inv_k: floats(c.num_key_value_heads)?,
            qh: floats(q)?,
            kh: floats(kv)?,
            vh: floats(kv)?,
            o: floats(q)?,
            mid: floats(c.hidden_size)?,
            gate: floats(c.intermediate_size)?,
            up: floats(c.intermediate_size)?,
        })
    }
}

/// Memory that a layer's forward uses and the next one's uses again.
pub struct Forward<O: Allocate> {
    config: ModelConfig,
    /// `[seq, dim / 2]` pairs
    pub cos_sin: O::Floats,
    /// `[rows, hidden]`: a norm's output.
    pub h: O::Floats,
    /// `[rows, max(intermediate, q_dim)]`
    pub wide: O::Floats,
    /// `[rows, q_dim]`
    pub heads: O::Floats,
    /// `[rows, kv_dim]`
    pub kv: O::Floats,
    /// `[batch, heads, seq, seq]`
    pub p: O::Floats,
    /// The largest weight that is not dense.
    pub w: O::Floats,
}

impl<O: Allocate> Forward<O> {
    /// Room for `batch` sequences of `seq` tokens (or more and shorter ones of as many tokens)
    /// and for weights of `largest` values that are computed from codes.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(
        ops: &O,
        config: &ModelConfig,
        (batch, seq): (usize, usize),
        largest: usize,
    ) -> Result<Self> {
        let c = config;
        let rows = batch * seq;
        let floats = |n: usize| ops.floats("activations of a layer", n);
        let rotations = rotations(c, seq);
        let mut cos_sin = floats(rotations.len())?;
        ops.write(&mut cos_sin, &rotations)?;
        Ok(Forward {
            config: c.clone(),
            cos_sin,
            h: floats(rows * c.hidden_size)?,
            wide: floats(rows * c.intermediate_size.max(c.q_dim()))?,
            heads: floats(rows * c.q_dim())?,
            kv: floats(rows * c.kv_dim())?,
            p: floats(batch * c.num_attention_heads * seq * seq)?,
            w: floats(largest)?,
        })
    }
}

impl<O: GradOps> Forward<O> {
    /// From the residual stream `x` to that after attention, `s.mid`, over `batch` sequences of
    /// `seq` tokens. Leaves in `h` what queries, keys and values are made of.
    ///
    /// # Errors
    /// The device's.
    pub fn attention(
        &mut self,
        ops: &O,
        weights: &Layer<O>,
        x: &O::Floats,
        s: &mut Saved<O>,
        (batch, seq): (usize, usize),
    ) -> Result<()> {
        let c = &self.config;
        let (hidden, eps, rows) = (c.hidden_size, c.rms_norm_eps, batch * seq);
        let shape = |heads| HeadShape::whole(batch, seq, heads, c.head_dim);
        let (qs, ks) = (shape(c.num_attention_heads), shape(c.num_key_value_heads));
        let gain = |kind| &weights.norm(kind).value;
        let w = &mut self.w;
        let norm = gain(NormKind::Attention);
        ops.rms_norm(x, norm, &mut self.h, &mut s.inv1, (rows, hidden), eps)?;
        linear(ops, c, weights, LinearKind::Q, rows, (&self.h, &mut s.q), w)?;
        linear(ops, c, weights, LinearKind::K, rows, (&self.h, &mut s.k), w)?;
        let v = (&self.h, &mut self.kv);
        linear(ops, c, weights, LinearKind::V, rows, v, w)?;
        let turn = |x: &_, gain: &_, y: &mut _, inv: &mut _, shape| {
            ops.head_norm_rope(x, gain, &self.cos_sin, y, inv, shape, eps)
        };
        turn(&s.q, gain(NormKind::Q), &mut s.qh, &mut s.inv_q, qs)?;
        turn(&s.k, gain(NormKind::K), &mut s.kh, &mut s.inv_k, ks)?;
        ops.rows_to_heads(&self.kv, &mut s.vh, ks)?;
        attention_weights(ops, c, (batch, seq), s, &mut self.p)?;
        let values = Attention::of(c, batch, seq).values;
        ops.gemm(values, &self.p, &s.vh, &mut self.heads)?;
        ops.heads_to_rows(&self.heads, &mut s.o, qs)?;

        ops.copy((x, 0), (&mut s.mid, 0), rows * hidden)?;
        let (n, k) = LinearKind::O.dims(c);
        let wo = weights.linear(LinearKind::O).load(ops, w)?;
        Ok(ops.gemm(Gemm::linear(rows, n, k).add(), &s.o, wo, &mut s.mid)?)
    }

    /// From `s.mid` to the residual stream after the layer, `out`. Leaves in `h` what gate and
    /// up are made of, and in `wide` what `down_proj` sees.
    ///
    /// # Errors
    /// The device's.
    pub fn mlp(
        &mut self,
        ops: &O,
        weights: &Layer<O>,
        s: &mut Saved<O>,
        out: &mut O::Floats,
        rows: usize,
    ) -> Result<()> {
        let c = &self.config;
        let MlpSpec::SwiGlu { .. } = c.layer().mlp; // another MLP is another function
        let (hidden, inter, eps) = (c.hidden_size, c.intermediate_size, c.rms_norm_eps);
        let w = &mut self.w;
        let gain = &weights.norm(NormKind::Mlp).value;
        ops.rms_norm(&s.mid, gain, &mut self.h, &mut s.inv2, (rows, hidden), eps)?;
        let gate = (&self.h, &mut s.gate);
        linear(ops, c, weights, LinearKind::Gate, rows, gate, w)?;
        linear(
            ops,
            c,
            weights,
            LinearKind::Up,
            rows,
            (&self.h, &mut s.up),
            w,
        )?;
        ops.silu_mul(&s.gate, &s.up, &mut self.wide, rows * inter)?;
        ops.copy((&s.mid, 0), (out, 0), rows * hidden)?;
        let (n, k) = LinearKind::Down.dims(c);
        let wd = weights.linear(LinearKind::Down).load(ops, w)?;
        Ok(ops.gemm(Gemm::linear(rows, n, k).add(), &self.wide, wd, out)?)
    }
}

/// One Linear of `weights` over `rows` tokens; `w` is memory for weights that are computed.
fn linear<O: GradOps>(
    ops: &O,
    c: &ModelConfig,
    weights: &Layer<O>,
    kind: LinearKind,
    rows: usize,
    (from, to): (&O::Floats, &mut O::Floats),
    w: &mut O::Floats,
) -> Result<()> {
    let (n, k) = kind.dims(c);
    let weight = weights.linear(kind).load(ops, w)?;
    Ok(ops.gemm(Gemm::linear(rows, n, k), from, weight, to)?)
}

/// Rotations of the first `positions` positions, as
/// [`nq_kernels::grad::LayerOps::head_norm_rope`] takes them.
pub fn rotations(config: &ModelConfig, positions: usize) -> Vec<f32> {
    let rotary = Rotary::new(config);
    let mut row = vec![(0.0, 0.0); config.head_dim / 2];
    let mut table = Vec::with_capacity(positions * config.head_dim);
    for position in 0..positions {
        rotary.row(position, &mut row);
        table.extend(row.iter().flat_map(|&(cos, sin)| [cos, sin]));
    }
    table
}

/// The products of attention over all key heads of a batch: queries `[group * seq, dim]`
/// against keys and values `[seq, dim]`.
pub struct Attention {
    /// Scores from queries and keys.
    pub scores: Gemm,
    /// Outputs from weights and values.
    pub values: Gemm,
    /// The gradient at the values.
    pub values_grad: Gemm,
    /// At the weights.
    pub weights_grad: Gemm,
    /// At the queries.
    pub queries_grad: Gemm,
    /// At the keys.
    pub keys_grad: Gemm,
}

impl Attention {
    /// Over `batch` sequences of `seq` tokens.
    pub fn of(c: &ModelConfig, batch: usize, seq: usize) -> Self {
        let (m, dim) = (
            c.num_attention_heads / c.num_key_value_heads * seq,
            c.head_dim,
        );
        let scale = 1.0 / (dim as f32).sqrt();
        let product = |(m, n, k), ta, tb, alpha| Gemm {
            m,
            n,
            k,
            batch: batch * c.num_key_value_heads,
            ta,
            tb,
            alpha,
            accumulate: false,
        };
        Attention {
            scores: product((m, seq, dim), false, true, scale),
            values: product((m, dim, seq), false, false, 1.0),
            values_grad: product((seq, dim, m), true, false, 1.0),
            weights_grad: product((m, seq, dim), false, true, 1.0),
            queries_grad: product((m, dim, seq), false, false, scale),
            keys_grad: product((seq, dim, m), true, false, scale),
        }
    }
}

/// Softmax of the scores of all queries against the keys before them, in `p`.
///
/// # Errors
/// The device's.
pub fn attention_weights<O: GradOps>(
    ops: &O,
    c: &ModelConfig,
    (batch, seq): (usize, usize),
    s: &Saved<O>,
    p: &mut O::Floats,
) -> Result<()> {
    ops.gemm(Attention::of(c, batch, seq).scores, &s.qh, &s.kh, p)?;
    let rows = batch * seq * c.num_attention_heads;
    Ok(ops.causal_softmax(p, rows, seq)?)
}
