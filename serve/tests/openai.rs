//! OpenAI's protocols over the demo model.

use crate::common::{self, CHAT, Running, beginning, user};
use nq_serve::{HttpLimits, Security};
use nq_testkit::sessions::session_spec;
use serde_json::{Value, json};

fn chat(content: &str) -> Value {
    json!({
        "model": "demo", "messages": [{"role": "user", "content": content}],
        "temperature": 0, "max_tokens": 12,
    })
}

/// `a` with the fields of `b`.
fn with(mut a: Value, b: Value) -> Value {
    for (key, value) in b.as_object().unwrap() {
        a[key] = value.clone();
    }
    a
}

fn text(events: &[Value]) -> String {
    let deltas = events
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str());
    deltas.collect()
}

#[test]
fn a_chat_is_answered_whole_and_as_a_stream_alike() {
    let server = Running::start();
    let whole = server.json("/v1/chat/completions", &chat("Hello!"));
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "demo");
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    let answer = choice["message"]["content"].as_str().unwrap();
    assert!(!answer.is_empty());
    let usage = &whole["usage"];
    let sum =
        usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"].as_u64(), Some(sum));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);

    let asked = with(
        chat("Hello!"),
        json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let events = server.events("/v1/chat/completions", &asked);
    assert_eq!(events.last().unwrap(), "[DONE]");
    let events = &events[..events.len() - 1];
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    for event in events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(
            (&event["id"], &event["created"]),
            (&events[0]["id"], &events[0]["created"])
        );
    }
    assert_eq!(text(events), answer);
    let counted = server.events(
        "/v1/chat/completions",
        &with(
            chat("Hello!"),
            json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
        ),
    );
    let so_far: Vec<u64> = counted[..counted.len() - 1]
        .iter()
        .map(|e| e["usage"]["completion_tokens"].as_u64().unwrap())
        .collect();
    assert!(so_far.is_sorted() && so_far[0] == 0, "{so_far:?}");
    assert_eq!(so_far.last().copied(), usage["completion_tokens"].as_u64());

    let (last, before) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"]["completion_tokens"],
        usage["completion_tokens"]
    );
    // The second time, all but the prompt's last token was cached.
    let prompt = usage["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        last["usage"]["prompt_tokens_details"]["cached_tokens"],
        prompt - 1
    );
    assert!(
        before
            .iter()
            .all(|e| e["usage"].is_null() && e.get("usage").is_some())
    );
    assert_eq!(
        before.last().unwrap()["choices"][0]["finish_reason"],
        choice["finish_reason"]
    );
}

#[test]
fn seeds_stops_counts_and_biases_do_what_they_say() {
    let server = Running::start();
    let chat = with(chat("Tell me about a film."), json!({"ignore_eos": true}));
    let ask = |more| server.json("/v1/chat/completions", &with(chat.clone(), more));
    let content = |v: &Value, i: usize| {
        v["choices"][i]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let seeded = json!({"temperature": 1.0, "seed": 7, "n": 3, "max_completion_tokens": 20});
    let (a, b) = (ask(seeded.clone()), ask(seeded));
    for i in 0..3 {
        assert_eq!(content(&a, i), content(&b, i));
    }
    assert!(content(&a, 0) != content(&a, 1) && content(&a, 1) != content(&a, 2));
    let other = ask(json!({"temperature": 1.0, "seed": 8, "max_tokens": 20}));
    assert!(content(&a, 0) != content(&other, 0));

    let plain = ask(json!({"max_tokens": 30}));
    let full = content(&plain, 0);
    assert_eq!(plain["choices"][0]["finish_reason"], "length");
    assert_eq!(plain["usage"]["completion_tokens"], 30);
    let stop: String = full.chars().skip(10).take(4).collect();
    let stopped = ask(json!({"max_tokens": 30, "stop": [stop, "\u{1}"]}));
    let before = full.split(&stop).next().unwrap();
    assert_eq!(content(&stopped, 0), before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["stop_reason"], stop.as_str());
    assert!(plain["choices"][0]["stop_reason"].is_null());

    let first = server.json("/tokenize", &json!({"prompt": full}))["tokens"][0].clone();
    let biased = ask(json!({"max_tokens": 1, "logit_bias": {first.to_string(): -100}}));
    assert!(content(&biased, 0) != content(&ask(json!({"max_tokens": 1})), 0));
    for parameter in [
        json!({"top_k": 1, "temperature": 1}),
        json!({"min_p": 1.0, "temperature": 1}),
        json!({"top_p": 0.0001, "temperature": 1}),
    ] {
        // Each leaves only the best token.
        assert_eq!(
            content(&ask(with(parameter, json!({"max_tokens": 30}))), 0),
            full
        );
    }
    let older = ask(json!({"max_tokens": 30, "repeat_penalty": 1.5}));
    let newer = ask(json!({"max_tokens": 30, "repetition_penalty": 1.5}));
    assert_eq!(content(&older, 0), content(&newer, 0));
    assert!(content(&older, 0) != full);
    let penalized = ask(json!({"max_tokens": 30, "frequency_penalty": 2, "presence_penalty": 2}));
    assert!(content(&penalized, 0) != full);
}

#[test]
fn log_probabilities_are_told_of_every_token() {
    let server = Running::start();
    let asked = with(chat("Hello!"), json!({"logprobs": true, "top_logprobs": 3}));
    let whole = server.json("/v1/chat/completions", &asked);
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    let joined: String = content
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(
        joined.trim_start(),
        whole["choices"][0]["message"]["content"].as_str().unwrap()
    );
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy: the token is the best one.
        assert_eq!(
            (&top[0]["token"], &top[0]["logprob"]),
            (&token["token"], &token["logprob"])
        );
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&bytes),
            token["token"].as_str().unwrap()
        );
    }
    let streamed = server.events(
        "/v1/chat/completions",
        &with(asked, json!({"stream": true})),
    );
    let streamed: Vec<Value> = streamed
        .iter()
        .filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .map(|t| t["token"].clone())
        .collect();
    let whole: Vec<Value> = content.iter().map(|t| t["token"].clone()).collect();
    assert_eq!(streamed, whole);
}

