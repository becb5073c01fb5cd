//! What a layer keeps of the sequences of a session: pages of keys and values, and states of recurrences and of what else
//! depends on the last tokens alone.

use crate::{KvPages, state_len};
use nq_kernels::pages::{KvType, PAGE};
use nq_model::{IndexerShape, LayerSpec, ModelConfig};
use nq_runtime::states::{delta_shape, is_recurrent};
use std::ops::Range;

/// The cache of one layer.
pub(crate) struct LayerCache {
    pages: Option<LayerPages>,
    states: Option<States>,
}

/// Pages of a layer with attention.
pub(crate) struct LayerPages {
    pub(super) kv: KvPages,
    /// Keys of the blocks that an indexer chooses from, if there is one.
    pub(super) blocks: Option<BlockKeys>,
}

/// The keys of an indexer's blocks, as many in a page as it has blocks of positions.
pub(crate) struct BlockKeys {
    values: Vec<f32>, // [pages, PAGE / block, head_dim]
    block: usize,
    head_dim: usize,
}

/// The states of a layer, one for each slot, and those of [`Snapshots`](nq_runtime::states::Snapshots) behind them. A state
/// is, one behind another and as far as the layer has them: the state of a recurrence; the last rows that the convolution
/// over n-grams read, and the ids of the last tokens, each more by 1 so that 0 is none; and an indexer's keys of the
/// positions of the last block.
pub(crate) struct States {
    values: Vec<f32>, // [places, len]
    len: usize,
}

/// Where in a layer's states the parts are.
#[derive(Clone, Debug)]
pub(crate) struct StateParts {
    /// The state of a recurrence.
    pub(crate) delta: Range<usize>,
    /// The rows that the convolution over n-grams read, and ids.
    pub(crate) ngrams: Range<usize>,
    /// The keys of the positions of the last block.
    pub(crate) index: Range<usize>,
}

impl StateParts {
    /// Those of a layer as `spec` describes it.
    pub(crate) fn of_layer(c: &ModelConfig, spec: &LayerSpec) -> Self {
        let delta = match is_recurrent(spec) {
            true => state_len(&delta_shape(c)),
            false => 0,
        };
        let ngrams = match (spec.ngrams(), &c.ngrams) {
            (Some(_), Some(n)) => n.conv_rows() * c.stream_width() + n.context(),
            _ => 0,
        };
        let index = match (spec.indexer(), c.indexer) {
            (Some(_), Some(i)) => i.block * i.head_dim,
            _ => 0,
        };
        StateParts {
            delta: 0..delta,
            ngrams: delta..delta + ngrams,
            index: delta + ngrams..delta + ngrams + index,
        }
    }

    fn len(&self) -> usize {
        self.index.end
    }
}

/// Bytes of a page of keys and values, and of keys of blocks, of a layer with attention.
fn layer_page_bytes(c: &ModelConfig, kv: KvType) -> usize {
    let page = KvPages::page_bytes(kv, c.num_key_value_heads, c.head_dim);
    page + c.indexer.map_or(0, |i| BlockKeys::page_bytes(&i))
}

/// Bytes of a page of keys and values of all layers.
pub(crate) fn page_bytes(c: &ModelConfig, kv: KvType) -> usize {
    c.layers().filter(|l| !is_recurrent(l)).count() * layer_page_bytes(c, kv)
}

/// Bytes of the states of a sequence in all layers, whatever its length.
pub fn state_bytes(c: &ModelConfig) -> usize {
    let values = c.layers().map(|l| StateParts::of_layer(c, l).len());
    size_of::<f32>() * values.sum::<usize>()
}

/// Bytes of the caches that a stepper has for one sequence of one page in layers of each kind.
pub(crate) fn kind_bytes(c: &ModelConfig, kv: KvType, pages: usize) -> usize {
    let state = |k: &LayerSpec| size_of::<f32>() * StateParts::of_layer(c, k).len();
    let states: usize = c.architecture.kinds.iter().map(state).sum();
    states + pages * layer_page_bytes(c, kv)
}

impl BlockKeys {
    fn new(shape: &IndexerShape, pages: usize) -> Self {
        let IndexerShape {
            block, head_dim, ..
        } = *shape;
        BlockKeys {
            values: vec![0.0; pages * (PAGE / block) * head_dim],
            block,
            head_dim,
        }
    }

    fn page_bytes(shape: &IndexerShape) -> usize {
        size_of::<f32>() * (PAGE / shape.block) * shape.head_dim
    }

    /// Where the key of the block that begins at row `at` of `page` is.
    fn place(&self, page: u32, at: usize) -> Range<usize> {
        let block = page as usize * (PAGE / self.block) + at / self.block;
        block * self.head_dim..(block + 1) * self.head_dim
    }

    /// The key of the block that begins at row `at` of `page`.
    pub(super) fn key(&self, page: u32, at: usize) -> &[f32] {
        &self.values[self.place(page, at)]
    }

    /// Stores it.
    pub(super) fn store(&mut self, page: u32, at: usize, key: &[f32]) {
        let place = self.place(page, at);
        self.values[place].copy_from_slice(key);
    }

    fn page(&self, page: u32) -> Range<usize> {
        let len = PAGE / self.block * self.head_dim;
        page as usize * len..(page as usize + 1) * len
    }
}

