//! Converts rows of x to the layout that [`super::input`] describes.

use super::input::{ActivationType, Layout, Prepared};
use super::pack::{HOLE, UnitCodes};
use super::trellis;
use crate::memory::{Buffer, SharedSlice};
use crate::table::KernelTable;
use crate::{Team, with_scratch};
use nq_formats::trellis::Code;
use nq_kernels::reference::INT16_BASE;

/// Buffers for one row of x on its way into a block.
#[derive(Default)]
struct RowScratch {
    floats: Buffer<f32>,
    turned: Buffer<f32>,
    codes: [Buffer<i8>; 2],
    scales: Buffer<f32>,
    totals: [Buffer<i32>; 2],
}

impl Prepared {
    /// Prepares `x` `[rows, k]`.
    pub(crate) fn prepare(
        &mut self,
        team: &Team,
        table: &KernelTable,
        layout: &Layout,
        x: &[f32],
        k: usize,
    ) {
        self.rows = x.len() / k;
        // Blocks of equal width: 13 rows with at most 12 per block become 7 + 6, not 12 + 1.
        let blocks = self.rows.div_ceil(layout.columns);
        self.width = self.rows.div_ceil(blocks);
        let rows = RowsToPrepare {
            team,
            table,
            layout,
            x,
            k,
            width: self.width,
            blocks: self.blocks(),
        };
        match layout.values {
            ActivationType::F32 => self.prepare_floats(&rows),
            ActivationType::Bf16 => self.prepare_pairs(&rows),
            ActivationType::Codes { share, .. } => {
                self.share = share;
                self.prepare_codes(&rows);
            }
            ActivationType::Quads { .. } => self.prepare_quads(&rows),
        }
    }

    fn prepare_floats(&mut self, rows: &RowsToPrepare<'_>) {
        let (width, inputs) = (rows.width, rows.layout.inputs);
        let part = inputs * width;
        let floats = SharedSlice::new(self.floats.reserve(rows.blocks * part));
        rows.each_block(|b, scratch| {
            // SAFETY: each block is prepared once.
            let floats = unsafe { floats.part(b * part..(b + 1) * part) };
            for c in 0..width {
                let row = rows.place(b * width + c, &mut scratch.floats);
                for (to, &v) in floats[c..].iter_mut().step_by(width).zip(row) {
                    *to = v;
                }
            }
        });
    }

    fn prepare_pairs(&mut self, rows: &RowsToPrepare<'_>) {
        let part = rows.layout.inputs / 2 * rows.width;
        let pairs = SharedSlice::new(self.pairs.reserve(rows.blocks * part));
        rows.each_block(|b, scratch| {
            // SAFETY: each block is prepared once.
            let pairs = unsafe { pairs.part(b * part..(b + 1) * part) };
            for c in 0..rows.width {
                let row = rows.place(b * rows.width + c, &mut scratch.floats);
                (rows.table.pair_bf16)(row, pairs, c, rows.width);
            }
        });
    }

    /// Rounds to codes of one byte, or of two bytes in separate planes.
    fn prepare_codes(&mut self, rows: &RowsToPrepare<'_>) {
        let ActivationType::Codes {
            planes,
            group,
            share,
            pairs,
            start,
            against,
        } = rows.layout.values
        else {
            unreachable!("called for codes");
        };
        let (width, inputs, table) = (rows.width, rows.layout.inputs, rows.table);
        // Both are powers of two, or equal.
        let shift = (group / share).ilog2();
        // Of a code: bytes, and sums.
        let (bytes, parts) = if pairs { (2, 1) } else { (planes, planes) };
        let start = if pairs { 0 } else { start };
        let (groups, shares) = (rows.groups(), inputs / share);
        let (wide, of_sums) = (width * bytes, width * parts);
        let sums = SharedSlice::new(self.sums.reserve(rows.blocks * groups * width));
        let codes = SharedSlice::new(self.codes.reserve(rows.blocks * inputs * wide));
        let scales = SharedSlice::new(self.scales.reserve(rows.blocks * shares * width));
        let starts = SharedSlice::new(self.starts.reserve(rows.blocks * shares * of_sums));
        rows.each_block(|b, scratch| {
            // SAFETY: each block is prepared once.
            let (codes, scales, starts, sums) = unsafe {
                (
                    codes.part(b * inputs * wide..(b + 1) * inputs * wide),
                    scales.part(b * shares * width..(b + 1) * shares * width),
                    starts.part(b * shares * of_sums..(b + 1) * shares * of_sums),
                    sums.part(b * groups * width..(b + 1) * groups * width),
                )
            };
            for c in 0..width {
                let row = rows.place(b * width + c, &mut scratch.floats);
                let row_scales = scratch.scales.reserve(inputs.div_ceil(group));
                let [high, low] = &mut scratch.codes;
                let high = high.reserve(inputs);
                if planes == 1 {
                    (table.quantize)(row, group, high, row_scales);
                } else {
                    (table.quantize_wide)(row, group, high, low.reserve(inputs), row_scales);
                }
                let nibbles = against != UnitCodes::Byte;
                for (plane, bytes) in scratch.codes[..planes].iter().enumerate() {
                    let (bytes, at) = (&bytes[..inputs], (c * planes + plane) % of_sums);
                    let totals = scratch.totals[plane].reserve(shares);
                    (table.total)(bytes, share, totals);
                    if !pairs {
                        (table.interleave)(bytes, nibbles, codes, at, wide);
                    }
                    for (i, &total) in totals.iter().enumerate() {
                        starts[i * of_sums + at] = start * total;
                    }
                }
                if pairs {
                    let [high, low] = &scratch.codes;
                    let low = (planes > 1).then(|| &low[..inputs]);
                    (table.interleave_pairs)(&high[..inputs], low, nibbles, codes, c, width);
                }
                for i in 0..shares {
                    scales[i * width + c] = row_scales[i >> shift];
                }
                let [high, low] = &scratch.totals;
                let total = |j: usize| match planes {
                    1 => high[j] as f32,
                    _ => (high[j] * INT16_BASE as i32 + low[j]) as f32,
                };
                let per_group = rows.layout.sums.map_or(0, |g| g / share);
                for i in 0..groups {
                    let range = i * per_group..((i + 1) * per_group).min(shares);
                    sums[i * width + c] = range.map(|j| row_scales[j >> shift] * total(j)).sum();
                }
            }
        });
    }
}

