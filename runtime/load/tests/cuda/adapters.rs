//! Adapters beside a model's weights on a GPU, compared with the CPU's. Without a GPU the tests say that they are skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::adapters::{applied, off, together};
use crate::common::adapted::made;
use crate::common::{Store, feed, fused_config, gpu_engine, nq, tokens, wide_hybrid};
use nq_formats::adapter::Lora;
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::KernelSet;
use nq_model::{ModelConfig, find};
use nq_runtime::{
    AppliedAdapter, DraftedBy, Engine, KvType, LogitsWanted, Sampler, SamplingParams, Session,
    SessionSpec,
};
use nq_testkit::sessions::{chunk, drawn, session_spec};

const INT4: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);

/// The greatest difference that rounding to FP16 makes, relative to the greatest logit.
const CLOSE: f32 = 2e-2;

/// Models with norms of heads, with biases, with neither; and with recurrences.
fn configs() -> [ModelConfig; 4] {
    let dense = |gguf: &str| ModelConfig {
        architecture: find(|a| a.gguf, gguf).unwrap(),
        ..fused_config()
    };
    [
        fused_config(),
        dense("qwen2"),
        dense("llama"),
        wide_hybrid("qwen35", 6, true),
    ]
}

fn session(engine: &dyn Engine, slots: usize) -> Box<dyn Session> {
    let spec = SessionSpec {
        drafts: DraftedBy::Tokens,
        ..session_spec(slots, 300, KvType::F16, 256)
    };
    engine.session(spec).unwrap()
}

/// An adapter of all Linears, and one of some.
fn loras(c: &ModelConfig, base: &Store) -> [Lora; 2] {
    let some = |name: &str| name.ends_with("v_proj") || name.ends_with("down_proj");
    [made(c, base, 1, |_| true).lora, made(c, base, 2, some).lora]
}

/// The adapters of the sequences in each slot: one, none, another, and both.
fn adapt(session: &mut dyn Session) {
    let both = [(0, 0.5), (1, -1.25)];
    let both = both.map(|(adapter, scale)| AppliedAdapter { adapter, scale });
    session.adapt(0, &applied(0, 1.0)).unwrap();
    session.adapt(2, &applied(1, 0.75)).unwrap();
    session.adapt(3, &both).unwrap();
}

/// Prompts, steps of all sequences, a step of one row, runs of several rows, and what follows a fork.
#[test]
fn adapted_rows_agree_with_the_cpu() {
    for config in configs() {
        for scheme in [None, Some(INT4)] {
            let plain = Store::random(&config, 7);
            let store = scheme.map_or(plain.clone(), |scheme| plain.quantized(scheme));
            let loras = loras(&config, &store);
            let cpu = nq(&config, &store).with_adapters(&loras, &[]).unwrap();
            let texts: Vec<Vec<u32>> = (0..4).map(|i| tokens(20 + 7 * i, i as u64)).collect();
            let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
            let mut theirs = session(&*cpu, 5);
            let without = together(&mut *theirs, &texts);
            for slot in 0..4 {
                theirs.truncate(slot, 0);
            }
            adapt(&mut *theirs);
            let expected = together(&mut *theirs, &texts);
            for slot in [0, 2, 3] {
                let changed = off(&expected[slot], &without[slot]);
                assert!(
                    changed > 5.0 * CLOSE,
                    "slot {slot} changes by {changed} only"
                );
            }
            let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
                continue;
            };
            let gpu = gpu.with_adapters(&loras, &[]).unwrap();
            let mut ours = session(&*gpu, 5);
            adapt(&mut *ours);
            let what = format!("{} {scheme:?}", config.architecture.title);
            let (mut worst, mut found) = (0f32, vec![(together(&mut *ours, &texts), expected)]);
            for step in [[3, 4, 5, 6], [9, 8, 7, 6]] {
                let step = step.map(|token| [token]);
                let step: Vec<&[u32]> = step.iter().map(<[u32; 1]>::as_slice).collect();
                found.push((together(&mut *ours, &step), together(&mut *theirs, &step)));
            }
            ours.fork(3, 4, ours.len(3)).unwrap();
            theirs.fork(3, 4, theirs.len(3)).unwrap();
            for (slot, n) in [(0, 1), (1, 1), (3, 1), (2, 5), (4, 3), (4, 1)] {
                let more = tokens(n, 11);
                let (a, b) = (
                    feed(&mut *ours, slot, &more),
                    feed(&mut *theirs, slot, &more),
                );
                found.push((vec![a], vec![b]));
            }
            for (a, b) in found.iter().flat_map(|(a, b)| a.iter().zip(b)) {
                worst = worst.max(off(a, b));
            }
            println!("{what}: off by {worst:.5} at most");
            assert!(worst < CLOSE, "{what}: off by {worst}");
        }
    }
}

