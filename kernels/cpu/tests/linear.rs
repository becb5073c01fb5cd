//! Every Linear kernel in the CPU's registry compared with the reference.

use crate::common::{Guarded, cpu, isas};
use nq_cpu::linear::kernels::KERNELS;
use nq_cpu::{Epilogue, Linear};
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Group, GroupValues, Levels, Parts, QuantizedWeight, Weight,
    Zeros,
};
use nq_kernels::registry::{Activations, KernelSet, WeightKind};
use nq_kernels::{Isa, reference};
use nq_model::{DType, Dims};
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, dense, held_as_others, normal, schemes, shuffled_groups};

const ROWS: [usize; 7] = [1, 2, 3, 8, 16, 17, 33];
const GROUPS: [Group; 5] = [
    Group::Size(16),
    Group::Size(32),
    Group::Size(64),
    Group::Size(128),
    Group::Channel,
];
/// Activations for quantized weights, then bf16.
const ACTIVATIONS: [Activations; 9] = [
    Activations::F32,
    Activations::Int8 { group: 16 },
    Activations::Int8 { group: 32 },
    Activations::Int8 { group: 64 },
    Activations::Int8 { group: 128 },
    Activations::Int16 { group: 16 },
    Activations::Int16 { group: 32 },
    Activations::Int16 { group: 128 },
    Activations::Bf16,
];
/// f32 sums of up to 3072 products or of exact integer dot products; offsets may cancel
/// most of a weight.
const BOUND: f64 = 1e-11;

/// The values that the kernel's activations represent: rounded in the order in which the weight's
/// groups take them.
fn seen(x: &[f32], w: &Weight, activations: Activations) -> Vec<f32> {
    let k = w.dims().cols;
    let mut seen = x.to_vec();
    let Weight::Quantized(QuantizedWeight::Affine(a)) = w else {
        reference::round_activations(&mut seen, k, activations);
        return seen;
    };
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by_key(|&i| a.group_of(i));
    for row in seen.chunks_exact_mut(k) {
        let mut sorted: Vec<f32> = order.iter().map(|&i| row[i]).collect();
        reference::round_activations(&mut sorted, k, activations);
        for (&i, v) in order.iter().zip(sorted) {
            row[i] = v;
        }
    }
    seen
}

/// Runs one case on an instruction set with 1, 2 and 3 threads, twice each, and compares
/// outputs `rows` with the reference.
fn check(isa: Isa, w: &Weight, activations: Activations, m: usize, rows: &[usize]) {
    let (out, inp) = w.dims().pair();
    let x = normal(m * inp, (out * 31 + inp * 7 + m) as u64);
    let describe = || {
        format!(
            "{} [{out}, {inp}] {activations} m={m} {isa}",
            w.scheme_name()
        )
    };
    let mut results = Vec::new();
    for threads in [1, 2, 3] {
        let cpu = cpu(isa, threads);
        let linear = Linear::new(cpu, &[w], activations, KernelSet::Fused).unwrap();
        let mut guarded = Guarded::new(&vec![f32::NAN; m * out]);
        cpu.linear(&linear, &x, guarded.values(), Epilogue::Store)
            .unwrap();
        results.push(guarded.finish());
        let mut again = vec![0.0; m * out];
        cpu.linear(&linear, &x, &mut again, Epilogue::Store)
            .unwrap();
        results.push(again);
    }
    for other in &results[1..] {
        let same = other
            .iter()
            .zip(&results[0])
            .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(
            same,
            "{}: not the same on each run and thread count",
            describe()
        );
    }
    let x = seen(&x, w, activations);
    let mut row = vec![0.0; inp];
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    for &r in rows {
        w.dequantize_row(r, &mut row).unwrap();
        for (i, x) in x.chunks_exact(inp).enumerate() {
            expected.push(reference::dot(x, &row));
            found.push(results[0][i * out + r]);
        }
    }
    let error = nmse(&found, &expected);
    assert!(error < BOUND, "{}: NMSE {error:e}", describe());
}

