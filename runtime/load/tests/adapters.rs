//! Adapters beside a model's weights: a row with one gets the logits of the model that the adapter is merged into in full
//! precision, a row without one those of a model without adapters, bit for bit, whatever else a step computes.

use crate::common::adapted::made;
use crate::common::{
    Store, distance, feed, hybrid, nq, session, small_config, small_mixture, tokens,
};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::KernelSet;
use nq_model::{ModelConfig, find};
use nq_runtime::{
    ActivationChoice, AppliedAdapter, Chunk, DeviceChoice, Engine, LoadOptions, LogitsWanted,
    Session,
};
use nq_testkit::sessions::chunk;
use std::sync::Arc;

/// A model of every family.
fn families() -> Vec<(&'static str, ModelConfig)> {
    let dense = |gguf: &str| ModelConfig {
        architecture: find(|a| a.gguf, gguf).unwrap(),
        ..small_config()
    };
    vec![
        ("qwen3", small_config()),
        ("qwen2", dense("qwen2")),
        ("llama", dense("llama")),
        ("qwen3moe", small_mixture(2, true)),
        ("qwen35", hybrid("qwen35", 6, false)),
        ("qwen35moe", hybrid("qwen35moe", 4, true)),
        ("qwen3next", hybrid("qwen3next", 4, false)),
    ]
}

pub(crate) fn applied(adapter: usize, scale: f32) -> Vec<AppliedAdapter> {
    vec![AppliedAdapter { adapter, scale }]
}

/// All logits of one forward of several sequences, by slot.
pub(crate) fn together(session: &mut dyn Session, texts: &[&[u32]]) -> Vec<Vec<f32>> {
    let chunks = texts
        .iter()
        .enumerate()
        .map(|(slot, tokens)| chunk(slot, tokens, LogitsWanted::All));
    let chunks: Vec<Chunk<'_>> = chunks.collect();
    let logits = session.forward(&chunks, None).unwrap();
    let (vocab, mut rest) = (logits.vocab, logits.data);
    let mut all = Vec::new();
    for text in texts {
        let (own, others) = rest.split_at(text.len() * vocab);
        all.push(own.to_vec());
        rest = others;
    }
    all
}

/// The greatest difference, relative to the greatest logit.
pub(crate) fn off(a: &[f32], b: &[f32]) -> f32 {
    distance(a, b) / b.iter().fold(0f32, |m, v| m.max(v.abs()))
}

#[test]
fn rows_get_what_a_merged_model_gives_and_others_the_bits_of_a_model_without() {
    for (family, c) in families() {
        let base = Store::random(&c, 3);
        let (one, two) = (
            made(&c, &base, 1, |_| true),
            made(&c, &base, 2, |name| {
                name.ends_with("v_proj") || name.ends_with("down_proj")
            }),
        );
        let plain = nq(&c, &base);
        let engine = plain.with_adapters(&[one.lora, two.lora], &[]).unwrap();
        let texts = [tokens(9, 1), tokens(7, 2), tokens(12, 3), tokens(5, 4)];
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let mut adapted = session(engine.as_ref(), 4);
        adapted.adapt(0, &applied(0, 1.0)).unwrap();
        adapted.adapt(2, &applied(1, 1.0)).unwrap();
        adapted.adapt(3, &applied(0, 1.0)).unwrap();
        let mut without = session(plain.as_ref(), 4);
        let stores = [&one.merged, &base, &two.merged, &one.merged];
        let mut merged = stores.map(|s| session(nq(&c, s).as_ref(), 4));
        // The same models, whose weights are rounded otherwise in their last bits.
        let mut nudged = stores.map(|s| session(nq(&c, &s.nudged()).as_ref(), 4));
        let (mut worst, mut moved) = (0f32, 0f32);
        // A prompt each, then a token of each.
        for step in [texts, vec![&[1], &[2], &[3], &[4]]] {
            let found = together(adapted.as_mut(), &step);
            let bits = together(without.as_mut(), &step);
            assert_eq!(found[1], bits[1], "{family}: without an adapter");
            for (slot, (merged, nudged)) in merged.iter_mut().zip(&mut nudged).enumerate() {
                let expected = feed(merged.as_mut(), slot, step[slot]);
                worst = worst.max(off(&found[slot], &expected));
                moved = moved.max(off(&feed(nudged.as_mut(), slot, step[slot]), &expected));
            }
            for slot in [0, 2, 3] {
                let off = off(&found[slot], &bits[slot]);
                assert!(
                    off > 1e-2,
                    "{family}: an adapter changes slot {slot} by {off} only"
                );
            }
        }
        // Recurrences make more of differences of rounding, of the weights' as of these.
        assert!(
            worst < 3.0 * moved,
            "{family}: off by {worst}, and {moved} by rounding"
        );
        let most = if c.delta.is_some() { 1e-4 } else { 1e-5 };
        assert!(moved < most, "{family}: rounding moves logits by {moved}");
    }
}

