//! Safetensors checkpoints quantized by other tools, one source file per format. Codes are kept;
//! their layout becomes nq's canonical one.

pub(crate) mod awq;
pub(crate) mod compressed_tensors;
pub mod exl3;
mod expanded;
mod floats;
pub mod fp8;
pub(crate) mod gptq;
pub(crate) mod modelopt;
mod quantization;
mod rotation;
mod weight;

use weight::ImportedWeight;

use crate::checkpoint::{Checkpoint, Source};
use crate::dense::DenseStore;
use crate::error::Result;
use crate::exactness::Exactness;
use crate::scheme::{AffineScheme, Bits, Group, Scheme};
use crate::shards::Shards;
use crate::store::{Overlay, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::{QuantizedWeight, Weight};
use half::f16;
use nq_model::{DType, Dims, tensor_name};
use rotation::Rotation;
use serde_json::Value;
use std::sync::Arc;

/// How a tool lays out quantized weights.
pub(crate) trait Layout: Send + Sync {
    /// The format's name.
    fn format(&self) -> &'static str;

    /// True if weights may also be in small floats, which are read whatever the layout.
    fn has_floats(&self) -> bool {
        false
    }

    /// True if the weight `name` is stored quantized.
    fn is_quantized(&self, shards: &Shards, name: &str) -> bool;

    /// The suffixes of the tensors that a quantized weight is read from; not all weights have all.
    fn parts(&self, shards: &Shards, name: &str) -> &'static [&'static str];

    /// The rotations that the weight `name` is multiplied by.
    fn rotations(&self, name: &str) -> Vec<&Rotation> {
        let _ = name;
        Vec::new()
    }

    /// The suffix of the tensor that holds a weight's scales.
    fn scales(&self) -> &'static str;

    /// The scheme of a quantized weight, by the shapes of its tensors and its zero-points; `None` if they do not tell, or
    /// are not as they should be, which [`Layout::read`] reports.
    fn scheme(&self, shards: &Shards, name: &str) -> Option<AffineScheme>;

    /// Reads a quantized weight `[out_features, in_features]`.
    fn read(&self, shards: &Shards, name: &str, dims: Dims) -> Result<ImportedWeight>;
}

/// True if every scale fits an f16.
fn fit_f16(scales: &[f32]) -> bool {
    scales.iter().all(|&s| f16::from_f32(s).to_f32() == s)
}

/// The parameters of a checkpoint in a [`Layout`].
struct ImportStore<L> {
    dense: DenseStore,
    layout: L,
    value: Value,
}

/// Opens `source` with `layout`, which was made from its configuration.
pub(crate) fn open_with(source: Source, layout: impl Layout + 'static) -> Result<Checkpoint> {
    let dense = DenseStore {
        shards: source.shards()?,
    };
    let value = source.quantization().cloned().unwrap_or_default();
    source.into_checkpoint(Box::new(ImportStore {
        dense,
        layout,
        value,
    }))
}

impl<L: Layout> ImportStore<L> {
    /// The small float that a weight is in, if it is in one.
    fn float(&self, name: &str) -> Option<floats::SmallFloat> {
        let has = self.layout.has_floats();
        has.then(|| floats::SmallFloat::of(&self.dense.shards, name))
            .flatten()
    }

    fn parts(&self, name: &str, dims: Dims) -> Result<Option<ImportedWeight>> {
        let parts = match self.float(name) {
            Some(float) if float.is_fp8() => return Ok(None),
            Some(nvfp4) => return self.nvfp4(nvfp4, name, &[dims.rows, dims.cols]).map(Some),
            None if !self.layout.is_quantized(&self.dense.shards, name) => return Ok(None),
            None => self.layout.read(&self.dense.shards, name, dims)?,
        };
        let scales = format!("{name}{}", self.layout.scales());
        self.finite(parts, &scales, dims.rows).map(Some)
    }

    fn nvfp4(
        &self,
        float: floats::SmallFloat,
        name: &str,
        shape: &[usize],
    ) -> Result<ImportedWeight> {
        let parts = float.read(&self.dense.shards, name, shape)?;
        let rows = shape.iter().rev().skip(1).product();
        self.finite(parts, &format!("{name}{}", float.parts()[1]), rows)
    }

    /// The parts, if all scales are finite, which the tensor `tensor` holds. They decide how a weight is read, so that
    /// this is known before any value is used.
    fn finite(&self, parts: ImportedWeight, tensor: &str, rows: usize) -> Result<ImportedWeight> {
        if let Some((i, s)) = (0..).zip(&parts.scales).find(|(_, s)| !s.is_finite()) {
            let groups = (parts.scales.len() / rows.max(1)).max(1);
            let found = format!("{s} in row {}, group {}", i / groups, i % groups);
            return Err(self
                .dense
                .shards
                .error(tensor, "finite values".into(), found));
        }
        Ok(parts)
    }

