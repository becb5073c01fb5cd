//! Models with recurrences: sequences beside each other and in pieces, states that cannot be cut, and states
//! that a failure leaves behind.

use crate::common::oracle::{Futures, oracle};
use crate::common::{Store, distance, feed, hybrid, options, restore, tokens};
use nq_cpu::FEW_ROWS;
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::ModelConfig;
use nq_runtime::generate::Sequence;
use nq_runtime::models::{Ending, LayerWeights};
use nq_runtime::{
    ActivationChoice, DeviceChoice, Engine, EngineKind, Error, Hidden, KvType, LoadOptions,
    LogitsWanted, Sampler, SamplingParams, Session, Speculation,
};
use nq_testkit::sessions::{answer, chunk, limits, session_spec};
use std::sync::Arc;

const POISON: u32 = 77;

fn load(config: &ModelConfig) -> (Arc<dyn Engine>, Store) {
    let store = Store::random(config, 3).with_poison(POISON);
    let engine = nq_load::load(config, &store, &options(EngineKind::Nq), &()).unwrap();
    (engine, store)
}

/// A model that computes a few rows exactly as each alone.
fn load_exact(config: &ModelConfig) -> Arc<dyn Engine> {
    let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let store = Store::random(config, 3).quantized(scheme);
    let options = LoadOptions {
        activations: ActivationChoice::Auto,
        ..options(EngineKind::Nq)
    };
    nq_load::load(config, &store, &options, &()).unwrap()
}

fn session(engine: &dyn Engine, slots: usize) -> Box<dyn Session> {
    engine
        .session(session_spec(slots, 700, KvType::F32, 700))
        .unwrap()
}

fn configs() -> [ModelConfig; 3] {
    [
        hybrid("qwen35", 6, false),
        hybrid("qwen35moe", 4, false),
        hybrid("qwen4exp", 4, false),
    ]
}

/// The text's tokens, without the one that the model cannot read.
fn text(n: usize, seed: u64) -> Vec<u32> {
    let all = tokens(n, seed).into_iter();
    all.map(|t| if t == POISON { t + 1 } else { t }).collect()
}

/// Steps of several sequences, of one row and of many in any mix, are those of each alone.
#[test]
fn sequences_do_not_see_each_other() {
    for config in configs() {
        let (engine, _) = load(&config);
        let texts = [text(40, 1), text(23, 2), text(31, 3)];
        let mut together = session(&*engine, 3);
        let mut found: [Vec<f32>; 3] = Default::default();
        // In each step, how many tokens of each text.
        for step in [[7, 1, 0], [1, 1, 20], [32, 0, 1], [0, 21, 10]] {
            let mut chunks = Vec::new();
            for (slot, &n) in step.iter().enumerate().filter(|(_, n)| **n > 0) {
                let at = together.len(slot);
                chunks.push(chunk(slot, &texts[slot][at..at + n], LogitsWanted::All));
            }
            let logits = together.forward(&chunks, None).unwrap();
            let mut row = 0;
            for chunk in &chunks {
                for _ in chunk.tokens {
                    found[chunk.slot].extend(logits.row(row));
                    row += 1;
                }
            }
        }
        for (slot, text) in texts.iter().enumerate() {
            let alone = feed(&mut *session(&*engine, 1), 0, text);
            let name = config.architecture;
            assert!(found[slot] == alone, "{name:?}, sequence {slot}");
        }
    }
}

