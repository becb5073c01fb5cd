//! Work in order: launches, copies, graphs, and points to wait for.

use super::{Buffer, Gpu, Pinned, Timed, check};
use crate::cpu::Key;
use crate::error::{Error, Result};
use bytemuck::Pod;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

impl Gpu {
    /// A stream: work in it runs in order.
    ///
    /// # Errors
    /// The driver's.
    pub fn stream(&self) -> Result<Stream> {
        self.0.bind()?;
        let handle = result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(Stream(Arc::new(StreamInner {
            gpu: self.clone(),
            handle: check("making a stream", handle)?,
        })))
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchShape {
    /// Blocks.
    pub(crate) grid: (usize, usize, usize),
    /// Threads of a block.
    pub(crate) threads: usize,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: usize,
    /// May start before the kernel in front of it has ended.
    pub(crate) overlap: bool,
}

/// Work in order. Cloning shares it.
#[derive(Clone)]
pub struct Stream(Arc<StreamInner>);

struct StreamInner {
    gpu: Gpu,
    handle: sys::CUstream,
}

// SAFETY: a stream may be used from any thread once the context is current there.
unsafe impl Send for StreamInner {}
// SAFETY: as above; the driver orders calls from several threads.
unsafe impl Sync for StreamInner {}

impl Stream {
    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// As the driver knows it.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.0.handle
    }

    /// Launches kernel `name` with `args`, the one structure it takes by value.
    ///
    /// # Safety
    /// `args` must have the kernel's layout, and every address in it must point to enough
    /// memory, of the right kind and alive until the kernel has ended, for what the kernel
    /// reads and writes with this shape.
    pub(crate) unsafe fn launch<A: Copy>(
        &self,
        name: &str,
        shape: LaunchShape,
        args: &A,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.launch_cluster(name, shape, 1, args) }
    }

