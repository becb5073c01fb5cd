//! The quantization settings of a config.json.

use crate::checkpoint::Source;
use crate::error::{Error, Result};
use crate::files::CONFIG;
use crate::keys;
use crate::left_over::LeftOver;
use crate::scheme::{Bits, Group};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// The quantization settings of a config.json; errors name the key.
/// They note the keys that were asked for.
pub(crate) struct QuantizationConfig<'a> {
    source: &'a Source,
    value: &'a Value,
    asked: RefCell<BTreeSet<&'static str>>,
}

impl<'a> QuantizationConfig<'a> {
    pub(crate) fn new(source: &'a Source) -> Self {
        static NULL: Value = Value::Null;
        let value = source.quantization().unwrap_or(&NULL);
        QuantizationConfig {
            source,
            value,
            asked: RefCell::default(),
        }
    }

    /// The keys that nobody asked for and that are not among those that only record how the file was made.
    pub(crate) fn left_over(&self, records: &[&str]) -> Vec<LeftOver> {
        let asked = self.asked.borrow();
        let known =
            |key: &str| key == "quant_method" || asked.contains(key) || records.contains(&key);
        let entries = self.value.as_object().into_iter().flatten();
        let unknown = entries.filter(|(key, _)| !known(key));
        keys::unknown("config.json: quantization_config", keys::UNUSED, unknown)
    }

    /// Settings of a part of these.
    pub(crate) fn within(&self, value: &'a Value) -> Self {
        QuantizationConfig {
            source: self.source,
            value,
            asked: RefCell::default(),
        }
    }

    pub(crate) fn malformed(&self, key: &str, expected: &str) -> Error {
        Error::Malformed {
            path: self.source.files().path(CONFIG),
            what: format!("quantization_config: {key}"),
            expected: expected.into(),
            found: self
                .value
                .get(key)
                .map_or("no such key".into(), Value::to_string),
        }
    }

    pub(crate) fn unsupported(&self, what: String, why: &str) -> Error {
        Error::Unsupported {
            path: self.source.files().path(CONFIG),
            what,
            why: why.into(),
        }
    }

    /// The key's value; JSON null counts as absent.
    pub(crate) fn get(&self, key: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key);
        self.value.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn str(&self, key: &'static str) -> Result<Option<&'a str>> {
        let read = |v: &'a Value| v.as_str().ok_or_else(|| self.malformed(key, "a string"));
        self.get(key).map(read).transpose()
    }

    pub(crate) fn bool(&self, key: &'static str) -> Result<Option<bool>> {
        let read = |v: &Value| {
            v.as_bool()
                .ok_or_else(|| self.malformed(key, "true or false"))
        };
        self.get(key).map(read).transpose()
    }

    /// The number of bits under `key`: 4 or 8.
    pub(crate) fn bits(&self, key: &'static str) -> Result<Bits> {
        let n = self.get(key).and_then(Value::as_u64);
        let n = n.ok_or_else(|| self.malformed(key, "a number of bits"))?;
        // Other widths are packed differently in these formats.
        let known = [Bits::B4, Bits::B8].into_iter();
        let bits = known.into_iter().find(|b| b.width() as u64 == n);
        bits.ok_or_else(|| self.unsupported(format!("{n} bits"), "nq runs 4 and 8"))
    }

    /// A group size; -1 means one group per row.
    pub(crate) fn group(&self, key: &'static str) -> Result<Group> {
        let size = self.get(key).and_then(Value::as_i64);
        match size.map(u32::try_from) {
            Some(Ok(n)) if n > 0 => Ok(Group::Size(n)),
            Some(Err(_)) if size == Some(-1) => Ok(Group::Channel),
            _ => Err(self.malformed(key, "a group size above 0, or -1")),
        }
    }
}
