//! The GPU engine against the CPU's. Without a GPU the tests say that they are skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.
#![cfg(feature = "cuda")]
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

mod common;

use common::{Store, distance, feed, gpu_engine, nq, small_config, tokens};
use nq_formats::models::{ARCHITECTURES, Product};
use nq_formats::names::is_router;
use nq_formats::{AffineScheme, Bits, Experts, Group, ModelConfig, Tensor, Weight, Zeros};
use nq_kernels::KernelSet;
use nq_runtime::batch::decode;
use nq_runtime::{
    ActivationChoice, Batch, Chunk, Continuation, DeviceChoice, Engine, Error, KvType, LoadOptions,
    LogitBias, LogitsWanted, Observer, Piece, Sampler, SamplingParams, Session, SessionSpec,
};
use std::ops::ControlFlow;

fn config() -> ModelConfig {
    ModelConfig {
        hidden_size: 320,
        intermediate_size: 520,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 128,
        ..small_config()
    }
}

fn session(engine: &dyn Engine, kv: KvType) -> Box<dyn Session> {
    let spec = SessionSpec {
        slots: 2,
        ctx: 64,
        pages: None,
        kv,
        max_rows: 128,
    };
    engine.session(spec).expect("it fits")
}

const INT4: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
const INT8: AffineScheme = AffineScheme::new(Bits::B8, Group::Size(128), Zeros::None);

/// Rows of logits that differ by more than `close`.
fn far_rows(found: &[f32], expected: &[f32], vocab: usize, close: f32) -> usize {
    assert_eq!(found.len(), expected.len());
    let rows = found.chunks(vocab).zip(expected.chunks(vocab));
    rows.filter(|(a, b)| distance(a, b) > close).count()
}

/// Prefills and steps in turn, into both slots; logits are of order 1. Of 84 rows, at most `far` differ by
/// more than `close`: routers of mixtures may be near a tie, and then what rounding shifts decides.
fn compare(
    ours: &mut dyn Session,
    theirs: &mut dyn Session,
    (what, vocab): (&str, usize),
    close: f32,
    far: usize,
) {
    let mut rows = 0;
    let mut both = |slot, part: &[u32], ours: &mut dyn Session, theirs: &mut dyn Session| {
        rows += far_rows(
            &feed(ours, slot, part),
            &feed(theirs, slot, part),
            vocab,
            close,
        );
        assert!(rows <= far, "{what}: {rows} rows at slot {slot}");
    };
    for slot in [1, 0] {
        let text = tokens(48, 3 + slot as u64);
        let mut at = 0;
        for n in [21, 9, 1, 1, 1, 7, 1] {
            both(slot, &text[at..at + n], ours, theirs);
            at += n;
        }
        // Truncate, and continue from there.
        ours.truncate(slot, 10);
        theirs.truncate(slot, 10);
        both(slot, &text[10..11], ours, theirs);
    }
}

/// A mixture of 6 experts, 2 a token.
fn mixture() -> ModelConfig {
    ModelConfig {
        architecture: ARCHITECTURES[1],
        experts: Some(Experts {
            count: 6,
            per_token: 2,
            width: 256,
            normalized: true,
        }),
        ..config()
    }
}

/// Weights whose routers choose far from ties, so that rounded activations choose the same experts.
fn mixture_store(config: &ModelConfig, scheme: Option<AffineScheme>) -> Store {
    let plain = Store::random(config, 7);
    let mut store = match scheme {
        Some(scheme) => plain.quantized(scheme),
        None => plain.clone(),
    };
    for (name, weight) in &plain.matrices {
        if is_router(name) {
            let (rows, cols) = weight.dims();
            let mut values = vec![0.0; rows * cols];
            for (row, values) in values.chunks_exact_mut(cols).enumerate() {
                weight.dequantize_row(row, values).unwrap();
                values.iter_mut().for_each(|v| *v *= 4.0);
            }
            let tensor = Tensor::from_f32(vec![rows, cols], values).unwrap();
            store.matrices.insert(name.clone(), Weight::Dense(tensor));
        }
    }
    store
}

