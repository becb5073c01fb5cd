//! The GPU kernels compared with the scalar f64 reference, starting from canonical weights, so that
//! packing is tested too. Outputs end in guards, and every kernel runs twice with the same result.
//!
//! Without a GPU the tests print that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

mod attention;
mod batch;
mod cascade;
mod delta;
mod driver;
mod exl3;
mod experts;
mod grad;
mod hyper;
mod indexer;
mod layers;
mod ranks;
mod rows;
mod sampling;
mod tower;
mod trellis;
mod wide;

use half::f16;
use nq_cuda::{
    Buffer, Checked, DeviceLinear, GemmOutput, GemvOutput, Gpu, Norm, Places, RowsOut, Stack, Step,
    StepBounds, Stream, Uploader, best_len, operand_index,
};
use nq_formats::{AffineScheme, Bits, Group, Weight, Zeros};
use nq_kernels::reference;
use nq_model::DType;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, blocks, dense, held_as_others, normal, schemes, two_level};

/// Numbers of rows of activations that kernels are tested with.
const ROWS: [usize; 8] = [1, 2, 3, 8, 16, 17, 33, 130];
/// The schemes that nq writes.
const INT4: AffineScheme = scheme(Bits::B4, 64, Zeros::Integer);
const INT8: AffineScheme = scheme(Bits::B8, 128, Zeros::None);

const fn scheme(bits: Bits, group: u32, zeros: Zeros) -> AffineScheme {
    AffineScheme::new(bits, Group::Size(group), zeros)
}

const GUARD: f32 = f32::from_bits(0x7fc0_beef);
const GUARDS: usize = 64;

fn gpu() -> Option<Gpu> {
    nq_testkit::on_gpu(Gpu::open(0))
}

/// True under compute-sanitizer, which slows kernels down a hundredfold: long sequences and real
/// shapes, which run the same code as short ones and edge shapes, are then left out.
fn is_sanitizing() -> bool {
    std::env::var_os("NQ_SANITIZING").is_some()
}

fn pack(gpu: &Gpu, parts: &[&Weight], stack: Stack) -> DeviceLinear {
    let mut uploader = Uploader::new(gpu).unwrap();
    let packed = uploader.pack(parts, stack, false).unwrap();
    uploader.finish().unwrap();
    packed
}

/// `n` values on the device, followed by guards.
fn guarded(gpu: &Gpu, values: &[f32]) -> Buffer<f32> {
    let mut all = values.to_vec();
    all.resize(values.len() + GUARDS, GUARD);
    gpu.upload("a test", &all).unwrap()
}

/// The values, after checking the guards.
fn finish(stream: &Stream, buffer: &Buffer<f32>) -> Vec<f32> {
    stream.synchronize().unwrap();
    let mut all = vec![0f32; buffer.len()];
    buffer.read(0, &mut all).unwrap();
    let guards = all.split_off(all.len() - GUARDS);
    assert!(
        guards.iter().all(|v| v.to_bits() == GUARD.to_bits()),
        "written past the end"
    );
    all
}

fn kinds() -> Vec<AffineScheme> {
    let groups = [32, 64, 128, 256].map(Group::Size);
    let mut all = two_level(&groups);
    all.extend(two_level(&[Group::Channel]));
    all.extend(schemes(&groups));
    all.extend(schemes(&[Group::Channel]));
    all.extend(held_as_others(Group::Size(32)));
    all.extend(blocks());
    all
}

/// Weights of every kind, `[out, inp]`.
fn weights(out: usize, inp: usize, seed: u64) -> Vec<Weight> {
    let mut all: Vec<Weight> = [DType::F16, DType::BF16, DType::F32]
        .map(|d| dense(d, out, inp, seed))
        .into();
    let quantized = kinds().into_iter().enumerate();
    all.extend(quantized.map(|(i, s)| affine(s, out, inp, None, seed + i as u64)));
    all
}

