//! nq's own quantized folder, as FORMAT.md specifies it: a Hugging Face folder that
//! stores quantized weights as separate, inspectable parts.

pub(crate) mod record;
mod staging;
mod writer;

pub use record::{
    CODES, CalibrationRecord, METHOD, QuantizationRecord, SourceRecord, TensorScheme, VERSION,
    called, called_in,
};
pub use staging::{at_work, staging};
pub use writer::{Opened, Param, Staged, Writer, WriterOptions, Written, copy_files};

use crate::checkpoint::{Checkpoint, Source};
use crate::dense::DenseStore;
use crate::error::{Error, Result};
use crate::exl3::Exl3Scheme;
use crate::scheme::{Levels, Scales, Scheme, Zeros};
use crate::shards::Shards;
use crate::store::{Overlay, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::trellis::{self, TrellisWeight};
use crate::weight::{AffineWeight, GroupValues, Parts, QuantizedWeight, Weight};
use bytes::Bytes;
use half::f16;
use nq_model::{DType, Dims, ModelConfig, tensor_name};
use rayon::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The tensors that store a quantized weight `X`, as suffixes of its name.
pub(crate) mod part {
    pub(crate) const CODES: &str = ".codes";
    pub(crate) const SCALES: &str = ".scales";
    pub(crate) const SPAN_SCALES: &str = ".span_scales";
    pub(crate) const ZEROS: &str = ".zeros";
    pub(crate) const OFFSETS: &str = ".offsets";
    pub(crate) const SPAN_OFFSETS: &str = ".span_offsets";
    pub(crate) const LEVELS: &str = ".levels";
    pub(crate) const GROUP_INDEX: &str = ".g_idx";
    pub(crate) const INPUT_SCALES: &str = ".input_scales";
    pub(crate) const ALL: [&str; 9] = [
        CODES,
        SCALES,
        SPAN_SCALES,
        ZEROS,
        OFFSETS,
        SPAN_OFFSETS,
        LEVELS,
        GROUP_INDEX,
        INPUT_SCALES,
    ];
}

/// Opens a folder whose config.json has `"quant_method": "nq"`.
///
/// # Errors
/// [`Error::Malformed`] for an invalid record, [`Error::Unsupported`] for another version,
/// [`Error::Tensor`] if record and tensors disagree; otherwise errors of [`Shards::open`].
pub fn open(source: Source) -> Result<Checkpoint> {
    let path = source.files().path(crate::files::CONFIG);
    let value = source.quantization().cloned().unwrap_or_default();
    let record = QuantizationRecord::parse(&path, &value)?;
    let store = NqStore::new(source.shards()?, record, value)?;
    source.into_checkpoint(Box::new(store))
}

/// The quantization record of an opened checkpoint; `None` for other formats.
pub fn record(checkpoint: &Checkpoint) -> Result<Option<QuantizationRecord>> {
    let path = checkpoint.files().path(crate::files::CONFIG);
    match checkpoint.store().quantization() {
        Some(value) if checkpoint.store().format() == METHOD => {
            QuantizationRecord::parse(&path, value).map(Some)
        }
        _ => Ok(None),
    }
}

/// Parameters stored in nq's format, with the record that describes them.
pub(crate) struct NqStore {
    dense: DenseStore,
    record: QuantizationRecord,
    value: Value,
}

impl NqStore {
    /// `value` is `record` as the file has it.
    pub(crate) fn new(shards: Shards, record: QuantizationRecord, value: Value) -> Result<Self> {
        for name in record.overrides.keys() {
            if !shards.contains(&format!("{name}{}", part::CODES))
                && !shards.contains(&tensor_name(name))
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
            dense: DenseStore { shards },
            record,
            value,
        })
    }
}

impl Overlay for NqStore {
    fn inner(&self) -> &dyn WeightStore {
        &self.dense
    }

