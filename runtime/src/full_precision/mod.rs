//! The operations of a layer in f32 over whole sequences, on any device of `kernels::grad`: for the
//! layer stepper on a GPU, and for training, which needs the intermediate results.
//!
//! Heads are laid out `[sequence, kv head, query head of its group, token, dim]`, so that the
//! queries that share a key head are one matrix, and attention is a batch of plain products.

mod stepper;
mod turned;

pub use stepper::{hold_head, hold_layer, hold_work, stepper};

use crate::error::{Error, Result};
use crate::forward::{
    Attention, Delta, Experts, HeadVectors, Layer, Mlp, Operand, Ops, Packed, Shared,
};
use crate::states::{delta_shape, shape_of};
use nq_formats::ModelConfig;
use nq_formats::models::Product;
use nq_kernels::Routes;
use nq_kernels::grad::{Allocate, DeltaInputs, DeltaWork, Gemm, HeadShape, LayerOps};
use std::marker::PhantomData;
use turned::Turned;

/// A weight on a device: its values, or something from which they are computed.
pub trait Load<O: LayerOps> {
    /// Its values `[out, in]`: those it holds, or values computed into `scratch`.
    ///
    /// # Errors
    /// Errors of the device.
    fn load<'a>(&'a self, ops: &O, scratch: &'a mut O::Floats)
    -> nq_kernels::Result<&'a O::Floats>;
}

/// Intermediate results of a layer's forward that the backward needs.
pub struct Tape<O: Allocate> {
    /// `[rows]`, inverse root mean squares of the norm before attention.
    pub inv1: O::Floats,
    /// `[rows]`, those of the norm before the MLP.
    pub inv2: O::Floats,
    /// `[rows, q_dim]`, queries before norm and rotation.
    pub q: O::Floats,
    /// `[rows, kv_dim]`, keys before norm and rotation.
    pub k: O::Floats,
    /// `[rows, heads]`, inverse root mean squares of the queries' norm.
    pub inv_q: O::Floats,
    /// `[rows, kv_heads]`, those of the keys' norm.
    pub inv_k: O::Floats,
    /// `[batch, heads, seq, dim]`, queries after norm and rotation.
    pub qh: O::Floats,
    /// `[batch, kv_heads, seq, dim]`, keys after norm and rotation.
    pub kh: O::Floats,
    /// `[batch, kv_heads, seq, dim]`, values.
    pub vh: O::Floats,
    /// `[rows, q_dim]`, the input of `o_proj`; with recurrences at least as wide as that of their output.
    pub o: O::Floats,
    /// `[rows, hidden]`, the residual stream after attention.
    pub mid: O::Floats,
    /// `[rows, intermediate]`, or the width of a shared expert; of the last expert in a layer with experts.
    pub gate: O::Floats,
    /// `[rows, intermediate]`, the same for up.
    pub up: O::Floats,
}

impl<O: Allocate> Tape<O> {
    /// Allocates it for `rows` tokens.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(ops: &O, c: &ModelConfig, rows: usize) -> Result<Self> {
        let floats = |width: usize| ops.floats("activations of a layer", rows * width);
        let (q, kv, mlp) = (c.q_dim(), c.kv_dim(), widest_mlp(c));
        let values = shape_of(c).map_or(0, |d| d.values());
        Ok(Tape {
            inv1: floats(1)?,
            inv2: floats(1)?,
            q: floats(q)?,
            k: floats(kv)?,
            inv_q: floats(c.num_attention_heads)?,
            inv_k: floats(c.num_key_value_heads)?,
            qh: floats(q)?,
            kh: floats(kv)?,
            vh: floats(kv)?,
            o: floats(q.max(values))?,
            mid: floats(c.hidden_size)?,
            gate: floats(mlp)?,
            up: floats(mlp)?,
        })
    }
}

