//! Weights in EXL3's codes ([`nq_formats::exl3`]) and products with them.
//!
//! The parts of a product (q, k and v; gate and up) have scales of inputs, and often bits, of their own, so each is multiplied
//! by itself: of up to [`MOST_TRELLIS_ROWS`](crate::MOST_TRELLIS_ROWS) rows by codes as they are, which the kernels of
//! trellis codes do with FP16 instead of digits; of more, after all values became FP16, by other kernels.

pub(crate) mod parts;

use super::driver::{Address, LaunchShape, Operands, Stream};
use super::kernel::kernels;
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

/// A part as an operand.
struct PartOperand<'w> {
    w: &'w DeviceLinear,
    part: &'w Exl3Part,
}

impl PartOperand<'_> {
    fn height(&self) -> usize {
        self.part.strips * STRIP
    }

    fn words(&self, o: &Operands<'_>) -> Result<Address> {
        let (bits, inputs) = (self.part.bits, self.w.inputs());
        let shape = [self.part.strips, inputs / COLUMNS, unit_bytes(bits)];
        o.part("codes", &self.w.codes, self.part.codes_at, &shape)
    }

    fn output_scales(&self, o: &Operands<'_>) -> Result<Address> {
        let at = self.part.meta_at;
        o.part("scales of outputs", &self.w.meta, at, &[self.height(), 2])
    }

    fn input_scales(&self, o: &Operands<'_>) -> Result<Address> {
        let at = self.part.meta_at + self.height() * 2;
        o.part("scales of inputs", &self.w.meta, at, &[self.w.inputs(), 2])
    }

    /// The instance for its bits among those of a kernel.
    fn index(&self) -> usize {
        self.part.bits - LEAST_BITS
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
        for (i, part) in w.parts.iter().enumerate() {
            let operand = PartOperand { w: p.w, part };
            let mut args = TrellisRowsArgs {
                words: operand.words(&p.o)?,
                row_scales: operand.output_scales(&p.o)?,
                places: p.o.of("places", &part.places, &[part.strips])?,
                scales: operand.input_scales(&p.o)?,
                out: to.y,
                half: to.half,
                best: to.best,
                rows: p.w.rows() as i32,
                strips: part.strips as i32,
                epilogue: to.epilogue as i32,
                bytes: i32::from(part.code == Exl3Code::Mul1),
                multiplier: part.code.multiplier(),
                addend: part.code.addend(),
                ..TrellisRowsArgs::default()
            };
            if w.gated {
                args.gate = p.o.of("the gate", &room.gate, &[p.m, to.width])?;
                if i == 0 {
                    (args.out, args.gate) = (args.gate, Address::NULL);
                    (args.half, args.rows) = (Address::NULL, to.width as i32);
                    args.epilogue = Epilogue::Store as i32;
                }
            }
            let instances = EXL3_ROWS.row.instances.len() / GROUPS.len();
            let coded = CodedProduct {
                prepare: exl3_inputs(),
                multiply: EXL3_ROWS.instance(grouped(p.m).1 * instances + operand.index()),
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
        let o = &p.o;
        let room = self.trellis_room(o)?;
        let (inputs, rows) = (p.w.inputs(), p.w.rows());
        let spans = inputs.div_ceil(SPAN);
        let records = [rows.div_ceil(RECORD_ROWS), spans, RECORD_ROWS * SPAN * 2];
        let codes = o.of("expanded weights", &room.expanded, &records)?;
        for (i, part) in w.parts.iter().enumerate() {
            let operand = PartOperand { w: p.w, part };
            let args = Exl3ExpandArgs {
                words: operand.words(o)?,
                row_scales: operand.output_scales(o)?,
                scales: operand.input_scales(o)?,
                codes,
                tiles: (inputs / COLUMNS) as i32,
                spans: spans as i32,
                first_row: if w.gated { 0 } else { part.first_row as i32 },
                half: if w.gated { i as i32 } else { -1 },
                bytes: i32::from(part.code == Exl3Code::Mul1),
                multiplier: part.code.multiplier(),
                addend: part.code.addend(),
                padding: [0; 1],
            };
            let shape = LaunchShape::new([2 * spans, part.strips, 1], EXL3_WARPS * 32)
                .shared(STRIP * EXPANDED_ROW * size_of::<f32>())
                .overlapping();
            // SAFETY: the operands were checked.
            unsafe { self.launch(EXL3_EXPAND.instance(operand.index()), shape, &args)? };
        }
        let expanded =
            DeviceLinear::of_halves(&room.expanded, &room.no_meta, Dims::new(rows, inputs));
        let p = Product { w: &expanded, ..*p };
        self.multiply(p, output)
    }
}
