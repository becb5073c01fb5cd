//! A session whose sequences cannot be cut everywhere, as those with a recurrent state.

use nq_runtime::{
    Chunk, Logits, Observer, Pages, Result, Session, SessionSpec, StepsAhead, Streams,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Sequences of `session` that can be cut only at multiples of `every` tokens, and where they end.
pub(crate) struct Cut {
    pub(crate) session: Box<dyn Session>,
    pub(crate) every: usize,
    /// How often less was reached than asked.
    pub(crate) short: Arc<AtomicUsize>,
}

impl Cut {
    fn counted(&self, slot: usize, len: usize) -> usize {
        let reach = self.reach(slot, len);
        if reach < len.min(self.len(slot)) {
            self.short.fetch_add(1, Ordering::Relaxed);
        }
        reach
    }
}

impl Session for Cut {
    fn spec(&self) -> SessionSpec {
        self.session.spec()
    }

    fn len(&self, slot: usize) -> usize {
        self.session.len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        let reach = self.counted(slot, len);
        self.session.truncate(slot, reach)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        let reach = self.counted(from, len);
        self.session.fork(from, to, reach)
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        match len < self.session.len(slot) {
            true => len / self.every * self.every,
            false => self.session.len(slot),
        }
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        self.session.forward(chunks, observer)
    }

    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        self.session.hidden(chunks, out)
    }

    fn exact_rows(&self) -> usize {
        self.session.exact_rows()
    }

    fn draft_rows(&self) -> usize {
        self.session.draft_rows()
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        self.session.pages()
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        self.session.ahead()
    }

    fn streams(&mut self) -> Option<&mut dyn Streams> {
        self.session.streams()
    }
}
