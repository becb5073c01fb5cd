//! Adapters of every family, as PEFT's folder and as a GGUF file, on a model in a folder and in a GGUF file: each gives
//! the model whose tensors were merged one by one in the folder.
//!
//! That PEFT merges so was checked with PEFT 0.21 on models of transformers 5.24 with random weights: the perplexities
//! agree to 1e-6 with those of PEFT's merge in float64, for each of these forms.

use crate::common::{Rng, names};
use nq_formats::adapter::Adapter;
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::files::Files;
use nq_formats::gguf::{BlockType, GgufPlan, names::to_gguf};
use nq_formats::serialize::write_tensors;
use nq_formats::shards::Shards;
use nq_formats::{Checkpoint, Tensor, synth};
use nq_model::names::{EMBEDDING, HEAD, parameters};
use nq_model::{Dims, Experts, ModelConfig, Preset, Rope, Shape};
use nq_testkit::models::delta;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub(crate) const FAMILIES: [&str; 7] = [
    "llama-3.1-8b",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b",
    "qwen3-next-80b-a3b",
];
pub(crate) const RANK: usize = 3;

pub(crate) fn config(preset: &str) -> ModelConfig {
    let whole = Preset::find(preset).unwrap().config();
    ModelConfig {
        hidden_size: 32,
        intermediate_size: 48,
        experts: whole.experts.map(|e| Experts {
            count: 3,
            per_token: 2,
            width: 24,
            shared: if e.shared > 0 { 24 } else { 0 },
            ..e
        }),
        delta: whole.delta.map(|_| delta(6, 8, 2)),
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        vocab_size: 300,
        max_position_embeddings: 4096,
        rope: Rope {
            dims: whole.rope.dims.map(|_| 4),
            ..whole.rope
        },
        tie_word_embeddings: false,
        mtp_layers: 0,
        eos_token_ids: vec![299],
        dtype: None,
        ..whole
    }
}

pub(crate) type Tensors = BTreeMap<String, Tensor>;

fn tensors(root: &Path) -> Tensors {
    let shards = Shards::open(&Files::Folder(root.into())).unwrap();
    let floats = |n: &str| {
        let t = shards.get(n).unwrap();
        Tensor::from_f32(t.shape().into(), t.to_f32().unwrap()).unwrap()
    };
    shards.names().map(|n| (n.to_owned(), floats(n))).collect()
}

pub(crate) fn write(file: &Path, tensors: &Tensors) {
    let all: Vec<(String, Tensor)> = tensors.clone().into_iter().collect();
    write_tensors(file, &all, &BTreeMap::new()).unwrap();
}

/// A folder of a random model in f32.
pub(crate) fn model(root: &Path, config: &ModelConfig) -> Tensors {
    synth::write(root, config, 7, &()).unwrap();
    let all = tensors(root);
    let old = fs::read_dir(root).unwrap().map(|e| e.unwrap().path());
    for file in old.filter(|f| f.to_string_lossy().contains(".safetensors")) {
        fs::remove_file(file).unwrap();
    }
    write(&root.join("model.safetensors"), &all);
    let mut json = read(&root.join("config.json"));
    json["dtype"] = "float32".into();
    fs::write(root.join("config.json"), json.to_string()).unwrap();
    all
}

fn read(json: &Path) -> Value {
    serde_json::from_slice(&fs::read(json).unwrap()).unwrap()
}

/// The same folder with other tensors.
pub(crate) fn with(root: &Path, out: &Path, tensors: &Tensors) {
    fs::create_dir(out).unwrap();
    for entry in fs::read_dir(root).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), out.join(entry.file_name())).unwrap();
    }
    write(&out.join("model.safetensors"), tensors);
}

pub(crate) fn gguf(folder: &Path) -> std::path::PathBuf {
    let out = folder.with_extension("gguf");
    let source = Checkpoint::open(folder).unwrap();
    export(
        &source,
        ExportFormat::Gguf,
        &out,
        &ExportOptions::default(),
        &(),
    )
    .unwrap();
    out
}

fn adapted(model: &Path, adapter: &Path) -> Result<Checkpoint, nq_formats::Error> {
    let adapter = Adapter::open(adapter, 1.0)?;
    Checkpoint::open(model)?.with_adapters(vec![adapter])
}

