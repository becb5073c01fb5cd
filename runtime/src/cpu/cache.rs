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

/// The states of a recurrence, one for each slot, and those of [`Snapshots`] behind them.
pub(crate) struct States {
    values: Vec<f32>, // [places, len]
    len: usize,
}

/// Which states of sequences at earlier lengths are kept, so that a sequence can be cut there: at the ends of
/// its last prompts.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    /// The place of the first among the states: the number of slots.
    first: usize,
    kept: Vec<Option<Snapshot>>,
    /// Counts uses.
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Snapshot {
    slot: usize,
    len: usize,
    used: u64,
}

/// Snapshots kept for each slot, on average.
const EACH: usize = 2;

/// A prompt's last tokens may be others once it is part of a longer one: those that open the answer. A snapshot
/// is taken this many tokens before its end.
const OPENING: usize = 8;

/// Fewer rows than this are no prompt worth a snapshot.
const PROMPT: usize = 2 * OPENING;

impl Snapshots {
    /// Of a session of `slots` sequences.
    pub(crate) fn new(slots: usize) -> Self {
        Snapshots {
            first: slots,
            kept: vec![None; EACH * slots],
            clock: 0,
        }
    }

    /// States of a session of `slots` sequences: their own and those of snapshots.
    pub(crate) fn places(slots: usize) -> usize {
        (1 + EACH) * slots
    }

    /// Where among `rows` new rows a snapshot is worth its memory: how many rows are before it.
    pub(crate) fn within(rows: usize) -> Option<usize> {
        (rows >= PROMPT).then(|| rows - OPENING)
    }

    /// The longest snapshot of the sequence in `slot` with at most `len` tokens: its place and length.
    pub(crate) fn nearest(&mut self, slot: usize, len: usize) -> Option<(usize, usize)> {
        self.clock += 1;
        let kept = self.kept.iter_mut().enumerate();
        let mine = kept.filter_map(|(i, s)| Some((i, s.as_mut()?)));
        let best = mine
            .filter(|(_, s)| s.slot == slot && s.len <= len)
            .max_by_key(|(_, s)| s.len)?;
        best.1.used = self.clock;
        Some((self.first + best.0, best.1.len))
    }

    /// A place for the state of the sequence in `slot` after `len` tokens: a free one, or that of the snapshot
    /// that has not been used for longest, of the same sequence if it has its share.
    pub(crate) fn take(&mut self, slot: usize, len: usize) -> usize {
        self.clock += 1;
        let mine = |s: &Snapshot| s.slot == slot;
        let full = self.kept.iter().flatten().filter(|s| mine(s)).count() >= EACH;
        let order = |s: &Option<Snapshot>| match s {
            Some(s) if full => (!mine(s), s.used),
            Some(s) => (true, s.used),
            None => (full, 0),
        };
        let places = 0..self.kept.len();
        let place = places.min_by_key(|&i| order(&self.kept[i])).unwrap_or(0);
        self.kept[place] = Some(Snapshot {
            slot,
            len,
            used: self.clock,
        });
        self.first + place
    }

    /// Forgets those of the sequence in `slot` with more than `len` tokens.
    pub(crate) fn cut(&mut self, slot: usize, len: usize) {
        let gone = |s: &Snapshot| s.slot == slot && s.len > len;
        for kept in self
            .kept
            .iter_mut()
            .filter(|s| s.as_ref().is_some_and(gone))
        {
            *kept = None;
        }
    }
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
    /// The cache of a layer as `spec` describes it, with room for `states` states or `pages` pages.
    pub(crate) fn new(
        c: &ModelConfig,
        spec: &LayerSpec,
        kv: KvType,
        (states, pages): (usize, usize),
    ) -> Self {
        if is_recurrent(spec) {
            let len = delta_shape(c).state_len();
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

    /// Makes the state in `slot` that of an empty sequence. Pages stay as they are.
    pub(crate) fn clear(&mut self, slot: usize) {
        if let LayerCache::States(States { values, len }) = self {
            values[slot * *len..(slot + 1) * *len].fill(0.0);
        }
    }

    /// Copies the state at place `from` to place `to`. Pages stay as they are.
    pub(crate) fn copy_state(&mut self, from: usize, to: usize) {
        if let LayerCache::States(States { values, len }) = self {
            values.copy_within(from * *len..(from + 1) * *len, to * *len);
        }
    }
}
