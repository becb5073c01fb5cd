//! Standard errors of means over the tokens of a text.

use crate::evaluate::Evaluation;
use crate::stats;
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

/// Mean and standard error of samples that come in windows of `window` each.
pub(crate) fn mean_and_se(samples: &[f64], window: usize) -> (f64, f64) {
    let window = window.max(1);
    match Over::of(samples.len() / window) {
        Over::Tokens => stats::mean_and_se(samples.iter().copied()),
        Over::Windows => {
            let of = |w: &[f64]| stats::mean(w.iter().copied());
            let (_, se) = stats::mean_and_se(samples.chunks_exact(window).map(of));
            (of(samples), se)
        }
    }
}

impl Evaluation {
    /// The standard errors of its figures.
    pub fn errors(&self) -> StandardErrors {
        let window = self.scored.len();
        let se = |samples: Vec<f64>| mean_and_se(&samples, window).1;
        let pairs = || self.pairs.iter();
        let same = |p: &crate::PairScore| f64::from(u8::from(p.model_top == p.reference_top));
        let ratio = self.nll.iter().zip(pairs());
        StandardErrors {
            over: Over::of(self.report.windows),
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
}
