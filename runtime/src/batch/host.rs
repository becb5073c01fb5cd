//! A step whose logits come to the host, where samplers draw from them. A sequence has one row, or more if tokens
//! are drafted for it.

use super::{Batch, Each, Member, Piece, Ran, Result};
use crate::error::Error;
use crate::interface::{Chunk, Logits, LogitsWanted, Session};
use crate::sampler::Sampler;
use rayon::prelude::*;
use std::time::{Duration, Instant};

/// The tokens that a sequence drew in a step (several if drafted tokens were accepted), and the error that ended
/// it, if any.
#[derive(Default)]
struct DrawnTokens {
    tokens: Vec<u32>,
    error: Option<Error>,
}

/// The draws of all sequences, members first, and the time that the device took.
type DrawnByAll = (Vec<DrawnTokens>, Option<Duration>);

impl Batch<'_> {
    /// One forward pass over all members and the pieces, whose logits come to the host.
    pub(super) fn step_on_host(
        &mut self,
        mut pieces: Vec<Piece<'_>>,
        each: &mut Each<'_>,
    ) -> Result<()> {
        for member in &mut self.members {
            if let (Some(row), Some(device)) = (member.row.take(), self.session.ahead()) {
                device.vacate(row)?;
            }
        }
        let piece_rows: usize = pieces.iter().map(|p| p.tokens.len()).sum();
        if let Err(e) = self.catch_up(piece_rows) {
            return self.without_the_last(e, pieces, each);
        }
        self.tell_full(each);
        if self.members.is_empty() && pieces.is_empty() {
            return Ok(());
        }
        let before: Vec<usize> = pieces.iter().map(|p| self.session.len(p.slot)).collect();
        let begun = Instant::now();
        let joins = |p: &&Piece<'_>| p.tokens.len() == 1 && p.then.is_some();
        let joining = pieces.iter().filter(joins).count();
        let (decoding, prompt_rows) = (self.members.len() + joining, piece_rows - joining);
        let mut drafts = self.draft(piece_rows);
        let (drawn, took) = loop {
            match forward(self.session, &mut self.members, &drafts, &mut pieces, each) {
                Ok(drawn) => break drawn,
                // A draft must not end a sequence that could continue without it.
                Err(Error::PagesFull { .. }) if drafts.iter().any(|d| !d.is_empty()) => {
                    drafts.iter_mut().for_each(Vec::clear);
                }
                Err(e) => return self.without_the_last(e, pieces, each),
            }
        };
        self.ran.push(Ran {
            took: begun.elapsed(),
            decoding,
            prompt_rows,
        });
        let rows = self.member_rows() + piece_rows + drafts.iter().map(Vec::len).sum::<usize>();
        if let (Some(speculation), Some(took)) = (self.speculation(), took) {
            speculation.measured(rows, took.as_secs_f64());
        }
        let mut drawn = drawn.into_iter();
        let slots: Vec<usize> = self.members.iter().map(|m| m.slot).collect();
        for ((slot, drawn), draft) in slots.into_iter().zip(drawn.by_ref()).zip(&drafts) {
            self.hand_out(slot, drawn, draft, each);
        }
        let first = drawn.map(|d| match (d.tokens.first(), d.error) {
            (Some(&token), _) => Ok(token),
            (None, Some(e)) => Err(e),
            (None, None) => unreachable!("a sequence draws a token or fails"),
        });
        self.join_drawn(pieces, &before, first, each);
        Ok(())
    }

    /// Rows of the members in a step without drafts.
    fn member_rows(&self) -> usize {
        self.members.iter().map(|m| m.feed.len()).sum()
    }

    /// Feeds the tokens that sequences have lost if a step of `piece_rows` further rows has no room for them:
    /// few at a time, so that their rows are computed as they were before.
    fn catch_up(&mut self, piece_rows: usize) -> Result<()> {
        let most = self.session.spec().max_rows;
        let few = self.session.draft_rows().clamp(1, most.max(1));
        let fits = self.member_rows() + piece_rows <= most;
        if fits && self.members.iter().all(|m| m.feed.len() <= few) {
            return Ok(());
        }
        for member in &mut self.members {
            while member.feed.len() > 1 && member.blocked.is_none() {
                let n = few.min(member.feed.len() - 1);
                let chunk = Chunk {
                    slot: member.slot,
                    tokens: &member.feed[..n],
                    logits: LogitsWanted::None,
                };
                match self.session.forward(&[chunk], None).map(drop) {
                    Ok(()) => {
                        member.feed.drain(..n);
                        member.len += n;
                    }
                    Err(e) if e.is_not_finite() => member.blocked = Some(e),
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(())
    }

    /// After a step that failed with `e`: if it lacked pages, the sequence that joined last ends, which frees
    /// its pages, and the step is run again.
    fn without_the_last(
        &mut self,
        e: Error,
        pieces: Vec<Piece<'_>>,
        each: &mut Each<'_>,
    ) -> Result<()> {
        let last = self.members.len().checked_sub(1);
        match (e, last) {
            (Error::PagesFull { .. }, Some(last)) if pieces.is_empty() => {
                let error = Error::PagesFull {
                    needed: 1,
                    free: self.session.pages().map_or(0, |pages| pages.free()),
                    pages: self.session.spec().page_count(),
                };
                self.deliver(last, Err(error), false, each);
                self.step_on_host(pieces, each)
            }
            (e, _) => Err(e),
        }
    }

    /// Takes those out that cannot go on.
    fn tell_full(&mut self, each: &mut Each<'_>) {
        let capacity = self.session.spec().ctx;
        let mut at = 0;
        while at < self.members.len() {
            let needed = self.members[at].text_len() + 1;
            let blocked = self.members[at].blocked.take();
            let full = (needed > capacity).then_some(Error::ContextFull { capacity, needed });
            match blocked.or(full) {
                Some(e) => self.deliver(at, Err(e), false, each),
                None => at += 1,
            }
        }
    }

    /// Tokens that may follow what each member is fed next: none without speculation.
    fn draft(&mut self, piece_rows: usize) -> Vec<Vec<u32>> {
        let (ctx, most_rows) = (self.session.spec().ctx, self.session.draft_rows());
        let members = self.members.iter();
        let wanted = members.map(|m| (m.slot, m.most_drafts(ctx)));
        let (wanted, rows): (Vec<(usize, usize)>, _) = (wanted.collect(), self.member_rows());
        match &mut self.speculation {
            Some(speculation) => {
                speculation.see(self.session, wanted.iter().map(|w| w.0));
                speculation.draft(&wanted, rows + piece_rows, most_rows)
            }
            None => vec![Vec::new(); wanted.len()],
        }
    }

    /// Gives out what the sequence in `slot` drew, whose cache also holds `draft`, until it leaves;
    /// the rest is forgotten.
    fn hand_out(&mut self, slot: usize, drawn: DrawnTokens, draft: &[u32], each: &mut Each<'_>) {
        let right = drawn.tokens.iter().zip(draft).filter(|(a, b)| a == b);
        let right = right.count();
        if let (Some(speculation), false) = (self.speculation(), drawn.tokens.is_empty()) {
            speculation.checked(slot, draft.len(), right);
        }
        let mut left = drawn.tokens.len();
        for token in drawn.tokens {
            let Some(at) = self.members.iter().position(|m| m.slot == slot) else {
                break;
            };
            left -= 1;
            self.members[at].left -= 1;
            self.deliver(at, Ok(token), true, each);
        }
        let member = self.members.iter().position(|m| m.slot == slot);
        match (member, drawn.error) {
            (Some(at), Some(e)) => self.deliver(at, Err(e), false, each),
            (Some(_), None) if !draft.is_empty() => self.forget_drafts(slot),
            // It has left: its sampler has recorded what was not given out.
            (None, _) if left > 0 => {
                if let Some((_, sampler)) = self.left.iter_mut().find(|l| l.0 == slot) {
                    let given = sampler.position() - left as u64;
                    sampler.rewind(given).expect("it has drawn as many");
                }
            }
            _ => {}
        }
    }
}

/// The draws of each member, then of each piece that joins the batch, after one forward pass over all. If
/// activations are not finite, each sequence is computed again by itself and without a draft, so that only those at
/// fault fail. A piece that does not join reports its error to `each`.
fn forward(
    session: &mut dyn Session,
    members: &mut [Member],
    drafts: &[Vec<u32>],
    pieces: &mut [Piece<'_>],
    each: &mut Each<'_>,
) -> Result<DrawnByAll> {
    let fed = |(m, draft): (&Member, &Vec<u32>)| Fed {
        slot: m.slot,
        tokens: [&m.feed[..], draft].concat(),
        before: m.feed.len() - 1,
    };
    let fed: Vec<Fed> = members.iter().zip(drafts).map(fed).collect();
    let chunks = chunks_of(&fed, pieces);
    let begun = Instant::now();
    match session.forward(&chunks, None) {
        Ok(logits) => {
            let took = begun.elapsed();
            drop(chunks);
            let joining = pieces.iter_mut().filter_map(|p| p.then.as_mut());
            let members = members.iter_mut().map(|m| &mut m.sampler);
            let samplers = members.chain(joining.map(|t| &mut t.sampler));
            let drafts = drafts.iter().map(Vec::as_slice);
            return Ok((draw(samplers, drafts, logits), Some(took)));
        }
        Err(e) if e.is_not_finite() => {}
        Err(e) => return Err(e),
    }
    let mut alone = |chunk: &[Chunk<'_>], sampler: Option<&mut Sampler>| {
        let logits = session.forward(chunk, None)?;
        sampler.map(|s| s.sample(logits.row(0))).transpose()
    };
    let mut drawn = Vec::new();
    for member in members {
        let fed = Fed {
            slot: member.slot,
            tokens: member.feed.clone(),
            before: member.feed.len() - 1,
        };
        let token = alone(&chunks_of(&[fed], &[]), Some(&mut member.sampler));
        drawn.extend(token.transpose().map(DrawnTokens::from));
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
            (_, token) => drawn.extend(token.transpose().map(DrawnTokens::from)),
        }
        piece.then = then;
    }
    Ok((drawn, None))
}

impl From<Result<u32>> for DrawnTokens {
    fn from(token: Result<u32>) -> Self {
        let mut drawn = DrawnTokens::default();
        match token {
            Ok(token) => drawn.tokens.push(token),
            Err(e) => drawn.error = Some(e),
        }
        drawn
    }
}

/// A sequence that draws a token needs the logits of its last row.
fn wanted(draws: bool) -> LogitsWanted {
    match draws {
        true => LogitsWanted::Last,
        false => LogitsWanted::None,
    }
}

/// What a member is fed in a step.
struct Fed {
    slot: usize,
    /// The tokens that were lost, the one drawn last, and its draft.
    tokens: Vec<u32>,
    /// Number of tokens that were lost.
    before: usize,
}

/// The chunks of `fed`, with the logits of the token drawn last and of its draft, and of the pieces, with the logits
/// of the last row if they join the batch.
fn chunks_of<'a>(fed: &'a [Fed], pieces: &'a [Piece<'_>]) -> Vec<Chunk<'a>> {
    let members = fed.iter().map(|fed| Chunk {
        slot: fed.slot,
        tokens: &fed.tokens,
        logits: match (fed.before, fed.tokens.len()) {
            (before, all) if before + 1 == all => LogitsWanted::Last,
            (0, _) => LogitsWanted::All,
            (before, all) => LogitsWanted::Window(before..all),
        },
    });
    let pieces = pieces.iter().map(|p| Chunk {
        slot: p.slot,
        tokens: p.tokens,
        logits: wanted(p.then.is_some()),
    });
    members.chain(pieces).collect()
}

