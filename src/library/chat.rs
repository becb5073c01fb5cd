//! Chats.

use super::{Error, Model, Result};
use nq_answers::Sight;
use nq_answers::images::{Image, message_with_images};
use nq_answers::{
    Answer, Answering, Asked, Drawing, Format, OnPiece, Piece, Start, Tagged, Thinking, ToolChoice,
};
use nq_formats::Task;
use nq_runtime::{Message, SamplingParams, Sequence, Session, SessionSpec};
use serde_json::Value;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Positions of a chat, if the model has as many.
const CONTEXT: usize = 8192;

/// A conversation with a model. What was said is kept in its cache.
pub struct Chat {
    model: Model,
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
    /// Most tokens of thinking; the thinking is then closed and the answer begins.
    pub thinking_budget: Option<usize>,
    /// Texts that end an answer, without being part of it.
    pub stop: Vec<String>,
    /// Tools that the model may call, in the format of OpenAI's chat: `{"type": "function", "function": {"name": ...,
    /// "description": ..., "parameters": a JSON schema}}`.
    pub tools: Vec<Value>,
    /// Which of the tools it may call.
    pub tool_choice: ToolChoice,
    /// The format that answers have: a JSON schema, a pattern or a grammar.
    pub format: Option<Format>,
    /// The number of most probable tokens to report with the log-probabilities of each token; `None` computes none.
    pub logprobs: Option<usize>,
    /// Ends an answer once another thread or the function that gets the pieces sets it; it stays set.
    pub interrupt: Arc<AtomicBool>,
}

