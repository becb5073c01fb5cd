//! A team of threads that runs one operation after another.
//!
//! A forward pass is some hundred short operations in a row, each done by all threads
//! together. Between two of them the members spin, so that handing over costs about a
//! microsecond; they sleep only after a pause as long as a context switch.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::memory::SharedSlice;

/// Iterations of the wait loop before a member sleeps: some 50 microseconds.
const SPINS: u32 = 2_000;

/// Keeps values that different threads write on different cache lines (two, because
/// prefetchers fetch lines in pairs).
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

/// Options of a [`Team`].
#[derive(Clone, Copy, Debug, Default)]
pub struct TeamOptions {
    /// Number of members; `None`: one per physical core.
    pub threads: Option<usize>,
    /// Binds every worker to a core of its own and leaves one to the caller (Linux). The
    /// caller itself is not bound: threads that it starts would inherit that.
    pub pin: bool,
}

/// A fixed number of threads that share the work of one operation at a time. The calling
/// thread is member 0. An operation started while another one runs (inside it, or on
/// another thread) is done by its caller alone.
pub struct Team {
    state: Arc<TeamState>,
    workers: Vec<JoinHandle<()>>,
}

type TeamJob = *const (dyn Fn(usize) + Sync);

struct TeamState {
    /// Counts operations; a change tells the workers to run `job`.
    epoch: Padded<AtomicUsize>,
    /// Workers that have not finished the current job.
    pending: Padded<AtomicUsize>,
    /// True while a caller's job is running.
    busy: AtomicBool,
    /// The current job: written while `pending` is 0 and before `epoch` changes, read afterwards.
    job: UnsafeCell<Option<TeamJob>>,
    quit: AtomicBool,
    sleeping: Vec<Padded<AtomicBool>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. It is written only by the
// holder of `busy` while no worker is pending, and read by workers between the `epoch`
// change they acquire and the `pending` decrement they release; the pointee is `Sync`.
unsafe impl Sync for TeamState {}
// SAFETY: as above.
unsafe impl Send for TeamState {}

impl Team {
    /// A team of `threads` threads; `None`: one per physical core.
    pub fn new(threads: Option<usize>) -> Self {
        Self::with(TeamOptions {
            threads,
            ..TeamOptions::default()
        })
    }

    /// A team with these options.
    pub fn with(options: TeamOptions) -> Self {
        let n = options.threads.unwrap_or_else(physical_cores).max(1);
        let state = Arc::new(TeamState {
            epoch: Padded::default(),
            pending: Padded::default(),
            busy: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            quit: AtomicBool::new(false),
            sleeping: (1..n).map(|_| Padded::default()).collect(),
            panic: Mutex::new(None),
        });
        let cores = if options.pin { cores() } else { Vec::new() };
        let workers = (1..n)
            .map(|member| {
                let state = Arc::clone(&state);
                let core = cores.get(member).copied();
                std::thread::Builder::new()
                    .name(format!("nq-team-{member}"))
                    .spawn(move || {
                        if let Some(core) = core {
                            pin_to(core);
                        }
                        state.work(member);
                    })
                    .expect("the system can start threads")
            })
            .collect();
        Team { state, workers }
    }

