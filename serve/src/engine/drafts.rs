//! Speculative decoding in the engine.

use super::worker::Worker;
use nq_formats::Progress;
use nq_runtime::{Batch, Session, Speculation};
use std::fmt;
use std::sync::Arc;

/// Makes the drafter of a session.
type OpenFor = dyn Fn(&mut dyn Session) -> nq_runtime::Result<Speculation> + Send + Sync;

/// Opens the drafter of a session: once, and again after a panic in the session.
#[derive(Clone)]
pub struct OpenDrafts {
    open: Arc<OpenFor>,
    progress: Arc<dyn Progress>,
}

impl OpenDrafts {
    /// Opens with `open`; `progress` gets a note when drafting stops.
    pub fn new(
        open: impl Fn(&mut dyn Session) -> nq_runtime::Result<Speculation> + Send + Sync + 'static,
        progress: Arc<dyn Progress>,
    ) -> Self {
        OpenDrafts {
            open: Arc::new(open),
            progress,
        }
    }

    pub(super) fn open(&self, session: &mut dyn Session) -> nq_runtime::Result<Speculation> {
        (self.open)(session)
    }
}

impl fmt::Debug for OpenDrafts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenDrafts")
    }
}

impl Worker<'_> {
    /// Counts the drafted and accepted tokens of a step, and passes on a note of the speculation.
    pub(super) fn count_drafts(&mut self, batch: &mut Batch<'_>) {
        let (Some(speculation), Some(drafts)) = (batch.speculation(), &self.options.drafts) else {
            return;
        };
        let counts = speculation.counts();
        let new = counts - std::mem::replace(&mut self.draft_counts, counts);
        let metrics = &self.shared.metrics;
        metrics.drafted_tokens.inc_by(new.drafted as u64);
        metrics.accepted_tokens.inc_by(new.accepted as u64);
        if let Some(note) = speculation.take_note() {
            drafts.progress.note(&note);
        }
    }
}
