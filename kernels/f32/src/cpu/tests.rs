//! The CPU's operations compared with plain sums.

use super::*;
use nq_kernels::delta::DeltaShape;
use nq_kernels::grad::*;
use nq_kernels::rng::Philox;
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::delta::{EPS, Vectors, reference, rows, shapes, vectors};

fn random(n: usize, stream: u64) -> Vec<f32> {
    let mut rng = Philox::new(3, stream);
    (0..n).map(|_| rng.normal()).collect()
}

#[test]
fn products_in_every_layout() {
    let ops = CpuOps;
    let mut stream = 0;
    for (m, n, k, batch) in [(3, 5, 7, 2), (300, 4, 33, 1), (2, 600, 9, 1), (1, 1, 1, 3)] {
        for layout in 0..8 {
            let (ta, tb, accumulate) = (layout & 1 == 1, layout & 2 == 2, layout & 4 == 4);
            let g = Gemm {
                m,
                n,
                k,
                batch,
                ta,
                tb,
                alpha: 0.5,
                accumulate,
            };
            stream += 3;
            let (a, b) = (
                random(batch * m * k, stream),
                random(batch * k * n, stream + 1),
            );
            let start = random(batch * m * n, stream + 2);
            let mut c = start.clone();
            ops.gemm(g, &a, &b, &mut c).unwrap();
            for (at, &c) in c.iter().enumerate() {
                let (z, i, j) = (at / (m * n), at / n % m, at % n);
                let a = |l: usize| a[z * m * k + if ta { l * m + i } else { i * k + l }];
                let b = |l: usize| b[z * k * n + if tb { j * k + l } else { l * n + j }];
                let sum: f64 = (0..k).map(|l| f64::from(a(l)) * f64::from(b(l))).sum();
                let base = if accumulate {
                    f64::from(start[at])
                } else {
                    0.0
                };
                let expected = base + 0.5 * sum;
                assert!(
                    (f64::from(c) - expected).abs() < 1e-4,
                    "{g:?}: {c} for {expected}"
                );
            }
        }
    }
}

#[test]
fn short_buffers_are_refused() {
    let g = Gemm::linear(4, 4, 4);
    let error = CpuOps.gemm(g, &vec![0.0; 16], &vec![0.0; 16], &mut vec![0.0; 15]);
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "gemm: C: expected at least 16 values, found 15");
}

#[test]
fn occurrences_list_rows_by_token() {
    let o = Occurrences::new(&[5, 2, 5, 9, 2, 2]);
    assert_eq!(o.tokens, [2, 5, 9]);
    assert_eq!(o.starts, [0, 3, 5, 6]);
    assert_eq!(o.rows, [1, 4, 5, 0, 2, 3]);
    let empty = Occurrences::new(&[]);
    assert_eq!((empty.tokens.len(), empty.starts), (0, vec![0]));
}

/// Tokens are drawn as often as the softmax says; known tokens stay.
#[test]
fn draws_follow_the_softmax() {
    let (batch, vocab) = (4000, 3);
    let logits: Vec<f32> = [1.0f32, 2.0, 5.0].map(f32::ln).repeat(batch);
    let mut ids = vec![UNKNOWN; batch * 2];
    ids.iter_mut().step_by(2).for_each(|id| *id = 7);
    let draw = Draw {
        batch,
        vocab,
        stride: 2,
        offset: 1,
        seed: 11,
        stream: 0,
    };
    CpuOps.sample(&logits, &mut ids, draw).unwrap();
    let mut counts = [0; 3];
    for pair in ids.chunks(2) {
        assert_eq!(pair[0], 7);
        counts[pair[1] as usize] += 1;
    }
    for (count, share) in counts.into_iter().zip([0.125, 0.25, 0.625]) {
        let expected = share * batch as f64;
        let deviation = (expected * (1.0 - share)).sqrt();
        assert!(
            (f64::from(count) - expected).abs() < 4.0 * deviation,
            "{counts:?}"
        );
    }
    let mut known = vec![1, 2];
    CpuOps
        .sample(&logits, &mut known, Draw { batch: 1, ..draw })
        .unwrap();
    assert_eq!(known, [1, 2]);
}

