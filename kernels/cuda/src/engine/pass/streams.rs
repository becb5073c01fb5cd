//! A residual of several streams: what blocks read of it and add to it, tables of n-grams that add to all of it, and
//! indexers, over rows of prompts, of which there may be few, or of a recorded step.

use super::{Context, Inputs, Pass, Product};
use crate::engine::session::stream_rows::{IndexBuffers, NgramBuffers, StreamRows, StreamsKept};
use crate::indexer::joined;
use crate::{
    BlockAdds, Buffer, Checked, ConvolvedRows, DeviceLinear, GemmOutput, Heads, IndexVectors,
    JoinedStreams, LayerPages, MOST_WIDE_SEQUENCES, PartialSums, Row, RowsOut, ScoredRows,
    SequenceRows, StepOutput, Stream, StreamMixing, StreamNorm, StreamWeights, SumsOf,
};
use nq_kernels::{Error, KernelSet, Result};
use nq_model::Dims;
use nq_model::forward::{Hyper, Indexer, Ngrams, StreamVerbs};

/// From so many rows on that attend to all positions before them, they do so together.
const DENSE_ROWS: usize = 16;

/// The streams of a pass.
pub(in crate::engine) struct StreamPass<'a> {
    pub(in crate::engine) rows: &'a mut StreamRows,
    pub(in crate::engine) kept: &'a StreamsKept,
    /// Where the rows stand.
    pub(in crate::engine) at: &'a Checked<Row>,
    /// Of a step, which is recorded: the most blocks that an indexer scores for its row. Where it stands the device knows.
    pub(in crate::engine) scored: Option<usize>,
}

/// The sums of the product that was queued last.
fn parted(sums: &PartialSums, width: usize) -> SumsOf<'_> {
    SumsOf {
        sums: sums.values(),
        parts: sums.parts(),
        width,
    }
}

impl StreamRows {
    /// Computes what is read of `m` rows, the first or those listed, and sets `added` to zero.
    pub(in crate::engine) fn read(
        &mut self,
        stream: &Stream,
        mixing: &StreamMixing<'_>,
        rows: Option<&Checked<u32>>,
        out: &RowsOut<'_>,
        added: Option<&mut Buffer<f32>>,
        m: usize,
    ) -> Result<()> {
        let dims = self.dims;
        let product = |name, w| Product {
            stream,
            kernels: KernelSet::Fused,
            name,
            w,
            m,
            holds_dependents: false,
        };
        let timed = |what, queue: &mut dyn FnMut() -> Result<()>| {
            stream.timed(
                (what, "fused", Dims::new(dims.streams, dims.width)),
                0,
                queue,
            )
        };
        let norm = StreamNorm {
            x: &self.x,
            rows,
            gain: mixing.gain,
            eps: mixing.eps,
        };
        timed("norm of streams", &mut || {
            stream.norm_streams(&norm, &mut self.normed, Some(&mut self.half), m, dims)
        })?;
        let down = product("mix_down", mixing.down);
        let inject = mixing.inject.map(|w| product("inject", w));
        let weights = &mut self.inject;
        match &mut self.few {
            // Their outputs are so few that a product needs all of a device for its inputs.
            Some([low, parts]) if m <= MOST_WIDE_SEQUENCES => {
                down.step(&self.half, StepOutput::Parts(low))?;
                let inject = match inject {
                    Some(inject) => {
                        inject.step(&self.half, StepOutput::Parts(parts))?;
                        Some(StreamWeights {
                            inject: parted(parts, dims.streams),
                            weights,
                        })
                    }
                    None => None,
                };
                let low = parted(low, down.w.rows());
                stream.activate_streams(low, &mut self.low_half, inject, m, dims.streams)?;
            }
            _ => {
                down.many(None, &self.half, GemmOutput::Store(&mut self.low))?;
                let whole = |sums, width| SumsOf {
                    sums,
                    parts: 1,
                    width,
                };
                if let Some(inject) = inject {
                    inject.many(None, &self.half, GemmOutput::Store(&mut *weights))?;
                }
                // Each value is read before it is written.
                let before = weights.share();
                let inject = inject.map(|_| StreamWeights {
                    inject: whole(&before, dims.streams),
                    weights,
                });
                let low = whole(&self.low, down.w.rows());
                stream.activate_streams(low, &mut self.low_half, inject, m, dims.streams)?;
            }
        }
        let up = product("mix_up", mixing.up);
        up.many(None, &self.low_half, GemmOutput::Store(&mut self.gates))?;
        let mut added = added;
        timed("mix of streams", &mut || {
            stream.mix_streams(&self.normed, &self.gates, out, added.take(), m, dims)
        })
    }

