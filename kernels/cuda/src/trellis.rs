//! Weights in trellis codes ([`nq_formats::trellis`]) and products with them.
//!
//! Files have sequences in the order in which tensor cores read them, so weights stay as they are. Inputs are
//! transformed before a product: of up to [`MOST_ROWS`] rows they become digits, which the bytes of states multiply as
//! integers; for more, the weights' values become FP16, a product at a time, and other kernels multiply them.

pub(super) mod experts;
pub(super) mod room;
pub(super) mod rows;
pub(crate) mod sizes;
pub(super) mod stack;

use super::driver::{Address, Buffer, LaunchShape, Operands, Stream};
use super::exl3::parts::Exl3Parts;
use super::kernel::{Instance, Kernel, kernels};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN, TILE};
use super::product::{
    Epilogue, Inputs, OutputAddresses, PlannedRows, Product, ProductOutput, Shares,
};
use crate::cuda::trellis_expand::{EXPAND_WARPS, TrellisEmbedArgs, TrellisExpandArgs};
use crate::cuda::trellis_inputs::{TrellisInputsArgs, TrellisTurnArgs};
use crate::cuda::trellis_rows::TrellisRowsArgs;
use bytemuck::Pod;
use nq_formats::trellis::TILE as COLUMNS;
use nq_formats::trellis::{Code, LANES, STRIP, TrellisScheme};
use nq_kernels::Result;
use nq_model::Dims;
use room::TrellisRoom;
use rows::CodedProduct;
use sizes::grouped;
use stack::TrellisParts;

/// Most rows that are multiplied by codes as they are.
pub const MOST_ROWS: usize = 64;

macro_rules! codes {
    ($prefix:literal $(; $($suffix:literal),+)?) => {
        codes!(@ $prefix; $($($suffix),+)?)
    };
    (@ $prefix:literal;) => { &codes!(list $prefix, "") };
    (@ $prefix:literal; $($suffix:literal),+) => { <[_]>::as_flattened(&[$(codes!(list $prefix, $suffix)),+]) };
    (list $prefix:literal, $suffix:literal) => {
        [
            concat!($prefix, "_sum2", $suffix),
            concat!($prefix, "_sum3", $suffix),
            concat!($prefix, "_sum4", $suffix),
            concat!($prefix, "_sum5", $suffix),
            concat!($prefix, "_sum6", $suffix),
            concat!($prefix, "_octagon4", $suffix),
            concat!($prefix, "_octagon5", $suffix),
            concat!($prefix, "_octagon6", $suffix),
            concat!($prefix, "_octagon7", $suffix),
            concat!($prefix, "_octagon8", $suffix),
            concat!($prefix, "_octagon10", $suffix),
        ]
    };
}

/// Number of schemes, in the order of [`TrellisScheme::all`].
const SCHEMES: usize = 11;

fn index_of(scheme: TrellisScheme) -> usize {
    TrellisScheme::all()
        .position(|s| s == scheme)
        .unwrap_or_default()
}

kernels! {
    TRELLIS_INPUTS: TrellisInputsArgs = "trellis_inputs" in "trellis_inputs.cu",
        test "kernels/cuda/tests/cuda/trellis.rs::products_of_a_step", bench "trellis",
        instances &["trellis_inputs_sum", "trellis_inputs_octagon", "trellis_inputs_exl3"];
    TRELLIS_TURN: TrellisTurnArgs = "trellis_turn" in "trellis_inputs.cu",
        test "kernels/cuda/tests/cuda/trellis.rs::products_of_many_rows", bench "trellis";
    TRELLIS_ROWS: TrellisRowsArgs = "trellis_rows" in "trellis_rows.cu",
        test "kernels/cuda/tests/cuda/trellis.rs::products_of_a_step", bench "trellis",
        instances codes!("trellis_rows"; "_4", "_16");
    TRELLIS_EXPAND: TrellisExpandArgs = "trellis_expand" in "trellis_expand.cu",
        test "kernels/cuda/tests/cuda/trellis.rs::products_of_many_rows", bench "trellis",
        instances codes!("trellis_expand");
    TRELLIS_EMBED: TrellisEmbedArgs = "trellis_embed" in "trellis_expand.cu",
        test "kernels/cuda/tests/cuda/trellis.rs::embeddings", bench "trellis",
        instances codes!("trellis_embed");
}

/// The kernel that prepares rows of x for products with EXL3's codes.
pub(super) fn exl3_inputs() -> Instance<TrellisInputsArgs> {
    TRELLIS_INPUTS.instance(2)
}

/// A trellis weight as an operand.
struct Operand<'w> {
    w: &'w DeviceLinear,
    parts: &'w TrellisParts,
}

/// A code of which the kernel of all layers has products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerCode {
    /// Its number in `with_code` of `cuda/layers_trellis.cuh`.
    pub(super) number: u8,
    /// Bytes of a strip's tile.
    pub(super) unit: usize,
}

