//! Services of a GPU that loading and quantizing use. A build without the feature `cuda` has the
//! same functions, which report that there is no GPU.

#[cfg(not(feature = "cuda"))]
#[path = "absent.rs"]
mod here;
#[cfg(feature = "cuda")]
#[path = "present.rs"]
mod here;

pub use here::{
    GpuMeter, check, driver_needed, found, memory, moments, multiprocessors, place, products, sizes,
};
pub(crate) use here::{
    count, first, load, load_eagle, load_mtp, load_parallel, load_tower, planned_tower, run,
    stepper, unserved_tower,
};

use nq_formats::TrellisScheme;
use nq_model::Dims;
use nq_runtime::interface::Planner;

/// True if this build has kernels for GPUs.
pub const BUILT_IN: bool = cfg!(feature = "cuda");

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
    /// Plans an engine and a session of it.
    pub engine: Planner,
    /// Bytes taken by factoring the second moments of this many inputs, besides the result.
    pub factor: fn(usize) -> usize,
    /// Most bytes taken by rounding a weight of this shape to a trellis code, besides moments and their factor.
    pub trellis: fn(TrellisScheme, Dims) -> usize,
}

/// A GPU as its driver describes it.
#[derive(Clone, Debug)]
pub struct GpuFound {
    /// E.g. `NVIDIA H200`.
    pub name: String,
    /// Its total memory, in bytes.
    pub memory_bytes: u64,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// The CUDA version that the driver supports, e.g. (13, 0).
    pub driver_cuda: (i32, i32),
    /// True if CUDA's Multi-Process Service shares it between processes.
    pub multi_process: bool,
    /// The rate at which its memory was read, in bytes per second; `None` if too little of it was free.
    pub bandwidth: Option<f64>,
    /// The rate at which the computer's memory was copied to it, in bytes per second, likewise.
    pub copied: Option<f64>,
}
