//! Trellis weights: values as FORMAT.md defines them, whole folders, and parts that contradict each other.

use crate::common::{Rng, names, random_dense, refuses_settings};
use half::f16;
use nq_formats::nq::{Opened, Param, QuantizationRecord, Writer, WriterOptions};
use nq_formats::trellis::{BLOCK, Code, LANES, SEQUENCE, STRIP, TILE, TrellisScheme};
use nq_formats::{
    Checkpoint, Files, QuantizedWeight, Scheme, StoredWeight, TrellisWeight, Weight, nq,
};
use nq_model::Dims;
use nq_model::names::{Shape, parameters};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn random(rng: &mut Rng, scheme: TrellisScheme, Dims { rows, cols }: Dims) -> TrellisWeight {
    let bytes = rows.div_ceil(STRIP) * scheme.strip_bytes(cols);
    let words: Vec<u8> = (0..bytes).map(|_| rng.next() as u8).collect();
    let mut scale = |least: f32| f16::from_f32(least + (rng.next() % 100) as f32 / 200.0);
    let row_scales = (0..rows).map(|_| scale(0.01)).collect();
    let input_scales = (0..cols).map(|i| match i % 3 {
        0 => -scale(0.5),
        _ => scale(0.5),
    });
    let input_scales = input_scales.collect();
    TrellisWeight::new(
        scheme,
        Dims::new(rows, cols),
        words.into(),
        row_scales,
        input_scales,
    )
    .unwrap()
}

/// A weight's values in f64, bit by bit and sum by sum.
fn by_definition(w: &TrellisWeight) -> Vec<f64> {
    let scheme = w.scheme();
    let (rows, cols, words) = (w.out_features(), w.in_features(), scheme.words());
    let strips = rows.div_ceil(STRIP);
    let mut codes = vec![0f64; strips * STRIP * cols];
    for strip in 0..strips {
        for tile in 0..cols / TILE {
            for lane in 0..LANES {
                // The sequence, bit by bit: runs of four words of each lane, then one of two.
                let mut bits = Vec::new();
                for word in 0..words {
                    let (run, start) = match word {
                        w if w < words / 4 * 4 => (4, word / 4 * 4 * LANES),
                        _ => (2, words / 4 * 4 * LANES),
                    };
                    let at = start + lane * run + word % 4;
                    let at = 4 * ((strip * (cols / TILE) + tile) * LANES * words + at);
                    let bytes: [u8; 4] = w.words()[at..at + 4].try_into().unwrap();
                    let value = u32::from_le_bytes(bytes);
                    bits.extend((0..32).rev().map(|i| value >> i & 1));
                }
                let step_bits = scheme.step_bits() as usize;
                let width = scheme.code().width();
                for step in 0..SEQUENCE / width {
                    let end = (step + 1) * step_bits;
                    let state = (0..16).fold(0u32, |state, i| {
                        state << 1 | bits[(end + bits.len() - 16 + i) % bits.len()]
                    });
                    let hash = state.wrapping_mul(scheme.code().multiplier());
                    let b: Vec<f64> = (0..4).map(|i| f64::from(hash >> (8 * i) & 255)).collect();
                    let root = 0.5f64.sqrt();
                    let values = match scheme.code() {
                        Code::Sum => vec![b.iter().sum::<f64>() - 510.0],
                        Code::Octagon => vec![
                            b[0] + root * (b[1] - b[3]) - 127.5,
                            b[2] + root * (b[1] + b[3]) - 127.5 * (1.0 + 2.0 * root),
                        ],
                    };
                    let row = 16 * (step / 4 % 8) + lane / 4 + 8 * (step % 2);
                    let column = (8 * (step / 32) + 4 * (step / 2 % 2) + lane % 4) * width;
                    for (i, v) in values.into_iter().enumerate() {
                        codes[(strip * STRIP + row) * cols + tile * TILE + column + i] = v / 128.0;
                    }
                }
            }
        }
    }
    let mut values = Vec::new();
    for row in 0..rows {
        for col in 0..cols {
            let block = col / BLOCK * BLOCK;
            let sum: f64 = (0..BLOCK)
                .map(|i| {
                    let odd = ((col - block) & i).count_ones() % 2 == 1;
                    codes[row * cols + block + i] * if odd { -1.0 } else { 1.0 }
                })
                .sum();
            let scales = f64::from(w.row_scales()[row]) * f64::from(w.input_scales()[col]);
            values.push(sum / (BLOCK as f64).sqrt() * scales);
        }
    }
    values
}

