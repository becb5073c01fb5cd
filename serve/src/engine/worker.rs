//! The engine's thread: accepts requests, runs step after step, and survives failures.

use super::job::{Job, Phase};
use super::saved::RestoreTimes;
use super::slots::Seats;
use super::{EngineCommand, EngineOptions, EngineShared, Failure, Finish, OpenSession};
use crate::metrics::Reason;
use crate::scheduler::{Pace, PaceLimits, Queue};
use nq_runtime::speculation::DraftCounts;
use nq_runtime::{Batch, Session, SessionSpec, Speculation};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// Sessions failing in a row, without a step in between, before the engine gives up.
const FAILURES: usize = 3;

/// The engine's state without the session, which it outlives.
pub(super) struct Worker<'e> {
    pub(super) shared: &'e EngineShared,
    pub(super) options: EngineOptions,
    pub(super) spec: SessionSpec,
    /// By number, in the order of arrival.
    pub(super) jobs: BTreeMap<u64, Job>,
    pub(super) queue: Queue<u64, u64>,
    pub(super) seats: Seats,
    pub(super) pace: Pace,
    /// When requests still in progress must end, once no more are accepted.
    closing: Option<Instant>,
    /// True once nobody can send commands any more.
    deserted: bool,
    next: u64,
    /// Number of steps run.
    pub(super) steps: u64,
    /// Drafted and accepted tokens of this session.
    pub(super) draft_counts: DraftCounts,
    pub(super) restore_times: RestoreTimes,
}

/// The thread's main function: serves until told to close, or until nobody can send commands.
pub(super) fn run(
    mut session: Box<dyn Session>,
    mut drafts: Option<Speculation>,
    mut open: OpenSession,
    commands: &Receiver<EngineCommand>,
    shared: &EngineShared,
    options: EngineOptions,
) {
    let spec = session.spec();
    let pace = Pace::new(PaceLimits {
        to_finish: options.prompt_time,
        max_pause: options.max_pause,
        alone: options.prompt_time_alone,
        least: options.least_rows,
    });
    let mut worker = Worker {
        shared,
        options,
        spec,
        jobs: BTreeMap::new(),
        queue: Queue::default(),
        seats: Seats::new(spec.slots),
        pace,
        closing: None,
        deserted: false,
        next: 0,
        steps: 0,
        draft_counts: DraftCounts::default(),
        restore_times: RestoreTimes::default(),
    };
    let pages = spec.page_count() as i64;
    shared.metrics.pages.set(pages);
    shared.metrics.pages_free.set(pages);
    let mut failures = 0;
    loop {
        let steps = worker.steps;
        let served = catch_unwind(AssertUnwindSafe(|| {
            let mut batch = Batch::new(session.as_mut()).with_drafts(drafts.as_mut());
            worker.serve(&mut batch, commands)
        }));
        let why = match served {
            Ok(Ok(())) => return,
            Ok(Err(e)) => e.to_string(),
            Err(_) => "a panic while the model ran".to_owned(),
        };
        failures = if worker.steps == steps {
            failures + 1
        } else {
            1
        };
        worker.fail_seated(&why);
        // What the session held is gone with it; those who wait may still be served.
        drop((session, drafts));
        worker.draft_counts = DraftCounts::default();
        let drafter = worker.options.drafts.as_ref();
        let opened = open().and_then(|mut session| {
            let drafts = drafter.map(|d| d.open(session.as_mut())).transpose()?;
            Ok((session, drafts))
        });
        match opened {
            Ok(fresh) if failures < FAILURES => (session, drafts) = fresh,
            _ => {
                shared.failed.store(true, Ordering::Relaxed);
                worker.fail_all(&Failure::Model(why));
                return;
            }
        }
    }
}

