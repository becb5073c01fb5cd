//! Prompt lookup: finds the text's last tokens earlier in the text, and drafts the tokens that followed there.
//! That works for quotations, edits and code; in new prose it finds nothing and costs nothing.

use crate::error::Result;
use crate::interface::{Draft, Drafter};
use std::collections::BTreeMap;

/// Drafts what followed an earlier occurrence of the text's last tokens.
#[derive(Clone, Debug, Default)]
pub struct Ngram {
    /// Distance of the latest long match, by slot. A copy with changes continues at about the same distance.
    copied: BTreeMap<usize, usize>,
}

/// Least number of tokens that must agree. With fewer, common words would lead to useless drafts.
const LEAST_MATCH: usize = 3;
/// Greatest number of tokens that are compared: a longer match is no better.
const MOST_MATCH: usize = 32;
/// Match lengths from which the [`Draft::kind`] is 1 and 2.
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

/// An earlier occurrence of the end of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Match {
    /// Number of tokens that agree.
    agree: usize,
    /// Tokens between the occurrence and the end.
    distance: usize,
}

impl Match {
    /// The longest match of at least [`LEAST_MATCH`] tokens; among equally long ones, the one whose distance is
    /// closest to `near`.
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
            // No match is longer.
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
        // A longer match further back wins; among equals, the last.
        let text = [7, 1, 2, 3, 4, 6, 1, 2, 3, 5, 7, 1, 2, 3];
        assert_eq!(tokens(&text, 1), [4]);
        let text = [1, 2, 3, 4, 6, 1, 2, 3, 5, 8, 1, 2, 3];
        assert_eq!(tokens(&text, 1), [5]);
        // A run repeats itself.
        assert_eq!(tokens(&[5; 6], 3), [5]);
        assert!(tokens(&[5; 9], 0).is_empty());
    }

    #[test]
    fn a_copy_continues_at_its_distance() {
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
