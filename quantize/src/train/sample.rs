//! Fresh text for every step: the teacher continues many beginnings at once on the device.

use super::params::{DeviceMatrix, Model};
use super::refused;
use super::values::Values;
use crate::error::{Error, Result};
use nq_f32::{Load, SplitQueries, Turned, WholeHeads, add_biases, multiply, multiply_beside, ones};
use nq_kernels::delta::DeltaShape;
use nq_kernels::grad::{
    Allocate, DeltaInputs, DeltaStepAt, Draw, Gemm, GradOps, HeadShape, OneShape, UNKNOWN,
};
use nq_model::forward::{
    Delta, Experts, HeadVectors, Operand, Packed, Projection, Shared, StreamVerbs, Verbs,
};
use nq_model::{Dims, LinearKind, ModelConfig};
use nq_runtime::is_recurrent;
use nq_runtime::states::shape_of;

/// Keys, values and activations of sequences that are sampled together.
pub(crate) struct Sampler<O: Allocate> {
    config: ModelConfig,
    slots: usize,
    length: usize,
    cos_sin: O::Floats,     // [length, dim / 2] pairs
    keys: Vec<O::Floats>,   // by layer, [slots, kv_heads, length, dim]
    values: Vec<O::Floats>, // the same
    ids: O::Ids,            // [slots, length]
    x: O::Floats,           // [slots, hidden]
    h: O::Floats,           // [slots, hidden]
    q: O::Floats,           // [slots, max(q_dim, values of a recurrence)]
    qh: O::Floats,          // [slots, q_dim]
    k: O::Floats,           // [slots, kv_dim]
    gate: O::Floats,        // [slots, intermediate]
    up: O::Floats,          // [slots, max(intermediate, kv_dim)]: values of heads, then the MLP's
    act: O::Floats,         // [slots, intermediate]
    inv: O::Floats,         // [slots, heads]
    outputs: O::Floats,     // [slots, length, hidden], after the final norm
    logits: O::Floats,      // [slots, vocab]
    w: O::Floats,           // unused by a teacher: its weights are dense
    ones: O::Floats,        // [slots], if there are biases
    whole: Option<WholeQueries<O>>,
    delta: Option<DeltaSteps<O>>,
}

/// Further buffers where queries come with gates, or where a part of a head is turned.
struct WholeQueries<O: Allocate> {
    heads: WholeHeads<O>,
    product: O::Floats, // [slots, q_dim + gate_dim]
    ordered: O::Floats, // [slots, q_dim]
    gates: O::Floats,   // [slots, gate_dim]
}

/// Further buffers for layers with recurrences, and the states of all sequences.
struct DeltaSteps<O: Allocate> {
    shape: DeltaShape,
    states: O::States,
    qkvz: O::Floats, // [slots, channels + values]
    ba: O::Floats,   // [slots, 2 value_heads]
    part: O::Floats, // [slots, channels]
}

