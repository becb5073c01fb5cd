//! The experts of a layer in one tensor, in small floats.

use crate::experts::{error, rewritten, small};
use nq_formats::{Checkpoint, Tensor, nq, synth};
use nq_model::names::{Shape, parameters, stack};
use nq_model::{DType, Dims};
use serde_json::{Value, json};
use std::path::Path;

/// The code and the value of a number of FP4 (E2M1), by its place.
fn fp4(at: usize) -> (u8, f32) {
    let code = at * 7 % 16;
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7];
    (code as u8, if code < 8 { magnitude } else { -magnitude })
}

/// The same for FP8 (E4M3): 1 + m / 8 times a power of two, without subnormals and zeros.
fn fp8(at: usize) -> (u8, f32) {
    let (exponent, mantissa) = (4 + at % 7, at * 5 % 8);
    let power = f32::powi(2.0, exponent as i32 - 7);
    (
        (exponent << 3 | mantissa) as u8,
        (1.0 + mantissa as f32 / 8.0) * power,
    )
}

/// How a test keeps the experts of a layer in one tensor, with scales beside it.
struct FusedFloats<'a> {
    settings: &'a Value,
    /// What the names of codes, scales and scales of the whole end in; FP8 has two of them.
    names: &'a [&'a str],
    /// Shape of the last of these; a second 2 of it is for gate and up.
    shape: &'a [usize],
}

impl FusedFloats<'_> {
    fn shape_of(&self, part: &str) -> Vec<usize> {
        let kept = if part == "gate_up_proj" { 3 } else { 1 };
        self.shape.iter().copied().take(kept).collect()
    }

    /// The scale of the whole, or of FP8, that stands at a place.
    fn whole(at: usize) -> f32 {
        0.003 * (at + 1) as f32
    }

    fn write(&self, from: &Path, to: &Path) {
        let floats = |shape: Vec<usize>| {
            let values = (0..shape.iter().product()).map(Self::whole);
            Tensor::from_f32(shape, values.collect()).unwrap()
        };
        rewritten(from, to, |tensors, config| {
            tensors.retain(|name, _| !name.contains(".mlp.experts."));
            config.insert("quantization_config".into(), self.settings.clone());
            for layer in 0..2 {
                for (part, rows, cols) in [("gate_up_proj", 128, 128), ("down_proj", 128, 64)] {
                    let name = format!("model.layers.{layer}.mlp.experts.{part}");
                    let mut put = |suffix: &str, dtype, shape: [usize; 3], bytes: Vec<u8>| {
                        let tensor = Tensor::new(dtype, shape.to_vec(), bytes.into());
                        tensors.insert(format!("{name}{suffix}"), tensor.unwrap());
                    };
                    let values = 5 * rows * cols;
                    if let [codes, scales, _] = self.names {
                        let pair = |i: usize| fp4(2 * i).0 | fp4(2 * i + 1).0 << 4;
                        let bytes = (0..values / 2).map(pair).collect();
                        put(codes, DType::U8, [5, rows, cols / 2], bytes);
                        let bytes = (0..values / 16).map(|i| fp8(i).0).collect();
                        put(scales, DType::F8E4M3, [5, rows, cols / 16], bytes);
                    } else {
                        let bytes = (0..values).map(|i| fp8(i).0).collect();
                        put(self.names[0], DType::F8E4M3, [5, rows, cols], bytes);
                    }
                    let last = self.names[self.names.len() - 1];
                    tensors.insert(format!("{name}{last}"), floats(self.shape_of(part)));
                    // What activations are rounded by is not used.
                    tensors.insert(format!("{name}_input_scale"), floats(vec![]));
                }
            }
        });
    }

    /// The value at a place of an expert's tensor.
    fn value(&self, part: &str, at: [usize; 3], cols: usize) -> f32 {
        let [expert, row, col] = at;
        let place = (expert * 128 + row) * cols + col;
        let whole = match self.shape_of(part)[..] {
            [] => 0,
            [_] | [_, 1] => expert,
            [_, 2] => 2 * expert + row / 64,
            _ => expert * 128 + row,
        };
        let whole = Self::whole(whole);
        match self.names {
            [_, _] => fp8(place).1 * whole,
            [_, _, last] if *last == "_global_scale" => fp4(place).1 * fp8(place / 16).1 / whole,
            _ => fp4(place).1 * fp8(place / 16).1 * whole,
        }
    }
}

