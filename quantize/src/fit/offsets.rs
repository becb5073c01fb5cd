//! Choosing scales and float offsets: of a group by least squares, and of groups that share the f16
//! that both are multiples of, as in super-blocks of GGUF.
//!
//! Every range that is tried is refitted to its own codes by weighted least squares. In a span, the
//! integers of each group are then searched around what its own fit asks for, and the two f16 refitted
//! to all codes of the span, in turns.

use super::{Fit, LANES, importance_of, storable};
use crate::grid::{Grid, GroupParams, SpanFactors, round_within};
use half::f16;
use nq_formats::product;

impl Fit {
    /// The scale and the offset (at most 0) that fit `w` best. `w` must not be all 0.
    pub(super) fn with_offset(&self, grid: &Grid, w: &[f32], importance: &[f32]) -> GroupParams {
        let (low, high) = w
            .iter()
            .fold((0f32, 0f32), |(l, h), &v| (l.min(v), h.max(v)));
        let max = f32::from(grid.max_code());
        let range = |share: f32| stored((high - low) * share / max, low * share);
        let mut best = range(1.0);
        if self.steps == 0 {
            return best;
        }
        let mut least = error(grid, best, w, importance);
        let mut consider = |p: GroupParams| {
            let error = error(grid, p, w, importance);
            let better = error < least;
            if better {
                (best, least) = (p, error);
            }
            better
        };
        for share in self.shares() {
            let mut p = range(share);
            // A range that is no good is not worth more than one fit.
            for _ in 0..=self.refits {
                let Some(refitted) = refit(grid, p, w, importance) else {
                    break;
                };
                p = refitted;
                if !consider(p) {
                    break;
                }
            }
        }
        best
    }

    /// Fits the groups of a span `w` and the factors they share, starting from `params`, the fit of each
    /// group alone.
    pub(super) fn span_with_offsets(
        &self,
        grid: &Grid,
        w: &[f32],
        importance: &[f32],
        params: &mut [GroupParams],
    ) -> SpanFactors {
        let mut first = params.to_vec();
        let mut factors = [SpanFactors::default()];
        grid.snap(&mut first, &mut factors);
        let mut factors = factors[0];
        let (mut best, mut least) = ((factors, first), f32::INFINITY);
        let wanted = params.to_vec();
        let size = grid.group().size(w.len()).max(1);
        for _ in 0..=self.refits {
            let mut total = 0.0;
            for (g, (p, w)) in params.iter_mut().zip(w.chunks(size)).enumerate() {
                let importance = importance_of(importance, g * size, w.len());
                let (found, error) = in_span(grid, factors, wanted[g], w, importance);
                *p = found;
                total += error;
            }
            if total >= least {
                break;
            }
            (best, least) = ((factors, params.to_vec()), total);
            match refit_span(grid, factors, params, w, importance) {
                Some(refitted) if refitted != factors => factors = refitted,
                _ => break,
            }
        }
        params.copy_from_slice(&best.1);
        best.0
    }
}

/// Of the multiples of a span's factors around `p`, those with the least weighted error of `w`, and that
/// error.
pub(super) fn in_span(
    grid: &Grid,
    factors: SpanFactors,
    p: GroupParams,
    w: &[f32],
    importance: &[f32],
) -> (GroupParams, f32) {
    let around = |factors, value, least: i16| {
        let middle = grid.small(factors, value);
        (middle - 1).max(least)..=(middle + 1).min(grid.small_range().1)
    };
    let mut best = grid.near(factors, p);
    if p.scale == 0.0 || factors.scale == f16::ZERO {
        return (best, 0.0); // a group of zeros
    }
    let mut least = f32::INFINITY;
    for scale in around(factors.scale, p.scale, 1) {
        for offset in around(factors.offset, p.offset, 0) {
            let p = GroupParams {
                scale: product(factors.scale, scale).to_f32(),
                zero: 0,
                offset: product(factors.offset, offset).to_f32(),
            };
            let error = error(grid, p, w, importance);
            if error < least {
                (best, least) = (p, error);
            }
        }
    }
    (best, least)
}

/// The parameters rounded to what a file can hold.
fn stored(scale: f32, offset: f32) -> GroupParams {
    let most = f16::MAX.to_f32();
    GroupParams {
        scale: storable(scale),
        zero: 0,
        offset: f16::from_f32(offset.clamp(-most, 0.0)).to_f32(),
    }
}

