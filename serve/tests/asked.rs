//! What clients of other servers ask for: values that mean nothing, other names of settings, tools that a protocol
//! describes, routes and forms that SDKs have.

use crate::common::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Running, base, templated, user, with};
use nq_serve::{HttpLimits, Security};
use serde_json::{Value, json};

#[test]
fn values_that_ask_for_nothing_change_nothing() {
    let server = Running::start();
    let plain = server.json(CHAT, &base(CHAT))["choices"][0]["message"].clone();
    for more in [
        json!({"min_tokens": 0}),
        json!({"stop_token_ids": []}),
        json!({"length_penalty": 1.0}),
        json!({"length_penalty": 1}),
        json!({"use_beam_search": false}),
        json!({"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}),
        json!({"grammar": ""}),
        json!({"options": {}}),
        json!({"stop": ""}),
        json!({"repetition_penalty": 0}),
        json!({"repeat_penalty": 0.0}),
        json!({"typical_p": 1.0, "tfs_z": 1, "dry_multiplier": 0, "dry_base": 1.75, "xtc_probability": 0.0}),
        json!({"model": ""}),
        json!({"thinking_token_budget": -1}),
    ] {
        let answer = server.json(CHAT, &with(base(CHAT), &more));
        assert_eq!(answer["choices"][0]["message"], plain, "{more}");
    }
    for (more, param) in [
        (json!({"min_tokens": 3}), "min_tokens"),
        (json!({"stop_token_ids": [5]}), "stop_token_ids"),
        (json!({"dry_multiplier": 0.8}), "dry_multiplier"),
        (json!({"use_beam_search": true}), "use_beam_search"),
        (
            json!({"chat_template_kwargs": {"documents": []}}),
            "chat_template_kwargs.documents",
        ),
    ] {
        let response = server.post(CHAT, &with(base(CHAT), &more));
        assert_eq!(
            (response.status, response.error().0.as_str()),
            (400, param),
            "{}",
            response.body
        );
    }
    // The best token alone, whatever the temperature.
    let best = with(
        base(CHAT),
        &json!({"top_p": 0, "temperature": 1.5, "seed": 3}),
    );
    assert_eq!(server.json(CHAT, &best)["choices"][0]["message"], plain);
}

#[test]
fn a_prompt_can_be_computed_alone() {
    let server = Running::start();
    let long = "A prompt that is long enough for pages of the cache. ".repeat(20);
    let ask = |more: Value| {
        let body = json!({"messages": [user(&long)], "max_tokens": 0, "temperature": 0});
        with(body, &more)
    };
    let warmed = server.json(MESSAGES, &ask(json!({})));
    assert_eq!(
        (&warmed["content"], &warmed["stop_reason"]),
        (&json!([]), &json!("max_tokens")),
        "{warmed}"
    );
    assert_eq!(warmed["usage"]["output_tokens"], 0);
    let tokens = warmed["usage"]["input_tokens"].as_u64().unwrap();
    let next = server.json(MESSAGES, &ask(json!({"max_tokens": 4})));
    assert_eq!(
        next["usage"]["cache_read_input_tokens"],
        tokens - 1,
        "{next}"
    );
    let events = server.events(MESSAGES, &ask(json!({"stream": true})));
    let kinds: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).collect();
    assert_eq!(kinds, ["message_start", "message_delta", "message_stop"]);
    assert_eq!(events[1]["delta"]["stop_reason"], "max_tokens");
}

/// A template that opens thinking.
const THINKER: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

#[test]
fn budgets_of_thinking_go_by_the_names_of_other_servers() {
    let thinker = templated(THINKER);
    let server = Running::over(thinker, Security::default(), HttpLimits::default());
    let thought = |more: Value| {
        let body = json!({"messages": [user("Tell me about a film.")], "max_tokens": 40, "temperature": 0,
            "ignore_eos": true});
        let answer = server.json(CHAT, &with(body, &more));
        let details = &answer["usage"]["completion_tokens_details"];
        details["reasoning_tokens"].as_u64().unwrap()
    };
    let budget = thought(json!({"thinking_budget": 2}));
    assert!(budget < 12 && thought(json!({})) == 40, "{budget}");
    for name in ["thinking_token_budget", "thinking_budget_tokens"] {
        assert_eq!(thought(json!({name: 2})), budget, "{name}");
        assert_eq!(
            thought(json!({"chat_template_kwargs": {name: 2}})),
            budget,
            "{name}"
        );
    }
}

#[test]
fn an_end_of_thinking_that_has_not_begun_is_no_text() {
    let server = Running::start();
    let end = server.json("/tokenize", &json!({"prompt": "</think>"}))["tokens"][0].clone();
    let body = json!({"messages": [user("Hello!")], "max_tokens": 3, "temperature": 0,
        "reasoning_effort": "none", "logit_bias": {end.to_string(): 100}, "logprobs": true});
    let choice = server.json(CHAT, &body)["choices"][0].clone();
    assert_eq!(choice["message"]["content"], "", "{choice}");
    assert_eq!(choice["logprobs"]["content"], json!([]), "{choice}");
    assert_eq!(choice["finish_reason"], "length");
}

#[test]
fn logprobs_join_to_the_content() {
    let server = Running::start();
    let thinker = templated(THINKER);
    let thinking = Running::over(thinker, Security::default(), HttpLimits::default());
    let function = json!({"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}}});
    let forced = json!({"tools": [function], "tool_choice": "required", "max_tokens": 100});
    for (server, more) in [
        (&server, json!({"max_tokens": 12})),
        (&thinking, json!({"thinking_budget": 3, "max_tokens": 40})),
        (&server, json!({"stop": ["e"], "max_tokens": 30})),
        (
            &server,
            json!({"messages": [user("Ärger & 日本 🎉")], "max_tokens": 30}),
        ),
        (&server, forced),
    ] {
        let body = with(
            base(CHAT),
            &json!({"logprobs": true, "reasoning_effort": "none"}),
        );
        let body = with(body, &more);
        let choice = server.json(CHAT, &body)["choices"][0].clone();
        let content = choice["message"]["content"].as_str().unwrap_or_default();
        let joined = |tokens: &[Value]| {
            let bytes = tokens.iter().flat_map(|t| t["bytes"].as_array().unwrap());
            let bytes: Vec<u8> = bytes.map(|b| b.as_u64().unwrap() as u8).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let text = joined(tokens);
        let stopped = choice["stop_reason"].is_string();
        assert!(
            text == content || stopped && text.starts_with(content),
            "{more} {choice}"
        );
        let mut streamed = Vec::new();
        for event in server.events(CHAT, &with(body, &json!({"stream": true}))) {
            let choice = &event["choices"][0];
            let told = choice["logprobs"]["content"].as_array();
            assert!(
                told.is_none() || choice["delta"]["content"].is_string(),
                "{event}"
            );
            streamed.extend(told.into_iter().flatten().cloned());
        }
        assert_eq!(joined(&streamed), text, "{more}");
    }
}

#[test]
fn responses_have_the_routes_of_sdks() {
    let server = Running::start();
    let quiet = json!({"max_output_tokens": 30, "reasoning": {"effort": "none"}});
    let answer = server.json(RESPONSES, &with(base(RESPONSES), &quiet));
    let at = format!("{RESPONSES}/{}", answer["id"].as_str().unwrap());
    let goes_on = json!({"previous_response_id": answer["id"], "input": [user("And now?")]});
    let next = server.json(RESPONSES, &with(base(RESPONSES), &goes_on));
    let items = server.get(&format!("{at}/input_items")).json();
    assert_eq!(
        (&items["object"], &items["has_more"]),
        (&json!("list"), &json!(false))
    );
    let item = &items["data"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["content"]),
        (
            &json!("message"),
            &json!("user"),
            &json!([{"type": "input_text", "text": "Hello!"}])
        )
    );
    assert_eq!(
        (&items["first_id"], &items["last_id"]),
        (&item["id"], &item["id"])
    );
    let next_at = format!("{RESPONSES}/{}", next["id"].as_str().unwrap());
    let all = server
        .get(&format!("{next_at}/input_items?order=asc&limit=2"))
        .json();
    assert_eq!(all["data"].as_array().unwrap().len(), 2);
    assert_eq!(
        (&all["data"][1]["role"], &all["has_more"]),
        (&json!("assistant"), &json!(true))
    );
    let behind = format!(
        "{next_at}/input_items?order=asc&after={}",
        all["last_id"].as_str().unwrap()
    );
    assert_eq!(
        server.get(&behind).json()["data"][0]["content"][0]["text"],
        "And now?"
    );

    let counted = server.json(
        &format!("{RESPONSES}/input_tokens"),
        &json!({"input": "Hello!", "reasoning": {"effort": "none"}}),
    );
    assert_eq!(
        (&counted["object"], &counted["input_tokens"]),
        (
            &json!("response.input_tokens"),
            &answer["usage"]["input_tokens"]
        )
    );
    for (method, path, status, words) in [
        ("POST", format!("{at}/cancel"), 400, "synchronous"),
        (
            "POST",
            format!("{RESPONSES}/resp_none/cancel"),
            404,
            "not found",
        ),
        (
            "GET",
            format!("{RESPONSES}/resp_none/input_items"),
            404,
            "not found",
        ),
        ("GET", format!("{at}/input_items?limit=0"), 400, "limit"),
        ("GET", format!("{at}?stream=true"), 400, "stream"),
        (
            "POST",
            format!("{RESPONSES}/compact"),
            400,
            "expected a text or a list",
        ),
    ] {
        let body = if method == "POST" { "{}" } else { "" };
        let response = server.send(method, &path, &[], body);
        assert_eq!(response.status, status, "{path}: {}", response.body);
        assert!(
            response.error().2.contains(words),
            "{path}: {}",
            response.body
        );
    }
}

#[test]
fn conversations_are_made_short_and_go_on() {
    let server = Running::start();
    let said = json!({"role": "assistant", "content": "A river."});
    let body = json!({"input": [user("Name a river."), said], "temperature": 0, "reasoning": {"effort": "none"}});
    let short = server.json(&format!("{RESPONSES}/compact"), &body);
    assert_eq!(short["object"], "response.compaction");
    let output = short["output"].as_array().unwrap();
    assert_eq!(
        (output.len(), &output[0]["content"], &output[1]["type"]),
        (
            2,
            &json!([{"type": "input_text", "text": "Name a river."}]),
            &json!("compaction")
        ),
        "{short}"
    );
    assert!(short["usage"]["output_tokens"].as_u64().unwrap() > 0);
    // The summary is read again; that of another server is left out.
    let goes_on = |items: Vec<Value>| {
        let input = [items, vec![user("And now?")]].concat();
        server.post(RESPONSES, &with(base(RESPONSES), &json!({"input": input})))
    };
    let tokens = |response: &crate::common::Response| {
        response.json()["usage"]["input_tokens"].as_u64().unwrap()
    };
    let (with_summary, without) = (goes_on(output.clone()), goes_on(output[..1].to_vec()));
    assert_eq!(with_summary.header("x-nq-left-out"), "");
    assert!(tokens(&with_summary) > tokens(&without) + 5);
    let other = json!({"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAAAB"});
    let response = goes_on(vec![output[0].clone(), other]);
    assert_eq!(response.header("x-nq-left-out"), "input[1] compaction");
}

#[test]
fn clients_of_anthropic_see_its_forms() {
    let server = Running::start();
    let version = [("anthropic-version", "2023-06-01")];
    let list = server.send("GET", "/v1/models", &version, "").json();
    let model = &list["data"][0];
    assert_eq!(
        (&model["type"], &model["id"], &model["display_name"]),
        (&json!("model"), &json!("demo"), &json!("demo"))
    );
    assert_eq!(model["max_input_tokens"], 1024);
    assert!(
        model["created_at"].as_str().unwrap().ends_with('Z'),
        "{model}"
    );
    assert_eq!(
        (&list["first_id"], &list["last_id"], &list["has_more"]),
        (&json!("demo"), &json!("demo"), &json!(false))
    );
    let one = server.send("GET", "/v1/models/demo", &version, "").json();
    assert_eq!(one, *model);
    assert_eq!(server.get("/v1/models").json()["object"], "list");

    for (path, body, name) in [
        (MESSAGES, base(MESSAGES), "request-id"),
        (MESSAGES, json!({}), "request-id"),
        (CHAT, base(CHAT), "x-request-id"),
        (CHAT, json!({}), "x-request-id"),
    ] {
        let response = server.post(path, &body);
        let id = response.header(name);
        assert!(
            id.starts_with("req_") && id.len() == 36,
            "{path} {body}: {id}"
        );
        if response.status == 400 && path == MESSAGES {
            assert_eq!(response.json()["request_id"], id);
        }
        assert!(server.post(path, &body).header(name) != id);
    }
    let pdf = json!([{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}]);
    let body = with(
        base(MESSAGES),
        &json!({"messages": [{"role": "user", "content": pdf}]}),
    );
    assert!(
        server
            .post(MESSAGES, &body)
            .body
            .contains("text alone, found base64"),
        "no words of the program's"
    );
}

#[test]
fn tools_that_clients_run_are_shown_and_called() {
    let server = Running::start();
    let quiet = json!({"max_tokens": 200, "temperature": 1, "seed": 1, "top_k": 40});
    for (kind, name, keys) in [
        ("bash_20250124", "bash", &["command", "restart"][..]),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            &[
                "command",
                "path",
                "file_text",
                "old_str",
                "new_str",
                "insert_line",
                "insert_text",
                "view_range",
            ],
        ),
        (
            "memory_20250818",
            "memory",
            &["command", "path", "old_path", "new_path"],
        ),
        (
            "computer_20250124",
            "computer",
            &["action", "coordinate", "text"],
        ),
    ] {
        let tool =
            json!({"type": kind, "name": name, "display_width_px": 800, "display_height_px": 600});
        let body = with(
            with(base(MESSAGES), &quiet),
            &json!({
                "tools": [tool], "tool_choice": {"type": "tool", "name": name},
            }),
        );
        let response = server.post(MESSAGES, &body);
        assert_eq!(
            (response.status, response.header("x-nq-left-out")),
            (200, ""),
            "{kind}: {}",
            response.body
        );
        let call = response.json()["content"][0].clone();
        assert_eq!(
            (&call["type"], &call["name"]),
            (&json!("tool_use"), &json!(name))
        );
        // What is shown has the published parameters: a function with them costs as many tokens.
        let free = with(body, &json!({"tool_choice": {"type": "auto"}}));
        let shown = server.json(
            "/v1/messages/count_tokens",
            &json!({
            "messages": free["messages"], "tools": free["tools"]}),
        );
        let bare = server.json(
            "/v1/messages/count_tokens",
            &json!({"messages": free["messages"]}),
        );
        let more = shown["input_tokens"].as_u64().unwrap() - bare["input_tokens"].as_u64().unwrap();
        assert!(more > 20 * keys.len() as u64, "{kind}: {more}");
    }
    // Three of them fit the demo's context.
    let three = json!([{"type": "bash_20250124", "name": "bash"}, {"type": "memory_20250818", "name": "memory"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]);
    let answer = server.json(MESSAGES, &with(base(MESSAGES), &json!({"tools": three})));
    let prompt = answer["usage"]["input_tokens"].as_u64().unwrap();
    assert!(prompt < 1000, "{answer}");
    let hosted = json!([{"type": "shell", "environment": {"type": "container_auto"}}]);
    let response = server.post(RESPONSES, &with(base(RESPONSES), &json!({"tools": hosted})));
    assert_eq!(response.header("x-nq-left-out"), "tools[0] shell");
    for (tool, kind, part) in [
        (
            json!({"type": "local_shell"}),
            "local_shell_call",
            "/action/command",
        ),
        (
            json!({"type": "shell", "environment": {"type": "local"}}),
            "shell_call",
            "/action/commands",
        ),
        (
            json!({"type": "apply_patch"}),
            "apply_patch_call",
            "/operation/path",
        ),
    ] {
        let name = tool["type"].clone();
        let more = json!({"tools": [tool], "tool_choice": {"type": name}, "max_output_tokens": 300,
            "temperature": 1, "seed": 1, "top_k": 40, "reasoning": {"effort": "none"}});
        let body = with(base(RESPONSES), &more);
        let answer = server.json(RESPONSES, &body);
        let item = &answer["output"][0];
        assert_eq!(item["type"], kind, "{answer}");
        assert!(
            item.pointer(part).is_some() && item["call_id"].is_string(),
            "{item}"
        );
        // Streamed, it is the same.
        let events = server.events(RESPONSES, &with(body.clone(), &json!({"stream": true})));
        let done = events
            .iter()
            .find(|e| e["type"] == "response.output_item.done")
            .unwrap();
        assert_eq!(done["item"].pointer(part), item.pointer(part));
        // It goes back with its result.
        let output = match kind {
            "shell_call" => {
                json!([{"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}}])
            }
            _ => json!("a\nb\nexit code 1"),
        };
        let result = json!({"type": format!("{kind}_output"), "call_id": item["call_id"], "output": output,
            "status": "completed"});
        let back = json!({"input": [user("x"), item, result], "tool_choice": "auto"});
        let count = server.json(
            &format!("{RESPONSES}/input_tokens"),
            &with(body.clone(), &back),
        );
        let plain = json!({"type": "function_call_output", "call_id": item["call_id"], "output": "a\nb\nexit code 1"});
        let back = json!({"input": [user("x"), item, plain], "tool_choice": "auto"});
        let same = server.json(&format!("{RESPONSES}/input_tokens"), &with(body, &back));
        assert_eq!(count, same, "{kind}");
    }
}

#[test]
fn schemas_of_generators_are_held_or_refused_by_name() {
    let server = Running::start();
    let ask = |schema: Value, seed: u64| {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let more = json!({"response_format": format, "max_tokens": 120, "temperature": 1, "seed": seed,
            "reasoning_effort": "none"});
        server.post(CHAT, &with(base(CHAT), &more))
    };
    let value = |schema: &Value, seed| -> Value {
        let response = ask(schema.clone(), seed);
        assert_eq!(response.status, 200, "{schema}: {}", response.body);
        let content = response.json()["choices"][0]["message"]["content"].clone();
        serde_json::from_str(content.as_str().unwrap()).unwrap_or_else(|e| panic!("{e}: {content}"))
    };
    let digit = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let matched = json!({"type": "object", "properties": {"score": digit, "tag": {"type": "boolean"}},
        "required": ["score", "tag"], "additionalProperties": false,
        "patternProperties": {"^score$": {"type": "integer"}}});
    for seed in 0..4 {
        let found = value(&matched, seed);
        assert!(
            found["score"].as_u64().unwrap() < 10 && found["tag"].is_boolean(),
            "{found}"
        );
        assert_eq!(found.as_object().unwrap().len(), 2);
    }
    for name in ["Page[Item]", "Partial<Item>", "My Item", "100%"] {
        for to in [
            name.to_owned(),
            name.replace('[', "%5B")
                .replace(']', "%5D")
                .replace(' ', "%20"),
        ] {
            let generic = json!({"$defs": {name: {"enum": ["q"]}}, "type": "object",
                "properties": {"a": {"$ref": format!("#/$defs/{to}")}}, "required": ["a"]});
            assert_eq!(value(&generic, 1), json!({"a": "q"}), "{to}");
        }
    }
    let names = json!({"type": "object", "propertyNames": {"pattern": "^[ab]$"},
        "additionalProperties": {"type": "boolean"}});
    let of_number = |multiple: f64| json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 100000, "multipleOf": multiple}}});
    let text = |pattern: &str| json!({"type": "object", "properties": {"t": {"type": "string", "pattern": pattern}}});
    for (schema, keyword) in [
        (
            with(
                names.clone(),
                &json!({"minProperties": 2, "maxProperties": 2}),
            ),
            "minProperties",
        ),
        (of_number(65536.0), "multipleOf"),
        (of_number(0.00001234), "multipleOf"),
        (text("a(?=b)"), "pattern"),
        (text("a(?!b)"), "pattern"),
        (text("a(?P<stop>b)"), "pattern"),
    ] {
        let response = ask(schema.clone(), 1);
        assert_eq!(response.status, 400, "{schema}: {}", response.body);
        let (param, _, message) = response.error();
        assert_eq!(param, "response_format.json_schema.schema");
        assert!(message.contains(keyword), "{message}");
    }
    assert!(
        value(
            &with(names, &json!({"minProperties": 1, "maxProperties": 2})),
            1
        )
        .is_object()
    );
    assert!(value(&of_number(1000.0), 1).is_object() && value(&of_number(0.25), 1).is_object());
}

#[test]
fn limits_of_prompts_are_those_that_are_told() {
    let server = Running::start();
    let description = server.get("/openapi.json").json();
    let schema = &description["paths"][COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]
        ["schema"];
    let prompts = schema["properties"]["prompt"]["oneOf"].as_array().unwrap();
    assert_eq!(prompts[2]["maxItems"], 128);
    assert_eq!(prompts[1]["items"]["maximum"], u32::MAX);
    let body = |n: usize| json!({"prompt": vec!["x"; n], "max_tokens": 1, "temperature": 0});
    let answers = server.json(COMPLETIONS, &body(128));
    assert_eq!(answers["choices"].as_array().unwrap().len(), 128);
    assert_eq!(server.post(COMPLETIONS, &body(129)).error().0, "prompt");
}
