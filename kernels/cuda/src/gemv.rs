//! One row of activations times a packed weight: the products of a decode step.

use super::driver::{Buffer, GpuInfo, LaunchShape, Stream};
use super::kernel::{Instance, kernels, kind_index, names};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, PackedShape};
use super::product::{
    Epilogue, Inputs, Norm, OutputAddresses, OutputMemory, PlannedRows, Product, ProductOutput,
    cheapest,
};
use crate::cuda::gemv::GemvArgs;
pub(super) use crate::cuda::gemv::WARPS as GEMV_WARPS;
use nq_kernels::Result;

/// Output of a step's product of `m` sequences.
pub enum GemvOutput<'a> {
    /// `out` `[m, rows]`, from the input, which is normalized first if there is a norm.
    Store(Option<Norm<'a>>, &'a mut Buffer<f32>),
    /// Added to the residual `[m, rows]`, from the input without a norm.
    Add(&'a mut Buffer<f32>),
    /// `silu(gate) * up` `[m, rows / 2]` for interleaved gate and up, likewise.
    Silu(Option<Norm<'a>>, &'a mut Buffer<f32>),
    /// Logits `[m, rows]`, likewise, and the best of each block: at least
    /// [`super::best_len`] values (logit, row as bits) per sequence.
    Head(
        Option<Norm<'a>>,
        &'a mut Buffer<f32>,
        &'a mut Buffer<[f32; 2]>,
    ),
}

impl<'a> From<GemvOutput<'a>> for ProductOutput<'a> {
    fn from(output: GemvOutput<'a>) -> Self {
        let (epilogue, norm, to) = match output {
            GemvOutput::Store(norm, y) => (Epilogue::Store, norm, OutputMemory::Full(y)),
            GemvOutput::Add(y) => (Epilogue::Add, None, OutputMemory::Full(y)),
            GemvOutput::Silu(norm, y) => (Epilogue::Silu, norm, OutputMemory::Full(y)),
            GemvOutput::Head(norm, y, best) => (Epilogue::Head, norm, OutputMemory::Head(y, best)),
        };
        ProductOutput { epilogue, norm, to }
    }
}

kernels! {
    GEMV: GemvArgs = "gemv" in "gemv.cu",
        test "kernels/cuda/tests/cuda/mod.rs::products_of_a_step", bench "gemv",
        instances names!(kinds "gemv"; "");
    GEMV_SHORT: GemvArgs = "gemv_short" in "gemv.cu",
        test "kernels/cuda/tests/cuda/mod.rs::products_of_a_step", bench "gemv",
        instances names!(schemes "gemv"; "_short");
}

/// Most spans per warp, of 2 to 8 bits, for the kernel that keeps them in registers: measured
/// on an H200.
const fn short_spans(bits: usize) -> usize {
    match bits {
        2..=6 => 4,
        8 => 1,
        _ => 0,
    }
}

/// How a product is cut into shares of warps: see `cuda/gemv.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WarpCut {
    /// Warps that share a tile.
    pub(super) split: usize,
    pub(super) blocks: usize,
    /// Spans of the busiest warp, over all its tiles.
    spans: usize,
}

impl WarpCut {
    /// The cut with the shortest path for the busiest warp: rounds of tiles times (spans of a warp
    /// plus the combination of the warps' sums).
    fn new(multiprocessors: usize, w: &PackedShape) -> Self {
        // Weights of the terms as measured on an H200.
        let span_cost = match w.kind.bits() {
            2..=4 => 1.0,
            5 => 1.1,
            6 => 1.2,
            8 => 1.4,
            _ => 1.6,
        };
        let cuts = (1..=GEMV_WARPS.min(w.spans)).map(|split| {
            let groups = GEMV_WARPS / split;
            let blocks = multiprocessors.min(w.tiles.div_ceil(groups)).max(1);
            let rounds = w.tiles.div_ceil(blocks * groups);
            let spans = w.spans.div_ceil(split);
            // On ties, prefers more blocks, i.e. smaller groups.
            let cost = rounds as f64 * (spans as f64 * span_cost + 1.0) + 0.01 * groups as f64;
            (cost, WarpCut::of(split, blocks, rounds * spans))
        });
        cheapest(cuts).unwrap_or(WarpCut::of(1, 1, 0))
    }

    fn of(split: usize, blocks: usize, spans: usize) -> Self {
        WarpCut {
            split,
            blocks,
            spans,
        }
    }
}

/// Shared memory that a block needs for its row of inputs: `Halves` or `Digits` of
/// `cuda/activations.cuh` per span.
fn row_bytes(w: &PackedShape) -> usize {
    w.spans * if w.kind.bits() == 16 { 1024 } else { 592 }
}

/// Static arrays of a kernel with rings: the warps' sums and squares, barriers.
const FIXED_BYTES: usize = GEMV_WARPS * (2 * 16 * 4 + 4 + 8 * 8);

/// Launch settings of a product.
pub(super) struct GemvPlan {
    pub(super) cut: WarpCut,
    /// Stages in shared memory; 0 keeps them in registers.
    pub(super) depth: usize,
    pub(super) shared: usize,
}

