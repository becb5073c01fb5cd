//! Which device runs a model, and what it has room for.

use crate::error::{Error, Result};
use crate::gpu;
use crate::load::DeviceChoice;
use nq_kernels::grad::{CpuOps, GradWork};

/// A device that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// The GPU of this ordinal.
    Cuda(usize),
}

impl Device {
    /// Does `work` here; a GPU's products of f32 round operands to TF32.
    ///
    /// # Errors
    /// An absent device, or the driver's; what comes of the work is within.
    pub fn run<W: GradWork>(self, work: W) -> Result<W::Output> {
        match self {
            Device::Cpu => Ok(work.run(&CpuOps)),
            Device::Cuda(n) => gpu::run(n, work),
        }
    }
}

impl DeviceChoice {
    /// The device to use here. `Auto` takes the first GPU if there is one that can be used.
    ///
    /// # Errors
    /// [`Error::Device`] if the one asked for is absent, saying what is missing.
    pub fn resolve(self) -> Result<Device> {
        let ordinal = match self {
            DeviceChoice::Cpu => return Ok(Device::Cpu),
            DeviceChoice::Auto => {
                return Ok(gpu::count().map_or(Device::Cpu, |_| Device::Cuda(0)));
            }
            DeviceChoice::Cuda(n) => n,
        };
        let why = match gpu::count() {
            Ok(count) if ordinal < count => return Ok(Device::Cuda(ordinal)),
            Ok(count) => format!("there are {count} devices, counted from 0"),
            Err(why) => why,
        };
        Err(Error::Device {
            device: format!("cuda:{ordinal}"),
            why,
        })
    }

    /// Why `Auto` does not take a GPU, where this build could use one; `None` if it does.
    pub fn why_no_gpu() -> Option<String> {
        gpu::count().err().filter(|_| cfg!(feature = "cuda"))
    }
}

/// A GPU as its driver describes it.
#[derive(Clone, Debug)]
pub struct GpuFound {
    /// E.g. `NVIDIA H200`.
    pub name: String,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// The CUDA version that the driver is for, e.g. (13, 0).
    pub driver_cuda: (i32, i32),
}

/// The machine's GPUs, each opened and its kernels loaded.
///
/// # Errors
/// [`Error::Kernel`] if there is no driver or no device, or the first that cannot be used.
#[cfg(feature = "cuda")]
pub fn gpus() -> Result<Vec<GpuFound>> {
    use nq_kernels::cuda::{Gpu, device_count};
    let mut found = Vec::new();
    for ordinal in 0..device_count()? {
        let gpu = Gpu::open(ordinal)?;
        let info = gpu.info();
        found.push(GpuFound {
            name: info.name.clone(),
            memory_bytes: info.memory as u64,
            capability: info.capability,
            multiprocessors: info.multiprocessors,
            driver_cuda: (info.driver / 1000, info.driver % 1000 / 10),
        });
    }
    Ok(found)
}

/// Measures how fast a GPU's memory is read. The device stays open, so that nothing but that runs
/// between the repeats of a test.
#[cfg(feature = "cuda")]
pub struct GpuMeter(nq_kernels::cuda::Gpu);

#[cfg(feature = "cuda")]
impl GpuMeter {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// An absent device; [`Error::Kernel`].
    pub fn open(ordinal: usize) -> Result<Self> {
        Ok(GpuMeter(nq_kernels::cuda::Gpu::open(ordinal)?))
    }

    /// Bytes per second.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn read_bandwidth(&self) -> Result<f64> {
        // Large against the cache, and within what is free.
        let bytes = (32 * self.0.info().l2_bytes).min(self.0.free_memory()? / 2);
        Ok(self.0.read_bandwidth(bytes)?)
    }

    /// Bytes of the cache before the memory.
    pub fn cache_bytes(&self) -> u64 {
        self.0.info().l2_bytes as u64
    }
}

/// Bytes that the system can still hand out without swapping, where it says so.
pub fn available_memory() -> Option<u64> {
    proc_bytes("meminfo", "MemAvailable:")
}

/// Bytes of the machine's memory, where the system says so.
pub fn total_memory() -> Option<u64> {
    proc_bytes("meminfo", "MemTotal:")
}

/// The greatest resident memory of this process so far, in bytes, where the system says so.
pub fn peak_memory() -> Option<u64> {
    proc_bytes("self/status", "VmHWM:")
}

/// Bytes that the line of a file in /proc gives which begins so.
fn proc_bytes(file: &str, line: &str) -> Option<u64> {
    let info = std::fs::read_to_string(format!("/proc/{file}")).ok()?;
    let kib = info.lines().find_map(|l| l.strip_prefix(line))?;
    let kib: u64 = kib.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
