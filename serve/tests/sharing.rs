//! Resources that prompts share: memory, and computation.

use crate::common::{Running, model};
use nq_kernels::pages::PAGE;
use nq_serve::{EngineOptions, HttpLimits, Security};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

const CHAT: &str = "/v1/chat/completions";

fn server(pages: usize, options: EngineOptions) -> Running {
    let model = model(Some(pages), options);
    Running::over(model, Security::default(), HttpLimits::default())
}

/// Four answers to a prompt of three and a half pages take one page of their own each, not four.
#[test]
fn answers_to_one_prompt_share_its_pages() {
    const PAGES: usize = 30;
    const ANSWERS: usize = 4;
    let server = server(PAGES, EngineOptions::default());
    let text = "Tell me about the film The Silent River. ".repeat(30);
    let body = json!({
        "messages": [{"role": "user", "content": text}], "n": ANSWERS, "max_tokens": 30,
        "ignore_eos": true, "seed": 1,
    });
    let over = AtomicBool::new(false);
    let (answer, most) = std::thread::scope(|scope| {
        let watched = scope.spawn(|| {
            let metrics = server.model.engine().metrics();
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                if metrics.running.get() > 0 {
                    most = most.max(PAGES - metrics.pages_free.get() as usize);
                }
                std::thread::yield_now();
            }
            most
        });
        let answer = server.json(CHAT, &body);
        over.store(true, Ordering::Relaxed);
        (answer, watched.join().unwrap())
    });
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert!(
        prompt % PAGE + 30 < PAGE,
        "{prompt}: its last page holds an answer"
    );
    let shared = prompt / PAGE;
    assert!(
        shared >= 2 && most == shared + ANSWERS,
        "{most} pages for {prompt} tokens"
    );
    // Each token of the prompt was computed once, except the last, which each answer needs.
    let metrics = server.model.engine().metrics();
    let computed = metrics.prompt_tokens.get() - metrics.cached_tokens.get();
    assert_eq!(computed as usize, prompt + ANSWERS - 1);
}

/// A template drops the thinking of earlier turns: everything before it is reused.
#[test]
fn a_second_turn_finds_the_first_though_its_thinking_is_gone() {
    let server_with = |prefix_cache: bool| {
        let options = EngineOptions {
            prefix_cache,
            ..EngineOptions::default()
        };
        let server = server(30, options);
        let ask = |messages: &[Value]| {
            let body = json!({"messages": messages, "temperature": 0, "max_tokens": 80});
            server.json(CHAT, &body)
        };
        let question = "Tell me about the film The Silent River (1931).";
        let mut messages = vec![json!({"role": "user", "content": question})];
        let first = ask(&messages);
        messages.push(json!({
            "role": "assistant", "content": first["choices"][0]["message"]["content"],
        }));
        messages.push(json!({"role": "user", "content": "And then?"}));
        [first, ask(&messages)]
    };
    let [first, second] = server_with(true);
    let thought = &first["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert!(thought.as_u64() > Some(0), "{first}");
    let cached = &second["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(cached, &first["usage"]["prompt_tokens"]);
    let [_, alone] = server_with(false);
    assert_eq!(alone["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(alone["choices"], second["choices"]);
}
