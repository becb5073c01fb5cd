//! The experts of a mixture for many rows at once: rows are sorted by expert, so that each expert's weights
//! are read once for all of its rows (a grouped product).

use super::bank::{ExpertStage, Half, LayerBank, StageTurn};
use super::driver::{Buffer, Gpu, LaunchShape, Operands, Stream};
use super::gemm::{GemmOutput, rows_of_experts};
use super::kernel::kernels;
use super::linear::{DeviceLinear, WeightSizes};
use super::mixture::{check, chosen, stacked};
use super::pack::{PackedShape, SPAN, TILE};
use super::plan::ProductPlan;
use super::product::{Inputs, PlannedRows, Product, ProductOutput, RowBlocks};
use super::rows::shape;
use super::trellis::experts::SortedRows;
use super::trellis::sizes::{EXPANDED_ROWS, PIECES, SORTED_ROWS};
use crate::cuda::grouped::{CombineArgs, GatherArgs, RoutesArgs, StageArgs};
use crate::cuda::places::ExpertPlaces;
use nq_kernels::Result;
use nq_model::Experts;

/// Threads of `sort_routes`: its `SORT_THREADS` (`cuda/grouped.cu`).
const SORT_THREADS: usize = super::MOST_EXPERTS + 32;

kernels! {
    CHOOSE_EXPERTS: RoutesArgs = "choose_experts" in "grouped.cu",
        test "kernels/cuda/tests/cuda/experts.rs::experts_of_many_rows", bench "grouped";
    SORT_ROUTES: RoutesArgs = "sort_routes" in "grouped.cu",
        test "kernels/cuda/tests/cuda/experts.rs::experts_of_many_rows", bench "grouped";
    GATHER_ROWS: GatherArgs = "gather_rows" in "grouped.cu",
        test "kernels/cuda/tests/cuda/experts.rs::experts_of_many_rows", bench "grouped";
    STAGE_EXPERTS: StageArgs = "stage_experts" in "grouped.cu",
        test "runtime/load/tests/alone/bank.rs::whatever_has_room_computes_the_same", bench "grouped";
    COMBINE_EXPERTS: CombineArgs = "combine_experts" in "grouped.cu",
        test "kernels/cuda/tests/cuda/experts.rs::experts_of_many_rows", bench "grouped";
}

/// Rows sorted by expert, and what their experts make of them. A row has `per_token` routes; `routes`
/// below is their number.
pub struct GroupedRows {
    hidden: usize,
    chosen: Buffer<u32>,      // [routes]
    weights: Buffer<f32>,     // [routes]
    places: Buffer<u32>,      // [routes], among the sorted rows
    blocks: Buffer<[i32; 4]>, // `ExpertRows` of `cuda/gemm.cuh`
    sorted: Buffer<u16>,      // [routes, hidden padded], in operand order
    gated: Buffer<u16>,       // [routes, width padded], in operand order
    y: Buffer<f32>, // [routes, hidden]; before, of EXL3, the gates' products [routes, width]
    grouped: Grouped,
    /// Where experts in banks become stacks, and which of them products read.
    stage: Option<ExpertStage>,
    turn: StageTurn,
}

/// Parts that [`Stream::stage_experts`] cuts an expert of a bank into, to be copied at once.
const STAGE_PARTS: usize = 16;
/// Parts of an expert, and experts at once, where kernels of another stream run beside the copies: 15 blocks read as fast as
/// any number (`benches/records/2026-11-29-gpu-experts.csv`), and leave most multiprocessors to those kernels.
const STAGE_BESIDE: [usize; 2] = [4, 4];

/// The rows that were sorted last.
#[derive(Clone, Copy)]
struct Grouped {
    experts: Experts,
    m: usize,
    /// Rows that a block of the products takes, and the number of blocks.
    block_rows: usize,
    blocks: usize,
    /// Experts whose weights in codes of trellises or of EXL3 are expanded at once, or all.
    of_piece: usize,
}

impl Grouped {
    /// Pieces that experts are multiplied in.
    fn pieces(&self) -> usize {
        stacked(&self.experts).div_ceil(self.of_piece).max(1)
    }

    /// `coded`: gate and up are in codes of a trellis or of EXL3, and down.
    fn new(gpu: &Gpu, e: &Experts, m: usize, coded: [bool; 2]) -> Self {
        let routes = m * chosen(e);
        let used = stacked(e).min(routes).max(1);
        let expands = coded == [true; 2] && routes / used >= EXPANDED_ROWS;
        let block_rows = match coded.contains(&true) && !expands {
            true => SORTED_ROWS,
            false => rows_of_experts(gpu, routes / used),
        };
        Grouped {
            of_piece: match expands {
                true => stacked(e).div_ceil(PIECES),
                false => stacked(e),
            },
            experts: *e,
            m,
            block_rows,
            // A block of each expert may be incomplete.
            blocks: routes / block_rows + used,
        }
    }
}

