//! One suite for every method, and the special cases of each paper.

use super::awq::Awq;
use super::gptq::{ActOrder, Gptq, Importance};
use super::{FloatLayer, METHODS, Method, Needs, Problem, by_name, rtn};
use crate::fit::Fit;
use crate::grid::Grid;
use crate::linalg::{Matrix, Moments};
use crate::second_order::InputStats;
use nq_formats::gguf::affine;
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::rng::Philox;
use nq_model::{ARCHITECTURES, LinearKind, NormKind};

fn grid(bits: Bits, group: Group, zeros: Zeros) -> Grid {
    Grid::new(AffineScheme::new(bits, group, zeros)).unwrap()
}

fn grids() -> Vec<Grid> {
    let mut all = Vec::new();
    for bits in [Bits::B4, Bits::B8] {
        for zeros in [Zeros::None, Zeros::Integer] {
            for group in [Group::Size(32), Group::Size(64), Group::Channel] {
                all.push(grid(bits, group, zeros));
            }
        }
    }
    all
}

fn normal(rows: usize, cols: usize, scale: f32, stream: u64) -> Matrix {
    let mut rng = Philox::new(3, stream);
    let mut m = Matrix::zeros(rows, cols);
    m.data.iter_mut().for_each(|v| *v = rng.normal() * scale);
    m
}

/// Inputs of `n` correlated elements of different magnitudes, like those of a language model.
fn inputs(n: usize, stream: u64) -> Matrix {
    let (rows, rank) = (4 * n, n / 4);
    let (a, b) = (
        normal(rows, rank, 1.0, stream),
        normal(rank, n, 0.5, stream + 1),
    );
    let mut x = normal(rows, n, 0.3, stream + 2);
    for (x, a) in x.data.chunks_exact_mut(n).zip(a.iter_rows()) {
        for (a, b) in a.iter().zip(b.iter_rows()) {
            x.iter_mut().zip(b).for_each(|(x, b)| *x += a * b);
        }
        for (i, x) in x.iter_mut().enumerate() {
            *x *= if i % 17 == 0 { 8.0 } else { 1.0 };
        }
    }
    x
}

fn moments(x: &Matrix) -> Matrix {
    let mut m = Moments::new(x.cols, true);
    m.add(&x.data);
    m.matrix()
}

fn stats(x: &Matrix) -> InputStats {
    InputStats::of(moments(x))
}

fn output_error(w: &Matrix, method: &dyn Method, inputs: &InputStats, grid: Grid) -> f64 {
    output_error_on(inputs, w, method, inputs, grid)
}

/// The error on the inputs `seen` of `w` rounded by the statistics `inputs`.
fn output_error_on(
    seen: &InputStats,
    w: &Matrix,
    method: &dyn Method,
    inputs: &InputStats,
    grid: Grid,
) -> f64 {
    let problem = Problem {
        name: "w",
        weight: w,
        inputs: Some(inputs),
        grid,
    };
    let outcome = method.round(&problem).unwrap();
    assert_eq!(outcome.fallbacks, Vec::<String>::new());
    let mut error = w.clone();
    let mut row = vec![0.0; w.cols];
    for i in 0..w.rows {
        outcome.rounded.dequantize_row(i, &mut row);
        error
            .row_mut(i)
            .iter_mut()
            .zip(&row)
            .for_each(|(e, q)| *e -= q);
    }
    let hessian = seen.hessian.as_ref().unwrap();
    hessian.quadratic_error(&error).unwrap()
}

/// Few rows of independent inputs show correlations that others do not have: known to be few, they do better on others.
#[test]
fn gptq_trusts_moments_of_few_rows_less() {
    let n = 64;
    let (grid, method) = (
        grid(Bits::B4, Group::Size(32), Zeros::Integer),
        Gptq::default(),
    );
    for stream in [40, 50, 60] {
        let x = normal(4 * n, n, 1.0, stream);
        let (few, others) = (x.part(0..n), x.part(n..4 * n));
        let (few, others) = (stats(&few), stats(&others));
        let w = normal(48, n, 0.05, stream + 5);
        let error = |rows| {
            let few = InputStats {
                rows,
                ..few.clone()
            };
            output_error_on(&others, &w, &method, &few, grid)
        };
        assert!(error(n) < error(0), "{} {}", error(n), error(0));
    }
}

