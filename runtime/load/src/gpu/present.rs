//! The functions of a build with CUDA.

use super::{GpuMemory, GpuSizes};
use crate::cuda::{CudaEagle, CudaEngine, CudaMtp, ParallelEngine, check_shape, planned, served};
use crate::error::Result;
use crate::full_precision;
use crate::interface::{Engine, LoadOptions, Ordinals};
use crate::stepper::LayerStepper;
use nq_formats::eagle::EagleHead;
use nq_formats::{ModelConfig, Progress, Weight, WeightStore};
use nq_kernels::KernelSet;
use nq_kernels::cuda::{
    CudaOps, GemmPrecision, Gpu, MOST_WIDE_SEQUENCES, check_device, device_count,
};
use nq_kernels::grad::GradWork;
use nq_kernels::second_order::{DeviceMoments, SecondOrder};
use std::sync::Arc;

fn ops(ordinal: usize, precision: GemmPrecision) -> Result<CudaOps> {
    Ok(CudaOps::new(&Gpu::open(ordinal)?, precision)?)
}

/// The number of GPUs in the machine, at least one; otherwise the reason why there is none.
pub(crate) fn count() -> Result<usize, String> {
    device_count().map_err(|e| e.to_string())
}

/// The first GPU that this build can use; otherwise the reason why the first one is unusable.
pub(crate) fn first() -> Result<usize, String> {
    let check = |n| check_device(n).map_err(|e| e.to_string());
    let usable = (0..count()?).find(|&n| check(n).is_ok());
    usable.map_or_else(|| check(0).map(|()| 0), Ok)
}

/// Packs `head` for GPU `ordinal`.
pub(crate) fn load_eagle(
    head: &EagleHead,
    model: &ModelConfig,
    ordinal: usize,
) -> Result<CudaEagle> {
    CudaEagle::load(&Gpu::open(ordinal)?, head, model)
}

/// Packs the MTP layer of the model of `store`, whose shape as a model of its own is `config`, for GPU `ordinal`, with the
/// head that it drafts with if that is not the model's.
pub(crate) fn load_mtp(
    config: ModelConfig,
    store: &dyn WeightStore,
    head: Option<&Weight>,
    ordinal: usize,
) -> Result<CudaMtp> {
    CudaMtp::load(&Gpu::open(ordinal)?, config, store, head)
}

/// Loads the engine of GPU `ordinal`.
pub(crate) fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    ordinal: usize,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    let engine = CudaEngine::load(config, store, options, ordinal, progress)?;
    Ok(Arc::new(engine))
}

/// Loads the engine of several GPUs.
pub(crate) fn load_parallel(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    gpus: Ordinals,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    let engine = ParallelEngine::load(config, store, options, gpus.as_slice(), progress)?;
    Ok(Arc::new(engine))
}

/// The layer stepper on GPU `ordinal`. It passes up to `rows` rows through a layer at once, and at
/// least one whole sequence.
pub(crate) fn stepper(
    config: &ModelConfig,
    ordinal: usize,
    rows: usize,
) -> Result<Box<dyn LayerStepper>> {
    let ops = ops(ordinal, GemmPrecision::Full)?;
    Ok(full_precision::stepper(ops, config, rows))
}

/// Memory of GPU `ordinal`.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if there is none; errors of the driver.
pub fn memory(ordinal: usize) -> Result<GpuMemory> {
    let gpu = Gpu::open(ordinal)?;
    Ok(GpuMemory {
        free: gpu.free_memory()? as u64,
        total: gpu.info().memory as u64,
    })
}

/// Refuses models of sizes that no kernel of a GPU serves.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported), which names the size.
pub fn check(config: &ModelConfig) -> Result<()> {
    check_shape(&served(config).config(config)?, KernelSet::Fused)
}

/// Functions that compute the memory that work takes.
///
/// # Errors
/// In a build without GPUs.
pub fn sizes() -> Result<GpuSizes> {
    Ok(GpuSizes {
        together: MOST_WIDE_SEQUENCES,
        engine: planned,
        factor: CudaOps::factor_bytes,
        trellis: CudaOps::trellis_bytes,
    })
}

/// Runs `work` on GPU `ordinal`, whose f32 products round their operands to TF32.
///
/// # Errors
/// See [`memory`].
pub(crate) fn run<W: GradWork>(ordinal: usize, work: W) -> Result<W::Output> {
    Ok(work.run(&ops(ordinal, GemmPrecision::Tf32)?))
}

/// Copies the second moments `values` `[n, n]` of `n` inputs to GPU `ordinal`.
///
/// # Errors
/// See [`memory`].
pub fn moments(ordinal: usize, values: &[f32], n: usize) -> Result<Arc<dyn DeviceMoments>> {
    let gpu = Gpu::open(ordinal)?;
    let sums = gpu.upload("second moments", values)?;
    let ops = Arc::new(CudaOps::new(&gpu, GemmPrecision::Full)?);
    Ok(ops.moments(sums, n)?)
}
