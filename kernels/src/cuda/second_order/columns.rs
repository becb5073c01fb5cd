//! Ranges of groups, the column loop and its errors (`cuda/fit_groups.cu`,
//! `cuda/round_columns.cu`).

use super::{Order, THREADS, cover, runs};
use crate::cuda::driver::Side;
use crate::cuda::driver::{Address, Buffer};
use crate::cuda::grad::CudaOps;
use crate::error::Result;
use crate::grad::{Gemm, enough};
use std::ops::Range;

/// Columns that the kernel takes at once, and rows of a block.
const COLUMNS: usize = 128;
const ROWS: usize = 16;
/// Blocks that sum a product of two vectors.
const PARTS: usize = 1024;

/// How the range of a group is searched: `steps` ranges from the whole one down to `least` of
/// it, errors to the power of 2 or 3, `refits` rounds of least squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitShape {
    /// Smallest range, as a share of the whole.
    pub least: f32,
    /// Ranges; 0 takes the whole one.
    pub steps: usize,
    /// 2 or 3.
    pub power: u32,
    /// Rounds of refitting.
    pub refits: usize,
    /// Zero-points stay at the middle of the codes.
    pub symmetric: bool,
}

/// Scales and zero-points of a weight `[rows, cols]` in groups of `group` columns, of which the
/// last of a row may be shorter.
pub struct Groups {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Columns of a group.
    pub group: usize,
    /// The greatest code.
    pub max_code: u8,
    /// `[rows, groups]`
    pub scales: Buffer<f32>,
    /// `[rows, groups]`
    pub zeros: Buffer<f32>,
}

/// Codes of a weight, one byte each, by column.
pub type Codes = Buffer<u8>;

/// Columns that go through the loop together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnBlock {
    /// Their places in the order, 128 at most.
    pub places: Range<usize>,
    /// The group that begins here and whose columns are next to each other in the order, if its
    /// range is still to be chosen: from the weights as they are by now.
    pub begins: Option<usize>,
}

impl Groups {
    /// Room for them.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(
        ops: &CudaOps,
        (rows, cols): (usize, usize),
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

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    fn values(&self) -> usize {
        self.rows * self.cols
    }
}

