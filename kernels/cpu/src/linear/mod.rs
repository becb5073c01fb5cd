//! The Linear operation: weights repacked for this CPU, and the product.
//!
//! `pack` defines the layout, `float` and `int8` multiply it, `kernels` are the
//! registry's rows, `input` defines the layout of activations and `prepare` makes it; this
//! file splits the work, chooses the kernel and applies epilogues. Every thread streams contiguous
//! panels; `fetch` requests them a page ahead.
//!
//! Every kernel adds the products of an output in one order, whatever the number of rows of x: a row's results have
//! the same bits whichever rows are multiplied with it.

mod choose;
pub(crate) mod exl3;
mod experts;
mod fetch;
pub(crate) mod float;
pub(crate) mod input;
pub(crate) mod int8;
pub mod kernel;
pub mod kernels;
pub(crate) mod pack;
mod prepare;
pub(crate) mod trellis;

use super::memory::{Buffer, SharedSlice, WeightFile};
use super::simd::LANES;
use super::table::{KernelTable, PANELS};
use super::{Cpu, Team, with_scratch};
use choose::{choose, no_kernel, serving, without_groups};
use input::{Layout, Prepared};
use kernel::LinearKernel;
use nq_formats::Weight;
use nq_kernels::registry::{Activations, KernelSet, WeightKind};
use nq_kernels::{Error, Result, reference};
use nq_model::Dims;
use pack::PanelWeight;
pub use pack::held_bits;
use std::ops::Range;

/// What is done with a product as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// `y = x w^T`.
    Store,
    /// `y += x w^T` (the residual).
    Add,
    /// Two parts of equal height, gate and up: `y = silu(x gate^T) * (x up^T)`.
    SiluMul,
}

/// One or several weights with the same input, repacked for this CPU's kernels and
/// multiplied in one pass (QKV; gate and up); or those of every expert of a layer.
pub struct Linear {
    name: &'static str,
    parts: Vec<StackPart>,
    /// Number of experts whose parts these are, one expert after another; 1 if there are no experts.
    experts: usize,
    activations: Activations,
    in_features: usize,
    out_features: usize,
    bytes: usize,
}

/// One of the stacked weights.
struct StackPart {
    weight: Body,
    /// Index of its first output among those of all parts.
    start: usize,
    rows: usize,
}

impl StackPart {
    fn packed(&self) -> Option<&PanelWeight> {
        match &self.weight {
            Body::Packed(packed, _) => Some(packed),
            Body::Canonical(_) => None,
        }
    }
}

enum Body {
    /// For fused kernels, with the kernels to use for increasing numbers of rows of x.
    Packed(PanelWeight, Vec<&'static LinearKernel>),
    /// For the reference kernel: the weight as it was given.
    Canonical(Weight),
}

/// Name of the reference kernel.
const REFERENCE: &str = "reference";

/// Rows of x multiplied in one pass over the weights: enough to hide the cost of a pass, few enough
/// for their activations and a task's results to stay in the second-level cache. A multiple
/// of all kernels' column counts.
const PASS_ROWS: usize = 240;

/// Panels per call of a kernel that has few columns.
const GEMV_PANELS: usize = 16;

impl Linear {
    /// Repacks `parts`, stacked along their outputs.
    ///
    /// # Errors
    /// [`Error::NoKernel`] if the registry has no row for a part's scheme with these
    /// activations; [`Error::Shape`] if the parts' inputs differ.
    pub fn new(
        cpu: &Cpu,
        parts: &[&Weight],
        activations: Activations,
        kernels: KernelSet,
    ) -> Result<Self> {
        Self::of_experts(cpu, parts, 1, activations, kernels)
    }

    /// Like [`Linear::new`], for stacks of `experts` weights, for use with [`Cpu::experts`].
    ///
    /// # Panics
    /// If a part's rows are not a multiple of `experts`.
    pub fn of_experts(
        cpu: &Cpu,
        parts: &[&Weight],
        experts: usize,
        activations: Activations,
        kernels: KernelSet,
    ) -> Result<Self> {
        let in_features = parts.first().map_or(0, |w| w.dims().cols);
        if let Some(w) = parts.iter().find(|w| w.dims().cols != in_features) {
            return Err(Error::Shape {
                op: "linear",
                what: "inputs of a stacked weight",
                expected: in_features.to_string(),
                found: w.dims().cols.to_string(),
            });
        }
        let mut stacked = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for expert in 0..experts {
            start = 0;
            for &whole in parts {
                let rows = whole.dims().rows / experts;
                assert_eq!(
                    rows * experts,
                    whole.dims().rows,
                    "rows of {experts} experts"
                );
                let part = match experts {
                    1 => whole.clone(),
                    _ => whole.rows(expert * rows..(expert + 1) * rows),
                };
                let (mut weight, size) = body(cpu, part, activations, kernels)?;
                if let Body::Packed(w, _) = &mut weight {
                    trellis::share_input_scales(w, stacked.iter().filter_map(StackPart::packed));
                }
                stacked.push(StackPart {
                    weight,
                    start,
                    rows,
                });
                start += rows;
                bytes += size;
            }
        }
        Ok(Linear {
            name: "linear",
            parts: stacked,
            experts,
            activations,
            in_features,
            out_features: start,
            bytes,
        })
    }

