//! Measures how fast this machine's memory can be read, the limit to compare speeds with.

use super::memory::{Buffer, SharedSlice};
use super::table::KernelTable;
use super::{Cpu, IsaChoice, Linear};
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

/// Memory over which bandwidth is measured.
pub struct BandwidthBuffer(Buffer<u32>);

/// Number of timed passes.
const PASSES: usize = 7;

/// Words in one task: 1 MiB.
const PIECE: usize = 1 << 18;

/// Most words of weights that are read.
const MOST: usize = 1 << 28;

impl Cpu {
    /// A buffer of `bytes` (rounded up to whole MiB) for measuring bandwidth. To measure main
    /// memory, use far more than the last-level cache holds, e.g. 1 GiB.
    pub fn bandwidth_buffer(&self, bytes: usize) -> BandwidthBuffer {
        let pieces = bytes.div_ceil(4 * PIECE).max(1);
        let mut buffer = Buffer::<u32>::zeroed(pieces * PIECE);
        {
            // Untouched pages would all map to the same page of zeros.
            let words = SharedSlice::new(&mut buffer);
            self.team().run_ranges(pieces, 1, |range| {
                for i in range.start * PIECE..range.end * PIECE {
                    // SAFETY: each word is written by the task that owns its piece.
                    unsafe { words.part(i..i + 1)[0] = i as u32 | 1 };
                }
            });
        }
        BandwidthBuffer(buffer)
    }

    /// Reads the buffer several times with all threads, each streaming a contiguous part, and
    /// measures the speed.
    pub fn read_bandwidth(&self, buffer: &BandwidthBuffer) -> Bandwidth {
        let pieces: Vec<&[u32]> = buffer.0.chunks(PIECE).collect();
        self.passes(&pieces)
    }

    /// Measures the bandwidth of reading the packed codes of `weights`, at most 1 GiB of them, like
    /// [`Cpu::read_bandwidth`]. Weights that fit into a cache are read from
    /// there. `None` if none is packed.
    pub(crate) fn weights_bandwidth<'a>(
        &self,
        weights: impl Iterator<Item = &'a Linear>,
    ) -> Option<Bandwidth> {
        let mut left = MOST;
        let mut pieces = Vec::new();
        for words in weights.flat_map(Linear::packed_words) {
            let words = &words[..words.len().min(left)];
            left -= words.len();
            pieces.extend(words.chunks(PIECE));
        }
        (!pieces.is_empty()).then(|| self.passes(&pieces))
    }

    fn passes(&self, pieces: &[&[u32]]) -> Bandwidth {
        // Uses the machine's best instruction set, whichever one was forced for other operations.
        let table = IsaChoice::Auto
            .resolve()
            .map_or(self.table, KernelTable::of);
        let bytes = pieces.iter().map(|words| 4 * words.len()).sum();
        let mut speeds: Vec<f64> = (0..PASSES)
            .map(|_| {
                let begin = Instant::now();
                self.team().run_ranges(pieces.len(), 1, |range| {
                    for words in &pieces[range] {
                        black_box((table.checksum)(words));
                    }
                });
                bytes as f64 / begin.elapsed().as_secs_f64()
            })
            .collect();
        speeds.sort_by(f64::total_cmp);
        Bandwidth {
            median: speeds[PASSES / 2],
            best: speeds[PASSES - 1],
            bytes,
        }
    }
}
