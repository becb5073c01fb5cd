//! Sessions that cannot be cut everywhere: who cuts them feeds what is missing, and nothing else changes.

use crate::common;
use crate::common::oracle::{Futures, oracle};
use crate::common::published::published;
use crate::common::{Store, feed, options, small_config, tokens};
use nq_cpu::FEW_ROWS;
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_model::ModelConfig;
use nq_runtime::generate::Sequence;
use nq_runtime::{
    ActivationChoice, Batch, DraftModel, DraftedBy, Encoder, Engine, EngineKind, KvType,
    LoadOptions, Piece, Row, Sampler, SamplingParams, Session, SessionSpec, Speculation,
};
use nq_testkit::sessions::{Cut, answer, limits, piece, session_spec};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Everywhere, at some lengths, and only at the beginning.
const CUTS: [usize; 4] = [1, 4, 16, 10_000];

fn model() -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 6,
        ..small_config()
    }
}

/// A model that computes a few rows exactly as it computes one.
fn load(config: &ModelConfig, bits: Bits) -> (Arc<dyn Engine>, Store) {
    let scheme = AffineScheme::new(bits, Group::Size(64), Zeros::Integer);
    let store = Store::random(config, 9).quantized(scheme);
    let options = LoadOptions {
        activations: ActivationChoice::Auto,
        ..options(EngineKind::Nq)
    };
    let engine = nq_load::load(config, &store, &options, &()).unwrap();
    (engine, store)
}

fn spec(slots: usize, max_rows: usize) -> SessionSpec {
    session_spec(slots, 300, KvType::F16, max_rows)
}

fn cut(engine: &dyn Engine, spec: SessionSpec, every: usize, short: &Arc<AtomicUsize>) -> Cut {
    Cut {
        short: Arc::clone(short),
        ..Cut::new(engine.session(spec).unwrap(), every)
    }
}

/// Makes the drafts for a session, if there are to be any.
type Drafts<'a> = dyn Fn(&mut dyn Session) -> Option<Speculation> + 'a;

/// A conversation: a prompt, its continuation, the first prompt again, and an edited one; all answers.
fn talk(session: &mut dyn Session, drafts: Option<Speculation>) -> Vec<Vec<u32>> {
    let mut sequence = Sequence::new(session, 0).with_drafts(drafts);
    let phrase = tokens(12, 8);
    let first = [&phrase[..], &phrase, &tokens(20, 2), &phrase].concat();
    let mut answers: Vec<Vec<u32>> = Vec::new();
    for turn in 0..4 {
        let prompt = match turn {
            1 => [&first[..], &answers[0], &tokens(9, 4)].concat(),
            3 => [&first[..33], &tokens(11, 5), &phrase].concat(),
            _ => first.clone(),
        };
        let params = SamplingParams {
            temperature: 0.3,
            top_k: 4,
            seed: 5,
            ..SamplingParams::greedy()
        };
        let mut sampler = Sampler::new(params, 0).unwrap();
        let answer = answer(session, &mut sequence, &prompt, &mut sampler, &limits(35));
        answers.push(answer.unwrap().tokens);
        assert_eq!(sequence.tokens().len(), session.len(0));
    }
    answers
}

#[test]
fn answers_stay_and_so_do_those_with_drafts() {
    let config = model();
    let (target, store) = load(&config, Bits::B4);
    let (like, _) = load(&config, Bits::B8);
    let eagle = published(&config, "midlayer", (6, 2, 16), 5);
    let eagle = eagle.load((&config, &store), &options(EngineKind::Nq));
    let eagle = eagle.unwrap();
    // So few rows at a time are computed exactly as each alone: what is computed again stays as it was.
    let plain = talk(&mut *target.session(spec(1, FEW_ROWS)).unwrap(), None);
    assert_eq!(plain[0], plain[2]);
    for every in CUTS {
        for rows in [FEW_ROWS, 5] {
            let short = Arc::new(AtomicUsize::new(0));
            let drafters: [&Drafts<'_>; 4] = [
                &|_| None,
                &|_| Some(Speculation::ngram().always()),
                &|_| {
                    let session = cut(&*like, spec(1, rows), every, &short);
                    let drafter = DraftModel::new(Box::new(session), config.vocab_size);
                    Some(Speculation::new(Box::new(drafter)).always())
                },
                &|session| Some(Speculation::new(eagle.drafter(session).unwrap()).always()),
            ];
            for (i, drafter) in drafters.iter().enumerate() {
                let spec = SessionSpec {
                    drafts: DraftedBy::Layer(eagle.layer()),
                    ..spec(1, rows)
                };
                let mut session = cut(&*target, spec, every, &short);
                let drafts = drafter(&mut session);
                let what = format!("drafter {i}, cut at multiples of {every}, {rows} rows");
                assert_eq!(talk(&mut session, drafts), plain, "{what}");
            }
            assert_eq!(short.load(Ordering::Relaxed) > 20, every > 1);
        }
    }
}

