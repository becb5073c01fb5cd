//! Loss, rounding, Adam and sampling: launchers of `cuda/grad_rounding.cu`,
//! `cuda/grad_sample.cu` and of the KL divergence in `cuda/grad_rows.cu`.

use super::{BENCH, CudaOps, TEST, THREADS, blocks};
use crate::cuda::grad_rounding::{GradAdamArgs, GradRoundingArgs};
use crate::cuda::grad_rows::{GradGateArgs, GradKlArgs};
use crate::cuda::grad_sample::{GradAttendArgs, GradSampleArgs};
use crate::delta::DeviceStates;
use crate::driver::{Buffer, Operands};
use crate::kernel::{Kernel, kernels};
use nq_kernels::Result;
use nq_kernels::grad::{
    Adam, DeltaGradWork, DeltaGrads, DeltaInputs, DeltaStepAt, DeltaWork, Draw, GradOps, OneShape,
    Rounding,
};
use nq_model::Dims;

kernels! {
    GATE_GRAD: GradGateArgs = "grad_gate_grad" in "grad_rows.cu", test TEST, bench BENCH;
    KL: GradKlArgs = "grad_kl" in "grad_rows.cu", test TEST, bench BENCH;
    ROUND: GradRoundingArgs = "grad_round" in "grad_rounding.cu", test TEST, bench BENCH;
    ROUND_GRAD: GradRoundingArgs = "grad_round_grad" in "grad_rounding.cu", test TEST, bench BENCH;
    ADAM: GradAdamArgs = "grad_adam" in "grad_rounding.cu", test TEST, bench BENCH;
    ATTEND: GradAttendArgs = "grad_attend" in "grad_sample.cu", test TEST, bench BENCH;
    SAMPLE: GradSampleArgs = "grad_sample" in "grad_sample.cu", test TEST, bench BENCH;
}

/// The operands of rounding; each operation uses some of them.
#[derive(Default)]
struct RoundingOperands<'a> {
    latent: Option<&'a Buffer<f32>>,
    codes: Option<&'a Buffer<u8>>,
    scales: Option<&'a Buffer<f32>>,
    zeros: Option<&'a Buffer<f32>>,
    dw: Option<&'a Buffer<f32>>,
    w: Option<&'a Buffer<f32>>,
    dscales: Option<&'a Buffer<f32>>,
}

impl RoundingOperands<'_> {
    fn args(&self, o: &Operands<'_>, shape: Rounding) -> Result<GradRoundingArgs> {
        o.multiple("columns", shape.group.max(1), shape.cols)?;
        let (all, groups) = (&[shape.elements()], &[shape.groups()]);
        Ok(GradRoundingArgs {
            latent: o.optional("latent", self.latent, all)?,
            codes: o.optional("codes", self.codes, all)?,
            scales: o.optional("scales", self.scales, groups)?,
            zeros: o.optional("zeros", self.zeros, groups)?,
            dw: o.optional("dw", self.dw, all)?,
            w: o.optional("w", self.w, all)?,
            dscales: o.optional("dscales", self.dscales, groups)?,
            groups: shape.groups() as i64,
            group: shape.group as i32,
            max_code: f32::from(shape.max_code),
        })
    }
}

impl CudaOps {
    fn rounding(
        &self,
        op: &'static str,
        kernel: &'static Kernel<GradRoundingArgs>,
        shape: Rounding,
        operands: &RoundingOperands<'_>,
    ) -> Result<()> {
        let args = operands.args(&self.operands(op), shape)?;
        let grid = blocks(shape.groups(), THREADS / 32);
        // SAFETY: the operands were checked; callers pass those that the operation uses.
        unsafe { self.launch(kernel, grid, THREADS, &args) }
    }
}

impl GradOps for CudaOps {
    fn gate_grad(
        &self,
        gate: &mut Buffer<f32>,
        x: &Buffer<f32>,
        dout: &mut Buffer<f32>,
        n: usize,
    ) -> Result<()> {
        let o = self.operands("gate_grad");
        let args = GradGateArgs {
            gate: o.of("gate", gate, &[n])?,
            x: o.of("x", x, &[n])?,
            to: o.of("dout", dout, &[n])?,
            n: n as i64,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch(&GATE_GRAD, blocks(n, THREADS), THREADS, &args) }
    }

    fn delta_step(
        &self,
        inputs: DeltaInputs<'_, Buffer<f32>>,
        states: &mut DeviceStates,
        at: DeltaStepAt,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        self.run_delta_step(inputs, states, at, out)
    }

    fn delta_grad(
        &self,
        inputs: DeltaInputs<'_, Buffer<f32>>,
        work: (&mut DeltaWork<Buffer<f32>>, &mut DeltaGradWork<Buffer<f32>>),
        dout: &Buffer<f32>,
        to: DeltaGrads<'_, Buffer<f32>>,
    ) -> Result<()> {
        self.run_delta_grad(inputs, work, dout, to)
    }

    fn kl_divergence(
        &self,
        teacher: &Buffer<f32>,
        logits: &mut Buffer<f32>,
        loss: &mut Buffer<f32>,
        Dims { rows, cols: vocab }: Dims,
        weight: f32,
    ) -> Result<()> {
        let o = self.operands("kl_divergence");
        let args = GradKlArgs {
            teacher: o.of("teacher", teacher, &[rows, vocab])?,
            logits: o.of("logits", logits, &[rows, vocab])?,
            loss: o.of("loss", loss, &[rows])?,
            vocab: vocab as i32,
            weight,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch(&KL, [rows, 1, 1], THREADS, &args) }
    }

