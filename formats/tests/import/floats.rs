//! Weights in small floats: NVFP4 and FP8 of compressed-tensors and ModelOpt.

use super::encode::*;
use super::{CHANNEL, config_groups, packed_settings};
use crate::common::names;
use nq_formats::{Checkpoint, Exactness, Tensor, Weight, nq};
use nq_model::{DType, Dims};
use std::fs;

/// Values of FP4 (E2M1): a sign, two bits of exponent with bias 1, one of mantissa.
fn fp4(code: u32) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn bytes(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    Tensor::new(dtype, shape.to_vec(), bytes.into()).unwrap()
}

const FLOAT_GROUPS: &str = r#""strategy":"tensor_group","group_size":16"#;

fn nvfp4_settings() -> String {
    let weights = packed_settings(4, FLOAT_GROUPS, true).replace("\"int\"", "\"float\"");
    config_groups("nvfp4-pack-quantized", &[weights])
}

const MODELOPT: &str = r#"{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION","ignore":["lm_head"],
    "config_groups":{"group_0":{"input_activations":{"num_bits":8},"weights":{"num_bits":8}}}}"#;

/// The tensors of an NVFP4 weight: of ModelOpt, or of compressed-tensors.
fn nvfp4(n: &Numbers, whole: f32, modelopt: bool) -> Encoded {
    let pairs = n.codes.as_chunks::<2>().0.iter();
    let codes = pairs.map(|[low, high]| (low | high << 4) as u8).collect();
    let scales = (0..n.rows * n.groups).map(scale_byte).collect();
    let (codes_in, whole_in) = match modelopt {
        true => (".weight", ".weight_scale_2"),
        false => (".weight_packed", ".weight_global_scale"),
    };
    let whole = float_tensor(DType::F32, &[1], [whole].into_iter());
    vec![
        (codes_in, bytes(DType::U8, &[n.rows, n.cols / 2], codes)),
        (
            ".weight_scale",
            bytes(DType::F8E4M3, &[n.rows, n.groups], scales),
        ),
        (whole_in, whole),
    ]
}

/// The FP8 scale of a group.
fn scale_byte(group: usize) -> u8 {
    0x30 + (group * 7 % 0x40) as u8
}

#[test]
fn nvfp4_of_two_tools() {
    use nq_formats::import::fp8::e4m3;
    let like = |_: &str| Like {
        bits: 4,
        group: 16,
        ..LIKE
    };
    // With a power of two every scale is an f16; with the usual value they are rounded, which is said.
    for (modelopt, whole, exact) in [
        (false, 4.0, true),
        (false, 2688.0, false),
        (true, 0.25, true),
        (true, 1.0 / 2688.0, false),
    ] {
        let settings = if modelopt {
            MODELOPT.into()
        } else {
            nvfp4_settings()
        };
        let folder = Folder::new(&settings, like, |n| nvfp4(n, whole, modelopt));
        let opened = folder.open();
        nq::verify(&opened).unwrap();
        for (name, n) in &folder.expected {
            let dims = Dims::new(n.rows, n.cols);
            let weight = opened.store().matrix(name, dims).unwrap();
            assert_eq!(weight.scheme_name(), "int8 g16 symmetric");
            let stored = opened.store().stored(name, dims).unwrap();
            let said = match exact {
                true => Exactness::Exact,
                false => Exactness::ScalesRounded(DType::F16),
            };
            assert_eq!(opened.store().exactness(name), said);
            let (mut near, mut found) = (vec![0.0; n.cols], vec![0.0; n.cols]);
            for o in 0..n.rows {
                weight.dequantize_row(o, &mut near).unwrap();
                stored.dequantize_row(o, &mut found).unwrap();
                for i in 0..n.cols {
                    let scale = e4m3(scale_byte(o * n.groups + i / 16));
                    let scale = if modelopt {
                        scale * whole
                    } else {
                        scale / whole
                    };
                    let want = fp4(n.codes[o * n.cols + i]) * scale;
                    let close = |v: f32, by: f32| (v - want).abs() <= by * want.abs();
                    assert!(close(found[i], 3e-7), "{name} {o} {i}: {} {want}", found[i]);
                    assert!(close(near[i], if exact { 0.0 } else { 1e-3 }));
                }
            }
        }
    }
    // Early exports have their settings in a file of their own.
    let folder = Folder::new(MODELOPT, like, |n| nvfp4(n, 0.25, true));
    let dir = folder.dir.path();
    let config = fs::read_to_string(dir.join("config.json")).unwrap();
    let config = config.replace(MODELOPT, "null");
    fs::write(dir.join("config.json"), config).unwrap();
    let early = r#"{"producer":{"name":"modelopt"},"quantization":{"quant_algo":"NVFP4",
        "kv_cache_quant_algo":"FP8","group_size":16,"exclude_modules":["lm_head"]}}"#;
    fs::write(dir.join("hf_quant_config.json"), early).unwrap();
    assert_eq!(folder.open().store().format(), "modelopt");
    nq::verify(&folder.open()).unwrap();
    fs::write(dir.join("hf_quant_config.json"), "{}").unwrap();
    let nothing = ["hf_quant_config.json", "quantization", "object"];
    names(Checkpoint::open(dir), &nothing);

    let name = "model.layers.0.mlp.up_proj";
    let refuses = |part: &str, tensor: Tensor, says: &[&str]| {
        let folder = Folder::new(&nvfp4_settings(), like, |n| nvfp4(n, 4.0, false));
        folder.refuses(&format!("{name}{part}"), Some(tensor), says);
    };
    let float = |value: f32| float_tensor(DType::F32, &[1], [value].into_iter());
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let says = ["up_proj.weight_global_scale", "above 0"];
        refuses(".weight_global_scale", float(wrong), &says);
    }
    refuses(
        ".weight_packed",
        bytes(DType::U8, &[64, 15], vec![0; 64 * 15]),
        &["up_proj.weight_packed", "[64, 16]", "[64, 15]"],
    );
    refuses(
        ".weight_scale",
        bytes(DType::F8E4M3, &[64, 3], vec![0x38; 64 * 3]),
        &["up_proj.weight_scale", "[64, 2]", "[64, 3]"],
    );
    refuses(
        ".weight_scale",
        bytes(DType::F8E4M3, &[64, 2], vec![0x7F; 64 * 2]),
        &["up_proj.weight_scale", "finite", "row 0, group 0"],
    );
}

