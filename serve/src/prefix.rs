//! Finds sequences of a session that begin like a new prompt: a radix tree over token ids.
//!
//! A sequence that ended stays in its slot, with its pages, until these are needed. The
//! tree finds the slot with the longest common beginning, in time proportional to the
//! prompt's length; the prompt's slot is then forked from it (SGLang's RadixAttention, arXiv 2312.07104,
//! over tables of pages instead of pages of one token). Sequences with different salts are never shared:
//! timing reveals nothing about the prompts of another salt.
//!
//! Slots are dropped as a whole, the least recently used first. Since pages are counted, that frees
//! what no other sequence shares: the leaves.

use std::collections::{BTreeMap, HashMap};

/// A point at which sequences with the same beginning diverge.
#[derive(Debug, Default)]
struct Node {
    /// Tokens from its parent to here; empty at a root.
    label: Vec<u32>,
    parent: Option<usize>,
    /// By the first token of their labels.
    children: BTreeMap<u32, usize>,
    /// Slots of the sequences that end here.
    slots: Vec<usize>,
}

/// A sequence in the tree.
#[derive(Debug)]
struct SequenceEntry {
    salt: u64,
    node: usize,
    len: usize,
    used: u64,
    kept: bool,
}

/// The part of a prompt that a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldPrefix {
    /// The slot.
    pub slot: usize,
    /// Number of tokens that can be taken over.
    pub len: usize,
}

/// Sequences by their tokens.
#[derive(Debug, Default)]
pub(crate) struct PrefixTree {
    roots: HashMap<u64, usize>,
    nodes: Vec<Node>,
    free: Vec<usize>,
    entries: HashMap<usize, SequenceEntry>,
    clock: u64,
}

impl PrefixTree {
    /// Puts the sequence in `slot`, with `tokens`, into the tree of `salt`, replacing the slot's previous
    /// entry. If it is `kept`, [`PrefixTree::oldest`] may return it.
    pub(crate) fn insert(&mut self, salt: u64, tokens: &[u32], slot: usize, kept: bool) {
        self.remove(slot);
        let mut at = match self.roots.get(&salt) {
            Some(&root) => root,
            None => {
                let root = self.add(Node::default());
                self.roots.insert(salt, root);
                root
            }
        };
        let mut rest = tokens;
        while let Some(first) = rest.first() {
            let Some(&child) = self.nodes[at].children.get(first) else {
                let leaf = self.add(Node {
                    label: rest.to_vec(),
                    parent: Some(at),
                    ..Node::default()
                });
                self.nodes[at].children.insert(*first, leaf);
                at = leaf;
                break;
            };
            let same = common(&self.nodes[child].label, rest);
            at = if same == self.nodes[child].label.len() {
                child
            } else {
                self.split(child, same)
            };
            rest = &rest[same..];
        }
        self.clock += 1;
        self.nodes[at].slots.push(slot);
        let entry = SequenceEntry {
            salt,
            node: at,
            len: tokens.len(),
            used: self.clock,
            kept,
        };
        self.entries.insert(slot, entry);
    }

    /// Marks the sequence in `slot` as just used.
    pub(crate) fn touch(&mut self, slot: usize) {
        self.clock += 1;
        if let Some(entry) = self.entries.get_mut(&slot) {
            entry.used = self.clock;
        }
    }

    /// The slot with the longest beginning of `tokens`.
    pub(crate) fn peek(&self, salt: u64, tokens: &[u32]) -> Option<HeldPrefix> {
        self.best(salt, tokens, |_, common| common)
    }

    /// The slot whose sequence another one with `tokens` can go on from at the greatest length: that is
    /// `reach(slot, common)`, at most `common`, if the two have `common` tokens in common.
    pub(crate) fn best(
        &self,
        salt: u64,
        tokens: &[u32],
        reach: impl Fn(usize, usize) -> usize,
    ) -> Option<HeldPrefix> {
        let mut at = *self.roots.get(&salt)?;
        let mut common_len = 0;
        // Nodes on the way, and the tokens in common with the sequences below them.
        let mut way = vec![(at, 0)];
        while let Some(&child) =
            (tokens.get(common_len)).and_then(|t| self.nodes[at].children.get(t))
        {
            let label = &self.nodes[child].label;
            let same = common(label, &tokens[common_len..]);
            common_len += same;
            at = child;
            way.push((at, common_len));
            if same < label.len() {
                break;
            }
        }
        let mut best: Option<HeldPrefix> = None;
        let mut done = None;
        for (node, len) in way.into_iter().rev() {
            let reached = best.map_or(0, |b| b.len);
            if len <= reached {
                break;
            }
            for slot in self.below(node, done) {
                let found = HeldPrefix {
                    slot,
                    len: reach(slot, len),
                };
                if found.len > best.map_or(0, |b| b.len) {
                    best = Some(found);
                    if found.len == len {
                        return best;
                    }
                }
            }
            done = Some(node);
        }
        best
    }

