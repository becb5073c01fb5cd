//! A message of a chat.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Fields of a message that hold what a model thought, under the names that clients give them.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// An image among the parts of a message's content.
pub fn image_part() -> Value {
    json!({"type": "image"})
}

/// One message of a chat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// A string in most chats; null or a list of parts where a format allows it.
    #[serde(default)]
    pub content: Value,
    /// All other fields that a template may read: `reasoning_content`, `tool_calls`, `name`, ...
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

    /// The message with its reasoning under each of the names that templates read, as transformers gives it.
    pub(super) fn aliased(&self) -> Cow<'_, Message> {
        let mut given = REASONING.iter().filter_map(|key| self.extra.get(*key));
        let Some(reasoning) = given.find(|v| !v.is_null()).cloned() else {
            return Cow::Borrowed(self);
        };
        let mut message = self.clone();
        message
            .extra
            .entry(REASONING[1])
            .or_insert_with(|| reasoning.clone());
        message.extra.insert(REASONING[0].into(), reasoning);
        Cow::Owned(message)
    }

    /// The content if it is plain text, the last of its texts if there are images before it, otherwise an empty string.
    pub fn text(&self) -> &str {
        let last = || self.content.as_array()?.last()?["text"].as_str();
        self.content.as_str().or_else(last).unwrap_or_default()
    }

    /// Bytes of all texts of its content.
    pub fn text_bytes(&self) -> usize {
        let parts = self.content.as_array().into_iter().flatten();
        let texts = parts.filter_map(|part| part["text"].as_str());
        texts.chain(self.content.as_str()).map(str::len).sum()
    }
}
