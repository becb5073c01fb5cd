//! Choosing a group's scale and zero-point.
//!
//! [`Fit::absmax`] covers the whole range. [`Fit::clip`] also tries smaller ranges, and keeps
//! the one with the least rounding errors, each weighted by the importance of its input: a
//! few large weights lose a little so that all others are rounded more finely. For a
//! symmetric grid it tries both signs, since the codes reach one step further below the
//! midpoint than above it. The best candidate's scale is then refitted to its codes by
//! weighted least squares, as in llama.cpp's k-quants.

mod offsets;

use crate::grid::{Grid, GroupParams, SpanFactors, round_within};
use half::f16;
use nq_formats::product;
use serde_json::{Value, json};

/// How a group's parameters are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Smallest range tried, as a share of the whole range; 1 tries no other.
    pub least: f32,
    /// Number of ranges tried, from 1 down to `least`.
    pub steps: usize,
    /// Power of an element's error in the sum: 2 or 3.
    pub power: Power,
    /// Rounds of refitting the best candidate's scale.
    pub refits: usize,
}

/// Power of an element's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// Squares: with `E[x^2]` as importance, this is the output's expected squared error if inputs
    /// were uncorrelated.
    Two,
    /// Cubes: large errors count for more.
    Three,
}

impl Fit {
    /// Covers the whole range of the group.
    pub const fn absmax() -> Self {
        Fit {
            least: 1.0,
            steps: 0,
            power: Power::Two,
            refits: 0,
        }
    }

    /// Chooses the range with the least weighted error.
    pub const fn clip() -> Self {
        Fit {
            least: 0.55,
            steps: 15,
            power: Power::Two,
            refits: 3,
        }
    }

    /// The settings by name, for the record.
    pub fn settings(&self) -> Value {
        if self.steps == 0 {
            return "absmax".into();
        }
        let power = match self.power {
            Power::Two => 2,
            Power::Three => 3,
        };
        let least = (f64::from(self.least) * 1e6).round() / 1e6; // the decimal number it was written as
        json!({"least": least, "steps": self.steps, "power": power, "refits": self.refits})
    }

    /// Chooses the parameters of `w`, one group of a row. `importance` weights each element's
    /// error; it has the length of `w`, or is empty for equal weights.
    pub fn params(&self, grid: &Grid, w: &[f32], importance: &[f32]) -> GroupParams {
        debug_assert!(importance.is_empty() || importance.len() == w.len());
        let (low, high) = w
            .iter()
            .fold((0f32, 0f32), |(l, h), &v| (l.min(v), h.max(v)));
        if low == 0.0 && high == 0.0 {
            return grid.zeros();
        }
        if grid.offsets() {
            return self.with_offset(grid, w, importance);
        }
        let whole = whole_range(grid, low, high, 1.0);
        if self.steps == 0 {
            return whole;
        }
        let mut search = Search::new(self, grid, w, importance, whole);
        search.try_params(whole);
        if grid.symmetric() {
            self.search_symmetric(&mut search, low, high);
        } else {
            self.search_asymmetric(&mut search, low, high);
        }
        for _ in 0..self.refits {
            let before = search.error;
            search.refit();
            if search.error >= before {
                break;
            }
        }
        search.best
    }

    /// Chooses the parameters of the groups of row `w` and, if the grid keeps scales in two levels, the
    /// factors of its spans. `importance` is as for [`Fit::params`].
    pub fn row(
        &self,
        grid: &Grid,
        w: &[f32],
        importance: &[f32],
        params: &mut [GroupParams],
        spans: &mut [SpanFactors],
    ) {
        let size = grid.group().size(w.len()).max(1);
        for (g, (w, p)) in w.chunks(size).zip(params.iter_mut()).enumerate() {
            *p = self.params(grid, w, importance_of(importance, g * size, w.len()));
        }
        let per_span = grid.groups_of_span(w.len());
        let pieces = params.chunks_mut(per_span).zip(w.chunks(per_span * size));
        for (s, (factors, (params, w))) in spans.iter_mut().zip(pieces).enumerate() {
            let importance = importance_of(importance, s * per_span * size, w.len());
            *factors = match grid.offsets() && self.refits > 0 {
                true => self.span_with_offsets(grid, w, importance, params),
                false => self.span(grid, w, importance, params),
            };
        }
    }

