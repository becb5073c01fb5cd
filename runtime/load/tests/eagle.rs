//! EAGLE-3 heads: read as published, drafts as the published computation gives them, answers unchanged.

use crate::common::published::{PublishedHead, ask, published, streams, two_answers};
use crate::common::{Store, feed, options, small_config, tokens};
use nq_formats::{AffineScheme, Bits, Group, WeightStore, Zeros};
use nq_load::StreamDrafts;
use nq_model::names::EMBEDDING;
use nq_model::{Dims, ModelConfig};
use nq_runtime::interface::Draft;
use nq_runtime::{
    ActivationChoice, DraftedBy, Engine, EngineKind, KvType, LoadOptions, Session, SessionSpec,
    Speculation,
};
use nq_testkit::sessions::session_spec;
use serde_json::json;
use std::sync::Arc;

const HEADS: (usize, usize, usize) = (6, 2, 16);

fn model() -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 8,
        ..small_config()
    }
}

fn target(c: &ModelConfig) -> (Arc<dyn Engine>, Store) {
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let store = Store::random(c, 9).quantized(int4);
    let options = LoadOptions {
        activations: ActivationChoice::Auto,
        ..options(EngineKind::Nq)
    };
    let engine = nq_load::load(c, &store, &options, &()).unwrap();
    (engine, store)
}

fn session(engine: &dyn Engine, head: &StreamDrafts) -> Box<dyn Session> {
    let spec = SessionSpec {
        drafts: DraftedBy::Layer(head.layer()),
        ..session_spec(2, 300, KvType::F32, 300)
    };
    engine.session(spec).unwrap()
}

fn load(
    head: &PublishedHead,
    (c, store): (&ModelConfig, &Store),
) -> nq_runtime::Result<StreamDrafts> {
    head.load((c, store), &options(EngineKind::Nq))
}

/// As the text grows, is cut, and is another, in both slots.
#[test]
fn drafts_are_those_of_the_published_computation() {
    let c = model();
    let (engine, store) = target(&c);
    let embedding = store
        .matrix(EMBEDDING, Dims::new(c.vocab_size, c.hidden_size))
        .unwrap();
    for (layer, taps, before_residual) in [
        ("midlayer", None, false),
        ("layers.0", Some([1, 4, 6]), false),
        ("model.layers.0", None, true),
    ] {
        let mut head = published(&c, layer, HEADS, 5);
        head.config["norm_before_residual"] = json!(before_residual);
        if let Some(taps) = taps {
            head.config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": taps});
        }
        let eagle = load(&head, (&c, &store)).unwrap();
        let mut session = session(&*engine, &eagle);
        let mut drafter = eagle.drafter(&mut *session).unwrap();
        // Of `text`, the session holds `fed` tokens, and the head sees those from `from` on.
        let mut check = |slot: usize, text: &[u32], fed: usize, from: usize| {
            let held = session.len(slot);
            session.truncate(slot, held.min(fed));
            let held = session.len(slot);
            feed(&mut *session, slot, &text[held..text.len() - 1]);
            let after = taps.unwrap_or([2, 4, 5]);
            let all = streams(&*engine, KvType::F32, &text[..text.len() - 1], after);
            let rows = text[1..].iter().copied().zip(all);
            let rows: Vec<(u32, Vec<f64>)> = rows.skip(from).collect();
            let found = ask(&mut *drafter, &mut *session, slot, text);
            assert_eq!(found.len(), 5, "{layer}, {} tokens", text.len());
            assert_eq!(head.agrees(&embedding, &rows, &found, 0.0), 5);
        };
        let text = tokens(290, 3);
        for length in [2, 3, 7, 8, 140, 290] {
            check(0, &text[..length], length, 0);
        }
        // Shorter, longer again with other tokens, and another text beside it.
        let mut other = text[..100].to_vec();
        other.extend(tokens(30, 8));
        check(0, &other, 100, 100);
        check(1, &tokens(20, 12), 0, 0);
        check(0, &tokens(50, 13), 0, 0);
        // Nothing is known of tokens that were computed before: those of a fork.
        session.fork(0, 1, 30).unwrap();
        let forked = tokens(50, 13)[..31].to_vec();
        assert!(ask(&mut *drafter, &mut *session, 1, &forked).is_empty());
    }
}

