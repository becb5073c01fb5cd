//! The CPU's operations compared with plain sums.

use super::*;
use nq_kernels::grad::*;
use nq_kernels::rng::Philox;
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::delta::{EPS, reference, rows, shapes, vectors};

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

/// Gated DeltaNet over whole sequences, compared with its formulas in f64.
#[test]
fn whole_sequences_are_those_of_the_formulas() {
    for shape in shapes() {
        let (w, seq) = (vectors(&shape), 19);
        let sequences = [1, 2].map(|seed| rows(&shape, seq, seed));
        let both = |part: usize| [&sequences[0][part][..], &sequences[1][part][..]].concat();
        let mut out = vec![0.0; 2 * seq * shape.values()];
        let inputs = DeltaInputs {
            shape,
            batch: 2,
            seq,
            qkvz: &both(0),
            ba: &both(1),
            conv: &w.conv,
            decay: &w.decay,
            dt_bias: &w.dt_bias,
            norm: &w.norm,
            eps: EPS,
        };
        let mut work = DeltaWork::new(&CpuOps, &shape, (2, seq)).unwrap();
        CpuOps.delta(inputs, &mut work, &mut out).unwrap();
        let halves = out.chunks(seq * shape.values());
        for (found, sequence) in halves.zip(&sequences) {
            let e = nmse(found, &reference(&shape, &w, sequence));
            assert!(e < 1e-10, "{shape:?}: {e:e}");
        }
    }
}
