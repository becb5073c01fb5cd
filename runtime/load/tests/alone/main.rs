//! Tests that no other test may run beside on a GPU, one at a time: all GPUs share one account of memory, and kernels of
//! ranks wait for each other, so that kernels beside them could take the room they need.

mod bank;
#[path = "../common/mod.rs"]
mod common;
mod memory;
mod ranks;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The turn of a test.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
