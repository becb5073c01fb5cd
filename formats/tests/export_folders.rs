//! compressed-tensors, GPTQ and AWQ folders, read back by the formats' own formulas.

use crate::common::names;
use half::f16;
use nq_formats::export::{Change, ExportFormat, ExportOptions, ExportReport, export};
use nq_formats::nq::{Opened, Param, QuantizationRecord, Writer, WriterOptions};
use nq_formats::shards::Shards;
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Checkpoint, Exactness, Files, Group, QuantizedWeight, Result,
    Tensor, Weight, ZeroPoints, Zeros,
};
use nq_model::names::{Shape, is_layer_linear, parameters};
use nq_model::{DType, Dims};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// A weight of pseudo-random codes, scales and zero-points.
fn random(scheme: AffineScheme, Dims { rows, cols }: Dims, order: bool) -> Weight {
    let mut state = 1u32;
    let mut next = |n: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % n
    };
    let groups = scheme.group.count(cols);
    let most = u32::from(scheme.bits.max_code()) + 1;
    let mut packed = |n: usize| -> Vec<u8> {
        let rows = (0..rows).flat_map(|_| {
            let codes: Vec<u8> = (0..n).map(|_| (1 + next(most - 1)) as u8).collect();
            nq_formats::pack::pack_rows(scheme.bits, &codes, n)
        });
        rows.collect()
    };
    let codes = packed(cols);
    let zeros = match scheme.zeros {
        Zeros::Integer => ZeroPoints::Integer(packed(groups).into()),
        Zeros::Offset => ZeroPoints::Offset(vec![f16::from_f32(-0.25); rows * groups].into()),
        Zeros::None => ZeroPoints::None,
    };
    let scale = |_| f16::from_f32((1 + next(1000)) as f32 / 16384.0);
    let scales: Vec<f16> = (0..rows * groups).map(scale).collect();
    let g_idx = order.then(|| (0..cols).map(|i| (i % groups) as u32).collect());
    let dims = Dims::new(rows, cols);
    let weight = AffineWeight::new(scheme, dims, codes.into(), scales.into(), zeros, g_idx);
    Weight::Quantized(QuantizedWeight::Affine(weight.unwrap()))
}

/// A folder in nq's format with the demo model's shape and random Linears, each of its own scheme.
fn folder(dir: &Path, scheme: impl Fn(&str) -> (AffineScheme, bool)) -> Checkpoint {
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let out = dir.join("nq");
    let options = WriterOptions::default();
    let opened = Writer::open(&out, demo.files(), &Value::Null, options).unwrap();
    let Opened::Writer(writer) = opened else {
        panic!("a new folder");
    };
    for (name, shape) in parameters(demo.config()) {
        let step = name.replace('.', "-");
        match shape {
            Shape::Vector(len) => {
                let norm = demo.store().vector(&name, len).unwrap();
                writer.put(&step, &[(name, Param::Vector(&norm))]).unwrap();
            }
            Shape::Matrix(rows, cols) => {
                let weight = if is_layer_linear(&name) {
                    let (scheme, order) = scheme(&name);
                    random(scheme, Dims::new(rows, cols), order)
                } else {
                    demo.store().matrix(&name, Dims::new(rows, cols)).unwrap()
                };
                writer
                    .put(&step, &[(name, Param::Matrix(&weight))])
                    .unwrap();
            }
        }
    }
    writer.finish(QuantizationRecord::default(), &()).unwrap();
    Checkpoint::open(&out).unwrap()
}

fn affine(bits: Bits, group: Group, zeros: Zeros) -> AffineScheme {
    AffineScheme::new(bits, group, zeros)
}

fn write(source: &Checkpoint, format: ExportFormat, out: &Path) -> Result<ExportReport> {
    export(source, format, out, &ExportOptions::default(), &())
}

fn words(t: &Tensor) -> Vec<u32> {
    assert_eq!(t.dtype(), DType::I32);
    t.data()
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| u32::from_le_bytes(*b))
        .collect()
}

