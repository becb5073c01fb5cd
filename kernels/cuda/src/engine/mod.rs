//! The GPU engine: nq's own forward over the kernels of this crate.

mod adapters;
mod division;
mod experts_at;
mod heat_parts;
mod held;
mod host_experts;
mod layer;
mod model;
mod page_tables;
mod parallel;
mod part;
mod pass;
mod plan;
mod request;
mod residency;
mod served;
mod session;
mod streams;
mod tower;
mod weights;

use crate::{Cascade, Gpu};
use adapters::{CudaAdapters, merged_only};
use model::CudaModel;
use nq_formats::adapter::Lora;
use nq_formats::{Progress, WeightStore};
use nq_kernels::KernelSet;
use nq_kernels::profile::OpTiming;
use nq_model::ModelConfig;
use nq_runtime::interface::{
    ActivationChoice, AppliedAdapter, DeviceMemory, Engine, EngineDescription, ExpertChoices,
    HeatKeeper, LoadOptions, Session, SessionSpec,
};
use nq_runtime::kv::least_prefix;
use nq_runtime::{Error, Result};
pub use parallel::ParallelEngine;
use part::GpuPart;
pub use plan::{placed, planned};
pub use served::{check_shape, served};
use served::{key_copies, note_copies};
use session::CudaSession;
use session::step::least_shared_pages;
use session::step_rows::most_together;
use std::sync::{Arc, OnceLock};
pub use streams::{CudaEagle, CudaMtp};
pub use tower::{CudaTower, planned_tower, unserved_tower};

/// [`Engine`] on a GPU.
pub struct CudaEngine {
    model: Arc<CudaModel>,
    adapters: CudaAdapters,
    /// Copies of each key head.
    key_copies: usize,
    description: EngineDescription,
    bandwidth: OnceLock<Option<f64>>,
}

impl CudaEngine {
    /// Reads a model layer by layer and packs it for device `ordinal`.
    pub fn load(
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        ordinal: usize,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        if key_copies(config) == 1 {
            return Self::load_on(gpu, None, config, store, options, progress);
        }
        note_copies(config, progress);
        let whole = served(config);
        let (shape, copied) = (whole.config(config)?, whole.store(store, config)?);
        Ok(CudaEngine {
            key_copies: whole.key_copies,
            ..Self::load_on(gpu, None, &shape, &copied, options, progress)?
        })
    }

    /// As [`CudaEngine::load`], for a whole model or a part of one.
    fn load_on(
        gpu: Gpu,
        part: Option<GpuPart>,
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        if options.activations.is_forced() {
            return Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "activations",
                expected: "auto, or f32 by the reference kernels".into(),
                found: options.activations.to_string(),
            });
        }
        let fused = options.kernels == KernelSet::Fused;
        if fused && options.activations == ActivationChoice::F32 {
            progress.note(
                "the GPU's fused kernels round activations, as the report says; --kernels reference keeps f32",
            );
        }
        let device = gpu.info().to_string();
        let (model, bits) = CudaModel::load(gpu, part, config, store, options, progress)?;
        let description = EngineDescription {
            engine: "nq".into(),
            device,
            kernels: options.kernels.to_string(),
            activations: match (fused, bits) {
                (false, _) => "f32",
                // Products of many rows round to FP16. Steps of up to 16 rows split a value in two: for
                // quantized weights into 16-bit digits (`cuda/activations.cuh`), otherwise into FP16
                // and the remainder.
                (true, 16..) => "f16 + 2 f16 in steps",
                (true, _) => "f16 + int16 g64 in steps",
            }
            .into(),
            bits,
            threads: 0,
        };
        Ok(CudaEngine {
            model: Arc::new(model),
            adapters: CudaAdapters::default(),
            key_copies: 1,
            description,
            bandwidth: OnceLock::new(),
        })
    }
}

impl CudaEngine {
    /// Opens a session, if there is room for it.
    fn open_session(&self, spec: SessionSpec) -> Result<CudaSession> {
        let (model, adapters) = (&self.model, &self.adapters);
        let spec = model.opened(spec);
        let request = model.request(&spec, adapters.widths);
        request.check(model.gpu.free_memory()?)?;
        CudaSession::new(model.clone(), adapters.clone(), spec)
    }
}

impl Engine for CudaEngine {
    fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    fn description(&self) -> &EngineDescription {
        &self.description
    }

    fn bytes_per_token(&self) -> usize {
        self.model.bytes_per_token()
    }

    fn memory_bandwidth(&self) -> Option<f64> {
        let gpu = &self.model.gpu;
        *self.bandwidth.get_or_init(|| gpu.memory_bandwidth().ok())
    }

    fn start_profile(&self) -> bool {
        self.model.gpu.start_profile();
        true
    }

    fn stop_profile(&self) -> Vec<OpTiming> {
        self.model.gpu.stop_profile()
    }

    fn device_memory(&self, spec: &SessionSpec) -> Option<DeviceMemory> {
        let model = &self.model;
        let spec = &model.opened(*spec);
        Some(DeviceMemory {
            weights: model.weights + self.adapters.bytes,
            free: model.gpu.free_memory().ok()?,
            ..model.request(spec, self.adapters.widths).plan().ok()?
        })
    }

    fn expert_choices(&self) -> Option<ExpertChoices> {
        Some(self.model.layers.bank.as_ref()?.choices())
    }

    fn keep_heat(&self, keeper: Box<dyn HeatKeeper>) -> Result<()> {
        match &self.model.layers.bank {
            Some(bank) => bank.keep_heat(keeper),
            None => Ok(()),
        }
    }

    fn sampled_together(&self) -> Option<usize> {
        self.model
            .has_steps()
            .then(|| most_together(&self.model.gpu))
    }

    fn read_once_from(&self, spec: &SessionSpec, sequences: usize) -> Option<usize> {
        let model = &self.model;
        let seats = sequences.min(self.sampled_together()?);
        let least = least_shared_pages(model.config.num_key_value_heads);
        Cascade::fits(&model.gpu, spec.kv).then(|| least_prefix(seats, least))?
    }

    fn with_adapters(
        &self,
        adapters: &[Lora],
        applied: &[AppliedAdapter],
    ) -> Result<Arc<dyn Engine>> {
        let (model, key_copies) = (&self.model, self.key_copies);
        if model.config.hyper.is_some() {
            return Err(merged_only("a residual of several streams".into()));
        }
        if key_copies > 1 {
            return Err(merged_only(format!(
                "a model whose key heads are kept {key_copies} times"
            )));
        }
        Ok(Arc::new(CudaEngine {
            model: Arc::clone(model),
            key_copies,
            adapters: CudaAdapters::new(&model.gpu, &model.config, adapters, applied)?,
            description: self.description.clone(),
            bandwidth: self.bandwidth.clone(),
        }))
    }

    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>> {
        Ok(Box::new(self.open_session(spec)?))
    }
}
