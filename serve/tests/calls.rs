//! Tool calls over HTTP: forced ones hold to their schemas in both forms, and those that a model writes reach the
//! client as they were meant.

#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use crate::common::{Running, templated};
use nq_runtime::{ChatTemplate, Message};
use nq_serve::{HttpLimits, Security};
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Writes calls as Qwen3-Coder's template does.
const XML: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {%- for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n\
    {%- for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n\
    {%- endfor %}</function>\n</tool_call>{%- endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";

fn xml() -> Running {
    Running::over(templated(XML), Security::default(), HttpLimits::default())
}

fn tool(name: &str, schema: &Value) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": schema}})
}

fn with(mut base: Value, more: &Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

/// A request with tools, without thinking.
fn asked(tools: Value, more: &Value) -> Value {
    let base = json!({
        "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 400, "temperature": 0,
        "reasoning_effort": "none", "tools": tools,
    });
    with(base, more)
}

/// The calls of an answer, as names and arguments that are valid JSON.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let call = |call: &Value| {
        let (name, text) = (&call["function"]["name"], &call["function"]["arguments"]);
        let text = text.as_str().unwrap();
        let arguments = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        (name.as_str().unwrap().to_owned(), arguments)
    };
    calls.map(call).collect()
}

/// The arguments of calls that are forced with a schema, at temperature 1.
fn forced(server: &Running, schema: &Value) -> Vec<Value> {
    let seeds = 0..2;
    let one = |seed: i32| {
        let more = json!({"temperature": 1, "seed": seed, "tool_choice": "required", "parallel_tool_calls": false});
        let answer = server.json(CHAT, &asked(json!([tool("f", schema)]), &more));
        let choice = &answer["choices"][0];
        let found = calls(&choice["message"]);
        assert_eq!(
            (choice["finish_reason"].as_str(), found.len()),
            (Some("tool_calls"), 1),
            "{schema}: {answer}"
        );
        found[0].1.clone()
    };
    seeds.map(one).collect()
}

/// Tells if a value is what its schema allows.
type Fits = fn(&Value) -> bool;

fn is_cat(value: &Value) -> bool {
    let map = value.as_object().unwrap();
    map.len() == 2
        && value["t"] == "cat"
        && value["m"].as_i64().is_some_and(|m| (0..10).contains(&m))
}

fn is_dog(value: &Value) -> bool {
    value.as_object().unwrap().len() == 2 && value["t"] == "dog" && value["b"].is_boolean()
}

fn animals() -> (Value, Value) {
    let cat = json!({"type": "object", "properties": {"t": {"const": "cat"}, "m": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["t", "m"]});
    let dog = json!({"type": "object", "properties": {"t": {"const": "dog"}, "b": {"type": "boolean"}}, "required": ["t", "b"]});
    (cat, dog)
}

/// Schemas whose references and alternatives concern the arguments as a whole, and what tells that they hold.
fn schemas() -> Vec<(Value, Fits)> {
    let (cat, dog) = animals();
    let pet = |to: &str| json!({"pet": {"$ref": to}});
    let nested: fn(&Value) -> bool = |v| is_cat(&v["pet"]);
    let city = json!({"city": {"enum": ["Oslo", "Paris"]}});
    let in_city: fn(&Value) -> bool = |v| {
        v.as_object().unwrap().len() == 1
            && ["Oslo", "Paris"].contains(&v["city"].as_str().unwrap())
    };
    let defs = json!({"Cat": cat, "Dog": dog});
    vec![
        (
            json!({"type": "object", "properties": pet("#/$defs/Cat"), "required": ["pet"], "$defs": defs}),
            nested,
        ),
        (
            json!({"type": "object", "properties": pet("#/definitions/Cat"), "required": ["pet"], "definitions": defs}),
            nested,
        ),
        (
            json!({"type": "object", "properties": {"a": cat, "pet": {"$ref": "#/properties/a"}}, "required": ["a", "pet"]}),
            |v| is_cat(&v["a"]) && is_cat(&v["pet"]),
        ),
        (
            json!({"properties": city, "required": ["city"], "additionalProperties": false}),
            in_city,
        ),
        (json!({"properties": city, "required": ["city"]}), in_city),
        (
            json!({"type": ["object", "null"], "properties": city, "required": ["city"]}),
            in_city,
        ),
        (json!({"$ref": "#/$defs/Cat", "$defs": defs}), is_cat),
        (json!({"anyOf": [cat, dog]}), |v| is_cat(v) || is_dog(v)),
        (
            json!({"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": defs}),
            |v| is_cat(v) || is_dog(v),
        ),
        (
            json!({"type": "object", "properties": {"pet": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}}, "required": ["pet"], "$defs": defs}),
            |v| is_cat(&v["pet"]) || is_dog(&v["pet"]),
        ),
        (
            json!({"type": "object", "properties": {"r": {"type": "array", "items": {"enum": [1]}, "uniqueItems": false, "maxItems": 2}}, "required": ["r"]}),
            |v| v["r"].as_array().is_some_and(|r| r.len() <= 2),
        ),
        (json!({"type": "object", "properties": {}}), |v| {
            v == &json!({})
        }),
        (
            json!({"type": "object", "properties": {"e": {"enum": ["\u{e9}", "a\"b\\c"]}}, "required": ["e"]}),
            |v| v["e"] == "\u{e9}" || v["e"] == "a\"b\\c",
        ),
    ]
}

#[test]
fn forced_arguments_fit_schemas_with_references_and_alternatives() {
    let server = Running::start();
    for (schema, fits) in schemas() {
        for arguments in forced(&server, &schema) {
            assert!(fits(&arguments), "{schema}: {arguments}");
        }
    }
}

/// A schema that refers to itself means the arguments, not the call around them.
#[test]
fn forced_arguments_may_contain_themselves() {
    for (server, space) in [(Running::start(), " "), (xml(), "")] {
        for kind in [json!("object"), json!(["object", "null"]), Value::Null] {
            let mut schema = json!({
                "properties": {"v": {"enum": [1, 2]}, "kid": {"anyOf": [{"$ref": "#"}, {"enum": ["end"]}]}},
                "required": ["v", "kid"],
            });
            if !kind.is_null() {
                schema["type"] = kind;
            }
            let more =
                json!({"tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 120});
            let answer = server.json(CHAT, &asked(json!([tool("f", &schema)]), &more));
            let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
            let text = call["arguments"].as_str().unwrap().replace('\\', "");
            let begin = |v: u8| format!("{{\"v\":{space}{v},{space}\"kid\":{space}");
            assert!(
                text.starts_with(&begin(1)) || text.starts_with(&begin(2)),
                "{schema}: {text}"
            );
            assert!(!text.contains("name"), "{schema}: {text}");
        }
    }
}

#[test]
fn forced_calls_in_xml_fit_too() {
    let server = xml();
    for (schema, fits) in schemas() {
        for arguments in forced(&server, &schema) {
            assert!(fits(&arguments), "{schema}: {arguments}");
        }
    }
    let schema = json!({
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 8},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            "flag": {"type": "boolean"},
            "count": {"type": "integer", "minimum": 1, "maximum": 9},
            "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "either": {"type": ["string", "integer"], "maxLength": 3, "minimum": 5, "maximum": 7},
            "list": {"type": "array", "items": {"$ref": "#/$defs/Word"}, "maxItems": 2},
            "kind": {"$ref": "#/$defs/Word"},
        },
        "required": ["text", "zip", "flag", "count", "maybe", "either", "list", "kind"],
        "$defs": {"Word": {"enum": ["a", "b"]}},
    });
    for arguments in forced(&server, &schema) {
        let length = |key: &str| arguments[key].as_str().map(|text| text.chars().count());
        let word = |value: &Value| value == "a" || value == "b";
        let zip = arguments["zip"].as_str().unwrap();
        assert!(length("text").is_some_and(|n| n <= 8), "{arguments}");
        assert!(
            zip.len() == 5 && zip.bytes().all(|b| b.is_ascii_digit()),
            "{arguments}"
        );
        assert!(arguments["flag"].is_boolean(), "{arguments}");
        assert!(
            arguments["count"]
                .as_i64()
                .is_some_and(|n| (1..10).contains(&n)),
            "{arguments}"
        );
        assert!(
            arguments["maybe"].is_null() || length("maybe").is_some_and(|n| n <= 3),
            "{arguments}"
        );
        let number = arguments["either"].as_i64();
        assert!(
            number.is_some_and(|n| (5..8).contains(&n)) || length("either").is_some_and(|n| n <= 3),
            "{arguments}"
        );
        assert!(
            arguments["list"].as_array().unwrap().iter().all(word) && word(&arguments["kind"]),
            "{arguments}"
        );
    }
}

#[test]
fn tools_that_cannot_be_forced_are_refused_by_name() {
    for server in [Running::start(), xml()] {
        for (schema, why) in [
            (
                json!({"type": "array", "items": {"enum": [1, 2]}}),
                "expected a schema of objects",
            ),
            (json!({"type": "string"}), "expected a schema of objects"),
            (
                json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)y$"}}, "required": ["a"]}),
                "(?!x)y",
            ),
        ] {
            let good = tool("good", &json!({"type": "object", "properties": {}}));
            let body = asked(
                json!([good, tool("f", &schema)]),
                &json!({"tool_choice": "required"}),
            );
            let response = server.post(CHAT, &body);
            assert_eq!(response.status, 400, "{schema}: {}", response.body);
            let (param, _, message) = response.error();
            assert!(param.starts_with("tools"), "{schema}: {param}: {message}");
            assert!(message.contains(why), "{schema}: {message}");
        }
    }
}