/// Field `i` of the low-to-high `bits`-wide fields of `word`.
fn field(word: u32, bits: usize, i: usize) -> i32 {
    (word >> (bits * i) & ((1 << bits) - 1)) as i32
}

/// Reads Linear `x` of a folder: `(input, output) -> weight`.
type Reader = fn(&Shards, x: &str, bits: usize, symmetric: bool, Dims) -> Vec<f32>;

fn read_compressed(s: &Shards, x: &str, bits: usize, sym: bool, dims: Dims) -> Vec<f32> {
    let Dims { rows, cols } = dims;
    let get = |part: &str| s.get(&format!("{x}.{part}")).unwrap();
    let per = 32 / bits;
    let packed = words(&get("weight_packed"));
    let scales = get("weight_scale");
    let groups = scales.shape()[1];
    let scales = scales.to_f32().unwrap();
    let zeros = (!sym).then(|| words(&get("weight_zero_point")));
    let g_idx = s.get(&format!("{x}.weight_g_idx")).map(|t| words(&t));
    let shape = get("weight_shape");
    assert_eq!(
        shape.data().as_ref(),
        [rows as u64, cols as u64].map(u64::to_le_bytes).concat()
    );
    let half = 1 << (bits - 1);
    let mut out = Vec::new();
    for r in 0..rows {
        for c in 0..cols {
            let g = g_idx
                .as_ref()
                .map_or(c / (cols / groups), |g| g[c] as usize);
            let q = field(packed[r * cols.div_ceil(per) + c / per], bits, c % per) - half;
            let z = zeros
                .as_ref()
                .map_or(0, |z| field(z[r / per * groups + g], bits, r % per) - half);
            out.push(scales[r * groups + g] * (q - z) as f32);
        }
    }
    out
}

fn read_gptq(s: &Shards, x: &str, bits: usize, _: bool, Dims { rows, cols }: Dims) -> Vec<f32> {
    let get = |part: &str| s.get(&format!("{x}.{part}")).unwrap();
    let per = 32 / bits;
    let (packed, zeros, g_idx) = (
        words(&get("qweight")),
        words(&get("qzeros")),
        words(&get("g_idx")),
    );
    let scales = get("scales");
    assert_eq!(scales.dtype(), DType::F16);
    let scales = scales.to_f32().unwrap();
    let mut out = Vec::new();
    for o in 0..rows {
        for (i, &g) in g_idx.iter().enumerate().take(cols) {
            let g = g as usize;
            let q = field(packed[i / per * rows + o], bits, i % per);
            let z = field(zeros[g * (rows / per) + o / per], bits, o % per) + 1;
            out.push(scales[g * rows + o] * (q - z) as f32);
        }
    }
    out
}

fn read_awq(s: &Shards, x: &str, _: usize, _: bool, Dims { rows, cols }: Dims) -> Vec<f32> {
    // The nibble of a word that holds column o % 8: the inverse of 0 2 4 6 1 3 5 7.
    const NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
    let get = |part: &str| s.get(&format!("{x}.{part}")).unwrap();
    let (packed, zeros, scales) = (words(&get("qweight")), words(&get("qzeros")), get("scales"));
    let groups = scales.shape()[0];
    let scales = scales.to_f32().unwrap();
    let mut out = Vec::new();
    for o in 0..rows {
        for i in 0..cols {
            let g = i / (cols / groups);
            let q = field(packed[i * (rows / 8) + o / 8], 4, NIBBLE[o % 8]);
            let z = field(zeros[g * (rows / 8) + o / 8], 4, NIBBLE[o % 8]);
            out.push(scales[g * rows + o] * (q - z) as f32);
        }
    }
    out
}

