//! Experts of a mixture in page-locked memory: however many have room on the GPU, logits and tokens are the same, bit
//! for bit. Without a GPU the test prints that it is skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::common::{Store, feed, fused_config, tokens, wide_hybrid};
use nq_formats::{AffineScheme, Bits, Group, Progress, Zeros};
use nq_kernels::Account;
use nq_load::load;
use nq_model::{ARCHITECTURES, ModelConfig};
use nq_runtime::{
    DeviceChoice, Engine, KvType, LoadOptions, LogitsWanted, Sampler, SamplingParams, SessionSpec,
};
use nq_testkit::models::experts;
use nq_testkit::sessions::{chunk, drawn, session_spec};
use std::sync::Mutex;

/// What loading says.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Progress for Notes {
    fn note(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
}

/// How many experts of each layer have room on the GPU, as a note says.
fn rooms(notes: &Notes) -> Option<usize> {
    let notes = notes.0.lock().unwrap();
    let note = notes
        .iter()
        .find(|n| n.contains("experts of each layer ("))?;
    note.split(' ').next()?.parse().ok()
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

#[test]
fn whatever_has_room_computes_the_same() {
    let _turn = crate::turn();
    if nq_testkit::on_gpu(nq_cuda::device_count()).is_none() {
        return;
    }
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let held = || Account::of_all_gpus().held();
    // Of sizes that the kernel of all layers takes, and of sizes that it does not.
    let at_once = ModelConfig {
        architecture: ARCHITECTURES[1],
        hidden_size: 1024,
        experts: Some(experts(12, 256, 0)),
        ..fused_config()
    };
    let by_kernels = ModelConfig {
        hidden_size: 320,
        ..at_once.clone()
    };
    let with_shared = ModelConfig {
        experts: Some(experts(9, 256, 256)),
        ..wide_hybrid("qwen35moe", 4, false)
    };
    for (config, name) in [
        (at_once, "at once"),
        (by_kernels, "by kernels"),
        (with_shared, "a shared one"),
    ] {
        let store = Store::random(&config, 5).quantized(int4);
        let spec = session_spec(2, 640, KvType::F16, 400);
        let loaded = |gpu_memory| {
            let options = LoadOptions {
                device: DeviceChoice::Cuda(0),
                session: Some(spec),
                gpu_memory,
                ..LoadOptions::default()
            };
            let notes = Notes::default();
            let engine = load(&config, &store, &options, &notes).expect("it fits");
            (engine, rooms(&notes))
        };
        let before = held();
        let (whole, all_fit) = loaded(None);
        assert_eq!(all_fit, None, "{name}");
        let all = whole.device_memory(&spec).unwrap();
        let expected = computed(&*whole, spec);
        drop(whole);
        // What a model takes of the GPU, whose rooms and results are compared.
        let compared = |limit: usize| {
            let (engine, rooms) = loaded(Some(limit));
            let rooms = rooms.unwrap_or_else(|| panic!("{name}: no banks within {limit} bytes"));
            let what = format!("{name}, {rooms} experts of a layer have room");
            let plan = engine.device_memory(&spec).unwrap();
            assert!(held() - before + plan.kv + plan.scratch <= limit, "{what}");
            let found = computed(&*engine, spec);
            let differ = found.0.iter().zip(&expected.0);
            let differ = differ.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!((differ, found.0.len()), (0, expected.0.len()), "{what}");
            assert_eq!(found.1, expected.1, "{what}");
            (rooms, plan)
        };
        // The most rooms, and fewer: two numbers of rooms tell what one takes.
        let (most, widest) = compared(before + all.total() - 1);
        let (fewer, plan) = compared(before + all.total() - 1 - (all.weights - widest.weights) / 2);
        assert!(fewer < most && most > 3, "{name}: {fewer} of {most}");
        let room = (widest.weights - plan.weights) / (most - fewer);
        for wanted in [most / 2 + 1, 3, 1] {
            let limit = before + widest.total() - (most - wanted) * room;
            assert_eq!(compared(limit).0, wanted, "{name}");
        }
    }
}
