//! A fake device that is steps ahead of the host: its steps are computed at once and handed out later,
//! and idle rows draw nonsense.

use nq_runtime::interface::{Drawn, Run};
use nq_runtime::{
    Chunk, Error, KvType, Logits, LogitsWanted, Observer, Piece, Result, Sampler, SamplingParams,
    Session, SessionSpec, StepsAhead,
};
use nq_testkit::sessions::{logits_after, session_spec};
use std::collections::VecDeque;
use std::time::Duration;

pub(crate) const VOCAB: usize = 40;
pub(crate) const DEPTH: usize = 5;

struct HeldSeat {
    slot: usize,
    token: u32,
    sampler: Sampler,
}

/// A fake session: sequences are their tokens, and a page is one position.
pub(crate) struct Device {
    spec: SessionSpec,
    positions: usize,
    /// Rows of a step that checks drafts.
    draft_rows: usize,
    /// Sequences are cut at multiples of this.
    every: usize,
    sequences: Vec<Vec<u32>>,
    seats: Vec<Option<HeldSeat>>,
    queued: VecDeque<Vec<u32>>,
    /// Number of rows of every queued step.
    pub(crate) rows: Vec<usize>,
    /// Number of steps whose tokens the host did not write.
    pub(crate) ahead: usize,
    /// Most steps that were queued at once.
    pub(crate) most_queued: usize,
    /// Rows of all queued prompts, and of those not waited for.
    pub(crate) prompts: (usize, VecDeque<usize>),
    logits: Vec<f32>,
}

impl Device {
    pub(crate) fn new(slots: usize, rows: usize, positions: usize) -> Self {
        Device {
            spec: session_spec(slots, 60, KvType::F16, 100),
            positions,
            draft_rows: 1,
            every: 1,
            sequences: vec![Vec::new(); slots],
            seats: (0..rows).map(|_| None).collect(),
            queued: VecDeque::new(),
            rows: Vec::new(),
            ahead: 0,
            most_queued: 0,
            prompts: (0, VecDeque::new()),
            logits: Vec::new(),
        }
    }

    /// A device that checks drafts.
    pub(crate) fn checking(mut self, rows: usize) -> Self {
        self.draft_rows = rows;
        self
    }

    /// A device whose sequences can be cut only at multiples of `every` tokens, and where they end.
    pub(crate) fn cut_at(mut self, every: usize) -> Self {
        self.every = every;
        self
    }

    fn queue_drawn(&mut self, drawn: Vec<u32>) {
        self.queued.push_back(drawn);
        self.most_queued = self.most_queued.max(self.queued.len());
    }

    fn room(&self, more: usize) -> Result<()> {
        let used: usize = self.sequences.iter().map(Vec::len).sum();
        if used + more <= self.positions {
            Ok(())
        } else {
            Err(Error::PagesFull {
                needed: more,
                free: self.positions - used,
                pages: self.positions,
            })
        }
    }
}

impl Session for Device {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.sequences[slot].len()
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        if len < self.sequences[slot].len() {
            self.sequences[slot].truncate(len / self.every * self.every);
        }
        self.sequences[slot].len()
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.sequences[to] = self.sequences[from][..len].to_vec();
        Ok(len)
    }

    fn hidden(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<()> {
        unreachable!("only logits are asked for")
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        _: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        self.room(chunks.iter().map(|c| c.tokens.len()).sum())?;
        self.logits.clear();
        for c in chunks {
            self.sequences[c.slot].extend_from_slice(c.tokens);
            if c.logits == LogitsWanted::Last {
                self.logits
                    .extend(logits_after(&self.sequences[c.slot], VOCAB));
            }
        }
        Ok(Logits {
            data: &self.logits,
            vocab: VOCAB,
        })
    }

    fn draft_rows(&self) -> usize {
        self.draft_rows
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        Some(self)
    }
}

