//! Memory: the device's, and the host's that a device can address.

use super::{Gpu, check};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use cudarc::driver::{result, sys};
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages that the driver hands out.
const PAGE: usize = 2 << 20;

/// What an allocation of `bytes` takes of a device's memory: whole pages, or a part of one that
/// others share.
pub fn taken(bytes: usize) -> usize {
    match bytes {
        0..PAGE => bytes,
        _ => bytes.next_multiple_of(PAGE),
    }
}

/// Bytes that this process holds of devices' memory, and held at most since the mark was set.
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// Device memory that this process has allocated, as it is and at its peak: all devices
/// together, without what the driver takes for itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes held now.
    pub held: usize,
    /// Bytes held at most since [`MemoryUse::begin`], or since the process began.
    pub peak: usize,
}

impl MemoryUse {
    /// As it is now.
    pub fn now() -> Self {
        MemoryUse {
            held: HELD.load(Ordering::Relaxed),
            peak: MOST.load(Ordering::Relaxed),
        }
    }

    /// Forgets the peak: it begins with what is held now.
    pub fn begin() {
        MOST.store(HELD.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn take(bytes: usize) {
        let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
        MOST.fetch_max(held, Ordering::Relaxed);
    }

    fn give_back(bytes: usize) {
        HELD.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes of an allocation for `len` values.
fn allocated<T>(len: usize) -> usize {
    (len * size_of::<T>()).max(16)
}

impl Gpu {
    /// `len` values in device memory, all bytes zero. `what` is named if they do not fit.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn zeros<T: Pod>(&self, what: &'static str, len: usize) -> Result<Buffer<T>> {
        self.0.bind()?;
        let bytes = allocated::<T>(len);
        // SAFETY: the allocation is freed in `Drop`; every byte is set before it is read, and
        // any bytes are valid for a `Pod` type.
        let address = unsafe {
            let address = check(what, result::malloc_sync(bytes))?;
            MemoryUse::take(taken(bytes));
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

    pub(super) fn check_range(&self, op: &'static str, at: usize, n: usize) -> Result<()> {
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
            MemoryUse::give_back(taken(allocated::<T>(self.len)));
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
pub struct Address(pub(super) u64);

impl Address {
    /// No memory.
    pub const NULL: Address = Address(0);

    /// True at a multiple of `bytes`.
    pub(crate) fn is_aligned(self, bytes: u64) -> bool {
        self.0.is_multiple_of(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::{PAGE, taken};

    #[test]
    fn large_allocations_take_whole_pages() {
        assert_eq!(taken(100), 100);
        assert_eq!(taken(PAGE), PAGE);
        assert_eq!(taken(PAGE + 1), 2 * PAGE);
    }
}