/// Buffers that each layer's forward uses in turn.
pub struct Workspace<O: Allocate> {
    config: ModelConfig,
    /// `[seq, dim / 2]` pairs of cosine and sine.
    pub cos_sin: O::Floats,
    /// `[rows, hidden]`: the output of a norm.
    pub h: O::Floats,
    /// `[rows, max(intermediate, q_dim)]`, or the products that a recurrence is made of
    pub wide: O::Floats,
    /// `[rows, q_dim]`
    pub heads: O::Floats,
    /// `[rows, kv_dim]`
    pub kv: O::Floats,
    /// `[batch, heads, seq, seq]`, attention weights.
    pub p: O::Floats,
    /// Room for the largest weight whose values are computed.
    pub w: O::Floats,
    /// `[rows]` ones, which spread biases over rows; empty if there are no biases.
    pub ones: O::Floats,
    gates: O::Floats, // [rows, q_dim], of what heads attended to; empty if they have none
    delta: Option<DeltaBuffers<O>>,
    experts: Option<ExpertWork<O>>,
}

/// Further buffers for layers with recurrences.
struct DeltaBuffers<O: Allocate> {
    rates: O::Floats, // [rows, 2 value_heads]
    work: DeltaWork<O::Floats>,
}

/// The widest hidden values of a SwiGLU of a model of shape `c`: of an MLP, an expert or a shared expert.
fn widest_mlp(c: &ModelConfig) -> usize {
    c.mlp_width().max(c.experts.map_or(0, |e| e.shared))
}

/// Further buffers for layers with experts.
struct ExpertWork<O: Allocate> {
    scores: O::Floats,   // [rows, experts]
    weights: O::Floats,  // [rows], of one expert
    weighted: O::Floats, // [rows, width of an expert]
}

impl<O: Allocate> Workspace<O> {
    /// Allocates buffers for `batch` sequences of `seq` tokens (or more but shorter sequences of as many
    /// tokens together) and for computed weights of up to `largest` values.
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
        let rotations = Turned::new(c).pairs(c, seq);
        let delta = shape_of(c);
        let products = delta.map_or(0, |d| d.channels() + d.values());
        let mut cos_sin = floats(2 * rotations.len())?;
        ops.write(&mut cos_sin, rotations.as_flattened())?;
        Ok(Workspace {
            config: c.clone(),
            cos_sin,
            h: floats(rows * c.hidden_size)?,
            wide: floats(rows * widest_mlp(c).max(c.q_dim()).max(products))?,
            heads: floats(rows * c.q_dim())?,
            kv: floats(rows * c.kv_dim())?,
            p: floats(batch * c.num_attention_heads * seq * seq)?,
            w: floats(largest)?,
            ones: ones(ops, c, rows)?,
            gates: floats(rows * c.gate_dim())?,
            delta: match delta {
                None => None,
                Some(shape) => Some(DeltaBuffers {
                    rates: floats(rows * 2 * shape.value_heads)?,
                    work: DeltaWork::new(ops, &shape, (batch, seq))?,
                }),
            },
            experts: match c.experts {
                None => None,
                Some(experts) => Some(ExpertWork {
                    scores: floats(rows * experts.count)?,
                    weights: floats(rows)?,
                    weighted: floats(rows * experts.width)?,
                }),
            },
        })
    }
}

/// A layer's forward over `batch` sequences of `seq` tokens, with a weight of type `M` per Linear and
/// gains of type `G`.
pub struct Pass<'a, O: LayerOps, M, G> {
    ops: &'a O,
    work: &'a mut Workspace<O>,
    tape: &'a mut Tape<O>,
    batch: usize,
    seq: usize,
    x: &'a O::Floats,       // [rows, hidden]
    out: &'a mut O::Floats, // [rows, hidden]
    shown: &'a mut Shown<'a, O>,
    every_expert: bool,
    of: PhantomData<fn(&M, &G)>,
}

/// An intermediate value of a layer, passed to its observer.
pub enum Seen<'a, O: Allocate> {
    /// The input `[rows, in]` of a product. The number is the expert's if experts have inputs of their
    /// own.
    Input(&'a Product, usize, &'a O::Floats),
    /// The experts that the rows are routed to.
    Routes(&'a Routes),
}

