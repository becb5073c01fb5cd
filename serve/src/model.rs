//! A model that is served: its text side and its engine.

use crate::about::{About, AboutTower};
use crate::engine::{Engine, EngineOptions};
use crate::error::ApiError;
use nq_answers::{ModelText, Sight};
use nq_formats::{Checkpoint, Task};
use nq_runtime::embedding::EmbeddingTexts;
use nq_runtime::rerank::Reranker;
use nq_runtime::{AppliedAdapter, Message, SamplingParams, SessionSpec, Tokenizer};
use serde_json::{Map, Value};
use std::ops::Deref;
use std::sync::Arc;

/// A served model under one of its names: its own, or that of an adapter.
pub struct ServedModel {
    name: String,
    adapters: Vec<AppliedAdapter>,
    parts: Arc<ModelParts>,
}

/// What a model has under all its names.
pub struct ModelParts {
    text: ModelText,
    sampling: SamplingParams,
    width: usize,
    reads: Reads,
    engine: Engine,
    about: About,
    sight: Option<Sight>,
}

/// What a model can compute from a text besides a continuation.
enum Reads {
    Nothing,
    Embeddings(EmbeddingTexts),
    Scores(Reranker),
}

/// What an adapter may be multiplied by.
const MOST_SCALE: f32 = 100.0;

impl Deref for ServedModel {
    type Target = ModelParts;

    fn deref(&self) -> &ModelParts {
        &self.parts
    }
}

impl ServedModel {
    /// Serves the checkpoint that `engine` runs, in sessions of `spec`. One without a chat template
    /// serves completions alone, an embedding model embeddings alone.
    ///
    /// # Errors
    /// A tokenizer or template that cannot be read; errors of [`Engine::start`].
    pub fn new(
        name: impl Into<String>,
        checkpoint: &Checkpoint,
        engine: Arc<dyn nq_runtime::Engine>,
        spec: SessionSpec,
        options: EngineOptions,
    ) -> nq_runtime::Result<Self> {
        let name = name.into();
        let text = ModelText::open(checkpoint)?;
        let reads = match checkpoint.task().clone().of_name(&name) {
            Task::Generate => Reads::Nothing,
            Task::Embed(_) => Reads::Embeddings(EmbeddingTexts::of(checkpoint)?),
            Task::Rerank => Reads::Scores(Reranker::new(text.tokenizer())?),
        };
        let sampling = SamplingParams::from_defaults(checkpoint.generation());
        sampling.validate()?;
        let device = engine.description().device.clone();
        let open = Box::new(move || engine.session(spec));
        let engine = Engine::start(open, text.vocab(), options)?;
        let about = About {
            device: Some(device),
            tower: None,
            ..About::of(checkpoint, &name, text.template(), engine.spec().ctx)
        };
        let parts = ModelParts {
            about,
            reads,
            width: checkpoint.config().hidden_size,
            text,
            sampling,
            engine,
            sight: None,
        };
        Ok(ServedModel {
            name,
            adapters: Vec::new(),
            parts: Arc::new(parts),
        })
    }

    /// The same model under another name, with adapters of its engine.
    pub fn with(&self, name: String, adapters: Vec<AppliedAdapter>) -> Self {
        ServedModel {
            name,
            adapters,
            parts: Arc::clone(&self.parts),
        }
    }

    /// What a request asks to be added, in the order of the engine's adapters.
    ///
    /// # Errors
    /// An adapter that there is none of, or that is named twice; a scale out of its range.
    pub(crate) fn applied(
        &self,
        mut asked: Vec<AppliedAdapter>,
    ) -> Result<Vec<AppliedAdapter>, ApiError> {
        let there = self.engine.options().adapters.len();
        asked.sort_by_key(|a| a.adapter);
        let wrong = |a: &AppliedAdapter| {
            a.adapter >= there || a.scale.is_nan() || a.scale.abs() > MOST_SCALE
        };
        let twice = asked
            .windows(2)
            .any(|pair| pair[0].adapter == pair[1].adapter);
        if twice || asked.iter().any(wrong) {
            let what = format!(
                "expected different ids below {there}, and scales from -{MOST_SCALE} to {MOST_SCALE}"
            );
            return Err(ApiError::field("lora", what));
        }
        asked.retain(|a| a.scale != 0.0);
        Ok(asked)
    }

    /// What is added to its products for those who ask for it by this name.
    pub fn adapters(&self) -> &[AppliedAdapter] {
        &self.adapters
    }

    /// True if anyone uses it besides the one who holds `this`.
    pub(crate) fn is_in_use(this: &Arc<Self>) -> bool {
        Arc::strong_count(this) > 1 || Arc::strong_count(&this.parts) > 1
    }

    /// Its name for clients.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.text.tokenizer()
    }

    /// Its text side.
    pub fn text(&self) -> &ModelText {
        &self.text
    }

    /// How it reads texts to embed, if it is for that; it then writes none.
    pub fn embedding(&self) -> Option<&EmbeddingTexts> {
        match &self.reads {
            Reads::Embeddings(texts) => Some(texts),
            Reads::Nothing | Reads::Scores(_) => None,
        }
    }

    /// How it is asked about documents, if it is for that.
    pub fn reranker(&self) -> Option<&Reranker> {
        match &self.reads {
            Reads::Scores(reranker) => Some(reranker),
            Reads::Nothing | Reads::Embeddings(_) => None,
        }
    }

    /// Width of its residual stream, and of its embeddings.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The engine that runs it.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Tokens that end an answer.
    pub fn stop(&self) -> &[u32] {
        self.text.stop()
    }

    /// The sampling settings recommended by its makers.
    pub fn sampling(&self) -> SamplingParams {
        self.sampling
    }

    /// Number of logits per row.
    pub fn vocab(&self) -> usize {
        self.text.vocab()
    }

    /// Number of positions of a sequence.
    pub fn context(&self) -> usize {
        self.engine.spec().ctx
    }

    /// The tokens of a prompt that are counted; one that has more is refused before it is read to its end.
    pub fn counted(&self) -> usize {
        2 * self.context()
    }

    /// What is known of it.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// How it sees, if it does.
    pub fn sight(&self) -> Option<&Sight> {
        self.sight.as_ref()
    }

    /// Has it see images, by a tower that is described.
    pub fn set_sight(&mut self, sight: Sight, tower: AboutTower) {
        // Nobody has it yet under another name.
        if let Some(parts) = Arc::get_mut(&mut self.parts) {
            parts.about.tower = Some(tower);
            parts.sight = Some(sight);
        }
    }

    /// Notes that its weights were quantized to so many bits when they were loaded.
    pub fn quantized_at_load(&mut self, bits: Option<u32>) {
        // Nobody has it yet under another name.
        if let Some(parts) = Arc::get_mut(&mut self.parts) {
            parts.about.bits_at_load = bits;
        }
    }
}

/// A message with additional fields for the template.
pub(crate) fn message(role: &str, content: impl Into<Value>, extra: Map<String, Value>) -> Message {
    Message {
        role: role.to_owned(),
        content: content.into(),
        extra,
    }
}
