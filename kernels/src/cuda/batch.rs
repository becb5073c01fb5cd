//! The products of a decode step of several sequences.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Stream};
use super::gemv::{GemvOutput, Norm};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN, TILE};
use super::rows::at_least;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// Sequences that one step takes at most.
pub const MOST_SEQUENCES: usize = 16;

/// Rows of a group: columns of a tensor-core product.
const GROUP: usize = 8;
/// Warps of a block, and tiles for which it holds x: `cuda/gemv_batch.cu`.
const WARPS: usize = 8;
const TILES: usize = 4;
/// `MOST_DEPTH` of `cuda/ring.cuh`.
const MOST_DEPTH: usize = 8;

/// Rows of activations in the form that [`Stream::gemv_batch`] multiplies
/// (`cuda/columns.cuh`).
pub struct Columns {
    words: Buffer<u8>,
    factors: Buffer<f32>, // [rows], of RMSNorm
    rows: usize,
    spans: usize,
}

impl Columns {
    /// Room for `rows` rows of up to `inputs` values.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, rows: usize, inputs: usize) -> Result<Self> {
        let spans = inputs.div_ceil(SPAN);
        let bytes = Self::device_bytes(rows, inputs);
        Ok(Columns {
            words: gpu.zeros("activations", bytes)?,
            factors: gpu.zeros("activations", rows.next_multiple_of(GROUP))?,
            rows,
            spans,
        })
    }

    /// Device bytes of [`Columns::new`].
    pub fn device_bytes(rows: usize, inputs: usize) -> usize {
        rows.div_ceil(GROUP) * group_bytes(16, inputs.div_ceil(SPAN))
    }
}

/// `sizeof(DigitColumns)` or `sizeof(HalfColumns)` of `cuda/columns.cuh`: 64 inputs of a group.
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
    /// Groups of rows that one launch takes: 1 or 2.
    groups: usize,
    split: usize,
    blocks: usize,
    depth: usize,
    shared: usize,
}

impl BatchPlan {
    /// For `m` rows: two groups at once where shared memory allows it, otherwise one after the
    /// other. `None` if not even one fits.
    fn new(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Option<Self> {
        let wanted = m.div_ceil(GROUP).clamp(1, 2);
        (1..=wanted).rev().find_map(|g| Self::of(gpu, w, g))
    }

    /// The cut with the shortest path of the busiest warp: rounds of tiles times pieces of a
    /// warp, and for each few tiles the way of a piece of x and the meeting of the warps.
    fn of(gpu: &Gpu, w: &DeviceLinear, groups: usize) -> Option<Self> {
        let info = gpu.info();
        let bits = w.kind().bits();
        let tiles = w.rows().div_ceil(TILE);
        let pieces = w.inputs().div_ceil(SPAN) * bits / 4;
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
        // Sums of the warps' tiles; from sm_90 on a piece of x of each warp.
        let sums = WARPS * TILES * groups * GROUP * 20 * 4;
        let x = match info.capability >= (9, 0) {
            true => WARPS * groups * slot_bytes(bits) * 16 / bits,
            false => 0,
        };
        // Static arrays of the kernel: barriers, best rows.
        let fixed = WARPS * (8 * (MOST_DEPTH + 1) + groups * GROUP * 8);
        let room = info.shared_memory.checked_sub(sums + x + fixed)?;
        let stage = WARPS * (2048 + w.kind().meta_room());
        // A stage is filled again when the next one has come: there must be two.
        plan.depth = MOST_DEPTH.min(stages.max(2)).min(room / stage);
        plan.shared = plan.depth * stage + sums + x;
        (plan.depth >= 2).then_some(plan)
    }
}

/// Blocks of a product of `m` rows.
pub(super) fn blocks(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Option<usize> {
    BatchPlan::new(gpu, w, m).map(|p| p.blocks)
}

/// `ColumnsArgs` of `cuda/columns.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
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
#[derive(Clone, Copy, Pod, Zeroable)]
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

fn refused(what: &'static str, expected: impl ToString, found: impl ToString) -> Error {
    Error::Shape {
        op: "gemv_batch",
        what,
        expected: expected.to_string(),
        found: found.to_string(),
    }
}

/// A [`GemvOutput`] as the kernel takes it.
struct Output<'a> {
    norm: Option<Norm<'a>>,
    values: &'a mut Buffer<f32>,
    /// The best of each block, beside logits.
    best: Option<&'a mut Buffer<[f32; 2]>>,
    /// `Epilogue` of the kernel.
    epilogue: i32,
    /// Values of a row.
    width: usize,
}

impl<'a> Output<'a> {
    /// Of a product with a weight of `rows` outputs.
    fn new(output: GemvOutput<'a>, rows: usize) -> Self {
        let (norm, values, best, epilogue, width) = match output {
            GemvOutput::Store(norm, out) => (Some(norm), out, None, 0, rows),
            GemvOutput::Add(residual) => (None, residual, None, 1, rows),
            GemvOutput::Silu(norm, out) => (Some(norm), out, None, 2, rows / 2),
            GemvOutput::Head(norm, logits, best) => (Some(norm), logits, Some(best), 3, rows),
        };
        Output {
            norm,
            values,
            best,
            epilogue,
            width,
        }
    }

