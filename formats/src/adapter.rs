//! LoRA and DoRA adapters (Hu et al., arXiv 2106.09685; Liu et al., arXiv 2402.09353) in PEFT's folders and in
//! GGUF files, merged into a model's weights as they are read.
//!
//! An adapter holds, for some Linears `W`, `A` `[rank, in]` and `B` `[out, rank]`. The merged weight is
//! `W + scale B A`; with a magnitude `m` `[out]` (DoRA) its rows are brought to the lengths `m`.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::files::Files;
use crate::gguf::{GgufFile, MAGIC, names as gguf_names};
use crate::hash::sha256_hex;
use crate::object::Object;
use crate::shards::Shards;
use crate::store::{TensorEntry, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use half::{bf16, f16};
use nq_model::names::{EMBEDDING, HEAD, Shape, expert_name, head, parameters, stack};
use nq_model::{Architecture, DType, FLOATS, ModelConfig};
use rayon::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The file that describes PEFT's adapters.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// The file with their tensors.
const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT puts before the names of a causal model's tensors.
const PREFIX: &str = "base_model.model.";

/// One adapter.
pub struct Adapter {
    path: PathBuf,
    /// The architecture that a GGUF adapter names.
    architecture: Option<&'static Architecture>,
    /// By the name of the Linear that they change.
    changes: BTreeMap<String, AdapterChange>,
}

/// What an adapter adds to one Linear.
struct AdapterChange {
    a: Vec<f32>, // [rank, in]
    b: Vec<f32>, // [out, rank]
    rank: usize,
    scale: f64,
    magnitude: Option<Vec<f32>>, // [out]
}

impl Adapter {
    /// Opens PEFT's folder or a GGUF file. `weight` multiplies what it adds.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming what nq cannot merge; [`Error::Missing`], [`Error::Malformed`] or
    /// [`Error::Tensor`] for a file that is no such adapter.
    pub fn open(path: &Path, weight: f64) -> Result<Self> {
        let adapter = match path.is_dir() {
            true => Self::of_peft(path)?,
            false => Self::of_gguf(path)?,
        };
        let scaled = |(name, change): (String, AdapterChange)| {
            let scale = change.scale * weight;
            (name, AdapterChange { scale, ..change })
        };
        let shifted = adapter.changes.values().any(|c| c.magnitude.is_some());
        if shifted && weight != 1.0 {
            return Err(Error::Unsupported {
                path: path.into(),
                what: format!("a DoRA adapter with a weight of {weight}"),
                why: "its magnitudes are those of the whole adapter".into(),
            });
        }
        Ok(Adapter {
            changes: adapter.changes.into_iter().map(scaled).collect(),
            ..adapter
        })
    }

    /// SHA-256 of the files of the adapter at `path`, for records of what a model was made from.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Missing`] for files that cannot be read.
    pub fn sha256(path: &Path) -> Result<String> {
        let (files, names) = match path.is_dir() {
            true => (
                Files::Folder(path.into()),
                vec![CONFIG.into(), WEIGHTS.into()],
            ),
            false => {
                let folder = path.parent().map(Path::to_owned).unwrap_or_default();
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                (Files::Folder(folder), vec![name.into_owned()])
            }
        };
        let lines = names.iter().map(|name| {
            let bytes = files.require(name)?;
            let digest = sha256_hex(&bytes);
            crate::mapping::release(&bytes);
            Ok(digest + "\n")
        });
        Ok(sha256_hex(lines.collect::<Result<String>>()?.as_bytes()))
    }

    fn of_peft(path: &Path) -> Result<Self> {
        let files = Files::Folder(path.into());
        let (place, json) = (files.path(CONFIG), files.require(CONFIG)?);
        let config = Object::parse(&place, &json)?;
        let rule = Rule::read(&config)?;
        let shards = Shards::open_named(&files, WEIGHTS)?;
        let mut parts: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for tensor in shards.names() {
            let Some((name, part)) = part_of(tensor) else {
                return Err(Error::Unsupported {
                    path: files.path(WEIGHTS),
                    what: format!("tensor {tensor}"),
                    why: "nq merges lora_A, lora_B and lora_magnitude_vector of Linears".into(),
                });
            };
            parts.entry(name.to_owned()).or_default().insert(part);
        }
        // Tensors by the Linear's name and the part, whatever stands between and behind.
        let tensor = |name: &str, part: &str| -> Option<(String, Tensor)> {
            let found = shards.names().find(|t| part_of(t) == Some((name, part)))?;
            Some((found.to_owned(), shards.get(found)?))
        };
        let mut changes = BTreeMap::new();
        for name in parts.into_keys() {
            let required = |part: &str| {
                tensor(&name, part).ok_or_else(|| {
                    let wanted = format!("{PREFIX}{name}.{part}.weight");
                    shards.error(
                        &wanted,
                        "it beside the other part".into(),
                        "no such tensor".into(),
                    )
                })
            };
            let (a, b) = (required("lora_A")?, required("lora_B")?);
            let magnitude = tensor(&name, "lora_magnitude_vector");
            if rule.dora != magnitude.is_some() {
                let expected = format!("one for each Linear, or none: use_dora is {}", rule.dora);
                let wanted = format!("{PREFIX}{name}.lora_magnitude_vector");
                let found = if rule.dora { "none" } else { "one" };
                return Err(shards.error(&wanted, expected, found.into()));
            }
            let rank = rank_of(&shards, &a, &b)?;
            changes.insert(
                name.clone(),
                AdapterChange {
                    a: floats(&shards, &a)?,
                    b: floats(&shards, &b)?,
                    rank,
                    scale: rule.scale(&name, rank),
                    magnitude: magnitude.map(|m| floats(&shards, &m)).transpose()?,
                },
            );
        }
        Ok(Adapter {
            path: path.into(),
            architecture: None,
            changes,
        })
    }

    fn of_gguf(path: &Path) -> Result<Self> {
        let bytes = crate::files::map_file(path).map_err(|e| Error::io(path, "open", e))?;
        let unsupported = |what: String, why: &str| Error::Unsupported {
            path: path.into(),
            what,
            why: why.into(),
        };
        if !bytes.starts_with(MAGIC) {
            let why = "nq merges PEFT's folders and adapters in GGUF";
            return Err(unsupported("an adapter in this file".into(), why));
        }
        let file = GgufFile::parse(path, bytes)?;
        for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
            let found = file.required(key, file.str(key)?)?;
            if found != expected {
                return Err(unsupported(
                    format!("{key} {found}"),
                    "expected a LoRA adapter",
                ));
            }
        }
        let named = file.required("general.architecture", file.str("general.architecture")?)?;
        let architecture = nq_model::find(|a| a.gguf, named).ok_or_else(|| {
            unsupported(
                format!("architecture {named}"),
                &nq_model::supported(|a| a.gguf),
            )
        })?;
        let alpha = file.f64("adapter.lora.alpha")?.unwrap_or(0.0);
        /// Values and shape of `lora_a` or `lora_b`.
        type Part = Option<(Vec<f32>, Vec<usize>)>;
        let mut pairs: BTreeMap<String, [Part; 2]> = BTreeMap::new();
        for (tensor, info) in file.tensors() {
            let part = [".weight.lora_a", ".weight.lora_b"].iter().enumerate();
            let part = part
                .filter_map(|(i, end)| Some((i, tensor.strip_suffix(end)?)))
                .next();
            let known =
                part.and_then(|(i, name)| Some((i, gguf_names::from_gguf(architecture, name)?)));
            let dtype = [
                ("F32", DType::F32),
                ("F16", DType::F16),
                ("BF16", DType::BF16),
            ];
            let dtype = dtype.iter().find(|(name, _)| *name == info.kind.name());
            let (Some((i, name)), Some((_, dtype))) = (known, dtype) else {
                let what = format!("tensor {tensor} ({})", info.kind);
                return Err(unsupported(
                    what,
                    "nq merges lora_a and lora_b of Linears, in floats",
                ));
            };
            let values = Tensor::new(*dtype, info.shape.clone(), file.data(info))?.to_f32()?;
            pairs.entry(name).or_default()[i] = Some((values, info.shape.clone()));
        }
        let mut changes = BTreeMap::new();
        for (name, pair) in pairs {
            let [Some((a, of_a)), Some((b, of_b))] = pair else {
                return Err(unsupported(format!("one part of {name}"), "it has two"));
            };
            let (&[rank, _], &[_, other]) = (&of_a[..], &of_b[..]) else {
                return Err(unsupported(
                    format!("{name} of shapes {of_a:?}, {of_b:?}"),
                    "they have 2",
                ));
            };
            if rank != other || rank == 0 {
                return Err(unsupported(
                    format!("{name} of ranks {rank}, {other}"),
                    "they are one",
                ));
            }
            // As llama.cpp: without an alpha, nothing is scaled.
            let scale = if alpha == 0.0 {
                1.0
            } else {
                alpha / rank as f64
            };
            let change = AdapterChange {
                a,
                b,
                rank,
                scale,
                magnitude: None,
            };
            changes.insert(name, change);
        }
        Ok(Adapter {
            path: path.into(),
            architecture: Some(architecture),
            changes,
        })
    }

    fn error(&self, tensor: &str, expected: String, found: String) -> Error {
        Error::Tensor {
            path: self.path.clone(),
            tensor: tensor.into(),
            expected,
            found,
        }
    }

    /// Checks that every change is of a Linear of the model, and of its shape.
    fn check(&self, config: &ModelConfig) -> Result<()> {
        if let Some(other) = self.architecture.filter(|a| *a != config.architecture) {
            return Err(Error::Unsupported {
                path: self.path.clone(),
                what: format!("an adapter of {} models", other.title),
                why: format!("the model is {}", config.architecture.title),
            });
        }
        let mut dims = BTreeMap::new();
        for (name, shape) in parameters(config) {
            let Shape::Matrix(rows, cols) = shape else {
                continue;
            };
            match config.experts.filter(|_| stack(&name).is_some()) {
                None => {
                    dims.insert(name, (rows, cols));
                }
                Some(experts) => {
                    for e in 0..experts.count {
                        dims.insert(expert_name(&name, e), (rows / experts.count, cols));
                    }
                }
            }
        }
        dims.remove(EMBEDDING); // looked up, not multiplied by
        for (name, change) in &self.changes {
            let found = (change.b.len() / change.rank, change.a.len() / change.rank);
            match dims.get(name) {
                None if name == HEAD && head(config) == EMBEDDING => {
                    let expected = "a head of its own: this model's is the embedding".into();
                    return Err(self.error(name, expected, "an adapter of it".into()));
                }
                None => {
                    let expected = format!("a Linear of a {} model", config.architecture.title);
                    return Err(self.error(name, expected, "another name".into()));
                }
                Some(&dims) if dims != found => {
                    return Err(self.error(name, format!("{dims:?}"), format!("{found:?}")));
                }
                Some(_) => {}
            }
            let rows = change.magnitude.as_ref().map_or(found.0, Vec::len);
            if rows != found.0 {
                let expected = format!("{} magnitudes", found.0);
                return Err(self.error(name, expected, rows.to_string()));
            }
        }
        Ok(())
    }
}

