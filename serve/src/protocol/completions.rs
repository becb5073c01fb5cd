//! `POST /v1/completions`: continues text.

use super::chat::finish_reason;
use super::fields::Fields;
use super::streaming::{Told, streaming};
use super::{Parsed, Shape, SseEvent, now, openai_usage, sampling, unique};
use crate::error::ApiError;
use crate::generation::{Generation, Output, Usage};
use crate::model::ServedModel;
use crate::names::Names;
use nq_answers::output::{Piece, ReaderOptions};
use nq_runtime::TokenLogprobs;
use nq_runtime::sampler::MOST_LOGPROBS;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most tokens of an answer if the request does not say, as in OpenAI's API.
const DEFAULT_TOKENS: usize = 16;

/// Most answers of one request, over all its prompts.
const MOST_PROMPTS: usize = 128;

const NAMES: Names = Names {
    prompt: "prompt",
    format: "response_format",
};

/// A prompt as text or tokens, or a list of either.
#[derive(Deserialize)]
#[serde(untagged)]
enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// Reads a request.
///
/// # Errors
/// An invalid or unsupported field, by name.
pub(crate) fn parse(model: &Arc<ServedModel>, fields: Fields) -> Result<Parsed, ApiError> {
    let mut fields = fields.under("completions")?;
    let added: bool = fields.take("add_special_tokens")?.unwrap_or(true);
    let encode = |text: &String| {
        let (tokenizer, most) = (model.tokenizer(), model.counted());
        let tokens = match added {
            true => tokenizer.encode_whole_within(text, most),
            false => tokenizer.encode_within(text, most),
        };
        tokens.map_err(|e| NAMES.read(e, model.context()))
    };
    let given: Value = fields.require("prompt")?;
    let given = PromptInput::deserialize(given).map_err(|_| {
        let what = "expected a text, a list of texts, token ids, or a list of lists of token ids";
        ApiError::field("prompt", what)
    })?;
    let prompts = match given {
        PromptInput::Text(text) => vec![encode(&text)?],
        PromptInput::Tokens(tokens) => vec![tokens],
        PromptInput::Texts(texts) if texts.len() > MOST_PROMPTS => vec![Vec::new(); texts.len()],
        PromptInput::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        PromptInput::TokenLists(lists) => lists,
    };
    let n = fields.count("n", 1, sampling::MOST_ANSWERS)?.unwrap_or(1);
    if prompts.len() * n > MOST_PROMPTS {
        let found = prompts.len() * n;
        let what = format!("expected at most {MOST_PROMPTS} answers to all prompts, found {found}");
        return Err(ApiError::field("prompt", what));
    }
    if let Some(i) = prompts.iter().position(Vec::is_empty) {
        let name = if prompts.len() == 1 {
            "prompt".to_owned()
        } else {
            format!("prompt[{i}]")
        };
        return Err(ApiError::field(&name, "expected at least one token"));
    }
    if let Some(best) = fields
        .count("best_of", 1, usize::MAX)?
        .filter(|&best| best != n)
    {
        let why = format!("nq serves as many as n, which is {n}, found {best}");
        return Err(ApiError::unsupported("best_of", &why));
    }
    let logprobs = fields.count("logprobs", 0, MOST_LOGPROBS)?;
    let echo: bool = fields.take("echo")?.unwrap_or(false);
    // What is asked for is then the prompt's scores alone.
    let no_answer = echo && fields.peek("max_tokens").as_f64() == Some(0.0);
    let (streams, told) = streaming(&mut fields)?;
    let default = (!fields.is_unlimited("max_tokens")).then_some(DEFAULT_TOKENS);
    let max_tokens = match no_answer {
        true => fields.count("max_tokens", 0, 0)?,
        false => fields.limit("max_tokens", 1)?,
    };
    let texts: Vec<String> = match echo {
        true => prompts.iter().map(|p| shown(model, p)).collect(),
        false => Vec::new(),
    };
    let echo = echo.then(|| Echo {
        n,
        firsts: prompts.iter().map(|p| p[0]).collect(),
        texts,
    });
    let answers = vec![CompletionAnswer::default(); n * prompts.len()];
    let generation = Generation {
        prompts,
        n,
        sampling: sampling::params(&mut fields, model.sampling())?,
        bias: sampling::bias(&mut fields)?,
        logprobs,
        scores_prompt: echo.is_some() && (logprobs.is_some() || no_answer),
        max_tokens: max_tokens.or(default),
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        reader: ReaderOptions {
            stop: sampling::stop(&mut fields, "stop")?,
            ..ReaderOptions::default()
        },
        names: NAMES,
        ..Generation::of(model)
    };
    fields.finish()?;
    Ok(Parsed {
        shape: Box::new(Completion {
            model: Arc::clone(model),
            id: unique("cmpl-"),
            created: now(),
            logprobs: logprobs.is_some(),
            told,
            echo,
            answers,
        }),
        generation,
        stream: streams,
    })
}

