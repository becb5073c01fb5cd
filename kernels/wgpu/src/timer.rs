//! How long operations take on the device, by timestamps between launches.

use crate::gpu::Gpu;
use nq_kernels::profile::Key;
use nq_runtime::Result;
use std::time::Duration;
use wgpu::{Buffer, CommandEncoder, ComputePass, QUERY_SET_MAX_QUERIES, QuerySet};

/// Operations of a pass that can be timed.
pub(crate) const MOST_TIMED: usize = QUERY_SET_MAX_QUERIES as usize / 2;

/// Timestamps of one run of a program.
pub(crate) struct Timer {
    set: QuerySet,
    /// Where the device writes timestamps, and from where the host reads them.
    resolved: Buffer,
    results: Buffer,
    /// Timestamps so far.
    written: u32,
    /// Each operation with the bytes that it reads and the number of the timestamp at its end, behind that at its
    /// beginning.
    ops: Vec<(Key, usize, u32)>,
}

impl Timer {
    /// One without timestamps.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if memory is short.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let bytes = 8 * QUERY_SET_MAX_QUERIES as usize;
        Ok(Timer {
            set: gpu.timestamps(QUERY_SET_MAX_QUERIES),
            resolved: gpu.resolved(bytes)?,
            results: gpu.staging(bytes)?,
            written: 0,
            ops: Vec::new(),
        })
    }

    fn write(&mut self, pass: &mut ComputePass<'_>) -> Option<u32> {
        let number = self.written;
        if number == QUERY_SET_MAX_QUERIES {
            return None;
        }
        self.written += 1;
        pass.write_timestamp(&self.set, number);
        Some(number)
    }

    /// The first operation of `pass` begins.
    pub(crate) fn begin(&mut self, pass: &mut ComputePass<'_>) {
        self.write(pass);
    }

    /// The operation that began with the last timestamp ends.
    pub(crate) fn ends(&mut self, pass: &mut ComputePass<'_>, op: Key, bytes: usize) {
        if let Some(number) = self.write(pass) {
            self.ops.push((op, bytes, number));
        }
    }

    /// Adds to `encoder` what brings the timestamps to the host.
    pub(crate) fn resolve(&self, encoder: &mut CommandEncoder) {
        encoder.resolve_query_set(&self.set, 0..self.written, &self.resolved, 0);
        let bytes = 8 * u64::from(self.written);
        encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.results, 0, bytes);
    }

    /// Counts the operations once the commands have run.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if the device failed.
    pub(crate) fn count(self, gpu: &Gpu) -> Result<()> {
        let mut words = Vec::new();
        gpu.read(&self.results, 8 * self.written as usize, &mut words)?;
        let at = |number: u32| {
            let [low, high] = [0, 1].map(|i| u64::from(words[2 * number as usize + i].to_bits()));
            low | high << 32
        };
        for (op, bytes, end) in self.ops {
            let ticks = at(end).saturating_sub(at(end - 1));
            let nanoseconds = ticks as f64 * f64::from(gpu.timestamp_period());
            gpu.profile
                .add(op, Duration::from_nanos(nanoseconds as u64), bytes);
        }
        Ok(())
    }
}
