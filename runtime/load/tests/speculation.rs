//! Drafted tokens change the time of an answer and nothing else.

use crate::common::{Store, options, small_config, tokens};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_model::ModelConfig;
use nq_runtime::generate::{Generated, GenerationLimits, Sequence, StopReason, generate};
use nq_runtime::interface::Draft;
use nq_runtime::{
    ActivationChoice, Batch, Costs, DraftModel, Drafter, Engine, EngineKind, KvType, LoadOptions,
    LogitBias, Piece, Sampler, SamplingParams, Session, Speculation,
};
use nq_testkit::sessions::{answer, piece, session_spec};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn limits(max_tokens: usize, stop: &[u32]) -> GenerationLimits<'_> {
    GenerationLimits {
        stop,
        max_tokens,
        interrupt: None,
    }
}

fn stores(config: &ModelConfig) -> [(&'static str, Store); 3] {
    let plain = Store::random(config, 9);
    let int = |bits, group| AffineScheme::new(bits, Group::Size(group), Zeros::Integer);
    [
        ("int4", plain.quantized(int(Bits::B4, 64))),
        ("int8", plain.quantized(int(Bits::B8, 128))),
        ("dense", plain),
    ]
}

fn session(engine: &dyn Engine, kv: KvType, ctx: usize) -> Box<dyn Session> {
    engine.session(session_spec(2, ctx, kv, 400)).unwrap()
}

/// How an answer is made.
struct Setting<'a> {
    engine: &'a dyn Engine,
    ctx: usize,
    params: SamplingParams,
    stream: u64,
    /// Tokens of which it is mostly made, so that it repeats itself.
    favoured: u32,
}

impl Setting<'_> {
    /// An answer to `prompt`, and the sequence's length after it.
    fn answer(
        &self,
        prompt: &[u32],
        limits: &GenerationLimits<'_>,
        drafts: Option<Speculation>,
    ) -> (Generated, usize) {
        let mut session = session(self.engine, KvType::F16, self.ctx);
        let mut sequence = Sequence::new(&mut *session, 0).with_drafts(drafts);
        let mut sampler = Sampler::new(self.params, self.stream).unwrap();
        sampler.set_bias(LogitBias::new((0..self.favoured).map(|id| (id, 9.0))).unwrap());
        let mut seen = Vec::new();
        let answer = generate(
            &mut *session,
            &mut sequence,
            prompt,
            &mut sampler,
            limits,
            &mut |token| {
                seen.push(token);
                ControlFlow::Continue(())
            },
        )
        .unwrap();
        assert_eq!(seen, answer.tokens);
        assert_eq!(sequence.tokens().len(), session.len(0));
        assert_eq!(
            sampler.position() as usize,
            prompt.len() + answer.stats.tokens
        );
        (answer, session.len(0))
    }

    /// Asserts that the answer with drafts is the one without; that one, and how many tokens were
    /// right of those drafted last.
    fn check(
        &self,
        prompt: &[u32],
        limits: &GenerationLimits<'_>,
        drafters: &[&dyn Fn() -> Speculation],
    ) -> (Generated, usize) {
        let (plain, end) = self.answer(prompt, limits, None);
        assert_eq!(plain.stats.drafted, 0);
        let mut right = 0;
        for (i, drafter) in drafters.iter().enumerate() {
            let (drafted, same_end) = self.answer(prompt, limits, Some(drafter()));
            let what = format!("drafter {i}, {:?}, {limits:?}, {}", self.params, self.ctx);
            assert_eq!(plain.tokens, drafted.tokens, "{what}");
            assert_eq!(plain.stop, drafted.stop, "{what}");
            assert_eq!(plain.stats.tokens, drafted.stats.tokens, "{what}");
            assert_eq!(end, same_end, "{what}");
            right = drafted.stats.accepted;
            assert!(right <= drafted.stats.drafted, "{what}");
        }
        (plain, right)
    }
}

fn load(config: &ModelConfig, store: &Store) -> Arc<dyn Engine> {
    let options = LoadOptions {
        activations: ActivationChoice::Auto,
        ..options(EngineKind::Nq)
    };
    nq_load::load(config, store, &options, &()).unwrap()
}

