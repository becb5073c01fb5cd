//! The library as a program uses it.

#![cfg(feature = "demo")]

use nq_llm::{
    ActivationChoice, Bits, DeviceChoice, ErrorKind, LoadOptions, Message, Model, StopReason,
    quantize_with,
};
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

    let model = Model::open_with(&out, &load, &()).unwrap();
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
    assert_eq!(ended.unwrap().end, StopReason::Interrupted);
    assert!(model.chat_within(1).is_err());

    let text = include_str!("../assets/demo-eval.txt").get(..6000).unwrap();
    let source = Model::open_with(DEMO, &load, &()).unwrap();
    let report = model.compare(&source, text).unwrap();
    let kld = report.against.unwrap().kld.mean;
    assert!(kld > 0.0 && kld < 0.01, "{kld}");
    assert_eq!(report.ppl, model.evaluate(text).unwrap().ppl);

    // Models go by the names of the command line; what they cannot do is refused by name.
    let demo = Model::open_quantized("demo", Bits::B4, &load, &()).unwrap();
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
