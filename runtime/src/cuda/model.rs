//! A model's weights on a GPU.

use super::plan::{Request, taken, weight_bytes};
use super::session::most_together;
use crate::engine::SessionSpec;
use crate::error::{Error, Result};
use crate::models::{self, LayerWeights};
use crate::rope::Rotary;
use crate::weights::{Census, LoadProgress};
use nq_formats::models::{LayerSpec, MlpSpec, NormKind, Product};
use nq_formats::{ModelConfig, Progress, Weight, WeightStore};
use nq_kernels::cuda::{Buffer, DeviceLinear, Gpu, HEAD_DIM, Heads, Stack, Uploader};
use nq_kernels::{Activations, KernelSet};

/// A model packed for a GPU.
pub(super) struct CudaModel {
    pub(super) config: ModelConfig,
    pub(super) gpu: Gpu,
    pub(super) kernels: KernelSet,
    pub(super) rotary: Rotary,
    /// Device memory that weights take.
    pub(super) weights: usize,
    pub(super) layers: Vec<CudaLayer>,
    pub(super) norm: Buffer<f32>,  // [hidden]
    pub(super) head: DeviceLinear, // [vocab, hidden]
    /// `[vocab, hidden]`; `None` if the head is the same matrix.
    embedding: Option<DeviceLinear>,
}

/// The weights of a layer.
pub(super) struct CudaLayer {
    pub(super) input_norm: Buffer<f32>,          // [hidden]
    pub(super) qkv: DeviceLinear,                // [q_dim + 2 kv_dim, hidden]
    pub(super) q_norm: Buffer<f32>,              // [head_dim]
    pub(super) k_norm: Buffer<f32>,              // [head_dim]
    pub(super) o: DeviceLinear,                  // [hidden, q_dim]
    pub(super) post_attention_norm: Buffer<f32>, // [hidden]
    pub(super) gate_up: DeviceLinear,            // [2 intermediate, hidden], interleaved
    pub(super) down: DeviceLinear,               // [hidden, intermediate]
}

impl CudaLayer {
    /// Packs the weights of a layer.
    pub(super) fn new(uploader: &mut Uploader, weights: &LayerWeights) -> Result<Self> {
        let spec = weights.spec;
        let MlpSpec::SwiGlu { gate_up, down, .. } = &spec.mlp;
        let gpu = uploader.gpu().clone();
        let norm = |kind| -> Result<Buffer<f32>> {
            Ok(gpu.upload("a norm", &weights.norm(kind).to_f32()?)?)
        };
        let mut pack = |product| uploader.pack(&weights.product(product), stack(spec, product));
        Ok(CudaLayer {
            input_norm: norm(NormKind::Attention)?,
            qkv: pack(&spec.attention.qkv)?,
            q_norm: norm(NormKind::Q)?,
            k_norm: norm(NormKind::K)?,
            o: pack(&spec.attention.o)?,
            post_attention_norm: norm(NormKind::Mlp)?,
            gate_up: pack(gate_up)?,
            down: pack(down)?,
        })
    }

    /// Device memory that a layer with these weights takes.
    pub(super) fn device_bytes(weights: &LayerWeights) -> Result<usize> {
        let mut bytes = 0;
        for product in weights.spec.products() {
            let parts = weights.product(product);
            let (codes, meta) = DeviceLinear::device_bytes(&parts, stack(weights.spec, product))?;
            bytes += taken(codes) + taken(meta);
        }
        Ok(bytes)
    }

    /// Bytes that one token reads.
    fn bytes(&self) -> usize {
        let norms = [
            &self.input_norm,
            &self.post_attention_norm,
            &self.q_norm,
            &self.k_norm,
        ];
        let linears = [&self.qkv, &self.o, &self.gate_up, &self.down];
        norms.iter().map(|n| n.bytes()).sum::<usize>()
            + linears.iter().map(|l| l.bytes()).sum::<usize>()
    }
}

/// How the outputs of a product's Linears lie: those that an epilogue takes in pairs beside each
/// other.
fn stack(spec: &LayerSpec, product: &Product) -> Stack {
    match &spec.mlp {
        MlpSpec::SwiGlu { gate_up, .. } if gate_up == product => Stack::Interleave,
        MlpSpec::SwiGlu { .. } => Stack::Concat,
    }
}

