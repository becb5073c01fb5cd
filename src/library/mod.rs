//! The interface for programs, and what it has in common with the command line.

mod adapted;
mod chat;
pub(crate) mod error;
mod model;
mod reading;
mod target;

pub use crate::adapters::AdapterFile;
pub use chat::Chat;
pub use error::{Error, ErrorKind, Result};
pub use model::{Model, OpenOptions};
pub use reading::{Embedder, Reranker};
#[cfg(feature = "cli")]
pub(crate) use reading::{LONGEST_TEXT, session_for_texts};

use crate::adapters;
use crate::names;
use nq_formats::{Progress, Task};
use nq_load::device::Device;
use nq_load::gpu;
use nq_model::ModelConfig;
use nq_quantize::{Job, QuantizeOptions, QuantizeReport, Recipe};
use nq_runtime::{DeviceChoice, LoadOptions};
use std::path::{Path, PathBuf};
pub(crate) use target::QuantizeTarget;

/// An unquantized model, named as [`Model::open`] takes it, and the adapters that are merged into it first.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeSource<'a> {
    /// A folder, file or name.
    pub name: &'a Path,
    /// Adapters.
    pub adapters: &'a [AdapterFile],
}

impl<'a, P: AsRef<Path> + ?Sized> From<&'a P> for QuantizeSource<'a> {
    fn from(name: &'a P) -> Self {
        QuantizeSource {
            name: name.as_ref(),
            adapters: &[],
        }
    }
}

/// Quantizes `source` into the folder or file `out` as `nq quantize` does, and measures the result against the source.
/// Bits, such as [`Bits::B4`](nq_formats::Bits::B4), are a recipe.
///
/// # Errors
/// Those of [`quantize_with`].
pub fn quantize<'a>(
    source: impl Into<QuantizeSource<'a>>,
    out: impl Into<PathBuf>,
    recipe: impl Into<Recipe>,
) -> Result<QuantizeReport> {
    quantize_with(source, out, recipe, |_| {}, &())
}

/// Like [`quantize`], with options that `change` has changed; `progress` hears of the stages.
///
/// # Errors
/// A source that cannot be read or is quantized already, an output that exists (unless
/// [`QuantizeOptions::force`] is set), options that do not fit the model, a quality that misses
/// [`QuantizeOptions::limits`]; errors of the device and the disk.
pub fn quantize_with<'a>(
    source: impl Into<QuantizeSource<'a>>,
    out: impl Into<PathBuf>,
    recipe: impl Into<Recipe>,
    change: impl FnOnce(&mut QuantizeOptions),
    progress: &dyn Progress,
) -> Result<QuantizeReport> {
    let QuantizeSource { name, adapters } = source.into();
    let mut model = names::find(name.as_os_str(), false, progress)?;
    let opened = adapters::open(&mut model, adapters)?;
    model.checkpoint = model.checkpoint.with_adapters(opened)?;
    names::note_left_over(&model, progress);
    check_quantizable(&model)?;
    let config = model.checkpoint.config();
    let recipe = recipe.into();
    let mut target = QuantizeTarget {
        format: recipe.format,
        out: out.into(),
        force: false,
    };
    let mut options = QuantizeOptions::new(config, recipe, target.folder())?;
    options.source = adapters::record(&model, adapters)?;
    change(&mut options);
    target.force = options.force;
    if let Some(cost) = target.check(&model.checkpoint, &options.schemes)? {
        progress.note(&cost);
    }
    place(config, &mut options.load, progress)?;
    if let Some(parent) = options.out.parent() {
        std::fs::create_dir_all(parent)
            .map_err(|cause| nq_formats::Error::io(parent, "create", cause))?;
    }
    let mut report = Job::new(&model.checkpoint, &options, progress)?.run()?;
    target.write(&mut report, progress)?;
    Ok(report)
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
