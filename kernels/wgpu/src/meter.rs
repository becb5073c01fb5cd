//! How fast an adapter's memory is read.

use crate::gpu::{BoundKernel, Gpu, Grid, LaunchPass};
use crate::source::KernelSource;
use nq_runtime::Result;
use std::time::Instant;
use wgpu::Buffer;

/// Measures how fast the memory of an adapter is read. The adapter stays open, so that repeated measurements time
/// nothing else.
pub struct AdapterMeter {
    gpu: Gpu,
    kernel: BoundKernel,
    buffer: Buffer,
}

/// Most bytes that are read at once: more than any cache holds.
const BYTES: usize = 1 << 29;

/// Vectors of 16 bytes that an invocation reads.
const EACH: usize = 8;

/// Reads of the buffer in one measurement.
const READS: usize = 8;

impl AdapterMeter {
    /// Opens the adapter of number `ordinal`.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if it is absent, or has too little memory.
    pub fn open(ordinal: usize) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        let source = KernelSource::new(&[include_str!("wgsl/read.wgsl")]).with("EACH", EACH);
        let bytes = BYTES.min(gpu.most_bytes() / 2).next_power_of_two();
        let buffer = gpu.buffer("memory to read", bytes)?;
        let sums = gpu.buffer("sums", 16)?;
        Ok(AdapterMeter {
            kernel: gpu.bound(&source, &[&buffer, &sums])?,
            gpu,
            buffer,
        })
    }

    /// Measured bytes per second: the best of four measurements.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if the device fails.
    pub fn read_bandwidth(&self) -> Result<f64> {
        let bytes = self.buffer.size() as usize;
        let groups = bytes / (16 * 256 * EACH);
        let mut best = 0f64;
        // The first one also clears the buffer.
        for _ in 0..5 {
            let mut encoder = self.gpu.encoder();
            {
                let mut pass = LaunchPass::new(&mut encoder, None);
                for _ in 0..READS {
                    self.kernel.launch(&mut pass, Grid::new(groups, 1));
                }
            }
            let start = Instant::now();
            self.gpu.submit(encoder);
            self.gpu.finish()?;
            best = best.max((READS * bytes) as f64 / start.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}
