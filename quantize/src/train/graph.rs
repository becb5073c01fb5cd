//! Forward and backward of a model over whole sequences, and the KL divergence of the
//! student's logits against the teacher's.
//!
//! Results of the forward that the backward needs are kept if they are expensive to compute
//! (products), and recomputed if they are cheap (norms, SiLU, attention weights).

use super::params::{DeviceMatrix, Model};
use super::values::Values;
use crate::error::{Error, Result};
use nq_f32::{
    AttentionProducts, Columns, DeltaBuffers, Load, Pass, SplitQueries, Tape, Workspace,
    attention_weights,
};
use nq_kernels::delta::DeltaShape;
use nq_kernels::grad::{
    Allocate, DeltaGradWork, DeltaGrads, Gemm, GradOps, HeadShape, Occurrences,
};
use nq_model::forward::{Attention, Block, Delta, Mix, Mlp, Packed, Projection};
use nq_model::{Dims, LayerSpec, Mixer, ModelConfig};
use nq_runtime::states::shape_of;

/// Most logits held at once, per model.
const LOGITS: usize = 1 << 26;

/// What keeps a model from being tuned, if anything does: training supports attention or a recurrence, and one MLP per
/// layer.
pub fn untrainable(c: &ModelConfig) -> Option<&'static str> {
    let blocks = c.architecture.kinds.iter().flat_map(|k| k.blocks);
    blocks.rev().find_map(|b| match b.hyper {
        Some(_) => Some("a model with several residual streams"),
        None => untrainable_mixer(&b.mixer),
    })
}

fn untrainable_mixer(mixer: &Mixer) -> Option<&'static str> {
    match mixer {
        Mixer::Attention(_) | Mixer::Delta(_) | Mixer::Mlp(_) => None,
        Mixer::Experts(_) => Some("a mixture of experts"),
        Mixer::Ngrams(_) => Some("a model with a table of n-grams"),
    }
}

/// The error for a model of which `found` keeps it from being tuned.
pub(crate) fn refused(found: &str) -> Error {
    Error::Request {
        what: "tuning",
        expected: "a dense model, whose layers have an MLP".into(),
        found: found.into(),
    }
}

/// Buffers for forward and backward over up to `batch` sequences of `seq` tokens.
pub struct Graph<O: Allocate> {
    config: ModelConfig,
    batch: usize,
    seq: usize,
    head_rows: usize,
    f: Workspace<O>,
    ids: O::Ids,         // [rows]
    xs: Vec<O::Floats>,  // layers + 1 of [rows, hidden]
    saved: Vec<Tape<O>>, // by layer
    inv: O::Floats,      // [rows], of the final norm
    teacher: O::Floats,  // [rows, hidden], the teacher's normed output
    dx: O::Floats,       // [rows, hidden]
    dh: O::Floats,       // [rows, hidden]
    wide2: O::Floats,    // [rows, max(intermediate, q_dim + gate_dim, values of a recurrence)]
    dk: O::Floats,       // [rows, kv_dim]
    dv: O::Floats,       // [rows, kv_dim]
    dp: O::Floats,       // [batch, heads, seq, seq]
    delta: Option<DeltaGradients<O>>,
    dw: O::Floats,        // the largest weight
    head_in: O::Floats,   // [head_rows, hidden]
    logits: O::Floats,    // [head_rows, vocab]
    reference: O::Floats, // [head_rows, vocab]
    loss: O::Floats,      // [head_rows]
}

/// Further buffers for the gradients of layers with recurrences.
struct DeltaGradients<O: Allocate> {
    shape: DeltaShape,
    work: DeltaGradWork<O::Floats>,
    qkvz: O::Floats, // [rows, channels + values]
    ba: O::Floats,   // [rows, 2 value_heads]
    b: O::Floats,    // [rows, value_heads]
    a: O::Floats,    // [rows, value_heads]
}

impl<O: Allocate> DeltaGradients<O> {
    fn new(ops: &O, shape: DeltaShape, batch: usize, seq: usize) -> Result<Self> {
        let floats = |width: usize| ops.floats("gradients of a recurrence", batch * seq * width);
        Ok(DeltaGradients {
            shape,
            work: DeltaGradWork::new(ops, &shape, (batch, seq))?,
            qkvz: floats(shape.stride())?,
            ba: floats(2 * shape.value_heads)?,
            b: floats(shape.value_heads)?,
            a: floats(shape.value_heads)?,
        })
    }
}

fn head_rows(c: &ModelConfig, rows: usize) -> usize {
    (LOGITS / c.vocab_size.max(1))
        .clamp(64, rows.max(64))
        .min(rows)
}

