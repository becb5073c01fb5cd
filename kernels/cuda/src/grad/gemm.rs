//! Products of f32 matrices, by cuBLAS or by `cuda/grad_gemm.cu`.

use super::{BENCH, CudaOps, GemmPrecision, TEST, THREADS, blocks};
use crate::cuda::grad_gemm::{GradGemmArgs, GradGemmSumArgs, TILE};
use crate::driver::{Address, Buffer, LaunchShape, Side, Stream};
use crate::kernel::kernels;
use nq_kernels::Result;
use nq_kernels::grad::Gemm;
use std::ops::Range;

/// The shortest part of k that is worth a block of its own, and the most parts.
const PART: usize = 512;
const PARTS: usize = 32;

kernels! {
    GEMM: GradGemmArgs = "grad_gemm" in "grad_gemm.cu", test TEST, bench BENCH,
        instances &[
            "grad_gemm_nn_3", "grad_gemm_nt_3", "grad_gemm_tn_3", "grad_gemm_tt_3",
            "grad_gemm_nn_1", "grad_gemm_nt_1", "grad_gemm_tn_1", "grad_gemm_tt_1",
        ];
    SUM: GradGemmSumArgs = "grad_gemm_sum" in "grad_gemm.cu", test TEST, bench BENCH;
}

/// The instance of [`GEMM`] that multiplies rows of A by rows of B in full precision.
const BY_ROWS: usize = 1;

impl CudaOps {
    /// The product of matrices that may be parts of larger ones; those of a batch follow one
    /// another.
    ///
    /// # Safety
    /// The operands have the shapes given by `g`; C's rows are contiguous unless the batch is 1.
    pub(crate) unsafe fn product(&self, g: Gemm, a: Side, b: Side, c: Side) -> Result<()> {
        if let Some(blas) = &self.blas {
            let tf32 = self.precision == GemmPrecision::Tf32;
            // SAFETY: by contract.
            return unsafe { blas.product(g, a, b, c, tf32) };
        }
        // SAFETY: by contract.
        unsafe { self.own_product(g, a, b, c) }
    }

    /// The same product by nq's kernels.
    ///
    /// # Safety
    /// Like [`CudaOps::product`].
    unsafe fn own_product(&self, g: Gemm, a: Side, b: Side, c: Side) -> Result<()> {
        let (an, bn, cn) = (g.m * g.k, g.k * g.n, g.m * g.n);
        let tiles = g.m.div_ceil(TILE) * g.n.div_ceil(TILE);
        let wanted = (2 * self.gpu.info().multiprocessors).div_ceil(tiles);
        // Parts are added to a contiguous C.
        let splits = match g.batch {
            1 if c.ld == g.n => wanted.min(g.k / PART).clamp(1, PARTS),
            _ => 1,
        };
        let part = g.k.div_ceil(splits).next_multiple_of(16);
        let splits = g.k.div_ceil(part).max(1);
        let scratch = match splits {
            1 => None,
            _ => Some(self.scratch(splits * cn)?),
        };
        let o = self.operands("gemm");
        let parts = o.optional("partial sums", scratch.as_deref(), &[splits, cn])?;
        let whole = |s: Side, elements: usize| {
            let aligned = s.at.is_aligned(16) && s.ld.is_multiple_of(4);
            i32::from(aligned && (g.batch == 1 || elements.is_multiple_of(4)))
        };
        let args = GradGemmArgs {
            a: a.at,
            b: b.at,
            c: if splits == 1 { c.at } else { parts },
            stride_a: an as i64,
            stride_b: bn as i64,
            stride_c: cn as i64,
            m: g.m as i32,
            n: g.n as i32,
            k: g.k as i32,
            lda: a.ld as i32,
            ldb: b.ld as i32,
            ldc: c.ld as i32,
            splits: splits as i32,
            part: part as i32,
            vector_a: whole(a, an),
            vector_b: whole(b, bn),
            accumulate: i32::from(g.accumulate && splits == 1),
            alpha: g.alpha,
        };
        let one = usize::from(self.precision == GemmPrecision::Tf32);
        let kernel = GEMM.instance(4 * one + 2 * usize::from(g.ta) + usize::from(g.tb));
        let grid = [g.n.div_ceil(TILE), g.m.div_ceil(TILE), g.batch * splits];
        // SAFETY: by contract; scratch holds the parts of C.
        unsafe { self.launch(kernel, grid, THREADS, &args)? };
        match splits {
            1 => Ok(()),
            // SAFETY: C has the contract's shape, and scratch holds its parts.
            _ => unsafe { self.sum_parts(parts, c.at, cn, splits, g.accumulate) },
        }
    }

