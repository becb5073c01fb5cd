//! A request in progress.

use super::saved::Restore;
use super::{Event, Finish, Request};
use nq_answers::Hold;
use nq_runtime::{Result, Sampler};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// A request, its state, and the channel to its receiver.
pub(super) struct Job {
    pub(super) request: Request,
    /// Index of the request in its stream.
    index: usize,
    events: UnboundedSender<(usize, Event)>,
    cancelled: Arc<AtomicBool>,
    /// The sampler of its tokens; `None` while the batch has it.
    pub(super) sampler: Option<Sampler>,
    /// The prompt, then the drawn tokens.
    pub(super) tokens: Vec<u32>,
    /// Its slot, if it has one.
    pub(super) slot: Option<usize>,
    /// True once the session has its images in the slot.
    pub(super) shown: bool,
    /// Tokens that the session holds, while the batch does not have the sequence.
    pub(super) fed: usize,
    /// Lengths of its prompt at which its state is kept, in order.
    pub(super) points: Vec<usize>,
    /// Pages on disk that are being read back.
    pub(super) restore: Option<Restore>,
    /// Number of log-probabilities reported so far.
    pub(super) reported: usize,
    /// What its answer is held to.
    pub(super) hold: Hold,
    /// True once its start was reported.
    pub(super) started: bool,
    pub(super) arrived: Instant,
    /// Time of the last token.
    pub(super) last: Option<Instant>,
    pub(super) phase: Phase,
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// A slot.
    Queue,
    /// Pages of its prompt that are on disk.
    Restore,
    /// The rest of its prompt.
    Prompt,
    /// Its next token.
    Answer,
}

impl Phase {
    /// True while the slot is being filled with its prompt.
    pub(super) fn fills(self) -> bool {
        matches!(self, Phase::Restore | Phase::Prompt)
    }
}

impl Job {
    pub(super) fn new(
        mut request: Request,
        index: usize,
        events: UnboundedSender<(usize, Event)>,
        cancelled: Arc<AtomicBool>,
    ) -> Result<Self> {
        let mut sampler = Sampler::new(request.sampling, request.stream)?;
        sampler.set_bias(request.bias.clone());
        sampler.set_logprobs(request.logprobs)?;
        sampler.begin(&request.prompt);
        Ok(Job {
            tokens: request.prompt.clone(),
            hold: Hold::new(request.constraint.take(), request.thinking.take()),
            request,
            index,
            events,
            cancelled,
            sampler: Some(sampler),
            slot: None,
            shown: false,
            fed: 0,
            points: Vec::new(),
            restore: None,
            reported: 0,
            started: false,
            arrived: Instant::now(),
            last: None,
            phase: Phase::Queue,
        })
    }

    /// What its first `len` tokens are told from those of other sequences by: tokens in place of an image have numbers
    /// of their own, made of the digest of what the tower sees.
    pub(super) fn keys(&self, len: usize) -> Cow<'_, [u32]> {
        let mut keys = Cow::Borrowed(&self.tokens[..len]);
        for image in self.request.images.iter().filter(|image| image.at < len) {
            let place = image.at..image.end().min(len);
            let words = image.image.digest.chunks_exact(4).cycle();
            for (key, word) in keys.to_mut()[place].iter_mut().zip(words) {
                let word = word
                    .iter()
                    .fold(0, |word, &byte| word << 8 | u32::from(byte));
                // No token has this bit.
                *key = word | 1 << 31;
            }
        }
        keys
    }

    /// Number of tokens drawn.
    pub(super) fn drawn(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Number of tokens that may still be drawn, in a context of `ctx`.
    pub(super) fn left(&self, ctx: usize) -> usize {
        let room = ctx - self.request.prompt.len();
        room.min(self.request.max_tokens) - self.drawn()
    }

    /// Number of tokens that the batch may draw before the engine has to look at them.
    pub(super) fn run(&self, ctx: usize) -> usize {
        self.hold.run(self.drawn(), self.left(ctx))
    }

    /// Tokens of its prompt that a step may still be fed: all but the last of one that is to be read,
    /// which [`Worker::read`](super::worker::Worker::read) feeds.
    pub(super) fn unfed(&self) -> usize {
        self.tokens.len() - self.fed - usize::from(self.request.row.is_some())
    }

    /// True once nobody waits for it.
    pub(super) fn is_given_up(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.events.is_closed()
    }

    /// True once its deadline has passed.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.request.deadline.is_some_and(|d| now >= d)
    }

    /// True if it has waited longer than `most`.
    pub(super) fn waited(&self, now: Instant, most: Duration) -> bool {
        self.phase == Phase::Queue && !self.started && now - self.arrived > most
    }

    pub(super) fn tell(&self, event: Event) {
        // A receiver that is gone is noticed at the next step.
        let _ = self.events.send((self.index, event));
    }

    pub(super) fn finish(&self, finish: Finish) {
        self.tell(Event::Finished(finish));
    }
}
