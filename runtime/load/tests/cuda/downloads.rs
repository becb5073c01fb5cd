//! Files of other programs, in their own bits, on the GPU and on the CPU.

use crate::common::{Store, fused_config, fused_session, gpu_engine, in_pieces, nq, tokens};
use nq_formats::gguf::BlockType;
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::KernelSet;
use nq_model::ModelConfig;
use nq_runtime::{Engine, KvType, Session};

use super::engine::{INT4, INT8};

/// The mean KL divergence of `found` logits from `expected` ones.
fn divergence(found: &[f32], expected: &[f32], vocab: usize) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let most = row.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
        let all: f64 = row.iter().map(|v| f64::from(v - most).exp()).sum();
        row.iter().map(|v| f64::from(v - most) - all.ln()).collect()
    };
    let rows = found.chunks(vocab).zip(expected.chunks(vocab));
    let of_rows = rows.map(|(found, expected)| {
        let pairs = log_softmax(found).into_iter().zip(log_softmax(expected));
        pairs.map(|(q, p)| p.exp() * (p - q)).sum::<f64>()
    });
    of_rows.sum::<f64>() / (found.len() / vocab) as f64
}

/// Blocks of GGUF files, each type in its own kind and beside another in one product, give the CPU's logits in prompts
/// and steps.
#[test]
fn blocks_of_gguf_files() {
    use BlockType::*;
    let config = ModelConfig {
        hidden_size: 512,
        intermediate_size: 768,
        ..fused_config()
    };
    let store = Store::random(&config, 9);
    for (usual, other) in [
        (Q2_K, Q4_K),
        (Q3_K, Q5_K),
        (Q4_K, Q6_K),
        (Q5_K, Q3_K),
        (Q6_K, Q4_K),
        (IQ4_NL, IQ4_NL),
        (IQ4_XS, Q5_K),
        (IQ3_XXS, IQ2_S),
        (IQ3_S, IQ4_XS),
        (IQ2_XXS, Q4_K),
        (IQ2_XS, Q3_K),
        (IQ2_S, IQ2_S),
        (IQ1_S, IQ1_M),
        (IQ1_M, Q2_K),
        (MXFP4, MXFP4),
        (NVFP4, NVFP4),
    ] {
        let store = store.in_blocks(|name| match name.contains("v_proj") {
            true => other,
            false => usual,
        });
        let cpu = nq(&config, &store);
        for kernels in [KernelSet::Fused, KernelSet::Reference] {
            let Some(gpu) = gpu_engine(&config, &store, kernels) else {
                return;
            };
            agree_in_steps(
                &*gpu,
                &*cpu,
                &config,
                &format!("{usual} and {other} {kernels}"),
            );
        }
    }
}

/// Prompts and steps of one session of each have the same logits.
fn agree_in_steps(gpu: &dyn Engine, cpu: &dyn Engine, config: &ModelConfig, what: &str) {
    let [mut ours, mut theirs] = [gpu, cpu].map(|engine| fused_session(engine, KvType::F16));
    let (both, pieces): ([&mut dyn Session; 2], _) =
        ([&mut *ours, &mut *theirs], [21, 9, 1, 1, 4, 1, 16, 1]);
    in_pieces(both, 1, &tokens(56, 5), &pieces, |a, b, at| {
        let kld = divergence(a, b, config.vocab_size);
        assert!(kld < 1e-5, "{what}: {kld} before {at}");
    });
}

/// Inputs in groups of an order of their own, which the parts of a product share or not, give the CPU's logits in
/// prompts and steps.
#[test]
fn activation_order_agrees_with_the_cpu() {
    let config = ModelConfig {
        hidden_size: 512,
        intermediate_size: 768,
        ..fused_config()
    };
    let store = Store::random(&config, 9);
    let g128 = AffineScheme::new(Bits::B4, Group::Size(128), Zeros::Integer);
    for (scheme, other) in [(INT4, ""), (INT8, ""), (g128, "v_proj")] {
        let store = store.in_activation_order(scheme, other);
        let cpu = nq(&config, &store);
        for kernels in [KernelSet::Fused, KernelSet::Reference] {
            let Some(gpu) = gpu_engine(&config, &store, kernels) else {
                return;
            };
            agree_in_steps(
                &*gpu,
                &*cpu,
                &config,
                &format!("{scheme} {other} {kernels}"),
            );
        }
    }
}
