//! How much a model may think, in all the words in which clients say it.

use super::fields::Fields;
use crate::error::ApiError;
use nq_answers::Thinking;
use nq_runtime::chat_template::Switches;

/// Reads whatever a request says. What says most clearly counts: a switch before a kind of thinking, and that
/// before an effort.
///
/// # Errors
/// A value that is none of those known, by name.
pub(crate) fn read(fields: &mut Fields) -> Result<Thinking, ApiError> {
    let mut budget = budget_of(fields)?;
    let mut preserve: Option<bool> = fields.take("preserve_thinking")?;
    let mut switch: Option<bool> = fields.take("enable_thinking")?;
    let mut asked: Option<Effort> = None;
    if let Some(mut inner) = fields.object("chat_template_kwargs", "chat_template_kwargs")? {
        let older: Option<bool> = inner.take("thinking")?;
        switch = inner.take("enable_thinking")?.or(older).or(switch);
        preserve = inner.take("preserve_thinking")?.or(preserve);
        budget = budget_of(&mut inner)?.or(budget);
        asked = effort(&mut inner, "reasoning_effort")?;
        inner.finish()?;
    }
    if let Some(mut inner) = fields.object("thinking", "thinking.object")? {
        let kind: String = inner.require("type")?;
        let by_kind = match kind.as_str() {
            "enabled" | "adaptive" => Some(true),
            "auto" => None,
            "disabled" => Some(false),
            other => {
                let what = format!("expected enabled, adaptive, auto or disabled, found {other}");
                return Err(ApiError::field("thinking.type", what));
            }
        };
        switch = switch.or(by_kind);
        budget = budget.or(inner.count("budget_tokens", 0, usize::MAX)?);
        inner.finish()?;
    }
    if let Some(mut inner) = fields.object("reasoning", "reasoning")? {
        asked = asked.or(effort(&mut inner, "effort")?);
        let enabled: Option<bool> = inner.take("enabled")?;
        switch = switch.or(enabled);
        budget = budget.or(inner.count("max_tokens", 0, usize::MAX)?);
        inner.finish()?;
    }
    asked = asked.or(effort(fields, "reasoning_effort")?);
    Ok(settled(switch, preserve, budget, asked))
}

/// Names of a budget: Qwen's, vLLM's and llama.cpp's.
const BUDGETS: [&str; 3] = [
    "thinking_budget",
    "thinking_token_budget",
    "thinking_budget_tokens",
];

/// Reads a budget by the first of its names that has one; -1 is none.
fn budget_of(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let mut found = None;
    for name in BUDGETS {
        found = found.or(fields.limit(name, 0)?);
    }
    Ok(found)
}

/// An effort: thinking or not, and its name for a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Effort(Option<bool>, Option<String>);

/// Reads an effort.
///
/// # Errors
/// Another word.
pub(crate) fn effort(fields: &mut Fields, field: &str) -> Result<Option<Effort>, ApiError> {
    let name = fields.name(field);
    let Some(word) = fields.take::<String>(field)? else {
        return Ok(None);
    };
    match word.as_str() {
        "none" | "minimal" => Ok(Some(Effort(Some(false), None))),
        "low" | "medium" | "high" | "xhigh" | "max" => Ok(Some(Effort(Some(true), Some(word)))),
        "auto" | "default" => Ok(None),
        other => {
            let what = format!(
                "expected none, minimal, low, medium, high, xhigh, max, auto or default, found {other}"
            );
            Err(ApiError::field(&name, what))
        }
    }
}

/// What [`read`] found as Anthropic's protocol means it: who says nothing of thinking wants none, and an effort of
/// its `output_config` says how much is thought, not whether.
pub(crate) fn of_messages(found: Thinking, effort: Option<Effort>) -> Thinking {
    let word = effort.and_then(|Effort(_, word)| word);
    let by_budget = found.budget.map(|budget| budget > 0);
    let switches = found.switches;
    Thinking {
        switches: Switches {
            enable_thinking: Some(switches.enable_thinking.or(by_budget).unwrap_or(false)),
            reasoning_effort: switches.reasoning_effort.or(word),
            ..switches
        },
        ..found
    }
}

/// Reads `think` of Ollama's protocol: whether the model thinks, or how much.
///
/// # Errors
/// A value that is none of those known.
pub(crate) fn of_ollama(fields: &mut Fields) -> Result<Thinking, ApiError> {
    if !fields.peek("think").is_boolean() {
        let asked = effort(fields, "think")?;
        return Ok(settled(None, None, None, asked));
    }
    Ok(settled(fields.take("think")?, None, None, None))
}