/// Number of elements of the largest weight.
fn largest_weight(c: &ModelConfig) -> usize {
    let kinds = c.architecture.kinds.iter();
    kinds
        .flat_map(LayerSpec::linears)
        .map(|l| l.elements(c))
        .max()
        .unwrap_or(0)
        .max(c.vocab_size * c.hidden_size)
}

fn sum(losses: &[f32]) -> f64 {
    losses.iter().map(|&l| f64::from(l)).sum()
}

impl<O: Allocate> Graph<O> {
    /// Allocates buffers for `batch` sequences of `seq` tokens.
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
        let shape = shape_of(c);
        let values = shape.map_or(0, |s| s.values());
        let wide = (c.intermediate_size.max(c.q_dim() + c.gate_dim())).max(values);
        Ok(Graph {
            config: c.clone(),
            batch,
            seq,
            head_rows,
            f: Workspace::new(ops, c, batch, seq, largest_weight(c))?.of_whole_linears(ops)?,
            ids: ops.ids("tokens", rows)?,
            xs,
            saved,
            inv: floats(rows)?,
            teacher: floats(hidden)?,
            dx: floats(hidden)?,
            dh: floats(hidden)?,
            wide2: floats(rows * wide)?,
            dk: floats(kv)?,
            dv: floats(kv)?,
            dp: floats(batch * c.num_attention_heads * seq * seq)?,
            delta: match shape {
                None => None,
                Some(shape) => Some(DeltaGradients::new(ops, shape, batch, seq)?),
            },
            dw: floats(largest_weight(c))?,
            head_in: floats(head_rows * c.hidden_size)?,
            logits: floats(head_rows * c.vocab_size)?,
            reference: floats(head_rows * c.vocab_size)?,
            loss: floats(head_rows)?,
        })
    }
}

impl<O: GradOps> Graph<O> {
    /// Most sequences in a pass.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Mean KL divergence of `student` from `teacher` over all positions of `tokens`
    /// (`[batch, seq]`), in nats.
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

    /// Like [`Graph::divergence`], for each position.
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

    /// Takes the teacher's outputs after the final norm at rows `row .. row + n`, for
    /// [`Graph::gradient_towards`], from `outputs` (`[_, hidden]`), beginning at its row `first`.
    ///
    /// # Errors
    /// Rows beyond either buffer; errors of the device.
    pub(crate) fn take_outputs(
        &mut self,
        ops: &O,
        outputs: &O::Floats,
        first: usize,
        row: usize,
        n: usize,
    ) -> Result<()> {
        let width = self.config.hidden_size;
        let to = (&mut self.teacher, row * width);
        Ok(ops.copy((outputs, first * width), to, n * width)?)
    }

    /// Like [`Graph::divergence`]; also adds its gradient, times `share`, to that in `student`.
    #[cfg(test)]
    pub(crate) fn gradient(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &mut Model<O>,
        tokens: &[u32],
        share: f32,
    ) -> Result<f64> {
        ops.write_ids(&mut self.ids, tokens)?;
        self.run_teacher(ops, teacher, tokens.len())?;
        self.gradient_towards(ops, teacher, student, tokens, share)
    }

    /// Like `gradient`, with the teacher's outputs that were taken for each of `tokens`.
    pub(crate) fn gradient_towards(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &mut Model<O>,
        tokens: &[u32],
        share: f32,
    ) -> Result<f64> {
        let rows = tokens.len();
        ops.write_ids(&mut self.ids, tokens)?;
        self.forward(ops, student, rows)?;
        let loss = self.head_gradient(ops, teacher, student, rows, share / rows as f32)?;
        for layer in (0..self.config.num_hidden_layers).rev() {
            for Block { norm, mixer, .. } in student.layers[layer].blocks.iter_mut().rev() {
                match mixer {
                    Mix::Attention(a) => self.attention_gradient(ops, norm, a, layer, rows)?,
                    Mix::Mlp(mlp) => self.mlp_gradient(ops, norm, mlp, layer, rows)?,
                    Mix::Delta(d) => self.delta_gradient(ops, norm, d, layer, rows)?,
                    Mix::Experts(_) | Mix::Ngrams(_) => {
                        return Err(refused(untrainable(&self.config).unwrap_or("this layer")));
                    }
                }
            }
        }
        if student.embedding.is_tuned() {
            let width = self.config.hidden_size;
            ops.clear(&mut self.dw, self.config.vocab_size * width)?;
            let occurrences = Occurrences::new(tokens);
            let dw = student.embedding.gradient();
            let dw = dw.unwrap_or(&mut self.dw);
            ops.embed_grad(&self.dx, &occurrences, dw, width)?;
            student.embedding.accumulate(ops, &self.dw)?;
        }
        Ok(loss)
    }

