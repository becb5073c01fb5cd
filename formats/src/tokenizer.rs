//! Checks that a model has an embedding row for every token of its tokenizer.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files::Files;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// Control tokens by which chat templates end a turn.
const TURN_ENDS: [&str; 8] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
];

/// Ids of the tokens that end an answer according to the tokenizer's files: the `eos_token` of
/// tokenizer_config.json, and those of [`TURN_ENDS`] that the chat template writes. None of files that cannot be
/// read, which opening the tokenizer reports.
///
/// # Errors
/// [`Error::Io`] for files that cannot be opened.
pub(crate) fn ends(files: &Files, vocab_size: usize) -> Result<Vec<u32>> {
    #[derive(Deserialize)]
    struct Added {
        id: u32,
        content: String,
        special: bool,
    }
    #[derive(Default, Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    let Some(json) = files.get("tokenizer.json")? else {
        return Ok(Vec::new());
    };
    let config = files.get("tokenizer_config.json")?;
    let config: Value = config
        .and_then(|c| serde_json::from_slice(&c).ok())
        .unwrap_or_default();
    let named = &config["eos_token"];
    let named = named.as_str().or_else(|| named["content"].as_str());
    // Of several templates, all.
    let beside = files.get("chat_template.jinja")?;
    let template = match &beside {
        Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        None => match &config["chat_template"] {
            Value::String(text) => text.clone(),
            templates => templates
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|t| t["template"].as_str())
                .collect(),
        },
    };
    let file: File = serde_json::from_slice(&json).unwrap_or_default();
    let ends = |token: &&Added| {
        let text = token.content.as_str();
        let by_template = token.special && TURN_ENDS.contains(&text) && template.contains(text);
        (token.id as usize) < vocab_size && (by_template || named == Some(text))
    };
    Ok(file
        .added_tokens
        .iter()
        .filter(ends)
        .map(|t| t.id)
        .collect())
}

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
        model: Model,
    }
    #[derive(Deserialize)]
    struct Added {
        id: u32,
    }
    #[derive(Deserialize)]
    struct Model {
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

/// Checks that the embedding has a row for every token of the checkpoint's tokenizer. More rows
/// than tokens are usual: published models are padded.
///
/// # Errors
/// [`Error::Malformed`], with the largest id and the rows; errors of [`largest_id`];
/// [`Error::Missing`] without a tokenizer.
pub fn check(checkpoint: &Checkpoint) -> Result<()> {
    let files = checkpoint.files();
    let path = files.path(TOKENIZER);
    let rows = checkpoint.config().vocab_size;
    match largest_id(&path, &files.require(TOKENIZER)?)? {
        Some(id) if id as usize >= rows => Err(Error::Malformed {
            path,
            what: "largest token id".into(),
            expected: format!("below the model's vocab_size {rows}"),
            found: id.to_string(),
        }),
        _ => Ok(()),
    }
}
