//! Perplexity of tiny models whose files say something unusual, compared with a forward pass in f64 that follows
//! the published definitions alone.

use half::{bf16, f16};
use nq_evals::{EvalSpec, Protocol, evaluate};
use nq_formats::adapter::Adapter;
use nq_formats::serialize::write_tensors;
use nq_formats::{Checkpoint, Tensor};
use nq_kernels::rng::Philox;
use nq_load::load;
use nq_model::DType;
use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const HIDDEN: usize = 32;
const INNER: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 16;
const VOCAB: usize = 256;
const LAYERS: usize = 2;
const CTX: usize = 96;

/// A matrix `[rows, cols]` or a vector `[1, cols]`.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn random(rng: &mut Philox, rows: usize, cols: usize, mean: f64, std: f64) -> Self {
        // Exact in bf16, so that files hold the same.
        let value = |_| f64::from(bf16::from_f64(mean + std * f64::from(rng.normal())).to_f32());
        Matrix {
            rows,
            cols,
            values: (0..rows * cols).map(value).collect(),
        }
    }

    fn row(&self, r: usize) -> &[f64] {
        &self.values[r * self.cols..(r + 1) * self.cols]
    }

    /// `W x`.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let dot = |row: &[f64]| row.iter().zip(x).map(|(a, b)| a * b).sum();
        (0..self.rows).map(|r| dot(self.row(r))).collect()
    }

    fn f32(&self) -> Tensor {
        let shape = if self.rows == 1 {
            vec![self.cols]
        } else {
            vec![self.rows, self.cols]
        };
        Tensor::from_f32(shape, self.values.iter().map(|v| *v as f32).collect()).unwrap()
    }
}

type WeightMap = BTreeMap<String, Matrix>;

fn weights(seed: u64) -> WeightMap {
    let rng = &mut Philox::new(seed, 1);
    let mut all = WeightMap::new();
    let mut put = |name: String, rows, cols, mean, std| {
        all.insert(name, Matrix::random(rng, rows, cols, mean, std));
    };
    put("model.embed_tokens".into(), VOCAB, HIDDEN, 0.0, 1.0);
    for l in 0..LAYERS {
        let layer = |rest: &str| format!("model.layers.{l}.{rest}");
        put(layer("input_layernorm"), 1, HIDDEN, 1.0, 0.1);
        put(layer("post_attention_layernorm"), 1, HIDDEN, 1.0, 0.1);
        put(layer("self_attn.q_norm"), 1, HEAD, 1.0, 0.1);
        put(layer("self_attn.k_norm"), 1, HEAD, 1.0, 0.1);
        put(layer("self_attn.q_proj"), HEADS * HEAD, HIDDEN, 0.0, 0.2);
        put(layer("self_attn.k_proj"), KV_HEADS * HEAD, HIDDEN, 0.0, 0.2);
        put(layer("self_attn.v_proj"), KV_HEADS * HEAD, HIDDEN, 0.0, 0.2);
        put(layer("self_attn.o_proj"), HIDDEN, HEADS * HEAD, 0.0, 0.2);
        put(layer("mlp.gate_proj"), INNER, HIDDEN, 0.0, 0.2);
        put(layer("mlp.up_proj"), INNER, HIDDEN, 0.0, 0.2);
        put(layer("mlp.down_proj"), HIDDEN, INNER, 0.0, 0.2);
    }
    put("model.norm".into(), 1, HIDDEN, 1.0, 0.1);
    all
}

fn config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": true
    })
}

/// Frequencies and the factor on cosines and sines.
type Rope = (Vec<f64>, f64);

fn plain_rope() -> Rope {
    let frequency = |i: usize| 1e4f64.powf(-2.0 * i as f64 / HEAD as f64);
    ((0..HEAD / 2).map(frequency).collect(), 1.0)
}

/// YaRN by 4 from 32 positions, as transformers computes it.
fn yarn(truncate: bool, attention: f64) -> Rope {
    let (factor, length) = (4.0, 32.0);
    let dimension = |turns: f64| {
        HEAD as f64 * (length / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * 1e4f64.ln())
    };
    let (mut low, mut high) = (dimension(32.0), dimension(1.0));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(HEAD as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let plain = plain_rope().0;
    let stretched = plain.iter().enumerate().map(|(i, f)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        f / factor * ramp + f * (1.0 - ramp)
    });
    (stretched.collect(), attention)
}

