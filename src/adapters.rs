//! Adapters of a model that is run: merged into one that is not quantized, beside the weights of one that is.

use nq_formats::adapter::{Adapter, Lora};
use nq_formats::{Checkpoint, Progress};
use nq_load::device::Device;
use nq_runtime::{AppliedAdapter, Engine, LoadOptions};
use std::sync::Arc;

/// The model with `adapters` merged into it or, if its weights are quantized, what is to be beside them.
///
/// # Errors
/// An adapter of another model; two that cannot be together; one that can only be merged, if the model is quantized.
pub fn adapt(
    checkpoint: Checkpoint,
    adapters: Vec<Adapter>,
) -> nq_formats::Result<(Checkpoint, Vec<Lora>)> {
    if checkpoint.store().quantization().is_none() {
        return Ok((checkpoint.with_adapters(adapters)?, Vec::new()));
    }
    let lora = |adapter: &Adapter| adapter.lora(checkpoint.config());
    let beside = adapters.iter().map(lora).collect::<Result<_, _>>()?;
    Ok((checkpoint, beside))
}

/// Refuses adapters beside a model's weights on a device that does not have them, before anything is loaded.
///
/// # Errors
/// A GPU.
pub fn check_device(options: &LoadOptions) -> nq_runtime::Result<()> {
    match Device::choose(options.device)? {
        Device::Cpu => Ok(()),
        device => Err(nq_runtime::Error::no_adapters(&device.to_string())),
    }
}

/// Loads a model, with all of `beside` added to whatever it computes.
///
/// # Errors
/// Errors of loading; adapters on a GPU.
pub fn load(
    checkpoint: &Checkpoint,
    beside: &[Lora],
    options: &LoadOptions,
    progress: &dyn Progress,
) -> nq_runtime::Result<Arc<dyn Engine>> {
    let (config, store) = (checkpoint.config(), checkpoint.store());
    if beside.is_empty() {
        return nq_load::load(config, store, options, progress);
    }
    check_device(options)?;
    let engine = nq_load::load(config, store, options, progress)?;
    self::beside(engine.as_ref(), beside)
}

/// The engine's model, with all of `loras` added to whatever it computes.
///
/// # Errors
/// A device that does not have adapters.
pub fn beside(engine: &dyn Engine, loras: &[Lora]) -> nq_runtime::Result<Arc<dyn Engine>> {
    let applied = |adapter| AppliedAdapter {
        adapter,
        scale: 1.0,
    };
    let applied: Vec<AppliedAdapter> = (0..loras.len()).map(applied).collect();
    engine.with_adapters(loras, &applied)
}
