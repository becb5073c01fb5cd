//! What models of several streams keep of sequences, and need besides while they run.

use crate::KvPages;
use nq_kernels::pages::{KvType, PAGE};
use nq_model::{IndexerShape, ModelConfig, NgramTable};
use nq_runtime::ngrams::NgramRows;
use nq_runtime::rope::Rotary;

/// What a pass of a model with several streams reads besides its weights.
#[derive(Clone, Copy)]
pub(crate) struct StreamInputs<'a> {
    /// The tokens of the rows.
    pub(crate) tokens: &'a [u32],
    /// The layer's table of n-grams, if it has one.
    pub(crate) table: Option<&'a NgramRows>,
    /// Angles of positions before the rows'.
    pub(crate) rotary: &'a Rotary,
}

/// Intermediate results of a pass over several streams.
#[derive(Debug, Default)]
pub(super) struct StreamScratch {
    pub(super) inject: Vec<f32>, // [rows, streams], what each stream gets of a block
    pub(super) added: Vec<f32>,  // [rows, hidden], what a block has added
    pub(super) low: Vec<f32>,    // [rows, rank]
    pub(super) wide: [Vec<f32>; 2], // [rows, streams, hidden]
    pub(super) values: Vec<f32>, // [rows, hidden], values of n-grams
    pub(super) found: Vec<f32>,  // [rows, width], what a table has for them
    pub(super) index: Vec<f32>,  // [rows, heads + 1, head_dim], queries and key of an indexer
    /// The blocks that each row attends to; none if it attends to all positions.
    pub(super) chosen: Vec<Vec<u32>>, // [rows]
    /// Keys and values of the positions that a row attends to.
    pub(super) gathered: Option<KvPages>,
}

/// Values per row of the buffers of a [`StreamScratch`], in their order.
fn widths(c: &ModelConfig) -> [usize; 8] {
    let Some(hyper) = c.hyper else {
        return [0; 8];
    };
    let (stream, h) = (c.stream_width(), c.hidden_size);
    let (values, found) = c.ngrams.as_ref().map_or((0, 0), |n| (h, n.width));
    let index = c.indexer.map_or(0, |i| (i.heads + 1) * i.head_dim);
    [
        hyper.streams,
        h,
        hyper.rank,
        stream,
        stream,
        values,
        found,
        index,
    ]
}

/// Pages of the positions that a row attends to at most.
pub(super) fn gathered_pages(c: &ModelConfig) -> usize {
    c.indexer.map_or(0, |i| i.most_positions().div_ceil(PAGE))
}

impl StreamScratch {
    /// Allocates buffers for `rows` rows.
    pub(super) fn new(c: &ModelConfig, rows: usize) -> Self {
        let [inject, added, low, normed, gates, values, found, index] =
            widths(c).map(|width| vec![0.0; rows * width]);
        let pages = gathered_pages(c);
        let gathered = || KvPages::new(KvType::F32, pages, c.num_key_value_heads, c.head_dim);
        StreamScratch {
            inject,
            added,
            low,
            wide: [normed, gates],
            values,
            found,
            index,
            chosen: Vec::new(),
            gathered: (pages > 0).then(gathered),
        }
    }

    /// Bytes that [`StreamScratch::new`] reserves.
    pub(super) fn bytes(c: &ModelConfig, rows: usize) -> usize {
        let row: usize = widths(c).iter().sum();
        let page = KvPages::page_bytes(KvType::F32, c.num_key_value_heads, c.head_dim);
        size_of::<f32>() * rows * row + gathered_pages(c) * page
    }
}

/// Brings the part of a state that is of n-grams past rows of what the convolution reads, and their tokens.
pub(super) fn append_ngrams(table: &NgramTable, state: &mut [f32], rows: &[f32], tokens: &[u32]) {
    let (before, ids) = state.split_at_mut(state.len() - table.context());
    push(before, rows);
    let new: Vec<f32> = tokens.iter().map(|&id| (id + 1) as f32).collect();
    push(ids, &new);
}

/// Lets `kept` be the last values of itself with `new` behind it.
fn push(kept: &mut [f32], new: &[f32]) {
    let len = kept.len();
    match new.len() >= len {
        true => kept.copy_from_slice(&new[new.len() - len..]),
        false => {
            kept.copy_within(new.len().., 0);
            kept[len - new.len()..].copy_from_slice(new);
        }
    }
}

/// Brings the part of a state that is of an indexer past keys of rows, the first of which is at `position`.
pub(super) fn append_index_keys(
    shape: &IndexerShape,
    state: &mut [f32],
    keys: &[f32],
    position: usize,
) {
    let d = shape.head_dim;
    for (key, position) in keys.chunks_exact(d).zip(position..) {
        state[position % shape.block * d..][..d].copy_from_slice(key);
    }
}
