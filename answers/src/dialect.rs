//! What a chat template makes of messages, found out by rendering some.

use crate::output::{CallForm, CallParser};
use nq_runtime::{ChatTemplate, Message};
use serde_json::json;

/// How a model is given the descriptions of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolPrompt {
    /// By its template; calls have this form.
    Template(CallForm),
    /// The template does not support tools: they are described in the system message, and calls and
    /// results are put into the text.
    Described,
}

impl ToolPrompt {
    /// Finds out how a template presents tools, by rendering some.
    pub fn of(template: &ChatTemplate) -> Self {
        let name = "nq_probe";
        let tool = json!({"type": "function", "function": {
            "name": name, "description": "d",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        }});
        let call = json!([{"type": "function", "id": "1", "function": {
            "name": name, "arguments": {"key": "value"},
        }}]);
        let mut asked = Message::new("assistant", "");
        asked.extra.insert("tool_calls".into(), call);
        let messages = [Message::new("user", "u"), asked, Message::new("tool", "t")];
        let text = template.render(&messages, Some(&[tool]), true, None);
        match text {
            Ok(text) if text.contains(&format!("<function={name}>")) => {
                ToolPrompt::Template(CallForm::Xml)
            }
            Ok(text) if text.contains(CallParser::OPEN) && text.matches(name).count() > 1 => {
                ToolPrompt::Template(CallForm::Json)
            }
            _ => ToolPrompt::Described,
        }
    }

    /// True if the template presents tools and reads their results.
    pub fn is_templates(self) -> bool {
        matches!(self, ToolPrompt::Template(_))
    }
}

/// How a model's template treats system messages and thinking.
#[derive(Clone, Debug)]
pub(crate) struct Dialect {
    /// False if a system message may stand at the beginning alone.
    system_anywhere: bool,
    /// What the template writes between thinking and the answer.
    pub(crate) thinking_end: String,
}

impl Default for Dialect {
    fn default() -> Self {
        Dialect {
            system_anywhere: true,
            thinking_end: "\n</think>\n\n".to_owned(),
        }
    }
}

impl Dialect {
    /// That of a template.
    pub(crate) fn of(template: &ChatTemplate) -> Self {
        let render = |messages: &[Message]| template.render(messages, None, false, None).ok();
        let (thought, said, told) = ("nq-probe-1", "nq-probe-2", "nq-probe-3");
        let mut answer = Message::new("assistant", said);
        answer
            .extra
            .insert("reasoning_content".into(), thought.into());
        let user = Message::new("user", "u");
        let shown = render(&[user.clone(), answer.clone()]);
        let between = shown.as_deref().and_then(|text| {
            let (_, after) = text.split_once(thought)?;
            Some(after.split_once(said)?.0.to_owned())
        });
        let end = between.filter(|end| end.contains("</think>") && end.len() < 64);
        let system = Message::new("system", told);
        let middle = render(&[user.clone(), answer, system, user]);
        let plain = Dialect::default();
        Dialect {
            system_anywhere: middle.is_some_and(|text| text.contains(told)),
            thinking_end: end.unwrap_or(plain.thinking_end),
        }
    }

    /// Messages as the template takes them: where it has system messages at the beginning alone, those there
    /// become one, and later ones turns of the user that say what they are.
    pub(crate) fn arranged(&self, messages: Vec<Message>) -> Vec<Message> {
        if self.system_anywhere {
            return messages;
        }
        let mut out: Vec<Message> = Vec::with_capacity(messages.len());
        for mut message in messages {
            if message.role == "system" {
                match out.as_mut_slice() {
                    [] => {}
                    [first] if first.role == "system" => {
                        let text = format!("{}\n\n{}", first.text(), message.text());
                        first.content = text.into();
                        continue;
                    }
                    _ => {
                        let text = format!("[system message]\n{}", message.text());
                        message.content = text.into();
                        message.role = "user".into();
                    }
                }
            }
            out.push(message);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRICT: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
        {{ raise_exception('first') }}{% endif %}<{{ m.role }}>{% if m.reasoning_content %}<think>\
        {{ m.reasoning_content }} </think> {% endif %}{{ m.content }}{% endfor %}";

    #[test]
    fn system_messages_go_where_the_template_takes_them() {
        let template = ChatTemplate::from_source("t", STRICT).unwrap();
        let dialect = Dialect::of(&template);
        assert_eq!(dialect.thinking_end, " </think> ");
        let chat = |roles: &[&str]| -> Vec<Message> {
            let texts = roles.iter().enumerate();
            texts
                .map(|(i, role)| Message::new(*role, i.to_string()))
                .collect()
        };
        let shown = |roles: &[&str]| {
            let arranged = dialect.arranged(chat(roles));
            template.render(&arranged, None, false, None).unwrap()
        };
        assert_eq!(
            shown(&["system", "system", "user", "system", "user"]),
            "<system>0\n\n1<user>2<user>[system message]\n3<user>4"
        );
        assert_eq!(
            shown(&["user", "system"]),
            "<user>0<user>[system message]\n1"
        );
        let loose = ChatTemplate::from_source(
            "t",
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        );
        let loose = Dialect::of(&loose.unwrap());
        assert_eq!(loose.arranged(chat(&["user", "system"]))[1].role, "system");
        assert_eq!(loose.thinking_end, Dialect::default().thinking_end);
    }
}
