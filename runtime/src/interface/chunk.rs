//! What a forward is fed, and what it gives.

use std::ops::Range;

/// New tokens of one sequence, at positions `len(slot) ..` of it.
#[derive(Clone, Debug)]
pub struct Chunk<'a> {
    /// The sequence.
    pub slot: usize,
    /// Token ids, at least one.
    pub tokens: &'a [u32],
    /// Rows whose logits are wanted.
    pub logits: LogitsWanted,
}

/// Which rows of a chunk get logits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogitsWanted {
    /// None: the head is not run.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
    /// These rows of the chunk.
    Window(Range<usize>),
}

impl LogitsWanted {
    /// The rows of a chunk of `len` tokens that get logits.
    pub fn rows(&self, len: usize) -> Range<usize> {
        match self {
            LogitsWanted::None => 0..0,
            LogitsWanted::Last => len.saturating_sub(1)..len,
            LogitsWanted::All => 0..len,
            LogitsWanted::Window(r) => r.clone(),
        }
    }
}

/// Logits of one forward: the wanted rows of all chunks, in chunk order.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    /// `[rows, vocab]`, row-major.
    pub data: &'a [f32],
    /// Tokens in the vocabulary, the length of a row.
    pub vocab: usize,
}

impl<'a> Logits<'a> {
    /// Logits of row `i`.
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.data.len() / self.vocab.max(1)
    }
}