/// The settings of a PEFT adapter that decide how it is merged.
struct Rule {
    alpha: f64,
    /// By the end of a Linear's name.
    alphas: BTreeMap<String, f64>,
    /// Scales by the root of the rank (Kalajdzievski, arXiv 2312.03732).
    root: bool,
    dora: bool,
}

impl Rule {
    fn read(config: &Object<'_>) -> Result<Self> {
        let kind = config.str("peft_type")?.unwrap_or_default();
        if kind != "LORA" {
            let why = "nq merges LoRA and DoRA adapters";
            return Err(config.unsupported(format!("peft_type {kind}"), why));
        }
        let empty = |v: &Value| match v {
            Value::Bool(on) => !on,
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::String(text) => text == "none",
            _ => false,
        };
        for key in [
            "alora_invocation_tokens",
            "bias",
            "corda_config",
            "fan_in_fan_out",
            "layer_replication",
            "loftq_config",
            "lora_bias",
            "megatron_config",
            "modules_to_save",
            "target_parameters",
            "trainable_token_indices",
            "use_bdlora",
            "use_qalora",
        ] {
            if let Some(value) = config.get(key).filter(|v| !empty(v)) {
                let what = format!("{key} {value}");
                return Err(config.unsupported(what, "nq merges lora_A and lora_B of Linears"));
            }
        }
        // These begin with a base that is not the published model.
        if let Some(Value::String(how)) = config.get("init_lora_weights")
            && ["pissa", "olora", "loftq", "corda"]
                .iter()
                .any(|p| how.to_lowercase().starts_with(p))
        {
            let why = "it changes the model that it is trained on; convert it to plain LoRA";
            return Err(config.unsupported(format!("init_lora_weights {how}"), why));
        }
        let alphas = config.typed("alpha_pattern", "names and numbers", |v| {
            let pairs = v
                .as_object()?
                .iter()
                .map(|(k, v)| Some((k.clone(), v.as_f64()?)));
            pairs.collect::<Option<BTreeMap<String, f64>>>()
        })?;
        let alphas = alphas.unwrap_or_default();
        let plain = |name: &String| {
            name.chars()
                .all(|c| c.is_alphanumeric() || "._".contains(c))
        };
        if let Some(pattern) = alphas.keys().find(|name| !plain(name)) {
            let why = "nq reads names of Linears there";
            return Err(config.unsupported(format!("alpha_pattern {pattern}"), why));
        }
        let alpha = config.f64("lora_alpha")?;
        Ok(Rule {
            alpha: alpha
                .ok_or_else(|| config.bad("lora_alpha", "a number".into(), "no such key".into()))?,
            alphas,
            root: config.bool("use_rslora")?.unwrap_or(false),
            dora: config.bool("use_dora")?.unwrap_or(false),
        })
    }

