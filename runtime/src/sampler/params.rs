//! A request's settings for choosing tokens.

use crate::error::{Error, Result};
use nq_formats::GenerationDefaults;
use std::fmt;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 always takes the best token.
    pub temperature: f32,
    /// Keeps this many best tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest best tokens that have this probability together; 1 keeps all.
    pub top_p: f32,
    /// Drops tokens below this share of the best one's probability; 0 drops none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen before; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit once per occurrence in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once from the logits of tokens already generated; 0 is off.
    pub presence_penalty: f32,
    /// Key of the random numbers.
    pub seed: u64,
}

impl fmt::Display for SamplingParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "temperature {}, top-k {}, top-p {}, min-p {}, repetition penalty {}, frequency penalty {}, presence penalty {}, seed {}",
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.frequency_penalty,
            self.presence_penalty,
            self.seed
        )
    }
}

impl Default for SamplingParams {
    /// Samples from the model's own distribution.
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Takes the best token at each step.
    pub fn greedy() -> Self {
        SamplingParams {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Reads a checkpoint's `generation_config.json`: `do_sample: false` is greedy, and, as in
    /// transformers, so is a file that does not mention sampling.
    pub fn from_defaults(defaults: &GenerationDefaults) -> Self {
        let none = Self::default();
        let asks_to_sample = defaults.do_sample.unwrap_or(defaults.temperature.is_some());
        SamplingParams {
            temperature: if asks_to_sample {
                defaults.temperature.unwrap_or(1.0)
            } else {
                0.0
            },
            top_k: defaults.top_k.unwrap_or(none.top_k),
            top_p: defaults.top_p.unwrap_or(none.top_p),
            min_p: defaults.min_p.unwrap_or(none.min_p),
            repetition_penalty: defaults
                .repetition_penalty
                .unwrap_or(none.repetition_penalty),
            ..none
        }
    }

    /// True if each token is the best one, without a draw.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// True if tokens seen before change the logits.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
    }

    /// Refuses values that make no sense.
    ///
    /// # Errors
    /// [`Error::Request`], which names the parameter.
    pub fn validate(&self) -> Result<()> {
        let check = |what, value: f32, ok: bool, expected: &str| {
            if ok {
                Ok(())
            } else {
                Err(Error::Request {
                    what,
                    expected: expected.into(),
                    found: value.to_string(),
                })
            }
        };
        let t = self.temperature;
        check("temperature", t, t.is_finite() && t >= 0.0, "0 or more")?;
        let p = self.top_p;
        check("top_p", p, p > 0.0 && p <= 1.0, "above 0, up to 1")?;
        let p = self.min_p;
        check("min_p", p, (0.0..=1.0).contains(&p), "0 to 1")?;
        let p = self.repetition_penalty;
        let ok = p.is_finite() && p > 0.0;
        check("repetition_penalty", p, ok, "a positive number")?;
        let p = self.frequency_penalty;
        check("frequency_penalty", p, p.is_finite(), "a finite number")?;
        let p = self.presence_penalty;
        check("presence_penalty", p, p.is_finite(), "a finite number")
    }
}
