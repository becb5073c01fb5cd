//! Writes a quantized folder step by step, so that a kill at any moment loses at most
//! the current step.
//!
//! All work happens in `OUT.partial`, beside the destination: see `staging.rs`.

use super::record::{QuantizationRecord, TensorScheme};
use super::staging::{
    FINISHED, FOLDER, PLAN, STATE, STEP_SUFFIX, create, discard, is_complete, lock, pretty,
    read_json, remove, remove_file, set_folder, sets, staged_work, staging,
};
use super::{NqStore, parts, read_quantized, verify};
use crate::checkpoint::Checkpoint;
use crate::durable::{
    COPIED_BELOW, Form, available, check_destination, check_space, is_copied, list, parent,
    rename_folder, sync_folder, write_bytes,
};
use crate::error::{Error, Result};
use crate::files::{CONFIG, Files};
use crate::hash;
use crate::object::json_object;
use crate::progress::Progress;
use crate::safetensors::SafetensorsFile;
use crate::serialize::{MAX_SHARD, ShardLayout, TensorSpec, write_tensors};
use crate::shards::Shards;
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::names::HEAD;
use nq_model::vision::TowerParameter;
use nq_model::{Dims, FLOATS, Shape, tensor_name};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The key of a step's `__metadata__` that holds the schemes of its matrices.
const SCHEMES: &str = "nq_schemes";

/// The step that stages the tower that sees images.
const TOWER: &str = "tower";

/// A parameter to be staged.
#[derive(Clone, Copy, Debug)]
pub enum Param<'a> {
    /// A norm `[len]`, not quantized.
    Vector(&'a Tensor),
    /// A Linear or embedding `[out, in]`, dense or quantized.
    Matrix(&'a Weight),
}

/// Options of [`Writer::open`].
#[derive(Clone, Copy, Debug, Default)]
pub struct WriterOptions {
    /// Continues work staged earlier under the same plan.
    pub resume: bool,
    /// Replaces an existing destination (once the new folder is whole), and discards staged
    /// work that is not resumed.
    pub force: bool,
    /// Estimated size of the weight files in bytes: the disk must hold it twice, as steps and as
    /// the result.
    pub expected_bytes: u64,
}

/// Result of [`Writer::open`].
pub enum Opened {
    /// There is work to do.
    Writer(Writer),
    /// With `resume`: the run was killed after the result was in place; nothing is left to do.
    Complete,
}

/// A quantized folder that is being written.
pub struct Writer {
    dest: PathBuf,
    staging: PathBuf,
    source: Files,
    config: Map<String, Value>,
    resumed: bool,
    /// The current set of steps.
    set: usize,
    _lock: File,
}

/// A finished step, memory-mapped.
pub struct Staged {
    shards: Shards,
    schemes: BTreeMap<String, Option<TensorScheme>>,
}

/// The sizes of a finished folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of the weight files, headers included.
    pub file_bytes: u64,
}

impl Writer {
    /// Begins, or resumes, writing the folder `dest` from the model in `source`, whose config and
    /// tokenizer files it will contain. `plan` is everything that determines the result.
    ///
    /// # Errors
    /// [`Error::Exists`] if `dest` or unfinished work exists and `options` have neither
    /// `force` nor `resume`, if `dest` must not be replaced ([`check_destination`]) or is the
    /// source, or if another process is at work; [`Error::Malformed`] if the work to
    /// be resumed has another plan; [`Error::Space`] if the disk is too small; [`Error::Io`].
    pub fn open(
        dest: &Path,
        source: &Files,
        plan: &Value,
        options: WriterOptions,
    ) -> Result<Opened> {
        let staging = staging(dest);
        if options.resume && is_complete(dest, &staging)? {
            discard(&staging)?;
            return Ok(Opened::Complete);
        }
        let resuming = options.resume && staging.join(PLAN).exists();
        // Left by a kill at the very end of `discard`; this fails, as it should, unless it is empty.
        let _ = fs::remove_dir(&staging);
        if options.resume && !resuming && !options.force && dest.exists() {
            return Err(Error::Exists {
                path: dest.into(),
                what:
                    "already there, and no unfinished work to resume beside it; --force replaces \
                       it once the new one is whole"
                        .into(),
            });
        }
        check_destination(dest, Form::Folder, options.force)?;
        source.check_apart(dest)?;
        let (files, staged) = staged_work(&staging)?;
        // Steps without a plan, which a kill in `start` leaves, cannot be continued: there is nothing to lose.
        let lost = options.resume && !resuming;
        if files > 0 && !resuming && !options.force && !lost {
            return Err(Error::Exists {
                path: staging,
                what: "unfinished work is there; --resume continues it, --force discards it".into(),
            });
        }
        let staged = if resuming { staged } else { 0 };
        let needed = (2 * options.expected_bytes).saturating_sub(staged);
        check_space(&staging, needed)?;
        create(&staging)?;
        let writer = Writer {
            dest: dest.into(),
            source: source.clone(),
            config: read_config(source)?,
            resumed: resuming,
            set: 0,
            _lock: lock(&staging)?,
            staging,
        };
        if resuming {
            writer.take_up(plan)?
        } else {
            writer.start(plan)?
        }
        Ok(Opened::Writer(writer))
    }

