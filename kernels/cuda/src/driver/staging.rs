//! Page-locked memory for copies to the device.

use super::gpu::Gpu;
use super::memory::Buffer;
use super::pinned::Pinned;
use super::stream::Stream;
use bytemuck::Pod;
use nq_kernels::Result;

/// Two page-locked buffers used in turn: one is filled while the other is copied.
pub(crate) struct Staging<T> {
    buffers: [Pinned<T>; 2],
    turns: usize,
}

impl<T: Pod> Staging<T> {
    /// Allocates buffers of `len` values each.
    pub(crate) fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let buffer = || gpu.pinned("a staging buffer", len);
        Ok(Staging {
            buffers: [buffer()?, buffer()?],
            turns: 0,
        })
    }

    /// Number of values in a buffer.
    pub(crate) fn len(&self) -> usize {
        self.buffers[0].len()
    }

    /// The next buffer, to be filled and copied from.
    pub(crate) fn turn(&mut self) -> &mut Pinned<T> {
        self.turns += 1;
        &mut self.buffers[self.turns % 2]
    }

    /// The buffer of the turn before.
    fn other(&self) -> &Pinned<T> {
        &self.buffers[(self.turns + 1) % 2]
    }
}

impl Stream {
    /// Copies `values` to index `at` of `to`, in order with the stream's other work, through
    /// `staging`, which is allocated as needed. Waits only for the copy before the latest one.
    ///
    /// # Errors
    /// [`nq_kernels::Error::Shape`] if they do not fit; [`nq_kernels::Error::DeviceMemory`]; errors of the driver.
    pub(crate) fn write_staged<T: Pod>(
        &self,
        to: &mut Buffer<T>,
        at: usize,
        staging: &mut Option<Staging<T>>,
        values: &[T],
    ) -> Result<()> {
        let from = match staging {
            Some(there) if there.len() >= values.len() => there,
            // Growing in small steps would allocate again and again.
            none => none.insert(Staging::new(self.gpu(), values.len().next_power_of_two())?),
        };
        let from = from.turn();
        from.values_mut()?[..values.len()].copy_from_slice(values);
        self.write(to, at, from, 0..values.len())
    }

    /// Calls `take` with the first `len` values of `from`, part by part in order, each with its index, while the part behind
    /// it is copied. Waits for the stream's other work.
    ///
    /// # Errors
    /// As of [`Stream::write_staged`].
    pub(crate) fn read_staged<T: Pod>(
        &self,
        from: &Buffer<T>,
        len: usize,
        staging: &mut Staging<T>,
        mut take: impl FnMut(usize, &[T]),
    ) -> Result<()> {
        let step = staging.len();
        let part = |at: usize| step.min(len - at);
        for at in (0..len + step).step_by(step) {
            if at < len {
                self.read(from, at, staging.turn(), 0..part(at))?;
            } else {
                staging.turn();
            }
            if let Some(before) = at.checked_sub(step).filter(|before| *before < len) {
                take(before, &staging.other().values()?[..part(before)]);
            }
        }
        Ok(())
    }
}
