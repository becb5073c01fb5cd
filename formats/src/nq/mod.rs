//! nq's own quantized folder, as FORMAT.md specifies it: a Hugging Face folder whose
//! quantized weights are kept as inspectable parts.

mod record;
mod staging;
mod writer;

pub use record::{CalibrationRecord, QuantizationRecord, SourceRecord, TensorScheme};
pub use staging::{at_work, staging};
pub use writer::{Opened, Param, Staged, Writer, WriterOptions, Written, copied_files};

use crate::checkpoint::{Checkpoint, Source, TensorEntry, WeightStore};
use crate::config::ModelConfig;
use crate::dense::{FLOATS, weight_name};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scheme::{AffineScheme, Zeros};
use crate::shards::Shards;
use crate::tensor::Tensor;
use crate::weight::{AffineWeight, QuantizedWeight, Weight, ZeroPoints};
use bytes::Bytes;
use half::f16;
use rayon::prelude::*;
use serde_json::Value;
use std::sync::Arc;

/// The `quant_method` of the format.
pub const METHOD: &str = "nq";
/// The version that this crate reads and writes.
pub const VERSION: u32 = 1;

/// The tensors that a quantized weight `X` is kept in, as suffixes of its name.
pub(crate) mod part {
    pub(crate) const CODES: &str = ".codes";
    pub(crate) const SCALES: &str = ".scales";
    pub(crate) const ZEROS: &str = ".zeros";
    pub(crate) const OFFSETS: &str = ".offsets";
    pub(crate) const GROUP_INDEX: &str = ".g_idx";
}

/// Opens a folder whose config.json says `"quant_method": "nq"`.
///
/// # Errors
/// [`Error::Malformed`] for a record that is not one, [`Error::Unsupported`] for another version,
/// [`Error::Tensor`] where record and tensors disagree; else as [`Shards::open`].
pub fn open(source: Source) -> Result<Checkpoint> {
    let path = source.files().path(crate::checkpoint::CONFIG);
    let value = source.quantization().cloned().unwrap_or_default();
    let record = QuantizationRecord::parse(&path, &value)?;
    let store = NqStore::new(source.shards()?, record, value)?;
    source.into_checkpoint(Box::new(store))
}

/// The quantization record of an opened checkpoint; `None` for other formats.
///
/// # Errors
/// As [`QuantizationRecord::parse`].
pub fn record(checkpoint: &Checkpoint) -> Result<Option<QuantizationRecord>> {
    let path = checkpoint.files().path(crate::checkpoint::CONFIG);
    match checkpoint.store().quantization() {
        Some(value) if checkpoint.store().format() == METHOD => {
            QuantizationRecord::parse(&path, value).map(Some)
        }
        _ => Ok(None),
    }
}

/// Parameters kept as nq keeps them, with the record that says how to read them.
pub(crate) struct NqStore {
    shards: Shards,
    record: QuantizationRecord,
    value: Value,
}

impl NqStore {
    /// `value` is `record` as it stands in the file.
    pub(crate) fn new(shards: Shards, record: QuantizationRecord, value: Value) -> Result<Self> {
        for name in record.overrides.keys() {
            if !shards.contains(&format!("{name}{}", part::CODES))
                && !shards.contains(&weight_name(name))
            {
                let expected = "a tensor, as quantization_config.overrides names it".into();
                return Err(shards.error(name, expected, "no such tensor".into()));
            }
        }
        for tensor in shards.names() {
            let Some(name) = tensor.strip_suffix(part::CODES) else {
                continue;
            };
            if record.scheme(name).is_none() {
                let expected = format!("a scheme for {name} in quantization_config");
                return Err(shards.error(tensor, expected, "none".into()));
            }
        }
        Ok(NqStore {
            shards,
            record,
            value,
        })
    }
}

