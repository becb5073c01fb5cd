//! Where the experts of a model's layers are.

use crate::bank::StageSizes;
use nq_runtime::interface::SessionSpec;

/// Tokens of a prompt that [`wide`] sessions take at once, and the part of the rooms that may go for that: a quarter.
const WIDE_ROWS: usize = 8192;

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

/// Where [`MemoryRequest::split`] leaves experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PlacedExperts {
    pub(super) at: ExpertsAt,
    /// Bytes of all weights on the device.
    pub(super) weights: usize,
    /// Stacks that sessions make of experts in banks.
    pub(super) stage: Option<StageSizes>,
    /// True if sessions are made [`wide`].
    pub(super) is_wide: bool,
}

impl PlacedExperts {
    pub(super) fn on_gpu(weights: usize) -> Self {
        PlacedExperts {
            at: ExpertsAt::Gpu,
            weights,
            stage: None,
            is_wide: false,
        }
    }
}

/// The session of one conversation in the place of `spec` that takes more tokens of a prompt at once, as each time brings
/// all experts of a bank over the bus once more; `None` for others, and where prompts are shorter.
pub(super) fn wide(spec: &SessionSpec) -> Option<SessionSpec> {
    let usual = SessionSpec::prompt_rows(false);
    let wide = SessionSpec {
        max_rows: spec.ctx.min(WIDE_ROWS),
        ..*spec
    };
    (spec.slots == 1 && spec.max_rows >= usual && wide.max_rows > spec.max_rows).then_some(wide)
}
