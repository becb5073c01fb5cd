//! Models over `wgpu` compared with the CPU's engine, on the first adapter: on a machine without a GPU, Mesa's software
//! driver (lavapipe). Without any they are skipped, in print.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use crate::common::{Store, options, small_mixture};
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Zeros};
use nq_kernels::KernelSet;
use nq_model::{DType, ModelConfig, find};
use nq_runtime::{
    Batch, Continuation, DeviceChoice, Engine, EngineKind, KvType, LoadOptions, LogitsWanted,
    Piece, Sampler, SamplingParams, Session,
};
use nq_testkit::models::rope;
use nq_testkit::sessions::{best, chunk, feed, session_spec};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Options for the first adapter; `None`, said in print, where there is none.
pub(crate) fn on_adapter() -> Option<LoadOptions> {
    if nq_load::wgpu::adapters().is_empty() {
        println!("skipped: no adapter for Vulkan, Metal or Direct3D 12");
        return None;
    }
    Some(LoadOptions {
        device: DeviceChoice::Wgpu(Some(0)),
        ..options(EngineKind::Nq)
    })
}

/// KL divergence of `found` from `expected`, rows of logits, in nats.
pub(crate) fn divergence(expected: &[f32], found: &[f32]) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shifted = |v: &f32| f64::from(*v) - f64::from(most);
        let sum = row.iter().map(|v| shifted(v).exp()).sum::<f64>().ln();
        row.iter().map(|v| shifted(v) - sum).collect()
    };
    let (p, q) = (log_softmax(expected), log_softmax(found));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// The logits after each of `tokens`, fed in pieces.
pub(crate) fn logits(session: &mut dyn Session, tokens: &[u32], piece: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for tokens in tokens.chunks(piece) {
        let found = session
            .forward(&[chunk(0, tokens, LogitsWanted::All)], None)
            .unwrap();
        all.extend((0..found.rows()).map(|i| found.row(i).to_vec()));
    }
    all
}

pub(crate) fn engines(
    config: &ModelConfig,
    store: &Store,
    on: &LoadOptions,
) -> [Arc<dyn Engine>; 2] {
    let cpu = options(EngineKind::Nq);
    [&cpu, on].map(|o| nq_load::load(config, store, o, &()).unwrap())
}

/// A small model of a family.
fn small(gguf: &str, dim: usize, tied: bool) -> ModelConfig {
    ModelConfig {
        architecture: find(|a| a.gguf, gguf).unwrap(),
        hidden_size: 96,
        intermediate_size: 160,
        experts: None,
        delta: None,
        hyper: None,
        indexer: None,
        ngrams: None,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: dim,
        vocab_size: 320,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-6,
        rope: rope(1e4, None),
        tie_word_embeddings: tied,
        mtp_layers: 0,
        eos_token_ids: vec![300],
        dtype: Some(DType::BF16),
    }
}

pub(crate) fn text(n: usize, vocab: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 7919 + i * i * 31 + 3) % vocab) as u32)
        .collect()
}

#[test]
fn the_demo_model_is_that_of_the_cpu() {
    let Some(on) = on_adapter() else { return };
    let checkpoint = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let load =
        |o: &LoadOptions| nq_load::load(checkpoint.config(), checkpoint.store(), o, &()).unwrap();
    let tokenizer = nq_runtime::Tokenizer::from_files(checkpoint.files()).unwrap();
    let prompt = "Once there was a fox who lived in the mountains. One day the fox met an old man, and the man said: ";
    let prompt = tokenizer.encode(&prompt.repeat(6)).unwrap();
    let answer = |engine: &dyn Engine| {
        let mut session = engine
            .session(session_spec(1, 512, KvType::F16, 256))
            .unwrap();
        let all = logits(&mut *session, &prompt, 256);
        let mut next = best(all.last().unwrap());
        let mut tokens = vec![next];
        while tokens.len() < 64 {
            next = best(&feed(&mut *session, 0, &[next]));
            tokens.push(next);
        }
        (all, tokens)
    };
    let (expected, expected_text) = answer(&*load(&options(EngineKind::Nq)));
    let (found, found_text) = answer(&*load(&on));
    let each = expected.iter().zip(&found).map(|(e, f)| divergence(e, f));
    let worst = each.fold(0.0, f64::max);
    assert!(worst < 1e-5, "KL {worst:e} over {} tokens", found.len());
    assert_eq!(found_text, expected_text);
}

