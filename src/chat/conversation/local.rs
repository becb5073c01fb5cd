//! Answers from a model in this process.
//!
//! Each turn renders all messages again, because templates strip earlier thinking, and feeds only the part of
//! the result that is not in the cache.

use super::{Answerer, Chat, ChatEvent, End, MessageForm, OnEvent, Turn};
use crate::chat::Overflow;
use anyhow::bail;
use nq_runtime::generate::generate;
use nq_runtime::thinking::{Part, Splitter};
use nq_runtime::{
    Detokenizer, Generated, Limits, Message, Sampler, Sequence, Session, Speculation, Stats,
    StopReason, StopTexts, Tokenizer,
};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How thinking ends that has spent its budget.
const THINKING_END: &str = "\n</think>\n\n";

/// All messages in the form for the model.
enum PromptForm {
    /// As text and as tokens.
    Fits(String, Vec<u32>),
    /// More tokens than fit the context; their number.
    TooLong(usize),
}

/// A model, and the cache that holds most of the messages.
pub(super) struct Local<'m> {
    tokenizer: &'m Tokenizer,
    form: MessageForm<'m>,
    stop: Vec<u32>,
    session: Box<dyn Session>,
    sequence: Sequence,
    /// Number of uses of the sampler: each draws from its own stream, so that regenerating an answer
    /// gives another one.
    streams: u64,
}

impl Answerer for Local<'_> {
    fn answer(
        &mut self,
        chat: &mut Chat,
        interrupt: &AtomicBool,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<Turn> {
        let start = Instant::now();
        let (text, mut prompt) = match self.fitting_prompt(chat, 0, on_event)? {
            PromptForm::Fits(text, ids) => (text, ids),
            PromptForm::TooLong(tokens) => {
                let ctx = self.session.spec().ctx;
                bail!(
                    "the chat has {tokens} tokens, {} more than the context of {ctx} tokens has \
                     room for before an answer; {}",
                    tokens + 1 - ctx,
                    chat.what_helps(true)
                )
            }
        };
        let mut writer = Writer {
            splitter: match self.form {
                MessageForm::Chat(_) => Splitter::after(&text),
                MessageForm::Raw => Splitter::none(),
            },
            stops: StopTexts::new(&chat.settings.stop),
            raw: String::new(),
            thinking: String::new(),
            answer: String::new(),
            on_event,
            failed: None,
        };
        let mut detokenizer = Detokenizer::new(self.tokenizer, true);
        let mut tokens: Vec<u32> = Vec::new();
        let mut stats: Option<Stats> = None;
        let budget = chat.settings.thinking_budget;
        let mut thought = 0;
        let generated = loop {
            let mut spent = false;
            let part = self.part(chat, &prompt, tokens.len(), interrupt, &mut |token| {
                if let Some(piece) = detokenizer.push(token)
                    && writer.push(&piece).is_break()
                {
                    return ControlFlow::Break(());
                }
                thought += usize::from(writer.splitter.is_thinking());
                spent = writer.splitter.is_thinking() && budget.is_some_and(|most| thought >= most);
                match spent {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            })?;
            tokens.extend_from_slice(&part.tokens);
            let total = stats.get_or_insert(Stats {
                tokens: 0,
                ..part.stats
            });
            total.tokens += part.stats.tokens;
            total.draft_steps += part.stats.draft_steps;
            total.drafted += part.stats.drafted;
            total.accepted += part.stats.accepted;
            if spent && !interrupt.load(Ordering::Relaxed) {
                // The thinking is closed for the model, and the answer begins.
                if let Some(rest) = detokenizer.flush() {
                    let _ = writer.push(&rest);
                }
                let _ = writer.push(THINKING_END);
                tokens.extend(self.tokenizer.encode(THINKING_END)?);
                let fed = self.prompt_with(chat, &tokens)?;
                let most = chat.settings.max_tokens.unwrap_or(usize::MAX);
                if tokens.len() >= most {
                    break StopReason::MaxTokens;
                }
                if fed.len() >= self.session.spec().ctx {
                    break StopReason::ContextFull;
                }
                prompt = fed;
                continue;
            }
            let goes_on = part.stop == StopReason::ContextFull
                && chat.settings.overflow == Overflow::DropOldest
                && chat.drop_oldest();
            if !goes_on {
                break part.stop;
            }
            (writer.on_event)(ChatEvent::Note(dropped(1)))?;
            match self.fitting_prompt(chat, tokens.len(), writer.on_event)? {
                PromptForm::Fits(_, shorter) => prompt = [shorter.as_slice(), &tokens].concat(),
                PromptForm::TooLong(_) => break StopReason::ContextFull,
            }
        };
        if let Some(rest) = detokenizer.flush() {
            let _ = writer.push(&rest);
        }
        writer.finish();
        let end = if writer.stops.has_ended() {
            End::Text
        } else {
            End::Generated(generated)
        };
        if let Some(e) = writer.failed {
            return Err(e);
        }
        let mut stats = stats.unwrap_or_default();
        stats.decode = start.elapsed().saturating_sub(stats.first_token);
        if let Some(note) = self.sequence.speculation().and_then(|s| s.take_note()) {
            (writer.on_event)(ChatEvent::Note(note))?;
        }
        if end == End::Generated(StopReason::ContextFull) {
            let capacity = self.session.spec().ctx;
            (writer.on_event)(ChatEvent::Note(format!(
                "the context of {capacity} tokens is full: the answer is cut off; {}",
                chat.what_helps(false)
            )))?;
        }
        // Thinking is kept: the template strips or shows it.
        chat.messages.push(match self.form {
            MessageForm::Chat(template) => template.answer(&text, &writer.raw),
            MessageForm::Raw => Message::new("assistant", &writer.raw),
        });
        Ok(Turn {
            thinking: writer.thinking,
            answer: writer.answer,
            end,
            stats,
        })
    }

    fn context(&self) -> (usize, usize) {
        (self.sequence.tokens().len(), self.session.spec().ctx)
    }

    fn refuses(&self, setting: &str) -> Option<&'static str> {
        match (self.form, setting) {
            (MessageForm::Raw, "thinking" | "hide_thinking") => {
                Some("--raw does not tell thinking apart")
            }
            (MessageForm::Chat(template), "thinking") if !template.switches_thinking() => {
                Some("this model's template cannot switch thinking")
            }
            _ => None,
        }
    }

    fn is_raw(&self) -> bool {
        matches!(self.form, MessageForm::Raw)
    }
}

