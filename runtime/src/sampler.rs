//! From logits to a token.
//!
//! Steps, in this order (Hugging Face transformers'; vLLM differs only in applying min-p before
//! top-k and top-p, which changes what top-p counts):
//! 1. token mask (from a grammar, or a list of allowed tokens): other tokens are excluded, and their
//!    logits are ignored;
//! 2. logit bias: added to the model's logits, before any penalty, as vLLM and llama.cpp do with
//!    `logit_bias` and transformers with `sequence_bias`; OpenAI's API says "prior to sampling";
//! 3. repetition penalty (arXiv 1909.05858): logits of tokens in the prompt or the answer are
//!    divided by it where positive and multiplied where negative;
//! 4. frequency and presence penalty (as OpenAI's API and vLLM define them; transformers has
//!    none): for a token that occurs `c > 0` times in the answer, `c` times the frequency penalty and
//!    once the presence penalty are subtracted from its logit; occurrences in the prompt do not count;
//! 5. temperature: logits are divided by it; 0 means the best token, with no draw;
//! 6. top-k: the k best tokens stay;
//! 7. top-p (arXiv 1904.09751): of those, renormalized, the fewest best tokens whose
//!    probabilities sum to at least p stay; the best one always does;
//! 8. min-p (arXiv 2407.01082): tokens below `min_p` times the best one's probability are dropped;
//! 9. one draw from what is left, renormalized.
//!
//! Log-probabilities ([`TokenLogprobs`]) are those of the model, before all of these steps.
//!
//! Among equal logits the lowest id counts as the best, so top-k keeps exactly k tokens
//! (transformers keeps all that tie with the k-th).
//!
//! The draw inverts the cumulative distribution over the surviving tokens in id order at `u`,
//! the 53 bits `(w0 << 21 | w1 >> 11) / 2^53` of the first two words of Philox block
//! `(seed, stream, position)`. The stream identifies the sequence (or the answer); the position is
//! the number of tokens before the sampled one. A device given these three draws the same `u`, and
//! so does a sampler that was rewound ([`Sampler::rewind`]).

mod adjust;
mod logprobs;
mod params;

pub use adjust::{LogitBias, SeenToken};
pub use logprobs::{MOST_LOGPROBS, TokenLogprobs};
pub use params::{SamplingChoices, SamplingParams};

use crate::error::{Error, Result};
use adjust::{Seen, check_mask, exclude};
use nq_kernels::math::exp;
use nq_kernels::rng::Philox;
use std::cmp::Ordering;

/// The uniform number in `[0, 1)`, a multiple of 2^-53, that decides the token at `position`
/// of `stream`.
pub fn uniform(seed: u64, stream: u64, position: u64) -> f64 {
    let [w0, w1, ..] = Philox::block([seed as u32, (seed >> 32) as u32], stream, position);
    (u64::from(w0) << 21 | u64::from(w1) >> 11) as f64 / (1u64 << 53) as f64
}

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    bias: LogitBias,
    /// Bits of the allowed tokens; empty if all are allowed.
    mask: Vec<u32>,
    /// Number of alternatives to report with log-probabilities; `None` computes none.
    top_logprobs: Option<usize>,
    stream: u64,
    /// Number of tokens before the answer.
    start: u64,
    position: u64,
    seen: Seen,
    /// The answer, for rewinding; unused without penalties.
    answer: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    /// Logits after mask, biases and penalties; unused if none apply.
    adjusted: Vec<f32>,
    /// Best tokens of the step as (logit, id).
    best: Vec<(f32, u32)>,
    /// Sum of exponentials of each block of [`BLOCK`] tokens.
    block_sums: Vec<f64>,
}

impl Sampler {
    /// A sampler for one of 2^64 independent streams, at the start of a sequence.
    pub fn new(params: SamplingParams, stream: u64) -> Result<Self> {
        params.validate()?;
        Ok(Sampler {
            params,
            bias: LogitBias::default(),
            mask: Vec::new(),
            top_logprobs: None,
            stream,
            start: 0,
            position: 0,
            seen: Seen::default(),
            answer: Vec::new(),
            logprobs: Vec::new(),
            adjusted: Vec::new(),
            best: Vec::new(),
            block_sums: Vec::new(),
        })
    }

    /// The parameters it was made with.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The number of its random stream.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// Number of tokens before the next sampled one.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Sets the biases added to logits, in this sequence and those that follow.
    pub fn set_bias(&mut self, bias: LogitBias) {
        self.bias = bias;
    }

    /// The biases added to logits.
    pub fn bias(&self) -> &LogitBias {
        &self.bias
    }