fn tokens() -> Vec<u32> {
    let mut rng = Philox::new(3, 9);
    (0..CTX)
        .map(|_| (rng.normal().abs() * 60.0) as u32 % VOCAB as u32)
        .collect()
}

fn norm(x: &[f64], gains: &Matrix) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(1e-6f32)).sqrt();
    x.iter()
        .zip(gains.row(0))
        .map(|(v, g)| v * scale * g)
        .collect()
}

/// The perplexity of [`tokens`], in f64.
fn reference(w: &WeightMap, (frequencies, attention): &Rope, head: &Matrix) -> f64 {
    let ids = tokens();
    let mut stream: Vec<Vec<f64>> = ids
        .iter()
        .map(|&t| w["model.embed_tokens"].row(t as usize).to_vec())
        .collect();
    let add = |x: &mut Vec<f64>, y: Vec<f64>| x.iter_mut().zip(y).for_each(|(a, b)| *a += b);
    let rotate = |head: &[f64], position: usize| {
        let half = HEAD / 2;
        let mut out = head.to_vec();
        for i in 0..half {
            // Angles are f32, as in the implementations that Qwen3 was trained with.
            let angle = f64::from(position as f32 * frequencies[i] as f32);
            let (sin, cos) = (angle.sin() * attention, angle.cos() * attention);
            out[i] = head[i] * cos - head[half + i] * sin;
            out[half + i] = head[half + i] * cos + head[i] * sin;
        }
        out
    };
    for l in 0..LAYERS {
        let p = |rest: &str| &w[&format!("model.layers.{l}.{rest}")];
        let heads = |y: Vec<f64>, gains: Option<&Matrix>, position: usize| -> Vec<Vec<f64>> {
            let one = |h: &[f64]| match gains {
                Some(gains) => rotate(&norm(h, gains), position),
                None => h.to_vec(),
            };
            y.chunks(HEAD).map(one).collect()
        };
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        for (t, x) in stream.iter().enumerate() {
            let n = norm(x, p("input_layernorm"));
            q.push(heads(
                p("self_attn.q_proj").times(&n),
                Some(p("self_attn.q_norm")),
                t,
            ));
            k.push(heads(
                p("self_attn.k_proj").times(&n),
                Some(p("self_attn.k_norm")),
                t,
            ));
            v.push(heads(p("self_attn.v_proj").times(&n), None, t));
        }
        for (t, x) in stream.iter_mut().enumerate() {
            let mut mixed = Vec::new();
            for (h, query) in q[t].iter().enumerate() {
                let group = h / (HEADS / KV_HEADS);
                let score = |s: usize| {
                    let dot: f64 = query.iter().zip(&k[s][group]).map(|(a, b)| a * b).sum();
                    dot / (HEAD as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=t).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                let sum: f64 = powers.iter().sum();
                mixed.extend((0..HEAD).map(|i| {
                    powers
                        .iter()
                        .enumerate()
                        .map(|(s, p)| p / sum * v[s][group][i])
                        .sum::<f64>()
                }));
            }
            add(x, p("self_attn.o_proj").times(&mixed));
            let n = norm(x, p("post_attention_layernorm"));
            let (gate, up) = (p("mlp.gate_proj").times(&n), p("mlp.up_proj").times(&n));
            let inner: Vec<f64> = gate
                .iter()
                .zip(&up)
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            add(x, p("mlp.down_proj").times(&inner));
        }
    }
    let mut nll = 0.0;
    for (t, next) in ids.iter().skip(1).enumerate() {
        let logits = head.times(&norm(&stream[t], &w["model.norm"]));
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - most).exp()).sum();
        nll += most + sum.ln() - logits[*next as usize];
    }
    (nll / (CTX - 1) as f64).exp()
}

/// Writes a folder.
fn write(dir: &Path, config: &Value, tensors: Vec<(String, Tensor)>) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    write_tensors(&dir.join("model.safetensors"), &tensors, &BTreeMap::new()).unwrap();
}

fn dense(w: &WeightMap) -> Vec<(String, Tensor)> {
    w.iter()
        .map(|(name, m)| (format!("{name}.weight"), m.f32()))
        .collect()
}

fn measured(checkpoint: &Checkpoint) -> f64 {
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        threads: Some(1),
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    let engine = load(checkpoint.config(), checkpoint.store(), &options, &()).unwrap();
    let spec = EvalSpec {
        kv: KvType::F32,
        ..EvalSpec::new(Protocol::Hf, CTX, "random")
    };
    evaluate(engine.as_ref(), &tokens(), &spec, &())
        .unwrap()
        .report
        .ppl
}

