//! Experts of a mixture in page-locked memory: however many have room on the GPU, logits and tokens are the same, bit
//! for bit. Without a GPU the tests print that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use crate::common::{Notes, Store, feed, fused_config, tokens, wide_hybrid};
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, TrellisScheme, Zeros};
use nq_kernels::Account;
use nq_load::{gpu, load};
use nq_model::{ARCHITECTURES, ModelConfig};
use nq_runtime::weights::weight_kinds;
use nq_runtime::{
    DeviceChoice, Engine, KvType, LoadOptions, LogitsWanted, Sampler, SamplingParams, SessionSpec,
    Split,
};
use nq_testkit::models::experts;
use nq_testkit::sessions::{chunk, drawn, session_spec};
use std::collections::BTreeMap;

/// How many experts of each layer have room on the GPU, as a note says.
fn rooms(notes: &Notes) -> Option<usize> {
    let notes = notes.0.lock().unwrap();
    let mut told = notes
        .iter()
        .filter_map(|n| n.split_once(" experts of each layer ("));
    // "3 of 8" stands in front of it.
    told.next()?.0.rsplit(' ').nth(2)?.parse().ok()
}

/// What a model computes: logits of prompts of so many rows that experts come before they are chosen, of fewer and of
/// few, of steps of one row and of several, and tokens that steps ahead draw, so many that experts move meanwhile.
fn computed(engine: &dyn Engine, spec: SessionSpec) -> (Vec<f32>, Vec<u32>) {
    let mut session = engine.session(spec).expect("it fits");
    let s = &mut *session;
    let text = tokens(560, 3);
    let mut logits = Vec::new();
    let mut at = 0;
    for rows in [400, 70, 1, 9, 1, 1, 3, 50, 1] {
        logits.extend(feed(s, 0, &text[at..at + rows]));
        at += rows;
    }
    let mut sampler = Sampler::new(SamplingParams::greedy(), 0).expect("valid");
    sampler.begin(&text[..at]);
    let drawn = drawn(s, 0, text[at], 60, &mut sampler).expect("it runs");
    // A step of two sequences.
    feed(s, 1, &text[..5]);
    let chunks = [0, 1].map(|slot| chunk(slot, &text[7..8], LogitsWanted::All));
    logits.extend_from_slice(s.forward(&chunks, None).expect("it runs").data);
    (logits, drawn)
}

/// Mixtures, their names, and whether they are in trellis codes.
fn mixtures() -> [(ModelConfig, &'static str, bool); 4] {
    // Of sizes that the kernel of all layers takes, and of sizes that it does not; each with experts of about a megabyte, as
    // memory is allotted by two.
    let at_once = ModelConfig {
        architecture: ARCHITECTURES[1],
        hidden_size: 1024,
        num_hidden_layers: 4,
        experts: Some(experts(8, 768, 0)),
        ..fused_config()
    };
    // Its one key head, of 16 query heads, is there twice.
    let by_kernels = ModelConfig {
        hidden_size: 320,
        num_attention_heads: 16,
        num_key_value_heads: 1,
        experts: Some(experts(8, 2048, 0)),
        ..at_once.clone()
    };
    let with_shared = ModelConfig {
        experts: Some(experts(7, 2048, 2048)),
        ..wide_hybrid("qwen35moe", 4, false)
    };
    [
        (at_once.clone(), "at once", false),
        (by_kernels, "by kernels", false),
        (with_shared, "a shared one", false),
        (at_once, "in trellis codes", true),
    ]
}

fn stored(config: &ModelConfig, coded: bool) -> Store {
    let store = Store::random(config, 5);
    match coded {
        true => {
            let octagon = TrellisScheme::of_bits(Code::Octagon, 4.0).unwrap();
            store.in_trellises(|_| octagon)
        }
        false => store.quantized(AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer)),
    }
}

/// What leaves so many experts of a layer room on the GPU: so many bytes less than all take, and so many of the
/// computer's memory, if these are limited.
struct Limit {
    rooms: usize,
    less: usize,
    host: Option<usize>,
}

/// For each number of rooms that the plan finds one, and one that leaves the computer's memory room for some layers'
/// experts alone: those of the others are all on the GPU.
fn limits(config: &ModelConfig, store: &Store, spec: &SessionSpec, name: &str) -> Vec<Limit> {
    let kinds = weight_kinds(config, store, true).unwrap();
    let all_of_host = usize::MAX / 2;
    let planned = |free, host| gpu::place(config, &|name| kinds[name], spec, &[free], host);
    let most = planned(usize::MAX / 2, all_of_host).unwrap().memory.total();
    let mut less = BTreeMap::new();
    for bytes in (1..most).step_by(1 << 20) {
        let Ok(placed) = planned(most - bytes, all_of_host) else {
            break;
        };
        if let Some(rooms) = placed.rooms {
            less.entry(rooms).or_insert(bytes);
        }
    }
    assert!(less.len() > 1, "{name}: {less:?}");
    let unlimited = less.into_iter().map(|(rooms, less)| Limit {
        rooms,
        less,
        host: None,
    });
    // With fewer layers in the bank, what prompts make of a layer's experts takes more than those without room leave.
    let host = planned(most - 1, all_of_host).unwrap().host_bytes / 4 * 3 + 4;
    let some_layers = (1..most).step_by(1 << 20).find_map(|less| {
        let rooms = planned(most - less, host).ok()?.rooms?;
        Some(Limit {
            rooms,
            less,
            host: Some(host),
        })
    });
    let some_layers = some_layers.unwrap_or_else(|| panic!("{name}: no layers are in banks"));
    unlimited.chain([some_layers]).collect()
}

