//! Kinds of the parameters of layers, and the dimensions that they have.

use std::fmt;

/// Kind of a Linear, in running order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearKind {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Attention output.
    O,
    /// Queries, keys and values of a recurrence.
    DeltaQkv,
    /// Gates of a recurrence's output.
    DeltaZ,
    /// How much of a value a recurrence writes.
    DeltaB,
    /// How much of its state a recurrence forgets.
    DeltaA,
    /// A recurrence's output.
    DeltaOut,
    /// Scores of experts.
    Router,
    /// MLP gate.
    Gate,
    /// MLP up.
    Up,
    /// MLP down.
    Down,
    /// Score of the shared expert.
    SharedScore,
    /// Its gate.
    SharedGate,
    /// Its up.
    SharedUp,
    /// Its down.
    SharedDown,
    /// What attention's hyper-connections weigh the streams by: the first matrix.
    AttentionMixDown,
    /// The second.
    AttentionMixUp,
    /// What each stream gets of attention.
    AttentionInject,
    /// As [`LinearKind::AttentionMixDown`], of the MLP's hyper-connections.
    MlpMixDown,
    /// The second.
    MlpMixUp,
    /// What each stream gets of the MLP.
    MlpInject,
    /// Queries and key of an indexer.
    IndexQk,
    /// Keys of n-grams.
    NgramKey,
    /// Values of n-grams.
    NgramValue,
}

/// Kind of a norm, by its input. Those of the residual stream come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NormKind {
    /// The residual stream before attention.
    Attention,
    /// The residual stream before the MLP.
    Mlp,
    /// A head of the queries.
    Q,
    /// A head of the keys.
    K,
    /// A head of a recurrence's output.
    Delta,
    /// A head of an indexer's queries.
    IndexQ,
    /// An indexer's key of a block.
    IndexK,
    /// The residual stream before n-grams.
    NgramQuery,
    /// Keys of n-grams.
    NgramKey,
    /// What the convolution over n-grams reads.
    NgramConv,
}

/// A dimension given by a model's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// `hidden_size`
    Hidden,
    /// All query heads.
    Heads,
    /// All key heads, or all value heads.
    KvHeads,
    /// One head.
    Head,
    /// `intermediate_size`
    Mlp,
    /// `moe_intermediate_size`
    Expert,
    /// `num_experts`
    Experts,
    /// All query heads, and as many gates.
    GatedHeads,
    /// Queries, keys and values of a recurrence.
    DeltaChannels,
    /// All value heads of a recurrence.
    DeltaValues,
    /// `linear_num_value_heads`
    DeltaHeads,
    /// `linear_value_head_dim`
    DeltaHead,
    /// Weights of a recurrence's convolution.
    DeltaTaps,
    /// `shared_expert_intermediate_size`
    SharedExpert,
    /// All streams of the residual.
    Stream,
    /// Number of streams.
    Streams,
    /// `hc_lowrank`
    MixRank,
    /// All query heads of an indexer, and its key.
    IndexHeads,
    /// `indexer_head_dim`
    IndexHead,
    /// `ple_embed_dim`
    Ngrams,
    /// Weights of the convolution over n-grams.
    NgramTaps,
    /// 1
    One,
}

/// What a [`VectorRow`](crate::VectorRow) holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum VectorKind {
    /// The weights of a convolution, one after another for each channel.
    Conv,
    /// Logarithms of rates of decay. GGUF files hold the rates, negated.
    Decay,
    /// Biases of time steps.
    TimeStep,
    /// The weights of the convolution over what a table of n-grams gave, one after another for each channel.
    NgramConv,
}

impl fmt::Display for LinearKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinearKind::Q => "q",
            LinearKind::K => "k",
            LinearKind::V => "v",
            LinearKind::O => "o",
            LinearKind::DeltaQkv => "delta_qkv",
            LinearKind::DeltaZ => "delta_z",
            LinearKind::DeltaB => "delta_b",
            LinearKind::DeltaA => "delta_a",
            LinearKind::DeltaOut => "delta_out",
            LinearKind::Router => "router",
            LinearKind::Gate => "gate",
            LinearKind::Up => "up",
            LinearKind::Down => "down",
            LinearKind::SharedScore => "shared_score",
            LinearKind::SharedGate => "shared_gate",
            LinearKind::SharedUp => "shared_up",
            LinearKind::SharedDown => "shared_down",
            LinearKind::AttentionMixDown => "attention_mix_down",
            LinearKind::AttentionMixUp => "attention_mix_up",
            LinearKind::AttentionInject => "attention_inject",
            LinearKind::MlpMixDown => "mlp_mix_down",
            LinearKind::MlpMixUp => "mlp_mix_up",
            LinearKind::MlpInject => "mlp_inject",
            LinearKind::IndexQk => "index_qk",
            LinearKind::NgramKey => "ngram_key",
            LinearKind::NgramValue => "ngram_value",
        })
    }
}
