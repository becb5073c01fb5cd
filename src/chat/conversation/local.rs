//! Answers from a model in this process.
//!
//! Each turn renders all messages again, because templates strip earlier thinking, and feeds only the part of
//! the result that is not in the cache.

use super::{Answerer, ChatEvent, ChatState, End, OnEvent, Turn};
use crate::chat::Overflow;
use anyhow::bail;
use nq_answers::images::{Image, Sight, taken};
use nq_answers::{Answering, Asked, Drawing, Error, ModelText, Piece, Thinking};
use nq_runtime::thinking::Part;
use nq_runtime::{ChatTemplate, Message, Sequence, Session, Speculation, StopReason};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

/// All messages in the form for the model.
enum PromptForm {
    /// As a prompt.
    Fits(Box<Asked>),
    /// More tokens than fit the context; their number.
    TooLong(usize),
}

/// A model in this process.
pub struct LocalModel<'m> {
    /// Its name.
    pub name: &'m str,
    /// Its text side.
    pub text: &'m ModelText,
    /// How it sees, if it does.
    pub sight: Option<&'m Sight>,
    /// True if it gets texts without a template.
    pub raw: bool,
    /// What it runs in.
    pub session: Box<dyn Session>,
    /// What drafts for it.
    pub drafts: Option<Speculation>,
}

/// A model, and the cache that holds most of the messages.
pub(super) struct Local<'m> {
    model: LocalModel<'m>,
    sequence: Sequence,
    /// The images of the prompt.
    images: Vec<Image>,
    /// Number of answers: each draws from its own stream, so that regenerating one gives another.
    streams: u64,
}

impl Answerer for Local<'_> {
    fn answer(
        &mut self,
        chat: &mut ChatState,
        interrupt: &AtomicBool,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<Turn> {
        let mut asked = match self.fitting_prompt(chat, 0, on_event)? {
            PromptForm::Fits(asked) => asked,
            PromptForm::TooLong(tokens) => {
                let ctx = self.model.session.spec().ctx;
                bail!(
                    "the chat has {tokens} tokens, {} more than the context of {ctx} tokens has \
                     room for before an answer; {}",
                    tokens + 1 - ctx,
                    chat.what_helps(true)
                )
            }
        };
        self.show(&asked, interrupt)?;
        let drawing = Drawing {
            sampling: chat.settings.sampling,
            stream: self.streams,
            logprobs: None,
            max_tokens: chat.settings.max_tokens.unwrap_or(usize::MAX),
            interrupt,
        };
        self.streams += 1;
        let mut answering = Answering::new(self.model.text, &asked, drawing).map_err(untyped)?;
        let full = End::Generated(StopReason::ContextFull);
        let mut failed = None;
        let end = loop {
            let end = answering.run(
                self.model.session.as_mut(),
                &mut self.sequence,
                &asked.prompt.tokens,
                &mut |piece| tell(piece, on_event, &mut failed),
            );
            let end = end.map_err(untyped)?;
            let goes_on =
                end == full && chat.settings.overflow == Overflow::DropOldest && chat.drop_oldest();
            if !goes_on {
                break end;
            }
            on_event(ChatEvent::Note(dropped(1)))?;
            match self.fitting_prompt(chat, answering.tokens().len(), on_event)? {
                PromptForm::Fits(shorter) => {
                    asked = shorter;
                    self.show(&asked, interrupt)?;
                }
                PromptForm::TooLong(_) => break full,
            }
        };
        let answer = answering.finish(end, &mut |piece| tell(piece, on_event, &mut failed));
        if let Some(e) = failed {
            return Err(e);
        }
        if let Some(note) = self.sequence.speculation().and_then(|s| s.take_note()) {
            on_event(ChatEvent::Note(note))?;
        }
        if answer.end == full {
            let capacity = self.model.session.spec().ctx;
            on_event(ChatEvent::Note(format!(
                "the context of {capacity} tokens is full: the answer is cut off; {}",
                chat.what_helps(false)
            )))?;
        }
        // Thinking is kept: the template strips or shows it.
        chat.messages.push(answer.message);
        Ok(Turn {
            thinking: answer.thinking,
            answer: answer.text,
            end: answer.end,
            stats: answer.stats,
        })
    }

    fn context(&self) -> (usize, usize) {
        (self.sequence.tokens().len(), self.model.session.spec().ctx)
    }

    fn refuses(&self, setting: &str) -> Option<&'static str> {
        let template = self.model.text.template();
        let switches = template.is_some_and(ChatTemplate::switches_thinking);
        match setting {
            "thinking" | "hide_thinking" if self.model.raw => {
                Some("--raw does not tell thinking apart")
            }
            "thinking" if !switches => Some("this model's template cannot switch thinking"),
            _ => None,
        }
    }

    fn is_raw(&self) -> bool {
        self.model.raw
    }
}

