//! From weights to a running engine.

use crate::candle;
use crate::cpu::{CpuEngine, CpuLayers};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::gpu;
use crate::interface::{Engine, EngineKind, LoadOptions};
use crate::stepper::{LayerStepper, Stepper};
use nq_formats::{ModelConfig, Progress, WeightStore};
use nq_kernels::pages::KvType;
use std::sync::Arc;

/// Loads a model: reads every weight from `store`, repacks it for the device and reports
/// progress in bytes. `store` may be a checkpoint or any other source of weights.
///
/// # Errors
/// A missing or misshapen tensor, a weight that no kernel supports, an absent device or
/// instruction set; each error names it.
pub fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    if options.engine == EngineKind::Candle {
        if config.delta.is_some() {
            return Err(Error::no_recurrences("candle"));
        }
        return candle::load(config, store, options, progress);
    }
    if let Some(gpus) = options.device.several()? {
        return gpu::load_parallel(config, store, options, gpus, progress);
    }
    match options.device.resolve()? {
        Device::Cpu => Ok(Arc::new(CpuEngine::load(config, store, options, progress)?)),
        Device::Cuda(n) => gpu::load(config, store, options, n, progress),
    }
}

/// The forward one layer at a time, for weights that arrive layer by layer. On the CPU, keys and
/// values are rounded to `kv`. A GPU computes in f32 and passes up to `rows` rows through a layer at
/// once, and at least one whole sequence.
///
/// # Errors
/// An absent device or instruction set.
pub fn stepper(
    config: &ModelConfig,
    options: &LoadOptions,
    kv: KvType,
    rows: usize,
) -> Result<Box<dyn LayerStepper>> {
    match options.device.resolve()? {
        Device::Cpu => Ok(Box::new(Stepper(CpuLayers::new(config, options, kv)?))),
        Device::Cuda(n) => gpu::stepper(config, n, rows),
    }
}
