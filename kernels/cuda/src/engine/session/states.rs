//! The states of a session's sequences: where they stand, and how earlier ones are reached.

use super::{CudaSession, copy_places};
use crate::DeviceStates;
use nq_runtime::interface::Chunk;
use nq_runtime::{Error, Result};

impl CudaSession {
    /// The rows of the sequence in `slot` that are kept and not in its states.
    pub(super) fn rows_behind(&self, slot: usize) -> usize {
        self.behind[slot].map_or(0, |at| self.tables.len(slot) - at)
    }

    /// True if the sequence can be cut at `len` because rows behind that are kept and not in its states.
    pub(super) fn can_take_back(&self, slot: usize, len: usize) -> bool {
        self.behind[slot].is_some_and(|at| at <= len)
    }

    /// Brings the states of the sequence in `slot` forward to its end.
    pub(super) fn settle(&mut self, slot: usize) -> Result<()> {
        let rows = self.rows_behind(slot);
        self.behind[slot] = None;
        match &mut self.states {
            Some(states) if rows > 0 => Ok(self.stream.settle_states(states, slot, slot, rows)?),
            _ => Ok(()),
        }
    }

    /// Notes what a step over `rows` rows of the sequence in `slot`, behind `len` others, leaves in its states.
    pub(super) fn stepped(&mut self, slot: usize, len: usize, rows: usize) {
        let keeps = self.states.as_ref().is_some_and(DeviceStates::keeps_rows);
        self.behind[slot] = (keeps && rows > 1).then_some(len);
    }

    /// Gives the sequence in `to` the states that the one in `from` had at `len` tokens or, of those kept,
    /// shortly before. Returns that length.
    pub(super) fn resume(&mut self, from: usize, to: usize, len: usize) -> usize {
        self.behind[to] = None;
        self.stateless[to] = false;
        let (Some(states), Some((place, len))) =
            (&mut self.states, self.snapshots.nearest(from, len))
        else {
            return 0;
        };
        // A stream that fails reports it to whoever uses the sequence next; it is empty until then.
        match copy_places(&self.stream, states, &mut self.kept, place, to) {
            Ok(()) => len,
            Err(_) => 0,
        }
    }

    /// Called when a forward over the chunks fails, for which experts may still be on their way: what it did to states
    /// cannot be undone, so their sequences become empty. Pages are reserved before anything is done.
    pub(super) fn lose(&mut self, chunks: &[Chunk<'_>], error: &Error) {
        if let Some(bank) = &self.model.layers.bank {
            bank.settle();
        }
        if self.states.is_some() && !matches!(error, Error::PagesFull { .. }) {
            for chunk in chunks {
                self.tables.truncate(chunk.slot, 0);
                self.snapshots.cut(chunk.slot, 0);
                self.behind[chunk.slot] = None;
            }
        }
    }
}