impl WeightStore for NqStore {
    fn format(&self) -> &'static str {
        METHOD
    }

    fn contains(&self, name: &str) -> bool {
        self.shards.contains(&weight_name(name))
            || self.shards.contains(&format!("{name}{}", part::CODES))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.shards.require(&weight_name(name), &FLOATS, &[len])
    }

    fn matrix(&self, name: &str, dims: (usize, usize)) -> Result<Weight> {
        match self.record.scheme(name) {
            Some(scheme) => read_affine(&self.shards, name, scheme, dims),
            None => {
                let name = weight_name(name);
                let tensor = self.shards.require(&name, &FLOATS, &[dims.0, dims.1])?;
                Ok(Weight::Dense(tensor))
            }
        }
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.shards.entries()
    }

    fn file_bytes(&self) -> u64 {
        self.shards.file_bytes()
    }

    fn quantization(&self) -> Option<&Value> {
        Some(&self.value)
    }
}

/// Assembles the weight `name` from its parts.
fn read_affine(
    shards: &Shards,
    name: &str,
    stored: TensorScheme,
    (rows, cols): (usize, usize),
) -> Result<Weight> {
    let scheme = stored.affine();
    let part = |suffix: &str| format!("{name}{suffix}");
    for suffix in [".weight", part::ZEROS, part::OFFSETS, part::GROUP_INDEX] {
        let wanted = match suffix {
            part::ZEROS => scheme.zeros == Zeros::Integer,
            part::OFFSETS => scheme.zeros == Zeros::Offset,
            part::GROUP_INDEX => stored.g_idx,
            _ => false,
        };
        if !wanted && shards.contains(&part(suffix)) {
            let expected = format!("no such tensor, as {name} is {stored}");
            return Err(shards.error(&part(suffix), expected, "one".into()));
        }
    }
    let [codes, groups, zeros] = widths(scheme, cols);
    let codes = shards.require(&part(part::CODES), &[DType::U8], &[rows, codes])?;
    let halves = |suffix: &str| -> Result<Arc<[f16]>> {
        let tensor = shards.require(&part(suffix), &[DType::F16], &[rows, groups])?;
        let (chunks, _) = tensor.data().as_chunks::<2>();
        Ok(chunks.iter().map(|b| f16::from_le_bytes(*b)).collect())
    };
    let zero_points = match scheme.zeros {
        Zeros::None => ZeroPoints::None,
        Zeros::Integer => {
            let packed = shards.require(&part(part::ZEROS), &[DType::U8], &[rows, zeros])?;
            ZeroPoints::Integer(packed.data().clone())
        }
        Zeros::Offset => ZeroPoints::Offset(halves(part::OFFSETS)?),
    };
    let g_idx = match stored.g_idx {
        true => Some(read_group_index(shards, &part(part::GROUP_INDEX), cols)?),
        false => None,
    };
    let scales = halves(part::SCALES)?;
    let dims = (rows, cols);
    let codes = codes.data().clone();
    AffineWeight::new(scheme, dims, codes, scales, zero_points, g_idx)
        .map(|w| Weight::Quantized(QuantizedWeight::Affine(w)))
        .map_err(|e| name_part(shards, name, scheme, e))
}

/// Bytes of codes, groups, and bytes of zero-points in a row of `cols` inputs.
pub(crate) fn widths(scheme: AffineScheme, cols: usize) -> [usize; 3] {
    let groups = scheme.group.count(cols);
    [scheme.bits.bytes(cols), groups, scheme.bits.bytes(groups)]
}

/// A tensor `[cols]` of group numbers; negative ones come out too large and are refused as such.
pub(crate) fn read_group_index(shards: &Shards, name: &str, cols: usize) -> Result<Arc<[u32]>> {
    let tensor = shards.require(name, &[DType::I32, DType::U32], &[cols])?;
    let (chunks, _) = tensor.data().as_chunks::<4>();
    Ok(chunks.iter().map(|b| u32::from_le_bytes(*b)).collect())
}

