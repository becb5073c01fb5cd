//! Keeps a reference's log-probabilities, in memory or in a file, so that several candidates can be compared with one
//! pass of the reference.

use crate::error::{Error, Result};
use crate::evaluate::{
    Evaluation, PairScore, finish, peak, row_nll, same_vocabulary, scatter, score_pair, score_rows,
};
use crate::report::KldStats;
use crate::softmax;
use crate::windows::{EvalSpec, LogitsRow, Plan};
use bytes::Bytes;
use half::f16;
use half::slice::HalfFloatSliceExt;
use nq_formats::Progress;
use nq_formats::durable::Beside;
use nq_formats::files::map_file;
use nq_formats::hash::sha256_hex;
use nq_kernels::Error::NoKernel;
use nq_runtime::{Engine, KvType};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How log-probabilities are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// As computed, in f32.
    F32,
    /// Rounded to 11 bits of mantissa. The rounding shifts a mean divergence by at most about 1e-6 nats (half the
    /// variance of an error of up to `2^-12` in each log-probability under the reference's distribution); that of a
    /// single token by up to some thousandths of it, with either sign. The reference's own perplexity, best tokens and
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
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct ReferenceRow {
    nll: f64,
    top: u32,
    /// Of a row in a file: the beginning of the SHA-256 of its bytes.
    check: u64,
}

enum LogProbs {
    F32(Vec<f32>),
    F16(Vec<f16>),
    /// `f16` in little-endian order, in a file that is mapped.
    File(Bytes),
}

/// What a file of log-probabilities ends with, as JSON, before that JSON's length in 8 bytes and [`MAGIC`]. The
/// log-probabilities, `[scored tokens, vocab]` in [`f16`], are at its beginning.
#[derive(Serialize, Deserialize)]
struct Footer {
    key: String,
    vocab: usize,
    rows: Vec<ReferenceRow>,
}

/// The last bytes of a file of log-probabilities.
const MAGIC: &[u8; 8] = b"NQLOGP 1";

/// Most bytes of JSON for a row in [`Footer`], and for all else there.
const FOOTER_ROW: usize = 80;

/// Where the log-probabilities of a pass go.
enum PassTarget<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    /// A file, and the one whose place it will take.
    File(&'a File, &'a Path),
}

/// Log-probabilities of a row of logits, in the bytes of a file.
fn file_bytes(logits: &[f32], lse: f64) -> Vec<u8> {
    let exact: Vec<f32> = logits
        .iter()
        .map(|&x| (f64::from(x) - lse) as f32)
        .collect();
    let mut rounded = vec![f16::ZERO; exact.len()];
    rounded.convert_from_f32_slice(&exact);
    rounded.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn write_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    |cause| Error::Write { path, cause }
}

