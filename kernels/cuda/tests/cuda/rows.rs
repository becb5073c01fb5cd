//! Operations on rows: norms of listed rows, gates times ups.

use super::{GUARD, activations, finish, gpu, guarded, pack, scheme};
use half::f16;
use nq_cuda::{
    Buffer, Checked, Columns, DeviceLinear, GatheredRows, GatheredSizes, GemmOutput, GemvOutput,
    Norm, PackedKind, RowsOut, Stack, StepOutput, StreamOptions, operand_index,
};
use nq_formats::{Bits, QuantizedWeight, Weight, Zeros};
use nq_kernels::reference;
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, normal, shuffled_groups};

/// The first `width` of `padded` values of FP16 rows in operand order; the others must be zero.
pub(super) fn in_order(halves: &[u16], width: usize, padded: usize) -> Vec<f32> {
    let value = |row: &[u16], k: usize| f16::from_bits(row[operand_index(k)]).to_f32();
    let mut all = Vec::new();
    for row in halves.chunks_exact(padded) {
        assert!((width..padded).all(|k| value(row, k) == 0.0));
        all.extend((0..width).map(|k| value(row, k)));
    }
    all
}

#[test]
fn norms() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (rows, width) in [(1, 4), (5, 260), (3, 1024), (2, 5120)] {
        let (x, gain) = (normal(rows * width, 71), normal(width, 72));
        let listed: Vec<u32> = (0..rows as u32 + 2)
            .map(|i| (i * 7 + 1) % rows as u32)
            .collect();
        let m = listed.len();
        let mut expected = vec![0f32; m * width];
        for (&r, y) in listed.iter().zip(expected.chunks_mut(width)) {
            reference::rms_norm(&x[r as usize * width..][..width], &gain, 1e-6, y);
        }
        let (x, gain) = (
            gpu.upload("a test", &x).unwrap(),
            gpu.upload("a test", &gain).unwrap(),
        );
        let listed = Checked::upload(&gpu, "a test", &listed, rows).unwrap();
        let mut full = guarded(&gpu, &vec![GUARD; m * width]);
        let padded = width.next_multiple_of(256);
        let mut half = gpu.upload("a test", &vec![0x7eefu16; m * padded]).unwrap();
        let out = RowsOut {
            full: Some(&mut full),
            half: Some(&mut half),
        };
        stream
            .rms_norm(&x, Some(&listed), &gain, &out, m, 1e-6)
            .unwrap();
        let error = nmse(&finish(&stream, &full), &expected);
        assert!(error < 1e-11, "rms_norm {rows} x {width}: {error:e}");
        let mut halves = vec![0; m * padded];
        half.read(0, &mut halves).unwrap();
        let error = nmse(&in_order(&halves, width, padded), &expected);
        assert!(error < 1e-6, "rms_norm {rows} x {width} in FP16: {error:e}");
        // Rows that x may not have.
        let wild = Checked::upload(&gpu, "a test", &[0u32], rows + 1).unwrap();
        let full = Some(&mut full);
        let out = RowsOut { full, half: None };
        assert!(
            stream
                .rms_norm(&x, Some(&wild), &gain, &out, 1, 1e-6)
                .is_err()
        );
    }
    assert!(Checked::upload(&gpu, "a test", &[3u32], 3).is_err());
}

#[test]
fn gates_times_ups() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (m, width) in [(1, 8), (3, 264), (2, 3072)] {
        let (gate, up) = (normal(m * width, 73), normal(m * width, 74));
        let mut expected = vec![0f32; m * width];
        reference::silu_mul(&gate, &up, &mut expected);
        // Alternating every eight values.
        let turns = gate.chunks(8).zip(up.chunks(8));
        let x: Vec<f32> = turns.flat_map(|(g, u)| [g, u].concat()).collect();
        let x = gpu.upload("a test", &x).unwrap();
        let mut full = guarded(&gpu, &vec![GUARD; m * width]);
        let padded = width.next_multiple_of(256);
        let mut half = gpu.upload("a test", &vec![0x7eefu16; m * padded]).unwrap();
        let out = RowsOut {
            full: Some(&mut full),
            half: Some(&mut half),
        };
        stream.silu_mul(&x, &out, m, width).unwrap();
        let error = nmse(&finish(&stream, &full), &expected);
        assert!(error < 1e-11, "silu_mul {m} x {width}: {error:e}");
        let mut halves = vec![0; m * padded];
        half.read(0, &mut halves).unwrap();
        let error = nmse(&in_order(&halves, width, padded), &expected);
        assert!(error < 1e-6, "silu_mul {m} x {width} in FP16: {error:e}");
        assert!(
            stream
                .silu_mul(&x, &RowsOut::default(), m, width + 1)
                .is_err()
        );
    }
}

/// Rows times the sigmoid of their scores.
#[test]
fn scaled_rows() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let (m, width) = (5, 512);
    let (x, scores) = (normal(m * width, 3), normal(m, 4));
    let mut full = guarded(&gpu, &x);
    let halves: Vec<u16> = x.iter().map(|v| f16::from_f32(*v).to_bits()).collect();
    let mut half = gpu.upload("a test", &halves).unwrap();
    let on_device = gpu.upload("a test", &scores).unwrap();
    let out = RowsOut {
        full: Some(&mut full),
        half: Some(&mut half),
    };
    stream
        .scale_rows(&on_device, &out, Dims::new(m, width))
        .unwrap();
    let scale = |i: usize| 1.0 / (1.0 + (-scores[i / width]).exp());
    let expected: Vec<f32> = x.iter().enumerate().map(|(i, v)| v * scale(i)).collect();
    assert!(nmse(&finish(&stream, &full), &expected) < 1e-12);
    let mut found = vec![0u16; m * width];
    half.read(0, &mut found).unwrap();
    let found: Vec<f32> = found.iter().map(|&h| f16::from_bits(h).to_f32()).collect();
    assert!(nmse(&found, &expected) < 1e-6);
}

