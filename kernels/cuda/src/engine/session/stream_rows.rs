//! What sessions of models whose residual has several streams have besides: buffers of a pass, and what is kept of
//! sequences beside pages and the states of recurrences.

use crate::driver::Staging;
use crate::pack::SPAN;
use crate::{
    Buffer, ChosenBlocks, DeltaSpan, FewStreams, Gpu, INDEX_DIM, IndexSizes, KeptRows, LayerRows,
    MOST_SEQUENCES, MOST_WIDE_SEQUENCES, PartialSums, Places, Stream, StreamDims, StreamSpans,
};
use nq_kernels::Result;
use nq_model::{ModelConfig, NgramTable};
use nq_runtime::ngrams::NgramRows;

/// Buffers of a pass over several streams.
pub(in crate::engine) struct StreamRows {
    pub(in crate::engine) dims: StreamDims,
    pub(in crate::engine) x: Buffer<f32>, // [rows, streams, hidden], the residual
    pub(in crate::engine) normed: Buffer<f32>, // [rows, streams, hidden]
    pub(in crate::engine) gates: Buffer<f32>, // [rows, streams, hidden]
    pub(in crate::engine) half: Buffer<u16>, // [rows, streams hidden padded]
    pub(in crate::engine) low: Buffer<f32>, // [rows, rank]
    /// The same products of few rows, and those of `inject`, in parts of their inputs.
    pub(in crate::engine) few: Option<[PartialSums; 2]>,
    pub(in crate::engine) low_half: Buffer<u16>, // [rows, rank padded]
    pub(in crate::engine) inject: Buffer<f32>, // [rows, streams], what each stream gets of a block
    /// Of a step: the streams with what the block before has added, with which `x` changes places; whether it has; and what a
    /// block reads.
    pub(in crate::engine) joined: Buffer<f32>, // [1, streams, hidden]
    pub(in crate::engine) swapped: bool,
    pub(in crate::engine) block: Buffer<f32>, // [1, hidden]
    pub(in crate::engine) contracted: FewStreams,
    /// True while streams are still to get what a block of a step has added.
    pub(in crate::engine) pending: bool,
    pub(in crate::engine) spans: StreamSpans,
    pub(in crate::engine) ngrams: Option<NgramBuffers>,
    pub(in crate::engine) index: Option<IndexBuffers>,
}

/// Buffers of layers with tables of n-grams.
pub(in crate::engine) struct NgramBuffers {
    pub(in crate::engine) found: Vec<Buffer<f32>>, // [tables][rows, width], what tables have for the rows
    pub(in crate::engine) half: Buffer<u16>,       // [rows, width padded]
    pub(in crate::engine) values: Buffer<f32>,     // [rows, hidden]
    staging: Option<Staging<f32>>,
    rows: Vec<f32>, // [rows, width], on the host
}

/// Buffers of layers with indexers.
pub(in crate::engine) struct IndexBuffers {
    pub(in crate::engine) products: Buffer<f32>, // [rows, heads + 1, INDEX_DIM]
    pub(in crate::engine) chosen: ChosenBlocks,
}

impl StreamRows {
    /// Allocates buffers for up to `rows` rows of sequences within `there` that keep rows at `places` places, on a device whose
    /// steps take `together` sequences; `None` for a residual of one stream.
    pub(super) fn new(
        gpu: &Gpu,
        c: &ModelConfig,
        rows: usize,
        there: Places,
        places: usize,
        together: usize,
    ) -> Result<Option<Self>> {
        let Some(hyper) = c.hyper else {
            return Ok(None);
        };
        let f32s = |n: usize| gpu.zeros::<f32>("activations", rows * n);
        let halves = |n: usize| gpu.zeros::<u16>("activations", rows * n.next_multiple_of(SPAN));
        let few = |width| PartialSums::new(gpu, rows.min(MOST_WIDE_SEQUENCES), width);
        let all = c.stream_width();
        let ngrams = |table: &NgramTable| -> Result<_> {
            let found = table.layers.iter().map(|_| f32s(table.width));
            Ok(NgramBuffers {
                found: found.collect::<Result<_>>()?,
                half: halves(table.width)?,
                values: f32s(c.hidden_size)?,
                staging: None,
                rows: Vec::new(),
            })
        };
        let index = |sizes: IndexSizes| -> Result<_> {
            Ok(IndexBuffers {
                products: f32s(sizes.width())?,
                chosen: ChosenBlocks::new(gpu, sizes, rows, there.positions)?,
            })
        };
        let sizes = c.indexer.map(|i| IndexSizes {
            heads: i.heads,
            block: i.block,
            most: i.blocks(),
            query_heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
        });
        let dims = StreamDims {
            streams: hyper.streams,
            width: c.hidden_size,
        };
        Ok(Some(StreamRows {
            dims,
            joined: gpu.zeros("activations", all)?,
            block: gpu.zeros("activations", c.hidden_size)?,
            contracted: FewStreams::new(gpu, 1, dims, hyper.rank)?,
            pending: false,
            swapped: false,
            spans: StreamSpans::new(gpu, rows.min(there.slots), there, places)?,
            x: f32s(all)?,
            normed: f32s(all)?,
            gates: f32s(all)?,
            half: halves(all)?,
            low: f32s(hyper.rank)?,
            few: match together > MOST_SEQUENCES {
                true => Some([few(hyper.rank)?, few(hyper.streams)?]),
                false => None,
            },
            low_half: halves(hyper.rank)?,
            inject: f32s(hyper.streams)?,
            ngrams: c.ngrams.as_ref().map(ngrams).transpose()?,
            index: sizes.map(index).transpose()?,
        }))
    }

