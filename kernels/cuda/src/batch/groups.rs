//! The product of rows in groups of eight, for up to 16 rows and any device.

use super::columns::{ColumnGroup, MOST_DEPTH, PreparedColumns};
use crate::cuda::gemv_batch::{GemvBatchArgs, TILES, WARPS};
use crate::driver::{Address, GpuInfo, LaunchShape, Stream};
use crate::kernel::{kernels, names};
use crate::pack::PackedShape;
use crate::product::{OutputAddresses, Product, cheapest};
use nq_kernels::Result;

/// Rows of a group, which are columns of a tensor-core product.
const GROUP: usize = ColumnGroup::Eight.rows();

/// How a product is cut: see `cuda/gemv_batch.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GroupsPlan {
    /// Groups of rows per launch: 1 or 2.
    groups: usize,
    split: usize,
    pub(crate) blocks: usize,
    depth: usize,
    shared: usize,
}

impl GroupsPlan {
    /// The plan for `m` rows: two groups at once if shared memory allows, otherwise one after the
    /// other. `None` if not even one fits.
    pub(crate) fn new(info: &GpuInfo, w: &PackedShape, m: usize) -> Option<Self> {
        let wanted = m.div_ceil(GROUP).clamp(1, 2);
        (1..=wanted).rev().find_map(|g| Self::of(info, w, g))
    }

    /// The cut with the shortest path for the busiest warp: rounds of tiles times pieces of a
    /// warp, plus, for each few tiles, the transfer of a piece of x and the combination of the
    /// warps' sums.
    fn of(info: &GpuInfo, w: &PackedShape, groups: usize) -> Option<Self> {
        let (bits, kind_stages) = (w.kind.bits(), w.kind.stages());
        let tiles = w.tiles;
        let pieces = w.spans * kind_stages;
        let cuts = (1..=WARPS.min(pieces)).map(|split| {
            let teams = WARPS / split;
            let blocks = info.multiprocessors.min(tiles.div_ceil(teams)).max(1);
            let rounds = tiles.div_ceil(blocks * teams);
            let share = pieces.div_ceil(split);
            let cost = (rounds * share) as f64
                + rounds.div_ceil(TILES) as f64 * (share as f64 + 1.5)
                + 0.01 * teams as f64;
            (cost, (split, blocks, rounds * share))
        });
        let (split, blocks, stages) = cheapest(cuts)?;
        // Sums of the warps' tiles; from sm_90 on, where there is room, a piece of x per warp.
        let sums = WARPS * TILES * groups * GROUP * 20 * 4;
        let x = if info.has_large_blocks() {
            WARPS * groups * ColumnGroup::Eight.slot_bytes(bits) * 4 / kind_stages
        } else {
            0
        };
        // Static arrays of the kernel: barriers, best rows.
        let fixed = WARPS * (8 * (MOST_DEPTH + 1) + groups * GROUP * 8);
        let room = info.shared_memory.checked_sub(sums + x + fixed)?;
        let stage = WARPS * w.kind.ring_bytes(info);
        // A stage is refilled when the next one has arrived: there must be two.
        let depth = MOST_DEPTH.min(stages.max(2)).min(room / stage);
        (depth >= 2).then_some(GroupsPlan {
            groups,
            split,
            blocks,
            depth,
            shared: depth * stage + sums + x,
        })
    }
}

kernels! {
    GEMV_BATCH: GemvBatchArgs = "gemv_batch" in "gemv_batch.cu",
        test "kernels/cuda/tests/cuda/batch.rs::products_of_several_sequences", bench "gemv_batch",
        instances names!(kinds "gemv_batch"; "_8", "_16");
}

impl Stream {
    /// Multiplies the rows in `x`, in launches of as many groups as `plan` says.
    pub(super) fn multiply_groups(
        &self,
        p: &Product<'_>,
        x: &PreparedColumns,
        plan: &GroupsPlan,
        to: &OutputAddresses<'_>,
    ) -> Result<()> {
        let (w, m) = (p.w, p.m);
        let together = plan.groups * GROUP;
        let kernel = GEMV_BATCH.of_kind(plan.groups - 1, w.kind());
        let shape = LaunchShape::new([plan.blocks, 1, 1], WARPS * 32)
            .shared(plan.shared)
            .overlapping();
        let group_bytes = ColumnGroup::Eight.bytes(w.kind().bits(), w.spans());
        let (codes, meta, scale) = w.operands(&p.o)?;
        let sizes = w.sizes();
        for first in (0..m).step_by(together) {
            let further = |from: Address, bytes: usize| match from {
                Address::NULL => from,
                from => from.plus(first * bytes),
            };
            let args = GemvBatchArgs {
                codes,
                meta,
                columns: x.words.plus(first / GROUP * group_bytes),
                factors: further(x.factors, size_of::<f32>()),
                out: further(to.y, to.width * size_of::<f32>()),
                best: further(to.best, plan.blocks * size_of::<[f32; 2]>()),
                m: (m - first).min(together) as i32,
                rows: sizes.rows,
                tiles: sizes.tiles,
                spans: sizes.spans,
                groups: sizes.groups,
                meta_bytes: sizes.meta_bytes,
                split: plan.split as i32,
                inverse: 256usize.div_ceil(plan.split) as i32,
                depth: plan.depth as i32,
                epilogue: to.epilogue as i32,
                scale,
                scheme: sizes.scheme,
            };
            // SAFETY: the operands were checked, for all rows.
            unsafe { self.launch(kernel, shape, &args)? };
        }
        Ok(())
    }
}
