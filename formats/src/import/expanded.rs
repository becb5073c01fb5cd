//! Stores of formats whose codes no kernel multiplies: weights are expanded to floats as they are read.

use crate::checkpoint::{Checkpoint, Source};
use crate::dense::DenseStore;
use crate::error::Result;
use crate::exactness::Exactness;
use crate::scheme::Scheme;
use crate::shards::Shards;
use crate::store::{Overlay, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use half::{bf16, f16};
use nq_model::{DType, Dims};
use serde_json::Value;

/// The type to which values are rounded where they are held.
#[derive(Clone, Copy)]
pub(super) enum ExpandedType {
    Bf16,
    F16,
}

/// How a format's weights are expanded.
pub(super) trait Expansion: Send + Sync {
    /// The format's name.
    const FORMAT: &'static str;
    /// The type of its expanded weights.
    const HELD: ExpandedType;

    /// True if the weight `name` is stored in the format's codes.
    fn is_expanded(&self, shards: &Shards, name: &str) -> bool;

    /// Names of the tensors that such a weight is read from; some may be absent.
    fn sources(&self, name: &str) -> Vec<String>;

    /// The values of such a weight `[rows, cols]`, in elements of `N` bytes; `encode` converts an f32 to one.
    ///
    /// # Errors
    /// A missing or misshapen tensor; values or scales that are not finite.
    fn expand<const N: usize>(
        &self,
        shards: &Shards,
        name: &str,
        dims: Dims,
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor>;

    /// Such a weight in the format's own codes, if devices have kernels for them.
    ///
    /// # Errors
    /// Those of [`Expansion::expand`].
    fn in_codes(&self, shards: &Shards, name: &str, dims: Dims) -> Result<Option<Weight>> {
        let _ = (shards, name, dims);
        Ok(None)
    }

    /// The scheme of what [`Expansion::in_codes`] returns.
    fn scheme(&self, shards: &Shards, name: &str) -> Option<Scheme> {
        let _ = (shards, name);
        None
    }

    /// True if the tensor `name` has the weights of all experts of a layer in the format's codes.
    fn is_stack(&self, shards: &Shards, name: &str) -> bool {
        let _ = (shards, name);
        false
    }

    /// The values of such a tensor; `None` if it is none.
    ///
    /// # Errors
    /// Those of [`Expansion::expand`].
    fn stack(
        &self,
        _shards: &Shards,
        _name: &str,
        _shape: [usize; 3],
        _exactly: bool,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

/// The parameters of a checkpoint whose weights are expanded, or unquantized.
struct ExpandedStore<E> {
    dense: DenseStore,
    expansion: E,
    value: Value,
}

/// Opens `source`, whose weights `expansion` expands.
pub(super) fn open_with(source: Source, expansion: impl Expansion + 'static) -> Result<Checkpoint> {
    let store = ExpandedStore {
        dense: DenseStore {
            shards: source.shards()?,
        },
        expansion,
        value: source.quantization().cloned().unwrap_or_default(),
    };
    source.into_checkpoint(Box::new(store))
}

impl<E: Expansion> ExpandedStore<E> {
    fn is_expanded(&self, name: &str) -> bool {
        self.expansion.is_expanded(&self.dense.shards, name)
    }
}

impl<E: Expansion> Overlay for ExpandedStore<E> {
    fn inner(&self) -> &dyn WeightStore {
        &self.dense
    }

    fn format(&self) -> &'static str {
        E::FORMAT
    }

    fn contains(&self, name: &str) -> bool {
        self.is_expanded(name) || self.dense.contains(name)
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        let (expansion, shards) = (&self.expansion, &self.dense.shards);
        let tensor = match (self.is_expanded(name), E::HELD) {
            (false, _) => return self.dense.matrix(name, dims),
            (true, ExpandedType::Bf16) => {
                let encode = |v| bf16::from_f32(v).to_le_bytes();
                expansion.expand(shards, name, dims, DType::BF16, encode)?
            }
            (true, ExpandedType::F16) => {
                let encode = |v| f16::from_f32(v).to_le_bytes();
                expansion.expand(shards, name, dims, DType::F16, encode)?
            }
        };
        Ok(Weight::Dense(tensor))
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        let coded = match self.is_expanded(name) {
            true => self.expansion.in_codes(&self.dense.shards, name, dims)?,
            false => None,
        };
        coded.map_or_else(|| Overlay::matrix(self, name, dims), Ok)
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        match self.is_expanded(name) {
            true => self.expansion.scheme(&self.dense.shards, name),
            false => None,
        }
    }

    fn is_float(&self, name: &str) -> bool {
        let is_stack = self.expansion.is_stack(&self.dense.shards, name);
        is_stack || self.is_expanded(name) || self.dense.is_float(name)
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        if !self.is_expanded(name) {
            return self.dense.stored(name, dims);
        }
        let (expansion, shards) = (&self.expansion, &self.dense.shards);
        let tensor = expansion.expand(shards, name, dims, DType::F32, f32::to_le_bytes)?;
        Ok(StoredWeight::Canonical(Weight::Dense(tensor)))
    }

    fn rows(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        Overlay::stored(self, name, dims)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        let is_stack = self.expansion.is_stack(&self.dense.shards, name);
        match is_stack || self.is_expanded(name) {
            true => self.expansion.sources(name),
            false => self.dense.sources(name),
        }
    }

    fn experts(&self, name: &str, shape: [usize; 3], exactly: bool) -> Result<Option<Weight>> {
        let shards = &self.dense.shards;
        match self.expansion.stack(shards, name, shape, exactly)? {
            None => self.dense.experts(name, shape, exactly),
            Some(tensor) => Ok(Some(Weight::Dense(tensor.stacked()))),
        }
    }

    fn exactness(&self, name: &str) -> Exactness {
        let is_stack = self.expansion.is_stack(&self.dense.shards, name);
        match (is_stack || self.is_expanded(name), E::HELD) {
            (false, _) => Exactness::Exact,
            (true, ExpandedType::Bf16) => Exactness::ValuesRounded(DType::BF16),
            (true, ExpandedType::F16) => Exactness::ValuesRounded(DType::F16),
        }
    }

    fn quantization(&self) -> Option<&Value> {
        Some(&self.value)
    }
}
