//! The CUDA driver: a device, its memory, streams, graphs and launches.
//!
//! The driver library is loaded when a device is opened, so one binary runs with or without
//! one. Kernels are in fatbins that the build embeds; a kernel is found by its name.

use crate::cpu::{Key, OpTiming, Profile};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{DriverError, result};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One fatbin per source and architecture.
const FATBINS: &[&[u8]] = include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// The oldest driver whose library has all that is called here (CUDA 12.0).
const OLDEST_DRIVER: i32 = 12_000;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Which of the machine's devices.
    pub ordinal: usize,
    /// As the driver calls it, e.g. `NVIDIA H200`.
    pub name: String,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Most dynamic shared memory of a block, in bytes.
    pub shared_memory: usize,
    /// Cache shared by all multiprocessors, in bytes.
    pub l2_bytes: usize,
    /// All of the device's memory, in bytes.
    pub memory: usize,
    /// CUDA version of the driver, e.g. 13000.
    pub driver: i32,
}

impl fmt::Display for GpuInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        write!(
            f,
            "cuda:{} ({}, sm_{major}{minor})",
            self.ordinal, self.name
        )
    }
}

/// An open device. Cloning shares it.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    info: GpuInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Vec<sys::CUmodule>,
    functions: Mutex<HashMap<String, Function>>,
    profile: Profile,
    timed: Mutex<Vec<Timed>>,
}

/// An operation under way or done, between two events.
struct Timed {
    key: Key,
    bytes: usize,
    events: [sys::CUevent; 2],
}

// SAFETY: the driver's handles may be used from any thread once the context is current there,
// which every method sees to.
unsafe impl Send for Inner {}
// SAFETY: as above; the table of functions is behind a mutex.
unsafe impl Sync for Inner {}

/// A kernel, as the driver knows it.
#[derive(Clone, Copy)]
struct Function {
    handle: sys::CUfunction,
    shared_limit: usize,
}

// SAFETY: a function handle is an opaque pointer that the driver accepts on any thread.
unsafe impl Send for Function {}

/// Turns a driver's answer into this crate's error.
fn check<T>(what: &'static str, result: Result<T, DriverError>) -> Result<T> {
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

/// The number of devices, or why none can be used: no driver library, one too old, no device.
///
/// # Errors
/// [`Error::Cuda`] saying which.
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
    let mut version = 0;
    // SAFETY: writes one integer.
    check("asking the driver's version", unsafe {
        sys::cuDriverGetVersion(&raw mut version).result()
    })?;
    if version < OLDEST_DRIVER {
        return Err(none(format!(
            "the driver is for CUDA {}.{}, and 12.0 or newer is needed (driver 525)",
            version / 1000,
            version % 1000 / 10
        )));
    }
    let count = check("counting devices", result::device::get_count())?;
    match count {
        0 => Err(none("the driver is there, but no device".into())),
        n => Ok(n as usize),
    }
}

