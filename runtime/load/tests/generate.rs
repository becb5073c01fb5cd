//! The generation loop over a session whose logits depend on everything that a sequence holds, so
//! that any token fed twice, out of place or not at all changes the answer.

use nq_formats::{Files, Progress};
use nq_runtime::batch::{BatchRequest, sample_sequences};
use nq_runtime::generate::generate;
use nq_runtime::{
    Chunk, Detokenizer, Error, GenerationLimits, KvType, LogitsWanted, Result, Sampler,
    SamplingParams, Sequence, StopReason, Tokenizer,
};
use nq_testkit::sessions::{self, FakeSession, answer, limits, logits_after, session_spec};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const VOCAB: usize = 50;

fn fake(slots: usize, ctx: usize, max_rows: usize) -> FakeSession {
    let spec = session_spec(slots, ctx, KvType::F16, max_rows);
    let mut session = FakeSession::new(spec, VOCAB, |tokens| logits_after(tokens, VOCAB));
    session.before = Box::new(last_rows);
    session
}

/// Logits of other rows than the last are not needed.
fn last_rows(chunks: &[Chunk<'_>]) -> Result<()> {
    let needed = |c: &Chunk<'_>| matches!(c.logits, LogitsWanted::Last | LogitsWanted::None);
    assert!(
        !chunks.is_empty() && chunks.iter().all(needed),
        "{chunks:?}"
    );
    Ok(())
}

/// The greedy continuation of `prompt` by `n` tokens.
fn greedy(prompt: &[u32], n: usize) -> Vec<u32> {
    sessions::greedy(prompt, n, |tokens| logits_after(tokens, VOCAB))
}

fn sampler() -> Sampler {
    Sampler::new(SamplingParams::greedy(), 0).unwrap()
}

#[test]
fn answers_follow_the_model_in_any_chunking() {
    let prompt: Vec<u32> = (0..23).collect();
    for rows in [1, 2, 7, 22, 23, 24, 100] {
        let mut session = fake(3, 200, rows);
        let mut sequence = Sequence::new(&mut session, 2);
        let mut seen = Vec::new();
        let answer = generate(
            &mut session,
            &mut sequence,
            &prompt,
            &mut sampler(),
            &limits(10),
            &mut |t| {
                seen.push(t);
                ControlFlow::Continue(())
            },
        )
        .unwrap();
        assert_eq!(answer.tokens, greedy(&prompt, 10), "{rows}");
        assert_eq!(seen, answer.tokens);
        assert_eq!(answer.stop, StopReason::MaxTokens);
        assert_eq!(answer.stats.prompt_tokens, 23);
        assert_eq!(answer.stats.reused_tokens, 0);
        assert_eq!(answer.stats.tokens, 10);
        // The prompt in as few chunks as rows allow, then one forward per token but the last.
        assert_eq!(session.rows.len(), 23usize.div_ceil(rows) + 9);
        assert_eq!(session.sequences[2], sequence.tokens());
        assert_eq!(sequence.tokens().len(), 23 + 9);
    }
}

/// A prompt that shares a beginning with the cache gives the same answer as with an empty cache,
/// and only its rest is computed.
#[test]
fn common_prefixes_are_kept() {
    let mut session = fake(1, 300, 64);
    let mut sequence = Sequence::new(&mut session, 0);
    let mut ask = |prompt: &[u32], reused: usize| {
        session.rows.clear();
        let answer = answer(
            &mut session,
            &mut sequence,
            prompt,
            &mut sampler(),
            &limits(5),
        )
        .unwrap();
        assert_eq!(answer.tokens, greedy(prompt, 5));
        assert_eq!(answer.stats.reused_tokens, reused);
        assert_eq!(session.rows[0], prompt.len() - reused);
        assert_eq!(session.sequences[0], sequence.tokens());
        answer.tokens
    };
    let first: Vec<u32> = (0..20).collect();
    let answer = ask(&first, 0);
    // The next turn: all but the last token of the answer are cached.
    let next = [&first[..], &answer, &[3, 4, 5]].concat();
    ask(&next, 24);
    // A template that rewrites the answer: only the first prompt is shared.
    let rewritten = [&first[..], &[answer[0] ^ 1], &[9, 9]].concat();
    ask(&rewritten, 20);
    // The same prompt again: its last token is fed for its logits.
    ask(&rewritten, rewritten.len() - 1);
    // A prefix of the cache.
    ask(&rewritten[..8], 7);
    ask(&[49], 0);
}

#[test]
fn stop_tokens_end_the_answer_and_are_left_out() {
    let prompt = [1, 2, 3];
    let free = greedy(&prompt, 30);
    for at in [0, 1, 6] {
        let stop = free[at];
        if free[..at].contains(&stop) {
            continue;
        }
        let mut session = fake(1, 100, 8);
        let mut sequence = Sequence::new(&mut session, 0);
        let stops = [1000, stop];
        let limits = GenerationLimits {
            stop: &stops,
            ..limits(30)
        };
        let answer = generate(
            &mut session,
            &mut sequence,
            &prompt,
            &mut sampler(),
            &limits,
            &mut |t| {
                assert_ne!(t, stop);
                ControlFlow::Continue(())
            },
        )
        .unwrap();
        assert_eq!(answer.tokens, free[..at]);
        assert_eq!(answer.stop, StopReason::Eos(stop));
        assert_eq!(answer.stats.tokens, at + 1, "the stop token was sampled");
        assert_eq!(sequence.tokens(), [&prompt[..], &free[..at]].concat());
        assert_eq!(session.sequences[0], sequence.tokens());
    }
}

#[test]
fn the_context_ends_the_answer() {
    let prompt = [1, 2, 3];
    let mut session = fake(1, 10, 8);
    let mut sequence = Sequence::new(&mut session, 0);
    let mut ask = |prompt: &[u32], max| {
        answer(
            &mut session,
            &mut sequence,
            prompt,
            &mut sampler(),
            &limits(max),
        )
    };
    let answer = ask(&prompt, 100).unwrap();
    assert_eq!(answer.stop, StopReason::ContextFull);
    assert_eq!(
        answer.tokens,
        greedy(&prompt, 7),
        "prompt and answer fill it"
    );
    assert_eq!(ask(&prompt, 7).unwrap().stop, StopReason::MaxTokens);
    let answer = ask(&[5; 9], 100).unwrap();
    assert_eq!(
        (answer.tokens.len(), answer.stop),
        (1, StopReason::ContextFull)
    );
    let e = ask(&[5; 10], 100).unwrap_err();
    assert!(
        matches!(
            e,
            Error::ContextFull {
                capacity: 10,
                needed: 11
            }
        ),
        "{e}"
    );
    assert!(matches!(ask(&[], 5).unwrap_err(), Error::Request { .. }));
    assert!(ask(&prompt, 0).unwrap().tokens.is_empty());
}

#[test]
fn interrupts_leave_the_sequence_usable() {
    let prompt: Vec<u32> = (0..20).collect();
    let free = greedy(&prompt, 10);
    let mut session = fake(1, 100, 4);
    let mut sequence = Sequence::new(&mut session, 0);
    let flag = AtomicBool::new(false);
    let with_flag = GenerationLimits {
        interrupt: Some(&flag),
        ..limits(10)
    };
    // Interrupted by the receiver, by the flag during decoding, by the flag before the prompt is fed.
    for case in 0..3 {
        flag.store(case == 2, Ordering::Relaxed);
        let mut n = 0;
        let answer = generate(
            &mut session,
            &mut sequence,
            &prompt,
            &mut sampler(),
            &with_flag,
            &mut |_| {
                n += 1;
                match (case, n) {
                    (0, 4) => return ControlFlow::Break(()),
                    (1, 4) => flag.store(true, Ordering::Relaxed),
                    _ => {}
                }
                ControlFlow::Continue(())
            },
        )
        .unwrap();
        assert_eq!(answer.stop, StopReason::Interrupted);
        assert_eq!(answer.tokens, if case == 2 { &[] } else { &free[..4] });
        assert_eq!(session.sequences[0], sequence.tokens());
    }
    flag.store(false, Ordering::Relaxed);
    let again = answer(
        &mut session,
        &mut sequence,
        &prompt,
        &mut sampler(),
        &with_flag,
    )
    .unwrap();
    assert_eq!(again.tokens, free);
}

#[test]
fn failures_leave_the_sequence_in_step() {
    let prompt: Vec<u32> = (0..20).collect();
    for fail_at in 0..9 {
        let mut session = fake(1, 100, 6);
        let mut sequence = Sequence::new(&mut session, 0);
        let mut forwards = 0..fail_at;
        session.before = Box::new(move |chunks| match forwards.next() {
            Some(_) => last_rows(chunks),
            None => Err(Error::Logits {
                found: "a test".into(),
            }),
        });
        let mut ask = |session: &mut FakeSession| {
            answer(session, &mut sequence, &prompt, &mut sampler(), &limits(8))
        };
        ask(&mut session).unwrap_err();
        session.before = Box::new(last_rows);
        let answer = ask(&mut session).unwrap();
        assert_eq!(answer.tokens, greedy(&prompt, 8), "{fail_at}");
    }
}

#[test]
fn times_are_split_at_the_first_token() {
    let mut session = fake(1, 100, 6);
    let mut sequence = Sequence::new(&mut session, 0);
    let sleep = |_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        ControlFlow::Continue(())
    };
    let stats = generate(
        &mut session,
        &mut sequence,
        &[1, 2],
        &mut sampler(),
        &limits(11),
        &mut { sleep },
    )
    .unwrap()
    .stats;
    assert!(stats.decode.as_millis() >= 55, "{stats:?}");
    let rate = stats.tokens_per_second().unwrap();
    assert!((rate - 10.0 / stats.decode.as_secs_f64()).abs() < 1e-9);
    assert_eq!(stats.bytes_per_second(1000), Some(rate * 1000.0));
    let one = nq_runtime::Stats { tokens: 1, ..stats };
    assert_eq!(one.tokens_per_second(), None);
}