    /// Empties the staging folder and writes the plan.
    fn start(&self, plan: &Value) -> Result<()> {
        for name in [PLAN, STATE, FINISHED] {
            remove_file(&self.staging.join(name))?;
        }
        self.retain_sets(&[])?;
        remove(&self.staging.join(FOLDER))?;
        create(&self.steps())?;
        self.sweep()?;
        write_bytes(&self.staging.join(PLAN), &pretty(plan))
    }

    /// Checks the plan and drops what a killed run left half-written.
    fn take_up(&self, plan: &Value) -> Result<()> {
        let path = self.staging.join(PLAN);
        let old = read_json(&path)?.unwrap_or_default();
        if old != *plan {
            return Err(Error::Malformed {
                path,
                what: "plan of the unfinished work (--force discards it)".into(),
                expected: unlike(plan, &old).to_string(),
                found: unlike(&old, plan).to_string(),
            });
        }
        create(&self.steps())?;
        remove(&self.staging.join(FOLDER))?;
        self.sweep()
    }

    /// Removes temporary files that a killed run left.
    fn sweep(&self) -> Result<()> {
        let sets = sets(&self.staging)?.into_iter().map(|(_, folder)| folder);
        for folder in sets.chain([self.staging.clone()]) {
            for entry in list(&folder)? {
                if entry.file_name().to_string_lossy().ends_with(".tmp") {
                    remove_file(&entry.path())?;
                }
            }
        }
        Ok(())
    }

    fn steps(&self) -> PathBuf {
        set_folder(&self.staging, self.set)
    }

    /// True if this continues existing work.
    pub fn resumed(&self) -> bool {
        self.resumed
    }

