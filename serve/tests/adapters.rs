//! Adapters of one model, for many clients at once: chosen by name or by number, beside requests without any.

use crate::common::{self, COMPLETIONS, Running, demo, load, named, with};
use nq_formats::adapter::{Adapter, Lora};
use nq_formats::serialize::write_tensors;
use nq_formats::{Checkpoint, Tensor, TensorEntry, Weight, WeightStore};
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::Dims;

use nq_runtime::{AppliedAdapter, DeviceChoice, Engine, LoadOptions, Session, Speculation};
use nq_serve::{EngineOptions, HttpLimits, Models, OpenDrafts, PageStore, Security};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const RANK: usize = 4;

/// Values from -0.25 to 0.25 that bf16 holds: others for each seed.
fn values(seed: usize, n: usize) -> Vec<f32> {
    let mut rng = Philox::new(seed as u64, 0);
    (0..n)
        .map(|_| (rng.next_u32() % 65) as f32 / 128.0 - 0.25)
        .collect()
}

/// The demo model's weights with an adapter merged in full precision.
struct Merged {
    base: Checkpoint,
    matrices: BTreeMap<String, Weight>,
}

impl WeightStore for Merged {
    fn format(&self) -> &'static str {
        "merged"
    }

    fn contains(&self, name: &str) -> bool {
        self.base.store().contains(name)
    }

    fn vector(&self, name: &str, len: usize) -> nq_formats::Result<Tensor> {
        self.base.store().vector(name, len)
    }

    fn matrix(&self, name: &str, dims: Dims) -> nq_formats::Result<Weight> {
        match self.matrices.get(name) {
            Some(weight) => Ok(weight.clone()),
            None => self.base.store().matrix(name, dims),
        }
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.base.store().entries()
    }

    fn file_bytes(&self) -> u64 {
        self.base.store().file_bytes()
    }

    fn quantization(&self) -> Option<&Value> {
        None
    }
}

/// Writes PEFT's folder of an adapter of the demo model, and merges it.
fn adapter(folder: &Path, seed: usize) -> Merged {
    let base = Checkpoint::open(demo()).unwrap();
    let c = base.config().clone();
    let (mut tensors, mut matrices) = (Vec::new(), BTreeMap::new());
    for layer in 0..c.num_hidden_layers {
        for linear in c.layer(layer).matrices() {
            let (name, Dims { rows, cols }) = (linear.name(layer), linear.dims(&c));
            let seed = seed + tensors.len();
            let (a, b) = (values(seed, RANK * cols), values(seed + 1, rows * RANK));
            let mut merged = match base.store().matrix(&name, Dims::new(rows, cols)).unwrap() {
                Weight::Dense(t) => t.to_f32().unwrap(),
                other => panic!("{}", other.scheme_name()),
            };
            for (i, value) in merged.iter_mut().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let term = |k: usize| f64::from(b[row * RANK + k]) * f64::from(a[k * cols + col]);
                *value += (0..RANK).map(term).sum::<f64>() as f32 / 8.0;
            }
            let shape = vec![rows, cols];
            let merged = Weight::Dense(Tensor::from_f32(shape, merged).unwrap());
            matrices.insert(name.clone(), merged);
            for (part, values, shape) in [("A", a, [RANK, cols]), ("B", b, [rows, RANK])] {
                let full = format!("base_model.model.{name}.lora_{part}.weight");
                tensors.push((full, Tensor::from_f32(shape.to_vec(), values).unwrap()));
            }
        }
    }
    std::fs::create_dir(folder).unwrap();
    let config = json!({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK as f64 / 8.0});
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let file = folder.join("adapter_model.safetensors");
    write_tensors(&file, &tensors, &BTreeMap::new()).unwrap();
    Merged { base, matrices }
}

fn lora(folder: &Path, weight: f64) -> Lora {
    let base = Checkpoint::open(demo()).unwrap();
    let adapter = Adapter::open(folder, weight).unwrap();
    adapter.lora(base.config()).unwrap()
}

fn served(engine: Arc<dyn Engine>, options: EngineOptions) -> Running {
    let model = Arc::new(named("demo", engine, None, options));
    Running::over(model, Security::default(), HttpLimits::default())
}

