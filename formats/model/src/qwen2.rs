//! Qwen2.5 (arXiv 2412.15115), and Qwen2, which has the same layers: queries, keys and values have
//! biases, and heads have no norms.

use super::architecture::{Architecture, Preset, all_alike};
use super::dimensions::RopeScaling;
use super::layer::{AttentionSpec, Block, LayerSpec, LinearKind, Mixer, Product, Width, biased};
use super::llama;

#[rustfmt::skip]
const ATTENTION: Block = Block {
    norm: llama::ATTENTION_NORM,
    mixer: Mixer::Attention(AttentionSpec {
        qkv: Product {
            linears: &[
                biased(LinearKind::Q, "self_attn.q_proj", "attn_q", (Width::Heads, Width::Hidden)),
                biased(LinearKind::K, "self_attn.k_proj", "attn_k", (Width::KvHeads, Width::Hidden)),
                biased(LinearKind::V, "self_attn.v_proj", "attn_v", (Width::KvHeads, Width::Hidden)),
            ],
            ..llama::QKV
        },
        head_norms: None,
        gated: false,
        o: llama::O,
    }),
};

#[rustfmt::skip]
pub(super) static QWEN2: Architecture = Architecture {
    family: "Qwen2",
    title: "Qwen2.5",
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    also: &[],
    gguf: "qwen2",
    kinds: &[LayerSpec {
        blocks: &[ATTENTION, llama::MLP],
    }],
    kind_of: all_alike,
    heads_split_hidden: true,
    rotated: 1,
    norm_less_one: false,
    fused_delta: false,
    mtp_unsaid: false,
    gguf_pairs: false,
    gguf_tiled: false,
    presets: &[
        Preset {
            head_dim: 64,
            vocab: 151_936,
            ..preset(("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct"), (896, 4864), 24, (14, 2), true)
        },
        Preset {
            vocab: 151_936,
            ..preset(("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"), (1536, 8960), 28, (12, 2), true)
        },
        Preset {
            vocab: 151_936,
            ..preset(("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct"), (2048, 11008), 36, (16, 2), true)
        },
        preset(("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"), (3584, 18944), 28, (28, 4), false),
        preset(("qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct"), (5120, 13824), 48, (40, 8), false),
        preset(("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct"), (5120, 27648), 64, (40, 8), false),
        preset(("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct"), (8192, 29568), 80, (64, 8), false),
    ],
};

/// A published size: names, widths of the residual stream and the MLP, layers, heads of queries and of
/// keys. Other values are those of the larger sizes.
const fn preset(
    (name, hub_id): (&'static str, &'static str),
    (hidden, intermediate): (usize, usize),
    layers: usize,
    (heads, kv_heads): (usize, usize),
    tied: bool,
) -> Preset {
    Preset {
        name,
        hub_id,
        architecture: &QWEN2,
        hidden,
        intermediate,
        experts: None,
        delta: None,
        layers,
        heads,
        kv_heads,
        head_dim: 128,
        vocab: 152_064,
        positions: 32_768,
        eps: 1e-6,
        theta: 1e6,
        scaling: RopeScaling::None,
        tied,
        eos: &[151_645],
    }
}