impl Chat {
    pub(super) fn new(model: Model, ctx: Option<usize>) -> Result<Self> {
        if matches!(model.checkpoint().task(), Task::Embed(_)) {
            let why = "an embedding model, which generates no text";
            return Err(Error::unsuited(format!("{}: {why}", model.name())));
        }
        let trained = model.checkpoint().config().longest_context();
        let ctx = ctx.unwrap_or(CONTEXT.min(trained));
        if !(2..=trained).contains(&ctx) {
            let error = nq_runtime::Error::Request {
                what: "context",
                expected: format!("2 to {trained} tokens"),
                found: ctx.to_string(),
            };
            return Err(error.into());
        }
        let mut session = model.engine().session(SessionSpec {
            slots: 1,
            ctx,
            kv: model.kv(),
            max_rows: model.engine().description().prompt_rows().min(ctx),
            drafts: model.drafted_by(),
            ..SessionSpec::default()
        })?;
        let drafts = model.speculation(session.as_mut())?;
        Ok(Chat {
            sequence: Sequence::new(session.as_mut(), 0).with_drafts(drafts),
            session,
            messages: Vec::new(),
            answers: 0,
            sampling: model.sampling(),
            max_tokens: usize::MAX,
            thinking: None,
            thinking_budget: None,
            stop: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            format: None,
            logprobs: None,
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

    /// Like [`Chat::ask`], about images, given as the bytes of their files: PNG, JPEG, WebP, GIF or BMP.
    ///
    /// # Errors
    /// A model that reads text alone; bytes that are no image, or exceed limits; errors of [`Chat::answer`].
    pub fn ask_about(
        &mut self,
        images: &[impl AsRef<[u8]>],
        text: &str,
        each: impl FnMut(&str),
    ) -> Result<String> {
        let message = message_with_images(images, text)?;
        self.ask_message(message, each)
    }

    /// Answers a message; `each` gets the text in pieces as it comes, what was thought between `<think>` and
    /// `</think>`. If that fails, the message is not kept.
    pub fn ask(&mut self, text: &str, each: impl FnMut(&str)) -> Result<String> {
        self.ask_message(Message::new("user", text), each)
    }

    fn ask_message(&mut self, message: Message, each: impl FnMut(&str)) -> Result<String> {
        let mut messages = std::mem::take(&mut self.messages);
        messages.push(message);
        // Each answer draws from its own stream: the same message gets another one.
        let stream = self.answers;
        self.answers += 1;
        let answer = self.generate(&messages, stream, &mut spoken(each));
        match &answer {
            Ok(answer) => messages.push(answer.message.clone()),
            Err(_) => drop(messages.pop()),
        }
        self.messages = messages;
        answer.map(|answer| answer.whole())
    }

    /// Answers the last of `messages`, whatever this chat has heard before; what they have in common with the last
    /// ones is not computed again. The same messages and seed get the same answer. `each` gets pieces as for
    /// [`Chat::ask`].
    ///
    /// # Errors
    /// A full context; sampling settings out of range; tools, schemas and grammars that no answer can be held to;
    /// errors of the template and the device.
    pub fn answer(&mut self, messages: &[Message], each: impl FnMut(&str)) -> Result<Answer> {
        self.generate(messages, 0, &mut spoken(each))
    }

    /// Like [`Chat::answer`], with thinking, text and calls told apart; `each` may break the answer off.
    pub fn answer_pieces(
        &mut self,
        messages: &[Message],
        mut each: impl FnMut(&Piece) -> ControlFlow<()>,
    ) -> Result<Answer> {
        self.generate(messages, 0, &mut each)
    }

    /// Continues a text of these tokens, which no template sees. Tools and settings of thinking are not for it.
    ///
    /// # Errors
    /// Errors of [`Chat::answer`]; tokens past the vocabulary.
    pub fn continue_tokens(
        &mut self,
        tokens: &[u32],
        mut each: impl FnMut(&Piece) -> ControlFlow<()>,
    ) -> Result<Answer> {
        self.model.check_tokens(tokens)?;
        let asked = Asked {
            format: self.format.clone().map(|format| (format, Start::Answer)),
            ..Asked::continuation(tokens.to_vec(), self.stop.clone())
        };
        self.see(&asked, &[])?;
        self.draw(&asked, 0, &mut each)
    }

    fn generate(
        &mut self,
        messages: &[Message],
        stream: u64,
        each: &mut OnPiece<'_>,
    ) -> Result<Answer> {
        let (asked, images) = self.model.ask(
            nq_answers::ChatInput {
                messages: messages.to_vec(),
                tools: self.tools.clone(),
                choice: self.tool_choice.clone(),
                thinking: Thinking {
                    switches: self.thinking.into(),
                    budget: self.thinking_budget,
                },
                format: self.format.clone(),
                stop: self.stop.clone(),
                ..nq_answers::ChatInput::default()
            },
            2 * self.session.spec().ctx,
        )?;
        self.see(&asked, &images)?;
        self.draw(&asked, stream, each)
    }

    /// Has the sequence take images, which are encoded here, at their places in a prompt.
    fn see(&mut self, asked: &Asked, images: &[Image]) -> Result<()> {
        let stop = || self.interrupt.load(Ordering::Relaxed);
        let placed = |sight: &Sight| sight.placed(images, &asked.prompt.images, &stop);
        let placed = self.model.sight().map(placed).transpose()?;
        self.sequence.show(placed.unwrap_or_default());
        Ok(())
    }

    fn draw(&mut self, asked: &Asked, stream: u64, each: &mut OnPiece<'_>) -> Result<Answer> {
        let drawing = Drawing {
            sampling: self.sampling,
            stream,
            logprobs: self.logprobs,
            max_tokens: self.max_tokens,
            interrupt: &self.interrupt,
        };
        let mut answering = Answering::new(self.model.text(), asked, drawing)?;
        let session = self.session.as_mut();
        let end = answering.run(session, &mut self.sequence, &asked.prompt.tokens, each)?;
        Ok(answering.finish(end, each))
    }
}

/// Gives `each` the text of pieces.
fn spoken(mut each: impl FnMut(&str)) -> impl FnMut(&Piece) -> ControlFlow<()> {
    let mut tagged = Tagged::default();
    move |piece| {
        let text = tagged.text(piece);
        if !text.is_empty() {
            each(&text);
        }
        ControlFlow::Continue(())
    }
}
