//! Chats as text, by the Jinja template that a model was trained with.
//!
//! The environment is that of transformers' `apply_chat_template`: blocks trimmed, Python's
//! string and dict methods, `raise_exception`, `strftime_now`, loop controls, and a `tojson`
//! that is `json.dumps(..., ensure_ascii=False)`.

use crate::error::{Error, Result};
use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use nq_formats::Files;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The file that holds a template alone; it takes precedence, as in transformers.
pub(crate) const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The file that else holds it under the key `chat_template`.
pub(crate) const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// Name of the template used with tools, where a file has several.
const TOOL_USE: &str = "tool_use";
/// Name of the template used otherwise.
const DEFAULT: &str = "default";

/// One message of a chat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// A string in most chats; null or a list of parts where a format allows it.
    #[serde(default)]
    pub content: Value,
    /// Whatever else the template reads: `reasoning_content`, `tool_calls`, `name`, ...
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message {
            role: role.into(),
            content: Value::String(content.into()),
            extra: Map::new(),
        }
    }

    /// The content, if it is plain text; else nothing.
    pub fn text(&self) -> &str {
        self.content.as_str().unwrap_or_default()
    }
}

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    path: PathBuf,
    /// Special tokens by their role (`eos_token`, ...), as templates may use them.
    special_tokens: Map<String, Value>,
    switches_thinking: bool,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`: a string,
    /// or a list of named templates.
    ///
    /// # Errors
    /// [`Error::Text`] if there is none, or it is not a template.
    pub fn from_files(files: &Files) -> Result<Self> {
        let config = TokenizerConfig::read(files)?;
        let path = files.path(TEMPLATE_FILE);
        if let Some(bytes) = files.get(TEMPLATE_FILE)? {
            let source = std::str::from_utf8(&bytes)
                .map_err(|e| text_error(&path, format!("expected UTF-8, found {e}")))?;
            let templates = vec![(DEFAULT.to_owned(), source.to_owned())];
            return Self::new(path, templates, config.special_tokens);
        }
        if config.templates.is_empty() {
            let why = format!(
                "expected a chat_template, found none here and no {TEMPLATE_FILE} beside it"
            );
            return Err(text_error(&config.path, why));
        }
        Self::new(config.path, config.templates, config.special_tokens)
    }

    /// A template from its source; `path` stands for it in messages.
    ///
    /// # Errors
    /// [`Error::Text`] if it is not a template.
    pub fn from_source(path: impl Into<PathBuf>, source: &str) -> Result<Self> {
        let templates = vec![(DEFAULT.to_owned(), source.to_owned())];
        Self::new(path.into(), templates, Map::new())
    }

    fn new(
        path: PathBuf,
        templates: Vec<(String, String)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self> {
        let switches_thinking = templates.iter().any(|t| t.1.contains("enable_thinking"));
        let mut env = environment().map_err(|e| text_error(&path, describe(&e)))?;
        for (name, source) in templates {
            env.add_template_owned(name, source)
                .map_err(|e| text_error(&path, describe(&e)))?;
        }
        Ok(ChatTemplate {
            env,
            path,
            special_tokens,
            switches_thinking,
        })
    }

    /// True if the template reads `enable_thinking`.
    pub fn switches_thinking(&self) -> bool {
        self.switches_thinking
    }

    /// The chat as text. `tools` are JSON schemas of functions. `add_generation_prompt` opens
    /// the assistant's next message. `enable_thinking` is left undefined if `None`.
    ///
    /// # Errors
    /// [`Error::Text`] with the template's line, or with what it raised.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
    ) -> Result<String> {
        let fail = |e: minijinja::Error| text_error(&self.path, describe(&e));
        let named = |name| self.env.get_template(name);
        let template = match tools {
            Some(_) => named(TOOL_USE).or_else(|_| named(DEFAULT)),
            None => named(DEFAULT),
        };
        let mut variables = self.special_tokens.clone();
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        if let Some(thinking) = enable_thinking {
            variables.insert("enable_thinking".into(), thinking.into());
        }
        let context = Jinja::from(Serde(Context {
            messages,
            tools,
            variables,
        }));
        template.map_err(fail)?.render(context).map_err(fail)
    }
}

/// The variables of a template.
#[derive(Serialize)]
struct Context<'a> {
    messages: &'a [Message],
    tools: Option<&'a [Value]>,
    #[serde(flatten)]
    variables: Map<String, Value>,
}

/// What a template needs of `tokenizer_config.json`.
struct TokenizerConfig {
    path: PathBuf,
    /// (name, source)
    templates: Vec<(String, String)>,
    special_tokens: Map<String, Value>,
}

impl TokenizerConfig {
    /// Reads the file; an absent one is empty.
    fn read(files: &Files) -> Result<Self> {
        let path = files.path(TOKENIZER_CONFIG_FILE);
        let bad = |expected: &str| text_error(&path, format!("expected {expected}"));
        let json: Map<String, Value> = match files.get(TOKENIZER_CONFIG_FILE)? {
            Some(bytes) => {
                serde_json::from_slice(&bytes).map_err(|e| text_error(&path, e.to_string()))?
            }
            None => Map::new(),
        };
        let templates = match json.get("chat_template") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
            Some(Value::Array(list)) => {
                let mut named = Vec::new();
                for item in list {
                    match (item["name"].as_str(), item["template"].as_str()) {
                        (Some(name), Some(source)) => {
                            named.push((name.to_owned(), source.to_owned()));
                        }
                        _ => return Err(bad("a name and a template in each chat_template")),
                    }
                }
                if !named.iter().any(|t| t.0 == DEFAULT) {
                    return Err(bad("a chat_template named default"));
                }
                named
            }
            Some(_) => return Err(bad("chat_template to be a string or a list")),
        };
        let special_tokens = json
            .iter()
            .filter(|(key, _)| key.ends_with("_token"))
            .filter_map(|(key, value)| {
                let token = value.as_str().or_else(|| value["content"].as_str())?;
                Some((key.clone(), Value::String(token.to_owned())))
            })
            .collect();
        Ok(TokenizerConfig {
            path,
            templates,
            special_tokens,
        })
    }
}

fn text_error(path: &std::path::Path, why: String) -> Error {
    Error::Text {
        path: path.into(),
        what: "chat template",
        why,
    }
}

/// The error with its line; a chain of causes in one line.
fn describe(e: &minijinja::Error) -> String {
    let mut text = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    let mut syntax = env.syntax().to_builder();
    env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: String| -> Result<Jinja, _> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", |format: String| {
        jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
            .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
    });
    Ok(env)
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn tojson(
    value: &Jinja,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<Jinja, minijinja::Error> {
    let indent = match indent {
        Some(n) => Some(n),
        None => options.get::<Option<usize>>("indent")?,
    };
    // ensure_ascii is passed by some templates; transformers' filter takes it too.
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if value.is_undefined() || ascii == Some(true) {
        let what = match value.is_undefined() {
            true => "tojson of an undefined value",
            false => "tojson with ensure_ascii is not supported",
        };
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, what));
    }
    let json = serde_json::to_value(value)
        .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let mut out = String::new();
    dump(&json, indent, 0, &mut out);
    Ok(Jinja::from(out))
}

fn dump(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) {
    let new_line = |depth: usize, out: &mut String| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    match value {
        Value::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { comma } else { "" });
                new_line(depth + 1, out);
                dump(item, indent, depth + 1, out);
            }
            new_line(depth, out);
            out.push(']');
        }
        Value::Object(map) if !map.is_empty() => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                out.push_str(if i > 0 { comma } else { "" });
                new_line(depth + 1, out);
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push_str(": ");
                dump(item, indent, depth + 1, out);
            }
            new_line(depth, out);
            out.push('}');
        }
        Value::Number(n) if n.is_f64() => out.push_str(&python_float(n.as_f64().unwrap_or(0.0))),
        // serde_json escapes strings as Python does: quotes, backslashes and controls only.
        other => out.push_str(&other.to_string()),
    }
}

/// Python's `repr` of a finite float: the shortest digits that read back, with an exponent
/// below 1e-4 and from 1e16 on.
fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{x:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_pythons() {
        let check = |x: f64, expected: &str| assert_eq!(python_float(x), expected);
        check(2.5, "2.5");
        check(3.0, "3.0");
        check(-0.0, "-0.0");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(1.5e300, "1.5e+300");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(-1.25e-7, "-1.25e-07");
    }

    #[test]
    fn tojson_is_json_dumps() {
        let template = |source| ChatTemplate::from_source("t", source).unwrap();
        let tools = [serde_json::json!(
            {"z": "<a href='x'>&\"\\\n\u{7f}é", "a": [1, 2.0, true, null, [], {}]})];
        let render = |source| template(source).render(&[], Some(&tools), false, None);
        assert_eq!(
            render("{{ tools[0] | tojson }}").unwrap(),
            "{\"z\": \"<a href='x'>&\\\"\\\\\\n\u{7f}é\", \"a\": [1, 2.0, true, null, [], {}]}"
        );
        assert_eq!(
            render("{{ {'a': [1, {'b': 2}]} | tojson(indent=2) }}").unwrap(),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ]\n}"
        );
        let e = render("{{ nothing | tojson }}").unwrap_err().to_string();
        assert!(e.contains("undefined"), "{e}");
    }
}