/// Sequences whose drafts are wrong at times, beside one without drafts and with little room in a step.
#[test]
fn a_batch_stays() {
    let config = model();
    let (target, _) = load(&config, Bits::B4);
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| tokens(30 + 9 * i, 5 + i as u64)).collect();
    let run = |session: &mut dyn Session, mut speculation: Option<Speculation>| {
        if let Some(speculation) = &mut speculation {
            (0..2).for_each(|slot| speculation.follow(slot, prompts[slot].clone()));
        }
        for (slot, prompt) in prompts.iter().enumerate() {
            for few in prompt[..prompt.len() - 1].chunks(5) {
                feed(session, slot, few);
            }
        }
        let mut batch = Batch::new(session).with_drafts(speculation.as_mut());
        let mut pieces: Vec<Piece<'_>> = (0..3)
            .map(|slot| {
                piece(
                    slot,
                    &prompts[slot][prompts[slot].len() - 1..],
                    Sampler::new(SamplingParams::greedy(), slot as u64).unwrap(),
                    50 + slot,
                )
            })
            .collect();
        let mut drawn = vec![Vec::new(); 3];
        while !pieces.is_empty() || batch.running() > 0 {
            let each = &mut |slot: usize, token: nq_runtime::Result<u32>| {
                drawn[slot].push(token.unwrap());
                ControlFlow::Continue(())
            };
            batch.step(std::mem::take(&mut pieces), each).unwrap();
        }
        drawn
    };
    let plain = run(&mut *target.session(spec(3, 200)).unwrap(), None);
    let texts = prompts.iter().zip(&plain);
    let texts: Futures = Arc::new(Mutex::new(
        texts.map(|(p, drawn)| [&p[..], drawn].concat()).collect(),
    ));
    for every in CUTS {
        for (rows, wrong_in) in [(200, 3), (200, 1), (9, 3), (5, 3)] {
            let short = Arc::new(AtomicUsize::new(0));
            let mut session = cut(&*target, spec(3, rows), every, &short);
            let speculation = oracle(&texts, wrong_in, false).always();
            assert_eq!(run(&mut session, Some(speculation)), plain);
            assert_eq!(short.load(Ordering::Relaxed) > 0, every > 1);
        }
    }
}

/// What texts have in common is computed again where it cannot be shared.
#[test]
fn texts_are_read_as_before() {
    let (engine, _) = load(&small_config(), Bits::B4);
    let common = tokens(30, 3);
    let texts: Vec<Vec<u32>> = (0..7)
        .map(|i| [&common[..], &tokens(1 + 5 * i, 40 + i as u64)].concat())
        .collect();
    let read = |every: usize, shared: usize, row: &Row| {
        let short = Arc::new(AtomicUsize::new(0));
        let session = cut(&*engine, spec(3, 40), every, &short);
        let mut rows = Vec::new();
        let mut encoder = Encoder::new(Box::new(session), row.clone());
        let each = &mut |_: usize, row: &[f32]| {
            rows.push(row.to_vec());
            Ok(())
        };
        encoder.encode(shared, &texts, each).unwrap();
        rows
    };
    for row in [Row::Hidden, Row::Logits(vec![4, 9])] {
        let plain = read(1, 0, &row);
        for every in CUTS {
            for shared in [0, 17, 30] {
                let found = read(every, shared, &row);
                for (a, b) in found.iter().zip(&plain) {
                    assert!(common::distance(a, b) < 1e-3, "{every}, {shared}");
                }
                assert_eq!(found.len(), plain.len());
            }
        }
    }
}
