//! Qwen3.5, 3.6 and 3.8, dense and mixtures of experts, and Qwen3-Next: gated DeltaNets in most layers and
//! gated attention in every fourth (transformers' `qwen3_5`, `qwen3_5_moe` and `qwen3_next`).

use super::architecture::{Architecture, Preset, hybrid};
use super::dimensions::{Delta, Experts, RopeScaling};
use super::layer::{
    AttentionSpec, Block, DeltaSpec, ExpertsSpec, HeadNorms, LayerSpec, LinearKind, Mixer, MlpSpec,
    NormKind, NormSpec, Product, SharedSpec, Source, VectorKind, VectorRow, Width, linear, norm,
    norm_less_one,
};

#[rustfmt::skip]
const MIXER_NORM: NormSpec =
    norm_less_one(NormKind::Attention, "input_layernorm", "attn_norm", Width::Hidden);

#[rustfmt::skip]
const MLP_NORM: NormSpec =
    norm_less_one(NormKind::Mlp, "post_attention_layernorm", "post_attention_norm", Width::Hidden);

#[rustfmt::skip]
const DELTA: Block = Block {
    norm: MIXER_NORM,
    mixer: Mixer::Delta(DeltaSpec {
        inputs: Product {
            name: "qkvz",
            linears: &[
                linear(LinearKind::DeltaQkv, "linear_attn.in_proj_qkv", "attn_qkv", (Width::DeltaChannels, Width::Hidden)),
                linear(LinearKind::DeltaZ, "linear_attn.in_proj_z", "attn_gate", (Width::DeltaValues, Width::Hidden)),
            ],
            source: Source::Norm(NormKind::Attention),
        },
        rates: Product {
            name: "ba",
            linears: &[
                linear(LinearKind::DeltaB, "linear_attn.in_proj_b", "ssm_beta", (Width::DeltaHeads, Width::Hidden)),
                linear(LinearKind::DeltaA, "linear_attn.in_proj_a", "ssm_alpha", (Width::DeltaHeads, Width::Hidden)),
            ],
            source: Source::Norm(NormKind::Attention),
        },
        conv: VectorRow { kind: VectorKind::Conv, suffix: "linear_attn.conv1d", gguf: "ssm_conv1d", len: Width::DeltaTaps },
        decay: VectorRow { kind: VectorKind::Decay, suffix: "linear_attn.A_log", gguf: "ssm_a", len: Width::DeltaHeads },
        dt_bias: VectorRow { kind: VectorKind::TimeStep, suffix: "linear_attn.dt_bias", gguf: "ssm_dt.bias", len: Width::DeltaHeads },
        norm: norm(NormKind::Delta, "linear_attn.norm", "ssm_norm", Width::DeltaHead),
        out: Product {
            name: "delta_out",
            linears: &[
                linear(LinearKind::DeltaOut, "linear_attn.out_proj", "ssm_out", (Width::Hidden, Width::DeltaValues)),
            ],
            source: Source::Fixed,
        },
    }),
};

#[rustfmt::skip]
const ATTENTION: Block = Block {
    norm: MIXER_NORM,
    mixer: Mixer::Attention(AttentionSpec {
        qkv: Product {
            name: "qkv",
            linears: &[
                linear(LinearKind::Q, "self_attn.q_proj", "attn_q", (Width::GatedHeads, Width::Hidden)),
                linear(LinearKind::K, "self_attn.k_proj", "attn_k", (Width::KvHeads, Width::Hidden)),
                linear(LinearKind::V, "self_attn.v_proj", "attn_v", (Width::KvHeads, Width::Hidden)),
            ],
            source: Source::Norm(NormKind::Attention),
        },
        head_norms: Some(HeadNorms {
            q: norm_less_one(NormKind::Q, "self_attn.q_norm", "attn_q_norm", Width::Head),
            k: norm_less_one(NormKind::K, "self_attn.k_norm", "attn_k_norm", Width::Head),
        }),
        gated: true,
        o: super::llama::O,
    }),
};

const MLP: Block = Block {
    norm: MLP_NORM,
    mixer: super::llama::MLP.mixer,
};

#[rustfmt::skip]
const EXPERTS: Block = Block {
    norm: MLP_NORM,
    mixer: Mixer::Experts(ExpertsSpec {
        router: super::qwen3::ROUTER,
        gate_up: super::qwen3::GATE_UP,
        down: super::qwen3::DOWN,
        shared: Some(SharedSpec {
            score: Product {
                name: "shared_score",
                linears: &[
                    linear(LinearKind::SharedScore, "mlp.shared_expert_gate", "ffn_gate_inp_shexp", (Width::One, Width::Hidden)),
                ],
                source: Source::Norm(NormKind::Mlp),
            },
            mlp: MlpSpec {
                gate_up: Product {
                    name: "shared_gate_up",
                    linears: &[
                        linear(LinearKind::SharedGate, "mlp.shared_expert.gate_proj", "ffn_gate_shexp", (Width::SharedExpert, Width::Hidden)),
                        linear(LinearKind::SharedUp, "mlp.shared_expert.up_proj", "ffn_up_shexp", (Width::SharedExpert, Width::Hidden)),
                    ],
                    source: Source::Norm(NormKind::Mlp),
                },
                down: Product {
                    name: "shared_down",
                    linears: &[
                        linear(LinearKind::SharedDown, "mlp.shared_expert.down_proj", "ffn_down_shexp", (Width::Hidden, Width::SharedExpert)),
                    ],
                    source: Source::Rows(LinearKind::SharedUp),
                },
            },
        }),
    }),
};

