//! What each of several GPUs has of a model.

use crate::Rank;
use nq_formats::Shard;
use nq_model::ModelConfig;
use nq_runtime::interface::Split;
use std::ops::Range;

/// The part of a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct GpuPart {
    pub(super) rank: Rank,
    pub(super) split: Split,
}

impl GpuPart {
    /// True if the first layer is among its own.
    pub(super) fn begins(self) -> bool {
        self.split == Split::Tensors || self.rank.rank == 0
    }

    /// The rows of the head that it has.
    pub(super) fn head_rows(self, c: &ModelConfig) -> Range<usize> {
        let Rank { rank, ranks, .. } = self.rank;
        Shard::tensors(rank, ranks).head_rows(c)
    }

    /// The rows of the head that each rank has; `None` if each has all of them.
    pub(super) fn divided_head(self, c: &ModelConfig) -> Option<Vec<Range<usize>>> {
        let ranks = self.rank.ranks;
        let rows = (0..ranks).map(|rank| Shard::tensors(rank, ranks).head_rows(c));
        (self.head_rows(c).len() < c.vocab_size).then(|| rows.collect())
    }
}
