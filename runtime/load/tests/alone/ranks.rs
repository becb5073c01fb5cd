//! A model over several GPUs against the same model on one. Two GPUs are used where they are; otherwise one stands in
//! for both, with `CUDA_MODULE_LOADING=EAGER`, as kernels that some wait for must be loaded before, and
//! `CUDA_DEVICE_MAX_CONNECTIONS=32`, so that their streams lie in different queues of the GPU. Without a GPU the tests
//! say that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use crate::common::{Store, distance, feed, fused_config, gpu_engine, tokens, wide_hybrid};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::KernelSet;
use nq_model::{ARCHITECTURES, Experts, ModelConfig, find};
use nq_runtime::{
    Chunk, Engine, KvType, LoadOptions, LogitsWanted, Sampler, SamplingParams, Session, Split,
};
use nq_testkit::models::experts;
use nq_testkit::sessions::{chunk, drawn, session_spec};
use std::sync::{Arc, MutexGuard};

const INT4: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
const INT8: AffineScheme = AffineScheme::new(Bits::B8, Group::Size(128), Zeros::None);

/// The turn of a test and the devices of two ranks; `None`, said in print, if there are none.
fn two() -> Option<(MutexGuard<'static, ()>, &'static str)> {
    let turn = crate::turn();
    let count = nq_testkit::on_gpu(nq_cuda::device_count())?;
    let eager = std::env::var("CUDA_MODULE_LOADING").is_ok_and(|v| v == "EAGER")
        && std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|v| v == "32");
    match (count, eager) {
        (2.., _) => Some((turn, "cuda:0,1")),
        (_, true) => Some((turn, "cuda:0,0")),
        (_, false) => {
            println!(
                "skipped: one GPU stands in for two with CUDA_MODULE_LOADING=EAGER and CUDA_DEVICE_MAX_CONNECTIONS=32 only"
            );
            None
        }
    }
}

/// A model on two ranks.
fn load(config: &ModelConfig, store: &Store, device: &str, split: Split) -> Arc<dyn Engine> {
    let options = LoadOptions {
        device: device.parse().unwrap(),
        split: Some(split),
        ..LoadOptions::default()
    };
    nq_load::load(config, store, &options, &()).unwrap()
}

fn session(engine: &dyn Engine, slots: usize) -> Box<dyn Session> {
    engine
        .session(session_spec(slots, 256, KvType::F16, 160))
        .unwrap()
}

/// Models of sizes that two ranks share, with their weights.
fn models() -> Vec<(String, ModelConfig, Store)> {
    let dense = |family, tied| ModelConfig {
        architecture: find(|a| a.gguf, family).unwrap(),
        intermediate_size: 1024,
        tie_word_embeddings: tied,
        ..fused_config()
    };
    let mixture = ModelConfig {
        architecture: ARCHITECTURES[1],
        experts: Some(experts(6, 512, 0)),
        ..fused_config()
    };
    let wide = |config: ModelConfig| ModelConfig {
        intermediate_size: 1024,
        num_hidden_layers: 8,
        experts: config.experts.map(|e| Experts {
            width: 512,
            shared: 512,
            ..e
        }),
        ..config
    };
    let mut all = Vec::new();
    let many = ModelConfig {
        num_attention_heads: 32,
        ..dense("qwen3", false)
    };
    for (name, config) in [
        ("16 query heads of a key head", many),
        ("dense", dense("qwen3", true)),
        ("biased", dense("qwen2", false)),
        ("mixture", mixture),
        ("hybrid", wide(wide_hybrid("qwen35", 4, false))),
        ("hybrid mixture", wide(wide_hybrid("qwen35moe", 4, false))),
    ] {
        let plain = Store::random(&config, 7);
        let int4 = plain.quantized(INT4);
        all.push((format!("{name}, int4"), config.clone(), int4));
        if matches!(name, "dense" | "hybrid") {
            let mixed = plain.mixed();
            all.push((
                format!("{name}, int8"),
                config.clone(),
                plain.quantized(INT8),
            ));
            all.push((format!("{name}, mixed"), config.clone(), mixed));
            all.push((format!("{name}, fp16"), config, plain));
        }
    }
    all
}

