//! The fused step of a few rows. It ends with logits for the host, or, with one row per sequence,
//! with a token drawn on the device for the next step, which is queued before the host sees it.

use super::passes::Device;
use super::{CudaSession, ExpertRows, LOGIT_ROWS, Widths, padded};
use crate::batch::{Drawn, StepsAhead, bucket};
use crate::engine::{Chunk, LogitsWanted, SessionSpec, check_tokens};
use crate::error::{Error, Result};
use crate::sampler::Sampler;
use nq_formats::ModelConfig;
use nq_kernels::cpu::KvType;
use nq_kernels::cuda::{
    Adjustments, Advance, AttentionScratch, Buffer, Candidates, Cascade, CascadeShape, Checked,
    ClusterParts, Columns, DeviceLinear, Gpu, Graph, Logprobs, MOST_LOGPROBS, MOST_RUN,
    MOST_SEQUENCES, MOST_WIDE_SEQUENCES, Mapped, NONE_ALLOWED, NOT_FINITE, PartialSums, Places,
    Sampling, Step, StepBounds, best_len, wide_best_len,
};
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

/// Most tokens of a sequence that the device may be ahead of the host; a power of two.
const RING: usize = 64;
/// Steps queued ahead of the token that the host waits for.
const AHEAD: usize = 12;
/// Page reads per key head that reading shared pages once must save in a step to be worth one more
/// kernel a layer (`benches/records/2026-11-22-cascade.csv`).
const LEAST_SHARED: usize = 1024;

/// [`LEAST_SHARED`] as reads of a page of all `kv_heads` key heads.
pub(in crate::cuda) fn least_shared_pages(kv_heads: usize) -> usize {
    LEAST_SHARED / kv_heads
}

/// Where the device has not written a token yet.
const PENDING: u32 = u32::MAX;
const _: () = assert!(MOST_LOGPROBS == crate::sampler::MOST_LOGPROBS);

/// Buffers of the fused step of up to `rows` rows. Tokens are drawn in the first ones, the seats.
pub(super) struct StepRows {
    rows: usize,
    pub(super) step: Checked<Step>,   // [rows]
    pub(super) x: Buffer<f32>,        // [rows, hidden], the residual
    pub(super) qkv: Buffer<f32>,      // [rows, q_dim + 2 kv_dim]
    pub(super) attended: Buffer<f32>, // [narrow rows, q_dim]
    pub(super) gated: Buffer<f32>,    // [narrow rows, intermediate]
    pub(super) attention: AttentionScratch,
    /// The pages that seated sequences share, on devices that can read them once for all.
    pub(super) cascade: Option<Cascade>,
    /// Launch shape of attention over those pages; `None` if sharing would save too little.
    shared: Option<CascadeShape>,
    pub(super) columns: Option<Columns>, // of several narrow rows
    pub(super) experts: Option<ExpertRows>,
    pub(super) parts: Option<ClusterParts>, // of a step of one row
    pub(super) wide: Option<WideRows>,      // of more rows than `MOST_SEQUENCES`
    pub(super) logits: Buffer<f32>,         // [rows, vocab]
    pub(super) best: Buffer<[f32; 2]>,      // [rows, blocks of the head]
    sampling: Buffer<Sampling>,             // [seats]
    candidates: Option<Candidates>,
    adjust: Adjustments,        // [seats]
    ring: Mapped<u32>,          // [seats, RING]
    logprobs: Mapped<Logprobs>, // [seats, RING]
    seats: Vec<Seat>,
    /// Which sequences sat in the rows of each step that is queued and not received.
    queued: VecDeque<Vec<Seat>>,
    /// True after a row was written: the embedding of its token is still to be looked up.
    written: bool,
}

/// Further buffers for steps of more than [`MOST_SEQUENCES`] rows, which have kernels of their own:
/// inputs of products in FP16 and operand order.
pub(super) struct WideRows {
    pub(super) normed: Buffer<u16>,   // [rows, hidden padded]
    pub(super) attended: Buffer<u16>, // [rows, q_dim padded]
    pub(super) gated: Buffer<u16>,    // [rows, intermediate padded]
    pub(super) sums: PartialSums,     // [parts, rows, hidden]
}

