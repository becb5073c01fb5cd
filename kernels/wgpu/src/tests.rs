//! Every kernel compared with the scalar reference, on the first adapter: on a machine without a GPU, Mesa's software
//! driver (lavapipe).
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use crate::gpu::{Binding, Gpu, Grid, Pass};
use crate::linear::Linear;
use crate::product::{BoundProduct, Operands, Outputs, ProductKernels, RowOperands, RowProduct};
use crate::program::{
    ATTENTION, ATTENTION_ROW, COMBINE, DRAW, HEADS, Heads, NORM, NORM_ROUND, ROUND, SILU,
    attention, attention_row, combine, draw, norm, prepare_heads, round, silu,
};
use crate::session::best_token;
use crate::sizes::DRAW_PARTS;
use crate::source::KernelSource;
use half::f16;
use nq_formats::{AffineScheme, Bits, Group, Weight, Zeros};
use nq_kernels::Activations;
use nq_kernels::pages::PAGE;
use nq_kernels::reference;
use nq_model::{DType, Dims};
use nq_runtime::interface::ActivationChoice;
use nq_runtime::weights::Census;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, blocks, dense, held_as_others, normal};
use wgpu::Buffer;

/// The first adapter; `None`, said in print, where there is none.
fn gpu() -> Option<Gpu> {
    if crate::adapters().is_empty() {
        println!("skipped: no adapter for Vulkan, Metal or Direct3D 12");
        return None;
    }
    Some(Gpu::open(0).unwrap())
}

/// Runs a kernel once.
fn run(gpu: &Gpu, source: &KernelSource, bindings: &[Binding], buffers: &[&Buffer], grid: Grid) {
    let kernel = gpu.kernel(source, bindings).unwrap();
    let bound = gpu.bind(bindings, buffers).unwrap();
    let mut encoder = gpu.encoder();
    {
        let mut pass = Pass::new(&mut encoder, None);
        pass.launch(&kernel, &bound, grid);
    }
    gpu.submit(encoder);
    gpu.finish().unwrap();
}

/// The first `n` values of a buffer.
fn read(gpu: &Gpu, buffer: &Buffer, n: usize) -> Vec<f32> {
    let staging = gpu.staging(4 * n).unwrap();
    let mut encoder = gpu.encoder();
    encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, 4 * n as u64);
    gpu.submit(encoder);
    let mut values = Vec::new();
    gpu.read(&staging, 4 * n, &mut values).unwrap();
    values
}

fn words(gpu: &Gpu, values: &[u32]) -> Buffer {
    let values: Vec<f32> = values.iter().map(|v| f32::from_bits(*v)).collect();
    gpu.upload("words", &values).unwrap()
}

