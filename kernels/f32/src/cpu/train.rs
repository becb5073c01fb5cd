//! Loss, rounding, Adam and sampling.

use super::rows::{self, RoundingGroup};
use super::{CpuOps, CpuStates, VALUES, delta};
use half::f16;
use nq_kernels::Result;
use nq_kernels::grad::{
    Adam, DeltaGradWork, DeltaGrads, DeltaInputs, DeltaStepAt, DeltaWork, Draw, GradOps, OneShape,
    Rounding, UNKNOWN, enough,
};
use nq_kernels::rng::Philox;
use nq_model::Dims;
use rayon::prelude::*;

/// The scale as stored.
fn stored(scale: f32) -> f32 {
    f16::from_f32(scale).to_f32()
}

impl GradOps for CpuOps {
    fn kl_divergence(
        &self,
        teacher: &Vec<f32>,
        logits: &mut Vec<f32>,
        loss: &mut Vec<f32>,
        Dims { rows, cols: vocab }: Dims,
        weight: f32,
    ) -> Result<()> {
        enough("kl_divergence", "teacher", rows * vocab, teacher.len())?;
        enough("kl_divergence", "logits", rows * vocab, logits.len())?;
        enough("kl_divergence", "loss", rows, loss.len())?;
        logits
            .par_chunks_mut(vocab)
            .zip(teacher.par_chunks(vocab))
            .zip(loss.par_iter_mut())
            .take(rows)
            .for_each(|((l, t), loss)| {
                *loss = rows::kl_divergence(t, l, weight);
            });
        Ok(())
    }

    fn gate_grad(
        &self,
        gate: &mut Vec<f32>,
        x: &Vec<f32>,
        dout: &mut Vec<f32>,
        n: usize,
    ) -> Result<()> {
        for (what, len) in [("gate", gate.len()), ("x", x.len()), ("dout", dout.len())] {
            enough("gate_grad", what, n, len)?;
        }
        let pairs = gate[..n]
            .par_chunks_mut(VALUES)
            .zip(dout[..n].par_chunks_mut(VALUES));
        let pieces = pairs.zip(x[..n].par_chunks(VALUES));
        pieces.for_each(|((gate, dout), x)| {
            for ((gate, dout), x) in gate.iter_mut().zip(dout).zip(x) {
                let open = 1.0 / (1.0 + (-*gate).exp());
                *gate = *dout * x * open * (1.0 - open);
                *dout *= open;
            }
        });
        Ok(())
    }

    fn delta_step(
        &self,
        inputs: DeltaInputs<'_, Vec<f32>>,
        states: &mut CpuStates,
        at: DeltaStepAt,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        delta::step(&inputs, states, at, out)
    }

    fn delta_grad(
        &self,
        inputs: DeltaInputs<'_, Vec<f32>>,
        _work: (&mut DeltaWork<Vec<f32>>, &mut DeltaGradWork<Vec<f32>>),
        dout: &Vec<f32>,
        to: DeltaGrads<'_, Vec<f32>>,
    ) -> Result<()> {
        delta::gradient(&inputs, dout, to)
    }

    fn round(
        &self,
        shape: Rounding,
        latent: &Vec<f32>,
        scales: &Vec<f32>,
        zeros: &Vec<f32>,
        w: &mut Vec<f32>,
    ) -> Result<()> {
        shape.check(
            "round",
            [("latent", latent.len()), ("w", w.len())],
            [("scales", scales.len()), ("zeros", zeros.len())],
        )?;
        let max = f32::from(shape.max_code);
        w.par_chunks_mut(shape.group)
            .zip(latent.par_chunks(shape.group))
            .zip(scales.par_iter().zip(zeros))
            .take(shape.groups())
            .for_each(|((w, l), (&s, &z))| {
                let (scale, zero) = (stored(s), z);
                if scale == 0.0 {
                    w.fill(0.0);
                } else {
                    rows::round(l, RoundingGroup { scale, zero, max }, w);
                }
            });
        Ok(())
    }

    fn round_grad(
        &self,
        shape: Rounding,
        latent: &Vec<f32>,
        scales: &Vec<f32>,
        zeros: &Vec<f32>,
        dw: &Vec<f32>,
        dlatent: &mut Vec<f32>,
        dscales: &mut Vec<f32>,
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
        let max = f32::from(shape.max_code);
        let groups = dw
            .par_chunks(shape.group)
            .zip(latent.par_chunks(shape.group));
        dlatent
            .par_chunks_mut(shape.group)
            .zip(&mut dscales[..shape.groups()])
            .zip(groups)
            .zip(scales.par_iter().zip(zeros))
            .for_each(|(((dl, ds), (dw, l)), (&s, &z))| {
                let (scale, zero) = (stored(s), z);
                if scale != 0.0 {
                    *ds += rows::round_grad(l, RoundingGroup { scale, zero, max }, dw, dl);
                }
            });
        Ok(())
    }

