//! Several models: loaded when requested, and unloaded for one another.

use crate::common::{self, Running, load, model, named};
use nq_serve::{EngineOptions, HttpLimits, LoadError, ModelSource, Models, Security, ServedModel};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const MIB: u64 = 1 << 20;

/// Memory for two models of 100 MiB.
#[derive(Default)]
struct Memory {
    taken: Mutex<Vec<Weak<dyn nq_runtime::Engine>>>,
    loads: AtomicUsize,
}

impl Memory {
    fn free(&self) -> u64 {
        let taken = self.taken.lock().unwrap();
        let alive = taken.iter().filter(|e| e.strong_count() > 0);
        250 * MIB - alive.count() as u64 * 100 * MIB
    }
}

struct Demo(&'static str, Arc<Memory>);

impl ModelSource for Demo {
    fn load(&self) -> Result<ServedModel, LoadError> {
        let Demo(name, memory) = self;
        if *name == "broken" {
            return Err(LoadError::Failed);
        }
        let needed = if *name == "huge" { 1000 } else { 100 } * MIB;
        let free = memory.free();
        if needed > free {
            return Err(LoadError::Memory { needed, free });
        }
        memory.loads.fetch_add(1, Ordering::Relaxed);
        let engine = load();
        memory.taken.lock().unwrap().push(Arc::downgrade(&engine));
        Ok(named(name, engine, None, EngineOptions::default()))
    }
}

fn server(names: &[&'static str]) -> (Running, Arc<Memory>) {
    let memory = Arc::new(Memory::default());
    let mut models = Models::default();
    for name in names {
        models.add(*name, Box::new(Demo(name, Arc::clone(&memory))));
    }
    let other = model(None, EngineOptions::default());
    let server = Running::all(models, other, Security::default(), HttpLimits::default());
    (server, memory)
}

fn chat(model: &str, tokens: usize) -> Value {
    json!({
        "model": model, "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": tokens, "ignore_eos": true, "temperature": 0,
    })
}

/// A stream that has begun; dropping it hangs up.
fn begin(server: &Running, model: &str) -> BufReader<std::net::TcpStream> {
    let mut body = chat(model, 1000);
    body["stream"] = true.into();
    let mut stream = server.connect();
    let request = server.request("POST", CHAT, &[], &body.to_string());
    stream.write_all(request.as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0);
    }
    reader
}

fn loaded(server: &Running) -> Vec<bool> {
    let list = server.get("/v1/models").json();
    let data = list["data"].as_array().unwrap();
    data.iter()
        .map(|m| m["loaded"].as_bool().unwrap())
        .collect()
}

#[test]
fn models_are_loaded_when_they_are_asked_for() {
    let (server, memory) = server(&["a", "b", "broken"]);
    assert_eq!(loaded(&server), [false, false, false]);
    assert_eq!(
        server.get("/v1/models/b").json()["max_model_len"],
        Value::Null
    );
    assert_eq!(server.get("/health").status, 200);
    // Many simultaneous requests for one model wait for a single load.
    let server = &server;
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| server.json(CHAT, &chat("b", 3))))
            .collect();
        for answer in asked {
            assert_eq!(answer.join().unwrap()["model"], "b");
        }
    });
    assert_eq!(memory.loads.load(Ordering::Relaxed), 1);
    assert_eq!(loaded(server), [false, true, false]);
    assert_eq!(server.get("/v1/models/b").json()["max_model_len"], 1024);
    // The first model serves requests that name none; an unknown name is an error.
    let mut unnamed = chat("a", 3);
    unnamed.as_object_mut().unwrap().remove("model");
    assert_eq!(server.json(CHAT, &unnamed)["model"], "a");
    let unknown = server.post(CHAT, &chat("c", 3));
    assert_eq!(
        (unknown.status, unknown.error().1.as_str()),
        (404, "model_not_found")
    );
    assert!(
        unknown.error().2.contains("a, b, broken"),
        "{}",
        unknown.body
    );
    let broken = server.post(CHAT, &chat("broken", 3));
    assert_eq!(broken.status, 500);
    assert!(broken.error().2.contains("log"), "{}", broken.body);
    let metrics = server.get("/metrics").body;
    for line in [
        "nq_generation_tokens_total{model_name=\"a\"} 3",
        "nq_generation_tokens_total{model_name=\"b\"} 18",
        "nq_requests_finished_total{model_name=\"b\",reason=\"length\"} 6",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} in {metrics}");
    }
    for once in ["# EOF", "# TYPE nq_generation_tokens counter"] {
        assert_eq!(metrics.lines().filter(|l| *l == once).count(), 1, "{once}");
    }
    let families: Vec<&str> = metrics
        .lines()
        .filter_map(|l| l.strip_prefix("# TYPE "))
        .collect();
    assert!(families.len() > 10, "{metrics}");
}

