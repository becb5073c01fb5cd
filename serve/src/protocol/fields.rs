//! The fields of a request's JSON objects, read through the table that says what nq does with each.

use super::reading::Reading;
use super::table::{Table, Use};
use crate::error::ApiError;
use nq_runtime::chat_template::integers;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::Arc;

/// The fields of an object that have not been read.
#[derive(Clone, Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Prefix of field names in messages, for a nested object: empty, or `messages[0].`.
    place: String,
    table: &'static Table,
    reading: Arc<Reading>,
}

/// What an object's `type` makes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    /// It is read as an object of this type.
    Served(String),
    /// It is dropped: no answer changes.
    Dropped,
    /// It is left out: its type, and what it is in words.
    LeftOut(String, &'static str),
}

impl Fields {
    /// The fields of a request's body, under no table yet.
    ///
    /// # Errors
    /// A body that is not a JSON object.
    pub(crate) fn parse(body: &[u8], reading: Arc<Reading>) -> Result<Self, ApiError> {
        // Some Windows programs write this mark before UTF-8.
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Fields {
                map: with_integers(map, body),
                place: String::new(),
                table: Table::named("openai"),
                reading,
            }),
            Ok(_) => Err(ApiError::invalid("the body: expected a JSON object")),
            Err(e) => Err(ApiError::invalid(format!("the body is not JSON: {e}"))),
        }
    }

    /// The fields of an object inside this request, at `place`, by the table of that name.
    ///
    /// # Errors
    /// A value that is not an object; errors of [`Fields::under`].
    pub(crate) fn of(
        value: Value,
        place: &str,
        table: &str,
        reading: &Arc<Reading>,
    ) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Fields {
                map,
                place: format!("{place}."),
                table: Table::named(table),
                reading: Arc::clone(reading),
            }
            .under(table),
            _ => Err(ApiError::field(place, "expected an object")),
        }
    }

    /// Drops, notes and refuses fields as the table of that name says; the served ones remain to be read.
    ///
    /// # Errors
    /// A field that is refused, by name.
    pub(crate) fn under(mut self, table: &str) -> Result<Self, ApiError> {
        self.table = Table::named(table);
        for (field, value) in std::mem::take(&mut self.map) {
            if value.is_null() {
                continue;
            }
            let name = self.name(&field);
            match self.table.field(&field) {
                Use::Served => {
                    self.map.insert(field, value);
                }
                Use::NoEffect => {}
                Use::Only(values) if values.iter().any(|v| same(v, &value)) => {}
                // Clients that send all their settings send these too.
                Use::Refused(_) if asks_nothing(&value) => {}
                Use::Only([]) => {
                    let why = "nq serves null alone";
                    return Err(ApiError::unsupported(&name, why));
                }
                Use::Only(values) => {
                    let values: Vec<String> = values.iter().map(Value::to_string).collect();
                    let values = values.join(" or ");
                    let why = format!("nq serves {values} alone, found {}", short(&value));
                    return Err(ApiError::unsupported(&name, &why));
                }
                Use::LeftOut(words) => self.reading.left_out_and_told(&name, "", words),
                Use::Refused(why) | Use::RefusedRest(why) => {
                    return Err(ApiError::unsupported(&name, why));
                }
                Use::Unknown => self.reading.unknown(&name)?,
            }
        }
        Ok(self)
    }

    /// The reading that these fields belong to.
    pub(crate) fn reading(&self) -> &Arc<Reading> {
        &self.reading
    }

    /// A field's name with the prefix.
    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.place)
    }

    /// The place of the object itself.
    pub(crate) fn place(&self) -> &str {
        self.place.strip_suffix('.').unwrap_or(&self.place)
    }

    /// True if the table serves such a field.
    pub(crate) fn has(&self, field: &str) -> bool {
        self.table.field(field) == Use::Served
    }

    /// Takes `type` and says what the table makes of it; `otherwise` is the type of objects without one.
    /// What is left out or unknown is noted, except for the words to the model.
    ///
    /// # Errors
    /// A type that is refused.
    pub(crate) fn kind(&mut self, otherwise: &str) -> Result<ObjectKind, ApiError> {
        let kind: String = self.take("type")?.unwrap_or_else(|| otherwise.to_owned());
        let name = self.name("type");
        let left_out = match self.table.kind(&kind) {
            Use::Served => return Ok(ObjectKind::Served(kind)),
            Use::NoEffect | Use::Only(_) => {
                self.map.clear();
                return Ok(ObjectKind::Dropped);
            }
            Use::LeftOut(words) => words,
            Use::Refused(why) | Use::RefusedRest(why) => {
                let why = format!("{why}, found {kind:?}");
                return Err(ApiError::unsupported(&name, &why));
            }
            Use::Unknown => match self.table.rest() {
                Some(words) => {
                    self.reading.unknown(&format!("{name}:{kind}"))?;
                    words
                }
                None => {
                    let why = format!("nq serves no such type, found {kind:?}");
                    return Err(ApiError::unsupported(&name, &why));
                }
            },
        };
        let called = self.map.get("name").and_then(Value::as_str);
        let what = match called {
            Some(called) => format!("{kind} {called}"),
            None => kind,
        };
        self.map.clear();
        Ok(ObjectKind::LeftOut(what, left_out))
    }

    /// Takes a field; `None` if it is absent or null.
    ///
    /// # Errors
    /// A value of another type; the message says where, and what was found.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, ApiError> {
        debug_assert!(self.has(field), "no table has {}", self.name(field));
        match self.map.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match serde_path_to_error::deserialize(value) {
                Ok(value) => Ok(Some(value)),
                Err(e) => {
                    let path = e.path().to_string();
                    let inner = if path == "." {
                        String::new()
                    } else {
                        format!(".{path}")
                    };
                    let name = format!("{}{inner}", self.name(field));
                    Err(ApiError::field(&name, e.into_inner().to_string()))
                }
            },
        }
    }

    /// Takes a required field.
    ///
    /// # Errors
    /// Errors of [`Fields::take`]; an absent field.
    pub(crate) fn require<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, ApiError> {
        let name = self.name(field);
        let found = self.take(field)?;
        found.ok_or_else(|| ApiError::field(&name, "expected a value, found none"))
    }

    /// Takes an object with a table of its own.
    pub(crate) fn object(&mut self, field: &str, table: &str) -> Result<Option<Fields>, ApiError> {
        let name = self.name(field);
        let value: Option<Value> = self.take(field)?;
        value
            .map(|value| Fields::of(value, &name, table, &self.reading))
            .transpose()
    }

    /// Takes a list of at most `most` objects with a table of their own.
    ///
    /// # Errors
    /// Errors of [`Fields::of`]; a longer list.
    pub(crate) fn objects(
        &mut self,
        field: &str,
        table: &str,
        most: usize,
    ) -> Result<Vec<Fields>, ApiError> {
        let name = self.name(field);
        let list: Vec<Value> = self.take(field)?.unwrap_or_default();
        if list.len() > most {
            let what = format!("expected at most {most}, found {}", list.len());
            return Err(ApiError::field(&name, what));
        }
        let one = |(i, value)| Fields::of(value, &format!("{name}[{i}]"), table, &self.reading);
        list.into_iter().enumerate().map(one).collect()
    }

    /// Takes a number within limits.
    ///
    /// # Errors
    /// Errors of [`Fields::take`]; a number outside the limits.
    pub(crate) fn number(&mut self, field: &str) -> Result<Option<f32>, ApiError> {
        let (name, (least, most)) = (self.name(field), self.table.limits(field));
        match self.take::<f64>(field)? {
            Some(x) if !(least..=most).contains(&x) => Err(ApiError::field(
                &name,
                format!("expected {least} to {most}, found {x}"),
            )),
            x => Ok(x.map(|x| x as f32)),
        }
    }

    /// Takes an integer, which may be written as 4.0.
    ///
    /// # Errors
    /// Errors of [`Fields::take`]; a number that is no integer.
    pub(crate) fn integer(&mut self, field: &str) -> Result<Option<i128>, ApiError> {
        let name = self.name(field);
        let number: Option<serde_json::Number> = self.take(field)?;
        let Some(number) = number else {
            return Ok(None);
        };
        let written = number
            .as_f64()
            .filter(|x| x.fract() == 0.0 && x.abs() < 1e15);
        let whole = (number.as_i128()).or(written.map(|x| x as i128));
        let whole = whole.map(Some);
        whole.ok_or_else(|| ApiError::field(&name, format!("expected an integer, found {number}")))
    }

    /// Takes an integer within limits.
    ///
    /// # Errors
    /// Errors of [`Fields::integer`]; one outside the limits.
    pub(crate) fn count(
        &mut self,
        field: &str,
        least: usize,
        most: usize,
    ) -> Result<Option<usize>, ApiError> {
        let name = self.name(field);
        match self.integer(field)? {
            None => Ok(None),
            Some(n) => match usize::try_from(n)
                .ok()
                .filter(|n| (least..=most).contains(n))
            {
                Some(n) => Ok(Some(n)),
                None if most == usize::MAX => Err(ApiError::field(
                    &name,
                    format!("expected {least} or more, found {n}"),
                )),
                None => Err(ApiError::field(
                    &name,
                    format!("expected {least} to {most}, found {n}"),
                )),
            },
        }
    }

    /// True if a limit is -1, which is none.
    pub(crate) fn is_unlimited(&self, field: &str) -> bool {
        self.map.get(field).and_then(Value::as_f64) == Some(-1.0)
    }

    /// A field as the client sent it; null if it is absent.
    pub(crate) fn peek(&self, field: &str) -> &Value {
        self.map.get(field).unwrap_or(&Value::Null)
    }

    /// Takes a limit of `least` or more; -1 is none, as if it were absent.
    pub(crate) fn limit(&mut self, field: &str, least: usize) -> Result<Option<usize>, ApiError> {
        if self.is_unlimited(field) {
            self.map.remove(field);
        }
        self.count(field, least, usize::MAX)
    }

    /// Ends the reading: a served field that is left is one that the parser forgot.
    ///
    /// # Errors
    /// The first such field.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(field) => Err(ApiError::internal(format!(
                "{} was not read",
                self.name(field)
            ))),
        }
    }
}

