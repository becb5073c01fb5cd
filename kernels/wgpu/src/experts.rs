//! Mixtures of experts: the kernels that choose experts, and those of products with the ones that are chosen.
//!
//! A step's rows take two launches behind the scores: products that read the rows of the chosen experts alone, of which the
//! first chooses them and the second sums them. A prompt's rows are sorted by expert, and tiles of them multiplied.

use crate::buffers::Buffers;
use crate::gpu::{BoundKernel, Gpu, Grid, LaunchPass};
use crate::kernels::round;
use crate::linear::Linear;
use crate::product::{
    Operands, Outputs, RoutedInputs, RowProduct, STEP_ROWS, prompt_kernel, tiles_of,
};
use crate::sizes::Part;
use crate::source::KernelSource;
use nq_model::{Dims, Experts};
use nq_runtime::{Error, Result};
use wgpu::Buffer;

/// Most experts that are chosen of a row, and of which they are: a workgroup chooses, with the scores in its memory.
pub(crate) const MOST_ROUTES: usize = 64;
pub(crate) const MOST_EXPERTS: usize = 1024;

fn kernel(shape: &Experts, stage: &'static str) -> KernelSource {
    staged(KernelSource::default(), shape, stage)
}

fn staged(source: KernelSource, shape: &Experts, stage: &'static str) -> KernelSource {
    (source.file(include_str!("wgsl/route.wgsl")))
        .with("COUNT", shape.count)
        .with("ROUTES", shape.per_token)
        .flag("NORMALIZED", shape.normalized)
        .flag(stage, true)
}

/// The kernel that chooses the experts of a row.
pub(crate) fn route(shape: &Experts) -> KernelSource {
    let source = KernelSource::new(&[include_str!("wgsl/choose.wgsl")]);
    staged(source.with("THREADS", 64), shape, "ROUTE")
}

/// The kernel that sorts the routes of up to `rows` rows.
pub(crate) fn group(shape: &Experts, rows: usize) -> KernelSource {
    kernel(shape, "GROUP_ROUTES").with("LIST_AT", list_at(shape, rows))
}

/// The kernel that adds up what experts give, over rows of `hidden` values.
pub(crate) fn sum(shape: &Experts, hidden: usize) -> KernelSource {
    kernel(shape, "SUM_ROUTES").with("HIDDEN", hidden)
}

/// The kernel that multiplies rows of `width` values by the sigmoid of a score each.
pub(crate) fn weigh(width: usize) -> KernelSource {
    let source = KernelSource::new(&[include_str!("wgsl/route.wgsl")]);
    source.with("WIDTH", width).flag("WEIGH", true)
}

/// Tiles of at most 64 routes of one expert into which those of `rows` rows fall at most.
fn most_tiles(shape: &Experts, rows: usize) -> usize {
    let routes = rows * shape.per_token;
    routes / 64 + shape.count.min(routes)
}

/// Where the sorted routes of up to `rows` rows stand among the words of groups.
fn list_at(shape: &Experts, rows: usize) -> usize {
    1 + 3 * most_tiles(shape, rows)
}

/// Words of the groups of up to `rows` rows.
pub(crate) fn group_words(shape: &Experts, rows: usize) -> usize {
    list_at(shape, rows) + rows * shape.per_token
}

/// A product with the experts of rows.
struct ExpertProduct {
    name: &'static str,
    /// Of an expert.
    dims: Dims,
    /// Bytes of an expert.
    bytes: usize,
    step: RowProduct,
    /// By slice.
    prompt: Vec<BoundKernel>,
}

impl ExpertProduct {
    /// Binds `linear` to what steps and prompts read and write; outputs of prompts are what `outputs` says.
    fn new(
        gpu: &Gpu,
        linear: &Linear,
        step: RowProduct,
        prompt: Operands<'_>,
        outputs: Outputs,
        shape: &Experts,
        b: &Buffers,
    ) -> Result<Self> {
        let bound = linear.slices.iter().map(|slice| {
            let source = prompt_kernel(slice, linear.rounds, outputs)
                .with("ROUTES", shape.per_token)
                .with("LIST_AT", list_at(shape, b.rows))
                .flag("EXPERTS", true)
                .flag("SPREAD", outputs == Outputs::Gated);
            let operands = prompt.buffers(slice);
            gpu.bound(&source, &[&operands[..], &[&b[Part::Groups]]].concat())
        });
        Ok(ExpertProduct {
            name: linear.name,
            dims: Dims::new(linear.outputs / linear.experts, linear.inputs),
            bytes: linear.bytes() / linear.experts,
            prompt: bound.collect::<Result<_>>()?,
            step,
        })
    }

