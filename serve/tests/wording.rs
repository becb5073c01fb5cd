//! Errors in the words and forms that clients look for.

use crate::common::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Running, base, user, with};
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};

#[test]
fn what_does_not_fit_is_said_in_the_words_that_clients_look_for() {
    let server = Running::start();
    let long = "word ".repeat(3000);
    for (path, body, param) in [
        (CHAT, json!({"messages": [user(&long)]}), "messages"),
        (COMPLETIONS, json!({"prompt": long}), "prompt"),
        (RESPONSES, json!({"input": long}), "input"),
    ] {
        let response = server.post(path, &body);
        let (found, code, message) = response.error();
        assert_eq!(
            (response.status, found.as_str(), code.as_str()),
            (400, param, "context_length_exceeded")
        );
        assert!(
            message
                .starts_with("This model's maximum context length is 1024 tokens. However, your "),
            "{message}"
        );
        assert!(message.contains(" resulted in 3"), "{message}");
    }
    let body = json!({"messages": [user(&long)], "max_tokens": 5});
    let error = server.post(MESSAGES, &body).json();
    assert_eq!(error["error"]["type"], "invalid_request_error");
    let message = error["error"]["message"].as_str().unwrap();
    let (found, most) = message
        .strip_prefix("prompt is too long: ")
        .unwrap()
        .split_once(" tokens > ")
        .unwrap();
    assert!(
        found.parse::<usize>().unwrap() > 3000 && most == "1023 maximum",
        "{message}"
    );
}

#[test]
fn errors_have_the_form_of_the_protocol_on_every_route() {
    const KEY: &str = "0123456789abcdef";
    let security = Security::new(&[KEY.into()], &[], &[]).unwrap();
    let server = Running::with(EngineOptions::default(), security, HttpLimits::default());
    let own = [("x-api-key", KEY)];
    for (method, path, headers, body, status) in [
        ("POST", "/v1/messages/count_tokens", &own[..], "{}", 400),
        (
            "POST",
            "/v1/messages/count_tokens",
            &own[..],
            "{\"model\": \"x\"}",
            404,
        ),
        ("GET", MESSAGES, &own[..], "", 405),
        ("POST", "/v1/messages/batches", &own[..], "{}", 404),
        ("POST", MESSAGES, &[("host", "evil.example")][..], "{}", 403),
        ("POST", MESSAGES, &[][..], "{}", 401),
        ("POST", MESSAGES, &[("x-api-key", "nope")][..], "{}", 401),
        ("POST", MESSAGES, &own[..], "{", 400),
    ] {
        let response = server.send(method, path, headers, body);
        let json = response.json();
        assert_eq!(
            (response.status, &json["type"]),
            (status, &json!("error")),
            "{method} {path}"
        );
        assert!(json["error"]["type"].is_string() && json["error"]["message"].is_string());
        assert_eq!(response.header("content-type"), "application/json");
    }
    for (method, path) in [
        ("GET", CHAT),
        ("POST", "/v1/nothing"),
        ("POST", "/v1/messagesx"),
    ] {
        let json = server.send(method, path, &own, "").json();
        assert!(
            json["error"]["param"].is_null() && json.get("type").is_none(),
            "{path}"
        );
    }
    for (path, meant) in [
        ("/chat/completions", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/v1//messages", MESSAGES),
    ] {
        let response = server.send("POST", path, &own, "{}");
        assert_eq!(response.status, 404);
        assert!(
            response.body.contains(&format!("{meant} is meant")),
            "{}",
            response.body
        );
    }
    assert_eq!(server.send("GET", "/v1/models/", &own, "").status, 200);
}

#[test]
fn errors_name_fields_that_requests_have() {
    let server = Running::start();
    let refuses = json!({"type": "object", "properties": {"x": {"not": {}}}});
    let calls = |input: Value| {
        json!({"messages": [user("x"), {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": input}]}]})
    };
    for (path, more, name) in [
        (
            MESSAGES,
            json!({"tools": [{"name": "a b", "input_schema": {}}]}),
            "tools[0].name",
        ),
        (
            MESSAGES,
            json!({"tools": [{"name": "ok", "input_schema": {"type": "object"}}, {"name": "a", "input_schema": refuses}], "tool_choice": {"type": "any"}}),
            "tools[1].input_schema",
        ),
        (
            MESSAGES,
            json!({"tools": [{"name": "a"}]}),
            "tools[0].input_schema",
        ),
        (
            MESSAGES,
            json!({"output_config": {"format": {"type": "json_schema", "schema": refuses}}}),
            "output_config.format.schema",
        ),
        (
            MESSAGES,
            calls(json!([{"type": "text", "text": 3}])),
            "messages[2].content[0].content[0].text",
        ),
        (
            MESSAGES,
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}),
            "messages[0].content[1].source",
        ),
        (
            RESPONSES,
            json!({"tools": [{"type": "function", "name": "a b"}]}),
            "tools[0].name",
        ),
        (
            RESPONSES,
            json!({"tools": [{"type": "web_search"}, {"type": "function", "name": "a", "parameters": refuses}], "tool_choice": "required"}),
            "tools[1].parameters",
        ),
        (
            RESPONSES,
            json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}),
            "text.format.schema",
        ),
        (
            CHAT,
            json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": refuses}}], "tool_choice": "required"}),
            "tools[0].function.parameters",
        ),
        (
            CHAT,
            json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            "tools[0].function.name",
        ),
        (
            CHAT,
            json!({"response_format": {"type": "regex", "pattern": "(?=a)b"}}),
            "response_format.pattern",
        ),
        (
            CHAT,
            json!({"response_format": {"type": "lark", "grammar": "start: nosuch"}}),
            "response_format.grammar",
        ),
        (CHAT, json!({"stop": [null]}), "stop"),
        (CHAT, json!({"max_tokens": 4.5}), "max_tokens"),
        (COMPLETIONS, json!({"best_of": 2}), "best_of"),
        (COMPLETIONS, json!({"prompt": {"text": "x"}}), "prompt"),
        (COMPLETIONS, json!({"prompt": ["x", ""]}), "prompt[1]"),
    ] {
        let response = server.post(path, &with(base(path), &more));
        assert_eq!(response.status, 400, "{path} {more}: {}", response.body);
        let message = response.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(
            message.starts_with(&format!("{name}: ")),
            "{path} {more}: {message}"
        );
        assert!(
            !message.contains("untagged") && !message.contains("1 or 1"),
            "{message}"
        );
    }
}
