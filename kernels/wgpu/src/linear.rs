//! The weight of a product in a GPU's memory, and its kernels.

use crate::gpu::Binding::{self, Read, Uniform, Write};
use crate::gpu::{GRID, Gpu, Grid, Kernel, UPLOAD, launch};
use crate::pack::{Codes, Form, PackedRows};
use crate::source::KernelSource;
use nq_formats::{Bits, Weight};
use nq_kernels::Activations;
use nq_model::DType;
use nq_runtime::interface::ActivationChoice;
use nq_runtime::weights::Census;
use nq_runtime::{Error, Result};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use wgpu::{BindGroup, Buffer, ComputePass};

/// Inputs that share a scale where they are rounded to bytes: a unit.
const ROUNDED: Activations = Activations::Int8 { group: 32 };

/// A product's weight.
pub(crate) struct Linear {
    pub(crate) slices: Vec<Slice>,
    /// Its name, for errors.
    pub(crate) name: &'static str,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// True if inputs are rounded to bytes.
    pub(crate) rounds: bool,
    /// True if rows of a gate and of what it multiplies take turns.
    pub(crate) interleaved: bool,
}

/// Rows of a weight that are of one form and fit a binding.
pub(crate) struct Slice {
    form: Form,
    rows: usize,
    codes: Buffer,
    high: Buffer,
    affine: Buffer,
    sizes: Buffer,
}

/// Where the rows of a slice come from.
struct Origin {
    form: Form,
    rows: Vec<(usize, usize)>, // a part, and a row of it
}

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
/// their scales, and outputs.
const BINDINGS: [Binding; 8] = [Read, Read, Read, Uniform, Uniform, Read, Read, Write];

/// Most rows of a step, whose products read each weight once for all of them.
pub(crate) const STEP_ROWS: usize = 16;

impl Linear {
    /// Repacks `parts`, whose rows stand one behind the other, or in turns if they are gates and what they multiply and
    /// of one form.
    ///
    /// # Errors
    /// What no kernel reads, and errors of the device.
    pub(crate) fn new(
        gpu: &Gpu,
        name: &'static str,
        parts: &[&Weight],
        gated: bool,
        choice: ActivationChoice,
        census: &mut Census,
    ) -> Result<Self> {
        let forms: Vec<Form> = (parts.iter())
            .map(|w| Form::of(name, w))
            .collect::<Result<_>>()?;
        let supports = |w: &Weight, rounding| {
            rounding == ROUNDED && Form::of(name, w).is_ok_and(|f| can_round(&f))
        };
        let activations = choice.resolve(parts, supports);
        let served = match activations {
            Activations::F32 => true,
            rounded => rounded == ROUNDED && forms.iter().all(can_round),
        };
        if !served {
            return Err(Error::Unsupported {
                engine: "nq over wgpu",
                what: name,
                expected: "inputs as f32, or as int8-g32 for codes in groups of 32 or more".into(),
                found: activations.to_string(),
            });
        }
        census.add(parts, activations);
        let interleaved = gated && forms.len() == 2 && forms[0] == forms[1];
        let mut slices = Vec::new();
        let outputs = parts.iter().map(|w| w.dims().rows).sum();
        let width = match interleaved {
            true => outputs / 2,
            false => outputs,
        };
        let mut first = 0;
        for origin in origins(parts, &forms, interleaved) {
            let largest = origin.form.row_bytes().into_iter().max().unwrap_or(0);
            // Whole tiles of GEMM, and pairs of gates and what they multiply.
            let most = gpu.most_bytes() / largest.max(1) / 64 * 64;
            if most == 0 {
                return Err(Error::Unsupported {
                    engine: "nq over wgpu",
                    what: name,
                    expected: "64 rows in a binding of the adapter, or --device cpu".into(),
                    found: format!("rows of {largest} bytes"),
                });
            }
            for rows in origin.rows.chunks(most) {
                let place = Place { first, width };
                slices.push(Slice::new(gpu, name, origin.form, parts, rows, place)?);
                first += rows.len();
            }
        }
        Ok(Linear {
            slices,
            name,
            inputs: forms[0].units * crate::pack::UNIT,
            outputs,
            rounds: activations != Activations::F32,
            interleaved,
        })
    }

    /// Bytes that it takes, all of which a token reads.
    pub(crate) fn bytes(&self) -> usize {
        let sizes = |s: &Slice| s.codes.size() + s.high.size() + s.affine.size();
        self.slices.iter().map(sizes).sum::<u64>() as usize
    }
}

/// True if kernels read such weights with inputs in bytes: groups are whole units.
fn can_round(form: &Form) -> bool {
    matches!(form.codes, Codes::Integers(_)) && form.shift >= 5
}

/// The rows of each run of parts of one form.
fn origins(parts: &[&Weight], forms: &[Form], interleaved: bool) -> Vec<Origin> {
    if interleaved {
        let rows = (0..parts[0].dims().rows).flat_map(|row| [(0, row), (1, row)]);
        return vec![Origin {
            form: forms[0],
            rows: rows.collect(),
        }];
    }
    let mut all: Vec<Origin> = Vec::new();
    for (part, (weight, &form)) in parts.iter().zip(forms).enumerate() {
        let rows = (0..weight.dims().rows).map(|row| (part, row));
        match all.last_mut().filter(|last| last.form == form) {
            Some(last) => last.rows.extend(rows),
            None => all.push(Origin {
                form,
                rows: rows.collect(),
            }),
        }
    }
    all
}

