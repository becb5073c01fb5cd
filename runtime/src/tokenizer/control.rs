//! Control tokens in texts, found in one pass whatever their number.

use aho_corasick::{AhoCorasick, MatchKind};
use std::collections::HashSet;
use std::ops::Range;

/// The tokens that a tokenizer marks special (`<|im_end|>`).
#[derive(Debug)]
pub struct ControlTokens {
    tokens: Vec<String>,
    /// All occurrences, also those within others.
    every: AhoCorasick,
    /// The leftmost occurrence; of several at the same place, the longest.
    leftmost: AhoCorasick,
    /// What a token can begin with, short of the whole of it.
    begun: HashSet<String>,
    /// Bytes of the longest of `begun`.
    longest: usize,
}

/// Most bytes of all control tokens. Published tokenizers have a few hundred tokens of 20 bytes.
const MOST_BYTES: usize = 1 << 20;

impl ControlTokens {
    /// These tokens.
    ///
    /// # Errors
    /// Tokens that are too long together, in words.
    pub fn new(tokens: Vec<String>) -> Result<Self, String> {
        let bytes: usize = tokens.iter().map(String::len).sum();
        let longest = tokens.iter().map(String::len).max().unwrap_or(0);
        if bytes > MOST_BYTES || longest > 1024 {
            return Err(format!(
                "special tokens: expected at most 1024 bytes in one and {MOST_BYTES} in all, found {longest} and {bytes}"
            ));
        }
        let search = |kind| {
            let search = AhoCorasick::builder().match_kind(kind).build(&tokens);
            search.map_err(|e| format!("special tokens: {e}"))
        };
        let parts = |token: &String| -> Vec<String> {
            let within = token.char_indices().skip(1);
            within.map(|(at, _)| token[..at].to_owned()).collect()
        };
        Ok(ControlTokens {
            every: search(MatchKind::Standard)?,
            leftmost: search(MatchKind::LeftmostLongest)?,
            begun: tokens.iter().flat_map(parts).collect(),
            longest: longest.saturating_sub(1),
            tokens,
        })
    }

    /// The tokens.
    pub fn as_slice(&self) -> &[String] {
        &self.tokens
    }

    /// Where a text has control tokens, from left to right and without overlaps.
    pub(crate) fn spans<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
        self.leftmost.find_iter(text).map(|found| found.range())
    }

    /// The places in a text behind the first character of each control token, and of anything at the text's
    /// end that could begin one, in order.
    pub(crate) fn places(&self, text: &str) -> Vec<usize> {
        let second = |at: usize| at + text[at..].chars().next().map_or(0, char::len_utf8);
        let whole = self.every.find_overlapping_iter(text);
        let mut places: Vec<usize> = whole.map(|found| second(found.start())).collect();
        let last = text.len().saturating_sub(self.longest)..text.len();
        let begun =
            last.filter(|&at| text.is_char_boundary(at) && self.begun.contains(&text[at..]));
        places.extend(begun.map(second));
        places.sort_unstable();
        places.dedup();
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_wherever_they_are_or_begin() {
        let tokens = ["<|im_end|>", "<|im|>", "<|im_end|>s", "é!"].map(str::to_owned);
        let control = ControlTokens::new(tokens.into()).unwrap();
        let check =
            |text: &str, places: &[usize]| assert_eq!(control.places(text), places, "{text}");
        check("", &[]);
        check("a<|im_end|>b<|im|>", &[2, 13]);
        check("<|im_end|>s<", &[1, 12]);
        check("a<|im_e", &[2]);
        check("é!é", &[2, 5]);
        let spans: Vec<_> = control.spans("<|im_end|>s<|im_end|>").collect();
        assert_eq!(spans, [0..11, 11..21]);
        assert!(ControlTokens::new(vec!["x".repeat(2000)]).is_err());
        assert_eq!(
            ControlTokens::new(Vec::new()).unwrap().places("<|im"),
            [0; 0]
        );
    }
}
