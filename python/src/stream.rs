//! An answer that comes in pieces.

use crate::error::to_python;
use crate::question::Question;
use crate::watch::{STACK, TICK};
use nq_llm::{Chat, Result};
use pyo3::prelude::*;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Pieces that wait for a reader; then the model waits.
const AHEAD: usize = 16;

/// An iterator over the pieces of an answer. The model runs on a thread of its own, which ends with the answer or with
/// the iterator.
#[pyclass(frozen, module = "nq._nq")]
pub(crate) struct Stream {
    running: Mutex<Option<RunningStream>>,
    /// The answer as JSON, once it has ended.
    answer: Mutex<Option<String>>,
    interrupt: Arc<AtomicBool>,
}

struct RunningStream {
    pieces: Receiver<String>,
    thread: JoinHandle<Result<String>>,
}

impl Stream {
    /// Answers `question` in `chat`, which `keep` gets afterwards.
    pub(crate) fn new(
        mut chat: Chat,
        question: Question,
        keep: impl FnOnce(Chat) + Send + 'static,
    ) -> PyResult<Self> {
        let interrupt = Arc::clone(&chat.interrupt);
        let stop = Arc::clone(&interrupt);
        let (send, pieces) = sync_channel::<String>(AHEAD);
        let answer = move || {
            let answer = question.answer(&mut chat, |piece| {
                if send.send(piece.to_owned()).is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            });
            keep(chat);
            answer
        };
        let thread = Builder::new().stack_size(STACK).spawn(answer)?;
        let running = Mutex::new(Some(RunningStream { pieces, thread }));
        Ok(Stream {
            running,
            answer: Mutex::default(),
            interrupt,
        })
    }

    /// The next piece; `None` if none came within a [`TICK`]; an error if the answer has ended.
    fn wait(&self) -> Result<Option<String>, RecvTimeoutError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let running = running.as_ref().ok_or(RecvTimeoutError::Disconnected)?;
        match running.pieces.recv_timeout(TICK) {
            Err(RecvTimeoutError::Timeout) => Ok(None),
            received => received.map(Some),
        }
    }

    /// Ends the answer and waits for its thread.
    fn end(&self) -> Result<()> {
        let running = self
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(RunningStream { pieces, thread }) = running else {
            return Ok(());
        };
        self.interrupt.store(true, Ordering::Relaxed);
        drop(pieces); // the thread may wait for room
        let answer = thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        Ok(())
    }
}

#[pymethods]
impl Stream {
    fn __iter__(stream: Py<Self>) -> Py<Self> {
        stream
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            match py.detach(|| self.wait()) {
                Ok(Some(piece)) => return Ok(Some(piece)),
                Ok(None) => py.check_signals().inspect_err(|_| {
                    // The exception that is raised counts, not what the answer's end says.
                    let _ = py.detach(|| self.end());
                })?,
                Err(_) => return py.detach(|| self.end()).map(|()| None).map_err(to_python),
            }
        }
    }

    /// The answer as JSON; `None` before its end.
    #[getter]
    fn answer(&self) -> Option<String> {
        let answer = self.answer.lock();
        answer.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the answer; what has not been read is lost.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.end()).map_err(to_python)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
