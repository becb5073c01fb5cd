//! The engine over a session without a model: its logits follow from the tokens, a step takes a
//! set time, and some tokens cause failures.

use nq_answers::Constraint;
use nq_runtime::interface::Draft;
use nq_runtime::{Drafter, Error, KvType, Result, Session, Speculation};
use nq_serve::engine::{Failure, Refused};
use nq_serve::{Answers, Client, Engine, EngineOptions, Event, Finish, OpenDrafts, Request};
use nq_testkit::sessions::{self, FakeSession, greedy, session_spec};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const VOCAB: usize = 40;
/// A sequence with this token has no finite logits.
const NAN: u32 = 38;
/// A forward of this token panics.
const PANIC: u32 = 39;

/// A constraint panics once this token was drawn.
const ACCEPTED: u32 = 37;

/// Records the work of the fake session.
#[derive(Default)]
struct Log {
    /// Rows computed, over all sequences.
    rows: AtomicUsize,
    /// The most rows of one forward.
    most: AtomicUsize,
    opened: AtomicUsize,
}

/// Logits that change with any change of `tokens`; the two harmful tokens are never the best.
fn logits_after(tokens: &[u32]) -> Vec<f32> {
    let mut logits = sessions::logits_after(tokens, VOCAB);
    logits[NAN as usize] = -1e9;
    logits[PANIC as usize] = -1e9;
    logits
}

/// The answer that the fake gives to a prompt by itself.
fn expected(prompt: &[u32], n: usize) -> Vec<u32> {
    greedy(prompt, n, logits_after)
}

fn engine(step_ms: u64, options: EngineOptions) -> (Engine, Arc<Log>) {
    engine_cut_at(1, step_ms, options)
}

/// An engine whose session's sequences can be cut only at multiples of `every` tokens.
fn engine_cut_at(every: usize, step_ms: u64, options: EngineOptions) -> (Engine, Arc<Log>) {
    let log = Arc::new(Log::default());
    let spec = session_spec(options.parallel + 4, 400, KvType::F16, 64);
    let of_session = Arc::clone(&log);
    let open = Box::new(move || {
        of_session.opened.fetch_add(1, Ordering::Relaxed);
        let log = Arc::clone(&of_session);
        let mut session = FakeSession::new(spec, VOCAB, logits_after);
        (session.every, session.exact_rows) = (every, 8);
        session.before = Box::new(move |chunks| {
            std::thread::sleep(Duration::from_millis(step_ms));
            let rows = chunks.iter().map(|c| c.tokens.len()).sum();
            log.rows.fetch_add(rows, Ordering::Relaxed);
            log.most.fetch_max(rows, Ordering::Relaxed);
            let has = |token| chunks.iter().any(|c| c.tokens.contains(&token));
            assert!(!has(PANIC), "a panic as asked");
            match has(NAN) {
                true => Err(Error::NotFinite {
                    what: "output",
                    layer: 0,
                }),
                false => Ok(()),
            }
        });
        Ok(Box::new(session) as Box<dyn Session>)
    });
    (Engine::start(open, VOCAB, options).unwrap(), log)
}

fn few(parallel: usize) -> EngineOptions {
    EngineOptions {
        parallel,
        ..EngineOptions::default()
    }
}

/// Drafts what will come, but for every fourth token, in whose place stands one that does harm.
struct Oracle;

impl Drafter for Oracle {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        for draft in drafts {
            draft.tokens = expected(draft.text, draft.most);
            let first = draft.text.len();
            let wrong = |i: &usize| (first + i).is_multiple_of(4);
            for i in (0..draft.most).filter(wrong) {
                draft.tokens[i] = if first % 3 == 0 { NAN } else { 1 };
            }
        }
        Ok(())
    }
}

/// As [`few`], with drafts.
fn drafted(parallel: usize) -> EngineOptions {
    let open = |_: &mut dyn Session| Ok(Speculation::new(Box::new(Oracle)).always());
    EngineOptions {
        drafts: Some(OpenDrafts::new(open, Arc::new(()))),
        ..few(parallel)
    }
}

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (seed * 7 + i * i) % 37).collect()
}

fn one(engine: &Engine, request: Request) -> Answers {
    engine.submit(vec![request]).unwrap()
}

