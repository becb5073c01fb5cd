//! Models with recurrences over `wgpu` compared with the CPU's engine, and their states with what whole texts give.

use crate::common::{Store, feed, hybrid, restore, tokens, wide_hybrid};
use crate::wgpu::{divergence, engines, logits, on_adapter};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::ModelConfig;
use nq_runtime::batch::decode;
use nq_runtime::{Engine, Error, KvType, LogitsWanted, Sampler, SamplingParams, Session};
use nq_testkit::sessions::{best, chunk, drawn, session_spec};
use std::ops::ControlFlow;
use std::sync::Arc;

const POISON: u32 = 77;

fn session(engine: &dyn Engine, slots: usize) -> Box<dyn Session> {
    engine
        .session(session_spec(slots, 700, KvType::F16, 300))
        .unwrap()
}

/// Tokens without the one that the model cannot read.
fn text(n: usize, seed: u64) -> Vec<u32> {
    let all = tokens(n, seed).into_iter();
    all.map(|t| if t == POISON { t + 1 } else { t }).collect()
}

/// A small hybrid on the adapter, if there is one.
fn small() -> Option<(ModelConfig, Arc<dyn Engine>)> {
    let on = on_adapter()?;
    let config = hybrid("qwen35", 6, false);
    let store = Store::random(&config, 3).with_poison(POISON);
    let [_, engine] = engines(&config, &store, &on);
    Some((config, engine))
}

/// True for logits of one text in two orders of sums.
fn same(a: &[f32], b: &[f32], vocab: usize) -> bool {
    let rows = a.chunks_exact(vocab).zip(b.chunks_exact(vocab));
    a.len() == b.len() && rows.fold(true, |all, (a, b)| all && divergence(a, b) < 1e-7)
}

#[test]
fn hybrids_are_those_of_the_cpu() {
    let Some(on) = on_adapter() else { return };
    let four = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    // The second has the heads of published models, and its value heads in the order of GGUF files.
    for (config, rows) in [
        (hybrid("qwen35", 6, false), 140),
        (wide_hybrid("qwen35", 4, true), 40),
    ] {
        let store = Store::random(&config, 5).quantized(four);
        let tokens = text(rows + 20, 1);
        let [expected, found] = engines(&config, &store, &on).map(|engine| {
            let mut session = session(&*engine, 1);
            // Prompts, steps of several rows, and single rows at the end.
            let mut all = logits(&mut *session, &tokens[..rows], rows / 2);
            all.extend(logits(&mut *session, &tokens[rows..rows + 12], 3));
            all.extend(logits(&mut *session, &tokens[rows + 12..], 1));
            let mut next = vec![best(all.last().unwrap())];
            while next.len() < 64 {
                let row = feed(&mut *session, 0, &next[next.len() - 1..]);
                next.push(best(&row));
            }
            (all, next)
        });
        for (row, (e, f)) in expected.0.iter().zip(&found.0).enumerate() {
            let kl = divergence(e, f);
            assert!(kl < 1e-5, "{rows}, row {row}: KL {kl:e}");
        }
        assert_eq!(expected.1, found.1);
    }
}

/// Steps of several sequences, of one row and of many in any mix, are those of each alone; greedy tokens that the device
/// draws are those of the logits.
#[test]
fn sequences_do_not_see_each_other() {
    let Some((config, engine)) = small() else {
        return;
    };
    let vocab = config.vocab_size;
    let texts = [text(40, 1), text(23, 2), text(31, 3)];
    let mut together = session(&*engine, 3);
    let mut found: [Vec<f32>; 3] = Default::default();
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
        let mut alone = session(&*engine, 1);
        let whole = feed(&mut *alone, 0, text);
        assert!(same(&found[slot], &whole, vocab), "sequence {slot}");
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
        let first = best(&whole[whole.len() - vocab..]);
        let drawn = drawn(&mut *together, slot, first, 10, &mut sampler).unwrap();
        let mut next = first;
        for token in drawn {
            next = best(&feed(&mut *alone, 0, &[next]));
            assert_eq!(token, next);
        }
    }
}

/// A state can be forked whole and cut where it was kept; a cut says which length it reached.
#[test]
fn states_are_cut_where_they_were_kept() {
    let Some((config, engine)) = small() else {
        return;
    };
    let vocab = config.vocab_size;
    let (first, more) = (text(21, 4), text(7, 5));
    let whole = [&first[..], &more].concat();
    let kept = 13;
    let mut s = session(&*engine, 3);
    s.keep_at(0, kept);
    let begin = feed(&mut *s, 0, &first);
    assert_eq!(s.snapshots(), (1, 12));
    assert_eq!(s.fork(0, 1, first.len()).unwrap(), first.len());
    let behind = feed(&mut *s, 0, &more);
    assert!(same(&feed(&mut *s, 1, &more), &behind, vocab));
    assert_eq!(s.truncate(1, whole.len() - 1), first.len());
    assert!(same(&feed(&mut *s, 1, &more), &behind, vocab));
    assert_eq!(s.truncate(0, whole.len()), whole.len());
    for (len, reached) in [(kept - 1, 0), (0, 0), (first.len() - 1, kept), (kept, kept)] {
        assert_eq!(s.reach(0, len), reached);
        assert_eq!(s.fork(0, 2, len).unwrap(), reached);
        assert_eq!([s.len(0), s.len(2)], [whole.len(), reached]);
    }
    let again = feed(&mut *s, 2, &first[kept..]);
    assert!(same(&again, &begin[kept * vocab..], vocab));
    // What a sequence has in common with another stays when the other goes.
    assert_eq!(s.truncate(0, 0), 0);
    assert_eq!(s.truncate(1, first.len() - 1), kept);
    feed(&mut *s, 1, &first[kept..]);
    assert!(same(&feed(&mut *s, 1, &more), &behind, vocab));
    // A sequence that begins anew in a slot sees nothing of the one before.
    let mut all = feed(&mut *s, 0, &first);
    all.extend(feed(&mut *s, 0, &more));
    assert!(same(&all, &[&begin[..], &behind].concat(), vocab));
    assert_eq!(s.truncate(1, kept - 1), 0);
    s.truncate(2, 0);
    s.truncate(0, 0);
    assert_eq!(s.snapshots(), (0, 12));
}