    /// The slots of the sequences that end at a node or below it, but not at `done` or below that; the latest
    /// of a node first.
    fn below(&self, node: usize, done: Option<usize>) -> impl Iterator<Item = usize> {
        let mut open = vec![node];
        std::iter::from_fn(move || {
            let node = open.pop()?;
            let node = &self.nodes[node];
            let children = node.children.values().rev().copied();
            open.extend(children.filter(|&child| Some(child) != done));
            Some(node.slots.iter().rev().copied())
        })
        .flatten()
    }

    /// Removes the sequence in `slot`; false if there is none.
    pub(crate) fn remove(&mut self, slot: usize) -> bool {
        let Some(entry) = self.entries.remove(&slot) else {
            return false;
        };
        self.nodes[entry.node].slots.retain(|s| *s != slot);
        self.prune(entry.salt, entry.node);
        true
    }

    /// Kept sequences that are beginnings of `tokens`, and so redundant beside a sequence of these
    /// tokens.
    pub(crate) fn beginnings(&self, salt: u64, tokens: &[u32]) -> Vec<usize> {
        let mut found = Vec::new();
        let Some(&root) = self.roots.get(&salt) else {
            return found;
        };
        let (mut at, mut len) = (root, 0);
        loop {
            let kept = |slot: &usize| self.entries[slot].kept;
            found.extend(self.nodes[at].slots.iter().copied().filter(kept));
            let next = tokens.get(len).and_then(|t| self.nodes[at].children.get(t));
            match next {
                Some(&child) if tokens[len..].starts_with(&self.nodes[child].label) => {
                    len += self.nodes[child].label.len();
                    at = child;
                }
                _ => return found,
            }
        }
    }

    /// The kept slot to give up next, except `spared`: the least recently used; with several salts, of a
    /// salt with more than half of all kept tokens, if there is one.
    pub(crate) fn oldest(&self, spared: Option<usize>) -> Option<usize> {
        let mut tokens: HashMap<u64, usize> = HashMap::new();
        for entry in self.entries.values().filter(|e| e.kept) {
            *tokens.entry(entry.salt).or_default() += entry.len;
        }
        let all: usize = tokens.values().sum();
        let greedy = |salt: &u64| tokens.len() > 1 && 2 * tokens[salt] > all;
        let candidates = self
            .entries
            .iter()
            .filter(|(slot, e)| e.kept && Some(**slot) != spared);
        let first = candidates.min_by_key(|(_, e)| (!greedy(&e.salt), e.used));
        first.map(|(slot, _)| *slot)
    }

    /// Number of kept sequences, and of their tokens.
    pub(crate) fn kept(&self) -> (usize, usize) {
        let kept = self.entries.values().filter(|e| e.kept);
        kept.fold((0, 0), |(n, tokens), e| (n + 1, tokens + e.len))
    }

