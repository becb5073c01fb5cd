//! A session that computes every step, but then draws the next token of a known text instead of its own.

use nq_kernels::rng::Philox;
use nq_runtime::interface::{Draft, Drawn, Run, Tapped};
use nq_runtime::{
    Chunk, Drafter, Logits, LogitsWanted, Observer, Pages, Result, Sampler, Session, SessionSpec,
    StepsAhead, Streams,
};
use std::collections::VecDeque;
use std::time::Duration;

pub(super) struct Replay {
    session: Box<dyn Session>,
    text: Vec<u32>,
    /// Share of positions at which it draws the text's token; at the others it draws a different one.
    right: f64,
    vocab: usize,
    /// `[rows, vocab]`: zeros but for the chosen ones.
    logits: Vec<f32>,
    chosen: Vec<usize>,
    /// Rows of the device's steps, and how many of them it queues.
    limits: (usize, usize),
    /// The positions in the text of the tokens that seated sequences are fed next, by row.
    seats: Vec<Option<usize>>,
    /// The same for the rows of each queued step.
    queued: VecDeque<Vec<Option<usize>>>,
}

impl Replay {
    /// A replay of `text` over `session`, whose model has `vocab` tokens.
    pub(super) fn new(session: Box<dyn Session>, text: Vec<u32>, right: f64, vocab: usize) -> Self {
        Replay {
            session,
            text,
            right,
            vocab,
            logits: Vec::new(),
            chosen: Vec::new(),
            limits: (0, 0),
            seats: Vec::new(),
            queued: VecDeque::new(),
        }
    }

    /// The token to draw after `position`.
    fn next(&self, position: usize) -> u32 {
        said(&self.text, position, self.right, self.vocab)
    }

    fn device(&mut self) -> &mut dyn StepsAhead {
        let device = self.session.ahead();
        device.expect("only a session that has a device hands it out")
    }
}

/// The token after `position` of `text` or, at a share of `1 - right` of all positions, a different one.
fn said(text: &[u32], position: usize, right: f64, vocab: usize) -> u32 {
    let token = text.get(position + 1).map_or(0, |&t| t);
    let [word, ..] = Philox::block([7, 7], 0, position as u64);
    match f64::from(word) < right * 2f64.powi(32) {
        true => token,
        false => (token + 1) % vocab as u32,
    }
}

/// A drafter that computes its drafts, but then says tokens of a known text instead of them.
pub(super) struct Told {
    pub(super) drafter: Box<dyn Drafter>,
    pub(super) text: Vec<u32>,
    /// Share of positions at which it says the text's token; at the others it says a different one.
    pub(super) right: f64,
    pub(super) vocab: usize,
}

impl Drafter for Told {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        self.drafter.draft(drafts)?;
        for draft in drafts {
            for (i, token) in draft.tokens.iter_mut().enumerate() {
                let position = (draft.text.len() + i).saturating_sub(1);
                *token = said(&self.text, position, self.right, self.vocab);
            }
        }
        Ok(())
    }

    fn reads_streams(&self) -> bool {
        self.drafter.reads_streams()
    }

    fn see(&mut self, slot: usize, tapped: Tapped) {
        self.drafter.see(slot, tapped);
    }
}

impl Session for Replay {
    fn spec(&self) -> SessionSpec {
        self.session.spec()
    }

    fn len(&self, slot: usize) -> usize {
        self.session.len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        self.session.truncate(slot, len)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.session.fork(from, to, len)
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        self.session.reach(slot, len)
    }

    fn keep_at(&mut self, slot: usize, len: usize) {
        self.session.keep_at(slot, len);
    }

    fn snapshots(&self) -> (usize, usize) {
        self.session.snapshots()
    }

    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        self.session.hidden(chunks, out)
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        self.session.pages()
    }

    fn streams(&mut self) -> Option<&mut dyn Streams> {
        self.session.streams()
    }

    fn exact_rows(&self) -> usize {
        self.session.exact_rows()
    }

    fn draft_rows(&self) -> usize {
        self.session.draft_rows()
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        let rows = |c: &Chunk<'_>| LogitsWanted::rows(&c.logits, c.tokens.len());
        let places: Vec<usize> = chunks
            .iter()
            .flat_map(|c| rows(c).map(|row| self.session.len(c.slot) + row))
            .collect();
        self.session.forward(chunks, observer)?;
        for at in self.chosen.drain(..) {
            self.logits[at] = 0.0;
        }
        self.logits.resize(places.len() * self.vocab, 0.0);
        for (row, &place) in places.iter().enumerate() {
            let at = row * self.vocab + self.next(place) as usize;
            self.logits[at] = 100.0;
            self.chosen.push(at);
        }
        Ok(Logits {
            data: &self.logits,
            vocab: self.vocab,
        })
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        let device = self.session.ahead()?;
        self.limits = (device.rows(), device.depth());
        Some(self)
    }
}

