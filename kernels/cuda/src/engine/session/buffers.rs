//! Buffers of a session beside those of its steps.

use super::stream_rows::StreamRows;
use super::taps::Taps;
use crate::engine::held::largest_mixture;
use crate::engine::weights::TrellisCodes;
use crate::{
    Buffer, Checked, CodedExperts, DeltaRows, GatheredSizes, Gpu, GroupedRows, MOST_SEQUENCES,
    MOST_TRELLIS_ROWS, Places, Row, TrellisSizes, chosen, gated_width, packed_weights, stacked,
};
use nq_kernels::{DeltaShape, KernelSet};
use nq_model::forward::Operand;
use nq_model::{Experts, ModelConfig};
use nq_runtime::Result;
use nq_runtime::states::shape_of;

/// Rows of logits computed and copied at a time.
pub(in crate::engine) const LOGIT_ROWS: usize = 64;

/// From so many rows on, rows are sorted by expert, and an expert's weights are read once for all of its
/// rows; before, rows that go through their experts one by one are faster (Qwen3-30B-A3B on an H200).
pub(in crate::engine) const GROUPED_ROWS: usize = 48;

/// Row widths of the buffers.
pub(in crate::engine) struct Widths {
    pub(in crate::engine) hidden: usize,
    /// Of the products that attention or a recurrence begins with.
    pub(in crate::engine) qkv: usize,
    /// Of what attention or a recurrence gives to its last product.
    pub(in crate::engine) attended: usize,
    /// Width of a layer's MLP or shared expert; other experts have their own buffers.
    pub(in crate::engine) mlp: usize,
    pub(in crate::engine) vocab: usize,
    pub(in crate::engine) experts: Option<Experts>,
    pub(in crate::engine) delta: Option<DeltaShape>,
    /// From how many rows on they are grouped by expert.
    pub(in crate::engine) groups_from: usize,
}

impl Widths {
    pub(in crate::engine) fn of(c: &ModelConfig) -> Self {
        let delta = shape_of(c);
        let (products, values) = delta.map_or((0, 0), |d| (d.channels() + d.values(), d.values()));
        Widths {
            hidden: c.hidden_size,
            qkv: products.max(c.q_dim() + c.gate_dim() + 2 * c.kv_dim()),
            attended: values.max(c.q_dim()),
            mlp: c.mlp_width().max(c.experts.map_or(0, |e| e.shared)),
            vocab: c.vocab_size,
            experts: c.experts,
            delta,
            groups_from: match c.hyper {
                Some(_) => 1,
                None => GROUPED_ROWS,
            },
        }
    }

    /// Of products with `codes` of up to `many` rows.
    pub(super) fn trellis(&self, many: usize, codes: TrellisCodes) -> TrellisSizes {
        let outputs = self.qkv.max(2 * self.mlp);
        let weights = packed_weights(outputs, self.hidden);
        TrellisSizes {
            rows: MOST_TRELLIS_ROWS.max(LOGIT_ROWS),
            many,
            inputs: self.widest_input(),
            weights: weights.max(packed_weights(self.hidden, self.attended.max(self.mlp))),
            gate: match codes {
                TrellisCodes::Exl3 => self.mlp,
                TrellisCodes::Own | TrellisCodes::None => 0,
            },
            experts: match self.experts {
                Some(e) if codes.any() => {
                    let e = &largest_mixture(&e);
                    let sorted = many >= self.groups_from;
                    CodedExperts {
                        few: many.min(GROUPED_ROWS) * chosen(e),
                        sorted: if sorted { many * chosen(e) } else { 0 },
                        experts: stacked(e),
                        hidden: self.hidden,
                        width: e.width,
                        exl3: codes == TrellisCodes::Exl3,
                    }
                }
                _ => CodedExperts::default(),
            },
        }
    }

