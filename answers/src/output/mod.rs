//! Converts tokens to output for a client: text, thinking and tool calls, piece by piece.
//!
//! tokens -> characters -> thinking or answer -> text or tool call -> text up to a stop string.
//! Each stage holds back only text that it cannot classify yet.

mod arguments;
mod calls;
mod content;
mod json_call;
mod piece;
mod signature;
mod tags;

pub use arguments::completed;
pub use calls::{CallForm, CallParser};
pub use content::ContentTokens;
pub use piece::{Piece, Tagged};
pub use signature::Tools;
pub(crate) use signature::{may_be_text, resolved};

use nq_runtime::thinking::{Part, Splitter, overlap};
use nq_runtime::{Detokenizer, StopTexts, Tokenizer};
use piece::join;

/// The markup that a reader recognizes.
#[derive(Clone, Debug, Default)]
pub struct ReaderOptions {
    /// Separates thinking from the answer; the prompt's text tells whether thinking has begun.
    pub thinking: Option<String>,
    /// Recognizes calls of these tools.
    pub calls: Option<Tools>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
}

/// Reads the tokens of one answer.
pub struct Reader {
    detokenizer: Detokenizer,
    thinking: Option<Splitter>,
    /// Thinking that may be the beginning of [`CallParser::OPEN`].
    held: String,
    calls: Option<CallParser>,
    stop: StopTexts,
    reasoning_tokens: usize,
    /// The token that ends thinking.
    thinking_end: Option<u32>,
}

impl Reader {
    /// A reader for an answer in the tokens of `tokenizer`.
    pub fn new(tokenizer: &Tokenizer, options: &ReaderOptions) -> Self {
        Reader {
            detokenizer: Detokenizer::new(tokenizer, true),
            thinking: options.thinking.as_deref().map(Splitter::after),
            held: String::new(),
            calls: options.calls.clone().map(CallParser::new),
            stop: StopTexts::new(&options.stop),
            reasoning_tokens: 0,
            thinking_end: tokenizer.token_id("</think>"),
        }
    }

    /// Takes a token and appends the pieces that are certain to `out`. Returns true if the token is part
    /// of the thinking, including its tags.
    pub fn push(&mut self, token: u32, out: &mut Vec<Piece>) -> bool {
        let before = self.is_thinking();
        // Models end thinking that has not begun, after a tool's result for example. In a call it may be an argument.
        if let Some(splitter) = &mut self.thinking
            && self.thinking_end == Some(token)
            && !before
            && !self.calls.as_ref().is_some_and(CallParser::is_inside)
        {
            splitter.end_unbegun();
            return true;
        }
        if let Some(text) = self.detokenizer.push(token) {
            self.text(&text, out);
        }
        let thinking = before || self.is_thinking();
        self.reasoning_tokens += usize::from(thinking);
        thinking
    }

    /// The stop string that ended the answer, if any.
    pub fn stopped_by(&self) -> Option<&str> {
        self.stop.ended_by()
    }

    /// True once nothing that follows is part of the answer, because the one call that may be made has ended.
    pub fn is_over(&self) -> bool {
        self.calls.as_ref().is_some_and(CallParser::is_over)
    }

    /// Ends the tokens and appends what was held back. `cut`: the model had not ended the answer.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Piece>) {
        if let Some(rest) = self.detokenizer.flush() {
            self.text(&rest, out);
        }
        let held = std::mem::take(&mut self.held);
        self.split(&held, true, out);
        let mut after = Vec::new();
        if let Some(calls) = &mut self.calls {
            calls.finish(cut, &mut after);
        }
        self.deliver(after, out);
        let rest = self.stop.finish();
        join(out, Piece::Text(rest));
    }

    /// True while thinking.
    pub(crate) fn is_thinking(&self) -> bool {
        self.thinking.as_ref().is_some_and(Splitter::is_thinking)
    }

    /// Number of tokens of thinking.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// True once a tool call has begun.
    pub fn has_calls(&self) -> bool {
        self.calls.as_ref().is_some_and(|c| c.count() > 0)
    }

    fn text(&mut self, text: &str, out: &mut Vec<Piece>) {
        if self.calls.is_none() || !self.is_thinking() {
            let held = std::mem::take(&mut self.held);
            return self.split(&(held + text), false, out);
        }
        // A tool call ends the thinking; a mention of its tag does not.
        self.held.push_str(text);
        while let Some(at) = self.held.find(CallParser::OPEN) {
            let end = at + CallParser::OPEN.len();
            match CallParser::opens_call(&self.held[end..]) {
                None => {
                    let before: String = self.held.drain(..at).collect();
                    return self.split(&before, false, out);
                }
                Some(true) => {
                    let call = self.held.split_off(at);
                    let before = std::mem::take(&mut self.held);
                    self.split(&before, false, out);
                    if self.is_thinking() {
                        self.split("</think>", false, out);
                    }
                    return self.split(&call, false, out);
                }
                Some(false) => {
                    let mention: String = self.held.drain(..end).collect();
                    self.split(&mention, false, out);
                }
            }
        }
        let certain = self.held.len() - overlap(&self.held, CallParser::OPEN);
        let before: String = self.held.drain(..certain).collect();
        self.split(&before, false, out);
    }

    /// Separates thinking from the answer.
    fn split(&mut self, text: &str, last: bool, out: &mut Vec<Piece>) {
        let mut answer = String::new();
        match &mut self.thinking {
            None => answer.push_str(text),
            Some(splitter) => {
                let mut emit = |part, text: &str| match part {
                    Part::Thinking => join(out, Piece::Reasoning(text.to_owned())),
                    Part::Answer => answer.push_str(text),
                };
                splitter.push(text, &mut emit);
                if last {
                    splitter.finish(&mut emit);
                }
            }
        }
        if answer.is_empty() {
            return;
        }
        let mut pieces = Vec::new();
        match &mut self.calls {
            None => pieces.push(Piece::Text(answer)),
            Some(calls) => calls.push(&answer, &mut pieces),
        }
        self.deliver(pieces, out);
    }

    /// Looks for stop strings in text pieces.
    fn deliver(&mut self, pieces: Vec<Piece>, out: &mut Vec<Piece>) {
        for piece in pieces {
            match piece {
                _ if self.stop.has_ended() => return,
                Piece::Text(text) => join(out, Piece::Text(self.stop.push(&text))),
                other => {
                    let rest = self.stop.finish();
                    join(out, Piece::Text(rest));
                    join(out, other);
                }
            }
        }
    }
}
