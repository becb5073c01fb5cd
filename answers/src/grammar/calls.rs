//! Grammars of tool calls, in the form that a model writes them. White space is as in templates, so that the next turn
//! finds the calls in the cache.

use super::schema::{compact, narrowed, of_objects, within};
use crate::output::{CallForm, CallParser, may_be_text, resolved};
use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Most calls in one answer.
const MOST_CALLS: usize = 16;
/// How many references and alternatives are followed one inside the other.
const MOST_DEPTH: usize = 16;
/// Most combinations of alternatives of a tool's parameters.
const MOST_SHAPES: usize = 64;
/// What ends a value.
const END: &str = "\\n</parameter>\\n";

/// How calls are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writing {
    /// The form of the calls.
    pub(super) form: CallForm,
    /// True if the tags around calls are tokens of their own.
    pub(super) tokens: bool,
}

/// Rules of a Lark grammar.
#[derive(Default)]
struct Rules {
    text: String,
    count: usize,
}

impl Rules {
    /// Adds a rule, or a terminal, whose name begins with `prefix`.
    fn add(&mut self, prefix: &str, attributes: &str, body: &str) -> String {
        let name = format!("{prefix}{}", self.count);
        self.count += 1;
        self.text += &format!("{name}{attributes}: {body}\n");
        name
    }

    fn json(&mut self, schema: &Value) -> String {
        self.add("json", "", &format!("%json {schema}"))
    }
}

/// A text as a string of a grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// The grammar of one or more calls of `tools`, or, if `answer` is there, of calls or that JSON. Arguments fit the
/// tools' schemas; beside an answer they may be any, as in calls that the model is free to make.
///
/// # Errors
/// The part of a tool's schema that calls cannot be held to, and why.
pub(super) fn lark(
    writing: Writing,
    tools: &[(String, Value)],
    several: bool,
    answer: Option<&Value>,
) -> Result<String, String> {
    let (mut rules, mut calls) = (Rules::default(), Vec::new());
    for (name, schema) in tools {
        let any = json!({"type": "object"});
        let schema = if answer.is_some() { &any } else { schema };
        let call = match writing.form {
            CallForm::Json => {
                let arguments = rules.json(&compact(of_objects(schema)?, " ")?);
                let begin = literal(&format!("{{\"name\": {}, \"arguments\": ", literal(name)));
                format!("{begin} {arguments} \"}}\"")
            }
            CallForm::Xml => {
                let parameters = xml(&mut rules, &narrowed(schema)?)?;
                let begin = literal(&format!("<function={name}>\n"));
                format!("{begin} {parameters} \"</function>\"")
            }
        };
        calls.push(rules.add("call", "", &call));
    }
    let [open, close] = [CallParser::OPEN, CallParser::CLOSE].map(|tag| match writing.tokens {
        true => tag.to_owned(),
        false => literal(tag),
    });
    let more = match several {
        true => format!(" (\"\\n\" block){{0,{}}}", MOST_CALLS - 1),
        false => String::new(),
    };
    let mut start = format!("start: block{more}");
    if let Some(answer) = answer {
        write!(start, " | {}", rules.json(answer)).map_err(|e| e.to_string())?;
    }
    let calls = calls.join(" | ");
    Ok(format!(
        "{start}\nblock: {open} \"\\n\" ({calls}) \"\\n\" {close}\n{}",
        rules.text
    ))
}

/// What a schema says of the parameters of a tool, without alternatives.
#[derive(Clone, Default)]
struct ParameterShape {
    properties: Map<String, Value>,
    required: Vec<String>,
    /// The schema of other parameters; `None` if there may be none.
    others: Option<Value>,
}

impl ParameterShape {
    /// What both say.
    fn and(&self, other: &ParameterShape) -> ParameterShape {
        let mut both = self.clone();
        for (name, schema) in &other.properties {
            let all = match both.properties.get(name) {
                Some(own) if own != schema => json!({"allOf": [own, schema]}),
                _ => schema.clone(),
            };
            both.properties.insert(name.clone(), all);
        }
        both.required.extend(other.required.iter().cloned());
        both.others = match (&self.others, &other.others) {
            (Some(a), Some(b)) if *a == Value::Bool(true) => Some(b.clone()),
            (Some(a), Some(_)) => Some(a.clone()),
            _ => None,
        };
        both
    }
}

/// Keywords that say nothing of parameters, and those that [`shapes`] reads.
#[rustfmt::skip]
const READ: [&str; 18] = [
    "type", "properties", "required", "additionalProperties", "$ref", "allOf", "anyOf", "oneOf", "$defs",
    "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples", "x-guidance",
];

