//! A batch on a device that runs steps and draws their tokens by itself, ahead of the host.

use super::{Batch, Each, Member, Piece, Ran};
use crate::engine::{Chunk, LogitsWanted};
use crate::error::{Error, Result};
use crate::sampler::{Sampler, TokenLogprobs};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Steps that a device runs and draws from by itself, ahead of the host: the part of a session that
/// a [`Batch`] drives. Sequences sit in rows; rows that nobody sits in run idle. What is queued runs
/// in order.
pub trait StepsAhead {
    /// Rows at most.
    fn rows(&self) -> usize;

    /// Steps to queue ahead of the tokens that the host has, at most.
    fn depth(&self) -> usize;

    /// Refuses what [`StepsAhead::queue_prompts`] and [`StepsAhead::seat`] could not take.
    ///
    /// # Errors
    /// [`Error::Request`] for a token past the vocabulary, or a sampler that names one.
    fn check(&self, tokens: &[u32], sampler: Option<&Sampler>) -> Result<()>;

    /// Queues the rows of prompts, without logits, behind what is queued; the sequences, which
    /// nobody seated, have grown when this returns.
    ///
    /// # Errors
    /// [`Error::PagesFull`] before anything is queued; the device's.
    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()>;

    /// Waits for the prompts queued first that have not been waited for; how long they took.
    ///
    /// # Errors
    /// The device's.
    fn finish_prompts(&mut self) -> Result<Duration>;

    /// Seats the sequence in `slot`, which is fed `token` by the next step queued, in `row`.
    ///
    /// # Errors
    /// The device's.
    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()>;

    /// Frees a row: steps queued from here on leave its sequence alone.
    ///
    /// # Errors
    /// The device's.
    fn vacate(&mut self, row: usize) -> Result<()>;

    /// Queues a step of all that are seated.
    ///
    /// # Errors
    /// [`Error::PagesFull`] before anything is queued; the device's.
    fn queue(&mut self) -> Result<()>;

    /// Waits for the first step queued that has not been received; `each` is given what every row
    /// in it drew.
    ///
    /// # Errors
    /// The device's.
    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()>;
}

/// A token that a device drew.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// Its id.
    pub token: u32,
    /// Its log-probability and the best tokens with theirs, where the sampler wants them.
    pub logprobs: Option<(f32, Vec<(u32, f32)>)>,
}

/// What a device has been given and has not been waited for.
#[derive(Default)]
pub(super) struct Queue {
    work: VecDeque<Work>,
    /// When the device began with the first of it, as far as the host knows.
    since: Option<Instant>,
    /// Seconds that a step takes.
    step: Option<f64>,
}

enum Work {
    /// So many rows of prompts.
    Prompts(usize),
    /// A step: who sits in it, (row, slot); one that leaves is taken out.
    Step(Vec<(usize, usize)>),
}

/// Work that a device is kept ahead by: as long may the host be held up.
const AHEAD: f64 = 5e-3;
/// Fewer steps ahead leave a device idle while the host takes a token.
const LEAST_AHEAD: usize = 2;
/// Weight of the latest step in what is known of its time.
const LATEST: f64 = 0.2;

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.work.is_empty()
    }

    fn push(&mut self, work: Work) {
        if self.work.is_empty() {
            self.since = Some(Instant::now());
        }
        self.work.push_back(work);
    }

    fn steps(&self) -> usize {
        let steps = self.work.iter().filter(|w| matches!(w, Work::Step(_)));
        steps.count()
    }

    /// Steps to be ahead by, of `most`: what is queued delays whoever comes next.
    fn depth(&self, most: usize) -> usize {
        let steps = self.step.map_or(most, |t| (AHEAD / t).ceil() as usize);
        steps.clamp(LEAST_AHEAD.min(most), most)
    }

    /// The time since the work before was waited for.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let since = self.since.replace(now);
        since.map_or(Duration::ZERO, |since| now - since)
    }

    /// Takes a sequence out of all steps.
    pub(super) fn forget(&mut self, slot: usize) {
        for work in &mut self.work {
            if let Work::Step(rows) = work {
                rows.retain(|r| r.1 != slot);
            }
        }
    }

    /// Waits for all of it.
    pub(super) fn drain(&mut self, device: &mut dyn StepsAhead) {
        for work in self.work.drain(..) {
            // An error is the next call's too.
            let _ = match work {
                Work::Prompts(_) => device.finish_prompts().map(drop),
                Work::Step(_) => device.receive(&mut |_, _| {}),
            };
        }
    }
}