#[track_caller]
fn same(checkpoint: &Checkpoint, expected: f64) {
    let found = measured(checkpoint);
    let off = (found / expected - 1.0).abs();
    assert!(off < 1e-6, "{found} instead of {expected}, off by {off:e}");
}

#[track_caller]
fn check(config: &Value, tensors: Vec<(String, Tensor)>, expected: f64) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config, tensors);
    same(&Checkpoint::open(dir.path()).unwrap(), expected);
}

#[test]
fn heads_of_tied_models() {
    let w = weights(1);
    let embedding = &w["model.embed_tokens"];
    check(
        &config(),
        dense(&w),
        reference(&w, &plain_rope(), embedding),
    );
    // A head that was trained apart.
    let mut own = w.clone();
    let head = Matrix::random(&mut Philox::new(7, 7), VOCAB, HIDDEN, 0.0, 0.2);
    own.insert("lm_head".into(), head.clone());
    check(&config(), dense(&own), reference(&w, &plain_rope(), &head));
    // The one weight under the head's name.
    let mut lone = dense(&w);
    let place = lone
        .iter()
        .position(|(name, _)| name.contains("embed"))
        .unwrap();
    lone[place].0 = "lm_head.weight".into();
    check(&config(), lone, reference(&w, &plain_rope(), embedding));
}

#[test]
fn positions() {
    let w = weights(2);
    let head = &w["model.embed_tokens"];
    let mscale = |m: f64| 0.1 * m * 4f64.ln() + 1.0;
    let stretch = |more: Value| {
        let mut all =
            json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32 });
        let keys = more.as_object().unwrap().clone();
        all.as_object_mut().unwrap().extend(keys);
        all
    };
    let with = |key: &str, value: Value| {
        let mut config = config();
        config[key] = value;
        config
    };
    for (config, rope) in [
        (
            with("rope_scaling", stretch(json!({}))),
            yarn(true, mscale(1.0)),
        ),
        (
            with("rope_scaling", stretch(json!({ "beta_fast": 0 }))),
            yarn(true, mscale(1.0)),
        ),
        (
            with("rope_scaling", stretch(json!({ "truncate": false }))),
            yarn(false, mscale(1.0)),
        ),
        (
            with(
                "rope_scaling",
                stretch(json!({ "mscale": 0.707, "mscale_all_dim": 1.0 })),
            ),
            yarn(true, mscale(0.707) / mscale(1.0)),
        ),
        (
            with("rope_scaling", stretch(json!({ "attn_factor": 0.5 }))),
            yarn(true, 0.5 * mscale(1.0)),
        ),
        (
            with("rope_scaling", stretch(json!({ "attention_factor": 1.5 }))),
            yarn(true, 1.5),
        ),
        (
            with("rope_parameters", stretch(json!({ "rope_theta": 1e4 }))),
            yarn(true, mscale(1.0)),
        ),
        (
            with("rope_parameters", json!({ "rope_type": "default" })),
            plain_rope(),
        ),
    ] {
        check(&config, dense(&w), reference(&w, &rope, head));
    }
    // rope_scaling comes first.
    let mut both = with("rope_scaling", stretch(json!({})));
    both["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 1e4 });
    check(
        &both,
        dense(&w),
        reference(&w, &yarn(true, mscale(1.0)), head),
    );
    // Then there is no base to take.
    both.as_object_mut().unwrap().remove("rope_theta");
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &both, dense(&w));
    let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
    assert!(error.contains("rope_theta"), "{error}");
}

/// Codes and scales of 4 bits in groups of 16, symmetric, of every Linear, and the values that they stand for.
struct RoundedLinear {
    codes: Vec<u8>,
    scales: Vec<f16>,
    matrix: Matrix,
}

const GROUP: usize = 16;

fn rounded(m: &Matrix) -> RoundedLinear {
    let mut out = RoundedLinear {
        codes: Vec::new(),
        scales: Vec::new(),
        matrix: m.clone(),
    };
    for (group, values) in m
        .values
        .chunks(GROUP)
        .zip(out.matrix.values.chunks_mut(GROUP))
    {
        let most = group.iter().fold(0f64, |a, v| a.max(v.abs()));
        let scale = f16::from_f64(most / 7.0);
        out.scales.push(scale);
        for (v, value) in group.iter().zip(values) {
            let code = (v / scale.to_f64()).round().clamp(-8.0, 7.0);
            out.codes.push((code + 8.0) as u8);
            *value = code * scale.to_f64();
        }
    }
    out
}

