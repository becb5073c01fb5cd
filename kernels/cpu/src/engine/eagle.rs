//! An EAGLE-3 head on the CPU.

use super::layer::pack;
use super::model::embed;
use super::stream_drafts::{DraftHead, Input};
use super::weights::CpuLayer;
use crate::{Cpu, Epilogue, Linear};
use nq_formats::eagle::{EagleHead, TAPS};
use nq_formats::{Weight, WeightStore};
use nq_model::ModelConfig;
use nq_runtime::interface::{DraftLayer, LoadOptions};
use nq_runtime::rope::Rotary;
use nq_runtime::sampler::best_token;
use nq_runtime::speculation::head::{EAGLE_NOT_FINITE, HeadWeights};
use nq_runtime::weights::Census;
use nq_runtime::{Result, models};

/// A head packed for this CPU.
pub struct EagleModel {
    sizes: DraftLayer,
    /// The shape of a model of its layer alone.
    config: ModelConfig,
    norm_before_residual: bool,
    cpu: Cpu,
    rotary: Rotary,
    embedding: Weight, // [vocab, hidden]
    weights: HeadWeights<Linear, Vec<f32>>,
    /// The model's token for each of the head's.
    tokens: Vec<u32>,
}

impl EagleModel {
    /// Packs `head` for the model `target`.
    ///
    /// # Errors
    /// A missing or misshapen tensor.
    pub fn load(
        head: &EagleHead,
        model: &ModelConfig,
        target: &dyn WeightStore,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (cpu, config) = (super::open::open(options)?, head.config.layer(model));
        let mut census = Census::default();
        let linear = |product: &'static str, parts: &[&Weight]| {
            pack(&cpu, options, product, 1, parts, &mut census)
        };
        Ok(EagleModel {
            weights: HeadWeights::read(head, &config, linear, Ok)?,
            embedding: match head.has_embedding {
                true => models::embedding(head.store.as_ref(), model)?,
                false => models::embedding(target, model)?,
            },
            sizes: DraftLayer::eagle3(&head.config),
            rotary: Rotary::new(&config),
            norm_before_residual: head.config.norm_before_residual,
            tokens: head.tokens.clone(),
            config,
            cpu,
        })
    }

    /// The input of rows of `tokens` behind the streams `x` `[rows, hidden]`. Attention reads the embedding of a row's
    /// token beside its stream.
    fn rows(&self, tokens: &[u32], x: Vec<f32>) -> Result<Input> {
        let (cpu, c, w) = (&self.cpu, &self.config, &self.weights);
        let (norm, attention) = w.layer.attention();
        let (mut rows, mut normed) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let mut qkv = vec![0.0; tokens.len() * w.qkv_of_embedding.out_features()];
        embed(&self.embedding, tokens.iter(), &mut rows)?;
        cpu.rms_norm(&rows, &w.embedding_norm, c.rms_norm_eps, &mut normed);
        cpu.linear(&w.qkv_of_embedding, &normed, &mut qkv, Epilogue::Store)?;
        cpu.rms_norm(&x, norm, c.rms_norm_eps, &mut normed);
        cpu.linear(&attention.qkv.linear, &normed, &mut qkv, Epilogue::Add)?;
        Ok(Input {
            x: if self.norm_before_residual { normed } else { x },
            qkv: Some(qkv),
        })
    }
}

impl DraftHead for EagleModel {
    fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn rotary(&self) -> &Rotary {
        &self.rotary
    }

    fn layer(&self) -> &CpuLayer {
        &self.weights.layer
    }

    fn width(&self) -> usize {
        self.sizes.streams()
    }

    fn input(&self, tokens: &[u32], streams: &[f32]) -> Result<Input> {
        let mut x = vec![0.0; streams.len() / TAPS];
        (self.cpu).linear(&self.weights.fc, streams, &mut x, Epilogue::Store)?;
        self.rows(tokens, x)
    }

    fn drafted_input(&self, token: u32, made: Vec<f32>) -> Result<Input> {
        self.rows(&[token], made)
    }

    fn made(&self, x: &[f32]) -> Result<Vec<f32>> {
        match nq_runtime::checks::all_finite(x) {
            true => Ok(x.to_vec()),
            false => Err(EAGLE_NOT_FINITE),
        }
    }

    fn draft(&self, made: &[f32]) -> Result<u32> {
        let w = &self.weights;
        let mut normed = vec![0.0; made.len()];
        (self.cpu).rms_norm(made, &w.norm, self.config.rms_norm_eps, &mut normed);
        let mut logits = vec![0.0; self.tokens.len()];
        (self.cpu).linear(&w.head, &normed, &mut logits, Epilogue::Store)?;
        Ok(self.tokens[best_token(&logits)? as usize])
    }
}
