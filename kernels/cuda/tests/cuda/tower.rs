//! A tower's kernels compared with their definition in f64.

use super::rows::in_order;
use super::{finish, gpu, guarded};
use nq_cuda::{Buffer, Gpu, ImageGrid, ImageHeads, LayerNorm};
use nq_model::vision::Grid;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;
use std::f32::consts::LOG2_E;

const WILD: u16 = 0x7eef;

/// Heads with those widths that kernels pad, or not; images of fewer patches than a tile of keys, of whole tiles, and of
/// more than a block's queries.
#[test]
fn towers() {
    let Some(gpu) = gpu() else { return };
    for (count, dim) in [(4, 16), (2, 64), (3, 72), (2, 68)] {
        for (h, w) in [(2, 2), (8, 10), (16, 8), (24, 22)] {
            check(&gpu, ImageHeads { count, dim }, Grid { t: 1, h, w });
        }
    }
    assert!(!ImageHeads { count: 1, dim: 80 }.are_served());
    assert!(!ImageHeads { count: 1, dim: 62 }.are_served());
}

fn halves(gpu: &Gpu, n: usize) -> Buffer<u16> {
    gpu.upload("a test", &vec![WILD; n]).unwrap()
}

fn read(buffer: &Buffer<u16>, n: usize) -> Vec<u16> {
    let mut all = vec![0; buffer.len()];
    buffer.read(0, &mut all).unwrap();
    let guards = all.split_off(n);
    assert!(
        !guards.is_empty() && guards.iter().all(|v| *v == WILD),
        "written past the end"
    );
    all
}

