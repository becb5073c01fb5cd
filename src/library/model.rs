//! A loaded model.

use super::{Chat, Embedder, Error, Reranker, Result};
use crate::at_load::{at_load, sight};
use crate::draft::{self, DraftFrom, DraftWeights};
use crate::names;
use nq_answers::images::{Image, SightOptions, taken};
use nq_answers::{Asked, ModelText, Prompt, Sight, Thinking};
use nq_evals::{EvalReport, EvalSpec, Protocol};
use nq_formats::{Bits, Checkpoint, Progress, Task, nq};
use nq_load::Drafts;
use nq_runtime::{
    ChatTemplate, Chunk, DraftedBy, Engine, KvType, LoadOptions, LogitsWanted, Message,
    SamplingParams, Session, SessionSpec, Speculation, Tokenizer,
};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Tokens of a window of [`Model::compare`].
const WINDOW: usize = 512;

/// A loaded model. Clones are the same model.
#[derive(Clone)]
pub struct Model(
    pub(super) Arc<Loaded>,
    /// With adapters.
    pub(super) Option<Arc<dyn Engine>>,
);

/// What a model and its chats share.
pub(super) struct Loaded {
    name: String,
    checkpoint: Arc<Checkpoint>,
    /// How it sees, if it does.
    sight: Option<Sight>,
    text: ModelText,
    pub(super) engine: Arc<dyn Engine>,
    /// What drafts, if that was asked for.
    asked: Option<DraftFrom>,
    /// The type of the keys and values of chats.
    kv: KvType,
    drafted_by: DraftedBy,
    /// The drafter, if it has weights.
    drafts: Option<Drafts>,
}