/// The message of an answer that is exactly `text`.
fn written(server: &Running, text: &str, more: &Value) -> (Value, Value) {
    let any = json!({"type": "object", "properties": {"a": {}}});
    let write = json!({"type": "object", "properties": {
        "content": {"type": "string"}, "zip": {"type": "string"}, "flag": {"type": "boolean"}}});
    let tools = json!([tool("f", &any), tool("g", &any), tool("write", &write)]);
    let grammar = format!("start: {}", Value::from(text));
    let format = json!({"response_format": {"type": "lark", "grammar": grammar}});
    let body = with(asked(tools, &format), more);
    let whole = server.json(CHAT, &body);
    // The stream says the same.
    let mut streamed: Vec<(String, String)> = Vec::new();
    let mut content = String::new();
    for event in server.events(CHAT, &with(body, &json!({"stream": true}))) {
        let delta = &event["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                streamed.push((name.to_owned(), String::new()));
            }
            let more = call["function"]["arguments"].as_str().unwrap();
            streamed.last_mut().unwrap().1 += more;
        }
    }
    let message = whole["choices"][0]["message"].clone();
    let arguments =
        |(name, text): &(String, String)| (name.clone(), serde_json::from_str(text).unwrap());
    let streamed: Vec<(String, Value)> = streamed.iter().map(arguments).collect();
    assert_eq!(streamed, calls(&message), "{text:?}");
    assert_eq!(
        content,
        message["content"].as_str().unwrap_or_default(),
        "{text:?}"
    );
    (message, whole["choices"][0]["finish_reason"].clone())
}

