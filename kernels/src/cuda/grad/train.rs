//! Loss, rounding, Adam and sampling: launchers of `cuda/grad_rounding.cu`,
//! `cuda/grad_sample.cu` and of the KL divergence in `cuda/grad_rows.cu`.

use super::{CudaOps, THREADS, blocks};
use crate::cuda::driver::{Address, Buffer, LaunchShape};
use crate::error::Result;
use crate::grad::{Adam, Draw, GradOps, OneShape, Rounding, enough};

/// `GradRoundingArgs` of `cuda/grad_rounding.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RoundingArgs {
    latent: Address,
    codes: Address,
    scales: Address,
    zeros: Address,
    dw: Address,
    w: Address,
    dscales: Address,
    groups: i64,
    group: i32,
    max_code: f32,
}

impl RoundingArgs {
    fn new(shape: Rounding, scales: Address, zeros: Address) -> Self {
        RoundingArgs {
            latent: Address::NULL,
            codes: Address::NULL,
            scales,
            zeros,
            dw: Address::NULL,
            w: Address::NULL,
            dscales: Address::NULL,
            groups: shape.groups() as i64,
            group: shape.group as i32,
            max_code: f32::from(shape.max_code),
        }
    }
}

impl CudaOps {
    fn rounding(&self, name: &str, args: &RoundingArgs) -> Result<()> {
        let grid = blocks(args.groups as usize, THREADS / 32);
        // SAFETY: callers check every operand for the shape's elements or groups.
        unsafe { self.launch(name, grid, THREADS, args) }
    }
}

