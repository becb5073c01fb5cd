//! The factor that GPTQ rounds by (`cuda/factor.cu`).

use super::{THREADS, check_order, cover};
use crate::cuda::driver::{Address, Buffer};
use crate::cuda::grad::CudaOps;
use crate::error::Result;
use crate::grad::enough;

/// Side of a tile of `cuda/factor.cu`.
const SIDE: usize = 64;
const TILE: usize = SIDE * SIDE;
/// Bytes of the two tiles that a block holds, rows apart by 66 and by 65.
const TILES_SHARED: usize = 2 * SIDE * (SIDE + 2) * 8;
const DIAGONAL_SHARED: usize = 2 * SIDE * (SIDE + 1) * 8;

/// How second moments are made fit to be inverted.
#[derive(Clone, Copy, Debug)]
pub struct Damped<'a> {
    /// The input of each place.
    pub order: &'a [u32],
    /// 1 for an input that was never seen, else 0, by input.
    pub dead: &'a [u32],
    /// The moment that such inputs get.
    pub fill: f64,
    /// Added to the diagonal.
    pub damping: f64,
}

/// `FactorTilesArgs` of `cuda/factor.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Tiles {
    a: Address,
    b: Address,
    c: Address,
    alpha: f64,
    lda: i32,
    ldb: i32,
    ldc: i32,
    lower: i32,
    accumulate: i32,
    pad: i32,
}

/// A factorization under way.
struct Work<'a> {
    ops: &'a CudaOps,
    np: usize,
    a: Buffer<f64>,       // [np, np]
    inverse: Buffer<f64>, // [np / 64][64][64]
    panel: Buffer<f64>,   // [np, 64]
    flag: Buffer<u32>,    // 1: not positive, or not finite
}

/// Bytes that a factorization of `n` inputs takes, beside its result.
pub(super) fn factor_bytes(n: usize) -> usize {
    let np = n.next_multiple_of(SIDE);
    8 * np * (np + 2 * SIDE)
}

impl CudaOps {
    /// Bytes of device memory that [`CudaOps::inverse_factor`] takes for `n` inputs, beside the
    /// factor itself.
    pub fn factor_bytes(n: usize) -> usize {
        factor_bytes(n)
    }

    /// The upper triangular `U` with `(P H P^T + d I)^-1 = U^T U`, `[n, n]`, where `P` takes
    /// input `order[i]` to place `i`; `None` if the damped matrix is not positive definite.
    /// `h` is `[n, n]`.
    ///
    /// # Errors
    /// Too little memory; the device's.
    pub fn inverse_factor(&self, h: &Buffer<f32>, d: Damped<'_>) -> Result<Option<Buffer<f32>>> {
        let n = d.order.len();
        enough("inverse_factor", "moments", n * n, h.len())?;
        enough("inverse_factor", "dead", n, d.dead.len())?;
        check_order(d.order)?;
        let np = n.next_multiple_of(SIDE);
        let what = "factoring second moments";
        let work = Work {
            ops: self,
            np,
            a: self.gpu().zeros(what, np * np)?,
            inverse: self.gpu().zeros(what, np * SIDE)?,
            panel: self.gpu().zeros(what, np * SIDE)?,
            flag: self.gpu().zeros(what, 1)?,
        };
        work.gather(h, d)?;
        for k in 0..np / SIDE {
            work.factor_column(k)?;
        }
        for k in 0..np / SIDE {
            work.invert_column(k)?;
        }
        let u = work.emit(n)?;
        self.synchronize()?;
        let mut flag = [0];
        work.flag.read(0, &mut flag)?;
        Ok((flag[0] == 0).then_some(u))
    }
}

