//! The weights of a layer on a GPU, and the mixtures that its kernels run.

use super::held::CudaLayer;
use super::host_experts::HostExperts;
use super::residency::ModelBank;
use crate::{DeviceLinear, HalfRows};
use nq_model::{Experts, ModelConfig};
use nq_runtime::states::is_recurrent;

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
    /// Experts of all layers, if not all of them have room on the GPU and none run on the CPU.
    pub(super) bank: Option<ModelBank>,
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
            bank: None,
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
        let mut experts = self.all.iter().filter_map(CudaLayer::experts);
        experts.next().map(|experts| mixture(config, experts))
    }
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
