//! Copies within device memory.

use super::errors::check;
use super::memory::Buffer;
use super::stream::Stream;
use bytemuck::Pod;
use cudarc::driver::sys;
use nq_kernels::Result;
use std::ptr;

/// Where rows of values lie in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Index of the first row's first value.
    pub at: usize,
    /// Values from the beginning of a row to that of the next one.
    pub stride: usize,
}

/// Rows to be copied within device memory.
pub struct CopiedRows<'a, T> {
    /// What they are copied from.
    pub from: &'a Buffer<T>,
    /// Where they lie in it.
    pub begin: Strided,
    /// What they are copied to.
    pub to: &'a mut Buffer<T>,
    /// Where they come to lie in it.
    pub end: Strided,
    /// How many.
    pub rows: usize,
    /// Values of each.
    pub width: usize,
}

impl Stream {
    /// Copies rows in device memory, in order with the stream's other work. A
    /// graph may contain it.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if the rows are not within the buffers, or overlap; errors of the
    /// driver.
    pub fn copy_rows<T: Pod>(&self, copied: CopiedRows<'_, T>) -> Result<()> {
        let CopiedRows {
            from,
            begin,
            to,
            end,
            rows,
            width,
        } = copied;
        let o = self.operands("copy_rows");
        let Some(further) = rows.checked_sub(1).filter(|_| width > 0) else {
            return Ok(());
        };
        o.at_least("stride", width, begin.stride.min(end.stride))?;
        let all = |s: Strided| further.saturating_mul(s.stride).saturating_add(width);
        let from = o.part("rows", from, begin.at, &[all(begin)])?;
        let to = o.part("rows", to, end.at, &[all(end)])?;
        #[cfg(test)]
        if super::trace::is_imagined(self.gpu().info()) {
            return Ok(());
        }
        let bytes = |values: usize| values * size_of::<T>();
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: ptr::null(),
            srcDevice: from.0,
            srcArray: ptr::null_mut(),
            srcPitch: bytes(begin.stride),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: ptr::null_mut(),
            dstDevice: to.0,
            dstArray: ptr::null_mut(),
            dstPitch: bytes(end.stride),
            WidthInBytes: bytes(width),
            Height: rows,
        };
        self.gpu().0.bind()?;
        // SAFETY: both ranges were checked, and stay valid as operands do.
        let copied = unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw()) };
        check("copying in device memory", copied.result())
    }
}
