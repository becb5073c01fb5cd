//! Steps whose tokens the device draws.

use crate::engine::adapters::by_row;
use crate::engine::session::CudaSession;
use crate::engine::session::graphs::{StepEnd, StepKind};
use crate::engine::session::step_rows::{PENDING, RING, RowState, idle_step};
use crate::{MOST_LOGPROBS, NONE_ALLOWED, NOT_FINITE, Sampling, Step};
use nq_runtime::checks::check_tokens;
use nq_runtime::interface::{Chunk, Drawn, LogitsWanted, Run, Session, StepsAhead, bucket};
use nq_runtime::sampler::Sampler;
use nq_runtime::{Error, Result};
use std::time::Duration;

/// Steps queued ahead of the token that the host waits for.
const AHEAD: usize = 12;
/// Likewise of a model in a bank, whose steps take longer: an expert that is chosen gets a room when so many more have
/// run, and one more for its copy.
const AHEAD_OF_BANK: usize = 2;
/// Draws are counted modulo this, a multiple of [`RING`], so that the count does not overflow.
const DRAWS: u64 = 1 << 30;
const _: () = assert!(DRAWS.is_multiple_of(RING as u64));

/// The state of a sampler as the device keeps it, where its next draw has number `drawn`.
fn sampling(sampler: &Sampler, drawn: i32) -> Sampling {
    let p = sampler.params();
    let words = |v: u64| [v as u32, (v >> 32) as u32];
    let flag = |bit, set: bool| if set { bit } else { 0 };
    Sampling {
        temperature: p.temperature,
        top_p: p.top_p,
        min_p: p.min_p,
        repetition: p.repetition_penalty,
        frequency: p.frequency_penalty,
        presence: p.presence_penalty,
        top_k: i32::try_from(p.top_k).unwrap_or(i32::MAX),
        adjusts: flag(Sampling::BIASED, !sampler.bias().as_slice().is_empty())
            + flag(Sampling::PENALIZED, p.has_penalties())
            + flag(Sampling::MASKED, sampler.mask().is_some()),
        logprobs: sampler.top_logprobs().map_or(0, |n| 1 + n as i32),
        seed: words(p.seed),
        stream: words(sampler.stream()),
        // The device adds the row's number of draws.
        position: words(sampler.position().wrapping_sub(i64::from(drawn) as u64)),
    }
}

/// The number of the sampler's draw after `more` further tokens. It depends on the position alone, so the state
/// that the device keeps of the sampler does not change.
fn draws(sampler: &Sampler, more: usize) -> i32 {
    (sampler.position().wrapping_add(more as u64) % DRAWS) as i32
}

impl RowState {
    fn of(slot: usize, sampler: &Sampler, drawn: i32) -> Self {
        let p = sampler.params();
        RowState {
            slot: Some(slot),
            drawn,
            lists: sampler.adjusts() || !(p.is_greedy() || p.top_k == 1),
            logprobs: sampler.top_logprobs().is_some(),
        }
    }
}

impl CudaSession {
    /// Sets the sampling of the rows from `first` on to `wanted`.
    fn write_sampling(&mut self, first: usize, wanted: &[Sampling]) -> Result<()> {
        let held = &mut self.step.sampled_by[first..first + wanted.len()];
        let differs = |(a, b): (&Sampling, &Sampling)| a != b;
        let mut pairs = held.iter().zip(wanted);
        if let Some(start) = pairs.clone().position(differs) {
            let end = 1 + pairs.rposition(differs).unwrap_or(start);
            let (stream, new) = (&self.stream, &wanted[start..end]);
            stream.put(&mut self.step.sampling, first + start, new)?;
            held[start..end].copy_from_slice(new);
        }
        Ok(())
    }

    /// Gives idle rows among the first `m` the sampling that costs least.
    fn calm_idle_rows(&mut self, m: usize) -> Result<()> {
        let seats = self.step.seats[..m].iter().zip(&self.step.sampled_by);
        let wanted: Vec<Sampling> = seats
            .map(|(seat, held)| seat.slot.map_or_else(Sampling::default, |_| *held))
            .collect();
        self.write_sampling(0, &wanted)
    }

    /// Writes what a sampler does to logits to `row`.
    fn write_adjustments(&mut self, row: usize, sampler: &Sampler) -> Result<()> {
        let (stream, adjust) = (&self.stream, &mut self.step.adjust);
        let bias = sampler.bias().as_slice();
        if !bias.is_empty() {
            adjust.write_bias(stream, row, bias)?;
        }
        if let Some(mask) = sampler.mask() {
            adjust.write_mask(stream, row, mask)?;
        }
        if sampler.params().has_penalties() {
            let seen = sampler.seen().map(|t| (t.id, t.in_prompt, t.count));
            adjust.write_seen(stream, row, seen)?;
        }
        Ok(())
    }