    /// Number of members of the team.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(member)` once on every member at the same time and returns when all are
    /// done. False, without any call, if the team is busy.
    fn fork(&self, f: &(dyn Fn(usize) + Sync)) -> bool {
        let state = &*self.state;
        if self.workers.is_empty() || state.busy.swap(true, Ordering::Acquire) {
            return false;
        }
        // SAFETY: the pointer's lifetime is erased, but this function does not return before
        // every worker has finished with it (`pending` reaches 0 below).
        let job: TeamJob = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), TeamJob>(f) };
        // SAFETY: `busy` is held and the previous job's `pending` was waited for, so no
        // worker reads `job` now.
        unsafe { *state.job.get() = Some(job) };
        state.pending.0.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst here and in `wait_for_job`: either this thread sees that a worker sleeps,
        // or that worker sees the new epoch.
        state.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (sleeping, worker) in state.sleeping.iter().zip(&self.workers) {
            if sleeping.0.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        let mut turns = 0u32;
        while state.pending.0.load(Ordering::Acquire) > 0 {
            turns += 1;
            if turns < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let theirs = state
            .panic
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        state.busy.store(false, Ordering::Release);
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
        true
    }

    /// Splits `0..tasks` into one contiguous share per member, calls `f(range)` for
    /// pieces that together cover every task once, and returns when all are done. A member
    /// works through its own share in order, taking half of what is left but at least `grain` tasks
    /// at a time; when done, it takes pieces of the others' shares, which helps members
    /// whose cores are busy with other work. Which member runs a task therefore varies:
    /// results must not depend on it.
    pub(crate) fn run_ranges(
        &self,
        tasks: usize,
        grain: usize,
        f: impl Fn(Range<usize>) + Sync + Send,
    ) {
        let n = self.threads();
        let grain = grain.max(1);
        if tasks == 0 {
            return;
        }
        if n == 1 || tasks <= grain {
            return f(0..tasks);
        }
        let share = |member: usize| member * tasks / n..(member + 1) * tasks / n;
        // Progress in each member's share. On the stack for teams of usual size.
        let mut few: [Padded<AtomicUsize>; 16] = Default::default();
        let mut many = Vec::new();
        let next = if n <= few.len() {
            &mut few[..n]
        } else {
            many.resize_with(n, Padded::default);
            &mut many[..]
        };
        for (member, next) in next.iter_mut().enumerate() {
            *next.0.get_mut() = share(member).start;
        }
        let next = &*next;
        let forked = self.fork(&|member| {
            for victim in (0..n).map(|i| (member + i) % n) {
                let end = share(victim).end;
                while let Some(range) = take(&next[victim].0, end, grain) {
                    f(range);
                }
            }
        });
        if !forked {
            f(0..tasks);
        }
    }

    /// Calls `f(i)` once for every `i < tasks`, spread over the team, and returns when all
    /// are done. Tasks must not depend on each other's order.
    pub fn run(&self, tasks: usize, f: impl Fn(usize) + Sync + Send) {
        self.run_ranges(tasks, 1, |range| range.for_each(&f));
    }

    /// Splits `data` into consecutive pieces of `piece` elements (the last may be shorter)
    /// and calls `f(index, piece)` for each, spread over the team.
    pub(crate) fn run_chunks<T: Send>(
        &self,
        data: &mut [T],
        piece: usize,
        f: impl Fn(usize, &mut [T]) + Sync + Send,
    ) {
        let (len, piece) = (data.len(), piece.max(1));
        let shared = SharedSlice::new(data);
        self.run(len.div_ceil(piece), |i| {
            let range = i * piece..((i + 1) * piece).min(len);
            // SAFETY: every task `i` has a range of its own.
            f(i, unsafe { shared.part(range) });
        });
    }
}

/// Takes half of `*next .. end`, at least `grain`; `None` if nothing is left.
fn take(next: &AtomicUsize, end: usize, grain: usize) -> Option<Range<usize>> {
    let mut at = next.load(Ordering::Relaxed);
    while at < end {
        let to = (at + ((end - at) / 2).max(grain)).min(end);
        match next.compare_exchange_weak(at, to, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Some(at..to),
            Err(now) => at = now,
        }
    }
    None
}

impl Drop for Team {
    fn drop(&mut self) {
        self.state.quit.store(true, Ordering::Relaxed);
        self.state.epoch.0.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker's panics were caught and handed to the caller of the job.
            let _ = worker.join();
        }
    }
}

impl TeamState {
    /// The loop of a worker thread.
    fn work(&self, member: usize) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_job(member, seen);
            if self.quit.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the epoch just acquired was published after `job` was written, and
            // `job` and its pointee stay as they are until `pending` is decremented.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe {
                let job = (*self.job.get()).expect("set before the epoch");
                (*job)(member);
            }));
            if let Err(payload) = result {
                *self
                    .panic
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner) = Some(payload);
            }
            self.pending.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until the epoch differs from `seen` and returns it.
    fn wait_for_job(&self, member: usize, seen: usize) -> usize {
        for _ in 0..SPINS {
            let epoch = self.epoch.0.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let sleeping = &self.sleeping[member - 1].0;
        sleeping.store(true, Ordering::SeqCst);
        loop {
            let epoch = self.epoch.0.load(Ordering::SeqCst);
            if epoch != seen {
                sleeping.store(false, Ordering::Relaxed);
                return epoch;
            }
            std::thread::park();
        }
    }
}