/// f32 weights are rounded to FP16 on the device, so the reference's must be too.
fn as_on_device(w: &Weight) -> Weight {
    match w {
        Weight::Dense(t) if t.dtype() == DType::F32 => {
            let values = t.to_f32().unwrap();
            let top = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            let factor = 2f32.powi(13 - top.log2().floor() as i32);
            let round = |v: &f32| f16::from_f32(v * factor).to_f32() / factor;
            let values = values.iter().map(round).collect();
            Weight::Dense(nq_formats::Tensor::from_f32(t.shape().to_vec(), values).unwrap())
        }
        w => w.clone(),
    }
}

/// Shapes `[out, inp]`: below, at and past the edges of tiles and spans.
const EDGES: [(usize, usize); 6] = [
    (9, 24),
    (16, 256),
    (17, 72),
    (40, 1000),
    (33, 2304),
    (130, 512),
];

#[test]
fn products_of_many_rows() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (out, inp) in EDGES {
        for w in weights(out, inp, 3) {
            let packed = pack(&gpu, &[&w], Stack::Concat);
            let w = as_on_device(&w);
            let most = ROWS[ROWS.len() - 1];
            let x = normal(most * inp, 5);
            let mut expected = vec![0f32; most * out];
            reference::linear(&x, &w, &mut expected).unwrap();
            let padded = inp.next_multiple_of(256);
            let mut halves = vec![0u16; most * padded];
            let mut rounded = vec![0f32; most * inp];
            for ((x, h), r) in
                (x.chunks(inp).zip(halves.chunks_mut(padded))).zip(rounded.chunks_mut(inp))
            {
                for (k, (x, r)) in x.iter().zip(r).enumerate() {
                    let v = f16::from_f32(*x);
                    (h[operand_index(k)], *r) = (v.to_bits(), v.to_f32());
                }
            }
            let mut from_half = vec![0f32; most * out];
            reference::linear(&rounded, &w, &mut from_half).unwrap();
            let x = gpu.upload("a test", &x).unwrap();
            let halves = gpu.upload("a test", &halves).unwrap();
            let start = normal(most * out, 8);
            for m in ROWS {
                let name = format!("{} [{out}, {inp}] m {m}", w.scheme_name());
                // With offsets, s q + o is rounded to FP16, and so are weights in groups of 16, as which some with levels
                // are held; in products of more than 16 rows every quantized weight is; other weights are exact.
                let rounded = m > 16 && matches!(w, Weight::Quantized(_));
                let in_halves = ["offset", "g16", "levels"];
                let tolerance = match in_halves.iter().any(|&part| name.contains(part)) {
                    true => 1e-6,
                    false if rounded => 2e-7,
                    false => 1e-11,
                };
                let n = m * out;
                let added: Vec<f32> = start[..n]
                    .iter()
                    .zip(&from_half)
                    .map(|(a, b)| a + b)
                    .collect();
                let mut y = guarded(&gpu, &vec![GUARD; n]);
                stream
                    .linear_reference(&packed, &x, &mut y, m, false)
                    .unwrap();
                let error = nmse(&finish(&stream, &y), &expected[..n]);
                assert!(error < 1e-11, "linear_reference {name}: {error:e}");
                let mut last = None;
                for _ in 0..2 {
                    let mut y = guarded(&gpu, &vec![GUARD; n]);
                    stream
                        .gemm(&packed, &halves, GemmOutput::Store(&mut y), m)
                        .unwrap();
                    let found = finish(&stream, &y);
                    let error = nmse(&found, &from_half[..n]);
                    assert!(error < tolerance, "gemm {name}: {error:e}");
                    assert!(
                        last.is_none_or(|l| l == found),
                        "gemm {name}: not the same again"
                    );
                    last = Some(found);
                }
                let mut y = guarded(&gpu, &start[..n]);
                stream
                    .gemm(&packed, &halves, GemmOutput::Add(&mut y), m)
                    .unwrap();
                let error = nmse(&finish(&stream, &y), &added);
                assert!(error < tolerance, "gemm add {name}: {error:e}");
            }
        }
    }
}

