//! Weights in trellis codes: their layout, and the drivers of their products.
//!
//! Strips, tiles and sequences are those of the file ([`nq_formats::trellis`]). In a tile the words of its 32 sequences
//! lie side by side, `[words][32]`, so that a vector is a word of 16 sequences. The four bytes of a state times a
//! constant, a quad, are multiplied with four 8-bit values of x: `(a, (a + b) / sqrt 2, b, (b - a) / sqrt 2)` of a
//! pair of inputs (octagon), or one of them four times (sum). Sums are integers over the inputs that share a scale of
//! x; the row's own scale comes last.

pub(crate) mod products;

use super::input::{InputScales, Prepared};
use super::kernels::LinearKernel;
use super::pack::{PanelWeight, spread};
use crate::cpu::Team;
use crate::cpu::memory::Buffer;
use crate::cpu::simd::LANES;
use crate::cpu::table::KernelTable;
use crate::cpu::with_scratch;
use nq_formats::TrellisWeight;
use nq_formats::trellis::{self, Code, STRIP, TILE, TrellisScheme};
use products::QUADS;
use std::ops::Range;

/// Panels of a strip.
pub(crate) const PANELS: usize = STRIP / LANES;

/// Sequences of a tile.
const SEQUENCES: usize = trellis::LANES;

/// Bits of a step that kernels are compiled for.
const STEP_BITS: [usize; 8] = [2, 3, 4, 5, 6, 7, 8, 10];

/// What a value of a code is divided by: values are 1/128 of sums of bytes.
pub(crate) const UNIT: f32 = 128.0;

/// Inputs whose bytes are written out at once for many columns: 8 KiB of a panel, or 16 of the code `sum`.
const CHUNK: usize = 256;

/// What a packed trellis weight has beside its words.
pub(crate) struct PackedTrellis {
    pub(crate) scheme: TrellisScheme,
    /// Factors of the inputs, before they are transformed.
    pub(crate) input_scales: InputScales,
}

impl PackedTrellis {
    /// The code.
    pub(crate) fn code(&self) -> Code {
        self.scheme.code()
    }

    /// Parts of a tile: [`products`].
    fn parts(&self) -> usize {
        TILE / (QUADS * self.code().width())
    }

    /// Parts of this many inputs.
    fn parts_of_row(&self, inputs: usize) -> usize {
        inputs / TILE * self.parts() + inputs % TILE / (QUADS * self.code().width())
    }

    /// Index of the steps' bits in tables of kernels.
    fn place(&self) -> usize {
        let bits = self.scheme.step_bits() as usize;
        let place = STEP_BITS.iter().position(|&b| b == bits);
        place.expect("a scheme checks the bits of its steps")
    }
}

/// Quads of inputs that a code makes of `inputs`.
pub(crate) fn quads(code: Code, inputs: usize) -> usize {
    inputs / code.width()
}

/// Words of a weight `[rows, inputs]`, padded to strips.
pub(crate) fn words(scheme: TrellisScheme, (rows, inputs): (usize, usize)) -> usize {
    rows.div_ceil(STRIP) * (inputs / TILE) * SEQUENCES * scheme.words()
}

/// Lets `w` have the input scales of one of `others` that has the same, so that x is prepared once for both.
pub(crate) fn share_input_scales<'a>(
    w: &mut PanelWeight,
    mut others: impl Iterator<Item = &'a PanelWeight>,
) {
    if let Some(own) = &mut w.trellis {
        let same = |other: &'a PanelWeight| {
            let scales = &other.trellis.as_ref()?.input_scales;
            (scales.0 == own.input_scales.0).then(|| scales.clone())
        };
        if let Some(scales) = others.find_map(same) {
            own.input_scales = scales;
        }
    }
}

/// The words of `w` in the layout of this module, in parallel.
pub(crate) fn pack(team: &Team, w: &TrellisWeight) -> Buffer<u32> {
    let scheme = w.scheme();
    let each = scheme.words();
    let mut data = Buffer::weights(words(scheme, (w.out_features(), w.in_features())));
    let (from, _) = w.words().as_chunks::<4>();
    let tile = SEQUENCES * each;
    spread(team, &mut data, tile, |index, data| {
        let from = &from[index * tile..][..tile];
        for (i, to) in data.iter_mut().enumerate() {
            let place = trellis::word_place(each, i % SEQUENCES, i / SEQUENCES);
            *to = u32::from_le_bytes(from[place]);
        }
    });
    data
}

