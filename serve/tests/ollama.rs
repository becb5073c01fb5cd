//! Ollama's protocol over the demo model.

use crate::common::{self, Running, base, templated, user, with};
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};

const OLLAMA_CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn hello(more: &Value) -> Value {
    let body = json!({"model": "demo:latest", "messages": [user("Hello!")], "think": false,
        "options": {"temperature": 0, "num_predict": 12, "num_ctx": 4096}});
    with(body, more)
}

fn lines(server: &Running, path: &str, body: &Value) -> Vec<Value> {
    let response = server.post(path, body);
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(response.header("content-type"), "application/x-ndjson");
    let line = |line: &str| serde_json::from_str(line).unwrap();
    response.body.lines().map(line).collect()
}

#[test]
fn chats_are_answered_whole_and_in_lines_alike() {
    let server = Running::start();
    let whole = server.json(OLLAMA_CHAT, &hello(&json!({"stream": false})));
    let asked = json!({"max_tokens": 12, "reasoning_effort": "none"});
    let same = server.json(
        crate::common::CHAT,
        &with(base(crate::common::CHAT), &asked),
    );
    let text = same["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(
        whole["message"],
        json!({"role": "assistant", "content": text})
    );
    assert_eq!(
        (&whole["model"], &whole["done"], &whole["done_reason"]),
        (&json!("demo"), &json!(true), &json!("length"))
    );
    assert_eq!(whole["prompt_eval_count"], same["usage"]["prompt_tokens"]);
    assert_eq!(whole["eval_count"], 12);
    assert!(
        whole["created_at"].as_str().unwrap().ends_with('Z'),
        "{whole}"
    );
    // Without `stream`, an answer comes in lines.
    let lines = lines(&server, OLLAMA_CHAT, &hello(&json!({})));
    let (last, before) = lines.split_last().unwrap();
    let joined: String = before
        .iter()
        .map(|line| line["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(joined, text);
    assert!(before.len() > 1 && before.iter().all(|line| line["done"] == false));
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("length"), &json!(12))
    );
    assert!(last["total_duration"].as_u64().unwrap() >= last["eval_duration"].as_u64().unwrap());
}

