//! The memory of a session, in bytes of each of its buffers: what is planned is what is allocated.

use crate::engine::WgpuModel;
use crate::product::STEP_ROWS;
use nq_kernels::pages::{KvType, PAGE};
use nq_model::ModelConfig;
use nq_runtime::interface::SessionSpec;

/// Rows that go through the layers together: longer inputs are cut.
const PASS_ROWS: usize = 512;

/// Rows that go through the head together.
const HEAD_ROWS: usize = 64;

/// Most parts in which a row's keys are read.
pub(crate) const SPLITS: usize = 32;

/// Parts of the vocabulary in which the best token is looked for.
pub(crate) const DRAW_PARTS: usize = 64;

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
    /// Keys of a layer, and as much for its values.
    pub(crate) keys: usize,
    /// Keys of a layer in a page.
    pub(crate) page: usize,
}

/// Bytes of a page's keys in one layer.
pub(crate) fn page_keys(c: &ModelConfig) -> usize {
    PAGE * c.num_key_value_heads * KvType::F16.bytes(c.head_dim)
}

impl Sizes {
    /// Those of a session of `model`.
    pub(crate) fn new(model: &WgpuModel, spec: &SessionSpec) -> Self {
        let c = &model.config;
        let rows = spec.max_rows.clamp(1, PASS_ROWS);
        let head_rows = rows.min(HEAD_ROWS);
        let floats = |n: usize| 4 * rows * n;
        let (heads, mlp) = (c.num_attention_heads, c.intermediate_size);
        let (apart, rounded) = (model.has_gates_apart(), model.rounded_inputs());
        let step = rows.min(STEP_ROWS);
        let tables = spec.slots.min(rows) * spec.ctx.div_ceil(PAGE);
        let parts = step * heads * SPLITS;
        let page = page_keys(c);
        Sizes {
            rows,
            head_rows,
            stream: floats(c.hidden_size),
            normed: floats(c.hidden_size),
            qkv: floats(c.q_dim() + 2 * c.kv_dim()),
            attended: floats(c.q_dim()),
            gated: floats(mlp),
            gate_up: if apart { floats(2 * mlp) } else { 0 },
            rounded: rows * rounded,
            rounded_scales: 8 * rows * rounded / crate::pack::UNIT,
            batch: 4 * (rows * (7 + c.rotary_dims()) + tables),
            parts: 4 * parts * (c.head_dim + 2),
            head_in: 4 * head_rows * c.hidden_size,
            logits: 4 * head_rows * c.vocab_size,
            best: 8 * step * DRAW_PARTS,
            vectors: 4 * model.vector_values(),
            keys: spec.page_count() * page,
            page,
        }
    }

    /// Keys and values of all layers.
    pub(crate) fn kv(&self, c: &ModelConfig) -> usize {
        2 * c.num_hidden_layers * self.keys
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
        let attention = [self.batch, self.parts, self.page];
        let head = [
            self.head_in,
            2 * self.logits.max(self.head_in),
            2 * self.best,
            self.vectors,
        ];
        let all = rows.iter().chain(&mlp).chain(&attention).chain(&head);
        all.sum()
    }
}
