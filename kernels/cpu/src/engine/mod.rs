//! The CPU engine: nq's own forward over the operations of [`Cpu`](crate::Cpu).

mod adapters;
mod cache;
pub mod eagle;
mod kept;
pub mod layer;
mod model;
pub mod mtp;
mod open;
mod places;
pub mod plan;
mod session;
mod stepper;
mod stream_drafts;
mod stream_states;
mod streams;
mod tower;
mod weights;

pub use adapters::adapter_bytes;
pub use cache::state_bytes;
pub(crate) use session::session_bytes;
pub use stepper::CpuLayers;
pub use stepper::stepper_bytes;
pub use tower::CpuTower;

pub use open::open;
pub use places::WeightPlaces;

use crate::Linear;
use adapters::{CpuAdapter, CpuAdapters};
use layer::{layer_bytes, pack, pack_layer};
use model::{CpuEnding, CpuModel};
use nq_formats::adapter::Lora;
use nq_formats::{AffineScheme, Progress, Scheme, Weight, WeightStore};
use nq_kernels::KernelSet;
use nq_kernels::profile::OpTiming;
use nq_model::ModelConfig;
use nq_runtime::host::available_memory;
use nq_runtime::interface::{
    AppliedAdapter, DeviceMemory, Engine, EngineDescription, LoadOptions, Session, SessionSpec,
};
use nq_runtime::kv::least_prefix;
use nq_runtime::models::{self, Ending, LayerWeights};
use nq_runtime::rope::Rotary;
use nq_runtime::weights::{Census, LoadProgress, note_held};
use nq_runtime::{Error, Result};
use session::CpuSession;
use std::sync::{Arc, OnceLock};
use weights::CpuLayer;

/// [`Engine`] on the CPU.
pub struct CpuEngine {
    model: Arc<CpuModel>,
    adapters: CpuAdapters,
    kernels: KernelSet,
    description: EngineDescription,
    /// Measured at most once.
    bandwidth: OnceLock<Option<f64>>,
}

impl CpuEngine {
    /// Reads and packs a model layer by layer.
    pub fn load(
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let cpu = open(options)?;
        let mut done = LoadProgress::begin(config, store, progress);
        let mut census = Census::default();
        // Load the largest weight first: it is held twice while nothing else is held yet.
        // Reference kernels take values row by row.
        let reference = options.kernels == KernelSet::Reference;
        let head_weight = match reference {
            true => models::head(store, config)?,
            false => models::head_in_codes(store, config)?,
        };
        let head = pack(&cpu, options, "head", 1, &[&head_weight], &mut census)?;
        done.add(&head_weight);
        drop(head_weight);
        let embedding = if config.tie_word_embeddings {
            None
        } else {
            Some(models::embedding(store, config)?)
        };
        embedding.iter().for_each(|w| done.add(w));
        let (kv, scratch) = (options.session.as_ref()).map_or((0, 0), |s| session_bytes(config, s));
        let mut places = WeightPlaces::new(options, head.bytes() + kv + scratch);
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        let mut tables = Vec::with_capacity(config.num_hidden_layers);
        for index in 0..config.num_hidden_layers {
            let weights = match reference {
                true => LayerWeights::read(store, config, index)?,
                false => LayerWeights::read_in_codes(store, config, index)?,
            };
            let mut layer = pack_layer(&cpu, config, options, index, &weights, &mut census)?;
            places.place(layer.parts_mut().0, config.num_hidden_layers - index)?;
            layers.push(layer);
            weights.linears.values().for_each(|w| done.add(w));
            tables.push(weights.table);
        }
        let ending = CpuEnding::pack(&cpu, options, &Ending::read(store, config)?)?;
        done.end();
        places.note(progress);
        let held = |scheme: Scheme, dims| {
            let held = |s: AffineScheme| AffineScheme::new(crate::held_bits(&s), s.group, s.zeros);
            scheme
                .affine()
                .map_or(scheme, |s| held(s).into())
                .stored(dims)
        };
        note_held(config, store, held, progress);
        if options.activations.is_forced() && !census.rounds() {
            return Err(Error::Unsupported {
                engine: "nq",
                what: "rounded activations",
                expected: "quantized weights for int8 and int16, bf16 weights for bf16".into(),
                found: format!("{}-bit floats", census.bits()),
            });
        }

        let description = EngineDescription {
            engine: "nq".into(),
            device: format!("cpu ({})", cpu.isa()),
            kernels: options.kernels.to_string(),
            activations: census.activations(),
            bits: census.bits(),
            threads: cpu.threads(),
        };
        let model = CpuModel {
            rotary: Rotary::new(config),
            config: config.clone(),
            cpu,
            embedding,
            layers,
            tables,
            ending,
            head,
        };
        Ok(CpuEngine {
            model: Arc::new(model),
            adapters: CpuAdapters::default(),
            kernels: options.kernels,
            description,
            bandwidth: OnceLock::new(),
        })
    }
}

