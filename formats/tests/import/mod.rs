//! Quantized checkpoints of other tools. Each is encoded here element by element, from the
//! format's description alone, and must dequantize to the same numbers bit for bit.

mod encode;
mod exl3;
mod floats;
mod mtp;

use crate::common::names;
use encode::*;
use nq_formats::Exactness;
use nq_formats::{Checkpoint, Tensor, Weight, nq};
use nq_model::{DType, Dims};
use std::fs;

fn gptq_settings(extra: &str, bits: usize, group: i64) -> String {
    format!(
        r#"{{"quant_method":"gptq","bits":{bits},"group_size":{group},"desc_act":false{extra}}}"#
    )
}

#[test]
fn gptq_versions() {
    for (format, less_one) in [
        ("", true),
        (r#","checkpoint_format":"gptq""#, true),
        (r#","checkpoint_format":"gptq_v2""#, false),
    ] {
        for (bits, group, size) in [(4, 16, 16), (8, 16, 16), (4, 0, -1), (8, 0, -1)] {
            let settings = gptq_settings(format, bits, size);
            let like = |_: &str| Like {
                bits,
                group,
                ..LIKE
            };
            Folder::new(&settings, like, |n| gptq(n, less_one)).check("gptq", "");
            let like = |_: &str| Like {
                bits,
                group,
                symmetric: true,
                ..LIKE
            };
            let folder = Folder::new(&settings, like, |n| gptq(n, less_one));
            let group = if group == 0 {
                "channel".into()
            } else {
                format!("g{group}")
            };
            folder.check("gptq", &format!("int{bits} {group} symmetric"));
        }
    }
}

#[test]
fn gptq_activation_order() {
    let like = |_: &str| Like {
        shuffled: true,
        ..LIKE
    };
    let settings = gptq_settings("", 4, 16).replace("false", "true");
    let folder = Folder::new(&settings, like, |n| gptq(n, true));
    folder.check("gptq", "int4 g16 asymmetric");
    let name = "model.layers.0.self_attn.q_proj.g_idx";
    let far: Vec<u8> = (0..32u32).flat_map(|i| (i / 8).to_le_bytes()).collect();
    let far = Tensor::new(DType::I32, vec![32], far.into()).unwrap();
    folder.refuses(
        name,
        Some(far),
        &["q_proj", "groups below 2", "2 at input 16"],
    );
    Folder::new(&settings, like, |n| gptq(n, true)).refuses(
        name,
        None,
        &[name, "desc_act", "no such tensor"],
    );
}

/// Data that decides how a weight is read is checked before any of its values are used: a bad group
/// index was once followed because a scale was infinite and so did not fit an f16.
#[test]
fn values_are_checked_before_they_are_used() {
    let settings = gptq_settings("", 4, 16).replace("false", "true");
    let name = "model.layers.0.self_attn.q_proj";
    let index = |last: i32| {
        let groups = (0..32).map(|i| if i == 31 { last } else { i / 16 });
        let bytes: Vec<u8> = groups.flat_map(i32::to_le_bytes).collect();
        Tensor::new(DType::I32, vec![32], bytes.into()).unwrap()
    };
    for (scale, last, parts) in [
        (
            f32::INFINITY,
            1,
            ["scales", "finite", "inf in row 0, group 0"],
        ),
        (f32::NAN, 2, ["g_idx", "groups below 2", "2 at input 31"]),
        (1e-9, -1, ["g_idx", "groups below 2", "-1 at input 31"]),
    ] {
        let mut folder = Folder::new(&settings, |_| LIKE, |n| gptq(n, true));
        let scales = float_tensor(DType::F32, &[2, 32], std::iter::repeat_n(scale, 64));
        folder.replace(&format!("{name}.scales"), scales);
        folder.replace(&format!("{name}.g_idx"), index(last));
        let opened = folder.open();
        for found in [
            opened.store().stored(name, Dims::new(32, 32)).map(drop),
            opened.store().matrix(name, Dims::new(32, 32)).map(drop),
        ] {
            names(found, &parts);
            names(nq::verify(&opened), &["q_proj"]);
        }
    }
}

#[test]
fn gptq_per_module_settings_and_early_files() {
    let settings = gptq_settings(
        r#","dynamic":{"+:.*down.*":{"bits":8,"group_size":32}}"#,
        4,
        16,
    );
    let like = |name: &str| {
        if name.contains("down") {
            Like {
                bits: 8,
                group: 32,
                ..LIKE
            }
        } else {
            LIKE
        }
    };
    Folder::new(&settings, like, |n| gptq(n, true)).check("gptq", "");
    // Without `dynamic`, the same file is refused: a scheme is not guessed from shapes.
    Folder::new(&gptq_settings("", 4, 16), like, |n| gptq(n, true)).refuses(
        "",
        None,
        &["down_proj.qweight", "I32 [8, 32]", "I32 [16, 32]"],
    );

    let folder = Folder::new(&gptq_settings("", 4, 16), |_| LIKE, |n| gptq(n, true));
    fs::write(
        folder.dir.path().join("config.json"),
        format!("{{{SHAPE}}}"),
    )
    .unwrap();
    let early = r#"{"bits": 4, "group_size": 16, "desc_act": false, "sym": false}"#;
    fs::write(folder.dir.path().join("quantize_config.json"), early).unwrap();
    folder.check("gptq", "int4 g16 asymmetric");
}

/// GPTQModel writes a rule for every mixture, which leaves its router out. (Perplexity of such a file of a Llama in float64:
/// 19250.8788; with zero-points read one too high: 16615.8718.)
#[test]
fn gptq_zeros_of_either_version_are_read_where_sym_holds_for_every_module() {
    let like = |_: &str| Like {
        symmetric: true,
        ..LIKE
    };
    for rules in [r#"{"-:.*mlp.gate$":{}}"#, r#"{".*down_proj":{"bits":4}}"#] {
        let settings = gptq_settings(&format!(r#","sym":true,"dynamic":{rules}"#), 4, 16);
        for less_one in [true, false] {
            let folder = Folder::new(&settings, like, |n| gptq(n, less_one));
            folder.check("gptq", "int4 g16 symmetric");
        }
    }
    // A rule may say that some modules are not symmetric: then zero-points count.
    let rules = r#","sym":true,"dynamic":{".*down_proj":{"sym":false}}"#;
    let folder = Folder::new(&gptq_settings(rules, 4, 16), |_| LIKE, |n| gptq(n, true));
    folder.check("gptq", "int4 g16 asymmetric");
}

#[test]
fn awq_gemm() {
    for (group, size) in [(16, 16), (32, 32), (0, -1)] {
        let settings = format!(
            r#"{{"quant_method":"awq","bits":4,"group_size":{size},"zero_point":true,
            "version":"gemm","modules_to_not_convert":null}}"#
        );
        let folder = Folder::new(&settings, |_| Like { group, ..LIKE }, awq);
        folder.check("awq", "");
    }
}

fn packed_settings(bits: usize, strategy: &str, symmetric: bool) -> String {
    format!(
        r#"{{"num_bits":{bits},"type":"int","symmetric":{symmetric},"dynamic":false,{strategy}}}"#
    )
}

fn config_groups(format: &str, weights: &[String]) -> String {
    let groups: Vec<String> = weights
        .iter()
        .enumerate()
        .map(|(i, w)| {
            format!(
                r#""group_{i}":{{"targets":["Linear"],"weights":{w},"input_activations":null}}"#
            )
        })
        .collect();
    format!(
        r#"{{"quant_method":"compressed-tensors","format":"{format}","quantization_status":
        "compressed","ignore":["lm_head"],"config_groups":{{{}}}}}"#,
        groups.join(",")
    )
}

