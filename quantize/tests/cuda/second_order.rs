//! Second-order rounding on the GPU compared with the host's.
//!
//! Without a GPU the tests print that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.

use nq_cuda::{CudaOps, GemmPrecision, Gpu};
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, TrellisScheme, TrellisWeight, Zeros};
use nq_kernels::rng::Philox;
use nq_kernels::second_order::SecondOrder;
use nq_quantize::fit::{Fit, Power};
use nq_quantize::linalg::{Matrix, Moments};
use nq_quantize::methods::gptq::{ActOrder, Gptq, Importance};
use nq_quantize::methods::{Method, Outcome, Problem};
use nq_quantize::second_order::InputStats;
use nq_quantize::{Grid, Rounded, trellis};
use std::sync::Arc;

fn ops() -> Option<Arc<CudaOps>> {
    let gpu = nq_testkit::on_gpu(Gpu::open(0))?;
    Some(Arc::new(CudaOps::new(&gpu, GemmPrecision::Full).unwrap()))
}

fn normal(rows: usize, cols: usize, stream: u64) -> Matrix {
    let mut rng = Philox::new(11, stream);
    let mut m = Matrix::zeros(rows, cols);
    m.data.iter_mut().for_each(|v| *v = rng.normal());
    m
}

/// Moments of correlated inputs of magnitudes from 1 to 30, some of them dead.
fn moments(n: usize, dead: &[usize]) -> Matrix {
    let mut x = normal(2 * n, n, 1);
    for row in x.data.chunks_exact_mut(n) {
        let common = row[0];
        for (i, v) in row.iter_mut().enumerate() {
            *v = (*v + 0.7 * common) * (1.0 + 29.0 * (i % 7 == 3) as u32 as f32);
        }
        dead.iter().for_each(|&i| row[i] = 0.0);
    }
    let mut m = Moments::new(n, true);
    m.add(&x.data);
    m.matrix()
}

fn grid(bits: Bits, group: Group, zeros: Zeros) -> Grid {
    Grid::new(AffineScheme::new(bits, group, zeros)).unwrap()
}

/// The same moments on the host and on the device.
fn both(ops: &Arc<CudaOps>, h: Matrix) -> [InputStats; 2] {
    let n = h.cols;
    let buffer = ops.gpu().upload("a test", &h.data).unwrap();
    let device = Arc::clone(ops).moments(buffer, n).unwrap();
    // So few rows that gptq counts the noise of their moments.
    [InputStats::of(h), InputStats::on_device(device)].map(|stats| InputStats {
        rows: 4 * n,
        ..stats
    })
}

fn round(method: &Gptq, weight: &Matrix, inputs: &InputStats, grid: Grid) -> Outcome {
    let problem = Problem {
        name: "w",
        weight,
        inputs: Some(inputs),
        grid,
    };
    method.round(&problem).unwrap()
}

/// Share of codes that differ.
fn differing(a: &Rounded, b: &Rounded) -> f64 {
    let n = a.codes.iter().zip(&b.codes).filter(|(a, b)| a != b).count();
    n as f64 / a.codes.len() as f64
}

fn variants() -> Vec<Gptq> {
    let groups = Gptq {
        order: ActOrder::Groups,
        importance: Importance::Remaining,
        ..Gptq::default()
    };
    let cubes = Gptq {
        fit: Fit {
            power: Power::Three,
            ..Fit::clip()
        },
        ..Gptq::default()
    };
    let whole = Gptq {
        fit: Fit::absmax(),
        ..Gptq::default()
    };
    vec![Gptq::default(), groups, cubes, whole]
}

