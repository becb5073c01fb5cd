//! Benches of sums over two GPUs.

use super::timing::Timing;
use nq_kernels::Result;
use nq_kernels::cuda::{AllReduce, Gpu, Inbox, Rank, Share, StreamOptions, device_count};

/// Sums in a recorded graph, and runs of the graph.
const CHAIN: usize = 64;
const RUNS: usize = 9;
/// Hidden sizes of 8B and 32B.
const WIDTHS: [usize; 2] = [4096, 5120];

/// Sums of rows of two ranks: microseconds a call, and the rate of what a rank sends.
pub(crate) fn ranks(t: &mut Timing) -> Result<()> {
    if device_count()? < 2 {
        println!("  skipped: one GPU");
        return Ok(());
    }
    let gpus = [t.gpu.clone(), Gpu::open(1)?];
    for through_host in [false, true] {
        let reach = gpus[0].reach(&gpus[1])? && gpus[1].reach(&gpus[0])?;
        if !(through_host || reach) {
            println!("  these GPUs do not reach each other's memory");
            continue;
        }
        for width in WIDTHS {
            for m in [1, 4, 16, 64, 512, 2048] {
                let of = |rank| Rank {
                    rank,
                    ranks: 2,
                    through_host,
                    beside: false,
                };
                let inbox = |r: usize| Inbox::new(&gpus[r], of(r), (m, width));
                let inboxes = vec![inbox(0)?, inbox(1)?];
                let mut members = Vec::new();
                for (r, gpu) in gpus.iter().enumerate() {
                    let stream = gpu.stream_with(StreamOptions::default())?;
                    let sums = AllReduce::new(gpu, r, inboxes.clone())?;
                    let zeros = || gpu.zeros::<f32>("a benchmark", m * width);
                    members.push((stream, sums, zeros()?, zeros()?));
                }
                let chain = if m > 64 { 8 } else { CHAIN };
                // Loads the kernels, which cannot be recorded.
                let mut graphs = Vec::new();
                for (stream, sums, x, share) in &mut members {
                    stream.all_reduce(x, Share::Cleared(share), sums, m)?;
                    graphs.push(stream.record(|| {
                        (0..chain)
                            .try_for_each(|_| stream.all_reduce(x, Share::Cleared(share), sums, m))
                    })?);
                }
                let mut seconds = Vec::new();
                for _ in 0..RUNS {
                    gpus.iter().try_for_each(Gpu::synchronize)?;
                    let begin = members[0].0.mark()?;
                    for ((stream, ..), graph) in members.iter().zip(&graphs) {
                        stream.run(graph)?;
                    }
                    let end = members[0].0.mark()?;
                    gpus.iter().try_for_each(Gpu::synchronize)?;
                    seconds.push(begin.seconds_until(&end)? / chain as f64);
                }
                seconds.sort_by(f64::total_cmp);
                let median = seconds[RUNS / 2];
                let way = if through_host { "host" } else { "peer" };
                println!(
                    "  {m:>5} rows of {width} through {way:<4} {:>10.2} us {:>8.1} GB/s of values",
                    median * 1e6,
                    (4 * m * width) as f64 / median / 1e9
                );
            }
        }
    }
    Ok(())
}