/// Turns an error about a part of the weight `name` into one about its tensor.
fn name_part(shards: &Shards, name: &str, scheme: AffineScheme, error: Error) -> Error {
    let Error::Weight {
        what,
        expected,
        found,
    } = error
    else {
        return error;
    };
    let suffix = match (what, scheme.zeros) {
        ("codes", _) => part::CODES,
        ("scales", _) => part::SCALES,
        ("g_idx", _) => part::GROUP_INDEX,
        (_, Zeros::Offset) => part::OFFSETS,
        _ => part::ZEROS,
    };
    shards.error(&format!("{name}{suffix}"), expected, found)
}

/// The tensors that `weight` is kept in, by name.
fn parts(name: &str, weight: &Weight) -> Result<Vec<(String, Tensor)>> {
    let affine = match weight {
        Weight::Dense(tensor) => return Ok(vec![(weight_name(name), tensor.clone())]),
        Weight::Quantized(QuantizedWeight::Affine(affine)) => affine,
    };
    let rows = affine.out_features();
    let [codes, groups, zeros] = widths(affine.scheme(), affine.in_features());
    let halves = |values: &[f16]| -> Result<Tensor> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor::new(DType::F16, vec![rows, groups], bytes.into())
    };
    let raw = |width, bytes: &Bytes| Tensor::new(DType::U8, vec![rows, width], bytes.clone());
    let mut parts = vec![
        (part::CODES, raw(codes, affine.codes())?),
        (part::SCALES, halves(affine.scales())?),
    ];
    match affine.zeros() {
        ZeroPoints::None => {}
        ZeroPoints::Integer(packed) => parts.push((part::ZEROS, raw(zeros, packed)?)),
        ZeroPoints::Offset(offsets) => parts.push((part::OFFSETS, halves(offsets)?)),
    }
    if let Some(g_idx) = affine.g_idx() {
        let bytes: Vec<u8> = g_idx.iter().flat_map(|g| g.to_le_bytes()).collect();
        let tensor = Tensor::new(DType::I32, vec![g_idx.len()], bytes.into())?;
        parts.push((part::GROUP_INDEX, tensor));
    }
    let full = |(suffix, tensor)| (format!("{name}{suffix}"), tensor);
    Ok(parts.into_iter().map(full).collect())
}

/// Reads every parameter of `checkpoint` once, so that all shapes, types and scales are checked.
///
/// # Errors
/// The first parameter that is absent or wrong.
pub fn verify(checkpoint: &Checkpoint) -> Result<()> {
    verify_store(checkpoint.store(), checkpoint.config())
}

/// As [`verify`], and that every value of every parameter is a finite number.
///
/// # Errors
/// As [`verify`]; [`Error::Tensor`] naming the parameter and the first value that is not.
pub fn verify_values(checkpoint: &Checkpoint) -> Result<()> {
    use crate::names::{Shape, parameters};
    let store = checkpoint.store();
    let check =
        |name: &str, row: usize, values: &[f32]| match values.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(i) => Err(Error::Tensor {
                path: checkpoint.files().root(),
                tensor: name.into(),
                expected: "finite values".into(),
                found: format!("{} at row {row}, column {i}", values[i]),
            }),
        };
    for (name, shape) in parameters(checkpoint.config()) {
        match shape {
            Shape::Vector(len) => check(&name, 0, &store.vector(&name, len)?.to_f32()?)?,
            Shape::Matrix(rows, cols) => {
                let weight = store.matrix(&name, (rows, cols))?;
                // The first bad row, whatever the threads.
                let bad = (0..rows).into_par_iter().map_init(
                    || vec![0.0; cols],
                    |values, row| {
                        weight.dequantize_row(row, values)?;
                        check(&name, row, values)
                    },
                );
                bad.find_first(Result::is_err).unwrap_or(Ok(()))?;
            }
        }
    }
    Ok(())
}

fn verify_store(store: &dyn WeightStore, config: &ModelConfig) -> Result<()> {
    use crate::names::{Shape, parameters};
    for (name, shape) in parameters(config) {
        match shape {
            Shape::Vector(len) => store.vector(&name, len).map(drop)?,
            Shape::Matrix(rows, cols) => store.matrix(&name, (rows, cols)).map(drop)?,
        }
    }
    Ok(())
}
