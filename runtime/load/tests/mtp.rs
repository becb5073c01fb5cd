//! Drafts by a model's MTP layer: those of the published computation, and answers unchanged.

use crate::common::mtp::{PublishedLayer, check_forks, session};
use crate::common::published::{ask, two_answers};
use crate::common::{Store, feed, hybrid, nq, options, tokens};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_load::StreamDrafts;
use nq_model::ModelConfig;
use nq_runtime::{ActivationChoice, EngineKind, LoadOptions, Session, SessionSpec, Speculation};

fn configs() -> [ModelConfig; 3] {
    [("qwen35", true), ("qwen35", false), ("qwen35moe", false)].map(|(gguf, tied)| ModelConfig {
        mtp_layers: 1,
        ..hybrid(gguf, 4, tied)
    })
}

/// As the text grows, is cut, and is another, in both slots.
#[test]
fn drafts_are_those_of_the_published_computation() {
    for config in configs() {
        let store = Store::random(&config, 9);
        let engine = nq(&config, &store);
        let published = PublishedLayer {
            config: &config,
            store: &store,
            drafted: |_, all| all,
        };
        let layer = StreamDrafts::mtp(&config, &store, None, &options(EngineKind::Nq)).unwrap();
        let mut session = session(&*engine);
        let mut drafter = layer.drafter(&mut *session).unwrap();
        // Of `text`, the session holds `fed` tokens at most, and the layer sees those from `from` on.
        let mut check = |slot: usize, text: &[u32], fed: usize, from: usize| {
            let held = session.len(slot);
            let held = session.truncate(slot, held.min(fed));
            feed(&mut *session, slot, &text[held..text.len() - 1]);
            let found = ask(&mut *drafter, &mut *session, slot, text);
            assert_eq!(found.len(), 5, "{} tokens", text.len());
            published.check(&*engine, (text, from), &found, 1e-3);
        };
        let text = tokens(270, 3);
        for length in [2, 3, 7, 8, 140, 270] {
            check(0, &text[..length], length, 0);
        }
        check(1, &tokens(20, 12), 0, 0);
        check(0, &tokens(50, 13), 0, 0);
    }
}

/// The layer has as many pages as the session. Where these are all taken, it forgets the sequence that was not drafted for
/// the longest.
#[test]
fn pages_go_to_the_sequences_that_are_drafted_for() {
    let config = configs()[0].clone();
    let store = Store::random(&config, 9);
    let engine = nq(&config, &store);
    let published = PublishedLayer {
        config: &config,
        store: &store,
        drafted: |_, all| all,
    };
    let layer = StreamDrafts::mtp(&config, &store, None, &options(EngineKind::Nq)).unwrap();
    let spec = SessionSpec {
        pages: Some(4),
        ..session(&*engine).spec()
    };
    let mut session = engine.session(spec).unwrap();
    let mut drafter = layer.drafter(&mut *session).unwrap();
    let texts = [tokens(270, 3), tokens(200, 12)];
    let mut ask = |session: &mut dyn Session, slot: usize, length: usize, from: usize| {
        let text = &texts[slot][..length];
        let new = &text[session.len(slot)..length - 1];
        if !new.is_empty() {
            feed(session, slot, new);
        }
        let found = ask(&mut *drafter, session, slot, text);
        assert_eq!(found.len(), 5, "slot {slot}, {length} tokens");
        published.check(&*engine, (text, from), &found, 1e-3);
    };
    ask(&mut *session, 0, 270, 0);
    ask(&mut *session, 1, 100, 0);
    let held = session.truncate(0, 10);
    ask(&mut *session, 1, 200, 0);
    ask(&mut *session, 0, 30, held);
    ask(&mut *session, 1, 200, 0);
}

#[test]
fn forks_know_what_the_layer_saw_of_the_other_sequence() {
    for config in configs() {
        let store = Store::random(&config, 9);
        let engine = nq(&config, &store);
        let published = PublishedLayer {
            config: &config,
            store: &store,
            drafted: |_, all| all,
        };
        let layer = StreamDrafts::mtp(&config, &store, None, &options(EngineKind::Nq)).unwrap();
        check_forks(&published, (&*engine, &layer), || session(&*engine), 1e-3);
    }
}

/// Whatever is drafted, answers stay as they are, bit for bit.
#[test]
fn drafts_change_no_answer() {
    for config in configs() {
        let int4 = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
        let store = Store::random(&config, 9).quantized(int4);
        let auto = LoadOptions {
            activations: ActivationChoice::Auto,
            ..options(EngineKind::Nq)
        };
        let engine = nq_load::load(&config, &store, &auto, &()).unwrap();
        let layer = StreamDrafts::mtp(&config, &store, None, &auto).unwrap();
        // Copies from a text that repeats itself are drafted beside.
        for (prompt, temperature) in [(tokens(40, 8), 0.0), (tokens(20, 8).repeat(2), 0.7)] {
            let answer = |drafts: bool| {
                let mut session = session(&*engine);
                let speculation = drafts.then(|| {
                    let drafter = layer.drafter(&mut *session).unwrap();
                    Speculation::new(drafter).always().with_copies()
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
}

#[test]
fn models_without_such_a_layer_are_refused() {
    let config = hybrid("qwen35", 4, false);
    let store = Store::random(&config, 9);
    let refused = StreamDrafts::mtp(&config, &store, None, &options(EngineKind::Nq)).err();
    let refused = refused.expect("an error").to_string();
    assert!(refused.contains("mtp_num_hidden_layers"), "{refused}");
}
