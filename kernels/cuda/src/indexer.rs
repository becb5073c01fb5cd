//! Attention to positions that an indexer chooses: its memory, and the launchers (formulas: `cuda/indexer.cu`).

use super::attention::{LayerPages, WIDE_HEAD_DIM, row_heads};
use super::delta::DeltaSpan;
use super::driver::{Buffer, Checked, Gpu, Stream};
use super::hyper::{LayerRows, StreamSpans};
use super::kernel::kernels;
use super::pack::SPAN;
use super::rows::{Row, RowsOut, shape};
use crate::cuda::indexer::{
    ATTEND_THREADS, ATTEND_TILE, AttendArgs, CHOOSE_THREADS, INDEX_DIM as DIM, INDEX_THREADS,
    IndexArgs, MOST_ATTEND_GROUP, SCORED_BLOCKS, SCORED_ROWS, ScoresArgs,
};
use nq_kernels::Result;
use std::ops::Range;

/// The width of a head of an indexer that the kernels serve.
pub const INDEX_DIM: usize = DIM;
/// Most query heads of a key head of attention to chosen positions.
pub(crate) const MOST_GROUP: usize = MOST_ATTEND_GROUP;
/// Rows whose scores are in memory at once.
const SCORED_AT_ONCE: usize = 64;
/// Blocks of threads that few rows are cut into, about two for a multiprocessor.
const SPLIT_BLOCKS: usize = 264;
/// Most parts of the positions of a row.
const MOST_SPLITS: usize = 16;
/// Bytes of shared memory: `ChooseShared` and `AttendShared`.
const CHOOSE_SHARED: usize = 4 * (256 + CHOOSE_THREADS / 32 + 2);
const ATTEND_SHARED: usize =
    4 * (MOST_ATTEND_GROUP * (WIDE_HEAD_DIM + ATTEND_TILE + 2) + ATTEND_TILE);

/// Sizes of an indexer and of the attention that it chooses for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexSizes {
    /// Heads of its queries.
    pub heads: usize,
    /// Positions of a block.
    pub block: usize,
    /// Blocks that a row attends to, at most.
    pub most: usize,
    /// Query heads of attention.
    pub query_heads: usize,
    /// Key heads of attention.
    pub kv_heads: usize,
}

impl IndexSizes {
    /// Values of a row of its queries and its key.
    pub fn width(&self) -> usize {
        (self.heads + 1) * INDEX_DIM
    }

    /// Of `count` rows from `position` on, how many at the beginning attend to all positions up to their own.
    pub fn dense_rows(&self, position: usize, count: usize) -> usize {
        let first_chosen = (self.most + 1) * self.block - 1;
        count.min(first_chosen.saturating_sub(position))
    }
}

/// What an indexer has chosen for rows, and memory for that and for what they attend to.
pub struct ChosenBlocks {
    sizes: IndexSizes,
    chosen: Buffer<u32>,       // [rows, most]
    scores: Buffer<f32>,       // [SCORED_AT_ONCE, blocks of a sequence]
    sums: Buffer<f32>,         // [parts, group, 256]
    weights: Buffer<[f32; 2]>, // [parts, group]
    stride: usize,
}

