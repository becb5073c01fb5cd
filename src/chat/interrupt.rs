//! Ctrl-C: the first stops the current answer, the next one quits with 130.

use crate::terminal::{leave_interrupted, on_signals};
use std::sync::atomic::{AtomicBool, Ordering};

/// True while an answer is being generated.
static ANSWERING: AtomicBool = AtomicBool::new(false);
/// True if that answer should stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// From now on, signals stop answers first.
pub(crate) fn install() {
    on_signals(|| {
        if ANSWERING.load(Ordering::SeqCst) && !STOP.swap(true, Ordering::SeqCst) {
            return;
        }
        leave_interrupted();
    });
}

/// True once the current answer should stop.
pub(crate) fn is_asked_for() -> bool {
    ANSWERING.load(Ordering::SeqCst) && STOP.load(Ordering::SeqCst)
}

/// While this exists, an interrupt stops the answer instead of the program.
pub(crate) struct Answering(());

impl Answering {
    /// Begins an answer.
    pub fn begin() -> Self {
        STOP.store(false, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        Answering(())
    }

    /// A flag that is set once the answer should stop.
    pub(crate) fn flag(&self) -> &'static AtomicBool {
        &STOP
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
    }
}