const GROUP_16: &str = r#""strategy":"group","group_size":16"#;
const CHANNEL: &str = r#""strategy":"channel""#;

#[test]
fn compressed_tensors_packed() {
    for bits in [4, 8] {
        for (strategy, group, name) in [(GROUP_16, 16, "g16"), (CHANNEL, 0, "channel")] {
            for symmetric in [true, false] {
                let settings = config_groups(
                    "pack-quantized",
                    &[packed_settings(bits, strategy, symmetric)],
                );
                let like = |_: &str| Like {
                    bits,
                    group,
                    symmetric,
                    round: to_bf16,
                    ..LIKE
                };
                let folder = Folder::new(&settings, like, |n| packed(n, symmetric, DType::BF16));
                let zeros = if symmetric { "symmetric" } else { "asymmetric" };
                folder.check("compressed-tensors", &format!("int{bits} {name} {zeros}"));
            }
        }
    }
}

/// What its library writes where nothing is sparse or rotated is read; anything else is refused.
#[test]
fn compressed_tensors_beside_the_groups() {
    let like = |_: &str| Like {
        symmetric: true,
        round: to_bf16,
        ..LIKE
    };
    let folder = |beside: &str| {
        let settings = config_groups("pack-quantized", &[packed_settings(4, GROUP_16, true)]);
        let begun = settings.strip_suffix('}').unwrap();
        let settings = format!("{begun},{beside}}}");
        Folder::new(&settings, like, |n| packed(n, true, DType::BF16))
    };
    for beside in [
        r#""sparsity_config":{},"transform_config":{}"#,
        r#""sparsity_config":null,"transform_config":null"#,
        r#""sparsity_config":{"format":"dense"},"transform_config":{"config_groups":{}}"#,
    ] {
        folder(beside).check("compressed-tensors", "int4 g16 symmetric");
    }
    for (beside, name) in [
        (
            r#""sparsity_config":{"format":"sparse-24-bitmask"}"#,
            "sparse-24-bitmask",
        ),
        (r#""sparsity_config":{"targets":[]}"#, "sparsity_config"),
        (r#""sparsity_config":[]"#, "sparsity_config"),
        (r#""transform_config":[]"#, "transform_config"),
        (r#""transform_config":{"r1":{}}"#, "transform_config"),
        (
            r#""transform_config":{"config_groups":{"r1":{"type":"hadamard"}}}"#,
            "apply",
        ),
    ] {
        folder(beside).refuses("", None, &[name]);
    }
}

#[test]
fn compressed_tensors_mixed_and_ordered() {
    let settings = config_groups(
        "pack-quantized",
        &[
            packed_settings(4, GROUP_16, true),
            packed_settings(8, CHANNEL, true),
        ],
    );
    let like = |name: &str| {
        if name.contains("down") {
            Like {
                bits: 8,
                group: 0,
                symmetric: true,
                ..LIKE
            }
        } else {
            Like {
                symmetric: true,
                shuffled: true,
                ..LIKE
            }
        }
    };
    Folder::new(&settings, like, |n| packed(n, true, DType::F16)).check("compressed-tensors", "");
    // A scheme that no group declares is refused.
    let settings = config_groups("pack-quantized", &[packed_settings(4, GROUP_16, true)]);
    Folder::new(&settings, like, |n| packed(n, true, DType::F16)).refuses(
        "",
        None,
        &[
            "down_proj.weight_scale",
            "a declared scheme",
            "4 bits in groups of 16",
            "[32, 16]",
            "[32, 1]",
        ],
    );
}

#[test]
fn compressed_tensors_int8() {
    for (strategy, group) in [(GROUP_16, 16), (CHANNEL, 0)] {
        for symmetric in [true, false] {
            let settings =
                config_groups("int-quantized", &[packed_settings(8, strategy, symmetric)]);
            let like = |_: &str| Like {
                bits: 8,
                group,
                symmetric,
                round: to_bf16,
                ..LIKE
            };
            let folder = Folder::new(&settings, like, |n| signed_bytes(n, symmetric));
            folder.check("compressed-tensors", "");
        }
    }
}

/// Scales that do not fit an f16 are rounded and reported as such; the stored numbers stay available.
#[test]
fn rounded_scales_are_said() {
    let settings = config_groups("pack-quantized", &[packed_settings(4, GROUP_16, true)]);
    let like = |_: &str| Like {
        symmetric: true,
        round: |v| v,
        ..LIKE
    };
    let folder = Folder::new(&settings, like, |n| packed(n, true, DType::F32));
    let opened = folder.open();
    for (name, n) in &folder.expected {
        let store = opened.store();
        assert_eq!(store.exactness(name), Exactness::ScalesRounded(DType::F16));
        let weight = store.matrix(name, Dims::new(n.rows, n.cols)).unwrap();
        let stored = store.stored(name, Dims::new(n.rows, n.cols)).unwrap();
        let (mut near, mut exact) = (vec![0.0; n.cols], vec![0.0; n.cols]);
        for o in 0..n.rows {
            weight.dequantize_row(o, &mut near).unwrap();
            stored.dequantize_row(o, &mut exact).unwrap();
            for i in 0..n.cols {
                let want = n.value(o, i);
                assert_eq!(exact[i], want);
                assert!((near[i] - want).abs() <= want.abs() / 2048.0 + 1e-6);
            }
        }
    }
}

/// Values of the E4M3 encoding, from its definition.
#[test]
fn fp8_values() {
    use nq_formats::import::fp8::e4m3;
    let known = [
        (0x00, 0.0),
        (0x01, 0.001_953_125),
        (0x07, 0.013_671_875),
        (0x08, 0.015_625),
        (0x38, 1.0),
        (0x3C, 1.5),
        (0x40, 2.0),
        (0x7E, 448.0),
        (0xB8, -1.0),
        (0xFE, -448.0),
    ];
    for (byte, value) in known {
        assert_eq!(e4m3(byte), value, "{byte:#x}");
    }
    assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan());
    let finite: Vec<f32> = (0..0x7F).map(e4m3).collect();
    assert!(finite.is_sorted_by(|a, b| a < b));
}

#[test]
fn fp8_blocks() {
    use nq_formats::import::fp8::e4m3;
    let settings = r#"{"quant_method":"fp8","fmt":"e4m3","weight_block_size":[24,20],
        "activation_scheme":"dynamic"}"#;
    let like = |_: &str| Like {
        bits: 8,
        group: 0,
        ..LIKE
    };
    // The codes are the FP8 bytes; scales are made from their place.
    let scale = |r: usize, c: usize| to_bf16(0.01 + r as f32 * 0.003 + c as f32 * 0.001);
    let byte = |n: &Numbers, at: usize| match n.codes[at] as u8 {
        nan if nan & 0x7F == 0x7F => 0x38,
        b => b,
    };
    let encode = |n: &Numbers| {
        let bytes: Vec<u8> = (0..n.codes.len()).map(|i| byte(n, i)).collect();
        let (down, across) = (n.rows.div_ceil(24), n.cols.div_ceil(20));
        let scales = (0..down).flat_map(|r| (0..across).map(move |c| scale(r, c)));
        vec![
            (
                ".weight",
                Tensor::new(DType::F8E4M3, vec![n.rows, n.cols], bytes.into()).unwrap(),
            ),
            (
                ".weight_scale_inv",
                float_tensor(DType::BF16, &[down, across], scales),
            ),
        ]
    };
    let folder = Folder::new(settings, like, encode);
    let opened = folder.open();
    nq::verify(&opened).unwrap();
    assert_eq!(opened.store().format(), "fp8");
    for (name, n) in &folder.expected {
        let dims = Dims::new(n.rows, n.cols);
        let weight = opened.store().matrix(name, dims).unwrap();
        let stored = opened.store().stored(name, dims).unwrap();
        assert!(matches!(&weight, Weight::Dense(t) if t.dtype() == DType::BF16));
        assert_eq!(
            opened.store().exactness(name),
            Exactness::ValuesRounded(DType::BF16)
        );
        let (mut rounded, mut exact) = (vec![0.0; n.cols], vec![0.0; n.cols]);
        for o in 0..n.rows {
            weight.dequantize_row(o, &mut rounded).unwrap();
            stored.dequantize_row(o, &mut exact).unwrap();
            for i in 0..n.cols {
                let want = e4m3(byte(n, o * n.cols + i)) * scale(o / 24, i / 20);
                assert_eq!(
                    (exact[i], rounded[i]),
                    (want, to_bf16(want)),
                    "{name} {o} {i}"
                );
            }
        }
    }
    let name = "model.layers.0.mlp.up_proj";
    let nan = Tensor::new(DType::F8E4M3, vec![64, 32], vec![0x7F; 64 * 32].into()).unwrap();
    folder.refuses(
        &format!("{name}.weight"),
        Some(nan),
        &[name, "finite", "row 0, column 0"],
    );
    let short = float_tensor(DType::BF16, &[1, 2], [1.0, 1.0].into_iter());
    Folder::new(settings, like, encode).refuses(
        &format!("{name}.weight_scale_inv"),
        Some(short),
        &["up_proj.weight_scale_inv", "[3, 2]", "[1, 2]"],
    );
}

#[test]
fn what_is_not_read_is_named() {
    let refused = |settings: &str, parts: &[&str]| {
        let folder = Folder::new(settings, |_| LIKE, |n| gptq(n, true));
        names(Checkpoint::open(folder.dir.path()), parts);
    };
    let file = "config.json";
    refused(&gptq_settings("", 3, 16), &[file, "3 bits", "4 and 8"]);
    refused(&gptq_settings("", 4, 0), &[file, "group_size", "found 0"]);
    refused(
        r#"{"quant_method":"gptq","group_size":16}"#,
        &[file, "bits", "no such key"],
    );
    let marlin = gptq_settings(r#","checkpoint_format":"marlin""#, 4, 16);
    refused(&marlin, &[file, "checkpoint_format marlin"]);
    let gemv = r#"{"quant_method":"awq","bits":4,"group_size":16,"version":"gemv"}"#;
    refused(gemv, &[file, "AWQ version gemv", "gemm"]);
    refused(r#"{"quant_method":"fp8","fmt":"e5m2"}"#, &[file, "e5m2"]);
    refused(
        r#"{"quant_method":"fp8","weight_block_size":[0,1]}"#,
        &[file, "[0,1]"],
    );
    for (bits, strategy) in [(4, CHANNEL), (8, r#""strategy":"token""#), (6, GROUP_16)] {
        let float = packed_settings(bits, strategy, true).replace("\"int\"", "\"float\"");
        refused(
            &config_groups("mixed-precision", &[float]),
            &[file, &format!("float weights of {bits} bits")],
        );
    }
    let awq = r#"{"quant_method":"modelopt","quant_algo":"NVFP4_AWQ"}"#;
    refused(awq, &[file, "quant_algo NVFP4_AWQ", "W4A16_NVFP4"]);
    refused(r#"{"quant_method":"modelopt"}"#, &[file, "quant_algo"]);
    let marlin = config_groups("marlin-24", &[packed_settings(4, CHANNEL, true)]);
    refused(&marlin, &[file, "marlin-24"]);
    refused(
        &config_groups("pack-quantized", &[]),
        &[file, "config_groups"],
    );
    let token = packed_settings(8, r#""strategy":"token""#, true);
    refused(
        &config_groups("pack-quantized", &[token]),
        &[file, "strategy token"],
    );
}

#[test]
fn broken_tensors_are_named() {
    let folder = || Folder::new(&gptq_settings("", 4, 16), |_| LIKE, |n| gptq(n, true));
    let q = "model.layers.0.self_attn.q_proj";
    let scales = |value: f32| float_tensor(DType::F16, &[2, 32], std::iter::repeat_n(value, 64));
    let tensor = |s: &str| format!("{q}{s}");
    folder().refuses(
        &tensor(".scales"),
        Some(scales(f32::NAN)),
        &[q, "finite", "NaN in row 0"],
    );
    folder().refuses(
        &tensor(".scales"),
        None,
        &["q_proj.scales", "[2, 32]", "no such tensor"],
    );
    let zeros = int_tensor(2, 3, |_| {});
    folder().refuses(
        &tensor(".qzeros"),
        Some(zeros),
        &["q_proj.qzeros", "I32 [2, 4]", "I32 [2, 3]"],
    );
    let bias = float_tensor(DType::F16, &[32], (0..32).map(|i| i as f32));
    folder().refuses(
        &tensor(".bias"),
        Some(bias),
        &["q_proj.bias", "no bias", "found 1"],
    );
    let mut silent = folder();
    let zeros = float_tensor(DType::F16, &[32], std::iter::repeat_n(0.0, 32));
    silent.tensors.push((tensor(".bias"), zeros));
    silent.write();
    silent.check("gptq", "int4 g16 asymmetric");

    let settings = config_groups("pack-quantized", &[packed_settings(4, GROUP_16, true)]);
    let like = |_: &str| Like {
        symmetric: true,
        ..LIKE
    };
    let shape = Tensor::new(
        DType::I64,
        vec![2],
        [32i64, 31].map(i64::to_le_bytes).concat().into(),
    );
    Folder::new(&settings, like, |n| packed(n, true, DType::F16)).refuses(
        &tensor(".weight_shape"),
        Some(shape.unwrap()),
        &["q_proj.weight_shape", "[32, 32]", "[32, 31]"],
    );
}
