//! The states of recurrences, which cannot be cut: which of a sequence's earlier ones are kept.

use nq_formats::ModelConfig;
use nq_formats::models::{LayerSpec, Mixer};
use nq_kernels::cpu::DeltaShape;

/// Which states of sequences at earlier lengths are kept, so that a sequence can be cut there: at the ends of
/// its last prompts.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    /// The place of the first among the states.
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

/// Snapshots of a sequence, if as many fit; one more takes the place of the oldest.
const EACH: usize = 2;

/// A prompt's last tokens may be others once it is part of a longer one: those that open the answer. A snapshot
/// is taken this many tokens before its end.
const OPENING: usize = 8;

/// Fewer rows than this are no prompt worth a snapshot.
const PROMPT: usize = 2 * OPENING;

impl Snapshots {
    /// Room for `count` of them, at the places from `first` on.
    pub(crate) fn new(first: usize, count: usize) -> Self {
        Snapshots {
            first,
            kept: vec![None; count],
            clock: 0,
        }
    }

    /// How many are worth their memory in a session of `slots` sequences.
    pub(crate) fn wanted(slots: usize) -> usize {
        EACH * slots
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

/// The shape of the model's recurrences, if it has any.
pub(crate) fn shape_of(c: &ModelConfig) -> Option<DeltaShape> {
    c.delta.map(|d| DeltaShape {
        key_heads: d.key_heads,
        value_heads: d.value_heads,
        key_dim: d.key_dim,
        value_dim: d.value_dim,
        conv: d.conv,
        tiled: d.tiled,
    })
}

/// The shape of the model's recurrences.
///
/// # Panics
/// If it has none.
pub(crate) fn delta_shape(c: &ModelConfig) -> DeltaShape {
    let Some(shape) = shape_of(c) else {
        unreachable!("layers with recurrences have a shape for them");
    };
    shape
}
