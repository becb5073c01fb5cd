//! Training operations on the GPU compared with those on the CPU, which other tests compare with plain
//! sums and finite differences. Every operation runs twice with the same bits.
//!
//! Without a GPU the tests print that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.

use nq_cuda::{CudaOps, GemmPrecision};
use nq_f32::CpuOps;
use nq_kernels::DeltaShape;
use nq_kernels::grad::{
    Adam, Allocate, Buffers, DeltaGradWork, DeltaGrads, DeltaInputs, DeltaStepAt, DeltaWork, Draw,
    Gemm, GradOps, HeadShape, LayerOps, Occurrences, OneShape, Rounding, UNKNOWN,
};
use nq_kernels::rng::Philox;
use nq_model::Dims;

/// The GPU with nq's products and, if it is installed, with cuBLAS's.
fn ops(precision: GemmPrecision) -> Vec<CudaOps> {
    let Some(gpu) = super::gpu() else {
        return Vec::new();
    };
    let own = CudaOps::with_own_products(&gpu, precision).unwrap();
    let best = CudaOps::new(&gpu, precision).unwrap();
    if best.products() == own.products() {
        println!("skipped: cuBLAS's products, as it is not installed");
        vec![own]
    } else {
        vec![own, best]
    }
}

fn random(n: usize, stream: u64) -> Vec<f32> {
    let mut rng = Philox::new(4, stream);
    (0..n).map(|_| rng.normal()).collect()
}

fn put<O: GradOps>(ops: &O, values: &[f32]) -> O::Floats {
    let mut floats = ops.floats("a test", values.len()).unwrap();
    ops.write(&mut floats, values).unwrap();
    floats
}

fn get<O: GradOps>(ops: &O, floats: &O::Floats, n: usize) -> Vec<f32> {
    let mut values = vec![0.0; n];
    ops.read(floats, &mut values).unwrap();
    values
}

/// The outputs of an operation, from inputs that depend only on the operation.
type Case = (&'static str, f64, Vec<Vec<f32>>);

/// Error limit of a product in split TF32. The parts that are left out and rounding to f32
/// cost less than 1e-6. Tensor cores truncate their sums instead of rounding them: each addition
/// of eight products loses half of a last place, `2^-24` of the sum so far, on average, always
/// towards zero, and there are three to every eight of k. Parts of k are at most 560 long in
/// these tests; they are added in proper f32.
fn gemm_limit(g: Gemm) -> f64 {
    let additions = 3 * g.k.min(560).div_ceil(8);
    1e-6 + additions as f64 * 2f64.powi(-24)
}

/// Fills and reads an implementation's values.
struct On<'a, O>(&'a O);

impl<O: GradOps> On<'_, O> {
    /// `n` normal values from stream `stream`.
    fn f(&self, n: usize, stream: u64) -> O::Floats {
        put(self.0, &random(n, stream))
    }

    fn r(&self, x: &O::Floats, n: usize) -> Vec<f32> {
        get(self.0, x, n)
    }
}

/// Products.
fn gemms<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let mut cases = Vec::new();
    // Shapes at and off the edges of tiles; one whose k is cut into parts; sums of rows, and rows scaled.
    let shapes = [
        (128, 128, 64, 1),
        (130, 257, 19, 2),
        (3, 40, 1030, 1),
        (72, 96, 5000, 1),
        (1, 1, 384, 300),
        (1, 384, 1, 300),
    ];
    for (m, n, k, batch) in shapes {
        for layout in 0..8 {
            let g = Gemm {
                m,
                n,
                k,
                batch,
                ta: layout & 1 == 1,
                tb: layout & 2 == 2,
                alpha: 0.5,
                accumulate: layout & 4 == 4,
            };
            let (a, b) = (on.f(batch * m * k, 1), on.f(batch * k * n, 2));
            let mut c = on.f(batch * m * n, 3);
            ops.gemm(g, &a, &b, &mut c).unwrap();
            cases.push(("gemm", gemm_limit(g), vec![on.r(&c, batch * m * n)]));
        }
    }
    cases
}

