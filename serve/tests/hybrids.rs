//! Models whose states cannot be cut: what of earlier prompts is not computed again, and that it changes no answer.

use nq_formats::synth;
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::ModelConfig;
use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions, LogitBias, SessionSpec};
use nq_serve::{Engine, EngineOptions, Event, Finish, PageStore, Request};
use nq_testkit::models::{delta, rope, tiny};
use nq_testkit::sessions::session_spec;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const VOCAB: u32 = 320;
/// Ends turns and answers.
const END: u32 = 7;
/// Tokens of each answer.
const ANSWER: usize = 12;

/// A small model with recurrences in three of four layers.
fn config() -> ModelConfig {
    ModelConfig {
        hidden_size: 96,
        intermediate_size: 160,
        delta: Some(delta(6, 16, 4)),
        num_hidden_layers: 5,
        head_dim: 32,
        vocab_size: VOCAB as usize,
        rope: rope(1e7, Some(8)),
        eos_token_ids: vec![300],
        ..tiny("qwen35")
    }
}

fn engine(snapshots: Option<usize>, engine_options: EngineOptions) -> Engine {
    let config = config();
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        threads: Some(2),
        // So that a prompt in pieces gives the answers of a whole one.
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    let made = synth::checkpoint("hybrid", &config, 3).unwrap();
    let model = nq_load::load(&config, made.store(), &options, &()).unwrap();
    let open = Box::new(move || {
        model.session(SessionSpec {
            snapshots,
            ..session_spec(8, 2000, KvType::F32, 700)
        })
    });
    Engine::start(open, config.vocab_size, engine_options).unwrap()
}

fn with_cache() -> EngineOptions {
    EngineOptions {
        parallel: 3,
        ..EngineOptions::default()
    }
}

fn without_cache() -> EngineOptions {
    EngineOptions {
        prefix_cache: false,
        ..with_cache()
    }
}

fn on_disk(folder: &Path) -> EngineOptions {
    let store = PageStore::open(folder, 1 << 30, Arc::new(())).unwrap();
    EngineOptions {
        disk: Some(store.of_model(b"a hybrid")),
        ..with_cache()
    }
}

/// A turn of `len` tokens.
fn turn(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = Philox::new(seed, 1);
    let mut tokens: Vec<u32> = (1..len)
        .map(|_| 10 + (rng.uniform() * (VOCAB - 10) as f32) as u32 % (VOCAB - 10))
        .collect();
    tokens.push(END);
    tokens
}

/// Turns, and what opens the answer.
fn chat(turns: &[Vec<u32>]) -> Vec<u32> {
    let mut tokens = turns.concat();
    tokens.extend([3, 4, 5]);
    tokens
}

/// The answers to prompts submitted together, and how many tokens of each prompt were cached.
fn ask_all(engine: &Engine, prompts: &[Vec<u32>]) -> Vec<(Vec<u32>, usize)> {
    // The answer goes on past ends, so that all have the same length.
    let requests = prompts.iter().map(|p| Request {
        stop: vec![END],
        bias: LogitBias::new([(END, -100.0)]).unwrap(),
        ..Request::new(p.clone(), ANSWER)
    });
    let mut answers = engine.submit(requests.collect()).unwrap();
    let mut all = vec![(Vec::new(), 0); prompts.len()];
    while let Some((index, event)) = answers.next_blocking() {
        match event {
            Event::Token { id, .. } => all[index].0.push(id),
            Event::Finished(finish) => assert_eq!(finish, Finish::Length),
            Event::Started { cached } => all[index].1 = cached,
            Event::Row(_) => {}
        }
    }
    all
}

fn ask(engine: &Engine, prompt: &[u32]) -> (Vec<u32>, usize) {
    ask_all(engine, &[prompt.to_vec()]).remove(0)
}

