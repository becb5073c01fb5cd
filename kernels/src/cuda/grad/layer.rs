//! A layer's operations, forward and backward: launchers of `cuda/grad_gemm.cu` and
//! `cuda/grad_rows.cu`.

use super::{CudaOps, GemmPrecision, THREADS, blocks};
use crate::cuda::driver::{Address, Buffer, Side};
use crate::error::Result;
use crate::grad::{Gemm, HeadShape, LayerOps, Occurrences, enough};

/// Side of a block's tile of C (`cuda/grad_gemm.cu`).
const TILE: usize = 128;
/// The shortest part of k that is worth a block of its own, and the most parts.
const PART: usize = 512;
const PARTS: usize = 32;

/// `Heads` of `cuda/grad_rows.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct HeadArgs {
    batch: i32,
    seq: i32,
    heads: i32,
    dim: i32,
    capacity: i32,
    at: i32,
    position: i32,
    pad: i32,
}

impl From<HeadShape> for HeadArgs {
    fn from(s: HeadShape) -> Self {
        HeadArgs {
            batch: s.batch as i32,
            seq: s.seq as i32,
            heads: s.heads as i32,
            dim: s.dim as i32,
            capacity: s.capacity as i32,
            at: s.at as i32,
            position: s.position as i32,
            pad: 0,
        }
    }
}

/// `GradSoftmaxArgs` and `GradSiluArgs` of `cuda/grad_rows.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct SoftmaxArgs {
    s: Address,
    p: Address,
    rows: i64,
    seq: i32,
    pad: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SiluArgs {
    gate: Address,
    up: Address,
    dout: Address,
    out: Address,
    n: i64,
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

impl CudaOps {
    /// The product of matrices that may be parts of larger ones; those of a batch lie one
    /// behind the other.
    ///
    /// # Safety
    /// The operands hold what `g` says; C's rows are contiguous unless the batch is 1.
    pub(in crate::cuda) unsafe fn product(&self, g: Gemm, a: Side, b: Side, c: Side) -> Result<()> {
        if let Some(blas) = &self.blas {
            let tf32 = self.precision == GemmPrecision::Tf32;
            // SAFETY: the caller's.
            return unsafe { blas.product(g, (a, b, c), tf32) };
        }
        // SAFETY: the caller's.
        unsafe { self.own_product(g, a, b, c) }
    }

    /// The same by nq's kernels.
    ///
    /// # Safety
    /// As [`CudaOps::product`].
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
        let whole = |s: Side, elements: usize| {
            let aligned = s.at.is_aligned(16) && s.ld.is_multiple_of(4);
            i32::from(aligned && (g.batch == 1 || elements.is_multiple_of(4)))
        };
        let args = GemmArgs {
            a: a.at,
            b: b.at,
            c: scratch.as_ref().map_or(c.at, |s| s.at(0)),
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
        let side = |transposed| if transposed { 't' } else { 'n' };
        let terms = match self.precision {
            GemmPrecision::Full => 3,
            GemmPrecision::Tf32 => 1,
        };
        let name = format!("grad_gemm_{}{}_{terms}", side(g.ta), side(g.tb));
        let grid = (g.n.div_ceil(TILE), g.m.div_ceil(TILE), g.batch * splits);
        // SAFETY: the caller's; scratch holds the parts of C.
        unsafe { self.launch(&name, grid, THREADS, &args)? };
        match &scratch {
            Some(parts) => self.sum_parts(parts.at(0), c.at, cn, splits, g.accumulate),
            None => Ok(()),
        }
    }

    /// The gradient of a norm at its input and its gain; `dy` may be `dx`.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs, upstream and two outputs"
    )]
    fn norm_grad(
        &self,
        x: Address,
        gain: Address,
        inv: Address,
        dy: Address,
        dx: Address,
        add: bool,
        dgain: Address,
        (rows, width): (usize, usize),
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct GainArgs {
            x: Address,
            inv: Address,
            dy: Address,
            part: Address,
            rows: i64,
            width: i32,
            rows_of_part: i32,
        }
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            x: Address,
            gain: Address,
            inv: Address,
            dy: Address,
            dx: Address,
            rows: i64,
            width: i32,
            add: i32,
        }
        let rows_of_part = rows.div_ceil(256).max(16);
        let parts = rows.div_ceil(rows_of_part);
        let scratch = self.scratch(parts * width)?;
        let part = scratch.at(0);
        let gain_args = GainArgs {
            x,
            inv,
            dy,
            part,
            rows: rows as i64,
            width: width as i32,
            rows_of_part: rows_of_part as i32,
        };
        let args = Args {
            x,
            gain,
            inv,
            dy,
            dx,
            rows: rows as i64,
            width: width as i32,
            add: i32::from(add),
        };
        let grid = (width.div_ceil(THREADS), parts, 1);
        // SAFETY: callers check x, dy and dx for rows of width, inv for rows, the gains for
        // width; scratch holds the parts. The gain's sums read dy before dx may replace it.
        unsafe {
            self.launch("grad_gain", grid, THREADS, &gain_args)?;
            self.launch(
                "grad_rms_norm_grad",
                blocks(rows, THREADS / 32),
                THREADS,
                &args,
            )?;
        }
        self.sum_parts(part, dgain, width, parts, true)
    }

    fn move_heads(&self, x: Address, y: Address, s: HeadShape, to_rows: bool) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            x: Address,
            y: Address,
            s: HeadArgs,
            to_rows: i32,
            pad: i32,
        }
        let args = Args {
            x,
            y,
            s: s.into(),
            to_rows: i32::from(to_rows),
            pad: 0,
        };
        // SAFETY: callers check both sides.
        unsafe { self.launch("grad_heads", blocks(s.values(), THREADS), THREADS, &args) }
    }
}