/// The nearest code, as a float.
#[inline(always)]
fn code(w: f32, inverse: f32, offset: f32, max: f32) -> f32 {
    round_within((w - offset) * inverse, 0.0, max)
}

/// `1 / scale`, or 0 if the scale is 0, which makes all codes 0.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Weighted squared error of `w` under `p`.
fn error(grid: &Grid, p: GroupParams, w: &[f32], importance: &[f32]) -> f32 {
    let (inverse, max) = (inverse(p.scale), f32::from(grid.max_code()));
    let weighted = |w: f32, h: f32| {
        let e = code(w, inverse, p.offset, max) * p.scale + p.offset - w;
        h * e * e
    };
    let mut sums = [0f32; LANES];
    let (whole, rest) = w.as_chunks::<LANES>();
    let (importance_of_whole, rest_of_it) = importance.as_chunks::<LANES>();
    let mut add = |w: &[f32; LANES], h: &[f32; LANES]| {
        for ((sum, &w), &h) in sums.iter_mut().zip(w).zip(h) {
            *sum += weighted(w, h);
        }
    };
    match importance.is_empty() {
        true => whole.iter().for_each(|w| add(w, &[1.0; LANES])),
        false => (whole.iter().zip(importance_of_whole)).for_each(|(w, h)| add(w, h)),
    }
    for (i, (sum, &w)) in sums.iter_mut().zip(rest).enumerate() {
        *sum += weighted(w, rest_of_it.get(i).copied().unwrap_or(1.0));
    }
    sums.iter().sum()
}

/// Scale and offset that fit the codes of `w` under `p` best; `None` if they do not determine a scale.
fn refit(grid: &Grid, p: GroupParams, w: &[f32], importance: &[f32]) -> Option<GroupParams> {
    let (inverse, max) = (inverse(p.scale), f32::from(grid.max_code()));
    let mut sums = [const { [0f32; LANES] }; 5]; // of h, h q, h q q, h w, h w q
    for (i, w) in w.chunks(LANES).enumerate() {
        let mut h = [1f32; LANES];
        if let Some(importance) = importance.get(i * LANES..i * LANES + w.len()) {
            h[..w.len()].copy_from_slice(importance);
        }
        for (lane, (&w, h)) in w.iter().zip(h).enumerate() {
            let q = code(w, inverse, p.offset, max);
            sums[0][lane] += h;
            sums[1][lane] += h * q;
            sums[2][lane] += h * q * q;
            sums[3][lane] += h * w;
            sums[4][lane] += h * w * q;
        }
    }
    let [h, hq, hqq, hw, hwq] = sums.map(|lanes| lanes.iter().map(|&v| f64::from(v)).sum::<f64>());
    let determinant = h * hqq - hq * hq;
    let mut scale = (h * hwq - hq * hw) / determinant;
    let mut offset = (hw - scale * hq) / h;
    if offset > 0.0 {
        (scale, offset) = (hwq / hqq, 0.0);
    }
    (scale.is_finite() && scale > 0.0).then(|| stored(scale as f32, offset as f32))
}

