//! Resolves MODEL: `demo`, a folder or file, a name in nq's model folder, or a hub id.

use crate::demo;
use crate::flags::{AdapterArg, Global};
use anyhow::{Context, bail};
use nq_formats::account;
use nq_formats::adapter::Adapter;
use nq_formats::gguf::BlockType;
use nq_formats::hub::{Hub, HubId, HubOptions};
use nq_formats::names::{Shape, parameters};
use nq_formats::{Checkpoint, Progress, Task, human_bytes};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The default model of commands.
pub const DEFAULT_ID: &str = "Qwen/Qwen3-0.6B";

/// The model given to a command.
pub struct Model {
    /// A short name, usable for a folder: `demo`, `Qwen3-0.6B`.
    pub name: String,
    /// Where it came from, for records: a path, a hub id or `demo`.
    pub source: String,
    /// The opened checkpoint.
    pub checkpoint: Checkpoint,
}

/// The folder that `nq quantize` writes to and `nq list` shows: `NQ_HOME/models`, otherwise
/// `XDG_DATA_HOME/nq/models`, otherwise `~/.local/share/nq/models`.
pub fn models_dir() -> anyhow::Result<PathBuf> {
    let var = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    if let Some(home) = var("NQ_HOME") {
        return Ok(home.join("models"));
    }
    let data = match var("XDG_DATA_HOME") {
        Some(dir) => dir,
        None => var("HOME")
            .context("no place for models: set HOME, XDG_DATA_HOME or NQ_HOME")?
            .join(".local/share"),
    };
    Ok(data.join("nq/models"))
}

/// Opens the model given to a command, a path or a name; without one, the default model.
pub fn open<M: AsRef<OsStr> + ?Sized>(
    model: Option<&M>,
    global: &Global,
    progress: &dyn Progress,
) -> anyhow::Result<Model> {
    let model = match model {
        Some(name) => open_named(name.as_ref(), global, progress),
        None => open_default(global, progress),
    };
    let mut model = model?;
    note_left_over(&model, progress);
    let mut adapters = Vec::new();
    for AdapterArg { path, weight } in &global.adapters {
        adapters.push(Adapter::open(path, *weight)?);
        let place = path.canonicalize().unwrap_or_else(|_| path.clone());
        model.source = format!("{} with {weight} x {}", model.source, place.display());
    }
    model.checkpoint = model.checkpoint.with_adapters(adapters)?;
    Ok(model)
}

/// Says once what the model's files hold and nq does not use.
fn note_left_over(model: &Model, progress: &dyn Progress) {
    for line in account::lines(model.checkpoint.left_over()) {
        progress.note(&format!("{}: not used: {line}", model.name));
    }
}

/// The default model of `nq chat`: the quantized copy of the default model
/// in nq's folder (4 bits before 8), otherwise that of [`open`].
pub fn open_for_chat(global: &Global, progress: &dyn Progress) -> anyhow::Result<Model> {
    let name = DEFAULT_ID.rsplit('/').next().unwrap_or(DEFAULT_ID);
    for bits in [4, 8] {
        let copy = models_dir()?.join(format!("{name}-int{bits}"));
        if copy.exists() {
            return open(Some(&copy), global, progress);
        }
    }
    open::<OsStr>(None, global, progress)
}

fn open_named(model: &OsStr, global: &Global, progress: &dyn Progress) -> anyhow::Result<Model> {
    if model == demo::LABEL {
        return open_demo();
    }
    let path = Path::new(model);
    // A file that exists but is inaccessible is not a hub id.
    match path.symlink_metadata() {
        Ok(_) => return open_path(path),
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
            return Err(e).with_context(|| path.display().to_string());
        }
        Err(_) => {}
    }
    // Names on the hub and in nq's folder are text.
    let model = &*model.to_string_lossy();
    let own = models_dir()?.join(model);
    if !model.is_empty() && !model.contains(['/', '\\']) && own.exists() {
        return open_path(&own);
    }
    if let Some(id) = published(model) {
        progress.note(&format!("{model} is {id} on the hub"));
        return open_hub(&id, global, progress);
    }
    if HubId::parse(model).is_none() {
        bail!(
            "no model {model:?}: it is neither `demo`, a folder or file, a name in {}, nor a hub \
             id such as {DEFAULT_ID}{}",
            models_dir()?.display(),
            match alike(model)? {
                Some(name) => format!("; did you mean {name}?"),
                None => String::new(),
            }
        );
    }
    open_hub(model, global, progress)
}

/// Models that their makers publish under `Qwen/`.
const PUBLISHED: [&str; 16] = [
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-4B",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
    "Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-Embedding-0.6B",
    "Qwen3-Embedding-4B",
    "Qwen3-Embedding-8B",
    "Qwen3-Reranker-0.6B",
    "Qwen3-Reranker-4B",
    "Qwen3-Reranker-8B",
    "Qwen3-4B-Instruct-2507",
];

/// The hub id of a model that goes by its bare name, or by its name in ollama: `Qwen3-0.6B`, `qwen3:0.6b`.
fn published(name: &str) -> Option<String> {
    let name = name.to_lowercase().replace(':', "-");
    let begins = |p: &str| p.to_lowercase().starts_with(&format!("{name}-a"));
    let same = PUBLISHED.iter().find(|p| p.to_lowercase() == name);
    let found = same.or_else(|| PUBLISHED.iter().find(|p| begins(p)))?;
    Some(format!("Qwen/{found}"))
}

