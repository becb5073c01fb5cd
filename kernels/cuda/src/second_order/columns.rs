//! Ranges of groups, the column loop and its errors (`cuda/fit_groups.cu`,
//! `cuda/round_columns.cu`).

use super::{BENCH, MEASURES, Permutation, ROUNDING, THREADS, cover, runs};
use crate::cuda::fit_groups::FitGroupsArgs;
use crate::cuda::round_columns::{
    COLUMNS, DiagonalArgs, DivideMomentsArgs, DotArgs, PermuteColumnsArgs, ROWS as BLOCK_ROWS,
    RoundColumnsArgs, RoundingErrorArgs,
};
use crate::driver::{Address, Buffer, Operands, Side};
use crate::grad::CudaOps;
use crate::kernel::kernels;
use nq_kernels::Result;
use nq_kernels::grad::{Buffers, Gemm};
use nq_kernels::second_order::{ColumnBlock, FitShape};
use nq_model::Dims;
use std::ops::Range;

/// Number of blocks that sum a product of two vectors.
const PARTS: usize = 1024;

/// Scales and zero-points of a weight `[rows, cols]` in groups of `group` columns; the last
/// group of a row may be shorter.
pub struct Groups {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Columns per group.
    pub group: usize,
    /// The greatest code.
    pub max_code: u8,
    /// `[rows, groups]`
    pub scales: Buffer<f32>,
    /// `[rows, groups]`
    pub zeros: Buffer<f32>,
}

/// Codes of a weight, one byte each, by column.
pub type CodeColumns = Buffer<u8>;

kernels! {
    FIT_GROUPS: FitGroupsArgs = "fit_groups" in "fit_groups.cu", test ROUNDING, bench BENCH;
    PERMUTE_COLUMNS: PermuteColumnsArgs = "permute_columns" in "round_columns.cu", test ROUNDING, bench BENCH;
    ROUND_COLUMNS: RoundColumnsArgs = "round_columns" in "round_columns.cu", test ROUNDING, bench BENCH;
    ROUNDING_ERROR: RoundingErrorArgs = "rounding_error" in "round_columns.cu", test MEASURES, bench BENCH;
    DOT_PARTS: DotArgs = "dot_parts" in "round_columns.cu", test MEASURES, bench BENCH;
    DIVIDE_MOMENTS: DivideMomentsArgs = "divide_moments" in "round_columns.cu", test MEASURES, bench BENCH;
    DIAGONAL: DiagonalArgs = "diagonal" in "round_columns.cu", test ROUNDING, bench BENCH;
}

impl Groups {
    /// Allocates them.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(
        ops: &CudaOps,
        Dims { rows, cols }: Dims,
        group: usize,
        max_code: u8,
    ) -> Result<Self> {
        let n = rows * cols.div_ceil(group);
        Ok(Groups {
            rows,
            cols,
            group,
            max_code,
            scales: ops.gpu().zeros("scales", n)?,
            zeros: ops.gpu().zeros("zero-points", n)?,
        })
    }

    /// Number of groups in a row.
    pub fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    fn values(&self) -> usize {
        self.rows * self.cols
    }

    /// Scales and zero-points as operands of `o`.
    fn addresses(&self, o: &Operands<'_>) -> Result<(Address, Address)> {
        let dims = [self.rows, self.groups()];
        Ok((
            o.of("scales", &self.scales, &dims)?,
            o.of("zero-points", &self.zeros, &dims)?,
        ))
    }
}

impl CudaOps {
    /// Chooses the parameters of groups from `first` on: of those in `columns` of `w`
    /// `[rows, cols]`; the first of them begins `columns`. `importance` is for
    /// `columns`.
    ///
    /// # Errors
    /// Operands that are too short.
    pub fn fit_groups(
        &self,
        fit: FitShape,
        w: &Buffer<f32>,
        columns: Range<usize>,
        importance: &Buffer<f32>,
        g: &mut Groups,
        first: usize,
    ) -> Result<()> {
        let o = self.operands("fit_groups");
        let count = columns.len().div_ceil(g.group);
        o.at_most("columns", g.cols, columns.end)?;
        o.at_most("groups", g.groups(), first.saturating_add(count))?;
        let (scales, zeros) = g.addresses(&o)?;
        let args = FitGroupsArgs {
            w: o.of("weights", w, &[g.rows, g.cols])?,
            h: o.of("importance", importance, &[columns.len()])?,
            scales,
            zeros,
            rows: g.rows as i64,
            ld: g.cols as i32,
            at: columns.start as i32,
            columns: columns.len() as i32,
            group: g.group as i32,
            groups: g.groups() as i32,
            first: first as i32,
            symmetric: i32::from(fit.symmetric),
            steps: fit.steps as i32,
            power: fit.power as i32,
            refits: fit.refits as i32,
            least: fit.least,
            max_code: f32::from(g.max_code),
        };
        let grid = [(g.rows * count).div_ceil(THREADS / 32), 1, 1];
        // SAFETY: the operands were checked.
        unsafe { self.launch_shared(&FIT_GROUPS, grid, THREADS, 0, &args) }
    }