    /// Refuses runs that do not fit a step, or whose samplers need what the device keeps for one token
    /// of a sequence at a time.
    fn check_runs<'a>(&self, runs: &[Run<'a>]) -> Result<()> {
        let refuse = |expected: String, found: String| {
            Err(Error::Request {
                what: "runs of a step",
                expected,
                found,
            })
        };
        let rows: usize = runs.iter().map(|r| r.tokens.len()).sum();
        let most = self.draft_rows();
        if !(1..=most).contains(&rows) {
            return refuse(format!("1 to {most} rows"), rows.to_string());
        }
        if let Some(run) = runs.iter().find(|r| r.sampler.adjusts()) {
            let found = format!("one that does, of slot {}", run.slot);
            return refuse("samplers that do not adjust logits".into(), found);
        }
        if !self.is_idle() {
            let found = "queued steps or sequences in their rows";
            return refuse("an idle device".into(), found.into());
        }
        let chunk = |run: &Run<'a>| Chunk {
            slot: run.slot,
            tokens: run.tokens,
            logits: LogitsWanted::None,
        };
        for run in runs {
            let len = self.tables.len(run.slot);
            let end = len + run.tokens.len();
            self.images.check_text(run.slot, len..end)?;
        }
        let chunks: Vec<Chunk<'a>> = runs.iter().map(chunk).collect();
        self.check_chunks(&chunks)
    }

    /// Waits for the token that `row` drew for `seat`.
    fn wait_for(&mut self, row: usize, seat: RowState) -> Result<Drawn> {
        let at = row * RING + seat.drawn as usize % RING;
        let mut spins = 0u32;
        let token = loop {
            match self.step.ring.load(at) {
                PENDING => {
                    spins += 1;
                    std::hint::spin_loop();
                    // A kernel that failed never writes its token; the stream then reports why.
                    if spins.is_multiple_of(1 << 22) && self.stream.is_done()? {
                        return Err(Error::Kernel(nq_kernels::Error::Cuda {
                            what: "decoding",
                            why: "the queued steps ended without a token".into(),
                        }));
                    }
                }
                token => break token,
            }
        };
        self.step.ring.store(at, PENDING);
        let logprobs = seat.logprobs.then(|| {
            // The device writes these before the token.
            let said = self.step.logprobs.load(at);
            let n = (said.count as usize).min(MOST_LOGPROBS);
            let top = (said.ids.into_iter().map(|id| id as u32))
                .zip(said.values)
                .take(n)
                .collect();
            (said.chosen, top)
        });
        Ok(Drawn { token, logprobs })
    }
}

impl StepsAhead for CudaSession {
    fn rows(&self) -> usize {
        self.step.seats.len()
    }

    fn depth(&self) -> usize {
        match self.model.layers.bank {
            _ if self.model.gpu.is_profiling() => 1,
            Some(_) => AHEAD_OF_BANK,
            None => AHEAD,
        }
    }

