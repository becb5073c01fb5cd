//! The kernels between products: attention, heads, norms, draws; and what they are bound to.

use crate::pack::UNIT;
use crate::source::KernelSource;
use nq_kernels::pages::{KvType, PAGE};
use nq_model::ModelConfig;

/// Most parts in which a row's keys are read.
pub(crate) const SPLITS: usize = 32;

/// Parts of the vocabulary in which the best token is looked for.
pub(crate) const DRAW_PARTS: usize = 64;

/// Values of queries that workgroups of attention hold at most: half of the 16 KB that every adapter has.
const HELD_QUERIES: usize = 2048;

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
        }
    }

    /// Values from one query to the next.
    fn step(&self) -> usize {
        self.dim * (1 + usize::from(self.gated))
    }

    /// Values of a row: queries and their gates, keys, values.
    pub(crate) fn row(&self) -> usize {
        self.count * self.step() + 2 * self.kv * self.dim
    }

    /// A kernel of `file` with these heads.
    fn kernel(&self, file: &'static str) -> KernelSource {
        KernelSource::new(&[include_str!("wgsl/pages.wgsl"), file])
            .with("HEADS", self.count)
            .with("KV_HEADS", self.kv)
            .with("GROUP", self.group())
            .with("DIM", self.dim)
            .with("TURNED", self.turned)
            .with("STRIDE", self.row())
            .with("QUERY_STEP", self.step())
            .with("KEYS_AT", self.count * self.step())
            .with("PAGE", PAGE)
            .with("SPLITS", SPLITS)
            .with("PAIRS", self.dim / 2)
            .with_float("SCALE", 1.0 / (self.dim as f32).sqrt())
            .with_float("NOTHING", NOTHING)
            .flag("GATED", self.gated)
            .flag("INT8", self.kv_type == KvType::Int8)
    }

    /// Heads that share one of keys and values.
    fn group(&self) -> usize {
        self.count / self.kv
    }

    /// Parts into which the heads of a group are divided in steps: a workgroup has up to four of them, or as many values
    /// as four of 128.
    pub(crate) fn shares(&self) -> usize {
        self.group().div_ceil((512 / self.dim).clamp(1, 4))
    }

    /// Rows of a sequence that attend together in prompts.
    pub(crate) fn tile(&self) -> usize {
        ((HELD_QUERIES / self.dim).min(16) / self.group()).max(1)
    }
}

/// The kernel that combines parts of attention.
pub(crate) fn combine(heads: Heads) -> KernelSource {
    let kernel = heads.kernel(include_str!("wgsl/attention.wgsl"));
    kernel.flag("COMBINE", true)
}

/// The kernel of attention for steps in which every sequence has one row, without biases and norms.
pub(crate) fn attention_row(heads: Heads, eps: f32) -> KernelSource {
    // Invocations for which there is a key to each; 64 keys are read together.
    let value_shares = (256 / (heads.dim / 2)).min(64);
    (heads.kernel(include_str!("wgsl/attention_row.wgsl")))
        .file(include_str!("wgsl/softmax.wgsl"))
        .with("THREADS", 256)
        .with("SHARES", heads.shares())
        .with("QUERIES", heads.group().div_ceil(heads.shares()))
        .with("PER_QUARTER", (heads.dim / 8).div_ceil(4))
        .with("VALUE_SHARES", value_shares)
        .with("PER_SHARE", 64usize.div_ceil(value_shares))
        .with_float("EPS", eps)
}

/// The score of what nobody sees.
const NOTHING: f32 = -1e30;

/// The kernel of attention for tiles of `rows` rows.
pub(crate) fn attention(heads: Heads, rows: usize) -> KernelSource {
    let queries = rows * heads.group();
    let value_parts = (128 / (heads.dim / 2)).min(queries);
    (heads.kernel(include_str!("wgsl/attention.wgsl")))
        .file(include_str!("wgsl/softmax.wgsl"))
        .with("THREADS", 128)
        .with("QUERIES", queries)
        .with("PER_HALF", queries.div_ceil(2))
        .with("VALUE_PARTS", value_parts)
        .with("PER_VALUE_PART", queries.div_ceil(value_parts))
}

/// The kernel that prepares heads, without biases and norms.
pub(crate) fn prepare_heads(heads: Heads, eps: f32) -> KernelSource {
    let kernel = heads.kernel(include_str!("wgsl/heads.wgsl"));
    kernel.with_float("EPS", eps)
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
        .with("HIDDEN", hidden)
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