/// Exports Linears of one scheme and compares the formula's reading with nq's own weights.
fn check(format: ExportFormat, read: Reader, scheme: AffineScheme, order: bool) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let source = folder(dir.path(), |_| (scheme, order));
    let out = dir.path().join("out");
    let report = write(&source, format, &out).unwrap();
    let shards = Shards::open(&Files::Folder(out.clone())).unwrap();
    let rounds = format == ExportFormat::CompressedTensors;
    for w in report.weights.iter().filter(|w| is_layer_linear(&w.name)) {
        let want = if rounds {
            Exactness::ScalesRounded(DType::BF16)
        } else {
            Exactness::Exact
        };
        assert_eq!(w.change, Change::Kept(want), "{}", w.name);
    }
    for (name, shape) in parameters(source.config()) {
        let Shape::Matrix(rows, cols) = shape else {
            let len = shape.elements();
            let ours = source.store().vector(&name, len).unwrap();
            let theirs = shards
                .require(&format!("{name}.weight"), &[DType::BF16], &[len])
                .unwrap();
            assert_eq!(ours.data(), theirs.data());
            continue;
        };
        if !is_layer_linear(&name) || name.contains(".1.") || name.contains(".3.") {
            continue;
        }
        let symmetric = scheme.zeros == Zeros::None;
        let theirs = read(
            &shards,
            &name,
            scheme.bits.width(),
            symmetric,
            Dims::new(rows, cols),
        );
        let ours = source.store().matrix(&name, Dims::new(rows, cols)).unwrap();
        let mut row = vec![0f32; cols];
        for (r, theirs) in theirs.chunks(cols).enumerate() {
            ours.dequantize_row(r, &mut row).unwrap();
            for (a, b) in row.iter().zip(theirs) {
                let bound = if rounds { a.abs() / 256.0 } else { 0.0 };
                assert!((a - b).abs() <= bound, "{name} row {r}: {a} {b}");
            }
        }
    }
    assert!(out.join("tokenizer.json").exists());
    let config = fs::read(out.join("config.json")).unwrap();
    serde_json::from_slice::<Value>(&config).unwrap()["quantization_config"].clone()
}

#[test]
fn compressed_tensors_reads_back() {
    for (bits, group, zeros, order) in [
        (Bits::B4, Group::Size(128), Zeros::None, false),
        (Bits::B4, Group::Size(64), Zeros::Integer, false),
        (Bits::B4, Group::Size(64), Zeros::Integer, true),
        (Bits::B8, Group::Channel, Zeros::None, false),
    ] {
        let format = ExportFormat::CompressedTensors;
        let config = check(format, read_compressed, affine(bits, group, zeros), order);
        assert_eq!(config["format"], "pack-quantized");
        let weights = &config["config_groups"]["group_0"]["weights"];
        assert_eq!(weights["num_bits"], bits.width());
        assert_eq!(weights["symmetric"], zeros == Zeros::None);
        let strategy = if group == Group::Channel {
            "channel"
        } else {
            "group"
        };
        assert_eq!(weights["strategy"], strategy);
    }
}

#[test]
fn gptq_reads_back() {
    for (bits, group, zeros, order) in [
        (Bits::B4, Group::Size(128), Zeros::None, false),
        (Bits::B4, Group::Size(32), Zeros::Integer, true),
        (Bits::B8, Group::Channel, Zeros::None, false),
    ] {
        let config = check(
            ExportFormat::Gptq,
            read_gptq,
            affine(bits, group, zeros),
            order,
        );
        assert_eq!(config["checkpoint_format"], "gptq");
        assert_eq!(
            (&config["sym"], &config["desc_act"]),
            (&(zeros == Zeros::None).into(), &order.into())
        );
        let size = if let Group::Size(n) = group {
            i64::from(n)
        } else {
            -1
        };
        assert_eq!(config["group_size"], size);
    }
}

#[test]
fn awq_reads_back() {
    for zeros in [Zeros::Integer, Zeros::None] {
        let scheme = affine(Bits::B4, Group::Size(128), zeros);
        let config = check(ExportFormat::Awq, read_awq, scheme, false);
        assert_eq!(
            (&config["version"], &config["zero_point"]),
            (&"gemm".into(), &true.into())
        );
    }
}