/// Prompts, and steps of one row and of several, also with tokens drawn on the device.
#[test]
fn mixtures_agree_with_the_cpu() {
    let config = mixture();
    for (scheme, name) in [(None, "dense"), (Some(INT4), "int4"), (Some(INT8), "int8")] {
        let store = mixture_store(&config, scheme);
        let cpu = nq(&config, &store);
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        assert_eq!(
            gpu.description().bits,
            scheme.map_or(32, |s| s.bits.width())
        );
        for kv in [KvType::F16, KvType::Int8] {
            let what = format!("a mixture, {name} {kv}");
            // Logits reach 4.4 here, and routers multiply what rounding shifts by four: on the CPU
            // alone, a cache in FP16 shifts logits by .006, one in int8 by .17.
            let close = if kv == KvType::Int8 { 1.5e-1 } else { 4e-2 };
            let (mut ours, mut theirs) = (session(&*gpu, kv), session(&*cpu, kv));
            let named = (&what[..], config.vocab_size);
            compare(&mut *ours, &mut *theirs, named, close, 3);
            // So many rows are grouped by expert.
            let text = tokens(60, 9);
            ours.truncate(0, 0);
            theirs.truncate(0, 0);
            let (found, expected) = (feed(&mut *ours, 0, &text), feed(&mut *theirs, 0, &text));
            let far = far_rows(&found, &expected, config.vocab_size, close);
            assert!(far <= 6, "{what}: {far} of 60 rows");
        }
        // The same row gives the same bits, whatever the other rows are.
        let alone = |slots: usize| {
            let spec = SessionSpec {
                slots,
                ctx: 64,
                pages: None,
                kv: KvType::F16,
                max_rows: 128,
            };
            let mut s = gpu.session(spec).unwrap();
            let texts: Vec<Vec<u32>> = (0..slots).map(|i| tokens(5, i as u64)).collect();
            for (slot, text) in texts.iter().enumerate() {
                feed(&mut *s, slot, text);
            }
            let chunks: Vec<Chunk<'_>> = (0..slots)
                .map(|slot| Chunk {
                    slot,
                    tokens: &texts[slot][..1],
                    logits: LogitsWanted::All,
                })
                .collect();
            s.forward(&chunks, None).unwrap().data.to_vec()
        };
        let one = alone(1);
        for slots in [2, 7, 16, 24] {
            let many = alone(slots);
            let d = distance(&one, &many[..one.len()]);
            assert!(d < 5e-3, "{name}: {slots} slots: {d}");
        }
        // The step that draws on the device agrees with the logits.
        let greedy = |engine: &dyn Engine| {
            let mut s = session(engine, KvType::F16);
            let mut text = tokens(6, 2);
            let mut drawn = Vec::new();
            for _ in 0..8 {
                let logits = feed(&mut *s, 0, &text);
                let last = &logits[logits.len() - config.vocab_size..];
                let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
                drawn.push(best.unwrap() as u32);
                text = vec![best.unwrap() as u32];
            }
            drawn
        };
        assert_eq!(greedy(&*gpu), greedy(&*cpu), "{name}");
    }
}

