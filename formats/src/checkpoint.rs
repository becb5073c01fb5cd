//! A checkpoint: a model's configuration, tokenizer files and weights, whatever the format.

use crate::config::{GenerationDefaults, ModelConfig};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::weight::Weight;
use bytes::Bytes;
use memmap2::Mmap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Where a checkpoint's files come from.
#[derive(Clone, Debug)]
pub enum Files {
    /// A folder on disk; files are memory-mapped.
    Folder(PathBuf),
    /// Files built into the program: (name, contents), under a label for messages.
    Embedded {
        /// Stands for the folder in messages.
        label: &'static str,
        /// File names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl Files {
    /// The path of `name`, for messages and, in a folder, for opening.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Files::Folder(dir) => dir.join(name),
            Files::Embedded { label, .. } => Path::new(label).join(name),
        }
    }

    /// The folder or label itself.
    pub fn root(&self) -> PathBuf {
        match self {
            Files::Folder(dir) => dir.clone(),
            Files::Embedded { label, .. } => label.into(),
        }
    }

    /// The contents of `name`, or `None` if there is no such file. Disk files are
    /// mapped, not read.
    ///
    /// # Errors
    /// [`Error::Io`] if the file exists but cannot be opened or mapped.
    pub fn get(&self, name: &str) -> Result<Option<Bytes>> {
        match self {
            Files::Embedded { files, .. } => Ok(files
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, b)| Bytes::from_static(b))),
            Files::Folder(dir) => {
                let path = dir.join(name);
                match map_file(&path) {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err(e) => Err(Error::io(path, "open", e)),
                }
            }
        }
    }

    /// As [`Files::get`], with an error where the file is absent.
    ///
    /// # Errors
    /// [`Error::Missing`] naming the file.
    pub fn require(&self, name: &str) -> Result<Bytes> {
        self.get(name)?.ok_or_else(|| Error::Missing {
            path: self.root(),
            what: name.into(),
        })
    }

    /// Names of all files, sorted.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be listed.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = match self {
            Files::Embedded { files, .. } => files.iter().map(|(n, _)| (*n).into()).collect(),
            Files::Folder(dir) => std::fs::read_dir(dir)
                .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
                .map_err(|e| Error::io(dir, "list", e))?
                .into_iter()
                .filter_map(|e| e.file_name().into_string().ok())
                .collect(),
        };
        names.sort();
        Ok(names)
    }
}

/// Maps a whole file read-only.
pub(crate) fn map_file(path: &Path) -> std::io::Result<Bytes> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new()); // an empty map is an error on some systems
    }
    // SAFETY: the map is read-only and private to this process's view. As with every
    // memory-mapped checkpoint, a file truncated by another process while it is in use
    // raises a signal; nq never writes into an existing file, it renames whole new ones.
    let map = unsafe { Mmap::map(&file)? };
    Ok(Bytes::from_owner(map))
}

/// One tensor as it stands in a file, for listings.
#[derive(Clone, Debug)]
pub struct TensorEntry {
    /// Its name in the file.
    pub name: String,
    /// Element type or block type, by the format's own name.
    pub dtype: String,
    /// Shape as stored, outermost dimension first.
    pub shape: Vec<usize>,
    /// Stored bytes.
    pub bytes: u64,
    /// File that holds it.
    pub file: String,
}

/// The weights of one checkpoint format, by their Hugging Face names without the
/// `.weight` suffix (`model.layers.0.self_attn.q_proj`, `model.norm`, `lm_head`).
/// A new format implements this and adds one line to [`Checkpoint::open`].
pub trait WeightStore: Send + Sync {
    /// The format's name, e.g. `safetensors`, `nq`, `gguf`.
    fn format(&self) -> &'static str;

    /// True if the parameter `name` is present.
    fn contains(&self, name: &str) -> bool;

    /// A dense one-dimensional parameter (norms).
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is absent or not `[len]`.
    fn vector(&self, name: &str, len: usize) -> Result<Tensor>;

    /// The weight of a Linear or embedding.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is absent, or its shape is not `[out_features, in_features]`.
    fn matrix(&self, name: &str, dims: (usize, usize)) -> Result<Weight>;

    /// Every stored tensor, in name order.
    fn entries(&self) -> Vec<TensorEntry>;

    /// What the file says about its quantization, as it stands there; `None` if
    /// unquantized.
    fn quantization(&self) -> Option<&serde_json::Value>;
}

/// An opened checkpoint.
pub struct Checkpoint {
    files: Files,
    config: ModelConfig,
    generation: GenerationDefaults,
    store: Box<dyn WeightStore>,
}

impl Checkpoint {
    /// Assembles a checkpoint; the formats' `open` functions call this.
    pub fn new(
        files: Files,
        config: ModelConfig,
        generation: GenerationDefaults,
        store: Box<dyn WeightStore>,
    ) -> Self {
        Checkpoint {
            files,
            config,
            generation,
            store,
        }
    }

    /// Model shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sampling defaults.
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// Tokens that end a text: the generation config's, else the model config's.
    pub fn eos_token_ids(&self) -> &[u32] {
        match self.generation.eos_token_ids.as_slice() {
            [] => &self.config.eos_token_ids,
            ids => ids,
        }
    }

    /// The files beside the weights (tokenizer, template).
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// The weights.
    pub fn store(&self) -> &dyn WeightStore {
        self.store.as_ref()
    }
}