/// Observer of a pass.
pub type Shown<'a, O> = dyn FnMut(Seen<'_, O>) -> Result<()> + 'a;

impl<'a, O: LayerOps, M: Load<O>, G: AsRef<O::Floats>> Pass<'a, O, M, G> {
    /// A pass from the residual stream `x` to `out`, over `(batch, seq)`: sequences and tokens of each.
    /// Leaves on `tape` the intermediate results that a backward needs.
    pub fn new(
        ops: &'a O,
        (work, tape): (&'a mut Workspace<O>, &'a mut Tape<O>),
        (batch, seq): (usize, usize),
        (x, out): (&'a O::Floats, &'a mut O::Floats),
        shown: &'a mut Shown<'a, O>,
    ) -> Self {
        Pass {
            ops,
            work,
            tape,
            batch,
            seq,
            x,
            out,
            shown,
            every_expert: false,
            of: PhantomData,
        }
    }

    /// Sets whether every expert's input is shown for all rows, including rows not routed to it.
    #[must_use]
    pub(crate) fn through_every_expert(mut self, every: bool) -> Self {
        self.every_expert = every;
        self
    }

    /// Runs a layer.
    ///
    /// # Errors
    /// Errors of the device and of the observer.
    pub fn run(&mut self, layer: &Layer<Vec<M>, G>) -> Result<()> {
        layer.run(self)
    }

    fn rows(&self) -> usize {
        self.batch * self.seq
    }
}

/// Multiplies `from` by each of the weights `w`, into the outputs `to`; with `add`, adds to them.
///
/// # Errors
/// Errors of the device.
pub fn multiply<O: LayerOps, M: Load<O>>(
    (ops, c): (&O, &ModelConfig),
    w: &Packed<Vec<M>>,
    rows: usize,
    (from, to): (&O::Floats, &mut [&mut O::Floats]),
    add: bool,
    scratch: &mut O::Floats,
) -> Result<()> {
    debug_assert_eq!(w.linear.len(), to.len(), "{}", w.spec.name);
    for ((linear, weight), to) in w.spec.linears.iter().zip(&w.linear).zip(to) {
        let (n, k) = linear.dims(c);
        let product = Gemm {
            accumulate: add,
            ..Gemm::linear(rows, n, k)
        };
        ops.gemm(product, from, weight.load(ops, scratch)?, to)?;
    }
    Ok(())
}

/// `[rows]` ones, which spread biases over rows; empty if no Linear of a model of shape `c` has one.
///
/// # Errors
/// If the device has not enough memory.
pub fn ones<O: Allocate>(ops: &O, c: &ModelConfig, rows: usize) -> Result<O::Floats> {
    let biased = c.architecture.matrices().any(|l| l.bias);
    let values = vec![1.0; if biased { rows } else { 0 }];
    let mut ones = ops.floats("ones", values.len())?;
    ops.write(&mut ones, &values)?;
    Ok(ones)
}

/// Adds to each of the first `rows` rows of queries, keys and values its bias, if they have biases; `ones`
/// `[rows]` spreads them.
///
/// # Errors
/// Errors of the device.
pub fn add_biases<O: LayerOps, G: AsRef<O::Floats>>(
    (ops, c): (&O, &ModelConfig),
    biases: &[G],
    (ones, rows): (&O::Floats, usize),
    to: [&mut O::Floats; 3],
) -> Result<()> {
    let widths = [c.q_dim(), c.kv_dim(), c.kv_dim()];
    for ((bias, to), width) in biases.iter().zip(to).zip(widths) {
        let spread = Gemm::linear(rows, width, 1).add();
        ops.gemm(spread, ones, bias.as_ref(), to)?;
    }
    Ok(())
}

