//! Every tensor and every key that a checkpoint's files hold is used, refused by name or left over for a
//! stated reason.

use crate::common::{self, Rng, names, random_dense, tiny_config};
use nq_formats::left_over::{self, LeftOver};
use nq_formats::serialize::write_tensors;
use nq_formats::{Checkpoint, GenerationDefaults, Result, Tensor, keys};
use nq_model::names::{EMBEDDING, HEAD, parameters};
use nq_model::{DType, Dims};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A folder of a tiny model, with weights from a fixed generator.
struct AccountFolder {
    dir: tempfile::TempDir,
    config: Value,
    tensors: Vec<(String, Tensor)>,
}

impl AccountFolder {
    fn new() -> Self {
        let config = tiny_config("");
        let shape = nq_formats::config::parse(Path::new("c"), config.as_bytes()).unwrap();
        let mut rng = Rng(5);
        let tensor = |(name, shape): (String, nq_model::Shape)| {
            (
                format!("{name}.weight"),
                random_dense(&mut rng, &shape.dims()),
            )
        };
        AccountFolder {
            dir: tempfile::tempdir().unwrap(),
            config: serde_json::from_str(&config).unwrap(),
            tensors: parameters(&shape).into_iter().map(tensor).collect(),
        }
    }

    fn with(mut self, name: &str, tensor: Tensor) -> Self {
        self.tensors.push((name.into(), tensor));
        self
    }

