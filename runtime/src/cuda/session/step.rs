//! The fused step of one token a sequence: its logits for the host, or a token drawn on the device
//! for the next step, which is queued before the host has seen it.

use super::{CudaSession, Widths, padded, product};
use crate::batch::{Drawn, StepsAhead, bucket};
use crate::cuda::model::CudaModel;
use crate::engine::check_tokens;
use crate::error::{Error, Result};
use crate::sampler::Sampler;
use nq_formats::ModelConfig;
use nq_kernels::cuda::{
    Adjustments, Advance, AttentionOutput, AttentionScratch, AttentionShape, Buffer, Candidates,
    Checked, Columns, DeviceLinear, GemvOutput, Gpu, Graph, HEAD_DIM, Logprobs, MOST_LOGPROBS,
    MOST_SEQUENCES, MOST_WIDE_SEQUENCES, Mapped, NONE_ALLOWED, NOT_FINITE, Norm, PartialSums,
    Places, Sampling, Step, StepBounds, StepOutput, Stream, best_len, wide_best_len,
};
use std::collections::{HashMap, HashSet, VecDeque};

/// Tokens of a sequence that the device may be ahead of the host, at most; a power of two.
const RING: usize = 64;
/// Steps queued ahead of the token that the host waits for.
const AHEAD: usize = 12;
/// Bytes of the product behind attention from which on its early requests for weights hold up
/// what attention reads, as measured on an H200 (1.1 MB do not, 5.5 and 8.9 MB do).
const FLOOD: usize = 4 << 20;
/// Where the device has not written a token yet.
const PENDING: u32 = u32::MAX;
const _: () = assert!(MOST_LOGPROBS == crate::sampler::MOST_LOGPROBS);

/// Buffers of the fused step; `rows` are the sequences that it takes at most.
pub(super) struct StepRows {
    rows: usize,
    step: Checked<Step>,   // [rows]
    x: Buffer<f32>,        // [rows, hidden], the residual
    qkv: Buffer<f32>,      // [rows, q_dim + 2 kv_dim]
    attended: Buffer<f32>, // [narrow rows, q_dim]
    mlp: Buffer<f32>,      // [narrow rows, intermediate]
    attention: AttentionScratch,
    columns: Option<Columns>,   // of several narrow rows
    wide: Option<WideRows>,     // of more rows than `MOST_SEQUENCES`
    logits: Buffer<f32>,        // [rows, vocab]
    best: Buffer<[f32; 2]>,     // [rows, blocks of the head]
    sampling: Buffer<Sampling>, // [rows]
    candidates: Option<Candidates>,
    adjust: Adjustments,        // [rows]
    ring: Mapped<u32>,          // [rows, RING]
    logprobs: Mapped<Logprobs>, // [rows, RING]
    seats: Vec<Seat>,           // [rows]
    /// Who sat in the rows of each step that is queued and not received.
    queued: VecDeque<Vec<Seat>>,
    /// A row was written: its token's embedding is not looked up yet.
    written: bool,
}

/// What steps of more than [`MOST_SEQUENCES`] rows, which their own kernels run, have besides: inputs
/// of products in FP16 and operand order.
struct WideRows {
    normed: Buffer<u16>,   // [rows, hidden padded]
    attended: Buffer<u16>, // [rows, q_dim padded]
    mlp: Buffer<u16>,      // [rows, intermediate padded]
    sums: PartialSums,     // [parts, rows, hidden]
}

impl WideRows {
    fn new(gpu: &Gpu, w: &Widths, rows: usize) -> Result<Self> {
        let halves = |n: usize| gpu.zeros::<u16>("activations", rows * padded(n));
        Ok(WideRows {
            normed: halves(w.hidden)?,
            attended: halves(w.q)?,
            mlp: halves(w.mlp)?,
            sums: PartialSums::new(gpu, rows, w.hidden)?,
        })
    }

    fn device_bytes(w: &Widths, rows: usize) -> usize {
        let halves = padded(w.hidden) + padded(w.q) + padded(w.mlp);
        2 * rows * halves + PartialSums::device_bytes(rows, w.hidden)
    }
}

