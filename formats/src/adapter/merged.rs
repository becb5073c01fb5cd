//! A store with adapters merged into its weights.

use super::parts::{Adapter, View};
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::store::{Overlay, WeightStore};
use crate::tensor::Tensor;
use crate::weight::Weight;
use half::{bf16, f16};
use nq_model::ModelConfig;
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{DType, Dims};
use rayon::prelude::*;
use std::borrow::Cow;
use std::path::PathBuf;

/// A model's weights, and what is merged into them.
pub(super) struct Adapted {
    store: Box<dyn WeightStore>,
    adapters: Vec<Merged>,
    /// True if the head of the model without adapters is the embedding.
    tied: bool,
    /// Of the last adapter.
    path: PathBuf,
}

/// The parts of one adapter ([`Adapter`]).
struct Merged {
    whole: View,
    tokens: View,
    sums: View,
    magnitudes: View,
}

impl Adapted {
    /// Adapters that were checked against the model of this shape.
    pub(super) fn new(
        store: Box<dyn WeightStore>,
        adapters: &[Adapter],
        config: &ModelConfig,
    ) -> Self {
        let merged = |adapter: &Adapter| {
            let [whole, tokens, sums, magnitudes] =
                (adapter.parts()).map(|parts| View::new(parts, adapter.form, config));
            Merged {
                whole,
                tokens,
                sums,
                magnitudes,
            }
        };
        Adapted {
            store,
            adapters: adapters.iter().map(merged).collect(),
            tied: config.tie_word_embeddings,
            path: adapters.last().map(|a| a.path.clone()).unwrap_or_default(),
        }
    }

    /// The parameter that `name` is without adapters.
    fn base<'a>(&self, name: &'a str) -> &'a str {
        match name {
            HEAD if self.tied => EMBEDDING,
            _ => name,
        }
    }

    fn is_changed(&self, name: &str) -> bool {
        let base = self.base(name);
        let changed = |a: &Merged| {
            let own = [&a.whole, &a.sums].iter().any(|view| view.contains(name));
            own || a.tokens.contains(base)
        };
        self.adapters.iter().any(changed)
    }

    /// The weight with what the adapters add, rounded to its own type.
    fn merged(&self, name: &str, Dims { rows, cols }: Dims) -> Result<Weight> {
        let weight = self.store.matrix(self.base(name), Dims::new(rows, cols))?;
        let (true, Weight::Dense(tensor)) = (self.is_changed(name), &weight) else {
            return Ok(weight);
        };
        let mut values = tensor.to_f32()?;
        crate::mapping::release(tensor.data());
        for adapter in &self.adapters {
            adapter.merge(name, self.base(name), &mut values, cols)?;
        }
        let most = match tensor.dtype() {
            DType::F16 => f16::MAX.to_f32(),
            DType::BF16 => bf16::MAX.to_f32(),
            _ => f32::MAX,
        };
        if let Some(value) = values.iter().find(|v| v.is_nan() || v.abs() > most) {
            return Err(Error::Tensor {
                path: self.path.clone(),
                tensor: name.into(),
                expected: format!("merged values that are finite in {}", tensor.dtype()),
                found: value.to_string(),
            });
        }
        rounded(values, tensor.dtype(), vec![rows, cols]).map(Weight::Dense)
    }
}

impl Merged {
    /// Merges into the values of the matrix `name`, which is `base` without adapters.
    fn merge(&self, name: &str, base: &str, values: &mut [f32], cols: usize) -> Result<()> {
        let rows = values.len() / cols.max(1);
        let whole = self.whole.matrix(name, rows, cols)?;
        for replaced in (whole.into_iter()).chain(self.tokens.matrix(base, rows, cols)?) {
            let each = values.par_iter_mut().zip(replaced);
            each.for_each(|(value, new)| *value = if new.is_nan() { *value } else { new });
        }
        let Some(sums) = self.sums.matrix(name, rows, cols)? else {
            return Ok(());
        };
        let lengths = self.magnitudes.matrix(name, rows, cols)?;
        let each = values.par_chunks_mut(cols).zip(sums.par_chunks(cols));
        each.enumerate().for_each(|(row, (values, sums))| {
            let each = values.iter().zip(sums);
            let sums: Vec<f64> = each.map(|(v, s)| f64::from(*v) + f64::from(*s)).collect();
            let length = lengths.as_ref().map(|l| f64::from(l[row]));
            let factor = match length.filter(|l| !l.is_nan()) {
                Some(length) => length / sums.iter().map(|v| v * v).sum::<f64>().sqrt(),
                None => 1.0,
            };
            let each = values.iter_mut().zip(sums);
            each.for_each(|(value, sum)| *value = (sum * factor) as f32);
        });
        Ok(())
    }
}

/// Values in a float type.
pub(super) fn rounded(values: Vec<f32>, dtype: DType, shape: Vec<usize>) -> Result<Tensor> {
    let each = values.iter();
    let bytes: Vec<u8> = match dtype {
        DType::BF16 => each
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect(),
        DType::F16 => each.flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => return Tensor::from_f32(shape, values),
    };
    Tensor::new(dtype, shape, bytes.into())
}

impl Overlay for Adapted {
    fn inner(&self) -> &dyn WeightStore {
        self.store.as_ref()
    }

    fn inner_name<'n>(&self, name: &'n str) -> Cow<'n, str> {
        self.base(name).into()
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let own = self.store.vector(name, len)?;
        for adapter in &self.adapters {
            if let Some(values) = adapter.whole.vector(name, len)? {
                return rounded(values, own.dtype(), vec![len]);
            }
        }
        Ok(own)
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.merged(name, dims)
    }

    fn exactness(&self, name: &str) -> Exactness {
        match self.is_changed(name) {
            true => Exactness::Exact, // nothing is stored that it could be compared with
            false => self.store.exactness(self.base(name)),
        }
    }
}
