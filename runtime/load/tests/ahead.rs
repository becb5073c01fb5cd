//! A batch over a fake device that is steps ahead of the host.

use crate::common::device::{DEPTH, Device, VOCAB, alone, piece};
use nq_kernels::rng::Philox;
use nq_runtime::{Batch, Error, Piece, Result};
use std::ops::ControlFlow;
use std::time::Duration;

/// Each sequence receives its own tokens, in order, whoever joins and leaves, whichever rows
/// are reused, and on the host if there are more sequences than rows.
#[test]
fn sequences_get_their_own_tokens() {
    const SLOTS: usize = 8;
    for rows in [8, 5] {
        let mut device = Device::new(SLOTS, rows, 400);
        let mut batch = Batch::new(&mut device);
        // For each slot: the sampler's stream, the prompt, and the tokens drawn.
        type Known = Option<(u64, Vec<u32>, Vec<u32>)>;
        let mut known: Vec<Known> = (0..SLOTS).map(|_| None).collect();
        let (mut ended, mut errors) = (0, 0);
        for step in 0..5000u64 {
            let [a, b, c, _] = Philox::block([1, 2], 0, step).map(|w| w as usize);
            let slot = a % SLOTS;
            let prompt: Vec<u32> = (0..1 + c % 9)
                .map(|i| ((step as usize + i) % VOCAB) as u32)
                .collect();
            let mut pieces = Vec::new();
            match (batch.is_running(slot), b % 8) {
                (true, 0) => drop(batch.leave(slot).expect("it runs")),
                (false, 0..4) => {
                    batch.session().truncate(slot, 0);
                    known[slot] = Some((step, prompt.clone(), Vec::new()));
                    pieces.push(piece(slot, &prompt, step, 1 + c / 16 % 70));
                }
                _ => {}
            }
            let mut gone = Vec::new();
            let result = batch.step(pieces, &mut |slot, token| {
                match token {
                    Ok(token) => known[slot].as_mut().expect("it runs").2.push(token),
                    Err(Error::PagesFull { .. } | Error::ContextFull { .. }) => gone.push(slot),
                    Err(e) => panic!("{e}"),
                }
                ControlFlow::Continue(())
            });
            errors += gone.len();
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
                    assert_eq!(batch.session().len(slot), fed, "step {step}");
                    batch.session().truncate(slot, 0);
                }
            }
        }
        assert!(
            ended > 500 && errors > 0,
            "{rows} rows: {ended} ended, {errors} errors"
        );
    }
}

/// A sequence that gets no page reports it at once, not when the others have ended.
#[test]
fn a_sequence_without_a_page_is_told_while_others_run() {
    let mut device = Device::new(2, 2, 60);
    let mut batch = Batch::new(&mut device);
    let go = |_: usize, token: Result<u32>| {
        token.expect("there is room");
        ControlFlow::Continue(())
    };
    batch
        .step(vec![piece(0, &[1], 0, 40)], &mut { go })
        .unwrap();
    batch.session().truncate(1, 0);
    // There is room for the first sequence and its 40 tokens, but not for the 50 of the second as well.
    let mut told = None;
    let mut drawn = [1, 0];
    let mut pieces = vec![piece(1, &[2], 1, 50)];
    for step in 1..100 {
        batch
            .step(std::mem::take(&mut pieces), &mut |slot, token| {
                match token {
                    Ok(_) => drawn[slot] += 1,
                    Err(e) => {
                        assert!(matches!(e, Error::PagesFull { .. }), "{e}");
                        told = Some((slot, step, drawn[0]));
                    }
                }
                ControlFlow::Continue(())
            })
            .unwrap();
        if told.is_some() {
            batch.session().truncate(1, 0);
        }
        if batch.running() == 0 {
            break;
        }
    }
    let (slot, _, first) = told.expect("there is no room for both");
    assert_eq!((slot, drawn[0]), (1, 40));
    assert!(first < 40, "told when the first had ended");
}