/// The alternatives that a schema allows for a tool's parameters.
fn shapes(root: &Value, schema: &Value, depth: usize) -> Result<Vec<ParameterShape>, String> {
    if depth > MOST_DEPTH {
        return Err("expected alternatives and references that end".into());
    }
    let mut own = ParameterShape {
        others: Some(true.into()),
        ..ParameterShape::default()
    };
    let Some(map) = schema.as_object() else {
        return match schema {
            Value::Bool(true) => Ok(vec![own]),
            _ => Ok(Vec::new()),
        };
    };
    let allows = |kind: &Value| match kind {
        Value::Array(kinds) => kinds.iter().any(|k| k == "object"),
        kind => kind == "object",
    };
    if !map.get("type").is_none_or(allows) {
        return Ok(Vec::new());
    }
    if let Some(unread) = map.keys().find(|k| !READ.contains(&k.as_str())) {
        let why = "cannot be enforced in the form of this model's calls";
        return Err(format!("{unread} {why}"));
    }
    if let Some(Value::Object(properties)) = map.get("properties") {
        own.properties = properties.clone();
    }
    match map.get("additionalProperties") {
        Some(Value::Bool(false)) => own.others = None,
        Some(others) => own.others = Some(others.clone()),
        None => {}
    }
    let required = map.get("required").and_then(Value::as_array);
    let names = required.into_iter().flatten().filter_map(Value::as_str);
    own.required.extend(names.map(str::to_owned));
    let mut found = vec![own];
    let mut add = |alternatives: Vec<ParameterShape>| {
        let both = found
            .iter()
            .flat_map(|a| alternatives.iter().map(|b| a.and(b)));
        found = both.take(MOST_SHAPES + 1).collect();
        match found.len() > MOST_SHAPES {
            true => Err(format!(
                "expected at most {MOST_SHAPES} combinations of alternatives"
            )),
            false => Ok(()),
        }
    };
    if let Some(reference) = map.get("$ref").and_then(Value::as_str) {
        let schema = resolved(root, reference);
        let schema = schema.ok_or_else(|| format!("{reference} is not in the schema"))?;
        add(shapes(root, schema, depth + 1)?)?;
    }
    for schema in map
        .get("allOf")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        add(shapes(root, schema, depth + 1)?)?;
    }
    for key in ["anyOf", "oneOf"] {
        let Some(Value::Array(schemas)) = map.get(key) else {
            continue;
        };
        let coerced = schema["x-guidance"]["coerce_one_of"] == true;
        if key == "oneOf" && schemas.len() > 1 && !coerced {
            let why = "alternatives that may overlap cannot be enforced";
            return Err(format!("oneOf: {why}"));
        }
        let mut alternatives = Vec::new();
        for schema in schemas {
            alternatives.extend(shapes(root, schema, depth + 1)?);
        }
        add(alternatives)?;
    }
    Ok(found)
}

/// The rule of an XML call's parameters.
fn xml(rules: &mut Rules, root: &Value) -> Result<String, String> {
    let shapes = shapes(root, root, 0)?;
    if shapes.is_empty() {
        let kind = root.get("type").unwrap_or(root);
        return Err(format!("expected a schema of objects, found {kind}"));
    }
    let mut alternatives = Vec::new();
    for shape in &shapes {
        let mut parts = Vec::new();
        let unlisted = shape
            .required
            .iter()
            .filter(|r| !shape.properties.contains_key(*r));
        let all = Value::Bool(true);
        let others = unlisted.map(|name| (name, shape.others.as_ref().unwrap_or(&all)));
        for (name, schema) in shape.properties.iter().chain(others) {
            if name.is_empty() || name.contains(['<', '>', '\n', '"']) || name.trim() != name {
                return Err(format!(
                    "{name:?} cannot be the name of a parameter in this model's calls"
                ));
            }
            let required = shape.required.contains(name);
            if *schema == Value::Bool(false) && !required {
                continue;
            }
            let begin = literal(&format!("<parameter={name}>\n"));
            let part = format!("{begin} {}", value(rules, root, schema)?);
            let part = rules.add("parameter", "", &part);
            parts.push(if required { part } else { format!("{part}?") });
        }
        if let Some(schema) = &shape.others
            && (shape.properties.is_empty() || *schema != Value::Bool(true))
        {
            let value = value(rules, root, schema)?;
            let part = format!("\"<parameter=\" /[A-Za-z0-9_.\\-]{{1,64}}/ \">\\n\" {value}");
            let part = rules.add("parameter", "", &part);
            parts.push(format!("{part}{{0,{MOST_CALLS}}}"));
        }
        let body = if parts.is_empty() {
            "\"\"".to_owned()
        } else {
            parts.join(" ")
        };
        alternatives.push(rules.add("parameters", "", &body));
    }
    Ok(format!("({})", alternatives.join(" | ")))
}

