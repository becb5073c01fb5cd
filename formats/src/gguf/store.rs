//! Opens GGUF checkpoints: finds the files, joins split ones, reads weights.

use super::architecture::{Pooling, architecture, pooling};
use super::config::{self, CLASSIFIER, FoundTensors};
use super::file::{GgufFile, MAGIC};
use super::hyper::{self, TABLE};
use super::mmproj::{self, WithTower};
use super::names::{self, ROPE_FACTORS};
use super::order::{apart, pairs_of};
use super::pieces::{Elsewhere, StoredRows};
use super::split::{SUFFIX, Split, open_set};
use super::tokenizer::{self, Vocabulary};
use super::value::malformed;
use crate::blocks::BlockType;
use crate::blocks::BlockWeight;
use crate::checkpoint::{Checkpoint, Source};
use crate::config::GenerationDefaults;
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::files::{CONFIG, Files, GENERATION_CONFIG, VirtualFiles};
use crate::mtp;
use crate::published::{Form, Published};
use crate::scheme::Scheme;
use crate::store::{TensorEntry, WeightStore};
use crate::stored::StoredWeight;
use crate::task::{MODULES, POOLING, Task};
use crate::tensor::Tensor;
use crate::vision::PREPROCESSOR;
use crate::weight::{AffineWeight, QuantizedWeight, Weight};
use bytes::Bytes;
use nq_model::names::{EMBEDDING, HEAD, NORM, layer_vector, stack, tensor_name};
use nq_model::{Architecture, Dims, ModelConfig, VectorKind};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The GGUF file to open: `weights` if it is one, or the only one (or split set) in a folder
/// without safetensors files. `None` if there is none.
///
/// # Errors
/// [`Error::Malformed`] for a folder with several models.
pub(crate) fn find(files: &Files, weights: Option<&str>) -> Result<Option<String>> {
    let is_gguf =
        |name: &str| -> Result<bool> { Ok(files.get(name)?.is_some_and(|b| b.starts_with(MAGIC))) };
    if let Some(name) = weights {
        return Ok(is_gguf(name)?.then(|| name.into()));
    }
    let names = files.names()?;
    if names.iter().any(|n| n.ends_with(".safetensors")) {
        return Ok(None);
    }
    let mut found = Vec::new();
    for name in names {
        if name.ends_with(SUFFIX) && is_gguf(&name)? {
            found.push(name);
        }
    }
    match models(&found).as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one.file.clone())),
        _ => Err(malformed(
            &files.root(),
            "weights",
            "one GGUF model; name its file".into(),
            found.join(", "),
        )),
    }
}

/// A model among the files of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// The file's name without `.gguf` and, if it is one of a split set, without its number.
    pub name: String,
    /// The file, or the first of the split set that is there.
    pub file: String,
}

/// The models among `files`, names in order, by what the names say: a split set is one model, and a file with a tower
/// (`mmproj`) is none.
pub fn models(files: &[String]) -> Vec<NamedFile> {
    let mut found: Vec<NamedFile> = Vec::new();
    let mut last: Option<Split> = None;
    for file in files.iter().filter(|f| !mmproj::is_mmproj(f)) {
        let Some(whole) = file.strip_suffix(SUFFIX) else {
            continue;
        };
        let split = Split::parse(file);
        let continues = last
            .as_ref()
            .zip(split.as_ref())
            .is_some_and(|(a, b)| a.stem == b.stem && a.count == b.count);
        if !continues {
            let name = split.as_ref().map_or(whole, |s| &s.stem).to_owned();
            let file = file.clone();
            found.push(NamedFile { name, file });
        }
        last = split;
    }
    found
}