/// RMSNorm.
fn norms<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let (rows, width) = (70, 200);
    let (x, gain, dy) = (on.f(rows * width, 4), on.f(width, 5), on.f(rows * width, 6));
    let (mut y, mut inv) = (on.f(rows * width, 7), on.f(rows, 8));
    ops.rms_norm(&x, &gain, &mut y, &mut inv, Dims::new(rows, width), 1e-6)
        .unwrap();
    let mut dgain = on.f(width, 9);
    let mut dx = on.f(rows * width, 10);
    let shape = Dims::new(rows, width);
    ops.rms_norm_grad(&x, &gain, &inv, &dy, &mut dx, true, &mut dgain, shape)
        .unwrap();
    let out = vec![
        on.r(&y, rows * width),
        on.r(&inv, rows),
        on.r(&dx, rows * width),
        on.r(&dgain, width),
    ];
    vec![("rms_norm", 1e-6, out)]
}

/// Norm and RoPE of heads, and their layout.
fn heads<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let mut cases = Vec::new();
    let s = HeadShape::whole(3, 10, 4, 32);
    let (x, gain, dy) = (on.f(s.values(), 11), on.f(32, 12), on.f(s.room(), 13));
    let turns: Vec<f32> = (0..20 * 16)
        .flat_map(|i| [(i as f32).cos(), (i as f32).sin()])
        .collect();
    let turns = put(ops, &turns);
    let (mut y, mut inv) = (on.f(s.room(), 14), on.f(s.rows() * 4, 15));
    ops.head_norm_rope(&x, Some(&gain), &turns, &mut y, &mut inv, s, 1e-6)
        .unwrap();
    let (mut dx, mut dgain) = (on.f(s.values(), 16), on.f(32, 17));
    ops.head_norm_rope_grad(&x, &gain, &turns, &inv, &dy, &mut dx, &mut dgain, s)
        .unwrap();
    let out = vec![on.r(&y, s.room()), on.r(&dx, s.values()), on.r(&dgain, 32)];
    cases.push(("head_norm_rope", 1e-6, out));
    ops.head_norm_rope(&x, None, &turns, &mut y, &mut inv, s, 1e-6)
        .unwrap();
    ops.head_rope_grad(&turns, &dy, &mut dx, s).unwrap();
    let out = vec![on.r(&y, s.room()), on.r(&dx, s.values())];
    cases.push(("head_rope", 1e-6, out));
    let one = HeadShape {
        seq: 1,
        capacity: 10,
        at: 6,
        position: 6,
        ..s
    };
    ops.head_norm_rope(&x, Some(&gain), &turns, &mut y, &mut inv, one, 1e-6)
        .unwrap();
    let mut z = on.f(one.room(), 18);
    ops.rows_to_heads(&x, &mut z, one).unwrap();
    let mut back = on.f(s.values(), 19);
    ops.heads_to_rows(&z, &mut back, s).unwrap();
    let out = vec![
        on.r(&y, one.room()),
        on.r(&z, one.room()),
        on.r(&back, s.values()),
    ];
    cases.push(("heads", 1e-6, out));
    cases
}

/// Causal softmax.
fn softmax<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let (rows, seq) = (90, 30);
    let mut p = on.f(rows * seq, 20);
    ops.causal_softmax(&mut p, rows, seq).unwrap();
    let mut dp = on.f(rows * seq, 21);
    ops.softmax_grad(&p, &mut dp, rows, seq).unwrap();
    vec![(
        "softmax",
        1e-6,
        vec![on.r(&p, rows * seq), on.r(&dp, rows * seq)],
    )]
}