#[test]
fn fp8_with_a_scale_for_a_tensor_a_row_or_a_block() {
    use nq_formats::import::fp8::e4m3;
    let like = |_: &str| Like {
        bits: 8,
        group: 0,
        ..LIKE
    };
    let byte = |n: &Numbers, at: usize| match n.codes[at] as u8 {
        nan if nan & 0x7F == 0x7F => 0x38,
        b => b,
    };
    let scale = |row: usize| to_bf16(0.01 + row as f32 * 0.003);
    let weights = packed_settings(8, CHANNEL, true).replace("\"int\"", "\"float\"");
    let packed = config_groups("float-quantized", &[weights]);
    let auto =
        r#"{"quant_method":"fp8","activation_scheme":"static","ignored_layers":["lm_head"]}"#;
    for (settings, method) in [
        (&packed[..], "compressed-tensors"),
        (MODELOPT, "modelopt"),
        (auto, "fp8"),
    ] {
        for shape in [&[][..], &[1], &[0], &[0, 1], &[1, 1, 1, 1]] {
            // A 0 stands for the number of rows; four dimensions are those of ModelOpt's blocks.
            let by_row = shape.contains(&0);
            let encode = |n: &Numbers| {
                let codes = (0..n.codes.len()).map(|i| byte(n, i)).collect();
                let scales = if by_row { n.rows } else { 1 };
                let shape: Vec<usize> = shape
                    .iter()
                    .map(|&d| if d == 0 { n.rows } else { d })
                    .collect();
                vec![
                    (".weight", bytes(DType::F8E4M3, &[n.rows, n.cols], codes)),
                    (
                        ".weight_scale",
                        float_tensor(DType::F32, &shape, (0..scales).map(scale)),
                    ),
                ]
            };
            let folder = Folder::new(settings, like, encode);
            let opened = folder.open();
            nq::verify(&opened).unwrap();
            assert_eq!(opened.store().format(), method);
            for (name, n) in &folder.expected {
                let dims = Dims::new(n.rows, n.cols);
                let weight = opened.store().matrix(name, dims).unwrap();
                assert!(matches!(&weight, Weight::Dense(t) if t.dtype() == DType::BF16));
                let stored = opened.store().stored(name, dims).unwrap();
                let mut row = vec![0.0; n.cols];
                for o in 0..n.rows {
                    stored.dequantize_row(o, &mut row).unwrap();
                    let of_row = if by_row { o } else { 0 };
                    let want = (0..n.cols).map(|i| e4m3(byte(n, o * n.cols + i)) * scale(of_row));
                    assert_eq!(row, want.collect::<Vec<f32>>(), "{name}, row {o}");
                }
            }
            let short = float_tensor(DType::F32, &[3], [1.0; 3].into_iter());
            let name = "model.layers.0.mlp.up_proj.weight_scale";
            folder.refuses(name, Some(short), &[name, "[64, 1]", "[3]"]);
        }
    }
}