/// Runs `check` for every registry row of `isa` that serves the weight, and returns the
/// number of cases.
fn check_registry(isa: Isa, w: &Weight, rows: &[usize]) -> usize {
    let kernels = || {
        let all = KERNELS.iter().flat_map(|k| k.iter());
        all.filter(|k| k.isa == isa)
    };
    // In the weight's own table or width if that has kernels for every number of rows.
    let kind = |activations| {
        let kind = WeightKind::of(w);
        let served = |kind: &WeightKind| {
            let serves = |m| kernels().any(|k| k.info.serves(*kind, activations, m));
            ROWS.into_iter().all(serves)
        };
        let own = [kind.in_table(), kind.expanded()].into_iter().find(served);
        own.unwrap_or(kind.held())
    };
    let mut cases = 0;
    for kernel in kernels() {
        for activations in ACTIVATIONS {
            for m in ROWS {
                if kernel.info.serves(kind(activations), activations, m) {
                    let linear = Linear::new(cpu(isa, 1), &[w], activations, KernelSet::Fused);
                    let names = linear.unwrap().kernel_names();
                    assert!(names.contains(&kernel.info.name), "{names:?}");
                    check(isa, w, activations, m, rows);
                    cases += 1;
                }
            }
        }
    }
    cases
}

/// Shapes whose inputs do not fill groups or units and whose outputs do not fill panels.
const EDGES: [(usize, usize); 7] = [
    (1, 1),
    (3, 8),
    (16, 24),
    (17, 64),
    (33, 100),
    (48, 130),
    (70, 257),
];

#[test]
fn dense_edge_shapes() {
    for isa in isas() {
        for (i, &(out, inp)) in EDGES.iter().enumerate() {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let w = dense(dtype, out, inp, i as u64);
                let all: Vec<usize> = (0..out).collect();
                let kinds = if dtype == DType::BF16 { 2 } else { 1 };
                assert_eq!(check_registry(isa, &w, &all), kinds * ROWS.len());
            }
        }
    }
}

#[test]
fn affine_edge_shapes() {
    for isa in isas() {
        for (i, &(out, inp)) in EDGES.iter().enumerate() {
            for scheme in schemes(&GROUPS) {
                let w = affine(scheme, out, inp, None, i as u64);
                let all: Vec<usize> = (0..out).collect();
                let cases = check_registry(isa, &w, &all);
                assert_eq!(cases, ROWS.len() * (ACTIVATIONS.len() - 1), "{scheme}");
            }
        }
    }
}

/// A weight held in another scheme is multiplied by that scheme's kernels.
#[test]
fn schemes_that_are_held_as_others() {
    for isa in isas() {
        for scheme in [32, 64]
            .map(Group::Size)
            .into_iter()
            .flat_map(held_as_others)
        {
            let w = affine(scheme, 33, 192, None, 7);
            let all: Vec<usize> = (0..33).collect();
            let cases = check_registry(isa, &w, &all);
            assert_eq!(cases, ROWS.len() * (ACTIVATIONS.len() - 1), "{scheme}");
        }
    }
}

#[test]
fn activation_order() {
    for isa in isas() {
        for (out, inp, group) in [(17, 64, 32), (33, 192, 64), (20, 100, 32), (5, 40, 16)] {
            for scheme in schemes(&[Group::Size(group)]) {
                let g_idx = shuffled_groups(inp, group as usize, 3);
                let w = affine(scheme, out, inp, Some(g_idx), 5);
                let all: Vec<usize> = (0..out).collect();
                check_registry(isa, &w, &all);
            }
        }
        // Empty, too small and too large groups.
        let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
        let g_idx = (0..100).map(|i| if i % 7 == 0 { 3 } else { 1 }).collect();
        let w = affine(scheme, 20, 100, Some(g_idx), 6);
        for m in ROWS {
            check(isa, &w, Activations::F32, m, &(0..20).collect::<Vec<_>>());
        }
    }
}