/// An answer that is being collected.
#[derive(Clone, Debug, Default)]
struct CompletionAnswer {
    text: String,
    tokens: Vec<TokenLogprobs>,
    /// The text of the tokens reported so far, for their offsets: a token within a character is where
    /// that begins.
    told: Characters,
    /// True once the prompt's text was told, and once its first token was.
    echoed: bool,
    begun: bool,
    finish: Option<&'static str>,
}

/// The formats of this protocol.
struct Completion {
    model: Arc<ServedModel>,
    id: String,
    created: u64,
    logprobs: bool,
    told: Told,
    /// The prompts, if the answers begin with them.
    echo: Option<Echo>,
    answers: Vec<CompletionAnswer>,
}

/// The prompts of answers that begin with them.
struct Echo {
    /// Answers to each.
    n: usize,
    texts: Vec<String>,
    /// Their first tokens, which nothing precedes: they have no log-probabilities.
    firsts: Vec<u32>,
}

/// The text of a prompt's tokens.
fn shown(model: &ServedModel, prompt: &[u32]) -> String {
    let bytes = model.tokenizer().token_bytes();
    let bytes: Vec<u8> = prompt.iter().flat_map(|&t| bytes.get(t)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
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

    /// The text of pieces, behind the prompt if they are the first.
    fn text(&mut self, index: usize, pieces: Vec<Piece>) -> String {
        let told = std::mem::replace(&mut self.answers[index].echoed, true);
        let prompt = self.echo.as_ref().filter(|_| !told);
        let prompt = prompt.map_or("", |e| e.texts[index / e.n].as_str());
        prompt.to_owned() + &text_of(pieces)
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
        let (mut texts, mut own, mut offsets, mut top) = (vec![], vec![], vec![], vec![]);
        let first = (self.echo.as_ref())
            .filter(|_| !std::mem::replace(&mut self.answers[index].begun, true));
        if let Some(&id) = first.map(|e| &e.firsts[index / e.n]) {
            texts.push(key(bytes.get(id)));
            offsets.push(0);
            own.push(Value::Null);
            top.push(Value::Null);
            self.answers[index].told.push(bytes.get(id));
        }
        for token in tokens {
            let told = &mut self.answers[index].told;
            offsets.push(told.next(bytes.get(token.token)));
            told.push(bytes.get(token.token));
            texts.push(key(bytes.get(token.token)));
            own.push(token.logprob.max(-9999.0).into());
            let best = token
                .top
                .iter()
                .map(|&(id, p)| (key(bytes.get(id)), p.max(-9999.0).into()));
            top.push(Value::Object(best.collect::<Map<String, Value>>()));
        }
        json!({
            "tokens": texts, "token_logprobs": own, "text_offset": offsets, "top_logprobs": top,
        })
    }
}

/// A token's text or, if it is a part of a character, its bytes as OpenAI writes them: texts of parts would
/// be the same for all.
fn key(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| {
            format!("{text}\\x{byte:02x}")
        }),
    }
}

/// Counts the characters of a text that comes in pieces of bytes.
#[derive(Clone, Debug, Default)]
struct Characters {
    whole: usize,
    /// The beginning of a character.
    rest: Vec<u8>,
}

impl Characters {
    /// Where `bytes` begin: within the character that they go on with, or behind what is none.
    fn next(&self, bytes: &[u8]) -> usize {
        let goes_on = bytes.first().is_some_and(|b| b & 0xc0 == 0x80);
        self.whole + usize::from(!self.rest.is_empty() && !goes_on)
    }

    fn push(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        while let Err(e) = std::str::from_utf8(&self.rest) {
            let before = e.valid_up_to();
            self.whole += String::from_utf8_lossy(&self.rest[..before])
                .chars()
                .count();
            // What is no character is shown as one.
            let wrong = e.error_len();
            self.whole += usize::from(wrong.is_some());
            self.rest.drain(..before + wrong.unwrap_or(0));
            if wrong.is_none() {
                return;
            }
        }
        self.whole += String::from_utf8_lossy(&self.rest).chars().count();
        self.rest.clear();
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
        let text = self.text(output.index, output.pieces);
        let choice = self.choice(output.index, &text, &output.logprobs, finish);
        let mut chunk = self.frame(json!([choice]));
        self.told.so_far(&mut chunk, usage);
        vec![SseEvent::data(&chunk)]
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        self.told.at_end(self.frame(json!([])), usage)
    }

    fn collect(&mut self, output: Output) {
        let text = self.text(output.index, output.pieces);
        let answer = &mut self.answers[output.index];
        answer.tokens.extend(output.logprobs);
        answer.text += &text;
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
