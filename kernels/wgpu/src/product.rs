//! Products of a session: weights bound to inputs and outputs, and the kernels that multiply with them.

use crate::gpu::Binding::{self, Read, Uniform, Write};
use crate::gpu::{BoundKernel, GRID, Gpu, Grid, Kernel, LaunchPass};
use crate::linear::{Linear, Slice};
use crate::pack::{Codes, Form, UNIT};
use crate::source::KernelSource;
use nq_formats::Bits;
use nq_model::{DType, Experts};
use nq_runtime::Result;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use wgpu::{BindGroup, Buffer};

/// What a product does with its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outputs {
    /// Writes them.
    Stored,
    /// Adds them.
    Added,
    /// Writes `silu(gate) * up` of two neighbours.
    Gated,
}

/// What a kernel of products is bound to: codes, high bits, scales, sizes of the slice and of the pass, inputs and
/// their scales (or gains of their norm), and outputs.
const BINDINGS: [Binding; 8] = [Read, Read, Read, Uniform, Uniform, Read, Read, Write];

/// Most rows of a step, whose products read each weight once for all of them.
pub(crate) const STEP_ROWS: usize = 16;

/// Kernels of products by what they differ in: writing a kernel's text takes longer than a launch.
pub(crate) type ProductKernels = HashMap<(Form, bool, Outputs, usize), Arc<Kernel>>;

/// A product in a session: its weight bound to inputs and outputs.
pub(crate) struct BoundProduct {
    slices: Vec<(Form, usize, BindGroup)>, // with the number of rows
    outputs: Outputs,
    rounds: bool,
}

/// The buffers of a product.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    /// Sizes of the pass.
    pub(crate) step: &'a Buffer,
    /// `[rows, inputs]`: f32, or bytes where they are rounded.
    pub(crate) x: &'a Buffer,
    /// Scales of rounded inputs, gains of the norm that a [`RowProduct`] computes itself, or any buffer.
    pub(crate) beside: &'a Buffer,
    /// `[rows, outputs]`
    pub(crate) y: &'a Buffer,
}

impl<'a> Operands<'a> {
    /// All buffers of a product with `slice`.
    pub(crate) fn buffers(&self, slice: &'a Slice) -> [&'a Buffer; 8] {
        let [codes, high, affine] = [&slice.codes, &slice.high, &slice.affine];
        let Operands { step, x, beside, y } = *self;
        [codes, high, affine, &slice.sizes, step, x, beside, y]
    }
}

impl BoundProduct {
    /// Binds `linear`.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device).
    pub(crate) fn new(
        gpu: &Gpu,
        linear: &Linear,
        operands: Operands<'_>,
        outputs: Outputs,
    ) -> Result<Self> {
        let bound = |slice: &Slice| {
            let bound = gpu.bind(&BINDINGS, &operands.buffers(slice))?;
            Ok((slice.form, slice.rows, bound))
        };
        Ok(BoundProduct {
            slices: linear.slices.iter().map(bound).collect::<Result<_>>()?,
            outputs,
            rounds: linear.rounds,
        })
    }

    /// Adds the product of `rows` rows to `pass`; kernels for as many come from `known` if they are there.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if the driver refuses a kernel for as many rows.
    pub(crate) fn launch(
        &self,
        gpu: &Gpu,
        pass: &mut LaunchPass<'_>,
        rows: usize,
        known: &mut ProductKernels,
    ) -> Result<()> {
        for (form, outputs, bound) in &self.slices {
            let key = (*form, self.rounds, self.outputs, bucket(rows));
            let kernel = match known.get(&key) {
                Some(kernel) => Arc::clone(kernel),
                None => {
                    let source = source(form, self.rounds, self.outputs);
                    let source = shaped(source, gpu, self.rounds, rows);
                    let kernel = gpu.kernel(&source)?;
                    known.insert(key, Arc::clone(&kernel));
                    kernel
                }
            };
            let grid = match rows <= STEP_ROWS {
                true => step_grid(*outputs, bucket(rows), self.rounds),
                false => Grid::new(tiles_of(*outputs), tiles_of(rows)),
            };
            pass.launch(&kernel, bound, grid);
        }
        Ok(())
    }
}

/// The product of a step of one row, whose kernels normalize their inputs themselves, and round them.
pub(crate) struct RowProduct {
    slices: Vec<(BoundKernel, Grid)>,
}

/// Which experts each row is routed to, if a weight is a stack of them: there is a row of `x` for each row of the pass.
#[derive(Clone, Copy)]
pub(crate) struct RoutedInputs<'a> {
    /// `[rows, per_row, 2]`: experts, and bits of their weights.
    pub(crate) routes: &'a Buffer,
    pub(crate) shape: &'a Experts,
    /// `[rows, experts]`, from which the product chooses; `None` if that is done.
    pub(crate) scores: Option<&'a Buffer>,
    /// True if each expert has inputs of its own, and their outputs are summed.
    pub(crate) summed: bool,
}