    /// `c (+)=` the sum of `parts` vectors of `n` values that start at `x`.
    ///
    /// # Safety
    /// Both addresses hold that many values.
    pub(super) unsafe fn sum_parts(
        &self,
        x: Address,
        c: Address,
        n: usize,
        parts: usize,
        accumulate: bool,
    ) -> Result<()> {
        let args = GradGemmSumArgs {
            x,
            c,
            n: n as i64,
            parts: parts as i32,
            accumulate: i32::from(accumulate),
        };
        // SAFETY: by contract.
        unsafe { self.launch(&SUM, blocks(n, THREADS), THREADS, &args) }
    }
}

/// What a matrix of low rank adds to rows of a product: `scale low B`.
pub struct LowRank<'a> {
    /// `[m, ranks]`
    pub low: &'a Buffer<f32>,
    /// `[out, ranks]`
    pub b: &'a Buffer<f32>,
    /// Columns of `b`, a multiple of 16.
    pub ranks: usize,
    /// The rows of `low` and of the product.
    pub rows: Range<usize>,
    /// What they are multiplied by.
    pub scale: f32,
}

impl Stream {
    /// Adds the first `n` values of `x` to those of `y` from `at` on.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(crate) fn add(
        &self,
        x: &Buffer<f32>,
        y: &mut Buffer<f32>,
        at: usize,
        n: usize,
    ) -> Result<()> {
        let o = self.operands("add");
        let args = GradGemmSumArgs {
            x: o.of("x", x, &[n])?,
            c: o.part("y", y, at, &[n])?,
            n: n as i64,
            parts: 1,
            accumulate: 1,
        };
        let shape = LaunchShape::new([n.div_ceil(THREADS), 1, 1], THREADS);
        // SAFETY: the operands were checked.
        unsafe { self.launch(&SUM, shape, &args) }
    }

    /// Adds to rows of `y` `[m, out]`, in f32.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(crate) fn add_low_rank(&self, added: &LowRank<'_>, y: &mut Buffer<f32>) -> Result<()> {
        let o = self.operands("add_low_rank");
        let (ranks, m, first) = (added.ranks, added.rows.len(), added.rows.start);
        o.multiple("ranks", 16, ranks)?;
        let n = added.b.len() / ranks;
        let args = GradGemmArgs {
            a: o.part("low", added.low, first * ranks, &[m, ranks])?,
            b: o.of("b", added.b, &[n, ranks])?,
            c: o.part("y", y, first * n, &[m, n])?,
            stride_a: 0,
            stride_b: 0,
            stride_c: 0,
            m: m as i32,
            n: n as i32,
            k: ranks as i32,
            lda: ranks as i32,
            ldb: ranks as i32,
            ldc: n as i32,
            splits: 1,
            part: ranks as i32,
            vector_a: 1,
            vector_b: 1,
            accumulate: 1,
            alpha: added.scale,
        };
        let shape = LaunchShape::new([n.div_ceil(TILE), m.div_ceil(TILE), 1], THREADS);
        // SAFETY: the operands were checked; rows of ranks are whole vectors of 16 bytes.
        unsafe { self.launch(GEMM.instance(BY_ROWS), shape, &args) }
    }
}
