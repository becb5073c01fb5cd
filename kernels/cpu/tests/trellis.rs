//! Linears in trellis codes compared with their formula in f64, on every instruction set of this machine.

use crate::common::{self, Guarded, cpu, isas};
use nq_cpu::linear::kernels::KERNELS;
use nq_cpu::{Epilogue, Linear};
use nq_formats::trellis::{BLOCK, Code, LANES, STRIP, TILE};
use nq_formats::{
    AffineScheme, Bits, Group, QuantizedWeight, TrellisScheme, TrellisWeight, Weight, Zeros,
    trellis as code,
};
use nq_kernels::registry::{Activations, KernelSet, WeightKind};
use nq_kernels::{Isa, Routes, reference};
use nq_model::{Dims, Experts};
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, normal, trellis};

const ACTIVATIONS: [Activations; 9] = [
    Activations::F32,
    Activations::Int8 { group: 16 },
    Activations::Int8 { group: 32 },
    Activations::Int8 { group: 64 },
    Activations::Int8 { group: 128 },
    Activations::Int16 { group: 16 },
    Activations::Int16 { group: 32 },
    Activations::Int16 { group: 64 },
    Activations::Int16 { group: 128 },
];

/// Rows of x: those of kernels for few and for many, in whole and in short blocks of columns.
const ROWS: [usize; 7] = [1, 2, 3, 4, 5, 17, 33];

/// f32 sums of at most 512 products or of exact integer sums.
const BOUND: f64 = 1e-11;

/// Small integers, whose sums after scales of powers of two are exact: rounding the transform's results is then the same
/// for every order of its sums.
fn integers(n: usize, seed: u64) -> Vec<f32> {
    normal(n, seed).iter().map(|v| (v * 20.0).round()).collect()
}

fn inner(w: &Weight) -> &TrellisWeight {
    match w {
        Weight::Quantized(QuantizedWeight::Trellis(t)) => t,
        _ => unreachable!("a trellis weight"),
    }
}

/// The four bytes of each state, less their mean, by row: `[out][quads]`.
fn quads(w: &TrellisWeight) -> Vec<Vec<[f64; 4]>> {
    let (scheme, tiles) = (w.scheme(), w.in_features() / TILE);
    let (width, words) = (scheme.code().width(), scheme.words());
    let mut rows = vec![vec![[0.0; 4]; w.in_features() / width]; w.out_features()];
    let tile_bytes = 4 * LANES * words;
    for (i, tile) in w.words().chunks_exact(tile_bytes).enumerate() {
        for lane in 0..LANES {
            let word = |word| {
                let at = 4 * code::word_place(words, lane, word);
                u32::from_le_bytes(tile[at..at + 4].try_into().unwrap())
            };
            let sequence: Vec<u32> = (0..words).map(word).collect();
            for step in 0..scheme.steps() {
                let state = code::state(&sequence, (step + 1) * scheme.step_bits() as usize);
                let bytes = u32::from(state).wrapping_mul(scheme.code().multiplier());
                let (row, column) = code::place(scheme.code(), lane, step);
                if let Some(row) = rows.get_mut(i / tiles * STRIP + row) {
                    row[(i % tiles * TILE + column) / width] =
                        bytes.to_le_bytes().map(|b| f64::from(b) - 127.5);
                }
            }
        }
    }
    rows
}

/// What each byte of each quad is multiplied with, for one row of x: rounded in groups of inputs.
fn seen(x: &[f32], w: &TrellisWeight, activations: Activations) -> Vec<[f64; 4]> {
    let scales = w.input_scales().iter().map(|s| s.to_f32());
    let mut x: Vec<f32> = x.iter().zip(scales).map(|(x, s)| x * s).collect();
    code::transform(&mut x);
    let of_quad = w.scheme().code().width();
    let mut values: Vec<f32> = match w.scheme().code() {
        Code::Sum => x,
        Code::Octagon => {
            let root = std::f32::consts::FRAC_1_SQRT_2;
            let four = |p: &[f32]| [p[0], (p[0] + p[1]) * root, p[1], (p[1] - p[0]) * root];
            x.chunks_exact(2).flat_map(four).collect()
        }
    };
    let values_of = |group| match of_quad {
        1 => group,
        _ => 2 * group,
    };
    let rounded = match activations {
        Activations::Int8 { group } => Activations::Int8 {
            group: values_of(group),
        },
        Activations::Int16 { group } => Activations::Int16 {
            group: values_of(group),
        },
        other => other,
    };
    let n = values.len();
    reference::round_activations(&mut values, n, rounded);
    let values = values.into_iter().map(f64::from);
    match of_quad {
        1 => values.map(|v| [v; 4]).collect(),
        _ => {
            let values: Vec<f64> = values.collect();
            values.as_chunks::<4>().0.to_vec()
        }
    }
}