/// The models by tensors, and by layers.
fn divided() -> Vec<(Split, (String, ModelConfig, Store))> {
    let both = [Split::Tensors, Split::Layers].into_iter();
    both.flat_map(|split| models().into_iter().map(move |m| (split, m)))
        .collect()
}

/// Rows of logits that differ by more than rounding; logits are of order 1, and routers near a tie may choose
/// otherwise.
fn far_rows(found: &[f32], expected: &[f32], vocab: usize) -> usize {
    assert_eq!(found.len(), expected.len());
    let rows = found.chunks(vocab).zip(expected.chunks(vocab));
    rows.filter(|(a, b)| distance(a, b) > 4e-2).count()
}

#[test]
fn two_ranks_agree_with_one_gpu() {
    let Some((_turn, device)) = two() else { return };
    for (split, (name, config, store)) in divided() {
        let whole = gpu_engine(&config, &store, KernelSet::Fused).expect("there is a GPU");
        let ranks = load(&config, &store, device, split);
        let name = format!("{name}, {split:?}");
        assert_eq!(
            ranks.description().device.contains("by layers"),
            split == Split::Layers
        );
        assert!(
            ranks.description().device.starts_with(device),
            "{:?}",
            ranks.description()
        );
        assert!(
            ranks.bytes_per_token() > whole.bytes_per_token() * 9 / 10,
            "{name}"
        );
        let vocab = config.vocab_size;
        let (mut ours, mut theirs) = (session(&*ranks, 24), session(&*whole, 24));
        let (mut far, mut all) = (0, 0);
        let mut both =
            |slot: usize, part: &[u32], ours: &mut dyn Session, theirs: &mut dyn Session| {
                let (found, expected) = (feed(ours, slot, part), feed(theirs, slot, part));
                all += part.len();
                far += far_rows(&found, &expected, vocab);
            };
        // Prompts, steps of one row and of several, a cut and a fork.
        for slot in [1, 0] {
            let text = tokens(200, 3 + slot as u64);
            let mut at = 0;
            for n in [130, 21, 1, 1, 7, 1, 17] {
                both(slot, &text[at..at + n], &mut *ours, &mut *theirs);
                at += n;
            }
            assert_eq!(ours.truncate(slot, 140), theirs.truncate(slot, 140));
            let at = ours.len(slot);
            both(slot, &text[at..142], &mut *ours, &mut *theirs);
        }
        let reached = ours.fork(0, 2, 100).unwrap();
        assert_eq!(reached, theirs.fork(0, 2, 100).unwrap());
        both(2, &tokens(100 - reached + 3, 5), &mut *ours, &mut *theirs);
        // Steps of many sequences.
        for slots in [2, 16, 24] {
            let texts: Vec<Vec<u32>> = (0..slots).map(|i| tokens(3, i as u64)).collect();
            let chunks: Vec<Chunk<'_>> = (texts.iter().enumerate())
                .map(|(slot, text)| chunk(slot, &text[..1], LogitsWanted::All))
                .collect();
            for slot in 0..slots {
                ours.truncate(slot, 0);
                theirs.truncate(slot, 0);
            }
            let found = ours.forward(&chunks, None).unwrap().data.to_vec();
            far += far_rows(&found, theirs.forward(&chunks, None).unwrap().data, vocab);
            all += slots;
        }
        let most = if config.experts.is_some() {
            all / 10
        } else {
            0
        };
        assert!(far <= most, "{name}: {far} of {all} rows");
        println!("{name}: {far} of {all} rows differ by more than rounding");
    }
}