/// The beginning of a SHA-256.
fn check(bytes: &[u8]) -> u64 {
    u64::from_str_radix(&sha256_hex(bytes)[..16], 16).unwrap_or(0)
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
        let (log_probs, rows) = if 4 * numbers <= limit {
            let mut all = vec![0.0; n];
            let rows = Self::pass(reference, &plan, PassTarget::F32(&mut all), progress)?;
            (LogProbs::F32(all), rows)
        } else {
            let mut all = vec![f16::ZERO; n];
            let rows = Self::pass(reference, &plan, PassTarget::F16(&mut all), progress)?;
            (LogProbs::F16(all), rows)
        };
        Ok(ReferenceLogits {
            spec: spec.clone(),
            tokens: tokens[..plan.windows() * spec.ctx].to_vec(),
            vocab,
            log_probs,
            rows,
        })
    }

    /// Like [`ReferenceLogits::record`], in the file `path` as f16, from which [`ReferenceLogits::open`] reads them
    /// again. The file appears whole or not at all. `key` tells it from those of other references, texts and
    /// specifications.
    ///
    /// # Errors
    /// Errors of [`crate::evaluate()`] and of writing the file.
    pub fn record_to(
        path: &Path,
        key: &str,
        reference: &dyn Engine,
        tokens: &[u32],
        spec: &EvalSpec,
        progress: &dyn Progress,
    ) -> Result<()> {
        let plan = Plan::new(tokens, spec, reference)?;
        let vocab = reference.config().vocab_size;
        let beside = Beside::new(path)?;
        let rows = Self::pass(
            reference,
            &plan,
            PassTarget::File(beside.file(), path),
            progress,
        )?;
        let key = key.to_owned();
        let footer = serde_json::to_vec(&Footer { key, vocab, rows })
            .map_err(std::io::Error::from)
            .and_then(|json| {
                let mut file = beside.file();
                file.seek(SeekFrom::End(0))?;
                file.write_all(&json)?;
                file.write_all(&(json.len() as u64).to_le_bytes())?;
                file.write_all(MAGIC)
            });
        footer.map_err(write_error(path))?;
        Ok(beside.put()?)
    }

    /// The log-probabilities that [`ReferenceLogits::record_to`] wrote with the same key, tokens and specification for a
    /// model of `vocab` tokens. The file is mapped, and every row compared with its hash.
    ///
    /// # Errors
    /// [`Error::Kept`] for a file that is not whole, was changed, or was written for something else.
    pub fn open(
        path: &Path,
        key: &str,
        tokens: &[u32],
        spec: &EvalSpec,
        vocab: usize,
    ) -> Result<Self> {
        let refused = |expected: &str, found: String| Error::Kept {
            path: path.into(),
            expected: expected.into(),
            found,
        };
        let windows = spec.windows(tokens.len())?;
        let total = windows * spec.scored().len();
        let bytes =
            map_file(path).map_err(|e| refused("a file of log-probabilities", e.to_string()))?;
        let data = 2 * total * vocab;
        // The footer is bounded by what is expected before it is parsed.
        let json = bytes.len().checked_sub(data + 16);
        let json = json.filter(|&n| n <= FOOTER_ROW * (total + 8));
        let ends = json.is_some_and(|n| {
            let tail = &bytes[bytes.len() - 16..];
            tail[..8] == (n as u64).to_le_bytes() && &tail[8..] == MAGIC
        });
        let (Some(json), true) = (json, ends) else {
            let expected = format!("{data} bytes of log-probabilities and what they end with");
            return Err(refused(&expected, format!("{} other bytes", bytes.len())));
        };
        let footer: Footer = serde_json::from_slice(&bytes[data..data + json])
            .map_err(|e| refused("the account of its rows", e.to_string()))?;
        if footer.key != key || footer.vocab != vocab || footer.rows.len() != total {
            let found = format!(
                "{} rows of {} for {}",
                footer.rows.len(),
                footer.vocab,
                footer.key
            );
            return Err(refused(
                &format!("{total} rows of {vocab} for {key}"),
                found,
            ));
        }
        let row = |i: usize| &bytes[2 * vocab * i..2 * vocab * (i + 1)];
        let rows = &footer.rows;
        let changed = (0..total)
            .into_par_iter()
            .find_first(|&i| check(row(i)) != rows[i].check);
        if let Some(i) = changed {
            return Err(refused(
                "rows as they were written",
                format!("a changed row {i}"),
            ));
        }
        if rows.iter().any(|r| r.top as usize >= vocab) {
            return Err(refused("best tokens of the vocabulary", "others".into()));
        }
        Ok(ReferenceLogits {
            spec: spec.clone(),
            tokens: tokens[..windows * spec.ctx].to_vec(),
            vocab,
            log_probs: LogProbs::File(bytes.slice(..data)),
            rows: footer.rows,
        })
    }

    /// Runs `reference` by `plan`.
    fn pass(
        reference: &dyn Engine,
        plan: &Plan<'_>,
        mut target: PassTarget<'_>,
        progress: &dyn Progress,
    ) -> Result<Vec<ReferenceRow>> {
        let vocab = reference.config().vocab_size;
        let mut rows = vec![ReferenceRow::default(); plan.total()];
        let mut sessions = [plan.session(reference)?];
        plan.run(&mut sessions, "reference", progress, |logits, places| {
            let found = score_rows(places, |i, place| {
                row_nll("reference", logits[0].row(i), place)
            })?;
            let mut kept: Vec<ReferenceRow> = found
                .iter()
                .map(|r| ReferenceRow {
                    nll: r.nll,
                    top: r.top as u32,
                    check: 0,
                })
                .collect();
            // Places of one window are adjacent in the cache, so each window is one
            // contiguous part of it.
            for start in (0..places.len()).step_by(run_length(places)) {
                let count = run_length(places);
                let first = plan.index(places[start]);
                let at = first * vocab;
                let row = |i: usize| (logits[0].row(start + i), found[start + i].lse);
                match &mut target {
                    PassTarget::File(file, path) => kept[start..start + count]
                        .par_iter_mut()
                        .enumerate()
                        .try_for_each(|(i, kept)| {
                            let (x, lse) = row(i);
                            let bytes = file_bytes(x, lse);
                            kept.check = check(&bytes);
                            file.write_all_at(&bytes, 2 * (at + i * vocab) as u64)
                        })
                        .map_err(write_error(path))?,
                    PassTarget::F32(all) => all[at..at + count * vocab]
                        .par_chunks_exact_mut(vocab)
                        .enumerate()
                        .for_each(|(i, out)| {
                            let (x, lse) = row(i);
                            for (o, &x) in out.iter_mut().zip(x) {
                                *o = (f64::from(x) - lse) as f32;
                            }
                        }),
                    PassTarget::F16(all) => all[at..at + count * vocab]
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
            scatter(plan, places, &kept, &mut rows);
            Ok(())
        })?;
        Ok(rows)
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
                        LogProbs::File(all) => {
                            let row = all[2 * span.start..2 * span.end].chunks_exact(2);
                            scratch.clear();
                            scratch.extend(row.map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()));
                            scratch
                        }
                    };
                    let y = logits[0].row(i);
                    let (_, x_max) = peak("reference", x, place)?;
                    let (top, y_max) = peak("model", y, place)?;
                    let d = softmax::divergence(y, y_max, x, x_max);
                    let ReferenceRow { nll, top: best, .. } = self.rows[at];
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

    /// KL divergence of the recorded reference from itself with an unrounded KV cache and tokens fed in other portions,
    /// which includes how the recording was rounded: the floor below which a divergence from it says nothing about the
    /// weights. On a device with only rounded caches, only the portions differ.
    pub fn floor(&self, reference: &dyn Engine, progress: &dyn Progress) -> Result<KldStats> {
        let exact = otherwise(&self.spec);
        let compared = match self.compare_with(reference, &exact, progress) {
            Err(Error::Runtime(nq_runtime::Error::Kernel(NoKernel { .. }))) => {
                let kv = self.spec.kv;
                self.compare_with(reference, &EvalSpec { kv, ..exact }, progress)?
            }
            compared => compared?,
        };
        let against = compared.report.against;
        Ok(against.map_or_else(KldStats::default, |c| c.kld))
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
            LogProbs::F16(_) | LogProbs::File(_) => Precision::F16,
        }
    }

    /// Size of the log-probabilities in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.log_probs {
            LogProbs::F32(v) => 4 * v.len() as u64,
            LogProbs::F16(v) => 2 * v.len() as u64,
            LogProbs::File(v) => v.len() as u64,
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

/// The same with an unrounded KV cache and other portions.
fn otherwise(spec: &EvalSpec) -> EvalSpec {
    EvalSpec {
        kv: KvType::F32,
        rows: (spec.rows / 8).max(1) | 1, // odd, so that every kernel has other remainders
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
    let exact = otherwise(&spec);
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
