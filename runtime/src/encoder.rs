//! Texts that are embedded or scored instead of continued. Each becomes one row: the hidden state of its last token
//! after the final norm, or the logits of a few possible next tokens.

use crate::error::{Error, Result};
use crate::interface::{Chunk, LogitsWanted, Session};
use nq_kernels::pages::PAGE;
use std::collections::VecDeque;

/// The row that is computed from a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Row {
    /// The hidden state of its last token after the final norm, `[hidden]`.
    Hidden,
    /// The next-token logits of these tokens, in their order.
    Logits(Vec<u32>),
}

impl Row {
    /// Runs `chunks` and appends a row to `rows` for each chunk that wants logits, which is the last of its
    /// text.
    ///
    /// # Errors
    /// As [`Session::forward`]; [`Error::Request`] for a token past the vocabulary.
    pub fn forward(
        &self,
        session: &mut dyn Session,
        chunks: &[Chunk<'_>],
        rows: &mut Vec<Vec<f32>>,
    ) -> Result<()> {
        let ends = chunks.iter().filter(|c| c.logits == LogitsWanted::Last);
        let ends = ends.count();
        match self {
            Row::Hidden => {
                let mut hidden = Vec::new();
                session.hidden(chunks, &mut hidden)?;
                let width = hidden.len() / ends.max(1);
                rows.extend(hidden.chunks_exact(width.max(1)).map(<[f32]>::to_vec));
            }
            Row::Logits(tokens) => {
                let logits = session.forward(chunks, None)?;
                crate::checks::check_tokens(tokens, logits.vocab)?;
                let row = |i: usize| {
                    let logits = logits.row(i);
                    tokens.iter().map(|&t| logits[t as usize]).collect()
                };
                rows.extend((0..ends).map(row));
            }
        }
        Ok(())
    }
}

/// Texts through a session: as many at once as it has slots, rows and pages for. They end in their
/// order, whatever their lengths, and nothing is padded.
pub struct Encoder {
    session: Box<dyn Session>,
    row: Row,
}

/// A text under way.
struct EncodedText {
    slot: usize,
    text: usize,
    fed: usize,
}

impl Encoder {
    /// Over an empty session.
    pub fn new(session: Box<dyn Session>, row: Row) -> Self {
        Encoder { session, row }
    }

    /// Gives `each` the index and the row of each of `texts`, in their order. Their first `shared`
    /// tokens, which all of them must have in common, are computed once; that takes a slot.
    ///
    /// # Errors
    /// [`Error::ContextFull`] for a text longer than the context and [`Error::Request`] for an empty
    /// one, before anything is computed; what `each` returns; the device's.
    pub fn encode(
        &mut self,
        shared: usize,
        texts: &[Vec<u32>],
        each: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.check(shared, texts)?;
        let result = self.run(shared, texts, each);
        for slot in 0..self.session.spec().slots {
            self.session.truncate(slot, 0);
        }
        result
    }

    fn check(&self, shared: usize, texts: &[Vec<u32>]) -> Result<()> {
        let spec = self.session.spec();
        let capacity = spec.ctx.min(spec.page_count() * PAGE);
        let alike = |t: &Vec<u32>| t.len() > shared && t[..shared] == texts[0][..shared];
        for text in texts {
            if text.len() > capacity {
                let needed = text.len();
                return Err(Error::ContextFull { capacity, needed });
            }
            if !alike(text) {
                return Err(Error::Request {
                    what: "a text to encode",
                    expected: format!("a token behind the {shared} that all have in common"),
                    found: format!("{} tokens", text.len()),
                });
            }
        }
        Ok(())
    }

    fn run(
        &mut self,
        shared: usize,
        texts: &[Vec<u32>],
        each: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let spec = self.session.spec();
        // With a single slot, or pages for one text alone, nothing is shared.
        let longest = texts.iter().map(|t| t.len().div_ceil(PAGE)).max();
        let room = 1 + longest.unwrap_or(0) + shared.div_ceil(PAGE);
        let shares = shared > 0 && texts.len() > 1 && spec.slots > 1 && room <= spec.page_count();
        let shared = if shares { shared } else { 0 };
        let mut free: Vec<usize> = (usize::from(shares)..spec.slots).rev().collect();
        let mut pages = spec.page_count() - shared.div_ceil(PAGE);
        for tokens in texts
            .first()
            .map_or(&[][..], |t| &t[..shared])
            .chunks(spec.max_rows)
        {
            let logits = LogitsWanted::None;
            let chunk = Chunk {
                slot: 0,
                tokens,
                logits,
            };
            self.session.forward(&[chunk], None)?;
        }
        let (mut seats, mut next) = (VecDeque::<EncodedText>::new(), 0);
        while next < texts.len() || !seats.is_empty() {
            let waiting: usize = seats.iter().map(|s| texts[s.text].len() - s.fed).sum();
            let mut rows = waiting;
            while rows < spec.max_rows
                && let Some(text) = texts.get(next)
                && text.len().div_ceil(PAGE) <= pages
                && let Some(slot) = free.pop()
            {
                let fed = match shared {
                    0 => 0,
                    _ => self.session.fork(0, slot, shared)?,
                };
                pages -= text.len().div_ceil(PAGE);
                rows += text.len() - fed;
                seats.push_back(EncodedText {
                    slot,
                    text: next,
                    fed,
                });
                next += 1;
            }
            let mut ended = self
                .step(texts, seats.make_contiguous(), spec.max_rows)?
                .into_iter();
            while let Some(seat) = seats.front()
                && seat.fed == texts[seat.text].len()
            {
                let row = ended.next().expect("one of each text that has ended");
                each(seat.text, &row)?;
                self.session.truncate(seat.slot, 0);
                free.push(seat.slot);
                pages += texts[seat.text].len().div_ceil(PAGE);
                seats.pop_front();
            }
        }
        Ok(())
    }

    /// Feeds up to `rows` tokens, those of the first texts first; the rows of texts that end.
    fn step(
        &mut self,
        texts: &[Vec<u32>],
        seats: &mut [EncodedText],
        mut rows: usize,
    ) -> Result<Vec<Vec<f32>>> {
        let mut chunks = Vec::with_capacity(seats.len());
        for seat in seats {
            let text = &texts[seat.text];
            let take = rows.min(text.len() - seat.fed);
            if take == 0 {
                break;
            }
            let tokens = &text[seat.fed..seat.fed + take];
            rows -= take;
            seat.fed += take;
            chunks.push(Chunk {
                slot: seat.slot,
                tokens,
                logits: match seat.fed == text.len() {
                    true => LogitsWanted::Last,
                    false => LogitsWanted::None,
                },
            });
        }
        let mut ended = Vec::new();
        self.row
            .forward(self.session.as_mut(), &chunks, &mut ended)?;
        Ok(ended)
    }
}