impl Engine for CpuEngine {
    fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    fn description(&self) -> &EngineDescription {
        &self.description
    }

    fn bytes_per_token(&self) -> usize {
        let m = &self.model;
        m.layers
            .iter()
            .map(|l| layer_bytes(&m.config, l))
            .sum::<usize>()
            + m.ending.bytes()
            + m.head.bytes()
    }

    fn memory_bandwidth(&self) -> Option<f64> {
        *self.bandwidth.get_or_init(|| {
            let m = &self.model;
            let linears = m.layers.iter().flat_map(CpuLayer::linears).chain([&m.head]);
            Some(m.cpu.weights_bandwidth(linears)?.best)
        })
    }

    fn device_memory(&self, spec: &SessionSpec) -> Option<DeviceMemory> {
        let m = &self.model;
        let linears = m.layers.iter().flat_map(CpuLayer::linears).chain([&m.head]);
        let kept = m.layers.iter().flat_map(CpuLayer::kept);
        let embedding = m.embedding.as_ref().map_or(0, Weight::bytes);
        let (kv, scratch) = session_bytes(&m.config, spec);
        let mix = m.ending.mix.iter().flatten();
        Some(DeviceMemory {
            weights: linears
                .chain(kept)
                .chain(mix)
                .map(Linear::bytes)
                .sum::<usize>()
                + embedding,
            kv,
            scratch: scratch + self.adapters.widths().bytes(spec.max_rows),
            free: available_memory().map_or(usize::MAX, |bytes| bytes as usize),
            on_host: true,
        })
    }

    fn read_once_from(&self, _spec: &SessionSpec, sequences: usize) -> Option<usize> {
        // Attention takes a chunk of positions of each row in turn: whatever page they have in
        // common comes from memory once.
        least_prefix(sequences, 1)
    }

    fn with_adapters(
        &self,
        adapters: &[Lora],
        applied: &[AppliedAdapter],
    ) -> Result<Arc<dyn Engine>> {
        AppliedAdapter::check(applied, adapters.len())?;
        let (model, kernels) = (&*self.model, self.kernels);
        let pack = |lora| CpuAdapter::new(&model.cpu, &model.config, kernels, lora).map(Arc::new);
        Ok(Arc::new(CpuEngine {
            model: Arc::clone(&self.model),
            adapters: CpuAdapters {
                packed: adapters.iter().map(pack).collect::<Result<_>>()?,
                applied: applied.to_vec(),
            },
            kernels,
            description: self.description.clone(),
            bandwidth: self.bandwidth.clone(),
        }))
    }

    fn start_profile(&self) -> bool {
        self.model.cpu.profile().start();
        true
    }

    fn stop_profile(&self) -> Vec<OpTiming> {
        self.model.cpu.profile().stop()
    }

    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>> {
        let (kv, scratch) = session_bytes(self.config(), &spec);
        let adapters = self.adapters.widths().bytes(spec.max_rows);
        let needed = (kv + scratch + adapters) as u64;
        match available_memory() {
            Some(available) if needed > available => Err(Error::Memory {
                what: "the KV cache and scratch of a session",
                needed,
                available,
            }),
            _ => Ok(Box::new(CpuSession::new(
                self.model.clone(),
                self.adapters.clone(),
                spec,
            ))),
        }
    }
}
