//! A model's weights on a GPU.

use super::host_experts::{HostExperts, is_of_experts};
use super::plan::{self, Request, no_weight, stored_by_layer, told_kinds, weight_bytes};
use super::session::most_together;
use crate::error::{Error, Result};
use crate::forward::{HeadVectors, Layer, VectorSpec};
use crate::interface::{LoadOptions, SessionSpec};
use crate::models::{self, LayerWeights};
use crate::rope::Rotary;
use crate::weights::{Census, LoadProgress, note_held};
use nq_formats::models::{LinearKind, Product};
use nq_formats::names::{self, EMBEDDING};
use nq_formats::{AffineScheme, ModelConfig, Progress, Weight, WeightStore, human_bytes};
use nq_kernels::cuda::pack::{SPAN, TILE};
use nq_kernels::cuda::{
    Buffer, DeviceLinear, Gpu, HEAD_DIM, Heads, MOST_CHOSEN, MOST_EXPERTS, PackedKind, Stack,
    Uploader,
};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Account, Activations, KernelSet};
use std::collections::BTreeMap;

/// A model packed for a GPU.
pub(super) struct CudaModel {
    pub(super) config: ModelConfig,
    pub(super) gpu: Gpu,
    pub(super) kernels: KernelSet,
    pub(super) rotary: Rotary,
    /// Device memory that weights take.
    pub(super) weights: usize,
    pub(super) layers: Vec<CudaLayer>,
    /// Experts of its first layers that run on the CPU.
    pub(super) host: HostExperts,
    pub(super) norm: Buffer<f32>,  // [hidden]
    pub(super) head: DeviceLinear, // [vocab, hidden]
    /// `[vocab, hidden]`; `None` if the head is the same matrix.
    embedding: Option<DeviceLinear>,
}

/// The weights of a layer; gate and up are interleaved.
pub(super) type CudaLayer = Layer<DeviceLinear, Buffer<f32>>;

/// Quantized weights that the GPU holds as FP16, for want of a kernel: bytes in their scheme and held.
#[derive(Default)]
struct HeldAsHalves {
    stored: usize,
    held: usize,
}

impl HeldAsHalves {
    /// Packs `parts` and counts them if they are held as FP16.
    fn pack(
        &mut self,
        uploader: &mut Uploader,
        parts: &[&Weight],
        stack: Stack,
    ) -> Result<DeviceLinear> {
        let packed = uploader.pack(parts, stack)?;
        let quantized = parts.iter().any(|w| matches!(w, Weight::Quantized(_)));
        if quantized && packed.kind() == PackedKind::Fp16 {
            self.stored += parts.iter().map(|w| w.bytes()).sum::<usize>();
            self.held += packed.bytes();
        }
        Ok(packed)
    }

    fn note(&self, progress: &dyn Progress) {
        if self.held > 0 {
            progress.note(&format!(
                "on this device {} of weights are held as {} of FP16: there are no kernels for \
                 groups of 16 or activation order, nor for products whose parts differ in scheme",
                human_bytes(self.stored as u64),
                human_bytes(self.held as u64)
            ));
        }
    }
}

/// Packs the weights of layer `index`, without its experts if they are on the CPU.
fn pack_layer(
    uploader: &mut Uploader,
    index: usize,
    weights: &LayerWeights,
    experts_on_host: bool,
    halves: &mut HeldAsHalves,
) -> Result<CudaLayer> {
    let gpu = uploader.gpu().clone();
    let linear = |product: &'static Product| {
        if experts_on_host && is_of_experts(weights.spec, product) {
            return Ok(no_weight(&gpu)?);
        }
        let stack = stack(product);
        halves.pack(uploader, &weights.product(product), stack)
    };
    let vector = |vector: VectorSpec| {
        let values = weights.vector(vector).to_f32()?;
        Ok(gpu.upload("a norm", &values)?)
    };
    Layer::new(index, weights.spec, linear, vector)
}

