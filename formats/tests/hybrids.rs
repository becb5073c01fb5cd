//! Models with recurrences as they are published: within a model that sees images, with layers that predict
//! several tokens at once, with matrices of several Linears; and files that say what cannot be.

use crate::common::names;
use nq_formats::files::Files;
use nq_formats::serialize::write_tensors;
use nq_formats::shards::Shards;
use nq_formats::{Checkpoint, Tensor, synth};
use nq_model::names::parameters;
use nq_model::{DType, Dims, ModelConfig, Shape};
use nq_testkit::models::{rope, tiny};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn config(gguf: &str) -> ModelConfig {
    let tiny = tiny(gguf);
    ModelConfig {
        experts: None,
        num_hidden_layers: 4,
        rope: rope(1e7, tiny.delta.map(|_| 4)),
        tie_word_embeddings: true,
        dtype: Some(DType::BF16),
        ..tiny
    }
}

/// A folder of a random model and its config.json.
pub(crate) fn folder(gguf: &str) -> (tempfile::TempDir, Value) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("m");
    synth::write(&root, &config(gguf), 4, &()).unwrap();
    let json = fs::read(root.join("config.json")).unwrap();
    (dir, serde_json::from_slice(&json).unwrap())
}

pub(crate) fn tensors(root: &Path) -> Vec<(String, Tensor)> {
    let shards = Shards::open(&Files::Folder(root.into())).unwrap();
    let all = shards
        .names()
        .map(|n| (n.to_owned(), shards.get(n).unwrap()));
    all.collect()
}

pub(crate) fn write(root: &Path, config: &Value, tensors: &[(String, Tensor)]) {
    fs::create_dir_all(root).unwrap();
    fs::write(root.join("config.json"), config.to_string()).unwrap();
    write_tensors(
        &root.join("model.safetensors"),
        tensors,
        &Default::default(),
    )
    .unwrap();
}

#[track_caller]
fn same(a: &Checkpoint, b: &Checkpoint) {
    for (name, shape) in parameters(a.config()) {
        match shape {
            Shape::Vector(n) => {
                let [x, y] = [a, b].map(|c| c.store().vector(&name, n).unwrap());
                assert_eq!(x.to_f32().unwrap(), y.to_f32().unwrap(), "{name}");
            }
            Shape::Matrix(rows, cols) => {
                let [x, y] =
                    [a, b].map(|c| c.store().matrix(&name, Dims::new(rows, cols)).unwrap());
                let row = |w: &nq_formats::Weight, r| {
                    let mut values = vec![0.0; cols];
                    w.dequantize_row(r, &mut values).unwrap();
                    values
                };
                for r in 0..rows {
                    assert_eq!(row(&x, r), row(&y, r), "{name}, row {r}");
                }
            }
        }
    }
}

/// The text model of a published folder, whose shape stands in `text_config`, is the same as one of its own.
#[test]
fn a_text_model_is_found_in_one_that_sees_images() {
    let (dir, plain) = folder("qwen35");
    let plain_root = dir.path().join("m");
    let published = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 290,
        "tie_word_embeddings": true,
        "dtype": "bfloat16",
        "text_config": plain,
        "vision_config": {"depth": 2, "hidden_size": 8},
    });
    let mut published = published;
    let text = &mut published["text_config"];
    text["model_type"] = "qwen3_5_text".into();
    text["mtp_num_hidden_layers"] = 1.into();
    text["attn_output_gate"] = true.into();
    text["tie_word_embeddings"] = true.into();
    text["dtype"] = "bfloat16".into();
    text["layer_types"] = json!([
        "linear_attention",
        "full_attention",
        "linear_attention",
        "full_attention"
    ]);
    text["rope_parameters"] = json!({
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_interleaved": true, "mrope_section": [1, 1, 0],
    });
    let object = text.as_object_mut().unwrap();
    for key in [
        "architectures",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
    ] {
        object.remove(key);
    }
    let mut all = tensors(&plain_root);
    for (name, _) in &mut all {
        *name = name.replacen("model.", "model.language_model.", 1);
    }
    let small = Tensor::from_f32(vec![2], vec![1.0, 2.0]).unwrap();
    for extra in ["model.visual.blocks.0.norm1.weight", "mtp.norm.weight"] {
        all.push((extra.into(), small.clone()));
    }
    let root = dir.path().join("published");
    write(&root, &published, &all);
    let [a, b] = [&plain_root, &root].map(|r| Checkpoint::open(r).unwrap());
    assert_eq!(a.config(), b.config());
    same(&a, &b);
    let left: Vec<String> = (b.left_over().iter())
        .map(|l| format!("{}: {}", l.name, l.why))
        .collect();
    let said = |part: &str| left.iter().any(|l| l.contains(part));
    assert!(
        said("visual.blocks.0.norm1.weight: images are not read"),
        "{left:#?}"
    );
    assert!(
        said("mtp.norm.weight: of an MTP layer that nq does not use"),
        "{left:#?}"
    );
    assert!(
        said("mtp_num_hidden_layers 1: the files have no mtp.pre_fc_norm_embedding"),
        "{left:#?}"
    );
    // What both parts say is used.
    assert!(!said("tie_word_embeddings") && !said("dtype"), "{left:#?}");
}