impl CudaModel {
    /// Reads and packs a model, if there is room for it and for `session`; also returns the
    /// bits of most weights.
    pub(super) fn load(
        gpu: Gpu,
        config: &ModelConfig,
        store: &dyn WeightStore,
        kernels: KernelSet,
        session: Option<&SessionSpec>,
        progress: &dyn Progress,
    ) -> Result<(Self, usize)> {
        check_shape(config)?;
        let mut done = LoadProgress::begin(config, store, progress);
        let mut census = Census::default();
        let head_weight = models::head(store, config)?;
        let embedding_weight = match config.tie_word_embeddings {
            true => None,
            false => Some(models::embedding(store, config)?),
        };
        let first = LayerWeights::read(store, config, 0)?;
        let embedding = embedding_weight.as_ref();
        let weights = weight_bytes(config, store, &first, &head_weight, embedding)?;
        let request = Request {
            config,
            kernels,
            weights,
            session,
            together: most_together(&gpu),
        };
        request.check(gpu.free_memory()?)?;
        let mut uploader = Uploader::new(&gpu)?;

        let mut dense_f32 = false;
        let mut count = |weights: &[&Weight]| {
            census.add(weights, Activations::F32);
            dense_f32 |= weights.iter().any(|w| w.scheme_name() == "F32");
        };
        count(&[&head_weight]);
        let head = uploader.pack(&[&head_weight], Stack::Concat)?;
        done.add(&head_weight);
        drop(head_weight);
        let embedding = match &embedding_weight {
            None => None,
            Some(w) => {
                let packed = uploader.pack(&[w], Stack::Concat)?;
                done.add(w);
                Some(packed)
            }
        };
        drop(embedding_weight);
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        let mut first = Some(first);
        for index in 0..config.num_hidden_layers {
            let weights = match first.take() {
                Some(weights) => weights,
                None => LayerWeights::read(store, config, index)?,
            };
            count(&weights.linears.values().collect::<Vec<_>>());
            layers.push(CudaLayer::new(&mut uploader, &weights)?);
            weights.linears.values().for_each(|w| done.add(w));
        }
        let norm = models::final_norm(store, config)?;
        let norm = gpu.upload("a norm", &norm.to_f32()?)?;
        uploader.finish()?;
        done.end();
        if dense_f32 {
            progress.note("F32 weights run as FP16 on the GPU");
        }
        let model = CudaModel {
            rotary: Rotary::new(config),
            weights,
            config: config.clone(),
            gpu,
            kernels,
            layers,
            norm,
            head,
            embedding,
        };
        Ok((model, census.bits()))
    }

    /// The embedding `[vocab, hidden]`.
    pub(super) fn embedding(&self) -> &DeviceLinear {
        self.embedding.as_ref().unwrap_or(&self.head)
    }

    /// Bytes that decoding one token reads.
    pub(super) fn bytes_per_token(&self) -> usize {
        let layers: usize = self.layers.iter().map(CudaLayer::bytes).sum();
        layers + self.norm.bytes() + self.head.bytes()
    }

    /// What attention needs of layer `index`.
    pub(super) fn heads<'a>(&'a self, index: usize, cos_sin: &'a Buffer<[f32; 2]>) -> Heads<'a> {
        let layer = &self.layers[index];
        Heads {
            heads: self.config.num_attention_heads,
            q_gain: &layer.q_norm,
            k_gain: &layer.k_norm,
            cos_sin,
            eps: self.config.rms_norm_eps,
        }
    }
}

/// Refuses shapes that the kernels do not serve.
fn check_shape(config: &ModelConfig) -> Result<()> {
    let refuse = |what, expected: &str, found: usize| {
        Err(Error::Unsupported {
            engine: "nq on a GPU",
            what,
            expected: expected.into(),
            found: found.to_string(),
        })
    };
    if config.head_dim != HEAD_DIM {
        return refuse("head_dim", "128", config.head_dim);
    }
    let group = config.num_attention_heads / config.num_key_value_heads;
    if group > 8 {
        return refuse("query heads per key head", "at most 8", group);
    }
    if !config.intermediate_size.is_multiple_of(8) {
        return refuse(
            "intermediate_size",
            "a multiple of 8",
            config.intermediate_size,
        );
    }
    if !config.hidden_size.is_multiple_of(8) {
        return refuse("hidden_size", "a multiple of 8", config.hidden_size);
    }
    Ok(())
}
