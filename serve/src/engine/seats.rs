//! Assigns slots to requests, reusing parts of prompts, and keeps sequences in them afterwards.

use super::job::{Job, Phase};
use super::worker::Worker;
use super::{Failure, Finish};
use crate::prefix::{HeldPrefix, common};
use crate::scheduler::Admission;
use nq_kernels::pages::PAGE;
use nq_runtime::{Batch, Session, resting_points};
use std::sync::atomic::Ordering;

/// Least tokens for which it is worth waiting while another request computes them.
const WORTH_WAITING: usize = 32;
/// Least tokens for which it is worth keeping a state where another prompt has parted from this one.
const WORTH_A_SNAPSHOT: usize = 256;
/// Least tokens that are worth keeping in a slot.
const WORTH_KEEPING: usize = 16;

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
    fn cached(&self, session: &dyn Session, job: &Job) -> Option<HeldPrefix> {
        if !self.seats.sharing || !self.options.prefix_cache {
            return None;
        }
        let keys = job.keys(job.tokens.len() - 1);
        let reach = |slot, common| session.reach(slot, common);
        (self.seats.tree).best(job.request.client.salt, &keys, reach)
    }

    /// True if a request whose prompt is being computed will offer so many more of the tokens of another that this one
    /// had better wait for them. If states cannot be cut, asks for one where the two prompts part.
    fn is_computed(&mut self, session: &mut dyn Session, id: u64, held: usize) -> bool {
        let recurrent = session.snapshots().1 > 0;
        let (mut found, mut parts) = (false, Vec::new());
        let Some(job) = self.jobs.get(&id) else {
            return false;
        };
        let keys = job.keys(job.tokens.len() - 1);
        let alike = |other: &&Job| {
            other.phase.fills() && other.request.client.salt == job.request.client.salt
        };
        for other in self.seated().filter(alike) {
            let same = common(&other.keys(other.tokens.len()), &keys);
            let offered = match recurrent {
                true => *(other.points.iter().rev().find(|&&p| p <= same)).unwrap_or(&0),
                false => same,
            };
            if recurrent && same > other.fed && same >= offered.max(held) + WORTH_A_SNAPSHOT {
                parts.extend(other.slot.map(|slot| (slot, same)));
                found = true;
            }
            found |= offered >= held + WORTH_WAITING;
        }
        for (slot, len) in parts {
            let other = self.jobs.values_mut().find(|j| j.slot == Some(slot));
            if let Some(other) = other
                && let Err(at) = other.points.binary_search(&len)
            {
                other.points.insert(at, len);
                session.keep_at(slot, len);
            }
        }
        found
    }

    fn may_begin(&mut self, batch: &mut Batch<'_>, id: u64) -> Admission {
        let session = batch.session();
        let Some(job) = self.jobs.get(&id) else {
            return Admission::Later;
        };
        if self.seated().count() >= self.options.parallel {
            return Admission::Full;
        }
        let found = self.cached(session, job);
        let (held, len) = (found.map_or(0, |f| f.len), job.tokens.len());
        let sharing = self.options.prefix_cache && self.seats.sharing;
        if sharing && self.is_computed(session, id, held) {
            return Admission::Later;
        }
        let needed = pages(held, len + 1);
        let promised = self.seated().map(|j| {
            if j.phase.fills() {
                pages(j.fed, j.tokens.len() + 1)
            } else {
                1
            }
        });
        let promised: usize = promised.sum();
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
        let found = self.cached(session, &job);
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
        // What an engine adds to every sequence stays where requests cannot choose.
        let chosen = match self.options.adapters.is_empty() {
            true => Ok(()),
            false => session.adapt(slot, &job.request.adapters),
        };
        if let Err(e) = chosen {
            self.seats.free.push(slot);
            self.jobs.insert(id, job);
            self.finish(batch, id, Finish::Failed(Failure::Model(e.to_string())));
            return None;
        }
        (job.fed, job.shown) = (0, false);
        if let Some(found) = found.filter(|f| session.len(f.slot) >= f.len) {
            match session.fork(found.slot, slot, found.len) {
                // What the session could not share is computed.
                Ok(reached) => job.fed = reached,
                Err(_) => self.seats.sharing = false,
            }
            self.seats.tree.touch(found.slot);
        }
        job.slot = Some(slot);
        job.phase = Phase::Prompt;
        self.find_on_disk(session, slot, &mut job);
        // Another prompt has parted from this one there, so more of them may.
        let keys = job.keys(job.tokens.len() - 1);
        let parts = self.seats.tree.peek(job.request.client.salt, &keys);
        let parts = parts.map(|found| found.len);
        job.points
            .extend(parts.filter(|&len| len >= job.fed + WORTH_A_SNAPSHOT));
        self.keep_states(session, &mut job);
        let shared = self.shared;
        shared.waiting.fetch_sub(1, Ordering::Relaxed);
        if job.phase == Phase::Prompt {
            job.start(&shared.metrics);
        }
        self.jobs.insert(id, job);
        None
    }

    /// Asks for snapshots of the state of a request's prompt, where it has one that cannot be cut.
    pub(super) fn keep_states(&self, session: &mut dyn Session, job: &mut Job) {
        let (Some(slot), Phase::Prompt) = (job.slot, job.phase) else {
            return;
        };
        if session.snapshots().1 == 0 || !self.options.prefix_cache {
            return;
        }
        let mut points = resting_points(&job.request.prompt, &job.request.stop, job.fed);
        points.append(&mut job.points);
        if self.options.disk.is_some() {
            // Pages are written whole, and a state goes with the pages before it.
            points.iter_mut().for_each(|p| *p -= *p % PAGE);
        }
        points.retain(|&p| p > job.fed);
        points.sort_unstable();
        points.dedup();
        points.iter().for_each(|&p| session.keep_at(slot, p));
        job.points = points;
    }

    /// Makes a computed prompt available to others while its answer is generated.
    pub(super) fn show(&mut self, id: u64) {
        if let Some((job, slot)) = self.jobs.get(&id).and_then(|j| Some((j, j.slot?)))
            && self.options.prefix_cache
            && self.seats.sharing
        {
            let keys = job.keys(job.fed);
            self.seats
                .tree
                .insert(job.request.client.salt, &keys, slot, false);
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
        let (salt, keys) = (job.request.client.salt, &job.keys(len));
        self.seats.tree.remove(slot);
        for shorter in self.seats.tree.beginnings(salt, keys) {
            self.seats.clear(session, shorter);
        }
        let twin = self.seats.tree.peek(salt, keys).filter(|f| f.len == len);
        match twin {
            // Another slot already holds all of it.
            Some(_) => self.seats.clear(session, slot),
            None => {
                self.seats.tree.insert(salt, keys, slot, true);
                self.keep_on_disk(session, salt, keys, slot);
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