/// The limits that the test below sets exist, whether there is a GPU or not.
#[test]
fn plans_leave_room_for_some_experts() {
    let spec = session_spec(2, 640, KvType::F16, 400);
    for (config, name, coded) in mixtures() {
        let limits = limits(&config, &stored(&config, coded), &spec, name);
        assert!(limits.iter().any(|limit| limit.host.is_some()), "{name}");
    }
}

#[test]
fn whatever_has_room_computes_the_same() {
    let _turn = crate::turn();
    if nq_testkit::on_gpu(nq_cuda::device_count()).is_none() {
        return;
    }
    let held = || Account::of_all_gpus().held();
    for (config, name, coded) in mixtures() {
        let store = stored(&config, coded);
        let spec = session_spec(2, 640, KvType::F16, 400);
        let loaded = |gpu_memory, host_memory| {
            let options = LoadOptions {
                device: DeviceChoice::Cuda(0),
                session: Some(spec),
                gpu_memory,
                host_memory,
                ..LoadOptions::default()
            };
            let notes = Notes::default();
            let engine = load(&config, &store, &options, &notes).expect("it fits");
            (engine, rooms(&notes))
        };
        let before = held();
        let (whole, all_fit) = loaded(None, None);
        assert_eq!(all_fit, None, "{name}");
        let all = whole.device_memory(&spec).unwrap();
        let expected = computed(&*whole, spec);
        drop(whole);
        for Limit {
            rooms: wanted,
            less,
            host,
        } in limits(&config, &store, &spec, name)
        {
            let limit = before + all.total() - less;
            let (engine, rooms) = loaded(Some(limit), host);
            assert_eq!(rooms, Some(wanted), "{name}");
            let what = format!("{name}, {wanted} experts of a layer have room, {host:?}");
            let plan = engine.device_memory(&spec).unwrap();
            assert!(held() + plan.kv + plan.scratch <= limit, "{what}");
            let found = computed(&*engine, spec);
            let differ = found.0.iter().zip(&expected.0);
            let differ = differ.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!((differ, found.0.len()), (0, expected.0.len()), "{what}");
            assert_eq!(found.1, expected.1, "{what}");
        }
    }
}

/// Mixtures of as many layers that the experts of each GPU's take more than what brings them to prompts; and their names.
fn over_two_gpus() -> [(ModelConfig, &'static str); 2] {
    let [mixture, _, hybrid, _] = mixtures();
    let longer = |config: ModelConfig| ModelConfig {
        num_hidden_layers: 2 * config.num_hidden_layers,
        ..config
    };
    [
        (longer(mixture.0), "a mixture"),
        (longer(hybrid.0), "a hybrid"),
    ]
}

/// The least memory of each of two GPUs with which experts have room there.
fn limit_of_two(config: &ModelConfig, store: &Store, spec: &SessionSpec) -> usize {
    let kinds = weight_kinds(config, store, true).unwrap();
    let placed = |free| {
        let host = usize::MAX / 2;
        gpu::place(config, &|name| kinds[name], spec, &[free; 2], host)
    };
    let most = placed(usize::MAX / 2).unwrap().memory.total();
    let limits = (1..most).step_by(1 << 20).map(|less| most - less);
    let limit = limits.take_while(|&free| placed(free).is_ok()).last();
    let limit = limit.expect("some have room");
    let planned = placed(limit).unwrap();
    assert!(
        planned.host_bytes > 0 && planned.rooms.is_some(),
        "{planned:?}"
    );
    limit
}

#[test]
fn plans_of_two_gpus_leave_room_for_some_experts() {
    let spec = session_spec(2, 640, KvType::F16, 400);
    for (config, _) in over_two_gpus() {
        limit_of_two(&config, &stored(&config, false), &spec);
    }
}

/// Of a model over two GPUs, each has some of the layers, all of whose experts are in the computer's memory.
#[test]
fn layers_of_two_gpus_have_experts_in_the_computers_memory_too() {
    let _turn = crate::turn();
    match nq_testkit::on_gpu(nq_cuda::device_count()) {
        None => return,
        Some(1) => {
            println!("skipped: two GPUs are needed");
            return;
        }
        Some(_) => {}
    }
    for (config, name) in over_two_gpus() {
        let store = stored(&config, false);
        let spec = session_spec(2, 640, KvType::F16, 400);
        let loaded = |split, gpu_memory| {
            let options = LoadOptions {
                device: "cuda:0,1".parse().unwrap(),
                session: Some(spec),
                split,
                gpu_memory,
                ..LoadOptions::default()
            };
            let notes = Notes::default();
            let engine = load(&config, &store, &options, &notes).expect("it fits");
            (engine, rooms(&notes))
        };
        let by_layers = Some(Split::Layers);
        let (whole, all_fit) = loaded(by_layers, None);
        assert_eq!(all_fit, None, "{name}");
        let expected = computed(&*whole, spec);
        drop(whole);
        let limit = limit_of_two(&config, &store, &spec);
        // Parts of every layer do not fit then, so that it is by layers without being asked for.
        for split in [by_layers, None] {
            let (engine, rooms) = loaded(split, Some(limit));
            assert!(rooms.is_some_and(|n| n < 8), "{name}: {rooms:?}");
            assert!(engine.description().device.ends_with("by layers)"));
            for gpu in [0, 1] {
                assert!(Account::of_gpu(gpu).held() <= limit, "{name}, GPU {gpu}");
            }
            let found = computed(&*engine, spec);
            let differ = found.0.iter().zip(&expected.0);
            let differ = differ.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!((differ, found.0.len()), (0, expected.0.len()), "{name}");
            assert_eq!(found.1, expected.1, "{name}");
            let choices = engine.expert_choices().expect("they are counted");
            assert!(
                choices.found().is_some_and(|found| found < 1.0),
                "{name}: {choices:?}"
            );
        }
    }
}
