//! Answers, whoever asks for them: the prompt that a model's template makes of a chat, thinking and its budget, tools and
//! their calls, grammars, stop texts, and the loop from a prompt to an answer.
//!
//! [`ModelText::ask`] makes an [`Asked`] of a [`ChatInput`]. [`Answering`] answers it over a session, with drafts; a server draws
//! many answers at once by itself, with the same [`Hold`] and [`Reader`] for each.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.

#![forbid(unsafe_code)]

mod answering;
mod chat;
mod dialect;
mod error;
pub mod grammar;
mod hold;
pub mod images;
pub mod output;
mod text;

pub use answering::{Answer, Answering, Call, Drawing, End, OnPiece};
pub use chat::{Asked, ChatInput, Prompt, Thinking, ToolChoice};
pub use dialect::ToolPrompt;
pub use error::{Error, Result};
pub use grammar::{Format, Start};
pub use hold::{Constraint, Hold, ThinkingBudget};
pub use images::{Image, Sight, SightOptions};
pub use output::{Piece, Reader, ReaderOptions, Tagged};
pub use text::ModelText;