/// A state can be forked whole, cut where it was kept, and thrown away; a cut says which length it reached.
#[test]
fn states_are_cut_where_they_were_kept() {
    for config in configs() {
        let (engine, _) = load(&config);
        let (first, more) = (text(21, 4), text(FEW_ROWS + 3, 5));
        let whole = [&first[..], &more].concat();
        let kept = 13;
        let mut s = session(&*engine, 3);
        assert_eq!(s.snapshots(), (0, 12));
        s.keep_at(0, kept);
        let begin = feed(&mut *s, 0, &first);
        assert_eq!(s.snapshots(), (1, 12));
        // A fork of a whole sequence keeps the state that both have, so that either can return to it.
        assert_eq!(s.fork(0, 1, first.len()).unwrap(), first.len());
        let behind = feed(&mut *s, 0, &more);
        assert_eq!(feed(&mut *s, 1, &more), behind);
        assert_eq!(s.truncate(1, whole.len() - 1), first.len());
        assert_eq!(feed(&mut *s, 1, &more), behind);
        // Longer than it is: nothing to cut.
        assert_eq!(s.truncate(0, whole.len()), whole.len());
        let vocab = config.vocab_size;
        for (len, reached) in [(kept - 1, 0), (0, 0), (first.len() - 1, kept), (kept, kept)] {
            assert_eq!(s.reach(0, len), reached);
            assert_eq!(s.fork(0, 2, len).unwrap(), reached);
            assert_eq!([s.len(0), s.len(2)], [whole.len(), reached]);
        }
        assert_eq!(feed(&mut *s, 2, &first[kept..]), begin[kept * vocab..]);
        // What a sequence has in common with another stays when the other goes.
        assert_eq!(s.truncate(0, 0), 0);
        assert_eq!(s.truncate(1, first.len() - 1), kept);
        feed(&mut *s, 1, &first[kept..]);
        assert_eq!(feed(&mut *s, 1, &more), behind);
        // Before what was kept there is only the beginning, and what was behind a cut is not kept any more.
        assert_eq!(s.truncate(1, kept - 1), 0);
        s.truncate(2, 0);
        assert_eq!(s.snapshots(), (0, 12));
    }
}

/// Rows in which drafts were checked come out of a state again, bit for bit, wherever it is cut.
#[test]
fn states_are_cut_within_rows_that_were_checked() {
    for config in configs() {
        let engine = load_exact(&config);
        let (first, drafted, more) = (text(21, 4), text(FEW_ROWS, 5), text(5, 6));
        for (begin, len) in [(21, FEW_ROWS), (21, 2), (0, 5)] {
            for right in 0..=len {
                let mut s = session(&*engine, 2);
                if begin > 0 {
                    feed(&mut *s, 0, &first);
                }
                assert_eq!(s.draft_rows(), FEW_ROWS);
                let checked = feed(&mut *s, 0, &drafted[..len]);
                let cut = begin + right;
                assert_eq!([s.reach(0, cut), s.truncate(0, cut)], [cut, cut]);
                let found = feed(&mut *s, 0, &more);
                // One row at a time.
                let mut alone = session(&*engine, 1);
                if begin > 0 {
                    feed(&mut *alone, 0, &first);
                }
                let mut wanted = Vec::new();
                for token in drafted[..right].iter().chain(&more) {
                    wanted.extend(feed(&mut *alone, 0, std::slice::from_ref(token)));
                }
                let kept = right * config.vocab_size;
                assert_eq!(checked[..kept], wanted[..kept]);
                assert!(found == wanted[kept..], "{right} of {len} from {begin} on");
            }
        }
        // A fork within them, and a second sequence that is checked in the same step.
        let mut s = session(&*engine, 3);
        for slot in [0, 1] {
            feed(&mut *s, slot, &first);
        }
        let chunks = [0, 1].map(|slot| chunk(slot, &drafted[..4 + slot], LogitsWanted::All));
        s.forward(&chunks, None).unwrap();
        assert_eq!(s.fork(1, 2, first.len() + 2).unwrap(), first.len() + 2);
        assert_eq!(s.truncate(0, first.len() + 2), first.len() + 2);
        let [a, b] = [0, 2].map(|slot| feed(&mut *s, slot, &more));
        assert_eq!(a, b);
    }
}