/// Steps of more rows than the kernels of few rows take.
#[test]
fn many_sequences_with_adapters_are_those_of_each_alone() {
    let config = fused_config();
    let store = Store::random(&config, 7).quantized(INT4);
    let loras = loras(&config, &store);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let gpu = gpu.with_adapters(&loras, &[]).unwrap();
    let adapters_of = |i: usize| match i % 3 {
        0 => Vec::new(),
        i => applied(i - 1, 1.0 / i as f32),
    };
    for slots in [7, 16, 24, 40] {
        let mut all = session(&*gpu, slots);
        let texts: Vec<Vec<u32>> = (0..slots).map(|i| tokens(6, i as u64)).collect();
        for (slot, text) in texts.iter().enumerate() {
            all.adapt(slot, &adapters_of(slot)).unwrap();
            feed(&mut *all, slot, &text[..5]);
        }
        let last: Vec<&[u32]> = texts.iter().map(|text| &text[5..]).collect();
        let found = together(&mut *all, &last);
        for (slot, text) in texts.iter().enumerate() {
            let mut one = session(&*gpu, 1);
            one.adapt(0, &adapters_of(slot)).unwrap();
            feed(&mut *one, 0, &text[..5]);
            let off = off(&found[slot], &feed(&mut *one, 0, &text[5..]));
            assert!(off < CLOSE, "{slots} sequences, {slot}: off by {off}");
        }
    }
}

/// Tokens that the device draws ahead of the host are those of the adapter's logits.
#[test]
fn tokens_are_drawn_with_adapters() {
    let config = fused_config();
    let store = Store::random(&config, 7).quantized(INT4);
    let loras = loras(&config, &store);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let gpu = gpu.with_adapters(&loras, &applied(0, 1.0)).unwrap();
    let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
    let mut drawing = session(&*gpu, 2);
    let more = drawn(&mut *drawing, 1, 7, 24, &mut sampler).unwrap();
    let drawn = [&[7], &more[..]].concat();
    assert_eq!(drawn.len(), 25);
    let mut forward = session(&*gpu, 1);
    let logits = feed(&mut *forward, 0, &drawn[..24]);
    for (row, &token) in logits.chunks(config.vocab_size).zip(&drawn[1..]) {
        let most = row.iter().fold(f32::MIN, |m, v| m.max(*v));
        let behind = most - row[token as usize];
        assert!(behind < CLOSE * most.abs(), "{token} is {behind} behind");
    }
    forward.truncate(0, 0);
    forward.adapt(0, &[]).unwrap();
    let without = forward
        .forward(&[chunk(0, &drawn[..24], LogitsWanted::All)], None)
        .unwrap()
        .data
        .to_vec();
    let off = off(&without, &logits);
    assert!(
        off > 5.0 * CLOSE,
        "the adapter changes logits by {off} only"
    );
}

#[test]
fn what_gpus_do_not_add_is_refused_by_name() {
    for gguf in ["qwen35moe", "qwen3next"] {
        let config = wide_hybrid(gguf, 4, false);
        let store = Store::random(&config, 7);
        let adapter = made(&config, &store, 1, |name| name.ends_with("o_proj"));
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        let refused = gpu.with_adapters(&[adapter.lora], &[]).err();
        let refused = refused.expect("not shown to be right").to_string();
        assert!(refused.contains("one of a mixture"), "{refused}");
    }
}