    /// Of products with sorted inputs, in steps of up to `rows` rows and prompts of up to `many`.
    pub(super) fn gathered(&self, rows: usize, many: usize) -> GatheredSizes {
        GatheredSizes {
            full: rows.min(MOST_SEQUENCES),
            half: many.max(rows),
            inputs: self.widest_input(),
        }
    }

    /// The most inputs of any product.
    pub(super) fn widest_input(&self) -> usize {
        self.hidden.max(self.attended).max(self.mlp)
    }
}

pub(in crate::engine) fn padded(width: usize) -> usize {
    width.next_multiple_of(256)
}

/// Buffers of a forward over many rows.
pub(super) struct ManyRows {
    pub(super) tokens: Checked<u32>,
    pub(super) rows: Checked<Row>,
    pub(super) wanted: Checked<u32>,
    pub(super) x: Buffer<f32>,   // [rows, hidden], the residual
    pub(super) qkv: Buffer<f32>, // [rows, widest products of a mixer]
    pub(super) halves: Halves,
    pub(super) rates: Buffer<f32>, // [rows, 2 value heads]
    pub(super) recurrent: Option<RecurrentRows>,
    pub(super) head_in: Buffer<u16>, // [LOGIT_ROWS, hidden padded]
    pub(super) logits: Buffer<f32>,  // [LOGIT_ROWS, vocab], or hidden states of as many rows
    pub(super) experts: Option<ExpertRows>,
    pub(super) full: Option<FullRows>,
    pub(super) taps: Option<Taps>,
    /// Of a residual of several streams, to which `x` is what a block adds.
    pub(super) streams: Option<StreamRows>,
}

impl ManyRows {
    /// Allocates buffers for forwards over up to `m` rows, which stand in `places`.
    pub(super) fn new(
        gpu: &Gpu,
        w: &Widths,
        kernels: KernelSet,
        m: usize,
        places: Places,
    ) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>("activations", n);
        Ok(ManyRows {
            tokens: Checked::new(gpu, "activations", m, 0, w.vocab)?,
            rows: Checked::new(
                gpu,
                "activations",
                m,
                Row::default(),
                Places {
                    images: m,
                    ..places
                },
            )?,
            wanted: Checked::new(gpu, "activations", m, 0, m)?,
            x: f32s(m * w.hidden)?,
            qkv: f32s(m * w.qkv)?,
            halves: Halves::new(gpu, m, w.hidden, w.attended, w.mlp)?,
            rates: f32s(m * w.delta.map_or(0, |d| 2 * d.value_heads))?,
            recurrent: match &w.delta {
                Some(delta) => Some(RecurrentRows::new(gpu, delta, m, places.slots)?),
                None => None,
            },
            head_in: gpu.zeros("activations", LOGIT_ROWS * padded(w.hidden))?,
            logits: f32s(LOGIT_ROWS * w.vocab)?,
            experts: ExpertRows::new(gpu, w.experts.as_ref(), w.hidden, m, w.groups_from)?,
            full: match kernels {
                KernelSet::Reference => Some(FullRows::new(gpu, w, m)?),
                KernelSet::Fused => None,
            },
            taps: None,
            streams: None,
        })
    }

    /// The most blocks that an indexer scores for a row of a step whose sequence has `positions` with it.
    pub(super) fn scored_in_step(&self, positions: usize) -> usize {
        let index = self.streams.as_ref().and_then(|s| s.index.as_ref());
        index.map_or(0, |index| index.chosen.scored_in_step(positions))
    }
}

/// Inputs of products in FP16 and operand order.
pub(in crate::engine) struct Halves {
    pub(in crate::engine) normed: Buffer<u16>, // [rows, hidden padded]
    pub(in crate::engine) attended: Buffer<u16>, // [rows, widest output of a mixer, padded]
    pub(in crate::engine) gated: Buffer<u16>,  // [rows, intermediate padded]
}

