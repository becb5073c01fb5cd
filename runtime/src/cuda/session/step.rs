//! The fused step of one token a sequence, alone or sampling on the device.

use super::{CudaSession, Widths, product};
use crate::cuda::model::CudaModel;
use crate::engine::{Chunk, Decoding, LogitsWanted, check_chunks, decode_on_host};
use crate::error::{Error, Result};
use crate::sampler::{MOST_LOGPROBS, Sampler, TokenLogprobs};
use nq_formats::ModelConfig;
use nq_kernels::KernelSet;
use nq_kernels::cuda::{
    Adjustments, Advance, AttentionScratch, AttentionShape, Buffer, Candidates, Columns,
    DeviceLinear, GemvOutput, Graph, HEAD_DIM, Logprobs, MOST_SEQUENCES, NONE_ALLOWED, NOT_FINITE,
    Norm, Pinned, Sampling, Step, Stream, best_len,
};
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;

/// Tokens of a sequence that the device may be ahead of the host, at most; a power of two.
const RING: usize = 64;
/// Steps queued ahead of the token that the host waits for.
const AHEAD: usize = 12;
/// Bytes of the product behind attention from which on its early requests for weights hold up
/// what attention reads, as measured on an H200 (1.1 MB do not, 5.5 and 8.9 MB do).
const FLOOD: usize = 4 << 20;
/// Where the device has not written a token yet.
const PENDING: u32 = u32::MAX;
const _: () = assert!(MOST_LOGPROBS == nq_kernels::cuda::MOST_LOGPROBS);

/// Buffers of the fused step; `rows` are the sequences that it takes at most.
pub(super) struct StepRows {
    rows: usize,
    step: Buffer<Step>,    // [rows]
    x: Buffer<f32>,        // [rows, hidden], the residual
    qkv: Buffer<f32>,      // [rows, q_dim + 2 kv_dim]
    attended: Buffer<f32>, // [rows, q_dim]
    mlp: Buffer<f32>,      // [rows, intermediate]
    attention: AttentionScratch,
    columns: Option<Columns>,   // of several rows
    logits: Buffer<f32>,        // [rows, vocab]
    best: Buffer<[f32; 2]>,     // [rows, blocks of the head]
    sampling: Buffer<Sampling>, // [rows]
    candidates: Option<Candidates>,
    adjust: Adjustments,        // [rows]
    ring: Pinned<u32>,          // [rows, RING]
    logprobs: Pinned<Logprobs>, // [rows, RING]
    step_host: Pinned<Step>,    // [1]
}

impl StepRows {
    pub(super) fn new(model: &CudaModel, rows: usize) -> Result<Self> {
        let gpu = &model.gpu;
        let c = &model.config;
        let w = Widths::of(&model.config);
        let rows = rows.max(1);
        let f32s = |n: usize| gpu.zeros::<f32>("activations", rows * n);
        let blocks = (1..=rows).map(|m| m * best_len(gpu, &model.head, m));
        let columns = match rows {
            1 => None,
            _ => Some(Columns::new(gpu, rows, w.widest_input())?),
        };
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        Ok(StepRows {
            rows,
            step: gpu.zeros("activations", rows)?,
            x: f32s(w.hidden)?,
            qkv: f32s(w.qkv)?,
            attended: f32s(w.q)?,
            mlp: f32s(w.mlp)?,
            attention: AttentionScratch::new(gpu, heads, kv_heads, rows)?,
            columns,
            logits: f32s(w.vocab)?,
            best: gpu.zeros("activations", blocks.max().unwrap_or(1))?,
            sampling: gpu.zeros("activations", rows)?,
            candidates: Candidates::new(gpu, w.vocab, rows)?,
            adjust: Adjustments::new(gpu, w.vocab, rows)?,
            ring: gpu.pinned("sampled tokens", rows * RING)?,
            logprobs: gpu.pinned("sampled tokens", rows * RING)?,
            step_host: gpu.pinned("activations", 1)?,
        })
    }

