//! Adapters of a model that is run: merged into one that is not quantized, beside the weights of one that is.

use crate::names::FoundModel;
use nq_formats::adapter::{Adapter, Lora};
use nq_formats::nq::SourceRecord;
use nq_formats::{Checkpoint, Progress};
use nq_load::device::Device;
use nq_runtime::{AppliedAdapter, Engine, LoadOptions};
use std::path::PathBuf;
use std::sync::Arc;

/// A LoRA adapter.
#[derive(Clone, Debug)]
pub struct AdapterFile {
    /// PEFT's folder, or a GGUF file.
    pub path: PathBuf,
    /// What multiplies it.
    pub weight: f64,
}

/// Opens the adapters in `files`, which the model's source then names.
///
/// # Errors
/// Files that cannot be read or hold no adapter.
pub(crate) fn open(
    model: &mut FoundModel,
    files: &[AdapterFile],
) -> nq_formats::Result<Vec<Adapter>> {
    let mut adapters = Vec::new();
    for AdapterFile { path, weight } in files {
        adapters.push(Adapter::open(path, *weight)?);
        let place = path.canonicalize().unwrap_or_else(|_| path.clone());
        model.source = format!("{} with {weight} x {}", model.source, place.display());
    }
    Ok(adapters)
}

/// The record of a model that is quantized with the adapters in `files`. It has their hashes: work is resumed only with
/// the same ones.
///
/// # Errors
/// Files that cannot be read.
pub(crate) fn record(
    model: &FoundModel,
    files: &[AdapterFile],
) -> nq_formats::Result<SourceRecord> {
    let mut name = model.source.clone();
    for file in files {
        name += &format!(" (sha256 {})", Adapter::sha256(&file.path)?);
    }
    Ok(SourceRecord {
        name,
        ..SourceRecord::default()
    })
}

/// The model with `adapters` merged into it or, if its weights are quantized, what is to be beside them.
///
/// # Errors
/// An adapter of another model; two that cannot be together; one that can only be merged, if the model is quantized.
pub(crate) fn adapt(
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
/// Several GPUs, or one over `wgpu`.
pub(crate) fn check_device(options: &LoadOptions) -> nq_runtime::Result<()> {
    match Device::choose(options.device)? {
        Device::Cpu | Device::Cuda(_) => Ok(()),
        device @ (Device::Gpus(_) | Device::Wgpu(_)) => {
            Err(nq_runtime::Error::no_adapters(&device.to_string()))
        }
    }
}

/// Loads a model, with all of `beside` added to whatever it computes.
///
/// # Errors
/// Errors of loading; adapters that the device computes merged only.
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
/// Adapters that the device computes merged only.
pub fn beside(engine: &dyn Engine, loras: &[Lora]) -> nq_runtime::Result<Arc<dyn Engine>> {
    let applied = |adapter| AppliedAdapter {
        adapter,
        scale: 1.0,
    };
    let applied: Vec<AppliedAdapter> = (0..loras.len()).map(applied).collect();
    engine.with_adapters(loras, &applied)
}
