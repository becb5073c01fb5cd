//! Finds GPUs and checks whether this build can use them.

use super::code::{CodeTarget, target_for, too_old};
use super::errors::check;
use super::info::Version;
use cudarc::driver::{result, sys};
use nq_kernels::{Error, Result};

/// CUDA version of the oldest driver whose library has all functions called here (12.0).
const OLDEST_DRIVER: i32 = 12_000;

/// The number of devices; an error if there is no driver library, it is too old, or has no device.
///
/// # Errors
/// [`Error::Cuda`], saying which.
pub fn device_count() -> Result<usize> {
    let none = |why: String| Error::Cuda {
        what: "looking for a GPU",
        why,
    };
    // SAFETY: only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(none("no NVIDIA driver: libcuda is not installed".into()));
    }
    check("starting the CUDA driver", result::init())?;
    let version = driver_version()?;
    if version < OLDEST_DRIVER {
        return Err(none(too_old(version, Version::of_cuda(OLDEST_DRIVER))));
    }
    let count = check("counting devices", result::device::get_count())?;
    match count {
        0 => Err(none("the driver is there, but no device".into())),
        n => Ok(n as usize),
    }
}

/// Checks whether device `ordinal` can run this build's kernels, without opening it.
///
/// # Errors
/// Errors of [`device_count`]; [`Error::Cuda`] if there is no such device, or the kernels have no code
/// for it or need a newer driver.
pub fn check_device(ordinal: usize) -> Result<()> {
    let device = find(ordinal)?;
    code_for(device, ordinal).map(|_| ())
}

/// The device with number `ordinal`.
pub(super) fn find(ordinal: usize) -> Result<sys::CUdevice> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(Error::Cuda {
            what: "opening a GPU",
            why: format!("there is no cuda:{ordinal}; devices: {count}"),
        });
    }
    check("opening a GPU", result::device::get(ordinal as i32))
}

/// The code that a device runs.
pub(super) fn code_for(device: sys::CUdevice, ordinal: usize) -> Result<CodeTarget> {
    target_for(capability(device)?, driver_version()?).map_err(|why| Error::Cuda {
        what: "looking for a GPU",
        why: match result::device::get_name(device) {
            Ok(name) => format!("cuda:{ordinal} ({}): {why}", name.trim_end_matches('\0')),
            Err(_) => format!("cuda:{ordinal}: {why}"),
        },
    })
}

/// CUDA version of the driver, e.g. 13000.
pub(super) fn driver_version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: writes one integer.
    check("asking the driver's version", unsafe {
        sys::cuDriverGetVersion(&raw mut version).result()
    })?;
    Ok(version)
}

/// Its compute capability.
pub(super) fn capability(device: sys::CUdevice) -> Result<Version> {
    use sys::CUdevice_attribute_enum as A;
    let get = |attribute| {
        // SAFETY: the device is valid; one integer is written.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        check("asking for a GPU's properties", value)
    };
    let capability = Version::new(
        get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    #[cfg(feature = "imitate")]
    if let Some(imitation) = super::imitate::imitation()? {
        return imitation.instead_of(capability);
    }
    Ok(capability)
}
