//! The loop from a prompt to an answer, of one sequence of a session.

use crate::chat::Asked;
use crate::error::{Error, Result};
use crate::hold::{Constraint, Hold};
use crate::output::{Piece, Reader, completed};
use crate::text::ModelText;
use nq_runtime::generate::resume;
use nq_runtime::{
    GenerationLimits, Message, Sampler, SamplingParams, Sequence, Session, Stats, StopReason,
    TokenLogprobs,
};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// How an answer's tokens are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Drawing<'a> {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Selects one of the seed's independent streams of random numbers.
    pub stream: u64,
    /// Alternatives to report with log-probabilities; `None`: none are computed.
    pub logprobs: Option<usize>,
    /// Most tokens.
    pub max_tokens: usize,
    /// Ends the answer once it is set.
    pub interrupt: &'a AtomicBool,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// For this reason of generation.
    Generated(StopReason),
    /// With a stop text.
    Text,
    /// With the one call that it may make.
    Call,
}

impl End {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            End::Generated(StopReason::Eos(_)) => "eos",
            End::Generated(StopReason::MaxTokens) => "max_tokens",
            End::Generated(StopReason::ContextFull) => "context_full",
            End::Generated(StopReason::Interrupted) => "interrupted",
            End::Text => "stop_text",
            End::Call => "call",
        }
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Name of the tool.
    pub name: String,
    /// Its arguments as JSON text, which is not whole if the answer was cut off in it.
    pub arguments: String,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What was thought, without its tags.
    pub thinking: String,
    /// The text of the answer: no thinking, no calls.
    pub text: String,
    /// Calls of tools.
    pub calls: Vec<Call>,
    /// Its tokens without the one that ended it: thinking, calls and stop texts included.
    pub tokens: Vec<u32>,
    /// Log-probabilities, if they were asked for, of the tokens that were drawn, the one that ended it included.
    pub logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub end: End,
    /// The stop text that ended it, if one did.
    pub stop_text: Option<String>,
    /// Counts and times.
    pub stats: Stats,
    /// The answer as a message of the chat.
    pub message: Message,
}

impl Answer {
    /// The thinking, between `<think>` and `</think>`, and the text.
    pub fn whole(&self) -> String {
        match (self.thinking.as_str(), self.text.as_str()) {
            ("", text) => text.to_owned(),
            (thinking, "") if self.calls.is_empty() => format!("<think>\n{thinking}"),
            (thinking, text) => format!("<think>\n{thinking}\n</think>\n\n{text}"),
        }
    }
}

/// Receives an answer's pieces; it may break the answer off.
pub type OnPiece<'e> = dyn FnMut(&Piece) -> ControlFlow<()> + 'e;

/// An answer that is being drawn.
pub struct Answering<'m> {
    model: &'m ModelText,
    drawing: Drawing<'m>,
    sampler: Sampler,
    hold: Hold,
    begun: Instant,
    /// The prompt's text, where thinking is told apart.
    prompt: Option<String>,
    read: Read,
}

/// What was read of an answer.
struct Read {
    reader: Reader,
    answer: Answer,
}

impl<'m> Answering<'m> {
    /// An answer of which nothing has been drawn yet.
    ///
    /// # Errors
    /// Sampling settings out of range; [`Error::Format`] for a format that no answer can be held to.
    pub fn new(model: &'m ModelText, asked: &Asked, drawing: Drawing<'m>) -> Result<Self> {
        let constraint = |(format, start)| {
            let mut compiled = model.constraint(format, start)?;
            (asked.prompt.begun.iter()).try_for_each(|&token| compiled.accept(token))?;
            Ok(Box::new(compiled) as Box<dyn Constraint>)
        };
        let format = asked.format.as_ref();
        let constraint = format.map(|(format, start)| constraint((format, *start)));
        let constraint = constraint.transpose().map_err(Error::Format)?;
        let mut sampler = Sampler::new(drawing.sampling, drawing.stream)?;
        sampler.set_logprobs(drawing.logprobs)?;
        Ok(Answering {
            model,
            drawing,
            sampler,
            hold: Hold::new(constraint, asked.thinking.clone()),
            begun: Instant::now(),
            prompt: asked.reader.thinking.clone(),
            read: Read {
                reader: Reader::new(model.tokenizer(), &asked.reader),
                answer: Answer {
                    thinking: String::new(),
                    text: String::new(),
                    calls: Vec::new(),
                    tokens: Vec::new(),
                    logprobs: Vec::new(),
                    end: End::Generated(StopReason::MaxTokens),
                    stop_text: None,
                    stats: Stats::default(),
                    message: Message::new("assistant", ""),
                },
            },
        })
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.read.answer.tokens
    }