    fn format(&self) -> &'static str {
        METHOD
    }

    fn contains(&self, name: &str) -> bool {
        let codes = format!("{name}{}", part::CODES);
        self.dense.contains(name) || self.dense.shards.contains(&codes)
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        match self.record.scheme(name) {
            Some(scheme) => read_quantized(&self.dense.shards, name, scheme, dims),
            None => self.dense.matrix(name, dims),
        }
    }

    fn rows(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        Overlay::matrix(self, name, dims).map(StoredWeight::Canonical)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        if self.record.scheme(name).is_none() {
            return vec![tensor_name(name)];
        }
        // Those that the weight's scheme rules out are refused when it is read.
        let parts = part::ALL.map(|suffix| format!("{name}{suffix}"));
        parts.into_iter().chain([tensor_name(name)]).collect()
    }

    fn scheme(&self, name: &str) -> Option<Scheme> {
        self.record.scheme(name).map(|s| s.scheme)
    }

    fn is_float(&self, name: &str) -> bool {
        self.record.scheme(name).is_none() && self.dense.is_float(name)
    }

    fn quantization(&self) -> Option<&Value> {
        Some(&self.value)
    }
}

/// All parts that a weight of a scheme may have: suffix, element type, shape. Other parts are
/// refused.
fn layout(
    stored: TensorScheme,
    Dims { rows, cols }: Dims,
) -> Vec<(&'static str, DType, Vec<usize>)> {
    let scheme = match stored.scheme {
        Scheme::Affine(scheme) => scheme,
        Scheme::Trellis(scheme) => {
            let strips = rows.div_ceil(trellis::STRIP);
            let codes = vec![strips, scheme.strip_bytes(cols)];
            return vec![
                (part::CODES, DType::U8, codes),
                (part::SCALES, DType::F16, vec![rows]),
                (part::INPUT_SCALES, DType::F16, vec![cols]),
            ];
        }
        Scheme::Exl3(_) => unreachable!("neither read nor written"),
    };
    let groups = scheme.group.count(cols);
    let mut layout = vec![(part::CODES, DType::U8, vec![rows, scheme.bits.bytes(cols)])];
    let mut of_groups = |values, of_spans| match scheme.scales {
        Scales::Half => layout.push((values, DType::F16, vec![rows, groups])),
        Scales::TwoLevel(two) => {
            layout.push((values, DType::U8, vec![rows, two.bits.bytes(groups)]));
            layout.push((of_spans, DType::F16, vec![rows, two.span.count(cols)]));
        }
    };
    of_groups(part::SCALES, part::SPAN_SCALES);
    if scheme.zeros == Zeros::Offset {
        of_groups(part::OFFSETS, part::SPAN_OFFSETS);
    }
    if scheme.zeros == Zeros::Integer {
        let width = scheme.value_bits().bytes(groups);
        layout.push((part::ZEROS, DType::U8, vec![rows, width]));
    }
    if scheme.levels == Levels::Table {
        let levels = 1 << scheme.bits.width();
        layout.push((part::LEVELS, DType::U8, vec![levels]));
    }
    if stored.g_idx {
        layout.push((part::GROUP_INDEX, DType::I32, vec![cols]));
    }
    layout
}

