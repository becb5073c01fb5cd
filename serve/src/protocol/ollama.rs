//! `POST /api/chat` and `/api/generate`: Ollama's protocol, for clients that know no other. Answers are lines of JSON.

use super::chat::{self, ChatRequest, render};
use super::fields::Fields;
use super::images;
use super::sent::ContentPlace;
use super::thinking;
use super::tools::{Tools, made, object};
use super::{Framing, Parsed, Shape, SseEvent, rfc3339, sampling};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::model::{ServedModel, message};
use crate::names::Names;
use nq_answers::grammar::Format;
use nq_answers::output::{Piece, ReaderOptions};
use nq_answers::{Thinking, ToolChoice};
use nq_runtime::Message;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The version of Ollama whose routes these are like: clients look for features by it.
pub(crate) const VERSION: &str = "0.12.6";

/// Most messages in one request.
const MOST_MESSAGES: usize = 4096;

/// Reads a request of `/api/chat`; one without messages loads the model.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub(crate) fn chat(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
    let mut fields = fields.under("ollama.chat")?;
    let given = fields.objects("messages", "ollama.message", MOST_MESSAGES)?;
    let messages: Vec<Message> = given
        .into_iter()
        .map(one_message)
        .collect::<Result<_, _>>()?;
    let tools = chat::tools(&mut fields)?;
    let asked = OllamaRequest::read(model, &mut fields, "messages")?;
    asked.parsed(model, fields, Answered::Message, messages, tools)
}

/// Reads a request of `/api/generate`; one without a prompt loads the model.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub(crate) fn generate(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
    let mut fields = fields.under("ollama.generate")?;
    let prompt: String = fields.take("prompt")?.unwrap_or_default();
    let system: Option<String> = fields.take("system")?;
    let raw: bool = fields.take("raw")?.unwrap_or(false);
    let given: Vec<String> = fields.take("images")?.unwrap_or_default();
    let mut asked = OllamaRequest::read(model, &mut fields, "prompt")?;
    if raw && !prompt.is_empty() {
        if asked.format.is_some() {
            let why = "nq constrains no answer to a raw prompt";
            return Err(ApiError::unsupported("format", why));
        }
        if !given.is_empty() {
            let why = "nq reads images in prompts that go through the template";
            return Err(ApiError::unsupported("images", why));
        }
        let tokens = model.tokenizer().encode_within(&prompt, model.counted());
        let tokens = tokens.map_err(|e| asked.partial.names.read(e, model.context()))?;
        asked.partial.prompts = vec![tokens];
        fields.finish()?;
        return Ok(asked.answered(model, Answered::Response));
    }
    let mut messages = Vec::new();
    if !prompt.is_empty() {
        messages.extend(system.map(|text| Message::new("system", text)));
        let given = images::beside(
            given,
            "images",
            prompt,
            ContentPlace::Message,
            fields.reading(),
        )?;
        messages.push(message("user", given, Map::new()));
    }
    asked.parsed(
        model,
        fields,
        Answered::Response,
        messages,
        Tools::default(),
    )
}

/// What both routes read.
struct OllamaRequest {
    partial: Generation,
    thinking: Thinking,
    format: Option<Format>,
    stream: bool,
}

impl OllamaRequest {
    fn read(
        model: &Arc<ServedModel>,
        fields: &mut Fields,
        prompt: &'static str,
    ) -> Result<Self, ApiError> {
        let given = fields.object("options", "ollama.options")?;
        let none = || Fields::of(json!({}), "options", "ollama.options", fields.reading());
        let mut options = given.map_or_else(none, Ok)?;
        // -1 is no limit, -2 as many as fit.
        let most = match options.peek("num_predict").as_f64() {
            Some(-2.0) => options.take::<Value>("num_predict").map(|_| None)?,
            _ => options.limit("num_predict", 0)?,
        };
        let partial = Generation {
            sampling: sampling::params(&mut options, model.sampling())?,
            max_tokens: most,
            reader: ReaderOptions {
                stop: sampling::stop(&mut options, "stop")?,
                ..ReaderOptions::default()
            },
            names: Names {
                prompt,
                format: "format",
            },
            ..Generation::of(model)
        };
        options.finish()?;
        let format = match fields.take::<Value>("format")? {
            None => None,
            Some(Value::String(word)) if word.is_empty() => None,
            Some(Value::String(word)) if word == "json" => Some(Format::Object),
            Some(schema @ Value::Object(_)) => Some(Format::Schema(schema)),
            Some(_) => {
                let what = "expected json or a JSON schema";
                return Err(ApiError::field("format", what));
            }
        };
        Ok(OllamaRequest {
            partial,
            thinking: thinking::of_ollama(fields)?,
            format,
            stream: fields.take("stream")?.unwrap_or(true),
        })
    }

