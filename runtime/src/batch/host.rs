//! A step whose logits come to the host, where samplers draw from them. A sequence has one row, or more if tokens
//! are drafted for it.

use super::{Batch, Each, Member, Piece, Ran, Result};
use crate::engine::{Chunk, Logits, LogitsWanted, Session};
use crate::error::Error;
use crate::sampler::Sampler;
use rayon::prelude::*;
use std::time::{Duration, Instant};

/// The tokens that a sequence drew in a step (several if drafted tokens were accepted), and the error that ended
/// it, if any.
#[derive(Default)]
struct Drawn {
    tokens: Vec<u32>,
    error: Option<Error>,
}

/// The draws of all sequences, members first, and the time that the device took.
type DrawnByAll = (Vec<Drawn>, Option<Duration>);

impl Batch<'_> {
    /// One forward pass over all members and the pieces, whose logits come to the host.
    pub(super) fn step_on_host(
        &mut self,
        mut pieces: Vec<Piece<'_>>,
        each: &mut Each<'_>,
    ) -> Result<()> {
        for member in &mut self.members {
            if let (Some(row), Some(device)) = (member.row.take(), self.session.steps_ahead()) {
                device.vacate(row)?;
            }
        }
        self.tell_full(each);
        if self.members.is_empty() && pieces.is_empty() {
            return Ok(());
        }
        let before: Vec<usize> = pieces.iter().map(|p| self.session.len(p.slot)).collect();
        let begun = Instant::now();
        let joins = |p: &&Piece<'_>| p.tokens.len() == 1 && p.then.is_some();
        let joining = pieces.iter().filter(joins).count();
        let piece_rows: usize = pieces.iter().map(|p| p.tokens.len()).sum();
        let (decoding, prompt_rows) = (self.members.len() + joining, piece_rows - joining);
        let mut drafts = self.draft(piece_rows);
        let (drawn, took) = loop {
            match forward(self.session, &mut self.members, &drafts, &mut pieces, each) {
                Ok(drawn) => break drawn,
                // A draft must not end a sequence that could continue without it.
                Err(Error::PagesFull { .. }) if drafts.iter().any(|d| !d.is_empty()) => {
                    drafts.iter_mut().for_each(Vec::clear);
                }
                Err(Error::PagesFull { .. }) if pieces.is_empty() && !self.members.is_empty() => {
                    // The sequence that joined last ends, which frees its pages.
                    let error = Error::PagesFull {
                        needed: 1,
                        free: self.session.free_pages().unwrap_or(0),
                        pages: self.session.spec().page_count(),
                    };
                    self.deliver(self.members.len() - 1, Err(error), 0, each);
                    return self.step_on_host(pieces, each);
                }
                Err(e) => return Err(e),
            }
        };
        self.ran.push(Ran {
            took: begun.elapsed(),
            decoding,
            prompt_rows,
        });
        let rows = self.members.len() + piece_rows + drafts.iter().map(Vec::len).sum::<usize>();
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

    /// Takes those out that cannot go on.
    fn tell_full(&mut self, each: &mut Each<'_>) {
        let capacity = self.session.spec().ctx;
        let mut at = 0;
        while at < self.members.len() {
            let needed = self.members[at].len + 1;
            let blocked = self.members[at].blocked.take();
            let full = (needed > capacity).then_some(Error::ContextFull { capacity, needed });
            match blocked.or(full) {
                Some(e) => self.deliver(at, Err(e), 0, each),
                None => at += 1,
            }
        }
    }

    /// Tokens that may follow what each member is fed next: none without speculation.
    fn draft(&mut self, piece_rows: usize) -> Vec<Vec<u32>> {
        let (ctx, most_rows) = (self.session.spec().ctx, self.session.draft_rows());
        let members = self.members.iter();
        // A step draws one token more than it checks.
        let most = |m: &Member| (m.left.saturating_sub(1)).min(ctx - m.len - 1);
        let wanted: Vec<(usize, usize)> = members.map(|m| (m.slot, most(m))).collect();
        match &mut self.speculation {
            Some(speculation) => {
                speculation.see(self.session, wanted.iter().map(|w| w.0));
                speculation.draft(&wanted, wanted.len() + piece_rows, most_rows)
            }
            None => vec![Vec::new(); wanted.len()],
        }
    }

    /// Gives out what the sequence in `slot` drew, whose cache also holds `draft`, until it leaves;
    /// the rest is forgotten.
    fn hand_out(&mut self, slot: usize, drawn: Drawn, draft: &[u32], each: &mut Each<'_>) {
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
            self.deliver(at, Ok(token), 1, each);
        }
        let member = self.members.iter().position(|m| m.slot == slot);
        match (member, drawn.error) {
            (Some(at), Some(e)) => self.deliver(at, Err(e), 0, each),
            (Some(at), None) if !draft.is_empty() => {
                self.session.truncate(slot, self.members[at].len);
            }
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
    let fed = |(m, draft): (&Member, &Vec<u32>)| (m.slot, [&[m.token], &draft[..]].concat());
    let fed: Vec<(usize, Vec<u32>)> = members.iter().zip(drafts).map(fed).collect();
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
        Err(Error::NotFinite { .. } | Error::LogitsNotFinite | Error::Logits { .. }) => {}
        Err(e) => return Err(e),
    }
    let mut alone = |chunk: &[Chunk<'_>], sampler: Option<&mut Sampler>| {
        let logits = session.forward(chunk, None)?;
        sampler.map(|s| s.sample(logits.row(0))).transpose()
    };
    let mut drawn = Vec::new();
    for member in members {
        let fed = [(member.slot, vec![member.token])];
        let token = alone(&chunks_of(&fed, &[]), Some(&mut member.sampler));
        drawn.extend(token.transpose().map(Drawn::from));
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
            (_, token) => drawn.extend(token.transpose().map(Drawn::from)),
        }
        piece.then = then;
    }
    Ok((drawn, None))
}

impl From<Result<u32>> for Drawn {
    fn from(token: Result<u32>) -> Self {
        let mut drawn = Drawn::default();
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

/// The chunks of `fed` (slot and tokens), with the logits of all rows, and of the pieces, with the logits of the
/// last row if they join the batch.
fn chunks_of<'a>(fed: &'a [(usize, Vec<u32>)], pieces: &'a [Piece<'_>]) -> Vec<Chunk<'a>> {
    let members = fed.iter().map(|(slot, tokens)| Chunk {
        slot: *slot,
        tokens,
        logits: match tokens.len() {
            1 => LogitsWanted::Last,
            _ => LogitsWanted::All,
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
) -> Vec<Drawn> {
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
fn draw_one(sampler: &mut Sampler, draft: &[u32], first: usize, logits: Logits<'_>) -> Drawn {
    let mut drawn = Drawn::default();
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
