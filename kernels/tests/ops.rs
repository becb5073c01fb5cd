//! Norms, rotary embedding, attention and the cache against the reference, on every
//! instruction set.

mod common;

use common::{Guarded, cpu, isas, nmse, normal};
use nq_kernels::cpu::{KvBlock, KvType, Span};
use nq_kernels::reference;

#[test]
fn rms_norm() {
    for isa in isas() {
        for (m, n) in [(1, 1), (3, 7), (2, 16), (5, 100), (1, 1024), (33, 2560)] {
            let (x, w) = (normal(m * n, 1), normal(n, 2));
            let mut expected = vec![0.0; m * n];
            reference::rms_norm(&x, &w, 1e-6, &mut expected);
            for threads in [1, 2] {
                let mut y = Guarded::new(&vec![f32::NAN; m * n]);
                cpu(isa, threads).rms_norm(&x, &w, 1e-6, y.values());
                let error = nmse(&y.finish(), &expected);
                assert!(error < 1e-13, "[{m}, {n}] {isa}: {error:e}");
            }
        }
    }
}

#[test]
fn qk_norm_rope() {
    for isa in isas() {
        for (m, heads, d) in [(1, 2, 128), (5, 3, 64), (40, 4, 128), (3, 1, 10)] {
            let (start, stride) = (d, (heads + 3) * d);
            let x = normal(m * stride, 1);
            let w = normal(d, 2);
            let table: Vec<(f32, f32)> = (0..50 * d / 2)
                .map(|i| ((i as f32 * 0.1).cos(), (i as f32 * 0.1).sin()))
                .collect();
            let positions: Vec<usize> = (0..m).map(|i| (i * 17 + 3) % 50).collect();
            let mut expected = x.clone();
            for (row, &p) in expected.chunks_exact_mut(stride).zip(&positions) {
                for head in row[start..start + heads * d].chunks_exact_mut(d) {
                    let mut normed = vec![0.0; d];
                    reference::rms_norm(head, &w, 1e-6, &mut normed);
                    reference::rope(&mut normed, &table[p * (d / 2)..(p + 1) * (d / 2)]);
                    head.copy_from_slice(&normed);
                }
            }
            let mut y = x.clone();
            cpu(isa, 2).qk_norm_rope(&mut y, stride, start, heads, &w, 1e-6, &table, &positions);
            assert!(nmse(&y, &expected) < 1e-13, "d={d} {isa}");
            // What lies outside the heads is untouched.
            for (y, x) in y.chunks_exact(stride).zip(x.chunks_exact(stride)) {
                assert_eq!(y[..start], x[..start]);
                assert_eq!(y[start + heads * d..], x[start + heads * d..]);
            }
        }
    }
}

struct Case {
    kind: KvType,
    heads: usize,
    kv_heads: usize,
    d: usize,
    /// Tokens in the cache before the span.
    position: usize,
    len: usize,
}

fn attention_case(case: &Case) {
    let &Case {
        kind,
        heads,
        kv_heads,
        d,
        position,
        len,
    } = case;
    let total = position + len;
    let capacity = total + 3;
    let mut keys = KvBlock::new(kind, kv_heads, capacity, d);
    let mut values = KvBlock::new(kind, kv_heads, capacity, d);
    let (k, v) = (
        normal(kv_heads * total * d, 1),
        normal(kv_heads * total * d, 2),
    );
    for head in 0..kv_heads {
        for p in 0..total {
            let at = (head * total + p) * d;
            keys.store(head, p, &k[at..at + d]);
            values.store(head, p, &v[at..at + d]);
        }
    }
    // The batch holds another row before the span and one after it.
    let row = 1;
    let stride = (heads + 2 * kv_heads) * d;
    let m = len + 2;
    let qkv: Vec<f32> = normal(m * stride, 3).iter().map(|q| q * 2.0).collect();
    let width = heads * d;
    let mut expected = vec![0.0; len * width];
    let (mut kh, mut vh) = (vec![0.0; total * d], vec![0.0; total * d]);
    for head in 0..kv_heads {
        for p in 0..total {
            keys.load(head, p, &mut kh[p * d..(p + 1) * d]);
            values.load(head, p, &mut vh[p * d..(p + 1) * d]);
        }
        let group = heads / kv_heads;
        for r in 0..len {
            let seen = (position + r + 1) * d;
            for h in head * group..(head + 1) * group {
                let q = &qkv[(row + r) * stride + h * d..][..d];
                let y = &mut expected[r * width + h * d..][..d];
                reference::attend(q, &kh[..seen], &vh[..seen], y);
            }
        }
    }
    let span = Span { row, len, position };
    for isa in isas() {
        let mut results = Vec::new();
        for threads in [1, 2, 3] {
            let mut y = Guarded::new(&vec![7.0; m * width]);
            cpu(isa, threads).attention(&qkv, stride, span, heads, d, &keys, &values, y.values());
            results.push(y.finish());
        }
        assert!(results.iter().all(|r| r == &results[0]));
        let y = &results[0];
        let error = nmse(&y[width..(1 + len) * width], &expected);
        assert!(
            error < 2e-12,
            "{kind} heads {heads}/{kv_heads} d={d} position {position} len {len} {isa}: {error:e}"
        );
        let outside = y[..width].iter().chain(&y[(1 + len) * width..]);
        assert!(outside.into_iter().all(|&v| v == 7.0));
    }
}