/// Tokens drawn by recorded steps, prompts and steps of several rows, with the experts of some layers and
/// of all on the CPU.
#[test]
fn experts_run_on_the_cpu() {
    let config = mixture();
    let layers = config.num_hidden_layers;
    for (scheme, name) in [(None, "dense"), (Some(INT4), "int4")] {
        let store = mixture_store(&config, scheme);
        let load = |cpu_experts| {
            let options = LoadOptions {
                device: DeviceChoice::Cuda(0),
                cpu_experts: Some(cpu_experts),
                activations: ActivationChoice::F32,
                ..LoadOptions::default()
            };
            nq_runtime::load(&config, &store, &options, &())
        };
        if gpu_engine(&config, &store, KernelSet::Fused).is_none() {
            return;
        }
        let whole = load(0).unwrap();
        let spec = session(&*whole, KvType::F16).spec();
        let weights = |engine: &dyn Engine| engine.device_memory(&spec).unwrap().weights;
        for on_cpu in [1, layers] {
            let what = format!("a mixture, {name}, experts of {on_cpu} layers on the CPU");
            let gpu = load(on_cpu).unwrap();
            let saved = weights(&*whole) - weights(&*gpu);
            // Layers are alike.
            assert!(saved > 0 && saved % on_cpu == 0, "{what}: {saved}");
            // Where the routers see the same, experts make the same.
            let mut ours = session(&*gpu, KvType::F16);
            let mut theirs = session(&*whole, KvType::F16);
            let named = (&what[..], config.vocab_size);
            compare(&mut *ours, &mut *theirs, named, 4e-2, 3);
            let greedy = |engine: &dyn Engine| {
                let mut sampler = Sampler::new(SamplingParams::greedy(), 0).expect("valid");
                sampler.begin(&[7]);
                let mut drawn = Vec::new();
                let each = &mut |token| {
                    drawn.push(token);
                    ControlFlow::Continue(())
                };
                let mut s = session(engine, KvType::F16);
                decode(&mut *s, 0, 7, 24, &mut sampler, None, each).expect("it runs");
                drawn
            };
            assert_eq!(greedy(&*gpu), greedy(&*gpu), "{what}: not the same again");
            assert_eq!(greedy(&*gpu)[..4], greedy(&*whole)[..4], "{what}");
        }
        let refused = load(layers + 1).err().expect("too many").to_string();
        assert!(refused.contains("--cpu-experts"), "{refused}");
    }
}

#[test]
fn mixtures_that_have_no_kernels_are_refused_by_name() {
    let config = mixture();
    let store = mixture_store(&config, None);
    let refused = |config: &ModelConfig, kernels| {
        let required = std::env::var_os("NQ_REQUIRE_CUDA").is_some_and(|v| v == "1");
        if nq_kernels::cuda::device_count().is_err() && !required {
            return None;
        }
        let options = LoadOptions {
            device: DeviceChoice::Cuda(0),
            kernels,
            ..LoadOptions::default()
        };
        let refused = nq_runtime::load(config, &store, &options, &());
        Some(refused.err().expect("refused").to_string())
    };
    let Some(reference) = refused(&config, KernelSet::Reference) else {
        return;
    };
    assert!(reference.contains("mixtures of experts"), "{reference}");
    let narrow = ModelConfig {
        experts: config.experts.map(|e| Experts { width: 40, ..e }),
        ..config.clone()
    };
    let narrow = refused(&narrow, KernelSet::Fused).unwrap_or_default();
    assert!(narrow.contains("moe_intermediate_size"), "{narrow}");
}

#[test]
fn agrees_with_the_cpu() {
    for tied in [true, false] {
        let config = ModelConfig {
            tie_word_embeddings: tied,
            ..config()
        };
        let plain = Store::random(&config, 7);
        for (store, name) in [
            (plain.clone(), "dense"),
            (plain.quantized(INT4), "int4"),
            (plain.quantized(INT8), "int8"),
            (plain.mixed(), "mixed"),
            (plain.k_quants(), "k-quants"),
        ] {
            let cpu = nq(&config, &store);
            for kernels in [KernelSet::Fused, KernelSet::Reference] {
                let Some(gpu) = gpu_engine(&config, &store, kernels) else {
                    return;
                };
                let rounds = &gpu.description().activations;
                match (kernels, name) {
                    (KernelSet::Reference, _) => assert_eq!(rounds, "f32"),
                    (_, "dense") => assert_eq!(rounds, "f16 + 2 f16 in steps"),
                    (_, _) => assert_eq!(rounds, "f16 + int16 g64 in steps"),
                }
                for kv in [KvType::F16, KvType::Int8] {
                    let what = format!("{name} tied {tied} {kernels} {kv}");
                    // A key's code that rounds the other way is half a step off.
                    let close = if kv == KvType::Int8 { 4e-2 } else { 1.5e-2 };
                    compare(
                        &mut *session(&*gpu, kv),
                        &mut *session(&*cpu, kv),
                        (&what[..], config.vocab_size),
                        close,
                        0,
                    );
                }
            }
        }
    }
}

