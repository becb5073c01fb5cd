//! Drafters, and the residual streams that some of them read.

use crate::error::{Error, Result};
use std::any::Any;
use std::sync::Arc;

/// Guesses the next tokens of texts.
pub trait Drafter: Send {
    /// Adds to each draft the tokens that are most likely to follow its text, at most [`Draft::most`], and none
    /// if nothing is likely. If a sequence has grown or was truncated since the last call, only the new part
    /// needs to be computed.
    ///
    /// # Errors
    /// Those of the drafter. After an error nothing is drafted any more.
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()>;

    /// True if it reads residual streams of the target. Then no step runs ahead of the host, as its streams would be
    /// missing. [`Drafter::see`] passes on those that the target has not handed over itself.
    fn reads_streams(&self) -> bool {
        false
    }

    /// Residual streams of the sequence in `slot` that the target has computed since the last call.
    fn see(&mut self, slot: usize, tapped: Tapped) {
        let _ = (slot, tapped);
    }

    /// True if drafting takes no time compared with a step of the model.
    fn is_free(&self) -> bool {
        false
    }
}

/// Residual streams of consecutive tokens of a sequence, which a session kept for a drafter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tapped {
    /// Position of the first token.
    pub position: usize,
    /// `[tokens, taps, hidden]`
    pub rows: Vec<f32>,
}

/// A guess asked of a [`Drafter`].
#[derive(Debug)]
pub struct Draft<'a> {
    /// The sequence.
    pub slot: usize,
    /// All its tokens, the one that is fed next included.
    pub text: &'a [u32],
    /// Tokens wanted at most.
    pub most: usize,
    /// The guess.
    pub tokens: Vec<u32>,
    /// How certain the guess is, below [`KINDS`]; 0 is the least certain. Guesses of one kind have about the same
    /// acceptance rate, which is estimated per kind.
    pub kind: usize,
}

/// Number of kinds of guesses.
pub const KINDS: usize = 3;

/// The part of a session that gives its residual streams to drafters.
pub trait Streams {
    /// A drafter that drafts with `head` for this session, and is given its residual streams from now on.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the head is on another device, or if the session's kernels keep no streams;
    /// errors of the device.
    fn drafter(&mut self, head: &StreamHead) -> Result<Box<dyn Drafter>>;

    /// The streams of the sequence in `slot` that were kept for a drafter since the last call; `None` if there are
    /// none, or if the session hands them over itself.
    fn take(&mut self, slot: usize) -> Option<Tapped> {
        let _ = slot;
        None
    }
}

/// A head that drafts from residual streams: which of them it reads, and its weights, of a type that the sessions
/// of its device know.
#[derive(Clone)]
pub struct StreamHead {
    /// What it is, in errors: `an EAGLE-3 head`.
    pub(crate) what: &'static str,
    /// The numbers of layers after which it reads the stream.
    pub(crate) taps: Vec<usize>,
    /// Where it is: `the CPU` or `a GPU`.
    pub(crate) device: &'static str,
    pub(crate) weights: Arc<dyn Any + Send + Sync>,
}

impl StreamHead {
    /// Its weights, for a session on `device`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if they are elsewhere.
    pub(crate) fn weights<T: Any + Send + Sync>(&self, device: &'static str) -> Result<Arc<T>> {
        let weights = Arc::clone(&self.weights).downcast();
        weights.map_err(|_| Error::Unsupported {
            engine: "nq",
            what: self.what,
            expected: format!("on {device}, as its model"),
            found: format!("on {}", self.device),
        })
    }
}
