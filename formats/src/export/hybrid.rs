//! Hybrids in Hugging Face folders: their parameters as files of other programs hold them, the inverse of
//! [`crate::published`], and a config.json of the text model alone.

use crate::config::TEXT;
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::gguf::order::Heads;
use crate::keys::VALUE_HEADS;
use crate::scheme::Bits;
use crate::store::{Overlay, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::{AffineWeight, QuantizedWeight, Weight, ZeroPoints};
use crate::{mtp, pack};
use half::f16;
use nq_model::names::{Shape, is_less_one, parameters};
use nq_model::{Delta, Dims, ModelConfig};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Ends of the names of matrices that Qwen3-Next's files hold in place of two.
const QKVZ: &str = "linear_attn.in_proj_qkvz";
const BA: &str = "linear_attn.in_proj_ba";

/// The parameters that a folder of a model of shape `c` holds, and their shapes.
pub(super) fn parameters_of(c: &ModelConfig) -> Vec<(String, Shape)> {
    let all = parameters(c);
    let Some(d) = c.delta.filter(|_| c.architecture.fused_delta) else {
        return all;
    };
    let fused = |(name, shape): (String, Shape)| {
        let Some((start, part)) = name.rsplit_once(".in_proj_") else {
            return Some((name, shape));
        };
        let (whole, rows) = match part {
            "qkv" => ("qkvz", d.channels() + d.values()),
            "b" => ("ba", 2 * d.value_heads),
            _ => return None,
        };
        let shape = Shape::Matrix(rows, c.hidden_size);
        Some((format!("{start}.in_proj_{whole}"), shape))
    };
    all.into_iter().filter_map(fused).collect()
}

/// True for a matrix in place of two Linears that are quantized.
pub(super) fn is_fused_linear(name: &str) -> bool {
    name.ends_with(QKVZ)
}

/// True for a matrix in place of two that are never quantized.
pub(super) fn is_fused_kept(name: &str) -> bool {
    name.ends_with(BA)
}

/// The parameters of a store as a folder holds them.
pub(super) struct AsPublished<'a> {
    inner: &'a dyn WeightStore,
    config: &'a ModelConfig,
    root: PathBuf,
}

/// Two matrices that are one in a folder: their names, and their rows for each key head, in the folder's order as
/// (which of the two, first row of the first head, rows of a head).
struct Pair {
    names: [String; 2],
    rows: [usize; 2],
    pieces: Vec<(usize, usize, usize)>,
}

impl<'a> AsPublished<'a> {
    pub(super) fn new(inner: &'a dyn WeightStore, config: &'a ModelConfig, root: &Path) -> Self {
        AsPublished {
            inner,
            config,
            root: root.into(),
        }
    }

    /// True if the store has value heads in another order than folders.
    fn is_tiled(&self) -> bool {
        self.config.delta.is_some_and(|d| d.tiled)
    }

    /// The value heads in the rows of a parameter, or in its columns, if the store has them in another order.
    fn heads(&self, name: &str) -> [Option<Heads>; 2] {
        let sides: [fn(&ModelConfig, &str) -> Option<Heads>; 2] =
            [Heads::of_rows, Heads::of_columns];
        sides.map(|heads| heads(self.config, name).filter(|_| self.is_tiled()))
    }

    /// The matrix that `read` returns, its value heads in the order of folders.
    fn grouped(
        &self,
        name: &str,
        dims: Dims,
        read: impl Fn(&str, Dims) -> Result<Weight>,
    ) -> Result<Weight> {
        let weight = read(name, dims)?;
        match self.heads(name) {
            [Some(heads), _] => {
                let runs = runs(&heads.grouped_from(dims.rows));
                let rows: Vec<Weight> = runs.into_iter().map(|run| weight.rows(run)).collect();
                Weight::stack(&rows)
            }
            [_, Some(heads)] => columns(&weight, &heads.grouped_from(dims.cols), heads.each()),
            _ => return Ok(weight),
        }
        .map_err(|e| e.in_tensor(&self.root, name))
    }

    fn pair(&self, name: &str) -> Option<(Delta, Pair)> {
        let d = self.config.delta?;
        let shared = d.value_heads / d.key_heads;
        let values = shared * d.value_dim;
        let (parts, rows, pieces) = if is_fused_linear(name) {
            let keys = d.keys();
            let pieces = vec![
                (0, 0, d.key_dim),
                (0, keys, d.key_dim),
                (0, 2 * keys, values),
                (1, 0, values),
            ];
            (["qkv", "z"], [d.channels(), d.values()], pieces)
        } else if is_fused_kept(name) {
            let pieces = vec![(0, 0, shared), (1, 0, shared)];
            (["b", "a"], [d.value_heads; 2], pieces)
        } else {
            return None;
        };
        let start = name.rsplit_once("in_proj_")?.0;
        let names = parts.map(|part| format!("{start}in_proj_{part}"));
        Some((
            d,
            Pair {
                names,
                rows,
                pieces,
            },
        ))
    }

