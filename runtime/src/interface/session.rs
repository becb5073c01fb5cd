//! Sequences in progress over a model.

use super::adapters::AppliedAdapter;
use super::ahead::StepsAhead;
use super::chunk::{Chunk, Logits};
use super::drafts::{DraftedBy, Streams};
use super::observer::Observer;
use super::pages::Pages;
use super::tower::PlacedImage;
use crate::error::{Error, Result};
use nq_kernels::pages::{KvType, PAGE};

/// Size of a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionSpec {
    /// Most sequences held at once.
    pub slots: usize,
    /// Most positions per sequence.
    pub ctx: usize,
    /// Pages of [`PAGE`] positions for all sequences together; `None`: enough to fill every
    /// slot.
    pub pages: Option<usize>,
    /// Type that keys and values are rounded to.
    pub kv: KvType,
    /// Most tokens of one `forward` (all chunks together); longer inputs must be fed in parts.
    pub max_rows: usize,
    /// Most snapshots of all sequences together ([`Session::keep_at`]), for a model with recurrences; `None`: four
    /// for each slot, and 16 at most.
    pub snapshots: Option<usize>,
    /// What drafts the tokens that steps check. If anything does, a GPU keeps the last rows of each slot of a model with
    /// recurrences, so that wrong ones can be taken back. A CPU does so without being told.
    pub drafts: DraftedBy,
}

/// Snapshots of a session at most, unless it is told otherwise: they are large.
const SNAPSHOTS: usize = 16;

impl SessionSpec {
    /// A session of one sequence of up to `ctx` positions, which takes `max_rows` tokens at once and drafts nothing.
    pub fn of_one(ctx: usize, max_rows: usize) -> Self {
        SessionSpec {
            slots: 1,
            ctx,
            max_rows,
            ..SessionSpec::default()
        }
    }

    /// Most tokens of prompts to compute together ([`SessionSpec::max_rows`]), on a CPU or on a GPU, whose products are faster
    /// with more rows, and which expands weights in trellis codes once for all of them.
    pub fn prompt_rows(on_cpu: bool) -> usize {
        if on_cpu { 512 } else { 2048 }
    }

    /// The session of a model that drafts for this one and was trained for contexts of `ctx` tokens: as many slots and
    /// pages.
    pub fn of_draft_model(&self, ctx: usize) -> Self {
        SessionSpec {
            ctx: self.ctx.min(ctx),
            ..*self
        }
    }

    /// Number of pages for keys and values.
    pub fn page_count(&self) -> usize {
        let all = self.slots * self.ctx.div_ceil(PAGE);
        self.pages.unwrap_or(all)
    }

    /// Number of places for snapshots of states.
    pub fn snapshot_count(&self) -> usize {
        self.snapshots.unwrap_or((4 * self.slots).min(SNAPSHOTS))
    }
}

/// Sequences in progress: their state and the scratch of a forward.
///
/// The state of a sequence may be one that cannot be cut at every length. [`Session::truncate`] and
/// [`Session::fork`] therefore return the length that they reached, and the caller feeds the tokens that are
/// missing.
pub trait Session: Send {
    /// The size it was made with.
    fn spec(&self) -> SessionSpec;

    /// Tokens held by a sequence.
    fn len(&self, slot: usize) -> usize;

    /// Forgets all but the first `len` tokens of a sequence. Returns the length reached, now the sequence's
    /// length: less than `len` if its state cannot be cut there. `len` tokens or fewer stay as they are; a cut at
    /// 0 is always reached.
    fn truncate(&mut self, slot: usize, len: usize) -> usize;

    /// Makes the sequence in slot `to` the first `len` tokens of the sequence in `from`; `to`'s previous
    /// tokens are dropped. Returns the length reached, now that of the sequence in `to`: less than `len` if the
    /// state in `from` cannot be cut there. What both have in common takes memory once where it can be shared.
    ///
    /// # Errors
    /// [`crate::Error::Request`] if a slot does not exist, or if `from` has fewer tokens;
    /// [`crate::Error::Unsupported`] if sequences of this engine never share anything.
    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize>;