impl Batch<'_> {
    /// True if there is a device that has rows for everybody.
    pub(super) fn runs_ahead(&mut self, pieces: &[Piece<'_>]) -> bool {
        let joining = pieces.iter().filter(|p| p.then.is_some()).count();
        let all = self.members.len() + joining;
        let device = self.session.steps_ahead();
        device.is_some_and(|device| all <= device.rows())
    }

    pub(super) fn step_ahead(&mut self, pieces: Vec<Piece<'_>>, each: &mut Each<'_>) -> Result<()> {
        if let Some(device) = self.session.steps_ahead() {
            for piece in &pieces {
                let sampler = piece.then.as_ref().map(|t| &t.sampler);
                device.check(piece.tokens, sampler)?;
            }
        }
        // Steps of those who run already go before prompts, so that their tokens do not wait.
        self.fill()?;
        let prompts = self.queue_prompts(&pieces)?;
        for piece in pieces {
            if let Some(&token) = piece.tokens.last() {
                let len = self.session.len(piece.slot);
                self.join(piece.slot, token, len, piece.then);
            }
        }
        self.fill()?;
        self.tell_blocked(each);
        if self.queue.steps() > 0 {
            return self.receive(each);
        }
        // While the host prepares more prompts, the device is not left without.
        let ahead = usize::from(prompts);
        while self.queue.work.len() > ahead {
            self.finish_prompts()?;
        }
        Ok(())
    }

    /// Queues the rows of `pieces` but the last of each that goes on, which its first step is fed;
    /// true if there are any.
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
        let (Some(device), false) = (self.session.steps_ahead(), chunks.is_empty()) else {
            return Ok(false);
        };
        device.queue_prompts(&chunks)?;
        let rows = chunks.iter().map(|c| c.tokens.len()).sum();
        self.queue.push(Work::Prompts(rows));
        Ok(true)
    }

    /// Waits for the prompts that are first in the queue.
    fn finish_prompts(&mut self) -> Result<()> {
        if let (Some(Work::Prompts(rows)), Some(device)) =
            (self.queue.work.front(), self.session.steps_ahead())
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

    /// Sequences that cannot go on, and for which nothing is queued, leave and say why.
    fn tell_blocked(&mut self, each: &mut Each<'_>) {
        let told = |m: &Member| m.queued == 0 && m.blocked.is_some();
        while let Some(at) = self.members.iter().position(told) {
            if let Some(e) = self.members[at].blocked.take() {
                self.deliver(at, Err(e), 0, each);
            }
        }
    }

    /// Keeps the device ahead: seats whoever stands, and queues steps.
    fn fill(&mut self) -> Result<()> {
        let ctx = self.session.spec().ctx;
        loop {
            let Some(device) = self.session.steps_ahead() else {
                return Ok(());
            };
            if self.queue.steps() >= self.queue.depth(device.depth()) {
                return Ok(());
            }
            // Rows beyond those that the seated need cost every step: where fewer would do, all get
            // up once nothing is queued, and sit down closer together.
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
                let full = member.len + member.queued >= ctx;
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
                        device.seat(row, member.slot, member.token, &member.sampler)?;
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
                    self.queue.push(Work::Step(rows.collect()));
                }
                // The last to join gives way, and the others wait for what it gives back.
                Err(e @ Error::PagesFull { .. }) => match sitting.next_back() {
                    Some(member) if !waiting => member.blocked = Some(e),
                    _ => return Ok(()),
                },
                Err(e) => return Err(e),
            }
        }
    }

    /// Waits for the first step queued, and the prompts before it, and gives its tokens out.
    pub(super) fn receive(&mut self, each: &mut Each<'_>) -> Result<()> {
        while let Some(Work::Prompts(_)) = self.queue.work.front() {
            self.finish_prompts()?;
        }
        let (Some(Work::Step(rows)), Some(device)) =
            (self.queue.work.pop_front(), self.session.steps_ahead())
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
        for (slot, token) in drawn {
            // One that left while these were given out is passed over.
            let Some(at) = self.members.iter().position(|m| m.slot == slot) else {
                continue;
            };
            let member = &mut self.members[at];
            member.queued -= 1;
            let token = token.map(|Drawn { token, logprobs }| {
                match logprobs {
                    None => member.sampler.accept(token),
                    Some((logprob, top)) => member.sampler.accept_with(TokenLogprobs {
                        position: member.sampler.position(),
                        token,
                        logprob,
                        top,
                    }),
                }
                token
            });
            self.deliver(at, token, 1, each);
        }
        self.tell_blocked(each);
        Ok(())
    }
}

/// Rows that a device runs for so many sequences: sizes for which steps are recorded.
pub(crate) fn bucket(rows: usize) -> usize {
    const SIZES: [usize; 10] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64];
    let fits = SIZES.into_iter().find(|&s| s >= rows);
    fits.unwrap_or(rows.next_multiple_of(64))
}
