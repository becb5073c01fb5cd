//! Properties of a device.

use std::fmt;

/// A compute capability, or a version of CUDA: 9.0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 9 of 9.0.
    pub major: i32,
    /// 0 of 9.0.
    pub minor: i32,
}

impl Version {
    /// `major.minor`
    pub const fn new(major: i32, minor: i32) -> Self {
        Version { major, minor }
    }

    /// From the driver's number for a version of CUDA, e.g. 13000.
    pub(super) const fn of_cuda(number: i32) -> Self {
        Version::new(number / 1000, number % 1000 / 10)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Properties of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its number among the machine's devices.
    pub ordinal: usize,
    /// The driver's name for it, e.g. `NVIDIA H200`.
    pub name: String,
    /// Compute capability.
    pub capability: Version,
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
        self.capability >= Version::new(9, 0) && !has_small_blocks(self.shared_memory)
    }
}

impl fmt::Display for GpuInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Version { major, minor } = self.capability;
        write!(
            f,
            "cuda:{} ({}, sm_{major}{minor})",
            self.ordinal, self.name
        )
    }
}