#[test]
fn attention() {
    let lengths = [
        (0, 1),
        (5, 1),
        (255, 1),
        (256, 1),
        (700, 1),
        (0, 2),
        (0, 33),
        (63, 17),
        (130, 70),
    ];
    for kind in [KvType::F32, KvType::F16, KvType::Int8] {
        for (heads, kv_heads, d) in [(2, 2, 128), (4, 2, 64), (8, 2, 16), (8, 1, 32)] {
            for (position, len) in lengths {
                attention_case(&Case {
                    kind,
                    heads,
                    kv_heads,
                    d,
                    position,
                    len,
                });
            }
        }
        // Widths that do not fill vectors, and heads longer than a tile's row.
        for d in [8, 20, 144, 256] {
            for (position, len) in [(0, 1), (70, 1), (40, 30)] {
                attention_case(&Case {
                    kind,
                    heads: 3,
                    kv_heads: 1,
                    d,
                    position,
                    len,
                });
            }
        }
    }
}

/// Scores far apart: the running maximum must keep exponentials in range.
#[test]
fn attention_with_extreme_scores() {
    let (d, n) = (16, 300);
    let mut keys = KvBlock::new(KvType::F32, 1, n, d);
    let mut values = KvBlock::new(KvType::F32, 1, n, d);
    let k: Vec<f32> = normal(n * d, 1).iter().map(|k| k * 60.0).collect();
    let v = normal(n * d, 2);
    for p in 0..n {
        keys.store(0, p, &k[p * d..(p + 1) * d]);
        values.store(0, p, &v[p * d..(p + 1) * d]);
    }
    for (position, len) in [(n - 1, 1), (n - 20, 20)] {
        let q: Vec<f32> = normal(len * d, 3).iter().map(|q| q * 60.0).collect();
        let mut expected = vec![0.0; len * d];
        for r in 0..len {
            let seen = (position + r + 1) * d;
            let y = &mut expected[r * d..(r + 1) * d];
            reference::attend(&q[r * d..(r + 1) * d], &k[..seen], &v[..seen], y);
        }
        for isa in isas() {
            let span = Span {
                row: 0,
                len,
                position,
            };
            let mut y = vec![0.0; len * d];
            cpu(isa, 2).attention(&q, d, span, 1, d, &keys, &values, &mut y);
            // Scores of some 10^4 carry an absolute error of 10^-3 in f32.
            let error = nmse(&y, &expected);
            assert!(error < 1e-5, "{isa}: {error:e}");
        }
    }
}