#[test]
fn nothing_that_a_model_wrote_is_lost() {
    let server = Running::start();
    let f = "{\"name\": \"f\", \"arguments\": {\"a\": 1}}";
    let g = "{\"name\": \"g\", \"arguments\": {\"a\": 2}}";
    let both = [("f", json!({"a": 1})), ("g", json!({"a": 2}))];
    let function = |name: &str, parameters: &[(&str, &str)]| {
        let parameters = parameters
            .iter()
            .map(|(k, v)| format!("<parameter={k}>\n{v}\n</parameter>\n"));
        format!(
            "<function={name}>\n{}</function>",
            parameters.collect::<String>()
        )
    };
    let content = |text: &str| vec![("write", json!({"content": text}))];
    for (text, plain, expected) in [
        (format!("<tool_call>\n{f}\n<tool_call>\n{g}\n</tool_call>"), "", both.to_vec()),
        (format!("<tool_call>\n{f}\nThen I look."), "\nThen I look.", both[..1].to_vec()),
        (format!("<tool_call>\n{f}\n</tool_calls>\nText."), "\nText.", both[..1].to_vec()),
        (format!("<tool_call>\n{f}\n{g}\n</tool_call>"), "", both.to_vec()),
        (format!("Use <tool_call> so.\n<tool_call>\n{f}\n</tool_call>"), "Use <tool_call> so.", both[..1].to_vec()),
        (format!("<tool_call>\n{}\n{}\n</tool_call>", function("f", &[("a", "1")]), function("g", &[("a", "2")])), "", both.to_vec()),
        (format!("I write.\n\n{}\n</tool_call>", function("write", &[("content", "a")])), "I write.", content("a")),
        ("<tool_call>\n<function=write>\n<parameter=content>\na\n</function>\n</tool_call>".into(), "", content("a")),
        (format!("<tool_call>\n{}\n</tool_call>", function("write", &[("content", "{\"a\": 1}"), ("zip", "12345"), ("flag", "True")])), "",
            vec![("write", json!({"content": "{\"a\": 1}", "zip": "12345", "flag": true}))]),
        (format!("<tool_call>\n{}\n</tool_call>", function("write", &[("content", "null"), ("zip", "1e5")])), "",
            vec![("write", json!({"content": "null", "zip": "1e5"}))]),
        ("<tool_call>\n{\"name\": \"write\", \"arguments\": {\"content\": \"a\nb\"}}\n</tool_call>".into(), "", content("a\nb")),
    ] {
        let (message, reason) = written(&server, &text, &json!({}));
        let owned: Vec<(String, Value)> = expected.iter().map(|(n, a)| ((*n).to_owned(), a.clone())).collect();
        assert_eq!(calls(&message), owned, "{text:?}");
        assert_eq!(message["content"].as_str().unwrap_or_default(), plain, "{text:?}");
        assert_eq!(reason, "tool_calls");
    }
    let text = format!("<tool_call>\n{f}\n</tool_call>\n<tool_call>\n{g}\n</tool_call>");
    assert_eq!(calls(&written(&server, &text, &json!({})).0).len(), 2);
    let (message, reason) = written(&server, &text, &json!({"parallel_tool_calls": false}));
    assert_eq!(calls(&message), [("f".to_owned(), json!({"a": 1}))]);
    assert_eq!(reason, "tool_calls");
}