#[test]
fn values_are_those_of_the_definition() {
    let mut rng = Rng(4);
    for scheme in TrellisScheme::all() {
        let dims = Dims::new(STRIP + 9, 2 * BLOCK);
        let weight = random(&mut rng, scheme, dims);
        let expected = by_definition(&weight);
        let size = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
        let mut row = vec![0.0; dims.cols];
        for (r, expected) in expected.chunks_exact(dims.cols).enumerate() {
            weight.dequantize_row(r, &mut row);
            for (a, b) in row.iter().zip(expected) {
                assert!(
                    (f64::from(*a) - b).abs() < 1e-6 * size,
                    "{scheme}: {a} for {b} in row {r}"
                );
            }
        }
    }
}

#[test]
fn rows_are_shared_by_strips() {
    let mut rng = Rng(9);
    let scheme = TrellisScheme::of_bits(Code::Octagon, 3.5).unwrap();
    let dims = Dims::new(3 * STRIP - 5, BLOCK);
    let weight = Weight::Quantized(QuantizedWeight::Trellis(random(&mut rng, scheme, dims)));
    for (rows, shared) in [(128..379, true), (0..128, true), (100..228, false)] {
        let part = weight.rows(rows.clone());
        assert_eq!(matches!(part, Weight::Quantized(_)), shared, "{rows:?}");
        let (mut a, mut b) = (vec![0.0; dims.cols], vec![0.0; dims.cols]);
        for (i, row) in rows.enumerate() {
            weight.dequantize_row(row, &mut a).unwrap();
            part.dequantize_row(i, &mut b).unwrap();
            assert_eq!(a, b, "row {row}");
        }
    }
}

#[test]
fn schemes_are_read_as_they_are_written() {
    for scheme in TrellisScheme::all() {
        assert_eq!(scheme.to_string().parse::<TrellisScheme>().unwrap(), scheme);
        assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme.into());
        let value = serde_json::to_value(scheme).unwrap();
        assert_eq!(value["bits"], json!(scheme.bits()));
        assert_eq!(
            serde_json::from_value::<TrellisScheme>(value).unwrap(),
            scheme
        );
    }
    for name in [
        "trellis4.5 octagon",
        "trellis2.5 sum",
        "trellis",
        "trellis4 Sum",
    ] {
        assert!(name.parse::<Scheme>().is_err(), "{name}");
    }
    let sum_code = |bits| TrellisScheme::of_bits(Code::Sum, bits).unwrap();
    // 16 bits of a scale for each row and input, and rows filled up to strips.
    assert_eq!(
        sum_code(4.0).bytes(128, 256),
        128 * 256 / 2 + 2 * (128 + 256)
    );
    assert_eq!(sum_code(3.0).bytes(1, 128), 128 * 128 * 3 / 8 + 2 * 129);
}

/// The demo model's shape with random trellis weights, as a folder.
fn folder(dest: &Path, scheme: TrellisScheme) -> Vec<(String, Weight)> {
    let source = Files::Folder(nq_testkit::demo());
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let opened = Writer::open(dest, &source, &Value::Null, WriterOptions::default()).unwrap();
    let Opened::Writer(writer) = opened else {
        panic!("nothing was complete")
    };
    let (mut rng, mut kept) = (Rng(2), Vec::new());
    for (name, shape) in parameters(demo.config()) {
        match shape {
            Shape::Vector(len) => {
                let tensor = random_dense(&mut rng, &[len]);
                writer.put(&name, &[(name.clone(), Param::Vector(&tensor))])
            }
            Shape::Matrix(rows, cols) => {
                let weight = random(&mut rng, scheme, Dims::new(rows, cols));
                let weight = Weight::Quantized(QuantizedWeight::Trellis(weight));
                let put = writer.put(&name, &[(name.clone(), Param::Matrix(&weight))]);
                kept.push((name, weight));
                put
            }
        }
        .unwrap();
    }
    let record = QuantizationRecord {
        method: "test".into(),
        ..Default::default()
    };
    writer.finish(record, &()).unwrap();
    kept
}

