//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol.

use super::blocks::{AnswerBlock, Blocks, Change};
use super::chat::{ChatRequest, render};
use super::client_tools;
use super::fields::{Fields, ObjectKind};
use super::images;
use super::reading::Reading;
use super::sent::{ContentPart, ContentPlace, joined};
use super::text::{content as read, text, words};
use super::thinking;
use super::tool_choice::tool_choice;
use super::tools::{self, Tools, made};
use super::{Parsed, Shape, SseEvent, rfc3339, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::model::{ServedModel, message};
use crate::names::Names;
use nq_answers::ToolChoice;
use nq_answers::grammar::Format;
use nq_answers::output::ReaderOptions;
use nq_runtime::Message;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const NAMES: Names = Names {
    prompt: "messages",
    format: "output_config.format.schema",
};

/// Most turns in one request, and blocks in one turn.
const MOST: usize = 16_384;

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub(crate) fn parse(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
    let mut fields = fields.under("messages")?;
    // 0: the prompt is computed alone, so that it is cached for a later request.
    let max_tokens = fields.count("max_tokens", 0, usize::MAX)?;
    let max_tokens =
        max_tokens.ok_or_else(|| ApiError::field("max_tokens", "expected a value, found none"))?;
    let stop = sampling::stop(&mut fields, "stop_sequences")?;
    let stream = fields.take("stream")?.unwrap_or(false);
    let partial = Generation {
        sampling: sampling::params(&mut fields, model.sampling())?,
        max_tokens: Some(max_tokens),
        reader: ReaderOptions {
            stop,
            ..ReaderOptions::default()
        },
        ..Generation::of(model)
    };
    let generation = prompt(model, fields, partial)?;
    Ok(Parsed {
        generation,
        shape: Box::new(MessagesFormat {
            model: model.name().to_owned(),
            id: unique("msg_"),
            blocks: Blocks::default(),
            begun: false,
            stop: Value::Null,
            stop_string: Value::Null,
        }),
        stream,
    })
}

/// Counts the tokens of a prompt.
pub(crate) fn count(model: &Arc<ServedModel>, fields: Fields) -> Result<Value, ApiError> {
    let generation = prompt(model, fields.under("count_tokens")?, Generation::of(model))?;
    let tokens: usize = generation.prompts.iter().map(Vec::len).sum();
    Ok(json!({"input_tokens": tokens}))
}

/// Reads the parts of the prompt.
fn prompt(
    model: &Arc<ServedModel>,
    mut fields: Fields,
    partial: Generation,
) -> Result<Generation, ApiError> {
    let reading = Arc::clone(fields.reading());
    let mut messages = Vec::new();
    if let Some(system) = fields.take::<Value>("system")? {
        let text = text(system, "system", &reading)?;
        messages.push(Message::new("system", text));
    }
    let turns = fields.objects("messages", "messages.turn", MOST)?;
    if turns.is_empty() {
        return Err(ApiError::field("messages", "expected at least one"));
    }
    for turn in turns {
        read_turn(turn, &mut messages)?;
    }
    let given = fields.objects("tools", "messages.tool", tools::MOST_TOOLS)?;
    let mut tools = tools::read(given, "custom", |tools, kind, mut tool| {
        if client_tools::add(tools, kind, &mut tool)? {
            return Ok(());
        }
        if tool.peek("input_schema").is_null() {
            let name = tool.name("input_schema");
            return Err(ApiError::field(&name, "expected a value, found none"));
        }
        tools.add(tool, "input_schema")
    })?;
    let (choice, several_calls) = choice(&mut fields, &mut tools)?;
    let thinking = thinking::read(&mut fields)?;
    let (mut effort, mut format) = (None, None);
    if let Some(mut config) = fields.object("output_config", "output_config")? {
        effort = thinking::effort(&mut config, "effort")?;
        format = config.object("format", "output_format")?;
        config.finish()?;
    }
    let older = fields.object("output_format", "output_format")?;
    let name = match (&format, &older) {
        (None, Some(_)) => "output_format.schema",
        _ => NAMES.format,
    };
    let format = format.or(older).map(schema).transpose()?;
    fields.finish()?;
    // The answer continues a turn of the assistant at the end, unless it ends with calls.
    let continues = messages
        .last()
        .is_some_and(|m: &Message| m.role == "assistant" && !m.extra.contains_key("tool_calls"));
    let chat = ChatRequest {
        messages,
        tools,
        choice,
        several_calls,
        thinking: thinking::of_messages(thinking, effort),
        format,
        continues,
        reading,
    };
    let names = Names {
        format: name,
        ..NAMES
    };
    render(model, chat, Generation { names, ..partial })
}

/// Reads a format: a JSON schema.
fn schema(mut fields: Fields) -> Result<Format, ApiError> {
    let kind: String = fields.require("type")?;
    if kind != "json_schema" {
        let why = format!("nq serves json_schema alone, found {kind}");
        return Err(ApiError::unsupported(&fields.name("type"), &why));
    }
    let schema = fields.require("schema")?;
    fields.finish()?;
    Ok(Format::Schema(schema))
}

fn choice(fields: &mut Fields, tools: &mut Tools) -> Result<(ToolChoice, bool), ApiError> {
    let Some(mut fields) = fields.object("tool_choice", "messages.choice")? else {
        return Ok((ToolChoice::Auto, true));
    };
    let kind: String = fields.require("type")?;
    let one = fields.take("disable_parallel_tool_use")?.unwrap_or(false);
    let name: Option<String> = fields.take("name")?;
    let word = match kind.as_str() {
        "tool" => {
            let name = name.ok_or_else(|| {
                ApiError::field("tool_choice.name", "expected a value, found none")
            })?;
            json!({"name": name})
        }
        other => json!(other),
    };
    fields.finish()?;
    Ok((tool_choice(Some(word), tools, "tool_choice")?, !one))
}

/// Reads a turn: tool results in it become separate messages.
fn read_turn(mut fields: Fields, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let role: String = fields.require("role")?;
    if !matches!(role.as_str(), "user" | "assistant" | "system") {
        let what = format!("expected user, assistant or system, found {role}");
        return Err(ApiError::field(&fields.name("role"), what));
    }
    let (reading, place) = (Arc::clone(fields.reading()), fields.name("content"));
    let content: Value = fields.require("content")?;
    fields.finish()?;
    let blocks = match content {
        Value::String(text) => {
            out.push(Message::new(role, text));
            return Ok(());
        }
        Value::Array(blocks) if blocks.len() <= MOST => blocks,
        _ => {
            let what = format!("expected a text or a list of at most {MOST} blocks");
            return Err(ApiError::field(&place, what));
        }
    };
    let at = match role.as_str() {
        "user" => ContentPlace::Message,
        _ => ContentPlace::Text,
    };
    let (mut parts, mut thinking, mut calls) = (Vec::new(), String::new(), Vec::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let place = format!("{place}[{i}]");
        if images::is_image(&block) {
            parts.push(images::part(block, &place, at, &reading)?);
            continue;
        }
        let mut block = Fields::of(block, &place, "block", &reading)?;
        let kind = match block.kind("text")? {
            ObjectKind::Served(kind) => kind,
            ObjectKind::Dropped => continue,
            ObjectKind::LeftOut(what, words) => {
                reading.left_out_and_told(&place, &what, words);
                continue;
            }
        };
        match (kind.as_str(), role.as_str()) {
            ("thinking", "assistant") => {
                thinking += &block.take::<String>("thinking")?.unwrap_or_default();
            }
            ("tool_use", "assistant") => {
                let id: Value = block.take("id")?.unwrap_or_default();
                let (name, input) = (block.take("name")?, block.take("input")?);
                calls.push(made(id, name, input, &block.name("input"), &reading)?);
            }
            ("tool_result", "user") => {
                let (id, content): (Value, Option<Value>) = (
                    block.take("tool_use_id")?.unwrap_or_default(),
                    block.take("content")?,
                );
                let content = result(
                    content.unwrap_or_default(),
                    &block.name("content"),
                    &reading,
                )?;
                let mut extra = Map::new();
                extra.insert("tool_call_id".into(), id);
                out.push(message("tool", content, extra));
            }
            ("text" | "document" | "search_result", _) => {
                parts.extend(shown(&kind, block, ContentPlace::Message)?.map(ContentPart::Text));
            }
            (kind, _) => {
                let why = format!("nq serves no blocks of type {kind:?} here");
                return Err(ApiError::unsupported(&format!("{place}.type"), &why));
            }
        }
    }
    let mut extra = Map::new();
    if !thinking.is_empty() {
        extra.insert("reasoning_content".into(), thinking.into());
    }
    if !calls.is_empty() {
        extra.insert("tool_calls".into(), calls.into());
    }
    if !parts.is_empty() || !extra.is_empty() {
        out.push(message(&role, joined(parts), extra));
    }
    Ok(())
}

/// The content of a tool's result.
fn result(content: Value, place: &str, reading: &Arc<Reading>) -> Result<Value, ApiError> {
    let Value::Array(blocks) = content else {
        return read(content, place, ContentPlace::Result, reading);
    };
    let mut parts = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.into_iter().enumerate() {
        let place = format!("{place}[{i}]");
        if images::is_image(&block) {
            parts.push(images::part(block, &place, ContentPlace::Result, reading)?);
            continue;
        }
        let mut block = Fields::of(block, &place, "block.result", reading)?;
        parts.extend(match block.kind("text")? {
            ObjectKind::Served(kind) => {
                shown(&kind, block, ContentPlace::Result)?.map(ContentPart::Text)
            }
            ObjectKind::Dropped => None,
            ObjectKind::LeftOut(what, words_) => {
                reading.left_out(block.place(), &what);
                Some(ContentPart::Text(words(words_)))
            }
        });
    }
    Ok(joined(parts))
}

/// A block that is text, or has some.
fn shown(kind: &str, mut block: Fields, at: ContentPlace) -> Result<Option<String>, ApiError> {
    let reading = Arc::clone(block.reading());
    if kind == "text" {
        return block.require("text").map(Some);
    }
    let title: Option<String> = block.take("title")?;
    let (source, content): (Option<Value>, Option<Value>) =
        (block.take("source")?, block.take("content")?);
    let source = source.unwrap_or_default();
    let inner = |value: Value, name: &str| text(value, &block.name(name), &reading);
    let body = match (kind, source["type"].as_str()) {
        ("search_result", _) => inner(content.unwrap_or_default(), "content")?,
        (_, Some("text")) => inner(source["data"].clone(), "source.data")?,
        (_, Some("content")) => inner(source["content"].clone(), "source.content")?,
        _ if at == ContentPlace::Result => {
            reading.left_out(block.place(), "document");
            return Ok(Some(words("document")));
        }
        (_, found) => {
            let found = found.unwrap_or("no type");
            let why = format!("nq serves documents of text alone, found {found}");
            return Err(ApiError::unsupported(&block.name("source.type"), &why));
        }
    };
    let parts = [title, source.as_str().map(str::to_owned), Some(body)];
    Ok(Some(
        parts.into_iter().flatten().collect::<Vec<_>>().join("\n"),
    ))
}

/// An error in Anthropic's format.
pub(crate) fn error(error: &ApiError) -> Value {
    let kind = match error.status {
        400 | 405 | 415 | 431 => "invalid_request_error",
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    };
    // The words on which clients shorten a conversation.
    let message = match error.overflow {
        Some((found, most)) => format!("prompt is too long: {found} tokens > {most} maximum"),
        None => error.message.clone(),
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// A model's card in Anthropic's form, from that of OpenAI's list.
pub(crate) fn card(card: &Value) -> Value {
    let created = card["created"].as_i64().unwrap_or_default();
    json!({
        "type": "model", "id": card["id"], "display_name": card["id"], "created_at": rfc3339(created),
        "max_input_tokens": card["max_model_len"], "max_tokens": card["max_model_len"],
    })
}

fn usage_of(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    })
}

/// The formats of this protocol.
struct MessagesFormat {
    model: String,
    id: String,
    blocks: Blocks,
    begun: bool,
    stop: Value,
    stop_string: Value,
}

impl MessagesFormat {
    fn frame(&self, content: Value, usage: Usage) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": self.stop,
            "stop_sequence": self.stop_string,
            "usage": usage_of(usage),
        })
    }

    fn end_of(&mut self, output: &Output) {
        if let Some(Ok(ending)) = output.end {
            self.stop = match ending {
                Ending::Stop => "end_turn",
                Ending::StopString => "stop_sequence",
                Ending::Length => "max_tokens",
                Ending::ToolCalls => "tool_use",
            }
            .into();
        }
        if let Some(stop) = &output.stop_string {
            self.stop_string = stop.clone().into();
        }
    }

    /// The events before the first block; the number of cached tokens is known by then.
    fn start(&mut self, usage: Usage) -> Option<SseEvent> {
        let first = !std::mem::replace(&mut self.begun, true);
        first.then(|| {
            let frame = self.frame(json!([]), usage);
            SseEvent::typed("message_start", json!({"message": frame}))
        })
    }

    fn event(&self, change: Change) -> SseEvent {
        match change {
            Change::Open(index) => {
                let block = match &self.blocks.list()[index] {
                    AnswerBlock::Reasoning(_) => {
                        json!({"type": "thinking", "thinking": "", "signature": ""})
                    }
                    AnswerBlock::Text(_) => json!({"type": "text", "text": ""}),
                    AnswerBlock::Call { id, name, .. } => {
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    }
                };
                let data = json!({"index": index, "content_block": block});
                SseEvent::typed("content_block_start", data)
            }
            Change::Grow(index, text) => {
                let delta = match &self.blocks.list()[index] {
                    AnswerBlock::Reasoning(_) => {
                        json!({"type": "thinking_delta", "thinking": text})
                    }
                    AnswerBlock::Text(_) => json!({"type": "text_delta", "text": text}),
                    AnswerBlock::Call { .. } => {
                        json!({"type": "input_json_delta", "partial_json": text})
                    }
                };
                let data = json!({"index": index, "delta": delta});
                SseEvent::typed("content_block_delta", data)
            }
            Change::Close(index) => SseEvent::typed("content_block_stop", json!({"index": index})),
        }
    }
}

