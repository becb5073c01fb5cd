//! A batch on a device that runs steps and draws their tokens by itself, ahead of the host.

use super::drafts::Drafts;
use super::{Batch, Each, Member, Piece, Ran, record};
use crate::error::{Error, Result};
use crate::interface::{Chunk, Drawn, LogitsWanted, StepsAhead, bucket};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Work queued on a device that the host has not waited for.
#[derive(Default)]
pub(super) struct Queue {
    work: VecDeque<QueuedWork>,
    /// When the device started the oldest entry, as far as the host knows.
    since: Option<Instant>,
    /// Estimated seconds per step.
    step: Option<f64>,
}

enum QueuedWork {
    /// Rows of prompts.
    Prompts(usize),
    /// A step: (row, slot) of each sequence in it; one that leaves is removed.
    Step(Vec<(usize, usize)>),
}

/// Seconds of work to keep queued, so that a host delayed by as much does not idle the device.
const AHEAD: f64 = 5e-3;
/// With fewer steps ahead, the device idles while the host handles a token.
const LEAST_AHEAD: usize = 2;
/// Weight of the latest step in the moving average of step times.
const LATEST: f64 = 0.2;

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.work.is_empty()
    }

    fn push(&mut self, work: QueuedWork) {
        if self.work.is_empty() {
            self.since = Some(Instant::now());
        }
        self.work.push_back(work);
    }

    /// True if rows of prompts are queued.
    pub(super) fn has_prompts(&self) -> bool {
        self.work
            .iter()
            .any(|w| matches!(w, QueuedWork::Prompts(_)))
    }

    pub(super) fn steps(&self) -> usize {
        let steps = self
            .work
            .iter()
            .filter(|w| matches!(w, QueuedWork::Step(_)));
        steps.count()
    }

    /// Steps to keep queued, up to `most`: queued work delays the next sequence that joins, and drafts.
    fn depth(&self, most: usize, drafting: bool) -> usize {
        let least = LEAST_AHEAD.min(most);
        let steps = self.step.map_or(most, |t| (AHEAD / t).ceil() as usize);
        steps.clamp(least, if drafting { least } else { most })
    }

    /// Time since the previous work was waited for.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let since = self.since.replace(now);
        since.map_or(Duration::ZERO, |since| now - since)
    }

    /// Removes a sequence from all queued steps.
    pub(super) fn forget(&mut self, slot: usize) {
        for work in &mut self.work {
            if let QueuedWork::Step(rows) = work {
                rows.retain(|r| r.1 != slot);
            }
        }
    }

    /// Waits for all queued work.
    pub(super) fn drain(&mut self, device: &mut dyn StepsAhead) {
        for work in self.work.drain(..) {
            // The next call returns the error again.
            let _ = match work {
                QueuedWork::Prompts(_) => device.finish_prompts().map(drop),
                QueuedWork::Step(_) => device.receive(&mut |_, _| {}),
            };
        }
    }
}