impl<O: LayerOps, M: Load<O>, G: AsRef<O::Floats>> Pass<'_, O, M, G> {
    /// Normalizes the rows behind the layer's input, or behind its first block, to `work.h`, and shows them as the
    /// input of `w`.
    fn norm(&mut self, norm: &G, w: &Packed<Vec<M>>, behind: Operand) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (x, inv) = match behind {
            Operand::Attended => (self.x, &mut tape.inv1),
            Operand::Gated => (&tape.mid, &mut tape.inv2),
        };
        let (shape, eps) = ((rows, work.config.hidden_size), work.config.rms_norm_eps);
        ops.rms_norm(x, norm.as_ref(), &mut work.h, inv, shape, eps)?;
        (self.shown)(Seen::Input(w.spec, 0, &work.h))
    }

    /// Queries, keys and values of `work.h`.
    fn project(&mut self, w: &Packed<Vec<M>>) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (c, scratch) = (&work.config, &mut work.w);
        let (q, kv) = (c.q_dim(), c.kv_dim());
        // Of gated heads, the gates have a weight of their own behind the others.
        let outputs = [
            (&mut tape.q, q),
            (&mut tape.k, kv),
            (&mut work.kv, kv),
            (&mut work.gates, q),
        ];
        for (weight, (to, n)) in w.linear.iter().zip(outputs) {
            let product = Gemm::linear(rows, n, c.hidden_size);
            ops.gemm(product, &work.h, weight.load(ops, scratch)?, to)?;
        }
        Ok(())
    }

    fn attend(&mut self, vectors: &HeadVectors<G>) -> Result<()> {
        let (ops, batch, seq) = (self.ops, self.batch, self.seq);
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let c = &work.config;
        let shape = |heads| HeadShape::whole(batch, seq, heads, c.head_dim);
        let (qs, ks) = (shape(c.num_attention_heads), shape(c.num_key_value_heads));
        add_biases(
            (ops, c),
            &vectors.biases,
            (&work.ones, batch * seq),
            [&mut tape.q, &mut tape.k, &mut work.kv],
        )?;
        let (turns, eps, norms) = (&work.cos_sin, c.rms_norm_eps, vectors.norms.as_ref());
        let (q_norm, k_norm) = (norms.map(|n| n[0].as_ref()), norms.map(|n| n[1].as_ref()));
        ops.head_norm_rope(
            &tape.q,
            q_norm,
            turns,
            &mut tape.qh,
            &mut tape.inv_q,
            qs,
            eps,
        )?;
        ops.head_norm_rope(
            &tape.k,
            k_norm,
            turns,
            &mut tape.kh,
            &mut tape.inv_k,
            ks,
            eps,
        )?;
        ops.rows_to_heads(&work.kv, &mut tape.vh, ks)?;
        let values = AttentionProducts::of(c, batch, seq).values;
        attention_weights(ops, c, (batch, seq), tape, &mut work.p)?;
        ops.gemm(values, &work.p, &tape.vh, &mut work.heads)?;
        ops.heads_to_rows(&work.heads, &mut tape.o, qs)?;
        if vectors.gated {
            let each = (batch * seq * c.q_dim(), 1);
            ops.scale_rows(&work.gates, &mut tape.o, each)?;
        }
        Ok(())
    }

    fn add(&mut self, operand: Operand, w: &Packed<Vec<M>>) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (before, from, to) = match operand {
            Operand::Attended => (self.x, &tape.o, &mut tape.mid),
            Operand::Gated => (&tape.mid, &work.wide, &mut *self.out),
        };
        let (c, scratch) = (&work.config, &mut work.w);
        (self.shown)(Seen::Input(w.spec, 0, from))?;
        ops.copy((before, 0), (&mut *to, 0), rows * c.hidden_size)?;
        multiply((ops, c), w, rows, (from, &mut [to]), true, scratch)
    }
}

