//! A request's settings for choosing tokens.

use crate::error::{Error, Result};
use nq_formats::GenerationDefaults;
use serde_json::Value;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Declares the settings, in the order in which they are listed: the name that flags, files, protocols and Python have for
/// each, how texts call it, its type, the value that changes nothing, and which values make sense.
macro_rules! settings {
    ($($(#[$doc:meta])+ $name:ident ($words:literal): $type:ty = $neutral:literal, $valid:expr, $expected:literal;)+) => {
        /// How tokens are chosen.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct SamplingParams {
            $($(#[$doc])+ pub $name: $type,)+
            /// Key of the random numbers.
            pub seed: u64,
        }

        /// Settings that somebody has chosen, of those of [`SamplingParams`].
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct SamplingChoices {
            $($(#[$doc])+ pub $name: Option<$type>,)+
        }

        impl SamplingChoices {
            /// What was chosen, and of `otherwise` what was not.
            pub fn over(self, otherwise: SamplingParams) -> SamplingParams {
                SamplingParams {
                    $($name: self.$name.unwrap_or(otherwise.$name),)+
                    seed: otherwise.seed,
                }
            }
        }

        impl Default for SamplingParams {
            /// Samples from the model's own distribution.
            fn default() -> Self {
                SamplingParams { $($name: $neutral,)+ seed: 0 }
            }
        }

        impl SamplingParams {
            /// The names of the settings but the seed.
            pub const NAMES: &[&str] = &[$(stringify!($name)),+];

            /// The values of [`SamplingParams::NAMES`], as texts.
            pub fn texts(&self) -> impl Iterator<Item = (&'static str, String)> {
                [$((stringify!($name), self.$name.to_string())),+].into_iter()
            }

            /// The values of [`SamplingParams::NAMES`], as JSON has them: 0.7, not the f64 nearest to its f32 value.
            pub fn values(&self) -> impl Iterator<Item = (&'static str, Value)> {
                let short = |value: Value, text: &str| match text.parse::<f64>() {
                    Ok(number) if value.is_f64() => number.into(),
                    _ => value,
                };
                let values = [$(Value::from(self.$name)),+].into_iter().zip(self.texts());
                values.map(move |(value, (name, text))| (name, short(value, &text)))
            }

            /// Those that change something, as texts call them: `top-p 0.9`.
            pub fn words(&self) -> Vec<String> {
                let all = [$((self.$name != $neutral, format!(concat!($words, " {}"), self.$name))),+];
                all.into_iter().filter_map(|(on, words)| on.then_some(words)).collect()
            }

            /// Reads the value of the setting `name`; false if it is none of the setting's type. `None` if there is no
            /// such setting.
            pub fn read(&mut self, name: &str, value: &str) -> Option<bool> {
                match name {
                    $(stringify!($name) => Some(value.parse().map(|v| self.$name = v).is_ok()),)+
                    "seed" => Some(value.parse().map(|v| self.seed = v).is_ok()),
                    _ => None,
                }
            }

            /// Refuses values that make no sense.
            ///
            /// # Errors
            /// [`Error::Request`], which names the parameter.
            pub fn validate(&self) -> Result<()> {
                $(let valid: fn($type) -> bool = $valid;
                if !valid(self.$name) {
                    return Err(Error::Request {
                        what: stringify!($name),
                        expected: $expected.into(),
                        found: self.$name.to_string(),
                    });
                })+
                Ok(())
            }
        }

        impl fmt::Display for SamplingParams {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(write!(f, concat!($words, " {}, "), self.$name)?;)+
                write!(f, "seed {}", self.seed)
            }
        }
    };
}

settings! {
    /// Divides the logits; 0 always takes the best token.
    temperature ("temperature"): f32 = 1.0, |t| t.is_finite() && t >= 0.0, "0 or more";
    /// Keeps this many best tokens; 0 keeps all.
    top_k ("top-k"): usize = 0, |_| true, "a number";
    /// Keeps the fewest best tokens that have this probability together; 1 keeps all.
    top_p ("top-p"): f32 = 1.0, |p| p > 0.0 && p <= 1.0, "above 0, up to 1";
    /// Drops tokens below this share of the best one's probability; 0 drops none.
    min_p ("min-p"): f32 = 0.0, |p| (0.0..=1.0).contains(&p), "0 to 1";
    /// Divides positive and multiplies negative logits of tokens seen before; 1 is off.
    repetition_penalty ("repetition penalty"): f32 = 1.0, |p| p.is_finite() && p > 0.0, "a positive number";
    /// Subtracted from a token's logit once per occurrence in the answer; 0 is off.
    frequency_penalty ("frequency penalty"): f32 = 0.0, f32::is_finite, "a finite number";
    /// Subtracted once from the logits of tokens already generated; 0 is off.
    presence_penalty ("presence penalty"): f32 = 0.0, f32::is_finite, "a finite number";
}

impl SamplingParams {
    /// Takes the best token at each step.
    pub fn greedy() -> Self {
        SamplingParams {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// A seed that nobody has chosen.
    pub fn random_seed() -> u64 {
        RandomState::new().build_hasher().finish()
    }

    /// Reads a checkpoint's `generation_config.json`: `do_sample: false` is greedy, and, as in
    /// transformers, so is a file that does not mention sampling.
    pub fn from_defaults(defaults: &GenerationDefaults) -> Self {
        let asks_to_sample = defaults.do_sample.unwrap_or(defaults.temperature.is_some());
        let choices = SamplingChoices {
            temperature: match asks_to_sample {
                true => defaults.temperature,
                false => Some(0.0),
            },
            top_k: defaults.top_k,
            top_p: defaults.top_p,
            min_p: defaults.min_p,
            repetition_penalty: defaults.repetition_penalty,
            ..SamplingChoices::default()
        };
        choices.over(Self::default())
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
}