/// Assembles the weight `name` from its parts.
fn read_quantized(shards: &Shards, name: &str, stored: TensorScheme, dims: Dims) -> Result<Weight> {
    // If groups or spans have no inputs, shapes would divide by zero.
    let valid = match stored.scheme {
        Scheme::Affine(scheme) => scheme.check(),
        Scheme::Trellis(scheme) => scheme.check(dims),
        Scheme::Exl3(scheme) => Err(not_stored(scheme)),
    };
    valid.map_err(|e| {
        let part = format!("{name}{}", part::CODES);
        shards.error(&part, "a valid scheme".into(), e.to_string())
    })?;
    let layout = layout(stored, dims);
    let full = |suffix: &str| format!("{name}{suffix}");
    let wanted = |suffix: &str| layout.iter().any(|part| part.0 == suffix);
    let known = part::ALL.into_iter().filter(|suffix| !wanted(suffix));
    for suffix in known.chain([".weight"]) {
        if shards.contains(&full(suffix)) {
            let expected = format!("no such tensor, as {name} is {stored}");
            return Err(shards.error(&full(suffix), expected, "one".into()));
        }
    }
    let read = |suffix: &str| -> Result<Option<Tensor>> {
        let Some((_, dtype, shape)) = layout.iter().find(|part| part.0 == suffix) else {
            return Ok(None);
        };
        shards.require(&full(suffix), &[*dtype], shape).map(Some)
    };
    let bytes = |suffix: &str| Ok(read(suffix)?.map(|t| t.data().clone()));
    let group_values = |suffix: &str, of_spans: &str| -> Result<Option<GroupValues>> {
        let Some(values) = read(suffix)? else {
            return Ok(None);
        };
        Ok(Some(match read(of_spans)? {
            None => GroupValues::Half(halves(&values)),
            Some(spans) => GroupValues::TwoLevel {
                small: values.data().clone(),
                of_spans: halves(&spans),
            },
        }))
    };
    let codes = bytes(part::CODES)?.unwrap_or_default();
    let scheme = match stored.scheme {
        Scheme::Affine(scheme) => scheme,
        Scheme::Exl3(scheme) => return Err(not_stored(scheme)),
        Scheme::Trellis(scheme) => {
            let values = |suffix| Ok(halves(&read(suffix)?.expect("part of the layout")));
            let (rows, inputs) = (values(part::SCALES)?, values(part::INPUT_SCALES)?);
            return TrellisWeight::new(scheme, dims, codes, rows, inputs)
                .map(|w| Weight::Quantized(QuantizedWeight::Trellis(w)))
                .map_err(|e| name_part(shards, name, e));
        }
    };
    let parts = Parts {
        codes,
        scales: group_values(part::SCALES, part::SPAN_SCALES)?.expect("every scheme has scales"),
        zeros: bytes(part::ZEROS)?,
        offsets: group_values(part::OFFSETS, part::SPAN_OFFSETS)?,
        levels: bytes(part::LEVELS)?.map(|b| b[..].into()),
        g_idx: if stored.g_idx {
            Some(read_group_index(
                shards,
                &full(part::GROUP_INDEX),
                dims.cols,
            )?)
        } else {
            None
        },
    };
    AffineWeight::assemble(scheme, dims, parts)
        .map(|w| Weight::Quantized(QuantizedWeight::Affine(w)))
        .map_err(|e| name_part(shards, name, e))
}

fn halves(tensor: &Tensor) -> Arc<[f16]> {
    let (chunks, _) = tensor.data().as_chunks::<2>();
    chunks.iter().map(|b| f16::from_le_bytes(*b)).collect()
}

/// A tensor `[cols]` of group numbers; negative ones become too large and are refused as such.
pub(crate) fn read_group_index(shards: &Shards, name: &str, cols: usize) -> Result<Arc<[u32]>> {
    let tensor = shards.require(name, &[DType::I32, DType::U32], &[cols])?;
    let (chunks, _) = tensor.data().as_chunks::<4>();
    Ok(chunks.iter().map(|b| u32::from_le_bytes(*b)).collect())
}

/// Converts an error about a part of the weight `name` to one about its tensor.
fn name_part(shards: &Shards, name: &str, error: Error) -> Error {
    let Error::Weight {
        what,
        expected,
        found,
    } = error
    else {
        return error;
    };
    let suffix = match what {
        "codes" => part::CODES,
        "scales" => part::SCALES,
        "g_idx" => part::GROUP_INDEX,
        "offsets" => part::OFFSETS,
        "levels" => part::LEVELS,
        "input scales" => part::INPUT_SCALES,
        _ => part::ZEROS,
    };
    shards.error(&format!("{name}{suffix}"), expected, found)
}