/// SwiGLU.
fn silu<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let n = 1000;
    let (mut gate, mut up, dout) = (on.f(n, 22), on.f(n, 23), on.f(n, 24));
    let mut out = on.f(n, 25);
    ops.silu_mul(&gate, &up, &mut out, n).unwrap();
    ops.silu_mul_grad(&mut gate, &mut up, &dout, n).unwrap();
    vec![(
        "silu",
        1e-6,
        vec![on.r(&out, n), on.r(&gate, n), on.r(&up, n)],
    )]
}

/// Rows times the sigmoid of their scores, of one value too.
fn scaled<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let case = |(rows, width): (usize, usize)| {
        let (scores, mut x) = (on.f(rows, 47), on.f(rows * width, 48));
        on.0.scale_rows(&scores, &mut x, Dims::new(rows, width))
            .unwrap();
        ("scale_rows", 1e-6, vec![on.r(&x, rows * width)])
    };
    [(70, 48), (1000, 1), (3, 700)]
        .into_iter()
        .map(case)
        .collect()
}

/// Gates, and their gradients.
fn gates<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let (ops, n) = (on.0, 1000);
    let (mut gate, mut x, values) = (on.f(n, 59), on.f(n, 60), on.f(n, 61));
    ops.gate(&gate, &mut x, n).unwrap();
    let mut out = vec![on.r(&x, n)];
    ops.gate_grad(&mut gate, &values, &mut x, n).unwrap();
    out.extend([on.r(&gate, n), on.r(&x, n)]);
    vec![("gate", 1e-6, out)]
}

/// Gated DeltaNets: sequences of whole chunks, of others, and more of them than the memory has chunks for. Products of
/// operands in two parts of BF16 keep 17 bits of each.
fn recurrences<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let cases = [
        ((2, 4, false), (3, 37), (3, 37)),
        ((2, 4, true), (2, 64), (2, 64)),
        ((1, 3, false), (70, 1), (2, 40)),
        ((2, 2, false), (5, 8), (1, 40)),
    ];
    let mut found = Vec::new();
    for ((key_heads, value_heads, tiled), (batch, seq), room) in cases {
        let shape = DeltaShape {
            key_heads,
            value_heads,
            key_dim: 128,
            value_dim: 128,
            conv: 4,
            tiled,
        };
        let rows = batch * seq;
        let rates: Vec<f32> = random(value_heads, 49).iter().map(|v| -v.exp()).collect();
        let inputs = DeltaInputs {
            shape,
            batch,
            seq,
            qkvz: &on.f(rows * (shape.channels() + shape.values()), 50),
            ba: &on.f(rows * 2 * value_heads, 51),
            conv: &on.f(shape.channels() * 4, 52),
            decay: &put(ops, &rates),
            dt_bias: &on.f(value_heads, 53),
            norm: &on.f(128, 54),
            eps: 1e-6,
        };
        let mut work = DeltaWork::new(ops, &shape, room).unwrap();
        let mut out = on.f(rows * shape.values(), 55);
        ops.delta(inputs, &mut work, &mut out).unwrap();
        found.push(("delta", 1e-4, vec![on.r(&out, rows * shape.values())]));

        let mut own = DeltaGradWork::new(ops, &shape, room).unwrap();
        let dout = on.f(rows * shape.values(), 56);
        let mut qkvz = on.f(rows * shape.stride(), 57);
        let mut ba = on.f(rows * 2 * value_heads, 58);
        let to = DeltaGrads {
            qkvz: &mut qkvz,
            ba: &mut ba,
        };
        ops.delta_grad(inputs, (&mut work, &mut own), &dout, to)
            .unwrap();
        let grads = vec![
            on.r(&qkvz, rows * shape.stride()),
            on.r(&ba, rows * 2 * value_heads),
        ];
        found.push(("delta_grad", 1e-5, grads));

        let mut states = ops.states(shape, 2, batch + 1).unwrap();
        let mut tokens = Vec::new();
        for position in 0..6 {
            let token = DeltaInputs { seq: 1, ..inputs };
            let at = DeltaStepAt { layer: 1, position };
            ops.delta_step(token, &mut states, at, &mut out).unwrap();
            tokens.push(on.r(&out, batch * shape.values()));
        }
        found.push(("delta_step", 1e-5, tokens));
    }
    found
}

