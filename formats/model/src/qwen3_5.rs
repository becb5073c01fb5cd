//! Qwen3.5, 3.6 and 3.8, dense and mixtures of experts, and Qwen3-Next: gated DeltaNets in most layers and
//! gated attention in every fourth (transformers' `qwen3_5`, `qwen3_5_moe` and `qwen3_next`).

use super::architecture::{Architecture, PLAIN, Preset, hybrid};
use super::dimensions::{Delta, Experts, OutputGate, RopeScaling};
use super::kind::{LinearKind, NormKind, VectorKind, Width};
use super::layer::{
    AttentionSpec, BlockSpec, DeltaSpec, ExpertsSpec, HeadNorms, InputSource, LayerSpec,
    LinearSpec, Mixer, MlpSpec, NormSpec, Product, SharedSpec, VectorRow, linear, norm,
};

#[rustfmt::skip]
const MIXER_NORM: NormSpec =
    norm(NormKind::Attention, "input_layernorm", "attn_norm", Width::Hidden).held_less_one();

#[rustfmt::skip]
const MLP_NORM: NormSpec =
    norm(NormKind::Mlp, "post_attention_layernorm", "post_attention_norm", Width::Hidden).held_less_one();

/// A gated DeltaNet.
#[rustfmt::skip]
pub(super) const RECURRENCE: DeltaSpec = DeltaSpec {
    inputs: Product {
        name: "qkvz",
        linears: &[
            linear(LinearKind::DeltaQkv, "linear_attn.in_proj_qkv", "attn_qkv", Width::DeltaChannels, Width::Hidden),
            linear(LinearKind::DeltaZ, "linear_attn.in_proj_z", "attn_gate", Width::DeltaValues, Width::Hidden),
        ],
        source: InputSource::Norm(NormKind::Attention),
    },
    rates: Product {
        name: "ba",
        linears: &[
            linear(LinearKind::DeltaB, "linear_attn.in_proj_b", "ssm_beta", Width::DeltaHeads, Width::Hidden),
            linear(LinearKind::DeltaA, "linear_attn.in_proj_a", "ssm_alpha", Width::DeltaHeads, Width::Hidden),
        ],
        source: InputSource::Norm(NormKind::Attention),
    },
    conv: VectorRow { kind: VectorKind::Conv, suffix: "linear_attn.conv1d", gguf: "ssm_conv1d", len: Width::DeltaTaps },
    decay: VectorRow { kind: VectorKind::Decay, suffix: "linear_attn.A_log", gguf: "ssm_a", len: Width::DeltaHeads },
    dt_bias: VectorRow { kind: VectorKind::TimeStep, suffix: "linear_attn.dt_bias", gguf: "ssm_dt.bias", len: Width::DeltaHeads },
    norm: norm(NormKind::Delta, "linear_attn.norm", "ssm_norm", Width::DeltaHead),
    out: Product {
        name: "delta_out",
        linears: &[
            linear(LinearKind::DeltaOut, "linear_attn.out_proj", "ssm_out", Width::Hidden, Width::DeltaValues),
        ],
        source: InputSource::Fixed,
    },
};

const DELTA: BlockSpec = BlockSpec {
    norm: MIXER_NORM,
    hyper: None,
    mixer: Mixer::Delta(RECURRENCE),
};

/// Queries with gates, keys and values.
#[rustfmt::skip]
pub(super) const GATED_QKV: &[LinearSpec] = &[
    linear(LinearKind::Q, "self_attn.q_proj", "attn_q", Width::GatedHeads, Width::Hidden),
    linear(LinearKind::K, "self_attn.k_proj", "attn_k", Width::KvHeads, Width::Hidden),
    linear(LinearKind::V, "self_attn.v_proj", "attn_v", Width::KvHeads, Width::Hidden),
];

