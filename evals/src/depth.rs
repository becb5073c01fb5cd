//! Quality by depth: how far from the beginning of its window a token is.

use crate::evaluate::{Evaluation, PairScore};
use crate::spread;
use crate::stats;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Positions in the first bucket; every further one ends at twice the position.
const FIRST: usize = 128;

/// The scored tokens of all windows whose positions lie between two powers of two.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DepthBucket {
    /// First position, counted from 0: the number of tokens before the one whose logits are scored.
    pub from: usize,
    /// Last position.
    pub to: usize,
    /// Number of tokens scored.
    pub tokens: usize,
    /// Perplexity.
    pub ppl: f64,
    /// Standard error of `ppl`, over windows if there are at least 8 of them, otherwise over tokens.
    pub ppl_se: f64,
    /// The comparison, if there was a reference.
    #[serde(flatten)]
    pub against: Option<DepthComparison>,
}

/// A model compared with its reference over the tokens of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DepthComparison {
    /// Mean KL divergence, in nats.
    pub kld: f64,
    /// Its standard error, over the same samples as that of `ppl`.
    pub kld_se: f64,
    /// Perplexity of the reference.
    pub ppl_ref: f64,
    /// `ln(ppl / ppl_ref)`.
    #[serde(default)]
    pub ln_ppl_ratio: f64,
    /// Its standard error.
    #[serde(default)]
    pub ln_ppl_ratio_se: f64,
}

impl DepthBucket {
    /// Its positions, as text.
    pub fn name(&self) -> String {
        format!("{}-{}", self.from, self.to)
    }
}

impl Evaluation {
    /// The figures by depth: positions 0-127, 128-255, 256-511 and so on, as far as they are scored.
    pub fn by_depth(&self) -> Vec<DepthBucket> {
        buckets(&self.scored)
            .into_iter()
            .map(|positions| self.bucket(positions))
            .collect()
    }

    fn bucket(&self, positions: Range<usize>) -> DepthBucket {
        let window = self.scored.len();
        let from = positions.start - self.scored.start;
        let inside = from..from + positions.len();
        let nll: Vec<f64> = of_windows(&self.nll, window, &inside);
        let pairs: Vec<PairScore> = of_windows(&self.pairs, window, &inside);
        let mean_and_se = |samples: &[f64]| spread::mean_and_se(samples, inside.len());
        let (mean, se) = mean_and_se(&nll);
        let against = (!pairs.is_empty()).then(|| {
            let klds: Vec<f64> = pairs.iter().map(|p| p.kld).collect();
            let ratios = nll.iter().zip(&pairs).map(|(nll, p)| nll - p.reference_nll);
            let (kld, kld_se) = mean_and_se(&klds);
            let (ln_ppl_ratio, ln_ppl_ratio_se) = mean_and_se(&ratios.collect::<Vec<_>>());
            DepthComparison {
                kld,
                kld_se,
                ppl_ref: stats::mean(pairs.iter().map(|p| p.reference_nll)).exp(),
                ln_ppl_ratio,
                ln_ppl_ratio_se,
            }
        });
        DepthBucket {
            from: positions.start,
            to: positions.end - 1,
            tokens: nll.len(),
            ppl: mean.exp(),
            ppl_se: mean.exp() * se, // first order, as for the whole text
            against,
        }
    }
}

/// The parts of `scored` between the powers of two.
fn buckets(scored: &Range<usize>) -> Vec<Range<usize>> {
    let mut buckets = Vec::new();
    let (mut from, mut end) = (0, FIRST);
    while from < scored.end {
        let part = from.max(scored.start)..end.min(scored.end);
        if !part.is_empty() {
            buckets.push(part);
        }
        (from, end) = (end, 2 * end);
    }
    buckets
}

/// The samples of every window that lie `inside` it.
fn of_windows<T: Copy>(samples: &[T], window: usize, inside: &Range<usize>) -> Vec<T> {
    let windows = samples.chunks(window.max(1));
    windows
        .flat_map(|w| w[inside.clone()].iter().copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_the_scored_parts_between_powers_of_two() {
        let split = |scored: Range<usize>| -> Vec<(usize, usize)> {
            let found = buckets(&scored).into_iter();
            found.map(|r| (r.start, r.end)).collect()
        };
        assert_eq!(split(0..127), [(0, 127)]);
        assert_eq!(split(0..128), [(0, 128)]);
        assert_eq!(split(0..129), [(0, 128), (128, 129)]);
        assert_eq!(
            split(0..1023),
            [(0, 128), (128, 256), (256, 512), (512, 1023)]
        );
        assert_eq!(split(300..511), [(300, 511)]);
        assert_eq!(split(100..300), [(100, 128), (128, 256), (256, 300)]);
    }
}
