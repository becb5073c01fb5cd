//! The fused step of a few rows. It ends with logits for the host, or with tokens drawn on the device: with
//! one row per sequence they are those of the next step, which is queued before the host sees them.

mod ahead;
mod layers;

use super::CudaSession;
use super::buffers::LOGIT_ROWS;
use super::graphs::{StepEnd, StepKind};
use super::step_rows::{RING, best_values, idle_step};
use crate::engine::adapters::by_row;
use crate::engine::pass::Fused;
use crate::{
    Advance, AttentionScratch, CascadeShape, DeltaSpan, MOST_POSITIONS_AT_ONCE, MOST_RUN,
    MOST_SEQUENCES, SequenceRows, Step,
};
use nq_kernels::pages::SharedPrefix;
use nq_model::{Dims, ModelConfig};
use nq_runtime::Result;
use nq_runtime::interface::{Chunk, LogitsWanted, Run, bucket};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Page reads per key head that reading shared pages once must save in a step to be worth one more
/// kernel a layer (`benches/records/2026-11-22-cascade.csv`, and `2026-11-23-gpu-runs.csv` for rows of one
/// sequence).
const LEAST_SHARED: usize = 1024;

/// Steps that this process has queued so far.
static STEPS: AtomicUsize = AtomicUsize::new(0);

/// A number that changes with each step that is queued: who shares a GPU with sequences sees that they are at work.
pub(in crate::engine) fn steps_queued() -> usize {
    STEPS.load(Ordering::Relaxed)
}

/// [`LEAST_SHARED`] as reads of a page of all `kv_heads` key heads.
pub(in crate::engine) fn least_shared_pages(kv_heads: usize) -> usize {
    LEAST_SHARED / kv_heads
}

/// Rows of one sequence from which on pages are shared: two read the longest contexts faster one by one.
const LEAST_RUN: usize = 3;

/// Query heads per key head, and key heads.
fn heads_per_key(c: &ModelConfig) -> usize {
    c.num_attention_heads / c.num_key_value_heads
}

impl CudaSession {
    /// Queues the lookup of the embeddings of the step's tokens.
    fn queue_embedding(&mut self, m: usize) -> nq_kernels::Result<()> {
        let (model, step) = (&self.model, &mut self.step);
        self.stream
            .embed_step(model.embedding(), &step.step, &mut step.x, m)
    }

    /// Queues the choice of the next tokens and the lookup of their embeddings.
    fn queue_advance(&mut self, m: usize, lists: bool) -> nq_kernels::Result<()> {
        let (model, step) = (&self.model, &mut self.step);
        let vocab = model.config.vocab_size;
        let blocks = best_values(&model.gpu, &model.head, vocab, m, step.few_rows)?;
        let key = ("sample", "fused", Dims::new(m, vocab));
        if lists && let Some(candidates) = &mut step.candidates {
            self.stream.timed(key, 4 * m * vocab, || {
                self.stream.candidates(
                    &step.logits,
                    &step.best,
                    blocks,
                    &step.sampling,
                    &step.adjust,
                    candidates,
                    vocab,
                    m,
                )
            })?;
        }
        let advance = Advance {
            m,
            candidates: step.candidates.as_ref().filter(|_| lists),
            logits: &step.logits,
            best: &step.best,
            blocks,
            sampling: &step.sampling,
            adjust: &mut step.adjust,
            step: &mut step.step,
            ring: &mut step.ring,
            logprobs: &mut step.logprobs,
            ring_len: RING,
            ids: None,
            embedding: model.embedding(),
            x: &mut step.x,
            idle: self.pages.idle_slot(),
        };
        self.stream.timed(key, 0, || self.stream.advance(advance))
    }

    /// Queues a step.
    fn queue_step(&mut self, kind: StepKind) -> nq_kernels::Result<()> {
        let StepKind { m, end, runs, .. } = kind;
        if runs {
            self.queue_embedding(m)?;
        }
        self.queue_layers(kind)?;
        match end {
            StepEnd::Logits => Ok(()),
            StepEnd::Greedy => self.queue_advance(m, false),
            StepEnd::Sampled => self.queue_advance(m, true),
        }
    }

