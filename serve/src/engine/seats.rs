//! Assigns slots to requests, reusing parts of prompts, and keeps sequences in them afterwards.

use super::job::{Job, Phase};
use super::keep::Unsaved;
use super::worker::Worker;
use crate::prefix::{Found, PrefixTree, common};
use crate::scheduler::Admission;
use nq_kernels::pages::PAGE;
use nq_runtime::{Batch, Session};
use std::sync::atomic::Ordering;

/// Least tokens for which it is worth waiting while another request computes them.
const WORTH_WAITING: usize = 32;
/// Least tokens that are worth keeping in a slot.
const WORTH_KEEPING: usize = 16;

/// The slots of a session.
pub(super) struct Seats {
    /// Empty slots.
    free: Vec<usize>,
    /// The sequences in the other slots.
    pub(super) tree: PrefixTree,
    /// Kept sequences still to be written to disk, the next one last.
    pub(super) unsaved: Vec<Unsaved>,
    /// False once the session has refused to share sequences.
    sharing: bool,
}

impl Seats {
    /// All slots are free.
    pub(super) fn new(slots: usize) -> Self {
        Seats {
            free: (0..slots).rev().collect(),
            tree: PrefixTree::default(),
            unsaved: Vec::new(),
            sharing: true,
        }
    }

    /// Empties a slot.
    fn clear(&mut self, session: &mut dyn Session, slot: usize) {
        self.tree.remove(slot);
        self.unsaved.retain(|u| u.slot != slot);
        session.truncate(slot, 0);
        self.free.push(slot);
    }

    /// Drops the least recently used kept sequence; false if there is none except in `spared`.
    pub(super) fn give_up(&mut self, session: &mut dyn Session, spared: Option<usize>) -> bool {
        let oldest = self.tree.oldest(spared);
        if let Some(slot) = oldest {
            self.clear(session, slot);
        }
        oldest.is_some()
    }
}

/// Pages that a sequence of `to` tokens takes in addition if it shares its first `from` tokens.
fn pages(from: usize, to: usize) -> usize {
    to.div_ceil(PAGE) - from / PAGE
}