impl WideRows {
    fn new(gpu: &Gpu, w: &Widths, rows: usize) -> Result<Self> {
        let halves = |n: usize| gpu.zeros::<u16>("activations", rows * padded(n));
        Ok(WideRows {
            normed: halves(w.hidden)?,
            attended: halves(w.q)?,
            gated: halves(w.mlp)?,
            sums: PartialSums::new(gpu, rows, w.hidden)?,
        })
    }
}

/// Most sequences that a step takes on `gpu`.
pub(in crate::cuda) fn most_together(gpu: &Gpu) -> usize {
    if gpu.takes_wide_steps() {
        MOST_WIDE_SEQUENCES
    } else {
        MOST_SEQUENCES
    }
}

/// Number of rows of steps.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct StepSize {
    /// Most sequences in a step that draw tokens.
    seats: usize,
    /// Most rows of a step.
    rows: usize,
}

impl StepSize {
    /// The size of a session's steps on a device that takes at most `together` sequences.
    pub(in crate::cuda) fn new(spec: &SessionSpec, together: usize) -> Self {
        let seats = spec.slots.min(together).max(1);
        StepSize {
            seats,
            rows: seats.max(MOST_RUN.min(spec.max_rows)),
        }
    }
}

/// Values per row that the head's product of `m` rows leaves in [`StepRows::best`].
fn head_blocks(gpu: &Gpu, head: &DeviceLinear, m: usize) -> usize {
    if m <= MOST_SEQUENCES {
        best_len(gpu, head, m)
    } else {
        wide_best_len(gpu, head, m)
    }
}

/// A row's state, as the host knows it.
#[derive(Clone, Copy, Default)]
struct Seat {
    /// The sequence; `None` if the row runs idle.
    slot: Option<usize>,
    /// Draws queued in this row so far, by all sequences that sat there.
    drawn: i32,
    /// True if its sampler looks at more than the best token.
    lists: bool,
    /// True if its sampler wants log-probabilities.
    logprobs: bool,
}

impl StepRows {
    /// Allocates buffers for steps of `size` of a model with this head, over keys and values of type
    /// `kv`. All rows start idle, in the last slot of `places`.
    pub(super) fn new(
        gpu: &Gpu,
        c: &ModelConfig,
        head: &DeviceLinear,
        size: StepSize,
        (kv, places): (KvType, Places),
    ) -> Result<Self> {
        let StepSize { seats, rows } = size;
        let w = Widths::of(c);
        let idle = idle_step(places.slots - 1, 0);
        let tokens = w.vocab;
        let bounds = StepBounds { places, tokens };
        let narrow = rows.min(MOST_SEQUENCES);
        let f32s = |rows: usize, n: usize| gpu.zeros::<f32>("activations", rows * n);
        let blocks = (1..=rows).map(|m| m * head_blocks(gpu, head, m));
        let columns = match narrow {
            1 => None,
            _ => Some(Columns::new(gpu, narrow, w.widest_input())?),
        };
        let wide = if rows > narrow {
            Some(WideRows::new(gpu, &w, rows)?)
        } else {
            None
        };
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        let cascade = if seats > 1 && Cascade::fits(gpu, kv) {
            Some(Cascade::new(gpu, seats, places)?)
        } else {
            None
        };
        Ok(StepRows {
            rows,
            step: Checked::new(gpu, "activations", rows, idle, bounds)?,
            x: f32s(rows, w.hidden)?,
            qkv: f32s(rows, w.qkv)?,
            attended: f32s(narrow, w.q)?,
            gated: f32s(narrow, w.mlp)?,
            attention: AttentionScratch::new(gpu, heads, kv_heads, rows)?,
            cascade,
            shared: None,
            columns,
            experts: ExpertRows::new(gpu, &w, rows)?,
            parts: match gpu.info().capability {
                (9, 0) => Some(ClusterParts::new(gpu, w.hidden)?),
                _ => None,
            },
            wide,
            logits: f32s(rows, w.vocab)?,
            best: gpu.zeros("activations", blocks.max().unwrap_or(1))?,
            sampling: gpu.zeros("activations", seats)?,
            candidates: Candidates::new(gpu, w.vocab, seats)?,
            adjust: Adjustments::new(gpu, w.vocab, seats)?,
            ring: gpu.mapped("sampled tokens", seats * RING, PENDING)?,
            logprobs: gpu.mapped("sampled tokens", seats * RING, Logprobs::default())?,
            seats: vec![Seat::default(); seats],
            queued: VecDeque::new(),
            written: false,
        })
    }

