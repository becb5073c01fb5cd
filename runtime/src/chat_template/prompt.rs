//! Rendered chats that tell control tokens quoted in messages from those of the template.

use super::Message;
use crate::error::Result;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashSet;

/// Private-use characters; one that does not occur in a chat marks its quotations.
const MARKS: std::ops::RangeInclusive<char> = '\u{100000}'..='\u{10fffd}';

/// A rendered chat. See [`ChatTemplate::prompt`](super::ChatTemplate::prompt).
#[derive(Clone, Debug)]
pub struct Prompt {
    text: String,
    /// The character after the first character of each quoted control token; `None` if there are none.
    mark: Option<char>,
}

impl Prompt {
    /// Renders messages in which the `control` tokens are marked.
    pub(super) fn new(
        control: &[String],
        messages: &[Message],
        tools: Option<&[Value]>,
        render: impl FnOnce(&[Message], Option<&[Value]>) -> Result<String>,
    ) -> Result<Self> {
        let quotes = |found: &mut bool, s: &str| *found |= !places(s, control).is_empty();
        let mut found = false;
        visit(messages, tools, &mut |s| quotes(&mut found, s));
        if !found {
            let text = render(messages, tools)?;
            return Ok(Prompt { text, mark: None });
        }
        let mut used = HashSet::new();
        visit(messages, tools, &mut |s| {
            used.extend(s.chars().filter(|c| MARKS.contains(c)));
        });
        // No chat that fits a context uses all 65,534 characters of the area.
        let mark = MARKS.into_iter().find(|c| !used.contains(c));
        let mark = mark.unwrap_or(*MARKS.end());
        let marked: Vec<Message> = messages
            .iter()
            .map(|m| Message {
                role: marked(&m.role, control, mark),
                content: marked_value(&m.content, control, mark),
                extra: marked_map(&m.extra, control, mark),
            })
            .collect();
        let tools: Option<Vec<Value>> = tools.map(|tools| {
            let tools = tools.iter();
            tools.map(|t| marked_value(t, control, mark)).collect()
        });
        Ok(Prompt {
            text: render(&marked, tools.as_deref())?,
            mark: Some(mark),
        })
    }

    /// The chat as the model reads it.
    pub fn text(&self) -> Cow<'_, str> {
        match self.mark {
            Some(mark) => self.text.replace(mark, "").into(),
            None => (&self.text).into(),
        }
    }

    /// True if messages quote control tokens.
    pub(crate) fn is_marked(&self) -> bool {
        self.mark.is_some()
    }

    /// The text in parts, each with a flag: true if it quotes control tokens and contains none itself.
    pub(crate) fn parts(&self, control: &[String]) -> Vec<(String, bool)> {
        let mut parts: Vec<(String, bool)> = Vec::new();
        let mut push = |text: &str| {
            let quotes = self.mark.is_some_and(|mark| text.contains(mark));
            match parts.last_mut() {
                Some((last, false)) if !quotes => last.push_str(text),
                _ => parts.push((
                    self.mark.map_or(text.into(), |m| text.replace(m, "")),
                    quotes,
                )),
            }
        };
        let mut rest = self.text.as_str();
        // The leftmost token; of several at the same place, the longest.
        while let Some((at, token)) = control
            .iter()
            .filter_map(|token| Some((rest.find(token.as_str())?, token.as_str())))
            .min_by_key(|(at, token)| (*at, usize::MAX - token.len()))
        {
            push(&rest[..at]);
            push(token);
            rest = &rest[at + token.len()..];
        }
        push(rest);
        parts
    }
}

/// Calls `f` with every string of a chat.
fn visit(messages: &[Message], tools: Option<&[Value]>, f: &mut dyn FnMut(&str)) {
    fn value(v: &Value, f: &mut dyn FnMut(&str)) {
        match v {
            Value::String(s) => f(s),
            Value::Array(items) => items.iter().for_each(|v| value(v, f)),
            Value::Object(map) => object(map, f),
            _ => {}
        }
    }
    fn object(map: &Map<String, Value>, f: &mut dyn FnMut(&str)) {
        for (key, v) in map {
            f(key);
            value(v, f);
        }
    }
    for m in messages {
        f(&m.role);
        value(&m.content, f);
        object(&m.extra, f);
    }
    tools.into_iter().flatten().for_each(|t| value(t, f));
}

fn marked_value(v: &Value, control: &[String], mark: char) -> Value {
    match v {
        Value::String(s) => marked(s, control, mark).into(),
        Value::Array(items) => {
            let items = items.iter();
            items.map(|v| marked_value(v, control, mark)).collect()
        }
        Value::Object(map) => marked_map(map, control, mark).into(),
        other => other.clone(),
    }
}

fn marked_map(map: &Map<String, Value>, control: &[String], mark: char) -> Map<String, Value> {
    map.iter()
        .map(|(k, v)| (marked(k, control, mark), marked_value(v, control, mark)))
        .collect()
}

fn marked(s: &str, control: &[String], mark: char) -> String {
    let mut out = s.to_owned();
    for at in places(s, control).into_iter().rev() {
        out.insert(at, mark);
    }
    out
}

/// Where marks go in a string, in order: after the first character of each control token, and of
/// anything at the string's end that could begin one, since templates may join strings.
fn places(s: &str, control: &[String]) -> Vec<usize> {
    let mut places = Vec::new();
    for token in control {
        let first = token.chars().next().map_or(0, char::len_utf8);
        let mut at = 0;
        while let Some(found) = s[at..].find(token.as_str()) {
            places.push(at + found + first);
            at += found + first;
        }
        let begun = (1..token.len()).filter(|&n| token.is_char_boundary(n));
        let begun = begun.filter(|&n| s.ends_with(&token[..n]));
        places.extend(begun.map(|n| s.len() - n + first));
    }
    places.sort_unstable();
    places.dedup();
    places
}
