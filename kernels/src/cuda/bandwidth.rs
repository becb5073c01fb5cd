//! How fast the device's memory can be read: what products are held against.

use super::driver::{Address, Gpu, LaunchShape, Mark};
use crate::error::Result;

impl Gpu {
    /// Bytes per second of reading `bytes` of device memory: the median of nine passes after
    /// two that warm up. `bytes` should be many times the L2 cache.
    ///
    /// # Errors
    /// [`crate::Error::DeviceMemory`]; the driver's.
    pub fn read_bandwidth(&self, bytes: usize) -> Result<f64> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            x: Address,
            out: Address,
            words: u64,
        }
        let x = self.zeros::<u32>("measuring the bandwidth", bytes / 4)?;
        let out = self.zeros::<u32>("measuring the bandwidth", 1)?;
        let args = Args {
            x: x.at(0),
            out: out.at(0),
            words: (x.bytes() / 16) as u64,
        };
        let shape = LaunchShape {
            grid: (self.info().multiprocessors * 8, 1, 1),
            threads: 512,
            shared: 0,
            overlap: false,
        };
        let stream = self.stream()?;
        // SAFETY: the arguments are the kernel's: it writes `words` 16-byte words of x.
        unsafe { stream.launch("fill_all", shape, &args)? };
        let mut marks: Vec<Mark> = Vec::new();
        for _ in 0..11 {
            // SAFETY: the arguments are the kernel's: it reads `words` 16-byte words of x,
            // which outlives the stream's work.
            unsafe { stream.launch("read_all", shape, &args)? };
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
