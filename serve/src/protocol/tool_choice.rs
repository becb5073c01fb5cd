//! The choice among a request's tools.

use super::client_tools;
use super::tools::{Tools, within};
use crate::error::ApiError;
use nq_answers::ToolChoice;
use serde_json::Value;

/// Reads `tool_choice`, the value of `field`; where it allows some tools alone, the others are not shown.
///
/// # Errors
/// An invalid choice, or an unknown tool.
pub(super) fn tool_choice(
    value: Option<Value>,
    tools: &mut Tools,
    field: &str,
) -> Result<ToolChoice, ApiError> {
    let wrong = || {
        let what = "expected auto, none, required, allowed_tools or a function";
        ApiError::field(field, what)
    };
    let named = |value: &Value| {
        let inner = [
            &value["function"]["name"],
            &value["custom"]["name"],
            &value["name"],
        ];
        let name = (inner.iter().find_map(|n| n.as_str()))
            .or_else(|| client_tools::name(value["type"].as_str()?))?;
        match value["namespace"].as_str() {
            Some(namespace) => Some(within(namespace) + name),
            None => Some(name.to_owned()),
        }
    };
    let word = |word: &str| match word {
        "auto" => Some(ToolChoice::Auto),
        "none" => Some(ToolChoice::None),
        "required" | "any" => Some(ToolChoice::Required),
        _ => None,
    };
    let choice = match &value {
        None => ToolChoice::Auto,
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
                ToolChoice::Named(name)
            }
            (_, Some(name)) => {
                let what = format!("expected one of the tools, found {name}");
                return Err(ApiError::field(field, what));
            }
            (kind, None) => kind.and_then(word).ok_or_else(wrong)?,
        },
    };
    match choice {
        ToolChoice::Required | ToolChoice::Named(_) if tools.list.is_empty() => {
            Err(ApiError::field(field, "expected tools with it"))
        }
        choice => Ok(choice),
    }
}
