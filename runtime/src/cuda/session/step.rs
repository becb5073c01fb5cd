//! The fused step of one token, alone or sampling on the device.

use super::{AHEAD, CudaSession, PENDING, RING, product};
use crate::engine::{Chunk, LogitsWanted, check_chunks, decode_on_host};
use crate::error::{Error, Result};
use crate::sampler::Sampler;
use nq_kernels::KernelSet;
use nq_kernels::cuda::{Advance, GemvOutput, HEAD_DIM, NOT_FINITE, Norm, Sampling, Step};
use std::ops::ControlFlow;

impl CudaSession {
    /// Queues the embedding of the step's token.
    fn queue_embedding(&mut self) -> nq_kernels::Result<()> {
        let (model, one) = (&self.model, &mut self.one);
        self.stream
            .embed_step(model.embedding(), &one.step, &mut one.x)
    }

    /// Queues the choice of the next token, and its embedding.
    fn queue_advance(&mut self) -> nq_kernels::Result<()> {
        let (model, one) = (&self.model, &mut self.one);
        let vocab = model.config.vocab_size;
        let key = ("sample", "fused", (1, vocab));
        if self.decode_lists
            && let Some(candidates) = &mut one.candidates
        {
            self.stream.timed(key, 4 * vocab, || {
                self.stream
                    .candidates(&one.logits, &one.sampling, &one.seen, candidates, vocab)
            })?;
        }
        let advance = Advance {
            candidates: one.candidates.as_ref().filter(|_| self.decode_lists),
            logits: &one.logits,
            best: &one.best,
            sampling: &one.sampling,
            seen: &mut one.seen,
            step: &mut one.step,
            ring: &mut one.ring,
            embedding: model.embedding(),
            x: &mut one.x,
        };
        self.stream.timed(key, 0, || self.stream.advance(advance))
    }

    /// Queues one token, looked up already, through the layers and the head.
    fn queue_layers(&mut self) -> nq_kernels::Result<()> {
        let Self {
            stream,
            model,
            cache,
            cos_sin,
            one,
            ..
        } = self;
        let c = &model.config;
        let eps = c.rms_norm_eps;
        let norm = |gain| Norm { gain, eps };
        // How many keys and values are read, the device alone knows.
        let attention = ("attention", "fused", (c.num_attention_heads, HEAD_DIM));
        for (index, layer) in model.layers.iter().enumerate() {
            // The first product of a step lets nothing overtake the sampler of the last one,
            // which the attention kernel's early reads depend on.
            let late = index == 0;
            let out = GemvOutput::Store(norm(&layer.input_norm), &mut one.qkv);
            product(stream, "qkv", &layer.qkv, || {
                stream.gemv(&layer.qkv, &one.x, out, late)
            })?;
            stream.timed(attention, 0, || {
                stream.attention_decode(
                    &one.qkv,
                    &one.step,
                    &model.heads(index, cos_sin),
                    &mut cache[index],
                    &mut one.attention,
                    &mut one.attended,
                )
            })?;
            let out = GemvOutput::Add(&mut one.x);
            product(stream, "o", &layer.o, || {
                stream.gemv(&layer.o, &one.attended, out, false)
            })?;
            let out = GemvOutput::Silu(norm(&layer.post_attention_norm), &mut one.mlp);
            product(stream, "gate_up", &layer.gate_up, || {
                stream.gemv(&layer.gate_up, &one.x, out, false)
            })?;
            let out = GemvOutput::Add(&mut one.x);
            product(stream, "down", &layer.down, || {
                stream.gemv(&layer.down, &one.mlp, out, false)
            })?;
        }
        let out = GemvOutput::Head(norm(&model.norm), &mut one.logits, &mut one.best);
        product(stream, "head", &model.head, || {
            stream.gemv(&model.head, &one.x, out, false)
        })
    }

    /// The logits of one token, by the fused step.
    pub(super) fn forward_one(&mut self, slot: usize, token: u32) -> Result<()> {
        // Each recording has events of its own.
        let profiling = self.model.gpu.is_profiling();
        if profiling || self.step_graph.is_none() {
            // Kernels are loaded and their shared memory is reserved outside the recording.
            if self.step_graph.is_none() {
                self.queue_embedding()?;
                self.queue_layers()?;
                self.stream.synchronize()?;
            }
            let stream = self.stream.clone();
            let graph = stream.record(|| {
                self.queue_embedding()?;
                self.queue_layers()
            })?;
            self.step_graph = Some(graph);
        }
        let step = Step {
            position: self.lengths[slot] as i32,
            slot: slot as i32,
            token,
            drawn: 0,
        };
        let vocab = self.model.config.vocab_size;
        let one = &mut self.one;
        one.step_host.values_mut()[0] = step;
        self.stream.write(&mut one.step, 0, &one.step_host, 0..1)?;
        if let Some(graph) = &self.step_graph {
            self.stream.run(graph)?;
        }
        self.stream
            .read(&one.logits, 0, &mut one.logits_host, vocab)?;
        self.stream.synchronize()?;
        self.logits
            .extend_from_slice(&one.logits_host.values()[..vocab]);
        if profiling {
            self.step_graph = None;
            self.model.gpu.settle_profile()?;
        }
        Ok(())
    }