    fn key(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn rename(mut self, from: &str, to: &str) -> Self {
        let found = self.tensors.iter_mut().find(|(name, _)| name == from);
        found.expect("a tensor").0 = to.into();
        self
    }

    fn open(&self) -> Result<Checkpoint> {
        let path = |name: &str| self.dir.path().join(name);
        fs::write(path("config.json"), self.config.to_string()).unwrap();
        write_tensors(
            &path("model.safetensors"),
            &self.tensors,
            &Default::default(),
        )
        .unwrap();
        Checkpoint::open(self.dir.path())
    }

    fn left_over(&self) -> Vec<String> {
        let left = self.open().unwrap().left_over().to_vec();
        left.into_iter()
            .map(|l| format!("{}: {}", l.name, l.why))
            .collect()
    }
}

fn filled(shape: &[usize], value: f32) -> Tensor {
    let n = shape.iter().product();
    Tensor::from_f32(shape.to_vec(), vec![value; n]).unwrap()
}

#[test]
fn tensors_without_which_the_numbers_are_wrong_are_refused() {
    let layer = "model.layers.0.";
    for (name, why) in [
        ("self_attn.q_proj.bias", "no bias, or one of zeros, found 5"),
        ("self_attn.o_proj.bias", "no bias, or one of zeros, found 5"),
        ("mlp.down_proj.bias", "no bias, or one of zeros, found 5"),
        (
            "self_attn.q_proj.lora_A.default.weight",
            "an adapter that is not merged",
        ),
        (
            "self_attn.q_proj.lora_magnitude_vector.default.weight",
            "an adapter that is not merged",
        ),
        ("self_attn.q_proj.weight_scale", "no such parameter"),
        ("self_attn.q_proj.weight_scale_inv", "no such parameter"),
        ("self_attn.q_proj.input_scale", "no such parameter"),
        ("self_attn.q_proj.qweight", "no such parameter"),
        ("self_attn.q_proj.codes", "no such parameter"),
        ("self_attn.sinks", "no such parameter"),
        ("mlp.gate.weight", "no such parameter"),
    ] {
        let name = format!("{layer}{name}");
        names(
            AccountFolder::new().with(&name, filled(&[8], 5.0)).open(),
            &[&name, why],
        );
    }
    for name in [
        "model.norm.bias",
        "base_model.model.x.lora_B.weight",
        "score.weight",
    ] {
        names(
            AccountFolder::new().with(name, filled(&[8], 5.0)).open(),
            &[name],
        );
    }
}

#[test]
fn tensors_that_change_nothing_are_listed() {
    assert!(AccountFolder::new().left_over().is_empty());
    let folder = AccountFolder::new()
        .with("model.layers.0.self_attn.q_proj.bias", filled(&[8], 0.0))
        .with(
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            filled(&[2], 1.0),
        )
        .with("v_head.summary.weight", filled(&[8], 1.0))
        .with("mtp.layers.0.input_layernorm.weight", filled(&[8], 1.0));
    let left = folder.left_over();
    assert_eq!(left.len(), 4, "{left:?}");
    for part in [
        "q_proj.bias: a bias of zeros",
        "v_head.summary.weight: a value head",
        "inv_freq: rotary",
    ] {
        assert!(left.iter().any(|l| l.contains(part)), "{part}: {left:?}");
    }
}

#[test]
fn lines_name_three_of_many() {
    let left = |name: &str, why: &str| LeftOver {
        name: name.into(),
        why: why.into(),
    };
    let all = [
        left("a", "x"),
        left("b", "x"),
        left("c", "y"),
        left("d", "x"),
        left("e", "x"),
    ];
    assert_eq!(left_over::lines(&all), ["a, b, d and 1 more: x", "c: y"]);
}

#[test]
fn more_layers_than_tensors_are_refused() {
    let folder = AccountFolder::new().key("num_hidden_layers", json!(268_435_456));
    names(folder.open(), &["num_hidden_layers", "268435456"]);
}

#[test]
fn a_head_of_its_own_wins_over_a_tie() {
    let tied = |folder: &AccountFolder| folder.open().unwrap().config().tie_word_embeddings;
    let head = format!("{HEAD}.weight");
    let own = AccountFolder::new().with(&head, random_dense(&mut Rng(9), &[16, 8]));
    assert!(!tied(&own));
    assert!(own.left_over()[0].contains("differs from the embedding"));
    let copy = AccountFolder::new().tensors.remove(0).1;
    let copied = AccountFolder::new().with(&head, copy);
    assert!(tied(&copied));
    assert!(copied.left_over()[0].contains("a copy of the embedding"));
}

#[test]
fn a_lone_head_serves_as_embedding() {
    let embedding = format!("{EMBEDDING}.weight");
    let lone = AccountFolder::new().rename(&embedding, "lm_head.weight");
    let whole = AccountFolder::new().open().unwrap();
    let opened = lone.open().unwrap();
    assert!(opened.config().tie_word_embeddings);
    let read = |c: &Checkpoint| c.store().matrix(EMBEDDING, Dims::new(16, 8)).unwrap();
    common::assert_same(&read(&opened), &read(&whole));
    assert!(opened.left_over().is_empty());
    // In an untied model, the embedding is missing.
    let untied = lone
        .key("tie_word_embeddings", json!(false))
        .open()
        .unwrap();
    names(
        untied.store().matrix(EMBEDDING, Dims::new(16, 8)),
        &[&embedding, "no such tensor"],
    );
}

#[test]
fn the_index_may_name_the_other_of_two_tied_weights() {
    let folder = AccountFolder::new();
    folder.open().unwrap();
    let path = |name: &str| folder.dir.path().join(name);
    fs::rename(path("model.safetensors"), path("1.safetensors")).unwrap();
    let index = |more: &str| {
        let all = folder.tensors.iter().map(|(n, _)| n.as_str()).chain([more]);
        let map: serde_json::Map<_, _> = all.map(|n| (n.into(), "1.safetensors".into())).collect();
        let index = json!({ "metadata": {}, "weight_map": map });
        fs::write(path("model.safetensors.index.json"), index.to_string()).unwrap();
        Checkpoint::open(folder.dir.path())
    };
    index("lm_head.weight").unwrap();
    names(
        index("model.layers.0.x.weight"),
        &["model.layers.0.x.weight", "no such tensor"],
    );
}

#[test]
fn keys_that_nobody_knows_are_listed() {
    let folder = AccountFolder::new()
        .key("logit_scale", json!(0.5))
        .key("unsloth_version", json!("2025.1"))
        .key("off", json!(false));
    assert_eq!(
        folder.left_over(),
        ["config.json: logit_scale: a key that nq does not know"]
    );
    let folder = AccountFolder::new();
    fs::write(
        folder.dir.path().join("generation_config.json"),
        r#"{"top_k": -1, "no_repeat_ngram_size": 3, "pad_token_id": 0}"#,
    )
    .unwrap();
    let left = folder.left_over();
    assert_eq!(left.len(), 1);
    assert!(
        left[0].starts_with("generation_config.json: no_repeat_ngram_size"),
        "{left:?}"
    );
    assert_eq!(folder.open().unwrap().generation().top_k, Some(0));
}

#[test]
fn settings_that_change_numbers_are_refused() {
    for (key, value, part) in [
        (
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "sliding_attention",
        ),
        (
            "partial_rotary_factor",
            json!(0.5),
            "partial_rotary_factor 0.5",
        ),
        ("attention_bias", json!(true), "attention_bias true"),
    ] {
        names(
            AccountFolder::new().key(key, value).open(),
            &["config.json", part],
        );
    }
    let marked = AccountFolder::new();
    marked.open().unwrap();
    let path = marked.dir.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("\u{feff}{text}")).unwrap();
    names(
        Checkpoint::open(marked.dir.path()),
        &["config.json", "byte order mark"],
    );
}

