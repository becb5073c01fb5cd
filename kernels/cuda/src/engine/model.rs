//! A model's weights on a GPU.

use super::adapters::AdapterWidths;
use super::experts_at::{ExpertsAt, PlacedExperts, wide};
use super::held::{CudaLayer, HeldLayer, stack};
use super::host_experts::HostExperts;
use super::layer::CudaLayers;
use super::part::GpuPart;
use super::pass::{Context, few_rows};
use super::request::MemoryRequest;
use super::residency::{BankLayers, ModelBank};
use super::served::check_shape;
use super::session::step_rows::most_together;
use super::session::stream_rows::StreamRows;
use super::weights::{
    self, TrellisCodes, bank_sizes, half_of_experts, has_sorted_inputs, no_weight, stored_by_layer,
    told_kinds, weight_bytes,
};
use crate::bank::StageSizes;
use crate::{
    Buffer, Checked, DeviceLinear, DevicePages, DeviceStates, Gpu, HalfRows, HostStage, PackedKind,
    RowsOut, Stack, Stream, StreamMixing, Uploader,
};
use nq_formats::{Progress, Scheme, Weight, WeightStore, human_bytes};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Account, Activations, KernelSet};
use nq_model::forward::{Layer, VectorSpec};
use nq_model::names::{self, EMBEDDING};
use nq_model::{DType, Dims, ModelConfig, Product, Shape};
use nq_runtime::interface::{LoadOptions, SessionSpec, Split};
use nq_runtime::models::{Ending, LayerWeights};
use nq_runtime::ngrams::NgramRows;
use nq_runtime::rope::Rotary;
use nq_runtime::weights::{Census, LoadProgress, note_held};
use nq_runtime::{Error, Result};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A model packed for a GPU.
pub(super) struct CudaModel {
    pub(super) config: ModelConfig,
    pub(super) gpu: Gpu,
    pub(super) kernels: KernelSet,
    pub(super) rotary: Rotary,
    /// Device memory that weights take.
    pub(super) weights: usize,
    pub(super) layers: CudaLayers,
    pub(super) norm: Buffer<f32>, // [hidden], or [streams, hidden]
    /// What weighs several streams behind the last layer: `[rank, streams hidden]` and `[streams hidden, rank]`.
    mix: Option<[DeviceLinear; 2]>,
    /// Tables of n-grams, in files: rows are looked up on the host.
    pub(super) tables: Vec<Option<NgramRows>>, // [layers]
    pub(super) head: DeviceLinear, // [vocab, hidden]
    /// `[vocab, hidden]`; `None` if the head is the same matrix.
    embedding: Option<DeviceLinear>,
    /// The trellis codes that some of its weights are in.
    pub(super) trellis: TrellisCodes,
    /// True if some of its weights have sorted inputs.
    sorted: bool,
    /// Most rows of steps that its kernels for few rows take.
    few_rows: usize,
    /// Which part of a model it is, if it is not a whole one.
    pub(super) part: Option<GpuPart>,
    /// True if its sessions are made [`wide`].
    is_wide: bool,
}

/// What the GPU does more slowly for want of a kernel: quantized weights that it holds as FP16 (bytes in their
/// scheme and held), and shared experts that do not stand behind the others.
#[derive(Default)]
pub(super) struct Slower {
    stored: usize,
    held: usize,
    /// Layers whose shared expert has products of its own.
    apart: usize,
}

impl Slower {
    /// Packs `parts` and counts them if they are held as FP16.
    fn pack(
        &mut self,
        uploader: &mut Uploader,
        parts: &[&Weight],
        stack: Stack,
        plain: bool,
    ) -> Result<DeviceLinear> {
        let packed = uploader.pack(parts, stack, plain)?;
        let quantized = parts.iter().any(|w| matches!(w, Weight::Quantized(_)));
        if quantized && packed.kind() == PackedKind::Fp16 {
            self.stored += parts.iter().map(|w| w.bytes()).sum::<usize>();
            self.held += packed.bytes();
        }
        Ok(packed)
    }

    fn note(&self, progress: &dyn Progress) {
        if self.apart > 0 {
            progress.note(&format!(
                "the shared experts of {} layers run by themselves, which is slower: their width or schemes are not \
                 those of the other experts",
                self.apart
            ));
        }
        if self.held > 0 {
            progress.note(&format!(
                "on this device {} of weights are held as {} of FP16: there are no kernels for experts in activation \
                 order, some groups of 16, products with parts that no scheme or order holds together, and some experts in \
                 codes of trellises or of EXL3",
                human_bytes(self.stored as u64),
                human_bytes(self.held as u64)
            ));
        }
    }
}

