//! The model that MODEL names, with its adapters, and what commands say of it.

use crate::adapters::{self, adapt};
use crate::demo;
use crate::flags::Global;
use crate::library::Error;
pub use crate::names::{DEFAULT_ID, FoundModel, Stored, fetch, models_dir, stored_in};
use crate::names::{find, note_left_over, open_hub};
use anyhow::{Context, bail};
use nq_formats::adapter::Lora;
use nq_formats::exl3::VALUES;
use nq_formats::gguf::BlockType;
use nq_formats::import::exl3;
use nq_formats::{Checkpoint, Progress, Task, TensorEntry, human_bytes};
use nq_kernels::registry::WeightKind;
use nq_model::ModelConfig;
use nq_model::names::stack_name;
use nq_runtime::weights::{Kinds, weight_kinds};
use nq_runtime::{SamplingParams, SessionSpec};
use std::collections::BTreeMap;
use std::ffi::OsStr;

/// Opens the model given to a command, a path or a name; without one, the default model.
pub fn open<M: AsRef<OsStr> + ?Sized>(
    model: Option<&M>,
    global: &Global,
    progress: &dyn Progress,
) -> anyhow::Result<FoundModel> {
    let model = match model {
        Some(name) => Ok(find(name.as_ref(), global.offline, progress)?),
        None => open_default(global, progress),
    };
    let mut model = model?;
    let adapters = adapters::open(&mut model, &global.adapter_files()?)?;
    model.checkpoint = model.checkpoint.with_adapters(adapters)?;
    note_left_over(&model, progress);
    Ok(model)
}

/// A model that is run and not made into another.
pub(crate) struct ToRun {
    /// The model.
    pub model: FoundModel,
    /// Adapters beside its weights, which are quantized.
    pub beside: Vec<Lora>,
}

/// As [`open`], for a command that runs the model: adapters of a quantized one stay beside its weights.
pub(crate) fn open_to_run<M: AsRef<OsStr> + ?Sized>(
    model: Option<&M>,
    global: &Global,
    progress: &dyn Progress,
) -> anyhow::Result<ToRun> {
    let mut model = open(model, &global.without_adapters(), progress)?;
    let adapters = adapters::open(&mut model, &global.adapter_files()?)?;
    let (checkpoint, beside) = adapt(model.checkpoint, adapters)?;
    model.checkpoint = checkpoint;
    Ok(ToRun { model, beside })
}

/// The sampling settings that a model's `generation_config.json` says.
///
/// # Errors
/// If a setting is out of its range, with the file.
pub fn sampling(checkpoint: &Checkpoint) -> anyhow::Result<SamplingParams> {
    let defaults = SamplingParams::from_defaults(checkpoint.generation());
    defaults.validate().with_context(|| {
        let file = checkpoint.files().path("generation_config.json");
        file.display().to_string()
    })?;
    Ok(defaults)
}

/// The default model of `nq chat`: the quantized copy of the default model
/// in nq's folder (4 bits before 8), otherwise that of [`open`].
pub(crate) fn open_for_chat(global: &Global, progress: &dyn Progress) -> anyhow::Result<ToRun> {
    let name = DEFAULT_ID.rsplit('/').next().unwrap_or(DEFAULT_ID);
    for bits in [4, 8] {
        let copy = models_dir()?.join(format!("{name}-int{bits}"));
        if copy.exists() {
            return open_to_run(Some(&copy), global, progress);
        }
    }
    open_to_run::<OsStr>(None, global, progress)
}

/// Refuses an embedding model for a command that generates text.
pub(crate) fn check_writes(model: &FoundModel) -> anyhow::Result<()> {
    match model.checkpoint.task() {
        Task::Embed(_) => bail!(
            "{}: an embedding model, which generates no text; use `nq embed` or `nq serve`",
            model.source
        ),
        Task::Generate | Task::Rerank => Ok(()),
    }
}

/// What the weights of a model of shape `c`, whose matrices are of these kinds, take on a GPU; `None` in builds without
/// kernels for GPUs, and of models that these do not run.
pub(crate) fn bytes_on_gpu(c: &ModelConfig, kinds: Kinds<'_>) -> Option<u64> {
    let planner = nq_load::planner(true).ok()?;
    let planned = planner(c, kinds, &SessionSpec::of_one(1, 1)).ok()?;
    Some(planned.weights as u64)
}

