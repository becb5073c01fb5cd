//! The library as a program uses it.

#![cfg(feature = "demo")]

use crate::quantize::write_adapter;
use nq_llm::{
    ActivationChoice, AdapterFile, Bits, Chat, DeviceChoice, DraftFrom, End, ErrorKind, Format,
    LoadOptions, Message, Model, OpenOptions, Piece, StopReason, ToolChoice, quantize_with,
};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo");

#[test]
fn a_program_quantizes_chats_and_compares() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("demo-int8");
    let load = LoadOptions {
        device: DeviceChoice::Cpu,
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    let made = quantize_with(
        DEMO,
        &out,
        Bits::B8,
        |options| {
            options.method = "rtn".into();
            options.measure = false;
            options.load = load;
        },
        &(),
    )
    .unwrap();
    assert!(made.quality.is_none() && made.file_bytes < made.source_bytes);

    let options = OpenOptions {
        load,
        ..OpenOptions::default()
    };
    let model = Model::open_with(&out, &options, &()).unwrap();
    let mut chat = model.chat().unwrap();
    chat.sampling.temperature = 0.0;
    chat.max_tokens = 8;
    chat.thinking = Some(false);
    let mut streamed = String::new();
    let first = chat.ask("Hello!", |piece| streamed += piece).unwrap();
    assert!(!first.is_empty());
    assert_eq!(streamed, first);
    chat.ask("Tell me more.", |_| {}).unwrap();
    let roles: Vec<&str> = chat.messages().iter().map(|m| m.role.as_str()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    chat.sampling.temperature = -1.0;
    assert!(chat.ask("And?", |_| {}).is_err());
    assert_eq!(chat.messages().len(), 4);

    // A list of messages, whatever the chat has heard: the same seed gives the same answer.
    chat.sampling.temperature = 0.8;
    let messages = [Message::new("user", "Tell me about a river.")];
    let told = chat.answer(&messages, |_| {}).unwrap();
    assert_eq!(chat.answer(&messages, |_| {}).unwrap().text, told.text);
    assert_eq!(chat.messages().len(), 4);
    assert!(told.stats.tokens <= 8);
    let word = told.text.split_whitespace().nth(1).unwrap();
    chat.stop = vec![word.to_owned()];
    let cut = chat.answer(&messages, |_| {}).unwrap();
    assert_eq!(cut.text, told.text[..told.text.find(word).unwrap()]);
    // What gets the pieces can end the answer.
    chat.stop.clear();
    let interrupt = Arc::clone(&chat.interrupt);
    let ended = chat.answer(&messages, |_| interrupt.store(true, Ordering::Relaxed));
    assert_eq!(ended.unwrap().end, End::Generated(StopReason::Interrupted));
    assert!(model.chat_within(1).is_err());

    let text = include_str!("../assets/demo-eval.txt").get(..6000).unwrap();
    let source = Model::open_with(DEMO, &options, &()).unwrap();
    let report = model.compare(&source, text).unwrap();
    let kld = report.against.unwrap().kld.mean;
    assert!(kld > 0.0 && kld < 0.01, "{kld}");
    assert_eq!(report.ppl, model.evaluate(text).unwrap().ppl);

    // Adapters beside quantized weights, which the models share.
    let path = dir.path().join("adapter");
    write_adapter(&path, 0.05);
    let ppl = |weight| {
        let path = path.clone();
        let adapted = model.with_adapters(&[AdapterFile { path, weight }]);
        adapted.unwrap().evaluate(text).unwrap().ppl
    };
    assert_eq!(ppl(0.0), report.ppl);
    assert!(ppl(1.0) > 1.01 * report.ppl, "{} {}", ppl(1.0), report.ppl);
    let missing = AdapterFile {
        path: dir.path().join("missing"),
        weight: 1.0,
    };
    let missing = model.with_adapters(&[missing]).err().unwrap();
    assert!(matches!(missing.kind(), ErrorKind::System(_)), "{missing}");

    // Models go by the names of the command line; what they cannot do is refused by name.
    let rounded = OpenOptions {
        bits: Some(Bits::B4),
        ..options
    };
    let demo = Model::open_with("demo", &rounded, &()).unwrap();
    assert_eq!(demo.name(), "demo");
    assert!(demo.evaluate(text).unwrap().ppl > report.ppl);
    let refused = demo.embedder().err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unsuited);
    assert!(refused.to_string().starts_with("demo:"), "{refused}");
    let unknown = Model::open("demmo").err().unwrap();
    assert_eq!(unknown.kind(), ErrorKind::NoModel);
    assert!(unknown.to_string().contains("mean demo?"), "{unknown}");

    // What exists is not replaced unasked; the error says so.
    let again = quantize_with(DEMO, &out, Bits::B8, |o| o.method = "rtn".into(), &());
    let exists = ErrorKind::System(std::io::ErrorKind::AlreadyExists);
    assert_eq!(again.unwrap_err().kind(), exists);
}

