//! Sequences that decode together: they join and leave between any two steps.
//!
//! A [`Batch`] runs over a [`Session`]. Each of its sequences has its own sampler, end and error:
//! an event in one does not delay the others, and no step computed for them is wasted. A device
//! that draws tokens itself ([`StepsAhead`](crate::StepsAhead)) is kept some steps ahead of the host, and prompts are
//! queued between its steps; a sequence that joins is in the steps queued from then on, and the
//! results of steps that were queued for one that has left are skipped.
//!
//! A sequence's tokens depend on the rest of the batch only as far as the session's logits do:
//! on the CPU not at all, on a GPU only through the order of sums, which depends on the number of
//! rows in a step.

mod ahead;
mod drafts;
mod host;
mod sample;

pub use sample::{BatchRequest, sample_sequences};

use crate::error::{Error, Result};
use crate::interface::{Drawn, Session, bucket};
use crate::sampler::{Sampler, TokenLogprobs};
use crate::speculation::Speculation;
use ahead::Queue;
use std::ops::ControlFlow;
use std::time::Duration;

/// Tokens of a sequence for the next step, and how it continues after them.
#[derive(Debug)]
pub struct Piece<'a> {
    /// The sequence.
    pub slot: usize,
    /// Tokens to append to it: at least one.
    pub tokens: &'a [u32],
    /// If set, the sequence joins the batch: its next token is drawn after the last of `tokens`.
    pub then: Option<Continuation>,
}

/// How a sequence of a batch continues.
#[derive(Debug)]
pub struct Continuation {
    /// Draws its tokens.
    pub sampler: Sampler,
    /// Tokens after which it leaves by itself: at least one.
    pub tokens: usize,
}

/// Work that was waited for: a step, or, on a device that runs ahead, rows of prompts alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// From the end of the previous work to the end of this.
    pub took: Duration,
    /// Sequences that were continued.
    pub decoding: usize,
    /// Rows of prompts.
    pub prompt_rows: usize,
}

/// Receives each token: the sequence's slot, and the token or why there is none.
pub type Each<'a> = dyn FnMut(usize, Result<u32>) -> ControlFlow<()> + 'a;

/// A sequence of the batch.
struct Member {
    slot: usize,
    sampler: Sampler,
    /// Tokens to feed next, as far as the host knows: those that the session has lost, and the one drawn last.
    feed: Vec<u32>,
    /// Tokens still to draw, not counting queued ones.
    left: usize,
    /// Its length before the steps that have not been received.
    len: usize,
    /// Steps queued for it and not received.
    queued: usize,
    /// Its row on the device, if it is seated.
    row: Option<usize>,
    /// Why it cannot continue; reported once everything queued has been received.
    blocked: Option<Error>,
}

impl Member {
    /// Tokens of its text before the one drawn last, as far as the host knows.
    fn text_len(&self) -> usize {
        self.len + self.feed.len() - 1
    }

    /// Tokens that a step may draft for it at most, in a context of `ctx` tokens: one less than the step draws.
    fn most_drafts(&self, ctx: usize) -> usize {
        let room = ctx.saturating_sub(self.text_len() + self.queued + 1);
        self.left.saturating_sub(1).min(room)
    }
}

/// Sequences of a session that decode together.
pub struct Batch<'s> {
    session: &'s mut dyn Session,
    /// Drafts tokens for those it follows.
    speculation: Option<&'s mut Speculation>,
    /// In the order they joined.
    members: Vec<Member>,
    /// Work queued on the device.
    queue: Queue,
    /// Work that the latest call of [`Batch::step`] waited for.
    ran: Vec<Ran>,
    /// Samplers of sequences that have left, by slot.
    left: Vec<(usize, Sampler)>,
}

impl<'s> Batch<'s> {
    /// An empty batch.
    pub fn new(session: &'s mut dyn Session) -> Self {
        Batch {
            session,
            speculation: None,
            members: Vec::new(),
            queue: Queue::default(),
            ran: Vec::new(),
            left: Vec::new(),
        }
    }

    /// Drafts tokens for the sequences that `speculation` follows, if the device can check them
    /// ([`Session::draft_rows`]). A step then draws one or more tokens of each. They are the same as without
    /// drafts if the device computes a few rows exactly as it computes one ([`Session::exact_rows`]).
    pub fn with_drafts(mut self, speculation: Option<&'s mut Speculation>) -> Self {
        self.speculation = speculation.filter(|_| self.session.draft_rows() > 1);
        if let (Some(speculation), true) = (&mut self.speculation, self.session.ahead().is_some()) {
            speculation.runs_ahead(bucket);
        }
        self
    }

    /// The speculation of [`Batch::with_drafts`], if there is one and the device can check drafts.
    pub fn speculation(&mut self) -> Option<&mut Speculation> {
        self.speculation.as_deref_mut()
    }

