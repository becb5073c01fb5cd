//! Norms, rotary embedding, attention and the cache compared with the reference, on every
//! instruction set.

use crate::common::{Guarded, cpu, isas};
use nq_cpu::{KvPages, KvSequence, Span};
use nq_kernels::pages::{KvType, PAGE};
use nq_kernels::{Isa, reference};
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;

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
fn turn_heads() {
    let shapes = [(1, 2, 128), (5, 3, 64), (40, 4, 128), (3, 1, 10)];
    for isa in isas() {
        for ((m, heads, d), norm) in shapes.into_iter().flat_map(|s| [(s, true), (s, false)]) {
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
                    let mut normed = head.to_vec();
                    if norm {
                        reference::rms_norm(head, &w, 1e-6, &mut normed);
                    }
                    reference::rope(&mut normed, &table[p * (d / 2)..(p + 1) * (d / 2)]);
                    head.copy_from_slice(&normed);
                }
            }
            let mut y = x.clone();
            let gains = (norm.then_some(&w[..]), 1e-6);
            cpu(isa, 2).turn_heads(
                &mut y,
                stride,
                (start, heads, d),
                gains,
                (&table, d / 2),
                &positions,
            );
            assert!(nmse(&y, &expected) < 1e-13, "d={d} {isa}");
            // Values outside the heads are not changed.
            for (y, x) in y.chunks_exact(stride).zip(x.chunks_exact(stride)) {
                assert_eq!(y[..start], x[..start]);
                assert_eq!(y[start + heads * d..], x[start + heads * d..]);
            }
        }
    }
}

/// `keys` and `values` `[kv_heads, total, d]` in pages that are in reverse order among others, and
/// the sequence's page table.
fn paged(
    kind: KvType,
    kv_heads: usize,
    d: usize,
    [keys, values]: [&[f32]; 2],
) -> (KvPages, Vec<u32>) {
    let total = keys.len() / (kv_heads * d);
    let needed = total.div_ceil(PAGE);
    let mut pages = KvPages::new(kind, 2 * needed + 1, kv_heads, d);
    let table: Vec<u32> = (0..needed).rev().map(|i| 2 * i as u32 + 1).collect();
    for p in 0..total {
        let row = |x: &[f32]| -> Vec<f32> {
            (0..kv_heads)
                .flat_map(|h| x[(h * total + p) * d..][..d].to_vec())
                .collect()
        };
        pages.store(table[p / PAGE], p % PAGE, &row(keys), &row(values));
    }
    (pages, table)
}