impl Gpu {
    /// Opens device `ordinal` and loads the kernels.
    ///
    /// # Errors
    /// [`device_count`]'s; [`Error::Cuda`] if there is no such device, or the kernels have no
    /// code for it or need a newer driver.
    pub fn open(ordinal: usize) -> Result<Self> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(Error::Cuda {
                what: "opening a GPU",
                why: format!("there is no cuda:{ordinal}; devices: {count}"),
            });
        }
        let device = check("opening a GPU", result::device::get(ordinal as i32))?;
        // SAFETY: `device` is valid; the reference is given back in `Drop`.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = check("opening a GPU", context)?;
        // From here on `Drop` cleans up.
        let mut inner = Inner {
            info: GpuInfo {
                ordinal,
                name: String::new(),
                capability: (0, 0),
                multiprocessors: 0,
                shared_memory: 0,
                l2_bytes: 0,
                memory: 0,
                driver: 0,
            },
            device,
            context,
            modules: Vec::new(),
            functions: Mutex::new(HashMap::new()),
            profile: Profile::default(),
            timed: Mutex::new(Vec::new()),
        };
        inner.bind()?;
        inner.describe()?;
        inner.load_modules()?;
        Ok(Gpu(Arc::new(inner)))
    }

    /// What the device is.
    pub fn info(&self) -> &GpuInfo {
        &self.0.info
    }

    /// Bytes of device memory that are free now.
    ///
    /// # Errors
    /// The driver's.
    pub fn free_memory(&self) -> Result<usize> {
        self.0.bind()?;
        Ok(check("asking for free memory", result::mem_get_info())?.0)
    }

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

    /// `len` values in device memory, all bytes zero. `what` is named if they do not fit.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn zeros<T: Pod>(&self, what: &'static str, len: usize) -> Result<Buffer<T>> {
        self.0.bind()?;
        let bytes = (len * size_of::<T>()).max(16);
        // SAFETY: the allocation is freed in `Drop`; every byte is set before it is read, and
        // any bytes are valid for a `Pod` type.
        let address = unsafe {
            let address = check(what, result::malloc_sync(bytes))?;
            let buffer = Buffer {
                gpu: self.clone(),
                address,
                len,
                marker: PhantomData,
            };
            check(what, result::memset_d8_sync(address, 0, bytes))?;
            self.0.wait_for_default_stream()?;
            buffer
        };
        Ok(address)
    }

    /// A copy of `values` in device memory.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn upload<T: Pod>(&self, what: &'static str, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.zeros(what, values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// `len` zeroed values in host memory that the device can read and write as they are.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn pinned<T: Pod>(&self, what: &'static str, len: usize) -> Result<Pinned<T>> {
        self.0.bind()?;
        let bytes = (len * size_of::<T>()).max(16);
        // SAFETY: freed in `Drop`, and zeroed before any use.
        let address = unsafe {
            let address = check(
                what,
                result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP),
            )?;
            ptr::write_bytes(address.cast::<u8>(), 0, bytes);
            address
        };
        Ok(Pinned {
            gpu: self.clone(),
            address: address.cast(),
            len,
        })
    }

    /// Waits for all work of the device.
    ///
    /// # Errors
    /// The first error of that work.
    pub fn synchronize(&self) -> Result<()> {
        self.0.bind()?;
        check("running kernels", result::ctx::synchronize())
    }

    /// Starts timing what [`Stream::timed`] wraps, from zero.
    pub fn start_profile(&self) {
        self.0.profile.start();
    }

    /// Stops timing: what was counted, the most expensive first.
    pub fn stop_profile(&self) -> Vec<OpTiming> {
        self.0.profile.stop()
    }

    /// True while operations are timed.
    pub fn is_profiling(&self) -> bool {
        self.0.profile.is_on()
    }

    /// Counts the operations timed so far, all of which have run.
    ///
    /// # Errors
    /// The driver's, e.g. if one has not.
    pub fn settle_profile(&self) -> Result<()> {
        self.0.bind()?;
        let timed = std::mem::take(&mut *self.0.timed.lock().unwrap_or_else(|e| e.into_inner()));
        let mut outcome = Ok(());
        for Timed { key, bytes, events } in timed {
            // SAFETY: both events were recorded by `Stream::timed`, and are not used again.
            let ms = unsafe {
                let ms = result::event::elapsed(events[0], events[1]);
                for event in events {
                    let _ = result::event::destroy(event);
                }
                ms
            };
            match check("timing kernels", ms) {
                Ok(ms) => {
                    let time = Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3);
                    self.0.profile.add(key, time, bytes);
                }
                Err(e) => outcome = Err(e),
            }
        }
        outcome
    }

    fn function(&self, name: &str) -> Result<Function> {
        let mut table = self.0.functions.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(f) = table.get(name) {
            return Ok(*f);
        }
        let symbol = CString::new(name).map_err(|_| Error::Cuda {
            what: "finding a kernel",
            why: "its name holds a zero byte".into(),
        })?;
        for &module in &self.0.modules {
            // SAFETY: the module lives as long as `self`.
            if let Ok(handle) = unsafe { result::module::get_function(module, symbol.clone()) } {
                let f = Function {
                    handle,
                    shared_limit: 0,
                };
                table.insert(name.into(), f);
                return Ok(f);
            }
        }
        Err(Error::Cuda {
            what: "finding a kernel",
            why: format!("{name} is not in this build for {}", self.info()),
        })
    }

    /// Makes room for `bytes` of dynamic shared memory in later launches of `name`.
    fn reserve_shared(&self, name: &str, bytes: usize) -> Result<sys::CUfunction> {
        let f = self.function(name)?;
        // Without asking a block has 48 KiB, of which static arrays take some.
        if bytes <= f.shared_limit.max(32 * 1024) {
            return Ok(f.handle);
        }
        // SAFETY: the handle is valid while the module is.
        check("reserving shared memory", unsafe {
            result::function::set_function_attribute(
                f.handle,
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                bytes as i32,
            )
        })?;
        let mut table = self.0.functions.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(f) = table.get_mut(name) {
            f.shared_limit = bytes;
        }
        Ok(f.handle)
    }
}