/// Packs the weights of layer `index`, as far as they are `held` on the device; those in trellis codes as FP16 if `plain`.
/// Experts that are in a bank are `banked` already.
pub(super) fn pack_layer(
    uploader: &mut Uploader,
    index: usize,
    weights: &LayerWeights,
    held: &HeldLayer,
    banked: Option<[DeviceLinear; 2]>,
    plain: bool,
    slower: &mut Slower,
) -> Result<CudaLayer> {
    let gpu = uploader.gpu().clone();
    let mut banked = banked.map(|halves| halves.map(Some));
    let linear = |product: &'static Product| {
        let half = half_of_experts(weights.spec, product);
        if let (Some(halves), Some(half)) = (&mut banked, half)
            && let Some(half) = halves[half as usize].take()
        {
            return Ok(half);
        }
        let parts = held.parts(product).into_iter();
        let parts = parts.map(|part| part.weight(weights));
        let parts = parts.collect::<Result<Vec<Cow<'_, Weight>>>>()?;
        if parts.is_empty() {
            return Ok(no_weight(&gpu)?);
        }
        let parts: Vec<&Weight> = parts.iter().map(|part| &**part).collect();
        let plain = plain || held.is_plain(product);
        slower.pack(uploader, &parts, stack(product), plain)
    };
    let vector = |vector: VectorSpec| Ok(gpu.upload("a norm", &weights.values(vector)?)?);
    let mut layer: CudaLayer = Layer::new(index, weights.spec, linear, vector)?;
    slower.apart += usize::from(held.runs_shared_apart());
    if held.has_shared() {
        layer.drop_shared_expert();
    }
    Ok(layer)
}

/// What of a layer of these weights is on the device.
pub(super) fn held_layer(
    c: &ModelConfig,
    weights: &LayerWeights,
    experts_on_host: bool,
) -> HeldLayer {
    HeldLayer::new(c, weights.spec, experts_on_host, |kind| {
        WeightKind::of(weights.linear(kind))
    })
}

impl CudaModel {
    /// Reads and packs a model, if there is room for it and for `session`; also returns the
    /// bits of most weights.
    pub(super) fn load(
        gpu: Gpu,
        part: Option<GpuPart>,
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<(Self, usize)> {
        let kernels = options.kernels;
        check_shape(config, kernels)?;
        gpu.limit_memory(options.gpu_memory);
        if config.hyper.is_some() && options.cpu_experts.is_some_and(|layers| layers > 0) {
            return Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "experts on the CPU (--cpu-experts)",
                expected: "a residual of one stream".into(),
                found: format!("{} streams", config.streams()),
            });
        }
        let cpu_experts = match part {
            // What experts on the CPU make is added to the residual stream itself, not to a rank's share.
            Some(_) => Some(0),
            None => HostExperts::wanted(config, options.cpu_experts, progress)?,
        };
        let mut done = LoadProgress::begin(config, store, progress);
        let mut census = Census::default();
        let end = |name| {
            let dims = Dims::new(config.vocab_size, config.hidden_size);
            store.matrix_in_levels(name, dims)
        };
        let head_weight = end(names::head(config))?;
        let embedding_weight = if config.tie_word_embeddings {
            None
        } else {
            Some(end(EMBEDDING)?)
        };
        let first = LayerWeights::read_in_levels(store, config, 0)?;
        let linears = first
            .spec
            .matrices()
            .map(|l| (l.name(0), WeightKind::of(first.linear(l.kind))));
        let mut kinds: BTreeMap<String, WeightKind> = linears.collect();
        kinds.insert(names::head(config).into(), WeightKind::of(&head_weight));
        if let Some(w) = &embedding_weight {
            kinds.insert(EMBEDDING.into(), WeightKind::of(w));
        }
        let act_order = kinds.values().any(|kind| kind.is_ordered());
        let told = told_kinds(config, store, act_order);
        let tells_all = told.is_some();
        kinds.extend(told.into_iter().flatten());
        let ending = Ending::read(store, config)?;
        let mixes = names::end_parameters(config).filter(|(_, s)| matches!(s, Shape::Matrix(..)));
        for ((name, _), w) in mixes.zip(ending.mix.iter().flatten()) {
            kinds.insert(name, WeightKind::of(w));
        }
        let codes = kinds.values().map(|&kind| TrellisCodes::of_kind(kind));
        let trellis = match kernels {
            KernelSet::Fused => codes.max().unwrap_or_default(),
            KernelSet::Reference => TrellisCodes::None,
        };
        // The reference kernels do not read trellis codes.
        let plain = kernels == KernelSet::Reference;
        let kinds = |name: &str| match kinds[name] {
            WeightKind::Trellis(_) | WeightKind::Exl3(_) if plain => WeightKind::Dense(DType::F16),
            kind => kind,
        };
        let layers = config.num_hidden_layers;
        let told = if tells_all { layers } else { 1 };
        let sorted = !plain && has_sorted_inputs(config, &kinds, told);
        let few_rows = few_rows(config, &kinds, told, most_together(&gpu));
        let stored = stored_by_layer(&store.entries(), layers).unwrap_or_else(|| vec![1; layers]);
        let stored = Some(&stored[..]).filter(|_| !tells_all);
        let dry = Gpu::dry(gpu.info().clone(), Account::gpu());
        let request = MemoryRequest {
            info: gpu.info(),
            together: most_together(&gpu),
            config,
            kernels,
            head: &weights::head(&dry, config, &kinds, part)?,
            trellis,
            sorted,
            few_rows,
            part,
            adapters: AdapterWidths::default(),
            stage: None,
            weights: 0,
            session: options.session.as_ref(),
            grows: options.session_grows,
        };
        let free = gpu.free_memory()?.saturating_sub(options.reserved);
        let bytes = |at| Ok(weight_bytes(config, &kinds, stored, at, part)?.held);
        // A bank's sizes follow from what the store tells; shares of each layer's experts are not in banks.
        let whole_layers = part.is_none_or(|part| part.split == Split::Layers);
        let sizes = match whole_layers && options.cpu_experts.is_none() && tells_all {
            true => bank_sizes(config, &kinds)?,
            false => None,
        };
        let beside = part.map_or(1, |part| part.rank.ranks);
        let host = HostExperts::memory_for_banks(options.host_memory) / beside;
        let mut split = request.split(cpu_experts, free, sizes.as_ref(), host, bytes)?;
        let mut bank = None;
        if let ExpertsAt::Bank { rooms, whole } = split.at {
            let stage = sizes.as_ref().map_or(StageSizes::default(), |s| s.stage);
            match ModelBank::new(&gpu, config, &kinds, BankLayers { rooms, whole }, stage) {
                Ok(locked) => bank = Some(locked),
                Err(e) => {
                    progress.note(&format!(
                        "experts cannot be in page-locked memory, so whole layers' experts run on the CPU: {e}"
                    ));
                    split = request.split(cpu_experts, free, None, host, bytes)?;
                }
            }
        }
        let PlacedExperts {
            at,
            weights,
            is_wide,
            ..
        } = split;
        let on_host = at.cpu_layers();
        let mut uploader = Uploader::new(&gpu)?;

