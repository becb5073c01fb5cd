//! `POST /v1/responses`: OpenAI's newer protocol. Responses are kept for a while ([`super::kept`]).

use super::blocks::{AnswerBlock, Blocks, Change};
use super::called::{Called, input};
use super::chat::{ChatRequest, render};
use super::fields::{Fields, Kind};
use super::kept::Item;
use super::reading::{Reading, plain};
use super::text::{Place, text};
use super::thinking;
use super::tools::{self, made};
use super::{Parsed, Shape, SseEvent, now, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::grammar::Format;
use crate::model::{ServedModel, message};
use crate::names::Names;
use nq_runtime::Message;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const NAMES: Names = Names {
    prompt: "input",
    format: "text.format.schema",
};

/// Most items in one request, with those of responses before it.
const MOST: usize = 16_384;

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub fn parse(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
    let mut fields = fields.under("responses")?;
    let reading = Arc::clone(fields.reading());
    // The answer repeats these as they came.
    let repeated: Vec<(&str, Value)> = REPEATED
        .iter()
        .map(|name| (*name, fields.peek(name).clone()))
        .collect();
    let store: bool = fields.take("store")?.unwrap_or(true);
    let previous: Option<String> = fields.take("previous_response_id")?;
    let (_, _): (Option<Value>, Option<Value>) = (fields.take("metadata")?, fields.take("user")?);
    let _: Option<Value> = fields.take("service_tier")?;
    let truncation: Option<String> = fields.take("truncation")?;
    if let Some(other) = truncation.filter(|t| !matches!(t.as_str(), "auto" | "disabled")) {
        let what = format!("expected auto or disabled, found {other}");
        return Err(ApiError::field("truncation", what));
    }
    let instructions: Option<String> = fields.take("instructions")?;
    let input = conversation(previous.as_deref(), fields.require("input")?, &reading)?;
    let mut messages: Vec<Message> = Vec::new();
    messages.extend(instructions.map(|text| Message::new("system", text)));
    read_input(&input, &reading, &mut messages)?;
    let given = fields.objects("tools", "responses.tool", tools::MOST_TOOLS)?;
    let mut called = Called::default();
    let mut tools = tools::read(given, "function", |tools, kind, tool| {
        called.read(tools, kind, tool)
    })?;
    let choice = tools::choice(fields.take("tool_choice")?, &mut tools, "tool_choice")?;
    let max_tokens = fields.most_tokens("max_output_tokens")?;
    let stream = fields.take("stream")?.unwrap_or(false);
    let chat = ChatRequest {
        messages,
        choice,
        several_calls: fields.take("parallel_tool_calls")?.unwrap_or(true),
        thinking: thinking::read(&mut fields)?,
        format: format(&mut fields)?,
        tools,
        continues: false,
        reading: Arc::clone(&reading),
    };
    let sampling = sampling::params(&mut fields, model.sampling())?;
    fields.finish()?;
    let mut settings = json!({
        "max_output_tokens": max_tokens,
        "parallel_tool_calls": chat.several_calls,
        "temperature": number(sampling.temperature),
        "top_p": number(sampling.top_p),
        "previous_response_id": previous,
        "store": store,
        "background": false,
        "service_tier": "default",
        "top_logprobs": 0,
    });
    for (name, value) in repeated {
        settings[name] = match (name, value) {
            ("tools", Value::Array(tools)) => tools.into_iter().map(tool).collect(),
            ("tools", _) => json!([]),
            ("tool_choice", Value::Null) => json!("auto"),
            ("metadata", Value::Null) => json!({}),
            ("truncation", Value::Null) => json!("disabled"),
            ("text", Value::Object(map)) if map.contains_key("format") => map.into(),
            ("text", Value::Object(mut map)) => {
                map.insert("format".into(), json!({"type": "text"}));
                map.into()
            }
            ("text", _) => json!({"format": {"type": "text"}}),
            ("reasoning", Value::Null) => json!({"effort": null, "summary": null}),
            (_, value) => value,
        };
    }
    let partial = Generation {
        sampling,
        max_tokens,
        names: NAMES,
        ..Generation::of(model)
    };
    Ok(Parsed {
        generation: render(model, chat, partial)?,
        shape: Box::new(Response {
            model: model.name().to_owned(),
            id: unique("resp_"),
            created: now(),
            settings,
            called,
            blocks: Blocks::default(),
            ids: Vec::new(),
            length: false,
            events: 0,
            kept: store.then_some((reading, input)),
        }),
        stream,
    })
}

/// An error as the only event of a stream.
pub(crate) fn error_event(error: &ApiError) -> SseEvent {
    let data = json!({
        "code": error.code, "message": error.message, "param": error.param, "sequence_number": 0,
    });
    SseEvent::typed("error", data)
}

/// Fields that the answer repeats as they came.
const REPEATED: [&str; 8] = [
    "instructions",
    "metadata",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "truncation",
    "user",
];

/// A number of a few digits: those of an f32, not those of its neighbour among the f64.
pub fn number(x: f32) -> Value {
    x.to_string()
        .parse::<f64>()
        .map_or(Value::Null, Value::from)
}

/// A tool as the answer repeats it: with the fields that the protocol always has.
fn tool(mut tool: Value) -> Value {
    if let Some(map) = tool.as_object_mut().filter(|t| t["type"] == "function") {
        map.entry("parameters").or_insert(Value::Null);
        map.entry("strict").or_insert(Value::Null);
    }
    tool
}

/// Reads `text`.
fn format(fields: &mut Fields) -> Result<Option<Format>, ApiError> {
    let Some(mut fields) = fields.object("text", "responses.text")? else {
        return Ok(None);
    };
    let format = fields.object("format", "responses.format")?;
    fields.finish()?;
    let Some(mut fields) = format else {
        return Ok(None);
    };
    let kind: String = fields.require("type")?;
    let schema: Option<Value> = fields.take("schema")?;
    let format = match (kind.as_str(), schema) {
        ("text", _) => None,
        ("json_object", None) => Some(Format::Object),
        ("json_object" | "json_schema", Some(schema)) => Some(Format::Schema(schema)),
        ("json_schema", None) => {
            let name = fields.name("schema");
            return Err(ApiError::field(&name, "expected a value, found none"));
        }
        (other, _) => {
            let why = format!("nq serves text, json_object and json_schema, found {other}");
            return Err(ApiError::unsupported("text.format.type", &why));
        }
    };
    fields.finish()?;
    Ok(format)
}

/// All items of a conversation: those up to the response that the request continues, and its own, with those
/// that it names by their ids.
///
/// # Errors
/// A response or an item that is not kept, in the words of OpenAI's API.
fn conversation(
    previous: Option<&str>,
    input: Value,
    reading: &Reading,
) -> Result<Vec<Item>, ApiError> {
    let owner = reading.client.id;
    let gone = |param: &str, code, what: String| ApiError {
        param: Some(param.to_owned()),
        ..ApiError::not_found(what, code)
    };
    let mut items = match previous {
        None => Vec::new(),
        Some(id) => reading
            .kept
            .conversation(owner, id)
            .ok_or_else(|| ApiError {
                status: 400,
                ..gone(
                    "previous_response_id",
                    "previous_response_not_found",
                    format!("Previous response with id '{}' not found.", plain(id)),
                )
            })?,
    };
    let given = match input {
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(given) if !given.is_empty() || previous.is_some() => given,
        _ => {
            return Err(ApiError::field(
                "input",
                "expected a text or a list of items",
            ));
        }
    };
    if items.len() + given.len() > MOST {
        let what = format!(
            "expected at most {MOST} items, found {}",
            items.len() + given.len()
        );
        return Err(ApiError::field("input", what));
    }
    let mut known = None;
    for (i, item) in given.into_iter().enumerate() {
        let refers = match item["type"].as_str() {
            Some(kind) => kind == "item_reference",
            None => item["role"].is_null() && item["id"].is_string(),
        };
        if !refers {
            items.push(Item::new(&item));
            continue;
        }
        let known = known.get_or_insert_with(|| reading.kept.items(owner));
        let id = item["id"].as_str().unwrap_or_default();
        let item = known.get(id).ok_or_else(|| {
            let what = format!(
                "Item with id '{}' not found. Items of responses with `store: false` are not kept, and older \
                 ones make room for newer ones: send the item itself.",
                plain(id)
            );
            gone(&format!("input[{i}].id"), "item_not_found", what)
        })?;
        items.push(item.clone());
    }
    Ok(items)
}

/// Reads the items of a conversation: messages, calls and their results.
fn read_input(
    items: &[Item],
    reading: &Arc<Reading>,
    out: &mut Vec<Message>,
) -> Result<(), ApiError> {
    let mut thinking: Option<String> = None;
    for (i, item) in items.iter().enumerate() {
        let place = format!("input[{i}]");
        let mut item = Fields::of(item.value(), &place, "item", reading)?;
        let kind = match item.kind("message")? {
            Kind::Served(kind) => kind,
            Kind::Dropped => continue,
            Kind::LeftOut(what, words) => {
                reading.left_out_and_told(&place, &what, words);
                continue;
            }
        };
        let content: Value = item.take("content")?.unwrap_or_default();
        match kind.as_str() {
            "message" => {
                let role: Option<String> = item.take("role")?;
                let role = match role.as_deref() {
                    Some("developer" | "system") => "system",
                    Some(role @ ("user" | "assistant")) => role,
                    _ => {
                        let what = "expected user, assistant, system or developer";
                        return Err(ApiError::field(&format!("{place}.role"), what));
                    }
                };
                let content = text(
                    content,
                    &format!("{place}.content"),
                    Place::Message,
                    reading,
                )?;
                let mut extra = Map::new();
                if let Some(thinking) = thinking.take().filter(|_| role == "assistant") {
                    extra.insert("reasoning_content".into(), thinking.into());
                }
                out.push(message(role, content, extra));
            }
            "function_call" | "custom_tool_call" | "local_shell_call" => {
                let call = call(&kind, &mut item, reading)?;
                // Calls of a turn go into its message.
                if !matches!(out.last(), Some(m) if m.role == "assistant") {
                    let mut extra = Map::new();
                    if let Some(thinking) = thinking.take() {
                        extra.insert("reasoning_content".into(), thinking.into());
                    }
                    out.push(message("assistant", String::new(), extra));
                }
                if let Some(last) = out.last_mut() {
                    let calls = last.extra.entry("tool_calls").or_insert_with(|| json!([]));
                    calls
                        .as_array_mut()
                        .into_iter()
                        .for_each(|c| c.push(call.clone()));
                }
            }
            "reasoning" => {
                let parts = content.as_array().into_iter().flatten();
                let texts: Vec<&str> = parts.filter_map(|p| p["text"].as_str()).collect();
                thinking = Some(texts.join("\n")).filter(|t| !t.is_empty());
            }
            // The results of calls.
            _ => {
                let output: Value = item.take("output")?.unwrap_or_default();
                let content = text(output, &format!("{place}.output"), Place::Result, reading)?;
                let mut extra = Map::new();
                let id: Value = item.take("call_id")?.unwrap_or_default();
                extra.insert("tool_call_id".into(), id);
                out.push(message("tool", content, extra));
            }
        }
    }
    Ok(())
}

/// A call as templates read it; one of a tool that is no function is shown as one with its input.
fn call(kind: &str, item: &mut Fields, reading: &Reading) -> Result<Value, ApiError> {
    let (id, name): (Option<Value>, Option<String>) = (item.take("call_id")?, item.take("name")?);
    let namespace: Option<String> = item.take("namespace")?;
    let name = match (namespace, name) {
        (Some(namespace), Some(name)) => Some(tools::within(&namespace) + &name),
        (_, name) => name,
    };
    let (name, arguments) = match kind {
        "function_call" => (name, item.take("arguments")?),
        "custom_tool_call" => {
            let input: Option<Value> = item.take("input")?;
            (name, Some(json!({"input": input})))
        }
        _ => (Some("local_shell".to_owned()), item.take("action")?),
    };
    made(
        id.unwrap_or_default(),
        name,
        arguments,
        &item.name("arguments"),
        reading,
    )
}

/// The formats of this protocol.
struct Response {
    model: String,
    id: String,
    created: u64,
    /// Settings of the request that the answer repeats.
    settings: Value,
    called: Called,
    blocks: Blocks,
    /// Ids of the blocks' items.
    ids: Vec<String>,
    length: bool,
    events: usize,
    /// Where it is kept, and the items that led to it; `None` if it is not to be kept.
    kept: Option<(Arc<Reading>, Vec<Item>)>,
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
                "input_tokens_details": {"cached_tokens": u.cached, "cache_write_tokens": 0},
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
        // The length limit cuts off the last item.
        let status = match (whole, self.length && index + 1 == self.ids.len()) {
            (false, _) => "in_progress",
            (true, true) => "incomplete",
            (true, false) => "completed",
        };
        let part = |part: Value| if whole { json!([part]) } else { json!([]) };
        match &self.blocks.list()[index] {
            AnswerBlock::Reasoning(text) => json!({
                "type": "reasoning", "id": id, "summary": [],
                "content": part(json!({"type": "reasoning_text", "text": text})),
            }),
            AnswerBlock::Text(text) => json!({
                "type": "message", "id": id, "status": status, "role": "assistant",
                "content": part(text_part(text)),
            }),
            AnswerBlock::Call {
                id: call,
                name,
                arguments,
            } => {
                let arguments = if whole { arguments } else { "" };
                let mut item = self.called.item(call, name, arguments);
                item["id"] = id.as_str().into();
                item["status"] = status.into();
                item
            }
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
                AnswerBlock::Reasoning(_) => "rs_",
                AnswerBlock::Text(_) => "msg_",
                AnswerBlock::Call { name, .. } if self.called.is_custom(name) => "ctc_",
                AnswerBlock::Call { .. } => "fc_",
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
                if let AnswerBlock::Text(_) = block {
                    let part = in_part(json!({"part": text_part("")}));
                    events.push(("response.content_part.added", part));
                }
            }
            (Change::Grow(..), AnswerBlock::Text(_)) => {
                let delta = in_part(json!({"delta": grown, "logprobs": []}));
                events.push(("response.output_text.delta", delta));
            }
            (Change::Grow(..), AnswerBlock::Reasoning(_)) => {
                events.push((
                    "response.reasoning_text.delta",
                    in_part(json!({"delta": grown})),
                ));
            }
            // Its text is known at its end.
            (Change::Grow(..), AnswerBlock::Call { name, .. }) if self.called.is_custom(name) => {}
            (Change::Grow(..), AnswerBlock::Call { .. }) => {
                let mut data = place.clone();
                data["delta"] = grown.into();
                events.push(("response.function_call_arguments.delta", data));
            }
            (Change::Close(_), block) => {
                match block {
                    AnswerBlock::Text(text) => {
                        let done = in_part(json!({"text": text, "logprobs": []}));
                        events.push(("response.output_text.done", done));
                        let part = in_part(json!({"part": text_part(text)}));
                        events.push(("response.content_part.done", part));
                    }
                    AnswerBlock::Reasoning(text) => {
                        let done = in_part(json!({"text": text}));
                        events.push(("response.reasoning_text.done", done));
                    }
                    AnswerBlock::Call {
                        name, arguments, ..
                    } if self.called.is_custom(name) => {
                        let (mut delta, mut done) = (place.clone(), place.clone());
                        delta["delta"] = input(arguments).into();
                        done["input"] = delta["delta"].clone();
                        events.push(("response.custom_tool_call_input.delta", delta));
                        events.push(("response.custom_tool_call_input.done", done));
                    }
                    AnswerBlock::Call {
                        name, arguments, ..
                    } => {
                        let mut data = place.clone();
                        data["arguments"] = arguments.clone().into();
                        data["name"] = self.called.item("", name, "")["name"].clone();
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

    /// The response at its end, which is kept.
    fn ended(&mut self, usage: Usage) -> Value {
        let frame = self.frame(self.status(), Some(usage), Value::Null);
        if let Some((reading, input)) = self.kept.take() {
            reading.kept.keep(reading.client.id, &frame, input);
        }
        frame
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
        let frame = self.ended(usage);
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
        self.ended(usage)
    }
}