#[test]
fn the_one_unused_for_longest_makes_room_and_none_that_is_used() {
    let (server, memory) = server(&["a", "b", "c", "huge"]);
    for name in ["a", "b", "a", "c"] {
        assert_eq!(server.json(CHAT, &chat(name, 3))["model"], name);
    }
    assert_eq!(loaded(&server), [true, false, true, false]);
    let streams = [begin(&server, "a"), begin(&server, "c")];
    let refused = server.post(CHAT, &chat("b", 3));
    assert_eq!(refused.status, 503, "{}", refused.body);
    let (_, code, message) = refused.error();
    assert_eq!(code, "insufficient_memory");
    for said in [
        "needs 104.86 MB",
        "52.43 MB are free",
        "in use or pinned: a, c",
    ] {
        assert!(message.contains(said), "{message}");
    }
    assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
    assert_eq!(loaded(&server), [true, false, true, false]);
    drop(streams);
    // Once they are done, it can be loaded.
    let answered = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        server.post(CHAT, &chat("b", 3)).status == 200
    });
    assert!(answered && memory.loads.load(Ordering::Relaxed) == 4);
    // A model that can never fit is refused for good.
    let refused = server.post(CHAT, &chat("huge", 3));
    assert_eq!(refused.status, 503);
    assert!(
        refused.error().2.contains("no other model is loaded"),
        "{}",
        refused.body
    );
    assert_eq!(refused.header("retry-after"), "");
}

#[test]
fn models_that_nobody_uses_are_unloaded() {
    let memory = Arc::new(Memory::default());
    let mut models = Models::default();
    models.add("a", Box::new(Demo("a", Arc::clone(&memory))));
    let models = Arc::new(models);
    let loaded = || models.each(|listed| listed.model.is_some()) == [true];
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    for loads in 1..3 {
        let used = runtime.block_on(models.get(Some("a"))).unwrap();
        assert_eq!(memory.loads.load(Ordering::Relaxed), loads);
        models.unload_unused(Duration::ZERO);
        assert!(loaded(), "it is in use");
        drop(used);
        models.unload_unused(Duration::from_secs(3600));
        assert!(loaded(), "it was used just now");
        models.unload_unused(Duration::ZERO);
        assert!(!loaded());
    }
}

#[test]
fn aliases_name_models_and_pinned_ones_stay() {
    let memory = Arc::new(Memory::default());
    let mut models = Models::default();
    for name in ["a", "b"] {
        models.add(name, Box::new(Demo(name, Arc::clone(&memory))));
    }
    for (alias, model) in [("a", "b"), ("gpt", "nothing")] {
        assert!(models.alias(alias, model).is_err(), "{alias} of {model}");
    }
    models.alias("gpt-5", "b").unwrap();
    models.alias("anthropic/claude", "b").unwrap();
    models.pin("gpt-5").unwrap();
    assert!(models.pin("c").is_err());
    assert!(models.alias("gpt-5", "a").is_err());
    let other = model(None, EngineOptions::default());
    let server = Running::all(models, other, Security::default(), HttpLimits::default());
    assert_eq!(server.json(CHAT, &chat("gpt-5", 3))["model"], "b");
    let list = server.get("/v1/models").json();
    let values = |key: &str| -> Vec<Value> {
        let data = list["data"].as_array().unwrap();
        data.iter().map(|m| m[key].clone()).collect()
    };
    assert_eq!(values("id"), ["a", "b", "gpt-5", "anthropic/claude"]);
    assert_eq!(values("root"), ["a", "b", "b", "b"]);
    assert_eq!(values("loaded"), [false, true, true, true]);
    assert_eq!(values("pinned"), [false, true, true, true]);
    let one = server.get("/v1/models/anthropic/claude").json();
    assert_eq!(
        (&one["id"], &one["max_model_len"]),
        (&json!("anthropic/claude"), &json!(1024))
    );
    assert_eq!(
        (&one["tools"], &one["switches_thinking"]),
        (&json!(false), &json!(true))
    );
    // The demo model's files are in BF16.
    let quantized = &one["quantization"];
    assert_eq!(
        (&quantized["bits"], &quantized["bits_per_weight"]),
        (&Value::Null, &json!(16.0)),
        "{one}"
    );
    let metrics = server.get("/metrics").body;
    for line in [
        "nq_model_loaded{model_name=\"a\"} 0",
        "nq_model_loaded{model_name=\"b\"} 1",
        "nq_model_pinned{model_name=\"b\"} 1",
        "nq_model_loads_total{model_name=\"b\"} 1",
        "nq_model_context_tokens{model_name=\"b\"} 1024",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} in {metrics}");
    }
}

