//! Shapes of small models of every family.

use nq_model::{
    Delta, Experts, HyperShape, IndexerShape, ModelConfig, NgramTable, OutputGate, Preset, Rope,
    RopeScaling, find,
};

/// A model of two layers, of the family that GGUF files call by this name: with experts and recurrences if the family has
/// them, in sizes that no kernel can take for each other.
///
/// # Panics
/// If there is no such family.
pub fn tiny(gguf: &str) -> ModelConfig {
    let architecture = find(|a| a.gguf, gguf).unwrap_or_else(|| panic!("no family is {gguf}"));
    let has_delta = architecture.has_delta();
    let shared = if has_delta { 24 } else { 0 };
    ModelConfig {
        architecture,
        hidden_size: 32,
        intermediate_size: 48,
        experts: architecture.router().map(|_| experts(3, 24, shared)),
        delta: has_delta.then(|| delta(6, 8, 2)),
        hyper: architecture.has_streams().then_some(HyperShape {
            streams: 3,
            rank: 12,
        }),
        indexer: architecture.has_streams().then_some(IndexerShape {
            heads: 2,
            head_dim: 8,
            budget: 8,
            block: 4,
        }),
        ngrams: architecture.has_streams().then(|| ngrams(vec![0], 299)),
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-6,
        rope: rope(1e4, has_delta.then_some(4)),
        tie_word_embeddings: false,
        mtp_layers: 0,
        eos_token_ids: vec![299],
        dtype: None,
    }
}

/// A model of two layers of the family of a hybrid's preset, with gated heads of 16 numbers.
///
/// # Panics
/// If there is no such preset.
pub fn hybrid_of(preset: &str) -> ModelConfig {
    let whole = Preset::find(preset).unwrap_or_else(|| panic!("no preset is {preset}"));
    let whole = whole.config();
    ModelConfig {
        hidden_size: 32,
        intermediate_size: 64,
        experts: whole.experts.map(|_| experts(3, 32, 32)),
        delta: Some(delta(4, 8, 2)),
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        max_position_embeddings: 4096,
        rope: rope(1e7, Some(4)),
        eos_token_ids: vec![299],
        ..whole
    }
}

/// Recurrences of two key heads and convolutions of four taps in all but one of `interval` layers, with keys and values of
/// `dim` numbers.
pub fn delta(value_heads: usize, dim: usize, interval: usize) -> Delta {
    Delta {
        key_heads: 2,
        value_heads,
        key_dim: dim,
        value_dim: dim,
        conv: 4,
        interval,
        tiled: false,
        gate: OutputGate::Silu,
    }
}

/// A small table of bigrams and trigrams in each of `layers`, of texts that end with `end`.
pub fn ngrams(layers: Vec<usize>, end: u32) -> NgramTable {
    NgramTable {
        layers,
        width: 24,
        taps: 4,
        longest: 3,
        heads_per_length: 2,
        least_rows: 50,
        multiple: 8,
        parts: 4,
        seed: 1234,
        end,
    }
}

/// Experts of which two compute a token, with weights whose sum is 1.
pub fn experts(count: usize, width: usize, shared: usize) -> Experts {
    Experts {
        count,
        per_token: 2,
        width,
        normalized: true,
        shared,
    }
}

/// Rotations of the first `dims` numbers of a head, or of all, by angles as they were trained.
pub fn rope(theta: f64, dims: Option<usize>) -> Rope {
    Rope {
        theta,
        dims,
        scaling: RopeScaling::None,
        sections: None,
    }
}
