//! `POST /v1/chat/completions`.

use super::fields::Fields;
use super::streaming::{Told, streaming};
use super::tools::{Choice, made};
use super::{Parsed, Shape, SseEvent, now, openai_usage, sampling, tools, unique};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::grammar::Format;
use crate::model::{Model, message};
use crate::output::{Piece, ReaderOptions};
use nq_runtime::{Message, TokenLogprobs, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most messages in one request.
const MOST_MESSAGES: usize = 4096;

/// Accepted fields that do not affect the answer.
const WITHOUT_EFFECT: [&str; 6] = [
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
];

/// A chat and its options, independent of the protocol.
pub struct ChatRequest {
    /// Its messages.
    pub messages: Vec<Message>,
    /// Tools in OpenAI's form.
    pub tools: Vec<Value>,
    /// Which tools the model may call.
    pub choice: Choice,
    /// True if several calls may be made at once.
    pub several_calls: bool,
    /// `enable_thinking`, if given.
    pub thinking: Option<bool>,
    /// The format that the answer must have.
    pub format: Option<Format>,
}

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub fn parse(model: &Arc<Model>, mut fields: Fields) -> Result<Parsed, ApiError> {
    fields.ignore(&WITHOUT_EFFECT);
    fields.only("store", &[json!(false)])?;
    fields.only("modalities", &[json!(["text"])])?;
    fields.only("verbosity", &[json!("medium")])?;
    let messages = messages(fields.require("messages")?)?;
    let tools = tools::read(fields.take("tools")?)?;
    let choice = tools::choice(fields.take("tool_choice")?, &tools)?;
    let chat = ChatRequest {
        messages,
        choice,
        several_calls: fields.take("parallel_tool_calls")?.unwrap_or(true),
        thinking: thinking(&mut fields)?,
        format: format(fields.take("response_format")?)?,
        tools,
    };
    let n = fields.count("n", 1, sampling::MOST_ANSWERS)?.unwrap_or(1);
    let max_tokens = fields.count("max_completion_tokens", 1, usize::MAX)?;
    let older = fields.count("max_tokens", 1, usize::MAX)?;
    let (streams, told) = streaming(&mut fields)?;
    let logprobs = sampling::chat_logprobs(&mut fields)?;
    let partial = Generation {
        prompt: Vec::new(),
        n,
        sampling: sampling::params(&mut fields, model.sampling())?,
        bias: sampling::bias(&mut fields)?,
        logprobs,
        max_tokens: max_tokens.or(older),
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        reader: ReaderOptions {
            stop: sampling::stop(&mut fields, "stop")?,
            ..ReaderOptions::default()
        },
        format: None,
    };
    fields.finish()?;
    let generation = render(model, chat, partial)?;
    Ok(Parsed {
        shape: Box::new(Chat::new(model, n, logprobs.is_some(), told)),
        generation,
        stream: streams,
    })
}

/// Prepares the chat for the model: renders the prompt, and sets up parsing of the answer and its constraint.
///
/// # Errors
/// Errors of the template.
pub fn render(
    model: &Arc<Model>,
    chat: ChatRequest,
    partial: Generation,
) -> Result<Generation, ApiError> {
    let shown = match chat.choice {
        Choice::None => None,
        _ => Some(chat.tools.as_slice()).filter(|t| !t.is_empty()),
    };
    let prompt = model.prompt(chat.messages, shown, chat.thinking)?;
    let must_call = matches!(chat.choice, Choice::Required | Choice::Named(_));
    let format = match (&chat.choice, chat.format) {
        (Choice::Required | Choice::Named(_), _) if !model.constrains_calls() => {
            let why = "nq cannot hold this model's form of calls to a schema: auto and none are \
                       served";
            return Err(ApiError::unsupported("tool_choice", why));
        }
        (Choice::Required, _) => Some(model.calls_format(&chat.tools, None, chat.several_calls)),
        (Choice::Named(name), _) => Some(model.calls_format(&chat.tools, Some(name), false)),
        (_, format) => format,
    };
    let start = model.start(&prompt.text, chat.thinking);
    Ok(Generation {
        prompt: prompt.tokens,
        reader: ReaderOptions {
            thinking: Some(prompt.text),
            calls: shown.is_some(),
            stop: if must_call {
                Vec::new()
            } else {
                partial.reader.stop
            },
        },
        format: format.map(|f| (f, start)),
        ..partial
    })
}

/// Reads the options for thinking.
fn thinking(fields: &mut Fields) -> Result<Option<bool>, ApiError> {
    let mut asked = None;
    if let Some(object) = fields.take::<Value>("chat_template_kwargs")? {
        let mut inner = Fields::of(object, "chat_template_kwargs")?;
        asked = inner.take("enable_thinking")?;
        inner.finish()?;
    }
    let effort: Option<String> = fields.take("reasoning_effort")?;
    let by_effort = match effort.as_deref() {
        None => None,
        Some("none" | "minimal") => Some(false),
        Some("low" | "medium" | "high" | "xhigh") => Some(true),
        Some(other) => {
            let what = format!("expected none, minimal, low, medium or high, found {other}");
            return Err(ApiError::field("reasoning_effort", what));
        }
    };
    Ok(asked.or(by_effort))
}

/// Reads `response_format`: OpenAI's formats, and `{"type": "regex", "pattern"}`, `{"type": "lark",
/// "grammar"}`.
fn format(value: Option<Value>) -> Result<Option<Format>, ApiError> {
    let Some(value) = value else {
        return Ok(None);
    };
    let mut fields = Fields::of(value, "response_format")?;
    let kind: String = fields.require("type")?;
    let format = match kind.as_str() {
        "text" => None,
        "json_object" => Some(Format::Object),
        "json_schema" => {
            let mut inner = Fields::of(
                fields.require("json_schema")?,
                "response_format.json_schema",
            )?;
            inner.ignore(&["name", "description", "strict"]);
            let schema = inner.require("schema")?;
            inner.finish()?;
            Some(Format::Schema(schema))
        }
        "regex" => Some(Format::Regex(fields.require("pattern")?)),
        "lark" => Some(Format::Lark(fields.require("grammar")?)),
        other => {
            let why =
                format!("nq serves text, json_object, json_schema, regex and lark, found {other}");
            return Err(ApiError::unsupported("response_format.type", &why));
        }
    };
    fields.finish()?;
    Ok(format)
}

/// Reads messages.
fn messages(values: Vec<Value>) -> Result<Vec<Message>, ApiError> {
    if values.is_empty() || values.len() > MOST_MESSAGES {
        let what = format!("expected 1 to {MOST_MESSAGES}, found {}", values.len());
        return Err(ApiError::field("messages", what));
    }
    let one = |(i, value): (usize, Value)| one_message(value, &format!("messages[{i}]"));
    values.into_iter().enumerate().map(one).collect()
}

fn one_message(value: Value, place: &str) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, place)?;
    let role: String = fields.require("role")?;
    let role = match role.as_str() {
        // Templates use the older name.
        "developer" => "system",
        "system" | "user" | "assistant" | "tool" => &role,
        _ => {
            let what = format!("expected system, developer, user, assistant or tool, found {role}");
            return Err(ApiError::field(&fields.name("role"), what));
        }
    };
    let mut extra = Map::new();
    let content = match fields.take::<Value>("content")? {
        None => String::new(),
        Some(content) => text(content, &fields.name("content"))?,
    };
    if role == "assistant" {
        let newer: Option<String> = fields.take("reasoning")?;
        let older: Option<String> = fields.take("reasoning_content")?;
        if let Some(thinking) = older.or(newer) {
            extra.insert("reasoning_content".into(), thinking.into());
        }
        if let Some(calls) = fields
            .take::<Vec<Value>>("tool_calls")?
            .filter(|c| !c.is_empty())
        {
            let calls = made(calls, &fields.name("tool_calls"))?;
            extra.insert("tool_calls".into(), calls);
        }
        fields.ignore(&["refusal", "annotations"]);
    }
    for field in ["name", "tool_call_id"] {
        if let Some(value) = fields.take::<String>(field)? {
            extra.insert(field.into(), value.into());
        }
    }
    fields.finish()?;
    Ok(message(role, content, extra))
}