/// The two f16 that fit the codes and integers of a span best, by weighted least squares.
fn refit_span(
    grid: &Grid,
    factors: SpanFactors,
    params: &[GroupParams],
    w: &[f32],
    importance: &[f32],
) -> Option<SpanFactors> {
    let size = grid.group().size(w.len()).max(1);
    let max = f32::from(grid.max_code());
    // w is near d a + m b, where a is a code times the integer of its scale, b that of its offset.
    let (mut aa, mut ab, mut bb, mut wa, mut wb) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for (g, (p, w)) in params.iter().zip(w.chunks(size)).enumerate() {
        let (inverse, b) = (inverse(p.scale), grid.small(factors.offset, p.offset));
        let (scale, b) = (grid.small(factors.scale, p.scale), f64::from(b));
        for (i, &w) in w.iter().enumerate() {
            let h = importance.get(g * size + i).copied().unwrap_or(1.0);
            let q = code(w, inverse, p.offset, max);
            let (h, w, a) = (f64::from(h), f64::from(w), f64::from(q) * f64::from(scale));
            aa += h * a * a;
            ab += h * a * b;
            bb += h * b * b;
            wa += h * w * a;
            wb += h * w * b;
        }
    }
    let (scale, offset) = match bb > 0.0 {
        true => {
            let determinant = aa * bb - ab * ab;
            (
                (wa * bb - wb * ab) / determinant,
                (wb * aa - wa * ab) / determinant,
            )
        }
        false => (wa / aa, factors.offset.to_f64()),
    };
    let refitted = SpanFactors {
        scale: f16::from_f64(scale),
        offset: f16::from_f64(offset),
    };
    let most = f32::from(grid.small_range().1);
    let fits = |v: f16| (v.to_f32() * most).abs() <= f16::MAX.to_f32();
    let sane = scale > 0.0 && offset <= 0.0 && fits(refitted.scale) && fits(refitted.offset);
    (sane && refitted.scale > f16::ZERO).then_some(refitted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::gguf::{BlockType, affine};
    use nq_kernels::rng::Philox;

    fn grid(kind: BlockType) -> Grid {
        Grid::new(affine::scheme_of(kind).unwrap()).unwrap()
    }

    fn row_error(fit: Fit, grid: &Grid, w: &[f32], h: &[f32]) -> f64 {
        let mut params = vec![grid.zeros(); grid.group().count(w.len())];
        let mut spans = vec![SpanFactors::default(); grid.spans(w.len())];
        fit.row(grid, w, h, &mut params, &mut spans);
        let size = grid.group().size(w.len());
        let weighted = |(i, (&w, &h)): (usize, (&f32, &f32))| {
            let p = params[i / size];
            f64::from(h) * f64::from(w - p.value(grid.code(p, w))).powi(2)
        };
        w.iter().zip(h).enumerate().map(weighted).sum()
    }

    /// Rows of super-blocks, one after another with values of their own size.
    fn rows(n: usize) -> (Vec<f32>, Vec<f32>) {
        let mut rng = Philox::new(2, 0);
        let scale = |i: usize| 0.01 + 0.01 * (i / 32 % 5) as f32;
        let w = (0..n).map(|i| rng.normal() * scale(i)).collect();
        let h = (0..n).map(|i| 0.2 + (i % 9) as f32).collect();
        (w, h)
    }

    #[test]
    fn values_of_super_blocks_are_found_again() {
        for kind in [BlockType::Q4_K, BlockType::Q5_K] {
            let grid = grid(kind);
            let max = u32::from(grid.max_code());
            let value = |i: u32| {
                let group = i / 32;
                let (scale, minimum) = (63 - 5 * (group % 8), 63 - 7 * (group % 8));
                let code = [0, max][i as usize % 32 % 2] * u32::from(i % 32 < 2)
                    + (i * 7 % (max + 1)) * u32::from(i % 32 >= 2);
                (code * scale) as f32 / 256.0 - minimum as f32 / 64.0
            };
            let w: Vec<f32> = (0..512).map(value).collect();
            assert_eq!(
                row_error(Fit::clip(), &grid, &w, &[1.0; 512]),
                0.0,
                "{kind}"
            );
        }
    }

    #[test]
    fn searching_beats_whole_ranges_and_refitting_spans_the_first_products() {
        let (w, h) = rows(2048);
        for kind in [BlockType::Q4_K, BlockType::Q5_K] {
            let grid = grid(kind);
            let whole = row_error(Fit::absmax(), &grid, &w, &h);
            let found = row_error(Fit::clip(), &grid, &w, &h);
            let first = row_error(
                Fit {
                    refits: 0,
                    ..Fit::clip()
                },
                &grid,
                &w,
                &h,
            );
            assert!(
                found < whole && found < first,
                "{kind}: {found} {first} {whole}"
            );
        }
        // An f16 for each group costs more bytes and errs hardly less.
        let error = |kind| row_error(Fit::clip(), &grid(kind), &w, &h);
        let (q4_k, q4_1) = (error(BlockType::Q4_K), error(BlockType::Q4_1));
        assert!(q4_k < 1.1 * q4_1, "Q4_K {q4_k}, Q4_1 {q4_1}");
    }

    #[test]
    fn zeros_and_extremes_stay_finite() {
        let grid = grid(BlockType::Q4_K);
        let mut w = vec![0f32; 256];
        assert_eq!(row_error(Fit::clip(), &grid, &w, &[1.0; 256]), 0.0);
        w[3] = 1e30;
        w[40] = -1e-30;
        w[100] = -1e30;
        for fit in [Fit::absmax(), Fit::clip()] {
            assert!(row_error(fit, &grid, &w, &[1.0; 256]).is_finite());
        }
    }
}