    /// As [`StreamRows::read`], of the rows of a step, to `block`. Streams first get what was `added` to them and is pending.
    pub(in crate::engine) fn read_few(
        &mut self,
        stream: &Stream,
        mixing: &StreamMixing<'_>,
        added: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let dims = self.dims;
        if !mixing.fits(m, dims) {
            self.join(stream, added, m)?;
            let mut block = self.block.share();
            let added = mixing.inject.map(|_| added);
            return self.read(stream, mixing, None, &RowsOut::full(&mut block), added, m);
        }
        let key = |name, w: &DeviceLinear| (name, "f16", Dims::new(w.rows(), w.inputs()));
        let joins = std::mem::take(&mut self.pending);
        let joined = joins.then_some(JoinedStreams {
            added,
            weights: &self.inject,
            to: &mut self.joined,
        });
        let bytes = mixing.down.bytes() + mixing.inject.map_or(0, DeviceLinear::bytes);
        let contracted = &mut self.contracted;
        stream.timed(key("mix_down", mixing.down), bytes, || {
            stream.contract_low(mixing, &self.x, joined, contracted, m, dims)
        })?;
        if joins {
            std::mem::swap(&mut self.x, &mut self.joined);
            self.swapped = !self.swapped;
        }
        let adds = mixing.inject.map(|_| BlockAdds {
            added,
            weights: &mut self.inject,
        });
        stream.timed(key("mix_up", mixing.up), mixing.up.bytes(), || {
            let (x, block) = (&self.x, &mut self.block);
            stream.contract_mix(mixing, x, &self.contracted, block, adds, m, dims)
        })
    }

    /// Adds to the streams what is pending.
    fn join(&mut self, stream: &Stream, added: &Buffer<f32>, m: usize) -> Result<()> {
        match std::mem::take(&mut self.pending) {
            true => self.inject(stream, added, m),
            false => Ok(()),
        }
    }

    fn inject(&mut self, stream: &Stream, added: &Buffer<f32>, m: usize) -> Result<()> {
        let key = (
            "inject into streams",
            "fused",
            Dims::new(m, self.dims.width),
        );
        stream.timed(key, 0, || {
            stream.inject_streams(added, &self.inject, &mut self.x, m, self.dims)
        })
    }
}

impl<'a> Pass<'a> {
    fn streamed(&mut self) -> (&mut StreamPass<'a>, Context<'a>) {
        match &mut self.streams {
            Some(streams) => (streams, self.on),
            None => unreachable!("a residual of several streams"),
        }
    }

    /// Computes what the head reads of the streams of a step.
    pub(in crate::engine) fn contract_end(&mut self, mixing: &StreamMixing<'_>) -> Result<()> {
        let m = self.m;
        match &mut self.streams {
            Some(streams) => (streams.rows).read_few(self.on.stream, mixing, self.rows.x, m),
            None => Ok(()),
        }
    }

    /// Normalizes the streams, for n-grams.
    pub(super) fn norm_streams(&mut self, gain: &Buffer<f32>) -> Result<()> {
        let (m, added) = (self.m, self.rows.x.share());
        let (streams, on) = self.streamed();
        let rows = &mut *streams.rows;
        rows.join(on.stream, &added, m)?;
        let norm = StreamNorm {
            x: &rows.x,
            rows: None,
            gain,
            eps: on.config.rms_norm_eps,
        };
        (on.stream).norm_streams(&norm, &mut rows.normed, None, m, rows.dims)
    }

    /// Lets rows whose keys and values are appended attend: those before which there are too many blocks to the ones chosen,
    /// and of the others many together.
    pub(super) fn attend_to_chosen(
        &mut self,
        heads: &Heads<'_>,
        cache: LayerPages<'_>,
    ) -> Result<()> {
        let (stream, m) = (self.on.stream, self.m);
        let (Some(streams), qkv) = (&mut self.streams, &*self.rows.qkv) else {
            unreachable!("a residual of several streams");
        };
        let StreamRows { index, spans, .. } = &mut *streams.rows;
        let Some(IndexBuffers { chosen, .. }) = index else {
            unreachable!("layers with an indexer have rows for it");
        };
        let (halves, full) = match &mut self.inputs {
            Inputs::Full { attended, .. } => {
                let out = RowsOut::full(attended);
                return stream.attend_chosen(qkv, streams.at, 0..m, cache, chosen, &out);
            }
            Inputs::Half { halves, full, .. } => (halves, full),
        };
        let mut others = Vec::new();
        for SequenceRows {
            row,
            count,
            position,
            slot,
        } in spans.all().iter().map(|s| s.rows)
        {
            let mut dense = chosen.sizes().dense_rows(position, count);
            if dense < DENSE_ROWS {
                dense = 0;
            } else {
                let together = SequenceRows {
                    row,
                    count: dense,
                    position,
                    slot,
                };
                let out = &mut halves.attended;
                stream.attention_prefill(qkv, together, heads.heads, cache, out)?;
            }
            others.push(row + dense..row + count);
        }
        let out = RowsOut {
            full: full.as_mut().map(|f| &mut f.attended),
            half: Some(&mut halves.attended),
        };
        for range in joined(others.into_iter()) {
            stream.attend_chosen(qkv, streams.at, range, cache, chosen, &out)?;
        }
        Ok(())
    }
}