/// Opens `name`, which starts with [`MAGIC`], and the other files of its set.
///
/// # Errors
/// [`Error::Unsupported`] for another architecture, tokenizer, or a parameter that the
/// architecture does not have; [`Error::Malformed`] for metadata that contradicts itself or the
/// tensors.
pub(crate) fn open(source: &Source, name: &str) -> Result<Checkpoint> {
    let files = open_set(source.files(), name)?;
    let first = files[0].clone();
    if let Some(kind) = first.str("general.type")?.filter(|kind| *kind != "model") {
        let why = match kind {
            "adapter" => "give the model that it was trained on, and this file as --adapter",
            _ => "nq reads models",
        };
        return Err(Error::Unsupported {
            path: first.path().into(),
            what: format!("a GGUF file of general.type {kind}"),
            why: why.into(),
        });
    }
    let architecture = architecture(&first)?;
    let mut by_name = BTreeMap::new();
    for (i, file) in files.iter().enumerate() {
        for tensor in file.tensors().keys() {
            if let Some(other) = by_name.insert(tensor.clone(), i) {
                return Err(Error::Tensor {
                    path: file.path().into(),
                    tensor: tensor.clone(),
                    expected: "each name in one file".into(),
                    found: format!("it in {} too", files[other].path().display()),
                });
            }
        }
    }
    let vocabulary = Vocabulary::read(&first)?;
    let mut store = GgufStore {
        architecture,
        quantization: None,
        files,
        by_name,
        config: None,
        labels: Vec::new(),
    };
    let pooling = pooling(&first, architecture)?;
    if pooling == Pooling::Rank && store.info(CLASSIFIER).is_some() {
        store.labels = config::labels(&first, architecture, &vocabulary)?;
    }
    let embedding = store
        .info("token_embd.weight")
        .ok_or_else(|| Error::Tensor {
            path: first.path().into(),
            tensor: "token_embd.weight".into(),
            expected: "the embedding".into(),
            found: "no such tensor".into(),
        })?;
    let tied = store.info("output.weight").is_none() && store.labels.is_empty();
    let factors = match store.info(ROPE_FACTORS).filter(|_| architecture.gguf_pairs) {
        Some(info) => {
            let len = [info.shape.iter().product()];
            let (stored, kind, bytes) = store.require(ROPE_FACTORS, &len)?;
            let values = match kind.float() {
                Some(dtype) => Tensor::new(dtype, len.to_vec(), bytes)?.to_f32()?,
                None => return Err(store.error(&stored, "F32".into(), kind.name().into())),
            };
            Some(values)
        }
        None => None,
    };
    let tensors = FoundTensors {
        embedding: embedding.kind,
        vocab: embedding.shape.first().copied().unwrap_or(0),
        tied,
        factors,
        table: store.info(TABLE).map(|info| &info.shape[..]),
    };
    let mut json = config::config(&first, architecture, &tensors, &vocabulary)?;
    let layers = json["num_hidden_layers"].as_u64().unwrap_or_default();
    let own = |part: &str| store.info(&format!("blk.{layers}.nextn.{part}.weight"));
    if own("embed_tokens").or(own("shared_head_head")).is_some() {
        json.insert(mtp::DEDICATED.into(), true.into());
    }
    let mut left = Vec::new();
    let tower = mmproj::find(source.files(), name, architecture, &mut left)?;
    let preprocessor = match &tower {
        Some(tower) => {
            let tokens = first.strings("tokenizer.ggml.tokens")?;
            Some(mmproj::describe(tower, tokens, &mut json)?)
        }
        None => None,
    };
    let eos = config::eos_ids(&first, &vocabulary)?;
    let generation = config::generation(&first, &eos)?;
    let contents = |map: Map<String, Value>| -> Bytes { Value::Object(map).to_string().into() };
    let metadata = Metadata {
        pooling,
        file: first,
        config: contents(json),
        generation: contents(generation),
        preprocessor: preprocessor.map(|json| json.to_string().into()),
    };
    let (config, unused) = crate::config::read(&metadata.root(), &metadata.config)?;
    left.extend(unused);
    left.extend(config::left_over(&metadata.file, architecture));
    let generation = GenerationDefaults::parse(&metadata.root(), &metadata.generation)?;
    store.config = Some(config.clone());
    store.quantization = store.describe_quantization()?;
    let files = Files::Virtual(Arc::new(metadata));
    let task = Task::of(&files, false)?;
    let mut store = Published::over(Box::new(store), &config, Form::Gguf, files.root());
    let mut vision = None;
    if let Some(tower) = tower {
        store = WithTower::over(store, tower)?;
        vision = crate::vision::read(&files, &config, store.as_ref(), &mut left)?;
    }
    let checkpoint = Checkpoint::new(files, config, generation, task, store);
    checkpoint.seeing(vision).accounted(left)
}