/// Files of nq have no EXL3: what is written of it are its values.
fn not_stored(scheme: Exl3Scheme) -> Error {
    Error::Weight {
        what: "codes",
        expected: "a scheme of nq's own files".into(),
        found: scheme.to_string(),
    }
}

/// The tensors that store `weight`, by name.
fn parts(name: &str, weight: &Weight) -> Result<Vec<(String, Tensor)>> {
    let quantized = match weight {
        Weight::Dense(tensor) => return Ok(vec![(tensor_name(name), tensor.clone())]),
        Weight::Quantized(quantized) => quantized,
    };
    let mut data = match quantized {
        QuantizedWeight::Affine(a) => affine_parts(a.parts()),
        QuantizedWeight::Exl3(w) => return Err(not_stored(w.scheme())),
        QuantizedWeight::Trellis(t) => BTreeMap::from([
            (part::CODES, t.words().clone()),
            (part::SCALES, little(t.row_scales())),
            (part::INPUT_SCALES, little(t.input_scales())),
        ]),
    };
    let parts = layout(TensorScheme::of(quantized), weight.dims()).into_iter();
    let tensor = |(suffix, dtype, shape): (&str, DType, Vec<usize>)| {
        let data = data.remove(suffix).unwrap_or_default();
        Ok((format!("{name}{suffix}"), Tensor::new(dtype, shape, data)?))
    };
    parts.map(tensor).collect()
}

fn little(values: &[f16]) -> Bytes {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The contents of an affine weight's tensors, by suffix.
fn affine_parts(kept: Parts) -> BTreeMap<&'static str, Bytes> {
    let mut data = BTreeMap::from([(part::CODES, kept.codes)]);
    let mut put = |suffix, of_spans, values: Option<GroupValues>| match values {
        None => {}
        Some(GroupValues::Half(values)) => {
            data.insert(suffix, little(&values));
        }
        Some(GroupValues::TwoLevel {
            small,
            of_spans: spans,
        }) => {
            data.insert(suffix, small);
            data.insert(of_spans, little(&spans));
        }
    };
    put(part::SCALES, part::SPAN_SCALES, Some(kept.scales));
    put(part::OFFSETS, part::SPAN_OFFSETS, kept.offsets);
    data.extend(kept.zeros.map(|z| (part::ZEROS, z)));
    data.extend(
        kept.levels
            .map(|l| (part::LEVELS, Bytes::copy_from_slice(&l))),
    );
    let index = |g: Arc<[u32]>| g.iter().flat_map(|g| g.to_le_bytes()).collect();
    data.extend(kept.g_idx.map(|g| (part::GROUP_INDEX, index(g))));
    data
}

/// Reads every parameter of `checkpoint` once, which checks all shapes, types and scales.
///
/// # Errors
/// The first parameter that is absent or invalid.
pub fn verify(checkpoint: &Checkpoint) -> Result<()> {
    verify_store(checkpoint.store(), checkpoint.config())
}

/// Like [`verify`], and checks that every value of every parameter is finite.
///
/// # Errors
/// Errors of [`verify`]; [`Error::Tensor`], naming the parameter and the first value that is not.
pub fn verify_values(checkpoint: &Checkpoint) -> Result<()> {
    use nq_model::names::{Shape, parameters};
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
                let weight = store.matrix(&name, Dims::new(rows, cols))?;
                // The first bad row, independent of the number of threads.
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
    use nq_model::names::{Shape, parameters};
    for (name, shape) in parameters(config) {
        match shape {
            Shape::Vector(len) => store.vector(&name, len).map(drop)?,
            Shape::Matrix(rows, cols) => store.matrix(&name, Dims::new(rows, cols)).map(drop)?,
        }
    }
    Ok(())
}
