//! The tower of a model that sees.

use crate::device::Device;
use crate::gpu;
use nq_cpu::CpuTower;
use nq_cpu::plan::TowerBytes;
use nq_formats::{Checkpoint, Progress};
use nq_kernels::KernelSet;
use nq_model::vision::VisionConfig;
use nq_runtime::Result;
use nq_runtime::interface::{EngineKind, LoadOptions, Tower};
use std::sync::Arc;

/// Loads the tower of a model beside its text model, with memory for images of as many as `tokens` tokens: on the GPU, of
/// several the first, or on the CPU; `None` for a model that reads text alone. It is on the CPU too beside the reference
/// kernels and other engines, and where a GPU has no kernels for its shape, which is then said.
///
/// # Errors
/// A missing or misshapen tensor; an absent device or instruction set; too little memory.
pub fn tower(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    tokens: u64,
    progress: &dyn Progress,
) -> Result<Option<Arc<dyn Tower>>> {
    let (Some(config), store) = (checkpoint.vision(), checkpoint.store()) else {
        return Ok(None);
    };
    Ok(Some(match place(config, options, progress)? {
        None => Arc::new(CpuTower::load(config, store, options, progress)?),
        Some(ordinal) => gpu::load_tower(config, store, tokens, ordinal, progress)?,
    }))
}

/// Memory of the tower of `checkpoint`, if it has one, and of an image of as many as `tokens` tokens, on the device that
/// [`tower`] loads it to.
///
/// # Errors
/// As of [`tower`].
pub fn tower_bytes(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    tokens: u64,
) -> Result<Option<TowerBytes>> {
    let Some(config) = checkpoint.vision() else {
        return Ok(None);
    };
    match place(config, options, &())? {
        None => nq_cpu::plan::tower(checkpoint, tokens),
        Some(_) => gpu::planned_tower(config, checkpoint.store(), tokens).map(Some),
    }
}

/// The device that [`tower`] loads the tower of `checkpoint` to; `None` for a model that reads text alone.
///
/// # Errors
/// An absent device.
pub fn tower_device(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Option<Device>> {
    let on = |config| place(config, options, progress);
    let ordinal = checkpoint.vision().map(on).transpose()?;
    Ok(ordinal.map(|ordinal| ordinal.map_or(Device::Cpu, Device::Cuda)))
}

/// The GPU that a tower of shape `config` runs on, or `None` for the CPU.
fn place(
    config: &VisionConfig,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Option<usize>> {
    let fused = options.kernels == KernelSet::Fused && options.engine == EngineKind::Nq;
    let ordinal = match Device::choose(options.device)? {
        Device::Cuda(n) if fused => n,
        Device::Gpus(several) if fused => several.as_slice()[0],
        _ => return Ok(None),
    };
    match gpu::unserved_tower(config) {
        None => Ok(Some(ordinal)),
        Some(why) => {
            progress.note(&format!(
                "the vision tower runs on the CPU: the GPU has no kernels for {why}"
            ));
            Ok(None)
        }
    }
}
