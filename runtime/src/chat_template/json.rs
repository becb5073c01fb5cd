//! The filter `tojson` of transformers: Python's `json.dumps`.

use super::integers::Digits;
use super::python::{python_float, text};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// The widest indentation.
const MAX_INDENT: usize = 64;

/// Most levels of a value.
const MAX_DEPTH: usize = 500;

struct Style {
    ascii: bool,
    /// What a level is indented by; `None`: all on one line.
    indent: Option<String>,
    between: String,
    behind_key: String,
    sorted: bool,
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("tojson: {}", what.into()),
    )
}

/// `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`, with the same names of arguments; its
/// positions are those that transformers gives them.
pub(super) fn tojson(value: &Value, given: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if given.len() > NAMES.len() {
        return Err(invalid(format!(
            "expected at most {} arguments",
            NAMES.len()
        )));
    }
    let argument = |i: usize| -> Result<Option<Value>, Error> {
        let named: Option<Value> = options.get(NAMES[i])?;
        Ok(given.get(i).cloned().or(named).filter(|v| !v.is_none()))
    };
    let ascii = argument(0)?.is_some_and(|v| v.is_true());
    let indent = argument(1)?.map(indentation).transpose()?;
    let separators = argument(2)?;
    let sorted = argument(3)?.is_some_and(|v| v.is_true());
    options.assert_all_used()?;
    let (between, behind_key) = match separators {
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match (
                pair.first().and_then(Value::as_str),
                pair.get(1).and_then(Value::as_str),
            ) {
                (Some(a), Some(b)) if pair.len() == 2 => (a.to_owned(), b.to_owned()),
                _ => return Err(invalid("expected two strings as separators")),
            }
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ascii,
        indent,
        between,
        behind_key,
        sorted,
    };
    let mut out = String::new();
    style.dump(value, 0, &mut out)?;
    Ok(Value::from(out))
}

/// One level of an `indent`: a number of spaces, or a string.
fn indentation(indent: Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str().filter(|s| s.len() <= MAX_INDENT) {
        return Ok(text.to_owned());
    }
    match i64::try_from(indent.clone()) {
        Ok(n) if n <= MAX_INDENT as i64 => Ok(" ".repeat(n.max(0) as usize)),
        _ => Err(invalid(format!(
            "expected an indent up to {MAX_INDENT}, found {indent}"
        ))),
    }
}

impl Style {
    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(level) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(level.as_str(), depth));
        }
    }

    fn dump(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("a value that nests too deeply"));
        }
        if value.downcast_object_ref::<Digits>().is_some() {
            out.push_str(&value.to_string());
            return Ok(());
        }
        match value.kind() {
            ValueKind::Undefined => return Err(invalid("an undefined value")),
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.enclosed('[', ']', &items, depth, out, |item, out| {
                    self.dump(item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    entries.push((key_text(&key)?, item));
                }
                if self.sorted {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.enclosed('{', '}', &entries, depth, out, |(key, item), out| {
                    self.string(key, out);
                    out.push_str(&self.behind_key);
                    self.dump(item, depth + 1, out)
                })?;
            }
            other => return Err(invalid(format!("a value of type {other}"))),
        }
        Ok(())
    }

    fn enclosed<T>(
        &self,
        open: char,
        close: char,
        items: &[T],
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.between);
            }
            self.new_line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, s: &str, out: &mut String) {
        // serde_json escapes strings as Python does: quotes, backslashes and controls only.
        let escaped = serde_json::Value::from(s).to_string();
        if !self.ascii {
            out.push_str(&escaped);
            return;
        }
        for c in escaped.chars() {
            match c.is_ascii() {
                true => out.push(c),
                false => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}"); // a string takes all
                    }
                }
            }
        }
    }
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let x = f64::try_from(value.clone())?;
    Ok(match python_float(x).as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        finite => finite.to_owned(),
    })
}

/// A key of an object, which Python makes a string if it is a number, a truth value or none.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => text(key),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => number(key),
        other => Err(invalid(format!("a key of type {other}"))),
    }
}
