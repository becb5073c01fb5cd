//! `POST /v1/chat/completions`.

use super::fields::Fields;
use super::reading::Reading;
use super::sent::ContentPlace;
use super::streaming::{Told, streaming};
use super::text::content;
use super::thinking;
use super::tool_choice::tool_choice;
use super::tools::{self, Tools, made};
use super::{Parsed, Shape, SseEvent, now, openai_usage, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Ending, Generation, Output, Usage};
use crate::images;
use crate::model::{ServedModel, message};
use crate::names::Names;
use nq_answers::grammar::{Format, unenforced};
use nq_answers::{Piece, ReaderOptions};
use nq_answers::{Thinking, ToolChoice};
use nq_runtime::{Message, TokenLogprobs, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most messages in one request.
const MOST_MESSAGES: usize = 4096;

const NAMES: Names = Names {
    prompt: "messages",
    format: "response_format",
};

/// A chat and its options, independent of the protocol.
pub(crate) struct ChatRequest {
    /// Its messages.
    pub messages: Vec<Message>,
    /// Its tools.
    pub tools: Tools,
    /// Which tools the model may call.
    pub choice: ToolChoice,
    /// True if several calls may be made at once.
    pub several_calls: bool,
    /// How much the model may think.
    pub thinking: Thinking,
    /// The format that the answer must have.
    pub format: Option<Format>,
    /// True: the answer continues the last message.
    pub continues: bool,
    /// How the request was read.
    pub reading: Arc<Reading>,
}

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub(crate) fn parse(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
    let mut fields = fields.under("chat")?;
    let (messages, prefix) = messages(&mut fields)?;
    let mut tools = tools(&mut fields)?;
    let functions = fields.objects("functions", "chat.function", tools::MOST_TOOLS)?;
    let older = !functions.is_empty();
    if older && !tools.list.is_empty() {
        return Err(ApiError::field(
            "functions",
            "expected tools or functions, found both",
        ));
    }
    for function in functions {
        tools.add(function, "parameters")?;
    }
    let (choice, function_call): (Option<Value>, Option<Value>) =
        (fields.take("tool_choice")?, fields.take("function_call")?);
    let (choice, asked) = match older {
        true => (function_call, "function_call"),
        false => (choice, "tool_choice"),
    };
    let choice = tool_choice(choice, &mut tools, asked)?;
    let goes_on: bool = fields.take("continue_final_message")?.unwrap_or(false);
    let begins: Option<bool> = fields.take("add_generation_prompt")?;
    if begins == Some(goes_on) {
        let what = format!("expected {} with continue_final_message", !goes_on);
        return Err(ApiError::field("add_generation_prompt", what));
    }
    let continues = goes_on || prefix;
    if continues && messages.last().is_none_or(|m| m.role != "assistant") {
        let what = "expected the assistant's message at the end, which the answer continues";
        return Err(ApiError::field("messages", what));
    }
    let (format, format_name) = format(&mut fields)?;
    let chat = ChatRequest {
        messages,
        choice,
        // The older protocol has room for one.
        several_calls: fields.take("parallel_tool_calls")?.unwrap_or(true) && !older,
        thinking: thinking::read(&mut fields)?,
        format,
        tools,
        continues,
        reading: Arc::clone(fields.reading()),
    };
    let n = fields.count("n", 1, sampling::MOST_ANSWERS)?.unwrap_or(1);
    let max_tokens = fields.limit("max_completion_tokens", 1)?;
    let most_tokens = fields.limit("max_tokens", 1)?;
    let (streams, told) = streaming(&mut fields)?;
    let logprobs = sampling::chat_logprobs(&mut fields)?;
    let partial = Generation {
        n,
        sampling: sampling::params(&mut fields, model.sampling())?,
        bias: sampling::bias(&mut fields)?,
        logprobs,
        max_tokens: max_tokens.or(most_tokens),
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        reader: ReaderOptions {
            stop: sampling::stop(&mut fields, "stop")?,
            ..ReaderOptions::default()
        },
        names: Names {
            format: format_name,
            ..NAMES
        },
        ..Generation::of(model)
    };
    fields.finish()?;
    let generation = render(model, chat, partial)?;
    Ok(Parsed {
        shape: Box::new(ChatFormat::new(model, n, logprobs.is_some(), told, older)),
        generation,
        stream: streams,
    })
}

/// Reads `tools`.
///
/// # Errors
/// An invalid tool, by name.
pub(super) fn tools(fields: &mut Fields) -> Result<Tools, ApiError> {
    let given = fields.objects("tools", "chat.tool", tools::MOST_TOOLS)?;
    tools::read(given, "function", |tools, _, mut tool| {
        let place = tool.name("function");
        let function = tool.object("function", "chat.function")?;
        let function = function.ok_or_else(|| ApiError::field(&place, "expected an object"))?;
        tool.finish()?;
        tools.add(function, "parameters")
    })
}

/// Prepares the chat for the model: renders the prompt, and sets up parsing of the answer and its constraint.
///
/// # Errors
/// Errors of the template.
pub(crate) fn render(
    model: &Arc<ServedModel>,
    mut chat: ChatRequest,
    partial: Generation,
) -> Result<Generation, ApiError> {
    let named = match &chat.choice {
        ToolChoice::Named(name) => Some(name.as_str()),
        _ => None,
    };
    let shown = chat.tools.list.iter().zip(chat.tools.schemas);
    let schemas = shown.filter(|(t, _)| named.is_none_or(|n| t["function"]["name"] == n));
    let schemas: Vec<String> = schemas.map(|(_, place)| place).collect();
    if model.text().template().is_none() {
        let what = "this model has no chat template: it serves /v1/completions";
        return Err(ApiError::invalid(what));
    }
    let images = images::seen(model, &mut chat.messages, &chat.reading)?;
    let asked = nq_answers::ChatInput {
        images: images.iter().map(|seen| seen.image.tokens()).collect(),
        messages: told(chat.messages, &chat.reading.found().told),
        tools: chat.tools.list,
        choice: chat.choice,
        one_call: !chat.several_calls,
        thinking: chat.thinking,
        most_thinking: chat.reading.rules.reasoning_budget,
        format: chat.format,
        continues: chat.continues,
        stop: partial.reader.stop.clone(),
    };
    let asked = model.text().ask(asked, model.counted());
    let asked = asked.map_err(|e| partial.names.read(e, model.context()))?;
    let left_out = |place: &str, schema: &Value| {
        if let Some(keyword) = unenforced(schema) {
            chat.reading.left_out(place, keyword);
        }
    };
    match asked.format.as_ref().map(|f| &f.0) {
        Some(Format::Calls { tools, .. }) => {
            let both = tools.iter().zip(&schemas);
            both.for_each(|((_, schema), place): (_, &String)| left_out(place, schema));
        }
        Some(Format::CallsOr { answer, .. }) => {
            if let Format::Schema(schema) = answer.as_ref() {
                left_out(partial.names.format, schema);
            }
        }
        Some(Format::Schema(schema)) => left_out(partial.names.format, schema),
        _ => {}
    }
    Ok(Generation {
        prompts: vec![asked.prompt.tokens],
        images,
        places: asked.prompt.images,
        begun: asked.prompt.begun,
        thinking: asked.thinking,
        reader: asked.reader,
        format: asked.format,
        schemas,
        ..partial
    })
}

/// Messages of which the first, the system's, says what was left out.
fn told(mut messages: Vec<Message>, left_out: &[String]) -> Vec<Message> {
    if left_out.is_empty() {
        return messages;
    }
    let words = format!(
        "Not available here, and left out of this conversation: {}.",
        left_out.join(", ")
    );
    match messages.first_mut().filter(|m| m.role == "system") {
        Some(system) => system.content = format!("{}\n\n{words}", system.text()).into(),
        None => messages.insert(0, Message::new("system", words)),
    }
    messages
}

/// Reads `response_format`: OpenAI's formats, and `{"type": "regex", "pattern"}`, `{"type": "lark",
/// "grammar"}`. Returns the name of the part that says what the answer is, too.
fn format(fields: &mut Fields) -> Result<(Option<Format>, &'static str), ApiError> {
    let Some(mut fields) = fields.object("response_format", "response_format")? else {
        return Ok((None, NAMES.format));
    };
    let kind: String = fields.require("type")?;
    let schema: Option<Value> = fields.take("schema")?;
    let inner = fields.object("json_schema", "json_schema")?;
    let (pattern, grammar) = (fields.take::<String>("pattern")?, fields.take("grammar")?);
    let missing = |name: &str| ApiError::field(name, "expected a value, found none");
    let (format, name) = match kind.as_str() {
        "text" => (None, NAMES.format),
        "json_object" => match schema {
            None => (Some(Format::Object), NAMES.format),
            Some(schema) => (Some(Format::Schema(schema)), "response_format.schema"),
        },
        "json_schema" => {
            let place = "response_format.json_schema";
            let mut inner = inner.ok_or_else(|| missing(place))?;
            let schema = inner.require("schema")?;
            inner.finish()?;
            (
                Some(Format::Schema(schema)),
                "response_format.json_schema.schema",
            )
        }
        "regex" => {
            let name = "response_format.pattern";
            let pattern = pattern.ok_or_else(|| missing(name))?;
            (Some(Format::Regex(pattern)), name)
        }
        "lark" => {
            let name = "response_format.grammar";
            let grammar = grammar.ok_or_else(|| missing(name))?;
            (Some(Format::Lark(grammar)), name)
        }
        other => {
            let why =
                format!("nq serves text, json_object, json_schema, regex and lark, found {other}");
            return Err(ApiError::unsupported("response_format.type", &why));
        }
    };
    fields.finish()?;
    Ok((format, name))
}

/// Reads messages; true if the last one is to be continued (DeepSeek's `prefix`).
fn messages(fields: &mut Fields) -> Result<(Vec<Message>, bool), ApiError> {
    let given = fields.objects("messages", "chat.message", MOST_MESSAGES)?;
    if given.is_empty() {
        return Err(ApiError::field(
            "messages",
            "expected at least one, found none",
        ));
    }
    let last = given.len() - 1;
    let (mut messages, mut prefix) = (Vec::with_capacity(given.len()), false);
    for (i, fields) in given.into_iter().enumerate() {
        let (message, prefixes) = one_message(fields)?;
        messages.push(message);
        prefix = prefixes && i == last;
    }
    Ok((messages, prefix))
}

fn one_message(mut fields: Fields) -> Result<(Message, bool), ApiError> {
    let reading = Arc::clone(fields.reading());
    let role: String = fields.require("role")?;
    let role = match role.as_str() {
        // Templates use the older name.
        "developer" => "system",
        "system" | "user" | "assistant" | "tool" => &role,
        "function" => "tool",
        _ => {
            let what = format!(
                "expected system, developer, user, assistant, tool or function, found {role}"
            );
            return Err(ApiError::field(&fields.name("role"), what));
        }
    };
    let mut extra = Map::new();
    let place = match role {
        "tool" => ContentPlace::Result,
        "user" => ContentPlace::Message,
        _ => ContentPlace::Text,
    };
    let given: Value = fields.take("content")?.unwrap_or_default();
    let content = content(given, &fields.name("content"), place, &reading)?;
    let newer: Option<Value> = fields.take("reasoning")?;
    let older: Option<Value> = fields.take("reasoning_content")?;
    let calls = fields.objects("tool_calls", "chat.call", usize::MAX)?;
    let called: Option<Value> = fields.take("function_call")?;
    if role == "assistant" {
        let thinking = older.or(newer);
        if let Some(thinking) = thinking.as_ref().and_then(Value::as_str) {
            extra.insert("reasoning_content".into(), thinking.into());
        }
        if !calls.is_empty() {
            let calls: Result<Value, ApiError> = calls.into_iter().map(call).collect();
            extra.insert("tool_calls".into(), calls?);
        } else if let Some(called) = called {
            let place = fields.name("function_call");
            let name = called["name"].as_str().map(str::to_owned);
            let arguments = Some(called["arguments"].clone());
            let call = made(Value::Null, name, arguments, &place, &reading)?;
            extra.insert("tool_calls".into(), json!([call]));
        }
    }
    for field in ["name", "tool_call_id"] {
        if let Some(value) = fields.take::<String>(field)? {
            extra.insert(field.into(), value.into());
        }
    }
    let prefix: bool = fields.take("prefix")?.unwrap_or(false);
    fields.finish()?;
    Ok((message(role, content, extra), prefix))
}

/// A call as templates read it; a call of a custom tool is one with its input.
fn call(mut fields: Fields) -> Result<Value, ApiError> {
    let reading = Arc::clone(fields.reading());
    let id: Value = fields.take("id")?.unwrap_or_default();
    let function: Option<Value> = fields.take("function")?;
    let custom: Option<Value> = fields.take("custom")?;
    let (place, name, arguments) = match (function, custom) {
        (None, Some(custom)) => (
            fields.name("custom"),
            custom["name"].clone(),
            json!({"input": custom["input"]}),
        ),
        (function, _) => {
            let function = function.unwrap_or_default();
            (
                fields.name("function"),
                function["name"].clone(),
                function["arguments"].clone(),
            )
        }
    };
    let name = name.as_str().map(str::to_owned);
    made(id, name, Some(arguments), &place, &reading)
}

/// OpenAI's word for how an answer ended.
pub(crate) fn finish_reason(ending: Ending) -> &'static str {
    match ending {
        Ending::Stop | Ending::StopString => "stop",
        Ending::Length => "length",
        Ending::ToolCalls => "tool_calls",
    }
}

