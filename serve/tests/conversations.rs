//! What nq has answered, it accepts: unchanged, by reference, or as the beginning of the next answer.

use crate::common::{CHAT, MESSAGES, RESPONSES, Running, user, with};
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};

fn city() -> Value {
    json!({
        "type": "object", "properties": {"city": {"type": "string", "minLength": 40}},
        "required": ["city"], "additionalProperties": false,
    })
}

/// A call that the length limit cuts off is an answer that the next request may have.
#[test]
fn cut_off_calls_are_accepted_as_they_were_sent() {
    let server = Running::start();
    let cut = |more: Value| with(json!({"temperature": 0, "max_tokens": 40}), &more);
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": city()}});
    let asked = cut(json!({
        "messages": [user("Hello!")], "tools": [tool], "tool_choice": "required", "enable_thinking": false,
    }));
    let whole = server.json(CHAT, &asked);
    let message = &whole["choices"][0]["message"];
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    let id = &message["tool_calls"][0]["id"];
    let result = json!({"role": "tool", "tool_call_id": id, "content": "invalid arguments"});
    let next = cut(json!({"messages": [user("Hello!"), message, result], "tools": [tool]}));
    assert_eq!(server.post(CHAT, &next).status, 200);
    for arguments in ["null", "[1]", "\"x\"", "{\"value\": ", "", "no JSON"] {
        let call = json!({"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}});
        let made = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        let next = cut(
            json!({"messages": [user("x"), made, {"role": "tool", "tool_call_id": "c", "content": "y"}]}),
        );
        assert_eq!(server.post(CHAT, &next).status, 200, "{arguments}");
    }

    let function = json!({"type": "function", "name": "weather", "parameters": city()});
    let mut asked = json!({
        "input": "Hello!", "max_output_tokens": 40, "temperature": 0, "reasoning": {"effort": "none"},
        "tools": [function], "tool_choice": "required",
    });
    let whole = server.json(RESPONSES, &asked);
    assert_eq!(whole["status"], "incomplete");
    let item = &whole["output"][0];
    assert_eq!(
        (&item["type"], &item["status"]),
        (&json!("function_call"), &json!("incomplete"))
    );
    let output =
        json!({"type": "function_call_output", "call_id": item["call_id"], "output": "invalid"});
    let next = json!({"input": [user("Hello!"), item, output], "max_output_tokens": 4});
    assert_eq!(server.post(RESPONSES, &next).status, 200);
    asked["stream"] = true.into();
    let events = server.events(RESPONSES, &asked);
    let done = events
        .iter()
        .find(|e| e["type"] == "response.output_item.done")
        .unwrap();
    assert_eq!(done["item"]["status"], "incomplete");
    let told = json!({"input": "Tell me about a film.", "max_output_tokens": 8, "temperature": 0});
    let told = server.json(RESPONSES, &told);
    assert_eq!(told["output"][0]["status"], "incomplete");

    let asked = cut(json!({
        "messages": [user("Hello!")], "thinking": {"type": "disabled"}, "tool_choice": {"type": "any"},
        "tools": [{"name": "weather", "input_schema": city()}],
    }));
    let whole = server.json(MESSAGES, &asked);
    assert_eq!(
        (&whole["content"][0]["input"], &whole["stop_reason"]),
        (&json!({}), &json!("max_tokens"))
    );
    for input in [
        json!(null),
        json!("{\"city\""),
        json!([1]),
        whole["content"][0]["input"].clone(),
    ] {
        let mut block = whole["content"][0].clone();
        block["input"] = input;
        let result = json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "x"}]});
        let turns = json!([user("Hello!"), {"role": "assistant", "content": [block]}, result]);
        assert_eq!(
            server
                .post(MESSAGES, &cut(json!({"messages": turns})))
                .status,
            200
        );
    }
}

