//! Drafters, and the residual streams that some of them read.

use crate::error::{Error, Result};
use nq_formats::eagle::{EagleConfig, TAPS};
use nq_model::{Experts, ModelConfig, mtp};
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

/// What drafts the tokens that the steps of a session check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftedBy {
    /// Nothing: steps check no drafts.
    #[default]
    Nothing,
    /// The text itself, or another model, which has a session of its own.
    Tokens,
    /// A layer that reads the session's residual streams. The session has memory for its context and its activations.
    Layer(DraftLayer),
}

/// Sizes of a layer that drafts from residual streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftLayer {
    /// Width of the residual stream.
    pub hidden: usize,
    /// The target's streams that a row has, side by side, `hidden` values each.
    pub taps: usize,
    /// Heads of queries, and of keys and values.
    pub heads: (usize, usize),
    /// Width of a head.
    pub head_dim: usize,
    /// Values of a head that turn with the position.
    pub rotary_dims: usize,
    /// Of the products that attention begins with.
    pub qkv: usize,
    /// Width of the MLP, or of the shared expert.
    pub mlp: usize,
    /// Its experts, if it has some.
    pub experts: Option<Experts>,
    /// Tokens that may be fed.
    pub vocab: usize,
    /// Tokens that may be drafted.
    pub drafted: usize,
}

impl DraftLayer {
    /// The MTP layer of a model of shape `c`; `None` without one.
    pub fn mtp(c: &ModelConfig) -> Option<Self> {
        mtp::config(c).map(|layer| DraftLayer::of(&layer))
    }

    /// The layer of a model of shape `c` that has one layer, with attention.
    pub fn of(c: &ModelConfig) -> Self {
        DraftLayer {
            hidden: c.hidden_size,
            taps: 1,
            heads: (c.num_attention_heads, c.num_key_value_heads),
            head_dim: c.head_dim,
            rotary_dims: c.rotary_dims(),
            qkv: c.gate_dim() + c.q_dim() + 2 * c.kv_dim(),
            mlp: c.mlp_width().max(c.experts.map_or(0, |e| e.shared)),
            experts: c.experts,
            vocab: c.vocab_size,
            drafted: c.vocab_size,
        }
    }

    /// An EAGLE-3 head.
    pub fn eagle3(c: &EagleConfig) -> Self {
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        DraftLayer {
            hidden: c.hidden_size,
            taps: TAPS,
            heads: (heads, kv_heads),
            head_dim: c.head_dim,
            rotary_dims: c.rope.dims.unwrap_or(c.head_dim),
            qkv: (heads + 2 * kv_heads) * c.head_dim,
            mlp: c.intermediate_size,
            experts: None,
            vocab: c.vocab_size,
            drafted: c.draft_vocab_size,
        }
    }

    /// Values of a row's streams.
    pub fn streams(&self) -> usize {
        self.taps * self.hidden
    }
}

/// The part of a session that gives its residual streams to drafters.
pub trait Streams {
    /// The drafter that drafts with `head` for this session, and is given its residual streams from now on. The session has to
    /// be made for it ([`SessionSpec::drafts`](crate::SessionSpec::drafts)), and has one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the head is on another device, or if the session's kernels keep no streams;
    /// [`Error::Request`] if the session was made for another layer, or has a drafter already.
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
    pub what: &'static str,
    /// The numbers of layers after which it reads the stream.
    pub taps: Vec<usize>,
    /// Its sizes.
    pub layer: DraftLayer,
    /// Where it is: `the CPU` or `a GPU`.
    pub device: &'static str,
    /// As its device holds them.
    pub weights: Arc<dyn Any + Send + Sync>,
}

impl StreamHead {
    /// Checks that it drafts for a session on `device` that was made for `drafts`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it is elsewhere; [`Error::Request`] if the session was made for something else.
    pub fn check(&self, device: &str, drafts: DraftedBy) -> Result<()> {
        if self.device != device {
            return Err(Error::Unsupported {
                engine: "nq",
                what: self.what,
                expected: format!("on {device}, as its model"),
                found: format!("on {}", self.device),
            });
        }
        let expected = DraftedBy::Layer(self.layer);
        if drafts != expected {
            return Err(Error::Request {
                what: self.what,
                expected: format!("a session made for it, with drafts {expected:?}"),
                found: format!("{drafts:?}"),
            });
        }
        Ok(())
    }

    /// Its weights, if they are of this type.
    pub fn weights<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        Arc::clone(&self.weights).downcast().ok()
    }
}
