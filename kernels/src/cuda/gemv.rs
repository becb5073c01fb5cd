//! One row of activations times a packed weight: the products of a decode step.

use super::driver::{Address, Buffer, Gpu, GpuInfo, LaunchShape, Stream};
use super::linear::DeviceLinear;
use super::pack::PackedKind;
use super::rows::at_least;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// RMSNorm of a product's input.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// `[inputs]`
    pub gain: &'a Buffer<f32>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// What a step's product of `m` sequences becomes.
pub enum GemvOutput<'a> {
    /// `out` `[m, rows]`, of the normalized input.
    Store(Norm<'a>, &'a mut Buffer<f32>),
    /// Added to the residual `[m, rows]`, of the input as it is.
    Add(&'a mut Buffer<f32>),
    /// `silu(gate) * up` `[m, rows / 2]` of an interleaved gate and up, of the normalized input.
    Silu(Norm<'a>, &'a mut Buffer<f32>),
    /// Logits `[m, rows]` of the normalized input, and the best of each block: at least
    /// [`best_len`] values (logit, row as bits) a sequence.
    Head(Norm<'a>, &'a mut Buffer<f32>, &'a mut Buffer<[f32; 2]>),
}

impl GemvOutput<'_> {
    fn name(&self) -> &'static str {
        match self {
            GemvOutput::Store(..) => "store",
            GemvOutput::Add(..) => "add",
            GemvOutput::Silu(..) => "silu",
            GemvOutput::Head(..) => "head",
        }
    }
}

/// `GemvArgs` of `cuda/gemv.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GemvArgs {
    codes: Address,
    meta: Address,
    x: Address,
    gain: Address,
    out: Address,
    best: Address,
    inputs: i32,
    rows: i32,
    tiles: i32,
    spans: i32,
    groups: i32,
    meta_bytes: i32,
    split: i32,
    inverse: i32,
    depth: i32,
    eps: f32,
    scale: f32,
    late: i32,
}

/// Warps of a block of `cuda/gemv.cu`.
const GEMV_WARPS: usize = 16;
/// Spans a warp may have, of 4 or 8 bits, for the kernel that keeps them in registers: as
/// measured on an H200.
const fn short_spans(bits: usize) -> usize {
    match bits {
        4 => 4,
        8 => 1,
        _ => 0,
    }
}

/// Blocks of a product of `m` rows: values a row that [`GemvOutput::Head`]'s `best` must hold.
pub fn best_len(gpu: &Gpu, w: &DeviceLinear, m: usize) -> usize {
    match m {
        1 => Cut::new(gpu.info(), w).blocks,
        m => super::batch::blocks(gpu, w, m).unwrap_or(1),
    }
}

/// How a product is cut into shares of warps: see `cuda/gemv.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    /// Warps that share a tile.
    split: usize,
    blocks: usize,
    /// Spans of the busiest warp, of all its tiles.
    spans: usize,
}

impl Cut {
    /// That with the shortest path of the busiest warp: rounds of tiles times (spans of a warp,
    /// and the meeting of the warps).
    fn new(info: &GpuInfo, w: &DeviceLinear) -> Self {
        // Weights of the terms as measured on an H200.
        let span_cost = match w.kind().bits() {
            4 => 1.0,
            8 => 1.4,
            _ => 1.6,
        };
        let mut best: Option<(f64, Cut)> = None;
        for split in 1..=GEMV_WARPS.min(w.spans()) {
            let groups = GEMV_WARPS / split;
            let blocks = info.multiprocessors.min(w.tiles().div_ceil(groups)).max(1);
            let rounds = w.tiles().div_ceil(blocks * groups);
            let spans = w.spans().div_ceil(split);
            // Ties go to more blocks: to smaller groups.
            let cost = rounds as f64 * (spans as f64 * span_cost + 1.0) + 0.01 * groups as f64;
            if best.is_none_or(|(least, _)| cost < least) {
                let spans = rounds * spans;
                best = Some((
                    cost,
                    Cut {
                        split,
                        blocks,
                        spans,
                    },
                ));
            }
        }
        best.map_or(
            Cut {
                split: 1,
                blocks: 1,
                spans: 0,
            },
            |(_, cut)| cut,
        )
    }
}

/// Shared memory that a block needs for its row of inputs: `Halves` or `Digits` of
/// `cuda/activations.cuh` a span.
fn row_bytes(w: &DeviceLinear) -> usize {
    w.spans() * if w.kind().bits() == 16 { 1024 } else { 592 }
}

/// Static arrays of a kernel with rings: sums and squares of the warps, barriers.
const FIXED_BYTES: usize = GEMV_WARPS * (2 * 16 * 4 + 4 + 8 * 8);

/// A stage of the rings of all warps.
fn stage_bytes(kind: PackedKind) -> usize {
    GEMV_WARPS * (2048 + kind.meta_room())
}

