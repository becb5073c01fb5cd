//! Checks that a model has an embedding row for every token of its tokenizer.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::fmt;
use std::path::Path;

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
