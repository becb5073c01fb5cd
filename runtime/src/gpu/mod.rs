//! What loading and quantizing ask of a GPU. A build without the feature `cuda` has the same
//! functions, which say that there is none.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod present;

#[cfg(not(feature = "cuda"))]
use absent as here;
#[cfg(feature = "cuda")]
use present as here;

use crate::engine::{Engine, SessionSpec};
use crate::error::Result;
use crate::load::LoadOptions;
use crate::stepper::LayerStepper;
use nq_formats::{ModelConfig, Progress, WeightStore};
use nq_kernels::grad::GradWork;
use nq_kernels::second_order::Moments;
use std::sync::Arc;

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// Not held by anyone.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

/// What work takes of a GPU's memory, by shapes alone.
#[derive(Clone, Copy, Debug)]
pub struct GpuSizes {
    /// Sequences, at most, of one step.
    pub together: usize,
    /// Bytes of a session, beside its model's weights.
    pub session: fn(&ModelConfig, &SessionSpec) -> usize,
    /// Bytes that factoring the second moments of so many inputs takes, beside the result.
    pub factor: fn(usize) -> usize,
}

/// GPUs of the machine; at least one.
///
/// # Errors
/// Why there is none, in words.
pub(crate) fn count() -> Result<usize, String> {
    here::count()
}

/// The engine of GPU `ordinal`.
pub(crate) fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    ordinal: usize,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    here::load(config, store, options, ordinal, progress)
}

/// The layer stepper of GPU `ordinal`, in f32, which passes up to `rows` rows through a layer at
/// once, a sequence at least.
pub(crate) fn stepper(
    config: &ModelConfig,
    ordinal: usize,
    rows: usize,
) -> Result<Box<dyn LayerStepper>> {
    here::stepper(config, ordinal, rows)
}

/// Memory of GPU `ordinal`.
///
/// # Errors
/// [`crate::Error::Device`]; the driver's.
pub fn memory(ordinal: usize) -> Result<GpuMemory> {
    here::memory(ordinal)
}

/// How much memory work takes.
///
/// # Errors
/// [`crate::Error::Device`] in a build that uses no GPU.
pub fn sizes() -> Result<GpuSizes> {
    here::sizes()
}

/// Does `work` on GPU `ordinal`, whose products of f32 round operands to TF32.
///
/// # Errors
/// As [`memory`].
pub fn run<W: GradWork>(ordinal: usize, work: W) -> Result<W::Output> {
    here::run(ordinal, work)
}

/// The second moments `values` `[n, n]` of `n` inputs, taken to GPU `ordinal`.
///
/// # Errors
/// As [`memory`].
pub fn moments(ordinal: usize, values: &[f32], n: usize) -> Result<Arc<dyn Moments>> {
    here::moments(ordinal, values, n)
}

/// Forgets the peak of [`peak_use`]: it begins with what is held now.
pub fn begin_use() {
    here::begin_use();
}

/// Bytes of GPUs' memory that this process held at most since [`begin_use`].
pub fn peak_use() -> u64 {
    here::peak_use()
}