/// The tensors of one model's GGUF files.
struct GgufStore {
    architecture: &'static Architecture,
    files: Vec<GgufFile>,
    by_name: BTreeMap<String, usize>, // GGUF name -> index into files
    /// The model's shape; `None` until it has been read.
    config: Option<ModelConfig>,
    quantization: Option<Value>,
    /// Tokens whose rows of the head are in [`CLASSIFIER`]; empty if there is none.
    labels: Vec<usize>,
}

impl GgufStore {
    /// The head of a reranker: that of the model it was made from, with the classifier's rows.
    fn ranking_head(&self, Dims { rows, cols }: Dims) -> Result<Weight> {
        let own = self.by_name.contains_key("output.weight");
        let base = if own { HEAD } else { EMBEDDING };
        let base = self.blocks(base, Dims::new(rows, cols))?.weight();
        let mut values = vec![0f32; rows * cols];
        let mut chunks = values.chunks_mut(cols.max(1)).enumerate();
        chunks.try_for_each(|(row, out)| base.dequantize_row(row, out))?;
        let (kind, bytes) = self.require_stored(CLASSIFIER, &[self.labels.len(), cols])?;
        let Some(dtype) = kind.float() else {
            let expected = "F32, F16 or BF16".into();
            return Err(self.error(CLASSIFIER, expected, kind.name().into()));
        };
        let classifier = Tensor::new(dtype, vec![self.labels.len(), cols], bytes)?.to_f32()?;
        for (&token, row) in self.labels.iter().zip(classifier.chunks(cols.max(1))) {
            values[token * cols..(token + 1) * cols].copy_from_slice(row);
        }
        Tensor::from_f32(vec![rows, cols], values).map(Weight::Dense)
    }

    fn is_ranking_head(&self, name: &str) -> bool {
        name == HEAD && !self.labels.is_empty()
    }

    /// The name of a parameter in the file.
    fn stored_name(&self, name: &str) -> Option<String> {
        let layers = self.config.as_ref().map_or(0, |c| c.num_hidden_layers);
        let stored = names::to_gguf(self.architecture, layers, name);
        let stored = tensor_name(&stored?);
        // Ollama's files leave the end of this name out.
        let short = stored.strip_suffix(".bias");
        let short = short.filter(|s| s.ends_with(".ssm_dt") && self.by_name.contains_key(*s));
        Some(short.map_or(stored.clone(), String::from))
    }

    /// The tensors that hold a parameter.
    fn stored_names(&self, name: &str) -> Vec<String> {
        match self.elsewhere(name) {
            Some(elsewhere) => elsewhere.stored(),
            None => self.stored_name(name).into_iter().collect(),
        }
    }

    /// How a matrix lies in the file, if not as a tensor of its own.
    fn elsewhere(&self, name: &str) -> Option<Elsewhere> {
        let own = self.stored_name(name).unwrap_or_default();
        Elsewhere::find(name, &own, |stored| self.by_name.contains_key(stored))
    }

    /// The type of a parameter; `None` if it is absent, or in tensors of several types.
    fn kind(&self, name: &str) -> Option<BlockType> {
        let names = self.stored_names(name);
        let mut kinds = names.iter().map(|n| self.info(n).map(|info| info.kind));
        let first = kinds.next()??;
        kinds.all(|kind| kind == Some(first)).then_some(first)
    }