/// A state that is kept at a length which a step drawn on the device reaches.
#[test]
fn states_are_kept_behind_steps_of_the_device() {
    let Some((config, engine)) = small() else {
        return;
    };
    let mut s = session(&*engine, 1);
    let prompt = text(10, 8);
    feed(&mut *s, 0, &prompt);
    s.keep_at(0, 13);
    let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
    let mut drawn = vec![5];
    let each = &mut |token| {
        drawn.push(token);
        ControlFlow::Continue(())
    };
    decode(&mut *s, 0, 5, 6, &mut sampler, None, each).unwrap();
    assert_eq!(s.truncate(0, 14), 13);
    let found = feed(&mut *s, 0, &drawn[3..5]);
    let whole = [&prompt[..], &drawn[..5]].concat();
    let wanted = feed(&mut *session(&*engine, 1), 0, &whole);
    let last = 2 * config.vocab_size;
    assert!(same(
        &found,
        &wanted[wanted.len() - last..],
        config.vocab_size
    ));
}

/// Pages and states that one session gives out continue a sequence in another.
#[test]
fn pages_and_states_move_to_another_session() {
    let Some((config, engine)) = small() else {
        return;
    };
    let (first, more) = (text(PAGE + 21, 4), text(6, 5));
    let mut s = session(&*engine, 1);
    s.keep_at(0, PAGE);
    feed(&mut *s, 0, &first);
    let behind = feed(&mut *s, 0, &more);
    let (mut page, mut state) = (Vec::new(), Vec::new());
    let pages = s.pages().unwrap();
    pages.read(0, 0, &mut page).unwrap();
    pages.read_state(0, PAGE, &mut state).unwrap();
    assert_eq!(page.len(), pages.page_bytes());
    assert_eq!(Some(state.len()), pages.state_bytes());
    let elsewhere = pages.read_state(0, PAGE + 1, &mut Vec::new());
    assert!(matches!(elsewhere, Err(Error::Request { .. })));

    let mut s = session(&*engine, 2);
    restore(&mut *s, &page, &state, &first);
    assert!(same(&feed(&mut *s, 1, &more), &behind, config.vocab_size));
    assert_eq!(s.truncate(1, PAGE + 3), PAGE);
    // A sequence without its states goes back to where it has some.
    s.pages().unwrap().append(1, &page).unwrap();
    assert_eq!(s.truncate(1, 2 * PAGE), PAGE);
}

/// Sequences of random steps, forks and cuts give what each text gives alone, whatever was kept and forgotten.
#[test]
fn random_cuts_and_forks_reach_true_states() {
    let Some((config, engine)) = small() else {
        return;
    };
    let slots = 3;
    let mut s = session(&*engine, slots);
    let mut held: Vec<Vec<u32>> = vec![Vec::new(); slots];
    let mut rng = Philox::new(3, 1);
    let mut below = |n: usize| (rng.uniform() * n as f32) as usize % n;
    let (mut cuts, mut partly) = (0, 0);
    for round in 0..80 {
        let slot = below(slots);
        match below(4) {
            0 if !held[slot].is_empty() => {
                let reached = s.truncate(slot, below(held[slot].len()));
                held[slot].truncate(reached);
                (cuts, partly) = (cuts + 1, partly + usize::from(reached > 0));
            }
            1 if !held[slot].is_empty() => {
                let (to, len) = ((slot + 1) % slots, 1 + below(held[slot].len()));
                let reached = s.fork(slot, to, len).unwrap();
                assert!(reached <= len);
                held[to] = held[slot][..reached].to_vec();
            }
            _ if held[slot].len() < 200 => {
                let more = text(1 + below(40), round);
                s.keep_at(slot, held[slot].len() + 1 + below(60));
                let found = feed(&mut *s, slot, &more);
                held[slot].extend(more);
                let last = |all: &[f32]| all[all.len() - config.vocab_size..].to_vec();
                let alone = feed(&mut *session(&*engine, 1), 0, &held[slot]);
                let d = divergence(&last(&alone), &last(&found));
                assert!(d < 1e-7, "round {round}: {d:e}");
            }
            _ => {}
        }
        let lengths: Vec<usize> = (0..slots).map(|slot| s.len(slot)).collect();
        assert_eq!(lengths, held.iter().map(Vec::len).collect::<Vec<_>>());
    }
    assert!(
        cuts > 5 && partly > 2,
        "{cuts} cuts, {partly} to a kept state"
    );
}

/// What a forward that fails did to a state is not used.
#[test]
fn failures_leave_no_state_behind() {
    let Some((config, engine)) = small() else {
        return;
    };
    let good = text(12, 6);
    let mut s = session(&*engine, 2);
    let wanted = feed(&mut *s, 0, &good);
    feed(&mut *s, 1, &good);
    let bad = [good[0], POISON, good[1]];
    let failed = s.forward(&[chunk(0, &bad, LogitsWanted::All)], None);
    assert!(matches!(failed.map(|_| ()), Err(Error::LogitsNotFinite)));
    assert_eq!([s.len(0), s.len(1)], [0, good.len()]);
    assert!(same(&feed(&mut *s, 0, &good), &wanted, config.vocab_size));
}