    fn check(&self, tokens: &[u32], sampler: Option<&Sampler>) -> Result<()> {
        let vocab = self.model.config.vocab_size;
        check_tokens(tokens, vocab)?;
        sampler.map_or(Ok(()), |s| s.check(vocab))
    }

    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self.check_chunks(chunks)?;
        self.queue_chunks(chunks)
    }

    fn finish_prompts(&mut self) -> Result<Duration> {
        self.finish_chunks()
    }

    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()> {
        self.check(&[token], Some(sampler))?;
        let position = self.tables.len(slot);
        self.images.check_text(slot, position..position + 1)?;
        self.settle(slot)?;
        let seat = &self.step.seats[row];
        let drawn = match self.step.queued.is_empty() {
            true => draws(sampler, 0),
            // Queued steps write to the next places of the ring.
            false => (seat.drawn as u64 % DRAWS) as i32,
        };
        self.write_sampling(row, &[sampling(sampler, drawn)])?;
        self.write_adjustments(row, sampler)?;
        let step = Step {
            position: position as i32,
            slot: slot as i32,
            token,
            drawn,
            behind: 0,
            shift: self.images.shift(slot, position),
        };
        self.stream.put_checked(&mut self.step.step, row, &[step])?;
        self.step.written = true;
        self.step.seats[row] = RowState::of(slot, sampler, drawn);
        Ok(())
    }

    fn vacate(&mut self, row: usize) -> Result<()> {
        let drawn = self.step.seats[row].drawn;
        self.step.seats[row] = RowState {
            drawn,
            ..RowState::default()
        };
        let idle = idle_step(self.pages.idle_slot(), drawn);
        self.stream.put_checked(&mut self.step.step, row, &[idle])?;
        self.step.written = true;
        Ok(())
    }

    fn queue(&mut self) -> Result<()> {
        let seats = self.step.seats.iter();
        let slots: Vec<usize> = seats.clone().filter_map(|s| s.slot).collect();
        let last = seats.clone().rposition(|s| s.slot.is_some()).unwrap_or(0);
        let m = bucket(last + 1).min(self.step.seats.len());
        self.reserve(slots.iter().map(|&slot| (slot, 1)))?;
        slots.iter().for_each(|&slot| self.tables.advance(slot, 1));
        let longest = slots.iter().map(|&slot| self.tables.len(slot)).max();
        let end = if self.step.seats.iter().any(|s| s.lists) {
            StepEnd::Sampled
        } else {
            StepEnd::Greedy
        };
        if std::mem::take(&mut self.step.written) {
            self.calm_idle_rows(m)?;
            self.queue_embedding(m)?;
            self.share()?;
        }
        let kind = StepKind {
            shared: self.step.shared,
            ..self.kind(m, longest.unwrap_or(1), end, false)
        };
        let seated = self.step.seats[..m].iter().map(|seat| seat.slot);
        self.adapted.begin(by_row(seated));
        self.run_step(kind)?;
        self.step.queued.push_back(self.step.seats[..m].to_vec());
        for seat in &mut self.step.seats[..m] {
            seat.drawn = seat.drawn.wrapping_add(1);
        }
        Ok(())
    }

    fn queue_runs(&mut self, runs: &[Run<'_>]) -> Result<()> {
        self.check_runs(runs)?;
        self.reserve(runs.iter().map(|r| (r.slot, r.tokens.len())))?;
        let shared = self.share_in_runs(runs)?;
        let (mut steps, mut longest) = (Vec::new(), 0);
        let (mut seats, mut samplings) = (Vec::new(), Vec::new());
        for run in runs {
            let len = self.tables.len(run.slot);
            longest = longest.max(len + run.tokens.len());
            let behind = self.rows_behind(run.slot) as i32;
            let shift = self.images.shift(run.slot, len);
            for (i, &token) in run.tokens.iter().enumerate() {
                let drawn = draws(run.sampler, i);
                steps.push(Step {
                    position: (len + i) as i32,
                    slot: run.slot as i32,
                    token,
                    drawn,
                    behind: if i == 0 { behind } else { 0 },
                    shift,
                });
                seats.push(RowState::of(run.slot, run.sampler, drawn));
                samplings.push(sampling(run.sampler, draws(run.sampler, 0)));
            }
            self.stepped(run.slot, len, run.tokens.len());
            self.tables.advance(run.slot, run.tokens.len());
        }
        let rows = steps.len();
        let m = bucket(rows).min(self.step.seats.len());
        samplings.resize(m, Sampling::default());
        self.write_sampling(0, &samplings)?;
        self.adapted
            .begin(by_row(seats.iter().map(|seat| seat.slot)));
        self.stream.put_checked(&mut self.step.step, 0, &steps)?;
        let end = match seats.iter().any(|s| s.lists) {
            true => StepEnd::Sampled,
            false => StepEnd::Greedy,
        };
        self.run_step(StepKind {
            shared,
            ..self.kind(m, longest, end, true)
        })?;
        let fed = runs.iter();
        self.hand_over(fed.map(|r| (r.slot, self.tables.len(r.slot) - r.tokens.len(), r.tokens)))?;
        seats.extend_from_slice(&self.step.seats[rows..m]);
        for (seat, done) in self.step.seats.iter_mut().zip(&seats) {
            *seat = RowState {
                drawn: done.drawn.wrapping_add(1),
                ..RowState::default()
            };
        }
        let idle = |seat: &RowState| idle_step(self.pages.idle_slot(), seat.drawn);
        let idle: Vec<Step> = self.step.seats[..rows].iter().map(idle).collect();
        self.stream.put_checked(&mut self.step.step, 0, &idle)?;
        self.step.queued.push_back(seats);
        Ok(())
    }

    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()> {
        let Some(seats) = self.step.queued.pop_front() else {
            return Ok(());
        };
        for (row, seat) in seats.into_iter().enumerate() {
            let found = self.wait_for(row, seat)?;
            let vocab = self.model.config.vocab_size;
            each(
                row,
                match found.token {
                    NOT_FINITE => Err(Error::LogitsNotFinite),
                    NONE_ALLOWED => Err(Error::NoTokenAllowed { vocab }),
                    _ => Ok(found),
                },
            );
        }
        if self.model.gpu.is_profiling() {
            self.stream.synchronize()?;
            self.settle_profile()?;
        }
        Ok(())
    }
}