impl<'m> Local<'m> {
    /// In slot 0 of `session`, with what drafts there. `stop` are the tokens that end a turn.
    pub(super) fn new(
        tokenizer: &'m Tokenizer,
        form: MessageForm<'m>,
        stop: &[u32],
        mut session: Box<dyn Session>,
        drafts: Option<Speculation>,
    ) -> Self {
        let sequence = Sequence::new(session.as_mut(), 0).with_drafts(drafts);
        Local {
            tokenizer,
            form,
            stop: stop.to_vec(),
            session,
            sequence,
            streams: 0,
        }
    }

    /// Generates until the answer ends or the context is full; `before` tokens of the answer exist
    /// already.
    fn part(
        &mut self,
        chat: &Chat,
        prompt: &[u32],
        before: usize,
        interrupt: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> nq_runtime::Result<Generated> {
        let limits = Limits {
            stop: &self.stop,
            max_tokens: chat.settings.max_tokens.unwrap_or(usize::MAX) - before,
            interrupt: Some(interrupt),
        };
        let mut sampler = Sampler::new(chat.settings.sampling, self.streams)?;
        self.streams += 1;
        generate(
            self.session.as_mut(),
            &mut self.sequence,
            prompt,
            &mut sampler,
            &limits,
            on_token,
        )
    }

    /// The prompt as text and ids, with room for `more` tokens and an answer; drops the oldest
    /// turns for that if the settings say so.
    fn fitting_prompt(
        &mut self,
        chat: &mut Chat,
        more: usize,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<PromptForm> {
        let capacity = self.session.spec().ctx;
        let wanted = chat.settings.max_tokens.unwrap_or(usize::MAX);
        let room = more + wanted.clamp(1, (capacity / 4).max(1));
        let mut count = 0;
        let prompt = loop {
            let may_drop = chat.settings.overflow == Overflow::DropOldest;
            let (text, ids) = match self.prompt(chat, 2 * capacity) {
                Err(nq_runtime::Error::TooLong { at_least, .. }) => {
                    if may_drop && chat.drop_oldest() {
                        count += 1;
                        continue;
                    }
                    break PromptForm::TooLong(at_least + more);
                }
                prompt => prompt?,
            };
            if ids.len() + room > capacity && may_drop && chat.drop_oldest() {
                count += 1;
                continue;
            }
            break if ids.len() + more < capacity {
                PromptForm::Fits(text, ids)
            } else {
                PromptForm::TooLong(ids.len() + more)
            };
        };
        if count > 0 {
            on_event(ChatEvent::Note(dropped(count)))?;
        }
        Ok(prompt)
    }

    /// The prompt and what there is of its answer.
    fn prompt_with(&self, chat: &Chat, tokens: &[u32]) -> anyhow::Result<Vec<u32>> {
        let most = 2 * self.session.spec().ctx;
        Ok([self.prompt(chat, most)?.1.as_slice(), tokens].concat())
    }

    /// The prompt made from all messages, as text and as at most `most` tokens.
    fn prompt(&self, chat: &Chat, most: usize) -> nq_runtime::Result<(String, Vec<u32>)> {
        let messages = chat.messages();
        match self.form {
            MessageForm::Chat(template) => {
                let prompt = template.prompt(
                    self.tokenizer.control_tokens(),
                    &messages,
                    None,
                    true,
                    chat.settings.thinking,
                )?;
                let ids = self.tokenizer.encode_prompt_within(&prompt, most)?;
                Ok((prompt.text().into_owned(), ids))
            }
            MessageForm::Raw => {
                let text: String = messages.iter().map(Message::text).collect();
                let ids = self.tokenizer.encode_whole_within(&text, most)?;
                Ok((text, ids))
            }
        }
    }
}

fn dropped(turns: usize) -> String {
    match turns {
        1 => "the context is full: the oldest turn is forgotten".into(),
        n => format!("the context is full: the {n} oldest turns are forgotten"),
    }
}

/// Passes an answer's text on and collects it.
struct Writer<'e> {
    splitter: Splitter,
    stops: StopTexts,
    raw: String,
    thinking: String,
    answer: String,
    on_event: &'e mut dyn FnMut(ChatEvent<'_>) -> anyhow::Result<()>,
    /// The error that stops it.
    failed: Option<anyhow::Error>,
}