/// A shape whose steps of one row run by clusters, where the GPU supports them.
#[test]
fn steps_by_clusters_agree_with_the_cpu() {
    let config = ModelConfig {
        hidden_size: 256,
        intermediate_size: 640,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        ..config()
    };
    let store = Store::random(&config, 8).quantized(INT4);
    let cpu = nq(&config, &store);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    for kv in [KvType::F16, KvType::Int8] {
        let close = if kv == KvType::Int8 { 4e-2 } else { 1.5e-2 };
        let what = format!("clusters {kv}");
        compare(
            &mut *session(&*gpu, kv),
            &mut *session(&*cpu, kv),
            (&what[..], config.vocab_size),
            close,
            0,
        );
    }
}

/// Collects all activations that are shown.
#[derive(Default)]
struct Everything(Vec<(String, Vec<f32>)>);

impl Observer for Everything {
    fn linear_input(&mut self, layer: usize, product: &Product, x: &[f32]) {
        self.0
            .push((format!("{layer} {}", product.name), x.to_vec()));
    }
    fn layer_output(&mut self, layer: usize, x: &[f32]) {
        self.0.push((format!("{layer} output"), x.to_vec()));
    }
    fn head_input(&mut self, x: &[f32]) {
        self.0.push(("head".into(), x.to_vec()));
    }
}

#[test]
fn observers_see_what_the_cpu_shows() {
    let config = config();
    let store = Store::random(&config, 9).quantized(INT8);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let plain = gpu_engine(&config, &store, KernelSet::Reference).expect("there is a GPU");
    let cpu = nq(&config, &store);
    let text = tokens(30, 1);
    let seen = |engine: &dyn Engine| {
        let mut all = Everything::default();
        let chunk = nq_runtime::Chunk {
            slot: 0,
            tokens: &text,
            logits: nq_runtime::LogitsWanted::All,
        };
        let mut s = session(engine, KvType::F16);
        s.forward(&[chunk], Some(&mut all)).expect("it runs");
        all.0
    };
    let (a, b, c) = (seen(&*gpu), seen(&*plain), seen(&*cpu));
    assert_eq!(a.len(), c.len());
    for (((name, a), (_, b)), (expected, c)) in a.iter().zip(&b).zip(&c) {
        assert_eq!(name, expected);
        let norm = |x: &[f32]| x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let off = |x: &[f32], y: &[f32]| {
            let d: Vec<f32> = x.iter().zip(y).map(|(a, b)| a - b).collect();
            norm(&d) / norm(y)
        };
        // A forward over rows rounds the input of each product to FP16: five times a layer
        // (norms, queries, softmax weights, attention's output, gated values). The root mean square of
        // a rounding's error is 2.0e-4 of the value, and independent errors add in squares; the bound
        // leaves a factor of two for their growth in the next layers. Hopper's products also round
        // the weights, four times a layer. Single inputs of products are smaller than the
        // residual that their errors come from.
        let layers = name.split(' ').next().and_then(|l| l.parse::<f64>().ok());
        let roundings = 9.0 * (layers.unwrap_or(config.num_hidden_layers as f64 - 1.0) + 1.0);
        let close = 2.0 * 2.0e-4 * roundings.sqrt() * if name.contains('[') { 2.0 } else { 1.0 };
        assert!(
            off(a, c) < close,
            "{name}: fused against the CPU: {}",
            off(a, c)
        );
        assert!(
            off(a, b) < close,
            "{name}: fused against plain: {}",
            off(a, b)
        );
        // Both round keys and values to FP16. Where that is a close call, sums in another order
        // fall to the other side, 4.9e-4 away: a few elements in a hundred at most.
        assert!(
            off(b, c) < 2e-4,
            "{name}: plain against the CPU: {}",
            off(b, c)
        );
    }
}

