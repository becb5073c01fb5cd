//! Chats as text, by the Jinja template that a model was trained with.
//!
//! The environment is that of transformers' `apply_chat_template`: blocks trimmed, Python's
//! string and dict methods, `raise_exception`, `strftime_now`, loop controls, and a `tojson`
//! that is `json.dumps(..., ensure_ascii=False)`.

mod filters;
pub mod integers;
mod jinja;
mod json;
mod memory;
mod message;
mod percent;
pub(crate) mod prompt;
mod python;
mod source;
mod tags;
mod worker;

pub use message::{Message, image_part};
pub use prompt::RenderedChat;
pub use worker::{Isolation, isolate, serve};

use crate::error::{Error, Result};
use crate::thinking::{Part, Splitter};
use crate::tokenizer::control::ControlTokens;
use jinja::Templates;
use message::REASONING;
use nq_formats::Files;
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::PathBuf;
use worker::Worker;

/// The file that holds a template alone; it takes precedence, as in transformers.
pub(crate) const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The file beside it with a template for chats with tools.
pub(crate) const TOOL_USE_FILE: &str = "additional_chat_templates/tool_use.jinja";
/// The file that otherwise holds it under the key `chat_template`.
pub(crate) const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// Name of the template to use when a chat has tools, in a file with several templates.
const TOOL_USE: &str = "tool_use";
/// Name of the template to use otherwise.
const DEFAULT: &str = "default";

/// Variables by which a template lets its caller steer thinking; those that are `None` stay undefined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Whether the model is to think.
    pub enable_thinking: Option<bool>,
    /// Whether the thinking of earlier turns is shown.
    pub preserve_thinking: Option<bool>,
    /// How much it is to think, in the template's words.
    pub reasoning_effort: Option<String>,
}

impl From<Option<bool>> for Switches {
    fn from(enable_thinking: Option<bool>) -> Self {
        Switches {
            enable_thinking,
            ..Switches::default()
        }
    }
}

/// The chat template of a model.
///
/// A template is an untrusted program from the model's makers. Its source length, the instructions of a
/// rendering and the size of its output are bounded, and the stack is large enough for any nesting of
/// the source. A template can still fill the memory, or recurse endlessly over a value that contains
/// itself. A program that opens models of others therefore calls [`isolate`] first: templates are then
/// compiled and rendered in a separate process, under limits on memory and time.
#[derive(Debug)]
pub struct ChatTemplate {
    renderer: Renderer,
    path: PathBuf,
    /// Special tokens by their role (`eos_token`, ...), as templates may use them.
    special_tokens: Map<String, Value>,
    switches_thinking: bool,
    reads_effort: bool,
    /// Takes what a model thought as a field of its message.
    reads_reasoning: bool,
    /// Efforts that the source names in quotes.
    efforts: Vec<&'static str>,
}

/// Words for effort, from the least.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Where a template runs.
#[derive(Debug)]
enum Renderer {
    /// In this process.
    Here(Templates),
    /// In a process of its own.
    Isolated(Worker),
}

impl ChatTemplate {
    /// Like [`ChatTemplate::find`], for a model that must have a template.
    ///
    /// # Errors
    /// Errors of [`ChatTemplate::find`]; [`Error::Text`] if there is none.
    pub fn from_files(files: &Files) -> Result<Self> {
        Self::find(files)?.ok_or_else(|| {
            let why = format!(
                "expected a chat_template, found none here and no {TEMPLATE_FILE} next to it"
            );
            text_error(&files.path(TOKENIZER_CONFIG_FILE), why)
        })
    }

    /// Reads `chat_template.jinja` and `additional_chat_templates/tool_use.jinja`, or `chat_template` in `tokenizer_config.json`: a string,
    /// or a list of named templates. `None` if neither is there.
    ///
    /// # Errors
    /// [`Error::Text`] if what is there is not a template.
    pub fn find(files: &Files) -> Result<Option<Self>> {
        let config = TokenizerConfig::read(files)?;
        let path = files.path(TEMPLATE_FILE);
        let mut templates = Vec::new();
        for (name, file) in [(DEFAULT, TEMPLATE_FILE), (TOOL_USE, TOOL_USE_FILE)] {
            if let Some(bytes) = files.get(file)? {
                let source = std::str::from_utf8(&bytes).map_err(|e| {
                    text_error(&files.path(file), format!("expected UTF-8, found {e}"))
                })?;
                templates.push((name.to_owned(), source.to_owned()));
            }
        }
        if templates.iter().any(|t| t.0 == DEFAULT) {
            return Self::new(path, templates, config.special_tokens).map(Some);
        }
        if config.templates.is_empty() {
            return Ok(None);
        }
        Self::new(config.path, config.templates, config.special_tokens).map(Some)
    }

