//! Products with the experts of a mixture in trellis codes, as they are, or in those of EXL3. All experts of a layer have one
//! shape, and lie one after the other or, in trellis codes, where a bank's table says. Those in trellis codes have the same
//! scales of inputs; those of EXL3 their own, so gate and up are products by themselves there, and every row is prepared for
//! each of its experts.

use super::rows::{THREADS, has_row, rows_shared_of};
use super::sizes::{GROUPS, MOST_GROUPS, SORTED_ROWS, digit_bytes};
use super::{
    SCHEMES, TRELLIS_EXPAND, TRELLIS_INPUTS, TRELLIS_ROWS, TRELLIS_TURN, TrellisParts, exl3_inputs,
    index_of, unit_bytes,
};
use crate::cuda::places::ExpertPlaces;
use crate::cuda::trellis_expand::{EXPAND_WARPS, TrellisExpandArgs};
use crate::cuda::trellis_inputs::{TrellisInputsArgs, TrellisTurnArgs};
use crate::cuda::trellis_rows::TrellisRowsArgs;
use crate::driver::{Address, Buffer, LaunchShape, Operands, Stream};
use crate::exl3::ExpertPart;
use crate::experts::CHOSEN_BYTES;
use crate::kernel::Instance;
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
    /// Of gate and up, unless these take rows as they are.
    pub(crate) norm: Option<Norm<'a>>,
    /// Gate and up, not down.
    pub(crate) up: bool,
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
    /// Memory for the products of gates in EXL3's codes: `[routes, rows / 2]`.
    pub(crate) gate: &'a Buffer<f32>,
    /// Which rows each group has, and of which expert: at most [`SORTED_ROWS`].
    pub(crate) blocks: &'a Buffer<[i32; 4]>,
    pub(crate) groups: usize,
    pub(crate) experts: usize,
    pub(crate) routes: usize,
}

/// What of a mixture a product is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Gate and up, whose strips alternate.
    GateUp,
    /// The gate alone, for what [`Role::Up`] makes of it.
    Gate,
    Up,
    Down,
}

impl Role {
    /// What is done with the products; `down` with those of down.
    fn epilogue(self, down: Epilogue) -> Epilogue {
        match self {
            Role::GateUp | Role::Up => Epilogue::Silu,
            Role::Gate => Epilogue::Store,
            Role::Down => down,
        }
    }

    /// Strips of a sum.
    fn together(self) -> usize {
        if self == Role::GateUp { 2 } else { 1 }
    }
}

/// A stack of experts, or a part of one, as an operand.
struct ExpertStack {
    role: Role,
    /// The kernel that prepares inputs, and the code that decides how wide digits are.
    prepare: Instance<TrellisInputsArgs>,
    code: Code,
    /// The kernels that multiply, by the rows of a group.
    multiply: [Instance<TrellisRowsArgs>; GROUPS.len()],
    /// Bytes of a tile of a strip.
    unit: usize,
    /// Experts have scales of inputs of their own.
    own_scales: bool,
    inputs: usize,
    /// Outputs of an expert as kernels count them: of up by itself, those of the gate too.
    rows: usize,
    strips: usize,
    args: TrellisRowsArgs,
}

impl ExpertStack {
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
            scales: self.args.scales,
            inputs: self.inputs as i32,
            padded: self.inputs.next_multiple_of(SPAN) as i32,
            // The kernel behind it reads what those before it have made before it has ended.
            holds_dependents: 1,
            ..TrellisInputsArgs::default()
        }
    }
}

impl DeviceLinear {
    /// The experts, checked as operands of `o`: what is multiplied one after the other; nothing if they are in no codes of
    /// trellises or of EXL3.
    fn expert_stacks(&self, o: &Operands<'_>, experts: usize) -> Result<Vec<ExpertStack>> {
        let (inputs, rows) = (self.inputs(), self.rows() / experts.max(1));
        if self.is_unpacked() {
            o.multiple("rows of an expert", STRIP, rows)?;
            o.multiple("inputs", BLOCK, inputs)?;
        }
        if let Some(parts) = &self.trellis {
            return Ok(vec![self.trellis_stack(o, parts, experts)?]);
        }
        let Some(exl3) = &self.exl3 else {
            return Ok(Vec::new());
        };
        let roles = match exl3.gated {
            true => &[Role::Gate, Role::Up][..],
            false => &[Role::Down],
        };
        let stack = |(part, &role): (ExpertPart, &Role)| {
            let rows = if role == Role::Gate { rows / 2 } else { rows };
            let args = TrellisRowsArgs {
                rows: rows as i32,
                tiles: (inputs / COLUMNS) as i32,
                padded: (rows / 2).next_multiple_of(SPAN) as i32,
                ..part.args
            };
            ExpertStack {
                role,
                prepare: exl3_inputs(),
                code: Code::Octagon,
                multiply: part.kernels,
                unit: part.unit,
                own_scales: true,
                inputs,
                rows,
                strips: args.strips as usize,
                args,
            }
        };
        let parts = self.exl3_parts(o, exl3, experts)?;
        Ok(parts.into_iter().zip(roles).map(stack).collect())
    }

