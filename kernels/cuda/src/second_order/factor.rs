//! The factor with which GPTQ rounds (`cuda/factor.cu`).

use super::{BENCH, ROUNDING, THREADS, check_order, cover};
use crate::cuda::factor::{
    FactorDiagonalArgs, FactorEmitArgs, FactorGatherArgs, FactorPanelArgs, FactorTilesArgs, SIDE,
};
use crate::driver::{Address, Buffer, Operands};
use crate::grad::CudaOps;
use crate::kernel::{Instance, kernels};
use nq_kernels::Result;
use nq_kernels::second_order::Damped;

const TILE: usize = SIDE * SIDE;
/// Bytes of the two tiles that a block holds, with row strides of 66 and 65.
const TILES_SHARED: usize = 2 * SIDE * (SIDE + 2) * 8;
const DIAGONAL_SHARED: usize = 2 * SIDE * (SIDE + 1) * 8;

kernels! {
    GATHER: FactorGatherArgs = "factor_gather" in "factor.cu", test ROUNDING, bench BENCH;
    FACTOR_DIAGONAL: FactorDiagonalArgs = "factor_diagonal" in "factor.cu", test ROUNDING, bench BENCH;
    TILES: FactorTilesArgs = "factor_tiles" in "factor.cu", test ROUNDING, bench BENCH,
        instances &["factor_tiles_nn", "factor_tiles_nt"];
    PANEL: FactorPanelArgs = "factor_panel" in "factor.cu", test ROUNDING, bench BENCH;
    EMIT: FactorEmitArgs = "factor_emit" in "factor.cu", test ROUNDING, bench BENCH;
}

/// Instances of [`TILES`]: with B unchanged, and transposed.
const NN: usize = 0;
const NT: usize = 1;

/// A factorization in progress.
struct Factorization<'a> {
    ops: &'a CudaOps,
    np: usize,
    /// The buffers that the addresses point into.
    _matrices: [Buffer<f64>; 3],
    flag: Buffer<u32>,
    at: Addresses,
}

struct Addresses {
    a: Address,       // [np, np]
    inverse: Address, // [np / 64][64][64]
    panel: Address,   // [np, 64]
    flag: Address,    // 1: not positive, or not finite
}

/// Bytes that a factorization of `n` inputs takes, besides its result.
pub(super) fn factor_bytes(n: usize) -> usize {
    let np = n.next_multiple_of(SIDE);
    8 * np * (np + 2 * SIDE)
}

impl CudaOps {
    /// Bytes of device memory that [`CudaOps::inverse_factor`] takes for `n` inputs, besides the
    /// factor itself.
    pub fn factor_bytes(n: usize) -> usize {
        factor_bytes(n)
    }

    /// The upper triangular `U` with `(P H P^T + d I)^-1 = U^T U`, `[n, n]`, where `P` moves
    /// input `order[i]` to place `i`; `None` if the damped matrix is not positive definite.
    /// `h` is `[n, n]`.
    ///
    /// # Errors
    /// Too little memory; errors of the device.
    pub fn inverse_factor(&self, h: &Buffer<f32>, d: Damped<'_>) -> Result<Option<Buffer<f32>>> {
        let o = self.operands("inverse_factor");
        let n = d.order.len();
        o.at_least("dead", n, d.dead.len())?;
        check_order(d.order)?;
        let np = n.next_multiple_of(SIDE);
        let what = "factoring second moments";
        let matrix = |n| self.gpu().zeros(what, n);
        let (a, inverse, panel) = (matrix(np * np)?, matrix(np * SIDE)?, matrix(np * SIDE)?);
        let flag = self.gpu().zeros(what, 1)?;
        let work = Factorization {
            ops: self,
            np,
            at: Addresses {
                a: o.of("moments", &a, &[np, np])?,
                inverse: o.of("inverses", &inverse, &[np, SIDE])?,
                panel: o.of("panel", &panel, &[np, SIDE])?,
                flag: o.of("flag", &flag, &[1])?,
            },
            _matrices: [a, inverse, panel],
            flag,
        };
        work.gather(&o, h, d)?;
        for k in 0..np / SIDE {
            work.factor_column(k)?;
        }
        for k in 0..np / SIDE {
            work.invert_column(k)?;
        }
        let u = work.emit(&o, n)?;
        self.synchronize()?;
        let mut flag = [0];
        work.flag.read(0, &mut flag)?;
        Ok((flag[0] == 0).then_some(u))
    }
}

