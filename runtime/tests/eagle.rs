//! EAGLE-3 heads: read as published, drafts as the published computation gives them, answers unchanged.

mod common;

use common::{Store, feed, options, small_config, tokens};
use nq_formats::eagle::EagleHead;
use nq_formats::names::EMBEDDING;
use nq_formats::{AffineScheme, Bits, Group, ModelConfig, Weight, WeightStore, Zeros};
use nq_kernels::rng::Philox;
use nq_runtime::generate::{Limits, Sequence, generate};
use nq_runtime::speculation::Draft;
use nq_runtime::{
    ActivationChoice, Drafter, Eagle, Engine, EngineKind, KvType, LoadOptions, Observer, Sampler,
    SamplingParams, Session, SessionSpec, Speculation,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

const DRAFTED: usize = 40;
const INNER: usize = 72;
const HEADS: (usize, usize, usize) = (6, 2, 16);

fn model() -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 8,
        ..small_config()
    }
}

fn target(c: &ModelConfig) -> (Arc<dyn Engine>, Store) {
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let store = Store::random(c, 9).quantized(int4);
    let options = LoadOptions {
        activations: ActivationChoice::Auto,
        ..options(EngineKind::Nq)
    };
    let engine = nq_runtime::load(c, &store, &options, &()).unwrap();
    (engine, store)
}

/// The weights of a head, by their published names.
struct Published {
    config: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    d2t: Vec<i64>,
}

fn published(c: &ModelConfig, layer: &str, seed: u64) -> Published {
    let (h, (heads, kv_heads, d)) = (c.hidden_size, HEADS);
    let mut stream = 0;
    let mut tensors = BTreeMap::new();
    let mut add = |name: String, shape: Vec<usize>| {
        stream += 1;
        let mut rng = Philox::new(seed, stream);
        let (mean, deviation) = match shape[..] {
            [_, inputs] => (0.0, 1.0 / (inputs as f32).sqrt()),
            _ => (1.0, 0.2),
        };
        let n = shape.iter().product();
        let values: Vec<f32> = (0..n).map(|_| mean + deviation * rng.normal()).collect();
        tensors.insert(name, (shape, values));
    };
    add("fc.weight".into(), vec![h, 3 * h]);
    for norm in ["hidden_norm", "input_layernorm", "post_attention_layernorm"] {
        add(format!("{layer}.{norm}.weight"), vec![h]);
    }
    for (part, rows) in [("q", heads * d), ("k", kv_heads * d), ("v", kv_heads * d)] {
        add(
            format!("{layer}.self_attn.{part}_proj.weight"),
            vec![rows, 2 * h],
        );
    }
    add(
        format!("{layer}.self_attn.o_proj.weight"),
        vec![h, heads * d],
    );
    for part in ["gate", "up"] {
        add(format!("{layer}.mlp.{part}_proj.weight"), vec![INNER, h]);
    }
    add(format!("{layer}.mlp.down_proj.weight"), vec![h, INNER]);
    add("norm.weight".into(), vec![h]);
    add("lm_head.weight".into(), vec![DRAFTED, h]);
    Published {
        config: json!({
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": h,
            "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": d, "vocab_size": c.vocab_size,
            "draft_vocab_size": DRAFTED, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "tie_word_embeddings": false,
        }),
        tensors,
        // Token 2 id + 3 for each id.
        d2t: (0..DRAFTED as i64).map(|id| id + 3).collect(),
    }
}

impl Published {
    /// Writes config.json and model.safetensors to `folder`.
    fn write(&self, folder: &Path) {
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
        let mut add = |name: &str, dtype: &str, shape: Vec<usize>, bytes: Vec<u8>| {
            let at = [data.len(), data.len() + bytes.len()];
            header.insert(
                name.into(),
                json!({"dtype": dtype, "shape": shape, "data_offsets": at}),
            );
            data.extend(bytes);
        };
        let d2t = self.d2t.iter().flat_map(|v| v.to_le_bytes()).collect();
        add("d2t", "I64", vec![self.d2t.len()], d2t);
        for (name, (shape, values)) in &self.tensors {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            add(name, "F32", shape.clone(), bytes);
        }
        let header = Value::Object(header).to_string();
        let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
    }

    fn weight(&self, name: &str) -> &[f32] {
        let ends = |(key, _): &(&String, &(Vec<usize>, Vec<f32>))| {
            *key == &format!("{name}.weight") || key.ends_with(&format!(".{name}.weight"))
        };
        &self.tensors.iter().find(ends).unwrap().1.1
    }

