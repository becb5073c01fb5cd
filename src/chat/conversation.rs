//! A conversation with a model: messages in, an answer out. It knows no terminal.
//!
//! Each turn renders all messages anew, as templates strip earlier thinking, and feeds only
//! what the cache does not hold of the result.

use super::Overflow;
use anyhow::{Context, bail};
use nq_runtime::generate::generate;
use nq_runtime::thinking::{Part, Splitter};
use nq_runtime::{
    ChatTemplate, Detokenizer, Generated, Limits, Message, Sampler, SamplingParams, Sequence,
    Session, Stats, StopReason, Tokenizer,
};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// What a user may change between turns.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens of an answer; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// `enable_thinking` for the template; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// When the context is full.
    pub overflow: Overflow,
}

/// What comes of an answer while it is made.
pub enum Event<'e> {
    /// Text.
    Piece(Part, &'e str),
    /// Something that the user must be told.
    Note(String),
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The thinking, without its tags.
    pub thinking: String,
    /// The answer.
    pub answer: String,
    /// Why it ended.
    pub stop: StopReason,
    /// Counts and times.
    pub stats: Stats,
}

/// All messages as the model reads them.
enum Prompt {
    /// As text and as tokens.
    Fits(String, Vec<u32>),
    /// So many tokens, more than the context has room for.
    TooLong(usize),
}

/// Messages, the cache that holds most of them, and settings.
pub struct Conversation<'m> {
    tokenizer: &'m Tokenizer,
    template: &'m ChatTemplate,
    stop: Vec<u32>,
    session: Box<dyn Session>,
    sequence: Sequence,
    system: Option<String>,
    messages: Vec<Message>,
    /// Settings.
    pub settings: Settings,
    /// Calls of the sampler so far: each draws from a stream of its own, so that an answer
    /// made again is another one.
    streams: u64,
}

impl<'m> Conversation<'m> {
    /// An empty conversation in slot 0 of `session`. `stop` are the tokens that end a turn.
    pub fn new(
        tokenizer: &'m Tokenizer,
        template: &'m ChatTemplate,
        stop: &[u32],
        mut session: Box<dyn Session>,
        system: Option<String>,
        settings: Settings,
    ) -> Self {
        let sequence = Sequence::new(session.as_mut(), 0);
        Conversation {
            tokenizer,
            template,
            stop: stop.to_vec(),
            session,
            sequence,
            system,
            messages: Vec::new(),
            settings,
            streams: 0,
        }
    }

    /// Tokens in the cache, and how many fit.
    pub fn context(&self) -> (usize, usize) {
        (self.sequence.tokens().len(), self.session.spec().ctx)
    }

    /// The system prompt.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets or removes the system prompt.
    pub fn set_system(&mut self, system: Option<String>) {
        self.system = system;
    }

