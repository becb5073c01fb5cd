//! Models that see, compared with Hugging Face's transformers: small random ones, whose towers have heads of 16 and of 72.
//! `fixtures/vision.py` computed what is expected.

use crate::common::{distance, hybrid, options};
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::serialize::write_tensors;
use nq_formats::{Checkpoint, Tensor, synth};
use nq_kernels::rng::Philox;
use nq_load::StreamDrafts;
use nq_model::vision::{Grid, ImageTokens, Patches, VisionConfig};
use nq_model::{ModelConfig, Rope, find};
use nq_runtime::batch::decode;
use nq_runtime::images::SequenceImages;
use nq_runtime::models::{self as parts_of, Ending};
use nq_runtime::{
    DraftLayer, DraftedBy, Engine, EngineKind, Hidden, ImagePrompt, ImageRows, KvType,
    LayerWeights, LogitsWanted, PlacedImage, Sampler, SamplingParams, Session, SessionSpec,
    Speculation, Tower,
};
use nq_testkit::models::{experts, rope};
use nq_testkit::sessions::{chunk, session_spec};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// By model.
type Expected = BTreeMap<String, ExpectedModel>;

#[derive(Deserialize)]
struct ExpectedModel {
    /// By grid of patches, as `4x6`, every fifth value of the rows, level by level.
    towers: BTreeMap<String, Vec<f32>>,
    cases: BTreeMap<String, ExpectedCase>,
}

#[derive(Deserialize)]
struct ExpectedCase {
    /// Time, row and column of each token.
    positions: Vec<[usize; 3]>,
    /// Of the last three rows of the prompt and of those decoded behind it, every 29th logit.
    logits: Vec<Vec<f32>>,
}

pub(crate) const TOKENS: ImageTokens = ImageTokens {
    pad: 303,
    start: 301,
    end: 302,
};

/// What is decoded behind each prompt.
pub(crate) const DECODED: [u32; 4] = [11, 250, 33, 7];

const STEP: usize = 29;

/// The prompts: runs of text by their length, and images by their patches.
pub(crate) enum Part {
    Text(usize),
    Image(usize, usize),
}
pub(crate) use Part::{Image, Text};

pub(crate) fn cases() -> Vec<(&'static str, Vec<Part>)> {
    vec![
        ("text", vec![Text(9)]),
        ("one", vec![Text(5), Image(4, 6), Text(7)]),
        ("first", vec![Image(2, 8), Text(6)]),
        ("last", vec![Text(6), Image(6, 2)]),
        (
            "two",
            vec![Text(3), Image(8, 4), Text(2), Image(2, 2), Text(4)],
        ),
    ]
}

/// The configuration of a tower for a text model `out` wide.
pub(crate) fn tower_config(
    hidden: usize,
    heads: usize,
    mlp: usize,
    deepstack: &[usize],
    out: usize,
) -> Value {
    let (kind, depth) = match deepstack {
        [] => ("qwen3_5", 2),
        _ => ("qwen3_vl", 3),
    };
    json!({
        "model_type": kind, "depth": depth, "hidden_size": hidden, "num_heads": heads,
        "intermediate_size": mlp, "patch_size": 4, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "num_position_embeddings": 64, "out_hidden_size": out,
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "deepstack_visual_indexes": deepstack,
    })
}

fn models() -> Vec<(&'static str, ModelConfig, Value)> {
    let tower =
        |hidden, heads, mlp, deepstack: &[usize]| tower_config(hidden, heads, mlp, deepstack, 96);
    let text = |gguf| {
        let mut config = hybrid(gguf, 4, false);
        // Eight frequencies that all change within a small image.
        config.head_dim = 64;
        config.rope.dims = Some(16);
        config.rope.theta = 100.0;
        config
    };
    // Of 16 frequencies, four each for rows and columns, where a third each would be five.
    let qwen3_vl = |gguf, experts| ModelConfig {
        experts,
        delta: None,
        head_dim: 32,
        rope: Rope {
            sections: Some([8, 4, 4]),
            ..rope(100.0, None)
        },
        architecture: find(|a| a.gguf, gguf).unwrap(),
        ..text("qwen35")
    };
    let mixture = Some(experts(6, 48, 0));
    vec![
        ("qwen3.5", text("qwen35"), tower(64, 4, 100, &[])),
        ("qwen3.5-moe", text("qwen35moe"), tower(144, 2, 172, &[])),
        (
            "qwen3-vl",
            qwen3_vl("qwen3vl", None),
            tower(64, 4, 100, &[0, 2]),
        ),
        (
            "qwen3-vl-moe",
            qwen3_vl("qwen3vlmoe", mixture),
            tower(144, 2, 172, &[1]),
        ),
    ]
}

