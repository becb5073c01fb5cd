//! A model on the CPU.

use super::weights::CpuLayer;
use crate::{Cpu, Linear};
use nq_formats::Weight;
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::rope::Rotary;

/// A model packed for this CPU.
pub(crate) struct CpuModel {
    pub(super) config: ModelConfig,
    pub(super) cpu: Cpu,
    pub(super) rotary: Rotary,
    /// `[vocab, hidden]`, canonical: only rows that are looked up are read. `None` if the
    /// head, whose rows can be read back, is the same matrix.
    pub(super) embedding: Option<Weight>,
    pub(super) layers: Vec<CpuLayer>,
    pub(super) norm: Vec<f32>, // [hidden]
    pub(super) head: Linear,   // [vocab, hidden]
}

impl CpuModel {
    /// Looks up `tokens`, all within the vocabulary: `x` `[tokens, hidden]`.
    pub(super) fn embed<'a>(
        &self,
        tokens: impl Iterator<Item = &'a u32>,
        x: &mut [f32],
    ) -> Result<()> {
        if let Some(embedding) = &self.embedding {
            return embed(embedding, tokens, x);
        }
        for (&token, x) in tokens.zip(x.chunks_exact_mut(self.config.hidden_size)) {
            self.head.dequantize_row(token as usize, x)?;
        }
        Ok(())
    }
}

/// Looks up `tokens`, all within the vocabulary, in `embedding` `[vocab, hidden]`:
/// `x` `[tokens, hidden]`.
pub(super) fn embed<'a>(
    embedding: &Weight,
    tokens: impl Iterator<Item = &'a u32>,
    x: &mut [f32],
) -> Result<()> {
    let h = embedding.dims().cols;
    for (&token, x) in tokens.zip(x.chunks_exact_mut(h)) {
        embedding.dequantize_row(token as usize, x)?;
    }
    Ok(())
}
