//! Kept sequences that cannot be cut everywhere: prompts that share a part of them get the same answers.

use crate::common;
use nq_runtime::{KvType, Session};
use nq_serve::{Engine, EngineOptions, Event, Finish, PageStore, Request};
use nq_testkit::sessions::{Cut, session_spec};
use std::sync::Arc;
use std::time::Duration;

/// An engine over the demo model, whose sequences can be cut at multiples of `every` tokens.
fn engine(every: usize, options: EngineOptions) -> Engine {
    let model = common::load();
    let vocab = model.config().vocab_size;
    let open = Box::new(move || {
        let session = model.session(session_spec(5, 700, KvType::F16, 128))?;
        Ok(Box::new(Cut::new(session, every)) as Box<dyn Session>)
    });
    Engine::start(open, vocab, options).unwrap()
}

fn options() -> EngineOptions {
    EngineOptions {
        parallel: 3,
        ..EngineOptions::default()
    }
}

fn text(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 300 + (seed * 31 + i * i) % 900).collect()
}

/// The answers to each of `prompts`, submitted together.
fn ask(engine: &Engine, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let requests = prompts.iter().map(|p| Request::new(p.clone(), 20));
    let mut answers = engine.submit(requests.collect()).unwrap();
    let mut all = vec![Vec::new(); prompts.len()];
    while let Some((index, event)) = answers.next_blocking() {
        match event {
            Event::Token { id, .. } => all[index].push(id),
            Event::Finished(finish) => assert_eq!(finish, Finish::Length),
            Event::Started { .. } | Event::Row(_) => {}
        }
    }
    all
}

/// A prompt, what continues it, the same again, edits of it, and several that begin alike at once.
fn talk(engine: &Engine) -> Vec<Vec<u32>> {
    let first = text(1, 300);
    let mut answers = ask(engine, std::slice::from_ref(&first));
    let second = [&first[..], &answers[0], &text(2, 40)].concat();
    answers.extend(ask(engine, &[second]));
    answers.extend(ask(engine, std::slice::from_ref(&first)));
    let edited = |at: usize| [&first[..at], &text(3, 50)].concat();
    answers.extend(ask(engine, &[edited(200)]));
    answers.extend(ask(engine, &[edited(130), edited(131), edited(290)]));
    answers
}

#[test]
fn answers_stay_where_prompts_share_less_than_they_could() {
    let alone = engine(
        1,
        EngineOptions {
            prefix_cache: false,
            ..options()
        },
    );
    let plain = talk(&alone);
    assert_eq!(plain[0], plain[2]);
    let mut whole = [0; 2];
    for every in [1, 50, 10_000] {
        let folder = tempfile::tempdir().unwrap();
        let on_disk = || EngineOptions {
            disk: Some(
                PageStore::open(folder.path(), 1 << 30, Arc::new(()))
                    .unwrap()
                    .of_model(b"the demo model"),
            ),
            ..options()
        };
        // The second engine reads the pages that the first has left.
        for restored in [false, true] {
            let engine = engine(every, on_disk());
            assert_eq!(talk(&engine), plain, "cut at multiples of {every}");
            let metrics = engine.metrics();
            let cached = metrics.cached_tokens.get();
            assert!(cached > 0 || every > 1000, "{cached}");
            match every {
                1 => whole[usize::from(restored)] = cached,
                _ => assert!(
                    cached < whole[usize::from(restored)],
                    "{cached} of {whole:?}"
                ),
            }
            assert!(metrics.restored_tokens.get() > 0 || !restored);
            engine.close(Duration::from_secs(10));
        }
    }
}
