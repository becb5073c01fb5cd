//! The kernels of a decode step of 17 to 64 sequences.

use super::{
    EDGES, GUARD, INT4, INT8, activations, as_on_device, assert_best, finish, gpu, guarded,
    is_sanitizing, kinds, pack, some_rows, weights,
};
use half::f16;
use nq_cuda::{
    Buffer, DeviceLinear, Gpu, MOST_WIDE_SEQUENCES, Norm, PartialSums, Stack, StepOutput, Stream,
    operand_index, wide_best_len,
};
use nq_formats::Weight;
use nq_kernels::reference;
use nq_model::DType;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, dense, normal};

/// Numbers of sequences that kernels are tested with.
const SEQUENCES: [usize; 8] = [17, 24, 31, 32, 33, 48, 63, 64];

/// A GPU that supports these kernels.
fn hopper() -> Option<Gpu> {
    let gpu = gpu()?;
    if gpu.takes_wide_steps() {
        Some(gpu)
    } else {
        println!("skipped: no wide steps on {}", gpu.info());
        None
    }
}

/// The sum of the parts, after checking that their buffer has no other values.
fn added(sums: &PartialSums, n: usize) -> Vec<f32> {
    let mut all = vec![0f32; sums.values().len()];
    sums.values().read(0, &mut all).unwrap();
    let mut total = vec![0f32; n];
    for part in all.chunks(n).take(sums.parts()) {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
    }
    let rest = &all[sums.parts() * n..];
    assert!(rest.iter().all(|v| *v == 0.0), "written past the parts");
    total
}

/// Checks a product in all its forms but SILU, on the weight's `rows`.
fn check(gpu: &Gpu, stream: &Stream, w: &Weight, rows: &[usize], sequences: &[usize]) {
    let (out, inp) = w.dims().pair();
    let packed = pack(gpu, &[w], Stack::Concat);
    let w = &as_on_device(w);
    let name = format!("gemm_step {} [{out}, {inp}]", w.scheme_name());
    let (x, halves) = activations(MOST_WIDE_SEQUENCES, inp, 81);
    let mut matrix = vec![0f32; rows.len() * inp];
    for (&r, row) in rows.iter().zip(matrix.chunks_mut(inp)) {
        w.dequantize_row(r, row).unwrap();
    }
    let products = |x: &[f32]| -> Vec<f32> {
        let product = |row: &[f32]| reference::dot(x, row);
        matrix.chunks(inp).map(product).collect()
    };
    let expected: Vec<f32> = x.chunks(inp).flat_map(products).collect();
    // s (q - z) is rounded to FP16 once; with offsets, s q + o is.
    let tolerance = match w {
        Weight::Dense(_) => 1e-8,
        _ if w.scheme_name().contains("offset") => 1e-6,
        _ => 2e-7,
    };
    let halves = gpu.upload("a test", &halves).unwrap();
    for &m in sequences {
        let pick = |y: &[f32]| -> Vec<f32> {
            let permuted = |y: &[f32]| -> Vec<f32> { rows.iter().map(|&r| y[r]).collect() };
            y.chunks(out).flat_map(permuted).collect()
        };
        let expected = &expected[..m * rows.len()];
        let mut last: Option<Vec<f32>> = None;
        for _ in 0..2 {
            let mut sums = PartialSums::new(gpu, m, out).unwrap();
            let output = StepOutput::Parts(&mut sums);
            stream.gemm_step(&packed, &halves, output, m).unwrap();
            stream.synchronize().unwrap();
            let found = added(&sums, m * out);
            let error = nmse(&pick(&found), expected);
            assert!(
                error < tolerance,
                "{name} m {m} in {} parts: {error:e}",
                sums.parts()
            );
            assert!(
                last.is_none_or(|l| l == found),
                "{name} m {m}: not the same again"
            );
            last = Some(found);
        }
        let mut y = guarded(gpu, &vec![GUARD; m * out]);
        stream
            .gemm_step(&packed, &halves, StepOutput::Store(&mut y), m)
            .unwrap();
        let stored = finish(stream, &y);
        let error = nmse(&pick(&stored), expected);
        assert!(error < tolerance, "{name} m {m} store: {error:e}");
        check_head(gpu, stream, &packed, &halves, &stored, m, &name);
    }
}

