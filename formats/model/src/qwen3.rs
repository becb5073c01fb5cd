//! Qwen3, dense and mixtures of experts (arXiv 2505.09388).

use super::architecture::{Architecture, Preset, all_alike};
use super::dimensions::{Experts, RopeScaling};
use super::layer::{
    AttentionSpec, Block, ExpertsSpec, HeadNorms, LayerSpec, LinearKind, Mixer, NormKind, Product,
    Source, Width, linear, norm, stack,
};
use super::llama;

#[rustfmt::skip]
const ATTENTION: Block = Block {
    norm: llama::ATTENTION_NORM,
    mixer: Mixer::Attention(AttentionSpec {
        qkv: llama::QKV,
        head_norms: Some(HeadNorms {
            q: norm(NormKind::Q, "self_attn.q_norm", "attn_q_norm", Width::Head),
            k: norm(NormKind::K, "self_attn.k_norm", "attn_k_norm", Width::Head),
        }),
        gated: false,
        o: llama::O,
    }),
};

#[rustfmt::skip]
pub(super) static QWEN3: Architecture = Architecture {
    family: "Qwen3",
    title: "Qwen3 dense",
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    also: &[],
    gguf: "qwen3",
    kinds: &[LayerSpec {
        blocks: &[ATTENTION, llama::MLP],
    }],
    kind_of: all_alike,
    heads_split_hidden: false,
    rotated: 1,
    norm_less_one: false,
    fused_delta: false,
    mtp_unsaid: false,
    gguf_pairs: false,
    gguf_tiled: false,
    presets: &[
        preset(("qwen3-0.6b", "Qwen/Qwen3-0.6B"), (1024, 3072), 28, 16, true),
        preset(("qwen3-1.7b", "Qwen/Qwen3-1.7B"), (2048, 6144), 28, 16, true),
        preset(("qwen3-4b", "Qwen/Qwen3-4B"), (2560, 9728), 36, 32, true),
        preset(("qwen3-8b", "Qwen/Qwen3-8B"), (4096, 12288), 36, 32, false),
        preset(("qwen3-14b", "Qwen/Qwen3-14B"), (5120, 17408), 40, 40, false),
        preset(("qwen3-32b", "Qwen/Qwen3-32B"), (5120, 25600), 64, 64, false),
        Preset {
            positions: 262_144,
            theta: 5e6,
            ..preset(("qwen3-4b-2507", "Qwen/Qwen3-4B-Instruct-2507"), (2560, 9728), 36, 32, true)
        },
    ],
};

/// Scores of experts.
#[rustfmt::skip]
pub(super) const ROUTER: Product = Product {
    name: "router",
    linears: &[
        linear(LinearKind::Router, "mlp.gate", "ffn_gate_inp", (Width::Experts, Width::Hidden)),
    ],
    source: Source::Norm(NormKind::Mlp),
};

/// Gates and ups of experts.
#[rustfmt::skip]
pub(super) const GATE_UP: Product = Product {
    name: "gate_up",
    linears: &[
        stack(LinearKind::Gate, "mlp.experts.gate_proj", "ffn_gate_exps", (Width::Expert, Width::Hidden)),
        stack(LinearKind::Up, "mlp.experts.up_proj", "ffn_up_exps", (Width::Expert, Width::Hidden)),
    ],
    source: Source::Norm(NormKind::Mlp),
};

/// Downs of experts.
#[rustfmt::skip]
pub(super) const DOWN: Product = Product {
    name: "down",
    linears: &[
        stack(LinearKind::Down, "mlp.experts.down_proj", "ffn_down_exps", (Width::Hidden, Width::Expert)),
    ],
    source: Source::Rows(LinearKind::Up),
};

const EXPERTS: Block = Block {
    norm: llama::MLP_NORM,
    mixer: Mixer::Experts(ExpertsSpec {
        router: ROUTER,
        gate_up: GATE_UP,
        down: DOWN,
        shared: None,
    }),
};

#[rustfmt::skip]
pub(super) static QWEN3_MOE: Architecture = Architecture {
    family: "Qwen3",
    title: "Qwen3 mixture-of-experts",
    class: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    also: &[],
    gguf: "qwen3moe",
    kinds: &[LayerSpec {
        blocks: &[ATTENTION, EXPERTS],
    }],
    kind_of: all_alike,
    heads_split_hidden: false,
    rotated: 1,
    norm_less_one: false,
    fused_delta: false,
    mtp_unsaid: false,
    gguf_pairs: false,
    gguf_tiled: false,
    presets: &[
        mixture(("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"), (2048, 6144), 48, (32, 4), (128, 768)),
        mixture(("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B"), (4096, 12288), 94, (64, 4), (128, 1536)),
        Preset {
            positions: 262_144,
            theta: 1e7,
            ..mixture(("qwen3-480b-a35b", "Qwen/Qwen3-Coder-480B-A35B-Instruct"), (6144, 8192), 62, (96, 8), (160, 2560))
        },
    ],
};

/// A published mixture: names, widths of the residual stream and of a (nonexistent) dense MLP,
/// layers, heads of queries and of keys, experts and their width. Other values are the same for all.
const fn mixture(
    names: (&'static str, &'static str),
    widths: (usize, usize),
    layers: usize,
    (heads, kv_heads): (usize, usize),
    (count, width): (usize, usize),
) -> Preset {
    Preset {
        architecture: &QWEN3_MOE,
        kv_heads,
        experts: Some(Experts {
            count,
            per_token: 8,
            width,
            normalized: true,
            shared: 0,
        }),
        ..preset(names, widths, layers, heads, false)
    }
}

/// A published size: names, widths of the residual stream and the MLP, layers and query heads.
/// Other values are the same for all.
const fn preset(
    (name, hub_id): (&'static str, &'static str),
    (hidden, intermediate): (usize, usize),
    layers: usize,
    heads: usize,
    tied: bool,
) -> Preset {
    Preset {
        name,
        hub_id,
        architecture: &QWEN3,
        hidden,
        intermediate,
        experts: None,
        delta: None,
        layers,
        heads,
        kv_heads: 8,
        head_dim: 128,
        vocab: 151_936,
        positions: 40_960,
        eps: 1e-6,
        theta: 1e6,
        scaling: RopeScaling::None,
        tied,
        eos: &[151_645],
    }
}
