//! Fresh text for every step: the teacher continues many beginnings at once, on the device.

use super::forward::rotations;
use super::params::Model;
use crate::error::Result;
use nq_formats::ModelConfig;
use nq_formats::models::{LinearKind, MlpSpec, NormKind};
use nq_kernels::grad::{Allocate, Draw, Gemm, GradOps, HeadShape, OneShape, UNKNOWN};

/// Keys, values and activations of sequences that are sampled together.
pub struct Sampler<O: Allocate> {
    config: ModelConfig,
    slots: usize,
    length: usize,
    cos_sin: O::Floats,     // [length, dim / 2] pairs
    keys: Vec<O::Floats>,   // by layer, [slots, kv_heads, length, dim]
    values: Vec<O::Floats>, // the same
    ids: O::Ids,            // [slots, length]
    x: O::Floats,           // [slots, hidden]
    h: O::Floats,           // [slots, hidden]
    q: O::Floats,           // [slots, q_dim]
    qh: O::Floats,          // [slots, q_dim]
    k: O::Floats,           // [slots, kv_dim]
    gate: O::Floats,        // [slots, intermediate]
    up: O::Floats,          // [slots, intermediate]
    act: O::Floats,         // [slots, intermediate]
    inv: O::Floats,         // [slots, heads]
    logits: O::Floats,      // [slots, vocab]
    w: O::Floats,           // unused by a teacher: its weights are dense
}

impl<O: Allocate> Sampler<O> {
    /// Room for `slots` sequences of `length` tokens.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(ops: &O, config: &ModelConfig, slots: usize, length: usize) -> Result<Self> {
        let c = config;
        let floats = |n| ops.floats("sampling text", slots * n);
        let caches = || {
            let layers = 0..c.num_hidden_layers;
            layers
                .map(|_| Ok(floats(c.kv_dim() * length)?))
                .collect::<Result<Vec<_>>>()
        };
        let rotations = rotations(c, length);
        let mut cos_sin = ops.floats("rotations", rotations.len())?;
        ops.write(&mut cos_sin, &rotations)?;
        Ok(Sampler {
            config: c.clone(),
            slots,
            length,
            cos_sin,
            keys: caches()?,
            values: caches()?,
            ids: ops.ids("tokens", slots * length)?,
            x: floats(c.hidden_size)?,
            h: floats(c.hidden_size)?,
            q: floats(c.q_dim())?,
            qh: floats(c.q_dim())?,
            k: floats(c.kv_dim())?,
            gate: floats(c.intermediate_size)?,
            up: floats(c.intermediate_size)?,
            act: floats(c.intermediate_size)?,
            inv: floats(c.num_attention_heads)?,
            logits: floats(c.vocab_size)?,
            w: ops.floats("weights", 0)?,
        })
    }
}

impl<O: GradOps> Sampler<O> {
    /// Sequences sampled together.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Continues up to as many beginnings as there are slots to the full length, at
    /// temperature 1; longer ones are cut, and where one is [`UNKNOWN`] it is drawn. Sequence `i`
    /// draws from stream `stream + i` of `seed`. Returns `[beginnings, length]`.
    ///
    /// # Errors
    /// The device's.
    pub fn sample(
        &mut self,
        ops: &O,
        teacher: &Model<O>,
        beginnings: &[Vec<u32>],
        (seed, stream): (u64, u64),
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
        for t in 0..length - 1 {
            self.step(ops, teacher, batch, t)?;
            if t + 1 < known {
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

    /// Token `t` of every sequence through all layers.
    fn step(&mut self, ops: &O, model: &Model<O>, batch: usize, t: usize) -> Result<()> {
        let c = &self.config;
        let MlpSpec::SwiGlu { .. } = c.layer().mlp; // another MLP is another function
        let (hidden, inter, eps) = (c.hidden_size, c.intermediate_size, c.rms_norm_eps);
        let shape = |heads, capacity, at| HeadShape {
            capacity,
            at,
            position: t,
            ..HeadShape::whole(batch, 1, heads, c.head_dim)
        };
        let qs = shape(c.num_attention_heads, 1, 0);
        let ks = shape(c.num_key_value_heads, self.length, t);
        let table = model.embedding.load(ops, &mut self.w)?;
        ops.embed(
            table,
            &self.ids,
            (batch, self.length, t),
            &mut self.x,
            hidden,
        )?;
        for (layer, weights) in model.layers.iter().enumerate() {
            let gain = |kind| &weights.norm(kind).value;
            let (keys, values) = (&mut self.keys[layer], &mut self.values[layer]);
            let w = &mut self.w;
            let mut linear = |kind: LinearKind, from: &O::Floats, to: &mut O::Floats, add| {
                let (n, k) = kind.dims(c);
                let mut g = Gemm::linear(batch, n, k);
                g.accumulate = add;
                Ok::<_, crate::Error>(ops.gemm(g, from, weights.linear(kind).load(ops, w)?, to)?)
            };
            let norm = (batch, hidden);
            let inv = &mut self.inv;
            ops.rms_norm(
                &self.x,
                gain(NormKind::Attention),
                &mut self.h,
                inv,
                norm,
                eps,
            )?;
            linear(LinearKind::Q, &self.h, &mut self.q, false)?;
            let turns = &self.cos_sin;
            ops.head_norm_rope(
                &self.q,
                gain(NormKind::Q),
                turns,
                &mut self.qh,
                inv,
                qs,
                eps,
            )?;
            linear(LinearKind::K, &self.h, &mut self.k, false)?;
            ops.head_norm_rope(&self.k, gain(NormKind::K), turns, keys, inv, ks, eps)?;
            linear(LinearKind::V, &self.h, &mut self.k, false)?;
            ops.rows_to_heads(&self.k, values, ks)?;
            let one = OneShape {
                batch,
                heads: c.num_attention_heads,
                kv_heads: c.num_key_value_heads,
                dim: c.head_dim,
                capacity: self.length,
                seen: t + 1,
            };
            ops.attend_one(&self.qh, keys, values, &mut self.q, one)?;
            linear(LinearKind::O, &self.q, &mut self.x, true)?;
            ops.rms_norm(&self.x, gain(NormKind::Mlp), &mut self.h, inv, norm, eps)?;
            linear(LinearKind::Gate, &self.h, &mut self.gate, false)?;
            linear(LinearKind::Up, &self.h, &mut self.up, false)?;
            ops.silu_mul(&self.gate, &self.up, &mut self.act, batch * inter)?;
            linear(LinearKind::Down, &self.act, &mut self.x, true)?;
        }
        Ok(())
    }

    fn head(&mut self, ops: &O, model: &Model<O>, batch: usize) -> Result<()> {
        let c = &self.config;
        let (norm, inv) = (&model.final_norm.value, &mut self.inv);
        let shape = (batch, c.hidden_size);
        ops.rms_norm(&self.x, norm, &mut self.h, inv, shape, c.rms_norm_eps)?;
        let w = model.head().load(ops, &mut self.w)?;
        let product = Gemm::linear(batch, c.vocab_size, c.hidden_size);
        ops.gemm(product, &self.h, w, &mut self.logits)?;
        Ok(())
    }
}
