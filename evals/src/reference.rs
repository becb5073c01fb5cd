//! Keeps a reference's log-probabilities in memory, so that several candidates can be compared
//! with one pass of the reference.

use crate::error::{Error, Result};
use crate::evaluate::{
    Evaluation, PairScore, finish, peak, row_nll, same_vocabulary, scatter, score_pair, score_rows,
};
use crate::report::KldStats;
use crate::softmax;
use crate::windows::{EvalSpec, LogitsRow, Plan};
use half::f16;
use half::slice::HalfFloatSliceExt;
use nq_formats::Progress;
use nq_kernels::Error::NoKernel;
use nq_runtime::{Engine, KvType};
use rayon::prelude::*;
use std::fmt;

/// How log-probabilities are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// As computed, in f32.
    F32,
    /// Rounded to 11 bits of mantissa. The rounding shifts a divergence by at most about 1e-6 nats
    /// (half the variance of an error of up to `2^-12` in each log-probability
    /// under the reference's distribution); the reference's own perplexity, best tokens and
    /// cross-entropies are stored exactly.
    F16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::F16 => "f16",
        })
    }
}

/// The reference's distribution at every scored token of a text.
pub struct ReferenceLogits {
    spec: EvalSpec,
    tokens: Vec<u32>,
    vocab: usize,
    log_probs: LogProbs, // [scored tokens, vocab]
    rows: Vec<ReferenceRow>,
}

/// The numbers of each row that are stored exactly.
#[derive(Clone, Copy, Debug, Default)]
struct ReferenceRow {
    nll: f64,
    top: u32,
}

enum LogProbs {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

impl ReferenceLogits {
    /// Number of windows whose log-probabilities fit `limit` bytes at 16 bits each, for a model of
    /// `vocab` tokens; 0 if not even one fits.
    pub fn fitting_windows(vocab: usize, spec: &EvalSpec, limit: u64) -> usize {
        let window = 2 * (vocab * spec.scored().len()) as u64;
        usize::try_from(limit.checked_div(window).unwrap_or(0)).unwrap_or(usize::MAX)
    }

    /// Runs `reference` over `tokens` and keeps its log-probabilities: as f32 if they fit
    /// `limit` bytes, otherwise as f16.
    ///
    /// # Errors
    /// [`Error::CacheTooLarge`], before anything is run, if they do not fit as f16 either;
    /// errors of [`crate::evaluate()`].
    pub fn record(
        reference: &dyn Engine,
        tokens: &[u32],
        spec: &EvalSpec,
        limit: u64,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let plan = Plan::new(tokens, spec, reference)?;
        let vocab = reference.config().vocab_size;
        let numbers = (plan.total() * vocab) as u64;
        let fit = Self::fitting_windows(vocab, spec, limit);
        if plan.windows() > fit {
            return Err(Error::CacheTooLarge {
                windows: plan.windows(),
                needed: 2 * numbers,
                limit,
                fit,
            });
        }
        let n = plan.total() * vocab;
        let mut log_probs = if 4 * numbers <= limit {
            LogProbs::F32(vec![0.0; n])
        } else {
            LogProbs::F16(vec![f16::ZERO; n])
        };
        let mut rows = vec![ReferenceRow::default(); plan.total()];
        let mut sessions = [plan.session(reference)?];
        plan.run(&mut sessions, "reference", progress, |logits, places| {
            let found = score_rows(places, |i, place| {
                row_nll("reference", logits[0].row(i), place)
            })?;
            let kept: Vec<ReferenceRow> = found
                .iter()
                .map(|r| ReferenceRow {
                    nll: r.nll,
                    top: r.top as u32,
                })
                .collect();
            scatter(&plan, places, &kept, &mut rows);
            // Places of one window are adjacent in the cache, so each window is one
            // contiguous part of it.
            for start in (0..places.len()).step_by(run_length(places)) {
                let count = run_length(places);
                let at = plan.index(places[start]) * vocab;
                let row = |i: usize| (logits[0].row(start + i), found[start + i].lse);
                match &mut log_probs {
                    LogProbs::F32(all) => all[at..at + count * vocab]
                        .par_chunks_exact_mut(vocab)
                        .enumerate()
                        .for_each(|(i, out)| {
                            let (x, lse) = row(i);
                            for (o, &x) in out.iter_mut().zip(x) {
                                *o = (f64::from(x) - lse) as f32;
                            }
                        }),
                    LogProbs::F16(all) => all[at..at + count * vocab]
                        .par_chunks_exact_mut(vocab)
                        .enumerate()
                        .for_each_init(Vec::new, |scratch: &mut Vec<f32>, (i, out)| {
                            let (x, lse) = row(i);
                            scratch.clear();
                            scratch.extend(x.iter().map(|&x| (f64::from(x) - lse) as f32));
                            out.convert_from_f32_slice(scratch);
                        }),
                }
            }
            Ok(())
        })?;
        Ok(ReferenceLogits {
            spec: spec.clone(),
            tokens: tokens[..plan.windows() * spec.ctx].to_vec(),
            vocab,
            log_probs,
            rows,
        })
    }

    /// Compares a candidate with the recorded reference.
    pub fn compare(&self, engine: &dyn Engine, progress: &dyn Progress) -> Result<Evaluation> {
        self.compare_with(engine, &self.spec, progress)
    }

