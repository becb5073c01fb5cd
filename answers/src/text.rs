//! The text side of a model: how it is asked, and how its answers are read.

use crate::chat::{Asked, ChatInput, Prompt, Thinking, ToolChoice, signatures};
use crate::dialect::{Dialect, ToolPrompt};
use crate::grammar::{Conformant, Format, Grammars, Start};
use crate::hold::ThinkingBudget;
use crate::output::{CallForm, CallParser, ReaderOptions, Tools};
use nq_formats::Checkpoint;
use nq_model::vision::VisionConfig;
use nq_runtime::chat_template::integers;
use nq_runtime::{ChatTemplate, Error, Message, Result, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

/// A model's tokenizer and chat template, how it thinks and calls tools, and the tokens that end its answers.
pub struct ModelText {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop: Vec<u32>,
    vocab: usize,
    /// The token that stands for an image's rows, of a model that sees.
    image_pad: Option<u32>,
    // Found out by rendering, so only once they are needed.
    tool_prompt: OnceLock<ToolPrompt>,
    dialect: OnceLock<Dialect>,
    grammars: OnceLock<Result<Grammars, String>>,
}

impl ModelText {
    /// Reads the text side of a checkpoint.
    ///
    /// # Errors
    /// A tokenizer or template that cannot be read, or a tokenizer of another model.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        let vocab = checkpoint.config().vocab_size;
        tokenizer.check_vocab(vocab)?;
        let template = ChatTemplate::find(checkpoint.files())?;
        let stop = checkpoint.eos_token_ids();
        Ok(ModelText::new(tokenizer, template, stop, vocab).seeing(checkpoint.vision()))
    }

    /// With a tower of this shape.
    pub fn seeing(mut self, vision: Option<&VisionConfig>) -> Self {
        self.image_pad = vision.map(|vision| vision.tokens.pad);
        self
    }

    /// The text side of a model with logits for `vocab` tokens, of which `stop` end an answer.
    pub fn new(
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        stop: &[u32],
        vocab: usize,
    ) -> Self {
        ModelText {
            tokenizer,
            template,
            stop: stop.to_vec(),
            vocab,
            image_pad: None,
            tool_prompt: OnceLock::new(),
            dialect: OnceLock::new(),
            grammars: OnceLock::new(),
        }
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Its chat template, if it has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Tokens that end an answer.
    pub fn stop(&self) -> &[u32] {
        &self.stop
    }

    /// Number of logits per row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The constraint that holds an answer to a format.
    ///
    /// # Errors
    /// The part of the format that cannot be served, and why.
    pub fn constraint(&self, format: &Format, start: Start) -> Result<Conformant, String> {
        self.grammars()?.compile(format, start)
    }

    /// Compiles formats for this model; made on the first call.
    ///
    /// # Errors
    /// If its tokenizer does not support constraints.
    pub fn grammars(&self) -> Result<&Grammars, String> {
        let make = || {
            let form = match self.tool_prompt() {
                ToolPrompt::Template(form) => form,
                ToolPrompt::Described => CallForm::Json,
            };
            Grammars::new(&self.tokenizer, self.vocab, &self.stop, form)
        };
        self.grammars
            .get_or_init(make)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn tool_prompt(&self) -> ToolPrompt {
        let found = || self.template.as_ref().map(ToolPrompt::of);
        *self
            .tool_prompt
            .get_or_init(|| found().unwrap_or(ToolPrompt::Described))
    }

    fn dialect(&self) -> &Dialect {
        let found = || self.template.as_ref().map(Dialect::of);
        self.dialect.get_or_init(|| found().unwrap_or_default())
    }

    /// Where the constraint on the answer to `prompt` begins.
    fn start(&self, prompt: &str, thinking: Option<bool>) -> Start {
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

    /// What a request for thinking means to this model, if `most` tokens are the most that anyone gets.
    fn thinking(&self, asked: Thinking, most: Option<usize>) -> Thinking {
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
    fn thinking_budget(&self, prompt: &str, tokens: Option<usize>) -> Option<ThinkingBudget> {
        let (tokens, id) = (tokens?, |token| self.tokenizer.token_id(token));
        let (begin, end) = (id("<think>")?, id("</think>")?);
        let close = self.tokenizer.encode(&self.dialect().thinking_end).ok()?;
        Some(ThinkingBudget {
            tokens,
            thinks: prompt.trim_end().ends_with("<think>"),
            begin,
            end,
            close,
        })
    }

    /// Makes the prompt of a chat, of at most `most` tokens, and what its answer is held to and read with.
    ///
    /// # Errors
    /// [`Error::TooLong`] for a chat of more tokens; a template that refuses the chat; [`Error::Request`] for a model
    /// without one.
    pub fn ask(&self, chat: ChatInput, most: usize) -> Result<Asked> {
        let must_call = matches!(chat.choice, ToolChoice::Required | ToolChoice::Named(_));
        let format = chat.whole_format();
        let calls = chat.shown().map(|tools| Tools {
            list: signatures(tools, None),
            several: !chat.one_call,
        });
        let (continues, stop) = (chat.continues, chat.stop.clone());
        let thinking = self.thinking(chat.thinking.clone(), chat.most_thinking);
        let mut prompt = self.prompt(chat, &thinking, most)?;
        let start = match continues {
            true => Start::Answer,
            false => self.start(&prompt.text, thinking.switches.enable_thinking),
        };
        if format.is_none() {
            prompt.begun.clear();
        }
        Ok(Asked {
            thinking: self.thinking_budget(&prompt.text, thinking.budget),
            reader: ReaderOptions {
                thinking: Some(prompt.text.clone()),
                calls,
                stop: if must_call { Vec::new() } else { stop },
            },
            format: format.map(|f| (f, start)),
            prompt,
        })
    }

    /// An answer as a message of the chat: `prompt` is the text that it answers, if a template made that. The model
    /// `thinks` if it was cut off there, which the message then ends, so that a template can tell it from the answer.
    pub(crate) fn wrote(&self, prompt: Option<&str>, tokens: &[u32], thinks: bool) -> Message {
        let end = if thinks { "\n</think>\n\n" } else { "" };
        self.message(prompt, &(self.tokenizer.decode(tokens, true) + end))
    }

    /// Like [`ModelText::wrote`], of the thinking and the text of an answer.
    pub(crate) fn said(&self, prompt: Option<&str>, thinking: &str, text: &str) -> Message {
        let opened = prompt.is_some_and(|p| p.trim_end().ends_with("<think>"));
        self.message(
            prompt,
            &match (opened, thinking) {
                (false, "") => text.to_owned(),
                (false, thinking) => format!("<think>\n{thinking}\n</think>\n\n{text}"),
                (true, thinking) => format!("{thinking}\n</think>\n\n{text}"),
            },
        )
    }

    fn message(&self, prompt: Option<&str>, written: &str) -> Message {
        match (&self.template, prompt) {
            (Some(template), Some(prompt)) => template.answer(prompt, written),
            _ => Message::new("assistant", written),
        }
    }

    /// Renders the chat as text and tokens, with the assistant's turn begun or, if the answer `continues` the
    /// last message, with that message's text at its end.
    fn prompt(&self, chat: ChatInput, thinking: &Thinking, most: usize) -> Result<Prompt> {
        let template = self.template.as_ref().ok_or_else(|| Error::Request {
            what: "chat",
            expected: "a model with a chat template".into(),
            found: "one without".into(),
        })?;
        let tools = chat.shown().map(<[Value]>::to_vec);
        let (mut messages, tools) = (chat.messages, tools.as_deref());
        let bytes = messages.iter().map(Message::text_bytes).sum();
        self.tokenizer.check_bytes(bytes, most)?;
        let last = if chat.continues { messages.pop() } else { None };
        let calls = |m: &Message| m.role == "tool" || m.extra.contains_key("tool_calls");
        let (mut messages, tools) = match tools.is_some() || messages.iter().any(calls) {
            true if self.tool_prompt() == ToolPrompt::Described => {
                (described(messages, tools), None)
            }
            _ => (messages, tools),
        };
        if messages.iter().skip(1).any(|m| m.role == "system") {
            messages = self.dialect().arranged(messages);
        }
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
        let tokens = self.tokenizer.encode_prompt_within(&prompt, most)?;
        let (mut tokens, images) = self.with_images(tokens, &chat.images, most)?;
        let mut begun = Vec::new();
        if last.is_none() && thinking.budget == Some(0) && text.trim_end().ends_with("<think>") {
            // A template that opens thinking whatever it is told.
            tokens.extend(self.tokenizer.encode(&self.dialect().thinking_end)?);
            text += &self.dialect().thinking_end;
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
                true => self.dialect().thinking_end.as_str(),
                false => "",
            };
            let thought = thought.unwrap_or_default().trim();
            tokens.extend(self.tokenizer.encode(open)?);
            let quoted = |text| self.tokenizer.encode_quoted_within(text, most);
            tokens.extend(quoted(thought)?);
            tokens.extend(self.tokenizer.encode(close)?);
            begun = quoted(last.text())?;
            tokens.extend_from_slice(&begun);
            text += &[open, thought, close, last.text()].concat();
        }
        Ok(Prompt {
            tokens,
            images,
            text,
            begun,
        })
    }

    /// Gives the images in a prompt as many pads as each has tokens, and says where they begin. Pads that users wrote
    /// are text, so those that are there are the template's.
    fn with_images(
        &self,
        tokens: Vec<u32>,
        images: &[usize],
        most: usize,
    ) -> Result<(Vec<u32>, Vec<usize>)> {
        let is_pad = |token: &u32| Some(*token) == self.image_pad;
        let shown = tokens.iter().filter(|t| is_pad(t)).count();
        if shown != images.len() {
            return Err(Error::Request {
                what: "images of a chat",
                expected: format!("{shown}, as many as the template shows"),
                found: images.len().to_string(),
            });
        }
        let at_least = tokens.len() - shown + images.iter().sum::<usize>();
        if at_least > most {
            return Err(Error::TooLong { at_least, most });
        }
        let (mut all, mut places) = (Vec::with_capacity(at_least), Vec::with_capacity(shown));
        let mut sizes = images.iter();
        for token in tokens {
            let size = is_pad(&token).then(|| sizes.next()).flatten();
            places.extend(size.map(|_| all.len()));
            all.extend(std::iter::repeat_n(token, size.copied().unwrap_or(1)));
        }
        Ok((all, places))
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
                let call = integers::unmarked(call.to_string());
                text += &format!("\n{}\n{call}\n{}", CallParser::OPEN, CallParser::CLOSE);
            }
            message.content = text.trim_start().into();
        }
        if message.role == "tool" {
            let (open, close) = ("<tool_response>\n", "\n</tool_response>");
            let content = match message.content {
                Value::Array(mut parts) => {
                    parts.insert(0, json!({"type": "text", "text": open}));
                    parts.push(json!({"type": "text", "text": close}));
                    parts.into()
                }
                text => (open.to_owned() + text.as_str().unwrap_or_default() + close).into(),
            };
            message = Message {
                role: "user".into(),
                content,
                extra: Map::new(),
            };
        }
        out.push(message);
    }
    let Some(tools) = tools.filter(|t| !t.is_empty()) else {
        return out;
    };
    let mut text =
        String::from("You may call functions. Their signatures are JSON schemas:\n<tools>\n");
    for tool in tools {
        text += &format!("{}\n", integers::unmarked(tool.to_string()));
    }
    text += "</tools>\nTo call one, answer with a JSON object of its name and arguments:\n\
             <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>";
    match out.first_mut().filter(|m| m.role == "system") {
        Some(system) => system.content = format!("{}\n\n{text}", system.text()).into(),
        None => out.insert(0, Message::new("system", text)),
    }
    out
}
