//! What is asked of the memory of a GPU.

use super::adapters::AdapterWidths;
use super::part::GpuPart;
use super::weights::TrellisCodes;
use crate::bank::StageSizes;
use crate::{DeviceLinear, GpuInfo};
use nq_kernels::KernelSet;
use nq_model::ModelConfig;
use nq_runtime::interface::SessionSpec;

/// A model to be loaded, a session to be opened, or both, to be compared with the memory that the
/// driver has free.
#[derive(Clone, Copy)]
pub(super) struct MemoryRequest<'a> {
    /// The device.
    pub(super) info: &'a GpuInfo,
    /// Most sequences in a step.
    pub(super) together: usize,
    /// The model's shape.
    pub(super) config: &'a ModelConfig,
    /// Its kernels.
    pub(super) kernels: KernelSet,
    /// Its head, or memory reserved for it.
    pub(super) head: &'a DeviceLinear,
    /// The trellis codes that some of its weights are in.
    pub(super) trellis: TrellisCodes,
    /// True if some of its weights have sorted inputs.
    pub(super) sorted: bool,
    /// Most rows of steps that its kernels for few rows take.
    pub(super) few_rows: usize,
    /// Which part of a model it is.
    pub(super) part: Option<GpuPart>,
    /// Its adapters.
    pub(super) adapters: AdapterWidths,
    /// Stacks that a session's prompts make of experts in banks.
    pub(super) stage: Option<StageSizes>,
    /// Bytes of weights still to be loaded.
    pub(super) weights: usize,
    /// The session.
    pub(super) session: Option<&'a SessionSpec>,
    /// True if the session may become larger.
    pub(super) grows: bool,
}