/// Pixels of an image, which differ from patch to patch.
pub(crate) fn patches(grid: Grid, c: &VisionConfig) -> Patches {
    let values = grid.patches() * c.patch_values();
    let value = |i: usize| ((i * i * 7 + i * 13 + grid.w) % 255) as f32 / 127.5 - 1.0;
    Patches {
        grid,
        rows: (0..values).map(value).collect(),
        digest: [(grid.h * 16 + grid.w) as u8; 32],
    }
}

/// Random values of the parameters of a tower, about those of trained ones.
fn random(stream: u64, shape: &[usize]) -> Tensor {
    let mut rng = Philox::new(5, stream);
    let (mean, deviation) = match shape {
        [_] => (0.5, 0.3),
        [_, inputs @ ..] => (0.0, 1.0 / (inputs.iter().product::<usize>() as f32).sqrt()),
        [] => unreachable!("every tensor has a dimension"),
    };
    let n = shape.iter().product();
    let values = (0..n).map(|_| mean + deviation * rng.normal()).collect();
    Tensor::from_f32(shape.to_vec(), values).unwrap()
}

/// The tensors with those of a layer's experts in two, as Qwen3-VL's files have them: `[experts, in, out]`, gates before
/// ups.
fn fused(tensors: Vec<(String, Tensor)>, text: &ModelConfig) -> Vec<(String, Tensor)> {
    let (experts, mut all) = tensors
        .into_iter()
        .partition::<BTreeMap<_, _>, _>(|(name, _)| name.contains(".experts."));
    let (count, width) = text.experts.map(|e| (e.count, e.width)).unwrap();
    for layer in 0..text.num_hidden_layers {
        let start = format!("model.language_model.layers.{layer}.mlp.experts");
        let mut put = |fused: &str, parts: &[&str], inputs: usize, outputs: usize| {
            let mut values = Vec::new();
            for expert in 0..count {
                let name = |part: &&str| format!("{start}.{expert}.{part}.weight");
                let parts = parts.iter().map(|p| experts[&name(p)].to_f32().unwrap());
                let rows: Vec<f32> = parts.flatten().collect();
                values.extend((0..inputs).flat_map(|i| rows[i..].iter().step_by(inputs)));
            }
            let tensor = Tensor::from_f32(vec![count, inputs, outputs], values).unwrap();
            all.insert(format!("{start}.{fused}"), tensor);
        };
        put("gate_up_proj", &["gate_proj", "up_proj"], 96, 2 * width);
        put("down_proj", &["down_proj"], width, 96);
    }
    all.into_iter().collect()
}

