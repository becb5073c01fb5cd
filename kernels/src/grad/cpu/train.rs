//! Loss, rounding, Adam and sampling.

use super::{CpuOps, VALUES, log_sum_exp};
use crate::error::Result;
use crate::grad::{Adam, Draw, GradOps, OneShape, Rounding, UNKNOWN, enough};
use crate::rng::Philox;
use half::f16;
use rayon::prelude::*;

/// The scale as stored.
fn stored(scale: f32) -> f32 {
    f16::from_f32(scale).to_f32()
}

/// `(code - zero, latent / scale, in range)` of one value.
#[inline]
fn rounded(latent: f32, scale: f32, zero: f32, max: f32) -> (f32, f32, bool) {
    if scale == 0.0 {
        return (0.0, 0.0, false);
    }
    let v = latent / scale;
    let code = v.clamp(-zero, max - zero);
    (code.round_ties_even(), v, v == code)
}

impl GradOps for CpuOps {
    fn kl_divergence(
        &self,
        teacher: &Vec<f32>,
        logits: &mut Vec<f32>,
        loss: &mut Vec<f32>,
        (rows, vocab): (usize, usize),
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
                let (zl, zt) = (log_sum_exp(l), log_sum_exp(t));
                let mut sum = 0f64;
                for (l, t) in l.iter_mut().zip(t) {
                    let (ll, lt) = (*l - zl, t - zt);
                    let p = lt.exp();
                    sum += f64::from(p * (lt - ll));
                    *l = (ll.exp() - p) * weight;
                }
                *loss = sum as f32;
            });
        Ok(())
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
                let s = stored(s);
                for (w, &l) in w.iter_mut().zip(l) {
                    *w = s * rounded(l, s, z, max).0;
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
                let s = stored(s);
                let mut sum = 0.0;
                for ((dl, &dw), &l) in dl.iter_mut().zip(dw).zip(l) {
                    let (code, v, inside) = rounded(l, s, z, max);
                    let within = if inside { 1.0 } else { 0.0 };
                    *dl += dw * within;
                    sum += dw * (code - v * within);
                }
                *ds += sum;
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
                let s = stored(s);
                for (w, &q) in w.iter_mut().zip(q) {
                    *w = s * (f32::from(q) - z);
                }
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
        value[..n]
            .par_iter_mut()
            .with_min_len(VALUES)
            .zip(&mut mean[..n])
            .zip(&mut square[..n])
            .zip(&mut grad[..n])
            .for_each(|(((p, m), v), g)| {
                *m = step.beta1 * *m + (1.0 - step.beta1) * *g;
                *v = step.beta2 * *v + (1.0 - step.beta2) * *g * *g;
                let root = (*v / step.correction2).sqrt();
                *p -= step.rate * (*m / step.correction1) / (root + step.epsilon);
                *g = 0.0;
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
        let scale = 1.0 / (s.dim as f32).sqrt();
        out.par_chunks_mut(s.dim)
            .zip(q.par_chunks(s.dim))
            .take(s.batch * s.heads)
            .enumerate()
            .for_each(|(i, (out, q))| {
                let at = (i / s.heads * s.kv_heads + i % s.heads / group) * plane;
                let keys = &keys[at..at + s.seen * s.dim];
                let dot = |k: &[f32]| k.iter().zip(q).map(|(k, q)| k * q).sum::<f32>() * scale;
                let scores: Vec<f32> = keys.chunks(s.dim).map(dot).collect();
                let total = log_sum_exp(&scores);
                out.fill(0.0);
                let values = &values[at..at + s.seen * s.dim];
                for (v, score) in values.chunks(s.dim).zip(scores) {
                    let p = (score - total).exp();
                    out.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
                }
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
                let total = log_sum_exp(logits);
                let mut left = (word >> 8) as f32 / (1u32 << 24) as f32;
                let drawn = logits.iter().position(|l| {
                    left -= (l - total).exp();
                    left < 0.0
                });
                // Rounding may leave a remainder past the last token: then take the last likely one.
                let last = || logits.iter().rposition(|l| l - total > -20.0).unwrap_or(0);
                ids[d.offset] = drawn.unwrap_or_else(last) as u32;
            });
        Ok(())
    }
}