impl<'m> Local<'m> {
    /// In slot 0 of the model's session.
    pub(super) fn new(mut model: LocalModel<'m>) -> Self {
        let drafts = model.drafts.take();
        Local {
            sequence: Sequence::new(model.session.as_mut(), 0).with_drafts(drafts),
            model,
            images: Vec::new(),
            streams: 0,
        }
    }

    /// Encodes the images of the prompt, which the sequence then has at their places.
    fn show(&mut self, asked: &Asked, interrupt: &AtomicBool) -> anyhow::Result<()> {
        let stop = || interrupt.load(Ordering::Relaxed);
        let placed = |sight: &Sight| sight.placed(&self.images, &asked.prompt.images, &stop);
        let placed = self.model.sight.map(placed).transpose().map_err(untyped)?;
        self.sequence.show(placed.unwrap_or_default());
        Ok(())
    }

    /// The prompt, with room for `more` tokens and an answer; drops the oldest
    /// turns for that if the settings say so.
    fn fitting_prompt(
        &mut self,
        chat: &mut ChatState,
        more: usize,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<PromptForm> {
        let capacity = self.model.session.spec().ctx;
        let wanted = chat.settings.max_tokens.unwrap_or(usize::MAX);
        let room = more + wanted.clamp(1, (capacity / 4).max(1));
        let mut count = 0;
        let prompt = loop {
            let may_drop = chat.settings.overflow == Overflow::DropOldest;
            let asked = match self.prompt(chat, 2 * capacity) {
                Err(Error::Runtime(nq_runtime::Error::TooLong { at_least, .. })) => {
                    if may_drop && chat.drop_oldest() {
                        count += 1;
                        continue;
                    }
                    break PromptForm::TooLong(at_least + more);
                }
                prompt => prompt.map_err(untyped)?,
            };
            let tokens = asked.prompt.tokens.len();
            if tokens + room > capacity && may_drop && chat.drop_oldest() {
                count += 1;
                continue;
            }
            break if tokens + more < capacity {
                PromptForm::Fits(Box::new(asked))
            } else {
                PromptForm::TooLong(tokens + more)
            };
        };
        if count > 0 {
            on_event(ChatEvent::Note(dropped(count)))?;
        }
        Ok(prompt)
    }

    /// The prompt made from all messages, of at most `most` tokens.
    fn prompt(&mut self, chat: &ChatState, most: usize) -> Result<Asked, Error> {
        let (mut messages, stop) = (chat.messages(), chat.settings.stop.clone());
        if self.model.raw {
            let text: String = messages.iter().map(Message::text).collect();
            let tokens = self
                .model
                .text
                .tokenizer()
                .encode_whole_within(&text, most)?;
            return Ok(Asked::continuation(tokens, stop));
        }
        self.images = taken(self.model.sight, self.model.name, &mut messages)?;
        let chat = nq_answers::ChatInput {
            images: self.images.iter().map(Image::tokens).collect(),
            messages,
            thinking: Thinking {
                switches: chat.settings.thinking.into(),
                budget: chat.settings.thinking_budget,
            },
            stop,
            ..nq_answers::ChatInput::default()
        };
        Ok(self.model.text.ask(chat, most)?)
    }
}

fn dropped(turns: usize) -> String {
    match turns {
        1 => "the context is full: the oldest turn is forgotten".into(),
        n => format!("the context is full: the {n} oldest turns are forgotten"),
    }
}

/// An error of the runtime as such, for those who look for some of them.
fn untyped(error: Error) -> anyhow::Error {
    match error {
        Error::Runtime(e) => e.into(),
        other => other.into(),
    }
}

/// Passes a piece of an answer on; breaks off if that has `failed`.
fn tell(
    piece: &Piece,
    on_event: &mut OnEvent<'_>,
    failed: &mut Option<anyhow::Error>,
) -> ControlFlow<()> {
    let event = match piece {
        Piece::Reasoning(text) => ChatEvent::Piece(Part::Thinking, text),
        Piece::Text(text) => ChatEvent::Piece(Part::Answer, text),
        // There are no tools.
        Piece::CallStart { .. } | Piece::CallArguments { .. } => return ControlFlow::Continue(()),
    };
    if failed.is_none() {
        *failed = on_event(event).err();
    }
    match failed {
        Some(_) => ControlFlow::Break(()),
        None => ControlFlow::Continue(()),
    }
}
