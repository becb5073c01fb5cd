//! A model that is served: its text side and its engine.

use crate::about::About;
use crate::dialect::{Dialect, ToolPrompt};
use crate::engine::{Engine, EngineOptions, ThinkingBudget};
use crate::error::ApiError;
use crate::grammar::{Grammars, Start};
use crate::names::Names;
use crate::output::{CallForm, CallParser};
use crate::protocol::thinking::Thinking;
use nq_formats::{Checkpoint, Task};
use nq_runtime::embedding::EmbeddingTexts;
use nq_runtime::rerank::Reranker;
use nq_runtime::{ChatTemplate, Message, SamplingParams, SessionSpec, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::{Arc, OnceLock};

/// A served model and its name.
pub struct ServedModel {
    name: String,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    tool_prompt: ToolPrompt,
    stop: Vec<u32>,
    sampling: SamplingParams,
    vocab: usize,
    width: usize,
    reads: Reads,
    engine: Engine,
    grammars: OnceLock<Result<Grammars, String>>,
    dialect: Dialect,
    about: About,
}

/// What a model can compute from a text besides a continuation.
enum Reads {
    Nothing,
    Embeddings(EmbeddingTexts),
    Scores(Reranker),
}

/// A chat as the model reads it.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// As text.
    pub text: String,
    /// As tokens.
    pub tokens: Vec<u32>,
    /// The tokens at its end that the answer begins with.
    pub begun: Vec<u32>,
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
        let vocab = checkpoint.config().vocab_size;
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        tokenizer.check_vocab(vocab)?;
        let reads = match checkpoint.task().clone().of_name(&name) {
            Task::Generate => Reads::Nothing,
            Task::Embed(_) => Reads::Embeddings(EmbeddingTexts::of(checkpoint)?),
            Task::Rerank => Reads::Scores(Reranker::new(&tokenizer)?),
        };
        let template = ChatTemplate::find(checkpoint.files())?;
        let sampling = SamplingParams::from_defaults(checkpoint.generation());
        sampling.validate()?;
        let device = engine.description().device.clone();
        let engine = Engine::start(Box::new(move || engine.session(spec)), vocab, options)?;
        let tool_prompt = template
            .as_ref()
            .map_or(ToolPrompt::Described, ToolPrompt::of);
        let about = About {
            device: Some(device),
            ..About::of(checkpoint, &name, template.as_ref(), engine.spec().ctx)
        };
        Ok(ServedModel {
            name,
            about,
            reads,
            width: checkpoint.config().hidden_size,
            tool_prompt,
            dialect: template.as_ref().map(Dialect::of).unwrap_or_default(),
            tokenizer,
            template,
            stop: checkpoint.eos_token_ids().to_vec(),
            sampling,
            vocab,
            engine,
            grammars: OnceLock::new(),
        })
    }

    /// Its name for clients.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
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
        &self.stop
    }

    /// The sampling settings recommended by its makers.
    pub fn sampling(&self) -> SamplingParams {
        self.sampling
    }

    /// Number of logits per row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Number of positions of a sequence.
    pub fn context(&self) -> usize {
        self.engine.spec().ctx
    }

    /// The tokens of a prompt that are counted; one that has more is refused before it is read to its end.
    pub fn counted(&self) -> usize {
        2 * self.context()
    }

    /// Compiles formats for this model; made on the first call.
    ///
    /// # Errors
    /// If its tokenizer does not support constraints.
    pub(crate) fn grammars(&self) -> Result<&Grammars, ApiError> {
        let grammars = self
            .grammars
            .get_or_init(|| Grammars::new(&self.tokenizer, self.vocab, &self.stop, self.form()));
        grammars.as_ref().map_err(|e| ApiError::internal(e.clone()))
    }

    /// Where the constraint on the answer to `prompt` begins.
    pub fn start(&self, prompt: &str, thinking: Option<bool>) -> Start {
        let end = prompt.trim_end();
        let thinks = self
            .template
            .as_ref()
            .is_some_and(ChatTemplate::switches_thinking);
        if end.ends_with("<think>") {
            Start::Thinking
        } else if end.ends_with("</think>") || thinking == Some(false) || !thinks {
            Start::Answer
        } else {
            Start::MayThink
        }
    }

    /// What is known of it.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Notes that its weights were quantized to so many bits when they were loaded.
    pub fn quantized_at_load(&mut self, bits: Option<u32>) {
        self.about.bits_at_load = bits;
    }

    /// How it writes calls.
    fn form(&self) -> CallForm {
        match self.tool_prompt {
            ToolPrompt::Template(form) => form,
            ToolPrompt::Described => CallForm::Json,
        }
    }

    /// What a request for thinking means to this model, if `most` tokens are the most that anyone gets.
    pub fn thinking(&self, asked: Thinking, most: Option<usize>) -> Thinking {
        let reads_effort = self
            .template
            .as_ref()
            .is_some_and(ChatTemplate::reads_effort);
        let budget = asked.tokens(reads_effort, most);
        let mut switches = asked.switches;
        let effort = switches.reasoning_effort.as_deref();
        let known = |e| self.template.as_ref().and_then(|t| t.effort(e));
        switches.reasoning_effort = effort.and_then(known).map(str::to_owned);
        if budget == Some(0) {
            switches.enable_thinking = Some(false);
        }
        Thinking { switches, budget }
    }

    /// How an answer to `prompt` is held to so many tokens of thinking; `None`: it need not be.
    pub fn thinking_budget(&self, prompt: &str, tokens: Option<usize>) -> Option<ThinkingBudget> {
        let id = |token| self.tokenizer.token_id(token);
        let (begin, end) = (id("<think>")?, id("</think>")?);
        let close = self.tokenizer.encode(&self.dialect.thinking_end).ok()?;
        Some(ThinkingBudget {
            tokens: tokens?,
            thinks: prompt.trim_end().ends_with("<think>"),
            begin,
            end,
            close,
        })
    }

    /// Renders the chat as text and tokens, with the assistant's turn begun or, if the answer `continues` the
    /// last message, with that message's text at its end.
    ///
    /// # Errors
    /// A template that refuses the chat, or a model without one; a chat of more tokens than are counted, which
    /// `names` says what to call.
    pub fn prompt(
        &self,
        mut messages: Vec<Message>,
        tools: Option<&[Value]>,
        thinking: &Thinking,
        continues: bool,
        names: Names,
    ) -> Result<Prompt, ApiError> {
        let Some(template) = &self.template else {
            let what = "this model has no chat template: it serves /v1/completions";
            return Err(ApiError::invalid(what));
        };
        let most = self.counted();
        let read = |e| names.read(e, self.context());
        let bytes = messages.iter().map(|m| m.text().len()).sum();
        self.tokenizer.check_bytes(bytes, most).map_err(read)?;
        let last = if continues { messages.pop() } else { None };
        let (messages, tools) = match self.tool_prompt {
            ToolPrompt::Template(_) => (messages, tools),
            ToolPrompt::Described => (described(messages, tools), None),
        };
        let messages = self.dialect.arranged(messages);
        let mut switches = thinking.switches.clone();
        let thought = last
            .as_ref()
            .and_then(|m| m.extra.get("reasoning_content")?.as_str());
        if last.is_some() {
            switches.enable_thinking = Some(thought.is_some());
        }
        let control = self.tokenizer.control_tokens();
        let prompt = template.prompt(control, &messages, tools, true, switches)?;
        let mut text = prompt.text().into_owned();
        let mut tokens = (self.tokenizer)
            .encode_prompt_within(&prompt, most)
            .map_err(read)?;
        let mut begun = Vec::new();
        if last.is_none() && thinking.budget == Some(0) && text.trim_end().ends_with("<think>") {
            // A template that opens thinking whatever it is told.
            tokens.extend(self.tokenizer.encode(&self.dialect.thinking_end)?);
            text += &self.dialect.thinking_end;
        }
        if let Some(last) = &last {
            // What the template would write around the message's parts, and the parts as text.
            let opened = text.trim_end().ends_with("<think>");
            let open = if thought.is_some() && !opened {
                "<think>\n"
            } else {
                ""
            };
            let close = match opened || thought.is_some() {
                true => self.dialect.thinking_end.as_str(),
                false => "",
            };
            let thought = thought.unwrap_or_default().trim();
            tokens.extend(self.tokenizer.encode(open)?);
            let quoted = |text| {
                self.tokenizer
                    .encode_quoted_within(text, most)
                    .map_err(read)
            };
            tokens.extend(quoted(thought)?);
            tokens.extend(self.tokenizer.encode(close)?);
            begun = quoted(last.text())?;
            tokens.extend_from_slice(&begun);
            text += &[open, thought, close, last.text()].concat();
        }
        Ok(Prompt {
            tokens,
            text,
            begun,
        })
    }
}

