//! Properties of a device.

use std::fmt;

/// Properties of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its number among the machine's devices.
    pub ordinal: usize,
    /// The driver's name for it, e.g. `NVIDIA H200`.
    pub name: String,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// Most dynamic shared memory of a block, in bytes.
    pub shared_memory: usize,
    /// Cache shared by all multiprocessors, in bytes.
    pub l2_bytes: usize,
    /// Total memory of the device, in bytes.
    pub memory: usize,
    /// CUDA version of the driver, e.g. 13000.
    pub driver: i32,
    /// True if kernels of other processes may run at the same time (CUDA's Multi-Process Service).
    pub multi_process: bool,
}

/// True if the kernels for devices with so many bytes of shared memory for a block are those for at most 99 KiB:
/// `SMALL_BLOCKS` of `cuda/common.cuh`.
pub(crate) fn has_small_blocks(shared_memory: usize) -> bool {
    shared_memory < 163 << 10
}

impl GpuInfo {
    /// True if kernels copy in bulk and blocks have much shared memory: `__CUDA_ARCH__ >= 900 && !SMALL_BLOCKS` of the
    /// kernels.
    pub(crate) fn has_large_blocks(&self) -> bool {
        self.capability >= (9, 0) && !has_small_blocks(self.shared_memory)
    }
}

impl fmt::Display for GpuInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        write!(
            f,
            "cuda:{} ({}, sm_{major}{minor})",
            self.ordinal, self.name
        )
    }
}
