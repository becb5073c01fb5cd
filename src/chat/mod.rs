//! `nq chat` without its flags: the conversation, its input and its output. Only
//! [`repl`] knows the terminal.

pub mod conversation;
pub mod editor;
pub mod input;
pub mod interrupt;
pub mod piped;
pub mod printer;
pub mod repl;
pub mod report;
pub mod saved;
pub mod wrap;

/// What to do when the context is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Overflow {
    /// End the answer and say so
    Stop,
    /// Forget the oldest turns and say so
    DropOldest,
}
