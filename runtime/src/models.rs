//! A model's weights in canonical form, read from a store as listed by its architecture.

use crate::error::Result;
use nq_formats::{Tensor, Weight, WeightStore};
use nq_model::forward::VectorSpec;
use nq_model::names::{self, EMBEDDING, NORM};
use nq_model::{
    Dims, LayerSpec, LinearKind, LinearSpec, ModelConfig, NormKind, Product, VectorKind,
};
use std::collections::BTreeMap;

/// The canonical weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// The layer's row of the architecture's table.
    pub spec: &'static LayerSpec,
    /// Weights of all its Linears.
    pub linears: BTreeMap<LinearKind, Weight>,
    /// Gains of its norms.
    pub norms: BTreeMap<NormKind, Tensor>,
    /// Biases of those Linears that have one.
    pub biases: BTreeMap<LinearKind, Tensor>,
    /// Its other vectors.
    pub vectors: BTreeMap<VectorKind, Tensor>,
}

impl LayerWeights {
    /// Reads layer `index` of a checkpoint.
    ///
    /// # Errors
    /// A missing tensor, or one whose shape does not match the config.
    pub fn read(store: &dyn WeightStore, config: &ModelConfig, index: usize) -> Result<Self> {
        Self::collect(
            config.layer(index),
            |linear| Ok(store.matrix(&linear.name(index), linear.dims(config))?),
            |vector| Ok(store.vector(&vector.name(index), vector.len(config))?),
        )
    }

    /// As [`LayerWeights::read`], with matrices of [`WeightStore::matrix_in_levels`].
    ///
    /// # Errors
    /// As [`LayerWeights::read`].
    pub fn read_in_levels(
        store: &dyn WeightStore,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self> {
        let matrix = WeightStore::matrix_in_levels;
        Self::collect(
            config.layer(index),
            |linear| Ok(matrix(store, &linear.name(index), linear.dims(config))?),
            |vector| Ok(store.vector(&vector.name(index), vector.len(config))?),
        )
    }

    /// Collects the results of `linear` and `vector` for all parts of the layer.
    ///
    /// # Errors
    /// The first error that either returns.
    pub fn collect<E>(
        spec: &'static LayerSpec,
        mut linear: impl FnMut(&LinearSpec) -> Result<Weight, E>,
        mut vector: impl FnMut(VectorSpec) -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        let norms = spec.norms().into_iter();
        Ok(LayerWeights {
            spec,
            linears: (spec.matrices())
                .map(|l| Ok((l.kind, linear(l)?)))
                .collect::<Result<_, E>>()?,
            norms: norms
                .map(|n| Ok((n.kind, vector(VectorSpec::Norm(n))?)))
                .collect::<Result<_, E>>()?,
            biases: (spec.biased())
                .map(|l| Ok((l.kind, vector(VectorSpec::Bias(l))?)))
                .collect::<Result<_, E>>()?,
            vectors: (spec.vectors().into_iter())
                .map(|v| Ok((v.kind, vector(VectorSpec::Row(v))?)))
                .collect::<Result<_, E>>()?,
        })
    }

    /// The weight of one Linear.
    pub fn linear(&self, kind: LinearKind) -> &Weight {
        &self.linears[&kind]
    }

    /// The weights of a product's Linears, in its order.
    pub fn product(&self, product: &Product) -> Vec<&Weight> {
        let linears = product.linears.iter();
        linears.map(|l| self.linear(l.kind)).collect()
    }

    /// The gains of one norm.
    pub fn norm(&self, kind: NormKind) -> &Tensor {
        &self.norms[&kind]
    }

    /// The values of a vector.
    pub fn vector(&self, spec: VectorSpec) -> &Tensor {
        match spec {
            VectorSpec::Norm(norm) => self.norm(norm.kind),
            VectorSpec::Bias(linear) => &self.biases[&linear.kind],
            VectorSpec::Row(row) => &self.vectors[&row.kind],
        }
    }

    /// The values of a vector as kernels take them: of rates of decay not their logarithms, but the rates, negated.
    ///
    /// # Errors
    /// A type that has no f32 values.
    pub fn values(&self, spec: VectorSpec) -> Result<Vec<f32>> {
        let mut values = self.vector(spec).to_f32()?;
        if matches!(spec, VectorSpec::Row(row) if row.kind == VectorKind::Decay) {
            values.iter_mut().for_each(|v| *v = -v.exp());
        }
        Ok(values)
    }
}

/// Reads the embedding `[vocab, hidden]`.
pub fn embedding(store: &dyn WeightStore, config: &ModelConfig) -> Result<Weight> {
    Ok(store.matrix(EMBEDDING, Dims::new(config.vocab_size, config.hidden_size))?)
}

/// Reads the head `[vocab, hidden]`: the embedding if they are tied.
pub fn head(store: &dyn WeightStore, config: &ModelConfig) -> Result<Weight> {
    let dims = Dims::new(config.vocab_size, config.hidden_size);
    Ok(store.matrix(names::head(config), dims)?)
}

/// Reads the final norm `[hidden]`.
pub fn final_norm(store: &dyn WeightStore, config: &ModelConfig) -> Result<Tensor> {
    Ok(store.vector(NORM, config.hidden_size)?)
}