/// Every row of some has the bits that it has alone, for every kind of weight and of activations.
#[test]
fn rows_do_not_depend_on_their_number() {
    let (out, inp) = (57, 272);
    let groups = [Group::Size(16), Group::Size(32), Group::Channel];
    let mut weights: Vec<Weight> = [DType::F32, DType::F16, DType::BF16]
        .map(|dtype| dense(dtype, out, inp, 3))
        .into();
    let others = groups.into_iter().flat_map(held_as_others);
    let affines = schemes(&groups).into_iter().chain(others);
    weights.extend(affines.map(|s| affine(s, out, inp, None, 4)));
    weights.extend(schemes(&[Group::Size(32)]).into_iter().map(|s| {
        let order = shuffled_groups(inp, 32, 3);
        affine(s, out, inp, Some(order), 5)
    }));
    let x = normal(33 * inp, 6);
    for isa in isas() {
        let cpu = cpu(isa, 2);
        for w in &weights {
            for activations in ACTIVATIONS {
                let Ok(linear) = Linear::new(cpu, &[w], activations, KernelSet::Fused) else {
                    continue;
                };
                let product = |x: &[f32]| {
                    let mut y = vec![f32::NAN; x.len() / inp * out];
                    cpu.linear(&linear, x, &mut y, Epilogue::Store).unwrap();
                    y.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                };
                let alone: Vec<u32> = x.chunks_exact(inp).flat_map(product).collect();
                for m in 2..=33 {
                    let same = product(&x[..m * inp]) == alone[..m * out];
                    assert!(same, "{} {activations} m={m} {isa}", w.scheme_name());
                }
            }
        }
    }
}

/// The projections of Qwen3-0.6B (two of each kind of aspect), on seeded rows.
#[test]
fn real_shapes() {
    let affine_of = |bits, group, zeros| AffineScheme::new(bits, group, zeros);
    let kinds = [
        affine_of(Bits::B4, Group::Size(64), Zeros::Integer),
        affine_of(Bits::B4, Group::Size(128), Zeros::None),
        affine_of(Bits::B8, Group::Size(128), Zeros::None),
    ];
    for (out, inp) in [(2048, 1024), (1024, 3072)] {
        let rows: Vec<usize> = (0..24).map(|i| (i * 797 + 13) % out).collect();
        let mut weights = vec![dense(DType::BF16, out, inp, 1)];
        weights.extend(kinds.iter().map(|&s| affine(s, out, inp, None, 2)));
        for w in &weights {
            for isa in isas() {
                let dense = [Activations::F32, Activations::Bf16];
                let quantized = [
                    Activations::F32,
                    Activations::Int8 { group: 32 },
                    Activations::Int16 { group: 32 },
                ];
                for &activations in match w {
                    Weight::Dense(_) => &dense[..],
                    Weight::Quantized(_) => &quantized[..],
                } {
                    for m in [1, 3, 33] {
                        check(isa, w, activations, m, &rows);
                    }
                }
            }
        }
    }
}

/// More rows than pass the weights at a time.
#[test]
fn many_rows() {
    let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let w = affine(scheme, 40, 96, None, 1);
    let all: Vec<usize> = (0..40).collect();
    for isa in isas() {
        for activations in [
            Activations::F32,
            Activations::Int8 { group: 32 },
            Activations::Int16 { group: 32 },
        ] {
            for m in [480, 481, 1000] {
                check(isa, &w, activations, m, &all);
            }
        }
    }
}