/// Products with weights whose inputs are in groups of an order of their own have the bits of those with sorted weights and
/// rows, and the values of the weights as they were.
#[test]
fn products_of_gathered_inputs() {
    let Some(gpu) = gpu() else { return };
    let (out, most) = (48, 130);
    for (inp, group, bits) in [
        (512, 128, Bits::B4),
        (1000, 32, Bits::B4),
        (264, 64, Bits::B8),
    ] {
        let groups = Some(shuffled_groups(inp, group as usize, 3));
        let w = affine(scheme(bits, group, Zeros::Integer), out, inp, groups, 5);
        let Weight::Quantized(QuantizedWeight::Affine(a)) = &w else {
            unreachable!("it is asked for");
        };
        let (sorted, order) = a.in_group_order().unwrap();
        let sorted = Weight::Quantized(QuantizedWeight::Affine(sorted));
        let [packed, sorted] = [&w, &sorted].map(|w| pack(&gpu, &[w], Stack::Concat));
        assert_eq!(packed.kind(), sorted.kind());
        assert_ne!(packed.kind(), PackedKind::Fp16);
        let sizes = GatheredSizes {
            full: 16,
            half: most,
            inputs: inp,
        };
        let gathered = Some(GatheredRows::new(&gpu, sizes).unwrap());
        let options = StreamOptions {
            gathered,
            ..StreamOptions::default()
        };
        let stream = gpu.stream_with(options).unwrap();
        let (x, halves) = activations(most, inp, 81);
        let gain = normal(inp, 82);
        let in_groups =
            |row: &[f32]| -> Vec<f32> { order.iter().map(|&i| row[i as usize]).collect() };
        let padded = inp.next_multiple_of(256);
        let halves_in_groups: Vec<u16> = halves
            .chunks(padded)
            .flat_map(|row| {
                let mut to = vec![0; padded];
                for (k, &i) in order.iter().enumerate() {
                    to[operand_index(k)] = row[operand_index(i as usize)];
                }
                to
            })
            .collect();
        let sorted_x: Vec<f32> = x.chunks(inp).flat_map(in_groups).collect();
        let upload = |values: &[f32]| gpu.upload("a test", values).unwrap();
        let forms = [
            (&packed, upload(&x), upload(&gain), &halves),
            (
                &sorted,
                upload(&sorted_x),
                upload(&in_groups(&gain)),
                &halves_in_groups,
            ),
        ];
        let mut expected = vec![0f32; most * out];
        reference::linear(&x, &w, &mut expected).unwrap();
        let columns = &mut Columns::new(&gpu, 16, inp).unwrap();
        for m in [1, 4, 16, 64, most] {
            let mut found = forms.each_ref().map(|(w, x, gain, halves)| {
                let halves = gpu.upload("a test", halves).unwrap();
                let products = |multiply: &mut dyn FnMut(&mut Buffer<f32>)| {
                    let mut y = guarded(&gpu, &vec![0.0; m * out]);
                    multiply(&mut y);
                    finish(&stream, &y)
                };
                let w: &DeviceLinear = w;
                let mut all = vec![products(&mut |y| {
                    stream.gemm(w, &halves, GemmOutput::Store(y), m).unwrap();
                })];
                if m <= 64 && gpu.takes_wide_steps() {
                    all.push(products(&mut |y| {
                        stream
                            .gemm_step(w, &halves, StepOutput::Store(y), m)
                            .unwrap();
                    }));
                }
                if m > 16 {
                    return all;
                }
                let norm = Norm { gain, eps: 1e-6 };
                for normed in [true, false] {
                    all.push(products(&mut |y| {
                        let out = match normed {
                            true => GemvOutput::Store(Some(norm), y),
                            false => GemvOutput::Add(y),
                        };
                        match m {
                            1 => stream.gemv(w, x, out, normed).unwrap(),
                            _ => stream.gemv_batch(w, x, out, columns, m, normed).unwrap(),
                        }
                    }));
                }
                all
            });
            let [ours, theirs] = &mut found;
            assert!(ours == theirs, "{bits:?} g{group} of {inp}, {m} rows");
            for y in [ours.first(), ours.get(3)].into_iter().flatten() {
                let error = nmse(y, &expected[..m * out]);
                assert!(
                    error < 1e-6,
                    "{bits:?} g{group} of {inp}, {m} rows: {error:e}"
                );
            }
        }
        // Without memory for them, and as embeddings, such weights are refused.
        let (_, x, _, _) = &forms[0];
        let mut y = guarded(&gpu, &vec![0.0; out]);
        let plain = gpu.stream().unwrap();
        assert!(
            plain
                .gemv(&packed, x, GemvOutput::Add(&mut y), false)
                .is_err()
        );
        let tokens = Checked::upload(&gpu, "a test", &[1u32], out).unwrap();
        let mut row = gpu.zeros("a test", inp).unwrap();
        assert!(stream.embed(&packed, &tokens, &mut row, 1).is_err());
    }
}
