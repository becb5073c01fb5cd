//! Products with the experts of a mixture in trellis codes, as they are. All experts of a layer have one shape and the same
//! scales of inputs, and lie one after the other or where a bank's table says.

use super::rows::{THREADS, has_row, rows_shared_of};
use super::sizes::{GROUPS, MOST_GROUPS, SORTED_ROWS, digit_bytes};
use super::{
    SCHEMES, TRELLIS_EXPAND, TRELLIS_INPUTS, TRELLIS_ROWS, TRELLIS_TURN, TrellisParts, index_of,
    unit_bytes,
};
use crate::cuda::places::ExpertPlaces;
use crate::cuda::trellis_expand::{EXPAND_WARPS, TrellisExpandArgs};
use crate::cuda::trellis_inputs::{TrellisInputsArgs, TrellisTurnArgs};
use crate::cuda::trellis_rows::TrellisRowsArgs;
use crate::driver::{Address, Buffer, LaunchShape, Operands, Stream};
use crate::linear::DeviceLinear;
use crate::mixture::{check, chosen, stacked};
use crate::pack::{SPAN, TILE};
use crate::product::{Epilogue, Norm};
use nq_formats::trellis::{BLOCK, Code, LANES, STRIP, TILE as COLUMNS};
use nq_kernels::Result;
use nq_model::{Dims, Experts};
use std::ops::Range;

/// Rows that go through their experts one by one.
pub(crate) struct ScoredRows<'a> {
    /// Gate and up: `[m, inputs]`; down: `[m, per_token, inputs]`.
    pub(crate) x: &'a Buffer<f32>,
    /// Of gate and up.
    pub(crate) norm: Option<Norm<'a>>,
    /// Gate and up: `[m, per_token, rows / 2]`; down: `[m, rows]`, to which products are added.
    pub(crate) out: &'a Buffer<f32>,
    /// `[m, experts]`
    pub(crate) scores: &'a Buffer<f32>,
    pub(crate) experts: &'a Experts,
    pub(crate) m: usize,
}

/// Rows that are sorted by expert.
pub(crate) struct SortedRows<'a> {
    /// `[routes, inputs padded to 256]`, in operand order.
    pub(crate) x: &'a Buffer<u16>,
    /// Down: `[routes, rows]`.
    pub(crate) full: Option<&'a Buffer<f32>>,
    /// Gate and up: `[routes, rows / 2 padded to 256]`, in operand order.
    pub(crate) half: Option<&'a Buffer<u16>>,
    /// Which rows each group has, and of which expert: at most [`SORTED_ROWS`].
    pub(crate) blocks: &'a Buffer<[i32; 4]>,
    pub(crate) groups: usize,
    pub(crate) experts: usize,
    pub(crate) routes: usize,
}

/// A stack of experts as an operand.
struct ExpertStack<'w> {
    parts: &'w TrellisParts,
    inputs: usize,
    /// Of an expert.
    rows: usize,
    strips: usize,
    args: TrellisRowsArgs,
}

impl ExpertStack<'_> {
    fn code(&self) -> Code {
        self.parts.scheme.code()
    }

    fn tiles(&self) -> usize {
        self.inputs / COLUMNS
    }

    /// The most blocks for a group, of which there are so many, whose warps have some work each.
    fn blocks(&self, o: &Operands<'_>, groups: usize, which: usize) -> usize {
        let units = (self.strips * self.tiles()).div_ceil(THREADS[which] / LANES);
        let at_once = (which + 1) * o.gpu().info().multiprocessors;
        (at_once / groups.max(1)).clamp(1, units)
    }

    /// What preparing its inputs takes, without these.
    fn inputs_args(&self) -> TrellisInputsArgs {
        TrellisInputsArgs {
            x: Address::NULL,
            half: Address::NULL,
            gain: Address::NULL,
            scales: self.args.scales,
            digits: Address::NULL,
            steps: Address::NULL,
            m: 0,
            inputs: self.inputs as i32,
            padded: self.inputs.next_multiple_of(SPAN) as i32,
            group: 0,
            eps: 0.0,
            // The kernel behind it reads what those before it have made before it has ended.
            holds_dependents: 1,
            sorted: Address::NULL,
        }
    }
}

