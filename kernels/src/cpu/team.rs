//! A team of threads that runs one operation after another.

use rayon::prelude::*;

/// A fixed number of threads that share the work of one operation at a time.
pub struct Team {
    pool: rayon::ThreadPool,
}

impl Team {
    /// A team of `threads` threads; `None` takes one per available core.
    pub fn new(threads: Option<usize>) -> Self {
        let n = threads
            .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
            .unwrap_or(1);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(n.max(1))
            .build();
        Team {
            pool: pool.expect("the system can start threads"),
        }
    }

    /// Members of the team.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Calls `f(i)` once for every `i < tasks`, spread over the team, and returns when all
    /// are done. Tasks must not depend on each other's order.
    pub fn run(&self, tasks: usize, f: impl Fn(usize) + Sync + Send) {
        if tasks <= 1 {
            (0..tasks).for_each(f);
        } else {
            self.pool.install(|| (0..tasks).into_par_iter().for_each(f));
        }
    }

    /// Splits `data` into consecutive pieces of `piece` elements (the last may be shorter)
    /// and calls `f(index, piece)` for each, spread over the team.
    pub fn run_chunks<T: Send>(
        &self,
        data: &mut [T],
        piece: usize,
        f: impl Fn(usize, &mut [T]) + Sync + Send,
    ) {
        self.pool.install(|| {
            data.par_chunks_mut(piece.max(1))
                .enumerate()
                .for_each(|(i, p)| f(i, p));
        });
    }
}