    /// True if the sequence in `slot` sits in a row.
    pub(super) fn seats_slot(&self, slot: usize) -> bool {
        self.seats.iter().any(|s| s.slot == Some(slot))
    }
}

/// Recorded steps.
#[derive(Default)]
pub(super) struct Graphs {
    recorded: HashMap<StepKind, Graph>,
    /// Kinds of steps that have run (rows, end, sharing of pages): their kernels are loaded and
    /// their shared memory is reserved, which cannot be recorded.
    warm: HashSet<(usize, StepEnd, bool)>,
}

/// What distinguishes one recorded step from another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StepKind {
    /// Number of rows.
    pub(super) m: usize,
    /// Most parts that attention cuts contexts into: a short context starts few blocks.
    pub(super) splits: usize,
    pub(super) end: StepEnd,
    /// Set if pages that sequences share are read once.
    pub(super) shared: Option<CascadeShape>,
}

/// The last operation of a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum StepEnd {
    /// Logits, for the host. Such a step begins by looking its tokens up; several of its rows
    /// may belong to one sequence.
    Logits,
    /// The best token, looked up for the next step.
    Greedy,
    /// A token drawn from candidates, which are listed first, and looked up for the next step.
    Sampled,
}

/// The state of a row in which no sequence sits.
fn idle_step(slot: usize, drawn: i32) -> Step {
    Step {
        position: 0,
        slot: slot as i32,
        token: 0,
        drawn,
    }
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
        let blocks = head_blocks(&model.gpu, &model.head, m);
        let key = ("sample", "fused", (m, vocab));
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
            embedding: model.embedding(),
            x: &mut step.x,
            idle: self.pages.idle_slot(),
        };
        self.stream.timed(key, 0, || self.stream.advance(advance))
    }

    /// Queues the step's rows, whose tokens are looked up, through the layers and the head.
    fn queue_layers(&mut self, kind: StepKind) -> nq_kernels::Result<()> {
        let Self {
            stream,
            model,
            pages,
            cos_sin,
            step,
            ..
        } = self;
        let device = Device {
            stream,
            model,
            pages,
            cos_sin,
            kind,
        };
        device.queue(step)
    }

    /// Queues a step.
    fn queue_step(&mut self, kind: StepKind) -> nq_kernels::Result<()> {
        let StepKind { m, end, .. } = kind;
        if end == StepEnd::Logits {
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
        let profiling = self.model.gpu.is_profiling();
        let warm = (kind.m, kind.end, kind.shared.is_some());
        if !profiling && self.graphs.warm.insert(warm) {
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

    /// The kind of a step of `m` rows whose longest sequence has `positions`, including new ones.
    fn kind(&self, m: usize, positions: usize, end: StepEnd) -> StepKind {
        let kv_heads = self.model.config.num_key_value_heads;
        StepKind {
            m,
            splits: AttentionScratch::splits(&self.model.gpu, kv_heads, m, positions),
            end,
            shared: None,
        }
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
        let heads = (
            c.num_attention_heads / c.num_key_value_heads,
            c.num_key_value_heads,
        );
        let prefixes = self.tables.prefixes(&seated, least_shared_pages(heads.1));
        self.step.shared = cascade.write(&self.stream, &prefixes, heads)?;
        Ok(())
    }

    /// True if no sequence is seated and no step is queued, so that a step for the host disturbs nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.step.seats.iter().all(|s| s.slot.is_none()) && self.step.queued.is_empty()
    }

    /// True if [`CudaSession::forward_step`] can take the chunks: at least one wants logits, which a
    /// step computes for every row.
    pub(super) fn fit_a_step(&self, chunks: &[Chunk<'_>]) -> bool {
        let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        rows <= self.step.rows
            && chunks.iter().all(|c| c.tokens.len() <= MOST_RUN)
            && chunks.iter().any(|c| c.logits != LogitsWanted::None)
    }

    /// Computes the logits of chunks that fit one step, while no sequence sits in its rows.
    pub(super) fn forward_step(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self.reserve(chunks.iter().map(|c| (c.slot, c.tokens.len())))?;
        let vocab = self.model.config.vocab_size;
        let mut rows: Vec<Step> = Vec::with_capacity(self.step.rows);
        let mut wanted = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let (first, position) = (rows.len(), self.tables.len(chunk.slot));
            rows.extend(chunk.tokens.iter().enumerate().map(|(i, &token)| Step {
                position: (position + i) as i32,
                slot: chunk.slot as i32,
                token,
                drawn: 0,
            }));
            let of = chunk.logits.rows(chunk.tokens.len());
            wanted.push(first + of.start..first + of.end);
        }
        let m = bucket(rows.len()).min(self.step.rows);
        let longest = rows.iter().map(|r| r.position as usize + 1).max();
        let kind = self.kind(m, longest.unwrap_or(1), StepEnd::Logits);
        self.stream.put_checked(&mut self.step.step, 0, &rows)?;
        self.run_step(kind)?;
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

    /// Writes the state of a sampler to `row` on the device, where the next draw has number
    /// `drawn`.
    fn write_sampling(&mut self, row: usize, sampler: &Sampler, drawn: i32) -> Result<()> {
        let p = sampler.params();
        let words = |v: u64| [v as u32, (v >> 32) as u32];
        let flag = |bit, set: bool| if set { bit } else { 0 };
        let bias = sampler.bias().as_slice();
        let sampling = Sampling {
            temperature: p.temperature,
            top_p: p.top_p,
            min_p: p.min_p,
            repetition: p.repetition_penalty,
            frequency: p.frequency_penalty,
            presence: p.presence_penalty,
            top_k: i32::try_from(p.top_k).unwrap_or(i32::MAX),
            adjusts: flag(Sampling::BIASED, !bias.is_empty())
                + flag(Sampling::PENALIZED, p.has_penalties())
                + flag(Sampling::MASKED, sampler.mask().is_some()),
            logprobs: sampler.top_logprobs().map_or(0, |n| 1 + n as i32),
            seed: words(p.seed),
            stream: words(sampler.stream()),
            // The device adds the row's number of draws.
            position: words(sampler.position().wrapping_sub(i64::from(drawn) as u64)),
        };
        self.stream.put(&mut self.step.sampling, row, &[sampling])?;
        let (stream, adjust) = (&self.stream, &mut self.step.adjust);
        if !bias.is_empty() {
            adjust.write_bias(stream, row, bias)?;
        }
        if let Some(mask) = sampler.mask() {
            adjust.write_mask(stream, row, mask)?;
        }
        if p.has_penalties() {
            let seen = sampler.seen().map(|t| (t.id, t.in_prompt, t.count));
            adjust.write_seen(stream, row, seen)?;
        }
        Ok(())
    }

    /// Waits for the token that `row` drew for `seat`.
    fn wait_for(&mut self, row: usize, seat: Seat) -> Result<Drawn> {
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
            let top = said.ids.into_iter().zip(said.values).take(n).collect();
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
        if self.model.gpu.is_profiling() {
            1
        } else {
            AHEAD
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
        let seat = &mut self.step.seats[row];
        // Wraps before it overflows, in step with the ring.
        if seat.drawn > i32::MAX / 2 {
            seat.drawn %= RING as i32;
        }
        let drawn = seat.drawn;
        self.write_sampling(row, sampler, drawn)?;
        let step = Step {
            position: self.tables.len(slot) as i32,
            slot: slot as i32,
            token,
            drawn,
        };
        self.stream.put_checked(&mut self.step.step, row, &[step])?;
        let p = sampler.params();
        self.step.written = true;
        self.step.seats[row] = Seat {
            slot: Some(slot),
            drawn,
            lists: sampler.adjusts() || !(p.is_greedy() || p.top_k == 1),
            logprobs: sampler.top_logprobs().is_some(),
        };
        Ok(())
    }

    fn vacate(&mut self, row: usize) -> Result<()> {
        let drawn = self.step.seats[row].drawn;
        self.step.seats[row] = Seat {
            drawn,
            ..Seat::default()
        };
        let idle = idle_step(self.pages.idle_slot(), drawn);
        self.stream.put_checked(&mut self.step.step, row, &[idle])?;
        let greedy = Sampling::default();
        self.stream.put(&mut self.step.sampling, row, &[greedy])?;
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
            self.queue_embedding(m)?;
            self.share()?;
        }
        let kind = StepKind {
            shared: self.step.shared,
            ..self.kind(m, longest.unwrap_or(1), end)
        };
        self.run_step(kind)?;
        self.step.queued.push_back(self.step.seats[..m].to_vec());
        for seat in &mut self.step.seats[..m] {
            seat.drawn = seat.drawn.wrapping_add(1);
        }
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
