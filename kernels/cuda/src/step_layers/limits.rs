//! Numbers that the kernel of all layers has too.

/// `LAYERS_WARPS` of `cuda/layers.cuh`.
pub(super) const WARPS: usize = 12;

/// `TEAM` of `cuda/layers.cuh`.
pub(super) const TEAM: usize = 4;

/// `MOST_SOURCES` of `cuda/layers.cuh`.
pub(super) const MOST_SOURCES: usize = 16;

/// `MOST_PAGES` of `cuda/layers.cuh`.
pub(super) const MOST_PAGES: usize = 32;

/// `MOST_PARTS` of `cuda/layers.cuh`.
pub(super) const MOST_PARTS: usize = 4;

/// `MOST_RING` of `cuda/layers.cuh`.
pub(super) const MOST_RING: usize = 32;

/// `MOST_ROUTE` of `cuda/layers.cuh`.
pub(super) const MOST_ROUTE: usize = 16;

/// `MOST_LAYERS` of `cuda/layers.cuh`.
pub(super) const MOST_LAYERS: usize = 64;

/// `CLUSTER` of `cuda/layers_cluster.cuh`, where blocks are in clusters.
pub(super) const CLUSTER: usize = 8;

/// Size of `SpanDigits` of `cuda/products.cuh`.
pub(super) const DIGITS_BYTES: usize = 576;

/// Most bytes of `BlockDigits` of `cuda/layers_trellis.cuh`.
pub(super) const BLOCK_DIGITS_BYTES: usize = 528;

/// `MOST_STRIP_PARTS` of `cuda/layers_trellis.cuh`.
pub(super) const MOST_STRIP_PARTS: usize = 16;

/// Most bytes that a stage of the ring has of keys and values: those of `cuda/layers_attention.cuh` in int8.
pub(super) const PAGE_STAGE: usize = 8320;

/// Bytes of shared memory in front of the numbers of parts: `COUNTS` of `cuda/step_layers.cuh`.
pub(super) const HEAD_BYTES: usize = 1024;

/// `PHASES` of `cuda/layers.cuh`.
pub(super) const PHASES: usize = 5;

/// `PRODUCTS` of `cuda/layers.cuh`.
pub(super) const PRODUCTS: usize = 5;

/// `MOST_GROUP` of `cuda/layers.cuh`.
pub(super) const MOST_GROUP: usize = 8;
