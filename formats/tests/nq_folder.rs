//! nq's own folder: contents are read back unchanged, sizes are those of the scheme, and
//! contradictions between record and tensors are refused by name.

use crate::common::{
    Rng, assert_same, names, random_affine, random_dense, refuses_settings, tiny_config,
};
use nq_formats::nq::{Opened, Param, QuantizationRecord, TensorScheme, Writer, WriterOptions};
use nq_formats::serialize::write_tensors;
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Checkpoint, Files, Group, Levels, QuantizedWeight, Tensor,
    TwoLevel, Weight, ZeroPoints, Zeros, nq, pack,
};
use nq_model::names::{Shape, parameters};
use nq_model::{DType, Dims, ModelConfig};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const OPTIONS: WriterOptions = WriterOptions {
    resume: false,
    force: false,
    expected_bytes: 0,
};

fn scheme(bits: Bits, group: u32, zeros: Zeros) -> AffineScheme {
    AffineScheme::new(bits, Group::Size(group), zeros)
}

fn writer(dest: &Path, source: &Files, options: WriterOptions) -> Writer {
    match Writer::open(dest, source, &json!({"plan": 1}), options).unwrap() {
        Opened::Writer(w) => w,
        Opened::Complete => panic!("nothing was complete"),
    }
}

/// Stages every parameter of `config`, matrices by `quantize`, and finishes.
fn write_model(
    dest: &Path,
    source: &Files,
    config: &ModelConfig,
    mut quantize: impl FnMut(&str, Dims) -> Weight,
) -> nq::Written {
    let writer = writer(dest, source, OPTIONS);
    let mut rng = Rng(5);
    for (name, shape) in parameters(config) {
        match shape {
            Shape::Vector(len) => {
                let tensor = random_dense(&mut rng, &[len]);
                writer.put(&name, &[(name.clone(), Param::Vector(&tensor))])
            }
            Shape::Matrix(rows, cols) => {
                let weight = quantize(&name, Dims::new(rows, cols));
                writer.put(&name, &[(name.clone(), Param::Matrix(&weight))])
            }
        }
        .unwrap();
    }
    let record = QuantizationRecord {
        method: "test".into(),
        ..Default::default()
    };
    writer.finish(record, &()).unwrap()
}

fn affine(rng: &mut Rng, scheme: AffineScheme, dims: Dims) -> Weight {
    Weight::Quantized(QuantizedWeight::Affine(random_affine(
        rng, scheme, dims, false,
    )))
}

/// The sizes that the demo model must have at 4 bits.
#[test]
fn demo_sizes() {
    let source = Files::Folder(nq_testkit::demo());
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let cases = [
        (scheme(Bits::B4, 128, Zeros::None), 8_226_304),
        (scheme(Bits::B4, 64, Zeros::Integer), 8_502_784),
    ];
    for (layers, bytes) in cases {
        let dir = tempfile::tempdir().unwrap();
        let dest = dir.path().join("out");
        let mut rng = Rng(1);
        let written = write_model(&dest, &source, demo.config(), |name, dims| {
            let scheme = match name {
                "model.embed_tokens" => scheme(Bits::B8, 128, Zeros::None),
                _ => layers,
            };
            affine(&mut rng, scheme, dims)
        });
        assert_eq!(written.tensor_bytes, bytes);
        let opened = Checkpoint::open(&dest).unwrap();
        assert_eq!(opened.tensor_bytes(), bytes);
        assert_eq!(opened.store().file_bytes(), written.file_bytes);
        let weights = dest.join("model.safetensors");
        assert_eq!(fs::metadata(weights).unwrap().len(), written.file_bytes);
        assert_eq!(opened.bits_per_weight(), 8.0 * bytes as f64 / 13_900_544.0);
        let record = nq::record(&opened).unwrap().unwrap();
        assert_eq!(record.linears.unwrap().scheme, layers.into());
        let overridden: Vec<_> = record.overrides.keys().collect();
        assert_eq!(overridden, ["model.embed_tokens"]);
        for file in [
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
        ] {
            assert_eq!(
                fs::read(dest.join(file)).unwrap(),
                fs::read(nq_testkit::demo().join(file)).unwrap()
            );
        }
        assert!(!dir.path().join("out.partial").exists());
    }
}