/// Answers with drafts are those without, whether drafts are right or wrong.
#[test]
fn answers_with_drafts_are_those_without() {
    for config in configs() {
        let engine = load_exact(&config);
        let prompt = text(50, 1);
        let answer = |drafts: Option<Speculation>| {
            let mut s = session(&*engine, 1);
            let mut sequence = Sequence::new(&mut *s, 0).with_drafts(drafts);
            let params = SamplingParams {
                temperature: 0.5,
                top_k: 3,
                seed: 5,
                ..SamplingParams::greedy()
            };
            let mut sampler = Sampler::new(params, 0).unwrap();
            let made = answer(&mut *s, &mut sequence, &prompt, &mut sampler, &limits(120));
            made.unwrap()
        };
        let plain = answer(None);
        let texts: Futures = Arc::default();
        *texts.lock().unwrap() = vec![[&prompt[..], &plain.tokens].concat()];
        for wrong_in in [1, 3, 1000] {
            let found = answer(Some(oracle(&texts, wrong_in, true).always()));
            assert_eq!(found.tokens, plain.tokens);
            let right = found.stats.accepted;
            assert!(
                right * wrong_in >= 60 || wrong_in == 1,
                "{right} with {wrong_in}"
            );
            assert!(found.stats.drafted > right || wrong_in == 1000);
        }
    }
}

/// Pages and states that one session gives out continue a sequence in another.
#[test]
fn pages_and_states_move_to_another_session() {
    for config in configs() {
        let (engine, _) = load(&config);
        let (first, more) = (text(PAGE + 21, 4), text(6, 5));
        let mut s = session(&*engine, 1);
        s.keep_at(0, PAGE);
        feed(&mut *s, 0, &first);
        let behind = feed(&mut *s, 0, &more);
        let (mut page, mut state) = (Vec::new(), Vec::new());
        let pages = s.pages().unwrap();
        pages.read(0, 0, &mut page).unwrap();
        pages.read_state(0, PAGE, &mut state).unwrap();
        assert_eq!(Some(state.len()), pages.state_bytes());
        let elsewhere = pages.read_state(0, PAGE + 1, &mut Vec::new());
        assert!(matches!(elsewhere, Err(Error::Request { .. })));

        let mut s = session(&*engine, 2);
        restore(&mut *s, &page, &state, &first);
        assert_eq!(feed(&mut *s, 1, &more), behind);
        assert_eq!(s.truncate(1, PAGE + 3), PAGE);
        // A sequence without its states goes back to where it has some.
        s.pages().unwrap().append(1, &page).unwrap();
        assert_eq!(s.truncate(1, 2 * PAGE), PAGE);
    }
}

/// Sequences of random steps, forks and cuts give what each text gives alone, whatever was kept and forgotten.
#[test]
fn random_cuts_and_forks_reach_true_states() {
    let [config, ..] = configs();
    let (engine, _) = load(&config);
    let slots = 3;
    let mut s = session(&*engine, slots);
    let mut held: Vec<Vec<u32>> = vec![Vec::new(); slots];
    let mut rng = Philox::new(3, 1);
    let mut below = |n: usize| (rng.uniform() * n as f32) as usize % n;
    let (mut cuts, mut partly) = (0, 0);
    for round in 0..150 {
        let slot = below(slots);
        match below(4) {
            0 if !held[slot].is_empty() => {
                let len = below(held[slot].len());
                let reached = s.truncate(slot, len);
                assert!(reached <= len);
                held[slot].truncate(reached);
                (cuts, partly) = (cuts + 1, partly + usize::from(reached > 0));
            }
            1 if !held[slot].is_empty() => {
                let (to, len) = ((slot + 1) % slots, 1 + below(held[slot].len()));
                let reached = s.fork(slot, to, len).unwrap();
                assert!(reached <= len);
                held[to] = held[slot][..reached].to_vec();
            }
            _ if held[slot].len() < 300 => {
                let more = text(1 + below(40), round);
                s.keep_at(slot, held[slot].len() + 1 + below(60));
                let found = feed(&mut *s, slot, &more);
                held[slot].extend(more);
                let last = found.len() - config.vocab_size;
                let alone = feed(&mut *session(&*engine, 1), 0, &held[slot]);
                let alone = &alone[alone.len() - config.vocab_size..];
                let d = distance(&found[last..], alone);
                assert!(d < 1e-4, "round {round}: {d:e}");
            }
            _ => {}
        }
        let (taken, places) = s.snapshots();
        assert!(taken <= places);
        let lengths: Vec<usize> = (0..slots).map(|slot| s.len(slot)).collect();
        assert_eq!(lengths, held.iter().map(Vec::len).collect::<Vec<_>>());
    }
    (0..slots).for_each(|slot| assert_eq!(s.truncate(slot, 0), 0));
    assert_eq!(s.snapshots().0, 0);
    assert!(
        cuts > 10 && partly > 5,
        "{cuts} cuts, {partly} of them to a kept state"
    );
}

