//! Linears in EXL3's codes compared with their expanded values, on every instruction set of this machine.

use crate::common::{Guarded, cpu, isas};
use nq_cpu::{Epilogue, Linear};
use nq_formats::{Exl3Code, Exl3Scheme, QuantizedWeight, Weight};
use nq_kernels::registry::{Activations, KernelSet, WeightKind};
use nq_kernels::{Isa, reference};
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{exl3, exl3_schemes, normal};

/// f32 sums of at most 512 products.
const BOUND: f64 = 1e-11;

/// The same values in f32.
fn expanded(w: &Weight) -> Weight {
    match w {
        Weight::Quantized(QuantizedWeight::Exl3(w)) => Weight::Dense(w.to_f32().unwrap()),
        _ => unreachable!("an EXL3 weight"),
    }
}

fn product(isa: Isa, threads: usize, w: &Weight, x: &[f32]) -> Vec<f32> {
    let (out, inp) = w.dims().pair();
    let cpu = cpu(isa, threads);
    let linear = Linear::new(cpu, &[w], Activations::F32, KernelSet::Fused).unwrap();
    let mut y = Guarded::new(&vec![f32::NAN; x.len() / inp * out]);
    cpu.linear(&linear, x, y.values(), Epilogue::Store).unwrap();
    y.finish()
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// All codes and bits, on 1, 2 and 3 threads. Each row of x gets what it gets alone.
#[test]
fn products_are_those_of_the_values() {
    let shapes = [(128, 256), (384, 128), (256, 384)];
    for (i, scheme) in exl3_schemes().enumerate() {
        let (out, inp) = shapes[i % 3];
        let w = exl3(scheme, Dims::new(out, inp), i as u64, 5);
        let x = normal(33 * inp, 3);
        let mut expected = vec![0.0; 33 * out];
        reference::linear(&x, &expanded(&w), &mut expected).unwrap();
        for isa in isas() {
            let alone = product(isa, 1, &w, &x[..inp]);
            for m in [1, 2, 5, 17, 33] {
                let what = format!("{scheme} {out} x {inp} m={m} {isa}");
                let y = product(isa, 1, &w, &x[..m * inp]);
                let error = nmse(&y, &expected[..m * out]);
                assert!(error < BOUND, "{what}: NMSE {error:e}");
                assert!(same(&y[..out], &alone), "{what}: not as alone");
                for threads in [2, 3] {
                    let again = product(isa, threads, &w, &x[..m * inp]);
                    assert!(same(&again, &y), "{what}: {threads} threads");
                }
            }
        }
    }
}

/// Of inputs whose transform has one value alone, the product is the transform of one column of the codes.
#[test]
fn columns_are_those_of_the_codes() {
    for code in Exl3Code::ALL {
        let scheme = Exl3Scheme::new(code, 16).unwrap();
        let w = exl3(scheme, Dims::new(128, 128), 7, 1);
        let Weight::Quantized(QuantizedWeight::Exl3(inner)) = &w else {
            unreachable!("as it was made");
        };
        for isa in isas() {
            for input in [0, 9, 22, 37, 120] {
                let mut x = vec![0.0; 128];
                for (k, x) in x.iter_mut().enumerate() {
                    let sign = if (k & input).count_ones() % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    };
                    *x = sign / inner.input_scales()[k].to_f32();
                }
                let y = product(isa, 1, &w, &x);
                let mut column: Vec<f32> = (0..128)
                    .map(|row| {
                        let values = scheme.values(inner.tile(input / 16, row / 16));
                        let at = |t: &usize| nq_formats::exl3::place(*t) == (input % 16, row % 16);
                        values[(0..256).find(at).unwrap()].to_f32()
                    })
                    .collect();
                let unit = x_transformed(inner, &x)[input];
                column.iter_mut().for_each(|v| *v *= unit);
                nq_formats::trellis::transform(&mut column);
                let scaled = column.iter().zip(inner.output_scales().iter());
                let expected: Vec<f32> = scaled.map(|(v, s)| s.to_f32() * v).collect();
                let error = nmse(&y, &expected);
                assert!(
                    error < 1e-13,
                    "{scheme} {isa} input {input}: NMSE {error:e}"
                );
            }
        }
    }
}

/// What a kernel multiplies with the codes.
fn x_transformed(w: &nq_formats::Exl3Weight, x: &[f32]) -> Vec<f32> {
    let scales = w.input_scales().iter();
    let mut x: Vec<f32> = x.iter().zip(scales).map(|(x, s)| x * s.to_f32()).collect();
    nq_formats::trellis::transform(&mut x);
    x
}

