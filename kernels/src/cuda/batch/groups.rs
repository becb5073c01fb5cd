//! The product of rows in groups of eight, for up to 16 rows and any device.

use super::{Columns, Group, MOST_DEPTH};
use crate::cuda::driver::{Address, Gpu, LaunchShape, Operands, Stream, has_small_blocks};
use crate::cuda::gemv::Output;
use crate::cuda::kernel::{kernels, names};
use crate::cuda::linear::DeviceLinear;
use crate::error::Result;

/// Rows of a group, which are columns of a tensor-core product.
const GROUP: usize = Group::Eight.rows();
/// Warps of a block, and tiles for which it holds x (`cuda/gemv_batch.cu`).
const WARPS: usize = 8;
const TILES: usize = 4;

/// How a product is cut: see `cuda/gemv_batch.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GroupsPlan {
    /// Groups of rows per launch: 1 or 2.
    groups: usize,
    split: usize,
    blocks: usize,
    depth: usize,
    shared: usize,
}

impl GroupsPlan {
    /// The plan for `m` rows: two groups at once if shared memory allows, otherwise one after the
    /// other. `None` if not even one fits.
    pub(super) fn new(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Option<Self> {
        let wanted = m.div_ceil(GROUP).clamp(1, 2);
        (1..=wanted).rev().find_map(|g| Self::of(gpu, w, g))
    }

    /// The cut with the shortest path for the busiest warp: rounds of tiles times pieces of a
    /// warp, plus, for each few tiles, the transfer of a piece of x and the combination of the
    /// warps' sums.
    fn of(gpu: &Gpu, w: &DeviceLinear, groups: usize) -> Option<Self> {
        let info = gpu.info();
        let (bits, kind_stages) = (w.kind().bits(), w.kind().stages());
        let tiles = w.tiles();
        let pieces = w.spans() * kind_stages;
        let mut best: Option<(f64, GroupsPlan, usize)> = None;
        for split in 1..=WARPS.min(pieces) {
            let teams = WARPS / split;
            let blocks = info.multiprocessors.min(tiles.div_ceil(teams)).max(1);
            let rounds = tiles.div_ceil(blocks * teams);
            let share = pieces.div_ceil(split);
            let cost = (rounds * share) as f64
                + rounds.div_ceil(TILES) as f64 * (share as f64 + 1.5)
                + 0.01 * teams as f64;
            if best.is_none_or(|b| cost < b.0) {
                let plan = GroupsPlan {
                    groups,
                    split,
                    blocks,
                    depth: 0,
                    shared: 0,
                };
                best = Some((cost, plan, rounds * share));
            }
        }
        let (_, mut plan, stages) = best?;
        // Sums of the warps' tiles; from sm_90 on, where there is room, a piece of x per warp.
        let sums = WARPS * TILES * groups * GROUP * 20 * 4;
        let x = if info.capability >= (9, 0) && !has_small_blocks(info.shared_memory) {
            WARPS * groups * Group::Eight.slot_bytes(bits) * 4 / kind_stages
        } else {
            0
        };
        // Static arrays of the kernel: barriers, best rows.
        let fixed = WARPS * (8 * (MOST_DEPTH + 1) + groups * GROUP * 8);
        let room = info.shared_memory.checked_sub(sums + x + fixed)?;
        let stage = WARPS * (w.kind().stage_bytes() + w.kind().meta_room());
        // A stage is refilled when the next one has arrived: there must be two.
        plan.depth = MOST_DEPTH.min(stages.max(2)).min(room / stage);
        plan.shared = plan.depth * stage + sums + x;
        (plan.depth >= 2).then_some(plan)
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }
}

kernels! {
    GEMV_BATCH: GemvBatchArgs = "gemv_batch" in "gemv_batch.cu",
        test "kernels/tests/cuda/batch.rs::products_of_several_sequences", bench "gemv_batch",
        instances names!(kinds "gemv_batch"; "_8", "_16");
}

/// `GemvBatchArgs` of `cuda/gemv_batch.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct GemvBatchArgs {
    codes: Address,
    meta: Address,
    columns: Address,
    factors: Address,
    out: Address,
    best: Address,
    m: i32,
    rows: i32,
    tiles: i32,
    spans: i32,
    groups: i32,
    meta_bytes: i32,
    split: i32,
    inverse: i32,
    depth: i32,
    epilogue: i32,
    scale: f32,
    pad: i32,
}

impl Stream {
    /// Multiplies the `m` rows in `columns` by `w`, in launches of as many groups as `plan` says.
    pub(super) fn multiply_groups(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        plan: &GroupsPlan,
        columns: &Columns,
        output: &Output<'_>,
        m: usize,
    ) -> Result<()> {
        let together = plan.groups * GROUP;
        let kernel = GEMV_BATCH.of_kind(plan.groups - 1, w.kind());
        let shape = LaunchShape::new((plan.blocks, 1, 1), WARPS * 32)
            .shared(plan.shared)
            .overlapping();
        let group_bytes = Group::Eight.bytes(w.kind().bits(), w.spans());
        let words = o.of("columns", &columns.words, &[m.div_ceil(GROUP), group_bytes])?;
        let factors = output.norm.map(|_| &columns.factors);
        let factors = o.optional("factors", factors, &[m])?;
        let (out, best) = output.addresses(o, m, plan.blocks)?;
        let packed = w.args(o)?;
        for first in (0..m).step_by(together) {
            let further = |from: Address, bytes: usize| match from {
                Address::NULL => from,
                from => from.plus(first * bytes),
            };
            let args = GemvBatchArgs {
                codes: packed.codes,
                meta: packed.meta,
                columns: words.plus(first / GROUP * group_bytes),
                factors: further(factors, size_of::<f32>()),
                out: further(out, output.width * size_of::<f32>()),
                best: further(best, plan.blocks * size_of::<[f32; 2]>()),
                m: (m - first).min(together) as i32,
                rows: packed.rows,
                tiles: w.tiles() as i32,
                spans: packed.spans,
                groups: packed.groups,
                meta_bytes: packed.meta_bytes,
                split: plan.split as i32,
                inverse: 256usize.div_ceil(plan.split) as i32,
                depth: plan.depth as i32,
                epilogue: output.epilogue,
                scale: packed.scale,
                pad: 0,
            };
            // SAFETY: the operands were checked, for all rows.
            unsafe { self.launch(kernel, shape, &args)? };
        }
        Ok(())
    }
}