impl<O: LayerOps, M: Load<O>, G: AsRef<O::Floats>> Ops for Pass<'_, O, M, G> {
    type Linear = Vec<M>;
    type Vector = G;
    type Error = Error;

    fn add_attention(
        &mut self,
        _layer: usize,
        norm: &G,
        attention: &Attention<Vec<M>, G>,
    ) -> Result<()> {
        self.norm(norm, &attention.qkv, Operand::Attended)?;
        self.project(&attention.qkv)?;
        self.attend(&attention.heads)?;
        self.add(Operand::Attended, &attention.o)
    }

    fn add_mlp(&mut self, _layer: usize, norm: &G, mlp: &Mlp<Vec<M>>) -> Result<()> {
        self.norm(norm, &mlp.gate_up, Operand::Gated)?;
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (c, scratch) = (&work.config, &mut work.w);
        let to = &mut [&mut tape.gate, &mut tape.up];
        multiply((ops, c), &mlp.gate_up, rows, (&work.h, to), false, scratch)?;
        let values = rows * c.mlp_width();
        ops.silu_mul(&tape.gate, &tape.up, &mut work.wide, values)?;
        self.add(Operand::Gated, &mlp.down)
    }

    fn add_delta(&mut self, _layer: usize, norm: &G, delta: &Delta<Vec<M>, G>) -> Result<()> {
        self.norm(norm, &delta.inputs, Operand::Attended)?;
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (c, scratch) = (&work.config, &mut work.w);
        let (shape, Some(own)) = (delta_shape(c), &mut work.delta) else {
            unreachable!("layers with recurrences have a shape for them");
        };
        let (hidden, eps) = (c.hidden_size, c.rms_norm_eps);
        // Each product's Linears are one weight here.
        let products = shape.channels() + shape.values();
        for (w, n, to) in [
            (&delta.inputs, products, &mut work.wide),
            (&delta.rates, 2 * shape.value_heads, &mut own.rates),
        ] {
            let product = Gemm::linear(rows, n, hidden);
            ops.gemm(product, &work.h, w.linear[0].load(ops, scratch)?, to)?;
        }
        let vectors = &delta.vectors;
        let inputs = DeltaInputs {
            shape,
            batch: self.batch,
            seq: self.seq,
            qkvz: &work.wide,
            ba: &own.rates,
            conv: vectors.conv.as_ref(),
            decay: vectors.decay.as_ref(),
            dt_bias: vectors.dt_bias.as_ref(),
            norm: vectors.norm.as_ref(),
            eps,
        };
        ops.delta(inputs, &mut own.work, &mut tape.o)?;
        self.add(Operand::Attended, &delta.out)
    }

    /// Sends every row through every expert that some row is routed to: 16 times the work of a mixture
    /// of 8 in 128 experts, but statistics of inputs need it.
    fn add_experts(&mut self, _layer: usize, norm: &G, experts: &Experts<Vec<M>>) -> Result<()> {
        self.norm(norm, &experts.gate_up, Operand::Gated)?;
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (c, scratch) = (&work.config, &mut work.w);
        let (Some(shape), Some(own)) = (&c.experts, &mut work.experts) else {
            unreachable!("layers with experts have an expert shape");
        };
        let (hidden, width) = (c.hidden_size, shape.width);
        let router = experts.router.linear[0].load(ops, scratch)?;
        let scoring = Gemm::linear(rows, shape.count, hidden);
        ops.gemm(scoring, &work.h, router, &mut own.scores)?;
        let mut scores = vec![0.0; rows * shape.count];
        ops.read(&own.scores, &mut scores)?;
        let routes = Routes::new(&scores, shape);
        (self.shown)(Seen::Routes(&routes))?;
        ops.copy((&tape.mid, 0), (&mut *self.out, 0), rows * hidden)?;
        let (gates, ups) = experts.gate_up.linear.split_at(shape.count);
        let first = Gemm::linear(rows, width, hidden);
        // Scales each row by its own factor.
        let by_row = Gemm {
            batch: rows,
            ..Gemm::input_grad(1, 1, width)
        };
        let last = Gemm::linear(rows, hidden, width).add();
        let mut by_expert = routes.by_expert().into_iter().peekable();
        for expert in 0..shape.count {
            let routed = by_expert.next_if(|(e, _)| *e == expert);
            if routed.is_none() && !self.every_expert {
                continue;
            }
            ops.gemm(
                first,
                &work.h,
                gates[expert].load(ops, scratch)?,
                &mut tape.gate,
            )?;
            ops.gemm(
                first,
                &work.h,
                ups[expert].load(ops, scratch)?,
                &mut tape.up,
            )?;
            ops.silu_mul(&tape.gate, &tape.up, &mut work.wide, rows * width)?;
            (self.shown)(Seen::Input(experts.down.spec, expert, &work.wide))?;
            let Some((_, routed)) = routed else {
                continue;
            };
            let mut weights = vec![0.0; rows];
            routed
                .into_iter()
                .for_each(|(row, weight)| weights[row] = weight);
            ops.write(&mut own.weights, &weights)?;
            ops.gemm(by_row, &own.weights, &work.wide, &mut own.weighted)?;
            let down = experts.down.linear[expert].load(ops, scratch)?;
            ops.gemm(last, &own.weighted, down, self.out)?;
        }
        match &experts.shared {
            None => Ok(()),
            Some(shared) => self.add_shared(shared),
        }
    }
}

