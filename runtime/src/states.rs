//! The states of recurrences, which cannot be cut: which of a sequence's earlier ones are kept.

use nq_kernels::DeltaShape;
use nq_model::{LayerSpec, ModelConfig};

/// Snapshots: states of sequences at earlier lengths, so that a sequence can be cut or forked there. A snapshot
/// belongs to all sequences that begin with its tokens in this session, and is there until none of them has these
/// tokens any more or its place is needed.
#[derive(Debug, Default)]
pub struct Snapshots {
    /// The place of the first among the states.
    first: usize,
    held: Vec<Option<Snapshot>>,
    /// By slot, the lengths at which a snapshot is to be taken, in order.
    wanted: Vec<Vec<usize>>,
    /// Counts uses.
    clock: u64,
}

#[derive(Clone, Debug)]
struct Snapshot {
    /// The slots of the sequences that it belongs to.
    slots: Vec<usize>,
    len: usize,
    used: u64,
}

impl Snapshots {
    /// Room for `count` of them, at the places from `first` on, of the sequences in `slots` slots.
    pub fn new(first: usize, count: usize, slots: usize) -> Self {
        Snapshots {
            first,
            held: vec![None; count],
            wanted: vec![Vec::new(); slots],
            clock: 0,
        }
    }

    /// The number of snapshots, and of places for them.
    pub fn count(&self) -> (usize, usize) {
        (self.held.iter().flatten().count(), self.held.len())
    }

    /// Asks for a snapshot of the sequence in `slot` when it gets past `len` tokens.
    pub fn want(&mut self, slot: usize, len: usize) {
        let wanted = &mut self.wanted[slot];
        if let Err(at) = wanted.binary_search(&len) {
            wanted.insert(at, len);
        }
    }

    /// A snapshot that was asked for within the next `rows` rows of the sequence in `slot`, which has `position`: the
    /// number of rows in front of it, at least `least`, and a place for it. Of several the last.
    pub fn due(
        &mut self,
        slot: usize,
        position: usize,
        rows: usize,
        least: usize,
    ) -> Option<(usize, usize)> {
        let end = position + rows;
        let wanted = &mut self.wanted[slot];
        let passed = wanted.partition_point(|&len| len <= end);
        let last = wanted.drain(..passed).next_back()?;
        if last < position + least.max(1) {
            return None;
        }
        Some((last - position, self.take(slot, last)?))
    }

    /// The longest snapshot of the sequence in `slot` with at most `len` tokens: its index and length.
    fn longest(&self, slot: usize, len: usize) -> Option<(usize, usize)> {
        let held = self.held.iter().enumerate();
        let mine = held.filter_map(|(i, s)| s.as_ref().map(|s| (i, s)));
        let fits = mine.filter(|(_, s)| s.len <= len && s.slots.contains(&slot));
        fits.map(|(i, s)| (i, s.len)).max_by_key(|&(_, len)| len)
    }

    /// The length of the longest snapshot of the sequence in `slot` with at most `len` tokens; 0 if there is none.
    pub fn reach(&self, slot: usize, len: usize) -> usize {
        self.longest(slot, len).map_or(0, |(_, len)| len)
    }

    /// The longest snapshot of the sequence in `slot` with at most `len` tokens, which is then marked as just used: its
    /// place and length.
    pub fn nearest(&mut self, slot: usize, len: usize) -> Option<(usize, usize)> {
        let (index, len) = self.longest(slot, len)?;
        self.clock += 1;
        if let Some(snapshot) = &mut self.held[index] {
            snapshot.used = self.clock;
        }
        Some((self.first + index, len))
    }

