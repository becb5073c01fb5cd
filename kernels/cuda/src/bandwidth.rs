//! Measures how fast the device's memory can be read, the limit to compare products with, and how fast the host's memory
//! comes to it.

use super::driver::{Gpu, LaunchShape, Mark};
use super::kernel::kernels;
use crate::cuda::reference::ReadArgs;
use nq_kernels::Result;

kernels! {
    FILL_ALL: ReadArgs = "fill_all" in "reference.cu",
        test "kernels/cuda/tests/cuda/driver.rs::memory_is_read_at_a_likely_rate", bench "read_all";
    READ_ALL: ReadArgs = "read_all" in "reference.cu",
        test "kernels/cuda/tests/cuda/driver.rs::memory_is_read_at_a_likely_rate", bench "read_all";
}

/// Bytes of a copy whose time tells the rate of the bus.
const COPIED: usize = 64 << 20;

impl Gpu {
    /// Bytes per second, by [`Gpu::read_bandwidth`] over a buffer that is large compared with the cache and takes at most half of the free
    /// memory.
    pub fn memory_bandwidth(&self) -> Result<f64> {
        let bytes = (32 * self.info().l2_bytes).min(self.free_memory()? / 2);
        self.read_bandwidth(bytes)
    }

    /// Bytes per second when reading `bytes` of device memory: the median of nine passes after
    /// two for warming up. `bytes` should be many times the L2 cache.
    ///
    /// # Errors
    /// [`nq_kernels::Error::DeviceMemory`]; errors of the driver.
    pub fn read_bandwidth(&self, bytes: usize) -> Result<f64> {
        let x = self.zeros::<u32>("measuring the bandwidth", bytes / 4)?;
        let out = self.zeros::<u32>("measuring the bandwidth", 1)?;
        let stream = self.stream()?;
        let o = stream.operands("read_all");
        let args = ReadArgs {
            x: o.of("values", &x, &[x.len()])?,
            out: o.of("sum", &out, &[1])?,
            words: (x.bytes() / 16) as u64,
        };
        let shape = LaunchShape::new([self.info().multiprocessors * 8, 1, 1], 512);
        // SAFETY: the kernel writes `words` 16-byte words of x.
        unsafe { stream.launch(&FILL_ALL, shape, &args)? };
        let mut marks: Vec<Mark> = Vec::new();
        for _ in 0..11 {
            // SAFETY: the kernel reads `words` 16-byte words of x.
            unsafe { stream.launch(&READ_ALL, shape, &args)? };
            marks.push(stream.mark()?);
        }
        stream.synchronize()?;
        Ok(x.bytes() as f64 / median_between(&marks[1..])?)
    }

    /// Bytes per second at which page-locked memory of the host comes to the device: the median of five copies after one
    /// for warming up.
    ///
    /// # Errors
    /// [`nq_kernels::Error::DeviceMemory`] if there is no room for 64 MiB in either memory; errors of the driver.
    pub fn copy_bandwidth(&self) -> Result<f64> {
        let what = "measuring the bus";
        let (from, to) = (self.locked(what, COPIED)?, self.zeros::<u8>(what, COPIED)?);
        let stream = self.stream()?;
        let mut marks: Vec<Mark> = Vec::new();
        for _ in 0..7 {
            stream.write_locked(&to, 0, &from, 0, COPIED)?;
            marks.push(stream.mark()?);
        }
        stream.synchronize()?;
        Ok(COPIED as f64 / median_between(&marks[1..])?)
    }
}

/// The median of the seconds between neighbours of at least two marks that have passed.
fn median_between(marks: &[Mark]) -> Result<f64> {
    let between = marks.windows(2).map(|pair| pair[0].seconds_until(&pair[1]));
    let mut seconds = between.collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}