/// The demo model with the adapters `one` and `two`.
fn adapted(one: &Path, two: &Path, options: EngineOptions) -> Running {
    let engine = load().with_adapters(&[lora(one, 1.0), lora(two, 1.0)], &[]);
    let options = EngineOptions {
        adapters: vec![11, 12],
        ..options
    };
    let model = Arc::new(named("demo", engine.unwrap(), None, options));
    let mut models = Models::from(vec![Arc::clone(&model)]);
    models.adapter("one", "demo", 0).unwrap();
    models.adapter("two", "demo", 1).unwrap();
    models.alias("second", "two").unwrap();
    for taken in ["demo", "one", "second"] {
        let refused = models.adapter(taken, "demo", 0).unwrap_err();
        assert!(refused.message.contains("the name of two models"));
    }
    Running::all(models, model, Security::default(), HttpLimits::default())
}

/// A request for the text behind a prompt.
fn text_of(server: &Running, prompt: &str, more: &Value) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    server.json(COMPLETIONS, &with(body, more))
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

const PROMPTS: [&str; 4] = [
    "Once upon a time there was a little girl who lived at the edge of a wood, and she had",
    "Once upon a time there was a little girl who lived at the edge of a wood, and she was",
    "Once upon a time there was an old man who lived by the sea with his dog, and one day",
    "The quick brown fox jumps over the lazy dog, and then it",
];

#[test]
fn mixed_clients_get_the_texts_of_merged_models() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
    let merged = [adapter(&one, 1), adapter(&two, 1000)];
    let both = json!({"lora": [{"id": 1, "scale": -0.5}, {"id": 0, "scale": 0.5}]});
    let asked = [
        json!({}),
        json!({"model": "one"}),
        json!({"model": "second"}),
        both,
    ];
    // Each by itself: without adapters, with one in place of the model, with both at their scales.
    let alone: Vec<Arc<dyn Engine>> = vec![
        load(),
        load()
            .with_adapters(&[lora(&one, 1.0)], &applied(1))
            .unwrap(),
        load()
            .with_adapters(&[lora(&two, 1.0)], &applied(1))
            .unwrap(),
        load()
            .with_adapters(&[lora(&one, 0.5), lora(&two, -0.5)], &applied(2))
            .unwrap(),
    ];
    let plain = EngineOptions {
        parallel: 1,
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let texts = |engine: Arc<dyn Engine>| {
        let server = served(engine, plain.clone());
        PROMPTS.map(|prompt| text(&text_of(&server, prompt, &json!({}))).to_owned())
    };
    let expected: Vec<[String; 4]> = alone.into_iter().map(texts).collect();
    for (merged, expected) in merged.iter().zip(&expected[1..]) {
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            threads: Some(2),
            ..LoadOptions::default()
        };
        let engine = nq_load::load(merged.base.config(), merged, &options, &()).unwrap();
        assert_eq!(&texts(engine), expected, "merged in full precision");
    }
    assert!(expected[1..].iter().all(|texts| *texts != expected[0]));
    let options = EngineOptions {
        parallel: 16,
        ..EngineOptions::default()
    };
    let server = adapted(&one, &two, options);
    for cached in [false, true] {
        std::thread::scope(|scope| {
            for (more, expected) in asked.iter().zip(&expected) {
                for (prompt, expected) in PROMPTS.iter().zip(expected) {
                    let server = &server;
                    scope.spawn(move || {
                        let answer = text_of(server, prompt, more);
                        assert_eq!(text(&answer), expected, "{more} {prompt}, cached: {cached}");
                        let named = more.get("model").map_or("demo", |n| n.as_str().unwrap());
                        assert_eq!(answer["model"], named);
                    });
                }
            }
        });
    }
}

fn applied(n: usize) -> Vec<AppliedAdapter> {
    let one = |adapter| AppliedAdapter {
        adapter,
        scale: 1.0,
    };
    (0..n).map(one).collect()
}

