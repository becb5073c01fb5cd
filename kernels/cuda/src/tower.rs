//! Kernels of a tower over the patches of one image (`cuda/tower.cu`): what it has beside products.

use super::driver::{Buffer, LaunchShape, Stream, Version};
use super::kernel::kernels;
use super::pack::SPAN;
use crate::cuda::tower::{
    TOWER_DIM, TOWER_KEYS, TOWER_QUERIES, TowerAttentionArgs, TowerGeluArgs, TowerHeadsArgs,
    TowerNormArgs, TowerPositionsArgs,
};
use crate::cuda::tower_wgmma::TOWER_STAGES;
use nq_kernels::Result;
use nq_model::vision::Grid;
use std::f32::consts::LOG2_E;
use std::ops::Range;

const TEST: &str = "kernels/cuda/tests/cuda/tower.rs::towers";

kernels! {
    POSITIONS: TowerPositionsArgs = "tower_positions" in "tower.cu", test TEST, bench "tower";
    NORM: TowerNormArgs = "tower_norm" in "tower.cu", test TEST, bench "tower";
    HEADS: TowerHeadsArgs = "tower_heads" in "tower.cu", test TEST, bench "tower";
    GELU: TowerGeluArgs = "tower_gelu" in "tower.cu", test TEST, bench "tower";
    ATTENTION: TowerAttentionArgs = "tower_attention" in "tower.cu", test TEST, bench "tower",
        instances &["tower_attention_64", "tower_attention_80"];
    WARPGROUPS: TowerAttentionArgs = "tower_warpgroups" in "tower_wgmma.cu", test TEST, bench "tower",
        instances &["tower_warpgroups_64", "tower_warpgroups_80"];
}

/// The patches of an image, in squares of `merge` by `merge`.
#[derive(Clone, Copy, Debug)]
pub struct ImageGrid {
    /// Rows and columns.
    pub grid: Grid,
    /// Patches of a side of a square.
    pub merge: usize,
}

/// The heads of a tower.
#[derive(Clone, Copy, Debug)]
pub struct ImageHeads {
    /// How many.
    pub count: usize,
    /// Values of each.
    pub dim: usize,
}

impl ImageHeads {
    /// The instance of kernels of attention that serves these heads, and the widths of keys and of values with padding.
    fn instance(self) -> Option<(usize, [usize; 2])> {
        let served = self.dim.is_multiple_of(4) && self.dim > 0;
        match self.dim {
            ..=64 if served => Some((0, [64, 64])),
            ..=72 if served => Some((1, [80, 72])),
            _ => None,
        }
    }

    /// True if kernels serve heads of this width.
    pub fn are_served(self) -> bool {
        self.instance().is_some()
    }

    /// Values of queries, keys and values of `m` patches.
    pub fn values(self, m: usize) -> usize {
        let wide = self.instance().map_or(0, |(_, [wide, _])| wide);
        3 * self.count * m.next_multiple_of(TOWER_KEYS) * wide
    }
}

/// A norm that subtracts the mean.
pub struct LayerNorm<'a> {
    /// `[width]`
    pub gain: &'a Buffer<f32>,
    /// `[width]`
    pub bias: &'a Buffer<f32>,
    /// Added to the variance.
    pub eps: f32,
}

impl Stream {
    /// True if attention is by products of warpgroups, which read keys and values in another order.
    fn has_warpgroups(&self, instance: usize) -> bool {
        let gpu = self.gpu();
        gpu.info().capability == Version::new(9, 0)
            && gpu.has_kernel(&WARPGROUPS.instance(instance))
    }

