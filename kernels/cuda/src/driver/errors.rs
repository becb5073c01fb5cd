//! Errors of the driver.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use nq_kernels::{Error, Result};

/// Converts a driver's result to this crate's error.
pub(super) fn check<T>(what: &'static str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|e| match e.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::DeviceMemory { what },
        _ => {
            let name = e.error_name().map_or("?".into(), |n| n.to_string_lossy());
            let text = e.error_string().map_or("?".into(), |n| n.to_string_lossy());
            Error::Cuda {
                what,
                why: format!("{name}: {text}"),
            }
        }
    })
}
