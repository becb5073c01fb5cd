//! One row of activations times a packed weight: the products of a decode step.

use super::batch::MOST_DEPTH;
use super::driver::{Address, Buffer, GpuInfo, LaunchShape, Operands, Stream};
use super::kernel::{kernels, names};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN};
use crate::error::Result;

/// RMSNorm of a product's input.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// `[inputs]`
    pub gain: &'a Buffer<f32>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Output of a step's product of `m` sequences.
pub enum GemvOutput<'a> {
    /// `out` `[m, rows]`, from the normalized input.
    Store(Norm<'a>, &'a mut Buffer<f32>),
    /// Added to the residual `[m, rows]`, from the input without a norm.
    Add(&'a mut Buffer<f32>),
    /// `silu(gate) * up` `[m, rows / 2]` for interleaved gate and up, from the normalized input.
    Silu(Norm<'a>, &'a mut Buffer<f32>),
    /// Logits `[m, rows]` from the normalized input, and the best of each block: at least
    /// [`super::best_len`] values (logit, row as bits) per sequence.
    Head(Norm<'a>, &'a mut Buffer<f32>, &'a mut Buffer<[f32; 2]>),
}

impl Norm<'_> {
    /// The gain, checked as an operand of a product of `inputs`.
    pub(super) fn gain(&self, o: &Operands<'_>, inputs: usize) -> Result<Address> {
        o.of("gain", self.gain, &[inputs])
    }
}

/// A [`GemvOutput`] as kernel arguments.
pub(super) struct Output<'a> {
    pub(super) norm: Option<Norm<'a>>,
    values: &'a mut Buffer<f32>,
    /// The best of each block, besides the logits.
    best: Option<&'a mut Buffer<[f32; 2]>>,
    /// `Epilogue` of `cuda/weights.cuh`.
    pub(super) epilogue: i32,
    /// Values per row.
    pub(super) width: usize,
}

impl<'a> Output<'a> {
    /// The output of a product with a weight of `rows` outputs.
    pub(super) fn new(output: GemvOutput<'a>, rows: usize) -> Self {
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

    /// The addresses of `m` rows of values, and of their best values in `blocks` blocks.
    pub(super) fn addresses(
        &self,
        o: &Operands<'_>,
        m: usize,
        blocks: usize,
    ) -> Result<(Address, Address)> {
        let best = self.best.as_deref();
        Ok((
            o.of("outputs", self.values, &[m, self.width])?,
            o.optional("best", best, &[m, blocks])?,
        ))
    }
}

kernels! {
    GEMV: GemvArgs = "gemv" in "gemv.cu",
        test "kernels/tests/cuda/main.rs::products_of_a_step", bench "gemv",
        instances names!(kinds "gemv"; "_store", "_add", "_silu", "_head");
}

/// `GemvArgs` of `cuda/gemv.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GemvArgs {
    pub(super) codes: Address,
    pub(super) meta: Address,
    pub(super) x: Address,
    pub(super) gain: Address,
    pub(super) out: Address,
    pub(super) best: Address,
    pub(super) inputs: i32,
    pub(super) rows: i32,
    pub(super) tiles: i32,
    pub(super) spans: i32,
    pub(super) groups: i32,
    pub(super) meta_bytes: i32,
    pub(super) depth: i32,
    pub(super) eps: f32,
    pub(super) scale: f32,
    pub(super) late: i32,
}

/// Warps of a block of `cuda/gemv.cu` and `cuda/experts.cu`.
pub(super) const GEMV_WARPS: usize = 8;
/// Most tiles of a block: it holds their sums in shared memory.
const MOST_TILES: usize = 256;

/// Number of blocks of a product of one row.
pub(super) fn blocks(info: &GpuInfo, w: &DeviceLinear) -> usize {
    blocks_of(info.multiprocessors, w.tiles())
}

/// A block for each of `multiprocessors`, if there are so many tiles.
fn blocks_of(multiprocessors: usize, tiles: usize) -> usize {
    multiprocessors.min(tiles).max(tiles.div_ceil(MOST_TILES))
}

/// The records of a product.
#[derive(Clone, Copy)]
pub(super) struct Records {
    pub(super) kind: PackedKind,
    pub(super) tiles: usize,
    pub(super) spans: usize,
    /// Spans that lie one behind the other.
    pub(super) run: usize,
}

