//! A model's tokenizer: the tokens that end an answer or stand around a text, and the embedding row that every one
//! must have.

mod config;

pub(crate) use config::Described;
pub use config::applied;

use crate::error::{Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// Tokens that a tokenizer adds before and after a text that is embedded or scored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Around {
    /// Before it.
    pub before: Vec<u32>,
    /// After it.
    pub after: Vec<u32>,
}

/// The tokens that the post-processor of a tokenizer.json adds around a text.
///
/// # Errors
/// [`Error::Malformed`] for a template that cannot be read; [`Error::Unsupported`] for a post-processor of
/// another kind that adds tokens.
pub fn around(path: &Path, json: &[u8]) -> Result<Around> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default)]
        post_processor: Value,
    }
    let malformed = |what: &str, expected: &str, found: String| Error::Malformed {
        path: path.into(),
        what: what.into(),
        expected: expected.into(),
        found,
    };
    let file: File = serde_json::from_slice(json)
        .map_err(|e| malformed("contents", "a tokenizer", e.to_string()))?;
    let steps = match &file.post_processor["processors"] {
        Value::Array(steps) => steps.as_slice(),
        _ => std::slice::from_ref(&file.post_processor),
    };
    let mut around = Around::default();
    for step in steps {
        match step["type"].as_str() {
            None | Some("ByteLevel") => continue,
            Some("TemplateProcessing") => {}
            Some(other) => {
                return Err(Error::Unsupported {
                    path: path.into(),
                    what: format!("post_processor {other}"),
                    why: "nq reads TemplateProcessing".into(),
                });
            }
        }
        let bad = || {
            let expected = "one text, A, among special tokens";
            malformed("post_processor", expected, step["single"].to_string())
        };
        let mut text = false;
        for piece in step["single"].as_array().ok_or_else(bad)? {
            if piece["Sequence"]["id"] == "A" && !text {
                text = true;
                continue;
            }
            let name = piece["SpecialToken"]["id"].as_str().ok_or_else(bad)?;
            let ids = step["special_tokens"][name]["ids"].as_array();
            for id in ids.ok_or_else(bad)? {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let side = if text {
                    &mut around.after
                } else {
                    &mut around.before
                };
                side.push(id.ok_or_else(bad)?);
            }
        }
        if !text {
            return Err(bad());
        }
    }
    Ok(around)
}

/// The file that holds vocabulary, merges and special tokens.
pub const TOKENIZER: &str = "tokenizer.json";

/// The largest token id of a tokenizer.json, including added tokens; `None` if it has no tokens.
///
/// # Errors
/// [`Error::Malformed`] if it is not a tokenizer.json with a vocabulary from tokens to ids.
pub fn largest_id(path: &Path, json: &[u8]) -> Result<Option<u32>> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<Added>,
        model: TokenizerModel,
    }
    #[derive(Deserialize)]
    struct Added {
        id: u32,
    }
    #[derive(Deserialize)]
    struct TokenizerModel {
        vocab: Largest,
    }
    let file: File = serde_json::from_slice(json).map_err(|e| Error::Malformed {
        path: path.into(),
        what: "contents".into(),
        expected: "a tokenizer with model.vocab, tokens to ids".into(),
        found: e.to_string(),
    })?;
    let added = file.added_tokens.iter().map(|a| a.id);
    Ok(added.chain(file.model.vocab.0).max())
}

/// Visits a map for its largest value, without keeping its 150,000 keys.
struct Largest(Option<u32>);

impl<'de> Deserialize<'de> for Largest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values;
        impl<'de> Visitor<'de> for Values {
            type Value = Largest;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tokens to ids")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Largest, A::Error> {
                let mut largest = None;
                while let Some((_, id)) = map.next_entry::<IgnoredAny, u32>()? {
                    largest = largest.max(Some(id));
                }
                Ok(Largest(largest))
            }
        }
        deserializer.deserialize_map(Values)
    }
}