    fn scale(&self, name: &str, rank: usize) -> f64 {
        let of =
            |end: &str| name == end || name.strip_suffix(end).is_some_and(|s| s.ends_with('.'));
        let own = self.alphas.iter().find(|(end, _)| of(end));
        let alpha = own.map_or(self.alpha, |(_, alpha)| *alpha);
        let rank = rank as f64;
        alpha / if self.root { rank.sqrt() } else { rank }
    }
}

/// The Linear and the part of it that a tensor of PEFT's is: `base_model.model.NAME.lora_A.weight`, in older
/// files with the adapter's name behind the part.
fn part_of(tensor: &str) -> Option<(&str, &str)> {
    let name = tensor.strip_prefix(PREFIX)?;
    ["lora_A", "lora_B", "lora_magnitude_vector"]
        .into_iter()
        .find_map(|part| {
            let (linear, rest) = name.split_once(part)?;
            let plain = rest.split('.').count() <= 3;
            Some((linear.strip_suffix('.')?, part)).filter(|_| plain)
        })
}

fn rank_of(shards: &Shards, a: &(String, Tensor), b: &(String, Tensor)) -> Result<usize> {
    match (a.1.shape(), b.1.shape()) {
        (&[rank, _], &[_, other]) if rank == other && rank > 0 => Ok(rank),
        (of_a, of_b) => {
            let expected = format!("[out, rank] beside [rank, in] {of_a:?}");
            Err(shards.error(&b.0, expected, format!("{of_b:?}")))
        }
    }
}

