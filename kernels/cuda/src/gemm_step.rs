//! The products of a decode step of 17 to 64 sequences, and the norms between them.

use super::Version;
use super::driver::{Buffer, Gpu, LaunchShape, Operands, Stream};
use super::kernel::{kernels, names};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, PackedShape, SPAN};
use super::partial_sums::{MOST_PARTS, PartialSums};
use super::product::{
    Boxes, Epilogue, Inputs, Norm, OutputAddresses, OutputMemory, PlannedRows, Product,
    ProductOutput, boxes, cheapest,
};
use crate::cuda::gemm_step::{GemmStepArgs, MOST_STAGES};
use crate::cuda::norm_step::NormStepArgs;
use nq_kernels::{Error, Result};

/// Most sequences that [`Stream::gemm_step`] supports.
pub const MOST_WIDE_SEQUENCES: usize = 64;

/// Output of a wide step's product of `m` sequences.
pub enum StepOutput<'a> {
    /// Sums `[m, rows]`, in parts.
    Parts(&'a mut PartialSums),
    /// `[m, rows]`: slower than [`StepOutput::Parts`] if there are few rows.
    Store(&'a mut Buffer<f32>),
    /// For interleaved gate and up: `silu(gate) * up` `[m, rows / 2 padded to 256]` in FP16, in
    /// operand order.
    Silu(&'a mut Buffer<u16>),
    /// Logits `[m, rows]`, and the best of each block: [`wide_best_len`] values (logit, row as
    /// bits) per sequence.
    Head(&'a mut Buffer<f32>, &'a mut Buffer<[f32; 2]>),
}

kernels! {
    GEMM_STEP: GemmStepArgs = "gemm_step" in "gemm_step.cu",
        test "kernels/cuda/tests/cuda/wide.rs::products_of_many_sequences", bench "gemm_step",
        instances names!(
            kinds "gemm_step"; "_64x32", "_128x32", "_192x32", "_256x32", "_64x64", "_128x64",
            "_192x64"
        );
    NORM_STEP: NormStepArgs = "norm_step" in "norm_step.cu",
        test "kernels/cuda/tests/cuda/wide.rs::norms_add_what_products_left_in_parts",
        bench "gemm_step";
}

/// An instance of `cuda/gemm_step.cu`.
#[derive(Debug, PartialEq)]
struct StepInstance {
    /// Warpgroups, each of four tiles of weights.
    groups: usize,
    /// Rows of x.
    rows: usize,
    /// Microseconds for 64 inputs of a group of rows on a multiprocessor, measured on an H200.
    step: f64,
    /// Microseconds for a group of rows besides those of its inputs.
    round: f64,
}

impl StepInstance {
    const fn new(groups: usize, rows: usize, step: f64, round: f64) -> Self {
        StepInstance {
            groups,
            rows,
            step,
            round,
        }
    }
}

/// In the order of [`GEMM_STEP`]'s names. There is none with 256 rows of weights and 64 of x: it
/// would gain nothing.
const INSTANCES: [StepInstance; 7] = [
    StepInstance::new(1, 32, 0.16, 1.9),
    StepInstance::new(2, 32, 0.22, 1.9),
    StepInstance::new(3, 32, 0.29, 2.1),
    StepInstance::new(4, 32, 0.37, 2.3),
    StepInstance::new(1, 64, 0.16, 2.6),
    StepInstance::new(2, 64, 0.25, 2.7),
    StepInstance::new(3, 64, 0.34, 3.0),
];

/// Microseconds that each part adds to the next kernel.
const PART_COST: f64 = 0.2;

/// Shared memory left for the norms before and after, which run on the same multiprocessor.
const LEFT_TO_NORMS: usize = 24 << 10;

/// How a product is divided.
#[derive(Debug, PartialEq)]
pub(super) struct StepPlan {
    instance: usize,
    pub(super) parts: usize,
    /// Number of groups of `instance.groups * 64` weight rows in progress at once.
    pub(super) taken: usize,
}

impl StepPlan {
    /// The cheapest plan for `m` rows of x; `parted` if its sums may stay in parts.
    pub(super) fn new(multiprocessors: usize, m: usize, w: &PackedShape, parted: bool) -> Self {
        let rows = if m <= 32 { 32 } else { 64 };
        let most = if parted { MOST_PARTS.min(w.spans) } else { 1 };
        let fitting = INSTANCES.iter().enumerate().filter(|i| i.1.rows == rows);
        let plans = fitting.flat_map(|(index, instance)| {
            let groups = w.tiles.div_ceil(instance.groups * 4).max(1);
            (1..=most).map(move |parts| {
                let at_once = (multiprocessors / parts).max(1);
                let rounds = groups.div_ceil(at_once);
                let steps = 4 * w.spans.div_ceil(parts);
                let round = instance.step * steps as f64 + instance.round;
                let cost = rounds as f64 * round + PART_COST * parts as f64;
                (cost, StepPlan::of(index, parts, groups.div_ceil(rounds)))
            })
        });
        cheapest(plans).unwrap_or(StepPlan::of(0, 1, 1))
    }

    fn of(instance: usize, parts: usize, taken: usize) -> Self {
        StepPlan {
            instance,
            parts,
            taken,
        }
    }

    fn instance(&self) -> &'static StepInstance {
        &INSTANCES[self.instance]
    }
}

impl StepInstance {
    /// Stages of the ring, and shared memory of a block, within `room`: `STAGE`, `OUT_BYTES`,
    /// `tops` and the alignment of `GemmStep`.
    fn shared(&self, kind: PackedKind, head: bool, room: usize) -> (usize, usize) {
        let tiles = self.groups * 4;
        let x = 2 * self.rows * 128;
        let stage = (x + tiles * (kind.bits() * 256 + kind.meta_room())).next_multiple_of(1024);
        let tops = if head { tiles * self.rows * 8 } else { 0 };
        let fixed = 1024 + tiles * 1280 + tops;
        let depth = (room.saturating_sub(fixed) / stage).clamp(2, MOST_STAGES);
        (depth, fixed + depth * stage)
    }
}

/// Blocks of a wide step's head: values per row that `best` of [`StepOutput::Head`] must hold.
pub fn wide_best_len(gpu: &Gpu, w: &DeviceLinear, m: usize) -> usize {
    let plan = || StepPlan::new(gpu.info().multiprocessors, m, &w.shape(), false);
    w.bests().unwrap_or_else(|| plan().taken)
}

impl Gpu {
    /// True if [`Stream::gemm_step`] and [`Stream::norm_step`] run on this device: on compute capability
    /// 9.0, if this build has machine code for it.
    pub fn takes_wide_steps(&self) -> bool {
        self.info().capability == Version::new(9, 0) && self.has_kernel(&NORM_STEP.instance(0))
    }
}

/// Refuses a device without kernels for wide steps, and too many rows.
pub(super) fn check_wide(o: &Operands<'_>, m: usize) -> Result<()> {
    if !o.gpu().takes_wide_steps() {
        return Err(Error::NoKernel {
            op: o.op(),
            scheme: "any".into(),
            activations: "f16".into(),
            device: o.gpu().info().to_string(),
        });
    }
    o.at_least("rows", 1, m)?;
    o.at_most("rows", MOST_WIDE_SEQUENCES, m)
}

impl<'a> From<StepOutput<'a>> for ProductOutput<'a> {
    fn from(output: StepOutput<'a>) -> Self {
        let (epilogue, to) = match output {
            StepOutput::Parts(sums) => (Epilogue::Store, OutputMemory::Parts(sums)),
            StepOutput::Store(y) => (Epilogue::Store, OutputMemory::Full(y)),
            StepOutput::Silu(half) => (Epilogue::Silu, OutputMemory::Half(half)),
            StepOutput::Head(y, best) => (Epilogue::Head, OutputMemory::Head(y, best)),
        };
        let norm = None;
        ProductOutput { epilogue, norm, to }
    }
}