/// The demo model at 4 bits, with tokens drafted by `draft`.
fn demo(draft: &str) -> Model {
    let options = OpenOptions {
        load: LoadOptions {
            device: DeviceChoice::Cpu,
            ..LoadOptions::default()
        },
        bits: Some(Bits::B4),
        draft: Some(draft.parse().unwrap()),
        ..OpenOptions::default()
    };
    Model::open_with("demo", &options, &()).unwrap()
}

fn greedy(model: &Model, max_tokens: usize) -> Chat {
    let mut chat = model.chat().unwrap();
    chat.sampling.temperature = 0.0;
    chat.max_tokens = max_tokens;
    chat
}

fn go_on(_: &Piece) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn drafts_change_no_answer() {
    let messages = [Message::new(
        "user",
        "Tell me about the film The Silent River (1931).",
    )];
    let mut plain = greedy(&demo("none"), 48);
    let mut drafted = greedy(&demo("ngram"), 48);
    let plain = plain.answer(&messages, |_| {}).unwrap();
    let drafted = drafted.answer(&messages, |_| {}).unwrap();
    assert_eq!(drafted.tokens, plain.tokens);
    assert_eq!((plain.stats.draft_steps, plain.stats.drafted), (0, 0));
    assert!(drafted.stats.draft_steps > 0, "{:?}", drafted.stats);
    assert_eq!("mtp".parse(), Ok(DraftFrom::Mtp));
    let options = OpenOptions {
        draft: Some(DraftFrom::Mtp),
        ..OpenOptions::default()
    };
    let refused = Model::open_with("demo", &options, &()).err().unwrap();
    assert!(refused.to_string().contains("an MTP layer"), "{refused}");
}