#[test]
fn tools_beside_a_format_give_a_call_or_an_answer() {
    let (tag, kinds) = ("<tool_call>", ["a", "b"]);
    for server in [Running::start(), xml()] {
        let token = server.model.tokenizer().token_id(tag).unwrap().to_string();
        let schema = json!({"type": "object", "properties": {"kind": {"enum": kinds}}, "required": ["kind"], "additionalProperties": false});
        let city = json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}, "required": ["city"]});
        let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
        for (bias, choice) in [(100, "auto"), (-100, "auto"), (100, "none")] {
            let more = with(
                format.clone(),
                &json!({"logit_bias": {token.as_str(): bias}, "tool_choice": choice}),
            );
            let answer = server.json(CHAT, &asked(json!([tool("weather", &city)]), &more));
            let choice_of = &answer["choices"][0];
            if bias > 0 && choice == "auto" {
                let names: Vec<String> = calls_begun(&choice_of["message"]);
                assert!(
                    !names.is_empty() && names.iter().all(|n| n == "weather"),
                    "{answer}"
                );
            } else {
                let text = choice_of["message"]["content"].as_str().unwrap();
                let value: Map<String, Value> = serde_json::from_str(text).unwrap();
                assert!(
                    value.len() == 1 && kinds.contains(&value["kind"].as_str().unwrap()),
                    "{answer}"
                );
                assert_eq!(choice_of["finish_reason"], "stop");
            }
        }
    }
}

