//! Drafts on a device that draws tokens itself: a fake one, and a GPU. Without a GPU its tests say that they
//! are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

mod common;

use common::device::{DEPTH, Device, VOCAB, alone, piece};
use nq_kernels::rng::Philox;
use nq_runtime::speculation::{Draft, DraftCounts};
use nq_runtime::{Batch, DraftModel, Drafter, Error, Result, Speculation};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

/// What each slot's text will be, prompt included.
type Futures = Arc<Mutex<Vec<Vec<u32>>>>;

/// Knows texts, and says something else at some of their places.
struct Oracle {
    texts: Futures,
    /// Of so many tokens one is wrong; 1: all are.
    wrong_in: usize,
    free: bool,
}

impl Drafter for Oracle {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        let texts = self.texts.lock().unwrap();
        for draft in drafts {
            let (text, at) = (&texts[draft.slot], draft.text.len());
            assert!(text.starts_with(draft.text), "slot {}", draft.slot);
            let end = text.len().min(at + draft.most);
            let guess = |i: usize| match i.is_multiple_of(self.wrong_in) {
                true => (text[i] + 1) % VOCAB as u32,
                false => text[i],
            };
            draft.tokens = (at..end).map(guess).collect();
        }
        Ok(())
    }

    fn is_free(&self) -> bool {
        self.free
    }
}

fn oracle(texts: &Futures, wrong_in: usize, free: bool) -> Speculation {
    Speculation::new(Box::new(Oracle {
        texts: texts.clone(),
        wrong_in,
        free,
    }))
}

/// A sequence: its sampler's stream, its prompt and what it has drawn.
type Known = Option<(u64, Vec<u32>, Vec<u32>)>;

