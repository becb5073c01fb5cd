//! Which weights of a layer stand in one matrix of a device. Plans of memory and models ask here alike, the former with the
//! kinds of weights alone.
//!
//! The Linears of a [`Product`] are multiplied together. A stack is what one of them has beside it: the weights of all
//! experts, and on devices that want it those of the shared expert behind them, of which it then is one that all rows go
//! through (fewer kernels than one for itself).

use crate::error::Result;
use crate::models::LayerWeights;
use nq_formats::{Tensor, Weight};
use nq_kernels::registry::WeightKind;
use nq_model::{Dims, Experts, LayerSpec, LinearKind, LinearSpec, ModelConfig, Product};
use std::borrow::Cow;

/// The weights of all experts of a mixture, each with that of the shared expert.
const WITH_SHARED: [(LinearKind, LinearKind); 4] = [
    (LinearKind::Router, LinearKind::SharedScore),
    (LinearKind::Gate, LinearKind::SharedGate),
    (LinearKind::Up, LinearKind::SharedUp),
    (LinearKind::Down, LinearKind::SharedDown),
];

/// The stacks of a layer.
#[derive(Clone, Copy)]
pub struct Stacks {
    spec: &'static LayerSpec,
    with_shared: bool,
}

/// A Linear of a product, and what stands in its matrix.
#[derive(Clone, Copy)]
pub struct StackedLinear {
    /// The Linear, whose weight may be that of all experts.
    pub linear: &'static LinearSpec,
    /// The Linear of the shared expert whose rows stand behind those.
    pub shared: Option<&'static LinearSpec>,
}

impl Stacks {
    /// Those of a device that runs a shared expert by itself.
    pub fn apart(spec: &'static LayerSpec) -> Self {
        Stacks {
            spec,
            with_shared: false,
        }
    }

    /// Those of a device whose kernels run up to `most` experts: the shared expert stands behind the others if it is as wide,
    /// if it is not one too many, and if each of its weights can be one with that of the others by their kinds.
    pub fn with_shared(
        c: &ModelConfig,
        spec: &'static LayerSpec,
        most: usize,
        kind: impl Fn(LinearKind) -> WeightKind,
    ) -> Self {
        let has_one = spec.matrices().any(|l| l.kind == LinearKind::SharedGate);
        let fits = c
            .experts
            .is_some_and(|e| largest_mixture(&e, most).shared > 0);
        let alike = |(all, own)| kind(all).stacked(kind(own)).is_some();
        Stacks {
            spec,
            with_shared: has_one && fits && WITH_SHARED.into_iter().all(alike),
        }
    }

    /// True if the shared expert stands behind the others.
    pub fn have_shared(&self) -> bool {
        self.with_shared
    }

    /// The stacks of `product`, one for each of its Linears; none if it is one of the shared expert, which stands in others.
    pub fn of_product(&self, product: &'static Product) -> Vec<StackedLinear> {
        let own = |l: &LinearSpec| WITH_SHARED.iter().any(|(_, own)| *own == l.kind);
        if self.with_shared && product.linears.iter().any(own) {
            return Vec::new();
        }
        let shared = |l: &LinearSpec| {
            let pair = WITH_SHARED.iter().find(|(all, _)| *all == l.kind);
            pair.filter(|_| self.with_shared)
                .map(|(_, own)| self.spec.linear(*own))
        };
        let stack = |linear| StackedLinear {
            linear,
            shared: shared(linear),
        };
        product.linears.iter().map(stack).collect()
    }
}

impl StackedLinear {
    /// Its Linears, in the order of their rows.
    pub fn linears(&self) -> impl Iterator<Item = &'static LinearSpec> {
        [self.linear].into_iter().chain(self.shared)
    }

    /// Rows of all its Linears.
    pub fn rows(&self, c: &ModelConfig) -> usize {
        self.linears().map(|l| l.dims(c).rows).sum()
    }

    /// The experts whose weights it has, for devices that keep each by itself; 1 if there are no experts.
    pub fn copies(&self, c: &ModelConfig) -> usize {
        self.linear.copies(c)
    }

    /// Weights that stand in its matrix: those of the experts and of the shared one behind them, or one.
    pub fn weights(&self, c: &ModelConfig) -> usize {
        self.linears().map(|l| l.copies(c)).sum()
    }

    /// The weight of one of [`StackedLinear::copies`].
    pub fn copy_dims(&self, c: &ModelConfig) -> Dims {
        let Dims { rows, cols } = self.linear.dims(c);
        Dims::new(rows / self.copies(c), cols)
    }

    /// The kind of the matrix, from those of its Linears.
    pub fn kind(&self, kind: impl Fn(&LinearSpec) -> WeightKind) -> WeightKind {
        let own = kind(self.linear);
        let stacked = self.shared.and_then(|shared| own.stacked(kind(shared)));
        stacked.unwrap_or(own)
    }

    /// The matrix, made of a layer's weights.
    ///
    /// # Errors
    /// Weights that cannot be one, which [`Stacks::with_shared`] rules out.
    pub fn weight<'w>(&self, weights: &'w LayerWeights) -> Result<Cow<'w, Weight>> {
        let own = weights.linear(self.linear.kind);
        let Some(shared) = self.shared else {
            return Ok(Cow::Borrowed(own));
        };
        let parts = match [own, weights.linear(shared.kind)] {
            [Weight::Dense(a), Weight::Dense(b)] if a.dtype() != b.dtype() => {
                [floats(a)?, floats(b)?]
            }
            parts => parts.map(Weight::clone),
        };
        Ok(Cow::Owned(Weight::stack(&parts)?))
    }
}

/// The largest mixture that a device with kernels for up to `most` experts runs as one: with the shared expert as one of
/// them, if it can stand behind the others.
pub fn largest_mixture(shape: &Experts, most: usize) -> Experts {
    let stacks = shape.shared == shape.width && shape.count < most;
    Experts {
        shared: if stacks { shape.shared } else { 0 },
        ..*shape
    }
}

/// The values of `w` as f32.
fn floats(w: &Tensor) -> Result<Weight> {
    let values = Tensor::from_f32(w.shape().to_vec(), w.to_f32()?)?;
    Ok(Weight::Dense(values))
}