    /// The session, e.g. to make room in it. A sequence of the batch must be left alone there.
    pub fn session(&mut self) -> &mut dyn Session {
        self.session
    }

    /// Sequences that are being continued.
    pub fn running(&self) -> usize {
        self.members.len()
    }

    /// True if the sequence in `slot` is being continued.
    pub fn is_running(&self, slot: usize) -> bool {
        self.members.iter().any(|m| m.slot == slot)
    }

    /// The sampler of the sequence in `slot`, which is in the batch or has left it by itself. It has
    /// recorded every token passed to the caller.
    pub fn sampler(&self, slot: usize) -> Option<&Sampler> {
        let running = self.members.iter().find(|m| m.slot == slot);
        let left = || self.left.iter().find(|l| l.0 == slot).map(|l| &l.1);
        running.map(|m| &m.sampler).or_else(left)
    }

    /// The work that the latest call of [`Batch::step`] waited for, and how long it took.
    pub fn ran(&self) -> &[Ran] {
        &self.ran
    }

    /// Takes the sequence in `slot` out of the batch. The sequence then holds everything fed before
    /// its drawn tokens, and all drawn tokens but the last; or less, if more was queued for it and the session
    /// cannot be cut there ([`Session::len`] tells). Returns its sampler, also if it had left by itself.
    pub fn leave(&mut self, slot: usize) -> Option<Sampler> {
        if let Some(at) = self.members.iter().position(|m| m.slot == slot) {
            self.remove(at);
        }
        let at = self.left.iter().position(|l| l.0 == slot)?;
        Some(self.left.swap_remove(at).1)
    }

    fn remove(&mut self, at: usize) {
        let member = self.members.remove(at);
        if let (Some(row), Some(device)) = (member.row, self.session.ahead()) {
            // A device that fails here fails in its next step too, which reports it.
            let _ = device.vacate(row);
        }
        self.queue.forget(member.slot);
        if let Some(speculation) = self.speculation() {
            speculation.forget(member.slot);
        }
        self.session.truncate(member.slot, member.len);
        self.left.retain(|l| l.0 != member.slot);
        self.left.push((member.slot, member.sampler));
    }

    /// Runs `pieces` and a step of every sequence in the batch. Each draws a token, with drafts also
    /// several, which go to `each`, or its error; where that breaks off, or there is an error, the
    /// sequence leaves. One
    /// that fails is as it was before the step. On a device that is ahead the tokens are those of
    /// the first step not received yet, and one that fails at its first token holds the rest of its
    /// piece.
    ///
    /// # Errors
    /// [`Error::Request`], [`Error::ContextFull`] and [`Error::PagesFull`] for pieces that do not
    /// fit, before anything is computed; errors of the device. The batch is then unchanged.
    pub fn step(&mut self, pieces: Vec<Piece<'_>>, each: &mut Each<'_>) -> Result<()> {
        self.ran.clear();
        self.check(&pieces)?;
        if self.runs_ahead(&pieces) {
            self.step_ahead(pieces, each)
        } else if self.queue.is_empty() {
            self.step_on_host(pieces, each)
        } else {
            // Receive what is queued first: all of it if there are pieces to run.
            self.receive(each)?;
            while !pieces.is_empty() && !self.queue.is_empty() {
                self.receive(each)?;
            }
            if pieces.is_empty() {
                Ok(())
            } else {
                self.step_on_host(pieces, each)
            }
        }
    }

