//! Memory that several devices share: of one of them, which the others reach, or of the host.

use super::errors::check;
use super::gpu::Gpu;
use super::memory::{Allocation, MemoryKind, Region, allocated};
use bytemuck::Pod;
use cudarc::driver::sys::{self, CUresult};
use nq_kernels::Result;
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError};

impl Gpu {
    /// Lets this device's kernels reach the memory of `other`; false if its connections do not allow it.
    pub fn reach(&self, other: &Gpu) -> Result<bool> {
        if self.reaches(other) {
            return Ok(true);
        }
        let mut can = 0;
        self.0.bind()?;
        // SAFETY: both devices are valid, and so is the other one's context; one integer is written.
        let enabled = unsafe {
            let asked = sys::cuDeviceCanAccessPeer(&raw mut can, self.0.device, other.0.device);
            check("asking which memory a GPU reaches", asked.result())?;
            if can == 0 {
                return Ok(false);
            }
            sys::cuCtxEnablePeerAccess(other.0.context, 0)
        };
        if enabled != CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            check("reaching the memory of another GPU", enabled.result())?;
        }
        let mut peers = self.0.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.push(other.0.context as usize);
        Ok(true)
    }

    /// True if this device's kernels reach the memory of `other`.
    pub(super) fn reaches(&self, other: &Gpu) -> bool {
        let peers = self.0.peers.lock().unwrap_or_else(PoisonError::into_inner);
        self.is(other) || peers.contains(&(other.0.context as usize))
    }
}

/// Values in memory that several devices reach. Cloning shares them.
pub(crate) struct Common<T> {
    memory: Arc<Allocation>,
    len: usize,
    marker: PhantomData<T>,
}

impl<T> Clone for Common<T> {
    fn clone(&self) -> Self {
        Common {
            memory: Arc::clone(&self.memory),
            len: self.len,
            marker: PhantomData,
        }
    }
}

impl<T: Pod> Common<T> {
    /// Allocates `len` values, all bytes zero, in memory of `gpu`, or with `on_host` in page-locked memory of the host,
    /// of which a dry device has none.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub(crate) fn new(gpu: &Gpu, what: &'static str, len: usize, on_host: bool) -> Result<Self> {
        let bytes = allocated::<T>(what, len)?;
        let memory = match (on_host, gpu.is_dry()) {
            (false, _) => Allocation::device(gpu, what, bytes)?,
            (true, false) => Allocation::host(gpu, what, bytes, MemoryKind::Mapped)?,
            (true, true) => Allocation::device(gpu, what, 0)?,
        };
        Ok(Common {
            memory: Arc::new(memory),
            len,
            marker: PhantomData,
        })
    }

    /// True if both are the same memory.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
    }

    pub(super) fn region(&self) -> Region<'_> {
        Region {
            memory: &self.memory,
            len: self.len,
            value_bytes: size_of::<T>(),
        }
    }
}
