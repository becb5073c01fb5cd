//! Qwen3, dense and mixtures of experts (arXiv 2505.09388).

use super::architecture::{Architecture, PLAIN, Preset};
use super::dimensions::{Experts, RopeScaling};
use super::kind::{LinearKind, NormKind, Width};
use super::layer::{
    AttentionSpec, BlockSpec, ExpertsSpec, HeadNorms, InputSource, LayerSpec, Mixer, Product,
    linear, norm,
};
use super::llama;

#[rustfmt::skip]
const ATTENTION: BlockSpec = BlockSpec {
    norm: llama::ATTENTION_NORM,
    hyper: None,
    mixer: Mixer::Attention(AttentionSpec {
        qkv: llama::QKV,
        head_norms: Some(HeadNorms {
            q: norm(NormKind::Q, "self_attn.q_norm", "attn_q_norm", Width::Head),
            k: norm(NormKind::K, "self_attn.k_norm", "attn_k_norm", Width::Head),
        }),
        gated: false,
        indexer: None,
        o: llama::O,
    }),
};

#[rustfmt::skip]
pub(super) static QWEN3: Architecture = Architecture {
    family: "Qwen3",
    title: "Qwen3 dense",
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    gguf: "qwen3",
    kinds: &[LayerSpec {
        blocks: &[ATTENTION, llama::MLP],
    }],
    presets: &[
        Preset {
            name: "qwen3-0.6b", hub_id: "Qwen/Qwen3-0.6B",
            hidden: 1024, intermediate: 3072, layers: 28, heads: 16, tied: true,
            ..qwen3_8b()
        },
        Preset {
            name: "qwen3-1.7b", hub_id: "Qwen/Qwen3-1.7B",
            hidden: 2048, intermediate: 6144, layers: 28, heads: 16, tied: true,
            ..qwen3_8b()
        },
        Preset {
            name: "qwen3-4b", hub_id: "Qwen/Qwen3-4B",
            hidden: 2560, intermediate: 9728, layers: 36, heads: 32, tied: true,
            ..qwen3_8b()
        },
        qwen3_8b(),
        Preset {
            name: "qwen3-14b", hub_id: "Qwen/Qwen3-14B",
            hidden: 5120, intermediate: 17408, layers: 40, heads: 40,
            ..qwen3_8b()
        },
        Preset {
            name: "qwen3-32b", hub_id: "Qwen/Qwen3-32B",
            hidden: 5120, intermediate: 25600, layers: 64, heads: 64,
            ..qwen3_8b()
        },
        Preset {
            name: "qwen3-4b-2507", hub_id: "Qwen/Qwen3-4B-Instruct-2507",
            hidden: 2560, intermediate: 9728, layers: 36, heads: 32,
            positions: 262_144, theta: 5e6, tied: true,
            ..qwen3_8b()
        },
    ],
    ..PLAIN
};

/// Qwen3-VL, whose text model is Qwen3 (arXiv 2511.21631).
pub(super) static QWEN3_VL: Architecture = Architecture {
    family: "Qwen3-VL",
    title: "Qwen3-VL dense",
    class: "Qwen3VLForConditionalGeneration",
    model_type: "qwen3_vl_text",
    also: &[("Qwen3VLForConditionalGeneration", "qwen3_vl")],
    gguf: "qwen3vl",
    presets: &[],
    ..QWEN3
};

pub(super) static QWEN3_VL_MOE: Architecture = Architecture {
    family: "Qwen3-VL",
    title: "Qwen3-VL mixture-of-experts",
    class: "Qwen3VLMoeForConditionalGeneration",
    model_type: "qwen3_vl_moe_text",
    also: &[("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")],
    gguf: "qwen3vlmoe",
    presets: &[],
    ..QWEN3_MOE
};

/// Scores of experts.
#[rustfmt::skip]
pub(super) const ROUTER: Product = Product {
    name: "router",
    linears: &[
        linear(LinearKind::Router, "mlp.gate", "ffn_gate_inp", Width::Experts, Width::Hidden),
    ],
    source: InputSource::Norm(NormKind::Mlp),
};

/// Gates and ups of experts.
#[rustfmt::skip]
pub(super) const GATE_UP: Product = Product {
    name: "gate_up",
    linears: &[
        linear(LinearKind::Gate, "mlp.experts.gate_proj", "ffn_gate_exps", Width::Expert, Width::Hidden).of_experts(),
        linear(LinearKind::Up, "mlp.experts.up_proj", "ffn_up_exps", Width::Expert, Width::Hidden).of_experts(),
    ],
    source: InputSource::Norm(NormKind::Mlp),
};

/// Downs of experts.
#[rustfmt::skip]
pub(super) const DOWN: Product = Product {
    name: "down",
    linears: &[
        linear(LinearKind::Down, "mlp.experts.down_proj", "ffn_down_exps", Width::Hidden, Width::Expert).of_experts(),
    ],
    source: InputSource::Rows(LinearKind::Up),
};

const EXPERTS: BlockSpec = BlockSpec {
    norm: llama::MLP_NORM,
    hyper: None,
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
    gguf: "qwen3moe",
    kinds: &[LayerSpec {
        blocks: &[ATTENTION, EXPERTS],
    }],
    presets: &[
        qwen3_30b(),
        Preset {
            name: "qwen3-235b-a22b", hub_id: "Qwen/Qwen3-235B-A22B",
            hidden: 4096, intermediate: 12288, layers: 94, heads: 64, kv_heads: 4,
            experts: experts(128, 1536),
            ..qwen3_30b()
        },
        Preset {
            name: "qwen3-480b-a35b", hub_id: "Qwen/Qwen3-Coder-480B-A35B-Instruct",
            hidden: 6144, intermediate: 8192, layers: 62, heads: 96, kv_heads: 8,
            positions: 262_144, theta: 1e7,
            experts: experts(160, 2560),
            ..qwen3_30b()
        },
    ],
    ..PLAIN
};

/// Qwen3 30B-A3B, whose dense MLP exists in its configuration only; other mixtures are as it is where they say nothing
/// else.
#[rustfmt::skip]
const fn qwen3_30b() -> Preset {
    Preset {
        name: "qwen3-30b-a3b", hub_id: "Qwen/Qwen3-30B-A3B", architecture: &QWEN3_MOE,
        hidden: 2048, intermediate: 6144, experts: experts(128, 768), layers: 48, kv_heads: 4,
        ..qwen3_8b()
    }
}

/// `count` experts of `width`, of which a token takes eight.
const fn experts(count: usize, width: usize) -> Option<Experts> {
    Some(Experts {
        count,
        per_token: 8,
        width,
        normalized: true,
        shared: 0,
    })
}

/// Qwen3 8B; other sizes are as it is where they say nothing else.
#[rustfmt::skip]
const fn qwen3_8b() -> Preset {
    Preset {
        name: "qwen3-8b", hub_id: "Qwen/Qwen3-8B", architecture: &QWEN3,
        hidden: 4096, intermediate: 12288, experts: None, delta: None, streams: None, layers: 36, heads: 32, kv_heads: 8,
        head_dim: 128, vocab: 151_936, positions: 40_960, eps: 1e-6, theta: 1e6, scaling: RopeScaling::None,
        tied: false, eos: &[151_645],
    }
}