    /// Adds the product for `rows` rows; `experts` of them are read at most.
    fn launch(&self, pass: &mut LaunchPass<'_>, rows: usize, tiles: usize, experts: usize) {
        let name = match rows <= STEP_ROWS {
            true => {
                self.step.launch(pass, rows);
                "gemv"
            }
            false => {
                let grid = Grid::new(tiles_of(self.dims.rows), tiles);
                self.prompt.iter().for_each(|b| b.launch(pass, grid));
                "gemm"
            }
        };
        pass.ends((self.name, name, self.dims), experts * self.bytes);
    }
}

/// The experts of a layer, in a session.
pub(crate) struct ExpertsOp {
    shape: Experts,
    route: BoundKernel,
    group: BoundKernel,
    sum: BoundKernel,
    gate_up: ExpertProduct,
    /// Rounds what `down` multiplies in prompts.
    round: Option<BoundKernel>,
    down: ExpertProduct,
}

impl ExpertsOp {
    /// Binds the stacks of a layer's experts, behind a norm with these gains and `eps`.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device), and workgroups that cannot hold the inputs of a row.
    pub(crate) fn new(
        gpu: &Gpu,
        shape: &Experts,
        stacks: [&Linear; 2],
        norm: (&Buffer, f32),
        b: &Buffers,
    ) -> Result<Self> {
        let [gate_up, down] = stacks;
        let step = &b.step;
        let rounded = [&b[Part::Rounded], &b[Part::RoundedScales]];
        let [stream, scores, routes] = [Part::Stream, Part::Scores, Part::Routes].map(|p| &b[p]);
        let [gated, outs] = [Part::ExpertsGated, Part::ExpertsOut].map(|p| &b[p]);
        let operands = |x, beside, y| Operands { step, x, beside, y };
        let of_prompt = |linear: &Linear, x, y| match linear.rounds {
            true => operands(rounded[0], rounded[1], y),
            false => operands(x, x, y),
        };
        let of_step = |linear, operands, outputs, eps, scores: Option<_>| {
            let routes = RoutedInputs {
                routes,
                shape,
                scores,
                summed: scores.is_none(),
            };
            let product = RowProduct::new(gpu, linear, operands, outputs, eps, Some(routes))?;
            product.ok_or_else(|| Error::Unsupported {
                engine: "nq over wgpu",
                what: linear.name,
                expected: "rows that a workgroup holds, or --device cpu".into(),
                found: format!("{} inputs of {} experts", linear.inputs, shape.per_token),
            })
        };
        let (gains, eps) = (norm.0, Some(norm.1));
        let gates = operands(stream, gains, gated);
        let gates = of_step(gate_up, gates, Outputs::Gated, eps, Some(scores))?;
        let downs = operands(gated, gated, stream);
        let downs = of_step(down, downs, Outputs::Added, None, None)?;
        let product = |linear, step, prompt, outputs| {
            ExpertProduct::new(gpu, linear, step, prompt, outputs, shape, b)
        };
        let hidden = down.outputs / down.experts;
        let round = down.rounds.then(|| {
            let all = [step, gated, rounded[0], rounded[1]];
            gpu.bound(&round(down.inputs), &all)
        });
        Ok(ExpertsOp {
            route: gpu.bound(&route(shape), &[scores, routes])?,
            group: gpu.bound(&group(shape, b.rows), &[step, routes, &b[Part::Groups]])?,
            sum: gpu.bound(&sum(shape, hidden), &[routes, outs, stream])?,
            gate_up: {
                let prompt = of_prompt(gate_up, &b[Part::Normed], gated);
                product(gate_up, gates, prompt, Outputs::Gated)?
            },
            round: round.transpose()?,
            down: product(down, downs, of_prompt(down, gated, outs), Outputs::Stored)?,
            shape: *shape,
        })
    }

    /// Adds the experts of `rows` rows. In prompts, normalized rows are prepared.
    pub(crate) fn launch(&self, pass: &mut LaunchPass<'_>, rows: usize) {
        let (shape, routes) = (&self.shape, rows * self.shape.per_token);
        let tiles = most_tiles(shape, rows);
        let experts = shape.count.min(routes);
        let dims = Dims::new(1, shape.count);
        if rows > STEP_ROWS {
            self.route.launch(pass, Grid::new(rows, 1));
            self.group.launch(pass, Grid::new(1, 1));
            pass.ends(("route", "rows", dims), 0);
        }
        self.gate_up.launch(pass, rows, tiles, experts);
        if rows > STEP_ROWS {
            let round = self.round.iter();
            round.for_each(|op| op.launch(pass, Grid::new(routes, 1)));
        }
        self.down.launch(pass, rows, tiles, experts);
        if rows > STEP_ROWS {
            self.sum.launch(pass, Grid::new(rows, 1));
            pass.ends(("sum", "rows", dims), 0);
        }
    }
}