    /// The scheme of [`WeightStore::matrix`] where it is known without the codes.
    fn affine(&self, name: &str) -> Option<AffineScheme> {
        let shards = &self.dense.shards;
        if !self.layout.rotations(name).is_empty() {
            return None;
        }
        match self.float(name) {
            Some(float) => float.scheme(shards, name),
            None if self.layout.is_quantized(shards, name) => self.layout.scheme(shards, name),
            None => None,
        }
    }

    /// The weight that parts make: in f32 if `exactly` and a scale does not fit an f16.
    fn made(&self, name: &str, parts: ImportedWeight, dims: Dims, exactly: bool) -> Result<Weight> {
        if exactly && !fit_f16(&parts.scales) {
            return parts.into_dense(dims).map(Weight::Dense);
        }
        let affine = parts.into_affine(dims);
        let affine = affine.map_err(|e| self.dense.shards.wrap(name, e))?;
        Ok(Weight::Quantized(QuantizedWeight::Affine(affine)))
    }

    /// The weight times its rotations.
    fn with_rotations(&self, name: &str, dims: Dims) -> Result<Weight> {
        let mut weight = match self.parts(name, dims)? {
            Some(parts) => Weight::Dense(parts.into_dense(dims)?),
            None => self.plain(name, dims)?,
        };
        for rotation in self.layout.rotations(name) {
            weight = (rotation.apply(&weight))
                .map_err(|e| self.dense.shards.wrap(&tensor_name(name), e))?;
        }
        Ok(weight)
    }

    /// The FP8 weight, or those of all experts, of this name and shape.
    fn fp8(&self, name: &str, shape: &[usize], exactly: bool) -> Result<Option<Weight>> {
        let Some(float) = self.float(name).filter(|float| float.is_fp8()) else {
            return Ok(None);
        };
        let tensor = float.fp8(&self.dense.shards, name, shape, exactly)?;
        Ok(Some(Weight::Dense(tensor.stacked())))
    }

    fn plain(&self, name: &str, dims: Dims) -> Result<Weight> {
        match self.fp8(name, &[dims.rows, dims.cols], false)? {
            Some(weight) => Ok(weight),
            None => self.dense.matrix(name, dims),
        }
    }
}

impl<L: Layout> Overlay for ImportStore<L> {
    fn inner(&self) -> &dyn WeightStore {
        &self.dense
    }

