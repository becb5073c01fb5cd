//! The memory of a session, in bytes of each of its buffers: what is planned is what is allocated.

use crate::experts::group_words;
use crate::kernels::{DRAW_PARTS, Heads, SPLITS};
use crate::model::WgpuModel;
use crate::pack::UNIT;
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

/// Declares [`Part`], and lists its values in order.
macro_rules! parts {
    ($($(#[$doc:meta])* $part:ident,)*) => {
        /// A buffer that all layers of a session use, or its head.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Part {
            $($(#[$doc])* $part,)*
        }

        impl Part {
            /// All of them, in order.
            pub(crate) const ALL: [Part; [$(Part::$part),*].len()] = [$(Part::$part),*];
        }
    };
}

parts! {
    /// `[rows, hidden]`: the residual stream, and what a norm makes of it.
    Stream,
    Normed,
    /// Queries with their gates, keys and values; or what goes into a recurrence.
    Qkv,
    /// `[rows, heads, head_dim]`: the output of attention, or of a recurrence.
    Attended,
    /// `[rows, intermediate]`
    Gated,
    /// Gates and what they multiply, where these are in weights of different kinds.
    GateUp,
    /// Rates of recurrences, and what their convolutions give.
    Rates,
    Mixed,
    /// Scores of experts and of the shared one.
    Scores,
    SharedScores,
    /// `[rows, routes, 2]`: chosen experts, and bits of their weights.
    Routes,
    /// The routes of a prompt's rows by expert.
    Groups,
    /// `[rows, routes, width]`: what experts gate; and `[rows, routes, hidden]`: what they give, in prompts alone.
    ExpertsGated,
    ExpertsOut,
    /// Inputs as bytes, and their scales.
    Rounded,
    RoundedScales,
    /// Positions and page tables, tiles of attention, wanted rows, cosines and sines.
    Batch,
    /// Sums of attention over parts of the keys.
    Parts,
    /// A page or a state on its way from one place to another.
    Moved,
    /// `[head rows, hidden]` and `[head rows, vocab]`
    HeadIn,
    Logits,
    /// `[rows of a step, DRAW_PARTS, 2]`: the best logits of parts of the vocabulary, and their tokens.
    Best,
}

/// Sizes of a session's buffers, in bytes unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Rows of a pass.
    pub(crate) rows: usize,
    /// Rows of them that the head takes together.
    pub(crate) head_rows: usize,
    /// In the order of [`Part::ALL`].
    parts: [usize; Part::ALL.len()],
    /// Norms' gains, and vectors of heads.
    vectors: usize,
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
        let (head_rows, step) = (rows.min(HEAD_ROWS), rows.min(STEP_ROWS));
        let floats = |n: usize| 4 * rows * n;
        let mlp = c.experts.map_or(c.intermediate_size, |e| e.shared);
        let routed = |values: fn(&Experts) -> usize| c.experts.as_ref().map_or(0, values);
        let (apart, rounded) = (model.has_gates_apart(), model.rounded_inputs());
        let tables = spec.slots.min(rows) * spec.ctx.div_ceil(PAGE);
        let page = page_parts(c, spec.kv);
        let delta = shape_of(c);
        let of_delta = |values: fn(&DeltaShape) -> usize| delta.as_ref().map_or(0, values);
        let state = 4 * of_delta(state_len);
        let recurrent_layers = c.layers().filter(|l| is_recurrent(l)).count();
        let heads = Heads::of(c, spec.kv).row();
        let bytes = |part: Part| match part {
            Part::Stream | Part::Normed => floats(c.hidden_size),
            Part::Qkv => floats(heads.max(of_delta(DeltaShape::stride))),
            Part::Attended => floats(c.q_dim().max(of_delta(DeltaShape::values))),
            Part::Gated => floats(mlp),
            Part::GateUp => floats(if apart { 2 * mlp } else { 0 }),
            Part::Rates => floats(of_delta(|d| 2 * d.value_heads)),
            Part::Mixed => floats(of_delta(DeltaShape::channels)),
            Part::Scores => floats(routed(|e| e.count)),
            Part::SharedScores => floats(routed(|e| e.shared.min(1))),
            Part::Routes => 2 * floats(routed(|e| e.per_token)),
            Part::Groups => 4 * c.experts.map_or(0, |e| group_words(&e, rows)),
            Part::ExpertsGated => floats(routed(|e| e.per_token * e.width)),
            Part::ExpertsOut if rows > STEP_ROWS => floats(routed(|e| e.per_token) * c.hidden_size),
            Part::ExpertsOut => 0,
            Part::Rounded => rows * rounded,
            Part::RoundedScales => 8 * rows * rounded / UNIT,
            Part::Batch => 4 * (rows * (ROW_WORDS + 7 + c.rotary_dims()) + tables),
            Part::Parts => 4 * step * c.num_attention_heads * SPLITS * (c.head_dim + 2),
            Part::Moved => page[0].max(state),
            Part::HeadIn => 4 * head_rows * c.hidden_size,
            Part::Logits => 4 * head_rows * c.vocab_size,
            Part::Best => 8 * step * DRAW_PARTS,
        };
        Sizes {
            rows,
            head_rows,
            parts: Part::ALL.map(bytes),
            vectors: 4 * model.vector_values(),
            pages: spec.page_count(),
            page,
            attention_layers: c.num_hidden_layers - recurrent_layers,
            recurrent_layers,
            states: (spec.slots + spec.snapshot_count()) * state,
            state,
        }
    }

    /// Those of a part.
    pub(crate) fn part(&self, part: Part) -> usize {
        self.parts[part as usize]
    }

    /// Results on their way to the host: logits, or rows behind the final norm.
    pub(crate) fn results(&self) -> usize {
        self.part(Part::Logits).max(self.part(Part::HeadIn))
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

    /// Everything else.
    pub(crate) fn scratch(&self) -> usize {
        let parts = self.parts.iter().sum::<usize>();
        parts + self.results() + self.part(Part::Best) + self.vectors
    }
}
