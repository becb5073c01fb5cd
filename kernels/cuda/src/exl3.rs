//! Weights in EXL3's codes ([`nq_formats::exl3`]) and products with them.
//!
//! The parts of a product (q, k and v; gate and up) have scales of inputs, and often bits, of their own, so each is multiplied
//! by itself: of up to [`MOST_TRELLIS_ROWS`](crate::MOST_TRELLIS_ROWS) rows by codes as they are, which the kernels of
//! trellis codes do with FP16 instead of digits; of more, after all values became FP16, by other kernels.

pub(crate) mod parts;

use super::driver::{Address, LaunchShape, Operands, Stream};
use super::kernel::{Instance, kernels};
use super::linear::DeviceLinear;
use super::pack::{SPAN, TILE as RECORD_ROWS};
use super::product::{Epilogue, PlannedRows, Product, ProductOutput, Shares};
use super::trellis::exl3_inputs;
use super::trellis::rows::CodedProduct;
use super::trellis::sizes::{GROUPS, grouped};
use crate::cuda::exl3_expand::{EXL3_WARPS, EXPANDED_ROW, Exl3ExpandArgs};
use crate::cuda::trellis_rows::TrellisRowsArgs;
use nq_formats::Exl3Code;
use nq_formats::trellis::{Code, STRIP, TILE as COLUMNS};
use nq_kernels::Result;
use nq_model::Dims;
use parts::{Exl3Part, Exl3Parts, LEAST_BITS, unit_bytes};
use std::ops::Range;

kernels! {
    EXL3_ROWS: TrellisRowsArgs = "exl3_rows" in "exl3_rows.cu",
        test "kernels/cuda/tests/cuda/exl3.rs::products_of_a_step", bench "trellis",
        instances &[
            "exl3_rows_2_4", "exl3_rows_3_4", "exl3_rows_4_4", "exl3_rows_5_4",
            "exl3_rows_6_4", "exl3_rows_7_4", "exl3_rows_8_4",
            "exl3_rows_2_16", "exl3_rows_3_16", "exl3_rows_4_16", "exl3_rows_5_16",
            "exl3_rows_6_16", "exl3_rows_7_16", "exl3_rows_8_16",
        ];
    EXL3_EXPAND: Exl3ExpandArgs = "exl3_expand" in "exl3_expand.cu",
        test "kernels/cuda/tests/cuda/exl3.rs::products_of_many_rows", bench "trellis",
        instances &[
            "exl3_expand_2", "exl3_expand_3", "exl3_expand_4", "exl3_expand_5",
            "exl3_expand_6", "exl3_expand_7", "exl3_expand_8",
        ];
}

/// A part as an operand, and those of its experts that are of interest.
struct PartOperand<'w> {
    w: &'w DeviceLinear,
    part: &'w Exl3Part,
    /// Weights that the part is a stack of.
    all: usize,
    experts: Range<usize>,
}

impl<'w> PartOperand<'w> {
    /// All experts of a part of `w`, which are `all`.
    fn new(w: &'w DeviceLinear, part: &'w Exl3Part, all: usize) -> Self {
        let experts = 0..all;
        PartOperand {
            w,
            part,
            all,
            experts,
        }
    }

    fn words(&self, o: &Operands<'_>) -> Result<Address> {
        let (part, strips) = (self.part, self.part.strips);
        let strip = self.w.inputs() / COLUMNS * unit_bytes(part.bits);
        let at = part.codes_at + self.experts.start * strips * strip;
        let shape = [self.experts.len(), strips, strip];
        o.part("codes", &self.w.codes, at, &shape)
    }

    fn output_scales(&self, o: &Operands<'_>) -> Result<Address> {
        let height = self.part.strips * STRIP;
        let at = self.part.meta_at + self.experts.start * height * 2;
        let shape = [self.experts.len(), height, 2];
        o.part("scales of outputs", &self.w.meta, at, &shape)
    }

    fn input_scales(&self, o: &Operands<'_>) -> Result<Address> {
        let (height, inputs) = (self.part.strips * STRIP, self.w.inputs());
        let at = self.part.meta_at + (self.all * height + self.experts.start * inputs) * 2;
        let shape = [self.experts.len(), inputs, 2];
        o.part("scales of inputs", &self.w.meta, at, &shape)
    }

    /// The arguments of its products that do not follow from rows of x.
    fn args(&self, o: &Operands<'_>) -> Result<TrellisRowsArgs> {
        let part = self.part;
        Ok(TrellisRowsArgs {
            words: self.words(o)?,
            row_scales: self.output_scales(o)?,
            places: o.of("places", &part.places, &[part.strips])?,
            scales: self.input_scales(o)?,
            strips: part.strips as i32,
            bytes: i32::from(part.code == Exl3Code::Mul1),
            multiplier: part.code.multiplier(),
            addend: part.code.addend(),
            ..TrellisRowsArgs::default()
        })
    }

    /// The instance for its bits among those of a kernel.
    fn index(&self) -> usize {
        self.part.bits - LEAST_BITS
    }

    /// The kernel of its products, by the index of rows of a group in [`GROUPS`].
    fn rows_kernel(&self, which: usize) -> Instance<TrellisRowsArgs> {
        let instances = EXL3_ROWS.row.instances.len() / GROUPS.len();
        EXL3_ROWS.instance(which * instances + self.index())
    }
}

