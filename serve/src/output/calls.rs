//! Reads tool calls in an answer's text.
//!
//! Two forms are supported, both between `<tool_call>` and `</tool_call>`: the Hermes JSON of Qwen2.5
//! and Qwen3, `{"name": ..., "arguments": {...}}`, whose arguments are passed on as they come, and the
//! XML of Qwen3-Coder and Qwen3.5, `<function=NAME><parameter=KEY>VALUE</parameter></function>`,
//! which becomes JSON at its end. Anything else stays text: nothing that a model wrote is lost.

use super::{Piece, join};
use nq_runtime::thinking::overlap;
use serde_json::{Map, Value};

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// `{"name": ..., "arguments": {...}}`.
    Json,
    /// `<function=NAME>` with `<parameter=KEY>` inside.
    Xml,
}

/// Finds calls in text that comes in pieces.
#[derive(Debug, Default)]
pub struct CallParser {
    state: State,
    held: String,
    count: usize,
}

#[derive(Debug, Default)]
enum State {
    /// Outside a call.
    #[default]
    Text,
    /// In a call whose name is not known yet.
    Head,
    /// In a call that is read as a whole at its end.
    Whole,
    /// In the arguments.
    Arguments(Braces),
    /// Behind the arguments.
    Tail,
}

/// Position in a JSON object.
#[derive(Debug, Default)]
struct Braces {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Braces {
    /// Takes a character; true if it ends the object.
    fn push(&mut self, c: char) -> bool {
        match (self.in_string, c) {
            (true, _) if self.escaped => self.escaped = false,
            (true, '\\') => self.escaped = true,
            (_, '"') => self.in_string = !self.in_string,
            (false, '{' | '[') => self.depth += 1,
            (false, '}' | ']') => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        !self.in_string && self.depth == 0
    }
}

/// The beginning of a call.
enum Head {
    /// Incomplete.
    Open,
    /// A name, and where its arguments, an object, begin.
    Named(String, usize),
    /// Another form.
    Other,
}

impl CallParser {
    /// The text that begins a call.
    pub const OPEN: &'static str = "<tool_call>";
    /// The text that ends it.
    pub const CLOSE: &'static str = "</tool_call>";

    /// Number of calls begun.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes more text and appends the pieces that are certain to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        while self.advance(out) {}
    }

    /// Ends the text.
    pub fn finish(&mut self, out: &mut Vec<Piece>) {
        let rest = std::mem::take(&mut self.held);
        match std::mem::take(&mut self.state) {
            // White space after a call is not part of the text.
            State::Text if self.count > 0 && rest.trim().is_empty() => {}
            State::Text if !rest.is_empty() => join(out, Piece::Text(rest)),
            State::Head | State::Whole => self.whole(&rest, "", out),
            _ => {}
        }
    }

    /// Makes one step; false if more text is needed.
    fn advance(&mut self, out: &mut Vec<Piece>) -> bool {
        match &mut self.state {
            State::Text => {
                let found = self.held.find(Self::OPEN);
                let end = found.unwrap_or(self.held.len() - overlap(&self.held, Self::OPEN));
                // White space before a call is not part of the text; whether a call follows is not
                // known yet.
                let certain = self.held[..end].trim_end().len();
                if certain > 0 {
                    join(out, Piece::Text(self.held[..certain].to_owned()));
                }
                let Some(at) = found else {
                    self.held.drain(..certain);
                    return false;
                };
                self.held.drain(..at + Self::OPEN.len());
                self.state = State::Head;
                true
            }
            State::Head => match head(&self.held) {
                Head::Open => self.close(out),
                Head::Other => {
                    self.state = State::Whole;
                    true
                }
                Head::Named(name, at) => {
                    self.start(name, out);
                    self.held.drain(..at);
                    self.state = State::Arguments(Braces::default());
                    true
                }
            },
            State::Whole => self.close(out),
            State::Arguments(braces) => {
                let mut chars = self.held.char_indices();
                let end = chars
                    .find(|&(_, c)| braces.push(c))
                    .map(|(i, c)| i + c.len_utf8());
                let text: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
                let index = self.count - 1;
                if !text.is_empty() {
                    join(out, Piece::CallArguments { index, text });
                }
                if end.is_some() {
                    self.state = State::Tail;
                }
                end.is_some()
            }
            State::Tail => {
                let Some(at) = self.held.find(Self::CLOSE) else {
                    return false;
                };
                self.held.drain(..at + Self::CLOSE.len());
                self.state = State::Text;
                true
            }
        }
    }

    /// Ends a call that is read as a whole, if its end has come.
    fn close(&mut self, out: &mut Vec<Piece>) -> bool {
        let Some(at) = self.held.find(Self::CLOSE) else {
            return false;
        };
        let call: String = self.held.drain(..at).collect();
        self.held.drain(..Self::CLOSE.len());
        self.state = State::Text;
        self.whole(&call, Self::CLOSE, out);
        true
    }

    fn start(&mut self, name: String, out: &mut Vec<Piece>) {
        let index = self.count;
        self.count += 1;
        out.push(Piece::CallStart { index, name });
    }

