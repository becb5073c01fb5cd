//! The fields of a request's JSON object: each is read once, and any left over are refused by name.

use crate::error::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The fields that have not been read.
#[derive(Clone, Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// Prefix of field names in messages, for a nested object: empty, or `messages[0].`.
    place: String,
}

impl Fields {
    /// The fields of a request's body.
    ///
    /// # Errors
    /// A body that is not a JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Fields {
                map,
                place: String::new(),
            }),
            Ok(_) => Err(ApiError::invalid("the body: expected a JSON object")),
            Err(e) => Err(ApiError::invalid(format!("the body is not JSON: {e}"))),
        }
    }

    /// The fields of an object inside a request, at `place`.
    ///
    /// # Errors
    /// A value that is not an object.
    pub fn of(value: Value, place: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Fields {
                map,
                place: format!("{place}."),
            }),
            _ => Err(ApiError::field(place, "expected an object")),
        }
    }

    /// A field's name with the prefix.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.place)
    }

    /// Takes a field; `None` if it is absent or null.
    ///
    /// # Errors
    /// A value of another type; the message says where, and what was found.
    pub fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, ApiError> {
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
    pub fn require<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, ApiError> {
        let name = self.name(field);
        let found = self.take(field)?;
        found.ok_or_else(|| ApiError::field(&name, "expected a value, found none"))
    }

    /// Takes a number within limits.
    ///
    /// # Errors
    /// Errors of [`Fields::take`]; a number outside the limits.
    pub fn number(&mut self, field: &str, least: f64, most: f64) -> Result<Option<f32>, ApiError> {
        let name = self.name(field);
        match self.take::<f64>(field)? {
            Some(x) if !(least..=most).contains(&x) => Err(ApiError::field(
                &name,
                format!("expected {least} to {most}, found {x}"),
            )),
            x => Ok(x.map(|x| x as f32)),
        }
    }

    /// Takes an integer within limits.
    ///
    /// # Errors
    /// Errors of [`Fields::number`].
    pub fn count(
        &mut self,
        field: &str,
        least: usize,
        most: usize,
    ) -> Result<Option<usize>, ApiError> {
        let name = self.name(field);
        match self.take::<u64>(field)? {
            None => Ok(None),
            Some(n) => match usize::try_from(n)
                .ok()
                .filter(|n| (least..=most).contains(n))
            {
                Some(n) => Ok(Some(n)),
                None => Err(ApiError::field(
                    &name,
                    format!("expected {least} to {most}, found {n}"),
                )),
            },
        }
    }

    /// Drops fields that do not affect the answer.
    pub fn ignore(&mut self, fields: &[&str]) {
        for field in fields {
            self.map.remove(*field);
        }
    }

    /// Checks a field for which only these values are supported.
    ///
    /// # Errors
    /// Another value.
    pub fn only(&mut self, field: &str, values: &[Value]) -> Result<(), ApiError> {
        match self.map.remove(field) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if values.contains(&value) => Ok(()),
            Some(value) => {
                let values: Vec<String> = values.iter().map(Value::to_string).collect();
                let values = values.join(" or ");
                let why = format!("nq serves {values} alone, found {value}");
                Err(ApiError::unsupported(&self.name(field), &why))
            }
        }
    }

    /// Refuses fields that have not been read, except nulls.
    ///
    /// # Errors
    /// The first such field.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((field, _)) => {
                let why = "nq does not know this parameter";
                Err(ApiError::unsupported(&self.name(field), why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_are_read_once_and_the_rest_is_refused_by_name() {
        let body = json!({"a": 1, "b": {"c": ["x", 2]}, "n": null, "t": "auto", "x": 0});
        let mut fields = Fields::parse(body.to_string().as_bytes()).unwrap();
        assert_eq!(fields.take::<u32>("a").unwrap(), Some(1));
        assert_eq!(fields.take::<u32>("n").unwrap(), None);
        #[derive(serde::Deserialize, Debug)]
        struct B {
            #[allow(dead_code)]
            c: Vec<String>,
        }
        let e = fields.clone().take::<B>("b").unwrap_err();
        assert_eq!(e.param.as_deref(), Some("b.c[1]"), "{e}");
        fields.ignore(&["b"]);
        fields.clone().only("t", &[json!("auto")]).unwrap();
        let e = fields.clone().only("t", &[json!("never")]).unwrap_err();
        assert!(e.to_string().contains("\"never\" alone"), "{e}");
        fields.ignore(&["t"]);
        assert!(fields.clone().count("x", 1, 5).is_err());
        let e = fields.finish().unwrap_err();
        assert_eq!((e.param.as_deref(), e.status), (Some("x"), 400));
        for bad in ["", "[]", "3", "{", "{\"a\":1}x"] {
            assert!(Fields::parse(bad.as_bytes()).is_err(), "{bad}");
        }
        let deep = "[".repeat(100_000);
        assert!(Fields::parse(deep.as_bytes()).is_err());
    }
}
