//! Services of a GPU that loading and quantizing use. A build without the feature `cuda` has the
//! same functions, which report that there is no GPU.

#[cfg(not(feature = "cuda"))]
#[path = "absent.rs"]
mod here;
#[cfg(feature = "cuda")]
#[path = "present.rs"]
mod here;

pub use here::{check, memory, moments, sizes};
pub(crate) use here::{count, first, load, load_eagle, load_mtp, load_parallel, run, stepper};

use crate::error::Result;
use crate::interface::{DeviceMemory, SessionSpec};
use crate::weights::Kinds;
use nq_formats::{ModelConfig, TrellisScheme};

/// Memory of a GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// Memory that nobody holds.
    pub free: u64,
    /// All of its memory.
    pub total: u64,
}

/// Sizes of work in GPU memory, computed from shapes alone.
#[derive(Clone, Copy, Debug)]
pub struct GpuSizes {
    /// Most sequences in one step.
    pub together: usize,
    /// Bytes of an engine whose matrices are of the given kinds, and of a session of it.
    pub engine: fn(&ModelConfig, Kinds<'_>, &SessionSpec) -> Result<DeviceMemory>,
    /// Bytes taken by factoring the second moments of this many inputs, besides the result.
    pub factor: fn(usize) -> usize,
    /// Most bytes taken by rounding a weight of this shape to a trellis code, besides moments and their factor.
    pub trellis: fn(TrellisScheme, (usize, usize)) -> usize,
}
