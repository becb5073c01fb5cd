//! How clients send requests: compressed, from pages, and with nothing after them.

use crate::common::{self, CHAT, Response, Running, base, user, with};
use flate2::Compression;
use flate2::write::GzEncoder;
use nq_serve::{EngineOptions, HttpLimits, Security};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::{Value, json};
use std::io::Write;
use std::net::Shutdown;

#[test]
fn clients_that_send_no_more_get_their_answers() {
    let server = Running::over(
        common::model(None, EngineOptions::default()),
        Security::default(),
        HttpLimits::default(),
    );
    let ask = |path: &str, body: Value| {
        let mut stream = server.connect();
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let method = if body.is_empty() { "GET" } else { "POST" };
        stream
            .write_all(server.request(method, path, &[], &body).as_bytes())
            .unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        Response::read(stream)
    };
    assert_eq!(ask("/v1/models", Value::Null).json()["object"], "list");
    for tokens in [1, 60] {
        let body = with(
            base(CHAT),
            &json!({"max_tokens": tokens, "ignore_eos": true}),
        );
        let whole = ask(CHAT, body.clone());
        assert_eq!(
            (whole.status, &whole.json()["usage"]["completion_tokens"]),
            (200, &json!(tokens))
        );
        let stream = ask(CHAT, with(body, &json!({"stream": true})));
        assert!(
            stream.body.trim_end().ends_with("data: [DONE]"),
            "{}",
            stream.body
        );
    }
    assert_eq!(ask(CHAT, json!({"messages": 3})).status, 400);
    // Whoever sends no more and is gone makes room, in the midst of an answer that nobody hears.
    for stream in [false, true] {
        let mut gone = server.connect();
        let body = json!({"messages": [user("x")], "max_tokens": 900, "ignore_eos": true, "stream": stream});
        gone.write_all(
            server
                .request("POST", CHAT, &[], &body.to_string())
                .as_bytes(),
        )
        .unwrap();
        server.until("nq_num_requests_running 1");
        drop(gone);
        server.until("nq_num_requests_running 0");
    }
    let metrics = server.model.engine().metrics().text();
    assert!(
        metrics.contains("nq_requests_finished_total{reason=\"cancelled\"} 2"),
        "{metrics}"
    );
}

#[test]
fn compressed_bodies_are_decoded_within_the_limit() {
    let server = Running::start();
    let body = base(CHAT).to_string();
    let send = |encoding: &str, body: &[u8]| {
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nconnection: close\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-encoding: {encoding}\r\ncontent-length: {}\r\n\r\n",
            server.address,
            body.len()
        );
        server.bytes(&[head.as_bytes(), body].concat())
    };
    let gzip = |body: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(body).unwrap();
        encoder.finish().unwrap()
    };
    for (encoding, bytes) in [
        ("gzip", gzip(body.as_bytes())),
        ("identity", body.clone().into_bytes()),
        (
            "zstd",
            compress_to_vec(body.as_bytes(), CompressionLevel::Fastest),
        ),
    ] {
        let response = send(encoding, &bytes);
        assert_eq!(response.status, 200, "{encoding}: {}", response.body);
    }
    let response = send("br", body.as_bytes());
    assert_eq!(response.status, 415);
    assert!(
        response.body.contains("content-encoding"),
        "{}",
        response.body
    );
    assert_eq!(send("gzip", body.as_bytes()).status, 400);
    let large = gzip(&vec![b' '; HttpLimits::default().body + 1]);
    assert!(large.len() < 100_000);
    assert_eq!(send("gzip", &large).status, 413);
}

/// Pages of an allowed origin may use the libraries of OpenAI and Anthropic, which add headers of their own.
#[test]
fn pages_of_allowed_origins_may_send_any_header() {
    let origins = [
        "https://app.example".to_owned(),
        "http://localhost:*".to_owned(),
    ];
    let security = Security::new(&[], &[], &origins).unwrap();
    let server = Running::with(EngineOptions::default(), security, HttpLimits::default());
    let preflight = |origin: &str, headers: &str| {
        let asked = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", headers),
            ("access-control-request-private-network", "true"),
        ];
        server.send("OPTIONS", CHAT, &asked, "")
    };
    let headers =
        "anthropic-dangerous-direct-browser-access,anthropic-version,x-api-key,x-stainless-os";
    for origin in ["https://app.example", "http://localhost:5173"] {
        let response = preflight(origin, headers);
        assert_eq!(response.status, 204);
        assert_eq!(response.header("access-control-allow-headers"), headers);
        assert_eq!(response.header("access-control-allow-origin"), origin);
        assert_eq!(
            response.header("access-control-allow-private-network"),
            "true"
        );
        let body = base(CHAT).to_string();
        let response = server.send("POST", CHAT, &[("origin", origin)], &body);
        assert_eq!(response.status, 200);
        assert!(
            response
                .header("access-control-expose-headers")
                .contains("retry-after")
        );
    }
    for origin in ["https://other.example", "http://localhost.evil:1", "null"] {
        let response = preflight(origin, headers);
        assert_eq!(
            (
                response.status,
                response.header("access-control-allow-headers")
            ),
            (403, "")
        );
    }
}