fn floats(shards: &Shards, (name, tensor): &(String, Tensor)) -> Result<Vec<f32>> {
    let values = shards.require(name, &FLOATS, tensor.shape())?.to_f32()?;
    match values.iter().find(|v| !v.is_finite()) {
        None => Ok(values),
        Some(v) => Err(shards.error(name, "finite values".into(), v.to_string())),
    }
}

impl Checkpoint {
    /// This model with `adapters` merged into its weights, which must not be quantized.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a quantized model, and for DoRA together with another adapter;
    /// [`Error::Tensor`] for an adapter of another model.
    pub fn with_adapters(self, adapters: Vec<Adapter>) -> Result<Checkpoint> {
        if adapters.is_empty() {
            return Ok(self);
        }
        if self.store().quantization().is_some() {
            return Err(Error::Unsupported {
                path: self.files().root(),
                what: "an adapter for a quantized model".into(),
                why: "merging rounds its weights again; give the model that it was made from, \
                      with --bits or to nq quantize --adapter"
                    .into(),
            });
        }
        for adapter in &adapters {
            adapter.check(self.config())?;
        }
        let shifted = |a: &Adapter| a.changes.values().any(|c| c.magnitude.is_some());
        if let Some(dora) = adapters
            .iter()
            .find(|a| shifted(a))
            .filter(|_| adapters.len() > 1)
        {
            return Err(Error::Unsupported {
                path: dora.path.clone(),
                what: "a DoRA adapter beside another".into(),
                why: "its magnitudes are those of the model with it alone".into(),
            });
        }
        let experts = self.config().experts.map_or(1, |e| e.count);
        Ok(self.over(|store| {
            Box::new(Adapted {
                store,
                adapters,
                experts,
            })
        }))
    }
}

