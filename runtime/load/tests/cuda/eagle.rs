//! EAGLE-3 heads on a GPU. Without one the tests say that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::common;
use crate::common::published::{ask, published, streams};
use crate::common::{Store, feed, fused_config, tokens};
use nq_formats::{AffineScheme, Bits, Group, WeightStore, Zeros};
use nq_kernels::KernelSet;
use nq_load::StreamDrafts;
use nq_model::names::EMBEDDING;
use nq_model::{Dims, ModelConfig};
use nq_runtime::{
    Batch, DeviceChoice, DraftedBy, Engine, Error, KvType, LoadOptions, Result, Sampler,
    SamplingParams, Session, SessionSpec, Speculation,
};
use nq_testkit::sessions::{piece, session_spec};
use serde_json::json;
use std::ops::ControlFlow;
use std::sync::Arc;

const HEADS: (usize, usize, usize) = (4, 2, 128);

fn model() -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 8,
        vocab_size: 1001,
        max_position_embeddings: 2048,
        ..fused_config()
    }
}

fn target(c: &ModelConfig) -> Option<(Arc<dyn Engine>, Store)> {
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let store = Store::random(c, 9).quantized(int4);
    let engine = common::gpu_engine(c, &store, KernelSet::Fused)?;
    Some((engine, store))
}

fn on_gpu() -> LoadOptions {
    LoadOptions {
        device: DeviceChoice::Cuda(0),
        ..LoadOptions::default()
    }
}

fn session(
    engine: &dyn Engine,
    head: Option<&StreamDrafts>,
    kv: KvType,
    pages: Option<usize>,
) -> Box<dyn Session> {
    let spec = SessionSpec {
        pages,
        drafts: head.map_or(DraftedBy::Nothing, |head| DraftedBy::Layer(head.layer())),
        ..session_spec(3, 1500, kv, 1000)
    };
    engine.session(spec).unwrap()
}

/// As the text grows, is cut, and is another, in two slots; prompts in one part and in several.
#[test]
fn drafts_are_those_of_the_published_computation() {
    let c = model();
    let Some((engine, store)) = target(&c) else {
        return;
    };
    let embedding = store
        .matrix(EMBEDDING, Dims::new(c.vocab_size, c.hidden_size))
        .unwrap();
    let (mut same, mut all) = (0, 0);
    for (taps, before_residual, kv) in [
        (None, false, KvType::F16),
        (Some([1, 4, 8]), true, KvType::Int8),
    ] {
        let mut head = published(&c, "midlayer", HEADS, 5);
        head.config["norm_before_residual"] = json!(before_residual);
        if let Some(taps) = taps {
            head.config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": taps});
        }
        let eagle = head.load((&c, &store), &on_gpu()).unwrap();
        let mut session = session(&*engine, Some(&eagle), kv, None);
        let mut drafter = eagle.drafter(&mut *session).unwrap();
        // The session computes `first` behind what it holds, and forgets what is behind the first `kept` tokens. The
        // head may have kept a row with the token that stood there before: `old`.
        let mut check =
            |slot: usize, first: &[u32], kept: usize, text: &[u32], old: Option<u32>| {
                if !first.is_empty() {
                    feed(&mut *session, slot, first);
                }
                session.truncate(slot, kept);
                let held = session.len(slot);
                feed(&mut *session, slot, &text[held..text.len() - 1]);
                let after = taps.unwrap_or([2, 4, 5]);
                let seen = streams(&*engine, kv, &text[..text.len() - 1], after);
                let mut rows: Vec<(u32, Vec<f64>)> = text[1..].iter().copied().zip(seen).collect();
                if let Some(token) = old {
                    rows[kept - 1].0 = token;
                }
                let found = ask(&mut *drafter, &mut *session, slot, text);
                assert_eq!(found.len(), 5, "{} tokens", text.len());
                same += head.agrees(&embedding, &rows, &found, 0.05);
                all += 5;
            };
        let text = tokens(1400, 3);
        // One row, a few, as many as a step takes, more, and more than are computed together.
        for length in [2, 3, 7, 8, 24, 41, 140, 1000, 1001, 1017, 1018, 1400] {
            check(0, &[], length, &text[..length], None);
        }
        let other = [&text[..100], &tokens(30, 8)].concat();
        check(0, &[], 100, &other, Some(text[100]));
        let short = tokens(40, 12);
        check(1, &[], 0, &short[..25], None);
        // Of a step that checked drafts some rows stay.
        let cut = [&short[..27], &[9, 3]].concat();
        check(1, &short[24..29], 27, &cut, None);
        check(0, &[], 0, &tokens(50, 13), None);
        // Nothing is known of tokens that were computed before: those of a fork.
        session.fork(0, 1, 30).unwrap();
        let forked = tokens(50, 13)[..31].to_vec();
        assert!(ask(&mut *drafter, &mut *session, 1, &forked).is_empty());
        // Nor is there a draft behind a context that is full.
        let full = tokens(1501, 4);
        feed(&mut *session, 2, &full[..900]);
        feed(&mut *session, 2, &full[900..1500]);
        assert_eq!(ask(&mut *drafter, &mut *session, 2, &full).len(), 1);
    }
    println!("{same} of {all} drafted tokens are those of the published computation");
    assert!(same > all * 9 / 10, "{same} of {all}");
}

/// A sequence: its prompt, and the tokens that it has drawn.
type Answer = (Vec<u32>, Vec<u32>);

