//! Which operations are one kernel, by the rows of a pass.

use crate::{MOST_SEQUENCES, MOST_WIDE_SEQUENCES};

/// Which operations a pass fuses.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Fused {
    /// One kernel may run all layers.
    pub(in crate::engine) layers: bool,
    /// Each product normalizes its rows, which are f32, for itself. If not, a kernel normalizes them to FP16, once for all
    /// products of a block.
    pub(in crate::engine) norms: bool,
    /// A recurrence computes its rates for itself. If not, they are a product.
    pub(in crate::engine) rates: bool,
    pub(in crate::engine) sums: Sums,
}

/// What a product does whose outputs are added to the residual stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Sums {
    /// It adds them: to the stream, or, on one of several GPUs, to this GPU's share, whose rows are zero before.
    Added,
    /// As `Added`, but where this GPU's share is one product alone, it writes it.
    Written,
    /// It leaves them in parts, which the norm that follows adds up; on one of several GPUs, the sum over all of them does.
    Parts,
}

/// By the most rows of a step, and in the last row for prompts.
#[rustfmt::skip]
const TABLE: [(usize, Fused); 4] = [
    (1,                   Fused { layers: true,  norms: true,  rates: true,  sums: Sums::Added }),
    (MOST_SEQUENCES,      Fused { layers: false, norms: true,  rates: true,  sums: Sums::Added }),
    (MOST_WIDE_SEQUENCES, Fused { layers: false, norms: false, rates: false, sums: Sums::Parts }),
    (usize::MAX,          Fused { layers: false, norms: false, rates: false, sums: Sums::Written }),
];

impl Fused {
    /// In a pass over rows of prompts.
    pub(in crate::engine) const IN_PROMPTS: Fused = TABLE[TABLE.len() - 1].1;

    /// In a step of `m` rows.
    pub(in crate::engine) fn in_step(m: usize) -> Fused {
        let row = TABLE.iter().find(|(most, _)| m <= *most);
        row.map_or(Fused::IN_PROMPTS, |(_, fused)| *fused)
    }
}
