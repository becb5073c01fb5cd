//! Tools of `POST /v1/responses` that are more than functions: those in a namespace, those that take a text, and those
//! that the protocol describes itself.

use super::client_tools;
use super::fields::{Fields, ObjectKind};
use super::tools::{self, Tools};
use crate::error::ApiError;
use nq_answers::output::completed;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// What a call of a tool is, beside a `function_call`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CalledAs {
    /// `custom_tool_call`, with a text.
    Custom,
    /// `local_shell_call`, with a program and its arguments.
    LocalShell,
    /// `shell_call`, with commands.
    Shell,
    /// `apply_patch_call`, with an operation.
    ApplyPatch,
}

/// What the tools are that the model reads as functions: it calls one in a namespace by both names, and one that
/// takes a text (`custom`) with an object of it.
#[derive(Debug, Default)]
pub(crate) struct Called {
    others: HashMap<String, CalledAs>,
    /// The namespace and the name of those that have one.
    namespaces: HashMap<String, (String, String)>,
}

impl Called {
    /// Adds a tool that is served, of this type.
    pub(crate) fn read(
        &mut self,
        tools: &mut Tools,
        kind: &str,
        mut tool: Fields,
    ) -> Result<(), ApiError> {
        let own = match kind {
            "local_shell" => Some(CalledAs::LocalShell),
            "shell" => Some(CalledAs::Shell),
            "apply_patch" => Some(CalledAs::ApplyPatch),
            _ => None,
        };
        if let Some(called) = own {
            return self.add_own(tools, kind, called, tool);
        }
        if kind != "namespace" {
            return self.add(tools, kind, tool, None);
        }
        let name: String = tool.require("name")?;
        let mut description: Option<String> = tool.take("description")?;
        let inner = tool.objects("tools", "responses.tool", tools::MOST_TOOLS)?;
        for mut tool in inner {
            let reading = Arc::clone(tool.reading());
            let (what, words) = match tool.kind("function")? {
                ObjectKind::Served(kind) if kind != "namespace" => {
                    // The first one says what all are for.
                    let about = Some((name.as_str(), description.take()));
                    self.add(tools, &kind, tool, about)?;
                    continue;
                }
                ObjectKind::Served(kind) => (kind, "the tool"),
                ObjectKind::Dropped => continue,
                ObjectKind::LeftOut(what, words) => (what, words),
            };
            reading.left_out_and_told(tool.place(), &what, words);
        }
        Ok(())
    }