impl GemvPlan {
    /// The plan on `multiprocessors`, of a kernel with `more` bytes of static arrays. `None` if the row of x does not fit
    /// in shared memory, for a head and FP16 with a stage of weights beside it.
    pub(super) fn new(
        info: &GpuInfo,
        multiprocessors: usize,
        w: &PackedShape,
        head: bool,
        more: usize,
    ) -> Option<Self> {
        let cut = WarpCut::new(multiprocessors, w);
        let bits = w.kind.bits();
        let row = row_bytes(w);
        let room = info.shared_memory.checked_sub(row + FIXED_BYTES + more)?;
        let stage = GEMV_WARPS * w.kind.ring_bytes(info);
        // With 99 KiB and rows of 25,600 inputs, as in Qwen3-32B, stages of 5 and 6 bits fit in registers alone.
        let in_registers = !head && bits != 16;
        let short = cut.spans <= short_spans(bits) || room < stage;
        let depth = if in_registers && short {
            0
        } else {
            let deepest = if head { 3 } else { 4 };
            Some(deepest.min(cut.spans * w.kind.stages()).min(room / stage)).filter(|&d| d > 0)?
        };
        let shared = depth * stage + row;
        Some(GemvPlan { cut, depth, shared })
    }
}

impl GemvPlan {
    /// The kernel for this plan.
    fn kernel(&self, kind: PackedKind) -> Instance<GemvArgs> {
        match self.depth {
            // There is none for FP16, which always has many spans.
            0 => GEMV_SHORT.instance(kind_index(kind)),
            _ => GEMV.instance(kind_index(kind)),
        }
    }
}

impl Stream {
    /// Multiplies one row of activations `x` `[inputs]` by `w`: a kernel of a decode step. With `holds_dependents`,
    /// the next kernel (a programmatic dependent launch) does not start before the previous one has ended.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn gemv(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        output: GemvOutput<'_>,
        holds_dependents: bool,
    ) -> Result<()> {
        let head = matches!(output, GemvOutput::Head(..));
        let asked = PlannedRows::Row { head };
        let p = Product::new(self.operands("gemv"), w, Inputs::Full(x), 1, asked);
        self.multiply(
            Product {
                holds_dependents,
                ..p
            },
            output.into(),
        )
    }

    /// The launch of [`Stream::gemv`].
    pub(super) fn multiply_row(
        &self,
        p: &Product<'_>,
        plan: &GemvPlan,
        to: &OutputAddresses<'_>,
    ) -> Result<()> {
        let (o, w) = (&p.o, p.w);
        let (codes, meta, scale) = w.operands(o)?;
        let sizes = w.sizes();
        let args = GemvArgs {
            codes,
            meta,
            x: p.x()?,
            gain: to.gain(o, w.inputs())?,
            out: to.y,
            best: to.best,
            inputs: w.inputs() as i32,
            rows: sizes.rows,
            tiles: sizes.tiles,
            spans: sizes.spans,
            groups: sizes.groups,
            meta_bytes: sizes.meta_bytes,
            split: plan.cut.split as i32,
            inverse: 256usize.div_ceil(plan.cut.split) as i32,
            depth: plan.depth as i32,
            eps: to.eps(),
            scale,
            holds_dependents: i32::from(p.holds_dependents),
            epilogue: to.epilogue as i32,
            scheme: sizes.scheme,
        };
        let shape = LaunchShape::new([plan.cut.blocks, 1, 1], GEMV_WARPS * 32)
            .shared(plan.shared)
            .overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(plan.kernel(w.kind()), shape, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::{AffineScheme, Bits, Group, Zeros};
    use nq_kernels::registry::WeightKind;

    /// The plan for `[5120, inputs]` on a GPU whose blocks have `shared_memory` bytes.
    fn depth(
        (bits, zeros): (Bits, Zeros),
        inputs: usize,
        shared_memory: usize,
        head: bool,
    ) -> Option<usize> {
        let scheme = AffineScheme::new(bits, Group::Size(64), zeros).two_level(Bits::B8);
        let kind = WeightKind::Affine {
            scheme,
            act_order: false,
        };
        let info = GpuInfo {
            multiprocessors: 128,
            shared_memory,
            ..GpuInfo::default()
        };
        let w = PackedShape::new(PackedKind::new(kind, inputs).unwrap(), 5120, inputs);
        let plan = GemvPlan::new(&info, info.multiprocessors, &w, head, 0)?;
        assert!(plan.shared + FIXED_BYTES <= shared_memory);
        Some(plan.depth)
    }

    #[test]
    fn weights_go_to_registers_where_rows_leave_no_room_for_them() {
        for codes in [(Bits::B5, Zeros::Integer), (Bits::B6, Zeros::None)] {
            assert_eq!(depth(codes, 25_600, 99 << 10, false), Some(0));
            assert_eq!(depth(codes, 25_600, 99 << 10, true), None);
            assert!(depth(codes, 25_600, 163 << 10, false) > Some(0));
            assert!(depth(codes, 9728, 99 << 10, false) > Some(0));
        }
    }
}
