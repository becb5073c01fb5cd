//! Devices that run models, and their memory.

use crate::error::{Error, Result};
use crate::gpu;
pub use crate::host::{available_memory, peak_memory, total_memory};
use crate::interface::{DeviceChoice, Ordinals};
use nq_kernels::grad::{CpuOps, GradWork};
use std::fs;
use std::path::Path;

/// A device that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// The GPU of this ordinal.
    Cuda(usize),
}

impl Device {
    /// Runs `work` on this device; on a GPU, f32 products round their operands to TF32.
    ///
    /// # Errors
    /// An absent device; errors of the driver. Errors of the work are in its output.
    pub fn run<W: GradWork>(self, work: W) -> Result<W::Output> {
        match self {
            Device::Cpu => Ok(work.run(&CpuOps)),
            Device::Cuda(n) => gpu::run(n, work),
        }
    }
}

impl DeviceChoice {
    /// The GPUs to use together, if there are to be several.
    ///
    /// # Errors
    /// As [`DeviceChoice::resolve`].
    pub fn several(self) -> Result<Option<Ordinals>> {
        let numbers = match self {
            DeviceChoice::Gpus(numbers) => numbers,
            DeviceChoice::AllGpus => {
                let all = gpu::count().map_err(|why| Error::Device {
                    device: "cuda:all".into(),
                    why,
                })?;
                let all: Vec<usize> = (0..all).collect();
                match (all.len(), Ordinals::new(&all)) {
                    (_, Some(numbers)) => numbers,
                    (1, None) => return Ok(None),
                    (n, None) => {
                        return Err(Error::Device {
                            device: "cuda:all".into(),
                            why: format!("a model runs on at most 8 GPUs, and there are {n}"),
                        });
                    }
                }
            }
            DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Cuda(_) => return Ok(None),
        };
        for &ordinal in numbers.as_slice() {
            DeviceChoice::Cuda(ordinal).resolve()?;
        }
        Ok(Some(numbers))
    }

    /// The device to use. `Auto` takes the first usable GPU, or else the CPU.
    ///
    /// # Errors
    /// [`Error::Device`] if the requested device is absent, or if several are requested for what runs on one; the
    /// message says what is missing.
    pub fn resolve(self) -> Result<Device> {
        let ordinal = match self {
            DeviceChoice::Gpus(_) | DeviceChoice::AllGpus => match self.several()? {
                None => 0,
                Some(numbers) => {
                    return Err(Error::Device {
                        device: numbers.to_string(),
                        why: "this runs on one device".into(),
                    });
                }
            },
            DeviceChoice::Cpu => return Ok(Device::Cpu),
            DeviceChoice::Auto => {
                return Ok(gpu::first().map_or(Device::Cpu, Device::Cuda));
            }
            DeviceChoice::Cuda(n) => n,
        };
        let why = match gpu::count() {
            Ok(count) if ordinal < count => return Ok(Device::Cuda(ordinal)),
            Ok(count) => format!("expected an ordinal below {count}, the number of GPUs found"),
            Err(why) => why,
        };
        Err(Error::Device {
            device: format!("cuda:{ordinal}"),
            why,
        })
    }

    /// Why `Auto` takes the CPU although the machine has an NVIDIA GPU and this build has kernels for
    /// it. `None` if it takes the GPU, if there is none, or if `CUDA_VISIBLE_DEVICES` hides it.
    pub fn why_no_gpu() -> Option<String> {
        let why = gpu::first().err().filter(|_| cfg!(feature = "cuda"))?;
        let hidden = |v: std::ffi::OsString| v.is_empty() || v == "-1";
        if std::env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(hidden) {
            return None;
        }
        has_nvidia_gpu(Path::new("/")).then_some(why)
    }
}

/// True if the system below `root` has an NVIDIA GPU: its driver is loaded, or the PCI bus shows a
/// display controller (class 03) of that vendor.
fn has_nvidia_gpu(root: &Path) -> bool {
    if root.join("proc/driver/nvidia/version").exists() {
        return true;
    }
    let devices = fs::read_dir(root.join("sys/bus/pci/devices"));
    devices.into_iter().flatten().flatten().any(|device| {
        let is = |file: &str, start: &str| {
            fs::read_to_string(device.path().join(file)).is_ok_and(|t| t.starts_with(start))
        };
        is("vendor", "0x10de") && is("class", "0x03")
    })
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
}

/// All GPUs of the machine. Each is opened, its kernels are loaded and its bandwidth is measured.
///
/// # Errors
/// [`Error::Kernel`] if there is no driver or no device, or for the first device that cannot be used.
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
            multi_process: info.multi_process,
            bandwidth: gpu.memory_bandwidth().ok(),
        });
    }
    Ok(found)
}

/// Measures how fast a GPU's memory is read. The device stays open, so that repeated measurements
/// time nothing else.
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

    /// Measured bytes per second.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn read_bandwidth(&self) -> Result<f64> {
        Ok(self.0.memory_bandwidth()?)
    }

    /// Bytes of the last cache before the memory.
    pub fn cache_bytes(&self) -> u64 {
        self.0.info().l2_bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_seen_without_its_driver() {
        let root = tempfile::tempdir().unwrap();
        let add = |name: &str, vendor: &str, class: &str| {
            let device = root.path().join("sys/bus/pci/devices").join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), vendor).unwrap();
            fs::write(device.join("class"), class).unwrap();
        };
        assert!(!has_nvidia_gpu(root.path()));
        add("0000:00:01.0", "0x8086\n", "0x030000\n");
        add("0000:01:00.1", "0x10de\n", "0x040300\n"); // its sound
        assert!(!has_nvidia_gpu(root.path()));
        add("0000:01:00.0", "0x10de\n", "0x030200\n");
        assert!(has_nvidia_gpu(root.path()));
    }
}