/// Sequences that a step takes on `gpu`, at most.
pub(in crate::cuda) fn most_together(gpu: &Gpu) -> usize {
    match gpu.takes_wide_steps() {
        true => MOST_WIDE_SEQUENCES,
        false => MOST_SEQUENCES,
    }
}

/// Values of a row that the head's product of `m` rows leaves in [`StepRows::best`].
fn head_blocks(gpu: &Gpu, head: &DeviceLinear, m: usize) -> usize {
    match m <= MOST_SEQUENCES {
        true => best_len(gpu, head, m),
        false => wide_best_len(gpu, head, m),
    }
}

/// A row, as the host knows it.
#[derive(Clone, Copy, Default)]
struct Seat {
    /// The sequence; none: it runs idle.
    slot: Option<usize>,
    /// Draws queued in it before, of all who sat there.
    drawn: i32,
    /// Its sampler looks at more than the best token.
    lists: bool,
    /// Its sampler wants log-probabilities.
    logprobs: bool,
}

impl StepRows {
    /// For steps of up to `rows` rows, all idle in the last slot of `places`.
    pub(super) fn new(model: &CudaModel, rows: usize, places: Places) -> Result<Self> {
        let gpu = &model.gpu;
        let c = &model.config;
        let w = Widths::of(&model.config);
        let rows = rows.max(1);
        let idle = idle_step(places.slots - 1, 0);
        let tokens = w.vocab;
        let bounds = StepBounds { places, tokens };
        let narrow = rows.min(MOST_SEQUENCES);
        let f32s = |rows: usize, n: usize| gpu.zeros::<f32>("activations", rows * n);
        let blocks = (1..=rows).map(|m| m * head_blocks(gpu, &model.head, m));
        let columns = match narrow {
            1 => None,
            _ => Some(Columns::new(gpu, narrow, w.widest_input())?),
        };
        let wide = match rows > narrow {
            true => Some(WideRows::new(gpu, &w, rows)?),
            false => None,
        };
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        Ok(StepRows {
            rows,
            step: Checked::new(gpu, "activations", rows, idle, bounds)?,
            x: f32s(rows, w.hidden)?,
            qkv: f32s(rows, w.qkv)?,
            attended: f32s(narrow, w.q)?,
            mlp: f32s(narrow, w.mlp)?,
            attention: AttentionScratch::new(gpu, heads, kv_heads, rows)?,
            columns,
            wide,
            logits: f32s(rows, w.vocab)?,
            best: gpu.zeros("activations", blocks.max().unwrap_or(1))?,
            sampling: gpu.zeros("activations", rows)?,
            candidates: Candidates::new(gpu, w.vocab, rows)?,
            adjust: Adjustments::new(gpu, w.vocab, rows)?,
            ring: gpu.mapped("sampled tokens", rows * RING, PENDING)?,
            logprobs: gpu.mapped("sampled tokens", rows * RING, Logprobs::default())?,
            seats: vec![Seat::default(); rows],
            queued: VecDeque::new(),
            written: false,
        })
    }

    /// Device bytes of [`StepRows::new`], up to what does not grow with the model.
    pub(super) fn device_bytes(config: &ModelConfig, rows: usize) -> usize {
        let w = Widths::of(config);
        let rows = rows.max(1);
        let narrow = rows.min(MOST_SEQUENCES);
        let columns = match narrow {
            1 => 0,
            _ => Columns::device_bytes(narrow, w.widest_input()),
        };
        let wide = match rows > narrow {
            true => WideRows::device_bytes(&w, rows),
            false => 0,
        };
        4 * rows * (w.vocab + w.qkv + w.hidden)
            + 4 * narrow * (w.q + w.mlp)
            + Adjustments::device_bytes(w.vocab, rows)
            + columns
            + wide
    }
}

/// Recorded steps.
#[derive(Default)]
pub(super) struct Graphs {
    recorded: HashMap<StepKind, Graph>,
    /// Sequences and ends of steps that ran: their kernels are loaded and their shared memory is
    /// reserved, which cannot be recorded.
    warm: HashSet<(usize, StepEnd)>,
}

/// What a step is recorded for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct StepKind {
    /// Sequences.
    m: usize,
    /// Parts that attention cuts contexts into, at most: a short context starts few blocks.
    splits: usize,
    end: StepEnd,
}

