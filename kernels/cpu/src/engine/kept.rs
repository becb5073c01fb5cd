//! Takes the latest rows out of states again: a state cannot be shortened, but it can be made again from the one before
//! these rows and from what they brought into it. So drafted tokens can be checked by rows of one forward.

use super::cache::{KeptInput, LayerCache, StateParts};
use super::stream_states::{append_index_keys, append_ngrams};
use super::weights::{CpuLayer, delta_vectors};
use crate::{Cpu, DeltaRows, Span};
use nq_model::ModelConfig;
use nq_runtime::states::delta_shape;

/// What states are made of in the latest forward, for the rows of sequences that may be cut within them.
#[derive(Default)]
pub(crate) struct KeptRows {
    /// The sequences, and their rows among those kept.
    sequences: Vec<(usize, Span)>,
    rows: usize,
    tokens: Vec<u32>, // [rows]
    layers: Vec<[Vec<f32>; INPUTS]>,
}

/// Number of [`KeptInput`]s.
const INPUTS: usize = 4;

impl KeptRows {
    /// Forgets the rows of the forward before, and has those of `sequences` (slot, length, new tokens) kept.
    pub(super) fn begin<'a>(&mut self, sequences: impl Iterator<Item = (usize, usize, &'a [u32])>) {
        self.sequences.clear();
        self.tokens.clear();
        self.rows = 0;
        for (slot, position, tokens) in sequences {
            let (row, len) = (self.rows, tokens.len());
            self.sequences.push((slot, Span { row, len, position }));
            self.tokens.extend_from_slice(tokens);
            self.rows += len;
        }
    }

    /// Keeps, of what a layer's states are made of, `all` `[rows, width]`, the rows of each span whose sequence is to be
    /// kept.
    pub(super) fn keep(
        &mut self,
        layer: usize,
        spans: impl Iterator<Item = (usize, Span)>,
        (input, all): (KeptInput, &[f32]),
        rows: usize,
    ) {
        if self.sequences.is_empty() {
            return;
        }
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, Default::default);
        }
        let to = &mut self.layers[layer][input as usize];
        to.clear();
        let width = all.len() / rows;
        for (_, span) in spans.filter(|(slot, _)| self.sequences.iter().any(|s| s.0 == *slot)) {
            to.extend_from_slice(&all[span.row * width..][..span.len * width]);
        }
    }

    /// The rows of the sequence in `slot`, which has `end` tokens, if they are kept and begin at `len` or before.
    pub(super) fn of(&self, slot: usize, len: usize, end: usize) -> Option<Span> {
        let mine = self.sequences.iter().find(|s| s.0 == slot)?.1;
        (mine.position <= len && mine.position + mine.len == end).then_some(mine)
    }

    /// Brings the states of the sequence in `slot`, which are those before its rows `span`, past the first `count` of
    /// them. The bits are those of the forward.
    pub(super) fn run_again(
        &self,
        (cpu, c): (&Cpu, &ModelConfig),
        (layers, caches): (&[CpuLayer], &mut [LayerCache]),
        (slot, span, count): (usize, Span, usize),
    ) {
        let shape = c.delta.map(|_| delta_shape(c));
        let mut out = vec![0.0; count * shape.map_or(0, |s| s.values())];
        let tokens = &self.tokens[span.row..span.row + count];
        for (index, (layer, cache)) in layers.iter().zip(caches).enumerate() {
            let parts = StateParts::of_layer(c, c.layer(index));
            let rows = |input: KeptInput| {
                let all = &self.layers[index][input as usize];
                let width = all.len() / self.rows;
                &all[span.row * width..][..count * width]
            };
            if let (false, Some(table)) = (parts.ngrams.is_empty(), &c.ngrams) {
                let state = cache.part_mut(slot, &parts.ngrams);
                append_ngrams(table, state, rows(KeptInput::Ngrams), tokens);
            }
            if let (false, Some(indexer)) = (parts.index.is_empty(), &c.indexer) {
                let state = cache.part_mut(slot, &parts.index);
                append_index_keys(indexer, state, rows(KeptInput::IndexKeys), span.position);
            }
            let (Some(delta), Some(shape), Some(of_model)) = (layer.recurrence(), shape, c.delta)
            else {
                continue;
            };
            let rows = DeltaRows {
                qkvz: &mut rows(KeptInput::Qkvz).to_vec(),
                ba: rows(KeptInput::Ba),
            };
            let spans = [Span {
                row: 0,
                len: count,
                ..span
            }];
            let vectors = delta_vectors(delta, of_model.gate);
            let mut states = cache.states_mut(&[slot], &parts.delta);
            let eps = c.rms_norm_eps;
            cpu.delta(&shape, &vectors, rows, &spans, &mut states, eps, &mut out);
        }
    }
}
