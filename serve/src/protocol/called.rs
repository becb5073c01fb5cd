//! Tools of `POST /v1/responses` that are more than functions: those in a namespace, and those that take a text.

use super::fields::{Fields, Kind};
use super::tools::{self, Tools};
use crate::error::ApiError;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What the tools are that the model reads as functions: it calls one in a namespace by both names, and one that
/// takes a text (`custom`) with an object of it.
#[derive(Debug, Default)]
pub struct Called {
    custom: HashSet<String>,
    /// The namespace and the name of those that have one.
    namespaces: HashMap<String, (String, String)>,
}

impl Called {
    /// Adds a tool that is served, of this type.
    ///
    /// # Errors
    /// Errors of [`Tools::push`].
    pub fn read(
        &mut self,
        tools: &mut Tools,
        kind: &str,
        mut tool: Fields,
    ) -> Result<(), ApiError> {
        if kind != "namespace" {
            return self.add(tools, kind, tool, None);
        }
        let name: String = tool.require("name")?;
        let mut description: Option<String> = tool.take("description")?;
        let inner = tool.objects("tools", "responses.tool", tools::MOST_TOOLS)?;
        for mut tool in inner {
            let reading = Arc::clone(tool.reading());
            let (what, words) = match tool.kind("function")? {
                Kind::Served(kind) if kind != "namespace" => {
                    // The first one says what all are for.
                    let about = Some((name.as_str(), description.take()));
                    self.add(tools, &kind, tool, about)?;
                    continue;
                }
                Kind::Served(kind) => (kind, "the tool"),
                Kind::Dropped => continue,
                Kind::LeftOut(what, words) => (what, words),
            };
            reading.left_out_and_told(tool.place(), &what, words);
        }
        Ok(())
    }

    /// Adds a function or a custom tool, alone or in a namespace of that name and description.
    fn add(
        &mut self,
        tools: &mut Tools,
        kind: &str,
        mut tool: Fields,
        namespace: Option<(&str, Option<String>)>,
    ) -> Result<(), ApiError> {
        let (place, own): (String, String) = (tool.name("name"), tool.require("name")?);
        let mut parts: Vec<String> = Vec::new();
        let mut name = own.clone();
        if let Some((space, about)) = namespace {
            name = tools::within(space) + &own;
            parts.extend(about);
            let both = (space.to_owned(), own);
            self.namespaces.insert(name.clone(), both);
        }
        parts.extend(tool.take::<String>("description")?);
        let format = tool.object("format", "responses.custom")?;
        let parameters: Option<Value> = tool.take("parameters")?;
        let schema_place = tool.name("parameters");
        let _: Option<Value> = tool.take("tools")?;
        tool.finish()?;
        let schema = match kind {
            "custom" => {
                if let Some(mut format) = format {
                    let (_, syntax): (Option<Value>, Option<String>) =
                        (format.take("type")?, format.take("syntax")?);
                    if let Some(grammar) = format.take::<String>("definition")? {
                        format.reading().left_out(format.place(), "grammar");
                        let syntax = syntax.unwrap_or_default();
                        parts.push(format!("Its input has this grammar ({syntax}):\n{grammar}"));
                    }
                    format.finish()?;
                }
                self.custom.insert(name.clone());
                let properties = json!({"input": {"type": "string"}});
                json!({"type": "object", "properties": properties, "required": ["input"], "additionalProperties": false})
            }
            _ => parameters.unwrap_or_default(),
        };
        if !schema.is_null() && !schema.is_object() {
            return Err(ApiError::field(&schema_place, "expected a JSON schema"));
        }
        let description = (!parts.is_empty()).then(|| parts.join("\n\n"));
        tools.push(name, description, schema, &place, schema_place)
    }

    /// True for a tool that takes a text.
    pub(crate) fn is_custom(&self, name: &str) -> bool {
        self.custom.contains(name)
    }

    /// A call as an item without its id and status; `arguments`: those so far.
    pub fn item(&self, call: &str, name: &str, arguments: &str) -> Value {
        let (namespace, own) = match self.namespaces.get(name) {
            Some((namespace, own)) => (Some(namespace), own.as_str()),
            None => (None, name),
        };
        let mut item = match self.custom.contains(name) {
            true => json!({"type": "custom_tool_call", "input": input(arguments)}),
            false => json!({"type": "function_call", "arguments": arguments}),
        };
        item["call_id"] = call.into();
        item["name"] = own.into();
        if let Some(namespace) = namespace {
            item["namespace"] = namespace.as_str().into();
        }
        item
    }
}

/// The text that a custom tool is called with; of a call that is cut off, what is there of it.
pub fn input(arguments: &str) -> String {
    let closed = ["", "\"}", "}"]
        .iter()
        .map(|end| format!("{arguments}{end}"));
    let mut read = closed.filter_map(|text| serde_json::from_str::<Value>(&text).ok());
    let object = read.next().unwrap_or_default();
    object["input"].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_read_whole_and_cut_off() {
        for (arguments, expected) in [
            (r#"{"input": "a \"b\""}"#, "a \"b\""),
            (r#"{"input": "a"#, "a"),
            (r#"{"input": "a""#, "a"),
            (r#"{"inp"#, ""),
            ("", ""),
        ] {
            assert_eq!(input(arguments), expected, "{arguments}");
        }
    }
}