/// Weights on the grid come back exactly, from every method and on every grid.
#[test]
fn weights_on_the_grid_are_kept_by_every_method() {
    let n = 96;
    let inputs = stats(&inputs(n, 10));
    for grid in grids() {
        let mut rng = Philox::new(5, 0);
        let mut rounded = crate::grid::Rounded::new(grid, 70, n);
        let max = u32::from(grid.max_code());
        for row in rounded.codes.chunks_exact_mut(n) {
            for group in row.chunks_mut(grid.group().size(n)) {
                group
                    .iter_mut()
                    .for_each(|c| *c = (rng.next_u32() % (max + 1)) as u8);
                // Both ends occur, so that the group's range is the grid's own.
                (group[0], group[1]) = (0, max as u8);
            }
        }
        for p in &mut rounded.params {
            p.scale = 0.03125;
            if !grid.symmetric() {
                p.zero = (rng.next_u32() % (max + 1)) as u8;
            }
        }
        let mut w = Matrix::zeros(70, n);
        for i in 0..70 {
            rounded.dequantize_row(i, w.row_mut(i));
        }
        for entry in METHODS {
            let method = (entry.make)();
            if grid.symmetric() && method.needs() == Needs::Nothing {
                continue; // whole ranges reach half a step past these
            }
            let problem = Problem {
                name: "w",
                weight: &w,
                inputs: Some(&inputs),
                grid,
            };
            let got = method.round(&problem).unwrap().rounded;
            let (mut a, mut b) = (vec![0.0; n], vec![0.0; n]);
            for i in 0..w.rows {
                got.dequantize_row(i, &mut a);
                rounded.dequantize_row(i, &mut b);
                assert_eq!(a, b, "{} {:?} row {i}", entry.name, grid.scheme());
            }
        }
    }
}

#[test]
fn gptq_beats_rounding_to_nearest_on_correlated_inputs() {
    let n = 192;
    let w = normal(80, n, 0.05, 20);
    let inputs = stats(&inputs(n, 30));
    let blocks = affine::SCHEMES.map(|row| Grid::new(row.1).unwrap());
    for grid in grids().into_iter().chain(blocks) {
        let plain = output_error(&w, &rtn::Rtn::new(Fit::absmax()), &inputs, grid);
        let clip = output_error(&w, &rtn::Rtn::new(Fit::clip()), &inputs, grid);
        for order in [ActOrder::Columns, ActOrder::Groups] {
            for importance in [Importance::Squares, Importance::Remaining] {
                let gptq = Gptq {
                    order,
                    importance,
                    ..Gptq::default()
                };
                let e = output_error(&w, &gptq, &inputs, grid);
                assert!(
                    e < 0.8 * clip && e < 0.8 * plain,
                    "{:?} {order:?} {importance:?}: {e} {clip} {plain}",
                    grid.scheme()
                );
            }
        }
    }
}

/// Two columns by hand: the error of the first, times H_01 / H_11, goes to the second.
#[test]
fn gptq_moves_the_error_as_the_hessian_says() {
    let grid = grid(Bits::B8, Group::Channel, Zeros::None);
    let inputs = InputStats::of(Matrix {
        rows: 2,
        cols: 2,
        data: vec![2.0, 1.0, 1.0, 1.0],
    });
    // The whole range is 2 * 127.5 / 255 = 1 per code: 127.5 is rounded to 127 (the greatest
    // code), an error of 0.5, of which H_01 / H_11 = 1 times goes to the second column.
    let w = Matrix {
        rows: 1,
        cols: 2,
        data: vec![127.5, 10.2],
    };
    let gptq = Gptq {
        damping: 0.0,
        fit: Fit::absmax(),
        ..Gptq::default()
    };
    let problem = Problem {
        name: "w",
        weight: &w,
        inputs: Some(&inputs),
        grid,
    };
    let got = gptq.round(&problem).unwrap().rounded;
    assert_eq!(got.params[0].scale, 1.0);
    assert_eq!(got.codes, [255, 128 + 11]); // 10.2 + 0.5 = 10.7
}

