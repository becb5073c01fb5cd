//! A layer's operations, forward and backward.

use super::rows::{self, inverse_rms};
use super::{CpuOps, VALUES, delta};
use nq_kernels::Result;
use nq_kernels::grad::{DeltaInputs, DeltaWork, Gemm, HeadShape, LayerOps, Occurrences, enough};
use nq_kernels::matrix::{ProductTarget, Threads, View, multiply};
use nq_model::Dims;
use rayon::prelude::*;

/// Rows per piece of elementwise work.
const ROWS: usize = 64;

/// `c (+)= alpha op(a) op(b)`.
fn product(g: &Gemm, a: &[f32], b: &[f32], c: &mut [f32]) {
    let op = |x, rows, cols, transposed| {
        if transposed {
            View::new(x, cols, rows).transposed()
        } else {
            View::new(x, rows, cols)
        }
    };
    let (a, b) = (op(a, g.m, g.k, g.ta), op(b, g.k, g.n, g.tb));
    let c = ProductTarget::new(c, g.n);
    multiply(c, g.accumulate, g.alpha, a, b, Threads::All);
}

/// Adds the vectors that pieces of `ROWS` rows contribute, in the order of the pieces.
fn add_parts(parts: Vec<Vec<f32>>, total: &mut [f32]) {
    for part in parts {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
    }
}

/// Index of the first value of head `head` of token `t` of sequence `b` on the head-major side.
fn head_at(s: &HeadShape, b: usize, head: usize, t: usize) -> usize {
    ((b * s.heads + head) * s.capacity + s.at + t) * s.dim
}

impl CpuOps {
    /// Fills the head-major side: `each(token row, head, position, values)` for every head.
    fn fill_heads(
        y: &mut [f32],
        s: HeadShape,
        each: impl Fn(usize, usize, usize, &mut [f32]) + Sync,
    ) {
        y[..s.room()]
            .par_chunks_mut(s.capacity * s.dim)
            .enumerate()
            .for_each(|(i, plane)| {
                let (b, head) = (i / s.heads, i % s.heads);
                let used = &mut plane[s.at * s.dim..(s.at + s.seq) * s.dim];
                for (t, y) in used.chunks_mut(s.dim).enumerate() {
                    each(b * s.seq + t, head, s.position + t, y);
                }
            });
    }
}

impl LayerOps for CpuOps {
    fn gemm(&self, g: Gemm, a: &Vec<f32>, b: &Vec<f32>, c: &mut Vec<f32>) -> Result<()> {
        let (an, bn, cn) = (g.m * g.k, g.k * g.n, g.m * g.n);
        enough("gemm", "A", g.batch * an, a.len())?;
        enough("gemm", "B", g.batch * bn, b.len())?;
        enough("gemm", "C", g.batch * cn, c.len())?;
        c[..g.batch * cn]
            .par_chunks_mut(cn)
            .enumerate()
            .for_each(|(i, c)| product(&g, &a[i * an..][..an], &b[i * bn..][..bn], c));
        Ok(())
    }

    fn embed(
        &self,
        table: &Vec<f32>,
        ids: &Vec<u32>,
        (rows, stride, offset): (usize, usize, usize),
        x: &mut Vec<f32>,
        width: usize,
    ) -> Result<()> {
        enough("embed", "ids", (rows - 1) * stride + offset + 1, ids.len())?;
        enough("embed", "x", rows * width, x.len())?;
        for (r, x) in x.chunks_mut(width).take(rows).enumerate() {
            let at = ids[r * stride + offset] as usize * width;
            enough("embed", "table", at + width, table.len())?;
            x.copy_from_slice(&table[at..at + width]);
        }
        Ok(())
    }