    /// A place for the state of the sequence in `slot` after `len` tokens: a free one, or that of the snapshot whose
    /// loss costs least. That is the one with the fewest tokens to compute again, from the snapshot before it, for the
    /// time that it has not been used. `None` if it is there already, or if there is no place at all.
    pub fn take(&mut self, slot: usize, len: usize) -> Option<usize> {
        if len == 0 || self.reach(slot, len) == len {
            return None;
        }
        self.clock += 1;
        let free = self.held.iter().position(Option::is_none);
        let index = match free {
            Some(index) => index,
            None => {
                let cost = |index: &usize| {
                    let Some(s) = &self.held[*index] else {
                        return 0.0;
                    };
                    let before = |&slot: &usize| self.reach(slot, s.len - 1);
                    let before = s.slots.iter().map(before).min().unwrap_or(0);
                    (s.len - before) as f64 / (self.clock - s.used) as f64
                };
                (0..self.held.len()).min_by(|a, b| cost(a).total_cmp(&cost(b)))?
            }
        };
        self.held[index] = Some(Snapshot {
            slots: vec![slot],
            len,
            used: self.clock,
        });
        Some(self.first + index)
    }

    /// Forgets the snapshot of the sequence in `slot` with `len` tokens.
    pub fn forget(&mut self, slot: usize, len: usize) {
        self.release(slot, |s| s.len == len);
    }

    /// Takes those that are `gone` from the sequence in `slot`.
    fn release(&mut self, slot: usize, gone: impl Fn(&Snapshot) -> bool) {
        for held in &mut self.held {
            if let Some(snapshot) = held.as_mut().filter(|s| gone(s)) {
                snapshot.slots.retain(|&s| s != slot);
                if snapshot.slots.is_empty() {
                    *held = None;
                }
            }
        }
    }

    /// Lets the sequence in `to`, which has the first `len` tokens of that in `from`, share its snapshots.
    pub fn share(&mut self, from: usize, to: usize, len: usize) {
        let shared = self.held.iter_mut().flatten();
        let shared = shared.filter(|s| s.len <= len && s.slots.contains(&from));
        for snapshot in shared
            .filter(|s| !s.slots.contains(&to))
            .collect::<Vec<_>>()
        {
            snapshot.slots.push(to);
        }
    }

    /// Forgets those of the sequence in `slot` with more than `len` tokens, and what was asked for.
    pub fn cut(&mut self, slot: usize, len: usize) {
        self.wanted[slot].clear();
        self.release(slot, |s| s.len > len);
    }
}

/// Fewer tokens than this behind a snapshot are computed again sooner than a pass of its own is run for another.
const APART: usize = 256;
/// Tokens without a snapshot at most, where a prompt has turns that end.
const STRETCH: usize = 4096;

/// Lengths of a prompt at which it pays to keep the state of a model with recurrences ([`Session::keep_at`]), in order
/// and past the first `from` tokens, which are there: where other prompts are likely to part from it. These are the
/// ends of its turns, given by the tokens in `ends`: of the first, which is what the prompts of an application have in
/// common, of the last, behind which the answer begins, and now and then of one between them. A prompt without turns
/// may be asked again as it is.
///
/// [`Session::keep_at`]: crate::Session::keep_at
pub fn resting_points(prompt: &[u32], ends: &[u32], from: usize) -> Vec<usize> {
    let turns = prompt.iter().enumerate().filter(|(_, t)| ends.contains(t));
    let turns: Vec<usize> = turns.map(|(i, _)| i + 1).collect();
    // The last token is computed again for its logits.
    let most = prompt.len().saturating_sub(1);
    let last = turns.iter().rev().find(|&&len| len <= most);
    let last = last.copied().unwrap_or(most);
    if last <= from {
        return Vec::new();
    }
    let mut points = Vec::new();
    let mut before = from;
    for (i, &len) in turns.iter().enumerate() {
        let first = i == 0;
        // The end of a turn, if the next one is too far away.
        let next = turns.get(i + 1).copied().unwrap_or(last);
        let far = next > before + STRETCH;
        if (first || far) && len >= before + APART && len < last {
            points.push(len);
            before = len;
        }
    }
    points.push(last);
    points
}

/// Where a pass over the tokens from `from` on ends, at `to` at the latest, so that it passes one of the `points` at
/// most.
pub fn pass_end(points: &[usize], from: usize, to: usize) -> usize {
    let mut within = points.iter().copied().filter(|&p| p > from && p <= to);
    match (within.next(), within.next()) {
        (Some(first), Some(_)) => first,
        _ => to,
    }
}

/// True for a layer whose sequences have a state of fixed size.
pub fn is_recurrent(spec: &LayerSpec) -> bool {
    spec.recurrence().is_some()
}

