//! The products of a decode step of several sequences.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Operands, Stream};
use super::gemv::{self, GemvOutput, Norm, Output};
use super::kernel::{kernels, names};
use super::linear::DeviceLinear;
use super::pack::SPAN;
use crate::error::Result;

/// Most sequences in one step.
pub const MOST_SEQUENCES: usize = 16;

/// Rows of a group, which are columns of a tensor-core product.
const GROUP: usize = 8;
/// Warps of a block, and tiles for which it holds x (`cuda/gemv_batch.cu`).
const WARPS: usize = 8;
const TILES: usize = 4;
/// `MOST_DEPTH` of `cuda/ring.cuh`.
const MOST_DEPTH: usize = 8;

/// Rows of activations in the layout that [`Stream::gemv_batch`] multiplies
/// (`cuda/columns.cuh`).
pub struct Columns {
    words: Buffer<u8>,
    factors: Buffer<f32>, // [rows], of RMSNorm
    rows: usize,
    spans: usize,
}

impl Columns {
    /// Allocates columns for `rows` rows of up to `inputs` values.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](crate::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, rows: usize, inputs: usize) -> Result<Self> {
        let spans = inputs.div_ceil(SPAN);
        let bytes = rows.div_ceil(GROUP) * group_bytes(16, spans);
        Ok(Columns {
            words: gpu.zeros("activations", bytes)?,
            factors: gpu.zeros("activations", rows.next_multiple_of(GROUP))?,
            rows,
            spans,
        })
    }
}

/// `sizeof(DigitColumns)` or `sizeof(HalfColumns)` of `cuda/columns.cuh`: 64 inputs of one group.
const fn slot_bytes(bits: usize) -> usize {
    match bits {
        16 => 2048,
        _ => 1024 + 32 + 64,
    }
}

/// Bytes of a group of rows.
const fn group_bytes(bits: usize, spans: usize) -> usize {
    spans * SPAN / 64 * slot_bytes(bits)
}

/// How a product is cut: see `cuda/gemv_batch.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BatchPlan {
    /// Groups of rows per launch: 1 or 2.
    groups: usize,
    split: usize,
    blocks: usize,
    depth: usize,
    shared: usize,
}

impl BatchPlan {
    /// The plan for `m` rows: two groups at once if shared memory allows, otherwise one after the
    /// other. `None` if not even one fits.
    fn new(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Option<Self> {
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
        let mut best: Option<(f64, BatchPlan, usize)> = None;
        for split in 1..=WARPS.min(pieces) {
            let teams = WARPS / split;
            let blocks = info.multiprocessors.min(tiles.div_ceil(teams)).max(1);
            let rounds = tiles.div_ceil(blocks * teams);
            let share = pieces.div_ceil(split);
            let cost = (rounds * share) as f64
                + rounds.div_ceil(TILES) as f64 * (share as f64 + 1.5)
                + 0.01 * teams as f64;
            if best.is_none_or(|b| cost < b.0) {
                let plan = BatchPlan {
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
        // Sums of the warps' tiles; from sm_90 on, a piece of x per warp.
        let sums = WARPS * TILES * groups * GROUP * 20 * 4;
        let x = if info.capability >= (9, 0) {
            WARPS * groups * slot_bytes(bits) * 4 / kind_stages
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
}

/// Blocks of a product of `m` rows: the values per row that `best` of [`GemvOutput::Head`] must hold.
pub fn best_len(gpu: &Gpu, w: &DeviceLinear, m: usize) -> usize {
    match m {
        1 => gemv::blocks(gpu.info(), w),
        m => BatchPlan::new(gpu, w, m).map_or(1, |p| p.blocks),
    }
}

kernels! {
    COLUMNS: ColumnsArgs = "columns" in "columns.cu",
        test "kernels/tests/cuda/batch.rs::products_of_several_sequences", bench "gemv_batch",
        instances &["columns_int4", "columns_int8", "columns_fp16"];
    GEMV_BATCH: GemvBatchArgs = "gemv_batch" in "gemv_batch.cu",
        test "kernels/tests/cuda/batch.rs::products_of_several_sequences", bench "gemv_batch",
        instances names!(kinds "gemv_batch"; "_8", "_16");
}

/// `ColumnsArgs` of `cuda/columns.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ColumnsArgs {
    x: Address,
    gain: Address,
    columns: Address,
    factors: Address,
    inputs: i32,
    spans: i32,
    eps: f32,
    late: i32,
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
    /// Multiplies `m` rows of activations `x` `[m, inputs]` by `w`, reading `w` once: two kernels
    /// of a decode step of several sequences. `columns` is scratch. `late` keeps the next
    /// kernels from starting before the previous one has ended.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn gemv_batch(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        output: GemvOutput<'_>,
        columns: &mut Columns,
        m: usize,
        late: bool,
    ) -> Result<()> {
        let o = self.operands("gemv_batch");
        o.multiple("inputs", 8, w.inputs())?;
        o.at_least("rows", 1, m)?;
        o.at_most("rows", MOST_SEQUENCES, m)?;
        o.at_most("rows", columns.rows, m)?;
        o.at_most("spans", columns.spans, w.spans())?;
        let Some(plan) = BatchPlan::new(self.gpu(), w, m) else {
            return o.refuse("shared memory", "room for two stages", self.gpu().info());
        };
        let output = Output::new(output, w.rows());
        self.prepare_columns(&o, w, x, output.norm, columns, m, late)?;
        self.multiply_columns(&o, w, &plan, columns, &output, m)
    }

    /// Converts the `m` rows of `x` to `columns` in the layout for the product with `w`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    fn prepare_columns(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        norm: Option<Norm<'_>>,
        columns: &Columns,
        m: usize,
        late: bool,
    ) -> Result<()> {
        let (inputs, spans) = (w.inputs(), w.spans());
        let bits = w.kind().bits();
        let bytes = m.div_ceil(GROUP) * group_bytes(bits, spans);
        let args = ColumnsArgs {
            x: o.of("x", x, &[m, inputs])?,
            gain: norm.map_or(Ok(Address::NULL), |n| n.gain(o, inputs))?,
            columns: o.of("columns", &columns.words, &[bytes])?,
            factors: o.of("factors", &columns.factors, &[m])?,
            inputs: inputs as i32,
            spans: spans as i32,
            eps: norm.map_or(0.0, |n| n.eps),
            late: i32::from(late),
        };
        let parts = match norm {
            Some(_) => 1,
            None => spans.div_ceil(16),
        };
        let kernel = w.kind().order().ilog2() as usize - 2;
        let shape = LaunchShape::new((m, parts, 1), 512).overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(COLUMNS.instance(kernel), shape, &args) }
    }

    /// Multiplies the `m` rows in `columns` by `w`, in launches of as many groups as `plan` says.
    fn multiply_columns(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        plan: &BatchPlan,
        columns: &Columns,
        output: &Output<'_>,
        m: usize,
    ) -> Result<()> {
        let together = plan.groups * GROUP;
        let kernel = GEMV_BATCH.of_kind(plan.groups - 1, w.kind());
        let shape = LaunchShape::new((plan.blocks, 1, 1), WARPS * 32)
            .shared(plan.shared)
            .overlapping();
        let group_bytes = group_bytes(w.kind().bits(), w.spans());
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
