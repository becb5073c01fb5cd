//! Chats.

use super::{Error, Model, Result};
use crate::at_load::longest_context;
use nq_formats::Task;
use nq_runtime::generate::generate_text;
use nq_runtime::{
    ChatTemplate, DraftedBy, KvType, Limits, Message, Sampler, SamplingParams, Sequence, Session,
    SessionSpec, Stats, StopReason, StopTexts,
};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Positions of a chat, if the model has as many.
const CONTEXT: usize = 8192;

/// A conversation with a model. What was said is kept in its cache.
pub struct Chat {
    model: Model,
    template: ChatTemplate,
    session: Box<dyn Session>,
    sequence: Sequence,
    messages: Vec<Message>,
    answers: u64,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens of an answer; by default as many as the context holds.
    pub max_tokens: usize,
    /// Whether the model thinks before it answers, if its template can switch that; `None`: as it has it.
    pub thinking: Option<bool>,
    /// Texts that end an answer, without being part of it.
    pub stop: Vec<String>,
    /// Ends an answer once another thread or the function that gets the pieces sets it; it stays set.
    pub interrupt: Arc<AtomicBool>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Its text, thinking included.
    pub text: String,
    /// Why it ended; `Interrupted` also for a text of [`Chat::stop`].
    pub end: StopReason,
    /// Counts and times.
    pub stats: Stats,
}

impl Chat {
    pub(super) fn new(model: Model, ctx: Option<usize>) -> Result<Self> {
        if matches!(model.checkpoint().task(), Task::Embed(_)) {
            let why = "an embedding model, which generates no text";
            return Err(Error::unsuited(format!("{}: {why}", model.name())));
        }
        let trained = longest_context(model.checkpoint().config());
        let ctx = ctx.unwrap_or(CONTEXT.min(trained));
        if !(2..=trained).contains(&ctx) {
            let error = nq_runtime::Error::Request {
                what: "context",
                expected: format!("2 to {trained} tokens"),
                found: ctx.to_string(),
            };
            return Err(error.into());
        }
        let template = ChatTemplate::from_files(model.checkpoint().files())?;
        let mut session = model.engine().session(SessionSpec {
            slots: 1,
            ctx,
            pages: None,
            kv: KvType::F16,
            max_rows: model.engine().description().prompt_rows().min(ctx),
            snapshots: None,
            drafts: DraftedBy::Nothing,
        })?;
        Ok(Chat {
            sequence: Sequence::new(session.as_mut(), 0),
            template,
            session,
            messages: Vec::new(),
            answers: 0,
            sampling: model.sampling(),
            max_tokens: usize::MAX,
            thinking: None,
            stop: Vec::new(),
            interrupt: Arc::default(),
            model,
        })
    }

    /// Sets the system prompt, before the first message.
    pub fn system(&mut self, text: &str) {
        self.messages.insert(0, Message::new("system", text));
    }

    /// The messages so far; what the model thought is apart from its answers where its template reads it so.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Answers a message; `each` gets the text in pieces, thinking included, as it comes. If that fails, the
    /// message is not kept.
    ///
    /// # Errors
    /// Errors of [`Chat::answer`].
    pub fn ask(&mut self, text: &str, mut each: impl FnMut(&str)) -> Result<String> {
        let mut messages = std::mem::take(&mut self.messages);
        messages.push(Message::new("user", text));
        // Each answer draws from its own stream: the same message gets another one.
        let stream = self.answers;
        self.answers += 1;
        let answer = self.generate(&messages, stream, &mut each);
        match &answer {
            Ok((prompt, answer)) => messages.push(self.template.answer(prompt, &answer.text)),
            Err(_) => drop(messages.pop()),
        }
        self.messages = messages;
        answer.map(|(_, answer)| answer.text)
    }

    /// Answers the last of `messages`, whatever this chat has heard before; what they have in common with the last
    /// ones is not computed again. The same messages and seed get the same answer.
    ///
    /// # Errors
    /// A full context; sampling settings out of range; errors of the template and the device.
    pub fn answer(&mut self, messages: &[Message], mut each: impl FnMut(&str)) -> Result<Answer> {
        let answer = self.generate(messages, 0, &mut each)?;
        Ok(answer.1)
    }

    /// The prompt and the answer to it.
    fn generate(
        &mut self,
        messages: &[Message],
        stream: u64,
        each: &mut dyn FnMut(&str),
    ) -> Result<(String, Answer)> {
        let tokenizer = self.model.tokenizer();
        let control = tokenizer.control_tokens();
        let prompt = self
            .template
            .prompt(control, messages, None, true, self.thinking)?;
        let most = 2 * self.session.spec().ctx;
        let mut sampler = Sampler::new(self.sampling, stream)?;
        let limits = Limits {
            stop: self.model.checkpoint().eos_token_ids(),
            max_tokens: self.max_tokens,
            interrupt: Some(&self.interrupt),
        };
        let mut stops = StopTexts::new(&self.stop);
        let mut text = String::new();
        let mut emit = |piece: &str| {
            if !piece.is_empty() {
                text.push_str(piece);
                each(piece);
            }
        };
        let generated = generate_text(
            self.session.as_mut(),
            &mut self.sequence,
            &tokenizer.encode_prompt_within(&prompt, most)?,
            tokenizer,
            &mut sampler,
            &limits,
            &mut |piece| {
                emit(&stops.push(piece));
                match stops.has_ended() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            },
        )?;
        emit(&stops.finish());
        let answer = Answer {
            text,
            end: generated.stop,
            stats: generated.stats,
        };
        Ok((prompt.text().into_owned(), answer))
    }
}
