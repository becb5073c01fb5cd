//! A forward over the rows of many tokens.

use super::super::model::CudaModel;
use super::buffers::{FullRows, LOGIT_ROWS, ManyRows, RecurrentRows, Widths, expert_rows, padded};
use super::experts::add_experts;
use super::passes::states_of;
use super::rank_rows::{
    Handover, RankRows, added_to, gather_logits, hand_over, reduce, reduce_written,
};
use super::{CudaSession, product};
use crate::{
    Buffer, CONV, DeltaRows, DeltaSpan, DeviceLinear, DevicePages, DeviceStates, GemmOutput,
    HostStage, Row, RowsOut, SequenceRows, Stream, operand_index,
};
use nq_kernels::{Error, KernelSet, Result};
use nq_model::Product;
use nq_model::forward::{Delta, Experts, HeadVectors, Operand, Packed, Projection, Shared, Verbs};
use nq_runtime::interface::{Chunk, Observer};
use std::time::Duration;

/// The rows of recurrences of a model that has some.
fn recurrent_rows(rows: &mut Option<RecurrentRows>) -> &mut RecurrentRows {
    match rows {
        Some(rows) => rows,
        None => unreachable!("sessions of models with recurrences have rows for them"),
    }
}

/// A pass of `m` rows.
struct PrefillPass<'a, 'o> {
    stream: &'a Stream,
    model: &'a CudaModel,
    host: Option<&'a HostStage>,
    pages: &'a DevicePages,
    states: Option<&'a DeviceStates>,
    cos_sin: &'a Buffer<[f32; 2]>,
    many: &'a mut ManyRows,
    ranks: Option<&'a mut RankRows>,
    spans: &'a [DeltaSpan],
    m: usize,
    observer: &'a mut Option<&'o mut dyn Observer>,
    /// True between a mixture's experts and its shared one, which adds to the same share of a rank.
    shared: bool,
}

