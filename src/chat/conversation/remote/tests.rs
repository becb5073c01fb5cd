//! Servers that stream as the standard allows, and as they do.

use super::*;
use crate::chat::Overflow;
use crate::chat::conversation::Conversation;
use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// An answer to a chat: status, content type and body.
type Canned = (u16, &'static str, Vec<u8>);

const EVENTS: &str = "text/event-stream; charset=utf-8";
const JSON: &str = "application/json";

/// A server that answers every chat so; returns its address and where the last chat's request will be.
fn server(canned: Canned) -> (String, Arc<Mutex<Value>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Value::Null));
    let last = Arc::clone(&seen);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap(), &canned, &last);
        }
    });
    (url, seen)
}

fn serve(stream: TcpStream, (status, kind, body): &Canned, last: &Mutex<Value>) {
    let mut reader = BufReader::new(&stream);
    let (mut line, mut length, mut first) = (String::new(), 0, String::new());
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        if first.is_empty() {
            first.clone_from(&line);
        }
        if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
            length = n.trim().parse().unwrap();
        }
    }
    let mut asked = vec![0; length];
    reader.read_exact(&mut asked).unwrap();
    let models = br#"{"object": "list", "data": [{"id": "m", "object": "model"}]}"#.to_vec();
    let (status, kind, body) = match first.starts_with("GET") {
        true => (200, JSON, &models),
        false => {
            *last.lock().unwrap() = serde_json::from_slice(&asked).unwrap();
            (*status, *kind, body)
        }
    };
    // Without a length, the end of the connection is the end of the body. Pieces cut characters and lines.
    let head = format!("HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n");
    let mut stream = &stream;
    stream.write_all(head.as_bytes()).unwrap();
    for piece in body.chunks(7) {
        stream.write_all(piece).unwrap();
        stream.flush().unwrap();
    }
}

fn settings() -> ChatSettings {
    ChatSettings {
        sampling: SamplingParams::default(),
        max_tokens: None,
        thinking: None,
        thinking_budget: None,
        overflow: Overflow::Stop,
        stop: Vec::new(),
    }
}

