//! AWQ as in AutoAWQ's `gemm` version: 4 bits, a zero-point per group.

use super::packing::{Description, Linear, PackedTensor, Packing};
use super::packing::{codes, even_codes, transposed_scales, uniform, word, zero_points};
use crate::exactness::Exactness;
use crate::scheme::{AffineScheme, Bits, Zeros};
use crate::weight::AffineWeight;
use nq_model::{DType, Dims};
use serde_json::json;

pub(super) const PACKING: Packing = Packing {
    format: "AWQ",
    uniform: true,
    holds,
    check,
    parts,
    pack,
    describe,
};

/// For each nibble of a word, the column of eight that it holds.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn holds(scheme: AffineScheme, Dims { rows, cols }: Dims, order: bool) -> Result<(), String> {
    even_codes(scheme)?;
    if scheme.bits != Bits::B4 {
        return Err("it has 4 bits only".into());
    }
    if scheme.zeros == Zeros::Offset {
        return Err("zero-points are integers there, not offsets".into());
    }
    if order {
        return Err("it has no activation order".into());
    }
    if !cols.is_multiple_of(scheme.group.size(cols)) || !rows.is_multiple_of(ORDER.len()) {
        return Err(format!(
            "[{rows}, {cols}] is not a whole number of groups by eight outputs"
        ));
    }
    Ok(())
}

fn check(_: &AffineWeight, _dense: DType) -> Result<Exactness, String> {
    Ok(Exactness::Exact)
}

fn parts(a: &AffineWeight, _dense: DType) -> Vec<PackedTensor> {
    let (rows, cols, groups) = (a.out_features(), a.in_features(), a.groups());
    vec![
        PackedTensor::new("qweight", DType::I32, vec![cols, rows / ORDER.len()]),
        PackedTensor::new("qzeros", DType::I32, vec![groups, rows / ORDER.len()]),
        PackedTensor::new("scales", DType::F16, vec![groups, rows]),
    ]
}

fn pack(a: &AffineWeight, part: &PackedTensor) -> Vec<u8> {
    let (fields, stride) = match part.suffix {
        "qweight" => (codes(a), a.in_features()),
        "qzeros" => (zero_points(a), a.groups()),
        _ => return transposed_scales(a),
    };
    let at = |i: usize, o: usize| u32::from(fields[o * stride + i]);
    let words = (0..part.shape[0]).flat_map(|i| (0..part.shape[1]).map(move |w| (i, w)));
    words
        .flat_map(|(i, w)| word(Bits::B4, |k| at(i, ORDER.len() * w + ORDER[k])).to_le_bytes())
        .collect()
}

fn describe(linears: &[Linear]) -> Result<Description, String> {
    let scheme = uniform(linears)?;
    let dense: Vec<&str> = linears
        .iter()
        .filter(|l| l.scheme.is_none())
        .map(|l| l.name.as_str())
        .collect();
    let skipped = if dense.is_empty() {
        json!(null)
    } else {
        json!(dense)
    };
    let config = json!({
        "quant_method": "awq",
        "bits": 4,
        "group_size": scheme.group.map_or(-1, |g| g as i64),
        "zero_point": true,
        "version": "gemm",
        "modules_to_not_convert": skipped,
    });
    Ok((config, Vec::new()))
}
