//! Integers that JSON values in Rust do not hold and Python's do, those of more than 64 bits: a model is to see the
//! digits that it wrote in an earlier call, and those of its tools' schemas.
//!
//! In a JSON text, [`marked`] puts such an integer into an object with a key of its own. The template engine gets
//! the integer from it, [`unmarked`] puts the digits back into a text, and [`numbers`] makes a number of it again for
//! code that computes. `-0`, which is the integer 0 in Python and a float in Rust, becomes 0.

use minijinja::value::{Object, ObjectRepr, Value as Jinja};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

const KEY: &str = "$nq::integer";
const OPEN: &str = "{\"$nq::integer\":\"";
const CLOSE: &str = "\"}";

/// Most digits, as in Python, whose conversions are bounded too.
const MAX_DIGITS: usize = 4300;

/// The JSON text with integers of more than 64 bits as objects that hold their digits, and `-0` as 0.
pub fn marked(json: &[u8]) -> Cow<'_, [u8]> {
    let (mut out, mut copied, mut at) = (Vec::new(), 0, 0);
    while let Some(byte) = json.get(at) {
        let rest = &json[at..];
        at += match byte {
            b'"' => string(rest),
            b'-' | b'0'..=b'9' => {
                let in_number = |b: &&u8| b.is_ascii_digit() || b"+-.eE".contains(b);
                let length = rest.iter().take_while(in_number).count();
                let number = &rest[..length];
                let parts = match number {
                    b"-0" => Some(["", "0", ""].map(str::as_bytes)),
                    _ if is_long(number) => Some([OPEN.as_bytes(), number, CLOSE.as_bytes()]),
                    _ => None,
                };
                if let Some(parts) = parts {
                    out.extend_from_slice(&json[copied..at]);
                    out.extend(parts.concat());
                    copied = at + length;
                }
                length
            }
            _ => 1,
        };
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    out.extend_from_slice(&json[copied..]);
    Cow::Owned(out)
}

/// The JSON text of a value from a marked text, with the digits of its integers in their places.
pub fn unmarked(json: String) -> String {
    let mut parts = json.split(OPEN);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(CLOSE) {
            Some((digits, rest)) if is_long(digits.as_bytes()) => {
                out += digits;
                out += rest;
            }
            _ => {
                out += OPEN;
                out += part;
            }
        }
    }
    out
}

/// A value from a marked text with its integers as numbers, which are floats if they have more than 64 bits.
pub fn numbers(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(numbers).collect(),
        Value::Object(map) => match digits(map) {
            Some(digits) => digits.parse::<f64>().map_or(Value::Null, Value::from),
            None => map.iter().map(|(k, v)| (k.clone(), numbers(v))).collect(),
        },
        other => other.clone(),
    }
}

/// The digits of the integer that a marked object is.
fn digits(map: &Map<String, Value>) -> Option<&str> {
    let only = map.get(KEY).filter(|_| map.len() == 1);
    only.and_then(Value::as_str)
        .filter(|digits| is_long(digits.as_bytes()))
}

/// Bytes of the string that a JSON text begins with, with its quotes; all if it does not end.
fn string(json: &[u8]) -> usize {
    let mut escaped = false;
    let end = json.iter().skip(1).position(|byte| {
        let ends = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    });
    end.map_or(json.len(), |end| end + 2)
}

/// True of an integer of more than 64 bits, written as JSON writes it.
fn is_long(number: &[u8]) -> bool {
    let digits = number.strip_prefix(b"-").unwrap_or(number);
    let Ok(text) = std::str::from_utf8(number) else {
        return false;
    };
    (19..=MAX_DIGITS).contains(&digits.len())
        && digits[0] != b'0'
        && digits.iter().all(u8::is_ascii_digit)
        && text.parse::<i64>().is_err()
        && text.parse::<u64>().is_err()
}

/// A value from a marked text as templates see it.
pub(super) struct Unmarked<'a>(pub &'a Value);

impl Serialize for Unmarked<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Array(list) => serializer.collect_seq(list.iter().map(Unmarked)),
            Value::Object(map) => match digits(map) {
                Some(digits) => integer(digits).serialize(serializer),
                None => serializer.collect_map(map.iter().map(|(k, v)| (k, Unmarked(v)))),
            },
            other => other.serialize(serializer),
        }
    }
}

/// An integer with which the engine computes if it fits 128 bits.
fn integer(digits: &str) -> Jinja {
    let signed = digits.parse::<i128>().map(Jinja::from);
    let fitting = signed.or_else(|_| digits.parse::<u128>().map(Jinja::from));
    fitting.unwrap_or_else(|_| Jinja::from_object(Digits(digits.to_owned())))
}

/// An integer that is only printed.
#[derive(Debug)]
pub(super) struct Digits(String);

impl Object for Digits {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_integers_are_marked_and_others_left() {
        let json =
            br#"[18446744073709551616, -9223372036854775809, {"a\"1": 12345678901234567890123}]"#;
        let marked_text = marked(json);
        let value: Value = serde_json::from_slice(&marked_text).unwrap();
        assert_eq!(
            unmarked(value.to_string()),
            r#"[18446744073709551616,-9223372036854775809,{"a\"1":12345678901234567890123}]"#
        );
        let long = "9".repeat(MAX_DIGITS + 1);
        for same in [
            "[18446744073709551615, -9223372036854775808]",
            r#"{"18446744073709551616": "\"18446744073709551616"}"#,
            "[18446744073709551616.0, 1e30, 123456789012345678901e5]",
            "[000000000000000000000000001]",
            "\"18446744073709551616",
            &long,
        ] {
            assert_eq!(marked(same.as_bytes()), same.as_bytes());
        }
        let zeros = marked(br#"[-0, -0.0, -0e1, -01, {"-0": -0}, "-0"]"#).into_owned();
        assert_eq!(zeros, br#"[0, -0.0, -0e1, -01, {"-0": 0}, "-0"]"#);
        let schema = r#"{"maximum": 18446744073709551616, "enum": [-9223372036854775809, 1]}"#;
        let plain: Value = serde_json::from_str(schema).unwrap();
        let value: Value = serde_json::from_slice(&marked(schema.as_bytes())).unwrap();
        assert_ne!(value, plain);
        assert_eq!(numbers(&value), plain);
        for same in [
            r#"{"$nq::integer":"5"}"#,
            r#"{"$nq::integer":"18446744073709551616"#,
            r#""{\"$nq::integer\":\"18446744073709551616\"}""#,
        ] {
            assert_eq!(unmarked(same.to_owned()), same);
        }
    }
}
