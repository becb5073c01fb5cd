//! Ctrl-C: the first stops the answer under way, the next leaves with 130.

use crate::terminal::leave_interrupted;
use std::sync::atomic::{AtomicBool, Ordering};

/// An answer is under way.
static ANSWERING: AtomicBool = AtomicBool::new(false);
/// It is to stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// Installs the handler.
///
/// # Errors
/// If the system refuses it.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if ANSWERING.load(Ordering::SeqCst) && !STOP.swap(true, Ordering::SeqCst) {
            return;
        }
        leave_interrupted();
    })?;
    Ok(())
}

/// True once the answer under way is to stop.
pub fn is_asked_for() -> bool {
    ANSWERING.load(Ordering::SeqCst) && STOP.load(Ordering::SeqCst)
}

/// While it lives, an interrupt stops the answer instead of the program.
pub struct Answering(());

impl Answering {
    /// An answer begins.
    pub fn begin() -> Self {
        STOP.store(false, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        Answering(())
    }

    /// Set once the answer is to stop.
    pub fn flag(&self) -> &'static AtomicBool {
        &STOP
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
    }
}
