//! A model's MTP layer on the CPU ([`nq_formats::mtp`]).

use super::cache::LayerCache;
use super::layer::{Batch, Pass, Scratch, pack, pack_layer};
use super::model::CpuModel;
use super::stream_drafts::{DRAFT_KV, DraftHead};
use super::weights::CpuLayer;
use crate::error::Result;
use crate::forward::Mix;
use crate::interface::LoadOptions;
use crate::models::LayerWeights;
use crate::rope::Rotary;
use crate::sampler::best_token;
use crate::speculation::head::MTP_NOT_FINITE;
use crate::weights::Census;
use nq_formats::mtp::{EMBEDDING_NORM, FC, HIDDEN_NORM, LayerStore, NORM};
use nq_formats::{ModelConfig, Weight, WeightStore};
use nq_kernels::cpu::{Epilogue, Linear};
use std::sync::Arc;

/// Rows computed together.
const ROWS: usize = 256;

/// The layer, packed for this CPU.
pub(crate) struct MtpModel {
    /// The shape of a model of this layer alone.
    config: ModelConfig,
    rotary: Rotary,
    fc: Linear, // [hidden, 2 hidden]
    layer: CpuLayer,
    embedding_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    norm: Vec<f32>,
    /// `[vocab, hidden]`; `None`: the model's.
    head: Option<Linear>,
}

impl MtpModel {
    /// Packs the layer of the model of `store`, whose shape as a model of its own is `config`, and the head that it drafts
    /// with if that is not the model's.
    ///
    /// # Errors
    /// A missing or misshapen tensor.
    pub(crate) fn load(
        config: ModelConfig,
        store: &dyn WeightStore,
        head: Option<&Weight>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (cpu, h, mut census) = (super::open(options)?, config.hidden_size, Census::default());
        let gains = |name: &str| -> Result<Vec<f32>> { Ok(store.vector(name, h)?.to_f32()?) };
        let fc = store.matrix(FC, (h, 2 * h))?;
        let weights = LayerWeights::read(&LayerStore::new(store), &config, 0)?;
        let head = head.map(|w| pack(&cpu, options, ("draft head", 1), &[w], &mut census));
        Ok(MtpModel {
            head: head.transpose()?,
            rotary: Rotary::new(&config),
            fc: pack(&cpu, options, ("mtp fc", 1), &[&fc], &mut census)?,
            layer: pack_layer((&cpu, &config), options, 0, &weights, &mut census)?,
            embedding_norm: gains(EMBEDDING_NORM)?,
            hidden_norm: gains(HIDDEN_NORM)?,
            norm: gains(NORM)?,
            config,
        })
    }
}

/// The layer between the embedding and the head of its model.
pub(crate) struct MtpDrafter {
    own: Arc<MtpModel>,
    model: Arc<CpuModel>,
}

impl MtpDrafter {
    /// Drafts for `model`, whose layer it is.
    pub(crate) fn new(own: Arc<MtpModel>, model: Arc<CpuModel>) -> Self {
        MtpDrafter { own, model }
    }

    /// The layer's input `[rows, hidden]`, of tokens and the hidden states of those before them `[rows, hidden]`.
    fn input(&self, tokens: &[u32], hidden: &[f32]) -> Result<Vec<f32>> {
        let (own, model) = (&*self.own, &*self.model);
        let (h, eps, cpu) = (own.config.hidden_size, own.config.rms_norm_eps, &model.cpu);
        let mut embedded = vec![0.0; hidden.len()];
        model.embed(tokens.iter(), &mut embedded)?;
        let mut both = vec![0.0; 2 * hidden.len()];
        let rows = embedded.chunks_exact(h).zip(hidden.chunks_exact(h));
        for (to, (token, hidden)) in both.chunks_exact_mut(2 * h).zip(rows) {
            let (first, second) = to.split_at_mut(h);
            cpu.rms_norm(token, &own.embedding_norm, eps, first);
            cpu.rms_norm(hidden, &own.hidden_norm, eps, second);
        }
        let mut x = embedded;
        cpu.linear(&own.fc, &both, &mut x, Epilogue::Store)?;
        Ok(x)
    }