    /// Reads a complete call; anything else stays text.
    fn whole(&mut self, call: &str, close: &str, out: &mut Vec<Piece>) {
        match json_call(call).or_else(|| xml_call(call)) {
            Some((name, text)) => {
                self.start(name, out);
                let index = self.count - 1;
                join(out, Piece::CallArguments { index, text });
            }
            None => {
                let text = format!("{}{call}{close}", Self::OPEN);
                join(out, Piece::Text(text));
            }
        }
    }
}

/// Reads `{"name": "...", "arguments": {` in that order.
fn head(text: &str) -> Head {
    let mut rest = text;
    // The text must be a beginning of what is expected, otherwise it has another form.
    let open = |rest: &str, wanted: &str| {
        if wanted.starts_with(rest) {
            Head::Open
        } else {
            Head::Other
        }
    };
    for wanted in ["{", "\"name\"", ":"] {
        rest = rest.trim_start();
        match rest.strip_prefix(wanted) {
            Some(after) => rest = after,
            None => return open(rest, wanted),
        }
    }
    rest = rest.trim_start();
    let Some(inner) = rest.strip_prefix('"') else {
        return open(rest, "\"");
    };
    let mut escaped = false;
    let end = inner.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    let Some(end) = end else {
        return Head::Open;
    };
    let Ok(name) = serde_json::from_str(&rest[..end + 2]) else {
        return Head::Other;
    };
    rest = &inner[end + 1..];
    for wanted in [",", "\"arguments\"", ":"] {
        rest = rest.trim_start();
        match rest.strip_prefix(wanted) {
            Some(after) => rest = after,
            None => return open(rest, wanted),
        }
    }
    rest = rest.trim_start();
    if rest.starts_with('{') {
        Head::Named(name, text.len() - rest.len())
    } else {
        open(rest, "{")
    }
}

/// A JSON call whose keys are in any order, or whose arguments are JSON in a string.
fn json_call(text: &str) -> Option<(String, String)> {
    let call: Map<String, Value> = serde_json::from_str(text.trim()).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = call.get("arguments").or_else(|| call.get("parameters"));
    let text = match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => match serde_json::from_str::<Map<String, Value>>(text) {
            Ok(_) => text.clone(),
            Err(_) => return None,
        },
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => return None,
    };
    Some((name, text))
}

/// An XML call. A value that is JSON, but not a string, is kept as JSON.
fn xml_call(text: &str) -> Option<(String, String)> {
    let rest = text.trim().strip_prefix("<function=")?;
    let (name, mut rest) = rest.split_once('>')?;
    let mut arguments = Map::new();
    while let Some((_, after)) = rest.split_once("<parameter=") {
        let (key, after) = after.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let parsed = serde_json::from_str::<Value>(value)
            .ok()
            .filter(|v| !v.is_string());
        arguments.insert(
            key.trim().to_owned(),
            parsed.unwrap_or_else(|| value.into()),
        );
        rest = after;
    }
    Some((name.trim().to_owned(), Value::Object(arguments).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text, and calls as (name, arguments).
    fn parse(text: &str, size: usize) -> (String, Vec<(String, String)>) {
        let (mut parser, mut out) = (CallParser::default(), Vec::new());
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(size) {
            parser.push(&piece.iter().collect::<String>(), &mut out);
        }
        parser.finish(&mut out);
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in out {
            match piece {
                Piece::Text(t) => text.push_str(&t),
                Piece::CallStart { index, name } => {
                    assert_eq!(index, calls.len());
                    calls.push((name, String::new()));
                }
                Piece::CallArguments { index, text } => calls[index].1.push_str(&text),
                Piece::Reasoning(_) => unreachable!(),
            }
        }
        (text, calls)
    }

    #[test]
    fn calls_are_the_same_whatever_the_pieces() {
        let check = |text: &str, plain: &str, calls: &[(&str, &str)]| {
            let owned = calls
                .iter()
                .map(|(n, a)| ((*n).to_owned(), (*a).to_owned()));
            let expected = (plain.to_owned(), owned.collect::<Vec<_>>());
            for size in 1..=text.chars().count() {
                assert_eq!(parse(text, size), expected, "{text:?} by {size}");
            }
        };
        check(
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x} </tool_call> \\\" \u{e9}\", \"b\": [1, {}]}}\n</tool_call>",
            "",
            &[(
                "f",
                "{\"a\": \"x} </tool_call> \\\" \u{e9}\", \"b\": [1, {}]}",
            )],
        );
        check(
            "Let me see.\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n\
             <tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"g\"}</tool_call> done",
            "Let me see. done",
            &[("f", "{}"), ("g", "{\"a\":1}")],
        );
        check(
            "<tool_call>\n<function=run>\n<parameter=line>\nls -l\n</parameter>\n\
             <parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            "",
            &[("run", "{\"line\":\"ls -l\",\"n\":3}")],
        );
        check("a <tool_cal", "a <tool_cal", &[]);
        check("a < b", "a < b", &[]);
        check(
            "<tool_call>no call</tool_call> b",
            "<tool_call>no call</tool_call> b",
            &[],
        );
        check("<tool_call>{\"name\": 3}", "<tool_call>{\"name\": 3}", &[]);
        check(
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
            "",
            &[("f", "{\"a\": 1}")],
        );
        // Cut off in the arguments: what has come is passed on.
        check(
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
            "",
            &[("f", "{\"a\": ")],
        );
    }

    #[test]
    fn arguments_stream() {
        let (mut parser, mut out) = (CallParser::default(), Vec::new());
        parser.push(
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\"",
            &mut out,
        );
        assert_eq!(out.len(), 2, "{out:?}");
        parser.push(": 1", &mut out);
        let text = "{\"a\": 1".to_owned();
        assert_eq!(out[1], Piece::CallArguments { index: 0, text });
    }
}
