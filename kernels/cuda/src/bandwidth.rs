//! Measures how fast the device's memory can be read, the limit to compare products with.

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
        let mut seconds = Vec::new();
        for pair in marks[1..].windows(2) {
            seconds.push(pair[0].seconds_until(&pair[1])?);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(x.bytes() as f64 / seconds[seconds.len() / 2])
    }
}
