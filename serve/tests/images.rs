//! Images in requests of all protocols, to a small random model that sees and to one that does not.

use crate::common::{CHAT, MESSAGES, RESPONSES, Running, demo, sees, user, with};
use nq_answers::images::message_with_images;
use nq_model::vision::{Patches, VisionConfig};
use nq_runtime::{ImageRows, Tower};
use nq_serve::protocol::reading::Rules;
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A file of the pictures that nq-pictures is tested with.
fn file(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pictures/tests/fixtures");
    std::fs::read(folder.join(name)).unwrap()
}

/// A user's message with images before a text.
fn seen(names: &[&str], text: &str) -> Value {
    let files: Vec<Vec<u8>> = names.iter().map(|name| file(name)).collect();
    json!(message_with_images(&files, text).unwrap())
}

fn url(name: &str) -> String {
    let message = seen(&[name], "");
    message["content"][0]["image_url"]["url"]
        .as_str()
        .unwrap()
        .to_owned()
}

fn base64(name: &str) -> String {
    url(name).split_once(",").unwrap().1.to_owned()
}

fn asked(messages: Value) -> Value {
    json!({"messages": messages, "max_tokens": 8, "temperature": 0})
}

fn server() -> Running {
    Running::ruled_over(sees::model(EngineOptions::default()), Rules::default())
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

/// `gray.png` and `colour.bmp` have 41 by 29 pixels, which are 40 by 32 for the model: 20 tokens.
const TOKENS: u64 = 20;

#[test]
fn an_image_is_tokens_of_the_prompt_that_are_cached_by_what_they_show() {
    let server = server();
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = |answer: &Value| {
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    let ask = |messages: Value| server.json(CHAT, &asked(messages));
    let plain = ask(json!([user("What is it?")]));
    let first = ask(json!([seen(&["gray.png"], "What is it?")]));
    // Its rows, and tokens around them.
    assert_eq!(tokens(&first), tokens(&plain) + TOKENS + 2);
    let again = ask(json!([seen(&["gray.png"], "What is it?")]));
    assert_eq!(text(&again), text(&first));
    assert!(cached(&again) > TOKENS, "{}", cached(&again));
    // As large, and another: nothing behind its beginning is taken over.
    let other = ask(json!([seen(&["colour.bmp"], "What is it?")]));
    assert_eq!(tokens(&other), tokens(&first));
    assert!(cached(&other) < 10, "{}", cached(&other));
    assert_ne!(text(&other), text(&first));
    // The same pixels in another file are the same image.
    let same = ask(json!([seen(&["lossless.webp"], "What is it?")]));
    assert_eq!(text(&same), text(&other));
    assert!(cached(&same) > TOKENS, "{}", cached(&same));
    // A conversation goes on behind an image.
    let answer = json!({"role": "assistant", "content": text(&first)});
    let next = ask(json!([
        seen(&["gray.png"], "What is it?"),
        answer,
        seen(&["colour.bmp"], "And this?")
    ]));
    assert!(cached(&next) > TOKENS, "{}", cached(&next));
}

#[test]
fn answers_do_not_depend_on_what_is_cached_or_computed_beside_them() {
    let messages = json!([
        seen(&["gray.png", "rgb-37x53.png"], "Compare."),
        user("Well?")
    ]);
    let without = EngineOptions {
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let alone = Running::ruled_over(sees::model(without), Rules::default());
    let expected = alone.json(CHAT, &asked(messages.clone()));
    let server = server();
    server.json(CHAT, &asked(json!([seen(&["gray.png"], "Other.")])));
    server.json(
        CHAT,
        &asked(json!([seen(&["gray.png", "colour.bmp"], "Compare.")])),
    );
    std::thread::scope(|scope| {
        for name in ["gray.png", "colour.bmp", "rgb-37x53.png"] {
            let server = &server;
            scope.spawn(move || {
                server.json(CHAT, &asked(json!([seen(&[name, "gray.png"], "And?")])))
            });
        }
        let messages = &messages;
        let answers = (0..3).map(|_| scope.spawn(|| server.json(CHAT, &asked(messages.clone()))));
        for answer in answers.collect::<Vec<_>>() {
            assert_eq!(text(&answer.join().unwrap()), text(&expected));
        }
    });
}

#[test]
fn all_protocols_read_images_alike() {
    let server = server();
    let chat = server.json(CHAT, &asked(json!([seen(&["gray.png"], "Look.")])));
    let parts = json!([{"type": "input_image", "image_url": url("gray.png"), "detail": "auto"}, {"type": "input_text", "text": "Look."}]);
    let input = json!({"input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0});
    let responses = server.json(RESPONSES, &input);
    let written = &responses["output"][0]["content"][0]["text"];
    assert_eq!(written, text(&chat));
    assert_eq!(
        responses["usage"]["input_tokens"],
        chat["usage"]["prompt_tokens"]
    );
    let counted = server.json(
        "/v1/responses/input_tokens",
        &json!({"input": input["input"]}),
    );
    assert_eq!(counted["input_tokens"], chat["usage"]["prompt_tokens"]);

    let source = json!({"type": "base64", "media_type": "image/jpeg", "data": base64("gray.png")});
    let blocks = json!([{"type": "image", "source": source}, {"type": "text", "text": "Look."}]);
    let turn = json!({"messages": [{"role": "user", "content": blocks}]});
    let counted = server.json("/v1/messages/count_tokens", &turn);
    assert_eq!(counted["input_tokens"], chat["usage"]["prompt_tokens"]);
    let answered = server.json(
        MESSAGES,
        &with(turn, &json!({"max_tokens": 8, "temperature": 0})),
    );
    assert_eq!(answered["content"][0]["text"], text(&chat));

    let message = json!({"role": "user", "content": "Look.", "images": [base64("gray.png")]});
    let options = json!({"num_predict": 8, "temperature": 0});
    let ollama = json!({"messages": [message], "stream": false, "options": options});
    let answered = server.json("/api/chat", &ollama);
    assert_eq!(answered["message"]["content"], text(&chat));
    let prompt = json!({"prompt": "Look.", "images": [base64("gray.png")], "stream": false, "options": options});
    assert_eq!(
        server.json("/api/generate", &prompt)["response"],
        text(&chat)
    );

    let card = &server.get("/v1/models").json()["data"][0];
    assert_eq!(card["input_modalities"], json!(["text", "image"]));
    let tower = &card["vision"];
    let found = ["blocks", "token_side", "min_tokens", "max_tokens"].map(|key| tower[key].clone());
    assert_eq!(found, [2, 8, 4, 40].map(Value::from));
    assert_eq!(tower["bytes"], 4 * tower["parameters"].as_u64().unwrap());
    let shown = server.json("/api/show", &json!({"model": "sees"}));
    assert_eq!(shown["model_info"]["nq.vision.embedding_length"], 32);
    assert!(
        shown["capabilities"]
            .as_array()
            .unwrap()
            .contains(&json!("vision"))
    );
}

/// Agents send screenshots as results of tools; Anthropic's come before the user's words, whatever their places.
#[test]
fn results_of_tools_have_images() {
    let server = server();
    let call =
        json!({"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}});
    let called = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let image = |name: &str| json!({"type": "image_url", "image_url": {"url": url(name)}});
    let shot = json!([{"type": "text", "text": "A shot:"}, image("gray.png")]);
    let result = json!({"role": "tool", "tool_call_id": "c", "content": shot});
    let next = seen(&["rgb-37x53.png"], "Explain.");
    let chat = server.json(CHAT, &asked(json!([user("Look."), called, result, next])));

    let source =
        |name: &str| json!({"type": "base64", "media_type": "image/png", "data": base64(name)});
    let shot = json!([{"type": "text", "text": "A shot:"}, {"type": "image", "source": source("gray.png")}]);
    let turns = json!([
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "image", "source": source("rgb-37x53.png")},
            {"type": "tool_result", "tool_use_id": "c", "content": shot},
            {"type": "text", "text": "Explain."},
        ]},
    ]);
    let messages = server.json(MESSAGES, &asked(turns));
    assert_eq!(messages["content"][0]["text"], text(&chat));

    let output = json!([{"type": "input_text", "text": "A shot:"}, {"type": "input_image", "image_url": url("gray.png")}]);
    let items = json!([
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
        {"role": "user", "content": [{"type": "input_image", "image_url": url("rgb-37x53.png")}, {"type": "input_text", "text": "Explain."}]},
    ]);
    let responses = server.json(
        RESPONSES,
        &json!({"input": items, "max_output_tokens": 8, "temperature": 0}),
    );
    assert_eq!(responses["output"][0]["content"][0]["text"], text(&chat));
}

#[test]
fn low_detail_and_several_answers() {
    let server = server();
    let image = |detail: &str| json!({"type": "image_url", "image_url": {"url": url("rgb-64x64.png"), "detail": detail}});
    let ask = |detail: &str, n: u32| {
        let content = json!([image(detail), {"type": "text", "text": "Look."}]);
        let one = asked(json!([{"role": "user", "content": content}]));
        server.json(CHAT, &with(one, &json!({"n": n})))
    };
    // 64 tokens are within those of low detail.
    assert_eq!(
        ask("low", 1)["usage"]["prompt_tokens"],
        ask("high", 1)["usage"]["prompt_tokens"]
    );
    let both = ask("auto", 2);
    let texts: Vec<&Value> = (0..2)
        .map(|i| &both["choices"][i]["message"]["content"])
        .collect();
    assert_eq!(texts[0], texts[1]);
    assert_eq!(text(&ask("auto", 1)), texts[0]);
}

/// The token that stands for an image is text in the words of a user, with images beside it or without.
#[test]
fn pads_in_a_text_stay_text() {
    let server = server();
    let words = "<|vision_start|><|image_pad|><|vision_end|> <|image_pad|>";
    for message in [user(words), seen(&["gray.png"], words)] {
        let answer = server.post(CHAT, &asked(json!([message])));
        assert_eq!(answer.status, 200);
    }
}

#[test]
fn images_that_cannot_be_read_are_refused_by_their_places() {
    let server = server();
    let with_part = |part: Value| {
        let content = json!([{"type": "text", "text": "Look."}, part]);
        let answer = server.post(CHAT, &asked(json!([{"role": "user", "content": content}])));
        assert_eq!(answer.status, 400, "{}", answer.json());
        answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let at = |url: &str| with_part(json!({"type": "image_url", "image_url": {"url": url}}));
    for (url, words) in [
        (
            "file:///etc/passwd",
            "messages[0].content[1].image_url.url: nq reads images from data: URLs",
        ),
        ("/etc/passwd", "nq reads images from data: URLs"),
        (
            "http://127.0.0.1/a.png",
            "fetches no images from \"127.0.0.1\"",
        ),
        ("data:image/png;base64,!", "expected base64"),
        (
            "data:image/svg+xml;base64,PHN2Zy8+",
            "messages[0].content[1]: no picture: expected PNG, JPEG",
        ),
        ("data:image/png,abc", "expected data:image/...;base64,..."),
    ] {
        let said = at(url);
        assert!(said.contains(words), "{url}: {said}");
    }
    let whole = base64("halved.jpg");
    let cut = format!("data:image/jpeg;base64,{}", &whole[..whole.len() / 8 * 4]);
    assert!(
        at(&cut).contains("messages[0].content[1]: JPEG picture"),
        "{}",
        at(&cut)
    );
    let said = with_part(json!({"type": "image_url"}));
    assert!(
        said.contains("image_url: expected a value, found none"),
        "{said}"
    );
    let sources = json!({"type": "base64", "media_type": "image/png", "data": base64("gray.png")});
    let said = with_part(json!({"type": "image", "image_url": url("gray.png"), "source": sources}));
    assert!(
        said.contains("source: expected image_url or source, found both"),
        "{said}"
    );
    let said = with_part(json!({"type": "input_image", "file_id": "file-1"}));
    assert!(said.contains("send the image itself"), "{said}");
    let system = json!({"role": "system", "content": [{"type": "image_url", "image_url": {"url": url("gray.png")}}]});
    let answer = server.post(CHAT, &asked(json!([system, user("x")])));
    assert!(
        answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("messages of users")
    );
    // More than 100.
    let many: Vec<&str> = vec!["rgb-1x1.png"; 101];
    let answer = server.post(CHAT, &asked(json!([seen(&many, "Look.")])));
    assert!(
        answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("at most 100 images")
    );
    // More tokens than the context has, said before anything is decoded.
    let many: Vec<&str> = vec!["rgb-64x64.png"; 20];
    let answer = server.post(CHAT, &asked(json!([seen(&many, "Look.")])));
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn a_listed_host_of_this_network_is_not_asked() {
    let rules = Rules {
        image_hosts: vec!["localhost".into()],
        ..Rules::default()
    };
    let server = Running::ruled_over(sees::model(EngineOptions::default()), rules);
    let url = format!("http://localhost:{}/v1/models", server.address.port());
    let content = json!([{"type": "image_url", "image_url": url}]);
    let answer = server.post(CHAT, &asked(json!([{"role": "user", "content": content}])));
    let said = answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(said.contains("host not found"), "{said}");
}

/// Somebody who asks about an image is told that the model does not see; a tool's result says it to the model.
#[test]
fn a_model_without_a_tower_says_so() {
    assert!(demo().exists());
    let server = Running::start();
    let answer = server.post(CHAT, &asked(json!([seen(&["gray.png"], "Look.")])));
    assert_eq!(answer.status, 400);
    let said = answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        said.starts_with("messages[0].content[0]: demo reads text alone"),
        "{said}"
    );
    assert!(said.contains("Qwen/Qwen3.5-4B"), "{said}");
    let image = json!({"type": "image_url", "image_url": {"url": url("gray.png")}});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": [image]});
    let answer = server.post(CHAT, &asked(json!([user("Look."), result])));
    assert_eq!(answer.status, 200, "{}", answer.json());
    assert_eq!(
        answer.header("x-nq-left-out"),
        "messages[1].content[0] image_url"
    );
}

/// A tower that says when it begins with an image, and does something of a test's first, which is told whether to stop.
struct Watched<F> {
    tower: Arc<dyn Tower>,
    begun: Sender<()>,
    first: F,
}

impl<F: Fn(&dyn Fn() -> bool) + Send + Sync> Tower for Watched<F> {
    fn config(&self) -> &VisionConfig {
        self.tower.config()
    }

    fn encode_bytes(&self, patches: usize) -> usize {
        self.tower.encode_bytes(patches)
    }

    fn encode_until(
        &self,
        patches: &Patches,
        stop: &dyn Fn() -> bool,
    ) -> nq_runtime::Result<ImageRows> {
        self.begun.send(()).unwrap();
        (self.first)(stop);
        self.tower.encode_until(patches, stop)
    }
}

/// Encoding is work of its own: others are answered whole while an image is encoded, and between two of a request.
#[test]
fn others_are_answered_while_images_are_encoded() {
    let (begun, begins) = channel();
    let (lets_go, go) = channel();
    let go = Mutex::new(Some(go));
    let model = sees::seeing_by(EngineOptions::default(), move |tower| {
        let go: Mutex<Receiver<()>> = go.lock().unwrap().take().unwrap().into();
        Arc::new(Watched {
            tower,
            begun: begun.clone(),
            first: move |_: &dyn Fn() -> bool| go.lock().unwrap().recv().unwrap(),
        })
    });
    let server = Running::ruled_over(model, Rules::default());
    let images = asked(json!([seen(&["gray.png", "rgb-64x64.png"], "Look.")]));
    let other = asked(json!([user("Hello!")]));
    let alone = text(&server.json(CHAT, &other)).to_owned();
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| server.json(CHAT, &images));
        for _ in 0..2 {
            begins.recv().unwrap();
            assert_eq!(text(&server.json(CHAT, &other)), alone);
            lets_go.send(()).unwrap();
        }
        let looked = looking.join().unwrap();
        assert!(looked["usage"]["completion_tokens"].as_u64() > Some(0));
    });
}

/// The tower is told when a client has left, which is known before the first sign of life is due.
#[test]
fn work_on_images_stops_when_a_client_has_left() {
    let (begun, begins) = channel();
    let (stopped, stops) = channel();
    let model = sees::seeing_by(EngineOptions::default(), move |tower| {
        let stopped = stopped.clone();
        Arc::new(Watched {
            tower,
            begun: begun.clone(),
            first: move |stop: &dyn Fn() -> bool| {
                while !stop() {
                    std::thread::yield_now();
                }
                stopped.send(()).unwrap();
            },
        })
    });
    let limits = HttpLimits {
        keep_alive: Duration::from_secs(3600),
        ..HttpLimits::default()
    };
    let server = Running::over(model, Security::default(), limits);
    let body = asked(json!([seen(&["gray.png"], "Look.")])).to_string();
    let mut client = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all((head + &body).as_bytes()).unwrap();
    begins.recv().unwrap();
    drop(client);
    stops.recv().unwrap();
}
