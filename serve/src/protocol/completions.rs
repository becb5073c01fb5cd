//! `POST /v1/completions`: continues text.

use super::chat::finish_reason;
use super::fields::Fields;
use super::streaming::{Told, streaming};
use super::{Parsed, Shape, SseEvent, now, openai_usage, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Generation, Output, Usage};
use crate::model::Model;
use crate::output::{Piece, ReaderOptions};
use nq_runtime::TokenLogprobs;
use nq_runtime::sampler::MOST_LOGPROBS;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most tokens of an answer if the request does not say, as in OpenAI's API.
const DEFAULT_TOKENS: usize = 16;

/// A prompt as text or tokens, alone or in a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub fn parse(model: &Arc<Model>, mut fields: Fields) -> Result<Parsed, ApiError> {
    fields.ignore(&["user"]);
    fields.only("echo", &[json!(false)])?;
    fields.only("suffix", &[json!("")])?;
    let encode = |text: &str| model.tokenizer().encode(text);
    let prompt = match fields.require("prompt")? {
        Prompt::Text(text) => encode(&text)?,
        Prompt::Tokens(tokens) => tokens,
        Prompt::Texts(texts) if texts.len() == 1 => encode(&texts[0])?,
        Prompt::TokenLists(mut lists) if lists.len() == 1 => lists.remove(0),
        _ => {
            let why = "nq serves one prompt a request; `n` asks for several answers to it";
            return Err(ApiError::unsupported("prompt", why));
        }
    };
    if prompt.is_empty() {
        return Err(ApiError::field("prompt", "expected at least one token"));
    }
    let n = fields.count("n", 1, sampling::MOST_ANSWERS)?.unwrap_or(1);
    fields.only("best_of", &[json!(1), json!(n)])?;
    let logprobs = fields.count("logprobs", 0, MOST_LOGPROBS)?;
    let (streams, told) = streaming(&mut fields)?;
    let max_tokens = fields.count("max_tokens", 1, usize::MAX)?;
    let generation = Generation {
        prompt,
        n,
        sampling: sampling::params(&mut fields, model.sampling())?,
        bias: sampling::bias(&mut fields)?,
        logprobs,
        max_tokens: Some(max_tokens.unwrap_or(DEFAULT_TOKENS)),
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        reader: ReaderOptions {
            stop: sampling::stop(&mut fields, "stop")?,
            ..ReaderOptions::default()
        },
        format: None,
    };
    fields.finish()?;
    Ok(Parsed {
        shape: Box::new(Completion {
            model: Arc::clone(model),
            id: unique("cmpl-"),
            created: now(),
            logprobs: logprobs.is_some(),
            told,
            answers: vec![Answer::default(); n],
        }),
        generation,
        stream: streams,
    })
}

/// An answer that is being collected.
#[derive(Clone, Debug, Default)]
struct Answer {
    text: String,
    tokens: Vec<TokenLogprobs>,
    /// Number of characters of the tokens reported so far, for their offsets.
    told: usize,
    finish: Option<&'static str>,
}

/// The formats of this protocol.
struct Completion {
    model: Arc<Model>,
    id: String,
    created: u64,
    logprobs: bool,
    told: Told,
    answers: Vec<Answer>,
}

impl Completion {
    fn frame(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name(),
            "choices": choices,
        })
    }

    fn choice(
        &mut self,
        index: usize,
        text: &str,
        tokens: &[TokenLogprobs],
        finish: Value,
    ) -> Value {
        let logprobs = if self.logprobs {
            self.logprobs(index, tokens)
        } else {
            Value::Null
        };
        json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
    }

    fn logprobs(&mut self, index: usize, tokens: &[TokenLogprobs]) -> Value {
        let bytes = self.model.tokenizer().token_bytes();
        let text = |id: u32| String::from_utf8_lossy(bytes.get(id)).into_owned();
        let (mut texts, mut own, mut offsets, mut top) = (vec![], vec![], vec![], vec![]);
        for token in tokens {
            let written = text(token.token);
            offsets.push(self.answers[index].told);
            self.answers[index].told += written.chars().count();
            texts.push(written);
            own.push(token.logprob.max(-9999.0));
            let best = token
                .top
                .iter()
                .map(|&(id, p)| (text(id), p.max(-9999.0).into()));
            top.push(Value::Object(best.collect::<Map<String, Value>>()));
        }
        json!({
            "tokens": texts, "token_logprobs": own, "text_offset": offsets, "top_logprobs": top,
        })
    }
}

/// The text of pieces: completions have no other kinds.
fn text_of(pieces: Vec<Piece>) -> String {
    let text = |piece| match piece {
        Piece::Text(text) | Piece::Reasoning(text) | Piece::CallArguments { text, .. } => text,
        Piece::CallStart { name, .. } => name,
    };
    pieces.into_iter().map(text).collect()
}

impl Shape for Completion {
    fn begin(&mut self, _: Usage) -> Vec<SseEvent> {
        Vec::new()
    }

    fn stream(&mut self, output: Output, usage: Usage) -> Vec<SseEvent> {
        let finish = match output.end {
            Some(Ok(ending)) => finish_reason(ending).into(),
            _ => Value::Null,
        };
        let text = text_of(output.pieces);
        let choice = self.choice(output.index, &text, &output.logprobs, finish);
        let mut chunk = self.frame(json!([choice]));
        self.told.so_far(&mut chunk, usage);
        vec![SseEvent::data(&chunk)]
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self.told != Told::Never {
            let mut chunk = self.frame(json!([]));
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
        let answer = &mut self.answers[output.index];
        answer.tokens.extend(output.logprobs);
        answer.text += &text_of(output.pieces);
        if let Some(Ok(ending)) = output.end {
            answer.finish = Some(finish_reason(ending));
        }
    }

    fn whole(&mut self, usage: Usage) -> Value {
        let answers = self.answers.clone().into_iter().enumerate();
        let choices: Vec<Value> = answers
            .map(|(i, a)| self.choice(i, &a.text, &a.tokens, a.finish.into()))
            .collect();
        let mut whole = self.frame(choices.into());
        whole["usage"] = openai_usage(usage);
        whole
    }
}