/// How a model is opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Its device, and how it computes there.
    pub load: LoadOptions,
    /// Bits that the weights of an unquantized model are rounded to while it is loaded:
    /// [`quantize`](crate::quantize) takes longer and gives better quality.
    pub bits: Option<Bits>,
    /// What drafts the tokens of answers, which come sooner where drafts are right. `None`: the model's MTP layer, or else
    /// the text so far, where answers stay exactly the same, as on CPUs.
    pub draft: Option<DraftFrom>,
    /// The type of the keys and values of chats: in 8 bits a context takes half as much memory.
    pub kv: KvType,
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
        Model::open_with(name, &OpenOptions::default(), &())
    }

    /// Like [`Model::open`], as `options` say; `progress` hears of downloads and loading.
    ///
    /// # Errors
    /// Errors of [`Model::open`]; a drafter that is not there, or that was not made for the model.
    pub fn open_with(
        name: impl AsRef<Path>,
        options: &OpenOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let found = names::find(name.as_ref().as_os_str(), false, progress)?;
        names::note_left_over(&found, progress);
        let bits = options.bits.map(Into::into);
        let (checkpoint, _) = at_load(found.checkpoint, bits, progress)?;
        let weights = match &options.draft {
            Some(from) => DraftWeights::open(from, &checkpoint, bits, false, progress)?,
            None => draft::by_default(&checkpoint, &options.load)?,
        };
        let checkpoint = Arc::new(checkpoint);
        let load = |weights: &DraftWeights| weights.load(&options.load, &checkpoint, progress);
        let loaded = Loaded {
            text: text_of(&checkpoint)?,
            sight: sight(&checkpoint, &options.load, SightOptions::default()),
            drafts: weights.as_ref().map(load).transpose()?,
            drafted_by: draft::drafted_by(options.draft.as_ref(), weights.as_ref()),
            engine: nq_load::load(
                checkpoint.config(),
                checkpoint.store(),
                &options.load,
                progress,
            )?,
            asked: options.draft.clone(),
            kv: options.kv,
            name: found.name,
            checkpoint,
        };
        Ok(Model(Arc::new(loaded), None))
    }

    /// Its short name, such as `demo` or `Qwen3-0.6B`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The type of the keys and values of chats.
    pub(super) fn kv(&self) -> KvType {
        self.0.kv
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
        self.1.as_ref().unwrap_or(&self.0.engine).as_ref()
    }

    pub(super) fn text(&self) -> &ModelText {
        &self.0.text
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        self.0.text.tokenizer()
    }

    /// What its sessions have to give to what drafts for them.
    pub(super) fn drafted_by(&self) -> DraftedBy {
        self.0.drafted_by
    }

    /// What drafts in a session.
    pub(super) fn speculation(&self, session: &mut dyn Session) -> Result<Option<Speculation>> {
        let (asked, loaded) = (self.0.asked.as_ref(), self.0.drafts.clone());
        let drafts = draft::drafts(asked, session, self.device(), &(), loaded)?;
        let open = |drafts: Drafts| drafts.speculation(session, asked.is_some());
        Ok(drafts.map(open).transpose()?)
    }

    /// Refuses tokens past the vocabulary.
    pub(super) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.text().vocab();
        match tokens.iter().find(|&&token| token as usize >= vocab) {
            None => Ok(()),
            Some(token) => Err(Error::from(nq_runtime::Error::Request {
                what: "tokens",
                expected: format!("ids below {vocab}"),
                found: token.to_string(),
            })),
        }
    }

    /// How it sees, if it does.
    pub(super) fn sight(&self) -> Option<&Sight> {
        self.0.sight.as_ref()
    }

    /// What the model reads of a chat, and the images in its messages.
    pub(super) fn ask(
        &self,
        mut chat: nq_answers::ChatInput,
        most: usize,
    ) -> Result<(Asked, Vec<Image>)> {
        let images = taken(self.sight(), self.name(), &mut chat.messages)?;
        chat.images = images.iter().map(Image::tokens).collect();
        if self.text().template().is_none() {
            // Says where there should be one.
            ChatTemplate::from_files(self.checkpoint().files())?;
        }
        Ok((self.text().ask(chat, most)?, images))
    }

    /// The tokens of a text, with those that the model's tokenizer puts around one; names of control tokens, such as
    /// `<|im_end|>`, become these.
    ///
    /// # Errors
    /// A text that the tokenizer refuses.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer().encode_whole(text)?)
    }

    /// The text of tokens, control tokens included; those past the vocabulary have none.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.tokenizer().decode(tokens, false)
    }

    /// The prompt that the model's template makes of a chat, as text and tokens, with the assistant's turn begun. `tools`
    /// are in the format of OpenAI's chat.
    ///
    /// # Errors
    /// A model without a template, or one that refuses the chat.
    pub fn prompt(
        &self,
        messages: &[Message],
        tools: &[Value],
        thinking: Option<bool>,
    ) -> Result<Prompt> {
        let chat = nq_answers::ChatInput {
            messages: messages.to_vec(),
            tools: tools.to_vec(),
            thinking: Thinking {
                switches: thinking.into(),
                budget: None,
            },
            ..nq_answers::ChatInput::default()
        };
        let most = self.checkpoint().config().longest_context();
        Ok(self.ask(chat, most)?.0.prompt)
    }

    /// The logits after each of `tokens`, row by row, `[tokens, vocab]`: computed in a session of their own.
    ///
    /// # Errors
    /// No tokens, tokens past the vocabulary, or more than the model's context; too little memory; errors of the
    /// device.
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.check_tokens(tokens)?;
        let trained = self.checkpoint().config().longest_context();
        if !(1..=trained).contains(&tokens.len()) {
            return Err(Error::from(nq_runtime::Error::Request {
                what: "tokens",
                expected: format!("1 to {trained}"),
                found: tokens.len().to_string(),
            }));
        }
        let rows = self.engine().description().prompt_rows().min(tokens.len());
        let mut session = self.engine().session(SessionSpec {
            slots: 1,
            ctx: tokens.len(),
            max_rows: rows,
            ..SessionSpec::default()
        })?;
        let mut logits = Vec::new();
        for tokens in tokens.chunks(rows) {
            let chunk = Chunk {
                slot: 0,
                tokens,
                logits: LogitsWanted::All,
            };
            logits.extend_from_slice(session.forward(&[chunk], None)?.data);
        }
        Ok(logits)
    }

    /// Number of tokens that the model tells apart: logits of a row.
    pub fn vocab(&self) -> usize {
        self.text().vocab()
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
    pub fn evaluate(&self, text: &str) -> Result<EvalReport> {
        self.measure(None, text, &spec(), &())
    }

    /// Like [`Model::evaluate`], with the KL divergence of `source` from this model in the report's `against`.
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

/// The text side of a model; one that generates no text needs no template.
fn text_of(checkpoint: &Checkpoint) -> nq_runtime::Result<ModelText> {
    if !matches!(checkpoint.task(), Task::Embed(_)) {
        return ModelText::open(checkpoint);
    }
    let tokenizer = Tokenizer::from_files(checkpoint.files())?;
    let vocab = checkpoint.config().vocab_size;
    tokenizer.check_vocab(vocab)?;
    Ok(ModelText::new(tokenizer, None, &[], vocab))
}

fn spec() -> EvalSpec {
    EvalSpec::new(Protocol::Llama, WINDOW, "a text")
}