/// How the outputs of a product's Linears are laid out: interleaved if an epilogue takes them in
/// pairs.
fn stack(product: &Product) -> Stack {
    match product.linears[0].kind {
        LinearKind::Gate => Stack::Interleave,
        _ => Stack::Concat,
    }
}

impl CudaModel {
    /// Reads and packs a model, if there is room for it and for `session`; also returns the
    /// bits of most weights.
    pub(super) fn load(
        gpu: Gpu,
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<(Self, usize)> {
        let kernels = options.kernels;
        check_shape(config, kernels)?;
        let cpu_experts = HostExperts::wanted(config, options.cpu_experts, progress)?;
        let mut done = LoadProgress::begin(config, store, progress);
        let mut census = Census::default();
        let head_weight = models::head(store, config)?;
        let embedding_weight = if config.tie_word_embeddings {
            None
        } else {
            Some(models::embedding(store, config)?)
        };
        let first = LayerWeights::read(store, config, 0)?;
        let linears = first
            .spec
            .matrices()
            .map(|l| (l.name(0), WeightKind::of(first.linear(l.kind))));
        let mut kinds: BTreeMap<String, WeightKind> = linears.collect();
        kinds.insert(names::head(config).into(), WeightKind::of(&head_weight));
        if let Some(w) = &embedding_weight {
            kinds.insert(EMBEDDING.into(), WeightKind::of(w));
        }
        let ordered =
            |kind: &WeightKind| matches!(kind, WeightKind::Affine { act_order, .. } if *act_order);
        let act_order = kinds.values().any(ordered);
        let told = told_kinds(config, store, act_order);
        let tells_all = told.is_some();
        kinds.extend(told.into_iter().flatten());
        let kinds = |name: &str| kinds[name];
        let layers = config.num_hidden_layers;
        let stored = stored_by_layer(&store.entries(), layers).unwrap_or_else(|| vec![1; layers]);
        let stored = Some(&stored[..]).filter(|_| !tells_all);
        let dry = Gpu::dry(gpu.info().clone(), Account::gpu());
        let request = Request {
            info: gpu.info(),
            together: most_together(&gpu),
            config,
            kernels,
            head: &plan::head(&dry, config, &kinds)?,
            weights: 0,
            session: options.session.as_ref(),
        };
        let free = gpu.free_memory()?;
        let (on_host, weights) = request.split(cpu_experts, free, |on_host| {
            weight_bytes(config, &kinds, stored, on_host)
        })?;
        if on_host > 0 {
            // The CPU packs weights in about as many bytes as the GPU.
            HostExperts::check_memory(weight_bytes(config, &kinds, stored, 0)? - weights)?;
        }
        let mut uploader = Uploader::new(&gpu)?;

        let mut dense_f32 = false;
        let mut count = |weights: &[&Weight]| {
            census.add(weights, Activations::F32);
            dense_f32 |= weights.iter().any(|w| w.scheme_name() == "F32");
        };
        count(&[&head_weight]);
        let mut halves = HeldAsHalves::default();
        let head = halves.pack(&mut uploader, &[&head_weight], Stack::Concat)?;
        done.add(&head_weight);
        drop(head_weight);
        let embedding = match &embedding_weight {
            None => None,
            Some(w) => {
                let packed = halves.pack(&mut uploader, &[w], Stack::Concat)?;
                done.add(w);
                Some(packed)
            }
        };
        drop(embedding_weight);
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        let mut host = HostExperts::default();
        let mut first = Some(first);
        for index in 0..config.num_hidden_layers {
            let weights = match first.take() {
                Some(weights) => weights,
                None => LayerWeights::read(store, config, index)?,
            };
            count(&weights.linears.values().collect::<Vec<_>>());
            let experts_on_host = index < on_host;
            if experts_on_host {
                host.add(config, options, &weights)?;
            }
            layers.push(pack_layer(
                &mut uploader,
                index,
                &weights,
                experts_on_host,
                &mut halves,
            )?);
            weights.linears.values().for_each(|w| done.add(w));
        }
        let norm = models::final_norm(store, config)?;
        let norm = gpu.upload("a norm", &norm.to_f32()?)?;
        uploader.finish()?;
        done.end();
        note_held(config, store, AffineScheme::held_on_gpu, progress);
        halves.note(progress);
        if host.layers() > 0 {
            progress.note(&format!(
                "the experts of {} of {} layers ({}) are in the computer's memory and run on the CPU",
                host.layers(),
                config.num_hidden_layers,
                human_bytes(host.bytes() as u64)
            ));
        }
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
            host,
            norm,
            head,
            embedding,
        };
        Ok((model, census.bits()))
    }