#[test]
fn formats_calls_and_thinking_have_their_places() {
    let server = Running::start();
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]});
    let more = json!({"stream": false, "format": schema, "options": {"temperature": 1, "seed": 1, "num_predict": 100}});
    let answer = server.json(OLLAMA_CHAT, &hello(&more));
    let held: Value = serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
    assert!(
        ["Paris", "Oslo"].contains(&held["city"].as_str().unwrap()),
        "{answer}"
    );
    let answer = server.json(OLLAMA_CHAT, &hello(&with(more, &json!({"format": "json"}))));
    assert!(
        answer["message"]["content"]
            .as_str()
            .unwrap()
            .starts_with('{'),
        "{answer}"
    );
    // Calls and their results go back.
    let function =
        json!({"type": "function", "function": {"name": "weather", "parameters": schema}});
    let call = json!({"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]});
    let result = json!({"role": "tool", "tool_name": "weather", "content": "rain"});
    let back = json!({"stream": false, "tools": [function], "messages": [user("x"), call, result]});
    assert_eq!(server.json(OLLAMA_CHAT, &hello(&back))["done"], true);
    let thinker = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";
    let server = Running::over(
        templated(thinker),
        Security::default(),
        HttpLimits::default(),
    );
    let asked = json!({"think": true, "messages": [user("Tell me about a film.")]});
    let thought = server.json(
        OLLAMA_CHAT,
        &hello(&with(asked.clone(), &json!({"stream": false}))),
    );
    assert!(
        !thought["message"]["thinking"].as_str().unwrap().is_empty(),
        "{thought}"
    );
    let told = lines(&server, OLLAMA_CHAT, &hello(&asked));
    let joined: String = told
        .iter()
        .filter_map(|line| line["message"]["thinking"].as_str())
        .collect();
    assert_eq!(thought["message"]["thinking"], joined);
}

#[test]
fn prompts_are_answered_with_a_template_and_without() {
    let server = Running::start();
    let options = json!({"temperature": 0, "num_predict": 8});
    let ask = |more: Value| {
        let body = json!({"prompt": "Hello!", "stream": false, "think": false, "options": options});
        server.json(GENERATE, &with(body, &more))
    };
    let chat = json!({"max_tokens": 8, "reasoning_effort": "none"});
    let chat = server.json(crate::common::CHAT, &with(base(crate::common::CHAT), &chat));
    assert_eq!(
        ask(json!({}))["response"],
        chat["choices"][0]["message"]["content"]
    );
    let raw = ask(json!({"raw": true, "prompt": "Once"}));
    let text = server.json(
        crate::common::COMPLETIONS,
        &with(base(crate::common::COMPLETIONS), &json!({"max_tokens": 8})),
    );
    assert_eq!(raw["response"], text["choices"][0]["text"]);
    // Nothing is asked: the model is loaded.
    for (path, body) in [
        (GENERATE, json!({})),
        (OLLAMA_CHAT, json!({"messages": []})),
    ] {
        let told = lines(&server, path, &with(body, &json!({"keep_alive": "5m"})));
        assert_eq!(
            (told.len(), &told[0]["done_reason"]),
            (1, &json!("load")),
            "{told:?}"
        );
    }
}

#[test]
fn models_are_told_and_errors_have_the_form() {
    let server = Running::start();
    let tags = server.get("/api/tags").json();
    assert_eq!(
        (&tags["models"][0]["name"], &tags["models"][0]["model"]),
        (&json!("demo"), &json!("demo"))
    );
    let weights: u64 = std::fs::read_dir(common::demo())
        .unwrap()
        .flatten()
        .filter(|file| file.path().extension().is_some_and(|e| e == "safetensors"))
        .map(|file| file.metadata().unwrap().len())
        .sum();
    assert_eq!(tags["models"][0]["size"], weights);
    let digest = tags["models"][0]["digest"].as_str().unwrap();
    assert!(
        digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit()),
        "{digest}"
    );
    assert_eq!(server.get("/api/ps").json()["models"][0], tags["models"][0]);
    assert!(server.get("/api/version").json()["version"].is_string());
    for body in [
        json!({"model": "demo"}),
        json!({"name": "demo:latest"}),
        json!({"model": "demo", "verbose": true}),
    ] {
        let shown = server.json("/api/show", &body);
        let family = shown["model_info"]["general.architecture"]
            .as_str()
            .unwrap();
        assert_eq!(
            shown["model_info"][format!("{family}.context_length")],
            1024
        );
        let capabilities = shown["capabilities"].as_array().unwrap();
        assert!(
            capabilities.contains(&json!("completion"))
                && capabilities.contains(&json!("thinking")),
            "{shown}"
        );
    }
    for (path, body, status, words) in [
        (
            OLLAMA_CHAT,
            hello(&json!({"model": "other"})),
            404,
            "there is no model",
        ),
        (OLLAMA_CHAT, hello(&json!({"format": 3})), 400, "format"),
        (
            OLLAMA_CHAT,
            hello(&json!({"options": {"mirostat": 2}})),
            400,
            "options.mirostat",
        ),
        (
            OLLAMA_CHAT,
            hello(&json!({"messages": [{"role": "user", "images": ["aaaa"]}]})),
            400,
            "messages[0].images",
        ),
        (
            GENERATE,
            json!({"prompt": "x", "template": "{{ .Prompt }}"}),
            400,
            "template",
        ),
        (
            "/api/show",
            json!({"model": "other"}),
            404,
            "there is no model",
        ),
        ("/api/pull", json!({"model": "x"}), 404, "/api/pull"),
    ] {
        let response = server.post(path, &body);
        assert_eq!(response.status, status, "{path}: {}", response.body);
        let error = response.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(words), "{path}: {error}");
    }
}

#[test]
fn vectors_are_those_of_openais_protocol() {
    let model = common::embedder(EngineOptions::default());
    let server = Running::over(model, Security::default(), HttpLimits::default());
    let texts = json!(["Hello!", "A river."]);
    let same = server.json("/v1/embeddings", &json!({"input": texts, "dimensions": 8}));
    let answer = server.json(
        "/api/embed",
        &json!({"model": "embedder:latest", "input": texts, "dimensions": 8, "keep_alive": "5m", "options": {"num_ctx": 512}}),
    );
    assert_eq!(answer["embeddings"][0], same["data"][0]["embedding"]);
    assert_eq!(answer["embeddings"][1], same["data"][1]["embedding"]);
    assert_eq!(answer["embeddings"].as_array().unwrap().len(), 2);
    assert_eq!(answer["prompt_eval_count"], same["usage"]["prompt_tokens"]);
    assert_eq!(answer["model"], same["model"]);
    let one = server.json("/api/embed", &json!({"input": "Hello!", "dimensions": 8}));
    assert_eq!(one["embeddings"], json!([answer["embeddings"][0]]));
    // Texts that are too long are refused, not cut.
    let long = json!({"input": "river ".repeat(2000), "truncate": true});
    let refused = server.post("/api/embed", &long);
    assert!(
        refused.status == 400 && refused.json()["error"].is_string(),
        "{}",
        refused.body
    );
    // A model that answers makes none.
    let refused = Running::start().post("/api/embed", &json!({"input": "a"}));
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(error.contains("makes no embeddings"), "{error}");
}