impl<O: Allocate> Sampler<O> {
    /// Allocates buffers for `slots` sequences of `length` tokens.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub(crate) fn new(ops: &O, config: &ModelConfig, slots: usize, length: usize) -> Result<Self> {
        let c = config;
        let floats = |n| ops.floats("sampling text", slots * n);
        let caches = || {
            let layers = 0..c.num_hidden_layers;
            layers
                .map(|_| Ok(floats(c.kv_dim() * length)?))
                .collect::<Result<Vec<_>>>()
        };
        let rotations = Turned::new(c).pairs(c, length);
        let shape = shape_of(c);
        let recurrent = |&layer: &usize| is_recurrent(c.layer(layer));
        let layers = (0..c.num_hidden_layers).filter(recurrent).count();
        let mut cos_sin = ops.floats("rotations", 2 * rotations.len())?;
        ops.write(&mut cos_sin, rotations.as_flattened())?;
        Ok(Sampler {
            ones: ones(ops, c, slots)?,
            config: c.clone(),
            slots,
            length,
            cos_sin,
            keys: caches()?,
            values: caches()?,
            ids: ops.ids("tokens", slots * length)?,
            x: floats(c.hidden_size)?,
            h: floats(c.hidden_size)?,
            q: floats(c.q_dim().max(shape.map_or(0, |s| s.values())))?,
            qh: floats(c.q_dim())?,
            k: floats(c.kv_dim())?,
            gate: floats(c.intermediate_size)?,
            up: floats(c.intermediate_size.max(c.kv_dim()))?,
            act: floats(c.intermediate_size)?,
            inv: floats(c.num_attention_heads)?,
            outputs: floats(length * c.hidden_size)?,
            logits: floats(c.vocab_size)?,
            w: ops.floats("weights", 0)?,
            whole: match WholeHeads::new(ops, c)? {
                None => None,
                Some(heads) => Some(WholeQueries {
                    heads,
                    product: floats(c.q_dim() + c.gate_dim())?,
                    ordered: floats(c.q_dim())?,
                    gates: floats(c.gate_dim())?,
                }),
            },
            delta: match shape {
                None => None,
                Some(shape) => Some(DeltaSteps {
                    shape,
                    states: ops.states(shape, layers, slots)?,
                    qkvz: floats(shape.stride())?,
                    ba: floats(2 * shape.value_heads)?,
                    part: floats(shape.channels())?,
                }),
            },
        })
    }
}

impl<O: GradOps> Sampler<O> {
    /// Number of sequences sampled together.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// The teacher's outputs after the final norm at every token that was sampled last,
    /// `[beginnings, length, hidden]`.
    pub(crate) fn outputs(&self) -> &O::Floats {
        &self.outputs
    }

    /// Continues up to as many beginnings as there are slots to the full length, at
    /// temperature 1. Longer beginnings are cut, and [`UNKNOWN`] tokens in them are drawn. Sequence `i`
    /// draws from stream `stream + i` of `seed`. Returns `[beginnings, length]`.
    pub(crate) fn sample(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        beginnings: &[Vec<u32>],
        seed: u64,
        stream: u64,
    ) -> Result<Vec<u32>> {
        let (batch, length) = (beginnings.len().min(self.slots), self.length);
        let mut ids = vec![UNKNOWN; batch * length];
        for (row, begin) in ids.chunks_mut(length).zip(beginnings) {
            let n = begin.len().min(length);
            row[..n].copy_from_slice(&begin[..n]);
        }
        ops.write_ids(&mut self.ids, &ids)?;
        let unknown = |row: &[u32]| row.iter().position(|&id| id == UNKNOWN);
        let known = (ids.chunks(length))
            .map(|row| unknown(row).unwrap_or(length))
            .min()
            .unwrap_or(0);
        for t in 0..length {
            self.step(ops, teacher, batch, t)?;
            self.output(ops, teacher, batch, t)?;
            if t + 1 < known || t + 1 == length {
                continue;
            }
            self.head(ops, teacher, batch)?;
            let draw = Draw {
                batch,
                vocab: self.config.vocab_size,
                stride: length,
                offset: t + 1,
                seed,
                stream,
            };
            ops.sample(&self.logits, &mut self.ids, draw)?;
        }
        ops.read_ids(&self.ids, &mut ids)?;
        Ok(ids)
    }

    /// Runs token `t` of every sequence through all layers.
    fn step(&mut self, ops: &O, model: &Model<O>, batch: usize, t: usize) -> Result<()> {
        let table = model.embedding.load(ops, &mut self.w)?;
        let (rows, hidden) = ((batch, self.length, t), self.config.hidden_size);
        ops.embed(table, &self.ids, rows, &mut self.x, hidden)?;
        let sampler = self;
        let mut step = Step {
            ops,
            sampler,
            batch,
            t,
        };
        model.layers.iter().try_for_each(|l| l.run(&mut step))
    }

    /// Leaves the output of token `t` of every sequence in `h`, and in `outputs`.
    fn output(&mut self, ops: &O, model: &Model<O>, batch: usize, t: usize) -> Result<()> {
        let c = &self.config;
        let (norm, inv) = (&model.final_norm.value, &mut self.inv);
        let shape = Dims::new(batch, c.hidden_size);
        ops.rms_norm(&self.x, norm, &mut self.h, inv, shape, c.rms_norm_eps)?;
        let places = HeadShape {
            capacity: self.length,
            at: t,
            ..HeadShape::whole(batch, 1, 1, c.hidden_size)
        };
        Ok(ops.rows_to_heads(&self.h, &mut self.outputs, places)?)
    }