    /// Replaces `params`, those of the groups of span `w`, by nearby multiples of the factors it returns.
    fn span(
        &self,
        grid: &Grid,
        w: &[f32],
        importance: &[f32],
        params: &mut [GroupParams],
    ) -> SpanFactors {
        let mut nearest = params.to_vec();
        let mut factors = [SpanFactors::default()];
        grid.snap(&mut nearest, &mut factors);
        let size = grid.group().size(w.len()).max(1);
        for (g, (p, w)) in params.iter_mut().zip(w.chunks(size)).enumerate() {
            let importance = importance_of(importance, g * size, w.len());
            *p = self.in_span(grid, factors[0], *p, w, importance);
        }
        factors[0]
    }

    /// Parameters near `p` that are multiples of a span's factors: of the integers around the exact
    /// quotients, those with the least weighted error of `w`.
    pub(crate) fn in_span(
        &self,
        grid: &Grid,
        factors: SpanFactors,
        p: GroupParams,
        w: &[f32],
        importance: &[f32],
    ) -> GroupParams {
        if grid.offsets() {
            return offsets::in_span(grid, factors, p, w, importance).0;
        }
        let nearest = grid.near(factors, p);
        if p.scale == 0.0 || factors.scale == f16::ZERO {
            return nearest;
        }
        let (least, most) = grid.small_range();
        let small = grid.small(factors.scale, p.scale);
        let mut search = Search::new(self, grid, w, importance, nearest);
        let zeros = match grid.symmetric() || self.steps == 0 {
            true => p.zero..=p.zero,
            false => p.zero.saturating_sub(1)..=p.zero.saturating_add(1).min(grid.max_code()),
        };
        for small in small.saturating_sub(1).max(least)..=(small + 1).min(most) {
            let scale = product(factors.scale, small).to_f32();
            for zero in zeros.clone().filter(|_| scale != 0.0) {
                search.consider(GroupParams {
                    scale,
                    zero,
                    offset: 0.0,
                });
            }
        }
        search.best
    }

    /// Shares of the whole range to try, from 1 to `least`.
    fn shares(&self) -> impl Iterator<Item = f32> + Clone + '_ {
        let n = self.steps;
        (0..=n).map(move |i| 1.0 - (1.0 - self.least) * i as f32 / n as f32)
    }

    fn search_symmetric(&self, search: &mut Search<'_>, low: f32, high: f32) {
        let zero = search.grid.bits().midpoint();
        let signed = if high > -low { high } else { low };
        for share in self.shares() {
            // The greatest magnitude takes the lowest code; then the mirrored choice.
            let scale = -signed * share / f32::from(zero);
            for scale in [scale, -scale] {
                search.try_params(GroupParams {
                    scale,
                    zero,
                    offset: 0.0,
                });
            }
        }
    }

    fn search_asymmetric(&self, search: &mut Search<'_>, low: f32, high: f32) {
        for share in self.shares() {
            let p = whole_range(search.grid, low, high, share);
            search.try_params(p);
            // If the range is clipped at one end only, its zero is elsewhere.
            for zero in [p.zero.saturating_sub(1), p.zero.saturating_add(1)] {
                if zero != p.zero && zero <= search.grid.max_code() {
                    search.try_params(GroupParams { zero, ..p });
                }
            }
        }
    }
}

/// The importance of `n` inputs from `at` on; empty if there is none.
fn importance_of(importance: &[f32], at: usize, n: usize) -> &[f32] {
    importance.get(at..at + n).unwrap_or(&[])
}

/// Parameters that reach from `low` to `high` (0 is inside), shrunk to `share`.
fn whole_range(grid: &Grid, low: f32, high: f32, share: f32) -> GroupParams {
    let max = f32::from(grid.max_code());
    if grid.symmetric() {
        // Half a step beyond the greatest code rounds back to it.
        let scale = storable(high.max(-low) * share / (max / 2.0));
        return GroupParams {
            scale,
            ..grid.zeros()
        };
    }
    let scale = storable((high - low) * share / max);
    let zero = (-low * share / scale).round_ties_even().clamp(0.0, max) as u8;
    GroupParams {
        scale,
        zero,
        offset: 0.0,
    }
}

/// The nearest scale that a file can store: an f16, neither zero nor infinite.
fn storable(scale: f32) -> f32 {
    let least = f16::from_bits(1).to_f32();
    let magnitude = f16::from_f32(scale.abs())
        .to_f32()
        .clamp(least, f16::MAX.to_f32());
    magnitude.copysign(scale)
}