/// Heads of other widths than the kernels serve are refused by name.
#[test]
fn recurrences_of_other_widths_are_refused() {
    let Some(gpu) = ops(GemmPrecision::Full).pop() else {
        return;
    };
    let shape = DeltaShape {
        key_heads: 1,
        value_heads: 1,
        key_dim: 64,
        value_dim: 64,
        conv: 4,
        tiled: false,
    };
    let zeros = gpu.floats("a test", 64 * 64).unwrap();
    let inputs = DeltaInputs {
        shape,
        batch: 1,
        seq: 1,
        qkvz: &zeros,
        ba: &zeros,
        conv: &zeros,
        decay: &zeros,
        dt_bias: &zeros,
        norm: &zeros,
        eps: 1e-6,
    };
    let mut work = DeltaWork::new(&gpu, &shape, (1, 1)).unwrap();
    let mut out = gpu.floats("a test", 64).unwrap();
    let refused = gpu.delta(inputs, &mut work, &mut out).unwrap_err();
    let said = refused.to_string();
    assert!(
        said.contains("gated DeltaNet") && said.contains("64"),
        "{said}"
    );
}

/// The loss.
fn divergence<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let (rows, vocab) = (5, 700);
    let (teacher, mut logits, mut loss) = (
        on.f(rows * vocab, 26),
        on.f(rows * vocab, 27),
        on.f(rows, 28),
    );
    ops.kl_divergence(
        &teacher,
        &mut logits,
        &mut loss,
        Dims::new(rows, vocab),
        0.25,
    )
    .unwrap();
    vec![(
        "kl_divergence",
        2e-6,
        vec![on.r(&logits, rows * vocab), on.r(&loss, rows)],
    )]
}

/// Rounding, and weights from codes.
fn rounding<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let mut cases = Vec::new();
    let shape = Rounding {
        rows: 6,
        cols: 96,
        group: 48,
        max_code: 15,
    };
    let (latent, dw) = (on.f(576, 29), on.f(576, 30));
    let scales = put(
        ops,
        &random(12, 31)
            .iter()
            .map(|v| v * 0.1 + 0.2)
            .collect::<Vec<_>>(),
    );
    let zeros = put(ops, &(0..12).map(|i| (i % 16) as f32).collect::<Vec<_>>());
    let (mut w, mut dlatent, mut dscales) = (on.f(576, 32), on.f(576, 33), on.f(12, 34));
    ops.round(shape, &latent, &scales, &zeros, &mut w).unwrap();
    ops.round_grad(
        shape,
        &latent,
        &scales,
        &zeros,
        &dw,
        &mut dlatent,
        &mut dscales,
    )
    .unwrap();
    let out = vec![on.r(&w, 576), on.r(&dlatent, 576), on.r(&dscales, 12)];
    cases.push(("round", 1e-6, out));
    let written: Vec<u8> = (0..576).map(|i| (i * 7 % 16) as u8).collect();
    let mut codes = ops.codes("a test", written.len()).unwrap();
    ops.write_codes(&mut codes, &written).unwrap();
    ops.dequantize(shape, &codes, &scales, &zeros, &mut w)
        .unwrap();
    ops.dequantize_grad(shape, &codes, &zeros, &dw, &mut dscales)
        .unwrap();
    cases.push(("dequantize", 1e-6, vec![on.r(&w, 576), on.r(&dscales, 12)]));
    cases
}

/// A step of the optimizer.
fn adam<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let n = 1000;
    let step = Adam {
        rate: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        correction1: 0.1,
        correction2: 0.01,
        epsilon: 1e-8,
    };
    let (mut value, mut mean, mut grad) = (on.f(n, 35), on.f(n, 36), on.f(n, 37));
    let mut square = put(
        ops,
        &random(n, 38).iter().map(|v| v * v).collect::<Vec<_>>(),
    );
    ops.adam(step, &mut value, &mut mean, &mut square, &mut grad, n)
        .unwrap();
    vec![(
        "adam",
        1e-6,
        vec![
            on.r(&value, n),
            on.r(&mean, n),
            on.r(&square, n),
            on.r(&grad, n),
        ],
    )]
}

