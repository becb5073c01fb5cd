//! Weights in EXL3's codes ([`nq_formats::exl3`]): their layout, and their product with rows of x that are not rounded.
//!
//! A strip has 128 outputs, whose transform mixes them all; a span of it 32 inputs, and so 16 tiles: eight along the outputs,
//! twice. A vector is a word of all 16, so that states are made without a look at other lanes: words lie `[strips][spans]
//! [words of a tile][16]`, lane `8 p + m` being the tile of inputs `16 p ..` and outputs `16 m ..` of the span. An eighth
//! of a tile's sequence has outputs `g` and `g + 8`; of all tiles these are the 16 rows of a panel: `16 m + g` in lane
//! `m`, `16 m + g + 8` in lane `8 + m`.

pub(crate) mod pack;
pub(crate) mod values;

use super::kernel::PanelProduct;
use super::pack::PanelWeight;
use super::trellis::pack::PANELS;
use super::trellis::strips;
use crate::memory::Buffer;
use crate::simd::LANES;
use crate::with_scratch;
use nq_formats::trellis::{BLOCK, transform};
use pack::SPAN;

/// Spans whose values are written out at once: 32 KiB of floats.
const SPANS: usize = 2;

/// Products of any number of columns: values of a few spans of a strip are written out and multiplied, and at the end of
/// the strip its outputs are transformed and scaled.
///
/// # Safety
/// That of [`RunPanels`](super::kernel::RunPanels).
pub(super) unsafe fn gemm(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (table, w, x, panels) = (p.table, p.w, p.x, &p.panels);
    let stride = x.columns() * LANES;
    let spans = w.inputs / SPAN;
    with_scratch!(Buffer<f32>, |values| {
        for (strip, own) in strips(panels) {
            assert_eq!(own.len(), PANELS, "a strip is whole");
            let out = &mut out[own.start * stride..own.end * stride];
            for from in (0..spans).step_by(SPANS) {
                let spans = from..(from + SPANS).min(spans);
                let (first, inputs) = (from * SPAN, spans.len() * SPAN);
                let values = values.reserve(PANELS * inputs * LANES);
                (table.exl3_values)(w, strip, spans, values);
                for panel in (0..PANELS).step_by(table.panels) {
                    for block in 0..x.blocks() {
                        let out = &mut out[panel * stride + block * x.width * LANES..];
                        // SAFETY: panels are a multiple of those that kernels take; block `block` holds
                        // `w.inputs * width` values, of which those of `inputs` are used; a panel's outputs of the
                        // block start at its columns.
                        unsafe {
                            (table.tile[table.panels - 1][x.width - 1])(
                                inputs,
                                values.as_ptr().add(panel * inputs * LANES),
                                inputs * LANES,
                                x.floats.as_ptr().add((block * w.inputs + first) * x.width),
                                out.as_mut_ptr(),
                                stride,
                                LANES,
                                first > 0,
                            );
                        }
                    }
                }
            }
            finish(w, strip, stride, out);
        }
    });
}

/// Transforms the outputs of a strip, `[panels][columns][16]` in the order of panels, scales them and puts them in order.
fn finish(w: &PanelWeight, strip: usize, stride: usize, out: &mut [f32]) {
    let scales = &w.scales[strip * BLOCK..][..BLOCK];
    for column in (0..stride).step_by(LANES) {
        let mut outputs = [0.0; BLOCK];
        let at =
            |row: usize| row % PANELS * stride + column + row / PANELS % 2 * PANELS + row / LANES;
        for (row, to) in outputs.iter_mut().enumerate() {
            *to = out[at(row)];
        }
        transform(&mut outputs);
        for (row, (v, scale)) in outputs.iter().zip(scales).enumerate() {
            out[row / LANES * stride + column + row % LANES] = scale.to_f32() * v;
        }
    }
}
