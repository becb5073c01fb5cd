//! Tools in the format of OpenAI's chat, and the choice among them.

use crate::error::ApiError;
use serde_json::{Map, Value};

/// Most tools in one request.
const MOST_TOOLS: usize = 128;

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

/// Reads the tools of a request.
///
/// # Errors
/// Too many tools; a tool that is not a function, has an invalid name, or a name given twice.
pub fn read(tools: Option<Vec<Value>>) -> Result<Vec<Value>, ApiError> {
    let tools = tools.unwrap_or_default();
    if tools.len() > MOST_TOOLS {
        let what = format!("expected at most {MOST_TOOLS}, found {}", tools.len());
        return Err(ApiError::field("tools", what));
    }
    let mut names: Vec<&str> = Vec::new();
    for (i, tool) in tools.iter().enumerate() {
        let place = format!("tools[{i}]");
        if tool["type"] != "function" {
            let why = "nq serves tools of type function alone";
            return Err(ApiError::unsupported(&format!("{place}.type"), why));
        }
        let name = tool["function"]["name"].as_str().unwrap_or_default();
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
            let what = "expected 1 to 64 letters, digits, _, - and .";
            return Err(ApiError::field(&format!("{place}.function.name"), what));
        }
        if names.contains(&name) {
            let what = format!("{name} is there twice");
            return Err(ApiError::field(&format!("{place}.function.name"), what));
        }
        let parameters = &tool["function"]["parameters"];
        if !parameters.is_null() && !parameters.is_object() {
            let what = "expected a JSON schema";
            return Err(ApiError::field(
                &format!("{place}.function.parameters"),
                what,
            ));
        }
        names.push(name);
    }
    Ok(tools)
}

/// Reads `tool_choice`.
///
/// # Errors
/// An invalid choice, or an unknown tool.
pub fn choice(value: Option<Value>, tools: &[Value]) -> Result<Choice, ApiError> {
    let choice = match &value {
        None => Choice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Choice::Auto,
            "none" => Choice::None,
            "required" => Choice::Required,
            _ => {
                let what = "expected auto, none, required or a function";
                return Err(ApiError::field("tool_choice", what));
            }
        },
        Some(object) => {
            let name = object["function"]["name"]
                .as_str()
                .or(object["name"].as_str());
            match name {
                Some(name) if tools.iter().any(|t| t["function"]["name"] == name) => {
                    Choice::Named(name.to_owned())
                }
                Some(name) => {
                    let what = format!("expected one of the tools, found {name}");
                    return Err(ApiError::field("tool_choice", what));
                }
                None => {
                    let what = "expected auto, none, required or a function";
                    return Err(ApiError::field("tool_choice", what));
                }
            }
        }
    };
    match choice {
        Choice::Required | Choice::Named(_) if tools.is_empty() => {
            Err(ApiError::field("tool_choice", "expected tools beside it"))
        }
        choice => Ok(choice),
    }
}

/// A tool in the format of OpenAI's chat.
pub fn function(name: Value, description: Value, parameters: Value) -> Value {
    let mut function = serde_json::json!({"name": name, "parameters": parameters});
    if !description.is_null() {
        function["description"] = description;
    }
    serde_json::json!({"type": "function", "function": function})
}

/// The calls of an assistant's message in the form that templates read: arguments are objects.
///
/// # Errors
/// A call without a name, or whose arguments are not a JSON object.
pub fn made(calls: Vec<Value>, place: &str) -> Result<Value, ApiError> {
    let mut out = Vec::with_capacity(calls.len());
    for (i, call) in calls.into_iter().enumerate() {
        let place = format!("{place}[{i}].function");
        let name = call["function"]["name"].as_str();
        let name = name.ok_or_else(|| ApiError::field(&place, "expected a name"))?;
        let arguments: Map<String, Value> = match &call["function"]["arguments"] {
            Value::Null => Map::new(),
            Value::Object(map) => map.clone(),
            Value::String(text) if text.trim().is_empty() => Map::new(),
            Value::String(text) => serde_json::from_str(text).map_err(|e| {
                ApiError::field(
                    &format!("{place}.arguments"),
                    format!("not a JSON object: {e}"),
                )
            })?,
            _ => {
                return Err(ApiError::field(
                    &place,
                    "expected arguments in a JSON string",
                ));
            }
        };
        out.push(serde_json::json!({
            "id": call["id"], "type": "function",
            "function": {"name": name, "arguments": arguments},
        }));
    }
    Ok(Value::Array(out))
}
