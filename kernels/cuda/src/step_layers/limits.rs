//! Numbers that the kernel of all layers has too.

pub(super) use crate::cuda::layers::{
    LAYERS_WARPS as WARPS, MOST_GROUP, MOST_LAYERS, MOST_PAGES, MOST_PARTS, MOST_RING, MOST_ROUTE,
    MOST_SOURCES, PHASES, PRODUCTS, TEAM,
};
pub(super) use crate::cuda::layers_cluster::CLUSTER;
pub(super) use crate::cuda::layers_trellis::MOST_STRIP_PARTS;

/// Size of `SpanDigits` of `cuda/products.cuh`.
pub(super) const DIGITS_BYTES: usize = 576;

/// Most bytes of `BlockDigits` of `cuda/layers_trellis.cuh`.
pub(super) const BLOCK_DIGITS_BYTES: usize = 528;

/// Most bytes that a stage of the ring has of keys and values: those of `cuda/layers_attention.cuh` in int8.
pub(super) const PAGE_STAGE: usize = 8320;

/// Bytes of shared memory in front of the numbers of parts: `COUNTS` of `cuda/layers_block.cuh`.
pub(super) const HEAD_BYTES: usize = 1152;
