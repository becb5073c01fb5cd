//! A loaded model.

use super::{Chat, Embedder, Error, Reranker, Result};
use crate::at_load::at_load;
use crate::names;
use nq_evals::{EvalReport, EvalSpec, Protocol};
use nq_formats::{Bits, Checkpoint, Progress, nq};
use nq_runtime::{Engine, LoadOptions, SamplingParams, Tokenizer};
use std::path::Path;
use std::sync::Arc;

/// Tokens of a window of [`Model::compare`].
const WINDOW: usize = 512;

/// A loaded model. Clones are the same model.
#[derive(Clone)]
pub struct Model(Arc<Loaded>);

/// What a model and its chats share.
struct Loaded {
    name: String,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    engine: Arc<dyn Engine>,
}

impl Model {
    /// Loads a model onto the first usable GPU, otherwise the CPU. It is named as on the command line: a folder, a
    /// GGUF file, `demo`, a name of `nq list`, or a model of the hub such as `Qwen/Qwen3-0.6B`, which is
    /// downloaded unless the hub's cache has it.
    ///
    /// # Errors
    /// A name that nothing goes by; files that cannot be read or are not supported; errors of the download and the
    /// device.
    pub fn open(name: impl AsRef<Path>) -> Result<Self> {
        Model::open_with(name, &LoadOptions::default(), &())
    }

    /// Like [`Model::open`], on a device and with activations of your choice; `progress` hears of downloads and
    /// loading.
    ///
    /// # Errors
    /// Errors of [`Model::open`].
    pub fn open_with(
        name: impl AsRef<Path>,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let model = names::find(name.as_ref().as_os_str(), false, progress)?;
        names::note_left_over(&model, progress);
        Model::load(model.name, model.checkpoint, options, progress)
    }

    /// Like [`Model::open_with`], with the weights of an unquantized model rounded to `bits` while it is loaded:
    /// [`quantize`](crate::quantize) takes longer and gives better quality.
    ///
    /// # Errors
    /// Errors of [`Model::open`].
    pub fn open_quantized(
        name: impl AsRef<Path>,
        bits: Bits,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let model = names::find(name.as_ref().as_os_str(), false, progress)?;
        names::note_left_over(&model, progress);
        let (checkpoint, _) = at_load(model.checkpoint, Some(bits.into()), progress)?;
        Model::load(model.name, checkpoint, options, progress)
    }

    fn load(
        name: String,
        checkpoint: Checkpoint,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        tokenizer.check_vocab(checkpoint.config().vocab_size)?;
        let engine = nq_load::load(checkpoint.config(), checkpoint.store(), options, progress)?;
        Ok(Model(Arc::new(Loaded {
            name,
            checkpoint,
            tokenizer,
            engine,
        })))
    }

    /// Its short name, such as `demo` or `Qwen3-0.6B`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What it runs on, such as `cpu (avx512)`.
    pub fn device(&self) -> &str {
        &self.engine().description().device
    }

    /// Positions that it was made for.
    pub fn positions(&self) -> usize {
        self.checkpoint().config().max_position_embeddings
    }

    /// The sampling settings that its makers recommend.
    pub fn sampling(&self) -> SamplingParams {
        SamplingParams::from_defaults(self.checkpoint().generation())
    }

    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.0.checkpoint
    }

    pub(super) fn engine(&self) -> &dyn Engine {
        self.0.engine.as_ref()
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.0.tokenizer
    }

    /// A chat with the sampling settings that the model's makers recommend, in a context of at most 8192 tokens.
    ///
    /// # Errors
    /// A model without a chat template or one that generates no text; too little memory for its context.
    pub fn chat(&self) -> Result<Chat> {
        Chat::new(self.clone(), None)
    }

    /// Like [`Model::chat`], in a context of `ctx` tokens.
    ///
    /// # Errors
    /// Errors of [`Model::chat`]; a context longer than the model's.
    pub fn chat_within(&self, ctx: usize) -> Result<Chat> {
        Chat::new(self.clone(), Some(ctx))
    }

    /// Makes vectors of texts.
    ///
    /// # Errors
    /// A model that is not for embedding; too little memory for its context.
    pub fn embedder(&self) -> Result<Embedder> {
        Embedder::new(self.clone())
    }

    /// Scores how well documents answer a query.
    ///
    /// # Errors
    /// A model whose tokenizer lacks the words that a reranker answers with; too little memory for its context.
    pub fn reranker(&self) -> Result<Reranker> {
        Reranker::new(self.clone())
    }

    /// The perplexity of `text`, in windows of 512 tokens whose second half is scored.
    ///
    /// # Errors
    /// Errors of [`Model::measure`].
    pub fn evaluate(&self, text: &str) -> Result<EvalReport> {
        self.measure(None, text, &spec(), &())
    }

    /// Like [`Model::evaluate`], with the KL divergence of `source` from this model in the report's `against`.
    ///
    /// # Errors
    /// Errors of [`Model::measure`].
    pub fn compare(&self, source: &Model, text: &str) -> Result<EvalReport> {
        self.measure(Some(source), text, &spec(), &())
    }

    /// Measures the model on a text as `spec` says and, if there is a `reference`, against that.
    ///
    /// # Errors
    /// A text of less than a window; models that tokenize it differently; weights or logits that are not finite;
    /// errors of the device.
    pub fn measure(
        &self,
        reference: Option<&Model>,
        text: &str,
        spec: &EvalSpec,
        progress: &dyn Progress,
    ) -> Result<EvalReport> {
        let tokens = self.tokenizer().encode_whole(text)?;
        // Devices differ in how NaN propagates: figures of such a model mean nothing.
        nq::verify_values(self.checkpoint())?;
        let fed = spec.begun(tokens.clone(), self.tokenizer().around());
        let Some(reference) = reference else {
            let measured = nq_evals::evaluate(self.engine(), &fed, spec, progress)?;
            return Ok(measured.report);
        };
        if reference.tokenizer().encode_whole(text)? != tokens {
            return Err(Error::unsuited(format!(
                "{} and {} tokenize the text differently: their distributions cannot be compared",
                self.name(),
                reference.name()
            )));
        }
        nq::verify_values(reference.checkpoint())?;
        let (model, reference) = (self.engine(), reference.engine());
        Ok(nq_evals::compare(model, reference, &fed, spec, progress)?.report)
    }
}

fn spec() -> EvalSpec {
    EvalSpec::new(Protocol::Llama, WINDOW, "a text")
}