#[test]
fn gptq_raises_damping_then_falls_back_by_name() {
    let n = 64;
    let w = normal(8, n, 1.0, 40);
    let grid = grid(Bits::B4, Group::Size(32), Zeros::Integer);
    let problem = |inputs: &InputStats| {
        Gptq {
            damping: 0.0,
            ..Gptq::default()
        }
        .round(&Problem {
            name: "model.w",
            weight: &w,
            inputs: Some(inputs),
            grid,
        })
        .unwrap()
    };
    let nearest = rtn::round(&w, grid, Fit::clip(), &[]);

    // Inputs without any sample in some direction, and no damping: singular.
    let mut singular = moments(&normal(8, n, 1.0, 41));
    let outcome = problem(&InputStats::of(singular.clone()));
    assert_eq!(outcome.method, "gptq");
    assert_eq!(
        outcome.fallbacks,
        ["model.w: the Hessian could be inverted only with damping 0.001 instead of 0"]
    );

    // A negative square in one direction, which no inputs have: damping cannot fix that.
    let h = &mut singular.data;
    let mean = (0..n).map(|i| h[i * n + i]).sum::<f32>() / n as f32;
    h[n + 2] += 4.0 * mean;
    h[2 * n + 1] += 4.0 * mean;
    let outcome = problem(&InputStats::of(singular.clone()));
    assert_eq!(outcome.method, "rtn-clip");
    assert_eq!(outcome.fallbacks.len(), 1);
    assert!(outcome.fallbacks[0].starts_with("model.w: the Hessian cannot be inverted"));
    assert_eq!(outcome.rounded.codes, nearest.codes);

    // NaN.
    singular.data[5] = f32::NAN;
    let outcome = problem(&InputStats::of(singular));
    assert_eq!(outcome.method, "rtn-clip");
    assert!(outcome.fallbacks[0].contains("not finite"));
    let outcome = problem(&stats(&Matrix::zeros(10, n)));
    assert!(outcome.fallbacks[0].contains("all inputs are zero"));
}

#[test]
fn dead_inputs_keep_their_weights_and_are_named() {
    let n = 64;
    let mut x = inputs(n, 50);
    for row in x.data.chunks_exact_mut(n) {
        (row[3], row[40]) = (0.0, 0.0);
    }
    let w = normal(8, n, 1.0, 53);
    let grid = grid(Bits::B8, Group::Size(32), Zeros::None);
    let inputs = stats(&x);
    let outcome = Gptq::default()
        .round(&Problem {
            name: "model.w",
            weight: &w,
            inputs: Some(&inputs),
            grid,
        })
        .unwrap();
    assert_eq!(
        outcome.fallbacks,
        ["model.w: 2 of 64 inputs are zero in calibration: their weights are rounded to nearest"]
    );
    let mut row = vec![0.0; n];
    for i in 0..8 {
        outcome.rounded.dequantize_row(i, &mut row);
        for j in [3, 40] {
            assert!(
                (row[j] - w.row(i)[j]).abs() < 0.03,
                "{} {}",
                row[j],
                w.row(i)[j]
            );
        }
    }
}

#[test]
fn gptq_without_statistics_is_an_error() {
    let w = normal(2, 32, 1.0, 60);
    let problem = Problem {
        name: "model.w",
        weight: &w,
        inputs: None,
        grid: grid(Bits::B4, Group::Size(32), Zeros::None),
    };
    let error = Gptq::default().round(&problem).unwrap_err().to_string();
    assert!(error.contains("32 inputs of model.w"), "{error}");
}