/// Ranges chosen from the original weights are bit for bit those of the host.
/// Codes follow from sums of some hundred products in f32 on either side, which differ in their
/// last bits: if a weight lies that close to a border, its code changes, and with it all later columns
/// of its row. So some codes differ, but the cost of rounding does not.
#[test]
fn the_gpu_rounds_as_the_host() {
    let Some(ops) = ops() else { return };
    let cases = [
        (33, 200, Bits::B4, Group::Size(64), Zeros::Integer, &[][..]),
        (64, 384, Bits::B4, Group::Size(32), Zeros::None, &[5, 300]),
        (70, 257, Bits::B8, Group::Channel, Zeros::None, &[0]),
        (16, 512, Bits::B8, Group::Size(128), Zeros::Integer, &[]),
        // More rows than one launch takes, as a head has.
        (65_600, 32, Bits::B4, Group::Size(16), Zeros::Integer, &[]),
    ];
    for (case, (rows, n, bits, group, zeros, dead)) in cases.into_iter().enumerate() {
        let mut weight = normal(rows, n, 2);
        weight.row_mut(1)[..n.min(64)].fill(0.0);
        let grid = grid(bits, group, zeros);
        let [host, device] = both(&ops, moments(n, dead));
        for (variant, method) in variants().iter().enumerate() {
            let [a, b] = [&host, &device].map(|inputs| round(method, &weight, inputs, grid));
            let what = format!("case {case}, variant {variant}");
            assert_eq!(a.method, "gptq", "{what}");
            assert_eq!((a.method, &a.fallbacks), (b.method, &b.fallbacks), "{what}");
            let (a, b) = (a.rounded, b.rounded);
            if method.order == ActOrder::Columns {
                assert_eq!(a.params, b.params, "{what}");
            }
            let hessian = [&host, &device].map(|i| i.hessian.as_ref().unwrap());
            let [ea, eb] = [(hessian[0], &a), (hessian[1], &b)]
                .map(|(h, rounded)| h.errors(&weight, rounded).unwrap());
            let near = |a: f64, b: f64, limit: f64| (a / b - 1.0).abs() < limit;
            let off = differing(&a, &b);
            println!("{what}: {off:.4} of codes differ; errors {ea:?} {eb:?}");
            assert!(near(ea.weight, eb.weight, 1e-6), "{what}: {ea:?} {eb:?}");
            assert!(near(ea.outputs, eb.outputs, 1e-5), "{what}: {ea:?} {eb:?}");
            assert!(near(ea.change, eb.change, 0.02), "{what}: {ea:?} {eb:?}");
            let (x, y) = (ea.output_change, eb.output_change);
            assert!(near(x, y, 0.02), "{what}: {ea:?} {eb:?}");
            assert!(off < 0.05, "{what}: {off} of all codes differ");
            let again = round(method, &weight, &device, grid).rounded;
            assert!(again.codes == b.codes && again.params == b.params, "{what}");
        }
    }
}

/// A matrix that is not positive definite is detected, and damping or rounding to nearest
/// follows as on the host.
#[test]
fn what_cannot_be_factored_is_said() {
    let Some(ops) = ops() else { return };
    let n = 150;
    let weight = normal(20, n, 3);
    let grid = grid(Bits::B4, Group::Size(64), Zeros::Integer);
    let undamped = Gptq {
        damping: 0.0,
        ..Gptq::default()
    };
    let mut x = Moments::new(n, true);
    x.add(&normal(20, n, 4).data);
    let singular = x.matrix();
    let mut indefinite = singular.clone();
    let mean = (0..n).map(|i| singular.row(i)[i]).sum::<f32>() / n as f32;
    indefinite.data[n + 2] += 4.0 * mean;
    indefinite.data[2 * n + 1] += 4.0 * mean;
    let mut infinite = singular.clone();
    infinite.data[0] = f32::INFINITY;
    for (h, method) in [
        (singular, "gptq"),
        (indefinite, "rtn-clip"),
        (infinite, "rtn-clip"),
        (Matrix::zeros(n, n), "rtn-clip"),
    ] {
        // The noise of moments would damp too.
        let exact = both(&ops, h).map(|stats| InputStats { rows: 0, ..stats });
        let found = exact.map(|inputs| round(&undamped, &weight, &inputs, grid));
        assert_eq!(found[0].method, method);
        assert_eq!(found[1].method, method);
        assert_eq!(found[0].fallbacks, found[1].fallbacks);
        assert_eq!(found[0].fallbacks.len(), 1);
    }
}

/// Moments of scaled inputs, and errors of weights that a search tries.
#[test]
fn moments_are_scaled_and_errors_measured_where_they_are() {
    let Some(ops) = ops() else { return };
    let n = 130;
    let s: Vec<f32> = (0..n).map(|i| 0.5 + i as f32 / 50.0).collect();
    let e = normal(9, n, 5);
    let [mut host, mut device] = both(&ops, moments(n, &[]));
    for inputs in [&mut host, &mut device] {
        inputs.divide(&s).unwrap();
    }
    assert_eq!(host.mean_square, device.mean_square);
    let [a, b] = [&host, &device].map(|i| {
        let hessian = i.hessian.as_ref().unwrap();
        hessian.quadratic_error(&e).unwrap()
    });
    assert!((a / b - 1.0).abs() < 1e-5, "{a} {b}");
}

fn dequantized(weight: &TrellisWeight) -> Matrix {
    let mut all = Matrix::zeros(weight.out_features(), weight.in_features());
    for i in 0..all.rows {
        weight.dequantize_row(i, all.row_mut(i));
    }
    all
}

/// Moments of inputs that are correlated in groups of 8, so that no few directions have most of the error.
fn moments_of_groups(n: usize, dead: &[usize]) -> Matrix {
    let mut x = normal(2 * n, n, 7);
    for row in x.data.chunks_exact_mut(n) {
        for group in row.chunks_exact_mut(8) {
            let common = group[0];
            group.iter_mut().for_each(|v| *v += 0.7 * common);
        }
        dead.iter().for_each(|&i| row[i] = 0.0);
    }
    let mut m = Moments::new(n, true);
    m.add(&x.data);
    m.matrix()
}

