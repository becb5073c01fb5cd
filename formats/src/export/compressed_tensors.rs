//! compressed-tensors `pack-quantized`: vLLM, SGLang and transformers.

use super::packing::{Description, Linear, LinearScheme, PackedTensor, Packing};
use super::packing::{codes, even_codes, float_bytes, word, zero_points};
use crate::exactness::Exactness;
use crate::scheme::{AffineScheme, Zeros};
use crate::weight::AffineWeight;
use nq_model::{DType, Dims};
use serde_json::{Map, Value, json};

pub(super) const PACKING: Packing = Packing {
    format: "compressed-tensors",
    uniform: false,
    holds,
    check,
    parts,
    pack,
    describe,
};

fn holds(scheme: AffineScheme, Dims { cols, .. }: Dims, _order: bool) -> Result<(), String> {
    even_codes(scheme)?;
    if scheme.zeros == Zeros::Offset {
        return Err("zero-points are integers there, not offsets".into());
    }
    if !cols.is_multiple_of(scheme.group.size(cols)) {
        return Err(format!("{cols} inputs are not a whole number of groups"));
    }
    Ok(())
}

fn check(_: &AffineWeight, dense: DType) -> Result<Exactness, String> {
    Ok(match dense {
        DType::BF16 => Exactness::ScalesRounded(DType::BF16),
        _ => Exactness::Exact,
    })
}

fn parts(a: &AffineWeight, dense: DType) -> Vec<PackedTensor> {
    let (rows, cols, groups) = (a.out_features(), a.in_features(), a.groups());
    let per_word = 32 / a.scheme().bits.width();
    let mut parts = vec![
        PackedTensor::new(
            "weight_packed",
            DType::I32,
            vec![rows, cols.div_ceil(per_word)],
        ),
        PackedTensor::new("weight_scale", dense, vec![rows, groups]),
        PackedTensor::new("weight_shape", DType::I64, vec![2]),
    ];
    if a.scheme().zeros == Zeros::Integer {
        let shape = vec![rows.div_ceil(per_word), groups];
        parts.push(PackedTensor::new("weight_zero_point", DType::I32, shape));
    }
    if a.g_idx().is_some() {
        parts.push(PackedTensor::new("weight_g_idx", DType::I32, vec![cols]));
    }
    parts
}

fn pack(a: &AffineWeight, part: &PackedTensor) -> Vec<u8> {
    let (rows, cols, groups) = (a.out_features(), a.in_features(), a.groups());
    let bits = a.scheme().bits;
    let per_word = 32 / bits.width();
    match part.suffix {
        "weight_packed" => {
            let codes = codes(a);
            let at = |row: usize, col: usize| {
                if col < cols {
                    codes[row * cols + col].into()
                } else {
                    0
                }
            };
            let words = part.shape[1];
            let words = (0..rows).flat_map(|r| (0..words).map(move |w| (r, w)));
            words
                .flat_map(|(r, w)| word(bits, |i| at(r, w * per_word + i)).to_le_bytes())
                .collect()
        }
        "weight_scale" => {
            let scales: Vec<f32> = a.scales().iter().map(|s| s.to_f32()).collect();
            let mut out = Vec::new();
            float_bytes(&scales, part.dtype, &mut out);
            out
        }
        "weight_shape" => [rows, cols]
            .iter()
            .flat_map(|&d| (d as i64).to_le_bytes())
            .collect(),
        "weight_zero_point" => {
            let zeros = zero_points(a);
            let at = |row: usize, g: usize| {
                if row < rows {
                    zeros[row * groups + g].into()
                } else {
                    0
                }
            };
            let words = (0..part.shape[0]).flat_map(|w| (0..groups).map(move |g| (w, g)));
            words
                .flat_map(|(w, g)| word(bits, |i| at(w * per_word + i, g)).to_le_bytes())
                .collect()
        }
        _ => {
            let groups = (0..cols).map(|i| a.group_of(i) as i32);
            groups.flat_map(i32::to_le_bytes).collect() // weight_g_idx
        }
    }
}

fn describe(linears: &[Linear]) -> Result<Description, String> {
    // One config group per scheme: the most common one targets all Linears, others list names.
    let mut schemes: Vec<(LinearScheme, Vec<&str>)> = Vec::new();
    let mut ignore = vec!["lm_head"];
    for linear in linears {
        match linear.scheme {
            None => ignore.push(&linear.name),
            Some(scheme) => match schemes.iter_mut().find(|(s, _)| *s == scheme) {
                Some((_, names)) => names.push(&linear.name),
                None => schemes.push((scheme, vec![&linear.name])),
            },
        }
    }
    let alone = schemes.len() == 1;
    let groups: Map<String, Value> = schemes
        .iter()
        .enumerate()
        .map(|(i, (scheme, names))| {
            let targets = if alone {
                json!(["Linear"])
            } else {
                json!(names)
            };
            let strategy = if scheme.group.is_some() {
                "group"
            } else {
                "channel"
            };
            let group = json!({
                "targets": targets,
                "weights": {
                    "num_bits": scheme.bits,
                    "type": "int",
                    "symmetric": scheme.symmetric,
                    "strategy": strategy,
                    "group_size": scheme.group,
                    "actorder": scheme.activation_order.then_some("group"),
                    "dynamic": false,
                },
                "input_activations": null,
                "output_activations": null,
            });
            (format!("group_{i}"), group)
        })
        .collect();
    let config = json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    });
    Ok((config, Vec::new()))
}