    /// Runs the layer over the rows `x` of one sequence, from `position` on. Returns the last row, normalized; of the
    /// others only keys and values are needed.
    fn run(
        &self,
        (cache, table): (&mut LayerCache, &[u32]),
        position: usize,
        x: &mut [f32],
    ) -> Result<Vec<f32>> {
        let (own, model) = (&*self.own, &*self.model);
        let (c, h) = (&own.config, own.config.hidden_size);
        let m = x.len() / h;
        let tables = [table.to_vec()];
        let mut scratch = Scratch::new(c, m);
        let (others, last) = x.split_at_mut((m - 1) * h);
        for (x, at) in [(others, position), (&mut *last, position + m - 1)] {
            let rows = x.len() / h;
            if rows == 0 {
                continue;
            }
            let is_last = at == position + m - 1;
            let mut batch = Batch::with_capacity(c, rows, 1);
            batch.push(&own.rotary, 0, at, rows);
            let mut pass = Pass {
                cpu: &model.cpu,
                config: c,
                batch: &batch,
                cache: &mut *cache,
                tables: &tables,
                scratch: &mut scratch,
                x,
                observer: &mut (),
                kept: None,
            };
            match &own.layer.blocks[0].mixer {
                Mix::Attention(attention) if !is_last => {
                    pass.fill(&own.layer.blocks[0].norm, attention)?;
                }
                _ => own.layer.run(&mut pass)?,
            }
        }
        let mut made = vec![0.0; h];
        model
            .cpu
            .rms_norm(last, &own.norm, c.rms_norm_eps, &mut made);
        match crate::checks::all_finite(&made) {
            true => Ok(made),
            false => Err(MTP_NOT_FINITE),
        }
    }
}

impl DraftHead for MtpDrafter {
    fn width(&self) -> usize {
        self.own.config.hidden_size
    }

    fn vocab(&self) -> usize {
        self.own.config.vocab_size
    }

    fn cache(&self, pages: usize) -> LayerCache {
        let c = &self.own.config;
        LayerCache::new(c, c.layer(0), DRAFT_KV, (0, pages))
    }

    fn feed(
        &self,
        (cache, table): (&mut LayerCache, &[u32]),
        position: usize,
        tokens: &[u32],
        streams: &[f32],
    ) -> Result<Vec<f32>> {
        let (model, h) = (&*self.model, self.own.config.hidden_size);
        let mut last = Vec::new();
        let rows = tokens.chunks(ROWS).zip(streams.chunks(ROWS * h));
        for (i, (tokens, streams)) in rows.enumerate() {
            // The layer reads what the head of the model does.
            let mut hidden = vec![0.0; streams.len()];
            let eps = model.config.rms_norm_eps;
            model.cpu.rms_norm(streams, &model.norm, eps, &mut hidden);
            let mut x = self.input(tokens, &hidden)?;
            last = self.run((&mut *cache, table), position + i * ROWS, &mut x)?;
        }
        Ok(last)
    }

    fn feed_draft(
        &self,
        cache: (&mut LayerCache, &[u32]),
        position: usize,
        token: u32,
        made: Vec<f32>,
    ) -> Result<Vec<f32>> {
        let mut x = self.input(&[token], &made)?;
        self.run(cache, position, &mut x)
    }

    fn draft(&self, made: &[f32]) -> Result<u32> {
        let model = &*self.model;
        let mut logits = vec![0.0; model.config.vocab_size];
        let head = self.own.head.as_ref().unwrap_or(&model.head);
        model.cpu.linear(head, made, &mut logits, Epilogue::Store)?;
        best_token(&logits)
    }
}