/// The device samples the same tokens as the host does from the same logits.
#[test]
fn samples_as_the_host_does() {
    for vocab in [300, 40_000] {
        let config = ModelConfig {
            vocab_size: vocab,
            num_hidden_layers: 1,
            ..config()
        };
        let store = Store::random(&config, 13).quantized(INT8);
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        let base = SamplingParams {
            seed: 5,
            ..SamplingParams::default()
        };
        let all = [
            SamplingParams::greedy(),
            base,
            SamplingParams { top_k: 1, ..base },
            SamplingParams { top_k: 20, ..base },
            SamplingParams {
                top_k: 20,
                top_p: 0.95,
                temperature: 0.6,
                ..base
            },
            SamplingParams {
                top_k: 40,
                min_p: 0.1,
                temperature: 1.5,
                ..base
            },
            // The longest short list, and one more token.
            SamplingParams { top_k: 64, ..base },
            SamplingParams { top_k: 65, ..base },
            SamplingParams {
                top_k: 3000,
                ..base
            },
            SamplingParams { top_p: 0.3, ..base },
            SamplingParams { top_p: 0.9, ..base },
            SamplingParams {
                top_p: 0.8,
                temperature: 0.05,
                ..base
            },
            SamplingParams { min_p: 0.5, ..base },
            SamplingParams {
                min_p: 0.02,
                temperature: 0.3,
                ..base
            },
            SamplingParams {
                repetition_penalty: 1.3,
                temperature: 0.0,
                ..base
            },
            SamplingParams {
                repetition_penalty: 1.3,
                presence_penalty: 0.5,
                top_k: 50,
                top_p: 0.9,
                ..base
            },
            SamplingParams {
                frequency_penalty: 1.5,
                temperature: 0.0,
                ..base
            },
        ];
        for params in all {
            const STEPS: usize = 24;
            let prompt = [7u32, 9, 7];
            let mut sampler = Sampler::new(params, 3).expect("valid");
            sampler.begin(&prompt);
            let mut ours = session(&*gpu, KvType::F16);
            feed(&mut *ours, 0, &prompt[..2]);
            let mut drawn = Vec::new();
            let each = &mut |token| {
                drawn.push(token);
                ControlFlow::Continue(())
            };
            decode(&mut *ours, 0, prompt[2], STEPS, &mut sampler, None, each).expect("it runs");
            assert_eq!(drawn.len(), STEPS);
            assert_eq!(ours.len(0), 2 + STEPS);

            let mut host = Sampler::new(params, 3).expect("valid");
            host.begin(&prompt);
            let mut theirs = session(&*gpu, KvType::F16);
            // A step elsewhere first: if a first step disturbed the prompt, it would disturb both.
            feed(&mut *theirs, 1, &prompt[..1]);
            feed(&mut *theirs, 0, &prompt[..2]);
            let mut token = prompt[2];
            for (i, &found) in drawn.iter().enumerate() {
                let logits = feed(&mut *theirs, 0, &[token]);
                let expected = host.sample(&logits).expect("finite");
                assert_eq!(found, expected, "vocabulary {vocab}, {params:?}, token {i}");
                token = found;
            }
        }
    }
}

/// A sampler at the start of the answer to `prompt`, with further settings: biases (bit 0 of
/// `extras`), a mask (bit 1) and log-probabilities (bit 2).
fn sampler(
    params: SamplingParams,
    stream: u64,
    prompt: &[u32],
    extras: usize,
    vocab: usize,
) -> Sampler {
    let mut sampler = Sampler::new(params, stream).expect("valid");
    sampler.begin(prompt);
    if extras & 1 != 0 {
        let bias = |id: u32| match id {
            _ if id.is_multiple_of(7) => Some((id, 0.75)),
            _ if id.is_multiple_of(11) => Some((id, -100.0)),
            _ if id.is_multiple_of(13) => Some((id, f32::NEG_INFINITY)),
            _ => None,
        };
        let biases = LogitBias::new((0..vocab as u32).filter_map(bias));
        sampler.set_bias(biases.expect("valid"));
    }
    if extras & 2 != 0 {
        let words = (0..vocab.div_ceil(32)).map(|i| 0x5a1c_9304u32.rotate_left(i as u32));
        sampler.set_mask(Some(&words.collect::<Vec<u32>>()));
    }
    let top = (extras & 4 != 0).then_some(5);
    sampler.set_logprobs(top).expect("few");
    sampler
}

