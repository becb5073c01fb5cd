//! Benches of a training step's operations and of second-order rounding, by nq's own kernels.

use super::timing::{MODELS, Model, Timing};
use nq_cuda::{Buffer, CudaOps, GemmPrecision, Groups, Permutation};
use nq_formats::TrellisScheme;
use nq_formats::trellis::Code;
use nq_kernels::Result;
use nq_kernels::grad::{
    Adam, Allocate, Buffers, Draw, Gemm, GradOps, HeadShape, LayerOps, Occurrences, OneShape,
    Rounding, UNKNOWN,
};
use nq_kernels::second_order::{ColumnBlock, Damped, FitShape, TrellisRows};
use nq_model::Dims;

/// Sequences in a step, and tokens per sequence.
const BATCH: usize = 4;
const SEQ: usize = 256;
const ROWS: usize = BATCH * SEQ;
/// Size of the vocabulary: smaller than a model's, so that the logits of all rows fit.
const VOCAB: usize = 32_768;

/// A device for training steps, and buffers on it.
struct Training<'a> {
    t: &'a Timing,
    ops: CudaOps,
    model: Model,
}

impl Training<'_> {
    fn floats(&self, n: usize) -> Result<Buffer<f32>> {
        self.t.gpu.upload("a benchmark", &vec![0.5; n])
    }

    fn time(&self, what: &str, bytes: usize, op: impl FnMut(usize) -> Result<()>) -> Result<()> {
        self.t
            .alone(&format!("{} {what}", self.model.name), bytes, op)
    }

    fn products(&self) -> Result<()> {
        for (name, out, inp) in self.model.products() {
            let (x, w) = (self.floats(ROWS * inp)?, self.floats(out * inp)?);
            let mut y = self.floats(ROWS * out)?;
            let g = Gemm::linear(ROWS, out, inp);
            let bytes = 4 * (ROWS * inp + out * inp + ROWS * out);
            self.time(&format!("product {name}"), bytes, |_| {
                self.ops.gemm(g, &x, &w, &mut y)
            })?;
            let (mut dx, mut dw) = (self.floats(ROWS * inp)?, self.floats(out * inp)?);
            let g = Gemm::input_grad(ROWS, out, inp);
            let what = format!("gradient of inputs {name}");
            self.time(&what, bytes, |_| self.ops.gemm(g, &y, &w, &mut dx))?;
            let g = Gemm::weight_grad(ROWS, out, inp).add();
            let what = format!("gradient of weights {name}");
            self.time(&what, bytes, |_| self.ops.gemm(g, &y, &x, &mut dw))?;
        }
        Ok(())
    }

    fn rows(&self) -> Result<()> {
        let (ops, h) = (&self.ops, self.model.hidden);
        let n = ROWS * h;
        let (x, gain) = (self.floats(n)?, self.floats(h)?);
        let (mut y, mut dgain) = (self.floats(n)?, self.floats(h)?);
        let mut inv = self.floats(ROWS)?;
        self.time("clear", 4 * n, |_| ops.clear(&mut y, n))?;
        self.time("copy", 8 * n, |_| ops.copy((&x, 0), (&mut y, 0), n))?;
        let shape = Dims::new(ROWS, h);
        self.time("norm", 8 * n, |_| {
            ops.rms_norm(&x, &gain, &mut y, &mut inv, shape, 1e-6)
        })?;
        self.time("gradient of a norm", 16 * n, |_| {
            ops.rms_norm_grad(&x, &gain, &inv, &x, &mut y, true, &mut dgain, shape)
        })?;
        let tokens: Vec<u32> = (0..ROWS as u32).map(|i| i * 31 % VOCAB as u32).collect();
        let mut ids = ops.ids("a benchmark", ROWS)?;
        ops.write_ids(&mut ids, &tokens)?;
        let mut table = self.floats(VOCAB * h)?;
        self.time("embed", 8 * n, |_| {
            ops.embed(&table, &ids, (ROWS, 1, 0), &mut y, h)
        })?;
        let occurrences = Occurrences::new(&tokens);
        self.time("gradient of embeddings", 12 * n, |_| {
            ops.embed_grad(&x, &occurrences, &mut table, h)
        })?;
        let n = ROWS * self.model.mlp;
        let (mut gate, mut up, mut out) = (self.floats(n)?, self.floats(n)?, self.floats(n)?);
        self.time("silu", 12 * n, |_| ops.silu_mul(&gate, &up, &mut out, n))?;
        self.time("gradient of silu", 20 * n, |_| {
            ops.silu_mul_grad(&mut gate, &mut up, &out, n)
        })
    }

    fn attention(&self) -> Result<()> {
        let (ops, heads, kv_heads) = (&self.ops, self.model.heads, self.model.kv_heads);
        let s = HeadShape::whole(BATCH, SEQ, heads, 128);
        let n = s.values();
        let (x, gain, cos_sin) = (self.floats(n)?, self.floats(128)?, self.floats(SEQ * 128)?);
        let (mut y, mut inv) = (self.floats(n)?, self.floats(ROWS * heads)?);
        let (mut dx, mut dgain) = (self.floats(n)?, self.floats(128)?);
        self.time("norm and rotation of heads", 8 * n, |_| {
            ops.head_norm_rope(&x, Some(&gain), &cos_sin, &mut y, &mut inv, s, 1e-6)
        })?;
        self.time("gradient of that", 20 * n, |_| {
            ops.head_norm_rope_grad(&x, &gain, &cos_sin, &inv, &y, &mut dx, &mut dgain, s)
        })?;
        self.time("rows to heads", 8 * n, |_| ops.rows_to_heads(&x, &mut y, s))?;
        let rows = BATCH * heads * SEQ;
        let (mut scores, p) = (self.floats(rows * SEQ)?, self.floats(rows * SEQ)?);
        let bytes = 8 * rows * SEQ;
        self.time("softmax", bytes, |_| {
            ops.causal_softmax(&mut scores, rows, SEQ)
        })?;
        self.time("gradient of softmax", 3 * bytes / 2, |_| {
            ops.softmax_grad(&p, &mut scores, rows, SEQ)
        })?;
        let one = OneShape {
            batch: 64,
            heads,
            kv_heads,
            dim: 128,
            capacity: SEQ,
            seen: SEQ,
        };
        let cache = self.floats(64 * kv_heads * SEQ * 128)?;
        let (q, mut out) = (
            self.floats(64 * heads * 128)?,
            self.floats(64 * heads * 128)?,
        );
        self.time("attention of one token", 8 * cache.len(), |_| {
            ops.attend_one(&q, &cache, &cache, &mut out, one)
        })
    }

    fn loss_and_rounding(&self) -> Result<()> {
        let ops = &self.ops;
        let n = ROWS * VOCAB;
        let (teacher, mut logits) = (self.floats(n)?, self.floats(n)?);
        let mut loss = self.floats(ROWS)?;
        self.time("divergence", 12 * n, |_| {
            ops.kl_divergence(
                &teacher,
                &mut logits,
                &mut loss,
                Dims::new(ROWS, VOCAB),
                1.0,
            )
        })?;
        let mut ids = ops.ids("a benchmark", ROWS)?;
        let draw = Draw {
            batch: ROWS,
            vocab: VOCAB,
            stride: 1,
            offset: 0,
            seed: 1,
            stream: 2,
        };
        let unknown = vec![UNKNOWN; ROWS];
        self.time("sample", 4 * n, |_| {
            ops.write_ids(&mut ids, &unknown)?;
            ops.sample(&logits, &mut ids, draw)
        })?;
        let (_, rows, cols) = self.model.products()[2];
        let n = rows * cols;
        let shape = Rounding {
            rows,
            cols,
            group: 128,
            max_code: 15,
        };
        let (latent, dw) = (self.floats(n)?, self.floats(n)?);
        let (scales, zeros) = (self.floats(n / 128)?, self.floats(n / 128)?);
        let (mut w, mut dscales) = (self.floats(n)?, self.floats(n / 128)?);
        self.time("round gate_up", 8 * n, |_| {
            ops.round(shape, &latent, &scales, &zeros, &mut w)
        })?;
        self.time("gradient of rounding gate_up", 16 * n, |_| {
            ops.round_grad(shape, &latent, &scales, &zeros, &dw, &mut w, &mut dscales)
        })?;
        let (mut mean, mut square, mut grad) = (self.floats(n)?, self.floats(n)?, dw);
        let step = Adam {
            rate: 1e-4,
            ..Adam::default()
        };
        self.time("adam of gate_up", 32 * n, |_| {
            ops.adam(step, &mut w, &mut mean, &mut square, &mut grad, n)
        })
    }
}

