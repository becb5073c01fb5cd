//! Answers to one prompt, independent of the protocol: the request and its events.

use crate::engine::{Answers, Client, Event, Finish, Refused, Request};
use crate::error::ApiError;
use crate::images::SeenImage;
use crate::model::ServedModel;
use crate::names::Names;
use nq_answers::grammar::{Conformant, Format, Start};
use nq_answers::output::{ContentTokens, Piece, Reader, ReaderOptions};
use nq_answers::{Constraint, ThinkingBudget};
use nq_runtime::{LogitBias, PlacedImage, SamplingParams, TokenLogprobs};
use std::sync::Arc;
use std::time::Instant;

/// A request for answers.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The prompts, at least one.
    pub prompts: Vec<Vec<u32>>,
    /// The images of the first prompt.
    pub images: Vec<SeenImage>,
    /// Index of the first token of each.
    pub places: Vec<usize>,
    /// The images as the text model reads them, once `encode` was called.
    pub encoded: Vec<PlacedImage>,
    /// Number of answers to each prompt.
    pub n: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Added to the logits.
    pub bias: LogitBias,
    /// Alternatives to report with log-probabilities; `None`: none are computed.
    pub logprobs: Option<usize>,
    /// Most tokens per answer; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// True: the prompts' own tokens are scored, all but the first.
    pub scores_prompt: bool,
    /// True: end-of-answer tokens do not end the answer.
    pub ignore_eos: bool,
    /// How the answer's text is split into pieces.
    pub reader: ReaderOptions,
    /// The constraint on the answer, and where in the answer it begins.
    pub format: Option<(Format, Start)>,
    /// Tokens that the format has read already: the answer goes on behind them.
    pub begun: Vec<u32>,
    /// The most that is thought.
    pub thinking: Option<ThinkingBudget>,
    /// What errors call parts of the request.
    pub names: Names,
    /// What errors call the schemas of the tools that the format may call.
    pub schemas: Vec<String>,
}

impl Generation {
    /// One answer to no prompt yet, with the model's own settings.
    pub(crate) fn of(model: &ServedModel) -> Self {
        Generation {
            prompts: Vec::new(),
            images: Vec::new(),
            places: Vec::new(),
            encoded: Vec::new(),
            n: 1,
            sampling: model.sampling(),
            bias: LogitBias::default(),
            logprobs: None,
            max_tokens: None,
            scores_prompt: false,
            ignore_eos: false,
            reader: ReaderOptions::default(),
            format: None,
            begun: Vec::new(),
            thinking: None,
            names: Names {
                prompt: "messages",
                format: "response_format",
            },
            schemas: Vec::new(),
        }
    }

    /// Has the model's tower make rows of the images, until `stop` says so: slow work, beside which the engine's goes on.
    ///
    /// # Errors
    /// An image that cannot be decoded, by its place; errors of the tower.
    pub(crate) fn encode(
        &mut self,
        model: &ServedModel,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), ApiError> {
        let Some(sight) = model.sight() else {
            return Ok(());
        };
        let both = self.images.iter().zip(&self.places);
        let placed = both.map(|(seen, &at)| match sight.rows(&seen.image, stop) {
            Ok(image) => Ok(PlacedImage { at, image }),
            Err(nq_answers::Error::Runtime(e)) => Err(e.into()),
            Err(e) => Err(ApiError::field(&seen.place, e.to_string())),
        });
        self.encoded = placed.collect::<Result<_, ApiError>>()?;
        Ok(())
    }
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
    /// Log-probabilities of the tokens of their text; of completions, which are nothing but text, of all tokens.
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
struct AnswerChoice {
    reader: Reader,
    /// Log-probabilities of tokens whose text is held back.
    logprobs: Vec<TokenLogprobs>,
    /// Finds the tokens of its text, where an answer is more than text.
    content: Option<ContentTokens>,
    over: bool,
    /// True if no token was asked for: the prompt is computed alone.
    empty: bool,
    /// Tokens of the prompt that are still to be scored.
    given: usize,
    /// Tokens that end it, if the engine does not look for them.
    ends: Vec<u32>,
}

/// The constraint to given tokens; what follows is free.
struct Given {
    tokens: std::vec::IntoIter<u32>,
    mask: Vec<u32>,
}

impl Given {
    fn new(tokens: &[u32], vocab: usize) -> Self {
        Given {
            tokens: Vec::from(tokens).into_iter(),
            mask: vec![0; vocab.div_ceil(32)],
        }
    }
}

impl Constraint for Given {
    fn mask(&mut self) -> Result<Option<&[u32]>, String> {
        let Some(&token) = self.tokens.as_slice().first() else {
            return Ok(None);
        };
        self.mask.fill(0);
        self.mask[token as usize / 32] = 1 << (token % 32);
        Ok(Some(&self.mask))
    }