    /// Compiles a template from its source; messages name it as `path`.
    ///
    /// # Errors
    /// [`Error::Text`] if it is not a template.
    pub fn from_source(path: impl Into<PathBuf>, source: &str) -> Result<Self> {
        let templates = vec![(DEFAULT.to_owned(), source.to_owned())];
        Self::new(path.into(), templates, Map::new())
    }

    fn new(
        path: PathBuf,
        templates: Vec<(String, String)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self> {
        let reads = |text: &str| templates.iter().any(|t| t.1.contains(text));
        let (switches_thinking, reads_effort) =
            (reads("enable_thinking"), reads("reasoning_effort"));
        let named = |word: &&str| reads(&format!("'{word}'")) || reads(&format!("\"{word}\""));
        let efforts = EFFORTS.into_iter().filter(named).collect();
        let renderer = match worker::isolation() {
            None => Templates::compile(&templates)
                .map(Renderer::Here)
                .map_err(|why| text_error(&path, why))?,
            Some(isolation) => Worker::start(isolation, &templates)
                .map(Renderer::Isolated)
                .map_err(|e| e.at(&path))?,
        };
        Ok(ChatTemplate {
            renderer,
            path,
            special_tokens,
            switches_thinking,
            reads_effort,
            reads_reasoning: reads(REASONING[0]),
            efforts,
        })
    }

    /// True if the template reads `enable_thinking`.
    pub fn switches_thinking(&self) -> bool {
        self.switches_thinking
    }

    /// True if the template reads `reasoning_effort`.
    pub fn reads_effort(&self) -> bool {
        self.reads_effort
    }

    /// The template's word for an effort: the same, or the next higher or lower one that it names; `None` if
    /// it reads none.
    pub fn effort(&self, asked: &str) -> Option<&'static str> {
        let rank = |word: &str| EFFORTS.iter().position(|e| *e == word);
        let asked = rank(asked).filter(|_| self.reads_effort)?;
        let above = self.efforts.iter().find(|e| rank(e) >= Some(asked));
        above.or(self.efforts.last()).copied()
    }

    /// The answer `text` to `prompt` as a message of the chat. A template that reads thinking as a field gets it as
    /// one, since not all of those look for it in the content; others get the text as the model wrote it.
    pub fn answer(&self, prompt: &str, text: &str) -> Message {
        if !self.reads_reasoning {
            return Message::new("assistant", text);
        }
        let (mut thinking, mut answer) = (String::new(), String::new());
        let mut emit = |part, text: &str| match part {
            Part::Thinking => thinking.push_str(text),
            Part::Answer => answer.push_str(text),
        };
        let mut splitter = Splitter::after(prompt);
        splitter.push(text, &mut emit);
        splitter.finish(&mut emit);
        let mut message = Message::new("assistant", answer);
        if !thinking.is_empty() {
            message.extra.insert(REASONING[0].into(), thinking.into());
        }
        message
    }

    /// The chat as [`ChatTemplate::render`] gives it, for [`Tokenizer::encode_prompt`]: wherever a
    /// string of `messages` or `tools` contains one of the `control` tokens, or its end could become
    /// part of one, it is marked as a quotation. The mark is one private-use character after the first
    /// character of the token, and templates see it: a template that looks for control tokens in a
    /// message does not find them. For templates that need to, [`ChatTemplate::render`] and
    /// [`Tokenizer::encode`] take messages as they are.
    ///
    /// [`Tokenizer::encode`]: crate::Tokenizer::encode
    /// [`Tokenizer::encode_prompt`]: crate::Tokenizer::encode_prompt
    pub fn prompt(
        &self,
        control: &ControlTokens,
        messages: &[Message],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        switches: impl Into<Switches>,
    ) -> Result<RenderedChat> {
        RenderedChat::new(control, messages, tools, |messages, tools| {
            self.render(messages, tools, add_generation_prompt, switches)
        })
    }

