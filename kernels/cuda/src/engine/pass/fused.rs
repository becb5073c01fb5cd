//! Which operations are one kernel, by the rows of a pass.

use crate::{MOST_SEQUENCES, MOST_WIDE_SEQUENCES, PackedKind};
use nq_model::ModelConfig;
use nq_model::names::in_experts;
use nq_runtime::weights::Kinds;

/// Most rows of GGUF's blocks for which kernels for few rows are faster.
const MOST_BLOCK_ROWS: usize = 8;

/// Which operations a pass fuses.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Fused {
    /// One kernel may run all layers.
    pub(in crate::engine) layers: bool,
    /// Each product normalizes its rows, which are f32, for itself. If not, a kernel normalizes them to FP16, once for
    /// all products of a block.
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
    /// It leaves them in parts, which the norm that follows adds up; on one of several GPUs, the sum over all of them
    /// does.
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

/// Most rows of steps of a model of shape `c` whose products have kernels for few rows, on a device whose steps take
/// `together` sequences. Codes of GGUF's blocks, once most weights of each token's products are such, cost these
/// kernels more than those of wide steps (`benches/records/2026-11-30-gpu-gguf.csv`). `told` is how many layers, from the
/// first on, `kinds` knows: others are taken to be like these.
pub(in crate::engine) fn few_rows(
    c: &ModelConfig,
    kinds: Kinds<'_>,
    told: usize,
    together: usize,
) -> usize {
    let (mut blocks, mut all) = (0, 0);
    for index in 0..told {
        let linears = c.layer(index).linears().into_iter();
        for linear in linears.filter(|l| in_experts(&l.name(index)).is_none()) {
            let dims = linear.dims(c);
            let kind = PackedKind::new(kinds(&linear.name(index)), dims.cols);
            let is_block = kind.is_ok_and(|kind| kind.block_scheme().is_some());
            all += dims.rows * dims.cols;
            blocks += usize::from(is_block) * dims.rows * dims.cols;
        }
    }
    match together > MOST_SEQUENCES && 2 * blocks > all {
        true => MOST_BLOCK_ROWS,
        false => MOST_SEQUENCES,
    }
}

impl Fused {
    /// In a pass over rows of prompts.
    pub(in crate::engine) const IN_PROMPTS: Fused = TABLE[TABLE.len() - 1].1;

    /// In a step of `m` rows, of which the kernels for few rows take up to `few`: at most [`MOST_SEQUENCES`].
    pub(in crate::engine) fn in_step(m: usize, few: usize) -> Fused {
        let most = |most: usize| match most {
            MOST_SEQUENCES => few,
            most => most,
        };
        let row = TABLE.iter().find(|row| m <= most(row.0));
        row.map_or(Fused::IN_PROMPTS, |(_, fused)| *fused)
    }
}