    fn format(&self) -> &'static str {
        self.layout.format()
    }

    fn contains(&self, name: &str) -> bool {
        // The name of a stack of experts may be that of the tensor that holds it.
        self.float(name).is_some_and(|float| !float.is_stack())
            || self.layout.is_quantized(&self.dense.shards, name)
            || self.dense.contains(name)
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        if !self.layout.rotations(name).is_empty() {
            return self.with_rotations(name, dims);
        }
        let Some(parts) = self.parts(name, dims)? else {
            return self.plain(name, dims);
        };
        self.made(name, parts, dims, false)
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        let nvfp4 = self.float(name).filter(|float| !float.is_fp8());
        let Some(float) = nvfp4.filter(|_| self.layout.rotations(name).is_empty()) else {
            return Overlay::matrix(self, name, dims);
        };
        let parts = self.nvfp4(float, name, &[dims.rows, dims.cols])?;
        let levels = float.in_levels(&self.dense.shards, name, parts, dims);
        let levels = levels.map_err(|e| self.dense.shards.wrap(name, e))?;
        Ok(Weight::Quantized(QuantizedWeight::Affine(levels)))
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        let scheme = self.affine(name)?;
        let is_float = self.float(name).is_some();
        Some(Scheme::Affine(match is_float {
            true => floats::levels_scheme(scheme.group),
            false => scheme,
        }))
    }

    fn is_float(&self, name: &str) -> bool {
        // Weights that are multiplied by rotations become floats.
        let is_rotated = !self.layout.rotations(name).is_empty();
        match self.float(name) {
            Some(float) => float.is_fp8() || is_rotated,
            None if self.layout.is_quantized(&self.dense.shards, name) => is_rotated,
            None => self.dense.is_float(name),
        }
    }

    fn scheme(&self, name: &str) -> Option<Scheme> {
        self.affine(name).map(Scheme::Affine)
    }

    fn experts(&self, name: &str, shape: [usize; 3], exactly: bool) -> Result<Option<Weight>> {
        let dims = Dims::new(shape[0] * shape[1], shape[2]);
        match self.float(name) {
            None => self.dense.experts(name, shape, exactly),
            Some(float) if float.is_fp8() => self.fp8(name, &shape, exactly),
            Some(float) => {
                let parts = self.nvfp4(float, name, &shape)?;
                self.made(name, parts, dims, exactly).map(Some)
            }
        }
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        if !self.layout.rotations(name).is_empty() {
            return self.with_rotations(name, dims).map(StoredWeight::Canonical);
        }
        let weight = match self.parts(name, dims)? {
            Some(parts) => self.made(name, parts, dims, true)?,
            None => match self.fp8(name, &[dims.rows, dims.cols], true)? {
                Some(weight) => weight,
                None => self.dense.matrix(name, dims)?,
            },
        };
        Ok(StoredWeight::Canonical(weight))
    }

    fn rows(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        Overlay::stored(self, name, dims)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        let parts = match self.float(name) {
            Some(kind) => kind.parts(),
            None if self.layout.is_quantized(&self.dense.shards, name) => {
                self.layout.parts(&self.dense.shards, name)
            }
            None => return self.dense.sources(name),
        };
        parts
            .iter()
            .map(|suffix| format!("{name}{suffix}"))
            .collect()
    }

    fn exactness(&self, name: &str) -> Exactness {
        if let Some(kind) = self.float(name) {
            let shards = &self.dense.shards;
            let parts = || kind.read(shards, name, &kind.shape(shards, name)?).ok();
            return match kind.is_fp8() {
                true => Exactness::ValuesRounded(DType::BF16),
                false if parts().is_some_and(|p| fit_f16(&p.scales)) => Exactness::Exact,
                false => Exactness::ScalesRounded(DType::F16),
            };
        }
        let scales = self
            .dense
            .shards
            .get(&format!("{name}{}", self.layout.scales()));
        let rounded = self.layout.rotations(name).is_empty()
            && self.layout.is_quantized(&self.dense.shards, name)
            && scales
                .filter(|t| t.dtype() != DType::F16)
                .and_then(|t| t.to_f32().ok())
                .is_some_and(|values| !fit_f16(&values));
        if rounded {
            Exactness::ScalesRounded(DType::F16)
        } else {
            Exactness::Exact
        }
    }

    fn quantization(&self) -> Option<&Value> {
        Some(&self.value)
    }
}

/// The shape of the tensor `name`, if it has `N` dimensions.
pub(crate) fn shape_of<const N: usize>(shards: &Shards, name: &str) -> Option<[usize; N]> {
    shards.get(name)?.shape().try_into().ok()
}

/// The 32-bit words of a tensor.
pub(crate) fn words(tensor: &Tensor) -> Vec<u32> {
    let (chunks, _) = tensor.data().as_chunks::<4>();
    chunks.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// Transposes `[rows, cols]` to `[cols, rows]`.
pub(crate) fn transpose<T: Copy>(values: &[T], cols: usize) -> Vec<T> {
    (0..cols)
        .flat_map(|c| values.iter().skip(c).step_by(cols.max(1)).copied())
        .collect()
}

/// Number of codes in a 32-bit word.
pub(crate) fn per_word(bits: Bits) -> usize {
    32 / bits.width()
}

/// Code `i` of a word, low bits first.
pub(crate) fn in_word(bits: Bits, word: u32, i: usize) -> u8 {
    (word >> (bits.width() * i)) as u8 & bits.max_code()
}

/// A group index, or `None` if every entry is `i / group size`. Entries past the last group are
/// refused.
pub(crate) fn listed_groups(
    shards: &Shards,
    name: &str,
    cols: usize,
    group: Group,
) -> Result<Option<Arc<[u32]>>> {
    let g_idx = crate::nq::read_group_index(shards, name, cols)?;
    let groups = group.count(cols);
    if let Some(i) = g_idx.iter().position(|&g| g as usize >= groups) {
        let found = format!("{} at input {i}", g_idx[i].cast_signed());
        return Err(shards.error(name, format!("groups below {groups}"), found));
    }
    let size = group.size(cols).max(1);
    let plain = g_idx
        .iter()
        .enumerate()
        .all(|(i, &g)| g as usize == i / size);
    Ok(if plain { None } else { Some(g_idx) })
}

/// Checks that groups divide the inputs and that codes fill whole words.
pub(crate) fn check_dims(
    shards: &Shards,
    tensor: &str,
    bits: Bits,
    group: Group,
    cols: usize,
) -> Result<()> {
    let pf = per_word(bits);
    if !cols.is_multiple_of(pf) || !cols.is_multiple_of(group.size(cols).max(1)) {
        let expected = format!("inputs that {pf} and the group size ({group}) divide");
        return Err(shards.error(tensor, expected, format!("{cols} inputs")));
    }
    Ok(())
}
