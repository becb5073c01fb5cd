//! The interface for programs, and what it has in common with the command line.

mod adapted;
mod chat;
pub(crate) mod error;
mod model;
mod reading;

pub use adapted::AdapterFile;
pub use chat::Chat;
pub use error::{Error, ErrorKind, Result};
pub use model::{Model, OpenOptions};
pub use reading::{Embedder, Reranker};
#[cfg(feature = "cli")]
pub(crate) use reading::{LONGEST_TEXT, session_for_texts};

use crate::names;
use nq_formats::{Progress, Task};
use nq_load::device::Device;
use nq_load::gpu;
use nq_model::ModelConfig;
use nq_quantize::{Codes, Job, QuantizeOptions, QuantizeReport};
use nq_runtime::{DeviceChoice, LoadOptions};
use std::path::{Path, PathBuf};

/// Quantizes the unquantized model `source`, a folder, file or name as [`Model::open`] takes, into the folder `out`
/// as `nq quantize --bits BITS` does, with `--trellis` for trellis codes, and measures the result against the source.
pub fn quantize(
    source: impl AsRef<Path>,
    out: impl Into<PathBuf>,
    codes: impl Into<Codes>,
) -> Result<QuantizeReport> {
    quantize_with(source, out, codes, |_| {}, &())
}

/// Like [`quantize`], with options that `change` has changed; `progress` hears of the stages.
///
/// # Errors
/// A source that cannot be read or is quantized already, an output that exists (unless
/// [`QuantizeOptions::force`] is set), options that do not fit the model, a quality that misses
/// [`QuantizeOptions::limits`]; errors of the device and the disk.
pub fn quantize_with(
    source: impl AsRef<Path>,
    out: impl Into<PathBuf>,
    codes: impl Into<Codes>,
    change: impl FnOnce(&mut QuantizeOptions),
    progress: &dyn Progress,
) -> Result<QuantizeReport> {
    let model = names::find(source.as_ref().as_os_str(), false, progress)?;
    names::note_left_over(&model, progress);
    check_quantizable(&model)?;
    let config = model.checkpoint.config();
    let mut options = QuantizeOptions::new(config, codes, out)?;
    options.source.name.clone_from(&model.source);
    change(&mut options);
    place(config, &mut options.load, progress)?;
    if let Some(parent) = options.out.parent() {
        std::fs::create_dir_all(parent)
            .map_err(|cause| nq_quantize::Error::io(parent, "create", cause))?;
    }
    Ok(Job::new(&model.checkpoint, &options, progress)?.run()?)
}

/// Refuses a model that generates no text.
///
/// # Errors
/// [`ErrorKind::Unsuited`].
pub(crate) fn check_quantizable(model: &names::FoundModel) -> Result<()> {
    match model.checkpoint.task() {
        Task::Embed(_) => Err(Error::unsuited(format!(
            "{}: an embedding model, which cannot generate the text that calibration and quality \
             measurements need; use `--bits 4` or `8` of `nq embed` and `nq serve`, which quantize at load",
            model.source
        ))),
        Task::Generate | Task::Rerank => Ok(()),
    }
}

/// Chooses the CPU for quantizing a model with recurrences whose sizes no GPU serves, if a device may be chosen.
///
/// # Errors
/// Errors of looking for a device.
pub(crate) fn place(
    config: &ModelConfig,
    load: &mut LoadOptions,
    progress: &dyn Progress,
) -> Result<()> {
    if config.delta.is_some()
        && load.device == DeviceChoice::Auto
        && Device::choose(load.device)? != Device::Cpu
        && let Err(why) = gpu::check(config)
    {
        progress.note(&format!("quantized on the CPU: {why}"));
        load.device = DeviceChoice::Cpu;
    }
    Ok(())
}