impl Work<'_> {
    /// Tile `(row, col)` of A.
    fn tile(&self, row: usize, col: usize) -> Address {
        self.a.at(row * SIDE * self.np + col * SIDE)
    }

    /// The inverse of block `k` of the diagonal.
    fn diagonal(&self, k: usize) -> Address {
        self.inverse.at(k * TILE)
    }

    fn gather(&self, h: &Buffer<f32>, d: Damped<'_>) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            h: Address,
            order: Address,
            dead: Address,
            a: Address,
            fill: f64,
            damping: f64,
            n: i32,
            np: i32,
        }
        let gpu = self.ops.gpu();
        let order = gpu.upload("order of columns", d.order)?;
        let dead = gpu.upload("order of columns", d.dead)?;
        let args = Args {
            h: h.at(0),
            order: order.at(0),
            dead: dead.at(0),
            a: self.a.at(0),
            fill: d.fill,
            damping: d.damping,
            n: d.order.len() as i32,
            np: self.np as i32,
        };
        // SAFETY: h was checked for [n, n], A is [np, np]; the order is a permutation of the
        // inputs, and both lists outlive the kernel, which is waited for.
        unsafe {
            let grid = cover(self.np, self.np);
            (self.ops).launch_shared("factor_gather", grid, (THREADS, 0), &args)?;
        }
        self.ops.synchronize()
    }

    /// # Safety
    /// The tiles lie within the operands, `[rows]` by `[cols]` of them.
    unsafe fn tiles(&self, name: &str, grid: (usize, usize), args: &Tiles) -> Result<()> {
        if grid.0 * grid.1 == 0 {
            return Ok(());
        }
        let shape = (THREADS, TILES_SHARED);
        // SAFETY: the caller's; shared memory holds two tiles.
        unsafe { (self.ops).launch_shared(name, (grid.0, grid.1, 1), shape, args) }
    }

    /// Column `k` of L, and what it takes from the columns behind it.
    fn factor_column(&self, k: usize) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            a: Address,
            inverse: Address,
            flag: Address,
            np: i32,
            k: i32,
        }
        let args = Args {
            a: self.a.at(0),
            inverse: self.inverse.at(0),
            flag: self.flag.at(0),
            np: self.np as i32,
            k: k as i32,
        };
        let ld = self.np as i32;
        let below = self.np / SIDE - k - 1;
        // SAFETY: block k is within A and the inverses; shared memory holds both tiles.
        unsafe {
            let shape = (THREADS, DIAGONAL_SHARED);
            (self.ops).launch_shared("factor_diagonal", (1, 1, 1), shape, &args)?;
        }
        if below == 0 {
            return Ok(());
        }
        let panel = Tiles {
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
        let behind = Tiles {
            b: self.tile(k + 1, k),
            c: self.tile(k + 1, k + 1),
            alpha: -1.0,
            ldb: ld,
            lower: 1,
            accumulate: 1,
            ..panel
        };
        // SAFETY: `below` tiles of column k, one column of tiles that are their own A; and the
        // lower triangle of what is right of and below them.
        unsafe {
            self.tiles("factor_tiles_nt", (1, below), &panel)?;
            self.tiles("factor_tiles_nt", (below * (below + 1) / 2, 1), &behind)
        }
    }

    /// Row `k` of the inverse, and what it adds to the rows below it.
    fn invert_column(&self, k: usize) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            from: Address,
            to: Address,
            ld: i32,
            pad: i32,
        }
        let ld = self.np as i32;
        let below = self.np / SIDE - k - 1;
        let row = Tiles {
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
        // SAFETY: the k tiles left of the diagonal, one row of tiles that are their own B.
        unsafe { self.tiles("factor_tiles_nn", (k, 1), &row)? };
        if below == 0 {
            return Ok(());
        }
        let args = Args {
            from: self.tile(k + 1, k),
            to: self.panel.at(0),
            ld,
            pad: 0,
        };
        let left = Tiles {
            a: self.panel.at(0),
            c: self.tile(k + 1, 0),
            alpha: -1.0,
            accumulate: 1,
            ..row
        };
        let own = Tiles {
            b: self.diagonal(k),
            c: self.tile(k + 1, k),
            ldb: SIDE as i32,
            accumulate: 0,
            ..left
        };
        // SAFETY: the panel has room for all rows; `below` rows of tiles below row k, in columns
        // up to k.
        unsafe {
            let rows = (below * SIDE, 1, 1);
            (self.ops).launch_shared("factor_panel", rows, (SIDE, 0), &args)?;
            self.tiles("factor_tiles_nn", (k, below), &left)?;
            self.tiles("factor_tiles_nn", (1, below), &own)
        }
    }

    fn emit(&self, n: usize) -> Result<Buffer<f32>> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            a: Address,
            inverse: Address,
            u: Address,
            flag: Address,
            n: i32,
            np: i32,
        }
        let u = self
            .ops
            .gpu()
            .zeros("the factor of second moments", n * n)?;
        let args = Args {
            a: self.a.at(0),
            inverse: self.inverse.at(0),
            u: u.at(0),
            flag: self.flag.at(0),
            n: n as i32,
            np: self.np as i32,
        };
        // SAFETY: U is [n, n], A and the inverses cover it.
        unsafe { (self.ops).launch_shared("factor_emit", cover(n, n), (THREADS, 0), &args)? };
        Ok(u)
    }
}