/// The best parameters found so far for one group.
struct Search<'a> {
    grid: &'a Grid,
    w: &'a [f32],
    importance: &'a [f32],
    power: Power,
    best: GroupParams,
    error: f32,
}

/// Elements per pass of the inner loop: enough partial sums to keep any vector unit busy, in a
/// fixed order of summation.
const LANES: usize = 16;

impl<'a> Search<'a> {
    /// Nothing tried yet: `best` counts for as long as nothing is.
    fn new(
        fit: &Fit,
        grid: &'a Grid,
        w: &'a [f32],
        importance: &'a [f32],
        best: GroupParams,
    ) -> Self {
        Search {
            grid,
            w,
            importance,
            power: fit.power,
            best,
            error: f32::INFINITY,
        }
    }

    /// Keeps `p`, its scale made storable, if its weighted error is less than the best.
    fn try_params(&mut self, p: GroupParams) {
        self.consider(GroupParams {
            scale: storable(p.scale),
            ..p
        });
    }

    /// Keeps `p` if its weighted error is less than the best.
    fn consider(&mut self, p: GroupParams) {
        let error = self.weighted_error(p);
        if error < self.error {
            (self.best, self.error) = (p, error);
        }
    }

    fn weighted_error(&self, p: GroupParams) -> f32 {
        match self.power {
            Power::Two => self.sum_errors(p, |e2, _| e2),
            Power::Three => self.sum_errors(p, |e2, e| e2 * e.abs()),
        }
    }

    /// Sum of `power(e^2, e)` over all elements, each weighted by its importance.
    #[inline(always)]
    fn sum_errors(&self, p: GroupParams, power: impl Fn(f32, f32) -> f32) -> f32 {
        let (inverse, zero) = (1.0 / p.scale, f32::from(p.zero));
        let (low, high) = (-zero, f32::from(self.grid.max_code()) - zero);
        let error = |w: f32, h: f32| {
            let q = round_within(w * inverse, low, high);
            let e = q * p.scale - w;
            h * power(e * e, e)
        };
        let mut sums = [0f32; LANES];
        // With arrays of known length, the compiler uses whole vectors.
        let (whole, rest) = self.w.as_chunks::<LANES>();
        let (importance, rest_of_it) = self.importance.as_chunks::<LANES>();
        let mut add = |w: &[f32; LANES], h: &[f32; LANES]| {
            for ((sum, &w), &h) in sums.iter_mut().zip(w).zip(h) {
                *sum += error(w, h);
            }
        };
        if self.importance.is_empty() {
            whole.iter().for_each(|w| add(w, &[1.0; LANES]))
        } else {
            whole.iter().zip(importance).for_each(|(w, h)| add(w, h))
        }
        for (i, (sum, &w)) in sums.iter_mut().zip(rest).enumerate() {
            *sum += error(w, rest_of_it.get(i).copied().unwrap_or(1.0));
        }
        sums.iter().sum()
    }