    /// `w x` with the weight `name`.
    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let rows = self.weight(name).chunks_exact(x.len());
        rows.map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum())
            .collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let square: f64 = x.iter().map(|v| v * v).sum();
        let by = (square / x.len() as f64 + 1e-6).sqrt();
        let gains = self.weight(name).iter();
        gains.zip(x).map(|(&g, x)| f64::from(g) * x / by).collect()
    }

    /// Tokens drafted after `text`, one at a time in f64, by the published computation; `streams` are the target's
    /// after the head's three layers, for each token of `text` but the last.
    fn drafts(&self, embedding: &Weight, text: &[u32], streams: &[Vec<f64>], n: usize) -> Vec<u32> {
        let (heads, kv_heads, d) = HEADS;
        let mut cache: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
        let before_residual = self.config["norm_before_residual"] == json!(true);
        let mut layer = |token: u32, stream: &[f64]| -> Vec<f64> {
            let mut row = vec![0f32; stream.len()];
            embedding.dequantize_row(token as usize, &mut row).unwrap();
            let row: Vec<f64> = row.into_iter().map(f64::from).collect();
            let normed = self.norm("hidden_norm", stream);
            let both = [self.norm("input_layernorm", &row), normed.clone()].concat();
            let at = cache.len() as f64;
            let turn = |x: Vec<f64>| -> Vec<f64> {
                let turned = x.chunks_exact(d).flat_map(|head| {
                    (0..d).map(move |i| {
                        let angle = at * 1e4f64.powf(-2.0 * (i % (d / 2)) as f64 / d as f64);
                        let (sin, cos) = angle.sin_cos();
                        match i < d / 2 {
                            true => head[i] * cos - head[i + d / 2] * sin,
                            false => head[i] * cos + head[i - d / 2] * sin,
                        }
                    })
                });
                turned.collect()
            };
            let q = turn(self.product("q_proj", &both));
            let k = turn(self.product("k_proj", &both));
            cache.push((k, self.product("v_proj", &both)));
            let mut attended = Vec::new();
            for head in 0..heads {
                let kv = head / (heads / kv_heads) * d..(head / (heads / kv_heads) + 1) * d;
                let q = &q[head * d..(head + 1) * d];
                let score = |k: &[f64]| -> f64 {
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum();
                    (dot / (d as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = cache.iter().map(|(k, _)| score(&k[kv.clone()])).collect();
                let total: f64 = weights.iter().sum();
                attended.extend(kv.map(|i| {
                    let sum: f64 = weights.iter().zip(&cache).map(|(w, (_, v))| w * v[i]).sum();
                    sum / total
                }));
            }
            let residual = if before_residual { &normed } else { stream };
            let add = |a: &[f64], b: Vec<f64>| -> Vec<f64> {
                a.iter().zip(b).map(|(a, b)| a + b).collect()
            };
            let x = add(residual, self.product("o_proj", &attended));
            let normed = self.norm("post_attention_layernorm", &x);
            let (gate, up) = (
                self.product("gate_proj", &normed),
                self.product("up_proj", &normed),
            );
            let inner: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            add(&x, self.product("down_proj", &inner))
        };
        let mut x = Vec::new();
        for (&token, stream) in text[1..].iter().zip(streams) {
            x = layer(token, &self.product("fc", stream));
        }
        let mut drafted = Vec::new();
        while drafted.len() < n {
            let logits = self.product("lm_head", &self.norm("norm", &x));
            let best = (0..DRAFTED)
                .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
                .unwrap();
            let token = (best as i64 + self.d2t[best]) as u32;
            drafted.push(token);
            x = layer(token, &x);
        }
        drafted
    }
}

/// The target's residual streams after the given numbers of layers, side by side.
fn streams(engine: &dyn Engine, text: &[u32], after: [usize; 3]) -> Vec<Vec<f64>> {
    struct Streams(usize, [usize; 3], Vec<Vec<f64>>);
    impl Observer for Streams {
        fn wants_inputs(&self) -> bool {
            false
        }
        fn layer_output(&mut self, layer: usize, x: &[f32]) {
            if let Some(tap) = self.1.iter().position(|&n| n == layer + 1) {
                for (row, x) in self.2.iter_mut().zip(x.chunks_exact(self.0)) {
                    let to = &mut row[tap * self.0..(tap + 1) * self.0];
                    to.iter_mut().zip(x).for_each(|(to, &x)| *to = f64::from(x));
                }
            }
        }
    }
    let h = engine.config().hidden_size;
    let mut seen = Streams(h, after, vec![vec![0.0; 3 * h]; text.len()]);
    let mut session = session(engine);
    let chunk = nq_runtime::Chunk {
        slot: 0,
        tokens: text,
        logits: nq_runtime::LogitsWanted::Last,
    };
    session.forward(&[chunk], Some(&mut seen)).unwrap();
    seen.2
}

fn session(engine: &dyn Engine) -> Box<dyn Session> {
    let spec = SessionSpec {
        slots: 2,
        ctx: 300,
        pages: None,
        kv: KvType::F32,
        max_rows: 300,
    };
    engine.session(spec).unwrap()
}

fn load(head: &Published, model: (&ModelConfig, &Store)) -> nq_runtime::Result<Eagle> {
    let folder = tempfile::tempdir().unwrap();
    head.write(folder.path());
    let opened = EagleHead::open(folder.path())?;
    Eagle::load(&opened, (model.0, model.1), &options(EngineKind::Nq))
}

fn ask(
    drafter: &mut dyn Drafter,
    session: &mut dyn Session,
    slot: usize,
    text: &[u32],
) -> Vec<u32> {
    if let Some(tapped) = session.take_tapped(slot) {
        drafter.see(slot, tapped);
    }
    let mut drafts = [Draft {
        slot,
        text,
        most: 5,
        tokens: Vec::new(),
        kind: 0,
    }];
    drafter.draft(&mut drafts).unwrap();
    let [draft] = drafts;
    draft.tokens
}

/// As the text grows, is cut, and is another, in both slots.
#[test]
fn drafts_are_those_of_the_published_computation() {
    let c = model();
    let (engine, store) = target(&c);
    let embedding = store
        .matrix(EMBEDDING, (c.vocab_size, c.hidden_size))
        .unwrap();
    for (layer, taps, before_residual) in [
        ("midlayer", None, false),
        ("layers.0", Some([1, 4, 6]), false),
        ("model.layers.0", None, true),
    ] {
        let mut head = published(&c, layer, 5);
        head.config["norm_before_residual"] = json!(before_residual);
        if let Some(taps) = taps {
            head.config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": taps});
        }
        let eagle = load(&head, (&c, &store)).unwrap();
        let mut session = session(&*engine);
        let mut drafter = eagle.drafter(&mut *session).unwrap();
        // Of `text`, the session holds `fed` tokens, and the head sees those from `from` on.
        let mut check = |slot: usize, text: &[u32], fed: usize, from: usize| {
            let held = session.len(slot);
            session.truncate(slot, held.min(fed));
            let held = session.len(slot);
            feed(&mut *session, slot, &text[held..text.len() - 1]);
            let all = streams(&*engine, &text[..text.len() - 1], taps.unwrap_or([2, 4, 5]));
            let expected = head.drafts(&embedding, &text[from..], &all[from..], 5);
            let found = ask(&mut drafter, &mut *session, slot, text);
            assert_eq!(found, expected, "{layer}, {} tokens", text.len());
        };
        let text = tokens(290, 3);
        for length in [2, 3, 7, 8, 140, 290] {
            check(0, &text[..length], length, 0);
        }
        // Shorter, longer again with other tokens, and another text beside it.
        let mut other = text[..100].to_vec();
        other.extend(tokens(30, 8));
        check(0, &other, 100, 100);
        check(1, &tokens(20, 12), 0, 0);
        check(0, &tokens(50, 13), 0, 0);
        // Nothing is known of tokens that were computed before: those of a fork.
        session.fork(0, 1, 30).unwrap();
        let forked = tokens(50, 13)[..31].to_vec();
        assert!(ask(&mut drafter, &mut *session, 1, &forked).is_empty());
    }
}

/// Whatever is drafted, answers stay as they are.
#[test]
fn drafts_change_no_answer() {
    let c = model();
    let (engine, store) = target(&c);
    let eagle = load(&published(&c, "midlayer", 5), (&c, &store)).unwrap();
    let prompt = tokens(40, 8);
    for temperature in [0.0, 0.7] {
        let params = SamplingParams {
            temperature,
            ..SamplingParams::greedy()
        };
        let answer = |drafts: bool| {
            let mut session = session(&*engine);
            let speculation = drafts.then(|| {
                let drafter = eagle.drafter(&mut *session).unwrap();
                Speculation::new(Box::new(drafter)).always()
            });
            let mut sequence = Sequence::new(&mut *session, 0).with_drafts(speculation);
            let mut all = Vec::new();
            // Two answers in a row: the second continues what the cache holds.
            for n in [60, 50] {
                let text = [&prompt[..], &all].concat();
                let mut sampler = Sampler::new(params, 3).unwrap();
                let limits = Limits {
                    stop: &[],
                    max_tokens: n,
                    interrupt: None,
                };
                let each = &mut |_| ControlFlow::Continue(());
                let made = generate(
                    &mut *session,
                    &mut sequence,
                    &text,
                    &mut sampler,
                    &limits,
                    each,
                );
                let made = made.unwrap();
                assert_eq!(made.stats.drafted > 0, drafts, "{:?}", made.stats);
                all.extend(made.tokens);
            }
            all
        };
        assert_eq!(answer(true), answer(false));
    }
}

#[test]
fn hostile_heads_are_refused() {
    let c = model();
    let (_, store) = target(&c);
    let refused = |change: &dyn Fn(&mut Published), words: &[&str]| {
        let mut head = published(&c, "midlayer", 5);
        change(&mut head);
        let error = load(&head, (&c, &store))
            .err()
            .expect("an error")
            .to_string();
        assert!(
            words.iter().all(|w| error.contains(w)),
            "{words:?}: {error}"
        );
    };
    refused(
        &|h| h.config["architectures"] = json!(["LlamaForCausalLM"]),
        &["EAGLE-3", "config.json"],
    );
    refused(
        &|h| h.config["num_hidden_layers"] = json!(2),
        &["num_hidden_layers 2"],
    );
    refused(
        &|h| h.config["hidden_size"] = json!(64),
        &["hidden_size", "48", "64"],
    );
    refused(
        &|h| h.config["vocab_size"] = json!(100),
        &["vocab_size", "101", "100"],
    );
    refused(
        &|h| h.config["draft_vocab_size"] = json!(41),
        &["d2t", "41", "40"],
    );
    refused(
        &|h| h.config["draft_vocab_size"] = json!(1000),
        &["draft_vocab_size", "101"],
    );
    refused(
        &|h| h.config["num_attention_heads"] = json!(5),
        &["num_attention_heads", "num_key_value_heads (2)"],
    );
    refused(&|h| h.config["head_dim"] = json!(15), &["head_dim", "15"]);
    for key in ["intermediate_size", "head_dim"] {
        refused(
            &|h| {
                h.config["hidden_size"] = json!(1 << 28);
                h.config[key] = json!(1 << 28);
            },
            &["parameters", "the head's dimensions"],
        );
    }
    refused(
        &|h| h.config["rope_scaling"] = json!({"rope_type": "llama3"}),
        &["rope"],
    );
    let ids = "eagle_aux_hidden_state_layer_ids";
    refused(
        &|h| h.config["eagle_config"] = json!({ids: [1, 2]}),
        &[ids, "three"],
    );
    refused(
        &|h| h.config["eagle_config"] = json!({ids: [0, 2, 3]}),
        &["1 to 8", "[0, 2, 3]"],
    );
    refused(&|h| h.d2t[7] = -8, &["d2t", "7 + -8"]);
    refused(&|h| h.d2t[7] = i64::MAX, &["d2t", "below 101"]);
    refused(
        &|h| drop(h.tensors.remove("midlayer.mlp.up_proj.weight")),
        &["midlayer.mlp.up_proj", "no such tensor"],
    );
    refused(
        &|h| h.tensors.get_mut("fc.weight").unwrap().0 = vec![96, 72],
        &["fc.weight", "[48, 144]", "[96, 72]"],
    );
    let nan = |h: &mut Published| h.tensors.get_mut("norm.weight").unwrap().1[3] = f32::NAN;
    let mut head = published(&c, "midlayer", 5);
    nan(&mut head);
    let (engine, store) = target(&c);
    let eagle = load(&head, (&c, &store)).unwrap();
    let mut session = session(&*engine);
    let mut drafter = eagle.drafter(&mut *session).unwrap();
    feed(&mut *session, 0, &[1, 2, 3]);
    drafter.see(0, session.take_tapped(0).unwrap());
    let mut drafts = [Draft {
        slot: 0,
        text: &[1, 2, 3, 4],
        most: 2,
        tokens: Vec::new(),
        kind: 0,
    }];
    assert!(drafter.draft(&mut drafts).is_err());
}
