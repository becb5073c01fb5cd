//! How fast this machine's memory can be read: the limit that speeds are compared with.

use super::Cpu;
use super::memory::{Buffer, Shared};
use super::simd::LANES;
use std::hint::black_box;
use std::time::Instant;

/// Read bandwidth over repeated passes, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Median of the passes.
    pub median: f64,
    /// Fastest pass.
    pub best: f64,
    /// Bytes read in each pass.
    pub bytes: usize,
}

/// Timed passes.
const PASSES: usize = 7;

/// Words of one task: 1 MiB.
const PIECE: usize = 1 << 18;

impl Cpu {
    /// Reads a buffer of `bytes` (rounded up to whole MiB) several times with all threads,
    /// each streaming a contiguous part, and measures the speed. For main memory take far
    /// more than the last-level cache holds: 1 GiB.
    pub fn read_bandwidth(&self, bytes: usize) -> Bandwidth {
        let pieces = bytes.div_ceil(4 * PIECE).max(1);
        let mut buffer = Buffer::<u32>::zeroed(pieces * PIECE);
        {
            // Untouched pages would all be the same page of zeros.
            let words = Shared::new(&mut buffer);
            self.team().run_ranges(pieces, 1, |range| {
                for i in range.start * PIECE..range.end * PIECE {
                    // SAFETY: each word is written by the task that owns its piece.
                    unsafe { words.part(i..i + 1)[0] = i as u32 | 1 };
                }
            });
        }
        let mut speeds: Vec<f64> = (0..PASSES)
            .map(|_| {
                let begin = Instant::now();
                self.team().run_ranges(pieces, 1, |range| {
                    let words = &buffer[range.start * PIECE..range.end * PIECE];
                    black_box((self.table.checksum)(words));
                });
                (4 * buffer.len()) as f64 / begin.elapsed().as_secs_f64()
            })
            .collect();
        speeds.sort_by(f64::total_cmp);
        Bandwidth {
            median: speeds[PASSES / 2],
            best: speeds[PASSES - 1],
            bytes: 4 * buffer.len(),
        }
    }
}

/// Sums of the words as floats, 16 lanes by 4: every byte is read, nothing else is done.
#[inline(always)]
pub(crate) fn checksum<S: super::simd::Simd>(s: S, words: &[u32]) -> f32 {
    let (lines, _) = words.as_chunks::<LANES>();
    let (fours, _) = lines.as_chunks::<4>();
    let mut sums = [s.splat(0.0); 4];
    for four in fours {
        for (sum, line) in sums.iter_mut().zip(four) {
            // SAFETY: an array of 16 words.
            let v = unsafe { s.load_bits(line.as_ptr()) };
            *sum = s.add(*sum, s.f32_units(v)[0]);
        }
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}