    /// Draws the answer to `prompt`, or its rest, until it ends. After [`StopReason::ContextFull`] it may be called
    /// again with a shorter prompt, which the answer so far then follows.
    ///
    /// # Errors
    /// Errors of the session and the sampler; [`Error::Constraint`] if the answer cannot be held to its format any further.
    pub fn run(
        &mut self,
        session: &mut dyn Session,
        sequence: &mut Sequence,
        prompt: &[u32],
        each: &mut OnPiece<'_>,
    ) -> Result<End> {
        let mut text = [prompt, self.tokens()].concat();
        self.sampler.begin(prompt);
        text[prompt.len()..]
            .iter()
            .for_each(|&token| self.sampler.accept(token));
        let capacity = session.spec().ctx;
        loop {
            let left = self.drawing.max_tokens.saturating_sub(self.tokens().len());
            let run = self.hold.run(self.tokens().len(), left);
            self.hold
                .mask(&mut self.sampler)
                .map_err(Error::Constraint)?;
            let stop = self.part(session, sequence, &mut text, run, each)?;
            let reader = &self.read.reader;
            let end = match (reader.stopped_by(), reader.is_over()) {
                (Some(_), _) => End::Text,
                (None, true) => End::Call,
                (None, false) => End::Generated(stop),
            };
            let goes_on = run < left && end == End::Generated(StopReason::MaxTokens);
            let Some(&last) = self.tokens().last().filter(|_| goes_on) else {
                return Ok(end);
            };
            self.hold.accept(last).map_err(Error::Constraint)?;
            let close = self
                .hold
                .closing(&self.read.answer.tokens)
                .unwrap_or_default();
            if left - run <= close.len() {
                return Ok(end);
            }
            for token in close {
                text.push(token);
                self.sampler.accept(token);
                self.hold.accept(token).map_err(Error::Constraint)?;
                self.read.answer.tokens.push(token);
                if self.read.push(token, each).is_break() {
                    return Ok(End::Generated(StopReason::Interrupted));
                }
            }
            if text.len() >= capacity {
                return Ok(End::Generated(StopReason::ContextFull));
            }
        }
    }

    /// Draws up to `run` tokens after `text`, and appends them to it.
    fn part(
        &mut self,
        session: &mut dyn Session,
        sequence: &mut Sequence,
        text: &mut Vec<u32>,
        run: usize,
        each: &mut OnPiece<'_>,
    ) -> Result<StopReason> {
        let limits = GenerationLimits {
            stop: self.model.stop(),
            max_tokens: run,
            interrupt: Some(self.drawing.interrupt),
        };
        let reported = self.sampler.logprobs().len();
        let (sampler, read) = (&mut self.sampler, &mut self.read);
        let mut each = |token| read.push(token, each);
        let part = resume(session, sequence, text, sampler, &limits, &mut each)?;
        text.extend_from_slice(&part.tokens);
        let answer = &mut self.read.answer;
        answer.tokens.extend_from_slice(&part.tokens);
        let logprobs = self.sampler.logprobs().get(reported..);
        answer
            .logprobs
            .extend_from_slice(logprobs.unwrap_or_default());
        let stats = &mut answer.stats;
        if stats.prompt_tokens == 0 {
            *stats = part.stats;
        } else {
            stats.tokens += part.stats.tokens;
            stats.draft_steps += part.stats.draft_steps;
            stats.drafted += part.stats.drafted;
            stats.accepted += part.stats.accepted;
        }
        Ok(part.stop)
    }

    /// The answer, which ended so. `each` gets the pieces that were held back.
    pub fn finish(self, end: End, each: &mut OnPiece<'_>) -> Answer {
        let mut read = self.read;
        let thinks = read.reader.is_thinking();
        read.finish(end, each);
        let stop_text = read.reader.stopped_by().map(str::to_owned);
        let mut answer = read.answer;
        let end = if stop_text.is_some() { End::Text } else { end };
        let prompt = self.prompt.as_deref();
        let mut message = match end == End::Text || !answer.calls.is_empty() {
            // Without the stop text and what followed it, and without the calls.
            true => self.model.said(prompt, &answer.thinking, &answer.text),
            false => self.model.wrote(prompt, &answer.tokens, thinks),
        };
        if !answer.calls.is_empty() {
            let calls: Value = answer.calls.iter().map(called).collect();
            message.extra.insert("tool_calls".into(), calls);
        }
        answer.stats.decode = (self.begun.elapsed()).saturating_sub(answer.stats.first_token);
        Answer {
            end,
            stop_text,
            message,
            ..answer
        }
    }
}

impl Read {
    /// Reads a token, and breaks off where the answer is over.
    fn push(&mut self, token: u32, each: &mut OnPiece<'_>) -> ControlFlow<()> {
        let mut pieces = Vec::new();
        self.reader.push(token, &mut pieces);
        self.deliver(pieces, each)?;
        match self.reader.stopped_by().is_some() || self.reader.is_over() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Reads what was held back.
    fn finish(&mut self, end: End, each: &mut OnPiece<'_>) {
        if let End::Generated(reason) = end {
            let mut pieces = Vec::new();
            let cut = !matches!(reason, StopReason::Eos(_));
            self.reader.finish(cut, &mut pieces);
            // The answer is complete: there is nothing left to break off.
            let _ = self.deliver(pieces, each);
        }
    }

    fn deliver(&mut self, pieces: Vec<Piece>, each: &mut OnPiece<'_>) -> ControlFlow<()> {
        let mut flow = ControlFlow::Continue(());
        for piece in pieces {
            let answer = &mut self.answer;
            match &piece {
                Piece::Reasoning(text) => answer.thinking.push_str(text),
                Piece::Text(text) => answer.text.push_str(text),
                Piece::CallStart { name, .. } => answer.calls.push(Call {
                    name: name.clone(),
                    arguments: String::new(),
                }),
                Piece::CallArguments { index, text } => {
                    if let Some(call) = answer.calls.get_mut(*index) {
                        call.arguments.push_str(text);
                    }
                }
            }
            if flow.is_continue() {
                flow = each(&piece);
            }
        }
        flow
    }
}

/// A call as templates read it, with an object of arguments: of one that is cut off, what is there of it.
fn called(call: &Call) -> Value {
    let arguments = serde_json::from_str(&completed(&call.arguments));
    let arguments: Value = arguments.unwrap_or_else(|_| json!({}));
    json!({"type": "function", "function": {"name": call.name, "arguments": arguments}})
}
