//! Pages on disk: kept sequences are written while there is no other work, and their pages are
//! read back for prompts with the same beginning.

use super::Event;
use super::job::{Job, Phase};
use super::saved::{Restore, Unsaved};
use super::worker::Worker;
use crate::disk::{ModelPages, state_key};
use nq_kernels::pages::PAGE;
use nq_runtime::{Batch, Session};
use std::time::{Duration, Instant};

/// Longest time spent writing after the last answer.
const AT_THE_END: Duration = Duration::from_secs(10);

impl Worker<'_> {
    fn disk(&self) -> Option<&ModelPages> {
        self.options.disk.as_ref()
    }

    /// Records that a slot now keeps the tokens with these keys ([`Job::keys`]).
    pub(super) fn keep_on_disk(
        &mut self,
        session: &mut dyn Session,
        salt: u64,
        tokens: &[u32],
        slot: usize,
    ) {
        let keys = self.disk().map(|disk| disk.keys(salt, tokens));
        let Some(mut keys) = keys.filter(|keys| !keys.is_empty()) else {
            return;
        };
        let mut states = Vec::new();
        if has_states(session) {
            // Pages behind the last state are of no use.
            let mut len = session.reach(slot, tokens.len());
            while len > 0 {
                if len.is_multiple_of(PAGE) {
                    states.push(len / PAGE);
                }
                len = session.reach(slot, len - 1);
            }
            keys.truncate(states.first().copied().unwrap_or(0));
        }
        self.seats.unsaved.push(Unsaved {
            slot,
            keys,
            saved: 0,
            states,
        });
    }

    /// Writes a page or a state; false if there is none left to write.
    fn save(&mut self, session: &mut dyn Session) -> bool {
        let (Some(disk), Some(last)) = (&self.options.disk, self.seats.unsaved.last_mut()) else {
            return false;
        };
        // Pages shared with another sequence may already be there.
        last.saved = last.saved.max(disk.beginning(&last.keys));
        let (Some(pages), mut bytes) = (session.pages(), Vec::new()) else {
            return false;
        };
        if let Some(key) = last.keys.get(last.saved) {
            if pages.read(last.slot, last.saved, &mut bytes).is_ok() {
                disk.write(key, &bytes);
                last.saved += 1;
                return true;
            }
        } else if let Some(whole) = last.states.pop() {
            let key = state_key(&last.keys[whole - 1]);
            let known = disk.beginning(&[key]) == 1;
            // A snapshot may have given its place to another since.
            if !known
                && pages
                    .read_state(last.slot, whole * PAGE, &mut bytes)
                    .is_ok()
            {
                disk.write(&key, &bytes);
            }
            return true;
        }
        self.seats.unsaved.pop();
        true
    }

    /// Writes a page while there is nothing else to do.
    pub(super) fn save_idle(&mut self, batch: &mut Batch<'_>) {
        if self.jobs.is_empty() {
            self.save(batch.session());
        }
    }

    /// Writes as many pages as there is time for, before the engine ends.
    pub(super) fn save_last(&mut self, batch: &mut Batch<'_>) {
        let end = Instant::now() + AT_THE_END;
        while Instant::now() < end && self.save(batch.session()) {}
    }

    /// Looks on disk for pages that continue the part of the prompt in its slot. If there are any, the
    /// request waits for them, and its slot is cut to whole pages.
    pub(super) fn find_on_disk(&mut self, session: &mut dyn Session, slot: usize, job: &mut Job) {
        let Some(disk) = &self.options.disk else {
            return;
        };
        let most = job.tokens.len() - 1;
        let mut keys = disk.keys(job.request.client.salt, &job.keys(most));
        let mut found = disk.beginning(&keys);
        let held = job.fed / PAGE;
        let (mut state, mut more) = (None, 0);
        if has_states(session) {
            let there = |&whole: &usize| disk.beginning(&[state_key(&keys[whole - 1])]) == 1;
            found = (held + 1..found + 1).rev().find(there).unwrap_or(0);
            state = found.checked_sub(1).map(|last| state_key(&keys[last]));
            let pages = session.pages();
            more = pages.map_or(0, |p| p.state_bytes().unwrap_or(0) / p.page_bytes().max(1));
        }
        if found * PAGE <= job.fed {
            return;
        }
        let computing = self.pace.estimate(found * PAGE - job.fed, 0);
        if !self.restore_times.pays(found - held + more, computing) {
            if !std::mem::replace(&mut self.restore_times.told, true) {
                disk.note("prompts are computed faster here than they are read back");
            }
            return;
        }
        job.fed = cut_to_pages(session, slot, held);
        job.phase = Phase::Restore;
        keys.truncate(found);
        keys.drain(..job.fed / PAGE);
        job.restore = Some(Restore {
            keys: keys.into_iter(),
            state,
        });
    }

    /// Reads pages back, for as long as a step of prompts may take.
    pub(super) fn restore(&mut self, batch: &mut Batch<'_>) {
        let most = match batch.running() {
            0 => self.options.prompt_time_alone,
            _ => self
                .options
                .max_pause
                .map_or(self.options.prompt_time, |most| {
                    most.min(self.options.prompt_time)
                }),
        };
        let end = Instant::now() + most;
        let waits = |(&id, job): (&u64, &Job)| (job.phase == Phase::Restore).then_some(id);
        let waiting: Vec<u64> = self.jobs.iter().filter_map(waits).collect();
        for id in waiting {
            while self.restore_page(batch.session(), id) {
                if Instant::now() >= end {
                    return;
                }
            }
        }
    }

    /// Reads one page back; false once the request needs no more.
    fn restore_page(&mut self, session: &mut dyn Session, id: u64) -> bool {
        let (Some(disk), Some(job)) = (&self.options.disk, self.jobs.get_mut(&id)) else {
            return false;
        };
        let (Some(slot), Some(restore)) = (job.slot, &mut job.restore) else {
            return false;
        };
        let begun = Instant::now();
        let mut whole = true;
        if let (Some(key), Some(pages)) = (restore.keys.next(), session.pages()) {
            let page = disk.read(&key, pages.page_bytes());
            // Without free pages the prompt is computed like any other, and any shortage is reported then.
            if page.is_some_and(|page| pages.append(slot, &page).is_ok()) {
                self.restore_times.learn(begun.elapsed());
                job.fed += PAGE;
                self.shared.metrics.restored_tokens.inc_by(PAGE as u64);
                return true;
            }
            whole = false;
        }
        if let (Some(key), Some(pages)) = (restore.state, session.pages()) {
            let bytes = pages.state_bytes().unwrap_or(0);
            let state = disk.read(&key, bytes).filter(|_| whole);
            if state.is_none_or(|state| pages.write_state(slot, &state).is_err()) {
                // Pages without the states at their end are worth nothing.
                job.fed = session.truncate(slot, job.fed);
            }
        }
        job.restore = None;
        job.phase = Phase::Prompt;
        job.start(&self.shared.metrics);
        let Some(mut job) = self.jobs.remove(&id) else {
            return false;
        };
        self.keep_states(session, &mut job);
        self.jobs.insert(id, job);
        false
    }
}

/// True if sequences have states beside their pages.
fn has_states(session: &mut dyn Session) -> bool {
    let bytes = session.pages().and_then(|pages| pages.state_bytes());
    bytes.is_some_and(|bytes| bytes > 0)
}

/// Cuts a sequence to `pages` whole pages, or to fewer where the session must; returns its length.
fn cut_to_pages(session: &mut dyn Session, slot: usize, pages: usize) -> usize {
    let mut reached = session.truncate(slot, pages * PAGE);
    while !reached.is_multiple_of(PAGE) {
        reached = session.truncate(slot, reached / PAGE * PAGE);
    }
    reached
}

impl Job {
    /// Reports, once, that the prompt is being computed, and how much of it was cached.
    pub(super) fn start(&mut self, metrics: &crate::metrics::Metrics) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        metrics.prompt_tokens.inc_by(self.tokens.len() as u64);
        metrics.cached_tokens.inc_by(self.fed as u64);
        metrics
            .queue_time
            .observe(self.arrived.elapsed().as_secs_f64());
        self.tell(Event::Started { cached: self.fed });
    }
}