impl Writer<'_> {
    fn push(&mut self, piece: &str) -> ControlFlow<()> {
        if self.stops.has_ended() {
            return ControlFlow::Break(());
        }
        self.raw.push_str(piece);
        self.split(|splitter, emit| splitter.push(piece, emit));
        if self.failed.is_some() || self.stops.has_ended() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    fn finish(&mut self) {
        if self.splitter.is_thinking() {
            // Cut off during thinking: closed, so that the template can tell it from the answer.
            self.raw.push_str("\n</think>\n\n");
        }
        self.split(|splitter, emit| splitter.finish(emit));
        let rest = self.stops.finish();
        self.emit(Part::Answer, &rest);
    }

    fn split(&mut self, run: impl FnOnce(&mut Splitter, &mut dyn FnMut(Part, &str))) {
        let mut pieces = Vec::new();
        run(&mut self.splitter, &mut |part, text| {
            pieces.push((part, text.to_owned()));
        });
        for (part, text) in pieces {
            match part {
                Part::Answer if self.stops.has_ended() => {}
                Part::Answer => {
                    let certain = self.stops.push(&text);
                    // The answer is the end of the sampled text.
                    self.raw.truncate(self.raw.len() - self.stops.cut_bytes());
                    self.emit(part, &certain);
                }
                Part::Thinking => self.emit(part, &text),
            }
        }
    }

    fn emit(&mut self, part: Part, text: &str) {
        if text.is_empty() {
            return;
        }
        match part {
            Part::Thinking => self.thinking.push_str(text),
            Part::Answer => self.answer.push_str(text),
        }
        if self.failed.is_none() {
            self.failed = (self.on_event)(ChatEvent::Piece(part, text)).err();
        }
    }
}
