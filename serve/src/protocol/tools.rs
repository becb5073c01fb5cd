//! Tools in the format of OpenAI's chat, and the choice among them.

use super::fields::{Fields, Kind};
use super::reading::Reading;
use crate::error::ApiError;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// Most tools in one request.
pub const MOST_TOOLS: usize = 1024;

/// Which tools the model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Choice {
    /// Any tool, or none.
    #[default]
    Auto,
    /// No tool.
    None,
    /// At least one tool.
    Required,
    /// This tool.
    Named(String),
}

/// The tools that a model is shown.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// In the format of OpenAI's chat.
    pub list: Vec<Value>,
    /// The names of their schemas' fields in the request, for errors.
    pub schemas: Vec<String>,
}

/// Reads the tools of a request; `otherwise` is the type of those without one. `read` takes one of type function, whose name, description and schema it
/// finds in the fields that it returns, the schema by the name that it returns. What else is there is left
/// out, and the model is told so.
///
/// # Errors
/// Too many tools; a function that has an invalid name, or one given twice, or no schema.
pub fn read(
    given: Vec<Fields>,
    otherwise: &str,
    mut read: impl FnMut(Fields) -> Result<(Fields, &'static str), ApiError>,
) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    let mut names: HashSet<String> = HashSet::new();
    for mut tool in given {
        match tool.kind(otherwise)? {
            Kind::Served(_) => {}
            Kind::Dropped => continue,
            Kind::LeftOut(what, words) => {
                let reading = Arc::clone(tool.reading());
                reading.left_out_and_told(tool.place(), &what, words);
                continue;
            }
        }
        let (mut function, schema) = read(tool)?;
        let place = function.name("name");
        let name: String = function.require("name")?;
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > 128 || !name.chars().all(fits) {
            let what = "expected 1 to 128 letters, digits, _, - and .";
            return Err(ApiError::field(&place, what));
        }
        if !names.insert(name.clone()) {
            return Err(ApiError::field(&place, format!("{name} is there twice")));
        }
        let description: Option<String> = function.take("description")?;
        let place = function.name(schema);
        let parameters: Option<Value> = function.take(schema)?;
        function.finish()?;
        let parameters = parameters.unwrap_or_default();
        if !parameters.is_null() && !parameters.is_object() {
            return Err(ApiError::field(&place, "expected a JSON schema"));
        }
        let mut function = json!({"name": name, "parameters": parameters});
        if let Some(description) = description {
            function["description"] = description.into();
        }
        tools
            .list
            .push(json!({"type": "function", "function": function}));
        tools.schemas.push(place);
    }
    Ok(tools)
}

impl Tools {
    /// Keeps the tools of these names.
    fn keep(&mut self, names: &[&str]) {
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

/// Names of tools, and schemas of their arguments; `name`: of this tool alone.
pub fn signatures(tools: &[Value], name: Option<&str>) -> Vec<(String, Value)> {
    let function = |tool: &Value| {
        let called = tool["function"]["name"].as_str().unwrap_or_default();
        let schema = match &tool["function"]["parameters"] {
            Value::Null => json!({"type": "object"}),
            schema => schema.clone(),
        };
        name.is_none_or(|n| n == called)
            .then(|| (called.to_owned(), schema))
    };
    tools.iter().filter_map(function).collect()
}

/// Reads `tool_choice`; where it allows some tools alone, the others are not shown.
///
/// # Errors
/// An invalid choice, or an unknown tool.
pub fn choice(value: Option<Value>, tools: &mut Tools) -> Result<Choice, ApiError> {
    let wrong = || {
        let what = "expected auto, none, required, allowed_tools or a function";
        ApiError::field("tool_choice", what)
    };
    let named = |value: &Value| {
        let name = value["function"]["name"]
            .as_str()
            .or(value["name"].as_str());
        name.map(str::to_owned)
    };
    let word = |word: &str| match word {
        "auto" => Some(Choice::Auto),
        "none" => Some(Choice::None),
        "required" | "any" => Some(Choice::Required),
        _ => None,
    };
    let choice = match &value {
        None => Choice::Auto,
        Some(Value::String(text)) => word(text).ok_or_else(wrong)?,
        Some(object) => match (object["type"].as_str(), named(object)) {
            (Some("allowed_tools"), _) => {
                let inner = object.get("allowed_tools").unwrap_or(object);
                let list = inner["tools"].as_array().ok_or_else(wrong)?;
                let names: Vec<String> = list.iter().filter_map(named).collect();
                tools.keep(&names.iter().map(String::as_str).collect::<Vec<_>>());
                let mode = inner["mode"].as_str().unwrap_or("auto");
                word(mode).ok_or_else(wrong)?
            }
            (_, Some(name))
                if tools
                    .list
                    .iter()
                    .any(|t| t["function"]["name"] == name.as_str()) =>
            {
                Choice::Named(name)
            }
            (_, Some(name)) => {
                let what = format!("expected one of the tools, found {name}");
                return Err(ApiError::field("tool_choice", what));
            }
            (kind, None) => kind.and_then(word).ok_or_else(wrong)?,
        },
    };
    match choice {
        Choice::Required | Choice::Named(_) if tools.list.is_empty() => {
            Err(ApiError::field("tool_choice", "expected tools beside it"))
        }
        choice => Ok(choice),
    }
}

/// A call of an assistant's message in the form that templates read: its arguments are an object. A model
/// does not always write one, and a length limit may cut it off: such arguments are left out.
///
/// # Errors
/// A call without a name.
pub fn made(
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
        Value::String(text) => serde_json::from_str(&text).ok(),
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