    fn embed_grad(
        &self,
        dx: &Vec<f32>,
        occurrences: &Occurrences,
        table: &mut Vec<f32>,
        width: usize,
    ) -> Result<()> {
        let o = occurrences;
        enough("embed_grad", "dx", o.rows.len() * width, dx.len())?;
        for (i, &token) in o.tokens.iter().enumerate() {
            let at = token as usize * width;
            enough("embed_grad", "table", at + width, table.len())?;
            let row = &mut table[at..at + width];
            for &r in &o.rows[o.starts[i] as usize..o.starts[i + 1] as usize] {
                let dx = &dx[r as usize * width..][..width];
                row.iter_mut().zip(dx).for_each(|(t, d)| *t += d);
            }
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &Vec<f32>,
        gain: &Vec<f32>,
        y: &mut Vec<f32>,
        inv: &mut Vec<f32>,
        Dims { rows, cols: width }: Dims,
        eps: f32,
    ) -> Result<()> {
        enough("rms_norm", "x", rows * width, x.len())?;
        enough("rms_norm", "y", rows * width, y.len())?;
        enough("rms_norm", "gain", width, gain.len())?;
        enough("rms_norm", "inv", rows, inv.len())?;
        y.par_chunks_mut(width)
            .zip(inv.par_iter_mut())
            .zip(x.par_chunks(width))
            .take(rows)
            .for_each(|((y, inv), x)| {
                *inv = inverse_rms(x, eps);
                rows::norm(x, gain, *inv, y);
            });
        Ok(())
    }

    fn rms_norm_grad(
        &self,
        x: &Vec<f32>,
        gain: &Vec<f32>,
        inv: &Vec<f32>,
        dy: &Vec<f32>,
        dx: &mut Vec<f32>,
        add: bool,
        dgain: &mut Vec<f32>,
        Dims { rows, cols: width }: Dims,
    ) -> Result<()> {
        for (what, len) in [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())] {
            enough("rms_norm_grad", what, rows * width, len)?;
        }
        enough("rms_norm_grad", "dgain", width, dgain.len())?;
        let parts: Vec<Vec<f32>> = dx[..rows * width]
            .par_chunks_mut(ROWS * width)
            .enumerate()
            .map(|(i, dx)| {
                let mut part = vec![0.0; width];
                for (r, dx) in (i * ROWS..).zip(dx.chunks_mut(width)) {
                    let at = r * width..(r + 1) * width;
                    let (x, dy) = (&x[at.clone()], &dy[at]);
                    rows::norm_grad(x, &gain[..width], inv[r], dy, &mut part, dx, add);
                }
                part
            })
            .collect();
        add_parts(parts, &mut dgain[..width]);
        Ok(())
    }

    fn head_norm_rope(
        &self,
        x: &Vec<f32>,
        gain: Option<&Vec<f32>>,
        cos_sin: &Vec<f32>,
        y: &mut Vec<f32>,
        inv: &mut Vec<f32>,
        s: HeadShape,
        eps: f32,
    ) -> Result<()> {
        let op = "head_norm_rope";
        enough(op, "x", s.values(), x.len())?;
        enough(op, "y", s.room(), y.len())?;
        enough(op, "inv", s.rows() * s.heads, inv.len())?;
        enough(op, "cos_sin", (s.position + s.seq) * s.dim, cos_sin.len())?;
        let head = |r: usize, h: usize| &x[(r * s.heads + h) * s.dim..][..s.dim];
        let heads = inv.par_iter_mut().with_min_len(ROWS).enumerate();
        let heads = heads.take(s.rows() * s.heads);
        let ones = vec![1.0; s.dim];
        let gain = gain.map(|gain| &gain[..s.dim]);
        heads.for_each(|(i, inv)| {
            *inv = match gain {
                Some(_) => inverse_rms(head(i / s.heads, i % s.heads), eps),
                None => 1.0,
            }
        });
        let gain = gain.unwrap_or(&ones);
        let inv = &*inv;
        Self::fill_heads(y, s, |r, h, position, y| {
            let (x, inv) = (head(r, h), inv[r * s.heads + h]);
            let rotation = &cos_sin[position * s.dim..][..s.dim];
            rows::norm_rope(x, gain, inv, rotation, y);
        });
        Ok(())
    }

    fn head_rope_grad(
        &self,
        cos_sin: &Vec<f32>,
        dy: &Vec<f32>,
        dx: &mut Vec<f32>,
        s: HeadShape,
    ) -> Result<()> {
        let op = "head_rope_grad";
        enough(op, "dx", s.values(), dx.len())?;
        enough(op, "dy", s.room(), dy.len())?;
        let rows = dx[..s.values()].par_chunks_mut(s.heads * s.dim);
        rows.with_min_len(ROWS).enumerate().for_each(|(r, dx)| {
            let t = r % s.seq;
            let rotation = &cos_sin[(s.position + t) * s.dim..][..s.dim];
            for (h, dx) in dx.chunks_mut(s.dim).enumerate() {
                let dy = &dy[head_at(&s, r / s.seq, h, t)..][..s.dim];
                rows::rope_grad(dy, rotation, dx);
            }
        });
        Ok(())
    }

    fn head_norm_rope_grad(
        &self,
        x: &Vec<f32>,
        gain: &Vec<f32>,
        cos_sin: &Vec<f32>,
        inv: &Vec<f32>,
        dy: &Vec<f32>,
        dx: &mut Vec<f32>,
        dgain: &mut Vec<f32>,
        s: HeadShape,
    ) -> Result<()> {
        let op = "head_norm_rope_grad";
        enough(op, "x", s.values(), x.len())?;
        enough(op, "dx", s.values(), dx.len())?;
        enough(op, "dy", s.room(), dy.len())?;
        let width = s.heads * s.dim;
        let parts: Vec<Vec<f32>> = dx[..s.values()]
            .par_chunks_mut(ROWS * width)
            .enumerate()
            .map(|(i, dx)| {
                let (mut part, mut turned) = (vec![0.0; s.dim], vec![0.0; s.dim]);
                for (r, dx) in (i * ROWS..).zip(dx.chunks_mut(width)) {
                    let t = r % s.seq;
                    let rotation = &cos_sin[(s.position + t) * s.dim..][..s.dim];
                    for (h, dx) in dx.chunks_mut(s.dim).enumerate() {
                        let dy = &dy[head_at(&s, r / s.seq, h, t)..][..s.dim];
                        rows::rope_grad(dy, rotation, &mut turned);
                        let x = &x[r * width + h * s.dim..][..s.dim];
                        let (gain, inv) = (&gain[..s.dim], inv[r * s.heads + h]);
                        rows::norm_grad(x, gain, inv, &turned, &mut part, dx, false);
                    }
                }
                part
            })
            .collect();
        add_parts(parts, &mut dgain[..s.dim]);
        Ok(())
    }