impl<O: LayerOps, M: Load<O>, G: AsRef<O::Floats>> Pass<'_, O, M, G> {
    /// Adds the expert of all rows, whose input is `work.h`, to `out`.
    fn add_shared(&mut self, shared: &Shared<Vec<M>>) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (c, scratch) = (&work.config, &mut work.w);
        let (Some(shape), Some(own)) = (&c.experts, &mut work.experts) else {
            unreachable!("layers with experts have an expert shape");
        };
        let (gate_up, down) = (&shared.mlp.gate_up, &shared.mlp.down);
        (self.shown)(Seen::Input(gate_up.spec, 0, &work.h))?;
        let to = &mut [&mut tape.gate, &mut tape.up];
        multiply((ops, c), gate_up, rows, (&work.h, to), false, scratch)?;
        let shape = (rows, shape.shared);
        let values = rows * shape.1;
        ops.silu_mul(&tape.gate, &tape.up, &mut work.wide, values)?;
        let to = &mut [&mut own.weights];
        multiply((ops, c), &shared.score, rows, (&work.h, to), false, scratch)?;
        ops.scale_rows(&own.weights, &mut work.wide, shape)?;
        (self.shown)(Seen::Input(down.spec, 0, &work.wide))?;
        let to = &mut [&mut *self.out];
        multiply((ops, c), down, rows, (&work.wide, to), true, scratch)
    }
}

/// The products of attention over all key heads of a batch: queries `[group * seq, dim]`
/// against keys and values `[seq, dim]`.
pub struct AttentionProducts {
    /// Scores, from queries and keys.
    pub scores: Gemm,
    /// Outputs, from attention weights and values.
    pub values: Gemm,
    /// The gradient of the values.
    pub values_grad: Gemm,
    /// The gradient of the attention weights.
    pub weights_grad: Gemm,
    /// The gradient of the queries.
    pub queries_grad: Gemm,
    /// The gradient of the keys.
    pub keys_grad: Gemm,
}

impl AttentionProducts {
    /// The products over `batch` sequences of `seq` tokens.
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
        AttentionProducts {
            scores: product((m, seq, dim), false, true, scale),
            values: product((m, dim, seq), false, false, 1.0),
            values_grad: product((seq, dim, m), true, false, 1.0),
            weights_grad: product((m, seq, dim), false, true, 1.0),
            queries_grad: product((m, dim, seq), false, false, scale),
            keys_grad: product((seq, dim, m), true, false, scale),
        }
    }
}

/// Computes into `p` the softmax of the scores of all queries on `tape` against the keys up to each.
///
/// # Errors
/// Errors of the device.
pub fn attention_weights<O: LayerOps>(
    ops: &O,
    c: &ModelConfig,
    (batch, seq): (usize, usize),
    tape: &Tape<O>,
    p: &mut O::Floats,
) -> Result<()> {
    ops.gemm(
        AttentionProducts::of(c, batch, seq).scores,
        &tape.qh,
        &tape.kh,
        p,
    )?;
    let rows = batch * seq * c.num_attention_heads;
    Ok(ops.causal_softmax(p, rows, seq)?)
}