/// Parts of several codes, with the same and other input scales, and one that is not of EXL3.
#[test]
fn stacked_parts_and_epilogues() {
    let inp = 256;
    let scheme = |code, bits: usize| Exl3Scheme::new(code, 2 * bits).unwrap();
    let dense = nq_formats::Tensor::from_f32(vec![90, inp], normal(90 * inp, 4)).unwrap();
    let parts = [
        exl3(scheme(Exl3Code::Mcg, 4), Dims::new(256, inp), 1, 1),
        exl3(scheme(Exl3Code::ThreeInst, 3), Dims::new(128, inp), 2, 1),
        exl3(scheme(Exl3Code::Mul1, 6), Dims::new(128, inp), 3, 2),
        Weight::Dense(dense),
    ];
    let up = exl3(scheme(Exl3Code::Mul1, 2), Dims::new(256, inp), 5, 6);
    let refs: Vec<&Weight> = parts.iter().collect();
    let n: usize = parts.iter().map(|p| p.dims().rows).sum();
    for isa in isas() {
        let cpu = cpu(isa, 2);
        let new = |parts: &[&Weight]| {
            Linear::new(cpu, parts, Activations::F32, KernelSet::Fused).unwrap()
        };
        let (stacked, gated) = (new(&refs), new(&[&parts[0], &up]));
        for m in [1, 3, 20] {
            let x = normal(m * inp, 7);
            let separate: Vec<_> = refs.iter().map(|w| product(isa, 1, w, &x)).collect();
            let row = |i: usize| {
                let parts = separate.iter().zip(&parts);
                parts.flat_map(move |(y, p)| y[i * p.dims().rows..][..p.dims().rows].to_vec())
            };
            let expected: Vec<f32> = (0..m).flat_map(row).collect();
            let before = normal(m * n, 6);
            let mut y = before.clone();
            cpu.linear(&stacked, &x, &mut y, Epilogue::Add).unwrap();
            let sums: Vec<f32> = before.iter().zip(&expected).map(|(b, e)| b + e).collect();
            assert!(same(&y, &sums), "{isa} m={m}: add");
            let ups = product(isa, 1, &up, &x);
            let mut expected = vec![0.0; m * 256];
            reference::silu_mul(&separate[0], &ups, &mut expected);
            let mut y = Guarded::new(&vec![f32::NAN; m * 256]);
            cpu.linear(&gated, &x, y.values(), Epilogue::SiluMul)
                .unwrap();
            let error = nmse(&y.finish(), &expected);
            assert!(error < BOUND, "{isa} m={m}: silu {error:e}");
        }
    }
}

/// Packing loses nothing, takes the file's bytes, which are those planned, and rounded activations have no kernels.
#[test]
fn packed_rows_are_the_canonical_ones() {
    let cpu = cpu(Isa::Scalar, 2);
    for scheme in exl3_schemes() {
        let (out, inp) = (256, 384);
        let w = exl3(scheme, Dims::new(out, inp), 1, 2);
        let linear = Linear::new(cpu, &[&w, &w], Activations::F32, KernelSet::Fused).unwrap();
        let mut row = vec![0.0; inp];
        let all = expanded(&w);
        let mut expected = vec![0.0; inp];
        for r in [0, 1, 127, 128, 201, 255] {
            all.dequantize_row(r, &mut expected).unwrap();
            for r in [r, out + r] {
                linear.dequantize_row(r, &mut row).unwrap();
                assert!(same(&row, &expected), "{scheme} row {r}");
            }
        }
        let kind = WeightKind::of(&w);
        let planned = Linear::bytes_of(kind, Dims::new(out, inp));
        assert_eq!(linear.bytes(), 2 * planned);
        assert_eq!(planned, w.bytes());
        for isa in isas() {
            let cpu = crate::common::cpu(isa, 1);
            let supports = |a| Linear::supports(cpu, &w, a, KernelSet::Fused);
            assert!(supports(Activations::F32), "{isa}");
            assert!(!supports(Activations::Int8 { group: 128 }), "{isa}");
        }
    }
    let half = Exl3Scheme::new(Exl3Code::Mul1, 5).unwrap();
    let w = exl3(half, Dims::new(128, 128), 1, 2);
    let refused = Linear::new(cpu, &[&w], Activations::F32, KernelSet::Fused);
    let refused = refused.err().expect("no kernel").to_string();
    assert!(refused.contains("exl3 2.5 mul1"), "{refused}");
}

/// A value that is not finite shows in every output of the strips that it reaches, which are all.
#[test]
fn damage_shows() {
    let scheme = Exl3Scheme::new(Exl3Code::Mcg, 8).unwrap();
    let w = exl3(scheme, Dims::new(128, 256), 1, 1);
    for isa in isas() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 200] {
                let mut x = normal(256, 1);
                x[at] = bad;
                let y = product(isa, 1, &w, &x);
                assert!(y.iter().all(|y| !y.is_finite()), "{bad} at {at}: {y:?}");
            }
        }
    }
}