impl GradOps for CudaOps {
    fn kl_divergence(
        &self,
        teacher: &Buffer<f32>,
        logits: &mut Buffer<f32>,
        loss: &mut Buffer<f32>,
        (rows, vocab): (usize, usize),
        weight: f32,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            teacher: Address,
            logits: Address,
            loss: Address,
            vocab: i32,
            weight: f32,
        }
        enough("kl_divergence", "teacher", rows * vocab, teacher.len())?;
        enough("kl_divergence", "logits", rows * vocab, logits.len())?;
        enough("kl_divergence", "loss", rows, loss.len())?;
        let args = Args {
            teacher: teacher.at(0),
            logits: logits.at(0),
            loss: loss.at(0),
            vocab: vocab as i32,
            weight,
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch("grad_kl", (rows, 1, 1), THREADS, &args) }
    }

    fn round(
        &self,
        shape: Rounding,
        latent: &Buffer<f32>,
        scales: &Buffer<f32>,
        zeros: &Buffer<f32>,
        w: &mut Buffer<f32>,
    ) -> Result<()> {
        shape.check(
            "round",
            [("latent", latent.len()), ("w", w.len())],
            [("scales", scales.len()), ("zeros", zeros.len())],
        )?;
        let mut args = RoundingArgs::new(shape, scales.at(0), zeros.at(0));
        (args.latent, args.w) = (latent.at(0), w.at(0));
        self.rounding("grad_round", &args)
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
        shape.check(
            "round_grad",
            [
                ("latent", latent.len()),
                ("dw", dw.len()),
                ("dlatent", dlatent.len()),
            ],
            [
                ("scales", scales.len()),
                ("zeros", zeros.len()),
                ("dscales", dscales.len()),
            ],
        )?;
        let mut args = RoundingArgs::new(shape, scales.at(0), zeros.at(0));
        (args.latent, args.dw, args.w) = (latent.at(0), dw.at(0), dlatent.at(0));
        args.dscales = dscales.at(0);
        self.rounding("grad_round_grad", &args)
    }

    fn dequantize(
        &self,
        shape: Rounding,
        codes: &Buffer<u8>,
        scales: &Buffer<f32>,
        zeros: &Buffer<f32>,
        w: &mut Buffer<f32>,
    ) -> Result<()> {
        shape.check(
            "dequantize",
            [("codes", codes.len()), ("w", w.len())],
            [("scales", scales.len()), ("zeros", zeros.len())],
        )?;
        let mut args = RoundingArgs::new(shape, scales.at(0), zeros.at(0));
        (args.codes, args.w) = (codes.at(0), w.at(0));
        self.rounding("grad_round", &args)
    }

    fn dequantize_grad(
        &self,
        shape: Rounding,
        codes: &Buffer<u8>,
        zeros: &Buffer<f32>,
        dw: &Buffer<f32>,
        dscales: &mut Buffer<f32>,
    ) -> Result<()> {
        shape.check(
            "dequantize_grad",
            [("codes", codes.len()), ("dw", dw.len())],
            [("zeros", zeros.len()), ("dscales", dscales.len())],
        )?;
        // The kernel reads a scale that this gradient does not need: any will do.
        let mut args = RoundingArgs::new(shape, zeros.at(0), zeros.at(0));
        (args.codes, args.dw, args.dscales) = (codes.at(0), dw.at(0), dscales.at(0));
        self.rounding("grad_round_grad", &args)
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
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            value: Address,
            mean: Address,
            square: Address,
            grad: Address,
            n: i64,
            step: [f32; 6],
        }
        for len in [value.len(), mean.len(), square.len(), grad.len()] {
            enough("adam", "operand", n, len)?;
        }
        let args = Args {
            value: value.at(0),
            mean: mean.at(0),
            square: square.at(0),
            grad: grad.at(0),
            n: n as i64,
            step: [
                step.rate,
                step.beta1,
                step.beta2,
                step.correction1,
                step.correction2,
                step.epsilon,
            ],
        };
        // SAFETY: all operands were checked.
        unsafe { self.launch("grad_adam", blocks(n, THREADS), THREADS, &args) }
    }

    fn attend_one(
        &self,
        q: &Buffer<f32>,
        keys: &Buffer<f32>,
        values: &Buffer<f32>,
        out: &mut Buffer<f32>,
        s: OneShape,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            q: Address,
            keys: Address,
            values: Address,
            out: Address,
            heads: i32,
            kv_heads: i32,
            dim: i32,
            capacity: i32,
            seen: i32,
            scale: f32,
        }
        let cache = s.batch * s.kv_heads * s.capacity * s.dim;
        enough("attend_one", "q", s.batch * s.heads * s.dim, q.len())?;
        enough("attend_one", "out", s.batch * s.heads * s.dim, out.len())?;
        enough("attend_one", "keys", cache, keys.len())?;
        enough("attend_one", "values", cache, values.len())?;
        enough("attend_one", "capacity", s.seen, s.capacity)?;
        let args = Args {
            q: q.at(0),
            keys: keys.at(0),
            values: values.at(0),
            out: out.at(0),
            heads: s.heads as i32,
            kv_heads: s.kv_heads as i32,
            dim: s.dim as i32,
            capacity: s.capacity as i32,
            seen: s.seen as i32,
            scale: 1.0 / (s.dim as f32).sqrt(),
        };
        let shape = LaunchShape {
            grid: (s.heads, s.batch, 1),
            threads: 128,
            shared: 4 * s.seen,
            overlap: false,
        };
        // SAFETY: all operands were checked; shared memory holds the scores.
        unsafe { self.stream.launch("grad_attend", shape, &args) }
    }

    fn sample(&self, logits: &Buffer<f32>, ids: &mut Buffer<u32>, d: Draw) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            logits: Address,
            ids: Address,
            seed: u64,
            stream: u64,
            vocab: i32,
            stride: i32,
            offset: i32,
            pad: i32,
        }
        enough("sample", "logits", d.batch * d.vocab, logits.len())?;
        enough("sample", "ids", d.batch * d.stride, ids.len())?;
        enough("sample", "stride", d.offset + 1, d.stride)?;
        let args = Args {
            logits: logits.at(0),
            ids: ids.at(0),
            seed: d.seed,
            stream: d.stream,
            vocab: d.vocab as i32,
            stride: d.stride as i32,
            offset: d.offset as i32,
            pad: 0,
        };
        // SAFETY: both operands were checked; the kernel is made for 256 threads.
        unsafe { self.launch("grad_sample", (d.batch, 1, 1), 256, &args) }
    }
}