/// Stacked parts of different schemes, with every epilogue, compared with separate products.
#[test]
fn stacked_parts_and_epilogues() {
    let scheme = |bits, zeros| AffineScheme::new(bits, Group::Size(32), zeros);
    let k = 96;
    let parts = [
        affine(scheme(Bits::B4, Zeros::Integer), 40, k, None, 1),
        affine(scheme(Bits::B8, Zeros::None), 24, k, None, 2),
        affine(scheme(Bits::B4, Zeros::None), 17, k, None, 3),
        affine(
            scheme(Bits::B4, Zeros::None),
            9,
            k,
            Some(shuffled_groups(k, 32, 4)),
            4,
        ),
    ];
    let refs: Vec<&Weight> = parts.iter().collect();
    for isa in isas() {
        let cpu = cpu(isa, 2);
        for activations in [
            Activations::F32,
            Activations::Int8 { group: 32 },
            Activations::Int16 { group: 64 },
        ] {
            for m in [1, 5, 20] {
                let x = normal(m * k, m as u64);
                let n = 40 + 24 + 17 + 9;
                let mut expected = vec![0.0; m * n];
                let mut start = 0;
                for w in &parts {
                    let x = seen(&x, w, activations);
                    let rows = w.dims().rows;
                    let mut y = vec![0.0; m * rows];
                    reference::linear(&x, w, &mut y).unwrap();
                    for (i, y) in y.chunks_exact(rows).enumerate() {
                        expected[i * n + start..][..rows].copy_from_slice(y);
                    }
                    start += rows;
                }
                let linear = Linear::new(cpu, &refs, activations, KernelSet::Fused).unwrap();
                assert_eq!(linear.out_features(), n);
                let before = normal(m * n, 77);
                for epilogue in [Epilogue::Store, Epilogue::Add] {
                    let mut y = Guarded::new(&before);
                    cpu.linear(&linear, &x, y.values(), epilogue).unwrap();
                    let mut y = y.finish();
                    if epilogue == Epilogue::Add {
                        y.iter_mut().zip(&before).for_each(|(y, b)| *y -= b);
                    }
                    // Subtracting the old value again costs a few digits.
                    let error = nmse(&y, &expected);
                    assert!(error < 1e-11, "{epilogue:?} {activations} m={m}: {error:e}");
                }
                // Gate and up of two bit widths.
                let up = affine(scheme(Bits::B8, Zeros::Offset), 40, k, None, 9);
                let pair = [&parts[0], &up];
                let linear = Linear::new(cpu, &pair, activations, KernelSet::Fused).unwrap();
                let (mut g, mut u) = (vec![0.0; m * 40], vec![0.0; m * 40]);
                reference::linear(&seen(&x, pair[0], activations), pair[0], &mut g).unwrap();
                reference::linear(&seen(&x, pair[1], activations), pair[1], &mut u).unwrap();
                let mut expected = vec![0.0; m * 40];
                reference::silu_mul(&g, &u, &mut expected);
                let mut y = Guarded::new(&vec![f32::NAN; m * 40]);
                cpu.linear(&linear, &x, y.values(), Epilogue::SiluMul)
                    .unwrap();
                let error = nmse(&y.finish(), &expected);
                assert!(error < 1e-11, "silu {activations} m={m}: {error:e}");
            }
        }
    }
}

/// The reference kernels serve everything, including odd groups, with every epilogue.
#[test]
fn reference_kernels() {
    let scheme = AffineScheme::new(Bits::B4, Group::Size(9), Zeros::Integer);
    let cpu = cpu(Isa::Scalar, 2);
    let w = [
        affine(scheme, 21, 40, None, 1),
        dense(DType::F16, 21, 40, 2),
    ];
    for activations in [
        Activations::F32,
        Activations::Int8 { group: 10 },
        Activations::Int16 { group: 10 },
    ] {
        let parts = [&w[0], &w[1]];
        let linear = Linear::new(cpu, &parts, activations, KernelSet::Reference).unwrap();
        assert_eq!(linear.kernel_names(), ["reference"]);
        let x = normal(3 * 40, 5);
        let mut rounded = x.clone();
        reference::round_activations(&mut rounded, 40, activations);
        let (mut g, mut u) = (vec![0.0; 63], vec![0.0; 63]);
        reference::linear(&rounded, &w[0], &mut g).unwrap();
        reference::linear(&rounded, &w[1], &mut u).unwrap();
        let mut y = vec![0.0; 126];
        cpu.linear(&linear, &x, &mut y, Epilogue::Store).unwrap();
        for i in 0..3 {
            assert_eq!(y[i * 42..i * 42 + 21], g[i * 21..(i + 1) * 21]);
            assert_eq!(y[i * 42 + 21..(i + 1) * 42], u[i * 21..(i + 1) * 21]);
        }
        let mut z = vec![0.0; 63];
        cpu.linear(&linear, &x, &mut z, Epilogue::SiluMul).unwrap();
        let mut expected = vec![0.0; 63];
        reference::silu_mul(&g, &u, &mut expected);
        assert!(nmse(&z, &expected) < 1e-12);
    }
}

