//! The demo model's quality compared with figures from Hugging Face transformers and llama.cpp.

#![allow(
    clippy::print_stdout,
    reason = "figures and skipped tests are worth showing"
)]

use nq_evals::{EvalSpec, Evaluation, Protocol, ReferenceLogits, compare, evaluate, self_noise};
use nq_formats::Checkpoint;
use nq_load::load;
use nq_runtime::{ActivationChoice, DeviceChoice, Engine, KvType, LoadOptions, Tokenizer};
use nq_testkit::{repository, shared};
use std::sync::{Arc, LazyLock};

struct Demo {
    engine: Arc<dyn Engine>,
    tokenizer: Tokenizer,
}

static DEMO: LazyLock<Demo> = LazyLock::new(|| {
    let checkpoint = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    Demo {
        engine: load(checkpoint.config(), checkpoint.store(), &options, &()).unwrap(),
        tokenizer: Tokenizer::from_files(checkpoint.files()).unwrap(),
    }
});

/// A text of the test data; `None`, with a printed note, if it is absent or slow tests are off.
fn slow_text(name: &str) -> Option<String> {
    if std::env::var_os("NQ_SLOW_TESTS").is_none() {
        println!("skipped: {name} takes minutes; NQ_SLOW_TESTS=1 runs it");
        return None;
    }
    let path = shared(&format!("data/{name}"))?;
    Some(std::fs::read_to_string(path).unwrap())
}

fn demo_eval() -> String {
    std::fs::read_to_string(repository().join("assets/demo-eval.txt")).unwrap()
}

fn exact(protocol: Protocol, ctx: usize, text: &str) -> EvalSpec {
    EvalSpec {
        kv: KvType::F32,
        ..EvalSpec::new(protocol, ctx, text)
    }
}

/// Checks one text at every context of the golden file.
fn check_golden(name: &str, text: &str) {
    let json = std::fs::read(repository().join("assets/demo-golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let tokens = DEMO.tokenizer.encode(text).unwrap();
    let mut checked = 0;
    for case in golden["ppl"].as_array().unwrap() {
        if case["text"] != name {
            continue;
        }
        assert_eq!(
            tokens.len() as u64,
            case["tokens"].as_u64().unwrap(),
            "{name}"
        );
        let ctx = case["ctx"].as_u64().unwrap() as usize;
        let spec = exact(Protocol::Hf, ctx, name);
        let report = evaluate(DEMO.engine.as_ref(), &tokens, &spec, &())
            .unwrap()
            .report;
        assert_eq!(report.windows as u64, case["windows"].as_u64().unwrap());
        let expected = case["ppl"].as_f64().unwrap();
        let error = (report.ppl / expected - 1.0).abs();
        println!(
            "{name}, ctx {ctx}: {} (expected {expected}, {error:.1e} off)",
            report.ppl
        );
        assert!(
            error < 2e-4,
            "{name}, ctx {ctx}: {}, expected {expected}",
            report.ppl
        );
        checked += 1;
    }
    assert_eq!(checked, 2, "{name}");
}

#[test]
fn perplexity_of_the_built_in_text_is_that_of_transformers() {
    check_golden("demo-eval.txt", &demo_eval());
}

#[test]
fn perplexity_of_books_is_that_of_transformers() {
    if let Some(text) = slow_text("books.valid.txt") {
        check_golden("books.valid.txt", &text);
    }
}

#[test]
fn perplexity_of_wikitext_is_that_of_transformers() {
    if let Some(text) = slow_text("wiki.test.raw") {
        check_golden("wiki.test.raw", &text);
    }
}

#[test]
fn llama_protocol_gives_the_perplexity_of_llama_cpp() {
    let Some(text) = slow_text("books.valid.txt") else {
        return;
    };
    let part = &text[..text.floor_char_boundary(700_000)];
    let tokens = DEMO.tokenizer.encode(part).unwrap();
    let spec = exact(Protocol::Llama, 512, "books");
    let r = evaluate(DEMO.engine.as_ref(), &tokens, &spec, &())
        .unwrap()
        .report;
    println!(
        "llama protocol: {} ± {} over {} windows",
        r.ppl, r.ppl_se, r.windows
    );
    assert!((r.ppl - 20.049).abs() < 0.02, "{}", r.ppl);
    assert!((r.ppl_se - 0.164).abs() < 0.002, "{}", r.ppl_se);
}

fn few_windows(text: &str) -> (Vec<u32>, EvalSpec) {
    let tokens = DEMO
        .tokenizer
        .encode(&text[..text.floor_char_boundary(12_000)])
        .unwrap();
    let spec = EvalSpec {
        max_windows: Some(4),
        ..exact(Protocol::Llama, 512, "demo-eval")
    };
    (tokens, spec)
}

#[test]
fn the_model_does_not_stray_from_itself() {
    let engine = DEMO.engine.as_ref();
    let (tokens, spec) = few_windows(&demo_eval());
    let e = compare(engine, engine, &tokens, &spec, &()).unwrap();
    let c = e.report.against.unwrap();
    assert!(c.kld.max.abs() <= 1e-9, "{:?}", c.kld);
    assert_eq!((c.same_top1, c.ln_ppl_ratio), (1.0, 0.0));
    // Other forwards and a rounded KV cache make a difference, but hardly any.
    let spec = EvalSpec {
        kv: KvType::F16,
        ..spec
    };
    let noise = self_noise(engine, &tokens, &spec, &()).unwrap();
    println!("self-noise: {noise:?}");
    assert!(noise.mean >= 0.0 && noise.mean < 1e-5, "{noise:?}");
}

/// The loss from storing log-probabilities, on a real vocabulary's distribution.
#[test]
fn a_recorded_reference_agrees_with_lockstep() {
    let engine = DEMO.engine.as_ref();
    let (tokens, spec) = few_windows(&demo_eval());
    let int8 = EvalSpec {
        kv: KvType::Int8,
        ..spec.clone()
    };
    let kld = |e: &Evaluation| e.report.against.as_ref().map(|c| c.kld).unwrap();
    let vocab = engine.config().vocab_size as u64;
    let scored = (4 * spec.scored().len()) as u64;
    let wide = ReferenceLogits::record(engine, &tokens, &int8, 4 * scored * vocab, &()).unwrap();
    let narrow = ReferenceLogits::record(engine, &tokens, &int8, 2 * scored * vocab, &()).unwrap();
    assert_eq!(narrow.bytes() * 2, wide.bytes());
    let floor = kld(&narrow.compare(engine, &()).unwrap());
    println!("f16 floor: {floor:?}");
    assert!(floor.mean.abs() < 2e-6, "{floor:?}");
    let exact = kld(&wide.compare(engine, &()).unwrap());
    assert!(exact.mean.abs() < 1e-9, "{exact:?}");
}
