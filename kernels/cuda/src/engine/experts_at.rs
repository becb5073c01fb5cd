//! Where the experts of a model's layers are.

/// Where the experts of a mixture are; those of a dense model, which has none, are on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertsAt {
    /// On the GPU.
    Gpu,
    /// Those of so many layers, from the first on, are in the computer's memory and run on the CPU.
    Cpu(usize),
    /// Those of all layers are in banks (`crate::bank`), and so many of each also have a room on the GPU.
    Bank {
        /// At least one.
        rooms: usize,
    },
}

impl ExpertsAt {
    /// True if those of layer `index` run on the CPU.
    pub(super) fn on_cpu(self, index: usize) -> bool {
        matches!(self, ExpertsAt::Cpu(layers) if index < layers)
    }

    /// Layers whose experts run on the CPU.
    pub(super) fn cpu_layers(self) -> usize {
        match self {
            ExpertsAt::Cpu(layers) => layers,
            ExpertsAt::Gpu | ExpertsAt::Bank { .. } => 0,
        }
    }
}