/// Content as text: a string, or parts of type text.
///
/// # Errors
/// A part of another type.
pub fn text(content: Value, place: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err(ApiError::field(place, "expected a text or a list of parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let kind = part["type"].as_str().unwrap_or_default();
        match (kind, part["text"].as_str()) {
            ("text" | "input_text" | "output_text", Some(text)) => texts.push(text.to_owned()),
            _ => {
                let why = format!("nq serves parts of type text alone, found {kind:?}");
                return Err(ApiError::unsupported(&format!("{place}[{i}].type"), &why));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// OpenAI's word for how an answer ended.
pub fn finish_reason(ending: Ending) -> &'static str {
    match ending {
        Ending::Stop | Ending::StopString => "stop",
        Ending::Length => "length",
        Ending::ToolCalls => "tool_calls",
    }
}

/// An answer that is being collected.
#[derive(Clone, Debug, Default)]
struct Answer {
    text: String,
    reasoning: String,
    /// (id, name, arguments)
    calls: Vec<(String, String, String)>,
    logprobs: Vec<Value>,
    finish: Option<&'static str>,
    stop_string: Option<String>,
}

/// The formats of this protocol.
struct Chat {
    model: Arc<Model>,
    id: String,
    created: u64,
    logprobs: bool,
    told: Told,
    answers: Vec<Answer>,
}

impl Chat {
    fn new(model: &Arc<Model>, n: usize, logprobs: bool, told: Told) -> Self {
        Chat {
            model: Arc::clone(model),
            id: unique("chatcmpl-"),
            created: now(),
            logprobs,
            told,
            answers: vec![Answer::default(); n],
        }
    }

    fn frame(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model.name(),
            "choices": choices,
        })
    }

    fn chunk(&self, choices: Value, usage: Usage) -> SseEvent {
        let mut chunk = self.frame("chat.completion.chunk", choices);
        self.told.so_far(&mut chunk, usage);
        SseEvent::data(&chunk)
    }

    fn delta(&self, index: usize, delta: Value, logprobs: Value, usage: Usage) -> SseEvent {
        let choice = json!([{
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null,
        }]);
        self.chunk(choice, usage)
    }

    fn logprobs(&self, tokens: &[TokenLogprobs]) -> Vec<Value> {
        let tokenizer = self.model.tokenizer();
        tokens
            .iter()
            .map(|t| content_logprob(tokenizer, t))
            .collect()
    }
}

/// One token of `logprobs.content`.
fn content_logprob(tokenizer: &Tokenizer, token: &TokenLogprobs) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes().get(id);
        let text = String::from_utf8_lossy(bytes);
        // JSON has no infinity; OpenAI uses this number for it.
        json!({"token": text, "logprob": logprob.max(-9999.0), "bytes": bytes})
    };
    let mut value = one(token.token, token.logprob);
    let top: Vec<Value> = token
        .top
        .iter()
        .map(|&(id, logprob)| one(id, logprob))
        .collect();
    value["top_logprobs"] = top.into();
    value
}

