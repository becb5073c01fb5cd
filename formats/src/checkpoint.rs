//! A checkpoint: a model's configuration, tokenizer files and weights, whatever the format.

use crate::config::{GenerationDefaults, ModelConfig, check_eos};
use crate::dense;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::gguf;
use crate::import::{awq, compressed_tensors, fp8, gptq};
use crate::names::layer_of;
use crate::nq;
use crate::shards::Shards;
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use bytes::Bytes;
use memmap2::Mmap;
use serde_json::{Map, Value};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    /// Files that a checkpoint format makes from its own metadata.
    Virtual(Arc<dyn VirtualFiles>),
}

/// Files that are nowhere on disk: those of a format that keeps everything in its weight file.
pub trait VirtualFiles: fmt::Debug + Send + Sync {
    /// Stands for the folder in messages.
    fn root(&self) -> PathBuf;

    /// Names of all files.
    fn names(&self) -> Vec<String>;

    /// The contents of `name`, or `None` if there is no such file.
    ///
    /// # Errors
    /// What is wrong with the metadata that it is made from.
    fn get(&self, name: &str) -> Result<Option<Bytes>>;
}

impl Files {
    /// The path of `name`, for messages and, in a folder, for opening. Of virtual files, that of the
    /// file that they are made from.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Files::Folder(dir) => dir.join(name),
            Files::Embedded { label, .. } => Path::new(label).join(name),
            Files::Virtual(files) => files.root(),
        }
    }

    /// The folder or label itself.
    pub fn root(&self) -> PathBuf {
        match self {
            Files::Folder(dir) => dir.clone(),
            Files::Embedded { label, .. } => label.into(),
            Files::Virtual(files) => files.root(),
        }
    }

    /// Refuses to write to `dest` what is read from there: the source would be lost.
    ///
    /// # Errors
    /// [`Error::Exists`].
    pub fn check_apart(&self, dest: &Path) -> Result<()> {
        let root = match self {
            Files::Embedded { .. } => return Ok(()),
            Files::Folder(_) | Files::Virtual(_) => self.root(),
        };
        match (root.canonicalize(), dest.canonicalize()) {
            (Ok(a), Ok(b)) if a == b => Err(Error::Exists {
                path: dest.into(),
                what: "expected another place than the source's, found the source itself".into(),
            }),
            _ => Ok(()),
        }
    }

    /// The contents of `name`, or `None` if there is no such file. Disk files are
    /// mapped, not read.
    ///
    /// # Errors
    /// [`Error::Io`] if the file exists but cannot be opened or mapped; what is wrong with
    /// the metadata that a virtual file is made from.
    pub fn get(&self, name: &str) -> Result<Option<Bytes>> {
        match self {
            Files::Embedded { files, .. } => Ok(files
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, b)| Bytes::from_static(b))),
            Files::Virtual(files) => files.get(name),
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
            Files::Virtual(files) => files.names(),
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
///
/// # Errors
/// If it is no regular file or cannot be opened.
pub fn map_file(path: &Path) -> std::io::Result<Bytes> {
    // Before opening: opening a pipe would wait for a writer.
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        let message = "not a regular file";
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            message,
        ));
    }
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new()); // an empty map is an error on some systems
    }
    // SAFETY: the map is read-only and private to this process's view. As with every
    // memory-mapped checkpoint, a file truncated by another process while it is in use
    // raises a signal; nq never writes into an existing file, it renames whole new ones.
    let map = unsafe { Mmap::map(&file)? };
    Ok(crate::mapping::share(map))
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

/// How the numbers of a weight that a store gives relate to those that its file stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// The same numbers.
    Exact,
    /// The same codes; scales and offsets rounded to this type.
    ScalesRounded(DType),
    /// Values rounded to this type.
    ValuesRounded(DType),
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

    /// The weight exactly as the file stands for it, which may be in a form that no kernel
    /// runs; for comparisons.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    fn stored(&self, name: &str, dims: (usize, usize)) -> Result<StoredWeight> {
        self.matrix(name, dims).map(StoredWeight::Canonical)
    }

    /// How [`WeightStore::matrix`] differs from [`WeightStore::stored`] for `name`.
    fn exactness(&self, name: &str) -> Exactness {
        let _ = name;
        Exactness::Exact
    }

    /// Every stored tensor, in name order.
    fn entries(&self) -> Vec<TensorEntry>;

    /// Bytes of the weight files, headers included.
    fn file_bytes(&self) -> u64;

    /// What the file says about its quantization, as it stands there; `None` if
    /// unquantized.
    fn quantization(&self) -> Option<&serde_json::Value>;

    /// The one GGUF file that holds everything, for engines that read it themselves; `None`
    /// where there is no such file.
    fn gguf_file(&self) -> Option<&Path> {
        None
    }
}

