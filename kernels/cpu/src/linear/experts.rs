//! The experts of a mixture: gate, up and down of only those experts that rows are routed to.
//!
//! The rows of an expert are one product, whichever sequences they belong to. Threads share the panels
//! of all experts' gate and up, then the panels of the outputs. For each output panel, experts are
//! added in ascending order, so that the sum has one fixed order.

use super::input::Prepared;
use super::{Body, Epilogue, Linear, LinearPass, PASS_ROWS, PassPart, kernels, serving, step};
use crate::memory::{Buffer, SharedSlice};
use crate::simd::LANES;
use crate::table::PANELS;
use crate::{Cpu, with_scratch};
use nq_kernels::routing::Routes;
use nq_kernels::{Error, Result};
use nq_model::Dims;
use std::ops::Range;

/// Rows routed to one expert, at most [`PASS_ROWS`].
struct RoutedRows {
    expert: usize,
    /// Index of the row in x and y, and the factor of its output.
    rows: Vec<(usize, f32)>,
    /// Index of its first row among those of all jobs.
    start: usize,
}

/// Buffers of a call, kept for the next one.
#[derive(Default)]
struct ExpertScratch {
    gathered: Buffer<f32>,   // [rows of a job, inputs]
    gated: Buffer<f32>,      // [rows of all jobs, width of an expert]
    prepared: Vec<Prepared>, // by job and part
}

impl Linear {
    /// The parts of one expert as a separate product.
    fn canonical(&self, expert: usize) -> Linear {
        let parts = self.expert(expert).iter();
        let parts = parts.map(|part| super::StackPart {
            weight: match &part.weight {
                Body::Canonical(weight) => Body::Canonical(weight.clone()),
                Body::Packed(..) => unreachable!("called for weights as they came"),
            },
            start: part.start,
            rows: part.rows,
        });
        Linear {
            parts: parts.collect(),
            experts: 1,
            ..*self
        }
    }
}

impl Cpu {
    /// Adds to each row of `y` `[m, outputs]` the sum of `weight * down(silu(gate(x)) * up(x))` over
    /// its experts in `routes`, with `x` `[m, inputs]`. Reads only the weights of experts that some row
    /// is routed to.
    ///
    /// # Errors
    /// [`Error::Shape`] if `gate_up` does not have two parts of equal height, if `down` does not take
    /// their width, if `routes` has other numbers of rows or experts, or if a slice's length is wrong.
    pub fn experts(
        &self,
        gate_up: &Linear,
        down: &Linear,
        routes: &Routes,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        check(gate_up, down, routes, x, y)?;
        let begin = self.profile.begin();
        let jobs = jobs(routes);
        let kernel = match jobs.first().map(|j| &gate_up.expert(j.expert)[0].weight) {
            Some(Body::Packed(_, kernels)) => {
                self.run_experts(gate_up, down, &jobs, x, y);
                serving(kernels, jobs[0].rows.len()).info.name
            }
            Some(Body::Canonical(_)) => {
                self.experts_reference(gate_up, down, &jobs, x, y)?;
                super::REFERENCE
            }
            None => return Ok(()),
        };
        let bytes = jobs.len() * (gate_up.bytes + down.bytes) / gate_up.experts;
        let shape = Dims::new(gate_up.out_features / 2, gate_up.in_features);
        self.profile.end(begin, "experts", kernel, shape, bytes);
        Ok(())
    }

    /// `silu(gate(x)) * up(x)` of one expert for all rows of `x` `[m, inputs]`, whether routed to it or
    /// not, into `y` `[m, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is no such expert or a slice's length is wrong.
    pub(crate) fn gated_by(
        &self,
        gate_up: &Linear,
        expert: usize,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let (k, width) = (gate_up.in_features, gate_up.out_features / 2);
        let m = x.len() / k.max(1);
        if expert >= gate_up.experts || x.len() != m * k || y.len() != m * width {
            return Err(Error::Shape {
                op: "experts",
                what: "expert, x and y",
                expected: format!("below {}, [{m}, {k}] and [{m}, {width}]", gate_up.experts),
                found: format!("{expert}, {} and {} values", x.len(), y.len()),
            });
        }
        let parts = gate_up.expert(expert);
        for (x, y) in x.chunks(PASS_ROWS * k).zip(y.chunks_mut(PASS_ROWS * width)) {
            match &parts[0].weight {
                Body::Packed(..) => {
                    self.linear_pass(gate_up, parts, x, y, width, Epilogue::SiluMul);
                }
                Body::Canonical(_) => {
                    let own = gate_up.canonical(expert);
                    self.linear_reference(&own, x, y, width, Epilogue::SiluMul)?;
                }
            }
        }
        Ok(())
    }

