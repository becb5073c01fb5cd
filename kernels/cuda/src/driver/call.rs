//! Work of the host between kernels, one call of it.

use super::memory::Allocation;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What the CPU does with copies of values of two buffers: it may change those of the first. It runs on a
/// thread of the driver, must not use the GPU, and must not own anything that does. If it panics, the
/// first values become NaN.
pub type HostWork = dyn Fn(&mut [f32], &[f32]) + Send + Sync;

/// One call of a [`HostWork`]: queued once, or recorded in a graph, which then owns it.
pub(super) struct Call {
    pub(super) work: Arc<HostWork>,
    pub(super) memory: Arc<Allocation>,
    /// Values of the first and of the second buffer, one after the other.
    pub(super) first: usize,
    pub(super) second: usize,
}

impl Call {
    pub(super) fn run(&self) {
        let at = self.memory.address(0).0 as *mut f32;
        // SAFETY: the allocation holds `first + second` initialized values. The stream's copies into it are
        // done, those out of it have not begun, and other calls run before or after.
        let values = unsafe { std::slice::from_raw_parts_mut(at, self.first + self.second) };
        let (first, second) = values.split_at_mut(self.first);
        let done = catch_unwind(AssertUnwindSafe(|| (self.work)(first, second)));
        if done.is_err() {
            first.fill(f32::NAN);
        }
    }
}
