//! Products of f32 matrices, by cuBLAS or by `cuda/grad_gemm.cu`.

use super::{BENCH, CudaOps, GemmPrecision, TEST, THREADS, blocks};
use crate::driver::{Address, Side};
use crate::kernel::kernels;
use nq_kernels::Result;
use nq_kernels::grad::Gemm;

/// Side of a block's tile of C (`cuda/grad_gemm.cu`).
const TILE: usize = 128;
/// The shortest part of k that is worth a block of its own, and the most parts.
const PART: usize = 512;
const PARTS: usize = 32;

kernels! {
    GEMM: GemmArgs = "grad_gemm" in "grad_gemm.cu", test TEST, bench BENCH,
        instances &[
            "grad_gemm_nn_3", "grad_gemm_nt_3", "grad_gemm_tn_3", "grad_gemm_tt_3",
            "grad_gemm_nn_1", "grad_gemm_nt_1", "grad_gemm_tn_1", "grad_gemm_tt_1",
        ];
    SUM: SumArgs = "grad_gemm_sum" in "grad_gemm.cu", test TEST, bench BENCH;
}

/// `GradGemmArgs` of `cuda/grad_gemm.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct GemmArgs {
    a: Address,
    b: Address,
    c: Address,
    stride_a: i64,
    stride_b: i64,
    stride_c: i64,
    m: i32,
    n: i32,
    k: i32,
    lda: i32,
    ldb: i32,
    ldc: i32,
    splits: i32,
    part: i32,
    vector_a: i32,
    vector_b: i32,
    accumulate: i32,
    alpha: f32,
}

/// `GradGemmSumArgs` of `cuda/grad_gemm.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct SumArgs {
    x: Address,
    c: Address,
    n: i64,
    parts: i32,
    accumulate: i32,
}

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
            return unsafe { blas.product(g, (a, b, c), tf32) };
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
        let args = GemmArgs {
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
        let grid = (g.n.div_ceil(TILE), g.m.div_ceil(TILE), g.batch * splits);
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
        let args = SumArgs {
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
