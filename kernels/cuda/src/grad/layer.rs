//! A layer's operations, forward and backward: launchers of `cuda/grad_rows.cu`.

use super::{BENCH, CudaOps, TEST, THREADS, blocks};
use crate::cuda::grad_rows::{
    GradEmbedArgs, GradEmbedGradArgs, GradGainArgs, GradGateArgs, GradHeadsArgs, GradNormArgs,
    GradNormGradArgs, GradRopeArgs, GradSiluArgs, GradSoftmaxArgs, GradTurnBackArgs, Heads,
};
use crate::driver::{Address, Buffer, Operands, Side};
use crate::kernel::kernels;
use crate::rows::RowsOut;
use nq_kernels::Result;
use nq_kernels::grad::{DeltaInputs, DeltaWork, Gemm, HeadShape, LayerOps, Occurrences};
use nq_kernels::second_order::SecondOrder;
use nq_model::Dims;
use std::sync::Arc;

kernels! {
    EMBED: GradEmbedArgs = "grad_embed" in "grad_rows.cu", test TEST, bench BENCH;
    EMBED_GRAD: GradEmbedGradArgs = "grad_embed_grad" in "grad_rows.cu", test TEST, bench BENCH;
    RMS_NORM: GradNormArgs = "grad_rms_norm" in "grad_rows.cu", test TEST, bench BENCH;
    RMS_NORM_GRAD: GradNormGradArgs = "grad_rms_norm_grad" in "grad_rows.cu", test TEST, bench BENCH;
    GAIN: GradGainArgs = "grad_gain" in "grad_rows.cu", test TEST, bench BENCH;
    ROPE: GradRopeArgs = "grad_rope" in "grad_rows.cu", test TEST, bench BENCH;
    TURN_BACK: GradTurnBackArgs = "grad_turn_back" in "grad_rows.cu", test TEST, bench BENCH;
    HEADS: GradHeadsArgs = "grad_heads" in "grad_rows.cu", test TEST, bench BENCH;
    SOFTMAX: GradSoftmaxArgs = "grad_softmax" in "grad_rows.cu", test TEST, bench BENCH;
    SOFTMAX_GRAD: GradSoftmaxArgs = "grad_softmax_grad" in "grad_rows.cu", test TEST, bench BENCH;
    GATE: GradGateArgs = "grad_gate" in "grad_rows.cu", test TEST, bench BENCH;
    SILU: GradSiluArgs = "grad_silu" in "grad_rows.cu", test TEST, bench BENCH;
    SILU_GRAD: GradSiluArgs = "grad_silu_grad" in "grad_rows.cu", test TEST, bench BENCH;
}