/// What a step ends with.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum StepEnd {
    /// Logits, for the host. Such a step begins with looking its tokens up.
    Logits,
    /// The best token, looked up for the next step.
    Greedy,
    /// A token drawn from candidates that are listed first, looked up for the next step.
    Sampled,
}

/// Where a row stands that nobody sits in.
fn idle_step(slot: usize, drawn: i32) -> Step {
    Step {
        position: 0,
        slot: slot as i32,
        token: 0,
        drawn,
    }
}

/// Queues a step's product of `m` rows.
fn multiply(
    stream: &Stream,
    w: &DeviceLinear,
    x: &Buffer<f32>,
    output: GemvOutput<'_>,
    columns: &mut Option<Columns>,
    m: usize,
    late: bool,
) -> nq_kernels::Result<()> {
    match columns {
        Some(columns) if m > 1 => stream.gemv_batch(w, x, output, columns, m, late),
        _ => stream.gemv(w, x, output, late),
    }
}

impl CudaSession {
    /// Queues the embeddings of the step's tokens.
    fn queue_embedding(&mut self, m: usize) -> nq_kernels::Result<()> {
        let (model, step) = (&self.model, &mut self.step);
        self.stream
            .embed_step(model.embedding(), &step.step, &mut step.x, m)
    }

    /// Queues the choice of the next tokens, and their embeddings.
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

    /// Queues a token of each of `m` sequences, looked up already, through the layers and the
    /// head.
    fn queue_layers(&mut self, m: usize, splits: usize) -> nq_kernels::Result<()> {
        let Self {
            stream,
            model,
            pages,
            cos_sin,
            step,
            ..
        } = self;
        let c = &model.config;
        let eps = c.rms_norm_eps;
        let norm = |gain| Norm { gain, eps };
        let columns = &mut step.columns;
        // How many keys and values are read, the device alone knows.
        let attention = ("attention", "fused", (c.num_attention_heads, HEAD_DIM));
        for (index, layer) in model.layers.iter().enumerate() {
            let shape = AttentionShape {
                m,
                splits,
                late: m == 1 && layer.o.bytes() > FLOOD,
            };
            // The first product of a step lets nothing overtake the sampler of the last one,
            // which the attention kernel's early reads depend on.
            let late = index == 0;
            let out = GemvOutput::Store(norm(&layer.input_norm), &mut step.qkv);
            product(stream, "qkv", &layer.qkv, || {
                multiply(stream, &layer.qkv, &step.x, out, columns, m, late)
            })?;
            stream.timed(attention, 0, || {
                stream.attention_decode(
                    &step.qkv,
                    &step.step,
                    &model.heads(index, cos_sin),
                    pages.layer(index),
                    &mut step.attention,
                    AttentionOutput::Full(&mut step.attended),
                    shape,
                )
            })?;
            let out = GemvOutput::Add(&mut step.x);
            product(stream, "o", &layer.o, || {
                multiply(stream, &layer.o, &step.attended, out, columns, m, false)
            })?;
            let out = GemvOutput::Silu(norm(&layer.post_attention_norm), &mut step.mlp);
            product(stream, "gate_up", &layer.gate_up, || {
                multiply(stream, &layer.gate_up, &step.x, out, columns, m, false)
            })?;
            let out = GemvOutput::Add(&mut step.x);
            product(stream, "down", &layer.down, || {
                multiply(stream, &layer.down, &step.mlp, out, columns, m, false)
            })?;
        }
        let out = GemvOutput::Head(norm(&model.norm), &mut step.logits, &mut step.best);
        product(stream, "head", &model.head, || {
            multiply(stream, &model.head, &step.x, out, columns, m, false)
        })
    }