/// What [`Checkpoint::open`] was given, read far enough to tell its format.
pub struct Source {
    files: Files,
    weights: Option<String>, // the file's name, if a file was given
    gguf: Option<String>,    // the name of the GGUF file, if it is one
    config: Option<Map<String, Value>>, // config.json
    quantization: Option<Value>,
}

/// A checkpoint format: how to tell it by content, and how to open it.
struct Format {
    detect: fn(&Source) -> bool,
    open: fn(Source) -> Result<Checkpoint>,
}

/// Every format that can be opened; the first that detects itself is used.
const FORMATS: &[Format] = &[
    Format {
        detect: |s| s.gguf.is_some(),
        open: |s| gguf::open(&s, s.gguf.as_deref().unwrap_or_default()),
    },
    Format {
        detect: |s| s.config.is_some() && s.quantization.is_none(),
        open: dense::open,
    },
    Format {
        detect: |s| s.quant_method() == Some(nq::METHOD),
        open: nq::open,
    },
    Format {
        detect: |s| s.quant_method() == Some(gptq::METHOD),
        open: gptq::open,
    },
    Format {
        detect: |s| s.quant_method() == Some(awq::METHOD),
        open: awq::open,
    },
    Format {
        detect: |s| s.quant_method() == Some(compressed_tensors::METHOD),
        open: compressed_tensors::open,
    },
    Format {
        detect: |s| s.quant_method() == Some(fp8::METHOD),
        open: fp8::open,
    },
];

impl Source {
    /// Reads config.json (if there is one) and what it says about quantization.
    pub(crate) fn new(files: Files, weights: Option<String>) -> Result<Self> {
        let gguf = gguf::find(&files, weights.as_deref())?;
        let config = match gguf {
            // Such a file says all itself; what stands beside it may be another model's.
            Some(_) => None,
            None => files.get(CONFIG)?,
        };
        let config = match config {
            None => None,
            Some(bytes) => match serde_json::from_slice(&bytes) {
                Ok(map) => Some(map),
                Err(e) => {
                    return Err(Error::Malformed {
                        path: files.path(CONFIG),
                        what: "contents".into(),
                        expected: "a JSON object".into(),
                        found: e.to_string(),
                    });
                }
            },
        };
        let quantization = config.as_ref().and_then(|c: &Map<String, Value>| {
            let found = c.get("quantization_config").or(c.get("compression_config"));
            found.filter(|q| !q.is_null()).cloned()
        });
        let quantization = match quantization {
            None if config.is_some() => legacy_gptq(&files)?,
            found => found,
        };
        Ok(Source {
            files,
            weights,
            gguf,
            config,
            quantization,
        })
    }

    /// The files of the checkpoint.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// config.json's `quantization_config`, if it has one.
    pub fn quantization(&self) -> Option<&Value> {
        self.quantization.as_ref()
    }

    /// The quantization's `quant_method`, if named.
    pub fn quant_method(&self) -> Option<&str> {
        self.quantization.as_ref()?.get("quant_method")?.as_str()
    }

    /// The safetensors files: the one given, or those of the folder.
    ///
    /// # Errors
    /// As [`Shards::open`].
    pub fn shards(&self) -> Result<Shards> {
        match &self.weights {
            Some(name) => Shards::open_named(&self.files, name),
            None => Shards::open(&self.files),
        }
    }

    /// The model's shape from config.json.
    ///
    /// # Errors
    /// [`Error::Missing`] without one; else as [`ModelConfig::parse`].
    pub fn model_config(&self) -> Result<ModelConfig> {
        let bytes = self.files.require(CONFIG)?;
        ModelConfig::parse(&self.files.path(CONFIG), &bytes)
    }