    /// Checks that there is room for `m` rows, made by so many blocks of `inputs` inputs.
    fn check(&self, m: usize, blocks: usize, inputs: usize) -> Result<()> {
        let at_least = |what, expected, found| at_least("gemv_batch", what, expected, found);
        if let Some(best) = &self.best {
            at_least("best", m * blocks, best.len())?;
        }
        at_least("outputs", m * self.width, self.values.len())?;
        match &self.norm {
            Some(norm) => at_least("gain", inputs, norm.gain.len()),
            None => Ok(()),
        }
    }
}

impl GemvBatchArgs {
    /// What the launches of one product share.
    fn new(w: &DeviceLinear, plan: &BatchPlan, epilogue: i32) -> Self {
        let packed = w.args();
        GemvBatchArgs {
            codes: packed.codes,
            meta: packed.meta,
            rows: packed.rows,
            tiles: w.rows().div_ceil(TILE) as i32,
            spans: packed.spans,
            groups: packed.groups,
            meta_bytes: packed.meta_bytes,
            split: plan.split as i32,
            inverse: 256usize.div_ceil(plan.split) as i32,
            depth: plan.depth as i32,
            epilogue,
            scale: packed.scale,
            ..GemvBatchArgs::zeroed()
        }
    }
}

impl Stream {
    /// `m` rows of activations `x` `[m, inputs]` times `w`, for one reading of `w`: two kernels
    /// of a decode step of several sequences. `columns` is scratch. `late` keeps the next
    /// kernels from starting before the one in front has ended.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn gemv_batch(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        output: GemvOutput<'_>,
        columns: &mut Columns,
        m: usize,
        late: bool,
    ) -> Result<()> {
        let inputs = w.inputs();
        w.check_inputs("gemv_batch")?;
        let at_least = |what, expected, found| at_least("gemv_batch", what, expected, found);
        if !(1..=MOST_SEQUENCES).contains(&m) {
            return Err(refused("rows", format!("1 to {MOST_SEQUENCES}"), m));
        }
        let plan = BatchPlan::new(self.gpu(), w, m)
            .ok_or_else(|| refused("shared memory", "room for two stages", self.gpu().info()))?;
        at_least("values of x", m * inputs, x.len())?;
        at_least("rows of columns", m, columns.rows)?;
        at_least("spans of columns", inputs.div_ceil(SPAN), columns.spans)?;
        let output = Output::new(output, w.rows());
        output.check(m, plan.blocks, inputs)?;
        self.prepare_columns(w, x, output.norm, columns, m, late)?;
        self.multiply_columns(w, &plan, columns, &output, m)
    }

    /// Writes the `m` rows of `x` to `columns` as the product with `w` reads them. Sizes are
    /// checked.
    fn prepare_columns(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        norm: Option<Norm<'_>>,
        columns: &Columns,
        m: usize,
        late: bool,
    ) -> Result<()> {
        let spans = w.args().spans;
        let args = ColumnsArgs {
            x: x.at(0),
            gain: norm.map_or(Address::NULL, |n| n.gain.at(0)),
            columns: columns.words.at(0),
            factors: columns.factors.at(0),
            inputs: w.inputs() as i32,
            spans,
            eps: norm.map_or(0.0, |n| n.eps),
            late: i32::from(late),
        };
        let parts = match norm {
            Some(_) => 1,
            None => (spans as usize).div_ceil(16),
        };
        let shape = LaunchShape {
            grid: (m, parts, 1),
            threads: 512,
            shared: 0,
            overlap: true,
        };
        let kind = match w.kind() {
            PackedKind::Fp16 => "fp16",
            kind => kind.name(),
        };
        // SAFETY: the arguments are `ColumnsArgs` of the kernel; x and the columns hold m rows
        // of the weight's inputs, as checked.
        unsafe { self.launch(&format!("columns_{kind}"), shape, &args) }
    }

    /// `m` rows in `columns` times `w`, in launches of as many groups as `plan` says. Sizes are
    /// checked.
    fn multiply_columns(
        &self,
        w: &DeviceLinear,
        plan: &BatchPlan,
        columns: &Columns,
        output: &Output<'_>,
        m: usize,
    ) -> Result<()> {
        let together = plan.groups * GROUP;
        let name = format!("gemv_batch_{}_{together}", w.kind().kernel_part());
        let shape = LaunchShape {
            grid: (plan.blocks, 1, 1),
            threads: WARPS * 32,
            shared: plan.shared,
            overlap: true,
        };
        let mut args = GemvBatchArgs::new(w, plan, output.epilogue);
        let group_bytes = group_bytes(w.kind().bits(), args.spans as usize);
        for first in (0..m).step_by(together) {
            args.m = (m - first).min(together) as i32;
            args.columns = columns.words.at(first / GROUP * group_bytes);
            let factors = || columns.factors.at(first);
            args.factors = output.norm.map_or(Address::NULL, |_| factors());
            args.out = output.values.at(first * output.width);
            if let Some(best) = &output.best {
                args.best = best.at(first * plan.blocks);
            }
            // SAFETY: the arguments are `GemvBatchArgs` of the kernel; sizes were checked
            // against the shape that the weight has, and the buffers are borrowed by the
            // caller, who keeps them while the stream works (their owners wait for it before
            // freeing).
            unsafe { self.launch(&name, shape, &args)? };
        }
        Ok(())
    }
}