    /// Allows only tokens whose bit is set (bit `i % 32` of word `i / 32` for token `i`) in all
    /// draws, until the mask is replaced or a sequence begins; `None` allows all. It must have as many
    /// words as the vocabulary needs, which each draw checks.
    pub fn set_mask(&mut self, mask: Option<&[u32]>) {
        self.mask.clear();
        self.mask.extend_from_slice(mask.unwrap_or_default());
    }

    /// Bits of the allowed tokens; `None` if all are allowed.
    pub fn mask(&self) -> Option<&[u32]> {
        (!self.mask.is_empty()).then_some(&self.mask)
    }

    /// True if mask, biases or penalties may change the logits.
    pub fn adjusts(&self) -> bool {
        self.params.has_penalties() || self.excludes()
    }

    /// True if mask or biases may exclude tokens.
    fn excludes(&self) -> bool {
        !self.bias.is_empty() || !self.mask.is_empty()
    }

    /// From the next token on, records the log-probabilities of each token and of the `top` most
    /// probable ones; `None` records none and costs nothing.
    ///
    /// # Errors
    /// [`Error::Request`] for more than [`MOST_LOGPROBS`].
    pub fn set_logprobs(&mut self, top: Option<usize>) -> Result<()> {
        if let Some(n) = top.filter(|&n| n > MOST_LOGPROBS) {
            return Err(Error::Request {
                what: "top_logprobs",
                expected: format!("at most {MOST_LOGPROBS}"),
                found: n.to_string(),
            });
        }
        self.top_logprobs = top;
        Ok(())
    }

    /// Number of alternatives reported with log-probabilities; `None` if none are computed.
    pub fn top_logprobs(&self) -> Option<usize> {
        self.top_logprobs
    }

    /// Log-probabilities of the answer's tokens, in order, from when they were asked for.
    pub fn logprobs(&self) -> &[TokenLogprobs] {
        &self.logprobs
    }

    /// Tokens subject to penalties, each once; empty without penalties.
    pub fn seen(&self) -> impl Iterator<Item = SeenToken> {
        self.seen.tokens()
    }

