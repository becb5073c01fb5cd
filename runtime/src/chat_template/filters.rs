//! Filters of Jinja2 that the template engine lacks.

use super::python::text;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind};

/// Adds them to `env`.
pub(super) fn install(env: &mut Environment<'static>) {
    env.add_filter("wordcount", |value: &Value| text(value).map(|s| words(&s)));
    env.add_filter("truncate", truncate);
    env.add_filter("urlencode", urlencode);
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// Runs of letters, digits and underscores.
fn words(s: &str) -> usize {
    let parts = s.split(|c: char| !c.is_alphanumeric() && c != '_');
    parts.filter(|part| !part.is_empty()).count()
}

/// The beginning of a text that is longer than `length` characters and a `leeway`, up to a blank.
fn truncate(
    value: &Value,
    length: Option<usize>,
    whole: Option<bool>,
    more: Rest<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let (end, leeway): (Option<String>, Option<usize>) = from_args(&more)?;
    let s = text(value)?;
    let length = length.or(options.get("length")?).unwrap_or(255);
    let cuts_words = whole.or(options.get("killwords")?).unwrap_or(false);
    let end = end.or(options.get("end")?).unwrap_or_else(|| "...".into());
    let leeway = leeway.or(options.get("leeway")?).unwrap_or(5);
    options.assert_all_used()?;
    let kept = length.checked_sub(end.chars().count());
    let kept = kept.ok_or_else(|| {
        invalid(format!(
            "truncate: expected a length of {end:?} or more, found {length}"
        ))
    })?;
    if s.chars().count() <= length.saturating_add(leeway) {
        return Ok(s);
    }
    let cut = s.char_indices().nth(kept).map_or(s.len(), |(at, _)| at);
    let begun = match s[..cut].rsplit_once(' ') {
        Some((begun, _)) if !cuts_words => begun,
        _ => &s[..cut],
    };
    Ok(format!("{begun}{end}"))
}

/// A text for a URL's path, or pairs for its query.
fn urlencode(value: &Value) -> Result<String, Error> {
    if value.as_str().is_some() || !matches!(value.kind(), ValueKind::Map | ValueKind::Seq) {
        return Ok(quoted(&text(value)?, b"/", "%20"));
    }
    let pair = |key: &Value, value: &Value| -> Result<String, Error> {
        let part = |v| Ok::<_, Error>(quoted(&text(v)?, b"", "+"));
        Ok(format!("{}={}", part(key)?, part(value)?))
    };
    let mut pairs = Vec::new();
    for item in value.try_iter()? {
        pairs.push(match value.kind() {
            ValueKind::Map => pair(&item, &value.get_item(&item)?)?,
            _ if item.kind() == ValueKind::Seq && item.len() == Some(2) => pair(
                &item.get_item(&Value::from(0))?,
                &item.get_item(&Value::from(1))?,
            )?,
            _ => return Err(invalid("urlencode: expected pairs of a key and a value")),
        });
    }
    Ok(pairs.join("&"))
}

fn quoted(s: &str, safe: &[u8], blank: &str) -> String {
    let mut out = String::with_capacity(s.len());
    for byte in s.bytes() {
        match byte {
            b' ' => out += blank,
            _ if byte.is_ascii_alphanumeric()
                || b"_.-~".contains(&byte)
                || safe.contains(&byte) =>
            {
                out.push(char::from(byte));
            }
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}
