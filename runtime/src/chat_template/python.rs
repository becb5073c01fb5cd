//! What Jinja2 inherits from Python and the template engine does not know: how values are printed, methods of
//! strings and lists, and the filters and tests that differ.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use std::fmt::Write;

/// The filter that what a loop is over goes through.
pub(super) const LOOPED: &str = "looped_over";

/// Most levels of a value that is printed; Python's own limit is near.
const MAX_DEPTH: usize = 500;

/// Adds to `env` what makes templates render as in Python.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_formatter(|out, _, value| {
        out.write_str(&text(value)?)
            .map_err(|_| Error::from(ErrorKind::WriteFailure))
    });
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("replace", replace);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("string", |value: &Value| text(value));
    env.add_filter("join", join);
    env.add_filter("trim", |value: &Value, chars: Option<String>| {
        Ok::<_, Error>(strip(&text(value)?, chars.as_deref(), true, true).to_owned())
    });
    env.add_filter("title", |value: &Value| {
        Ok::<_, Error>(filter_title(&text(value)?))
    });
    env.add_filter(LOOPED, |value: Value| match value.is_none() {
        true => Err(invalid("a loop over none")),
        false => Ok(value),
    });
    env.add_test("iterable", |v: &Value| {
        v.is_undefined() || v.as_str().is_some() || is_container(v)
    });
    env.add_test("sequence", |v: &Value| {
        v.is_undefined()
            || v.as_str().is_some()
            || matches!(v.kind(), ValueKind::Seq | ValueKind::Map)
    });
    env.add_test("number", |v: &Value| {
        matches!(v.kind(), ValueKind::Number | ValueKind::Bool)
    });
}

fn is_container(v: &Value) -> bool {
    matches!(
        v.kind(),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
    )
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// Python's `str(value)`.
///
/// # Errors
/// Values that nest too deeply.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(s) => Ok(s.to_owned()),
        None => repr(value),
    }
}

/// Python's `repr(value)`.
///
/// # Errors
/// Values that nest too deeply.
pub(super) fn repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(value, MAX_DEPTH, &mut out)?;
    Ok(out)
}

