//! Drafted tokens change the time of an answer and nothing else.

mod common;

use common::{Store, feed, options, small_config, tokens};
use nq_formats::{AffineScheme, Bits, Group, ModelConfig, Zeros};
use nq_kernels::cpu::{FEW_ROWS, Isa, IsaChoice};
use nq_runtime::generate::{Generated, Limits, Sequence, StopReason, generate};
use nq_runtime::{
    ActivationChoice, Chunk, Drafting, Engine, EngineKind, KvType, LoadOptions, LogitsWanted,
    Sampler, SamplingParams, Session, SessionSpec,
};
use std::ops::ControlFlow;

fn limits(max_tokens: usize, stop: &[u32], drafting: Drafting) -> Limits<'_> {
    Limits {
        stop,
        max_tokens,
        interrupt: None,
        drafting,
    }
}

fn stores(config: &ModelConfig) -> [(&'static str, Store); 3] {
    let plain = Store::random(config, 9);
    let int = |bits, group| AffineScheme::new(bits, Group::Size(group), Zeros::Integer);
    [
        ("int4", plain.quantized(int(Bits::B4, 64))),
        ("int8", plain.quantized(int(Bits::B8, 128))),
        ("dense", plain),
    ]
}

fn session(engine: &dyn Engine, kv: KvType, ctx: usize) -> Box<dyn Session> {
    let spec = SessionSpec {
        slots: 2,
        ctx,
        pages: None,
        kv,
        max_rows: 400,
    };
    engine.session(spec).unwrap()
}

/// On every instruction set, a chunk of a few rows gives, bit for bit, the logits of feeding its
/// tokens one by one.
#[test]
fn a_few_rows_are_what_each_alone_is() {
    let config = small_config();
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    for isa in isas {
        for (name, store) in stores(&config) {
            for activations in [ActivationChoice::Auto, ActivationChoice::F32] {
                let options = LoadOptions {
                    isa: IsaChoice::Force(isa),
                    activations,
                    ..options(EngineKind::Nq)
                };
                let engine = nq_runtime::load(&config, &store, &options, &()).unwrap();
                for kv in [KvType::F16, KvType::Int8] {
                    let mut s = session(&*engine, kv, 400);
                    let integers = activations == ActivationChoice::Auto && name != "dense";
                    assert_eq!(
                        s.exact_rows(),
                        if integers { FEW_ROWS } else { 1 },
                        "{name}"
                    );
                    let what = format!("{name} {activations} {kv} {isa}");
                    check_rows(&mut *s, &what);
                }
            }
        }
    }
}

fn check_rows(s: &mut dyn Session, what: &str) {
    let text = tokens(330, 4);
    for (start, rows) in [(3, 2), (126, 8), (250, 5), (300, 7)] {
        let rows = rows.min(s.exact_rows());
        for slot in [0, 1] {
            s.truncate(slot, 0);
            feed(s, slot, &text[..start]);
        }
        let part = &text[start..start + rows];
        let alone: Vec<Vec<f32>> = part.iter().map(|&t| feed(s, 0, &[t])).collect();
        let chunk = Chunk {
            slot: 1,
            tokens: part,
            logits: LogitsWanted::All,
        };
        let logits = s.forward(&[chunk], None).unwrap();
        for (i, alone) in alone.iter().enumerate() {
            let same = logits.row(i) == &alone[..];
            assert!(same, "{what}: {rows} rows from {start}, row {i}");
        }
    }
}

/// An answer to `prompt`, and the sequence's length after it.
fn answer(
    engine: &dyn Engine,
    params: &SamplingParams,
    prompt: &[u32],
    limits: &Limits<'_>,
    ctx: usize,
) -> (Generated, usize) {
    let mut session = session(engine, KvType::F16, ctx);
    let mut sequence = Sequence::new(&mut *session, 0);
    let mut sampler = Sampler::new(*params, 3).unwrap();
    // Of few tokens, so that the text repeats itself.
    sampler.set_mask(Some(&[0b1111, 0, 0, 0]));
    let mut seen = Vec::new();
    let answer = generate(
        &mut *session,
        &mut sequence,
        prompt,
        &mut sampler,
        limits,
        &mut |token| {
            seen.push(token);
            ControlFlow::Continue(())
        },
    )
    .unwrap();
    assert_eq!(seen, answer.tokens);
    assert_eq!(sequence.tokens().len(), session.len(0));
    (answer, session.len(0))
}

/// The same answer with drafts and without, however it is sampled and wherever it ends.
#[test]
fn drafts_change_no_answer() {
    let config = small_config();
    let sampled = |repetition_penalty| SamplingParams {
        temperature: 0.05,
        top_k: 4,
        seed: 5,
        repetition_penalty,
        ..SamplingParams::greedy()
    };
    let mut accepted = 0;
    for (name, store) in stores(&config) {
        let options = LoadOptions {
            activations: ActivationChoice::Auto,
            ..options(EngineKind::Nq)
        };
        let engine = nq_runtime::load(&config, &store, &options, &()).unwrap();
        for params in [SamplingParams::greedy(), sampled(1.0), sampled(1.05)] {
            let phrase = tokens(12, 8);
            let prompt = [&phrase[..], &phrase, &tokens(20, 2), &phrase].concat();
            let run = |max: usize, stop: &[u32], ctx: usize| {
                let (plain, end) = answer(
                    &*engine,
                    &params,
                    &prompt,
                    &limits(max, stop, Drafting::None),
                    ctx,
                );
                assert_eq!(plain.stats.drafted, 0);
                let mut right = 0;
                for drafting in [Drafting::Ngram, Drafting::NgramAlways] {
                    let limits = limits(max, stop, drafting);
                    let (drafted, same_end) = answer(&*engine, &params, &prompt, &limits, ctx);
                    let what = format!("{name}, {max} tokens, stop {stop:?}, context {ctx}");
                    assert_eq!(plain.tokens, drafted.tokens, "{what}");
                    assert_eq!(plain.stop, drafted.stop, "{what}");
                    assert_eq!(plain.stats.tokens, drafted.stats.tokens, "{what}");
                    assert_eq!(end, same_end, "{what}");
                    right = drafted.stats.accepted;
                    assert!(right <= drafted.stats.drafted);
                }
                (plain, right)
            };
            let (free, right) = run(120, &[], 400);
            accepted += right;
            // All kinds of ends, also with a draft that runs past them.
            for max in [1, 2, 3, 50, 51, 52, 53] {
                run(max, &[], 400);
            }
            for at in [5, 40, 41, 42, 43] {
                let (ended, _) = run(120, &[free.tokens[at]], 400);
                assert_eq!(ended.stop, StopReason::Eos(free.tokens[at]));
            }
            for ctx in [prompt.len() + 30, prompt.len() + 33] {
                let (ended, _) = run(120, &[], ctx);
                assert_eq!(ended.stop, StopReason::ContextFull);
            }
        }
    }
    assert!(accepted > 50, "{accepted} drafted tokens were right");
}
