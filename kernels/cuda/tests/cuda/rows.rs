//! Operations on rows: norms of listed rows, gates times ups.

use super::{GUARD, finish, gpu, guarded};
use half::f16;
use nq_cuda::{Checked, RowsOut, operand_index};
use nq_kernels::reference;
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;

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