/// Biases, masks, penalties, filters and log-probabilities in all combinations: the device's tokens
/// and log-probabilities are those of the host from the same logits.
#[test]
fn samples_as_the_host_does_under_masks_and_biases() {
    for vocab in [300, 40_000] {
        let config = ModelConfig {
            vocab_size: vocab,
            num_hidden_layers: 1,
            ..config()
        };
        let store = Store::random(&config, 23).quantized(INT8);
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        // Keep few of the larger vocabulary's tokens: the bounds between thousands of them lie as
        // close together as the rounding of sums.
        let base = SamplingParams {
            seed: 29,
            top_k: if vocab > 1000 { 300 } else { 0 },
            ..SamplingParams::default()
        };
        let filters = [
            SamplingParams::greedy(),
            base,
            SamplingParams { top_k: 20, ..base },
            SamplingParams { top_p: 0.4, ..base },
            SamplingParams { min_p: 0.2, ..base },
            SamplingParams {
                top_k: 65,
                top_p: 0.9,
                min_p: 0.02,
                ..base
            },
        ];
        for (filter, penalized) in filters.into_iter().flat_map(|f| [(f, false), (f, true)]) {
            let params = if penalized {
                SamplingParams {
                    repetition_penalty: 1.2,
                    frequency_penalty: 0.8,
                    presence_penalty: 0.3,
                    ..filter
                }
            } else {
                filter
            };
            for extras in 0..8 {
                const STEPS: usize = 16;
                let what = format!("vocabulary {vocab}, {params:?}, extras {extras}");
                let mut ours = session(&*gpu, KvType::F16);
                let mut chooser = sampler(params, 3, &[7, 9, 7], extras, vocab);
                feed(&mut *ours, 0, &[7, 9]);
                let mut drawn = Vec::new();
                let each = &mut |token| {
                    drawn.push(token);
                    ControlFlow::Continue(())
                };
                // In two calls: what the first one counted is written anew.
                decode(&mut *ours, 0, 7, STEPS / 2, &mut chooser, None, each).expect("it runs");
                let last = drawn[STEPS / 2 - 1];
                let each = &mut |token| {
                    drawn.push(token);
                    ControlFlow::Continue(())
                };
                decode(&mut *ours, 0, last, STEPS / 2, &mut chooser, None, each).expect("it runs");

                let mut theirs = session(&*gpu, KvType::F16);
                feed(&mut *theirs, 1, &[7]);
                feed(&mut *theirs, 0, &[7, 9]);
                let mut host = sampler(params, 3, &[7, 9, 7], extras, vocab);
                let mut token = 7;
                for (i, &found) in drawn.iter().enumerate() {
                    let logits = feed(&mut *theirs, 0, &[token]);
                    let expected = host.sample(&logits).expect("finite");
                    assert_eq!(found, expected, "{what}, token {i}");
                    token = found;
                }
                assert_eq!(chooser.logprobs().len(), host.logprobs().len(), "{what}");
                for (a, b) in chooser.logprobs().iter().zip(host.logprobs()) {
                    assert_eq!((a.position, a.token), (b.position, b.token), "{what}");
                    let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-4, "{what}: {a} {b}");
                    close(a.logprob, b.logprob);
                    assert_eq!(a.top.len(), 5, "{what}");
                    for (a, b) in a.top.iter().zip(&b.top) {
                        assert_eq!(a.0, b.0, "{what}");
                        close(a.1, b.1);
                    }
                }
            }
        }
    }
}