#[test]
fn completions_go_on_from_text_and_from_tokens() {
    let server = Running::start();
    let text = "Once upon a time";
    let ask = |prompt: Value, more: Value| {
        let body = json!({"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8});
        server.json("/v1/completions", &with(body, more))
    };
    let by_text = ask(text.into(), json!({"logprobs": 2}));
    let tokens = server.json("/tokenize", &json!({"model": "demo", "prompt": text}));
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    let by_tokens = ask(tokens["tokens"].clone(), json!({}));
    assert_eq!(
        by_text["choices"][0]["text"],
        by_tokens["choices"][0]["text"]
    );
    let logprobs = &by_text["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 8);
    assert_eq!(logprobs["text_offset"][0], 0);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    let back = server.json("/detokenize", &json!({"tokens": tokens["tokens"]}));
    assert_eq!(back["prompt"], text);
    let list = ask(json!([text]), json!({}));
    assert_eq!(list["choices"][0]["text"], by_text["choices"][0]["text"]);
    let body = json!({"prompt": text, "temperature": 0, "max_tokens": 8, "stream": true});
    let events = server.events("/v1/completions", &body);
    let streamed: String = events
        .iter()
        .filter_map(|e| e["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(streamed, by_text["choices"][0]["text"].as_str().unwrap());
}

#[test]
fn a_conversation_finds_its_earlier_turns() {
    let server = Running::start();
    let mut messages =
        vec![json!({"role": "user", "content": "Tell me about the film The Silent River (1931)."})];
    let mut tokens = 0;
    for turn in 0..3 {
        let body = json!({
            "messages": messages, "temperature": 0, "max_tokens": 24,
            "chat_template_kwargs": {"enable_thinking": false},
        });
        let answer = server.json("/v1/chat/completions", &body);
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap();
        if turn > 0 {
            // The template drops the empty thinking of earlier turns: everything before is the same.
            assert!(cached >= tokens - 8, "turn {turn}: {cached} of {tokens}");
        }
        tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(json!({"role": "user", "content": "And then?"}));
    }
}

#[test]
fn what_is_wrong_is_named() {
    let server = Running::start();
    let refused = |body: Value| {
        let response = server.post("/v1/chat/completions", &body);
        assert_eq!(response.status, 400, "{body}: {}", response.body);
        response.error()
    };
    for (more, param) in [
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "wizard", "content": "x"}]}),
            "messages[0].role",
        ),
        (
            json!({"messages": [{"role": "user", "content": 3}]}),
            "messages[0].content",
        ),
        (json!({"temperature": 5}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"n": 1000}), "n"),
        (json!({"top_p": -0.5}), "top_p"),
        (json!({"stop": vec!["a"; 65]}), "stop"),
        (json!({"stop": [""]}), "stop"),
        (json!({"max_tokens": -2}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        (json!({"logit_bias": {"99999999": 1}}), "logit_bias"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}),
            "response_format.json_schema.schema",
        ),
    ] {
        assert_eq!(refused(with(chat("x"), more.clone())).0, param, "{more}");
    }
    for (more, param) in [
        (json!({"audio": {"voice": "x"}}), "audio"),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template"),
        (
            json!({"chat_template_kwargs": {"x": 1}}),
            "chat_template_kwargs.x",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}),
            "messages[0].content[0].image_url.url",
        ),
    ] {
        let (found, code, _) = refused(with(chat("x"), more.clone()));
        assert_eq!(
            (found.as_str(), code.as_str()),
            (param, "unsupported_parameter"),
            "{more}"
        );
    }
    let (_, code, message) = refused(chat(&"long ".repeat(3000)));
    assert_eq!(code, "context_length_exceeded");
    assert!(message.contains("1024"), "{message}");
    let response = server.post(
        "/v1/chat/completions",
        &with(chat("x"), json!({"model": "gpt-9"})),
    );
    assert_eq!(response.status, 404);
    assert_eq!(response.error().1, "model_not_found");
    let response = server.post("/v1/completions", &json!({"prompt": "x", "suffix": "y"}));
    assert_eq!(response.error().0, "suffix");
    let response = server.post("/v1/embeddings", &json!({"input": "x"}));
    let (_, code, message) = response.error();
    assert_eq!((response.status, code.as_str()), (400, "no_embeddings"));
    assert!(message.contains("embedding model"), "{message}");
}

