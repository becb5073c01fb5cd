//! Packed weights on the device, and the products with them.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Mark, Pinned, Stream};
use super::pack::{PackedKind, Packing, Stack};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use nq_formats::Weight;

/// One or several weights with the same inputs, packed on a device.
pub struct DeviceLinear {
    kind: PackedKind,
    codes: Buffer<u8>,
    meta: Buffer<u8>,
    rows: usize,
    inputs: usize,
    tiles: usize,
    spans: usize,
    scale: f32,
}

/// `PackedWeight` of `cuda/weights.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PackedArgs {
    pub(crate) codes: Address,
    pub(crate) meta: Address,
    pub(crate) rows: i32,
    pub(crate) inputs: i32,
    pub(crate) spans: i32,
    pub(crate) bits: i32,
    pub(crate) zero: i32,
    pub(crate) groups: i32,
    pub(crate) meta_bytes: i32,
    pub(crate) scale: f32,
}

/// Bytes packed and copied at a time.
const STAGING: usize = 32 << 20;

/// Packs weights on all CPU cores and copies them over, in steps so that both overlap.
pub struct Uploader {
    gpu: Gpu,
    stream: Stream,
    staging: [(Pinned<u8>, Option<Mark>); 2],
    steps: usize,
}

impl Uploader {
    /// Reserves page-locked memory to copy from.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let staging = || gpu.pinned("a staging buffer", STAGING);
        Ok(Uploader {
            stream: gpu.stream()?,
            staging: [(staging()?, None), (staging()?, None)],
            gpu: gpu.clone(),
            steps: 0,
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Packs `parts` as one weight. The last of it may still be on its way on return:
    /// [`Uploader::finish`] waits.
    ///
    /// # Errors
    /// [`Packing::new`]'s; [`Error::DeviceMemory`].
    pub fn pack(&mut self, parts: &[&Weight], stack: Stack) -> Result<DeviceLinear> {
        let packing = Packing::new(parts, stack)?;
        let kind = packing.kind();
        let mut codes = self.gpu.zeros("weights", packing.code_bytes())?;
        let mut meta = self.gpu.zeros("weights", packing.meta_bytes())?;
        let code_tile = packing.spans() * kind.code_bytes();
        let meta_tile = packing.spans() * kind.meta_bytes();
        let step = STAGING / (code_tile + meta_tile).max(1);
        if step == 0 {
            return Err(Error::Shape {
                op: "packing",
                what: "inputs",
                expected: format!("rows of 16 within {STAGING} bytes"),
                found: format!("{} inputs", packing.inputs()),
            });
        }
        for first in (0..packing.tiles()).step_by(step) {
            let n = step.min(packing.tiles() - first);
            let (host, pending) = &mut self.staging[self.steps % 2];
            self.steps += 1;
            if let Some(mark) = pending.take() {
                mark.wait()?;
            }
            let (cn, mn) = (n * code_tile, n * meta_tile);
            let (c, m) = host.values_mut()[..cn + mn].split_at_mut(cn);
            packing.pack(first, c, m)?;
            self.stream
                .write(&mut codes, first * code_tile, host, 0..cn)?;
            self.stream
                .write(&mut meta, first * meta_tile, host, cn..cn + mn)?;
            *pending = Some(self.stream.mark()?);
        }
        Ok(DeviceLinear {
            kind,
            codes,
            meta,
            rows: packing.rows(),
            inputs: packing.inputs(),
            tiles: packing.tiles(),
            spans: packing.spans(),
            scale: packing.scale(),
        })
    }

    /// Waits until all weights are on the device.
    ///
    /// # Errors
    /// The driver's.
    pub fn finish(self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl DeviceLinear {
    /// Device bytes that `parts` take, packed: of codes, and of scales and zero-points.
    ///
    /// # Errors
    /// [`Packing::new`]'s.
    pub fn device_bytes(parts: &[&Weight], stack: Stack) -> Result<(usize, usize)> {
        let p = Packing::new(parts, stack)?;
        Ok((p.code_bytes(), p.meta_bytes()))
    }

    /// What kernels it needs.
    pub fn kind(&self) -> PackedKind {
        self.kind
    }

    /// Outputs of all parts together.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Device bytes that one pass reads.
    pub fn bytes(&self) -> usize {
        self.codes.bytes() + self.meta.bytes()
    }

    pub(crate) fn args(&self) -> PackedArgs {
        PackedArgs {
            codes: self.codes.at(0),
            meta: self.meta.at(0),
            rows: self.rows as i32,
            inputs: self.inputs as i32,
            spans: self.spans as i32,
            bits: self.kind.bits() as i32,
            zero: self.kind.zero_code() as i32,
            groups: self.kind.groups() as i32,
            meta_bytes: self.kind.meta_bytes() as i32,
            scale: self.scale,
        }
    }
}

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
        1 => GemvPlan::new(gpu, w, true).map_or(1, |p| p.blocks),
        m => super::batch::blocks(gpu, w, m).unwrap_or(1),
    }
}

/// How a product is cut: see `cuda/gemv.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct GemvPlan {
    split: usize,
    blocks: usize,
    /// Stages in shared memory; 0: in registers.
    depth: usize,
    shared: usize,
}

impl GemvPlan {
    /// The cut with the shortest path of the busiest warp: rounds of tiles times (spans of a
    /// warp, and the meeting of the warps). `None` if the row of x does not fit in shared
    /// memory.
    fn new(gpu: &Gpu, w: &DeviceLinear, head: bool) -> Option<Self> {
        let info = gpu.info();
        let bits = w.kind.bits();
        // Weights of the terms as measured on an H200.
        let span_cost = match bits {
            4 => 1.0,
            8 => 1.4,
            _ => 1.6,
        };
        let mut best: Option<(f64, GemvPlan, usize)> = None;
        for split in 1..=GEMV_WARPS.min(w.spans) {
            let groups = GEMV_WARPS / split;
            let blocks = info.multiprocessors.min(w.tiles.div_ceil(groups)).max(1);
            let rounds = w.tiles.div_ceil(blocks * groups);
            let spans = w.spans.div_ceil(split);
            // Ties go to more blocks: to smaller groups.
            let cost = rounds as f64 * (spans as f64 * span_cost + 1.0) + 0.01 * groups as f64;
            if best.is_none_or(|b| cost < b.0) {
                let plan = GemvPlan {
                    split,
                    blocks,
                    depth: 0,
                    shared: 0,
                };
                best = Some((cost, plan, rounds * spans));
            }
        }
        let (_, mut plan, spans) = best?;
        // `Halves` and `Digits` of `cuda/activations.cuh`.
        let row = w.spans * if bits == 16 { 1024 } else { 576 };
        // Static arrays of the kernel: sums and squares of the warps, barriers.
        let fixed = GEMV_WARPS * (2 * 16 * 4 + 4 + 8 * 8);
        let room = info.shared_memory.checked_sub(row + fixed)?;
        if head || spans > short_spans(bits) {
            let stage = GEMV_WARPS * (2048 + w.kind.meta_room());
            let deepest = if head { 3 } else { 4 };
            plan.depth = deepest.min(spans * bits / 4).min(room / stage);
            if plan.depth == 0 {
                return None;
            }
            plan.shared = plan.depth * stage;
        }
        plan.shared += row;
        Some(plan)
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
        let plan = GemvPlan::new(self.gpu(), w, head).ok_or_else(|| Error::Shape {
            op: "gemv",
            what: "inputs",
            expected: format!(
                "a row within the {} bytes of shared memory of {}",
                self.gpu().info().shared_memory,
                self.gpu().info()
            ),
            found: w.inputs.to_string(),
        })?;
        let fits = |what, expected: usize, found: usize| match found >= expected {
            true => Ok(()),
            false => Err(Error::Shape {
                op: "gemv",
                what,
                expected: format!("at least {expected}"),
                found: found.to_string(),
            }),
        };
        if !w.inputs.is_multiple_of(8) {
            return Err(Error::Shape {
                op: "gemv",
                what: "inputs",
                expected: "a multiple of 8".into(),
                found: w.inputs.to_string(),
            });
        }
        fits("inputs of x", w.inputs, x.len())?;
        let name = format!(
            "gemv_{}_{}{}",
            w.kind.kernel_part(),
            output.name(),
            if plan.depth == 0 { "_short" } else { "" }
        );
        let mut args = GemvArgs {
            codes: w.codes.at(0),
            meta: w.meta.at(0),
            x: x.at(0),
            inputs: w.inputs as i32,
            rows: w.rows as i32,
            tiles: w.tiles as i32,
            spans: w.spans as i32,
            groups: w.kind.groups() as i32,
            meta_bytes: w.kind.meta_bytes() as i32,
            split: plan.split as i32,
            inverse: 256usize.div_ceil(plan.split) as i32,
            depth: plan.depth as i32,
            scale: w.scale,
            late: i32::from(late),
            ..GemvArgs::zeroed()
        };
        let mut norm = None;
        match output {
            GemvOutput::Store(n, out) => {
                norm = Some(n);
                fits("outputs", w.rows, out.len())?;
                args.out = out.at(0);
            }
            GemvOutput::Add(residual) => {
                fits("residual", w.rows, residual.len())?;
                args.out = residual.at(0);
            }
            GemvOutput::Silu(n, out) => {
                norm = Some(n);
                fits("outputs", w.rows / 2, out.len())?;
                args.out = out.at(0);
            }
            GemvOutput::Head(n, logits, best) => {
                norm = Some(n);
                fits("logits", w.rows, logits.len())?;
                fits("best", plan.blocks, best.len())?;
                args.out = logits.at(0);
                args.best = best.at(0);
            }
        }
        if let Some(norm) = norm {
            fits("gain", w.inputs, norm.gain.len())?;
            args.gain = norm.gain.at(0);
            args.eps = norm.eps;
        }
        let shape = LaunchShape {
            grid: (plan.blocks, 1, 1),
            threads: GEMV_WARPS * 32,
            shared: plan.shared,
            overlap: true,
        };
        // SAFETY: the arguments are `GemvArgs` of the kernel; sizes were checked against the
        // shape that the weight has, and the buffers are borrowed by the caller, who keeps
        // them while the stream works (their owners wait for it before freeing).
        unsafe { self.launch(&name, shape, &args) }
    }

    /// `y` `[m, rows]` = `x` `[m, inputs]` times `w` (added to `y` if `add`), by the plain
    /// kernel.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn linear_reference(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        y: &mut Buffer<f32>,
        m: usize,
        add: bool,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            w: PackedArgs,
            x: Address,
            y: Address,
            m: i32,
            add: i32,
        }
        if x.len() < m * w.inputs || y.len() < m * w.rows {
            return Err(Error::Shape {
                op: "linear_reference",
                what: "x and y",
                expected: format!("[{m}, {}] and [{m}, {}]", w.inputs, w.rows),
                found: format!("{} and {} values", x.len(), y.len()),
            });
        }
        let args = Args {
            w: w.args(),
            x: x.at(0),
            y: y.at(0),
            m: m as i32,
            add: i32::from(add),
        };
        let shape = LaunchShape {
            grid: (w.rows.div_ceil(8), m.div_ceil(8), 1),
            threads: 256,
            shared: 0,
            overlap: false,
        };
        // SAFETY: the arguments are the kernel's; x and y hold m rows, as checked.
        unsafe { self.launch("linear_reference", shape, &args) }
    }
}