fn is_linear(name: &str) -> bool {
    name.ends_with("_proj")
}

fn words(codes: impl Iterator<Item = u8>) -> Vec<u8> {
    let codes: Vec<u8> = codes.collect();
    codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect()
}

#[test]
fn zero_points_of_the_other_version() {
    let mut w = weights(4);
    let mut tensors = Vec::new();
    for (name, m) in &mut w {
        if !is_linear(name) {
            tensors.push((format!("{name}.weight"), m.f32()));
            continue;
        }
        let r = rounded(m);
        let (rows, cols, groups) = (m.rows, m.cols, m.cols / GROUP);
        // `[in / 8, out]` words, each of eight inputs.
        let mut packed = Vec::new();
        for word in 0..cols / 8 {
            for row in 0..rows {
                let first = row * cols + 8 * word;
                packed.extend(words(r.codes[first..first + 8].iter().copied()));
            }
        }
        let scales = (0..groups * rows).map(|i| r.scales[i % rows * groups + i / rows]);
        let scales: Vec<u8> = scales.flat_map(f16::to_le_bytes).collect();
        let mut part = |suffix: &str, dtype, shape, bytes: Vec<u8>| {
            let tensor = Tensor::new(dtype, shape, bytes.into()).unwrap();
            tensors.push((format!("{name}.{suffix}"), tensor));
        };
        part("qweight", DType::I32, vec![cols / 8, rows], packed);
        // 8 as it is: what version 2 stores.
        part(
            "qzeros",
            DType::I32,
            vec![groups, rows / 8],
            vec![0x88; groups * rows / 2],
        );
        part("scales", DType::F16, vec![groups, rows], scales);
        *m = r.matrix;
    }
    let mut config = config();
    config["quantization_config"] = json!({ "quant_method": "gptq", "bits": 4, "group_size": GROUP,
        "desc_act": false, "sym": true, "checkpoint_format": "gptq" });
    let expected = reference(&w, &plain_rope(), &w["model.embed_tokens"]);
    check(&config, tensors, expected);
}

/// `W H` with the Hadamard matrix of Sylvester's construction over the square root of its size, from its
/// definition: the sign of an element is the parity of the bits that its row and column share.
fn hadamard(m: &Matrix) -> Matrix {
    let sign = |i: usize, j: usize| {
        if (i & j).count_ones().is_multiple_of(2) {
            1.0
        } else {
            -1.0
        }
    };
    let scale = 1.0 / (m.cols as f64).sqrt();
    let product = |row: &[f64], j: usize| -> f64 {
        row.iter()
            .enumerate()
            .map(|(i, v)| v * sign(i, j) * scale)
            .sum()
    };
    let values = (0..m.rows).flat_map(|r| (0..m.cols).map(move |j| product(m.row(r), j)));
    Matrix {
        values: values.collect(),
        ..m.clone()
    }
}

fn transform(kind: &str) -> Value {
    json!({ "config_groups": { "R4": { "type": kind, "randomize": false, "apply": [
        { "targets": ["re:.*down_proj$"], "location": "input", "inverse": false, "ignore": [] },
        { "targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": true, "ignore": [] }] } } })
}

#[test]
fn rotated_inputs() {
    let mut w = weights(5);
    let mut tensors = Vec::new();
    for (name, m) in &mut w {
        if !is_linear(name) {
            tensors.push((format!("{name}.weight"), m.f32()));
            continue;
        }
        let r = rounded(m);
        let mut part = |suffix: &str, dtype, width, bytes: Vec<u8>| {
            let tensor = Tensor::new(dtype, vec![m.rows, width], bytes.into()).unwrap();
            tensors.push((format!("{name}.{suffix}"), tensor));
        };
        part(
            "weight_packed",
            DType::I32,
            m.cols / 8,
            words(r.codes.iter().copied()),
        );
        let scales = r.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        part("weight_scale", DType::F16, m.cols / GROUP, scales);
        *m = if name.ends_with("down_proj") {
            hadamard(&r.matrix)
        } else {
            r.matrix
        };
    }
    let mut config = config();
    let scheme = json!({ "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": GROUP });
    config["quantization_config"] = json!({ "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": scheme } },
        "transform_config": transform("hadamard") });
    let expected = reference(&w, &plain_rope(), &w["model.embed_tokens"]);
    check(&config, tensors.clone(), expected);
    config["quantization_config"]["transform_config"] = transform("random-hadamard");
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &config, tensors);
    let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
    assert!(
        error.contains("transform_config of type random-hadamard"),
        "{error}"
    );
}