    /// A checkpoint with config.json, generation_config.json and `store`.
    ///
    /// # Errors
    /// As [`ModelConfig::parse`] and [`GenerationDefaults::parse`].
    pub fn into_checkpoint(self, store: Box<dyn WeightStore>) -> Result<Checkpoint> {
        let config = self.model_config()?;
        self.check_layers(&config, store.as_ref())?;
        let generation = match self.files.get(GENERATION_CONFIG)? {
            Some(bytes) => {
                let path = self.files.path(GENERATION_CONFIG);
                let generation = GenerationDefaults::parse(&path, &bytes)?;
                check_eos(&path, &generation.eos_token_ids, config.vocab_size)?;
                generation
            }
            None => GenerationDefaults::default(),
        };
        Ok(Checkpoint::new(self.files, config, generation, store))
    }

    /// Refuses a model whose files hold more layers than its config: what would run is another
    /// model. (Fewer are found missing by name.)
    fn check_layers(&self, config: &ModelConfig, store: &dyn WeightStore) -> Result<()> {
        let beyond = |e: &TensorEntry| layer_of(&e.name) >= Some(config.num_hidden_layers);
        match store.entries().into_iter().find(beyond) {
            None => Ok(()),
            Some(entry) => Err(Error::Malformed {
                path: self.files.path(CONFIG),
                what: "num_hidden_layers".into(),
                expected: format!("a layer for {} in {}", entry.name, entry.file),
                found: config.num_hidden_layers.to_string(),
            }),
        }
    }

    fn open(self) -> Result<Checkpoint> {
        if let Some(format) = FORMATS.iter().find(|f| (f.detect)(&self)) {
            return (format.open)(self);
        }
        let Some(quantization) = &self.quantization else {
            return Err(Error::Missing {
                path: self.files.root(),
                what: match &self.weights {
                    Some(name) => format!("{CONFIG} beside {name}, which is no GGUF file,"),
                    None => CONFIG.into(),
                },
            });
        };
        let method = match self.quant_method() {
            Some(method) => format!("quant_method {method}"),
            None => format!("a quantization_config without quant_method ({quantization})"),
        };
        Err(Error::Unsupported {
            path: self.files.path(CONFIG),
            what: method,
            why: "nq has no reader for it".into(),
        })
    }
}

/// The settings of an early GPTQ checkpoint, which stand in a file of their own and do
/// not name the method.
fn legacy_gptq(files: &Files) -> Result<Option<Value>> {
    const NAME: &str = "quantize_config.json";
    let Some(bytes) = files.get(NAME)? else {
        return Ok(None);
    };
    let mut map: Map<String, Value> =
        serde_json::from_slice(&bytes).map_err(|e| Error::Malformed {
            path: files.path(NAME),
            what: "contents".into(),
            expected: "a JSON object".into(),
            found: e.to_string(),
        })?;
    map.entry("quant_method")
        .or_insert_with(|| gptq::METHOD.into());
    Ok(Some(Value::Object(map)))
}

/// The model's shape and quantization.
pub const CONFIG: &str = "config.json";
/// Sampling defaults.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// An opened checkpoint.
pub struct Checkpoint {
    files: Files,
    config: ModelConfig,
    generation: GenerationDefaults,
    store: Box<dyn WeightStore>,
}

impl Checkpoint {
    /// Opens a folder, or a weight file with its configuration beside it. The format is told
    /// by content, never by name; weights are memory-mapped.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is nothing at `path` or a file is absent; [`Error::Unsupported`]
    /// naming a quantization or architecture without a reader; else what the format's
    /// reader finds wrong.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::Missing {
                path: path.into(),
                what: "folder or file".into(),
            },
            _ => Error::io(path, "open", e),
        })?;
        if metadata.is_dir() {
            return Self::open_files(Files::Folder(path.into()));
        }
        let name = path.file_name().and_then(|n| n.to_str());
        let Some(name) = name else {
            return Err(Error::Malformed {
                path: path.into(),
                what: "file name".into(),
                expected: "UTF-8".into(),
                found: "other bytes".into(),
            });
        };
        let folder = match path.parent() {
            Some(p) if p != Path::new("") => p,
            _ => Path::new("."),
        };
        Source::new(Files::Folder(folder.into()), Some(name.into()))?.open()
    }

    /// As [`Checkpoint::open`], over files that may be embedded.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_files(files: Files) -> Result<Self> {
        Source::new(files, None)?.open()
    }

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

    /// Bytes of all stored tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.store.entries().iter().map(|e| e.bytes).sum()
    }

    /// `8 * tensor_bytes / parameters`: embedding and head included, a tied one counted once.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.tensor_bytes() as f64 / self.config.parameters() as f64
    }
}
