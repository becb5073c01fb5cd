//! Products with trellis codes.

use super::experts::decoded;
use super::{activations, finish, gpu, guarded, is_sanitizing};
use half::f16;
use nq_cuda::{
    Buffer, Checked, CodedExperts, Columns, DeviceLinear, GemmOutput, GemvOutput, Gpu,
    MOST_SEQUENCES, MOST_TRELLIS_ROWS, Norm, PartialSums, Places, Stack, Step, StepBounds,
    StepOutput, Stream, StreamOptions, TrellisRoom, TrellisSizes, Uploader, best_len,
    operand_index, packed_weights,
};
use nq_formats::trellis::Code;
use nq_formats::{TrellisScheme, Weight};
use nq_kernels::reference;
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{normal, trellis};

/// Against digits of 16 bits, of the greatest of a row.
const DIGITS: f64 = 1e-8;
/// Against inputs and weights that are rounded to FP16.
const HALVES: f64 = 1e-6;

/// Rows of x: of a block's few and many, in whole and in started groups.
const STEPS: [usize; 6] = [1, 2, 4, 5, 16, MOST_SEQUENCES];

pub(super) fn stream(gpu: &Gpu, inputs: usize, outputs: usize) -> Stream {
    let sizes = TrellisSizes {
        rows: MOST_TRELLIS_ROWS,
        many: 160,
        inputs,
        weights: packed_weights(outputs, inputs),
        gate: outputs / 2,
        experts: CodedExperts::default(),
    };
    let room = TrellisRoom::new(gpu, sizes).unwrap();
    gpu.stream_with(StreamOptions {
        room: Some(room),
        ..StreamOptions::default()
    })
    .unwrap()
}

/// Weights of these heights with the same scales of inputs.
fn stack(scheme: TrellisScheme, heights: &[usize], inputs: usize, seed: u64) -> Vec<Weight> {
    let one = |(i, &height)| trellis(scheme, Dims::new(height, inputs), seed + i as u64, seed);
    heights.iter().enumerate().map(one).collect()
}

fn pack(gpu: &Gpu, parts: &[Weight], stack: Stack) -> DeviceLinear {
    let mut uploader = Uploader::new(gpu).unwrap();
    let parts: Vec<&Weight> = parts.iter().collect();
    let packed = uploader.pack(&parts, stack, false).unwrap();
    uploader.finish().unwrap();
    packed
}

/// The products of all rows of `parts` one below the other, in f64: `[m, rows]`.
fn products(parts: &[Weight], x: &[f32]) -> Vec<f32> {
    let inputs = parts[0].dims().cols;
    let mut row = vec![0f32; inputs];
    let rows: usize = parts.iter().map(|w| w.dims().rows).sum();
    let m = x.len() / inputs;
    let mut all = vec![0f32; m * rows];
    let mut at = 0;
    for w in parts {
        let w = decoded(w);
        for r in 0..w.dims().rows {
            w.dequantize_row(r, &mut row).unwrap();
            for (i, x) in x.chunks(inputs).enumerate() {
                let sum: f64 = row
                    .iter()
                    .zip(x)
                    .map(|(w, x)| f64::from(*w) * f64::from(*x))
                    .sum();
                all[i * rows + at] = sum as f32;
            }
            at += 1;
        }
    }
    all
}

/// Silu of each gate times its up: `[m, rows / 2]`.
fn gated(products: &[f32], m: usize) -> Vec<f32> {
    let rows = products.len() / m;
    let row = |row: &[f32]| {
        let (gate, up) = row.split_at(rows / 2);
        let mut out = vec![0f32; rows / 2];
        reference::silu_mul(gate, up, &mut out);
        out
    };
    products.chunks(rows).flat_map(row).collect()
}

fn normalized(x: &[f32], gain: &[f32]) -> Vec<f32> {
    let mut out = vec![0f32; x.len()];
    reference::rms_norm(x, gain, 1e-6, &mut out);
    out
}

fn close(what: &str, found: &[f32], expected: &[f32], bound: f64) {
    let error = nmse(found, expected);
    assert!(error <= bound, "{what}: error {error:e}");
}

#[derive(Clone, Copy)]
enum Kind {
    Store,
    Add,
    Silu,
}