/// Writes PEFT's folder with `A` and `B` for the up projections, and returns them.
fn adapter(dir: &Path, seed: u64, dora: bool) -> Vec<(String, Matrix, Matrix, Matrix)> {
    let mut rng = Philox::new(seed, 2);
    let (mut parts, mut tensors) = (Vec::new(), Vec::new());
    for l in 0..LAYERS {
        let name = format!("model.layers.{l}.mlp.up_proj");
        let a = Matrix::random(&mut rng, 4, HIDDEN, 0.0, 0.3);
        let b = Matrix::random(&mut rng, INNER, 4, 0.0, 0.3);
        let magnitude = Matrix::random(&mut rng, 1, INNER, 1.0, 0.1);
        let full = |part: &str| format!("base_model.model.{name}.{part}");
        tensors.push((full("lora_A.weight"), a.f32()));
        tensors.push((full("lora_B.weight"), b.f32()));
        if dora {
            tensors.push((full("lora_magnitude_vector"), magnitude.f32()));
        }
        parts.push((name, a, b, magnitude));
    }
    let config =
        json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": dora, "bias": "none" });
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    write_tensors(
        &dir.join("adapter_model.safetensors"),
        &tensors,
        &BTreeMap::new(),
    )
    .unwrap();
    parts
}

/// Adds `scale B A`, and brings the rows to the magnitudes if they count.
fn merge(w: &mut WeightMap, parts: &[(String, Matrix, Matrix, Matrix)], scale: f64, dora: bool) {
    for (name, a, b, magnitude) in parts {
        let m = w.get_mut(name).unwrap();
        for r in 0..m.rows {
            for c in 0..m.cols {
                let sum: f64 = (0..a.rows).map(|k| b.row(r)[k] * a.row(k)[c]).sum();
                m.values[r * m.cols + c] += scale * sum;
            }
            let length = m.row(r).iter().map(|v| v * v).sum::<f64>().sqrt();
            if dora {
                let cols = m.cols;
                let row = &mut m.values[r * cols..(r + 1) * cols];
                row.iter_mut()
                    .for_each(|v| *v *= magnitude.row(0)[r] / length);
            }
        }
    }
}

#[test]
fn adapters_are_merged() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("model")).unwrap();
    let w = weights(6);
    write(&at("model"), &config(), dense(&w));
    let open = || Checkpoint::open(&at("model")).unwrap();
    let (one, two) = (adapter(&at("one"), 1, false), adapter(&at("two"), 2, false));
    let three = adapter(&at("three"), 3, true);
    let head = &w["model.embed_tokens"];

    let mut merged = w.clone();
    merge(&mut merged, &one, 2.0, false);
    merge(&mut merged, &two, 2.0 * 0.5, false);
    let both = vec![
        Adapter::open(&at("one"), 1.0).unwrap(),
        Adapter::open(&at("two"), 0.5).unwrap(),
    ];
    same(
        &open().with_adapters(both).unwrap(),
        reference(&merged, &plain_rope(), head),
    );

    let mut merged = w.clone();
    merge(&mut merged, &three, 2.0, true);
    let dora = Adapter::open(&at("three"), 1.0).unwrap();
    same(
        &open().with_adapters(vec![dora]).unwrap(),
        reference(&merged, &plain_rope(), head),
    );

    let fails = |error: nq_formats::Error, parts: &[&str]| {
        let text = error.to_string();
        assert!(parts.iter().all(|p| text.contains(p)), "{text}");
    };
    let pair = vec![
        Adapter::open(&at("one"), 1.0).unwrap(),
        Adapter::open(&at("three"), 1.0).unwrap(),
    ];
    fails(
        open().with_adapters(pair).err().unwrap(),
        &["three", "DoRA adapter beside another"],
    );
    fails(
        Adapter::open(&at("three"), 0.5).err().unwrap(),
        &["DoRA adapter with a weight of 0.5"],
    );
    fails(
        Checkpoint::open(&at("one")).err().unwrap(),
        &["an adapter without its model", "--adapter"],
    );
}
