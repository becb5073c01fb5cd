//! The layer with which a model predicts the token after the next: as it is published, read as a model of one layer,
//! left out where the files do not hold it or nq does not run it.

use crate::common::names;
use nq_formats::export::Mix;
use nq_formats::export::{ExportFormat, ExportOptions, compare, export};
use nq_formats::files::Files;
use nq_formats::gguf::{BlockType, GgufFile};
use nq_formats::mtp::LayerStore;
use nq_formats::serialize::write_tensors;
use nq_formats::shards::Shards;
use nq_formats::{Checkpoint, Tensor, WeightStore, nq, synth};
use nq_model::names::{layer_parameters, stack, tensor_name};
use nq_model::{Dims, ModelConfig, Shape, mtp};
use nq_testkit::models::hybrid_of;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A small model of the family of a preset, with an MTP layer.
fn config(preset: &str) -> ModelConfig {
    ModelConfig {
        mtp_layers: 1,
        ..hybrid_of(preset)
    }
}

const FAMILIES: [&str; 3] = ["qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b"];

struct MtpFolder {
    dir: tempfile::TempDir,
    config: Value,
    tensors: BTreeMap<String, Tensor>,
}

impl MtpFolder {
    /// A random model as its family's files hold it.
    fn new(preset: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("m");
        synth::write(&root, &config(preset), 4, &()).unwrap();
        let json = fs::read(root.join("config.json")).unwrap();
        let shards = Shards::open(&Files::Folder(root)).unwrap();
        let tensor = |n: &str| (n.to_owned(), shards.get(n).unwrap());
        MtpFolder {
            config: serde_json::from_slice(&json).unwrap(),
            tensors: shards.names().map(tensor).collect(),
            dir,
        }
    }

    /// The folder as this says, written and opened.
    fn open(&self) -> nq_formats::Result<Checkpoint> {
        let root = self.root();
        let tensors: Vec<_> = self.tensors.clone().into_iter().collect();
        fs::write(root.join("config.json"), self.config.to_string()).unwrap();
        write_tensors(
            &root.join("model.safetensors"),
            &tensors,
            &Default::default(),
        )
        .unwrap();
        Checkpoint::open(&root)
    }

    fn root(&self) -> PathBuf {
        let root = self.dir.path().join("changed");
        fs::create_dir_all(&root).unwrap();
        root
    }
}

fn left(checkpoint: &Checkpoint) -> Vec<String> {
    let left = checkpoint.left_over().iter();
    left.map(|l| format!("{}: {}", l.name, l.why)).collect()
}

fn values(store: &dyn WeightStore, name: &str, shape: Shape) -> Vec<f32> {
    match shape {
        Shape::Vector(n) => store.vector(name, n).unwrap().to_f32().unwrap(),
        Shape::Matrix(rows, cols) => {
            let weight = store.matrix(name, Dims::new(rows, cols)).unwrap();
            let mut all = vec![0.0; rows * cols];
            for (r, row) in all.chunks_mut(cols).enumerate() {
                weight.dequantize_row(r, row).unwrap();
            }
            all
        }
    }
}

/// All of it is used, and its layer is read as that of a model of one layer.
#[test]
fn the_layer_is_that_of_a_model_of_one_layer() {
    for family in FAMILIES {
        let folder = MtpFolder::new(family);
        let checkpoint = folder.open().unwrap();
        assert_eq!(left(&checkpoint), [""; 0], "{family}");
        assert_eq!(checkpoint.config(), &config(family));
        let layer = mtp::config(checkpoint.config()).unwrap();
        assert!(layer.layers().count() == 1 && mtp::config(&layer).is_none());
        // The second layer of the model has attention.
        let spec = checkpoint.config().layer(1);
        assert_eq!(layer.layer(0).parameters(), spec.parameters());
        let view = LayerStore::new(checkpoint.store());
        let mut seen = 0;
        for (name, shape) in layer_parameters(&layer, 0) {
            let whole = name.replacen("model.layers.0.", "mtp.layers.0.", 1);
            assert!(view.contains(&name), "{family}: {name}");
            let read = values(&view, &name, shape);
            assert_eq!(read, values(checkpoint.store(), &whole, shape), "{name}");
            // Of norms, files hold what the gains exceed 1 by; of experts, one tensor each.
            if let Some(stored) = folder.tensors.get(&tensor_name(&whole)) {
                let plus = if matches!(shape, Shape::Vector(_)) {
                    1.0
                } else {
                    0.0
                };
                let stored: Vec<f32> = stored.to_f32().unwrap().iter().map(|v| v + plus).collect();
                assert_eq!(read, stored, "{family}: {name}");
                seen += 1;
            } else {
                assert!(stack(&name).is_some(), "{family}: {name}");
            }
        }
        assert!(seen > 8, "{family}: {seen}");
        for name in [mtp::EMBEDDING_NORM, mtp::HIDDEN_NORM, mtp::NORM] {
            let stored = folder.tensors[&tensor_name(name)].to_f32().unwrap();
            let gains: Vec<f32> = stored.iter().map(|v| v + 1.0).collect();
            assert_eq!(values(checkpoint.store(), name, Shape::Vector(32)), gains);
        }
        assert_eq!(
            view.matrix(mtp::FC, Dims::new(32, 64)).unwrap().dims(),
            Dims::new(32, 64)
        );
    }
}