/// The head's logits are those in `stored`, and the best of its blocks are the best of these.
fn check_head(
    gpu: &Gpu,
    stream: &Stream,
    packed: &DeviceLinear,
    halves: &Buffer<u16>,
    stored: &[f32],
    m: usize,
    name: &str,
) {
    let out = packed.rows();
    let blocks = wide_best_len(gpu, packed, m);
    let mut logits = guarded(gpu, &vec![GUARD; m * out]);
    let mut best = gpu
        .upload("a test", &vec![[GUARD, 0.0]; m * blocks])
        .unwrap();
    let output = StepOutput::Head(&mut logits, &mut best);
    stream.gemm_step(packed, halves, output, m).unwrap();
    assert!(
        finish(stream, &logits) == stored,
        "{name} m {m}: head differs from store"
    );
    let mut bests = vec![[0f32; 2]; best.len()];
    best.read(0, &mut bests).unwrap();
    assert!(bests.iter().all(|b| !b[0].is_nan()), "{name}: a block left");
    assert_best(&best, blocks, stored, &format!("{name} m {m}"));
}

#[test]
fn products_of_many_sequences() {
    let Some(gpu) = hopper() else { return };
    let stream = gpu.stream().unwrap();
    for (out, inp) in EDGES {
        let rows: Vec<usize> = (0..out).collect();
        for w in weights(out, inp, 31) {
            check(&gpu, &stream, &w, &rows, &SEQUENCES);
        }
    }
}

/// Shapes of Qwen3 0.6B, 1.7B, 4B, 8B, 14B and 32B on seeded rows, with the schemes that nq writes:
/// every size of block and number of parts that products are cut into.
#[test]
fn products_of_many_sequences_in_real_shapes() {
    let Some(gpu) = hopper() else { return };
    if is_sanitizing() {
        return;
    }
    let stream = gpu.stream().unwrap();
    for (i, (out, inp)) in [
        (1024, 2048),
        (1024, 3072),
        (2048, 6144),
        (12288, 2048),
        (2560, 9728),
        (6144, 4096),
        (4096, 12288),
        (5120, 17408),
        (5120, 25600),
        (49_000, 1000),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = i as u64;
        let rows = some_rows(out);
        for w in [
            affine(INT4, out, inp, None, seed),
            affine(INT8, out, inp, None, seed),
            dense(DType::BF16, out, inp, seed),
        ] {
            check(&gpu, &stream, &w, &rows, &[17, 32, 33, 64]);
        }
    }
}

#[test]
fn gates_and_ups_of_many_sequences() {
    let Some(gpu) = hopper() else { return };
    let stream = gpu.stream().unwrap();
    for (width, inp) in [(8, 256), (40, 72), (264, 1000), (3072, 512)] {
        for (gate, up) in weights(width, inp, 41).iter().zip(&weights(width, inp, 43)) {
            let name = format!("silu {} [{width}, {inp}]", gate.scheme_name());
            let packed = pack(&gpu, &[gate, up], Stack::Interleave);
            let (x, halves) = activations(MOST_WIDE_SEQUENCES, inp, 85);
            let n = MOST_WIDE_SEQUENCES * width;
            let (mut g, mut u, mut expected) = (vec![0f32; n], vec![0f32; n], vec![0f32; n]);
            reference::linear(&x, gate, &mut g).unwrap();
            reference::linear(&x, up, &mut u).unwrap();
            reference::silu_mul(&g, &u, &mut expected);
            // 8-bit codes with offsets have a mean far from zero, and some gates times ups exceed the
            // range of FP16: they saturate.
            let top = f16::MAX.to_f32();
            expected.iter_mut().for_each(|v| *v = v.clamp(-top, top));
            let halves = gpu.upload("a test", &halves).unwrap();
            let padded = width.next_multiple_of(256);
            for m in SEQUENCES {
                // Values beyond the width and the rows are not changed.
                let mut out = gpu.zeros::<u16>("a test", (m + 1) * padded).unwrap();
                stream
                    .gemm_step(&packed, &halves, StepOutput::Silu(&mut out), m)
                    .unwrap();
                stream.synchronize().unwrap();
                let mut found = vec![0u16; (m + 1) * padded];
                out.read(0, &mut found).unwrap();
                let value = |row: usize, k: usize| {
                    f16::from_bits(found[row * padded + operand_index(k)]).to_f32()
                };
                let values: Vec<f32> = (0..m)
                    .flat_map(|row| (0..width).map(move |k| value(row, k)))
                    .collect();
                let error = nmse(&values, &expected[..m * width]);
                assert!(error < 1e-6, "{name} m {m}: {error:e}");
                let rest = (0..m).flat_map(|row| (width..padded).map(move |k| (row, k)));
                let rest = rest.chain((0..padded).map(|k| (m, k)));
                assert!(
                    rest.into_iter().all(|(row, k)| value(row, k) == 0.0),
                    "{name} m {m}: written beside the outputs"
                );
            }
        }
    }
}