impl LayerOps for CudaOps {
    fn gemm(&self, g: Gemm, a: &Buffer<f32>, b: &Buffer<f32>, c: &mut Buffer<f32>) -> Result<()> {
        let (an, bn, cn) = (g.m * g.k, g.k * g.n, g.m * g.n);
        enough("gemm", "A", g.batch * an, a.len())?;
        enough("gemm", "B", g.batch * bn, b.len())?;
        enough("gemm", "C", g.batch * cn, c.len())?;
        let side = |at, ld| Side { at, ld };
        let a = side(a.at(0), if g.ta { g.m } else { g.k });
        let b = side(b.at(0), if g.tb { g.k } else { g.n });
        // SAFETY: all three operands were checked.
        unsafe { self.product(g, a, b, side(c.at(0), g.n)) }
    }

    fn embed(
        &self,
        table: &Buffer<f32>,
        ids: &Buffer<u32>,
        (rows, stride, offset): (usize, usize, usize),
        x: &mut Buffer<f32>,
        width: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            table: Address,
            ids: Address,
            x: Address,
            stride: i32,
            offset: i32,
            width: i32,
            pad: i32,
        }
        enough("embed", "ids", (rows - 1) * stride + offset + 1, ids.len())?;
        enough("embed", "x", rows * width, x.len())?;
        let args = Args {
            table: table.at(0),
            ids: ids.at(0),
            x: x.at(0),
            stride: stride as i32,
            offset: offset as i32,
            width: width as i32,
            pad: 0,
        };
        // SAFETY: ids and x were checked; ids come from the tokenizer or the sampler, and both
        // stay below the table's rows.
        unsafe { self.launch("grad_embed", (rows, 1, 1), 128, &args) }
    }

    fn embed_grad(
        &self,
        dx: &Buffer<f32>,
        o: &Occurrences,
        table: &mut Buffer<f32>,
        width: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            dx: Address,
            rows: Address,
            tokens: Address,
            starts: Address,
            table: Address,
            width: i32,
            pad: i32,
        }
        enough("embed_grad", "dx", o.rows.len() * width, dx.len())?;
        let last = o.tokens.last().map_or(0, |&t| t as usize + 1);
        enough("embed_grad", "table", last * width, table.len())?;
        let upload = |values: &[u32]| self.gpu.upload("tokens by id", values);
        let (rows, tokens, starts) = (upload(&o.rows)?, upload(&o.tokens)?, upload(&o.starts)?);
        let args = Args {
            dx: dx.at(0),
            rows: rows.at(0),
            tokens: tokens.at(0),
            starts: starts.at(0),
            table: table.at(0),
            width: width as i32,
            pad: 0,
        };
        // SAFETY: dx and the table were checked; the lists are consistent by construction and
        // outlive the kernel, which is waited for.
        unsafe { self.launch("grad_embed_grad", (o.tokens.len(), 1, 1), 128, &args)? };
        self.stream.synchronize()
    }

    fn rms_norm(
        &self,
        x: &Buffer<f32>,
        gain: &Buffer<f32>,
        y: &mut Buffer<f32>,
        inv: &mut Buffer<f32>,
        (rows, width): (usize, usize),
        eps: f32,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            x: Address,
            gain: Address,
            y: Address,
            inv: Address,
            rows: i64,
            width: i32,
            eps: f32,
        }
        enough("rms_norm", "x", rows * width, x.len())?;
        enough("rms_norm", "y", rows * width, y.len())?;
        enough("rms_norm", "gain", width, gain.len())?;
        enough("rms_norm", "inv", rows, inv.len())?;
        let args = Args {
            x: x.at(0),
            gain: gain.at(0),
            y: y.at(0),
            inv: inv.at(0),
            rows: rows as i64,
            width: width as i32,
            eps,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch("grad_rms_norm", blocks(rows, THREADS / 32), THREADS, &args) }
    }

    fn rms_norm_grad(
        &self,
        x: &Buffer<f32>,
        gain: &Buffer<f32>,
        inv: &Buffer<f32>,
        dy: &Buffer<f32>,
        dx: &mut Buffer<f32>,
        add: bool,
        dgain: &mut Buffer<f32>,
        (rows, width): (usize, usize),
    ) -> Result<()> {
        for (what, len) in [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())] {
            enough("rms_norm_grad", what, rows * width, len)?;
        }
        enough("rms_norm_grad", "inv", rows, inv.len())?;
        enough("rms_norm_grad", "gain", width, gain.len())?;
        enough("rms_norm_grad", "dgain", width, dgain.len())?;
        let (dx, dgain) = (dx.at(0), dgain.at(0));
        let shape = (rows, width);
        self.norm_grad(
            x.at(0),
            gain.at(0),
            inv.at(0),
            dy.at(0),
            dx,
            add,
            dgain,
            shape,
        )
    }

    fn head_norm_rope(
        &self,
        x: &Buffer<f32>,
        gain: &Buffer<f32>,
        cos_sin: &Buffer<f32>,
        y: &mut Buffer<f32>,
        inv: &mut Buffer<f32>,
        s: HeadShape,
        eps: f32,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            x: Address,
            gain: Address,
            cos_sin: Address,
            y: Address,
            inv: Address,
            s: HeadArgs,
            eps: f32,
            pad: i32,
        }
        let op = "head_norm_rope";
        enough(op, "x", s.values(), x.len())?;
        enough(op, "y", s.room(), y.len())?;
        enough(op, "capacity", s.at + s.seq, s.capacity)?;
        enough(op, "inv", s.rows() * s.heads, inv.len())?;
        enough(op, "gain", s.dim, gain.len())?;
        enough(op, "cos_sin", (s.position + s.seq) * s.dim, cos_sin.len())?;
        let args = Args {
            x: x.at(0),
            gain: gain.at(0),
            cos_sin: cos_sin.at(0),
            y: y.at(0),
            inv: inv.at(0),
            s: s.into(),
            eps,
            pad: 0,
        };
        let grid = blocks(s.rows() * s.heads, THREADS / 32);
        // SAFETY: all operands were checked.
        unsafe { self.launch("grad_rope", grid, THREADS, &args) }
    }

    fn head_norm_rope_grad(
        &self,
        x: &Buffer<f32>,
        gain: &Buffer<f32>,
        cos_sin: &Buffer<f32>,
        inv: &Buffer<f32>,
        dy: &Buffer<f32>,
        dx: &mut Buffer<f32>,
        dgain: &mut Buffer<f32>,
        s: HeadShape,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            dy: Address,
            cos_sin: Address,
            dx: Address,
            s: HeadArgs,
        }
        let op = "head_norm_rope_grad";
        enough(op, "x", s.values(), x.len())?;
        enough(op, "dx", s.values(), dx.len())?;
        enough(op, "dy", s.room(), dy.len())?;
        enough(op, "inv", s.rows() * s.heads, inv.len())?;
        enough(op, "dgain", s.dim, dgain.len())?;
        enough(op, "cos_sin", (s.position + s.seq) * s.dim, cos_sin.len())?;
        let args = Args {
            dy: dy.at(0),
            cos_sin: cos_sin.at(0),
            dx: dx.at(0),
            s: s.into(),
        };
        let heads = s.rows() * s.heads;
        // SAFETY: all operands were checked.
        unsafe {
            self.launch(
                "grad_turn_back",
                blocks(heads, THREADS / 32),
                THREADS,
                &args,
            )?
        };
        let (dx, dgain) = (dx.at(0), dgain.at(0));
        self.norm_grad(
            x.at(0),
            gain.at(0),
            inv.at(0),
            dx,
            dx,
            false,
            dgain,
            (heads, s.dim),
        )
    }

    fn rows_to_heads(&self, x: &Buffer<f32>, y: &mut Buffer<f32>, s: HeadShape) -> Result<()> {
        enough("rows_to_heads", "x", s.values(), x.len())?;
        enough("rows_to_heads", "y", s.room(), y.len())?;
        enough("rows_to_heads", "capacity", s.at + s.seq, s.capacity)?;
        self.move_heads(x.at(0), y.at(0), s, false)
    }

    fn heads_to_rows(&self, x: &Buffer<f32>, y: &mut Buffer<f32>, s: HeadShape) -> Result<()> {
        enough("heads_to_rows", "x", s.room(), x.len())?;
        enough("heads_to_rows", "y", s.values(), y.len())?;
        self.move_heads(x.at(0), y.at(0), s, true)
    }

    fn causal_softmax(&self, s: &mut Buffer<f32>, rows: usize, seq: usize) -> Result<()> {
        enough("causal_softmax", "scores", rows * seq, s.len())?;
        let args = SoftmaxArgs {
            s: s.at(0),
            p: Address::NULL,
            rows: rows as i64,
            seq: seq as i32,
            pad: 0,
        };
        // SAFETY: the scores were checked.
        unsafe { self.launch("grad_softmax", blocks(rows, THREADS / 32), THREADS, &args) }
    }

    fn softmax_grad(
        &self,
        p: &Buffer<f32>,
        dp: &mut Buffer<f32>,
        rows: usize,
        seq: usize,
    ) -> Result<()> {
        enough("softmax_grad", "p", rows * seq, p.len())?;
        enough("softmax_grad", "dp", rows * seq, dp.len())?;
        let args = SoftmaxArgs {
            s: dp.at(0),
            p: p.at(0),
            rows: rows as i64,
            seq: seq as i32,
            pad: 0,
        };
        // SAFETY: both operands were checked.
        unsafe {
            self.launch(
                "grad_softmax_grad",
                blocks(rows, THREADS / 32),
                THREADS,
                &args,
            )
        }
    }

    fn silu_mul(
        &self,
        gate: &Buffer<f32>,
        up: &Buffer<f32>,
        out: &mut Buffer<f32>,
        n: usize,
    ) -> Result<()> {
        for (what, len) in [("gate", gate.len()), ("up", up.len()), ("out", out.len())] {
            enough("silu_mul", what, n, len)?;
        }
        let args = SiluArgs {
            gate: gate.at(0),
            up: up.at(0),
            dout: Address::NULL,
            out: out.at(0),
            n: n as i64,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch("grad_silu", blocks(n, THREADS), THREADS, &args) }
    }

    fn silu_mul_grad(
        &self,
        gate: &mut Buffer<f32>,
        up: &mut Buffer<f32>,
        dout: &Buffer<f32>,
        n: usize,
    ) -> Result<()> {
        for (what, len) in [("gate", gate.len()), ("up", up.len()), ("dout", dout.len())] {
            enough("silu_mul_grad", what, n, len)?;
        }
        let args = SiluArgs {
            gate: gate.at(0),
            up: up.at(0),
            dout: dout.at(0),
            out: Address::NULL,
            n: n as i64,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch("grad_silu_grad", blocks(n, THREADS), THREADS, &args) }
    }
}