    /// The request for an answer to `messages`; to none, the model is loaded alone.
    fn parsed(
        mut self,
        model: &Arc<ServedModel>,
        fields: Fields,
        answered: Answered,
        messages: Vec<Message>,
        tools: Tools,
    ) -> Result<Parsed, ApiError> {
        let reading = Arc::clone(fields.reading());
        fields.finish()?;
        if !messages.is_empty() {
            let continues = messages
                .last()
                .is_some_and(|m| m.role == "assistant" && !m.extra.contains_key("tool_calls"));
            let chat = ChatRequest {
                messages,
                tools,
                choice: ToolChoice::Auto,
                several_calls: true,
                thinking: self.thinking.clone(),
                format: self.format.take(),
                continues,
                reading,
            };
            self.partial = render(model, chat, self.partial)?;
        }
        Ok(self.answered(model, answered))
    }

    fn answered(self, model: &Arc<ServedModel>, answered: Answered) -> Parsed {
        Parsed {
            shape: Box::new(OllamaFormat {
                model: model.name().to_owned(),
                answered,
                begun: Instant::now(),
                first: None,
                text: String::new(),
                reasoning: String::new(),
                calls: Vec::new(),
                reason: match self.partial.prompts.is_empty() {
                    true => "load",
                    false => "stop",
                },
            }),
            generation: self.partial,
            stream: self.stream,
        }
    }
}

fn one_message(mut fields: Fields) -> Result<Message, ApiError> {
    let reading = Arc::clone(fields.reading());
    let role: String = fields.require("role")?;
    if !matches!(role.as_str(), "system" | "user" | "assistant" | "tool") {
        let what = format!("expected system, user, assistant or tool, found {role}");
        return Err(ApiError::field(&fields.name("role"), what));
    }
    let content: Option<String> = fields.take("content")?;
    let thinking: Option<String> = fields.take("thinking")?;
    let given: Vec<String> = fields.take("images")?.unwrap_or_default();
    let at = match role.as_str() {
        "user" => ContentPlace::Message,
        "tool" => ContentPlace::Result,
        _ if given.is_empty() => ContentPlace::Text,
        _ => {
            let why = "nq reads images in messages of users and results of tools";
            return Err(ApiError::unsupported(&fields.name("images"), why));
        }
    };
    let name = fields.name("images");
    let content = images::beside(given, &name, content.unwrap_or_default(), at, &reading)?;
    let mut extra = Map::new();
    let mut calls = Vec::new();
    for mut call in fields.objects("tool_calls", "ollama.call", usize::MAX)? {
        let id: Option<Value> = call.take("id")?;
        let function: Value = call.require("function")?;
        let name = function["name"].as_str().map(str::to_owned);
        let arguments = Some(function["arguments"].clone());
        let place = call.name("function");
        calls.push(made(
            id.unwrap_or_default(),
            name,
            arguments,
            &place,
            &reading,
        )?);
    }
    if role == "assistant" {
        if let Some(thinking) = thinking.filter(|text| !text.is_empty()) {
            extra.insert("reasoning_content".into(), thinking.into());
        }
        if !calls.is_empty() {
            extra.insert("tool_calls".into(), calls.into());
        }
    }
    for (field, key) in [("tool_name", "name"), ("tool_call_id", "tool_call_id")] {
        if let Some(value) = fields.take::<String>(field)? {
            extra.insert(key.into(), value.into());
        }
    }
    fields.finish()?;
    Ok(message(&role, content, extra))
}

/// A model's entry in the list, from its card in OpenAI's.
pub(crate) fn tag(card: &Value) -> Value {
    let created = card["created"].as_i64().unwrap_or_default();
    json!({
        "name": card["id"], "model": card["id"], "modified_at": rfc3339(created),
        "size": card["bytes"], "digest": card["digest"].as_str().unwrap_or_default(),
        "details": details(card),
    })
}

fn details(card: &Value) -> Value {
    let quantization = &card["quantization"];
    json!({
        "parent_model": "", "format": quantization["format"], "family": "", "families": [], "parameter_size": "",
        "quantization_level": quantization["scheme"].as_str().unwrap_or_default(),
    })
}

/// What `/api/show` says of a model, from its card in OpenAI's list.
pub(crate) fn shown(card: &Value) -> Value {
    let mut capabilities = match card["task"].as_str() {
        Some("generate") => vec!["completion"],
        Some("embed") => vec!["embedding"],
        _ => Vec::new(),
    };
    let able = [("tools", "tools"), ("switches_thinking", "thinking")];
    let able = able.iter().filter(|(key, _)| card[key] == true);
    capabilities.extend(able.map(|(_, word)| word));
    let modalities = card["input_modalities"].as_array().into_iter().flatten();
    capabilities.extend(modalities.filter(|m| *m == "image").map(|_| "vision"));
    let created = card["created"].as_i64().unwrap_or_default();
    let mut info =
        json!({"general.architecture": "nq", "nq.context_length": card["max_model_len"]});
    if let Some(tower) = card["vision"].as_object() {
        let keys = [
            ("block_count", "blocks"),
            ("embedding_length", "hidden_size"),
            ("attention.head_count", "heads"),
            ("patch_size", "patch_size"),
            ("max_tokens", "max_tokens"),
        ];
        keys.iter()
            .for_each(|(theirs, ours)| info[format!("nq.vision.{theirs}")] = tower[*ours].clone());
    }
    json!({
        "modelfile": "", "parameters": "", "template": "", "details": details(card),
        "model_info": info,
        "capabilities": capabilities, "modified_at": rfc3339(created),
    })
}