/// `x` `[rows, in]` times `parts`, added to `y` where `outputs` says so.
fn product(
    gpu: &Gpu,
    parts: &[&Weight],
    choice: ActivationChoice,
    outputs: Outputs,
    x: &[f32],
) -> Vec<f32> {
    let gated = outputs == Outputs::Gated;
    let linear = Linear::new(gpu, "test", parts, gated, choice, &mut Census::default()).unwrap();
    assert_eq!(linear.interleaved, gated);
    let rows = x.len() / linear.inputs;
    let width = match gated {
        true => linear.outputs / 2,
        false => linear.outputs,
    };
    let step = gpu.uniform(&[rows as u32, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let x = gpu.upload("x", x).unwrap();
    let y = gpu.upload("y", &vec![1.0; rows * width]).unwrap();
    let rounded = gpu.buffer("bytes", rows * linear.inputs).unwrap();
    let scales = gpu.buffer("scales", rows * linear.inputs / 4).unwrap();
    if linear.rounds {
        let buffers = [&step, &x, &rounded, &scales];
        run(
            gpu,
            &round(linear.inputs),
            &ROUND,
            &buffers,
            Grid::new(rows, 1),
        );
    }
    let (x, x_scales) = match linear.rounds {
        true => (&rounded, &scales),
        false => (&x, &x),
    };
    let operands = Operands {
        step: &step,
        x,
        x_scales,
        y: &y,
    };
    let bound = BoundProduct::new(gpu, &linear, operands, outputs).unwrap();
    let mut encoder = gpu.encoder();
    {
        let mut pass = Pass::new(&mut encoder, None);
        bound
            .launch(gpu, &mut pass, rows, &mut ProductKernels::new())
            .unwrap();
    }
    gpu.submit(encoder);
    read(gpu, &y, rows * width)
}

/// The same by the reference.
fn expected(parts: &[&Weight], rounding: Activations, outputs: Outputs, x: &[f32]) -> Vec<f32> {
    let inputs = parts[0].dims().cols;
    let mut x = x.to_vec();
    reference::round_activations(&mut x, inputs, rounding);
    let rows = x.len() / inputs;
    let mut by_part: Vec<Vec<f32>> = Vec::new();
    for part in parts {
        let mut y = vec![0.0; rows * part.dims().rows];
        reference::linear(&x, part, &mut y).unwrap();
        by_part.push(y);
    }
    if outputs == Outputs::Gated {
        let mut y = vec![0.0; by_part[0].len()];
        reference::silu_mul(&by_part[0], &by_part[1], &mut y);
        return y;
    }
    let mut all = Vec::new();
    for row in 0..rows {
        for (y, part) in by_part.iter().zip(parts) {
            let width = part.dims().rows;
            all.extend_from_slice(&y[row * width..][..width]);
        }
    }
    if outputs == Outputs::Added {
        all.iter_mut().for_each(|v| *v += 1.0);
    }
    all
}

/// Weights of every form that kernels read, with this many inputs.
fn weights(out: usize, inputs: usize) -> Vec<Weight> {
    let plain = |bits, group, zeros| AffineScheme::new(bits, group, zeros);
    let mut schemes = vec![
        plain(Bits::B4, Group::Size(64), Zeros::Integer),
        plain(Bits::B4, Group::Size(16), Zeros::None),
        plain(Bits::B4, Group::Channel, Zeros::Offset),
        plain(Bits::B5, Group::Size(32), Zeros::Integer),
        plain(Bits::B6, Group::Size(128), Zeros::Offset),
        plain(Bits::B8, Group::Size(64), Zeros::Integer),
    ];
    // Scales in two levels, tables and fewer bits, which are held otherwise.
    schemes.extend(held_as_others(Group::Size(64)).into_iter().step_by(5));
    schemes.extend(blocks().into_iter().skip(1).step_by(3));
    let quantized = schemes.into_iter().zip(10..);
    let quantized = quantized.map(|(scheme, seed)| affine(scheme, out, inputs, None, seed));
    let floats = [DType::F32, DType::F16, DType::BF16];
    let floats = floats.into_iter().zip(1..);
    let floats = floats.map(|(dtype, seed)| dense(dtype, out, inputs, seed));
    floats.chain(quantized).collect()
}

#[test]
fn products_of_every_form() {
    let Some(gpu) = gpu() else { return };
    let inputs = 3 * 512;
    for weight in weights(70, inputs) {
        for rows in [1, 70] {
            let x = normal(rows * inputs, rows as u64);
            let found = product(&gpu, &[&weight], ActivationChoice::F32, Outputs::Added, &x);
            let expected = expected(&[&weight], Activations::F32, Outputs::Added, &x);
            let error = nmse(&found, &expected);
            assert!(
                error < 1e-11,
                "{} x {rows}: {error:e}",
                weight.scheme_name()
            );
        }
    }
}

#[test]
fn products_of_any_number_of_rows() {
    let Some(gpu) = gpu() else { return };
    let scheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let (a, b) = (
        affine(scheme, 50, 320, None, 1),
        affine(scheme, 23, 320, None, 2),
    );
    let other = AffineScheme::new(Bits::B8, Group::Size(32), Zeros::None);
    let c = affine(other, 9, 320, None, 3);
    for rows in [1, 3, 16, 17, 65] {
        let x = normal(rows * 320, rows as u64);
        for (choice, rounding) in [
            (ActivationChoice::F32, Activations::F32),
            (ActivationChoice::Auto, Activations::Int8 { group: 32 }),
        ] {
            let parts = [&a, &b, &c];
            let found = product(&gpu, &parts, choice, Outputs::Stored, &x);
            let expected = expected(&parts, rounding, Outputs::Stored, &x);
            let error = nmse(&found, &expected);
            assert!(error < 1e-11, "{rows} rows, {rounding}: {error:e}");
        }
    }
}

/// Products of one row that normalize and round their input themselves, with and without subgroups.
#[test]
fn a_row_is_normalized_and_rounded_by_its_product() {
    let Some(mut gpu) = gpu() else { return };
    let with = |bits, group, zeros| AffineScheme::new(bits, group, zeros);
    let schemes = [
        with(Bits::B4, Group::Size(64), Zeros::Integer),
        with(Bits::B4, Group::Channel, Zeros::Offset),
        with(Bits::B5, Group::Size(32), Zeros::Integer),
        with(Bits::B6, Group::Size(128), Zeros::Offset),
        with(Bits::B8, Group::Size(64), Zeros::Integer),
    ];
    for lanes in [gpu.lanes, None] {
        gpu.lanes = lanes;
        // Inputs that no number of lanes divides, and so many outputs that workgroups compute several blocks.
        for (inputs, rows) in [(672, 131), (3 * 512, 70), (64, 40_000)] {
            for (scheme, seed) in schemes.into_iter().zip(1..) {
                let cases = [Outputs::Stored, Outputs::Added, Outputs::Gated].into_iter();
                for (outputs, eps) in cases.zip([Some(1e-5), None, Some(1e-6)]) {
                    if rows > 1000 && seed > 1 {
                        continue;
                    }
                    let part = |seed| affine(scheme, rows, inputs, None, seed);
                    let (first, second) = (part(seed), part(seed + 50));
                    let parts = match outputs {
                        Outputs::Gated => vec![&first, &second],
                        _ => vec![&first],
                    };
                    let (x, gains) = (normal(inputs, 3), normal(inputs, 4));
                    let (step, y, input, gain_buffer) = (
                        gpu.uniform(&[1, 0, 0, 0, 0, 0, 0, 0]).unwrap(),
                        gpu.upload("y", &vec![1.0; rows]).unwrap(),
                        gpu.upload("x", &x).unwrap(),
                        gpu.upload("gains", &gains).unwrap(),
                    );
                    let mut census = Census::default();
                    let choice = ActivationChoice::Int8 { group: 32 };
                    let gated = outputs == Outputs::Gated;
                    let linear =
                        Linear::new(&gpu, "test", &parts, gated, choice, &mut census).unwrap();
                    let operands = RowOperands {
                        step: &step,
                        x: &input,
                        norm: eps.map(|eps| (&gain_buffer, eps)),
                        y: &y,
                    };
                    let product = RowProduct::new(&gpu, &linear, operands, outputs).unwrap();
                    let product = product.expect("inputs that are rounded, and fit a workgroup");
                    let mut encoder = gpu.encoder();
                    product.launch(&mut Pass::new(&mut encoder, None));
                    gpu.submit(encoder);
                    let found = read(&gpu, &y, rows);
                    let mut x_normed = x.to_vec();
                    if let Some(eps) = eps {
                        reference::rms_norm(&x, &gains, eps, &mut x_normed);
                    }
                    let rounding = Activations::Int8 { group: 32 };
                    let error = nmse(&found, &expected(&parts, rounding, outputs, &x_normed));
                    // Where a value is halfway between two bytes, the order of factors decides.
                    let most = if eps.is_some() { 1e-5 } else { 1e-11 };
                    let case = format!("{scheme}, {rows} x {inputs}, {outputs:?}, {lanes:?}");
                    assert!(error < most, "{case}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn weights_are_cut_where_a_binding_ends() {
    let Some(mut gpu) = gpu() else { return };
    gpu.limits.max_storage_buffer_binding_size = 1 << 14;
    let scheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let weight = affine(scheme, 300, 320, None, 1);
    let (parts, choice) = ([&weight], ActivationChoice::F32);
    let linear = Linear::new(&gpu, "test", &parts, false, choice, &mut Census::default()).unwrap();
    // Tiles of 64 rows of 160 bytes.
    assert_eq!(linear.slices.len(), 5);
    let x = normal(2 * 320, 1);
    let found = product(&gpu, &parts, choice, Outputs::Stored, &x);
    let error = nmse(
        &found,
        &expected(&parts, Activations::F32, Outputs::Stored, &x),
    );
    assert!(error < 1e-11, "{error:e}");
}

#[test]
fn inputs_are_rounded_to_bytes_for_every_width() {
    let Some(gpu) = gpu() else { return };
    for bits in [Bits::B4, Bits::B5, Bits::B6, Bits::B8] {
        let scheme = AffineScheme::new(bits, Group::Size(64), Zeros::Integer);
        let weight = affine(scheme, 66, 256, None, 5);
        let choice = ActivationChoice::Int8 { group: 32 };
        for rows in [2, 40] {
            let x = normal(rows * 256, 3);
            let found = product(&gpu, &[&weight], choice, Outputs::Stored, &x);
            let rounding = Activations::Int8 { group: 32 };
            let error = nmse(&found, &expected(&[&weight], rounding, Outputs::Stored, &x));
            assert!(error < 1e-11, "{bits:?} x {rows}: {error:e}");
        }
    }
}

#[test]
fn gates_multiply_their_neighbours() {
    let Some(gpu) = gpu() else { return };
    let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let pair = |a: Weight, b: Weight| (a, b);
    for (gate, up) in [
        pair(
            affine(scheme, 37, 96, None, 1),
            affine(scheme, 37, 96, None, 2),
        ),
        pair(dense(DType::BF16, 37, 96, 1), dense(DType::BF16, 37, 96, 2)),
    ] {
        for rows in [1, 6, 16, 33] {
            let x = normal(rows * 96, rows as u64);
            let parts = [&gate, &up];
            let found = product(&gpu, &parts, ActivationChoice::F32, Outputs::Gated, &x);
            let error = nmse(
                &found,
                &expected(&parts, Activations::F32, Outputs::Gated, &x),
            );
            assert!(error < 1e-10, "{rows} rows: {error:e}");
        }
    }
    let (rows, width) = (3, 300);
    let x = normal(rows * 2 * width, 4);
    let step = gpu.uniform(&[rows as u32, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let (input, y) = (
        gpu.upload("x", &x).unwrap(),
        gpu.buffer("y", 4 * rows * width).unwrap(),
    );
    run(
        &gpu,
        &silu(width),
        &SILU,
        &[&step, &input, &y],
        Grid::new(rows, 1),
    );
    let mut expected = vec![0.0; rows * width];
    for (row, y) in x
        .chunks_exact(2 * width)
        .zip(expected.chunks_exact_mut(width))
    {
        reference::silu_mul(&row[..width], &row[width..], y);
    }
    assert!(nmse(&read(&gpu, &y, rows * width), &expected) < 1e-11);
}

#[test]
fn rows_are_normalized_in_the_order_that_is_wanted() {
    let Some(gpu) = gpu() else { return };
    let (hidden, eps) = (672, 1e-5);
    let (x, gains) = (normal(4 * hidden, 1), normal(hidden, 2));
    let mut expected = vec![0.0; x.len()];
    reference::rms_norm(&x, &gains, eps, &mut expected);
    // The wanted rows stand behind five other words.
    let step = gpu.uniform(&[4, 0, 0, 0, 0, 5, 0, 2]).unwrap();
    let batch = words(&gpu, &[9, 9, 9, 9, 9, 3, 1]);
    let (gains, x) = (
        gpu.upload("gains", &gains).unwrap(),
        gpu.upload("x", &x).unwrap(),
    );
    let y = gpu.buffer("y", 16 * hidden).unwrap();
    let buffers = [&step, &batch, &gains, &x, &y];
    run(&gpu, &norm(hidden, eps), &NORM, &buffers, Grid::new(4, 1));
    assert!(nmse(&read(&gpu, &y, 4 * hidden), &expected) < 1e-11);
    let gathers = norm(hidden, eps).flag("GATHER", true);
    run(&gpu, &gathers, &NORM, &buffers, Grid::new(2, 1));
    let wanted = [&expected[3 * hidden..], &expected[hidden..2 * hidden]].concat();
    assert!(nmse(&read(&gpu, &y, 2 * hidden), &wanted) < 1e-11);
    // The same in bytes, and their scales.
    let rounds = norm(hidden, eps).flag("ROUND", true);
    let (codes, scales) = (
        gpu.buffer("bytes", 4 * hidden).unwrap(),
        gpu.buffer("scales", hidden).unwrap(),
    );
    let buffers = [&step, &batch, &gains, &x, &codes, &scales];
    run(&gpu, &rounds, &NORM_ROUND, &buffers, Grid::new(4, 1));
    let (codes, scales) = (read(&gpu, &codes, hidden), read(&gpu, &scales, hidden / 4));
    let codes: Vec<i8> = codes
        .iter()
        .flat_map(|v| v.to_bits().to_le_bytes().map(|b| b as i8))
        .collect();
    let mut found = Vec::new();
    for (unit, scale) in codes.chunks_exact(32).zip(scales.chunks_exact(2)) {
        found.extend(unit.iter().map(|c| f32::from(*c) * scale[0]));
        let sum: f32 = unit.iter().map(|c| f32::from(*c)).sum();
        assert!((sum * scale[0] - scale[1]).abs() < 1e-3 * scale[0].abs());
    }
    reference::round_activations(&mut expected, hidden, Activations::Int8 { group: 32 });
    assert!(nmse(&found, &expected) < 1e-5);
}

#[test]
fn operations_are_timed_while_they_are_profiled() {
    let Some(gpu) = gpu() else { return };
    assert!(gpu.timer().unwrap().is_none());
    if !gpu.times {
        println!("skipped: no timestamps within lists of commands");
        return;
    }
    gpu.profile.start();
    let mut timer = gpu.timer().unwrap().unwrap();
    let logits = gpu.upload("logits", &normal(1 << 16, 9)).unwrap();
    let best = gpu.buffer("best", 8 * DRAW_PARTS).unwrap();
    let kernel = gpu.kernel(&draw(1 << 16), &DRAW).unwrap();
    let bound = gpu.bind(&DRAW, &[&logits, &best]).unwrap();
    let mut encoder = gpu.encoder();
    // Two lists, the first with two operations.
    for ops in [&["a", "b"][..], &["a"]] {
        let mut pass = Pass::new(&mut encoder, Some(&mut timer));
        for op in ops {
            pass.launch(&kernel, &bound, Grid::new(1, DRAW_PARTS));
            pass.ends((op, "draw", Dims::new(1, 1)), 100);
        }
    }
    timer.resolve(&mut encoder);
    gpu.submit(encoder);
    timer.count(&gpu).unwrap();
    let mut found = gpu.profile.stop();
    found.sort_by_key(|timing| timing.op);
    let counts: Vec<_> = found.iter().map(|t| (t.op, t.calls, t.bytes)).collect();
    assert_eq!(counts, [("a", 2, 200), ("b", 1, 100)]);
}

#[test]
fn the_first_of_the_best_tokens_is_drawn() {
    let Some(gpu) = gpu() else { return };
    let vocab = 5000;
    let mut logits = normal(4 * vocab, 9);
    logits[vocab - 1] = 9.0;
    for equal in [4999, 78, 79, 2500] {
        logits[vocab + equal] = 10.0;
    }
    logits[2 * vocab..3 * vocab].fill(-1e30);
    logits[3 * vocab + 4000] = f32::NAN;
    let (rows, best) = (
        gpu.upload("logits", &logits).unwrap(),
        gpu.buffer("best", 4 * 8 * DRAW_PARTS).unwrap(),
    );
    let grid = Grid::new(4, DRAW_PARTS);
    run(&gpu, &draw(vocab), &DRAW, &[&rows, &best], grid);
    let found = read(&gpu, &best, 4 * 2 * DRAW_PARTS);
    let found: Vec<Option<u32>> = found
        .chunks_exact(2 * DRAW_PARTS)
        .map(|row| best_token(row).ok())
        .collect();
    assert_eq!(found, [Some(4999), Some(78), Some(0), None]);
}

/// A sequence whose pages lie in another order, the last `rows` of whose `len` positions are computed.
struct CachedSequence {
    heads: Heads,
    len: usize,
    rows: usize,
    table: Vec<u32>,
}

impl CachedSequence {
    fn first(&self) -> usize {
        self.len - self.rows
    }

    fn row(&self) -> usize {
        (self.heads.count + 2 * self.heads.kv) * self.heads.dim
    }

    /// Sizes and words of a pass with tiles of `tile` rows, whose keys are read in parts of `split_pages` pages, and
    /// whose heads turn by these cosines and sines.
    fn batch(&self, tile: usize, split_pages: usize, turns: &[(f32, f32)]) -> ([u32; 8], Vec<u32>) {
        let mut words: Vec<u32> = (self.first()..self.len)
            .flat_map(|p| [p as u32, 0])
            .collect();
        let tiles_at = words.len();
        for first in (0..self.rows).step_by(tile) {
            let count = tile.min(self.rows - first);
            words.extend([first, count, self.first() + first, 0].map(|n| n as u32));
        }
        let tiles = (words.len() - tiles_at) / 4;
        let tables_at = words.len();
        words.extend(&self.table);
        let turns_at = words.len();
        words.extend(turns.iter().flat_map(|&(c, s)| [c.to_bits(), s.to_bits()]));
        let splits = self.table.len().div_ceil(split_pages);
        let step = [
            self.rows,
            tiles,
            splits,
            split_pages,
            tiles_at,
            0,
            tables_at,
            turns_at,
        ];
        (step.map(|n| n as u32), words)
    }

    /// Where a head's values at `position` are among pairs.
    fn place(&self, head: usize, position: usize) -> usize {
        let page = self.table[position / PAGE] as usize;
        ((page * self.heads.kv + head) * PAGE + position % PAGE) * self.heads.dim / 2
    }
}

fn pairs(values: &[f32]) -> Vec<u32> {
    let bits = |v: f32| u32::from(f16::from_f32(v).to_bits());
    let pair = |p: &[f32; 2]| bits(p[0]) | bits(p[1]) << 16;
    values.as_chunks::<2>().0.iter().map(pair).collect()
}

#[test]
fn heads_are_normalized_turned_and_kept() {
    let Some(gpu) = gpu() else { return };
    let eps = 1e-6;
    for (biased, normed, turned) in [(true, false, 64), (false, true, 32), (false, false, 64)] {
        let heads = Heads {
            count: 4,
            kv: 2,
            dim: 64,
            turned,
        };
        let s = CachedSequence {
            heads,
            len: 131,
            rows: 5,
            table: vec![1, 0],
        };
        let (all, dim, row) = (heads.count + 2 * heads.kv, heads.dim, s.row());
        let qkv = normal(s.rows * row, 1);
        let (biases, gains) = (normal(row, 2), normal(2 * dim, 3));
        let turns: Vec<(f32, f32)> = (normal(s.rows * turned / 2, 4).iter())
            .map(|a| (a.cos(), a.sin()))
            .collect();
        let mut vectors = Vec::new();
        if biased {
            vectors.extend(&biases);
        }
        let source = prepare_heads(heads, eps)
            .with("NORMS_AT", vectors.len())
            .flag("BIASES", biased)
            .flag("NORMS", normed);
        vectors.extend(&gains);
        let (step, batch) = s.batch(1, 8, &turns);
        let (step, batch) = (gpu.uniform(&step).unwrap(), words(&gpu, &batch));
        let vectors = gpu.upload("vectors", &vectors).unwrap();
        let buffer = gpu.upload("qkv", &qkv).unwrap();
        let bytes = 2 * heads.kv * PAGE * dim * 2;
        let keys = gpu.buffer("keys", bytes).unwrap();
        let values = gpu.buffer("values", bytes).unwrap();
        let buffers = [&step, &batch, &vectors, &buffer, &keys, &values];
        run(&gpu, &source, &HEADS, &buffers, Grid::new(s.rows, all));
        let found = read(&gpu, &buffer, qkv.len());
        let kept = [read(&gpu, &keys, bytes / 4), read(&gpu, &values, bytes / 4)];
        for (r, row_values) in qkv.chunks_exact(row).enumerate() {
            for (head, values) in row_values.chunks_exact(dim).enumerate() {
                let mut expected = values.to_vec();
                if biased {
                    let biases = biases[head * dim..].iter();
                    expected.iter_mut().zip(biases).for_each(|(v, b)| *v += b);
                }
                let is_value = head >= heads.count + heads.kv;
                if normed && !is_value {
                    let gains = &gains[usize::from(head >= heads.count) * dim..][..dim];
                    let x = expected.clone();
                    reference::rms_norm(&x, gains, eps, &mut expected);
                }
                if !is_value {
                    let turns = &turns[r * turned / 2..][..turned / 2];
                    reference::rope(&mut expected[..turned], turns);
                }
                if head < heads.count {
                    let found = &found[r * row + head * dim..][..dim];
                    assert!(nmse(found, &expected) < 1e-11, "head {head} of row {r}");
                    continue;
                }
                let head = (head - heads.count) % heads.kv;
                let at = s.place(head, s.first() + r);
                let found: Vec<f32> = kept[usize::from(is_value)][at..][..dim / 2]
                    .iter()
                    .flat_map(|w| [w.to_bits() as u16, (w.to_bits() >> 16) as u16])
                    .map(|bits| f16::from_bits(bits).to_f32())
                    .collect();
                assert!(
                    nmse(&found, &expected) < 1e-6,
                    "kept head {head} of row {r}"
                );
            }
        }
    }
}

/// Steps whose kernel prepares a row's heads itself give what preparing them and attending give.
#[test]
fn a_row_prepares_its_heads_and_attends() {
    let Some(gpu) = gpu() else { return };
    let eps = 1e-6;
    let shapes = [(4, 2, 64), (7, 1, 32), (2, 2, 128), (8, 1, 256), (3, 1, 80)];
    for ((count, kv, dim), normed) in shapes.into_iter().zip([true, false].into_iter().cycle()) {
        let heads = Heads {
            count,
            kv,
            dim,
            turned: dim / 2,
        };
        for len in [1, 65, 300] {
            let s = CachedSequence {
                heads,
                len,
                rows: 1,
                table: vec![2, 0, 1][..len.div_ceil(PAGE)].to_vec(),
            };
            let turns: Vec<(f32, f32)> = (normal(dim / 4, 4).iter())
                .map(|a| (a.cos(), a.sin()))
                .collect();
            let (qkv, biases, gains) = (normal(s.row(), 7), normal(s.row(), 2), normal(2 * dim, 3));
            let vectors = gpu
                .upload("vectors", &[biases.clone(), gains.clone()].concat())
                .unwrap();
            let prepares = |source: KernelSource| {
                let source = source.with("NORMS_AT", biases.len()).flag("BIASES", true);
                source.flag("NORMS", normed)
            };
            let before = normal(3 * kv * PAGE * dim, 8);
            let before = [pairs(&before), pairs(&before[1..])];
            for split_pages in [3, 1] {
                let (step, batch) = s.batch(1, split_pages, &turns);
                let splits = step[2] as usize;
                let (step, batch) = (gpu.uniform(&step).unwrap(), words(&gpu, &batch));
                let of_splits = Grid {
                    x: splits,
                    y: kv,
                    z: 1,
                };
                let all: Vec<[Vec<f32>; 3]> = [false, true]
                    .into_iter()
                    .map(|together| {
                        let qkv = gpu.upload("qkv", &qkv).unwrap();
                        let [keys, values] = [&before[0], &before[1]].map(|b| words(&gpu, b));
                        let attended = gpu.buffer("attended", 4 * count * dim).unwrap();
                        let parts = 4 * count * (dim + 2) * splits;
                        let parts = gpu.buffer("parts", parts).unwrap();
                        let first = [&step, &batch, &attended, &parts, &qkv];
                        if together {
                            let source = prepares(attention_row(heads, eps));
                            let buffers = [&first[..], &[&vectors, &keys, &values]].concat();
                            let mut grid = of_splits;
                            grid.y *= heads.shares();
                            run(&gpu, &source, &ATTENTION_ROW, &buffers, grid);
                        } else {
                            let source = prepares(prepare_heads(heads, eps));
                            let buffers = [&step, &batch, &vectors, &qkv, &keys, &values];
                            let grid = Grid::new(1, count + 2 * kv);
                            run(&gpu, &source, &HEADS, &buffers, grid);
                            let buffers = [&first[..], &[&keys, &values]].concat();
                            run(&gpu, &attention(heads, 1), &ATTENTION, &buffers, of_splits);
                        }
                        if splits > 1 {
                            let grid = Grid::new(1, count);
                            run(&gpu, &combine(heads), &COMBINE, &first[..4], grid);
                        }
                        [
                            read(&gpu, &attended, count * dim),
                            read(&gpu, &keys, before[0].len()),
                            read(&gpu, &values, before[1].len()),
                        ]
                    })
                    .collect();
                let case = format!("{heads:?}, {len} tokens, {splits} parts");
                let error = nmse(&all[1][0], &all[0][0]);
                assert!(error < 1e-8, "{case}: {error:e}");
                for kept in 1..3 {
                    let halves = |words: &[f32]| -> Vec<f32> {
                        let halves = words.iter().flat_map(|w| [w.to_bits(), w.to_bits() >> 16]);
                        halves
                            .map(|bits| f16::from_bits(bits as u16).to_f32())
                            .collect()
                    };
                    let error = nmse(&halves(&all[1][kept]), &halves(&all[0][kept]));
                    assert!(error < 1e-9, "{case}: kept {error:e}");
                }
            }
        }
    }
}

#[test]
fn rows_attend_to_what_is_before_them() {
    let Some(gpu) = gpu() else { return };
    let shapes = [(4, 2, 64), (7, 1, 32), (2, 2, 128), (8, 1, 256), (3, 1, 80)];
    for (count, kv, dim) in shapes {
        let heads = Heads {
            count,
            kv,
            dim,
            turned: dim,
        };
        for (len, rows) in [(1, 1), (300, 3), (150, 37)] {
            let s = CachedSequence {
                heads,
                len,
                rows,
                table: vec![2, 0, 1][..len.div_ceil(PAGE)].to_vec(),
            };
            let qkv = normal(rows * s.row(), 7);
            let round = |v: f32| f16::from_f32(v).to_f32();
            let rounded = |seed| {
                normal(len * kv * dim, seed)
                    .into_iter()
                    .map(round)
                    .collect()
            };
            let (keys, values): (Vec<f32>, Vec<f32>) = (rounded(8), rounded(9));
            // [position, head, dim] to pages.
            let paged = |values: &[f32]| {
                let mut all = vec![0; 3 * kv * PAGE * dim / 2];
                for (i, head) in values.chunks_exact(dim).enumerate() {
                    let at = s.place(i % kv, i / kv);
                    all[at..at + dim / 2].copy_from_slice(&pairs(head));
                }
                words(&gpu, &all)
            };
            let (key_pages, value_pages) = (paged(&keys), paged(&values));
            let qkv_buffer = gpu.upload("qkv", &qkv).unwrap();
            for (tile, split_pages) in [(1, 3), (1, 1), (heads.tile(), 3)] {
                let (step, batch) = s.batch(tile, split_pages, &[]);
                let (tiles, splits) = (step[1] as usize, step[2] as usize);
                let (step, batch) = (gpu.uniform(&step).unwrap(), words(&gpu, &batch));
                let attended = gpu.buffer("attended", 4 * rows * count * dim).unwrap();
                let parts = gpu
                    .buffer("parts", 4 * rows * count * (dim + 2) * splits)
                    .unwrap();
                let buffers = [
                    &step,
                    &batch,
                    &attended,
                    &parts,
                    &qkv_buffer,
                    &key_pages,
                    &value_pages,
                ];
                let grid = Grid {
                    x: splits,
                    y: kv,
                    z: tiles,
                };
                run(&gpu, &attention(heads, tile), &ATTENTION, &buffers, grid);
                if splits > 1 {
                    let grid = Grid::new(rows, count);
                    run(&gpu, &combine(heads), &COMBINE, &buffers[..4], grid);
                }
                let found = read(&gpu, &attended, rows * count * dim);
                for (i, found) in found.chunks_exact(dim).enumerate() {
                    let (row, head) = (i / count, i % count);
                    let q = &qkv[row * s.row() + head * dim..][..dim];
                    let seen = s.first() + row + 1;
                    let of_head = |values: &[f32]| -> Vec<f32> {
                        let all = values.chunks_exact(kv * dim).take(seen);
                        let head = head / (count / kv) * dim;
                        all.flat_map(|p| p[head..head + dim].to_vec()).collect()
                    };
                    let mut expected = vec![0.0; dim];
                    reference::attend(q, &of_head(&keys), &of_head(&values), &mut expected);
                    let error = nmse(found, &expected);
                    let case = format!("{heads:?}, {len} tokens, row {row}, head {head}");
                    assert!(
                        error < 1e-10,
                        "{case}, tiles of {tile}, {splits} parts: {error:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_fails_is_named() {
    let Some(gpu) = gpu() else { return };
    let too_much = gpu
        .buffer("everything", gpu.most_bytes() + 16)
        .unwrap_err()
        .to_string();
    assert!(too_much.contains("everything needs"), "{too_much}");
    let broken = KernelSource::new(&["fn main() { unknown(); }"]);
    let refused = gpu.kernel(&broken, &[]).err().unwrap().to_string();
    assert!(
        refused.contains("wgpu:0") && refused.contains("unknown"),
        "{refused}"
    );
    let absent = Gpu::open(999).err().unwrap().to_string();
    assert!(absent.contains("wgpu:999"), "{absent}");
    let trellis = "trellis4 octagon".parse().unwrap();
    let weight = nq_testkit::weights::trellis(trellis, nq_model::Dims::new(128, 128), 1, 2);
    let mut census = Census::default();
    let choice = ActivationChoice::Auto;
    let refused = Linear::new(&gpu, "down", &[&weight], false, choice, &mut census);
    let refused = refused.err().unwrap().to_string();
    assert!(
        refused.contains("down") && refused.contains("trellis"),
        "{refused}"
    );
}
