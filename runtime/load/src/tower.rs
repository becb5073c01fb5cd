//! The tower of a model that sees.

use nq_cpu::CpuTower;
use nq_formats::{Checkpoint, Progress};
use nq_runtime::Result;
use nq_runtime::interface::{LoadOptions, Tower};
use std::sync::Arc;

/// Loads the tower of a model, on the CPU whatever the device of its text model; `None` for a model that reads text
/// alone.
///
/// # Errors
/// A missing or misshapen tensor; an instruction set that the CPU lacks.
pub fn tower(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Option<Arc<dyn Tower>>> {
    let Some(config) = checkpoint.vision() else {
        return Ok(None);
    };
    let tower = CpuTower::load(config, checkpoint.store(), options, progress)?;
    Ok(Some(Arc::new(tower)))
}