    fn accept(&mut self, _: u32) -> Result<(), String> {
        self.tokens.next();
        Ok(())
    }
}

/// Checks that the prompts' own tokens can be scored.
///
/// # Errors
/// Tokens past the vocabulary, a prompt that does not fit, one of a single token without an answer; penalties, which
/// would count its tokens as written.
fn can_be_scored(model: &ServedModel, generation: &Generation) -> Result<(), ApiError> {
    let (names, ctx) = (generation.names, model.context());
    let answer = generation.max_tokens.unwrap_or(1);
    for prompt in &generation.prompts {
        if let Some(token) = prompt.iter().find(|&&t| t as usize >= model.vocab()) {
            let what = format!("expected token ids below {}, found {token}", model.vocab());
            return Err(ApiError::field(names.prompt, what));
        }
        let prompt = prompt.len();
        if prompt + answer.min(1) > ctx {
            return Err(names.refused(Refused::ContextFull { prompt, ctx }));
        }
        if prompt + answer < 2 {
            let what = "expected two tokens or more with max_tokens 0, found one";
            return Err(ApiError::field(names.prompt, what));
        }
    }
    let sampling = &generation.sampling;
    if sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0 {
        let why = "nq scores no prompt with frequency_penalty or presence_penalty";
        return Err(ApiError::unsupported("echo", why));
    }
    Ok(())
}

/// Answers as they come. Dropping it cancels them.
pub(crate) struct AnswerStream {
    /// Keeps the model loaded while it answers.
    _model: Arc<ServedModel>,
    answers: Answers,
    choices: Vec<AnswerChoice>,
    usage: Usage,
}

/// Sends the request to the model's engine.
///
/// # Errors
/// A format that is not supported; a request that the engine refuses.
pub(crate) fn start(
    model: &Arc<ServedModel>,
    generation: &Generation,
    client: Client,
    deadline: Option<Instant>,
) -> Result<AnswerStream, ApiError> {
    let constraint = match &generation.format {
        None => None,
        Some((format, start)) => Some(constraint(model, generation, format, *start)?),
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
    // Before there are as many copies as answers. What is as long as the context may still be scored.
    let ctx = model.context();
    if let Some(long) = generation.prompts.iter().find(|p| p.len() > ctx) {
        let prompt = long.len();
        model.engine().metrics().refuse("context_full");
        return Err(generation
            .names
            .refused(Refused::ContextFull { prompt, ctx }));
    }
    let n = generation.n;
    let ends: &[u32] = if generation.ignore_eos {
        &[]
    } else {
        model.stop()
    };
    if generation.scores_prompt {
        can_be_scored(model, generation)?;
    }
    let room = |index: usize| {
        model
            .context()
            .saturating_sub(generation.prompts[index / n].len())
    };
    // A prompt is scored as an answer to its first token that can only be the rest of it.
    let scored = |index: usize| match generation.scores_prompt {
        true => generation.prompts[index / n].split_at(1),
        false => (generation.prompts[index / n].as_slice(), &[][..]),
    };
    let request = |index: usize| Request {
        prompt: scored(index).0.to_vec(),
        images: match index < n {
            true => generation.encoded.clone(),
            false => Vec::new(),
        },
        sampling: generation.sampling,
        stream: (index % n) as u64,
        bias: generation.bias.clone(),
        logprobs: generation.logprobs,
        // The engine draws at least one.
        max_tokens: (generation.max_tokens.unwrap_or(room(index)) + scored(index).1.len()).max(1),
        stop: if generation.scores_prompt {
            // They may be in the prompt: the stream looks for them.
            Vec::new()
        } else {
            ends.to_vec()
        },
        row: None,
        constraint: match &constraint {
            None if generation.scores_prompt => {
                Some(Box::new(Given::new(scored(index).1, model.vocab())))
            }
            None => None,
            Some(c) => Some(Box::new(c.clone()) as Box<dyn Constraint>),
        },
        thinking: generation.thinking.clone(),
        adapters: model.adapters().to_vec(),
        client,
        deadline,
    };
    let answers = n * generation.prompts.len();
    let requests = (0..answers).map(request).collect();
    let choice = |index: usize| AnswerChoice {
        reader: Reader::new(model.tokenizer(), &generation.reader),
        logprobs: Vec::new(),
        content: (generation.logprobs.and(generation.reader.thinking.as_ref()))
            .map(|_| ContentTokens::new(model.tokenizer())),
        over: false,
        empty: generation.max_tokens == Some(0) && !generation.scores_prompt,
        given: scored(index).1.len(),
        ends: match generation.scores_prompt {
            true => ends.to_vec(),
            false => Vec::new(),
        },
    };
    Ok(AnswerStream {
        _model: Arc::clone(model),
        answers: (model.engine().submit(requests)).map_err(|e| generation.names.refused(e))?,
        choices: (0..answers).map(choice).collect(),
        usage: Usage {
            prompt: generation.prompts.iter().map(Vec::len).sum(),
            ..Usage::default()
        },
    })
}

/// The constraint of a request, behind what the answer begins with.
///
/// # Errors
/// A format that cannot be served, by the name of its field.
fn constraint(
    model: &ServedModel,
    generation: &Generation,
    format: &Format,
    start: Start,
) -> Result<Conformant, ApiError> {
    let grammars = model.text().grammars().map_err(ApiError::internal)?;
    let mut compiled = grammars.compile(format, start).map_err(|why| {
        let Format::Calls { tools, .. } = format else {
            return ApiError::field(generation.names.format, why);
        };
        // Which of the tools it was.
        for (tool, place) in tools.iter().zip(&generation.schemas) {
            let alone = Format::Calls {
                tools: vec![tool.clone()],
                several: false,
            };
            if let Err(why) = grammars.compile(&alone, start) {
                return ApiError::field(place, why);
            }
        }
        ApiError::field("tools", why)
    })?;
    for &token in &generation.begun {
        compiled.accept(token).map_err(|why| {
            let what = format!("what the answer begins with does not fit the format: {why}");
            ApiError::field(generation.names.prompt, what)
        })?;
    }
    Ok(compiled)
}

impl AnswerStream {
    /// The next event; `None` once all answers have ended.
    pub(crate) async fn next(&mut self) -> Option<Output> {
        while self.choices.iter().any(|c| !c.over) {
            let (index, event) = self.answers.next().await?;
            if let Some(output) = self.take(index, event) {
                return Some(output);
            }
        }
        None
    }

    /// Token counts so far.
    pub(crate) fn usage(&self) -> Usage {
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
            Event::Token { .. } | Event::Finished(Finish::Stop(_)) if choice.empty => {
                self.answers.cancel(index);
                Some(Ok(Ending::Length))
            }
            Event::Token { logprobs, .. } if choice.given > 0 => {
                choice.given -= 1;
                choice.logprobs.extend(logprobs);
                return None;
            }
            Event::Token { id, .. } if choice.ends.contains(&id) => {
                self.usage.completion += 1;
                self.answers.cancel(index);
                choice.reader.finish(false, &mut pieces);
                Some(Ok(Ending::Stop))
            }
            Event::Token { id, logprobs } => {
                self.usage.completion += 1;
                let thinking = choice.reader.push(id, &mut pieces);
                let stopped = choice.reader.stopped_by().is_some() || choice.reader.is_over();
                match (&mut choice.content, logprobs) {
                    (Some(content), Some(logprobs)) if !thinking => content.push(logprobs),
                    (None, logprobs) => choice.logprobs.extend(logprobs),
                    _ => {}
                }
                if stopped {
                    self.answers.cancel(index);
                }
                stopped.then_some(Ok(Ending::StopString))
            }
            Event::Finished(finish) => {
                let cut = !matches!(finish, Finish::Stop(_) | Finish::Cancelled);
                choice.reader.finish(cut, &mut pieces);
                choice.content.iter_mut().for_each(ContentTokens::finish);
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
        if let Some(content) = &mut choice.content {
            choice.logprobs.extend(content.of_text(&pieces));
        }
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
