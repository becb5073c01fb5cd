//! The weights of a checkpoint, whatever its format.

use crate::error::Result;
use crate::exactness::Exactness;
use crate::scheme::Scheme;
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::Dims;
use std::borrow::Cow;
use std::path::Path;

/// The name of nq's own format, whose parameters are as nq runs them.
pub(crate) const OWN_FORMAT: &str = "nq";

/// A tensor as stored in a file, for listings.
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

/// The weights of one checkpoint format, by their Hugging Face names without the
/// `.weight` suffix (`model.layers.0.self_attn.q_proj`, `model.norm`, `lm_head`).
/// A new format implements this and adds one line to [`crate::Checkpoint::open`].
pub trait WeightStore: Send + Sync {
    /// The format's name, e.g. `safetensors`, `nq`, `gguf`.
    fn format(&self) -> &'static str;

    /// True if the parameter `name` is present.
    fn contains(&self, name: &str) -> bool;

    /// Reads a dense one-dimensional parameter (a norm).
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it is absent or its shape is not `[len]`.
    fn vector(&self, name: &str, len: usize) -> Result<Tensor>;

    /// Reads the weight of a Linear or embedding.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it is absent, or its shape is not `[out_features, in_features]`.
    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight>;

    /// The scheme of the weight `name`, if the file states it apart from the weight's tensors;
    /// `None` if it does not, or if the weight is unquantized.
    fn scheme(&self, name: &str) -> Option<Scheme> {
        let _ = name;
        None
    }

    /// The unquantized tensor with exactly this name in the files, if any, which must have this
    /// shape: for experts that are stored in one tensor.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it has another type or shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let _ = (name, shape);
        Ok(None)
    }

    /// The 64-bit integers in the tensor with exactly this name, if any, which must have `len` of them.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it has another type or shape.
    fn integers(&self, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
        let _ = (name, len);
        Ok(None)
    }

    /// The weights of the experts of a layer, those of each below those of the one before it, if the files keep them in
    /// one tensor `[experts, out, in]` of this name, with or without scales beside it; `exactly`: with values as they
    /// are stored, otherwise as kernels hold them.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it, or a tensor of its scales, has another type or shape.
    fn experts(&self, name: &str, shape: [usize; 3], exactly: bool) -> Result<Option<Weight>> {
        let _ = exactly;
        let tensor = self.tensor(name, &shape)?;
        Ok(tensor.map(|tensor| Weight::Dense(tensor.stacked())))
    }

    /// As [`WeightStore::matrix`], but in the file's own codes also where that expands them, because no row of them can be read
    /// by itself (EXL3) or their values are levels of a table: for devices whose kernels read these.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.matrix(name, dims)
    }

    /// As [`WeightStore::matrix_in_codes`], the same values, but in the fewest bits that files keep them in, with tables of levels and
    /// scales in two levels: for devices whose kernels read these.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    fn matrix_in_levels(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.matrix_in_codes(name, dims)
    }

    /// The scheme of what [`WeightStore::matrix_in_levels`] reads, if that is known without reading it; `None` for
    /// unquantized weights.
    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        self.scheme(name)
    }

    /// True if [`WeightStore::matrix`] is known to read floats, without reading them; false if that is not known.
    fn is_float(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// The weight exactly as stored in the file, possibly in a form that no kernel can run; for
    /// comparisons.
    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        self.matrix(name, dims).map(StoredWeight::Canonical)
    }

    /// A matrix of which single rows are going to be read: in the bits of its file, of which no more is read than the rows.
    ///
    /// # Errors
    /// As [`WeightStore::matrix`].
    fn rows(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        self.stored(name, dims)
    }

    /// The tensor with exactly this name in the files, if it is of FP8 (e4m3), which must have this shape.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] if it has another shape.
    fn fp8(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let _ = (name, shape);
        Ok(None)
    }

    /// Names of the stored tensors that the parameter `name` is read from, as [`WeightStore::entries`] lists
    /// them; some may be absent. A stored tensor that no parameter names is left over.
    fn sources(&self, name: &str) -> Vec<String> {
        vec![name.into()]
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

    /// The file's own description of its quantization, unchanged; `None` if it is
    /// unquantized.
    fn quantization(&self) -> Option<&serde_json::Value> {
        None
    }

    /// The single GGUF file that holds everything, for engines that read it themselves; `None`
    /// if there is no such file.
    fn gguf_file(&self) -> Option<&Path> {
        None
    }
}

