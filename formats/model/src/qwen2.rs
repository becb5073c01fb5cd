//! Qwen2.5 (arXiv 2412.15115), and Qwen2, which has the same layers: queries, keys and values have
//! biases, and heads have no norms.

use super::architecture::{Architecture, PLAIN, Preset};
use super::dimensions::RopeScaling;
use super::kind::{LinearKind, Width};
use super::layer::{AttentionSpec, BlockSpec, LayerSpec, Mixer, Product, linear};
use super::llama;

#[rustfmt::skip]
const ATTENTION: BlockSpec = BlockSpec {
    norm: llama::ATTENTION_NORM,
    hyper: None,
    mixer: Mixer::Attention(AttentionSpec {
        qkv: Product {
            linears: &[
                linear(LinearKind::Q, "self_attn.q_proj", "attn_q", Width::Heads, Width::Hidden).with_bias(),
                linear(LinearKind::K, "self_attn.k_proj", "attn_k", Width::KvHeads, Width::Hidden).with_bias(),
                linear(LinearKind::V, "self_attn.v_proj", "attn_v", Width::KvHeads, Width::Hidden).with_bias(),
            ],
            ..llama::QKV
        },
        head_norms: None,
        gated: false,
        indexer: None,
        o: llama::O,
    }),
};

#[rustfmt::skip]
pub(super) static QWEN2: Architecture = Architecture {
    family: "Qwen2",
    title: "Qwen2.5",
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    gguf: "qwen2",
    kinds: &[LayerSpec {
        blocks: &[ATTENTION, llama::MLP],
    }],
    heads_split_hidden: true,
    presets: &[
        Preset {
            name: "qwen2.5-0.5b", hub_id: "Qwen/Qwen2.5-0.5B-Instruct",
            hidden: 896, intermediate: 4864, layers: 24, heads: 14, kv_heads: 2,
            head_dim: 64, vocab: 151_936, tied: true,
            ..qwen2_7b()
        },
        Preset {
            name: "qwen2.5-1.5b", hub_id: "Qwen/Qwen2.5-1.5B-Instruct",
            hidden: 1536, intermediate: 8960, layers: 28, heads: 12, kv_heads: 2,
            vocab: 151_936, tied: true,
            ..qwen2_7b()
        },
        Preset {
            name: "qwen2.5-3b", hub_id: "Qwen/Qwen2.5-3B-Instruct",
            hidden: 2048, intermediate: 11008, layers: 36, heads: 16, kv_heads: 2,
            vocab: 151_936, tied: true,
            ..qwen2_7b()
        },
        qwen2_7b(),
        Preset {
            name: "qwen2.5-14b", hub_id: "Qwen/Qwen2.5-14B-Instruct",
            hidden: 5120, intermediate: 13824, layers: 48, heads: 40, kv_heads: 8,
            ..qwen2_7b()
        },
        Preset {
            name: "qwen2.5-32b", hub_id: "Qwen/Qwen2.5-32B-Instruct",
            hidden: 5120, intermediate: 27648, layers: 64, heads: 40, kv_heads: 8,
            ..qwen2_7b()
        },
        Preset {
            name: "qwen2.5-72b", hub_id: "Qwen/Qwen2.5-72B-Instruct",
            hidden: 8192, intermediate: 29568, layers: 80, heads: 64, kv_heads: 8,
            ..qwen2_7b()
        },
    ],
    ..PLAIN
};

/// Qwen2.5 7B; other sizes are as it is where they say nothing else.
#[rustfmt::skip]
const fn qwen2_7b() -> Preset {
    Preset {
        name: "qwen2.5-7b", hub_id: "Qwen/Qwen2.5-7B-Instruct", architecture: &QWEN2,
        hidden: 3584, intermediate: 18944, experts: None, delta: None, streams: None, layers: 28, heads: 28, kv_heads: 4,
        head_dim: 128, vocab: 152_064, positions: 32_768, eps: 1e-6, theta: 1e6, scaling: RopeScaling::None,
        tied: false, eos: &[151_645],
    }
}