/// Rows of a weight that an invocation of a [`RowProduct`] reads at once.
const ROW_TOGETHER: usize = 2;

/// Workgroups of a [`RowProduct`] at most: about as many as a large GPU runs at once, so that none of them prepares its
/// inputs for a few rows alone.
const ROW_GROUPS: usize = 528;

/// How the kernel of a [`RowProduct`] goes through a weight.
struct RowShape {
    units: usize,
    lanes: usize,
    /// Invocations of a workgroup.
    threads: usize,
    /// Units of a row that an invocation reads at once.
    unrolled: usize,
    /// Workgroups, and how often each goes on to further rows.
    groups: usize,
    each: usize,
}

impl RowShape {
    /// That of a weight with `rows` rows of `units` units.
    fn new(gpu: &Gpu, rows: usize, units: usize) -> Self {
        let lanes = gpu.lanes.unwrap_or(32);
        let blocks = |threads: usize| rows.div_ceil(threads / lanes * ROW_TOGETHER);
        // Half as many workgroups round the inputs, where that leaves one to each processor of a large GPU.
        let most = gpu.limits.max_compute_invocations_per_workgroup as usize;
        let threads = match blocks(256) {
            129..=256 if most >= 512 => 512,
            _ => 256,
        };
        let each = blocks(threads).div_ceil(ROW_GROUPS);
        let own = units.div_ceil(lanes);
        // As few as possible past the end. Fewer at once where those of further rows are on their way beside them.
        let widths = 1..=if each > 1 { 2 } else { 4 };
        let unrolled = widths.min_by_key(|n| (own.next_multiple_of(*n), Reverse(*n)));
        RowShape {
            units,
            lanes,
            threads,
            unrolled: unrolled.unwrap_or(1),
            groups: blocks(threads).div_ceil(each),
            each,
        }
    }

    /// Bytes of a workgroup's memory: bytes, scales and sums of units, and values that invocations exchange.
    fn held(&self, gpu: &Gpu) -> usize {
        let sums = if gpu.lanes.is_some() { 0 } else { ROW_TOGETHER };
        (UNIT + 8) * self.units + 4 * self.threads * (1 + sums)
    }

    /// `source` with its kernel.
    fn kernel(&self, source: KernelSource, gpu: &Gpu) -> KernelSource {
        let subgroups = gpu.lanes.is_some();
        let quads = if subgroups { 4 } else { 8 };
        source
            .file(include_str!("wgsl/experts.wgsl"))
            .file(include_str!("wgsl/gemv_row.wgsl"))
            .with("UNITS", self.units)
            .with("LANES", self.lanes)
            .with("THREADS", self.threads)
            .with("PARTS", self.threads / self.lanes)
            .with("TOGETHER", ROW_TOGETHER)
            .with("UNROLLED", self.unrolled)
            .with("TURNS", self.units.div_ceil(self.lanes * self.unrolled))
            .with("EACH", self.each)
            .with("QUADS", quads)
            .with("ROUNDS", (8 * self.units).div_ceil(quads * self.threads))
            .flag("SUBGROUPS", subgroups)
    }
}

impl RowProduct {
    /// Binds `linear`, whose f32 inputs are normalized if the `eps` of an RMSNorm is given; `None` if its kernels would be
    /// those of steps of several rows, or if inputs are rounded and more than the adapter's workgroups can hold.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device).
    pub(crate) fn new(
        gpu: &Gpu,
        linear: &Linear,
        operands: Operands<'_>,
        outputs: Outputs,
        eps: Option<f32>,
        routes: Option<RoutedInputs<'_>>,
    ) -> Result<Option<Self>> {
        // Experts whose outputs are summed have one row of inputs together.
        let parts = routes.map_or(1, |r| if r.summed { r.shape.per_token } else { 1 });
        let units = parts * linear.inputs / UNIT;
        let scores = routes.and_then(|r| Some((r.scores?, r.shape.count)));
        let scored = 4 * scores.map_or(0, |(_, count)| count);
        let room = gpu.limits.max_compute_workgroup_storage_size as usize;
        if !linear.rounds && eps.is_none() && routes.is_none() {
            return Ok(None);
        }
        let mut slices = Vec::with_capacity(linear.slices.len());
        for slice in &linear.slices {
            let rows = match routes {
                None => slice.rows,
                Some(r) if r.summed => linear.outputs / linear.experts,
                Some(r) => linear.outputs / linear.experts * r.shape.per_token,
            };
            let mut source = source(&slice.form, linear.rounds, outputs);
            if scores.is_some() {
                source = source.file(include_str!("wgsl/choose.wgsl"));
            }
            let shape = RowShape::new(gpu, rows, units);
            if linear.rounds && shape.held(gpu) + scored > room {
                return Ok(None);
            }
            let (mut source, grid) = match linear.rounds {
                true => (shape.kernel(source, gpu), Grid::new(shape.groups, 1)),
                false => {
                    let source = source.with("THREADS", 128);
                    (shaped(source, gpu, false, 1), step_grid(rows, 1, false))
                }
            };
            let mut buffers = operands.buffers(slice).to_vec();
            if let Some(eps) = eps {
                source = source.with_float("EPS", eps).flag("NORM", true);
            }
            if let Some(routed) = routes {
                let Experts {
                    count, normalized, ..
                } = *routed.shape;
                source = (source
                    .with("ROUTES", routed.shape.per_token)
                    .with("COUNT", count))
                .flag("NORMALIZED", normalized)
                .flag("EXPERTS", true)
                .flag("CHOOSE", scores.is_some())
                .flag(if routed.summed { "SUMMED" } else { "SPREAD" }, true);
                buffers.extend(scores.map(|(scores, _)| scores));
                buffers.push(routed.routes);
            }
            slices.push((gpu.bound(&source, &buffers)?, grid));
        }
        Ok(Some(RowProduct { slices }))
    }

