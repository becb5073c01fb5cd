//! Calls as JSON: `{"name": ..., "arguments": {...}}`.

use super::arguments::mended;
use super::signature::Tools;
use super::tags::MOST_NAME;
use serde::de::IgnoredAny;
use serde_json::Deserializer;
use std::collections::HashSet;

/// The beginning of a JSON call.
pub(super) enum CallHead {
    /// Incomplete; the name, if it is there.
    Open(Option<String>),
    /// A name, and where its arguments, an object, begin.
    Named(String, usize),
    /// Another form.
    Other,
}

/// Reads `{"name": "...", "arguments": {` in that order.
pub(super) fn head(text: &str) -> CallHead {
    let mut rest = text;
    // The text must be a beginning of what is expected, otherwise it has another form.
    let open = |rest: &str, wanted: &str, name: Option<&str>| {
        if wanted.starts_with(rest) {
            CallHead::Open(name.map(str::to_owned))
        } else {
            CallHead::Other
        }
    };
    for wanted in ["{", "\"name\"", ":"] {
        rest = rest.trim_start();
        match rest.strip_prefix(wanted) {
            Some(after) => rest = after,
            None => return open(rest, wanted, None),
        }
        // Some models double the braces, as templates of texts do.
        if wanted == "{" {
            rest = rest.strip_prefix(wanted).unwrap_or(rest);
        }
    }
    rest = rest.trim_start();
    let Some(inner) = rest.strip_prefix('"') else {
        return open(rest, "\"", None);
    };
    let mut escaped = false;
    let end = inner.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    let Some(end) = end else {
        let long = inner.len() > MOST_NAME;
        return if long {
            CallHead::Other
        } else {
            CallHead::Open(None)
        };
    };
    let Ok(name) = serde_json::from_str::<String>(&rest[..end + 2]) else {
        return CallHead::Other;
    };
    rest = inner[end + 1..].trim_start();
    match rest.strip_prefix(',') {
        Some(after) => rest = after.trim_start(),
        None => return open(rest, ",", Some(&name)),
    }
    let keys = ["\"arguments\"", "\"parameters\""];
    match keys.iter().find_map(|key| rest.strip_prefix(key)) {
        Some(after) => rest = after.trim_start(),
        None if keys.iter().any(|key| key.starts_with(rest)) => return CallHead::Open(Some(name)),
        None => return CallHead::Other,
    }
    match rest.strip_prefix(':') {
        Some(after) => rest = after.trim_start(),
        None => return open(rest, ":", Some(&name)),
    }
    if rest.starts_with('{') {
        CallHead::Named(name, text.len() - rest.len())
    } else {
        open(rest, "{", Some(&name))
    }
}

/// A JSON call of one of `tools` whose keys are in any order, or whose arguments are JSON in a string: its name and
/// arguments.
pub(super) fn call(text: &str, tools: &Tools) -> Option<(String, String)> {
    let text = mended(text, &HashSet::new())?;
    let (mut name, mut arguments) = (None, "null");
    let mut rest = text.strip_prefix('{')?.trim_start();
    while !rest.starts_with('}') {
        let key = value(&mut rest)?;
        rest = rest.trim_start().strip_prefix(':')?;
        let found = value(&mut rest)?;
        rest = rest.trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
        match key {
            "\"name\"" => name = serde_json::from_str::<String>(found).ok(),
            "\"arguments\"" | "\"parameters\"" => arguments = found,
            _ => {}
        }
    }
    let name = name?;
    let arguments = match arguments {
        "null" => "{}".to_owned(),
        text if text.starts_with('"') => serde_json::from_str(text).ok()?,
        text => text.to_owned(),
    };
    let arguments = mended(arguments.trim(), &tools.integers(&name))?;
    arguments.starts_with('{').then_some((name, arguments))
}

/// Takes the JSON value that `rest` begins with, as it is written.
fn value<'a>(rest: &mut &'a str) -> Option<&'a str> {
    let text = rest.trim_start();
    let mut values = Deserializer::from_str(text).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    let (value, behind) = text.split_at(values.byte_offset());
    *rest = behind;
    Some(value)
}