fn write_repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    let deeper = || {
        depth
            .checked_sub(1)
            .ok_or_else(|| invalid("a value that nests too deeply"))
    };
    match value.kind() {
        ValueKind::String => repr_string(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(x) => out.push_str(&python_float(x)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::Seq => {
            let tuple = value.downcast_object_ref::<Tuple>().is_some();
            let (open, close) = if tuple { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut items = 0;
            for item in value.try_iter()? {
                if items > 0 {
                    out.push_str(", ");
                }
                write_repr(&item, deeper()?, out)?;
                items += 1;
            }
            if tuple && items == 1 {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map
            if value
                .as_object()
                .is_some_and(|o| o.try_iter_pairs().is_some()) =>
        {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_repr(&key, deeper()?, out)?;
                out.push_str(": ");
                write_repr(&value.get_item(&key)?, deeper()?, out)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}"); // a string takes all
        }
    }
    Ok(())
}

/// Python's `repr` of a string.
fn repr_string(s: &str, out: &mut String) {
    let quote = if s.contains('\'') && !s.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in s.chars() {
        let code = u32::from(c);
        // Writing to a string does not fail.
        let _ = match c {
            '\\' => out.write_str("\\\\"),
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            c if c == quote => write!(out, "\\{c}"),
            _ if code < 0x20 || (0x7f..0xa1).contains(&code) || code == 0xad => {
                write!(out, "\\x{code:02x}")
            }
            '\u{1680}'
            | '\u{2000}'..='\u{200f}'
            | '\u{2028}'..='\u{202f}'
            | '\u{205f}'..='\u{206f}'
            | '\u{3000}'
            | '\u{feff}'
            | '\u{e000}'..='\u{f8ff}' => write!(out, "\\u{code:04x}"),
            c => out.write_char(c),
        };
    }
    out.push(quote);
}

/// Python's `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16
/// on.
pub(super) fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    let scientific = format!("{x:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific; // infinite
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{x:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        _ if value.is_undefined() => Ok(0),
        Some(n) => Ok(n),
        None => Err(invalid(format!(
            "the length of a value of type {}",
            value.kind()
        ))),
    }
}

fn default(value: &Value, args: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let otherwise: Option<Value> = options.get("default_value")?;
    let falsy: Option<bool> = options.get("boolean")?;
    options.assert_all_used()?;
    let falsy = falsy.or(args.get(1).map(Value::is_true)).unwrap_or(false);
    Ok(match value.is_undefined() || (falsy && !value.is_true()) {
        true => otherwise
            .or(args.first().cloned())
            .unwrap_or_else(|| Value::from("")),
        false => value.clone(),
    })
}

fn replace(value: &Value, old: &Value, new: &Value, count: Option<usize>) -> Result<String, Error> {
    let (value, old, new) = (text(value)?, text(old)?, text(new)?);
    Ok(value.replacen(&old, &new, count.unwrap_or(usize::MAX)))
}

/// Python's `int(value)`, or the default where that fails.
fn int(value: &Value, otherwise: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let base: Option<u32> = options.get("base")?;
    let otherwise = options.get::<Option<Value>>("default")?.or(otherwise);
    options.assert_all_used()?;
    let digits = value
        .as_str()
        .map(|s| strip(s, None, true, true).replace('_', ""));
    let parsed = match digits {
        Some(s) => {
            match i64::from_str_radix(&s, base.filter(|b| (2..=36).contains(b)).unwrap_or(10)) {
                Ok(n) => Some(n),
                Err(_) => s
                    .parse::<f64>()
                    .ok()
                    .filter(|x| x.is_finite())
                    .map(|x| x as i64),
            }
        }
        None if value.kind() == ValueKind::Bool => Some(i64::from(value.is_true())),
        None if value.kind() == ValueKind::Number && value.is_integer() => return Ok(value.clone()),
        None => f64::try_from(value.clone())
            .ok()
            .filter(|x| x.is_finite())
            .map(|x| x as i64),
    };
    Ok(parsed.map_or_else(|| otherwise.unwrap_or_else(|| Value::from(0)), Value::from))
}

/// Python's `float(value)`, or the default where that fails.
fn float(value: &Value, otherwise: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let otherwise = options.get::<Option<Value>>("default")?.or(otherwise);
    options.assert_all_used()?;
    let parsed = match value.as_str() {
        Some(s) => strip(s, None, true, true).parse::<f64>().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    Ok(parsed.map_or_else(
        || otherwise.unwrap_or_else(|| Value::from(0.0)),
        Value::from,
    ))
}

fn join(values: &Value, separator: Option<&Value>, options: Kwargs) -> Result<String, Error> {
    let between: Option<Value> = options.get("d")?;
    let attribute: Option<Value> = options.get("attribute")?;
    options.assert_all_used()?;
    let between = separator
        .or(between.as_ref())
        .map_or(Ok(String::new()), text)?;
    if values.is_none() {
        return Err(invalid("a value of type none is not iterable"));
    }
    let items: Vec<Value> = match values.as_str() {
        Some(s) => s.chars().map(Value::from).collect(),
        None => values.try_iter()?.collect(),
    };
    let item = |v: Value| match &attribute {
        Some(key) => text(&v.get_item(key)?),
        None => text(&v),
    };
    let items: Result<Vec<String>, Error> = items.into_iter().map(item).collect();
    Ok(items?.join(&between))
}

/// White space as Python strips it.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn strip<'a>(s: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let out = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let s = if left { s.trim_start_matches(out) } else { s };
    if right { s.trim_end_matches(out) } else { s }
}

/// Jinja2's `title`: words begin behind spaces, hyphens and brackets.
fn filter_title(s: &str) -> String {
    capitalized(s, |c| c.is_whitespace() || "-({[<".contains(c))
}

/// Upper case for the first letter of each part that `between` separates, lower case for the others.
fn capitalized(s: &str, between: impl Fn(char) -> bool) -> String {
    let mut first = true;
    let mut out = String::new();
    for c in s.chars() {
        match first && !between(c) {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        first = between(c);
    }
    out
}

/// Calls a method that the engine does not know: those of Python's strings and lists here, others in
/// minijinja-contrib.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let known = match value.kind() {
        ValueKind::String => string_method(value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Seq => list_method(value, name, args)?,
        _ => None,
    };
    match known {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn list_method(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match name {
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let at = list.try_iter()?.position(|v| v == *what);
            Some(
                at.map(Value::from)
                    .ok_or_else(|| invalid("a value that is not in the list"))?,
            )
        }
        "copy" => Some(list.try_iter()?.collect()),
        _ => None,
    })
}

fn string_method(s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let chars = || -> Result<Option<String>, Error> {
        let (chars,): (Option<String>,) = from_args(args)?;
        Ok(chars)
    };
    let one = || -> Result<String, Error> {
        let (text,): (String,) = from_args(args)?;
        Ok(text)
    };
    let three =
        |(a, b, c): (&str, &str, &str)| Value::from(Tuple::from([a, b, c].map(Value::from)));
    let position = |at: Option<usize>| {
        at.map(|at| s[..at].chars().count())
            .ok_or_else(|| invalid("a text that is not in the string"))
    };
    Ok(Some(match name {
        "strip" => strip(s, chars()?.as_deref(), true, true).into(),
        "lstrip" => strip(s, chars()?.as_deref(), true, false).into(),
        "rstrip" => strip(s, chars()?.as_deref(), false, true).into(),
        "split" | "rsplit" => split(s, name == "rsplit", args)?,
        "splitlines" => {
            let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.or(options.get("keepends")?).unwrap_or(false);
            options.assert_all_used()?;
            lines(s, keep).into_iter().map(Value::from).collect()
        }
        "partition" => {
            let by = one()?;
            three(s.split_once(&by).map_or((s, "", ""), |(a, b)| (a, &by, b)))
        }
        "rpartition" => {
            let by = one()?;
            three(s.rsplit_once(&by).map_or(("", "", s), |(a, b)| (a, &by, b)))
        }
        "removeprefix" => s.strip_prefix(&one()?).unwrap_or(s).into(),
        "removesuffix" => s.strip_suffix(&one()?).unwrap_or(s).into(),
        "index" => position(s.find(&one()?))?.into(),
        "rindex" => position(s.rfind(&one()?))?.into(),
        "title" => capitalized(s, |c| !c.is_alphabetic()).into(),
        "casefold" => s.to_lowercase().into(),
        "swapcase" => s.chars().map(swapped).collect::<String>().into(),
        "zfill" | "ljust" | "rjust" | "center" => padded(s, name, args)?.into(),
        "isdecimal" => (!s.is_empty() && s.chars().all(|c| c.is_ascii_digit())).into(),
        _ => return Ok(None),
    }))
}

fn swapped(c: char) -> String {
    match c.is_uppercase() {
        true => c.to_lowercase().collect(),
        false => c.to_uppercase().collect(),
    }
}

/// `split` and `rsplit`, by white space or a separator, with a greatest number of cuts or none.
fn split(s: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (by, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let by = by.filter(|by| !by.is_none()).or(options.get("sep")?);
    let most = most.or(options.get("maxsplit")?);
    options.assert_all_used()?;
    let most = most
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(usize::MAX);
    let by = match &by {
        Some(by) => Some(
            by.as_str()
                .ok_or_else(|| invalid("a separator that is no string"))?,
        ),
        None => None,
    };
    let mut parts: Vec<&str> = match by {
        Some("") => return Err(invalid("an empty separator")),
        Some(by) if from_right => s.rsplitn(most.saturating_add(1), by).collect(),
        Some(by) => s.splitn(most.saturating_add(1), by).collect(),
        None => at_spaces(s, from_right, most),
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Parts between runs of white space, beginning from the given side.
fn at_spaces(s: &str, from_right: bool, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = s;
    loop {
        rest = strip(rest, None, !from_right, from_right);
        let cut = match from_right {
            _ if parts.len() >= most => None,
            true => rest.rfind(is_space),
            false => rest.find(is_space),
        };
        let Some(at) = cut else {
            parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
            return parts;
        };
        let (left, right) = rest.split_at(at);
        if from_right {
            parts.push(strip(right, None, true, false));
            rest = left;
        } else {
            parts.push(left);
            rest = right;
        }
    }
}

/// Python's `splitlines`.
fn lines(s: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = s;
    while let Some(at) = rest.find(ends) {
        let end = match rest[at..].starts_with("\r\n") {
            true => at + 2,
            false => at + rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(&rest[..if keep { end } else { at }]);
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Most characters that a string is padded to.
pub(super) const MAX_PADDED: usize = 1 << 16;

fn padded(s: &str, how: &str, args: &[Value]) -> Result<String, Error> {
    let (width, fill): (usize, Option<char>) = from_args(args)?;
    if width > MAX_PADDED {
        return Err(invalid(format!(
            "{how}: expected a width up to {MAX_PADDED}, found {width}"
        )));
    }
    let fill = fill.unwrap_or(' ');
    Ok(match how {
        "ljust" => aligned(s, width, Align::Left, fill),
        "rjust" => aligned(s, width, Align::Right, fill),
        // As CPython does: an odd one goes to the left if the width is odd too.
        "center" => {
            let missing = width.saturating_sub(s.chars().count());
            let right = width - missing / 2 - (missing & width & 1);
            aligned(
                &aligned(s, right, Align::Left, fill),
                width,
                Align::Right,
                fill,
            )
        }
        _ => {
            let (sign, digits) = s.split_at(usize::from(s.starts_with(['+', '-'])));
            let width = width.saturating_sub(sign.len());
            format!("{sign}{}", aligned(digits, width, Align::Right, '0'))
        }
    })
}

/// On which side of its place a text stands.
#[derive(Clone, Copy)]
pub(super) enum Align {
    Left,
    Right,
    /// In the middle: one character that is over goes to the right.
    Both,
}

/// The text in a place of `width` characters.
pub(super) fn aligned(text: &str, width: usize, side: Align, fill: char) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = match side {
        Align::Left => 0,
        Align::Right => missing,
        Align::Both => missing / 2,
    };
    let fill = |n: usize| fill.to_string().repeat(n);
    format!("{}{text}{}", fill(left), fill(missing - left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_pythons() {
        let check = |x: f64, expected: &str| assert_eq!(python_float(x), expected);
        check(2.5, "2.5");
        check(3.0, "3.0");
        check(-0.0, "-0.0");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(1.5e300, "1.5e+300");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(-1.25e-7, "-1.25e-07");
        check(f64::INFINITY, "inf");
        check(f64::NAN, "nan");
    }
}