#[test]
fn folders_hold_trellises_and_refuse_what_contradicts_them() {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("out");
    let scheme = TrellisScheme::of_bits(Code::Octagon, 2.5).unwrap();
    let kept = folder(&dest, scheme);
    let opened = Checkpoint::open(&dest).unwrap();
    for (name, weight) in &kept {
        let StoredWeight::Canonical(Weight::Quantized(QuantizedWeight::Trellis(read))) =
            opened.store().stored(name, weight.dims()).unwrap()
        else {
            panic!("{name} is no trellis")
        };
        let Weight::Quantized(QuantizedWeight::Trellis(written)) = weight else {
            unreachable!()
        };
        assert!(read.words() == written.words(), "{name}");
        assert_eq!(read.row_scales(), written.row_scales());
        assert_eq!(read.input_scales(), written.input_scales());
        assert_eq!(opened.store().scheme(name), Some(scheme.into()));
    }
    let bytes: usize = kept.iter().map(|(_, w)| w.bytes()).sum();
    let vectors: usize = (parameters(opened.config()).into_iter())
        .filter_map(|(_, shape)| match shape {
            Shape::Vector(len) => Some(2 * len),
            Shape::Matrix(..) => None,
        })
        .sum();
    assert_eq!(opened.tensor_bytes() as usize, bytes + vectors);
    nq::verify_values(&opened).unwrap();

    let path = dest.join("config.json");
    let original: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(original["quantization_config"]["version"], json!(3));
    let linears = json!({"trellis": "octagon", "bits": 2.5});
    assert_eq!(original["quantization_config"]["linears"], linears);
    let refused =
        |expect: &[&str], change: &dyn Fn(&mut Value)| refuses_settings(&dest, expect, change);
    let file = "config.json";
    refused(
        &[file, "linears", "version 2", "trellis2.5 octagon"],
        &|q| q["version"] = json!(2),
    );
    refused(&[file, "2, 3, 4, 5, 6 bits", "2.5 bits"], &|q| {
        q["linears"]["trellis"] = json!("sum")
    });
    refused(&[file, "octagon", "hexagon"], &|q| {
        q["linears"]["trellis"] = json!("hexagon")
    });
    refused(&[file, "unknown field", "group"], &|q| {
        q["linears"]["group"] = json!(64)
    });
    refused(&["q_proj.codes", "[4, 32768]"], &|q| {
        q["linears"]["bits"] = json!(4)
    });
    refused(&["q_proj.input_scales", "no such tensor"], &|q| {
        q["linears"] = json!({"bits": 4, "group": 32, "zeros": "none"})
    });
}

#[test]
fn parts_that_do_not_fit_are_named() {
    let scheme = TrellisScheme::of_bits(Code::Sum, 2.0).unwrap();
    let (rows, cols) = (130, 128);
    let weight = |words: usize, of_rows: Vec<f32>, of_inputs: usize, cols: usize| {
        let halves = |v: Vec<f32>| v.into_iter().map(f16::from_f32).collect();
        let (of_rows, inputs) = (halves(of_rows), halves(vec![1.0; of_inputs]));
        TrellisWeight::new(
            scheme,
            Dims::new(rows, cols),
            vec![0; words].into(),
            of_rows,
            inputs,
        )
    };
    let bytes = 2 * 128 * 128 * 2 / 8;
    assert!(weight(bytes, vec![1.0; rows], cols, cols).is_ok());
    names(
        weight(bytes - 1, vec![1.0; rows], cols, cols),
        &["codes", "8192"],
    );
    names(weight(bytes, vec![1.0; 1], cols, cols), &["scales", "130"]);
    names(
        weight(bytes, vec![1.0; rows], 1, cols),
        &["input scales", "128"],
    );
    names(
        weight(bytes, vec![1.0; rows], 96, 96),
        &["codes", "multiple of 128", "96"],
    );
    let mut poisoned = vec![1.0; rows];
    poisoned[7] = f32::INFINITY;
    names(
        weight(bytes, poisoned, cols, cols),
        &["scales", "finite", "inf at 7"],
    );
}