    fn head(&mut self, ops: &O, model: &Model<O>, batch: usize) -> Result<()> {
        let c = &self.config;
        let w = model.head().load(ops, &mut self.w)?;
        let product = Gemm::linear(batch, c.vocab_size, c.hidden_size);
        ops.gemm(product, &self.h, w, &mut self.logits)?;
        Ok(())
    }
}

/// A step over token `t` of `batch` sequences.
struct Step<'a, O: GradOps> {
    ops: &'a O,
    sampler: &'a mut Sampler<O>,
    batch: usize,
    t: usize,
}

impl<O: GradOps> Step<'_, O> {
    /// Queries, keys, values and gates from products of whole Linears.
    fn project_whole(&mut self, w: &Packed<Vec<DeviceMatrix<O>>>) -> Result<()> {
        let (ops, s, batch) = (self.ops, &mut *self.sampler, self.batch);
        let (c, Some(own)) = (&s.config, &mut s.whole) else {
            unreachable!("a sampler of whole Linears");
        };
        // Keys wait where queries will be turned to.
        let to = &mut [&mut own.product, &mut s.qh, &mut s.up];
        multiply((ops, c), w, batch, (&s.h, to), false, &mut s.w)?;
        let keys = batch * c.num_key_value_heads;
        own.heads.turn(ops, keys, &s.qh, &mut s.k)?;
        let queries = SplitQueries {
            whole: &mut own.product,
            ordered: &mut own.ordered,
            turned: &mut s.q,
            gates: &mut own.gates,
        };
        let heads = batch * c.num_attention_heads;
        Ok(own.heads.split(ops, heads, queries)?)
    }
}

