//! The weights of a layer on a GPU, and the mixtures that its kernels run.

use crate::forward::{Layer, Mix};
use nq_formats::{Experts, ModelConfig};
use nq_kernels::cuda::{Buffer, DeviceLinear, MOST_EXPERTS};

/// The weights of a layer; gate and up are interleaved.
pub(super) type CudaLayer = Layer<DeviceLinear, Buffer<f32>>;

/// Drops the shared expert of a layer whose stacks have it.
pub(super) fn drop_shared(layer: &mut CudaLayer) {
    for block in &mut layer.blocks {
        if let Mix::Experts(experts) = &mut block.mixer {
            experts.shared = None;
        }
    }
}

/// The mixture that kernels run for a layer: with the shared expert, if the layer's stacks have it.
pub(super) fn mixture(
    config: &ModelConfig,
    experts: &crate::forward::Experts<DeviceLinear>,
) -> Experts {
    let Some(shape) = config.experts else {
        unreachable!("layers with experts have an expert shape");
    };
    match experts.shared {
        Some(_) => Experts { shared: 0, ..shape },
        None => shape,
    }
}

/// The largest mixture that [`mixture`] gives.
pub(super) fn largest_mixture(shape: &Experts) -> Experts {
    let stacks = shape.shared == shape.width && shape.count < MOST_EXPERTS;
    Experts {
        shared: if stacks { shape.shared } else { 0 },
        ..*shape
    }
}