/// Writes a model as published ones are: a text model, whose matrices are scaled so that attention tells positions
/// apart, and a tower.
pub(crate) fn write(folder: &Path, text: &ModelConfig, tower: &Value) {
    let plain = folder.with_extension("text");
    synth::write(&plain, text, 11, &()).unwrap();
    let path = plain.join("model.safetensors");
    let file = SafetensorsFile::parse(&path, std::fs::read(&path).unwrap().into()).unwrap();
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    for name in file.names() {
        let tensor = file.get(name).unwrap();
        let mut values = tensor.to_f32().unwrap();
        if let [_, inputs] = tensor.shape() {
            let scale = 50.0 / (*inputs as f32).sqrt();
            values.iter_mut().for_each(|v| *v *= scale);
        }
        let tensor = Tensor::from_f32(tensor.shape().to_vec(), values).unwrap();
        tensors.push((name.replacen("model.", "model.language_model.", 1), tensor));
    }
    if text.architecture.gguf == "qwen3vlmoe" {
        tensors = fused(tensors, text);
    }
    let n = |key: &str| tower[key].as_u64().unwrap() as usize;
    let (h, mlp) = (n("hidden_size"), n("intermediate_size"));
    let mut named: Vec<(String, Vec<usize>)> = vec![
        ("patch_embed.proj.weight".into(), vec![h, 3, 2, 4, 4]),
        ("patch_embed.proj.bias".into(), vec![h]),
        ("pos_embed.weight".into(), vec![64, h]),
    ];
    let mut pair = |name: String, shape: Vec<usize>| {
        named.push((format!("{name}.bias"), vec![shape[0]]));
        named.push((format!("{name}.weight"), shape));
    };
    for block in 0..n("depth") {
        for (name, shape) in [
            ("norm1", vec![h]),
            ("norm2", vec![h]),
            ("attn.qkv", vec![3 * h, h]),
            ("attn.proj", vec![h, h]),
            ("mlp.linear_fc1", vec![mlp, h]),
            ("mlp.linear_fc2", vec![h, mlp]),
        ] {
            pair(format!("blocks.{block}.{name}"), shape);
        }
    }
    pair("merger.norm".into(), vec![h]);
    pair("merger.linear_fc1".into(), vec![4 * h, 4 * h]);
    pair("merger.linear_fc2".into(), vec![text.hidden_size, 4 * h]);
    let deepstack = tower["deepstack_visual_indexes"].as_array().unwrap();
    for place in 0..deepstack.len() {
        let name = |part: &str| format!("deepstack_merger_list.{place}.{part}");
        pair(name("norm"), vec![4 * h]);
        pair(name("linear_fc1"), vec![4 * h, 4 * h]);
        pair(name("linear_fc2"), vec![text.hidden_size, 4 * h]);
    }
    for (stream, (name, shape)) in named.into_iter().enumerate() {
        let tensor = random(stream as u64, &shape);
        tensors.push((format!("model.visual.{name}"), tensor));
    }
    std::fs::create_dir_all(folder).unwrap();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_tensors(&folder.join("model.safetensors"), &tensors, &metadata).unwrap();
    let config = std::fs::read(plain.join("config.json")).unwrap();
    let (class, kind) = text.architecture.also[0];
    let sections = text.rope.sections;
    let mut text: Value = serde_json::from_slice(&config).unwrap();
    text["torch_dtype"] = "float32".into();
    // Said by nobody, and always so in these families.
    text.as_object_mut().unwrap().remove("norm_topk_prob");
    if let Some(sections) = sections {
        text["rope_scaling"] = json!({
            "rope_type": "default", "mrope_section": sections, "mrope_interleaved": true,
        });
    }
    text.as_object_mut().unwrap().remove("architectures");
    let config = json!({
        "architectures": [class],
        "model_type": kind, "text_config": text, "vision_config": tower,
        "image_token_id": TOKENS.pad, "vision_start_token_id": TOKENS.start,
        "vision_end_token_id": TOKENS.end, "video_token_id": 304, "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let pixels = json!({
        "size": {"shortest_edge": 64, "longest_edge": 16384}, "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
    });
    std::fs::write(folder.join("preprocessor_config.json"), pixels.to_string()).unwrap();
    std::fs::remove_dir_all(plain).unwrap();
}

/// A prompt of these parts; an image stands between tokens of its start and end.
pub(crate) fn prompt(parts: &[Part], tower: &dyn Tower) -> ImagePrompt {
    let c = tower.config();
    let (mut ids, mut images) = (Vec::new(), Vec::new());
    for part in parts {
        match *part {
            Text(len) => {
                let next = |i: usize| (7 * i * i + 3 * i + 1) as u32 % 256;
                ids.extend((ids.len()..).take(len).map(next).collect::<Vec<u32>>());
            }
            Image(h, w) => {
                let image = tower.encode(&patches(Grid { t: 1, h, w }, c)).unwrap();
                ids.push(TOKENS.start);
                let at = ids.len();
                ids.extend(std::iter::repeat_n(TOKENS.pad, image.tokens()));
                ids.push(TOKENS.end);
                let image = Arc::new(image);
                images.push(PlacedImage { at, image });
            }
        }
    }
    ImagePrompt::new(ids, images, TOKENS).unwrap()
}

pub(crate) fn session(engine: &dyn Engine, kv: KvType) -> Box<dyn Session> {
    engine.session(session_spec(2, 128, kv, 64)).unwrap()
}

