//! Drafts from the text itself (prompt lookup): what followed its last tokens where they stood before.
//! That finds quotations, edits and code; in new prose it finds nothing and costs nothing.

use super::{Draft, Drafter};
use crate::error::Result;

/// Looks the end of a text up in the text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ngram;

/// Tokens that must agree for what followed them to be drafted: with fewer, common words draft
/// noise.
const LEAST_MATCH: usize = 3;
/// Tokens that are compared, at most: a longer match is no better.
const MOST_MATCH: usize = 32;

impl Drafter for Ngram {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        for draft in drafts {
            draft.tokens = lookup(draft.text, draft.most).to_vec();
        }
        Ok(())
    }

    fn is_free(&self) -> bool {
        true
    }
}

/// At most `most` tokens that followed the longest match of the end of `text` with what stands before;
/// of several as long the last one's. Empty if fewer than three tokens agree.
fn lookup(text: &[u32], most: usize) -> &[u32] {
    let (mut best, mut found) = (LEAST_MATCH - 1, &[][..]);
    // `end` is where a match would end, and its continuation begin.
    for end in (LEAST_MATCH..text.len()).rev() {
        let both = text[..end].iter().rev().zip(text.iter().rev());
        let agree = both.take(MOST_MATCH).take_while(|(a, b)| a == b).count();
        if agree > best {
            (best, found) = (agree, &text[end..text.len().min(end + most)]);
            if agree == MOST_MATCH {
                break;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::lookup;

    #[test]
    fn drafts_follow_the_longest_match() {
        assert!(lookup(&[], 4).is_empty());
        assert!(lookup(&[1, 2, 3], 4).is_empty());
        // Two tokens agree: too few.
        assert!(lookup(&[1, 2, 9, 1, 2], 4).is_empty());
        assert_eq!(lookup(&[1, 2, 3, 9, 8, 1, 2, 3], 1), [9]);
        assert_eq!(lookup(&[1, 2, 3, 9, 8, 1, 2, 3], 4), [9, 8, 1, 2]);
        // A longer match further back wins; of equals the last.
        let text = [7, 1, 2, 3, 4, 6, 1, 2, 3, 5, 7, 1, 2, 3];
        assert_eq!(lookup(&text, 1), [4]);
        let text = [1, 2, 3, 4, 6, 1, 2, 3, 5, 8, 1, 2, 3];
        assert_eq!(lookup(&text, 1), [5]);
        // A run repeats itself.
        assert_eq!(lookup(&[5; 6], 3), [5]);
        assert!(lookup(&[5; 9], 0).is_empty());
    }
}