    /// The folder of unfinished work.
    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// Switches to another set of steps, for another version of the result, whose steps are separate
    /// from those of all others. A run begins, and resumes, in set 0.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn enter(&mut self, set: usize) -> Result<()> {
        create(&set_folder(&self.staging, set))?;
        self.set = set;
        sync_folder(&self.staging)
    }

    /// Makes a finished step of the set `from` a step of this set too.
    ///
    /// # Errors
    /// [`Error::Io`]; errors of [`Writer::put`] for an invalid name.
    pub fn adopt(&self, from: usize, step: &str) -> Result<()> {
        let to = self.step_path(step)?;
        let name = to.file_name().unwrap_or_default();
        let from = set_folder(&self.staging, from).join(name);
        // Steps are replaced, never changed, so both sets may share a file.
        if fs::hard_link(&from, &to).is_err() {
            let bytes = fs::read(&from).map_err(|e| Error::io(&from, "read", e))?;
            write_bytes(&to, &bytes)?;
        }
        sync_folder(&self.steps())
    }

    /// Numbers of the existing sets of steps.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sets(&self) -> Result<Vec<usize>> {
        Ok(sets(&self.staging)?.into_iter().map(|(n, _)| n).collect())
    }

    /// Removes all sets of steps except these.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn retain_sets(&self, keep: &[usize]) -> Result<()> {
        let all = sets(&self.staging)?.into_iter();
        all.filter(|(n, _)| !keep.contains(n))
            .try_for_each(|(_, folder)| remove(&folder))
    }

    /// True if there is disk space to stage this many more bytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the system does not say.
    pub fn has_room(&self, bytes: u64) -> Result<bool> {
        Ok(available(&self.staging)? >= bytes)
    }

    fn step_path(&self, step: &str) -> Result<PathBuf> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if step.is_empty() || step.starts_with('.') || !step.chars().all(plain) {
            return Err(Error::Malformed {
                path: self.steps(),
                what: "step name".into(),
                expected: "letters, digits, '.', '_' and '-'".into(),
                found: format!("{step:?}"),
            });
        }
        Ok(self.steps().join(format!("{step}{STEP_SUFFIX}")))
    }

    /// Stages one finished step, by parameter name (without `.weight`). When this returns, the step
    /// survives a crash; before, it leaves no trace. A step of the same name is replaced.
    ///
    /// # Errors
    /// [`Error::Space`] if the disk is full, [`Error::Io`]; earlier steps are untouched.
    pub fn put(&self, step: &str, params: &[(String, Param<'_>)]) -> Result<()> {
        let mut tensors = Vec::new();
        let mut schemes = BTreeMap::new();
        for (name, param) in params {
            match param {
                Param::Vector(t) => tensors.push((tensor_name(name), (*t).clone())),
                Param::Matrix(weight) => {
                    schemes.insert(name, scheme_of(weight));
                    tensors.extend(parts(name, weight)?);
                }
            }
        }
        let schemes = serde_json::to_string(&schemes).expect("string keys");
        let metadata = BTreeMap::from([(SCHEMES.to_owned(), schemes)]);
        write_tensors(&self.step_path(step)?, &tensors, &metadata)
    }

    /// Stages the tower that sees images, as `checkpoint` has it, if there is one and it is not staged yet.
    ///
    /// # Errors
    /// A missing or misshapen tensor; errors of [`Writer::put`].
    pub fn put_tower(&self, checkpoint: &Checkpoint) -> Result<()> {
        let Some(vision) = checkpoint.vision() else {
            return Ok(());
        };
        if self.staged(TOWER)?.is_some() {
            return Ok(());
        }
        let store = checkpoint.store();
        let (mut vectors, mut matrices) = (Vec::new(), Vec::new());
        for TowerParameter { name, shape, .. } in vision.parameters() {
            match shape {
                Shape::Vector(len) => vectors.push((name.clone(), store.vector(&name, len)?)),
                Shape::Matrix(rows, cols) => {
                    let weight = store.matrix(&name, Dims::new(rows, cols))?;
                    matrices.push((name, weight));
                }
            }
        }
        let vectors = vectors.iter().map(|(n, t)| (n.clone(), Param::Vector(t)));
        let matrices = matrices.iter().map(|(n, w)| (n.clone(), Param::Matrix(w)));
        self.put(TOWER, &vectors.chain(matrices).collect::<Vec<_>>())
    }

    /// The finished step with this name, if any.
    ///
    /// # Errors
    /// Errors of [`SafetensorsFile::parse`], if the file was damaged.
    pub fn staged(&self, step: &str) -> Result<Option<Staged>> {
        let path = self.step_path(step)?;
        if path.exists() {
            Staged::open(vec![path]).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Removes a finished step, if it exists; when this returns, a crash does not bring it back.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove_step(&self, step: &str) -> Result<()> {
        remove_file(&self.step_path(step)?)?;
        sync_folder(&self.steps())
    }

    /// All finished steps, read as one.
    fn all_staged(&self) -> Result<Staged> {
        let mut paths: Vec<PathBuf> = list(&self.steps())?.iter().map(|e| e.path()).collect();
        paths.retain(|p| p.to_string_lossy().ends_with(STEP_SUFFIX));
        paths.sort();
        Staged::open(paths)
    }

    /// Path where a step may keep a file of its own while it runs, e.g. a checkpoint. The file is
    /// discarded with the staged work and is not part of the result.
    pub fn scratch_path(&self, name: &str) -> PathBuf {
        self.steps().join(name)
    }

    /// The pipeline's own state, as last set by [`Writer::set_state`].
    ///
    /// # Errors
    /// [`Error::Malformed`] if it is not JSON, [`Error::Io`].
    pub fn state(&self) -> Result<Option<Value>> {
        read_json(&self.staging.join(STATE))
    }

    /// Saves the pipeline's own state, durably.
    ///
    /// # Errors
    /// [`Error::Space`] or [`Error::Io`]; the old state is then kept.
    pub fn set_state(&self, state: &Value) -> Result<()> {
        write_bytes(&self.staging.join(STATE), &pretty(state))
    }

    /// The model as staged so far, for measuring it before it is finished. Nothing is written.
    pub fn preview(&self, record: &QuantizationRecord) -> Result<Checkpoint> {
        let staged = self.all_staged()?;
        let mut record = record.clone();
        record.set_schemes(&staged.schemes);
        let value = record.to_json();
        let store = NqStore::new(staged.shards, record, value)?;
        Checkpoint::of_files(self.source.clone(), Box::new(store))
    }

    /// Assembles the staged steps into the final folder, checks that it opens and that every
    /// parameter is there, and puts it in place. `record`'s schemes are set from what was staged.
    ///
    /// # Errors
    /// [`Error::Space`], [`Error::Io`], or [`Error::Tensor`] for a parameter that was never
    /// staged. The staged work then still exists, and the destination is unchanged.
    pub fn finish(
        self,
        mut record: QuantizationRecord,
        progress: &dyn Progress,
    ) -> Result<Written> {
        let folder = self.staging.join(FOLDER);
        remove(&folder)?;
        create(&folder)?;
        let staged = self.all_staged()?;
        record.set_schemes(&staged.schemes);
        let metadata = [
            ("format", "pt".to_owned()),
            ("nq_version", record.version().to_string()),
        ];
        let metadata = metadata.map(|(k, v)| (k.to_owned(), v)).into();
        let layout = ShardLayout::new(staged.specs(), &metadata, MAX_SHARD);
        check_space(&folder, layout.file_bytes())?;
        layout.write(&folder, progress, &mut |spec, sink| {
            staged.write(&spec.name, &mut |bytes| sink.write(bytes))
        })?;
        copy_files(&self.source, &folder)?;
        let mut config = self.config.clone();
        config.shift_remove("compression_config");
        if staged.schemes.contains_key(HEAD) {
            config.insert("tie_word_embeddings".into(), false.into());
        }
        config.insert("quantization_config".into(), record.to_json());
        let config = pretty(&Value::Object(config));
        write_bytes(&folder.join(CONFIG), &config)?;
        sync_folder(&folder)?;
        verify(&Checkpoint::open(&folder)?)?;

        let marker = self.staging.join(FINISHED);
        write_bytes(&marker, hash::sha256_hex(&config).as_bytes())?;
        rename_folder(&folder, &self.dest)?;
        let written = Written {
            tensor_bytes: layout.tensor_bytes(),
            file_bytes: layout.file_bytes(),
        };
        drop(staged);
        discard(&self.staging)?;
        Ok(written)
    }
}

impl Drop for Writer {
    /// Removes the folder of a run that failed before it staged anything.
    fn drop(&mut self) {
        let nothing = staged_work(&self.staging).is_ok_and(|(files, _)| files == 0);
        if nothing && !self.staging.join(FINISHED).exists() {
            let _ = discard(&self.staging); // the run's own error is the one to report
        }
    }
}

impl Staged {
    fn open(paths: Vec<PathBuf>) -> Result<Self> {
        let mut files = Vec::new();
        let mut schemes = BTreeMap::new();
        for path in &paths {
            let bytes = crate::files::map_file(path).map_err(|e| Error::io(path, "open", e))?;
            let file = SafetensorsFile::parse(path, bytes)?;
            let text = file.metadata().get(SCHEMES).map_or("", String::as_str);
            let step: BTreeMap<String, Option<TensorScheme>> =
                serde_json::from_str(text).map_err(|e| Error::Malformed {
                    path: path.clone(),
                    what: format!("metadata {SCHEMES}"),
                    expected: "schemes by name".into(),
                    found: e.to_string(),
                })?;
            schemes.extend(step);
            files.push(file);
        }
        let root = paths.first().map(|p| parent(p)).unwrap_or_default();
        let shards = Shards::new(root, files)?;
        Ok(Staged { shards, schemes })
    }

    /// The staged weight `name` `[out_features, in_features]`.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is not in this step or has other dimensions.
    pub fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        match self.schemes.get(name) {
            Some(Some(scheme)) => read_quantized(&self.shards, name, *scheme, dims),
            _ => {
                let shape = [dims.rows, dims.cols];
                let tensor = self.shards.require(&tensor_name(name), &FLOATS, &shape)?;
                Ok(Weight::Dense(tensor))
            }
        }
    }

    /// The staged norm `name` `[len]`.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is not in this step or has another length.
    pub fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.shards.require(&tensor_name(name), &FLOATS, &[len])
    }

    fn specs(&self) -> Vec<TensorSpec> {
        let spec = |name: &str| {
            let tensor = self.shards.get(name).expect("listed by the same set");
            TensorSpec {
                name: name.into(),
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
            }
        };
        self.shards.names().map(spec).collect()
    }

    fn write(&self, name: &str, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let tensor = self.shards.get(name).expect("listed by the same set");
        sink(tensor.data())
    }
}

fn scheme_of(weight: &Weight) -> Option<TensorScheme> {
    match weight {
        Weight::Dense(_) => None,
        Weight::Quantized(q) => Some(TensorScheme::of(q)),
    }
}

/// Copies to `folder` what a model needs beside weights and config.json, and its licence.
///
/// # Errors
/// [`Error::Io`] for files that cannot be listed, read or written.
pub fn copy_files(files: &Files, folder: &Path) -> Result<()> {
    let names = files.names()?.into_iter().filter(|n| is_copied(n));
    for name in names.chain(COPIED_BELOW.map(String::from)) {
        let Some(contents) = files.get(&name)? else {
            continue;
        };
        let path = folder.join(&name);
        create(&parent(&path))?;
        write_bytes(&path, &contents)?;
    }
    Ok(())
}

/// The entries of `plan` that differ in `other`; all of it if one of the two is not an object.
fn unlike(plan: &Value, other: &Value) -> Value {
    let (Value::Object(all), Value::Object(others)) = (plan, other) else {
        return plan.clone();
    };
    let unlike = all.iter().filter(|(k, v)| others.get(*k) != Some(v));
    Value::Object(unlike.map(|(k, v)| (k.clone(), v.clone())).collect())
}

fn read_config(source: &Files) -> Result<Map<String, Value>> {
    json_object(&source.path(CONFIG), &source.require(CONFIG)?)
}