impl<O: GradOps> Verbs for Step<'_, O> {
    type Linear = Vec<DeviceMatrix<O>>;
    type Vector = Values<O>;
    type Error = Error;

    fn norm(&mut self, norm: &Values<O>) -> Result<()> {
        let (ops, s) = (self.ops, &mut *self.sampler);
        let (shape, eps) = (
            Dims::new(self.batch, s.config.hidden_size),
            s.config.rms_norm_eps,
        );
        Ok(ops.rms_norm(&s.x, &norm.value, &mut s.h, &mut s.inv, shape, eps)?)
    }

    fn streams(&mut self) -> Result<&mut dyn StreamVerbs<Vec<DeviceMatrix<O>>, Values<O>, Error>> {
        Err(refused("a model with several residual streams"))
    }

    fn project(
        &mut self,
        _layer: usize,
        _norm: &Values<O>,
        w: &Packed<Vec<DeviceMatrix<O>>>,
        to: Projection,
    ) -> Result<()> {
        let (ops, s, batch) = (self.ops, &mut *self.sampler, self.batch);
        let (c, h) = (&s.config, &s.h);
        if let (Some(own), LinearKind::DeltaQkv | LinearKind::DeltaB) =
            (&mut s.delta, w.spec.linears[0].kind)
        {
            let to = match to {
                Projection::Mixer => &mut own.qkvz,
                _ => &mut own.ba,
            };
            let part = &mut own.part;
            return Ok(multiply_beside(
                (ops, c),
                w,
                batch,
                (h, to),
                part,
                &mut s.w,
            )?);
        }
        match to {
            Projection::Mixer if s.whole.is_some() => self.project_whole(w),
            Projection::Mixer => {
                let to = &mut [&mut s.q, &mut s.k, &mut s.up];
                Ok(multiply((ops, c), w, batch, (h, to), false, &mut s.w)?)
            }
            Projection::Gated => {
                let to = &mut [&mut s.gate, &mut s.up];
                multiply((ops, c), w, batch, (h, to), false, &mut s.w)?;
                Ok(ops.silu_mul(&s.gate, &s.up, &mut s.act, batch * c.intermediate_size)?)
            }
            Projection::Rates => Err(nq_runtime::Error::no_recurrences("a sampler").into()),
            Projection::Scores | Projection::SharedScore => Err(refused("a mixture of experts")),
        }
    }

    fn attend(
        &mut self,
        layer: usize,
        vectors: &HeadVectors<Values<O>>,
        _o: &Packed<Vec<DeviceMatrix<O>>>,
    ) -> Result<()> {
        let (ops, s, batch, t) = (self.ops, &mut *self.sampler, self.batch, self.t);
        let (c, inv, turns) = (&s.config, &mut s.inv, &s.cos_sin);
        let (keys, values) = (&mut s.keys[layer], &mut s.values[layer]);
        let shape = |heads, capacity, at| HeadShape {
            capacity,
            at,
            position: t,
            ..HeadShape::whole(batch, 1, heads, c.head_dim)
        };
        let qs = shape(c.num_attention_heads, 1, 0);
        let ks = shape(c.num_key_value_heads, s.length, t);
        let qkv = [&mut s.q, &mut s.k, &mut s.up];
        add_biases(ops, c, &vectors.biases, &s.ones, batch, qkv)?;
        let norms = vectors.norms.as_ref();
        let (q_gain, k_gain) = (norms.map(|n| &n[0].value), norms.map(|n| &n[1].value));
        let eps = c.rms_norm_eps;
        ops.head_norm_rope(&s.q, q_gain, turns, &mut s.qh, inv, qs, eps)?;
        ops.head_norm_rope(&s.k, k_gain, turns, keys, inv, ks, eps)?;
        ops.rows_to_heads(&s.up, values, ks)?;
        let one = OneShape {
            batch,
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            dim: c.head_dim,
            capacity: s.length,
            seen: t + 1,
        };
        ops.attend_one(&s.qh, keys, values, &mut s.q, one)?;
        if let (true, Some(own)) = (vectors.gated, &s.whole) {
            ops.gate(&own.gates, &mut s.q, batch * c.q_dim())?;
        }
        Ok(())
    }

    fn recur(
        &mut self,
        layer: usize,
        _norm: &Values<O>,
        delta: &Delta<Vec<DeviceMatrix<O>>, Values<O>>,
    ) -> Result<()> {
        let (s, vectors) = (&mut *self.sampler, &delta.vectors);
        let (c, Some(own)) = (&s.config, &mut s.delta) else {
            return Err(nq_runtime::Error::no_recurrences("a sampler").into());
        };
        let inputs = DeltaInputs {
            shape: own.shape,
            batch: self.batch,
            seq: 1,
            qkvz: &own.qkvz,
            ba: &own.ba,
            conv: vectors.conv.as_ref(),
            decay: vectors.decay.as_ref(),
            dt_bias: vectors.dt_bias.as_ref(),
            norm: vectors.norm.as_ref(),
            eps: c.rms_norm_eps,
        };
        let at = DeltaStepAt {
            layer: (0..layer).filter(|&l| is_recurrent(c.layer(l))).count(),
            position: self.t,
        };
        Ok((self.ops).delta_step(inputs, &mut own.states, at, &mut s.q)?)
    }

    fn mix(
        &mut self,
        _layer: usize,
        _norm: &Values<O>,
        _experts: &Experts<Vec<DeviceMatrix<O>>>,
    ) -> Result<()> {
        Err(refused("a mixture of experts"))
    }

    fn weigh(&mut self, _shared: &Shared<Vec<DeviceMatrix<O>>>) -> Result<()> {
        Err(refused("a mixture of experts"))
    }

    fn add(
        &mut self,
        _layer: usize,
        operand: Operand,
        w: &Packed<Vec<DeviceMatrix<O>>>,
    ) -> Result<()> {
        let s = &mut *self.sampler;
        let from = match operand {
            Operand::Attended => &s.q,
            Operand::Gated => &s.act,
        };
        let (device, to) = ((self.ops, &s.config), &mut [&mut s.x]);
        Ok(multiply(device, w, self.batch, (from, to), true, &mut s.w)?)
    }
}
