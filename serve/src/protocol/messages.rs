//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol.

use super::blocks::{Block, Blocks, Change};
use super::chat::{ChatRequest, render};
use super::fields::Fields;
use super::tools::{self, Choice, made};
use super::{Parsed, Shape, SseEvent, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::model::{Model, message};
use crate::output::ReaderOptions;
use nq_runtime::{LogitBias, Message};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub fn parse(model: &Arc<Model>, mut fields: Fields) -> Result<Parsed, ApiError> {
    let max_tokens = fields.count("max_tokens", 1, usize::MAX)?;
    let max_tokens =
        max_tokens.ok_or_else(|| ApiError::field("max_tokens", "expected a value, found none"))?;
    fields.ignore(&["metadata", "service_tier"]);
    let stop = sampling::stop(&mut fields, "stop_sequences")?;
    let stream = fields.take("stream")?.unwrap_or(false);
    let sampling = sampling::params(&mut fields, model.sampling())?;
    let generation = prompt(
        model,
        fields,
        Generation {
            prompt: Vec::new(),
            n: 1,
            sampling,
            bias: LogitBias::default(),
            logprobs: None,
            max_tokens: Some(max_tokens),
            ignore_eos: false,
            reader: ReaderOptions {
                stop,
                ..ReaderOptions::default()
            },
            format: None,
        },
    )?;
    Ok(Parsed {
        generation,
        shape: Box::new(Answer {
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
///
/// # Errors
/// Errors of [`parse`].
pub fn count(model: &Arc<Model>, fields: Fields) -> Result<Value, ApiError> {
    let nothing = Generation {
        prompt: Vec::new(),
        n: 1,
        sampling: model.sampling(),
        bias: LogitBias::default(),
        logprobs: None,
        max_tokens: None,
        ignore_eos: false,
        reader: ReaderOptions::default(),
        format: None,
    };
    let generation = prompt(model, fields, nothing)?;
    Ok(json!({"input_tokens": generation.prompt.len()}))
}

/// Reads the parts of the prompt.
fn prompt(
    model: &Arc<Model>,
    mut fields: Fields,
    partial: Generation,
) -> Result<Generation, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = fields.take::<Value>("system")? {
        let text = super::chat::text(system, "system")?;
        messages.push(Message::new("system", text));
    }
    let turns: Vec<Value> = fields.require("messages")?;
    if turns.is_empty() {
        return Err(ApiError::field("messages", "expected at least one"));
    }
    for (i, turn) in turns.into_iter().enumerate() {
        read_turn(turn, &format!("messages[{i}]"), &mut messages)?;
    }
    let mut tools = Vec::new();
    let given: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    for (i, tool) in given.into_iter().enumerate() {
        let mut tool = Fields::of(tool, &format!("tools[{i}]"))?;
        tool.only("type", &[json!("custom")])?;
        tool.ignore(&["cache_control", "strict"]);
        let (name, text) = (tool.require("name")?, tool.take("description")?);
        let schema = tool.require("input_schema")?;
        tool.finish()?;
        tools.push(tools::function(name, text.unwrap_or_default(), schema));
    }
    let tools = tools::read(Some(tools))?;
    let (choice, several_calls) = choice(fields.take("tool_choice")?, &tools)?;
    let thinking = match fields.take::<Value>("thinking")? {
        None => None,
        Some(value) => {
            let mut inner = Fields::of(value, "thinking")?;
            let kind: String = inner.require("type")?;
            inner.ignore(&["budget_tokens", "display"]);
            inner.finish()?;
            match kind.as_str() {
                "enabled" | "adaptive" => Some(true),
                "disabled" => Some(false),
                _ => {
                    let what = "expected enabled, adaptive or disabled";
                    return Err(ApiError::field("thinking.type", what));
                }
            }
        }
    };
    fields.finish()?;
    let chat = ChatRequest {
        messages,
        tools,
        choice,
        several_calls,
        thinking,
        format: None,
    };
    render(model, chat, partial)
}

fn choice(value: Option<Value>, tools: &[Value]) -> Result<(Choice, bool), ApiError> {
    let Some(value) = value else {
        return Ok((Choice::Auto, true));
    };
    let mut fields = Fields::of(value, "tool_choice")?;
    let kind: String = fields.require("type")?;
    let one = fields.take("disable_parallel_tool_use")?.unwrap_or(false);
    let word = match kind.as_str() {
        "any" => json!("required"),
        "tool" => json!({"name": fields.require::<String>("name")?}),
        other => json!(other),
    };
    fields.finish()?;
    Ok((tools::choice(Some(word), tools)?, !one))
}

/// Reads a turn: tool results in it become separate messages.
fn read_turn(turn: Value, place: &str, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut fields = Fields::of(turn, place)?;
    let role: String = fields.require("role")?;
    if role != "user" && role != "assistant" {
        let what = format!("expected user or assistant, found {role}");
        return Err(ApiError::field(&fields.name("role"), what));
    }
    let content: Value = fields.require("content")?;
    let place = fields.name("content");
    fields.finish()?;
    let blocks = match content {
        Value::String(text) => {
            out.push(Message::new(role, text));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => {
            return Err(ApiError::field(
                &place,
                "expected a text or a list of blocks",
            ));
        }
    };
    let (mut texts, mut thinking, mut calls) = (Vec::new(), String::new(), Vec::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let place = format!("{place}[{i}]");
        let text = |key: &str| block[key].as_str().map(str::to_owned);
        match (block["type"].as_str().unwrap_or_default(), role.as_str()) {
            ("text", _) => {
                let text = text("text");
                texts.push(text.ok_or_else(|| ApiError::field(&place, "expected a text"))?);
            }
            ("thinking", "assistant") => thinking += &text("thinking").unwrap_or_default(),
            ("tool_use", "assistant") => calls.push(json!({
                "id": block["id"],
                "function": {"name": block["name"], "arguments": block["input"]},
            })),
            ("tool_result", "user") => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => super::chat::text(content.clone(), &place)?,
                };
                let mut extra = Map::new();
                extra.insert("tool_call_id".into(), block["tool_use_id"].clone());
                out.push(message("tool", content, extra));
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
        extra.insert("tool_calls".into(), made(calls, &place)?);
    }
    if !texts.is_empty() || !extra.is_empty() {
        out.push(message(&role, texts.join("\n"), extra));
    }
    Ok(())
}

/// An error in Anthropic's format.
pub fn error(error: &ApiError) -> Value {
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
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
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
struct Answer {
    model: String,
    id: String,
    blocks: Blocks,
    begun: bool,
    stop: Value,
    stop_string: Value,
}

impl Answer {
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
                    Block::Reasoning(_) => {
                        json!({"type": "thinking", "thinking": "", "signature": ""})
                    }
                    Block::Text(_) => json!({"type": "text", "text": ""}),
                    Block::Call { id, name, .. } => {
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    }
                };
                let data = json!({"index": index, "content_block": block});
                SseEvent::typed("content_block_start", data)
            }
            Change::Grow(index, text) => {
                let delta = match &self.blocks.list()[index] {
                    Block::Reasoning(_) => json!({"type": "thinking_delta", "thinking": text}),
                    Block::Text(_) => json!({"type": "text_delta", "text": text}),
                    Block::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
                };
                let data = json!({"index": index, "delta": delta});
                SseEvent::typed("content_block_delta", data)
            }
            Change::Close(index) => SseEvent::typed("content_block_stop", json!({"index": index})),
        }
    }
}

impl Shape for Answer {
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
        let block = |block: &Block| match block {
            Block::Reasoning(text) => {
                json!({"type": "thinking", "thinking": text, "signature": ""})
            }
            Block::Text(text) => json!({"type": "text", "text": text}),
            Block::Call {
                id,
                name,
                arguments,
            } => {
                let input: Value = serde_json::from_str(arguments).unwrap_or_default();
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        };
        let content = self.blocks.list().iter().map(block).collect();
        self.frame(content, usage)
    }
}
