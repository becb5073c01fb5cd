//! `nq chat` without its flags: the conversation, its input and its output. Only
//! [`repl`] knows the terminal.

pub(crate) mod conversation;
pub(crate) mod editor;
pub(crate) mod input;
pub mod interrupt;
pub mod piped;
pub(crate) mod printer;
pub(crate) mod repl;
pub mod report;
pub(crate) mod saved;
pub(crate) mod wrap;

/// What to do when the context is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Overflow {
    /// End the answer and say so
    Stop,
    /// Forget the oldest turns and say so
    DropOldest,
}