/// The embedding.
fn embedding<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let tokens: Vec<u32> = (0..50).map(|i| i * i % 23).collect();
    let mut ids = ops.ids("a test", 100).unwrap();
    let spread: Vec<u32> = tokens.iter().flat_map(|&t| [0, t]).collect();
    ops.write_ids(&mut ids, &spread).unwrap();
    let (mut table, mut x) = (on.f(23 * 40, 39), on.f(50 * 40, 40));
    ops.embed(&table, &ids, (50, 2, 1), &mut x, 40).unwrap();
    let dx = on.f(50 * 40, 41);
    ops.embed_grad(&dx, &Occurrences::new(&tokens), &mut table, 40)
        .unwrap();
    vec![(
        "embed",
        1e-6,
        vec![on.r(&x, 50 * 40), on.r(&table, 23 * 40)],
    )]
}

/// Attention for one token.
fn attend_one<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let s = OneShape {
        batch: 3,
        heads: 4,
        kv_heads: 2,
        dim: 48,
        capacity: 200,
        seen: 150,
    };
    let (q, keys, values) = (
        on.f(3 * 4 * 48, 42),
        on.f(6 * 200 * 48, 43),
        on.f(6 * 200 * 48, 44),
    );
    let mut out = on.f(3 * 4 * 48, 45);
    ops.attend_one(&q, &keys, &values, &mut out, s).unwrap();
    vec![("attend_one", 2e-6, vec![on.r(&out, 3 * 4 * 48)])]
}

/// Draws.
fn sample<O: GradOps>(on: &On<'_, O>) -> Vec<Case> {
    let ops = on.0;
    let (batch, vocab) = (200, 1000);
    let logits: Vec<f32> = random(batch * vocab, 46).iter().map(|v| v * 4.0).collect();
    let logits = put(ops, &logits);
    let mut ids = ops.ids("a test", batch * 3).unwrap();
    let mut start = vec![UNKNOWN; batch * 3];
    start[3 * 7 + 2] = 5;
    ops.write_ids(&mut ids, &start).unwrap();
    let draw = Draw {
        batch,
        vocab,
        stride: 3,
        offset: 2,
        seed: 0x1234_5678_9ABC,
        stream: 1 << 40,
    };
    ops.sample(&logits, &mut ids, draw).unwrap();
    let mut drawn = vec![0; batch * 3];
    ops.read_ids(&ids, &mut drawn).unwrap();
    assert_eq!(drawn[3 * 7 + 2], 5);
    let drawn: Vec<f32> = drawn.iter().skip(2).step_by(3).map(|&t| t as f32).collect();
    vec![("sample", 0.02, vec![drawn])]
}

/// Runs every operation and returns the outputs of each, with its allowed error.
fn run<O: GradOps>(ops: &O) -> Vec<Case> {
    let parts = [
        gemms,
        norms,
        heads,
        softmax,
        silu,
        scaled,
        gates,
        recurrences,
        divergence,
        rounding,
        adam,
        embedding,
        attend_one,
        sample,
    ];
    parts.iter().flat_map(|part| part(&On(ops))).collect()
}

/// Relative error of `a`: relative to the norm of `b`, or the share of values that differ for draws.
fn error(name: &str, a: &[f32], b: &[f32]) -> f64 {
    if name == "sample" {
        return a.iter().zip(b).filter(|(a, b)| a != b).count() as f64 / a.len() as f64;
    }
    let square = |v: f32| f64::from(v).powi(2);
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    let all: f64 = b.iter().map(|&b| square(b)).sum();
    // If everything is zero, the error is absolute.
    (off / if all > 0.0 { all } else { 1.0 }).sqrt()
}