    fn run_experts(
        &self,
        gate_up: &Linear,
        down: &Linear,
        jobs: &[RoutedRows],
        x: &[f32],
        y: &mut [f32],
    ) {
        let (width, all) = (
            down.in_features,
            jobs.iter().map(|j| j.rows.len()).sum::<usize>(),
        );
        let one = x.len() == gate_up.in_features;
        with_scratch!(ExpertScratch, |scratch| {
            let ExpertScratch {
                gathered,
                gated,
                prepared,
            } = scratch;
            let gated = gated.reserve(all * width);
            let k = gate_up.in_features;
            let parts = self.prepare(gate_up, jobs, gathered, prepared, one, |job, to| {
                for (to, &(row, _)) in to.chunks_exact_mut(k).zip(&job.rows) {
                    to.copy_from_slice(&x[row * k..(row + 1) * k]);
                }
            });
            let passes = passes_of(self, jobs, &parts, prepared, width);
            let steps = passes[0].steps(&parts[0][0]);
            let out = SharedSlice::new(gated);
            self.team().run_ranges(jobs.len() * steps, 1, |range| {
                for (i, (job, pass)) in jobs.iter().zip(&passes).enumerate() {
                    let own = part_of(&range, i * steps, steps);
                    if !own.is_empty() {
                        pass.silu_mul_range(own, &out.within(job.values(width)));
                    }
                }
            });
            let gated = &*gated;
            let parts = self.prepare(down, jobs, gathered, prepared, false, |job, to| {
                to.copy_from_slice(&gated[job.values(width)]);
            });
            let passes = passes_of(self, jobs, &parts, prepared, down.out_features);
            let steps = passes[0].steps(&parts[0][0]);
            let y = SharedSlice::new(y);
            self.team().run_ranges(steps, 1, |range| {
                for (job, pass) in jobs.iter().zip(&passes) {
                    pass.add_rows(range.clone(), &job.rows, &y);
                }
            });
        });
    }

    /// The parts of each job's expert with their kernels, and the prepared activations of the rows
    /// that `gather` writes. With `one`, all jobs have the same row, prepared for the first job alone.
    fn prepare<'a>(
        &self,
        w: &'a Linear,
        jobs: &[RoutedRows],
        gathered: &mut Buffer<f32>,
        prepared: &mut Vec<Prepared>,
        one: bool,
        gather: impl Fn(&RoutedRows, &mut [f32]),
    ) -> Vec<Vec<PassPart<'a>>> {
        let mut next = 0;
        let mut layouts = Vec::new();
        let each = jobs.iter().map(|job| {
            let x = gathered.reserve(job.rows.len() * w.in_features);
            if !one || next == 0 {
                layouts.clear();
                gather(job, x);
            }
            let stack = w.expert(job.expert);
            let (parts, end) = self.prepare_parts(stack, w, x, prepared, next, &mut layouts);
            next = end;
            parts
        });
        each.collect()
    }

    fn experts_reference(
        &self,
        gate_up: &Linear,
        down: &Linear,
        jobs: &[RoutedRows],
        x: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let (k, width, n) = (gate_up.in_features, down.in_features, down.out_features);
        for job in jobs {
            let rows = job.rows.iter();
            let x: Vec<f32> = rows
                .flat_map(|r| &x[r.0 * k..(r.0 + 1) * k])
                .copied()
                .collect();
            let mut gated = vec![0.0; job.rows.len() * width];
            let mut out = vec![0.0; job.rows.len() * n];
            let first = gate_up.canonical(job.expert);
            self.linear_reference(&first, &x, &mut gated, width, Epilogue::SiluMul)?;
            let second = down.canonical(job.expert);
            self.linear_reference(&second, &gated, &mut out, n, Epilogue::Store)?;
            for (out, &(row, weight)) in out.chunks_exact(n).zip(&job.rows) {
                let y = &mut y[row * n..(row + 1) * n];
                y.iter_mut().zip(out).for_each(|(y, o)| *y += weight * o);
            }
        }
        Ok(())
    }
}

