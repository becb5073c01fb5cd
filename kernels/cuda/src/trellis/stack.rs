//! Stacks of weights in trellis codes on a device.

use crate::driver::{Buffer, Gpu};
use crate::pack::{Stack, TILE};
use nq_formats::trellis::{STRIP, TrellisScheme, TrellisWeight};
use nq_formats::{QuantizedWeight, Weight};
use nq_kernels::{Error, Result};
use nq_model::Dims;

/// What a weight in a trellis code has besides codes and the scales of rows.
pub(crate) struct TrellisParts {
    pub(super) scheme: TrellisScheme,
    /// Of each strip its first output row, and how many of its rows there are.
    pub(super) places: Buffer<[i32; 2]>,
    pub(super) strips: usize,
    /// Strips alternate between gate and up.
    pub(crate) paired: bool,
    /// Of experts in a bank, which have none behind the scales of their rows.
    pub(super) input_scales: Option<Buffer<u16>>,
}

/// The strips of a stack: of each part the rows of its strips.
fn strips(heights: &[usize]) -> usize {
    heights.iter().map(|h| h.div_ceil(STRIP)).sum()
}

impl TrellisParts {
    /// Allocates the parts of a stack of `heights` rows.
    pub(crate) fn zeros(gpu: &Gpu, scheme: TrellisScheme, heights: &[usize]) -> Result<Self> {
        let strips = strips(heights);
        Ok(TrellisParts {
            scheme,
            places: gpu.zeros("weights", strips)?,
            strips,
            paired: false,
            input_scales: None,
        })
    }

    /// The parts of `experts` experts in a bank, each of so many rows and inputs; `paired` for gate and up.
    pub(crate) fn of_bank(
        gpu: &Gpu,
        scheme: TrellisScheme,
        experts: usize,
        Dims { rows, cols: inputs }: Dims,
        paired: bool,
    ) -> Result<Self> {
        let each = rows / STRIP;
        Ok(TrellisParts {
            scheme,
            places: gpu.zeros("weights", experts * each)?,
            strips: experts * each,
            paired,
            input_scales: Some(gpu.zeros("weights", inputs)?),
        })
    }

    /// The same memory once more.
    pub(crate) fn share(&self) -> Self {
        TrellisParts {
            places: self.places.share(),
            input_scales: self.input_scales.as_ref().map(Buffer::share),
            ..*self
        }
    }

    /// Calls `write` with the codes and the scales of rows of each strip of a bank's experts, in order, and fills in the parts.
    ///
    /// # Errors
    /// Errors of [`weights`] and of `write`.
    pub(crate) fn fill_bank(
        &mut self,
        parts: &[&Weight],
        stack: Stack,
        mut write: impl FnMut(usize, &[u8], &[u16]),
    ) -> Result<()> {
        let weights = weights(parts)?;
        let mut codes = Vec::new();
        let laid = lay_out(self.scheme, &weights, stack, |words| {
            codes.push(words);
            Ok(())
        })?;
        let scales = laid.row_scales.chunks_exact(STRIP);
        for (at, (words, scales)) in codes.into_iter().zip(scales).enumerate() {
            write(at, words, scales);
        }
        self.places.write(0, &laid.places)?;
        if let Some(scales) = &mut self.input_scales {
            scales.write(0, &laid.input_scales)?;
        }
        Ok(())
    }

    /// Bytes of codes and of scales.
    pub(crate) fn bytes(scheme: TrellisScheme, heights: &[usize], inputs: usize) -> (usize, usize) {
        let strips = strips(heights);
        // A size that no memory has is refused, not wrapped to a small one.
        (
            strips.saturating_mul(scheme.strip_bytes(inputs)),
            (strips * STRIP + inputs) * 2,
        )
    }
}

