//! With CUDA.

use super::{GpuMemory, GpuSizes};
use crate::cuda::{CudaEngine, session_bytes};
use crate::engine::Engine;
use crate::error::Result;
use crate::full_precision;
use crate::load::LoadOptions;
use crate::stepper::LayerStepper;
use nq_formats::{ModelConfig, Progress, WeightStore};
use nq_kernels::cuda::{CudaOps, GemmPrecision, Gpu, MOST_WIDE_SEQUENCES, MemoryUse, device_count};
use nq_kernels::grad::GradWork;
use nq_kernels::second_order::{Moments, SecondOrder};
use std::sync::Arc;

fn ops(ordinal: usize, precision: GemmPrecision) -> Result<CudaOps> {
    Ok(CudaOps::new(&Gpu::open(ordinal)?, precision)?)
}

pub(super) fn count() -> Result<usize, String> {
    device_count().map_err(|e| e.to_string())
}

pub(super) fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    ordinal: usize,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    let engine = CudaEngine::load(config, store, options, ordinal, progress)?;
    Ok(Arc::new(engine))
}

pub(super) fn stepper(
    config: &ModelConfig,
    ordinal: usize,
    rows: usize,
) -> Result<Box<dyn LayerStepper>> {
    let ops = ops(ordinal, GemmPrecision::Full)?;
    Ok(full_precision::stepper(ops, config, rows))
}

pub(super) fn memory(ordinal: usize) -> Result<GpuMemory> {
    let gpu = Gpu::open(ordinal)?;
    Ok(GpuMemory {
        free: gpu.free_memory()? as u64,
        total: gpu.info().memory as u64,
    })
}

#[expect(clippy::unnecessary_wraps, reason = "without CUDA there are none")]
pub(super) fn sizes() -> Result<GpuSizes> {
    Ok(GpuSizes {
        together: MOST_WIDE_SEQUENCES,
        session: session_bytes,
        factor: CudaOps::factor_bytes,
    })
}

pub(super) fn run<W: GradWork>(ordinal: usize, work: W) -> Result<W::Output> {
    Ok(work.run(&ops(ordinal, GemmPrecision::Tf32)?))
}

pub(super) fn moments(ordinal: usize, values: &[f32], n: usize) -> Result<Arc<dyn Moments>> {
    let gpu = Gpu::open(ordinal)?;
    let sums = gpu.upload("second moments", values)?;
    let ops = Arc::new(CudaOps::new(&gpu, GemmPrecision::Full)?);
    Ok(ops.moments(sums, n)?)
}

pub(super) fn begin_use() {
    MemoryUse::begin();
}

pub(super) fn peak_use() -> u64 {
    MemoryUse::now().peak as u64
}
