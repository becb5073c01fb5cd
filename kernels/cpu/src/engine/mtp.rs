//! A model's MTP layer on the CPU ([`nq_model::mtp`]).

use super::layer::{pack, pack_layer};
use super::model::CpuModel;
use super::stream_drafts::{DraftHead, Input};
use super::weights::CpuLayer;
use crate::{Cpu, Epilogue, Linear};
use nq_formats::mtp::LayerStore;
use nq_formats::{Weight, WeightStore};
use nq_model::mtp::{EMBEDDING_NORM, FC, HIDDEN_NORM, NORM};
use nq_model::{Dims, ModelConfig};
use nq_runtime::Result;
use nq_runtime::interface::LoadOptions;
use nq_runtime::models::LayerWeights;
use nq_runtime::rope::Rotary;
use nq_runtime::sampler::best_token;
use nq_runtime::speculation::head::MTP_NOT_FINITE;
use nq_runtime::weights::Census;
use std::sync::Arc;

/// The layer, packed for this CPU.
pub struct MtpModel {
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
    pub fn load(
        config: ModelConfig,
        store: &dyn WeightStore,
        head: Option<&Weight>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (cpu, h, mut census) = (
            super::open::open(options)?,
            config.hidden_size,
            Census::default(),
        );
        let gains = |name: &str| -> Result<Vec<f32>> { Ok(store.vector(name, h)?.to_f32()?) };
        let fc = store.matrix(FC, Dims::new(h, 2 * h))?;
        let weights = LayerWeights::read(&LayerStore::new(store), &config, 0)?;
        let head = head.map(|w| pack(&cpu, options, "draft head", 1, &[w], &mut census));
        Ok(MtpModel {
            head: head.transpose()?,
            rotary: Rotary::new(&config),
            fc: pack(&cpu, options, "mtp fc", 1, &[&fc], &mut census)?,
            layer: pack_layer(&cpu, &config, options, 0, &weights, &mut census)?,
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
    fn rows(&self, tokens: &[u32], hidden: &[f32]) -> Result<Input> {
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
        Ok(Input { x, qkv: None })
    }
}

impl DraftHead for MtpDrafter {
    fn cpu(&self) -> &Cpu {
        &self.model.cpu
    }

    fn config(&self) -> &ModelConfig {
        &self.own.config
    }

    fn rotary(&self) -> &Rotary {
        &self.own.rotary
    }

    fn layer(&self) -> &CpuLayer {
        &self.own.layer
    }

    fn width(&self) -> usize {
        self.own.config.hidden_size
    }

    fn input(&self, tokens: &[u32], streams: &[f32]) -> Result<Input> {
        let model = &*self.model;
        // The layer reads what the head of the model does.
        let mut hidden = vec![0.0; streams.len()];
        let shape = (&model.cpu, &model.config);
        model.ending.run(shape, streams, &mut hidden)?;
        self.rows(tokens, &hidden)
    }

    fn drafted_input(&self, token: u32, made: Vec<f32>) -> Result<Input> {
        self.rows(&[token], &made)
    }

    fn made(&self, x: &[f32]) -> Result<Vec<f32>> {
        let (own, mut made) = (&*self.own, vec![0.0; x.len()]);
        let eps = own.config.rms_norm_eps;
        self.model.cpu.rms_norm(x, &own.norm, eps, &mut made);
        match nq_runtime::checks::all_finite(&made) {
            true => Ok(made),
            false => Err(MTP_NOT_FINITE),
        }
    }

    fn draft(&self, made: &[f32]) -> Result<u32> {
        let model = &*self.model;
        let mut logits = vec![0.0; model.config.vocab_size];
        let head = self.own.head.as_ref().unwrap_or(&model.head);
        model.cpu.linear(head, made, &mut logits, Epilogue::Store)?;
        best_token(&logits)
    }
}