impl StreamVerbs<DeviceLinear, Buffer<f32>, Error> for Pass<'_> {
    fn contract(
        &mut self,
        _: usize,
        norm: &Buffer<f32>,
        hyper: &Hyper<DeviceLinear>,
    ) -> Result<()> {
        let (on, m) = (self.on, self.m);
        let Some(streams) = &mut self.streams else {
            unreachable!("a residual of several streams");
        };
        let mixing = StreamMixing {
            gain: norm,
            eps: on.config.rms_norm_eps,
            down: &hyper.down.linear,
            up: &hyper.up.linear,
            inject: Some(&hyper.inject.linear),
        };
        // What the block adds is kept apart until it is injected.
        let added = &mut *self.rows.x;
        match &mut self.inputs {
            Inputs::Full { .. } => streams.rows.read_few(on.stream, &mixing, added, m),
            Inputs::Half { halves, full, .. } => {
                let out = RowsOut {
                    full: full.as_mut().map(|f| &mut f.normed),
                    half: Some(&mut halves.normed),
                };
                (streams.rows).read(on.stream, &mixing, None, &out, Some(added), m)
            }
        }
    }

    fn inject(&mut self) -> Result<()> {
        let (m, added) = (self.m, self.rows.x.share());
        let in_step = matches!(self.inputs, Inputs::Full { .. });
        let (streams, on) = self.streamed();
        if in_step {
            // The kernel that reads the streams next adds it.
            streams.rows.pending = true;
            return Ok(());
        }
        streams.rows.inject(on.stream, &added, m)
    }

    fn select(&mut self, layer: usize, indexer: &Indexer<DeviceLinear, Buffer<f32>>) -> Result<()> {
        let (on, m, cache) = (self.on, self.m, self.on.cache(layer));
        let product = self.product(&indexer.qk, false);
        let Some(streams) = &mut self.streams else {
            unreachable!("a residual of several streams");
        };
        let StreamRows {
            index,
            spans,
            block,
            ..
        } = &mut *streams.rows;
        let Some(IndexBuffers { products, chosen }) = index else {
            unreachable!("layers with an indexer have rows for it");
        };
        self.inputs.store(product, block, None, products)?;
        let vectors = IndexVectors {
            gains: indexer.norms.each_ref(),
            cos_sin: on.cos_sin,
            eps: on.config.rms_norm_eps,
        };
        let scored = match streams.scored {
            None => chosen.scored(spans.all()),
            Some(0) => Vec::new(),
            Some(blocks) => vec![ScoredRows { rows: 0..m, blocks }],
        };
        let (at, kept) = (streams.at, streams.kept.layer(layer));
        let key = ("indexer", "fused", Dims::new(m, chosen.sizes().width()));
        on.stream.timed(key, 0, || {
            (on.stream).choose_positions(
                products, at, spans, &vectors, cache, kept, chosen, &scored, m,
            )
        })
    }

    fn recall(&mut self, layer: usize, ngrams: &Ngrams<DeviceLinear, Buffer<f32>>) -> Result<()> {
        let m = self.m;
        let products = [&ngrams.key, &ngrams.value].map(|w| self.product(w, false));
        let (streams, on) = self.streamed();
        let (stream, eps, kept) = (on.stream, on.config.rms_norm_eps, streams.kept);
        let at = streams.at;
        let StreamRows {
            dims,
            x,
            normed,
            gates,
            ngrams: buffers,
            spans,
            ..
        } = &mut *streams.rows;
        let (Some(buffers), Some(table)) = (buffers, &on.config.ngrams) else {
            unreachable!("layers with tables of n-grams have rows for them");
        };
        let NgramBuffers {
            found,
            half,
            values,
            ..
        } = buffers;
        let Some(place) = table.place(layer) else {
            unreachable!("layers with n-grams are among those of the tables");
        };
        let [key, value] = products;
        let rows = RowsOut::half(half);
        stream.convert_rows(&found[place], &rows, Dims::new(m, table.width))?;
        key.many(None, half, GemmOutput::Store(gates))?;
        value.many(None, half, GemmOutput::Store(values))?;
        let norm = |x, gain| StreamNorm {
            x,
            rows: None,
            gain,
            eps,
        };
        // Each of these kernels has read a stream of a row before it writes it.
        let keys = gates.share();
        stream.norm_streams(&norm(&keys, &ngrams.key_norm), gates, None, m, *dims)?;
        stream.gate_ngrams([&keys, normed, values], gates, m, *dims)?;
        stream.norm_streams(&norm(gates, &ngrams.conv_norm), normed, None, m, *dims)?;
        let convolved = ConvolvedRows {
            normed,
            gated: gates,
            taps: &ngrams.conv,
            count: table.taps,
            dilation: table.longest,
            x,
        };
        stream.convolve_ngrams(convolved, spans, kept.layer(layer), m, at.bounds())
    }
}