#[test]
fn what_was_computed_with_an_adapter_is_kept_for_that_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
    adapter(&one, 1);
    adapter(&two, 1000);
    let server = adapted(&one, &two, EngineOptions::default());
    let cached = |more: &Value| {
        let answer = text_of(&server, PROMPTS[0], more);
        let usage = &answer["usage"]["prompt_tokens_details"];
        usage["cached_tokens"].as_u64().unwrap()
    };
    let half = json!({"model": "one", "lora": [{"id": 0, "scale": 0.5}]});
    let none = json!({"model": "two", "lora": [{"id": 1, "scale": 0}]});
    for (more, shared) in [
        (json!({}), false),
        (json!({"model": "one"}), false),
        (json!({"model": "two"}), false),
        (half, false),
        // Nothing is added: what the model itself has computed serves.
        (none, true),
    ] {
        assert_eq!(cached(&more) > 0, shared, "{more}: the first time");
        assert!(cached(&more) > 0, "{more}: the second time");
    }
}

/// Prompts of some pages come from a disk after a restart, and drafts that are not the adapter's are checked with it.
#[test]
fn texts_are_the_same_after_a_restart_and_with_drafts() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
    adapter(&one, 1);
    adapter(&two, 1000);
    let prompt = PROMPTS.map(|p| p.repeat(3)).join(" ");
    let asked = [json!({}), json!({"model": "one"}), json!({"model": "two"})];
    let texts = |server: &Running| {
        let answers = asked.iter().map(|more| text_of(server, &prompt, more));
        answers.map(|a| text(&a).to_owned()).collect::<Vec<_>>()
    };
    let plain = EngineOptions {
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let expected = texts(&adapted(&one, &two, plain));
    assert!(expected[0] != expected[1] && expected[1] != expected[2]);
    for restarted in [false, true] {
        let store = PageStore::open(&folder.path().join("pages"), 1 << 30, Arc::new(())).unwrap();
        let drafts = |_: &mut dyn Session| Ok(Speculation::ngram().always());
        let options = EngineOptions {
            disk: Some(store.of_model(b"demo")),
            drafts: Some(OpenDrafts::new(drafts, Arc::new(()))),
            ..EngineOptions::default()
        };
        let server = adapted(&one, &two, options);
        assert_eq!(texts(&server), expected, "restarted: {restarted}");
        let engine = server.model.engine();
        assert!(engine.metrics().drafted_tokens.get() > 0);
        let restored = engine.metrics().restored_tokens.get() as usize;
        let least = if restarted { asked.len() * PAGE } else { 0 };
        assert!(
            restored >= least && (restored > 0) == restarted,
            "{restored}"
        );
        engine.close(Duration::from_secs(10));
    }
}

#[test]
fn adapters_are_listed_beside_their_model_and_wrong_ones_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
    adapter(&one, 1);
    adapter(&two, 1000);
    let server = adapted(&one, &two, EngineOptions::default());
    let list = server.get("/v1/models").json();
    let cards = list["data"].as_array().unwrap();
    let ids: Vec<&str> = cards.iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["demo", "one", "two", "second"]);
    for card in cards {
        let parent = if card["id"] == "demo" {
            Value::Null
        } else {
            "demo".into()
        };
        assert_eq!(card["parent"], parent, "{card}");
        assert_eq!(
            server
                .get(&format!("/v1/models/{}", card["id"].as_str().unwrap()))
                .json()["id"],
            card["id"]
        );
    }
    for lora in [
        json!([{"id": 2, "scale": 1}]),
        json!([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}]),
        json!([{"id": 0, "scale": 1e9}]),
        json!([{"id": -1, "scale": 1}]),
        json!([{"id": 0}]),
        json!({"id": 0, "scale": 1}),
    ] {
        let body = with(common::base(COMPLETIONS), &json!({"lora": lora}));
        let refused = server.post(COMPLETIONS, &body);
        assert_eq!(refused.status, 400, "{}", refused.body);
        assert!(refused.body.contains("lora"), "{}", refused.body);
    }
    let plain = Running::start();
    let body = with(
        common::base(COMPLETIONS),
        &json!({"lora": [{"id": 0, "scale": 1}]}),
    );
    let refused = plain.post(COMPLETIONS, &body);
    assert!(
        refused.body.contains("expected different ids below 0"),
        "{}",
        refused.body
    );
    assert_eq!(
        plain
            .post(COMPLETIONS, &with(body, &json!({"lora": []})))
            .status,
        200
    );
}
