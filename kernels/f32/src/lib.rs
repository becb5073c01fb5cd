//! The operations of a layer in f32 over whole sequences, on any device of [`nq_kernels::grad`]: for the
//! layer stepper on a GPU, and for training, which needs the intermediate results.
//!
//! Heads are laid out `[sequence, kv head, query head of its group, token, dim]`, so that the
//! queries that share a key head are one matrix, and attention is a batch of plain products.

#![forbid(unsafe_code)]

mod attention;
mod cpu;
mod dense;
mod head;
mod stepper;
mod turned;
mod whole;

pub use attention::{AttentionProducts, attention_weights};
pub use cpu::{CpuOps, CpuStates};
pub use head::hold_head;
pub use stepper::{hold_layer, hold_work, stepper};
pub use turned::Turned;
pub use whole::{Columns, SplitQueries, WholeHeads, multiply_beside};

use nq_kernels::Routes;
use nq_kernels::grad::{Allocate, DeltaInputs, DeltaWork, Gemm, HeadShape, LayerOps};
use nq_model::forward::{
    Delta, DeltaParameters, Experts, HeadVectors, Layer, Operand, Packed, Projection, Shared,
    StreamVerbs, Verbs,
};
use nq_model::{Dims, LinearKind, LinearSpec, ModelConfig, Product};
use nq_runtime::states::{delta_shape, shape_of};
use nq_runtime::{Error, Result};
use std::marker::PhantomData;

/// A weight on a device: its values, or something from which they are computed.
pub trait Load<O: LayerOps> {
    /// Its values `[out, in]`: those it holds, or values computed into `scratch`.
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
    /// `[rows, q_dim]`, gates of what heads attended to; empty if they have none.
    pub gates: O::Floats,
    /// `[rows, hidden]`, the residual stream after attention.
    pub mid: O::Floats,
    /// `[rows, intermediate]`, or the width of a shared expert. Of no use for a backward in a layer with experts.
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
            gates: floats(c.gate_dim())?,
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
    /// For layers with recurrences.
    pub delta: Option<DeltaBuffers<O>>,
    /// How whole Linears give queries, keys and gates; `None` if weights are as kernels take them.
    pub whole: Option<WholeHeads<O>>,
    experts: Option<ExpertWork<O>>,
}

/// Further buffers for layers with recurrences.
pub struct DeltaBuffers<O: Allocate> {
    /// `[rows, 2 value_heads]`: `b` and `a`.
    pub rates: O::Floats,
    /// What the recurrence works in.
    pub work: DeltaWork<O::Floats>,
}

/// The widest hidden values of a SwiGLU of a model of shape `c`: of an MLP, an expert or a shared expert.
fn widest_mlp(c: &ModelConfig) -> usize {
    c.mlp_width().max(c.experts.map_or(0, |e| e.shared))
}

/// Further buffers for layers with experts.
struct ExpertWork<O: Allocate> {
    scores: O::Floats,  // [rows, experts]
    weights: O::Floats, // [rows], of one expert; of the shared one before
    gated: O::Floats,   // [rows, width of an expert]
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
        batch: usize,
        seq: usize,
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
            wide: floats(rows * widest_mlp(c).max(c.q_dim() + c.gate_dim()).max(products))?,
            heads: floats(rows * c.q_dim())?,
            kv: floats(rows * c.kv_dim())?,
            p: floats(batch * c.num_attention_heads * seq * seq)?,
            w: floats(largest)?,
            ones: ones(ops, c, rows)?,
            whole: None,
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
                    gated: floats(rows * experts.width)?,
                }),
            },
        })
    }
}

impl<O: Allocate> Workspace<O> {
    /// For weights of whole Linears, as files hold them.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn of_whole_linears(mut self, ops: &O) -> Result<Self> {
        self.whole = WholeHeads::new(ops, &self.config)?;
        Ok(self)
    }
}

