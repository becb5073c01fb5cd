//! Requests of common clients, as they come: what they send by default is served, and what nq leaves out it
//! says.

use crate::common::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Running, base, user, with};
use nq_serve::protocol::reading::Rules;
use serde_json::{Value, json};

const PIXEL: &str = "data:image/png;base64,aaaa";

#[test]
fn what_clients_send_by_default_is_served() {
    let server = Running::start();
    let w = || json!({"type": "object", "properties": {}});
    let turns = |last: Value| json!({"messages": [user("x"), last]});
    let cases: Vec<(&str, Vec<Value>)> = vec![
        (
            MESSAGES,
            vec![
                turns(json!({"role": "system", "content": "Available agent types: ..."})),
                turns(
                    json!({"role": "system", "content": [{"type": "text", "text": "Be brief."}]}),
                ),
                json!({"output_config": {"effort": "high"}}),
                json!({"output_config": {"effort": "low", "task_budget": {}}}),
                json!({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
                json!({"cache_control": {"type": "ephemeral"}, "betas": ["x"], "speed": "standard"}),
                json!({"mcp_servers": [], "container": null, "diagnostics": {}, "user_id": "x"}),
                json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
                json!({"thinking": {"type": "adaptive", "display": "summarized"}}),
                json!({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"preserve_thinking": true}}),
                json!({"tools": [{
                    "name": "w", "input_schema": w(), "eager_input_streaming": true, "defer_loading": true,
                    "input_examples": [{}], "allowed_callers": ["direct"], "cache_control": {"type": "ephemeral"},
                }]}),
                json!({"tools": (0..200).map(|i| json!({"name": format!("f{i}"), "input_schema": {"type": "object"}})).collect::<Vec<_>>(), "tool_choice": {"type": "none"}}),
                json!({"tools": [{"name": "a".repeat(100), "input_schema": w()}]}),
                json!({"stop_sequences": (0..20).map(|i| format!("x{i}")).collect::<Vec<_>>()}),
                json!({"messages": [user("x"), {"role": "assistant", "content": [
                    {"type": "redacted_thinking", "data": "abc"}, {"type": "text", "text": "Hi", "citations": null},
                ]}, user("y")]}),
                json!({"messages": [user("x"), {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "t", "name": "w", "input": {}, "caller": {"type": "direct"}},
                ]}, {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t", "is_error": true, "cache_control": {"type": "ephemeral"}},
                ]}]}),
                json!({"messages": [{"role": "user", "content": [
                    {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}},
                    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "z"}]},
                ]}]}),
            ],
        ),
        (
            CHAT,
            vec![
                json!({"enable_thinking": false}),
                json!({"thinking": {"type": "disabled"}}),
                json!({"reasoning": {"effort": "low"}, "include_reasoning": true}),
                json!({"reasoning_effort": "max"}),
                json!({"reasoning_effort": "auto"}),
                json!({"reasoning_effort": "default", "thinking_budget": 100}),
                json!({"chat_template_kwargs": {"enable_thinking": false, "preserve_thinking": true}}),
                json!({"max_tokens": 4.0, "n": 1.0, "top_k": 40.0, "seed": u64::MAX}),
                json!({"max_completion_tokens": 2, "max_tokens": -1}),
                json!({"verbosity": "low", "store": true, "prediction": {}, "functions": [], "function_call": "none"}),
                json!({"tools": [], "tool_choice": {"type": "auto"}, "stream_options": {}}),
                json!({"stop": (0..20).map(|i| format!("x{i}")).collect::<Vec<_>>()}),
                json!({"response_format": {"type": "json_object", "schema": {"type": "object"}}}),
                json!({"tools": [{"type": "function", "function": {"name": "w"}}], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "w"}}]}}}),
                json!({"messages": [user("x"), {
                    "role": "assistant", "content": "Hi.", "provider_specific_fields": {"reasoning": "hm"},
                    "thinking_blocks": [], "reasoning_details": [], "id": "1", "opts": {}, "images": [],
                    "cache_control": {"type": "ephemeral"}, "refusal": null, "annotations": [],
                }, user("y")]}),
                json!({"messages": [user("x"), {"role": "assistant", "content": [
                    {"type": "refusal", "refusal": "No."}, {"type": "thinking", "thinking": "hm"},
                ]}, user("y")]}),
                json!({"messages": [user("x"), {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "x"}},
                ]}, {"role": "tool", "tool_call_id": "c", "content": {"ok": true}, "status": "success"}]}),
            ],
        ),
        (
            RESPONSES,
            vec![
                json!({"reasoning": {"effort": "xhigh", "summary": "auto", "context": "auto"}, "client_metadata": {}}),
                json!({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 0}),
                json!({"truncation": "auto", "stream_options": {}, "text": {"verbosity": "low"}}),
                json!({"background": false, "prompt": null, "conversation": null, "max_tool_calls": 3}),
                json!({"context_management": [{"type": "compaction"}], "prompt_cache_options": {}}),
                json!({"input": [user("x"), {"type": "message", "id": "m", "status": "completed", "phase": "final_answer",
                    "role": "assistant", "content": [{"type": "output_text", "text": "y", "annotations": [], "logprobs": []}]}, user("z")]}),
                json!({"input": [user("x"), {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}]}),
                json!({"input": [user("x"), {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                    {"type": "function_call_output", "call_id": "c", "output": {"content": "ok"}}]}),
                json!({"input": [user("x"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": null, "encrypted_content": null}, user("z")]}),
                json!({"tools": [{"type": "function", "name": "f", "description": null, "parameters": null, "strict": null, "defer_loading": true}]}),
            ],
        ),
        (
            COMPLETIONS,
            vec![
                json!({"service_tier": "auto", "metadata": {}, "store": false, "prompt_cache_key": "x"}),
                json!({"best_of": 1, "suffix": null, "echo": false, "logit_bias": null, "max_tokens": -1, "stop": ["e"]}),
            ],
        ),
    ];
    for (path, bodies) in cases {
        for more in bodies {
            let response = server.post(path, &with(base(path), &more));
            assert_eq!(response.status, 200, "{path} {more}: {}", response.body);
            assert_eq!(response.header("x-nq-left-out"), "", "{path} {more}");
        }
    }
    // None of it was unknown.
    assert!(
        !server
            .get("/metrics")
            .body
            .contains("nq_unknown_fields_total{")
    );
}

#[test]
fn what_is_left_out_is_said() {
    let server = Running::start();
    let function = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let responses = |tools: Value| with(base(RESPONSES), &json!({"tools": tools}));
    let plain = server.json(RESPONSES, &responses(json!([function])));
    for (tool, word) in [
        (
            json!({"type": "web_search", "external_web_access": false}),
            "web_search",
        ),
        (
            json!({"type": "file_search", "vector_store_ids": []}),
            "file_search",
        ),
        (
            json!({"type": "image_generation", "output_format": "png"}),
            "image_generation",
        ),
        (json!({"type": "tool_search"}), "tool_search"),
        (
            json!({"type": "mcp", "server_label": "x", "server_url": "http://x"}),
            "mcp",
        ),
        (json!({"type": "of_next_year"}), "of_next_year"),
    ] {
        let response = server.post(RESPONSES, &responses(json!([function, tool])));
        assert_eq!(response.status, 200, "{tool}: {}", response.body);
        assert_eq!(response.header("x-nq-left-out"), format!("tools[1] {word}"));
        let tokens = |v: &Value| v["usage"]["input_tokens"].as_u64().unwrap();
        assert!(
            tokens(&response.json()) > tokens(&plain),
            "the model is told of {word}"
        );
    }
    let metrics = server.get("/metrics").body;
    assert!(
        metrics.contains("nq_left_out_total{name=\"web_search\"} 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("nq_unknown_fields_total{name=\"tools[].type:of_next_year\"} 1"),
        "{metrics}"
    );
    assert!(metrics.ends_with("# EOF\n") && metrics.matches("# EOF").count() == 1);
    let searching = json!([{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]);
    let response = server.post(
        MESSAGES,
        &with(base(MESSAGES), &json!({"tools": searching})),
    );
    assert_eq!(
        (response.status, response.header("x-nq-left-out")),
        (200, "tools[0] web_search_20250305_web_search")
    );
    let response = server.post(CHAT, &with(base(CHAT), &json!({"web_search_options": {}})));
    assert_eq!(
        (response.status, response.header("x-nq-left-out")),
        (200, "web_search_options")
    );
    let searched = json!({"input": [user("x"), {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}}, user("y")]});
    let response = server.post(RESPONSES, &with(base(RESPONSES), &searched));
    assert_eq!(
        (response.status, response.header("x-nq-left-out")),
        (200, "input[1] web_search_call")
    );
}

#[test]
fn images_in_results_become_words_and_those_of_users_are_refused() {
    let server = Running::start();
    let call = |name: &str| json!({"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"});
    let output = |output: Value| {
        let output = json!({"type": "function_call_output", "call_id": "c", "output": output});
        with(
            base(RESPONSES),
            &json!({"input": [user("Look."), call("view_image"), output]}),
        )
    };
    let image = json!([{"type": "input_image", "image_url": PIXEL}]);
    let response = server.post(RESPONSES, &output(image.clone()));
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(
        response.header("x-nq-left-out"),
        "input[2].output[0] input_image"
    );
    let words = output(json!("[image: this model reads text alone]"));
    let tokens = |v: Value| v["usage"]["input_tokens"].clone();
    assert_eq!(
        tokens(response.json()),
        tokens(server.json(RESPONSES, &words))
    );

    let asked = json!({"input": [{"role": "user", "content": image}]});
    let response = server.post(RESPONSES, &with(base(RESPONSES), &asked));
    assert_eq!(
        (response.status, response.error().0),
        (400, "input[0].content[0]".into())
    );

    let used = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "w", "input": {}}]});
    for (block, left_out) in [
        (
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}),
            "image",
        ),
        (
            json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aaaa"}}),
            "document",
        ),
        (
            json!({"type": "tool_reference", "tool_name": "w"}),
            "tool_reference",
        ),
        (json!({"type": "of_next_year"}), "of_next_year"),
    ] {
        let result = json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, block]},
        ]});
        let body = with(
            base(MESSAGES),
            &json!({"messages": [user("x"), used, result]}),
        );
        let response = server.post(MESSAGES, &body);
        assert_eq!(response.status, 200, "{}", response.body);
        let place = format!("messages[2].content[0].content[1] {left_out}");
        assert_eq!(response.header("x-nq-left-out"), place);
    }
    let tool = json!({"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]});
    let made = json!({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "w", "arguments": "{}"}}]});
    let response = server.post(
        CHAT,
        &with(base(CHAT), &json!({"messages": [user("x"), made, tool]})),
    );
    assert_eq!(
        (response.status, response.header("x-nq-left-out")),
        (200, "messages[2].content[0] image_url")
    );
}

