//! Forward and backward of a model over whole sequences, and the KL divergence of the
//! student's logits against the teacher's.
//!
//! What the backward needs and the forward has is kept if it is dear to compute (products),
//! computed again if it is cheap (norms, SiLU, attention's weights).

use super::params::Model;
use crate::error::Result;
use nq_formats::ModelConfig;
use nq_formats::models::{LinearKind, MlpSpec, NormKind};
use nq_kernels::grad::{Gemm, GradOps, HeadShape, Occurrences};
use nq_runtime::full_precision::{
    AttentionProducts, Load, Pass, Tape, Workspace, attention_weights,
};

/// Logits held at once, per model.
const LOGITS: usize = 1 << 26;

/// Memory of forward and backward over up to `batch` sequences of `seq` tokens.
pub struct Graph<O: GradOps> {
    config: ModelConfig,
    batch: usize,
    seq: usize,
    head_rows: usize,
    f: Workspace<O>,
    ids: O::Ids,          // [rows]
    xs: Vec<O::Floats>,   // layers + 1 of [rows, hidden]
    saved: Vec<Tape<O>>,  // by layer
    inv: O::Floats,       // [rows], of the final norm
    teacher: O::Floats,   // [rows, hidden], the teacher's normed output
    dx: O::Floats,        // [rows, hidden]
    dh: O::Floats,        // [rows, hidden]
    wide2: O::Floats,     // [rows, max(intermediate, q_dim)]
    dk: O::Floats,        // [rows, kv_dim]
    dv: O::Floats,        // [rows, kv_dim]
    dp: O::Floats,        // [batch, heads, seq, seq]
    dw: O::Floats,        // the largest weight
    head_in: O::Floats,   // [head_rows, hidden]
    logits: O::Floats,    // [head_rows, vocab]
    reference: O::Floats, // [head_rows, vocab]
    loss: O::Floats,      // [head_rows]
}

/// Values of f32 that a [`Graph`] takes: for the plan of memory.
pub fn graph_values(c: &ModelConfig, batch: usize, seq: usize) -> usize {
    let rows = batch * seq;
    let wide = c.intermediate_size.max(c.q_dim());
    let layer = c.hidden_size * 2
        + c.q_dim() * 3
        + c.kv_dim() * 3
        + 2 * c.intermediate_size
        + 2
        + c.num_attention_heads
        + c.num_key_value_heads;
    let shared = 5 * c.hidden_size + 2 * wide + c.q_dim() + 3 * c.kv_dim();
    let head = head_rows(c, rows) * (2 * c.vocab_size + c.hidden_size);
    rows * (layer * c.num_hidden_layers + shared)
        + 2 * batch * c.num_attention_heads * seq * seq
        + 2 * largest_weight(c)
        + head
}

fn head_rows(c: &ModelConfig, rows: usize) -> usize {
    (LOGITS / c.vocab_size.max(1))
        .clamp(64, rows.max(64))
        .min(rows)
}

/// Elements of the largest weight.
pub fn largest_weight(c: &ModelConfig) -> usize {
    let linears = c.layer().linears().into_iter();
    linears
        .map(|l| l.elements(c))
        .max()
        .unwrap_or(0)
        .max(c.vocab_size * c.hidden_size)
}

fn sum(losses: &[f32]) -> f64 {
    losses.iter().map(|&l| f64::from(l)).sum()
}