/// Asserts that all parameters agree to 1e-6 of the largest value.
#[track_caller]
fn same(what: &str, a: &Checkpoint, b: &Checkpoint) {
    assert_eq!(a.config(), b.config(), "{what}");
    for (name, shape) in parameters(a.config()) {
        let values = |c: &Checkpoint| match shape {
            Shape::Vector(len) => c.store().vector(&name, len).unwrap().to_f32().unwrap(),
            Shape::Matrix(rows, cols) => {
                let weight = c.store().stored(&name, Dims::new(rows, cols)).unwrap();
                let mut all = vec![0.0; rows * cols];
                for (row, out) in all.chunks_mut(cols).enumerate() {
                    weight.dequantize_row(row, out).unwrap();
                }
                all
            }
        };
        let (x, y) = (values(a), values(b));
        let most = y.iter().fold(0f32, |m, v| m.max(v.abs()));
        let off = (x.iter().zip(&y)).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
        assert!(
            off <= 1e-6 * most,
            "{what}: {name} is off by {off} of {most}"
        );
    }
}

/// A name, an adapter's settings and tensors, and the weights that change with what they become.
type Case<'a> = (
    &'a str,
    Value,
    Vec<(String, Tensor)>,
    Vec<(&'a str, &'a Tensor)>,
);

pub(crate) fn random(rng: &mut Rng, shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    let values = (0..n).map(|_| rng.signed() * 0.3).collect();
    Tensor::from_f32(shape.into(), values).unwrap()
}

/// `A` `[rank, in]` and `B` `[out, rank]`.
pub(crate) struct Pair {
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
}

/// `w + scale B A`
fn merged(w: &Tensor, pair: &Pair, scale: f64) -> Tensor {
    let (a, b) = (pair.a.to_f32().unwrap(), pair.b.to_f32().unwrap());
    let (rank, cols) = (pair.a.shape()[0], pair.a.shape()[1]);
    let values = w.to_f32().unwrap().into_iter().enumerate().map(|(i, w)| {
        let (r, c) = (i / cols, i % cols);
        let term = |k: usize| f64::from(b[r * rank + k]) * f64::from(a[k * cols + c]);
        (f64::from(w) + scale * (0..rank).map(term).sum::<f64>()) as f32
    });
    Tensor::from_f32(w.shape().into(), values.collect()).unwrap()
}

/// Random pairs for the matrices of a folder that `chosen` takes, and the tensors with them merged, at a scale of 2.
pub(crate) fn pairs(
    all: &Tensors,
    chosen: impl Fn(&str) -> bool,
) -> (BTreeMap<String, Pair>, Tensors) {
    let mut rng = Rng(5);
    let (mut pairs, mut after) = (BTreeMap::new(), all.clone());
    for (tensor, values) in all {
        let Some(name) = tensor.strip_suffix(".weight").filter(|n| chosen(n)) else {
            continue;
        };
        let &[rows, cols] = values.shape() else {
            continue;
        };
        let pair = Pair {
            a: random(&mut rng, &[RANK, cols]),
            b: random(&mut rng, &[rows, RANK]),
        };
        after.insert(tensor.clone(), merged(values, &pair, 2.0));
        pairs.insert(name.to_owned(), pair);
    }
    (pairs, after)
}