/// The device continues with the tokens that it draws itself; the host receives those of the text.
impl StepsAhead for Replay {
    fn rows(&self) -> usize {
        self.limits.0
    }

    fn depth(&self) -> usize {
        self.limits.1
    }

    fn draws(&mut self, sampler: &Sampler) -> bool {
        self.device().draws(sampler)
    }

    /// Nothing to check here: tokens are checked when their sequence is seated.
    fn check(&self, _: &[u32], _: Option<&Sampler>) -> Result<()> {
        Ok(())
    }

    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self.device().queue_prompts(chunks)
    }

    fn finish_prompts(&mut self) -> Result<Duration> {
        self.device().finish_prompts()
    }

    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()> {
        self.device().seat(row, slot, token, sampler)?;
        let most = self.seats.len().max(row + 1);
        self.seats.resize(most, None);
        self.seats[row] = Some(self.session.len(slot));
        Ok(())
    }

    fn vacate(&mut self, row: usize) -> Result<()> {
        self.seats[row] = None;
        self.device().vacate(row)
    }

    fn queue(&mut self) -> Result<()> {
        self.device().queue()?;
        self.queued.push_back(self.seats.clone());
        self.seats
            .iter_mut()
            .flatten()
            .for_each(|place| *place += 1);
        Ok(())
    }

    fn queue_runs(&mut self, runs: &[Run<'_>]) -> Result<()> {
        let places = |run: &Run<'_>| {
            let first = self.session.len(run.slot);
            (first..first + run.tokens.len()).map(Some)
        };
        let places = runs.iter().flat_map(places).collect();
        self.device().queue_runs(runs)?;
        self.queued.push_back(places);
        Ok(())
    }

    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()> {
        let places = self.queued.pop_front().unwrap_or_default();
        let mut received = Vec::new();
        self.device()
            .receive(&mut |row, drawn| received.push((row, drawn)))?;
        for (row, drawn) in received {
            let place = places.get(row).copied().flatten();
            let said = place.map(|place| self.next(place));
            let drawn = drawn.map(|drawn| Drawn {
                token: said.unwrap_or(drawn.token),
                ..drawn
            });
            each(row, drawn);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_tokens_are_right_as_asked() {
        struct Nothing;
        impl Session for Nothing {
            fn spec(&self) -> SessionSpec {
                SessionSpec::default()
            }
            fn len(&self, _: usize) -> usize {
                0
            }
            fn truncate(&mut self, _: usize, _: usize) -> usize {
                0
            }
            fn fork(&mut self, _: usize, _: usize, _: usize) -> Result<usize> {
                Ok(0)
            }
            fn hidden(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<()> {
                Ok(())
            }
            fn forward(
                &mut self,
                _: &[Chunk<'_>],
                _: Option<&mut dyn Observer>,
            ) -> Result<Logits<'_>> {
                Ok(Logits {
                    data: &[],
                    vocab: 50,
                })
            }
        }
        let text: Vec<u32> = (0..2000).map(|i| i % 50).collect();
        for (share, least, most) in [(1.0, 1999, 1999), (0.7, 1330, 1470), (0.0, 0, 0)] {
            let mut replay = Replay::new(Box::new(Nothing), text.clone(), share, 50);
            let chunk = Chunk {
                slot: 0,
                tokens: &text[..1999],
                logits: LogitsWanted::All,
            };
            let logits = replay.forward(&[chunk], None).unwrap();
            let hot = |i: usize| logits.row(i)[text[i + 1] as usize] > 0.0;
            let right = (0..1999).filter(|&i| hot(i)).count();
            assert!((least..=most).contains(&right), "{share}: {right}");
        }
    }
}