/// Feeds tokens in pieces; returns all logits.
pub(crate) fn feed(
    session: &mut dyn Session,
    slot: usize,
    tokens: &[u32],
    piece: usize,
) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    for tokens in tokens.chunks(piece) {
        let found = session
            .forward(&[chunk(slot, tokens, LogitsWanted::All)], None)
            .unwrap();
        all.extend((0..found.rows()).map(|i| found.row(i).to_vec()));
    }
    all
}

pub(crate) fn close(found: &[f32], wanted: &[f32], bar: f32, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let most = wanted.iter().fold(0.0, |m, v| f32::max(m, v.abs()));
    let error = distance(found, wanted) / most;
    assert!(error < bar, "{what}: {error:e}");
}

#[test]
fn models_that_see_are_as_transformers_computes_them() {
    let expected: Expected = serde_json::from_str(include_str!("fixtures/vision.json")).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("NQ_VISION");
    let root = kept.as_ref().map_or(temporary.path(), Path::new);
    for (name, text, tower) in models() {
        let folder = root.join(name);
        write(&folder, &text, &tower);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        assert_eq!(checkpoint.left_over(), [], "{name}");
        let options = options(EngineKind::Nq);
        let tower = nq_load::tower(&checkpoint, &options, 64, &())
            .unwrap()
            .unwrap();
        let Some(expected) = expected.get(name) else {
            assert!(kept.is_some(), "{name}: nothing expected");
            continue;
        };
        for (grid, wanted) in &expected.towers {
            let (h, w) = grid.split_once('x').unwrap();
            let [h, w] = [h, w].map(|n| n.parse().unwrap());
            let made = tower.encode(&patches(Grid { t: 1, h, w }, tower.config()));
            let made: ImageRows = made.unwrap();
            assert_eq!((made.height, made.width), (h / 2, w / 2));
            let found: Vec<f32> = made.rows.iter().step_by(5).copied().collect();
            close(&found, wanted, 1e-5, &format!("{name}, tower, {grid}"));
        }
        let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &());
        let engine = engine.unwrap();
        for (case, parts) in cases() {
            let expected = &expected.cases[case];
            let prompt = prompt(&parts, tower.as_ref());
            let images = SequenceImages::new(prompt.images(), 96).unwrap();
            let positions: Vec<[usize; 3]> = (0..prompt.ids().len())
                .map(|i| images.coordinates(i))
                .collect();
            assert_eq!(positions, expected.positions, "{name}, {case}");
            let wanted = expected.logits.concat();
            for piece in [1, 3, 64] {
                let mut session = session(engine.as_ref(), KvType::F32);
                session.show(0, prompt.images()).unwrap();
                let mut rows = feed(session.as_mut(), 0, prompt.ids(), piece);
                rows.drain(..rows.len() - 3);
                rows.extend(feed(session.as_mut(), 0, &DECODED, 1));
                let picked = rows.iter().flat_map(|row| row.iter().step_by(STEP));
                let found: Vec<f32> = picked.copied().collect();
                close(
                    &found,
                    &wanted,
                    1e-4,
                    &format!("{name}, {case}, {piece} at once"),
                );
            }
        }
    }
}

/// Layers one at a time, on the CPU and in f32, make of a prompt with images between two texts what sessions do.
#[test]
fn layers_one_at_a_time_see_images() {
    let root = tempfile::tempdir().unwrap();
    for (name, text, tower) in models() {
        let folder = root.path().join(name);
        write(&folder, &text, &tower);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let options = options(EngineKind::Nq);
        let tower = nq_load::tower(&checkpoint, &options, 64, &()).unwrap();
        let parts = [Text(3), Image(8, 4), Text(2), Image(2, 2), Text(4)];
        let prompt = prompt(&parts, tower.unwrap().as_ref());
        let engine = nq_load::load(config, store, &options, &()).unwrap();
        let mut session = session(engine.as_ref(), KvType::F32);
        session.show(0, prompt.images()).unwrap();
        let wanted = feed(session.as_mut(), 0, prompt.ids(), 64).concat();

        let texts = [vec![5; 7], prompt.ids().to_vec(), vec![9; 7]];
        let images = SequenceImages::new(prompt.images(), 96).unwrap();
        let none = SequenceImages::default();
        let embedding = parts_of::embedding(store, config).unwrap();
        let embedded = Hidden::embed(&embedding, &texts, 1).unwrap();
        let begun = embedded.showing(vec![none.clone(), images, none]).unwrap();
        let head = parts_of::head(store, config).unwrap();
        let ending = Ending::read(store, config).unwrap();
        let cpu = nq_load::stepper(config, &options, KvType::F32, 64).unwrap();
        let exact = nq_f32::stepper(nq_f32::CpuOps, config, 64);
        for mut stepper in [cpu, exact] {
            let mut hidden = begun.clone();
            for index in 0..config.num_hidden_layers {
                let weights = LayerWeights::read(store, config, index).unwrap();
                stepper
                    .layer(index, &weights, &mut hidden, &mut ())
                    .unwrap();
            }
            let rows = 7..7 + texts[1].len();
            let found = stepper.head(&ending, &head, &hidden, rows).unwrap();
            close(
                &found,
                &wanted,
                1e-4,
                &format!("{name}, {}", stepper.device()),
            );
        }
    }
}