    fn dequantize(
        &self,
        shape: Rounding,
        codes: &Vec<u8>,
        scales: &Vec<f32>,
        zeros: &Vec<f32>,
        w: &mut Vec<f32>,
    ) -> Result<()> {
        shape.check(
            "dequantize",
            [("codes", codes.len()), ("w", w.len())],
            [("scales", scales.len()), ("zeros", zeros.len())],
        )?;
        w.par_chunks_mut(shape.group)
            .zip(codes.par_chunks(shape.group))
            .zip(scales.par_iter().zip(zeros))
            .take(shape.groups())
            .for_each(|((w, q), (&s, &z))| {
                rows::dequantize(q, stored(s), z, w);
            });
        Ok(())
    }

    fn dequantize_grad(
        &self,
        shape: Rounding,
        codes: &Vec<u8>,
        zeros: &Vec<f32>,
        dw: &Vec<f32>,
        dscales: &mut Vec<f32>,
    ) -> Result<()> {
        shape.check(
            "dequantize_grad",
            [("codes", codes.len()), ("dw", dw.len())],
            [("zeros", zeros.len()), ("dscales", dscales.len())],
        )?;
        dscales[..shape.groups()]
            .par_iter_mut()
            .zip(
                dw.par_chunks(shape.group)
                    .zip(codes.par_chunks(shape.group)),
            )
            .zip(zeros)
            .for_each(|((ds, (dw, q)), &z)| {
                *ds += dw
                    .iter()
                    .zip(q)
                    .map(|(d, &q)| d * (f32::from(q) - z))
                    .sum::<f32>();
            });
        Ok(())
    }

    fn adam(
        &self,
        step: Adam,
        value: &mut Vec<f32>,
        mean: &mut Vec<f32>,
        square: &mut Vec<f32>,
        grad: &mut Vec<f32>,
        n: usize,
    ) -> Result<()> {
        for (what, len) in [
            ("value", value.len()),
            ("mean", mean.len()),
            ("grad", grad.len()),
        ] {
            enough("adam", what, n, len)?;
        }
        let values = value[..n]
            .par_chunks_mut(VALUES)
            .zip(mean[..n].par_chunks_mut(VALUES));
        let squares = square[..n]
            .par_chunks_mut(VALUES)
            .zip(grad[..n].par_chunks_mut(VALUES));
        let pieces = values.zip(squares);
        pieces.for_each(|((value, mean), (square, grad))| {
            rows::adam(step, value, mean, square, grad)
        });
        Ok(())
    }

    fn attend_one(
        &self,
        q: &Vec<f32>,
        keys: &Vec<f32>,
        values: &Vec<f32>,
        out: &mut Vec<f32>,
        s: OneShape,
    ) -> Result<()> {
        let (plane, group) = (s.capacity * s.dim, s.heads / s.kv_heads.max(1));
        enough("attend_one", "q", s.batch * s.heads * s.dim, q.len())?;
        enough("attend_one", "out", s.batch * s.heads * s.dim, out.len())?;
        enough(
            "attend_one",
            "keys",
            s.batch * s.kv_heads * plane,
            keys.len(),
        )?;
        enough(
            "attend_one",
            "values",
            s.batch * s.kv_heads * plane,
            values.len(),
        )?;
        enough("attend_one", "capacity", s.seen, s.capacity)?;
        out.par_chunks_mut(s.dim)
            .zip(q.par_chunks(s.dim))
            .take(s.batch * s.heads)
            .enumerate()
            .for_each(|(i, (out, q))| {
                let at = (i / s.heads * s.kv_heads + i % s.heads / group) * plane;
                let keys = &keys[at..at + s.seen * s.dim];
                let values = &values[at..at + s.seen * s.dim];
                rows::attend(q, keys, values, &mut vec![0.0; s.seen], out);
            });
        Ok(())
    }

    fn sample(&self, logits: &Vec<f32>, ids: &mut Vec<u32>, d: Draw) -> Result<()> {
        enough("sample", "logits", d.batch * d.vocab, logits.len())?;
        enough("sample", "ids", d.batch * d.stride, ids.len())?;
        enough("sample", "stride", d.offset + 1, d.stride)?;
        ids.par_chunks_mut(d.stride)
            .zip(logits.par_chunks(d.vocab))
            .take(d.batch)
            .enumerate()
            .filter(|(_, (ids, _))| ids[d.offset] == UNKNOWN)
            .for_each(|(b, (ids, logits))| {
                let key = [d.seed as u32, (d.seed >> 32) as u32];
                let word = Philox::block(key, d.stream + b as u64, d.offset as u64)[0];
                let mut chances = logits.to_vec();
                let total = rows::softmax(&mut chances);
                let mut left = (word >> 8) as f32 / (1u32 << 24) as f32;
                let drawn = chances.iter().position(|p| {
                    left -= p;
                    left < 0.0
                });
                // Rounding may leave a remainder past the last token: then take the last likely one.
                let last = || logits.iter().rposition(|l| l - total > -20.0).unwrap_or(0);
                ids[d.offset] = drawn.unwrap_or_else(last) as u32;
            });
        Ok(())
    }
}
