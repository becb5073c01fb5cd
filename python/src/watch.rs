//! Long work beside Python: it runs on a thread of its own, while the calling thread hears signals.

use crate::error::to_python;
use nq_llm::{Progress, Unit};
use pyo3::prelude::*;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, panicking, scope};
use std::time::{Duration, Instant};

/// How often signals are looked for, and how often a stage reports.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Stack of a thread that works, that of a program's first thread.
pub(crate) const STACK: usize = 8 << 20;

/// What work says of itself.
enum Event {
    /// A stage, the units done and all of them.
    Stage(String, u64, u64),
    /// A message that the user must see once.
    Note(String),
}

/// A stage under way.
struct Stage {
    name: String,
    done: u64,
    total: u64,
    told: Instant,
}

/// Passes progress on to the thread that waits. Once `interrupt` is set, the next report unwinds the work: code that
/// does not look for interrupts ends there too, and drops what it holds as after an error.
pub(crate) struct Reporter<'a> {
    events: Sender<Event>,
    stage: Mutex<Option<Stage>>,
    interrupt: &'a AtomicBool,
}

/// What the work unwinds with.
struct Interrupted;

impl Reporter<'_> {
    fn tell(&self, event: Event) {
        // What unwinding drops may report too.
        if self.interrupt.load(Ordering::Relaxed) && !panicking() {
            resume_unwind(Box::new(Interrupted));
        }
        // Nobody waits any more: the interrupt will be set.
        let _ = self.events.send(event);
    }

    /// Changes the stage and reports it, if `change` says so.
    fn change(&self, change: impl FnOnce(&mut Option<Stage>) -> bool) {
        let mut stage = self.stage.lock().unwrap_or_else(|e| e.into_inner());
        let tells = change(&mut stage);
        let event = stage
            .as_mut()
            .filter(|_| tells || self.interrupt.load(Ordering::Relaxed))
            .map(|stage| {
                stage.told = Instant::now();
                Event::Stage(stage.name.clone(), stage.done, stage.total)
            });
        drop(stage);
        if let Some(event) = event {
            self.tell(event);
        }
    }
}

impl Progress for Reporter<'_> {
    fn begin(&self, name: &str, total: u64, _: Unit) {
        self.change(|stage| {
            let (name, done, told) = (name.to_owned(), 0, Instant::now());
            *stage = Some(Stage {
                name,
                done,
                total,
                told,
            });
            true
        });
    }

    fn advance(&self, n: u64) {
        self.change(|stage| {
            stage.as_mut().is_some_and(|stage| {
                stage.done += n;
                stage.done >= stage.total || stage.told.elapsed() >= TICK
            })
        });
    }

    fn end(&self) {
        self.change(|stage| {
            *stage = None;
            false
        });
    }

    fn note(&self, message: &str) {
        self.tell(Event::Note(message.to_owned()));
    }
}

/// Runs `work` on a thread of its own, without Python's lock. Its progress goes to the Python function `report`, as
/// `(stage, done, total)` or as a note `(None, text, None)`. A signal whose handler raises, such as Ctrl-C, and an
/// exception of `report` set `interrupt` and are raised once the work has ended.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    interrupt: &AtomicBool,
    report: &Bound<'_, PyAny>,
    work: impl FnOnce(&Reporter<'_>) -> nq_llm::Result<T> + Send,
) -> PyResult<T> {
    let (events, receiver) = channel();
    let reporter = Reporter {
        events,
        stage: Mutex::new(None),
        interrupt,
    };
    scope(|scope| {
        let work = move || work(&reporter);
        let worker = Builder::new().stack_size(STACK).spawn_scoped(scope, work)?;
        let raised = wait(py, interrupt, report, receiver);
        let ended = py.detach(|| worker.join());
        match (raised, ended) {
            (Err(raised), _) => Err(raised),
            (Ok(()), Ok(result)) => result.map_err(to_python),
            (Ok(()), Err(panic)) => resume_unwind(panic),
        }
    })
}

/// Passes events on until the work has ended; returns what was raised meanwhile.
fn wait(
    py: Python<'_>,
    interrupt: &AtomicBool,
    report: &Bound<'_, PyAny>,
    mut events: Receiver<Event>,
) -> PyResult<()> {
    let mut raised = Ok(());
    loop {
        let (receiver, event) = py.detach(move || {
            let event = events.recv_timeout(TICK);
            (events, event)
        });
        events = receiver;
        if matches!(event, Err(RecvTimeoutError::Disconnected)) {
            return raised;
        }
        if raised.is_ok() {
            let told = event.map_or(Ok(()), |event| match event {
                Event::Stage(name, done, total) => report.call1((name, done, total)).map(drop),
                Event::Note(text) => report.call1((py.None(), text, py.None())).map(drop),
            });
            raised = told.and_then(|()| py.check_signals());
            if raised.is_err() {
                interrupt.store(true, Ordering::Relaxed);
            }
        }
    }
}