    /// All messages, the system prompt first.
    pub fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|s| Message::new("system", s));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Forgets all messages but the system prompt.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    /// Replaces all messages; a system message at the start becomes the system prompt.
    pub fn replace(&mut self, messages: Vec<Message>) {
        let mut messages = messages;
        self.system = None;
        if messages.first().is_some_and(|m| m.role == "system") {
            self.system = Some(messages.remove(0).text().to_owned());
        }
        self.messages = messages;
    }

    /// True if the template can turn thinking on and off.
    pub fn switches_thinking(&self) -> bool {
        self.template.switches_thinking()
    }

    /// Adds a user's message and answers it. If that fails, the message is not kept.
    ///
    /// # Errors
    /// A context too small for the message; the template's, the sampler's and the
    /// session's; what `on_event` fails with.
    pub fn ask(
        &mut self,
        text: &str,
        interrupt: &AtomicBool,
        on_event: &mut dyn FnMut(Event<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Turn> {
        self.messages.push(Message::new("user", text));
        let turn = self.answer(interrupt, on_event);
        if turn.is_err() {
            self.messages.pop();
        }
        turn
    }

    /// Answers the last user's message again.
    ///
    /// # Errors
    /// If there is none; else as [`Conversation::ask`], and the former answer stays.
    pub fn regenerate(
        &mut self,
        interrupt: &AtomicBool,
        on_event: &mut dyn FnMut(Event<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Turn> {
        let last = self.messages.iter().rposition(|m| m.role == "user");
        let last = last.context("there is no message to answer again")?;
        let former = self.messages.split_off(last + 1);
        let turn = self.answer(interrupt, on_event);
        if turn.is_err() {
            self.messages.extend(former);
        }
        turn
    }

    fn answer(
        &mut self,
        interrupt: &AtomicBool,
        on_event: &mut dyn FnMut(Event<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Turn> {
        let start = Instant::now();
        let (text, mut prompt) = match self.fitting_prompt(0, on_event)? {
            Prompt::Fits(text, ids) => (text, ids),
            Prompt::TooLong(tokens) => {
                let ctx = self.session.spec().ctx;
                bail!(
                    "the chat has {tokens} tokens, {} more than the context of {ctx} tokens has \
                     room for before an answer; {}",
                    tokens + 1 - ctx,
                    self.what_helps(true)
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
            let part = self.part(
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
                && self.settings.overflow == Overflow::DropOldest
                && self.drop_oldest();
            if !goes_on {
                break part.stop;
            }
            (writer.on_event)(Event::Note(dropped(1)))?;
            match self.fitting_prompt(tokens.len(), writer.on_event)? {
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
                self.what_helps(false)
            )))?;
        }
        // The content is kept as it was sampled: the template strips the thinking.
        self.messages.push(Message::new("assistant", &writer.raw));
        Ok(Turn {
            thinking: writer.thinking,
            answer: writer.answer,
            stop,
            stats,
        })
    }

    /// Generates until the answer ends or the context is full; `before` tokens of the answer were
    /// made already.
    fn part(
        &mut self,
        prompt: &[u32],
        before: usize,
        interrupt: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> nq_runtime::Result<Generated> {
        let limits = Limits {
            stop: &self.stop,
            max_tokens: self.settings.max_tokens.unwrap_or(usize::MAX) - before,
            interrupt: Some(interrupt),
        };
        let mut sampler = Sampler::new(self.settings.sampling, self.streams)?;
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

    /// What makes room in the context, or, before an answer, needs less of it.
    fn what_helps(&self, before: bool) -> &'static str {
        let turns = self.messages.iter().filter(|m| m.role == "user").count();
        match (turns > 1, self.settings.overflow, before) {
            (true, Overflow::Stop, _) => {
                "/clear, a larger --ctx or --on-overflow drop-oldest helps"
            }
            (true, Overflow::DropOldest, _) => "/clear or a larger --ctx helps",
            (false, _, true) => "a shorter message or a larger --ctx helps",
            (false, _, false) => "a larger --ctx helps",
        }
    }

    /// The prompt as text and ids, with room for `more` tokens and an answer; the oldest
    /// turns are dropped for that where it is asked for.
    fn fitting_prompt(
        &mut self,
        more: usize,
        on_event: &mut dyn FnMut(Event<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Prompt> {
        let capacity = self.session.spec().ctx;
        let wanted = self.settings.max_tokens.unwrap_or(usize::MAX);
        let room = more + wanted.clamp(1, (capacity / 4).max(1));
        let mut count = 0;
        let prompt = loop {
            let prompt = self.template.prompt(
                self.tokenizer.control_tokens(),
                &self.messages(),
                None,
                true,
                self.settings.thinking,
            )?;
            let ids = self.tokenizer.encode_prompt(&prompt)?;
            let may_drop = self.settings.overflow == Overflow::DropOldest;
            if ids.len() + room > capacity && may_drop && self.drop_oldest() {
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

    /// Forgets the oldest turn: a user's message and all up to the next one. False if the
    /// last turn is the only one.
    fn drop_oldest(&mut self) -> bool {
        let mut users = (0..self.messages.len()).filter(|&i| self.messages[i].role == "user");
        let Some(second) = users.nth(1) else {
            return false;
        };
        self.messages.drain(..second);
        true
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

#[cfg(test)]
mod tests;
