//! Takes the latest rows out of states again: a state cannot be shortened, but it can be made again from the one before
//! these rows and from what they brought into it. So drafted tokens can be checked by rows of one forward.

use super::cache::LayerCache;
use super::weights::{CpuLayer, delta_vectors};
use crate::{Cpu, DeltaRows, Span};
use nq_model::ModelConfig;
use nq_runtime::states::delta_shape;

/// The inputs of recurrences in the latest forward, for the rows of sequences that may be cut within them.
#[derive(Default)]
pub(crate) struct KeptRows {
    /// The sequences, and their rows among those kept.
    sequences: Vec<(usize, Span)>,
    rows: usize,
    layers: Vec<Inputs>,
}

/// What a layer's recurrence reads, for all rows kept.
#[derive(Default)]
struct Inputs {
    qkvz: Vec<f32>,
    ba: Vec<f32>,
}

impl KeptRows {
    /// Forgets the rows of the forward before, and has those of `sequences` (slot, length, rows) kept.
    pub(super) fn begin(&mut self, sequences: impl Iterator<Item = (usize, usize, usize)>) {
        self.sequences.clear();
        self.rows = 0;
        for (slot, position, len) in sequences {
            let row = self.rows;
            self.sequences.push((slot, Span { row, len, position }));
            self.rows += len;
        }
    }

    /// Keeps, of the inputs of a layer's recurrence, the rows of each span whose sequence is to be kept.
    pub(super) fn keep(
        &mut self,
        layer: usize,
        spans: impl Iterator<Item = (usize, Span)>,
        qkvz: &[f32],
        ba: &[f32],
        rows: usize,
    ) {
        if self.sequences.is_empty() {
            return;
        }
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, Inputs::default);
        }
        let to = &mut self.layers[layer];
        to.qkvz.clear();
        to.ba.clear();
        for (_, span) in spans.filter(|(slot, _)| self.sequences.iter().any(|s| s.0 == *slot)) {
            for (to, all) in [(&mut to.qkvz, qkvz), (&mut to.ba, ba)] {
                let width = all.len() / rows;
                to.extend_from_slice(&all[span.row * width..][..span.len * width]);
            }
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
        let shape = delta_shape(c);
        let mut out = vec![0.0; count * shape.values()];
        for (index, (layer, cache)) in layers.iter().zip(caches).enumerate() {
            let Some(delta) = layer.recurrence() else {
                continue;
            };
            let Inputs { qkvz, ba } = &self.layers[index];
            let rows = |all: &[f32]| {
                let width = all.len() / self.rows;
                all[span.row * width..][..count * width].to_vec()
            };
            let rows = DeltaRows {
                qkvz: &mut rows(qkvz),
                ba: &rows(ba),
            };
            let spans = [Span {
                row: 0,
                len: count,
                ..span
            }];
            let vectors = delta_vectors(delta);
            let mut states = cache.states_mut(&[slot]);
            let eps = c.rms_norm_eps;
            cpu.delta(&shape, &vectors, rows, &spans, &mut states, eps, &mut out);
        }
    }
}