    fn info(&self, stored: &str) -> Option<&super::file::TensorInfo> {
        self.files[*self.by_name.get(stored)?].tensors().get(stored)
    }

    fn path(&self, tensor: &str) -> &Path {
        let i = self.by_name.get(tensor).copied().unwrap_or(0);
        self.files[i].path()
    }

    fn error(&self, tensor: &str, expected: String, found: String) -> Error {
        Error::Tensor {
            path: self.path(tensor).into(),
            tensor: tensor.into(),
            expected,
            found,
        }
    }

    /// The shape of a matrix in the file: stacks of experts have a dimension for the experts, a single row
    /// none.
    fn shape(&self, name: &str, Dims { rows, cols }: Dims) -> Vec<usize> {
        match stack(name) {
            // Converters wrote those of a single row as vectors, and as matrices later.
            None if rows == 1 => {
                let info = self.stored_name(name).and_then(|stored| self.info(&stored));
                let whole = info.is_some_and(|info| info.shape == [1, cols]);
                if whole { vec![1, cols] } else { vec![cols] }
            }
            Some(_) => {
                let experts = self.config.as_ref().and_then(|c| c.experts);
                let experts = experts.map_or(0, |e| e.count);
                vec![experts, rows / experts.max(1), cols]
            }
            None => vec![rows, cols],
        }
    }

    /// The type and bytes of a parameter, which must have the given shape.
    fn require(&self, name: &str, shape: &[usize]) -> Result<(String, BlockType, Bytes)> {
        let stored = self.stored_name(name).unwrap_or_else(|| name.into());
        let (kind, bytes) = self.require_stored(&stored, shape)?;
        Ok((stored, kind, bytes))
    }

    /// The same, by its name in the file.
    fn require_stored(&self, stored: &str, shape: &[usize]) -> Result<(BlockType, Bytes)> {
        let Some(info) = self.info(stored) else {
            let expected = format!("shape {shape:?}");
            return Err(self.error(stored, expected, "no such tensor".into()));
        };
        if info.shape != shape {
            let found = format!("{} {:?}", info.kind, info.shape);
            return Err(self.error(stored, format!("shape {shape:?}"), found));
        }
        Ok((info.kind, self.files[self.by_name[stored]].data(info)))
    }

    /// A description of the quantization: file type and tensor types; `None` if all are floats.
    fn describe_quantization(&self) -> Result<Option<Value>> {
        let mut types: BTreeMap<&str, usize> = BTreeMap::new();
        let infos = self.files.iter().flat_map(|f| f.tensors().values());
        let mut dense = true;
        for info in infos {
            dense &= info.kind.float().is_some();
            *types.entry(info.kind.name()).or_default() += 1;
        }
        let first = &self.files[0];
        let file_type = first.u64("general.file_type")?;
        let version = first.u64("general.quantization_version")?;
        Ok((!dense).then(|| {
            json!({
                "quant_method": "gguf",
                "file_type": file_type,
                "quantization_version": version,
                "tensors": types,
            })
        }))
    }

    fn blocks(&self, name: &str, dims: Dims) -> Result<Stored> {
        if let (Some(elsewhere), Some(c)) = (self.elsewhere(name), &self.config) {
            return self.joined(&elsewhere.pieces(c, dims), dims);
        }
        let (stored, kind, bytes) = self.require(name, &self.shape(name, dims))?;
        let bytes = match (pairs_of(self.architecture, name), &self.config) {
            (true, Some(c)) => apart(&bytes, dims.rows, c.head_dim).into(),
            _ => bytes,
        };
        self.typed(&stored, kind, dims, bytes)
    }

    /// A matrix of bytes of `kind`, from the tensor `stored`.
    fn typed(&self, stored: &str, kind: BlockType, dims: Dims, bytes: Bytes) -> Result<Stored> {
        let typed = match kind.float() {
            Some(dtype) => Tensor::new(dtype, vec![dims.rows, dims.cols], bytes).map(Stored::Dense),
            None => BlockWeight::new(kind, dims, bytes).map(|b| Stored::Blocks(stored.into(), b)),
        };
        typed.map_err(|e| e.in_tensor(self.path(stored), stored))
    }

