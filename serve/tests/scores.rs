//! Completions that begin with their prompt, and its log-probabilities.

use crate::common::{COMPLETIONS, Running, with};
use serde_json::{Value, json};

fn tokens(server: &Running, text: &str) -> Vec<u64> {
    let answer = server.json("/tokenize", &json!({"prompt": text}));
    let tokens = answer["tokens"].as_array().unwrap();
    tokens.iter().map(|t| t.as_u64().unwrap()).collect()
}

fn numbers(values: &Value) -> Vec<f64> {
    let values = values.as_array().unwrap().iter();
    values.map(|v| v.as_f64().unwrap()).collect()
}

#[test]
fn a_prompt_is_scored_as_an_answer_is() {
    let server = Running::start();
    let asked =
        json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 3});
    let written = server.json(COMPLETIONS, &asked)["choices"][0].clone();
    let text = format!("Once upon a time{}", written["text"].as_str().unwrap());
    let own = numbers(&written["logprobs"]["token_logprobs"]);
    let ids = tokens(&server, &text);
    for prompt in [json!(text), json!(ids)] {
        let echo = json!({"prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 3});
        let answer = server.json(COMPLETIONS, &echo);
        let choice = &answer["choices"][0];
        assert_eq!(
            (&choice["text"], &choice["finish_reason"]),
            (&json!(text), &json!("length"))
        );
        let scores = &choice["logprobs"];
        // Nothing precedes the first token.
        assert_eq!(
            (&scores["token_logprobs"][0], &scores["top_logprobs"][0]),
            (&Value::Null, &Value::Null)
        );
        let all = numbers(&json!(scores["token_logprobs"].as_array().unwrap()[1..]));
        assert_eq!(all.len() + 1, ids.len());
        let last = &all[all.len() - own.len()..];
        for (a, b) in last.iter().zip(&own) {
            assert!((a - b).abs() < 0.02, "{last:?} {own:?}");
        }
        let joined: String = scores["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t.as_str().unwrap())
            .collect();
        assert_eq!(joined, text);
        let best = scores["top_logprobs"]
            .as_array()
            .unwrap()
            .last()
            .unwrap()
            .as_object()
            .unwrap();
        assert_eq!(best.len(), 3);
        let offsets = numbers(&scores["text_offset"]);
        assert!(offsets[0] == 0.0 && offsets.is_sorted() && offsets.len() == ids.len());
        let usage = &answer["usage"];
        assert_eq!(
            (
                usage["prompt_tokens"].as_u64(),
                usage["completion_tokens"].as_u64()
            ),
            (Some(ids.len() as u64), Some(0))
        );
    }
}

#[test]
fn an_answer_goes_on_behind_its_prompt_whole_and_streamed() {
    let server = Running::start();
    let prompts = json!(["Once upon a time", "Hello, I am"]);
    let asked = json!({"prompt": prompts, "max_tokens": 6, "temperature": 0, "n": 2});
    let plain = server.json(COMPLETIONS, &asked);
    for more in [json!({}), json!({"logprobs": 1})] {
        let asked = with(with(asked.clone(), &json!({"echo": true})), &more);
        let answer = server.json(COMPLETIONS, &asked);
        assert_eq!(
            answer["usage"]["completion_tokens"],
            plain["usage"]["completion_tokens"]
        );
        assert_eq!(
            answer["usage"]["prompt_tokens"],
            plain["usage"]["prompt_tokens"]
        );
        let mut streamed = vec![String::new(); 4];
        let mut scored = [0; 4];
        for event in server.events(COMPLETIONS, &with(asked, &json!({"stream": true}))) {
            for choice in event["choices"].as_array().into_iter().flatten() {
                let index = choice["index"].as_u64().unwrap() as usize;
                streamed[index] += choice["text"].as_str().unwrap();
                scored[index] += choice["logprobs"]["tokens"].as_array().map_or(0, Vec::len);
            }
        }
        for i in 0..4 {
            let text = format!(
                "{}{}",
                prompts[i / 2].as_str().unwrap(),
                plain["choices"][i]["text"].as_str().unwrap()
            );
            let choice = &answer["choices"][i];
            assert_eq!(
                (&choice["text"], &streamed[i]),
                (&json!(text), &text),
                "{more}"
            );
            assert_eq!(
                choice["finish_reason"],
                plain["choices"][i]["finish_reason"]
            );
            assert_eq!(
                choice["logprobs"]["tokens"].as_array().map_or(0, Vec::len),
                scored[i]
            );
            assert_eq!(scored[i] > 0, more["logprobs"].is_u64());
        }
    }
}

#[test]
fn tokens_that_end_an_answer_are_scored_within_a_prompt_and_end_it_behind() {
    let server = Running::start();
    let prompt = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n";
    let plain = json!({"prompt": prompt, "max_tokens": 300, "temperature": 0});
    let plain = server.json(COMPLETIONS, &plain);
    assert_eq!(plain["choices"][0]["finish_reason"], "stop");
    let echo =
        json!({"prompt": prompt, "max_tokens": 300, "temperature": 0, "echo": true, "logprobs": 0});
    let answer = server.json(COMPLETIONS, &echo);
    assert_eq!(
        answer["usage"],
        with(
            plain["usage"].clone(),
            &json!({"prompt_tokens_details": answer["usage"]["prompt_tokens_details"]})
        )
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert_eq!(
        text,
        format!("{prompt}{}", plain["choices"][0]["text"].as_str().unwrap())
    );
}

#[test]
fn what_cannot_be_scored_is_refused_by_name() {
    let server = Running::start();
    let base = json!({"prompt": "Once upon", "max_tokens": 0, "echo": true, "logprobs": 1});
    for (more, param) in [
        (json!({"prompt": [5]}), "prompt"),
        (json!({"prompt": [5, 4_000_000]}), "prompt"),
        (json!({"prompt": "word ".repeat(2000)}), "prompt"),
        (json!({"frequency_penalty": 1}), "echo"),
        (json!({"presence_penalty": 1}), "echo"),
        (json!({"echo": false}), "max_tokens"),
    ] {
        let response = server.post(COMPLETIONS, &with(base.clone(), &more));
        assert_eq!(
            (response.status, response.error().0.as_str()),
            (400, param),
            "{}",
            response.body
        );
    }
    // As long as the context itself is.
    let ids: Vec<u64> = vec![5; 1024];
    let full = server.json(COMPLETIONS, &with(base, &json!({"prompt": ids})));
    let scores = full["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(scores.len(), 1024);
}