impl LayerPages {
    /// Copies the first `rows` rows of page `from` to page `to`.
    pub(crate) fn copy_rows(&mut self, from: u32, to: u32, rows: usize) {
        self.kv.copy_rows(from, to, rows);
        if let Some(keys) = &mut self.blocks {
            let (from, to) = (keys.page(from), keys.page(to).start);
            keys.values.copy_within(from, to);
        }
    }

    /// Appends the bytes of `page` to `out`.
    pub(crate) fn read_page(&self, page: u32, out: &mut Vec<u8>) {
        self.kv.read_page(page, out);
        if let Some(keys) = &self.blocks {
            out.extend_from_slice(bytemuck::cast_slice(&keys.values[keys.page(page)]));
        }
    }

    /// Fills `page` with bytes that [`LayerPages::read_page`] returned.
    pub(crate) fn write_page(&mut self, page: u32, bytes: &[u8]) {
        let of_blocks = self.blocks.as_ref().map_or(0, |k| 4 * k.page(page).len());
        let (kv, of_blocks) = bytes.split_at(bytes.len() - of_blocks);
        self.kv.write_page(page, kv);
        if let Some(keys) = &mut self.blocks {
            let place = keys.page(page);
            bytemuck::cast_slice_mut(&mut keys.values[place]).copy_from_slice(of_blocks);
        }
    }
}

impl LayerCache {
    /// The cache of a layer as `spec` describes it, with room for `states` states or `pages` pages.
    pub(crate) fn new(
        c: &ModelConfig,
        spec: &LayerSpec,
        kv: KvType,
        states: usize,
        pages: usize,
    ) -> Self {
        let len = StateParts::of_layer(c, spec).len();
        let blocks = |shape: &IndexerShape| BlockKeys::new(shape, pages);
        LayerCache {
            pages: (!is_recurrent(spec)).then(|| LayerPages {
                kv: KvPages::new(kv, pages, c.num_key_value_heads, c.head_dim),
                blocks: c.indexer.as_ref().map(blocks),
            }),
            states: (len > 0).then(|| States {
                values: vec![0.0; states * len],
                len,
            }),
        }
    }

    /// Its pages, if it has any.
    pub(crate) fn pages(&self) -> Option<&LayerPages> {
        self.pages.as_ref()
    }

    /// Its pages, if it has any, to be written to.
    pub(crate) fn pages_of(&mut self) -> Option<&mut LayerPages> {
        self.pages.as_mut()
    }

    /// The pages of a layer with attention.
    ///
    /// # Panics
    /// For another layer.
    pub(crate) fn pages_mut(&mut self) -> &mut LayerPages {
        match &mut self.pages {
            Some(pages) => pages,
            None => unreachable!("a layer with attention has pages"),
        }
    }

    /// A part of the states of the sequences in `slots`, which are distinct, of a layer that has it.
    ///
    /// # Panics
    /// For another layer.
    pub(crate) fn states_mut(&mut self, slots: &[usize], part: &Range<usize>) -> Vec<&mut [f32]> {
        let Some(States { values, len }) = &mut self.states else {
            unreachable!("a layer with a recurrence has states");
        };
        let mut all: Vec<Option<&mut [f32]>> = values.chunks_exact_mut(*len).map(Some).collect();
        let taken = slots.iter().map(|&slot| all[slot].take());
        let taken = taken.map(|s| s.expect("slots are distinct"));
        taken.map(|state| &mut state[part.clone()]).collect()
    }

    /// The state at `place`, if it has states.
    pub(crate) fn state(&self, place: usize) -> Option<&[f32]> {
        let States { values, len } = self.states.as_ref()?;
        Some(&values[place * len..(place + 1) * len])
    }

    /// The state at `place`, if it has states, to be written to.
    pub(crate) fn state_mut(&mut self, place: usize) -> Option<&mut [f32]> {
        let States { values, len } = self.states.as_mut()?;
        Some(&mut values[place * *len..(place + 1) * *len])
    }

    /// A part of the state at `place`, to be written to.
    ///
    /// # Panics
    /// For a layer that has none.
    pub(crate) fn part_mut(&mut self, place: usize, part: &Range<usize>) -> &mut [f32] {
        match self.state_mut(place) {
            Some(state) => &mut state[part.clone()],
            None => unreachable!("a layer with an indexer or a table has states"),
        }
    }

    /// Makes the state in `slot` that of an empty sequence. Pages stay as they are.
    pub(crate) fn clear(&mut self, slot: usize) {
        if let Some(state) = self.state_mut(slot) {
            state.fill(0.0);
        }
    }

    /// Copies the state at place `from` to place `to`. Pages stay as they are.
    pub(crate) fn copy_state(&mut self, from: usize, to: usize) {
        if let Some(len) = self.states.as_ref().map(|s| s.len) {
            self.copy_part(from, to, &(0..len));
        }
    }

    /// Copies a part of the state at place `from` to place `to`.
    pub(crate) fn copy_part(&mut self, from: usize, to: usize, part: &Range<usize>) {
        if let Some(States { values, len }) = &mut self.states {
            let span = from * *len + part.start..from * *len + part.end;
            values.copy_within(span, to * *len + part.start);
        }
    }
}

/// What a layer's states are made of, for all rows kept.
#[derive(Clone, Copy)]
pub(crate) enum KeptInput {
    /// Queries, keys, values and gates of a recurrence.
    Qkvz,
    /// Its rates.
    Ba,
    /// Inputs of the convolution over n-grams.
    Ngrams,
    /// Keys of an indexer.
    IndexKeys,
}