/// Files may hold the experts of the layer in two tensors, as Qwen3.5's are published.
#[test]
fn experts_of_the_layer_may_be_fused() {
    let mut folder = MtpFolder::new("qwen3.5-35b-a3b");
    let apart = folder.open().unwrap();
    let (prefix, experts) = ("mtp.layers.0.mlp.experts", 3);
    let mut fused: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
    for e in 0..experts {
        for (part, to) in [
            ("gate_proj", "gate_up_proj"),
            ("up_proj", "gate_up_proj"),
            ("down_proj", "down_proj"),
        ] {
            let tensor = folder
                .tensors
                .remove(&format!("{prefix}.{e}.{part}.weight"))
                .unwrap();
            fused
                .entry(to)
                .or_default()
                .extend(tensor.to_f32().unwrap());
        }
    }
    for (part, values) in fused {
        let height = if part == "gate_up_proj" { 64 } else { 32 };
        let tensor = Tensor::from_f32(vec![experts, height, 32], values).unwrap();
        folder.tensors.insert(format!("{prefix}.{part}"), tensor);
    }
    let whole = folder.open().unwrap();
    assert_eq!((whole.config().mtp_layers, left(&whole).len()), (1, 0));
    for (name, shape) in mtp::parameters(whole.config()) {
        let [a, b] = [&apart, &whole].map(|c| values(c.store(), &name, shape));
        assert_eq!(a, b, "{name}");
    }
}

/// What a configuration says of a layer that is not there, or that nq does not run, is said.
#[test]
fn a_layer_that_is_not_used_is_said() {
    for (key, value, tensors, said) in [
        (
            "mtp_num_hidden_layers",
            json!(1),
            "none",
            "mtp_num_hidden_layers 1: the files have no mtp.pre_fc_norm_embedding",
        ),
        (
            "mtp_num_hidden_layers",
            json!(1),
            "some",
            "mtp_num_hidden_layers 1: the files have no mtp.norm",
        ),
        (
            "mtp_num_hidden_layers",
            json!(2),
            "all",
            "mtp_num_hidden_layers 2: nq drafts with one such layer",
        ),
        (
            "mtp_num_hidden_layers",
            json!(u64::MAX),
            "all",
            "nq drafts with one such layer",
        ),
        (
            "mtp_use_dedicated_embeddings",
            json!(true),
            "all",
            "mtp_use_dedicated_embeddings true: nq drafts with the model's",
        ),
        ("mtp_num_hidden_layers", json!(0), "all", "mtp.norm.weight"),
        (
            "mtp_num_hidden_layers",
            Value::Null,
            "all",
            "mtp.norm.weight",
        ),
    ] {
        let mut folder = MtpFolder::new("qwen3.5-0.8b");
        folder.config[key] = value.clone();
        folder.tensors.retain(|name, _| match tensors {
            "none" => !name.starts_with("mtp."),
            "some" => name != "mtp.norm.weight",
            _ => true,
        });
        let checkpoint = folder.open().unwrap();
        let lines = left(&checkpoint).join("\n");
        assert_eq!(checkpoint.config().mtp_layers, 0, "{key} {value}");
        assert!(lines.contains(said), "{key} {value}: {lines}");
        let listed = lines.contains("mtp.fc.weight: of an MTP layer that nq does not use");
        assert_eq!(listed, tensors != "none", "{key} {value}: {lines}");
        assert_eq!(mtp::parameters(checkpoint.config()).count(), 0);
    }
    for (key, value) in [
        ("mtp_num_hidden_layers", json!(-1)),
        ("mtp_use_dedicated_embeddings", json!(1)),
    ] {
        let mut folder = MtpFolder::new("qwen3.5-0.8b");
        folder.config[key] = value;
        names(folder.open(), &[key]);
    }
}