/// The product by its formula, `[m, out]`.
fn expected(
    w: &TrellisWeight,
    quads: &[Vec<[f64; 4]>],
    x: &[f32],
    activations: Activations,
) -> Vec<f32> {
    let mut y = Vec::new();
    for x in x.chunks_exact(w.in_features()) {
        let seen = seen(x, w, activations);
        y.extend(quads.iter().zip(w.row_scales()).map(|(row, scale)| {
            let products = row.iter().flatten().zip(seen.iter().flatten());
            let sum: f64 = products.map(|(w, x)| w * x).sum();
            (scale.to_f64() * sum / 128.0) as f32
        }));
    }
    y
}

fn product(isa: Isa, threads: usize, w: &Weight, x: &[f32], activations: Activations) -> Vec<f32> {
    let (out, inp) = w.dims().pair();
    let cpu = cpu(isa, threads);
    let linear = Linear::new(cpu, &[w], activations, KernelSet::Fused).unwrap();
    let mut y = Guarded::new(&vec![f32::NAN; x.len() / inp * out]);
    cpu.linear(&linear, x, y.values(), Epilogue::Store).unwrap();
    y.finish()
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// All codes and bits, with rows that do not fill panels or strips, on 1, 2 and 3 threads. Each row of x gets what it gets
/// alone.
#[test]
fn products_are_those_of_the_formula() {
    let shapes = [(1, 128), (40, 256), (130, 384), (300, 512)];
    for (i, scheme) in TrellisScheme::all().enumerate() {
        for (out, inp) in [shapes[i % 4], shapes[(i + 2) % 4]] {
            let w = trellis(scheme, Dims::new(out, inp), i as u64, 5);
            let quads = quads(inner(&w));
            let all = integers(33 * inp, i as u64);
            for activations in ACTIVATIONS {
                let expected = expected(inner(&w), &quads, &all, activations);
                for isa in isas() {
                    let mut first: Option<Vec<f32>> = None;
                    for m in ROWS {
                        let describe = format!("{scheme} {out} x {inp} {activations} m={m} {isa}");
                        let x = &all[..m * inp];
                        let y = product(isa, 1, &w, x, activations);
                        let error = nmse(&y, &expected[..m * out]);
                        assert!(error < BOUND, "{describe}: NMSE {error:e}");
                        for threads in [2, 3] {
                            let again = product(isa, threads, &w, x, activations);
                            assert!(same(&again, &y), "{describe}: {threads} threads");
                        }
                        let first = first.get_or_insert_with(|| y.clone());
                        assert!(same(&y[..out], first), "{describe}: not as alone");
                    }
                }
            }
        }
    }
}

/// Every row of many is bit for bit what it is alone.
#[test]
fn rows_do_not_depend_on_their_number() {
    let w = trellis(
        "trellis4 octagon".parse().unwrap(),
        Dims::new(200, 384),
        3,
        4,
    );
    let x = normal(250 * 384, 8);
    for isa in isas() {
        for activations in [
            Activations::F32,
            Activations::Int8 { group: 128 },
            Activations::Int16 { group: 128 },
        ] {
            let alone: Vec<f32> = x
                .chunks_exact(384)
                .flat_map(|x| product(isa, 1, &w, x, activations))
                .collect();
            for m in [2, 6, 12, 17, 31, 250] {
                let y = product(isa, 2, &w, &x[..m * 384], activations);
                assert!(same(&y, &alone[..m * 200]), "{isa} {activations} m={m}");
            }
        }
    }
}

/// Values of x and scales of inputs of any kind, against rows of the weight.
#[test]
fn exact_activations_are_those_of_the_rows() {
    for scheme in TrellisScheme::all() {
        let (out, inp) = (150, 512);
        let w = trellis(scheme, Dims::new(out, inp), 1, 2);
        let t = inner(&w);
        let scales = normal(inp, 9).into_iter().map(half::f16::from_f32);
        let w = TrellisWeight::new(
            scheme,
            Dims::new(out, inp),
            t.words().clone(),
            t.row_scales().into(),
            scales.collect(),
        );
        let w = Weight::Quantized(QuantizedWeight::Trellis(w.unwrap()));
        let x = normal(9 * inp, 4);
        let mut expected = vec![0.0; 9 * out];
        reference::linear(&x, &w, &mut expected).unwrap();
        for isa in isas() {
            for m in [1, 9] {
                let y = product(isa, 2, &w, &x[..m * inp], Activations::F32);
                let error = nmse(&y, &expected[..m * out]);
                assert!(error < BOUND, "{scheme} m={m} {isa}: NMSE {error:e}");
            }
        }
    }
}

/// Parts of several codes, with the same and other input scales, and one that is not a trellis code.
#[test]
fn stacked_parts_and_epilogues() {
    let inp = 256;
    let scheme = |name: &str| name.parse::<TrellisScheme>().unwrap();
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let parts = [
        trellis(scheme("trellis4 octagon"), Dims::new(150, inp), 1, 1),
        trellis(scheme("trellis3.5 octagon"), Dims::new(40, inp), 2, 1),
        trellis(scheme("trellis6 sum"), Dims::new(128, inp), 3, 2),
        affine(int4, 90, inp, None, 4),
    ];
    let up = trellis(scheme("trellis3 sum"), Dims::new(150, inp), 5, 1);
    let refs: Vec<&Weight> = parts.iter().collect();
    let n: usize = parts.iter().map(|p| p.dims().rows).sum();
    for isa in isas() {
        let cpu = cpu(isa, 2);
        for activations in [ACTIVATIONS[0], ACTIVATIONS[2], ACTIVATIONS[8]] {
            let stacked = Linear::new(cpu, &refs, activations, KernelSet::Fused).unwrap();
            let gated = Linear::new(cpu, &[&parts[0], &up], activations, KernelSet::Fused).unwrap();
            for m in [1, 3, 20] {
                let x = normal(m * inp, 7);
                let separate: Vec<_> = refs
                    .iter()
                    .map(|w| product(isa, 1, w, &x, activations))
                    .collect();
                let row = |i: usize| {
                    let parts = separate.iter().zip(&parts);
                    parts.flat_map(move |(y, p)| y[i * p.dims().rows..][..p.dims().rows].to_vec())
                };
                let expected: Vec<f32> = (0..m).flat_map(row).collect();
                let mut y = Guarded::new(&vec![f32::NAN; m * n]);
                cpu.linear(&stacked, &x, y.values(), Epilogue::Store)
                    .unwrap();
                assert!(
                    same(&y.finish(), &expected),
                    "{isa} {activations} m={m}: store"
                );
                let before = normal(m * n, 6);
                let mut y = before.clone();
                cpu.linear(&stacked, &x, &mut y, Epilogue::Add).unwrap();
                let sums: Vec<f32> = before.iter().zip(&expected).map(|(b, e)| b + e).collect();
                assert!(same(&y, &sums), "{isa} {activations} m={m}: add");
                let ups = product(isa, 1, &up, &x, activations);
                let mut expected = vec![0.0; m * 150];
                reference::silu_mul(&separate[0], &ups, &mut expected);
                let mut y = Guarded::new(&vec![f32::NAN; m * 150]);
                cpu.linear(&gated, &x, y.values(), Epilogue::SiluMul)
                    .unwrap();
                let error = nmse(&y.finish(), &expected);
                assert!(error < BOUND, "{isa} {activations} m={m}: silu {error:e}");
            }
        }
    }
}

/// Stacks of experts, of whole strips each.
#[test]
fn experts() {
    let (experts, inp, width, out) = (4, 256, 256, 128);
    let scheme: TrellisScheme = "trellis3 octagon".parse().unwrap();
    let gate = trellis(scheme, Dims::new(experts * width, inp), 1, 1);
    let up = trellis(scheme, Dims::new(experts * width, inp), 2, 1);
    let down = trellis(scheme, Dims::new(experts * out, width), 3, 3);
    let routing = Experts {
        count: experts,
        per_token: 2,
        width,
        normalized: true,
        shared: 0,
    };
    for isa in isas() {
        let cpu = cpu(isa, 2);
        for m in [1, 2, 40] {
            let routes = Routes::new(&normal(m * experts, 11), &routing);
            let x = normal(m * inp, 12);
            let mut results = Vec::new();
            for kernels in [KernelSet::Reference, KernelSet::Fused] {
                let stacked = |parts: &[&Weight]| {
                    Linear::of_experts(cpu, parts, experts, Activations::F32, kernels).unwrap()
                };
                let mut y = vec![0.0; m * out];
                cpu.experts(
                    &stacked(&[&gate, &up]),
                    &stacked(&[&down]),
                    &routes,
                    &x,
                    &mut y,
                )
                .unwrap();
                results.push(y);
            }
            let error = nmse(&results[1], &results[0]);
            assert!(error < BOUND, "{isa} m={m}: {error:e}");
            // Integers: a row gets the same with and without others.
            let rounded = Activations::Int8 { group: 128 };
            let stacked = |parts: &[&Weight]| {
                Linear::of_experts(cpu, parts, experts, rounded, KernelSet::Fused).unwrap()
            };
            let (first, second) = (stacked(&[&gate, &up]), stacked(&[&down]));
            let mut y = vec![0.0; m * out];
            cpu.experts(&first, &second, &routes, &x, &mut y).unwrap();
            let error = nmse(&y, &results[0]);
            assert!(error < 1e-3, "{isa} m={m}: {error:e}");
            let alone = Routes::new(&normal(m * experts, 11)[..experts], &routing);
            let mut first_row = vec![0.0; out];
            cpu.experts(&first, &second, &alone, &x[..inp], &mut first_row)
                .unwrap();
            assert!(same(&first_row, &y[..out]), "{isa} m={m}: alone");
        }
    }
}

/// Packing loses nothing, takes the bytes that are planned, and every kernel of the registry is used.
#[test]
fn packed_rows_are_the_canonical_ones() {
    let cpu = cpu(Isa::Scalar, 2);
    for scheme in TrellisScheme::all() {
        let (out, inp) = (140, 256);
        let w = trellis(scheme, Dims::new(out, inp), 1, 2);
        let linear = Linear::new(cpu, &[&w, &w], Activations::F32, KernelSet::Fused).unwrap();
        let (mut a, mut b) = (vec![0.0; inp], vec![0.0; inp]);
        for r in 0..out {
            w.dequantize_row(r, &mut a).unwrap();
            for r in [r, out + r] {
                linear.dequantize_row(r, &mut b).unwrap();
                assert!(same(&a, &b), "{scheme} row {r}");
            }
        }
        let kind = WeightKind::of(&w);
        assert_eq!(
            2 * Linear::bytes_of(kind, Dims::new(out, inp)),
            linear.bytes()
        );
        // Beside the stored bytes, scales of rows that fill a panel.
        assert_eq!(linear.bytes(), 2 * (w.bytes() + 2 * 4));
        for isa in isas() {
            let kernels = KERNELS.iter().flat_map(|k| k.iter());
            for kernel in kernels.filter(|k| k.isa == isa && (k.info.weights)(kind)) {
                let serves = |a: &Activations| (kernel.info.activations)(*a);
                let activations = *ACTIVATIONS.iter().find(|a| serves(a)).unwrap();
                let cpu = common::cpu(isa, 1);
                let linear = Linear::new(cpu, &[&w], activations, KernelSet::Fused).unwrap();
                assert!(linear.kernel_names().contains(&kernel.info.name));
                assert!(Linear::supports(cpu, &w, activations, KernelSet::Fused));
            }
            let cpu = common::cpu(isa, 1);
            assert!(!Linear::supports(
                cpu,
                &w,
                Activations::Bf16,
                KernelSet::Fused
            ));
        }
    }
}

/// A value that is not finite shows in every output.
#[test]
fn damage_shows() {
    let w = trellis(
        "trellis4 octagon".parse().unwrap(),
        Dims::new(20, 2 * BLOCK),
        1,
        1,
    );
    for isa in isas() {
        for activations in ACTIVATIONS {
            for bad in [f32::NAN, f32::INFINITY] {
                for at in [0, 200] {
                    let mut x = normal(2 * BLOCK, 1);
                    x[at] = bad;
                    let y = product(isa, 1, &w, &x, activations);
                    assert!(y.iter().all(|y| !y.is_finite()), "{bad} at {at}: {y:?}");
                }
            }
        }
    }
}
