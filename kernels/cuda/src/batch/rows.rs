//! The product of up to 16 rows with integer codes, for devices with clusters of blocks.

use super::columns::{ColumnGroup, MOST_DEPTH, MOST_SEQUENCES, PreparedColumns};
use crate::cuda::gemv_rows::{GemvRowsArgs, WARPS};
use crate::driver::{Gpu, LaunchShape, Stream};
use crate::kernel::{Instance, SCHEMES, kernels, kind_index, names};
use crate::pack::{PackedKind, PackedShape};
use crate::product::{OutputAddresses, Product};
use nq_kernels::Result;

/// Parts that inputs are cut into, one for each block of a cluster.
const PARTS: [usize; 4] = [1, 2, 4, 8];
/// Most spans of x that one block alone has: with more, two blocks are faster.
const MOST_SPANS: usize = 24;
/// Stages of a warp's ring: with more, x comes later.
const DEPTH: usize = 2;
/// Records a warp from which on this kernel is faster than `gemv_batch`; and tiles a multiprocessor, in halves,
/// from which on it is for up to four rows, whatever the records.
const LEAST_RECORDS: usize = 3;
const LEAST_HALF_TILES: usize = 3;
/// Shared memory with which a multiprocessor takes only one block: with two on one, another has none.
const ALONE: usize = 116 << 10;

/// How a product is cut: see `cuda/gemv_rows.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RowsPlan {
    parts: usize,
    /// Most spans of a part.
    part_spans: usize,
    pub(crate) blocks: usize,
    shared: usize,
}

impl RowsPlan {
    /// The plan for `m` rows: with as few parts as have room. `None` for FP16 weights and more rows than this
    /// kernel takes, on a device without it, where nothing fits, and where `gemv_batch` is faster.
    pub(crate) fn new(gpu: &Gpu, w: &PackedShape, m: usize) -> Result<Option<Self>> {
        if w.kind == PackedKind::Fp16 || m > MOST_SEQUENCES {
            return Ok(None);
        }
        let multiprocessors = gpu.info().multiprocessors;
        let records = w.tiles * w.spans / (multiprocessors * WARPS);
        let tiles = 2 * w.tiles / multiprocessors;
        let fast = records >= LEAST_RECORDS
            || ColumnGroup::of(m) == ColumnGroup::Four && tiles >= LEAST_HALF_TILES;
        let kernel = instance(w.kind, m);
        if !fast || !gpu.has_kernel(&kernel) {
            return Ok(None);
        }
        for parts in PARTS.into_iter().filter(|&p| p <= w.spans) {
            if let Some(plan) = Self::of(gpu, w, m, parts, &kernel)? {
                return Ok(Some(plan));
            }
        }
        Ok(None)
    }

    fn of(
        gpu: &Gpu,
        w: &PackedShape,
        m: usize,
        parts: usize,
        kernel: &Instance<GemvRowsArgs>,
    ) -> Result<Option<Self>> {
        let (info, group) = (gpu.info(), ColumnGroup::of(m));
        let groups = m.div_ceil(group.rows());
        let rows = groups * group.rows();
        let part_spans = w.spans.div_ceil(parts);
        let x = groups * group.bytes(w.kind.bits(), part_spans);
        if parts == 1 && part_spans > MOST_SPANS {
            return Ok(None);
        }
        // Static arrays of the kernel: barriers, best rows.
        let fixed = (WARPS * 8 * (MOST_DEPTH + rows) + 8).next_multiple_of(128);
        let room = info.shared_memory.saturating_sub(fixed);
        let plan = |clusters: usize, shared| RowsPlan {
            parts,
            part_spans,
            blocks: clusters * parts,
            shared,
        };
        let clusters = match parts {
            1 => info.multiprocessors,
            _ => gpu.clusters_at_once(kernel, plan(1, ALONE.min(room)).shape())?,
        };
        let clusters = clusters.min(w.tiles);
        if clusters == 0 {
            return Ok(None);
        }
        // Sums of tiles that end in another warp, and of all parts of those that end in this block.
        let tiles = w.tiles.div_ceil(clusters);
        let met = WARPS
            + if parts > 1 {
                tiles.next_multiple_of(parts)
            } else {
                0
            };
        let stages = DEPTH * WARPS * w.kind.ring_bytes(info);
        let shared = stages + x + met * 16 * rows * size_of::<f32>();
        Ok((shared <= room).then_some(plan(clusters, shared.max(ALONE.min(room)))))
    }

    fn shape(&self) -> LaunchShape {
        LaunchShape::new([self.blocks, 1, 1], WARPS * 32)
            .shared(self.shared)
            .overlapping()
            .clusters_of(self.parts)
    }
}

/// The kernel for weights of integer codes.
fn instance(kind: PackedKind, m: usize) -> Instance<GemvRowsArgs> {
    let most = match m {
        ..=4 => 0,
        5..=8 => 1,
        _ => 2,
    };
    GEMV_ROWS.instance(most * SCHEMES + kind_index(kind))
}

kernels! {
    GEMV_ROWS: GemvRowsArgs = "gemv_rows" in "gemv_rows.cu",
        test "kernels/cuda/tests/cuda/batch.rs::products_of_several_sequences", bench "gemv_batch",
        instances names!(schemes "gemv_rows"; "_4", "_8", "_16");
}

impl Stream {
    /// Multiplies the rows in `x`.
    pub(super) fn multiply_rows(
        &self,
        p: &Product<'_>,
        x: &PreparedColumns,
        plan: &RowsPlan,
        to: &OutputAddresses<'_>,
    ) -> Result<()> {
        let (w, m) = (p.w, p.m);
        let (codes, meta, _) = w.operands(&p.o)?;
        let sizes = w.sizes();
        let args = GemvRowsArgs {
            codes,
            meta,
            columns: x.words,
            factors: x.factors,
            out: to.y,
            best: to.best,
            m: m as i32,
            rows: sizes.rows,
            tiles: sizes.tiles,
            spans: sizes.spans,
            groups: sizes.groups,
            meta_bytes: sizes.meta_bytes,
            parts: plan.parts as i32,
            part_spans: plan.part_spans as i32,
            depth: DEPTH as i32,
            epilogue: to.epilogue as i32,
            scheme: sizes.scheme,
            padding: [0; 1],
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch(instance(w.kind(), m), plan.shape(), &args) }
    }
}
