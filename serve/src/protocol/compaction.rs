//! `POST /v1/responses/compact`: a conversation in short. The user's messages stay as they are; what else was said and
//! done becomes a summary, which the model writes and later requests bring back as an item of type `compaction`.

use super::chat::{ChatRequest, render};
use super::fields::Fields;
use super::items::{conversation, listed, read_input, summary_content};
use super::tools::Tools;
use super::{Parsed, Shape, SseEvent, now, sampling, thinking, unique};
use crate::error::ApiError;
use crate::generation::{Generation, Output, Usage};
use crate::model::ServedModel;
use crate::names::Names;
use nq_answers::ToolChoice;
use nq_answers::output::Piece;
use nq_runtime::Message;
use serde_json::{Value, json};
use std::sync::Arc;

const NAMES: Names = Names {
    prompt: "input",
    format: "text.format.schema",
};

/// What the model is asked for.
const ASK: &str = "Summarize our conversation for someone who goes on with it and has my messages alone: what was \
                   found, decided and done, the names and values that matter, and what is left to do. Write nothing \
                   but the summary.";

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub(crate) fn parse(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
    let mut fields = fields.under("compact")?;
    let reading = Arc::clone(fields.reading());
    let previous: Option<String> = fields.take("previous_response_id")?;
    let input: Option<Value> = fields.take("input")?;
    let input = input.unwrap_or_else(|| json!([]));
    let items = conversation(previous.as_deref(), input, &reading)?;
    let instructions: Option<String> = fields.take("instructions")?;
    let mut messages: Vec<Message> = Vec::new();
    messages.extend(instructions.map(|text| Message::new("system", text)));
    read_input(&items, &reading, &mut messages)?;
    messages.push(Message::new("user", ASK));
    if fields.take::<bool>("stream")?.unwrap_or(false) {
        let why = "nq sends a conversation in short as a whole";
        return Err(ApiError::unsupported("stream", why));
    }
    let chat = ChatRequest {
        messages,
        tools: Tools::default(),
        choice: ToolChoice::None,
        several_calls: false,
        thinking: thinking::read(&mut fields)?,
        format: None,
        continues: false,
        reading,
    };
    let partial = Generation {
        sampling: sampling::params(&mut fields, model.sampling())?,
        names: NAMES,
        ..Generation::of(model)
    };
    fields.finish()?;
    let id = unique("resp_");
    let values = items.iter().enumerate();
    let values = values.map(|(i, item)| listed(item, &id, i));
    Ok(Parsed {
        generation: render(model, chat, partial)?,
        shape: Box::new(Compaction {
            kept: values.filter(|item| item["role"] == "user").collect(),
            id,
            summary: String::new(),
        }),
        stream: false,
    })
}

/// The format of the answer.
struct Compaction {
    id: String,
    /// The user's messages.
    kept: Vec<Value>,
    summary: String,
}

impl Shape for Compaction {
    fn begin(&mut self, _: Usage) -> Vec<SseEvent> {
        Vec::new()
    }

    fn stream(&mut self, output: Output, _: Usage) -> Vec<SseEvent> {
        self.collect(output);
        Vec::new()
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        vec![SseEvent::data(&self.whole(usage))]
    }

    fn collect(&mut self, output: Output) {
        for piece in output.pieces {
            if let Piece::Text(text) = piece {
                self.summary += &text;
            }
        }
    }

    fn whole(&mut self, usage: Usage) -> Value {
        let content = summary_content(self.summary.trim());
        let mut output = std::mem::take(&mut self.kept);
        output.push(json!({
            "type": "compaction", "id": unique("cmp_"), "encrypted_content": content,
        }));
        json!({
            "id": self.id, "object": "response.compaction", "created_at": now(), "output": output,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        })
    }
}
