//! Speculative decoding: tokens are drafted, checked together in one forward, and kept as far as the
//! model draws the same ones.
//!
//! A token counts as right if the sampler, at its place, draws it: the text is what it is without
//! drafts, whatever the sampler's settings, where a device computes a few rows as it computes one
//! ([`Session::exact_rows`]). Drafts come from the text itself (prompt lookup): what followed the
//! last tokens where they stood before. That finds quotations, edits and code; in new prose it finds
//! nothing and costs nothing.

use crate::engine::{Chunk, LogitsWanted, Session};
use crate::error::{Error, Result};
use crate::sampler::Sampler;
use std::ops::ControlFlow;
use std::time::Instant;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafting {
    /// Nowhere: each forward gives one token.
    None,
    /// From the text so far, where that is exact and pays.
    #[default]
    Ngram,
    /// The same whether it pays or not, e.g. to see what it costs.
    NgramAlways,
}

/// Counts of [`decode_drafted`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Tokens drafted and checked.
    pub drafted: usize,
    /// Those that were right.
    pub accepted: usize,
}

/// Tokens that must agree for what followed them to be drafted: with fewer, common words draft
/// noise.
const LEAST_MATCH: usize = 3;
/// Tokens that are compared, at most: a longer match is no better.
const MOST_MATCH: usize = 32;

