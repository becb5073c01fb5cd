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

/// Where tokens are drafted from that are then checked together; answers stay the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Draft {
    /// What followed the same words earlier in the text, where the device computes several tokens as
    /// it computes one (CPUs do)
    Ngram,
    /// Nowhere
    None,
}

impl From<Draft> for nq_runtime::Drafting {
    fn from(draft: Draft) -> Self {
        match draft {
            Draft::Ngram => nq_runtime::Drafting::Ngram,
            Draft::None => nq_runtime::Drafting::None,
        }
    }
}

/// What to do when the context is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Overflow {
    /// End the answer and say so
    Stop,
    /// Forget the oldest turns and say so
    DropOldest,
}
