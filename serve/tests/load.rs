//! Clients of all kinds at once: every answer is complete or ends with an error, and no resources leak.

use crate::common::{Response, Running, model};
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";
const PAGES: usize = 12;

/// A small generator, so that each client does the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % n
    }
}

fn chat(random: &mut Random, stream: bool) -> Value {
    let times = [1, 4, 30][random.below(3) as usize];
    let text = format!("Tell me about the film number {}. ", random.below(9)).repeat(times);
    json!({
        "messages": [{"role": "user", "content": text}], "stream": stream,
        "max_tokens": ([1, 10, 80][random.below(3) as usize]), "n": 1 + random.below(2),
    })
}

fn client(server: &Running, random: &mut Random, whole: &AtomicUsize) {
    let kind = random.below(7);
    let body = chat(random, kind != 0);
    let request = server.request("POST", CHAT, &[], &body.to_string());
    let mut stream = server.connect();
    match kind {
        0 | 1 => {
            stream.write_all(request.as_bytes()).unwrap();
            let response = Response::read(stream);
            assert!([200, 429].contains(&response.status), "{}", response.body);
            if kind == 1 && response.status == 200 {
                assert!(
                    response.body.ends_with("data: [DONE]\n\n"),
                    "{}",
                    response.body
                );
            }
            whole.fetch_add(usize::from(response.status == 200), Ordering::Relaxed);
        }
        2 => {
            // Hangs up at once, or in the middle.
            stream.write_all(request.as_bytes()).unwrap();
            stream
                .set_read_timeout(Some(Duration::from_millis(1 + random.below(400))))
                .unwrap();
            let mut some = vec![0; 1 + random.below(3000) as usize];
            let _ = stream.read(&mut some);
        }
        3 => {
            // Reads slowly.
            stream.write_all(request.as_bytes()).unwrap();
            let mut byte = [0; 64];
            for _ in 0..20 {
                let _ = stream.read(&mut byte);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        4 => {
            // Sends half a request.
            let half = random.below(request.len() as u64) as usize;
            let _ = stream.write_all(&request.as_bytes()[..half]);
        }
        5 => {
            let bad = ["{", "[]", "{\"messages\": 3}", "{\"n\": 99}"][random.below(4) as usize];
            assert_eq!(server.send("POST", CHAT, &[], bad).status, 400);
        }
        _ => assert_eq!(server.get("/health").status, 200),
    }
}

#[test]
fn nothing_is_left_of_clients_of_all_kinds() {
    let options = EngineOptions {
        parallel: 4,
        queue: 4,
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let server = Running::over(
        model(Some(PAGES), options),
        Security::default(),
        HttpLimits::default(),
    );
    let whole = AtomicUsize::new(0);
    let end = Instant::now() + Duration::from_secs(8);
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let (server, whole) = (&server, &whole);
            scope.spawn(move || {
                let mut random = Random(seed);
                while Instant::now() < end {
                    client(server, &mut random, whole);
                }
            });
        }
    });
    assert!(whole.load(Ordering::Relaxed) > 5);
    // All pages are free again, no request runs or waits, and the server answers as before.
    server.until("nq_num_requests_running 0");
    server.until("nq_num_requests_waiting 0");
    server.until(&format!("nq_kv_pages_free {PAGES}"));
    assert_eq!(server.post(CHAT, &chat(&mut Random(1), false)).status, 200);
}