#[test]
fn what_prompts_have_in_common_is_computed_once() {
    let (cached, plain) = (engine(None, with_cache()), engine(None, without_cache()));
    let answer_to = |prompt: &[u32], expected: usize| {
        let (answer, reused) = ask(&cached, prompt);
        assert_eq!(answer, ask(&plain, prompt).0, "{expected} tokens reused");
        assert_eq!(reused, expected, "of {}", prompt.len());
        answer
    };
    let system = turn(1, 400);
    let first = chat(&[system.clone(), turn(2, 30)]);
    let answer = answer_to(&first, 0);
    // The conversation grows: all but the last token of the answer, which was never fed.
    let mut answered = first.clone();
    answered.extend(&answer);
    let grown = chat(&[answered.clone(), turn(3, 25)]);
    let answer = answer_to(&grown, answered.len() - 1);
    let mut twice = grown.clone();
    twice.extend(&answer);
    answer_to(&chat(&[twice.clone(), turn(4, 25)]), twice.len() - 1);
    // Its last turn is edited, and the one before.
    answer_to(&chat(&[answered.clone(), turn(5, 25)]), answered.len() - 1);
    answer_to(&chat(&[system.clone(), turn(6, 30)]), system.len());
    // An answer is made again: what is behind the last turn is computed.
    answer_to(&grown, grown.len() - 3);
    // Thinking is left out of the history: the answer differs from its beginning.
    let stripped = [&first[..], &answer[3..]].concat();
    answer_to(&chat(&[stripped, turn(7, 20)]), first.len() - 3);
    // Other applications with a beginning in common: the second shows where they part, the third gains.
    let shared = turn(8, 300)[..299].to_vec();
    let raw = |seed| [&shared[..], &turn(seed, 40)[..39]].concat();
    answer_to(&raw(9), 0);
    answer_to(&raw(10), 0);
    answer_to(&raw(11), shared.len());
    // The same again.
    answer_to(&raw(11), raw(11).len() - 1);
}

#[test]
fn prompts_that_come_together_wait_for_what_they_share() {
    let (cached, plain) = (engine(None, with_cache()), engine(None, without_cache()));
    let system = turn(1, 500);
    let prompts: Vec<Vec<u32>> = (2..5)
        .map(|seed| chat(&[system.clone(), turn(seed, 30)]))
        .collect();
    let found = ask_all(&cached, &prompts);
    for ((answer, _), prompt) in found.iter().zip(&prompts) {
        assert_eq!(*answer, ask(&plain, prompt).0);
    }
    let mut reused: Vec<usize> = found.iter().map(|f| f.1).collect();
    reused.sort_unstable();
    assert_eq!(reused, [0, system.len(), system.len()]);
    // Without turns, the first is told to keep its state where the second parts from it.
    let shared = turn(8, 600)[..599].to_vec();
    let raw = |seed| [&shared[..], &turn(seed, 40)[..39]].concat();
    let prompts: Vec<Vec<u32>> = (9..12).map(raw).collect();
    let found = ask_all(&cached, &prompts);
    for ((answer, _), prompt) in found.iter().zip(&prompts) {
        assert_eq!(*answer, ask(&plain, prompt).0);
    }
    let most = found.iter().map(|f| f.1).max();
    assert_eq!(most, Some(shared.len()));
}

#[test]
fn without_room_for_snapshots_only_ends_are_reused() {
    let (cached, plain) = (engine(Some(0), with_cache()), engine(None, without_cache()));
    let first = chat(&[turn(1, 400), turn(2, 30)]);
    let (answer, _) = ask(&cached, &first);
    assert_eq!(ask(&cached, &first), (answer.clone(), 0));
    let grown = chat(&[[&first[..], &answer].concat(), turn(3, 25)]);
    let (again, reused) = ask(&cached, &grown);
    assert_eq!(again, ask(&plain, &grown).0);
    assert_eq!(reused, first.len() + ANSWER - 1);
}

