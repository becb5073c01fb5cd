//! The functions of a build with CUDA.

use super::{GpuFound, GpuMemory, GpuSizes};
use nq_cuda::{
    CudaEagle, CudaEngine, CudaMtp, CudaOps, CudaTower, GemmPrecision, Gpu, MOST_WIDE_SEQUENCES,
    ParallelEngine, check_device, check_shape, device_count, placed, planned, served,
};
pub(crate) use nq_cuda::{planned_tower, unserved_tower};
use nq_formats::eagle::EagleHead;
use nq_formats::{Progress, Weight, WeightStore};
use nq_kernels::KernelSet;
use nq_kernels::grad::GradWork;
use nq_kernels::second_order::{DeviceMoments, SecondOrder};
use nq_model::ModelConfig;
use nq_model::vision::VisionConfig;
use nq_runtime::Result;
use nq_runtime::interface::{Engine, LoadOptions, Ordinals, Placed, SessionSpec, Tower};
use nq_runtime::stepper::LayerStepper;
use nq_runtime::weights::Kinds;
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

/// Packs the tower of shape `config` for GPU `ordinal`, with memory for images of as many as `tokens` tokens.
pub(crate) fn load_tower(
    config: &VisionConfig,
    store: &dyn WeightStore,
    tokens: u64,
    ordinal: usize,
    progress: &dyn Progress,
) -> Result<Arc<dyn Tower>> {
    let tower = CudaTower::load(config, store, tokens, ordinal, progress)?;
    Ok(Arc::new(tower))
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
    Ok(nq_f32::stepper(ops, config, rows))
}

/// Memory of GPU `ordinal`.
///
/// # Errors
/// [`Error::Device`](nq_runtime::Error::Device) if there is none; errors of the driver.
pub fn memory(ordinal: usize) -> Result<GpuMemory> {
    let gpu = Gpu::open(ordinal)?;
    Ok(GpuMemory {
        free: gpu.free_memory()? as u64,
        total: gpu.info().memory as u64,
    })
}

/// Number of streaming multiprocessors of GPU `ordinal`.
///
/// # Errors
/// [`Error::Device`](nq_runtime::Error::Device) if there is none; errors of the driver.
pub fn multiprocessors(ordinal: usize) -> Result<usize> {
    Ok(Gpu::open(ordinal)?.info().multiprocessors)
}

/// Refuses models of sizes that no kernel of a GPU serves.
///
/// # Errors
/// [`Error::Unsupported`](nq_runtime::Error::Unsupported), which names the size.
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

/// Where a model whose matrices are of these kinds and a session of it would be on GPUs with so many bytes free, beside
/// `host` bytes of the computer's memory. Needs no GPU.
///
/// # Errors
/// [`Error::DeviceMemory`](nq_runtime::Error::DeviceMemory) if they do not fit; what no kernel serves.
pub fn place(
    config: &ModelConfig,
    kinds: Kinds<'_>,
    spec: &SessionSpec,
    free: &[usize],
    host: usize,
) -> Result<Placed> {
    placed(config, kinds, spec, free, host)
}

/// Runs `work` on GPU `ordinal`, whose f32 products round their operands to TF32.
pub(crate) fn run<W: GradWork>(ordinal: usize, work: W) -> Result<W::Output> {
    Ok(work.run(&ops(ordinal, GemmPrecision::Tf32)?))
}

/// Copies the second moments `values` `[n, n]` of `n` inputs to GPU `ordinal`.
pub fn moments(ordinal: usize, values: &[f32], n: usize) -> Result<Arc<dyn DeviceMoments>> {
    let gpu = Gpu::open(ordinal)?;
    let sums = gpu.upload("second moments", values)?;
    let ops = Arc::new(CudaOps::new(&gpu, GemmPrecision::Full)?);
    Ok(ops.moments(sums, n)?)
}

/// All GPUs of the machine. Each is opened, its kernels are loaded and its bandwidths are measured.
///
/// # Errors
/// [`Error::Kernel`](nq_runtime::Error::Kernel) if there is no driver or no device, or for the first device that cannot be used.
pub fn found() -> Result<Vec<GpuFound>> {
    let mut found = Vec::new();
    for ordinal in 0..device_count()? {
        let gpu = Gpu::open(ordinal)?;
        let info = gpu.info();
        found.push(GpuFound {
            name: info.name.clone(),
            memory_bytes: info.memory as u64,
            capability: (info.capability.major, info.capability.minor),
            multiprocessors: info.multiprocessors,
            driver_cuda: (info.driver / 1000, info.driver % 1000 / 10),
            multi_process: info.multi_process,
            bandwidth: gpu.memory_bandwidth().ok(),
            copied: gpu.copy_bandwidth().ok(),
        });
    }
    Ok(found)
}

/// Measures how fast a GPU's memory is read. The device stays open, so that repeated measurements
/// time nothing else.
pub struct GpuMeter(Gpu);

impl GpuMeter {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// An absent device; [`Error::Kernel`](nq_runtime::Error::Kernel).
    pub fn open(ordinal: usize) -> Result<Self> {
        Ok(GpuMeter(Gpu::open(ordinal)?))
    }

    /// Measured bytes per second.
    ///
    /// # Errors
    /// [`Error::Kernel`](nq_runtime::Error::Kernel).
    pub fn read_bandwidth(&self) -> Result<f64> {
        Ok(self.0.memory_bandwidth()?)
    }

    /// Bytes of the last cache before the memory.
    pub fn cache_bytes(&self) -> u64 {
        self.0.info().l2_bytes as u64
    }
}

/// The implementation of f32 matrix products when quantizing on GPU `ordinal`.
pub fn products(ordinal: usize) -> Result<String> {
    Ok(ops(ordinal, GemmPrecision::Full)?.products())
}

/// The oldest driver that this build's kernels support.
pub fn driver_needed() -> Option<u32> {
    Some(nq_cuda::driver_needed())
}