#[test]
fn norms_add_what_products_left_in_parts() {
    let Some(gpu) = hopper() else { return };
    let stream = gpu.stream().unwrap();
    for (width, inp) in [(24, 256), (1024, 3072), (2560, 512), (5120, 2048)] {
        let w = affine(kinds()[0], width, inp, None, 91);
        let packed = pack(&gpu, &[&w], Stack::Concat);
        let gain: Vec<f32> = normal(width, 92).iter().map(|v| 1.0 + 0.2 * v).collect();
        let gain_device = gpu.upload("a test", &gain).unwrap();
        let norm = Norm {
            gain: &gain_device,
            eps: 1e-6,
        };
        let padded = width.next_multiple_of(256);
        for m in [1, 17, 33, 64] {
            let name = format!("norm_step [{m}, {width}]");
            let (_, halves) = activations(m, inp, 93);
            let halves = gpu.upload("a test", &halves).unwrap();
            let mut sums = PartialSums::new(&gpu, m, width).unwrap();
            let output = StepOutput::Parts(&mut sums);
            stream.gemm_step(&packed, &halves, output, m).unwrap();
            stream.synchronize().unwrap();
            let mut all = vec![0f32; sums.values().len()];
            sums.values().read(0, &mut all).unwrap();
            let mut residual = normal(m * width, 94);
            residual.iter_mut().step_by(37).for_each(|v| *v *= 300.0);
            for add in [false, true] {
                let mut x = guarded(&gpu, &residual);
                let mut half = gpu.upload("a test", &vec![u16::MAX; m * padded]).unwrap();
                let parts = add.then_some(&sums);
                stream
                    .norm_step(&mut x, parts, norm, &mut half, m, false)
                    .unwrap();
                let found = finish(&stream, &x);
                let mut expected = residual.clone();
                if add {
                    for part in all.chunks(m * width).take(sums.parts()) {
                        expected.iter_mut().zip(part).for_each(|(x, p)| *x += p);
                    }
                }
                assert!(found == expected, "{name}: residuals");
                let mut normed = vec![0f32; m * width];
                reference::rms_norm(&expected, &gain, 1e-6, &mut normed);
                let mut read = vec![0u16; m * padded];
                half.read(0, &mut read).unwrap();
                let values_of = |row: &[u16]| -> Vec<f32> {
                    let value = |k: usize| f16::from_bits(row[operand_index(k)]).to_f32();
                    assert!((width..padded).all(|k| value(k) == 0.0), "{name}: padding");
                    (0..width).map(value).collect()
                };
                let values: Vec<f32> = read.chunks(padded).flat_map(values_of).collect();
                let error = nmse(&values, &normed);
                assert!(error < 1e-6, "{name}: {error:e}");
            }
        }
    }
}

#[test]
fn mistakes_in_wide_steps_are_refused() {
    let Some(gpu) = hopper() else { return };
    let stream = gpu.stream().unwrap();
    let w = dense(DType::F16, 16, 256, 1);
    let packed = pack(&gpu, &[&w], Stack::Concat);
    let x = gpu.zeros::<u16>("a test", 64 * 256).unwrap();
    let mut y = gpu.zeros::<f32>("a test", 64 * 16).unwrap();
    let refused = |e: nq_kernels::Error, what: &str| {
        assert!(e.to_string().contains(what), "{e}");
    };
    let e = stream.gemm_step(&packed, &x, StepOutput::Store(&mut y), 65);
    refused(e.unwrap_err(), "64 at most, found 65");
    let short = gpu.zeros::<u16>("a test", 64 * 256 - 1).unwrap();
    let e = stream.gemm_step(&packed, &short, StepOutput::Store(&mut y), 64);
    refused(e.unwrap_err(), "[64, 1, 256]");
    let mut short = gpu.zeros::<f32>("a test", 64 * 16 - 1).unwrap();
    let e = stream.gemm_step(&packed, &x, StepOutput::Store(&mut short), 64);
    refused(e.unwrap_err(), "[64, 16]");
    let mut sums = PartialSums::new(&gpu, 17, 16).unwrap();
    let output = StepOutput::Parts(&mut sums);
    stream.gemm_step(&packed, &x, output, 17).unwrap();
    let gain = gpu.zeros::<f32>("a test", 16).unwrap();
    let norm = Norm {
        gain: &gain,
        eps: 1e-6,
    };
    let mut half = gpu.zeros::<u16>("a test", 64 * 256).unwrap();
    let e = stream.norm_step(&mut y, Some(&sums), norm, &mut half, 18, false);
    refused(e.unwrap_err(), "[17, 16]");
    let mut short = gpu.zeros::<u16>("a test", 256).unwrap();
    let e = stream.norm_step(&mut y, Some(&sums), norm, &mut short, 17, false);
    refused(e.unwrap_err(), "FP16");
}
