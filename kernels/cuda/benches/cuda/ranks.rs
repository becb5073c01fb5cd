//! Benches of what two GPUs exchange.

use super::timing::Timing;
use nq_cuda::{
    Buffer, Collectives, Gathered, Gpu, Inbox, Rank, Share, Stream, StreamOptions, device_count,
};
use nq_kernels::Result;
use nq_model::Dims;

/// Sums in a recorded graph, and runs of the graph.
const CHAIN: usize = 64;
const RUNS: usize = 9;
/// Hidden sizes of 8B and 32B.
const WIDTHS: [usize; 2] = [4096, 5120];
/// Tokens of Qwen3.
const VOCAB: usize = 151_936;

/// What is measured.
#[derive(Clone, Copy)]
enum Exchange {
    /// Sums of rows.
    Sums,
    /// Rows of which each rank has one half of the columns.
    Halves,
    /// Rows of the first rank.
    Handover,
}

/// A rank: its stream, its way to the other, its share of a sum or its columns, and rows.
struct Member {
    stream: Stream,
    collectives: Collectives,
    own: Buffer<f32>,
    rows: Buffer<f32>,
}

impl Member {
    fn run(&mut self, what: Exchange, (m, width): (usize, usize)) -> Result<()> {
        let Member {
            stream,
            collectives,
            own,
            rows,
        } = self;
        let (columns, from) = match what {
            Exchange::Sums => {
                let share = Share::Cleared(own);
                return stream.all_reduce(rows, share, collectives, Dims::new(m, width));
            }
            Exchange::Halves => ([0..width / 2, width / 2..width], Some(&*own)),
            Exchange::Handover => ([0..width, 0..0], None),
        };
        let gathered = Gathered {
            from,
            to: rows,
            columns: &columns,
            best: None,
        };
        stream.all_gather(gathered, collectives, Dims::new(m, width))
    }
}

/// Microseconds a call of two ranks, and the rate of what a rank sends.
pub(crate) fn ranks(t: &mut Timing) -> Result<()> {
    if device_count()? < 2 {
        println!("  skipped: one GPU");
        return Ok(());
    }
    let gpus = [t.gpu.clone(), Gpu::open(1)?];
    let reach = gpus[0].reach(&gpus[1])? && gpus[1].reach(&gpus[0])?;
    for through_host in [false, true] {
        if !(through_host || reach) {
            println!("  these GPUs do not reach each other's memory");
            continue;
        }
        for width in WIDTHS {
            for m in [1, 4, 16, 64, 512, 2048] {
                measure(&gpus, through_host, Exchange::Sums, (m, width))?;
            }
            for m in [1, 16, 512, 2048] {
                measure(&gpus, through_host, Exchange::Handover, (m, width))?;
            }
        }
        for m in [1, 16, 64] {
            measure(&gpus, through_host, Exchange::Halves, (m, VOCAB))?;
        }
    }
    Ok(())
}

fn measure(
    gpus: &[Gpu; 2],
    through_host: bool,
    what: Exchange,
    (m, width): (usize, usize),
) -> Result<()> {
    let member = |rank| Rank {
        rank,
        ranks: 2,
        through_host,
        beside: false,
    };
    let inbox = |r: usize| Inbox::new(&gpus[r], member(r), m * width);
    let inboxes = vec![inbox(0)?, inbox(1)?];
    let mut members = Vec::new();
    for (r, gpu) in gpus.iter().enumerate() {
        members.push(Member {
            stream: gpu.stream_with(StreamOptions::default())?,
            collectives: Collectives::new(gpu, r, inboxes.clone())?,
            own: gpu.zeros("a benchmark", m * width)?,
            rows: gpu.zeros("a benchmark", m * width)?,
        });
    }
    let chain = if m > 64 { 8 } else { CHAIN };
    // Loads the kernels, which cannot be recorded.
    let mut graphs = Vec::new();
    for member in &mut members {
        member.run(what, (m, width))?;
        let stream = member.stream.clone();
        graphs.push(stream.record(|| (0..chain).try_for_each(|_| member.run(what, (m, width))))?);
    }
    let mut seconds = Vec::new();
    for _ in 0..RUNS {
        gpus.iter().try_for_each(Gpu::synchronize)?;
        let begin = members[0].stream.mark()?;
        for (member, graph) in members.iter().zip(&graphs) {
            member.stream.run(graph)?;
        }
        let end = members[0].stream.mark()?;
        gpus.iter().try_for_each(Gpu::synchronize)?;
        seconds.push(begin.seconds_until(&end)? / chain as f64);
    }
    seconds.sort_by(f64::total_cmp);
    let median = seconds[RUNS / 2];
    let way = if through_host { "host" } else { "peer" };
    let (name, sent) = match what {
        Exchange::Sums => ("sums of", m * width),
        Exchange::Halves => ("halves of", m * width / 2),
        Exchange::Handover => ("handover of", m * width),
    };
    println!(
        "  {name:<11} {m:>5} rows of {width} through {way:<4} {:>10.2} us {:>8.1} GB/s of values",
        median * 1e6,
        (4 * sent) as f64 / median / 1e9
    );
    Ok(())
}