    /// The chat as text. `tools` are JSON schemas of functions. `add_generation_prompt` opens
    /// the assistant's next message. `switches` may be `enable_thinking` alone.
    ///
    /// # Errors
    /// [`Error::Text`] with the template's line, or with the error that it raised or the limit that it
    /// exceeded; [`Error::Interrupted`].
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        switches: impl Into<Switches>,
    ) -> Result<String> {
        let switches = switches.into();
        let mut variables = self.special_tokens.clone();
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        for (name, value) in [
            ("enable_thinking", switches.enable_thinking.map(Value::from)),
            (
                "preserve_thinking",
                switches.preserve_thinking.map(Value::from),
            ),
            (
                "reasoning_effort",
                switches.reasoning_effort.map(Value::from),
            ),
        ] {
            variables.extend(value.map(|value| (name.to_owned(), value)));
        }
        let messages: Vec<Cow<'_, Message>> = messages.iter().map(Message::aliased).collect();
        let context = Context {
            messages,
            tools,
            documents: (),
            variables,
        };
        match &self.renderer {
            Renderer::Here(templates) => serde_json::to_value(&context)
                .map_err(|e| e.to_string())
                .and_then(|context| templates.render(tools.is_some(), &context))
                .map_err(|why| text_error(&self.path, why)),
            Renderer::Isolated(worker) => worker
                .render(tools.is_some(), &context)
                .map_err(|e| e.at(&self.path)),
        }
    }
}

/// The variables of a template.
#[derive(Serialize)]
struct Context<'a> {
    messages: Vec<Cow<'a, Message>>,
    tools: Option<&'a [Value]>,
    /// Templates may ask whether there are any.
    documents: (),
    #[serde(flatten)]
    variables: Map<String, Value>,
}

/// The fields of `tokenizer_config.json` that a template needs.
struct TokenizerConfig {
    path: PathBuf,
    /// (name, source)
    templates: Vec<(String, String)>,
    special_tokens: Map<String, Value>,
}

impl TokenizerConfig {
    /// Reads the file; an absent one is empty.
    fn read(files: &Files) -> Result<Self> {
        let path = files.path(TOKENIZER_CONFIG_FILE);
        let bad = |expected: &str| text_error(&path, format!("expected {expected}"));
        let json: Map<String, Value> = match files.get(TOKENIZER_CONFIG_FILE)? {
            Some(bytes) => {
                serde_json::from_slice(&bytes).map_err(|e| text_error(&path, e.to_string()))?
            }
            None => Map::new(),
        };
        let templates = match json.get("chat_template") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
            Some(Value::Array(list)) => {
                let mut named = Vec::new();
                for item in list {
                    match (item["name"].as_str(), item["template"].as_str()) {
                        (Some(name), Some(source)) => {
                            named.push((name.to_owned(), source.to_owned()));
                        }
                        _ => return Err(bad("a name and a template in each chat_template")),
                    }
                }
                if !named.iter().any(|t| t.0 == DEFAULT) {
                    return Err(bad("a chat_template named default"));
                }
                named
            }
            Some(_) => return Err(bad("chat_template to be a string or a list")),
        };
        let special_tokens = json
            .iter()
            .filter(|(key, _)| key.ends_with("_token"))
            .filter_map(|(key, value)| {
                let token = value.as_str().or_else(|| value["content"].as_str())?;
                Some((key.clone(), Value::String(token.to_owned())))
            })
            .collect();
        Ok(TokenizerConfig {
            path,
            templates,
            special_tokens,
        })
    }
}

fn text_error(path: &std::path::Path, why: String) -> Error {
    Error::Text {
        path: path.into(),
        what: "chat template",
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::ChatTemplate;

    #[test]
    fn tojson_is_json_dumps() {
        let template = |source| ChatTemplate::from_source("t", source).unwrap();
        let tools = [serde_json::json!(
            {"z": "<a href='x'>&\"\\\n\u{7f}é", "a": [1, 2.0, true, null, [], {}]})];
        let render = |source| template(source).render(&[], Some(&tools), false, None);
        assert_eq!(
            render("{{ tools[0] | tojson }}").unwrap(),
            "{\"z\": \"<a href='x'>&\\\"\\\\\\n\u{7f}é\", \"a\": [1, 2.0, true, null, [], {}]}"
        );
        assert_eq!(
            render("{{ {'a': [1, {'b': 2}]} | tojson(indent=2) }}").unwrap(),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ]\n}"
        );
        let e = render("{{ nothing | tojson }}").unwrap_err().to_string();
        assert!(e.contains("undefined"), "{e}");
    }
}
