//! The GPU engine: nq's own forward over the kernels of this crate.

mod division;
mod host_experts;
mod layer;
mod model;
mod page_tables;
mod parallel;
mod part;
mod pass;
mod plan;
mod request;
mod session;
mod streams;
mod weights;

use crate::{Cascade, Gpu, GpuInfo, MOST_WIDE_SEQUENCES};
pub use model::check_shape;
use model::{CudaModel, key_copies, note_copies};
use nq_formats::{Progress, Shard, WeightStore};
use nq_kernels::profile::OpTiming;
use nq_kernels::{Account, KernelSet};
use nq_model::ModelConfig;
use nq_runtime::interface::{
    ActivationChoice, DeviceMemory, Engine, EngineDescription, LoadOptions, Session, SessionSpec,
};
use nq_runtime::kv::least_prefix;
use nq_runtime::weights::Kinds;
use nq_runtime::{Error, Result};
pub use parallel::ParallelEngine;
use part::GpuPart;
use request::Request;
use session::CudaSession;
use session::step::least_shared_pages;
use session::step_rows::most_together;
use std::sync::{Arc, OnceLock};
pub use streams::{CudaEagle, CudaMtp};

/// [`Engine`] on a GPU.
pub struct CudaEngine {
    model: Arc<CudaModel>,
    description: EngineDescription,
    bandwidth: OnceLock<Option<f64>>,
}

/// Bytes of GPU memory that a model whose matrices are of these kinds and a session of it will take,
/// on a GPU whose steps take the most sequences.
///
/// # Errors
/// A weight that no kernel serves; a type of keys and values that the device does not support.
pub fn planned(c: &ModelConfig, kinds: Kinds<'_>, spec: &SessionSpec) -> Result<DeviceMemory> {
    let c = &served(c).config(c)?;
    let info = &GpuInfo {
        multiprocessors: 132,
        shared_memory: 227 << 10,
        ..GpuInfo::default()
    };
    let request = Request {
        info,
        together: MOST_WIDE_SEQUENCES,
        config: c,
        kernels: KernelSet::Fused,
        head: &weights::head(&Gpu::dry(info.clone(), Account::gpu()), c, kinds, None)?,
        trellis: weights::has_trellis(c, kinds),
        part: None,
        weights: weights::weight_bytes(c, kinds, None, 0, None)?,
        session: Some(spec),
    };
    request.plan()
}

/// The whole of a model of shape `c`, with as many copies of its key heads as the kernels need.
pub fn served(c: &ModelConfig) -> Shard {
    Shard {
        key_copies: key_copies(c),
        ..Shard::tensors(0, 1)
    }
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
        let on = (Gpu::open(ordinal)?, None);
        if key_copies(config) == 1 {
            return Self::load_on(on, config, store, options, progress);
        }
        note_copies(config, progress);
        let whole = served(config);
        let (shape, copied) = (whole.config(config)?, whole.store(store, config)?);
        Self::load_on(on, &shape, &copied, options, progress)
    }

    /// As [`CudaEngine::load`], for a whole model or a part of one.
    fn load_on(
        (gpu, part): (Gpu, Option<GpuPart>),
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
        let (model, bits) = CudaModel::load((gpu, part), config, store, options, progress)?;
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
            description,
            bandwidth: OnceLock::new(),
        })
    }
}

impl CudaEngine {
    /// Opens a session, if there is room for it.
    fn open_session(&self, spec: SessionSpec) -> Result<CudaSession> {
        let model = &self.model;
        model.request(&spec).check(model.gpu.free_memory()?)?;
        CudaSession::new(model.clone(), spec)
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
        Some(DeviceMemory {
            weights: model.weights,
            free: model.gpu.free_memory().ok()?,
            ..model.request(spec).plan().ok()?
        })
    }

    fn sampled_together(&self) -> Option<usize> {
        (self.model.kernels == KernelSet::Fused).then(|| most_together(&self.model.gpu))
    }

    fn read_once_from(&self, spec: &SessionSpec, sequences: usize) -> Option<usize> {
        let model = &self.model;
        let seats = sequences.min(self.sampled_together()?);
        let least = least_shared_pages(model.config.num_key_value_heads);
        Cascade::fits(&model.gpu, spec.kv).then(|| least_prefix(seats, least))?
    }

    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>> {
        Ok(Box::new(self.open_session(spec)?))
    }
}