/// ModelOpt, compressed-tensors and others keep the experts of a layer in one tensor, under names and with scales of
/// their own.
#[test]
fn fused_experts_in_small_floats_have_the_names_of_three_tools() {
    let dir = tempfile::tempdir().unwrap();
    let apart = dir.path().join("apart");
    synth::write(&apart, &small(), 7, &()).unwrap();
    let modelopt = &json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    let packed = &json!({
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": true}}},
    });
    let nvfp4 = &["", "_weight_scale", "_weight_scale_2"][..];
    for (i, (settings, names, shape)) in (0..).zip([
        (modelopt, nvfp4, &[][..]),
        (modelopt, nvfp4, &[5]),
        (modelopt, &["", "_scale", "_scale_2"], &[5, 2]),
        (packed, &["_packed", "_scale", "_global_scale"], &[5, 1]),
        (modelopt, &["", "_weight_scale"], &[]),
        (modelopt, &["", "_weight_scale"], &[5, 2]),
        (packed, &["", "_scale"], &[5, 128, 1]),
    ]) {
        let fused = dir.path().join(format!("fused {i}"));
        let written = FusedFloats {
            settings,
            names,
            shape,
        };
        written.write(&apart, &fused);
        let opened = Checkpoint::open(&fused).unwrap();
        nq::verify(&opened).unwrap();
        let mut checked = 0;
        for (name, shape) in parameters(&small()) {
            let (Shape::Matrix(rows, cols), Some(_)) = (shape, stack(&name)) else {
                continue;
            };
            let dims = Dims::new(rows, cols);
            let near = opened.store().matrix(&name, dims).unwrap();
            let exact = opened.store().stored(&name, dims).unwrap();
            let (part, first) = match name.rsplit_once('.').unwrap().1 {
                "down_proj" => ("down_proj", 0),
                "up_proj" => ("gate_up_proj", 64),
                _ => ("gate_up_proj", 0),
            };
            let (mut rounded, mut values) = (vec![0.0; cols], vec![0.0; cols]);
            for row in 0..rows {
                near.dequantize_row(row, &mut rounded).unwrap();
                exact.dequantize_row(row, &mut values).unwrap();
                for col in 0..cols {
                    let (expert, row) = (row / (rows / 5), row % (rows / 5) + first);
                    let want = written.value(part, [expert, row, col], cols);
                    let off = |value: f32| (value - want).abs() / want.abs().max(1e-20);
                    assert!(
                        off(values[col]) < 3e-7,
                        "{name} {row} {col}: {}",
                        values[col]
                    );
                    // FP8 is read as BF16, and NVFP4 with scales in F16.
                    assert!(off(rounded[col]) < 0.004, "{name} {row} {col}");
                    checked += 1;
                }
            }
        }
        assert_eq!(checked, 2 * 5 * 3 * 64 * 128);
    }
    let written = FusedFloats {
        settings: modelopt,
        names: nvfp4,
        shape: &[5],
    };
    let fused = dir.path().join("whole");
    written.write(&apart, &fused);
    let name = "model.layers.1.mlp.experts.down_proj";
    let f32s = |shape: &[usize], value| {
        let values = vec![value; shape.iter().product()];
        Tensor::from_f32(shape.to_vec(), values).unwrap()
    };
    let bytes = |dtype, shape: [usize; 3]| {
        let zeros = vec![0; shape.iter().product()];
        Tensor::new(dtype, shape.to_vec(), zeros.into()).unwrap()
    };
    for (i, (suffix, tensor, says)) in (0..).zip([
        // Transposed, as Llama 4's are; scales for gate and up where there is one projection; of another number of experts.
        ("", Some(bytes(DType::U8, [5, 32, 128])), "[5, 128, 32]"),
        (
            "_weight_scale",
            Some(bytes(DType::F8E4M3, [5, 8, 128])),
            "[5, 128, 4]",
        ),
        ("_weight_scale", None, "no such tensor"),
        ("_weight_scale_2", Some(f32s(&[5, 2], 1.0)), "F32 [5]"),
        ("_weight_scale_2", Some(f32s(&[4], 1.0)), "F32 [5]"),
        ("_weight_scale_2", Some(f32s(&[5], -1.0)), "above 0"),
        ("_weight_scale_2", None, "no such tensor"),
        // A scale that belongs to no form.
        ("_scale_inv", Some(f32s(&[5], 1.0)), "down_proj_scale_inv"),
    ]) {
        let other = dir.path().join(format!("other {i}"));
        rewritten(&fused, &other, |tensors, _| {
            let name = format!("{name}{suffix}");
            match tensor {
                Some(tensor) => tensors.insert(name, tensor),
                None => tensors.remove(&name),
            };
        });
        let found = error(&other);
        assert!(
            found.contains(name) && found.contains(says),
            "{suffix}: {found}"
        );
    }
}