    /// `[rows, n]`: the columns of `w` in the order `order`.
    ///
    /// # Errors
    /// Too little memory; a weight that is too short.
    pub fn permute_columns(
        &self,
        w: &Buffer<f32>,
        order: &Permutation,
        rows: usize,
    ) -> Result<Buffer<f32>> {
        let o = self.operands("permute_columns");
        let n = order.len();
        let to = self.gpu().zeros("a weight to be rounded", rows * n)?;
        for run in runs(rows) {
            let args = PermuteColumnsArgs {
                from: o.part("weights", w, run.start * n, &[run.len(), n])?,
                order: o.of("order", &order.0, &[n])?,
                to: o.part("permuted weights", &to, run.start * n, &[run.len(), n])?,
                n: n as i32,
                pad: 0,
            };
            let grid = cover(n, run.len());
            // SAFETY: the operands were checked; the order lists valid columns.
            unsafe { self.launch_shared(&PERMUTE_COLUMNS, grid, THREADS, 0, &args)? };
        }
        Ok(to)
    }

    /// Rounds the columns of `w` `[rows, cols]`, which are permuted by `order`, block by block, to
    /// the groups' grids; `u` is from [`CudaOps::inverse_factor`]. `fit` chooses the parameters of
    /// groups that blocks begin, with `importance` in the order. Consumes `w`.
    ///
    /// # Errors
    /// Too little memory; operands that are too short.
    #[expect(clippy::too_many_arguments, reason = "what the loop depends on")]
    pub fn round_columns(
        &self,
        mut w: Buffer<f32>,
        u: &Buffer<f32>,
        order: &Permutation,
        blocks: &[ColumnBlock],
        fit: FitShape,
        importance: &Buffer<f32>,
        g: &mut Groups,
    ) -> Result<CodeColumns> {
        let o = self.operands("round_columns");
        let (rows, n) = (g.rows, g.cols);
        let codes: CodeColumns = self.gpu().zeros("codes", rows * n)?;
        let errors: Buffer<f32> = self.gpu().zeros("errors of rounding", rows * COLUMNS)?;
        for ColumnBlock { places, begins } in blocks {
            o.at_most("places", n, places.end)?;
            o.at_most("a block", COLUMNS, places.len())?;
            if let &Some(group) = begins {
                o.at_least("groups", group.saturating_add(1), g.groups())?;
                let columns = g.group.min(n - group * g.group);
                let columns = places.start..places.start + columns;
                let part = self.part(importance, columns.clone())?;
                self.fit_groups(fit, &w, columns, &part, g, group)?;
            }
            self.round_block(&o, &w, u, order, places.clone(), g, &codes, &errors)?;
            self.take_over(&o, &mut w, u, &errors, places.clone(), g)?;
        }
        self.synchronize()?;
        Ok(codes)
    }