pub(crate) fn describe(dir: &Path, keys: Value) {
    fs::create_dir_all(dir).unwrap();
    let mut config = json!({ "peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK });
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
}

/// PEFT's folder.
pub(crate) fn peft(dir: &Path, pairs: &BTreeMap<String, Pair>, keys: Value) {
    describe(dir, keys);
    let mut all = Tensors::new();
    for (name, Pair { a, b }) in pairs {
        let full = |part: &str| format!("base_model.model.{name}.{part}");
        all.insert(full("lora_A.weight"), a.clone());
        all.insert(full("lora_B.weight"), b.clone());
    }
    write(&dir.join("adapter_model.safetensors"), &all);
}

/// The rows of a matrix in another order.
fn rows(t: &Tensor, order: &[usize]) -> Tensor {
    let cols = t.shape()[1];
    let values = t.to_f32().unwrap();
    let row = |&r: &usize| values[r * cols..][..cols].to_vec();
    Tensor::from_f32(t.shape().into(), order.iter().flat_map(row).collect()).unwrap()
}

fn transposed(t: &Tensor) -> Tensor {
    let (r, c) = (t.shape()[0], t.shape()[1]);
    let values = t.to_f32().unwrap();
    let all = (0..r * c).map(|i| values[i % r * c + i / r]).collect();
    Tensor::from_f32(vec![c, r], all).unwrap()
}

/// For each row of a GGUF file's matrix, the row of the folder's that it is, as llama.cpp's converter orders them.
fn order(c: &ModelConfig, name: &str, count: usize) -> Vec<usize> {
    let heads = |first: usize, each: usize| {
        let d = c.delta.unwrap();
        let shared = d.value_heads / d.key_heads;
        let head = |place: usize| place % d.key_heads * shared + place / d.key_heads;
        let value = move |place: usize| (0..each).map(move |i| first + head(place) * each + i);
        let all = (0..d.value_heads).flat_map(value);
        (0..first).chain(all).collect::<Vec<usize>>()
    };
    let (tiled, pairs) = (c.architecture.gguf_tiled, c.architecture.gguf == "llama");
    match name.rsplit('.').next().unwrap() {
        "q_proj" | "k_proj" if pairs => {
            let half = c.head_dim / 2;
            let place = |r: usize| {
                let (head, i) = (r / c.head_dim, r % c.head_dim);
                head * c.head_dim + i % 2 * half + i / 2
            };
            (0..count).map(place).collect()
        }
        "in_proj_qkv" if tiled => heads(2 * 2 * 8, 8),
        "in_proj_z" | "out_proj" if tiled => heads(0, 8),
        "in_proj_a" | "in_proj_b" if tiled => heads(0, 1),
        _ => (0..count).collect(),
    }
}

/// The same adapter as a GGUF file.
pub(crate) fn lora(file: &Path, c: &ModelConfig, pairs: &BTreeMap<String, Pair>) {
    let mut plan = GgufPlan::new();
    plan.set("general.architecture", c.architecture.gguf);
    plan.set("general.type", "adapter");
    plan.set("adapter.type", "lora");
    plan.set("adapter.lora.alpha", 2.0 * RANK as f32);
    let mut contents = Vec::new();
    for (name, Pair { a, b }) in pairs {
        let (mut a, mut b) = (a.clone(), b.clone());
        match name.ends_with("out_proj") {
            true => a = transposed(&rows(&transposed(&a), &order(c, name, a.shape()[1]))),
            false => b = rows(&b, &order(c, name, b.shape()[0])),
        }
        // An embedding's rows are looked up in the part called `a`.
        if name == EMBEDDING {
            (a, b) = (b, transposed(&a));
        }
        let stored = to_gguf(c.architecture, c.num_hidden_layers, name).unwrap();
        for (part, values) in [("a", a), ("b", b)] {
            let shape = values.shape().to_vec();
            plan.add(
                format!("{stored}.weight.lora_{part}"),
                BlockType::F32,
                shape,
            )
            .unwrap();
            contents.push(values);
        }
    }
    let mut i = 0;
    plan.write(file, &(), &mut |_, sink| {
        i += 1;
        sink.write(contents[i - 1].data())
    })
    .unwrap();
}

#[test]
fn adapters_of_every_family_are_merged_in_every_form() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let c = config(family);
        let all = model(&at("m"), &c);
        let (pairs, after) = pairs(&all, |n| n != EMBEDDING && !n.contains("mlp.experts"));
        assert!(pairs.len() >= 11, "{family}: {:?}", pairs.keys());
        with(&at("m"), &at("merged"), &after);
        peft(&at("peft"), &pairs, json!({}));
        lora(&at("lora.gguf"), &c, &pairs);
        let (base, expected) = (gguf(&at("m")), gguf(&at("merged")));
        for (model, expected) in [(at("m"), at("merged")), (base, expected)] {
            let expected = Checkpoint::open(&expected).unwrap();
            for adapter in ["peft", "lora.gguf"] {
                let what = format!("{family}: {adapter} on {}", model.display());
                same(&what, &adapted(&model, &at(adapter)).unwrap(), &expected);
            }
        }
    }
}

/// The tensors with the experts of each layer in two, as transformers keeps them.
fn fused(all: &Tensors, experts: usize) -> Tensors {
    let mut out = all.clone();
    for layer in 0..2 {
        let name =
            |e: usize, part: &str| format!("model.layers.{layer}.mlp.experts.{e}.{part}.weight");
        let mut stack = |to: &str, parts: &[&str]| {
            let each = (0..experts).flat_map(|e| parts.iter().map(move |p| (e, *p)));
            let tensors: Vec<Tensor> = each
                .map(|(e, p)| out.remove(&name(e, p)).unwrap())
                .collect();
            let shape = vec![
                experts,
                tensors[0].shape()[0] * parts.len(),
                tensors[0].shape()[1],
            ];
            let values = tensors.iter().flat_map(|t| t.to_f32().unwrap()).collect();
            let to = format!("model.layers.{layer}.mlp.experts.{to}");
            out.insert(to, Tensor::from_f32(shape, values).unwrap());
        };
        stack("gate_up_proj", &["gate_proj", "up_proj"]);
        stack("down_proj", &["down_proj"]);
    }
    out
}

