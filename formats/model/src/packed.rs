//! The parts of a layer on a device, and vectors that stay as they are.

use crate::{LinearSpec, ModelConfig, NormSpec, Product, VectorRow};

/// A product from the architecture's table, and its weight on a device.
pub struct Packed<L> {
    /// Row of the table.
    pub spec: &'static Product,
    /// Its weight.
    pub linear: L,
}

/// A vector of a layer.
#[derive(Clone, Copy, Debug)]
pub enum VectorSpec {
    /// The gains of a norm.
    Norm(&'static NormSpec),
    /// The bias of a Linear.
    Bias(&'static LinearSpec),
    /// Another vector.
    Row(&'static VectorRow),
}

impl VectorSpec {
    /// Number of its values in a model of shape `c`.
    pub fn len(&self, c: &ModelConfig) -> usize {
        match self {
            VectorSpec::Norm(norm) => norm.len.of(c),
            VectorSpec::Bias(linear) => linear.dims(c).rows,
            VectorSpec::Row(row) => row.len.of(c),
        }
    }

    /// Its name in layer `layer`.
    pub fn name(&self, layer: usize) -> String {
        match self {
            VectorSpec::Norm(norm) => norm.name(layer),
            VectorSpec::Bias(linear) => linear.bias_name(layer),
            VectorSpec::Row(row) => row.name(layer),
        }
    }
}