impl ChosenBlocks {
    /// Allocates it for up to `rows` rows of sequences of up to `positions` positions.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, sizes: IndexSizes, rows: usize, positions: usize) -> Result<Self> {
        let stride = positions / sizes.block.max(1);
        let group = sizes.query_heads / sizes.kv_heads.max(1);
        let parts = (rows * sizes.kv_heads).max(SPLIT_BLOCKS) * group;
        Ok(ChosenBlocks {
            chosen: gpu.zeros("activations", rows * sizes.most)?,
            scores: gpu.zeros("activations", SCORED_AT_ONCE.min(rows) * stride)?,
            sums: gpu.zeros("activations", parts * WIDE_HEAD_DIM)?,
            weights: gpu.zeros("activations", parts)?,
            sizes,
            stride,
        })
    }

    /// Sizes.
    pub fn sizes(&self) -> IndexSizes {
        self.sizes
    }

    /// The rows of `spans` for which blocks are chosen, as many at a time as there is room for their scores.
    pub fn scored(&self, spans: &[DeltaSpan]) -> Vec<ScoredRows> {
        let sizes = self.sizes;
        let end = |s: &DeltaSpan| s.rows.row + s.rows.count;
        let chosen = spans
            .iter()
            .map(|s| s.rows.row + sizes.dense_rows(s.rows.position, s.rows.count)..end(s));
        let mut all = Vec::new();
        for range in joined(chosen) {
            for first in range.clone().step_by(SCORED_AT_ONCE) {
                let rows = first..range.end.min(first + SCORED_AT_ONCE);
                let among = spans
                    .iter()
                    .filter(|s| s.rows.row < rows.end && end(s) > first);
                let whole = |s: &DeltaSpan| {
                    (s.rows.position + end(s).min(rows.end) - s.rows.row) / sizes.block
                };
                let blocks = among.map(whole).max().unwrap_or(0);
                all.push(ScoredRows { rows, blocks });
            }
        }
        all
    }

    /// The most blocks that a step scores for a row whose sequence has `positions` with it: one of few numbers, since a recorded
    /// step has one; 0 if the row attends to all positions.
    pub(crate) fn scored_in_step(&self, positions: usize) -> usize {
        let whole = positions / self.sizes.block;
        match whole > self.sizes.most {
            true => whole.next_power_of_two().min(self.stride),
            false => 0,
        }
    }
}

/// Rows for which blocks are chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredRows {
    /// Which.
    pub rows: Range<usize>,
    /// The most whole blocks that any of them has before it.
    pub blocks: usize,
}

/// The vectors of a layer's indexer.
pub struct IndexVectors<'a> {
    /// Gains of the norms of a head of the queries and of a block's key, `[INDEX_DIM]`.
    pub gains: [&'a Buffer<f32>; 2],
    /// `[positions, 32]` of (cos, sin).
    pub cos_sin: &'a Buffer<[f32; 2]>,
    /// Epsilon of RMSNorm.
    pub eps: f32,
}

kernels! {
    INDEX_QUERIES: IndexArgs = "index_queries" in "indexer.cu",
        test "kernels/cuda/tests/cuda/indexer.rs::chosen_positions", bench "indexer";
    INDEX_KEYS: IndexArgs = "index_keys" in "indexer.cu",
        test "kernels/cuda/tests/cuda/indexer.rs::chosen_positions", bench "indexer";
    KEEP_INDEX_KEYS: IndexArgs = "keep_index_keys" in "indexer.cu",
        test "kernels/cuda/tests/cuda/indexer.rs::chosen_positions", bench "indexer";
    INDEX_SCORES: ScoresArgs = "index_scores" in "indexer.cu",
        test "kernels/cuda/tests/cuda/indexer.rs::chosen_positions", bench "indexer";
    CHOOSE_BLOCKS: ScoresArgs = "choose_blocks" in "indexer.cu",
        test "kernels/cuda/tests/cuda/indexer.rs::chosen_positions", bench "indexer";
    ATTEND_BLOCKS: AttendArgs = "attend_blocks" in "indexer.cu",
        test "kernels/cuda/tests/cuda/indexer.rs::chosen_positions", bench "indexer";
    JOIN_SPLITS: AttendArgs = "join_splits" in "indexer.cu",
        test "kernels/cuda/tests/cuda/indexer.rs::chosen_positions", bench "indexer";
}

/// Neighbouring rows of a pass in as few ranges as possible.
pub(crate) fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for range in ranges.filter(|r| !r.is_empty()) {
        match all.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => all.push(range),
        }
    }
    all
}