/// How a product is launched.
struct GemvPlan {
    cut: Cut,
    /// Stages in shared memory; 0: in registers.
    depth: usize,
    shared: usize,
}

impl GemvPlan {
    /// `None` if the row of x does not fit in shared memory.
    fn new(info: &GpuInfo, w: &DeviceLinear, head: bool) -> Option<Self> {
        let cut = Cut::new(info, w);
        let bits = w.kind().bits();
        let row = row_bytes(w);
        let room = info.shared_memory.checked_sub(row + FIXED_BYTES)?;
        if !head && cut.spans <= short_spans(bits) {
            return Some(GemvPlan {
                cut,
                depth: 0,
                shared: row,
            });
        }
        let stage = stage_bytes(w.kind());
        let deepest = if head { 3 } else { 4 };
        let depth = deepest.min(cut.spans * bits / 4).min(room / stage);
        let shared = depth * stage + row;
        (depth > 0).then_some(GemvPlan { cut, depth, shared })
    }
}

impl GemvArgs {
    /// The product with `w`, cut so; inputs and outputs are the caller's to add.
    fn of(w: &DeviceLinear, cut: Cut, depth: usize) -> Self {
        let p = w.args();
        GemvArgs {
            codes: p.codes,
            meta: p.meta,
            inputs: p.inputs,
            rows: p.rows,
            tiles: w.tiles() as i32,
            spans: p.spans,
            groups: p.groups,
            meta_bytes: p.meta_bytes,
            split: cut.split as i32,
            inverse: 256usize.div_ceil(cut.split) as i32,
            depth: depth as i32,
            scale: p.scale,
            ..GemvArgs::zeroed()
        }
    }
}

impl PackedKind {
    /// `MOST_META` of `cuda/weights.cuh`, padded to 16 bytes.
    pub(super) fn meta_room(self) -> usize {
        match self {
            PackedKind::Fp16 => 0,
            PackedKind::Affine { bits, zeros, .. } => PackedKind::Affine {
                bits,
                zeros,
                groups: if self.groups() == 8 { 8 } else { 4 },
            }
            .meta_bytes(),
        }
    }
}

impl Stream {
    /// One row of activations `x` `[inputs]` times `w`: a kernel of a decode step. `late` keeps
    /// the next kernel from starting before the one in front has ended.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn gemv(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        output: GemvOutput<'_>,
        late: bool,
    ) -> Result<()> {
        let head = matches!(output, GemvOutput::Head(..));
        let plan = GemvPlan::new(self.gpu().info(), w, head).ok_or_else(|| Error::Shape {
            op: "gemv",
            what: "inputs",
            expected: format!(
                "a row within the {} bytes of shared memory of {}",
                self.gpu().info().shared_memory,
                self.gpu().info()
            ),
            found: w.inputs().to_string(),
        })?;
        w.check_inputs("gemv")?;
        let fits = |what, expected, found| at_least("gemv", what, expected, found);
        fits("inputs of x", w.inputs(), x.len())?;
        let name = format!(
            "gemv_{}_{}{}",
            w.kind().kernel_part(),
            output.name(),
            if plan.depth == 0 { "_short" } else { "" }
        );
        let mut args = GemvArgs::of(w, plan.cut, plan.depth);
        args.x = x.at(0);
        args.late = i32::from(late);
        let mut norm = None;
        match output {
            GemvOutput::Store(n, out) => {
                norm = Some(n);
                fits("outputs", w.rows(), out.len())?;
                args.out = out.at(0);
            }
            GemvOutput::Add(residual) => {
                fits("residual", w.rows(), residual.len())?;
                args.out = residual.at(0);
            }
            GemvOutput::Silu(n, out) => {
                norm = Some(n);
                fits("outputs", w.rows() / 2, out.len())?;
                args.out = out.at(0);
            }
            GemvOutput::Head(n, logits, best) => {
                norm = Some(n);
                fits("logits", w.rows(), logits.len())?;
                fits("best", plan.cut.blocks, best.len())?;
                args.out = logits.at(0);
                args.best = best.at(0);
            }
        }
        if let Some(norm) = norm {
            fits("gain", w.inputs(), norm.gain.len())?;
            args.gain = norm.gain.at(0);
            args.eps = norm.eps;
        }
        let shape = LaunchShape {
            grid: (plan.cut.blocks, 1, 1),
            threads: GEMV_WARPS * 32,
            shared: plan.shared,
            overlap: true,
        };
        // SAFETY: the arguments are `GemvArgs` of the kernel; sizes were checked against the
        // shape that the weight has, and the buffers are borrowed by the caller, who keeps
        // them while the stream works (their owners wait for it before freeing).
        unsafe { self.launch(&name, shape, &args) }
    }
}