    fn rows_to_heads(&self, x: &Vec<f32>, y: &mut Vec<f32>, s: HeadShape) -> Result<()> {
        enough("rows_to_heads", "x", s.values(), x.len())?;
        enough("rows_to_heads", "y", s.room(), y.len())?;
        Self::fill_heads(y, s, |r, h, _, y| {
            y.copy_from_slice(&x[(r * s.heads + h) * s.dim..][..s.dim]);
        });
        Ok(())
    }

    fn heads_to_rows(&self, x: &Vec<f32>, y: &mut Vec<f32>, s: HeadShape) -> Result<()> {
        enough("heads_to_rows", "x", s.room(), x.len())?;
        enough("heads_to_rows", "y", s.values(), y.len())?;
        y.par_chunks_mut(s.heads * s.dim)
            .take(s.rows())
            .enumerate()
            .for_each(|(r, y)| {
                for (h, y) in y.chunks_mut(s.dim).enumerate() {
                    y.copy_from_slice(&x[head_at(&s, r / s.seq, h, r % s.seq)..][..s.dim]);
                }
            });
        Ok(())
    }

    fn causal_softmax(&self, s: &mut Vec<f32>, rows: usize, seq: usize) -> Result<()> {
        enough("causal_softmax", "scores", rows * seq, s.len())?;
        s.par_chunks_mut(seq)
            .take(rows)
            .enumerate()
            .for_each(|(r, s)| {
                let (seen, unseen) = s.split_at_mut(r % seq + 1);
                rows::softmax(seen);
                unseen.fill(0.0);
            });
        Ok(())
    }

    fn softmax_grad(&self, p: &Vec<f32>, dp: &mut Vec<f32>, rows: usize, seq: usize) -> Result<()> {
        enough("softmax_grad", "p", rows * seq, p.len())?;
        enough("softmax_grad", "dp", rows * seq, dp.len())?;
        let rows_of = dp.par_chunks_mut(seq).zip(p.par_chunks(seq)).take(rows);
        rows_of.for_each(|(dp, p)| rows::softmax_grad(p, dp));
        Ok(())
    }

    fn silu_mul(&self, gate: &Vec<f32>, up: &Vec<f32>, out: &mut Vec<f32>, n: usize) -> Result<()> {
        for (what, len) in [("gate", gate.len()), ("up", up.len()), ("out", out.len())] {
            enough("silu_mul", what, n, len)?;
        }
        let inputs = gate[..n].par_chunks(VALUES).zip(up[..n].par_chunks(VALUES));
        let pieces = out[..n].par_chunks_mut(VALUES).zip(inputs);
        pieces.for_each(|(out, (gate, up))| rows::silu_mul(gate, up, out));
        Ok(())
    }

    fn gate(&self, gate: &Vec<f32>, x: &mut Vec<f32>, n: usize) -> Result<()> {
        self.scale_rows(gate, x, Dims::new(n, 1))
    }

    fn scale_rows(
        &self,
        scores: &Vec<f32>,
        x: &mut Vec<f32>,
        Dims { rows, cols: width }: Dims,
    ) -> Result<()> {
        enough("scale_rows", "scores", rows, scores.len())?;
        enough("scale_rows", "x", rows * width, x.len())?;
        let scored = x.chunks_exact_mut(width.max(1)).zip(scores).take(rows);
        for (x, score) in scored {
            let scale = 1.0 / (1.0 + (-score).exp());
            x.iter_mut().for_each(|x| *x *= scale);
        }
        Ok(())
    }

    fn delta(
        &self,
        inputs: DeltaInputs<'_, Vec<f32>>,
        _work: &mut DeltaWork<Vec<f32>>,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        delta::run(&inputs, out)
    }

    fn silu_mul_grad(
        &self,
        gate: &mut Vec<f32>,
        up: &mut Vec<f32>,
        dout: &Vec<f32>,
        n: usize,
    ) -> Result<()> {
        for (what, len) in [("gate", gate.len()), ("up", up.len()), ("dout", dout.len())] {
            enough("silu_mul_grad", what, n, len)?;
        }
        let pairs = gate[..n]
            .par_chunks_mut(VALUES)
            .zip(up[..n].par_chunks_mut(VALUES));
        let pieces = pairs.zip(dout[..n].par_chunks(VALUES));
        pieces.for_each(|((gate, up), dout)| rows::silu_mul_grad(gate, up, dout));
        Ok(())
    }
}