/// Where a slice's outputs go.
#[derive(Clone, Copy)]
struct Place {
    /// The number of its first row among all of the product.
    first: usize,
    /// Outputs of the product.
    width: usize,
}

impl Slice {
    fn new(
        gpu: &Gpu,
        name: &str,
        form: Form,
        parts: &[&Weight],
        rows: &[(usize, usize)],
        place: Place,
    ) -> Result<Self> {
        let [low, high, affine] = form.row_bytes();
        let buffer = |bytes: usize| gpu.buffer(name, bytes * rows.len());
        let slice = Slice {
            form,
            rows: rows.len(),
            codes: buffer(low)?,
            high: buffer(high)?,
            affine: buffer(affine)?,
            sizes: gpu.uniform(&[
                rows.len() as u32,
                form.units as u32,
                place.first as u32,
                place.width as u32,
                form.groups() as u32,
                form.shift,
                0,
                0,
            ])?,
        };
        let together = (UPLOAD / low).max(1);
        for (index, rows) in rows.chunks(together).enumerate() {
            let packed: Vec<PackedRows> = (rows.par_chunks(64))
                .map(|rows| {
                    let mut packed = PackedRows::default();
                    rows.iter()
                        .for_each(|&(part, row)| packed.push(&form, parts[part], row));
                    packed
                })
                .collect();
            let mut at = [low, high, affine].map(|bytes| bytes * index * together);
            for part in &packed {
                let buffers = [&slice.codes, &slice.high, &slice.affine];
                let words = [&part.codes, &part.high, &part.affine];
                for ((buffer, words), at) in buffers.into_iter().zip(words).zip(&mut at) {
                    let bytes: &[u8] = bytemuck::cast_slice(words);
                    if !bytes.is_empty() {
                        gpu.write(buffer, *at, bytes);
                    }
                    *at += bytes.len();
                }
            }
            // Copies on their way to the device are held until they are there.
            gpu.finish()?;
        }
        Ok(slice)
    }
}

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
    /// Scales of rounded inputs, or any buffer.
    pub(crate) x_scales: &'a Buffer,
    /// `[rows, outputs]`
    pub(crate) y: &'a Buffer,
}

impl BoundProduct {
    /// Binds `linear`.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn new(
        gpu: &Gpu,
        linear: &Linear,
        operands: Operands<'_>,
        outputs: Outputs,
    ) -> Result<Self> {
        let bind = |slice: &Slice| {
            let buffers = [
                &slice.codes,
                &slice.high,
                &slice.affine,
                &slice.sizes,
                operands.step,
                operands.x,
                operands.x_scales,
                operands.y,
            ];
            Ok((slice.form, slice.rows, gpu.bind(&BINDINGS, &buffers)?))
        };
        Ok(BoundProduct {
            slices: linear.slices.iter().map(bind).collect::<Result<_>>()?,
            outputs,
            rounds: linear.rounds,
        })
    }

    /// Its kernels for passes of `rows` rows, one for each slice, from `known` if they are there.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn kernels(
        &self,
        gpu: &Gpu,
        rows: usize,
        known: &mut ProductKernels,
    ) -> Result<Vec<Arc<Kernel>>> {
        let mut kernel = |&(form, ..): &(Form, usize, BindGroup)| {
            let key = (form, self.rounds, self.outputs, bucket(rows));
            if let Some(kernel) = known.get(&key) {
                return Ok(Arc::clone(kernel));
            }
            let source = source(&form, self.rounds, self.outputs);
            let kernel = gpu.kernel(&shaped(source, gpu, self.rounds, rows), &BINDINGS)?;
            known.insert(key, Arc::clone(&kernel));
            Ok(kernel)
        };
        self.slices.iter().map(&mut kernel).collect()
    }

    /// Adds the product of a pass of `rows` rows, with its kernels for as many, to `pass`.
    pub(crate) fn launch(&self, pass: &mut ComputePass<'_>, kernels: &[Arc<Kernel>], rows: usize) {
        for ((_, outputs, bound), kernel) in self.slices.iter().zip(kernels) {
            let grid = match rows <= STEP_ROWS {
                true => {
                    let groups = outputs.div_ceil(4 * together(bucket(rows), self.rounds));
                    Grid::new(groups.min(GRID), groups.div_ceil(GRID))
                }
                false => Grid::new(outputs.div_ceil(64), rows.div_ceil(64)),
            };
            launch(pass, kernel, bound, grid);
        }
    }
}

/// The rows for which there is a kernel that serves a step of `rows`; 0 stands for more than a step has.
pub(crate) fn bucket(rows: usize) -> usize {
    match rows {
        0..=STEP_ROWS => rows.next_power_of_two(),
        _ => 0,
    }
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

fn shaped(source: KernelSource, gpu: &Gpu, rounds: bool, rows: usize) -> KernelSource {
    match bucket(rows) {
        0 => source.file(include_str!("wgsl/gemm.wgsl")),
        bucket => source
            .file(include_str!("wgsl/gemv.wgsl"))
            .with("ROWS", bucket)
            .with("TOGETHER", together(bucket, rounds))
            .with("UNROLLED", unrolled(bucket, rounds))
            .with("TOTALS", 4 * together(bucket, rounds) * bucket)
            .with("GRID", GRID)
            .flag("SUBGROUPS", gpu.subgroups),
    }
}
