//! Thrift's compact protocol, as far as Parquet's metadata needs it:
//! <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>.

use super::{Parsed, malformed};

/// A value of any type; strings stay where they are.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Bool(bool),
    Int(i64),
    Double,
    Bytes(&'a [u8]),
    List(Vec<Value<'a>>),
    Map,
    Struct(Vec<(i16, Value<'a>)>),
}

/// Structs and lists within each other; Parquet's metadata has 6.
const MAX_DEPTH: usize = 16;

impl<'a> Value<'a> {
    /// A struct's field.
    pub(super) fn get(&self, id: i16) -> Option<&Value<'a>> {
        match self {
            Value::Struct(fields) => fields.iter().find(|f| f.0 == id).map(|f| &f.1),
            _ => None,
        }
    }

    pub(super) fn field(&self, id: i16, what: &'static str) -> Parsed<&Value<'a>> {
        match self.get(id) {
            Some(value) => Ok(value),
            None => malformed(what, "a value", "none"),
        }
    }

    pub(super) fn as_int(&self) -> Option<i64> {
        match self {
            Value::Int(i) => Some(*i),
            _ => None,
        }
    }

    pub(super) fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(b) => Some(*b),
            _ => None,
        }
    }

    pub(super) fn bytes(&self) -> Option<&'a [u8]> {
        match self {
            Value::Bytes(b) => Some(b),
            _ => None,
        }
    }

    pub(super) fn int(&self, id: i16, what: &'static str) -> Parsed<i64> {
        match self.field(id, what)?.as_int() {
            Some(i) => Ok(i),
            None => malformed(what, "a number", "another type"),
        }
    }

    /// A field that counts something.
    pub(super) fn count(&self, id: i16, what: &'static str) -> Parsed<usize> {
        let n = self.int(id, what)?;
        match u32::try_from(n) {
            Ok(n) => Ok(n as usize),
            Err(_) => malformed(what, "a count", n.to_string()),
        }
    }

    pub(super) fn list(&self, id: i16, what: &'static str) -> Parsed<&[Value<'a>]> {
        match self.field(id, what)? {
            Value::List(values) => Ok(values),
            _ => malformed(what, "a list", "another type"),
        }
    }
}

/// Reads a struct at the start of `bytes`; also the bytes it took.
pub(super) fn read_struct(bytes: &[u8]) -> Parsed<(Value<'_>, usize)> {
    let mut reader = Reader { rest: bytes };
    let value = reader.structure(0)?;
    Ok((value, bytes.len() - reader.rest.len()))
}

/// An unsigned number of 7 bits a byte, low bits first; also the bytes it took.
pub(super) fn varint(bytes: &[u8]) -> Parsed<(u64, usize)> {
    let mut value = 0u64;
    for (i, &b) in bytes.iter().take(10).enumerate() {
        value |= u64::from(b & 0x7f) << (7 * i).min(63);
        if b < 0x80 {
            return Ok((value, i + 1));
        }
    }
    malformed("number", "at most 10 bytes", "more, or the end")
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Parsed<u8> {
        match self.rest.split_first() {
            Some((&b, rest)) => {
                self.rest = rest;
                Ok(b)
            }
            None => malformed("metadata", "more bytes", "the end"),
        }
    }

    fn take(&mut self, n: usize) -> Parsed<&'a [u8]> {
        match self.rest.split_at_checked(n) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => malformed(
                "metadata",
                format!("{n} bytes"),
                self.rest.len().to_string(),
            ),
        }
    }

    fn unsigned(&mut self) -> Parsed<u64> {
        let (value, used) = varint(self.rest)?;
        self.rest = &self.rest[used..];
        Ok(value)
    }

    /// Zigzag: 0, -1, 1, -2, ...
    fn signed(&mut self) -> Parsed<i64> {
        let n = self.unsigned()?;
        Ok((n >> 1) as i64 ^ -((n & 1) as i64))
    }

    fn length(&mut self) -> Parsed<usize> {
        let n = self.unsigned()?;
        // Every element takes at least a byte, so no honest length exceeds what is left.
        match usize::try_from(n) {
            Ok(n) if n <= self.rest.len() => Ok(n),
            _ => malformed(
                "metadata",
                format!("at most {}", self.rest.len()),
                n.to_string(),
            ),
        }
    }

    fn structure(&mut self, depth: usize) -> Parsed<Value<'a>> {
        let mut fields = Vec::new();
        let mut id = 0i16;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(Value::Struct(fields));
            }
            id = match head >> 4 {
                0 => self.signed()? as i16,
                delta => id.wrapping_add(i16::from(delta)),
            };
            let value = match head & 0x0f {
                1 => Value::Bool(true),
                2 => Value::Bool(false),
                kind => self.value(kind, depth + 1)?,
            };
            fields.push((id, value));
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Parsed<Value<'a>> {
        if depth > MAX_DEPTH {
            return malformed("metadata", format!("{MAX_DEPTH} levels"), "more");
        }
        Ok(match kind {
            1 | 2 => Value::Bool(self.byte()? == 1), // in a list
            3 => Value::Int(i64::from(self.byte()? as i8)),
            4..=6 => Value::Int(self.signed()?),
            7 => {
                self.take(8)?;
                Value::Double
            }
            8 => {
                let n = self.length()?;
                Value::Bytes(self.take(n)?)
            }
            9 | 10 => {
                let head = self.byte()?;
                let n = match head >> 4 {
                    15 => self.length()?,
                    short => usize::from(short),
                };
                let values = (0..n).map(|_| self.value(head & 0x0f, depth + 1));
                Value::List(values.collect::<Parsed<_>>()?)
            }
            11 => {
                let n = self.length()?;
                if n > 0 {
                    let kinds = self.byte()?;
                    for _ in 0..n {
                        self.value(kinds >> 4, depth + 1)?;
                        self.value(kinds & 0x0f, depth + 1)?;
                    }
                }
                Value::Map
            }
            12 => self.structure(depth)?,
            other => return malformed("metadata", "a type from 1 to 12", other.to_string()),
        })
    }
}