/// Answers of three sequences that join one after the other, alone in steps of one row if there is no head.
fn answers(
    engine: &dyn Engine,
    head: Option<&StreamDrafts>,
    pages: Option<usize>,
) -> (Vec<Answer>, usize) {
    let mut session = session(engine, head, KvType::F16, pages);
    let mut speculation = head.map(|head| {
        let drafter = head.drafter(&mut *session).unwrap();
        Speculation::new(drafter).always().at_most(4)
    });
    let mut answers: Vec<Answer> = [200, 30, 3]
        .iter()
        .enumerate()
        .map(|(i, &n)| (tokens(n, 20 + i as u64), Vec::new()))
        .collect();
    let prompts: Vec<Vec<u32>> = answers.iter().map(|a| a.0.clone()).collect();
    let mut batch = Batch::new(&mut *session).with_drafts(speculation.as_mut());
    let mut step = 0;
    while step < 9 || batch.running() > 0 {
        let slot = step / 4;
        let mut pieces = Vec::new();
        if step % 4 == 0 && slot < 3 {
            if let Some(drafts) = batch.speculation() {
                drafts.follow(slot, prompts[slot].clone());
            }
            let mut sampler = Sampler::new(SamplingParams::greedy(), 1).unwrap();
            sampler.begin(&prompts[slot]);
            pieces.push(piece(slot, &prompts[slot], sampler, 90));
        }
        let each = &mut |slot: usize, token: Result<u32>| match token {
            Ok(token) => {
                answers[slot].1.push(token);
                ControlFlow::Continue(())
            }
            Err(Error::PagesFull { .. }) => ControlFlow::Break(()),
            Err(e) => panic!("{e}"),
        };
        batch.step(pieces, each).unwrap();
        step += 1;
    }
    drop(batch);
    let drafted = speculation.map_or(0, |s| s.counts().drafted);
    (answers, drafted)
}

/// Whatever a head drafts, and also where there are no pages for it, each sequence draws what it draws alone, up
/// to near ties.
#[test]
fn drafts_change_no_answer() {
    let c = model();
    let Some((engine, store)) = target(&c) else {
        return;
    };
    let head = published(&c, "midlayer", HEADS, 5);
    let eagle = head.load((&c, &store), &on_gpu()).unwrap();
    let mut alone = session(&*engine, None, KvType::F16, None);
    for pages in [None, Some(5)] {
        let (found, drafted) = answers(&*engine, Some(&eagle), pages);
        let (plain, none) = answers(&*engine, None, pages);
        assert_eq!(none, 0);
        assert!(drafted > 100, "{drafted}");
        for (i, (prompt, drawn)) in found.iter().enumerate() {
            let full = plain[i].1.len() < 90;
            assert!(full || drawn.len() == 90, "{i}: {} tokens", drawn.len());
            alone.truncate(0, 0);
            let mut logits = feed(&mut *alone, 0, prompt);
            for (at, &token) in drawn.iter().enumerate() {
                let row = &logits[logits.len() - c.vocab_size..];
                let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let less = best - row[token as usize];
                assert!(less < 0.05, "{i}: token {at} is {less} below the best");
                logits = feed(&mut *alone, 0, &[token]);
            }
        }
    }
}

/// Shapes without kernels and heads elsewhere are refused.
#[test]
fn heads_that_do_not_fit_are_refused() {
    let c = model();
    let Some((engine, store)) = target(&c) else {
        return;
    };
    let refused = |error: Option<Error>, words: &[&str]| {
        let error = error.expect("an error").to_string();
        assert!(
            words.iter().all(|w| error.contains(w)),
            "{words:?}: {error}"
        );
    };
    let narrow = published(&c, "midlayer", (4, 2, 64), 5);
    let found = narrow.load((&c, &store), &on_gpu()).err();
    refused(found, &["head_dim", "128", "64"]);
    let many = published(&c, "midlayer", (18, 2, 128), 5);
    let found = many.load((&c, &store), &on_gpu()).err();
    refused(found, &["query heads per key head", "9"]);
    let head = published(&c, "midlayer", HEADS, 5);
    let on_cpu = common::options(nq_runtime::EngineKind::Nq);
    let elsewhere = head.load((&c, &store), &on_cpu).unwrap();
    let mut session = session(&*engine, Some(&elsewhere), KvType::F16, None);
    refused(
        elsewhere.drafter(&mut *session).err(),
        &["EAGLE-3 head", "a GPU", "the CPU"],
    );
    // One whose streams are no numbers stops drafting.
    let mut nan = head;
    nan.tensors.get_mut("norm.weight").unwrap().1[3] = f32::NAN;
    let eagle = nan.load((&c, &store), &on_gpu()).unwrap();
    let mut drafter = eagle.drafter(&mut *session).unwrap();
    refused(
        eagle.drafter(&mut *session).err(),
        &["drafters of a session", "one"],
    );
    let mut unprepared = self::session(&*engine, None, KvType::F16, None);
    let found = eagle.drafter(&mut *unprepared).err();
    refused(found, &["EAGLE-3 head", "a session made for it", "Nothing"]);
    feed(&mut *session, 0, &[1, 2, 3]);
    let mut drafts = [nq_runtime::interface::Draft {
        slot: 0,
        text: &[1, 2, 3, 4],
        most: 2,
        tokens: Vec::new(),
        kind: 0,
    }];
    refused(drafter.draft(&mut drafts).err(), &["not finite"]);
}