/// The rule of a value and the tag that ends it: strings are written as they are, everything else as JSON.
fn value(rules: &mut Rules, root: &Value, schema: &Value) -> Result<String, String> {
    let (mut texts, mut jsons) = (Vec::new(), Vec::new());
    split(root, schema, 0, &mut texts, &mut jsons)?;
    let mut alternatives = Vec::new();
    for text in &texts {
        alternatives.push(text_rule(rules, text, &jsons));
    }
    for json in &jsons {
        let json = rules.json(&compact(json.clone(), " ")?);
        alternatives.push(format!("{json} \"{END}\""));
    }
    if alternatives.is_empty() {
        return Err(format!("no value fits {schema}"));
    }
    Ok(rules.add("value", "", &alternatives.join(" | ")))
}

/// What may be written for a string.
#[derive(Clone, Debug)]
enum StringText {
    One(String),
    /// Of these lengths in characters, and with this pattern.
    Any {
        least: u64,
        most: Option<u64>,
        pattern: Option<String>,
    },
}

/// Keywords beside alternatives that say nothing.
const NOTES: [&str; 9] = [
    "type",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "discriminator",
    "readOnly",
    "$comment",
];

/// Splits a schema into strings and schemas of everything else.
fn split(
    root: &Value,
    schema: &Value,
    depth: usize,
    texts: &mut Vec<StringText>,
    jsons: &mut Vec<Value>,
) -> Result<(), String> {
    if depth > MOST_DEPTH {
        return Err("expected alternatives and references that end".into());
    }
    if !may_be_text(root, schema) {
        jsons.push(within(root, schema));
        return Ok(());
    }
    if let Some(Value::Array(values)) = schema.get("enum") {
        for value in values {
            split(root, &json!({"const": value}), depth + 1, texts, jsons)?;
        }
        return Ok(());
    }
    if let Some(Value::String(text)) = schema.get("const") {
        texts.push(StringText::One(text.clone()));
        return Ok(());
    }
    for key in ["$ref", "anyOf", "oneOf", "allOf"] {
        let inner: Vec<&Value> = match schema.get(key) {
            None => continue,
            Some(Value::String(reference)) => resolved(root, reference).into_iter().collect(),
            Some(schemas) => schemas.as_array().into_iter().flatten().collect(),
        };
        let mut keys = schema.as_object().into_iter().flat_map(Map::keys);
        let alone = keys.all(|k| k == key || NOTES.contains(&k.as_str()));
        if inner.is_empty() || !alone || key == "allOf" && inner.len() > 1 {
            return Err(format!(
                "{key} of a string cannot be enforced in the form of this model's calls"
            ));
        }
        for schema in inner {
            split(root, schema, depth + 1, texts, jsons)?;
        }
        return Ok(());
    }
    let number = |key: &str| schema.get(key).and_then(Value::as_u64);
    let pattern = schema.get("pattern").and_then(Value::as_str);
    texts.push(StringText::Any {
        least: number("minLength").unwrap_or(0),
        most: number("maxLength"),
        pattern: pattern.map(str::to_owned),
    });
    if let Some(Value::Array(kinds)) = schema.get("type") {
        let others: Vec<&Value> = kinds.iter().filter(|kind| *kind != "string").collect();
        if !others.is_empty() {
            let mut other = schema.clone();
            other["type"] = json!(others);
            jsons.push(within(root, &other));
        }
    }
    Ok(())
}

/// Tags that end values, wherever they are.
const TAGS: &str = "<(\\/(parameter|function|tool_calls?)>|(parameter|function)=|tool_call>)";

/// The rule of a string and the tag that ends it. `beside`: what else may be written in its place, so that no string
/// must be taken for it.
fn text_rule(rules: &mut Rules, text: &StringText, beside: &[Value]) -> String {
    let (least, most, pattern) = match text {
        StringText::One(text) => return format!("{} \"{END}\"", literal(text)),
        StringText::Any {
            least,
            most,
            pattern,
        } => (least, most, pattern),
    };
    let most = most.map(|most| most.to_string()).unwrap_or_default();
    let mut parts = vec![
        format!("/(?s:.{{{least},{most}}})/"),
        format!("~/(?s:.*){TAGS}(?s:.*)/"),
    ];
    let words = |schema: &Value| {
        ["null", "boolean"]
            .iter()
            .any(|kind| schema["type"] == *kind)
    };
    if !beside.iter().all(words) {
        parts.push("/([^\\s{\\[0-9\\-](?s:.*))?/".into());
    }
    if let Some(pattern) = pattern {
        let (inner, begins) = match pattern.strip_prefix('^') {
            Some(inner) => (inner, true),
            None => (pattern.as_str(), false),
        };
        let (inner, ends) = match inner.strip_suffix('$').filter(|i| !i.ends_with('\\')) {
            Some(inner) => (inner, true),
            None => (inner, false),
        };
        let any = |is_there| if is_there { "" } else { "(?s:.*)" };
        let inner = regex_to_lark(inner, "dw");
        parts.push(format!("/{}({inner}){}/", any(begins), any(ends)));
    }
    let body = rules.add("TEXT", "", &parts.join(" & "));
    rules.add("text", &format!("[suffix=\"{END}\"]"), &body)
}
