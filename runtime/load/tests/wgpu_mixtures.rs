//! Mixtures of experts over `wgpu` compared with the CPU's engine.

use crate::common::{Store, feed, hybrid, small_mixture, tokens};
use crate::wgpu::{divergence, engines, logits, on_adapter};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_model::{Experts, ModelConfig};
use nq_runtime::{ActivationChoice, KvType, LoadOptions, LogitsWanted, Sampler, SamplingParams};
use nq_testkit::sessions::{best, chunk, drawn, session_spec};

/// A mixture whose rows are whole groups; with a shared expert in a hybrid.
fn mixture(shared: bool) -> ModelConfig {
    let config = match shared {
        true => hybrid("qwen35moe", 4, false),
        false => ModelConfig {
            hidden_size: 96,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            head_dim: 32,
            vocab_size: 320,
            max_position_embeddings: 4096,
            ..small_mixture(3, true)
        },
    };
    ModelConfig {
        experts: config.experts.map(|e| Experts {
            width: 64,
            shared: if shared { 128 } else { 0 },
            ..e
        }),
        ..config
    }
}

#[test]
fn mixtures_are_those_of_the_cpu() {
    let Some(on) = on_adapter() else { return };
    let four = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    for (shared, quantized) in [(false, true), (true, true), (false, false), (true, false)] {
        let config = mixture(shared);
        let random = Store::random(&config, 5);
        let store = if quantized {
            random.quantized(four)
        } else {
            random
        };
        let tokens = tokens(170, 1);
        let [expected, found] = engines(&config, &store, &on).map(|engine| {
            let spec = session_spec(1, 512, KvType::F16, 128);
            let mut session = engine.session(spec).unwrap();
            // Prompts, steps of several rows, and single rows at the end.
            let mut all = logits(&mut *session, &tokens[..140], 70);
            all.extend(logits(&mut *session, &tokens[140..155], 5));
            all.extend(logits(&mut *session, &tokens[155..], 1));
            let mut next = vec![best(all.last().unwrap())];
            while next.len() < 64 {
                let row = feed(&mut *session, 0, &next[next.len() - 1..]);
                next.push(best(&row));
            }
            (all, next)
        });
        for (row, (e, f)) in expected.0.iter().zip(&found.0).enumerate() {
            let kl = divergence(e, f);
            let case = format!("shared {shared}, quantized {quantized}");
            assert!(kl < 1e-5, "{case}, row {row}: KL {kl:e}");
        }
        assert_eq!(expected.1, found.1);
    }
}

/// Inputs in bytes, whose rounding the order of sums may change.
#[test]
fn experts_round_their_inputs_as_on_the_cpu() {
    let Some(on) = on_adapter() else { return };
    let four = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let config = mixture(true);
    let store = Store::random(&config, 6).quantized(four);
    let on = LoadOptions {
        activations: ActivationChoice::Auto,
        ..on
    };
    let cpu = LoadOptions {
        device: nq_runtime::DeviceChoice::Cpu,
        ..on
    };
    let tokens = tokens(60, 2);
    let [expected, found] = [cpu, on].map(|o| {
        let engine = nq_load::load(&config, &store, &o, &()).unwrap();
        assert_eq!(engine.description().activations, "int8 g32");
        let spec = session_spec(1, 128, KvType::F16, 64);
        let mut session = engine.session(spec).unwrap();
        let mut all = logits(&mut *session, &tokens[..40], 40);
        all.extend(logits(&mut *session, &tokens[40..48], 4));
        all.extend(logits(&mut *session, &tokens[48..], 1));
        all
    });
    let each = expected.iter().zip(&found).map(|(e, f)| divergence(e, f));
    let mean = each.sum::<f64>() / tokens.len() as f64;
    assert!(mean < 1e-4, "KL {mean:e}");
}

/// Steps of several sequences are those of each alone, also where the device draws.
#[test]
fn sequences_of_a_mixture_decode_together() {
    let Some(on) = on_adapter() else { return };
    let config = mixture(false);
    let [_, engine] = engines(&config, &Store::random(&config, 8), &on);
    let session = |slots| {
        let spec = session_spec(slots, 256, KvType::F16, 64);
        engine.session(spec).unwrap()
    };
    let texts = [tokens(35, 1), tokens(7, 2), tokens(19, 3)];
    let mut together = session(3);
    let chunks = [0, 1, 2].map(|slot| chunk(slot, &texts[slot], LogitsWanted::Last));
    let found = together.forward(&chunks, None).unwrap();
    let rows: Vec<Vec<f32>> = (0..3).map(|i| found.row(i).to_vec()).collect();
    for (slot, text) in texts.iter().enumerate() {
        let mut alone = session(1);
        let whole = logits(&mut *alone, text, 64).pop().unwrap();
        assert!(divergence(&whole, &rows[slot]) < 1e-9);
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
        let mut next = best(&whole);
        for token in drawn(&mut *together, slot, next, 10, &mut sampler).unwrap() {
            next = best(&feed(&mut *alone, 0, &[next]));
            assert_eq!(token, next);
        }
    }
}
