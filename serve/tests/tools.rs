//! Tools in the forms that clients have beside functions: `functions` of before there were tools, those of a
//! namespace, and those that take a text.

use crate::common::{CHAT, RESPONSES, Running, base, templated, user, with};
use nq_serve::{HttpLimits, Security};
use serde_json::{Value, json};

/// Shows what it gets: the model is asked for nothing, prompts are read by their tokens.
fn shown(server: &Running, path: &str, body: &Value) -> u64 {
    let answer = server.json(path, body);
    let usage = &answer["usage"];
    let tokens = usage["prompt_tokens"]
        .as_u64()
        .or(usage["input_tokens"].as_u64());
    tokens.unwrap()
}

fn city() -> Value {
    json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]})
}

#[test]
fn functions_of_before_there_were_tools_are_served() {
    let server = Running::start();
    let function = json!({"name": "weather", "description": "d", "parameters": city()});
    let older = json!({"functions": [function], "max_tokens": 200, "reasoning_effort": "none"});
    let forced = json!({"function_call": {"name": "weather"}, "temperature": 1, "seed": 1});
    let body = with(with(base(CHAT), &older), &forced);
    let answer = server.json(CHAT, &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "function_call", "{answer}");
    assert!(choice["message"].get("tool_calls").is_none(), "{answer}");
    let call = &choice["message"]["function_call"];
    assert_eq!(call["name"], "weather");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(
        matches!(arguments["city"].as_str(), Some("Paris" | "Oslo")),
        "{arguments}"
    );
    // The same, streamed.
    let (mut name, mut text, mut finish) = (String::new(), String::new(), Value::Null);
    for event in server.events(CHAT, &with(body, &json!({"stream": true}))) {
        let choice = &event["choices"][0];
        assert!(choice["delta"].get("tool_calls").is_none());
        let call = &choice["delta"]["function_call"];
        name += call["name"].as_str().unwrap_or_default();
        text += call["arguments"].as_str().unwrap_or_default();
        if choice["finish_reason"].is_string() {
            finish = choice["finish_reason"].clone();
        }
    }
    assert_eq!((name, finish), ("weather".into(), json!("function_call")));
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), arguments);
    // A call and its result go back, and the model reads them as those of tools.
    let result = json!({"role": "function", "name": "weather", "content": "rain"});
    let back = json!({"messages": [user("x"), choice["message"], result]});
    let newer = json!({"messages": [user("x"), {
        "role": "assistant", "content": null,
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }, {"role": "tool", "tool_call_id": "c", "content": "rain"}]});
    let tools =
        json!({"tools": [{"type": "function", "function": function}], "reasoning_effort": "none"});
    assert_eq!(
        shown(&server, CHAT, &with(with(base(CHAT), &older), &back)),
        shown(&server, CHAT, &with(with(base(CHAT), &tools), &newer)),
    );
    // Nothing of it is shown where none may be called.
    let none = with(with(base(CHAT), &older), &json!({"function_call": "none"}));
    let bare = with(base(CHAT), &json!({"reasoning_effort": "none"}));
    assert_eq!(shown(&server, CHAT, &none), shown(&server, CHAT, &bare));
    for (more, param) in [
        (json!({"function_call": {"name": "other"}}), "function_call"),
        (
            json!({"functions": [function, function]}),
            "functions[1].name",
        ),
        (tools, "functions"),
    ] {
        let response = server.post(CHAT, &with(with(base(CHAT), &older), &more));
        assert_eq!(
            (response.status, response.error().0.as_str()),
            (400, param),
            "{}",
            response.body
        );
    }
}

fn item(answer: &Value, kind: &str) -> Value {
    let items = answer["output"].as_array().unwrap();
    let found = items.iter().find(|i| i["type"] == kind);
    found
        .unwrap_or_else(|| panic!("no {kind} in {answer}"))
        .clone()
}

