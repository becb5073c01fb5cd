//! A hybrid with the layer that predicts the token after the next, in other tools' formats: they quantize the layer, or
//! leave it as it was.

use super::encode::*;
use super::{CHANNEL, config_groups, gptq_settings, packed_settings};
use nq_formats::Tensor;
use nq_formats::left_over::LeftOver;
use nq_model::names::is_layer_linear;
use nq_model::{DType, Dims, mtp};

const HYBRID: &str = r#""architectures":["Qwen3_5ForCausalLM"],"model_type":"qwen3_5_text","hidden_size":32,
"intermediate_size":64,"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,
"head_dim":16,"vocab_size":40,"max_position_embeddings":32,"rms_norm_eps":1e-6,
"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":3,"full_attention_interval":2,
"linear_conv_kernel_dim":4,"linear_key_head_dim":8,"linear_value_head_dim":8,"linear_num_key_heads":2,
"linear_num_value_heads":4,"mtp_num_hidden_layers":1"#;

/// Folders in a format, with the layer quantized and not.
fn folders(
    settings: &str,
    like: impl Fn(&str) -> Like + Copy,
    encode: impl Fn(&Numbers) -> Encoded + Copy,
) -> [Folder; 2] {
    [true, false].map(|whole| {
        let quantized = |name: &str| is_layer_linear(name) && (whole || !name.starts_with("mtp."));
        Folder::of(HYBRID, settings, quantized, like, encode)
    })
}

#[track_caller]
fn has_the_layer(folder: &Folder) {
    let opened = folder.open();
    assert_eq!(opened.config().mtp_layers, 1);
    let of_mtp = |l: &&LeftOver| l.name.contains("mtp");
    assert_eq!(opened.left_over().iter().find(of_mtp), None);
    assert!(opened.store().contains(mtp::FC));
}

#[test]
fn codes_are_read_and_floats_beside_them() {
    let symmetric = |_: &str| Like {
        symmetric: true,
        group: 0,
        ..LIKE
    };
    for folder in folders(&gptq_settings("", 4, 16), |_| LIKE, |n| gptq(n, true)) {
        folder.check("gptq", "int4 g16 asymmetric");
        has_the_layer(&folder);
    }
    let settings =
        r#"{"quant_method":"awq","bits":4,"group_size":16,"zero_point":true,"version":"gemm"}"#;
    for folder in folders(settings, |_| LIKE, awq) {
        folder.check("awq", "int4 g16 asymmetric");
        has_the_layer(&folder);
    }
    let settings = config_groups("pack-quantized", &[packed_settings(4, CHANNEL, true)]);
    for folder in folders(&settings, symmetric, |n| packed(n, true, DType::F16)) {
        folder.check("compressed-tensors", "int4 channel symmetric");
        has_the_layer(&folder);
    }
}

/// FP8 in blocks, and of ModelOpt. The codes are the bytes.
#[test]
fn small_floats_are_read() {
    let blocks = r#"{"quant_method":"fp8","fmt":"e4m3","weight_block_size":[32,32]}"#;
    let model_opt = r#"{"quant_method":"modelopt","quant_algo":"FP8"}"#;
    for (settings, scale, block) in [
        (blocks, ".weight_scale_inv", 32),
        (model_opt, ".weight_scale", 0),
    ] {
        let like = |_: &str| Like {
            bits: 6,
            group: 0,
            ..LIKE
        };
        let encode = |n: &Numbers| {
            let bytes: Vec<u8> = n.codes.iter().map(|&c| c as u8).collect();
            let shape = match block {
                0 => vec![1],
                _ => vec![n.rows.div_ceil(block), n.cols.div_ceil(block)],
            };
            let scales = std::iter::repeat_n(0.5, shape.iter().product());
            vec![
                (
                    ".weight",
                    Tensor::new(DType::F8E4M3, vec![n.rows, n.cols], bytes.into()).unwrap(),
                ),
                (scale, float_tensor(DType::F32, &shape, scales)),
            ]
        };
        for folder in folders(settings, like, encode) {
            has_the_layer(&folder);
            for (name, n) in &folder.expected {
                let weight = folder
                    .open()
                    .store()
                    .matrix(name, Dims::new(n.rows, n.cols))
                    .unwrap();
                let mut row = vec![0.0; n.cols];
                for o in 0..n.rows {
                    weight.dequantize_row(o, &mut row).unwrap();
                    let codes = &n.codes[o * n.cols..][..n.cols];
                    let value = |&c: &u32| 0.5 * nq_formats::import::fp8::e4m3(c as u8);
                    let want: Vec<f32> = codes.iter().map(value).collect();
                    assert_eq!(row, want, "{name}, row {o}");
                }
            }
        }
    }
}