/// Shapes of Qwen3 and one with odd edges, on seeded rows of weights, which cover every size of block
/// that a product of many rows is cut into.
#[test]
fn products_of_many_rows_in_real_shapes() {
    let Some(gpu) = gpu() else { return };
    if is_sanitizing() {
        return;
    }
    let stream = gpu.stream().unwrap();
    for (seed, (m, out, inp)) in [
        (512, 6144, 4096),
        (333, 49_000, 1000),
        (200, 4096, 1024),
        // Computed by clusters that share tiles.
        (64, 1024, 3072),
        (120, 4096, 2560),
    ]
    .into_iter()
    .enumerate()
    {
        let rows = some_rows(out);
        let seed = seed as u64;
        let quantized =
            |bits, group, zeros| affine(scheme(bits, group, zeros), out, inp, None, seed);
        let small = |bits, group, zeros| {
            let scheme = scheme(bits, group, zeros).two_level(Bits::B8);
            affine(scheme, out, inp, None, seed)
        };
        let padded = inp.next_multiple_of(256);
        let x: Vec<f16> = normal(m * inp, 7).into_iter().map(f16::from_f32).collect();
        let mut halves = vec![0u16; m * padded];
        for (x, h) in x.chunks(inp).zip(halves.chunks_mut(padded)) {
            x.iter()
                .enumerate()
                .for_each(|(k, v)| h[operand_index(k)] = v.to_bits());
        }
        let x: Vec<f32> = x.into_iter().map(f16::to_f32).collect();
        let halves = gpu.upload("a test", &halves).unwrap();
        for w in [
            quantized(Bits::B4, 64, Zeros::Integer),
            quantized(Bits::B4, 32, Zeros::None),
            quantized(Bits::B8, 128, Zeros::None),
            quantized(Bits::B8, 64, Zeros::Offset),
            small(Bits::B4, 32, Zeros::Integer),
            small(Bits::B5, 64, Zeros::Integer),
            small(Bits::B6, 32, Zeros::None),
            affine(blocks()[0], out, inp, None, seed),
            affine(blocks()[1], out, inp, None, seed),
            dense(DType::F16, out, inp, seed),
        ] {
            let name = format!("gemm {} [{out}, {inp}] m {m}", w.scheme_name());
            let packed = pack(&gpu, &[&w], Stack::Concat);
            let mut row = vec![0f32; inp];
            let mut expected = vec![0f32; rows.len() * m];
            for (&r, e) in rows.iter().zip(expected.chunks_mut(m)) {
                w.dequantize_row(r, &mut row).unwrap();
                x.chunks(inp)
                    .zip(e)
                    .for_each(|(x, e)| *e = reference::dot(x, &row));
            }
            let mut last = None;
            for _ in 0..2 {
                let mut y = guarded(&gpu, &vec![GUARD; m * out]);
                stream
                    .gemm(&packed, &halves, GemmOutput::Store(&mut y), m)
                    .unwrap();
                let found = finish(&stream, &y);
                let picked: Vec<f32> = rows
                    .iter()
                    .flat_map(|&r| (0..m).map(|i| found[i * out + r]).collect::<Vec<_>>())
                    .collect();
                let error = nmse(&picked, &expected);
                assert!(error < 2e-7, "{name}: {error:e}");
                assert!(
                    last.is_none_or(|l| l == found),
                    "{name}: not the same again"
                );
                last = Some(found);
            }
        }
    }
}

/// A row as a step's product rounds it: for integer codes, in 64ths rounded to 1 / 32,512 of
/// their greatest value (`cuda/activations.cuh`). So products that cancel are tested as sharply as
/// others.
fn as_multiplied(w: &Weight, x: &[f32]) -> Vec<f32> {
    let mut x = x.to_vec();
    if matches!(w, Weight::Quantized(_)) {
        for slot in x.chunks_mut(64) {
            let most = slot.iter().fold(0f32, |m, v| m.max(v.abs()));
            let scale = most * (1.0 / 32_512.0);
            let inverse = if most > 1e-30 { 32_512.0 / most } else { 0.0 };
            for v in slot {
                *v = (*v * inverse).round_ties_even() * scale;
            }
        }
    }
    x
}

