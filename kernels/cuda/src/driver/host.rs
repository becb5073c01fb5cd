//! Work of a stream that the CPU does.

use super::call::{Call, HostWork};
use super::errors::check;
use super::gpu::Gpu;
use super::memory::{Allocation, Buffer, MemoryKind, allocated};
use super::stream::Stream;
use cudarc::driver::sys;
use nq_kernels::{Error, Result};
use std::ffi::c_void;
use std::sync::Arc;

/// Page-locked memory for the copies of [`Stream::on_host`]. Dropping it waits for the work of all streams.
pub struct HostStage {
    memory: Arc<Allocation>,
    len: usize,
}

impl Gpu {
    /// Allocates room for `len` values, of both buffers together.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn host_stage(&self, what: &'static str, len: usize) -> Result<HostStage> {
        let memory =
            Allocation::host(self, what, allocated::<f32>(what, len)?, MemoryKind::Mapped)?;
        Ok(HostStage {
            memory: Arc::new(memory),
            len,
        })
    }
}

impl Drop for HostStage {
    fn drop(&mut self) {
        // Calls that are queued own the memory too; the last of them would free it on the driver's thread,
        // where that is not allowed.
        let _ = self.memory.gpu().settle();
    }
}

/// Runs a call that was queued once, and frees it.
unsafe extern "C" fn run_once(call: *mut c_void) {
    // SAFETY: made by `Arc::into_raw` for this single run.
    unsafe { Arc::from_raw(call.cast_const().cast::<Call>()) }.run();
}

/// Runs a call that a graph owns.
unsafe extern "C" fn run_recorded(call: *mut c_void) {
    // SAFETY: the graph that runs keeps the call.
    unsafe { &*call.cast_const().cast::<Call>() }.run();
}

impl Stream {
    /// Runs `work` on the CPU, in order with the stream's other work, on the first `n` values of `x` and
    /// the first `k` of `y`; what it makes of the former returns to `x`. It can be recorded in a graph.
    ///
    /// # Errors
    /// [`Error::Shape`] if they do not fit `stage` or do not belong to this device; errors of the driver.
    pub fn on_host(
        &self,
        stage: &HostStage,
        work: &Arc<HostWork>,
        x: &mut Buffer<f32>,
        n: usize,
        y: &Buffer<f32>,
        k: usize,
    ) -> Result<()> {
        let o = self.operands("on_host");
        if !stage.memory.gpu().is(self.gpu()) || n.saturating_add(k) > stage.len {
            let expected = format!("within {} of {}", stage.len, stage.memory.gpu().info());
            return o.refuse(
                "values",
                expected,
                format!("{n} + {k} for {}", self.gpu().info()),
            );
        }
        let (x, y) = (o.of("x", x, &[n])?, o.of("y", y, &[k])?);
        self.keep(&stage.memory);
        let call = Arc::new(Call {
            work: Arc::clone(work),
            memory: Arc::clone(&stage.memory),
            first: n,
            second: k,
        });
        let host = |at: usize| stage.memory.address(at * size_of::<f32>()).0;
        self.gpu().0.bind()?;
        // SAFETY: all ranges are in bounds; the memory is kept until the copies are done: by a graph, or by
        // `stage`, which waits when it is dropped.
        let copied = |to: u64, from: u64, n: usize| unsafe {
            let bytes = n * size_of::<f32>();
            check(
                "copying rows for the CPU",
                sys::cuMemcpyAsync(to, from, bytes, self.raw()).result(),
            )
        };
        copied(host(0), x.0, n)?;
        copied(host(n), y.0, k)?;
        let recorded = self.keep_call(&call);
        let function: sys::CUhostFn = Some(if recorded { run_recorded } else { run_once });
        let pointer = Arc::into_raw(call);
        // SAFETY: the pointer stays valid until the function has run: see both functions.
        let queued = unsafe {
            sys::cuLaunchHostFunc(self.raw(), function, pointer.cast_mut().cast()).result()
        };
        if recorded || queued.is_err() {
            // SAFETY: the graph has its own share; what is not queued, nobody else takes.
            drop(unsafe { Arc::from_raw(pointer) });
        }
        queued.map_err(|e| Error::Cuda {
            what: "queueing work of the CPU",
            why: e.to_string(),
        })?;
        copied(x.0, host(0), n)
    }
}