    /// The request that plans a session of this model.
    pub(super) fn request<'a>(&'a self, session: &'a SessionSpec) -> Request<'a> {
        Request {
            info: self.gpu.info(),
            together: most_together(&self.gpu),
            config: &self.config,
            kernels: self.kernels,
            head: &self.head,
            weights: 0,
            session: Some(session),
        }
    }

    /// The embedding `[vocab, hidden]`.
    pub(super) fn embedding(&self) -> &DeviceLinear {
        self.embedding.as_ref().unwrap_or(&self.head)
    }

    /// Bytes that decoding one token reads.
    pub(super) fn bytes_per_token(&self) -> usize {
        let vectors = self.layers.iter().flat_map(Layer::vectors);
        let layers = self.layers.iter();
        layers
            .map(|l| l.bytes_per_token(&self.config, DeviceLinear::bytes))
            .sum::<usize>()
            + vectors.map(Buffer::bytes).sum::<usize>()
            + self.host.bytes_per_token(self.config.experts.as_ref())
            + self.norm.bytes()
            + self.head.bytes()
    }

    /// The parameters of a layer's attention.
    pub(super) fn heads<'a>(
        &self,
        vectors: &'a HeadVectors<Buffer<f32>>,
        cos_sin: &'a Buffer<[f32; 2]>,
    ) -> Heads<'a> {
        Heads {
            heads: self.config.num_attention_heads,
            gains: vectors.norms.as_ref().map(|norms| norms.each_ref()),
            biases: &vectors.biases,
            cos_sin,
            eps: self.config.rms_norm_eps,
        }
    }
}

/// The error of a size that the kernels do not serve.
pub(super) fn refuse<T>(what: &'static str, expected: &str, found: usize) -> Result<T> {
    Err(Error::Unsupported {
        engine: "nq on a GPU",
        what,
        expected: expected.into(),
        found: found.to_string(),
    })
}

/// Refuses shapes that the kernels do not serve.
fn check_shape(config: &ModelConfig, kernels: KernelSet) -> Result<()> {
    if config.head_dim != HEAD_DIM {
        return refuse("head_dim", "128", config.head_dim);
    }
    let group = config.num_attention_heads / config.num_key_value_heads;
    if group > 8 {
        return refuse("query heads per key head", "at most 8", group);
    }
    match config.experts {
        Some(experts) => {
            if !experts.width.is_multiple_of(SPAN) {
                return refuse("moe_intermediate_size", "a multiple of 256", experts.width);
            }
            if !config.hidden_size.is_multiple_of(TILE) {
                return refuse("hidden_size", "a multiple of 16", config.hidden_size);
            }
            if experts.count > MOST_EXPERTS {
                return refuse("num_experts", "at most 512", experts.count);
            }
            if experts.per_token > MOST_CHOSEN {
                return refuse("num_experts_per_tok", "at most 32", experts.per_token);
            }
            if kernels == KernelSet::Reference {
                return Err(Error::Unsupported {
                    engine: "nq on a GPU",
                    what: "kernels for mixtures of experts",
                    expected: "fused".into(),
                    found: kernels.to_string(),
                });
            }
        }
        None if !config.intermediate_size.is_multiple_of(8) => {
            let found = config.intermediate_size;
            return refuse("intermediate_size", "a multiple of 8", found);
        }
        None => {}
    }
    if !config.hidden_size.is_multiple_of(8) {
        return refuse("hidden_size", "a multiple of 8", config.hidden_size);
    }
    Ok(())
}