#[test]
fn text_comes_in_whole_characters() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let tokenizer = Tokenizer::from_files(&Files::Folder(demo)).unwrap();
    let mut session = fake(1, 400, 8);
    let mut sequence = Sequence::new(&mut session, 0);
    let mut detokenizer = Detokenizer::new(&tokenizer, true);
    let mut text = String::new();
    let answer = generate(
        &mut session,
        &mut sequence,
        &[1],
        &mut sampler(),
        &limits(200),
        &mut |token| {
            text.extend(detokenizer.push(token));
            ControlFlow::Continue(())
        },
    )
    .unwrap();
    text.extend(detokenizer.flush());
    assert_eq!(text, tokenizer.decode(&answer.tokens, true));
}

#[derive(Default)]
struct Count(AtomicU64);

impl Progress for Count {
    fn advance(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

/// Sequences depend on the seed alone, not on the slots nor on the rows of a forward.
#[test]
fn batches_do_not_change_sequences() {
    let prompts: Vec<Vec<u32>> = (0..13).map(|i| vec![i; 1 + i as usize * 2]).collect();
    let request = BatchRequest {
        prompts: &prompts,
        length: 20,
        stop: &[],
        sampling: SamplingParams {
            seed: 5,
            ..SamplingParams::default()
        },
    };
    let run = |slots, rows| {
        let count = Count::default();
        let mut session = fake(slots, 20, rows);
        let found = sample_sequences(&mut session, &request, &count).unwrap();
        let sampled: usize = prompts
            .iter()
            .map(|p| 20usize.saturating_sub(p.len()))
            .sum();
        assert_eq!(count.0.load(Ordering::Relaxed), sampled as u64);
        (found, session.rows.len())
    };
    let (alone, steps) = run(1, 1);
    for (i, sequence) in alone.iter().enumerate() {
        assert_eq!(sequence.len(), 20);
        let own = prompts[i].len().min(20);
        assert_eq!(sequence[..own], prompts[i][..own]);
        let mut sampler = Sampler::new(request.sampling, i as u64).unwrap();
        sampler.begin(&prompts[i]);
        for at in own..20 {
            let expected = sampler
                .sample(&logits_after(&sequence[..at], VOCAB))
                .unwrap();
            assert_eq!(sequence[at], expected);
        }
    }
    for (slots, rows) in [(1, 16), (2, 3), (4, 4), (5, 64), (13, 13), (40, 1000)] {
        let (found, fewer) = run(slots, rows);
        assert_eq!(found, alone, "{slots} slots, {rows} rows");
        assert!(fewer < steps);
    }
    let other = BatchRequest {
        sampling: SamplingParams {
            seed: 6,
            ..request.sampling
        },
        ..request
    };
    let found = sample_sequences(&mut fake(4, 20, 64), &other, &()).unwrap();
    assert_ne!(found, alone);
}

#[test]
fn batches_end_at_stop_tokens() {
    // The prompt holds the stop token; only a sampled one ends a sequence.
    let stop = 7;
    let prompts: Vec<Vec<u32>> = (0..40).map(|i| vec![stop, i]).collect();
    let request = BatchRequest {
        prompts: &prompts,
        length: 60,
        stop: &[stop],
        sampling: SamplingParams::default(),
    };
    let found = sample_sequences(&mut fake(7, 60, 64), &request, &()).unwrap();
    let mut early = 0;
    for sequence in &found {
        let sampled = &sequence[2..];
        match sampled.iter().position(|&t| t == stop) {
            Some(at) => {
                assert_eq!(at + 1, sampled.len());
                early += 1;
            }
            None => assert_eq!(sequence.len(), 60),
        }
    }
    assert!(early > 0 && early <= 40);
}

#[test]
fn batches_refuse_what_does_not_fit() {
    let prompts = [vec![1], vec![]];
    let request = |prompts, length| BatchRequest {
        prompts,
        length,
        stop: &[],
        sampling: SamplingParams::default(),
    };
    let run = |r| sample_sequences(&mut fake(2, 10, 8), &r, &());
    assert_eq!(run(request(&prompts[..1], 11)).unwrap()[0].len(), 11);
    assert!(matches!(
        run(request(&prompts[..1], 12)).unwrap_err(),
        Error::ContextFull {
            capacity: 10,
            needed: 11
        }
    ));
    let e = run(request(&prompts, 5)).unwrap_err().to_string();
    assert!(e.contains("sequence 1"), "{e}");
    assert_eq!(run(request(&[], 5)).unwrap(), Vec::<Vec<u32>>::new());
}