    /// Adds to rows `x` `[patches, width]` a `bias` `[width]` and their positions, interpolated between those of `table`
    /// `[side side, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn tower_positions(
        &self,
        x: &mut Buffer<f32>,
        bias: &Buffer<f32>,
        table: &Buffer<f32>,
        image: ImageGrid,
    ) -> Result<()> {
        let (o, width, m) = (
            self.operands("tower_positions"),
            bias.len(),
            image.grid.patches(),
        );
        let side = (table.len() / width.max(1)).isqrt();
        o.at_least("side of the table", 1, side)?;
        let args = TowerPositionsArgs {
            x: o.of("x", x, &[m, width])?,
            bias: o.of("bias", bias, &[width])?,
            table: o.of("table", table, &[side, side, width])?,
            width: width as i32,
            side: side as i32,
            rows: image.grid.h as i32,
            columns: image.grid.w as i32,
            merge: image.merge as i32,
            padding: [0; 1],
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch(&POSITIONS, LaunchShape::new([m, 1, 1], 128), &args) }
    }

    /// `half`, in FP16 and operand order: LayerNorm of rows `x` `[m, width]`, `together` of them side by side, once
    /// `added` has been added to each stretch of a row that is as long.
    ///
    /// # Errors
    /// As of [`Stream::tower_positions`].
    pub fn tower_norm(
        &self,
        x: &mut Buffer<f32>,
        added: Option<&Buffer<f32>>,
        norm: &LayerNorm<'_>,
        half: &mut Buffer<u16>,
        m: usize,
        together: usize,
    ) -> Result<()> {
        let (o, width) = (self.operands("tower_norm"), norm.gain.len());
        let added_width = added.map_or(width, Buffer::len);
        o.multiple("width", 4, width)?;
        o.multiple("added values", 4, added_width)?;
        o.at_least("added values", 4, added_width)?;
        o.multiple("width", added_width, width)?;
        o.at_least("rows side by side", 1, together)?;
        o.multiple("rows", together, m)?;
        let padded = (together * width).next_multiple_of(SPAN);
        let args = TowerNormArgs {
            x: o.of("x", x, &[m, width])?,
            added: o.optional("added values", added, &[added_width])?,
            gain: o.of("gain", norm.gain, &[width])?,
            bias: o.of("bias", norm.bias, &[width])?,
            half: o.of("FP16 output", half, &[m / together, padded])?,
            m: m as i32,
            width: width as i32,
            added_width: added_width as i32,
            together: together as i32,
            padded: padded as i32,
            eps: norm.eps,
        };
        let shape = LaunchShape::new([m.div_ceil(4), 1, 1], 128);
        // SAFETY: the operands were checked.
        unsafe { self.launch(&NORM, shape, &args) }
    }

    /// `out`: in FP16, head by head, the queries, keys and values that are `qkv` `[patches, 3, heads, dim]` with `bias`
    /// `[3, heads, dim]`; queries and keys are turned by the row and the column of their patch, whose cosines and sines
    /// are `turns` `[rows or columns, dim / 4]`.
    ///
    /// # Errors
    /// As of [`Stream::tower_positions`].
    pub fn tower_heads(
        &self,
        qkv: &Buffer<f32>,
        bias: &Buffer<f32>,
        turns: &Buffer<[f32; 2]>,
        out: &mut Buffer<u16>,
        heads: ImageHeads,
        image: ImageGrid,
    ) -> Result<()> {
        let (o, ImageHeads { count, dim }) = (self.operands("tower_heads"), heads);
        let Some((instance, [wide, of_values])) = heads.instance() else {
            return o.refuse("width of a head", "a multiple of 4 up to 72", dim);
        };
        let (grid, m) = (image.grid, image.grid.patches());
        let patches = m.next_multiple_of(TOWER_KEYS);
        let args = TowerHeadsArgs {
            qkv: o.of("qkv", qkv, &[m, 3, count, dim])?,
            bias: o.of("bias", bias, &[3, count, dim])?,
            turns: o.of("turns", turns, &[grid.h.max(grid.w), dim / 4])?,
            out: o.of("heads", out, &[3, count, patches, wide])?,
            m: m as i32,
            patches: patches as i32,
            heads: count as i32,
            dim: dim as i32,
            wide: wide as i32,
            columns: grid.w as i32,
            merge: image.merge as i32,
            matrices: i32::from(self.has_warpgroups(instance)) * of_values as i32,
            scale: LOG2_E / (dim as f32).sqrt(),
            padding: [0; 1],
        };
        // `values` and `places`.
        let shape = LaunchShape::new([patches / TOWER_KEYS, 3 * count, 1], 256)
            .shared(TOWER_KEYS * (4 * (TOWER_DIM + 1) + 8));
        // SAFETY: the operands were checked.
        unsafe { self.launch(&HEADS, shape, &args) }
    }

    /// `out` `[m, heads dim padded to 256]`, in FP16 and operand order: attention of the patches `queries` to all `m`, by the
    /// `values` that [`Stream::tower_heads`] makes.
    ///
    /// # Errors
    /// As of [`Stream::tower_positions`].
    pub fn tower_attention(
        &self,
        values: &Buffer<u16>,
        out: &mut Buffer<u16>,
        heads: ImageHeads,
        m: usize,
        queries: Range<usize>,
    ) -> Result<()> {
        let (o, ImageHeads { count, dim }) = (self.operands("tower_attention"), heads);
        let Some((instance, [wide, of_values])) = heads.instance() else {
            return o.refuse("width of a head", "a multiple of 4 up to 72", dim);
        };
        if queries.is_empty() || queries.end > m {
            return o.refuse(
                "queries",
                format!("some of {m} patches"),
                format!("{queries:?}"),
            );
        }
        let patches = m.next_multiple_of(TOWER_KEYS);
        let padded = (count * dim).next_multiple_of(SPAN);
        let args = TowerAttentionArgs {
            heads: o.of("heads", values, &[3, count, patches, wide])?,
            out: o.of("FP16 output", out, &[m, padded])?,
            m: m as i32,
            patches: patches as i32,
            count: count as i32,
            dim: dim as i32,
            padded: padded as i32,
            first: queries.start as i32,
        };
        let (kernel, threads, shared) = match self.has_warpgroups(instance) {
            // A ring of tiles, and two barriers each.
            true => {
                let stage = TOWER_KEYS * 2 * (wide + of_values) + 16;
                (&WARPGROUPS, 2 * TOWER_QUERIES, TOWER_STAGES * stage)
            }
            // Two tiles of keys and two of values, whose rows are 16 bytes apart.
            false => (&ATTENTION, TOWER_QUERIES, 4 * TOWER_KEYS * (2 * wide + 16)),
        };
        let grid = [queries.len().div_ceil(TOWER_QUERIES), count, 1];
        let shape = LaunchShape::new(grid, threads).shared(shared);
        // SAFETY: the operands were checked.
        unsafe { self.launch(kernel.instance(instance), shape, &args) }
    }

    /// `half` `[m, width padded to 256]`, in FP16 and operand order: GELU of rows `x` `[m, width]` with `bias` `[width]`, by
    /// the error function if `exact`, else by tanh.
    ///
    /// # Errors
    /// As of [`Stream::tower_positions`].
    pub fn tower_gelu(
        &self,
        x: &Buffer<f32>,
        bias: &Buffer<f32>,
        half: &mut Buffer<u16>,
        m: usize,
        exact: bool,
    ) -> Result<()> {
        let (o, width) = (self.operands("tower_gelu"), bias.len());
        o.multiple("width", 4, width)?;
        let padded = width.next_multiple_of(SPAN);
        let args = TowerGeluArgs {
            x: o.of("x", x, &[m, width])?,
            bias: o.of("bias", bias, &[width])?,
            half: o.of("FP16 output", half, &[m, padded])?,
            width: width as i32,
            padded: padded as i32,
            exact: i32::from(exact),
            padding: [0; 1],
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch(&GELU, LaunchShape::new([m, 1, 1], 256), &args) }
    }
}
