//! A model's weights in canonical form, read from a store as listed by its architecture.

use crate::error::Result;
use crate::ngrams::NgramRows;
use nq_formats::{Tensor, Weight, WeightStore};
use nq_kernels::reference;
use nq_model::forward::VectorSpec;
use nq_model::names::{self, EMBEDDING, NORM, Shape};
use nq_model::{
    Dims, LayerSpec, LinearKind, LinearSpec, ModelConfig, NormKind, Product, VectorKind,
};
use rayon::prelude::*;
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
    /// Its table of n-grams, if it has one, as it lies in the source's files.
    pub table: Option<NgramRows>,
}

impl LayerWeights {
    /// Reads layer `index` of a checkpoint.
    ///
    /// # Errors
    /// A missing tensor, or one whose shape does not match the config.
    pub fn read(store: &dyn WeightStore, config: &ModelConfig, index: usize) -> Result<Self> {
        let matrix = |name: &str, dims| store.matrix(name, dims);
        Self::read_by(matrix, store, config, index)
    }

    fn read_by(
        matrix: impl Fn(&str, Dims) -> nq_formats::Result<Weight>,
        store: &dyn WeightStore,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self> {
        let mut weights = Self::of_matrices(matrix, store, config, index)?;
        weights.table = NgramRows::open(store, config, index)?;
        Ok(weights)
    }

    /// As [`LayerWeights::read`], with matrices of [`WeightStore::matrix_in_codes`].
    ///
    /// # Errors
    /// As [`LayerWeights::read`].
    pub fn read_in_codes(
        store: &dyn WeightStore,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self> {
        let matrix = |name: &str, dims| store.matrix_in_codes(name, dims);
        Self::read_by(matrix, store, config, index)
    }

    /// As [`LayerWeights::read`], with matrices of [`WeightStore::matrix_in_levels`] and without its table of n-grams.
    ///
    /// # Errors
    /// As [`LayerWeights::read`].
    pub fn read_in_levels(
        store: &dyn WeightStore,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self> {
        let matrix = |name: &str, dims| store.matrix_in_levels(name, dims);
        Self::of_matrices(matrix, store, config, index)
    }

    fn of_matrices(
        matrix: impl Fn(&str, Dims) -> nq_formats::Result<Weight>,
        store: &dyn WeightStore,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self> {
        Self::collect(
            config.layer(index),
            |linear| Ok(matrix(&linear.name(index), linear.dims(config))?),
            |vector| Ok(store.vector(&vector.name(index), vector.len(config))?),
        )
    }

    /// Collects the results of `linear` and `vector` for all parts of the layer but a table of n-grams.
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
            table: None,
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

/// As [`head`], of [`WeightStore::matrix_in_codes`].
pub fn head_in_codes(store: &dyn WeightStore, config: &ModelConfig) -> Result<Weight> {
    let dims = Dims::new(config.vocab_size, config.hidden_size);
    Ok(store.matrix_in_codes(names::head(config), dims)?)
}

/// Reads the final norm `[hidden]`.
pub fn final_norm(store: &dyn WeightStore, config: &ModelConfig) -> Result<Tensor> {
    Ok(store.vector(NORM, config.hidden_size)?)
}

/// What stands between the last layer and the head: the final norm, and in a residual of several streams what weighs these
/// ([`nq_model::HyperSpec`]).
#[derive(Clone, Debug)]
pub struct Ending {
    /// Gains of the norm: `[hidden]`, or `[streams, hidden]`.
    pub norm: Tensor,
    /// The two matrices by which streams are weighed, `[rank, streams hidden]` and `[streams hidden, rank]`; `None` if there
    /// is one stream.
    pub mix: Option<[Weight; 2]>,
}

impl Ending {
    /// Reads it.
    ///
    /// # Errors
    /// A missing tensor, or one whose shape does not match the config.
    pub fn read(store: &dyn WeightStore, c: &ModelConfig) -> Result<Self> {
        let mut norm = None;
        let mut mix = Vec::new();
        for (name, shape) in names::end_parameters(c) {
            match shape {
                Shape::Vector(len) => norm = Some(store.vector(&name, len)?),
                Shape::Matrix(rows, cols) => mix.push(store.matrix(&name, Dims::new(rows, cols))?),
            }
        }
        Ok(Ending {
            norm: norm.expect("every model has a final norm"),
            mix: mix.try_into().ok(),
        })
    }

    /// Computes on the host what the head reads of rows `x` `[rows, streams hidden]` of the last layer's output:
    /// `[rows, hidden]`.
    ///
    /// # Errors
    /// A type of weight that has no values.
    pub fn apply(&self, c: &ModelConfig, x: &[f32]) -> Result<Vec<f32>> {
        let gains = self.norm.to_f32()?;
        let (h, streams, eps) = (c.hidden_size, c.streams(), c.rms_norm_eps);
        let mut normed = vec![0.0; x.len()];
        let values = normed.par_chunks_mut(h).zip(x.par_chunks(h)).enumerate();
        values.for_each(|(i, (y, x))| {
            reference::rms_norm(x, &gains[i % streams * h..][..h], eps, y);
        });
        let Some([down, up]) = &self.mix else {
            return Ok(normed);
        };
        let (down, up) = (values_of(down)?, values_of(up)?);
        let mut out = vec![0.0; x.len() / streams];
        let rows = out.par_chunks_mut(h).zip(normed.par_chunks(streams * h));
        rows.for_each(|(y, n)| {
            let product = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
            let low = down.chunks_exact(n.len()).map(|w| {
                let v = product(w, n) / streams as f32;
                v / (1.0 + (-v).exp())
            });
            let low: Vec<f32> = low.collect();
            for (i, (w, n)) in up.chunks_exact(low.len()).zip(n).enumerate() {
                let gate = 1.0 / (1.0 + (-product(w, &low)).exp());
                y[i % h] += gate * n / streams as f32;
            }
        });
        Ok(out)
    }
}

/// All values of a weight, row by row.
fn values_of(w: &Weight) -> Result<Vec<f32>> {
    let Dims { rows, cols } = w.dims();
    let mut values = vec![0.0; rows * cols];
    for (row, values) in values.chunks_exact_mut(cols).enumerate() {
        w.dequantize_row(row, values)?;
    }
    Ok(values)
}