#[rustfmt::skip]
const ATTENTION: BlockSpec = BlockSpec {
    norm: MIXER_NORM,
    hyper: None,
    mixer: Mixer::Attention(AttentionSpec {
        qkv: Product {
            name: "qkv",
            linears: GATED_QKV,
            source: InputSource::Norm(NormKind::Attention),
        },
        head_norms: Some(HeadNorms {
            q: norm(NormKind::Q, "self_attn.q_norm", "attn_q_norm", Width::Head).held_less_one(),
            k: norm(NormKind::K, "self_attn.k_norm", "attn_k_norm", Width::Head).held_less_one(),
        }),
        gated: true,
        indexer: None,
        o: super::llama::O,
    }),
};

const MLP: BlockSpec = BlockSpec {
    norm: MLP_NORM,
    hyper: None,
    mixer: super::llama::MLP.mixer,
};

/// The expert of all rows.
#[rustfmt::skip]
pub(super) const SHARED: SharedSpec = SharedSpec {
    score: Product {
        name: "shared_score",
        linears: &[
            linear(LinearKind::SharedScore, "mlp.shared_expert_gate", "ffn_gate_inp_shexp", Width::One, Width::Hidden),
        ],
        source: InputSource::Norm(NormKind::Mlp),
    },
    mlp: MlpSpec {
        gate_up: Product {
            name: "shared_gate_up",
            linears: &[
                linear(LinearKind::SharedGate, "mlp.shared_expert.gate_proj", "ffn_gate_shexp", Width::SharedExpert, Width::Hidden),
                linear(LinearKind::SharedUp, "mlp.shared_expert.up_proj", "ffn_up_shexp", Width::SharedExpert, Width::Hidden),
            ],
            source: InputSource::Norm(NormKind::Mlp),
        },
        down: Product {
            name: "shared_down",
            linears: &[
                linear(LinearKind::SharedDown, "mlp.shared_expert.down_proj", "ffn_down_shexp", Width::Hidden, Width::SharedExpert),
            ],
            source: InputSource::Rows(LinearKind::SharedUp),
        },
    },
};