#[test]
fn families_are_those_of_the_cpu() {
    let Some(on) = on_adapter() else { return };
    let scheme = |bits, group, zeros| AffineScheme::new(bits, group, zeros);
    let four = scheme(Bits::B4, Group::Size(32), Zeros::Integer);
    let six = scheme(Bits::B6, Group::Size(16), Zeros::None);
    for (gguf, dim, tied, weights) in [
        ("qwen3", 32, true, Some(four)),
        ("qwen2", 16, false, Some(six)),
        ("llama", 48, true, None),
    ] {
        let config = small(gguf, dim, tied);
        let plain = Store::random(&config, 5);
        // Of the last, parts of products differ.
        let store = weights.map_or_else(|| plain.k_quants(), |scheme| plain.quantized(scheme));
        let tokens = text(300, config.vocab_size);
        let [expected, found] = engines(&config, &store, &on).map(|engine| {
            let spec = session_spec(1, 512, KvType::F16, 128);
            let mut session = engine.session(spec).unwrap();
            // Prompts, steps of several rows, and single rows at the end.
            let mut all = logits(&mut *session, &tokens[..260], 128);
            all.extend(logits(&mut *session, &tokens[260..290], 2));
            all.extend(logits(&mut *session, &tokens[290..], 1));
            all
        });
        for (row, (e, f)) in expected.iter().zip(&found).enumerate() {
            let kl = divergence(e, f);
            assert!(kl < 1e-5, "{gguf}, row {row}: KL {kl:e}");
        }
    }
}

#[test]
fn inputs_in_bytes_are_as_on_the_cpu() {
    let Some(on) = on_adapter() else { return };
    let config = small("qwen3", 32, false);
    let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let store = Store::random(&config, 6).quantized(scheme);
    let auto = |o: LoadOptions| LoadOptions {
        activations: nq_runtime::ActivationChoice::Auto,
        ..o
    };
    let tokens = text(60, config.vocab_size);
    let [expected, found] = [auto(options(EngineKind::Nq)), auto(on)].map(|o| {
        let engine = nq_load::load(&config, &store, &o, &()).unwrap();
        assert_eq!(engine.description().activations, "int8 g32");
        let mut session = engine
            .session(session_spec(1, 128, KvType::F16, 64))
            .unwrap();
        let mut all = logits(&mut *session, &tokens[..40], 40);
        all.extend(logits(&mut *session, &tokens[40..], 1));
        all
    });
    let each = expected.iter().zip(&found).map(|(e, f)| divergence(e, f));
    let mean = each.sum::<f64>() / tokens.len() as f64;
    assert!(mean < 1e-4, "KL {mean:e}");
}

/// Keys and values in 8 bits, of which a code that lies halfway between two may be the other one.
#[test]
fn keys_and_values_in_8_bits_are_as_on_the_cpu() {
    let Some(on) = on_adapter() else { return };
    let config = small("qwen3", 32, false);
    let store = Store::random(&config, 9);
    let tokens = text(160, config.vocab_size);
    let [expected, found] = engines(&config, &store, &on).map(|engine| {
        let spec = session_spec(2, 256, KvType::Int8, 128);
        let mut session = engine.session(spec).unwrap();
        let mut all = logits(&mut *session, &tokens[..140], 70);
        all.extend(logits(&mut *session, &tokens[140..150], 2));
        all.extend(logits(&mut *session, &tokens[150..], 1));
        // A page that is read and appended is that of the same tokens.
        let mut page = Vec::new();
        let pages = session.pages().unwrap();
        pages.read(0, 0, &mut page).unwrap();
        assert_eq!(page.len(), pages.page_bytes());
        pages.append(1, &page).unwrap();
        let again = feed(&mut *session, 1, &tokens[128..160]);
        all.extend(again.chunks_exact(config.vocab_size).map(<[f32]>::to_vec));
        all
    });
    for (row, (e, f)) in expected.iter().zip(&found).enumerate() {
        let kl = divergence(e, f);
        assert!(kl < 1e-4, "row {row}: KL {kl:e}");
    }
    // The rows that were fed twice.
    for (first, again) in found[128..160].iter().zip(&found[160..]) {
        assert!(divergence(first, again) < 1e-4);
    }
}

#[test]
fn sequences_share_pages_and_part() {
    let Some(on) = on_adapter() else { return };
    let config = small("qwen3", 32, true);
    let store = Store::random(&config, 7);
    let [_, engine] = engines(&config, &store, &on);
    let tokens = text(200, config.vocab_size);
    let session = |slots| {
        engine
            .session(session_spec(slots, 256, KvType::F16, 64))
            .unwrap()
    };
    let whole = |tokens: &[u32]| {
        let mut alone = session(1);
        logits(&mut *alone, tokens, 64).pop().unwrap()
    };
    let mut s = session(3);
    logits(&mut *s, &tokens[..150], 64);
    assert_eq!(s.fork(0, 1, 140).unwrap(), 140);
    assert_eq!(s.truncate(0, 131), 131);
    // Both go on, in one step.
    let (a, b) = (&tokens[131..135], &tokens[160..163]);
    let chunks = [
        chunk(0, a, LogitsWanted::Last),
        chunk(1, b, LogitsWanted::Last),
    ];
    let found = s.forward(&chunks, None).unwrap();
    let (first, second) = (found.row(0).to_vec(), found.row(1).to_vec());
    assert!(divergence(&whole(&tokens[..135]), &first) < 1e-9);
    let parted = [&tokens[..140], b].concat();
    assert!(divergence(&whole(&parted), &second) < 1e-9);
    // A page that was read is that of another sequence with the same tokens.
    let mut page = Vec::new();
    let pages = s.pages().unwrap();
    pages.read(0, 0, &mut page).unwrap();
    assert_eq!(page.len(), pages.page_bytes());
    pages.append(2, &page).unwrap();
    let found = s
        .forward(&[chunk(2, &tokens[128..135], LogitsWanted::Last)], None)
        .unwrap();
    assert!(divergence(&first, found.row(0)) < 1e-9);
    // What the head reads is given out too.
    let mut hidden = Vec::new();
    s.hidden(
        &[chunk(2, &tokens[135..138], LogitsWanted::All)],
        &mut hidden,
    )
    .unwrap();
    assert_eq!(hidden.len(), 3 * config.hidden_size);
}