impl DeviceLinear {
    /// The experts, checked as an operand of `o`; `None` if they are not in a trellis code.
    fn expert_stack(&self, o: &Operands<'_>, experts: usize) -> Result<Option<ExpertStack<'_>>> {
        let Some(parts) = &self.trellis else {
            return Ok(None);
        };
        let (inputs, rows) = (self.inputs(), self.rows() / experts.max(1));
        o.multiple("rows of an expert", STRIP, rows)?;
        o.multiple("inputs", BLOCK, inputs)?;
        let (strips, all) = (rows / STRIP, experts * rows);
        let (words, row_scales, experts_at) = match self.layer_bank() {
            Some(bank) => (Address::NULL, Address::NULL, bank.args(o)?),
            None => (
                o.of(
                    "codes",
                    &self.codes,
                    &[experts * strips, parts.scheme.strip_bytes(inputs)],
                )?,
                o.of("scales of rows", &self.meta, &[all, 2])?,
                ExpertPlaces::default(),
            ),
        };
        let scales = match &parts.input_scales {
            Some(scales) => o.of("scales of inputs", scales, &[inputs])?,
            None => o.part("scales of inputs", &self.meta, all * 2, &[inputs, 2])?,
        };
        let args = TrellisRowsArgs {
            words,
            row_scales,
            experts_at,
            scales,
            places: o.of("places", &parts.places, &[strips])?,
            rows: rows as i32,
            strips: strips as i32,
            tiles: (inputs / COLUMNS) as i32,
            padded: (rows / 2).next_multiple_of(SPAN) as i32,
            ..TrellisRowsArgs::default()
        };
        Ok(Some(ExpertStack {
            parts,
            inputs,
            rows,
            strips,
            args,
        }))
    }

    /// The experts, which are in a trellis code.
    fn coded_stack(&self, o: &Operands<'_>, experts: usize) -> Result<ExpertStack<'_>> {
        match self.expert_stack(o, experts)? {
            Some(stack) => Ok(stack),
            None => o.refuse("experts", "in a trellis code", self.kind().name()),
        }
    }
}

impl Stream {
    /// Gate and up of each row's experts, or down, of rows that go through them one by one. False if `w` is not in a trellis
    /// code.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(crate) fn coded_experts(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        rows: &ScoredRows<'_>,
    ) -> Result<bool> {
        let (e, all) = (rows.experts, stacked(rows.experts));
        let Some(stack) = w.expert_stack(o, all)? else {
            return Ok(false);
        };
        let room = self.trellis_room(o)?;
        let (m, k, inputs, up) = (rows.m, chosen(e), stack.inputs, stack.parts.paired);
        check(o, e, w.rows(), stack.rows, m)?;
        if up != rows.norm.is_some() {
            return o.refuse("a stack", "gate and up, or down", "the other");
        }
        let (groups, of_x) = (m * k, if up { m } else { m * k });
        let x = o.of("x", rows.x, &[of_x, inputs])?;
        let gain = rows.norm.as_ref().map(|norm| norm.gain(o, inputs));
        let (gain, eps) = (gain.transpose()?, rows.norm.as_ref().map_or(0.0, |n| n.eps));
        let gain = gain.unwrap_or(Address::NULL);
        let unit = unit_bytes(stack.parts.scheme);
        let (owns, shared) = has_row(o.gpu().info(), unit, inputs);
        let (mut digits, mut steps) = (Address::NULL, Address::NULL);
        if !owns {
            let group = GROUPS[0];
            let of_group = digit_bytes(stack.code(), group, inputs);
            digits = o.of("digits", &room.digits, &[of_x.div_ceil(group), of_group])?;
            steps = o.of("steps", &room.steps, &[of_x])?;
            let args = TrellisInputsArgs {
                x,
                gain,
                digits,
                steps,
                m: of_x as i32,
                group: group as i32,
                eps,
                ..stack.inputs_args()
            };
            self.trellis_inputs(o, stack.code(), args)?;
        }
        // A block of down has whole strips; one of gate and up that has, or that has a part of one alone, shares fewer sums.
        let strips = stack.strips;
        let fits = |&n: &usize| strips.is_multiple_of(n) || up && n.is_multiple_of(strips);
        let blocks = (1..=stack.blocks(o, groups, 0)).rev().find(fits);
        let blocks = blocks.unwrap_or(1);
        let (parts, out, epilogue) = match up {
            true => (
                [groups, blocks * 2, 2 * STRIP, GROUPS[0]],
                [groups, stack.rows / 2],
                Epilogue::Silu,
            ),
            false => (
                [m, stack.strips, k.saturating_sub(1), STRIP],
                [m, stack.rows],
                Epilogue::Add,
            ),
        };
        let args = TrellisRowsArgs {
            digits,
            steps,
            x: if owns { x } else { Address::NULL },
            gain,
            out: o.of("out", rows.out, &out)?,
            parts: o.of("parts", &room.parts, &parts)?,
            m: m as i32,
            epilogue: epilogue as i32,
            eps,
            scores: o.of("scores", rows.scores, &[m, all])?,
            experts: all as i32,
            per_token: k as i32,
            normalized: i32::from(e.normalized),
            shared: i32::from(e.shared > 0),
            ..stack.args
        };
        let shape = LaunchShape::new([blocks, groups, 1], THREADS[0])
            .shared(shared)
            .overlapping();
        let kernel = TRELLIS_ROWS.instance(index_of(stack.parts.scheme));
        // SAFETY: the operands were checked; a chosen index is below the number of experts, which `w` was checked to have.
        unsafe { self.launch(kernel, shape, &args)? };
        Ok(true)
    }

    /// Gate and up of rows that are sorted by expert, or down.
    ///
    /// # Safety
    /// On the device, each of the blocks has an expert below `experts` and at most [`SORTED_ROWS`] rows within `routes`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(crate) unsafe fn sorted_experts(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        rows: &SortedRows<'_>,
    ) -> Result<()> {
        let stack = w.coded_stack(o, rows.experts)?;
        let room = self.trellis_room(o)?;
        let (inputs, group) = (stack.inputs, SORTED_ROWS);
        let x = o.of("x", rows.x, &[rows.routes, inputs.next_multiple_of(SPAN)])?;
        let width = stack.args.padded as usize;
        let half = o.optional("out", rows.half, &[rows.routes, width])?;
        let out = o.optional("out", rows.full, &[rows.routes, stack.rows])?;
        let of_group = digit_bytes(stack.code(), group, inputs);
        let each = if stack.parts.paired { 2 } else { 1 };
        for first in (0..rows.groups).step_by(MOST_GROUPS) {
            let groups = MOST_GROUPS.min(rows.groups - first);
            let sorted = o.part("blocks", rows.blocks, first, &[groups])?;
            let digits = o.of("digits", &room.digits, &[groups, of_group])?;
            let steps = o.of("steps", &room.steps, &[groups, group])?;
            let args = TrellisInputsArgs {
                half: x,
                digits,
                steps,
                m: (groups * group) as i32,
                group: group as i32,
                sorted,
                ..stack.inputs_args()
            };
            self.trellis_inputs(o, stack.code(), args)?;
            let blocks = stack.blocks(o, groups, 1);
            let parts = match blocks {
                // Every block has whole strips.
                1 => Address::NULL,
                _ => {
                    let parts = [groups, blocks * 2, each * STRIP, group];
                    o.of("parts", &room.parts, &parts)?
                }
            };
            let epilogue = match each {
                2 => Epilogue::Silu,
                _ => Epilogue::Store,
            };
            let args = TrellisRowsArgs {
                digits,
                steps,
                out,
                half,
                parts,
                m: rows.routes as i32,
                epilogue: epilogue as i32,
                sorted,
                experts: rows.experts as i32,
                ..stack.args
            };
            let shape = LaunchShape::new([blocks, groups, 1], THREADS[1])
                .shared(rows_shared_of(unit_bytes(stack.parts.scheme), 1))
                .overlapping();
            let kernel = TRELLIS_ROWS.instance(SCHEMES + index_of(stack.parts.scheme));
            // SAFETY: the operands were checked; the caller answers for the blocks.
            unsafe { self.launch(kernel, shape, &args)? };
        }
        Ok(())
    }