/// Writes row `row` of a packed weight, with the values of [`TrellisWeight::dequantize_row`].
pub(crate) fn dequantize_row(w: &PanelWeight, row: usize, out: &mut [f32]) {
    let t = w.trellis();
    let (code, bits, words) = (t.code(), t.scheme.step_bits() as usize, t.scheme.words());
    let tiles = w.inputs / TILE;
    let first = row % STRIP / LANES * 4 + row % LANES / 8;
    let scale = w.scales[row].to_f32();
    for (tile, out) in out.chunks_exact_mut(TILE).enumerate() {
        let from = (row / STRIP * tiles + tile) * SEQUENCES * words;
        let from = &w.data[from..][..SEQUENCES * words];
        // The four sequences that have the row.
        for lane in row % 8 * 4..row % 8 * 4 + 4 {
            for step in (0..t.parts()).flat_map(|part| [0, 2].map(|i| 32 * part + first + i)) {
                let end = (step + 1) * bits;
                let word = (end - 1) / 32;
                let [before, word] =
                    [(word + words - 1) % words, word].map(|i| from[i * SEQUENCES + lane]);
                let values = code.values(trellis::state(
                    &[before, word],
                    64 - (end.wrapping_neg() % 32),
                ));
                let (_, column) = trellis::place(code, lane, step);
                let to = &mut out[column..column + code.width()];
                to.iter_mut()
                    .zip(values)
                    .for_each(|(to, v)| *to = scale * v);
            }
        }
    }
    trellis::transform(out);
    out.iter_mut()
        .zip(&*t.input_scales.0)
        .for_each(|(v, s)| *v *= s.to_f32());
}

/// The strips that have some panels, each with its panels among those of `panels`, from 0 on.
fn strips(panels: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    assert!(panels.start.is_multiple_of(PANELS), "whole strips");
    let (start, end) = (panels.start, panels.end);
    (start..end)
        .step_by(PANELS)
        .map(move |p| (p / PANELS, p - start..(p + PANELS).min(end) - start))
}

/// Multiplies panels of sums, `[panels][columns][16]`, by the scales of their rows, and puts the rows in order.
fn finish(w: &PanelWeight, first: usize, columns: usize, out: &mut [f32]) {
    let scales = w.scales[first * LANES..].chunks_exact(LANES);
    for (out, scales) in out.chunks_exact_mut(columns * LANES).zip(scales) {
        let mut factors = [0.0; LANES];
        for (f, s) in factors.iter_mut().zip(scales) {
            *f = s.to_f32();
        }
        for out in out.as_chunks_mut::<LANES>().0 {
            *out = std::array::from_fn(|row| factors[row] * out[row % 4 * 4 + row / 4]);
        }
    }
}

/// Few columns: every strip is read once for a block of them, and states are made in registers.
///
/// # Safety
/// That of a [`LinearKernel`]'s function.
pub(super) unsafe fn gemv(
    kernel: &LinearKernel,
    table: &KernelTable,
    w: &PanelWeight,
    x: &Prepared,
    panels: Range<usize>,
    out: &mut [f32],
) {
    let of_columns = &table.trellis.gemv[kernel.planes() - 1];
    let place = w.trellis().place().min(of_columns[0].len() - 1);
    let (gemv, size) = (of_columns[x.width - 1][place], x.columns() * LANES);
    for (strip, own) in strips(&panels) {
        let out = &mut out[own.start * size..own.end * size];
        for block in 0..x.blocks() {
            let out = &mut out[block * x.width * LANES..];
            // SAFETY: by contract; a panel's outputs of block `block` start at its columns.
            unsafe { gemv(w, x, strip, block, own.len(), out.as_mut_ptr(), size) };
        }
        finish(w, strip * PANELS, x.columns(), out);
    }
}