/// Multiplies rows by `w`: the `full` f32 rows by the reference kernels, if they are given and the
/// reference is asked for; otherwise the FP16 rows `half`.
fn multiply(
    (stream, kernels): (&Stream, KernelSet),
    (name, w): (&'static str, &DeviceLinear),
    full: Option<&Buffer<f32>>,
    half: &Buffer<u16>,
    out: GemmOutput<'_>,
    m: usize,
) -> Result<()> {
    let full = full.filter(|_| kernels == KernelSet::Reference);
    match (full, out) {
        (Some(x), GemmOutput::Store(out)) => stream.linear_reference(w, x, out, m, false)?,
        (Some(x), GemmOutput::Add(out)) => stream.linear_reference(w, x, out, m, true)?,
        (_, out) => product(stream, name, w, || stream.gemm(w, half, out, m))?,
    }
    Ok(())
}

impl PrefillPass<'_, '_> {
    /// Adds a product to the residual stream, or to this rank's share.
    fn add_product(&mut self, operand: Operand, w: &Packed<DeviceLinear>) -> Result<()> {
        let (device, m) = ((self.stream, self.model.kernels), self.m);
        let many = &mut *self.many;
        let full = many.full.as_ref();
        let (full, half) = match operand {
            Operand::Attended => (full.map(|f| &f.attended), &many.attended),
            Operand::Gated => (full.map(|f| &f.mlp), &many.mlp),
        };
        let out = GemmOutput::Add(added_to(&mut many.x, &mut self.ranks));
        multiply(device, (w.spec.name, &w.linear), full, half, out, m)
    }

    /// Gives the residual stream to other ranks, or takes it from them.
    fn hand_over(&mut self, what: Handover) -> Result<()> {
        let (x, size) = (&mut self.many.x, (self.m, self.model.config.hidden_size));
        hand_over(self.stream, x, self.ranks.as_deref(), size, what)
    }

    /// Adds the shares of all ranks to the residual stream.
    fn reduce(&mut self) -> Result<()> {
        let (x, size) = (&mut self.many.x, (self.m, self.model.config.hidden_size));
        reduce(self.stream, x, &mut self.ranks, size)
    }

    /// Multiplies `many.normed` by gate and up and applies SwiGLU: `many.mlp`.
    fn gate_up(&mut self, w: &Packed<DeviceLinear>) -> Result<()> {
        let (device, m) = ((self.stream, self.model.kernels), self.m);
        let (many, name) = (&mut *self.many, (w.spec.name, &w.linear));
        let Some(full) = &mut many.full else {
            let out = GemmOutput::Silu(&mut many.mlp);
            return multiply(device, name, None, &many.normed, out, m);
        };
        let (normed, out) = (Some(&full.normed), GemmOutput::Store(&mut full.gate_up));
        multiply(device, name, normed, &many.normed, out, m)?;
        let out = RowsOut {
            full: Some(&mut full.mlp),
            half: Some(&mut many.mlp),
        };
        self.stream
            .silu_mul(&full.gate_up, &out, m, w.linear.rows() / 2)
    }

    /// Shows the observer the input rows of a product, if they exist in f32.
    fn show(
        &mut self,
        layer: usize,
        product: &Product,
        rows: impl Fn(&FullRows) -> &Buffer<f32>,
    ) -> Result<()> {
        if let (Some(observer), Some(full)) = (&mut *self.observer, &self.many.full)
            && observer.wants_inputs()
        {
            let n = self.m * product.inputs(&self.model.config);
            observer.linear_input(layer, product, &fetch(self.stream, rows(full), n)?);
        }
        Ok(())
    }

    /// Shows the observer the output of attention: rows in f32, or FP16 rows `[m, width padded]` in
    /// operand order.
    fn show_attended(&mut self, layer: usize, product: &Product) -> Result<()> {
        if self.model.kernels == KernelSet::Reference {
            return self.show(layer, product, |f| &f.attended);
        }
        let observer = self.observer.as_mut().filter(|o| o.wants_inputs());
        let Some(observer) = observer else {
            return Ok(());
        };
        let width = product.inputs(&self.model.config);
        self.stream.synchronize()?;
        let mut halves = vec![0u16; self.m * padded(width)];
        self.many.attended.read(0, &mut halves)?;
        let rows = halves.chunks_exact(padded(width));
        let values: Vec<f32> = rows
            .flat_map(|r| (0..width).map(|k| half::f16::from_bits(r[operand_index(k)]).to_f32()))
            .collect();
        observer.linear_input(layer, product, &values);
        Ok(())
    }
}

impl Verbs for PrefillPass<'_, '_> {
    type Linear = DeviceLinear;
    type Vector = Buffer<f32>;
    type Error = Error;

    fn norm(&mut self, gain: &Buffer<f32>) -> Result<()> {
        let c = &self.model.config;
        let (stream, m, many) = (self.stream, self.m, &mut *self.many);
        let out = RowsOut {
            full: many.full.as_mut().map(|f| &mut f.normed),
            half: Some(&mut many.normed),
        };
        let key = ("norm", "fused", (m, c.hidden_size));
        stream.timed(key, 0, || {
            stream.rms_norm(&many.x, None, gain, &out, m, c.rms_norm_eps)
        })
    }

    fn project(
        &mut self,
        layer: usize,
        _norm: &Buffer<f32>,
        w: &Packed<DeviceLinear>,
        to: Projection,
    ) -> Result<()> {
        if matches!(to, Projection::Mixer | Projection::Gated) {
            self.show(layer, w.spec, |f| &f.normed)?;
        }
        if to == Projection::Gated {
            return self.gate_up(w);
        }
        let (device, m, many) = ((self.stream, self.model.kernels), self.m, &mut *self.many);
        let to = match to {
            Projection::Mixer | Projection::Gated => &mut many.qkv,
            Projection::Rates => &mut recurrent_rows(&mut many.delta).rates,
            Projection::Scores => &mut expert_rows(&mut many.experts).scores,
            Projection::SharedScore => &mut expert_rows(&mut many.experts).shared,
        };
        let (w, full) = (
            (w.spec.name, &w.linear),
            many.full.as_ref().map(|f| &f.normed),
        );
        multiply(device, w, full, &many.normed, GemmOutput::Store(to), m)
    }

    fn attend(
        &mut self,
        layer: usize,
        vectors: &HeadVectors<Buffer<f32>>,
        _o: &Packed<DeviceLinear>,
    ) -> Result<()> {
        let (stream, m) = (self.stream, self.m);
        let settings = self.model.heads(vectors, self.cos_sin);
        let cache = self.pages.layer(self.model.place(layer));
        let many = &mut *self.many;
        let heads = settings.heads;
        let shape = (heads, self.model.config.head_dim);
        stream.timed(("append", "fused", shape), 0, || {
            stream.append(&mut many.qkv, &many.rows, &settings, cache, m)
        })?;
        match &mut many.full {
            Some(full) if self.model.kernels == KernelSet::Reference => {
                let out = &mut full.attended;
                stream.attention_reference(&many.qkv, &many.rows, heads, cache, out, m)?;
            }
            _ => stream.timed(("attention", "fused", shape), 0, || {
                self.spans.iter().try_for_each(|s| {
                    let (qkv, out) = (&many.qkv, &mut many.attended);
                    stream.attention_prefill(qkv, s.rows, heads, cache, out)
                })
            })?,
        }
        Ok(())
    }

    fn add(&mut self, layer: usize, operand: Operand, w: &Packed<DeviceLinear>) -> Result<()> {
        match operand {
            Operand::Attended => self.show_attended(layer, w.spec)?,
            Operand::Gated => self.show(layer, w.spec, |f| &f.mlp)?,
        }
        if std::mem::take(&mut self.shared) {
            self.add_product(operand, w)?;
            return self.reduce();
        }
        let (device, m) = ((self.stream, self.model.kernels), self.m);
        let many = &mut *self.many;
        let Some(written) = self.ranks.as_mut().and_then(|r| r.written()) else {
            return self.add_product(operand, w);
        };
        // Nothing is to be added to, nor to be set to zero.
        let half = match operand {
            Operand::Attended => &many.attended,
            Operand::Gated => &many.mlp,
        };
        let out = GemmOutput::Store(written);
        multiply(device, (w.spec.name, &w.linear), None, half, out, m)?;
        let size = (m, self.model.config.hidden_size);
        match self.ranks.as_deref() {
            Some(ranks) => reduce_written(self.stream, &mut many.x, ranks, size),
            None => Ok(()),
        }
    }

    fn recur(
        &mut self,
        layer: usize,
        _norm: &Buffer<f32>,
        delta: &Delta<DeviceLinear, Buffer<f32>>,
    ) -> Result<()> {
        let (model, stream, m) = (self.model, self.stream, self.m);
        let many = &mut *self.many;
        let rows = recurrent_rows(&mut many.delta);
        let out = RowsOut {
            full: many.full.as_mut().map(|f| &mut f.attended),
            half: Some(&mut many.attended),
        };
        let of = DeltaRows {
            qkvz: &many.qkv,
            ba: &rows.rates,
            rows: &many.rows,
            mixed: &mut rows.mixed,
            chunks: &mut rows.chunks,
            scanned: &mut rows.scanned,
        };
        let states = states_of(model, self.states, layer);
        let vectors = model.delta(&delta.vectors);
        let key = ("recurrence", "fused", (m, model.config.hidden_size));
        stream.timed(key, 0, || {
            stream.delta_rows(of, self.spans, &vectors, states, &out, m)
        })
    }

    fn mix(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        experts: &Experts<DeviceLinear>,
    ) -> Result<()> {
        let (m, many) = (self.m, &mut *self.many);
        let (on, normed) = ((self.stream, self.model, self.host), Some(&many.normed));
        let (of, to) = ((norm, experts), (&mut many.x, &mut self.ranks));
        add_experts(on, layer, of, expert_rows(&mut many.experts), normed, to, m)?;
        // The shared expert adds to the same share.
        self.shared = experts.shared.is_some();
        match self.shared {
            true => Ok(()),
            false => self.reduce(),
        }
    }

    fn weigh(&mut self, shared: &Shared<DeviceLinear>) -> Result<()> {
        let many = &mut *self.many;
        let scaled = RowsOut {
            full: many.full.as_mut().map(|f| &mut f.mlp),
            half: Some(&mut many.mlp),
        };
        let size = (self.m, shared.mlp.down.linear.inputs());
        let scores = &expert_rows(&mut many.experts).shared;
        self.stream.scale_rows(scores, &scaled, size)
    }

    fn end_layer(&mut self, layer: usize) -> Result<()> {
        let many = &mut *self.many;
        if let Some(taps) = &mut many.taps {
            taps.keep(self.stream, layer, &many.x, self.m)?;
        }
        if let Some(observer) = &mut *self.observer {
            let n = self.m * self.model.config.hidden_size;
            observer.layer_output(layer, &fetch(self.stream, &self.many.x, n)?);
        }
        Ok(())
    }
}

impl CudaSession {
    /// Runs the layers over the chunks' rows: `many.x` becomes the residual stream.
    fn run_layers(
        &mut self,
        spans: &[DeltaSpan],
        m: usize,
        observer: &mut Option<&mut dyn Observer>,
    ) -> nq_runtime::Result<()> {
        let Self {
            stream,
            model,
            pages,
            states,
            cos_sin,
            many,
            ranks,
            experts_host,
            ..
        } = self;
        stream.embed(model.embedding(), &many.tokens, &mut many.x, m)?;
        let mut pass = PrefillPass {
            stream,
            model,
            host: experts_host.as_ref(),
            pages,
            states: states.as_ref(),
            cos_sin,
            many,
            ranks: ranks.as_mut(),
            spans,
            m,
            observer,
            shared: false,
        };
        pass.hand_over(Handover::Begin)?;
        model.layers.iter().try_for_each(|l| l.run(&mut pass))?;
        Ok(pass.hand_over(Handover::End)?)
    }

    /// Makes `many.x` the residual stream behind the last layer on every rank, if rows of it are wanted: ranks that do not wait
    /// for it go on with the next chunks.
    fn finish_layers(&mut self, chunks: &[Chunk<'_>], wanted: &[u32]) -> nq_runtime::Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let m = chunks.iter().map(|c| c.tokens.len()).sum();
        let (x, size) = (&mut self.many.x, (m, self.model.config.hidden_size));
        let ranks = self.ranks.as_ref();
        Ok(hand_over(&self.stream, x, ranks, size, Handover::Last)?)
    }

    /// Runs the final norm and the head over the listed rows of `many.x`.
    fn run_head(
        &mut self,
        rows: &[u32],
        observer: &mut Option<&mut dyn Observer>,
    ) -> nq_runtime::Result<()> {
        let Self {
            stream,
            model,
            many,
            logits_host,
            logits,
            ranks,
            ..
        } = self;
        let c = &model.config;
        let (h, vocab, eps) = (c.hidden_size, c.vocab_size, c.rms_norm_eps);
        let mut seen = Vec::new();
        for rows in rows.chunks(LOGIT_ROWS) {
            let m = rows.len();
            many.wanted.write(0, rows)?;
            let out = RowsOut {
                full: many.full.as_mut().map(|f| &mut f.normed),
                half: Some(&mut many.head_in),
            };
            stream.rms_norm(&many.x, Some(&many.wanted), &model.norm, &out, m, eps)?;
            if let (Some(_), Some(full)) = (&observer, &many.full) {
                seen.extend(fetch(stream, &full.normed, m * h)?);
            }
            let normed = many.full.as_ref().map(|f| &f.normed);
            let part = ranks.as_mut().and_then(|r| r.head_logits());
            let out = GemmOutput::Store(part.unwrap_or(&mut many.logits));
            let (device, head) = ((&*stream, model.kernels), ("head", &model.head));
            multiply(device, head, normed, &many.head_in, out, m)?;
            gather_logits(stream, ranks.as_ref(), (&mut many.logits, None), (m, vocab))?;
            stream.read(&many.logits, 0, logits_host, 0..m * vocab)?;
            stream.synchronize()?;
            logits.extend_from_slice(&logits_host.values()?[..m * vocab]);
        }
        if let Some(observer) = observer {
            observer.head_input(&seen);
        }
        Ok(())
    }

    /// Queues the chunks' rows through the layers: `many.x` becomes the residual stream. Returns the
    /// rows whose logits are wanted.
    fn queue_rows(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: &mut Option<&mut dyn Observer>,
    ) -> nq_runtime::Result<Vec<u32>> {
        self.reserve(chunks.iter().map(|c| (c.slot, c.tokens.len())))?;
        for chunk in chunks {
            self.settle(chunk.slot)?;
        }
        let mut spans: Vec<DeltaSpan> = Vec::with_capacity(chunks.len());
        let (mut tokens, mut rows, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks {
            let (row, position) = (tokens.len(), self.tables.len(chunk.slot));
            let count = chunk.tokens.len();
            let rows_of = SequenceRows {
                row,
                count,
                position,
                slot: chunk.slot,
            };
            // The convolution's inputs in front of a snapshot must be rows of the pass.
            let mark = (self.snapshots).due(chunk.slot, (position, count), CONV - 1);
            // A snapshot whose place another of this pass gets is none any more.
            if let Some((_, taken)) = mark {
                let earlier = spans
                    .iter_mut()
                    .filter(|s| s.mark.is_some_and(|m| m.1 == taken));
                earlier.for_each(|s| s.mark = None);
            }
            spans.push(DeltaSpan {
                rows: rows_of,
                mark,
            });
            tokens.extend_from_slice(chunk.tokens);
            rows.extend((0..count).map(|i| Row {
                position: (position + i) as i32,
                slot: chunk.slot as i32,
            }));
            wanted.extend(chunk.logits.rows(count).map(|i| (row + i) as u32));
        }
        self.stream.write_checked(&mut self.many.tokens, &tokens)?;
        self.stream.write_checked(&mut self.many.rows, &rows)?;
        self.run_layers(&spans, tokens.len(), observer)?;
        if let (Some(drafting), Some(taps)) = (&self.drafting, &self.many.taps) {
            for (chunk, span) in chunks.iter().zip(&spans) {
                let rows = span.rows;
                let streams = (taps.streams(), rows.row);
                drafting.take(rows.slot, rows.position, chunk.tokens, streams)?;
            }
        }
        Ok(wanted)
    }

    /// Computes the logits of all chunks by a forward over many rows.
    pub(super) fn forward_many(
        &mut self,
        chunks: &[Chunk<'_>],
        mut observer: Option<&mut dyn Observer>,
    ) -> nq_runtime::Result<()> {
        if observer.is_some() && self.many.full.is_none() {
            let (model, rows) = (&self.model, self.spec.max_rows.max(1));
            let w = Widths::of(&model.config);
            self.many.full = Some(FullRows::new(&model.gpu, &w, rows)?);
        }
        let wanted = self.queue_rows(chunks, &mut observer)?;
        self.finish_layers(chunks, &wanted)?;
        self.run_head(&wanted, &mut observer)?;
        self.stream.synchronize()?;
        if self.model.gpu.is_profiling() {
            self.model.gpu.settle_profile()?;
        }
        // Keeping the f32 copies that an observer needed would slow later forwards down.
        if self.model.kernels == KernelSet::Fused {
            self.many.full = None;
        }
        Ok(())
    }

    /// Appends to `out` the hidden states after the final norm of the rows that the chunks want. They pass
    /// through the memory of logits.
    pub(super) fn hidden_many(
        &mut self,
        chunks: &[Chunk<'_>],
        out: &mut Vec<f32>,
    ) -> nq_runtime::Result<()> {
        let wanted = self.queue_rows(chunks, &mut None)?;
        self.finish_layers(chunks, &wanted)?;
        let Self {
            stream,
            model,
            many,
            logits_host,
            ..
        } = self;
        let (h, eps) = (model.config.hidden_size, model.config.rms_norm_eps);
        let most = (many.logits.len() / h).clamp(1, LOGIT_ROWS);
        for rows in wanted.chunks(most) {
            let m = rows.len();
            many.wanted.write(0, rows)?;
            let normed = RowsOut {
                full: Some(&mut many.logits),
                half: None,
            };
            stream.rms_norm(&many.x, Some(&many.wanted), &model.norm, &normed, m, eps)?;
            stream.read(&many.logits, 0, logits_host, 0..m * h)?;
            stream.synchronize()?;
            out.extend_from_slice(&logits_host.values()?[..m * h]);
        }
        self.stream.synchronize()?;
        self.settle_profile()
    }

    /// Queues the chunks, without logits.
    pub(super) fn queue_chunks(&mut self, chunks: &[Chunk<'_>]) -> nq_runtime::Result<()> {
        let begin = self.stream.mark()?;
        let queued = self.queue_rows(chunks, &mut None);
        queued.inspect_err(|e| self.lose(chunks, e))?;
        self.prompts.push_back((begin, self.stream.mark()?));
        for chunk in chunks {
            self.tables.advance(chunk.slot, chunk.tokens.len());
        }
        Ok(())
    }

    /// Waits for the oldest queued chunks; returns the time they took.
    pub(super) fn finish_chunks(&mut self) -> nq_runtime::Result<Duration> {
        let Some((begin, end)) = self.prompts.pop_front() else {
            return Ok(Duration::ZERO);
        };
        end.wait()?;
        if self.model.gpu.is_profiling() {
            self.stream.synchronize()?;
            self.settle_profile()?;
        }
        Ok(Duration::from_secs_f64(begin.seconds_until(&end)?))
    }
}

/// Copies the first `n` values of `from` to the host, once the stream's work is done.
fn fetch(stream: &Stream, from: &Buffer<f32>, n: usize) -> Result<Vec<f32>> {
    stream.synchronize()?;
    let mut values = vec![0f32; n];
    from.read(0, &mut values)?;
    Ok(values)
}