impl Shape for Chat {
    fn begin(&mut self, usage: Usage) -> Vec<SseEvent> {
        let first = || json!({"role": "assistant", "content": ""});
        let answers = 0..self.answers.len();
        let begin = |i| self.delta(i, first(), Value::Null, usage);
        answers.map(begin).collect()
    }

    fn stream(&mut self, output: Output, usage: Usage) -> Vec<SseEvent> {
        let index = output.index;
        let mut logprobs = match (self.logprobs, output.logprobs.is_empty()) {
            (true, false) => json!({"content": self.logprobs(&output.logprobs), "refusal": null}),
            _ => Value::Null,
        };
        let mut events = Vec::new();
        for piece in output.pieces {
            let delta = match piece {
                Piece::Reasoning(text) => json!({"reasoning_content": text, "reasoning": text}),
                Piece::Text(text) => json!({"content": text}),
                Piece::CallStart { index, name } => {
                    json!({"tool_calls": [{
                        "index": index, "id": unique("call_"), "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }]})
                }
                Piece::CallArguments { index, text } => {
                    json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
                }
            };
            events.push(self.delta(index, delta, logprobs.take(), usage));
        }
        if let Some(Ok(ending)) = output.end {
            // `stop_reason` is vLLM's: the stop string that ended the answer.
            let choice = json!([{
                "index": index, "delta": {}, "logprobs": logprobs,
                "finish_reason": finish_reason(ending), "stop_reason": output.stop_string,
            }]);
            events.push(self.chunk(choice, usage));
        }
        events
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self.told != Told::Never {
            let mut chunk = self.frame("chat.completion.chunk", json!([]));
            chunk["usage"] = openai_usage(usage);
            events.push(SseEvent::data(&chunk));
        }
        events.push(SseEvent {
            name: None,
            data: "[DONE]".into(),
        });
        events
    }

    fn fail(&mut self, error: &ApiError) -> Vec<SseEvent> {
        vec![SseEvent::data(&error.body())]
    }

    fn collect(&mut self, output: Output) {
        let logprobs = self.logprobs(&output.logprobs);
        let answer = &mut self.answers[output.index];
        answer.logprobs.extend(logprobs);
        for piece in output.pieces {
            match piece {
                Piece::Reasoning(text) => answer.reasoning.push_str(&text),
                Piece::Text(text) => answer.text.push_str(&text),
                Piece::CallStart { name, .. } => {
                    answer.calls.push((unique("call_"), name, String::new()));
                }
                Piece::CallArguments { index, text } => answer.calls[index].2.push_str(&text),
            }
        }
        if let Some(Ok(ending)) = output.end {
            answer.finish = Some(finish_reason(ending));
            answer.stop_string = output.stop_string;
        }
    }

    fn whole(&mut self, usage: Usage) -> Value {
        let mut choices = Vec::new();
        for (index, answer) in std::mem::take(&mut self.answers).into_iter().enumerate() {
            let mut message = json!({"role": "assistant", "content": answer.text, "refusal": null});
            if !answer.reasoning.is_empty() {
                message["reasoning_content"] = answer.reasoning.clone().into();
                message["reasoning"] = answer.reasoning.into();
            }
            if !answer.calls.is_empty() {
                let call = |(id, name, arguments)| {
                    json!({"id": id, "type": "function",
                           "function": {"name": name, "arguments": arguments}})
                };
                message["tool_calls"] = answer.calls.into_iter().map(call).collect();
                if answer.text.is_empty() {
                    message["content"] = Value::Null;
                }
            }
            choices.push(json!({
                "index": index,
                "message": message,
                "logprobs": if self.logprobs { json!({"content": answer.logprobs, "refusal": null}) } else { Value::Null },
                "finish_reason": answer.finish,
                "stop_reason": answer.stop_string,
            }));
        }
        let mut whole = self.frame("chat.completion", choices.into());
        whole["usage"] = openai_usage(usage);
        whole
    }
}
