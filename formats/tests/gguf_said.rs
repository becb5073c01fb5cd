//! What a GGUF file says is applied, refused by name or listed: files of the demo model with more in them.

use crate::common::names;
use nq_formats::export::Mix;
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::gguf::{Array, BlockType, GgufFile, GgufPlan, Value};
use nq_formats::{Checkpoint, Result, Task};
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{Dims, RopeScaling};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The demo model as a GGUF file in F16.
static DEMO: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("demo.gguf");
    let source = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let options = ExportOptions {
        mix: Mix::All(BlockType::F16),
        ..ExportOptions::default()
    };
    export(&source, ExportFormat::Gguf, &path, &options, &()).unwrap();
    fs::read(path).unwrap()
});

/// The demo's file with further keys and one more tensor of F32.
fn with(
    keys: &[(&str, Value)],
    tensor: Option<(&str, Vec<usize>, f32)>,
) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let file = GgufFile::parse(Path::new("demo"), DEMO.clone().into()).unwrap();
    let mut plan = GgufPlan::new();
    for (key, value) in file.metadata() {
        plan.set(key.clone(), value.clone());
    }
    for (key, value) in keys {
        plan.set(*key, value.clone());
    }
    for (name, info) in file.tensors() {
        plan.add(name.clone(), info.kind, info.shape.clone())
            .unwrap();
    }
    if let Some((name, shape, _)) = &tensor {
        plan.add((*name).into(), BlockType::F32, shape.clone())
            .unwrap();
    }
    plan.write(
        &path,
        &(),
        &mut |planned, sink| match file.tensors().get(&planned.name) {
            Some(info) => sink.write(&file.data(info)),
            None => {
                let value = tensor.as_ref().map_or(0.0, |t| t.2);
                sink.write(&value.to_le_bytes().repeat(planned.bytes() as usize / 4))
            }
        },
    )
    .unwrap();
    (dir, path)
}

fn open(keys: &[(&str, Value)]) -> Result<Checkpoint> {
    let (_dir, path) = with(keys, None);
    Checkpoint::open(&path)
}

#[test]
fn a_classifier_of_yes_and_no_ranks() {
    let labels = Array::of_strings(&["yes", "no"]);
    let rank = [
        ("qwen3.pooling_type", Value::U32(4)),
        ("qwen3.classifier.output_labels", labels.into()),
        ("tokenizer.ggml.add_eos_token", true.into()),
    ];
    let classifier = Some(("cls.output.weight", vec![2, 512], 0.25));
    let (_dir, path) = with(&rank, classifier.clone());
    let opened = Checkpoint::open(&path);
    let file = GgufFile::parse(&path, fs::read(&path).unwrap().into()).unwrap();
    let tokens = file.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    let ids: Vec<usize> = ["yes", "no"]
        .iter()
        .filter_map(|l| tokens.iter().position(|t| t == l))
        .collect();
    if ids.len() < 2 {
        // The demo's vocabulary may lack one; then the file is refused by its name.
        names(opened, &["classifier.output_labels", "tokens"]);
        return;
    }
    let opened = opened.unwrap();
    assert_eq!(opened.task(), &Task::Rerank);
    assert!(!opened.config().tie_word_embeddings);
    let head = opened.store().matrix(HEAD, Dims::new(4096, 512)).unwrap();
    let embedding = opened
        .store()
        .matrix(EMBEDDING, Dims::new(4096, 512))
        .unwrap();
    let (mut row, mut own) = (vec![0.0; 512], vec![0.0; 512]);
    for id in 0..4096 {
        head.dequantize_row(id, &mut row).unwrap();
        embedding.dequantize_row(id, &mut own).unwrap();
        let expected = if ids.contains(&id) {
            &vec![0.25; 512]
        } else {
            &own
        };
        assert_eq!(&row, expected, "{id}");
    }
    let other = Array::of_strings(&["good", "bad"]);
    let keys = [
        rank[0].clone(),
        ("qwen3.classifier.output_labels", other.into()),
    ];
    let (_dir, path) = with(&keys, classifier.clone());
    names(
        Checkpoint::open(&path),
        &["output_labels", "good", "yes and no"],
    );
    // In a model that writes, it is left over, and could change what is computed.
    let (_dir, path) = with(&[], classifier);
    names(Checkpoint::open(&path), &["tensor cls.output.weight"]);
}