impl GroupedRows {
    /// Allocates buffers for up to `rows` rows of width `hidden`, of mixtures of up to these `experts`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, experts: Experts, hidden: usize, rows: usize) -> Result<Self> {
        let routes = rows * chosen(&experts);
        let padded = |n: usize| n.next_multiple_of(SPAN);
        Ok(GroupedRows {
            hidden,
            chosen: gpu.zeros("activations", routes)?,
            weights: gpu.zeros("activations", routes)?,
            places: gpu.zeros("activations", routes)?,
            // As many as blocks of the fewest rows make.
            blocks: gpu.zeros(
                "activations",
                routes / 8 + PIECES * stacked(&experts).min(routes).max(1),
            )?,
            sorted: gpu.zeros("activations", routes * padded(hidden))?,
            gated: gpu.zeros("activations", routes * padded(experts.width))?,
            y: gpu.zeros("activations", routes * hidden.max(experts.width))?,
            grouped: Grouped::new(gpu, &experts, 0, [false; 2]),
            stage: None,
            turn: StageTurn::default(),
        })
    }

    /// Gives it stacks for experts in banks, without which it takes none.
    pub(crate) fn set_stage(&mut self, stage: &ExpertStage) {
        self.stage = Some(stage.share());
    }

    /// The weights that products of the sorted rows read: those of a bank were staged.
    fn stack(&self, o: &Operands<'_>, w: &DeviceLinear) -> Result<Option<DeviceLinear>> {
        match (w.bank(), &self.stage) {
            (None, _) => Ok(None),
            (Some(half), Some(stage)) => Ok(Some(DeviceLinear::of_stage(half, stage, self.turn))),
            (Some(_), None) => o.refuse("experts in a bank", "a stage for them", "none"),
        }
    }

    /// How many routes the rows have that were sorted last.
    pub(crate) fn routes(&self) -> usize {
        self.grouped.m * chosen(&self.grouped.experts)
    }

    /// Lets products read the other stacks of the stage, to which [`Stream::stage_next`] copied.
    pub(crate) fn turn(&mut self) {
        self.turn = self.turn.other();
    }
}

/// Which rows, sorted by expert, each block of a product takes.
struct ExpertBlocks<'a> {
    /// Of all pieces.
    all: &'a Buffer<[i32; 4]>,
    /// The first of this product's.
    first: usize,
    count: usize,
    /// Rows that a block takes at most ([`rows_of_experts`]).
    rows: usize,
}

