//! A conversation with a model: messages in, an answer out. It does not know the terminal, nor whether
//! the model is in this process or behind a server.

mod events;
mod local;
mod remote;

pub use local::LocalModel;
pub use nq_answers::End;
pub use remote::Remote;

use super::Overflow;
use anyhow::Context;
use local::Local;
use nq_answers::images::message_with_images;
use nq_runtime::thinking::Part;
use nq_runtime::{Message, SamplingParams, Stats};
use std::sync::atomic::AtomicBool;

/// Settings that a user may change between turns.
#[derive(Clone, Debug)]
pub(crate) struct ChatSettings {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens in an answer; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// `enable_thinking` for the template; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Most tokens of thinking in an answer; `None`: as many as it takes.
    pub thinking_budget: Option<usize>,
    /// When the context is full.
    pub overflow: Overflow,
    /// Texts that end an answer; none is empty.
    pub stop: Vec<String>,
}

/// An event while an answer is generated.
pub(crate) enum ChatEvent<'e> {
    /// A piece of text.
    Piece(Part, &'e str),
    /// A note for the user.
    Note(String),
}

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// The thinking, without its tags.
    pub thinking: String,
    /// The answer.
    pub answer: String,
    /// How it ended.
    pub end: End,
    /// Counts and times.
    pub stats: Stats,
}

/// Receives the events of an answer.
pub(crate) type OnEvent<'e> = dyn FnMut(ChatEvent<'_>) -> anyhow::Result<()> + 'e;

/// Generates answers: a model in this process, or a server.
trait Answerer {
    /// Answers the last message, and adds the answer to the messages.
    fn answer(
        &mut self,
        chat: &mut ChatState,
        interrupt: &AtomicBool,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<Turn>;

    /// Number of tokens in the cache, and how many fit.
    fn context(&self) -> (usize, usize);

    /// Why the setting of this name would have no effect.
    fn refuses(&self, setting: &str) -> Option<&'static str>;

    /// True if the model gets texts without a template.
    fn is_raw(&self) -> bool {
        false
    }
}

/// Messages and settings.
pub struct ChatState {
    system: Option<String>,
    messages: Vec<Message>,
    /// Files of images that go with the next message.
    attached: Vec<Vec<u8>>,
    /// Settings.
    pub settings: ChatSettings,
}

impl ChatState {
    /// The system prompt.
    pub(crate) fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets or removes the system prompt.
    pub(crate) fn set_system(&mut self, system: Option<String>) {
        self.system = system;
    }

    /// All messages, the system prompt first.
    pub fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|s| Message::new("system", s));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Has the bytes of an image's file go with the next message.
    pub(crate) fn attach(&mut self, image: Vec<u8>) {
        self.attached.push(image);
    }

    /// Removes all messages but the system prompt.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.attached.clear();
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

    /// Suggests how to make room in the context or, `before` an answer, how to need less of it.
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

    /// Removes the oldest turn: a user's message and everything up to the next one. False if there
    /// is only one turn.
    fn drop_oldest(&mut self) -> bool {
        let mut users = (0..self.messages.len()).filter(|&i| self.messages[i].role == "user");
        let Some(second) = users.nth(1) else {
            return false;
        };
        self.messages.drain(..second);
        true
    }
}

/// A chat and its answerer.
pub(crate) struct Conversation<'m> {
    /// The chat.
    pub chat: ChatState,
    answerer: Box<dyn Answerer + 'm>,
}

impl<'m> Conversation<'m> {
    /// An empty conversation in slot 0 of a session of `model`.
    pub fn new(model: LocalModel<'m>, system: Option<String>, settings: ChatSettings) -> Self {
        Conversation::with(Box::new(Local::new(model)), system, settings)
    }

    /// An empty conversation with a server's model.
    pub fn remote(remote: Remote, system: Option<String>, settings: ChatSettings) -> Self {
        Conversation::with(Box::new(remote), system, settings)
    }

    fn with(
        answerer: Box<dyn Answerer + 'm>,
        system: Option<String>,
        settings: ChatSettings,
    ) -> Self {
        Conversation {
            chat: ChatState {
                system,
                messages: Vec::new(),
                attached: Vec::new(),
                settings,
            },
            answerer,
        }
    }

    /// Number of tokens in the cache, and how many fit.
    pub(crate) fn context(&self) -> (usize, usize) {
        self.answerer.context()
    }

    /// Why the setting of this name would have no effect here.
    pub(crate) fn refuses(&self, setting: &str) -> Option<&'static str> {
        self.answerer.refuses(setting)
    }

    /// True if the model gets texts without a template.
    pub(crate) fn is_raw(&self) -> bool {
        self.answerer.is_raw()
    }

    /// Adds a user's message, with the images that are attached, and answers it. If that fails, the message is not kept.
    ///
    /// # Errors
    /// A context too small for the message; errors of the template, the sampler and the
    /// session; errors of `on_event`.
    pub fn ask(
        &mut self,
        text: &str,
        interrupt: &AtomicBool,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<Turn> {
        let message = message_with_images(&self.chat.attached, text)?;
        self.chat.messages.push(message);
        let attached = std::mem::take(&mut self.chat.attached);
        let turn = self.answerer.answer(&mut self.chat, interrupt, on_event);
        if turn.is_err() {
            self.chat.messages.pop();
            self.chat.attached = attached;
        }
        turn
    }

    /// Answers the last user's message again.
    ///
    /// # Errors
    /// If there is none; otherwise errors of [`Conversation::ask`], and the previous answer stays.
    pub(crate) fn regenerate(
        &mut self,
        interrupt: &AtomicBool,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<Turn> {
        let last = self.chat.messages.iter().rposition(|m| m.role == "user");
        let last = last.context("there is no message to answer again")?;
        let former = self.chat.messages.split_off(last + 1);
        let turn = self.answerer.answer(&mut self.chat, interrupt, on_event);
        if turn.is_err() {
            self.chat.messages.extend(former);
        }
        turn
    }
}

#[cfg(test)]
mod tests;
