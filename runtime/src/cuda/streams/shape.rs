//! Sizes of layers that draft.

use nq_kernels::cuda::MOST_RUN;

/// Rows of prompts computed together.
pub(super) const ROWS: usize = 512;

/// Places for drafted tokens: more than a step can check, and a power of two.
pub(super) const RING: usize = 2 * MOST_RUN;

pub(super) const WHAT: &str = "a layer that drafts";

/// Sizes of a layer that drafts.
#[derive(Clone, Copy)]
pub(super) struct HeadShape {
    pub(super) hidden: usize,
    /// Of the target's streams that a row has, side by side.
    pub(super) streams: usize,
    /// Heads of queries, and of keys and values.
    pub(super) heads: (usize, usize),
    pub(super) head_dim: usize,
    /// Of the products that attention begins with.
    pub(super) qkv: usize,
    pub(super) mlp: usize,
    /// Tokens that may be fed, and that may be drafted.
    pub(super) vocab: usize,
    pub(super) drafted: usize,
}

impl HeadShape {
    /// Width of what attention gives.
    pub(super) fn attended(&self) -> usize {
        self.heads.0 * self.head_dim
    }
}
