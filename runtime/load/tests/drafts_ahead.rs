//! Drafts on a device that draws tokens itself, a fake one.

use crate::common::device::{DEPTH, Device, VOCAB, alone, piece};
use crate::common::oracle::{Futures, oracle, reading_oracle};
use nq_kernels::rng::Philox;
use nq_runtime::speculation::DraftCounts;
use nq_runtime::{Batch, DraftModel, Error, Result, Speculation};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

/// A sequence: its sampler's stream, its prompt and what it has drawn.
type Known = Option<(u64, Vec<u32>, Vec<u32>)>;

/// Lets sequences begin, be cancelled, end at a token, at their length, at the end of the context and
/// where there are no pages, at random; each draws what it draws alone.
fn at_random(positions: usize, speculation: Speculation, texts: &Futures) -> DraftCounts {
    at_random_cut(positions, speculation, texts, 1)
}

/// As [`at_random`], where sequences can be cut only at multiples of `every` tokens.
fn at_random_cut(
    positions: usize,
    mut speculation: Speculation,
    texts: &Futures,
    every: usize,
) -> DraftCounts {
    const SLOTS: usize = 5;
    const END: u32 = 3;
    let mut device = Device::new(SLOTS, SLOTS, positions)
        .checking(9)
        .cut_at(every);
    let mut batch = Batch::new(&mut device).with_drafts(Some(&mut speculation));
    let mut known: Vec<Known> = vec![None; SLOTS];
    let (mut ended, mut errors) = (0, 0);
    for step in 0..4000u64 {
        let [a, b, c, _] = Philox::block([1, 2], 0, step).map(|w| w as usize);
        let slot = a % SLOTS;
        let first = |i: usize| ((step as usize + i) % VOCAB) as u32;
        let prompt: Vec<u32> = (0..1 + c % 9).map(first).collect();
        let mut pieces = Vec::new();
        match (batch.is_running(slot), b % 16) {
            (true, 0) => drop(batch.leave(slot).expect("it runs")),
            (false, 0..3) => {
                batch.session().truncate(slot, 0);
                known[slot] = Some((step, prompt.clone(), Vec::new()));
                texts.lock().unwrap()[slot] = [&prompt[..], &alone(step, &prompt, 70)].concat();
                let drafts = batch.speculation().expect("it drafts");
                drafts.follow(slot, prompt.clone());
                pieces.push(piece(slot, &prompt, step, 1 + c / 16 % 70));
            }
            _ => {}
        }
        let mut gone = 0;
        let result = batch.step(pieces, &mut |slot, token| {
            match token {
                Ok(token) => {
                    known[slot].as_mut().expect("it runs").2.push(token);
                    if token == END {
                        return ControlFlow::Break(());
                    }
                }
                Err(Error::PagesFull { .. } | Error::ContextFull { .. }) => gone += 1,
                Err(e) => panic!("{e}"),
            }
            ControlFlow::Continue(())
        });
        errors += gone;
        match result {
            Ok(()) => {}
            Err(Error::PagesFull { .. }) => known[slot] = None,
            Err(e) => panic!("{e}"),
        }
        for (slot, known) in known.iter_mut().enumerate() {
            if batch.is_running(slot) {
                continue;
            }
            if let Some((stream, prompt, drawn)) = known.take() {
                ended += 1;
                assert_eq!(drawn, alone(stream, &prompt, drawn.len()), "step {step}");
                let fed = (prompt.len() + drawn.len()).saturating_sub(1);
                let held = batch.session().len(slot);
                let whole = held == fed || every > 1 && held == fed / every * every;
                assert!(whole, "step {step}: {held} of {fed}");
                if let Some(sampler) = batch.sampler(slot) {
                    assert_eq!(sampler.position() as usize, fed + 1, "step {step}");
                }
                batch.session().truncate(slot, 0);
            }
        }
    }
    drop(batch);
    assert!(ended > 200 && errors > 0, "{ended} ended, {errors} errors");
    speculation.counts()
}

