//! The sequences of steps whose tokens the device draws.

use std::collections::VecDeque;
use std::time::Duration;

/// A sequence in a row of steps.
#[derive(Clone, Copy)]
pub(crate) struct Seat {
    pub(crate) slot: usize,
    /// What the next step feeds it: the token that it drew last.
    pub(crate) token: u32,
}

/// Who sits in the rows of steps, and what is queued.
pub(crate) struct Seats {
    pub(crate) rows: Vec<Option<Seat>>,
    /// Rows of the queued step, if there is one, and their sequences.
    pub(crate) queued: Vec<(usize, usize)>,
    /// How long prompts took that nobody has waited for.
    pub(crate) prompts: VecDeque<Duration>,
}

impl Seats {
    /// `count` empty rows.
    pub(crate) fn new(count: usize) -> Self {
        Seats {
            rows: vec![None; count],
            queued: Vec::new(),
            prompts: VecDeque::new(),
        }
    }
}
