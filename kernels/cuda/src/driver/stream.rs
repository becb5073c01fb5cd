//! Work in order: launches, copies, graphs, and marks to wait for.

use super::call::Call;
use super::errors::check;
use super::gpu::{Gpu, PartTimes, Timed};
use super::launch::{Attributes, LaunchShape};
use super::memory::Allocation;
use crate::gather::room::GatheredRows;
use crate::kernel::Instance;
use crate::trellis::room::TrellisRoom;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use nq_kernels::profile::Key;
use nq_kernels::{Error, Result};
use nq_model::Dims;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

impl Gpu {
    /// Creates a stream, whose work runs in order.
    pub fn stream(&self) -> Result<Stream> {
        self.stream_with(StreamOptions::default())
    }

    /// Creates a stream.
    pub fn stream_with(&self, options: StreamOptions) -> Result<Stream> {
        let StreamOptions {
            room,
            gathered,
            beside,
            last,
        } = options;
        let create = || {
            #[cfg(test)]
            if super::trace::is_imagined(self.info()) {
                return Ok(ptr::null_mut());
            }
            self.0.bind()?;
            let kind = result::stream::StreamKind::NonBlocking;
            // The driver takes the least number that it knows.
            let priority = if last { 0 } else { i32::MIN };
            let handle = result::stream::create_with_priority(kind, priority);
            check("making a stream", handle)
        };
        let stream = Arc::new(StreamInner {
            gpu: self.clone(),
            handle: create()?,
            is_recording: AtomicBool::new(false),
            beginning: Mutex::default(),
            kept: Mutex::default(),
            alone: OnceLock::new(),
            room,
            gathered,
            beside,
        });
        let mut all = lock(&STREAMS);
        all.retain(|s| s.strong_count() > 0);
        all.push(Arc::downgrade(&stream));
        Ok(Stream(stream))
    }

    /// Waits for the work queued in all streams so far. Recordings in progress are not work yet:
    /// waiting for the whole device would spoil them.
    pub(super) fn settle(&self) -> Result<()> {
        let all: Vec<Arc<StreamInner>> = lock(&STREAMS).iter().filter_map(Weak::upgrade).collect();
        for stream in all.iter().filter(|s| s.gpu.is(self)) {
            let _none_begins = lock(&stream.beginning);
            if !stream.is_recording.load(Ordering::Acquire) {
                // SAFETY: the stream is valid.
                check("running kernels", unsafe {
                    result::stream::synchronize(stream.handle)
                })?;
            }
        }
        Ok(())
    }
}

/// All existing streams.
static STREAMS: Mutex<Vec<Weak<StreamInner>>> = Mutex::new(Vec::new());

/// The stream of each device, by ordinal, that ran the last kernel that had to run alone.
static LAST_ALONE: Mutex<BTreeMap<usize, Weak<StreamInner>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a stream is for.
#[derive(Default)]
pub struct StreamOptions {
    /// Memory for products with trellis codes.
    pub room: Option<TrellisRoom>,
    /// Memory for products with sorted inputs.
    pub gathered: Option<GatheredRows>,
    /// True if kernels of another stream of this device wait for kernels of this one: ranks of one model that share a
    /// GPU. A kernel then never holds the device's room while it waits for the one before it, and does not run
    /// alone.
    pub beside: bool,
    /// True if blocks of other streams' kernels start before those of this one's.
    pub last: bool,
}

/// A stream of work in order. Cloning shares it.
#[derive(Clone)]
pub struct Stream(Arc<StreamInner>);

struct StreamInner {
    gpu: Gpu,
    handle: sys::CUstream,
    /// True while launches are recorded in a graph.
    is_recording: AtomicBool,
    /// Held while a recording begins.
    beginning: Mutex<()>,
    /// What the recorded launches use.
    kept: Mutex<GraphMemory>,
    /// The end of the last kernel here that had to run alone: see [`Stream::alone`].
    alone: OnceLock<Mark>,
    /// Memory between the kernels of products with trellis codes, which run one after the other.
    room: Option<TrellisRoom>,
    /// Likewise, of those with sorted inputs.
    gathered: Option<GatheredRows>,
    /// See [`StreamOptions`].
    beside: bool,
}

