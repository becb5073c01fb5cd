//! Buffers of the steps of a session.

use super::buffers::{ExpertRows, GROUPED_ROWS, Halves, Widths};
use super::taps::Taps;
use crate::engine::held::largest_mixture;
use crate::engine::part::GpuPart;
use crate::{
    Adjustments, AttentionScratch, Buffer, Candidates, Cascade, CascadeShape, Checked, Columns,
    DeviceLinear, Gpu, HEAD_DIM, LayersScratch, LayersSizes, Logprobs, MOST_LOGPROBS, MOST_RUN,
    MOST_SEQUENCES, MOST_WIDE_SEQUENCES, Mapped, PartialSums, Places, Sampling, Step, StepBounds,
    best_len, gathered_best_len, wide_best_len,
};
use nq_kernels::pages::KvType;
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::interface::{SessionSpec, Split};
use std::collections::VecDeque;

/// Most tokens of a sequence that the device may be ahead of the host; a power of two.
pub(super) const RING: usize = 64;

const _: () = assert!(MOST_LOGPROBS == nq_runtime::sampler::MOST_LOGPROBS);

/// The value of a place where the device has not written a token yet.
pub(super) const PENDING: u32 = u32::MAX;

/// What the size of [`StepRows`] depends on besides the model.
#[derive(Clone, Copy)]
pub(super) struct StepSizes {
    /// Most rows of a step.
    pub(super) rows: usize,
    /// Most of them that the kernels for few rows take.
    pub(super) few_rows: usize,
    /// The type of keys and values.
    pub(super) kv: KvType,
    pub(super) places: Places,
    pub(super) part: Option<GpuPart>,
    /// Some weights are in trellis codes.
    pub(super) trellis: bool,
}

/// Buffers of the fused step of up to `rows` rows.
pub(super) struct StepRows {
    pub(super) rows: usize,
    /// Most of them that the kernels for few rows take; more are wide.
    pub(super) few_rows: usize,
    pub(super) step: Checked<Step>,   // [rows]
    pub(super) x: Buffer<f32>,        // [rows, hidden], the residual
    pub(super) qkv: Buffer<f32>,      // [rows, widest products of a mixer]
    pub(super) rates: Buffer<f32>,    // [rows, 2 value heads], of recurrences in wide steps
    pub(super) attended: Buffer<f32>, // [narrow rows, widest output of a mixer]
    pub(super) gated: Buffer<f32>,    // [narrow rows, intermediate]
    pub(super) attention: AttentionScratch,
    /// The pages that rows of a step share, on devices that can read them once for all.
    pub(super) cascade: Option<Cascade>,
    /// Launch shape of attention over those pages; `None` if sharing would save too little.
    pub(super) shared: Option<CascadeShape>,
    pub(super) columns: Option<Columns>, // of several narrow rows
    pub(super) experts: Option<ExpertRows>,
    pub(super) layers: LayersScratch,      // of a step of one row
    pub(super) wide: Option<WideRows>,     // of more rows than `few_rows`
    pub(super) taps: Option<Taps>,         // of up to `MOST_SEQUENCES` rows
    pub(super) logits: Buffer<f32>,        // [rows, vocab]
    pub(super) best: Buffer<[f32; 2]>,     // [rows, blocks of the head]
    pub(super) sampling: Buffer<Sampling>, // [rows]
    /// The contents of `sampling` once the queued work is done.
    pub(super) sampled_by: Vec<Sampling>,
    pub(super) candidates: Option<Candidates>,
    pub(super) adjust: Adjustments,        // [rows]
    pub(super) ring: Mapped<u32>,          // [rows, RING]
    pub(super) logprobs: Mapped<Logprobs>, // [rows, RING]
    pub(super) seats: Vec<RowState>,       // [rows]
    /// Which sequences sat in the rows of each step that is queued and not received.
    pub(super) queued: VecDeque<Vec<RowState>>,
    /// True after a row was written: the embedding of its token is still to be looked up.
    pub(super) written: bool,
}

/// Further buffers for wide steps, which have kernels of their own.
pub(super) struct WideRows {
    pub(super) halves: Halves,
    pub(super) sums: PartialSums, // [parts, rows, hidden]
}

impl WideRows {
    fn new(gpu: &Gpu, w: &Widths, rows: usize) -> Result<Self> {
        Ok(WideRows {
            halves: Halves::new(gpu, rows, w.hidden, w.attended, w.mlp)?,
            sums: PartialSums::new(gpu, rows, w.hidden)?,
        })
    }
}

/// Most sequences that a step takes on `gpu`.
pub(in crate::engine) fn most_together(gpu: &Gpu) -> usize {
    if gpu.takes_wide_steps() {
        MOST_WIDE_SEQUENCES
    } else {
        MOST_SEQUENCES
    }
}

/// Most rows of a session's steps on a device that takes at most `together` sequences.
pub(super) fn most_rows(spec: &SessionSpec, together: usize) -> usize {
    let sequences = spec.slots.min(together).max(1);
    sequences.max(MOST_RUN.min(spec.max_rows))
}

