//! Sequences that join, leave, fork and fail in a running batch draw the tokens each draws alone.
#![allow(clippy::print_stdout, reason = "tests say what they did and skip")]

use crate::common::{self, Store, feed, nq, small_config, tokens};
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::ModelConfig;
use nq_runtime::{
    Batch, Continuation, DraftModel, Engine, Error, KvType, Pages, Piece, Sampler, SamplingParams,
    Session, SessionSpec, Speculation,
};
use nq_testkit::sessions::{Cut, piece, session_spec};
use std::ops::ControlFlow;

fn spec(slots: usize, pages: Option<usize>) -> SessionSpec {
    SessionSpec {
        pages,
        ..session_spec(slots, 3 * PAGE, KvType::F16, 256)
    }
}

/// A sequence and its expected state.
struct Known {
    params: SamplingParams,
    stream: u64,
    /// Its prompt, then the tokens drawn.
    tokens: Vec<u32>,
    prompt: usize,
}

impl Known {
    fn sampler(&self) -> Sampler {
        let mut sampler = Sampler::new(self.params, self.stream).expect("valid");
        sampler.begin(&self.tokens[..self.prompt]);
        sampler
    }

    /// Draws the sequence alone and compares. Where logits may be rounded differently, greedy tokens may
    /// differ at a near tie, and sampled tokens anywhere: nothing behind such a place is compared.
    fn check(&self, session: &mut dyn Session, rounds: bool) {
        session.truncate(0, 0);
        let mut sampler = self.sampler();
        let (prompt, drawn) = self.tokens.split_at(self.prompt);
        let vocab = feed(session, 0, &prompt[..1]).len();
        session.truncate(0, 0);
        let parts = prompt.chunks(session.spec().max_rows);
        let mut logits = parts.fold(Vec::new(), |_, part| feed(session, 0, part));
        for (i, &found) in drawn.iter().enumerate() {
            let last = &logits[logits.len() - vocab..];
            let expected = sampler.sample(last).expect("finite");
            if found != expected {
                let gap = last[expected as usize] - last[found as usize];
                let tie = rounds && (!self.params.is_greedy() || gap.abs() < 0.05);
                assert!(
                    tie,
                    "token {i} of {}: {found}, alone {expected}, {gap}",
                    drawn.len()
                );
                return;
            }
            if i + 1 < drawn.len() {
                logits = feed(session, 0, &[found]);
            }
        }
    }
}

fn pages(session: &mut dyn Session) -> &mut dyn Pages {
    session.pages().expect("it has pages")
}

fn free(session: &mut dyn Session) -> Option<usize> {
    session.pages().map(|pages| pages.free())
}