/// The name most similar to `model`, of those in nq's folder and `demo`, if any.
fn alike(model: &str) -> anyhow::Result<Option<String>> {
    let entries = std::fs::read_dir(models_dir()?).into_iter().flatten();
    let own = entries
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok());
    let names = own.chain([demo::LABEL.to_owned()]);
    let distance =
        |name: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &model.to_lowercase());
    let nearest = names.map(|n| (distance(&n), n)).min();
    Ok(nearest
        .filter(|(d, name)| *d <= 1 + name.len() / 5)
        .map(|(_, name)| name))
}

/// Refuses an embedding model for a command that generates text.
pub fn check_writes(model: &Model) -> anyhow::Result<()> {
    match model.checkpoint.task() {
        Task::Embed(_) => bail!(
            "{}: an embedding model, which generates no text; use `nq embed` or `nq serve`",
            model.source
        ),
        Task::Generate | Task::Rerank => Ok(()),
    }
}

/// Says of GGUF types that have no kernel what they run as, where that takes notably more memory than
/// the file.
pub fn note_growth(checkpoint: &Checkpoint, progress: &dyn Progress) {
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
        let stored = 8.0 * kind.bytes() as f64 / kind.elements() as f64;
        let parts = if layout.offsets { 2.0 } else { 1.0 };
        let run = layout.bits.width() as f64 + 16.0 * parts / f64::from(layout.group);
        (run > 1.3 * stored).then(|| format!("{kind} ({stored:.2}) as {run:.2}"))
    });
    let grown: Vec<String> = grown.collect();
    if !grown.is_empty() {
        progress.note(&format!(
            "types without a kernel of their own run as 4- or 8-bit codes, in bits per weight: {}",
            grown.join(", ")
        ));
    }
}

/// How a GPU holds codes that its kernels do not read in their own width, and the memory that takes;
/// `None` if all of nq's own weights are held in their own.
pub fn held_otherwise(checkpoint: &Checkpoint) -> Option<String> {
    let (mut stored, mut held, mut widths) = (0, 0, BTreeMap::new());
    for (name, shape) in parameters(checkpoint.config()) {
        let (Shape::Matrix(rows, cols), Some(scheme)) = (shape, checkpoint.store().scheme(&name))
        else {
            continue;
        };
        stored += scheme.bytes(rows, cols) as u64;
        held += scheme.held_on_gpu().bytes(rows, cols) as u64;
        if scheme.held_on_gpu().bits != scheme.bits {
            widths.insert(scheme.bits.width(), scheme.held_on_gpu().bits.width());
        }
    }
    let words = widths
        .iter()
        .map(|(stored, held)| format!("{stored} bits held as {held}"));
    let words: Vec<String> = words.collect();
    (!words.is_empty()).then(|| {
        let (stored, held) = (human_bytes(stored), human_bytes(held));
        format!("{}, {stored} of weights as {held}", words.join(", "))
    })
}

/// The path of the hub's model `id`, downloaded unless the cache has it.
///
/// # Errors
/// If the name is not a hub id; errors of the download.
pub fn fetch(id: &str, global: &Global, progress: &dyn Progress) -> anyhow::Result<PathBuf> {
    let mut options = HubOptions::from_env();
    options.offline |= global.offline;
    Ok(Hub::new(options).fetch_model(id, progress)?)
}

fn open_hub(id: &str, global: &Global, progress: &dyn Progress) -> anyhow::Result<Model> {
    let path = fetch(id, global, progress)?;
    // In the cache, a file's real name is its hash; the id has its usual name.
    let name = HubId::parse(id).map_or_else(|| id.to_owned(), |id| id.name());
    Ok(Model {
        name,
        source: id.into(),
        checkpoint: Checkpoint::open(&path)?,
    })
}

fn open_default(global: &Global, progress: &dyn Progress) -> anyhow::Result<Model> {
    match open_hub(DEFAULT_ID, global, progress) {
        Err(e) if is_unreachable(&e) => Err(e.context(format!(
            "no MODEL was given, and the default, {DEFAULT_ID}, is not on this machine: with a \
             connection to the hub this command downloads it; without one, give a folder or file{}",
            match demo::files() {
                Some(_) => ", or `demo`, a small model that is built in",
                None => "",
            }
        ))),
        result => result,
    }
}

fn is_unreachable(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<nq_formats::Error>()
        .is_some_and(nq_formats::Error::is_unreachable)
}

fn open_demo() -> anyhow::Result<Model> {
    let files = demo::files()
        .context(concat!(
        "this build has no demo model: it was built without the feature `demo`, or from the published \
         crate, which leaves the model out; the folder assets/demo of ",
        env!("CARGO_PKG_REPOSITORY"),
        " holds it"
    ))?;
    let checkpoint = Checkpoint::open_files(files)?;
    Ok(Model {
        name: demo::LABEL.into(),
        source: demo::LABEL.into(),
        checkpoint,
    })
}

fn open_path(path: &Path) -> anyhow::Result<Model> {
    let checkpoint = Checkpoint::open(path)?;
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = absolute
        .file_stem()
        .filter(|_| absolute.is_file())
        .or(absolute.file_name())
        .unwrap_or(path.as_os_str());
    Ok(Model {
        name: name.to_string_lossy().into_owned(),
        source: absolute.display().to_string(),
        checkpoint,
    })
}

#[cfg(test)]
mod tests {
    use super::published;

    #[test]
    fn names_from_elsewhere_are_known() {
        for (name, id) in [
            ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
            ("qwen3:30b", "Qwen/Qwen3-30B-A3B"),
            ("qwen3-embedding:4b", "Qwen/Qwen3-Embedding-4B"),
        ] {
            assert_eq!(published(name).as_deref(), Some(id), "{name}");
        }
        for name in ["qwen3", "qwen3:7b", "Qwen/Qwen3-0.6B", "llama3:8b", ""] {
            assert_eq!(published(name), None, "{name}");
        }
    }
}