const EXPERTS: BlockSpec = BlockSpec {
    norm: MLP_NORM,
    hyper: None,
    mixer: Mixer::Experts(ExpertsSpec {
        router: super::qwen3::ROUTER,
        gate_up: super::qwen3::GATE_UP,
        down: super::qwen3::DOWN,
        shared: Some(SHARED),
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
    rotary_parts: 4,
    norm_less_one: true,
    gguf_tiled: true,
    presets: &[
        Preset {
            name: "qwen3.5-0.8b", hub_id: "Qwen/Qwen3.5-0.8B",
            hidden: 1024, intermediate: 3584, layers: 24, heads: 8, kv_heads: 2, delta: delta(16), tied: true,
            ..qwen3_5_27b()
        },
        Preset {
            name: "qwen3.5-2b", hub_id: "Qwen/Qwen3.5-2B",
            hidden: 2048, intermediate: 6144, layers: 24, heads: 8, kv_heads: 2, delta: delta(16), tied: true,
            ..qwen3_5_27b()
        },
        Preset {
            name: "qwen3.5-4b", hub_id: "Qwen/Qwen3.5-4B",
            hidden: 2560, intermediate: 9216, layers: 32, heads: 16, kv_heads: 4, delta: delta(32), tied: true,
            ..qwen3_5_27b()
        },
        Preset {
            name: "qwen3.5-9b", hub_id: "Qwen/Qwen3.5-9B",
            hidden: 4096, intermediate: 12288, layers: 32, heads: 16, kv_heads: 4, delta: delta(32),
            ..qwen3_5_27b()
        },
        qwen3_5_27b(),
        Preset { name: "qwen3.6-27b", hub_id: "Qwen/Qwen3.6-27B", ..qwen3_5_27b() },
        Preset { name: "qwen3.8-27b", hub_id: "Qwen/Qwen3.8-27B", ..qwen3_5_27b() },
    ],
    ..PLAIN
};

#[rustfmt::skip]
pub(super) static QWEN3_5_MOE: Architecture = Architecture {
    title: "Qwen3.5 and 3.6 mixture-of-experts",
    class: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    also: &[("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")],
    gguf: "qwen35moe",
    kinds: MIXTURES,
    presets: &[
        qwen3_5_35b(),
        Preset { name: "qwen3.6-35b-a3b", hub_id: "Qwen/Qwen3.6-35B-A3B", ..qwen3_5_35b() },
        Preset {
            name: "qwen3.5-122b-a10b", hub_id: "Qwen/Qwen3.5-122B-A10B",
            hidden: 3072, intermediate: 1024, layers: 48, heads: 32, delta: delta(64),
            experts: experts(256, 8, 1024),
            ..qwen3_5_35b()
        },
        Preset {
            name: "qwen3.5-397b-a17b", hub_id: "Qwen/Qwen3.5-397B-A17B",
            hidden: 4096, intermediate: 1024, layers: 60, heads: 32, delta: delta(64),
            experts: experts(512, 10, 1024),
            ..qwen3_5_35b()
        },
    ],
    ..QWEN3_5
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
    fused_delta: true,
    mtp_unsaid: true,
    gguf_tiled: false,
    presets: &[
        qwen3_next_80b(),
        Preset { name: "qwen3-coder-next", hub_id: "Qwen/Qwen3-Coder-Next", ..qwen3_next_80b() },
    ],
    ..QWEN3_5
};

const MIXTURES: &[LayerSpec] = &[
    LayerSpec {
        blocks: &[DELTA, EXPERTS],
    },
    LayerSpec {
        blocks: &[ATTENTION, EXPERTS],
    },
];

/// Qwen3.5 27B; other sizes are as it is where they say nothing else.
#[rustfmt::skip]
const fn qwen3_5_27b() -> Preset {
    Preset {
        name: "qwen3.5-27b", hub_id: "Qwen/Qwen3.5-27B", architecture: &QWEN3_5,
        hidden: 5120, intermediate: 17408, experts: None, delta: delta(48), streams: None, layers: 64, heads: 24,
        kv_heads: 4, head_dim: 256, vocab: 248_320, positions: 262_144, eps: 1e-6, theta: 1e7,
        scaling: RopeScaling::None, tied: false, eos: &[248_046],
    }
}

/// A recurrence with `value_heads` heads of values.
const fn delta(value_heads: usize) -> Option<Delta> {
    Some(Delta {
        key_heads: 16,
        value_heads,
        key_dim: 128,
        value_dim: 128,
        conv: 4,
        interval: 4,
        tiled: false,
        gate: OutputGate::Silu,
    })
}

/// Qwen3.5 35B-A3B, whose shared expert has the width of the others; other mixtures are as it is where they say nothing
/// else.
#[rustfmt::skip]
const fn qwen3_5_35b() -> Preset {
    Preset {
        name: "qwen3.5-35b-a3b", hub_id: "Qwen/Qwen3.5-35B-A3B", architecture: &QWEN3_5_MOE,
        hidden: 2048, intermediate: 512, experts: experts(256, 8, 512), delta: delta(32), layers: 40,
        heads: 16, kv_heads: 2,
        ..qwen3_5_27b()
    }
}

/// `count` experts of `width`, of which a token takes `per_token`, and a shared one as wide.
const fn experts(count: usize, per_token: usize, width: usize) -> Option<Experts> {
    Some(Experts {
        count,
        per_token,
        width,
        normalized: true,
        shared: width,
    })
}

/// Qwen3-Next 80B-A3B.
#[rustfmt::skip]
const fn qwen3_next_80b() -> Preset {
    Preset {
        name: "qwen3-next-80b-a3b", hub_id: "Qwen/Qwen3-Next-80B-A3B-Instruct", architecture: &QWEN3_NEXT,
        intermediate: 5120, experts: experts(512, 10, 512), layers: 48, vocab: 151_936, eos: &[151_645],
        ..qwen3_5_35b()
    }
}