/// The safetensors crate reads the files, which are aligned and have the metadata that FORMAT.md
/// requires.
#[test]
fn the_safetensors_crate_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let (dest, _) = tiny_model(dir.path(), scheme(Bits::B4, 3, Zeros::Offset));
    let bytes = fs::read(dest.join("model.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    let strings = metadata.metadata().as_ref().unwrap();
    assert_eq!((&*strings["format"], &*strings["nq_version"]), ("pt", "1"));
    for (name, info) in metadata.tensors() {
        let size = if name.ends_with(".codes") { 1 } else { 2 };
        assert_eq!(info.data_offsets.0 % size, 0, "{name}");
    }
    let names = metadata.offset_keys();
    assert!(names.contains(&"model.layers.0.mlp.down_proj.offsets".to_owned()));
}

/// A tiny quantized model and its weights.
fn tiny_model(dir: &Path, layers: AffineScheme) -> (std::path::PathBuf, BTreeMap<String, Weight>) {
    fs::write(dir.join("config.json"), tiny_config("")).unwrap();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    let config = nq_formats::config::parse(Path::new("c"), tiny_config("").as_bytes()).unwrap();
    let dest = dir.join("out");
    let mut rng = Rng(2);
    let mut kept = BTreeMap::new();
    write_model(&dest, &Files::Folder(dir.into()), &config, |name, dims| {
        let weight = match name {
            "model.embed_tokens" => Weight::Dense(random_dense(&mut rng, &[dims.rows, dims.cols])),
            "model.layers.0.mlp.up_proj" => {
                affine(&mut rng, scheme(Bits::B8, 4, Zeros::None), dims)
            }
            _ => affine(&mut rng, layers, dims),
        };
        kept.insert(name.to_owned(), weight.clone());
        weight
    });
    (dest, kept)
}

#[test]
fn mixed_schemes_come_back() {
    for zeros in [Zeros::None, Zeros::Integer, Zeros::Offset] {
        let dir = tempfile::tempdir().unwrap();
        let (dest, kept) = tiny_model(dir.path(), scheme(Bits::B4, 3, zeros));
        let opened = Checkpoint::open(&dest).unwrap();
        assert_eq!(opened.store().format(), "nq");
        for (name, weight) in &kept {
            let read = opened.store().matrix(name, weight.dims()).unwrap();
            assert_same(&read, weight);
        }
        let record = nq::record(&opened).unwrap().unwrap();
        assert_eq!(record.scheme("model.embed_tokens"), None);
        let up = record.scheme("model.layers.0.mlp.up_proj").unwrap();
        let affine = |s: TensorScheme| s.scheme.affine().unwrap();
        assert_eq!((affine(up).bits, affine(up).zeros), (Bits::B8, Zeros::None));
        assert_eq!(affine(record.linears.unwrap()).zeros, zeros);
        assert_eq!(record.overrides.len(), 1);
        // The same inputs give the same bytes.
        let again = tempfile::tempdir().unwrap();
        let (second, _) = tiny_model(again.path(), scheme(Bits::B4, 3, zeros));
        for name in Files::Folder(dest.clone()).names().unwrap() {
            let [a, b] = [&dest, &second].map(|d| fs::read(d.join(&name)).unwrap());
            assert_eq!(a, b, "{name}");
        }
    }
}

/// Rewrites one tensor in a folder's only weight file, or drops it.
fn edit(dest: &Path, name: &str, change: impl FnOnce(Tensor) -> Option<Tensor>) {
    let path = dest.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = nq_formats::safetensors::SafetensorsFile::parse(&path, bytes.into()).unwrap();
    let mut tensors: Vec<(String, Tensor)> = file
        .names()
        .filter(|n| *n != name)
        .map(|n| (n.to_owned(), file.get(n).unwrap()))
        .collect();
    if let Some(changed) = change(file.get(name).unwrap()) {
        tensors.push((name.into(), changed));
    }
    write_tensors(&path, &tensors, &BTreeMap::new()).unwrap();
}

#[test]
fn broken_parts_are_named() {
    let linear = "model.layers.0.mlp.down_proj";
    let part = |suffix: &str| format!("{linear}{suffix}");
    let refused = |zeros, suffix: &str, expect: &[&str], change: fn(Tensor) -> Option<Tensor>| {
        let dir = tempfile::tempdir().unwrap();
        let (dest, _) = tiny_model(dir.path(), scheme(Bits::B4, 8, zeros));
        edit(&dest, &part(suffix), change);
        let checked = Checkpoint::open(&dest).and_then(|c| nq::verify(&c));
        names(checked, expect);
    };
    fn poison(t: Tensor) -> Option<Tensor> {
        let mut bytes = t.data().to_vec();
        bytes[6..8].copy_from_slice(&half::f16::NAN.to_le_bytes());
        Some(Tensor::new(DType::F16, t.shape().to_vec(), bytes.into()).unwrap())
    }
    fn infinite(t: Tensor) -> Option<Tensor> {
        let mut bytes = t.data().to_vec();
        bytes[..2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        Some(Tensor::new(DType::F16, t.shape().to_vec(), bytes.into()).unwrap())
    }
    fn transpose(t: Tensor) -> Option<Tensor> {
        let shape = t.shape().iter().rev().copied().collect();
        Some(Tensor::new(t.dtype(), shape, t.data().clone()).unwrap())
    }
    fn as_bytes(t: Tensor) -> Option<Tensor> {
        let shape = vec![t.data().len()];
        Some(Tensor::new(DType::U8, shape, t.data().clone()).unwrap())
    }
    let file = "model.safetensors";
    let none = Zeros::None;
    let scales = part(".scales");
    refused(
        none,
        ".scales",
        &[file, &scales, "finite", "NaN in row 1, group 1"],
        poison,
    );
    refused(
        none,
        ".scales",
        &[file, &scales, "finite", "inf in row 0, group 0"],
        infinite,
    );
    refused(
        none,
        ".scales",
        &[file, &scales, "F16 [8, 2]", "F16 [2, 8]"],
        transpose,
    );
    refused(
        none,
        ".scales",
        &[file, &scales, "F16 [8, 2]", "U8 [32]"],
        as_bytes,
    );
    refused(none, ".scales", &["out", &scales, "no such tensor"], |_| {
        None
    });
    let codes = part(".codes");
    refused(
        none,
        ".codes",
        &[file, &codes, "U8 [8, 8]", "U8 [64]"],
        as_bytes,
    );
    refused(none, ".codes", &["out", &codes, "no such tensor"], |_| None);
    let zeros = part(".zeros");
    refused(
        Zeros::Integer,
        ".zeros",
        &[file, &zeros, "U8 [8, 1]", "U8 [1, 8]"],
        transpose,
    );
    refused(
        Zeros::Integer,
        ".zeros",
        &["out", &zeros, "no such tensor"],
        |_| None,
    );
    let offsets = part(".offsets");
    refused(
        Zeros::Offset,
        ".offsets",
        &[file, &offsets, "finite", "NaN in row 1"],
        poison,
    );
}

#[test]
fn records_that_disagree_with_the_tensors_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (dest, _) = tiny_model(dir.path(), scheme(Bits::B4, 8, Zeros::Integer));
    let refused =
        |expect: &[&str], change: &dyn Fn(&mut Value)| refuses_settings(&dest, expect, change);
    let file = "config.json";
    refused(&[file, "version", "an integer"], &|q| {
        q["version"] = json!("1")
    });
    refused(&[file, "version 4", "versions 1 to 3"], &|q| {
        q["version"] = json!(4)
    });
    // Version 1 does not support the schemes of version 2.
    refused(&[file, "linears", "version 1", "int6 g8"], &|q| {
        q["linears"]["bits"] = json!(6)
    });
    refused(&[file, "linears", "version 1", "scales8"], &|q| {
        q["linears"]["scales"] = json!({"bits": 8, "span": "channel"})
    });
    let scales = |scales: Value| {
        move |q: &mut Value| {
            q["version"] = json!(2);
            q["linears"]["scales"] = scales.clone();
        }
    };
    refused(
        &[file, "whole groups (g8)", "g12"],
        &scales(json!({"bits": 6, "span": 12})),
    );
    refused(
        &[file, "3, 4, 5, 6 or 8 bits", "7"],
        &scales(json!({"bits": 7, "span": 8})),
    );
    refused(
        &[file, "group size above 0"],
        &scales(json!({"bits": 6, "span": 0})),
    );
    refused(
        &[file, "unknown field `offset`"],
        &scales(json!({"bits": 6, "span": 8, "offset": 1})),
    );
    refused(
        &["q_proj.scales", "U8 [8, 2]", "F16 [8, 1]"],
        &scales(json!({"bits": 6, "span": 8})),
    );
    refused(&[file, "overrides", "fewer than 8 bits"], &|q| {
        q["version"] = json!(2);
        q["overrides"]["model.layers.0.mlp.up_proj"] =
            json!({"bits": 8, "group": 8, "zeros": "none", "levels": "table"});
    });
    refused(&["q_proj.levels", "U8 [16]", "no such tensor"], &|q| {
        q["version"] = json!(2);
        q["linears"]["levels"] = json!("table");
    });
    refused(&[file, "linears", "no such key"], &|q| {
        q.as_object_mut().unwrap().remove("linears");
    });
    refused(&[file, "3, 4, 5, 6 or 8 bits", "7"], &|q| {
        q["linears"]["bits"] = json!(7)
    });
    refused(&[file, "group size above 0"], &|q| {
        q["linears"]["group"] = json!(0)
    });
    refused(&[file, "unknown field `rotation`"], &|q| {
        q["linears"]["rotation"] = json!("hadamard");
    });
    refused(&["q_proj.zeros", "no such tensor, as", "symmetric"], &|q| {
        q["linears"]["zeros"] = json!("none");
    });
    refused(&["q_proj.codes", "U8 [8, 8]", "U8 [8, 4]"], &|q| {
        q["linears"]["bits"] = json!(8);
    });
    refused(
        &["q_proj.g_idx", "I32 or U32 [8]", "no such tensor"],
        &|q| {
            q["linears"]["g_idx"] = json!(true);
        },
    );
    refused(&["down_proj.codes", "a scheme for", "none"], &|q| {
        q["linears"] = Value::Null
    });
    refused(&["up_proj.codes", "U8 [16, 4]", "U8 [16, 8]"], &|q| {
        q["overrides"] = json!({});
    });
    refused(&["lm_head", "overrides", "no such tensor"], &|q| {
        q["overrides"]["lm_head"] = q["linears"].clone();
    });
    refused(&["embed_tokens.weight", "no such tensor, as"], &|q| {
        q["overrides"]["model.embed_tokens"] = q["linears"].clone();
    });
}

#[test]
fn record_round_trip() {
    let text = json!({
        "quant_method": "nq", "version": 1,
        "linears": {"bits": 4, "group": 64, "zeros": "integer"},
        "overrides": {
            "lm_head": {"bits": 8, "group": "channel", "zeros": "none", "g_idx": true},
            "model.layers.3.mlp.down_proj": null,
        },
        "method": "gptq",
        "settings": {"damping": 0.01},
        "source": {"name": "Qwen/Qwen3-0.6B", "sha256": "ab", "revision": "main"},
        "calibration": {"name": "self", "sha256": "cd", "tokens": 65536},
        "seed": 7,
        "fallbacks": ["model.layers.3.mlp.down_proj: NaN in its input"],
        "quality": {"ppl": 20.05, "kld": {"mean": 0.03}},
    });
    let record = QuantizationRecord::parse(Path::new("c"), &text).unwrap();
    assert_eq!(record.to_json(), text);
    let head = record.scheme("lm_head").unwrap();
    let expected = TensorScheme {
        scheme: AffineScheme::new(Bits::B8, Group::Channel, Zeros::None).into(),
        g_idx: true,
    };
    assert_eq!(head, expected);
    assert_eq!(record.scheme("model.layers.3.mlp.down_proj"), None);
    assert_eq!(record.scheme("model.embed_tokens"), None);
    let q = record.scheme("model.layers.30.self_attn.q_proj").unwrap();
    assert_eq!(q.scheme.bits(), 4.0);
}

/// The weight as devices hold it: held codes and scales, as a scheme of version 1.
fn held(a: &AffineWeight) -> Weight {
    let (rows, cols) = (a.out_features(), a.in_features());
    let scheme = a.scheme().held();
    let mut scratch = Vec::new();
    let codes = (0..rows).flat_map(|r| a.held_row(r, &mut scratch).to_vec());
    let codes: Vec<u8> = codes.collect();
    let zeros = match a.zeros() {
        ZeroPoints::Integer(_) => {
            let groups = a.groups();
            let zeros = (0..rows * groups).map(|i| a.zero_point(i / groups, i % groups).unwrap());
            let zeros: Vec<u8> = zeros.collect();
            ZeroPoints::Integer(pack::pack_rows(scheme.bits, &zeros, groups).into())
        }
        other => other.clone(),
    };
    let (scales, g_idx) = (a.scales().into(), a.g_idx().map(Into::into));
    let held = AffineWeight::new(
        scheme,
        Dims::new(rows, cols),
        codes.into(),
        scales,
        zeros,
        g_idx,
    );
    Weight::Quantized(QuantizedWeight::Affine(held.unwrap()))
}

fn any_scheme() -> impl Strategy<Value = AffineScheme> {
    let bits = prop::sample::select(Bits::ALL.to_vec());
    let group = prop_oneof![
        Just(Group::Channel),
        prop::sample::select(vec![1u32, 3, 16, 32, 64, 128]).prop_map(Group::Size)
    ];
    let zeros = prop_oneof![Just(Zeros::None), Just(Zeros::Integer), Just(Zeros::Offset)];
    let two_level = (prop::sample::select(Bits::ALL.to_vec()), 0u32..4);
    let kept = (prop::option::of(two_level), any::<bool>());
    (bits, group, zeros, kept).prop_map(|(bits, group, zeros, (two_level, table))| {
        let span = |groups| match group {
            Group::Size(n) if groups > 0 => Group::Size(n * groups),
            _ => Group::Channel,
        };
        let levels = if table && bits < Bits::B8 {
            Levels::Table
        } else {
            Levels::Even
        };
        AffineScheme {
            scales: two_level
                .map(|(bits, groups)| TwoLevel {
                    bits,
                    span: span(groups),
                })
                .into(),
            levels,
            ..AffineScheme::new(bits, group, zeros)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Packing and unpacking is the identity, in every width and for every row length.
    #[test]
    fn pack_unpack(scheme in any_scheme(), codes in prop::collection::vec(any::<u8>(), 0..200)) {
        let bits = scheme.bits;
        let codes: Vec<u8> = codes.iter().map(|c| c & bits.max_code()).collect();
        let mut packed = vec![0xAA; bits.bytes(codes.len())];
        pack::pack_row(bits, &codes, &mut packed);
        let mut back = vec![0x55; codes.len()];
        pack::unpack_row(bits, &packed, &mut back);
        prop_assert_eq!(&back, &codes);
        for (i, c) in codes.iter().enumerate() {
            prop_assert_eq!(pack::code_at(bits, &packed, codes.len(), i), *c);
        }
        let mut again = vec![0; packed.len()];
        pack::pack_row(bits, &back, &mut again);
        prop_assert_eq!(again, packed);
    }

    /// Any weight is read back from disk unchanged, with and without a group index.
    #[test]
    fn weights_survive_a_folder(
        scheme in any_scheme(),
        (rows, cols) in (1usize..9, 1usize..150),
        with_g_idx in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), tiny_config("")).unwrap();
        let source = Files::Folder(dir.path().into());
        let writer = writer(&dir.path().join("out"), &source, OPTIONS);
        let (mut rng, dims) = (Rng(seed), Dims::new(rows, cols));
        let weight = random_affine(&mut rng, scheme, dims, with_g_idx);
        let weight = Weight::Quantized(QuantizedWeight::Affine(weight));
        writer.put("s", &[("x".into(), Param::Matrix(&weight))]).unwrap();
        let staged = writer.staged("s").unwrap().unwrap();
        let read = staged.matrix("x", dims).unwrap();
        assert_same(&read, &weight);
        let Weight::Quantized(QuantizedWeight::Affine(read)) = read else { unreachable!() };
        prop_assert_eq!(read.g_idx().is_some(), with_g_idx);
        prop_assert_eq!(scheme.to_string().parse::<AffineScheme>().unwrap(), scheme);
        // The form that devices hold has the same values, bit for bit.
        let (held, mut a, mut b) = (held(&read), vec![0.0; dims.cols], vec![0.0; dims.cols]);
        for row in 0..dims.rows {
            read.dequantize_row(row, &mut a);
            held.dequantize_row(row, &mut b).unwrap();
            prop_assert_eq!(&a, &b);
        }
    }
}
