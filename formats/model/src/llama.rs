//! Llama 3, 3.1, 3.2 and 3.3 (arXiv 2407.21783), whose blocks other families have too.

use super::architecture::{Architecture, PLAIN, Preset};
use super::dimensions::RopeScaling;
use super::kind::{LinearKind, NormKind, Width};
use super::layer::{
    AttentionSpec, BlockSpec, InputSource, LayerSpec, Mixer, MlpSpec, NormSpec, Product, linear,
    norm,
};

/// The norm before attention.
#[rustfmt::skip]
pub(super) const ATTENTION_NORM: NormSpec =
    norm(NormKind::Attention, "input_layernorm", "attn_norm", Width::Hidden);

/// Queries, keys and values.
#[rustfmt::skip]
pub(super) const QKV: Product = Product {
    name: "qkv",
    linears: &[
        linear(LinearKind::Q, "self_attn.q_proj", "attn_q", Width::Heads, Width::Hidden),
        linear(LinearKind::K, "self_attn.k_proj", "attn_k", Width::KvHeads, Width::Hidden),
        linear(LinearKind::V, "self_attn.v_proj", "attn_v", Width::KvHeads, Width::Hidden),
    ],
    source: InputSource::Norm(NormKind::Attention),
};

/// The output projection of attention.
#[rustfmt::skip]
pub(super) const O: Product = Product {
    name: "o",
    linears: &[
        linear(LinearKind::O, "self_attn.o_proj", "attn_output", Width::Hidden, Width::Heads),
    ],
    source: InputSource::Heads(LinearKind::V),
};

/// The norm before the MLP.
#[rustfmt::skip]
pub(super) const MLP_NORM: NormSpec =
    norm(NormKind::Mlp, "post_attention_layernorm", "ffn_norm", Width::Hidden);

/// A SwiGLU.
#[rustfmt::skip]
pub(super) const MLP: BlockSpec = BlockSpec {
    norm: MLP_NORM,
    hyper: None,
    mixer: Mixer::Mlp(MlpSpec {
        gate_up: Product {
            name: "gate_up",
            linears: &[
                linear(LinearKind::Gate, "mlp.gate_proj", "ffn_gate", Width::Mlp, Width::Hidden),
                linear(LinearKind::Up, "mlp.up_proj", "ffn_up", Width::Mlp, Width::Hidden),
            ],
            source: InputSource::Norm(NormKind::Mlp),
        },
        down: Product {
            name: "down",
            linears: &[
                linear(LinearKind::Down, "mlp.down_proj", "ffn_down", Width::Hidden, Width::Mlp),
            ],
            source: InputSource::Rows(LinearKind::Up),
        },
    }),
};

const ATTENTION: BlockSpec = BlockSpec {
    norm: ATTENTION_NORM,
    hyper: None,
    mixer: Mixer::Attention(AttentionSpec {
        qkv: QKV,
        head_norms: None,
        gated: false,
        indexer: None,
        o: O,
    }),
};

/// Llama 3, whose blocks the layers that draft have too.
#[rustfmt::skip]
pub static LLAMA: Architecture = Architecture {
    family: "Llama",
    title: "Llama 3",
    class: "LlamaForCausalLM",
    model_type: "llama",
    gguf: "llama",
    kinds: &[LayerSpec {
        blocks: &[ATTENTION, MLP],
    }],
    heads_split_hidden: true,
    gguf_pairs: true,
    presets: &[
        Preset {
            name: "llama-3.2-1b", hub_id: "meta-llama/Llama-3.2-1B-Instruct",
            hidden: 2048, intermediate: 8192, layers: 16, heads: 32, head_dim: 64,
            scaling: stretched(32.0), tied: true,
            ..llama_8b()
        },
        Preset {
            name: "llama-3.2-3b", hub_id: "meta-llama/Llama-3.2-3B-Instruct",
            hidden: 3072, intermediate: 8192, layers: 28, heads: 24,
            scaling: stretched(32.0), tied: true,
            ..llama_8b()
        },
        llama_8b(),
        Preset {
            name: "llama-3.3-70b", hub_id: "meta-llama/Llama-3.3-70B-Instruct",
            hidden: 8192, intermediate: 28672, layers: 80, heads: 64,
            ..llama_8b()
        },
    ],
    ..PLAIN
};

/// The published stretch of the context from 8,192 positions.
const fn stretched(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    }
}

/// Llama 3.1 8B; other sizes are as it is where they say nothing else.
#[rustfmt::skip]
const fn llama_8b() -> Preset {
    Preset {
        name: "llama-3.1-8b", hub_id: "meta-llama/Llama-3.1-8B-Instruct", architecture: &LLAMA,
        hidden: 4096, intermediate: 14336, experts: None, delta: None, streams: None, layers: 32, heads: 32, kv_heads: 8,
        head_dim: 128, vocab: 128_256, positions: 131_072, eps: 1e-5, theta: 5e5, scaling: stretched(8.0),
        tied: false, eos: &[128_001, 128_008, 128_009],
    }
}
