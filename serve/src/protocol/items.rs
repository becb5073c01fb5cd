//! The items of a conversation in `/v1/responses`: messages, calls and their results, thinking.

use super::fields::{Fields, ObjectKind};
use super::kept::Item;
use super::reading::{Reading, plain};
use super::sent::ContentPlace;
use super::text::content as read;
use super::tools::{self, made};
use crate::error::ApiError;
use crate::model::message;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nq_runtime::Message;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What the content of an item of type `compaction` of this server's begins with.
const MARK: &str = "nq:";

/// Most items in one request, with those of responses before it.
const MOST: usize = 16_384;

/// All items of a conversation: those up to the response that the request continues, and its own, with those
/// that it names by their ids.
///
/// # Errors
/// A response or an item that is not kept, in the words of OpenAI's API.
pub(super) fn conversation(
    previous: Option<&str>,
    input: Value,
    reading: &Reading,
) -> Result<Vec<Item>, ApiError> {
    let owner = reading.client.id;
    let gone = |param: &str, code, what: String| ApiError {
        param: Some(param.to_owned()),
        ..ApiError::not_found(what, code)
    };
    let mut items = match previous {
        None => Vec::new(),
        Some(id) => reading
            .kept
            .conversation(owner, id)
            .ok_or_else(|| ApiError {
                status: 400,
                ..gone(
                    "previous_response_id",
                    "previous_response_not_found",
                    format!("Previous response with id '{}' not found.", plain(id)),
                )
            })?,
    };
    let given = match input {
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(given) if !given.is_empty() || previous.is_some() => given,
        _ => {
            return Err(ApiError::field(
                "input",
                "expected a text or a list of items",
            ));
        }
    };
    if items.len() + given.len() > MOST {
        let what = format!(
            "expected at most {MOST} items, found {}",
            items.len() + given.len()
        );
        return Err(ApiError::field("input", what));
    }
    let mut known = None;
    for (i, item) in given.into_iter().enumerate() {
        let refers = match item["type"].as_str() {
            Some(kind) => kind == "item_reference",
            None => item["role"].is_null() && item["id"].is_string(),
        };
        if !refers {
            items.push(Item::new(&item));
            continue;
        }
        let known = known.get_or_insert_with(|| reading.kept.items(owner));
        let id = item["id"].as_str().unwrap_or_default();
        let item = known.get(id).ok_or_else(|| {
            let what = format!(
                "Item with id '{}' not found. Items of responses with `store: false` are not kept, and older \
                 ones make room for newer ones: send the item itself.",
                plain(id)
            );
            gone(&format!("input[{i}].id"), "item_not_found", what)
        })?;
        items.push(item.clone());
    }
    Ok(items)
}

/// Reads the items of a conversation: messages, calls and their results.
pub(super) fn read_input(
    items: &[Item],
    reading: &Arc<Reading>,
    out: &mut Vec<Message>,
) -> Result<(), ApiError> {
    let mut thinking: Option<String> = None;
    for (i, item) in items.iter().enumerate() {
        let place = format!("input[{i}]");
        let mut item = Fields::of(item.value(), &place, "item", reading)?;
        let kind = match item.kind("message")? {
            ObjectKind::Served(kind) => kind,
            ObjectKind::Dropped => continue,
            ObjectKind::LeftOut(what, words) => {
                reading.left_out_and_told(&place, &what, words);
                continue;
            }
        };
        let content: Value = item.take("content")?.unwrap_or_default();
        match kind.as_str() {
            "message" => {
                let role: Option<String> = item.take("role")?;
                let role = match role.as_deref() {
                    Some("developer" | "system") => "system",
                    Some(role @ ("user" | "assistant")) => role,
                    _ => {
                        let what = "expected user, assistant, system or developer";
                        return Err(ApiError::field(&format!("{place}.role"), what));
                    }
                };
                let at = match role {
                    "user" => ContentPlace::Message,
                    _ => ContentPlace::Text,
                };
                let content = read(content, &format!("{place}.content"), at, reading)?;
                let mut extra = Map::new();
                if let Some(thinking) = thinking.take().filter(|_| role == "assistant") {
                    extra.insert("reasoning_content".into(), thinking.into());
                }
                out.push(message(role, content, extra));
            }
            "function_call" | "custom_tool_call" | "local_shell_call" | "shell_call"
            | "apply_patch_call" => {
                let call = call(&kind, &mut item, reading)?;
                // Calls of a turn go into its message.
                if !matches!(out.last(), Some(m) if m.role == "assistant") {
                    let mut extra = Map::new();
                    if let Some(thinking) = thinking.take() {
                        extra.insert("reasoning_content".into(), thinking.into());
                    }
                    out.push(message("assistant", String::new(), extra));
                }
                if let Some(last) = out.last_mut() {
                    let calls = last.extra.entry("tool_calls").or_insert_with(|| json!([]));
                    calls
                        .as_array_mut()
                        .into_iter()
                        .for_each(|c| c.push(call.clone()));
                }
            }
            "compaction" => {
                let content: Option<String> = item.take("encrypted_content")?;
                match content.as_deref().and_then(summary) {
                    Some(summary) => out.push(Message::new("user", summary)),
                    None => reading.left_out_and_told(&place, &kind, "an item"),
                }
            }
            "reasoning" => {
                let parts = content.as_array().into_iter().flatten();
                let texts: Vec<&str> = parts.filter_map(|p| p["text"].as_str()).collect();
                thinking = Some(texts.join("\n")).filter(|t| !t.is_empty());
            }
            // The results of calls.
            _ => {
                let output: Value = item.take("output")?.unwrap_or_default();
                let content = match (kind.as_str(), output) {
                    ("shell_call_output", Value::Array(runs)) => {
                        let runs: Vec<String> = runs.iter().map(run).collect();
                        runs.join("\n").into()
                    }
                    ("apply_patch_call_output", Value::Null) => {
                        item.take::<String>("status")?.unwrap_or_default().into()
                    }
                    (_, output) => read(
                        output,
                        &format!("{place}.output"),
                        ContentPlace::Result,
                        reading,
                    )?,
                };
                let mut extra = Map::new();
                let mut id: Option<Value> = item.take("call_id")?;
                if kind == "local_shell_call_output" {
                    id = id.or(item.take("id")?);
                }
                extra.insert("tool_call_id".into(), id.unwrap_or_default());
                out.push(message("tool", content, extra));
            }
        }
    }
    Ok(())
}