    fn check(&self, pieces: &[Piece<'_>]) -> Result<()> {
        let spec = self.session.spec();
        for (at, piece) in pieces.iter().enumerate() {
            let refuse = |expected: &str, found: String| {
                Err(Error::Request {
                    what: "piece",
                    expected: expected.into(),
                    found,
                })
            };
            if piece.slot >= spec.slots {
                let slots = format!("a slot below {}", spec.slots);
                return refuse(&slots, piece.slot.to_string());
            }
            if piece.tokens.is_empty() {
                return refuse("at least one token", "none".into());
            }
            let needed = self.session.len(piece.slot) + piece.tokens.len();
            if needed > spec.ctx {
                return Err(Error::ContextFull {
                    capacity: spec.ctx,
                    needed,
                });
            }
            if self.is_running(piece.slot) {
                let found = format!("slot {}, which is in it", piece.slot);
                return refuse("a sequence that is not in the batch", found);
            }
            if pieces[..at].iter().any(|p| p.slot == piece.slot) {
                return refuse("different slots", format!("slot {} twice", piece.slot));
            }
            if piece.then.as_ref().is_some_and(|t| t.tokens == 0) {
                return refuse("a continuation of at least one token", "none".into());
            }
        }
        Ok(())
    }

    /// Lets the sequences of `pieces` that continue join with the tokens that they drew; `before`
    /// holds their previous lengths.
    fn join_drawn(
        &mut self,
        pieces: Vec<Piece<'_>>,
        before: &[usize],
        drawn: impl IntoIterator<Item = Result<u32>>,
        each: &mut Each<'_>,
    ) {
        let joining = pieces.into_iter().enumerate();
        let joining = joining.filter(|(_, p)| p.then.is_some());
        for ((at, piece), token) in joining.zip(drawn) {
            let len = match token {
                Ok(_) => self.session.len(piece.slot),
                Err(_) => before[at],
            };
            self.join(piece.slot, 0, len, piece.then);
            let at = self.members.len() - 1;
            self.members[at].left -= 1;
            self.deliver(at, token, false, each);
        }
    }

    fn join(&mut self, slot: usize, token: u32, len: usize, then: Option<Continuation>) {
        if let Some(Continuation { sampler, tokens }) = then {
            self.left.retain(|l| l.0 != slot);
            self.members.push(Member {
                slot,
                sampler,
                feed: vec![token],
                left: tokens,
                len,
                queued: 0,
                row: None,
                blocked: None,
            });
        }
    }

    /// Gives member `at` the token that it drew, which the sampler has recorded, after it was `fed` its tokens;
    /// removes the member if it is done.
    fn deliver(&mut self, at: usize, drawn: Result<u32>, fed: bool, each: &mut Each<'_>) {
        let member = &mut self.members[at];
        let over = match drawn {
            Ok(token) => {
                member.len += if fed { member.feed.len() } else { 0 };
                member.feed = vec![token];
                if let Some(speculation) = &mut self.speculation {
                    speculation.push(member.slot, token);
                }
                each(member.slot, Ok(token)).is_break()
                    || member.left + member.queued == 0 && member.blocked.is_none()
            }
            Err(e) => {
                let _ = each(member.slot, Err(e));
                true
            }
        };
        if over {
            self.remove(at);
        }
    }

    /// Forgets the drafts that were wrong, which the session holds behind the text of the sequence in `slot`. What
    /// the session must forget with them is fed again.
    fn forget_drafts(&mut self, slot: usize) {
        let Some(member) = self.members.iter_mut().find(|m| m.slot == slot) else {
            return;
        };
        let (len, reached) = (member.len, self.session.truncate(slot, member.len));
        if reached == len {
            return;
        }
        let text = self.speculation.as_ref().and_then(|s| s.text(slot));
        match text.and_then(|text| text.get(reached..len)) {
            Some(lost) => {
                member.feed.splice(..0, lost.iter().copied());
                member.len = reached;
            }
            None => {
                member.blocked = Some(Error::Request {
                    what: "the text of a sequence with drafts",
                    expected: format!("at least {len} tokens"),
                    found: format!("{}", text.map_or(0, <[u32]>::len)),
                });
            }
        }
    }
}

impl Drop for Batch<'_> {
    /// Removes all members; queued work is run to its end first.
    fn drop(&mut self) {
        while let Some(member) = self.members.last() {
            let slot = member.slot;
            self.leave(slot);
        }
        if let Some(device) = self.session.ahead() {
            self.queue.drain(device);
        }
    }
}

/// Records in the sequence's sampler what the device drew for it.
fn record(sampler: &mut Sampler, Drawn { token, logprobs }: Drawn) -> u32 {
    match logprobs {
        None => sampler.accept(token),
        Some((logprob, top)) => sampler.accept_with(TokenLogprobs {
            position: sampler.position(),
            token,
            logprob,
            top,
        }),
    }
    token
}

/// Feeds `token` to the sequence in `slot`, draws its successor, feeds that, and so on, at most
/// `steps` times. Each token drawn goes to `each`, which may break off. The sequence then holds
/// `token` and every token drawn but the last; `sampler` has recorded all of them. What `speculation`
/// follows in `slot` is drafted.
///
/// # Errors
/// Errors of [`Batch::step`], and the sequence's own error.
pub fn decode(
    session: &mut dyn Session,
    slot: usize,
    token: u32,
    steps: usize,
    sampler: &mut Sampler,
    speculation: Option<&mut Speculation>,
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<()> {
    if steps == 0 {
        return Ok(());
    }
    let mut batch = Batch::new(session).with_drafts(speculation);
    let mut failed = None;
    let mut receive = |_: usize, token: Result<u32>| match token {
        Ok(token) => each(token),
        Err(e) => {
            failed = Some(e);
            ControlFlow::Break(())
        }
    };
    let tokens = [token];
    let mut pieces = vec![Piece {
        slot,
        tokens: &tokens,
        then: Some(Continuation {
            sampler: sampler.clone(),
            tokens: steps,
        }),
    }];
    let mut result = Ok(());
    while result.is_ok() && (!pieces.is_empty() || batch.running() > 0) {
        result = batch.step(std::mem::take(&mut pieces), &mut receive);
    }
    if let Some(used) = batch.leave(slot) {
        *sampler = used;
    }
    result.and(failed.map_or(Ok(()), Err))
}