/// The draws say what is right, however good a drafter is.
#[test]
fn drafts_change_no_sequence() {
    let texts: Futures = Arc::new(Mutex::new(vec![Vec::new(); 5]));
    for positions in [400, 90] {
        for (wrong_in, free) in [(1, false), (1, true), (3, true), (7, false)] {
            let counts = at_random(positions, oracle(&texts, wrong_in, free).always(), &texts);
            let DraftCounts {
                drafted, accepted, ..
            } = counts;
            match wrong_in {
                1 => assert!(drafted > 500 && accepted < drafted / 8, "{counts:?}"),
                _ => assert!(accepted > drafted / 4 && drafted > accepted, "{counts:?}"),
            }
            // As far as it pays.
            at_random(positions, oracle(&texts, wrong_in, free), &texts);
        }
        for wrong_in in [1, 3] {
            at_random(positions, reading_oracle(&texts, wrong_in).always(), &texts);
            at_random(positions, reading_oracle(&texts, wrong_in), &texts);
        }
    }
}

/// What cannot be kept when a draft is cut off is fed again.
#[test]
fn drafts_change_no_sequence_that_is_cut_elsewhere() {
    let texts: Futures = Arc::new(Mutex::new(vec![Vec::new(); 5]));
    for every in [2, 7, 1000] {
        for positions in [400, 90] {
            for wrong_in in [1, 3] {
                let drafts = oracle(&texts, wrong_in, true).always();
                let counts = at_random_cut(positions, drafts, &texts, every);
                assert!(counts.drafted > counts.accepted, "{counts:?}");
                let drafts = reading_oracle(&texts, wrong_in).always();
                at_random_cut(positions, drafts, &texts, every);
            }
        }
    }
}

/// While a drafter reads the streams of every step, the host writes the tokens of all of them, also of those that
/// check nothing and of those beside which a sequence joins.
#[test]
fn no_step_runs_ahead_of_a_drafter_that_reads_streams() {
    let texts: Futures = Arc::new(Mutex::new(Vec::new()));
    let prompts = [vec![1, 2, 3], vec![5, 6], vec![9]];
    for (slot, prompt) in prompts.iter().enumerate() {
        let text = [&prompt[..], &alone(slot as u64, prompt, 40)].concat();
        texts.lock().unwrap().push(text);
    }
    for (wrong_in, drafts) in [(4, 8), (4, 0)] {
        let mut device = Device::new(3, 3, 1000).checking(9);
        let mut speculation = reading_oracle(&texts, wrong_in).always().at_most(drafts);
        let mut batch = Batch::new(&mut device).with_drafts(Some(&mut speculation));
        let mut drawn = vec![Vec::new(); 3];
        let mut step = 0;
        while step < 10 || batch.running() > 0 {
            // One sequence joins every third step.
            let slot = step / 3;
            let joins = step % 3 == 0 && slot < 3;
            let mut pieces = Vec::new();
            if joins {
                let drafts = batch.speculation().expect("it drafts");
                drafts.follow(slot, prompts[slot].clone());
                pieces.push(piece(slot, &prompts[slot], slot as u64, 30));
            }
            let each = &mut |slot: usize, token: Result<u32>| {
                drawn[slot].push(token.expect("there is room"));
                ControlFlow::Continue(())
            };
            batch.step(pieces, each).unwrap();
            step += 1;
        }
        drop(batch);
        for (slot, drawn) in drawn.iter().enumerate() {
            assert_eq!(*drawn, alone(slot as u64, &prompts[slot], 30));
        }
        assert_eq!(device.ahead, 0);
        assert_eq!(speculation.counts().accepted > 20, drafts > 0);
    }
}

/// The device is not far ahead where drafts may be found, and far ahead where not.
#[test]
fn steps_wait_for_drafts() {
    for (followed, most) in [(true, 2), (false, DEPTH)] {
        let mut device = Device::new(1, 1, 1000).checking(9);
        let mut speculation = Speculation::ngram();
        let mut batch = Batch::new(&mut device).with_drafts(Some(&mut speculation));
        if followed {
            let drafts = batch.speculation().expect("it drafts");
            drafts.follow(0, vec![1]);
        }
        let mut go = |_: usize, token: Result<u32>| {
            token.expect("there is room");
            ControlFlow::Continue(())
        };
        batch.step(vec![piece(0, &[1], 4, 40)], &mut go).unwrap();
        while batch.running() > 0 {
            batch.step(Vec::new(), &mut go).unwrap();
        }
        drop(batch);
        assert_eq!(device.most_queued, most);
    }
}