/// What a checkpoint's weights take on a GPU, as [`bytes_on_gpu`]; `None` also if none is quantized.
pub(crate) fn quantized_on_gpu(checkpoint: &Checkpoint) -> Option<u64> {
    let config = checkpoint.config();
    let kinds = weight_kinds(config, checkpoint.store(), true).ok()?;
    let is_dense = |kind: &WeightKind| matches!(kind, WeightKind::Dense(_));
    match kinds.values().all(is_dense) {
        true => None,
        false => bytes_on_gpu(config, &|name| kinds[name]),
    }
}

/// Says of GGUF types that have no kernel, and of such codes of EXL3, what they run as, where that takes notably more
/// memory than the file.
pub(crate) fn note_growth(checkpoint: &Checkpoint, progress: &dyn Progress) {
    if checkpoint.store().format() == exl3::METHOD {
        let (stored, held) = expanded_exl3(checkpoint);
        if stored > 0 {
            progress.note(&format!(
                "EXL3's codes of 1, 1.5, 2.5 and 3.5 bits, and of experts that differ in bits or code within a layer, have no \
                 kernel and run as FP16: {} of them in files take {}",
                human_bytes(stored),
                human_bytes(held)
            ));
        }
    }
    let mut kinds: Vec<BlockType> = Vec::new();
    for entry in checkpoint.store().entries() {
        if let Some(kind) = BlockType::from_name(&entry.dtype)
            && !kinds.contains(&kind)
        {
            kinds.push(kind);
        }
    }
    let grown = kinds.into_iter().filter_map(|kind| {
        let layout = kind.layout()?;
        // Of which every device keeps codes and scales.
        if matches!(
            kind,
            BlockType::Q3_K | BlockType::Q4_K | BlockType::Q5_K | BlockType::Q6_K
        ) {
            return None;
        }
        let stored = 8.0 * kind.bytes() as f64 / kind.elements() as f64;
        let run = layout.bits_on_cpu();
        let on_gpu = layout.bits_on_gpu(kind.elements());
        let on_gpu = match on_gpu < run {
            true => format!(", on a GPU as {on_gpu:.2}"),
            false => String::new(),
        };
        (run > 1.3 * stored).then(|| format!("{kind} ({stored:.2}) as {run:.2}{on_gpu}"))
    });
    let grown: Vec<String> = grown.collect();
    if !grown.is_empty() {
        progress.note(&format!(
            "types without a kernel of their own run as 4- or 8-bit codes, in bits per weight: {}",
            grown.join(", ")
        ));
    }
}

/// Bytes of the codes of an EXL3 checkpoint that devices have no kernels for, and of their values in FP16.
fn expanded_exl3(checkpoint: &Checkpoint) -> (u64, u64) {
    let store = checkpoint.store();
    // Of a stack all experts are looked at.
    let mut have_kernels = BTreeMap::new();
    let without_kernel = |entry: TensorEntry| {
        let name = stack_name(entry.name.strip_suffix(exl3::TRELLIS)?);
        let tiles: usize = entry.shape.iter().take(2).product();
        let has_kernel = (have_kernels.entry(name.into_owned()))
            .or_insert_with_key(|name| store.scheme_in_levels(name).is_some());
        (!*has_kernel).then_some((entry.bytes, 2 * (tiles * VALUES) as u64))
    };
    let all = store.entries().into_iter().filter_map(without_kernel);
    all.fold((0, 0), |(a, b), (stored, held)| (a + stored, b + held))
}

fn open_default(global: &Global, progress: &dyn Progress) -> anyhow::Result<FoundModel> {
    let opened = open_hub(DEFAULT_ID, global.offline, progress);
    match opened.map_err(Error::into_format) {
        Err(Ok(e)) if e.is_unreachable() => Err(anyhow::Error::from(e).context(format!(
            "no MODEL was given, and the default, {DEFAULT_ID}, is not on this machine: with a \
             connection to the hub this command downloads it; without one, give a folder or file{}",
            match demo::files() {
                Some(_) => ", or `demo`, a small model that is built in",
                None => "",
            }
        ))),
        Ok(model) => Ok(model),
        Err(Ok(e)) => Err(e.into()),
        Err(Err(e)) => Err(e.into()),
    }
}