impl Stream {
    /// Multiplies rows that are sorted by expert, each by its expert's part of the stack `w`: `x`
    /// `[routes, inputs padded to 256]` as in [`Stream::gemm`].
    ///
    /// # Safety
    /// On the device, each of `blocks` has an expert below `experts` and rows within `routes`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    unsafe fn gemm_experts(
        &self,
        w: &DeviceLinear,
        experts: usize,
        x: &Buffer<u16>,
        output: GemmOutput<'_>,
        routes: usize,
        blocks: ExpertBlocks<'_>,
    ) -> Result<()> {
        let o = self.operands("gemm_experts");
        o.multiple("rows of the stack", experts * TILE, w.rows())?;
        let (rows, tiles) = (w.rows() / experts, w.tiles() / experts);
        let asked = PlannedRows::Many(RowBlocks::Sorted {
            columns: blocks.count,
            rows: blocks.rows,
        });
        let p = Product::new(o, w, Inputs::Half(x), routes, asked);
        let plan = ProductPlan::checked(&o, PackedShape { tiles, ..w.shape() }, asked)?;
        let to = ProductOutput::from(output).written(&o, routes, rows, plan.shares())?;
        let sizes = WeightSizes {
            rows: rows as i32,
            tiles: tiles as i32,
            ..w.sizes()
        };
        let blocks = o.part("blocks", blocks.all, blocks.first, &[blocks.count])?;
        let ProductPlan::Many(plan) = plan else {
            unreachable!("rows of experts are many");
        };
        // SAFETY: the operands were checked; the caller answers for the blocks.
        unsafe { self.multiply_many(&p, &plan, &to, sizes, blocks) }
    }

    /// Sorts `m` normalized rows `x` `[m, hidden padded to 256]`, FP16 in operand order, by the experts
    /// that their `scores` `[m, stacked]` choose ([`Stream::experts_up`]), for products with `stacks`, of gate and up and of
    /// down. Experts that are in a bank have to be staged before they are multiplied (`Stream::stage_experts`,
    /// `Stream::stage_next`).
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn group_rows(
        &self,
        x: &Buffer<u16>,
        scores: &Buffer<f32>,
        rows: &mut GroupedRows,
        e: &Experts,
        m: usize,
        stacks: [&DeviceLinear; 2],
    ) -> Result<()> {
        let o = self.operands("group_rows");
        let bank = stacks[0].layer_bank();
        let (k, padded) = (chosen(e), rows.hidden.next_multiple_of(SPAN));
        check(&o, e, stacked(e), 1, m)?;
        let coded = stacks.map(DeviceLinear::is_unpacked);
        let grouped = Grouped::new(self.gpu(), e, m, coded);
        o.at_most("blocks", u16::MAX.into(), grouped.blocks)?;
        let places = match bank {
            Some(bank) => {
                o.at_least("experts in a bank", stacked(e), bank.experts())?;
                bank.args(&o)?
            }
            None => ExpertPlaces::default(),
        };
        let rows_of = rows.stage.as_ref().filter(|_| bank.is_some());
        let rows_of = rows_of.map(|stage| &stage.rows);
        let args = RoutesArgs {
            scores: o.of("scores", scores, &[m, stacked(e)])?,
            chosen: o.of("chosen experts", &rows.chosen, &[m, k])?,
            weights: o.of("weights of experts", &rows.weights, &[m, k])?,
            places: o.of("places", &rows.places, &[m, k])?,
            blocks: o.of("blocks", &rows.blocks, &[grouped.pieces(), grouped.blocks])?,
            m: m as i32,
            experts: stacked(e) as i32,
            per_token: k as i32,
            normalized: i32::from(e.normalized),
            block_rows: grouped.block_rows as i32,
            most_blocks: grouped.blocks as i32,
            shared: i32::from(e.shared > 0),
            of_piece: grouped.of_piece as i32,
            counts: places.counts,
            rows: o.optional("rows of experts", rows_of, &[stacked(e)])?,
        };
        let gather = GatherArgs {
            x: o.of("x", x, &[m, padded])?,
            sorted: o.of("sorted rows", &rows.sorted, &[m, k, padded])?,
            places: args.places,
            words: (padded / 8) as i32,
            per_token: k as i32,
        };
        // SAFETY: the operands were checked; a chosen index is below the number of experts, and places are a
        // permutation of the routes.
        unsafe {
            self.launch(&CHOOSE_EXPERTS, shape([m, 1], super::MOST_EXPERTS), &args)?;
            self.launch(&SORT_ROUTES, shape([1, 1], SORT_THREADS), &args)?;
            self.launch(&GATHER_ROWS, shape([m, 1], 256), &gather)?;
        }
        rows.grouped = grouped;
        Ok(())
    }

    /// Makes stacks of the experts of a `bank` that have rows, as [`Stream::group_rows`] has counted them, where products
    /// read them.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if there is no stage for them; errors of the driver.
    pub(crate) fn stage_experts(&self, bank: &LayerBank, rows: &GroupedRows) -> Result<()> {
        let blocks = [STAGE_PARTS, bank.experts()];
        self.stage(bank, rows, rows.turn, true, blocks)
    }

    /// Makes stacks of all experts of another layer's `bank` beside those that products read, and beside kernels of
    /// other streams.
    ///
    /// # Errors
    /// As of [`Stream::stage_experts`].
    pub(crate) fn stage_next(&self, bank: &LayerBank, rows: &GroupedRows) -> Result<()> {
        self.stage(bank, rows, rows.turn.other(), false, STAGE_BESIDE)
    }

    /// Makes stacks of a bank's experts, of those that have rows if only the `chosen` ones are wanted.
    fn stage(
        &self,
        bank: &LayerBank,
        rows: &GroupedRows,
        turn: StageTurn,
        chosen: bool,
        [parts, experts]: [usize; 2],
    ) -> Result<()> {
        let o = self.operands("stage_experts");
        let Some(stage) = &rows.stage else {
            return o.refuse("experts in a bank", "a stage for them", "none");
        };
        let rows_of = chosen.then_some(&stage.rows);
        let staged = stage.parts(&o, bank, turn)?;
        let args = StageArgs {
            places: bank.args(&o)?.at,
            rows: o.optional("rows of experts", rows_of, &[bank.experts()])?,
            stacks: staged.map(|p| p.to),
            begin: staged.map(|p| p.begin),
            words: staged.map(|p| p.words),
            experts: bank.experts() as u32,
            padding: [0; 1],
        };
        let shape = LaunchShape::new([parts, experts, 1], 256);
        // SAFETY: the operands were checked; the table leads to whole experts of the bank, which its arguments keep.
        unsafe { self.launch(&STAGE_EXPERTS, shape, &args) }
    }

    /// Gate and up of the rows that [`Stream::group_rows`] sorted, each by its expert, and SwiGLU. `w`
    /// holds the interleaved stacks of all experts.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn grouped_up(&self, w: &DeviceLinear, rows: &mut GroupedRows) -> Result<()> {
        let grouped = rows.grouped;
        let e = grouped.experts;
        let o = self.operands("grouped_up");
        o.multiple("width of an expert", 2 * TILE, e.width)?;
        check(&o, &e, w.rows(), 2 * e.width, grouped.m)?;
        let staged = rows.stack(&o, w)?;
        let w = staged.as_ref().unwrap_or(w);
        // SAFETY: `group_rows` wrote the blocks.
        unsafe { self.grouped_product(&o, w, rows, Half::Up) }
    }

    /// Down of what [`Stream::grouped_up`] left, weighted and added to `x` `[m, hidden]`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn grouped_down(
        &self,
        w: &DeviceLinear,
        rows: &mut GroupedRows,
        x: &mut Buffer<f32>,
    ) -> Result<()> {
        let (grouped, hidden) = (rows.grouped, rows.hidden);
        let (e, k) = (grouped.experts, chosen(&grouped.experts));
        let o = self.operands("grouped_down");
        o.multiple("outputs of an expert", TILE, hidden)?;
        check(&o, &e, w.rows(), hidden, grouped.m)?;
        let staged = rows.stack(&o, w)?;
        let w = staged.as_ref().unwrap_or(w);
        let combine = CombineArgs {
            y: o.of("y", &rows.y, &[grouped.m, k, hidden])?,
            weights: o.of("weights of experts", &rows.weights, &[grouped.m, k])?,
            places: o.of("places", &rows.places, &[grouped.m, k])?,
            x: o.of("x", x, &[grouped.m, hidden])?,
            width: hidden as i32,
            per_token: k as i32,
        };
        // SAFETY: `group_rows` wrote the blocks and the places; the operands were checked.
        unsafe {
            self.grouped_product(&o, w, rows, Half::Down)?;
            self.launch(&COMBINE_EXPERTS, shape([grouped.m, 1], 256), &combine)
        }
    }

    /// The product of the sorted rows with a half of their experts.
    ///
    /// # Safety
    /// [`Stream::group_rows`] wrote the blocks.
    unsafe fn grouped_product(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        rows: &mut GroupedRows,
        half: Half,
    ) -> Result<()> {
        let grouped = rows.grouped;
        let (all, routes) = (stacked(&grouped.experts), rows.routes());
        let GroupedRows {
            sorted,
            gated,
            y,
            blocks,
            ..
        } = rows;
        let expands = w.is_unpacked() && grouped.of_piece < all;
        if w.is_unpacked() && !expands {
            let sorted = SortedRows {
                x: if half == Half::Up { sorted } else { gated },
                full: (half == Half::Down).then_some(y),
                half: (half == Half::Up).then_some(gated),
                gate: y,
                blocks,
                groups: grouped.blocks,
                experts: all,
                routes,
            };
            // SAFETY: the caller answers for the blocks, whose rows are as many as those of trellis codes may be.
            return unsafe { self.sorted_experts(o, w, &sorted) };
        }
        if expands && w.is_trellis() {
            let x = if half == Half::Up { &*sorted } else { &*gated };
            self.turn_rows_of_experts(o, w, all, x, routes)?;
        }
        for piece in 0..grouped.pieces() {
            let first = piece * grouped.of_piece;
            let experts = first..all.min(first + grouped.of_piece);
            let expanded = match expands {
                true => Some(self.expand_experts(o, w, all, experts.clone())?),
                false => None,
            };
            let (x, output) = match half {
                Half::Up => (&*sorted, GemmOutput::Silu(gated)),
                Half::Down => (&*gated, GemmOutput::Store(y)),
            };
            // SAFETY: the caller answers for the blocks.
            unsafe {
                self.gemm_experts(
                    expanded.as_ref().unwrap_or(w),
                    experts.len(),
                    x,
                    output,
                    routes,
                    ExpertBlocks {
                        all: blocks,
                        first: piece * grouped.blocks,
                        count: grouped.blocks,
                        rows: grouped.block_rows,
                    },
                )?;
            }
        }
        Ok(())
    }
}