impl CudaOps {
    /// Chooses the parameters of groups from `first` on: of those that `columns` of `w`
    /// `[rows, cols]` hold, the first of which begins `columns`. `importance` goes with
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
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            w: Address,
            h: Address,
            scales: Address,
            zeros: Address,
            rows: i64,
            ld: i32,
            at: i32,
            columns: i32,
            group: i32,
            groups: i32,
            first: i32,
            symmetric: i32,
            steps: i32,
            power: i32,
            refits: i32,
            least: f32,
            max_code: f32,
        }
        let count = columns.len().div_ceil(g.group);
        enough("fit_groups", "weights", g.values(), w.len())?;
        enough("fit_groups", "columns", columns.end, g.cols)?;
        enough("fit_groups", "groups", first + count, g.groups())?;
        enough("fit_groups", "importance", columns.len(), importance.len())?;
        let args = Args {
            w: w.at(0),
            h: importance.at(0),
            scales: g.scales.at(0),
            zeros: g.zeros.at(0),
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
        let grid = ((g.rows * count).div_ceil(THREADS / 32), 1, 1);
        // SAFETY: all operands were checked.
        unsafe { self.launch_shared("fit_groups", grid, (THREADS, 0), &args) }
    }

    /// `[rows, n]` with the columns of `w` in `order`.
    ///
    /// # Errors
    /// Too little memory; a weight that is too short.
    pub fn permute_columns(
        &self,
        w: &Buffer<f32>,
        order: &Order,
        rows: usize,
    ) -> Result<Buffer<f32>> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            from: Address,
            order: Address,
            to: Address,
            n: i32,
            pad: i32,
        }
        let n = order.len();
        enough("permute_columns", "weights", rows * n, w.len())?;
        let to = self.gpu().zeros("a weight to be rounded", rows * n)?;
        for run in runs(rows) {
            let args = Args {
                from: w.at(run.start * n),
                order: order.0.at(0),
                to: to.at(run.start * n),
                n: n as i32,
                pad: 0,
            };
            let grid = cover(n, run.len());
            // SAFETY: both sides hold rows of n; the order is a permutation of the columns.
            unsafe { self.launch_shared("permute_columns", grid, (THREADS, 0), &args)? };
        }
        Ok(to)
    }

    /// Rounds the columns of `w` `[rows, cols]`, which `order` has permuted, block by block, to
    /// the groups' grids; `u` is [`CudaOps::inverse_factor`]'s. `fit` chooses the parameters of
    /// groups that blocks begin, by `importance` in the order. `w` is used up.
    ///
    /// # Errors
    /// Too little memory; operands that are too short.
    #[expect(clippy::too_many_arguments, reason = "what the loop depends on")]
    pub fn round_columns(
        &self,
        mut w: Buffer<f32>,
        u: &Buffer<f32>,
        order: &Order,
        blocks: &[ColumnBlock],
        fit: FitShape,
        importance: &Buffer<f32>,
        g: &mut Groups,
    ) -> Result<Codes> {
        let (rows, n) = (g.rows, g.cols);
        enough("round_columns", "weights", rows * n, w.len())?;
        enough("round_columns", "factor", n * n, u.len())?;
        enough("round_columns", "order", n, order.len())?;
        enough("round_columns", "importance", n, importance.len())?;
        let codes: Codes = self.gpu().zeros("codes", rows * n)?;
        let errors: Buffer<f32> = self.gpu().zeros("errors of rounding", rows * COLUMNS)?;
        for ColumnBlock { places, begins } in blocks {
            enough("round_columns", "places", places.end, n)?;
            enough("round_columns", "a block", places.len(), COLUMNS)?;
            if let &Some(group) = begins {
                let columns = g.group.min(n - group * g.group);
                let columns = places.start..places.start + columns;
                let part = self.part(importance, columns.clone())?;
                self.fit_groups(fit, &w, columns, &part, g, group)?;
            }
            self.round_block(&w, u, order, places.clone(), g, (&codes, &errors))?;
            self.take_over(&mut w, u, &errors, places.clone(), g)?;
        }
        self.synchronize()?;
        Ok(codes)
    }

    /// A copy of some values.
    fn part(&self, from: &Buffer<f32>, range: Range<usize>) -> Result<Buffer<f32>> {
        let to = self.gpu().zeros("importance of columns", range.len())?;
        self.copy_values(from.at(range.start), to.at(0), range.len())?;
        // It may be freed while the kernel that uses it is queued: freeing waits.
        Ok(to)
    }

    fn round_block(
        &self,
        w: &Buffer<f32>,
        u: &Buffer<f32>,
        order: &Order,
        places: Range<usize>,
        g: &Groups,
        (codes, errors): (&Codes, &Buffer<f32>),
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            w: Address,
            u: Address,
            order: Address,
            scales: Address,
            zeros: Address,
            codes: Address,
            errors: Address,
            rows: i32,
            n: i32,
            group: i32,
            groups: i32,
            start: i32,
            len: i32,
            max_code: f32,
            pad: i32,
        }
        let args = Args {
            w: w.at(0),
            u: u.at(0),
            order: order.0.at(0),
            scales: g.scales.at(0),
            zeros: g.zeros.at(0),
            codes: codes.at(0),
            errors: errors.at(0),
            rows: g.rows as i32,
            n: g.cols as i32,
            group: g.group as i32,
            groups: g.groups() as i32,
            start: places.start as i32,
            len: places.len() as i32,
            max_code: f32::from(g.max_code),
            pad: 0,
        };
        let shape = (32 * ROWS, 4 * COLUMNS * COLUMNS);
        let grid = (g.rows.div_ceil(ROWS), 1, 1);
        // SAFETY: the caller checked all operands; shared memory holds the block of U.
        unsafe { self.launch_shared("round_columns", grid, shape, &args) }
    }

    /// Takes what a block's errors make of later columns from them.
    fn take_over(
        &self,
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
            at: errors.at(0),
            ld: COLUMNS,
        };
        let side = |at| Side { at, ld: n };
        let (u, w) = (side(u.at(places.start * n + end)), side(w.at(end)));
        // SAFETY: errors are [rows, 128]; of U the block's rows and of w all rows are meant, in
        // columns from `end` on.
        unsafe { self.product(product, errors, u, w) }
    }

    /// Codes' values less the weight `w`, `[rows, cols]`.
    ///
    /// # Errors
    /// Too little memory; operands that are too short.
    pub fn rounding_error(
        &self,
        w: &Buffer<f32>,
        codes: &Codes,
        g: &Groups,
    ) -> Result<Buffer<f32>> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            w: Address,
            codes: Address,
            scales: Address,
            zeros: Address,
            e: Address,
            n: i32,
            group: i32,
            groups: i32,
            pad: i32,
        }
        enough("rounding_error", "weights", g.values(), w.len())?;
        enough("rounding_error", "codes", g.values(), codes.len())?;
        let e = self.gpu().zeros("errors of rounding", g.values())?;
        for run in runs(g.rows) {
            let (at, group) = (run.start * g.cols, run.start * g.groups());
            let args = Args {
                w: w.at(at),
                codes: codes.at(at),
                scales: g.scales.at(group),
                zeros: g.zeros.at(group),
                e: e.at(at),
                n: g.cols as i32,
                group: g.group as i32,
                groups: g.groups() as i32,
                pad: 0,
            };
            let grid = cover(g.cols, run.len());
            // SAFETY: all operands were checked, and the run is one of their rows.
            unsafe { self.launch_shared("rounding_error", grid, (THREADS, 0), &args)? };
        }
        Ok(e)
    }

    /// The sum of `a[i] b[i]` over the first `n` values, in f64 and a fixed order.
    ///
    /// # Errors
    /// Operands that are too short.
    pub fn dot(&self, a: &Buffer<f32>, b: &Buffer<f32>, n: usize) -> Result<f64> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            a: Address,
            b: Address,
            parts: Address,
            n: i64,
        }
        enough("dot", "a", n, a.len())?;
        enough("dot", "b", n, b.len())?;
        let parts: Buffer<f64> = self.gpu().zeros("partial sums", PARTS)?;
        let args = Args {
            a: a.at(0),
            b: b.at(0),
            parts: parts.at(0),
            n: n as i64,
        };
        // SAFETY: both operands were checked; there is a part for each block.
        unsafe { self.launch_shared("dot_parts", (PARTS, 1, 1), (THREADS, 0), &args)? };
        self.synchronize()?;
        let mut sums = vec![0.0; PARTS];
        parts.read(0, &mut sums)?;
        Ok(sums.iter().sum())
    }

    /// The moments `[n, n]` of inputs divided by `s`.
    ///
    /// # Errors
    /// Too little memory; operands that are too short.
    pub fn divide_moments(&self, h: &Buffer<f32>, s: &[f32]) -> Result<Buffer<f32>> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            h: Address,
            s: Address,
            to: Address,
            n: i32,
            pad: i32,
        }
        let n = s.len();
        enough("divide_moments", "moments", n * n, h.len())?;
        let s = self.gpu().upload("scales of inputs", s)?;
        let to = self.gpu().zeros("second moments", n * n)?;
        let args = Args {
            h: h.at(0),
            s: s.at(0),
            to: to.at(0),
            n: n as i32,
            pad: 0,
        };
        // SAFETY: both are [n, n]; the scales outlive the kernel, which is waited for.
        unsafe { self.launch_shared("divide_moments", cover(n, n), (THREADS, 0), &args)? };
        self.synchronize()?;
        Ok(to)
    }

    /// The diagonal of `h` `[n, n]`, on the host.
    ///
    /// # Errors
    /// A matrix that is too short.
    pub fn diagonal(&self, h: &Buffer<f32>, n: usize) -> Result<Vec<f32>> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            h: Address,
            to: Address,
            n: i32,
            pad: i32,
        }
        enough("diagonal", "matrix", n * n, h.len())?;
        let to: Buffer<f32> = self.gpu().zeros("a diagonal", n)?;
        let args = Args {
            h: h.at(0),
            to: to.at(0),
            n: n as i32,
            pad: 0,
        };
        // SAFETY: both operands hold what n says.
        unsafe { self.launch_shared("diagonal", cover(n, 1), (THREADS, 0), &args)? };
        self.synchronize()?;
        let mut values = vec![0.0; n];
        to.read(0, &mut values)?;
        Ok(values)
    }
}