/// The device keeps penalties for one token at a time: such an answer is not drafted, and that is said.
#[test]
fn answers_with_penalties_are_not_drafted() {
    let texts: Futures = Arc::new(Mutex::new(vec![[1; 60].to_vec()]));
    let mut device = Device::new(1, 1, 1000).checking(9);
    let mut speculation = oracle(&texts, 9, true).always();
    let mut batch = Batch::new(&mut device).with_drafts(Some(&mut speculation));
    let drafts = batch.speculation().expect("it drafts");
    drafts.follow(0, vec![1]);
    let mut piece = piece(0, &[1], 4, 20);
    let then = piece.then.as_mut().expect("it goes on");
    let params = nq_runtime::SamplingParams {
        presence_penalty: 0.5,
        ..*then.sampler.params()
    };
    then.sampler = nq_runtime::Sampler::new(params, 4).unwrap();
    let mut go = |_: usize, token: Result<u32>| {
        token.expect("there is room");
        ControlFlow::Continue(())
    };
    batch.step(vec![piece], &mut go).unwrap();
    while batch.running() > 0 {
        batch.step(Vec::new(), &mut go).unwrap();
    }
    drop(batch);
    assert_eq!(speculation.counts().drafted, 0);
    let note = speculation.take_note().expect("it says so");
    assert!(note.contains("penalties"), "{note}");
    assert!(speculation.take_note().is_none());
}

/// A model on such a device drafts what it draws best, also where it has hardly any pages.
#[test]
fn a_draft_model_runs_ahead() {
    for (positions, most) in [(1000, 30), (70, 42), (35, 42)] {
        let draft = Device::new(2, 2, positions);
        let model = DraftModel::new(Box::new(draft), VOCAB);
        let mut speculation = Speculation::new(Box::new(model)).always();
        let mut device = Device::new(2, 2, 1000).checking(9);
        let mut batch = Batch::new(&mut device).with_drafts(Some(&mut speculation));
        let prompts = [vec![1, 2, 3, 4, 5, 6, 7], vec![5]];
        let mut texts = prompts.clone();
        for (slot, prompt) in prompts.iter().enumerate() {
            let drafts = batch.speculation().expect("it drafts");
            drafts.follow(slot, prompt.clone());
        }
        let greedy = |slot: usize| {
            let mut piece = piece(slot, &prompts[slot], 0, 40);
            let then = piece.then.as_mut().expect("it goes on");
            then.sampler = greedy();
            piece
        };
        let mut steps = 0;
        let mut pieces = vec![greedy(0), greedy(1)];
        while !pieces.is_empty() || batch.running() > 0 {
            let each = &mut |slot: usize, token: Result<u32>| {
                texts[slot].push(token.expect("there is room"));
                ControlFlow::Continue(())
            };
            batch.step(std::mem::take(&mut pieces), each).unwrap();
            steps += 1;
        }
        drop(batch);
        for (text, prompt) in texts.iter().zip(&prompts) {
            let mut sampler = greedy_text(prompt, 40);
            sampler.splice(0..0, prompt.iter().copied());
            assert_eq!(*text, sampler);
        }
        let counts = speculation.counts();
        let what = format!("{positions} positions: {steps} steps, {counts:?}");
        assert!(counts.accepted > 0 && steps < most, "{what}");
        // Some guesses run past the end of an answer, none is wrong.
        assert_eq!(counts.accepted, counts.drafted);
    }
}

fn greedy() -> nq_runtime::Sampler {
    nq_runtime::Sampler::new(nq_runtime::SamplingParams::greedy(), 0).unwrap()
}

fn greedy_text(prompt: &[u32], n: usize) -> Vec<u32> {
    let (mut sampler, mut text) = (greedy(), prompt.to_vec());
    for _ in 0..n {
        let logits = nq_testkit::sessions::logits_after(&text, VOCAB);
        text.push(sampler.sample(&logits).unwrap());
    }
    text[prompt.len()..].to_vec()
}