impl Batch<'_> {
    /// True if there is a device, and it has rows for all sequences and draws as their samplers do.
    pub(super) fn runs_ahead(&mut self, pieces: &[Piece<'_>]) -> bool {
        let Some(device) = self.session.ahead() else {
            return false;
        };
        let members = self.members.iter().map(|m| &m.sampler);
        let joining = pieces
            .iter()
            .filter_map(|p| Some(&p.then.as_ref()?.sampler));
        let mut all = members.chain(joining);
        all.clone().count() <= device.rows() && all.all(|sampler| device.draws(sampler))
    }

    pub(super) fn step_ahead(&mut self, pieces: Vec<Piece<'_>>, each: &mut Each<'_>) -> Result<()> {
        if let Some(device) = self.session.ahead() {
            for piece in &pieces {
                let sampler = piece.then.as_ref().map(|t| &t.sampler);
                device.check(piece.tokens, sampler)?;
            }
        }
        // False if steps run ahead, or have to.
        let mut waits = self.members.is_empty();
        if pieces.is_empty() || self.reads_every_step() {
            match self.drafts_ahead() {
                Drafts::Coming if pieces.is_empty() => return self.receive(each),
                Drafts::Here(drafts) => {
                    waits = self.check_drafts(&drafts, each)?;
                    if waits && pieces.is_empty() {
                        return Ok(());
                    }
                }
                Drafts::Coming | Drafts::None => {}
            }
        }
        // Steps of running sequences go before prompts, so that their tokens do not wait.
        if !waits {
            self.fill()?;
        }
        let prompts = self.queue_prompts(&pieces)?;
        for piece in pieces {
            if let Some(&token) = piece.tokens.last() {
                let len = self.session.len(piece.slot);
                self.join(piece.slot, token, len, piece.then);
            }
        }
        if waits && self.reads_every_step() {
            while self.queue.steps() > 0 {
                self.receive(each)?;
            }
            while !self.queue.is_empty() {
                self.finish_prompts()?;
            }
            return Ok(());
        }
        self.fill()?;
        self.tell_blocked(each);
        if self.queue.steps() > 0 {
            return self.receive(each);
        }
        // While the host prepares more prompts, the device must not run out of work.
        let ahead = usize::from(prompts);
        while self.queue.work.len() > ahead {
            self.finish_prompts()?;
        }
        Ok(())
    }

    /// Queues the rows of `pieces`, except the last row of a piece that continues, which its first
    /// step is fed; true if there are any.
    fn queue_prompts(&mut self, pieces: &[Piece<'_>]) -> Result<bool> {
        let chunks: Vec<Chunk<'_>> = pieces
            .iter()
            .map(|p| Chunk {
                slot: p.slot,
                tokens: &p.tokens[..p.tokens.len() - usize::from(p.then.is_some())],
                logits: LogitsWanted::None,
            })
            .filter(|c| !c.tokens.is_empty())
            .collect();
        let (Some(device), false) = (self.session.ahead(), chunks.is_empty()) else {
            return Ok(false);
        };
        device.queue_prompts(&chunks)?;
        let rows = chunks.iter().map(|c| c.tokens.len()).sum();
        self.queue.push(QueuedWork::Prompts(rows));
        Ok(true)
    }

    /// Queues the tokens that sequences have lost, like prompts. One for which there are no pages is blocked.
    pub(super) fn queue_lost(&mut self) -> Result<()> {
        let rows = self.session.spec().max_rows.max(1);
        let Some(device) = self.session.ahead() else {
            return Ok(());
        };
        for member in &mut self.members {
            while member.feed.len() > 1 && member.blocked.is_none() {
                let n = rows.min(member.feed.len() - 1);
                let chunk = Chunk {
                    slot: member.slot,
                    tokens: &member.feed[..n],
                    logits: LogitsWanted::None,
                };
                match device.queue_prompts(&[chunk]) {
                    Ok(()) => {
                        member.feed.drain(..n);
                        member.len += n;
                        self.queue.push(QueuedWork::Prompts(n));
                    }
                    Err(e @ Error::PagesFull { .. }) => member.blocked = Some(e),
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(())
    }

    /// Waits for the prompts at the front of the queue.
    pub(super) fn finish_prompts(&mut self) -> Result<()> {
        if let (Some(QueuedWork::Prompts(rows)), Some(device)) =
            (self.queue.work.front(), self.session.ahead())
        {
            let prompt_rows = *rows;
            self.queue.work.pop_front();
            let took = device.finish_prompts()?;
            self.queue.lap();
            self.ran.push(Ran {
                took,
                decoding: 0,
                prompt_rows,
            });
        }
        Ok(())
    }

    /// Removes sequences that cannot continue and have nothing queued, and reports why.
    fn tell_blocked(&mut self, each: &mut Each<'_>) {
        let told = |m: &Member| m.queued == 0 && m.blocked.is_some();
        while let Some(at) = self.members.iter().position(told) {
            if let Some(e) = self.members[at].blocked.take() {
                self.deliver(at, Err(e), false, each);
            }
        }
    }

    /// Keeps the device ahead: seats members that have no row, and queues steps.
    fn fill(&mut self) -> Result<()> {
        self.queue_lost()?;
        let (ctx, drafting) = (self.session.spec().ctx, self.is_drafting());
        loop {
            let Some(device) = self.session.ahead() else {
                return Ok(());
            };
            if self.queue.steps() >= self.queue.depth(device.depth(), drafting) {
                return Ok(());
            }
            // Rows beyond those needed cost time in every step. Where fewer would do, all members give
            // up their rows once nothing is queued and are seated again closer together.
            let sitting = self.members.iter().filter(|m| m.row.is_some());
            let highest = sitting.clone().filter_map(|m| m.row).max();
            let spread = highest.is_some_and(|h| bucket(h + 1) > bucket(sitting.count()));
            let standing = self.members.iter().any(|m| m.row.is_none() && m.left > 0);
            if spread && !standing {
                if self.queue.steps() > 0 {
                    return Ok(());
                }
                for member in &mut self.members {
                    if let Some(row) = member.row.take() {
                        device.vacate(row)?;
                    }
                }
            }
            let mut taken: Vec<bool> = vec![false; device.rows()];
            for row in self.members.iter().filter_map(|m| m.row) {
                taken[row] = true;
            }
            let mut going = 0;
            for member in &mut self.members {
                let full = member.text_len() + member.queued >= ctx;
                if full && member.left > 0 && member.blocked.is_none() {
                    member.blocked = Some(Error::ContextFull {
                        capacity: ctx,
                        needed: ctx + 1,
                    });
                }
                let goes_on = member.left > 0 && member.blocked.is_none();
                match (member.row, goes_on) {
                    (Some(row), false) => {
                        device.vacate(row)?;
                        member.row = None;
                    }
                    // Its token is known to the host once nothing is queued for it.
                    (None, true) if member.queued == 0 => {
                        let row = taken.iter().position(|t| !t).expect("rows were counted");
                        let token = member.feed.last().copied().unwrap_or_default();
                        device.seat(row, member.slot, token, &member.sampler)?;
                        taken[row] = true;
                        member.row = Some(row);
                    }
                    _ => {}
                }
                going += usize::from(member.row.is_some());
            }
            if going == 0 {
                return Ok(());
            }
            let full = |e: &Option<Error>| matches!(e, Some(Error::PagesFull { .. }));
            let waiting = self.members.iter().any(|m| full(&m.blocked));
            let mut sitting = self.members.iter_mut().filter(|m| m.row.is_some());
            match device.queue() {
                Ok(()) => {
                    let rows = sitting.filter_map(|m| {
                        m.left -= 1;
                        m.queued += 1;
                        Some((m.row?, m.slot))
                    });
                    self.queue.push(QueuedWork::Step(rows.collect()));
                }
                // The sequence that joined last ends; the others wait for the pages that it frees.
                Err(e @ Error::PagesFull { .. }) => match sitting.next_back() {
                    Some(member) if !waiting => member.blocked = Some(e),
                    _ => return Ok(()),
                },
                Err(e) => return Err(e),
            }
        }
    }

    /// Waits for the oldest queued step and the prompts before it, and passes the tokens on.
    pub(super) fn receive(&mut self, each: &mut Each<'_>) -> Result<()> {
        while let Some(QueuedWork::Prompts(_)) = self.queue.work.front() {
            self.finish_prompts()?;
        }
        let (Some(QueuedWork::Step(rows)), Some(device)) =
            (self.queue.work.pop_front(), self.session.ahead())
        else {
            return Ok(());
        };
        let mut drawn: Vec<(usize, Result<Drawn>)> = Vec::with_capacity(rows.len());
        device.receive(&mut |row, token| {
            if let Some(&(_, slot)) = rows.iter().find(|r| r.0 == row) {
                drawn.push((slot, token));
            }
        })?;
        let took = self.queue.lap();
        let (known, new) = (self.queue.step, took.as_secs_f64());
        self.queue.step = Some(known.map_or(new, |old| old + LATEST * (new - old)));
        self.ran.push(Ran {
            took,
            decoding: rows.len(),
            prompt_rows: 0,
        });
        if let Some(speculation) = self.speculation() {
            speculation.measured(rows.len(), new);
        }
        for (slot, token) in drawn {
            // A sequence that left while tokens were passed on is skipped.
            let Some(at) = self.members.iter().position(|m| m.slot == slot) else {
                continue;
            };
            let member = &mut self.members[at];
            member.queued -= 1;
            let token = token.map(|drawn| record(&mut member.sampler, drawn));
            if let (Some(speculation), true) = (&mut self.speculation, token.is_ok()) {
                speculation.checked(slot, 0, 0);
            }
            self.deliver(at, token, true, each);
        }
        self.tell_blocked(each);
        Ok(())
    }
}