    /// Copies the rows of the embedding to each stream.
    pub(super) fn begin(&mut self, stream: &Stream, from: &Buffer<f32>, m: usize) -> Result<()> {
        self.pending = false;
        if std::mem::take(&mut self.swapped) {
            std::mem::swap(&mut self.x, &mut self.joined);
        }
        stream.spread_streams(from, &mut self.x, m, self.dims)
    }

    /// Looks up the rows of all tables for the `spans` of a pass, whose tokens these are, and queues their copy to the device.
    pub(super) fn look_up(
        &mut self,
        stream: &Stream,
        (table, tables): (&NgramTable, &[Option<NgramRows>]),
        kept: &StreamsKept,
        spans: &[DeltaSpan],
        tokens: &[u32],
    ) -> nq_runtime::Result<()> {
        let Some(buffers) = &mut self.ngrams else {
            return Ok(());
        };
        let width = table.width;
        buffers.rows.resize(tokens.len() * width, 0.0);
        let all = table.layers.iter().zip(&mut buffers.found);
        for (&layer, found) in all {
            let Some(rows) = &tables[layer] else {
                unreachable!("a layer with n-grams has a table");
            };
            for span in spans.iter().map(|s| s.rows) {
                let own = span.row..span.row + span.count;
                let out = &mut buffers.rows[own.start * width..own.end * width];
                rows.look_up(kept.before(span.slot, span.position), &tokens[own], out)?;
            }
            stream.write_staged(found, 0, &mut buffers.staging, &buffers.rows)?;
        }
        Ok(())
    }
}

/// What is kept of sequences at each of the places that states of recurrences have, too.
pub(in crate::engine) struct StreamsKept {
    /// By layer, the last rows that the convolution over n-grams read, or an indexer's keys of the last positions.
    rows: KeptRows,
    firsts: Vec<usize>, // [layers]
    /// The last tokens of each place's sequence, at most as many as n-grams reach back.
    tokens: Vec<Vec<u32>>, // [places]
    context: usize,
}

/// Bytes of a token in files.
const TOKEN: usize = size_of::<u32>();
/// The token of a text that has no more.
const NO_TOKEN: u32 = u32::MAX;

impl StreamsKept {
    /// Allocates `places`; `None` for a residual of one stream.
    pub(super) fn new(gpu: &Gpu, c: &ModelConfig, places: usize) -> Result<Option<Self>> {
        if c.hyper.is_none() {
            return Ok(None);
        }
        let mut words = 0;
        let firsts = c.layers().map(|spec| {
            let first = words;
            if let (Some(_), Some(table)) = (spec.ngrams(), &c.ngrams) {
                words += table.conv_rows() * c.stream_width();
            }
            if let (Some(_), Some(indexer)) = (spec.indexer(), c.indexer) {
                words += indexer.block * INDEX_DIM;
            }
            first
        });
        let firsts = firsts.collect();
        Ok(Some(StreamsKept {
            rows: KeptRows::new(gpu, places, words)?,
            firsts,
            tokens: vec![Vec::new(); places],
            context: c.ngrams.as_ref().map_or(0, NgramTable::context),
        }))
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> usize {
        self.rows.bytes()
    }

    /// What layer `layer` has.
    pub(in crate::engine) fn layer(&self, layer: usize) -> LayerRows<'_> {
        LayerRows {
            all: &self.rows,
            first: self.firsts[layer],
        }
    }