    /// Has the sequence in `slot`, which must be empty, computed with these adapters, in place of those before, until it
    /// is told otherwise; a fork of it has the same ones.
    ///
    /// # Errors
    /// [`crate::Error::Request`] for a sequence with tokens, or an adapter that the engine does not have.
    fn adapt(&mut self, slot: usize, adapters: &[AppliedAdapter]) -> Result<()> {
        let _ = slot;
        AppliedAdapter::check(adapters, 0)
    }

    /// Checks `applied` for the sequence in `slot` of a session whose engine has `adapters` adapters.
    ///
    /// # Errors
    /// Those of [`AppliedAdapter::check`]; [`Error::Request`] for a slot that there is none of, or a sequence with tokens.
    fn check_adapters(
        &self,
        slot: usize,
        applied: &[AppliedAdapter],
        adapters: usize,
    ) -> Result<()> {
        AppliedAdapter::check(applied, adapters)?;
        let slots = self.spec().slots;
        let (expected, found) = if slot >= slots {
            (format!("a slot below {slots}"), format!("slot {slot}"))
        } else if self.len(slot) > 0 {
            let found = format!("{} tokens in slot {slot}", self.len(slot));
            ("an empty sequence".into(), found)
        } else {
            return Ok(());
        };
        Err(Error::Request {
            what: "adapters of a sequence",
            expected,
            found,
        })
    }

    /// Has these images in the sequence in `slot`: all that it has, in order, those of its present tokens included. They
    /// must be there before the tokens that they take the place of are fed; a fork of the sequence has the same ones, a
    /// cut forgets those behind it. Tokens, pages and masks count as without images.
    ///
    /// # Errors
    /// [`Error::Request`] for images that do not fit the model; [`Error::Unsupported`] of engines that read text alone.
    fn show(&mut self, slot: usize, images: &[PlacedImage]) -> Result<()> {
        let _ = slot;
        match images.len() {
            0 => Ok(()),
            n => Err(Error::Unsupported {
                engine: "nq",
                what: "images",
                expected: "text, or nq's own engine (--engine nq)".into(),
                found: format!("{n} for another engine"),
            }),
        }
    }

    /// The length that [`Session::truncate`] and [`Session::fork`] reach in a sequence if they are asked for `len`.
    fn reach(&self, slot: usize, len: usize) -> usize {
        len.min(self.len(slot))
    }

    /// Asks that the sequence in `slot`, which has fewer than `len` tokens, can be cut and forked at that length once it
    /// is longer. Where states cannot be cut, that takes a snapshot of them, as long as there is room for it, when a
    /// prompt's tokens are computed up to there or further. A forward takes one at most for each sequence, the last
    /// that was asked for. A cut forgets what was asked for.
    fn keep_at(&mut self, slot: usize, len: usize) {
        let _ = (slot, len);
    }

    /// The number of snapshots that were taken and are still there, and of places for them.
    fn snapshots(&self) -> (usize, usize) {
        (0, 0)
    }

    /// Runs the chunks through the model and appends them to their sequences. Several
    /// chunks must name different slots.
    ///
    /// # Errors
    /// [`crate::Error::ContextFull`], [`crate::Error::PagesFull`] or [`crate::Error::Request`]
    /// before anything is computed; the sequences are then unchanged. After other errors, sequences whose
    /// state cannot be cut are empty.
    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>>;

    /// As [`Session::forward`], but for the rows that want logits appends the head's inputs to `out` instead:
    /// their hidden states after the final norm, `[rows, hidden]`.
    ///
    /// # Errors
    /// As [`Session::forward`]; [`crate::Error::Unsupported`] if the engine gives out logits only.
    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()>;

    /// Rows of one sequence up to which a step gives the logits, bit for bit, that as many steps of one
    /// row give: an answer with drafts is then the answer without.
    fn exact_rows(&self) -> usize {
        1
    }

    /// Rows up to which a step of a [`Batch`](crate::Batch) checks drafted tokens. Where that is more than
    /// [`Session::exact_rows`], an answer with drafts may differ from one without where two tokens are
    /// nearly as likely.
    fn draft_rows(&self) -> usize {
        self.exact_rows()
    }

    /// The pages that hold its keys and values, if it has any to count, read and append.
    fn pages(&mut self) -> Option<&mut dyn Pages> {
        None
    }

    /// Steps ahead of the host, whose tokens the device draws, if it can.
    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        None
    }

    /// The residual streams that it can give to drafters, if it can.
    fn streams(&mut self) -> Option<&mut dyn Streams> {
        None
    }
}
