//! Tools that clients run and whose parameters a protocol publishes, so that requests do not have them: Anthropic's
//! bash, text editor, memory and computer, OpenAI's shells and patches. The model is shown them as functions.

use super::fields::Fields;
use super::tools::Tools;
use crate::error::ApiError;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::OnceLock;

/// A tool as the model is shown it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientTool {
    /// Its name, if the request has none.
    name: String,
    description: String,
    /// A JSON schema.
    parameters: Value,
}

/// The tools by their types; several versions of one may be the same.
fn all() -> &'static HashMap<String, ClientTool> {
    static ALL: OnceLock<HashMap<String, ClientTool>> = OnceLock::new();
    // A test reads the file, which is part of the program.
    ALL.get_or_init(|| serde_json::from_str(include_str!("client_tools.json")).unwrap_or_default())
}

fn typed(kind: &str) -> Option<&'static ClientTool> {
    let mut all = all().iter();
    all.find(|(kinds, _)| kinds.split(' ').any(|k| k == kind))
        .map(|(_, tool)| tool)
}

/// The name of the tool of a type, if that is one that clients run.
pub(crate) fn name(kind: &str) -> Option<&'static str> {
    typed(kind).map(|tool| tool.name.as_str())
}

/// Adds a tool of a type that clients run; false if it is another type, which is left to the caller. Its screen, if it
/// has one, is described to the model.
pub(crate) fn add(tools: &mut Tools, kind: &str, tool: &mut Fields) -> Result<bool, ApiError> {
    let mut screen = None;
    if tool.has("display_width_px") {
        let width = tool.count("display_width_px", 1, 1 << 16)?;
        screen = width.zip(tool.count("display_height_px", 1, 1 << 16)?);
    }
    let Some(known) = typed(kind) else {
        return Ok(false);
    };
    let given: Option<String> = tool.take("name")?;
    let mut description = known.description.clone();
    if let Some((width, height)) = screen {
        description += &format!(" The screen has {width} x {height} pixels.");
    }
    tools.push(
        given.unwrap_or_else(|| known.name.clone()),
        Some(description),
        known.parameters.clone(),
        &tool.name("name"),
        tool.name("type"),
    )?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::table::{Table, Use};
    use super::*;

    /// The file is read whole, and the tables of both protocols serve its types.
    #[test]
    fn every_type_is_served() {
        let tables = ["messages.tool", "responses.tool"].map(Table::named);
        assert!(!all().is_empty());
        for (kinds, tool) in all() {
            for kind in kinds.split(' ') {
                let served = tables.iter().filter(|t| t.kind(kind) == Use::Served);
                assert_eq!(served.count(), 1, "{kind}");
            }
            let properties = tool.parameters["properties"].as_object().unwrap();
            for name in tool.parameters["required"].as_array().unwrap() {
                assert!(
                    properties.contains_key(name.as_str().unwrap()),
                    "{kinds}: {name}"
                );
            }
        }
        assert_eq!(name("bash_20250124"), Some("bash"));
        assert_eq!(name("web_search"), None);
    }
}
