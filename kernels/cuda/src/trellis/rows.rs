//! Products of up to [`MOST_ROWS`](super::MOST_ROWS) rows by codes as they are: those of trellises, and of EXL3.

use super::room::TrellisRoom;
use super::sizes::{GROUPS, digit_bytes, grouped};
use crate::cuda::trellis_inputs::TrellisInputsArgs;
use crate::cuda::trellis_rows::{ROWS_SHARED, TrellisRowsArgs};
use crate::driver::{Address, GpuInfo, LaunchShape, Stream};
use crate::kernel::Instance;
use crate::pack::SPAN;
use crate::product::{Inputs, OutputAddresses, Product};
use nq_formats::trellis::TILE as COLUMNS;
use nq_formats::trellis::{BLOCK, Code, LANES, STRIP};
use nq_kernels::Result;

/// Threads of the kernels of products, by group.
pub(super) const THREADS: [usize; 2] = [512, 256];
/// Most inputs of a product: the sum of their digits has 32 bits.
const MOST_INPUTS: usize = 32_768;

/// A product with a weight in codes, or with a part of one.
pub(crate) struct CodedProduct {
    /// The kernel that prepares the inputs.
    pub(crate) prepare: Instance<TrellisInputsArgs>,
    /// The kernel that multiplies.
    pub(crate) multiply: Instance<TrellisRowsArgs>,
    /// The code that decides how wide digits are.
    pub(crate) code: Code,
    /// Bytes of a tile of a strip.
    pub(crate) unit: usize,
    /// Strips that a sum is of: two of gate and up, else one.
    pub(crate) together: usize,
    /// The weight with the scales of its inputs, and where the product goes; [`Stream::coded_rows`] fills in the rest.
    pub(crate) args: TrellisRowsArgs,
}

/// Shared memory of a product, without the row of x of which it makes digits itself: `RowsOf::ROW` of
/// `cuda/trellis_rows.cuh`. `unit`: bytes of a tile of a strip.
pub(super) fn rows_shared_of(unit: usize, which: usize) -> usize {
    let (group, warps) = (GROUPS[which], THREADS[which] / LANES);
    let end = (warps / 2 + 2) * STRIP * group * size_of::<f32>() + 1024;
    let stages = ((ROWS_SHARED - end) / (warps * unit)).min(4);
    stages * warps * unit + end
}

/// Whether the blocks of one row's product have room for that row, of which they then make digits themselves, and their
/// bytes of shared memory.
pub(super) fn has_row(info: &GpuInfo, unit: usize, inputs: usize) -> (bool, usize) {
    let shared = rows_shared_of(unit, 0);
    let with_row = shared + inputs * size_of::<f32>();
    match with_row <= info.shared_memory {
        true => (true, with_row),
        false => (false, shared),
    }
}

impl Stream {
    /// Two kernels, of which the first prepares the inputs, which `norm` normalizes. One row that fits in shared memory needs
    /// the second alone.
    pub(crate) fn coded_rows(
        &self,
        p: &Product<'_>,
        norm: &OutputAddresses<'_>,
        w: CodedProduct,
    ) -> Result<()> {
        let (o, m, inputs) = (&p.o, p.m, p.w.inputs());
        let room: &TrellisRoom = self.trellis_room(o)?;
        o.at_least("rows", 1, m)?;
        o.at_most("rows", room.sizes.rows, m)?;
        o.multiple("inputs", BLOCK, inputs)?;
        o.at_most("inputs", MOST_INPUTS, inputs)?;
        let (groups, which) = grouped(m);
        let group = GROUPS[which];
        let (full, half) = match p.x {
            Inputs::Full(_) => (p.x()?, Address::NULL),
            Inputs::Half(_) => (Address::NULL, p.x()?),
            Inputs::Prepared => return o.refuse("x", "rows", "columns"),
        };
        let digits = [groups, digit_bytes(w.code, group, inputs)];
        let mut digits = o.of("digits", &room.digits, &digits)?;
        let mut steps = o.of("steps", &room.steps, &[groups, group])?;
        let (gain, eps) = (norm.gain(o, inputs)?, norm.eps());
        // Of one row the blocks of the product prepare it themselves, where there is room for it.
        let (has_room, with_row) = has_row(o.gpu().info(), w.unit, inputs);
        let owns = m == 1 && matches!(p.x, Inputs::Full(_)) && has_room;
        let shared = match owns {
            true => with_row,
            false => rows_shared_of(w.unit, which),
        };
        if owns {
            (digits, steps) = (Address::NULL, Address::NULL);
        } else {
            let args = TrellisInputsArgs {
                x: full,
                half,
                gain,
                scales: w.args.scales,
                digits,
                steps,
                m: m as i32,
                inputs: inputs as i32,
                padded: inputs.next_multiple_of(SPAN) as i32,
                group: group as i32,
                eps,
                holds_dependents: i32::from(p.holds_dependents),
                ..TrellisInputsArgs::default()
            };
            // `trellis_inputs.cu`: a row, padded against bank conflicts.
            let row = inputs * 5 + 256;
            o.at_most("bytes of a row of x", o.gpu().info().shared_memory, row)?;
            let shape = LaunchShape::new([m, 1, 1], 512).shared(row).overlapping();
            // SAFETY: the operands were checked.
            unsafe { self.launch(w.prepare, shape, &args)? };
        }
        let (strips, tiles) = (w.args.strips as usize, inputs / COLUMNS);
        // Blocks whose warps have not one unit each would only add parts.
        let blocks = (strips * tiles)
            .div_ceil(THREADS[which] / LANES)
            .clamp(1, o.gpu().info().multiprocessors);
        let parts = [groups, blocks * 2, w.together * STRIP, group];
        let args = TrellisRowsArgs {
            digits,
            steps,
            x: if owns { full } else { Address::NULL },
            gain,
            parts: o.of("parts", &room.parts, &parts)?,
            m: m as i32,
            tiles: tiles as i32,
            padded: (w.args.rows as usize / 2).next_multiple_of(SPAN) as i32,
            eps,
            // Otherwise the kernel before held its dependents already.
            holds_dependents: i32::from(p.holds_dependents && owns),
            ..w.args
        };
        let shape = LaunchShape::new([blocks, groups, 1], THREADS[which])
            .shared(shared)
            .overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(w.multiply, shape, &args) }
    }
}