impl From<HeadShape> for Heads {
    fn from(s: HeadShape) -> Self {
        Heads {
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

/// The operands of the gradient of a norm of rows; `dy` and `dx` may be the same.
struct NormGrad {
    x: Address,
    gain: Address,
    inv: Address,
    dy: Address,
    dx: Address,
    add: bool,
    dgain: Address,
    rows: usize,
    width: usize,
}

impl CudaOps {
    /// The gradient of a norm with respect to its input and its gain.
    ///
    /// # Safety
    /// x, dy and dx hold rows of `width` values, inv one value per row, the gains `width` values.
    unsafe fn norm_grad(&self, o: &Operands<'_>, n: &NormGrad) -> Result<()> {
        let (rows, width) = (n.rows, n.width);
        let rows_of_part = rows.div_ceil(256).max(16);
        let parts = rows.div_ceil(rows_of_part);
        let scratch = self.scratch(parts * width)?;
        let part = o.of("partial sums", &scratch, &[parts, width])?;
        let gain = GradGainArgs {
            x: n.x,
            inv: n.inv,
            dy: n.dy,
            part,
            rows: rows as i64,
            width: width as i32,
            rows_of_part: rows_of_part as i32,
        };
        let args = GradNormGradArgs {
            x: n.x,
            gain: n.gain,
            inv: n.inv,
            dy: n.dy,
            dx: n.dx,
            rows: rows as i64,
            width: width as i32,
            add: i32::from(n.add),
        };
        let grid = [width.div_ceil(THREADS), parts, 1];
        // SAFETY: by contract; scratch holds the parts. The gain's sums read dy before dx may
        // replace it.
        unsafe {
            self.launch(&GAIN, grid, THREADS, &gain)?;
            self.launch(&RMS_NORM_GRAD, blocks(rows, THREADS / 32), THREADS, &args)?;
            self.sum_parts(part, n.dgain, width, parts, true)
        }
    }

    /// Copies `x` to `y`, one of which is by rows and the other by heads.
    ///
    /// # Safety
    /// Both hold as many values as the shape has.
    unsafe fn move_heads(&self, x: Address, y: Address, s: HeadShape, to_rows: bool) -> Result<()> {
        let args = GradHeadsArgs {
            x,
            y,
            s: s.into(),
            to_rows: i32::from(to_rows),
            pad: 0,
        };
        // SAFETY: by contract.
        unsafe { self.launch(&HEADS, blocks(s.values(), THREADS), THREADS, &args) }
    }
}

impl LayerOps for CudaOps {
    fn second_order(self: &Arc<Self>) -> Option<Arc<dyn SecondOrder<Floats = Buffer<f32>>>> {
        Some(self.clone())
    }

    fn gemm(&self, g: Gemm, a: &Buffer<f32>, b: &Buffer<f32>, c: &mut Buffer<f32>) -> Result<()> {
        let o = self.operands("gemm");
        let side = |at, ld| Side { at, ld };
        let a = o.of("A", a, &[g.batch, g.m, g.k])?;
        let b = o.of("B", b, &[g.batch, g.k, g.n])?;
        let c = o.of("C", c, &[g.batch, g.m, g.n])?;
        let a = side(a, if g.ta { g.m } else { g.k });
        let b = side(b, if g.tb { g.k } else { g.n });
        // SAFETY: all three operands were checked.
        unsafe { self.product(g, a, b, side(c, g.n)) }
    }

    fn embed(
        &self,
        table: &Buffer<f32>,
        ids: &Buffer<u32>,
        (rows, stride, offset): (usize, usize, usize),
        x: &mut Buffer<f32>,
        width: usize,
    ) -> Result<()> {
        let o = self.operands("embed");
        o.at_least("rows", 1, rows)?;
        o.at_least("width", 1, width)?;
        let tokens = table.len() / width;
        let last = (rows - 1).saturating_mul(stride).saturating_add(offset);
        let args = GradEmbedArgs {
            table: o.of("table", table, &[tokens, width])?,
            ids: o.of("ids", ids, &[last.saturating_add(1)])?,
            x: o.of("x", x, &[rows, width])?,
            stride: stride as i32,
            offset: offset as i32,
            width: width as i32,
            tokens: tokens as i32,
        };
        // SAFETY: the operands were checked; the kernel uses no id past the table.
        unsafe { self.launch(&EMBED, [rows, 1, 1], 128, &args) }
    }

    fn embed_grad(
        &self,
        dx: &Buffer<f32>,
        occurrences: &Occurrences,
        table: &mut Buffer<f32>,
        width: usize,
    ) -> Result<()> {
        let o = self.operands("embed_grad");
        let Occurrences {
            rows,
            tokens,
            starts,
        } = occurrences;
        let Some(last) = tokens.last() else {
            return Ok(());
        };
        let upload = |values: &[u32]| self.gpu.upload("tokens by id", values);
        let (row_list, token_list, start_list) = (upload(rows)?, upload(tokens)?, upload(starts)?);
        let args = GradEmbedGradArgs {
            dx: o.of("dx", dx, &[rows.len(), width])?,
            rows: o.of("rows", &row_list, &[rows.len()])?,
            tokens: o.of("tokens", &token_list, &[tokens.len()])?,
            starts: o.of("starts", &start_list, &[tokens.len() + 1])?,
            table: o.of("table", table, &[*last as usize + 1, width])?,
            width: width as i32,
            pad: 0,
        };
        // SAFETY: the operands were checked; the lists are consistent by construction and outlive
        // the kernel, which is waited for.
        unsafe { self.launch(&EMBED_GRAD, [tokens.len(), 1, 1], 128, &args)? };
        self.synchronize()
    }

    fn rms_norm(
        &self,
        x: &Buffer<f32>,
        gain: &Buffer<f32>,
        y: &mut Buffer<f32>,
        inv: &mut Buffer<f32>,
        Dims { rows, cols: width }: Dims,
        eps: f32,
    ) -> Result<()> {
        let o = self.operands("rms_norm");
        let args = GradNormArgs {
            x: o.of("x", x, &[rows, width])?,
            gain: o.of("gain", gain, &[width])?,
            y: o.of("y", y, &[rows, width])?,
            inv: o.of("inv", inv, &[rows])?,
            rows: rows as i64,
            width: width as i32,
            eps,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch(&RMS_NORM, blocks(rows, THREADS / 32), THREADS, &args) }
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
        Dims { rows, cols: width }: Dims,
    ) -> Result<()> {
        let o = self.operands("rms_norm_grad");
        let n = NormGrad {
            x: o.of("x", x, &[rows, width])?,
            gain: o.of("gain", gain, &[width])?,
            inv: o.of("inv", inv, &[rows])?,
            dy: o.of("dy", dy, &[rows, width])?,
            dx: o.of("dx", dx, &[rows, width])?,
            add,
            dgain: o.of("dgain", dgain, &[width])?,
            rows,
            width,
        };
        // SAFETY: all operands were checked.
        unsafe { self.norm_grad(&o, &n) }
    }

    fn head_norm_rope(
        &self,
        x: &Buffer<f32>,
        gain: Option<&Buffer<f32>>,
        cos_sin: &Buffer<f32>,
        y: &mut Buffer<f32>,
        inv: &mut Buffer<f32>,
        s: HeadShape,
        eps: f32,
    ) -> Result<()> {
        let o = self.operands("head_norm_rope");
        o.at_most("positions", s.capacity, s.at + s.seq)?;
        let heads = s.rows() * s.heads;
        let args = GradRopeArgs {
            x: o.of("x", x, &[s.values()])?,
            gain: match gain {
                Some(gain) => o.of("gain", gain, &[s.dim])?,
                None => Address::NULL,
            },
            cos_sin: o.of("cos_sin", cos_sin, &[s.position + s.seq, s.dim])?,
            y: o.of("y", y, &[s.room()])?,
            inv: o.of("inv", inv, &[heads])?,
            s: s.into(),
            eps,
            pad: 0,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch(&ROPE, blocks(heads, THREADS / 32), THREADS, &args) }
    }

    fn head_rope_grad(
        &self,
        cos_sin: &Buffer<f32>,
        dy: &Buffer<f32>,
        dx: &mut Buffer<f32>,
        s: HeadShape,
    ) -> Result<()> {
        let o = self.operands("head_rope_grad");
        o.at_most("positions", s.capacity, s.at + s.seq)?;
        let args = GradTurnBackArgs {
            dy: o.of("dy", dy, &[s.room()])?,
            cos_sin: o.of("cos_sin", cos_sin, &[s.position + s.seq, s.dim])?,
            dx: o.of("dx", dx, &[s.values()])?,
            s: s.into(),
        };
        let heads = s.rows() * s.heads;
        // SAFETY: all operands were checked.
        unsafe { self.launch(&TURN_BACK, blocks(heads, THREADS / 32), THREADS, &args) }
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
        let o = self.operands("head_norm_rope_grad");
        o.at_most("positions", s.capacity, s.at + s.seq)?;
        let heads = s.rows() * s.heads;
        let dx = o.of("dx", dx, &[s.values()])?;
        let args = GradTurnBackArgs {
            dy: o.of("dy", dy, &[s.room()])?,
            cos_sin: o.of("cos_sin", cos_sin, &[s.position + s.seq, s.dim])?,
            dx,
            s: s.into(),
        };
        let n = NormGrad {
            x: o.of("x", x, &[heads, s.dim])?,
            gain: o.of("gain", gain, &[s.dim])?,
            inv: o.of("inv", inv, &[heads])?,
            dy: dx,
            dx,
            add: false,
            dgain: o.of("dgain", dgain, &[s.dim])?,
            rows: heads,
            width: s.dim,
        };
        // SAFETY: all operands were checked.
        unsafe {
            self.launch(&TURN_BACK, blocks(heads, THREADS / 32), THREADS, &args)?;
            self.norm_grad(&o, &n)
        }
    }

    fn rows_to_heads(&self, x: &Buffer<f32>, y: &mut Buffer<f32>, s: HeadShape) -> Result<()> {
        let o = self.operands("rows_to_heads");
        o.at_most("positions", s.capacity, s.at + s.seq)?;
        let (x, y) = (o.of("x", x, &[s.values()])?, o.of("y", y, &[s.room()])?);
        // SAFETY: both operands were checked.
        unsafe { self.move_heads(x, y, s, false) }
    }

    fn heads_to_rows(&self, x: &Buffer<f32>, y: &mut Buffer<f32>, s: HeadShape) -> Result<()> {
        let o = self.operands("heads_to_rows");
        o.at_most("positions", s.capacity, s.at + s.seq)?;
        let (x, y) = (o.of("x", x, &[s.room()])?, o.of("y", y, &[s.values()])?);
        // SAFETY: both operands were checked.
        unsafe { self.move_heads(x, y, s, true) }
    }

    fn causal_softmax(&self, s: &mut Buffer<f32>, rows: usize, seq: usize) -> Result<()> {
        let args = GradSoftmaxArgs {
            s: (self.operands("causal_softmax")).of("scores", s, &[rows, seq])?,
            p: Address::NULL,
            rows: rows as i64,
            seq: seq as i32,
            pad: 0,
        };
        // SAFETY: the scores were checked.
        unsafe { self.launch(&SOFTMAX, blocks(rows, THREADS / 32), THREADS, &args) }
    }

    fn softmax_grad(
        &self,
        p: &Buffer<f32>,
        dp: &mut Buffer<f32>,
        rows: usize,
        seq: usize,
    ) -> Result<()> {
        let o = self.operands("softmax_grad");
        let args = GradSoftmaxArgs {
            s: o.of("dp", dp, &[rows, seq])?,
            p: o.of("p", p, &[rows, seq])?,
            rows: rows as i64,
            seq: seq as i32,
            pad: 0,
        };
        // SAFETY: both operands were checked.
        unsafe { self.launch(&SOFTMAX_GRAD, blocks(rows, THREADS / 32), THREADS, &args) }
    }

    fn silu_mul(
        &self,
        gate: &Buffer<f32>,
        up: &Buffer<f32>,
        out: &mut Buffer<f32>,
        n: usize,
    ) -> Result<()> {
        let o = self.operands("silu_mul");
        let args = GradSiluArgs {
            gate: o.of("gate", gate, &[n])?,
            up: o.of("up", up, &[n])?,
            dout: Address::NULL,
            out: o.of("out", out, &[n])?,
            n: n as i64,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch(&SILU, blocks(n, THREADS), THREADS, &args) }
    }

    fn gate(&self, gate: &Buffer<f32>, x: &mut Buffer<f32>, n: usize) -> Result<()> {
        let o = self.operands("gate");
        let args = GradGateArgs {
            gate: o.of("gate", gate, &[n])?,
            x: Address::NULL,
            to: o.of("x", x, &[n])?,
            n: n as i64,
        };
        // SAFETY: both operands were checked.
        unsafe { self.launch(&GATE, blocks(n, THREADS), THREADS, &args) }
    }

    /// Each row takes a block, however short it is.
    fn scale_rows(&self, scores: &Buffer<f32>, x: &mut Buffer<f32>, shape: Dims) -> Result<()> {
        let rows = RowsOut {
            full: Some(x),
            half: None,
        };
        self.stream.scale_rows(scores, &rows, shape)
    }

    fn delta(
        &self,
        inputs: DeltaInputs<'_, Buffer<f32>>,
        work: &mut DeltaWork<Buffer<f32>>,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        self.run_delta(inputs, work, out)
    }

    fn silu_mul_grad(
        &self,
        gate: &mut Buffer<f32>,
        up: &mut Buffer<f32>,
        dout: &Buffer<f32>,
        n: usize,
    ) -> Result<()> {
        let o = self.operands("silu_mul_grad");
        let args = GradSiluArgs {
            gate: o.of("gate", gate, &[n])?,
            up: o.of("up", up, &[n])?,
            dout: o.of("dout", dout, &[n])?,
            out: Address::NULL,
            n: n as i64,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch(&SILU_GRAD, blocks(n, THREADS), THREADS, &args) }
    }
}
