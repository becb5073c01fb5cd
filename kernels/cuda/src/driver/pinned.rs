//! Page-locked host memory, and copies to and from it.

use super::errors::check;
use super::gpu::Gpu;
use super::memory::{Allocation, Buffer, MemoryKind, allocated};
use super::stream::{Mark, Stream};
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use nq_kernels::{Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;

impl Gpu {
    /// Allocates `len` zeroed values in page-locked host memory, for copies in both directions.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn pinned<T: Pod>(&self, what: &'static str, len: usize) -> Result<Pinned<T>> {
        Ok(Pinned {
            memory: Allocation::host(self, what, allocated::<T>(what, len)?, MemoryKind::Copied)?,
            len,
            copies: None,
            marker: PhantomData,
        })
    }
}

impl Stream {
    /// The buffer, if it belongs to this device.
    fn own<'a, T: Pod>(&self, op: &'static str, buffer: &'a Buffer<T>) -> Result<&'a Buffer<T>> {
        if buffer.gpu().is(self.gpu()) {
            Ok(buffer)
        } else {
            Err(Error::Shape {
                op,
                what: "memory",
                expected: self.gpu().info().to_string(),
                found: buffer.gpu().info().to_string(),
            })
        }
    }

    /// Copies the values `range` of `from` to index `at` of `to`, in order with the stream's other
    /// work.
    ///
    /// # Errors
    /// [`Error::Shape`] if they do not fit or do not belong to this device; [`Error::Cuda`] while a
    /// graph is recorded; errors of the driver.
    pub fn write<T: Pod>(
        &self,
        to: &mut Buffer<T>,
        at: usize,
        from: &mut Pinned<T>,
        range: Range<usize>,
    ) -> Result<()> {
        let op = "device write";
        let to = self.own(op, to)?.range(op, at, range.len())?;
        let n = range.len();
        self.gpu().0.bind()?;
        let copy = |from: *mut T| {
            // SAFETY: both ranges are in bounds. Neither memory is freed before the copy is done,
            // and the pinned values do not change before then.
            check("copying to the GPU", unsafe {
                let from = std::slice::from_raw_parts(from.cast_const(), n);
                result::memcpy_htod_async(to.0, from, self.raw())
            })
        };
        // SAFETY: the copy takes the `n` values of the range.
        unsafe { from.queue(op, self, range, copy) }
    }

    /// Copies the values from index `at` of `from` on to `range` of `to`, in order with the stream's
    /// other work.
    pub fn read<T: Pod>(
        &self,
        from: &Buffer<T>,
        at: usize,
        to: &mut Pinned<T>,
        range: Range<usize>,
    ) -> Result<()> {
        let op = "device read";
        let n = range.len();
        let from = self.own(op, from)?.range(op, at, n)?;
        self.gpu().0.bind()?;
        let copy = |to: *mut T| {
            // SAFETY: both ranges are in bounds. Neither memory is freed before the copy is done,
            // and the pinned values are not read before then.
            check("copying from the GPU", unsafe {
                let to = to.cast::<c_void>();
                sys::cuMemcpyDtoHAsync_v2(to, from.0, n * size_of::<T>(), self.raw()).result()
            })
        };
        // SAFETY: the copy fills the `n` values of the range.
        unsafe { to.queue(op, self, range, copy) }
    }
}

/// Page-locked host memory, to and from which [`Stream::write`] and [`Stream::read`] copy without
/// waiting. Accessing the values waits until the copies queued last are done:
///
/// ```no_run
/// # use nq_cuda::{Buffer, Pinned, Stream};
/// # fn f(s: &Stream, b: &mut Buffer<f32>, host: &mut Pinned<f32>) -> nq_kernels::Result<()> {
/// host.values_mut()?[0] = 1.0;
/// s.write(b, 0, host, 0..1)?;
/// s.read(b, 0, host, 0..1)?;
/// let values = host.values()?; // both copies are done
/// println!("{values:?}");
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0502
/// # use nq_cuda::{Buffer, Pinned, Stream};
/// # fn f(s: &Stream, b: &Buffer<f32>, host: &mut Pinned<f32>) -> nq_kernels::Result<()> {
/// let values = host.values()?;
/// s.read(b, 0, host, 0..1)?; // the borrowed values would change
/// println!("{values:?}");
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0502
/// # use nq_cuda::{Buffer, Pinned, Stream};
/// # fn f(s: &Stream, b: &mut Buffer<f32>, host: &mut Pinned<f32>) -> nq_kernels::Result<()> {
/// let values = host.values_mut()?;
/// s.write(b, 0, host, 0..1)?; // the values written next may be copied, or not
/// values[0] = 1.0;
/// # Ok(()) }
/// ```
pub struct Pinned<T> {
    memory: Allocation,
    len: usize,
    /// The stream of the copies queued last, and a mark after them.
    copies: Option<(Stream, Mark)>,
    marker: PhantomData<T>,
}

impl<T: Pod> Pinned<T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values, after waiting for copies of them.
    ///
    /// # Errors
    /// The first error of the work before those copies.
    pub fn values(&self) -> Result<&[T]> {
        self.wait()?;
        // SAFETY: `len` initialized values that live as long as `self`; no copy is running, and
        // none is queued while they are borrowed.
        Ok(unsafe { std::slice::from_raw_parts(self.host(), self.len) })
    }

    /// The values, mutable, after waiting for copies of them.
    pub fn values_mut(&mut self) -> Result<&mut [T]> {
        self.wait()?;
        // SAFETY: see `values`; the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.host(), self.len) })
    }

    fn host(&self) -> *mut T {
        self.memory.address(0).0 as *mut T
    }

    fn wait(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |(_, mark)| mark.wait())
    }

    /// Queues a copy of values `range` in `stream`; `copy` is called with their address.
    ///
    /// # Safety
    /// `copy` queues work in `stream` that uses no more than those values' bytes.
    pub(super) unsafe fn queue(
        &mut self,
        op: &'static str,
        stream: &Stream,
        range: Range<usize>,
        copy: impl FnOnce(*mut T) -> Result<()>,
    ) -> Result<()> {
        let fits = range.start <= range.end && range.end <= self.len;
        if !fits || !self.memory.gpu().is(stream.gpu()) {
            return Err(Error::Shape {
                op,
                what: "pinned values",
                expected: format!("within {} of {}", self.len, self.memory.gpu().info()),
                found: format!("{range:?} for {}", stream.gpu().info()),
            });
        }
        stream.refuse_recording(op)?;
        // There is one mark for all copies: those of another stream must be done.
        if let Some((other, _)) = &self.copies
            && !other.is(stream)
        {
            self.wait()?;
            self.copies = None;
        }
        let mark = match self.copies.take() {
            Some((_, mark)) => mark,
            None => stream.mark()?,
        };
        let queued = copy(self.host().wrapping_add(range.start));
        // Set even after an error: earlier copies may still be running.
        let marked = mark.set(stream);
        self.copies = Some((stream.clone(), mark));
        if marked.is_err() {
            stream.synchronize()?;
        }
        queued
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if let Some((_, mark)) = &self.copies {
            // After an error no copy is running, and later work reports it again.
            let _ = mark.wait();
        }
    }
}