#[test]
fn tools_of_a_namespace_are_called_by_both_names() {
    let server = Running::start();
    let function =
        json!({"type": "function", "name": "weather", "description": "d", "parameters": city()});
    let group = json!({"type": "namespace", "name": "mcp__a", "description": "About.", "tools": [function]});
    let more = json!({"tools": [group], "tool_choice": "required", "parallel_tool_calls": false,
        "max_output_tokens": 200, "reasoning": {"effort": "none"}});
    let body = with(base(RESPONSES), &more);
    let answer = server.json(RESPONSES, &body);
    let call = item(&answer, "function_call");
    assert_eq!(
        (&call["namespace"], &call["name"]),
        (&json!("mcp__a"), &json!("weather")),
        "{call}"
    );
    assert!(
        serde_json::from_str::<Value>(call["arguments"].as_str().unwrap()).unwrap()["city"]
            .is_string()
    );
    let events = server.events(RESPONSES, &with(body.clone(), &json!({"stream": true})));
    let done = |kind: &str| events.iter().find(|e| e["type"] == kind).unwrap().clone();
    assert_eq!(
        done("response.output_item.added")["item"]["namespace"],
        "mcp__a"
    );
    assert_eq!(
        done("response.function_call_arguments.done")["name"],
        "weather"
    );
    assert_eq!(
        item(&done("response.completed")["response"], "function_call")["namespace"],
        "mcp__a"
    );
    // What was sent is taken back, and the model reads the name that it wrote.
    let result =
        json!({"type": "function_call_output", "call_id": call["call_id"], "output": "rain"});
    let mut whole = call.clone();
    whole["name"] = "mcp__a.weather".into();
    whole.as_object_mut().unwrap().remove("namespace");
    let with_input =
        |call: &Value| with(body.clone(), &json!({"input": [user("x"), call, result]}));
    assert_eq!(
        shown(&server, RESPONSES, &with_input(&call)),
        shown(&server, RESPONSES, &with_input(&whole)),
    );
    let named =
        json!({"tool_choice": {"type": "function", "namespace": "mcp__a", "name": "weather"}});
    item(
        &server.json(RESPONSES, &with(body.clone(), &named)),
        "function_call",
    );
    // What is in it and cannot be served is left out by name; the rest of it stays.
    let mixed = json!({"tools": [{"type": "namespace", "name": "mcp__a", "tools": [function, {"type": "web_search"}, group]}]});
    let response = server.post(RESPONSES, &with(body.clone(), &mixed));
    assert_eq!(response.status, 200, "{}", response.body);
    let left_out = response.header("x-nq-left-out");
    assert_eq!(
        left_out,
        "tools[0].tools[1] web_search, tools[0].tools[2] namespace"
    );
    let twice =
        json!({"tools": [{"type": "namespace", "name": "a", "tools": [function, function]}]});
    let response = server.post(RESPONSES, &with(body, &twice));
    assert_eq!(
        (response.status, response.error().0.as_str()),
        (400, "tools[0].tools[1].name")
    );
}

/// A template after which the model goes on with a call of a tool that takes a text.
const WRITES: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    <|im_start|>assistant\n";

#[test]
fn a_custom_tool_takes_a_text() {
    let server = Running::over(
        templated(WRITES),
        Security::default(),
        HttpLimits::default(),
    );
    let grammar = json!({"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"});
    let custom = json!({"type": "custom", "name": "note", "description": "Takes a note.", "format": grammar});
    let more = json!({"tools": [custom], "tool_choice": {"type": "custom", "name": "note"}, "max_output_tokens": 400,
        "temperature": 1, "reasoning": {"effort": "none"}});
    let body = |seed: i32| with(with(base(RESPONSES), &more), &json!({"seed": seed}));
    let response = server.post(RESPONSES, &body(1));
    assert_eq!(response.header("x-nq-left-out"), "tools[0].format grammar");
    let answer = (0..20).map(|seed| (seed, server.json(RESPONSES, &body(seed))));
    let whole = |(_, answer): &(i32, Value)| answer["status"] == "completed";
    let (seed, answer) = answer.into_iter().find(whole).unwrap();
    let call = item(&answer, "custom_tool_call");
    assert_eq!(
        (&call["name"], call["input"].is_string()),
        (&json!("note"), true),
        "{call}"
    );
    assert!(call["id"].as_str().unwrap().starts_with("ctc_") && call.get("arguments").is_none());
    let events = server.events(RESPONSES, &with(body(seed), &json!({"stream": true})));
    let text = |kind: &str, field: &str| {
        let found = events.iter().filter(|e| e["type"] == kind);
        found
            .map(|e| e[field].as_str().unwrap())
            .collect::<String>()
    };
    let input = call["input"].as_str().unwrap();
    assert_eq!(
        text("response.custom_tool_call_input.delta", "delta"),
        input
    );
    assert_eq!(text("response.custom_tool_call_input.done", "input"), input);
    assert!(
        !events
            .iter()
            .any(|e| e["type"] == "response.function_call_arguments.delta")
    );
    let result =
        json!({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"});
    let back = json!({"input": [user("x"), call, result], "tool_choice": "auto"});
    server.json(RESPONSES, &with(body(1), &back));
}