/// Like [`as_multiplied`], with RMSNorm: the step's products round before they divide.
fn as_normalized(w: &Weight, x: &[f32], gain: &[f32]) -> Vec<f32> {
    let weighted: Vec<f32> = x.iter().zip(gain).map(|(v, g)| v * g).collect();
    let squares: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
    let factor = (squares / x.len() as f64 + 1e-6).sqrt().recip() as f32;
    let rounded = as_multiplied(w, &weighted);
    rounded.iter().map(|v| v * factor).collect()
}

/// Checks a step's product in all its forms.
fn check_gemv(gpu: &Gpu, stream: &Stream, w: &Weight, rows: &[usize]) {
    let (out, inp) = w.dims().pair();
    let name = format!("gemv {} [{out}, {inp}]", w.scheme_name());
    let room = gpu.info().shared_memory;
    if matches!(w, Weight::Dense(_)) && 4 * inp > room {
        println!(
            "skipped: {name}: a row of FP16 operands does not fit in {room} bytes of shared memory"
        );
        return;
    }
    let packed = pack(gpu, &[w], Stack::Concat);
    let w = as_on_device(w);
    // Magnitudes differ widely, like those of residual streams.
    let mut x = normal(inp, 21);
    x.iter_mut().step_by(37).for_each(|v| *v *= 300.0);
    let gain: Vec<f32> = normal(inp, 22).iter().map(|v| 1.0 + 0.2 * v).collect();
    let product = |x: &[f32]| -> Vec<f32> {
        let mut row = vec![0f32; inp];
        let one = |&r: &usize| {
            w.dequantize_row(r, &mut row).unwrap();
            reference::dot(x, &row)
        };
        rows.iter().map(one).collect()
    };
    let pick = |y: &[f32]| -> Vec<f32> { rows.iter().map(|&r| y[r]).collect() };
    let x_device = gpu.upload("a test", &x).unwrap();
    let gain_device = gpu.upload("a test", &gain).unwrap();
    let norm = Norm {
        gain: &gain_device,
        eps: 1e-6,
    };

    let expected = product(&as_normalized(&w, &x, &gain));
    let mut last: Option<Vec<f32>> = None;
    for _ in 0..2 {
        let mut y = guarded(gpu, &vec![GUARD; out]);
        stream
            .gemv(
                &packed,
                &x_device,
                GemvOutput::Store(Some(norm), &mut y),
                false,
            )
            .unwrap();
        let found = finish(stream, &y);
        let error = nmse(&pick(&found), &expected);
        assert!(error < 2e-8, "{name} store: {error:e}");
        assert!(
            last.is_none_or(|l| l == found),
            "{name}: not the same again"
        );
        last = Some(found);
    }

    // Added to a residual, without a norm.
    let residual = normal(out, 23);
    let mut y = guarded(gpu, &residual);
    stream
        .gemv(&packed, &x_device, GemvOutput::Add(&mut y), false)
        .unwrap();
    let found = finish(stream, &y);
    let expected: Vec<f32> = product(&as_multiplied(&w, &x))
        .iter()
        .zip(pick(&residual))
        .map(|(p, r)| p + r)
        .collect();
    let error = nmse(&pick(&found), &expected);
    assert!(error < 2e-8, "{name} add: {error:e}");

    if 4 * inp > room {
        println!("skipped: {name} as a head, which has fewer inputs");
        return;
    }
    let mut logits = guarded(gpu, &vec![GUARD; out]);
    let mut best = gpu
        .zeros("a test", best_len(gpu, &packed, 1).unwrap())
        .unwrap();
    let output = GemvOutput::Head(Some(norm), &mut logits, &mut best);
    stream.gemv(&packed, &x_device, output, true).unwrap();
    let found = finish(stream, &logits);
    assert!(
        Some(&found) == last.as_ref(),
        "{name}: head differs from store"
    );
    assert_best(&best, best.len(), &found, &name);
}