    /// Starts a sequence over, with all tokens allowed: `prompt` is everything before the
    /// first sampled token.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.start = prompt.len() as u64;
        self.position = self.start;
        self.mask.clear();
        self.seen.clear();
        self.answer.clear();
        self.logprobs.clear();
        if self.params.has_penalties() {
            for &id in prompt {
                self.seen.add_prompt(id);
            }
        }
    }

    /// Records a token of the answer that was chosen elsewhere, as [`Sampler::sample`] records
    /// its own.
    pub fn accept(&mut self, id: u32) {
        self.position += 1;
        if self.params.has_penalties() {
            self.seen.add_answer(id);
            self.answer.push(id);
        }
    }

    /// Like [`Sampler::accept`], for a token whose log-probabilities were computed elsewhere.
    pub fn accept_with(&mut self, logprobs: TokenLogprobs) {
        let id = logprobs.token;
        self.logprobs.push(logprobs);
        self.accept(id);
    }

    /// Takes back the answer's last tokens, so that `position` tokens come before the next one. The
    /// same logits then give the same tokens as before. Biases and the mask stay.
    ///
    /// # Errors
    /// [`Error::Request`] for a position before the answer's first token or past its end.
    pub fn rewind(&mut self, position: u64) -> Result<()> {
        if !(self.start..=self.position).contains(&position) {
            return Err(Error::Request {
                what: "rewinding a sampler",
                expected: format!("position {} to {}", self.start, self.position),
                found: position.to_string(),
            });
        }
        if self.params.has_penalties() {
            for id in self.answer.drain((position - self.start) as usize..).rev() {
                self.seen.remove_answer(id);
            }
        }
        self.position = position;
        let kept = self.logprobs.partition_point(|l| l.position < position);
        self.logprobs.truncate(kept);
        Ok(())
    }

    /// Chooses the next token from its `logits` `[vocab]` and records it. A logit of minus
    /// infinity excludes a token.
    ///
    /// # Errors
    /// [`Error::Logits`] for NaN or plus infinity, or if the model excludes every token;
    /// [`Error::NoTokenAllowed`] if mask and biases leave none; [`Error::Request`] if they do not fit
    /// the vocabulary. Nothing is recorded then.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let id = if self.adjusts() {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            let id = self
                .adjust(&mut adjusted)
                .and_then(|()| self.choose(&adjusted));
            self.adjusted = adjusted;
            id?
        } else {
            self.choose(logits)?
        };
        match self.top_logprobs {
            Some(n) => self.accept_with(TokenLogprobs::of(logits, self.position, id, n)?),
            None => self.accept(id),
        }
        Ok(id)
    }

    /// Refuses biases and a mask that do not fit the vocabulary.
    pub fn check(&self, vocab: usize) -> Result<()> {
        self.bias.check(vocab)?;
        self.mask().map_or(Ok(()), |mask| check_mask(mask, vocab))
    }

    /// Applies biases, penalties and the mask.
    fn adjust(&self, logits: &mut [f32]) -> Result<()> {
        let vocab = logits.len();
        self.check(vocab)?;
        self.bias.add_to(logits);
        self.seen.penalize(&self.params, logits);
        // Applied last, so that no other step changes minus infinity.
        if let Some(mask) = self.mask() {
            exclude(mask, logits);
        }
        if self.excludes() && logits.iter().all(|&x| x == f32::NEG_INFINITY) {
            Err(Error::NoTokenAllowed { vocab })
        } else {
            Ok(())
        }
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let max = finite_max(logits)?;
        let p = self.params;
        if p.is_greedy() || p.top_k == 1 {
            return Ok(first_equal(logits, max));
        }
        let u = uniform(p.seed, self.stream, self.position);
        let scale = 1.0 / p.temperature;
        let limits_k = p.top_k > 0 && p.top_k < logits.len();
        if !limits_k && p.top_p >= 1.0 && p.min_p <= 0.0 {
            return Ok(self.draw_from_all(logits, max, scale, u));
        }
        if limits_k {
            best(logits, p.top_k, &mut self.best);
        } else if p.top_p >= 1.0 {
            let floor = min_p_floor(&p, max);
            let ids = 0..logits.len() as u32;
            self.best.clear();
            self.best
                .extend(logits.iter().copied().zip(ids).filter(|c| c.0 >= floor));
            return Ok(draw(&mut self.best, max, scale, u));
        }
        if p.top_p < 1.0 {
            let keep = if limits_k {
                let total: f64 = self.best.iter().map(|c| weight(c.0, max, scale)).sum();
                reach(&self.best, max, scale, f64::from(p.top_p) * total)
            } else {
                self.nucleus(logits, max, scale)
            };
            self.best.truncate(keep);
        }
        if p.min_p > 0.0 {
            let floor = min_p_floor(&p, max);
            let keep = self.best.partition_point(|c| c.0 >= floor);
            self.best.truncate(keep.max(1));
        }
        Ok(draw(&mut self.best, max, scale, u))
    }

    /// Inverts the cumulative distribution of all tokens with two passes over the logits and no
    /// sorting.
    fn draw_from_all(&mut self, logits: &[f32], max: f32, scale: f32, u: f64) -> u32 {
        let total = self.sum_blocks(logits, max, scale);
        let mut left = u * total;
        let mut block = 0;
        for (i, &sum) in self.block_sums.iter().enumerate() {
            if sum > 0.0 {
                block = i; // rounding may leave `left` above the last sum
                if left < sum {
                    break;
                }
                left -= sum;
            }
        }
        let start = block * BLOCK;
        let mut last = start;
        for (i, &x) in logits[start..].iter().take(BLOCK).enumerate() {
            let w = f64::from(exp((x - max) * scale));
            if w > 0.0 {
                last = start + i;
                if left < w {
                    break;
                }
                left -= w;
            }
        }
        last as u32
    }

    /// Puts at least the nucleus, sorted, into `best` and returns the nucleus's size.
    fn nucleus(&mut self, logits: &[f32], max: f32, scale: f32) -> usize {
        let target = f64::from(self.params.top_p) * self.sum_blocks(logits, max, scale);
        // The nucleus is almost always small. In the rare other cases, sorting again costs less than
        // always sorting everything.
        let mut n = 64;
        loop {
            best(logits, n, &mut self.best);
            let keep = reach(&self.best, max, scale, target);
            if keep < self.best.len() || n >= logits.len() {
                return keep;
            }
            n *= 8;
        }
    }

    /// Fills `block_sums` and returns the total.
    fn sum_blocks(&mut self, logits: &[f32], max: f32, scale: f32) -> f64 {
        self.block_sums.clear();
        let sums = logits.chunks(BLOCK).map(|b| sum_block(b, max, scale));
        self.block_sums.extend(sums);
        self.block_sums.iter().sum()
    }
}

/// The sum of a block's exponentials.
fn sum_block(block: &[f32], max: f32, scale: f32) -> f64 {
    let mut lanes = [0.0f32; LANES];
    let (groups, rest) = block.as_chunks::<LANES>();
    for group in groups {
        for (sum, x) in lanes.iter_mut().zip(group) {
            *sum += exp((x - max) * scale);
        }
    }
    let rest: f64 = rest.iter().map(|x| f64::from(exp((x - max) * scale))).sum();
    lanes.iter().map(|&x| f64::from(x)).sum::<f64>() + rest
}

