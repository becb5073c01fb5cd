//! The content of messages: texts, and images where they may be.

use super::fields::{Fields, ObjectKind};
use super::images;
use super::reading::Reading;
use super::sent::{ContentPart, ContentPlace, joined};
use crate::error::ApiError;
use serde_json::Value;
use std::sync::Arc;

/// What stands in a text for what was left out of it.
pub(crate) fn words(what: &str) -> String {
    format!("[{what}: this model reads text alone]")
}

/// Content as text alone: null, a string, or a list of parts.
///
/// # Errors
/// A part that is not text.
pub(crate) fn text(
    content: Value,
    place: &str,
    reading: &Arc<Reading>,
) -> Result<String, ApiError> {
    let content = self::content(content, place, ContentPlace::Text, reading)?;
    Ok(content.as_str().unwrap_or_default().to_owned())
}

/// Content: null, a string, or a list of parts, as a template reads it.
///
/// # Errors
/// A part that is neither text nor an image, in a message; errors of an image.
pub(crate) fn content(
    content: Value,
    place: &str,
    at: ContentPlace,
    reading: &Arc<Reading>,
) -> Result<Value, ApiError> {
    let table = match at {
        ContentPlace::Text | ContentPlace::Message => "part",
        ContentPlace::Result => "part.result",
    };
    let parts = match content {
        Value::Null => return Ok("".into()),
        Value::String(text) => return Ok(text.into()),
        Value::Array(parts) => parts,
        // Some clients give a tool's result as it is.
        object @ Value::Object(_) if at == ContentPlace::Result => {
            return Ok(object.to_string().into());
        }
        _ => return Err(ApiError::field(place, "expected a text or a list of parts")),
    };
    let mut all = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let place = format!("{place}[{i}]");
        match part {
            Value::String(text) => all.push(ContentPart::Text(text)),
            part if images::is_image(&part) => all.push(images::part(part, &place, at, reading)?),
            part => {
                let part = Fields::of(part, &place, table, reading)?;
                all.extend(of_part(part)?.map(ContentPart::Text));
            }
        }
    }
    Ok(joined(all))
}

/// The text of a part; `None` if it has none.
fn of_part(mut part: Fields) -> Result<Option<String>, ApiError> {
    match part.kind("text")? {
        ObjectKind::Served(kind) => {
            let refusal: Option<String> = part.take("refusal")?;
            let text = match kind.as_str() {
                "refusal" => refusal,
                _ => Some(part.require("text")?),
            };
            Ok(text)
        }
        ObjectKind::Dropped => Ok(None),
        ObjectKind::LeftOut(what, word) => {
            part.reading().left_out(part.place(), &what);
            Ok(Some(words(word)))
        }
    }
}
