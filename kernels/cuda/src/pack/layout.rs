//! Constants and orders of packed weights.

/// Rows of a tile.
pub const TILE: usize = 16;
/// Inputs of a span.
pub const SPAN: usize = crate::cuda::weights::SPAN;

/// The place of input `k` of a row in operand order, in which rows of FP16 activations are stored
/// (`operand_index` of `cuda/common.cuh`): a permutation of each 32 inputs.
pub fn operand_index(k: usize) -> usize {
    k & !31 | (k >> 2 & 1) << 4 | (k >> 1 & 1) << 3 | (k >> 3 & 3) << 1 | k & 1
}

/// How the rows of several weights are stacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    /// One after another.
    Concat,
    /// Two of equal height, alternating every eight rows (gate and up).
    Interleave,
}