/// A store with adapters merged into its weights.
struct Adapted {
    store: Box<dyn WeightStore>,
    adapters: Vec<Adapter>,
    /// Of a layer; 1 if there are none.
    experts: usize,
}

impl Adapted {
    /// The changes of the parameter `name` of so many rows, each with the first row that it changes.
    fn changes(&self, name: &str, rows: usize) -> Vec<(usize, &AdapterChange)> {
        let all = |name: &str, first: usize| -> Vec<(usize, &AdapterChange)> {
            let found = self.adapters.iter().filter_map(|a| a.changes.get(name));
            found.map(|change| (first, change)).collect()
        };
        if stack(name).is_none() {
            return all(name, 0);
        }
        let expert = |e| all(&expert_name(name, e), e * (rows / self.experts));
        (0..self.experts).flat_map(expert).collect()
    }

    fn is_changed(&self, name: &str) -> bool {
        !self.changes(name, self.experts).is_empty()
    }

    /// The weight with what the adapters add, rounded to its own type.
    fn merged(&self, name: &str, (rows, cols): (usize, usize)) -> Result<Weight> {
        let weight = self.store.matrix(name, (rows, cols))?;
        let (changes, Weight::Dense(tensor)) = (self.changes(name, rows), &weight) else {
            return Ok(weight);
        };
        if changes.is_empty() {
            return Ok(weight);
        }
        let mut values = tensor.to_f32()?;
        for (first, change) in changes {
            let rows = change.b.len() / change.rank;
            let part = &mut values[first * cols..(first + rows) * cols];
            part.par_chunks_mut(cols)
                .enumerate()
                .for_each(|(r, row)| change.add(r, row));
        }
        let bytes: Vec<u8> = match tensor.dtype() {
            DType::BF16 => values
                .iter()
                .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
                .collect(),
            DType::F16 => values
                .iter()
                .flat_map(|v| f16::from_f32(*v).to_le_bytes())
                .collect(),
            _ => return Tensor::from_f32(vec![rows, cols], values).map(Weight::Dense),
        };
        Tensor::new(tensor.dtype(), vec![rows, cols], bytes.into()).map(Weight::Dense)
    }
}

impl AdapterChange {
    /// Changes row `r` of the weight.
    fn add(&self, r: usize, row: &mut [f32]) {
        let b = &self.b[r * self.rank..(r + 1) * self.rank];
        let mut sums: Vec<f64> = row.iter().map(|&v| f64::from(v)).collect();
        for (b, a) in b.iter().zip(self.a.chunks(row.len())) {
            let factor = self.scale * f64::from(*b);
            sums.iter_mut()
                .zip(a)
                .for_each(|(sum, a)| *sum += factor * f64::from(*a));
        }
        if let Some(magnitude) = &self.magnitude {
            let length = sums.iter().map(|v| v * v).sum::<f64>().sqrt();
            let factor = f64::from(magnitude[r]) / length;
            sums.iter_mut().for_each(|v| *v *= factor);
        }
        row.iter_mut()
            .zip(sums)
            .for_each(|(v, sum)| *v = sum as f32);
    }
}

impl WeightStore for Adapted {
    fn format(&self) -> &'static str {
        self.store.format()
    }

    fn contains(&self, name: &str) -> bool {
        self.store.contains(name)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.store.vector(name, len)
    }

    fn matrix(&self, name: &str, dims: (usize, usize)) -> Result<Weight> {
        self.merged(name, dims)
    }

    fn stored(&self, name: &str, dims: (usize, usize)) -> Result<StoredWeight> {
        self.merged(name, dims).map(StoredWeight::Canonical)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        self.store.sources(name)
    }

    fn exactness(&self, name: &str) -> Exactness {
        match self.is_changed(name) {
            true => Exactness::Exact, // nothing is stored that it could be compared with
            false => self.store.exactness(name),
        }
    }

    fn is_bare(&self) -> bool {
        self.store.is_bare()
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.store.entries()
    }

    fn file_bytes(&self) -> u64 {
        self.store.file_bytes()
    }

    fn quantization(&self) -> Option<&Value> {
        self.store.quantization()
    }
}
