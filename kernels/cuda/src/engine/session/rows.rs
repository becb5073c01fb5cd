//! A forward over the rows of many tokens.

use super::CudaSession;
use super::buffers::{FullRows, LOGIT_ROWS, Widths};
use super::rank_rows::{Handover, gather_logits, hand_over};
use crate::engine::adapters::Adapted;
use crate::engine::part::GpuPart;
use crate::engine::pass::{
    Fused, Inputs, Pass, PassState, Product, Rows, Sequences, StreamPass, fetch,
};
use crate::{CONV, DeltaSpan, GemmOutput, RowsOut, SequenceRows};
use nq_kernels::KernelSet;
use nq_model::Dims;
use nq_runtime::interface::{Chunk, Observer};
use std::time::Duration;

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
            kept,
            cos_sin,
            many,
            ranks,
            experts_host,
            adapters,
            adapted,
            adapter_rows,
            images,
            ..
        } = self;
        stream.embed(model.embedding(), &many.tokens, &mut many.x, m)?;
        images.show(stream, spans, 0, &mut many.x, None)?;
        if let Some(streams) = &mut many.streams {
            streams.begin(stream, &many.x, m)?;
        }
        let streams = match (&mut many.streams, kept) {
            (Some(rows), Some(kept)) => Some(StreamPass {
                rows,
                kept,
                at: &many.rows,
                scored: None,
            }),
            _ => None,
        };
        let on = model.context(
            stream,
            pages,
            states.as_ref(),
            cos_sin,
            experts_host.as_ref(),
        );
        let mut pass = Pass {
            on,
            m,
            fused: Fused::IN_PROMPTS,
            rows: Rows {
                x: &mut many.x,
                qkv: &mut many.qkv,
                rates: Some(&mut many.rates),
                experts: many.experts.as_mut(),
                taps: many.taps.as_mut(),
            },
            inputs: Inputs::Half {
                halves: &mut many.halves,
                full: many.full.as_mut(),
                sums: None,
            },
            sequences: Sequences::Prompts {
                rows: &many.rows,
                spans,
                recurrent: many.recurrent.as_mut(),
            },
            streams,
            ranks: ranks.as_mut(),
            observer: match observer {
                Some(observer) => Some(&mut **observer),
                None => None,
            },
            drafting: None,
            adapted: Adapted::of_pass(adapters, &adapted.runs, adapter_rows),
            state: PassState::default(),
        };
        pass.hand_over(Handover::Begin)?;
        let begins = model.part.is_none_or(GpuPart::begins);
        for (index, layer) in model.layers.all.iter().enumerate() {
            layer.run(&mut pass)?;
            if begins {
                let Rows { x, qkv, .. } = &mut pass.rows;
                images.show(stream, spans, index + 1, x, Some(qkv))?;
            }
        }
        Ok(pass.hand_over(Handover::End)?)
    }

    /// Makes `many.x` the residual stream behind the last layer on every rank, if rows of it are wanted: ranks that do not wait
    /// for it go on with the next chunks.
    fn finish_layers(&mut self, chunks: &[Chunk<'_>], wanted: &[u32]) -> nq_runtime::Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let m = chunks.iter().map(|c| c.tokens.len()).sum();
        let (x, size) = (
            &mut self.many.x,
            Dims::new(m, self.model.config.hidden_size),
        );
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
        let (h, vocab) = (c.hidden_size, c.vocab_size);
        let mut seen = Vec::new();
        for rows in rows.chunks(LOGIT_ROWS) {
            let m = rows.len();
            many.wanted.write(0, rows)?;
            let out = RowsOut {
                full: many.full.as_mut().map(|f| &mut f.normed),
                half: Some(&mut many.head_in),
            };
            model.end(stream, &many.x, &mut many.streams, &many.wanted, &out, m)?;
            if let (Some(_), Some(full)) = (&observer, &many.full) {
                seen.extend(fetch(stream, &full.normed, m * h)?);
            }
            let normed = many.full.as_ref().map(|f| &f.normed);
            let part = ranks.as_mut().and_then(|r| r.head_logits());
            let out = GemmOutput::Store(part.unwrap_or(&mut many.logits));
            let product = Product {
                stream,
                kernels: model.kernels,
                name: "head",
                w: &model.head,
                m,
                holds_dependents: false,
            };
            product.many(normed, &many.head_in, out)?;
            gather_logits(
                stream,
                ranks.as_ref(),
                &mut many.logits,
                None,
                Dims::new(m, vocab),
            )?;
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
        let mut turns = Vec::new();
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
            let mark = (self.snapshots).due(chunk.slot, position, count, CONV - 1);
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
            rows.extend(self.placed_rows(rows_of, &mut turns));
            wanted.extend(chunk.logits.rows(count).map(|i| (row + i) as u32));
        }
        let sequences = spans.iter().map(|s| {
            let rows = s.rows.row..s.rows.row + s.rows.count;
            (s.rows.slot, rows)
        });
        self.adapted.begin(sequences);
        self.place_streams(&spans, &tokens)?;
        self.stream.write_checked(&mut self.many.tokens, &tokens)?;
        self.stream.write_checked(&mut self.many.rows, &rows)?;
        self.write_turns(&turns)?;
        self.run_layers(&spans, tokens.len(), observer)?;
        if let (Some(drafting), Some(taps)) = (&self.drafting, &self.many.taps) {
            for (chunk, span) in chunks.iter().zip(&spans) {
                let (rows, streams) = (span.rows, taps.streams());
                drafting.take(rows.slot, rows.position, chunk.tokens, streams, rows.row)?;
            }
        }
        self.adapt_bank()?;
        Ok(wanted)
    }

    /// Tells the device what a residual of several streams needs of the `spans` of a pass, whose tokens these are.
    pub(super) fn place_streams(
        &mut self,
        spans: &[DeltaSpan],
        tokens: &[u32],
    ) -> nq_runtime::Result<()> {
        let (Some(kept), Some(streams)) = (&mut self.kept, &mut self.many.streams) else {
            return Ok(());
        };
        (self.stream).write_spans(&mut streams.spans, spans, tokens.len())?;
        if let Some(table) = &self.model.config.ngrams {
            let tables = (table, &self.model.tables[..]);
            streams.look_up(&self.stream, tables, kept, spans, tokens)?;
        }
        for span in spans {
            let own = span.rows.row..span.rows.row + span.rows.count;
            kept.append(span, &tokens[own]);
        }
        Ok(())
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
        let h = model.config.hidden_size;
        let most = (many.logits.len() / h).clamp(1, LOGIT_ROWS);
        for rows in wanted.chunks(most) {
            let m = rows.len();
            many.wanted.write(0, rows)?;
            let normed = RowsOut::full(&mut many.logits);
            model.end(stream, &many.x, &mut many.streams, &many.wanted, &normed, m)?;
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