    /// The tokens in front of position `position` of the sequence in `slot`, as many as n-grams reach or the text has.
    fn before(&self, slot: usize, position: usize) -> &[u32] {
        match position {
            0 => &[],
            _ => &self.tokens[slot],
        }
    }

    /// Notes the tokens of the rows of a span, and at which of them a snapshot is taken.
    pub(super) fn append(&mut self, span: &DeltaSpan, tokens: &[u32]) {
        let before = self.before(span.rows.slot, span.rows.position).to_vec();
        let last = |count: usize| {
            let all = [&before, &tokens[..count]].concat();
            all[all.len() - self.context.min(all.len())..].to_vec()
        };
        let marked = span.mark.map(|(count, place)| (place, last(count)));
        let end = last(tokens.len());
        if let Some((place, tokens)) = marked {
            self.tokens[place] = tokens;
        }
        self.tokens[span.rows.slot] = end;
    }

    /// Copies what is kept at place `from` to place `to`.
    pub(super) fn copy(&mut self, stream: &Stream, from: usize, to: usize) -> Result<()> {
        stream.copy_kept(&mut self.rows, from, to)?;
        self.tokens[to] = self.tokens[from].clone();
        Ok(())
    }

    /// Bytes of a place in files.
    pub(super) fn place_bytes(&self) -> usize {
        self.rows.place_bytes() + self.context * TOKEN
    }

    /// Appends what is kept at `place` to `out`.
    pub(super) fn read(&self, stream: &Stream, place: usize, out: &mut Vec<u8>) -> Result<()> {
        stream.read_kept(&self.rows, place, out)?;
        let tokens = self.tokens[place].iter().copied();
        let all = tokens.chain(std::iter::repeat(NO_TOKEN)).take(self.context);
        all.for_each(|token| out.extend_from_slice(&token.to_le_bytes()));
        Ok(())
    }

    /// Makes what is kept at `place` that of `bytes`, as many as a place has. Tokens are hashed alone.
    pub(super) fn write(&mut self, stream: &Stream, place: usize, bytes: &[u8]) -> Result<()> {
        let (rows, tokens) = bytes.split_at(bytes.len() - self.context * TOKEN);
        stream.write_kept(&mut self.rows, place, rows)?;
        let tokens = tokens.as_chunks::<TOKEN>().0.iter();
        let tokens = tokens.map(|&bytes| u32::from_le_bytes(bytes));
        self.tokens[place] = tokens.take_while(|&token| token != NO_TOKEN).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::StreamsKept;
    use crate::{DeltaSpan, Gpu, GpuInfo, SequenceRows};
    use nq_kernels::Account;
    use nq_testkit::models::tiny;

    /// What n-grams of the next pass begin with are the last two tokens, of snapshots too.
    #[test]
    fn the_last_tokens_of_a_text_are_kept() {
        let gpu = Gpu::dry(GpuInfo::default(), Account::gpu());
        let config = tiny("qwen4exp");
        let mut kept = StreamsKept::new(&gpu, &config, 4).unwrap().unwrap();
        let append = |kept: &mut StreamsKept, position, tokens: &[u32], mark| {
            let rows = SequenceRows {
                row: 0,
                count: tokens.len(),
                position,
                slot: 1,
            };
            kept.append(&DeltaSpan { rows, mark }, tokens);
        };
        append(&mut kept, 0, &[5], None);
        assert_eq!(kept.before(1, 1), [5]);
        append(&mut kept, 1, &[6, 7, 8, 9], Some((3, 3)));
        assert_eq!(kept.before(1, 5), [8, 9]);
        assert_eq!(kept.tokens[3], [7, 8]);
        append(&mut kept, 5, &[10], None);
        assert_eq!(kept.before(1, 6), [9, 10]);
        assert!(kept.before(1, 0).is_empty());
        // A text that begins anew in the slot has none before it.
        append(&mut kept, 0, &[4], None);
        assert_eq!(kept.before(1, 1), [4]);
        assert!(kept.before(0, 0).is_empty());
        assert!(
            StreamsKept::new(&gpu, &tiny("qwen35"), 4)
                .unwrap()
                .is_none()
        );
    }
}