/// Number of physical cores that this process may run on, at least 1. If the system does not tell
/// siblings apart, or grants less CPU time than that, the parallelism that it grants.
pub(crate) fn physical_cores() -> usize {
    let granted = std::thread::available_parallelism().map_or(1, usize::from);
    match cores().len() {
        0 => granted,
        n => n.min(granted),
    }
}

/// One logical CPU for each physical core that this process may run on; empty if the
/// system does not say.
#[cfg(target_os = "linux")]
fn cores() -> Vec<usize> {
    // SAFETY: plain data, for which zero bytes are a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the size is that of the set written to; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return Vec::new();
    }
    let mut siblings = std::collections::HashSet::new();
    (0..libc::CPU_SETSIZE as usize)
        // SAFETY: the index is below the set's size.
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .filter(|cpu| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            let group = std::fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string());
            siblings.insert(group)
        })
        .collect()
}

#[cfg(not(target_os = "linux"))]
fn cores() -> Vec<usize> {
    Vec::new()
}

/// Binds the calling thread to one logical CPU, if the system allows it.
#[cfg(target_os = "linux")]
fn pin_to(cpu: usize) {
    // SAFETY: plain data, for which zero bytes are a value; the index came from such a set;
    // 0 is the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

#[cfg(not(target_os = "linux"))]
fn pin_to(_cpu: usize) {}

/// Calls `f(panel, its part of data)` for all panels, spread over the team.
pub(super) fn spread<T: Send>(
    team: &Team,
    data: &mut [T],
    panel: usize,
    f: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    if panel == 0 {
        return;
    }
    let shared = SharedSlice::new(data);
    team.run_ranges(shared.len() / panel, 4, |panels| {
        for p in panels {
            // SAFETY: every panel is visited once.
            f(p, unsafe { shared.part(p * panel..(p + 1) * panel) });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 5] {
            let team = Team::new(Some(threads));
            for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                for grain in [1, 3, 64] {
                    let hits: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                    team.run_ranges(tasks, grain, |range| {
                        for i in range {
                            hits[i].fetch_add(1, Ordering::Relaxed);
                        }
                    });
                    assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn chunks_cover_the_slice_and_the_last_is_short() {
        let team = Team::new(Some(3));
        let mut data = vec![0usize; 1003];
        team.run_chunks(&mut data, 10, |i, piece| {
            assert_eq!(piece.len(), if i == 100 { 3 } else { 10 });
            piece.fill(i + 1);
        });
        assert!(data.iter().enumerate().all(|(i, &v)| v == i / 10 + 1));
    }

    #[test]
    fn wakes_after_sleep_and_survives_many_jobs() {
        let team = Team::new(Some(2));
        let count = AtomicUsize::new(0);
        for round in 0..2000 {
            if round % 500 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            team.run(2, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(count.load(Ordering::Relaxed), 4000);
    }

    #[test]
    fn nested_and_concurrent_use_run_inline() {
        let team = Team::new(Some(2));
        let count = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        team.run(4, |_| {
                            team.run(5, |_| {
                                count.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 3 * 100 * 4 * 5);
    }

    #[test]
    fn panics_reach_the_caller_and_the_team_lives_on() {
        let team = Team::new(Some(3));
        for bad in [0, 50, 99] {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                team.run(100, |i| assert!(i != bad, "task {i}"));
            }));
            let payload = caught.expect_err("the panic");
            let text = payload.downcast_ref::<String>().expect("a message");
            assert_eq!(text, &format!("task {bad}"));
        }
        let count = AtomicUsize::new(0);
        team.run(10, |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 10);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pinned_workers_have_a_core_each() {
        let granted = cores();
        let team = Team::with(TeamOptions {
            threads: Some(granted.len()),
            pin: true,
        });
        let seen = Mutex::new(Vec::new());
        let forked = team.fork(&|member| seen.lock().unwrap().push((member, cores())));
        assert_eq!(forked, granted.len() > 1);
        for (member, cores) in seen.into_inner().unwrap() {
            match member {
                0 => assert_eq!(cores, granted),
                n => assert_eq!(cores, [granted[n]]),
            }
        }
    }

    #[test]
    fn there_is_a_core() {
        assert!(physical_cores() >= 1);
    }
}