pub(crate) fn training(t: &mut Timing) -> Result<()> {
    for model in MODELS {
        let training = Training {
            ops: CudaOps::with_own_products(&t.gpu, GemmPrecision::Full)?,
            t,
            model,
        };
        training.products()?;
        training.rows()?;
        training.attention()?;
        training.loss_and_rounding()?;
    }
    Ok(())
}

/// Second-order rounding of `o`, with as many inputs as all heads of the model have values.
pub(crate) fn second_order(t: &mut Timing) -> Result<()> {
    for model in MODELS {
        let ops = CudaOps::with_own_products(&t.gpu, GemmPrecision::Full)?;
        let (rows, n) = (model.hidden, model.heads * 128);
        let what = |op: &str| format!("{} {op} of {n} inputs", model.name);
        // A dominant diagonal makes the matrix positive definite.
        let moments: Vec<f32> = (0..n * n)
            .map(|i| if i % (n + 1) == 0 { n as f32 } else { 0.3 })
            .collect();
        let moments = t.gpu.upload("a benchmark", &moments)?;
        let order: Vec<u32> = (0..n as u32).collect();
        let dead = vec![0; n];
        let damped = Damped {
            order: &order,
            dead: &dead,
            fill: 1.0,
            damping: 0.01,
            noise: 0.0,
        };
        let mut factor = None;
        t.alone(&what("factor"), 0, |_| {
            factor = ops.inverse_factor(&moments, damped)?;
            Ok(())
        })?;
        let Some(u) = factor else {
            println!("  skipped: the moments have no factor");
            continue;
        };
        t.alone(&what("divide_moments"), 8 * n * n, |_| {
            ops.divide_moments(&moments, &vec![2.0; n]).map(drop)
        })?;
        t.alone(&what("diagonal"), 0, |_| {
            ops.diagonal(&moments, n).map(drop)
        })?;
        let weight: Vec<f32> = (0..rows * n)
            .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
            .collect();
        t.alone(&what("transform_moments"), 16 * n * n, |_| {
            let ones = vec![1.0; n];
            ops.transform_moments(&moments, &ones, &ones).map(drop)
        })?;
        for (code, step_bits) in [(Code::Octagon, 8), (Code::Sum, 6)] {
            let Ok(scheme) = TrellisScheme::new(code, step_bits) else {
                continue;
            };
            let rows = TrellisRows {
                weight: &weight,
                scales: &vec![0.5; rows],
                scheme,
                window: 22,
            };
            t.alone(&what(&format!("round_to_trellis {scheme}")), 0, |_| {
                ops.round_to_trellis(&moments, &u, &rows).map(drop)
            })?;
        }
        let weight = t.gpu.upload("a benchmark", &weight)?;
        let importance = t.gpu.upload("a benchmark", &vec![1.0; n])?;
        let fit = FitShape {
            least: 0.5,
            steps: 40,
            power: 2,
            refits: 1,
            symmetric: false,
        };
        let mut groups = Groups::new(&ops, Dims::new(rows, n), 128, 15)?;
        t.alone(&what("fit_groups"), 4 * rows * n, |_| {
            ops.fit_groups(fit, &weight, 0..n, &importance, &mut groups, 0)
        })?;
        let places = Permutation::new(&ops, &order)?;
        let blocks: Vec<ColumnBlock> = (0..n)
            .step_by(128)
            .map(|at| ColumnBlock {
                places: at..(at + 128).min(n),
                begins: None,
            })
            .collect();
        let mut codes = None;
        t.alone(&what("permute and round_columns"), 0, |_| {
            let w = ops.permute_columns(&weight, &places, rows)?;
            codes =
                Some(ops.round_columns(w, &u, &places, &blocks, fit, &importance, &mut groups)?);
            Ok(())
        })?;
        let Some(codes) = codes else { continue };
        t.alone(&what("rounding_error"), 9 * rows * n, |_| {
            ops.rounding_error(&weight, &codes, &groups).map(drop)
        })?;
        t.alone(&what("dot"), 8 * rows * n, |_| {
            ops.dot(&weight, &weight, rows * n).map(drop)
        })?;
    }
    Ok(())
}