/// `[experts, out, in]` with `scale B A` of each expert added, of PEFT's `A` `[experts * rank, in]`, in which experts are
/// slowest, and `B` `[out, experts * rank]`, in which they are fastest.
fn merged_experts(w: &Tensor, pair: &Pair, scale: f64) -> Tensor {
    let &[experts, out, cols] = w.shape() else {
        panic!("{:?}", w.shape())
    };
    let (a, b) = (pair.a.to_f32().unwrap(), pair.b.to_f32().unwrap());
    let values = w.to_f32().unwrap().into_iter().enumerate().map(|(i, w)| {
        let (e, r, c) = (i / cols / out, i / cols % out, i % cols);
        let term = |k: usize| {
            let b = b[r * experts * RANK + k * experts + e];
            f64::from(b) * f64::from(a[(e * RANK + k) * cols + c])
        };
        (f64::from(w) + scale * (0..RANK).map(term).sum::<f64>()) as f32
    });
    Tensor::from_f32(w.shape().into(), values.collect()).unwrap()
}

#[test]
fn adapters_of_experts_are_merged_fused_or_apart() {
    for family in ["qwen3-30b-a3b", "qwen3.5-35b-a3b"] {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let c = config(family);
        let all = model(&at("m"), &c);

        // Of some experts only, each on its own.
        let (one, after) = pairs(&all, |n| {
            n.contains("mlp.experts.1.") || n.ends_with("o_proj")
        });
        with(&at("m"), &at("one"), &after);
        peft(&at("apart"), &one, json!({}));
        let expected = Checkpoint::open(&at("one")).unwrap();
        same(family, &adapted(&at("m"), &at("apart")).unwrap(), &expected);

        // Of all experts, by target_parameters.
        let stacked = fused(&all, 3);
        let mut rng = Rng(9);
        let (mut after, mut parts) = (stacked.clone(), Tensors::new());
        for (name, w) in stacked.iter().filter(|(n, _)| n.contains("mlp.experts.")) {
            let pair = Pair {
                a: random(&mut rng, &[3 * RANK, w.shape()[2]]),
                b: random(&mut rng, &[w.shape()[1], 3 * RANK]),
            };
            let (module, parameter) = name.rsplit_once('.').unwrap();
            // PEFT wraps the experts once for each, and does not say which is which.
            let within = if parameter == "down_proj" {
                ""
            } else {
                ".base_layer"
            };
            let full = |part: &str| format!("base_model.model.{module}{within}.{part}.weight");
            after.insert(name.clone(), merged_experts(w, &pair, 2.0));
            parts.insert(full("lora_A"), pair.a);
            parts.insert(full("lora_B"), pair.b);
        }
        with(&at("m"), &at("fused"), &stacked);
        with(&at("m"), &at("fused after"), &after);
        let keys =
            json!({ "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"] });
        describe(&at("all"), keys);
        write(&at("all").join("adapter_model.safetensors"), &parts);
        let expected = Checkpoint::open(&at("fused after")).unwrap();
        for model in [at("m"), at("fused")] {
            same(family, &adapted(&model, &at("all")).unwrap(), &expected);
        }
        let (base, expected) = (gguf(&at("fused")), gguf(&at("fused after")));
        let expected = Checkpoint::open(&expected).unwrap();
        same(family, &adapted(&base, &at("all")).unwrap(), &expected);
    }
}

#[test]
fn names_of_the_class_with_images_are_the_text_models() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let all = model(&at("m"), &config("qwen3.5-9b"));
    let (mut pairs, after) = pairs(&all, |n| {
        n.ends_with("in_proj_qkv") || n.ends_with("up_proj")
    });
    with(&at("m"), &at("merged"), &after);
    let within = |n: &str| n.replace("model.layers", "model.language_model.layers");
    pairs = pairs.into_iter().map(|(n, p)| (within(&n), p)).collect();
    let mut rng = Rng(3);
    let (a, b) = (random(&mut rng, &[RANK, 5]), random(&mut rng, &[7, RANK]));
    pairs.insert("model.visual.blocks.0.attn.qkv".into(), Pair { a, b });
    peft(&at("peft"), &pairs, json!({}));
    let found = adapted(&at("m"), &at("peft")).unwrap();
    same("images", &found, &Checkpoint::open(&at("merged")).unwrap());
    let left = found.left_over().iter().map(|l| l.why.as_str());
    assert_eq!(left.collect::<Vec<_>>(), ["images are not read"; 2]);
}

