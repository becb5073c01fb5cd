//! Sequences that decode together: they join and leave between any two steps.
//!
//! A [`Batch`] runs over a [`Session`]. Each of its sequences has its own sampler, its own end and
//! its own error: what happens to one costs the others nothing, and no step that was computed for
//! them is thrown away. A device that draws tokens itself ([`StepsAhead`]) is kept some steps ahead
//! of the host; then a sequence that joins is in the steps queued from there on, and what was
//! queued for one that left is passed over.
//!
//! A sequence's tokens do not depend on who else is in the batch, as far as a session's logits do
//! not: on the CPU not at all, on a GPU but for the order of sums, which goes with the number of
//! rows in a step.

mod sample;

pub use sample::{BatchRequest, sample_sequences};

use crate::engine::{Chunk, LogitsWanted, Session};
use crate::error::{Error, Result};
use crate::sampler::{Sampler, TokenLogprobs};
use rayon::prelude::*;
use std::collections::VecDeque;
use std::ops::ControlFlow;

/// Tokens of a sequence for the next step, and how it goes on from there.
#[derive(Debug)]
pub struct Piece<'a> {
    /// The sequence.
    pub slot: usize,
    /// Appended to it: at least one.
    pub tokens: &'a [u32],
    /// With it the sequence joins the batch: its next token is drawn behind the last of `tokens`.
    pub then: Option<Continuation>,
}

/// How a sequence of a batch goes on.
#[derive(Debug)]
pub struct Continuation {
    /// What draws its tokens.
    pub sampler: Sampler,
    /// Tokens after which it leaves by itself, at least one.
    pub tokens: usize,
}

/// Steps that a device runs and draws from by itself, ahead of the host: the part of a session that
/// a [`Batch`] drives. Sequences sit in rows; rows that nobody sits in run idle.
pub trait StepsAhead {
    /// Rows at most.
    fn rows(&self) -> usize;

    /// Steps to queue ahead of the tokens that the host has.
    fn depth(&self) -> usize;

    /// Seats the sequence in `slot`, which is fed `token` by the next step queued, in `row`.
    ///
    /// # Errors
    /// [`Error::Request`] for a token past the vocabulary; the device's.
    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()>;

    /// Frees a row: steps queued from here on leave its sequence alone.
    ///
    /// # Errors
    /// The device's.
    fn vacate(&mut self, row: usize) -> Result<()>;

    /// Queues a step of all that are seated.
    ///
    /// # Errors
    /// [`Error::PagesFull`] before anything is queued; the device's.
    fn queue(&mut self) -> Result<()>;

    /// Waits for the first step queued that has not been received; `each` is given what every row
    /// in it drew.
    ///
    /// # Errors
    /// The device's.
    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()>;
}

/// A token that a device drew.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// Its id.
    pub token: u32,
    /// Its log-probability and the best tokens with theirs, where the sampler wants them.
    pub logprobs: Option<(f32, Vec<(u32, f32)>)>,
}

/// What becomes of a sequence's token: its slot, and the token or why there is none.
pub type Each<'a> = dyn FnMut(usize, Result<u32>) -> ControlFlow<()> + 'a;

/// A sequence of the batch.
struct Member {
    slot: usize,
    sampler: Sampler,
    /// To be fed next, as far as the host knows.
    token: u32,
    /// Tokens to draw still, those queued not counted.
    left: usize,
    /// Its length before the steps that have not been received.
    len: usize,
    /// Steps queued for it and not received.
    queued: usize,
    /// Where it sits on a device.
    row: Option<usize>,
    /// Why it is not continued; told when all that is queued has been received.
    blocked: Option<Error>,
}

/// Sequences of a session that decode together.
pub struct Batch<'s> {
    session: &'s mut dyn Session,
    /// In the order they joined.
    members: Vec<Member>,
    /// Who sat where in each step queued: (row, slot), taken out when a sequence leaves.
    queued: VecDeque<Vec<(usize, usize)>>,
    /// Samplers of sequences that have left, by slot.
    left: Vec<(usize, Sampler)>,
}