/// Greedy tokens are drawn on the device and others on the host, as logits of single sequences have them; sequences
/// join, and cross from page to page.
#[test]
fn sequences_decode_together() {
    let Some(on) = on_adapter() else { return };
    let config = small("qwen3", 32, true);
    let store = Store::random(&config, 8);
    let [_, engine] = engines(&config, &store, &on);
    let tokens = text(300, config.vocab_size);
    let prompts = [&tokens[..122], &tokens[130..137], &tokens[200..201]];
    let sampler = |slot: usize| {
        let mut params = SamplingParams::greedy();
        if slot == 2 {
            (params.temperature, params.seed) = (0.8, 5);
        }
        Sampler::new(params, slot as u64).unwrap()
    };
    const DRAWN: [usize; 3] = [14, 14, 8];
    let alone: Vec<Vec<u32>> = (prompts.iter().enumerate())
        .map(|(slot, prompt)| {
            let spec = session_spec(1, 256, KvType::F16, 128);
            let (mut session, mut sampler) = (engine.session(spec).unwrap(), sampler(slot));
            let mut row = feed(&mut *session, 0, prompt);
            let mut drawn = Vec::new();
            while drawn.len() < DRAWN[slot] {
                let last = &row[row.len() - config.vocab_size..];
                drawn.push(sampler.sample(last).unwrap());
                row = feed(&mut *session, 0, &drawn[drawn.len() - 1..]);
            }
            drawn
        })
        .collect();
    let mut session = engine
        .session(session_spec(3, 256, KvType::F16, 128))
        .unwrap();
    let mut batch = Batch::new(&mut *session);
    let mut drawn = vec![Vec::new(); 3];
    // The third joins last, and leaves first.
    for slots in [&[0usize, 1][..], &[], &[], &[2]] {
        let pieces = slots.iter().map(|&slot| Piece {
            slot,
            tokens: prompts[slot],
            then: Some(Continuation {
                sampler: sampler(slot),
                tokens: DRAWN[slot],
            }),
        });
        let mut each = |slot: usize, token: nq_runtime::Result<u32>| {
            drawn[slot].push(token.unwrap());
            ControlFlow::Continue(())
        };
        batch.step(pieces.collect(), &mut each).unwrap();
        while batch.running() > 0 && slots == [2] {
            batch.step(Vec::new(), &mut each).unwrap();
        }
    }
    drop(batch);
    assert_eq!(drawn, alone);
    assert_eq!([0, 1, 2].map(|slot| session.len(slot)), [135, 20, 8]);
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let Some(on) = on_adapter() else { return };
    let refused = |config: &ModelConfig, options: &LoadOptions| {
        let store = Store::random(config, 1);
        let refused = nq_load::load(config, &store, options, &()).err().unwrap();
        refused.to_string()
    };
    // Rows that are no whole units.
    let why = refused(&small_mixture(2, true), &on);
    assert!(
        why.contains("multiples of 32") && why.contains("--device cpu"),
        "{why}"
    );
    let wide = ModelConfig {
        num_attention_heads: 34,
        ..small("llama", 32, true)
    };
    let why = refused(&wide, &on);
    assert!(
        why.contains("17 heads") && why.contains("--device cpu"),
        "{why}"
    );
    let config = small("llama", 32, true);
    let reference = LoadOptions {
        kernels: KernelSet::Reference,
        ..on
    };
    let why = refused(&config, &reference);
    assert!(why.contains("--kernels fused"), "{why}");
    let engine = nq_load::load(&config, &Store::random(&config, 1), &on, &()).unwrap();
    let why = engine
        .session(session_spec(1, 64, KvType::F32, 8))
        .err()
        .unwrap()
        .to_string();
    assert!(why.contains("f32") && why.contains("--kv 16"), "{why}");
    assert!(engine.with_adapters(&[], &[]).is_err());
}