/// Chains like `y = down(up(x) * 1)` keep their function under AWQ's scales.
#[test]
fn awq_folds_scales_without_changing_the_layer() {
    let (hidden, heads, kv_heads, head_dim, inner) = (32, 4, 2, 8, 48);
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let linears = [
        normal(q, hidden, 0.1, 70),
        normal(kv, hidden, 0.1, 71),
        normal(kv, hidden, 0.1, 72),
        normal(hidden, q, 0.1, 73),
        normal(inner, hidden, 0.1, 74),
        normal(inner, hidden, 0.1, 75),
        normal(hidden, inner, 0.1, 76),
    ];
    let spec = &ARCHITECTURES[0].kinds[0];
    let kinds = || spec.linears().into_iter().map(|l| l.kind);
    let gains = |gain: fn(f32) -> f32| (0..hidden).map(|i| gain(i as f32)).collect();
    let layer = FloatLayer {
        index: 0,
        spec,
        linears: kinds().zip(linears).collect(),
        norms: [
            (NormKind::Attention, gains(|i| 1.0 + i / 9.0)),
            (NormKind::Mlp, gains(|i| 2.0 - i / 40.0)),
        ]
        .into(),
        biases: Default::default(),
        head_dim,
    };
    let grid = grid(Bits::B4, Group::Size(16), Zeros::Integer);
    let mut inputs = vec![
        vec![stats(&inputs(hidden, 80))],
        vec![stats(&inputs(q, 83))],
        vec![stats(&inputs(hidden, 86))],
        vec![stats(&inputs(inner, 89))],
    ];
    let before = inputs.clone();
    let mut scaled = layer.clone();
    let changed = Awq::default()
        .transform(
            &mut scaled,
            &mut inputs,
            &kinds().map(|k| (k, grid)).collect(),
        )
        .unwrap();
    assert!(changed);
    assert_ne!(scaled.norms, layer.norms);

    // Each path through the layer that a scale is folded into, as one matrix.
    let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} {b}");
    for (kind, norm) in [
        (LinearKind::Q, NormKind::Attention),
        (LinearKind::K, NormKind::Attention),
        (LinearKind::Gate, NormKind::Mlp),
    ] {
        let (norm, norm_before) = (&scaled.norms[&norm], &layer.norms[&norm]);
        let (a, b) = (scaled.linear(kind), layer.linear(kind));
        for i in 0..a.data.len() {
            close(
                a.data[i] * norm[i % hidden],
                b.data[i] * norm_before[i % hidden],
            );
        }
    }
    let v = |l: &FloatLayer, i: usize, j: usize| {
        l.linear(LinearKind::V).row(i)[j] * l.norms[&NormKind::Attention][j]
    };
    let o = |l: &FloatLayer, i: usize, j: usize| l.linear(LinearKind::O).row(i)[j];
    for head in 0..heads {
        for d in 0..head_dim {
            let (at, value) = (head * head_dim + d, head / 2 * head_dim + d);
            close(
                o(&scaled, 5, at) * v(&scaled, value, 7),
                o(&layer, 5, at) * v(&layer, value, 7),
            );
        }
    }
    for d in 0..inner {
        let path = |l: &FloatLayer| {
            let up = l.linear(LinearKind::Up).row(d)[3] * l.norms[&NormKind::Mlp][3];
            up * l.linear(LinearKind::Down).row(2)[d]
        };
        close(path(&scaled), path(&layer));
    }

    // The statistics follow: dividing an input by s divides its moments by s_i s_j.
    let gain = |l: &FloatLayer| l.norms[&NormKind::Attention][0];
    let s = gain(&layer) / gain(&scaled);
    close(
        inputs[0][0].mean_square[0],
        before[0][0].mean_square[0] / (s * s),
    );

    // And it helps: less output error than rounding the unscaled layer.
    let awq = by_name("awq").unwrap();
    let gate = LinearKind::Gate;
    let after = output_error(scaled.linear(gate), awq.as_ref(), &inputs[2][0], grid);
    let plain = rtn::Rtn::new(Fit::clip());
    let without = output_error(layer.linear(gate), &plain, &before[2][0], grid);
    assert!(after < without, "{after} {without}");
}