/// Drafts by a model whose prompts are computed in parts.
fn by_model(engine: &dyn Engine, ctx: usize) -> Speculation {
    let session = engine
        .session(session_spec(4, ctx, KvType::Int8, 25))
        .unwrap();
    let vocab = engine.config().vocab_size;
    Speculation::new(Box::new(DraftModel::new(session, vocab)))
}

fn sampled(temperature: f32, repetition_penalty: f32, seed: u64) -> SamplingParams {
    SamplingParams {
        temperature,
        top_k: 4,
        seed,
        repetition_penalty,
        ..SamplingParams::greedy()
    }
}

/// A text that repeats itself.
fn prompt() -> Vec<u32> {
    let phrase = tokens(12, 8);
    [&phrase[..], &phrase, &tokens(20, 2), &phrase].concat()
}

/// The same answer with drafts and without, however it is sampled and wherever it ends.
#[test]
fn drafts_change_no_answer() {
    let config = small_config();
    let mut accepted = 0;
    for (_, store) in stores(&config) {
        let engine = load(&config, &store);
        for params in [
            SamplingParams::greedy(),
            sampled(0.05, 1.0, 5),
            sampled(0.05, 1.05, 5),
        ] {
            let prompt = prompt();
            let at = |ctx| Setting {
                engine: &*engine,
                ctx,
                params,
                stream: 3,
                favoured: 4,
            };
            let ngram = || Speculation::ngram();
            let always = || Speculation::ngram().always();
            let drafters: [&dyn Fn() -> Speculation; 2] = [&ngram, &always];
            let (free, right) = at(400).check(&prompt, &limits(120, &[]), &drafters);
            accepted += right;
            // All kinds of ends, also with a draft that runs past them.
            for max in [1, 2, 3, 50, 51, 52, 53] {
                at(400).check(&prompt, &limits(max, &[]), &drafters);
            }
            for at_token in [5, 40, 41, 42, 43] {
                let stop = [free.tokens[at_token]];
                let (ended, _) = at(400).check(&prompt, &limits(120, &stop), &drafters);
                assert_eq!(ended.stop, StopReason::Eos(stop[0]));
            }
            for ctx in [prompt.len() + 30, prompt.len() + 33] {
                let (ended, _) = at(ctx).check(&prompt, &limits(120, &[]), &drafters);
                assert_eq!(ended.stop, StopReason::ContextFull);
            }
        }
    }
    assert!(accepted > 50, "{accepted} drafted tokens were right");
}

/// A draft model is followed or not, whatever it says: one like the target, one that knows nothing of
/// it, and one whose context is shorter than the text.
#[test]
fn a_draft_model_changes_no_answer() {
    let config = small_config();
    let [(_, int4), (_, int8), _] = stores(&config);
    let strange = Store::random(&config, 77);
    let (target, like) = (load(&config, &int4), load(&config, &int8));
    let strange = load(&config, &strange);
    let short = prompt().len() + 40;
    let drafters: [&dyn Fn() -> Speculation; 4] = [
        &|| by_model(&*strange, 400).always(),
        &|| by_model(&*like, short).always(),
        &|| by_model(&*like, 400),
        &|| by_model(&*like, 400).always(),
    ];
    let mut accepted = 0;
    for seed in 0..4 {
        for temperature in [0.0, 0.3, 1.0] {
            for penalty in [1.0, 1.2] {
                let setting = Setting {
                    engine: &*target,
                    ctx: 400,
                    params: sampled(temperature, penalty, seed),
                    stream: seed,
                    favoured: 0,
                };
                let (free, right) = setting.check(&prompt(), &limits(90, &[]), &drafters);
                accepted += right;
                let stop = [free.tokens[30]];
                setting.check(&prompt(), &limits(90, &stop), &drafters);
            }
        }
    }
    assert!(accepted > 200, "{accepted} drafted tokens were right");
}

