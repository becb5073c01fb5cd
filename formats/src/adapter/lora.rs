//! Adapters that are not merged: what they add to a model's products, to be computed beside them.

use super::merged::rounded;
use super::parts::View;
use super::{Adapter, parameters_with_head};
use crate::error::Result;
use crate::weight::Weight;
use half::{bf16, f16};
use nq_model::{DType, LinearKind, ModelConfig, Product};
use std::collections::{BTreeMap, BTreeSet};

/// A LoRA adapter of a model: with an input `x` of a Linear `W`, `y = W x + B (A x)`.
#[derive(Clone, Debug, Default)]
pub struct Lora {
    /// By the layer's number and the Linear's kind.
    linears: BTreeMap<(usize, LinearKind), Vec<LoraFactors>>,
}

/// What an adapter adds to one Linear: `B A`.
#[derive(Clone, Debug)]
pub struct LoraFactors {
    /// `A`, `[rank, in]`
    pub a: Vec<f32>,
    /// `B`, `[out, rank]`, times the adapter's scale.
    pub b: Vec<f32>,
    /// Columns of `B`, rows of `A`.
    pub rank: usize,
}

/// What an adapter adds to a product, whose Linears have one input: `B (A x)`.
#[derive(Clone, Debug)]
pub struct LoraProduct {
    /// The rows of `A` of all its Linears, `[ranks, in]`.
    pub a: Weight,
    /// For each Linear, `[out, ranks]`: its `B` in the columns of its own `A`, and zeros.
    pub b: Vec<Weight>,
}

/// Columns of [`LoraProduct::b`] are a multiple of this, as kernels want them.
const RANKS: usize = 16;

impl Adapter {
    /// The adapter for a model of this shape, whose weights may be quantized and stay as they are.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), naming what can only be merged: DoRA, whole parameters and trained tokens, and what is
    /// added to experts, embedding or head; [`Error::Tensor`](crate::Error::Tensor) for an adapter of another model.
    pub fn lora(&self, config: &ModelConfig) -> Result<Lora> {
        self.check(config)?;
        let merge = "beside a model's weights, products are added to Linears of layers; \
                     merge it into the unquantized model";
        let mut replaced = self.whole.names().chain(self.tokens.names());
        if let Some(name) = replaced.next() {
            return Err(self.unsupported(format!("{name} in place of the model's"), merge));
        }
        if self.is_dora() {
            let why =
                "its magnitudes depend on the model's weights; merge it into the unquantized model";
            return Err(self.unsupported("a DoRA adapter beside a model's weights".into(), why));
        }
        let view = View::new(&self.sums, self.form, config);
        let (mut linears, mut known) = (BTreeMap::new(), BTreeSet::new());
        for layer in 0..config.num_hidden_layers {
            let own = config.layer(layer).matrices();
            for linear in own.filter(|l| !l.stacked) {
                let (name, (rows, cols)) = (linear.name(layer), linear.dims(config));
                let factors = view.factors(&name, rows, cols)?;
                if !factors.is_empty() {
                    linears.insert((layer, linear.kind), factors);
                    known.insert(name);
                }
            }
        }
        let mut names = parameters_with_head(config)
            .into_iter()
            .map(|(name, _)| name);
        match names.find(|name| view.contains(name) && !known.contains(name)) {
            Some(name) => Err(self.unsupported(format!("what it adds to {name}"), merge)),
            None => Ok(Lora { linears }),
        }
    }
}

impl Lora {
    /// What is added to `product` of layer `layer`; `None` for nothing.
    ///
    /// # Errors
    /// None for a product of the model that the adapter was read for.
    pub fn product(
        &self,
        config: &ModelConfig,
        layer: usize,
        product: &Product,
    ) -> Result<Option<LoraProduct>> {
        let own = product.linears.iter();
        let own = own.map(|l| {
            self.linears
                .get(&(layer, l.kind))
                .map_or(&[][..], Vec::as_slice)
        });
        let own: Vec<&[LoraFactors]> = own.collect();
        let ranks: usize = own.iter().copied().flatten().map(|f| f.rank).sum();
        let Some(cols) = product.linears.first().map(|l| l.dims(config).1) else {
            return Ok(None);
        };
        if ranks == 0 {
            return Ok(None);
        }
        let ranks = ranks.next_multiple_of(RANKS);
        let mut a: Vec<f32> = Vec::with_capacity(ranks * cols);
        let mut b = Vec::with_capacity(own.len());
        for (linear, factors) in product.linears.iter().zip(own) {
            let rows = linear.dims(config).0;
            let mut values = vec![0.0; rows * ranks];
            for factors in factors {
                let (first, rank) = (a.len() / cols, factors.rank);
                a.extend_from_slice(&factors.a);
                let each = values
                    .chunks_exact_mut(ranks)
                    .zip(factors.b.chunks_exact(rank));
                each.for_each(|(row, b)| row[first..first + rank].copy_from_slice(b));
            }
            b.push(narrowest(values, vec![rows, ranks])?);
        }
        a.resize(ranks * cols, 0.0);
        let a = narrowest(a, vec![ranks, cols])?;
        Ok(Some(LoraProduct { a, b }))
    }
}

/// A matrix in the narrowest float type that holds all values exactly.
fn narrowest(values: Vec<f32>, shape: Vec<usize>) -> Result<Weight> {
    let holds = |round: fn(f32) -> f32| values.iter().all(|v| round(*v).to_bits() == v.to_bits());
    let dtype = if holds(|v| bf16::from_f32(v).to_f32()) {
        DType::BF16
    } else if holds(|v| f16::from_f32(v).to_f32()) {
        DType::F16
    } else {
        DType::F32
    };
    rounded(values, dtype, shape).map(Weight::Dense)
}
