//! Sums over the ranks of a model. One GPU stands in for several if there are no others: all its kernels must then be
//! loaded before some wait for others, `CUDA_MODULE_LOADING=EAGER`, and streams in queues of their own,
//! `CUDA_DEVICE_MAX_CONNECTIONS=32`.

use super::common::normal;
use super::{finish, gpu, guarded};
use nq_kernels::cuda::{
    AllReduce, Buffer, Gpu, Inbox, Rank, Share, Stream, StreamOptions, device_count,
};

/// Most rows and their width.
const SIZE: (usize, usize) = (130, 1032);

/// A rank: its stream, sums, and rows on it.
struct Member {
    gpu: Gpu,
    stream: Stream,
    sums: AllReduce,
    share: Buffer<f32>,
}

/// Ranks on these GPUs.
fn members(gpus: &[Gpu], beside: bool, through_host: bool) -> Vec<Member> {
    let rank = |rank| Rank {
        rank,
        ranks: gpus.len(),
        through_host,
        beside,
    };
    let inbox = |(r, gpu): (usize, &Gpu)| Inbox::new(gpu, rank(r), SIZE).unwrap();
    let inboxes: Vec<Inbox> = gpus.iter().enumerate().map(inbox).collect();
    let member = |(r, gpu): (usize, &Gpu)| Member {
        stream: gpu
            .stream_with(StreamOptions { beside, room: None })
            .unwrap(),
        sums: AllReduce::new(gpu, r, inboxes.clone()).unwrap(),
        share: gpu.zeros("a test", SIZE.0 * SIZE.1).unwrap(),
        gpu: gpu.clone(),
    };
    gpus.iter().enumerate().map(member).collect()
}

/// GPUs for `n` ranks, and true if they share one; none if that cannot be.
fn gpus(n: usize) -> Option<(Vec<Gpu>, bool)> {
    let first = gpu()?;
    if device_count().is_ok_and(|count| count >= n) {
        let gpus: Vec<Gpu> = (0..n).map(|i| Gpu::open(i).unwrap()).collect();
        let reach = |a: &Gpu| gpus.iter().all(|b| a.reach(b).unwrap());
        if gpus.iter().all(reach) {
            return Some((gpus, false));
        }
    }
    let set = |name: &str, value: &str| std::env::var(name).is_ok_and(|v| v == value);
    if set("CUDA_MODULE_LOADING", "EAGER") && set("CUDA_DEVICE_MAX_CONNECTIONS", "32") {
        return Some((vec![first; n], true));
    }
    println!(
        "skipped: {n} ranks on one GPU without CUDA_MODULE_LOADING=EAGER and CUDA_DEVICE_MAX_CONNECTIONS=32"
    );
    None
}

#[test]
fn sums_over_ranks() {
    for (ranks, through_host) in [(2, false), (3, false), (2, true)] {
        let Some((gpus, beside)) = gpus(ranks) else {
            return;
        };
        let mut members = members(&gpus, beside, through_host);
        // Rows up to 64 go as words. Places are used by turns.
        for (call, m) in [1, 130, 64, 1, 65, 2, 3, 130, 130, 17]
            .into_iter()
            .enumerate()
        {
            let n = m * SIZE.1;
            let seed = |r: usize| (call * 10 + r) as u64;
            let start = normal(n, seed(9));
            let shares: Vec<Vec<f32>> = (0..ranks).map(|r| normal(n, seed(r))).collect();
            let sum = |i: usize| start[i] + shares.iter().fold(0f32, |sum, s| sum + s[i]);
            let expected: Vec<u32> = (0..n).map(|i| sum(i).to_bits()).collect();
            let mut rows: Vec<Buffer<f32>> = (members.iter_mut().zip(&shares))
                .map(|(member, share)| {
                    member.share.write(0, share).unwrap();
                    guarded(&member.gpu, &start)
                })
                .collect();
            for (member, x) in members.iter_mut().zip(&mut rows) {
                let share = Share::Cleared(&mut member.share);
                member.stream.all_reduce(x, share, &member.sums, m).unwrap();
            }
            for (r, (member, x)) in members.iter().zip(&rows).enumerate() {
                let found: Vec<u32> = finish(&member.stream, x)
                    .iter()
                    .map(|v| v.to_bits())
                    .collect();
                assert!(
                    found == expected,
                    "rank {r} of {ranks}, call {call} of {m} rows"
                );
                let mut left = vec![1f32; SIZE.0 * SIZE.1];
                member.share.read(0, &mut left).unwrap();
                assert!(left.iter().all(|v| *v == 0.0), "a share is left");
                assert!(!member.sums.is_lost());
            }
        }
    }
}

#[test]
fn a_rank_that_waits_in_vain_gives_up() {
    let Some((gpus, beside)) = gpus(2) else {
        return;
    };
    let mut members = members(&gpus, beside, false);
    let mut x = guarded(&gpus[0], &vec![0f32; SIZE.0 * SIZE.1]);
    let Some(alone) = members.first_mut() else {
        return;
    };
    // The second call does not wait any more.
    for m in [1, 130] {
        let share = Share::Cleared(&mut alone.share);
        alone
            .stream
            .all_reduce(&mut x, share, &alone.sums, m)
            .unwrap();
    }
    finish(&alone.stream, &x);
    assert!(alone.sums.is_lost());
}

#[test]
fn inboxes_of_other_models_are_refused() {
    let Some(gpu) = gpu() else { return };
    let rank = |rank, ranks| Rank {
        rank,
        ranks,
        through_host: false,
        beside: true,
    };
    assert!(Inbox::new(&gpu, rank(2, 2), SIZE).is_err());
    assert!(Inbox::new(&gpu, rank(0, 9), SIZE).is_err());
    let inbox = |r, rows| Inbox::new(&gpu, rank(r, 2), (rows, SIZE.1)).unwrap();
    for inboxes in [
        vec![],
        vec![inbox(0, 5)],
        vec![inbox(0, 5), inbox(0, 5)],
        vec![inbox(0, 5), inbox(1, 6)],
    ] {
        assert!(AllReduce::new(&gpu, 0, inboxes).is_err());
    }
    let sums = AllReduce::new(&gpu, 0, vec![inbox(0, 5), inbox(1, 5)]).unwrap();
    let stream = gpu.stream().unwrap();
    let zeros = |n| gpu.zeros("a test", n).unwrap();
    let (mut x, mut share) = (zeros(6 * SIZE.1), zeros(6 * SIZE.1));
    assert!(
        stream
            .all_reduce(&mut x, Share::Cleared(&mut share), &sums, 6)
            .is_err()
    );
    let mut short = zeros(5 * SIZE.1 - 1);
    assert!(
        stream
            .all_reduce(&mut x, Share::Cleared(&mut short), &sums, 5)
            .is_err()
    );
}