    /// Device bytes of [`StepRows::new`], up to what does not grow with the model.
    pub(super) fn device_bytes(config: &ModelConfig, rows: usize) -> usize {
        let w = Widths::of(config);
        let columns = match rows {
            0 | 1 => 0,
            _ => Columns::device_bytes(rows, w.widest_input()),
        };
        let rows = rows.max(1);
        rows * 4 * (w.vocab + w.qkv + w.hidden + w.q + w.mlp)
            + Adjustments::device_bytes(w.vocab, rows)
            + columns
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
        let blocks = best_len(&model.gpu, &model.head, m);
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
        };
        self.stream.timed(key, 0, || self.stream.advance(advance))
    }

    /// Queues a token of each of `m` sequences, looked up already, through the layers and the
    /// head.
    fn queue_layers(&mut self, m: usize, splits: usize) -> nq_kernels::Result<()> {
        let Self {
            stream,
            model,
            cache,
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
                    &mut cache[index],
                    &mut step.attention,
                    &mut step.attended,
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

    /// Queues a step.
    fn queue_step(&mut self, StepKind { m, splits, end }: StepKind) -> nq_kernels::Result<()> {
        if end == StepEnd::Logits {
            self.queue_embedding(m)?;
        }
        self.queue_layers(m, splits)?;
        match end {
            StepEnd::Logits => Ok(()),
            StepEnd::Greedy => self.queue_advance(m, false),
            StepEnd::Sampled => self.queue_advance(m, true),
        }
    }

    /// Before the first step of its kind: runs it, unrecorded, and waits. True if there was need;
    /// then the positions it counted on have to be written again. Not while profiling, which would
    /// count it: another session has run such steps then.
    fn warm_up(&mut self, kind: StepKind) -> Result<bool> {
        let profiling = self.model.gpu.is_profiling();
        let first = !profiling && self.graphs.warm.insert((kind.m, kind.end));
        if first {
            self.queue_step(kind)?;
            self.stream.synchronize()?;
        }
        Ok(first)
    }

    /// Runs a step, which is recorded the first time; while profiling each time, as each
    /// recording has events of its own.
    fn run_step(&mut self, kind: StepKind) -> Result<()> {
        if self.model.gpu.is_profiling() || !self.graphs.recorded.contains_key(&kind) {
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

    /// The logits of one token, by the fused step.
    pub(super) fn forward_step(&mut self, slot: usize, token: u32) -> Result<()> {
        let position = self.lengths[slot];
        let vocab = self.model.config.vocab_size;
        let step = &mut self.step;
        step.step_host.values_mut()[0] = Step {
            position: position as i32,
            slot: slot as i32,
            token,
            drawn: 0,
        };
        self.stream
            .write(&mut step.step, 0, &step.step_host, 0..1)?;
        let kind = self.kind(1, position + 1, StepEnd::Logits);
        self.warm_up(kind)?;
        self.run_step(kind)?;
        self.stream
            .read(&self.step.logits, 0, &mut self.logits_host, vocab)?;
        self.stream.synchronize()?;
        self.logits
            .extend_from_slice(&self.logits_host.values()[..vocab]);
        self.settle_profile()
    }

    /// Puts where the sequences stand on the device, and forgets tokens not received.
    fn write_states(&mut self, sequences: &[Decoding<'_>]) -> Result<()> {
        self.step.ring.values_mut().fill(PENDING);
        for (row, sequence) in sequences.iter().enumerate() {
            self.write_sampling(row, sequence.sampler)?;
            let step = Step {
                position: self.lengths[sequence.slot] as i32,
                slot: sequence.slot as i32,
                token: sequence.token,
                drawn: 0,
            };
            self.step.step.write(row, &[step])?;
        }
        Ok(())
    }

    /// Puts the state of sequence `row`'s sampler on the device.
    fn write_sampling(&mut self, row: usize, sampler: &Sampler) -> Result<()> {
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
            position: words(sampler.position()),
        };
        self.step.sampling.write(row, &[sampling])?;
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

    /// Waits for the token of step `i` of sequence `row`, and tells its sampler.
    fn receive(&mut self, row: usize, i: usize, sampler: &mut Sampler) -> Result<u32> {
        let at = row * RING + i % RING;
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
        match token {
            NOT_FINITE => return Err(Error::LogitsNotFinite),
            NONE_ALLOWED => {
                let vocab = self.model.config.vocab_size;
                return Err(Error::NoTokenAllowed { vocab });
            }
            _ => {}
        }
        if sampler.top_logprobs().is_none() {
            sampler.accept(token);
            return Ok(token);
        }
        // Written before the token.
        let said = self.step.logprobs.load(at);
        let n = (said.count as usize).min(MOST_LOGPROBS);
        sampler.accept_with(TokenLogprobs {
            position: sampler.position(),
            token,
            logprob: said.chosen,
            top: (said.ids.into_iter().zip(said.values).take(n)).collect(),
        });
        Ok(token)
    }

    /// Queues steps ahead of the tokens that the host reads; counts the steps whose tokens were
    /// received. The longest sequence has `longest` positions.
    fn decode_ahead(
        &mut self,
        end: StepEnd,
        longest: usize,
        steps: usize,
        sequences: &mut [Decoding<'_>],
        received: &mut usize,
        each: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let m = sequences.len();
        let profiling = self.model.gpu.is_profiling();
        let ahead = if profiling { 1 } else { AHEAD };
        let mut queued = 0;
        while *received < steps {
            while queued < steps && queued - *received < ahead {
                self.run_step(self.kind(m, longest + queued + 1, end))?;
                queued += 1;
            }
            let mut flow = ControlFlow::Continue(());
            for (row, sequence) in sequences.iter_mut().enumerate() {
                let token = self.receive(row, *received, sequence.sampler)?;
                if each(row, token).is_break() {
                    flow = ControlFlow::Break(());
                }
            }
            *received += 1;
            if profiling {
                self.stream.synchronize()?;
                self.settle_profile()?;
            }
            if flow.is_break() {
                return Ok(flow);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// [`crate::Session::decode_many`].
    pub(super) fn decode_on_device(
        &mut self,
        sequences: &mut [Decoding<'_>],
        steps: usize,
        each: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<()> {
        let m = sequences.len();
        if self.model.kernels == KernelSet::Reference || m > MOST_SEQUENCES {
            return decode_on_host(self, sequences, steps, each);
        }
        if steps == 0 || m == 0 {
            return Ok(());
        }
        let chunks: Vec<Chunk<'_>> = (sequences.iter())
            .map(|s| Chunk {
                slot: s.slot,
                tokens: std::slice::from_ref(&s.token),
                logits: LogitsWanted::Last,
            })
            .collect();
        let vocab = self.model.config.vocab_size;
        check_chunks(&chunks, &self.spec, vocab, |slot| self.lengths[slot])?;
        drop(chunks);
        debug_assert!(
            m <= self.step.rows,
            "different slots, so not more than those"
        );
        let starts: Vec<usize> = sequences.iter().map(|s| self.lengths[s.slot]).collect();
        // As many steps as there are positions; one more is refused as `forward` would.
        let longest = starts.iter().copied().max().unwrap_or(0);
        let room = steps.min(self.spec.ctx - longest);
        let lists = |s: &Decoding<'_>| {
            let p = s.sampler.params();
            s.sampler.adjusts() || !(p.is_greedy() || p.top_k == 1)
        };
        let end = match sequences.iter().any(lists) {
            true => StepEnd::Sampled,
            false => StepEnd::Greedy,
        };
        self.write_states(sequences)?;
        self.queue_embedding(m)?;
        if self.warm_up(self.kind(m, longest + 1, end))? {
            self.write_states(sequences)?;
            self.queue_embedding(m)?;
        }
        let mut received = 0;
        let result = self.decode_ahead(end, longest, room, sequences, &mut received, each);
        // Steps queued past the last token wanted wrote behind it: positions that are not
        // part of the sequence.
        let ended = self.stream.synchronize();
        // The token of each step that gave one is in the cache.
        for (sequence, start) in sequences.iter().zip(starts) {
            self.lengths[sequence.slot] = start + received;
        }
        let flow = result?;
        ended?;
        if room < steps && flow.is_continue() {
            return Err(Error::ContextFull {
                capacity: self.spec.ctx,
                needed: self.spec.ctx + 1,
            });
        }
        Ok(())
    }
}