/// Packing loses nothing: rows read back are those of the canonical weight.
#[test]
fn packed_rows_are_the_canonical_ones() {
    let cpu = cpu(Isa::Scalar, 2);
    let mut weights = vec![
        dense(DType::F32, 19, 33, 1),
        dense(DType::F16, 19, 33, 2),
        dense(DType::BF16, 19, 33, 3),
    ];
    for scheme in schemes(&GROUPS)
        .into_iter()
        .chain(held_as_others(Group::Size(32)))
    {
        weights.push(affine(scheme, 19, 100, None, 4));
    }
    for scheme in held_as_others(Group::Size(16)) {
        let g_idx = shuffled_groups(100, 16, 2);
        weights.push(affine(scheme, 19, 100, Some(g_idx), 6));
    }
    for scheme in schemes(&[Group::Size(32)]) {
        weights.push(affine(
            scheme,
            19,
            100,
            Some(shuffled_groups(100, 32, 1)),
            5,
        ));
    }
    for w in &weights {
        let (out, inp) = w.dims().pair();
        let linear = Linear::new(cpu, &[w, w], Activations::F32, KernelSet::Fused).unwrap();
        let (mut a, mut b) = (vec![0.0; inp], vec![0.0; inp]);
        for r in 0..out {
            w.dequantize_row(r, &mut a).unwrap();
            for r in [r, out + r] {
                linear.dequantize_row(r, &mut b).unwrap();
                assert_eq!(a, b, "{} row {r}", w.scheme_name());
            }
        }
        assert!(linear.dequantize_row(2 * out, &mut b).is_err());
    }
}

/// The packed form is no larger than the stored one (except for padding to whole panels).
#[test]
fn packed_bytes_are_the_stored_bytes() {
    let cpu = cpu(Isa::Scalar, 1);
    for scheme in schemes(&GROUPS) {
        let w = affine(scheme, 64, 256, None, 1);
        for &activations in &ACTIVATIONS[..8] {
            let linear = Linear::new(cpu, &[&w], activations, KernelSet::Fused).unwrap();
            // Zero-points of 4 bits: an odd number of groups in a row is stored with half
            // a byte unused, which panels do not need.
            assert!(linear.bytes() <= w.bytes(), "{scheme}");
            assert!(linear.bytes() + 64 >= w.bytes(), "{scheme}");
        }
    }
}

/// The bytes computed from a weight's kind are those that packing it takes.
#[test]
fn planned_bytes_are_the_packed_bytes() {
    let cpu = cpu(isas()[0], 1);
    let (out, inp) = (37, 384);
    let affine = schemes(&GROUPS)
        .into_iter()
        .chain(held_as_others(Group::Size(64)))
        .map(|s| affine(s, out, inp, None, 5));
    let dense = [DType::F32, DType::F16, DType::BF16].map(|d| dense(d, out, inp, 5));
    for w in affine.chain(dense) {
        let packed = Linear::new(cpu, &[&w], Activations::F32, KernelSet::Fused).unwrap();
        let kind = WeightKind::of(&w);
        assert_eq!(
            Linear::bytes_of(kind, Dims::new(out, inp)),
            packed.bytes(),
            "{kind}"
        );
        assert_eq!(kind.bytes(Dims::new(out, inp)), w.bytes(), "{kind}");
    }
}

