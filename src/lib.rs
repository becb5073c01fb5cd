//! nq in a program: quantize a model, load it, talk to it, compare it with its source.
//!
//! ```no_run
//! use nq_llm::{Bits, Model, quantize};
//!
//! let made = quantize("assets/demo", "demo-int4", Bits::B4)?;
//! let model = Model::open("demo-int4")?;
//! let mut chat = model.chat()?;
//! let answer = chat.ask("Name a river.", |piece| print!("{piece}"))?;
//! let quality = model.compare(&Model::open("assets/demo")?, "A text to compare them on ...")?;
//! # let _ = (made, answer, quality);
//! # Ok::<(), nq_llm::Error>(())
//! ```
//!
//! This is a small part of what the crates below can do: `nq-formats`, `nq-runtime`, `nq-evals`, `nq-quantize`
//! and `nq-serve`, which this one exports under those names. Their interfaces change more often.

#![forbid(unsafe_code)]

pub use nq_evals::{Comparison, EvalReport};
pub use nq_formats::{Bits, Progress};
pub use nq_quantize::{QuantizeOptions, QuantizeReport};
pub use nq_runtime::{LoadOptions, Message, SamplingParams};

pub use nq_evals;
pub use nq_formats;
pub use nq_quantize;
pub use nq_runtime;
pub use nq_serve;

use nq_evals::{EvalSpec, Protocol};
use nq_formats::Checkpoint;
use nq_quantize::Job;
use nq_runtime::generate::generate_text;
use nq_runtime::{
    ChatTemplate, Engine, KvType, Limits, Sampler, Sequence, Session, SessionSpec, Tokenizer,
};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Positions of a chat, if the model has as many.
const CONTEXT: usize = 8192;
/// Prompt tokens computed together.
const CHUNK: usize = 512;
/// Tokens of a window of [`Model::compare`].
const WINDOW: usize = 512;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of any part. Each names the file, tensor or field, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading or writing a checkpoint.
    #[error(transparent)]
    Format(#[from] nq_formats::Error),
    /// Loading a model or generating from it.
    #[error(transparent)]
    Run(#[from] nq_runtime::Error),
    /// Quantizing.
    #[error(transparent)]
    Quantize(Box<nq_quantize::Error>),
    /// Evaluating.
    #[error(transparent)]
    Evaluate(#[from] nq_evals::Error),
}

impl From<nq_quantize::Error> for Error {
    fn from(error: nq_quantize::Error) -> Self {
        Error::Quantize(Box::new(error))
    }
}

/// Quantizes the unquantized checkpoint `source` into the folder `out` as `nq quantize --bits BITS` does, and
/// measures the result against the source.
///
/// # Errors
/// Errors of [`quantize_with`].
pub fn quantize(
    source: impl AsRef<Path>,
    out: impl Into<PathBuf>,
    bits: Bits,
) -> Result<QuantizeReport> {
    quantize_with(source, out, bits, |_| {}, &())
}

/// Like [`quantize`], with options that `change` has changed; `progress` hears of the stages.
///
/// # Errors
/// A source that cannot be read or is quantized already, an output that exists (unless
/// [`QuantizeOptions::force`] is set), options that do not fit the model, a quality that misses
/// [`QuantizeOptions::limits`]; errors of the device and the disk.
pub fn quantize_with(
    source: impl AsRef<Path>,
    out: impl Into<PathBuf>,
    bits: Bits,
    change: impl FnOnce(&mut QuantizeOptions),
    progress: &dyn Progress,
) -> Result<QuantizeReport> {
    let checkpoint = Checkpoint::open(source.as_ref())?;
    let mut options = QuantizeOptions::new(checkpoint.config(), bits, out)?;
    options.source.name = source.as_ref().display().to_string();
    change(&mut options);
    Ok(Job::new(&checkpoint, &options, progress)?.run()?)
}

/// A loaded model.
pub struct Model {
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    engine: Arc<dyn Engine>,
}

impl Model {
    /// Loads a folder or GGUF file onto the first usable GPU, otherwise the CPU.
    ///
    /// # Errors
    /// Files that cannot be read or are not supported; errors of the device.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Model::open_with(path, &LoadOptions::default())
    }

    /// Like [`Model::open`], on a device and with activations of your choice.
    ///
    /// # Errors
    /// Errors of [`Model::open`].
    pub fn open_with(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let checkpoint = Checkpoint::open(path.as_ref())?;
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        tokenizer.check_vocab(checkpoint.config().vocab_size)?;
        let engine = nq_runtime::load(checkpoint.config(), checkpoint.store(), options, &())?;
        Ok(Model {
            checkpoint,
            tokenizer,
            engine,
        })
    }

    /// A chat with the sampling settings that the model's makers recommend.
    ///
    /// # Errors
    /// A model without a chat template; too little memory for its context.
    pub fn chat(&self) -> Result<Chat<'_>> {
        let ctx = CONTEXT.min(self.checkpoint.config().max_position_embeddings);
        let mut session = self.engine.session(SessionSpec {
            slots: 1,
            ctx,
            pages: None,
            kv: KvType::F16,
            max_rows: CHUNK.min(ctx),
            snapshots: None,
        })?;
        let sequence = Sequence::new(session.as_mut(), 0);
        Ok(Chat {
            model: self,
            template: ChatTemplate::from_files(self.checkpoint.files())?,
            session,
            sequence,
            messages: Vec::new(),
            answers: 0,
            sampling: SamplingParams::from_defaults(self.checkpoint.generation()),
            max_tokens: usize::MAX,
            thinking: None,
        })
    }

    /// The perplexity of `text`, in windows of 512 tokens whose second half is scored.
    ///
    /// # Errors
    /// A text of fewer than 512 tokens; errors of the device.
    pub fn evaluate(&self, text: &str) -> Result<EvalReport> {
        let tokens = self.tokenizer.encode(text)?;
        let measured = nq_evals::evaluate(self.engine.as_ref(), &tokens, &spec(), &())?;
        Ok(measured.report)
    }

    /// Like [`Model::evaluate`], with the KL divergence of `source` from this model, which has the same
    /// tokenizer, in the report's `against`.
    ///
    /// # Errors
    /// Errors of [`Model::evaluate`]; models whose vocabularies differ.
    pub fn compare(&self, source: &Model, text: &str) -> Result<EvalReport> {
        let tokens = self.tokenizer.encode(text)?;
        let (engine, source) = (self.engine.as_ref(), source.engine.as_ref());
        Ok(nq_evals::compare(engine, source, &tokens, &spec(), &())?.report)
    }
}