/// `steps` steps of a batch in which up to SLOTS sequences begin, fork, end, are cancelled and run out of
/// pages and positions, at random.
fn at_random<const SLOTS: usize>(
    engine: &dyn Engine,
    steps: u64,
    rounds: bool,
    mut drafts: Option<Speculation>,
) {
    let pages = SLOTS + 1;
    // It takes f32 products of few rows for exact: they differ by less than ever changes a draw here.
    let mut session = Cut {
        exact_rows: Some(8),
        ..Cut::new(
            engine.session(spec(SLOTS, Some(pages))).expect("it fits"),
            1,
        )
    };
    let mut alone = engine.session(spec(1, None)).expect("it fits");
    let mut known: Vec<Option<Known>> = (0..SLOTS).map(|_| None).collect();
    let mut running = [false; SLOTS];
    let (mut ended, mut full, mut forked, mut drawn) = (0, [0, 0], 0, 0);
    let mut batch = Batch::new(&mut session).with_drafts(drafts.as_mut());
    for step in 0..steps {
        let [a, b, c, d] = Philox::block([3, 9], 0, step).map(|w| w as usize);
        let slot = a % SLOTS;
        let mut prompts: Vec<(usize, Vec<u32>)> = Vec::new();
        if b.is_multiple_of(11) && running[slot] {
            let sampler = batch.leave(slot).expect("it is in the batch");
            let k = known[slot].as_ref().expect("it runs");
            assert_eq!(sampler.position(), k.tokens.len() as u64);
            running[slot] = false;
        } else if b % 11 < 5 && !running[slot] {
            // From the beginning of another sequence, even a running one, or from nothing.
            let from = (slot + 1 + c % (SLOTS - 1)) % SLOTS;
            let params = match d % 3 {
                0 => SamplingParams::greedy(),
                1 => SamplingParams {
                    top_k: 12,
                    seed: 5,
                    ..SamplingParams::default()
                },
                _ => SamplingParams {
                    repetition_penalty: 1.2,
                    frequency_penalty: 0.1,
                    temperature: 0.8,
                    seed: 6,
                    ..SamplingParams::default()
                },
            };
            let more = tokens(1 + d % 60, step);
            let (shared, fed) = match &known[from] {
                Some(k) if c % 3 == 0 && k.tokens.len() > 1 => {
                    let shared = 1 + c / 7 % (k.tokens.len() - 1);
                    batch
                        .session()
                        .fork(from, slot, shared)
                        .expect("it has so many");
                    forked += 1;
                    (k.tokens[..shared].to_vec(), more)
                }
                _ => {
                    batch.session().truncate(slot, 0);
                    (Vec::new(), more)
                }
            };
            let all = [shared, fed.clone()].concat();
            if all.len() < 3 * PAGE {
                known[slot] = Some(Known {
                    params,
                    stream: step,
                    prompt: all.len(),
                    tokens: all,
                });
                prompts.push((slot, fed));
            }
        }
        for (slot, _) in &prompts {
            if let (Some(drafts), Some(known)) = (batch.speculation(), &known[*slot]) {
                drafts.follow(*slot, known.tokens.clone());
            }
        }
        let pieces: Vec<Piece<'_>> = (prompts.iter())
            .map(|(slot, fed)| {
                piece(
                    *slot,
                    fed,
                    known[*slot].as_ref().expect("just made").sampler(),
                    1 + d / 64 % 400,
                )
            })
            .collect();
        let result = batch.step(pieces, &mut |slot, token| {
            let k = known[slot].as_mut().expect("only those that run draw");
            match token {
                Ok(token) => {
                    drawn += 1;
                    k.tokens.push(token);
                    if token == 100 {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                }
                Err(Error::PagesFull { .. }) => {
                    full[0] += 1;
                    ControlFlow::Break(())
                }
                Err(Error::ContextFull { .. }) => {
                    full[1] += 1;
                    ControlFlow::Break(())
                }
                Err(e) => panic!("{e}"),
            }
        });
        match result {
            Ok(()) => prompts.iter().for_each(|p| running[p.0] = true),
            // There is no room for the prompt; all other sequences continue.
            Err(Error::PagesFull { .. }) => {
                known[slot] = None;
                batch.session().truncate(slot, 0);
            }
            Err(e) => panic!("{e}"),
        }
        for slot in 0..SLOTS {
            // A sequence that has left still has its sampler.
            if running[slot] && !batch.is_running(slot) {
                assert!(batch.leave(slot).is_some());
                running[slot] = false;
                ended += 1;
                let k = known[slot].take().expect("it ran");
                assert_eq!(batch.session().len(slot), k.tokens.len() - 1);
                k.check(&mut *alone, rounds);
                if c % 2 == 0 {
                    batch.session().truncate(slot, 0);
                } else {
                    known[slot] = Some(k);
                }
            }
        }
    }
    drop(batch);
    println!("{ended} ended, {full:?} full, {forked} forked, {drawn} drawn");
    assert!(ended > steps / 50 && forked > steps / 50 && full[0] > 0);
    for slot in 0..SLOTS {
        session.truncate(slot, 0);
    }
    assert_eq!(free(&mut session), Some(pages));
}

/// Sequences that share 2 1/2 pages take pages of their own only for the rest.
fn forks_share(engine: &dyn Engine) {
    let mut session = engine.session(spec(4, None)).expect("it fits");
    let text = tokens(2 * PAGE + PAGE / 2, 8);
    let all = free(&mut *session).expect("it has pages");
    feed(&mut *session, 0, &text[..200]);
    feed(&mut *session, 0, &text[200..]);
    assert_eq!(free(&mut *session), Some(all - 3));
    let others = tokens(20, 9);
    for slot in 1..4 {
        session
            .fork(0, slot, text.len() - slot)
            .expect("it has so many");
        assert_eq!(free(&mut *session), Some(all - 2 - slot));
        let found = feed(&mut *session, slot, &others[slot..]);
        let mut alone = engine.session(spec(1, None)).expect("it fits");
        feed(&mut *alone, 0, &text[..200]);
        feed(&mut *alone, 0, &text[200..text.len() - slot]);
        let expected = feed(&mut *alone, 0, &others[slot..]);
        assert!(common::distance(&found, &expected) == 0.0, "slot {slot}");
        assert_eq!(
            free(&mut *session),
            Some(all - 3 - slot),
            "one page of its own"
        );
    }
    // The first sequence is not disturbed.
    let found = feed(&mut *session, 0, &others);
    let mut alone = engine.session(spec(1, None)).expect("it fits");
    feed(&mut *alone, 0, &text[..200]);
    feed(&mut *alone, 0, &text[200..]);
    assert!(common::distance(&found, &feed(&mut *alone, 0, &others)) == 0.0);
}

/// Sixteen sequences that share their first ten pages, which a device may read once for all of
/// them, and one that does not, draw together the tokens that each draws alone.
fn many_share(engine: &dyn Engine, rounds: bool) {
    const MANY: usize = 16;
    let long = SessionSpec {
        ctx: 12 * PAGE,
        max_rows: 12 * PAGE,
        ..spec(MANY + 1, None)
    };
    let mut session = engine.session(long).expect("it fits");
    let text = tokens(10 * PAGE + 7, 8);
    feed(&mut *session, 0, &text);
    for slot in 1..MANY {
        session
            .fork(0, slot, text.len() - slot % 3)
            .expect("so many");
    }
    let mut known: Vec<Known> = (0..=MANY)
        .map(|slot| {
            let shared = if slot < MANY {
                text.len() - slot % 3
            } else {
                0
            };
            let mut known = text[..shared].to_vec();
            known.extend(tokens(1 + slot % 4, 30 + slot as u64));
            Known {
                params: SamplingParams::greedy(),
                stream: slot as u64,
                prompt: known.len(),
                tokens: known,
            }
        })
        .collect();
    let prompts: Vec<Vec<u32>> = known.iter().map(|k| k.tokens.clone()).collect();
    let mut batch = Batch::new(&mut *session);
    let mut pieces: Vec<Piece<'_>> = (known.iter().enumerate())
        .map(|(slot, k)| {
            piece(
                slot,
                &prompts[slot][if slot < MANY {
                    text.len() - slot % 3
                } else {
                    0
                }..],
                k.sampler(),
                24,
            )
        })
        .collect();
    while !pieces.is_empty() || batch.running() > 0 {
        let draw = &mut |slot: usize, token: nq_runtime::Result<u32>| {
            known[slot].tokens.push(token.expect("finite"));
            ControlFlow::Continue(())
        };
        batch
            .step(std::mem::take(&mut pieces), draw)
            .expect("it goes on");
    }
    drop(batch);
    let mut alone = engine
        .session(SessionSpec { slots: 1, ..long })
        .expect("it fits");
    for k in &known {
        assert_eq!(k.tokens.len(), k.prompt + 24);
        k.check(&mut *alone, rounds);
    }
}

/// One sequence whose numbers overflow ends; the others are not affected.
fn failures_stay_alone(engine: &dyn Engine, poison: u32) {
    let mut session = engine.session(spec(3, None)).expect("it fits");
    let prompts = [vec![3, 5], vec![7, poison], vec![9]];
    let mut drawn = vec![Vec::new(); 3];
    let mut failed = Vec::new();
    let mut batch = Batch::new(&mut *session);
    let mut pieces: Vec<Piece<'_>> = (prompts.iter().enumerate())
        .map(|(slot, tokens)| {
            piece(
                slot,
                tokens,
                Sampler::new(SamplingParams::greedy(), 0).expect("valid"),
                20,
            )
        })
        .collect();
    while !pieces.is_empty() || batch.running() > 0 {
        batch
            .step(std::mem::take(&mut pieces), &mut |slot, token| {
                match token {
                    Ok(token) => drawn[slot].push(token),
                    Err(_) => failed.push(slot),
                }
                ControlFlow::Continue(())
            })
            .expect("the batch goes on");
    }
    drop(batch);
    assert_eq!(failed, [1]);
    let lengths: Vec<usize> = drawn.iter().map(Vec::len).collect();
    assert_eq!(lengths, [20, 0, 20]);
}

/// A sequence at the end of its context reports it and leaves; the other continues.
fn a_full_context_ends_one(engine: &dyn Engine) {
    let mut session = engine.session(spec(2, None)).expect("it fits");
    let prompts = [tokens(200, 5), vec![3]];
    let mut batch = Batch::new(&mut *session);
    let piece = |slot: usize, range: std::ops::Range<usize>, goes_on: bool| Piece {
        slot,
        tokens: &prompts[slot][range],
        then: goes_on.then(|| Continuation {
            sampler: Sampler::new(SamplingParams::greedy(), 0).expect("valid"),
            tokens: 250,
        }),
    };
    let mut drawn = [0; 2];
    let mut errors = Vec::new();
    let mut steps = vec![
        vec![piece(0, 0..150, false)],
        vec![piece(0, 150..200, true), piece(1, 0..1, true)],
    ];
    while !steps.is_empty() || batch.running() > 0 {
        let pieces = if steps.is_empty() {
            Vec::new()
        } else {
            steps.remove(0)
        };
        batch
            .step(pieces, &mut |slot, token| {
                match token {
                    Ok(_) => drawn[slot] += 1,
                    Err(e) => errors.push((slot, e.to_string())),
                }
                ControlFlow::Continue(())
            })
            .expect("the batch goes on");
    }
    drop(batch);
    let full = Error::ContextFull {
        capacity: 3 * PAGE,
        needed: 3 * PAGE + 1,
    };
    assert_eq!(errors, [(0, full.to_string())]);
    // The last token drawn has no position.
    assert_eq!(drawn, [3 * PAGE - 200 + 1, 250]);
    assert_eq!((session.len(0), session.len(1)), (3 * PAGE, 250));
}

/// Pages read from one session and appended to another hold the same numbers; only whole pages fit.
fn pages_go_to_another_session(engine: &dyn Engine, types: &[KvType]) {
    for &kv in types {
        let spec = SessionSpec {
            kv,
            ..spec(2, Some(3))
        };
        let text = tokens(2 * PAGE + 30, 8);
        let mut from = engine.session(spec).expect("it fits");
        feed(&mut *from, 1, &text[..200]);
        // What follows the pages is fed in the same parts: on a GPU, others have other roundings.
        feed(&mut *from, 1, &text[200..2 * PAGE]);
        feed(&mut *from, 1, &text[2 * PAGE..2 * PAGE + 10]);
        let mut to = engine.session(spec).expect("it fits");
        let bytes = pages(&mut *from).page_bytes();
        for index in 0..2 {
            let mut page = Vec::new();
            pages(&mut *from)
                .read(1, index, &mut page)
                .expect("it has so many");
            assert_eq!(page.len(), bytes);
            pages(&mut *to).append(0, &page).expect("it fits");
        }
        assert_eq!((to.len(0), free(&mut *to)), (2 * PAGE, Some(1)));
        feed(&mut *to, 0, &text[2 * PAGE..2 * PAGE + 10]);
        let expected = feed(&mut *from, 1, &text[2 * PAGE + 10..]);
        let found = feed(&mut *to, 0, &text[2 * PAGE + 10..]);
        assert!(common::distance(&found, &expected) == 0.0, "{kv}");

        let mut page = Vec::new();
        for (slot, index) in [(1, 2), (0, 0), (2, 0)] {
            assert!(pages(&mut *from).read(slot, index, &mut page).is_err());
        }
        pages(&mut *from).read(1, 0, &mut page).expect("it has it");
        assert!(
            pages(&mut *to).append(0, &page).is_err(),
            "it ends within a page"
        );
        assert!(
            pages(&mut *to).append(2, &page).is_err(),
            "there is no such slot"
        );
        assert!(
            pages(&mut *to).append(1, &page[1..]).is_err(),
            "a byte is missing"
        );
        assert!(matches!(
            pages(&mut *to).append(1, &page),
            Err(Error::PagesFull { .. })
        ));
        to.truncate(0, PAGE);
        for _ in 0..2 {
            pages(&mut *to).append(0, &page).expect("it fits");
        }
        to.truncate(1, 0);
        assert!(matches!(
            pages(&mut *to).append(0, &page),
            Err(Error::ContextFull { .. })
        ));
    }
}

fn config() -> ModelConfig {
    ModelConfig {
        max_position_embeddings: 1024,
        ..small_config()
    }
}

/// Also where tokens are drafted, by the same model from another session.
#[test]
fn drafted_sequences_at_random_give_what_each_gives_alone() {
    let config = config();
    let engine = nq(&config, &Store::random(&config, 23));
    // As few pages as the sequences have: it forgets some of them now and then.
    let session = engine.session(spec(9, Some(10))).expect("it fits");
    let model = DraftModel::new(session, config.vocab_size);
    let drafts = Speculation::new(Box::new(model)).always();
    at_random::<9>(&*engine, 3_000, false, Some(drafts));
}

#[test]
fn sequences_at_random_give_what_each_gives_alone() {
    let config = config();
    let engine = nq(&config, &Store::random(&config, 23));
    at_random::<9>(&*engine, 10_000, false, None);
}

#[test]
fn forked_sequences_share_pages() {
    let config = config();
    forks_share(&*nq(&config, &Store::random(&config, 23)));
}

#[test]
fn many_sequences_over_the_same_pages_draw_what_each_does_alone() {
    let config = config();
    many_share(&*nq(&config, &Store::random(&config, 23)), false);
}

#[test]
fn pages_are_the_same_in_another_session() {
    let config = config();
    let engine = nq(&config, &Store::random(&config, 23));
    pages_go_to_another_session(&*engine, &[KvType::F32, KvType::F16, KvType::Int8]);
}

#[test]
fn a_full_context_ends_one_sequence() {
    let config = config();
    a_full_context_ends_one(&*nq(&config, &Store::random(&config, 23)));
}

#[test]
fn one_sequence_fails_alone() {
    let config = config();
    let store = Store::random(&config, 23).with_poison(77);
    failures_stay_alone(&*nq(&config, &store), 77);
}

mod cuda {
    use super::*;
    use nq_formats::{AffineScheme, Bits, Group, Zeros};
    use nq_kernels::KernelSet;
    use std::sync::Arc;

    fn gpu(store: &Store, config: &ModelConfig) -> Option<Arc<dyn Engine>> {
        common::gpu_engine(config, store, KernelSet::Fused)
    }

    fn config() -> ModelConfig {
        ModelConfig {
            hidden_size: 320,
            intermediate_size: 520,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 128,
            ..super::config()
        }
    }

    #[test]
    fn sequences_at_random_give_what_each_gives_alone_on_a_gpu() {
        let config = config();
        let scheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
        let store = Store::random(&config, 23).quantized(scheme);
        if let Some(engine) = gpu(&store, &config) {
            at_random::<9>(&*engine, 10_000, true, None);
            forks_share(&*engine);
            a_full_context_ends_one(&*engine);
            pages_go_to_another_session(&*engine, &[KvType::F16, KvType::Int8]);
        }
    }

    /// Drafted by the same model from another session.
    #[test]
    fn drafted_sequences_at_random_give_what_each_gives_alone_on_a_gpu() {
        let config = config();
        let scheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
        let store = Store::random(&config, 23).quantized(scheme);
        if let Some(engine) = gpu(&store, &config) {
            let session = engine.session(spec(3, Some(4))).expect("it fits");
            let model = DraftModel::new(session, config.vocab_size);
            let drafts = Speculation::new(Box::new(model)).always();
            at_random::<3>(&*engine, 4_000, true, Some(drafts));
        }
    }

    #[test]
    fn many_sequences_over_the_same_pages_draw_what_each_does_alone_on_a_gpu() {
        // Enough heads for reading shared pages once to pay.
        let config = ModelConfig {
            num_attention_heads: 16,
            num_key_value_heads: 8,
            ..config()
        };
        if let Some(engine) = gpu(&Store::random(&config, 23), &config) {
            many_share(&*engine, true);
        }
    }

    #[test]
    fn one_sequence_fails_alone_on_a_gpu() {
        let config = config();
        let store = Store::random(&config, 23).with_poison(77);
        if let Some(engine) = gpu(&store, &config) {
            failures_stay_alone(&*engine, 77);
        }
    }
}
