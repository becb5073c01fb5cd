//! Drafts from the text itself (prompt lookup): what followed its last tokens where they stood before.
//! That finds quotations, edits and code; in new prose it finds nothing and costs nothing.

use super::{Draft, Drafter};
use crate::error::Result;
use std::collections::BTreeMap;

/// Looks the end of a text up in the text.
#[derive(Clone, Debug, Default)]
pub struct Ngram {
    /// How far back the latest long match was, by slot: what is copied with changes goes on at about the
    /// same distance.
    copied: BTreeMap<usize, usize>,
}

/// Tokens that must agree for what followed them to be drafted: with fewer, common words draft
/// noise.
const LEAST_MATCH: usize = 3;
/// Tokens that are compared, at most: a longer match is no better.
const MOST_MATCH: usize = 32;
/// Agreeing tokens from which on a match is of the next [`Draft::kind`].
const KINDS: [usize; 2] = [5, 12];

impl Drafter for Ngram {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        for draft in drafts {
            let near = self.copied.get(&draft.slot).copied().unwrap_or(0);
            let Some(found) = Match::find(draft.text, near) else {
                continue;
            };
            if found.agree >= KINDS[1] {
                self.copied.insert(draft.slot, found.distance);
            }
            draft.kind = KINDS.iter().filter(|&&least| found.agree >= least).count();
            let from = &draft.text[draft.text.len() - found.distance..];
            draft.tokens = from[..draft.most.min(from.len())].to_vec();
        }
        Ok(())
    }

    fn is_free(&self) -> bool {
        true
    }
}

/// Where the end of a text stood before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Match {
    /// Tokens that agree.
    agree: usize,
    /// How far back.
    distance: usize,
}

impl Match {
    /// The longest, of several as long the one whose distance is the closest to `near`; none of fewer than
    /// [`LEAST_MATCH`] tokens.
    fn find(text: &[u32], near: usize) -> Option<Self> {
        let most = text.len().saturating_sub(LEAST_MATCH);
        let at = |distance: usize| {
            let before = text[..text.len() - distance].iter().rev();
            let both = before.zip(text.iter().rev()).take(MOST_MATCH);
            let agree = both.take_while(|(a, b)| a == b).count();
            Match { agree, distance }
        };
        let longest = |m: &Match| (m.agree, std::cmp::Reverse(m.distance.abs_diff(near)));
        let found = match (1..=most).contains(&near).then(|| at(near)) {
            // None is better.
            Some(m) if m.agree == MOST_MATCH => Some(m),
            _ => (1..=most).rev().map(at).max_by_key(longest),
        };
        found.filter(|m| m.agree >= LEAST_MATCH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(text: &[u32], most: usize, copied: usize) -> (Vec<u32>, usize) {
        let mut ngram = Ngram::default();
        ngram.copied.insert(0, copied);
        let mut draft = Draft {
            slot: 0,
            text,
            most,
            tokens: Vec::new(),
            kind: 0,
        };
        ngram.draft(std::slice::from_mut(&mut draft)).unwrap();
        (draft.tokens, draft.kind)
    }

    fn tokens(text: &[u32], most: usize) -> Vec<u32> {
        lookup(text, most, 0).0
    }

    #[test]
    fn drafts_follow_the_longest_match() {
        assert!(tokens(&[], 4).is_empty());
        assert!(tokens(&[1, 2, 3], 4).is_empty());
        // Two tokens agree: too few.
        assert!(tokens(&[1, 2, 9, 1, 2], 4).is_empty());
        assert_eq!(tokens(&[1, 2, 3, 9, 8, 1, 2, 3], 1), [9]);
        assert_eq!(tokens(&[1, 2, 3, 9, 8, 1, 2, 3], 4), [9, 8, 1, 2]);
        // A longer match further back wins; of equals the last.
        let text = [7, 1, 2, 3, 4, 6, 1, 2, 3, 5, 7, 1, 2, 3];
        assert_eq!(tokens(&text, 1), [4]);
        let text = [1, 2, 3, 4, 6, 1, 2, 3, 5, 8, 1, 2, 3];
        assert_eq!(tokens(&text, 1), [5]);
        // A run repeats itself.
        assert_eq!(tokens(&[5; 6], 3), [5]);
        assert!(tokens(&[5; 9], 0).is_empty());
    }

    #[test]
    fn drafts_go_on_where_a_copy_was_made() {
        // Both 4 and 5 follow 1, 2, 3: ten tokens back, and five.
        let text = [1, 2, 3, 4, 6, 1, 2, 3, 5, 8, 1, 2, 3];
        assert_eq!(lookup(&text, 1, 9).0, [4]);
        assert_eq!(lookup(&text, 1, 6).0, [5]);
        // A long match is remembered.
        let copied: Vec<u32> = (10..60).chain(10..50).collect();
        let mut ngram = Ngram::default();
        let mut draft = Draft {
            slot: 3,
            text: &copied,
            most: 2,
            tokens: Vec::new(),
            kind: 0,
        };
        ngram.draft(std::slice::from_mut(&mut draft)).unwrap();
        assert_eq!((draft.tokens, draft.kind), (vec![50, 51], 2));
        assert_eq!(ngram.copied[&3], 50);
    }

    #[test]
    fn longer_matches_are_of_another_kind() {
        for (agree, kind) in [(3, 0), (4, 0), (5, 1), (11, 1), (12, 2), (40, 2)] {
            let phrase: Vec<u32> = (100..100 + agree).collect();
            let text = [&[1], &phrase[..], &[2, 3], &phrase].concat();
            assert_eq!(lookup(&text, 1, 0), (vec![2], kind));
        }
    }
}