/// Launch settings of a product.
pub(super) struct GemvPlan {
    pub(super) blocks: usize,
    /// Stages of a warp's ring.
    pub(super) depth: usize,
    pub(super) shared: usize,
}

impl GemvPlan {
    /// The plan for these records on `multiprocessors`; the kernel has `more` bytes of static arrays. `None`
    /// if the row of x does not fit in shared memory.
    pub(super) fn new(
        info: &GpuInfo,
        multiprocessors: usize,
        w: &Records,
        more: usize,
    ) -> Option<Self> {
        let blocks = blocks_of(multiprocessors, w.tiles);
        let bits = w.kind.bits();
        // `Passage`: records of a stage, and parts in which a record passes.
        let pairs = bits < 8 && !matches!(w.kind, PackedKind::Affine { groups: 8, .. });
        let records = if pairs { 2 } else { 1 };
        let parts = if bits == 16 { 4 } else { 1 };
        let stage = GEMV_WARPS * records * (SPAN * 2 * bits / parts + w.kind.meta_room());
        let tiles = w.tiles.div_ceil(blocks);
        // `Halves` or `Digits` per span, the warps' sums, barriers, squares, the best of each warp.
        let row = w.spans * if bits == 16 { 1024 } else { 576 };
        let sums = (tiles + GEMV_WARPS) * 16 * 4;
        let fixed = GEMV_WARPS * (8 * MOST_DEPTH + 4 + 8) + more;
        let of_tile = w.spans / w.run * w.run.div_ceil(records);
        let stages = (tiles * of_tile).div_ceil(GEMV_WARPS) * parts;
        let depth = |room: usize| {
            let room = room.saturating_sub(row + sums + fixed);
            MOST_DEPTH.min(stages).min(room / stage)
        };
        // Two blocks fit on a multiprocessor, each with a KiB of the system's, if rings are deep enough then.
        let depth = match depth(info.shared_memory.saturating_sub(1024) / 2) {
            0 | 1 => depth(info.shared_memory),
            deep => deep,
        };
        (depth > 0).then_some(GemvPlan {
            blocks,
            depth,
            shared: depth * stage + row + sums,
        })
    }
}

impl Stream {
    /// Multiplies one row of activations `x` `[inputs]` by `w`: a kernel of a decode step. `late` keeps
    /// the next kernel from starting before the previous one has ended.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn gemv(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        output: GemvOutput<'_>,
        late: bool,
    ) -> Result<()> {
        let o = self.operands("gemv");
        let info = self.gpu().info();
        let inputs = w.inputs();
        o.multiple("inputs", 8, inputs)?;
        let records = Records {
            kind: w.kind(),
            tiles: w.tiles(),
            spans: w.spans(),
            run: w.spans(),
        };
        let Some(plan) = GemvPlan::new(info, info.multiprocessors, &records, 0) else {
            let room = info.shared_memory;
            let expected = format!("a row within the {room} bytes of shared memory of {info}");
            return o.refuse("inputs", expected, inputs);
        };
        let output = Output::new(output, w.rows());
        let (out, best) = output.addresses(&o, 1, plan.blocks)?;
        let norm = output.norm;
        let p = w.args(&o)?;
        let args = GemvArgs {
            codes: p.codes,
            meta: p.meta,
            x: o.of("x", x, &[inputs])?,
            gain: norm.map_or(Ok(Address::NULL), |n| n.gain(&o, inputs))?,
            out,
            best,
            inputs: p.inputs,
            rows: p.rows,
            tiles: w.tiles() as i32,
            spans: p.spans,
            groups: p.groups,
            meta_bytes: p.meta_bytes,
            depth: plan.depth as i32,
            eps: norm.map_or(0.0, |n| n.eps),
            scale: p.scale,
            late: i32::from(late),
        };
        let shape = LaunchShape::new((plan.blocks, 1, 1), GEMV_WARPS * 32)
            .shared(plan.shared)
            .overlapping();
        // SAFETY: the operands were checked.
        unsafe {
            self.launch(
                GEMV.of_kind(output.epilogue as usize, w.kind()),
                shape,
                &args,
            )
        }
    }
}