#[test]
fn a_pinned_model_is_not_unloaded() {
    let memory = Arc::new(Memory::default());
    let mut models = Models::default();
    for name in ["a", "b", "c"] {
        models.add(name, Box::new(Demo(name, Arc::clone(&memory))));
    }
    models.pin("a").unwrap();
    let models = Arc::new(models);
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    let loaded = || models.each(|listed| listed.model.is_some());
    for name in ["a", "b", "c"] {
        drop(runtime.block_on(models.get(Some(name))).unwrap());
    }
    // There is memory for two: the one that makes room is not the oldest, which is pinned.
    assert_eq!(loaded(), [true, false, true]);
    models.unload_unused(Duration::ZERO);
    assert_eq!(loaded(), [true, false, false]);
}

/// A model that is loaded once the test says so, or fails then.
struct Slow(Mutex<Receiver<bool>>);

impl ModelSource for Slow {
    fn load(&self) -> Result<ServedModel, LoadError> {
        match self.0.lock().unwrap().recv() {
            Ok(true) => Ok(named("slow", load(), None, EngineOptions::default())),
            _ => Err(LoadError::Failed),
        }
    }
}

#[test]
fn clients_hear_from_a_model_that_is_being_loaded() {
    const PATHS: [&str; 4] = [CHAT, "/v1/responses", "/v1/messages", "/v1/completions"];
    let limits = HttpLimits {
        keep_alive: Duration::from_millis(20),
        ..HttpLimits::default()
    };
    for (path, good) in PATHS.iter().flat_map(|p| [(*p, true), (*p, false)]) {
        for streams in [true, false] {
            let (sender, receiver) = channel();
            let mut models = Models::default();
            models.add("slow", Box::new(Slow(Mutex::new(receiver))));
            let other = model(None, EngineOptions::default());
            let server = Running::all(models, other, Security::default(), limits);
            let mut body = common::base(path);
            body["stream"] = streams.into();
            let mut stream = server.connect();
            let request = server.request("POST", path, &[], &body.to_string());
            stream.write_all(request.as_bytes()).unwrap();
            // The model is loaded after the client has heard something twice.
            let mut reader = BufReader::new(&stream);
            let sign = if streams { ": keep-alive" } else { " " };
            let mut line = String::new();
            let mut heard = 0;
            while heard < 2 {
                line.clear();
                assert!(reader.read_line(&mut line).unwrap() > 0, "{path}");
                heard += usize::from(line.starts_with(sign));
            }
            sender.send(good).unwrap();
            let mut rest = String::new();
            reader.read_to_string(&mut rest).unwrap();
            let what = format!("{path}, streams {streams}, good {good}: {rest}");
            let last = match path {
                "/v1/messages" => "message_stop",
                // Its tokens are used up before it ends.
                "/v1/responses" => "response.incomplete",
                _ => "[DONE]",
            };
            match (streams, good) {
                (true, true) => assert!(rest.contains(last), "{what}"),
                (false, true) => assert!(rest.contains("\"usage\""), "{what}"),
                (_, false) => assert!(rest.contains("error") && rest.contains("log"), "{what}"),
            }
        }
    }
}