impl Factorization<'_> {
    /// Tile `(row, col)` of A.
    fn tile(&self, row: usize, col: usize) -> Address {
        debug_assert!(row.max(col) < self.np / SIDE);
        (self.at.a).plus((row * SIDE * self.np + col * SIDE) * size_of::<f64>())
    }

    /// The inverse of diagonal block `k`.
    fn diagonal(&self, k: usize) -> Address {
        debug_assert!(k < self.np / SIDE);
        self.at.inverse.plus(k * TILE * size_of::<f64>())
    }

    fn gather(&self, o: &Operands<'_>, h: &Buffer<f32>, d: Damped<'_>) -> Result<()> {
        let (gpu, n) = (self.ops.gpu(), d.order.len());
        let order = gpu.upload("order of columns", d.order)?;
        let dead = gpu.upload("order of columns", d.dead)?;
        let args = FactorGatherArgs {
            h: o.of("moments", h, &[n, n])?,
            order: o.of("order", &order, &[n])?,
            dead: o.of("dead", &dead, &[n])?,
            a: self.at.a,
            fill: d.fill,
            damping: d.damping,
            noise: d.noise,
            n: n as i32,
            np: self.np as i32,
        };
        // SAFETY: the operands were checked, and the order lists valid inputs.
        unsafe {
            let grid = cover(self.np, self.np);
            (self.ops).launch_shared(&GATHER, grid, THREADS, 0, &args)?;
        }
        self.ops.synchronize()
    }

    /// # Safety
    /// The tiles are inside the operands, which have `[rows]` by `[cols]` of them.
    unsafe fn tiles(
        &self,
        kernel: Instance<FactorTilesArgs>,
        [rows, cols]: [usize; 2],
        args: &FactorTilesArgs,
    ) -> Result<()> {
        if rows * cols == 0 {
            return Ok(());
        }
        let grid = [rows, cols, 1];
        // SAFETY: by contract; shared memory holds two tiles.
        unsafe { (self.ops).launch_shared(kernel, grid, THREADS, TILES_SHARED, args) }
    }

    /// Computes column `k` of L, and subtracts its contribution from the columns behind it.
    fn factor_column(&self, k: usize) -> Result<()> {
        let args = FactorDiagonalArgs {
            a: self.at.a,
            inverse: self.at.inverse,
            flag: self.at.flag,
            np: self.np as i32,
            k: k as i32,
        };
        let ld = self.np as i32;
        let below = self.np / SIDE - k - 1;
        // SAFETY: block k is inside A and the inverses; shared memory holds both tiles.
        unsafe {
            let shared = DIAGONAL_SHARED;
            (self.ops).launch_shared(&FACTOR_DIAGONAL, [1; 3], THREADS, shared, &args)?;
        }
        if below == 0 {
            return Ok(());
        }
        let panel = FactorTilesArgs {
            a: self.tile(k + 1, k),
            b: self.diagonal(k),
            c: self.tile(k + 1, k),
            alpha: 1.0,
            lda: ld,
            ldb: SIDE as i32,
            ldc: ld,
            lower: 0,
            accumulate: 0,
            pad: 0,
        };
        let behind = FactorTilesArgs {
            b: self.tile(k + 1, k),
            c: self.tile(k + 1, k + 1),
            alpha: -1.0,
            ldb: ld,
            lower: 1,
            accumulate: 1,
            ..panel
        };
        // SAFETY: `below` tiles of column k, one column of tiles that are also A; and the
        // lower triangle to the right of and below them.
        unsafe {
            self.tiles(TILES.instance(NT), [1, below], &panel)?;
            self.tiles(TILES.instance(NT), [below * (below + 1) / 2, 1], &behind)
        }
    }

    /// Computes row `k` of the inverse, and adds its contribution to the rows below it.
    fn invert_column(&self, k: usize) -> Result<()> {
        let ld = self.np as i32;
        let below = self.np / SIDE - k - 1;
        let row = FactorTilesArgs {
            a: self.diagonal(k),
            b: self.tile(k, 0),
            c: self.tile(k, 0),
            alpha: 1.0,
            lda: SIDE as i32,
            ldb: ld,
            ldc: ld,
            lower: 0,
            accumulate: 0,
            pad: 0,
        };
        // SAFETY: the k tiles left of the diagonal, one row of tiles that are also B.
        unsafe { self.tiles(TILES.instance(NN), [k, 1], &row)? };
        if below == 0 {
            return Ok(());
        }
        let args = FactorPanelArgs {
            from: self.tile(k + 1, k),
            to: self.at.panel,
            ld,
            pad: 0,
        };
        let left = FactorTilesArgs {
            a: self.at.panel,
            c: self.tile(k + 1, 0),
            alpha: -1.0,
            accumulate: 1,
            ..row
        };
        let own = FactorTilesArgs {
            b: self.diagonal(k),
            c: self.tile(k + 1, k),
            ldb: SIDE as i32,
            accumulate: 0,
            ..left
        };
        // SAFETY: the panel has room for all rows; `below` rows of tiles below row k, in columns
        // up to k.
        unsafe {
            let rows = [below * SIDE, 1, 1];
            (self.ops).launch_shared(&PANEL, rows, SIDE, 0, &args)?;
            self.tiles(TILES.instance(NN), [k, below], &left)?;
            self.tiles(TILES.instance(NN), [1, below], &own)
        }
    }

    fn emit(&self, o: &Operands<'_>, n: usize) -> Result<Buffer<f32>> {
        let u = self
            .ops
            .gpu()
            .zeros("the factor of second moments", n * n)?;
        let args = FactorEmitArgs {
            a: self.at.a,
            inverse: self.at.inverse,
            u: o.of("factor", &u, &[n, n])?,
            flag: self.at.flag,
            n: n as i32,
            np: self.np as i32,
        };
        // SAFETY: U is [n, n], and A and the inverses cover it.
        unsafe { (self.ops).launch_shared(&EMIT, cover(n, n), THREADS, 0, &args)? };
        Ok(u)
    }
}
