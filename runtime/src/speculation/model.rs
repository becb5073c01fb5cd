//! Drafts by a smaller model with the same vocabulary.
//!
//! It draws the best token at each place, whatever the target's sampler does: a draw with the same random
//! number from another distribution agrees less often, as it inverts the sum over tokens in the order
//! of their ids.

use super::{Draft, Drafter};
use crate::engine::{Chunk, LogitsWanted, Session};
use crate::error::{Error, Result};
use crate::sampler::best_token;

/// A session of a model that drafts for the sequences in the same slots of another session.
pub struct DraftModel {
    session: Box<dyn Session>,
    /// Ids below this are tokens of both models.
    vocab: usize,
    /// What each slot holds.
    held: Vec<Vec<u32>>,
}

impl DraftModel {
    /// Drafts in `session`, which has as many slots as the session that it drafts for; ids from `vocab`
    /// on are rows of one of the two models alone. Where its context is shorter, it drafts for texts
    /// that fit.
    pub fn new(session: Box<dyn Session>, vocab: usize) -> Self {
        let held = vec![Vec::new(); session.spec().slots];
        DraftModel {
            session,
            vocab,
            held,
        }
    }

    /// Forgets what the slot holds beyond what `text` begins with, and returns what it lacks of it: the
    /// last token at least.
    fn lacks<'t>(&mut self, slot: usize, text: &'t [u32]) -> &'t [u32] {
        let held = &mut self.held[slot];
        let most = text.len() - 1;
        let same = held.iter().zip(&text[..most]);
        let common = same.take_while(|(a, b)| a == b).count();
        held.truncate(common);
        self.session.truncate(slot, common);
        &text[common..]
    }

    /// Feeds `rows` (slot, tokens) and returns the best token behind each. `None` if no pages are left,
    /// even those of sequences that are not drafted for.
    fn feed(
        &mut self,
        rows: &[(usize, Vec<u32>)],
        logits: LogitsWanted,
    ) -> Result<Option<Vec<u32>>> {
        let chunks: Vec<Chunk<'_>> = rows
            .iter()
            .map(|(slot, tokens)| Chunk {
                slot: *slot,
                tokens,
                logits: logits.clone(),
            })
            .collect();
        let vocab = self.vocab;
        let best = match self.session.forward(&chunks, None) {
            Ok(logits) => {
                let rows = (0..logits.rows()).map(|i| &logits.row(i)[..vocab]);
                rows.map(best_token).collect::<Result<_>>()?
            }
            Err(Error::PagesFull { .. }) => {
                return match self.forget_others(rows) {
                    true => self.feed(rows, logits),
                    false => Ok(None),
                };
            }
            Err(e) => return Err(e),
        };
        for (slot, tokens) in rows {
            self.held[*slot].extend_from_slice(tokens);
        }
        Ok(Some(best))
    }

    /// Forgets sequences that are not in `rows`; false if there are none.
    fn forget_others(&mut self, rows: &[(usize, Vec<u32>)]) -> bool {
        let mut any = false;
        for slot in 0..self.held.len() {
            if !self.held[slot].is_empty() && rows.iter().all(|r| r.0 != slot) {
                self.held[slot].clear();
                self.session.truncate(slot, 0);
                any = true;
            }
        }
        any
    }

    /// Tokens that can be drafted behind `text`.
    fn room(&self, draft: &Draft<'_>) -> usize {
        let ctx = self.session.spec().ctx;
        // The last token drafted is not fed.
        let room = (ctx + 1).saturating_sub(draft.text.len());
        let known = |text: &[u32]| text.iter().all(|&t| (t as usize) < self.vocab);
        match draft.text.is_empty() || !known(draft.text) {
            true => 0,
            false => room.min(draft.most),
        }
    }
}

impl Drafter for DraftModel {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        let mut rows_left = self.session.spec().max_rows;
        // (index, slot and tokens to feed) of those that are drafted for.
        let (mut of, mut rows) = (Vec::new(), Vec::new());
        for (i, draft) in drafts.iter().enumerate() {
            if self.room(draft) == 0 {
                continue;
            }
            let lacks = self.lacks(draft.slot, draft.text);
            if lacks.len() <= rows_left {
                rows_left -= lacks.len();
                of.push(i);
                rows.push((draft.slot, lacks.to_vec()));
            } else if rows.is_empty() {
                // A long prompt is computed in parts, one in each step.
                let part = [(draft.slot, lacks[..rows_left].to_vec())];
                self.feed(&part, LogitsWanted::None)?;
                return Ok(());
            }
        }
        while !rows.is_empty() {
            let Some(best) = self.feed(&rows, LogitsWanted::Last)? else {
                return Ok(());
            };
            let mut next = (Vec::new(), Vec::new());
            for (i, token) in of.into_iter().zip(best) {
                drafts[i].tokens.push(token);
                if drafts[i].tokens.len() < self.room(&drafts[i]) {
                    next.0.push(i);
                    next.1.push((drafts[i].slot, vec![token]));
                }
            }
            (of, rows) = next;
        }
        Ok(())
    }
}
