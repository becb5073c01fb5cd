//! The model's own log-probabilities.

use super::{best, finite_max, sum_of_exponentials};
use crate::error::{Error, Result};

/// Most alternatives reported beside a token, as in OpenAI's API.
pub const MOST_LOGPROBS: usize = 20;

/// The log-probabilities of a token and of the most probable ones, in the model's own distribution:
/// the logarithm of the softmax of its raw logits, before biases, penalties, mask and
/// temperature (vLLM's `raw_logprobs`).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Number of tokens before it in the sequence.
    pub position: u64,
    /// The token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most probable tokens and their log-probabilities, best first; equal ones by id, lowest
    /// first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Computes those of `token` at `position` and of the `n` best tokens, from `logits` `[vocab]`. The
    /// softmax's sum is accumulated in f64.
    ///
    /// # Errors
    /// [`Error::Logits`] for NaN or plus infinity, or if no logit is finite; [`Error::Request`]
    /// for a token past the vocabulary's end.
    pub fn of(logits: &[f32], position: u64, token: u32, n: usize) -> Result<Self> {
        let max = finite_max(logits)?;
        let Some(&logit) = logits.get(token as usize) else {
            return Err(Error::Request {
                what: "logprobs",
                expected: format!("a token of a vocabulary of {}", logits.len()),
                found: format!("token {token}"),
            });
        };
        let total = sum_of_exponentials(logits, max).ln();
        let logprob = |x: f32| (f64::from(x) - f64::from(max) - total) as f32;
        let mut listed = Vec::new();
        if n > 0 {
            best(logits, n, &mut listed);
        }
        Ok(TokenLogprobs {
            position,
            token,
            logprob: logprob(logit),
            top: listed.iter().map(|&(x, id)| (id, logprob(x))).collect(),
        })
    }
}
