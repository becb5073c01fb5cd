//! Thinking within a budget.

use crate::common::{self, CHAT, MESSAGES, RESPONSES, Running, user, with};
use nq_serve::protocol::reading::Rules;
use nq_serve::{HttpLimits, Security};
use serde_json::{Value, json};

/// A template that opens thinking, for a model that would go on with it for long.
const THINKER: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n\
    {{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

#[test]
fn thinking_ends_when_its_budget_is_spent() {
    let server = Running::over(
        common::templated(THINKER),
        Security::default(),
        HttpLimits::default(),
    );
    let close = "\n</think>\n\n";
    let close = server.json("/tokenize", &json!({"prompt": close}))["count"]
        .as_u64()
        .unwrap();
    let short = |more: Value| {
        let body = json!({"messages": [user("Tell me about a film.")], "max_tokens": 60, "temperature": 0, "ignore_eos": true});
        server.json(CHAT, &with(body, &more))
    };
    let reasoning = |v: &Value| {
        v["usage"]["completion_tokens_details"]["reasoning_tokens"]
            .as_u64()
            .unwrap()
    };
    let endless = short(json!({}));
    assert_eq!(reasoning(&endless), 60, "{endless}");
    for (more, tokens) in [
        (json!({"thinking_budget": 5}), 5),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 7}}),
            7,
        ),
        (json!({"reasoning": {"max_tokens": 1}}), 1),
        (
            json!({"chat_template_kwargs": {"thinking_budget": 9}, "n": 2}),
            18,
        ),
    ] {
        let whole = short(more.clone());
        let message = &whole["choices"][0]["message"];
        let n = more.get("n").map_or(1, |n| n.as_u64().unwrap());
        assert!(
            reasoning(&whole) > tokens && reasoning(&whole) <= tokens + n * close,
            "{more} {whole}"
        );
        assert!(!message["content"].as_str().unwrap().is_empty(), "{whole}");
        assert!(
            !message["content"]
                .as_str()
                .unwrap()
                .starts_with(['<', '\n']),
            "{whole}"
        );
        // The thinking is the beginning of what it would have been.
        let all = endless["choices"][0]["message"]["reasoning_content"]
            .as_str()
            .unwrap();
        let thought = message["reasoning_content"].as_str().unwrap_or_default();
        assert!(all.starts_with(thought), "{thought:?} {all:?}");
        assert_eq!(whole["usage"]["completion_tokens"], 60 * n);
    }
    // With none, the answer begins at once.
    let none = short(json!({"thinking_budget": 0}));
    assert_eq!(reasoning(&none), 0, "{none}");
    // A format holds behind the thinking that was closed.
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}});
    let held = short(json!({"thinking_budget": 4, "response_format": schema, "ignore_eos": false}));
    let content = held["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(["\"yes\"", "\"no\""].contains(&content.trim()), "{held}");
    // The other protocols count too, and streams are the same.
    let body = json!({"messages": [user("Tell me about a film.")], "max_tokens": 40, "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 6}});
    let whole = server.json(MESSAGES, &body);
    assert_eq!(
        (&whole["content"][0]["type"], &whole["content"][1]["type"]),
        (&json!("thinking"), &json!("text"))
    );
    let events = server.events(MESSAGES, &with(body, &json!({"stream": true})));
    let text: String = events
        .iter()
        .filter_map(|e| e["delta"]["text"].as_str())
        .collect();
    assert_eq!(whole["content"][1]["text"], text);
    let body = json!({"input": "Tell me about a film.", "max_output_tokens": 40, "temperature": 0, "reasoning": {"max_tokens": 6}});
    let whole = server.json(RESPONSES, &body);
    assert_eq!(
        (&whole["output"][0]["type"], &whole["output"][1]["type"]),
        (&json!("reasoning"), &json!("message"))
    );
}

#[test]
fn a_server_bounds_the_thinking_of_all() {
    let model = common::templated(THINKER);
    let rules = Rules {
        reasoning_budget: Some(6),
        ..Rules::default()
    };
    let server = Running::ruled_over(model, rules);
    for more in [json!({}), json!({"thinking_budget": 500})] {
        let body = json!({"messages": [user("x")], "max_tokens": 40, "temperature": 0, "ignore_eos": true});
        let whole = server.json(CHAT, &with(body, &more));
        let thought = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            .as_u64()
            .unwrap();
        assert!((6..16).contains(&thought), "{whole}");
    }
}