#[test]
fn rerankers_are_told_by_their_pooling() {
    assert_eq!(open(&[]).unwrap().task(), &Task::Generate);
    assert_eq!(
        open(&[("qwen3.pooling_type", Value::U32(4))])
            .unwrap()
            .task(),
        &Task::Rerank
    );
}

#[test]
fn tensors_and_keys_are_accounted_for() {
    let (_dir, path) = with(&[], Some(("blk.0.attn_q.bias", vec![512], 1.0)));
    names(
        Checkpoint::open(&path),
        &["tensor blk.0.attn_q.bias", "no such parameter"],
    );
    assert!(open(&[]).unwrap().left_over().is_empty());
    let opened = open(&[("qwen3.attention.logit_scale", Value::F32(2.0))]).unwrap();
    let left = opened.left_over();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].name, "metadata: qwen3.attention.logit_scale");
    names(
        open(&[("general.type", "adapter".into())]),
        &["general.type adapter", "--adapter"],
    );
    names(
        open(&[("general.type", "mmproj".into())]),
        &["general.type mmproj"],
    );
}

#[test]
fn keys_of_yarn_are_computed_or_refused() {
    let yarn = |more: &[(&'static str, f32)]| {
        let mut keys = vec![
            ("qwen3.rope.scaling.type", "yarn".into()),
            ("qwen3.rope.scaling.factor", Value::F32(4.0)),
            (
                "qwen3.rope.scaling.original_context_length",
                Value::U32(128),
            ),
        ];
        keys.extend(more.iter().map(|(key, v)| (*key, Value::F32(*v))));
        open(&keys)
    };
    let factor = |opened: Result<Checkpoint>| match opened.unwrap().config().rope.scaling {
        RopeScaling::Yarn {
            attention_factor, ..
        } => attention_factor,
        ref other => panic!("{other:?}"),
    };
    let mscale = |m: f64| 0.1 * m * 4f64.ln() + 1.0;
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
    near(factor(yarn(&[])), mscale(1.0));
    near(
        factor(yarn(&[("qwen3.rope.scaling.yarn_ext_factor", 1.0)])),
        mscale(1.0),
    );
    near(
        factor(yarn(&[("qwen3.rope.scaling.attn_factor", 0.5)])),
        0.5 * mscale(1.0),
    );
    let all = factor(yarn(&[("qwen3.rope.scaling.yarn_log_multiplier", 0.5)]));
    near(all, mscale(1.0) / mscale(0.5));
    for key in [
        "qwen3.rope.scaling.yarn_ext_factor",
        "qwen3.rope.scaling.yarn_attn_factor",
    ] {
        names(yarn(&[(key, 0.25)]), &[key, "0.25"]);
    }
}

/// The templates beside the default one go through a file and back.
#[test]
fn templates_for_tools_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir_all(source.join("additional_chat_templates")).unwrap();
    for entry in fs::read_dir(nq_testkit::demo()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), source.join(entry.file_name())).unwrap();
    }
    fs::write(source.join("chat_template.jinja"), "plain").unwrap();
    fs::write(
        source.join("additional_chat_templates/tool_use.jinja"),
        "tools",
    )
    .unwrap();
    let out = dir.path().join("m.gguf");
    let opened = Checkpoint::open(&source).unwrap();
    export(
        &opened,
        ExportFormat::Gguf,
        &out,
        &ExportOptions::default(),
        &(),
    )
    .unwrap();
    let read = Checkpoint::open(&out).unwrap();
    let config = read.files().require("tokenizer_config.json").unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let expected = serde_json::json!([{ "name": "default", "template": "plain" },
        { "name": "tool_use", "template": "tools" }]);
    assert_eq!(config["chat_template"], expected);
    let again = dir.path().join("copied");
    nq_formats::nq::copy_files(opened.files(), &again).unwrap();
    let tools = again.join("additional_chat_templates/tool_use.jinja");
    assert_eq!(fs::read_to_string(tools).unwrap(), "tools");
}
