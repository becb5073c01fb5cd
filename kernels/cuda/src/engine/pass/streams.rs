//! A residual of several streams: what blocks read of it and add to it, tables of n-grams that add to all of it, and
//! indexers. Only rows of prompts pass through it, of which there may be few.

use super::{Context, Inputs, Pass, Product, Sequences};
use crate::engine::session::buffers::Halves;
use crate::engine::session::stream_rows::{IndexBuffers, NgramBuffers, StreamRows, StreamsKept};
use crate::indexer::joined;
use crate::{
    Buffer, Checked, ConvolvedRows, DeltaSpan, DeviceLinear, GemmOutput, Heads, IndexVectors,
    LayerPages, MOST_WIDE_SEQUENCES, PartialSums, Row, RowsOut, SequenceRows, StepOutput, Stream,
    StreamNorm, StreamWeights, SumsOf,
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
}

/// What weighs the streams that a block, or the head, reads.
pub(in crate::engine) struct Mixing<'a> {
    pub(in crate::engine) norm: StreamGains<'a>,
    pub(in crate::engine) down: &'a DeviceLinear, // [rank, streams hidden]
    pub(in crate::engine) up: &'a DeviceLinear,   // [streams hidden, rank]
    /// `[streams, streams hidden]`, of a block that adds to streams.
    pub(in crate::engine) inject: Option<&'a DeviceLinear>,
}

/// The gains of the norm of each stream, `[streams, hidden]`.
#[derive(Clone, Copy)]
pub(in crate::engine) struct StreamGains<'a> {
    pub(in crate::engine) gain: &'a Buffer<f32>,
    pub(in crate::engine) eps: f32,
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
        mixing: &Mixing<'_>,
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
            gain: mixing.norm.gain,
            eps: mixing.norm.eps,
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
}

impl<'a> Pass<'a> {
    fn streamed(&mut self) -> (&mut StreamPass<'a>, &mut Halves, Context<'a>) {
        match (&mut self.streams, &mut self.inputs) {
            (Some(streams), Inputs::Half { halves, .. }) => (streams, halves, self.on),
            _ => unreachable!("passes over several streams have rows of prompts"),
        }
    }

    /// The rows of prompts, and their spans.
    fn prompts(&self) -> (&'a Checked<Row>, &'a [DeltaSpan]) {
        match &self.sequences {
            Sequences::Prompts { rows, spans, .. } => (rows, spans),
            Sequences::Step { .. } => unreachable!("steps are over one stream"),
        }
    }

    /// Normalizes the streams, for n-grams.
    pub(super) fn norm_streams(&mut self, gain: &Buffer<f32>) -> Result<()> {
        let m = self.m;
        let (streams, _, on) = self.streamed();
        let rows = &mut *streams.rows;
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
        let (rows, spans) = self.prompts();
        let (Some(streams), Inputs::Half { halves, full, .. }) =
            (&mut self.streams, &mut self.inputs)
        else {
            unreachable!("passes over several streams have rows of prompts");
        };
        let (stream, qkv) = (self.on.stream, &*self.rows.qkv);
        let Some(IndexBuffers { chosen, .. }) = &mut streams.rows.index else {
            return spans.iter().try_for_each(|s| {
                stream.attention_prefill(qkv, s.rows, heads.heads, cache, &mut halves.attended)
            });
        };
        let mut others = Vec::new();
        for SequenceRows {
            row,
            count,
            position,
            slot,
        } in spans.iter().map(|s| s.rows)
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
            stream.attend_chosen(qkv, rows, range, cache, chosen, &out)?;
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
        let (Some(streams), Inputs::Half { halves, full, .. }) =
            (&mut self.streams, &mut self.inputs)
        else {
            unreachable!("passes over several streams have rows of prompts");
        };
        let mixing = Mixing {
            norm: StreamGains {
                gain: norm,
                eps: on.config.rms_norm_eps,
            },
            down: &hyper.down.linear,
            up: &hyper.up.linear,
            inject: Some(&hyper.inject.linear),
        };
        let out = RowsOut {
            full: full.as_mut().map(|f| &mut f.normed),
            half: Some(&mut halves.normed),
        };
        // What the block adds is kept apart until it is injected.
        let added = Some(&mut *self.rows.x);
        (streams.rows).read(on.stream, &mixing, None, &out, added, m)
    }

    fn inject(&mut self) -> Result<()> {
        let (m, stream) = (self.m, self.on.stream);
        let Some(streams) = &mut self.streams else {
            unreachable!("a residual of several streams");
        };
        let rows = &mut *streams.rows;
        let key = (
            "inject into streams",
            "fused",
            Dims::new(m, rows.dims.width),
        );
        stream.timed(key, 0, || {
            stream.inject_streams(self.rows.x, &rows.inject, &mut rows.x, m, rows.dims)
        })
    }

    fn select(&mut self, layer: usize, indexer: &Indexer<DeviceLinear, Buffer<f32>>) -> Result<()> {
        let (m, (rows, spans)) = (self.m, self.prompts());
        let cache = self.on.cache(layer);
        let product = self.product(&indexer.qk, false);
        let (streams, halves, on) = self.streamed();
        let Some(IndexBuffers { products, chosen }) = &mut streams.rows.index else {
            unreachable!("layers with an indexer have rows for it");
        };
        product.many(None, &halves.normed, GemmOutput::Store(products))?;
        let vectors = IndexVectors {
            gains: indexer.norms.each_ref(),
            cos_sin: on.cos_sin,
            eps: on.config.rms_norm_eps,
        };
        let kept = streams.kept.layer(layer);
        let key = ("indexer", "fused", Dims::new(m, chosen.sizes().width()));
        on.stream.timed(key, 0, || {
            (on.stream).choose_positions(products, rows, spans, &vectors, cache, kept, chosen, m)
        })
    }

    fn recall(&mut self, layer: usize, ngrams: &Ngrams<DeviceLinear, Buffer<f32>>) -> Result<()> {
        let (m, (at, spans)) = (self.m, self.prompts());
        let products = [&ngrams.key, &ngrams.value].map(|w| self.product(w, false));
        let (streams, _, on) = self.streamed();
        let (stream, eps, kept) = (on.stream, on.config.rms_norm_eps, streams.kept);
        let StreamRows {
            dims,
            x,
            normed,
            gates,
            ngrams: buffers,
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