/// What a command of a shell wrote, and how it ended.
fn run(run: &Value) -> String {
    let written = ["stdout", "stderr"].map(|name| run[name].as_str().unwrap_or_default());
    let outcome = &run["outcome"];
    let end = match outcome["exit_code"].as_i64() {
        Some(0) => String::new(),
        Some(code) => format!("exit code {code}"),
        None => outcome["type"].as_str().unwrap_or_default().to_owned(),
    };
    let [out, err] = written;
    let parts = [out, err, end.as_str()].into_iter();
    let parts: Vec<&str> = parts
        .map(str::trim_end)
        .filter(|part| !part.is_empty())
        .collect();
    parts.join("\n")
}

/// A call as templates read it; one of a tool that is no function is shown as one with its input.
fn call(kind: &str, item: &mut Fields, reading: &Reading) -> Result<Value, ApiError> {
    let (id, name): (Option<Value>, Option<String>) = (item.take("call_id")?, item.take("name")?);
    let namespace: Option<String> = item.take("namespace")?;
    let name = match (namespace, name) {
        (Some(namespace), Some(name)) => Some(tools::within(&namespace) + &name),
        (_, name) => name,
    };
    let (name, arguments) = match kind {
        "function_call" => (name, item.take("arguments")?),
        "custom_tool_call" => {
            let input: Option<Value> = item.take("input")?;
            (name, Some(json!({"input": input})))
        }
        "apply_patch_call" => (Some("apply_patch".to_owned()), item.take("operation")?),
        shell => (
            shell.strip_suffix("_call").map(str::to_owned),
            item.take("action")?,
        ),
    };
    made(
        id.unwrap_or_default(),
        name,
        arguments,
        &item.name("arguments"),
        reading,
    )
}

/// Item `index` that led to the response `id`, as lists of items have it: with an id, and its text as a part.
pub(crate) fn listed(item: &Item, id: &str, index: usize) -> Value {
    let mut item = item.value();
    let Some(map) = item.as_object_mut() else {
        return item;
    };
    let id = format!("item_{}_{index}", id.trim_start_matches("resp_"));
    map.entry("id").or_insert(id.into());
    if map.get("type").is_none_or(|kind| kind == "message") {
        map.insert("type".into(), "message".into());
        map.entry("status").or_insert("completed".into());
        if let Some(Value::String(text)) = map.get("content") {
            let part = match map.get("role").is_some_and(|role| role == "assistant") {
                true => text_part(text),
                false => json!({"type": "input_text", "text": text}),
            };
            map.insert("content".into(), json!([part]));
        }
    }
    item
}

/// Text of an answer as a part of its item.
pub(super) fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

/// The summary in an item of type `compaction`; `None` if another server made it, which alone can read it.
fn summary(content: &str) -> Option<String> {
    let text = String::from_utf8(STANDARD.decode(content).ok()?).ok()?;
    let text = text.strip_prefix(MARK)?;
    Some(format!("[summary of the conversation so far]\n{text}"))
}

/// The content of an item of type `compaction` with the summary `text`, as [`summary`] reads it.
pub(super) fn summary_content(text: &str) -> String {
    STANDARD.encode(format!("{MARK}{text}"))
}
