//! The GPU memory planned is the memory taken, byte for byte. Without a GPU the test prints that it is skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::common::adapted::made;
use crate::common::published::ask;
use crate::common::{Store, feed, small_config, tokens, wide_hybrid};
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, TrellisScheme, Zeros};
use nq_kernels::{Account, KernelSet};
use nq_load::{StreamDrafts, load};
use nq_model::ModelConfig;
use nq_runtime::{
    DeviceChoice, DraftLayer, DraftedBy, KvType, LoadOptions, LogitsWanted, SessionSpec,
};
use nq_testkit::sessions::{chunk, session_spec};

/// What the weights are rounded to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RoundedTo {
    Integers,
    Octagons,
    Exl3,
}

#[test]
fn plans_are_what_is_taken() {
    let _turn = crate::turn();
    if nq_testkit::on_gpu(nq_cuda::device_count()).is_none() {
        return;
    }
    let held = || Account::of_all_gpus().held();
    let dense = |tied| ModelConfig {
        hidden_size: 320,
        intermediate_size: 520,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 128,
        vocab_size: 9001,
        tie_word_embeddings: tied,
        ..small_config()
    };
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let octagon = TrellisScheme::of_bits(Code::Octagon, 4.0).unwrap();
    let (fused, plain) = (KernelSet::Fused, KernelSet::Reference);
    // Whole blocks of inputs, and rows that begin and end strips between two.
    let blocks = |tied| ModelConfig {
        hidden_size: 384,
        intermediate_size: 640,
        ..dense(tied)
    };
    let blocks_of_experts = || ModelConfig {
        hidden_size: 512,
        ..wide_hybrid("qwen35moe", 4, false)
    };
    let with_mtp = |gguf, value_heads, tiled| ModelConfig {
        mtp_layers: 1,
        ..wide_hybrid(gguf, value_heads, tiled)
    };
    use RoundedTo::{Exl3, Integers, Octagons};
    for (config, kernels, kv, codes) in [
        (dense(true), fused, KvType::F16, Integers),
        (dense(false), fused, KvType::Int8, Integers),
        (dense(false), plain, KvType::F16, Integers),
        (with_mtp("qwen35", 6, true), fused, KvType::F16, Integers),
        (
            with_mtp("qwen35moe", 4, false),
            fused,
            KvType::F16,
            Integers,
        ),
        (blocks(true), fused, KvType::F16, Octagons),
        (blocks(false), fused, KvType::F16, Octagons),
        (blocks(false), plain, KvType::F16, Octagons),
        (blocks_of_experts(), fused, KvType::F16, Octagons),
        (blocks(false), fused, KvType::F16, Exl3),
        (blocks_of_experts(), fused, KvType::F16, Exl3),
    ] {
        let store = Store::random(&config, 5);
        let store = match (codes, config.tie_word_embeddings) {
            (Exl3, _) => store.in_exl3(&config),
            (Octagons, _) => store.in_trellises(|_| octagon),
            (Integers, true) => store.quantized(int4).mixed(),
            (Integers, false) => store.quantized(int4),
        };
        let options = LoadOptions {
            device: DeviceChoice::Cuda(0),
            kernels,
            ..LoadOptions::default()
        };
        let layer = DraftLayer::mtp(&config);
        let mtp = layer.map(|_| StreamDrafts::mtp(&config, &store, None, &options).unwrap());
        let by_layer = layer.map_or(DraftedBy::Nothing, DraftedBy::Layer);
        let before = held();
        let engine = load(&config, &store, &options, &()).unwrap();
        let weights = held() - before;
        let engine = match config.experts {
            // Adapters are not in the way of anything else that is planned.
            None => engine
                .with_adapters(&[made(&config, &store, 1, |_| true).lora], &[])
                .unwrap(),
            Some(_) => engine,
        };
        let weights = weights.max(held() - before);
        for (slots, drafts) in [
            (1, DraftedBy::Nothing),
            (5, DraftedBy::Tokens),
            (3, by_layer),
            (40, by_layer),
        ] {
            let spec = SessionSpec {
                drafts,
                ..session_spec(slots, 200, kv, 96)
            };
            let plan = engine.device_memory(&spec).unwrap();
            let model = (config.architecture.gguf, config.hidden_size, codes);
            let what = format!("{model:?}, {slots} sequences, {kernels}: {plan:?}");
            assert_eq!(plan.weights, weights, "{what}");
            let mut session = engine.session(spec).unwrap();
            assert_eq!(held() - before, plan.total(), "{what}");
            let mut drafter = match (&mtp, drafts) {
                (Some(mtp), DraftedBy::Layer(_)) => Some(mtp.drafter(&mut *session).unwrap()),
                _ => None,
            };
            let text = [tokens(90, 1), tokens(1, 2)].concat();
            feed(&mut *session, 0, &text[..90]);
            feed(&mut *session, 0, &text[90..]);
            if let Some(drafter) = &mut drafter {
                let text = [&text[..], &[3]].concat();
                assert_eq!(
                    ask(&mut **drafter, &mut *session, 0, &text).len(),
                    5,
                    "{what}"
                );
            }
            assert_eq!(held() - before, plan.total(), "{what}, while it runs");
            let (text, mut rows) = (tokens(60, 3), Vec::new());
            let chunk = chunk(0, &text, LogitsWanted::All);
            Account::of_all_gpus().begin();
            session.hidden(&[chunk], &mut rows).unwrap();
            assert_eq!(rows.len(), 60 * config.hidden_size, "{what}");
            assert_eq!(held() - before, plan.total(), "{what}, with hidden states");
            let most = Account::of_all_gpus().peak() - before;
            assert_eq!(most, plan.total(), "{what}, with hidden states");
        }
    }
}