/// A pass over the expert of each job.
fn passes_of<'a>(
    cpu: &Cpu,
    jobs: &[RoutedRows],
    parts: &'a [Vec<PassPart<'a>>],
    inputs: &'a [Prepared],
    width: usize,
) -> Vec<LinearPass<'a>> {
    let pass = |(job, parts): (&RoutedRows, &'a Vec<PassPart<'a>>)| LinearPass {
        table: cpu.table,
        parts,
        inputs,
        m: job.rows.len(),
        width,
        step: step(parts, PANELS),
        batch: kernels::GEMM_PANELS,
    };
    jobs.iter().zip(parts).map(pass).collect()
}

impl RoutedRows {
    /// The range of its rows in a matrix of all jobs' rows.
    fn values(&self, width: usize) -> Range<usize> {
        self.start * width..(self.start + self.rows.len()) * width
    }
}

fn jobs(routes: &Routes) -> Vec<RoutedRows> {
    let mut jobs = Vec::new();
    let mut start = 0;
    for (expert, rows) in routes.by_expert() {
        for rows in rows.chunks(PASS_ROWS) {
            let rows = rows.to_vec();
            let next = start + rows.len();
            jobs.push(RoutedRows {
                expert,
                rows,
                start,
            });
            start = next;
        }
    }
    jobs
}

/// The part of `range` inside `start .. start + len`, relative to `start`.
fn part_of(range: &Range<usize>, start: usize, len: usize) -> Range<usize> {
    let end = start + len;
    range.start.clamp(start, end) - start..range.end.clamp(start, end) - start
}

fn check(gate_up: &Linear, down: &Linear, routes: &Routes, x: &[f32], y: &[f32]) -> Result<()> {
    let fail = |what, expected: String, found: String| {
        Err(Error::Shape {
            op: "experts",
            what,
            expected,
            found,
        })
    };
    let parts: Vec<usize> = gate_up.expert(0).iter().map(|p| p.rows).collect();
    if parts != [down.in_features; 2] || down.expert(0).len() != 1 {
        let expected = format!("gate and up of {} outputs", down.in_features);
        return fail("gate and up", expected, format!("{parts:?}"));
    }
    let rows = 0..routes.rows();
    let last = rows.filter_map(|r| Some(routes.of(r).last()?.0)).max();
    if gate_up.experts != down.experts || last.is_some_and(|e| e as usize >= gate_up.experts) {
        let expected = format!("{} in both weights and below it in routes", gate_up.experts);
        let found = format!("{} and {last:?}", down.experts);
        return fail("experts", expected, found);
    }
    let (m, k, n) = (routes.rows(), gate_up.in_features, down.out_features);
    if x.len() != m * k || y.len() != m * n {
        let found = format!("{} and {} values", x.len(), y.len());
        return fail("x and y", format!("[{m}, {k}] and [{m}, {n}]"), found);
    }
    Ok(())
}

impl LinearPass<'_> {
    /// Multiplies panels `steps` of the single part and adds each row, times its weight, to its row
    /// of `y`.
    fn add_rows(&self, steps: Range<usize>, rows: &[(usize, f32)], y: &SharedSlice<'_, f32>) {
        let part = &self.parts[0];
        let columns = self.columns(part);
        with_scratch!(Buffer<f32>, |buffer| {
            for panels in self.batches(part, steps) {
                let out = buffer.reserve(panels.len() * columns * LANES);
                self.run(part, panels.clone(), out);
                for (c, &(row, weight)) in rows.iter().enumerate() {
                    for (i, panel) in panels.clone().enumerate() {
                        let first = panel * LANES;
                        let count = LANES.min(part.part.rows - first);
                        let at = row * self.width + first;
                        // SAFETY: these panels' outputs are written by this task alone.
                        let y = unsafe { y.part(at..at + count) };
                        let results = &out[(i * columns + c) * LANES..][..count];
                        y.iter_mut()
                            .zip(results)
                            .for_each(|(y, r)| *y += weight * r);
                    }
                }
            }
        });
    }
}