/// The best logit and its token in each row of blocks' bests are those of the row's `logits`.
#[track_caller]
fn assert_best(best: &Buffer<[f32; 2]>, blocks: usize, logits: &[f32], name: &str) {
    let mut bests = vec![[0f32; 2]; best.len()];
    best.read(0, &mut bests).unwrap();
    let better = |a: (f32, usize), b: (f32, usize)| {
        if b.0 > a.0 || b.0 == a.0 && b.1 < a.1 {
            b
        } else {
            a
        }
    };
    let start = (f32::NEG_INFINITY, usize::MAX);
    let out = logits.len() / (bests.len() / blocks);
    for (bests, row) in bests.chunks(blocks).zip(logits.chunks(out)) {
        let from_blocks = bests.iter().map(|b| (b[0], b[1].to_bits() as usize));
        let from_logits = row.iter().copied().zip(0..);
        assert_eq!(
            from_blocks.fold(start, better),
            from_logits.fold(start, better),
            "{name}: the best"
        );
    }
}

/// Rows `[m, inp]` of FP16 values, and the same `[m, inp padded to 256]` in operand order.
fn activations(m: usize, inp: usize, seed: u64) -> (Vec<f32>, Vec<u16>) {
    let x: Vec<f16> = normal(m * inp, seed)
        .into_iter()
        .map(f16::from_f32)
        .collect();
    let padded = inp.next_multiple_of(256);
    let mut halves = vec![0u16; m * padded];
    for (x, h) in x.chunks(inp).zip(halves.chunks_mut(padded)) {
        x.iter()
            .enumerate()
            .for_each(|(k, v)| h[operand_index(k)] = v.to_bits());
    }
    (x.into_iter().map(f16::to_f32).collect(), halves)
}

/// Rows of a product with `out` of them, the first and the last among these.
fn some_rows(out: usize) -> Vec<usize> {
    let spread = (0..64).map(|k| (k * 7919 + 13) % out);
    spread.chain([0, out - 1]).collect()
}

#[test]
fn products_of_a_step() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (out, inp) in EDGES {
        let rows: Vec<usize> = (0..out).collect();
        for w in weights(out, inp, 31) {
            check_gemv(&gpu, &stream, &w, &rows);
        }
    }
}

/// Shapes of Qwen3 0.6B, 4B, 8B and 32B on seeded rows, with the schemes that nq writes.
#[test]
fn products_of_a_step_in_real_shapes() {
    let Some(gpu) = gpu() else { return };
    if is_sanitizing() {
        return;
    }
    let stream = gpu.stream().unwrap();
    let shapes = [
        (1024, 3072),
        (4096, 1024),
        (2560, 9728),
        (6144, 4096),
        (5120, 25600),
    ];
    for (i, (out, inp)) in shapes.into_iter().enumerate() {
        let rows = some_rows(out);
        let small = |bits, zeros| {
            let scheme = scheme(bits, 64, zeros).two_level(Bits::B8);
            affine(scheme, out, inp, None, i as u64)
        };
        let all = [
            affine(INT4, out, inp, None, i as u64),
            affine(INT8, out, inp, None, i as u64),
            small(Bits::B4, Zeros::Integer),
            small(Bits::B5, Zeros::Integer),
            small(Bits::B6, Zeros::None),
            affine(blocks()[0], out, inp, None, i as u64),
            affine(blocks()[1], out, inp, None, i as u64),
            dense(DType::BF16, out, inp, i as u64),
        ];
        for w in &all {
            check_gemv(&gpu, &stream, w, &rows);
        }
    }
}