/// Qwen3-Next has the layer whether or not config.json says so; without it, nothing is missing.
#[test]
fn a_family_may_have_the_layer_unsaid() {
    let mut folder = MtpFolder::new("qwen3-next-80b-a3b");
    folder
        .config
        .as_object_mut()
        .unwrap()
        .remove("mtp_num_hidden_layers");
    assert_eq!(folder.open().unwrap().config().mtp_layers, 1);
    folder.tensors.retain(|name, _| !name.starts_with("mtp."));
    let without = folder.open().unwrap();
    assert_eq!((without.config().mtp_layers, left(&without).len()), (0, 0));
}

fn write(source: &Checkpoint, format: ExportFormat, out: &Path) -> Checkpoint {
    export(source, format, out, &ExportOptions::default(), &()).unwrap();
    let written = Checkpoint::open(out).unwrap();
    let differences = compare(source, &written, &()).unwrap();
    let of_mtp = differences
        .iter()
        .filter(|d| d.name.starts_with("mtp."))
        .count();
    assert_eq!(of_mtp, mtp::parameters(source.config()).count());
    for d in &differences {
        // GGUF files hold rates of decay, other files their logarithms.
        let most = if d.name.ends_with("A_log") { 1e-6 } else { 0.0 };
        assert!(d.relative <= most, "{format:?}: {d:?}");
    }
    nq::verify_values(&written).unwrap();
    written
}

/// The layer's bytes are those of the tensors whose names begin so.
fn check_bytes(checkpoint: &Checkpoint, layer: &str) {
    let entries = checkpoint.store().entries().into_iter();
    let of_layer = entries.filter(|e| e.name.starts_with(layer));
    let parts = checkpoint.part_bytes();
    assert_eq!(parts.mtp, of_layer.map(|e| e.bytes).sum::<u64>());
    assert!(parts.mtp > 0 && parts.body > 0 && parts.embedding_and_head > 0);
    let all = parts.body + parts.embedding_and_head + parts.mtp;
    assert_eq!((all, parts.tower), (checkpoint.tensor_bytes(), 0));
}

/// A block behind the others in GGUF files, a layer like the others in nq's folders: the same numbers in each.
#[test]
fn the_layer_goes_through_every_format_of_nq() {
    for family in FAMILIES {
        let folder = MtpFolder::new(family);
        let source = folder.open().unwrap();
        let path = |name: &str| folder.dir.path().join(name);
        fs::copy(path("m/tokenizer.json"), path("changed/tokenizer.json")).unwrap();
        let gguf = write(&source, ExportFormat::Gguf, &path("m.gguf"));
        assert_eq!(left(&gguf), [""; 0], "{family}");
        check_bytes(&source, "mtp.");
        check_bytes(&gguf, "blk.2.");
        let tensors: Vec<String> = gguf.store().entries().into_iter().map(|e| e.name).collect();
        for part in [
            "nextn.eh_proj",
            "nextn.enorm",
            "nextn.hnorm",
            "nextn.shared_head_norm",
            "attn_q",
            "attn_norm",
        ] {
            assert!(
                tensors.contains(&format!("blk.2.{part}.weight")),
                "{family}: {part}"
            );
        }
        let file = GgufFile::parse(
            Path::new("m.gguf"),
            fs::read(path("m.gguf")).unwrap().into(),
        )
        .unwrap();
        let key = |name: &str| format!("{}.{name}", source.config().architecture.gguf);
        let number = |name: &str| file.u64(&key(name)).unwrap();
        assert_eq!(
            (number("block_count"), number("nextn_predict_layers")),
            (Some(3), Some(1))
        );
        // Its folders hold quantized models.
        let options = ExportOptions {
            mix: Mix::All(BlockType::Q8_0),
            ..ExportOptions::default()
        };
        export(&source, ExportFormat::Gguf, &path("q.gguf"), &options, &()).unwrap();
        let quantized = Checkpoint::open(&path("q.gguf")).unwrap();
        let nq = write(&quantized, ExportFormat::Nq, &path("nq"));
        assert_eq!(left(&nq), [""; 0], "{family}");
        check_bytes(&nq, "mtp.");
        let record = nq::record(&nq).unwrap().unwrap();
        assert!(record.scheme(mtp::FC).is_some());
        assert!(
            !record.overrides.keys().any(|name| name.starts_with("mtp.")),
            "{record:?}"
        );
        let again = write(&nq, ExportFormat::Gguf, &path("again.gguf"));
        write(&again, ExportFormat::Nq, &path("nq2"));
        assert_eq!(again.config().mtp_layers, 1);
    }
}

