//! Where the time of a forward pass goes: calls, seconds and bytes per operation.

use nq_model::Dims;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Counts operations while switched on; while off, it costs a relaxed load per operation.
#[derive(Default)]
pub struct Profile {
    on: AtomicBool,
    entries: Mutex<BTreeMap<Key, OpTotal>>,
}

/// Operation, kernel and shape, as in [`OpTiming`].
pub type Key = (&'static str, &'static str, Dims);

#[derive(Default)]
struct OpTotal {
    calls: u64,
    time: Duration,
    bytes: u64,
}

/// Cost of one operation since [`Profile::start`].
#[derive(Clone, Debug, PartialEq)]
pub struct OpTiming {
    /// The operation, e.g. `qkv` or `attention`.
    pub op: &'static str,
    /// The kernel that ran it.
    pub kernel: &'static str,
    /// `(out, in)` of a Linear; `(heads, head_dim)` of attention; `(1, width)` otherwise.
    pub shape: Dims,
    /// Number of calls.
    pub calls: u64,
    /// Total wall time in seconds.
    pub seconds: f64,
    /// Total bytes of weights or cache that had to be read.
    pub bytes: u64,
}

impl Profile {
    /// Resets the counts and starts counting.
    pub fn start(&self) {
        self.lock().clear();
        self.on.store(true, Ordering::Relaxed);
    }

    /// Stops counting and returns the counts, the most expensive operation first.
    pub fn stop(&self) -> Vec<OpTiming> {
        self.on.store(false, Ordering::Relaxed);
        let entries = std::mem::take(&mut *self.lock());
        let mut timings: Vec<_> = entries
            .into_iter()
            .map(|((op, kernel, shape), e)| OpTiming {
                op,
                kernel,
                shape,
                calls: e.calls,
                seconds: e.time.as_secs_f64(),
                bytes: e.bytes,
            })
            .collect();
        timings.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        timings
    }

    /// The time now, if counting.
    pub fn begin(&self) -> Option<Instant> {
        self.on.load(Ordering::Relaxed).then(Instant::now)
    }

    /// Counts an operation that began at `begin`.
    pub fn end(
        &self,
        begin: Option<Instant>,
        op: &'static str,
        kernel: &'static str,
        shape: Dims,
        bytes: usize,
    ) {
        if let Some(begin) = begin {
            self.add((op, kernel, shape), begin.elapsed(), bytes);
        }
    }

    /// True while counting.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Counts an operation that took `time`.
    pub fn add(&self, key: Key, time: Duration, bytes: usize) {
        let mut entries = self.lock();
        let entry = entries.entry(key).or_default();
        entry.calls += 1;
        entry.time += time;
        entry.bytes += bytes as u64;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, OpTotal>> {
        self.entries
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