#[test]
fn types_may_be_said_in_other_words() {
    for (value, dtype) in [("torch.float16", Some(DType::F16)), ("float8_e4m3fn", None)] {
        let folder = AccountFolder::new().key("torch_dtype", json!(value));
        assert_eq!(folder.open().unwrap().config().dtype, dtype);
    }
}

/// The tables of keys are those that the readers ask for: each is read, and no other.
#[test]
fn the_tables_are_what_readers_ask_for() {
    let config: Value = serde_json::from_str(
        r#"{
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "vocab_size": 16, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "eos_token_id": 3, "torch_dtype": "bfloat16",
        "attention_bias": false, "qkv_bias": false, "use_qk_norm": true, "use_sliding_window": false,
        "layer_types": ["full_attention"], "hidden_act": "silu", "rope_theta": 1e4,
        "partial_rotary_factor": 1.0, "original_max_position_embeddings": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 0,
        "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
        "norm_topk_prob": true,
        "rope_scaling": { "rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "factor": 2.0,
            "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1, "truncate": true,
            "attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 1.0, "attn_factor": 1.0 }
    }"#,
    )
    .unwrap();
    let read =
        |config: &Value| nq_formats::config::read(Path::new("c"), config.to_string().as_bytes());
    let wrong = || json!([{}]);
    let (_, left) = read(&config).unwrap();
    assert!(left.is_empty(), "{left:?}");
    let written = keys::table();
    let listed = |file: &str| -> Vec<String> {
        let rows = written
            .lines()
            .filter(|l| l.starts_with(&format!("| {file} |")));
        let cell = |row: &str| row.split('|').nth(2).unwrap().to_owned();
        let names = rows.map(cell).collect::<Vec<_>>().join(",");
        names
            .split(',')
            .map(|n| n.trim().trim_matches('`').to_owned())
            .collect()
    };
    let of_flash_next = [
        "hc_",
        "indexer_",
        "ple_",
        "ngram_",
        "heads_per_ngram",
        "make_ngram_",
        "split_ngram_",
        "seed",
    ];
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("m");
    nq_formats::synth::write(&folder, &nq_testkit::models::tiny("qwen4exp"), 4, &()).unwrap();
    let flash_next = std::fs::read(folder.join("config.json")).unwrap();
    let flash_next: Value = serde_json::from_slice(&flash_next).unwrap();
    for key in listed("config.json") {
        // Read with the weights.
        if ["quantization_config", "compression_config"].contains(&key.as_str()) {
            continue;
        }
        let mut config = config.clone();
        let of_hybrids = ["linear_", "full_attention_interval", "mtp_"];
        if of_hybrids.iter().any(|start| key.starts_with(start)) {
            let hybrid = json!({
                "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 8,
                "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 16, "max_position_embeddings": 32,
                "rope_theta": 1e4, "full_attention_interval": 1, "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 1,
                "linear_num_value_heads": 1, "linear_value_head_order": "tiled",
                "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
            });
            let (_, left) = read(&hybrid).unwrap();
            assert!(left.is_empty(), "{left:?}");
            config = hybrid;
        }
        if of_flash_next.iter().any(|start| key.starts_with(start)) {
            config = flash_next.clone();
        }
        if key == "torch_dtype" {
            config.as_object_mut().unwrap().remove("dtype");
        }
        config[&key] = wrong();
        names(read(&config), &[&key]);
    }
    for key in listed("`rope_parameters`, `rope_scaling`") {
        let mut config = config.clone();
        if key.ends_with("_freq_factor") {
            let bounds = serde_json::json!({ "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16 });
            config["rope_scaling"] = bounds;
        }
        config["rope_scaling"][&key] = wrong();
        names(read(&config), &[&key]);
    }
    for key in listed("generation_config.json") {
        let json = json!({ &key: wrong() }).to_string();
        names(
            GenerationDefaults::read(Path::new("g"), json.as_bytes()),
            &[&key],
        );
    }
}

#[test]
fn the_documentation_has_the_table() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/formats.md");
    let Ok(docs) = fs::read_to_string(docs) else {
        return; // the published crate has no documents
    };
    let table = keys::table();
    assert!(
        docs.contains(&table),
        "docs/formats.md: expected this table:\n{table}"
    );
}
