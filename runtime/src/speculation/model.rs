//! Drafts by a smaller model with the same vocabulary.
//!
//! It draws the best token at each place, whatever the target's sampler does: a draw with the same random
//! number from another distribution agrees less often, as it inverts the sum over tokens in the order
//! of their ids.

mod ahead;

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

/// A draft that goes on.
struct Going {
    /// Its index.
    at: usize,
    slot: usize,
    /// Tokens of its text, or of the draft, that are fed next.
    feed: Vec<u32>,
    /// Tokens to draft.
    most: usize,
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

    /// Those of `drafts` that can be drafted now, with what they lack of their texts. A long text is
    /// computed in parts, one in each step: none go on then.
    fn begin(&mut self, drafts: &[Draft<'_>]) -> Result<Vec<Going>> {
        let mut rows_left = self.session.spec().max_rows;
        let mut going: Vec<Going> = Vec::new();
        for (at, draft) in drafts.iter().enumerate() {
            let (slot, most) = (draft.slot, self.room(draft));
            if most == 0 {
                continue;
            }
            let lacks = self.lacks(slot, draft.text);
            if lacks.len() <= rows_left {
                rows_left -= lacks.len();
                let feed = lacks.to_vec();
                going.push(Going {
                    at,
                    slot,
                    feed,
                    most,
                });
            } else if going.is_empty() {
                let part = lacks[..rows_left].to_vec();
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
                return Ok(going);
            }
        }
        Ok(going)
    }

    /// Drafts by forwards whose logits come to the host.
    fn draft_on_host(&mut self, drafts: &mut [Draft<'_>], mut going: Vec<Going>) -> Result<()> {
        while !going.is_empty() {
            let Some(best) = self.feed(&going)? else {
                return Ok(());
            };
            for (going, token) in going.iter_mut().zip(best) {
                drafts[going.at].tokens.push(token);
                going.feed = vec![token];
            }
            going.retain(|g| drafts[g.at].tokens.len() < g.most);
        }
        Ok(())
    }

    /// Feeds what goes on and returns the best token behind each. `None` if no pages are left, even
    /// those of sequences that are not drafted for.
    fn feed(&mut self, going: &[Going]) -> Result<Option<Vec<u32>>> {
        let chunks: Vec<Chunk<'_>> = going
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
                let slots: Vec<usize> = going.iter().map(|g| g.slot).collect();
                return match self.forget_others(&slots) {
                    true => self.feed(going),
                    false => Ok(None),
                };
            }
            Err(e) => return Err(e),
        };
        for going in going {
            self.held[going.slot].extend_from_slice(&going.feed);
        }
        Ok(Some(best))
    }

    /// Forgets sequences that are not in `slots`; false if there are none.
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
        let going = self.begin(drafts)?;
        let rows = self.session.steps_ahead().map(|device| device.rows());
        match rows {
            Some(rows) if going.len() <= rows => self.draft_ahead(drafts, going),
            _ => self.draft_on_host(drafts, going),
        }
    }
}
