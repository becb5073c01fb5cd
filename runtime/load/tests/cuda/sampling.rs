//! Tokens that a GPU draws against those of the host. Without a GPU the tests say that they are skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::common::{Store, distance, feed, fused_config, fused_session, gpu_engine, nq, tokens};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::KernelSet;
use nq_model::ModelConfig;
use nq_runtime::batch::decode;
use nq_runtime::{Batch, Error, KvType, LogitBias, Piece, Sampler, SamplingParams};
use nq_testkit::sessions::{drawn, piece, session_spec};
use std::ops::ControlFlow;

const INT4: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
const INT8: AffineScheme = AffineScheme::new(Bits::B8, Group::Size(128), Zeros::None);

/// The device samples the same tokens as the host does from the same logits.
#[test]
fn samples_as_the_host_does() {
    for vocab in [300, 40_000] {
        let config = ModelConfig {
            vocab_size: vocab,
            num_hidden_layers: 1,
            ..fused_config()
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
            let mut ours = fused_session(&*gpu, KvType::F16);
            feed(&mut *ours, 0, &prompt[..2]);
            let drawn = drawn(&mut *ours, 0, prompt[2], STEPS, &mut sampler).expect("it runs");
            assert_eq!(drawn.len(), STEPS);
            assert_eq!(ours.len(0), 2 + STEPS);

            let mut host = Sampler::new(params, 3).expect("valid");
            host.begin(&prompt);
            let mut theirs = fused_session(&*gpu, KvType::F16);
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
            ..fused_config()
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
                let mut ours = fused_session(&*gpu, KvType::F16);
                let mut chooser = sampler(params, 3, &[7, 9, 7], extras, vocab);
                feed(&mut *ours, 0, &[7, 9]);
                // In two calls: what the first one counted is written anew.
                let mut half = |token| drawn(&mut *ours, 0, token, STEPS / 2, &mut chooser);
                let first = half(7).expect("it runs");
                let second = half(first[STEPS / 2 - 1]).expect("it runs");
                let drawn = [first, second].concat();

                let mut theirs = fused_session(&*gpu, KvType::F16);
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
    let config = fused_config();
    let store = Store::random(&config, 31).quantized(INT8);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let vocab = config.vocab_size;
    for params in [SamplingParams::greedy(), SamplingParams::default()] {
        let mut session = fused_session(&*gpu, KvType::F16);
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
        let drawn = drawn(&mut *session, 0, 3, 2, &mut sampler).expect("one is");
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
        ..fused_config()
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
    let spec = session_spec(64, 160, KvType::F16, 128);
    const STEPS: usize = 20;
    for m in [1, 2, 5, 8, 9, 16, 17, 24, 33, 64] {
        for kinds in [&kinds[..1], &kinds[..]] {
            let params = |i: usize| kinds[i % kinds.len()];
            // Some with biases, masks and log-probabilities, beside others without.
            let extras = |i: usize| if kinds.len() > 1 { i * 5 % 8 } else { 0 };
            let slot = |i: usize| (3 * i + 2) % 64;
            let prompts: Vec<Vec<u32>> = (0..m).map(|i| tokens(1 + 2 * i, 40 + i as u64)).collect();
            let mut ours = gpu.session(spec).expect("it fits");
            let rows = ours.ahead().map(|device| device.rows());
            assert_eq!(rows, gpu.sampled_together());
            let mut samplers = Vec::new();
            for (i, prompt) in prompts.iter().enumerate() {
                samplers.push(sampler(params(i), i as u64, prompt, extras(i), 3000));
                if prompt.len() > 1 {
                    feed(&mut *ours, slot(i), &prompt[..prompt.len() - 1]);
                }
            }
            let mut pieces: Vec<Piece<'_>> = (samplers.into_iter().zip(&prompts).enumerate())
                .map(|(i, (sampler, prompt))| {
                    piece(slot(i), &prompt[prompt.len() - 1..], sampler, STEPS + 5)
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
    let config = fused_config();
    let store = Store::random(&config, 19).quantized(INT8);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let cpu = nq(&config, &store);
    let text = tokens(12, 6);
    let mut theirs = fused_session(&*cpu, KvType::F16);
    feed(&mut *theirs, 0, &text[..11]);
    let expected = feed(&mut *theirs, 0, &text[11..]);
    let mut ours = fused_session(&*gpu, KvType::F16);
    feed(&mut *ours, 0, &text[..11]);
    let d = distance(&feed(&mut *ours, 0, &text[11..]), &expected);
    assert!(d < 1.5e-2, "a forward of one token: {d}");
    // The same after a step that samples, whose token is dropped again.
    let mut ours = fused_session(&*gpu, KvType::F16);
    feed(&mut *ours, 0, &text[..11]);
    let mut sampler = Sampler::new(SamplingParams::greedy(), 0).expect("valid");
    drawn(&mut *ours, 0, text[11], 3, &mut sampler).expect("it runs");
    ours.truncate(0, 11);
    let d = distance(&feed(&mut *ours, 0, &text[11..]), &expected);
    assert!(d < 1.5e-2, "after a sampled one: {d}");
}
