//! Steps whose tokens the device draws: greedy ones, so that only the best of each part of the vocabulary comes to the
//! host, in place of all logits.

use crate::session::WgpuSession;
use nq_runtime::checks::check_tokens;
use nq_runtime::interface::{Chunk, Drawn, LogitsWanted, Run, Session, StepsAhead};
use nq_runtime::sampler::Sampler;
use nq_runtime::{Error, Result};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A sequence in a row of steps.
#[derive(Clone, Copy)]
pub(crate) struct Seat {
    pub(crate) slot: usize,
    /// What the next step feeds it: the token that it drew last.
    pub(crate) token: u32,
}

/// Who sits in the rows of steps, and what is queued.
pub(crate) struct Seats {
    pub(crate) rows: Vec<Option<Seat>>,
    /// Rows of the queued step, if there is one, and their sequences.
    pub(crate) queued: Vec<(usize, usize)>,
    /// How long prompts took that nobody has waited for.
    pub(crate) prompts: VecDeque<Duration>,
}

impl Seats {
    /// `count` empty rows.
    pub(crate) fn new(count: usize) -> Self {
        Seats {
            rows: vec![None; count],
            queued: Vec::new(),
            prompts: VecDeque::new(),
        }
    }
}

impl StepsAhead for WgpuSession {
    fn rows(&self) -> usize {
        self.seats.rows.len()
    }

    /// The host feeds each step the embedding of the token before it.
    fn depth(&self) -> usize {
        1
    }

    fn draws(&mut self, sampler: &Sampler) -> bool {
        let greedy = sampler.params().is_greedy() && !sampler.adjusts();
        greedy && sampler.top_logprobs().is_none()
    }

    fn check(&self, tokens: &[u32], sampler: Option<&Sampler>) -> Result<()> {
        check_tokens(tokens, self.vocab())?;
        sampler.map_or(Ok(()), |sampler| sampler.check(self.vocab()))
    }

    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        let begun = Instant::now();
        self.run_prompts(chunks)?;
        self.seats.prompts.push_back(begun.elapsed());
        Ok(())
    }

    fn finish_prompts(&mut self) -> Result<Duration> {
        Ok(self.seats.prompts.pop_front().unwrap_or_default())
    }

    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()> {
        self.check(&[token], Some(sampler))?;
        self.seats.rows[row] = Some(Seat { slot, token });
        Ok(())
    }

    fn vacate(&mut self, row: usize) -> Result<()> {
        self.seats.rows[row] = None;
        Ok(())
    }

    fn queue(&mut self) -> Result<()> {
        let rows = self.seats.rows.iter().enumerate();
        let seated: Vec<(usize, Seat)> = rows.filter_map(|(row, s)| Some((row, (*s)?))).collect();
        let chunks: Vec<Chunk<'_>> = (seated.iter())
            .map(|(_, seat)| Chunk {
                slot: seat.slot,
                tokens: std::slice::from_ref(&seat.token),
                logits: LogitsWanted::Last,
            })
            .collect();
        self.queue_step(&chunks)?;
        self.seats.queued = seated.iter().map(|(row, seat)| (*row, seat.slot)).collect();
        Ok(())
    }

    fn queue_runs(&mut self, runs: &[Run<'_>]) -> Result<()> {
        Err(Error::Request {
            what: "runs of a step",
            expected: format!("at most {} row", self.draft_rows()),
            found: format!("{} runs", runs.len()),
        })
    }

    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()> {
        let drawn = self.drawn_tokens()?;
        for ((row, slot), token) in std::mem::take(&mut self.seats.queued)
            .into_iter()
            .zip(drawn)
        {
            let seat = self.seats.rows[row].as_mut();
            if let (Some(seat), Ok(token)) = (seat.filter(|seat| seat.slot == slot), &token) {
                seat.token = *token;
            }
            if token.is_err() {
                self.lose_slot(slot);
            }
            let drawn = token.map(|token| Drawn {
                token,
                logprobs: None,
            });
            each(row, drawn);
        }
        Ok(())
    }
}