#[test]
fn what_a_format_cannot_hold_is_refused_by_name() {
    use ExportFormat::{Awq, CompressedTensors, Gptq};
    let dir = tempfile::tempdir().unwrap();
    let offsets = affine(Bits::B4, Group::Size(32), Zeros::Offset);
    let source = folder(dir.path(), |_| (offsets, false));
    for (format, name) in [
        (Awq, "AWQ"),
        (Gptq, "GPTQ"),
        (CompressedTensors, "compressed-tensors"),
    ] {
        let out = dir.path().join(name);
        let found = write(&source, format, &out);
        names(
            found,
            &[
                "layers.0.self_attn.q_proj (int4 g32 offset)",
                name,
                "integers there",
            ],
        );
        assert!(!out.exists());
    }
    let dir = tempfile::tempdir().unwrap();
    let eight = affine(Bits::B8, Group::Size(64), Zeros::None);
    let four = affine(Bits::B4, Group::Size(64), Zeros::None);
    let source = folder(dir.path(), |n| {
        (
            if n.ends_with("down_proj") {
                eight
            } else {
                four
            },
            false,
        )
    });
    names(
        write(&source, Awq, &dir.path().join("a")),
        &["mlp.down_proj", "AWQ", "4 bits only"],
    );
    names(
        write(&source, Gptq, &dir.path().join("g")),
        &["GPTQ", "q_proj and", "down_proj differ"],
    );
    // Mixed bits make two groups.
    let out = dir.path().join("c");
    write(&source, CompressedTensors, &out).unwrap();
    let config: Value =
        serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    let groups = config["quantization_config"]["config_groups"]
        .as_object()
        .unwrap();
    assert_eq!(
        groups["group_1"]["targets"][0],
        "model.layers.0.mlp.down_proj"
    );
    assert_eq!(groups["group_1"]["weights"]["num_bits"], 8);
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    names(
        write(&demo, Awq, &dir.path().join("d")),
        &["unquantized model in AWQ"],
    );
    names(
        write(&source, CompressedTensors, &out),
        &["already there; --force"],
    );
}

/// nq's schemes as GGUF types: codes move, numbers stay the same.
#[test]
fn gguf_repacks_without_rounding() {
    for (bits, group, zeros, kind) in [
        (Bits::B4, Group::Size(32), Zeros::None, "Q4_0"),
        (Bits::B4, Group::Size(128), Zeros::None, "Q4_0"),
        (Bits::B8, Group::Size(64), Zeros::None, "Q8_0"),
        (Bits::B8, Group::Channel, Zeros::None, "Q8_0"),
        (Bits::B4, Group::Size(32), Zeros::Offset, "Q4_1"),
        (Bits::B4, Group::Size(64), Zeros::Integer, "Q4_1"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let source = folder(dir.path(), |_| (affine(bits, group, zeros), false));
        let out = dir.path().join("x.gguf");
        let report = write(&source, ExportFormat::Gguf, &out).unwrap();
        let read = Checkpoint::open(&out).unwrap();
        let rounds = zeros == Zeros::Integer;
        let differences = nq_formats::export::compare(&source, &read, &()).unwrap();
        for d in &differences {
            assert!(d.relative < if rounds { 1e-3 } else { 1e-30 }, "{d:?}");
        }
        assert_eq!(rounds, differences.iter().any(|d| d.changed > 0));
        for w in report.weights.iter().filter(|w| is_layer_linear(&w.name)) {
            assert_eq!(w.to, kind);
            let want = if rounds {
                Exactness::ScalesRounded(DType::F16)
            } else {
                Exactness::Exact
            };
            assert_eq!(w.change, Change::Kept(want));
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let scheme = affine(Bits::B8, Group::Size(64), Zeros::Integer);
    let source = folder(dir.path(), |_| (scheme, false));
    let out = dir.path().join("x.gguf");
    names(
        write(&source, ExportFormat::Gguf, &out),
        &["int8 g64 asymmetric) and 34 more"],
    );
    let options = ExportOptions {
        requantize: true,
        ..ExportOptions::default()
    };
    let report = export(&source, ExportFormat::Gguf, &out, &options, &()).unwrap();
    let again = report
        .weights
        .iter()
        .filter(|w| w.change == Change::Requantized);
    assert_eq!(again.count(), 35);
}
