//! Answers to one prompt, independent of the protocol: the request and its events.

use crate::engine::{Answers, Client, Constraint, Event, Finish, Request};
use crate::error::ApiError;
use crate::grammar::{Format, Start};
use crate::model::Model;
use crate::output::{Piece, Reader, ReaderOptions};
use nq_runtime::{LogitBias, SamplingParams, TokenLogprobs};
use std::sync::Arc;
use std::time::Instant;

/// A request for answers.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Number of answers.
    pub n: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Added to the logits.
    pub bias: LogitBias,
    /// Alternatives to report with log-probabilities; `None`: none are computed.
    pub logprobs: Option<usize>,
    /// Most tokens per answer; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// True: end-of-answer tokens do not end the answer.
    pub ignore_eos: bool,
    /// How the answer's text is split into pieces.
    pub reader: ReaderOptions,
    /// The constraint on the answer, and where in the answer it begins.
    pub format: Option<(Format, Start)>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model ended it.
    Stop,
    /// With a stop string.
    StopString,
    /// With the most tokens requested, or that the context holds.
    Length,
    /// With tool calls.
    ToolCalls,
}

/// An event of one answer.
#[derive(Clone, Debug)]
pub struct Output {
    /// Index of the answer.
    pub index: usize,
    /// Its new pieces.
    pub pieces: Vec<Piece>,
    /// Log-probabilities of its tokens, except those of thinking.
    pub logprobs: Vec<TokenLogprobs>,
    /// The stop string that ended it, if any.
    pub stop_string: Option<String>,
    /// How it ended, if this is its end.
    pub end: Option<Result<Ending, ApiError>>,
}

/// Token counts over all answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens in the prompt.
    pub prompt: usize,
    /// Prompt tokens that were cached, for the first answer.
    pub cached: usize,
    /// Tokens in all answers.
    pub completion: usize,
    /// Tokens of thinking in all answers.
    pub reasoning: usize,
}

/// One of the answers.
struct Choice {
    reader: Reader,
    /// Log-probabilities of tokens whose text is held back.
    logprobs: Vec<TokenLogprobs>,
    over: bool,
}

/// Answers as they come. Dropping it cancels them.
pub struct Stream {
    /// Keeps the model loaded while it answers.
    _model: Arc<Model>,
    answers: Answers,
    choices: Vec<Choice>,
    usage: Usage,
}

/// Sends the request to the model's engine.
///
/// # Errors
/// A format that is not supported; a request that the engine refuses.
pub fn start(
    model: &Arc<Model>,
    generation: &Generation,
    client: Client,
    deadline: Option<Instant>,
) -> Result<Stream, ApiError> {
    let constraint = match &generation.format {
        None => None,
        Some((format, start)) => {
            let compiled = model.grammars()?.compile(format, *start);
            Some(compiled.map_err(|why| ApiError::field("response_format", why))?)
        }
    };
    let past = generation
        .bias
        .as_slice()
        .iter()
        .find(|b| b.0 as usize >= model.vocab());
    if let Some((token, _)) = past {
        let what = format!("expected token ids below {}, found {token}", model.vocab());
        return Err(ApiError::field("logit_bias", what));
    }
    let room = model.context().saturating_sub(generation.prompt.len());
    let request = |index: usize| Request {
        prompt: generation.prompt.clone(),
        sampling: generation.sampling,
        stream: index as u64,
        bias: generation.bias.clone(),
        logprobs: generation.logprobs,
        max_tokens: generation.max_tokens.unwrap_or(room.max(1)),
        stop: if generation.ignore_eos {
            Vec::new()
        } else {
            model.stop().to_vec()
        },
        row: None,
        constraint: constraint
            .clone()
            .map(|c| Box::new(c) as Box<dyn Constraint>),
        client,
        deadline,
    };
    let requests = (0..generation.n).map(request).collect();
    let choice = || Choice {
        reader: Reader::new(model.tokenizer(), &generation.reader),
        logprobs: Vec::new(),
        over: false,
    };
    Ok(Stream {
        _model: Arc::clone(model),
        answers: model.engine().submit(requests)?,
        choices: (0..generation.n).map(|_| choice()).collect(),
        usage: Usage {
            prompt: generation.prompt.len(),
            ..Usage::default()
        },
    })
}

impl Stream {
    /// The next event; `None` once all answers have ended.
    pub async fn next(&mut self) -> Option<Output> {
        while self.choices.iter().any(|c| !c.over) {
            let (index, event) = self.answers.next().await?;
            if let Some(output) = self.take(index, event) {
                return Some(output);
            }
        }
        None
    }

    /// Token counts so far.
    pub fn usage(&self) -> Usage {
        Usage {
            reasoning: self
                .choices
                .iter()
                .map(|c| c.reader.reasoning_tokens())
                .sum(),
            ..self.usage
        }
    }

    fn take(&mut self, index: usize, event: Event) -> Option<Output> {
        let choice = &mut self.choices[index];
        if choice.over {
            return None;
        }
        let mut pieces = Vec::new();
        let end = match event {
            Event::Started { cached } => {
                if index == 0 {
                    self.usage.cached = cached;
                }
                return None;
            }
            Event::Row(_) => return None,
            Event::Token { id, logprobs } => {
                self.usage.completion += 1;
                let thinking = choice.reader.push(id, &mut pieces);
                let stopped = choice.reader.stopped_by().is_some();
                choice.logprobs.extend(logprobs.filter(|_| !thinking));
                if stopped {
                    self.answers.cancel(index);
                }
                stopped.then_some(Ok(Ending::StopString))
            }
            Event::Finished(finish) => {
                choice.reader.finish(&mut pieces);
                Some(match finish {
                    Finish::Stop(_) => {
                        self.usage.completion += 1;
                        Ok(Ending::Stop)
                    }
                    Finish::Cancelled => Ok(Ending::Stop),
                    Finish::Length | Finish::Read => Ok(Ending::Length),
                    Finish::Failed(failure) => Err(failure.into()),
                })
            }
        };
        choice.over = end.is_some();
        let end = end.map(|end| match end {
            Ok(Ending::Stop | Ending::StopString) if choice.reader.has_calls() => {
                Ok(Ending::ToolCalls)
            }
            end => end,
        });
        if pieces.is_empty() && end.is_none() {
            return None;
        }
        Some(Output {
            index,
            pieces,
            logprobs: std::mem::take(&mut choice.logprobs),
            stop_string: choice.reader.stopped_by().map(str::to_owned),
            end,
        })
    }
}