/// In every scheme, the weights stay as they are, and what is added is in full precision.
#[test]
fn quantized_weights_stay_as_they_are_beside_an_adapter() {
    let c = small_config();
    let random = Store::random(&c, 3);
    let scheme = AffineScheme::new(Bits::B4, Group::Size(16), Zeros::Integer);
    for (kind, base) in [
        ("4 bits", random.quantized(scheme)),
        ("mixed", random.mixed()),
    ] {
        let made = made(&c, &base, 1, |_| true);
        let load = |store: &Store, activations: ActivationChoice, kernels: KernelSet| {
            let options = LoadOptions {
                device: DeviceChoice::Cpu,
                activations,
                kernels,
                ..LoadOptions::default()
            };
            nq_load::load(&c, store, &options, &()).unwrap()
        };
        let text = tokens(20, 1);
        let logits = |engine: &Arc<dyn Engine>, adapter: bool| {
            let mut session = session(engine.as_ref(), 1);
            if adapter {
                session.adapt(0, &applied(0, 1.0)).unwrap();
            }
            feed(session.as_mut(), 0, &text)
        };
        let float = ActivationChoice::F32;
        let expected = logits(&load(&made.merged, float, KernelSet::Fused), false);
        for (activations, kernels, most) in [
            (float, KernelSet::Fused, 1e-5),
            (float, KernelSet::Reference, 1e-5),
            // Inputs of the base's products are rounded to 8 bits, with an adapter as without.
            (ActivationChoice::Auto, KernelSet::Fused, 5e-2),
        ] {
            let plain = load(&base, activations, kernels);
            let adapted = plain
                .with_adapters(std::slice::from_ref(&made.lora), &[])
                .unwrap();
            let off = off(&logits(&adapted, true), &expected);
            assert!(off < most, "{kind}, {activations}, {kernels}: off by {off}");
            assert_eq!(logits(&adapted, false), logits(&plain, false), "{kind}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_pieces_or_on_other_rows() {
    for (family, c) in families() {
        let base = Store::random(&c, 3).quantized(AffineScheme::new(
            Bits::B4,
            Group::Size(16),
            Zeros::Integer,
        ));
        let (one, two) = (made(&c, &base, 1, |_| true), made(&c, &base, 2, |_| true));
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            ..LoadOptions::default()
        };
        let plain = nq_load::load(&c, &base, &options, &()).unwrap();
        let engine = plain.with_adapters(&[one.lora, two.lora], &[]).unwrap();
        let (text, other) = (tokens(24, 1), tokens(40, 2));
        let both = [
            AppliedAdapter {
                adapter: 0,
                scale: 0.5,
            },
            AppliedAdapter {
                adapter: 1,
                scale: -1.25,
            },
        ];
        let whole = {
            let mut session = session(engine.as_ref(), 2);
            session.adapt(0, &both).unwrap();
            feed(session.as_mut(), 0, &text)
        };
        for piece in [1, 5, 17] {
            let mut session = session(engine.as_ref(), 3);
            session.adapt(0, &applied(1, 1.0)).unwrap();
            session.adapt(1, &both).unwrap();
            let mut found = Vec::new();
            for (own, beside) in text.chunks(piece).zip(other.chunks(piece)) {
                found.extend(together(session.as_mut(), &[beside, own])[1].clone());
            }
            assert_eq!(found, whole, "{family}: in pieces of {piece}");
            // A fork has the adapters of what it goes on from.
            let reached = session.fork(1, 2, 24).unwrap();
            assert_eq!(reached, 24, "{family}");
            let next = together(session.as_mut(), &[&[7], &[8]]);
            let forked = session
                .forward(&[chunk(2, &[8], LogitsWanted::All)], None)
                .unwrap()
                .data
                .to_vec();
            assert_eq!(forked, next[1], "{family}: a fork");
        }
    }
}

#[test]
fn a_sequence_changes_its_adapters_while_it_is_empty() {
    let c = small_config();
    let base = Store::random(&c, 3);
    let made = made(&c, &base, 1, |_| true);
    let plain = nq(&c, &base);
    let error = |session: &mut dyn Session, slot: usize, adapters: &[AppliedAdapter]| {
        session.adapt(slot, adapters).unwrap_err().to_string()
    };
    let refused = error(session(plain.as_ref(), 1).as_mut(), 0, &applied(0, 1.0));
    assert!(refused.contains("adapters below 0"), "{refused}");
    let engine = plain
        .with_adapters(std::slice::from_ref(&made.lora), &[])
        .unwrap();
    let mut session = session(engine.as_ref(), 1);
    let refused = error(session.as_mut(), 0, &applied(1, 1.0));
    assert!(refused.contains("adapters below 1"), "{refused}");
    let refused = error(session.as_mut(), 0, &applied(0, f32::NAN));
    assert!(refused.contains("NaN"), "{refused}");
    let refused = error(session.as_mut(), 1, &applied(0, 1.0));
    assert!(refused.contains("a slot below 1"), "{refused}");
    let text = tokens(6, 1);
    let without = feed(session.as_mut(), 0, &text);
    let refused = error(session.as_mut(), 0, &applied(0, 1.0));
    assert!(refused.contains("6 tokens in slot 0"), "{refused}");
    session.truncate(0, 0);
    session.adapt(0, &applied(0, 1.0)).unwrap();
    let with = feed(session.as_mut(), 0, &text);
    assert_ne!(with, without);
    let always = plain.with_adapters(&[made.lora], &applied(0, 1.0)).unwrap();
    let found = feed(
        crate::common::session(always.as_ref(), 1).as_mut(),
        0,
        &text,
    );
    assert_eq!(found, with, "what all sequences have");
    session.truncate(0, 0);
    session.adapt(0, &[]).unwrap();
    assert_eq!(feed(session.as_mut(), 0, &text), without);
}