    /// Leaves the teacher's final normed output in `teacher`, and the student's in `h`.
    fn forward_both(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        student: &Model<O>,
        tokens: &[u32],
    ) -> Result<()> {
        ops.write_ids(&mut self.ids, tokens)?;
        self.run_teacher(ops, teacher, tokens.len())?;
        self.forward(ops, student, tokens.len())
    }

    fn run_teacher(&mut self, ops: &O, teacher: &Model<O>, rows: usize) -> Result<()> {
        self.forward(ops, teacher, rows)?;
        std::mem::swap(&mut self.f.h, &mut self.teacher);
        Ok(())
    }

    fn heads(&self, rows: usize, heads: usize) -> HeadShape {
        HeadShape::whole(rows / self.seq, self.seq, heads, self.config.head_dim)
    }

    /// Leaves the output of the final norm `[rows, hidden]` in `h`.
    fn forward(&mut self, ops: &O, model: &Model<O>, rows: usize) -> Result<()> {
        let width = self.config.hidden_size;
        let table = model.embedding.load(ops, &mut self.f.w)?;
        ops.embed(table, &self.ids, (rows, 1, 0), &mut self.xs[0], width)?;
        let shape = (rows / self.seq, self.seq);
        for (index, (layer, tape)) in model.layers.iter().zip(&mut self.saved).enumerate() {
            let (before, after) = self.xs.split_at_mut(index + 1);
            let streams = (&before[index], &mut after[0]);
            Pass::new(ops, (&mut self.f, tape), shape, streams, &mut |_| Ok(())).run(layer)?;
        }
        let last = &self.xs[self.config.num_hidden_layers];
        let (norm, eps) = (&model.final_norm.value, self.config.rms_norm_eps);
        ops.rms_norm(
            last,
            norm,
            &mut self.f.h,
            &mut self.inv,
            Dims::new(rows, width),
            eps,
        )?;
        Ok(())
    }

    /// Computes both models' logits for rows `start .. start + n`.
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

    /// Writes the loss of each row to `to`; leaves the gradient times `weight` in `logits`.
    fn losses(&mut self, ops: &O, weight: f32, to: &mut [f32]) -> Result<()> {
        let shape = Dims::new(to.len(), self.config.vocab_size);
        ops.kl_divergence(
            &self.reference,
            &mut self.logits,
            &mut self.loss,
            shape,
            weight,
        )?;
        Ok(ops.read(&self.loss, to)?)
    }

