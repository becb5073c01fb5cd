//! Memory of the device, and host memory that a device can address.

use super::errors::check;
use super::gpu::Gpu;
use bytemuck::{Pod, Zeroable};
use cudarc::driver::{result, sys};
use nq_kernels::account::Held;
use nq_kernels::{Error, Result};
use rayon::prelude::*;
use std::alloc::Layout;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Memory of a device, or host memory that the device can address; freed with its last
/// owner.
pub(super) struct Allocation {
    gpu: Gpu,
    address: u64,
    kind: MemoryKind,
    /// Share of the account of device memory.
    _held: Option<Held>,
}

/// Kind of memory, which determines what must have ended before it is freed.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum MemoryKind {
    /// Device memory: the driver waits for work that uses it.
    Device,
    /// Host memory for copies, which its owner waits for.
    Copied,
    /// Host memory that kernels write to.
    Mapped,
    /// Large host memory that kernels read: memory of the program, which the driver has locked.
    Registered(Layout),
}

/// Large host memory begins at and has multiples of this, a page of the larger kind, in bytes.
const LARGE_PAGE: usize = 2 << 20;

impl Allocation {
    /// Zeroed device memory.
    pub(super) fn device(gpu: &Gpu, what: &'static str, bytes: usize) -> Result<Self> {
        let address = if gpu.is_dry() {
            #[cfg(test)]
            let nowhere = super::trace::address();
            #[cfg(not(test))]
            let nowhere = 0;
            nowhere
        } else {
            gpu.0.bind()?;
            // SAFETY: freed in `Drop`; every byte is set before it is read.
            check(what, unsafe { result::malloc_sync(bytes) })?
        };
        let memory = Allocation {
            gpu: gpu.clone(),
            address,
            kind: MemoryKind::Device,
            _held: Some(gpu.account().hold(bytes)),
        };
        // SAFETY: the allocation has this many bytes.
        let zero = |s| unsafe { result::memset_d8_async(address, 0, bytes, s) };
        gpu.0.copy(what, zero)?;
        Ok(memory)
    }

    /// Zeroed page-locked memory. With unified addressing, its device address is its host address.
    pub(super) fn host(
        gpu: &Gpu,
        what: &'static str,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<Self> {
        gpu.0.bind()?;
        // SAFETY: freed in `Drop`, and zeroed before any use.
        let address = unsafe {
            let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP;
            let address = check(what, result::malloc_host(bytes, flags))?;
            ptr::write_bytes(address.cast::<u8>(), 0, bytes);
            address
        };
        Ok(Allocation {
            gpu: gpu.clone(),
            address: address as u64,
            kind,
            _held: None,
        })
    }