struct Case {
    kind: KvType,
    heads: usize,
    kv_heads: usize,
    d: usize,
    /// Number of tokens in the cache before the span.
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
    let (k, v) = (
        normal(kv_heads * total * d, 1),
        normal(kv_heads * total * d, 2),
    );
    let (pages, table) = paged(kind, kv_heads, d, [&k, &v]);
    let kv = KvSequence::new(&pages, &table);
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
            let at = p * d..(p + 1) * d;
            let (key, value) = (&mut kh[at.clone()], &mut vh[at]);
            pages.load(table[p / PAGE], p % PAGE, head, key, value);
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
            cpu(isa, threads).attention(&qkv, stride, span, heads, d, kv, y.values());
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

/// A row has the bits that it has alone, however many are attended with it, over few positions and many, and for
/// values that are zero or negligible.
#[test]
fn attention_of_rows_is_that_of_each() {
    for (heads, kv_heads, d) in [
        (3, 3, 16),
        (4, 2, 64),
        (6, 2, 128),
        (8, 2, 48),
        (5, 1, 20),
        (2, 1, 144),
    ] {
        let total = 600;
        let mut k = normal(kv_heads * total * d, 1);
        let mut v = normal(kv_heads * total * d, 2);
        // Weights that vanish, and outputs that are exactly or nearly zero.
        k.iter_mut().step_by(7).for_each(|k| *k *= 9.0);
        v.chunks_exact_mut(d)
            .for_each(|v| (v[0], v[1]) = (-0.0, v[1] * 1e-38));
        let stride = heads * d;
        let qkv = normal(total * stride, 3);
        for kind in [KvType::F32, KvType::F16, KvType::Int8] {
            let (pages, table) = paged(kind, kv_heads, d, [&k, &v]);
            let kv = KvSequence::new(&pages, &table);
            for isa in isas() {
                let cpu = cpu(isa, 2);
                let rows = |position: usize, len: usize| {
                    let span = Span {
                        row: 0,
                        len,
                        position,
                    };
                    let q = &qkv[position * stride..];
                    let mut y = vec![f32::NAN; len * stride];
                    cpu.attention(q, stride, span, heads, d, kv, &mut y);
                    y.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                };
                let alone: Vec<u32> = (0..total).flat_map(|position| rows(position, 1)).collect();
                for (position, len) in (1..=33).map(|len| (17 * len - 17, len)).chain([
                    (0, total),
                    (250, 9),
                    (255, 2),
                    (200, 300),
                ]) {
                    let same = rows(position, len) == alone[position * stride..][..len * stride];
                    assert!(
                        same,
                        "{kind} {heads}/{kv_heads} d={d} {isa}: {len} rows from {position}"
                    );
                }
            }
        }
    }
}

/// Scores far apart: the running maximum must keep exponentials in range.
#[test]
fn attention_with_extreme_scores() {
    let (d, n) = (16, 300);
    let k: Vec<f32> = normal(n * d, 1).iter().map(|k| k * 60.0).collect();
    let v = normal(n * d, 2);
    let (pages, table) = paged(KvType::F32, 1, d, [&k, &v]);
    let kv = KvSequence::new(&pages, &table);
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
            cpu(isa, 2).attention(&q, d, span, 1, d, kv, &mut y);
            // Scores of some 10^4 have an absolute error of 10^-3 in f32.
            let error = nmse(&y, &expected);
            assert!(error < 1e-5, "{isa}: {error:e}");
        }
    }
}

/// A batch gives the bits of its sequences one by one, whether they are few enough to split each or
/// many enough to make each one task.
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
        let caches: Vec<(KvPages, Vec<u32>)> = (0..spans.len() as u64)
            .map(|i| {
                let [k, v] = [i, i + 100].map(|seed| normal(kv_heads * 340 * d, seed));
                paged(KvType::F16, kv_heads, d, [&k, &v])
            })
            .collect();
        let kv = |i: usize| KvSequence::new(&caches[i].0, &caches[i].1);
        let qkv = normal(row * stride, 7);
        for isa in isas() {
            let cpu = cpu(isa, 2);
            let mut one_by_one = vec![f32::NAN; row * heads * d];
            let mut together = one_by_one.clone();
            for (i, &span) in spans.iter().enumerate() {
                cpu.attention(&qkv, stride, span, heads, d, kv(i), &mut one_by_one);
            }
            cpu.attention_batch(&qkv, stride, &spans, heads, d, kv, &mut together);
            let bits = |y: &[f32]| y.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&one_by_one) == bits(&together), "{isa}, {lengths:?}");
        }
    }
}

/// A NaN in a query, a key or a value reaches the outputs of the rows that see it, for every
/// instruction set and type of cache.
#[test]
fn attention_keeps_what_is_not_a_number() {
    let (d, total) = (32, 300);
    for kind in [KvType::F32, KvType::F16, KvType::Int8] {
        for (place, (position, len)) in
            (0..3).flat_map(|p| [(p, (total - 1, 1)), (p, (total - 5, 5))])
        {
            let mut q = normal(len * d, 3);
            let (mut k, mut v) = (normal(total * d, 1), normal(total * d, 2));
            match place {
                0 => q[(len - 1) * d + 3] = f32::NAN,
                1 => k[(total - 200) * d + 5] = f32::NAN,
                _ => v[7 * d + 1] = f32::NAN,
            }
            let (pages, table) = paged(kind, 1, d, [&k, &v]);
            let span = Span {
                row: 0,
                len,
                position,
            };
            for isa in isas() {
                let mut y = vec![0.0; len * d];
                let kv = KvSequence::new(&pages, &table);
                cpu(isa, 2).attention(&q, d, span, 1, d, kv, &mut y);
                let last = &y[(len - 1) * d..];
                assert!(
                    last.iter().any(|v| v.is_nan()),
                    "{kind} {isa}: place {place}, {len} rows"
                );
            }
        }
    }
}