/// The models, with their towers and engines.
fn loaded(root: &Path) -> Vec<(Arc<dyn Tower>, Arc<dyn Engine>)> {
    let load = |(name, text, tower): (&str, ModelConfig, Value)| {
        let folder = root.join(name);
        write(&folder, &text, &tower);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let options = options(EngineKind::Nq);
        let tower = nq_load::tower(&checkpoint, &options, 64, &())
            .unwrap()
            .unwrap();
        let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &());
        (tower, engine.unwrap())
    };
    models().into_iter().map(load).collect()
}

#[test]
fn sequences_with_images_fork_and_are_cut_within_them() {
    let root = tempfile::tempdir().unwrap();
    for (tower, engine) in loaded(root.path()) {
        let parts = [Text(3), Image(8, 4), Text(2), Image(2, 2), Text(4)];
        let prompt = prompt(&parts, tower.as_ref());
        let (ids, images) = (prompt.ids(), prompt.images());
        let mut session = session(engine.as_ref(), KvType::F32);
        session.show(0, images).unwrap();
        let whole = feed(session.as_mut(), 0, ids, 64);
        let last = whole.last().unwrap();
        // Within the first image, at its end, within the text, and within the second.
        for cut in [7, 12, 14, 16, 18] {
            let forked = session.fork(0, 1, cut).unwrap();
            session.show(1, images).unwrap();
            let rows = feed(session.as_mut(), 1, &ids[forked..], 5);
            close(
                rows.last().unwrap(),
                last,
                1e-5,
                &format!("a fork at {cut}"),
            );
            let held = session.truncate(1, cut);
            session.show(1, images).unwrap();
            let rows = feed(session.as_mut(), 1, &ids[held..], 64);
            close(rows.last().unwrap(), last, 1e-5, &format!("a cut at {cut}"));
        }
        // Text in the slot of an image is text again.
        session.truncate(1, 0);
        let text = feed(session.as_mut(), 1, ids, 64);
        let fresh = feed(
            self::session(engine.as_ref(), KvType::F32).as_mut(),
            0,
            ids,
            64,
        );
        assert_eq!(text, fresh);
        assert!(distance(text.last().unwrap(), last) > 1e-3);
    }
}

/// Whatever is drafted, from the text or by the MTP layer, what follows images is the same, token by token.
#[test]
fn drafts_change_no_answer_about_images() {
    let root = tempfile::tempdir().unwrap();
    let mut models = models();
    models[0].1.mtp_layers = 1;
    for model in [&models[0], &models[2]] {
        drafts_change_no_answer(root.path(), model);
    }
}