    /// Bytes that [`Linear::new`] takes for a weight `[out, inputs]` of this kind with fused kernels.
    pub fn bytes_of(kind: WeightKind, dims: Dims) -> usize {
        PanelWeight::bytes_of(kind, dims)
    }

    /// True if [`Linear::new`] has a kernel for this weight with these activations.
    pub fn supports(
        cpu: &Cpu,
        weight: &Weight,
        activations: Activations,
        kernels: KernelSet,
    ) -> bool {
        match kernels {
            KernelSet::Reference => !without_groups(activations),
            KernelSet::Fused => choose(cpu, WeightKind::of(weight), activations).is_ok(),
        }
    }

    /// Sets the name under which [`Cpu::profile`] counts the operation.
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Number of inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Number of experts; 1 if these are not the weights of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// The parts of one expert.
    fn expert(&self, expert: usize) -> &[StackPart] {
        let each = self.parts.len() / self.experts;
        &self.parts[expert * each..][..each]
    }

    /// Outputs of all parts together, for one expert.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bytes that one pass reads from memory: packed codes and scales, of all experts.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// True for weights of experts, of which a token reads some.
    pub(crate) fn is_of_experts(&self) -> bool {
        self.experts > 1
    }

    /// Moves what is packed of it to `file`, and returns so many bytes; weights kept as they were given stay where they are.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn move_to(&mut self, file: &mut WeightFile) -> std::io::Result<usize> {
        let mut moved = 0;
        for part in &mut self.parts {
            if let Body::Packed(packed, _) = &mut part.weight {
                packed.move_to(file)?;
                moved = self.bytes;
            }
        }
        Ok(moved)
    }

    /// The packed codes, part by part; none for weights kept as they were given.
    pub(crate) fn packed_words(&self) -> impl Iterator<Item = &[u32]> {
        let packed = self.parts.iter().filter_map(StackPart::packed);
        packed.map(|packed| &packed.data[..])
    }

    /// The type that inputs are rounded to.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// The kernels in use, without duplicates, those for few rows of x first.
    pub fn kernel_names(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for part in &self.parts {
            let own = match &part.weight {
                Body::Packed(_, kernels) => kernels.iter().map(|k| k.info.name).collect(),
                Body::Canonical(_) => vec![REFERENCE],
            };
            for name in own {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        names
    }

    /// Writes weight row `row` of the stack as f32 to `out` (`in_features` long): the same
    /// values as the canonical weight has, so that an embedding that is also the head needs no
    /// second copy.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is no such row, or `out` has another length.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.out_features || out.len() != self.in_features {
            return Err(Error::Shape {
                op: "dequantize_row",
                what: "row and output",
                expected: format!(
                    "a row below {} and {} values",
                    self.out_features, self.in_features
                ),
                found: format!("row {row} and {} values", out.len()),
            });
        }
        let after = self.parts.partition_point(|p| p.start <= row);
        let part = &self.parts[after - 1];
        match &part.weight {
            Body::Packed(w, _) => w.dequantize_row(row - part.start, out),
            Body::Canonical(w) => w.dequantize_row(row - part.start, out)?,
        }
        Ok(())
    }
}

/// A part in the form that kernels take, and its bytes.
fn body(
    cpu: &Cpu,
    weight: Weight,
    activations: Activations,
    kernels: KernelSet,
) -> Result<(Body, usize)> {
    let kind = WeightKind::of(&weight);
    match kernels {
        KernelSet::Reference if without_groups(activations) => {
            Err(no_kernel(cpu, kind, activations))
        }
        KernelSet::Reference => {
            let size = weight.bytes();
            Ok((Body::Canonical(weight), size))
        }
        KernelSet::Fused => {
            let chosen = choose(cpu, kind, activations)?;
            let align = kernels::align(kind, activations);
            let packed = PanelWeight::new(cpu.team(), &weight, chosen[0].codes(), align)?;
            let size = packed.bytes();
            Ok((Body::Packed(packed, chosen), size))
        }
    }
}

