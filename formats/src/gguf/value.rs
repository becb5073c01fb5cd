//! Metadata values, and reading them from untrusted bytes.

use crate::error::{Error, Result};
use bytes::Bytes;
use std::fmt;
use std::path::Path;

/// Longest key or tensor name that the format allows, in bytes.
const MAX_NAME: u64 = 65_535;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Type 0.
    U8(u8),
    /// Type 1.
    I8(i8),
    /// Type 2.
    U16(u16),
    /// Type 3.
    I16(i16),
    /// Type 4.
    U32(u32),
    /// Type 5.
    I32(i32),
    /// Type 6.
    F32(f32),
    /// Type 7.
    Bool(bool),
    /// Type 8; UTF-8 by the format, checked by [`Value::as_str`].
    String(Bytes),
    /// Type 9.
    Array(Array),
    /// Type 10.
    U64(u64),
    /// Type 11.
    I64(i64),
    /// Type 12.
    F64(f64),
}

/// Numbers of the value types in files.
pub(super) mod kind {
    pub(crate) const U8: u32 = 0;
    pub(crate) const I8: u32 = 1;
    pub(crate) const U16: u32 = 2;
    pub(crate) const I16: u32 = 3;
    pub(crate) const U32: u32 = 4;
    pub(crate) const I32: u32 = 5;
    pub(crate) const F32: u32 = 6;
    pub(crate) const BOOL: u32 = 7;
    pub(crate) const STRING: u32 = 8;
    pub(crate) const ARRAY: u32 = 9;
    pub(crate) const U64: u32 = 10;
    pub(crate) const I64: u32 = 11;
    pub(crate) const F64: u32 = 12;
}

/// Bytes of a value of fixed size.
fn size(kind: u32) -> Option<u64> {
    match kind {
        kind::U8 | kind::I8 | kind::BOOL => Some(1),
        kind::U16 | kind::I16 => Some(2),
        kind::U32 | kind::I32 | kind::F32 => Some(4),
        kind::U64 | kind::I64 | kind::F64 => Some(8),
        _ => None,
    }
}

impl Value {
    /// The value as a non-negative integer of any width, if it is one.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::U64(n) => Some(n),
            Value::I8(n) => n.try_into().ok(),
            Value::I16(n) => n.try_into().ok(),
            Value::I32(n) => n.try_into().ok(),
            Value::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// The value as a float, if it is one.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a boolean, if it is one.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The value as text, if it is a UTF-8 string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// The value as an array, if it is one.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl Value {
    /// Appends the type and value in the format of files.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let mut put = |kind: u32, bytes: &[u8]| {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Value::U8(v) => put(kind::U8, &v.to_le_bytes()),
            Value::I8(v) => put(kind::I8, &v.to_le_bytes()),
            Value::U16(v) => put(kind::U16, &v.to_le_bytes()),
            Value::I16(v) => put(kind::I16, &v.to_le_bytes()),
            Value::U32(v) => put(kind::U32, &v.to_le_bytes()),
            Value::I32(v) => put(kind::I32, &v.to_le_bytes()),
            Value::F32(v) => put(kind::F32, &v.to_le_bytes()),
            Value::U64(v) => put(kind::U64, &v.to_le_bytes()),
            Value::I64(v) => put(kind::I64, &v.to_le_bytes()),
            Value::F64(v) => put(kind::F64, &v.to_le_bytes()),
            Value::Bool(v) => put(kind::BOOL, &[u8::from(*v)]),
            Value::String(s) => {
                put(kind::STRING, &(s.len() as u64).to_le_bytes());
                out.extend(&s[..]);
            }
            Value::Array(a) => {
                put(kind::ARRAY, &a.element.to_le_bytes());
                out.extend(a.count.to_le_bytes());
                out.extend(&a.bytes[..]);
            }
        }
    }
}

impl From<&str> for Value {
    fn from(s: &str) -> Self {
        Value::String(Bytes::copy_from_slice(s.as_bytes()))
    }
}

impl From<u32> for Value {
    fn from(v: u32) -> Self {
        Value::U32(v)
    }
}

impl From<f32> for Value {
    fn from(v: f32) -> Self {
        Value::F32(v)
    }
}

impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Value::Bool(v)
    }
}

impl From<Array> for Value {
    fn from(a: Array) -> Self {
        Value::Array(a)
    }
}