#[test]
fn gates_and_ups() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (width, inp) in [(8, 256), (40, 72), (264, 1000), (40, 3072)] {
        for (gate, up) in weights(width, inp, 41).iter().zip(&weights(width, inp, 43)) {
            let name = format!("silu {} [{width}, {inp}]", gate.scheme_name());
            let packed = pack(&gpu, &[gate, up], Stack::Interleave);
            // Both share one power of two: their roundings are those of the greater.
            let f32s = matches!(gate, Weight::Dense(t) if t.dtype() == DType::F32);
            let tolerance = if f32s { 1e-6 } else { 1e-8 };
            const M: usize = 17;
            let x = normal(M * inp, 45);
            let (mut g, mut u) = (vec![0f32; M * width], vec![0f32; M * width]);
            let mut expected = vec![0f32; M * width];
            let mut normed = vec![0f32; M * inp];
            reference::rms_norm(&x, &vec![1.0; inp], 1e-6, &mut normed);
            reference::linear(&normed, gate, &mut g).unwrap();
            reference::linear(&normed, up, &mut u).unwrap();
            reference::silu_mul(&g, &u, &mut expected);
            let row = as_normalized(gate, &x[..inp], &vec![1.0; inp]);
            let mut expected_row = vec![0f32; width];
            reference::linear(&row, gate, &mut g[..width]).unwrap();
            reference::linear(&row, up, &mut u[..width]).unwrap();
            reference::silu_mul(&g[..width], &u[..width], &mut expected_row);

            let x_device = gpu.upload("a test", &x).unwrap();
            let ones = gpu.upload("a test", &vec![1f32; inp]).unwrap();
            let norm = Norm {
                gain: &ones,
                eps: 1e-6,
            };
            let mut y = guarded(&gpu, &vec![GUARD; width]);
            stream
                .gemv(
                    &packed,
                    &x_device,
                    GemvOutput::Silu(Some(norm), &mut y),
                    false,
                )
                .unwrap();
            let error = nmse(&finish(&stream, &y), &expected_row);
            assert!(error < tolerance, "gemv {name}: {error:e}");

            let (padded_in, padded) = (inp.next_multiple_of(256), width.next_multiple_of(256));
            let mut halves = gpu.zeros::<u16>("a test", M * padded_in).unwrap();
            let out = RowsOut {
                full: None,
                half: Some(&mut halves),
            };
            stream
                .rms_norm(&x_device, None, &ones, &out, M, 1e-6)
                .unwrap();
            let mut half = gpu.zeros::<u16>("a test", M * padded).unwrap();
            stream
                .gemm(&packed, &halves, GemmOutput::Silu(&mut half), M)
                .unwrap();
            let mut full = guarded(&gpu, &vec![GUARD; M * width]);
            let mut gate_up = gpu.zeros::<f32>("a test", 2 * M * width).unwrap();
            stream
                .gemm(&packed, &halves, GemmOutput::Store(&mut gate_up), M)
                .unwrap();
            let out = RowsOut {
                full: Some(&mut full),
                half: None,
            };
            stream.silu_mul(&gate_up, &out, M, width).unwrap();
            let full = finish(&stream, &full);
            let error = nmse(&full, &expected);
            assert!(error < 1e-6, "gemm and silu_mul {name}: {error:e}");
            let mut found = vec![0u16; M * padded];
            half.read(0, &mut found).unwrap();
            let rows = found.chunks(padded);
            let found: Vec<f32> = rows
                .flat_map(|r| (0..width).map(|k| f16::from_bits(r[operand_index(k)]).to_f32()))
                .collect();
            // The greatest FP16 value.
            let most = f16::MAX.to_f32();
            expected.iter_mut().for_each(|v| *v = v.clamp(-most, most));
            let error = nmse(&found, &expected);
            assert!(error < 1e-6, "gemm silu {name}: {error:e}");
        }
    }
}

