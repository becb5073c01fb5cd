//! Rendered chats that tell control tokens quoted in messages from those of the template.

use super::message::Message;
use crate::error::Result;
use crate::tokenizer::control::ControlTokens;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashSet;

/// Private-use characters; one that does not occur in a chat marks its quotations.
const MARKS: std::ops::RangeInclusive<char> = '\u{100000}'..='\u{10fffd}';

/// A rendered chat. See [`ChatTemplate::prompt`](super::ChatTemplate::prompt).
#[derive(Clone, Debug)]
pub struct RenderedChat {
    text: String,
    /// The character after the first character of each quoted control token; `None` if there are none.
    mark: Option<char>,
}

impl RenderedChat {
    /// Renders messages in which the `control` tokens are marked.
    pub(super) fn new(
        control: &ControlTokens,
        messages: &[Message],
        tools: Option<&[Value]>,
        render: impl FnOnce(&[Message], Option<&[Value]>) -> Result<String>,
    ) -> Result<Self> {
        let quotes = |found: &mut bool, s: &str| *found = *found || !control.places(s).is_empty();
        let mut found = false;
        visit(messages, tools, &mut |s| quotes(&mut found, s));
        if !found {
            let text = render(messages, tools)?;
            return Ok(RenderedChat { text, mark: None });
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
        Ok(RenderedChat {
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
    pub(crate) fn parts(&self, control: &ControlTokens) -> Vec<(String, bool)> {
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
        let mut end = 0;
        for token in control.spans(&self.text) {
            push(&self.text[end..token.start]);
            push(&self.text[token.clone()]);
            end = token.end;
        }
        push(&self.text[end..]);
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

fn marked_value(v: &Value, control: &ControlTokens, mark: char) -> Value {
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

fn marked_map(map: &Map<String, Value>, control: &ControlTokens, mark: char) -> Map<String, Value> {
    map.iter()
        .map(|(k, v)| (marked(k, control, mark), marked_value(v, control, mark)))
        .collect()
}

/// The text with a mark behind the first character of each control token, and of anything at its end that could
/// begin one, since templates may join strings.
fn marked(s: &str, control: &ControlTokens, mark: char) -> String {
    let places = control.places(s);
    let mut out = String::with_capacity(s.len() + places.len() * mark.len_utf8());
    let mut end = 0;
    for at in places {
        out.push_str(&s[end..at]);
        out.push(mark);
        end = at;
    }
    out + &s[end..]
}
