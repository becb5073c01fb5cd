//! Files of other programs in their own bits.

use super::*;
use nq_model::{Preset, names};

/// Weights in activation order take their own bits, and sessions have memory for gathered inputs.
#[test]
fn activation_order_takes_its_own_bits() {
    let config = config();
    let int4 = AffineScheme::new(Bits::B4, Group::Size(128), Zeros::Integer);
    let weights = |act_order: bool| {
        let kinds = |name: &str| match name.contains("proj") {
            true => WeightKind::in_scheme(int4.into(), act_order),
            false => WeightKind::Dense(DType::BF16),
        };
        let held = weight_bytes(&config, &kinds, None, ExpertsAt::Gpu, None)
            .unwrap()
            .held;
        let planned = planned(&config, &kinds, &spec(4096, KvType::F16)).unwrap();
        assert_eq!(planned.weights, held);
        planned
    };
    let (plain, ordered) = (weights(false), weights(true));
    let orders = ordered.weights - plain.weights;
    let layers = config.num_hidden_layers;
    assert!(orders >= layers * 4 * (3 * config.hidden_size + config.intermediate_size));
    assert!(orders < plain.weights / 100);
    // Prompts of 512 tokens, in FP16.
    assert!(ordered.scratch >= plain.scratch + 512 * 2 * config.intermediate_size);
}

/// A GGUF file of Q4_K_M's mix of types in 27B's shape, of 16.61 GB, with 32,768 tokens of context leaves room on a card of
/// 24 GB.
#[test]
fn a_file_of_27b_fits_a_card_of_24_gb() {
    const FILE: f64 = 16.61e9;
    let config = Preset::find("qwen3.5-27b").unwrap().config();
    let block = |kind: BlockType| {
        let scheme = kind.layout().unwrap().narrow_scheme(kind.elements());
        WeightKind::in_scheme(scheme.into(), false)
    };
    let layers = config.num_hidden_layers;
    let kinds = |name: &str| {
        let layer = names::split_layer(name).map_or(0, |(layer, _)| layer);
        let gets_more =
            layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        match name {
            _ if name.contains("in_proj_qkv") => block(BlockType::Q5_K),
            _ if name == names::head(&config) => block(BlockType::Q6_K),
            _ if gets_more && (name.contains("v_proj") || name.contains("down_proj")) => {
                block(BlockType::Q6_K)
            }
            _ if name.contains("in_proj_a") || name.contains("in_proj_b") => {
                WeightKind::Dense(DType::F32)
            }
            _ => block(BlockType::Q4_K),
        }
    };
    let spec = session_spec(1, 32_768, KvType::F16, 2048);
    let planned = planned(&config, &kinds, &spec).unwrap();
    assert!((planned.weights as f64) < 1.08 * FILE, "{planned:?}");
    assert!(planned.total() < 23_000_000_000, "{planned:?}");
}
