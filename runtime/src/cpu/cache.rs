//! What a layer keeps of the sequences of a session: pages of keys and values, or states of recurrences.

use nq_formats::ModelConfig;
use nq_formats::models::{LayerSpec, Mixer};
use nq_kernels::cpu::{DeltaShape, KvPages};
use nq_kernels::pages::KvType;

/// The cache of one layer.
pub(crate) enum LayerCache {
    /// Keys and values of a layer with attention.
    Pages(KvPages),
    /// States of a layer with a recurrence.
    States(States),
}

/// The states of a recurrence, one for each slot.
pub(crate) struct States {
    values: Vec<f32>, // [slots, len]
    len: usize,
}

/// True for a layer whose sequences have a state of fixed size.
pub fn is_recurrent(spec: &LayerSpec) -> bool {
    let mut mixers = spec.blocks.iter().map(|b| &b.mixer);
    mixers.any(|m| matches!(m, Mixer::Delta(_)))
}

/// The shape of the model's recurrences.
///
/// # Panics
/// If it has none.
pub(crate) fn delta_shape(c: &ModelConfig) -> DeltaShape {
    let Some(d) = c.delta else {
        unreachable!("layers with recurrences have a shape for them");
    };
    DeltaShape {
        key_heads: d.key_heads,
        value_heads: d.value_heads,
        key_dim: d.key_dim,
        value_dim: d.value_dim,
        conv: d.conv,
        tiled: d.tiled,
    }
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
        layers => size_of::<f32>() * layers * delta_shape(c).state_len(),
    }
}

impl LayerCache {
    /// The cache of a layer as `spec` describes it, for `slots` sequences over `pages` pages.
    pub(crate) fn new(
        c: &ModelConfig,
        spec: &LayerSpec,
        kv: KvType,
        (slots, pages): (usize, usize),
    ) -> Self {
        if is_recurrent(spec) {
            let len = delta_shape(c).state_len();
            let values = vec![0.0; slots * len];
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

    /// Makes the state in `slot` that of an empty sequence. Pages stay as they are.
    pub(crate) fn clear(&mut self, slot: usize) {
        if let LayerCache::States(States { values, len }) = self {
            values[slot * *len..(slot + 1) * *len].fill(0.0);
        }
    }

    /// Copies the state in slot `from` to `to`. Pages stay as they are.
    pub(crate) fn copy_state(&mut self, from: usize, to: usize) {
        if let LayerCache::States(States { values, len }) = self {
            values.copy_within(from * *len..(from + 1) * *len, to * *len);
        }
    }
}