#[test]
fn responses_are_kept_for_their_client() {
    const KEYS: [&str; 2] = ["0123456789abcdef", "fedcba9876543210"];
    let keys = KEYS.map(str::to_owned);
    let security = Security::new(&keys, &[], &[]).unwrap();
    let server = Running::with(EngineOptions::default(), security, HttpLimits::default());
    let send = |key: usize, method: &str, path: &str, body: &str| {
        let bearer = format!("Bearer {}", KEYS[key]);
        server.send(method, path, &[("authorization", &bearer)], body)
    };
    let ask = |key, body: Value| send(key, "POST", RESPONSES, &body.to_string());
    let short = |input: Value, more: Value| {
        with(
            json!({"input": input, "max_output_tokens": 6, "temperature": 0}),
            &more,
        )
    };
    let first = ask(0, short(json!("My name is Ada."), json!({}))).json();
    assert_eq!(first["store"], true);
    let id = first["id"].as_str().unwrap();
    let item = &first["output"][0]["id"];
    let whole = json!([
        user("My name is Ada."),
        first["output"][0],
        user("Who am I?")
    ]);
    let whole = ask(0, short(whole, json!({"store": false}))).json();
    let goes_on = short(json!("Who am I?"), json!({"previous_response_id": id}));
    let referring =
        json!([user("My name is Ada."), {"type": "item_reference", "id": item}, user("Who am I?")]);
    let referring = short(referring, json!({}));
    for body in [&goes_on, &referring] {
        let next = ask(0, body.clone());
        assert_eq!(next.status, 200, "{}", next.body);
        let next = next.json();
        assert_eq!(
            next["usage"]["input_tokens"],
            whole["usage"]["input_tokens"]
        );
        assert_eq!(next["output"][0]["content"], whole["output"][0]["content"]);
        assert_eq!(
            next["previous_response_id"],
            body.get("previous_response_id")
                .cloned()
                .unwrap_or_default()
        );
    }
    // A third turn, on the second.
    let second = ask(0, goes_on.clone()).json();
    let third = ask(
        0,
        short(
            json!("So?"),
            json!({"previous_response_id": second["id"], "stream": true}),
        ),
    );
    assert!(
        third.body.contains("response.completed") || third.body.contains("response.incomplete")
    );
    let path = format!("{RESPONSES}/{id}");
    assert_eq!(send(0, "GET", &path, "").json(), first);
    // Nobody else has them, and what is not to be kept is not.
    assert_eq!(
        ask(1, goes_on.clone()).error().1,
        "previous_response_not_found"
    );
    assert_eq!(ask(1, referring).status, 404);
    assert_eq!(send(1, "GET", &path, "").status, 404);
    assert_eq!(send(1, "DELETE", &path, "").status, 404);
    let unkept = short(json!("x"), json!({"previous_response_id": whole["id"]}));
    assert_eq!(ask(0, unkept).status, 400);
    assert_eq!(send(0, "DELETE", &path, "").json()["deleted"], true);
    assert_eq!(send(0, "GET", &path, "").status, 404);
    assert_eq!(ask(0, goes_on).status, 400);
}

#[test]
fn an_answer_goes_on_with_what_it_begins_with() {
    let server = Running::start();
    let asked = user("Tell me about a film.");
    let plain = json!({"temperature": 0, "max_tokens": 16, "enable_thinking": false});
    let body = with(plain.clone(), &json!({"messages": [asked]}));
    let whole = server.json(MESSAGES, &body)["content"][0]["text"]
        .as_str()
        .unwrap()
        .to_owned();
    let tokens: Vec<u32> = serde_json::from_value(
        server.json("/tokenize", &json!({"prompt": whole}))["tokens"].clone(),
    )
    .unwrap();
    let first = server.json("/detokenize", &json!({"tokens": tokens[..6]}))["content"]
        .as_str()
        .unwrap()
        .to_owned();
    let rest = whole.strip_prefix(&first).unwrap();
    let begun = json!({"role": "assistant", "content": first});
    let body = with(
        plain.clone(),
        &json!({"messages": [asked, begun], "max_tokens": 10}),
    );
    let next = server.json(MESSAGES, &body);
    assert_eq!(next["content"][0]["text"], rest);
    for more in [
        json!({"messages": [asked, begun], "continue_final_message": true, "add_generation_prompt": false}),
        json!({"messages": [asked, with(begun.clone(), &json!({"prefix": true}))]}),
    ] {
        let next = server.json(
            CHAT,
            &with(with(plain.clone(), &json!({"max_tokens": 10})), &more),
        );
        assert_eq!(next["choices"][0]["message"]["content"], rest, "{more}");
    }
    // A format holds from where the answer begins.
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "schema": schema}});
    let begun = |text: &str| json!({"messages": [user("x"), {"role": "assistant", "content": text}], "output_config": format, "max_tokens": 40});
    let next = server.json(MESSAGES, &with(plain.clone(), &begun("{\"a\"")));
    let whole = format!("{{\"a\"{}", next["content"][0]["text"].as_str().unwrap());
    assert_eq!(
        serde_json::from_str::<Value>(&whole).unwrap(),
        json!({"a": "b"})
    );
    let wrong = server.post(MESSAGES, &with(plain.clone(), &begun("Sure")));
    assert_eq!(wrong.status, 400, "{}", wrong.body);
    // Without the assistant's message there is nothing to go on with.
    let wrong = json!({"messages": [user("x")], "continue_final_message": true});
    assert_eq!(
        server.post(CHAT, &with(plain, &wrong)).error().0,
        "messages"
    );
}

#[test]
fn responses_repeat_the_settings() {
    let server = Running::start();
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true}]);
    let asked = json!({
        "input": "Hello!", "max_output_tokens": 60, "temperature": 0.7, "top_p": 0.9, "metadata": {"run": "7"},
        "parallel_tool_calls": false, "reasoning": {"effort": "none"}, "tools": tools,
        "tool_choice": "required", "text": {"format": {"type": "text"}, "verbosity": "medium"}, "user": "me",
    });
    let whole = server.json(RESPONSES, &asked);
    for field in [
        "metadata",
        "parallel_tool_calls",
        "reasoning",
        "tools",
        "tool_choice",
        "text",
        "user",
        "top_p",
        "temperature",
    ] {
        assert_eq!(whole[field], asked[field], "{field}");
    }
    assert_eq!(whole["service_tier"], "default");
    assert_eq!(
        whole["usage"]["input_tokens_details"]["cache_write_tokens"],
        0
    );
    let card = server.get("/v1/models/demo").json();
    let temperature = card["default_sampling"]["temperature"].to_string();
    assert!(temperature.len() < 6, "{temperature}");
}
