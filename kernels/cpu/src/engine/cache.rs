//! What a layer keeps of the sequences of a session: pages of keys and values, or states of recurrences.

use crate::{KvPages, state_len};
use nq_kernels::pages::KvType;
use nq_model::{LayerSpec, ModelConfig};
use nq_runtime::states::{delta_shape, is_recurrent};

/// The cache of one layer.
pub(crate) enum LayerCache {
    /// Keys and values of a layer with attention.
    Pages(KvPages),
    /// States of a layer with a recurrence.
    States(States),
}

/// The states of a recurrence, one for each slot, and those of [`Snapshots`] behind them.
pub(crate) struct States {
    values: Vec<f32>, // [places, len]
    len: usize,
}

/// Bytes of a page of keys and values of all layers.
pub(crate) fn page_bytes(c: &ModelConfig, kv: KvType) -> usize {
    let page = KvPages::page_bytes(kv, c.num_key_value_heads, c.head_dim);
    c.layers().filter(|l| !is_recurrent(l)).count() * page
}

/// Bytes of the states of a sequence in all layers, whatever its length.
pub fn state_bytes(c: &ModelConfig) -> usize {
    match c.layers().filter(|l| is_recurrent(l)).count() {
        0 => 0,
        layers => size_of::<f32>() * layers * state_len(&delta_shape(c)),
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
        if is_recurrent(spec) {
            let len = state_len(&delta_shape(c));
            let values = vec![0.0; states * len];
            LayerCache::States(States { values, len })
        } else {
            LayerCache::Pages(KvPages::new(kv, pages, c.num_key_value_heads, c.head_dim))
        }
    }

    /// Its pages, if it has any.
    pub(crate) fn pages(&self) -> Option<&KvPages> {
        match self {
            LayerCache::Pages(pages) => Some(pages),
            LayerCache::States(_) => None,
        }
    }

    /// Its pages, if it has any, to be written to.
    pub(crate) fn pages_of(&mut self) -> Option<&mut KvPages> {
        match self {
            LayerCache::Pages(pages) => Some(pages),
            LayerCache::States(_) => None,
        }
    }

    /// The pages of a layer with attention.
    ///
    /// # Panics
    /// For another layer.
    pub(crate) fn pages_mut(&mut self) -> &mut KvPages {
        match self {
            LayerCache::Pages(pages) => pages,
            LayerCache::States(_) => unreachable!("a layer with attention has pages"),
        }
    }

    /// The states of the sequences in `slots`, which are distinct, of a layer with a recurrence.
    ///
    /// # Panics
    /// For another layer.
    pub(crate) fn states_mut(&mut self, slots: &[usize]) -> Vec<&mut [f32]> {
        let LayerCache::States(States { values, len }) = self else {
            unreachable!("a layer with a recurrence has states");
        };
        let mut all: Vec<Option<&mut [f32]>> = values.chunks_exact_mut(*len).map(Some).collect();
        let taken = slots.iter().map(|&slot| all[slot].take());
        taken.map(|s| s.expect("slots are distinct")).collect()
    }

    /// The state at `place`, if it has states.
    pub(crate) fn state(&self, place: usize) -> Option<&[f32]> {
        match self {
            LayerCache::States(States { values, len }) => {
                Some(&values[place * *len..(place + 1) * *len])
            }
            LayerCache::Pages(_) => None,
        }
    }

    /// The state at `place`, if it has states, to be written to.
    pub(crate) fn state_mut(&mut self, place: usize) -> Option<&mut [f32]> {
        match self {
            LayerCache::States(States { values, len }) => {
                Some(&mut values[place * *len..(place + 1) * *len])
            }
            LayerCache::Pages(_) => None,
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
        if let LayerCache::States(States { values, len }) = self {
            values.copy_within(from * *len..(from + 1) * *len, to * *len);
        }
    }
}