    /// Loss and gradient of the head and the final norm; leaves the gradient at the last layer's
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
                let dw = student.head_mut().gradient();
                let dw = dw.unwrap_or(&mut self.dw);
                ops.gemm(g, &self.logits, &self.head_in, dw)?;
            }
            // `logits` left the student's head in this buffer, if its values are computed.
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
        let x = &self.xs[self.config.num_hidden_layers];
        let (saved, shape) = ((x, &self.inv), Dims::new(rows, hidden));
        let dx = (&mut self.dx, false);
        norm_gradient(ops, &mut student.final_norm, saved, &self.dh, dx, shape)?;
        Ok(sum(&losses) / rows as f64)
    }

    /// From the gradient at a layer's output to the gradient after its attention, both in `dx`.
    fn mlp_gradient(
        &mut self,
        ops: &O,
        norm: &mut Values<O>,
        mlp: &mut Mlp<Vec<DeviceMatrix<O>>>,
        layer: usize,
        rows: usize,
    ) -> Result<()> {
        let (c, f, s) = (&self.config, &mut self.f, &mut self.saved[layer]);
        let (shape, values) = (Dims::new(rows, c.hidden_size), rows * c.intermediate_size);
        let mut product = Products {
            ops,
            c,
            rows,
            w: &mut f.w,
            dw: &mut self.dw,
        };
        ops.silu_mul(&s.gate, &s.up, &mut f.wide, values)?;
        product.gradient(
            &mut mlp.down,
            &[&self.dx],
            &f.wide,
            (&mut self.wide2, false),
        )?;
        ops.silu_mul_grad(&mut s.gate, &mut s.up, &self.wide2, values)?;
        let gain = &norm.value;
        ops.rms_norm(&s.mid, gain, &mut f.h, &mut s.inv2, shape, c.rms_norm_eps)?;
        let dh = (&mut self.dh, false);
        product.gradient(&mut mlp.gate_up, &[&s.gate, &s.up], &f.h, dh)?;
        let dx = (&mut self.dx, true);
        norm_gradient(ops, norm, (&s.mid, &s.inv2), &self.dh, dx, shape)
    }

    /// From the gradient after a layer's attention to the gradient at its input, both in `dx`.
    fn attention_gradient(
        &mut self,
        ops: &O,
        norm: &mut Values<O>,
        attention: &mut Attention<Vec<DeviceMatrix<O>>, Values<O>>,
        layer: usize,
        rows: usize,
    ) -> Result<()> {
        let (qs, ks) = (
            self.heads(rows, self.config.num_attention_heads),
            self.heads(rows, self.config.num_key_value_heads),
        );
        let (c, f, s) = (&self.config, &mut self.f, &mut self.saved[layer]);
        let (batch, seq) = (rows / self.seq, self.seq);
        let a = AttentionProducts::of(c, batch, seq);
        let mut product = Products {
            ops,
            c,
            rows,
            w: &mut f.w,
            dw: &mut self.dw,
        };
        product.gradient(&mut attention.o, &[&self.dx], &s.o, (&mut f.wide, false))?;
        attention_weights(ops, c, batch, seq, s, &mut f.p)?;
        if attention.heads.gated {
            ops.gemm(a.values, &f.p, &s.vh, &mut f.heads)?;
            ops.heads_to_rows(&f.heads, &mut self.wide2, qs)?;
            ops.gate_grad(&mut s.gates, &self.wide2, &mut f.wide, rows * c.q_dim())?;
        }
        ops.rows_to_heads(&f.wide, &mut f.heads, qs)?;

        ops.gemm(a.values_grad, &f.p, &f.heads, &mut f.kv)?;
        ops.heads_to_rows(&f.kv, &mut self.dv, ks)?;
        ops.gemm(a.weights_grad, &f.heads, &s.vh, &mut self.dp)?;
        ops.softmax_grad(&f.p, &mut self.dp, qs.rows() * qs.heads, self.seq)?;
        ops.gemm(a.queries_grad, &self.dp, &s.kh, &mut f.heads)?;
        ops.gemm(a.keys_grad, &self.dp, &s.qh, &mut f.kv)?;
        let turns = &f.cos_sin;
        let [q_norm, k_norm] = match &mut attention.heads.norms {
            Some(norms) => norms.each_mut().map(Some),
            None => [None, None],
        };
        for (norm, x, inv, dy, dx, shape) in [
            (q_norm, &s.q, &s.inv_q, &f.heads, &mut f.wide, qs),
            (k_norm, &s.k, &s.inv_k, &f.kv, &mut self.dk, ks),
        ] {
            match norm.map(|norm| (&norm.value, &mut norm.state)) {
                Some((gain, Some(state))) => {
                    let grad = &mut state.grad;
                    ops.head_norm_rope_grad(x, gain, turns, inv, dy, dx, grad, shape)?;
                }
                Some((_, None)) => {}
                None => ops.head_rope_grad(turns, dy, dx, shape)?,
            }
        }

        let (x, shape) = (&self.xs[layer], Dims::new(rows, c.hidden_size));
        let (gain, eps) = (&norm.value, c.rms_norm_eps);
        ops.rms_norm(x, gain, &mut f.h, &mut s.inv1, shape, eps)?;
        let dqkv = match &f.whole {
            None => [&f.wide, &self.dk, &self.dv],
            Some(whole) => {
                let queries = SplitQueries {
                    whole: &mut self.wide2,
                    ordered: &mut f.heads,
                    turned: &mut f.wide,
                    gates: &mut s.gates,
                };
                whole.split_grad(ops, rows * qs.heads, queries)?;
                whole.turn_grad(ops, rows * ks.heads, &self.dk, &mut f.kv)?;
                [&self.wide2, &f.kv, &self.dv]
            }
        };
        product.gradient(&mut attention.qkv, &dqkv, &f.h, (&mut self.dh, false))?;
        let dx = (&mut self.dx, true);
        norm_gradient(ops, norm, (x, &s.inv1), &self.dh, dx, shape)
    }

    /// From the gradient after a layer's recurrence to the gradient at its input, both in `dx`.
    fn delta_gradient(
        &mut self,
        ops: &O,
        norm: &mut Values<O>,
        delta: &mut Delta<Vec<DeviceMatrix<O>>, Values<O>>,
        layer: usize,
        rows: usize,
    ) -> Result<()> {
        let (c, f, s) = (&self.config, &mut self.f, &mut self.saved[layer]);
        let Some(own) = &mut self.delta else {
            unreachable!("a graph of a model with recurrences has buffers for their gradients");
        };
        let mut product = Products {
            ops,
            c,
            rows,
            w: &mut f.w,
            dw: &mut self.dw,
        };
        let values = (&mut self.wide2, false);
        product.gradient(&mut delta.out, &[&self.dx], &s.o, values)?;

        let (x, shape) = (&self.xs[layer], Dims::new(rows, c.hidden_size));
        ops.rms_norm(x, &norm.value, &mut f.h, &mut s.inv1, shape, c.rms_norm_eps)?;
        f.project_delta(ops, &delta.inputs, Projection::Mixer, rows)?;
        f.project_delta(ops, &delta.rates, Projection::Rates, rows)?;
        let (inputs, work) = f.delta_inputs(&delta.vectors, (rows / self.seq, self.seq));
        let to = DeltaGrads {
            qkvz: &mut own.qkvz,
            ba: &mut own.ba,
        };
        ops.delta_grad(inputs, (work, &mut own.work), &self.wide2, to)?;

        let Some(DeltaBuffers { work, .. }) = &mut f.delta else {
            unreachable!("a workspace of a model with recurrences has buffers for them");
        };
        let (channels, width) = (own.shape.channels(), own.shape.stride());
        let (at, n) = (channels, width - channels);
        let qkv = Columns {
            at: 0,
            n: at,
            width,
        };
        qkv.take(ops, rows, &own.qkvz, &mut work.mixed)?;
        Columns { at, n, width }.take(ops, rows, &own.qkvz, &mut work.scanned)?;
        let n = own.shape.value_heads;
        for (at, to) in [(0, &mut own.b), (n, &mut own.a)] {
            let columns = Columns {
                at,
                n,
                width: 2 * n,
            };
            columns.take(ops, rows, &own.ba, to)?;
        }
        let mut product = Products {
            ops,
            c,
            rows,
            w: &mut f.w,
            dw: &mut self.dw,
        };
        let mixed = [&work.mixed, &work.scanned];
        product.gradient(&mut delta.inputs, &mixed, &f.h, (&mut self.dh, false))?;
        product.gradient(
            &mut delta.rates,
            &[&own.b, &own.a],
            &f.h,
            (&mut self.dh, true),
        )?;
        let dx = (&mut self.dx, true);
        norm_gradient(ops, norm, (x, &s.inv1), &self.dh, dx, shape)
    }
}