impl<O: LayerOps> Workspace<O> {
    /// Computes the products of a recurrence of `rows` rows from `h`: into `wide` those that it mixes if `to` is
    /// [`Projection::Mixer`], otherwise its rates.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn project_delta<M: Load<O>>(
        &mut self,
        ops: &O,
        w: &Packed<Vec<M>>,
        to: Projection,
        rows: usize,
    ) -> Result<()> {
        let DeltaBuffers { rates, work } = buffers(&mut self.delta);
        let (to, part) = match to {
            Projection::Mixer => (&mut self.wide, &mut work.mixed),
            _ => (rates, &mut work.scanned),
        };
        let (device, scratch) = ((ops, &self.config), &mut self.w);
        Ok(multiply_beside(
            device,
            w,
            rows,
            (&self.h, to),
            part,
            scratch,
        )?)
    }

    /// The operands of a recurrence over `(batch, seq)` sequences and tokens, from its products, and what it works in.
    pub fn delta_inputs<'a, G: AsRef<O::Floats>>(
        &'a mut self,
        vectors: &'a DeltaParameters<G>,
        (batch, seq): (usize, usize),
    ) -> (DeltaInputs<'a, O::Floats>, &'a mut DeltaWork<O::Floats>) {
        let own = buffers(&mut self.delta);
        let inputs = DeltaInputs {
            shape: delta_shape(&self.config),
            batch,
            seq,
            qkvz: &self.wide,
            ba: &own.rates,
            conv: vectors.conv.as_ref(),
            decay: vectors.decay.as_ref(),
            dt_bias: vectors.dt_bias.as_ref(),
            norm: vectors.norm.as_ref(),
            eps: self.config.rms_norm_eps,
        };
        (inputs, &mut own.work)
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
    blocks: usize, // whose norms were computed
    weights: PhantomData<fn(&M, &G)>,
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
pub(crate) type Shown<'a, O> = dyn FnMut(Seen<'_, O>) -> Result<()> + 'a;

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
            blocks: 0,
            weights: PhantomData,
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
    pub fn run(mut self, layer: &Layer<Vec<M>, G>) -> Result<()> {
        layer.run(&mut self)
    }

    fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Queries, keys, values and gates from products of whole Linears.
    fn project_whole(&mut self, w: &Packed<Vec<M>>) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let c = &work.config;
        let Some(whole) = &work.whole else {
            unreachable!("a workspace of whole Linears");
        };
        for (i, (linear, weight)) in w.spec.linears.iter().zip(&w.linear).enumerate() {
            let to = if i == 0 { &mut work.wide } else { &mut work.kv };
            let Dims { rows: n, cols } = linear.dims(c);
            let product = Gemm::linear(rows, n, cols);
            ops.gemm(product, &work.h, weight.load(ops, &mut work.w)?, to)?;
            match i {
                0 => {
                    let queries = SplitQueries {
                        whole: &mut work.wide,
                        ordered: &mut work.heads,
                        turned: &mut tape.q,
                        gates: &mut tape.gates,
                    };
                    whole.split(ops, rows * c.num_attention_heads, queries)?;
                }
                1 => whole.turn(ops, rows * c.num_key_value_heads, &work.kv, &mut tape.k)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Multiplies `from` by each of the weights `w`, into the outputs `to`; with `add`, adds to them.
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
        let Dims { rows: n, cols: k } = linear.dims(c);
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
pub fn add_biases<O: LayerOps, G: AsRef<O::Floats>>(
    ops: &O,
    c: &ModelConfig,
    biases: &[G],
    ones: &O::Floats,
    rows: usize,
    to: [&mut O::Floats; 3],
) -> Result<()> {
    let widths = [c.q_dim(), c.kv_dim(), c.kv_dim()];
    for ((bias, to), width) in biases.iter().zip(to).zip(widths) {
        let spread = Gemm::linear(rows, width, 1).add();
        ops.gemm(spread, ones, bias.as_ref(), to)?;
    }
    Ok(())
}

impl<O: LayerOps, M: Load<O>, G: AsRef<O::Floats>> Verbs for Pass<'_, O, M, G> {
    type Linear = Vec<M>;
    type Vector = G;
    type Error = Error;

    /// Normalizes the residual stream to `work.h`, and copies the stream to where the block adds to it: from `x` to
    /// `tape.mid`, from there to `out`.
    fn norm(&mut self, norm: &G) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (from, inv, to) = match self.blocks {
            0 => (self.x, &mut tape.inv1, &mut tape.mid),
            1 => (&tape.mid, &mut tape.inv2, &mut *self.out),
            _ => unreachable!("a layer has two blocks, whose norms the tape keeps"),
        };
        self.blocks += 1;
        let (hidden, eps) = (work.config.hidden_size, work.config.rms_norm_eps);
        ops.rms_norm(
            from,
            norm.as_ref(),
            &mut work.h,
            inv,
            Dims::new(rows, hidden),
            eps,
        )?;
        Ok(ops.copy((from, 0), (to, 0), rows * hidden)?)
    }

    fn streams(&mut self) -> Result<&mut dyn StreamVerbs<Vec<M>, G, Error>> {
        Err(Error::no_streams("a forward in full precision"))
    }

    fn project(
        &mut self,
        _layer: usize,
        _norm: &G,
        w: &Packed<Vec<M>>,
        to: Projection,
    ) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let c = &work.config;
        if matches!(to, Projection::Mixer | Projection::Gated) {
            (self.shown)(Seen::Input(w.spec, 0, &work.h))?;
        }
        if matches!(
            w.spec.linears[0].kind,
            LinearKind::DeltaQkv | LinearKind::DeltaB
        ) {
            return work.project_delta(ops, w, to, rows);
        }
        if let (Projection::Mixer, Some(_)) = (to, &work.whole) {
            return self.project_whole(w);
        }
        let outputs = |linear: &LinearSpec| linear.dims(c).rows;
        let (q, kv, width) = (c.q_dim(), c.kv_dim(), outputs(&w.spec.linears[0]));
        let to_each = match to {
            // Of gated heads, the gates have a weight of their own behind the others.
            Projection::Mixer => vec![
                (&mut tape.q, q),
                (&mut tape.k, kv),
                (&mut work.kv, kv),
                (&mut tape.gates, q),
            ],
            Projection::Gated => vec![(&mut tape.gate, width), (&mut tape.up, width)],
            Projection::Rates => unreachable!("rates are those of a recurrence"),
            Projection::Scores => vec![(&mut buffers(&mut work.experts).scores, width)],
            Projection::SharedScore => vec![(&mut buffers(&mut work.experts).weights, width)],
        };
        for (weight, (out, n)) in w.linear.iter().zip(to_each) {
            let product = Gemm::linear(rows, n, c.hidden_size);
            ops.gemm(product, &work.h, weight.load(ops, &mut work.w)?, out)?;
        }
        if to == Projection::Gated {
            ops.silu_mul(&tape.gate, &tape.up, &mut work.wide, rows * width)?;
        }
        Ok(())
    }

    fn attend(
        &mut self,
        _layer: usize,
        vectors: &HeadVectors<G>,
        _o: &Packed<Vec<M>>,
    ) -> Result<()> {
        let (ops, batch, seq) = (self.ops, self.batch, self.seq);
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let c = &work.config;
        let shape = |heads| HeadShape::whole(batch, seq, heads, c.head_dim);
        let (qs, ks) = (shape(c.num_attention_heads), shape(c.num_key_value_heads));
        add_biases(
            ops,
            c,
            &vectors.biases,
            &work.ones,
            batch * seq,
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
        attention_weights(ops, c, batch, seq, tape, &mut work.p)?;
        ops.gemm(values, &work.p, &tape.vh, &mut work.heads)?;
        ops.heads_to_rows(&work.heads, &mut tape.o, qs)?;
        if vectors.gated {
            ops.gate(&tape.gates, &mut tape.o, batch * seq * c.q_dim())?;
        }
        Ok(())
    }

    fn recur(&mut self, _layer: usize, _norm: &G, delta: &Delta<Vec<M>, G>) -> Result<()> {
        let (inputs, work) = (self.work).delta_inputs(&delta.vectors, (self.batch, self.seq));
        Ok((self.ops).delta(inputs, work, &mut self.tape.o)?)
    }

    /// Sends every row through every expert that some row is routed to: 16 times the work of a mixture
    /// of 8 in 128 experts, but statistics of inputs need it. Leaves `work.wide` to the shared expert.
    fn mix(&mut self, _layer: usize, _norm: &G, experts: &Experts<Vec<M>>) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let (c, scratch) = (&work.config, &mut work.w);
        let own = buffers(&mut work.experts);
        let Some(shape) = &c.experts else {
            unreachable!("layers with experts have an expert shape");
        };
        (self.shown)(Seen::Input(experts.gate_up.spec, 0, &work.h))?;
        let (hidden, width) = (c.hidden_size, shape.width);
        let mut scores = vec![0.0; rows * shape.count];
        ops.read(&own.scores, &mut scores)?;
        let routes = Routes::new(&scores, shape);
        (self.shown)(Seen::Routes(&routes))?;
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
            for (weight, to) in [
                (&gates[expert], &mut tape.gate),
                (&ups[expert], &mut tape.up),
            ] {
                ops.gemm(first, &work.h, weight.load(ops, scratch)?, to)?;
            }
            ops.silu_mul(&tape.gate, &tape.up, &mut own.gated, rows * width)?;
            (self.shown)(Seen::Input(experts.down.spec, expert, &own.gated))?;
            let Some((_, routed)) = routed else {
                continue;
            };
            let mut weights = vec![0.0; rows];
            routed
                .into_iter()
                .for_each(|(row, weight)| weights[row] = weight);
            ops.write(&mut own.weights, &weights)?;
            ops.gemm(by_row, &own.weights, &own.gated, &mut tape.gate)?;
            let down = experts.down.linear[expert].load(ops, scratch)?;
            ops.gemm(last, &tape.gate, down, self.out)?;
        }
        Ok(())
    }

    fn weigh(&mut self, shared: &Shared<Vec<M>>) -> Result<()> {
        let (rows, work) = (self.rows(), &mut *self.work);
        let shape = Dims::new(rows, shared.mlp.down.spec.inputs(&work.config));
        let scores = &buffers(&mut work.experts).weights;
        Ok((self.ops).scale_rows(scores, &mut work.wide, shape)?)
    }

    fn add(&mut self, _layer: usize, operand: Operand, w: &Packed<Vec<M>>) -> Result<()> {
        let (ops, rows) = (self.ops, self.rows());
        let (work, tape) = (&mut *self.work, &mut *self.tape);
        let from = match operand {
            Operand::Attended => &tape.o,
            Operand::Gated => &work.wide,
        };
        let to = match self.blocks {
            1 => &mut tape.mid,
            _ => &mut *self.out,
        };
        let (c, scratch) = (&work.config, &mut work.w);
        (self.shown)(Seen::Input(w.spec, 0, from))?;
        multiply((ops, c), w, rows, (from, &mut [to]), true, scratch)
    }
}

/// The buffers of a kind of block that the model has.
fn buffers<T>(of_kind: &mut Option<T>) -> &mut T {
    match of_kind {
        Some(buffers) => buffers,
        None => unreachable!("a model's workspace has buffers for each kind of its blocks"),
    }
}