/// Changes of head and embedding: by LoRA, with PEFT's copy of the base beside it, as a whole, and for some tokens.
#[test]
fn heads_and_embeddings_are_changed_together_or_apart() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let tied = ModelConfig {
        tie_word_embeddings: true,
        ..config("qwen3-8b")
    };
    let all = model(&at("tied"), &tied);
    let weight_name = |name: &str| format!("{name}.weight");
    let embedding = all[&weight_name(EMBEDDING)].clone();
    let apart = {
        let mut apart = all.clone();
        apart.insert(weight_name(HEAD), embedding.clone());
        apart
    };
    let mut rng = Rng(11);
    let pair = Pair {
        a: random(&mut rng, &[RANK, 32]),
        b: random(&mut rng, &[300, RANK]),
    };
    let changed = merged(&embedding, &pair, 2.0);
    let whole = random(&mut rng, &[300, 32]);
    let tokens = random(&mut rng, &[2, 32]);
    let mut some = embedding.to_f32().unwrap();
    for (row, token) in [299, 4].into_iter().enumerate() {
        some[token * 32..][..32].copy_from_slice(&tokens.to_f32().unwrap()[row * 32..][..32]);
    }
    let some = Tensor::from_f32(vec![300, 32], some).unwrap();
    let pre = |rest: &str| format!("base_model.model.{rest}");
    let embedded = |part: &str| pre(&format!("{EMBEDDING}.lora_embedding_{part}"));
    let cases: [Case<'_>; 5] = [
        (
            "head",
            json!({ "target_modules": ["lm_head"] }),
            vec![
                (pre("lm_head.lora_A.weight"), pair.a.clone()),
                (pre("lm_head.lora_B.weight"), pair.b.clone()),
                (pre("lm_head.base_layer.weight"), embedding.clone()),
            ],
            vec![(HEAD, &changed)],
        ),
        (
            "embedding",
            json!({}),
            vec![
                (embedded("A"), transposed(&pair.b)),
                (embedded("B"), transposed(&pair.a)),
            ],
            vec![(EMBEDDING, &changed)],
        ),
        (
            "both, tied",
            json!({ "ensure_weight_tying": true }),
            vec![
                (embedded("A"), transposed(&pair.b)),
                (embedded("B"), transposed(&pair.a)),
            ],
            vec![(EMBEDDING, &changed), (HEAD, &changed)],
        ),
        (
            "whole",
            json!({ "modules_to_save": ["lm_head"] }),
            vec![(pre("lm_head.weight"), whole.clone())],
            vec![(HEAD, &whole)],
        ),
        (
            "tokens",
            json!({ "trainable_token_indices": [299, 4] }),
            vec![(
                pre(&format!("{EMBEDDING}.token_adapter.trainable_tokens_delta")),
                tokens.clone(),
            )],
            vec![(EMBEDDING, &some), (HEAD, &some)],
        ),
    ];
    for (case, keys, tensors, after) in cases {
        describe(&at(case), keys);
        write(
            &at(case).join("adapter_model.safetensors"),
            &tensors.into_iter().collect(),
        );
        let mut expected = apart.clone();
        after.into_iter().for_each(|(name, t)| {
            expected.insert(weight_name(name), t.clone());
        });
        let out = at(&format!("{case} after"));
        with(&at("tied"), &out, &expected);
        let found = adapted(&at("tied"), &at(case)).unwrap();
        let expected = Checkpoint::open(&out).unwrap();
        assert_eq!(
            found.config().tie_word_embeddings,
            case == "both, tied" || case == "tokens",
            "{case}"
        );
        same(case, &found, &expected);
    }
}