/// Whatever is drafted, answers stay as they are.
#[test]
fn drafts_change_no_answer() {
    let c = model();
    let (engine, store) = target(&c);
    let eagle = load(&published(&c, "midlayer", HEADS, 5), (&c, &store)).unwrap();
    let prompt = tokens(40, 8);
    for temperature in [0.0, 0.7] {
        let answer = |drafts: bool| {
            let mut session = session(&*engine, &eagle);
            let speculation = drafts.then(|| {
                let drafter = eagle.drafter(&mut *session).unwrap();
                Speculation::new(drafter).always()
            });
            two_answers(
                &mut *session,
                speculation,
                &prompt,
                temperature,
                [60, 50],
                1,
            )
        };
        assert_eq!(answer(true), answer(false));
    }
}

#[test]
fn hostile_heads_are_refused() {
    let c = model();
    let (_, store) = target(&c);
    let refused = |change: &dyn Fn(&mut PublishedHead), words: &[&str]| {
        let mut head = published(&c, "midlayer", HEADS, 5);
        change(&mut head);
        let error = load(&head, (&c, &store))
            .err()
            .expect("an error")
            .to_string();
        assert!(
            words.iter().all(|w| error.contains(w)),
            "{words:?}: {error}"
        );
    };
    refused(
        &|h| h.config["architectures"] = json!(["LlamaForCausalLM"]),
        &["EAGLE-3", "config.json"],
    );
    refused(
        &|h| h.config["num_hidden_layers"] = json!(2),
        &["num_hidden_layers 2"],
    );
    refused(
        &|h| h.config["hidden_size"] = json!(64),
        &["hidden_size", "48", "64"],
    );
    refused(
        &|h| h.config["vocab_size"] = json!(100),
        &["vocab_size", "101", "100"],
    );
    refused(
        &|h| h.config["draft_vocab_size"] = json!(41),
        &["d2t", "41", "40"],
    );
    refused(
        &|h| h.config["draft_vocab_size"] = json!(1000),
        &["draft_vocab_size", "101"],
    );
    refused(
        &|h| h.config["num_attention_heads"] = json!(5),
        &["num_attention_heads", "num_key_value_heads (2)"],
    );
    refused(&|h| h.config["head_dim"] = json!(15), &["head_dim", "15"]);
    for key in ["intermediate_size", "head_dim"] {
        refused(
            &|h| {
                h.config["hidden_size"] = json!(1 << 28);
                h.config[key] = json!(1 << 28);
            },
            &["parameters", "the head's dimensions"],
        );
    }
    refused(
        &|h| h.config["rope_scaling"] = json!({"rope_type": "llama3"}),
        &["rope"],
    );
    let ids = "eagle_aux_hidden_state_layer_ids";
    refused(
        &|h| h.config["eagle_config"] = json!({ids: [1, 2]}),
        &[ids, "three"],
    );
    refused(
        &|h| h.config["eagle_config"] = json!({ids: [0, 2, 3]}),
        &["1 to 8", "[0, 2, 3]"],
    );
    refused(&|h| h.d2t[7] = -8, &["d2t", "7 + -8"]);
    refused(&|h| h.d2t[7] = i64::MAX, &["d2t", "below 101"]);
    refused(
        &|h| drop(h.tensors.remove("midlayer.mlp.up_proj.weight")),
        &["midlayer.mlp.up_proj", "no such tensor"],
    );
    refused(
        &|h| h.tensors.get_mut("fc.weight").unwrap().0 = vec![96, 72],
        &["fc.weight", "[48, 144]", "[96, 72]"],
    );
    let nan = |h: &mut PublishedHead| h.tensors.get_mut("norm.weight").unwrap().1[3] = f32::NAN;
    let mut head = published(&c, "midlayer", HEADS, 5);
    nan(&mut head);
    let (engine, store) = target(&c);
    let eagle = load(&head, (&c, &store)).unwrap();
    let spec = SessionSpec {
        drafts: DraftedBy::Tokens,
        ..session(&*engine, &eagle).spec()
    };
    let unprepared = eagle.drafter(&mut *engine.session(spec).unwrap()).err();
    let unprepared = unprepared.expect("an error").to_string();
    assert!(unprepared.contains("a session made for it"), "{unprepared}");
    let mut session = session(&*engine, &eagle);
    let mut drafter = eagle.drafter(&mut *session).unwrap();
    feed(&mut *session, 0, &[1, 2, 3]);
    drafter.see(0, session.streams().unwrap().take(0).unwrap());
    let mut drafts = [Draft {
        slot: 0,
        text: &[1, 2, 3, 4],
        most: 2,
        tokens: Vec::new(),
        kind: 0,
    }];
    assert!(drafter.draft(&mut drafts).is_err());
}