impl Cpu {
    /// Multiplies `x` `[m, in]` with a [`Linear`] into `y` `[m, out]` (`[m, out / 2]` for
    /// [`Epilogue::SiluMul`]), all row-major f32.
    ///
    /// # Errors
    /// [`Error::Shape`] if a slice's length is wrong, or for [`Epilogue::SiluMul`] if
    /// there are not two parts of equal height.
    pub fn linear(&self, w: &Linear, x: &[f32], y: &mut [f32], epilogue: Epilogue) -> Result<()> {
        let (k, n) = (w.in_features, w.out_features);
        let m = x.len() / k.max(1);
        if w.experts != 1 {
            return Err(Error::Shape {
                op: "linear",
                what: "experts",
                expected: "one weight".into(),
                found: format!("those of {} experts", w.experts),
            });
        }
        let width = match epilogue {
            Epilogue::Store | Epilogue::Add => n,
            Epilogue::SiluMul => {
                if w.parts.len() != 2 || w.parts[0].rows != w.parts[1].rows {
                    let found: Vec<_> = w.parts.iter().map(|p| p.rows).collect();
                    return Err(Error::Shape {
                        op: "linear",
                        what: "gate and up",
                        expected: "two parts of equal height".into(),
                        found: format!("parts of {found:?} outputs"),
                    });
                }
                n / 2
            }
        };
        if x.len() != m * k || y.len() != m * width {
            return Err(Error::Shape {
                op: "linear",
                what: "x and y",
                expected: format!("[{m}, {k}] and [{m}, {width}]"),
                found: format!("{} and {} values", x.len(), y.len()),
            });
        }
        if m == 0 || width == 0 {
            return Ok(());
        }
        let begin = self.profile.begin();
        for (x, y) in x.chunks(PASS_ROWS * k).zip(y.chunks_mut(PASS_ROWS * width)) {
            if matches!(w.parts[0].weight, Body::Canonical(_)) {
                self.linear_reference(w, x, y, width, epilogue)?;
            } else {
                self.linear_pass(w, &w.parts, x, y, width, epilogue);
            }
        }
        let kernel = match &w.parts[0].weight {
            Body::Packed(_, kernels) => serving(kernels, m.min(PASS_ROWS)).info.name,
            Body::Canonical(_) => REFERENCE,
        };
        let bytes = w.bytes * m.div_ceil(PASS_ROWS);
        self.profile
            .end(begin, w.name, kernel, Dims::new(n, k), bytes);
        Ok(())
    }

    /// `out = silu(gate) * up` `[m, n / 2]` of the products `gate_up` `[m, n]` that [`Cpu::linear`] made with `w` and
    /// [`Epilogue::Store`]: bit for bit what [`Epilogue::SiluMul`] makes.
    ///
    /// # Panics
    /// If the slices' lengths do not match.
    pub(crate) fn silu_mul(&self, w: &Linear, gate_up: &[f32], out: &mut [f32]) {
        let (n, m) = (w.out_features, gate_up.len() / w.out_features.max(1));
        assert_eq!(2 * out.len(), m * n, "silu_mul: gate, up and out");
        let packed = matches!(w.parts[0].weight, Body::Packed(..));
        let out = SharedSlice::new(out);
        self.team().run_ranges(m, 1, |rows| {
            for row in rows {
                let (gate, up) = gate_up[row * n..][..n].split_at(n / 2);
                // SAFETY: each row is written once.
                let out = unsafe { out.part(row * n / 2..(row + 1) * n / 2) };
                out.copy_from_slice(gate);
                match packed {
                    true => (self.table.silu_mul)(out, up),
                    false => {
                        (out.iter_mut().zip(up)).for_each(|(y, up)| *y = reference::silu(*y) * up)
                    }
                }
            }
        });
    }

    /// One pass over packed parts of `w` for at most [`PASS_ROWS`] rows.
    fn linear_pass(
        &self,
        w: &Linear,
        parts: &[StackPart],
        x: &[f32],
        y: &mut [f32],
        width: usize,
        epilogue: Epilogue,
    ) {
        let m = x.len() / w.in_features;
        let many = m > float::GEMV_COLUMNS;
        with_scratch!(Vec<Prepared>, |inputs| {
            let (parts, _) = self.prepare_parts(parts, w, x, inputs, 0, &mut Vec::new());
            let pass = LinearPass {
                table: self.table,
                parts: &parts,
                inputs,
                m,
                width,
                step: step(&parts, if many { PANELS } else { 1 }),
                batch: if many {
                    kernels::GEMM_PANELS
                } else {
                    GEMV_PANELS
                },
            };
            let y = SharedSlice::new(y);
            match epilogue {
                Epilogue::SiluMul => pass.silu_mul(self.team(), &y),
                Epilogue::Store => pass.store(self.team(), &y, false),
                Epilogue::Add => pass.store(self.team(), &y, true),
            }
        });
    }