/// What a graph keeps alive: memory by address, and calls of the CPU.
#[derive(Default)]
struct GraphMemory {
    memory: HashMap<*const Allocation, Arc<Allocation>>,
    calls: Vec<Arc<Call>>,
    /// True if one of the kernels must run alone.
    alone: bool,
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

    /// Its memory for products with trellis codes.
    pub(crate) fn room(&self) -> Option<&TrellisRoom> {
        self.0.room.as_ref()
    }

    /// Its memory for products with sorted inputs.
    pub(crate) fn gathered_rows(&self) -> Option<&GatheredRows> {
        self.0.gathered.as_ref()
    }

    /// The driver's handle.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.0.handle
    }

    /// True if both are the same.
    pub(super) fn is(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn kept(&self) -> MutexGuard<'_, GraphMemory> {
        lock(&self.0.kept)
    }

    /// Keeps memory alive for the graph that is being recorded, if any.
    pub(super) fn keep(&self, memory: &Arc<Allocation>) {
        if self.0.is_recording.load(Ordering::Acquire) {
            let memory = Arc::clone(memory);
            self.kept().memory.insert(Arc::as_ptr(&memory), memory);
        }
    }

    /// Keeps a call for the graph that is being recorded; false if there is none.
    pub(super) fn keep_call(&self, call: &Arc<Call>) -> bool {
        let is_recording = self.0.is_recording.load(Ordering::Acquire);
        if is_recording {
            self.kept().calls.push(Arc::clone(call));
        }
        is_recording
    }

    /// Queues a kernel whose blocks wait for each other, so that all of them must run at once: it starts
    /// after the end of the last such kernel in any other stream of the device. Two that run side by
    /// side could each have only a part of their blocks running, and wait forever.
    pub(crate) fn alone(&self, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.0.is_recording.load(Ordering::Acquire) {
            self.kept().alone = true;
            return launch();
        }
        let mut last = lock(&LAST_ALONE);
        let ordinal = self.0.gpu.info().ordinal;
        let other = last.get(&ordinal).and_then(Weak::upgrade);
        let in_turn =
            |o: &Arc<StreamInner>| !(Arc::ptr_eq(o, &self.0) || o.beside && self.0.beside);
        if let Some(other) = other.filter(in_turn)
            && let Some(end) = other.alone.get()
        {
            self.0.gpu.0.bind()?;
            // SAFETY: the stream and the event are valid.
            let waits = unsafe { sys::cuStreamWaitEvent(self.0.handle, end.handle, 0) };
            check("waiting for another stream", waits.result())?;
        }
        launch()?;
        match self.0.alone.get() {
            Some(end) => end.set(self)?,
            None => drop(self.0.alone.set(self.mark()?)),
        }
        last.insert(ordinal, Arc::downgrade(&self.0));
        Ok(())
    }

    /// Refuses operations that cannot be part of a graph.
    pub(super) fn refuse_recording(&self, op: &'static str) -> Result<()> {
        if self.0.is_recording.load(Ordering::Acquire) {
            Err(Error::Cuda {
                what: op,
                why: "copies to and from the host cannot be recorded in a graph".into(),
            })
        } else {
            Ok(())
        }
    }

    /// Launches a kernel with `args`, the single structure that it takes by value.
    ///
    /// # Safety
    /// Every address in `args` must come from [`Stream::operands`], checked for what the kernel
    /// reads and writes with this shape; numbers that it uses as indices into memory must be within
    /// bounds ([`super::Checked`]); the shape must be one that the kernel supports.
    pub(crate) unsafe fn launch<A: Copy>(
        &self,
        kernel: impl Into<Instance<A>>,
        shape: LaunchShape,
        args: &A,
    ) -> Result<()> {
        let kernel = kernel.into();
        #[cfg(test)]
        if super::trace::is_imagined(self.0.gpu.info()) {
            super::trace::record(&kernel, shape, args);
            return Ok(());
        }
        // SAFETY: by contract.
        let launch = || unsafe { self.launch_now(&kernel, shape, args) };
        let gpu = &self.0.gpu;
        if !gpu.times_kernels() {
            return launch();
        }
        let blocks = shape.grid.0 * shape.grid.1 * shape.grid.2;
        self.between_events(
            (
                kernel.row.name,
                kernel.name(),
                Dims::new(blocks, shape.threads),
            ),
            0,
            None,
            launch,
        )
    }

    /// # Safety
    /// See [`Stream::launch`].
    unsafe fn launch_now<A: Copy>(
        &self,
        kernel: &Instance<A>,
        shape: LaunchShape,
        args: &A,
    ) -> Result<()> {
        let function = self.0.gpu.reserve(kernel, shape)?;
        self.0.gpu.0.bind()?;
        let shape = LaunchShape {
            overlap: shape.overlap && !self.0.beside,
            ..shape
        };
        let mut attributes = Attributes::of(shape, self.0.gpu.info());
        let config = attributes.config(shape, self.0.handle);
        let mut params = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: by contract for what the arguments contain; they have the size that the kernel
        // takes, and the driver copies them before it returns.
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
            why: format!("{}: {e}", kernel.name()),
        })
    }

    /// Runs `body`, which queues one operation, between two events if the device is being
    /// profiled. This also works in a graph: the events are part of it, and each recording has its own.
    pub fn timed(&self, key: Key, bytes: usize, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.timed_in_parts(key, bytes, None, body)
    }

    /// As [`Stream::timed`]; if the device is being profiled, `parts` tells later how long parts of the
    /// operation took.
    pub(crate) fn timed_in_parts(
        &self,
        key: Key,
        bytes: usize,
        parts: Option<PartTimes>,
        body: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let gpu = &self.0.gpu;
        if gpu.is_profiling() && !gpu.times_kernels() {
            self.between_events(key, bytes, parts, body)
        } else {
            body()
        }
    }

    fn between_events(
        &self,
        key: Key,
        bytes: usize,
        parts: Option<PartTimes>,
        body: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let gpu = &self.0.gpu;
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
        let outcome = record(events[0])
            .and_then(|()| body())
            .and_then(|()| record(events[1]));
        if outcome.is_err() {
            for event in events {
                // SAFETY: created above; no one waits for it.
                let _ = unsafe { result::event::destroy(event) };
            }
            return outcome;
        }
        let mut timed = gpu.0.timed.lock().unwrap_or_else(|e| e.into_inner());
        timed.push(Timed {
            key,
            bytes,
            events,
            parts,
        });
        Ok(())
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
    pub(crate) fn is_done(&self) -> Result<bool> {
        self.0.gpu.0.bind()?;
        // SAFETY: the stream is valid.
        let state = unsafe { sys::cuStreamQuery(self.0.handle) };
        match state {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("running kernels", other.result()).map(|()| true),
        }
    }

    /// Records the launches of `body` as a graph instead of running them. The graph keeps the memory
    /// that they use.
    pub fn record(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.0.gpu.0.bind()?;
        let recording = Recording::begin(self)?;
        let outcome = body();
        let (graph, kept) = recording.end();
        let graph = match (outcome, graph) {
            (Ok(()), graph) => graph?,
            (Err(e), graph) => {
                // SAFETY: just created, and not used.
                let _ = graph.map(|g| unsafe { result::graph::destroy(g) });
                return Err(e);
            }
        };
        // SAFETY: the graph is complete; its executable form no longer needs it.
        let executable = unsafe {
            let executable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            check("making a graph", executable)?
        };
        Ok(Graph {
            gpu: self.0.gpu.clone(),
            handle: executable,
            kept,
        })
    }

    /// Runs a graph.
    ///
    /// # Errors
    /// [`Error::Cuda`] for a graph of another device; errors of the driver.
    pub fn run(&self, graph: &Graph) -> Result<()> {
        if !graph.gpu.is(&self.0.gpu) {
            return Err(Error::Cuda {
                what: "running a graph",
                why: format!(
                    "it is of {}, not of {}",
                    graph.gpu.info(),
                    self.0.gpu.info()
                ),
            });
        }
        self.0.gpu.0.bind()?;
        // SAFETY: both are valid, and the graph keeps the memory that it uses.
        let launch = || unsafe { result::graph::launch(graph.handle, self.0.handle) };
        let launch = || check("running a graph", launch());
        if graph.kept.alone {
            self.alone(launch)
        } else {
            launch()
        }
    }

    /// Lets the stream's further work begin after `mark`, which may be of another stream of this device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn wait_for(&self, mark: &Mark) -> Result<()> {
        self.0.gpu.0.bind()?;
        // SAFETY: the stream and the event are valid, and the event was recorded.
        let waits = unsafe { sys::cuStreamWaitEvent(self.0.handle, mark.handle, 0) };
        check("waiting for another stream", waits.result())
    }

    /// A point in the stream's work.
    pub fn mark(&self) -> Result<Mark> {
        self.0.gpu.0.bind()?;
        let handle = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let mark = Mark {
            gpu: self.0.gpu.clone(),
            handle: check("making an event", handle)?,
        };
        mark.set(self)?;
        Ok(mark)
    }
}

