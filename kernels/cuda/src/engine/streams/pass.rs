//! The passes of a layer that drafts: over few rows, of which only the last goes on behind attention, and over many,
//! which go no further than their keys and values.

use super::{GpuHead, On, full, halves, multiply, norm_rows, rows_at};
use crate::engine::layer::mixture;
use crate::engine::model::heads_of;
use crate::engine::session::buffers::{ExpertRows, expert_rows};
use crate::{
    AttentionOutput, AttentionScratch, AttentionShape, Buffer, DeviceLinear, GemmOutput,
    GemvOutput, Norm, Step,
};
use nq_model::ModelConfig;
use nq_model::forward::{Delta, Experts, HeadVectors, Operand, Packed, Projection, Shared, Verbs};
use nq_runtime::{Error, Result};

/// A pass over rows of one sequence: several, `few.x`, or that of a token that was drawn, `few.last.x`. Behind attention
/// the last is left, in `few.last`.
pub(super) struct FewPass<'a> {
    on: On<'a>,
    config: &'a ModelConfig,
    makes_qkv: bool,
    rows: usize,
    /// Rows of the sequence with these.
    positions: usize,
    /// The step of the last of several rows; `None` for a token that was drawn.
    last: Option<Step>,
}

impl<'a> FewPass<'a> {
    /// A pass over `rows` rows of a sequence that then has `positions`.
    pub(super) fn new<H: GpuHead>(
        head: &'a H,
        on: On<'a>,
        (rows, positions): (usize, usize),
        last: Option<Step>,
    ) -> Self {
        FewPass {
            on,
            config: head.config(),
            makes_qkv: H::MAKES_QKV,
            rows,
            positions,
            last,
        }
    }
}

impl Verbs for FewPass<'_> {
    type Linear = DeviceLinear;
    type Vector = Buffer<f32>;
    type Error = Error;

    fn norm(&mut self, _norm: &Buffer<f32>) -> Result<()> {
        Ok(())
    }

    fn project(
        &mut self,
        _layer: usize,
        norm: &Buffer<f32>,
        w: &Packed<DeviceLinear>,
        to: Projection,
    ) -> Result<()> {
        let (stream, few) = (self.on.stream, &mut *self.on.few);
        let (last, eps) = (&mut few.last, self.config.rms_norm_eps);
        let norm = Norm { gain: norm, eps };
        let out = match to {
            Projection::Mixer if self.makes_qkv => return Ok(()),
            Projection::Mixer => {
                let x = self.last.map_or(&last.x, |_| &few.x);
                let out = GemvOutput::Store(norm, &mut few.qkv);
                return multiply(stream, &w.linear, x, out, &mut few.columns, self.rows);
            }
            Projection::Gated => GemvOutput::Silu(norm, &mut last.gated),
            Projection::Scores => {
                GemvOutput::Store(norm, &mut expert_rows(&mut last.experts).scores)
            }
            Projection::SharedScore => {
                GemvOutput::Store(norm, &mut expert_rows(&mut last.experts).shared)
            }
            Projection::Rates => unreachable!("layers that draft have attention"),
        };
        Ok(stream.gemv(&w.linear, &last.x, out, true)?)
    }

    fn attend(
        &mut self,
        layer: usize,
        vectors: &HeadVectors<Buffer<f32>>,
        _o: &Packed<DeviceLinear>,
    ) -> Result<()> {
        let (c, n) = (self.config, self.rows);
        let On {
            stream,
            target,
            pages,
            cos_sin,
            few,
            ..
        } = &mut self.on;
        let attended = match self.last {
            None => &mut few.last.attended,
            Some(_) => &mut few.attended,
        };
        let shape = AttentionShape {
            m: n,
            splits: AttentionScratch::splits(&target.gpu, c.num_key_value_heads, n, self.positions),
            late: true,
            runs: n > 1,
            shared: None,
        };
        let heads = heads_of(c, vectors, cos_sin);
        let out = AttentionOutput::Full(attended);
        let (step, scratch, cache) = (&few.step, &mut few.attention, pages.layer(layer));
        stream.attention_decode(&few.qkv, step, &heads, cache, scratch, out, shape)?;
        let Some(step) = self.last else {
            return Ok(());
        };
        let (q, width) = (c.q_dim(), c.hidden_size);
        let (from, to) = (rows_at(n - 1, q), (&mut few.last.attended, rows_at(0, q)));
        stream.copy_rows((&few.attended, from), to, (1, q))?;
        let (from, to) = (rows_at(n - 1, width), (&mut few.last.x, rows_at(0, width)));
        stream.copy_rows((&few.x, from), to, (1, width))?;
        // Tokens are drawn from here on: their step follows the last row.
        Ok(stream.put_checked(&mut few.step, 0, &[step])?)
    }

    fn recur(
        &mut self,
        _layer: usize,
        _norm: &Buffer<f32>,
        _delta: &Delta<DeviceLinear, Buffer<f32>>,
    ) -> Result<()> {
        unreachable!("layers that draft have attention")
    }

    fn mix(
        &mut self,
        _layer: usize,
        norm: &Buffer<f32>,
        experts: &Experts<DeviceLinear>,
    ) -> Result<()> {
        let (stream, last) = (self.on.stream, &mut self.on.few.last);
        let (shape, eps) = (&mixture(self.config, experts), self.config.rms_norm_eps);
        let norm = Norm { gain: norm, eps };
        let ExpertRows { scores, gated, .. } = expert_rows(&mut last.experts);
        let (up, down) = (&experts.gate_up.linear, &experts.down.linear);
        stream.experts_up(up, (&last.x, norm), scores, gated, shape, 1)?;
        Ok(stream.experts_down(down, gated, scores, &mut last.x, shape, 1)?)
    }

    fn weigh(&mut self, shared: &Shared<DeviceLinear>) -> Result<()> {
        let (stream, last) = (self.on.stream, &mut self.on.few.last);
        let size = (1, shared.mlp.down.linear.inputs());
        let scores = &expert_rows(&mut last.experts).shared;
        Ok(stream.scale_rows(scores, &full(&mut last.gated), size)?)
    }

    fn add(&mut self, _layer: usize, operand: Operand, w: &Packed<DeviceLinear>) -> Result<()> {
        let last = &mut self.on.few.last;
        let operand = match operand {
            Operand::Attended => &last.attended,
            Operand::Gated => &last.gated,
        };
        let out = GemvOutput::Add(&mut last.x);
        Ok((self.on.stream).gemv(&w.linear, operand, out, true)?)
    }
}

/// Appends keys and values of `n` rows whose input is in `many`.
pub(super) fn fill<H: GpuHead>(head: &H, on: On<'_>, n: usize) -> Result<()> {
    let (c, stream, many) = (head.config(), on.stream, on.many);
    let (norm, attention) = head.weights().attention();
    if !H::MAKES_QKV {
        let normed = halves(&mut many.normed);
        norm_rows(stream, &many.x, norm, normed, (n, c.rms_norm_eps))?;
        let out = GemmOutput::Store(&mut many.qkv);
        stream.gemm(&attention.qkv.linear, &many.normed, out, n)?;
    }
    let heads = heads_of(c, &attention.heads, on.cos_sin);
    let cache = on.pages.layer(0);
    Ok(stream.append(&mut many.qkv, &many.rows, &heads, cache, n)?)
}