/// What a forward that fails did to a state is not used.
#[test]
fn failures_leave_no_state_behind() {
    for config in configs() {
        let (engine, _) = load(&config);
        let good = text(12, 6);
        let mut s = session(&*engine, 2);
        let wanted = feed(&mut *s, 0, &good);
        feed(&mut *s, 1, &good);
        let bad = [good[0], POISON, good[1]];
        let chunk = |slot, tokens| chunk(slot, tokens, LogitsWanted::All);
        let chunks = [chunk(0, &bad[..])];
        let failed = s.forward(&chunks, None).map(|_| ()).unwrap_err();
        assert!(
            matches!(failed, Error::NotFinite { layer: 0, .. }),
            "{failed}"
        );
        assert_eq!([s.len(0), s.len(1)], [0, good.len()]);
        assert_eq!(feed(&mut *s, 0, &good), wanted);
        // A request that is refused changes nothing.
        let beyond = [config.vocab_size as u32];
        assert!(s.forward(&[chunk(1, &beyond[..])], None).is_err());
        assert_eq!(s.len(1), good.len());
    }
}

/// Layer by layer over whole texts, of which one is longer than a piece.
#[test]
fn the_stepper_runs_recurrences() {
    for config in configs() {
        let (engine, store) = load(&config);
        let texts = [text(9, 1), text(600, 2), text(30, 3)];
        let mut stepper =
            nq_load::stepper(&config, &options(EngineKind::Nq), KvType::F32, usize::MAX).unwrap();
        let embedding = nq_runtime::models::embedding(&store, &config).unwrap();
        let head = nq_runtime::models::head(&store, &config).unwrap();
        let mut hidden = Hidden::embed(&embedding, &texts, config.streams()).unwrap();
        for index in 0..config.num_hidden_layers {
            let weights = LayerWeights::read(&store, &config, index).unwrap();
            stepper
                .layer(index, &weights, &mut hidden, &mut ())
                .unwrap();
        }
        let rows: usize = texts.iter().map(Vec::len).sum();
        let ending = Ending::read(&store, &config).unwrap();
        let logits = stepper.head(&ending, &head, &hidden, 0..rows).unwrap();
        let mut at = 0;
        for text in &texts {
            let want = feed(&mut *session(&*engine, 1), 0, text);
            let d = distance(&logits[at..at + want.len()], &want);
            assert!(
                d < 1e-5,
                "{:?}, {} tokens: {d:e}",
                config.architecture,
                text.len()
            );
            at += want.len();
        }
    }
}

/// Engines without kernels for recurrences say so before they read a weight.
#[test]
fn other_engines_refuse_recurrences() {
    let [config, ..] = configs();
    let store = Store::random(&config, 3);
    let candle = options(EngineKind::Candle);
    let on_gpu = LoadOptions {
        device: DeviceChoice::Cuda(0),
        ..options(EngineKind::Nq)
    };
    for options in [candle, on_gpu] {
        let refused = nq_load::load(&config, &store, &options, &());
        let said = refused.map(|_| ()).unwrap_err().to_string();
        let absent = said.contains("device cuda"); // of a machine without one
        assert!(absent || said.contains("recurrences"), "{said}");
    }
}
