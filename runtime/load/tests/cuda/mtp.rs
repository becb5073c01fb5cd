//! Drafts by a model's MTP layer on a GPU. Without one the tests say that they are skipped; `NQ_REQUIRE_CUDA=1` makes
//! that a failure.

use crate::common::mtp::{PublishedLayer, check_forks};
use crate::common::published::ask;
use crate::common::{Store, feed, gpu_engine, nq, tokens, wide_hybrid};
use nq_formats::{AffineScheme, Bits, Group, Tensor, Weight, Zeros};
use nq_kernels::KernelSet;
use nq_load::StreamDrafts;
use nq_model::{Dims, Experts, ModelConfig};
use nq_runtime::generate::Sequence;
use nq_runtime::speculation::head::frequent_tokens;
use nq_runtime::{
    DeviceChoice, DraftLayer, DraftedBy, Engine, LoadOptions, Sampler, SamplingParams, SessionSpec,
    Speculation,
};
use nq_testkit::sessions::{answer, limits};

fn config() -> ModelConfig {
    ModelConfig {
        mtp_layers: 1,
        ..wide_hybrid("qwen35", 6, false)
    }
}

/// A mixture, whose shared expert stands behind the others or, being of another width, by itself.
fn mixture(shared: usize) -> ModelConfig {
    let config = wide_hybrid("qwen35moe", 4, false);
    ModelConfig {
        mtp_layers: 1,
        experts: config.experts.map(|e| Experts { shared, ..e }),
        ..config
    }
}

/// Random weights, of which routers choose far from ties, so that rounded activations choose the same experts.
fn random(config: &ModelConfig) -> Store {
    let mut store = Store::random(config, 9);
    for (name, weight) in &mut store.matrices {
        if config.experts.is_some() && name.contains("mlp.gate") {
            let Dims { rows, cols } = weight.dims();
            let mut values = vec![0.0; rows * cols];
            for (row, values) in values.chunks_exact_mut(cols).enumerate() {
                weight.dequantize_row(row, values).unwrap();
                values.iter_mut().for_each(|v| *v *= 8.0);
            }
            *weight = Weight::Dense(Tensor::from_f32(vec![rows, cols], values).unwrap());
        }
    }
    store
}

fn on_gpu() -> LoadOptions {
    LoadOptions {
        device: DeviceChoice::Cuda(0),
        ..LoadOptions::default()
    }
}

fn gpu_session(engine: &dyn Engine) -> Box<dyn nq_runtime::Session> {
    let spec = SessionSpec {
        slots: 2,
        ctx: 600,
        kv: nq_runtime::KvType::F16,
        max_rows: 300,
        drafts: DraftLayer::mtp(engine.config()).map_or(DraftedBy::Nothing, DraftedBy::Layer),
        ..SessionSpec::default()
    };
    engine.session(spec).unwrap()
}

/// Texts that prompts and steps brought, that were cut, and others beside them; the layer's rows come from one token
/// up to more than its buffers take at once.
#[test]
fn drafts_are_those_of_the_published_computation() {
    let int8 = Some(AffineScheme::new(Bits::B8, Group::Size(128), Zeros::None));
    for (config, scheme) in [
        (config(), None),
        (config(), int8),
        (mixture(256), None),
        (mixture(512), None),
    ] {
        let plain = random(&config);
        let store = scheme.map_or(plain.clone(), |scheme| plain.quantized(scheme));
        let Some(engine) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        let cpu = nq(&config, &store);
        let published = PublishedLayer {
            config: &config,
            store: &store,
            drafted: frequent_tokens,
        };
        let layer = StreamDrafts::mtp(&config, &store, None, &on_gpu()).unwrap();
        let mut session = gpu_session(&*engine);
        let mut drafter = layer.drafter(&mut *session).unwrap();
        let mut check = |slot: usize, text: &[u32], fed: usize, from: usize| {
            let held = session.len(slot);
            let held = session.truncate(slot, held.min(fed));
            for part in text[held..text.len() - 1].chunks(300) {
                feed(&mut *session, slot, part);
            }
            let found = ask(&mut *drafter, &mut *session, slot, text);
            assert_eq!(found.len(), 5, "{} tokens", text.len());
            // Routers may yet be near a tie, and then what rounding shifts decides.
            let tie = if config.experts.is_some() { 0.3 } else { 0.05 };
            published.check(&*cpu, (text, from), &found, tie);
        };
        let text = tokens(280, 3);
        for length in [2, 3, 7, 9, 30, 46, 250, 251, 280] {
            check(0, &text[..length], length, 0);
        }
        check(1, &tokens(20, 12), 0, 0);
        // Rows of the last step are taken back.
        check(0, &[&text[..275], &tokens(2, 5)[..]].concat(), 275, 0);
        check(0, &tokens(50, 13), 0, 0);
    }
}

#[test]
fn forks_know_what_the_layer_saw_of_the_other_sequence() {
    let config = config();
    let store = random(&config);
    let Some(engine) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let cpu = nq(&config, &store);
    let published = PublishedLayer {
        config: &config,
        store: &store,
        drafted: frequent_tokens,
    };
    let layer = StreamDrafts::mtp(&config, &store, None, &on_gpu()).unwrap();
    check_forks(&published, (&*cpu, &layer), || gpu_session(&*engine), 0.05);
}

/// An answer with drafts is the one without, up to where two tokens are almost equally likely.
#[test]
fn drafts_change_no_answer() {
    let config = config();
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let store = Store::random(&config, 9).quantized(int4);
    let Some(engine) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let layer = StreamDrafts::mtp(&config, &store, None, &on_gpu()).unwrap();
    let prompt = tokens(40, 8);
    let answer = |drafts: bool| {
        let mut session = gpu_session(&*engine);
        let speculation = drafts.then(|| {
            let drafter = layer.drafter(&mut *session).unwrap();
            Speculation::new(drafter).always().at_most(5)
        });
        let mut sequence = Sequence::new(&mut *session, 0).with_drafts(speculation);
        let mut sampler = Sampler::new(SamplingParams::greedy(), 3).unwrap();
        let made = answer(
            &mut *session,
            &mut sequence,
            &prompt,
            &mut sampler,
            &limits(100),
        )
        .unwrap();
        assert_eq!(made.stats.drafted > 300, drafts, "{:?}", made.stats);
        made.tokens
    };
    let (with, without) = (answer(true), answer(false));
    let mut s = gpu_session(&*engine);
    let vocab = config.vocab_size;
    let same = with
        .iter()
        .zip(&without)
        .take_while(|(a, b)| a == b)
        .count();
    if same < with.len() {
        let text = [&prompt[..], &with[..same]].concat();
        let logits = feed(&mut *s, 0, &text);
        let last = &logits[logits.len() - vocab..];
        let gap = last[without[same] as usize] - last[with[same] as usize];
        assert!(gap.abs() < 0.05, "token {same}: {gap}");
    }
}