/// An answer that is being collected.
#[derive(Clone, Debug, Default)]
struct ChatAnswer {
    text: String,
    reasoning: String,
    /// (id, name, arguments)
    calls: Vec<(String, String, String)>,
    logprobs: Vec<Value>,
    finish: Option<&'static str>,
    stop_string: Option<String>,
}

/// The formats of this protocol.
struct ChatFormat {
    model: Arc<ServedModel>,
    id: String,
    created: u64,
    logprobs: bool,
    told: Told,
    /// True: a call is a `function_call`, as before there were tools.
    older: bool,
    answers: Vec<ChatAnswer>,
}

impl ChatFormat {
    fn new(model: &Arc<ServedModel>, n: usize, logprobs: bool, told: Told, older: bool) -> Self {
        ChatFormat {
            model: Arc::clone(model),
            id: unique("chatcmpl-"),
            created: now(),
            logprobs,
            told,
            older,
            answers: vec![ChatAnswer::default(); n],
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

    /// The word for how an answer ended.
    fn finish(&self, ending: Ending) -> &'static str {
        match ending {
            Ending::ToolCalls if self.older => "function_call",
            ending => finish_reason(ending),
        }
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

impl Shape for ChatFormat {
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
            let its_logprobs = match &piece {
                Piece::Text(_) => logprobs.take(),
                _ => Value::Null,
            };
            let delta = match piece {
                Piece::Reasoning(text) => json!({"reasoning_content": text, "reasoning": text}),
                Piece::Text(text) => json!({"content": text}),
                Piece::CallStart { name, .. } if self.older => {
                    json!({"function_call": {"name": name, "arguments": ""}})
                }
                Piece::CallArguments { text, .. } if self.older => {
                    json!({"function_call": {"arguments": text}})
                }
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
            events.push(self.delta(index, delta, its_logprobs, usage));
        }
        if let Some(Ok(ending)) = output.end {
            // `stop_reason` is vLLM's: the stop string that ended the answer.
            let choice = json!([{
                "index": index, "delta": {}, "logprobs": logprobs,
                "finish_reason": self.finish(ending), "stop_reason": output.stop_string,
            }]);
            events.push(self.chunk(choice, usage));
        }
        events
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        let frame = self.frame("chat.completion.chunk", json!([]));
        self.told.at_end(frame, usage)
    }

    fn collect(&mut self, output: Output) {
        let logprobs = self.logprobs(&output.logprobs);
        let finish = match output.end {
            Some(Ok(ending)) => Some(self.finish(ending)),
            _ => None,
        };
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
        if finish.is_some() {
            answer.finish = finish;
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
                match self.older {
                    false => {
                        message["tool_calls"] = answer.calls.into_iter().map(call).collect();
                    }
                    true => {
                        let call = answer
                            .calls
                            .into_iter()
                            .next()
                            .map(call)
                            .unwrap_or_default();
                        message["function_call"] = call["function"].clone();
                    }
                }
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
