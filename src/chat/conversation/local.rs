//! Answers by a model in this process.
//!
//! Each turn renders all messages anew, as templates strip earlier thinking, and feeds only
//! what the cache does not hold of the result.

use super::{Answerer, Chat, Event, OnEvent, Turn};
use crate::chat::Overflow;
use anyhow::bail;
use nq_runtime::generate::generate;
use nq_runtime::thinking::{Part, Splitter};
use nq_runtime::{
    ChatTemplate, Detokenizer, Generated, Limits, Message, Sampler, Sequence, Session, Stats,
    StopReason, Tokenizer,
};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// All messages as the model reads them.
enum Prompt {
    /// As text and as tokens.
    Fits(String, Vec<u32>),
    /// So many tokens, more than the context has room for.
    TooLong(usize),
}

/// A model, and the cache that holds most of the messages.
pub(super) struct Local<'m> {
    tokenizer: &'m Tokenizer,
    template: &'m ChatTemplate,
    stop: Vec<u32>,
    session: Box<dyn Session>,
    sequence: Sequence,
    /// Calls of the sampler so far: each draws from a stream of its own, so that an answer
    /// made again is another one.
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
            Prompt::Fits(text, ids) => (text, ids),
            Prompt::TooLong(tokens) => {
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
            splitter: Splitter::after(&text),
            raw: String::new(),
            thinking: String::new(),
            answer: String::new(),
            on_event,
            failed: None,
        };
        let mut detokenizer = Detokenizer::new(self.tokenizer, true);
        let mut tokens: Vec<u32> = Vec::new();
        let mut stats: Option<Stats> = None;
        let stop = loop {
            let part =
                self.part(
                    chat,
                    &prompt,
                    tokens.len(),
                    interrupt,
                    &mut |token| match detokenizer.push(token) {
                        Some(piece) => writer.push(&piece),
                        None => ControlFlow::Continue(()),
                    },
                )?;
            tokens.extend_from_slice(&part.tokens);
            let total = stats.get_or_insert(Stats {
                tokens: 0,
                ..part.stats
            });
            total.tokens += part.stats.tokens;
            let goes_on = part.stop == StopReason::ContextFull
                && chat.settings.overflow == Overflow::DropOldest
                && chat.drop_oldest();
            if !goes_on {
                break part.stop;
            }
            (writer.on_event)(Event::Note(dropped(1)))?;
            match self.fitting_prompt(chat, tokens.len(), writer.on_event)? {
                Prompt::Fits(_, shorter) => prompt = [shorter.as_slice(), &tokens].concat(),
                Prompt::TooLong(_) => break StopReason::ContextFull,
            }
        };
        if let Some(rest) = detokenizer.flush() {
            let _ = writer.push(&rest);
        }
        writer.finish();
        if let Some(e) = writer.failed {
            return Err(e);
        }
        let mut stats = stats.unwrap_or_default();
        stats.decode = start.elapsed().saturating_sub(stats.first_token);
        if stop == StopReason::ContextFull {
            let capacity = self.session.spec().ctx;
            (writer.on_event)(Event::Note(format!(
                "the context of {capacity} tokens is full: the answer is cut off; {}",
                chat.what_helps(false)
            )))?;
        }
        // The content is kept as it was sampled: the template strips the thinking.
        chat.messages.push(Message::new("assistant", &writer.raw));
        Ok(Turn {
            thinking: writer.thinking,
            answer: writer.answer,
            stop,
            stats,
        })
    }

    fn context(&self) -> (usize, usize) {
        (self.sequence.tokens().len(), self.session.spec().ctx)
    }

    fn switches_thinking(&self) -> bool {
        self.template.switches_thinking()
    }
}

impl<'m> Local<'m> {
    /// In slot 0 of `session`. `stop` are the tokens that end a turn.
    pub(super) fn new(
        tokenizer: &'m Tokenizer,
        template: &'m ChatTemplate,
        stop: &[u32],
        mut session: Box<dyn Session>,
    ) -> Self {
        let sequence = Sequence::new(session.as_mut(), 0);
        Local {
            tokenizer,
            template,
            stop: stop.to_vec(),
            session,
            sequence,
            streams: 0,
        }
    }

    /// Generates until the answer ends or the context is full; `before` tokens of the answer were
    /// made already.
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

    /// The prompt as text and ids, with room for `more` tokens and an answer; the oldest
    /// turns are dropped for that where it is asked for.
    fn fitting_prompt(
        &mut self,
        chat: &mut Chat,
        more: usize,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<Prompt> {
        let capacity = self.session.spec().ctx;
        let wanted = chat.settings.max_tokens.unwrap_or(usize::MAX);
        let room = more + wanted.clamp(1, (capacity / 4).max(1));
        let mut count = 0;
        let prompt = loop {
            let prompt = self.template.prompt(
                self.tokenizer.control_tokens(),
                &chat.messages(),
                None,
                true,
                chat.settings.thinking,
            )?;
            let ids = self.tokenizer.encode_prompt(&prompt)?;
            let may_drop = chat.settings.overflow == Overflow::DropOldest;
            if ids.len() + room > capacity && may_drop && chat.drop_oldest() {
                count += 1;
                continue;
            }
            break match ids.len() + more < capacity {
                true => Prompt::Fits(prompt.text().into_owned(), ids),
                false => Prompt::TooLong(ids.len() + more),
            };
        };
        if count > 0 {
            on_event(Event::Note(dropped(count)))?;
        }
        Ok(prompt)
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
    raw: String,
    thinking: String,
    answer: String,
    on_event: &'e mut dyn FnMut(Event<'_>) -> anyhow::Result<()>,
    /// Why it is broken off.
    failed: Option<anyhow::Error>,
}

impl Writer<'_> {
    fn push(&mut self, piece: &str) -> ControlFlow<()> {
        self.raw.push_str(piece);
        self.split(|splitter, emit| splitter.push(piece, emit));
        match self.failed {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }

    fn finish(&mut self) {
        if self.splitter.is_thinking() {
            // Cut off: closed, so that the template can tell it from the answer.
            self.raw.push_str("\n</think>\n\n");
        }
        self.split(|splitter, emit| splitter.finish(emit));
    }

    fn split(&mut self, run: impl FnOnce(&mut Splitter, &mut dyn FnMut(Part, &str))) {
        let Writer {
            splitter,
            thinking,
            answer,
            on_event,
            failed,
            ..
        } = self;
        run(splitter, &mut |part, text| {
            match part {
                Part::Thinking => thinking.push_str(text),
                Part::Answer => answer.push_str(text),
            }
            if failed.is_none() {
                *failed = on_event(Event::Piece(part, text)).err();
            }
        });
    }
}
