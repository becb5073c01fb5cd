//! Page-locked memory that copies to the device go through.

use super::gpu::Gpu;
use super::pinned::Pinned;
use crate::error::Result;
use bytemuck::Pod;

/// Two page-locked buffers by turns: one is filled while the other is copied.
pub(crate) struct Staging<T> {
    buffers: [Pinned<T>; 2],
    turns: usize,
}

impl<T: Pod> Staging<T> {
    /// Buffers of `len` values each.
    pub(crate) fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let buffer = || gpu.pinned("a staging buffer", len);
        Ok(Staging {
            buffers: [buffer()?, buffer()?],
            turns: 0,
        })
    }

    /// Values of a buffer.
    pub(crate) fn len(&self) -> usize {
        self.buffers[0].len()
    }

    /// The buffer whose turn it is, to be filled and copied from.
    pub(crate) fn turn(&mut self) -> &mut Pinned<T> {
        self.turns += 1;
        &mut self.buffers[self.turns % 2]
    }
}