impl Shape for MessagesFormat {
    fn begin(&mut self, _: Usage) -> Vec<SseEvent> {
        Vec::new()
    }

    fn stream(&mut self, output: Output, usage: Usage) -> Vec<SseEvent> {
        self.end_of(&output);
        let mut events: Vec<SseEvent> = self.start(usage).into_iter().collect();
        let changes = self.blocks.push(output.pieces, "toolu_");
        events.extend(changes.into_iter().map(|c| self.event(c)));
        events
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        let mut events: Vec<SseEvent> = self.start(usage).into_iter().collect();
        let last = self.blocks.close();
        events.extend(last.map(|c| self.event(c)));
        events.push(SseEvent::typed(
            "message_delta",
            json!({
                "delta": {"stop_reason": self.stop, "stop_sequence": self.stop_string},
                "usage": usage_of(usage),
            }),
        ));
        events.push(SseEvent::typed("message_stop", json!({})));
        events
    }

    fn fail(&mut self, e: &ApiError) -> Vec<SseEvent> {
        vec![SseEvent::typed("error", error(e))]
    }

    fn collect(&mut self, output: Output) {
        self.end_of(&output);
        self.blocks.push(output.pieces, "toolu_");
    }

    fn whole(&mut self, usage: Usage) -> Value {
        let block = |block: &AnswerBlock| match block {
            AnswerBlock::Reasoning(text) => {
                json!({"type": "thinking", "thinking": text, "signature": ""})
            }
            AnswerBlock::Text(text) => json!({"type": "text", "text": text}),
            AnswerBlock::Call {
                id,
                name,
                arguments,
            } => {
                // A call that was cut off has no input; the protocol wants an object.
                let input = tools::object(arguments).unwrap_or_default();
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        };
        let content = self.blocks.list().iter().map(block).collect();
        self.frame(content, usage)
    }
}