    /// Like [`Allocation::host`] for memory of many pages, which all cores zero at the same time: the driver, which would
    /// have one core do so, takes half a second for a gigabyte.
    pub(super) fn large_host(gpu: &Gpu, what: &'static str, bytes: usize) -> Result<Self> {
        gpu.0.bind()?;
        let refused = |_| Error::DeviceMemory { what };
        let layout = Layout::from_size_align(bytes.max(1), LARGE_PAGE).map_err(refused)?;
        let layout = layout.pad_to_align();
        // SAFETY: the layout is not of size 0.
        let memory = unsafe { std::alloc::alloc(layout) };
        if memory.is_null() {
            return Err(Error::DeviceMemory { what });
        }
        // SAFETY: nobody else has these bytes, which need no value yet.
        let all = unsafe {
            std::slice::from_raw_parts_mut(memory.cast::<MaybeUninit<u8>>(), layout.size())
        };
        let pages = all.par_chunks_mut(LARGE_PAGE);
        pages.for_each(|page| page.fill(MaybeUninit::new(0)));
        // SAFETY: memory of this size, which stays until it is given back.
        let locked = unsafe {
            let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            sys::cuMemHostRegister_v2(memory.cast(), layout.size(), flags).result()
        };
        let mut seen = 0;
        // SAFETY: the driver writes an address; the memory is locked.
        let address = locked.and_then(|()| unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut seen, memory.cast(), 0).result()
        });
        if locked.is_ok() && address.is_ok() && seen == memory as u64 {
            return Ok(Allocation {
                gpu: gpu.clone(),
                address: seen,
                kind: MemoryKind::Registered(layout),
                _held: None,
            });
        }
        // SAFETY: allocated above with this layout, and no device uses it.
        unsafe {
            if locked.is_ok() {
                let _ = sys::cuMemHostUnregister(memory.cast());
            }
            std::alloc::dealloc(memory, layout);
        }
        // Where the device has other addresses for it than the host, or refuses, the driver's own memory may do.
        Self::host(gpu, what, bytes, MemoryKind::Mapped)
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// True for host memory, which all devices reach.
    pub(super) fn is_on_host(&self) -> bool {
        self.kind != MemoryKind::Device
    }

    /// The address of byte `at`, which is inside the allocation or at its end.
    pub(super) fn address(&self, at: usize) -> Address {
        Address(self.address + at as u64)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.gpu.0.bind().is_err() {
            return;
        }
        if self.kind != MemoryKind::Device {
            // If kernels may still write to it and cannot be waited for, it is never freed.
            if self.kind == MemoryKind::Copied || self.gpu.settle().is_ok() {
                let address = self.address as *mut u8;
                // SAFETY: allocated by `Allocation::host`, or by `Allocation::large_host` with this layout; the device no
                // longer uses it.
                unsafe {
                    if let MemoryKind::Registered(layout) = self.kind {
                        // Memory that the driver still has locked must stay.
                        if sys::cuMemHostUnregister(address.cast()).result().is_ok() {
                            std::alloc::dealloc(address, layout);
                        }
                    } else {
                        let _ = result::free_host(address.cast());
                    }
                }
            }
            return;
        }
        // SAFETY: allocated by `Allocation::device`. The driver waits for work that uses it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Bytes to allocate for `len` values.
pub(super) fn allocated<T>(what: &'static str, len: usize) -> Result<usize> {
    let bytes = len.checked_mul(size_of::<T>());
    bytes.map_or(Err(Error::DeviceMemory { what }), |b| Ok(b.max(16)))
}

/// An allocation seen as a number of values.
pub(super) struct Region<'a> {
    pub(super) memory: &'a Arc<Allocation>,
    pub(super) len: usize,
    pub(super) value_bytes: usize,
}

impl Gpu {
    /// Allocates `len` values in device memory, all bytes zero. Errors name `what`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn zeros<T: Pod>(&self, what: &'static str, len: usize) -> Result<Buffer<T>> {
        Ok(Buffer {
            memory: Arc::new(Allocation::device(self, what, allocated::<T>(what, len)?)?),
            len,
            marker: PhantomData,
        })
    }

    /// Copies `values` to new device memory.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn upload<T: Pod>(&self, what: &'static str, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.zeros(what, values.len())?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Allocates `len` copies of `value` in device memory; a dry device only counts them.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn filled<T: Pod>(&self, what: &'static str, len: usize, value: T) -> Result<Buffer<T>> {
        let mut buffer = self.zeros(what, len)?;
        if !self.is_dry() {
            buffer.write(0, &vec![value; len])?;
        }
        Ok(buffer)
    }

    /// Allocates `len` copies of `value` in host memory that kernels write to; nothing on a dry device.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn mapped<T: Pod>(&self, what: &'static str, len: usize, value: T) -> Result<Mapped<T>> {
        let (len, memory) = if self.is_dry() {
            (0, Allocation::device(self, what, 0)?)
        } else {
            let bytes = allocated::<T>(what, len)?;
            (
                len,
                Allocation::host(self, what, bytes, MemoryKind::Mapped)?,
            )
        };
        let mut mapped = Mapped {
            memory: Arc::new(memory),
            len,
            marker: PhantomData,
        };
        (0..len).for_each(|i| mapped.store(i, value));
        Ok(mapped)
    }
}

/// Values in device memory.
pub struct Buffer<T> {
    memory: Arc<Allocation>,
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

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The same memory once more.
    pub(crate) fn share(&self) -> Self {
        Buffer {
            memory: Arc::clone(&self.memory),
            len: self.len,
            marker: PhantomData,
        }
    }

