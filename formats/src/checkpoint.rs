//! A checkpoint: a model's configuration, tokenizer files and weights, whatever the format.

use crate::account;
use crate::config::{GenerationDefaults, check_eos};
use crate::error::{Error, Result};
use crate::experts::Gathered;
use crate::files::{CONFIG, Files, GENERATION_CONFIG};
use crate::hyper;
use crate::left_over::LeftOver;
use crate::mtp;
use crate::published::{Form, Published};
use crate::shards::Shards;
use crate::store::{TensorEntry, WeightStore};
use crate::task::Task;
use crate::tokenizer::{self, TOKENIZER};
use crate::vision::{self, PatchMatrix};
use nq_model::ModelConfig;
use nq_model::names::{EMBEDDING, HEAD, layer_of};
use nq_model::vision::VisionConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// The input of [`Checkpoint::open`], read far enough to tell its format.
pub struct Source {
    pub(crate) files: Files,
    pub(crate) weights: Option<String>, // the file's name, if a file was given
    pub(crate) gguf: Option<String>,    // the name of the GGUF file, if it is one
    pub(crate) config: Option<Map<String, Value>>, // config.json
    pub(crate) quantization: Option<Value>,
    pub(crate) left_over: Vec<LeftOver>, // keys of `quantization`
}

impl Source {
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
    pub fn shards(&self) -> Result<Shards> {
        let mut shards = match &self.weights {
            Some(name) => Shards::open_named(&self.files, name),
            None => Shards::open(&self.files),
        }?;
        let tied = (self.config.as_ref()).and_then(|c| c.get("tie_word_embeddings")?.as_bool());
        if tied == Some(true) {
            shards.tie();
        }
        Ok(shards)
    }

    /// A checkpoint made of these files and `store`.
    pub(crate) fn into_checkpoint(self, store: Box<dyn WeightStore>) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::of_files(self.files, store)?;
        checkpoint.left_over.extend(self.left_over);
        // A folder's other files of tensors; those beside a file that was given are another matter.
        if self.weights.is_none() {
            let read: BTreeSet<String> = checkpoint
                .store
                .entries()
                .into_iter()
                .map(|e| e.file)
                .collect();
            let names = checkpoint.files.names()?.into_iter();
            let others = names.filter(|n| n.ends_with(".safetensors") && !read.contains(n));
            let other = |name| LeftOver::new(name, "tensors of another file than the model's");
            checkpoint.left_over.extend(others.map(other));
        }
        Ok(checkpoint)
    }
}

/// An opened checkpoint.
pub struct Checkpoint {
    files: Files,
    config: ModelConfig,
    vision: Option<VisionConfig>,
    generation: GenerationDefaults,
    task: Task,
    store: Box<dyn WeightStore>,
    left_over: Vec<LeftOver>,
    eos: Vec<u32>,
}

impl Checkpoint {
    /// Assembles a checkpoint; the formats' `open` functions call this.
    pub fn new(
        files: Files,
        config: ModelConfig,
        generation: GenerationDefaults,
        task: Task,
        store: Box<dyn WeightStore>,
    ) -> Self {
        // No embedding needs the head: where there is none, the embedding matrix stands in for it.
        let headless = matches!(task, Task::Embed(_)) && !store.contains(HEAD);
        let mut eos = generation.eos_token_ids.clone();
        eos.extend(&config.eos_token_ids);
        Checkpoint {
            eos: distinct(eos),
            config: ModelConfig {
                tie_word_embeddings: config.tie_word_embeddings || headless,
                ..config
            },
            files,
            vision: None,
            generation,
            task,
            store,
            left_over: Vec::new(),
        }
    }

    /// The same with a tower that sees images, whose parameters the store has.
    pub(crate) fn seeing(mut self, vision: Option<VisionConfig>) -> Self {
        self.vision = vision;
        self
    }

