//! The safetensors files of one checkpoint as one set of tensors: a single file, or
//! shards listed by an index.

use crate::error::{Error, Result};
use crate::files::Files;
use crate::safetensors::SafetensorsFile;
use crate::store::TensorEntry;
use crate::tensor::Tensor;
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{DType, FLOATS};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The customary name of weights in one file.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The customary name of the index of sharded weights.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const SUFFIX: &str = ".safetensors";
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// All tensors of a checkpoint's safetensors files, memory-mapped.
#[derive(Clone, Debug)]
pub struct Shards {
    root: PathBuf,
    files: Vec<SafetensorsFile>,
    by_name: BTreeMap<String, (usize, String)>, // tensor -> index into files, name there
    bare: bool,
}

/// The prefix of tensor names in a causal model, which a model saved without a head lacks.
pub(crate) const PREFIX: &str = "model.";

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Shards {
    /// Opens the weights of a folder: `SINGLE`, otherwise those that `INDEX` lists, otherwise
    /// the only safetensors file or index of another name.
    ///
    /// # Errors
    /// [`Error::Missing`], naming an absent file or shard; [`Error::Malformed`] for an invalid
    /// index; [`Error::Tensor`] for a tensor that is in two files or not in the file that the index
    /// gives; otherwise errors of [`SafetensorsFile::parse`].
    pub fn open(files: &Files) -> Result<Self> {
        Self::open_named(files, &find(files)?)
    }

    /// Opens the index `name` and its shards, or one safetensors file as the whole set.
    pub(crate) fn open_named(files: &Files, name: &str) -> Result<Self> {
        if name.ends_with(INDEX_SUFFIX) {
            return Self::open_index(files, name);
        }
        let file = SafetensorsFile::parse(&files.path(name), files.require(name)?)?;
        Self::new(files.root(), vec![file])
    }

    fn open_index(files: &Files, name: &str) -> Result<Self> {
        let path = files.path(name);
        let malformed = |what: &str, expected: &str, found: String| Error::Malformed {
            path: path.clone(),
            what: what.into(),
            expected: expected.into(),
            found,
        };
        let index: ShardIndex = serde_json::from_slice(&files.require(name)?).map_err(|e| {
            malformed(
                "contents",
                "an object with weight_map, tensor names to file names",
                e.to_string(),
            )
        })?;
        let shards: BTreeSet<&String> = index.weight_map.values().collect();
        let mut opened = Vec::with_capacity(shards.len());
        for shard in shards {
            if Path::new(shard).file_name() != Some(shard.as_ref()) {
                return Err(malformed("weight_map", "plain file names", shard.clone()));
            }
            let bytes = files.get(shard)?.ok_or_else(|| Error::Missing {
                path: files.root(),
                what: format!("{shard}, a shard that {name} lists"),
            })?;
            opened.push(SafetensorsFile::parse(&files.path(shard), bytes)?);
        }
        let set = Self::new(files.root(), opened)?;
        for (tensor, shard) in &index.weight_map {
            let full = full_name(tensor, set.bare);
            let found = match set.by_name.get(&full) {
                Some((i, _)) if set.files[*i].path() == files.path(shard) => continue,
                Some((i, _)) => format!("it in {}", set.files[*i].path().display()),
                // Of two names of the same weight, safetensors keeps one.
                None if [HEAD, EMBEDDING].iter().any(|w| belongs(&full, w)) => continue,
                None => "no such tensor".into(),
            };
            return Err(Error::Tensor {
                path: files.path(shard),
                tensor: tensor.clone(),
                expected: format!("it here, as {name} says"),
                found,
            });
        }
        Ok(set)
    }

    /// A set of `files`. Tensors of a bare model, named without `model.`, get the names of a causal model's
    /// tensors. Messages about the set name `root`.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a tensor that is in two files.
    pub fn new(root: PathBuf, files: Vec<SafetensorsFile>) -> Result<Self> {
        let has = |name: &str| files.iter().any(|f| f.names().any(|n| n == name));
        let bare = has("embed_tokens.weight") && !has("model.embed_tokens.weight");
        let mut by_name = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                let stored = (i, name.to_owned());
                if let Some((other, _)) = by_name.insert(full_name(name, bare), stored) {
                    return Err(Error::Tensor {
                        path: file.path().into(),
                        tensor: name.into(),
                        expected: "each name in one file".into(),
                        found: format!("it in {} too", files[other].path().display()),
                    });
                }
            }
        }
        Ok(Shards {
            root,
            files,
            by_name,
            bare,
        })
    }

    /// True if there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// The tensor `name`, as a view of its file.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        let (i, stored) = self.by_name.get(name)?;
        self.files[*i].get(stored)
    }

    /// The tensor with exactly this name, if any, which must be of floats and of this shape.
    ///
    /// # Errors
    /// Errors of [`Shards::require`], except that it is absent.
    pub(crate) fn floats(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        match self.contains(name) {
            true => self.require(name, &FLOATS, shape).map(Some),
            false => Ok(None),
        }
    }

    /// The 64-bit integers in the tensor with exactly this name, if any, which must have `len` of them.
    ///
    /// # Errors
    /// Errors of [`Shards::require`], except that it is absent.
    pub(crate) fn integers(&self, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
        if !self.contains(name) {
            return Ok(None);
        }
        let tensor = self.require(name, &[DType::I64], &[len])?;
        let (all, _) = tensor.data().as_chunks::<8>();
        Ok(Some(all.iter().map(|&b| i64::from_le_bytes(b)).collect()))
    }

    /// Lets the head's weight, if there is no embedding, be the embedding, for a model in which they are the
    /// same: files may keep the one weight under either name.
    pub(crate) fn tie(&mut self) {
        if self.by_name.keys().any(|name| belongs(name, EMBEDDING)) {
            return;
        }
        let head: Vec<String> = self
            .names()
            .filter(|n| belongs(n, HEAD))
            .map(Into::into)
            .collect();
        for name in head {
            if let Some(stored) = self.by_name.remove(&name) {
                let renamed = format!("{EMBEDDING}{}", &name[HEAD.len()..]);
                self.by_name.insert(renamed, stored);
            }
        }
    }

    /// True if the files name tensors without `model.`.
    pub(crate) fn is_bare(&self) -> bool {
        self.bare
    }

    /// The tensor `name`, checked to have one of `dtypes` and exactly `shape`.
    ///
    /// # Errors
    /// [`Error::Tensor`], saying what differs, or that it is absent.
    pub fn require(&self, name: &str, dtypes: &[DType], shape: &[usize]) -> Result<Tensor> {
        let expected = || {
            let names: Vec<_> = dtypes.iter().map(|d| d.name()).collect();
            format!("{} {shape:?}", names.join(" or "))
        };
        let Some(tensor) = self.get(name) else {
            return Err(self.error(name, expected(), "no such tensor".into()));
        };
        if !dtypes.contains(&tensor.dtype()) || tensor.shape() != shape {
            let found = format!("{} {:?}", tensor.dtype(), tensor.shape());
            return Err(self.error(name, expected(), found));
        }
        Ok(tensor)
    }

    fn path(&self, name: &str) -> &Path {
        let file = self.by_name.get(name);
        file.map_or(self.root.as_path(), |(i, _)| self.files[*i].path())
    }

    /// An error about the tensor `name`, with the path of the file that holds it, or of the folder.
    pub fn error(&self, name: &str, expected: String, found: String) -> Error {
        Error::Tensor {
            path: self.path(name).into(),
            tensor: name.into(),
            expected,
            found,
        }
    }

    /// Adds the name of the weight to an error about parts that do not match each other.
    pub(crate) fn wrap(&self, name: &str, error: Error) -> Error {
        error.in_tensor(self.path(name), name)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The files, in name order.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// Bytes of all files, headers included.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(SafetensorsFile::file_bytes).sum()
    }

    /// Entries of all tensors, in name order.
    pub fn entries(&self) -> Vec<TensorEntry> {
        let stored = self
            .files
            .iter()
            .map(|f| f.entries().map(|e| (e.name.clone(), e)).collect());
        let stored: Vec<BTreeMap<String, TensorEntry>> = stored.collect();
        let entry = |(name, (i, own)): (&String, &(usize, String))| TensorEntry {
            name: name.clone(),
            ..stored[*i][own].clone()
        };
        self.by_name.iter().map(entry).collect()
    }
}