    /// Refits the scale to the best candidate's codes, and computes new codes for it.
    fn refit(&mut self) {
        let p = self.best;
        let (inverse, zero) = (1.0 / p.scale, f32::from(p.zero));
        let (low, high) = (-zero, f32::from(self.grid.max_code()) - zero);
        let (mut wq, mut qq) = (0f32, 0f32);
        for (i, &w) in self.w.iter().enumerate() {
            let q = round_within(w * inverse, low, high);
            let mut h = self.importance.get(i).copied().unwrap_or(1.0);
            if self.power == Power::Three {
                h *= (q * p.scale - w).abs();
            }
            wq += h * w * q;
            qq += h * q * q;
        }
        let scale = wq / qq;
        if scale.is_finite() && scale != 0.0 {
            self.try_params(GroupParams { scale, ..p });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::{AffineScheme, Bits, Group, Zeros};
    use nq_kernels::rng::Philox;

    fn grid(bits: Bits, zeros: Zeros) -> Grid {
        let group = Group::Size(64);
        Grid::new(AffineScheme::new(bits, group, zeros)).unwrap()
    }

    fn error(grid: &Grid, p: GroupParams, w: &[f32], h: &[f32]) -> f64 {
        w.iter()
            .zip(h)
            .map(|(&w, &h)| f64::from(h) * f64::from(w - p.value(grid.code(p, w))).powi(2))
            .sum()
    }

    fn normal(n: usize, stream: u64) -> Vec<f32> {
        let mut rng = Philox::new(1, stream);
        (0..n).map(|_| rng.normal() * 0.02).collect()
    }

    #[test]
    fn whole_ranges_by_hand() {
        let w = [-3.0, 1.0, 6.0, 0.5];
        let p = Fit::absmax().params(&grid(Bits::B4, Zeros::None), &w, &[]);
        assert_eq!((p.scale, p.zero), (f16::from_f32(0.8).to_f32(), 8)); // 6 / 7.5
        let p = Fit::absmax().params(&grid(Bits::B4, Zeros::Integer), &w, &[]);
        assert_eq!((p.scale, p.zero), (f16::from_f32(0.6).to_f32(), 5)); // 9 / 15, 3 / 0.6
        // All of one sign: zero is still representable, at the end of the codes.
        let p = Fit::absmax().params(&grid(Bits::B8, Zeros::Integer), &[255.0, 51.0], &[]);
        assert_eq!((p.scale, p.zero), (1.0, 0));
    }

    #[test]
    fn a_symmetric_group_may_put_a_positive_maximum_on_the_lowest_code() {
        // -0.5 q for q = -8 ..= 7: exact only if 4.0 takes code 0.
        let w = [4.0, -3.5, 1.0, -0.5, 0.0, 2.5];
        let grid = grid(Bits::B4, Zeros::None);
        let p = Fit::clip().params(&grid, &w, &[]);
        assert_eq!((p.scale, p.zero), (-0.5, 8));
        assert_eq!(error(&grid, p, &w, &[1.0; 6]), 0.0);
    }

    /// Weights on the grid are found again, whatever the importance.
    #[test]
    fn grid_points_survive() {
        for bits in [Bits::B4, Bits::B8] {
            for zeros in [Zeros::None, Zeros::Integer] {
                let grid = grid(bits, zeros);
                let max = usize::from(grid.max_code());
                let zero = if zeros == Zeros::None {
                    grid.bits().midpoint()
                } else {
                    6
                };
                let p = GroupParams {
                    scale: 0.125,
                    zero,
                    offset: 0.0,
                };
                let mut codes: Vec<u8> = (0..64).map(|i| (i * 29 % (max + 1)) as u8).collect();
                (codes[0], codes[1]) = (0, max as u8);
                let w: Vec<f32> = codes.iter().map(|&q| p.value(q)).collect();
                let h: Vec<f32> = (0..64).map(|i| 1.0 + (i % 7) as f32).collect();
                for importance in [&h[..], &[]] {
                    let found = Fit::clip().params(&grid, &w, importance);
                    assert_eq!(error(&grid, found, &w, &h), 0.0, "{bits:?} {zeros:?}");
                }
            }
        }
    }

    #[test]
    fn clipping_beats_the_whole_range_and_follows_importance() {
        for zeros in [Zeros::None, Zeros::Integer] {
            let grid = grid(Bits::B4, zeros);
            let mut totals = [0f64; 2]; // clipped, whole
            for stream in 0..20 {
                let w = normal(64, stream);
                let mut h = vec![1.0; 64];
                let whole = error(&grid, Fit::absmax().params(&grid, &w, &[]), &w, &h);
                let clip = Fit::clip().params(&grid, &w, &[]);
                let clipped = error(&grid, clip, &w, &h);
                assert!(
                    clipped <= whole * 1.0001,
                    "{zeros:?} {stream}: {clipped} {whole}"
                );
                totals[0] += clipped;
                totals[1] += whole;
                // If one element matters most, its error is smaller.
                let top = (0..64).max_by(|&a, &b| w[a].abs().total_cmp(&w[b].abs()));
                h[top.unwrap()] = 1e6;
                let aware = error(&grid, Fit::clip().params(&grid, &w, &h), &w, &h);
                assert!(aware <= error(&grid, clip, &w, &h));
            }
            assert!(totals[0] < 0.95 * totals[1], "{zeros:?} {totals:?}");
        }
    }

    #[test]
    fn scales_stay_storable() {
        let grid = grid(Bits::B4, Zeros::Integer);
        for fit in [Fit::absmax(), Fit::clip()] {
            let tiny = fit.params(&grid, &[1e-30, -1e-30], &[]);
            assert!(tiny.scale > 0.0);
            let huge = fit.params(&grid, &[1e30, -1e30], &[]);
            assert!(huge.scale.is_finite());
            let nothing = fit.params(&grid, &[0.0; 8], &[]);
            assert_eq!((nothing.scale, nothing.zero), (0.0, 8));
        }
    }
}