    /// Makes the graph of a step that samples; anew while profiling, as each recording has
    /// events of its own.
    fn record_decode(&mut self) -> Result<()> {
        let profiling = self.model.gpu.is_profiling();
        if profiling || self.decode_graph.is_none() {
            if !profiling {
                self.queue_embedding()?;
                self.queue_layers()?;
                self.queue_advance()?;
                self.stream.synchronize()?;
            }
            let stream = self.stream.clone();
            let graph = stream.record(|| {
                self.queue_layers()?;
                self.queue_advance()
            })?;
            self.decode_graph = Some(graph);
        }
        Ok(())
    }

    /// Puts the sampler's state on the device.
    fn write_sampling(&mut self, sampler: &Sampler) -> Result<()> {
        let p = sampler.params();
        let words = |v: u64| [v as u32, (v >> 32) as u32];
        let sampling = Sampling {
            temperature: p.temperature,
            top_p: p.top_p,
            min_p: p.min_p,
            repetition: p.repetition_penalty,
            presence: p.presence_penalty,
            top_k: i32::try_from(p.top_k).unwrap_or(i32::MAX),
            penalties: i32::from(p.has_penalties()),
            seed: words(p.seed),
            stream: words(sampler.stream()),
            position: words(sampler.position()),
        };
        self.one.sampling.write(0, &[sampling])?;
        if p.has_penalties() {
            let mut seen = vec![0u8; self.model.config.vocab_size];
            for (id, generated) in sampler.seen() {
                if let Some(state) = seen.get_mut(id as usize) {
                    *state = 1 + u8::from(generated);
                }
            }
            self.one.seen.write(0, &seen)?;
        }
        Ok(())
    }

    /// Waits for sampled token `i`.
    fn receive(&mut self, i: usize) -> Result<u32> {
        let at = i % RING;
        let mut spins = 0u32;
        let token = loop {
            match self.one.ring.load(at) {
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
        self.one.ring.store(at, PENDING);
        match token {
            NOT_FINITE => Err(Error::LogitsNotFinite),
            token => Ok(token),
        }
    }

    /// [`Session::decode`] with sampling on the device: steps are queued ahead of the tokens
    /// that the host reads. Returns the tokens sampled.
    fn decode_ahead(
        &mut self,
        steps: usize,
        sampler: &mut Sampler,
        each: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> (usize, Result<()>) {
        let profiling = self.model.gpu.is_profiling();
        let ahead = if profiling { 1 } else { AHEAD };
        let mut queued = 0;
        let mut received = 0;
        while received < steps {
            while queued < steps && queued - received < ahead {
                if profiling && let Err(e) = self.record_decode() {
                    return (received, Err(e));
                }
                if let Some(graph) = &self.decode_graph
                    && let Err(e) = self.stream.run(graph)
                {
                    return (received, Err(e.into()));
                }
                queued += 1;
            }
            match self.receive(received) {
                Ok(token) => {
                    received += 1;
                    if profiling {
                        let settled = (self.stream.synchronize())
                            .and_then(|()| self.model.gpu.settle_profile());
                        if let Err(e) = settled {
                            return (received, Err(e.into()));
                        }
                    }
                    sampler.accept(token);
                    if each(token).is_break() {
                        break;
                    }
                }
                Err(e) => return (received, Err(e)),
            }
        }
        (received, Ok(()))
    }

    /// [`Session::decode`].
    pub(super) fn decode_on_device(
        &mut self,
        slot: usize,
        token: u32,
        steps: usize,
        sampler: &mut Sampler,
        each: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<()> {
        if self.model.kernels == KernelSet::Reference {
            return decode_on_host(self, slot, token, steps, sampler, each);
        }
        if steps == 0 {
            return Ok(());
        }
        let chunk = Chunk {
            slot,
            tokens: &[token],
            logits: LogitsWanted::Last,
        };
        let vocab = self.model.config.vocab_size;
        check_chunks(&[chunk], &self.spec, vocab, |slot| self.lengths[slot])?;
        let start = self.lengths[slot];
        // As many steps as there are positions; one more is refused as `forward` would.
        let room = steps.min(self.spec.ctx - start);
        let p = sampler.params();
        let lists = p.has_penalties() || !(p.is_greedy() || p.top_k == 1);
        if lists != self.decode_lists {
            self.decode_graph = None;
            self.decode_lists = lists;
        }
        if !self.model.gpu.is_profiling() {
            self.record_decode()?;
        }
        self.write_sampling(sampler)?;
        self.one.ring.values_mut().fill(PENDING);
        let step = Step {
            position: start as i32,
            slot: slot as i32,
            token,
            drawn: 0,
        };
        self.one.step.write(0, &[step])?;
        self.queue_embedding()?;
        let mut broke_off = false;
        let (received, result) = self.decode_ahead(room, sampler, &mut |token| {
            let flow = each(token);
            broke_off = flow.is_break();
            flow
        });
        // Steps queued past the last token wanted wrote behind it: positions that are not
        // part of the sequence.
        let ended = self.stream.synchronize();
        if self.model.gpu.is_profiling() {
            self.decode_graph = None;
        }
        // The token of each step that gave one is in the cache.
        self.lengths[slot] = start + received;
        result?;
        ended?;
        if room < steps && !broke_off {
            return Err(Error::ContextFull {
                capacity: self.spec.ctx,
                needed: self.spec.ctx + 1,
            });
        }
        Ok(())
    }
}