/// The code of weights of this kind, if the kernel of all layers has it: octagons, and sums of 6 bits.
pub(super) fn layer_code(kind: PackedKind) -> Option<LayerCode> {
    let PackedKind::Trellis(scheme) = kind else {
        return None;
    };
    let before = TrellisScheme::all()
        .filter(|s| s.code() == Code::Sum)
        .count()
        - 1;
    let number = index_of(scheme).checked_sub(before)?;
    Some(LayerCode {
        number: number as u8,
        unit: unit_bytes(scheme),
    })
}

/// Bytes of a tile of a strip.
fn unit_bytes(scheme: TrellisScheme) -> usize {
    scheme.words() * LANES * size_of::<u32>()
}

impl DeviceLinear {
    /// Words of a trellis weight, and scales of rows, behind which those of inputs are.
    pub(super) fn trellis_args(&self, o: &Operands<'_>) -> Result<(Address, Address)> {
        let operand = self.trellis_operand(o)?;
        operand.input_scales(o)?;
        Ok((operand.words(o)?, operand.row_scales(o)?))
    }

    /// True if it is in a trellis code.
    pub(super) fn is_trellis(&self) -> bool {
        self.trellis.is_some()
    }

    /// True if it is in codes that are not packed as others are: those of trellises, or of EXL3.
    pub(super) fn is_unpacked(&self) -> bool {
        self.trellis.is_some() || self.exl3.is_some()
    }

    fn trellis_operand(&self, o: &Operands<'_>) -> Result<Operand<'_>> {
        match &self.trellis {
            Some(parts) => Ok(Operand { w: self, parts }),
            None => o.refuse("a weight", "one in a trellis code", self.kind().name()),
        }
    }

    /// Strips of a weight in a trellis code.
    pub(super) fn trellis_strips(&self) -> Option<usize> {
        self.trellis.as_ref().map(|parts| parts.strips)
    }

    /// Values per row that `best` of a head's product must hold, if the head is in a trellis code or in one of EXL3: its
    /// strips.
    pub(super) fn bests(&self) -> Option<usize> {
        let exl3 = self.exl3.as_ref().map(Exl3Parts::strips);
        self.trellis_strips().or(exl3)
    }
}

impl Operand<'_> {
    fn inputs(&self) -> usize {
        self.w.inputs()
    }

    fn words(&self, o: &Operands<'_>) -> Result<Address> {
        let bytes = self.parts.strips * self.parts.scheme.strip_bytes(self.inputs());
        o.of("codes", &self.w.codes, &[bytes])
    }

    fn row_scales(&self, o: &Operands<'_>) -> Result<Address> {
        o.of(
            "scales of rows",
            &self.w.meta,
            &[self.parts.strips, STRIP, 2],
        )
    }

    fn places(&self, o: &Operands<'_>) -> Result<Address> {
        o.of("places", &self.parts.places, &[self.parts.strips])
    }

    fn input_scales(&self, o: &Operands<'_>) -> Result<Address> {
        let rows = self.parts.strips * STRIP * 2;
        o.part("scales of inputs", &self.w.meta, rows, &[self.inputs(), 2])
    }

    fn instance<A: Copy>(&self, kernel: &'static Kernel<A>, suffix: usize) -> Instance<A> {
        kernel.instance(suffix * SCHEMES + index_of(self.parts.scheme))
    }
}

impl Stream {
    /// The room of this stream for products with trellis codes.
    pub(super) fn trellis_room<'s>(&'s self, o: &Operands<'_>) -> Result<&'s TrellisRoom> {
        match self.room() {
            Some(room) => Ok(room),
            None => o.refuse("a stream", "with memory for trellis codes", "one without"),
        }
    }

    /// A product with a trellis weight. More rows of FP16 than the stream has room for as digits are multiplied by
    /// values of FP16.
    pub(super) fn multiply_trellis(
        &self,
        p: &Product<'_>,
        parts: &TrellisParts,
        output: ProductOutput<'_>,
    ) -> Result<()> {
        let operand = Operand { w: p.w, parts };
        if matches!(p.asked, PlannedRows::Many(_)) && p.m > self.trellis_room(&p.o)?.sizes.rows {
            return self.trellis_many(p, &operand, output);
        }
        let shares = Shares {
            parts: 1,
            bests: parts.strips,
        };
        let to = output.written(&p.o, p.m, p.w.rows(), shares)?;
        self.trellis_rows(p, &operand, &to)
    }