    /// As [`Stream::launch`], in clusters of `cluster` blocks that follow one another along x.
    ///
    /// # Safety
    /// That of [`Stream::launch`].
    pub(crate) unsafe fn launch_cluster<A: Copy>(
        &self,
        name: &str,
        shape: LaunchShape,
        cluster: usize,
        args: &A,
    ) -> Result<()> {
        let function = self.0.gpu.reserve_shared(name, shape.shared)?;
        self.0.gpu.0.bind()?;
        // SAFETY: structures of integers and unions of them; all zero is valid.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if shape.overlap && self.0.gpu.info().capability >= (9, 0) {
            attributes[count].id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count]
                .value
                .programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if cluster > 1 {
            attributes[count].id =
                sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: cluster as u32,
                y: 1,
                z: 1,
            };
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid.0 as u32,
            gridDimY: shape.grid.1 as u32,
            gridDimZ: shape.grid.2 as u32,
            blockDimX: shape.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared as u32,
            hStream: self.0.handle,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut params = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the caller vouches for the arguments; the driver copies them before it
        // returns.
        let result = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function,
                params.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        result.result().map_err(|e| Error::Cuda {
            what: "launching a kernel",
            why: format!("{name}: {e}"),
        })
    }

    /// Runs `body`, which queues one operation, between two events if the device's profile is
    /// on. In a graph too: the events are part of it, and each recording has its own.
    ///
    /// # Errors
    /// `body`'s; the driver's.
    pub fn timed(&self, key: Key, bytes: usize, body: impl FnOnce() -> Result<()>) -> Result<()> {
        let gpu = &self.0.gpu;
        if !gpu.is_profiling() {
            return body();
        }
        gpu.0.bind()?;
        let event = || {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
            check("making an event", event)
        };
        let events = [event()?, event()?];
        let record = |event| {
            let mut state = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            // SAFETY: the stream and the event are valid. "External" makes a node of a graph
            // that sets the event, rather than an edge of it.
            let outcome = unsafe {
                sys::cuStreamIsCapturing(self.0.handle, &raw mut state)
                    .result()
                    .and_then(|()| {
                        let recording =
                            state != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                        sys::cuEventRecordWithFlags(event, self.0.handle, u32::from(recording))
                            .result()
                    })
            };
            check("recording an event", outcome)
        };
        record(events[0])?;
        body()?;
        record(events[1])?;
        let mut timed = gpu.0.timed.lock().unwrap_or_else(|e| e.into_inner());
        timed.push(Timed { key, bytes, events });
        Ok(())
    }

    /// Copies the values `range` of `from` to index `at` of `to`, in order with the stream's
    /// other work. `from` must not change before that is done.
    ///
    /// # Errors
    /// [`Error::Shape`] if they do not fit.
    pub fn write<T: Pod>(
        &self,
        to: &mut Buffer<T>,
        at: usize,
        from: &Pinned<T>,
        range: Range<usize>,
    ) -> Result<()> {
        to.check_range("device write", at, range.len())?;
        let values = from
            .values()
            .get(range.clone())
            .ok_or_else(|| Error::Shape {
                op: "device write",
                what: "pinned values",
                expected: format!("within {}", from.len()),
                found: format!("{range:?}"),
            })?;
        self.0.gpu.0.bind()?;
        // SAFETY: both ranges are in bounds. The pinned memory's owner waits for the stream
        // before it writes or frees it, as `Pinned` asks.
        check("copying to the GPU", unsafe {
            result::memcpy_htod_async(to.at(at).0, values, self.0.handle)
        })
    }

    /// Copies `n` values from index `at` of `from`, in order with the stream's other work.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are not so many.
    pub fn read<T: Pod>(
        &self,
        from: &Buffer<T>,
        at: usize,
        to: &mut Pinned<T>,
        n: usize,
    ) -> Result<()> {
        from.check_range("device read", at, n)?;
        let len = to.len();
        let to = to.values_mut().get_mut(..n).ok_or_else(|| Error::Shape {
            op: "device read",
            what: "pinned values",
            expected: format!("at least {n}"),
            found: len.to_string(),
        })?;
        self.0.gpu.0.bind()?;
        // SAFETY: both ranges are in bounds; readers wait for the stream first.
        check("copying from the GPU", unsafe {
            result::memcpy_dtoh_async(to, from.at(at).0, self.0.handle)
        })
    }

    /// Waits until the stream's work is done.
    ///
    /// # Errors
    /// The first error of that work.
    pub fn synchronize(&self) -> Result<()> {
        self.0.gpu.0.bind()?;
        // SAFETY: the stream is valid.
        check("running kernels", unsafe {
            result::stream::synchronize(self.0.handle)
        })
    }

    /// True if all of the stream's work is done.
    ///
    /// # Errors
    /// The first error of that work.
    pub fn is_done(&self) -> Result<bool> {
        self.0.gpu.0.bind()?;
        // SAFETY: the stream is valid.
        let state = unsafe { sys::cuStreamQuery(self.0.handle) };
        match state {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("running kernels", other.result()).map(|()| true),
        }
    }

    /// Records the launches of `body` as a graph instead of running them.
    ///
    /// # Errors
    /// `body`'s and the driver's.
    pub fn record(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.0.gpu.0.bind()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is valid; capture is always ended below.
        check("recording a graph", unsafe {
            result::stream::begin_capture(self.0.handle, mode)
        })?;
        let outcome = body();
        // SAFETY: a capture is under way in this stream.
        let graph = check("recording a graph", unsafe {
            result::stream::end_capture(self.0.handle)
        });
        outcome?;
        let graph = graph?;
        // SAFETY: the graph is whole; its executable form does not need it any more.
        let executable = unsafe {
            let executable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            check("making a graph", executable)?
        };
        Ok(Graph {
            gpu: self.0.gpu.clone(),
            handle: executable,
        })
    }

    /// Runs a graph.
    ///
    /// # Errors
    /// The driver's.
    pub fn run(&self, graph: &Graph) -> Result<()> {
        self.0.gpu.0.bind()?;
        // SAFETY: both are valid; whoever recorded the graph keeps its memory alive.
        check("running a graph", unsafe {
            result::graph::launch(graph.handle, self.0.handle)
        })
    }

    /// A point in the stream's work.
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&self) -> Result<Mark> {
        self.0.gpu.0.bind()?;
        let handle = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let mark = Mark {
            gpu: self.0.gpu.clone(),
            handle: check("making an event", handle)?,
        };
        // SAFETY: both handles are valid.
        check("recording an event", unsafe {
            result::event::record(mark.handle, self.0.handle)
        })?;
        Ok(mark)
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_ok() {
            // SAFETY: made by `Gpu::stream`. Its work ends first, so that what that work uses
            // can be freed.
            unsafe {
                let _ = result::stream::synchronize(self.handle);
                let _ = result::stream::destroy(self.handle);
            }
        }
    }
}

/// A recorded sequence of launches.
pub struct Graph {
    gpu: Gpu,
    handle: sys::CUgraphExec,
}

// SAFETY: as for streams.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_ok() {
            // SAFETY: made by `Stream::record`.
            let _ = unsafe { result::graph::exec_destroy(self.handle) };
        }
    }
}

/// A point in a stream's work.
pub struct Mark {
    gpu: Gpu,
    handle: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Mark {}

impl Mark {
    /// Waits until the work before it is done.
    ///
    /// # Errors
    /// The first error of that work.
    pub fn wait(&self) -> Result<()> {
        self.gpu.0.bind()?;
        // SAFETY: the event was recorded.
        check("running kernels", unsafe {
            result::event::synchronize(self.handle)
        })
    }

    /// Seconds from `self` to `later`, both of which have passed.
    ///
    /// # Errors
    /// The driver's, e.g. if they have not.
    pub fn seconds_until(&self, later: &Mark) -> Result<f64> {
        self.gpu.0.bind()?;
        // SAFETY: both events were recorded.
        let ms = unsafe { result::event::elapsed(self.handle, later.handle) };
        Ok(f64::from(check("timing kernels", ms)?) / 1e3)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_ok() {
            // SAFETY: made by `Stream::mark`.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}