    /// The matrix of these rows. Of one piece, they are those of the file; pieces of several types become f32.
    fn joined(&self, pieces: &[StoredRows], dims: Dims) -> Result<Stored> {
        let mut parts = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let (kind, bytes) = self.require_stored(&piece.stored, &piece.shape)?;
            let all: usize = piece.shape.iter().rev().skip(1).product();
            let row = bytes.len() / all.max(1);
            let bytes = bytes.slice(piece.rows.start * row..piece.rows.end * row);
            parts.push((piece, kind, bytes));
        }
        if let [(piece, kind, bytes)] = &parts[..] {
            return self.typed(&piece.stored, *kind, dims, bytes.clone());
        }
        let (first, kind, _) = &parts[0];
        if parts.iter().all(|(_, other, _)| other == kind) {
            let bytes: Vec<u8> = parts.iter().flat_map(|(.., b)| b).copied().collect();
            return self.typed(&first.stored, *kind, dims, bytes.into());
        }
        let mut values = vec![0f32; dims.elements()];
        let mut out = values.chunks_exact_mut(dims.cols);
        for (piece, kind, bytes) in parts {
            let dims = Dims::new(piece.rows.len(), dims.cols);
            let part = self.typed(&piece.stored, kind, dims, bytes)?.weight();
            for (row, out) in (0..dims.rows).zip(&mut out) {
                part.dequantize_row(row, out)?;
            }
        }
        Tensor::from_f32(vec![dims.rows, dims.cols], values).map(Stored::Dense)
    }
}

impl GgufStore {
    fn read_matrix(
        &self,
        name: &str,
        dims: Dims,
        to_affine: fn(&BlockWeight) -> Result<AffineWeight>,
    ) -> Result<Weight> {
        if self.is_ranking_head(name) {
            return self.ranking_head(dims);
        }
        match self.blocks(name, dims)? {
            Stored::Dense(tensor) => Ok(Weight::Dense(tensor)),
            Stored::Blocks(stored, blocks) => match to_affine(&blocks) {
                Ok(affine) => Ok(Weight::Quantized(QuantizedWeight::Affine(affine))),
                Err(e) => Err(e.in_tensor(self.path(&stored), &stored)),
            },
        }
    }
}

enum Stored {
    Dense(Tensor),
    Blocks(String, BlockWeight),
}

impl Stored {
    fn weight(self) -> StoredWeight {
        match self {
            Stored::Dense(tensor) => StoredWeight::Canonical(Weight::Dense(tensor)),
            Stored::Blocks(_, blocks) => StoredWeight::GgufBlocks(blocks),
        }
    }
}

