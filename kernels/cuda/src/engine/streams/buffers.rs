//! Device memory of a layer that drafts, besides its weights, which plans and sessions allocate alike.

use crate::engine::session::buffers::{ExpertRows, GROUPED_ROWS, Halves, padded};
use crate::{
    Adjustments, AttentionScratch, Buffer, Checked, Columns, DeviceLinear, DevicePages, Gpu,
    HEAD_DIM, Logprobs, MOST_RUN, MOST_SEQUENCES, Mapped, PagesShape, Places, Row, Sampling, Step,
    StepBounds, best_len,
};
use nq_runtime::Result;
use nq_runtime::interface::{DraftLayer, SessionSpec};

/// Rows of prompts computed together.
pub(super) const ROWS: usize = 512;

/// Places for drafted tokens: more than a step can check, and a power of two.
pub(super) const RING: usize = 2 * MOST_RUN;

pub(super) const WHAT: &str = "a layer that drafts";

/// Device memory of a layer that drafts for a session.
pub(in crate::engine) struct DraftMemory {
    pub(super) few: Few,
    pub(super) many: Many,
    pub(super) pages: DevicePages,
    pub(super) cos_sin: Buffer<[f32; 2]>, // [ctx padded, rotary_dims / 2]
    /// By slot, the streams of the last tokens, which have no keys and values yet: `[MOST_RUN, streams of a row]`.
    pub(super) held: Vec<Buffer<f32>>,
    /// The streams of the target's steps, and of its passes over many rows: `[rows, streams of a row]`.
    pub(in crate::engine) tapped: [Buffer<f32>; 2],
}

impl DraftMemory {
    /// Allocates that of `layer` for a session of `spec`, whose model has the head `head`. The rotary table is not written
    /// yet.
    pub(in crate::engine) fn new(
        gpu: &Gpu,
        layer: DraftLayer,
        head: &DeviceLinear,
        spec: &SessionSpec,
    ) -> Result<Self> {
        let shape = PagesShape {
            kv: spec.kv,
            layers: 1,
            kv_heads: layer.heads.1,
            head_dim: layer.head_dim,
            pages: spec.page_count(),
            slots: spec.slots,
            ctx: spec.ctx,
        };
        let pages = DevicePages::new(gpu, shape)?;
        let places = pages.places();
        // The layer's own head has the kernel of a row, which gives a best token of each multiprocessor at most.
        let best = best_len(gpu, head, 1)?.max(gpu.info().multiprocessors);
        let streams = |rows: usize| gpu.zeros::<f32>(WHAT, rows * layer.streams());
        let held = (0..spec.slots).map(|_| streams(MOST_RUN));
        Ok(DraftMemory {
            few: Few::new(gpu, &layer, best, places)?,
            many: Many::new(gpu, &layer, places)?,
            cos_sin: gpu.zeros(WHAT, places.positions * layer.rotary_dims / 2)?,
            held: held.collect::<nq_kernels::Result<_>>()?,
            tapped: [streams(MOST_SEQUENCES)?, streams(spec.max_rows.max(1))?],
            pages,
        })
    }

    /// Bytes of keys and values.
    pub(in crate::engine) fn kv_bytes(&self) -> usize {
        self.pages.bytes()
    }
}

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
    pub(super) qkv: Buffer<f32>,      // [rows, products]
    /// Only normalized rows: they go no further than their keys and values.
    pub(super) halves: Halves,
}

impl Few {
    /// Buffers for a layer whose head gives up to `best` best tokens.
    fn new(gpu: &Gpu, w: &DraftLayer, best: usize, places: Places) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>(WHAT, n);
        let tokens = w.vocab;
        let bounds = StepBounds { places, tokens };
        let q = w.heads.0 * w.head_dim;
        let widest = w.streams().max(q).max(w.mlp);
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
                experts: ExpertRows::new(gpu, w.experts.as_ref(), w.hidden, 1, GROUPED_ROWS)?,
                gated: f32s(w.mlp)?,
                logits: f32s(w.drafted)?,
                best: gpu.zeros(WHAT, best)?,
                sampling: gpu.zeros(WHAT, 1)?,
                adjust: Adjustments::new(gpu, w.drafted, 1)?,
                ring: gpu.mapped(WHAT, RING, 0)?,
                logprobs: gpu.mapped(WHAT, RING, Logprobs::default())?,
            },
        })
    }
}

impl Many {
    fn new(gpu: &Gpu, w: &DraftLayer, places: Places) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>(WHAT, ROWS * n);
        Ok(Many {
            tokens: Checked::new(gpu, WHAT, ROWS, 0, w.vocab)?,
            rows: Checked::new(gpu, WHAT, ROWS, Row::default(), places)?,
            streams: f32s(w.streams())?,
            half: gpu.zeros(WHAT, ROWS * padded(w.streams()))?,
            embedded: f32s(w.hidden)?,
            x: f32s(w.hidden)?,
            qkv: f32s(w.qkv)?,
            halves: Halves::new(gpu, ROWS, w.hidden, 0, 0)?,
        })
    }
}