/// The names of an answer's calls, the last of which may be cut off.
fn calls_begun(message: &Value) -> Vec<String> {
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    calls
        .map(|c| c["function"]["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_call_that_is_cut_off_leaves_no_tags() {
    for server in [Running::start(), xml()] {
        let schema = json!({"type": "object", "properties": {"city": {"type": "string", "minLength": 30}}, "required": ["city"]});
        for most in 1..30 {
            let more = json!({"tool_choice": "required", "max_tokens": most});
            let answer = server.json(CHAT, &asked(json!([tool("weather", &schema)]), &more));
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "length");
            assert!(
                choice["message"]["content"]
                    .as_str()
                    .unwrap_or_default()
                    .is_empty(),
                "{answer}"
            );
        }
    }
}

#[test]
fn schemas_of_popular_clients_are_served() {
    let server = Running::start();
    let ask = |schema: &Value| {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        server.post(
            CHAT,
            &asked(
                json!([]),
                &json!({"response_format": format, "temperature": 1, "seed": 1}),
            ),
        )
    };
    let record = |names: Value| {
        let mut r = json!({"type": "object", "propertyNames": names, "additionalProperties": {"enum": [1]}});
        if names.get("enum").is_none()
            && names.get("$ref").is_none()
            && names.get("const").is_none()
        {
            r["maxProperties"] = 2.into();
        }
        json!({"type": "object", "properties": {"r": r}, "required": ["r"],
            "$defs": {"Kind": {"enum": ["a", "b"], "type": "string"}}})
    };
    let required = |r: Value| json!({"type": "object", "properties": {"r": r}, "required": ["r"]});
    for (schema, fits) in [
        (
            record(json!({"type": "string"})),
            (|r| r.is_object()) as fn(&Value) -> bool,
        ),
        (record(json!(true)), |r| r.is_object()),
        (record(json!({"enum": ["a", "b"]})), |r| {
            r.as_object().unwrap().keys().all(|k| k == "a" || k == "b")
        }),
        (record(json!({"$ref": "#/$defs/Kind"})), |r| {
            r.as_object().unwrap().keys().all(|k| k == "a" || k == "b")
        }),
        (record(json!({"const": "a"})), |r| {
            r.as_object().unwrap().keys().all(|k| k == "a")
        }),
        (record(json!({"pattern": "^x[0-9]$"})), |r| {
            r.as_object().unwrap().keys().all(|k| k.starts_with('x'))
        }),
        (
            required(
                json!({"type": "array", "items": {"enum": [1]}, "uniqueItems": true, "maxItems": 2}),
            ),
            |r| r.is_array(),
        ),
    ] {
        let response = ask(&schema);
        assert_eq!(response.status, 200, "{schema}: {}", response.body);
        let answer = response.json();
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(fits(&value["r"]), "{schema}: {value}");
    }
    // The pattern, and why.
    let response = ask(&required(
        json!({"type": "string", "pattern": "^(?!\\.)a$"}),
    ));
    let (_, _, message) = response.error();
    assert!(
        message.contains("(?!\\.)") && message.contains("look-around"),
        "{message}"
    );
}

/// A request with a value in the arguments of a past call.
type BodyWith = fn(&str) -> String;

/// In each protocol, a call's integer is as long as the same digits as a text, which the template writes alike.
#[test]
fn integers_of_past_calls_keep_their_digits() {
    let server = xml();
    let digits = "12345678901234567890123";
    let openai = |value: &str| {
        let arguments = Value::from(format!(r#"{{"n": {value}}}"#));
        format!(
            r#"{{"max_tokens": 1, "messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": null,
            "tool_calls": [{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}]}}]}}"#
        )
    };
    let responses = |value: &str| {
        let arguments = Value::from(format!(r#"{{"n": {value}}}"#));
        format!(
            r#"{{"max_output_tokens": 1, "input": [{{"role": "user", "content": "a"}},
            {{"type": "function_call", "call_id": "c", "name": "f", "arguments": {arguments}}}]}}"#
        )
    };
    let messages = |value: &str| {
        format!(
            r#"{{"max_tokens": 1, "messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content":
            [{{"type": "tool_use", "id": "c", "name": "f", "input": {{"n": {value}}}}}]}}]}}"#
        )
    };
    let ollama = |value: &str| {
        format!(
            r#"{{"stream": false, "options": {{"num_predict": 1}}, "messages": [{{"role": "user", "content": "a"}},
            {{"role": "assistant", "content": "", "tool_calls":
            [{{"function": {{"name": "f", "arguments": {{"n": {value}}}}}}}]}}]}}"#
        )
    };
    let bodies: [(&str, BodyWith, &str); 4] = [
        (CHAT, openai, "/usage/prompt_tokens"),
        ("/v1/responses", responses, "/usage/input_tokens"),
        ("/v1/messages", messages, "/usage/input_tokens"),
        ("/api/chat", ollama, "/prompt_eval_count"),
    ];
    for (path, body, tokens) in bodies {
        let count = |value: &str| {
            let response = server.send("POST", path, &[], &body(value));
            assert_eq!(response.status, 200, "{path}: {}", response.body);
            let answer = response.json();
            let cached = answer["usage"]["cache_read_input_tokens"].as_u64();
            answer.pointer(tokens).and_then(Value::as_u64).unwrap() + cached.unwrap_or(0)
        };
        assert_eq!(count(digits), count(&format!("\"{digits}\"")), "{path}");
    }
}

