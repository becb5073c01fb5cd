//! Finds the model that a name means: `demo`, a folder or file, a name in nq's model folder, or a hub id.

use crate::demo;
use crate::library::error::{Error, Result};
use nq_formats::files::CONFIG;
use nq_formats::hub::{Hub, HubId, HubOptions};
use nq_formats::{Checkpoint, Files, Progress, gguf, left_over};
use nq_model::Preset;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Names and places of a model that was found.
pub struct FoundModel {
    /// A short name, usable for a folder: `demo`, `Qwen3-0.6B`.
    pub name: String,
    /// Where it came from, for records: a path, a hub id or `demo`.
    pub source: String,
    /// The opened checkpoint.
    pub checkpoint: Checkpoint,
}

/// A model of the hub that is small, to name in messages, and the default of commands.
pub const DEFAULT_ID: &str = "Qwen/Qwen3-0.6B";

/// The folder that `nq quantize` writes to and `nq list` shows: `NQ_HOME/models`, otherwise
/// `XDG_DATA_HOME/nq/models`, otherwise `~/.local/share/nq/models`.
///
/// # Errors
/// [`ErrorKind::NoModel`](crate::ErrorKind) if none of these variables is set.
pub fn models_dir() -> Result<PathBuf> {
    own_dir("models", "XDG_DATA_HOME", ".local/share")
}

/// The folder for what can be computed again: `NQ_HOME/cache`, otherwise `XDG_CACHE_HOME/nq/cache`, otherwise
/// `~/.cache/nq/cache`.
///
/// # Errors
/// [`ErrorKind::NoModel`](crate::ErrorKind) if none of these variables is set.
#[cfg(feature = "cli")]
pub(crate) fn cache_dir() -> Result<PathBuf> {
    own_dir("cache", "XDG_CACHE_HOME", ".cache")
}

/// A folder in that of nq: `NQ_HOME`, otherwise the folder `nq` in that of the variable `xdg`, otherwise in `usual` of the
/// home folder.
fn own_dir(name: &str, xdg: &str, usual: &str) -> Result<PathBuf> {
    let var = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    if let Some(home) = var("NQ_HOME") {
        return Ok(home.join(name));
    }
    let base = var(xdg).or_else(|| Some(var("HOME")?.join(usual)));
    let base = base.ok_or_else(|| {
        Error::no_model(format!("no place for {name}: set HOME, {xdg} or NQ_HOME"))
    })?;
    Ok(base.join("nq").join(name))
}