/// The trellis weights of a stack.
///
/// # Errors
/// [`Error::NoKernel`] if parts have different scales of inputs; [`Error::Shape`] if rows of a part do not begin at
/// a tile.
pub(crate) fn weights<'w>(parts: &[&'w Weight]) -> Result<Vec<&'w TrellisWeight>> {
    let all: Vec<&TrellisWeight> = parts
        .iter()
        .filter_map(|w| match w {
            Weight::Quantized(QuantizedWeight::Trellis(t)) => Some(t),
            _ => None,
        })
        .collect();
    let differ = |w: &&TrellisWeight| w.input_scales() != all[0].input_scales();
    if all.len() < parts.len() || all.iter().any(differ) {
        return Err(Error::NoKernel {
            op: "linear",
            scheme: "trellis codes whose scales of inputs differ within a product".into(),
            activations: "f32".into(),
            device: "cuda".into(),
        });
    }
    let before = &all[..all.len() - 1];
    match before
        .iter()
        .find(|w| !w.out_features().is_multiple_of(TILE))
    {
        None => Ok(all),
        Some(w) => Err(Error::Shape {
            op: "linear",
            what: "rows of a stacked weight",
            expected: format!("a multiple of {TILE}"),
            found: w.out_features().to_string(),
        }),
    }
}

/// The strips of a stack in the order in which they lie: part, its strip, and the first output row.
fn order(heights: &[usize], stack: Stack) -> Vec<(usize, usize, usize)> {
    if stack == Stack::Interleave {
        let strips = heights.first().map_or(0, |h| h.div_ceil(STRIP));
        return (0..strips)
            .flat_map(|s| (0..heights.len()).map(move |part| (part, s, s * STRIP)))
            .collect();
    }
    let mut first = 0;
    let mut all = Vec::new();
    for (part, &height) in heights.iter().enumerate() {
        let strips = (0..height.div_ceil(STRIP)).map(|s| (part, s, first + s * STRIP));
        all.extend(strips);
        first += height;
    }
    all
}

/// What a stack has besides codes.
struct LaidOut {
    /// Of each strip its first output row, and how many of its rows there are.
    places: Vec<[i32; 2]>,
    /// `[strips, STRIP]`, zeros of rows that do not exist.
    row_scales: Vec<u16>,
    input_scales: Vec<u16>,
}

/// Calls `write` with the codes of each strip of a stack, in order.
fn lay_out<'w>(
    scheme: TrellisScheme,
    weights: &[&'w TrellisWeight],
    stack: Stack,
    mut write: impl FnMut(&'w [u8]) -> Result<()>,
) -> Result<LaidOut> {
    let heights: Vec<usize> = weights.iter().map(|w| w.out_features()).collect();
    let size = scheme.strip_bytes(weights[0].in_features());
    let mut places = Vec::new();
    let mut scales = vec![0u16; strips(&heights) * STRIP];
    for (at, (part, strip, row)) in order(&heights, stack).into_iter().enumerate() {
        let weight = weights[part];
        let rows = strip * STRIP..weight.out_features().min((strip + 1) * STRIP);
        let of_rows = weight.row_scales()[rows.clone()].iter();
        for (to, scale) in scales[at * STRIP..].iter_mut().zip(of_rows) {
            *to = scale.to_bits();
        }
        write(&weight.words()[strip * size..][..size])?;
        places.push([row as i32, rows.len() as i32]);
    }
    Ok(LaidOut {
        places,
        row_scales: scales,
        input_scales: (weights[0].input_scales().iter())
            .map(|s| s.to_bits())
            .collect(),
    })
}

/// Calls `write` with the codes of each strip of a stack, in order, and fills in `parts`. Returns the scales of rows,
/// `[strips, STRIP]`, zeros of rows that do not exist, and behind them those of inputs.
pub(crate) fn upload(
    parts: &mut TrellisParts,
    weights: &[&TrellisWeight],
    stack: Stack,
    mut write: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<Vec<u16>> {
    let mut at = 0;
    let laid = lay_out(parts.scheme, weights, stack, |words| {
        at += 1;
        write(at - 1, words)
    })?;
    parts.places.write(0, &laid.places)?;
    parts.paired = stack == Stack::Interleave;
    Ok([laid.row_scales, laid.input_scales].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_and_up_alternate_by_strips_and_others_follow_each_other() {
        let paired = order(&[200, 200], Stack::Interleave);
        assert_eq!(paired, [(0, 0, 0), (1, 0, 0), (0, 1, 128), (1, 1, 128)]);
        let one_by_one = order(&[144, 128], Stack::Concat);
        assert_eq!(one_by_one, [(0, 0, 0), (0, 1, 128), (1, 0, 144)]);
    }
}