    /// A matrix, or two in one, of what `read` returns.
    fn read(
        &self,
        name: &str,
        Dims { rows, cols }: Dims,
        read: impl Fn(&str, Dims) -> Result<Weight>,
    ) -> Result<Weight> {
        let Some((delta, pair)) = self.pair(name) else {
            return self.grouped(name, Dims::new(rows, cols), read);
        };
        let part = |i: usize| self.grouped(&pair.names[i], Dims::new(pair.rows[i], cols), &read);
        let whole = [0, 1].map(part);
        let [first, second] = whole;
        let whole = [first?, second?];
        let heads = (0..delta.key_heads).flat_map(|h| pair.pieces.iter().map(move |p| (h, p)));
        let piece = |(head, &(which, first, rows)): (usize, &(usize, usize, usize))| {
            let first = first + head * rows;
            whole[which].rows(first..first + rows)
        };
        let pieces: Vec<Weight> = heads.map(piece).collect();
        let both = pair.names.join(" and ");
        Weight::stack(&pieces).map_err(|e| e.in_tensor(&self.root, &format!("{name} ({both})")))
    }
}

impl Overlay for AsPublished<'_> {
    fn inner(&self) -> &dyn WeightStore {
        self.inner
    }

    fn contains(&self, name: &str) -> bool {
        match self.pair(name) {
            None => self.inner.contains(name),
            Some((_, pair)) => pair.names.iter().all(|name| self.inner.contains(name)),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let tensor = self.inner.vector(name, len)?;
        if let [Some(heads), _] = self.heads(name) {
            let values = tensor.to_f32()?;
            let grouped = heads.grouped_from(len).into_iter().map(|i| values[i]);
            return Tensor::from_f32(vec![len], grouped.collect());
        }
        if !is_less_one(self.config.architecture, name) {
            return Ok(tensor);
        }
        let less_one = tensor.to_f32()?.iter().map(|v| v - 1.0).collect();
        Tensor::from_f32(vec![len], less_one)
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.read(name, dims, |name, dims| self.inner.matrix(name, dims))
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        match (self.pair(name), self.heads(name)) {
            (None, [None, None]) => self.inner.stored(name, dims),
            _ => Overlay::matrix(self, name, dims).map(StoredWeight::Canonical),
        }
    }

    fn exactness(&self, name: &str) -> Exactness {
        let Some((_, pair)) = self.pair(name) else {
            return self.inner.exactness(name);
        };
        let all = pair.names.iter().map(|name| self.inner.exactness(name));
        let mut rounded = all.filter(|e| *e != Exactness::Exact);
        rounded.next().unwrap_or(Exactness::Exact)
    }
}

/// Keys that describe the whole of a model that also sees images, and that its text model needs.
#[rustfmt::skip]
const OF_WHOLE: [&str; 6] = [
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version",
];

/// The config.json of the text model alone, of a model of shape `c`.
pub(super) fn text_config(mut whole: Map<String, Value>, c: &ModelConfig) -> Map<String, Value> {
    let mut text = match whole.shift_remove(TEXT) {
        Some(Value::Object(mut text)) if !text.is_empty() => {
            for key in OF_WHOLE {
                if let Some(value) = whole.shift_remove(key)
                    && text.get(key).is_none_or(Value::is_null)
                {
                    text.insert(key.into(), value);
                }
            }
            text
        }
        _ => whole,
    };
    let class = vec![c.architecture.class];
    text.insert("architectures".into(), class.into());
    text.insert("model_type".into(), c.architecture.model_type.into());
    if c.delta.is_some() {
        text.insert(mtp::LAYERS_KEY.into(), c.mtp_layers.into());
    }
    text.shift_remove(VALUE_HEADS);
    text
}

/// Keys of the whole of a model that sees.
#[rustfmt::skip]
const IMAGES: [&str; 4] = [
    "image_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id",
];