#[test]
fn adam_by_hand() {
    let step = Adam {
        rate: 0.1,
        beta1: 0.5,
        beta2: 0.75,
        correction1: 0.5,
        correction2: 0.25,
        epsilon: 0.0,
    };
    let (mut value, mut mean, mut square) = (vec![1.0], vec![0.0], vec![0.0]);
    let mut grad = vec![4.0];
    CpuOps
        .adam(step, &mut value, &mut mean, &mut square, &mut grad, 1)
        .unwrap();
    // The first step moves by the rate against the gradient's sign.
    assert_eq!(
        (value[0], mean[0], square[0], grad[0]),
        (0.9, 2.0, 4.0, 0.0)
    );
}

#[test]
fn divergence_of_two_coins() {
    let half = vec![0.0, 0.0];
    let mut biased = vec![3f32.ln(), 0.0]; // 3/4, 1/4
    let mut loss = vec![0.0];
    CpuOps
        .kl_divergence(&half, &mut biased, &mut loss, Dims::new(1, 2), 2.0)
        .unwrap();
    let expected = 0.5 * (0.5f32 / 0.75).ln() + 0.5 * (0.5f32 / 0.25).ln();
    assert!((loss[0] - expected).abs() < 1e-6);
    assert!((biased[0] - 0.5).abs() < 1e-6 && (biased[1] + 0.5).abs() < 1e-6);
}

#[test]
fn operands_of_roundings_are_checked() {
    let shape = Rounding {
        rows: 2,
        cols: 8,
        group: 4,
        max_code: 15,
    };
    let (latent, scales) = (random(16, 1), vec![1.0; 4]);
    for (zeros, fits) in [(4, true), (3, false)] {
        let zeros = vec![8.0; zeros];
        let (mut w, mut dlatent, mut dscales) = (vec![0.0; 16], vec![0.0; 16], vec![0.0; 4]);
        let codes = vec![3; 16];
        let outcomes = [
            CpuOps.round(shape, &latent, &scales, &zeros, &mut w),
            CpuOps.round_grad(
                shape,
                &latent,
                &scales,
                &zeros,
                &latent,
                &mut dlatent,
                &mut dscales,
            ),
            CpuOps.dequantize(shape, &codes, &scales, &zeros, &mut w),
            CpuOps.dequantize_grad(shape, &codes, &zeros, &latent, &mut dscales),
        ];
        for outcome in outcomes {
            match outcome {
                Ok(()) => assert!(fits),
                Err(e) => assert!(!fits && e.to_string().contains("zeros"), "{e}"),
            }
        }
    }
}

/// The operands of a gated DeltaNet over `batch` sequences of `seq` tokens.
fn delta_inputs<'a>(
    shape: &DeltaShape,
    w: &'a Vectors,
    batch: usize,
    seq: usize,
    [qkvz, ba]: &'a [Vec<f32>; 2],
) -> DeltaInputs<'a, Vec<f32>> {
    DeltaInputs {
        shape: *shape,
        batch,
        seq,
        qkvz,
        ba,
        conv: &w.conv,
        decay: &w.decay,
        dt_bias: &w.dt_bias,
        norm: &w.norm,
        eps: EPS,
    }
}

/// Two sequences of `seq` tokens, one behind the other.
fn two_sequences(shape: &DeltaShape, seq: usize) -> [Vec<f32>; 2] {
    let [mut first, second] = [1, 2].map(|seed| rows(shape, seq, seed));
    for (to, from) in first.iter_mut().zip(second) {
        to.extend(from);
    }
    first
}

/// Gated DeltaNet over whole sequences, compared with its formulas in f64.
#[test]
fn whole_sequences_are_those_of_the_formulas() {
    for shape in shapes() {
        let (w, seq) = (vectors(&shape), 19);
        let sequences = [1, 2].map(|seed| rows(&shape, seq, seed));
        let both = two_sequences(&shape, seq);
        let mut out = vec![0.0; 2 * seq * shape.values()];
        let inputs = delta_inputs(&shape, &w, 2, seq, &both);
        let mut work = DeltaWork::new(&CpuOps, &shape, (2, seq)).unwrap();
        CpuOps.delta(inputs, &mut work, &mut out).unwrap();
        let halves = out.chunks(seq * shape.values());
        for (found, sequence) in halves.zip(&sequences) {
            let e = nmse(found, &reference(&shape, &w, sequence));
            assert!(e < 1e-10, "{shape:?}: {e:e}");
        }
    }
}