/// A capture in progress in a stream, which ends when this is dropped.
struct Recording<'a> {
    stream: &'a Stream,
    is_ended: bool,
}

impl<'a> Recording<'a> {
    fn begin(stream: &'a Stream) -> Result<Self> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let _nobody_waits = lock(&stream.0.beginning);
        // SAFETY: the stream is valid; the capture ends with `self` in any case.
        check("recording a graph", unsafe {
            result::stream::begin_capture(stream.0.handle, mode)
        })?;
        stream.0.is_recording.store(true, Ordering::Release);
        Ok(Recording {
            stream,
            is_ended: false,
        })
    }

    fn end(mut self) -> (Result<sys::CUgraph>, GraphMemory) {
        self.finish()
    }

    fn finish(&mut self) -> (Result<sys::CUgraph>, GraphMemory) {
        self.is_ended = true;
        // SAFETY: a capture is in progress in this stream.
        let graph = check("recording a graph", unsafe {
            result::stream::end_capture(self.stream.0.handle)
        });
        self.stream.0.is_recording.store(false, Ordering::Release);
        (graph, std::mem::take(&mut *self.stream.kept()))
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // The recorded function panicked.
        if !self.is_ended
            && let (Ok(graph), _) = self.finish()
        {
            // SAFETY: just created, and not used.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_ok() {
            // SAFETY: created by `Gpu::stream`. Its work ends first, so that the memory it uses
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
    kept: GraphMemory,
}

// SAFETY: as for streams.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_ok() {
            // SAFETY: created by `Stream::record`.
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
// SAFETY: as for streams.
unsafe impl Sync for Mark {}

impl Mark {
    /// Moves the mark behind the work queued in `stream` so far.
    pub(super) fn set(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are valid.
        check("recording an event", unsafe {
            result::event::record(self.handle, stream.0.handle)
        })
    }

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

    /// True if the work before it is done.
    ///
    /// # Errors
    /// The first error of that work.
    pub(crate) fn has_passed(&self) -> Result<bool> {
        self.gpu.0.bind()?;
        // SAFETY: the event was recorded.
        match unsafe { sys::cuEventQuery(self.handle) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            done => check("running kernels", done.result()).map(|()| true),
        }
    }

    /// Seconds from `self` to `later`; both must have passed.
    ///
    /// # Errors
    /// Errors of the driver, e.g. if they have not.
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
            // SAFETY: created by `Stream::mark`.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}