/// Paths through a trellis follow from sums of costs in f32, whose last bits differ; then later tiles differ too, but the
/// error does not. The scale of a row is that with which its values, as words decode, have the least error.
#[test]
fn the_gpu_rounds_to_trellises_as_the_host() {
    let Some(ops) = ops() else { return };
    for scheme in TrellisScheme::all() {
        // The last strip is not full; one block searches four sequences, or two.
        for (rows, dead) in [(520, &[][..]), (40, &[7, 300])] {
            let n = 512;
            let mut weight = normal(rows, n, 6);
            weight.row_mut(3).fill(0.0);
            let moments = moments_of_groups(n, dead);
            let mut inputs = both(&ops, moments.clone());
            if dead.is_empty() {
                // The noise of moments would change which scales are best.
                inputs = inputs.map(|stats| InputStats { rows: 0, ..stats });
            }
            let what = format!("{scheme}, {rows} rows");
            let round = |i: &InputStats| trellis::round("w", &weight, Some(i), scheme);
            let rounded = [&inputs[0], &inputs[1]].map(|i| match round(i) {
                Ok(found) => Some(found),
                Err(e) if scheme == TrellisScheme::new(Code::Sum, 2).unwrap() => {
                    // Costs of 16,384 tails fill more than a block of some GPUs has.
                    let e = e.to_string();
                    assert!(e.contains("shared memory"), "{e}");
                    println!("{what}: skipped: {e}");
                    None
                }
                Err(e) => panic!("{what}: {e}"),
            });
            let [Some((host, said)), Some((device, said_too))] = rounded else {
                continue;
            };
            assert_eq!(said, said_too, "{what}");
            assert_eq!(host.input_scales(), device.input_scales(), "{what}");
            let hessian = inputs[0].hessian.as_ref().unwrap();
            let values = dequantized(&device);
            let [a, b] = [dequantized(&host), values.clone()].map(|mut change| {
                let changes = change.data.iter_mut().zip(&weight.data);
                changes.for_each(|(c, w)| *c -= w);
                hessian.quadratic_error(&change).unwrap()
            });
            let words = host.words().chunks(4).zip(device.words().chunks(4));
            let off = words.filter(|(a, b)| a != b).count();
            let all = host.words().len() / 4;
            println!("{what}: {off} of {all} words differ; errors {a} {b}");
            let limit = if rows < 128 { 0.05 } else { 0.01 };
            assert!((a / b - 1.0).abs() < limit, "{what}: {a} {b}");
            assert!(values.row(3).iter().all(|v| *v == 0.0), "{what}");
            for i in (0..rows).filter(|i| dead.is_empty() && *i != 3) {
                let (w, v) = (weight.row(i), values.row(i));
                let weighted: Vec<f32> = (0..n)
                    .map(|j| moments.row(j).iter().zip(v).map(|(h, v)| h * v).sum())
                    .collect();
                let dot = |x: &[f32]| -> f64 {
                    let products = weighted.iter().zip(x);
                    products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                };
                let best = dot(w) / dot(v);
                assert!((best - 1.0).abs() < 1e-3, "{what}, row {i}: {best}");
            }
            let again = round(&inputs[1]).unwrap().0;
            assert_eq!(again.words(), device.words(), "{what}");
            assert_eq!(again.row_scales(), device.row_scales(), "{what}");
        }
    }
}

/// The nearest codes, of rows that fill no strip, are searched by blocks of inputs.
#[test]
fn the_gpu_finds_the_nearest_codes_of_trellises_as_the_host() {
    let Some(ops) = ops() else { return };
    let mut alike = Matrix::zeros(128, 128);
    alike.data.iter_mut().step_by(129).for_each(|v| *v = 1.0);
    let [_, device] = both(&ops, alike);
    let weight = normal(520, 512, 8);
    for (code, bits) in [(Code::Octagon, 3.5), (Code::Octagon, 4.0), (Code::Sum, 6.0)] {
        let scheme = TrellisScheme::of_bits(code, bits).unwrap();
        let [host, device, again] = [None, Some(&device), Some(&device)]
            .map(|on| trellis::nearest(&weight, scheme, on).unwrap());
        assert_eq!(device.words(), again.words(), "{scheme}");
        let [a, b] = [host, device].map(|w| {
            let mut change = dequantized(&w);
            let changes = change.data.iter_mut().zip(&weight.data);
            changes.for_each(|(c, w)| *c -= w);
            change.square_norm()
        });
        assert!((a / b - 1.0).abs() < 1e-3, "{scheme}: {a} {b}");
    }
}
