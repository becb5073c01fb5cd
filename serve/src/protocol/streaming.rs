//! `stream` and `stream_options` of OpenAI's chat and completions.

use super::fields::Fields;
use super::{SseEvent, openai_usage};
use crate::error::ApiError;
use crate::generation::Usage;
use serde_json::Value;

/// Reads `stream` and `stream_options`.
///
/// # Errors
/// Options that nq does not serve.
pub(crate) fn streaming(fields: &mut Fields) -> Result<(bool, Told), ApiError> {
    let streams = fields.take("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options", "stream_options")? else {
        return Ok((streams, Told::Never));
    };
    let last = options.take("include_usage")?.unwrap_or(false);
    let each = options.take("continuous_usage_stats")?.unwrap_or(false);
    options.finish()?;
    let told = match (last, each) {
        (false, false) => Told::Never,
        (true, false) => Told::Last,
        (true, true) => Told::Always,
        (false, true) => {
            let what = "expected it with include_usage";
            return Err(ApiError::field(
                "stream_options.continuous_usage_stats",
                what,
            ));
        }
    };
    Ok((streams, told))
}

/// Where a stream reports the tokens used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Nowhere.
    Never,
    /// In a separate chunk at the end (`include_usage`).
    Last,
    /// At the end, and the count so far in every chunk (vLLM's `continuous_usage_stats`).
    Always,
}

impl Told {
    /// Writes the usage so far into a chunk with a part of an answer.
    pub(crate) fn so_far(self, chunk: &mut Value, usage: Usage) {
        match self {
            Told::Never => {}
            Told::Last => chunk["usage"] = Value::Null,
            Told::Always => chunk["usage"] = openai_usage(usage),
        }
    }

    /// The events at the end of a stream: `chunk` with the usage, where it is asked for, and that this was all.
    pub(crate) fn at_end(self, mut chunk: Value, usage: Usage) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self != Told::Never {
            chunk["usage"] = openai_usage(usage);
            events.push(SseEvent::data(&chunk));
        }
        events.push(SseEvent {
            name: None,
            data: "[DONE]".into(),
        });
        events
    }
}