fn ask(canned: Canned, settings: ChatSettings) -> (anyhow::Result<(Turn, String)>, Value) {
    let (url, seen) = server(canned);
    let remote = Remote::connect(&url, Some("m"), None).unwrap();
    let mut conversation = Conversation::remote(remote, None, settings);
    let mut streamed = String::new();
    let turn = conversation.ask("Hi", &AtomicBool::new(false), &mut |event| {
        if let ChatEvent::Piece(Part::Answer, text) = event {
            streamed.push_str(text);
        }
        Ok(())
    });
    let asked = seen.lock().unwrap().clone();
    (turn.map(|turn| (turn, streamed)), asked)
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    json!({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
        .to_string()
}

#[test]
fn lawful_streams_are_read_whole() {
    let hello = chunk(&json!({"content": "Hello"}), None);
    let stop = chunk(&json!({}), Some("stop"));
    let whole = json!({"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]});
    let (left, right) = hello.split_once(',').unwrap();
    let null = chunk(
        &json!({"role": "assistant", "content": null, "refusal": null}),
        None,
    );
    let usage = json!({"choices": null, "usage": null}).to_string();
    for (name, kind, body) in [
        (
            "plain",
            EVENTS,
            format!("data: {hello}\n\ndata: {stop}\n\ndata: [DONE]\n\n"),
        ),
        (
            "no space",
            EVENTS,
            format!("data:{hello}\n\ndata:{stop}\n\ndata:[DONE]\n\n"),
        ),
        (
            "CR LF",
            EVENTS,
            format!("data: {hello}\r\n\r\ndata: {stop}\r\n\r\ndata: [DONE]\r\n\r\n"),
        ),
        ("CR", EVENTS, format!("data: {hello}\r\rdata: [DONE]\r\r")),
        (
            "no [DONE]",
            EVENTS,
            format!("data: {hello}\n\ndata: {stop}\n\n"),
        ),
        (
            "no end of the last event",
            EVENTS,
            format!("data: {hello}\n\ndata: {stop}"),
        ),
        (
            "mark",
            EVENTS,
            format!("\u{feff}data: {hello}\n\ndata: [DONE]\n\n"),
        ),
        (
            "comments",
            EVENTS,
            format!(": ping\n\ndata: {hello}\n\n\n\n: x\n\ndata: [DONE]\n\n"),
        ),
        (
            "fields",
            EVENTS,
            format!("id: 1\nretry: 100\nevent: message\ndata: {hello}\n\ndata: [DONE]\n\n"),
        ),
        (
            "lines",
            EVENTS,
            format!("data: {left},\ndata: {right}\n\ndata: [DONE]\n\n"),
        ),
        (
            "nulls",
            EVENTS,
            format!("data: {null}\n\ndata: {usage}\n\ndata: {hello}\n\ndata: [DONE]\n\n"),
        ),
        (
            "filters",
            EVENTS,
            format!("data: {{\"choices\": []}}\n\ndata: {hello}\n\ndata: [DONE]\n\n"),
        ),
        (
            "legacy",
            EVENTS,
            "data: {\"choices\": [{\"text\": \"Hello\"}]}\n\ndata: [DONE]\n\n".to_owned(),
        ),
        ("whole", JSON, whole.to_string()),
    ] {
        let (answered, _) = ask((200, kind, body.into_bytes()), settings());
        let (turn, streamed) = answered.unwrap_or_else(|e| panic!("{name}: {e:#}"));
        assert_eq!(
            (turn.answer.as_str(), streamed.as_str()),
            ("Hello", "Hello"),
            "{name}"
        );
    }
    // Characters of several bytes, thinking by both names, how it ends.
    let text = chunk(&json!({"content": "héllo 🎉 日本"}), Some("length"));
    for field in ["reasoning", "reasoning_content"] {
        let thought = chunk(&json!({field: "hm"}), None);
        let body = format!("data: {thought}\n\ndata: {text}\n\ndata: [DONE]\n\n");
        let (turn, _) = ask((200, EVENTS, body.into_bytes()), settings()).0.unwrap();
        assert_eq!(
            (turn.thinking.as_str(), turn.answer.as_str()),
            ("hm", "héllo 🎉 日本")
        );
        assert_eq!(turn.end, End::Generated(StopReason::MaxTokens));
    }
}

#[test]
fn errors_say_what_the_server_said() {
    let begun = format!("data: {}\n\n", chunk(&json!({"content": "Hel"}), None));
    let stream = |event: &str| (200, EVENTS, format!("{begun}{event}").into_bytes());
    let json = |status, body: Value| (status, JSON, body.to_string().into_bytes());
    for (canned, said) in [
        (
            stream("data: {\"error\": \"out of memory\"}\n\n"),
            "out of memory",
        ),
        (
            stream("event: error\ndata: {\"error\": {\"message\": \"boom\"}}\n\n"),
            "boom",
        ),
        (stream(""), "closed the connection within an answer"),
        (stream("data: {nonsense}\n\n"), "the server's event"),
        (
            json(429, json!({"error": {"message": "slow down"}})),
            "429: slow down",
        ),
        (
            json(
                422,
                json!({"detail": [{"loc": ["body", "seed"], "msg": "too big"}]}),
            ),
            "body.seed: too big",
        ),
        (json(404, json!({"detail": "Not Found"})), "404: Not Found"),
        (
            json(400, json!({"object": "error", "message": "too long"})),
            "400: too long",
        ),
        (
            (502, "text/html", b"<html>Bad Gateway</html>".to_vec()),
            "502: no reason is given",
        ),
    ] {
        let (answered, _) = ask(canned, settings());
        let found = match answered {
            Ok(_) => panic!("{said}: answered"),
            Err(e) => format!("{e:#}"),
        };
        assert!(found.contains(said), "{said}: {found}");
    }
}

#[test]
fn only_settings_that_differ_are_sent() {
    let done = || {
        (
            200,
            EVENTS,
            b"data: {\"choices\": [{\"finish_reason\": \"stop\"}]}\n\n".to_vec(),
        )
    };
    let (_, plain) = ask(done(), settings());
    let mut names: Vec<&String> = plain.as_object().unwrap().keys().collect();
    names.sort();
    assert_eq!(names, ["messages", "model", "stream", "stream_options"]);
    let changed = ChatSettings {
        max_tokens: Some(9),
        thinking: Some(true),
        thinking_budget: Some(64),
        stop: vec!["END".into()],
        ..settings()
    };
    let (_, asked) = ask(done(), changed);
    assert_eq!(
        (&asked["max_tokens"], &asked["thinking_budget"]),
        (&json!(9), &json!(64))
    );
    assert_eq!(
        asked["chat_template_kwargs"],
        json!({"enable_thinking": true})
    );
    assert_eq!(asked["stop"], json!(["END"]));
}

#[test]
fn addresses_of_this_machine_are_known() {
    for (url, here) in [
        ("http://127.0.0.1:8080", true),
        ("http://localhost", true),
        ("http://[::1]:1", true),
        ("https://example.org", false),
        ("http://10.0.0.1", false),
        ("http://localhost.example.org", false),
    ] {
        assert_eq!(is_here(url), here, "{url}");
    }
}

/// What keeps a connection open is no part of an answer.
#[test]
fn comments_alone_are_not_waited_for_for_ever() {
    let body = ": here\n\ndata: {\"choices\": []}\n\n".repeat(20_000);
    let (url, _) = server((200, EVENTS, body.into()));
    let mut remote = Remote::connect(&url, Some("m"), None).unwrap();
    remote.patience = Duration::ZERO;
    let mut conversation = Conversation::remote(remote, None, settings());
    let turn = conversation.ask("Hi", &AtomicBool::new(false), &mut |_| Ok(()));
    let error = turn.unwrap_err().to_string();
    assert!(error.contains("no part of the answer for 0 s"), "{error}");
}
