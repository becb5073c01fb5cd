//! From weights to a running engine.

use crate::candle::CandleEngine;
use crate::cpu::{CpuEngine, CpuStepper};
#[cfg(feature = "cuda")]
use crate::cuda::CudaEngine;
use crate::device::Device;
use crate::engine::{Engine, LayerStepper};
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::Result;
use crate::weights::bits;
use nq_formats::{ModelConfig, Progress, Weight, WeightStore};
use nq_kernels::cpu::{IsaChoice, KvType};
use nq_kernels::{Activations, KernelSet};
use std::sync::Arc;

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
    /// Per weight: int8 for 4-bit weights that have such kernels, f32 for others.
    #[default]
    Auto,
    /// No rounding.
    F32,
    /// Signed 8-bit codes with a scale per group of 32 inputs, for all quantized weights.
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

/// Loads a model: reads every weight from `store`, repacks it for the device and reports
/// progress in bytes. `store` may be a checkpoint or anything that makes weights.
///
/// # Errors
/// A missing or misshapen tensor, a weight that no kernel serves, an absent device or
/// instruction set; each says which.
pub fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    if options.engine == EngineKind::Candle {
        let engine = CandleEngine::load(config, store, options, progress)?;
        return Ok(Arc::new(engine));
    }
    match options.device.resolve()? {
        Device::Cpu => Ok(Arc::new(CpuEngine::load(config, store, options, progress)?)),
        #[cfg(feature = "cuda")]
        Device::Cuda(n) => Ok(Arc::new(CudaEngine::load(
            config, store, options, n, progress,
        )?)),
    }
}

/// The forward one layer at a time, for weights that arrive layer by layer. Keys and values
/// are rounded to `kv`.
///
/// # Errors
/// An absent device or instruction set.
pub fn stepper(
    config: &ModelConfig,
    options: &LoadOptions,
    kv: KvType,
) -> Result<Box<dyn LayerStepper>> {
    match options.device.resolve()? {
        Device::Cpu => Ok(Box::new(CpuStepper::new(config, options, kv)?)),
        #[cfg(feature = "cuda")]
        Device::Cuda(n) if options.device == DeviceChoice::Cuda(n) => Err(Error::Device {
            device: format!("cuda:{n}"),
            why: "quantizing layer by layer runs on the CPU (--device cpu)".into(),
        }),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Ok(Box::new(CpuStepper::new(config, options, kv)?)),
    }
}

impl ActivationChoice {
    /// What the input of the stacked `parts` is rounded to, where the device has kernels for
    /// what `supports` says. Unquantized weights take unrounded inputs whatever is asked for.
    ///
    /// `Auto` rounds for 4-bit weights: the product then runs in integers, at several times
    /// the speed, and adds an error far below that of the weights.
    pub fn resolve(
        self,
        parts: &[&Weight],
        supports: impl Fn(&Weight, Activations) -> bool,
    ) -> Activations {
        let int8 = Activations::Int8 { group: 32 };
        let dense = parts.iter().any(|w| matches!(w, Weight::Dense(_)));
        let rounded = match self {
            ActivationChoice::F32 => false,
            ActivationChoice::Int8 => !dense,
            ActivationChoice::Auto => {
                parts.iter().any(|w| bits(w) == 4) && parts.iter().all(|w| supports(w, int8))
            }
        };
        if rounded { int8 } else { Activations::F32 }
    }
}
