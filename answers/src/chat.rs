//! A chat that is to be answered, and what the model makes of it.

use crate::grammar::{Format, Start};
use crate::hold::ThinkingBudget;
use crate::output::ReaderOptions;
use nq_runtime::Message;
use nq_runtime::chat_template::{Switches, integers};
use serde_json::{Value, json};

/// Which tools the model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ToolChoice {
    /// Any tool, or none.
    #[default]
    Auto,
    /// No tool.
    None,
    /// At least one tool.
    Required,
    /// This tool.
    Named(String),
}

/// How much a model is asked to think.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// What the template is told.
    pub switches: Switches,
    /// Most tokens of thinking, if the request says so itself.
    pub budget: Option<usize>,
}

impl Thinking {
    /// Tokens of thinking at low effort, for models whose template knows no efforts.
    pub const LOW: usize = 1024;
    /// Tokens of thinking at medium effort.
    pub(crate) const MEDIUM: usize = 8192;

    /// Most tokens of thinking: those that were asked for, or those of the effort, but at most `most`.
    pub fn tokens(&self, reads_effort: bool, most: Option<usize>) -> Option<usize> {
        let by_effort = match self.switches.reasoning_effort.as_deref() {
            Some("low") if !reads_effort => Some(Self::LOW),
            Some("medium") if !reads_effort => Some(Self::MEDIUM),
            _ => None,
        };
        let asked = self.budget.or(by_effort);
        asked.into_iter().chain(most).min()
    }
}

/// A chat that is to be answered.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// Its messages.
    pub messages: Vec<Message>,
    /// Tokens of the images in its messages, in their order.
    pub images: Vec<usize>,
    /// Its tools, in the format of OpenAI's chat.
    pub tools: Vec<Value>,
    /// Which of them the model may call.
    pub choice: ToolChoice,
    /// True if one call may be made at most.
    pub one_call: bool,
    /// How much the model thinks.
    pub thinking: Thinking,
    /// Most tokens of thinking, whatever is asked for.
    pub most_thinking: Option<usize>,
    /// The format that the answer must have.
    pub format: Option<Format>,
    /// True: the answer continues the last message.
    pub continues: bool,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
}

/// A chat as the model reads it.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// As text.
    pub text: String,
    /// As tokens, in which an image has as many as [`ChatInput::images`] says.
    pub tokens: Vec<u32>,
    /// Index of the first token of each image.
    pub images: Vec<usize>,
    /// The tokens at its end that the answer begins with.
    pub begun: Vec<u32>,
}

/// A prompt, what its answer is held to, and how it is read.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The prompt.
    pub prompt: Prompt,
    /// How the answer's text is split into pieces.
    pub reader: ReaderOptions,
    /// The constraint on the answer, and where in the answer it begins.
    pub format: Option<(Format, Start)>,
    /// The most that is thought.
    pub thinking: Option<ThinkingBudget>,
}

impl Asked {
    /// Asks for the continuation of `tokens`, up to the first of the texts in `stop`: nothing in it is told apart.
    pub fn continuation(tokens: Vec<u32>, stop: Vec<String>) -> Self {
        Asked {
            prompt: Prompt {
                text: String::new(),
                tokens,
                images: Vec::new(),
                begun: Vec::new(),
            },
            reader: ReaderOptions {
                stop,
                ..ReaderOptions::default()
            },
            format: None,
            thinking: None,
        }
    }
}

impl ChatInput {
    /// The tools that the model is shown.
    pub(crate) fn shown(&self) -> Option<&[Value]> {
        let shown = self.choice != ToolChoice::None && !self.tools.is_empty();
        shown.then_some(self.tools.as_slice())
    }

    /// What the answer must be, its calls included.
    pub(crate) fn whole_format(&self) -> Option<Format> {
        let several = !self.one_call;
        match (&self.choice, &self.format) {
            (ToolChoice::Required, _) => Some(Format::Calls {
                tools: signatures(&self.tools, None),
                several,
            }),
            (ToolChoice::Named(name), _) => Some(Format::Calls {
                tools: signatures(&self.tools, Some(name)),
                several: false,
            }),
            // A grammar or a pattern is of the whole answer, calls included.
            (ToolChoice::Auto, Some(answer @ (Format::Object | Format::Schema(_))))
                if self.shown().is_some() =>
            {
                Some(Format::CallsOr {
                    tools: signatures(&self.tools, None),
                    several,
                    answer: Box::new(answer.clone()),
                })
            }
            (_, format) => format.clone(),
        }
    }
}

/// Names of tools, and schemas of their arguments, with plain numbers; `name`: of this tool alone.
pub(crate) fn signatures(tools: &[Value], name: Option<&str>) -> Vec<(String, Value)> {
    let function = |tool: &Value| {
        let called = tool["function"]["name"].as_str().unwrap_or_default();
        let schema = match &tool["function"]["parameters"] {
            Value::Null => json!({"type": "object"}),
            schema => integers::numbers(schema),
        };
        name.is_none_or(|n| n == called)
            .then(|| (called.to_owned(), schema))
    };
    tools.iter().filter_map(function).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grammars_compute_with_numbers_of_any_length() {
        let tool =
            r#"{"function": {"name": "f", "parameters": {"maximum": 18446744073709551616}}}"#;
        let tool: Value = serde_json::from_slice(&integers::marked(tool.as_bytes())).unwrap();
        let schema = json!({"maximum": 18446744073709551616.0});
        assert_eq!(signatures(&[tool], None), [("f".to_owned(), schema)]);
    }
}
