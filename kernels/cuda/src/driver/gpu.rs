//! A device: its properties, its kernels, and the timing of its work.

use super::code::{CodeTarget, name_of_code};
use super::errors::check;
use super::found::{capability, code_for, driver_version, find};
use super::info::GpuInfo;
use super::info::Version;
use super::launch::{Attributes, LaunchShape};
use crate::kernel::{Instance, KernelRow, MOST_INSTANCES};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{DriverError, result};
use nq_kernels::account::Account;
use nq_kernels::profile::{Key, OpTiming, Profile};
use nq_kernels::{Error, Result};
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The oldest driver that reports the arguments of a kernel (CUDA 12.4).
const KNOWS_ARGUMENTS: i32 = 12_040;

/// Shared memory of a block that needs no request: its static arrays, and what is left for dynamic ones.
const UNASKED_SHARED: usize = 48 * 1024;

/// An open device. Cloning shares it.
#[derive(Clone)]
pub struct Gpu(pub(super) Arc<Inner>);

pub(super) struct Inner {
    info: GpuInfo,
    /// Counts the memory allocated on the device.
    account: Account,
    /// Most bytes to hold.
    limit: AtomicUsize,
    pub(super) device: sys::CUdevice,
    /// Null on a dry device.
    pub(super) context: sys::CUcontext,
    /// Stream for setting and writing memory. Other streams do not wait for the default stream, and
    /// waiting for that one would spoil recordings of other threads.
    copies: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    /// By the instance's number in the table; `None` if this build has no code for it.
    functions: Box<[OnceLock<Option<Function>>]>,
    profile: Profile,
    /// True if each kernel is timed while profiling.
    by_kernel: AtomicBool,
    pub(super) timed: Mutex<Vec<Timed>>,
    /// The devices whose memory this one's kernels reach, by their contexts.
    pub(super) peers: Mutex<Vec<usize>>,
}

/// An operation that is running or done, between two events.
pub(super) struct Timed {
    pub(super) key: Key,
    pub(super) bytes: usize,
    pub(super) events: [sys::CUevent; 2],
    pub(super) parts: Option<PartTimes>,
}

/// Tells the times of parts of an operation that has run: what remains of its time is counted as its own.
pub(crate) type PartTimes = Box<dyn FnOnce() -> Vec<(Key, Duration)> + Send>;

// SAFETY: the driver's handles may be used from any thread once the context is current there,
// which every method ensures.
unsafe impl Send for Inner {}
// SAFETY: as above; mutable state is atomic or behind locks.
unsafe impl Sync for Inner {}

/// A kernel's handle and attributes.
struct Function {
    handle: sys::CUfunction,
    /// Dynamic shared memory allowed per block.
    shared: AtomicUsize,
    /// True if clusters may have more than [`PORTABLE_CLUSTER`] blocks.
    large_clusters: AtomicBool,
}

/// Most blocks of a cluster that every device with clusters supports.
const PORTABLE_CLUSTER: usize = 8;

impl Gpu {
    /// A dry device of this compute capability, number of multiprocessors and shared memory of a block, in KiB, whose
    /// launches are written down.
    #[cfg(test)]
    pub(crate) fn imagined(capability: Version, multiprocessors: usize, shared_kib: usize) -> Self {
        let info = GpuInfo {
            name: super::trace::NAME.into(),
            capability,
            multiprocessors,
            shared_memory: shared_kib << 10,
            ..GpuInfo::default()
        };
        Self::dry(info, Account::gpu())
    }

    /// Opens device `ordinal` and loads the kernels.
    ///
    /// # Errors
    /// Errors of [`device_count`](super::device_count); [`Error::Cuda`] if there is no such device,
    /// or the kernels have no code for it or need a newer driver.
    pub fn open(ordinal: usize) -> Result<Self> {
        let device = find(ordinal)?;
        let code = code_for(device, ordinal)?;
        // SAFETY: `device` is valid; the reference is released in `Drop`.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = check("opening a GPU", context)?;
        // From here on, `Drop` cleans up.
        let info = GpuInfo {
            ordinal,
            ..GpuInfo::default()
        };
        let mut inner = Inner::new(info, Account::of_gpu(ordinal), device, context);
        inner.bind()?;
        let copies = result::stream::create(result::stream::StreamKind::NonBlocking);
        inner.copies = check("making a stream", copies)?;
        inner.describe()?;
        inner.load_modules(code)?;
        Ok(Gpu(Arc::new(inner)))
    }