/// Buffers for the gradients of products.
struct Products<'a, O: GradOps> {
    ops: &'a O,
    c: &'a ModelConfig,
    rows: usize,
    w: &'a mut O::Floats,  // the largest weight
    dw: &'a mut O::Floats, // the same
}

impl<O: GradOps> Products<'_, O> {
    /// From the gradients `dy` at a product's outputs, by Linear, and its input `x`: adds the gradient
    /// of each weight to that weight's, and writes the gradient at the input to `dx`, or adds it if `add`.
    fn gradient(
        &mut self,
        product: &mut Packed<Vec<DeviceMatrix<O>>>,
        dy: &[&O::Floats],
        x: &O::Floats,
        (dx, add): (&mut O::Floats, bool),
    ) -> Result<()> {
        let ops = self.ops;
        let linears = product.spec.linears.iter().zip(&mut product.linear).zip(dy);
        for (i, ((linear, weight), dy)) in linears.enumerate() {
            let Dims { rows: n, cols: k } = linear.dims(self.c);
            if weight.is_tuned() {
                let g = Gemm::weight_grad(self.rows, n, k);
                match weight.gradient() {
                    Some(own) => ops.gemm(g.add(), dy, x, own)?,
                    None => ops.gemm(g, dy, x, self.dw)?,
                }
                weight.accumulate(ops, self.dw)?;
            }
            let back = Gemm {
                accumulate: add || i > 0,
                ..Gemm::input_grad(self.rows, n, k)
            };
            ops.gemm(back, dy, weight.load(ops, self.w)?, dx)?;
        }
        Ok(())
    }
}

/// From the gradient `dy` at a norm's output, the norm's input and its inverse root mean squares:
/// adds the gradient of its gains to theirs, if they are tuned, and writes or adds the gradient at the
/// input to `dx`.
fn norm_gradient<O: GradOps>(
    ops: &O,
    norm: &mut Values<O>,
    (x, inv): (&O::Floats, &O::Floats),
    dy: &O::Floats,
    (dx, add): (&mut O::Floats, bool),
    shape: Dims,
) -> Result<()> {
    if let Some(state) = &mut norm.state {
        ops.rms_norm_grad(x, &norm.value, inv, dy, dx, add, &mut state.grad, shape)?;
    }
    Ok(())
}
