//! Attention for many rows of one sequence.

use super::attention::{HEAD_DIM, LayerPages, row_heads};
use super::driver::{Buffer, LaunchShape, Stream};
use super::kernel::kernels;
use super::pack::SPAN;
use crate::cuda::attention_prefill::PrefillArgs;
use nq_kernels::Result;

/// New tokens of one sequence among the rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceRows {
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub count: usize,
    /// Position of the first row.
    pub position: usize,
    /// The sequence.
    pub slot: usize,
}

kernels! {
    ATTENTION_PREFILL: PrefillArgs = "attention_prefill" in "attention_prefill.cu",
        test "kernels/cuda/tests/cuda/attention.rs::attention", bench "attention_prefill",
        instances &["attention_prefill_fp16", "attention_prefill_int8",
                    "attention_prefill_wide_fp16", "attention_prefill_wide_int8"];
}

impl Stream {
    /// Attention of one sequence's new rows over its cache, which already holds their keys and values:
    /// `out` `[rows, heads * width padded to 256]` in FP16, in operand order.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn attention_prefill(
        &self,
        qkv: &Buffer<f32>,
        sequence: SequenceRows,
        heads: usize,
        cache: LayerPages<'_>,
        out: &mut Buffer<u16>,
    ) -> Result<()> {
        let o = self.operands("attention_prefill");
        let SequenceRows {
            row,
            count,
            position,
            slot,
        } = sequence;
        let there = cache.places();
        o.at_least("rows", 1, count)?;
        o.at_most("positions", there.positions, position.saturating_add(count))?;
        o.at_least("sequences", slot.saturating_add(1), there.slots)?;
        o.multiple("query heads", cache.kv_heads(), heads)?;
        let end = row.saturating_add(count);
        let (dim, kv_heads) = (cache.head_dim(), cache.kv_heads());
        let padded = (heads * dim).next_multiple_of(SPAN);
        let args = PrefillArgs {
            qkv: o.of("qkv", qkv, &[end, row_heads(dim, heads, kv_heads), dim])?,
            cache: cache.args(&o)?,
            out: o.of("FP16 output", out, &[end, padded])?,
            row0: row as i32,
            count: count as i32,
            position0: position as i32,
            slot: slot as i32,
            heads: heads as i32,
            padded: padded as i32,
        };
        // `PrefillShared`: two buffers of keys and values of a tile, and of scales.
        let positions = 64 * HEAD_DIM / dim;
        let bytes = if cache.is_int8() { 1 } else { 2 };
        let shape = LaunchShape::new([count.div_ceil(64), heads, 1], 128)
            .shared(4 * positions * dim * bytes + 8 * positions);
        let kernel = ATTENTION_PREFILL.instance(cache.instance());
        // SAFETY: the operands were checked, and that the rows are in the cache.
        unsafe { self.launch(kernel, shape, &args) }
    }
}