impl Worker<'_> {
    fn serve(
        &mut self,
        batch: &mut Batch<'_>,
        commands: &Receiver<EngineCommand>,
    ) -> nq_runtime::Result<()> {
        loop {
            self.receive(commands);
            self.sweep(batch);
            if self.jobs.is_empty() && (self.closing.is_some() || self.deserted) {
                self.save_last(batch);
                return Ok(());
            }
            if self.jobs.is_empty() {
                self.save_idle(batch)
            } else {
                self.admit(batch);
                self.restore(batch);
                self.step(batch)?;
            }
            self.measure(batch);
        }
    }

    /// Receives the commands that have come; waits for one if there is nothing to do.
    fn receive(&mut self, commands: &Receiver<EngineCommand>) {
        loop {
            let idle =
                self.jobs.is_empty() && self.closing.is_none() && self.seats.unsaved.is_empty();
            let command = if idle {
                commands.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                commands.try_recv()
            };
            match command {
                Ok(EngineCommand::Submit(job)) => {
                    let id = self.next;
                    self.next += 1;
                    self.queue.push(job.request.client.id, id);
                    self.jobs.insert(id, *job);
                }
                Ok(EngineCommand::Close(at)) => self.closing = Some(at),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.deserted = true;
                    return;
                }
            }
        }
    }

    /// Ends requests that nobody waits for, and those that have taken too long.
    fn sweep(&mut self, batch: &mut Batch<'_>) {
        let now = Instant::now();
        let closed = self.closing.is_some_and(|at| now >= at);
        let mut over = Vec::new();
        for (&id, job) in &self.jobs {
            let finish = if job.is_given_up() {
                Finish::Cancelled
            } else if closed {
                Finish::Failed(Failure::Closing)
            } else if job.is_late(now) {
                Finish::Failed(Failure::Timeout)
            } else if job.waited(now, self.options.queue_time) {
                Finish::Failed(Failure::QueueTimeout)
            } else {
                continue;
            };
            over.push((id, finish));
        }
        for (id, finish) in over {
            self.finish(batch, id, finish);
        }
    }

    /// Ends a request; its slot's sequence is kept for later prompts.
    pub(super) fn finish(&mut self, batch: &mut Batch<'_>, id: u64, finish: Finish) {
        let Some(mut job) = self.jobs.remove(&id) else {
            return;
        };
        self.unseat(
            batch,
            id,
            &mut job,
            !matches!(finish, Finish::Failed(Failure::Model(_))),
        );
        self.count(&job, &finish);
        job.finish(finish);
    }

    /// Counts a request that has ended.
    fn count(&mut self, job: &Job, finish: &Finish) {
        if job.phase == Phase::Queue {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        let metrics = &self.shared.metrics;
        let reason = match finish {
            Finish::Stop(_) => "stop",
            Finish::Length => "length",
            Finish::Read => "read",
            Finish::Cancelled => "cancelled",
            Finish::Failed(Failure::Timeout | Failure::QueueTimeout) => "timeout",
            Finish::Failed(Failure::Closing) => "closing",
            Finish::Failed(_) => "error",
        };
        metrics.finished.get_or_create(&Reason { reason }).inc();
        metrics
            .request_time
            .observe(job.arrived.elapsed().as_secs_f64());
    }

    /// Ends all requests that were in a lost session.
    fn fail_seated(&mut self, why: &str) {
        self.seats = Seats::new(self.spec.slots);
        let seated = |job: &Job| job.phase != Phase::Queue;
        let ids: Vec<u64> = self
            .jobs
            .iter()
            .filter(|j| seated(j.1))
            .map(|j| *j.0)
            .collect();
        for id in ids {
            self.fail(id, &Failure::Model(why.to_owned()));
        }
    }

    fn fail_all(&mut self, failure: &Failure) {
        let ids: Vec<u64> = self.jobs.keys().copied().collect();
        for id in ids {
            self.fail(id, failure);
        }
    }

    /// Ends a request that is no longer in a session.
    fn fail(&mut self, id: u64, failure: &Failure) {
        if let Some(job) = self.jobs.remove(&id) {
            self.queue.remove(job.request.client.id, id);
            let finish = Finish::Failed(failure.clone());
            self.count(&job, &finish);
            job.finish(finish);
        }
    }

    /// Updates the gauges.
    fn measure(&mut self, batch: &mut Batch<'_>) {
        let metrics = &self.shared.metrics;
        let waiting = self.queue.len();
        if let Some(pages) = batch.session().pages() {
            metrics.pages_free.set(pages.free() as i64);
        }
        let (taken, places) = batch.session().snapshots();
        metrics.snapshots.set(places as i64);
        metrics.snapshots_free.set((places - taken) as i64);
        metrics.waiting.set(waiting as i64);
        metrics.running.set((self.jobs.len() - waiting) as i64);
        metrics.kept_tokens.set(self.seats.tree.kept().1 as i64);
        let seated = self.jobs.values().filter(|j| j.phase == Phase::Answer);
        let left = seated.map(|j| j.left(self.spec.ctx)).min().unwrap_or(0);
        let turnover = self.pace.estimate(0, left).min(Duration::from_secs(60));
        let turnover = turnover.as_millis() as usize;
        self.shared.turnover.store(turnover, Ordering::Relaxed);
    }
}