    /// Transforms rows `[m, inputs padded to 256]` of experts for their values in FP16 ([`Stream::expand_experts`]).
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(crate) fn turn_rows_of_experts(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        experts: usize,
        x: &Buffer<u16>,
        m: usize,
    ) -> Result<()> {
        let stack = w.coded_stack(o, experts)?;
        let padded = stack.inputs.next_multiple_of(SPAN);
        // Each block of inputs is read before it is written.
        let x = o.of("x", x, &[m, padded])?;
        let args = TrellisTurnArgs {
            x,
            scales: stack.args.scales,
            out: x,
            m: m as i32,
            inputs: stack.inputs as i32,
            padded: padded as i32,
            padding: [0; 1],
        };
        let shape = LaunchShape::new([m, 1, 1], 256).overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(&TRELLIS_TURN, shape, &args) }
    }

    /// The values of some of the experts of a stack as FP16, in memory that the next product takes again.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(crate) fn expand_experts(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        experts: usize,
        some: Range<usize>,
    ) -> Result<DeviceLinear> {
        let stack = w.coded_stack(o, experts)?;
        let room = self.trellis_room(o)?;
        let (inputs, rows, scheme) = (stack.inputs, some.len() * stack.rows, stack.parts.scheme);
        let (first, strips) = (some.start * stack.strips, some.len() * stack.strips);
        let (each, spans) = (
            if stack.parts.paired { 2 } else { 1 },
            inputs.div_ceil(SPAN),
        );
        let strip = scheme.strip_bytes(inputs);
        let records = [rows / TILE, spans, TILE * SPAN * 2];
        let args = TrellisExpandArgs {
            words: o.part("codes", &w.codes, first * strip, &[strips, strip])?,
            row_scales: o.part(
                "scales of rows",
                &w.meta,
                first * STRIP * 2,
                &[strips, STRIP, 2],
            )?,
            places: o.part("places", &stack.parts.places, first, &[strips])?,
            codes: o.of("expanded weights", &room.expanded, &records)?,
            strips: strips as i32,
            tiles: stack.tiles() as i32,
            spans: spans as i32,
            silu: i32::from(stack.parts.paired),
            first_row: (some.start * stack.rows / each) as i32,
            padding: [0; 1],
        };
        let shape = LaunchShape::new([spans, strips / each, 1], EXPAND_WARPS * 32)
            .shared(EXPAND_WARPS * each * unit_bytes(scheme))
            .overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(TRELLIS_EXPAND.instance(index_of(scheme)), shape, &args)? };
        let dims = Dims::new(rows, inputs);
        Ok(DeviceLinear::of_halves(&room.expanded, &room.no_meta, dims))
    }

    /// Prepares rows for the kernels of experts.
    fn trellis_inputs(&self, o: &Operands<'_>, code: Code, args: TrellisInputsArgs) -> Result<()> {
        // `trellis_inputs.cu`: a row, padded against bank conflicts.
        let row = args.inputs as usize * 5 + 256;
        o.at_most("bytes of a row of x", o.gpu().info().shared_memory, row)?;
        let kernel = TRELLIS_INPUTS.instance(usize::from(code == Code::Octagon));
        let shape = LaunchShape::new([args.m as usize, 1, 1], 512)
            .shared(row)
            .overlapping();
        // SAFETY: callers checked the operands.
        unsafe { self.launch(kernel, shape, &args) }
    }
}
