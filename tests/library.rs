//! The library as a program uses it.

use nq_llm::nq_runtime::{ActivationChoice, DeviceChoice};
use nq_llm::{Bits, Error, LoadOptions, Model, quantize_with};

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

    let model = Model::open_with(&out, &load).unwrap();
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

    let text = include_str!("../assets/demo-eval.txt").get(..6000).unwrap();
    let source = Model::open_with(DEMO, &load).unwrap();
    let report = model.compare(&source, text).unwrap();
    let kld = report.against.unwrap().kld.mean;
    assert!(kld > 0.0 && kld < 0.01, "{kld}");
    assert_eq!(report.ppl, model.evaluate(text).unwrap().ppl);

    // What exists is not replaced unasked; the error says so.
    let again = quantize_with(DEMO, &out, Bits::B8, |o| o.method = "rtn".into(), &());
    assert!(matches!(again, Err(Error::Quantize(_))), "{again:?}");
}