impl StepsAhead for Device {
    fn rows(&self) -> usize {
        self.seats.len()
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn check(&self, tokens: &[u32], _: Option<&Sampler>) -> Result<()> {
        match tokens.iter().find(|&&t| t as usize >= VOCAB) {
            None => Ok(()),
            Some(token) => Err(Error::Request {
                what: "token id",
                expected: format!("below {VOCAB}"),
                found: token.to_string(),
            }),
        }
    }

    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        assert!(chunks.iter().all(|c| c.logits == LogitsWanted::None));
        self.forward(chunks, None)?;
        let rows = chunks.iter().map(|c| c.tokens.len()).sum();
        self.prompts.0 += rows;
        self.prompts.1.push_back(rows);
        Ok(())
    }

    fn finish_prompts(&mut self) -> Result<Duration> {
        let rows = self.prompts.1.pop_front().expect("prompts are queued");
        Ok(Duration::from_secs(rows as u64))
    }

    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()> {
        assert!(self.seats[row].is_none(), "row {row} is taken");
        self.seats[row] = Some(HeldSeat {
            slot,
            token,
            sampler: sampler.clone(),
        });
        Ok(())
    }

    fn vacate(&mut self, row: usize) -> Result<()> {
        self.seats[row] = None;
        Ok(())
    }

    fn queue(&mut self) -> Result<()> {
        self.room(self.seats.iter().flatten().count())?;
        let last = self.seats.iter().rposition(Option::is_some);
        let rows = last.expect("somebody is seated") + 1;
        let mut drawn = Vec::with_capacity(rows);
        for seat in &mut self.seats[..rows] {
            let Some(seat) = seat else {
                drawn.push(VOCAB as u32 + 1);
                continue;
            };
            let sequence = &mut self.sequences[seat.slot];
            sequence.push(seat.token);
            assert!(sequence.len() <= self.spec.ctx, "beyond the context");
            seat.token = seat.sampler.sample(&logits_after(sequence, VOCAB))?;
            drawn.push(seat.token);
        }
        self.rows.push(rows);
        self.ahead += 1;
        self.queue_drawn(drawn);
        Ok(())
    }

    fn queue_runs(&mut self, runs: &[Run<'_>]) -> Result<()> {
        assert!(self.seats.iter().all(Option::is_none) && self.queued.is_empty());
        let rows = runs.iter().map(|r| r.tokens.len()).sum();
        assert!((1..=self.draft_rows).contains(&rows), "{rows} rows");
        self.room(rows)?;
        let mut drawn = Vec::new();
        for run in runs {
            let sequence = &mut self.sequences[run.slot];
            let mut sampler = run.sampler.clone();
            assert!(!sampler.adjusts());
            for (i, &token) in run.tokens.iter().enumerate() {
                if i > 0 {
                    sampler.accept(token);
                }
                sequence.push(token);
                assert!(sequence.len() <= self.spec.ctx, "beyond the context");
                drawn.push(sampler.clone().sample(&logits_after(sequence, VOCAB))?);
            }
        }
        // A row in which nobody sits.
        drawn.push(VOCAB as u32 + 1);
        self.rows.push(rows);
        self.queue_drawn(drawn);
        Ok(())
    }

    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()> {
        let drawn = self.queued.pop_front().expect("a step is queued");
        for (row, token) in drawn.into_iter().enumerate() {
            let logprobs = None;
            each(row, Ok(Drawn { token, logprobs }));
        }
        Ok(())
    }
}

pub(crate) fn sampler(stream: u64) -> Sampler {
    let params = SamplingParams {
        seed: 4,
        ..SamplingParams::default()
    };
    Sampler::new(params, stream).expect("valid")
}

/// The tokens that a sequence beginning with `prompt` draws alone.
pub(crate) fn alone(stream: u64, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut sampler = sampler(stream);
    sampler.begin(prompt);
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(
            sampler
                .sample(&logits_after(&tokens, VOCAB))
                .expect("finite"),
        );
    }
    tokens[prompt.len()..].to_vec()
}

pub(crate) fn piece(slot: usize, prompt: &[u32], stream: u64, tokens: usize) -> Piece<'_> {
    let mut sampler = sampler(stream);
    sampler.begin(prompt);
    nq_testkit::sessions::piece(slot, prompt, sampler, tokens)
}