fn check(gpu: &Gpu, heads: ImageHeads, grid: Grid) {
    let ImageHeads { count, dim } = heads;
    let what = format!("{count} heads of {dim}, {} x {} patches", grid.h, grid.w);
    let stream = gpu.stream().unwrap();
    let upload = |values: &[f32]| gpu.upload("a test", values).unwrap();
    let image = ImageGrid { grid, merge: 2 };
    let (m, width, side) = (grid.patches(), count * dim, 5);
    let places: Vec<(usize, usize)> = grid.places(2).collect();

    let (start, bias) = (normal(m * width, 1), normal(width, 2));
    let table = normal(side * side * width, 3);
    let mut x = guarded(gpu, &start);
    let (on_device, on_table) = (upload(&bias), upload(&table));
    stream
        .tower_positions(&mut x, &on_device, &on_table, image)
        .unwrap();
    let mut expected = start;
    for ((row, column), x) in places.iter().zip(expected.chunks_exact_mut(width)) {
        let at = |i: usize, n: usize| (i * (side - 1)) as f64 / (n.max(2) - 1) as f64;
        let weight = |at: f64, i: usize| (1.0 - (at - i as f64).abs()).max(0.0);
        for (k, x) in x.iter_mut().enumerate() {
            let mut sum = f64::from(*x) + f64::from(bias[k]);
            for entry in 0..side * side {
                let y = weight(at(*row, grid.h), entry / side);
                let z = weight(at(*column, grid.w), entry % side);
                sum += y * z * f64::from(table[entry * width + k]);
            }
            *x = sum as f32;
        }
    }
    let error = nmse(&finish(&stream, &x), &expected);
    assert!(error < 1e-11, "positions of {what}: {error:e}");

    // Of a patch, of four that become one row, and of four as one row.
    for (norms, together) in [(1, 1), (1, 4), (4, 1)] {
        let (rows, across) = (m / norms, norms * width);
        let (added, gain, shift) = (normal(width, 4), normal(across, 5), normal(across, 6));
        let mut x = guarded(gpu, &expected);
        let padded = (together * across).next_multiple_of(256);
        let mut half = halves(gpu, rows / together * padded + 64);
        let norm = LayerNorm {
            gain: &upload(&gain),
            bias: &upload(&shift),
            eps: 1e-6,
        };
        let on_device = upload(&added);
        let added_to = Some(&on_device);
        stream
            .tower_norm(&mut x, added_to, &norm, &mut half, rows, together)
            .unwrap();
        let mut summed = expected.clone();
        (summed.iter_mut().zip(added.iter().cycle())).for_each(|(x, a)| *x += a);
        assert!(finish(&stream, &x) == summed, "sums of {what}");
        let mut wanted = Vec::new();
        for row in summed.chunks_exact(across) {
            let values = || row.iter().map(|v| f64::from(*v));
            let mean = values().sum::<f64>() / across as f64;
            let variance = values().map(|v| (v - mean).powi(2)).sum::<f64>() / across as f64;
            let scale = 1.0 / (variance + 1e-6).sqrt();
            let parameters = gain.iter().zip(&shift);
            wanted.extend(
                values()
                    .zip(parameters)
                    .map(|(v, (g, b))| ((v - mean) * scale) as f32 * g + b),
            );
        }
        let found = read(&half, rows / together * padded);
        let error = nmse(&in_order(&found, together * across, padded), &wanted);
        assert!(
            error < 1e-6,
            "norms of {what}, {norms} {together}: {error:e}"
        );
    }

    let (qkv, biases) = (normal(m * 3 * width, 7), normal(3 * width, 8));
    let quarter = dim / 4;
    let turn = |i: usize| {
        let (sin, cos) = ((i / quarter) as f32 / (i % quarter + 1) as f32).sin_cos();
        [cos, sin]
    };
    let turns: Vec<[f32; 2]> = (0..grid.h.max(grid.w) * quarter).map(turn).collect();
    let mut values = halves(gpu, heads.values(m) + 64);
    let on_device = gpu.upload("a test", &turns).unwrap();
    let (products, shifts) = (upload(&qkv), upload(&biases));
    stream
        .tower_heads(&products, &shifts, &on_device, &mut values, heads, image)
        .unwrap();
    let padded = width.next_multiple_of(256);
    let mut out = halves(gpu, m * padded + 64);
    (stream.tower_attention(&values, &mut out, heads, m, 0..m)).unwrap();
    stream.synchronize().unwrap();
    // `[3 heads][m][dim]`
    let value = |head: usize, row: usize, d: usize| {
        f64::from(qkv[row * 3 * width + head * dim + d]) + f64::from(biases[head * dim + d])
    };
    let turned = |head: usize, row: usize, d: usize| {
        let (half, place) = (dim / 2, places[row]);
        let j = d % half;
        let at = if j < quarter { place.0 } else { place.1 };
        let [cos, sin] = turns[at * quarter + j % quarter].map(f64::from);
        match d < half {
            true => value(head, row, d) * cos - value(head, row, d + half) * sin,
            false => value(head, row, d) * cos + value(head, row, d - half) * sin,
        }
    };
    let mut wanted = vec![0.0; m * width];
    for head in 0..count {
        let rows = |kind: usize| -> Vec<f64> {
            let each = (0..m).flat_map(|row| (0..dim).map(move |d| (row, d)));
            each.map(|(row, d)| turned(kind * count + head, row, d))
                .collect()
        };
        let (queries, keys) = (rows(0), rows(1));
        for row in 0..m {
            let query = &queries[row * dim..][..dim];
            let score = |key: &[f64]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
            let scale = f64::from(LOG2_E / (dim as f32).sqrt());
            let scores: Vec<f64> = keys.chunks_exact(dim).map(|k| score(k) * scale).collect();
            let top = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp2()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..dim {
                let sum = |(i, w): (usize, &f64)| w * value(2 * count + head, i, d);
                let sum: f64 = weights.iter().enumerate().map(sum).sum();
                wanted[row * width + head * dim + d] = (sum / total) as f32;
            }
        }
    }
    read(&values, heads.values(m));
    let found = in_order(&read(&out, m * padded), width, padded);
    let error = nmse(&found, &wanted);
    assert!(error < 1e-5, "attention of {what}: {error:e}");
    let mut out = halves(gpu, m * padded + 64);
    for first in (0..m).step_by(128) {
        let queries = first..m.min(first + 128);
        (stream.tower_attention(&values, &mut out, heads, m, queries)).unwrap();
    }
    stream.synchronize().unwrap();
    assert!(
        in_order(&read(&out, m * padded), width, padded) == found,
        "attention of {what} in pieces"
    );

    for exact in [false, true] {
        let x = upload(&expected);
        let shift = upload(&bias);
        stream.tower_gelu(&x, &shift, &mut out, m, exact).unwrap();
        stream.synchronize().unwrap();
        let wanted = expected.iter().zip(bias.iter().cycle()).map(|(x, b)| {
            let v = f64::from(*x) + f64::from(*b);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3));
            let part = match exact {
                true => libm::erf(v * std::f64::consts::FRAC_1_SQRT_2),
                false => inner.tanh(),
            };
            (0.5 * v * (1.0 + part)) as f32
        });
        let found = in_order(&read(&out, m * padded), width, padded);
        let error = nmse(&found, &wanted.collect::<Vec<f32>>());
        assert!(error < 1e-6, "GELU of {what}: {error:e}");
    }
}
