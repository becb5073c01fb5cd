//! Sampling fields, the same in all protocols.

use super::fields::Fields;
use crate::error::ApiError;
use nq_runtime::sampler::MOST_LOGPROBS;
use nq_runtime::{LogitBias, SamplingChoices, SamplingParams};
use serde_json::{Map, Value};

/// Most answers to one prompt.
pub(crate) const MOST_ANSWERS: usize = 16;
/// Most stop strings, and bytes of one.
const MOST_STOPS: usize = 64;
const MOST_STOP_BYTES: usize = 1024;
/// Most tokens with a bias.
const MOST_BIASES: usize = 1024;

/// Reads the sampling parameters; defaults are those of the model.
///
/// # Errors
/// A value outside its limits, by name.
pub(crate) fn params(
    fields: &mut Fields,
    model: SamplingParams,
) -> Result<SamplingParams, ApiError> {
    let top_k =
        match fields.integer("top_k")? {
            // As in vLLM, -1 keeps all.
            Some(-1) => Some(0),
            Some(k) => Some(usize::try_from(k).map_err(|_| {
                ApiError::field("top_k", format!("expected -1, 0 or more, found {k}"))
            })?),
            None => None,
        };
    // Any number of 64 bits, with or without a sign.
    let seed = match fields.integer("seed")? {
        None => None,
        Some(seed) => Some(
            i64::try_from(seed)
                .map(|s| s as u64)
                .or_else(|_| u64::try_from(seed))
                .map_err(|_| ApiError::field("seed", format!("expected 64 bits, found {seed}")))?,
        ),
    };
    let choices = SamplingChoices {
        temperature: fields.number("temperature")?,
        top_k,
        // 0 keeps the best token alone.
        top_p: fields.number("top_p")?.map(|p| p.max(f32::MIN_POSITIVE)),
        min_p: fields.number("min_p")?,
        repetition_penalty: repetition(fields, "repetition_penalty")?
            .or(repetition(fields, "repeat_penalty")?),
        frequency_penalty: fields.number("frequency_penalty")?,
        presence_penalty: fields.number("presence_penalty")?,
    };
    let params = choices.over(SamplingParams {
        seed: seed.unwrap_or_else(SamplingParams::random_seed),
        ..model
    });
    params.validate()?;
    Ok(params)
}

/// A factor for tokens seen before; some clients call none 0.
fn repetition(fields: &mut Fields, name: &str) -> Result<Option<f32>, ApiError> {
    match fields.peek(name).as_f64() {
        Some(0.0) => fields.take::<f32>(name).map(|_| Some(1.0)),
        _ => fields.number(name),
    }
}

/// Reads `logit_bias`: token ids, as text, and the biases of their logits.
///
/// # Errors
/// A token or bias that is malformed, or too many of them.
pub(crate) fn bias(fields: &mut Fields) -> Result<LogitBias, ApiError> {
    let Some(map) = fields.take::<Map<String, Value>>("logit_bias")? else {
        return Ok(LogitBias::default());
    };
    if map.len() > MOST_BIASES {
        let what = format!("expected at most {MOST_BIASES} tokens, found {}", map.len());
        return Err(ApiError::field("logit_bias", what));
    }
    let one = |(token, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
        token
            .parse()
            .ok()
            .zip(bias.map(|b| b as f32))
            .ok_or_else(|| {
                let what = "expected token ids, and numbers from -100 to 100";
                ApiError::field("logit_bias", format!("{what}, found {token:?}"))
            })
    };
    let biases: Result<Vec<(u32, f32)>, ApiError> = map.iter().map(one).collect();
    Ok(LogitBias::new(biases?)?)
}

/// Reads `stop`: a string, which is none if it is empty, or a list of strings.
///
/// # Errors
/// Too many, too long or empty strings.
pub(crate) fn stop(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    let wrong = || ApiError::field(name, "expected a text or a list of texts");
    let stop: Vec<String> = match fields.take::<Value>(name)? {
        None => Vec::new(),
        Some(Value::String(one)) if one.is_empty() => Vec::new(),
        Some(Value::String(one)) => vec![one],
        Some(many) => serde_json::from_value(many).map_err(|_| wrong())?,
    };
    if stop.len() > MOST_STOPS
        || stop
            .iter()
            .any(|s| s.is_empty() || s.len() > MOST_STOP_BYTES)
    {
        let what =
            format!("expected at most {MOST_STOPS} texts of 1 to {MOST_STOP_BYTES} bytes each");
        return Err(ApiError::field(name, what));
    }
    Ok(stop)
}

/// Reads chat's `logprobs` and `top_logprobs`.
///
/// # Errors
/// Too many, or `top_logprobs` without `logprobs`.
pub(crate) fn chat_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.take::<bool>("logprobs")?.unwrap_or(false);
    let top = fields.count("top_logprobs", 0, MOST_LOGPROBS)?;
    match (wanted, top) {
        (false, Some(1..)) => Err(ApiError::field(
            "top_logprobs",
            "expected logprobs to be true with it",
        )),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}
