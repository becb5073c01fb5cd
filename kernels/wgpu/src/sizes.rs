//! The memory of a session, in bytes of each of its buffers: what is planned is what is allocated.

use crate::experts::group_words;
use crate::kernels::{DRAW_PARTS, Heads, SPLITS};
use crate::model::WgpuModel;
use crate::product::STEP_ROWS;
use crate::recurrence::state_len;
use nq_kernels::DeltaShape;
use nq_kernels::pages::{KvType, PAGE};
use nq_model::{Experts, ModelConfig};
use nq_runtime::interface::SessionSpec;
use nq_runtime::states::{is_recurrent, shape_of};

/// Rows that go through the layers together: longer inputs are cut.
const PASS_ROWS: usize = 512;

/// Rows that go through the head together.
const HEAD_ROWS: usize = 64;

/// Words of a row in a pass's `batch`: its position, where its page table is, the first row of its sequence in the pass,
/// and the place of the sequence's state.
pub(crate) const ROW_WORDS: usize = 4;

/// Sizes of a session's buffers, in bytes unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Rows of a pass.
    pub(crate) rows: usize,
    /// Rows of them that the head takes together.
    pub(crate) head_rows: usize,
    pub(crate) stream: usize,
    pub(crate) normed: usize,
    pub(crate) qkv: usize,
    pub(crate) attended: usize,
    pub(crate) gated: usize,
    pub(crate) gate_up: usize,
    /// Rates of recurrences, and what their convolutions give.
    pub(crate) rates: usize,
    pub(crate) mixed: usize,
    /// Scores of experts and of the shared one, which are chosen, and these in groups.
    pub(crate) scores: usize,
    pub(crate) shared_scores: usize,
    pub(crate) routes: usize,
    pub(crate) groups: usize,
    /// What the experts of rows gate, and what they give.
    pub(crate) experts_gated: usize,
    pub(crate) experts_out: usize,
    pub(crate) rounded: usize,
    pub(crate) rounded_scales: usize,
    pub(crate) batch: usize,
    pub(crate) parts: usize,
    pub(crate) head_in: usize,
    pub(crate) logits: usize,
    /// Best tokens of the rows of a step.
    pub(crate) best: usize,
    /// Norms' gains, and vectors of heads.
    pub(crate) vectors: usize,
    /// Pages.
    pages: usize,
    /// Bytes of a page in a layer: keys, values, and their scales.
    pub(crate) page: [usize; 3],
    /// Layers with keys and values, and with states.
    attention_layers: usize,
    recurrent_layers: usize,
    /// The states of a layer, of sequences and snapshots, and one of them.
    pub(crate) states: usize,
    pub(crate) state: usize,
    /// A page or a state on its way from one place to another.
    pub(crate) moved: usize,
}

/// Bytes of a layer's page: of its keys, of its values, and of scales of both.
pub(crate) fn page_parts(c: &ModelConfig, kv: KvType) -> [usize; 3] {
    let vectors = PAGE * c.num_key_value_heads;
    match kv {
        KvType::Int8 => [vectors * c.head_dim, vectors * c.head_dim, 8 * vectors],
        // Others than f16 are refused.
        KvType::F16 | KvType::F32 => [2 * vectors * c.head_dim, 2 * vectors * c.head_dim, 0],
    }
}

