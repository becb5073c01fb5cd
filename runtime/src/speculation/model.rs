//! Drafts by a smaller model with the same vocabulary.
//!
//! It drafts its most likely token at each position, even if the target's sampler draws at random. Drawing with
//! the target's random numbers would agree less often: a draw inverts the cumulative distribution in the order
//! of token ids, so small differences between the two distributions select other tokens.

mod ahead;

use crate::error::{Error, Result};
use crate::interface::{Chunk, Draft, Drafter, LogitsWanted, Session};
use crate::sampler::best_token;

/// The session of a draft model. It drafts for the sequences in the same slots of another session.
pub struct DraftModel {
    session: Box<dyn Session>,
    /// Ids below this are tokens of both models.
    vocab: usize,
    /// The tokens in each slot.
    held: Vec<Vec<u32>>,
}

/// A draft that is not complete yet.
struct Active {
    /// Its index among the drafts.
    at: usize,
    slot: usize,
    /// Tokens of its text, or of the draft, that are fed next.
    feed: Vec<u32>,
    /// Tokens to draft.
    most: usize,
}

impl DraftModel {
    /// Drafts in `session`, which has as many slots as the session that it drafts for. Ids of `vocab` and above
    /// exist in only one of the two models. Texts that are longer than the session's context get no drafts.
    pub fn new(session: Box<dyn Session>, vocab: usize) -> Self {
        let held = vec![Vec::new(); session.spec().slots];
        DraftModel {
            session,
            vocab,
            held,
        }
    }

    /// Truncates the slot to tokens that it shares with `text`, and returns the rest of `text`, at least its
    /// last token.
    fn missing<'t>(&mut self, slot: usize, text: &'t [u32]) -> &'t [u32] {
        let held = &mut self.held[slot];
        let most = text.len() - 1;
        let same = held.iter().zip(&text[..most]);
        let common = same.take_while(|(a, b)| a == b).count();
        let reached = self.session.truncate(slot, common);
        held.truncate(reached);
        &text[reached..]
    }

    /// The drafts that can be made now, with the tokens of their texts that are still to be fed. A text that is
    /// too long for one step is computed in parts, one part per call; no drafts are made in such a call.
    fn begin(&mut self, drafts: &[Draft<'_>]) -> Result<Vec<Active>> {
        let mut rows_left = self.session.spec().max_rows;
        let mut active: Vec<Active> = Vec::new();
        for (at, draft) in drafts.iter().enumerate() {
            let (slot, most) = (draft.slot, self.room(draft));
            if most == 0 {
                continue;
            }
            let missing = self.missing(slot, draft.text);
            if missing.len() <= rows_left {
                rows_left -= missing.len();
                let feed = missing.to_vec();
                active.push(Active {
                    at,
                    slot,
                    feed,
                    most,
                });
            } else if active.is_empty() {
                let part = missing[..rows_left].to_vec();
                let chunk = Chunk {
                    slot,
                    tokens: &part,
                    logits: LogitsWanted::None,
                };
                match self.session.forward(&[chunk], None).map(drop) {
                    Ok(()) => self.held[slot].extend(part),
                    Err(Error::PagesFull { .. }) => drop(self.forget_others(&[slot])),
                    Err(e) => return Err(e),
                }
                return Ok(active);
            }
        }
        Ok(active)
    }

    /// Drafts with forward passes whose logits come to the host.
    fn draft_on_host(&mut self, drafts: &mut [Draft<'_>], mut active: Vec<Active>) -> Result<()> {
        while !active.is_empty() {
            let Some(best) = self.feed(&active)? else {
                return Ok(());
            };
            for (active, token) in active.iter_mut().zip(best) {
                drafts[active.at].tokens.push(token);
                active.feed = vec![token];
            }
            active.retain(|g| drafts[g.at].tokens.len() < g.most);
        }
        Ok(())
    }

    /// Feeds the active drafts and returns the most likely next token of each. `None` if there are no free pages,
    /// not even after sequences that are not drafted for have given up theirs.
    fn feed(&mut self, active: &[Active]) -> Result<Option<Vec<u32>>> {
        let chunks: Vec<Chunk<'_>> = active
            .iter()
            .map(|g| Chunk {
                slot: g.slot,
                tokens: &g.feed,
                logits: LogitsWanted::Last,
            })
            .collect();
        let vocab = self.vocab;
        let best = match self.session.forward(&chunks, None) {
            Ok(logits) => {
                let rows = (0..logits.rows()).map(|i| &logits.row(i)[..vocab]);
                rows.map(best_token).collect::<Result<_>>()?
            }
            Err(Error::PagesFull { .. }) => {
                let slots: Vec<usize> = active.iter().map(|g| g.slot).collect();
                return match self.forget_others(&slots) {
                    true => self.feed(active),
                    false => Ok(None),
                };
            }
            Err(e) => return Err(e),
        };
        for active in active {
            self.held[active.slot].extend_from_slice(&active.feed);
        }
        Ok(Some(best))
    }

    /// Frees the pages of sequences that are not in `slots`; false if there are none.
    fn forget_others(&mut self, slots: &[usize]) -> bool {
        let mut any = false;
        for slot in 0..self.held.len() {
            if !self.held[slot].is_empty() && !slots.contains(&slot) {
                self.held[slot].clear();
                self.session.truncate(slot, 0);
                any = true;
            }
        }
        any
    }

    /// Number of tokens that can be drafted after the draft's text.
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
        let active = self.begin(drafts)?;
        let rows = self.session.ahead().map(|device| device.rows());
        match rows {
            Some(rows) if active.len() <= rows => self.draft_ahead(drafts, active),
            _ => self.draft_on_host(drafts, active),
        }
    }
}
