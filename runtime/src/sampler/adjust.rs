//! Changes to logits before a token is chosen: biases, penalties and the mask.

use super::SamplingParams;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Numbers added to the logits of single tokens, as `logit_bias` in OpenAI's API; clones share
/// them. Minus infinity excludes a token; by that API's convention -100 does so in practice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitBias(Arc<[(u32, f32)]>);

impl LogitBias {
    /// Takes (token, bias) pairs.
    ///
    /// # Errors
    /// [`Error::Request`] for NaN, plus infinity, or a token that is named twice.
    pub fn new(biases: impl IntoIterator<Item = (u32, f32)>) -> Result<Self> {
        let refuse = |expected: &str, found| {
            Err(Error::Request {
                what: "logit_bias",
                expected: expected.into(),
                found,
            })
        };
        let mut biases: Vec<(u32, f32)> = biases.into_iter().collect();
        biases.sort_unstable_by_key(|b| b.0);
        if let Some((id, bias)) = biases.iter().find(|b| b.1.is_nan() || b.1 == f32::INFINITY) {
            return refuse("a number or -inf", format!("{bias} for token {id}"));
        }
        if let Some(twice) = biases.windows(2).find(|b| b[0].0 == b[1].0) {
            return refuse("each token once", format!("token {} twice", twice[0].0));
        }
        Ok(LogitBias(biases.into()))
    }

    /// The (token, bias) pairs, by id.
    pub fn as_slice(&self) -> &[(u32, f32)] {
        &self.0
    }

    /// True if there are no biases.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Refuses tokens past the end of a vocabulary.
    pub(super) fn check(&self, vocab: usize) -> Result<()> {
        match self.0.last() {
            Some(&(id, _)) if id as usize >= vocab => Err(Error::Request {
                what: "logit_bias",
                expected: format!("tokens of a vocabulary of {vocab}"),
                found: format!("token {id}"),
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn add_to(&self, logits: &mut [f32]) {
        for &(id, bias) in self.0.iter() {
            logits[id as usize] += bias;
        }
    }
}

/// Refuses a mask (bit `i % 32` of word `i / 32` is set if token `i` is allowed) whose size does not
/// fit the vocabulary.
pub(super) fn check_mask(mask: &[u32], vocab: usize) -> Result<()> {
    if mask.len() == vocab.div_ceil(32) {
        Ok(())
    } else {
        Err(Error::Request {
            what: "token mask",
            expected: format!("{} words for {vocab} tokens", vocab.div_ceil(32)),
            found: format!("{} words", mask.len()),
        })
    }
}

/// Excludes the tokens whose bit is not set.
pub(super) fn exclude(mask: &[u32], logits: &mut [f32]) {
    for (&word, tokens) in mask.iter().zip(logits.chunks_mut(32)) {
        if word == u32::MAX {
            continue;
        }
        for (bit, x) in tokens.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *x = f32::NEG_INFINITY;
            }
        }
    }
}

/// A token subject to penalties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenToken {
    /// The token.
    pub id: u32,
    /// True if it occurs in the prompt.
    pub in_prompt: bool,
    /// Number of occurrences in the answer.
    pub count: u32,
}

/// Tokens subject to penalties.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// By id: the top bit is set if the prompt has it, the others count it in the answer.
    state: Vec<u32>,
    /// Ids with a nonzero state, in the order in which they appeared.
    ids: Vec<u32>,
}

const IN_PROMPT: u32 = 1 << 31;

impl Seen {
    /// Largest count of the frequency penalty. A device keeps as many bits.
    const MOST_COUNTED: u32 = (1 << 15) - 1;

    pub(super) fn clear(&mut self) {
        for &id in &self.ids {
            self.state[id as usize] = 0;
        }
        self.ids.clear();
    }

    pub(super) fn add_prompt(&mut self, id: u32) {
        *self.of(id) |= IN_PROMPT;
    }

    pub(super) fn add_answer(&mut self, id: u32) {
        *self.of(id) += 1;
    }

    /// Undoes the last [`Seen::add_answer`] that has not been undone.
    pub(super) fn remove_answer(&mut self, id: u32) {
        let state = &mut self.state[id as usize];
        *state -= 1;
        if *state == 0 {
            // All ids that appeared after its first occurrence have been removed before.
            let last = self.ids.pop();
            debug_assert_eq!(last, Some(id), "tokens are taken back in reverse");
        }
    }

    fn of(&mut self, id: u32) -> &mut u32 {
        let i = id as usize;
        if i >= self.state.len() {
            self.state.resize(i + 1, 0);
        }
        if self.state[i] == 0 {
            self.ids.push(id);
        }
        &mut self.state[i]
    }

    pub(super) fn tokens(&self) -> impl Iterator<Item = SeenToken> {
        self.ids.iter().map(|&id| {
            let state = self.state[id as usize];
            SeenToken {
                id,
                in_prompt: state & IN_PROMPT != 0,
                count: (state & !IN_PROMPT).min(Self::MOST_COUNTED),
            }
        })
    }

    pub(super) fn penalize(&self, p: &SamplingParams, logits: &mut [f32]) {
        for token in self.tokens() {
            if let Some(x) = logits.get_mut(token.id as usize) {
                *x = if *x > 0.0 {
                    *x / p.repetition_penalty
                } else {
                    *x * p.repetition_penalty
                };
                if token.count > 0 {
                    *x -= p.frequency_penalty * token.count as f32;
                    *x -= p.presence_penalty;
                }
            }
        }
    }
}