/// The config.json of a model that sees, whose text model has the shape `c`.
pub(super) fn whole_config(config: Map<String, Value>, c: &ModelConfig) -> Map<String, Value> {
    let mut text = text_config(config.clone(), c);
    let mut whole = config;
    if !whole.contains_key(TEXT) {
        text.retain(|key, _| !IMAGES.contains(&key.as_str()));
        whole.retain(|key, _| IMAGES.contains(&key.as_str()));
    }
    text.shift_remove("architectures");
    for (class, model_type) in c.architecture.also {
        whole.insert("architectures".into(), vec![*class].into());
        whole.insert("model_type".into(), (*model_type).into());
    }
    whole.insert(TEXT.into(), text.into());
    whole
}

/// Numbers that follow each other, as ranges.
fn runs(all: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &i in all {
        match runs.last_mut() {
            Some(run) if run.end == i => run.end += 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// A matrix with its column `from[i]` at place `i`; those of a head of `each` columns stay together.
fn columns(weight: &Weight, from: &[usize], each: usize) -> Result<Weight> {
    let Dims { rows, cols } = weight.dims();
    let a = match weight {
        Weight::Dense(t) => {
            let size = t.dtype().size();
            let mut data = Vec::with_capacity(t.data().len());
            for row in t.data().chunks(cols * size) {
                for &i in from {
                    data.extend_from_slice(&row[i * size..(i + 1) * size]);
                }
            }
            return Tensor::new(t.dtype(), vec![rows, cols], data.into()).map(Weight::Dense);
        }
        Weight::Quantized(QuantizedWeight::Affine(a)) => a,
        Weight::Quantized(trellis) => {
            return Err(Error::Weight {
                what: "codes",
                expected: "columns that can be moved: no trellis".into(),
                found: trellis.scheme().to_string(),
            });
        }
    };
    let (scheme, groups) = (a.scheme(), a.groups());
    let size = scheme.group.size(cols);
    let within = groups == 1 || each.is_multiple_of(size);
    if !within || a.g_idx().is_some() || !scheme.is_plain() {
        return Err(Error::Weight {
            what: "groups of inputs",
            expected: format!(
                "an f16 scale for each, in order, and whole ones in a head of {each}"
            ),
            found: weight.scheme_name(),
        });
    }
    let groups_from: Vec<usize> = (0..groups).map(|g| from[g * size] / size).collect();
    let moved = |bits: Bits, packed: &[u8], from: &[usize]| -> Vec<u8> {
        let mut all = Vec::with_capacity(rows * from.len());
        let mut row = vec![0; from.len()];
        for packed in packed.chunks(bits.bytes(from.len()).max(1)) {
            pack::unpack_row(bits, packed, &mut row);
            all.extend(from.iter().map(|&i| row[i]));
        }
        pack::pack_rows(bits, &all, from.len())
    };
    let halves = |values: &[f16]| -> Arc<[f16]> {
        let rows = values.chunks(groups.max(1));
        rows.flat_map(|row| groups_from.iter().map(|&g| row[g]))
            .collect()
    };
    let zeros = match a.zeros() {
        ZeroPoints::None => ZeroPoints::None,
        ZeroPoints::Integer(z) => ZeroPoints::Integer(moved(scheme.bits, z, &groups_from).into()),
        ZeroPoints::Offset(o) => ZeroPoints::Offset(halves(o)),
    };
    let codes = moved(scheme.bits, a.codes(), from).into();
    let moved = AffineWeight::new(
        scheme,
        Dims::new(rows, cols),
        codes,
        halves(a.scales()),
        zeros,
        None,
    )?;
    Ok(Weight::Quantized(QuantizedWeight::Affine(moved)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_model::Preset;
    use serde_json::json;

    #[test]
    fn a_text_model_is_taken_out_of_one_that_sees_images() {
        let mut c = Preset::find("qwen3.5-0.8b").unwrap().config();
        c.mtp_layers = 0;
        let mut text = crate::config::to_json(&c);
        text.shift_remove("eos_token_id");
        text.shift_remove("architectures");
        text.insert(mtp::LAYERS_KEY.into(), 1.into());
        let whole = json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "eos_token_id": 248046, "image_token_id": 7, "text_config": text, "vision_config": {"depth": 2},
        });
        let Value::Object(whole) = whole else {
            unreachable!()
        };
        let alone = text_config(whole, &c);
        assert!(!alone.contains_key("vision_config") && !alone.contains_key("image_token_id"));
        let json = Value::Object(alone).to_string();
        let (read, left) = crate::config::read(Path::new("c"), json.as_bytes()).unwrap();
        assert_eq!(read, c);
        assert!(left.is_empty(), "{left:?}");
    }
}