/// An error in Ollama's format.
pub(crate) fn error(error: &ApiError) -> Value {
    json!({"error": error.message})
}

/// Where an answer's text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answered {
    /// In a message: `/api/chat`.
    Message,
    /// In `response`: `/api/generate`.
    Response,
}

/// A call of a tool.
struct OllamaCall {
    name: String,
    /// JSON text.
    arguments: String,
}

/// The formats of this protocol.
struct OllamaFormat {
    model: String,
    answered: Answered,
    begun: Instant,
    /// When the first piece of the answer came.
    first: Option<Instant>,
    text: String,
    reasoning: String,
    calls: Vec<OllamaCall>,
    reason: &'static str,
}

/// A time as the protocol counts it.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl OllamaFormat {
    /// What is told with some text and thinking, and with all calls if it is the last.
    fn line(&self, text: &str, reasoning: &str, last: Option<Usage>) -> Value {
        let mut line = json!({
            "model": self.model, "created_at": jiff::Timestamp::now().to_string(), "done": last.is_some(),
        });
        let mut told = Map::new();
        if !reasoning.is_empty() {
            told.insert("thinking".into(), reasoning.into());
        }
        match self.answered {
            Answered::Response => {
                line["response"] = text.into();
                for (key, value) in told {
                    line[key] = value;
                }
            }
            Answered::Message => {
                told.insert("role".into(), "assistant".into());
                told.insert("content".into(), text.into());
                if last.is_some() && !self.calls.is_empty() {
                    let call = |call: &OllamaCall| {
                        // A call that was cut off has no arguments.
                        let arguments = object(&call.arguments).unwrap_or_default();
                        json!({"function": {"name": call.name, "arguments": arguments}})
                    };
                    told.insert("tool_calls".into(), self.calls.iter().map(call).collect());
                }
                line["message"] = told.into();
            }
        }
        if let Some(usage) = last {
            let (all, first) = (self.begun.elapsed(), self.first.unwrap_or(self.begun));
            let prompt = first.duration_since(self.begun);
            line["done_reason"] = self.reason.into();
            line["total_duration"] = nanoseconds(all).into();
            line["load_duration"] = 0.into();
            line["prompt_eval_count"] = usage.prompt.into();
            line["prompt_eval_duration"] = nanoseconds(prompt).into();
            line["eval_count"] = usage.completion.into();
            line["eval_duration"] = nanoseconds(all.saturating_sub(prompt)).into();
        }
        line
    }

    /// Takes pieces; the text and the thinking among them are in the order in which they came.
    fn push(&mut self, output: Output) -> Vec<Piece> {
        self.first.get_or_insert_with(Instant::now);
        if let Some(Ok(Ending::Length)) = output.end {
            self.reason = "length";
        }
        let mut told = Vec::new();
        for piece in output.pieces {
            match piece {
                Piece::CallStart { name, .. } => self.calls.push(OllamaCall {
                    name,
                    arguments: String::new(),
                }),
                Piece::CallArguments { index, text } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.arguments += &text;
                    }
                }
                piece => told.push(piece),
            }
        }
        told
    }
}

impl Shape for OllamaFormat {
    fn framing(&self) -> Framing {
        Framing::Lines
    }

    fn begin(&mut self, _: Usage) -> Vec<SseEvent> {
        Vec::new()
    }

    fn stream(&mut self, output: Output, _: Usage) -> Vec<SseEvent> {
        let told = self.push(output);
        let line = |piece: &Piece| match piece {
            Piece::Reasoning(text) => self.line("", text, None),
            Piece::Text(text) => self.line(text, "", None),
            Piece::CallStart { .. } | Piece::CallArguments { .. } => Value::Null,
        };
        told.iter().map(line).map(|l| SseEvent::data(&l)).collect()
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        vec![SseEvent::data(&self.line("", "", Some(usage)))]
    }

    fn fail(&mut self, e: &ApiError) -> Vec<SseEvent> {
        vec![SseEvent::data(&error(e))]
    }

    fn collect(&mut self, output: Output) {
        for piece in self.push(output) {
            match piece {
                Piece::Reasoning(text) => self.reasoning += &text,
                Piece::Text(text) => self.text += &text,
                Piece::CallStart { .. } | Piece::CallArguments { .. } => {}
            }
        }
    }

    fn whole(&mut self, usage: Usage) -> Value {
        self.line(&self.text, &self.reasoning, Some(usage))
    }
}
