//! An answer as a list of blocks, for protocols with this structure: thinking, text and calls, each of
//! which begins, grows and ends before the next one.

use super::unique;
use nq_answers::output::Piece;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnswerBlock {
    /// Thinking.
    Reasoning(String),
    /// Text.
    Text(String),
    /// A tool call.
    Call {
        /// Its id.
        id: String,
        /// Name of the tool.
        name: String,
        /// The arguments as JSON text.
        arguments: String,
    },
}

/// A change that a piece of an answer makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The block with this index begins.
    Open(usize),
    /// The block with this index grows by this text.
    Grow(usize, String),
    /// The block with this index ends.
    Close(usize),
}

/// The blocks of one answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    list: Vec<AnswerBlock>,
    open: bool,
}

impl Blocks {
    /// All blocks so far.
    pub(crate) fn list(&self) -> &[AnswerBlock] {
        &self.list
    }

    /// Adds pieces. `call` is the prefix of calls' ids.
    pub(crate) fn push(&mut self, pieces: Vec<Piece>, call: &str) -> Vec<Change> {
        let mut changes = Vec::new();
        for piece in pieces {
            let same = matches!(
                (self.list.last(), &piece),
                (Some(AnswerBlock::Reasoning(_)), Piece::Reasoning(_))
                    | (Some(AnswerBlock::Text(_)), Piece::Text(_))
                    | (Some(AnswerBlock::Call { .. }), Piece::CallArguments { .. })
            );
            if !(same && self.open) {
                changes.extend(self.close());
                self.list.push(match &piece {
                    Piece::Reasoning(_) => AnswerBlock::Reasoning(String::new()),
                    Piece::Text(_) => AnswerBlock::Text(String::new()),
                    Piece::CallStart { name, .. } => AnswerBlock::Call {
                        id: unique(call),
                        name: name.clone(),
                        arguments: String::new(),
                    },
                    // Arguments come directly after the start of their call.
                    Piece::CallArguments { .. } => continue,
                });
                self.open = true;
                changes.push(Change::Open(self.list.len() - 1));
            }
            let at = self.list.len() - 1;
            match (&mut self.list[at], piece) {
                (AnswerBlock::Reasoning(all), Piece::Reasoning(text))
                | (AnswerBlock::Text(all), Piece::Text(text))
                | (AnswerBlock::Call { arguments: all, .. }, Piece::CallArguments { text, .. }) => {
                    all.push_str(&text);
                    changes.push(Change::Grow(at, text));
                }
                _ => {}
            }
        }
        changes
    }

    /// Ends the last block, if it has not ended yet.
    pub(crate) fn close(&mut self) -> Option<Change> {
        std::mem::take(&mut self.open).then(|| Change::Close(self.list.len() - 1))
    }
}
