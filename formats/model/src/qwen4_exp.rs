//! Qwen3.8-Flash-Next (transformers' `qwen4_exp`): a hybrid whose residual has several streams, with sparse attention,
//! experts in all layers and, in some, a table of n-grams.

use super::architecture::{Architecture, Preset, StreamsPreset, hybrid};
use super::dimensions::{Delta, Experts, HyperShape, IndexerShape, OutputGate, RopeScaling};
use super::kind::{LinearKind, NormKind, VectorKind, Width};
use super::layer::{
    AttentionSpec, BlockSpec, DeltaSpec, ExpertsSpec, HeadNorms, HyperSpec, IndexerSpec,
    InputSource, LayerSpec, LinearSpec, Mixer, MlpSpec, NgramsSpec, NormSpec, Product, SharedSpec,
    VectorRow, linear, norm,
};
use super::qwen3_5::QWEN3_5_MOE;
use super::shape::ModelConfig;

/// A product whose input no scale can be moved into: blocks read weighed sums of streams.
const fn product(name: &'static str, linears: &'static [LinearSpec]) -> Product {
    Product {
        name,
        linears,
        source: InputSource::Fixed,
    }
}

#[rustfmt::skip]
const MIXER_NORM: NormSpec =
    norm(NormKind::Attention, "attn_hyper_connection.hc_norm", "hc_attn_norm", Width::Stream).held_less_one();

#[rustfmt::skip]
const MIXER_HYPER: HyperSpec = HyperSpec {
    down: product("mix_down", &[
        linear(LinearKind::AttentionMixDown, "attn_hyper_connection.input_mix_weight_down", "hc_attn_down", Width::MixRank, Width::Stream),
    ]),
    up: product("mix_up", &[
        linear(LinearKind::AttentionMixUp, "attn_hyper_connection.input_mix_weight_up", "hc_attn_up", Width::Stream, Width::MixRank),
    ]),
    inject: product("inject", &[
        linear(LinearKind::AttentionInject, "attn_hyper_connection.block_inject_weight", "hc_attn_inject", Width::Streams, Width::Stream),
    ]),
};

#[rustfmt::skip]
const MLP_NORM: NormSpec =
    norm(NormKind::Mlp, "mlp_hyper_connection.hc_norm", "hc_ffn_norm", Width::Stream).held_less_one();

#[rustfmt::skip]
const MLP_HYPER: HyperSpec = HyperSpec {
    down: product("mix_down", &[
        linear(LinearKind::MlpMixDown, "mlp_hyper_connection.input_mix_weight_down", "hc_ffn_down", Width::MixRank, Width::Stream),
    ]),
    up: product("mix_up", &[
        linear(LinearKind::MlpMixUp, "mlp_hyper_connection.input_mix_weight_up", "hc_ffn_up", Width::Stream, Width::MixRank),
    ]),
    inject: product("inject", &[
        linear(LinearKind::MlpInject, "mlp_hyper_connection.block_inject_weight", "hc_ffn_inject", Width::Streams, Width::Stream),
    ]),
};

#[rustfmt::skip]
const NGRAMS: BlockSpec = BlockSpec {
    norm: norm(NormKind::NgramQuery, "ple.norm_query", "ple_norm_query", Width::Stream).held_less_one(),
    hyper: None,
    mixer: Mixer::Ngrams(NgramsSpec {
        key: product("ngram_key", &[
            linear(LinearKind::NgramKey, "ple.key_proj", "ple_key", Width::Stream, Width::Ngrams),
        ]),
        value: product("ngram_value", &[
            linear(LinearKind::NgramValue, "ple.value_proj", "ple_value", Width::Hidden, Width::Ngrams),
        ]),
        key_norm: norm(NormKind::NgramKey, "ple.norm_key", "ple_norm_key", Width::Stream).held_less_one(),
        conv_norm: norm(NormKind::NgramConv, "ple.norm_conv", "ple_norm_conv", Width::Stream).held_less_one(),
        conv: VectorRow { kind: VectorKind::NgramConv, suffix: "ple.conv1d", gguf: "ple_conv1d", len: Width::NgramTaps },
    }),
};

#[rustfmt::skip]
const DELTA: BlockSpec = BlockSpec {
    norm: MIXER_NORM,
    hyper: Some(MIXER_HYPER),
    mixer: Mixer::Delta(DeltaSpec {
        inputs: product("qkvz", &[
            linear(LinearKind::DeltaQkv, "linear_attn.in_proj_qkv", "attn_qkv", Width::DeltaChannels, Width::Hidden),
            linear(LinearKind::DeltaZ, "linear_attn.in_proj_z", "attn_gate", Width::DeltaValues, Width::Hidden),
        ]),
        rates: product("ba", &[
            linear(LinearKind::DeltaB, "linear_attn.in_proj_b", "ssm_beta", Width::DeltaHeads, Width::Hidden),
            linear(LinearKind::DeltaA, "linear_attn.in_proj_a", "ssm_alpha", Width::DeltaHeads, Width::Hidden),
        ]),
        ..super::qwen3_5::RECURRENCE
    }),
};