/// The shape of the model's recurrences, if it has any.
pub fn shape_of(c: &ModelConfig) -> Option<DeltaShape> {
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
pub fn delta_shape(c: &ModelConfig) -> DeltaShape {
    let Some(shape) = shape_of(c) else {
        unreachable!("layers with recurrences have a shape for them");
    };
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_belong_to_all_sequences_that_begin_with_them() {
        let mut s = Snapshots::new(10, 3, 4);
        s.want(0, 20);
        s.want(0, 8);
        assert_eq!(s.due(0, 0, 7, 1), None);
        // The last of several, and each is asked for once.
        assert_eq!(s.due(0, 7, 30, 1), Some((13, 10)));
        assert_eq!(s.due(0, 37, 30, 1), None);
        assert_eq!([s.reach(0, 19), s.reach(0, 20), s.reach(1, 20)], [0, 20, 0]);
        s.share(0, 1, 25);
        s.share(0, 2, 19);
        assert_eq!([s.reach(1, 99), s.reach(2, 99)], [20, 0]);
        s.cut(0, 0);
        assert_eq!([s.reach(0, 99), s.reach(1, 99)], [0, 20]);
        // One that is there is not taken again.
        s.want(1, 20);
        assert_eq!(s.due(1, 0, 30, 1), None);
        // A kernel needs some rows in front of one.
        s.want(1, 32);
        assert_eq!(s.due(1, 30, 5, 3), None);
        s.cut(1, 19);
        assert_eq!(s.count(), (0, 3));
    }

    #[test]
    fn the_place_whose_loss_costs_least_is_taken() {
        let mut s = Snapshots::new(0, 3, 4);
        assert_eq!(s.take(0, 1000), Some(0));
        assert_eq!(s.take(0, 1010), Some(1));
        assert_eq!(s.take(1, 500), Some(2));
        // Ten tokens behind another.
        assert_eq!(s.take(2, 400), Some(1));
        assert_eq!(s.reach(0, 2000), 1000);
        // What is used stays.
        for _ in 0..20 {
            assert_eq!(s.nearest(1, 600), Some((2, 500)));
            assert_eq!(s.nearest(2, 600), Some((1, 400)));
        }
        assert_eq!(s.take(3, 100), Some(0));
        assert_eq!(Snapshots::new(0, 0, 1).take(0, 5), None);
    }

    #[test]
    fn prompts_rest_where_others_may_part_from_them() {
        const END: u32 = 9;
        let prompt = |turns: &[usize], rest: usize| {
            let mut tokens = Vec::new();
            for &len in turns {
                tokens.resize(tokens.len() + len - 1, 1);
                tokens.push(END);
            }
            tokens.resize(tokens.len() + rest, 1);
            tokens
        };
        // A system prompt and a question; what opens the answer is behind the last turn.
        assert_eq!(
            resting_points(&prompt(&[2000, 500], 3), &[END], 0),
            [2000, 2500]
        );
        assert_eq!(resting_points(&prompt(&[20, 50], 3), &[END], 0), [70]);
        // The system prompt is there.
        assert_eq!(
            resting_points(&prompt(&[2000, 500], 3), &[END], 2000),
            [2500]
        );
        assert!(resting_points(&prompt(&[2000, 500], 3), &[END], 2500).is_empty());
        // Without turns, or with an end as its last token.
        assert_eq!(resting_points(&prompt(&[], 40), &[END], 0), [39]);
        assert_eq!(resting_points(&prompt(&[10, 30], 0), &[END], 0), [10]);
        assert!(resting_points(&[], &[END], 0).is_empty());
        // Long conversations are kept here and there.
        let long = prompt(&[1000; 20], 3);
        assert_eq!(
            resting_points(&long, &[END], 0),
            [1000, 5000, 9000, 13_000, 17_000, 20_000]
        );
        assert_eq!(pass_end(&[1000, 2500], 0, 2600), 1000);
        assert_eq!(pass_end(&[1000, 2500], 1000, 2600), 2600);
        assert_eq!(pass_end(&[1000, 2500], 0, 2000), 2000);
    }
}