/// A query, key or value that is no number makes the outputs that see it no numbers, for one query
/// and for many, whatever the instruction set: figures of a broken model must not look sound.
#[test]
#[ignore = "attention drops a NaN score: exp(NaN) is 0 in `soften` and `fold` of cpu/ops/attention.rs"]
fn attention_propagates_what_is_no_number() {
    let (d, n, bad) = (16, 300, 37);
    for (place, value) in [
        ("q", f32::NAN),
        ("k", f32::NAN),
        ("k", f32::INFINITY),
        ("v", f32::NAN),
    ] {
        for (position, len) in [(n - 1, 1), (n - 20, 20), (20, 40)] {
            let (mut q, mut k, mut v) = (normal(len * d, 3), normal(n * d, 1), normal(n * d, 2));
            match place {
                "q" => q.iter_mut().step_by(d).for_each(|q| *q = value),
                "k" => k[bad * d] = value,
                _ => v[bad * d] = value,
            }
            let mut keys = KvBlock::new(KvType::F32, 1, n, d);
            let mut values = KvBlock::new(KvType::F32, 1, n, d);
            for p in 0..n {
                keys.store(0, p, &k[p * d..(p + 1) * d]);
                values.store(0, p, &v[p * d..(p + 1) * d]);
            }
            for isa in isas() {
                let span = Span {
                    row: 0,
                    len,
                    position,
                };
                let mut y = vec![0.0; len * d];
                cpu(isa, 2).attention(&q, d, span, 1, d, &keys, &values, &mut y);
                for (r, y) in y.chunks_exact(d).enumerate() {
                    let sees = place == "q" || position + r >= bad;
                    // Infinity makes an infinite score, NaN after its maximum is taken from it, or
                    // one that is negligible: which, is the query's sign.
                    let surely = sees && (value.is_nan() || q[r * d] > 0.0);
                    let case = format!("{place} {value} {isa} {position} row {r}: {y:?}");
                    if surely {
                        assert!(!y[0].is_finite(), "{case}");
                    } else if !sees {
                        assert!(y.iter().all(|v| v.is_finite()), "{case}");
                    }
                }
            }
        }
    }
}

/// A batch gives the bits of its sequences one by one, whether few enough to share each out or
/// many enough to share them out whole.
#[test]
fn attention_of_a_batch() {
    let (heads, kv_heads, d) = (4, 2, 32);
    let stride = (heads + 2 * kv_heads) * d;
    for lengths in [vec![1], vec![3, 1], vec![1; 9], vec![2, 1, 5, 1, 1, 33, 1]] {
        let mut spans = Vec::new();
        let mut row = 1;
        for (i, &len) in lengths.iter().enumerate() {
            let position = 70 * i % 300;
            spans.push(Span { row, len, position });
            row += len + i % 2;
        }
        let caches: Vec<[KvBlock; 2]> = (0..spans.len() as u64)
            .map(|i| {
                [i, i + 100].map(|seed| {
                    let mut block = KvBlock::new(KvType::F16, kv_heads, 340, d);
                    let x = normal(kv_heads * 340 * d, seed);
                    for (i, x) in x.chunks_exact(d).enumerate() {
                        block.store(i / 340, i % 340, x);
                    }
                    block
                })
            })
            .collect();
        let qkv = normal(row * stride, 7);
        for isa in isas() {
            let cpu = cpu(isa, 2);
            let mut one_by_one = vec![f32::NAN; row * heads * d];
            let mut together = one_by_one.clone();
            for (&span, [k, v]) in spans.iter().zip(&caches) {
                cpu.attention(&qkv, stride, span, heads, d, k, v, &mut one_by_one);
            }
            let cache = |i: usize| (&caches[i][0], &caches[i][1]);
            cpu.attention_batch(&qkv, stride, &spans, heads, d, cache, &mut together);
            let bits = |y: &[f32]| y.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&one_by_one) == bits(&together), "{isa}, {lengths:?}");
        }
    }
}

#[test]
fn profile_counts_only_while_on() {
    let cpu = nq_kernels::cpu::Cpu::new(Some(2), nq_kernels::cpu::IsaChoice::Auto).unwrap();
    let (x, w) = (normal(64, 1), normal(16, 2));
    let mut y = vec![0.0; 64];
    cpu.rms_norm(&x, &w, 1e-6, &mut y);
    cpu.profile().start();
    cpu.rms_norm(&x, &w, 1e-6, &mut y);
    cpu.rms_norm(&x, &w, 1e-6, &mut y);
    let timings = cpu.profile().stop();
    cpu.rms_norm(&x, &w, 1e-6, &mut y);
    assert_eq!(timings.len(), 1);
    let t = &timings[0];
    assert_eq!((t.op, t.calls, t.shape), ("rms_norm", 2, (1, 16)));
    assert_eq!(t.bytes, 2 * 4 * 64);
    assert!(t.seconds > 0.0);
    assert!(cpu.profile().stop().is_empty());
}

#[test]
fn bandwidth_is_positive_and_ordered() {
    for isa in isas() {
        let cpu = cpu(isa, 2);
        let b = cpu.read_bandwidth(&cpu.bandwidth_buffer(5 << 20));
        assert_eq!(b.bytes, 5 << 20);
        assert!(b.median > 1e6 && b.best >= b.median && b.best.is_finite());
    }
}