    pub(super) fn region(&self) -> Region<'_> {
        Region {
            memory: &self.memory,
            len: self.len,
            value_bytes: size_of::<T>(),
        }
    }

    pub(super) fn gpu(&self) -> &Gpu {
        self.memory.gpu()
    }

    /// The device address of the `n` values from index `at` on.
    pub(super) fn range(&self, op: &'static str, at: usize, n: usize) -> Result<Address> {
        if at.checked_add(n).is_some_and(|end| end <= self.len) {
            return Ok(self.memory.address(at * size_of::<T>()));
        }
        Err(Error::Shape {
            op,
            what: "range",
            expected: format!("within {} values", self.len),
            found: format!("{n} from {at}"),
        })
    }

    /// Writes `values` from index `at` on; they are in place when this returns.
    ///
    /// # Errors
    /// [`Error::Shape`] if they do not fit.
    pub fn write(&mut self, at: usize, values: &[T]) -> Result<()> {
        let to = self.range("device write", at, values.len())?;
        // SAFETY: the range is inside the allocation, and `values` exist until they are copied.
        let copy = |s| unsafe { result::memcpy_htod_async(to.0, values, s) };
        self.memory.gpu().0.copy("copying to the GPU", copy)
    }

    /// Reads `out.len()` values from index `at` on. Writes by work in streams that has not ended
    /// may or may not be included.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer values.
    pub fn read(&self, at: usize, out: &mut [T]) -> Result<()> {
        let from = self.range("device read", at, out.len())?;
        self.memory.gpu().0.bind()?;
        // SAFETY: the range is inside the allocation, and the call waits.
        check("copying from the GPU", unsafe {
            result::memcpy_dtoh_sync(out, from.0)
        })
    }
}

/// Host memory that kernels may write to at any time, and that the host reads value by value.
pub struct Mapped<T> {
    memory: Arc<Allocation>,
    len: usize,
    marker: PhantomData<T>,
}

impl<T: Pod> Mapped<T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn region(&self) -> Region<'_> {
        Region {
            memory: &self.memory,
            len: self.len,
            value_bytes: size_of::<T>(),
        }
    }

    fn place(&self, i: usize) -> *mut T {
        assert!(i < self.len, "value {i} of {}", self.len);
        (self.memory.address as *mut T).wrapping_add(i)
    }

    /// Reads value `i`, which the device may be writing. Values that it wrote before that one, with a
    /// fence in between, are then visible as well.
    ///
    /// # Panics
    /// If there is no such value.
    pub fn load(&self, i: usize) -> T {
        // SAFETY: in bounds; volatile, as the device writes it. All bit patterns are valid.
        let value = unsafe { self.place(i).read_volatile() };
        fence(Ordering::Acquire);
        value
    }

    /// Writes value `i`, which the device may be reading.
    ///
    /// # Panics
    /// If there is no such value.
    pub fn store(&mut self, i: usize, value: T) {
        // SAFETY: see `load`.
        unsafe { self.place(i).write_volatile(value) }
    }
}

/// A device address as a kernel argument; zero is null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Address(pub(super) u64);

impl Address {
    /// The null address.
    pub(crate) const NULL: Address = Address(0);

    /// The address this many bytes further on, which must be inside the range that was checked.
    pub(crate) fn plus(self, bytes: usize) -> Self {
        Address(self.0 + bytes as u64)
    }

    /// The address as a value of a table that kernels follow.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// True for a multiple of `bytes`.
    pub(crate) fn is_aligned(self, bytes: u64) -> bool {
        self.0.is_multiple_of(bytes)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Checked, Gpu, GpuInfo};
    use nq_kernels::Account;

    /// On a dry device memory is only counted: no driver is needed.
    #[test]
    fn a_dry_device_counts_what_is_allocated() {
        let gpu = Gpu::dry(GpuInfo::default(), Account::gpu());
        let bytes = || gpu.account().held();
        let mut values = gpu.upload("a test", &[1f32; 300]).unwrap();
        values.write(200, &[2.0; 100]).unwrap();
        assert!(values.write(201, &[2.0; 100]).is_err());
        assert_eq!(bytes(), 1200);
        let ids = Checked::new(&gpu, "a test", 7, 3u32, 4).unwrap();
        assert!(gpu.mapped("a test", 50, 0u32).unwrap().is_empty());
        assert_eq!(bytes(), 1228);
        drop(ids);
        assert_eq!((bytes(), gpu.account().peak()), (1200, 1228));
        let read = values.read(0, &mut [0.0]).unwrap_err().to_string();
        assert!(read.contains("dry device"), "{read}");
        assert!(gpu.pinned::<u32>("a test", 1).is_err());
        assert!(gpu.stream().is_err() && gpu.free_memory().is_err());
    }
}