    /// The experts, whose parts are in a trellis code.
    fn trellis_stack(
        &self,
        o: &Operands<'_>,
        parts: &TrellisParts,
        experts: usize,
    ) -> Result<ExpertStack> {
        let (inputs, rows) = (self.inputs(), self.rows() / experts.max(1));
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
        let (code, index) = (parts.scheme.code(), index_of(parts.scheme));
        Ok(ExpertStack {
            role: if parts.paired {
                Role::GateUp
            } else {
                Role::Down
            },
            prepare: TRELLIS_INPUTS.instance(usize::from(code == Code::Octagon)),
            code,
            multiply: [0, SCHEMES].map(|first| TRELLIS_ROWS.instance(first + index)),
            unit: unit_bytes(parts.scheme),
            own_scales: false,
            inputs,
            rows,
            strips,
            args,
        })
    }

    /// The experts, which are in a trellis code, and its parts.
    fn trellis_experts(
        &self,
        o: &Operands<'_>,
        experts: usize,
    ) -> Result<(&TrellisParts, ExpertStack)> {
        match &self.trellis {
            Some(parts) => Ok((parts, self.trellis_stack(o, parts, experts)?)),
            None => o.refuse("experts", "in a trellis code", self.kind().name()),
        }
    }
}

impl Stream {
    /// Gate and up of each row's experts, or down, of rows that go through them one by one. False if `w` is in no code of a
    /// trellis or of EXL3.
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
        let stacks = w.expert_stacks(o, all)?;
        if !stacks.is_empty() {
            check(o, e, w.rows(), w.rows() / all, rows.m)?;
            // Products in other schemes look for each expert's values at whole spans.
            o.multiple("width of an expert", SPAN, e.width)?;
        }
        for stack in &stacks {
            self.scored_experts(o, stack, rows)?;
        }
        Ok(!stacks.is_empty())
    }

    /// The product of `stack` in [`Stream::coded_experts`].
    fn scored_experts(
        &self,
        o: &Operands<'_>,
        stack: &ExpertStack,
        rows: &ScoredRows<'_>,
    ) -> Result<()> {
        let (e, all) = (rows.experts, stacked(rows.experts));
        let room = self.trellis_room(o)?;
        let (m, k, inputs, role) = (rows.m, chosen(e), stack.inputs, stack.role);
        let up = role != Role::Down;
        if up != rows.up {
            return o.refuse("a stack", "gate and up, or down", "the other");
        }
        let (groups, of_x) = (m * k, if up { m } else { m * k });
        let x = o.of("x", rows.x, &[of_x, inputs])?;
        let scores = o.of("scores", rows.scores, &[m, all])?;
        let gain = rows.norm.as_ref().map(|norm| norm.gain(o, inputs));
        let (gain, eps) = (gain.transpose()?, rows.norm.as_ref().map_or(0.0, |n| n.eps));
        let gain = gain.unwrap_or(Address::NULL);
        let (owns, shared) = has_row(o.gpu().info(), stack.unit, inputs);
        let (mut digits, mut steps) = (Address::NULL, Address::NULL);
        if !owns {
            let group = GROUPS[0];
            let prepared = if stack.own_scales { groups } else { of_x };
            let of_group = digit_bytes(stack.code, group, inputs);
            digits = o.of(
                "digits",
                &room.digits,
                &[prepared.div_ceil(group), of_group],
            )?;
            steps = o.of("steps", &room.steps, &[prepared])?;
            let mut args = TrellisInputsArgs {
                x,
                gain,
                digits,
                steps,
                m: prepared as i32,
                group: group as i32,
                eps,
                ..stack.inputs_args()
            };
            if stack.own_scales {
                args.scores = scores;
                (args.experts, args.per_token) = (all as i32, k as i32);
                (args.normalized, args.shared) = (i32::from(e.normalized), i32::from(e.shared > 0));
                args.of_each = i32::from(!up);
            }
            self.trellis_inputs(o, stack, args)?;
        }
        // A block of down has whole strips; one of gate and up that has, or that has a part of one alone, shares fewer sums.
        let strips = stack.strips;
        let fits = |&n: &usize| strips.is_multiple_of(n) || up && n.is_multiple_of(strips);
        let blocks = (1..=stack.blocks(o, groups, 0)).rev().find(fits);
        let blocks = blocks.unwrap_or(1);
        let parts = match up {
            true => [groups, blocks * 2, role.together() * STRIP, GROUPS[0]],
            false => [m, stack.strips, k.saturating_sub(1), STRIP],
        };
        let gate = |width| o.of("the gate", &room.gate, &[groups, width]);
        let out = match role {
            Role::GateUp | Role::Up => o.of("out", rows.out, &[groups, stack.rows / 2])?,
            Role::Gate => gate(stack.rows)?,
            Role::Down => o.of("out", rows.out, &[m, stack.rows])?,
        };
        let args = TrellisRowsArgs {
            digits,
            steps,
            x: if owns { x } else { Address::NULL },
            gain,
            out,
            gate: match role {
                Role::Up => gate(stack.rows / 2)?,
                _ => Address::NULL,
            },
            parts: o.of("parts", &room.parts, &parts)?,
            m: m as i32,
            epilogue: role.epilogue(Epilogue::Add) as i32,
            eps,
            scores,
            experts: all as i32,
            per_token: k as i32,
            normalized: i32::from(e.normalized),
            shared: i32::from(e.shared > 0),
            ..stack.args
        };
        let shape = LaunchShape::new([blocks, groups, 1], THREADS[0])
            .shared(shared)
            .overlapping();
        // SAFETY: the operands were checked; a chosen index is below the number of experts, which the stack was checked to have.
        unsafe { self.launch(stack.multiply[0], shape, &args) }
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
        for stack in w.expert_stacks(o, rows.experts)? {
            // SAFETY: the caller answers for the blocks.
            unsafe { self.sorted_stack(o, &stack, rows)? };
        }
        Ok(())
    }

    /// The product of `stack` in [`Stream::sorted_experts`].
    ///
    /// # Safety
    /// That of [`Stream::sorted_experts`].
    unsafe fn sorted_stack(
        &self,
        o: &Operands<'_>,
        stack: &ExpertStack,
        rows: &SortedRows<'_>,
    ) -> Result<()> {
        let room = self.trellis_room(o)?;
        let (inputs, group, role) = (stack.inputs, SORTED_ROWS, stack.role);
        let x = o.of("x", rows.x, &[rows.routes, inputs.next_multiple_of(SPAN)])?;
        let width = stack.args.padded as usize;
        let gate = |width| o.of("the gate", rows.gate, &[rows.routes, width]);
        let (half, out) = match role {
            Role::Gate => (Address::NULL, gate(stack.rows)?),
            _ => (
                o.optional("out", rows.half, &[rows.routes, width])?,
                o.optional("out", rows.full, &[rows.routes, stack.rows])?,
            ),
        };
        let gate = match role {
            Role::Up => gate(stack.rows / 2)?,
            _ => Address::NULL,
        };
        let of_group = digit_bytes(stack.code, group, inputs);
        let each = role.together();
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
            self.trellis_inputs(o, stack, args)?;
            let blocks = stack.blocks(o, groups, 1);
            let parts = match blocks {
                // Every block has whole strips.
                1 => Address::NULL,
                _ => {
                    let parts = [groups, blocks * 2, each * STRIP, group];
                    o.of("parts", &room.parts, &parts)?
                }
            };
            let args = TrellisRowsArgs {
                digits,
                steps,
                out,
                half,
                gate,
                parts,
                m: rows.routes as i32,
                epilogue: role.epilogue(Epilogue::Store) as i32,
                sorted,
                experts: rows.experts as i32,
                ..stack.args
            };
            let shape = LaunchShape::new([blocks, groups, 1], THREADS[1])
                .shared(rows_shared_of(stack.unit, 1))
                .overlapping();
            // SAFETY: the operands were checked; the caller answers for the blocks.
            unsafe { self.launch(stack.multiply[1], shape, &args)? };
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
        let (_, stack) = w.trellis_experts(o, experts)?;
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
        if let Some(exl3) = &w.exl3 {
            return self.expand_exl3(o, w, exl3, some);
        }
        let (trellis, stack) = w.trellis_experts(o, experts)?;
        let room = self.trellis_room(o)?;
        let (inputs, rows, scheme) = (stack.inputs, some.len() * stack.rows, trellis.scheme);
        let (first, strips) = (some.start * stack.strips, some.len() * stack.strips);
        let (each, spans) = (stack.role.together(), inputs.div_ceil(SPAN));
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
            places: o.part("places", &trellis.places, first, &[strips])?,
            codes: o.of("expanded weights", &room.expanded, &records)?,
            strips: strips as i32,
            tiles: stack.tiles() as i32,
            spans: spans as i32,
            silu: i32::from(trellis.paired),
            first_row: (some.start * stack.rows / each) as i32,
            padding: [0; 1],
        };
        let shape = LaunchShape::new([spans, strips / each, 1], EXPAND_WARPS * 32)
            .shared(EXPAND_WARPS * each * stack.unit)
            .overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(TRELLIS_EXPAND.instance(index_of(scheme)), shape, &args)? };
        let dims = Dims::new(rows, inputs);
        Ok(DeviceLinear::of_halves(&room.expanded, &room.no_meta, dims))
    }

    /// Prepares rows for the kernels of experts.
    fn trellis_inputs(
        &self,
        o: &Operands<'_>,
        stack: &ExpertStack,
        args: TrellisInputsArgs,
    ) -> Result<()> {
        // `trellis_inputs.cu`: a row, padded against bank conflicts, and before it which experts were chosen.
        let row = (args.inputs as usize * 5 + 256).max(CHOSEN_BYTES);
        o.at_most("bytes of a row of x", o.gpu().info().shared_memory, row)?;
        let shape = LaunchShape::new([args.m as usize, 1, 1], 512)
            .shared(row)
            .overlapping();
        // SAFETY: callers checked the operands.
        unsafe { self.launch(stack.prepare, shape, &args) }
    }
}