/// Opens the model that `model` names; `offline` keeps it from using the network.
///
/// # Errors
/// [`ErrorKind::NoModel`](crate::ErrorKind) if nothing goes by that name; errors of the download and of reading the files.
pub fn find(model: &OsStr, offline: bool, progress: &dyn Progress) -> Result<FoundModel> {
    if model == demo::LABEL {
        return open_demo();
    }
    let path = Path::new(model);
    // A file that exists but is inaccessible is not a hub id.
    match path.symlink_metadata() {
        Ok(_) => return open_path(path),
        Err(cause) if cause.kind() == std::io::ErrorKind::PermissionDenied => {
            let (path, action) = (path.to_owned(), "open");
            return Err(nq_formats::Error::Io {
                path,
                action,
                cause,
            }
            .into());
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
        return open_hub(&id, offline, progress);
    }
    if HubId::parse(model).is_none() {
        return Err(Error::no_model(format!(
            "no model {model:?}: it is neither `demo`, a folder or file, a name in {}, nor a hub \
             id such as {DEFAULT_ID}{}",
            models_dir()?.display(),
            match alike(model)? {
                Some(name) => format!("; did you mean {name}?"),
                None => String::new(),
            }
        )));
    }
    // Whoever means a folder is told first that there is none.
    open_hub(model, offline, progress).map_err(|e| match e.into_format() {
        Ok(nq_formats::Error::Hub {
            what,
            problem,
            detail,
        }) => nq_formats::Error::Hub {
            what: format!("there is no folder or file {model} here; as a hub id, {what}"),
            problem,
            detail,
        }
        .into(),
        Ok(other) => other.into(),
        Err(other) => other,
    })
}

/// Hub ids of models that are no presets, or whose names are not those of their presets.
#[rustfmt::skip]
const PUBLISHED: [&str; 20] = [
    "Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B",
    "Qwen/Qwen3-Embedding-8B", "Qwen/Qwen3-Reranker-0.6B", "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3-Reranker-8B",
    "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-32B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-3B-Instruct",
    "Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-14B-Instruct", "Qwen/Qwen2.5-Coder-32B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
];

/// Who publishes GGUF files of a model, as `OWNER/NAME-GGUF`.
const GGUF_OWNER: &str = "unsloth";

/// The hub id of a model that goes by its bare name, or by its name in ollama: `Qwen3-0.6B`, `qwen3:0.6b`, `llama3.2:3b`;
/// with a kind of GGUF file behind it, that of such a file: `qwen3:0.6b:q4_K_M`, `qwen3:0.6b-q4_K_M`.
pub(crate) fn published(name: &str) -> Option<String> {
    if let Some(id) = whole(name) {
        return Some(id.to_owned());
    }
    let split = |sign| {
        let (model, kind) = name.rsplit_once(sign)?;
        Some((whole(model)?, kind)).filter(|_| is_kind(kind))
    };
    let (id, kind): (&str, &str) = split(':').or_else(|| split('-'))?;
    Some(format!(
        "{GGUF_OWNER}/{}-GGUF:{}",
        bare(id),
        kind.to_uppercase()
    ))
}

/// True for the name of a kind of GGUF file, such as `q4_K_M` or `IQ4_XS`.
fn is_kind(text: &str) -> bool {
    let lower = text.to_lowercase();
    let digits = lower.trim_start_matches('i').strip_prefix('q');
    let known = |c: char| c.is_ascii_alphanumeric() || c == '_';
    digits.is_some_and(|d| d.starts_with(|c: char| c.is_ascii_digit())) && text.chars().all(known)
}

/// The hub id of a published model by its name.
fn whole(name: &str) -> Option<&'static str> {
    // Ollama puts no dash between Llama and its version.
    let name = name.to_lowercase().replace(':', "-");
    let name = match name.strip_prefix("llama3") {
        Some(rest) => format!("llama-3{rest}"),
        None => name,
    };
    let presets = Preset::all().flat_map(|p| [(p.name, p.hub_id), (bare(p.hub_id), p.hub_id)]);
    let named: Vec<(&str, &str)> = presets.chain(PUBLISHED.map(|id| (bare(id), id))).collect();
    // Ollama does not say of a model that it is tuned to follow instructions.
    let instruct = format!("{name}-instruct");
    let is = |known: &str| [&name, &instruct].contains(&&known.to_lowercase());
    let same = named.iter().find(|(known, _)| is(known));
    // A mixture by the parameters that all its experts have: qwen3:30b.
    let mixture = format!("{name}-a");
    let begins = |known: &str| known.to_lowercase().starts_with(&mixture);
    let found = same.or_else(|| named.iter().find(|(known, _)| begins(known)))?;
    Some(found.1)
}

/// The name of a hub id without its owner.
fn bare(id: &str) -> &str {
    id.rsplit('/').next().unwrap_or(id)
}

/// The name most similar to `model`, of those in nq's folder and `demo`, if any.
fn alike(model: &str) -> Result<Option<String>> {
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

/// A model in a folder of models.
#[derive(Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its path in the folder, without `.gguf` and the number of a split file: `Qwen3-8B-int4`, `owner/Qwen3-8B-GGUF`.
    pub name: String,
    /// What [`find`] opens.
    pub path: PathBuf,
}

/// Folders within one another that are searched for models: programs that download models keep them as
/// `OWNER/NAME/FILE.gguf`.
const DEEPEST: usize = 3;