impl Stream {
    /// Multiplies `m` rows of FP16 activations `x` `[m, inputs padded to 256]`, in operand order
    /// ([`operand_index`](super::pack::operand_index)), by `w` rounded to FP16: a kernel of a
    /// decode step of up to [`MOST_WIDE_SEQUENCES`] sequences. It requests weights before the
    /// previous kernel has ended.
    ///
    /// # Errors
    /// [`Error::NoKernel`] unless [`Gpu::takes_wide_steps`]; [`Error::Shape`] if an operand does
    /// not fit; errors of the driver.
    pub fn gemm_step(
        &self,
        w: &DeviceLinear,
        x: &Buffer<u16>,
        output: StepOutput<'_>,
        m: usize,
    ) -> Result<()> {
        let parted = matches!(output, StepOutput::Parts(_));
        let (o, asked) = (self.operands("gemm_step"), PlannedRows::Step(m, parted));
        let p = Product::new(o, w, Inputs::Half(x), m, asked);
        self.multiply(p, output.into())
    }

    /// The launch of [`Stream::gemm_step`].
    pub(super) fn multiply_step(
        &self,
        p: &Product<'_>,
        plan: &StepPlan,
        to: &OutputAddresses<'_>,
    ) -> Result<()> {
        let (w, kind) = (p.w, p.w.kind());
        let instance = plan.instance();
        let room = self.gpu().info().shared_memory;
        let room = room.saturating_sub(LEFT_TO_NORMS);
        let (depth, shared) = instance.shared(kind, to.epilogue == Epilogue::Head, room);
        let (codes, meta, scale) = w.operands(&p.o)?;
        // A box has at most 256 elements: 128 inputs of a tile take 1 KiB in 4 bits and 2 KiB in 8; in
        // 16 bits, 64 inputs take 2 KiB.
        let bytes = kind.stage_bytes().min(kind.code_bytes() / 2);
        let element = if kind.bits() == 4 { 4 } else { 8 };
        let size = Boxes {
            rows: instance.rows,
            tiles: instance.groups * 4,
            bytes,
            element,
        };
        let [x, codes, meta] = boxes(p, [p.x()?, codes, meta], size)?;
        let sizes = w.sizes();
        let args = GemmStepArgs {
            x,
            codes,
            meta,
            y: to.y,
            half: to.half,
            best: to.best,
            m: p.m as i32,
            rows: sizes.rows,
            spans: sizes.spans,
            groups: sizes.groups,
            meta_bytes: sizes.meta_bytes,
            padded: (w.rows() / 2).next_multiple_of(SPAN) as i32,
            row_groups: w.tiles().div_ceil(size.tiles) as i32,
            depth: depth as i32,
            epilogue: to.epilogue as i32,
            parts: plan.parts as i32,
            scale,
            scheme: sizes.scheme,
            padding: [0; 14],
        };
        let shape = LaunchShape::new([plan.taken * plan.parts, 1, 1], instance.groups * 128 + 32)
            .shared(shared)
            .overlapping();
        // SAFETY: the operands were checked; the boxes are those of the kernel.
        unsafe { self.launch(GEMM_STEP.of_kind(plan.instance, kind), shape, &args) }
    }