/// Declares [`Overlay`] and how it is a [`WeightStore`], by the methods that an overlay may state, each with what it
/// returns unless it does.
macro_rules! overlay {
    ($($method:ident($($arg:ident: $type:ty),*) -> $out:ty = |$store:ident| $unstated:expr;)*) => {
        /// A store over another one, which states what it changes. Everything else is what the store below says of
        /// the parameter with the name [`Overlay::inner_name`]; but values that were changed on the way are no longer
        /// those of a GGUF file, and [`WeightStore::stored`] is the weight as it is read, unless an overlay says so.
        #[allow(missing_docs)] // Those of `WeightStore`.
        pub trait Overlay: Send + Sync {
            /// The store below.
            fn inner(&self) -> &dyn WeightStore;

            /// The name that the parameter `name` has in the store below.
            fn inner_name<'n>(&self, name: &'n str) -> Cow<'n, str> {
                name.into()
            }

            $(fn $method(&self, $($arg: $type),*) -> $out {
                let $store = self;
                $unstated
            })*
        }

        impl<S: Overlay> WeightStore for S {
            $(fn $method(&self, $($arg: $type),*) -> $out {
                Overlay::$method(self, $($arg),*)
            })*
        }
    };
}

overlay! {
    format() -> &'static str = |s| s.inner().format();
    contains(name: &str) -> bool = |s| s.inner().contains(&s.inner_name(name));
    vector(name: &str, len: usize) -> Result<Tensor> = |s| s.inner().vector(&s.inner_name(name), len);
    matrix(name: &str, dims: Dims) -> Result<Weight> = |s| s.inner().matrix(&s.inner_name(name), dims);
    matrix_in_codes(name: &str, dims: Dims) -> Result<Weight> = |s| s.matrix(name, dims);
    matrix_in_levels(name: &str, dims: Dims) -> Result<Weight> = |s| s.matrix_in_codes(name, dims);
    scheme_in_levels(name: &str) -> Option<Scheme> = |s| s.scheme(name);
    scheme(name: &str) -> Option<Scheme> = |s| s.inner().scheme(&s.inner_name(name));
    is_float(name: &str) -> bool = |s| s.inner().is_float(&s.inner_name(name));
    tensor(name: &str, shape: &[usize]) -> Result<Option<Tensor>> = |s| s.inner().tensor(name, shape);
    integers(name: &str, len: usize) -> Result<Option<Vec<i64>>> = |s| s.inner().integers(name, len);
    experts(name: &str, shape: [usize; 3], exactly: bool) -> Result<Option<Weight>> = |s| {
        s.inner().experts(name, shape, exactly)
    };
    stored(name: &str, dims: Dims) -> Result<StoredWeight> = |s| s.matrix(name, dims).map(StoredWeight::Canonical);
    rows(name: &str, dims: Dims) -> Result<StoredWeight> = |s| s.inner().rows(&s.inner_name(name), dims);
    fp8(name: &str, shape: &[usize]) -> Result<Option<Tensor>> = |s| s.inner().fp8(name, shape);
    sources(name: &str) -> Vec<String> = |s| s.inner().sources(&s.inner_name(name));
    exactness(name: &str) -> Exactness = |s| s.inner().exactness(&s.inner_name(name));
    is_bare() -> bool = |s| s.inner().is_bare();
    entries() -> Vec<TensorEntry> = |s| s.inner().entries();
    file_bytes() -> u64 = |s| s.inner().file_bytes();
    quantization() -> Option<&serde_json::Value> = |s| s.inner().quantization();
    gguf_file() -> Option<&Path> = |_s| None;
}
