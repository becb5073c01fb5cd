//! Models that see, on a GPU, against the CPU. Without a GPU the tests say that they are skipped; `NQ_REQUIRE_CUDA=1`
//! makes that a failure.

use crate::common::{options, wide_hybrid};
use crate::vision::{
    DECODED, Image, Text, cases, close, feed, patches, prompt, session, tower_config, write,
};
use nq_formats::Checkpoint;
use nq_load::StreamDrafts;
use nq_model::vision::Grid;
use nq_model::{ModelConfig, Rope, find};
use nq_runtime::batch::decode;
use nq_runtime::{
    DeviceChoice, DraftLayer, DraftedBy, Engine, EngineKind, KvType, LoadOptions, Sampler,
    SamplingParams, SessionSpec, Speculation, Tower,
};
use nq_testkit::models::rope;
use nq_testkit::sessions::{best, drawn};
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// A hybrid, and a model with rows for its first layers; heads of 16 and of 72 values in their towers.
fn models() -> [(&'static str, ModelConfig, Value); 2] {
    let turning = Rope {
        sections: Some([11, 11, 10]),
        ..rope(100.0, Some(64))
    };
    let hybrid = ModelConfig {
        rope: turning,
        mtp_layers: 1,
        ..wide_hybrid("qwen35", 2, false)
    };
    let dense = ModelConfig {
        delta: None,
        mtp_layers: 0,
        head_dim: 128,
        rope: Rope {
            dims: None,
            sections: Some([24, 20, 20]),
            ..turning
        },
        architecture: find(|a| a.gguf, "qwen3vl").unwrap(),
        ..hybrid.clone()
    };
    [
        ("qwen3.5", hybrid, tower_config(64, 4, 100, &[], 256)),
        ("qwen3-vl", dense, tower_config(144, 2, 172, &[0, 2], 256)),
    ]
}

/// A model on one device.
struct Seeing {
    checkpoint: Checkpoint,
    options: LoadOptions,
    tower: Arc<dyn Tower>,
    engine: Arc<dyn Engine>,
}

impl Seeing {
    fn new(folder: &Path, options: LoadOptions) -> Self {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let tower = nq_load::tower(&checkpoint, &options, 64, &()).unwrap();
        let (config, store) = (checkpoint.config(), checkpoint.store());
        Seeing {
            tower: tower.unwrap(),
            engine: nq_load::load(config, store, &options, &()).unwrap(),
            checkpoint,
            options,
        }
    }
}

/// Each model on the CPU and on the GPU; none without a GPU.
fn loaded(root: &Path) -> Vec<(&'static str, Seeing, Seeing)> {
    if nq_testkit::on_gpu(nq_cuda::device_count()).is_none() {
        return Vec::new();
    }
    let load = |(name, text, tower): (&'static str, ModelConfig, Value)| {
        let folder = root.join(name);
        write(&folder, &text, &tower);
        let on_gpu = LoadOptions {
            device: DeviceChoice::Cuda(0),
            ..LoadOptions::default()
        };
        let on_cpu = Seeing::new(&folder, options(EngineKind::Nq));
        (name, on_cpu, Seeing::new(&folder, on_gpu))
    };
    models().into_iter().map(load).collect()
}

#[test]
fn towers_agree_with_the_cpu() {
    let root = tempfile::tempdir().unwrap();
    for (name, cpu, gpu) in loaded(root.path()) {
        for (h, w) in [(2, 2), (2, 8), (8, 4), (16, 16)] {
            let seen = patches(Grid { t: 1, h, w }, cpu.tower.config());
            let (ours, theirs) = (gpu.tower.encode(&seen), cpu.tower.encode(&seen));
            let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
            assert_eq!((ours.height, ours.width), (h / 2, w / 2));
            let what = format!("{name}, {h} x {w}");
            close(&ours.rows, &theirs.rows, 2e-3, &what);
            assert_eq!(gpu.tower.encode(&seen).unwrap(), ours, "{what} twice");
        }
        let larger = patches(Grid { t: 1, h: 16, w: 18 }, cpu.tower.config());
        let error = gpu.tower.encode(&larger).unwrap_err().to_string();
        assert!(error.contains("at most 256"), "{error}");
    }
}

/// Relative to the greatest logit.
const CLOSE: f32 = 3e-2;

#[test]
fn images_agree_with_the_cpu() {
    let root = tempfile::tempdir().unwrap();
    for (name, cpu, gpu) in loaded(root.path()) {
        for (case, parts) in cases() {
            let prompt = prompt(&parts, cpu.tower.as_ref());
            let mut theirs = session(cpu.engine.as_ref(), KvType::F16);
            theirs.show(0, prompt.images()).unwrap();
            let mut wanted = feed(theirs.as_mut(), 0, prompt.ids(), 64);
            wanted.extend(feed(theirs.as_mut(), 0, &DECODED, 1));
            // Rows of images one by one, in odd pieces and all at once; several rows of text in a step behind them.
            for (piece, decoded) in [(1, 1), (3, 2), (64, 4), (64, 1)] {
                let what = format!("{name}, {case}, {piece} and {decoded} at once");
                let mut ours = session(gpu.engine.as_ref(), KvType::F16);
                // Beside it stands text, whose rows have other places.
                let text: Vec<u32> = (1..30).collect();
                feed(ours.as_mut(), 1, &text, 29);
                ours.show(0, prompt.images()).unwrap();
                let mut found = feed(ours.as_mut(), 0, prompt.ids(), piece);
                found.extend(feed(ours.as_mut(), 0, &DECODED, decoded));
                close(&found.concat(), &wanted.concat(), CLOSE, &what);
            }
        }
    }
}

/// Tokens drawn on the device, step after step, are the best or close to it.
#[test]
fn answers_about_images_are_the_cpus() {
    let root = tempfile::tempdir().unwrap();
    let parts = [Text(3), Image(8, 4), Text(2), Image(2, 2), Text(4)];
    for (name, cpu, gpu) in loaded(root.path()) {
        let prompt = prompt(&parts, cpu.tower.as_ref());
        let plain = session(gpu.engine.as_ref(), KvType::F16).spec();
        let drafts = DraftLayer::mtp(cpu.checkpoint.config());
        for drafted in [None, Some(false), drafts.map(|_| true)] {
            let by_layer = drafted == Some(true);
            let spec = SessionSpec {
                drafts: match (drafted, drafts) {
                    (Some(true), Some(layer)) => DraftedBy::Layer(layer),
                    (Some(_), _) => DraftedBy::Tokens,
                    (None, _) => DraftedBy::Nothing,
                },
                ..plain
            };
            let mut ours = gpu.engine.session(spec).unwrap();
            let layer = by_layer.then(|| {
                let (config, store) = (gpu.checkpoint.config(), gpu.checkpoint.store());
                StreamDrafts::mtp(config, store, None, &gpu.options).unwrap()
            });
            let mut speculation = drafted.map(|_| match &layer {
                Some(layer) => Speculation::new(layer.drafter(ours.as_mut()).unwrap()).always(),
                None => Speculation::ngram().always(),
            });
            ours.show(0, prompt.images()).unwrap();
            let rows = feed(ours.as_mut(), 0, prompt.ids(), 7);
            let first = best(rows.last().unwrap());
            let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
            let mut answer = vec![first];
            match &mut speculation {
                None => {
                    answer.extend(drawn(ours.as_mut(), 0, first, 40, &mut sampler).unwrap());
                }
                Some(speculation) => {
                    speculation.follow(0, [prompt.ids(), &[first]].concat());
                    let each = &mut |token| {
                        answer.push(token);
                        ControlFlow::Continue(())
                    };
                    let (drafts, session) = (Some(speculation), ours.as_mut());
                    decode(session, 0, first, 40, &mut sampler, drafts, each).unwrap();
                }
            }
            let mut theirs = session(cpu.engine.as_ref(), KvType::F16);
            theirs.show(0, prompt.images()).unwrap();
            let mut logits = vec![feed(theirs.as_mut(), 0, prompt.ids(), 64).pop().unwrap()];
            logits.extend(feed(theirs.as_mut(), 0, &answer[..answer.len() - 1], 64));
            for (i, (logits, &token)) in logits.iter().zip(&answer).enumerate() {
                let most = logits.iter().fold(0.0, |m, v| f32::max(m, v.abs()));
                let short = logits[best(logits) as usize] - logits[token as usize];
                assert!(
                    short <= 2.0 * CLOSE * most,
                    "{name}, drafted by a layer: {drafted:?}, token {i} is short by {short} of {most}"
                );
            }
        }
    }
}

#[test]
fn sequences_with_images_fork_and_are_cut() {
    let root = tempfile::tempdir().unwrap();
    let parts = [Text(3), Image(8, 4), Text(2), Image(2, 2), Text(4)];
    for (name, cpu, gpu) in loaded(root.path()) {
        let prompt = prompt(&parts, cpu.tower.as_ref());
        let (ids, images) = (prompt.ids(), prompt.images());
        let mut ours = session(gpu.engine.as_ref(), KvType::F16);
        ours.show(0, images).unwrap();
        let whole = feed(ours.as_mut(), 0, ids, 64);
        let last = whole.last().unwrap();
        for cut in [7, 12, 14, 16, 18] {
            let forked = ours.fork(0, 1, cut).unwrap();
            ours.show(1, images).unwrap();
            let rows = feed(ours.as_mut(), 1, &ids[forked..], 5);
            let what = format!("{name}: a fork at {cut}");
            close(rows.last().unwrap(), last, CLOSE, &what);
            let held = ours.truncate(1, cut);
            ours.show(1, images).unwrap();
            let rows = feed(ours.as_mut(), 1, &ids[held..], 64);
            let what = format!("{name}: a cut at {cut}");
            close(rows.last().unwrap(), last, CLOSE, &what);
        }
        // A token of an image is no token of a step.
        ours.truncate(1, 0);
        ours.show(1, images).unwrap();
        feed(ours.as_mut(), 1, &ids[..4], 4);
        let sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
        let seated = ours.ahead().unwrap().seat(0, 1, ids[4], &sampler);
        let error = seated.unwrap_err().to_string();
        assert!(error.contains("an image of slot 1"), "{error}");
    }
}
