//! Where the experts of a model's layers are.

/// Where the experts of a mixture are; those of a dense model, which has none, are on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertsAt {
    /// On the GPU.
    Gpu,
    /// Those of so many layers, from the first on, are in the computer's memory and run on the CPU.
    Cpu(usize),
    /// In banks (`crate::bank`), and some of each layer also have a room on the GPU.
    Bank {
        /// At least one.
        rooms: usize,
        /// So many layers, from the first on, have no bank but all their experts on the GPU: the computer's memory has no
        /// room for these.
        whole: usize,
    },
}

impl ExpertsAt {
    /// True if those of layer `index` run on the CPU.
    pub(super) fn on_cpu(self, index: usize) -> bool {
        matches!(self, ExpertsAt::Cpu(layers) if index < layers)
    }

    /// How many experts of a layer in a bank have rooms.
    pub(super) fn rooms(self) -> Option<usize> {
        match self {
            ExpertsAt::Bank { rooms, .. } => Some(rooms),
            ExpertsAt::Gpu | ExpertsAt::Cpu(_) => None,
        }
    }

    /// Layers whose experts run on the CPU.
    pub(super) fn cpu_layers(self) -> usize {
        match self {
            ExpertsAt::Cpu(layers) => layers,
            ExpertsAt::Gpu | ExpertsAt::Bank { .. } => 0,
        }
    }
}