    /// Runs a step by its recording. The first step of a kind is not recorded, because loading kernels
    /// and reserving shared memory cannot be. While profiling, each step is recorded anew, as each
    /// recording has its own events.
    fn run_step(&mut self, kind: StepKind) -> Result<()> {
        STEPS.fetch_add(1, Ordering::Relaxed);
        self.adapt_bank()?;
        if !self.adapted.runs.is_empty() {
            // Which rows have adapters changes from step to step.
            let kind = StepKind {
                at_once: false,
                ..kind
            };
            return Ok(self.queue_step(kind)?);
        }
        let profiling = self.model.gpu.is_profiling();
        if !profiling && self.graphs.warm.insert(kind.kernels()) {
            return Ok(self.queue_step(kind)?);
        }
        if profiling || !self.graphs.recorded.contains_key(&kind) {
            let stream = self.stream.clone();
            let graph = stream.record(|| self.queue_step(kind))?;
            self.graphs.recorded.insert(kind, graph);
        }
        if let Some(graph) = self.graphs.recorded.get(&kind) {
            self.stream.run(graph)?;
        }
        Ok(())
    }

    /// Once the stream is idle: while profiling, counts its work and drops the recordings.
    pub(super) fn settle_profile(&mut self) -> Result<()> {
        if self.model.gpu.is_profiling() {
            self.model.gpu.settle_profile()?;
            self.graphs.recorded.clear();
        }
        Ok(())
    }

    /// The kind of a step of `m` rows whose longest sequence has `positions`, including new ones; with `runs`, the
    /// host has written its tokens.
    pub(super) fn kind(&self, m: usize, positions: usize, end: StepEnd, runs: bool) -> StepKind {
        let kv_heads = self.model.config.num_key_value_heads;
        // One kernel for all layers shows no stream between them.
        let tapped = runs && self.step.taps.is_some();
        StepKind {
            m,
            splits: AttentionScratch::splits(&self.model.gpu, kv_heads, m, positions),
            at_once: Fused::in_step(m, self.step.few_rows).layers
                && positions <= MOST_POSITIONS_AT_ONCE
                && !tapped,
            end,
            runs,
            scored: self.many.scored_in_step(positions),
            shared: None,
        }
    }