/// The same for a mixture: each expert's down has its own scales, and the router shares the input
/// of gate and up.
#[test]
fn folded_scales_leave_a_mixture_as_it_was() {
    let (count, hidden, inner) = (3, 32, 48);
    let spec = &ARCHITECTURES[1].kinds[0];
    let kinds = || spec.linears().into_iter().map(|l| l.kind);
    let linears = [
        (LinearKind::Q, normal(64, hidden, 0.1, 70)),
        (LinearKind::K, normal(32, hidden, 0.1, 71)),
        (LinearKind::V, normal(32, hidden, 0.1, 72)),
        (LinearKind::O, normal(hidden, 64, 0.1, 73)),
        (LinearKind::Router, normal(count, hidden, 0.1, 77)),
        (LinearKind::Gate, normal(count * inner, hidden, 0.1, 74)),
        (LinearKind::Up, normal(count * inner, hidden, 0.1, 75)),
        (LinearKind::Down, normal(count * hidden, inner, 0.1, 76)),
    ];
    let layer = FloatLayer {
        index: 0,
        spec,
        linears: linears.into(),
        norms: [
            (NormKind::Attention, vec![1.0; hidden]),
            (NormKind::Mlp, vec![1.5; hidden]),
        ]
        .into(),
        biases: Default::default(),
        head_dim: 16,
    };
    let grid = grid(Bits::B4, Group::Size(16), Zeros::Integer);
    let mut seen = vec![
        vec![stats(&inputs(hidden, 80))],
        vec![stats(&inputs(64, 83))],
        vec![stats(&inputs(hidden, 86))],
        (0..count)
            .map(|e| stats(&inputs(inner, 89 + e as u64)))
            .collect(),
    ];
    let mut scaled = layer.clone();
    let grids = kinds().map(|k| (k, grid)).collect();
    let changed = Awq::default().transform(&mut scaled, &mut seen, &grids);
    assert!(changed.unwrap());
    let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} {b}");
    let seen_by = |l: &FloatLayer, kind: LinearKind, row: usize, i: usize| {
        l.linear(kind).row(row)[i] * l.norms[&NormKind::Mlp][i]
    };
    assert_ne!(
        scaled.linear(LinearKind::Router).data,
        layer.linear(LinearKind::Router).data
    );
    for i in 0..hidden {
        for kind in [LinearKind::Router, LinearKind::Gate] {
            close(seen_by(&scaled, kind, 1, i), seen_by(&layer, kind, 1, i));
        }
    }
    let mut moved = 0;
    for e in 0..count {
        for d in 0..inner {
            let path = |l: &FloatLayer| {
                let up = seen_by(l, LinearKind::Up, e * inner + d, 3);
                up * l.linear(LinearKind::Down).row(e * hidden + 2)[d]
            };
            close(path(&scaled), path(&layer));
            let down = |l: &FloatLayer| l.linear(LinearKind::Down).row(e * hidden + 2)[d];
            moved += usize::from(down(&scaled) != down(&layer));
        }
    }
    assert!(moved > 0, "no expert's down was scaled");
}

/// The result does not depend on the number of threads.
#[test]
fn threads_do_not_change_codes() {
    let n = 128;
    let inputs = stats(&inputs(n, 95));
    let w = normal(150, n, 0.1, 98);
    let grid = grid(Bits::B4, Group::Size(64), Zeros::Integer);
    for entry in METHODS {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let problem = Problem {
                name: "w",
                weight: &w,
                inputs: Some(&inputs),
                grid,
            };
            let outcome = pool.unwrap().install(|| (entry.make)().round(&problem));
            outcome.unwrap().rounded
        };
        let (one, three) = (with(1), with(3));
        assert_eq!(one.codes, three.codes, "{}", entry.name);
        assert_eq!(one.params, three.params, "{}", entry.name);
    }
}

/// Rounding row by row gives the same result as rounding the whole matrix.
#[test]
fn rows_in_a_stream_are_rounded_like_a_matrix() {
    let w = normal(37, 96, 0.1, 99);
    let dense = w.to_weight().unwrap();
    let importance: Vec<f32> = (0..96).map(|i| 1.0 + (i % 5) as f32).collect();
    for grid in grids() {
        let whole = rtn::round(&w, grid, Fit::clip(), &importance);
        let (streamed, rel_error) =
            rtn::round_rows("w", &dense, grid, Fit::clip(), &importance).unwrap();
        let (mut a, mut b) = (vec![0.0; 96], vec![0.0; 96]);
        let (mut error, mut norm) = (0f64, 0f64);
        for i in 0..37 {
            whole.dequantize_row(i, &mut a);
            streamed.dequantize_row(i, &mut b).unwrap();
            assert_eq!(a, b, "{:?}", grid.scheme());
            for (q, w) in a.iter().zip(w.row(i)) {
                error += f64::from(w - q).powi(2);
                norm += f64::from(*w).powi(2);
            }
        }
        assert!((rel_error - (error / norm).sqrt()).abs() < 1e-9);
    }
}
