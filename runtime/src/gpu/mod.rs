//! What loading and quantizing ask of a GPU. A build without the feature `cuda` has the same
//! functions, which say that there is none.

#[cfg(not(feature = "cuda"))]
#[path = "absent.rs"]
mod here;
#[cfg(feature = "cuda")]
#[path = "present.rs"]
mod here;

pub(crate) use here::{count, first, load, run, stepper};
pub use here::{memory, moments, sizes};

use crate::engine::{DeviceMemory, SessionSpec};
use crate::error::Result;
use crate::memory::Kinds;
use nq_formats::ModelConfig;

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// Not held by anyone.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

/// What work takes of a GPU's memory, by shapes alone.
#[derive(Clone, Copy, Debug)]
pub struct GpuSizes {
    /// Sequences, at most, of one step.
    pub together: usize,
    /// Bytes of an engine whose matrices are of these kinds, and of a session of it.
    pub engine: fn(&ModelConfig, Kinds<'_>, &SessionSpec) -> Result<DeviceMemory>,
    /// Bytes that factoring the second moments of so many inputs takes, beside the result.
    pub factor: fn(usize) -> usize,
}