    /// A copy of some values.
    fn part(&self, from: &Buffer<f32>, range: Range<usize>) -> Result<Buffer<f32>> {
        let mut to = self.gpu().zeros("importance of columns", range.len())?;
        self.copy((from, range.start), (&mut to, 0), range.len())?;
        // The source may be freed while the kernel that uses it is queued: freeing waits.
        Ok(to)
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    fn round_block(
        &self,
        o: &Operands<'_>,
        w: &Buffer<f32>,
        u: &Buffer<f32>,
        order: &Permutation,
        places: Range<usize>,
        g: &Groups,
        codes: &CodeColumns,
        errors: &Buffer<f32>,
    ) -> Result<()> {
        let n = g.cols;
        let (scales, zeros) = g.addresses(o)?;
        let args = RoundColumnsArgs {
            w: o.of("weights", w, &[g.rows, n])?,
            u: o.of("factor", u, &[n, n])?,
            order: o.of("order", &order.0, &[n])?,
            scales,
            zeros,
            codes: o.of("codes", codes, &[g.rows, n])?,
            errors: o.of("errors", errors, &[g.rows, COLUMNS])?,
            rows: g.rows as i32,
            n: n as i32,
            group: g.group as i32,
            groups: g.groups() as i32,
            start: places.start as i32,
            len: places.len() as i32,
            max_code: f32::from(g.max_code),
            pad: 0,
        };
        let (threads, shared) = (32 * BLOCK_ROWS, 4 * COLUMNS * COLUMNS);
        let grid = [g.rows.div_ceil(BLOCK_ROWS), 1, 1];
        // SAFETY: the operands were checked, and the caller checked that the places are columns; shared
        // memory holds the block of U.
        unsafe { self.launch_shared(&ROUND_COLUMNS, grid, threads, shared, &args) }
    }

    /// Subtracts from later columns what a block's errors contribute to them.
    fn take_over(
        &self,
        o: &Operands<'_>,
        w: &mut Buffer<f32>,
        u: &Buffer<f32>,
        errors: &Buffer<f32>,
        places: Range<usize>,
        g: &Groups,
    ) -> Result<()> {
        let (n, end) = (g.cols, places.end);
        if end == n {
            return Ok(());
        }
        let product = Gemm {
            m: g.rows,
            n: n - end,
            k: places.len(),
            batch: 1,
            ta: false,
            tb: false,
            alpha: -1.0,
            accumulate: true,
        };
        let errors = Side {
            at: o.of("errors", errors, &[g.rows, COLUMNS])?,
            ld: COLUMNS,
        };
        // Takes the block's rows of U and all rows of w, in columns from `end` on.
        let side = |what, x: &Buffer<f32>, first: usize, rows: usize| {
            let at = o.part(what, x, first * n, &[rows, n])?.plus(4 * end);
            Ok::<_, nq_kernels::Error>(Side { at, ld: n })
        };
        let u = side("factor", u, places.start, places.len())?;
        let w = side("weights", w, 0, g.rows)?;
        // SAFETY: the operands were checked.
        unsafe { self.product(product, errors, u, w) }
    }

    /// The differences of the codes' values from the weight `w`, `[rows, cols]`.
    ///
    /// # Errors
    /// Too little memory; operands that are too short.
    pub fn rounding_error(
        &self,
        w: &Buffer<f32>,
        codes: &CodeColumns,
        g: &Groups,
    ) -> Result<Buffer<f32>> {
        let o = self.operands("rounding_error");
        let (scales, zeros) = g.addresses(&o)?;
        let e = self.gpu().zeros("errors of rounding", g.values())?;
        for run in runs(g.rows) {
            let (at, group) = (run.start * g.cols, run.start * g.groups());
            let args = RoundingErrorArgs {
                w: o.part("weights", w, at, &[run.len(), g.cols])?,
                codes: o.part("codes", codes, at, &[run.len(), g.cols])?,
                scales: scales.plus(4 * group),
                zeros: zeros.plus(4 * group),
                e: o.part("errors", &e, at, &[run.len(), g.cols])?,
                n: g.cols as i32,
                group: g.group as i32,
                groups: g.groups() as i32,
                pad: 0,
            };
            let grid = cover(g.cols, run.len());
            // SAFETY: the operands were checked.
            unsafe { self.launch_shared(&ROUNDING_ERROR, grid, THREADS, 0, &args)? };
        }
        Ok(e)
    }

    /// The sum of `a[i] b[i]` over the first `n` values, in f64 and a fixed order.
    ///
    /// # Errors
    /// Operands that are too short.
    pub fn dot(&self, a: &Buffer<f32>, b: &Buffer<f32>, n: usize) -> Result<f64> {
        let o = self.operands("dot");
        let parts: Buffer<f64> = self.gpu().zeros("partial sums", PARTS)?;
        let args = DotArgs {
            a: o.of("a", a, &[n])?,
            b: o.of("b", b, &[n])?,
            parts: o.of("partial sums", &parts, &[PARTS])?,
            n: n as i64,
        };
        // SAFETY: the operands were checked; there is a part for each block.
        unsafe { self.launch_shared(&DOT_PARTS, [PARTS, 1, 1], THREADS, 0, &args)? };
        self.synchronize()?;
        let mut sums = vec![0.0; PARTS];
        parts.read(0, &mut sums)?;
        Ok(sums.iter().sum())
    }

    /// The moments `[n, n]` of the inputs divided by `s`.
    ///
    /// # Errors
    /// Too little memory; operands that are too short.
    pub fn divide_moments(&self, h: &Buffer<f32>, s: &[f32]) -> Result<Buffer<f32>> {
        let n = s.len();
        let o = self.operands("divide_moments");
        let s = self.gpu().upload("scales of inputs", s)?;
        let to = self.gpu().zeros("second moments", n * n)?;
        let args = DivideMomentsArgs {
            h: o.of("moments", h, &[n, n])?,
            s: o.of("scales", &s, &[n])?,
            to: o.of("divided moments", &to, &[n, n])?,
            n: n as i32,
            pad: 0,
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch_shared(&DIVIDE_MOMENTS, cover(n, n), THREADS, 0, &args)? };
        self.synchronize()?;
        Ok(to)
    }

    /// Copies the diagonal of `h` `[n, n]` to the host.
    ///
    /// # Errors
    /// A matrix that is too short.
    pub fn diagonal(&self, h: &Buffer<f32>, n: usize) -> Result<Vec<f32>> {
        let o = self.operands("diagonal");
        let to: Buffer<f32> = self.gpu().zeros("a diagonal", n)?;
        let args = DiagonalArgs {
            h: o.of("matrix", h, &[n, n])?,
            to: o.of("diagonal", &to, &[n])?,
            n: n as i32,
            pad: 0,
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch_shared(&DIAGONAL, cover(n, 1), THREADS, 0, &args)? };
        self.synchronize()?;
        let mut values = vec![0.0; n];
        to.read(0, &mut values)?;
        Ok(values)
    }
}