#[test]
fn unknown_names_are_counted_or_by_strict_rules_refused() {
    let server = Running::start();
    let body = with(
        base(CHAT),
        &json!({"nonsense": 1, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "more\"{}": 1}], "timestamps": 3},
        ]}),
    );
    assert_eq!(server.post(CHAT, &body).status, 200);
    let metrics = server.get("/metrics").body;
    for name in [
        "nonsense",
        "messages[].timestamps",
        "messages[].content[].more___",
    ] {
        assert!(
            metrics.contains(&format!("nq_unknown_fields_total{{name=\"{name}\"}} 1")),
            "{metrics}"
        );
    }
    let strict = Running::ruled(Rules {
        strict: true,
        ..Rules::default()
    });
    let (param, code, _) = strict.post(CHAT, &body).error();
    assert!(
        ["nonsense", "messages[0].timestamps"].contains(&param.as_str()),
        "{param}"
    );
    assert_eq!(code, "unsupported_parameter");
    assert_eq!(strict.post(CHAT, &base(CHAT)).status, 200);
}

#[test]
fn lists_of_prompts_are_answered_one_by_one() {
    let server = Running::start();
    let ask = |prompt: Value, more: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 6, "temperature": 0});
        server.json(COMPLETIONS, &with(body, &more))
    };
    let text = |v: &Value, i: usize| v["choices"][i]["text"].as_str().unwrap().to_owned();
    let (once, twice) = (
        ask(json!("Once"), json!({})),
        ask(json!("Twice upon"), json!({})),
    );
    let both = ask(json!(["Once", "Twice upon"]), json!({"n": 2}));
    for (i, one) in [&once, &once, &twice, &twice].into_iter().enumerate() {
        assert_eq!(both["choices"][i]["index"], i);
        assert_eq!(text(&both, i), text(one, 0));
    }
    let sum = |field: &str| {
        once["usage"][field].as_u64().unwrap() + twice["usage"][field].as_u64().unwrap()
    };
    assert_eq!(both["usage"]["prompt_tokens"], sum("prompt_tokens"));
    let lists = ask(json!([[1, 2], [3]]), json!({"max_tokens": 2}));
    assert_eq!(lists["choices"].as_array().unwrap().len(), 2);
    let many = json!({"prompt": vec!["x"; 129], "max_tokens": 1});
    assert_eq!(server.post(COMPLETIONS, &many).error().0, "prompt");
}

#[test]
fn parts_of_characters_are_told_apart() {
    let server = Running::start();
    let body = json!({
        "prompt": "\u{65e5}\u{672c} \u{1f389} \u{e9} \u{65e5}\u{672c} \u{1f389} \u{e9} \u{65e5}",
        "max_tokens": 6, "temperature": 0, "logprobs": 20,
    });
    let whole = server.json(COMPLETIONS, &body);
    let logprobs = &whole["choices"][0]["logprobs"];
    let text: Vec<char> = whole["choices"][0]["text"]
        .as_str()
        .unwrap()
        .chars()
        .collect();
    for (i, top) in logprobs["top_logprobs"]
        .as_array()
        .unwrap()
        .iter()
        .enumerate()
    {
        assert_eq!(top.as_object().unwrap().len(), 20, "token {i}");
        let offset = logprobs["text_offset"][i].as_u64().unwrap() as usize;
        let token = logprobs["tokens"][i].as_str().unwrap();
        assert!(offset <= text.len());
        if !token.starts_with("bytes:") {
            let here: String = text[offset..].iter().take(token.chars().count()).collect();
            assert_eq!(here, token);
        }
    }
}