        let mut dense_f32 = false;
        let mut count = |weights: &[&Weight]| {
            census.add(weights, Activations::F32);
            dense_f32 |= weights.iter().any(|w| w.scheme_name() == "F32");
        };
        count(&[&head_weight]);
        let mut slower = Slower::default();
        // Rows of an embedding are looked up with their inputs as they are.
        let is_plain = |w: &Weight| plain || WeightKind::of(w).is_ordered();
        let as_plain = is_plain(&head_weight);
        let head = slower.pack(&mut uploader, &[&head_weight], Stack::Concat, as_plain)?;
        done.add(&head_weight);
        drop(head_weight);
        let embedding = match &embedding_weight {
            None => None,
            Some(w) => {
                let packed = slower.pack(&mut uploader, &[w], Stack::Concat, is_plain(w))?;
                done.add(w);
                Some(packed)
            }
        };
        drop(embedding_weight);
        let mut layers = CudaLayers::new(config);
        let mut tables = Vec::new();
        let mut first = Some(first);
        for index in 0..config.num_hidden_layers {
            let weights = match first.take() {
                Some(weights) => weights,
                None => LayerWeights::read_in_levels(store, config, index)?,
            };
            count(&weights.linears.values().collect::<Vec<_>>());
            let experts_on_host = index < on_host;
            if experts_on_host {
                layers
                    .host
                    .add(config, options, &weights, on_host - index)?;
            }
            if let Some(delta) = weights.spec.recurrence() {
                (layers.rates).push(HalfRows::new(&gpu, &weights.product(&delta.rates))?);
            }
            tables.push(NgramRows::open(store, config, index)?);
            let held = held_layer(config, &weights, experts_on_host);
            let banked = match &mut bank {
                Some(bank) => bank.pack(&mut uploader, &weights, &held, index, plain)?,
                None => None,
            };
            let layer = pack_layer(
                &mut uploader,
                index,
                &weights,
                &held,
                banked,
                plain,
                &mut slower,
            )?;
            let router = held.router().map(|router| {
                let parts: Vec<&Weight> =
                    router.linears().map(|l| weights.linear(l.kind)).collect();
                HalfRows::new(&gpu, &parts)
            });
            layers.routers.push(router.transpose()?);
            layers.all.push(layer);
            weights.linears.values().for_each(|w| done.add(w));
        }
        let norm = gpu.upload("a norm", &ending.norm.to_f32()?)?;
        let mut mix = |w: &Weight| {
            done.add(w);
            slower.pack(&mut uploader, &[w], Stack::Concat, is_plain(w))
        };
        let mix = match &ending.mix {
            Some([down, up]) => Some([mix(down)?, mix(up)?]),
            None => None,
        };
        uploader.finish()?;
        if let Some(bank) = &bank {
            progress.note(&bank.told());
        }
        layers.bank = bank;
        done.end();
        note_held(config, store, Scheme::held_on_gpu, progress);
        slower.note(progress);
        if on_host > 0 {
            let why = match (cpu_experts, &sizes) {
                (None, None) => {
                    ": single experts have places only where a file says how each is quantized"
                }
                _ => "",
            };
            progress.note(&format!(
                "the experts of {on_host} of {} layers ({}) are in the computer's memory and run on the CPU{why}",
                config.num_hidden_layers,
                human_bytes(layers.host.bytes() as u64)
            ));
            layers.host.note(progress);
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
            norm,
            mix,
            tables,
            head,
            embedding,
            trellis,
            sorted,
            few_rows,
            part,
            is_wide,
        };
        Ok((model, census.bits()))
    }

    /// The session that is opened where `spec` is asked for.
    pub(super) fn opened(&self, spec: SessionSpec) -> SessionSpec {
        wide(&spec).filter(|_| self.is_wide).unwrap_or(spec)
    }

    /// The request that plans a session of this model with adapters.
    pub(super) fn request<'a>(
        &'a self,
        session: &'a SessionSpec,
        adapters: AdapterWidths,
    ) -> MemoryRequest<'a> {
        MemoryRequest {
            info: self.gpu.info(),
            together: most_together(&self.gpu),
            config: &self.config,
            kernels: self.kernels,
            head: &self.head,
            trellis: self.trellis,
            sorted: self.sorted,
            few_rows: self.few_rows,
            part: self.part,
            adapters,
            stage: self.layers.bank.as_ref().map(ModelBank::stage),
            weights: 0,
            session: Some(session),
            grows: false,
        }
    }

    /// What the layers of a pass over pages and states of a session share.
    pub(super) fn context<'a>(
        &'a self,
        stream: &'a Stream,
        pages: &'a DevicePages,
        states: Option<&'a DeviceStates>,
        cos_sin: &'a Buffer<[f32; 2]>,
        host: Option<&'a HostStage>,
    ) -> Context<'a> {
        Context {
            stream,
            config: &self.config,
            layers: &self.layers,
            kernels: self.kernels,
            pages,
            states,
            cos_sin,
            host,
        }
    }

    /// True if it has recorded steps of few rows whose tokens the device draws. Tokens that follow one another in several
    /// streams are drawn on the host, which looks up their n-grams; and the reference kernels pass over all rows alike.
    pub(super) fn has_steps(&self) -> bool {
        self.kernels == KernelSet::Fused && self.mix.is_none()
    }

    /// What weighs several streams behind the last layer.
    pub(super) fn mixing(&self) -> Option<StreamMixing<'_>> {
        let [down, up] = self.mix.as_ref()?;
        Some(StreamMixing {
            gain: &self.norm,
            eps: self.config.rms_norm_eps,
            down,
            up,
            inject: None,
        })
    }

    /// Computes what the head reads of the listed rows behind the last layer: `m` rows of `x`, or of `streams`.
    pub(super) fn end(
        &self,
        stream: &Stream,
        x: &Buffer<f32>,
        streams: &mut Option<StreamRows>,
        wanted: &Checked<u32>,
        out: &RowsOut<'_>,
        m: usize,
    ) -> nq_kernels::Result<()> {
        let (gain, eps) = (&self.norm, self.config.rms_norm_eps);
        match (streams, self.mixing()) {
            (Some(streams), Some(mixing)) => {
                streams.read(stream, &mixing, Some(wanted), out, None, m)
            }
            _ => stream.rms_norm(x, Some(wanted), gain, out, m, eps),
        }
    }

    /// The embedding `[vocab, hidden]`.
    pub(super) fn embedding(&self) -> &DeviceLinear {
        self.embedding.as_ref().unwrap_or(&self.head)
    }

    /// Bytes that decoding one token reads.
    pub(super) fn bytes_per_token(&self) -> usize {
        let layers = self.layers.all.iter();
        let vectors = layers.clone().flat_map(Layer::vectors);
        layers
            .map(|l| l.bytes_per_token(&self.config, DeviceLinear::bytes))
            .sum::<usize>()
            + vectors.map(Buffer::bytes).sum::<usize>()
            + self
                .layers
                .host
                .bytes_per_token(self.config.experts.as_ref())
            + self.norm.bytes()
            + self
                .mix
                .iter()
                .flatten()
                .map(DeviceLinear::bytes)
                .sum::<usize>()
            + self.head.bytes()
    }
}