    /// Pairs `parts`, some of those of `w`, with their kernels for the rows of `x`, and prepares the
    /// activations, from `inputs[first]` on, once for all parts with the same layout; `layouts` are those
    /// prepared before `first`. Also returns the index for the next ones.
    fn prepare_parts<'a>(
        &self,
        parts: &'a [StackPart],
        w: &Linear,
        x: &[f32],
        inputs: &mut Vec<Prepared>,
        first: usize,
        layouts: &mut Vec<Layout>,
    ) -> (Vec<PassPart<'a>>, usize) {
        let m = x.len() / w.in_features;
        let before = first - layouts.len();
        let prepare = |part: &'a StackPart| {
            let Body::Packed(packed, kernels) = &part.weight else {
                unreachable!("a Linear is either packed or canonical");
            };
            let kernel = serving(kernels, m);
            let layout = kernel.layout(packed, w.activations);
            let place = layouts.iter().position(|l| *l == layout);
            let place = place.unwrap_or_else(|| {
                let i = before + layouts.len();
                if inputs.len() == i {
                    inputs.push(Prepared::default());
                }
                inputs[i].prepare(self.team(), self.table, &layout, x, w.in_features);
                layouts.push(layout);
                layouts.len() - 1
            });
            PassPart {
                part,
                packed,
                kernel,
                input: before + place,
            }
        };
        let parts = parts.iter().map(prepare).collect();
        (parts, before + layouts.len())
    }

    /// Plain products of canonical weights: the baseline.
    fn linear_reference(
        &self,
        w: &Linear,
        x: &[f32],
        y: &mut [f32],
        width: usize,
        epilogue: Epilogue,
    ) -> Result<()> {
        let (k, n) = (w.in_features, w.out_features);
        let m = x.len() / k;
        let mut rounded = x.to_vec();
        reference::round_activations(&mut rounded, k, w.activations);
        // [n, m]: a task owns whole rows.
        let mut product = vec![0f32; n * m];
        let rows: Vec<(&Weight, usize)> = w
            .parts
            .iter()
            .filter_map(|p| match &p.weight {
                Body::Canonical(weight) => Some((weight, p.rows)),
                Body::Packed(..) => None,
            })
            .flat_map(|(weight, rows)| (0..rows).map(move |r| (weight, r)))
            .collect();
        if let Some((weight, _)) = rows.first() {
            // The only possible failure, an element type that is not a float, shows here.
            weight.dequantize_row(0, &mut vec![0.0; k])?;
        }
        self.team().run_chunks(&mut product, m, |row, out| {
            let (weight, r) = rows[row];
            let mut values = vec![0f32; k];
            weight
                .dequantize_row(r, &mut values)
                .expect("a float type, as checked above");
            for (x, out) in rounded.chunks_exact(k).zip(out) {
                *out = reference::dot(x, &values);
            }
        });
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            for (j, y) in y.iter_mut().enumerate() {
                let value = product[j * m + i];
                match epilogue {
                    Epilogue::Store => *y = value,
                    Epilogue::Add => *y += value,
                    Epilogue::SiluMul => *y = reference::silu(value) * product[(j + width) * m + i],
                }
            }
        }
        Ok(())
    }
}

/// One pass of at most [`PASS_ROWS`] rows over a [`Linear`].
struct LinearPass<'a> {
    table: &'static KernelTable,
    parts: &'a [PassPart<'a>],
    inputs: &'a [Prepared],
    /// Number of rows of x.
    m: usize,
    /// Number of outputs of a row.
    width: usize,
    /// Panels per step, the unit in which threads share the work.
    step: usize,
    /// Most panels per call of a kernel.
    batch: usize,
}

/// The share of one part in a pass.
struct PassPart<'a> {
    part: &'a StackPart,
    packed: &'a PanelWeight,
    kernel: &'static LinearKernel,
    /// Index of its prepared activations.
    input: usize,
}

