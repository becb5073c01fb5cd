//! The slots of a session, and what is kept in them.

use super::saved::Unsaved;
use crate::prefix::PrefixTree;
use nq_runtime::Session;

/// The slots of a session.
pub(super) struct Seats {
    /// Empty slots.
    pub(super) free: Vec<usize>,
    /// The sequences in the other slots.
    pub(super) tree: PrefixTree,
    /// Kept sequences still to be written to disk, the next one last.
    pub(super) unsaved: Vec<Unsaved>,
    /// False once the session has refused to share sequences.
    pub(super) sharing: bool,
}

impl Seats {
    /// All slots are free.
    pub(super) fn new(slots: usize) -> Self {
        Seats {
            free: (0..slots).rev().collect(),
            tree: PrefixTree::default(),
            unsaved: Vec::new(),
            sharing: true,
        }
    }

    /// Empties a slot.
    pub(super) fn clear(&mut self, session: &mut dyn Session, slot: usize) {
        self.tree.remove(slot);
        self.unsaved.retain(|u| u.slot != slot);
        session.truncate(slot, 0);
        self.free.push(slot);
    }

    /// Drops the least recently used kept sequence; false if there is none except in `spared`.
    pub(super) fn give_up(&mut self, session: &mut dyn Session, spared: Option<usize>) -> bool {
        let oldest = self.tree.oldest(spared);
        if let Some(slot) = oldest {
            self.clear(session, slot);
        }
        oldest.is_some()
    }
}