impl<'s> Batch<'s> {
    /// Nobody yet.
    pub fn new(session: &'s mut dyn Session) -> Self {
        Batch {
            session,
            members: Vec::new(),
            queued: VecDeque::new(),
            left: Vec::new(),
        }
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

    /// What draws the tokens of the sequence in `slot`, which is in the batch or has left it by
    /// itself: it has recorded every token given out.
    pub fn sampler(&self, slot: usize) -> Option<&Sampler> {
        let running = self.members.iter().find(|m| m.slot == slot);
        let left = || self.left.iter().find(|l| l.0 == slot).map(|l| &l.1);
        running.map(|m| &m.sampler).or_else(left)
    }

    /// Takes the sequence in `slot` out: it then holds all that was fed before the tokens drawn,
    /// and every one of those but the last. Gives its sampler back, also where it left by itself.
    pub fn leave(&mut self, slot: usize) -> Option<Sampler> {
        if let Some(at) = self.members.iter().position(|m| m.slot == slot) {
            self.remove(at);
        }
        let at = self.left.iter().position(|l| l.0 == slot)?;
        Some(self.left.swap_remove(at).1)
    }

    fn remove(&mut self, at: usize) {
        let member = self.members.remove(at);
        if let (Some(row), Some(device)) = (member.row, self.session.steps_ahead()) {
            // A device that fails here fails in its next step too, and says so there.
            let _ = device.vacate(row);
        }
        for rows in &mut self.queued {
            rows.retain(|r| r.1 != member.slot);
        }
        self.session.truncate(member.slot, member.len);
        self.left.retain(|l| l.0 != member.slot);
        self.left.push((member.slot, member.sampler));
    }

    /// Runs `pieces` and a step of every sequence in the batch. Each draws a token, which goes to
    /// `each`, or its error; where that breaks off, or there is an error, the sequence leaves. One
    /// that fails is as it was before the step. On a device that is ahead the tokens are those of
    /// the first step not received yet.
    ///
    /// # Errors
    /// [`Error::Request`], [`Error::ContextFull`] and [`Error::PagesFull`] for pieces that do not
    /// fit, before anything is computed; the device's. The batch stays as it was.
    pub fn step(&mut self, pieces: Vec<Piece<'_>>, each: &mut Each<'_>) -> Result<()> {
        self.check(&pieces)?;
        if self.runs_ahead(&pieces) {
            self.step_ahead(pieces, each)
        } else if self.queued.is_empty() {
            self.step_on_host(pieces, each)
        } else {
            // What is queued comes first, all of it where there are pieces to run.
            self.receive(each)?;
            while !pieces.is_empty() && !self.queued.is_empty() {
                self.receive(each)?;
            }
            match pieces.is_empty() {
                true => Ok(()),
                false => self.step_on_host(pieces, each),
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

    /// True if there is a device that has rows for everybody.
    fn runs_ahead(&mut self, pieces: &[Piece<'_>]) -> bool {
        let joining = pieces.iter().filter(|p| p.then.is_some()).count();
        let all = self.members.len() + joining;
        let device = self.session.steps_ahead();
        device.is_some_and(|device| all <= device.rows())
    }

    fn step_ahead(&mut self, pieces: Vec<Piece<'_>>, each: &mut Each<'_>) -> Result<()> {
        // Steps of those who run already go before prompts, so that their tokens do not wait.
        self.fill()?;
        let (joining, prompts): (Vec<_>, Vec<_>) = pieces
            .into_iter()
            .partition(|p| p.tokens.len() == 1 && p.then.is_some());
        self.run_prompts(prompts, each)?;
        for piece in joining {
            let len = self.session.len(piece.slot);
            self.join(piece.slot, piece.tokens[0], len, piece.then);
        }
        self.fill()?;
        self.tell_blocked(each);
        self.receive(each)
    }

    /// Sequences that cannot go on, and for which nothing is queued, leave and say why.
    fn tell_blocked(&mut self, each: &mut Each<'_>) {
        let told = |m: &Member| m.queued == 0 && m.blocked.is_some();
        while let Some(at) = self.members.iter().position(told) {
            if let Some(e) = self.members[at].blocked.take() {
                self.deliver(at, Err(e), 0, each);
            }
        }
    }

    /// Runs prompts over rows; the first token of those that go on is drawn on the host.
    fn run_prompts(&mut self, mut prompts: Vec<Piece<'_>>, each: &mut Each<'_>) -> Result<()> {
        if prompts.is_empty() {
            return Ok(());
        }
        let before = self.lengths(&prompts);
        let drawn = forward(self.session, &mut [], &mut prompts, each)?;
        self.join_drawn(prompts, &before, drawn, each);
        Ok(())
    }

    /// The lengths of the pieces' sequences.
    fn lengths(&self, pieces: &[Piece<'_>]) -> Vec<usize> {
        pieces.iter().map(|p| self.session.len(p.slot)).collect()
    }

    /// The sequences of `pieces` that go on join with the tokens that they drew; `before` are their
    /// lengths before.
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
            self.deliver(at, token, 0, each);
        }
    }

    fn join(&mut self, slot: usize, token: u32, len: usize, then: Option<Continuation>) {
        if let Some(Continuation { sampler, tokens }) = then {
            self.left.retain(|l| l.0 != slot);
            self.members.push(Member {
                slot,
                sampler,
                token,
                left: tokens,
                len,
                queued: 0,
                row: None,
                blocked: None,
            });
        }
    }

    /// Gives member `at` what it drew after `fed` tokens, which the sampler has recorded; takes it
    /// out if it is done.
    fn deliver(&mut self, at: usize, drawn: Result<u32>, fed: usize, each: &mut Each<'_>) {
        let member = &mut self.members[at];
        let over = match drawn {
            Ok(token) => {
                member.len += fed;
                member.token = token;
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

    /// Keeps the device ahead: seats whoever stands, and queues steps.
    fn fill(&mut self) -> Result<()> {
        let ctx = self.session.spec().ctx;
        loop {
            let Some(device) = self.session.steps_ahead() else {
                return Ok(());
            };
            if self.queued.len() >= device.depth() {
                return Ok(());
            }
            // Rows beyond those that the seated need cost every step: where fewer would do, all get
            // up once nothing is queued, and sit down closer together.
            let sitting = self.members.iter().filter(|m| m.row.is_some());
            let highest = sitting.clone().filter_map(|m| m.row).max();
            let spread = highest.is_some_and(|h| bucket(h + 1) > bucket(sitting.count()));
            let standing = self.members.iter().any(|m| m.row.is_none() && m.left > 0);
            if spread && !standing {
                if !self.queued.is_empty() {
                    return Ok(());
                }
                for member in &mut self.members {
                    if let Some(row) = member.row.take() {
                        device.vacate(row)?;
                    }
                }
            }
            let mut taken: Vec<bool> = vec![false; device.rows()];
            for row in self.members.iter().filter_map(|m| m.row) {
                taken[row] = true;
            }
            let mut going = 0;
            let mut refused = None;
            for (at, member) in self.members.iter_mut().enumerate() {
                let full = member.len + member.queued >= ctx;
                if full && member.left > 0 && member.blocked.is_none() {
                    member.blocked = Some(Error::ContextFull {
                        capacity: ctx,
                        needed: ctx + 1,
                    });
                }
                let goes_on = member.left > 0 && member.blocked.is_none();
                match (member.row, goes_on) {
                    (Some(row), false) => {
                        device.vacate(row)?;
                        member.row = None;
                    }
                    // Its token is known to the host once nothing is queued for it.
                    (None, true) if member.queued == 0 => {
                        let row = taken.iter().position(|t| !t).expect("rows were counted");
                        let seated = device.seat(row, member.slot, member.token, &member.sampler);
                        if let Err(e) = seated {
                            refused = Some((at, e));
                            break;
                        }
                        taken[row] = true;
                        member.row = Some(row);
                    }
                    _ => {}
                }
                going += usize::from(member.row.is_some());
            }
            if let Some((at, e)) = refused {
                self.remove(at);
                return Err(e);
            }
            if going == 0 {
                return Ok(());
            }
            let full = |e: &Option<Error>| matches!(e, Some(Error::PagesFull { .. }));
            let waiting = self.members.iter().any(|m| full(&m.blocked));
            let mut sitting = self.members.iter_mut().filter(|m| m.row.is_some());
            match device.queue() {
                Ok(()) => {
                    let rows = sitting.filter_map(|m| {
                        m.left -= 1;
                        m.queued += 1;
                        Some((m.row?, m.slot))
                    });
                    self.queued.push_back(rows.collect());
                }
                // The last to join gives way, and the others wait for what it gives back.
                Err(e @ Error::PagesFull { .. }) => match sitting.next_back() {
                    Some(member) if !waiting => member.blocked = Some(e),
                    _ => return Ok(()),
                },
                Err(e) => return Err(e),
            }
        }
    }

    /// Waits for the first step queued and gives its tokens out.
    fn receive(&mut self, each: &mut Each<'_>) -> Result<()> {
        let (Some(rows), Some(device)) = (self.queued.pop_front(), self.session.steps_ahead())
        else {
            return Ok(());
        };
        let mut drawn: Vec<(usize, Result<Drawn>)> = Vec::with_capacity(rows.len());
        device.receive(&mut |row, token| {
            if let Some(&(_, slot)) = rows.iter().find(|r| r.0 == row) {
                drawn.push((slot, token));
            }
        })?;
        for (slot, token) in drawn {
            // One that left while these were given out is passed over.
            let Some(at) = self.members.iter().position(|m| m.slot == slot) else {
                continue;
            };
            let member = &mut self.members[at];
            member.queued -= 1;
            let token = token.map(|Drawn { token, logprobs }| {
                match logprobs {
                    None => member.sampler.accept(token),
                    Some((logprob, top)) => member.sampler.accept_with(TokenLogprobs {
                        position: member.sampler.position(),
                        token,
                        logprob,
                        top,
                    }),
                }
                token
            });
            self.deliver(at, token, 1, each);
        }
        self.tell_blocked(each);
        Ok(())
    }

    /// One forward over everybody and the pieces, whose logits come to the host.
    fn step_on_host(&mut self, mut pieces: Vec<Piece<'_>>, each: &mut Each<'_>) -> Result<()> {
        for member in &mut self.members {
            if let (Some(row), Some(device)) = (member.row.take(), self.session.steps_ahead()) {
                device.vacate(row)?;
            }
        }
        let spec = self.session.spec();
        let mut at = 0;
        while at < self.members.len() {
            let needed = self.members[at].len + 1;
            let blocked = self.members[at].blocked.take();
            let full = (needed > spec.ctx).then_some(Error::ContextFull {
                capacity: spec.ctx,
                needed,
            });
            match blocked.or(full) {
                Some(e) => self.deliver(at, Err(e), 0, each),
                None => at += 1,
            }
        }
        if self.members.is_empty() && pieces.is_empty() {
            return Ok(());
        }
        let before = self.lengths(&pieces);
        let drawn = match forward(self.session, &mut self.members, &mut pieces, each) {
            Ok(drawn) => drawn,
            Err(Error::PagesFull { .. }) if pieces.is_empty() && !self.members.is_empty() => {
                // The last to join gives way.
                let error = Error::PagesFull {
                    needed: 1,
                    free: self.session.free_pages().unwrap_or(0),
                    pages: spec.page_count(),
                };
                self.deliver(self.members.len() - 1, Err(error), 0, each);
                return self.step_on_host(pieces, each);
            }
            Err(e) => return Err(e),
        };
        let mut drawn = drawn.into_iter();
        let slots: Vec<usize> = self.members.iter().map(|m| m.slot).collect();
        for (slot, token) in slots.into_iter().zip(drawn.by_ref()) {
            if let Some(at) = self.members.iter().position(|m| m.slot == slot) {
                self.members[at].left -= 1;
                self.deliver(at, token, 1, each);
            }
        }
        self.join_drawn(pieces, &before, drawn, each);
        Ok(())
    }
}

/// What each member, then each piece that goes on, draws after one forward over all. Where numbers
/// come out that are none, each goes alone: only those that they come from fail. A piece that does
/// not go on tells `each`.
fn forward(
    session: &mut dyn Session,
    members: &mut [Member],
    pieces: &mut [Piece<'_>],
    each: &mut Each<'_>,
) -> Result<Vec<Result<u32>>> {
    let fed: Vec<(usize, u32)> = members.iter().map(|m| (m.slot, m.token)).collect();
    let chunks = chunks_of(&fed, pieces);
    match session.forward(&chunks, None) {
        Ok(logits) => {
            drop(chunks);
            let joining = pieces.iter_mut().filter_map(|p| p.then.as_mut());
            let members = members.iter_mut().map(|m| &mut m.sampler);
            let mut samplers: Vec<&mut Sampler> =
                members.chain(joining.map(|t| &mut t.sampler)).collect();
            return Ok(draw(&mut samplers, |i| logits.row(i)));
        }
        Err(Error::NotFinite { .. } | Error::LogitsNotFinite | Error::Logits { .. }) => {}
        Err(e) => return Err(e),
    }
    let mut alone = |chunk: &[Chunk<'_>], sampler: Option<&mut Sampler>| {
        let logits = session.forward(chunk, None)?;
        sampler.map(|s| s.sample(logits.row(0))).transpose()
    };
    let mut drawn = Vec::new();
    for member in members {
        let fed = [(member.slot, member.token)];
        let token = alone(&chunks_of(&fed, &[]), Some(&mut member.sampler));
        drawn.extend(token.transpose());
    }
    for piece in pieces {
        let mut then = piece.then.take();
        let chunk = Chunk {
            slot: piece.slot,
            tokens: piece.tokens,
            logits: wanted(then.is_some()),
        };
        let token = alone(&[chunk], then.as_mut().map(|t| &mut t.sampler));
        match (&then, token) {
            (None, Err(e)) => drop(each(piece.slot, Err(e))),
            (_, token) => drawn.extend(token.transpose()),
        }
        piece.then = then;
    }
    Ok(drawn)
}

/// A sequence that goes on needs its last row's logits.
fn wanted(goes_on: bool) -> LogitsWanted {
    match goes_on {
        true => LogitsWanted::Last,
        false => LogitsWanted::None,
    }
}

impl Drop for Batch<'_> {
    /// Everybody leaves; what is queued runs to its end first.
    fn drop(&mut self) {
        while let Some(member) = self.members.last() {
            let slot = member.slot;
            self.leave(slot);
        }
        while self.queued.pop_front().is_some() {
            if let Some(device) = self.session.steps_ahead() {
                // An error is the next call's too.
                let _ = device.receive(&mut |_, _| {});
            }
        }
    }
}

/// Rows that a device runs for so many sequences: sizes for which steps are recorded.
pub(crate) fn bucket(rows: usize) -> usize {
    const SIZES: [usize; 10] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64];
    let fits = SIZES.into_iter().find(|&s| s >= rows);
    fits.unwrap_or(rows.next_multiple_of(64))
}

/// One token of each of `fed`, and the pieces: logits of the last rows of all that go on.
fn chunks_of<'a>(fed: &'a [(usize, u32)], pieces: &'a [Piece<'_>]) -> Vec<Chunk<'a>> {
    let members = fed.iter().map(|(slot, token)| Chunk {
        slot: *slot,
        tokens: std::slice::from_ref(token),
        logits: LogitsWanted::Last,
    });
    let pieces = pieces.iter().map(|p| Chunk {
        slot: p.slot,
        tokens: p.tokens,
        logits: wanted(p.then.is_some()),
    });
    members.chain(pieces).collect()
}

/// A token by each of `samplers`. A large vocabulary's softmax takes a millisecond: nobody waits
/// for another's.
fn draw<'a>(
    samplers: &mut [&mut Sampler],
    row: impl Fn(usize) -> &'a [f32] + Sync,
) -> Vec<Result<u32>> {
    match samplers {
        // Waking the pool would cost a lone greedy sequence more than its choice.
        [one] => vec![one.sample(row(0))],
        many => many
            .par_iter_mut()
            .enumerate()
            .map(|(i, sampler)| sampler.sample(row(i)))
            .collect(),
    }
}

/// Feeds `token` to the sequence in `slot`, draws its successor, feeds that, and so on, at most
/// `steps` times. Each token drawn goes to `each`, which may break off. The sequence then holds
/// `token` and every token drawn but the last; `sampler` has recorded all of them.
///
/// # Errors
/// As [`Batch::step`], and the sequence's own.
pub fn decode(
    session: &mut dyn Session,
    slot: usize,
    token: u32,
    steps: usize,
    sampler: &mut Sampler,
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<()> {
    if steps == 0 {
        return Ok(());
    }
    let mut batch = Batch::new(session);
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
