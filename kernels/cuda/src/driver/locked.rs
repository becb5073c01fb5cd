//! Page-locked host memory that kernels read over PCIe.

use super::errors::check;
use super::gpu::Gpu;
use super::memory::{Allocation, Buffer, Region, allocated};
use super::stream::Stream;
use cudarc::driver::sys;
use nq_kernels::{Error, Result};
use std::sync::Arc;

/// Bytes in page-locked host memory, which the host writes once and kernels read from then on.
pub struct Locked {
    memory: Arc<Allocation>,
    len: usize,
}

impl Gpu {
    /// Allocates `len` bytes, all zero; none on a dry device, whose account counts no host memory.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if the system does not lock so much.
    pub fn locked(&self, what: &'static str, len: usize) -> Result<Locked> {
        let (len, memory) = if self.is_dry() {
            (0, Allocation::device(self, what, 0)?)
        } else {
            let bytes = allocated::<u8>(what, len)?;
            (len, Allocation::large_host(self, what, bytes)?)
        };
        Ok(Locked {
            memory: Arc::new(memory),
            len,
        })
    }
}

impl Locked {
    /// The bytes, which no kernel reads yet: a share of them in a graph, or in another owner, is an error.
    ///
    /// # Errors
    /// [`Error::Cuda`] if they are shared.
    pub(crate) fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        let len = self.len;
        match Arc::get_mut(&mut self.memory) {
            Some(memory) => {
                let bytes = memory.address(0).0 as *mut u8;
                // SAFETY: `len` initialized bytes; nobody else has them.
                Ok(unsafe { std::slice::from_raw_parts_mut(bytes, len) })
            }
            None => Err(Error::Cuda {
                what: "writing memory that kernels read",
                why: "a recorded step has it".into(),
            }),
        }
    }

    pub(super) fn region(&self) -> Region<'_> {
        Region {
            memory: &self.memory,
            len: self.len,
            value_bytes: 1,
        }
    }
}

impl Stream {
    /// Copies `len` bytes from index `at` of `from` to index `to_at` of `to`, in order with the stream's other work.
    ///
    /// # Errors
    /// [`Error::Shape`] if they are not within either; [`Error::Cuda`] while a graph is recorded; errors of the driver.
    pub(crate) fn write_locked(
        &self,
        to: &Buffer<u8>,
        to_at: usize,
        from: &Locked,
        at: usize,
        len: usize,
    ) -> Result<()> {
        let o = self.operands("write_locked");
        self.refuse_recording(o.op())?;
        let to = o.part("room for an expert", to, to_at, &[len])?;
        let from = o.locked("an expert", from, at, &[len])?;
        self.gpu().0.bind()?;
        // SAFETY: both ranges are in bounds. Device memory is freed when work that uses it has ended, and so is this
        // kind of host memory, in which nobody writes any more.
        let copied = unsafe { sys::cuMemcpyAsync(to.0, from.0, len, self.raw()) };
        check("copying an expert to the GPU", copied.result())
    }
}