/// Values per row of [`StepRows::best`] after a step of `m` rows, where kernels for few rows take up to `few`: of the blocks
/// of the head's product, or of the logits that were gathered from several GPUs.
pub(super) fn best_values(
    gpu: &Gpu,
    head: &DeviceLinear,
    vocab: usize,
    m: usize,
    few: usize,
) -> nq_kernels::Result<usize> {
    if head.rows() < vocab {
        Ok(gathered_best_len(vocab))
    } else if m <= few {
        best_len(gpu, head, m)
    } else {
        Ok(wide_best_len(gpu, head, m))
    }
}

/// A row's state, as the host knows it.
#[derive(Clone, Copy, Default)]
pub(super) struct RowState {
    /// The sequence; `None` if the row runs idle.
    pub(super) slot: Option<usize>,
    /// Draws queued in this row so far, by all sequences that sat there.
    pub(super) drawn: i32,
    /// True if its sampler looks at more than the best token.
    pub(super) lists: bool,
    /// True if its sampler wants log-probabilities.
    pub(super) logprobs: bool,
}

impl StepRows {
    /// Allocates buffers for steps of a model with this head. All rows start idle, in the last slot of the places.
    pub(super) fn new(
        gpu: &Gpu,
        c: &ModelConfig,
        head: &DeviceLinear,
        shape: StepSizes,
    ) -> Result<Self> {
        let StepSizes {
            rows,
            few_rows,
            kv,
            places,
            part,
            trellis,
        } = shape;
        let w = Widths::of(c);
        let idle = idle_step(places.slots - 1, 0);
        let tokens = w.vocab;
        let bounds = StepBounds { places, tokens };
        let narrow = rows.min(MOST_SEQUENCES);
        let f32s = |rows: usize, n: usize| gpu.zeros::<f32>("activations", rows * n);
        let mut blocks = 1;
        for m in 1..=rows {
            // Drafters may read the streams of steps later, which are then not wide.
            for few in [few_rows, MOST_SEQUENCES] {
                blocks = blocks.max(m * best_values(gpu, head, w.vocab, m, few)?);
            }
        }
        let columns = match narrow {
            1 => None,
            _ => Some(Columns::new(gpu, narrow, w.widest_input())?),
        };
        let wide = if rows > few_rows {
            Some(WideRows::new(gpu, &w, rows)?)
        } else {
            None
        };
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        let usual = c.head_dim == HEAD_DIM;
        let cascade = if rows > 1 && usual && Cascade::fits(gpu, kv) {
            Some(Cascade::new(gpu, rows, places)?)
        } else {
            None
        };
        let sizes = LayersSizes {
            hidden: w.hidden,
            heads,
            kv_heads,
            head_dim: c.head_dim,
            delta: w.delta,
            experts: c.experts.as_ref().map(largest_mixture),
            intermediate: c.experts.map_or(w.mlp, |e| e.width),
            trellis,
        };
        Ok(StepRows {
            rows,
            few_rows,
            step: Checked::new(gpu, "activations", rows, idle, bounds)?,
            x: f32s(rows, w.hidden)?,
            qkv: f32s(rows, w.qkv)?,
            rates: f32s(rows, w.delta.map_or(0, |d| 2 * d.value_heads))?,
            attended: f32s(narrow, w.attended)?,
            gated: f32s(narrow, w.mlp)?,
            attention: AttentionScratch::new(gpu, c.q_dim() / HEAD_DIM, kv_heads, rows)?,
            cascade,
            shared: None,
            columns,
            experts: ExpertRows::new(gpu, w.experts.as_ref(), w.hidden, rows, GROUPED_ROWS)?,
            layers: match part.filter(|part| part.split == Split::Tensors) {
                None => LayersScratch::new(gpu, sizes)?,
                Some(part) => LayersScratch::of_rank(gpu, sizes, part.rank)?,
            },
            wide,
            taps: None,
            logits: f32s(rows, w.vocab)?,
            best: gpu.zeros("activations", blocks)?,
            sampling: gpu.zeros("activations", rows)?,
            sampled_by: vec![Sampling::default(); rows],
            candidates: Candidates::new(gpu, w.vocab, rows)?,
            adjust: Adjustments::new(gpu, w.vocab, rows)?,
            ring: gpu.mapped("sampled tokens", rows * RING, PENDING)?,
            logprobs: gpu.mapped("sampled tokens", rows * RING, Logprobs::default())?,
            seats: vec![RowState::default(); rows],
            queued: VecDeque::new(),
            written: false,
        })
    }

    /// Most rows of a step.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Most rows of a step of runs.
    pub(super) fn most_run(&self) -> usize {
        MOST_RUN.min(self.rows)
    }

    /// True if the sequence in `slot` sits in a row.
    pub(super) fn seats_slot(&self, slot: usize) -> bool {
        self.seats.iter().any(|s| s.slot == Some(slot))
    }
}

/// The state of a row in which no sequence sits.
pub(super) fn idle_step(slot: usize, drawn: i32) -> Step {
    Step {
        position: 0,
        slot: slot as i32,
        drawn,
        ..Step::default()
    }
}