    /// Adds a tool that the protocol describes, unless it is to run in a container of the server's.
    fn add_own(
        &mut self,
        tools: &mut Tools,
        kind: &str,
        called: CalledAs,
        mut tool: Fields,
    ) -> Result<(), ApiError> {
        let reading = Arc::clone(tool.reading());
        let environment: Value = tool.take("environment")?.unwrap_or_default();
        if environment["type"].as_str().is_some_and(|t| t != "local") {
            reading.left_out_and_told(tool.place(), kind, "the tool");
            return Ok(());
        }
        if !environment["skills"].is_null() {
            reading.left_out(&tool.name("environment"), "skills");
        }
        if client_tools::add(tools, kind, &mut tool)? {
            self.others.insert(kind.to_owned(), called);
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
        let (_, _): (Option<Value>, Option<Value>) =
            (tool.take("tools")?, tool.take("environment")?);
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
                self.others.insert(name.clone(), CalledAs::Custom);
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

    /// True for a tool whose call is a `function_call`.
    pub(crate) fn is_function(&self, name: &str) -> bool {
        !self.others.contains_key(name)
    }

    /// What the ids of a tool's calls begin with.
    pub(crate) fn prefix(&self, name: &str) -> &'static str {
        match self.others.get(name) {
            None => "fc_",
            Some(CalledAs::Custom) => "ctc_",
            Some(CalledAs::LocalShell) => "lsh_",
            Some(CalledAs::Shell) => "sh_",
            Some(CalledAs::ApplyPatch) => "apc_",
        }
    }

    /// A call as an item without its id and status; `arguments`: those so far.
    pub(crate) fn item(&self, call: &str, name: &str, arguments: &str) -> Value {
        let (namespace, own) = match self.namespaces.get(name) {
            Some((namespace, own)) => (Some(namespace), own.as_str()),
            None => (None, name),
        };
        let object = match self.is_function(name) {
            true => Value::Null,
            false => object(arguments),
        };
        let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
        let mut item = match self.others.get(name) {
            None => json!({"type": "function_call", "arguments": arguments, "name": own}),
            Some(CalledAs::Custom) => {
                json!({"type": "custom_tool_call", "input": text("input"), "name": own})
            }
            Some(CalledAs::LocalShell) => json!({"type": "local_shell_call", "action": {
                "type": "exec", "command": texts(&object["command"]),
                "env": object.get("env").cloned().unwrap_or_else(|| json!({})),
                "working_directory": object["working_directory"], "timeout_ms": object["timeout_ms"],
            }}),
            Some(CalledAs::Shell) => json!({"type": "shell_call", "action": {
                "commands": texts(&object["commands"]),
                "timeout_ms": object["timeout_ms"], "max_output_length": object["max_output_length"],
            }}),
            Some(CalledAs::ApplyPatch) => {
                let kind = object["type"].as_str().unwrap_or("update_file");
                let mut operation = json!({"type": kind, "path": text("path")});
                if kind != "delete_file" {
                    operation["diff"] = text("diff").into();
                }
                json!({"type": "apply_patch_call", "operation": operation})
            }
        };
        item["call_id"] = call.into();
        if let Some(namespace) = namespace {
            item["namespace"] = namespace.as_str().into();
        }
        item
    }
}

/// The object that a tool is called with; of a call that is cut off, what is there of it.
fn object(arguments: &str) -> Value {
    serde_json::from_str(&completed(arguments)).unwrap_or_default()
}

/// A list of texts; models write a single one without its list at times.
fn texts(value: &Value) -> Value {
    match value {
        Value::String(text) => json!([text]),
        Value::Array(list) => list
            .iter()
            .filter(|text| text.is_string())
            .cloned()
            .collect(),
        _ => json!([]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_tool_is_called_with_is_read_whole_and_cut_off() {
        let all = [
            ("note", CalledAs::Custom),
            ("shell", CalledAs::Shell),
            ("apply_patch", CalledAs::ApplyPatch),
        ];
        let called = Called {
            others: all.map(|(name, called)| (name.to_owned(), called)).into(),
            ..Called::default()
        };
        for (name, arguments, part, expected) in [
            (
                "note",
                r#"{"input": "a \"b\""}"#,
                "/input",
                json!("a \"b\""),
            ),
            ("note", r#"{"input": "a"#, "/input", json!("a")),
            ("note", r#"{"input": "a""#, "/input", json!("a")),
            ("note", r#"{"inp"#, "/input", json!("")),
            ("note", "", "/input", json!("")),
            (
                "shell",
                r#"{"commands": ["ls", "pw"#,
                "/action/commands",
                json!(["ls", "pw"]),
            ),
            (
                "shell",
                r#"{"commands": "ls"}"#,
                "/action/commands",
                json!(["ls"]),
            ),
            ("shell", "", "/action/commands", json!([])),
            (
                "apply_patch",
                r#"{"type": "delete_file", "path": "a"}"#,
                "/operation",
                json!({"type": "delete_file", "path": "a"}),
            ),
            (
                "apply_patch",
                r#"{"type": "create_file", "path": "a", "diff": "+x"}"#,
                "/operation/diff",
                json!("+x"),
            ),
        ] {
            let item = called.item("c", name, arguments);
            assert_eq!(item.pointer(part), Some(&expected), "{arguments}");
        }
    }
}