/// Gains are what a norm multiplies by, whatever files hold.
#[test]
fn gains_of_norms_are_whole() {
    let (dir, _) = folder("qwen35");
    let root = dir.path().join("m");
    let checkpoint = Checkpoint::open(&root).unwrap();
    let files: std::collections::BTreeMap<_, _> = tensors(&root).into_iter().collect();
    for (name, plus) in [
        ("model.norm", 1.0),
        ("model.layers.0.input_layernorm", 1.0),
        ("model.layers.1.self_attn.q_norm", 1.0),
        ("model.layers.0.linear_attn.norm", 0.0),
    ] {
        let stored = files[&format!("{name}.weight")].to_f32().unwrap();
        let gains = checkpoint.store().vector(name, stored.len()).unwrap();
        let wanted: Vec<f32> = stored.iter().map(|v| v + plus).collect();
        assert_eq!(gains.to_f32().unwrap(), wanted, "{name}");
        let mean = wanted.iter().sum::<f32>() / wanted.len() as f32;
        assert!((mean - 1.0).abs() < 0.1, "{name}: {mean}");
    }
}

/// Every lie about a recurrence is refused by the name of its key.
#[test]
fn impossible_recurrences_are_refused() {
    let (dir, plain) = folder("qwen35");
    let all = tensors(&dir.path().join("m"));
    let linear = "linear_attention";
    let full = "full_attention";
    for (key, value, said) in [
        (
            "linear_num_value_heads",
            json!(5),
            "a multiple of linear_num_key_heads (2)",
        ),
        ("linear_num_key_heads", json!(0), "linear_num_key_heads"),
        ("linear_num_value_heads", json!(1u64 << 27), "at most 4096"),
        ("linear_key_head_dim", Value::Null, "linear_key_head_dim"),
        ("linear_conv_kernel_dim", json!(0), "linear_conv_kernel_dim"),
        ("layer_types", json!([linear, full]), "4 layers"),
        (
            "layer_types",
            json!([linear, full, full, linear]),
            "at layer 2",
        ),
        (
            "layer_types",
            json!([linear, "sliding_attention", linear, full]),
            "sliding_attention",
        ),
        (
            "full_attention_interval",
            json!(0),
            "full_attention_interval",
        ),
        ("partial_rotary_factor", json!(0.3), "partial_rotary_factor"),
        ("partial_rotary_factor", json!(-1), "partial_rotary_factor"),
        ("linear_value_head_order", json!("other"), "tiled"),
    ] {
        let mut config = plain.clone();
        config[key] = value.clone();
        let root = dir.path().join("bad");
        write(&root, &config, &all);
        let refused = Checkpoint::open(&root).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains(said), "{key} {value}: {refused}");
    }
    // The interval that the folder states is not that of this list.
    let mut config = plain.clone();
    config["layer_types"] = json!([linear, linear, linear, full]);
    let root = dir.path().join("bad");
    write(&root, &config, &all);
    names(
        Checkpoint::open(&root),
        &["linear_attention at layer 1", "in every 2"],
    );
    // More layers with attention, or fewer, than there are tensors for.
    for types in [
        json!([full, full, full, full]),
        json!([linear, linear, linear, linear]),
    ] {
        let mut config = plain.clone();
        config["layer_types"] = types;
        config["full_attention_interval"] = Value::Null;
        let root = dir.path().join("bad");
        write(&root, &config, &all);
        names(Checkpoint::open(&root), &["model.layers."]);
    }
}

/// A tensor that a recurrence needs, of another shape or absent, is named.
#[test]
fn tensors_of_recurrences_are_checked() {
    let (dir, plain) = folder("qwen35");
    for part in [
        "A_log",
        "dt_bias",
        "conv1d.weight",
        "norm.weight",
        "in_proj_a.weight",
    ] {
        let name = format!("model.layers.2.linear_attn.{part}");
        let mut all = tensors(&dir.path().join("m"));
        let at = all.iter().position(|(n, _)| *n == name).unwrap();
        let other = Tensor::from_f32(vec![3], vec![0.5; 3]).unwrap();
        for with in [Some(other), None] {
            match with {
                Some(tensor) => all[at].1 = tensor,
                None => drop(all.remove(at)),
            }
            let root = dir.path().join("bad");
            write(&root, &plain, &all);
            let checkpoint = Checkpoint::open(&root);
            let read = checkpoint.and_then(|c| nq_formats::nq::verify(&c));
            names(read, &[&name]);
        }
    }
}

#[test]
fn other_gates_are_refused() {
    for (key, value, parts) in [
        (
            "output_gate_type",
            json!("sigmoid"),
            ["output_gate_type sigmoid", "by silu"],
        ),
        (
            "attn_output_gate",
            json!(false),
            ["attn_output_gate false", "gates of attention"],
        ),
    ] {
        let (dir, mut json) = folder("qwen35");
        let root = dir.path().join("m");
        json[key] = value;
        fs::write(root.join("config.json"), json.to_string()).unwrap();
        names(Checkpoint::open(&root), &parts);
    }
    for gate in ["silu", "swish"] {
        let (dir, mut json) = folder("qwen35");
        let root = dir.path().join("m");
        json["output_gate_type"] = gate.into();
        fs::write(root.join("config.json"), json.to_string()).unwrap();
        assert!(Checkpoint::open(&root).unwrap().left_over().is_empty());
    }
}