impl Inner {
    /// Makes the context current on this thread.
    fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until `Drop`.
        check("using a GPU", unsafe {
            result::ctx::set_current(self.context)
        })
    }

    /// Waits for memory to be set and copied: such calls may return before, and other streams
    /// do not wait for the one they run in.
    fn wait_for_default_stream(&self) -> Result<()> {
        // SAFETY: the null handle is the default stream.
        check("copying to the GPU", unsafe {
            result::stream::synchronize(ptr::null_mut())
        })
    }

    fn describe(&mut self) -> Result<()> {
        use sys::CUdevice_attribute_enum as A;
        let get = |attribute| {
            // SAFETY: the device is valid; one integer is written.
            let value = unsafe { result::device::get_attribute(self.device, attribute) };
            check("asking for a GPU's properties", value)
        };
        let mut driver = 0;
        // SAFETY: writes one integer; the device is valid.
        let memory = unsafe {
            check(
                "asking the driver's version",
                sys::cuDriverGetVersion(&raw mut driver).result(),
            )?;
            check(
                "asking for a GPU's memory",
                result::device::total_mem(self.device),
            )?
        };
        let name = check(
            "asking for a GPU's name",
            result::device::get_name(self.device),
        )?;
        self.info = GpuInfo {
            ordinal: self.info.ordinal,
            name: name.trim_end_matches('\0').into(),
            capability: (
                get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: get(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            shared_memory: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            l2_bytes: get(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            memory,
            driver,
        };
        Ok(())
    }

    /// Loads the fatbins that have code for this device.
    fn load_modules(&mut self) -> Result<()> {
        let mut refusal = None;
        for image in FATBINS {
            // SAFETY: the image is a whole fatbin; the driver checks it.
            match unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) } {
                Ok(module) => self.modules.push(module),
                // Code for another architecture.
                Err(e) if e.0 == CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {}
                Err(e) => refusal = Some(e),
            }
        }
        if !self.modules.is_empty() {
            return Ok(());
        }
        if let Some(e) = refusal {
            check("loading the kernels (they may need a newer driver)", Err(e))?;
        }
        let (major, minor) = self.info.capability;
        Err(Error::Cuda {
            what: "loading the kernels",
            why: format!(
                "{} has compute capability {major}.{minor}, for which this build has no code; \
                 8.0 or newer is needed",
                self.info.name
            ),
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: nothing that uses the modules or the context outlives the last `Gpu`. A
        // failure here has no one to hear of it.
        unsafe {
            for &module in &self.modules {
                let _ = result::module::unload(module);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Values in device memory.
pub struct Buffer<T> {
    gpu: Gpu,
    address: sys::CUdeviceptr,
    len: usize,
    marker: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Device address of value `at`, which may be the end.
    ///
    /// # Panics
    /// If `at` is past the end.
    pub fn at(&self, at: usize) -> Address {
        assert!(at <= self.len, "value {at} of {}", self.len);
        Address(self.address + (at * size_of::<T>()) as u64)
    }

    /// Writes `values` from index `at` on; returns when they are there.
    ///
    /// # Errors
    /// [`Error::Shape`] if they do not fit.
    pub fn write(&mut self, at: usize, values: &[T]) -> Result<()> {
        self.check_range("device write", at, values.len())?;
        self.gpu.0.bind()?;
        // SAFETY: the range is within the allocation, and `values` are read before the call
        // returns.
        check("copying to the GPU", unsafe {
            result::memcpy_htod_sync(self.at(at).0, values)
        })?;
        self.gpu.0.wait_for_default_stream()
    }

    /// Reads `out.len()` values from index `at` on. Work in streams must have ended.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are not so many.
    pub fn read(&self, at: usize, out: &mut [T]) -> Result<()> {
        self.check_range("device read", at, out.len())?;
        self.gpu.0.bind()?;
        // SAFETY: the range is within the allocation, and the call waits.
        check("copying from the GPU", unsafe {
            result::memcpy_dtoh_sync(out, self.at(at).0)
        })
    }

    fn check_range(&self, op: &'static str, at: usize, n: usize) -> Result<()> {
        if at.checked_add(n).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(Error::Shape {
            op,
            what: "range",
            expected: format!("within {} values", self.len),
            found: format!("{n} from {at}"),
        })
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_ok() {
            // SAFETY: allocated by `Gpu::zeros`. The driver waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Page-locked host memory that the device can address.
pub struct Pinned<T> {
    gpu: Gpu,
    address: *mut T,
    len: usize,
}

// SAFETY: it is plain memory, freed by a call that any thread may make.
unsafe impl<T: Send> Send for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values. The device must not be writing them: use [`Pinned::load`] for those.
    pub fn values(&self) -> &[T] {
        // SAFETY: `len` initialized values that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// The values, to be written. The device must not be using them.
    pub fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: as `values`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }

    /// Reads value `i`, which the device may be writing.
    ///
    /// # Panics
    /// If there is no such value.
    pub fn load(&self, i: usize) -> T {
        assert!(i < self.len, "value {i} of {}", self.len);
        // SAFETY: in bounds; volatile, as another agent writes it.
        unsafe { self.address.add(i).read_volatile() }
    }

    /// Writes value `i`, which the device may be reading.
    ///
    /// # Panics
    /// If there is no such value.
    pub fn store(&mut self, i: usize, value: T) {
        assert!(i < self.len, "value {i} of {}", self.len);
        // SAFETY: as `load`.
        unsafe { self.address.add(i).write_volatile(value) }
    }

    /// Device address of value `at`: with unified addressing, the host's.
    ///
    /// # Panics
    /// If `at` is past the end.
    pub fn at(&self, at: usize) -> Address {
        assert!(at <= self.len, "value {at} of {}", self.len);
        Address(self.address as u64 + (at * size_of::<T>()) as u64)
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_ok() {
            // SAFETY: allocated by `Gpu::pinned`; users wait for their streams first.
            let _ = unsafe { result::free_host(self.address.cast()) };
        }
    }
}

/// A device address, as kernels take it. Zero stands for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Address(u64);

impl Address {
    /// No memory.
    pub const NULL: Address = Address(0);
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
        let function = self.0.gpu.reserve_shared(name, shape.shared)?;
        self.0.gpu.0.bind()?;
        // SAFETY: a structure of integers and a union of them; all zero is valid.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id =
            sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let overlap = shape.overlap && self.0.gpu.info().capability >= (9, 0);
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid.0 as u32,
            gridDimY: shape.grid.1 as u32,
            gridDimZ: shape.grid.2 as u32,
            blockDimX: shape.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared as u32,
            hStream: self.0.handle,
            attrs: &raw mut attribute,
            numAttrs: u32::from(overlap),
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
