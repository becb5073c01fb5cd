//! What a chat is asked, and the answer as JSON.

use nq_llm::{Chat, Message, Piece, integers};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Value, json};
use std::ops::ControlFlow;

/// What is asked for: a chat's messages as JSON, or the tokens of a text to continue.
#[derive(FromPyObject)]
pub(crate) enum PromptArgument {
    #[pyo3(transparent)]
    Messages(String),
    #[pyo3(transparent)]
    Tokens(Vec<u32>),
}

/// [`PromptArgument`], read.
pub(crate) enum Question {
    Messages(Vec<Message>),
    Tokens(Vec<u32>),
}

impl Question {
    pub(crate) fn read(request: PromptArgument) -> PyResult<Self> {
        Ok(match request {
            PromptArgument::Messages(text) => Question::Messages(messages(&text)?),
            PromptArgument::Tokens(tokens) => Question::Tokens(tokens),
        })
    }

    /// The answer as JSON; `each` gets its text in pieces.
    pub(crate) fn answer(
        &self,
        chat: &mut Chat,
        mut each: impl FnMut(&str),
    ) -> nq_llm::Result<String> {
        let answer = match self {
            Question::Messages(messages) => chat.answer(messages, each),
            Question::Tokens(tokens) => chat.continue_tokens(tokens, |piece| {
                if let Piece::Text(text) = piece {
                    each(text);
                }
                ControlFlow::Continue(())
            }),
        }?;
        let logprob = |l: &nq_llm::TokenLogprobs| json!([l.token, l.logprob, l.top]);
        let call = |c: &nq_llm::Call| json!({"name": c.name, "arguments": c.arguments});
        let stats = answer.stats;
        let usage = json!({
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.reused_tokens,
            "completion_tokens": stats.tokens,
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted,
            "first_token_seconds": stats.first_token.as_secs_f64(),
            "decode_seconds": stats.decode.as_secs_f64(),
        });
        let answer = json!({
            "whole": answer.whole(),
            "thinking": answer.thinking,
            "text": answer.text,
            "calls": answer.calls.iter().map(call).collect::<Value>(),
            "tokens": answer.tokens,
            "logprobs": answer.logprobs.iter().map(logprob).collect::<Value>(),
            "stop_reason": answer.end.name(),
            "stop_text": answer.stop_text,
            "usage": usage,
            "message": answer.message,
        });
        Ok(answer.to_string())
    }
}

/// The error of an argument that is not the JSON that it should be.
pub(crate) fn wrong(what: &'static str) -> impl Fn(serde_json::Error) -> PyErr {
    move |e| PyValueError::new_err(format!("{what}: {e}"))
}

pub(crate) fn messages(text: &str) -> PyResult<Vec<Message>> {
    serde_json::from_slice(&integers::marked(text.as_bytes())).map_err(wrong("messages"))
}