impl Stream {
    /// Turns an indexer's queries, in place, of the products `index` `[m, heads + 1, INDEX_DIM]` of rows, which `spans` has
    /// all of, and makes the keys of the blocks that become whole in `pages`. The keys of sequences' last positions are in
    /// `kept`, which is brought forward. Then chooses blocks for those of the rows `scored` that may not attend to all positions.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    pub fn choose_positions(
        &self,
        index: &mut Buffer<f32>,
        rows: &Checked<Row>,
        spans: &StreamSpans,
        vectors: &IndexVectors<'_>,
        pages: LayerPages<'_>,
        kept: LayerRows<'_>,
        to: &mut ChosenBlocks,
        scored: &[ScoredRows],
        m: usize,
    ) -> Result<()> {
        let o = self.operands("choose_positions");
        let (sizes, there) = (to.sizes, rows.bounds());
        there.check(&o, pages.places())?;
        let turns = there.positions + there.images;
        let half = WIDE_HEAD_DIM / 8;
        let blocks = pages.block_keys(&o)?;
        if blocks.block as usize != sizes.block {
            return o.refuse("positions of a block", sizes.block, blocks.block);
        }
        let index_at = o.of("queries and keys", index, &[m, sizes.heads + 1, INDEX_DIM])?;
        let args = IndexArgs {
            index: index_at,
            rows: o.of("rows", rows.values(), &[m])?,
            q_gain: o.of("gain of queries", vectors.gains[0], &[INDEX_DIM])?,
            k_gain: o.of("gain of keys", vectors.gains[1], &[INDEX_DIM])?,
            cos_sin: o.of("angles", vectors.cos_sin, &[turns, half])?,
            blocks,
            kept: kept.args(&o, sizes.block * INDEX_DIM)?,
            m: m as i32,
            heads: sizes.heads as i32,
            eps: vectors.eps,
            spans: spans.args(&o, &kept, m, there)?,
            before_spans: [0; 1],
        };
        let warps = INDEX_THREADS / 32;
        let queries = shape([m, sizes.heads.div_ceil(warps)], INDEX_THREADS);
        // SAFETY: the operands were checked, and that the rows' angles are there.
        unsafe { self.launch(&INDEX_QUERIES, queries, &args)? };
        let most = spans.all().iter().map(|s| s.rows.count).max().unwrap_or(0);
        let parts = (most / sizes.block + 1).div_ceil(warps).min(256);
        let count = spans.all().len();
        // SAFETY: the operands were checked, and that the spans' rows, pages and places are there.
        unsafe {
            self.launch(&INDEX_KEYS, shape([parts, count], INDEX_THREADS), &args)?;
            self.launch(&KEEP_INDEX_KEYS, shape([1, count], INDEX_THREADS), &args)?;
        }
        for ScoredRows {
            rows,
            blocks: whole,
        } in scored
        {
            let (first, count, whole) = (rows.start, rows.len(), *whole);
            o.at_most("rows to be scored", m, rows.end)?;
            let args = ScoresArgs {
                index: index_at,
                rows: args.rows,
                blocks,
                scores: o.of("scores", &to.scores, &[count, to.stride])?,
                chosen: o.of("chosen blocks", &to.chosen, &[m, sizes.most])?,
                heads: sizes.heads as i32,
                most: sizes.most as i32,
                stride: to.stride as i32,
                first: first as i32,
                count: count as i32,
                padding: [0; 1],
            };
            o.at_most("blocks of a sequence", to.stride, whole)?;
            let grid = [whole.div_ceil(SCORED_BLOCKS), count.div_ceil(SCORED_ROWS)];
            let choose = shape([count, 1], CHOOSE_THREADS).shared(CHOOSE_SHARED);
            // SAFETY: the operands were checked, and that there is room for a score of every block.
            unsafe {
                self.launch(&INDEX_SCORES, shape(grid, INDEX_THREADS), &args)?;
                self.launch(&CHOOSE_BLOCKS, choose, &args)?;
            }
        }
        Ok(())
    }

    /// Attention of `range` of the rows, to the blocks that [`Stream::choose_positions`] chose for them, or to all positions
    /// up to their own, and the positions behind whole blocks. Keys and values are appended: `out` has rows of
    /// `[heads * 256]`, multiplied by their gates.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn attend_chosen(
        &self,
        qkv: &Buffer<f32>,
        rows: &Checked<Row>,
        range: Range<usize>,
        cache: LayerPages<'_>,
        chosen: &mut ChosenBlocks,
        out: &RowsOut<'_>,
    ) -> Result<()> {
        let o = self.operands("attend_chosen");
        let sizes = chosen.sizes;
        let (heads, kv_heads) = (sizes.query_heads, sizes.kv_heads);
        rows.bounds().check(&o, cache.places())?;
        o.multiple("query heads", kv_heads.max(1), heads)?;
        let (group, count, end) = (heads / kv_heads, range.len(), range.end);
        o.at_most("query heads of a key head", MOST_GROUP, group)?;
        o.at_least("key heads", cache.kv_heads(), kv_heads)?;
        o.at_most("key heads", cache.kv_heads(), kv_heads)?;
        o.at_least("width of a head", WIDE_HEAD_DIM, cache.head_dim())?;
        o.at_least("rows", 1, count)?;
        if cache.is_int8() {
            return o.refuse("keys and values", "FP16", "int8");
        }
        let splits = (SPLIT_BLOCKS / (count * kv_heads)).clamp(1, MOST_SPLITS);
        let parts = count * kv_heads * splits;
        let (full, half) = out.addresses(&o, end, heads * WIDE_HEAD_DIM)?;
        let width = row_heads(WIDE_HEAD_DIM, heads, kv_heads);
        let args = AttendArgs {
            qkv: o.of("qkv", qkv, &[end, width, WIDE_HEAD_DIM])?,
            rows: o.of("rows", rows.values(), &[end])?,
            chosen: o.of("chosen blocks", &chosen.chosen, &[end, sizes.most])?,
            cache: cache.args(&o)?,
            sums: o.of("sums", &chosen.sums, &[parts, group, WIDE_HEAD_DIM])?,
            scales: o.of("sums of weights", &chosen.weights, &[parts, group])?,
            half,
            out: full,
            heads: heads as i32,
            block: sizes.block as i32,
            most: sizes.most as i32,
            splits: splits as i32,
            first: range.start as i32,
            count: count as i32,
            padded: (heads * WIDE_HEAD_DIM).next_multiple_of(SPAN) as i32,
            padding: [0; 1],
        };
        let attend = shape([count, kv_heads * splits], ATTEND_THREADS).shared(ATTEND_SHARED);
        // SAFETY: the operands were checked; rows stand in pages, and chosen blocks are before them.
        unsafe {
            self.launch(&ATTEND_BLOCKS, attend, &args)?;
            self.launch(&JOIN_SPLITS, shape([count, heads], ATTEND_THREADS), &args)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{IndexSizes, joined};

    /// Rows that see one whole block more than they may attend to are the first for which blocks are chosen.
    #[test]
    fn rows_attend_to_all_positions_until_there_are_too_many_blocks() {
        let sizes = IndexSizes {
            heads: 4,
            block: 4,
            most: 512,
            query_heads: 24,
            kv_heads: 2,
        };
        for (position, count) in [(0, 4096), (2000, 100), (2050, 1), (2051, 5), (9000, 3)] {
            let dense = (position..position + count).filter(|p| (p + 1) / 4 <= 512);
            assert_eq!(sizes.dense_rows(position, count), dense.count());
        }
        let ranges = [0..3, 3..3, 3..5, 6..7, 7..9];
        assert_eq!(joined(ranges.into_iter()), [0..5, 6..9]);
    }
}
