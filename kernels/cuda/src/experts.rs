//! The experts of a mixture: for each row those with the best router scores, chosen on the device.

use super::driver::{Address, Buffer, LaunchShape, Operands, Stream};
use super::gemv::{GEMV_WARPS, GemvPlan};
use super::kernel::{Instance, kernels, kind_index, names};
use super::linear::DeviceLinear;
use super::mixture::{MOST_CHOSEN, MOST_EXPERTS, check, chosen, gated_width, stacked};
use super::pack::{PackedKind, PackedShape, SPAN, TILE};
use super::plan::ProductPlan;
use super::product::{Epilogue, Norm, PlannedRows};
use super::trellis::experts::ScoredRows;
use crate::cuda::experts::ExpertsArgs;
use crate::cuda::gemv::GemvArgs;
use nq_kernels::Result;
use nq_model::Experts;

kernels! {
    EXPERTS: ExpertsArgs = "experts" in "experts.cu",
        test "kernels/cuda/tests/cuda/experts.rs::experts_of_rows", bench "experts",
        instances names!(kinds "experts"; "");
    EXPERTS_SHORT: ExpertsArgs = "experts_short" in "experts.cu",
        test "kernels/cuda/tests/cuda/experts.rs::experts_of_rows", bench "experts",
        instances names!(schemes "experts"; "_short");
}

/// `sizeof(Chosen)` of `cuda/choose.cuh`.
pub(crate) const CHOSEN_BYTES: usize = 8 * MOST_CHOSEN + 4 * MOST_EXPERTS;

/// The kernel that runs half of a mixture's work for each of `m` rows.
fn kernel(plan: &GemvPlan, kind: PackedKind) -> Instance<ExpertsArgs> {
    match plan.depth {
        0 => EXPERTS_SHORT.instance(kind_index(kind)),
        _ => EXPERTS.instance(kind_index(kind)),
    }
}

impl Stream {
    /// Gate and up of each row's experts: `gated` `[m, gated_width]`, which is zero behind the values of an expert, becomes
    /// `weight * silu(gate n) * (up n)`, with `n` the rows of `x` `[m, inputs]`, normalized if there is a norm. `w` holds
    /// the interleaved stacks of all experts; `scores` `[m, stacked]` are the router's, behind them that of the
    /// shared expert, if there is one.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn experts_up(
        &self,
        w: &DeviceLinear,
        (x, norm): (&Buffer<f32>, Option<Norm<'_>>),
        scores: &Buffer<f32>,
        gated: &mut Buffer<f32>,
        experts: &Experts,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("experts_up");
        let rows = ScoredRows {
            x,
            norm,
            up: true,
            out: gated,
            scores,
            experts,
            m,
        };
        if self.coded_experts(&o, w, &rows)? {
            return Ok(());
        }
        // Ensures that each expert's gates and ups are whole tiles.
        o.multiple("width of an expert", TILE / 2, experts.width)?;
        let tiles = 2 * experts.width / TILE;
        check(&o, experts, w.rows(), 2 * experts.width, m)?;
        let gain = norm.map(|n| n.gain(&o, w.inputs())).transpose()?;
        let launch = Launch {
            epilogue: Epilogue::Silu,
            x: o.of("x", x, &[m, w.inputs()])?,
            gain: gain.unwrap_or(Address::NULL),
            eps: norm.map_or(0.0, |n| n.eps),
            out: o.of("gated", gated, &[m, gated_width(experts)])?,
            tiles: chosen(experts) * tiles,
            spans: w.spans(),
            part: tiles,
            expert_tiles: tiles,
            strides: (w.inputs(), gated_width(experts)),
        };
        self.launch_experts(&o, w, launch, scores, experts, m)
    }