/// Sequences of a batch, drafted for or not, draw what they draw alone.
#[test]
fn drafts_change_no_batch() {
    let config = small_config();
    let [(_, int4), (_, int8), _] = stores(&config);
    let (target, like) = (load(&config, &int4), load(&config, &int8));
    let run = |mut speculation: Option<Speculation>| {
        let mut session = target
            .session(session_spec(3, 300, KvType::F16, 200))
            .unwrap();
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| tokens(30 + 9 * i, 5 + i as u64)).collect();
        if let Some(speculation) = &mut speculation {
            // The third goes without.
            (0..2).for_each(|slot| speculation.follow(slot, prompts[slot].clone()));
        }
        let mut batch = Batch::new(&mut *session).with_drafts(speculation.as_mut());
        let mut pieces: Vec<Piece<'_>> = (0..3)
            .map(|slot| {
                piece(
                    slot,
                    &prompts[slot],
                    Sampler::new(sampled(0.2, 1.1, 8), slot as u64).unwrap(),
                    40 + slot,
                )
            })
            .collect();
        let mut drawn = vec![Vec::new(); 3];
        let mut steps = 0;
        while !pieces.is_empty() || batch.running() > 0 {
            let each = &mut |slot: usize, token: nq_runtime::Result<u32>| {
                drawn[slot].push(token.unwrap());
                ControlFlow::Continue(())
            };
            batch.step(std::mem::take(&mut pieces), each).unwrap();
            steps += 1;
        }
        let lengths: Vec<usize> = (0..3).map(|slot| batch.session().len(slot)).collect();
        let positions: Vec<u64> = (0..3)
            .map(|s| batch.sampler(s).unwrap().position())
            .collect();
        drop(batch);
        let counts = speculation.map(|s| s.counts()).unwrap_or_default();
        ((drawn, lengths, positions), steps, counts)
    };
    let (plain, steps, _) = run(None);
    for speculation in [Speculation::ngram(), Speculation::ngram().always()] {
        assert_eq!(run(Some(speculation)).0, plain);
    }
    let (drafted, fewer, counts) = run(Some(by_model(&*like, 300).always()));
    assert_eq!(drafted, plain);
    assert!(counts.accepted > 10, "{counts:?}");
    // The third sequence is the longest and has no drafts.
    assert_eq!(steps, fewer);
}

/// Tokens that are wrong.
struct Useless {
    asked: Arc<AtomicUsize>,
    fails: bool,
}

impl Drafter for Useless {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> nq_runtime::Result<()> {
        if self.fails {
            return Err(nq_runtime::Error::LogitsNotFinite);
        }
        for draft in drafts {
            self.asked.fetch_add(1, Ordering::Relaxed);
            draft.tokens = vec![100; draft.most];
        }
        Ok(())
    }
}

/// What does not pay or fails is left alone, and says so once; what costs more than it could save is not tried again.
#[test]
fn drafts_switch_themselves_off() {
    let config = small_config();
    let [(_, int4), ..] = stores(&config);
    let engine = load(&config, &int4);
    // Seconds of a drafted token where a step takes one; how often the drafter is asked in three answers.
    let cases = [
        (false, 0.25, "does not pay", 20..100),
        (false, 8.0, "does not pay", 16..20),
        (true, 0.25, "not finite", 0..1),
    ];
    for (fails, draft, why, expected) in cases {
        let asked = Arc::new(AtomicUsize::new(0));
        let useless = Useless {
            asked: Arc::clone(&asked),
            fails,
        };
        let mut session = session(&*engine, KvType::F16, 400);
        let (step, row) = (1.0, 0.25);
        let costs = Costs { step, row, draft };
        let drafts = Speculation::new(Box::new(useless)).with_costs(costs);
        let mut sequence = Sequence::new(&mut *session, 0).with_drafts(Some(drafts));
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
        let mut notes = Vec::new();
        for last in 0..3 {
            let prompt = [prompt(), vec![last]].concat();
            let limits = limits(100, &[]);
            let (session, prompt) = (&mut *session, &prompt);
            answer(session, &mut sequence, prompt, &mut sampler, &limits).unwrap();
            notes.extend(sequence.speculation().unwrap().take_note());
        }
        assert!(notes.len() == 1 && notes[0].contains(why), "{notes:?}");
        let asked = asked.load(Ordering::Relaxed);
        assert!(expected.contains(&asked), "{why}: asked {asked} times");
    }
}