#[test]
fn operations_are_those_of_the_cpu() {
    let gpus = ops(GemmPrecision::Full);
    if gpus.is_empty() {
        return;
    }
    let expected = run(&CpuOps);
    let mut failed = Vec::new();
    for gpu in gpus {
        let by = gpu.products();
        let (found, again) = (run(&gpu), run(&gpu));
        assert!(
            found == again,
            "the same operation twice, two results, {by}"
        );
        for (i, ((name, limit, a), (_, _, b))) in found.iter().zip(&expected).enumerate() {
            for (part, (a, b)) in a.iter().zip(b).enumerate() {
                let e = error(name, a, b);
                if e.is_nan() || e > *limit {
                    failed.push(format!(
                        "{by}, case {i}, {name}, part {part}: off by {e:.2e}"
                    ));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn tf32_products_are_near() {
    let g = Gemm::linear(200, 150, 700);
    let n = 200 * 150;
    let (a, b) = (random(200 * 700, 1), random(150 * 700, 2));
    let mut precise = vec![0.0; n];
    CpuOps.gemm(g, &a, &b, &mut precise).unwrap();
    for gpu in ops(GemmPrecision::Tf32) {
        let mut c = put(&gpu, &vec![0.0; n]);
        gpu.gemm(g, &put(&gpu, &a), &put(&gpu, &b), &mut c).unwrap();
        let e = error("gemm", &get(&gpu, &c, n), &precise);
        let by = gpu.products();
        assert!((1e-6..1e-3).contains(&e), "{by}: off by {e:.2e}");
    }
}

/// An id that was not drawn yet, or that has no row in the table, is not used as an index: the
/// output is NaN.
#[test]
fn ids_without_a_row_are_not_followed() {
    for ops in ops(GemmPrecision::Full) {
        let table = put(&ops, &random(3 * 40, 80));
        let mut ids = ops.ids("a test", 4).unwrap();
        ops.write_ids(&mut ids, &[2, UNKNOWN, 3, 0]).unwrap();
        let mut x = put(&ops, &[0.0; 4 * 40]);
        ops.embed(&table, &ids, (4, 1, 0), &mut x, 40).unwrap();
        let x = get(&ops, &x, 4 * 40);
        let mut rows = x.chunks_exact(40);
        for known in [true, false, false, true] {
            let row = rows.next().unwrap();
            assert!(row.iter().all(|v| v.is_nan() != known), "{row:?}");
        }
        assert!(
            ops.embed(&table, &ids, (5, 1, 0), &mut put(&ops, &[0.0; 200]), 40)
                .is_err()
        );
    }
}

#[test]
fn rows_arrive_as_they_are_made() {
    let Some(gpu) = ops(GemmPrecision::Full).pop() else {
        return;
    };
    // More than both staging buffers hold, in rows that do not fill them.
    let (rows, cols) = (3000, 4100);
    let fill = |row: usize, values: &mut [f32]| {
        let number = |(col, v): (usize, &mut f32)| *v = (row * 7 + col) as f32;
        values.iter_mut().enumerate().for_each(number);
        Ok::<_, nq_kernels::Error>(())
    };
    let made = gpu.rows("a test", Dims::new(rows, cols), fill).unwrap();
    let values = get(&gpu, &made, rows * cols);
    let expected = CpuOps.rows("a test", Dims::new(rows, cols), fill).unwrap();
    assert!(values == expected);
    let wide = gpu.rows("a test", Dims::new(2, 5 << 20), fill).unwrap();
    assert_eq!(get(&gpu, &wide, 10 << 20)[(5 << 20) + 3], 10.0);
    let refuse = |row: usize, _: &mut [f32]| match row {
        2999 => Err(nq_kernels::Error::DeviceMemory { what: "row 2999" }),
        _ => Ok(()),
    };
    assert!(gpu.rows("a test", Dims::new(rows, cols), refuse).is_err());
}