    /// As [`CudaSession::queue_layers`], by the kernels for more than [`MOST_SEQUENCES`] sequences:
    /// each product leaves its sums in parts, which the norm behind it adds.
    fn queue_wide_layers(&mut self, m: usize, splits: usize) -> nq_kernels::Result<()> {
        let Self {
            stream,
            model,
            pages,
            cos_sin,
            step,
            ..
        } = self;
        let StepRows {
            x,
            step,
            qkv,
            attention: scratch,
            wide: Some(wide),
            logits,
            best,
            ..
        } = step
        else {
            return Err(nq_kernels::Error::Shape {
                op: "a step",
                what: "rows",
                expected: format!("at most {MOST_SEQUENCES}"),
                found: m.to_string(),
            });
        };
        let WideRows {
            normed,
            attended,
            mlp,
            sums,
        } = wide;
        let c = &model.config;
        let eps = c.rms_norm_eps;
        let norm = |gain| Norm { gain, eps };
        let norm_key = ("norm", "fused", (m, c.hidden_size));
        let attention = ("attention", "fused", (c.num_attention_heads, HEAD_DIM));
        let shape = AttentionShape {
            m,
            splits,
            late: false,
        };
        for (index, layer) in model.layers.iter().enumerate() {
            // The first kernel of a step lets nothing overtake the sampler of the last one, which
            // the attention kernel's early reads depend on.
            let late = index == 0;
            let last = (index > 0).then_some(&*sums);
            let gain = norm(&layer.input_norm);
            stream.timed(norm_key, 0, || {
                stream.norm_step(x, last, gain, normed, m, late)
            })?;
            product(stream, "qkv", &layer.qkv, || {
                stream.gemm_step(&layer.qkv, normed, StepOutput::Store(qkv), m)
            })?;
            stream.timed(attention, 0, || {
                stream.attention_decode(
                    qkv,
                    step,
                    &model.heads(index, cos_sin),
                    pages.layer(index),
                    scratch,
                    AttentionOutput::Half(attended),
                    shape,
                )
            })?;
            product(stream, "o", &layer.o, || {
                stream.gemm_step(&layer.o, attended, StepOutput::Parts(sums), m)
            })?;
            let gain = norm(&layer.post_attention_norm);
            stream.timed(norm_key, 0, || {
                stream.norm_step(x, Some(sums), gain, normed, m, false)
            })?;
            product(stream, "gate_up", &layer.gate_up, || {
                stream.gemm_step(&layer.gate_up, normed, StepOutput::Silu(mlp), m)
            })?;
            product(stream, "down", &layer.down, || {
                stream.gemm_step(&layer.down, mlp, StepOutput::Parts(sums), m)
            })?;
        }
        stream.timed(norm_key, 0, || {
            stream.norm_step(x, Some(sums), norm(&model.norm), normed, m, false)
        })?;
        product(stream, "head", &model.head, || {
            stream.gemm_step(&model.head, normed, StepOutput::Head(logits, best), m)
        })
    }

    /// Queues a step.
    fn queue_step(&mut self, StepKind { m, splits, end }: StepKind) -> nq_kernels::Result<()> {
        if end == StepEnd::Logits {
            self.queue_embedding(m)?;
        }
        match m <= MOST_SEQUENCES {
            true => self.queue_layers(m, splits)?,
            false => self.queue_wide_layers(m, splits)?,
        }
        match end {
            StepEnd::Logits => Ok(()),
            StepEnd::Greedy => self.queue_advance(m, false),
            StepEnd::Sampled => self.queue_advance(m, true),
        }
    }