    /// Like [`Checkpoint::new`], for weights of a file, all of which must be accounted for. `left_over` is what
    /// is known to be left over of the configuration.
    pub(crate) fn accounted(mut self, mut left_over: Vec<LeftOver>) -> Result<Self> {
        check_layers(&self.files, &self.config, self.store.as_ref())?;
        let store = self.store.as_ref();
        self.config.tie_word_embeddings = account::is_tied(store, &self.config, &mut left_over)?;
        self.config.mtp_layers = mtp::stored_layers(store, &self.config, &mut left_over);
        let tower = self.vision.iter().flat_map(VisionConfig::parameters);
        let mut others: Vec<String> = tower.map(|p| p.name).collect();
        let root = self.files.root();
        others.extend(hyper::check_integers(store, &self.config, &root)?);
        left_over.extend(account::tensors(store, &self.config, &others, &root)?);
        self.left_over = left_over;
        Ok(self)
    }

    /// A checkpoint with the config.json and generation_config.json of `files`, and `store`.
    ///
    /// # Errors
    /// [`Error::Missing`] without a config.json; else as [`crate::config::parse`] and
    /// [`GenerationDefaults::parse`] and [`Task::of`].
    pub(crate) fn of_files(files: Files, store: Box<dyn WeightStore>) -> Result<Self> {
        let (config, mut left) = crate::config::read(&files.path(CONFIG), &files.require(CONFIG)?)?;
        let task = Task::of(&files, store.is_bare())?;
        let store = Gathered::over(store, &config, &files)?;
        let store = Published::over(store, &config, Form::HuggingFace, files.root());
        let generation = match files.get(GENERATION_CONFIG)? {
            Some(bytes) => {
                let path = files.path(GENERATION_CONFIG);
                let (generation, unused) = GenerationDefaults::read(&path, &bytes)?;
                check_eos(&path, &generation.eos_token_ids, config.vocab_size)?;
                left.extend(unused);
                generation
            }
            None => GenerationDefaults::default(),
        };
        let described = tokenizer::Described::read(&files)?;
        let ends = described.ends(&files, config.vocab_size)?;
        left.extend(described.left_over(&files)?);
        let mut checkpoint = Checkpoint::new(files, config, generation, task, store);
        checkpoint.eos.extend(ends);
        checkpoint.eos = distinct(checkpoint.eos);
        let (files, store) = (&checkpoint.files, checkpoint.store.as_ref());
        checkpoint.vision = vision::read(files, &checkpoint.config, store, &mut left)?;
        if let Some(vision) = &checkpoint.vision {
            checkpoint.store = PatchMatrix::over(checkpoint.store, vision);
        }
        checkpoint.accounted(left)
    }

    /// What the files hold and nq does not use, with the reasons why the results are the same.
    pub fn left_over(&self) -> &[LeftOver] {
        &self.left_over
    }

    /// The same with another store over its own.
    pub fn over(mut self, over: impl FnOnce(Box<dyn WeightStore>) -> Box<dyn WeightStore>) -> Self {
        self.store = over(self.store);
        self
    }

    /// Notes what else is left over.
    pub(crate) fn leave_over(&mut self, left: Vec<LeftOver>) {
        self.left_over.extend(left);
    }

    /// Makes the head a matrix of its own, which the store must have.
    pub(crate) fn untie(&mut self) {
        self.config.tie_word_embeddings = false;
    }