#[test]
fn states_on_disk_survive_with_their_pages() {
    let folder = tempfile::tempdir().unwrap();
    let plain = engine(None, without_cache());
    let system = turn(1, 5 * PAGE + 30);
    let prompt = |seed| chat(&[system.clone(), turn(seed, 30)]);
    for (round, expected) in [(0, 0), (1, 5 * PAGE), (2, 5 * PAGE)] {
        let engine = engine(None, on_disk(folder.path()));
        let (answer, _) = ask(&engine, &prompt(round));
        assert_eq!(answer, ask(&plain, &prompt(round)).0, "round {round}");
        assert_eq!(
            engine.metrics().restored_tokens.get(),
            expected as u64,
            "round {round}"
        );
        engine.close(Duration::from_secs(10));
        if round == 1 {
            // A state that is damaged is as good as none, and so are the pages before it.
            let files = std::fs::read_dir(folder.path()).unwrap();
            let files = files.map(|f| f.unwrap().path()).collect::<Vec<_>>();
            let size = |p: &Path| p.metadata().unwrap().len();
            let sizes: Vec<u64> = files.iter().map(|f| size(f)).collect();
            let alike = |size: &u64| sizes.iter().filter(|s| *s == size).count();
            let states = files.iter().zip(&sizes).filter(|(_, s)| alike(s) < 5);
            let mut damaged = 0;
            for (file, _) in states {
                let mut bytes = std::fs::read(file).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(file, bytes).unwrap();
                damaged += 1;
            }
            assert!(damaged > 0, "{sizes:?}");
            let engine = self::engine(None, on_disk(folder.path()));
            let (answer, _) = ask(&engine, &prompt(7));
            assert_eq!(answer, ask(&plain, &prompt(7)).0);
            engine.close(Duration::from_secs(10));
        }
    }
}

/// Conversations that grow, are edited, branch, are given up and come together, over an engine that has room for few
/// of them: each answer is that of its prompt alone, and in the end everything is there again.
#[test]
fn random_conversations_get_the_answers_of_each_alone() {
    let folder = tempfile::tempdir().unwrap();
    let cached = engine(Some(5), on_disk(folder.path()));
    let plain = engine(None, without_cache());
    let mut rng = Philox::new(11, 1);
    let mut below = |n: usize| (rng.uniform() * n as f32) as usize % n;
    let systems = [turn(100, 300), turn(101, 90)];
    let mut talks: Vec<Vec<Vec<u32>>> = vec![vec![systems[0].clone()], vec![systems[1].clone()]];
    for step in 0..60 {
        let mut prompts = Vec::new();
        let mut turns = Vec::new();
        for _ in 0..1 + below(3) {
            let at = below(talks.len());
            let mut talk = talks[at].clone();
            match below(5) {
                // An edit of an earlier turn drops what came behind it.
                0 if talk.len() > 2 => talk.truncate(1 + below(talk.len() - 1)),
                1 => talk = vec![systems[below(2)].clone()],
                _ => {}
            }
            if talk.concat().len() > 1500 {
                talk.truncate(2);
            }
            talk.push(turn(1000 + step, 5 + below(120)));
            prompts.push(chat(&talk));
            turns.push(talk);
        }
        if below(4) == 0 {
            let request = Request::new(prompts[0].clone(), 200);
            drop(cached.submit(vec![request]).unwrap());
        }
        let found = ask_all(&cached, &prompts);
        for ((prompt, mut talk), (answer, reused)) in prompts.iter().zip(turns).zip(found) {
            assert!(reused < prompt.len());
            assert_eq!(answer, ask(&plain, prompt).0, "step {step}");
            let last = talk.last_mut().unwrap();
            last.extend([3, 4, 5]);
            last.extend(answer);
            last.push(END);
            match talks.len() < 6 {
                true => talks.push(talk),
                false => talks[below(6)] = talk,
            }
        }
    }
    let metrics = cached.metrics();
    assert!(metrics.cached_tokens.get() > metrics.prompt_tokens.get() / 3);
    assert!(metrics.snapshots_free.get() >= 0 && metrics.snapshots.get() == 5);
    cached.close(Duration::from_secs(10));
}