    /// Runs a step, by its recording. The first of its kind is not recorded: kernels are loaded
    /// and shared memory is reserved, which a recording does not allow. While profiling each step
    /// is recorded anew, as each recording has events of its own.
    fn run_step(&mut self, kind: StepKind) -> Result<()> {
        let profiling = self.model.gpu.is_profiling();
        if !profiling && self.graphs.warm.insert((kind.m, kind.end)) {
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

    /// After the stream's work, while profiling: counts it, and forgets its recordings.
    fn settle_profile(&mut self) -> Result<()> {
        if self.model.gpu.is_profiling() {
            self.model.gpu.settle_profile()?;
            self.graphs.recorded.clear();
        }
        Ok(())
    }

    /// A step of `m` sequences, the longest of which has `positions`, new ones included.
    fn kind(&self, m: usize, positions: usize, end: StepEnd) -> StepKind {
        let kv_heads = self.model.config.num_key_value_heads;
        StepKind {
            m,
            splits: AttentionScratch::splits(&self.model.gpu, kv_heads, m, positions),
            end,
        }
    }

    /// True if a step for the host would not disturb one that is drawn on the device.
    pub(super) fn is_idle(&self) -> bool {
        self.step.seats.iter().all(|s| s.slot.is_none()) && self.step.queued.is_empty()
    }

    /// The logits of one token, by the fused step, where nobody sits in its rows.
    pub(super) fn forward_step(&mut self, slot: usize, token: u32) -> Result<()> {
        self.reserve([(slot, 1)].into_iter())?;
        let position = self.tables.len(slot);
        let vocab = self.model.config.vocab_size;
        let step = Step {
            position: position as i32,
            slot: slot as i32,
            token,
            drawn: self.step.seats[0].drawn,
        };
        self.stream.put_checked(&mut self.step.step, 0, step)?;
        self.run_step(self.kind(1, position + 1, StepEnd::Logits))?;
        let idle = idle_step(self.pages.idle_slot(), step.drawn);
        self.stream.put_checked(&mut self.step.step, 0, idle)?;
        self.stream
            .read(&self.step.logits, 0, &mut self.logits_host, vocab)?;
        self.stream.synchronize()?;
        self.logits
            .extend_from_slice(&self.logits_host.values()?[..vocab]);
        self.settle_profile()
    }

    /// Puts the state of a sampler in `row` on the device, where the row's next draw is number
    /// `drawn`.
    fn write_sampling(&mut self, row: usize, sampler: &Sampler, drawn: i32) -> Result<()> {
        sampler.check(self.model.config.vocab_size)?;
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
            // The device adds the draws of the row.
            position: words(sampler.position().wrapping_sub(i64::from(drawn) as u64)),
        };
        self.stream.put(&mut self.step.sampling, row, sampling)?;
        if sampling.adjusts != 0 {
            // These are written out of order with the stream: who sat here before may still be
            // drawing.
            self.stream.synchronize()?;
        }
        let adjust = &mut self.step.adjust;
        if !bias.is_empty() {
            adjust.write_bias(row, bias)?;
        }
        if let Some(mask) = sampler.mask() {
            adjust.write_mask(row, mask)?;
        }
        if p.has_penalties() {
            let seen = sampler.seen().map(|t| (t.id, t.in_prompt, t.count));
            adjust.write_seen(row, seen)?;
        }
        Ok(())
    }

    /// Waits for what `row` drew for `seat`.
    fn wait_for(&mut self, row: usize, seat: Seat) -> Result<Drawn> {
        let at = row * RING + seat.drawn as usize % RING;
        let mut spins = 0u32;
        let token = loop {
            match self.step.ring.load(at) {
                PENDING => {
                    spins += 1;
                    std::hint::spin_loop();
                    // A failed kernel never writes: the stream then says why.
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
            // Written before the token.
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
        self.step.rows
    }

    fn depth(&self) -> usize {
        match self.model.gpu.is_profiling() {
            true => 1,
            false => AHEAD,
        }
    }

    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()> {
        check_tokens(&[token], self.model.config.vocab_size)?;
        let seat = &mut self.step.seats[row];
        // Counted round before it overflows, in step with the ring.
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
        self.stream.put_checked(&mut self.step.step, row, step)?;
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
        self.stream.put_checked(&mut self.step.step, row, idle)?;
        let greedy = Sampling::default();
        self.stream.put(&mut self.step.sampling, row, greedy)?;
        self.step.written = true;
        Ok(())
    }

    fn queue(&mut self) -> Result<()> {
        let seats = self.step.seats.iter();
        let slots: Vec<usize> = seats.clone().filter_map(|s| s.slot).collect();
        let last = seats.clone().rposition(|s| s.slot.is_some()).unwrap_or(0);
        let m = bucket(last + 1).min(self.step.rows);
        self.reserve(slots.iter().map(|&slot| (slot, 1)))?;
        slots.iter().for_each(|&slot| self.tables.advance(slot, 1));
        let longest = slots.iter().map(|&slot| self.tables.len(slot)).max();
        let end = match self.step.seats.iter().any(|s| s.lists) {
            true => StepEnd::Sampled,
            false => StepEnd::Greedy,
        };
        if std::mem::take(&mut self.step.written) {
            self.queue_embedding(m)?;
        }
        self.run_step(self.kind(m, longest.unwrap_or(1), end))?;
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
