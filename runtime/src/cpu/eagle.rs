//! An EAGLE-3 head on the CPU.

use super::cache::LayerCache;
use super::layer::pack;
use super::model::embed;
use super::stream_drafts::{DRAFT_KV, DraftHead};
use crate::error::Result;
use crate::interface::{DraftLayer, LoadOptions};
use crate::models;
use crate::rope::Rotary;
use crate::sampler::best_token;
use crate::speculation::head::{EAGLE_NOT_FINITE, HeadWeights, rotary};
use crate::weights::Census;
use nq_formats::eagle::{EagleConfig, EagleHead, TAPS};
use nq_formats::{ModelConfig, Weight, WeightStore};
use nq_kernels::cpu::{Cpu, Epilogue, KvPages, KvSequence, Linear, Span};
use nq_kernels::pages::PAGE;

/// Rows computed together.
const ROWS: usize = 256;

/// A head packed for this CPU.
pub(crate) struct EagleModel {
    pub(crate) config: EagleConfig,
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
    pub(crate) fn load(
        head: &EagleHead,
        (model, target): (&ModelConfig, &dyn WeightStore),
        options: &LoadOptions,
    ) -> Result<Self> {
        let cpu = super::open(options)?;
        let mut census = Census::default();
        let linear = |product: &'static str, parts: &[&Weight]| {
            pack(&cpu, options, (product, 1), parts, &mut census)
        };
        Ok(EagleModel {
            weights: HeadWeights::read(head, linear, Ok)?,
            embedding: match head.has_embedding {
                true => models::embedding(head.store.as_ref(), model)?,
                false => models::embedding(target, model)?,
            },
            rotary: rotary(head, model),
            config: head.config.clone(),
            tokens: head.tokens.clone(),
            cpu,
        })
    }

    /// The layer over rows of one sequence, whose input streams are `x` `[rows, hidden]`: the stream after the
    /// last row. Of the others only keys and values are needed.
    fn layer(
        &self,
        (cache, table): (&mut KvPages, &[u32]),
        position: usize,
        tokens: &[u32],
        mut x: Vec<f32>,
    ) -> Result<Vec<f32>> {
        let (cpu, c, w, m) = (&self.cpu, &self.config, &self.weights, tokens.len());
        let (h, d, eps) = (c.hidden_size, c.head_dim, c.rms_norm_eps);
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        let (q_dim, kv_dim) = (heads * d, kv_heads * d);
        let stride = q_dim + 2 * kv_dim;

        let (mut rows, mut normed) = (vec![0.0; m * h], vec![0.0; m * h]);
        let mut qkv = vec![0.0; m * stride];
        embed(&self.embedding, tokens.iter(), &mut rows)?;
        cpu.rms_norm(&rows, &w.embedding_norm, eps, &mut normed);
        cpu.linear(&w.qkv_of_embedding, &normed, &mut qkv, Epilogue::Store)?;
        cpu.rms_norm(&x, &w.stream_norm, eps, &mut normed);
        cpu.linear(&w.qkv_of_stream, &normed, &mut qkv, Epilogue::Add)?;
        let residual = if c.norm_before_residual { normed } else { x };
        x = residual[(m - 1) * h..].to_vec();

        let mut angles = vec![(0.0, 0.0); m * d / 2];
        for (r, angles) in angles.chunks_exact_mut((d / 2).max(1)).enumerate() {
            self.rotary.row(position + r, angles);
        }
        let rows: Vec<usize> = (0..m).collect();
        let all = (0, heads + kv_heads, d);
        cpu.turn_heads(&mut qkv, stride, all, (None, eps), (&angles, d / 2), &rows);
        for (r, row) in qkv.chunks_exact(stride).enumerate() {
            let (rotated, values) = row.split_at(q_dim + kv_dim);
            let at = position + r;
            cache.store(table[at / PAGE], at % PAGE, &rotated[q_dim..], values);
        }
        let last = &qkv[(m - 1) * stride..];
        let mut attended = vec![0.0; q_dim];
        let span = Span {
            row: 0,
            len: 1,
            position: position + m - 1,
        };
        let cache = &*cache;
        let sequence = |_: usize| KvSequence::new(cache, table);
        cpu.attention_batch(last, stride, &[span], heads, d, sequence, &mut attended);
        cpu.linear(&w.o, &attended, &mut x, Epilogue::Add)?;

        let mut normed = vec![0.0; h];
        cpu.rms_norm(&x, &w.mlp_norm, eps, &mut normed);
        let mut gated = vec![0.0; c.intermediate_size];
        cpu.linear(&w.gate_up, &normed, &mut gated, Epilogue::SiluMul)?;
        cpu.linear(&w.down, &gated, &mut x, Epilogue::Add)?;
        match crate::checks::all_finite(&x) {
            true => Ok(x),
            false => Err(EAGLE_NOT_FINITE),
        }
    }
}

impl DraftHead for EagleModel {
    fn width(&self) -> usize {
        DraftLayer::eagle3(&self.config).streams()
    }

    fn vocab(&self) -> usize {
        self.config.vocab_size
    }

    fn cache(&self, pages: usize) -> LayerCache {
        let c = &self.config;
        let pages = KvPages::new(DRAFT_KV, pages, c.num_key_value_heads, c.head_dim);
        LayerCache::Pages(pages)
    }

    fn feed(
        &self,
        (cache, table): (&mut LayerCache, &[u32]),
        position: usize,
        tokens: &[u32],
        streams: &[f32],
    ) -> Result<Vec<f32>> {
        let h = self.config.hidden_size;
        let mut last = Vec::new();
        let rows = tokens.chunks(ROWS).zip(streams.chunks(ROWS * TAPS * h));
        for (i, (tokens, streams)) in rows.enumerate() {
            let mut x = vec![0.0; tokens.len() * h];
            self.cpu
                .linear(&self.weights.fc, streams, &mut x, Epilogue::Store)?;
            let cache = (cache.pages_mut(), table);
            last = self.layer(cache, position + i * ROWS, tokens, x)?;
        }
        Ok(last)
    }

    fn feed_draft(
        &self,
        (cache, table): (&mut LayerCache, &[u32]),
        position: usize,
        token: u32,
        made: Vec<f32>,
    ) -> Result<Vec<f32>> {
        self.layer((cache.pages_mut(), table), position, &[token], made)
    }

    fn draft(&self, made: &[f32]) -> Result<u32> {
        let (c, w) = (&self.config, &self.weights);
        let mut normed = vec![0.0; made.len()];
        (self.cpu).rms_norm(made, &w.norm, c.rms_norm_eps, &mut normed);
        let mut logits = vec![0.0; c.draft_vocab_size];
        (self.cpu).linear(&w.head, &normed, &mut logits, Epilogue::Store)?;
        Ok(self.tokens[best_token(&logits)? as usize])
    }
}