/// The published templates of Qwen3.5, 3.6 and 3.8: calls in their XML, histories with calls, results and late system
/// messages, every effort, and a budget of thinking that the prompt opens.
#[test]
fn published_templates_of_qwen35_are_served() {
    for name in ["3.5-4B", "3.6-27B", "3.8-27B"] {
        let path = format!("data/qwen3.5/chat_template-Qwen{name}.jinja");
        let Some(path) = nq_testkit::shared(&path) else {
            return;
        };
        let source = std::fs::read_to_string(&path).unwrap();
        let server = Running::over(
            templated(&source),
            Security::default(),
            HttpLimits::default(),
        );
        let text = "Let me see.\n\n<tool_call>\n<function=write>\n<parameter=content>\n a\n\n<b> \n</parameter>\n\
            <parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n\
            <parameter=a>\n[1, 2]\n</parameter>\n</function>\n</tool_call>";
        let (message, reason) = written(&server, text, &json!({}));
        let expected = [
            (
                "write".to_owned(),
                json!({"content": " a\n\n<b> ", "flag": true}),
            ),
            ("f".to_owned(), json!({"a": [1, 2]})),
        ];
        assert_eq!(calls(&message), expected, "{name}");
        assert_eq!(
            (&message["content"], &reason),
            (&json!("Let me see."), &json!("tool_calls"))
        );
        let days = json!({"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"]});
        for arguments in forced(&server, &days) {
            assert!(
                arguments["days"]
                    .as_i64()
                    .is_some_and(|n| (1..10).contains(&n)),
                "{arguments}"
            );
        }

        // The prompt is what the template makes of the chat, with arguments as values.
        let tools = json!([tool("f", &days)]);
        let call = |arguments: Value| json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
        let chat = |arguments: Value, late: &str, text: &str| {
            json!([
                {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"},
                {"role": "assistant", "content": null, "reasoning_content": "Look.", "tool_calls": call(arguments)},
                {"role": "tool", "tool_call_id": "c", "content": "sun"},
                {"role": late, "content": text},
                {"role": "assistant", "content": "Sun.", "reasoning_content": "So."},
                {"role": "user", "content": "Sure?"},
            ])
        };
        let sent = chat(json!("{\"days\": 3}"), "system", "Hurry.");
        let body = json!({"messages": sent, "tools": tools, "max_tokens": 1});
        let rendered: Vec<Message> =
            serde_json::from_value(chat(json!({"days": 3}), "user", "[system message]\nHurry."))
                .unwrap();
        let template = ChatTemplate::from_source(&path, &source).unwrap();
        for thinks in [true, false] {
            let prompt = template
                .render(
                    &rendered,
                    tools.as_array().map(Vec::as_slice),
                    true,
                    Some(thinks),
                )
                .unwrap();
            assert!(
                prompt.contains("<function=f>\n<parameter=days>\n3\n</parameter>"),
                "{prompt}"
            );
            let expected = server.json("/tokenize", &json!({"prompt": prompt}));
            let answer = server.json(
                CHAT,
                &with(body.clone(), &json!({"enable_thinking": thinks})),
            );
            assert_eq!(
                answer["usage"]["prompt_tokens"], expected["count"],
                "{name}: {answer}"
            );
        }

        let asked = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 60, "temperature": 0,
            "ignore_eos": true});
        for effort in ["none", "minimal", "low", "medium", "high", "xhigh", "max"] {
            let body = with(
                asked.clone(),
                &json!({"max_tokens": 2, "reasoning_effort": effort}),
            );
            assert_eq!(
                server.json(CHAT, &body)["usage"]["completion_tokens"],
                2,
                "{effort}"
            );
        }
        for budget in [0, 5] {
            // Behind an end that is ignored, the model may begin another turn, with thinking of its own.
            let more = json!({"thinking_budget": budget, "ignore_eos": false});
            let whole = server.json(CHAT, &with(asked.clone(), &more));
            let thought = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
                .as_u64()
                .unwrap();
            assert!(
                thought >= budget && thought <= 3 * budget,
                "{thought}: {whole}"
            );
            let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
            assert!(
                !content.is_empty() && !content.contains("think>"),
                "{whole}"
            );
        }
    }
}
