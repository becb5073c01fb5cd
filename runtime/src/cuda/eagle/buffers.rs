//! Device memory that a head works in, besides its weights and its context.

use super::{CudaEagle, RING, ROWS, WHAT};
use crate::cuda::session::padded;
use crate::error::Result;
use nq_kernels::cuda::{
    Adjustments, AttentionScratch, Buffer, Checked, Columns, Gpu, Logprobs, MOST_RUN, Mapped,
    Places, Row, Sampling, Step, StepBounds, best_len,
};

/// Row widths of the buffers.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) hidden: usize,
    /// Of the target's streams that the head reads, side by side.
    pub(super) streams: usize,
    pub(super) q: usize,
    pub(super) qkv: usize,
    pub(super) mlp: usize,
}

/// Buffers for up to [`MOST_RUN`] rows, of which the last drafts.
pub(super) struct Few {
    pub(super) tokens: Checked<u32>,
    pub(super) step: Checked<Step>,
    pub(super) embedded: Buffer<f32>, // [rows, hidden]
    pub(super) x: Buffer<f32>,        // [rows, hidden]
    pub(super) normed: Buffer<f32>,   // [rows, hidden]
    pub(super) qkv: Buffer<f32>,      // [rows, q_dim + 2 kv_dim]
    pub(super) attended: Buffer<f32>, // [rows, q_dim]
    pub(super) columns: Option<Columns>,
    pub(super) attention: AttentionScratch,
    pub(super) zeros: Buffer<f32>, // [rows, hidden]
    pub(super) last: Last,
}

/// Buffers of the last row, from which tokens are drafted.
pub(super) struct Last {
    pub(super) attended: Buffer<f32>,      // [q_dim]
    pub(super) x: Buffer<f32>,             // [hidden]
    pub(super) gated: Buffer<f32>,         // [intermediate]
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
    pub(super) streams: Buffer<f32>,  // [rows, 3 hidden]
    pub(super) half: Buffer<u16>,     // [rows, 3 hidden padded]
    pub(super) embedded: Buffer<f32>, // [rows, hidden]
    pub(super) x: Buffer<f32>,        // [rows, hidden]
    pub(super) normed: Buffer<u16>,   // [rows, hidden padded]
    pub(super) qkv: Buffer<f32>,      // [rows, q_dim + 2 kv_dim]
}

impl Few {
    pub(super) fn new(gpu: &Gpu, eagle: &CudaEagle, places: Places) -> Result<Self> {
        let (c, w) = (&eagle.config, eagle.widths());
        let f32s = |n: usize| gpu.zeros::<f32>(WHAT, n);
        let bounds = StepBounds {
            places,
            tokens: c.vocab_size,
        };
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        let widest = w.streams.max(w.q).max(w.mlp);
        let head = &eagle.weights.head;
        Ok(Few {
            tokens: Checked::new(gpu, WHAT, MOST_RUN, 0, c.vocab_size)?,
            step: Checked::new(gpu, WHAT, MOST_RUN, Step::default(), bounds)?,
            embedded: f32s(MOST_RUN * w.hidden)?,
            x: f32s(MOST_RUN * w.hidden)?,
            normed: f32s(MOST_RUN * w.hidden)?,
            qkv: f32s(MOST_RUN * w.qkv)?,
            attended: f32s(MOST_RUN * w.q)?,
            columns: Some(Columns::new(gpu, MOST_RUN, widest)?),
            attention: AttentionScratch::new(gpu, heads, kv_heads, MOST_RUN)?,
            zeros: f32s(MOST_RUN * w.hidden)?,
            last: Last {
                attended: f32s(w.q)?,
                x: f32s(w.hidden)?,
                gated: f32s(w.mlp)?,
                logits: f32s(c.draft_vocab_size)?,
                best: gpu.zeros(WHAT, best_len(gpu, head, 1)?)?,
                sampling: gpu.zeros(WHAT, 1)?,
                adjust: Adjustments::new(gpu, c.draft_vocab_size, 1)?,
                ring: gpu.mapped(WHAT, RING, 0)?,
                logprobs: gpu.mapped(WHAT, RING, Logprobs::default())?,
            },
        })
    }
}

impl Many {
    pub(super) fn new(gpu: &Gpu, w: &Widths, places: Places, vocab: usize) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>(WHAT, ROWS * n);
        let halves = |n: usize| gpu.zeros::<u16>(WHAT, ROWS * padded(n));
        Ok(Many {
            tokens: Checked::new(gpu, WHAT, ROWS, 0, vocab)?,
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