impl WeightStore for GgufStore {
    fn format(&self) -> &'static str {
        "gguf"
    }

    fn sources(&self, name: &str) -> Vec<String> {
        let ranking = self.is_ranking_head(name).then_some(CLASSIFIER);
        // Of the whole model, and read when the file is opened.
        let divisors = name == NORM && self.architecture.gguf_pairs;
        let others = ranking.into_iter().chain(divisors.then_some(ROPE_FACTORS));
        (self.stored_names(name).into_iter())
            .chain(others.map(String::from))
            .collect()
    }

    fn contains(&self, name: &str) -> bool {
        if self.is_ranking_head(name) {
            return true;
        }
        let names = self.stored_names(name);
        !names.is_empty() && names.iter().all(|n| self.by_name.contains_key(n))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let taps = self
            .config
            .as_ref()
            .and_then(|c| match layer_vector(name)?.kind {
                VectorKind::Conv => Some(c.delta?.conv),
                VectorKind::NgramConv => Some(c.ngrams.as_ref()?.taps),
                VectorKind::Decay | VectorKind::TimeStep => None,
            });
        let shape = taps.map_or(vec![len], |taps| vec![len / taps, taps]);
        let (stored, kind, bytes) = self.require(name, &shape)?;
        let Some(dtype) = kind.float() else {
            let expected = "F32, F16 or BF16".into();
            return Err(self.error(&stored, expected, kind.name().into()));
        };
        Tensor::new(dtype, vec![len], bytes)
    }

    fn integers(&self, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
        match &self.config {
            Some(c) => hyper::integers(&self.files[0], c, name, len),
            None => Ok(None),
        }
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.read_matrix(name, dims, BlockWeight::to_affine)
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.read_matrix(name, dims, BlockWeight::to_table)
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        if self.is_ranking_head(name) {
            return None;
        }
        let kind = self.kind(name)?;
        kind.layout()
            .map(|layout| layout.narrow_scheme(kind.elements()).into())
    }

    fn is_float(&self, name: &str) -> bool {
        self.kind(name).is_some_and(|kind| kind.float().is_some())
    }

    fn matrix_in_levels(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.read_matrix(name, dims, BlockWeight::to_levels)
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        if self.is_ranking_head(name) {
            return self.ranking_head(dims).map(StoredWeight::Canonical);
        }
        Ok(self.blocks(name, dims)?.weight())
    }

    fn exactness(&self, name: &str) -> Exactness {
        let kind = self.kind(name);
        kind.map_or(Exactness::Exact, BlockWeight::exactness)
    }

    fn entries(&self) -> Vec<TensorEntry> {
        let mut all: Vec<_> = self.files.iter().flat_map(GgufFile::entries).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn file_bytes(&self) -> u64 {
        self.files.iter().map(GgufFile::file_bytes).sum()
    }

    fn gguf_file(&self) -> Option<&Path> {
        match self.files.as_slice() {
            [file] => Some(file.path()),
            _ => None,
        }
    }

    fn quantization(&self) -> Option<&Value> {
        self.quantization.as_ref()
    }
}

/// The files that other formats keep beside their weights, generated from metadata; the
/// tokenizer, which is large, only when asked for.
#[derive(Debug)]
struct Metadata {
    file: GgufFile,
    config: Bytes,
    generation: Bytes,
    /// Beside a tower.
    preprocessor: Option<Bytes>,
    /// Tells embedding models and rerankers from others.
    pooling: Pooling,
}

impl VirtualFiles for Metadata {
    fn root(&self) -> PathBuf {
        self.file.path().into()
    }

    fn names(&self) -> Vec<String> {
        let all = [CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG];
        let pooled = (self.pooling != Pooling::None).then_some(MODULES);
        let sees = self.preprocessor.is_some().then_some(PREPROCESSOR);
        let all = all.into_iter().chain(pooled).chain(sees);
        all.map(String::from).collect()
    }

    fn get(&self, name: &str) -> Result<Option<Bytes>> {
        Ok(match name {
            CONFIG => Some(self.config.clone()),
            GENERATION_CONFIG => Some(self.generation.clone()),
            PREPROCESSOR => self.preprocessor.clone(),
            TOKENIZER => Some(tokenizer::tokenizer_json(&self.file)?.into()),
            TOKENIZER_CONFIG => Some(tokenizer::tokenizer_config_json(&self.file)?.into()),
            MODULES if self.pooling == Pooling::Last => Some(POOLED.into()),
            MODULES if self.pooling == Pooling::Rank => Some(RANKED.into()),
            POOLING if self.pooling == Pooling::Last => {
                Some(r#"{"pooling_mode": "lasttoken"}"#.into())
            }
            _ => None,
        })
    }
}

/// The steps of a reranker.
const RANKED: &str = r#"[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
  {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.models.LogitScore"}]
"#;

/// The steps of an embedding model whose file names its pooling.
const POOLED: &str = r#"[
  {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
  {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
  {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
]
"#;