/// Parts of several schemes, and what holds them together, have the values of each.
#[test]
fn products_of_parts_that_differ() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let (out, inp) = (48, 1024);
    let of = |scheme, seed| affine(scheme, out, inp, None, seed);
    let [q4_k, q6_k, q5_k, q3_k, iq4_xs, iq2_xxs, nvfp4, q2_k] = blocks()[..] else {
        unreachable!("there are eight")
    };
    let int8 = scheme(Bits::B8, 32, Zeros::None);
    for (kinds, bits) in [
        ([q4_k, q6_k], 6),
        ([q5_k, q4_k], 5),
        ([q4_k, int8], 8),
        ([q3_k, iq2_xxs], 3),
        ([iq4_xs, iq2_xxs], 4),
        ([iq4_xs, nvfp4], 4),
        ([q2_k, q4_k], 8),
        ([iq4_xs, q3_k], 4),
        ([iq4_xs, q6_k], 8),
        (
            [
                scheme(Bits::B4, 64, Zeros::None),
                scheme(Bits::B4, 32, Zeros::Integer),
            ],
            4,
        ),
    ] {
        let parts = [of(kinds[0], 71), of(kinds[1], 73)];
        let packed = pack(&gpu, &[&parts[0], &parts[1]], Stack::Concat);
        assert_eq!(packed.kind().bits(), bits);
        for m in [1, 5, 40] {
            let x = normal(m * inp, 75);
            let mut expected = vec![0f32; m * 2 * out];
            for (i, part) in parts.iter().enumerate() {
                let mut y = vec![0f32; m * out];
                reference::linear(&x, part, &mut y).unwrap();
                for (to, from) in expected.chunks_mut(2 * out).zip(y.chunks(out)) {
                    to[i * out..(i + 1) * out].copy_from_slice(from);
                }
            }
            let device_x = gpu.upload("a test", &x).unwrap();
            let mut y = guarded(&gpu, &vec![GUARD; m * 2 * out]);
            stream
                .linear_reference(&packed, &device_x, &mut y, m, false)
                .unwrap();
            let error = nmse(&finish(&stream, &y), &expected);
            assert!(error < 1e-9, "{} and {}: {error:e}", kinds[0], kinds[1]);
        }
    }
}

#[test]
fn embeddings() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for w in weights(40, 520, 51) {
        let packed = pack(&gpu, &[&w], Stack::Concat);
        let w = as_on_device(&w);
        let tokens = [0u32, 39, 17, 17];
        let mut expected = vec![0f32; 4 * 520];
        for (&t, row) in tokens.iter().zip(expected.chunks_mut(520)) {
            w.dequantize_row(t as usize, row).unwrap();
        }
        let device_tokens = Checked::upload(&gpu, "a test", &tokens, 40).unwrap();
        let mut x = guarded(&gpu, &vec![GUARD; 4 * 520]);
        stream.embed(&packed, &device_tokens, &mut x, 4).unwrap();
        let found = finish(&stream, &x);
        if let Some(i) = (0..found.len()).find(|&i| found[i] != expected[i]) {
            let (f, e) = (found[i], expected[i]);
            panic!("embed {}: value {i} is {f:e}, not {e:e}", w.scheme_name());
        }
        let places = Places {
            positions: 1,
            slots: 1,
            images: 0,
        };
        let bounds = |tokens| StepBounds { places, tokens };
        let step = |token| Step {
            token,
            ..Step::default()
        };
        let steps = Checked::upload(&gpu, "a test", &tokens.map(step), bounds(40)).unwrap();
        let mut x = guarded(&gpu, &vec![GUARD; 4 * 520]);
        stream.embed_step(&packed, &steps, &mut x, 4).unwrap();
        assert!(
            finish(&stream, &x) == expected,
            "embed_step {}",
            w.scheme_name()
        );
        // Ids for which the embedding may not have a row.
        let wild = Checked::upload(&gpu, "a test", &tokens, 41).unwrap();
        assert!(stream.embed(&packed, &wild, &mut x, 4).is_err());
        let wild = Checked::upload(&gpu, "a test", &tokens.map(step), bounds(41)).unwrap();
        assert!(stream.embed_step(&packed, &wild, &mut x, 4).is_err());
    }
}

#[test]
fn mistakes_are_refused() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let w = dense(DType::F16, 16, 256, 1);
    let packed = pack(&gpu, &[&w], Stack::Concat);
    let x = gpu.zeros::<u16>("a test", 255).unwrap();
    let mut y = gpu.zeros::<f32>("a test", 16).unwrap();
    let e = stream
        .gemm(&packed, &x, GemmOutput::Store(&mut y), 1)
        .unwrap_err();
    assert!(e.to_string().contains("256"), "{e}");
    assert!(Gpu::open(1000).is_err());
}