    fn trellis_rows(
        &self,
        p: &Product<'_>,
        w: &Operand<'_>,
        to: &OutputAddresses<'_>,
    ) -> Result<()> {
        let (o, parts, code) = (&p.o, w.parts, w.parts.scheme.code());
        if (to.epilogue == Epilogue::Silu) != parts.paired {
            let expected = "gate and up for their epilogue alone";
            return o.refuse("a weight", expected, "another");
        }
        let coded = CodedProduct {
            prepare: TRELLIS_INPUTS.instance(usize::from(code == Code::Octagon)),
            multiply: w.instance(&TRELLIS_ROWS, grouped(p.m).1),
            code,
            unit: unit_bytes(parts.scheme),
            together: if parts.paired { 2 } else { 1 },
            args: TrellisRowsArgs {
                words: w.words(o)?,
                row_scales: w.row_scales(o)?,
                places: w.places(o)?,
                scales: w.input_scales(o)?,
                out: to.y,
                half: to.half,
                best: to.best,
                rows: w.w.rows() as i32,
                strips: parts.strips as i32,
                epilogue: to.epilogue as i32,
                ..TrellisRowsArgs::default()
            },
        };
        self.coded_rows(p, to, coded)
    }

    /// A product of more rows: the values of the weights become FP16, and the inputs are transformed.
    fn trellis_many(
        &self,
        p: &Product<'_>,
        w: &Operand<'_>,
        output: ProductOutput<'_>,
    ) -> Result<()> {
        let (o, m) = (&p.o, p.m);
        let room = self.trellis_room(o)?;
        let (inputs, rows) = (w.inputs(), w.w.rows());
        let (padded, spans, tiles) = (
            inputs.next_multiple_of(SPAN),
            inputs.div_ceil(SPAN),
            rows.div_ceil(TILE),
        );
        let args = TrellisTurnArgs {
            x: p.x()?,
            scales: w.input_scales(o)?,
            out: o.of("transformed x", &room.turned, &[m, padded])?,
            m: m as i32,
            inputs: inputs as i32,
            padded: padded as i32,
            padding: [0; 1],
        };
        let shape = LaunchShape::new([m, 1, 1], 256).overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(&TRELLIS_TURN, shape, &args)? };
        let args = TrellisExpandArgs {
            words: w.words(o)?,
            row_scales: w.row_scales(o)?,
            places: w.places(o)?,
            codes: o.of(
                "expanded weights",
                &room.expanded,
                &[tiles, spans, TILE * SPAN * 2],
            )?,
            strips: w.parts.strips as i32,
            tiles: (inputs / COLUMNS) as i32,
            spans: spans as i32,
            silu: i32::from(w.parts.paired),
            first_row: 0,
            padding: [0; 1],
        };
        let each = if w.parts.paired { 2 } else { 1 };
        let words = w.parts.scheme.words() * LANES * size_of::<u32>();
        let shape = LaunchShape::new([spans, w.parts.strips / each, 1], EXPAND_WARPS * 32)
            .shared(EXPAND_WARPS * each * words)
            .overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(w.instance(&TRELLIS_EXPAND, 0), shape, &args)? };
        let expanded =
            DeviceLinear::of_halves(&room.expanded, &room.no_meta, Dims::new(rows, inputs));
        let p = Product {
            w: &expanded,
            x: Inputs::Half(&room.turned),
            ..*p
        };
        self.multiply(p, output)
    }

    /// The rows of tokens `[m]` of a trellis weight, in f32: `x` `[m, inputs]`. Token
    /// i is the `stride * i`-th word of `tokens`.
    pub(super) fn trellis_embed<T: Pod>(
        &self,
        embedding: &DeviceLinear,
        tokens: &Buffer<T>,
        at: usize,
        x: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("embed");
        let operand = embedding.trellis_operand(&o)?;
        let inputs = embedding.inputs();
        let args = TrellisEmbedArgs {
            words: operand.words(&o)?,
            row_scales: operand.row_scales(&o)?,
            scales: operand.input_scales(&o)?,
            tokens: o.of("tokens", tokens, &[m])?.plus(at * size_of::<u32>()),
            x: o.of("x", x, &[m, inputs])?,
            m: m as i32,
            inputs: inputs as i32,
            tiles: (inputs / COLUMNS) as i32,
            stride: (size_of::<T>() / size_of::<u32>()) as i32,
        };
        let shape = LaunchShape::new([m, 1, 1], EXPAND_WARPS * 32).overlapping();
        // SAFETY: the operands were checked; callers answer for the tokens.
        unsafe { self.launch(operand.instance(&TRELLIS_EMBED, 0), shape, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_in_the_order_of_schemes() {
        let names: Vec<String> = TrellisScheme::all()
            .map(|s| format!("trellis_expand_{}{}", s.code(), s.step_bits()))
            .collect();
        assert_eq!(TRELLIS_EXPAND.row.instances, names);
        let rows = TRELLIS_ROWS.row.instances;
        assert_eq!(rows.len(), 2 * SCHEMES);
        assert!(rows[..SCHEMES].iter().all(|n| n.ends_with("_4")));
    }
}