impl Prepared {
    /// Rounds to codes of one byte, or of two bytes in separate planes, and makes quads of them.
    fn prepare_quads(&mut self, rows: &RowsToPrepare<'_>) {
        let ActivationType::Quads {
            planes,
            group,
            start,
            code,
        } = rows.layout.values
        else {
            unreachable!("called for quads");
        };
        let (width, inputs, table) = (rows.width, rows.layout.inputs, rows.table);
        let (groups, wide) = (inputs / group, width * planes);
        (self.share, self.groups, self.quads) = (group, groups, trellis::quads(code, inputs));
        // Codes of a group, and bytes that each of them becomes.
        let (of_group, times) = match code {
            Code::Sum => (group, 4),
            Code::Octagon => (2 * group, 1),
        };
        let block = 4 * self.quads * wide;
        let codes = SharedSlice::new(self.codes.reserve(rows.blocks * block));
        let scales = SharedSlice::new(self.scales.reserve(rows.blocks * groups * width));
        let sums = SharedSlice::new(self.sums.reserve(rows.blocks * groups * wide));
        rows.each_block(|b, scratch| {
            // SAFETY: each block is prepared once.
            let (codes, scales, sums) = unsafe {
                (
                    codes.part(b * block..(b + 1) * block),
                    scales.part(b * groups * width..(b + 1) * groups * width),
                    sums.part(b * groups * wide..(b + 1) * groups * wide),
                )
            };
            for c in 0..width {
                let mut row = rows.place(b * width + c, &mut scratch.floats);
                if code == Code::Octagon {
                    let turned = scratch.turned.reserve(2 * inputs);
                    (table.turn)(row, group, turned);
                    row = turned;
                }
                let row_scales = scratch.scales.reserve(groups);
                let [high, low] = &mut scratch.codes;
                let high = high.reserve(row.len());
                if planes == 1 {
                    (table.quantize)(row, of_group, high, row_scales);
                } else {
                    (table.quantize_wide)(row, of_group, high, low.reserve(row.len()), row_scales);
                }
                for (plane, bytes) in scratch.codes[..planes].iter().enumerate() {
                    let (bytes, at) = (&bytes[..row.len()], c * planes + plane);
                    let totals = scratch.totals[plane].reserve(groups);
                    (table.total)(bytes, of_group, totals);
                    let turned = (code == Code::Octagon).then_some(group);
                    (table.interleave_quads)(bytes, turned, codes, at, wide);
                    for (i, &total) in totals.iter().enumerate() {
                        sums[i * wide + at] = start * (times * total) as f32;
                    }
                }
                for (i, scale) in row_scales.iter().enumerate() {
                    scales[i * width + c] = scale / trellis::UNIT;
                }
            }
        });
    }
}

/// The rows of x to be prepared, and their layout.
struct RowsToPrepare<'a> {
    team: &'a Team,
    table: &'a KernelTable,
    layout: &'a Layout,
    /// `[rows, k]`
    x: &'a [f32],
    k: usize,
    width: usize,
    blocks: usize,
}

impl RowsToPrepare<'_> {
    /// Number of sums per row.
    fn groups(&self) -> usize {
        let group = self.layout.sums;
        group.map_or(0, |g| self.layout.inputs.div_ceil(g))
    }

    /// Calls `f` for every block, on all threads.
    fn each_block(&self, f: impl Fn(usize, &mut RowScratch) + Sync) {
        // For fewer values than this, waking the team costs more than it saves.
        let grain = (16_384 / (self.layout.inputs * self.width)).max(1);
        self.team.run_ranges(self.blocks, grain, |range| {
            with_scratch!(RowScratch, |scratch| {
                for b in range {
                    f(b, scratch);
                }
            });
        });
    }

    /// Row `r`, permuted and padded, or scaled and transformed; zeros if there is no such row.
    fn place<'a>(&self, r: usize, row: &'a mut Buffer<f32>) -> &'a [f32] {
        let row = row.reserve(self.layout.inputs);
        let Some(x) = self.x.get(r * self.k..(r + 1) * self.k) else {
            row.fill(0.0);
            return row;
        };
        match &self.layout.order {
            None => {
                row[..self.k].copy_from_slice(x);
                row[self.k..].fill(0.0);
            }
            Some(order) => {
                for (to, &from) in row.iter_mut().zip(&**order) {
                    *to = if from == HOLE { 0.0 } else { x[from as usize] };
                }
            }
        }
        if let Some(scales) = &self.layout.input_scales {
            (self.table.transform)(row, &scales.0);
        }
        row
    }
}