/// For messages: long strings are cut, arrays only described.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 80;
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::Array(a) => a.fmt(f),
            Value::String(s) if s.len() <= SHOWN => write!(f, "\"{}\"", s.escape_ascii()),
            Value::String(s) => {
                let (head, n) = (s[..SHOWN].escape_ascii(), s.len());
                write!(f, "\"{head}...\" ({n} bytes)")
            }
        }
    }
}

/// An array, still in the file's bytes; its extent has been checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    element: u32,
    count: u64,
    bytes: Bytes,
}

impl Array {
    /// An array of strings.
    pub fn of_strings<S: AsRef<str>>(strings: &[S]) -> Self {
        let mut bytes = Vec::new();
        for s in strings {
            bytes.extend((s.as_ref().len() as u64).to_le_bytes());
            bytes.extend(s.as_ref().as_bytes());
        }
        Array {
            element: kind::STRING,
            count: strings.len() as u64,
            bytes: bytes.into(),
        }
    }

    /// An array of 32-bit integers.
    pub fn of_i32s(values: &[i32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Array {
            element: kind::I32,
            count: values.len() as u64,
            bytes: bytes.into(),
        }
    }

    /// An array of 64-bit integers of 0 or more.
    pub(crate) fn of_u64s(values: &[u64]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Array {
            element: kind::U64,
            count: values.len() as u64,
            bytes: bytes.into(),
        }
    }

    /// An array of 32-bit floats.
    pub(crate) fn of_f32s(values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Array {
            element: kind::F32,
            count: values.len() as u64,
            bytes: bytes.into(),
        }
    }

    /// An array of truth values.
    pub(crate) fn of_bools(values: &[bool]) -> Self {
        let bytes: Vec<u8> = values.iter().map(|v| u8::from(*v)).collect();
        Array {
            element: kind::BOOL,
            count: values.len() as u64,
            bytes: bytes.into(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// True if the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements' bytes, if they are strings.
    pub fn strings(&self) -> Option<impl Iterator<Item = &[u8]>> {
        let mut rest = (self.element == kind::STRING).then_some(&self.bytes[..])?;
        Some(std::iter::from_fn(move || {
            let (length, tail) = rest.split_first_chunk::<8>()?;
            let (string, tail) = tail.split_at(u64::from_le_bytes(*length) as usize);
            rest = tail;
            Some(string)
        }))
    }

    /// The elements, if they are 32-bit integers.
    pub(crate) fn i32s(&self) -> Option<impl Iterator<Item = i32>> {
        let words = matches!(self.element, kind::U32 | kind::I32).then_some(&self.bytes)?;
        Some(
            words
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| i32::from_le_bytes(*b)),
        )
    }

    /// The elements, if they are integers of any width from 32 bits on, and none is negative.
    pub(crate) fn integers(&self) -> Option<Vec<u64>> {
        let bytes = &self.bytes[..];
        let words = || bytes.as_chunks::<4>().0.iter();
        let longs = || bytes.as_chunks::<8>().0.iter();
        match self.element {
            kind::U32 => Some(words().map(|b| u32::from_le_bytes(*b).into()).collect()),
            kind::U64 => Some(longs().map(|b| u64::from_le_bytes(*b)).collect()),
            kind::I32 => words()
                .map(|b| i32::from_le_bytes(*b).try_into().ok())
                .collect(),
            kind::I64 => longs()
                .map(|b| i64::from_le_bytes(*b).try_into().ok())
                .collect(),
            _ => None,
        }
    }

    /// The elements, if they are booleans.
    pub(crate) fn bools(&self) -> Option<impl Iterator<Item = bool>> {
        let bytes = (self.element == kind::BOOL).then_some(&self.bytes)?;
        Some(bytes.iter().map(|b| *b != 0))
    }

    /// The elements, if they are 32-bit floats.
    pub fn f32s(&self) -> Option<impl Iterator<Item = f32>> {
        let words = (self.element == kind::F32).then_some(&self.bytes)?;
        Some(
            words
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b)),
        )
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64",
            "f64",
        ];
        let name = names[self.element as usize]; // checked when it was read
        write!(f, "an array of {} {name}", self.count)
    }
}

/// Reads values from the front of a file; checks every length against the bytes left.
pub(super) struct ValueReader<'a> {
    path: &'a Path,
    bytes: Bytes,
    at: usize,
}

