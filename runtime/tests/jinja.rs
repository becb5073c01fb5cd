//! Expressions and statements of chat templates, rendered as transformers renders them: its texts are in
//! `fixtures/jinja.json`. What nq's engine lacks is refused by name.

use nq_formats::Files;
use nq_runtime::chat_template::integers;
use nq_runtime::{ChatTemplate, Message};
use serde_json::Value;

fn fixture() -> Value {
    serde_json::from_str(include_str!("fixtures/jinja.json")).unwrap()
}

#[test]
fn renderings_are_transformers() {
    let fixture = fixture();
    let messages: Vec<Message> = serde_json::from_value(fixture["messages"].clone()).unwrap();
    let mut wrong = Vec::new();
    for case in fixture["cases"].as_array().unwrap() {
        let source = case["source"].as_str().unwrap();
        let tools =
            (case["tools"] != false).then(|| fixture["tools"].as_array().unwrap().as_slice());
        let found = ChatTemplate::from_source("t.jinja", source)
            .and_then(|t| t.render(&messages, tools, true, None));
        let as_expected = match (&found, case["expected"].as_str(), case["refused"].as_str()) {
            (Ok(text), Some(expected), _) => text == expected,
            (Err(error), None, Some(named)) => error.to_string().contains(named),
            _ => false,
        };
        if !as_expected {
            wrong.push(format!(
                "{source}\n  found {found:?}\n  expected {}",
                case["expected"]
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What `json.loads`, `str` and `json.dumps` make of them.
#[test]
fn integers_of_any_length_keep_their_digits() {
    let long = "1234567890".repeat(5);
    for digits in [
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
        "100000000000000000000",
        "340282366920938463463374607431768211456",
        &long,
    ] {
        let message = format!(
            r#"[{{"role": "assistant", "tool_calls": [{{"id": {digits}, "of": [{digits}]}}]}}]"#
        );
        let message: Vec<Message> =
            serde_json::from_slice(&integers::marked(message.as_bytes())).unwrap();
        let source = "{% for k, v in messages[0].tool_calls[0] | items %}{{ k }}={{ v | tojson }} {{ v }};{% endfor %}";
        let template = ChatTemplate::from_source("t.jinja", source).unwrap();
        let found = template.render(&message, None, true, None).unwrap();
        assert_eq!(
            found,
            format!("id={digits} {digits};of=[{digits}] [{digits}];")
        );
    }
    let source = "{{ messages[0].n | tojson }} {{ messages[0].n }} {{ tools | tojson }}";
    let template = ChatTemplate::from_source("t.jinja", source).unwrap();
    let message = integers::marked(br#"[{"role": "user", "n": [-0, -0.0, -0e0]}]"#);
    let message: Vec<Message> = serde_json::from_slice(&message).unwrap();
    let tools = r#"[{"maximum": 18446744073709551616, "minimum": -0}]"#;
    let tools: Vec<Value> = serde_json::from_slice(&integers::marked(tools.as_bytes())).unwrap();
    let found = template.render(&message, Some(&tools), true, None);
    let expected =
        r#"[0, -0.0, -0.0] [0, -0.0, -0.0] [{"maximum": 18446744073709551616, "minimum": 0}]"#;
    assert_eq!(found.unwrap(), expected);
    let template = ChatTemplate::from_source("t.jinja", "{{ messages[0].n + 1 }}").unwrap();
    let message = integers::marked(br#"[{"role": "user", "n": 18446744073709551616}]"#);
    let message: Vec<Message> = serde_json::from_slice(&message).unwrap();
    let found = template.render(&message, None, true, None).unwrap();
    assert_eq!(found, "18446744073709551617");
}

#[test]
fn lines_end_in_line_feeds() {
    let message = [Message::new("user", "a")];
    let render = |source: &str| {
        let template = ChatTemplate::from_source("t.jinja", source).unwrap();
        template.render(&message, None, true, None).unwrap()
    };
    assert_eq!(
        render("{{- '<|im_start|>user\r\n' }}"),
        "<|im_start|>user\n"
    );
    assert_eq!(render("{% if true %}\r\nx\r\n{% endif %}\r\ny"), "x\ny");
    assert_eq!(render("a\rb"), "a\nb");
}

#[test]
fn reasoning_has_each_of_its_names() {
    let render = |key: &str, source: &str| {
        let message = Message {
            extra: [(key.to_owned(), Value::from("r"))].into_iter().collect(),
            ..Message::new("assistant", "a")
        };
        let template = ChatTemplate::from_source("t.jinja", source).unwrap();
        template.render(&[message], None, true, None).unwrap()
    };
    for key in ["reasoning_content", "thinking", "reasoning"] {
        let both = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}";
        assert_eq!(render(key, both), "rr", "{key}");
    }
}

#[test]
fn a_folder_may_have_a_template_for_tools() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("additional_chat_templates")).unwrap();
    std::fs::write(path("chat_template.jinja"), "plain").unwrap();
    std::fs::write(path("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
    let template = ChatTemplate::from_files(&Files::Folder(dir.path().into())).unwrap();
    let render = |tools| {
        template
            .render(&[Message::new("user", "a")], tools, true, None)
            .unwrap()
    };
    assert_eq!(render(None), "plain");
    assert_eq!(
        render(Some(&[serde_json::json!({ "name": "f" })][..])),
        "tools"
    );
}