/// True if two values mean the same: numbers may be written in several ways.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

/// True for a value that asks for nothing, whatever its field means.
fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(asked) => !asked,
        Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// The fields of a body, with [marked](integers) integers in what models are shown, conversations and tools; numbers
/// elsewhere are computed with.
fn with_integers(mut map: Map<String, Value>, body: &[u8]) -> Map<String, Value> {
    if let Cow::Owned(marked) = integers::marked(body) {
        let mut marked: Map<String, Value> = serde_json::from_slice(&marked).unwrap_or_default();
        for field in ["messages", "input", "tools", "functions"] {
            map.extend(marked.remove(field).map(|value| (field.to_owned(), value)));
        }
    }
    map
}

/// A value as text, cut.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(body: &Value) -> Result<Fields, ApiError> {
        Fields::parse(body.to_string().as_bytes(), Arc::default())
    }

    #[test]
    fn conversations_and_tools_keep_the_digits_of_integers() {
        let body = br#"{"tools": [{"maximum": 18446744073709551616}], "messages": [-0, -0.0], "seed": -0}"#;
        let read = Fields::parse(body, Arc::default()).unwrap();
        let text = |field: &str| integers::unmarked(read.map[field].to_string());
        assert_eq!(text("tools"), r#"[{"maximum":18446744073709551616}]"#);
        assert_eq!(text("messages"), "[0,-0.0]");
        assert_eq!(read.map["seed"], -0.0);
    }

    #[test]
    fn fields_are_read_as_the_table_says() {
        let body = json!({
            "n": 1, "messages": {"c": ["x", 2]}, "seed": null, "user": 7, "best_of": 1, "max_tokens": 4.0,
            "nonsense": 0, "web_search_options": {}, "top_k": 1.5, "max_completion_tokens": -1,
        });
        let mut read = fields(&body).unwrap().under("chat").unwrap();
        assert_eq!(read.take::<u32>("n").unwrap(), Some(1));
        assert_eq!(read.take::<u32>("seed").unwrap(), None);
        assert_eq!(read.limit("max_tokens", 1).unwrap(), Some(4));
        assert_eq!(read.limit("max_completion_tokens", 1).unwrap(), None);
        assert!(read.integer("top_k").is_err());
        #[derive(serde::Deserialize, Debug)]
        struct B {
            #[allow(dead_code)]
            c: Vec<String>,
        }
        let e = read.clone().take::<B>("messages").unwrap_err();
        assert_eq!(e.param.as_deref(), Some("messages.c[1]"), "{e}");
        let found = read.reading().found();
        assert!(found.unknown.contains("nonsense") && found.unknown.len() == 1);
        assert_eq!(found.left_out, ["web_search_options"]);
        // What is served and not read is a fault of the parser.
        assert_eq!(read.finish().unwrap_err().status, 500);
        let e = fields(&json!({"best_of": 2}))
            .unwrap()
            .under("chat")
            .unwrap_err();
        assert!(e.to_string().contains("nq serves 1 alone, found 2"), "{e}");
        let audio = json!({"audio": {"voice": "x"}});
        let e = fields(&audio).unwrap().under("chat").unwrap_err();
        assert_eq!((e.param.as_deref(), e.status), (Some("audio"), 400));
        let nothing = json!({"audio": {}, "stop_token_ids": [], "min_tokens": 0.0, "grammar": "", "best_of": 1.0});
        fields(&nothing).unwrap().under("chat").unwrap();
        for bad in ["", "[]", "3", "{", "{\"a\":1}x"] {
            assert!(
                Fields::parse(bad.as_bytes(), Arc::default()).is_err(),
                "{bad}"
            );
        }
        assert!(Fields::parse(b"\xef\xbb\xbf{}", Arc::default()).is_ok());
        let deep = "[".repeat(100_000);
        assert!(Fields::parse(deep.as_bytes(), Arc::default()).is_err());
    }
}