/// One product of a step, twice, with the same bits.
fn step(
    (gpu, stream): (&Gpu, &Stream),
    w: &DeviceLinear,
    x: &Buffer<f32>,
    m: usize,
    fill: &[f32],
    (kind, norm): (Kind, Norm<'_>),
) -> Vec<f32> {
    let mut columns = Columns::new(gpu, MOST_SEQUENCES, w.inputs()).unwrap();
    let mut run = || {
        let mut y = guarded(gpu, fill);
        let output = match kind {
            Kind::Store => GemvOutput::Store(Some(norm), &mut y),
            Kind::Add => GemvOutput::Add(&mut y),
            Kind::Silu => GemvOutput::Silu(Some(norm), &mut y),
        };
        match m {
            1 => stream.gemv(w, x, output, false).unwrap(),
            _ => stream
                .gemv_batch(w, x, output, &mut columns, m, false)
                .unwrap(),
        }
        finish(stream, &y)
    };
    let first = run();
    assert!(first == run(), "two results");
    first
}

fn check_step(gpu: &Gpu, scheme: TrellisScheme, heights: &[usize], inputs: usize) {
    check_step_of(gpu, &stack(scheme, heights, inputs, 7), true);
}

/// What a stack of weights is called in a failure.
fn describe(parts: &[Weight]) -> String {
    let one = |w: &Weight| format!("{} {:?}", w.scheme_name(), w.dims());
    parts.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Products of a step with `parts`; `head`: those of a head too.
pub(super) fn check_step_of(gpu: &Gpu, parts: &[Weight], head: bool) {
    let inputs = parts[0].dims().cols;
    let packed = pack(gpu, parts, Stack::Concat);
    let rows: usize = parts.iter().map(|w| w.dims().rows).sum();
    let stream = &stream(gpu, inputs, rows);
    let most = MOST_SEQUENCES;
    let x = normal(most * inputs, 3);
    let gain: Vec<f32> = normal(inputs, 4).iter().map(|v| 1.0 + 0.3 * v).collect();
    let residual = normal(most * rows, 5);
    let expected = products(parts, &x);
    let of_normed = products(parts, &normalized(&x, &gain));
    let added: Vec<f32> = expected.iter().zip(&residual).map(|(y, r)| y + r).collect();
    let (device_x, device_gain) = (
        gpu.upload("a test", &x).unwrap(),
        gpu.upload("a test", &gain).unwrap(),
    );
    let norm = Norm {
        gain: &device_gain,
        eps: 1e-6,
    };
    for m in STEPS {
        let what = format!("{}, {m} rows", describe(parts));
        let n = m * rows;
        let device = (gpu, stream);
        let y = step(
            device,
            &packed,
            &device_x,
            m,
            &residual[..n],
            (Kind::Store, norm),
        );
        close(&format!("{what}, stored"), &y, &of_normed[..n], DIGITS);
        let y = step(
            device,
            &packed,
            &device_x,
            m,
            &residual[..n],
            (Kind::Add, norm),
        );
        close(&format!("{what}, added"), &y, &added[..n], DIGITS);
        if !head {
            continue;
        }
        // The head's best.
        let strips = best_len(gpu, &packed, m).unwrap();
        let mut best = gpu.zeros::<[f32; 2]>("a test", m * strips).unwrap();
        let mut columns = Columns::new(gpu, MOST_SEQUENCES, inputs).unwrap();
        let mut y = guarded(gpu, &residual[..n]);
        let out = GemvOutput::Head(Some(norm), &mut y, &mut best);
        match m {
            1 => stream.gemv(&packed, &device_x, out, false).unwrap(),
            _ => stream
                .gemv_batch(&packed, &device_x, out, &mut columns, m, false)
                .unwrap(),
        }
        let logits = finish(stream, &y);
        close(&format!("{what}, head"), &logits, &of_normed[..n], DIGITS);
        let mut bests = vec![[0f32; 2]; m * strips];
        best.read(0, &mut bests).unwrap();
        for (logits, bests) in logits.chunks(rows).zip(bests.chunks(strips)) {
            let top = bests.iter().fold(
                [f32::NEG_INFINITY, 0.0],
                |a, b| if b[0] > a[0] { *b } else { a },
            );
            let (row, greatest) =
                logits
                    .iter()
                    .enumerate()
                    .fold(
                        (0, f32::NEG_INFINITY),
                        |a, (i, &v)| if v > a.1 { (i, v) } else { a },
                    );
            assert_eq!((top[0], top[1].to_bits()), (greatest, row as u32), "{what}");
        }
    }
}

#[test]
fn products_of_a_step() {
    let Some(gpu) = gpu() else { return };
    for scheme in TrellisScheme::all() {
        check_step(&gpu, scheme, &[128], 128);
        check_step(&gpu, scheme, &[256, 144, 40], 384);
    }
}

/// Strips that one block has alone, and strips that several blocks have parts of.
#[test]
fn products_of_a_step_in_real_shapes() {
    let Some(gpu) = gpu() else { return };
    if is_sanitizing() {
        return;
    }
    let octagon = |bits| TrellisScheme::of_bits(Code::Octagon, bits).unwrap();
    check_step(&gpu, octagon(4.0), &[1024], 3072);
    check_step(&gpu, octagon(3.5), &[2048, 512, 512], 4096);
    check_step(&gpu, octagon(3.0), &[640], 12288);
    check_step(
        &gpu,
        TrellisScheme::of_bits(Code::Sum, 6.0).unwrap(),
        &[40_000],
        256,
    );
}

/// Products of rows in FP16: by codes as they are, and by values in FP16.
fn check_halves(gpu: &Gpu, scheme: TrellisScheme, heights: &[usize], inputs: usize) {
    check_halves_of(gpu, &stack(scheme, heights, inputs, 17));
}

pub(super) fn check_halves_of(gpu: &Gpu, parts: &[Weight]) {
    let inputs = parts[0].dims().cols;
    let packed = pack(gpu, parts, Stack::Concat);
    let rows: usize = parts.iter().map(|w| w.dims().rows).sum();
    let stream = &stream(gpu, inputs, rows);
    const MOST: usize = 130;
    let (x, half) = activations(MOST, inputs, 18);
    let expected = products(parts, &x);
    let residual = normal(MOST * rows, 19);
    let half = gpu.upload("a test", &half).unwrap();
    for m in [1, 16, 17, 33, 64, 65, MOST] {
        let what = format!("{}, {m} rows of halves", describe(parts));
        let bound = if m > MOST_TRELLIS_ROWS {
            HALVES
        } else {
            DIGITS
        };
        let n = m * rows;
        let mut y = guarded(gpu, &residual[..n]);
        stream
            .gemm(&packed, &half, GemmOutput::Store(&mut y), m)
            .unwrap();
        close(&what, &finish(stream, &y), &expected[..n], bound);
        let mut y = guarded(gpu, &residual[..n]);
        stream
            .gemm(&packed, &half, GemmOutput::Add(&mut y), m)
            .unwrap();
        let added: Vec<f32> = expected[..n]
            .iter()
            .zip(&residual)
            .map(|(y, r)| y + r)
            .collect();
        close(
            &format!("{what}, added"),
            &finish(stream, &y),
            &added,
            bound,
        );
    }
    for m in [17, 64] {
        let mut sums = PartialSums::new(gpu, m, rows).unwrap();
        stream
            .gemm_step(&packed, &half, StepOutput::Parts(&mut sums), m)
            .unwrap();
        stream.synchronize().unwrap();
        let mut all = vec![0f32; sums.values().len()];
        sums.values().read(0, &mut all).unwrap();
        assert_eq!(sums.parts(), 1);
        close(
            "sums in parts",
            &all[..m * rows],
            &expected[..m * rows],
            DIGITS,
        );
    }
}

#[test]
fn products_of_many_rows() {
    let Some(gpu) = gpu() else { return };
    for scheme in TrellisScheme::all() {
        check_halves(&gpu, scheme, &[256, 144, 40], 384);
    }
    check_halves(
        &gpu,
        TrellisScheme::of_bits(Code::Octagon, 4.0).unwrap(),
        &[1024],
        1024,
    );
}

#[test]
fn gates_and_ups() {
    let Some(gpu) = gpu() else { return };
    for scheme in TrellisScheme::all() {
        for (width, inputs) in [(128, 128), (272, 384), (1536, 512)] {
            check_gates_of(&gpu, &stack(scheme, &[width, width], inputs, 27));
        }
    }
}

/// Products of gate and up, of a step and of many rows.
pub(super) fn check_gates_of(gpu: &Gpu, parts: &[Weight]) {
    let Dims {
        rows: width,
        cols: inputs,
    } = parts[0].dims();
    let packed = pack(gpu, parts, Stack::Interleave);
    let stream = &stream(gpu, inputs, 2 * width);
    let gain = vec![1f32; inputs];
    const MOST: usize = 70;
    let (x, half) = activations(MOST, inputs, 28);
    let expected = gated(&products(parts, &x), MOST);
    let of_normed = gated(&products(parts, &normalized(&x, &gain)), MOST);
    let device_gain = gpu.upload("a test", &gain).unwrap();
    let norm = Norm {
        gain: &device_gain,
        eps: 1e-6,
    };
    let device_x = gpu.upload("a test", &x).unwrap();
    let fill = vec![0f32; MOST * width];
    for m in STEPS {
        let n = m * width;
        let device = (gpu, stream);
        let y = step(
            device,
            &packed,
            &device_x,
            m,
            &fill[..n],
            (Kind::Silu, norm),
        );
        close(
            &format!("silu {}, {m} rows", describe(parts)),
            &y,
            &of_normed[..n],
            DIGITS,
        );
    }
    let device_half = gpu.upload("a test", &half).unwrap();
    let padded = width.next_multiple_of(256);
    for m in [3, 33, 64, MOST] {
        let mut y = gpu.zeros::<u16>("a test", m * padded).unwrap();
        stream
            .gemm(&packed, &device_half, GemmOutput::Silu(&mut y), m)
            .unwrap();
        stream.synchronize().unwrap();
        let mut all = vec![0u16; m * padded];
        y.read(0, &mut all).unwrap();
        let found: Vec<f32> = all
            .chunks(padded)
            .flat_map(|row| (0..width).map(|k| f16::from_bits(row[operand_index(k)]).to_f32()))
            .collect();
        let what = format!("silu {}, {m} rows of halves", describe(parts));
        close(&what, &found, &expected[..m * width], HALVES);
    }
}

#[test]
fn embeddings() {
    let Some(gpu) = gpu() else { return };
    for scheme in TrellisScheme::all() {
        let (rows, inputs) = (300, 384);
        let parts = stack(scheme, &[rows], inputs, 37);
        let packed = pack(&gpu, &parts, Stack::Concat);
        let stream = gpu.stream().unwrap();
        let tokens = [0u32, 299, 17, 128, 17];
        let mut expected = vec![0f32; tokens.len() * inputs];
        for (&t, row) in tokens.iter().zip(expected.chunks_mut(inputs)) {
            parts[0].dequantize_row(t as usize, row).unwrap();
        }
        let device_tokens = Checked::upload(&gpu, "a test", &tokens, rows).unwrap();
        let mut x = guarded(&gpu, &vec![0f32; expected.len()]);
        stream
            .embed(&packed, &device_tokens, &mut x, tokens.len())
            .unwrap();
        close(
            &format!("embed {scheme}"),
            &finish(&stream, &x),
            &expected,
            1e-12,
        );
        let places = Places {
            positions: 1,
            slots: 1,
            images: 0,
        };
        let steps = tokens.map(|token| Step {
            token,
            ..Step::default()
        });
        let bounds = StepBounds {
            places,
            tokens: rows,
        };
        let steps = Checked::upload(&gpu, "a test", &steps, bounds).unwrap();
        let mut x = guarded(&gpu, &vec![0f32; expected.len()]);
        stream
            .embed_step(&packed, &steps, &mut x, tokens.len())
            .unwrap();
        close(
            &format!("embed {scheme}"),
            &finish(&stream, &x),
            &expected,
            1e-12,
        );
    }
}

#[test]
fn what_has_no_kernel_is_refused_by_name() {
    let Some(gpu) = gpu() else { return };
    let scheme = TrellisScheme::of_bits(Code::Octagon, 4.0).unwrap();
    let same = stack(scheme, &[128, 128], 128, 47);
    let other = trellis(scheme, Dims::new(128, 128), 99, 99);
    let mut uploader = Uploader::new(&gpu).unwrap();
    let refused = uploader.pack(&[&same[0], &other], Stack::Concat, false);
    let message = refused.err().expect("scales differ").to_string();
    assert!(message.contains("scales of inputs differ"), "{message}");
    // Such products run with values of FP16.
    let packed = uploader
        .pack(&[&same[0], &other], Stack::Concat, true)
        .unwrap();
    uploader.finish().unwrap();
    assert_eq!(packed.kind().name(), "fp16");
    let packed = pack(&gpu, &same, Stack::Concat);
    let x = gpu.upload("a test", &[1f32; 128]).unwrap();
    let mut y = gpu.zeros::<f32>("a test", 256).unwrap();
    let plain = gpu.stream().unwrap();
    let missing = plain.gemv(&packed, &x, GemvOutput::Add(&mut y), false);
    let message = missing.unwrap_err().to_string();
    assert!(message.contains("memory for trellis codes"), "{message}");
    let missing = plain.linear_reference(&packed, &x, &mut y, 1, false);
    assert!(missing.unwrap_err().to_string().contains("trellis"));
}