/// The models in `folder`, by name: folders with a `config.json` or with one GGUF model, and GGUF files beside others.
/// Hidden files and what an interrupted run has left (`.partial`) are passed over.
///
/// # Errors
/// A folder that cannot be listed, or that is a model itself.
pub fn stored_in(folder: &Path) -> Result<Vec<Stored>> {
    if folder.join(CONFIG).exists() {
        return Err(Error::no_model(format!(
            "{}: expected a folder of models, found a model",
            folder.display()
        )));
    }
    let mut found = Vec::new();
    search(folder, "", &mut found)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Adds the models below `folder`, which is called `name` in the folder that is searched.
fn search(folder: &Path, name: &str, found: &mut Vec<Stored>) -> Result<()> {
    let mut entries = match Files::Folder(folder.into()).names() {
        // Whoever opens it as a model is told why it cannot be listed.
        Err(_) if !name.is_empty() => {
            let (name, path) = (name.to_owned(), folder.to_owned());
            found.push(Stored { name, path });
            return Ok(());
        }
        listed => listed?,
    };
    entries.retain(|entry| !entry.starts_with('.') && !entry.ends_with(".partial"));
    let within = |entry: &str| match name {
        "" => entry.to_owned(),
        _ => format!("{name}/{entry}"),
    };
    let files = gguf::models(&entries);
    let is_model = files.len() == 1 || entries.iter().any(|entry| entry == CONFIG);
    if !name.is_empty() && is_model {
        let (name, path) = (name.to_owned(), folder.to_owned());
        found.push(Stored { name, path });
        return Ok(());
    }
    found.extend(files.into_iter().map(|model| Stored {
        name: within(&model.name),
        path: folder.join(model.file),
    }));
    let depth = name.split('/').filter(|part| !part.is_empty()).count();
    for entry in entries.iter().filter(|_| depth < DEEPEST) {
        let path = folder.join(entry);
        if path.is_dir() {
            search(&path, &within(entry), found)?;
        }
    }
    Ok(())
}

/// The path of the hub's model `id`, downloaded unless the cache has it.
///
/// # Errors
/// If the name is not a hub id; errors of the download.
pub fn fetch(id: &str, offline: bool, progress: &dyn Progress) -> Result<PathBuf> {
    let mut options = HubOptions::from_env();
    options.offline |= offline;
    Ok(Hub::new(options).fetch_model(id, progress)?)
}

/// Opens the hub's model `id`.
///
/// # Errors
/// Errors of [`fetch`] and of reading the files.
pub(crate) fn open_hub(id: &str, offline: bool, progress: &dyn Progress) -> Result<FoundModel> {
    let path = fetch(id, offline, progress)?;
    // In the cache, a file's real name is its hash; the id has its usual name.
    let name = HubId::parse(id).map_or_else(|| id.to_owned(), |id| id.name());
    Ok(FoundModel {
        name,
        source: id.into(),
        checkpoint: Checkpoint::open(&path)?,
    })
}

/// Says once what the model's files hold and nq does not use.
pub(crate) fn note_left_over(model: &FoundModel, progress: &dyn Progress) {
    for line in left_over::lines(model.checkpoint.left_over()) {
        progress.note(&format!("{}: not used: {line}", model.name));
    }
}

fn open_demo() -> Result<FoundModel> {
    let Some(files) = demo::files() else {
        let why = concat!(
            "this build has no demo model: it was built without the feature `demo`, or from the published \
             crate, which leaves the model out; the folder assets/demo of ",
            env!("CARGO_PKG_REPOSITORY"),
            " holds it"
        );
        return Err(Error::no_model(why));
    };
    Ok(FoundModel {
        name: demo::LABEL.into(),
        source: demo::LABEL.into(),
        checkpoint: Checkpoint::open_files(files)?,
    })
}

fn open_path(path: &Path) -> Result<FoundModel> {
    let checkpoint = Checkpoint::open(path)?;
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = absolute
        .file_stem()
        .filter(|_| absolute.is_file())
        .or(absolute.file_name())
        .unwrap_or(path.as_os_str());
    Ok(FoundModel {
        name: name.to_string_lossy().into_owned(),
        source: absolute.display().to_string(),
        checkpoint,
    })
}

#[cfg(test)]
mod tests {
    use super::{Stored, published, stored_in};
    use std::fs;

    #[test]
    fn names_from_elsewhere_are_known() {
        for (name, id) in [
            ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
            ("qwen3:30b", "Qwen/Qwen3-30B-A3B"),
            ("qwen3-embedding:4b", "Qwen/Qwen3-Embedding-4B"),
            ("qwen3.8:27b", "Qwen/Qwen3.8-27B"),
            ("qwen3.6:35b", "Qwen/Qwen3.6-35B-A3B"),
            ("qwen2.5:7b", "Qwen/Qwen2.5-7B-Instruct"),
            ("llama3.2:3b", "meta-llama/Llama-3.2-3B-Instruct"),
            ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
            ("llama3.1:70b", "meta-llama/Llama-3.1-70B-Instruct"),
            ("qwen3-vl:4b", "Qwen/Qwen3-VL-4B-Instruct"),
            ("qwen3-vl:30b", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
            ("qwen3-coder:30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
            ("qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct"),
            ("qwen3-next:80b", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
            ("qwen3-reranker:0.6b", "Qwen/Qwen3-Reranker-0.6B"),
            ("qwen3:0.6b:q4_K_M", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"),
            ("qwen3:0.6b-q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0"),
            ("Qwen3-8B:IQ4_XS", "unsloth/Qwen3-8B-GGUF:IQ4_XS"),
        ] {
            assert_eq!(published(name).as_deref(), Some(id), "{name}");
        }
        for name in [
            "qwen3",
            "qwen3:7b",
            "Qwen/Qwen3-0.6B",
            "llama3:8b",
            "qwen3:0.6b:",
            "qwen3:0.6b:q4 k",
            "",
        ] {
            assert_eq!(published(name), None, "{name}");
        }
    }

    #[test]
    fn a_folder_of_models_names_each_by_its_place() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        for file in [
            "own-int4/config.json",
            "own-int4/model.safetensors",
            "own-int8.partial/config.json",
            ".cache/config.json",
            "a-Q4_K_M.gguf",
            "b-00001-of-00002.gguf",
            "b-00002-of-00002.gguf",
            "mmproj-F16.gguf",
            "owner/one-GGUF/one-Q4_K_M.gguf",
            "owner/one-GGUF/mmproj-F16.gguf",
            "owner/two-GGUF/two-Q4_K_M.gguf",
            "owner/two-GGUF/two-Q8_0-00002-of-00003.gguf",
            "owner/two-GGUF/two-Q8_0-00003-of-00003.gguf",
            "too/deep/to/be/config.json",
            "notes/read.me",
        ] {
            let path = root.join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, []).expect("a file");
        }
        let found = stored_in(root).expect("models");
        let expected = [
            ("a-Q4_K_M", "a-Q4_K_M.gguf"),
            ("b", "b-00001-of-00002.gguf"),
            ("own-int4", "own-int4"),
            ("owner/one-GGUF", "owner/one-GGUF"),
            (
                "owner/two-GGUF/two-Q4_K_M",
                "owner/two-GGUF/two-Q4_K_M.gguf",
            ),
            (
                "owner/two-GGUF/two-Q8_0",
                "owner/two-GGUF/two-Q8_0-00002-of-00003.gguf",
            ),
        ];
        let expected = expected.map(|(name, path)| Stored {
            name: name.to_owned(),
            path: root.join(path),
        });
        assert_eq!(found, expected);
        let error = stored_in(&root.join("own-int4")).expect_err("a model");
        assert!(error.to_string().contains("found a model"), "{error}");
        assert!(stored_in(&root.join("none")).is_err());
    }
}
