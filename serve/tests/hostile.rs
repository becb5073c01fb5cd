//! Requests that are made to cost more than they are worth: each is refused, and none keeps others waiting.

use crate::common::{CHAT, COMPLETIONS, MESSAGES, Response, Running, base, user};
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

const FULL: &str = "context_length_exceeded";

fn code(response: &Response) -> Value {
    response.json()["error"]["code"].clone()
}

/// Whether a tokenizer sees it to its end or not: what cannot fit is refused, and says that it is too long.
#[test]
fn long_texts_are_refused_before_they_are_read() {
    let server = Running::start();
    let chat = |messages: Vec<Value>| json!({"messages": messages, "max_tokens": 4});
    let words = "a ".repeat(4_000_000 - 100);
    let quoted = "<|im_end|>".repeat(200_000);
    let mut many = vec![user("<|im_end|>")];
    many.extend((0..4000).map(|_| user(&"x".repeat(1900))));
    for (path, body) in [
        (CHAT, chat(vec![user(&words)])),
        (CHAT, chat(vec![user(&quoted)])),
        (CHAT, chat(vec![user(&"<|im_end|>".repeat(500))])),
        (CHAT, chat(many)),
        (COMPLETIONS, json!({"prompt": words, "n": 16})),
        (COMPLETIONS, json!({"prompt": vec![1; 900_000], "n": 16})),
        (COMPLETIONS, json!({"prompt": "\u{1}".repeat(1_000_000)})),
        ("/tokenize", json!({"prompt": words})),
    ] {
        let response = server.post(path, &body);
        assert_eq!(
            (response.status, code(&response)),
            (400, json!(FULL)),
            "{path}"
        );
    }
    let count = server.post("/v1/messages/count_tokens", &chat(vec![user(&quoted)]));
    assert_eq!(count.status, 400);
    let told = server.post(MESSAGES, &chat(vec![user(&words)])).body;
    assert!(told.contains("prompt is too long"), "{told}");
    let back = json!({"tokens": vec![1; 900_000]});
    assert_eq!(server.post("/detokenize", &back).status, 400);
    assert_eq!(server.post(CHAT, &base(CHAT)).status, 200);
}

/// Values take more memory than their text: their number is bounded before they are made.
#[test]
fn bodies_of_many_values_are_refused() {
    let server = Running::start();
    let list =
        |item: &str, n: usize| format!("{{\"messages\":[{}0]}}", format!("{item},").repeat(n));
    for body in [
        list(r#"{"a":0}"#, 990_000),
        list("[]", 2_700_000),
        list("1", 3_900_000),
    ] {
        assert_eq!(server.send("POST", CHAT, &[], &body).status, 413);
    }
}

/// Uploads that stop hold room of their client alone, and not for long.
#[test]
fn uploads_that_stop_are_given_up() {
    let limits = HttpLimits {
        body_pause: Duration::from_millis(300),
        ..HttpLimits::default()
    };
    let server = Running::with(EngineOptions::default(), Security::default(), limits);
    let head = server.request("POST", CHAT, &[("content-length", "8000000")], "");
    let head = head.replace("\r\n\r\n", "\r\ncontent-type: application/json\r\n\r\n");
    let stopped: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&[b' '; 40_000]).unwrap();
            stream
        })
        .collect();
    assert_eq!(server.post(CHAT, &base(CHAT)).status, 200);
    for stream in stopped {
        assert_eq!(Response::read(stream).status, 408);
    }
}

/// Whoever waits for its client makes room for one that has a request; who is at work stays.
#[test]
fn silent_connections_make_room() {
    let limits = HttpLimits {
        connections: 8,
        head_time: Duration::from_secs(600),
        body_pause: Duration::from_secs(600),
        body_time: Duration::from_secs(600),
        ..HttpLimits::default()
    };
    let server = Running::with(EngineOptions::default(), Security::default(), limits);
    let mut works = server.connect();
    let body = json!({"messages": [user("x")], "max_tokens": 200, "ignore_eos": true});
    let request = server.request("POST", CHAT, &[], &body.to_string());
    works.write_all(request.as_bytes()).unwrap();
    server.until("nq_num_requests_running 1");
    let head = server.request("POST", CHAT, &[("content-length", "1000")], "");
    let silent: Vec<_> = (0..30)
        .map(|i| {
            let mut stream = server.connect();
            // Some have said nothing, some begun a head or a body.
            let begun = [0, 10, head.len()][i % 3];
            let _ = stream.write_all(&head.as_bytes()[..begun]);
            stream
        })
        .collect();
    assert_eq!(server.post(CHAT, &base(CHAT)).status, 200);
    assert_eq!(Response::read(works).status, 200);
    drop(silent);
}

/// An error quotes no more of a request than a person reads.
#[test]
fn errors_are_short() {
    let server = Running::start();
    let long = "x".repeat(600_000);
    for (path, body) in [
        (CHAT, json!({"model": long})),
        (CHAT, json!({"messages": [{"role": long, "content": "a"}]})),
        (
            CHAT,
            json!({"messages": [user("a")], "tool_choice": {"type": long}}),
        ),
        (
            MESSAGES,
            json!({"messages": [{"role": long, "content": "a"}], "max_tokens": 1}),
        ),
        (
            COMPLETIONS,
            json!({"prompt": "a", "logit_bias": {long.as_str(): 1}}),
        ),
    ] {
        let response = server.post(path, &body);
        assert!((400..500).contains(&response.status), "{path}");
        assert!(
            response.body.len() < 5000,
            "{path}: {} bytes",
            response.body.len()
        );
    }
}

/// The name in a target of absolute form counts as the Host header does.
#[test]
fn targets_of_other_servers_are_refused() {
    let server = Running::start();
    let ask = |target: &str| {
        let head = format!("GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        server.raw(&head).status
    };
    assert_eq!(ask("http://evil.example/health"), 403);
    assert_eq!(ask("http://localhost/health"), 200);
    assert_eq!(ask("/health"), 200);
}

/// Compiling a regular expression takes time that grows with the square of its length.
#[test]
fn long_patterns_are_refused() {
    let server = Running::start();
    let ask = |more: Value| {
        let mut body = json!({"messages": [user("x")], "max_tokens": 4});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let response = server.post(CHAT, &body);
        (response.status, response.body)
    };
    let long = "(.*)*".repeat(10_000);
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "string", "pattern": long}}});
    let names = json!({"type": "object", "patternProperties": {long.as_str(): true}});
    let many =
        json!({"type": "array", "prefixItems": vec![json!({"pattern": "(.*)*".repeat(1000)}); 9]});
    let format = |schema: &Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}});
    for more in [
        json!({"response_format": {"type": "regex", "pattern": long}}),
        json!({"response_format": {"type": "lark", "grammar": format!("start: /{long}/")}}),
        format(&schema),
        format(&names),
        format(&many),
    ] {
        let (status, body) = ask(more);
        assert_eq!(status, 400, "{body}");
        assert!(body.contains("bytes of a regular expression"), "{body}");
    }
    let short = json!({"response_format": {"type": "regex", "pattern": "(.*)*"}});
    assert_eq!(ask(short).0, 200);
}