    /// A dry device with properties `info`, on which nothing runs: allocations take no
    /// memory and count in `account`. Running constructors on it shows what they take; writes
    /// do nothing, and other operations are errors.
    pub fn dry(info: GpuInfo, account: Account) -> Self {
        Gpu(Arc::new(Inner::new(info, account, 0, ptr::null_mut())))
    }

    /// True for a dry device.
    pub(super) fn is_dry(&self) -> bool {
        self.0.context.is_null()
    }

    /// The account of allocations: for an open device, that of this process.
    pub fn account(&self) -> &Account {
        &self.0.account
    }

    /// Properties of the device.
    pub fn info(&self) -> &GpuInfo {
        &self.0.info
    }

    /// The name of the compiled kernels that it runs, e.g. `sm_86`.
    pub fn code(&self) -> Option<&'static str> {
        name_of_code(self.0.info.capability)
    }

    /// True if both are the same device.
    pub(crate) fn is(&self, other: &Gpu) -> bool {
        self.0.context == other.0.context
    }

    /// Bytes of device memory that are currently free, and within the limit that was set.
    pub fn free_memory(&self) -> Result<usize> {
        self.0.bind()?;
        let free = check("asking for free memory", result::mem_get_info())?.0;
        let limit = self.0.limit.load(Ordering::Relaxed);
        Ok(free.min(limit.saturating_sub(self.account().held())))
    }

    /// Sets how many bytes of this device's memory this process shall hold at most, if not all. It is what
    /// [`Gpu::free_memory`] tells; nothing is refused here.
    pub(crate) fn limit_memory(&self, bytes: Option<usize>) {
        self.0
            .limit
            .store(bytes.unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// Waits for all work of the device.
    ///
    /// # Errors
    /// The first error of that work.
    pub fn synchronize(&self) -> Result<()> {
        self.0.bind()?;
        check("running kernels", result::ctx::synchronize())
    }

    /// Starts timing what [`Stream::timed`](super::Stream::timed) wraps, resetting the counts.
    pub fn start_profile(&self) {
        self.0.by_kernel.store(false, Ordering::Relaxed);
        self.0.profile.start();
    }

    /// Stops timing and returns the counts, the most expensive operation first.
    pub fn stop_profile(&self) -> Vec<OpTiming> {
        self.0.profile.stop()
    }

    /// True while operations are timed.
    pub(crate) fn is_profiling(&self) -> bool {
        self.0.profile.is_on()
    }

    /// Counts the operations timed so far, all of which must have run.
    ///
    /// # Errors
    /// Errors of the driver, e.g. if one has not run.
    pub fn settle_profile(&self) -> Result<()> {
        self.0.bind()?;
        let timed = std::mem::take(&mut *self.0.timed.lock().unwrap_or_else(|e| e.into_inner()));
        let mut outcome = Ok(());
        for operation in timed {
            let Timed { key, events, .. } = operation;
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
                    let mut time = Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3);
                    let parts = operation.parts.map_or_else(Vec::new, |parts| parts());
                    for (key, part) in parts {
                        time = time.saturating_sub(part);
                        self.0.profile.add(key, part, 0);
                    }
                    self.0.profile.add(key, time, operation.bytes);
                }
                Err(e) => outcome = Err(e),
            }
        }
        outcome
    }

    /// Starts timing each kernel alone instead of what [`Stream::timed`](super::Stream::timed) wraps,
    /// resetting the counts.
    pub fn start_profile_by_kernel(&self) {
        self.0.by_kernel.store(true, Ordering::Relaxed);
        self.0.profile.start();
    }

    /// True while each kernel is timed alone.
    pub(super) fn times_kernels(&self) -> bool {
        self.is_profiling() && self.0.by_kernel.load(Ordering::Relaxed)
    }

    /// True if this build has code for an instance of a kernel on this device.
    ///
    /// # Errors
    /// Errors of the driver; [`Error::Cuda`] if its arguments do not have the size given in the table.
    ///
    /// # Panics
    /// If the row does not have this many instances.
    pub fn has(&self, row: &'static KernelRow, instance: usize) -> Result<bool> {
        assert!(instance < row.instances.len(), "{}", row.name);
        Ok(self.function(row, instance)?.is_some())
    }

    /// True if this build has code for a kernel on this device.
    pub(crate) fn has_kernel<A>(&self, kernel: &Instance<A>) -> bool {
        #[cfg(test)]
        if super::trace::is_imagined(self.info()) {
            return super::trace::has_kernel(kernel.row.name, self.info().capability);
        }
        matches!(self.function(kernel.row, kernel.index), Ok(Some(_)))
    }

    /// Looks up a kernel, once; `None` if this build has no code for it.
    fn function(&self, row: &'static KernelRow, index: usize) -> Result<Option<&Function>> {
        let cell = &self.0.functions[row.number(index)];
        if cell.get().is_none() {
            let found = self.0.find(row, index)?;
            return Ok(cell.get_or_init(|| found).as_ref());
        }
        Ok(cell.get().and_then(Option::as_ref))
    }

    /// Prepares a kernel for a launch of this shape and returns its handle.
    pub(super) fn reserve<A>(
        &self,
        kernel: &Instance<A>,
        shape: LaunchShape,
    ) -> Result<sys::CUfunction> {
        use sys::CUfunction_attribute_enum as Attribute;
        let Some(f) = self.function(kernel.row, kernel.index)? else {
            return Err(Error::Cuda {
                what: "finding a kernel",
                why: format!("{} is not in this build for {}", kernel.name(), self.info()),
            });
        };
        let allow = |what, attribute, value: usize| {
            self.0.bind()?;
            // SAFETY: the handle is valid as long as the module.
            check(what, unsafe {
                result::function::set_function_attribute(f.handle, attribute, value as i32)
            })
        };
        #[cfg(feature = "imitate")]
        if let Some(imitation) = super::imitate::imitation()? {
            self.0.bind()?;
            let fixed = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            // SAFETY: the handle is valid as long as the module.
            let fixed = unsafe { result::function::get_function_attribute(f.handle, fixed) };
            let fixed = check("asking for a kernel's shared memory", fixed)?;
            imitation.allow(kernel.name(), fixed as usize, shape)?;
        }
        if shape.shared > f.shared.load(Ordering::Relaxed) {
            let bytes = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            allow("reserving shared memory", bytes, shape.shared)?;
            f.shared.fetch_max(shape.shared, Ordering::Relaxed);
        }
        if shape.cluster > PORTABLE_CLUSTER && !f.large_clusters.load(Ordering::Relaxed) {
            let large = Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            allow("allowing large clusters", large, 1)?;
            f.large_clusters.store(true, Ordering::Relaxed);
        }
        Ok(f.handle)
    }

    /// Most clusters of a launch that run at once.
    pub(crate) fn clusters_at_once<A>(
        &self,
        kernel: &Instance<A>,
        shape: LaunchShape,
    ) -> Result<usize> {
        #[cfg(test)]
        if super::trace::is_imagined(self.info()) {
            return Ok(self.info().multiprocessors / shape.cluster);
        }
        let function = self.reserve(kernel, shape)?;
        self.0.bind()?;
        let mut attributes = Attributes::of(shape, self.info());
        let config = attributes.config(shape, ptr::null_mut());
        let mut count = 0;
        // SAFETY: the function is valid, and so is everything that the configuration points to.
        let outcome = unsafe {
            sys::cuOccupancyMaxActiveClusters(&raw mut count, function, &raw const config)
        };
        check("asking for room for clusters", outcome.result())?;
        Ok(usize::try_from(count).unwrap_or(0))
    }
}

