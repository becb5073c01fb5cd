//! One step of all requests: what to feed, and handling the drawn tokens.

use super::job::{Job, Phase};
use super::worker::Worker;
use super::{Event, Failure, Finish};
use crate::scheduler::{Rows, share};
use nq_runtime::{
    Batch, Chunk, Continuation, Error, LogitsWanted, Piece, Result, Row, Sampler, pass_end,
};
use rayon::prelude::*;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// A request's part of a step.
struct Fed {
    id: u64,
    slot: usize,
    from: usize,
    to: usize,
    then: Option<Continuation>,
}

impl Worker<'_> {
    /// Runs a step of all requests that have a slot.
    pub(super) fn step(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        self.constrain(batch);
        self.show_images(batch);
        let read = self.read(batch)?;
        let decoding = batch.running();
        let fed = self.plan(batch);
        if fed.is_empty() && decoding == 0 {
            if read {
                return Ok(());
            }
            // The remaining requests wait for resources of one that has just ended.
            std::thread::sleep(Duration::from_millis(1));
            return Ok(());
        }
        let mut drawn: Vec<(usize, Result<u32>)> = Vec::new();
        let mut pieces = Vec::with_capacity(fed.len());
        let mut progress: Vec<(u64, usize, bool)> = Vec::with_capacity(fed.len());
        for fed in fed {
            progress.push((fed.id, fed.to, fed.then.is_some()));
            let job = &self.jobs[&fed.id];
            // What may follow under a constraint is known one token at a time.
            let drafts = batch.speculation().filter(|_| !job.hold.is_constrained());
            if let (Some(drafts), true) = (drafts, fed.then.is_some()) {
                drafts.follow(fed.slot, job.tokens[..fed.to].to_vec());
            }
            pieces.push(Piece {
                slot: fed.slot,
                tokens: &job.tokens[fed.from..fed.to],
                then: fed.then,
            });
        }
        let result = batch.step(pieces, &mut |slot, token| {
            drawn.push((slot, token));
            ControlFlow::Continue(())
        });
        if result.is_ok() {
            self.steps += 1;
            for ran in batch.ran() {
                self.pace.learn(ran.took, ran.decoding, ran.prompt_rows);
            }
            for &(id, to, continues) in &progress {
                self.fed(id, to, continues);
            }
        }
        for (slot, token) in drawn {
            self.drawn(batch, slot, token);
        }
        self.count_drafts(batch);
        match result {
            Ok(()) => Ok(()),
            Err(e) => self.refused(batch, &progress, e),
        }
    }

    /// Has the session take the images of prompts whose slots hold all of them that is known.
    fn show_images(&mut self, batch: &mut Batch<'_>) {
        let unseen =
            |job: &Job| job.phase == Phase::Prompt && !job.shown && !job.request.images.is_empty();
        let mut failed = Vec::new();
        for (&id, job) in self.jobs.iter_mut().filter(|(_, job)| unseen(job)) {
            job.shown = true;
            let shown = job
                .slot
                .map(|s| batch.session().show(s, &job.request.images));
            if let Some(Err(e)) = shown {
                failed.push((id, e));
            }
        }
        for (id, e) in failed {
            self.finish(batch, id, Finish::Failed(Failure::Model(e.to_string())));
        }
    }

    /// The tokens to feed: what sequences that were looked at do not hold yet, and as much of the prompts as
    /// time allows.
    fn plan(&self, batch: &Batch<'_>) -> Vec<Fed> {
        let mut fed = Vec::new();
        let then = |job: &Job, sampler: &Sampler| Continuation {
            sampler: sampler.clone(),
            tokens: job.run(self.spec.ctx),
        };
        let mut decoding = batch.running();
        for (&id, job) in &self.jobs {
            if let (Phase::Answer, Some(slot), Some(sampler)) = (job.phase, job.slot, &job.sampler)
            {
                let rows = job.unfed();
                // Those whose thinking was closed have several; the others of them come next.
                if rows > 1 && decoding > 0 && decoding + rows > self.spec.max_rows {
                    continue;
                }
                decoding += rows;
                fed.push(Fed {
                    id,
                    slot,
                    from: job.fed,
                    to: job.tokens.len(),
                    then: Some(then(job, sampler)),
                });
            }
        }
        let room = self.spec.max_rows.saturating_sub(decoding);
        let prompts: Vec<(u64, &Job)> = self
            .jobs
            .iter()
            .filter(|(_, j)| j.phase == Phase::Prompt)
            .map(|(&id, j)| (id, j))
            .collect();
        let wanted: Vec<usize> = prompts.iter().map(|(_, j)| j.unfed()).collect();
        let Rows { some, whole } = self.pace.rows(decoding);
        let rows = Rows {
            some: some.min(room),
            whole: whole.min(room / 2),
        };
        for ((id, job), rows) in prompts.into_iter().zip(share(rows, &wanted)) {
            if let (Some(slot), Some(sampler), 1..) = (job.slot, &job.sampler, rows) {
                let to = pass_end(&job.points, job.fed, job.fed + rows);
                fed.push(Fed {
                    id,
                    slot,
                    from: job.fed,
                    to,
                    then: (to == job.tokens.len()).then(|| then(job, sampler)),
                });
            }
        }
        fed
    }

    /// Reads the last token of the prompts that are to be read and are fed up to there; says if there
    /// were any. Their sequences stay in their slots like any other, so that prompts which begin alike
    /// are computed once.
    ///
    /// # Errors
    /// The device's.
    fn read(&mut self, batch: &mut Batch<'_>) -> Result<bool> {
        let ready = |j: &Job| j.phase == Phase::Prompt && j.request.row.is_some() && j.unfed() == 0;
        let ids = self.jobs.iter().filter(|(_, j)| ready(j));
        let mut ids: Vec<u64> = ids.map(|(&id, _)| id).collect();
        let any = !ids.is_empty();
        while let Some(&first) = ids.first() {
            let row = self.jobs[&first].request.row.clone();
            let (alike, others) =
                (ids.into_iter()).partition(|id| self.jobs[id].request.row == row);
            ids = others;
            self.read_rows(batch, &row.unwrap_or(Row::Hidden), alike)?;
        }
        Ok(any)
    }

    fn read_rows(&mut self, batch: &mut Batch<'_>, row: &Row, ids: Vec<u64>) -> Result<()> {
        let chunk = |id: &u64| {
            let job = &self.jobs[id];
            Chunk {
                slot: job.slot.unwrap_or(usize::MAX),
                tokens: &job.tokens[job.fed..],
                logits: LogitsWanted::Last,
            }
        };
        let chunks: Vec<Chunk<'_>> = ids.iter().map(chunk).collect();
        let mut rows = Vec::new();
        match row.forward(batch.session(), &chunks, &mut rows) {
            Ok(()) => {
                self.steps += 1;
                for (id, row) in ids.into_iter().zip(rows) {
                    if let Some(job) = self.jobs.get_mut(&id) {
                        job.fed = job.tokens.len();
                        job.tell(Event::Row(row));
                    }
                    self.finish(batch, id, Finish::Read);
                }
                Ok(())
            }
            // What sequences that are merely kept hold, or the last to come.
            Err(Error::PagesFull { .. }) if self.seats.give_up(batch.session(), None) => Ok(()),
            Err(Error::PagesFull { .. }) if self.jobs.len() > self.queue.len() + 1 => {
                let last = ids.into_iter().max();
                last.into_iter().for_each(|id| self.give_way(batch, id));
                Ok(())
            }
            Err(
                e @ (Error::PagesFull { .. }
                | Error::ContextFull { .. }
                | Error::Request { .. }
                | Error::LogitsNotFinite
                | Error::NotFinite { .. }),
            ) => match ids.as_slice() {
                &[id] => {
                    let failure = Failure::Model(e.to_string());
                    self.finish(batch, id, Finish::Failed(failure));
                    Ok(())
                }
                // One of them: each by itself.
                _ => (ids.into_iter()).try_for_each(|id| self.read_rows(batch, row, vec![id])),
            },
            Err(e) => Err(e),
        }
    }

    /// Sets the masks of the requests that draw under a constraint, in parallel, because a mask may take longer
    /// than a layer.
    fn constrain(&mut self, batch: &mut Batch<'_>) {
        let draws = |job: &Job| match job.phase {
            Phase::Queue | Phase::Restore => false,
            Phase::Prompt => true,
            Phase::Answer => job.sampler.is_some(),
        };
        let mut jobs: Vec<(u64, &mut Job)> = self
            .jobs
            .iter_mut()
            .filter(|(_, job)| job.hold.wants_mask() && draws(job))
            .map(|(&id, job)| (id, job))
            .collect();
        let failed: Vec<(u64, String)> = jobs
            .par_iter_mut()
            .filter_map(|(id, job)| Some((*id, mask(job).err()?)))
            .collect();
        for (id, why) in failed {
            self.finish(batch, id, Finish::Failed(Failure::Constraint(why)));
        }
    }

    /// Records what a request was fed.
    fn fed(&mut self, id: u64, to: usize, continues: bool) {
        let Some(job) = self.jobs.get_mut(&id) else {
            return;
        };
        let was = std::mem::replace(&mut job.fed, to);
        if !continues {
            return;
        }
        let begins = job.phase == Phase::Prompt;
        job.phase = Phase::Answer;
        job.sampler = None;
        debug_assert!(was <= to);
        if begins {
            self.show(id);
        }
    }

    /// Passes on the token that the sequence in a slot drew.
    fn drawn(&mut self, batch: &mut Batch<'_>, slot: usize, token: Result<u32>) {
        let sits = |job: &Job| job.slot == Some(slot);
        let Some(id) = self.jobs.iter().find(|(_, j)| sits(j)).map(|(&id, _)| id) else {
            return;
        };
        match token {
            Ok(token) => {
                if let Some(finish) = self.take(batch, id, token) {
                    self.finish(batch, id, finish);
                }
            }
            // Kept sequences give up their pages before requests go back to the queue.
            Err(Error::PagesFull { .. })
                if self.seats.give_up(batch.session(), None)
                    || self.jobs.len() > self.queue.len() + 1 =>
            {
                self.give_way(batch, id);
            }
            Err(Error::ContextFull { .. }) => self.finish(batch, id, Finish::Length),
            Err(e) => {
                let failure = Failure::Model(e.to_string());
                self.finish(batch, id, Finish::Failed(failure));
            }
        }
    }

    /// Records a token; returns how the answer ended if it was the last.
    fn take(&mut self, batch: &mut Batch<'_>, id: u64, token: u32) -> Option<Finish> {
        let job = self.jobs.get_mut(&id)?;
        let slot = job.slot?;
        let now = Instant::now();
        let metrics = &self.shared.metrics;
        metrics.generated_tokens.inc();
        match job.last.replace(now) {
            None => metrics
                .first_token
                .observe((now - job.arrived).as_secs_f64()),
            Some(last) => metrics.inter_token.observe((now - last).as_secs_f64()),
        }
        job.tokens.push(token);
        let mut logprobs = None;
        if job.request.logprobs.is_some() {
            let sampler = batch.sampler(slot);
            logprobs = sampler.and_then(|s| s.logprobs().get(job.reported).cloned());
            job.reported += 1;
        }
        if job.request.stop.contains(&token) {
            return Some(Finish::Stop(token));
        }
        job.tell(Event::Token {
            id: token,
            logprobs,
        });
        if job.left(self.spec.ctx) == 0 {
            return Some(Finish::Length);
        }
        if !job.hold.looks_at(job.drawn()) {
            return None;
        }
        // It left the batch by itself, so that its constraint can set the next mask.
        job.sampler = batch.leave(slot);
        job.fed = batch.session().len(slot);
        if job.fed + 1 < job.tokens.len() {
            // What the session has lost is fed as the rest of a prompt is.
            job.phase = Phase::Prompt;
        }
        if let Err(finish) = accept(job, token) {
            return Some(finish);
        }
        let close = job.hold.closing(&job.tokens[job.request.prompt.len()..])?;
        if job.left(self.spec.ctx) <= close.len() {
            return Some(Finish::Length);
        }
        for token in close {
            job.tokens.push(token);
            job.sampler.iter_mut().for_each(|s| s.accept(token));
            job.tell(Event::Token {
                id: token,
                logprobs: None,
            });
            if let Err(finish) = accept(job, token) {
                return Some(finish);
            }
        }
        None
    }

    /// Handles a step that was refused as a whole.
    ///
    /// # Errors
    /// The error itself, if it is an error of the device.
    fn refused(
        &mut self,
        batch: &mut Batch<'_>,
        fed: &[(u64, usize, bool)],
        e: Error,
    ) -> Result<()> {
        match e {
            Error::PagesFull { .. } => {
                if self.seats.give_up(batch.session(), None) {
                    return Ok(());
                }
                // The request that arrived last frees its pages and starts again later, unless it is alone.
                let last = fed.iter().map(|f| f.0).max();
                let others = self.jobs.len() > self.queue.len() + 1;
                match last {
                    Some(id) if others => self.give_way(batch, id),
                    Some(id) => {
                        let failure = Failure::Model(e.to_string());
                        self.finish(batch, id, Finish::Failed(failure));
                    }
                    None => return Err(e),
                }
                Ok(())
            }
            Error::Request { .. } | Error::ContextFull { .. } => {
                // If it concerns a sequence of the batch, that one has already been removed.
                let out = |j: &Job| {
                    let running = j.slot.is_some_and(|slot| batch.is_running(slot));
                    j.phase == Phase::Answer && j.sampler.is_none() && !running
                };
                let jobs = self.jobs.iter().filter(|(_, j)| out(j));
                let mut bad: Vec<u64> = jobs.map(|(&id, _)| id).collect();
                if bad.is_empty() {
                    bad.extend(fed.iter().map(|f| f.0));
                }
                if bad.is_empty() {
                    return Err(e);
                }
                for id in bad {
                    let failure = Failure::Model(e.to_string());
                    self.finish(batch, id, Finish::Failed(failure));
                }
                Ok(())
            }
            e => Err(e),
        }
    }
}

/// Advances a request's constraint, if it has one.
///
/// # Errors
/// How the answer ends, if the constraint fails.
fn accept(job: &mut Job, token: u32) -> std::result::Result<(), Finish> {
    let accepted = job.hold.accept(token);
    accepted.map_err(|why| Finish::Failed(Failure::Constraint(why)))
}

/// Gives a request's sampler the mask for the next token.
fn mask(job: &mut Job) -> std::result::Result<(), String> {
    match &mut job.sampler {
        Some(sampler) => job.hold.mask(sampler),
        None => Ok(()),
    }
}