    /// Like [`ReferenceLogits::compare`], but feeds the candidate as `spec` specifies, which must
    /// score the same tokens.
    fn compare_with(
        &self,
        engine: &dyn Engine,
        spec: &EvalSpec,
        progress: &dyn Progress,
    ) -> Result<Evaluation> {
        let vocab = self.vocab;
        same_vocabulary(engine.config().vocab_size, vocab)?;
        let plan = Plan::new(&self.tokens, spec, engine)?;
        let mut sessions = [plan.session(engine)?];
        let mut nll = vec![0f64; plan.total()];
        let mut pairs = vec![PairScore::ZERO; plan.total()];
        plan.run(
            &mut sessions,
            "KL divergence",
            progress,
            |logits, places| {
                let score = |scratch: &mut Vec<f32>, (i, &place): (usize, &LogitsRow)| {
                    let at = plan.index(place);
                    let span = at * vocab..(at + 1) * vocab;
                    let x: &[f32] = match &self.log_probs {
                        LogProbs::F32(all) => &all[span],
                        LogProbs::F16(all) => {
                            scratch.resize(vocab, 0.0);
                            all[span].convert_to_f32_slice(scratch);
                            scratch
                        }
                    };
                    let y = logits[0].row(i);
                    let (_, x_max) = peak("reference", x, place)?;
                    let (top, y_max) = peak("model", y, place)?;
                    let d = softmax::divergence(y, y_max, x, x_max);
                    let ReferenceRow { nll, top: best } = self.rows[at];
                    Ok(score_pair(y, x, &d, place, top, best as usize, nll))
                };
                let scored: Vec<(f64, PairScore)> = places
                    .par_iter()
                    .enumerate()
                    .map_init(Vec::new, score)
                    .collect::<Result<_>>()?;
                for (&place, (row_nll, pair)) in places.iter().zip(scored) {
                    nll[plan.index(place)] = row_nll;
                    pairs[plan.index(place)] = pair;
                }
                Ok(())
            },
        )?;
        finish(engine, spec, &plan, nll, pairs)
    }

    /// The specification of the recording.
    pub fn spec(&self) -> &EvalSpec {
        &self.spec
    }

    /// The tokens of the recorded windows.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How log-probabilities are stored.
    pub fn precision(&self) -> Precision {
        match self.log_probs {
            LogProbs::F32(_) => Precision::F32,
            LogProbs::F16(_) => Precision::F16,
        }
    }

    /// Size of the log-probabilities in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.log_probs {
            LogProbs::F32(v) => 4 * v.len() as u64,
            LogProbs::F16(v) => 2 * v.len() as u64,
        }
    }
}

/// Number of places in the first window of `places`; every window has as many.
fn run_length(places: &[LogitsRow]) -> usize {
    let window = places.first().map(|p| p.window);
    places
        .iter()
        .take_while(|p| Some(p.window) == window)
        .count()
        .max(1)
}

/// Most bytes that [`self_noise`] keeps.
const NOISE_BYTES: u64 = 1 << 30;

/// As much of `spec` as [`self_noise`] measures: whole windows, or the beginning of one.
fn noise_spec(spec: &EvalSpec, vocab: usize) -> EvalSpec {
    let windows = ReferenceLogits::fitting_windows(vocab, spec, NOISE_BYTES / 2);
    let rows = usize::try_from(NOISE_BYTES / (4 * vocab.max(1)) as u64).unwrap_or(usize::MAX);
    EvalSpec {
        ctx: match windows {
            0 => spec.ctx.min(rows.max(3)),
            _ => spec.ctx,
        },
        max_windows: Some(windows.max(1).min(spec.max_windows.unwrap_or(usize::MAX))),
        ..spec.clone()
    }
}

/// KL divergence of `engine` from itself with an unrounded KV cache and tokens fed in
/// different portions: the floor below which a divergence says nothing about the
/// weights. It runs as many windows as fit 1 GiB of f32 log-probabilities; of a window that does not
/// fit, only its beginning. On a device with only rounded caches, only the portions differ.
pub fn self_noise(
    engine: &dyn Engine,
    tokens: &[u32],
    spec: &EvalSpec,
    progress: &dyn Progress,
) -> Result<KldStats> {
    let vocab = engine.config().vocab_size;
    let spec = noise_spec(spec, vocab);
    let exact = EvalSpec {
        kv: KvType::F32,
        rows: (spec.rows / 8).max(1) | 1, // odd, so that every kernel has other remainders
        ..spec.clone()
    };
    let record = |spec| ReferenceLogits::record(engine, tokens, spec, u64::MAX, progress);
    let recorded = match record(&exact) {
        Err(Error::Runtime(nq_runtime::Error::Kernel(NoKernel { .. }))) => {
            let kv = spec.kv;
            record(&EvalSpec {
                kv,
                ..exact.clone()
            })?
        }
        recorded => recorded?,
    };
    let found = recorded.compare_with(engine, &spec, progress)?;
    Ok(found
        .report
        .against
        .map_or_else(KldStats::default, |c| c.kld))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Protocol;

    #[test]
    fn noise_is_measured_within_its_bytes() {
        for (vocab, ctx, most, expected) in [
            (4096, 1024, None, (1024, 64)),
            (4096, 1024, Some(4), (1024, 4)),
            // 16,383 rows of this vocabulary are 15 GiB.
            (248_320, 16_384, None, (1081, 1)),
            (248_320, 16_384, Some(4), (1081, 1)),
        ] {
            let spec = EvalSpec {
                max_windows: most,
                ..EvalSpec::new(Protocol::Hf, ctx, "t")
            };
            let found = noise_spec(&spec, vocab);
            assert_eq!(
                (found.ctx, found.max_windows),
                (expected.0, Some(expected.1))
            );
            let numbers = vocab * found.scored().len() * expected.1;
            assert!(4 * numbers as u64 <= NOISE_BYTES);
        }
    }
}
