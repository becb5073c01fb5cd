//! Hybrids in Hugging Face folders: their parameters as files of other programs hold them, the inverse of
//! [`crate::published`], and a config.json of the text model alone.

use crate::error::{Error, Result};
use crate::models::{Architecture, Delta, ModelConfig};
use crate::names::{Shape, is_less_one, parameters};
use crate::store::{Exactness, TensorEntry, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use crate::{config::TEXT, mtp};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

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
    architecture: &'static Architecture,
    delta: Option<Delta>,
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
    pub(super) fn new(inner: &'a dyn WeightStore, c: &ModelConfig, root: &Path) -> Self {
        AsPublished {
            inner,
            architecture: c.architecture,
            delta: c.delta,
            root: root.into(),
        }
    }

    fn pair(&self, name: &str) -> Option<(Delta, Pair)> {
        let d = self.delta?;
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
        (rows, cols): (usize, usize),
        read: impl Fn(&str, (usize, usize)) -> Result<Weight>,
    ) -> Result<Weight> {
        let Some((delta, pair)) = self.pair(name) else {
            return read(name, (rows, cols));
        };
        let whole = [0, 1].map(|i| read(&pair.names[i], (pair.rows[i], cols)));
        let [first, second] = whole;
        let whole = [first?, second?];
        let heads = (0..delta.key_heads).flat_map(|h| pair.pieces.iter().map(move |p| (h, p)));
        let piece = |(head, &(which, first, rows)): (usize, &(usize, usize, usize))| {
            let first = first + head * rows;
            whole[which].rows(first..first + rows)
        };
        let pieces: Vec<Weight> = heads.map(piece).collect();
        Weight::stack(&pieces).map_err(|e| match e {
            Error::Weight {
                expected, found, ..
            } => Error::Tensor {
                path: self.root.clone(),
                tensor: name.into(),
                expected: format!(
                    "{} and {} kept alike: {expected}",
                    pair.names[0], pair.names[1]
                ),
                found,
            },
            other => other,
        })
    }
}

impl WeightStore for AsPublished<'_> {
    fn format(&self) -> &'static str {
        self.inner.format()
    }

    fn contains(&self, name: &str) -> bool {
        match self.pair(name) {
            None => self.inner.contains(name),
            Some((_, pair)) => pair.names.iter().all(|name| self.inner.contains(name)),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let tensor = self.inner.vector(name, len)?;
        if !is_less_one(self.architecture, name) {
            return Ok(tensor);
        }
        let less_one = tensor.to_f32()?.iter().map(|v| v - 1.0).collect();
        Tensor::from_f32(vec![len], less_one)
    }

    fn matrix(&self, name: &str, dims: (usize, usize)) -> Result<Weight> {
        self.read(name, dims, |name, dims| self.inner.matrix(name, dims))
    }

    fn stored(&self, name: &str, dims: (usize, usize)) -> Result<StoredWeight> {
        match self.pair(name) {
            None => self.inner.stored(name, dims),
            Some(_) => self.matrix(name, dims).map(StoredWeight::Canonical),
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

    fn entries(&self) -> Vec<TensorEntry> {
        self.inner.entries()
    }

    fn file_bytes(&self) -> u64 {
        self.inner.file_bytes()
    }

    fn quantization(&self) -> Option<&Value> {
        self.inner.quantization()
    }
}

/// Keys that describe the whole of a model that also sees images, and that its text model needs.
const OF_WHOLE: [&str; 6] = [
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
];

/// The config.json of the text model alone, of a hybrid of shape `c`.
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
    text.insert(mtp::LAYERS_KEY.into(), c.mtp_layers.into());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Preset;
    use serde_json::json;

    #[test]
    fn a_text_model_is_taken_out_of_one_that_sees_images() {
        let mut c = Preset::find("qwen3.5-0.8b").unwrap().config();
        c.mtp_layers = 0;
        let mut text = c.to_json();
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
        let (read, left) = ModelConfig::read(Path::new("c"), json.as_bytes()).unwrap();
        assert_eq!(read, c);
        assert!(left.is_empty(), "{left:?}");
    }
}