impl<'a> ValueReader<'a> {
    pub(super) fn new(path: &'a Path, bytes: Bytes) -> Self {
        ValueReader { path, bytes, at: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// Skips `n` bytes and returns the position where they start.
    fn advance(&mut self, what: &str, n: u64) -> Result<usize> {
        if n > self.left() {
            let found = format!(
                "{} before the file ends, as after an incomplete download",
                self.left()
            );
            return Err(malformed(self.path, what, format!("{n} bytes"), found));
        }
        let start = self.at;
        self.at += n as usize;
        Ok(start)
    }

    pub(super) fn take(&mut self, what: &str, n: u64) -> Result<&[u8]> {
        let start = self.advance(what, n)?;
        Ok(&self.bytes[start..self.at])
    }

    fn chunk<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(what, N as u64)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.chunk(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.chunk(what).map(u64::from_le_bytes)
    }

    /// Reads a count of items of at least `each` bytes.
    pub(super) fn count(&mut self, what: &str, each: u64) -> Result<u64> {
        let n = self.u64(what)?;
        let most = self.left() / each;
        if n > most {
            let expected = format!("at most {most}, which would fill the file");
            return Err(malformed(self.path, what, expected, n.to_string()));
        }
        Ok(n)
    }

    /// Reads a key or tensor name.
    pub(super) fn name(&mut self, what: &str) -> Result<String> {
        let path = self.path;
        let n = self.u64(what)?;
        if n > MAX_NAME {
            let expected = format!("at most {MAX_NAME} bytes");
            return Err(malformed(path, what, expected, n.to_string()));
        }
        let bytes = self.take(what, n)?;
        match std::str::from_utf8(bytes) {
            Ok(name) => Ok(name.into()),
            Err(e) => Err(malformed(path, what, "UTF-8".into(), e.to_string())),
        }
    }

    fn string(&mut self, key: &str) -> Result<Bytes> {
        let n = self.u64(key)?;
        let start = self.advance(key, n)?;
        Ok(self.bytes.slice(start..self.at))
    }

    /// Reads the type and value under `key`.
    pub(super) fn value(&mut self, key: &str) -> Result<Value> {
        let kind = self.u32(key)?;
        Ok(match kind {
            kind::U8 => Value::U8(self.chunk::<1>(key)?[0]),
            kind::I8 => Value::I8(self.chunk::<1>(key)?[0] as i8),
            kind::U16 => Value::U16(u16::from_le_bytes(self.chunk(key)?)),
            kind::I16 => Value::I16(i16::from_le_bytes(self.chunk(key)?)),
            kind::U32 => Value::U32(self.u32(key)?),
            kind::I32 => Value::I32(self.u32(key)? as i32),
            kind::F32 => Value::F32(f32::from_le_bytes(self.chunk(key)?)),
            kind::U64 => Value::U64(self.u64(key)?),
            kind::I64 => Value::I64(self.u64(key)? as i64),
            kind::F64 => Value::F64(f64::from_le_bytes(self.chunk(key)?)),
            kind::BOOL => match self.chunk::<1>(key)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                b => {
                    let expected = "0 or 1 for a boolean".into();
                    return Err(malformed(self.path, key, expected, b.to_string()));
                }
            },
            kind::STRING => Value::String(self.string(key)?),
            kind::ARRAY => Value::Array(self.array(key)?),
            other => {
                let expected = "a value type from 0 to 12".into();
                return Err(malformed(self.path, key, expected, other.to_string()));
            }
        })
    }

    fn array(&mut self, key: &str) -> Result<Array> {
        let element = self.u32(key)?;
        let count = self.u64(key)?;
        let start = self.at;
        match size(element) {
            Some(size) => {
                // A product beyond 64 bits is also longer than any file.
                self.advance(key, count.saturating_mul(size))?;
            }
            None if element == kind::STRING => {
                for _ in 0..count {
                    let n = self.u64(key)?;
                    self.advance(key, n)?;
                }
            }
            None => {
                let expected = "array elements of a scalar type or strings".into();
                let found = format!("type {element}");
                return Err(malformed(self.path, key, expected, found));
            }
        }
        let bytes = self.bytes.slice(start..self.at);
        Ok(Array {
            element,
            count,
            bytes,
        })
    }
}

/// The error for `what` in a file, with what is expected and found there.
pub(super) fn malformed(path: &Path, what: &str, expected: String, found: String) -> Error {
    Error::Malformed {
        path: path.into(),
        what: what.into(),
        expected,
        found,
    }
}