#[test]
fn answers_are_held_to_schemas_patterns_and_tools() {
    let model = demo("ngram");
    let mut chat = greedy(&model, 200);
    let messages = [Message::new("user", "Name a river.")];
    let schema = json!({
        "type": "object", "properties": {"name": {"enum": ["Rhine", "Nile"]}, "long": {"type": "boolean"}},
        "required": ["name", "long"], "additionalProperties": false,
    });
    chat.format = Some(Format::Schema(schema));
    let answer = chat.answer(&messages, |_| {}).unwrap();
    let value: Value = serde_json::from_str(&answer.text).unwrap();
    assert!(
        value["long"].is_boolean() && ["Rhine", "Nile"].contains(&value["name"].as_str().unwrap())
    );
    chat.format = Some(Format::Regex("[a-c]{3} [0-9]".into()));
    let answer = chat.answer(&messages, |_| {}).unwrap();
    assert!(answer.text.len() == 5 && answer.text.ends_with(|c: char| c.is_ascii_digit()));
    assert!(matches!(answer.end, End::Generated(StopReason::Eos(_))));
    chat.format = Some(Format::Regex("(".into()));
    let refused = chat.answer(&messages, |_| {}).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Argument, "{refused}");

    chat.format = None;
    chat.tools = vec![json!({"type": "function", "function": {
        "name": "look_up", "description": "Looks up a river.",
        "parameters": {"type": "object", "properties": {"river": {"enum": ["Rhine", "Nile"]}}, "required": ["river"]},
    }})];
    chat.tool_choice = ToolChoice::Named("look_up".into());
    let mut started = 0;
    let answer = chat
        .answer_pieces(&messages, |piece| {
            started += usize::from(matches!(piece, Piece::CallStart { .. }));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(
        (started, answer.calls.len(), answer.text.as_str()),
        (1, 1, "")
    );
    assert_eq!(answer.calls[0].name, "look_up");
    let arguments: Value = serde_json::from_str(&answer.calls[0].arguments).unwrap();
    assert!(arguments["river"].is_string(), "{arguments}");
    // The next turn takes the call and its result.
    assert_eq!(
        answer.message.extra["tool_calls"][0]["function"]["arguments"],
        arguments
    );
    let mut result = Message::new("tool", "1,230 km");
    result.extra.insert("name".into(), "look_up".into());
    let messages = [messages[0].clone(), answer.message, result];
    chat.tool_choice = ToolChoice::None;
    assert!(chat.answer(&messages, |_| {}).unwrap().calls.is_empty());
}

#[test]
fn tokens_go_in_and_come_out_with_their_probabilities() {
    let model = demo("ngram");
    let tokens = model.encode("The river runs").unwrap();
    assert_eq!(model.decode(&tokens), "The river runs");
    let logits = model.logits(&tokens).unwrap();
    let vocab = model.vocab();
    assert_eq!(logits.len(), tokens.len() * vocab);
    let last = &logits[(tokens.len() - 1) * vocab..];
    let best = (0..vocab)
        .max_by(|&a, &b| last[a].total_cmp(&last[b]))
        .unwrap();

    let mut chat = greedy(&model, 5);
    chat.logprobs = Some(2);
    let answer = chat.continue_tokens(&tokens, go_on).unwrap();
    assert_eq!(answer.tokens[0], best as u32);
    assert_eq!(answer.text, model.decode(&answer.tokens));
    let drawn: Vec<u32> = answer.logprobs.iter().map(|l| l.token).collect();
    assert_eq!(drawn, answer.tokens);
    let first = &answer.logprobs[0];
    assert_eq!(
        (first.top.len(), first.top[0]),
        (2, (best as u32, first.logprob))
    );
    let sum: f64 = last.iter().map(|&l| f64::from(l - last[best]).exp()).sum();
    assert!(
        (f64::from(first.logprob) + sum.ln()).abs() < 1e-4,
        "{first:?} {sum}"
    );
    // Another that continues the text and one that breaks it off.
    let cut = chat
        .continue_tokens(&tokens, |_| ControlFlow::Break(()))
        .unwrap();
    assert_eq!(cut.end, End::Generated(StopReason::Interrupted));
    assert!(cut.tokens.len() < 5 && answer.tokens.starts_with(&cut.tokens));

    let messages = [Message::new("user", "Name a river.")];
    let prompt = model.prompt(&messages, &[], None).unwrap();
    assert_eq!(model.encode(&prompt.text).unwrap(), prompt.tokens);
    chat.logprobs = None;
    let by_chat = chat.answer(&messages, |_| {}).unwrap();
    let by_tokens = chat.continue_tokens(&prompt.tokens, go_on).unwrap();
    assert_eq!(by_tokens.tokens, by_chat.tokens);
    for wrong in [vec![], vec![vocab as u32]] {
        assert_eq!(
            model.logits(&wrong).unwrap_err().kind(),
            ErrorKind::Argument
        );
        let refused = chat.continue_tokens(&wrong, go_on).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Argument, "{refused}");
    }
}

/// A budget closes the thinking that has begun, and the answer follows in the same text.
#[test]
fn thinking_ends_with_its_budget() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("demo-int8");
    let quick = |options: &mut nq_llm::QuantizeOptions| {
        options.method = "rtn".into();
        options.measure = false;
        options.load.device = DeviceChoice::Cpu;
    };
    quantize_with(DEMO, &out, Bits::B8, quick, &()).unwrap();
    let opens = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                 <|im_start|>assistant\n<think>\n{# enable_thinking #}";
    std::fs::write(out.join("chat_template.jinja"), opens).unwrap();
    let options = OpenOptions {
        load: LoadOptions {
            device: DeviceChoice::Cpu,
            ..LoadOptions::default()
        },
        ..OpenOptions::default()
    };
    let model = Model::open_with(&out, &options, &()).unwrap();
    let mut chat = greedy(&model, 40);
    let messages = [Message::new("user", "Tell me about a river.")];
    let free = chat.answer(&messages, |_| {}).unwrap();
    chat.thinking_budget = Some(6);
    let mut streamed = String::new();
    let held = chat.answer(&messages, |piece| streamed += piece).unwrap();
    assert_eq!(held.tokens[..6], free.tokens[..6]);
    let close = model.encode("\n</think>\n\n").unwrap();
    assert_eq!(held.tokens[6..6 + close.len()], close);
    assert!(!held.thinking.is_empty() && !held.text.is_empty());
    assert_eq!(streamed, held.whole());
    assert!(streamed.starts_with("<think>\n") && streamed.contains("\n</think>\n\n"));
    chat.thinking_budget = Some(0);
    assert_eq!(chat.answer(&messages, |_| {}).unwrap().thinking, "");
}