/// A sequence with no token left to draw fails with a named error, and continues once there is one.
#[test]
fn a_mask_that_allows_nothing_is_an_error() {
    let config = config();
    let store = Store::random(&config, 31).quantized(INT8);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let vocab = config.vocab_size;
    for params in [SamplingParams::greedy(), SamplingParams::default()] {
        let mut session = session(&*gpu, KvType::F16);
        let mut sampler = Sampler::new(params, 0).expect("valid");
        sampler.begin(&[3]);
        let mut mask = vec![0; vocab.div_ceil(32)];
        sampler.set_mask(Some(&mask));
        let none = &mut |_| ControlFlow::Continue(());
        let e = decode(&mut *session, 0, 3, 2, &mut sampler, None, none).unwrap_err();
        assert!(matches!(e, Error::NoTokenAllowed { .. }), "{e}");
        assert_eq!((session.len(0), sampler.position()), (0, 1));
        mask[2] = 1 << 9;
        sampler.set_mask(Some(&mask));
        let mut drawn = Vec::new();
        let each = &mut |token| {
            drawn.push(token);
            ControlFlow::Continue(())
        };
        decode(&mut *session, 0, 3, 2, &mut sampler, None, each).expect("one is");
        assert_eq!(drawn, [73, 73]);
        // A mask for another vocabulary is refused before anything runs.
        sampler.set_mask(Some(&mask[1..]));
        let e = decode(&mut *session, 0, 73, 2, &mut sampler, None, none).unwrap_err();
        assert!(matches!(e, Error::Request { .. }), "{e}");
    }
}

/// Several sequences at once draw what each draws alone, whatever the others do.
#[test]
fn many_sequences_continue_as_each_alone() {
    let config = ModelConfig {
        vocab_size: 3000,
        ..config()
    };
    let store = Store::random(&config, 17).quantized(INT4);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    // Few tokens are kept: steps of several sequences sum in another order than steps of one,
    // and each token's bound in the draw shifts with the sums.
    let base = SamplingParams {
        seed: 11,
        ..SamplingParams::default()
    };
    let kinds = [
        SamplingParams::greedy(),
        SamplingParams { top_k: 20, ..base },
        SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.5,
            top_k: 50,
            top_p: 0.9,
            ..base
        },
        SamplingParams { min_p: 0.5, ..base },
    ];
    let spec = SessionSpec {
        slots: 64,
        ctx: 160,
        pages: None,
        kv: KvType::F16,
        max_rows: 128,
    };
    const STEPS: usize = 20;
    for m in [1, 2, 5, 8, 9, 16, 17, 24, 33, 64] {
        for kinds in [&kinds[..1], &kinds[..]] {
            let params = |i: usize| kinds[i % kinds.len()];
            // Some with biases, masks and log-probabilities, beside others without.
            let extras = |i: usize| if kinds.len() > 1 { i * 5 % 8 } else { 0 };
            let slot = |i: usize| (3 * i + 2) % 64;
            let prompts: Vec<Vec<u32>> = (0..m).map(|i| tokens(1 + 2 * i, 40 + i as u64)).collect();
            let mut ours = gpu.session(spec).expect("it fits");
            let rows = ours.steps_ahead().map(|device| device.rows());
            assert_eq!(rows, gpu.sampled_together());
            let mut samplers = Vec::new();
            for (i, prompt) in prompts.iter().enumerate() {
                samplers.push(sampler(params(i), i as u64, prompt, extras(i), 3000));
                if prompt.len() > 1 {
                    feed(&mut *ours, slot(i), &prompt[..prompt.len() - 1]);
                }
            }
            let mut pieces: Vec<Piece<'_>> = (samplers.into_iter().zip(&prompts).enumerate())
                .map(|(i, (sampler, prompt))| Piece {
                    slot: slot(i),
                    tokens: &prompt[prompt.len() - 1..],
                    then: Some(Continuation {
                        sampler,
                        tokens: STEPS + 5,
                    }),
                })
                .collect();
            let mut drawn = vec![Vec::new(); m];
            let mut order = Vec::new();
            let index = |s: usize| (0..m).find(|&i| slot(i) == s).expect("one of them");
            let mut batch = Batch::new(&mut *ours);
            while !pieces.is_empty() || batch.running() > 0 {
                batch
                    .step(std::mem::take(&mut pieces), &mut |s, token| {
                        let i = index(s);
                        drawn[i].push(token.expect("it runs"));
                        order.push(i);
                        if drawn[i].len() == STEPS {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    })
                    .expect("it runs");
            }
            drop(batch);
            let expected: Vec<usize> = (0..STEPS).flat_map(|_| 0..m).collect();
            assert_eq!(order, expected);

            // Steps of several sequences sum in another order than those of one, and steps of more than
            // 16 round the inputs of products to FP16. Where two tokens are otherwise equally good, or
            // a token's bound lies at the draw, the other one may be drawn.
            let mut others = 0;
            let mut theirs = gpu.session(spec).expect("it fits");
            feed(&mut *theirs, 15, &[1]);
            theirs.truncate(15, 0);
            for (i, prompt) in prompts.iter().enumerate() {
                assert_eq!(ours.len(slot(i)), prompt.len() - 1 + STEPS);
                let mut host = sampler(params(i), i as u64, prompt, extras(i), 3000);
                if prompt.len() > 1 {
                    feed(&mut *theirs, slot(i), &prompt[..prompt.len() - 1]);
                }
                let mut token = prompt[prompt.len() - 1];
                for (step, &found) in drawn[i].iter().enumerate() {
                    let logits = feed(&mut *theirs, slot(i), &[token]);
                    let expected = host.sample(&logits).expect("finite");
                    let what = format!("{m} sequences, {i}, token {step}");
                    if found != expected {
                        let top = logits.iter().fold(0f32, |top, v| top.max(v.abs()));
                        let apart = (logits[expected as usize] - logits[found as usize]).abs();
                        let is_near = !params(i).is_greedy() || apart < 1e-2 * top;
                        assert!(
                            is_near,
                            "{what}: {found} for {expected}, {apart} of {top} apart"
                        );
                        others += 1;
                        host.rewind(host.position() - 1).expect("it drew");
                        host.accept(found);
                    }
                    token = found;
                }
            }
            let rare = if m <= 16 { 100 } else { 25 };
            assert!(
                rare * others <= m * STEPS,
                "{m} sequences: {others} other tokens"
            );
        }
    }
}

