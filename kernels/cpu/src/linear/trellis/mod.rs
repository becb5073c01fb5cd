//! Weights in trellis codes: their layout, and the drivers of their products.
//!
//! Strips, tiles and sequences are those of the file ([`nq_formats::trellis`]). In a tile the words of its 32 sequences
//! lie side by side, `[words][32]`, so that a vector is a word of 16 sequences. The four bytes of a state times a
//! constant, a quad, are multiplied with four 8-bit values of x: `(a, (a + b) / sqrt 2, b, (b - a) / sqrt 2)` of a
//! pair of inputs (octagon), or one of them four times (sum). Sums are integers over the inputs that share a scale of
//! x; the row's own scale comes last.

pub(crate) mod pack;
pub(crate) mod products;

use super::kernel::PanelProduct;
use super::pack::PanelWeight;
use crate::memory::Buffer;
use crate::simd::LANES;
use crate::with_scratch;
use nq_formats::trellis::Code;
use pack::{PANELS, QUADS};
use std::ops::Range;

/// What a value of a code is divided by: values are 1/128 of sums of bytes.
pub(crate) const UNIT: f32 = 128.0;

/// Inputs whose bytes are written out at once for many columns: 8 KiB of a panel, or 16 of the code `sum`.
const CHUNK: usize = 256;

/// Quads of inputs that a code makes of `inputs`.
pub(crate) fn quads(code: Code, inputs: usize) -> usize {
    inputs / code.width()
}

/// Lets `w` have the input scales of one of `others` that has the same, so that x is prepared once for both.
pub(crate) fn share_input_scales<'a>(
    w: &mut PanelWeight,
    mut others: impl Iterator<Item = &'a PanelWeight>,
) {
    if let Some(own) = w.input_scales_mut() {
        let same = |other: &'a PanelWeight| {
            let scales = other.input_scales()?;
            (scales.0 == own.0).then(|| scales.clone())
        };
        if let Some(scales) = others.find_map(same) {
            *own = scales;
        }
    }
}

/// The strips that have some panels, each with its panels among those of `panels`, from 0 on.
pub(super) fn strips(panels: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
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
/// That of [`RunPanels`](super::kernel::RunPanels).
pub(super) unsafe fn gemv(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (kernel, table, w, x, panels) = (p.kernel, p.table, p.w, p.x, &p.panels);
    let of_columns = &table.trellis.gemv[kernel.planes() - 1];
    let place = w.trellis().place().min(of_columns[0].len() - 1);
    let (gemv, size) = (of_columns[x.width - 1][place], x.columns() * LANES);
    for (strip, own) in strips(panels) {
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
/// That of [`RunPanels`](super::kernel::RunPanels).
pub(super) unsafe fn gemm(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (kernel, table, x) = (p.kernel, p.table, p.x);
    let dots = match kernel.planes() {
        1 => &table.trellis.dot,
        _ => &table.trellis.dot_wide,
    };
    let stride = x.columns() * LANES;
    each_piece(p, out, stride, |quads, inputs, panels, out| {
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
    });
}

/// Activations that are not rounded, any number of columns: states become floats in a tile.
///
/// # Safety
/// That of [`RunPanels`](super::kernel::RunPanels).
pub(super) unsafe fn gemm_f32(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (table, w, x) = (p.table, p.w, p.x);
    let code = w.trellis().code();
    let stride = x.columns() * LANES;
    each_piece(p, out, stride, |quads, inputs, panels, out| {
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
    });
}

/// Calls `f` for pieces of each strip of `panels`: as many panels as kernels take at a time, or one, and a chunk of inputs,
/// with the piece's quads, `[panels][quads][16]`, the inputs, the number of panels and their part of `out`, of which
/// each panel has `stride` floats. Then applies the rows' scales.
fn each_piece(
    p: &PanelProduct<'_>,
    out: &mut [f32],
    stride: usize,
    f: impl Fn(&[u32], Range<usize>, usize, &mut [f32]),
) {
    let (table, w, panels) = (p.table, p.w, &p.panels);
    let t = w.trellis();
    with_scratch!(Buffer<u32>, |buffer| {
        for (strip, own) in strips(panels) {
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
