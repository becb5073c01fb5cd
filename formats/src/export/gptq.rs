//! GPTQ version 1, which every loader of the format reads.

use super::packing::{Description, Linear, PackedTensor, Packing};
use super::packing::{codes, even_codes, transposed_scales, uniform, word, zero_points};
use crate::exactness::Exactness;
use crate::scheme::{AffineScheme, Zeros};
use crate::weight::AffineWeight;
use nq_model::{DType, Dims};
use serde_json::{Map, Value, json};

pub(super) const PACKING: Packing = Packing {
    format: "GPTQ",
    uniform: true,
    holds,
    check,
    parts,
    pack,
    describe,
};

fn holds(scheme: AffineScheme, Dims { rows, cols }: Dims, _order: bool) -> Result<(), String> {
    even_codes(scheme)?;
    let per_word = 32 / scheme.bits.width();
    if scheme.zeros == Zeros::Offset {
        return Err("zero-points are integers there, not offsets".into());
    }
    if !cols.is_multiple_of(scheme.group.size(cols)) || !cols.is_multiple_of(per_word) {
        return Err(format!(
            "{cols} inputs are not a whole number of groups and of {per_word}"
        ));
    }
    if !rows.is_multiple_of(per_word) {
        return Err(format!("{rows} outputs are not a multiple of {per_word}"));
    }
    Ok(())
}

fn check(a: &AffineWeight, _dense: DType) -> Result<Exactness, String> {
    // The file stores zero-point - 1; for a zero-point of 0 that would wrap around.
    if zero_points(a).contains(&0) {
        return Err("version 1 stores zero-points less 1 and this one has a 0".into());
    }
    Ok(Exactness::Exact)
}

fn parts(a: &AffineWeight, _dense: DType) -> Vec<PackedTensor> {
    let (rows, cols, groups) = (a.out_features(), a.in_features(), a.groups());
    let per_word = 32 / a.scheme().bits.width();
    vec![
        PackedTensor::new("qweight", DType::I32, vec![cols / per_word, rows]),
        PackedTensor::new("qzeros", DType::I32, vec![groups, rows / per_word]),
        PackedTensor::new("scales", DType::F16, vec![groups, rows]),
        PackedTensor::new("g_idx", DType::I32, vec![cols]),
    ]
}

fn pack(a: &AffineWeight, part: &PackedTensor) -> Vec<u8> {
    let (cols, groups) = (a.in_features(), a.groups());
    let bits = a.scheme().bits;
    let per_word = 32 / bits.width();
    let words = || (0..part.shape[0]).flat_map(|i| (0..part.shape[1]).map(move |j| (i, j)));
    match part.suffix {
        "qweight" => {
            let codes = codes(a);
            let at = |i: usize, o: usize| u32::from(codes[o * cols + i]);
            words()
                .flat_map(|(w, o)| word(bits, |j| at(w * per_word + j, o)).to_le_bytes())
                .collect()
        }
        "qzeros" => {
            let zeros = zero_points(a);
            let at = |g: usize, o: usize| u32::from(zeros[o * groups + g]) - 1; // not 0: checked
            words()
                .flat_map(|(g, w)| word(bits, |j| at(g, w * per_word + j)).to_le_bytes())
                .collect()
        }
        "scales" => transposed_scales(a),
        _ => {
            let groups = (0..cols).map(|i| a.group_of(i) as i32);
            groups.flat_map(i32::to_le_bytes).collect() // g_idx
        }
    }
}

fn describe(linears: &[Linear]) -> Result<Description, String> {
    let scheme = uniform(linears)?;
    let dense = linears.iter().filter(|l| l.scheme.is_none());
    let dynamic: Map<String, Value> = dense
        .map(|l| (format!("-:^{}$", l.name.replace('.', "\\.")), json!({})))
        .collect();
    let mut config = json!({
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group.map_or(-1, |g| g as i64),
        "desc_act": scheme.activation_order,
        "sym": scheme.symmetric,
        "lm_head": false,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": { "quantizer": [concat!("nq:", env!("CARGO_PKG_VERSION"))] },
    });
    if !dynamic.is_empty() {
        config["dynamic"] = dynamic.into();
    }
    Ok((config.clone(), vec![("quantize_config.json", config)]))
}
