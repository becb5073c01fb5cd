//! Adapters that are not merged: what they add to a model's products, to be computed beside them.

use super::merged::rounded;
use super::parts::{Adapter, LoraFactors, View, parameters_with_head};
use crate::error::{Error, Result};
use crate::weight::Weight;
use half::{bf16, f16};
use nq_model::{DType, Dims, LinearKind, ModelConfig, Product};
use std::collections::{BTreeMap, BTreeSet};

/// A LoRA adapter of a model: with an input `x` of a Linear `W`, `y = W x + B (A x)`.
#[derive(Clone, Debug, Default)]
pub struct Lora {
    /// By the layer's number and the Linear's kind.
    linears: BTreeMap<(usize, LinearKind), Vec<LoraFactors>>,
}

/// What an adapter adds to a product, whose Linears have one input: `B (A x)`.
#[derive(Clone, Debug)]
pub struct LoraProduct {
    /// The rows of `A` of all its Linears, `[ranks, in]`.
    pub a: Weight,
    /// The `B` of each Linear.
    pub b: Vec<LoraRows>,
}

/// The `B` of a Linear of a product.
#[derive(Clone, Debug)]
pub struct LoraRows {
    /// `[out, rank]`; without columns if nothing is added to the Linear.
    pub b: Weight,
    /// The first row of the product's `A` that it is multiplied by.
    pub first: usize,
}

/// A product of a model's layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProductKey {
    layer: usize,
    /// Kind of its first Linear.
    pub first: LinearKind,
}

impl ProductKey {
    /// The key of `product` in layer `layer`.
    pub fn new(layer: usize, product: &Product) -> Self {
        let first = product.linears[0].kind;
        ProductKey { layer, first }
    }
}

/// Columns of [`LoraRows::b`] are a multiple of this, as kernels want them.
const RANKS: usize = 16;

impl Adapter {
    /// The adapter for a model of this shape, whose weights may be quantized and stay as they are.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming what can only be merged: DoRA, whole parameters and trained tokens, and what is
    /// added to experts, embedding or head; [`Error::Tensor`] for an adapter of another model.
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
                let (name, Dims { rows, cols }) = (linear.name(layer), linear.dims(config));
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
    /// Calls `each` with everything that is added to products of the model that the adapter was read for, and where.
    ///
    /// # Errors
    /// Those of `each`.
    pub fn each_product<E: From<Error>>(
        &self,
        config: &ModelConfig,
        mut each: impl FnMut(ProductKey, LoraProduct) -> Result<(), E>,
    ) -> Result<(), E> {
        for layer in 0..config.num_hidden_layers {
            let spec = config.layer(layer);
            for product in spec.products().into_iter().chain(spec.kept_products()) {
                if let Some(found) = self.product(config, layer, product)? {
                    each(ProductKey::new(layer, product), found)?;
                }
            }
        }
        Ok(())
    }

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
        if own.iter().all(|factors| factors.is_empty()) {
            return Ok(None);
        }
        let Some(cols) = product.linears.first().map(|l| l.dims(config).cols) else {
            return Ok(None);
        };
        let (mut a, mut b): (Vec<f32>, Vec<LoraRows>) = (Vec::new(), Vec::new());
        for (linear, factors) in product.linears.iter().zip(own) {
            let (first, rows) = (a.len() / cols, linear.dims(config).rows);
            let rank = factors.iter().map(|f| f.rank).sum::<usize>();
            let rank = rank.next_multiple_of(RANKS);
            let mut values = vec![0.0; rows * rank];
            for factors in factors {
                let at = a.len() / cols - first;
                a.extend_from_slice(&factors.a);
                let each = values
                    .chunks_exact_mut(rank)
                    .zip(factors.b.chunks_exact(factors.rank));
                each.for_each(|(row, b)| row[at..at + factors.rank].copy_from_slice(b));
            }
            a.resize((first + rank) * cols, 0.0);
            let values = narrowest(values, vec![rows, rank])?;
            b.push(LoraRows { b: values, first });
        }
        let shape = vec![a.len() / cols, cols];
        let a = narrowest(a, shape)?;
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
