//! Anthropic's protocol and OpenAI's Responses over the demo model.

use crate::common::{self, Running};
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};

/// Names and data of a stream's events.
fn named(server: &Running, path: &str, body: &Value) -> Vec<(String, Value)> {
    let response = server.post(path, body);
    assert_eq!(response.status, 200, "{}", response.body);
    let mut events = Vec::new();
    for event in response.body.split("\n\n").filter(|e| !e.is_empty()) {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        assert_eq!(data["type"], name);
        events.push((name.to_owned(), data));
    }
    events
}

fn tool() -> Value {
    json!({
        "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"], "additionalProperties": false,
    })
}

#[test]
fn messages_are_answered_whole_and_as_a_stream_alike() {
    let server = Running::start();
    let mut body = json!({
        "model": "demo", "max_tokens": 400, "temperature": 0,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
    });
    let whole = server.json("/v1/messages", &body);
    assert_eq!(
        (&whole["type"], &whole["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(whole["stop_reason"], "end_turn");
    let text = whole["content"][0]["text"].as_str().unwrap();
    let prompt = whole["usage"]["input_tokens"].as_u64().unwrap();
    let counted = json!({"model": "demo", "system": body["system"], "messages": body["messages"]});
    let counted = server.json("/v1/messages/count_tokens", &counted);
    assert_eq!(counted["input_tokens"], prompt);

    body["stream"] = true.into();
    let events = named(&server, "/v1/messages", &body);
    let names: Vec<&str> = events.iter().map(|e| e.0.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    let end = ["content_block_stop", "message_delta", "message_stop"];
    assert_eq!(names[names.len() - 3..], end);
    assert!(
        names[2..names.len() - 3]
            .iter()
            .all(|n| *n == "content_block_delta")
    );
    let deltas = events.iter().filter_map(|e| e.1["delta"]["text"].as_str());
    assert_eq!(deltas.collect::<String>(), text);
    let usage = &events[0].1["message"]["usage"];
    assert_eq!(usage["cache_read_input_tokens"], prompt - 1);
    assert_eq!(usage["input_tokens"], 1);

    body["stream"] = false.into();
    body["stop_sequences"] = json!([&text[3..6]]);
    let stopped = server.json("/v1/messages", &body);
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], &text[3..6]);
    assert_eq!(stopped["content"][0]["text"], &text[..3]);
}

#[test]
fn messages_call_tools_and_take_their_results() {
    let server = Running::start();
    let mut body = json!({
        "model": "demo", "max_tokens": 300, "temperature": 1, "top_k": 50,
        "thinking": {"type": "disabled"},
        "tools": [{"name": "weather", "description": "w", "input_schema": tool()}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "messages": [{"role": "user", "content": "Weather?"}],
    });
    let whole = server.json("/v1/messages", &body);
    assert_eq!(whole["stop_reason"], "tool_use");
    let call = &whole["content"][0];
    assert_eq!(
        (&call["type"], &call["name"]),
        (&json!("tool_use"), &json!("weather"))
    );
    assert!(["Paris", "Oslo"].contains(&call["input"]["city"].as_str().unwrap()));
    body["stream"] = true.into();
    let events = named(&server, "/v1/messages", &body);
    let deltas = events
        .iter()
        .filter_map(|e| e.1["delta"]["partial_json"].as_str());
    let input: Value = serde_json::from_str(&deltas.collect::<String>()).unwrap();
    assert!(["Paris", "Oslo"].contains(&input["city"].as_str().unwrap()));
    body["stream"] = false.into();
    body["tool_choice"] = json!({"type": "none"});
    let results = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"},
            {"type": "text", "text": "And now?"},
        ]},
    ]);
    body["messages"] = results;
    assert_eq!(server.json("/v1/messages", &body)["role"], "assistant");
}

#[test]
fn errors_of_messages_are_in_their_shape() {
    let server = Running::start();
    let refused = |body: Value| {
        let response = server.post("/v1/messages", &body);
        let json = response.json();
        assert_eq!(json["type"], "error");
        (
            response.status,
            json["error"]["type"].as_str().unwrap().to_owned(),
        )
    };
    let hello = json!([{"role": "user", "content": "Hello!"}]);
    let invalid = (400, "invalid_request_error".to_owned());
    assert_eq!(refused(json!({"messages": hello})), invalid);
    assert_eq!(refused(json!({"messages": [], "max_tokens": 3})), invalid);
    assert_eq!(
        refused(json!({"messages": hello, "max_tokens": 3, "mcp_servers": [{}]})),
        invalid
    );
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    assert_eq!(
        refused(json!({"messages": image, "max_tokens": 3})),
        invalid
    );
    let none = refused(json!({"model": "x", "messages": hello, "max_tokens": 3}));
    assert_eq!(none, (404, "not_found_error".into()));
}

