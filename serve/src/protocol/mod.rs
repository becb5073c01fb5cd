//! The protocols that clients speak: one file each, all using one internal request
//! (`Generation`) and one kind of event (`Output`).

pub(crate) mod blocks;
pub(crate) mod called;
pub(crate) mod chat;
mod client_tools;
pub(crate) mod compaction;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod fields;
mod images;
pub(crate) mod items;
pub(crate) mod kept;
pub(crate) mod messages;
pub(crate) mod ollama;
pub mod reading;
pub(crate) mod rerank;
pub(crate) mod responses;
pub(crate) mod sampling;
pub(crate) mod sent;
pub(crate) mod streaming;
pub(crate) mod table;
pub(crate) mod text;
pub(crate) mod thinking;
pub(crate) mod tokens;
mod tool_choice;
pub(crate) mod tools;

use crate::error::ApiError;
use crate::generation::{Generation, Output, Usage};
use crate::model::ServedModel;
use nq_runtime::chat_template::integers::unmarked;
use serde_json::{Value, json};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A chunk of an event stream.
#[derive(Clone, Debug, PartialEq)]
pub struct SseEvent {
    /// The event's name, if the protocol has names.
    pub name: Option<&'static str>,
    /// Its data: JSON, or a single word.
    pub data: String,
}

impl SseEvent {
    /// JSON data without an event name.
    pub(crate) fn data(data: &Value) -> Self {
        SseEvent {
            name: None,
            data: unmarked(data.to_string()),
        }
    }

    /// JSON data with the event's name as its `type`.
    pub(crate) fn typed(name: &'static str, mut data: Value) -> Self {
        data["type"] = name.into();
        SseEvent {
            name: Some(name),
            data: data.to_string(),
        }
    }
}

/// How events are written one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// As server-sent events.
    Events,
    /// As lines of JSON.
    Lines,
}

impl Framing {
    /// The type of the content.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Framing::Events => "text/event-stream",
            Framing::Lines => "application/x-ndjson",
        }
    }

    /// A sign of life that says nothing: a comment, or white space before a line.
    pub(crate) fn ping(self) -> &'static [u8] {
        match self {
            Framing::Events => b": keep-alive\n\n",
            Framing::Lines => b" ",
        }
    }

    /// Writes an event.
    pub(crate) fn write(self, event: &SseEvent, out: &mut String) {
        match (self, event.name) {
            (Framing::Lines, _) => *out += &event.data,
            (Framing::Events, None) => *out += &format!("data: {}\n", event.data),
            (Framing::Events, Some(name)) => {
                *out += &format!("event: {name}\ndata: {}\n", event.data);
            }
        }
        out.push('\n');
    }
}

/// Formats the answers of one request in a protocol.
pub trait Shape: Send {
    /// How its events are written.
    fn framing(&self) -> Framing {
        Framing::Events
    }

    /// The events before any answer.
    fn begin(&mut self, usage: Usage) -> Vec<SseEvent>;

    /// A piece of an answer, as events of a stream.
    fn stream(&mut self, output: Output, usage: Usage) -> Vec<SseEvent>;

    /// The events after all answers.
    fn end(&mut self, usage: Usage) -> Vec<SseEvent>;

    /// An error in the middle of a stream.
    fn fail(&mut self, error: &ApiError) -> Vec<SseEvent> {
        vec![SseEvent::data(&error.body())]
    }

    /// Collects a piece of an answer that is sent as a whole.
    fn collect(&mut self, output: Output);

    /// All answers as one JSON value.
    fn whole(&mut self, usage: Usage) -> Value;
}

/// A request that has been read.
pub struct Parsed {
    /// The request for the model.
    pub generation: Generation,
    /// The format of its answer.
    pub shape: Box<dyn Shape>,
    /// True to send the answer as a stream of events.
    pub stream: bool,
}

/// A unique name: `chatcmpl-...`.
pub(crate) fn unique(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // Each state has its own keys, drawn by the system.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u64(COUNT.fetch_add(1, Ordering::Relaxed));
    let a = hasher.finish();
    hasher.write_u64(a);
    format!("{prefix}{a:016x}{:016x}", hasher.finish())
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| d.as_secs())
}

/// A time in seconds since 1970 as text; one that the calendar does not reach is 1970.
pub(crate) fn rfc3339(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds)
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
        .to_string()
}

/// Refuses text `index` of `field` if it has no token, or more than the model reads.
fn too_long(
    model: &ServedModel,
    field: &str,
    index: usize,
    tokens: &[u32],
) -> Result<(), ApiError> {
    let name = format!("{field}[{index}]");
    let most = model.context() - 1;
    match tokens.len() {
        0 => Err(ApiError::field(
            &name,
            "expected a text of one token or more",
        )),
        n if n > most => Err(ApiError {
            code: Some("context_length_exceeded"),
            ..ApiError::field(&name, format!("expected at most {most} tokens, found {n}"))
        }),
        _ => Ok(()),
    }
}

/// `usage` as OpenAI has it.
pub(crate) fn openai_usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    })
}
