//! From weights to a running engine.

use nq_kernels::KernelSet;
use nq_kernels::cpu::IsaChoice;

/// Which device to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first usable GPU, else the CPU; which and why is said.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this ordinal, or an error.
    Cuda(usize),
}

/// What Linears round their inputs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationChoice {
    /// Per weight: int8 for 4-bit weights; for others what measures best.
    #[default]
    Auto,
    /// No rounding.
    F32,
    /// Signed 8-bit codes with a scale per group of 32 inputs.
    Int8,
}

/// Which implementation runs the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// nq's own.
    #[default]
    Nq,
    /// candle-transformers: the baseline; unquantized models on the CPU only.
    Candle,
}

/// How to place a model on a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// Device.
    pub device: DeviceChoice,
    /// Implementation.
    pub engine: EngineKind,
    /// CPU threads; `None`: one per physical core.
    pub threads: Option<usize>,
    /// CPU instruction set.
    pub isa: IsaChoice,
    /// Rounding of Linear inputs.
    pub activations: ActivationChoice,
    /// Family of kernels.
    pub kernels: KernelSet,
}
