//! Standard errors of means over the tokens of a text.

use crate::evaluate::Evaluation;
use crate::stats;
use nq_kernels::rng::Philox;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Fewest windows whose spread is used.
const FEWEST: usize = 8;

/// What the samples of a standard error are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Over {
    /// The means of windows. Tokens of the same window are correlated, windows hardly.
    Windows,
    /// Tokens, where there are too few windows: as they are correlated, the true error is larger.
    Tokens,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Over::Windows => "windows",
            Over::Tokens => "tokens",
        })
    }
}

impl Over {
    /// What `windows` windows allow.
    fn of(windows: usize) -> Self {
        if windows < FEWEST {
            Over::Tokens
        } else {
            Over::Windows
        }
    }
}

/// Standard errors of the figures of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StandardErrors {
    /// `windows`, or with fewer than 8 of them `tokens`.
    pub over: Over,
    /// Of the perplexity.
    pub ppl: f64,
    /// Of the mean KL divergence; 0 without a reference, as are the following.
    pub kld: f64,
    /// Of the share of positions whose best token is the same.
    pub same_top1: f64,
    /// Of `ln(ppl / ppl_ref)`.
    pub ln_ppl_ratio: f64,
}

/// Standard errors of the quantiles of the KL divergence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuantileErrors {
    /// Of the median.
    pub median: f64,
    /// Of the 99th percentile.
    pub p99: f64,
    /// Of the 99.9th percentile.
    pub p999: f64,
}

/// Number of texts that [`Evaluation::quantile_errors`] draws.
const DRAWS: u64 = 200;

/// Standard errors of quantiles of samples that come in windows of `window` each, by the bootstrap (Efron, 1979): the
/// standard deviation over texts drawn with replacement from the windows, or from the samples where there are too few
/// windows. The draws are seeded: the same samples have the same errors.
fn quantile_errors(samples: &[f64], window: usize, quantiles: [f64; 3]) -> [f64; 3] {
    let window = match Over::of(samples.len() / window.max(1)) {
        Over::Tokens => 1,
        Over::Windows => window,
    };
    let windows = (samples.len() / window).max(1);
    let draw = |stream: u64| -> [f64; 3] {
        let mut rng = Philox::new(0, stream);
        let drawn = (0..windows).flat_map(|_| {
            let w = ((u64::from(rng.next_u32()) * windows as u64) >> 32) as usize;
            samples.iter().skip(w * window).take(window).copied()
        });
        let drawn = stats::sorted(drawn);
        quantiles.map(|q| stats::quantile(&drawn, q))
    };
    let draws: Vec<[f64; 3]> = (0..DRAWS).into_par_iter().map(draw).collect();
    std::array::from_fn(|i| stats::std_dev(&draws.iter().map(|d| d[i]).collect::<Vec<_>>()))
}

/// Mean and standard error of samples that come in windows of `window` each.
pub(crate) fn mean_and_se(samples: &[f64], window: usize) -> (f64, f64) {
    let window = window.max(1);
    match Over::of(samples.len() / window) {
        Over::Tokens => stats::mean_and_se(samples.iter().copied()),
        Over::Windows => {
            let mean = |w: &[f64]| stats::mean(w.iter().copied());
            let (_, se) = stats::mean_and_se(samples.chunks_exact(window).map(mean));
            (mean(samples), se)
        }
    }
}

impl Evaluation {
    /// The standard errors of the quantiles of its KL divergence; 0 without a reference.
    pub(crate) fn quantile_errors(&self) -> QuantileErrors {
        let klds: Vec<f64> = self.pairs.iter().map(|p| p.kld).collect();
        let [median, p99, p999] = quantile_errors(&klds, self.scored.len(), [0.5, 0.99, 0.999]);
        QuantileErrors { median, p99, p999 }
    }

    /// The standard errors of its figures.
    pub fn errors(&self) -> StandardErrors {
        let window = self.scored.len();
        let se = |samples: Vec<f64>| mean_and_se(&samples, window).1;
        let pairs = || self.pairs.iter();
        let same = |p: &crate::PairScore| f64::from(u8::from(p.model_top == p.reference_top));
        let ratio = self.nll.iter().zip(pairs());
        StandardErrors {
            over: Over::of(self.nll.len() / window.max(1)),
            ppl: self.report.ppl * se(self.nll.clone()), // first order: d(e^m) = e^m dm
            kld: se(pairs().map(|p| p.kld).collect()),
            same_top1: se(pairs().map(same).collect()),
            ln_ppl_ratio: se(ratio.map(|(nll, p)| nll - p.reference_nll).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_over_windows_where_there_are_enough() {
        // Tokens of a window are all alike: only the windows are independent.
        let windows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let tokens: Vec<f64> = windows.iter().flat_map(|v| [*v; 16]).collect();
        let (mean, se) = mean_and_se(&tokens, 16);
        assert_eq!(mean, 4.5);
        assert_eq!(se, stats::mean_and_se(windows.into_iter()).1);
        let few = &tokens[..7 * 16];
        let expected = stats::mean_and_se(few.iter().copied());
        assert_eq!(mean_and_se(few, 16), expected);
        assert_eq!((Over::of(7), Over::of(8)), (Over::Tokens, Over::Windows));
    }

    /// The median of n samples of a density f has the standard error 1 / (2 f sqrt(n)): here 1 / (2 sqrt(2500)).
    #[test]
    fn errors_of_quantiles_are_those_of_theory() {
        let mut rng = Philox::new(3, 0);
        let uniform: Vec<f64> = (0..2500)
            .map(|_| f64::from(rng.next_u32()) / 2f64.powi(32))
            .collect();
        let [median, p99, _] = quantile_errors(&uniform, 2500, [0.5, 0.99, 0.999]);
        assert!((median / 0.01 - 1.0).abs() < 0.3, "{median}");
        // sqrt(q (1 - q) / n)
        assert!((p99 / 0.00199 - 1.0).abs() < 0.4, "{p99}");
        // Windows whose tokens are all alike have the errors of so many tokens.
        let repeated: Vec<f64> = uniform.iter().flat_map(|v| [*v; 4]).collect();
        let [windows, ..] = quantile_errors(&repeated, 4, [0.5, 0.99, 0.999]);
        assert!((windows / median - 1.0).abs() < 0.3, "{windows}, {median}");
        assert_eq!(quantile_errors(&[], 4, [0.5, 0.99, 0.999]), [0.0; 3]);
    }
}