#[test]
fn refusals_name_what_is_wrong() {
    let cpu = cpu(Isa::Scalar, 1);
    let odd = AffineScheme::new(Bits::B4, Group::Size(12), Zeros::None);
    let w = affine(odd, 16, 48, None, 1);
    let error = |r: nq_kernels::Result<Linear>| r.err().expect("a refusal").to_string();
    let text = error(Linear::new(
        cpu,
        &[&w],
        Activations::Int8 { group: 32 },
        KernelSet::Fused,
    ));
    assert!(
        text.contains("int4 g12 symmetric") && text.contains("int8 g32"),
        "{text}"
    );
    let text = error(Linear::new(
        cpu,
        &[&w, &dense(DType::F32, 4, 47, 1)],
        Activations::F32,
        KernelSet::Fused,
    ));
    assert!(text.contains("48") && text.contains("47"), "{text}");
    let w = dense(DType::F32, 4, 8, 1);
    let linear = Linear::new(cpu, &[&w], Activations::F32, KernelSet::Fused).unwrap();
    let mut y = [0.0; 4];
    assert!(
        cpu.linear(&linear, &[0.0; 8], &mut y, Epilogue::SiluMul)
            .is_err()
    );
    assert!(
        cpu.linear(&linear, &[0.0; 9], &mut y, Epilogue::Store)
            .is_err()
    );
    assert!(
        cpu.linear(&linear, &[0.0; 16], &mut y, Epilogue::Store)
            .is_err()
    );
    assert!(cpu.linear(&linear, &[], &mut [], Epilogue::Store).is_ok());
}

/// Integer sums have room for the greatest weights times the greatest activations, all of one sign.
#[test]
fn sums_hold_the_greatest_values() {
    let (out, inp) = (17, 256);
    let even = [Bits::B4, Bits::B5, Bits::B6, Bits::B8]
        .map(|bits| AffineScheme::new(bits, Group::Size(128), Zeros::None));
    for scheme in even.into_iter().chain([even[0].with_table()]) {
        for byte in [0, u8::MAX] {
            let codes = vec![byte; out * scheme.bits.bytes(inp)];
            let parts = Parts {
                codes: codes.into(),
                scales: GroupValues::Half(vec![half::f16::ONE; out * 2].into()),
                zeros: None,
                offsets: None,
                levels: (scheme.levels == Levels::Table).then(|| vec![byte; 16].into()),
                g_idx: None,
            };
            let w = AffineWeight::assemble(scheme, Dims::new(out, inp), parts).unwrap();
            let w = Weight::Quantized(QuantizedWeight::Affine(w));
            let mut row = vec![0.0; inp];
            w.dequantize_row(0, &mut row).unwrap();
            for (isa, activations) in (isas().into_iter())
                .flat_map(|isa| ACTIVATIONS[1..8].iter().map(move |&a| (isa, a)))
            {
                let linear = Linear::new(cpu(isa, 1), &[&w], activations, KernelSet::Fused);
                let linear = linear.unwrap();
                for (m, x) in [(1, 1.0), (1, -1.0), (7, 1.0), (7, -1.0)] {
                    let expected = x * row.iter().sum::<f32>();
                    let mut y = vec![0.0; m * out];
                    (cpu(isa, 1))
                        .linear(&linear, &vec![x; m * inp], &mut y, Epilogue::Store)
                        .unwrap();
                    let near = |y: &f32| (y / expected - 1.0).abs() < 1e-5;
                    assert!(y.iter().all(near), "{scheme} {activations} {isa}: {y:?}");
                }
            }
        }
    }
}

/// A NaN or infinite value must show in the outputs, not vanish in rounding.
#[test]
fn damage_shows() {
    let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::None);
    let w = affine(scheme, 16, 64, None, 1);
    for isa in isas() {
        let cpu = cpu(isa, 1);
        for &activations in &ACTIVATIONS[..8] {
            let linear = Linear::new(cpu, &[&w], activations, KernelSet::Fused).unwrap();
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 15, 40, 63] {
                    let mut x = normal(64, 1);
                    x[at] = bad;
                    let mut y = vec![0.0; 16];
                    cpu.linear(&linear, &x, &mut y, Epilogue::Store).unwrap();
                    assert!(y.iter().all(|y| !y.is_finite()), "{bad} at {at}: {y:?}");
                }
            }
        }
    }
}
