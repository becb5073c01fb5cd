//! `POST /v1/responses`: OpenAI's newer protocol. Responses are kept for a while ([`super::kept`]).

use super::blocks::{AnswerBlock, Blocks, Change};
use super::called::Called;
use super::chat::{ChatRequest, render};
use super::fields::Fields;
use super::items::{conversation, read_input, text_part};
use super::kept::Item;
use super::reading::Reading;
use super::thinking;
use super::tool_choice::tool_choice;
use super::tools;
use super::{Parsed, Shape, SseEvent, now, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::model::ServedModel;
use crate::names::Names;
use nq_answers::grammar::Format;
use nq_runtime::Message;
use serde_json::{Value, json};
use std::sync::Arc;

const NAMES: Names = Names {
    prompt: "input",
    format: "text.format.schema",
};

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub(crate) fn parse(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
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
    let choice = tool_choice(fields.take("tool_choice")?, &mut tools, "tool_choice")?;
    let max_tokens = fields.limit("max_output_tokens", 1)?;
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
        shape: Box::new(ResponsesFormat {
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

/// Counts the tokens of a request's prompt.
pub(crate) fn count(model: &Arc<ServedModel>, fields: Fields) -> Result<Value, ApiError> {
    let prompts = parse(model, fields)?.generation.prompts;
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    Ok(json!({"object": "response.input_tokens", "input_tokens": tokens}))
}

/// An error as the only event of a stream.
pub(crate) fn error_event(error: &ApiError) -> SseEvent {
    let data = json!({
        "code": error.code, "message": error.message, "param": error.param, "sequence_number": 0,
    });
    SseEvent::typed("error", data)
}

/// Fields that the answer repeats as they came.
#[rustfmt::skip]
const REPEATED: [&str; 8] = [
    "instructions", "metadata", "tools", "tool_choice", "text", "reasoning", "truncation", "user",
];

/// A number of a few digits: those of an f32, not those of its neighbour among the f64.
pub(crate) fn number(x: f32) -> Value {
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

/// The formats of this protocol.
struct ResponsesFormat {
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

impl ResponsesFormat {
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
                item["status"] = match (&item["type"], status) {
                    // A patch that is cut off has no status of its own.
                    (kind, "incomplete") if kind == "apply_patch_call" => "in_progress".into(),
                    (_, status) => status.into(),
                };
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
                AnswerBlock::Call { name, .. } => self.called.prefix(name),
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
            // What is called with something else than arguments is told at its end.
            (Change::Grow(..), AnswerBlock::Call { name, .. }) => {
                if self.called.is_function(name) {
                    let mut data = place.clone();
                    data["delta"] = grown.into();
                    events.push(("response.function_call_arguments.delta", data));
                }
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
                    } => {
                        let item = self.called.item("", name, arguments);
                        let mut data = place.clone();
                        match item["type"].as_str() {
                            Some("function_call") => {
                                data["arguments"] = item["arguments"].clone();
                                data["name"] = item["name"].clone();
                                events.push(("response.function_call_arguments.done", data));
                            }
                            Some("custom_tool_call") => {
                                let mut delta = place.clone();
                                delta["delta"] = item["input"].clone();
                                data["input"] = item["input"].clone();
                                events.push(("response.custom_tool_call_input.delta", delta));
                                events.push(("response.custom_tool_call_input.done", data));
                            }
                            _ => {}
                        }
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

impl Shape for ResponsesFormat {
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
