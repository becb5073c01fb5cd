//! Which device runs a model, and what it has room for.

use crate::error::{Error, Result};
use crate::load::DeviceChoice;

/// A device that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
}

impl DeviceChoice {
    /// The device to use here. `Auto` takes the CPU where there is nothing better.
    ///
    /// # Errors
    /// [`Error::Device`] if the one asked for is absent, saying what is missing.
    pub fn resolve(self) -> Result<Device> {
        match self {
            DeviceChoice::Auto | DeviceChoice::Cpu => Ok(Device::Cpu),
            DeviceChoice::Cuda(n) => Err(Error::Device {
                device: format!("cuda:{n}"),
                why: "this nq was built without the feature `cuda`".into(),
            }),
        }
    }
}

/// Bytes that the system can still hand out without swapping, where it says so.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