/// The sum of `e^(x - max)` over all logits.
fn sum_of_exponentials(logits: &[f32], max: f32) -> f64 {
    logits.chunks(BLOCK).map(|b| sum_block(b, max, 1.0)).sum()
}

/// Number of tokens summed together.
const BLOCK: usize = 256;
/// Partial sums and maxima kept side by side, which compile to vector instructions.
const LANES: usize = 16;

/// The largest logit.
fn finite_max(logits: &[f32]) -> Result<f32> {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    let (groups, rest) = logits.as_chunks::<LANES>();
    for group in groups {
        for i in 0..LANES {
            max[i] = if group[i] > max[i] { group[i] } else { max[i] };
            nan[i] |= group[i].is_nan();
        }
    }
    let max = max
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    let nan = nan.contains(&true) || rest.iter().any(|x| x.is_nan());
    if nan || !max.is_finite() {
        let wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        let found = match logits.iter().position(wrong) {
            Some(i) => format!("{} for token {i}", logits[i]),
            None => format!("none among {}", logits.len()),
        };
        return Err(Error::Logits { found });
    }
    Ok(max)
}

/// The lowest id whose logit is `max`.
fn first_equal(logits: &[f32], max: f32) -> u32 {
    logits.iter().position(|&x| x == max).unwrap_or(0) as u32
}

/// The best token, as a greedy sampler without more draws it.
pub fn best_token(logits: &[f32]) -> Result<u32> {
    Ok(first_equal(logits, finite_max(logits)?))
}

/// Better tokens first: by logit, then by id.
fn better(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    // `finite_max` has ruled out NaN.
    b.0.partial_cmp(&a.0)
        .unwrap_or(Ordering::Equal)
        .then(a.1.cmp(&b.1))
}

/// Leaves the `n` best tokens in `out`, best first; fewer if others are excluded.
///
/// One pass with a rising floor: candidates are buffered and cut back to `n` whenever the
/// buffer is full. A later token that equals the floor is not better, as its id is higher.
fn best(logits: &[f32], n: usize, out: &mut Vec<(f32, u32)>) {
    let room = (2 * n).max(256);
    let mut floor = f32::NEG_INFINITY;
    out.clear();
    for (g, group) in logits.chunks(LANES).enumerate() {
        if !group.iter().fold(false, |any, &x| any | (x > floor)) {
            continue;
        }
        for (i, &x) in group.iter().enumerate() {
            if x > floor {
                out.push((x, (g * LANES + i) as u32));
            }
        }
        if out.len() >= room {
            out.select_nth_unstable_by(n - 1, better);
            out.truncate(n);
            floor = out[n - 1].0;
        }
    }
    out.sort_unstable_by(better);
    out.truncate(n);
}

/// How many of `best`, from the first on, reach the weight `target` together; all of them if even
/// those do not.
fn reach(best: &[(f32, u32)], max: f32, scale: f32, target: f64) -> usize {
    let mut sum = 0.0;
    for (i, c) in best.iter().enumerate() {
        sum += weight(c.0, max, scale);
        if sum >= target {
            return i + 1;
        }
    }
    best.len()
}

/// The lowest logit that min-p keeps: `p(x) >= min_p * p(max)`.
fn min_p_floor(p: &SamplingParams, max: f32) -> f32 {
    max + p.temperature * p.min_p.ln()
}

/// The probability of a logit, up to a common factor.
fn weight(x: f32, max: f32, scale: f32) -> f64 {
    f64::from(exp((x - max) * scale))
}

/// Draws from the candidates, which it sorts by id.
fn draw(candidates: &mut [(f32, u32)], max: f32, scale: f32, u: f64) -> u32 {
    candidates.sort_unstable_by_key(|c| c.1);
    let total: f64 = candidates.iter().map(|c| weight(c.0, max, scale)).sum();
    let mut left = u * total;
    let mut last = candidates[0].1;
    for c in candidates.iter() {
        let w = weight(c.0, max, scale);
        if w > 0.0 {
            last = c.1;
            if left < w {
                break;
            }
            left -= w;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_is_a_sort() {
        let mut state = 1u32;
        // Few distinct values, so that there are many ties.
        let logits: Vec<f32> = (0..5000)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 20) % 300) as f32 - 150.0
            })
            .collect();
        let mut sorted: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
        sorted.sort_by(better);
        let mut out = Vec::new();
        for n in [1, 2, 20, 127, 128, 129, 1000, 4999, 5000, 9000] {
            best(&logits, n, &mut out);
            assert_eq!(out, sorted[..n.min(5000)], "{n}");
        }
    }
}
