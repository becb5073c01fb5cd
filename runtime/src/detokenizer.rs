//! Converts a stream of token ids to text.

use crate::tokenizer::{TokenBytes, Tokenizer};
use std::sync::Arc;

/// Turns a stream of ids into text whose pieces, joined, are what [`Tokenizer::decode`] gives
/// for the whole. A piece never ends inside a character: bytes that may still become one are
/// kept back. A push costs time in proportion to the token's bytes, however long the stream.
pub struct Detokenizer {
    tokens: Arc<TokenBytes>,
    skip_special: bool,
    /// Start of a character that is not complete yet: at most 3 bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Begins a stream. `skip_special` leaves out tokens marked special.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        Detokenizer {
            tokens: Arc::clone(tokenizer.token_bytes()),
            skip_special,
            pending: Vec::new(),
        }
    }

    /// The text that this token completes; `None` if there is none yet. Bytes that
    /// can no longer become UTF-8 come as U+FFFD.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if self.skip_special && self.tokens.is_special(id) {
            return None;
        }
        self.pending.extend_from_slice(self.tokens.get(id));
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            if done + invalid.len() == self.pending.len() && is_prefix(invalid) {
                break;
            }
            done += invalid.len();
            text.push(char::REPLACEMENT_CHARACTER);
        }
        self.pending.drain(..done);
        (!text.is_empty()).then_some(text)
    }

    /// Ends the stream: U+FFFD if it stopped inside a character. The detokenizer is then as new.
    pub fn flush(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.pending);
        (!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned())
    }
}

/// True if more bytes could complete `bytes` to a character (also for no bytes at all).
fn is_prefix(bytes: &[u8]) -> bool {
    match std::str::from_utf8(bytes) {
        Ok(_) => true,
        Err(e) => e.error_len().is_none(),
    }
}