/// Messages for a template that does not support tools.
fn described(messages: Vec<Message>, tools: Option<&[Value]>) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len() + 1);
    for mut message in messages {
        if let Some(Value::Array(calls)) = message.extra.remove("tool_calls") {
            let mut text = message.text().to_owned();
            for call in &calls {
                let function = &call["function"];
                let call = json!({"name": function["name"], "arguments": function["arguments"]});
                text += &format!("\n{}\n{call}\n{}", CallParser::OPEN, CallParser::CLOSE);
            }
            message.content = text.trim_start().into();
        }
        if message.role == "tool" {
            let text = format!("<tool_response>\n{}\n</tool_response>", message.text());
            message = Message::new("user", text);
        }
        out.push(message);
    }
    let Some(tools) = tools.filter(|t| !t.is_empty()) else {
        return out;
    };
    let mut text =
        String::from("You may call functions. Their signatures are JSON schemas:\n<tools>\n");
    for tool in tools {
        text += &format!("{tool}\n");
    }
    text += "</tools>\nTo call one, answer with a JSON object of its name and arguments:\n\
             <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>";
    match out.first_mut().filter(|m| m.role == "system") {
        Some(system) => system.content = format!("{}\n\n{text}", system.text()).into(),
        None => out.insert(0, Message::new("system", text)),
    }
    out
}

/// A message with additional fields for the template.
pub fn message(role: &str, content: String, extra: Map<String, Value>) -> Message {
    Message {
        role: role.to_owned(),
        content: content.into(),
        extra,
    }
}
