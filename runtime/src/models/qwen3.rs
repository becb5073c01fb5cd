//! Qwen3 dense models (arXiv 2505.09388): names of their parameters and how to read them.

use crate::engine::{LayerWeights, LinearId, LinearKind};
use crate::error::Result;
use nq_formats::{ModelConfig, Tensor, Weight, WeightStore};

/// Name of the embedding; also of the head, when tied.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Name of the final RMSNorm.
pub const FINAL_NORM: &str = "model.norm";
/// Name of the head, when not tied.
pub const HEAD: &str = "lm_head";

impl LayerWeights {
    /// Reads layer `index` of a checkpoint.
    ///
    /// # Errors
    /// A missing tensor, or one of another shape than the config says.
    pub fn read(store: &dyn WeightStore, config: &ModelConfig, index: usize) -> Result<Self> {
        let linear = |kind: LinearKind| -> Result<Weight> {
            let id = LinearId { layer: index, kind };
            Ok(store.matrix(&id.to_string(), kind.dims(config))?)
        };
        let norm = |name: &str, len| -> Result<Tensor> {
            Ok(store.vector(&format!("model.layers.{index}.{name}"), len)?)
        };
        let [q, k, v, o, gate, up, down] = LinearKind::ALL.map(linear);
        Ok(LayerWeights {
            linears: [q?, k?, v?, o?, gate?, up?, down?],
            input_norm: norm("input_layernorm", config.hidden_size)?,
            post_attention_norm: norm("post_attention_layernorm", config.hidden_size)?,
            q_norm: norm("self_attn.q_norm", config.head_dim)?,
            k_norm: norm("self_attn.k_norm", config.head_dim)?,
        })
    }

    /// The weight of one Linear.
    pub fn linear(&self, kind: LinearKind) -> &Weight {
        &self.linears[kind as usize]
    }
}

/// Reads the embedding `[vocab, hidden]`.
///
/// # Errors
/// As [`LayerWeights::read`].
pub fn embedding(store: &dyn WeightStore, config: &ModelConfig) -> Result<Weight> {
    Ok(store.matrix(EMBEDDING, (config.vocab_size, config.hidden_size))?)
}

/// Reads the head `[vocab, hidden]`: the embedding, when tied.
///
/// # Errors
/// As [`LayerWeights::read`].
pub fn head(store: &dyn WeightStore, config: &ModelConfig) -> Result<Weight> {
    if config.tie_word_embeddings {
        return embedding(store, config);
    }
    Ok(store.matrix(HEAD, (config.vocab_size, config.hidden_size))?)
}