/// Panels per step of a pass: at least `least`, and as many as a part's kernel takes together.
fn step(parts: &[PassPart<'_>], least: usize) -> usize {
    parts
        .iter()
        .map(|p| p.kernel.step())
        .fold(least, usize::max)
}

impl LinearPass<'_> {
    fn steps(&self, part: &PassPart<'_>) -> usize {
        part.packed.panels().div_ceil(self.step)
    }

    fn columns(&self, part: &PassPart<'_>) -> usize {
        self.inputs[part.input].columns()
    }

    /// Cuts a range of a part's steps into ranges of at most `batch` panels.
    fn batches(
        &self,
        part: &PassPart<'_>,
        steps: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> {
        let (start, end) = (
            steps.start * self.step,
            (steps.end * self.step).min(part.packed.panels()),
        );
        let batch = self.batch;
        (start..end)
            .step_by(batch)
            .map(move |p| p..(p + batch).min(end))
    }

    /// The product of a part's `panels`: `[panels, columns, 16]`.
    fn run(&self, part: &PassPart<'_>, panels: Range<usize>, out: &mut [f32]) {
        let input = &self.inputs[part.input];
        // SAFETY: the input was prepared with this kernel's layout; `run` checks panels and
        // room; the table is that of this CPU's instruction set.
        unsafe { part.kernel.run(self.table, part.packed, input, panels, out) };
    }

    /// Writes the products of all parts side by side to `y`; with `add`, adds them.
    fn store(&self, team: &Team, y: &SharedSlice<'_, f32>, add: bool) {
        let ends: Vec<usize> = self
            .parts
            .iter()
            .scan(0, |end, p| {
                *end += self.steps(p);
                Some(*end)
            })
            .collect();
        let total = ends.last().copied().unwrap_or(0);
        team.run_ranges(total, 1, |range| {
            with_scratch!(Buffer<f32>, |buffer| {
                let mut first = 0;
                for (part, &end) in self.parts.iter().zip(&ends) {
                    let own =
                        range.start.clamp(first, end) - first..range.end.clamp(first, end) - first;
                    first = end;
                    for panels in self.batches(part, own) {
                        let out = buffer.reserve(panels.len() * self.columns(part) * LANES);
                        self.run(part, panels.clone(), out);
                        // SAFETY: these panels' outputs are written by this task alone.
                        unsafe { self.put(part, &panels, out, y, add) };
                    }
                }
            });
        });
    }

    /// `silu` of the first part's product, times the second part's product.
    fn silu_mul(&self, team: &Team, y: &SharedSlice<'_, f32>) {
        let steps = self.steps(&self.parts[0]);
        team.run_ranges(steps, 1, |range| self.silu_mul_range(range, y));
    }

    /// [`LinearPass::silu_mul`] for the panels of these steps, which no other task writes.
    fn silu_mul_range(&self, steps: Range<usize>, y: &SharedSlice<'_, f32>) {
        let [gate, up] = self.parts else {
            unreachable!("checked by the caller: gate and up");
        };
        with_scratch!(Buffer<f32>, |buffer| {
            for panels in self.batches(gate, steps) {
                let strides = [gate, up].map(|p| self.columns(p) * LANES);
                let sizes = strides.map(|stride| panels.len() * stride);
                let buffer = buffer.reserve(sizes[0] + sizes[1]);
                let (g, u) = buffer.split_at_mut(sizes[0]);
                self.run(gate, panels.clone(), g);
                self.run(up, panels.clone(), u);
                for p in 0..panels.len() {
                    let g = &mut g[p * strides[0]..][..self.m * LANES];
                    let u = &u[p * strides[1]..][..self.m * LANES];
                    (self.table.silu_mul)(g, u);
                }
                // SAFETY: these panels' outputs are written by this task alone.
                unsafe { self.put(gate, &panels, g, y, false) };
            }
        });
    }

    /// Writes results `[panels, columns, 16]` to their places in `y` `[m, width]`.
    ///
    /// # Safety
    /// No other thread writes these panels' outputs.
    unsafe fn put(
        &self,
        part: &PassPart<'_>,
        panels: &Range<usize>,
        results: &[f32],
        y: &SharedSlice<'_, f32>,
        add: bool,
    ) {
        let StackPart { start, rows, .. } = *part.part;
        let columns = self.columns(part);
        // Rows in the outer loop: a row's outputs of all panels are adjacent.
        for c in 0..self.m {
            for (i, panel) in panels.clone().enumerate() {
                let first = panel * LANES;
                let count = LANES.min(rows - first);
                let at = c * self.width + start + first;
                // SAFETY: by contract.
                let y = unsafe { y.part(at..at + count) };
                let results = &results[(i * columns + c) * LANES..][..count];
                if add {
                    y.iter_mut().zip(results).for_each(|(y, r)| *y += r);
                } else {
                    y.copy_from_slice(results);
                }
            }
        }
    }
}