impl Worker<'_> {
    /// Assigns slots to requests in the order of the queue.
    pub(super) fn admit(&mut self, batch: &mut Batch<'_>) {
        let mut queue = std::mem::take(&mut self.queue);
        while let Some(id) = queue.next(|id| self.may_begin(batch, id)) {
            if let Some(client) = self.begin(batch, id) {
                queue.push_front(client, id);
                break;
            }
        }
        self.queue = queue;
    }

    fn seated(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values().filter(|j| j.phase != Phase::Queue)
    }

    /// How many of a request's tokens a slot holds; the last token must be computed for its logits.
    fn cached(&self, job: &Job) -> Option<Found> {
        let most = job.tokens.len() - 1;
        let found = self
            .seats
            .tree
            .peek(job.request.client.salt, &job.tokens[..most]);
        found.filter(|_| self.seats.sharing && self.options.prefix_cache)
    }

    fn may_begin(&mut self, batch: &mut Batch<'_>, id: u64) -> Admission {
        let Some(job) = self.jobs.get(&id) else {
            return Admission::Later;
        };
        if self.seated().count() >= self.options.parallel {
            return Admission::Full;
        }
        let found = self.cached(job);
        let held = found.map_or(0, |f| f.len);
        let shares = |other: &&Job| {
            other.phase.fills()
                && other.request.client.salt == job.request.client.salt
                && common(&other.tokens, &job.tokens[..job.tokens.len() - 1])
                    >= held + WORTH_WAITING
        };
        if self.options.prefix_cache && self.seats.sharing && self.seated().any(|j| shares(&j)) {
            return Admission::Later;
        }
        let needed = pages(held, job.tokens.len() + 1);
        let promised = self.seated().map(|j| {
            if j.phase.fills() {
                pages(j.fed, j.tokens.len() + 1)
            } else {
                1
            }
        });
        let promised: usize = promised.sum();
        let session = batch.session();
        let spared = found.map(|f| f.slot);
        while session
            .pages()
            .is_some_and(|pages| pages.free() < needed + promised)
        {
            if !self.seats.give_up(session, spared) {
                // A single request always fits: the session has pages for a whole context.
                return match promised {
                    0 => Admission::Now,
                    _ => Admission::Full,
                };
            }
        }
        Admission::Now
    }

    /// Gives a request a slot that holds the known part of its tokens; returns its client if none
    /// is free.
    fn begin(&mut self, batch: &mut Batch<'_>, id: u64) -> Option<u64> {
        let mut job = self.jobs.remove(&id)?;
        let session = batch.session();
        let found = self.cached(&job);
        let spared = found.map(|f| f.slot);
        if self.seats.free.is_empty() && !self.seats.give_up(session, spared) {
            // The only slot left is the one that holds the prompt's beginning.
            self.seats.give_up(session, None);
        }
        let Some(slot) = self.seats.free.pop() else {
            let client = job.request.client.id;
            self.jobs.insert(id, job);
            return Some(client);
        };
        job.fed = 0;
        if let Some(found) = found.filter(|f| session.len(f.slot) >= f.len) {
            match session.fork(found.slot, slot, found.len) {
                // What the session could not share is computed.
                Ok(reached) => job.fed = reached,
                Err(_) => self.seats.sharing = false,
            }
            self.seats
                .tree
                .find(job.request.client.salt, &job.tokens[..found.len]);
        }
        job.slot = Some(slot);
        job.phase = Phase::Prompt;
        self.find_on_disk(session, slot, &mut job);
        let shared = self.shared;
        shared.waiting.fetch_sub(1, Ordering::Relaxed);
        if job.phase == Phase::Prompt {
            job.start(&shared.metrics);
        }
        self.jobs.insert(id, job);
        None
    }

    /// Makes a computed prompt available to others while its answer is generated.
    pub(super) fn show(&mut self, id: u64) {
        if let Some((job, slot)) = self.jobs.get(&id).and_then(|j| Some((j, j.slot?)))
            && self.options.prefix_cache
            && self.seats.sharing
        {
            let tokens = &job.tokens[..job.fed];
            self.seats
                .tree
                .insert(job.request.client.salt, tokens, slot, false);
        }
    }

    /// Removes a request from its slot or from the queue. Keeps the slot's sequence if `sound`.
    pub(super) fn unseat(&mut self, batch: &mut Batch<'_>, id: u64, job: &mut Job, sound: bool) {
        let Some(slot) = job.slot.take() else {
            self.queue.remove(job.request.client.id, id);
            return;
        };
        if let Some(sampler) = batch.leave(slot) {
            job.sampler = Some(sampler);
        }
        let session = batch.session();
        // Drafts that were right may lie behind the token that ended the answer.
        let len = session.truncate(slot, job.tokens.len());
        let keeps = sound && self.options.prefix_cache && self.seats.sharing;
        if !keeps || len < WORTH_KEEPING {
            self.seats.clear(session, slot);
            return;
        }
        let (salt, tokens) = (job.request.client.salt, &job.tokens[..len]);
        self.seats.tree.remove(slot);
        for shorter in self.seats.tree.beginnings(salt, tokens) {
            self.seats.clear(session, shorter);
        }
        let twin = self.seats.tree.peek(salt, tokens).filter(|f| f.len == len);
        match twin {
            // Another slot already holds all of it.
            Some(_) => self.seats.clear(session, slot),
            None => {
                self.seats.tree.insert(salt, tokens, slot, true);
                self.keep_on_disk(salt, tokens, slot);
            }
        }
    }

    /// Sends a request back to the front of the queue: its pages go to others.
    pub(super) fn give_way(&mut self, batch: &mut Batch<'_>, id: u64) {
        let Some(mut job) = self.jobs.remove(&id) else {
            return;
        };
        self.unseat(batch, id, &mut job, true);
        job.phase = Phase::Queue;
        let shared = self.shared;
        shared.waiting.fetch_add(1, Ordering::Relaxed);
        shared.metrics.preemptions.inc();
        self.queue.push_front(job.request.client.id, id);
        self.jobs.insert(id, job);
    }
}