    /// Model shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tower that sees pictures; `None` for a model that reads text alone, or whose files have no tower.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.vision.as_ref()
    }

    /// The task of the model, according to its files.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// Sampling defaults.
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// Tokens that end a text: those of the generation config, those of the model config, the tokenizer's own
    /// and those by which the chat template ends a turn.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos
    }

    /// Checks that the embedding has a row for every token of the checkpoint's tokenizer. More rows
    /// than tokens are usual: published models are padded.
    ///
    /// # Errors
    /// [`Error::Malformed`], with the largest id and the rows; errors of [`tokenizer::largest_id`];
    /// [`Error::Missing`] without a tokenizer.
    pub fn check_tokenizer(&self) -> Result<()> {
        let path = self.files.path(TOKENIZER);
        let rows = self.config.vocab_size;
        match tokenizer::largest_id(&path, &self.files.require(TOKENIZER)?)? {
            Some(id) if id as usize >= rows => Err(Error::Malformed {
                path,
                what: "largest token id".into(),
                expected: format!("below the model's vocab_size {rows}"),
                found: id.to_string(),
            }),
            _ => Ok(()),
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

    /// Bytes of the stored tensors of the tower that sees images; 0 without one.
    pub fn tower_bytes(&self) -> u64 {
        let parameters = self.vision.iter().flat_map(VisionConfig::parameters);
        self.bytes_of(parameters.map(|p| p.name))
    }

    /// Bytes of the stored tensors, by what they are for.
    pub fn part_bytes(&self) -> PartBytes {
        let tower = self.tower_bytes();
        let embedding_and_head = self.bytes_of([EMBEDDING, HEAD].map(String::from).into_iter());
        let entries = self.store.entries().into_iter();
        let mtp = entries.filter(|e| nq_model::mtp::is_of_layer(&e.name, &self.config));
        let mtp = mtp.map(|e| e.bytes).sum();
        PartBytes {
            body: self.tensor_bytes() - tower - embedding_and_head - mtp,
            embedding_and_head,
            mtp,
            tower,
        }
    }

    /// Bytes of the stored tensors that these parameters are read from.
    fn bytes_of(&self, parameters: impl Iterator<Item = String>) -> u64 {
        let own: BTreeSet<String> = parameters.flat_map(|p| self.store.sources(&p)).collect();
        let entries = self.store.entries().into_iter();
        let entries = entries.filter(|e| own.contains(&e.name));
        entries.map(|e| e.bytes).sum()
    }

    /// `8 * bytes / parameters` of the text model: includes embedding and head; tied ones count once.
    pub fn bits_per_weight(&self) -> f64 {
        let bytes = self.tensor_bytes() - self.tower_bytes();
        8.0 * bytes as f64 / self.config.parameters() as f64
    }
}

/// Bytes of a checkpoint's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartBytes {
    /// The layers, with the norm behind them.
    pub body: u64,
    /// The embedding and the head, which may be one table.
    pub embedding_and_head: u64,
    /// The layer that predicts the token after the next.
    pub mtp: u64,
    /// The tower that sees images.
    pub tower: u64,
}

/// The ids, each where it comes first.
fn distinct(ids: Vec<u32>) -> Vec<u32> {
    let mut seen = BTreeSet::new();
    ids.into_iter().filter(|id| seen.insert(*id)).collect()
}

/// Refuses a model whose files hold more layers than its config, since another model would run, or fewer: nothing is
/// planned, and no list made, for layers that are not there.
fn check_layers(files: &Files, config: &ModelConfig, store: &dyn WeightStore) -> Result<()> {
    let entries = store.entries();
    let layer = |e: &TensorEntry| layer_of(&e.name).or(account::block_of(&e.name));
    let there: BTreeSet<usize> = entries.iter().filter_map(layer).collect();
    let absent = (0..config.num_hidden_layers).find(|layer| !there.contains(layer));
    if let Some(layer) = absent {
        return Err(Error::Malformed {
            path: files.path(CONFIG),
            what: "num_hidden_layers".into(),
            expected: format!("layers that the files hold, of which layer {layer} has no tensor"),
            found: config.num_hidden_layers.to_string(),
        });
    }
    let beyond = |e: &TensorEntry| layer_of(&e.name) >= Some(config.num_hidden_layers);
    match entries.into_iter().find(beyond) {
        None => Ok(()),
        Some(entry) => Err(Error::Malformed {
            path: files.path(CONFIG),
            what: "num_hidden_layers".into(),
            expected: format!("a layer for {} in {}", entry.name, entry.file),
            found: config.num_hidden_layers.to_string(),
        }),
    }
}
