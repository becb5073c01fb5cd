//! JSON objects of a checkpoint's files, read so that every error names the file and the key, and that no key goes
//! unnoticed.

use crate::error::{Error, Result};
use crate::keys;
use crate::left_over::LeftOver;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

/// Dimensions above this are rejected: they would overflow products elsewhere.
pub(crate) const MAX_DIM: u64 = 1 << 28;

/// A JSON object whose accessors return errors with the names of the file and the key.
/// They note the keys that were asked for.
pub(crate) struct Object<'a> {
    pub(crate) path: &'a Path,
    map: Map<String, Value>,
    asked: RefCell<BTreeSet<String>>,
    /// What is left over of objects within it.
    within: RefCell<Vec<LeftOver>>,
}

impl<'a> Object<'a> {
    pub(crate) fn parse(path: &'a Path, json: &[u8]) -> Result<Self> {
        json_object(path, json).map(|map| Self::of(path, map))
    }

    fn of(path: &'a Path, map: Map<String, Value>) -> Self {
        Object {
            path,
            map,
            asked: RefCell::default(),
            within: RefCell::default(),
        }
    }

    /// The object under `key`, if any. What it leaves over is noted once it was read by `read`.
    ///
    /// # Errors
    /// Errors of `read`, and for another value.
    pub(crate) fn object<T>(
        &self,
        key: &str,
        read: impl FnOnce(&Object<'a>) -> Result<T>,
    ) -> Result<Option<T>> {
        let map = self.typed(key, "an object", |v| v.as_object().cloned())?;
        // An empty one counts as absent, as in transformers.
        let Some(map) = map.filter(|map| !map.is_empty()) else {
            return Ok(None);
        };
        let object = Object::of(self.path, map);
        let value = read(&object)?;
        let left = object.left_over(&format!("config.json: {key}"));
        self.within.borrow_mut().extend(left);
        Ok(Some(value))
    }

    /// Notes that a value changes nothing.
    pub(crate) fn note(&self, left: LeftOver) {
        self.within.borrow_mut().push(left);
    }

    /// The keys that nobody asked for; `file` is their place in messages.
    pub(crate) fn left_over(&self, file: &str) -> Vec<LeftOver> {
        self.left_over_but(file, keys::UNUSED)
    }

    /// The keys that nobody asked for and that are not known to be `unused`.
    pub(crate) fn left_over_but(&self, file: &str, unused: &[keys::KeyUse]) -> Vec<LeftOver> {
        let asked = self.asked.borrow();
        let unasked = self.map.iter().filter(|(k, _)| !asked.contains(*k));
        let mut left = keys::unknown(file, unused, unasked);
        left.append(&mut self.within.borrow_mut());
        left
    }

    /// A key that nobody asked for and whose value is neither empty nor off.
    pub(crate) fn unasked(&self) -> Option<(&str, &Value)> {
        let asked = self.asked.borrow();
        let empty = |v: &Value| match v {
            Value::Null => true,
            Value::Bool(on) => !on,
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Number(_) | Value::String(_) => false,
        };
        let mut unasked = self.map.iter().filter(|(k, _)| !asked.contains(*k));
        let found = unasked.find(|(_, v)| !empty(v));
        found.map(|(k, v)| (k.as_str(), v))
    }

    pub(crate) fn bad(&self, key: &str, expected: String, found: String) -> Error {
        Error::Malformed {
            path: self.path.into(),
            what: key.into(),
            expected,
            found,
        }
    }

    pub(crate) fn unsupported(&self, what: String, why: &str) -> Error {
        Error::Unsupported {
            path: self.path.into(),
            what,
            why: why.into(),
        }
    }

    /// The key's value; JSON null counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match read(v) {
                Some(t) => Ok(Some(t)),
                None => Err(self.bad(key, expected.into(), v.to_string())),
            },
        }
    }

    pub(crate) fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a non-negative integer", Value::as_u64)
    }

    pub(crate) fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn str(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |v| v.as_str().map(String::from))
    }

    /// A list of strings; empty if absent.
    pub(crate) fn strings(&self, key: &str) -> Result<Vec<String>> {
        let string = |v: &Value| v.as_str().map(String::from);
        let read = |v: &Value| v.as_array()?.iter().map(string).collect();
        Ok(self
            .typed(key, "a list of strings", read)?
            .unwrap_or_default())
    }

    pub(crate) fn dim(&self, key: &str) -> Result<usize> {
        match self.u64(key)? {
            Some(n) if (1..=MAX_DIM).contains(&n) => Ok(n as usize),
            Some(n) => Err(self.bad(key, format!("1 to {MAX_DIM}"), n.to_string())),
            None => Err(self.bad(key, "an integer".into(), "no such key".into())),
        }
    }
}

/// The contents of a JSON file that holds an object.
///
/// # Errors
/// [`Error::Malformed`] for anything else.
pub(crate) fn json_object(path: &Path, json: &[u8]) -> Result<Map<String, Value>> {
    let malformed = |found: String| Error::Malformed {
        path: path.into(),
        what: "contents".into(),
        expected: "a JSON object".into(),
        found,
    };
    if json.starts_with(b"\xEF\xBB\xBF") {
        let found = "a byte order mark before it, which JSON must not have";
        return Err(malformed(found.into()));
    }
    match serde_json::from_slice(json) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(malformed(kind(&other).into())),
        Err(e) => Err(malformed(e.to_string())),
    }
}

fn kind(v: &Value) -> &'static str {
    match v {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
