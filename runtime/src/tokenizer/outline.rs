//! Checks which tokenizers are read at all: byte-level BPE made of harmless parts.
//!
//! The `tokenizers` crate reads many more kinds, and some settings of some of them make it panic or
//! run without bound. A file's settings are therefore checked against a list before it sees them.

use serde::Deserialize;
use serde_json::Value;

/// Most bytes of a tokenizer.json. The largest published ones have 35 MB.
const MAX_BYTES: usize = 256 << 20;

/// Supported normalizers: their result is about as long as the text.
const NORMALIZERS: [&str; 4] = ["NFC", "NFD", "NFKC", "NFKD"];
const PRE_TOKENIZERS: [&str; 4] = ["ByteLevel", "Digits", "Punctuation", "Split"];
/// Supported post-processors: they add tokens around a text, which nq never asks for.
const POST_PROCESSORS: [&str; 4] = [
    "BertProcessing",
    "ByteLevel",
    "RobertaProcessing",
    "TemplateProcessing",
];
const DECODERS: [&str; 1] = ["ByteLevel"];

/// The parts of a tokenizer.json that are checked.
#[derive(Deserialize)]
struct Outline {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
    model: OutlineModel,
}

#[derive(Deserialize)]
struct OutlineModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<Value>,
    continuing_subword_prefix: Option<Value>,
    end_of_word_suffix: Option<Value>,
}

/// Refuses a tokenizer.json with parts that nq does not support.
///
/// # Errors
/// A message with the part, what was expected there and what was found.
pub(super) fn check(json: &[u8]) -> Result<(), String> {
    if json.len() > MAX_BYTES {
        let found = json.len();
        return Err(format!("expected at most {MAX_BYTES} bytes, found {found}"));
    }
    let outline: Outline = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let model = &outline.model;
    if model.kind.as_deref() != Some("BPE") {
        let found = model.kind.as_deref().unwrap_or("none");
        return Err(format!("model.type: expected BPE, found {found}"));
    }
    for (name, value, neutral) in [
        ("dropout", &model.dropout, Value::from(0.0)),
        (
            "continuing_subword_prefix",
            &model.continuing_subword_prefix,
            "".into(),
        ),
        ("end_of_word_suffix", &model.end_of_word_suffix, "".into()),
    ] {
        if let Some(found) = value.as_ref().filter(|v| **v != neutral) {
            return Err(format!("model.{name}: expected none, found {found}"));
        }
    }
    part(
        "normalizer",
        &outline.normalizer,
        "normalizers",
        &NORMALIZERS,
    )?;
    part(
        "pre_tokenizer",
        &outline.pre_tokenizer,
        "pretokenizers",
        &PRE_TOKENIZERS,
    )?;
    part(
        "post_processor",
        &outline.post_processor,
        "processors",
        &POST_PROCESSORS,
    )?;
    if outline.decoder.is_none() {
        return Err("decoder: expected ByteLevel, found null".into());
    }
    part("decoder", &outline.decoder, "decoders", &DECODERS)
}

/// Checks one part: it must be absent, of a known type, or a sequence (under `members`) of those.
fn part(name: &str, part: &Option<Value>, members: &str, known: &[&str]) -> Result<(), String> {
    let Some(part) = part else {
        return Ok(());
    };
    let expected = |expected: String, found: &Value| {
        Err(format!("{name}: expected {expected}, found {found}"))
    };
    let single = [part.clone()];
    let parts = if part["type"] == "Sequence" {
        // The crate takes exponential time on nested sequences.
        match part[members].as_array() {
            Some(parts) => parts,
            None => return expected(format!("{members} in a sequence"), part),
        }
    } else {
        single.as_slice()
    };
    for part in parts {
        let kind = &part["type"];
        if !known.iter().any(|k| kind == k) {
            return expected(known.join(" or "), kind);
        }
        let pattern = &part["pattern"];
        if kind == "Split" && [&pattern["String"], &pattern["Regex"]].contains(&&Value::from("")) {
            return expected("a pattern to split by".into(), pattern);
        }
    }
    Ok(())
}