/// True if the tensor `name` is a part of the weight `weight`.
fn belongs(name: &str, weight: &str) -> bool {
    name.strip_prefix(weight)
        .is_some_and(|rest| rest.starts_with('.'))
}

/// The prefix of a text model's tensors within a model that also sees images.
pub(crate) const TEXT_PREFIX: &str = "model.language_model.";

/// The prefix of an MTP layer's tensors.
const MTP: &str = "mtp.";

/// The name that a causal model's tensor has, of one that `bare` files hold.
pub(crate) fn full_name(stored: &str, bare: bool) -> String {
    if let Some(rest) = stored.strip_prefix(TEXT_PREFIX) {
        return format!("{PREFIX}{rest}");
    }
    // As files of the first transformers that knew such models name the tower.
    if stored.starts_with("visual.") {
        return format!("{PREFIX}{stored}");
    }
    // Some programs put this before all that a model has besides its head.
    if let Some(rest) = stored.strip_prefix(PREFIX).filter(|r| r.starts_with(MTP)) {
        return rest.to_owned();
    }
    let outside = ["lm_head", MTP];
    match bare && !outside.iter().any(|start| stored.starts_with(start)) {
        true => format!("{PREFIX}{stored}"),
        false => stored.to_owned(),
    }
}

/// The file that [`Shards::open`] starts from.
fn find(files: &Files) -> Result<String> {
    let names = files.names()?;
    for customary in [SINGLE, INDEX] {
        if names.iter().any(|n| n == customary) {
            return Ok(customary.into());
        }
    }
    for suffix in [INDEX_SUFFIX, SUFFIX] {
        let with: Vec<&String> = names.iter().filter(|n| n.ends_with(suffix)).collect();
        match with.as_slice() {
            [] => {}
            [one] => return Ok((*one).clone()),
            several => {
                return Err(Error::Malformed {
                    path: files.root(),
                    what: "weights".into(),
                    expected: format!("{SINGLE} or {INDEX}"),
                    found: several
                        .iter()
                        .map(|s| s.as_str())
                        .collect::<Vec<_>>()
                        .join(", "),
                });
            }
        }
    }
    if let Some(bin) = names
        .iter()
        .find(|n| n.ends_with(".bin") || n.ends_with(".pth"))
    {
        return Err(Error::Unsupported {
            path: files.root(),
            what: format!("a PyTorch pickle ({bin})"),
            why: "nq reads safetensors and GGUF".into(),
        });
    }
    Err(Error::Missing {
        path: files.root(),
        what: format!("{SINGLE} or {INDEX}"),
    })
}
