//! Device memory that a layer works in, besides its weights and its context.

use super::shape::{HeadShape, RING, ROWS, WHAT};
use crate::cuda::session::buffers::{ExpertRows, padded};
use crate::error::Result;
use nq_kernels::cuda::{
    Adjustments, AttentionScratch, Buffer, Checked, Columns, DeviceLinear, Gpu, HEAD_DIM, Logprobs,
    MOST_RUN, Mapped, Places, Row, Sampling, Step, StepBounds, best_len,
};

/// Buffers for up to [`MOST_RUN`] rows, of which the last drafts.
pub(super) struct Few {
    pub(super) tokens: Checked<u32>,
    pub(super) step: Checked<Step>,
    pub(super) embedded: Buffer<f32>, // [rows, hidden]
    pub(super) x: Buffer<f32>,        // [rows, hidden]
    pub(super) normed: Buffer<f32>,   // [rows, hidden]
    pub(super) qkv: Buffer<f32>,      // [rows, products]
    pub(super) attended: Buffer<f32>, // [rows, q_dim]
    pub(super) columns: Option<Columns>,
    pub(super) attention: AttentionScratch,
    pub(super) zeros: Buffer<f32>, // [rows, hidden]
    pub(super) last: Last,
}

/// Buffers of the last row, from which tokens are drafted.
pub(super) struct Last {
    pub(super) attended: Buffer<f32>, // [q_dim]
    pub(super) x: Buffer<f32>,        // [hidden]
    pub(super) gated: Buffer<f32>,    // [intermediate], or the width of the shared expert
    pub(super) experts: Option<ExpertRows>,
    pub(super) logits: Buffer<f32>,        // [draft vocab]
    pub(super) best: Buffer<[f32; 2]>,     // [blocks of the head]
    pub(super) sampling: Buffer<Sampling>, // the best token
    pub(super) adjust: Adjustments,
    pub(super) ring: Mapped<u32>,
    pub(super) logprobs: Mapped<Logprobs>,
}

/// Buffers for [`ROWS`] rows of prompts.
pub(super) struct Many {
    pub(super) tokens: Checked<u32>,
    pub(super) rows: Checked<Row>,
    pub(super) streams: Buffer<f32>,  // [rows, streams]
    pub(super) half: Buffer<u16>,     // [rows, streams padded]
    pub(super) embedded: Buffer<f32>, // [rows, hidden]
    pub(super) x: Buffer<f32>,        // [rows, hidden]
    pub(super) normed: Buffer<u16>,   // [rows, hidden padded]
    pub(super) qkv: Buffer<f32>,      // [rows, products]
}

impl Few {
    /// Buffers for a layer of shape `w`, whose logits `head` gives.
    pub(super) fn new(
        gpu: &Gpu,
        w: &HeadShape,
        head: &DeviceLinear,
        (experts, places): (Option<ExpertRows>, Places),
    ) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>(WHAT, n);
        let tokens = w.vocab;
        let bounds = StepBounds { places, tokens };
        let q = w.attended();
        let widest = w.streams.max(q).max(w.mlp);
        // As many rows of scratch as heads of the usual width would take.
        let heads = q / HEAD_DIM;
        Ok(Few {
            tokens: Checked::new(gpu, WHAT, MOST_RUN, 0, w.vocab)?,
            step: Checked::new(gpu, WHAT, MOST_RUN, Step::default(), bounds)?,
            embedded: f32s(MOST_RUN * w.hidden)?,
            x: f32s(MOST_RUN * w.hidden)?,
            normed: f32s(MOST_RUN * w.hidden)?,
            qkv: f32s(MOST_RUN * w.qkv)?,
            attended: f32s(MOST_RUN * q)?,
            columns: Some(Columns::new(gpu, MOST_RUN, widest)?),
            attention: AttentionScratch::new(gpu, heads, w.heads.1, MOST_RUN)?,
            zeros: f32s(MOST_RUN * w.hidden)?,
            last: Last {
                attended: f32s(q)?,
                x: f32s(w.hidden)?,
                experts,
                gated: f32s(w.mlp)?,
                logits: f32s(w.drafted)?,
                best: gpu.zeros(WHAT, best_len(gpu, head, 1)?)?,
                sampling: gpu.zeros(WHAT, 1)?,
                adjust: Adjustments::new(gpu, w.drafted, 1)?,
                ring: gpu.mapped(WHAT, RING, 0)?,
                logprobs: gpu.mapped(WHAT, RING, Logprobs::default())?,
            },
        })
    }
}

impl Many {
    pub(super) fn new(gpu: &Gpu, w: &HeadShape, places: Places) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>(WHAT, ROWS * n);
        let halves = |n: usize| gpu.zeros::<u16>(WHAT, ROWS * padded(n));
        Ok(Many {
            tokens: Checked::new(gpu, WHAT, ROWS, 0, w.vocab)?,
            rows: Checked::new(gpu, WHAT, ROWS, Row::default(), places)?,
            streams: f32s(w.streams)?,
            half: halves(w.streams)?,
            embedded: f32s(w.hidden)?,
            x: f32s(w.hidden)?,
            normed: halves(w.hidden)?,
            qkv: f32s(w.qkv)?,
        })
    }
}