/// What a GGUF file says of such layers is held against what it has.
#[test]
fn lies_of_gguf_files_are_found() {
    let folder = MtpFolder::new("qwen3.5-0.8b");
    folder.open().unwrap();
    let path = |name: &str| folder.dir.path().join(name);
    fs::copy(path("m/tokenizer.json"), path("changed/tokenizer.json")).unwrap();
    write(&folder.open().unwrap(), ExportFormat::Gguf, &path("m.gguf"));
    let bytes = fs::read(path("m.gguf")).unwrap();
    let at = |text: &str| {
        bytes
            .windows(text.len())
            .position(|w| w == text.as_bytes())
            .unwrap()
    };
    let changed = |text: &str, to: &[u8], offset: usize| {
        let mut bytes = bytes.clone();
        let at = at(text) + offset;
        bytes[at..at + to.len()].copy_from_slice(to);
        fs::write(path("changed.gguf"), &bytes).unwrap();
        Checkpoint::open(&path("changed.gguf"))
    };
    let layers = "qwen35.nextn_predict_layers";
    let says = |n: u32| changed(layers, &n.to_le_bytes(), layers.len() + 4);
    names(says(4), &[layers, "at most 3"]);
    names(says(u32::MAX), &[layers, "at most 3"]);
    names(says(0), &["blk.2"]);
    names(says(2), &["blk.1"]);
    // One with a head of its own is not used.
    let norm = "blk.2.nextn.shared_head_norm.weight";
    let own = changed(norm, b"blk.2.nextn.shared_head_head.weight", 0).unwrap();
    assert_eq!(own.config().mtp_layers, 0);
    let lines = left(&own).join("\n");
    assert!(
        lines.contains("mtp_use_dedicated_embeddings true: nq drafts with the model's"),
        "{lines}"
    );
    assert!(
        lines.contains("blk.2.attn_q.weight: of an MTP layer that nq does not use"),
        "{lines}"
    );
    // Nor one that is not whole.
    let part = changed(norm, b"blk.2.nextn.shared_head_nose.weight", 0).unwrap();
    assert_eq!(part.config().mtp_layers, 0);
    assert!(
        left(&part)
            .join("\n")
            .contains("the files have no mtp.norm")
    );
}

/// A tensor of another shape than the model's is refused by name.
#[test]
fn tensors_of_the_layer_are_checked() {
    let small = Tensor::from_f32(vec![2, 3], vec![0.5; 6]).unwrap();
    for name in [mtp::FC, mtp::NORM, "mtp.layers.0.self_attn.q_proj"] {
        let mut folder = MtpFolder::new("qwen3.5-0.8b");
        folder.tensors.insert(tensor_name(name), small.clone());
        let checkpoint = folder.open().unwrap();
        let read = mtp::parameters(checkpoint.config()).try_for_each(|(name, shape)| match shape {
            Shape::Vector(n) => checkpoint.store().vector(&name, n).map(drop),
            Shape::Matrix(rows, cols) => checkpoint
                .store()
                .matrix(&name, Dims::new(rows, cols))
                .map(drop),
        });
        names(read, &[name, "[2, 3]"]);
    }
    // As many experts as the model's layers have.
    let mut folder = MtpFolder::new("qwen3.5-35b-a3b");
    folder
        .tensors
        .insert("mtp.layers.0.mlp.experts.7.up_proj.weight".into(), small);
    names(
        folder.open(),
        &["num_experts", "mtp.layers.0.mlp.experts.7.up_proj.weight"],
    );
}
