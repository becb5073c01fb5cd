//! Drafts on a GPU. Without one the tests say that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::common;
use crate::common::oracle::{Futures, oracle};
use crate::common::{Store, feed, fused_config, tokens, wide_hybrid};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::KernelSet;
use nq_model::ModelConfig;
use nq_runtime::generate::{Generated, GenerationLimits, Sequence, StopReason};
use nq_runtime::{
    DraftModel, DraftedBy, Engine, KvType, Sampler, SamplingParams, Session, SessionSpec,
    Speculation,
};
use nq_testkit::sessions::{answer, session_spec};
use std::sync::{Arc, Mutex};

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 1001,
        max_position_embeddings: 1024,
        ..fused_config()
    }
}

fn gpu(scheme: Option<Bits>) -> Option<Arc<dyn Engine>> {
    gpu_of(&config(), scheme)
}

/// A model whose states have to be taken back when drafts are wrong.
fn hybrid() -> ModelConfig {
    ModelConfig {
        vocab_size: 1001,
        max_position_embeddings: 1024,
        ..wide_hybrid("qwen35", 6, false)
    }
}

fn gpu_of(config: &ModelConfig, scheme: Option<Bits>) -> Option<Arc<dyn Engine>> {
    let plain = Store::random(config, 9);
    let store = match scheme {
        Some(bits) => plain.quantized(AffineScheme::new(bits, Group::Size(64), Zeros::Integer)),
        None => plain,
    };
    common::gpu_engine(config, &store, KernelSet::Fused)
}

fn session(engine: &dyn Engine, kv: KvType) -> Box<dyn Session> {
    let spec = SessionSpec {
        drafts: DraftedBy::Tokens,
        ..session_spec(2, 600, kv, 300)
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
        let limits = GenerationLimits {
            stop: self.stop,
            max_tokens: self.max,
            interrupt: None,
        };
        let answer = answer(
            &mut *session,
            &mut sequence,
            self.prompt,
            &mut sampler,
            &limits,
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
fn drafts_change_no_answer() {
    let (mut same, mut all) = (0, 0);
    let widths =
        |config: ModelConfig| [Some(Bits::B4), Some(Bits::B8), None].map(|b| (config.clone(), b));
    for (config, bits) in widths(config()).into_iter().chain(widths(hybrid())) {
        let Some(engine) = gpu_of(&config, bits) else {
            return;
        };
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
                    let drafts = oracle(&texts, wrong_in, true).always();
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
fn drafts_are_cut_where_an_answer_ends() {
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
    let drafts = || Some(oracle(&texts, 50, true).always());
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
fn a_draft_model_drafts() {
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