    /// Adds the parts of `sums` `[parts, m, width]`, if given, to the residuals `x` `[m, width]`,
    /// and normalizes them: `half` `[m, width padded to 256]` in FP16, in operand order. With
    /// `holds_dependents`, the next kernels (programmatic dependent launches) do not start before the previous one has
    /// ended.
    ///
    /// # Errors
    /// [`Error::NoKernel`] unless [`Gpu::takes_wide_steps`]; [`Error::Shape`] if an operand does
    /// not fit; errors of the driver.
    pub fn norm_step(
        &self,
        x: &mut Buffer<f32>,
        sums: Option<&PartialSums>,
        norm: Norm<'_>,
        half: &mut Buffer<u16>,
        m: usize,
        holds_dependents: bool,
    ) -> Result<()> {
        const THREADS: usize = 128;
        let o = self.operands("norm_step");
        check_wide(&o, m)?;
        let width = norm.gain.len();
        o.multiple("width", 4, width)?;
        let padded = width.next_multiple_of(SPAN);
        if let Some(s) = sums
            && (s.m, s.rows) != (m, width)
        {
            let found = format!("[{}, {}]", s.m, s.rows);
            return o.refuse("partial sums", format!("[{m}, {width}]"), found);
        }
        let count = sums.map_or(0, PartialSums::parts);
        let args = NormStepArgs {
            x: o.of("x", x, &[m, width])?,
            parts: o.optional(
                "partial sums",
                sums.map(PartialSums::values),
                &[count, m, width],
            )?,
            gain: norm.gain(&o, width)?,
            half: o.of("FP16 output", half, &[m, padded])?,
            count: count as i32,
            width: width as i32,
            padded: padded as i32,
            eps: norm.eps,
            holds_dependents: i32::from(holds_dependents),
            padding: [0; 1],
        };
        // With 1,024 values or more, a thread has two vectors.
        let blocks = (width / (8 * THREADS)).clamp(1, 4);
        let shape = LaunchShape::new([blocks, m, 1], THREADS)
            .shared((padded / 4).div_ceil(blocks) * 16)
            .overlapping()
            .clusters_of(blocks);
        // SAFETY: the operands were checked.
        unsafe { self.launch(&NORM_STEP, shape, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::{INSTANCES, MOST_PARTS, MOST_STAGES, PackedShape, StepPlan};
    use crate::PackedKind;
    use nq_formats::{Bits, Zeros};

    #[test]
    fn blocks_fit_shared_memory() {
        let affine = |bits| PackedKind::Affine {
            bits,
            zeros: Zeros::Offset,
            groups: 8,
            two_level: false,
            table: false,
        };
        let kinds = [affine(Bits::B4), affine(Bits::B8), PackedKind::Fp16];
        let room = (227 << 10) - super::LEFT_TO_NORMS;
        for i in &INSTANCES {
            for kind in kinds {
                for head in [false, true] {
                    let (depth, shared) = i.shared(kind, head, room);
                    assert!((2..=MOST_STAGES).contains(&depth), "{i:?} {kind:?}");
                    assert!(shared <= room, "{i:?} {kind:?}: {shared}");
                }
            }
        }
    }

    /// The plan on 132 multiprocessors.
    fn plan(m: usize, tiles: usize, spans: usize, parted: bool) -> StepPlan {
        let w = PackedShape::new(PackedKind::Fp16, tiles * 16, spans * 256);
        StepPlan::new(132, m, &w, parted)
    }

    /// On 132 multiprocessors: every row of weights is processed, all blocks run at once, and no part
    /// is empty.
    #[test]
    fn plans_cover_the_product() {
        for (rows, inputs) in [(1024, 2048), (4096, 12288), (51200, 5120), (151_936, 4096)] {
            let (tiles, spans) = (rows / 16, inputs / 256);
            for (m, parted) in [(17, true), (32, false), (33, true), (64, false)] {
                let p = plan(m, tiles, spans, parted);
                let groups = tiles.div_ceil(p.instance().groups * 4);
                let rounds = groups.div_ceil(132 / p.parts);
                assert!(
                    m <= p.instance().rows && p.taken * rounds >= groups,
                    "{p:?}"
                );
                assert!(p.taken * p.parts <= 132, "{p:?}");
                assert!(p.parts <= spans.min(MOST_PARTS), "{p:?}");
                assert!(parted || p.parts == 1, "{p:?}");
            }
        }
        // One span cannot be shared.
        assert_eq!(plan(64, 1, 1, true).parts, 1);
        // 8B: gate_up in one round, down on all multiprocessors.
        let gate_up = plan(64, 1536, 16, false);
        assert_eq!((gate_up.instance().groups, gate_up.taken), (3, 128));
        let down = plan(64, 256, 48, true);
        assert!(down.taken * down.parts > 120, "{down:?}");
    }
}