/// A part of a stack of experts, as the kernels of few rows and of sorted rows take it.
pub(crate) struct ExpertPart {
    pub(crate) args: TrellisRowsArgs,
    /// By the rows of a group.
    pub(crate) kernels: [Instance<TrellisRowsArgs>; GROUPS.len()],
    /// Bytes of a tile of a strip.
    pub(crate) unit: usize,
}

impl DeviceLinear {
    /// The parts of a stack of `experts` in EXL3's codes, checked as operands of `o`.
    pub(crate) fn exl3_parts(
        &self,
        o: &Operands<'_>,
        w: &Exl3Parts,
        experts: usize,
    ) -> Result<Vec<ExpertPart>> {
        if w.experts != experts {
            return o.refuse("experts in EXL3's codes", experts, w.experts);
        }
        let part = |part| {
            let operand = PartOperand::new(self, part, w.experts);
            Ok(ExpertPart {
                args: operand.args(o)?,
                kernels: [0, 1].map(|which| operand.rows_kernel(which)),
                unit: unit_bytes(part.bits),
            })
        };
        w.parts.iter().map(part).collect()
    }
}

impl Stream {
    /// A product with a weight in EXL3's codes. More rows of FP16 than the stream has room for are multiplied by values of
    /// FP16.
    pub(super) fn multiply_exl3(
        &self,
        p: &Product<'_>,
        w: &Exl3Parts,
        output: ProductOutput<'_>,
    ) -> Result<()> {
        let room = self.trellis_room(&p.o)?;
        if matches!(p.asked, PlannedRows::Many(_)) && p.m > room.sizes.rows {
            return self.exl3_many(p, w, output);
        }
        let shares = Shares {
            parts: 1,
            bests: w.strips(),
        };
        let to = output.written(&p.o, p.m, p.w.rows(), shares)?;
        if (to.epilogue == Epilogue::Silu) != w.gated {
            let expected = "gate and up for their epilogue alone";
            return p.o.refuse("a weight", expected, "another");
        }
        if to.epilogue == Epilogue::Head && w.parts.len() > 1 {
            return p.o.refuse("a head", "one weight", "several");
        }
        if w.experts > 1 {
            return p.o.refuse("a weight", "of its own", "those of experts");
        }
        for (i, part) in w.parts.iter().enumerate() {
            let operand = PartOperand::new(p.w, part, w.experts);
            let mut args = TrellisRowsArgs {
                out: to.y,
                half: to.half,
                best: to.best,
                rows: p.w.rows() as i32,
                epilogue: to.epilogue as i32,
                ..operand.args(&p.o)?
            };
            if w.gated {
                args.gate = p.o.of("the gate", &room.gate, &[p.m, to.width])?;
                if i == 0 {
                    (args.out, args.gate) = (args.gate, Address::NULL);
                    (args.half, args.rows) = (Address::NULL, to.width as i32);
                    args.epilogue = Epilogue::Store as i32;
                }
            }
            let coded = CodedProduct {
                prepare: exl3_inputs(),
                multiply: operand.rows_kernel(grouped(p.m).1),
                code: Code::Octagon,
                unit: unit_bytes(part.bits),
                together: 1,
                args,
            };
            let p = Product {
                holds_dependents: p.holds_dependents && i == 0,
                ..*p
            };
            self.coded_rows(&p, &to, coded)?;
        }
        Ok(())
    }

    /// A product of more rows: the values of all parts become FP16.
    fn exl3_many(&self, p: &Product<'_>, w: &Exl3Parts, output: ProductOutput<'_>) -> Result<()> {
        let expanded = self.expand_exl3(&p.o, p.w, w, 0..w.experts)?;
        let p = Product { w: &expanded, ..*p };
        self.multiply(p, output)
    }

    /// The values of some of the experts of `linear`, whose parts are `w`, as FP16, in memory that the next product takes again.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(super) fn expand_exl3(
        &self,
        o: &Operands<'_>,
        linear: &DeviceLinear,
        w: &Exl3Parts,
        experts: Range<usize>,
    ) -> Result<DeviceLinear> {
        let room = self.trellis_room(o)?;
        let inputs = linear.inputs();
        let rows = linear.rows() / w.experts * experts.len();
        let spans = inputs.div_ceil(SPAN);
        let records = [rows.div_ceil(RECORD_ROWS), spans, RECORD_ROWS * SPAN * 2];
        let codes = o.of("expanded weights", &room.expanded, &records)?;
        for (i, part) in w.parts.iter().enumerate() {
            let operand = PartOperand {
                experts: experts.clone(),
                ..PartOperand::new(linear, part, w.experts)
            };
            let args = Exl3ExpandArgs {
                words: operand.words(o)?,
                row_scales: operand.output_scales(o)?,
                scales: operand.input_scales(o)?,
                codes,
                strips: part.strips as i32,
                tiles: (inputs / COLUMNS) as i32,
                spans: spans as i32,
                first_row: if w.gated { 0 } else { part.first_row as i32 },
                half: if w.gated { i as i32 } else { -1 },
                bytes: i32::from(part.code == Exl3Code::Mul1),
                multiplier: part.code.multiplier(),
                addend: part.code.addend(),
            };
            let strips = experts.len() * part.strips;
            let shape = LaunchShape::new([2 * spans, strips, 1], EXL3_WARPS * 32)
                .shared(STRIP * EXPANDED_ROW * size_of::<f32>())
                .overlapping();
            // SAFETY: the operands were checked.
            unsafe { self.launch(EXL3_EXPAND.instance(operand.index()), shape, &args)? };
        }
        let dims = Dims::new(rows, inputs);
        Ok(DeviceLinear::of_halves(&room.expanded, &room.no_meta, dims))
    }
}