/// A session's preparation for its first step must not change the sequence's contents.
#[test]
fn a_first_step_leaves_the_prompt_alone() {
    let config = config();
    let store = Store::random(&config, 19).quantized(INT8);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let cpu = nq(&config, &store);
    let text = tokens(12, 6);
    let mut theirs = session(&*cpu, KvType::F16);
    feed(&mut *theirs, 0, &text[..11]);
    let expected = feed(&mut *theirs, 0, &text[11..]);
    let mut ours = session(&*gpu, KvType::F16);
    feed(&mut *ours, 0, &text[..11]);
    let d = distance(&feed(&mut *ours, 0, &text[11..]), &expected);
    assert!(d < 1.5e-2, "a forward of one token: {d}");
    // The same after a step that samples, whose token is dropped again.
    let mut ours = session(&*gpu, KvType::F16);
    feed(&mut *ours, 0, &text[..11]);
    let mut sampler = Sampler::new(SamplingParams::greedy(), 0).expect("valid");
    let each = &mut |_| ControlFlow::Continue(());
    decode(&mut *ours, 0, text[11], 3, &mut sampler, None, each).expect("it runs");
    ours.truncate(0, 11);
    let d = distance(&feed(&mut *ours, 0, &text[11..]), &expected);
    assert!(d < 1.5e-2, "after a sampled one: {d}");
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let config = config();
    let store = Store::random(&config, 11);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let spec = SessionSpec {
        slots: 1,
        ctx: 1 << 40,
        pages: None,
        kv: KvType::F16,
        max_rows: 1,
    };
    let e = gpu.session(spec).err().expect("it cannot fit").to_string();
    assert!(e.contains("--ctx"), "{e}");
}
