//! Opens a checkpoint in the format that its content shows.

use crate::adapter;
use crate::checkpoint::{Checkpoint, Source};
use crate::dense;
use crate::error::{Error, Result};
use crate::files::{CONFIG, Files};
use crate::gguf;
use crate::import::{awq, compressed_tensors, exl3, fp8, gptq, modelopt};
use crate::nq;
use crate::object::json_object;
use serde_json::{Map, Value};
use std::path::Path;

/// A checkpoint format: how to detect it by content, and how to open it.
struct CheckpointFormat {
    detect: fn(&Source) -> bool,
    open: fn(Source) -> Result<Checkpoint>,
}

/// Every format that can be opened; the first that detects itself is used.
const FORMATS: &[CheckpointFormat] = &[
    CheckpointFormat {
        detect: |s| s.gguf.is_some(),
        open: |s| gguf::open(&s, s.gguf.as_deref().unwrap_or_default()),
    },
    CheckpointFormat {
        detect: |s| s.config.is_some() && s.quantization.is_none(),
        open: dense::open,
    },
    CheckpointFormat {
        detect: |s| s.quant_method() == Some(nq::METHOD),
        open: nq::open,
    },
    CheckpointFormat {
        detect: |s| s.quant_method() == Some(gptq::METHOD),
        open: gptq::open,
    },
    CheckpointFormat {
        detect: |s| s.quant_method() == Some(awq::METHOD),
        open: awq::open,
    },
    CheckpointFormat {
        detect: |s| s.quant_method() == Some(compressed_tensors::METHOD),
        open: compressed_tensors::open,
    },
    CheckpointFormat {
        detect: |s| s.quant_method() == Some(fp8::METHOD),
        open: fp8::open,
    },
    CheckpointFormat {
        detect: |s| s.quant_method() == Some(exl3::METHOD),
        open: exl3::open,
    },
    CheckpointFormat {
        detect: |s| s.quant_method() == Some(modelopt::METHOD),
        open: modelopt::open,
    },
];

impl Checkpoint {
    /// Opens a folder, or a weight file with its configuration beside it. The format is detected
    /// by content, never by name; weights are memory-mapped.
    ///
    /// # Errors
    /// [`Error::Missing`] if nothing exists at `path` or a file is absent; [`Error::Unsupported`],
    /// naming a quantization or architecture without a reader; otherwise errors of the format's
    /// reader.
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

    /// Like [`Checkpoint::open`], for files that may be embedded.
    pub fn open_files(files: Files) -> Result<Self> {
        Source::new(files, None)?.open()
    }
}

impl Source {
    /// Reads config.json (if it exists) and its quantization settings.
    fn new(files: Files, weights: Option<String>) -> Result<Self> {
        let gguf = gguf::find(&files, weights.as_deref())?;
        let config = match gguf {
            // Such a file contains everything; files beside it may belong to another model.
            Some(_) => None,
            None => files.get(CONFIG)?,
        };
        let config = match config {
            None => None,
            Some(bytes) => Some(json_object(&files.path(CONFIG), &bytes)?),
        };
        let quantization = config.as_ref().and_then(|c: &Map<String, Value>| {
            let found = c.get("quantization_config").or(c.get("compression_config"));
            found.filter(|q| !q.is_null()).cloned()
        });
        if gguf.is_none() && weights.is_none() {
            refuse_adapter(&files)?;
        }
        let quantization = match quantization {
            None if config.is_some() => match early_model_opt(&files)? {
                None => legacy_gptq(&files)?,
                found => found,
            },
            found => found,
        };
        Ok(Source {
            files,
            weights,
            gguf,
            config,
            quantization,
            left_over: Vec::new(),
        })
    }

    fn open(self) -> Result<Checkpoint> {
        if let Some(format) = FORMATS.iter().find(|f| (f.detect)(&self)) {
            return (format.open)(self);
        }
        let Some(quantization) = &self.quantization else {
            return Err(match &self.weights {
                Some(name) => Error::Malformed {
                    path: self.files.path(name),
                    what: "model".into(),
                    expected: format!("a GGUF file, or {CONFIG} next to it"),
                    found: "neither".into(),
                },
                None => Error::Missing {
                    path: self.files.root(),
                    what: CONFIG.into(),
                },
            });
        };
        let is_mlx = (self.config.as_ref()).is_some_and(|c| c.contains_key("quantization"));
        let method = match self.quant_method() {
            Some(method) => format!("quant_method {method}"),
            None if is_mlx => {
                "an MLX quantization (the keys quantization, bits, group_size)".into()
            }
            None => format!("a quantization_config without quant_method ({quantization})"),
        };
        Err(Error::Unsupported {
            path: self.files.path(CONFIG),
            what: method,
            why: "nq has no reader for it".into(),
        })
    }
}

/// Refuses a folder that holds an adapter and no model.
fn refuse_adapter(files: &Files) -> Result<()> {
    let names = files.names()?;
    let adapter = names.iter().any(|n| n == adapter::CONFIG);
    let model = |n: &String| n.ends_with(".safetensors") && !n.starts_with("adapter_model");
    match adapter && !names.iter().any(model) {
        false => Ok(()),
        true => Err(Error::Unsupported {
            path: files.root(),
            what: format!("an adapter without its model ({})", adapter::CONFIG),
            why: "give the model that it was trained on, and this folder as --adapter".into(),
        }),
    }
}

/// The settings of an early ModelOpt checkpoint, which are in a file of their own and do not name the method.
fn early_model_opt(files: &Files) -> Result<Option<Value>> {
    const NAME: &str = "hf_quant_config.json";
    let Some(bytes) = files.get(NAME)? else {
        return Ok(None);
    };
    let mut map = json_object(&files.path(NAME), &bytes)?;
    let Some(Value::Object(mut settings)) = map.remove("quantization") else {
        return Err(Error::Malformed {
            path: files.path(NAME),
            what: "quantization".into(),
            expected: "an object".into(),
            found: "none".into(),
        });
    };
    settings.insert("quant_method".into(), modelopt::METHOD.into());
    Ok(Some(Value::Object(settings)))
}

/// The settings of an early GPTQ checkpoint, which are in a file of their own and do
/// not name the method.
fn legacy_gptq(files: &Files) -> Result<Option<Value>> {
    const NAME: &str = "quantize_config.json";
    let Some(bytes) = files.get(NAME)? else {
        return Ok(None);
    };
    let mut map = json_object(&files.path(NAME), &bytes)?;
    map.entry("quant_method")
        .or_insert_with(|| gptq::METHOD.into());
    Ok(Some(Value::Object(map)))
}
