//! EAGLE-3 heads as published, and their computation in f64.

use nq_formats::eagle::EagleHead;
use nq_formats::{Weight, WeightStore};
use nq_kernels::rng::Philox;
use nq_load::StreamDrafts;
use nq_model::ModelConfig;
use nq_runtime::generate::Sequence;
use nq_runtime::interface::Draft;
use nq_runtime::{
    Drafter, Engine, KvType, LoadOptions, Observer, Sampler, SamplingParams, Session, Speculation,
};
use nq_testkit::sessions::{answer, chunk, limits, session_spec};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Tokens that a head drafts.
pub(crate) const DRAFTED: usize = 40;
const INNER: usize = 72;

/// The weights of a head, by their published names.
pub(crate) struct PublishedHead {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    pub(crate) d2t: Vec<i64>,
    /// Query heads, key heads and their width.
    heads: (usize, usize, usize),
}

/// A random head for a model of shape `c`, whose layer is called `layer`.
pub(crate) fn published(
    c: &ModelConfig,
    layer: &str,
    heads: (usize, usize, usize),
    seed: u64,
) -> PublishedHead {
    let (h, (query_heads, kv_heads, d)) = (c.hidden_size, heads);
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
    for (part, rows) in [
        ("q", query_heads * d),
        ("k", kv_heads * d),
        ("v", kv_heads * d),
    ] {
        add(
            format!("{layer}.self_attn.{part}_proj.weight"),
            vec![rows, 2 * h],
        );
    }
    add(
        format!("{layer}.self_attn.o_proj.weight"),
        vec![h, query_heads * d],
    );
    for part in ["gate", "up"] {
        add(format!("{layer}.mlp.{part}_proj.weight"), vec![INNER, h]);
    }
    add(format!("{layer}.mlp.down_proj.weight"), vec![h, INNER]);
    add("norm.weight".into(), vec![h]);
    add("lm_head.weight".into(), vec![DRAFTED, h]);
    PublishedHead {
        config: json!({
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": h,
            "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads, "head_dim": d, "vocab_size": c.vocab_size,
            "draft_vocab_size": DRAFTED, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "tie_word_embeddings": false,
        }),
        tensors,
        // Token 2 id + 3 for each id.
        d2t: (0..DRAFTED as i64).map(|id| id + 3).collect(),
        heads,
    }
}

impl PublishedHead {
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

    /// Loads it for a model.
    pub(crate) fn load(
        &self,
        (config, store): (&ModelConfig, &dyn WeightStore),
        options: &LoadOptions,
    ) -> nq_runtime::Result<StreamDrafts> {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path());
        let opened = EagleHead::open(folder.path())?;
        StreamDrafts::eagle(&opened, config, store, options)
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

    /// How many of the tokens `found` are drafted by the published computation in f64, up to the first that is not:
    /// there its logit is at most `gap` below the best one. `rows` are tokens with the target's streams after the
    /// head's three layers, of the token before each.
    pub(crate) fn agrees(
        &self,
        embedding: &Weight,
        rows: &[(u32, Vec<f64>)],
        found: &[u32],
        gap: f64,
    ) -> usize {
        let (heads, kv_heads, d) = self.heads;
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
        for (token, stream) in rows {
            x = layer(*token, &self.product("fc", stream));
        }
        for (i, &token) in found.iter().enumerate() {
            let logits = self.product("lm_head", &self.norm("norm", &x));
            let best = (0..DRAFTED)
                .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
                .unwrap();
            let said = |id: usize| (id as i64 + self.d2t[id]) as u32;
            if token != said(best) {
                let id = (0..DRAFTED).find(|&id| said(id) == token);
                let less = logits[best] - logits[id.expect("a token of the head")];
                assert!(less <= gap, "draft {i}: {token} is {less} below the best");
                return i;
            }
            x = layer(token, &x);
        }
        found.len()
    }
}

/// The target's residual streams after the given numbers of layers, side by side.
pub(crate) fn streams(
    engine: &dyn Engine,
    kv: KvType,
    text: &[u32],
    after: [usize; 3],
) -> Vec<Vec<f64>> {
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
    let mut session = engine
        .session(session_spec(1, text.len(), kv, text.len()))
        .unwrap();
    session
        .forward(
            &[chunk(0, text, nq_runtime::LogitsWanted::Last)],
            Some(&mut seen),
        )
        .unwrap();
    seen.2
}

/// What a drafter for `session` drafts after `text`.
pub(crate) fn ask(
    drafter: &mut dyn Drafter,
    session: &mut dyn Session,
    slot: usize,
    text: &[u32],
) -> Vec<u32> {
    if let Some(tapped) = session.streams().and_then(|s| s.take(slot)) {
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

/// Two answers in a row of at most so many tokens each, of which the second continues what the cache holds; with drafts or
/// without. Checks that there were `drafted` drafts or more for each, or none without them.
pub(crate) fn two_answers(
    session: &mut dyn Session,
    speculation: Option<Speculation>,
    prompt: &[u32],
    temperature: f32,
    lengths: [usize; 2],
    drafted: usize,
) -> Vec<u32> {
    let params = SamplingParams {
        temperature,
        ..SamplingParams::greedy()
    };
    let drafts = speculation.is_some();
    let mut sequence = Sequence::new(session, 0).with_drafts(speculation);
    let mut all = Vec::new();
    for max_tokens in lengths {
        let text = [prompt, &all].concat();
        let mut sampler = Sampler::new(params, 3).unwrap();
        let made = answer(
            session,
            &mut sequence,
            &text,
            &mut sampler,
            &limits(max_tokens),
        )
        .unwrap();
        match drafts {
            true => assert!(made.stats.drafted >= drafted, "{:?}", made.stats),
            false => assert_eq!(made.stats.drafted, 0),
        }
        all.extend(made.tokens);
    }
    all
}
