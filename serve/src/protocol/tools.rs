//! Tools in the format of OpenAI's chat.

use super::fields::{Fields, ObjectKind};
use super::reading::Reading;
use crate::error::ApiError;
use nq_runtime::chat_template::integers;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// Most tools in one request.
pub(crate) const MOST_TOOLS: usize = 1024;
/// Most bytes of a tool's name.
const MOST_NAME: usize = 128;

/// The tools that a model is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tools {
    /// In the format of OpenAI's chat.
    pub list: Vec<Value>,
    /// The names of their schemas' fields in the request, for errors.
    pub schemas: Vec<String>,
    names: HashSet<String>,
}

/// Reads the tools of a request; `otherwise` is the type of those without one. `read` takes one that is served, of this
/// type, and adds what it has. What else is there is left out, and the model is told so.
pub(crate) fn read(
    given: Vec<Fields>,
    otherwise: &str,
    mut read: impl FnMut(&mut Tools, &str, Fields) -> Result<(), ApiError>,
) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    for mut tool in given {
        match tool.kind(otherwise)? {
            ObjectKind::Served(kind) => read(&mut tools, &kind, tool)?,
            ObjectKind::Dropped => {}
            ObjectKind::LeftOut(what, words) => {
                let reading = Arc::clone(tool.reading());
                reading.left_out_and_told(tool.place(), &what, words);
            }
        }
    }
    Ok(tools)
}

impl Tools {
    /// Adds a function that has its schema in the field `schema`.
    ///
    /// # Errors
    /// An invalid name, or one given twice; no schema; too many tools.
    pub(crate) fn add(&mut self, function: Fields, schema: &'static str) -> Result<(), ApiError> {
        self.add_within("", function, schema)
    }

    /// Like [`Tools::add`], with a prefix of its name.
    pub(crate) fn add_within(
        &mut self,
        prefix: &str,
        mut function: Fields,
        schema: &'static str,
    ) -> Result<(), ApiError> {
        let place = function.name("name");
        let name: String = function.require("name")?;
        let description: Option<String> = function.take("description")?;
        let schema_place = function.name(schema);
        let parameters: Option<Value> = function.take(schema)?;
        function.finish()?;
        let parameters = parameters.unwrap_or_default();
        if !parameters.is_null() && !parameters.is_object() {
            return Err(ApiError::field(&schema_place, "expected a JSON schema"));
        }
        let name = format!("{prefix}{name}");
        self.push(name, description, parameters, &place, schema_place)
    }

    /// Adds a tool; `place` is that of its name, `schema_place` that of its schema.
    pub(crate) fn push(
        &mut self,
        name: String,
        description: Option<String>,
        parameters: Value,
        place: &str,
        schema_place: String,
    ) -> Result<(), ApiError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > MOST_NAME || !name.chars().all(fits) {
            let what = format!("expected 1 to {MOST_NAME} letters, digits, _, - and .");
            return Err(ApiError::field(place, what));
        }
        if self.list.len() == MOST_TOOLS {
            let what = format!("expected at most {MOST_TOOLS} tools");
            return Err(ApiError::field(place, what));
        }
        if !self.names.insert(name.clone()) {
            return Err(ApiError::field(place, format!("{name} is there twice")));
        }
        let mut function = json!({"name": name, "parameters": parameters});
        if let Some(description) = description {
            function["description"] = description.into();
        }
        let tool = json!({"type": "function", "function": function});
        self.list.push(tool);
        self.schemas.push(schema_place);
        Ok(())
    }

    /// Keeps the tools of these names.
    pub(super) fn keep(&mut self, names: &[&str]) {
        let kept = |tool: &Value| {
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            names.contains(&name)
        };
        let schemas = std::mem::take(&mut self.schemas);
        let both = self.list.iter().zip(schemas);
        self.schemas = both.filter(|(t, _)| kept(t)).map(|(_, s)| s).collect();
        self.list.retain(kept);
    }
}

/// What names in a namespace begin with, where the model reads them.
pub(crate) fn within(namespace: &str) -> String {
    format!("{namespace}.")
}

/// The object that a call's arguments are, with [marked](integers) integers; `None` if they are cut off or something
/// else.
pub(crate) fn object(arguments: &str) -> Option<Map<String, Value>> {
    serde_json::from_slice(&integers::marked(arguments.as_bytes())).ok()
}

/// A call of an assistant's message in the form that templates read: its arguments are an object. A model
/// does not always write one, and a length limit may cut it off: such arguments are left out.
///
/// # Errors
/// A call without a name.
pub(crate) fn made(
    id: Value,
    name: Option<String>,
    arguments: Option<Value>,
    place: &str,
    reading: &Reading,
) -> Result<Value, ApiError> {
    let name = name.ok_or_else(|| ApiError::field(place, "expected a name"))?;
    let object = match arguments.unwrap_or_default() {
        Value::Null => Some(Map::new()),
        Value::Object(map) => Some(map),
        Value::String(text) if matches!(text.trim(), "" | "null") => Some(Map::new()),
        Value::String(text) => object(&text),
        _ => None,
    };
    if object.is_none() {
        reading.left_out(place, "arguments");
    }
    Ok(json!({
        "id": id, "type": "function",
        "function": {"name": name, "arguments": object.unwrap_or_default()},
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_the_digits_of_integers() {
        let arguments = r#"{"a":12345678901234567890123,"b":[1.5,-9223372036854775809]}"#;
        let object = Value::from(object(arguments));
        assert_eq!(integers::unmarked(object.to_string()), arguments);
    }
}