impl Inner {
    fn new(
        info: GpuInfo,
        account: Account,
        device: sys::CUdevice,
        context: sys::CUcontext,
    ) -> Self {
        Inner {
            info,
            account,
            limit: AtomicUsize::new(usize::MAX),
            device,
            context,
            copies: ptr::null_mut(),
            modules: Vec::new(),
            functions: (0..MOST_INSTANCES).map(|_| OnceLock::new()).collect(),
            profile: Profile::default(),
            by_kernel: AtomicBool::new(false),
            timed: Mutex::new(Vec::new()),
            peers: Mutex::new(Vec::new()),
        }
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<()> {
        if self.context.is_null() {
            return Err(Error::Cuda {
                what: "using a GPU",
                why: "nothing runs on a dry device".into(),
            });
        }
        // SAFETY: the context is retained until `Drop`.
        check("using a GPU", unsafe {
            result::ctx::set_current(self.context)
        })
    }

    /// Calls `copy` with the stream for copies, and waits for the work queued there. Does nothing on a
    /// dry device.
    pub(super) fn copy(
        &self,
        what: &'static str,
        copy: impl FnOnce(sys::CUstream) -> Result<(), DriverError>,
    ) -> Result<()> {
        if self.context.is_null() {
            return Ok(());
        }
        self.bind()?;
        check(what, copy(self.copies))?;
        // SAFETY: the stream lives as long as `self`.
        check(what, unsafe { result::stream::synchronize(self.copies) })
    }

    fn describe(&mut self) -> Result<()> {
        use sys::CUdevice_attribute_enum as A;
        let get = |attribute| {
            // SAFETY: the device is valid; one integer is written.
            let value = unsafe { result::device::get_attribute(self.device, attribute) };
            check("asking for a GPU's properties", value)
        };
        // SAFETY: the device is valid.
        let memory = unsafe { result::device::total_mem(self.device) };
        let memory = check("asking for a GPU's memory", memory)?;
        let name = check(
            "asking for a GPU's name",
            result::device::get_name(self.device),
        )?;
        let shared_memory = get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        let capability = capability(self.device)?;
        self.info = GpuInfo {
            ordinal: self.info.ordinal,
            name: name.trim_end_matches('\0').into(),
            capability,
            multiprocessors: get(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            // 8.7 runs code of 8.6, which is made for as much as that has.
            shared_memory: match capability == Version::new(8, 7) {
                true => shared_memory.min(99 << 10),
                false => shared_memory,
            },
            l2_bytes: get(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            memory,
            driver: driver_version()?,
            // Older drivers do not know the question.
            multi_process: get(A::CU_DEVICE_ATTRIBUTE_MPS_ENABLED).is_ok_and(|on| on != 0),
        };
        #[cfg(feature = "imitate")]
        if let Some(imitation) = super::imitate::imitation()? {
            imitation.describe(&mut self.info);
        }
        Ok(())
    }

    /// Looks up a kernel in the modules.
    fn find(&self, row: &KernelRow, index: usize) -> Result<Option<Function>> {
        let name = row.instances[index];
        let symbol = CString::new(name).map_err(|_| Error::Cuda {
            what: "finding a kernel",
            why: "its name holds a zero byte".into(),
        })?;
        self.bind()?;
        let mut found = None;
        for &module in &self.modules {
            // SAFETY: the module lives as long as `self`.
            match unsafe { result::module::get_function(module, symbol.clone()) } {
                Err(DriverError(CUresult::CUDA_ERROR_NOT_FOUND)) => {}
                // An earlier fault, for example: the kernel may be there.
                other => {
                    found = Some(check("finding a kernel", other)?);
                    break;
                }
            }
        }
        let Some(handle) = found else {
            return Ok(None);
        };
        // All kernels ask for the same split between shared memory and L1, since a multiprocessor
        // changes it only while idle.
        // SAFETY: the handle is valid as long as the module.
        check("reserving shared memory", unsafe {
            result::function::set_function_attribute(
                handle,
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                sys::CUshared_carveout_enum::CU_SHAREDMEM_CARVEOUT_MAX_SHARED as i32,
            )
        })?;
        self.check_arguments(name, handle, row.args)?;
        // SAFETY: as above.
        let fixed = check("asking for a kernel's shared memory", unsafe {
            result::function::get_function_attribute(
                handle,
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            )
        })?;
        Ok(Some(Function {
            handle,
            shared: AtomicUsize::new(UNASKED_SHARED.saturating_sub(fixed.max(0) as usize)),
            large_clusters: AtomicBool::new(false),
        }))
    }

    /// Refuses a kernel that does not take one argument of `size` bytes, if the driver tells.
    fn check_arguments(&self, name: &str, handle: sys::CUfunction, size: usize) -> Result<()> {
        if self.info.driver < KNOWS_ARGUMENTS {
            return Ok(());
        }
        let (mut offset, mut found) = (0, 0);
        // SAFETY: the handle is valid as long as the module; two integers are written. The driver
        // returns an error for an argument that does not exist.
        let (first, second) = unsafe {
            let second = sys::cuFuncGetParamInfo(handle, 1, &raw mut offset, &raw mut found);
            let first = sys::cuFuncGetParamInfo(handle, 0, &raw mut offset, &raw mut found);
            (first, second)
        };
        check("asking for a kernel's arguments", first.result())?;
        if found == size && second != CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let more = if second == CUresult::CUDA_SUCCESS {
            " and more arguments"
        } else {
            ""
        };
        Err(Error::Cuda {
            what: "finding a kernel",
            why: format!("{name} takes {found} bytes{more} and is given {size}"),
        })
    }

    /// Loads the kernels.
    fn load_modules(&mut self, code: CodeTarget) -> Result<()> {
        let images = || code.images();
        #[cfg(feature = "imitate")]
        let images = || super::imitate::imitation()?.map_or_else(images, |i| i.images());
        for image in images()? {
            // SAFETY: the image is a whole fatbin; the driver checks it.
            let module = unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) };
            self.modules.push(check("loading the kernels", module)?);
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: nothing that uses the modules or the context outlives the last `Gpu`. There is no
        // one to report a failure to.
        unsafe {
            if !self.copies.is_null() {
                let _ = result::stream::destroy(self.copies);
            }
            for &module in &self.modules {
                let _ = result::module::unload(module);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
