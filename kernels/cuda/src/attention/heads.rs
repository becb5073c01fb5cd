//! Widths of heads, and what kernels read of them.

use crate::cuda::rows::{self, HeadVectors};
use crate::driver::Address;

/// The usual width of a head, which all kernels of attention serve.
pub const HEAD_DIM: usize = rows::HEAD_DIM;

/// The other width that steps and prompts serve. Behind the queries of each such head stand the gates of its output
/// (arXiv 2505.06708), and only its first [`WIDE_ROTARY_DIMS`] values turn with the position.
pub const WIDE_HEAD_DIM: usize = rows::WIDE_HEAD_DIM;

/// Values of a wide head that the rotary embedding turns.
pub const WIDE_ROTARY_DIMS: usize = 64;

/// Values of a head of `width` that the rotary embedding turns.
pub const fn rotary_dims(width: usize) -> usize {
    if width == WIDE_HEAD_DIM {
        WIDE_ROTARY_DIMS
    } else {
        width
    }
}

/// Widths of a head in a row of products of `heads` query and `kv_heads` key heads: wide ones have gates.
pub(crate) const fn row_heads(width: usize, heads: usize, kv_heads: usize) -> usize {
    let gates = if width == WIDE_HEAD_DIM { heads } else { 0 };
    heads + gates + 2 * kv_heads
}

impl HeadVectors {
    /// Neither norms nor biases.
    pub(crate) const NONE: Self = HeadVectors {
        gains: [Address::NULL; 2],
        biases: [Address::NULL; 3],
    };
}