    fn round(
        &self,
        shape: Rounding,
        latent: &Buffer<f32>,
        scales: &Buffer<f32>,
        zeros: &Buffer<f32>,
        w: &mut Buffer<f32>,
    ) -> Result<()> {
        let operands = RoundingOperands {
            latent: Some(latent),
            scales: Some(scales),
            zeros: Some(zeros),
            w: Some(w),
            ..RoundingOperands::default()
        };
        self.rounding("round", &ROUND, shape, &operands)
    }

    fn round_grad(
        &self,
        shape: Rounding,
        latent: &Buffer<f32>,
        scales: &Buffer<f32>,
        zeros: &Buffer<f32>,
        dw: &Buffer<f32>,
        dlatent: &mut Buffer<f32>,
        dscales: &mut Buffer<f32>,
    ) -> Result<()> {
        let operands = RoundingOperands {
            latent: Some(latent),
            scales: Some(scales),
            zeros: Some(zeros),
            dw: Some(dw),
            w: Some(dlatent),
            dscales: Some(dscales),
            codes: None,
        };
        self.rounding("round_grad", &ROUND_GRAD, shape, &operands)
    }

    fn dequantize(
        &self,
        shape: Rounding,
        codes: &Buffer<u8>,
        scales: &Buffer<f32>,
        zeros: &Buffer<f32>,
        w: &mut Buffer<f32>,
    ) -> Result<()> {
        let operands = RoundingOperands {
            codes: Some(codes),
            scales: Some(scales),
            zeros: Some(zeros),
            w: Some(w),
            ..RoundingOperands::default()
        };
        self.rounding("dequantize", &ROUND, shape, &operands)
    }

    fn dequantize_grad(
        &self,
        shape: Rounding,
        codes: &Buffer<u8>,
        zeros: &Buffer<f32>,
        dw: &Buffer<f32>,
        dscales: &mut Buffer<f32>,
    ) -> Result<()> {
        let operands = RoundingOperands {
            codes: Some(codes),
            // The kernel reads a scale that this gradient does not need: any buffer will do.
            scales: Some(zeros),
            zeros: Some(zeros),
            dw: Some(dw),
            dscales: Some(dscales),
            ..RoundingOperands::default()
        };
        self.rounding("dequantize_grad", &ROUND_GRAD, shape, &operands)
    }

    fn adam(
        &self,
        step: Adam,
        value: &mut Buffer<f32>,
        mean: &mut Buffer<f32>,
        square: &mut Buffer<f32>,
        grad: &mut Buffer<f32>,
        n: usize,
    ) -> Result<()> {
        let o = self.operands("adam");
        let args = GradAdamArgs {
            value: o.of("values", value, &[n])?,
            mean: o.of("means", mean, &[n])?,
            square: o.of("squares", square, &[n])?,
            grad: o.of("gradient", grad, &[n])?,
            n: n as i64,
            rate: step.rate,
            beta1: step.beta1,
            beta2: step.beta2,
            correction1: step.correction1,
            correction2: step.correction2,
            epsilon: step.epsilon,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch(&ADAM, blocks(n, THREADS), THREADS, &args) }
    }

    fn attend_one(
        &self,
        q: &Buffer<f32>,
        keys: &Buffer<f32>,
        values: &Buffer<f32>,
        out: &mut Buffer<f32>,
        s: OneShape,
    ) -> Result<()> {
        let o = self.operands("attend_one");
        o.at_most("positions", s.capacity, s.seen)?;
        o.multiple("query heads", s.kv_heads.max(1), s.heads)?;
        let cache = &[s.batch, s.kv_heads, s.capacity, s.dim];
        let args = GradAttendArgs {
            q: o.of("q", q, &[s.batch, s.heads, s.dim])?,
            keys: o.of("keys", keys, cache)?,
            values: o.of("values", values, cache)?,
            out: o.of("out", out, &[s.batch, s.heads, s.dim])?,
            heads: s.heads as i32,
            kv_heads: s.kv_heads as i32,
            dim: s.dim as i32,
            capacity: s.capacity as i32,
            seen: s.seen as i32,
            scale: 1.0 / (s.dim as f32).sqrt(),
        };
        let grid = [s.heads, s.batch, 1];
        // SAFETY: all operands were checked; shared memory holds the scores.
        unsafe { self.launch_shared(&ATTEND, grid, 128, 4 * s.seen, &args) }
    }

    fn sample(&self, logits: &Buffer<f32>, ids: &mut Buffer<u32>, d: Draw) -> Result<()> {
        let o = self.operands("sample");
        o.at_least("stride", d.offset + 1, d.stride)?;
        let args = GradSampleArgs {
            logits: o.of("logits", logits, &[d.batch, d.vocab])?,
            ids: o.of("ids", ids, &[d.batch, d.stride])?,
            seed: d.seed,
            stream: d.stream,
            vocab: d.vocab as i32,
            stride: d.stride as i32,
            offset: d.offset as i32,
            pad: 0,
        };
        // SAFETY: both operands were checked; the kernel is made for 256 threads.
        unsafe { self.launch(&SAMPLE, [d.batch, 1, 1], 256, &args) }
    }
}