#[test]
fn models_health_and_metrics_are_told() {
    let server = Running::start();
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "demo");
    assert_eq!(server.get("/v1/models/demo").json()["max_model_len"], 1024);
    assert_eq!(server.get("/v1/models/other").status, 404);
    assert_eq!(server.get("/health").json()["status"], "ok");
    server.json("/v1/chat/completions", &chat("Hello!"));
    let metrics = server.get("/metrics").body;
    for line in [
        "nq_requests_finished_total{model_name=\"demo\",reason=\"length\"} 1",
        "nq_generation_tokens_total{model_name=\"demo\"} 12",
        "nq_time_to_first_token_seconds_count{model_name=\"demo\"} 1",
        "nq_inter_token_latency_seconds_count{model_name=\"demo\"} 11",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} in {metrics}");
    }
    assert_eq!(server.get("/nothing").status, 404);
    assert_eq!(server.get("/v1/chat/completions").status, 405);
}

#[test]
fn answers_conform_to_schemas_whatever_the_sampling() {
    let server = Running::start();
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["film", "book"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": false,
    });
    for seed in 0..6 {
        let asked = with(
            chat("Tell me about a film."),
            json!({
                "temperature": 2.0, "top_k": 0, "top_p": 1.0, "seed": seed, "max_tokens": 300,
                "reasoning_effort": "none",
                "response_format": {"type": "json_schema",
                    "json_schema": {"name": "x", "strict": true, "schema": schema}},
            }),
        );
        let answer = server.json("/v1/chat/completions", &asked);
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{answer}");
        let text = choice["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(
            value["name"].as_str().unwrap().chars().count() <= 12,
            "{text}"
        );
        assert!(
            (0..=120).contains(&value["age"].as_i64().unwrap()),
            "{text}"
        );
        assert!(
            ["film", "book"].contains(&value["kind"].as_str().unwrap()),
            "{text}"
        );
        assert!(value["tags"].as_array().unwrap().len() <= 2, "{text}");
        assert_eq!(value.as_object().unwrap().len(), 4, "{text}");
    }
    let asked = with(
        chat("Hello!"),
        json!({"temperature": 2.0, "top_k": 0, "reasoning_effort": "none", "response_format": {"type": "regex", "pattern": "(yes|no)[0-9]{3}"}}),
    );
    let answer = server.json("/v1/chat/completions", &asked);
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(
        text.len() <= 6 && (text.starts_with("yes") || text.starts_with("no")),
        "{text}"
    );
    let asked = with(
        chat("Hello!"),
        json!({"reasoning_effort": "none", "response_format": {"type": "lark", "grammar": "start: \"left\" | \"right\""}}),
    );
    let answer = server.json("/v1/chat/completions", &asked);
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(["left", "right"].contains(&text), "{text}");
}