/// Waits for the end: the tokens, how many prompt tokens were cached, and how the answer ended.
fn all(mut answers: Answers) -> (Vec<u32>, usize, Finish) {
    let (mut tokens, mut held) = (Vec::new(), 0);
    while let Some((_, event)) = answers.next_blocking() {
        match event {
            Event::Started { cached } => held = cached,
            Event::Token { id, .. } => tokens.push(id),
            Event::Row(_) => unreachable!("a text that is not continued"),
            Event::Finished(finish) => return (tokens, held, finish),
        }
    }
    unreachable!("a stream ends with its end");
}

/// Waits for `n` tokens.
fn some(answers: &mut Answers, n: usize) {
    let mut seen = 0;
    while seen < n {
        match answers.next_blocking() {
            Some((_, Event::Token { .. })) => seen += 1,
            Some((_, Event::Started { .. })) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Waits until `what` holds.
fn until(what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it never came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn many_at_once_are_answered_as_each_alone() {
    for every in [1, 2, 7, 64, 1000] {
        answer_many(every, few(3));
        answer_many(every, drafted(3));
    }
}

fn answer_many(every: usize, options: EngineOptions) {
    let (engine, log) = engine_cut_at(every, 0, options);
    let prompts: Vec<Vec<u32>> = (0..20).map(|i| prompt(i, 1 + 13 * i as usize)).collect();
    let answers: Vec<Answers> = prompts
        .iter()
        .map(|p| one(&engine, Request::new(p.clone(), 30)))
        .collect();
    for (prompt, answers) in prompts.iter().zip(answers) {
        let (tokens, _, finish) = all(answers);
        assert_eq!((tokens, finish), (expected(prompt, 30), Finish::Length));
    }
    assert!(log.most.load(Ordering::Relaxed) <= 64);
    // A stop token ends an answer and is not reported.
    let answer = expected(&prompts[0], 30);
    let request = Request {
        stop: vec![answer[5]],
        ..Request::new(prompts[0].clone(), 30)
    };
    let at = answer.iter().position(|t| *t == answer[5]).unwrap();
    let (tokens, _, finish) = all(one(&engine, request));
    assert_eq!(
        (tokens, finish),
        (answer[..at].to_vec(), Finish::Stop(answer[5]))
    );
}

/// Steps draw several tokens of a sequence, and what is kept of it ends with its answer.
#[test]
fn drafts_are_counted_and_end_with_their_answer() {
    let (engine, _) = engine(0, drafted(2));
    let first = prompt(3, 30);
    let answer = expected(&first, 40);
    let request = Request {
        stop: vec![answer[21]],
        ..Request::new(first.clone(), 40)
    };
    let at = answer.iter().position(|t| *t == answer[21]).unwrap();
    let (tokens, _, finish) = all(one(&engine, request));
    assert_eq!(
        (&tokens[..], finish),
        (&answer[..at], Finish::Stop(answer[21]))
    );
    // The chat goes on otherwise than the drafts behind its end.
    let chat = [&first[..], &tokens, &prompt(9, 12)].concat();
    let (tokens, cached, _) = all(one(&engine, Request::new(chat.clone(), 20)));
    assert_eq!(tokens, expected(&chat, 20));
    assert!(cached >= first.len() + at, "{cached}");
    let metrics = engine.metrics();
    let (drafted, right) = (metrics.drafted_tokens.get(), metrics.accepted_tokens.get());
    assert!(0 < right && right < drafted, "{right} of {drafted}");
}

#[test]
fn what_was_computed_before_is_not_computed_again() {
    let (engine, log) = engine(0, few(2));
    let first = prompt(3, 200);
    let (answer, cached, _) = all(one(&engine, Request::new(first.clone(), 20)));
    assert_eq!(cached, 0);
    let before = log.rows.load(Ordering::Relaxed);
    // The next turn: the first, its answer and a new message.
    let second = [first.clone(), answer, prompt(9, 10)].concat();
    let (tokens, cached, _) = all(one(&engine, Request::new(second.clone(), 10)));
    assert_eq!(tokens, expected(&second, 10));
    assert_eq!(cached, 219); // The last token of an answer is never fed.
    assert_eq!(log.rows.load(Ordering::Relaxed) - before, 11 + 9);
    // Another branch of the first prompt.
    let branch = [first[..150].to_vec(), prompt(5, 30)].concat();
    let (tokens, cached, _) = all(one(&engine, Request::new(branch.clone(), 5)));
    assert_eq!((tokens, cached), (expected(&branch, 5), 150));
    // Another salt finds nothing.
    let request = Request {
        client: Client { id: 0, salt: 1 },
        ..Request::new(branch.clone(), 5)
    };
    assert_eq!(all(one(&engine, request)).1, 0);
    let text = engine.metrics().text();
    assert!(
        text.contains(&format!("nq_prefix_cache_hit_tokens_total {}", 219 + 150)),
        "{text}"
    );
}

#[test]
fn answers_to_one_prompt_compute_it_once() {
    let (engine, log) = engine(0, few(4));
    let prompt = prompt(2, 150);
    let requests = (0..4).map(|_| Request::new(prompt.clone(), 5)).collect();
    let mut answers = engine.submit(requests).unwrap();
    let mut tokens = vec![Vec::new(); 4];
    while let Some((i, event)) = answers.next_blocking() {
        if let Event::Token { id, .. } = event {
            tokens[i].push(id);
        }
    }
    assert_eq!(tokens, vec![expected(&prompt, 5); 4]);
    assert_eq!(log.rows.load(Ordering::Relaxed), 150 + 3 + 4 * 4);
}

#[test]
fn whoever_goes_makes_room_at_once() {
    let (engine, _) = engine(5, few(1));
    let metrics = engine.metrics();
    // In the answer.
    let mut first = one(&engine, Request::new(prompt(1, 5), 300));
    some(&mut first, 3);
    let second = one(&engine, Request::new(prompt(2, 5), 3));
    let third = one(&engine, Request::new(prompt(3, 5), 3));
    drop(first);
    // In the queue.
    drop(second);
    let (tokens, _, _) = all(third);
    assert_eq!(tokens, expected(&prompt(3, 5), 3));
    // During the prompt: 300 tokens, 16 per step.
    let mut fourth = one(&engine, Request::new(prompt(4, 300), 3));
    assert!(matches!(
        fourth.next_blocking(),
        Some((_, Event::Started { .. }))
    ));
    drop(fourth);
    let begun = Instant::now();
    let (tokens, _, _) = all(one(&engine, Request::new(prompt(5, 3), 3)));
    assert_eq!(tokens, expected(&prompt(5, 3), 3));
    assert!(begun.elapsed() < Duration::from_secs(2));
    until(|| {
        metrics
            .text()
            .contains("nq_requests_finished_total{reason=\"cancelled\"} 3")
    });
    assert_eq!(metrics.preemptions.get(), 0);
}

#[test]
fn one_of_several_answers_can_be_given_up() {
    let (engine, _) = engine(2, few(2));
    let requests = (0..2).map(|_| Request::new(prompt(1, 5), 100)).collect();
    let mut answers = engine.submit(requests).unwrap();
    answers.cancel(0);
    let mut ends = vec![None, None];
    while let Some((i, event)) = answers.next_blocking() {
        if let Event::Finished(finish) = event {
            ends[i] = Some(finish);
        }
    }
    assert_eq!(ends, [Some(Finish::Cancelled), Some(Finish::Length)]);
}

#[test]
fn a_full_queue_refuses_and_says_when_to_come_again() {
    let options = EngineOptions { queue: 2, ..few(1) };
    let (engine, _) = engine(5, options);
    let mut first = one(&engine, Request::new(prompt(1, 5), 300));
    some(&mut first, 2);
    let second = one(&engine, Request::new(prompt(2, 5), 2));
    let two = || vec![Request::new(prompt(3, 5), 2), Request::new(prompt(3, 5), 2)];
    match engine.submit(two()) {
        Err(Refused::QueueFull {
            waiting: 1,
            room: 2,
            retry_after,
        }) => assert!(retry_after >= Duration::from_secs(1)),
        other => panic!("{other:?}"),
    }
    drop(first);
    assert_eq!(all(second).0.len(), 2);
    assert!(engine.submit(two()).is_ok());
    assert!(
        engine
            .metrics()
            .text()
            .contains("nq_requests_refused_total{reason=\"queue_full\"} 1")
    );
}

#[test]
fn what_is_wrong_is_refused_before_anything_is_computed() {
    let (engine, log) = engine(0, few(1));
    let refused = |request| engine.submit(vec![request]).unwrap_err();
    let e = refused(Request::new(prompt(1, 400), 1));
    assert!(
        matches!(
            e,
            Refused::ContextFull {
                prompt: 400,
                ctx: 400
            }
        ),
        "{e}"
    );
    assert!(matches!(
        refused(Request::new(vec![], 1)),
        Refused::Invalid(_)
    ));
    assert!(matches!(
        refused(Request::new(vec![VOCAB as u32], 1)),
        Refused::Invalid(_)
    ));
    assert!(matches!(
        refused(Request::new(vec![1], 0)),
        Refused::Invalid(_)
    ));
    let request = Request {
        logprobs: Some(1000),
        ..Request::new(vec![1], 1)
    };
    assert!(matches!(refused(request), Refused::Invalid(_)));
    assert_eq!(log.rows.load(Ordering::Relaxed), 0);
    // None of these occupies a place in the queue.
    let (tokens, _, finish) = all(one(&engine, Request::new(prompt(1, 399), 50)));
    assert_eq!((tokens.len(), finish), (1, Finish::Length));
}

#[test]
fn numbers_that_are_none_end_one_request() {
    end_one_without_numbers(few(3));
    end_one_without_numbers(drafted(3));
}

fn end_one_without_numbers(options: EngineOptions) {
    let (engine, _) = engine(2, options);
    let mut well = one(&engine, Request::new(prompt(1, 5), 50));
    some(&mut well, 3);
    let ill = one(&engine, Request::new(vec![1, 2, NAN], 50));
    let (tokens, _, finish) = all(ill);
    assert!(
        tokens.is_empty() && matches!(finish, Finish::Failed(Failure::Model(_))),
        "{finish:?}"
    );
    let (tokens, _, _) = all(well);
    assert_eq!(tokens, expected(&prompt(1, 5), 50)[3..]);
}

#[test]
fn a_panic_ends_those_in_it_and_the_engine_goes_on() {
    panic_in_one(few(2));
    panic_in_one(drafted(2));
}

fn panic_in_one(options: EngineOptions) {
    let (engine, log) = engine(0, options);
    let (_, _, finish) = all(one(&engine, Request::new(vec![1, PANIC], 5)));
    assert!(
        matches!(finish, Finish::Failed(Failure::Model(_))),
        "{finish:?}"
    );
    let (tokens, _, _) = all(one(&engine, Request::new(prompt(1, 9), 5)));
    assert_eq!(tokens, expected(&prompt(1, 9), 5));
    assert_eq!(log.opened.load(Ordering::Relaxed), 2);
    assert!(engine.is_healthy());
}

#[test]
fn time_limits_end_requests_wherever_they_are() {
    let (engine, _) = engine(5, few(1));
    let soon = || Some(Instant::now() + Duration::from_millis(60));
    let request = |deadline| Request {
        deadline,
        ..Request::new(prompt(1, 5), 300)
    };
    let first = one(&engine, request(soon()));
    let second = one(&engine, request(soon()));
    let (tokens, _, finish) = all(first);
    assert!(!tokens.is_empty());
    assert_eq!(finish, Finish::Failed(Failure::Timeout));
    assert_eq!(all(second).2, Finish::Failed(Failure::Timeout));
}

#[test]
fn clients_take_turns() {
    let (engine, _) = engine(1, few(1));
    let request = |id| Request {
        client: Client { id, salt: 0 },
        ..Request::new(prompt(id as u32, 5), 20)
    };
    let many: Vec<Answers> = (0..8).map(|_| one(&engine, request(1))).collect();
    let begun = Instant::now();
    all(one(&engine, request(2)));
    let other = begun.elapsed();
    for answers in many {
        all(answers);
    }
    let greedy = begun.elapsed();
    assert!(other < greedy / 2, "{other:?} of {greedy:?}");
}

#[test]
fn closing_lets_answers_end_and_then_ends_them() {
    let (engine, _) = engine(5, few(1));
    let short = one(&engine, Request::new(prompt(1, 5), 5));
    engine.close(Duration::from_secs(20));
    assert_eq!(all(short).2, Finish::Length);
    assert!(matches!(
        engine.submit(vec![Request::new(vec![1], 1)]),
        Err(Refused::Closing)
    ));
    assert!(!engine.is_healthy());

    let (engine, _) = self::engine(5, few(1));
    let long = one(&engine, Request::new(prompt(1, 5), 300));
    let waiting = one(&engine, Request::new(prompt(2, 5), 300));
    let begun = Instant::now();
    engine.close(Duration::from_millis(50));
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert_eq!(all(long).2, Finish::Failed(Failure::Closing));
    assert_eq!(all(waiting).2, Finish::Failed(Failure::Closing));
}

/// Allows one token at a time: the next in a list.
struct Only {
    list: Vec<u32>,
    at: usize,
    mask: Vec<u32>,
}

impl Constraint for Only {
    fn mask(&mut self) -> std::result::Result<Option<&[u32]>, String> {
        let token = *self.list.get(self.at).ok_or("the list is over")?;
        assert!(token != PANIC, "a panic as asked");
        self.mask = vec![0; VOCAB.div_ceil(32)];
        self.mask[token as usize / 32] |= 1 << (token % 32);
        Ok(Some(&self.mask))
    }

    fn accept(&mut self, token: u32) -> std::result::Result<(), String> {
        assert_eq!(token, self.list[self.at]);
        assert!(token != ACCEPTED, "a panic as asked");
        self.at += 1;
        Ok(())
    }
}

#[test]
fn constraints_hold_at_every_token_and_fail_alone() {
    constrain_some(few(3));
    constrain_some(drafted(3));
}

fn constrain_some(options: EngineOptions) {
    let (engine, _) = engine(0, options);
    let only = |list: Vec<u32>| Request {
        constraint: Some(Box::new(Only {
            list,
            at: 0,
            mask: Vec::new(),
        })),
        logprobs: Some(1),
        ..Request::new(prompt(4, 50), 6)
    };
    let free = one(&engine, Request::new(prompt(1, 5), 40));
    let mut held = one(&engine, only(vec![5, 4, 3, 2, 1, 0]));
    let short = one(&engine, only(vec![7, 7]));
    let panics = one(&engine, only(vec![7, PANIC]));
    let panics_later = one(&engine, only(vec![7, ACCEPTED, 7]));
    let mut tokens = Vec::new();
    while let Some((_, event)) = held.next_blocking() {
        if let Event::Token { id, logprobs } = event {
            let logprobs = logprobs.expect("asked for");
            assert_eq!((logprobs.token, logprobs.top.len()), (id, 1));
            tokens.push(id);
        }
    }
    assert_eq!(tokens, [5, 4, 3, 2, 1, 0]);
    let (tokens, _, finish) = all(short);
    let over = Finish::Failed(Failure::Constraint("the list is over".into()));
    assert_eq!((tokens, finish), (vec![7, 7], over));
    for panics in [panics, panics_later] {
        assert!(matches!(
            all(panics).2,
            Finish::Failed(Failure::Constraint(_))
        ));
    }
    assert_eq!(all(free).0, expected(&prompt(1, 5), 40));
}

/// Decoding goes on while a long prompt is computed, in pieces.
#[test]
fn a_long_prompt_holds_nobody_up() {
    let (engine, log) = engine(2, few(2));
    let mut stream = one(&engine, Request::new(prompt(1, 5), 300));
    some(&mut stream, 5);
    let long = one(&engine, Request::new(prompt(2, 390), 2));
    let (mut gaps, mut last) = (Vec::new(), Instant::now());
    for _ in 0..20 {
        some(&mut stream, 1);
        gaps.push(last.elapsed());
        last = Instant::now();
    }
    let (tokens, _, _) = all(long);
    assert_eq!(tokens, expected(&prompt(2, 390), 2));
    gaps.sort();
    assert!(gaps[gaps.len() / 2] < Duration::from_millis(50), "{gaps:?}");
    assert!(log.most.load(Ordering::Relaxed) <= 64);
}