impl<O: GradOps> Graph<O> {
    /// Room for `batch` sequences of `seq` tokens.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(ops: &O, config: &ModelConfig, batch: usize, seq: usize) -> Result<Self> {
        let c = config;
        let rows = batch * seq;
        let (hidden, kv) = (rows * c.hidden_size, rows * c.kv_dim());
        let floats = |n| ops.floats("activations of a training step", n);
        let layers = 0..c.num_hidden_layers;
        let saved = layers.map(|_| Ok(Tape::new(ops, c, rows)?));
        let saved = saved.collect::<Result<_>>()?;
        let xs = (0..=c.num_hidden_layers).map(|_| Ok(floats(hidden)?));
        let xs = xs.collect::<Result<_>>()?;
        let head_rows = head_rows(c, rows);
        Ok(Graph {
            config: c.clone(),
            batch,
            seq,
            head_rows,
            f: Workspace::new(ops, c, (batch, seq), largest_weight(c))?,
            ids: ops.ids("tokens", rows)?,
            xs,
            saved,
            inv: floats(rows)?,
            teacher: floats(hidden)?,
            dx: floats(hidden)?,
            dh: floats(hidden)?,
            wide2: floats(rows * c.intermediate_size.max(c.q_dim()))?,
            dk: floats(kv)?,
            dv: floats(kv)?,
            dp: floats(batch * c.num_attention_heads * seq * seq)?,
            dw: floats(largest_weight(c))?,
            head_in: floats(head_rows * c.hidden_size)?,
            logits: floats(head_rows * c.vocab_size)?,
            reference: floats(head_rows * c.vocab_size)?,
            loss: floats(head_rows)?,
        })
    }

    /// Sequences of one pass.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Mean KL divergence of `student` from `teacher` over all positions of `tokens`
    /// (`[batch, seq]`), in nats.
    ///
    /// # Errors
    /// The device's.
    pub fn divergence(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &Model<O>,
        tokens: &[u32],
    ) -> Result<f64> {
        let all = self.divergences(ops, teacher, student, tokens)?;
        Ok(sum(&all) / tokens.len() as f64)
    }

    /// As [`Graph::divergence`], of every position.
    ///
    /// # Errors
    /// The device's.
    pub fn divergences(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &Model<O>,
        tokens: &[u32],
    ) -> Result<Vec<f32>> {
        self.forward_both(ops, teacher, student, tokens)?;
        let mut all = vec![0.0; tokens.len()];
        for (i, part) in all.chunks_mut(self.head_rows).enumerate() {
            let start = i * self.head_rows;
            self.logits(ops, teacher, student, start, part.len())?;
            self.losses(ops, 0.0, part)?;
        }
        Ok(all)
    }

    /// Logits of `model` at every position of `tokens`, `[rows, vocab]`.
    #[cfg(test)]
    pub(crate) fn all_logits(
        &mut self,
        ops: &O,
        model: &Model<O>,
        tokens: &[u32],
    ) -> Result<Vec<f32>> {
        self.forward_both(ops, model, model, tokens)?;
        assert!(tokens.len() <= self.head_rows, "a small model");
        self.logits(ops, model, model, 0, tokens.len())?;
        let mut logits = vec![0.0; tokens.len() * self.config.vocab_size];
        ops.read(&self.logits, &mut logits)?;
        Ok(logits)
    }

    /// As [`Graph::divergence`]; adds its gradient, times `share`, to what `student` has.
    ///
    /// # Errors
    /// The device's.
    pub fn gradient(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &mut Model<O>,
        tokens: &[u32],
        share: f32,
    ) -> Result<f64> {
        self.forward_both(ops, teacher, student, tokens)?;
        let rows = tokens.len();
        let loss = self.head_gradient(ops, teacher, student, rows, share / rows as f32)?;
        for layer in (0..self.config.num_hidden_layers).rev() {
            self.mlp_gradient(ops, student, layer, rows)?;
            self.attention_gradient(ops, student, layer, rows)?;
        }
        if student.embedding.is_tuned() {
            let width = self.config.hidden_size;
            ops.clear(&mut self.dw, self.config.vocab_size * width)?;
            let occurrences = Occurrences::new(tokens);
            ops.embed_grad(&self.dx, &occurrences, &mut self.dw, width)?;
            student.embedding.accumulate(ops, &self.dw)?;
        }
        Ok(loss)
    }

    /// Leaves the teacher's normed output in `teacher`, the student's in `h`.
    fn forward_both(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &Model<O>,
        tokens: &[u32],
    ) -> Result<()> {
        ops.write_ids(&mut self.ids, tokens)?;
        self.forward(ops, teacher, tokens.len())?;
        std::mem::swap(&mut self.f.h, &mut self.teacher);
        self.forward(ops, student, tokens.len())
    }

    fn heads(&self, rows: usize, heads: usize) -> HeadShape {
        HeadShape::whole(rows / self.seq, self.seq, heads, self.config.head_dim)
    }

    /// `[rows, hidden]` after the final norm, in `h`.
    fn forward(&mut self, ops: &O, model: &Model<O>, rows: usize) -> Result<()> {
        let width = self.config.hidden_size;
        let table = model.embedding.load(ops, &mut self.f.w)?;
        ops.embed(table, &self.ids, (rows, 1, 0), &mut self.xs[0], width)?;
        let shape = (rows / self.seq, self.seq);
        for (index, (layer, tape)) in model.layers.iter().zip(&mut self.saved).enumerate() {
            let (before, after) = self.xs.split_at_mut(index + 1);
            let streams = (&before[index], &mut after[0]);
            Pass::new(ops, (&mut self.f, tape), shape, streams, &mut |_, _| Ok(())).run(layer)?;
        }
        let last = &self.xs[self.config.num_hidden_layers];
        let (norm, eps) = (&model.final_norm.value, self.config.rms_norm_eps);
        ops.rms_norm(last, norm, &mut self.f.h, &mut self.inv, (rows, width), eps)?;
        Ok(())
    }

    /// Both models' logits of rows `start .. start + n`.
    fn logits(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &Model<O>,
        start: usize,
        n: usize,
    ) -> Result<()> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let product = Gemm::linear(n, vocab, hidden);
        let part = (start * hidden, n * hidden);
        ops.copy((&self.teacher, part.0), (&mut self.head_in, 0), part.1)?;
        let w = teacher.head().load(ops, &mut self.f.w)?;
        ops.gemm(product, &self.head_in, w, &mut self.reference)?;
        ops.copy((&self.f.h, part.0), (&mut self.head_in, 0), part.1)?;
        let w = student.head().load(ops, &mut self.f.w)?;
        ops.gemm(product, &self.head_in, w, &mut self.logits)?;
        Ok(())
    }

    /// The losses of as many rows as `to` holds; leaves the gradient times `weight` in `logits`.
    fn losses(&mut self, ops: &O, weight: f32, to: &mut [f32]) -> Result<()> {
        let shape = (to.len(), self.config.vocab_size);
        ops.kl_divergence(
            &self.reference,
            &mut self.logits,
            &mut self.loss,
            shape,
            weight,
        )?;
        Ok(ops.read(&self.loss, to)?)
    }

    /// Loss and gradient of the head and the final norm; leaves that of the last layer's
    /// output in `dx`.
    fn head_gradient(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &mut Model<O>,
        rows: usize,
        weight: f32,
    ) -> Result<f64> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let tuned = student.head().is_tuned();
        let mut losses = vec![0.0; rows];
        if tuned {
            ops.clear(&mut self.dw, vocab * hidden)?;
        }
        for start in (0..rows).step_by(self.head_rows) {
            let n = self.head_rows.min(rows - start);
            self.logits(ops, teacher, student, start, n)?;
            self.losses(ops, weight, &mut losses[start..start + n])?;
            if tuned {
                let g = Gemm::weight_grad(n, vocab, hidden).add();
                ops.gemm(g, &self.logits, &self.head_in, &mut self.dw)?;
            }
            // `logits` has left the student's head where it is computed to.
            let w = student.head().load(ops, &mut self.f.w)?;
            let g = Gemm::input_grad(n, vocab, hidden);
            ops.gemm(g, &self.logits, w, &mut self.head_in)?;
            ops.copy(
                (&self.head_in, 0),
                (&mut self.dh, start * hidden),
                n * hidden,
            )?;
        }
        if tuned {
            student.head_mut().accumulate(ops, &self.dw)?;
        }
        let norm = &mut student.final_norm;
        if let Some(state) = &mut norm.state {
            let x = &self.xs[self.config.num_hidden_layers];
            ops.rms_norm_grad(
                x,
                &norm.value,
                &self.inv,
                &self.dh,
                &mut self.dx,
                false,
                &mut state.grad,
                (rows, hidden),
            )?;
        }
        Ok(sum(&losses) / rows as f64)
    }

    /// The gradient at a Linear's weight, from its output's `dy` and its input `x`.
    fn weight_gradient(
        ops: &O,
        model: &mut Model<O>,
        (layer, kind, rows): (usize, LinearKind, usize),
        dy: &O::Floats,
        x: &O::Floats,
        dw: &mut O::Floats,
    ) -> Result<()> {
        let (n, k) = kind.dims(&model.config);
        let matrix = model.layers[layer].linear_mut(kind);
        if matrix.is_tuned() {
            ops.gemm(Gemm::weight_grad(rows, n, k), dy, x, dw)?;
            matrix.accumulate(ops, dw)?;
        }
        Ok(())
    }

    /// From the gradient at a layer's output to that after its attention, both in `dx`.
    fn mlp_gradient(
        &mut self,
        ops: &O,
        model: &mut Model<O>,
        layer: usize,
        rows: usize,
    ) -> Result<()> {
        let c = &self.config;
        let MlpSpec::SwiGlu { .. } = c.layer().mlp; // another MLP is another function
        let (hidden, inter, eps) = (c.hidden_size, c.intermediate_size, c.rms_norm_eps);
        let s = &mut self.saved[layer];
        let (w, dw) = (&mut self.f.w, &mut self.dw);
        let id = |kind| (layer, kind, rows);
        let input_grad = |kind: LinearKind| {
            let (n, k) = kind.dims(c);
            Gemm::input_grad(rows, n, k)
        };

        ops.silu_mul(&s.gate, &s.up, &mut self.f.wide, rows * inter)?;
        Self::weight_gradient(ops, model, id(LinearKind::Down), &self.dx, &self.f.wide, dw)?;
        let down = model.layers[layer].linear(LinearKind::Down).load(ops, w)?;
        ops.gemm(
            input_grad(LinearKind::Down),
            &self.dx,
            down,
            &mut self.wide2,
        )?;
        ops.silu_mul_grad(&mut s.gate, &mut s.up, &self.wide2, rows * inter)?;

        let gain = &model.layers[layer].norm(NormKind::Mlp).value;
        ops.rms_norm(
            &s.mid,
            gain,
            &mut self.f.h,
            &mut s.inv2,
            (rows, hidden),
            eps,
        )?;
        Self::weight_gradient(ops, model, id(LinearKind::Gate), &s.gate, &self.f.h, dw)?;
        Self::weight_gradient(ops, model, id(LinearKind::Up), &s.up, &self.f.h, dw)?;
        let gate = model.layers[layer].linear(LinearKind::Gate).load(ops, w)?;
        ops.gemm(input_grad(LinearKind::Gate), &s.gate, gate, &mut self.dh)?;
        let up = model.layers[layer].linear(LinearKind::Up).load(ops, w)?;
        ops.gemm(input_grad(LinearKind::Up).add(), &s.up, up, &mut self.dh)?;
        let norm = model.layers[layer].norm_mut(NormKind::Mlp);
        if let Some(state) = &mut norm.state {
            ops.rms_norm_grad(
                &s.mid,
                &norm.value,
                &s.inv2,
                &self.dh,
                &mut self.dx,
                true,
                &mut state.grad,
                (rows, hidden),
            )?;
        }
        Ok(())
    }

    /// From the gradient after a layer's attention to that at its input, both in `dx`.
    fn attention_gradient(
        &mut self,
        ops: &O,
        model: &mut Model<O>,
        layer: usize,
        rows: usize,
    ) -> Result<()> {
        let (qs, ks) = (
            self.heads(rows, self.config.num_attention_heads),
            self.heads(rows, self.config.num_key_value_heads),
        );
        let c = &self.config;
        let (hidden, eps) = (c.hidden_size, c.rms_norm_eps);
        let s = &mut self.saved[layer];
        let (w, dw) = (&mut self.f.w, &mut self.dw);
        let id = |kind| (layer, kind, rows);
        let input_grad = |kind: LinearKind| {
            let (n, k) = kind.dims(c);
            Gemm::input_grad(rows, n, k)
        };
        let shape = (rows / self.seq, self.seq);
        let a = AttentionProducts::of(c, shape.0, shape.1);
        let score_rows = qs.rows() * qs.heads;

        Self::weight_gradient(ops, model, id(LinearKind::O), &self.dx, &s.o, dw)?;
        let o = model.layers[layer].linear(LinearKind::O).load(ops, w)?;
        ops.gemm(input_grad(LinearKind::O), &self.dx, o, &mut self.f.wide)?;
        ops.rows_to_heads(&self.f.wide, &mut self.f.heads, qs)?;

        attention_weights(ops, c, shape, s, &mut self.f.p)?;
        ops.gemm(a.values_grad, &self.f.p, &self.f.heads, &mut self.f.kv)?;
        ops.heads_to_rows(&self.f.kv, &mut self.dv, ks)?;
        ops.gemm(a.weights_grad, &self.f.heads, &s.vh, &mut self.dp)?;
        ops.softmax_grad(&self.f.p, &mut self.dp, score_rows, self.seq)?;
        ops.gemm(a.queries_grad, &self.dp, &s.kh, &mut self.f.heads)?;
        ops.gemm(a.keys_grad, &self.dp, &s.qh, &mut self.f.kv)?;
        let turns = &self.f.cos_sin;
        let norm = model.layers[layer].norm_mut(NormKind::Q);
        if let Some(state) = &mut norm.state {
            let (dy, dx) = (&self.f.heads, &mut self.f.wide);
            let (gain, grad) = (&norm.value, &mut state.grad);
            ops.head_norm_rope_grad(&s.q, gain, turns, &s.inv_q, dy, dx, grad, qs)?;
        }
        let norm = model.layers[layer].norm_mut(NormKind::K);
        if let Some(state) = &mut norm.state {
            let (gain, grad) = (&norm.value, &mut state.grad);
            let (dy, dx) = (&self.f.kv, &mut self.dk);
            ops.head_norm_rope_grad(&s.k, gain, turns, &s.inv_k, dy, dx, grad, ks)?;
        }

        let x = &self.xs[layer];
        let gain = &model.layers[layer].norm(NormKind::Attention).value;
        ops.rms_norm(x, gain, &mut self.f.h, &mut s.inv1, (rows, hidden), eps)?;
        let grads = [
            (LinearKind::Q, &self.f.wide),
            (LinearKind::K, &self.dk),
            (LinearKind::V, &self.dv),
        ];
        for (i, (kind, dy)) in grads.into_iter().enumerate() {
            Self::weight_gradient(ops, model, id(kind), dy, &self.f.h, dw)?;
            let weight = model.layers[layer].linear(kind).load(ops, w)?;
            let mut g = input_grad(kind);
            g.accumulate = i > 0;
            ops.gemm(g, dy, weight, &mut self.dh)?;
        }
        let norm = model.layers[layer].norm_mut(NormKind::Attention);
        if let Some(state) = &mut norm.state {
            ops.rms_norm_grad(
                x,
                &norm.value,
                &s.inv1,
                &self.dh,
                &mut self.dx,
                true,
                &mut state.grad,
                (rows, hidden),
            )?;
        }
        Ok(())
    }
}