#[test]
fn tools_are_called_when_they_must_be() {
    let server = Running::start();
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
            "required": ["city", "days"], "additionalProperties": false,
        }}})
    };
    let base = with(
        chat("What is the weather?"),
        json!({"tools": [tool("weather"), tool("news")], "temperature": 1, "max_tokens": 400,
               "parallel_tool_calls": false}),
    );
    for (seed, choice) in [
        (1, json!("required")),
        (2, json!({"type": "function", "function": {"name": "news"}})),
    ] {
        let asked = with(base.clone(), json!({"seed": seed, "tool_choice": choice}));
        let whole = server.json("/v1/chat/completions", &asked);
        let answer = &whole["choices"][0];
        assert_eq!(answer["finish_reason"], "tool_calls", "{whole}");
        assert!(answer["message"]["content"].is_null());
        let calls = answer["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1, "{whole}");
        let name = calls[0]["function"]["name"].as_str().unwrap();
        assert!(name == "news" || seed == 1 && name == "weather");
        let text = calls[0]["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(text).unwrap();
        assert!(["Paris", "Oslo"].contains(&arguments["city"].as_str().unwrap()));

        let events = server.events(
            "/v1/chat/completions",
            &with(asked, json!({"stream": true})),
        );
        let deltas: Vec<&Value> = events
            .iter()
            .filter_map(|e| e["choices"][0]["delta"]["tool_calls"].get(0))
            .collect();
        assert_eq!(deltas[0]["function"]["name"], name);
        assert_eq!(deltas[0]["type"], "function");
        assert!(deltas[0]["id"].as_str().unwrap().starts_with("call_"));
        let streamed: String = deltas
            .iter()
            .map(|d| d["function"]["arguments"].as_str().unwrap())
            .collect();
        assert_eq!(streamed, text);
        assert!(deltas.len() > 2, "fragments: {deltas:?}");
        assert!(deltas[1..].iter().all(|d| d.get("id").is_none()));

        // Sends the result back.
        let mut messages = base["messages"].as_array().unwrap().clone();
        messages.push(answer["message"].clone());
        messages.push(json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"}));
        let asked = with(
            base.clone(),
            json!({"messages": messages, "tool_choice": "none", "max_tokens": 8}),
        );
        let next = server.json("/v1/chat/completions", &asked);
        assert!(next["choices"][0]["message"]["tool_calls"].is_null());
    }
}

/// A model without a chat template continues texts, and says why it does no more.
#[test]
fn a_model_without_a_template_serves_completions() {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(common::demo()).unwrap() {
        let path = entry.unwrap().path();
        let to = folder.path().join(path.file_name().unwrap());
        if path.ends_with("tokenizer_config.json") {
            std::fs::write(to, "{}").unwrap();
        } else {
            std::fs::copy(&path, to).unwrap();
        }
    }
    let checkpoint = nq_formats::Checkpoint::open(folder.path()).unwrap();
    let options = nq_runtime::LoadOptions {
        device: nq_runtime::DeviceChoice::Cpu,
        ..nq_runtime::LoadOptions::default()
    };
    let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &()).unwrap();
    let spec = session_spec(2, 256, nq_runtime::KvType::F16, 64);
    let options = nq_serve::EngineOptions {
        parallel: 2,
        ..nq_serve::EngineOptions::default()
    };
    let model = nq_serve::ServedModel::new("plain", &checkpoint, engine, spec, options).unwrap();
    let server = Running::over(
        std::sync::Arc::new(model),
        nq_serve::Security::default(),
        nq_serve::HttpLimits::default(),
    );
    let body = json!({"prompt": "Once upon a time", "max_tokens": 4});
    assert_eq!(server.json("/v1/completions", &body)["model"], "plain");
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let (_, _, why) = server.post("/v1/chat/completions", &body).error();
    assert!(why.contains("no chat template"), "{why}");
}

/// As transformers and vLLM have them: the ids of this text in the tokenizer's form of Llama 3 are transformers'.
#[test]
fn a_begin_token_stands_before_texts_and_not_before_chats() {
    let security = Security::default();
    let server = Running::over(beginning(), security, HttpLimits::default());
    let text = "Hello world";
    let tokens = |body: Value| server.json("/tokenize", &body)["tokens"].clone();
    let (with, without) = (json!([4070, 39, 463, 78, 1000]), json!([39, 463, 78, 1000]));
    assert_eq!(tokens(json!({"prompt": text})), with);
    assert_eq!(
        tokens(json!({"prompt": text, "add_special_tokens": true})),
        with
    );
    assert_eq!(
        tokens(json!({"prompt": text, "add_special_tokens": false})),
        without
    );
    assert_eq!(tokens(json!({"content": text})), without);
    assert_eq!(tokens(json!({"content": text, "add_special": true})), with);
    let count =
        |path: &str, body: Value| server.json(path, &body)["usage"]["prompt_tokens"].clone();
    let completion = |more: Value| {
        let mut body = json!({"prompt": text, "max_tokens": 1});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        count("/v1/completions", body)
    };
    assert_eq!(completion(json!({})), 5);
    assert_eq!(completion(json!({"add_special_tokens": false})), 4);
    assert_eq!(completion(json!({"prompt": [39, 463]})), 2);
    let chat = json!({"messages": [user(text)], "max_tokens": 1});
    let plain = Running::start().json(CHAT, &chat)["usage"]["prompt_tokens"].clone();
    assert_eq!(count(CHAT, chat), plain);
}
