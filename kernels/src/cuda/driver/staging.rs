//! Page-locked memory that copies to the device go through.

use super::{Gpu, Mark, Pinned, Stream};
use crate::error::{Error, Result};
use bytemuck::Pod;

/// Two page-locked buffers by turns: one is filled while the other is copied.
pub(crate) struct Staging<T> {
    buffers: [(Pinned<T>, Option<Mark>); 2],
    turns: usize,
}

impl<T: Pod> Staging<T> {
    /// Buffers of `len` values each.
    pub(crate) fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let buffer = || Ok::<_, Error>((gpu.pinned("a staging buffer", len)?, None));
        Ok(Staging {
            buffers: [buffer()?, buffer()?],
            turns: 0,
        })
    }

    /// Values of a buffer.
    pub(crate) fn len(&self) -> usize {
        self.buffers[0].0.len()
    }

    /// Hands `fill` a buffer whose last copy is done; it writes there and queues copies from it
    /// in `stream`.
    pub(crate) fn turn<E: From<Error>>(
        &mut self,
        stream: &Stream,
        fill: impl FnOnce(&mut Pinned<T>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (host, pending) = &mut self.buffers[self.turns % 2];
        self.turns += 1;
        if let Some(mark) = pending.take() {
            mark.wait()?;
        }
        let filled = fill(host);
        // After an error, too: something may have been queued.
        *pending = Some(stream.mark()?);
        filled
    }
}

impl<T> Drop for Staging<T> {
    fn drop(&mut self) {
        for (_, mark) in &mut self.buffers {
            // An error has no one to hear of it here; later work meets it again.
            let _ = mark.take().map(|m| m.wait());
        }
    }
}
