//! The kernels between products: attention, heads, norms, draws; and what they are bound to.

use crate::pack::UNIT;
use crate::source::KernelSource;
use nq_kernels::pages::{KvType, PAGE};
use nq_model::ModelConfig;

/// Most parts in which a row's keys are read.
pub(crate) const SPLITS: usize = 32;

/// Parts of the vocabulary in which the best token is looked for.
pub(crate) const DRAW_PARTS: usize = 64;

/// Heads of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) count: usize,
    pub(crate) kv: usize,
    pub(crate) dim: usize,
    /// Values of a head that turn with the position.
    pub(crate) turned: usize,
    /// True if a gate as wide as a head stands behind each query.
    pub(crate) gated: bool,
    /// What keys and values are rounded to: f16 or int8.
    pub(crate) kv_type: KvType,
    /// Queries of a workgroup at most.
    pub(crate) queries: usize,
}

impl Heads {
    /// Those of models of shape `c`.
    pub(crate) fn of(c: &ModelConfig, kv_type: KvType) -> Self {
        Heads {
            count: c.num_attention_heads,
            kv: c.num_key_value_heads,
            dim: c.head_dim,
            turned: c.rotary_dims(),
            gated: c.gate_dim() > 0,
            kv_type,
            // Four, or as many values as four of 128.
            queries: (512 / c.head_dim).clamp(1, 4),
        }
    }

    /// The same for steps of few rows with few keys, which take more workgroups: one for each query.
    pub(crate) fn apart(self) -> Self {
        Heads { queries: 1, ..self }
    }

    /// Values from one query to the next.
    fn step(&self) -> usize {
        self.dim * (1 + usize::from(self.gated))
    }

    /// Values of a row: queries and their gates, keys, values.
    pub(crate) fn row(&self) -> usize {
        self.count * self.step() + 2 * self.kv * self.dim
    }

    /// A kernel with these heads, of which a workgroup has those of `rows` rows.
    fn kernel(&self, rows: usize) -> KernelSource {
        KernelSource::default()
            .with("HEADS", self.count)
            .with("KV_HEADS", self.kv)
            .with("GROUP", self.group())
            .with("SHARES", self.shares())
            .with("QUERIES", rows * self.group().div_ceil(self.shares()))
            .with("DIM", self.dim)
            .with("TURNED", self.turned)
            .with("STRIDE", self.row())
            .with("QUERY_STEP", self.step())
            .with("KEYS_AT", self.count * self.step())
            .with("PAGE", PAGE)
            .with("SPLITS", SPLITS)
            .with("PAIRS", self.dim / 2)
            .with_float("SCALE", 1.0 / (self.dim as f32).sqrt())
            // The score of what nobody sees.
            .with_float("NOTHING", -1e30)
            .flag("GATED", self.gated)
            .flag("INT8", self.kv_type == KvType::Int8)
            .file(include_str!("wgsl/pages.wgsl"))
    }

    /// The kernel that prepares heads of `rows` rows, for which there are vectors of heads.
    fn preparing(&self, rows: usize, vectors: HeadKinds) -> KernelSource {
        let queries = rows * self.group().div_ceil(self.shares());
        (self.kernel(rows).file(include_str!("wgsl/heads.wgsl")))
            .with("PER_HEADS", ((queries + 2) * self.dim).div_ceil(256))
            .with("PER_TURNS", ((queries + 1) * self.turned / 2).div_ceil(256))
            .with("NORMS_AT", vectors.norms_at)
            .with_float("EPS", vectors.eps)
            .flag("BIASES", vectors.norms_at > 0)
            .flag("NORMS", vectors.normed)
    }

    /// Heads that share one of keys and values.
    fn group(&self) -> usize {
        self.count / self.kv
    }

    /// Parts into which the heads of a group are divided.
    pub(crate) fn shares(&self) -> usize {
        self.group().div_ceil(self.queries)
    }

    /// Rows of a sequence that attend together, where they are several.
    pub(crate) fn tile(&self) -> usize {
        (self.queries / self.group()).max(1)
    }
}

/// Which vectors are added to heads, or multiplied by.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadKinds {
    /// Values of biases, behind which there are gains; 0 without biases.
    pub(crate) norms_at: usize,
    pub(crate) normed: bool,
    /// What norms of heads add to the mean of squares.
    pub(crate) eps: f32,
}

/// The kernel that combines parts of attention.
pub(crate) fn combine(heads: Heads) -> KernelSource {
    heads.kernel(1).file(include_str!("wgsl/combine.wgsl"))
}

/// The kernel that prepares heads.
pub(crate) fn prepare_heads(heads: Heads, vectors: HeadKinds) -> KernelSource {
    heads.preparing(1, vectors).flag("PREPARE", true)
}

/// The kernel of attention: with `vectors` for steps in which every sequence has one row, whose heads it prepares; or for
/// tiles of rows whose heads are prepared.
pub(crate) fn attention(heads: Heads, vectors: Option<HeadKinds>) -> KernelSource {
    let rows = if vectors.is_some() { 1 } else { heads.tile() };
    // Invocations for which there is a key to each; 64 keys are read together.
    let value_shares = (256 / (heads.dim / 2)).min(64);
    (heads.preparing(rows, vectors.unwrap_or_default()))
        .file(include_str!("wgsl/attention.wgsl"))
        .with("PER_QUARTER", (heads.dim / 8).div_ceil(4))
        .with("VALUE_SHARES", value_shares)
        .with("PER_SHARE", 64usize.div_ceil(value_shares))
        .flag("ALONE", vectors.is_some())
}

/// The kernel that finds the best of `vocab` logits in parts.
pub(crate) fn draw(vocab: usize) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/draw.wgsl")])
        .with("VOCAB", vocab)
        .with("PER_PART", vocab.div_ceil(DRAW_PARTS))
        .with("DRAW_PARTS", DRAW_PARTS)
        .with_float("LEAST", f32::MIN)
}

/// The kernel of RMSNorm over rows of `hidden` values.
pub(crate) fn norm(hidden: usize, eps: f32) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/rows.wgsl")])
        .with("UNITS", hidden / UNIT)
        .with_float("EPS", eps)
        .flag("NORM", true)
}

/// The kernel that rounds rows of `inputs` values to bytes.
pub(crate) fn round(inputs: usize) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/rows.wgsl")])
        .with("UNITS", inputs / UNIT)
        .flag("ROUND", true)
}

/// The kernel of SwiGLU over rows of `width` gates and as many that they multiply.
pub(crate) fn silu(width: usize) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/rows.wgsl")])
        .with("WIDTH", width)
        .flag("SILU", true)
}
