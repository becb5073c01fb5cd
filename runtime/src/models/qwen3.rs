//! Qwen3 dense models (arXiv 2505.09388): names of their parameters and how to read them.

use crate::error::Result;
use nq_formats::{ModelConfig, Weight, WeightStore};

/// Name of the embedding; also of the head, when tied.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Name of the final RMSNorm.
pub const FINAL_NORM: &str = "model.norm";
/// Name of the head, when not tied.
pub const HEAD: &str = "lm_head";

/// Reads the embedding `[vocab, hidden]`.
///
/// # Errors
/// As [`LayerWeights::read`](super::LayerWeights::read).
pub fn embedding(store: &dyn WeightStore, config: &ModelConfig) -> Result<Weight> {
    Ok(store.matrix(EMBEDDING, (config.vocab_size, config.hidden_size))?)
}

/// Reads the head `[vocab, hidden]`: the embedding, when tied.
///
/// # Errors
/// As [`LayerWeights::read`](super::LayerWeights::read).
pub fn head(store: &dyn WeightStore, config: &ModelConfig) -> Result<Weight> {
    if config.tie_word_embeddings {
        return embedding(store, config);
    }
    Ok(store.matrix(HEAD, (config.vocab_size, config.hidden_size))?)
}