    fn add(&mut self, node: Node) -> usize {
        match self.free.pop() {
            Some(at) => {
                self.nodes[at] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    /// Inserts a node between `child` and its parent, `at` tokens after the parent.
    fn split(&mut self, child: usize, at: usize) -> usize {
        let rest = self.nodes[child].label.split_off(at);
        let label = std::mem::replace(&mut self.nodes[child].label, rest);
        let (parent, first) = (self.nodes[child].parent, label[0]);
        let next = self.nodes[child].label[0];
        let middle = self.add(Node {
            label,
            parent,
            children: BTreeMap::from([(next, child)]),
            slots: Vec::new(),
        });
        self.nodes[child].parent = Some(middle);
        if let Some(parent) = parent {
            self.nodes[parent].children.insert(first, middle);
        }
        middle
    }

    /// Removes nodes without sequences, from `at` upwards, and merges a node that only leads to one
    /// other.
    fn prune(&mut self, salt: u64, mut at: usize) {
        while self.nodes[at].slots.is_empty() {
            let Some(parent) = self.nodes[at].parent else {
                if self.nodes[at].children.is_empty() {
                    self.roots.remove(&salt);
                    self.free.push(at);
                }
                return;
            };
            match self.nodes[at].children.len() {
                0 => {
                    let first = self.nodes[at].label[0];
                    self.nodes[parent].children.remove(&first);
                    self.nodes[at] = Node::default();
                    self.free.push(at);
                    at = parent;
                }
                1 => {
                    let Some(child) = self.nodes[at].children.values().next().copied() else {
                        return;
                    };
                    let mut label = std::mem::take(&mut self.nodes[at].label);
                    let first = label[0];
                    label.append(&mut self.nodes[child].label);
                    self.nodes[child].label = label;
                    self.nodes[child].parent = Some(parent);
                    self.nodes[parent].children.insert(first, child);
                    self.nodes[at] = Node::default();
                    self.free.push(at);
                    return;
                }
                _ => return,
            }
        }
    }
}

/// Length of the common beginning of two sequences.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_longest_beginning_and_only_of_its_salt() {
        let mut tree = PrefixTree::default();
        tree.insert(1, &[1, 2, 3, 4, 5], 0, true);
        tree.insert(1, &[1, 2, 9], 1, true);
        tree.insert(2, &[1, 2, 3, 4, 5, 6], 2, true);
        let found = |tree: &PrefixTree, salt, tokens: &[u32]| {
            tree.peek(salt, tokens).map(|f| (f.slot, f.len))
        };
        assert_eq!(found(&tree, 1, &[1, 2, 3, 4, 5, 6]), Some((0, 5)));
        assert_eq!(found(&tree, 1, &[1, 2, 3, 7]), Some((0, 3)));
        assert_eq!(found(&tree, 1, &[1, 2, 9, 9]), Some((1, 3)));
        assert_eq!(found(&tree, 1, &[1, 2]).map(|f| f.1), Some(2));
        assert_eq!(found(&tree, 1, &[2, 2]), None);
        assert_eq!(found(&tree, 3, &[1, 2]), None);
        assert!(tree.remove(0) && !tree.remove(0));
        assert_eq!(found(&tree, 1, &[1, 2, 3, 4]), Some((1, 2)));
        assert_eq!(found(&tree, 2, &[1, 2, 3, 4]), Some((2, 4)));
    }

    #[test]
    fn a_sequence_that_cannot_be_cut_may_lose_to_a_shorter_one() {
        let mut tree = PrefixTree::default();
        tree.insert(1, &[1, 2, 3, 4, 5], 0, true);
        tree.insert(1, &[1, 2, 3], 1, true);
        tree.insert(1, &[1, 2, 9], 2, true);
        // Lengths at which sequences can be cut.
        let cuts: [&[usize]; 3] = [&[1, 5], &[3], &[2]];
        let best = |tokens: &[u32]| {
            tree.best(1, tokens, |slot, len| {
                cuts[slot]
                    .iter()
                    .copied()
                    .filter(|&c| c <= len)
                    .max()
                    .unwrap_or(0)
            })
        };
        let found = |slot, len| Some(HeldPrefix { slot, len });
        assert_eq!(best(&[1, 2, 3, 4, 5, 6]), found(0, 5));
        assert_eq!(best(&[1, 2, 3, 4, 7]), found(1, 3));
        assert_eq!(best(&[1, 2, 7]), found(2, 2));
        assert_eq!(best(&[1, 7]), found(0, 1));
        assert_eq!(best(&[7]), None);
    }

    #[test]
    fn the_oldest_goes_first_and_the_greedy_before_others() {
        let mut tree = PrefixTree::default();
        tree.insert(1, &[1, 1], 0, true);
        tree.insert(1, &[2, 2], 1, true);
        tree.insert(1, &[3, 3], 2, false);
        assert_eq!(tree.oldest(None), Some(0));
        tree.touch(0);
        assert_eq!(tree.oldest(None), Some(1));
        assert_eq!(tree.oldest(Some(1)), Some(0));
        // Another salt's sequence is older, but stays while this salt has more than half.
        let mut tree = PrefixTree::default();
        tree.insert(7, &[1, 1], 0, true);
        tree.insert(1, &[1, 1], 1, true);
        tree.insert(1, &[2, 2], 2, true);
        assert_eq!(tree.oldest(None), Some(1));
        tree.remove(1);
        assert_eq!(tree.oldest(None), Some(0));
    }

    #[test]
    fn a_longer_sequence_stands_for_its_beginnings() {
        let mut tree = PrefixTree::default();
        tree.insert(0, &[1, 2], 0, true);
        tree.insert(0, &[1, 2, 3], 1, false);
        tree.insert(0, &[1, 2, 3, 4], 2, true);
        tree.insert(0, &[1, 2, 5], 3, true);
        assert_eq!(tree.beginnings(0, &[1, 2, 3, 4, 5]), [0, 2]);
        assert_eq!(tree.kept(), (3, 9));
    }

    /// Compared with a list that is searched from end to end.
    #[test]
    fn holds_what_a_list_holds() {
        let mut tree = PrefixTree::default();
        let mut list: HashMap<usize, (u64, Vec<u32>)> = HashMap::new();
        let mut state = 1u64;
        let mut random = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % n
        };
        for _ in 0..20_000 {
            let (slot, salt) = (random(12) as usize, random(2));
            let tokens: Vec<u32> = (0..random(9)).map(|_| random(3) as u32).collect();
            match random(3) {
                0 => assert_eq!(tree.remove(slot), list.remove(&slot).is_some()),
                1 => {
                    tree.insert(salt, &tokens, slot, true);
                    list.insert(slot, (salt, tokens));
                }
                _ => {
                    let shared = |(s, held): &(u64, Vec<u32>)| {
                        if *s == salt { common(held, &tokens) } else { 0 }
                    };
                    let longest = list.values().map(shared).max().unwrap_or(0);
                    let found = tree.peek(salt, &tokens);
                    assert_eq!(found.map_or(0, |f| f.len), longest);
                    if let Some(found) = found {
                        assert_eq!(shared(&list[&found.slot]), longest);
                    }
                }
            }
            let used = tree.nodes.len() - tree.free.len();
            assert!(used <= 2 * list.len() + 2, "{used} nodes of {}", list.len());
        }
        for slot in 0..12 {
            tree.remove(slot);
        }
        assert_eq!((tree.nodes.len(), tree.roots.len()), (tree.free.len(), 0));
    }
}