#[rustfmt::skip]
const ATTENTION: BlockSpec = BlockSpec {
    norm: MIXER_NORM,
    hyper: Some(MIXER_HYPER),
    mixer: Mixer::Attention(AttentionSpec {
        qkv: product("qkv", super::qwen3_5::GATED_QKV),
        head_norms: Some(HeadNorms {
            q: norm(NormKind::Q, "self_attn.q_norm", "attn_q_norm", Width::Head).held_less_one(),
            k: norm(NormKind::K, "self_attn.k_norm", "attn_k_norm", Width::Head).held_less_one(),
        }),
        gated: true,
        indexer: Some(IndexerSpec {
            qk: product("index_qk", &[
                linear(LinearKind::IndexQk, "self_attn.indexer.index_qk_proj", "indexer.qk_proj", Width::IndexHeads, Width::Hidden),
            ]),
            q_norm: norm(NormKind::IndexQ, "self_attn.indexer.q_layernorm", "indexer.q_norm", Width::IndexHead).held_less_one(),
            k_norm: norm(NormKind::IndexK, "self_attn.indexer.k_layernorm", "indexer.k_norm", Width::IndexHead).held_less_one(),
        }),
        o: super::llama::O,
    }),
};

#[rustfmt::skip]
const EXPERTS: BlockSpec = BlockSpec {
    norm: MLP_NORM,
    hyper: Some(MLP_HYPER),
    mixer: Mixer::Experts(ExpertsSpec {
        router: product("router", super::qwen3::ROUTER.linears),
        gate_up: product("gate_up", super::qwen3::GATE_UP.linears),
        down: super::qwen3::DOWN,
        shared: Some(SharedSpec {
            score: product("shared_score", super::qwen3_5::SHARED.score.linears),
            mlp: MlpSpec {
                gate_up: product("shared_gate_up", super::qwen3_5::SHARED.mlp.gate_up.linears),
                down: super::qwen3_5::SHARED.mlp.down,
            },
        }),
    }),
};

#[rustfmt::skip]
pub(super) static QWEN4_EXP: Architecture = Architecture {
    family: "Qwen3.8-Flash-Next",
    title: "Qwen3.8-Flash-Next",
    class: "Qwen4ExpForCausalLM",
    model_type: "qwen4_exp_text",
    also: &[("Qwen4ExpForConditionalGeneration", "qwen4_exp")],
    gguf: "qwen4exp",
    kinds: &[
        LayerSpec {
            blocks: &[DELTA, EXPERTS],
        },
        LayerSpec {
            blocks: &[ATTENTION, EXPERTS],
        },
        LayerSpec {
            blocks: &[NGRAMS, DELTA, EXPERTS],
        },
    ],
    kind_of,
    sigmoid_gates: true,
    presets: &[Preset {
        name: "qwen3.8-flash-next", hub_id: "Qwen/Qwen3.8-Flash-Next", architecture: &QWEN4_EXP,
        hidden: 2560, intermediate: 640,
        experts: Some(Experts { count: 512, per_token: 10, width: 640, normalized: true, shared: 640 }),
        delta: Some(Delta {
            key_heads: 16, value_heads: 48, key_dim: 128, value_dim: 128, conv: 4, interval: 4, tiled: false,
            gate: OutputGate::Sigmoid,
        }),
        streams: Some(StreamsPreset {
            hyper: HyperShape { streams: 4, rank: 320 },
            indexer: IndexerShape { heads: 4, head_dim: 128, budget: 2048, block: 4 },
            table: 1,
            end: 248_044,
        }),
        layers: 48, heads: 24, kv_heads: 2, head_dim: 256, vocab: 248_320, positions: 262_144, eps: 1e-6, theta: 1e7,
        scaling: RopeScaling::None, tied: false, eos: &[248_044],
    }],
    ..QWEN3_5_MOE
};

/// The kind of layer `index`: those with a table of n-grams have a recurrence, too.
fn kind_of(c: &ModelConfig, index: usize) -> usize {
    let table = c.ngrams.as_ref().and_then(|n| n.place(index));
    if table.is_some() { 2 } else { hybrid(c, index) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As published: 125 billion parameters with 6 of them active, and 51 billion more in a table of n-grams.
    #[test]
    fn the_published_shape_has_its_parameters() {
        let c = QWEN4_EXP.presets[0].config();
        let table: usize = c
            .ngrams
            .iter()
            .flat_map(|n| n.parameters())
            .map(|(_, s)| s.elements())
            .sum();
        assert_eq!(table, 320_001_536 * 160);
        let body = c.trunk_parameters() - table;
        assert!((125.0..126.5).contains(&(body as f64 / 1e9)), "{body}");
        // Of the embedding a token reads one row.
        let active = c.active_parameters() - c.vocab_size * c.hidden_size;
        assert!((6.6..6.7).contains(&(active as f64 / 1e9)), "{active}");
        let tables = (0..48).filter(|&l| c.layer(l).ngrams().is_some());
        assert_eq!(tables.collect::<Vec<_>>(), [1]);
    }
}