/// Prompts are queued before earlier ones are done, but only one ahead; the work done is reported,
/// and the prompts' last tokens go through the steps.
#[test]
fn prompts_run_ahead_too() {
    let mut device = Device::new(2, 2, 1000);
    let mut batch = Batch::new(&mut device);
    let prompt: Vec<u32> = (0..32).collect();
    let mut ran = Vec::new();
    let mut drawn = Vec::new();
    for (at, tokens) in prompt.chunks(8).enumerate() {
        let mut piece = piece(0, tokens, 5, 3);
        let then = piece.then.as_mut().expect("it goes on");
        then.sampler.begin(&prompt);
        if at < 3 {
            piece.then = None;
        }
        let mut each = |_: usize, token: Result<u32>| {
            drawn.push(token.expect("there is room"));
            ControlFlow::Continue(())
        };
        batch.step(vec![piece], &mut each).unwrap();
        ran.push(
            batch
                .ran()
                .iter()
                .map(|r| r.prompt_rows)
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(ran, [vec![], vec![8], vec![8], vec![8, 7, 0]]);
    let last = batch.ran()[1];
    assert_eq!((last.took, last.decoding), (Duration::from_secs(7), 0));
    assert_eq!(batch.ran()[2].decoding, 1);
    while batch.running() > 0 {
        batch
            .step(Vec::new(), &mut |_, token| {
                drawn.push(token.expect("there is room"));
                ControlFlow::Continue(())
            })
            .unwrap();
    }
    // Without other work, a prompt without a continuation is done at the next call.
    let half = Piece {
        slot: 1,
        tokens: &[1, 2],
        then: None,
    };
    let mut nothing = |_: usize, _: Result<u32>| panic!("nothing is drawn");
    batch.step(vec![half], &mut nothing).unwrap();
    assert!(batch.ran().is_empty());
    batch.step(Vec::new(), &mut nothing).unwrap();
    assert_eq!(batch.ran().len(), 1);
    drop(batch);
    assert_eq!(drawn, alone(5, &prompt, 3));
    assert_eq!(device.prompts.0, 33);
}

/// Rows that are no longer needed are not run forever.
#[test]
fn those_who_stay_sit_down_closer_together() {
    let mut device = Device::new(8, 8, 1000);
    let mut batch = Batch::new(&mut device);
    let prompts: Vec<[u32; 1]> = (0..8).map(|i| [i]).collect();
    let limits = [3, 3, 3, 3, 3, 3, 3, 50];
    let pieces = (0..8)
        .map(|i| piece(i, &prompts[i], i as u64, limits[i]))
        .collect();
    let mut last = Vec::new();
    let mut each = |slot: usize, token: Result<u32>| {
        if slot == 7 {
            last.push(token.expect("there is room"));
        }
        ControlFlow::Continue(())
    };
    batch.step(pieces, &mut each).unwrap();
    while batch.running() > 0 {
        batch.step(Vec::new(), &mut each).unwrap();
    }
    drop(batch);
    assert_eq!(last, alone(7, &[7], 50));
    assert_eq!(device.rows.len(), 50);
    assert!(device.rows[..3].iter().all(|&m| m == 8));
    assert!(
        device.rows[3 + DEPTH..].iter().all(|&m| m == 1),
        "{:?}",
        device.rows
    );
}

#[test]
fn what_does_not_fit_is_refused_before_anything_runs() {
    let mut device = Device::new(2, 2, 100);
    let mut batch = Batch::new(&mut device);
    let none = &mut |_: usize, _: Result<u32>| panic!("nothing runs");
    let long = [1; 61];
    for pieces in [
        vec![piece(0, &[1], 0, 3), piece(0, &[2], 0, 3)],
        vec![piece(2, &[1], 0, 3)],
        vec![piece(0, &[], 0, 3)],
        vec![piece(0, &[1], 0, 0)],
        vec![piece(0, &[99], 0, 3)],
    ] {
        let e = batch.step(pieces, none).unwrap_err();
        assert!(matches!(e, Error::Request { .. }), "{e}");
    }
    let e = batch.step(vec![piece(0, &long, 0, 3)], none).unwrap_err();
    assert!(
        matches!(
            e,
            Error::ContextFull {
                capacity: 60,
                needed: 61
            }
        ),
        "{e}"
    );
    assert_eq!(batch.running(), 0);
    let mut go = |_: usize, _: Result<u32>| ControlFlow::Continue(());
    batch.step(vec![piece(0, &[1], 0, 9)], &mut go).unwrap();
    let e = batch.step(vec![piece(0, &[1], 0, 3)], &mut go).unwrap_err();
    assert!(e.to_string().contains("which is in it"), "{e}");
}
