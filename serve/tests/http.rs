//! Requests that a server accepts, and those that it refuses.

use crate::common::{Response, Running, model};
use nq_serve::{EngineOptions, HttpLimits, Security, Server};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const KEY: &str = "a-key-of-sixteen-or-more";
const CHAT: &str = "/v1/chat/completions";

fn chat(tokens: usize) -> Value {
    json!({
        "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0,
        "max_tokens": tokens, "ignore_eos": true,
    })
}

fn streamed(tokens: usize) -> Value {
    let mut body = chat(tokens);
    body["stream"] = true.into();
    body
}

/// Starts a stream and reads its first events.
fn begin(server: &Running, body: &Value, events: usize) -> BufReader<std::net::TcpStream> {
    let mut stream = server.connect();
    let request = server.request("POST", CHAT, &[], &body.to_string());
    stream.write_all(request.as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    let mut seen = 0;
    let mut line = String::new();
    while seen < events {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended");
        seen += usize::from(line.starts_with("data: "));
    }
    reader
}

#[test]
fn pages_of_other_sites_and_other_names_are_refused() {
    let security = Security::new(&[], &["box.lan".into()], &["https://app.example".into()]);
    let server = Running::with(
        EngineOptions::default(),
        security.unwrap(),
        HttpLimits::default(),
    );
    let status = |method: &str, path: &str, headers: &[(&str, &str)]| {
        let body = if method == "POST" {
            chat(1).to_string()
        } else {
            String::new()
        };
        server.send(method, path, headers, &body).status
    };
    for path in ["/health", "/v1/models", "/metrics", "/", "/nothing"] {
        assert_eq!(
            status("GET", path, &[("host", "evil.example")]),
            403,
            "{path}"
        );
        assert_eq!(
            status("GET", path, &[("origin", "http://evil.example")]),
            403,
            "{path}"
        );
    }
    assert_eq!(status("POST", CHAT, &[("host", "evil.example")]), 403);
    assert_eq!(status("POST", CHAT, &[("origin", "null")]), 403);
    assert_eq!(
        status("POST", CHAT, &[("sec-fetch-site", "cross-site")]),
        403
    );
    assert_eq!(status("GET", "/health", &[("host", "box.lan:8080")]), 200);
    assert_eq!(status("GET", "/health", &[("host", "localhost")]), 200);
    let own = format!("http://{}", server.address);
    assert_eq!(status("POST", CHAT, &[("origin", &own)]), 200);
    // A form on another page could send this type, so it is refused.
    assert_eq!(status("POST", CHAT, &[("content-type", "text/plain")]), 415);
    let absolute = server.raw("GET http://evil.example/health HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n");
    assert_eq!(absolute.status, 403);
    assert_eq!(
        server
            .raw("GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
            .status,
        403
    );

    let asked = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
    ];
    let preflight = server.send("OPTIONS", CHAT, &asked, "");
    assert_eq!(preflight.status, 204);
    assert_eq!(
        preflight.header("access-control-allow-origin"),
        "https://app.example"
    );
    let response = server.send("GET", "/v1/models", &asked[..1], "");
    assert_eq!(
        response.header("access-control-allow-origin"),
        "https://app.example"
    );
    assert_eq!(response.header("vary"), "origin");
    assert_eq!(response.header("access-control-allow-credentials"), "");
    let response = server.send("OPTIONS", CHAT, &[("origin", "http://evil.example")], "");
    assert_eq!(response.status, 403);
    assert_eq!(response.header("access-control-allow-origin"), "");
}

#[test]
fn without_a_key_only_this_machine_is_served() {
    let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let model = model(None, EngineOptions::default());
    let bind = |security| {
        Server::bind(
            everywhere,
            vec![Arc::clone(&model)],
            security,
            HttpLimits::default(),
        )
    };
    let refused = bind(Security::default()).err().expect("no key").to_string();
    assert!(refused.contains("key"), "{refused}");
    let security = || Security::new(&[KEY.into(), format!("{KEY}-2")], &[], &[]).unwrap();
    assert!(bind(security()).is_ok());

    let server = Running::over(model, security(), HttpLimits::default());
    for path in ["/v1/models", "/metrics", "/nothing"] {
        let response = server.get(path);
        assert_eq!(response.status, 401, "{path}");
        assert_eq!(response.error().1, "invalid_api_key");
    }
    assert_eq!(server.get("/health").status, 200);
    let bearer = |key: &str| format!("Bearer {key}");
    let ask = |key: &str| {
        let mut body = chat(2);
        body["messages"][0]["content"] = "A question that is long enough to be worth keeping, \
            for whoever asks it again: what was the film about, and who was in it?"
            .into();
        let response = server.send(
            "POST",
            CHAT,
            &[("authorization", &bearer(key))],
            &body.to_string(),
        );
        assert_eq!(response.status, 200, "{}", response.body);
        response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(
        server
            .send(
                "POST",
                CHAT,
                &[("authorization", &bearer("x"))],
                &chat(1).to_string()
            )
            .status,
        401
    );
    // The time of an answer does not reveal to one key what another has asked.
    assert_eq!(ask(KEY), 0);
    assert!(ask(KEY) > 30);
    assert_eq!(ask(&format!("{KEY}-2")), 0);
    let named = server.send("GET", "/v1/models", &[("x-api-key", KEY)], "");
    assert_eq!(named.status, 200);
}

#[test]
fn bodies_and_heads_have_bounds() {
    let limits = HttpLimits {
        body: 2000,
        body_time: Duration::from_millis(300),
        head_time: Duration::from_millis(300),
        ..HttpLimits::default()
    };
    let server = Running::with(EngineOptions::default(), Security::default(), limits);
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(3000)}]});
    assert_eq!(server.post(CHAT, &long).status, 413);
    for body in ["{", "[1]", "\"x\"", "{\"messages\": \"\\ud800\"}", "\u{0}"] {
        assert_eq!(server.send("POST", CHAT, &[], body).status, 400, "{body}");
    }
    let deep = format!("{{\"messages\": {}", "[".repeat(1500));
    assert_eq!(server.send("POST", CHAT, &[], &deep).status, 400);
    // A body that never arrives.
    let slow = server.raw(&format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: 100\r\nconnection: close\r\n\r\n{{"
    ));
    assert_eq!(slow.status, 408);
    // A head that never arrives: the connection ends.
    let begun = Instant::now();
    let mut stream = server.connect();
    stream
        .write_all(b"GET /health HTTP/1.1\r\nhost: loc")
        .unwrap();
    let response = Response::read(stream);
    assert!(
        response.status == 408 || response.status == 0,
        "{}",
        response.status
    );
    assert!(begun.elapsed() < Duration::from_secs(5));
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    let head = format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n");
    assert_eq!(server.raw(&head).status, 431);
    let long = format!(
        "GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n",
        "y".repeat(100_000)
    );
    let status = server.raw(&long).status;
    assert!([431, 0].contains(&status), "{status}");
    for garbage in [
        "\r\n\r\n",
        "GET\r\n\r\n",
        "\u{16}\u{3}\u{1}",
        "POST / HTTP/9.9\r\n\r\n",
    ] {
        assert!(
            [400, 408, 0].contains(&server.raw(garbage).status),
            "{garbage:?}"
        );
    }
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn connections_are_counted() {
    let limits = HttpLimits {
        connections: 2,
        ..HttpLimits::default()
    };
    let server = Running::with(EngineOptions::default(), Security::default(), limits);
    let answers = [0, 1].map(|_| begin(&server, &streamed(1000), 1));
    let mut third = server.connect();
    third
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let request = server.request("GET", "/health", &[], "");
    third.write_all(request.as_bytes()).unwrap();
    let mut byte = [0];
    assert!(
        std::io::Read::read(&mut third, &mut byte).is_err(),
        "it waits"
    );
    drop(answers);
    third
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    assert_eq!(Response::read(third).status, 200);
}

#[test]
fn whoever_hangs_up_is_dropped_wherever_it_is() {
    let options = EngineOptions {
        parallel: 1,
        ..EngineOptions::default()
    };
    let server = Running::with(options, Security::default(), HttpLimits::default());
    // In a stream.
    let stream = begin(&server, &streamed(1000), 3);
    // In the queue, as a stream and as a whole.
    let queued = begin(&server, &streamed(1000), 1);
    let mut whole = server.connect();
    let request = server.request("POST", CHAT, &[], &chat(1000).to_string());
    whole.write_all(request.as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    drop(queued);
    drop(whole);
    server.until("nq_requests_finished_total{reason=\"cancelled\"} 2");
    drop(stream);
    server.until("nq_requests_finished_total{reason=\"cancelled\"} 3");
    assert_eq!(server.post(CHAT, &chat(3)).status, 200);
}

#[test]
fn a_full_queue_is_429_with_a_time() {
    let options = EngineOptions {
        parallel: 1,
        queue: 1,
        ..EngineOptions::default()
    };
    let server = Running::with(options, Security::default(), HttpLimits::default());
    let stream = begin(&server, &streamed(1000), 3);
    let queued = begin(&server, &streamed(1000), 1);
    let refused = server.post(CHAT, &chat(3));
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert_eq!(refused.error().1, "queue_full");
    assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
    // Health answers at all times.
    assert_eq!(server.get("/health").status, 200);
    drop((stream, queued));
}

#[test]
fn streams_say_that_they_live_and_end_in_time() {
    let options = EngineOptions {
        parallel: 1,
        ..EngineOptions::default()
    };
    let limits = HttpLimits {
        keep_alive: Duration::from_millis(50),
        request_time: Some(Duration::from_millis(600)),
        ..HttpLimits::default()
    };
    let server = Running::with(options, Security::default(), limits);
    let first = begin(&server, &streamed(1000), 3);
    // The second waits, receives signs of life, and ends with an error.
    let second = server.post(CHAT, &streamed(1000));
    assert_eq!(second.status, 200);
    assert!(second.body.contains("\n: keep-alive\n"), "{}", second.body);
    let last = second
        .body
        .lines()
        .rev()
        .find_map(|l| l.strip_prefix("data: "))
        .unwrap();
    let error: Value = serde_json::from_str(last).unwrap();
    assert_eq!(error["error"]["code"], "timeout");
    assert!(!second.body.contains("[DONE]"));
    drop(first);
    let body = chat(1000);
    let whole = server.post(CHAT, &body);
    assert!(whole.status == 504 || whole.json()["choices"][0]["finish_reason"] == "length");
}

#[test]
fn a_server_that_is_told_to_end_lets_streams_end() {
    let mut server = Running::start();
    let stream = begin(&server, &streamed(40), 3);
    server.stopper.stop(Duration::from_secs(30));
    let rest: Vec<String> = stream.lines().map(Result::unwrap).collect();
    assert!(rest.iter().any(|l| l == "data: [DONE]"), "{rest:?}");
    server.join();
    assert!(std::net::TcpStream::connect(server.address).is_err());

    // A request that takes longer than the grace period ends with an error.
    let mut server = Running::start();
    let stream = begin(&server, &streamed(1000), 3);
    server.stopper.stop(Duration::from_millis(50));
    let rest: Vec<String> = stream.lines().map(Result::unwrap).collect();
    let last = rest
        .iter()
        .rev()
        .find_map(|l| l.strip_prefix("data: "))
        .unwrap();
    let error: Value = serde_json::from_str(last).unwrap();
    assert_eq!(error["error"]["code"], "closing", "{rest:?}");
    server.join();
}

/// With too few pages for all, requests give way to others and begin again: none is lost or changed.
#[test]
fn few_pages_delay_answers_and_change_none() {
    let options = EngineOptions {
        parallel: 4,
        ..EngineOptions::default()
    };
    let server = Running::over(
        model(Some(5), options),
        Security::default(),
        HttpLimits::default(),
    );
    let ask = |i: usize| {
        let mut body = chat(150);
        body["messages"][0]["content"] = format!("Tell me about the film number {i}.").into();
        body
    };
    let server = &server;
    let all = || -> Vec<Value> {
        std::thread::scope(|scope| {
            let asked: Vec<_> = (0..6)
                .map(|i| scope.spawn(move || server.post(CHAT, &ask(i)).json()))
                .collect();
            asked
                .into_iter()
                .map(|a| a.join().unwrap()["choices"].clone())
                .collect()
        })
    };
    let together = all();
    for (i, choices) in together.iter().enumerate() {
        let alone = server.post(CHAT, &ask(i)).json();
        assert_eq!(choices, &alone["choices"], "request {i}");
    }
    let metrics = server.model.engine().metrics();
    assert!(metrics.preemptions.get() > 0, "{}", metrics.text());
}

#[test]
fn the_page_is_a_fixed_table_under_a_strict_policy() {
    let security = Security::new(&[KEY.into()], &[], &[]).unwrap();
    let server = Running::with(EngineOptions::default(), security, HttpLimits::default());
    let page = server.get("/");
    assert_eq!(
        (page.status, page.header("content-type")),
        (200, "text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy");
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self'"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), "nosniff");
    // Every file that the page names exists, and none comes from elsewhere.
    let mut named = 0;
    for part in page.body.split('"').filter(|p| p.starts_with("page/")) {
        assert_eq!(server.get(&format!("/{part}")).status, 200, "{part}");
        named += 1;
    }
    assert_eq!(named, 2);
    assert!(
        !page.body.contains("http:") && !page.body.contains("https:"),
        "{}",
        page.body
    );
    for script in ["app", "store", "markdown", "marked", "math", "highlight"] {
        let text = server.get(&format!("/page/{script}.js")).body;
        assert!(
            ["export ", "export{"].iter().any(|e| text.contains(e)) || script == "app",
            "{script}"
        );
        for banned in ["innerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!text.contains(banned), "{script}: {banned}");
        }
    }
    for path in [
        "/page/",
        "/page/../Cargo.toml",
        "/page/%2e%2e/Cargo.toml",
        "/page/app.js/",
        "//etc/passwd",
    ] {
        assert!([401, 404].contains(&server.get(path).status), "{path}");
    }
}