    /// Adds the product of each of `rows` rows to `pass`: of one, if it is not one with experts.
    pub(crate) fn launch(&self, pass: &mut LaunchPass<'_>, rows: usize) {
        for (kernel, grid) in &self.slices {
            kernel.launch(pass, Grid { z: rows, ..*grid });
        }
    }
}

/// Tiles of GEMM that have so many rows, of a weight or of a pass.
pub(crate) fn tiles_of(rows: usize) -> usize {
    rows.div_ceil(64)
}

/// The kernel of prompts with a slice of a stack of experts.
pub(crate) fn prompt_kernel(slice: &Slice, rounds: bool, outputs: Outputs) -> KernelSource {
    source(&slice.form, rounds, outputs).file(include_str!("wgsl/gemm.wgsl"))
}

/// The rows for which there is a kernel that serves a step of `rows`; 0 stands for more than a step has.
fn bucket(rows: usize) -> usize {
    match rows {
        0..=STEP_ROWS => rows.next_power_of_two(),
        _ => 0,
    }
}

/// Workgroups of a step's product with so many outputs.
fn step_grid(outputs: usize, bucket: usize, rounds: bool) -> Grid {
    let groups = outputs.div_ceil(4 * together(bucket, rounds));
    Grid::new(groups.min(GRID), groups.div_ceil(GRID))
}

/// Rows of a weight that an invocation sums together.
fn together(bucket: usize, rounds: bool) -> usize {
    match bucket {
        // More workgroups, whose loads are on their way at the same time.
        1 if rounds => 2,
        // Registers for all sums.
        16 => 2,
        _ => 4,
    }
}

/// Units that an invocation reads at once.
fn unrolled(bucket: usize, rounds: bool) -> usize {
    match bucket {
        1 if rounds => 4,
        _ => 1,
    }
}

/// The kernel of products with weights of this form.
fn source(form: &Form, rounds: bool, outputs: Outputs) -> KernelSource {
    let bits = |bits| form.codes == Codes::Integers(bits);
    let floats = matches!(form.codes, Codes::Floats(_));
    let flips = bits(Bits::B8) && rounds;
    KernelSource::new(&[include_str!("wgsl/unit.wgsl")])
        .with("WORDS4", form.words4())
        // Codes of 8 bits become signed ones, less by 128, in products with signed bytes.
        .with("FLIP", if flips { 0x8080_8080 } else { 0 })
        .with_float("FLIPPED", if flips { 128.0 } else { 0.0 })
        .flag("FLOATS", floats)
        .with("HIGH_WORDS", usize::from(form.high_words() > 0))
        .flag("F32", form.codes == Codes::Floats(DType::F32))
        .flag("BF16", form.codes == Codes::Floats(DType::BF16))
        .flag("BITS5", bits(Bits::B5))
        .flag("BITS6", bits(Bits::B6))
        .flag("BITS8", bits(Bits::B8))
        .flag("OFFSETS", form.offsets)
        .flag("SMALL_GROUPS", !floats && form.shift < 5)
        .flag("INT8", rounds)
        .flag("ADDED", outputs == Outputs::Added)
        .flag("GATED", outputs == Outputs::Gated)
}

/// The kernel for as many rows.
fn shaped(source: KernelSource, gpu: &Gpu, rounds: bool, rows: usize) -> KernelSource {
    match bucket(rows) {
        0 => source.file(include_str!("wgsl/gemm.wgsl")),
        bucket => source
            .file(include_str!("wgsl/experts.wgsl"))
            .file(include_str!("wgsl/gemv.wgsl"))
            .with("ROWS", bucket)
            .with("TOGETHER", together(bucket, rounds))
            .with("UNROLLED", unrolled(bucket, rounds))
            .with("TOTALS", 4 * together(bucket, rounds) * bucket)
            .with("GRID", GRID)
            .flag("SUBGROUPS", gpu.lanes == Some(32)),
    }
}