fn settled(
    switch: Option<bool>,
    preserve: Option<bool>,
    budget: Option<usize>,
    effort: Option<Effort>,
) -> Thinking {
    let Effort(by_effort, word) = effort.unwrap_or(Effort(None, None));
    let budget_of_none = budget.filter(|&b| b == 0).map(|_| false);
    Thinking {
        switches: Switches {
            enable_thinking: switch.or(budget_of_none).or(by_effort),
            preserve_thinking: preserve,
            reasoning_effort: word,
        },
        budget,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn of(body: Value) -> Result<Thinking, ApiError> {
        let fields = Fields::parse(body.to_string().as_bytes(), Arc::default())?;
        read(&mut fields.under("thinking")?)
    }

    #[test]
    fn all_words_for_thinking_are_read() {
        let on = |body| of(body).unwrap().switches.enable_thinking;
        for off in [
            json!({"enable_thinking": false}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            json!({"thinking": {"type": "disabled"}}),
            json!({"reasoning": {"effort": "none"}}),
            json!({"reasoning": {"enabled": false}}),
            json!({"reasoning_effort": "minimal"}),
            json!({"thinking_budget": 0}),
            json!({"thinking_token_budget": 0}),
            json!({"chat_template_kwargs": {"thinking_budget_tokens": 0}}),
            json!({"enable_thinking": false, "reasoning_effort": "high"}),
        ] {
            assert_eq!(on(off.clone()), Some(false), "{off}");
        }
        for on_ in [
            json!({"thinking": {"type": "adaptive", "display": "summarized"}}),
            json!({"reasoning_effort": "max"}),
            json!({"reasoning": {"effort": "xhigh", "summary": "auto"}}),
        ] {
            assert_eq!(on(on_.clone()), Some(true), "{on_}");
        }
        for open in [
            json!({}),
            json!({"reasoning_effort": "auto"}),
            json!({"reasoning_effort": null}),
        ] {
            assert_eq!(on(open.clone()), None, "{open}");
        }
        let budget = |body, most| of(body).unwrap().tokens(false, most);
        let asked = json!({"thinking": {"type": "enabled", "budget_tokens": 2000}});
        assert_eq!(budget(asked.clone(), None), Some(2000));
        assert_eq!(budget(asked, Some(100)), Some(100));
        for name in BUDGETS {
            assert_eq!(budget(json!({name: 7}), None), Some(7), "{name}");
            assert_eq!(budget(json!({name: -1}), None), None, "{name}");
        }
        assert_eq!(
            budget(json!({"reasoning_effort": "low"}), None),
            Some(Thinking::LOW)
        );
        assert_eq!(budget(json!({"reasoning_effort": "high"}), None), None);
        let low = of(json!({"reasoning_effort": "low"})).unwrap();
        assert_eq!(low.tokens(true, None), None);
        let kept = of(json!({"chat_template_kwargs": {"preserve_thinking": true}})).unwrap();
        assert_eq!(kept.switches.preserve_thinking, Some(true));
        let anthropic = |body, word: &str| {
            let word = Fields::parse(
                json!({"effort": word}).to_string().as_bytes(),
                Arc::default(),
            );
            let mut fields = word?.under("output_config")?;
            Ok::<_, ApiError>(of_messages(of(body)?, effort(&mut fields, "effort")?))
        };
        // Claude Code sends an effort whether it wants thinking or not.
        for (body, word, on, most) in [
            (json!({}), "high", false, None),
            (
                json!({"thinking": {"type": "adaptive"}}),
                "high",
                true,
                None,
            ),
            (
                json!({"thinking": {"type": "adaptive"}}),
                "low",
                true,
                Some(Thinking::LOW),
            ),
            (
                json!({"thinking": {"type": "disabled"}}),
                "max",
                false,
                None,
            ),
            (json!({"thinking_budget": 9}), "auto", true, Some(9)),
            (json!({"enable_thinking": true}), "none", true, None),
            (json!({}), "none", false, None),
        ] {
            let found = anthropic(body.clone(), word).unwrap();
            assert_eq!(found.switches.enable_thinking, Some(on), "{body} {word}");
            assert_eq!(found.tokens(false, None), most, "{body} {word}");
        }
        for wrong in [
            json!({"reasoning_effort": "much"}),
            json!({"thinking": {"type": "loud"}}),
            json!({"chat_template_kwargs": {"messages": []}}),
        ] {
            assert_eq!(of(wrong.clone()).unwrap_err().status, 400, "{wrong}");
        }
    }
}