/// Tokens one by one are those of whole sequences, also where the states' places were used before.
#[test]
fn recurrences_go_on_token_by_token() {
    for shape in shapes() {
        let (w, seq, layer) = (vectors(&shape), 7, 1);
        let both = two_sequences(&shape, seq);
        let mut whole = vec![0.0; 2 * seq * shape.values()];
        let inputs = delta_inputs(&shape, &w, 2, seq, &both);
        let mut work = DeltaWork::new(&CpuOps, &shape, (2, seq)).unwrap();
        CpuOps.delta(inputs, &mut work, &mut whole).unwrap();
        let mut states = CpuOps.states(shape, 2, 3).unwrap();
        for _ in 0..2 {
            for position in 0..seq {
                let of_token = |values: &[f32], width: usize| {
                    let row = |i: usize| &values[(i * seq + position) * width..][..width];
                    [row(0), row(1)].concat()
                };
                let token = [
                    of_token(&both[0], shape.stride()),
                    of_token(&both[1], 2 * shape.value_heads),
                ];
                let inputs = delta_inputs(&shape, &w, 2, 1, &token);
                let at = DeltaStepAt { layer, position };
                let mut out = vec![0.0; 2 * shape.values()];
                CpuOps
                    .delta_step(inputs, &mut states, at, &mut out)
                    .unwrap();
                assert_eq!(out, of_token(&whole, shape.values()), "{shape:?}");
            }
        }
    }
}

/// Gradients of a recurrence along random directions, compared with differences of its formulas in f64.
#[test]
fn gradients_of_recurrences_are_those_of_the_formulas() {
    for shape in shapes() {
        // Beyond one state that the backward keeps.
        let seq = if shape.value_dim < 64 { 37 } else { 5 };
        let w = vectors(&shape);
        let both = two_sequences(&shape, seq);
        let dout = random(2 * seq * shape.values(), 8);
        let (mut qkvz, mut ba) = (vec![f32::NAN; both[0].len()], vec![f32::NAN; both[1].len()]);
        let mut work = DeltaWork::new(&CpuOps, &shape, (2, seq)).unwrap();
        let mut own = DeltaGradWork::new(&CpuOps, &shape, (2, seq)).unwrap();
        let inputs = delta_inputs(&shape, &w, 2, seq, &both);
        let to = DeltaGrads {
            qkvz: &mut qkvz,
            ba: &mut ba,
        };
        CpuOps
            .delta_grad(inputs, (&mut work, &mut own), &dout, to)
            .unwrap();
        // The sum of the outputs times `dout`, of both sequences.
        let value = |moved: &[Vec<f32>; 2]| -> f64 {
            let of_sequence = |i: usize| {
                let half = |v: &Vec<f32>| v[i * v.len() / 2..(i + 1) * v.len() / 2].to_vec();
                let out = reference(&shape, &w, &[half(&moved[0]), half(&moved[1])]);
                let weights = &dout[i * out.len()..];
                let products = out.iter().zip(weights);
                products
                    .map(|(o, d)| f64::from(*o) * f64::from(*d))
                    .sum::<f64>()
            };
            of_sequence(0) + of_sequence(1)
        };
        for (part, gradient) in [(0, &qkvz), (1, &ba)] {
            // Mostly along the gradient, so that the sum does not cancel.
            let mut rng = Philox::new(6, part as u64);
            let direction: Vec<f32> = (gradient.iter())
                .map(|g| {
                    if rng.uniform() < 0.8 {
                        g.signum()
                    } else {
                        -g.signum()
                    }
                })
                .collect();
            let side = |by: f32| {
                let mut moved = both.clone();
                let values = moved[part].iter_mut().zip(&direction);
                values.for_each(|(v, d)| *v += by * d);
                (value(&moved), moved)
            };
            let ((up, above), (down, below)) = (side(1e-3), side(-1e-3));
            let moves = above[part].iter().zip(&below[part]).zip(gradient);
            let expected: f64 = moves.map(|((a, b), g)| f64::from((a - b) * g)).sum();
            let error = (up - down - expected).abs() / expected.abs().max(1e-3);
            assert!(
                error < 1e-2,
                "{shape:?}, part {part}: {} for {expected}",
                up - down
            );
        }
    }
}