/// Lets sequences begin, be cancelled, end at a token, at their length, at the end of the context and
/// where there are no pages, at random; each draws what it draws alone.
fn at_random(positions: usize, mut speculation: Speculation, texts: &Futures) -> DraftCounts {
    const SLOTS: usize = 5;
    const END: u32 = 3;
    let mut device = Device::new(SLOTS, SLOTS, positions).checking(9);
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
                assert_eq!(batch.session().len(slot), fed, "step {step}");
                if let Some(sampler) = batch.sampler(slot) {
                    assert_eq!(sampler.position() as usize, fed + 1, "step {step}");
                }
                batch.session().truncate(slot, 0);
            }
        }
    }
    drop(batch);
    assert!(
        ended > 200 && errors > 0,
        "{ended} ended, {errors} errors"
    );
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
        let logits = common::device::logits_after(&text);
        text.push(sampler.sample(&logits).unwrap());
    }
    text[prompt.len()..].to_vec()
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::common::{Store, feed, small_config, tokens};
    use nq_formats::{AffineScheme, Bits, Group, ModelConfig, Zeros};
    use nq_kernels::KernelSet;
    use nq_runtime::generate::{Generated, Limits, Sequence, StopReason, generate};
    use nq_runtime::{
        DeviceChoice, Engine, KvType, LoadOptions, Sampler, SamplingParams, Session, SessionSpec,
    };

    fn config() -> ModelConfig {
        ModelConfig {
            hidden_size: 320,
            intermediate_size: 520,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 128,
            vocab_size: 1001,
            max_position_embeddings: 1024,
            ..small_config()
        }
    }

    fn gpu(scheme: Option<Bits>) -> Option<Arc<dyn Engine>> {
        let required = std::env::var_os("NQ_REQUIRE_CUDA").is_some_and(|v| v == "1");
        if let Err(e) = nq_kernels::cuda::device_count() {
            assert!(!required, "NQ_REQUIRE_CUDA=1, but: {e}");
            println!("skipped: {e}");
            return None;
        }
        let options = LoadOptions {
            device: DeviceChoice::Cuda(0),
            kernels: KernelSet::Fused,
            ..LoadOptions::default()
        };
        let config = config();
        let plain = Store::random(&config, 9);
        let store = match scheme {
            Some(bits) => plain.quantized(AffineScheme::new(bits, Group::Size(64), Zeros::Integer)),
            None => plain,
        };
        let engine = nq_runtime::load(&config, &store, &options, &());
        Some(engine.expect("the GPU loads it"))
    }

    fn session(engine: &dyn Engine, kv: KvType) -> Box<dyn Session> {
        let spec = SessionSpec {
            slots: 2,
            ctx: 600,
            pages: None,
            kv,
            max_rows: 300,
        };
        engine.session(spec).expect("it fits")
    }

    #[derive(Clone, Copy)]
    struct Setting<'a> {
        engine: &'a dyn Engine,
        kv: KvType,
        params: SamplingParams,
        logprobs: Option<usize>,
        prompt: &'a [u32],
        max: usize,
        stop: &'a [u32],
    }

    impl Setting<'_> {
        fn sampler(&self) -> Sampler {
            let mut sampler = Sampler::new(self.params, 3).unwrap();
            sampler.set_logprobs(self.logprobs).unwrap();
            sampler
        }

        /// The answer, and its length in the cache.
        fn answer(&self, drafts: Option<Speculation>) -> (Generated, usize) {
            let mut session = session(self.engine, self.kv);
            let mut sequence = Sequence::new(&mut *session, 0).with_drafts(drafts);
            let mut sampler = self.sampler();
            let limits = Limits {
                stop: self.stop,
                max_tokens: self.max,
                interrupt: None,
            };
            let each = &mut |_| ControlFlow::Continue(());
            let answer = generate(
                &mut *session,
                &mut sequence,
                self.prompt,
                &mut sampler,
                &limits,
                each,
            )
            .unwrap();
            assert_eq!(sequence.tokens().len(), session.len(0));
            let drawn = answer.stats.tokens;
            assert_eq!(sampler.position() as usize, self.prompt.len() + drawn);
            if self.logprobs.is_some() {
                let said: Vec<u32> = sampler.logprobs().iter().map(|l| l.token).collect();
                assert_eq!(said[..answer.tokens.len()], answer.tokens[..]);
                assert!(sampler.logprobs().iter().all(|l| l.logprob <= 0.0));
            }
            (answer, session.len(0))
        }

        /// Tokens of `answer` up to where it may turn elsewhere than steps of one row do: a near tie of
        /// logits or, if they are drawn, of probabilities.
        fn follows(&self, answer: &[u32]) -> usize {
            let mut session = session(self.engine, self.kv);
            let mut sampler = self.sampler();
            sampler.begin(self.prompt);
            let vocab = self.engine.config().vocab_size;
            let mut logits = feed(&mut *session, 0, self.prompt);
            for (i, &found) in answer.iter().enumerate() {
                let last = &logits[logits.len() - vocab..];
                let expected = sampler.sample(last).unwrap();
                if found != expected {
                    let gap = last[expected as usize] - last[found as usize];
                    let tie = !self.params.is_greedy() || gap.abs() < 0.05;
                    assert!(tie, "token {i}: {found}, alone {expected}, {gap}");
                    return i;
                }
                logits = feed(&mut *session, 0, &[found]);
            }
            answer.len()
        }
    }

    fn settings() -> [(SamplingParams, Option<usize>); 4] {
        let sampled = SamplingParams {
            temperature: 0.8,
            top_k: 20,
            top_p: 0.95,
            seed: 11,
            ..SamplingParams::greedy()
        };
        let flat = SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            ..sampled
        };
        [
            (SamplingParams::greedy(), None),
            (SamplingParams::greedy(), Some(2)),
            (sampled, Some(0)),
            (flat, None),
        ]
    }

    /// Answers with drafts, right ones and wrong ones, are those without: bit for bit where a few rows
    /// are computed as one is, otherwise up to near ties, which are rare.
    #[test]
    fn drafts_change_no_answer_on_a_gpu() {
        let (mut same, mut all) = (0, 0);
        for bits in [Some(Bits::B4), Some(Bits::B8), None] {
            let Some(engine) = gpu(bits) else { return };
            let few = session(&*engine, KvType::F16);
            let exact = few.exact_rows() >= few.draft_rows();
            assert!(few.draft_rows() >= 8);
            for kv in [KvType::F16, KvType::Int8] {
                for (params, logprobs) in settings() {
                    let prompt = tokens(120, 8);
                    let setting = Setting {
                        engine: &*engine,
                        kv,
                        params,
                        logprobs,
                        prompt: &prompt,
                        max: 200,
                        stop: &[],
                    };
                    let (plain, end) = setting.answer(None);
                    let future = [&prompt[..], &plain.tokens].concat();
                    for wrong_in in [1, 4, 11] {
                        let texts: Futures = Arc::new(Mutex::new(vec![future.clone()]));
                        let drafter = Lenient(oracle_of(&texts, wrong_in));
                        let drafts = Speculation::new(Box::new(drafter)).always();
                        let (drafted, same_end) = setting.answer(Some(drafts));
                        let what = format!("{bits:?} {kv} {params:?} {wrong_in}");
                        assert_eq!(end, same_end, "{what}");
                        assert_eq!(drafted.stats.tokens, 200, "{what}");
                        let stats = drafted.stats;
                        assert!(stats.drafted > 200, "{what}: {stats:?}");
                        match exact {
                            true => assert_eq!(plain.tokens, drafted.tokens, "{what}"),
                            false => same += setting.follows(&drafted.tokens),
                        }
                        all += 200;
                        if wrong_in == 11 && drafted.tokens == plain.tokens {
                            assert!(stats.accepted > 120, "{what}: {stats:?}");
                        }
                    }
                }
            }
            if !exact {
                println!("{same} of {all} tokens before the first near tie");
                assert!(same > all * 9 / 10, "{same} of {all}");
            }
        }
    }

    /// An answer ends at its length and at a stop token, also within a draft; what was computed behind is
    /// forgotten.
    #[test]
    fn drafts_are_cut_where_an_answer_ends_on_a_gpu() {
        let Some(engine) = gpu(Some(Bits::B4)) else {
            return;
        };
        let prompt = tokens(30, 5);
        let setting = Setting {
            engine: &*engine,
            kv: KvType::F16,
            params: SamplingParams::greedy(),
            logprobs: None,
            prompt: &prompt,
            max: 120,
            stop: &[],
        };
        let (free, _) = setting.answer(None);
        let texts: Futures = Arc::new(Mutex::new(vec![[&prompt[..], &free.tokens].concat()]));
        let drafts = || {
            let drafter = Lenient(oracle_of(&texts, 50));
            Some(Speculation::new(Box::new(drafter)).always())
        };
        for max in [1, 2, 3, 40, 41, 42] {
            let (cut, end) = Setting { max, ..setting }.answer(drafts());
            assert_eq!((cut.stats.tokens, end), (max, prompt.len() + max - 1));
            setting.follows(&cut.tokens);
        }
        for at in [5, 20, 21, 22, 23] {
            let stop = &free.tokens[at..=at];
            let (ended, end) = Setting { stop, ..setting }.answer(drafts());
            if free.tokens.starts_with(&ended.tokens) {
                assert_eq!(ended.stop, StopReason::Eos(stop[0]));
            }
            assert_eq!(end, prompt.len() + ended.tokens.len());
        }
    }

    /// The same model drafts for itself in another session: nearly all is right.
    #[test]
    fn a_draft_model_drafts_on_a_gpu() {
        let Some(engine) = gpu(Some(Bits::B4)) else {
            return;
        };
        let prompt = tokens(200, 6);
        for (params, logprobs) in settings() {
            let setting = Setting {
                engine: &*engine,
                kv: KvType::F16,
                params,
                logprobs,
                prompt: &prompt,
                max: 150,
                stop: &[],
            };
            let model = DraftModel::new(session(&*engine, KvType::F16), 1001);
            let drafts = Speculation::new(Box::new(model)).always();
            let (answer, _) = setting.answer(Some(drafts));
            setting.follows(&answer.tokens);
            let stats = answer.stats;
            if params.is_greedy() {
                let right = stats.accepted as f64 / stats.drafted as f64;
                assert!(right > 0.8, "{stats:?}");
                assert!(stats.draft_steps < 50, "{stats:?}");
            }
        }
    }

    fn oracle_of(texts: &Futures, wrong_in: usize) -> Oracle {
        Oracle {
            texts: texts.clone(),
            wrong_in,
            free: true,
        }
    }

    /// Drafts what another answer has at the same places, also once the texts are not the same any more.
    struct Lenient(Oracle);

    impl Drafter for Lenient {
        fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
            let mut texts = self.0.texts.lock().unwrap().clone();
            for (draft, text) in drafts.iter().zip(&mut texts) {
                let at = draft.text.len().min(text.len());
                text.splice(..at, draft.text.iter().copied());
            }
            let texts = Arc::new(Mutex::new(texts));
            Oracle { texts, ..self.0 }.draft(drafts)
        }

        fn is_free(&self) -> bool {
            true
        }
    }
}