/// Many columns: the bytes of states are written out once for all of them.
///
/// # Safety
/// That of a [`LinearKernel`]'s function.
pub(super) unsafe fn gemm(
    kernel: &LinearKernel,
    table: &KernelTable,
    w: &PanelWeight,
    x: &Prepared,
    panels: Range<usize>,
    out: &mut [f32],
) {
    let dots = match kernel.planes() {
        1 => &table.trellis.dot,
        _ => &table.trellis.dot_wide,
    };
    let stride = x.columns() * LANES;
    each_piece(
        table,
        w,
        panels,
        (out, stride),
        |quads, inputs, panels, out| {
            let groups = inputs.start / x.share..inputs.end / x.share;
            let dot = dots[panels - 1][x.width - 1];
            let words = quads.len() / panels;
            for block in 0..x.blocks() {
                let out = &mut out[block * x.width * LANES..];
                // SAFETY: by contract; a panel's outputs of block `block` start at its columns.
                unsafe {
                    dot(
                        quads.as_ptr(),
                        words,
                        x,
                        block,
                        groups.clone(),
                        out.as_mut_ptr(),
                        stride,
                    )
                };
            }
        },
    );
}

/// Activations that are not rounded, any number of columns: states become floats in a tile.
///
/// # Safety
/// That of a [`LinearKernel`]'s function.
pub(super) unsafe fn gemm_f32(
    _: &LinearKernel,
    table: &KernelTable,
    w: &PanelWeight,
    x: &Prepared,
    panels: Range<usize>,
    out: &mut [f32],
) {
    let code = w.trellis().code();
    let stride = x.columns() * LANES;
    each_piece(
        table,
        w,
        panels,
        (out, stride),
        |quads, inputs, panels, out| {
            with_scratch!(Buffer<f32>, |tile| {
                let tile = tile.reserve(panels * inputs.len() * LANES);
                (table.trellis_values)(code, quads, tile);
                for block in 0..x.blocks() {
                    let from = (block * w.inputs + inputs.start) * x.width;
                    let out = &mut out[block * x.width * LANES..];
                    // SAFETY: block `block` holds `w.inputs * width` values, of which those of `inputs` are used; a panel's
                    // outputs of the block start at its columns.
                    unsafe {
                        (table.tile[panels - 1][x.width - 1])(
                            inputs.len(),
                            tile.as_ptr(),
                            inputs.len() * LANES,
                            x.floats.as_ptr().add(from),
                            out.as_mut_ptr(),
                            stride,
                            LANES,
                            inputs.start > 0,
                        );
                    }
                }
            });
        },
    );
}

/// Calls `f` for pieces of each strip of `panels`: as many panels as kernels take at a time, or one, and a chunk of inputs,
/// with the piece's quads, `[panels][quads][16]`, the inputs, the number of panels and their part of `out`, of which
/// each panel has `stride` floats. Then applies the rows' scales.
fn each_piece(
    table: &KernelTable,
    w: &PanelWeight,
    panels: Range<usize>,
    (out, stride): (&mut [f32], usize),
    f: impl Fn(&[u32], Range<usize>, usize, &mut [f32]),
) {
    let t = w.trellis();
    with_scratch!(Buffer<u32>, |buffer| {
        for (strip, own) in strips(&panels) {
            let out = &mut out[own.start * stride..own.end * stride];
            for from in (0..w.inputs).step_by(CHUNK) {
                let inputs = from..(from + CHUNK).min(w.inputs);
                let parts = t.parts_of_row(inputs.start)..t.parts_of_row(inputs.end);
                let mut panel = 0;
                while panel < own.len() {
                    let whole = panel + table.panels <= own.len();
                    let count = if whole { table.panels } else { 1 };
                    let quads = buffer.reserve(count * parts.len() * QUADS * LANES);
                    let (own, to) = (panel..panel + count, quads.as_mut_ptr());
                    // SAFETY: the strip is one of the weight's; there is room for the panels' parts.
                    unsafe { (table.trellis.spread)(w, strip, own, parts.clone(), to) };
                    f(quads, inputs.clone(), count, &mut out[panel * stride..]);
                    panel += count;
                }
            }
            finish(w, strip * PANELS, stride / LANES, out);
        }
    });
}