#[test]
fn responses_are_answered_whole_and_as_a_stream_alike() {
    let server = Running::start();
    let mut body = json!({
        "model": "demo", "input": "Hello!", "instructions": "Be brief.", "temperature": 0,
        "store": false, "max_output_tokens": 300,
    });
    let whole = server.json("/v1/responses", &body);
    assert_eq!(
        (&whole["object"], &whole["status"]),
        (&json!("response"), &json!("completed"))
    );
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    body["input"] =
        json!([{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}]);
    body["stream"] = true.into();
    let events = named(&server, "/v1/responses", &body);
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event.1["sequence_number"], i);
    }
    let names: Vec<&str> = events.iter().map(|e| e.0.as_str()).collect();
    assert_eq!(
        names[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(
        names[names.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    let deltas = events.iter().filter_map(|e| e.1["delta"].as_str());
    assert_eq!(deltas.collect::<String>(), text);
    let last = &events.last().unwrap().1["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], text);
    let usage = &last["usage"];
    assert_eq!(usage["output_tokens"], whole["usage"]["output_tokens"]);
    let cached = usage["input_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert_eq!(cached + 1, usage["input_tokens"].as_u64().unwrap());

    body["max_output_tokens"] = 5.into();
    let events = named(&server, "/v1/responses", &body);
    assert_eq!(events.last().unwrap().0, "response.incomplete");
    for (field, value, status) in [
        ("previous_response_id", json!("resp_1"), 400),
        ("input", json!([{"type": "item_reference", "id": "x"}]), 404),
    ] {
        let mut wrong = body.clone();
        wrong[field] = value;
        let response = server.post("/v1/responses", &wrong);
        assert_eq!(response.status, status, "{field}");
        assert!(
            response.error().2.contains("not found"),
            "{}",
            response.body
        );
    }
}

#[test]
fn responses_call_tools_and_hold_to_schemas() {
    let server = Running::start();
    let mut body = json!({
        "model": "demo", "input": "Weather?", "temperature": 1, "max_output_tokens": 300,
        "reasoning": {"effort": "none"},
        "tools": [{"type": "function", "name": "weather", "parameters": tool(), "strict": true}],
        "tool_choice": {"type": "function", "name": "weather"},
    });
    let whole = server.json("/v1/responses", &body);
    let call = whole["output"][0].clone();
    assert_eq!(
        (&call["type"], &call["name"]),
        (&json!("function_call"), &json!("weather"))
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(["Paris", "Oslo"].contains(&arguments["city"].as_str().unwrap()));
    body["stream"] = true.into();
    let events = named(&server, "/v1/responses", &body);
    let done = events
        .iter()
        .find(|e| e.0 == "response.function_call_arguments.done")
        .unwrap();
    let deltas = events
        .iter()
        .filter(|e| e.0 == "response.function_call_arguments.delta");
    let joined: String = deltas.map(|e| e.1["delta"].as_str().unwrap()).collect();
    assert_eq!(done.1["arguments"], joined);
    body["stream"] = false.into();
    body["tool_choice"] = "none".into();
    body["input"] = json!([
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"},
    ]);
    body["text"] = json!({"format": {"type": "json_schema", "name": "x", "schema": tool()}});
    let whole = server.json("/v1/responses", &body);
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(["Paris", "Oslo"].contains(&value["city"].as_str().unwrap()));
}

/// Each path in the description is served, and each field of a request is accepted as described.
#[test]
fn the_description_is_that_of_the_server() {
    let demo = common::model(None, EngineOptions::default());
    let others = [common::embedder, common::reranker].map(|f| f(EngineOptions::default()));
    let models: Vec<_> = std::iter::once(demo.clone()).chain(others).collect();
    let (security, limits) = (Security::default(), HttpLimits::default());
    let server = Running::all(models.into(), demo, security, limits);
    let document = server.get("/openapi.json").json();
    let mut fields = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path.replace("{name}", "demo");
        if path.contains("{id}") {
            continue;
        }
        if methods.get("get").is_some() {
            assert_eq!(server.get(&path).status, 200, "{path}");
        }
        let Some(post) = methods.get("post") else {
            continue;
        };
        let schema = &post["requestBody"]["content"]["application/json"]["schema"];
        let properties = schema["properties"].as_object().unwrap();
        let example = |name: &str| match (name, path.as_str()) {
            ("model", "/v1/embeddings" | "/api/embed") => "embedder".into(),
            ("model", "/v1/rerank") => "reranker".into(),
            _ => properties[name]["example"].clone(),
        };
        let required = schema["required"].as_array().into_iter().flatten();
        let required: Vec<&str> = required.map(|r| r.as_str().unwrap()).collect();
        let mut base = json!({"model": example("model")});
        for name in &required {
            base[*name] = example(name);
            let mut without = base.clone();
            without[*name] = Value::Null;
            assert_eq!(
                server.post(&path, &without).status,
                400,
                "{path} without {name}"
            );
        }
        for limit in ["max_tokens", "max_output_tokens"] {
            if properties.contains_key(limit) {
                base[limit] = 2.into();
            }
        }
        for name in properties.keys() {
            let mut body = base.clone();
            body[name] = example(name);
            if name == "top_logprobs" {
                body["logprobs"] = true.into();
            }
            let response = server.post(&path, &body);
            assert_eq!(
                response.status, 200,
                "{path} with {name}: {}",
                response.body
            );
            fields += 1;
        }
        base["nonsense"] = 1.into();
        assert_eq!(server.post(&path, &base).status, 200, "{path}");
    }
    assert!(fields > 60, "{fields}");
}