    /// Hands the streams that a step has kept to the drafter that reads them: of each of its runs, the slot, the
    /// position and the tokens, in the order of its rows.
    fn hand_over<'t>(&self, runs: impl Iterator<Item = (usize, usize, &'t [u32])>) -> Result<()> {
        let (Some(drafting), Some(taps)) = (&self.drafting, &self.step.taps) else {
            return Ok(());
        };
        let mut row = 0;
        for (slot, position, tokens) in runs {
            drafting.take(slot, position, tokens, taps.streams(), row)?;
            row += tokens.len();
        }
        Ok(())
    }

    /// Tells the device which pages the seated sequences share.
    fn share(&mut self) -> Result<()> {
        let Some(cascade) = &mut self.step.cascade else {
            return Ok(());
        };
        let seats = self.step.seats.iter().enumerate();
        let seated: Vec<(usize, usize)> = seats
            .filter_map(|(row, seat)| Some((row, seat.slot?)))
            .collect();
        let c = &self.model.config;
        let least = least_shared_pages(c.num_key_value_heads);
        let prefixes = self.tables.prefixes(&seated, least);
        let (stream, kv_heads) = (&self.stream, c.num_key_value_heads);
        self.step.shared = cascade.write(stream, &prefixes, heads_per_key(c), kv_heads)?;
        Ok(())
    }

    /// Tells the device which pages the rows of `runs` share: those of their sequences, whose lengths do not
    /// include the runs yet.
    fn share_in_runs(&mut self, runs: &[Run<'_>]) -> Result<Option<CascadeShape>> {
        let Some(cascade) = &mut self.step.cascade else {
            return Ok(None);
        };
        let c = &self.model.config;
        let kv_heads = c.num_key_value_heads;
        let least = least_shared_pages(kv_heads);
        let mut end = 0;
        let prefixes = runs.iter().filter_map(|run| {
            let rows = end..end + run.tokens.len();
            end = rows.end;
            (rows.len() >= LEAST_RUN).then(|| self.tables.prefix_of_run(run.slot, rows, least))?
        });
        let prefixes: Vec<SharedPrefix> = prefixes.collect();
        match prefixes.is_empty() {
            true => Ok(None),
            false => Ok(cascade.write(&self.stream, &prefixes, heads_per_key(c), kv_heads)?),
        }
    }

    /// True if no sequence is seated and no step is queued, so that a step for the host disturbs nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.step.seats.iter().all(|s| s.slot.is_none()) && self.step.queued.is_empty()
    }

    /// True if [`CudaSession::forward_step`] can take the chunks: at least one wants logits, which a
    /// step computes for every row.
    pub(super) fn fit_a_step(&self, chunks: &[Chunk<'_>]) -> bool {
        let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        let most = match self.step.taps {
            Some(_) => MOST_SEQUENCES.min(self.step.rows),
            None => self.step.rows,
        };
        // Of several streams a row is a step, and more pass as rows of prompts do.
        rows <= if self.kept.is_some() { 1 } else { most }
            && chunks.iter().all(|c| c.tokens.len() <= MOST_RUN)
            && chunks.iter().any(|c| c.logits != LogitsWanted::None)
            && !chunks.iter().any(|c| {
                let position = self.tables.len(c.slot);
                (self.images).among(c.slot, position..position + c.tokens.len())
            })
    }

    /// Tells the device where the only row of a step stands, and what several streams need of it.
    fn place_row(&mut self, chunk: &Chunk<'_>) -> Result<()> {
        let span = DeltaSpan {
            rows: SequenceRows {
                row: 0,
                count: 1,
                position: self.tables.len(chunk.slot),
                slot: chunk.slot,
            },
            mark: None,
        };
        let rows = self.placed_rows(span.rows, &mut Vec::new());
        (self.stream).write_checked(&mut self.many.rows, &rows)?;
        self.place_streams(&[span], chunk.tokens)
    }

    /// Computes the logits of chunks that fit one step, while no sequence sits in its rows.
    pub(super) fn forward_step(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self.reserve(chunks.iter().map(|c| (c.slot, c.tokens.len())))?;
        let vocab = self.model.config.vocab_size;
        let mut rows: Vec<Step> = Vec::with_capacity(self.step.rows);
        let mut wanted = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let (first, position) = (rows.len(), self.tables.len(chunk.slot));
            let behind = self.rows_behind(chunk.slot) as i32;
            let shift = self.images.shift(chunk.slot, position);
            rows.extend(chunk.tokens.iter().enumerate().map(|(i, &token)| Step {
                position: (position + i) as i32,
                slot: chunk.slot as i32,
                token,
                drawn: 0,
                behind: if i == 0 { behind } else { 0 },
                shift,
            }));
            let with_logits = chunk.logits.rows(chunk.tokens.len());
            wanted.push(first + with_logits.start..first + with_logits.end);
        }
        if let ([chunk], Some(_)) = (chunks, &self.kept) {
            self.place_row(chunk)?;
        }
        let slots = rows.iter().map(|step| Some(step.slot as usize));
        self.adapted.begin(by_row(slots));
        let m = bucket(rows.len()).min(self.step.rows);
        let longest = rows.iter().map(|r| r.position as usize + 1).max();
        let kind = self.kind(m, longest.unwrap_or(1), StepEnd::Logits, true);
        self.stream.put_checked(&mut self.step.step, 0, &rows)?;
        self.run_step(kind)?;
        for chunk in chunks {
            self.stepped(chunk.slot, self.tables.len(chunk.slot), chunk.tokens.len());
        }
        let runs = chunks.iter();
        self.hand_over(runs.map(|c| (c.slot, self.tables.len(c.slot), c.tokens)))?;
        for (row, step) in rows.iter_mut().enumerate() {
            let drawn = self.step.seats.get(row).map_or(0, |s| s.drawn);
            *step = idle_step(self.pages.idle_slot(), drawn);
        }
        self.stream.put_checked(&mut self.step.step, 0, &rows)?;
        for rows in wanted {
            for some in rows.clone().step_by(LOGIT_ROWS) {
                let n = LOGIT_ROWS.min(rows.end - some) * vocab;
                let host = &mut self.logits_host;
                self.stream
                    .read(&self.step.logits, some * vocab, host, 0..n)?;
                self.stream.synchronize()?;
                self.logits.extend_from_slice(&host.values()?[..n]);
            }
        }
        self.settle_profile()
    }
}
