//! Every block type compared with vectors dequantized by another implementation: see
//! `fixtures/gguf/make.py`.

use nq_formats::gguf::{BlockType, BlockWeight};
use nq_formats::{Exactness, Tensor};
use nq_model::{DType, Dims};
use std::fs;
use std::path::Path;

/// Blocks of a type and the f32 values they represent.
fn fixture(kind: BlockType) -> (Vec<u8>, Vec<f32>) {
    let name = format!("tests/fixtures/gguf/{}.bin", kind.name().to_lowercase());
    let bytes = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap();
    let blocks = bytes.len() / (kind.bytes() + 4 * kind.elements());
    let (data, values) = bytes.split_at(blocks * kind.bytes());
    let (values, rest) = values.as_chunks::<4>();
    assert!(blocks >= 12 && rest.is_empty());
    let values = values.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (data.into(), values)
}

fn quantized() -> impl Iterator<Item = BlockType> {
    BlockType::all().filter(|t| t.layout().is_some())
}

#[test]
fn dequantization_is_identical_bit_for_bit() {
    assert_eq!(quantized().count(), 23);
    for kind in quantized() {
        let (data, expected) = fixture(kind);
        // As one row, and as rows of one block each.
        for rows in [1, expected.len() / kind.elements()] {
            let cols = expected.len() / rows;
            let weight =
                BlockWeight::new(kind, Dims::new(rows, cols), data.clone().into()).unwrap();
            let mut row = vec![f32::NAN; cols];
            for (r, expected) in expected.chunks(cols).enumerate() {
                weight.dequantize_row(r, &mut row);
                for (i, (w, e)) in row.iter().zip(expected).enumerate() {
                    assert_eq!(
                        w.to_bits(),
                        e.to_bits(),
                        "{kind} row {r} element {i}: {w} {e}"
                    );
                }
            }
        }
    }
}

#[test]
fn floats_are_identical_bit_for_bit() {
    for (kind, dtype) in [
        (BlockType::F32, DType::F32),
        (BlockType::F16, DType::F16),
        (BlockType::BF16, DType::BF16),
    ] {
        let (data, expected) = fixture(kind);
        let tensor = Tensor::new(dtype, vec![expected.len()], data.into()).unwrap();
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&tensor.to_f32().unwrap()), bits(&expected), "{kind}");
    }
}

/// Types with plain f16 scales become canonical weights of the same numbers; the others
/// differ by the f16 rounding of two products: half a unit in the last of 11 bits each, or
/// half the smallest subnormal.
#[test]
fn canonical_weights_round_only_scale_products() {
    for kind in quantized() {
        let (data, expected) = fixture(kind);
        let dims = Dims::new(expected.len() / kind.elements(), kind.elements());
        let weight = BlockWeight::new(kind, dims, data.into()).unwrap();
        let affine = weight.to_affine().unwrap();
        let layout = kind.layout().unwrap();
        assert_eq!(affine.scheme(), layout.scheme());
        let mut row = vec![f32::NAN; dims.cols];
        let mut changed = 0;
        for (r, expected) in expected.chunks(dims.cols).enumerate() {
            affine.dequantize_row(r, &mut row);
            for (i, (w, e)) in row.iter().zip(expected).enumerate() {
                let (s, o) = affine.affine(r, i / layout.group as usize);
                let code = (w - o) / s;
                let code = if code.is_finite() {
                    code.abs().max(1.0)
                } else {
                    1.0
                };
                let half_ulp = |v: f32| v.abs() / 2048.0 + 2f32.powi(-25);
                let bound = if layout.plain_scales {
                    0.0
                } else {
                    1.01 * (half_ulp(s) * code.max(128.0) + half_ulp(o))
                };
                assert!(
                    (w - e).abs() <= bound,
                    "{kind} row {r} element {i}: {w} {e}"
                );
                changed += usize::from(w != e);
            }
        }
        match BlockWeight::exactness(kind) {
            Exactness::Exact => assert_eq!(changed, 0, "{kind}"),
            Exactness::ScalesRounded(DType::F16) => assert!(changed > 0, "{kind}"),
            other => panic!("{kind}: {other:?}"),
        }
    }
}

#[test]
fn wrong_lengths_and_types_are_refused() {
    let new = |kind: BlockType, dims, n: usize| BlockWeight::new(kind, dims, vec![0; n].into());
    let message = |r: nq_formats::Result<BlockWeight>| r.unwrap_err().to_string();
    assert!(new(BlockType::Q8_0, Dims::new(2, 64), 136).is_ok());
    assert!(
        message(new(BlockType::Q8_0, Dims::new(2, 64), 135)).contains("136 bytes of Q8_0 [2, 64]")
    );
    assert!(message(new(BlockType::Q8_0, Dims::new(2, 48), 102)).contains("whole rows"));
    assert!(message(new(BlockType::F32, Dims::new(1, 1), 4)).contains("one of Q4_0"));
    let inf = [0x00, 0x7c]
        .iter()
        .chain(&[0; 16])
        .copied()
        .collect::<Vec<u8>>();
    let weight = BlockWeight::new(BlockType::Q4_0, Dims::new(1, 32), inf.into()).unwrap();
    let error = weight.to_affine().unwrap_err().to_string();
    assert!(
        error.contains("scales") && error.contains("inf in row 0, group 0"),
        "{error}"
    );
}