/// Copied rows are those of the original page, and rows past them are not changed.
#[test]
fn pages_are_copied_by_rows() {
    let (kv_heads, d) = (3, 16);
    for kind in [KvType::F32, KvType::F16, KvType::Int8] {
        let mut pages = KvPages::new(kind, 4, kv_heads, d);
        let row = |seed| normal(kv_heads * d, seed);
        for at in 0..PAGE {
            pages.store(1, at, &row(at as u64), &row(1000 + at as u64));
            pages.store(3, at, &row(2000 + at as u64), &row(3000 + at as u64));
        }
        let read = |pages: &KvPages, page, at, head| {
            let (mut k, mut v) = (vec![0.0; d], vec![0.0; d]);
            pages.load(page, at, head, &mut k, &mut v);
            (k, v)
        };
        let before = pages.clone();
        pages.copy_rows(1, 3, 77);
        for (at, head) in (0..PAGE).flat_map(|at| (0..kv_heads).map(move |h| (at, h))) {
            let from = if at < 77 { 1 } else { 3 };
            assert_eq!(
                read(&pages, 3, at, head),
                read(&before, from, at, head),
                "{kind}"
            );
            assert_eq!(
                read(&pages, 1, at, head),
                read(&before, 1, at, head),
                "{kind}"
            );
        }
    }
}

#[test]
fn profile_counts_only_while_on() {
    let cpu = nq_cpu::Cpu::new(Some(2), nq_kernels::IsaChoice::Auto).unwrap();
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
    assert_eq!((t.op, t.calls, t.shape), ("rms_norm", 2, Dims::new(1, 16)));
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

/// Sizes whose product wraps would make a pool smaller than it says.
#[test]
#[should_panic = "fit the address space"]
fn pools_are_as_large_as_they_say() {
    let _ = KvPages::new(KvType::F32, (1 << 57) + 1, 1, 64);
}

/// What is checked is what is read: a closure is asked once for each sequence.
#[test]
fn sequences_are_asked_for_once() {
    let (small, wide) = (
        KvPages::new(KvType::F32, 1, 1, 64),
        KvPages::new(KvType::F32, 1, 1, 1 << 12),
    );
    let (table, asked) = ([0], std::sync::atomic::AtomicUsize::new(0));
    let kv = |_: usize| {
        let first = asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
        KvSequence::new(if first { &small } else { &wide }, &table)
    };
    let (q, mut y) = (vec![1.0; 64], vec![f32::NAN; 64]);
    let span = Span {
        row: 0,
        len: 1,
        position: 0,
    };
    cpu(Isa::Scalar, 1).attention_batch(&q, 64, &[span], 1, 64, kv, &mut y);
    assert_eq!(asked.into_inner(), 1);
    assert_eq!(y, [0.0; 64]);
}

/// Positions that wrap are past the capacity.
#[test]
#[should_panic]
fn positions_do_not_wrap() {
    let pages = KvPages::new(KvType::F32, 1, 1, 64);
    let (q, mut y) = (vec![1.0; 64 * 64], vec![0.0; 64 * 64]);
    let span = Span {
        row: 0,
        len: 64,
        position: usize::MAX - 32,
    };
    let kv = KvSequence::new(&pages, &[0]);
    cpu(Isa::Scalar, 1).attention(&q, 64, span, 1, 64, kv, &mut y);
}