fn spec() -> EvalSpec {
    EvalSpec::new(Protocol::Llama, WINDOW, "a text")
}

/// A conversation with a model. What was said is kept in its cache.
pub struct Chat<'m> {
    model: &'m Model,
    template: ChatTemplate,
    session: Box<dyn Session>,
    sequence: Sequence,
    messages: Vec<Message>,
    answers: u64,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens of an answer; by default as many as the context holds.
    pub max_tokens: usize,
    /// Whether the model thinks before it answers, if its template can switch that; `None`: as it has it.
    pub thinking: Option<bool>,
}

impl Chat<'_> {
    /// Sets the system prompt, before the first message.
    pub fn system(&mut self, text: &str) {
        self.messages.insert(0, Message::new("system", text));
    }

    /// The messages so far; what the model thought is apart from its answers where its template reads it so.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Answers a message; `each` gets the text in pieces, thinking included, as it comes. If that fails, the
    /// message is not kept.
    ///
    /// # Errors
    /// A full context; sampling settings out of range; errors of the template and the device.
    pub fn ask(&mut self, text: &str, mut each: impl FnMut(&str)) -> Result<String> {
        self.messages.push(Message::new("user", text));
        let answer = self.answer(&mut each);
        match &answer {
            Ok((prompt, answer)) => self.messages.push(self.template.answer(prompt, answer)),
            Err(_) => drop(self.messages.pop()),
        }
        answer.map(|(_, answer)| answer)
    }

    /// The prompt and the answer to it.
    fn answer(&mut self, each: &mut dyn FnMut(&str)) -> Result<(String, String)> {
        let tokenizer = &self.model.tokenizer;
        let control = tokenizer.control_tokens();
        let prompt = self
            .template
            .prompt(control, &self.messages, None, true, self.thinking)?;
        let most = 2 * self.session.spec().ctx;
        // Each answer draws from its own stream: the same message gets another one.
        let mut sampler = Sampler::new(self.sampling, self.answers)?;
        self.answers += 1;
        let limits = Limits {
            stop: self.model.checkpoint.eos_token_ids(),
            max_tokens: self.max_tokens,
            interrupt: None,
        };
        let mut answer = String::new();
        generate_text(
            self.session.as_mut(),
            &mut self.sequence,
            &tokenizer.encode_prompt_within(&prompt, most)?,
            tokenizer,
            &mut sampler,
            &limits,
            &mut |piece| {
                answer.push_str(piece);
                each(piece);
                ControlFlow::Continue(())
            },
        )?;
        Ok((prompt.text().into_owned(), answer))
    }
}
