//! The weights of a layer on a GPU, and the mixtures that its kernels run.

use super::host_experts::HostExperts;
use crate::{Buffer, DeviceLinear, HalfRows, MOST_EXPERTS};
use nq_kernels::registry::WeightKind;
use nq_model::forward::{Layer, Mix};
use nq_model::{Experts, LayerSpec, LinearKind, ModelConfig, Product};
use nq_runtime::states::is_recurrent;

/// The weights of a layer; gate and up are interleaved.
pub(super) type CudaLayer = Layer<DeviceLinear, Buffer<f32>>;

/// The layers of a model, or the one that drafts.
pub(super) struct CudaLayers {
    pub(super) all: Vec<CudaLayer>,
    /// The number of each layer among those that keep the same of a sequence: pages, or states.
    places: Vec<usize>,
    /// Rows of the projections of rates, of the layers with recurrences.
    pub(super) rates: Vec<HalfRows>,
    /// The rows of each layer's router, if the layer has a mixture that runs here as one stack.
    pub(super) routers: Vec<Option<HalfRows>>,
    /// Experts of the first layers that run on the CPU.
    pub(super) host: HostExperts,
}

impl CudaLayers {
    /// The layers of a model of shape `config`, still without their weights.
    pub(super) fn new(config: &ModelConfig) -> Self {
        let mut next = [0; 2];
        let place = |spec| {
            let next = &mut next[usize::from(is_recurrent(spec))];
            *next += 1;
            *next - 1
        };
        CudaLayers {
            all: Vec::with_capacity(config.num_hidden_layers),
            places: config.layers().map(place).collect(),
            rates: Vec::new(),
            routers: Vec::new(),
            host: HostExperts::default(),
        }
    }

    /// The number of layer `index` among those that keep pages, or among those that keep states.
    pub(super) fn place(&self, index: usize) -> usize {
        self.places[index]
    }

    /// The rows of the projections of rates of layer `index`, which has a recurrence.
    pub(super) fn rates(&self, index: usize) -> &HalfRows {
        &self.rates[self.place(index)]
    }

    /// The mixtures of layers of a model of shape `config`, as their stacks are.
    pub(super) fn stacks(&self, config: &ModelConfig) -> Option<Experts> {
        let mut blocks = self.all.iter().flat_map(|l| &l.blocks);
        blocks.find_map(|block| match &block.mixer {
            Mix::Experts(experts) => Some(mixture(config, experts)),
            _ => None,
        })
    }
}

/// Drops the shared expert of a layer whose stacks have it.
pub(super) fn drop_shared(layer: &mut CudaLayer) {
    for block in &mut layer.blocks {
        if let Mix::Experts(experts) = &mut block.mixer {
            experts.shared = None;
        }
    }
}

/// The weights of all experts of a mixture, each with that of the shared expert.
const WITH_SHARED: [(LinearKind, LinearKind); 4] = [
    (LinearKind::Router, LinearKind::SharedScore),
    (LinearKind::Gate, LinearKind::SharedGate),
    (LinearKind::Up, LinearKind::SharedUp),
    (LinearKind::Down, LinearKind::SharedDown),
];

/// The weight of the shared expert that stands behind that of all others, if the shared expert stands in their stacks.
pub(super) fn shared_behind(kind: LinearKind) -> Option<LinearKind> {
    let pair = WITH_SHARED.into_iter().find(|(all, _)| *all == kind);
    pair.map(|(_, own)| own)
}

/// True if the product is one of the shared expert alone.
pub(super) fn is_of_shared(product: &Product) -> bool {
    let kind = product.linears[0].kind;
    WITH_SHARED.iter().any(|(_, own)| *own == kind)
}

/// True if the shared expert of a layer stands behind the others in their stacks, of which it then is one that all rows go
/// through: fewer kernels than one for itself. It follows from the shape `c` and the kinds of the layer's weights, so
/// that plans and models decide alike.
pub(super) fn stacks_shared(
    c: &ModelConfig,
    spec: &LayerSpec,
    kind: impl Fn(LinearKind) -> WeightKind,
) -> bool {
    let shares = spec.matrices().any(|l| l.kind == LinearKind::SharedGate);
    let fits = c.experts.is_some_and(|e| largest_mixture(&e).shared > 0);
    let alike = |(all, own)| kind(all).stacked(kind(own)).is_some();
    shares && fits && WITH_SHARED.into_iter().all(alike)
}

/// The mixture that kernels run for a layer: with the shared expert, if the layer's stacks have it.
pub(super) fn mixture(
    config: &ModelConfig,
    experts: &nq_model::forward::Experts<DeviceLinear>,
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