/// At most `most` tokens that followed the longest match of the end of `text` with what stands before;
/// of several as long the last one's. Empty if fewer than three tokens agree.
pub fn draft(text: &[u32], most: usize) -> &[u32] {
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

/// How many tokens to draft: what the forwards so far took, and how often drafts were right.
#[derive(Clone, Debug)]
pub struct DraftLength {
    /// Seconds of a forward of `i + 1` rows; `None`: not measured.
    seconds: Vec<Option<f64>>,
    /// Share of checked tokens that were right.
    right: f64,
    /// Draft all that is found.
    always: bool,
}

impl DraftLength {
    /// What a row costs more, in forwards of one, until it has been measured.
    const ROW: f64 = 0.25;
    /// Weight of a new measurement.
    const NEW: f64 = 0.2;
    /// Gain below which drafting is left alone.
    const LEAST_GAIN: f64 = 1.05;
    /// What `right` comes back to while nothing is drafted, and how fast: a text may begin to repeat.
    const HOPE: f64 = 0.5;
    const RECOVERY: f64 = 0.01;

    /// For forwards of up to `rows` rows; `always` drafts all that is found.
    pub fn new(rows: usize, always: bool) -> Self {
        DraftLength {
            seconds: vec![None; rows.max(1)],
            right: Self::HOPE,
            always,
        }
    }

    /// Tokens to draft of `found`: as many as give most tokens a second, or none.
    pub fn choose(&self, found: usize) -> usize {
        let most = found.min(self.seconds.len() - 1);
        if self.always {
            return most;
        }
        let gain = |n: usize| self.tokens(n) / self.cost(n + 1);
        let best = (1..=most).max_by(|&a, &b| gain(a).total_cmp(&gain(b)));
        best.filter(|&n| gain(n) > Self::LEAST_GAIN).unwrap_or(0)
    }

    /// Tokens that a forward with `n` drafted ones is expected to give.
    fn tokens(&self, n: usize) -> f64 {
        (0..=n as i32).map(|i| self.right.powi(i)).sum()
    }

    /// A forward of `rows` rows, in forwards of one.
    fn cost(&self, rows: usize) -> f64 {
        let guess = |from: f64, more: usize| from + Self::ROW * more as f64;
        let Some(one) = self.seconds[0] else {
            return guess(1.0, rows - 1);
        };
        // From the nearest number of rows below that was measured.
        let measured = (1..=rows)
            .rev()
            .find_map(|r| Some((r, self.seconds[r - 1]?)));
        measured.map_or(1.0, |(r, seconds)| guess(seconds / one, rows - r))
    }

    /// A forward of `rows` rows took so long.
    pub fn measured(&mut self, rows: usize, seconds: f64) {
        let known = &mut self.seconds[rows - 1];
        *known = Some(known.map_or(seconds, |k| k + Self::NEW * (seconds - k)));
    }

    /// Of drafted tokens `accepted` were right, and the next one was wrong if `missed`.
    pub fn checked(&mut self, accepted: usize, missed: bool) {
        for _ in 0..accepted {
            self.right += Self::NEW * (1.0 - self.right);
        }
        if missed {
            self.right -= Self::NEW * self.right;
        }
    }

    /// Nothing was drafted.
    pub fn rested(&mut self) {
        self.right += Self::RECOVERY * (Self::HOPE - self.right).max(0.0);
    }
}

/// As [`decode`](crate::batch::decode), with drafts of as many tokens as `length` says; `text` is what
/// the sequence holds, and the token that is fed next.
///
/// # Errors
/// The session's and the sampler's.
pub fn decode_drafted(
    session: &mut dyn Session,
    slot: usize,
    mut text: Vec<u32>,
    steps: usize,
    sampler: &mut Sampler,
    (length, counts): (&mut DraftLength, &mut DraftCounts),
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<()> {
    let end = text.len() + steps;
    while text.len() < end {
        // Each forward draws one token more than it checks.
        let most = (end - text.len() - 1).min(length.seconds.len() - 1);
        let found = draft(&text, most);
        let drafted = found[..length.choose(found.len())].to_vec();
        match step(session, slot, &mut text, &drafted, sampler, length, each) {
            Ok((accepted, more)) => {
                counts.drafted += drafted.len();
                counts.accepted += accepted;
                if more.is_break() {
                    return Ok(());
                }
            }
            // A draft must not end what goes on without it.
            Err(Error::NotFinite { .. } | Error::LogitsNotFinite | Error::PagesFull { .. })
                if !drafted.is_empty() =>
            {
                if step(session, slot, &mut text, &[], sampler, length, each)?
                    .1
                    .is_break()
                {
                    return Ok(());
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Feeds the last token of `text` and `drafted`, and draws until one differs: how many were right,
/// and whether `each` goes on. The session fails before anything is drawn.
fn step(
    session: &mut dyn Session,
    slot: usize,
    text: &mut Vec<u32>,
    drafted: &[u32],
    sampler: &mut Sampler,
    length: &mut DraftLength,
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<(usize, ControlFlow<()>)> {
    let fed = session.len(slot);
    let mut rows = text[text.len() - 1..].to_vec();
    rows.extend_from_slice(drafted);
    let chunk = Chunk {
        slot,
        tokens: &rows,
        logits: LogitsWanted::All,
    };
    let start = Instant::now();
    let logits = session.forward(&[chunk], None)?;
    length.measured(rows.len(), start.elapsed().as_secs_f64());
    let (mut accepted, mut drawn) = (0, 0);
    let result = loop {
        let token = match sampler.sample(logits.row(drawn)) {
            Ok(token) => token,
            Err(e) => break Err(e),
        };
        drawn += 1;
        text.push(token);
        let right = drafted.get(drawn - 1) == Some(&token);
        accepted += usize::from(right);
        let more = each(token);
        if more.is_break() || !right {
            break Ok(more);
        }
    };
    match drafted.is_empty() {
        true => length.rested(),
        false => length.checked(accepted, accepted < drafted.len()),
    }
    session.truncate(slot, fed + drawn.max(1));
    Ok((accepted, result?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_follow_the_longest_match() {
        assert!(draft(&[], 4).is_empty());
        assert!(draft(&[1, 2, 3], 4).is_empty());
        // Two tokens agree: too few.
        assert!(draft(&[1, 2, 9, 1, 2], 4).is_empty());
        assert_eq!(draft(&[1, 2, 3, 9, 8, 1, 2, 3], 1), [9]);
        assert_eq!(draft(&[1, 2, 3, 9, 8, 1, 2, 3], 4), [9, 8, 1, 2]);
        // A longer match further back wins; of equals the last.
        let text = [7, 1, 2, 3, 4, 6, 1, 2, 3, 5, 7, 1, 2, 3];
        assert_eq!(draft(&text, 1), [4]);
        let text = [1, 2, 3, 4, 6, 1, 2, 3, 5, 8, 1, 2, 3];
        assert_eq!(draft(&text, 1), [5]);
        // A run repeats itself.
        assert_eq!(draft(&[5; 6], 3), [5]);
        assert!(draft(&[5; 9], 0).is_empty());
    }

    #[test]
    fn lengths_follow_costs_and_luck() {
        let mut length = DraftLength::new(8, false);
        for rows in 1..=8 {
            length.measured(rows, 1.0 + 0.1 * (rows - 1) as f64);
        }
        (0..40).for_each(|_| length.checked(7, false));
        assert_eq!(length.choose(20), 7);
        assert_eq!(length.choose(3), 3);
        assert_eq!(length.choose(0), 0);
        // Always wrong: nothing is drafted, until some time has gone by.
        (0..40).for_each(|_| length.checked(0, true));
        assert_eq!(length.choose(20), 0);
        (0..300).for_each(|_| length.rested());
        assert!(length.choose(20) > 0);
        // Rows that cost as much as steps never pay.
        let mut dear = DraftLength::new(8, false);
        for rows in 1..=8 {
            dear.measured(rows, rows as f64);
        }
        (0..40).for_each(|_| dear.checked(7, false));
        assert_eq!(dear.choose(20), 0);
    }
}
