//! A model that is served: its text side and its engine.

use crate::about::About;
use crate::engine::{Engine, EngineOptions};
use nq_answers::ModelText;
use nq_formats::{Checkpoint, Task};
use nq_runtime::embedding::EmbeddingTexts;
use nq_runtime::rerank::Reranker;
use nq_runtime::{Message, SamplingParams, SessionSpec, Tokenizer};
use serde_json::{Map, Value};
use std::sync::Arc;

/// A served model and its name.
pub struct ServedModel {
    name: String,
    text: ModelText,
    sampling: SamplingParams,
    width: usize,
    reads: Reads,
    engine: Engine,
    about: About,
}

/// What a model can compute from a text besides a continuation.
enum Reads {
    Nothing,
    Embeddings(EmbeddingTexts),
    Scores(Reranker),
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
            ..About::of(checkpoint, &name, text.template(), engine.spec().ctx)
        };
        Ok(ServedModel {
            name,
            about,
            reads,
            width: checkpoint.config().hidden_size,
            text,
            sampling,
            engine,
        })
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

    /// Notes that its weights were quantized to so many bits when they were loaded.
    pub fn quantized_at_load(&mut self, bits: Option<u32>) {
        self.about.bits_at_load = bits;
    }
}

/// A message with additional fields for the template.
pub fn message(role: &str, content: String, extra: Map<String, Value>) -> Message {
    Message {
        role: role.to_owned(),
        content: content.into(),
        extra,
    }
}
