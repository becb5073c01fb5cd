//! Sums over the ranks of a model. One GPU stands in for several if there are no others: all its kernels must then be
//! loaded before some wait for others, `CUDA_MODULE_LOADING=EAGER`, and streams in queues of their own,
//! `CUDA_DEVICE_MAX_CONNECTIONS=32`.

use super::{finish, gpu, guarded};
use nq_cuda::{
    Buffer, Collectives, Gathered, Gpu, Inbox, Rank, Share, Stream, StreamOptions, device_count,
    gathered_best_len,
};
use nq_model::Dims;
use nq_testkit::weights::normal;
use std::ops::Range;

/// Most rows and their width.
const SIZE: (usize, usize) = (130, 1032);

/// A rank: its stream, sums, and rows on it.
struct Member {
    gpu: Gpu,
    stream: Stream,
    sums: Collectives,
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
    let inbox = |(r, gpu): (usize, &Gpu)| Inbox::new(gpu, rank(r), SIZE.0 * SIZE.1).unwrap();
    let inboxes: Vec<Inbox> = gpus.iter().enumerate().map(inbox).collect();
    let member = |(r, gpu): (usize, &Gpu)| Member {
        stream: gpu
            .stream_with(StreamOptions {
                beside,
                ..StreamOptions::default()
            })
            .unwrap(),
        sums: Collectives::new(gpu, r, inboxes.clone()).unwrap(),
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
        // Rings are gone around several times, from any place.
        for (call, m) in [1, 130, 64, 1, 65, 2, 3, 130, 130, 17]
            .into_iter()
            .enumerate()
        {
            let n = m * SIZE.1;
            let seed = |r: usize| (call * 10 + r) as u64;
            let start = normal(n, seed(9));
            let shares: Vec<Vec<f32>> = (0..ranks).map(|r| normal(n, seed(r))).collect();
            let sum = |i: usize| start[i] + shares.iter().fold(0f32, |sum, s| sum + sent(s[i]));
            let expected: Vec<u32> = (0..n).map(|i| sum(i).to_bits()).collect();
            let mut rows: Vec<Buffer<f32>> = (members.iter_mut().zip(&shares))
                .map(|(member, share)| {
                    member.share.write(0, share).unwrap();
                    guarded(&member.gpu, &start)
                })
                .collect();
            for (member, x) in members.iter_mut().zip(&mut rows) {
                let share = Share::Cleared(&mut member.share);
                member
                    .stream
                    .all_reduce(x, share, &member.sums, Dims::new(m, SIZE.1))
                    .unwrap();
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

/// A value as other ranks get it.
fn sent(v: f32) -> f32 {
    f32::from_bits(v.to_bits() & !1)
}

/// Each rank's columns come to all, with the greatest of each part of a row; between sums, and where a rank has none.
#[test]
fn columns_of_ranks() {
    for (ranks, through_host) in [(2, false), (3, false), (2, true)] {
        let Some((gpus, beside)) = gpus(ranks) else {
            return;
        };
        let mut members = members(&gpus, beside, through_host);
        let wide = 4 * 1500;
        for (call, (m, width, split)) in [
            (1, wide, vec![0, 2000, 4000, wide]),
            (130, SIZE.1, vec![0, SIZE.1, SIZE.1, SIZE.1]),
            (7, SIZE.1, vec![0, 0, SIZE.1, SIZE.1]),
            (21, wide, vec![0, 4, 2048, wide - 8]),
            (130, SIZE.1, vec![0, SIZE.1, SIZE.1, SIZE.1]),
            (3, SIZE.1, vec![0, 512, 516, 520]),
        ]
        .into_iter()
        .enumerate()
        {
            let columns: Vec<Range<usize>> = (0..ranks).map(|r| split[r]..split[r + 1]).collect();
            let (before, mut rows) = (normal(m * width, 1), normal(m * width, 2 + call as u64));
            // Of equal ones the first counts; what is not a number never does.
            rows[0] = f32::NAN;
            rows[split[1] / 2 + 1] = 9.0;
            rows[split[1] / 2 + 2] = 9.0;
            let has = |c: usize| columns.iter().any(|part| part.contains(&c));
            let all = (0..m * width).map(|i| {
                if has(i % width) {
                    sent(rows[i])
                } else {
                    before[i]
                }
            });
            let expected: Vec<u32> = all.map(f32::to_bits).collect();
            let segments = gathered_best_len(width);
            let each = (width / 4).div_ceil(segments) * 4;
            let best_of = |row: usize, segment: usize| {
                let columns = segment * each..((segment + 1) * each).min(width);
                let values = columns
                    .filter(|&c| has(c))
                    .map(|c| (c, rows[row * width + c]));
                values.filter(|(_, v)| !v.is_nan()).fold(
                    None,
                    |best: Option<(usize, f32)>, (c, v)| {
                        let v = sent(v);
                        match best {
                            Some((_, most)) if most >= v => best,
                            _ => Some((c, v)),
                        }
                    },
                )
            };
            // Nothing is copied or freed while a rank waits for another.
            let in_place = |r: usize| columns[r].len() == width && call % 2 == 0;
            let mut outs: Vec<_> = (members.iter().enumerate())
                .map(|(r, member)| {
                    let own = rows.chunks(width).flat_map(|row| &row[columns[r].clone()]);
                    let own: Vec<f32> = own.copied().collect();
                    let best = member.gpu.zeros("a test", m * segments).unwrap();
                    let to = match in_place(r) {
                        true => guarded(&member.gpu, &own),
                        false => guarded(&member.gpu, &before),
                    };
                    (to, best, guarded(&member.gpu, &own))
                })
                .collect();
            for (r, (member, (to, best, from))) in members.iter_mut().zip(&mut outs).enumerate() {
                let gathered = Gathered {
                    from: (!in_place(r) && !columns[r].is_empty()).then_some(&*from),
                    to,
                    columns: &columns,
                    best: Some(best),
                };
                let stream = &member.stream;
                stream
                    .all_gather(gathered, &member.sums, Dims::new(m, width))
                    .unwrap();
            }
            // A sum of zeros, once all ranks gather: loading a kernel may wait for those that run.
            for (member, (to, ..)) in members.iter_mut().zip(&mut outs) {
                let (share, sums) = (Share::Cleared(&mut member.share), &member.sums);
                member
                    .stream
                    .all_reduce(to, share, sums, Dims::new(m.min(2), SIZE.1))
                    .unwrap();
            }
            for (r, (member, (to, best, _))) in members.iter().zip(&outs).enumerate() {
                let found: Vec<u32> = finish(&member.stream, to)
                    .iter()
                    .map(|v| v.to_bits())
                    .collect();
                let what = format!("rank {r} of {ranks}, call {call}");
                let wrong = found.iter().zip(&expected).position(|(a, b)| {
                    let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
                    // The sum of zeros makes of a number that is none another one, and of a negative zero a zero.
                    a != b && !(a.is_nan() && b.is_nan())
                });
                assert_eq!(wrong, None, "{what}");
                let mut bests = vec![[0f32; 2]; m * segments];
                best.read(0, &mut bests).unwrap();
                for (i, found) in bests.iter().enumerate() {
                    if let Some((column, value)) = best_of(i / segments, i % segments) {
                        assert_eq!(
                            (found[0], found[1].to_bits()),
                            (value, column as u32),
                            "{what}"
                        );
                    }
                }
                assert!(!member.sums.is_lost(), "{what}");
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
            .all_reduce(&mut x, share, &alone.sums, Dims::new(m, SIZE.1))
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
    assert!(Inbox::new(&gpu, rank(2, 2), 4).is_err());
    assert!(Inbox::new(&gpu, rank(0, 9), 4).is_err());
    let inbox = |r, rows| Inbox::new(&gpu, rank(r, 2), rows * SIZE.1).unwrap();
    for inboxes in [
        vec![],
        vec![inbox(0, 5)],
        vec![inbox(0, 5), inbox(0, 5)],
        vec![inbox(0, 5), inbox(1, 6)],
    ] {
        assert!(Collectives::new(&gpu, 0, inboxes).is_err());
    }
    let sums = Collectives::new(&gpu, 0, vec![inbox(0, 5), inbox(1, 5)]).unwrap();
    let stream = gpu.stream().unwrap();
    let zeros = |n| gpu.zeros("a test", n).unwrap();
    let (mut x, mut share) = (zeros(6 * SIZE.1), zeros(6 * SIZE.1));
    assert!(
        stream
            .all_reduce(
                &mut x,
                Share::Cleared(&mut share),
                &sums,
                Dims::new(6, SIZE.1)
            )
            .is_err()
    );
    let mut short = zeros(5 * SIZE.1 - 1);
    assert!(
        stream
            .all_reduce(
                &mut x,
                Share::Cleared(&mut short),
                &sums,
                Dims::new(5, SIZE.1)
            )
            .is_err()
    );
}
