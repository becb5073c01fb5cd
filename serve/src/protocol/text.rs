//! Content as text: what models of text alone read of a message's parts.

use super::fields::{Fields, Kind};
use super::reading::Reading;
use crate::error::ApiError;
use serde_json::Value;
use std::sync::Arc;

/// Where content stands, which decides what becomes of parts that are no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a message: they are refused, because somebody asks about them.
    Message,
    /// In a tool's result: the model has chosen the tool, and is told that it cannot see them.
    Result,
}

/// What stands in a text for what was left out of it.
pub fn words(what: &str) -> String {
    format!("[{what}: this model reads text alone]")
}

/// Content as text: null, a string, or a list of parts.
///
/// # Errors
/// A part that is not text, in a message.
pub fn text(
    content: Value,
    place: &str,
    at: Place,
    reading: &Arc<Reading>,
) -> Result<String, ApiError> {
    let table = match at {
        Place::Message => "part",
        Place::Result => "part.result",
    };
    let parts = match content {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        // Some clients give a tool's result as it is.
        object @ Value::Object(_) if at == Place::Result => return Ok(object.to_string()),
        _ => return Err(ApiError::field(place, "expected a text or a list of parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let part = match part {
            Value::String(text) => {
                texts.push(text);
                continue;
            }
            part => Fields::of(part, &format!("{place}[{i}]"), table, reading)?,
        };
        texts.extend(of_part(part)?);
    }
    Ok(texts.join("\n"))
}

/// The text of a part; `None` if it has none.
fn of_part(mut part: Fields) -> Result<Option<String>, ApiError> {
    match part.kind("text")? {
        Kind::Served(kind) => {
            let refusal: Option<String> = part.take("refusal")?;
            let text = match kind.as_str() {
                "refusal" => refusal,
                _ => Some(part.require("text")?),
            };
            Ok(text)
        }
        Kind::Dropped => Ok(None),
        Kind::LeftOut(what, word) => {
            part.reading().left_out(part.place(), &what);
            Ok(Some(words(word)))
        }
    }
}