/// Tokens that recorded steps draw are those of the logits.
#[test]
fn ranks_draw_the_tokens_of_their_logits() {
    let Some((_turn, device)) = two() else { return };
    for (split, (name, config, store)) in divided() {
        let ranks = load(&config, &store, device, split);
        let mut s = session(&*ranks, 2);
        let mut text = vec![7];
        let mut expected = Vec::new();
        for _ in 0..24 {
            let logits = feed(&mut *s, 0, &text);
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            expected.push(best.unwrap() as u32);
            text = vec![best.unwrap() as u32];
        }
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
        sampler.begin(&[7]);
        let drawn = drawn(&mut *s, 1, 7, 24, &mut sampler).unwrap();
        // Both run the same kernels, of one row.
        assert_eq!(drawn, expected, "{name}, {split:?}");
    }
}

/// Pages and states of all ranks, as they are kept on disk.
#[test]
fn pages_of_ranks_can_be_read_and_appended() {
    let Some((_turn, device)) = two() else { return };
    for (split, (name, config, store)) in divided() {
        if !name.ends_with("int4") {
            continue;
        }
        let ranks = load(&config, &store, device, split);
        let mut s = session(&*ranks, 2);
        let text = tokens(129, 4);
        feed(&mut *s, 0, &text[..128]);
        let (mut page, mut state) = (Vec::new(), Vec::new());
        let pages = s.pages().unwrap();
        pages.read(0, 0, &mut page).unwrap();
        pages.read_state(0, 128, &mut state).unwrap();
        assert_eq!(
            (page.len(), Some(state.len())),
            (pages.page_bytes(), pages.state_bytes())
        );
        assert!(pages.append(1, &page[1..]).is_err());
        pages.append(1, &page).unwrap();
        pages.write_state(1, &state).unwrap();
        let expected = feed(&mut *s, 0, &text[128..]);
        assert_eq!(feed(&mut *s, 1, &text[128..]), expected, "{name}");
    }
}

#[test]
fn what_several_gpus_cannot_run_is_refused_by_name() {
    let Some((_turn, device)) = two() else { return };
    let (_, config, store) = models().remove(0);
    let refused = |config: &ModelConfig, options: LoadOptions| {
        let options = LoadOptions {
            device: device.parse().unwrap(),
            ..options
        };
        let refused = nq_load::load(config, &store, &options, &());
        refused.err().expect("refused").to_string()
    };
    let reference = LoadOptions {
        kernels: KernelSet::Reference,
        ..LoadOptions::default()
    };
    assert!(refused(&config, reference).contains("kernels"));
    let on_host = LoadOptions {
        cpu_experts: Some(1),
        ..LoadOptions::default()
    };
    assert!(refused(&config, on_host).contains("experts on the CPU"));
    let models = [0, 1].map(|_| load(&config, &store, device, Split::Tensors));
    let open = session(&*models[0], 1);
    let spec = open.spec();
    let second = models[1].session(spec).err().expect("refused").to_string();
    assert!(second.contains("one at a time"), "{second}");
    drop(open);
    drop(session(&*models[1], 1));
    // Heads that two GPUs cannot share: by layers, unless that is not what was asked for.
    let odd = ModelConfig {
        num_key_value_heads: 1,
        ..config.clone()
    };
    let tensors = LoadOptions {
        split: Some(Split::Tensors),
        ..LoadOptions::default()
    };
    let why = refused(&odd, tensors);
    assert!(why.contains("key"), "{why}");
    let options = LoadOptions {
        device: device.parse().unwrap(),
        ..LoadOptions::default()
    };
    let odd_store = Store::random(&odd, 7);
    let by_layers = nq_load::load(&odd, &odd_store, &options, &()).unwrap();
    let said = &by_layers.description().device;
    assert!(said.contains("by layers"), "{said}");
    let short = ModelConfig {
        num_hidden_layers: 1,
        ..config
    };
    let layers = LoadOptions {
        split: Some(Split::Layers),
        ..LoadOptions::default()
    };
    let why = refused(&short, layers);
    assert!(why.contains("at least 2"), "{why}");
}
