//! `POST /v1/responses`: OpenAI's newer protocol, without state: each request contains its whole
//! conversation.

use super::blocks::{Block, Blocks, Change};
use super::chat::{ChatRequest, render, text};
use super::fields::Fields;
use super::tools::{self, made};
use super::{Parsed, Shape, SseEvent, now, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::grammar::Format;
use crate::model::{Model, message};
use crate::output::ReaderOptions;
use nq_runtime::{LogitBias, Message};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Accepted fields that do not affect the answer.
const WITHOUT_EFFECT: [&str; 7] = [
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "client_metadata",
];

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub fn parse(model: &Arc<Model>, mut fields: Fields) -> Result<Parsed, ApiError> {
    fields.ignore(&WITHOUT_EFFECT);
    fields.only("store", &[json!(false)])?;
    fields.only("background", &[json!(false)])?;
    fields.only("truncation", &[json!("disabled")])?;
    fields.only("stream_options", &[json!({"include_obfuscation": false})])?;
    // Answers contain nothing of this kind.
    fields.only(
        "include",
        &[json!([]), json!(["reasoning.encrypted_content"])],
    )?;
    let instructions: Option<String> = fields.take("instructions")?;
    let mut messages: Vec<Message> = Vec::new();
    messages.extend(
        instructions
            .clone()
            .map(|text| Message::new("system", text)),
    );
    read_input(fields.require("input")?, &mut messages)?;
    let tools = read_tools(fields.take("tools")?.unwrap_or_default())?;
    let choice = tools::choice(fields.take("tool_choice")?, &tools)?;
    let max_tokens = fields.count("max_output_tokens", 1, usize::MAX)?;
    let stream = fields.take("stream")?.unwrap_or(false);
    let chat = ChatRequest {
        messages,
        choice,
        several_calls: fields.take("parallel_tool_calls")?.unwrap_or(true),
        thinking: effort(fields.take("reasoning")?)?,
        format: format(fields.take("text")?)?,
        tools,
    };
    let sampling = sampling::params(&mut fields, model.sampling())?;
    fields.finish()?;
    let settings = json!({
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "parallel_tool_calls": chat.several_calls,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "previous_response_id": null,
        "store": false,
        "truncation": "disabled",
    });
    let partial = Generation {
        prompt: Vec::new(),
        n: 1,
        sampling,
        bias: LogitBias::default(),
        logprobs: None,
        max_tokens,
        ignore_eos: false,
        reader: ReaderOptions::default(),
        format: None,
    };
    Ok(Parsed {
        generation: render(model, chat, partial)?,
        shape: Box::new(Response {
            model: model.name().to_owned(),
            id: unique("resp_"),
            created: now(),
            settings,
            blocks: Blocks::default(),
            ids: Vec::new(),
            length: false,
            events: 0,
        }),
        stream,
    })
}

/// Reads `reasoning`.
fn effort(value: Option<Value>) -> Result<Option<bool>, ApiError> {
    let Some(value) = value else {
        return Ok(None);
    };
    let mut fields = Fields::of(value, "reasoning")?;
    let effort: Option<String> = fields.take("effort")?;
    // Answers contain the thinking itself, so there is nothing to summarize.
    fields.ignore(&["summary", "generate_summary"]);
    fields.finish()?;
    match effort.as_deref() {
        None => Ok(None),
        Some("none" | "minimal") => Ok(Some(false)),
        Some("low" | "medium" | "high" | "xhigh") => Ok(Some(true)),
        Some(other) => Err(ApiError::field(
            "reasoning.effort",
            format!("expected none, minimal, low, medium or high, found {other}"),
        )),
    }
}

/// Reads `text`.
fn format(value: Option<Value>) -> Result<Option<Format>, ApiError> {
    let Some(value) = value else {
        return Ok(None);
    };
    let mut fields = Fields::of(value, "text")?;
    fields.only("verbosity", &[json!("medium")])?;
    let format = fields.take::<Value>("format")?;
    fields.finish()?;
    let Some(format) = format else {
        return Ok(None);
    };
    let mut fields = Fields::of(format, "text.format")?;
    fields.ignore(&["name", "description", "strict"]);
    let kind: String = fields.require("type")?;
    let format = match kind.as_str() {
        "text" => None,
        "json_object" => Some(Format::Object),
        "json_schema" => Some(Format::Schema(fields.require("schema")?)),
        other => {
            let why = format!("nq serves text, json_object and json_schema, found {other}");
            return Err(ApiError::unsupported("text.format.type", &why));
        }
    };
    fields.finish()?;
    Ok(format)
}

fn read_tools(given: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    let mut tools = Vec::with_capacity(given.len());
    for (i, tool) in given.into_iter().enumerate() {
        let mut tool = Fields::of(tool, &format!("tools[{i}]"))?;
        tool.only("type", &[json!("function")])?;
        tool.ignore(&["strict"]);
        let (name, text) = (tool.require("name")?, tool.take("description")?);
        let schema = tool.take("parameters")?;
        tool.finish()?;
        tools.push(tools::function(
            name,
            text.unwrap_or_default(),
            schema.unwrap_or_default(),
        ));
    }
    tools::read(Some(tools))
}

/// Reads `input`: a text, or a list of messages, calls and their results.
fn read_input(input: Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let items = match input {
        Value::String(text) => {
            out.push(Message::new("user", text));
            return Ok(());
        }
        Value::Array(items) if !items.is_empty() => items,
        _ => {
            return Err(ApiError::field(
                "input",
                "expected a text or a list of items",
            ));
        }
    };
    let mut thinking: Option<String> = None;
    for (i, item) in items.into_iter().enumerate() {
        let place = format!("input[{i}]");
        match item["type"].as_str().unwrap_or("message") {
            "message" => {
                let role = match item["role"].as_str() {
                    Some("developer" | "system") => "system",
                    Some(role @ ("user" | "assistant")) => role,
                    _ => {
                        let what = "expected user, assistant, system or developer";
                        return Err(ApiError::field(&format!("{place}.role"), what));
                    }
                };
                let content = text(item["content"].clone(), &format!("{place}.content"))?;
                let mut extra = Map::new();
                if let Some(thinking) = thinking.take().filter(|_| role == "assistant") {
                    extra.insert("reasoning_content".into(), thinking.into());
                }
                out.push(message(role, content, extra));
            }
            "function_call" => {
                let call = json!({
                    "id": item["call_id"],
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                });
                let made = made(vec![call], &place)?;
                // Calls of a turn go into its message.
                if !matches!(out.last(), Some(m) if m.role == "assistant") {
                    let mut extra = Map::new();
                    if let Some(thinking) = thinking.take() {
                        extra.insert("reasoning_content".into(), thinking.into());
                    }
                    out.push(message("assistant", String::new(), extra));
                }
                if let (Some(last), Value::Array(made)) = (out.last_mut(), made) {
                    let calls = last.extra.entry("tool_calls").or_insert_with(|| json!([]));
                    calls
                        .as_array_mut()
                        .into_iter()
                        .for_each(|c| c.extend(made.clone()));
                }
            }
            "function_call_output" => {
                let content = text(item["output"].clone(), &format!("{place}.output"))?;
                let mut extra = Map::new();
                extra.insert("tool_call_id".into(), item["call_id"].clone());
                out.push(message("tool", content, extra));
            }
            "reasoning" => {
                let parts = item["content"].as_array().into_iter().flatten();
                let texts: Vec<&str> = parts.filter_map(|p| p["text"].as_str()).collect();
                thinking = Some(texts.join("\n")).filter(|t| !t.is_empty());
            }
            kind => {
                let why = format!("nq serves no items of type {kind}");
                return Err(ApiError::unsupported(&format!("{place}.type"), &why));
            }
        }
    }
    Ok(())
}

/// The formats of this protocol.
struct Response {
    model: String,
    id: String,
    created: u64,
    /// Settings of the request that the answer repeats.
    settings: Value,
    blocks: Blocks,
    /// Ids of the blocks' items.
    ids: Vec<String>,
    length: bool,
    events: usize,
}

impl Response {
    fn frame(&self, status: &str, usage: Option<Usage>, error: Value) -> Value {
        let mut frame = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": match usage {
                Some(_) => (0..self.ids.len()).map(|i| self.item(i, true)).collect(),
                None => Value::Array(Vec::new()),
            },
            "error": error,
            "incomplete_details": match status {
                "incomplete" => json!({"reason": "max_output_tokens"}),
                _ => Value::Null,
            },
            "usage": usage.map(|u| json!({
                "input_tokens": u.prompt,
                "input_tokens_details": {"cached_tokens": u.cached},
                "output_tokens": u.completion,
                "output_tokens_details": {"reasoning_tokens": u.reasoning},
                "total_tokens": u.prompt + u.completion,
            })),
        });
        for (key, value) in self.settings.as_object().into_iter().flatten() {
            frame[key] = value.clone();
        }
        frame
    }

    /// A block as an item: `whole`, or as it begins.
    fn item(&self, index: usize, whole: bool) -> Value {
        let id = &self.ids[index];
        let status = if whole { "completed" } else { "in_progress" };
        let part = |part: Value| if whole { json!([part]) } else { json!([]) };
        match &self.blocks.list()[index] {
            Block::Reasoning(text) => json!({
                "type": "reasoning", "id": id, "summary": [],
                "content": part(json!({"type": "reasoning_text", "text": text})),
            }),
            Block::Text(text) => json!({
                "type": "message", "id": id, "status": status, "role": "assistant",
                "content": part(text_part(text)),
            }),
            Block::Call {
                id: call,
                name,
                arguments,
            } => json!({
                "type": "function_call", "id": id, "call_id": call, "name": name,
                "arguments": if whole { arguments } else { "" }, "status": status,
            }),
        }
    }

    fn event(&mut self, name: &'static str, mut data: Value) -> SseEvent {
        data["sequence_number"] = self.events.into();
        self.events += 1;
        SseEvent::typed(name, data)
    }

    /// Adds pieces, and assigns ids to items that begin.
    fn push(&mut self, output: &mut Output) -> Vec<Change> {
        self.length |= matches!(output.end, Some(Ok(Ending::Length)));
        let changes = self
            .blocks
            .push(std::mem::take(&mut output.pieces), "call_");
        for block in &self.blocks.list()[self.ids.len()..] {
            self.ids.push(unique(match block {
                Block::Reasoning(_) => "rs_",
                Block::Text(_) => "msg_",
                Block::Call { .. } => "fc_",
            }));
        }
        changes
    }

    /// The events for a change.
    fn tell(&mut self, change: Change) -> Vec<SseEvent> {
        let (index, grown) = match &change {
            Change::Open(i) | Change::Close(i) => (*i, String::new()),
            Change::Grow(i, text) => (*i, text.clone()),
        };
        let place = json!({"item_id": self.ids[index], "output_index": index});
        let in_part = |more: Value| {
            let mut data = place.clone();
            data["content_index"] = 0.into();
            for (key, value) in more.as_object().into_iter().flatten() {
                data[key] = value.clone();
            }
            data
        };
        let block = self.blocks.list()[index].clone();
        let mut events: Vec<(&'static str, Value)> = Vec::new();
        match (&change, &block) {
            (Change::Open(_), block) => {
                let item = json!({"output_index": index, "item": self.item(index, false)});
                events.push(("response.output_item.added", item));
                if let Block::Text(_) = block {
                    let part = in_part(json!({"part": text_part("")}));
                    events.push(("response.content_part.added", part));
                }
            }
            (Change::Grow(..), Block::Text(_)) => {
                let delta = in_part(json!({"delta": grown, "logprobs": []}));
                events.push(("response.output_text.delta", delta));
            }
            (Change::Grow(..), Block::Reasoning(_)) => {
                events.push((
                    "response.reasoning_text.delta",
                    in_part(json!({"delta": grown})),
                ));
            }
            (Change::Grow(..), Block::Call { .. }) => {
                let mut data = place.clone();
                data["delta"] = grown.into();
                events.push(("response.function_call_arguments.delta", data));
            }
            (Change::Close(_), block) => {
                match block {
                    Block::Text(text) => {
                        let done = in_part(json!({"text": text, "logprobs": []}));
                        events.push(("response.output_text.done", done));
                        let part = in_part(json!({"part": text_part(text)}));
                        events.push(("response.content_part.done", part));
                    }
                    Block::Reasoning(text) => {
                        let done = in_part(json!({"text": text}));
                        events.push(("response.reasoning_text.done", done));
                    }
                    Block::Call {
                        name, arguments, ..
                    } => {
                        let mut data = place.clone();
                        data["arguments"] = arguments.clone().into();
                        data["name"] = name.clone().into();
                        events.push(("response.function_call_arguments.done", data));
                    }
                }
                let item = json!({"output_index": index, "item": self.item(index, true)});
                events.push(("response.output_item.done", item));
            }
        }
        events
            .into_iter()
            .map(|(name, data)| self.event(name, data))
            .collect()
    }

    fn status(&self) -> &'static str {
        if self.length {
            "incomplete"
        } else {
            "completed"
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

impl Shape for Response {
    fn begin(&mut self, _: Usage) -> Vec<SseEvent> {
        let frame = json!({"response": self.frame("in_progress", None, Value::Null)});
        vec![
            self.event("response.created", frame.clone()),
            self.event("response.in_progress", frame),
        ]
    }

    fn stream(&mut self, mut output: Output, _: Usage) -> Vec<SseEvent> {
        let changes = self.push(&mut output);
        changes.into_iter().flat_map(|c| self.tell(c)).collect()
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        let last = self.blocks.close();
        let mut events: Vec<SseEvent> = last.into_iter().flat_map(|c| self.tell(c)).collect();
        let name = if self.length {
            "response.incomplete"
        } else {
            "response.completed"
        };
        let frame = self.frame(self.status(), Some(usage), Value::Null);
        events.push(self.event(name, json!({"response": frame})));
        events
    }

    fn fail(&mut self, error: &ApiError) -> Vec<SseEvent> {
        let code = error.code.unwrap_or("server_error");
        let error = json!({"code": code, "message": error.message});
        let frame = self.frame("failed", None, error);
        vec![self.event("response.failed", json!({"response": frame}))]
    }

    fn collect(&mut self, mut output: Output) {
        self.push(&mut output);
    }

    fn whole(&mut self, usage: Usage) -> Value {
        self.frame(self.status(), Some(usage), Value::Null)
    }
}