impl Halves {
    /// Allocates them for up to `rows` rows of these widths.
    pub(in crate::engine) fn new(
        gpu: &Gpu,
        rows: usize,
        hidden: usize,
        attended: usize,
        gated: usize,
    ) -> nq_kernels::Result<Self> {
        let halves = |width: usize| gpu.zeros("activations", rows * padded(width));
        Ok(Halves {
            normed: halves(hidden)?,
            attended: halves(attended)?,
            gated: halves(gated)?,
        })
    }

    pub(in crate::engine) fn operand(&self, operand: Operand) -> &Buffer<u16> {
        match operand {
            Operand::Attended => &self.attended,
            Operand::Gated => &self.gated,
        }
    }
}

/// Buffers for layers with recurrences, of forwards over many rows.
pub(in crate::engine) struct RecurrentRows {
    pub(in crate::engine) mixed: Buffer<f32>, // [rows, channels]
    pub(in crate::engine) chunks: Buffer<f32>, // `DeltaRows::chunk_parts`
    pub(in crate::engine) scanned: Buffer<f32>, // [rows, values]
}

impl RecurrentRows {
    pub(super) fn new(gpu: &Gpu, delta: &DeltaShape, rows: usize, slots: usize) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>("activations", rows * n);
        Ok(RecurrentRows {
            mixed: f32s(delta.channels())?,
            chunks: gpu.zeros("activations", DeltaRows::chunk_parts(delta, rows, slots))?,
            scanned: f32s(delta.values())?,
        })
    }
}

/// Buffers for layers with experts.
pub(in crate::engine) struct ExpertRows {
    pub(in crate::engine) scores: Buffer<f32>, // [rows, experts in a stack]
    pub(in crate::engine) shared: Buffer<f32>, // [rows], scores of the shared expert
    pub(in crate::engine) gated: Buffer<f32>, // [rows, chosen experts, width], of rows that are not grouped
    pub(in crate::engine) grouped: Option<GroupedRows>,
}

impl ExpertRows {
    /// Allocates them for up to `rows` rows of `hidden` values, of which so many are grouped by expert, or more; `None`
    /// without experts.
    pub(in crate::engine) fn new(
        gpu: &Gpu,
        experts: Option<&Experts>,
        hidden: usize,
        rows: usize,
        groups_from: usize,
    ) -> Result<Option<Self>> {
        let Some(experts) = experts else {
            return Ok(None);
        };
        let f32s = |n: usize| gpu.zeros::<f32>("activations", n);
        let experts = &largest_mixture(experts);
        let grouped = || GroupedRows::new(gpu, *experts, hidden, rows);
        Ok(Some(ExpertRows {
            scores: f32s(rows * stacked(experts))?,
            shared: f32s(rows)?,
            gated: f32s(rows.min(GROUPED_ROWS) * gated_width(experts))?,
            grouped: (rows >= groups_from).then(grouped).transpose()?,
        }))
    }
}

/// f32 activations, for the plain kernels and for observers.
pub(in crate::engine) struct FullRows {
    pub(in crate::engine) normed: Buffer<f32>, // [rows, hidden]
    pub(in crate::engine) attended: Buffer<f32>, // [rows, widest output of a mixer]
    pub(in crate::engine) gate_up: Buffer<f32>, // [rows, 2 intermediate]
    pub(in crate::engine) gated: Buffer<f32>,  // [rows, intermediate]
}

impl FullRows {
    pub(super) fn new(gpu: &Gpu, w: &Widths, rows: usize) -> Result<Self> {
        let zeros = |n: usize| gpu.zeros("activations", rows * n);
        Ok(FullRows {
            normed: zeros(w.hidden)?,
            attended: zeros(w.attended)?,
            gate_up: zeros(2 * w.mlp)?,
            gated: zeros(w.mlp)?,
        })
    }

    pub(in crate::engine) fn operand(&self, operand: Operand) -> &Buffer<f32> {
        match operand {
            Operand::Attended => &self.attended,
            Operand::Gated => &self.gated,
        }
    }
}
