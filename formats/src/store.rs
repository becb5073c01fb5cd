//! The weights of a checkpoint, whatever its format.

use crate::dtype::DType;
use crate::error::Result;
use crate::scheme::AffineScheme;
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use std::path::Path;

/// One tensor as it stands in a file, for listings.
#[derive(Clone, Debug)]
pub struct TensorEntry {
    /// Its name in the file.
    pub name: String,
    /// Element type or block type, by the format's own name.
    pub dtype: String,
    /// Shape as stored, outermost dimension first.
    pub shape: Vec<usize>,
    /// Stored bytes.
    pub bytes: u64,
    /// File that holds it.
    pub file: String,
}

/// How the numbers of a weight that a store gives relate to those that its file stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// The same numbers.
    Exact,
    /// The same codes; scales and offsets rounded to this type.
    ScalesRounded(DType),
    /// Values rounded to this type.
    ValuesRounded(DType),
}

/// The weights of one checkpoint format, by their Hugging Face names without the
/// `.weight` suffix (`model.layers.0.self_attn.q_proj`, `model.norm`, `lm_head`).
/// A new format implements this and adds one line to [`crate::Checkpoint::open`].
pub trait WeightStore: Send + Sync {
    /// The format's name, e.g. `safetensors`, `nq`, `gguf`.
    fn format(&self) -> &'static str;

    /// True if the parameter `name` is present.
    fn contains(&self, name: &str) -> bool;

    /// A dense one-dimensional parameter (norms).
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it is absent or not `[len]`.
    fn vector(&self, name: &str, len: usize) -> Result<Tensor>;

    /// The weight of a Linear or embedding.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it is absent, or its shape is not `[out_features, in_features]`.
    fn matrix(&self, name: &str, dims: (usize, usize)) -> Result<Weight>;

    /// The scheme of the weight `name`, where the file says it apart from the weight's tensors;
    /// `None` where it does not, or the weight is unquantized.
    fn scheme(&self, name: &str) -> Option<AffineScheme> {
        let _ = name;
        None
    }

    /// The unquantized tensor that the files have under this very name, which must then have this
    /// shape: experts that are kept in one tensor.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if its type or shape is another.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let _ = (name, shape);
        Ok(None)
    }

    /// The weight exactly as the file stands for it, which may be in a form that no kernel
    /// runs; for comparisons.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    fn stored(&self, name: &str, dims: (usize, usize)) -> Result<StoredWeight> {
        self.matrix(name, dims).map(StoredWeight::Canonical)
    }

    /// How [`WeightStore::matrix`] differs from [`WeightStore::stored`] for `name`.
    fn exactness(&self, name: &str) -> Exactness {
        let _ = name;
        Exactness::Exact
    }

    /// True if the file's weights are named as those of a model with nothing on top of it, without
    /// `model.`: what makes embeddings is published so.
    fn is_bare(&self) -> bool {
        false
    }

    /// Every stored tensor, in name order.
    fn entries(&self) -> Vec<TensorEntry>;

    /// Bytes of the weight files, headers included.
    fn file_bytes(&self) -> u64;

    /// What the file says about its quantization, as it stands there; `None` if
    /// unquantized.
    fn quantization(&self) -> Option<&serde_json::Value>;

    /// The one GGUF file that holds everything, for engines that read it themselves; `None`
    /// where there is no such file.
    fn gguf_file(&self) -> Option<&Path> {
        None
    }
}