#[rustfmt::skip]
pub(super) static QWEN3_5: Architecture = Architecture {
    family: "Qwen3.5",
    title: "Qwen3.5, 3.6 and 3.8 dense",
    class: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    also: &[("Qwen3_5ForConditionalGeneration", "qwen3_5")],
    gguf: "qwen35",
    kinds: &[
        LayerSpec { blocks: &[DELTA, MLP] },
        LayerSpec { blocks: &[ATTENTION, MLP] },
    ],
    kind_of: hybrid,
    heads_split_hidden: false,
    rotated: 4,
    norm_less_one: true,
    fused_delta: false,
    mtp_unsaid: false,
    gguf_pairs: false,
    gguf_tiled: true,
    presets: &[
        preset(("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B"), (1024, 3584), 24, (8, 2), 16, true),
        preset(("qwen3.5-2b", "Qwen/Qwen3.5-2B"), (2048, 6144), 24, (8, 2), 16, true),
        preset(("qwen3.5-4b", "Qwen/Qwen3.5-4B"), (2560, 9216), 32, (16, 4), 32, true),
        preset(("qwen3.5-9b", "Qwen/Qwen3.5-9B"), (4096, 12288), 32, (16, 4), 32, false),
        preset(("qwen3.5-27b", "Qwen/Qwen3.5-27B"), (5120, 17408), 64, (24, 4), 48, false),
        preset(("qwen3.6-27b", "Qwen/Qwen3.6-27B"), (5120, 17408), 64, (24, 4), 48, false),
        preset(("qwen3.8-27b", "Qwen/Qwen3.8-27B"), (5120, 17408), 64, (24, 4), 48, false),
    ],
};

#[rustfmt::skip]
pub(super) static QWEN3_5_MOE: Architecture = Architecture {
    family: "Qwen3.5",
    title: "Qwen3.5 and 3.6 mixture-of-experts",
    class: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    also: &[("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")],
    gguf: "qwen35moe",
    kinds: MIXTURES,
    kind_of: hybrid,
    heads_split_hidden: false,
    rotated: 4,
    norm_less_one: true,
    fused_delta: false,
    mtp_unsaid: false,
    gguf_pairs: false,
    gguf_tiled: true,
    presets: &[
        mixture(("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B"), 2048, 40, 16, 32, (256, 8, 512)),
        mixture(("qwen3.6-35b-a3b", "Qwen/Qwen3.6-35B-A3B"), 2048, 40, 16, 32, (256, 8, 512)),
        mixture(("qwen3.5-122b-a10b", "Qwen/Qwen3.5-122B-A10B"), 3072, 48, 32, 64, (256, 8, 1024)),
        mixture(("qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B"), 4096, 60, 32, 64, (512, 10, 1024)),
    ],
};

#[rustfmt::skip]
pub(super) static QWEN3_NEXT: Architecture = Architecture {
    family: "Qwen3-Next",
    title: "Qwen3-Next",
    class: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    also: &[],
    gguf: "qwen3next",
    kinds: MIXTURES,
    kind_of: hybrid,
    heads_split_hidden: false,
    rotated: 4,
    norm_less_one: true,
    fused_delta: true,
    mtp_unsaid: true,
    gguf_pairs: false,
    gguf_tiled: false,
    presets: &[
        next(("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct")),
        next(("qwen3-coder-next", "Qwen/Qwen3-Coder-Next")),
    ],
};

const MIXTURES: &[LayerSpec] = &[
    LayerSpec {
        blocks: &[DELTA, EXPERTS],
    },
    LayerSpec {
        blocks: &[ATTENTION, EXPERTS],
    },
];

/// A published size: names, widths of the residual stream and the MLP, layers, heads of queries and of
/// keys in attention, heads of values in recurrences. Other values are the same for all.
const fn preset(
    (name, hub_id): (&'static str, &'static str),
    (hidden, intermediate): (usize, usize),
    layers: usize,
    (heads, kv_heads): (usize, usize),
    value_heads: usize,
    tied: bool,
) -> Preset {
    Preset {
        name,
        hub_id,
        architecture: &QWEN3_5,
        hidden,
        intermediate,
        experts: None,
        delta: Some(Delta {
            key_heads: 16,
            value_heads,
            key_dim: 128,
            value_dim: 128,
            conv: 4,
            interval: 4,
            tiled: false,
        }),
        layers,
        heads,
        kv_heads,
        head_dim: 256,
        vocab: 248_320,
        positions: 262_144,
        eps: 1e-6,
        theta: 1e7,
        scaling: RopeScaling::None,
        tied,
        eos: &[248_046],
    }
}

/// A published mixture: names, width of the residual stream, layers, query heads, heads of values, and
/// experts: how many, how many for a token, and their width, which is the shared one's too.
const fn mixture(
    names: (&'static str, &'static str),
    hidden: usize,
    layers: usize,
    heads: usize,
    value_heads: usize,
    (count, per_token, width): (usize, usize, usize),
) -> Preset {
    Preset {
        architecture: &QWEN3_5_MOE,
        experts: Some(Experts {
            count,
            per_token,
            width,
            normalized: true,
            shared: width,
        }),
        ..preset(
            names,
            (hidden, width),
            layers,
            (heads, 2),
            value_heads,
            false,
        )
    }
}

/// The published size of Qwen3-Next.
const fn next(names: (&'static str, &'static str)) -> Preset {
    Preset {
        architecture: &QWEN3_NEXT,
        intermediate: 5120,
        vocab: 151_936,
        eos: &[151_645],
        ..mixture(names, 2048, 48, 16, 32, (512, 10, 512))
    }
}