#[test]
fn patterns_are_regular_expressions_of_which_the_first_counts() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let all = model(&at("m"), &config("llama-3.1-8b"));
    let (pairs, _) = pairs(&all, |n| n.ends_with("q_proj") || n.ends_with("v_proj"));
    // As PEFT's get_pattern_key: `(.*\.)?(KEY)$`, from the start of a module's name.
    for (patterns, scales) in [
        (json!({ "q_proj": 6, ".*q_proj": 3 }), [2.0, 2.0, 1.0, 1.0]),
        (json!({ ".*q_proj": 3, "q_proj": 6 }), [1.0, 1.0, 1.0, 1.0]),
        (
            json!({ "layers.1.self_attn.q_proj": 6 }),
            [1.0, 2.0, 1.0, 1.0],
        ),
        (
            json!({ "layers\\.(0|1)\\.self_attn\\.[qv]_proj": 6 }),
            [2.0; 4],
        ),
        (json!({ "^self_attn.q_proj": 6 }), [1.0; 4]),
        (
            json!({ "^model.layers.0.self_attn.q_proj": 6 }),
            [2.0, 1.0, 1.0, 1.0],
        ),
        (
            json!({ "_proj": 6, "proj": 6, "v_proj|q_proj": 9 }),
            [3.0; 4],
        ),
    ] {
        let mut after = all.clone();
        let scale = |name: &str| {
            let second = usize::from(name.contains("layers.1"));
            scales[if name.ends_with("q_proj") { 0 } else { 2 } + second]
        };
        for (name, pair) in &pairs {
            let tensor = format!("{name}.weight");
            after.insert(tensor.clone(), merged(&all[&tensor], pair, scale(name)));
        }
        let what = patterns.to_string();
        for name in ["after", "adapter"] {
            let _ = fs::remove_dir_all(at(name));
        }
        with(&at("m"), &at("after"), &after);
        peft(
            &at("adapter"),
            &pairs,
            json!({ "alpha_pattern": patterns, "lora_alpha": RANK }),
        );
        let expected = Checkpoint::open(&at("after")).unwrap();
        same(
            &what,
            &adapted(&at("m"), &at("adapter")).unwrap(),
            &expected,
        );
    }
    fs::remove_dir_all(at("adapter")).unwrap();
    peft(
        &at("adapter"),
        &pairs,
        json!({ "alpha_pattern": { "(?!q)_proj": 6 } }),
    );
    names(
        adapted(&at("m"), &at("adapter")),
        &["alpha_pattern (?!q)_proj"],
    );
    fs::remove_dir_all(at("adapter")).unwrap();
    peft(
        &at("adapter"),
        &pairs,
        json!({ "rank_pattern": { "v_proj": 8 } }),
    );
    names(
        adapted(&at("m"), &at("adapter")),
        &["v_proj", "of rank 8", "[3, 32]"],
    );
}

#[test]
fn what_cannot_be_merged_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let all = model(&at("m"), &config("llama-3.1-8b"));
    let (own, _) = pairs(&all, |n| n.ends_with("q_proj"));
    for (keys, parts) in [
        (
            json!({ "init_lora_weights": "lora_ga" }),
            ["init_lora_weights \"lora_ga\"", "changes the model"],
        ),
        (
            json!({ "init_lora_weights": "pissa_niter_4" }),
            ["init_lora_weights", "changes the model"],
        ),
        (
            json!({ "init_lora_weights": "a new one" }),
            ["init_lora_weights \"a new one\"", "does not know"],
        ),
        (
            json!({ "kasa_config": { "beta": 1 } }),
            ["kasa_config", "nq merges LoRA"],
        ),
        (json!({ "a_new_key": 3 }), ["a_new_key 3", "nq merges LoRA"]),
        (
            json!({ "use_dora": true }),
            ["self_attn.q_proj", "magnitudes"],
        ),
    ] {
        let _ = fs::remove_dir_all(at("adapter"));
        peft(&at("adapter"), &own, keys);
        names(adapted(&at("m"), &at("adapter")), &parts);
    }
    for (keys, name) in [
        (json!({}), "model.layers.0.self_attn.qkv_proj"),
        (json!({}), "model.layers.7.mlp.up_proj"),
    ] {
        let mut rng = Rng(1);
        let (a, b) = (random(&mut rng, &[RANK, 32]), random(&mut rng, &[48, RANK]));
        let _ = fs::remove_dir_all(at("adapter"));
        peft(
            &at("adapter"),
            &BTreeMap::from([(name.to_owned(), Pair { a, b })]),
            keys,
        );
        names(adapted(&at("m"), &at("adapter")), &[name, "another name"]);
    }
    for start in ["gaussian", "eva", "orthogonal", "mica"] {
        let _ = fs::remove_dir_all(at("adapter"));
        peft(&at("adapter"), &own, json!({ "init_lora_weights": start }));
        adapted(&at("m"), &at("adapter")).unwrap();
    }
}