fn drafts_change_no_answer(root: &Path, (name, text, tower): &(&str, ModelConfig, Value)) {
    let folder = root.join(name);
    write(&folder, text, tower);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let (config, store) = (checkpoint.config(), checkpoint.store());
    let options = options(EngineKind::Nq);
    let tower = nq_load::tower(&checkpoint, &options, 64, &())
        .unwrap()
        .unwrap();
    let engine = nq_load::load(config, store, &options, &()).unwrap();
    let has_layer = config.mtp_layers > 0;
    let layer = has_layer.then(|| StreamDrafts::mtp(config, store, None, &options).unwrap());
    let parts = [Text(3), Image(8, 4), Text(2), Image(2, 2), Text(4)];
    let prompt = prompt(&parts, tower.as_ref());
    let answer = |drafted: Option<bool>| {
        let spec = SessionSpec {
            drafts: DraftLayer::mtp(config).map_or(DraftedBy::Nothing, DraftedBy::Layer),
            ..session(engine.as_ref(), KvType::F32).spec()
        };
        let mut session = engine.session(spec).unwrap();
        let mut speculation = drafted.map(|by_layer| match by_layer {
            true => {
                let layer = layer.as_ref().unwrap();
                Speculation::new(layer.drafter(session.as_mut()).unwrap()).always()
            }
            false => Speculation::ngram().always(),
        });
        session.show(0, prompt.images()).unwrap();
        let rows = feed(session.as_mut(), 0, prompt.ids(), 7);
        let last = rows.last().unwrap();
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
        let first = best.unwrap() as u32;
        if let Some(speculation) = &mut speculation {
            speculation.follow(0, [prompt.ids(), &[first]].concat());
        }
        let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
        let (mut drawn, drafts) = (Vec::new(), speculation.as_mut());
        let mut each = |token| {
            drawn.push(token);
            ControlFlow::Continue(())
        };
        decode(
            session.as_mut(),
            0,
            first,
            60,
            &mut sampler,
            drafts,
            &mut each,
        )
        .unwrap();
        let drafted = speculation.map_or(0, |s| s.counts().drafted);
        (drawn, drafted)
    };
    let (plain, _) = answer(None);
    assert_eq!(plain.len(), 60);
    let kinds = [false, true].into_iter().filter(|by| !by || has_layer);
    for by_layer in kinds {
        let (drawn, drafted) = answer(Some(by_layer));
        assert_eq!(drawn, plain, "by the layer: {by_layer}");
        assert!(drafted > 0 || !by_layer, "nothing was drafted");
    }
}

#[test]
fn what_is_no_image_of_the_model_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (tower, engine) = loaded(root.path()).remove(0);
    let c = tower.config();
    let refused = |grid: Grid, less: usize| {
        let mut patches = patches(Grid { t: 1, ..grid }, c);
        patches.grid = grid;
        patches.rows.truncate(patches.rows.len() - less);
        tower.encode(&patches).unwrap_err().to_string()
    };
    let odd = refused(Grid { t: 1, h: 3, w: 2 }, 0);
    assert!(odd.contains("multiples of 2"), "{odd}");
    let frames = refused(Grid { t: 2, h: 2, w: 2 }, 0);
    assert!(frames.contains("one frame"), "{frames}");
    let short = refused(Grid { t: 1, h: 2, w: 2 }, 1);
    assert!(short.contains("expected 384"), "{short}");

    let image = Arc::new(
        tower
            .encode(&patches(Grid { t: 1, h: 2, w: 4 }, c))
            .unwrap(),
    );
    let place = |at| PlacedImage {
        at,
        image: Arc::clone(&image),
    };
    let mut session = session(engine.as_ref(), KvType::F32);
    session.show(0, &[place(0), place(2)]).unwrap();
    assert!(
        session.show(0, &[place(0), place(1)]).is_err(),
        "overlapping"
    );
    assert!(
        session.show(0, &[place(4), place(1)]).is_err(),
        "out of order"
    );
    assert!(session.show(2, &[place(0)]).is_err(), "another slot");

    let pads = |ids: &[u32], at: &[usize]| {
        let images = at.iter().map(|&at| place(at)).collect();
        ImagePrompt::new(ids.to_vec(), images, TOKENS).map_err(|e| e.to_string())
    };
    assert!(pads(&[1, 303, 303, 2], &[1]).is_ok());
    let fewer = pads(&[1, 303, 2, 2], &[1]).unwrap_err();
    assert!(
        fewer.contains("2 tokens 303 in place of an image"),
        "{fewer}"
    );
    for (ids, at) in [
        (vec![1, 303, 303, 303], vec![1]),
        (vec![303, 303, 303], vec![1]),
        (vec![303], vec![]),
    ] {
        let stray = pads(&ids, &at).unwrap_err();
        assert!(stray.contains("no pad outside of images"), "{stray}");
    }
    let beyond = pads(&[1, 303], &[1]).unwrap_err();
    assert!(beyond.contains("in place of an image"), "{beyond}");
}