impl Sizes {
    /// Those of a session of `model`.
    pub(crate) fn new(model: &WgpuModel, spec: &SessionSpec) -> Self {
        let c = &model.config;
        let rows = spec.max_rows.clamp(1, PASS_ROWS);
        let head_rows = rows.min(HEAD_ROWS);
        let floats = |n: usize| 4 * rows * n;
        let heads = c.num_attention_heads;
        let mlp = c.experts.map_or(c.intermediate_size, |e| e.shared);
        let routed = |values: fn(&Experts) -> usize| c.experts.as_ref().map_or(0, values);
        let (apart, rounded) = (model.has_gates_apart(), model.rounded_inputs());
        let step = rows.min(STEP_ROWS);
        let tables = spec.slots.min(rows) * spec.ctx.div_ceil(PAGE);
        let parts = step * heads * SPLITS;
        let page = page_parts(c, spec.kv);
        let delta = shape_of(c);
        let of_delta = |values: fn(&DeltaShape) -> usize| delta.as_ref().map_or(0, values);
        let state = 4 * of_delta(state_len);
        let recurrent_layers = c.layers().filter(|l| is_recurrent(l)).count();
        Sizes {
            rows,
            head_rows,
            stream: floats(c.hidden_size),
            normed: floats(c.hidden_size),
            qkv: floats(
                Heads::of(c, spec.kv)
                    .row()
                    .max(of_delta(DeltaShape::stride)),
            ),
            attended: floats(c.q_dim().max(of_delta(DeltaShape::values))),
            gated: floats(mlp),
            gate_up: if apart { floats(2 * mlp) } else { 0 },
            rates: floats(of_delta(|d| 2 * d.value_heads)),
            mixed: floats(of_delta(DeltaShape::channels)),
            scores: floats(routed(|e| e.count)),
            shared_scores: floats(routed(|e| e.shared.min(1))),
            routes: 2 * floats(routed(|e| e.per_token)),
            groups: 4 * c.experts.map_or(0, |e| group_words(&e, rows)),
            experts_gated: floats(routed(|e| e.per_token * e.width)),
            experts_out: match rows > STEP_ROWS {
                true => floats(routed(|e| e.per_token) * c.hidden_size),
                false => 0,
            },
            rounded: rows * rounded,
            rounded_scales: 8 * rows * rounded / crate::pack::UNIT,
            batch: 4 * (rows * (ROW_WORDS + 7 + c.rotary_dims()) + tables),
            parts: 4 * parts * (c.head_dim + 2),
            head_in: 4 * head_rows * c.hidden_size,
            logits: 4 * head_rows * c.vocab_size,
            best: 8 * step * DRAW_PARTS,
            vectors: 4 * model.vector_values(),
            pages: spec.page_count(),
            page,
            attention_layers: c.num_hidden_layers - recurrent_layers,
            recurrent_layers,
            states: (spec.slots + spec.snapshot_count()) * state,
            state,
            moved: page[0].max(state),
        }
    }

    /// Keys, values or scales of a layer, in order.
    pub(crate) fn kept(&self) -> [usize; 3] {
        self.page.map(|bytes| self.pages * bytes)
    }

    /// Keys, values and states of all layers.
    pub(crate) fn kv(&self) -> usize {
        self.pages * self.all_of_page() + self.recurrent_layers * self.states
    }

    /// Keys and values of all layers in a page.
    pub(crate) fn all_of_page(&self) -> usize {
        self.attention_layers * self.page.iter().sum::<usize>()
    }

    /// The states of a sequence in all layers.
    pub(crate) fn all_states(&self) -> usize {
        self.recurrent_layers * self.state
    }

    /// Everything else: results are copied to a buffer of their own, from which the host reads them.
    pub(crate) fn scratch(&self) -> usize {
        let rows = [
            self.stream,
            self.normed,
            self.qkv,
            self.attended,
            self.gated,
        ];
        let mlp = [self.gate_up, self.rounded, self.rounded_scales];
        let mixers = [self.rates, self.mixed, self.scores, self.shared_scores];
        let experts = [
            self.routes,
            self.groups,
            self.experts_gated,
            self.experts_out,
        ];
        let attention = [self.batch, self.parts, self.moved];
        let head = [
            self.head_in,
            2 * self.logits.max(self.head_in),
            2 * self.best,
            self.vectors,
        ];
        let all = (rows.iter().chain(&mlp).chain(&mixers)).chain(&experts);
        let all = all.chain(&attention).chain(&head);
        all.sum()
    }
}