/// The draws of each of `samplers`. Its rows of logits, one for each token of its draft and one more, follow those
/// of the sampler before it; samplers without a draft come last. The softmax over a large vocabulary takes a
/// millisecond, so sequences are drawn in parallel.
fn draw<'a>(
    samplers: impl Iterator<Item = &'a mut Sampler>,
    drafts: impl Iterator<Item = &'a [u32]>,
    logits: Logits<'_>,
) -> Vec<DrawnTokens> {
    let mut row = 0;
    let drafts = drafts.chain(std::iter::repeat(&[][..]));
    let mut all: Vec<(&mut Sampler, &[u32], usize)> = samplers
        .zip(drafts)
        .map(|(sampler, draft)| {
            let first = row;
            row += draft.len() + 1;
            (sampler, draft, first)
        })
        .collect();
    match &mut all[..] {
        // For a single sequence, waking the thread pool can take longer than the draw.
        [(sampler, draft, first)] => vec![draw_one(sampler, draft, *first, logits)],
        many => many
            .par_iter_mut()
            .map(|(sampler, draft, first)| draw_one(sampler, draft, *first, logits))
            .collect(),
    }
}

/// Draws until a token differs from the one in `draft`.
fn draw_one(sampler: &mut Sampler, draft: &[u32], first: usize, logits: Logits<'_>) -> DrawnTokens {
    let mut drawn = DrawnTokens::default();
    for row in 0..=draft.len() {
        match sampler.sample(logits.row(first + row)) {
            Ok(token) => drawn.tokens.push(token),
            Err(e) => drawn.error = Some(e),
        }
        if drawn.error.is_some() || drawn.tokens.last() != draft.get(row) {
            break;
        }
    }
    drawn
}