    /// Down of each row's experts, applied to what [`Stream::experts_up`] left in `gated` and added to
    /// `x` `[m, outputs]`.
    pub fn experts_down(
        &self,
        w: &DeviceLinear,
        gated: &Buffer<f32>,
        scores: &Buffer<f32>,
        x: &mut Buffer<f32>,
        experts: &Experts,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("experts_down");
        let rows = ScoredRows {
            x: gated,
            norm: None,
            up: false,
            out: x,
            scores,
            experts,
            m,
        };
        if self.coded_experts(&o, w, &rows)? {
            return Ok(());
        }
        let outputs = w.rows() / stacked(experts).max(1);
        o.multiple("outputs of an expert", TILE, outputs)?;
        check(&o, experts, w.rows(), outputs, m)?;
        let inputs = gated_width(experts);
        let launch = Launch {
            epilogue: Epilogue::Add,
            x: o.of("gated", gated, &[m, inputs])?,
            gain: Address::NULL,
            eps: 0.0,
            out: o.of("x", x, &[m, outputs])?,
            tiles: outputs / TILE,
            spans: chosen(experts) * w.spans(),
            part: w.spans(),
            expert_tiles: outputs / TILE,
            strides: (inputs, outputs),
        };
        self.launch_experts(&o, w, launch, scores, experts, m)
    }

    fn launch_experts(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        launch: Launch,
        scores: &Buffer<f32>,
        experts: &Experts,
        m: usize,
    ) -> Result<()> {
        let shape = PackedShape {
            kind: w.kind(),
            tiles: launch.tiles,
            spans: launch.spans,
        };
        let chosen_bytes = CHOSEN_BYTES;
        let asked = PlannedRows::Experts { m, chosen_bytes };
        let ProductPlan::Row(plan) = ProductPlan::checked(o, shape, asked)? else {
            unreachable!("experts of a row are planned as one row");
        };
        let from = w.expert_operands(o)?;
        let args = ExpertsArgs {
            product: GemvArgs {
                codes: from.codes,
                meta: from.meta,
                x: launch.x,
                gain: launch.gain,
                out: launch.out,
                best: Address::NULL,
                inputs: launch.strides.0 as i32,
                rows: (launch.tiles * TILE) as i32,
                tiles: launch.tiles as i32,
                spans: launch.spans as i32,
                groups: w.kind().groups() as i32,
                meta_bytes: w.kind().meta_bytes() as i32,
                split: plan.cut.split as i32,
                inverse: 256usize.div_ceil(plan.cut.split) as i32,
                depth: plan.depth as i32,
                eps: launch.eps,
                scale: from.scale,
                holds_dependents: 0,
                epilogue: launch.epilogue as i32,
                scheme: w.kind().block_scheme().unwrap_or_default() as i32,
            },
            scores: o.of("scores", scores, &[m, stacked(experts)])?,
            experts: stacked(experts) as i32,
            per_token: chosen(experts) as i32,
            part: launch.part as i32,
            tiles: launch.expert_tiles as i32,
            width: experts.width.next_multiple_of(SPAN) as i32,
            normalized: i32::from(experts.normalized),
            x_stride: launch.strides.0 as i32,
            out_stride: launch.strides.1 as i32,
            shared: i32::from(experts.shared > 0),
            before_places: [0; 1],
            places: from.places,
        };
        let shape = LaunchShape::new([plan.cut.blocks, m, 1], GEMV_WARPS * 32)
            .shared(plan.shared)
            .overlapping();
        // SAFETY: the operands were checked; a chosen index is below the number of experts, whose records
        // `w` was checked to have.
        unsafe { self.launch(kernel(&plan, w.kind()), shape, &args) }
    }
}

/// What a half reads, of the stacks in records, and writes.
struct Launch {
    /// `Silu` of up, `Add` of down.
    epilogue: Epilogue,
    x: Address,
    /// Of the inputs' norm, or null.
    gain: Address,
    eps: f32,
    out: Address,
    tiles: usize,
    spans: usize,
    /// Records of one expert, along the dimension over which experts are stacked.
    part: usize,
    expert_tiles: usize,
    /// Values from one row to the next, of inputs and outputs.
    strides: (usize, usize),
}
