//! Models that see: what their files say of the tower and of images, and folders that nq writes of them.

use crate::hybrids::{folder, tensors, write};
use nq_formats::export::{ExportFormat, ExportOptions, compare, export};
use nq_formats::gguf::GgufFile;
use nq_formats::left_over::LeftOver;
use nq_formats::nq::{Opened, Param, QuantizationRecord, Writer, WriterOptions};
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Tensor, WeightStore, Zeros, synth};
use nq_model::names::{is_layer_linear, parameters};
use nq_model::vision::PATCH_EMBED;
use nq_model::{Dims, Shape, find};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A model as published.
struct Published {
    dir: tempfile::TempDir,
    config: Value,
    pixels: Value,
    tensors: Vec<(String, Tensor)>,
}

/// Of the family that GGUF files call `gguf`.
fn published(gguf: &str) -> Published {
    let (dir, mut plain) = folder(gguf);
    plain["torch_dtype"] = "float32".into();
    let (class, kind) = find(|a| a.gguf, gguf).unwrap().also[0];
    let deepstack: &[usize] = if gguf == "qwen3vl" { &[0] } else { &[] };
    if !deepstack.is_empty() {
        plain["rope_scaling"] = json!({
            "rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": true,
        });
    }
    let hidden = plain["hidden_size"].as_u64().unwrap() as usize;
    let mut all = tensors(&dir.path().join("m"));
    let tower = json!({
        "depth": 1, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "patch_size": 2,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 9,
        "out_hidden_size": hidden, "hidden_act": "gelu_pytorch_tanh", "model_type": kind,
        "deepstack_visual_indexes": deepstack,
    });
    let mut config = json!({
        "architectures": [class], "model_type": kind,
        "image_token_id": 290, "vision_start_token_id": 291, "vision_end_token_id": 292,
        "text_config": plain, "vision_config": tower, "tie_word_embeddings": plain["tie_word_embeddings"],
    });
    let text = config["text_config"].as_object_mut().unwrap();
    text.remove("architectures");
    let values_of = |shape: Vec<usize>| {
        let n = shape.iter().product();
        let values = (0..n).map(|i: usize| (i % 7) as f32 + n as f32).collect();
        Tensor::from_f32(shape, values).unwrap()
    };
    let block = [
        ("norm1", vec![8]),
        ("norm2", vec![8]),
        ("attn.qkv", vec![24, 8]),
        ("attn.proj", vec![8, 8]),
        ("mlp.linear_fc1", vec![12, 8]),
        ("mlp.linear_fc2", vec![8, 12]),
    ];
    let block = block.map(|(name, shape)| (format!("blocks.0.{name}"), shape));
    let merger = [
        ("norm", vec![8]),
        ("linear_fc1", vec![32, 32]),
        ("linear_fc2", vec![hidden, 32]),
    ];
    let merger = merger.map(|(name, shape)| (format!("merger.{name}"), shape));
    let wide = deepstack.iter().flat_map(|_| {
        let place = "deepstack_merger_list.0";
        [
            (format!("{place}.norm"), vec![32]),
            (format!("{place}.linear_fc1"), vec![32, 32]),
            (format!("{place}.linear_fc2"), vec![hidden, 32]),
        ]
    });
    let patches = [("patch_embed.proj".to_owned(), vec![8, 3, 2, 2, 2])];
    for (name, shape) in block.into_iter().chain(merger).chain(wide).chain(patches) {
        all.push((
            format!("visual.{name}.bias"),
            values_of(shape[..1].to_vec()),
        ));
        all.push((format!("visual.{name}.weight"), values_of(shape)));
    }
    all.push(("visual.pos_embed.weight".into(), values_of(vec![9, 8])));
    let pixels = json!({
        "size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": 2, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.2],
        "processor_class": "Qwen3VLProcessor", "do_resize": true, "rescale_factor": 0.00392156862745098,
    });
    Published {
        dir,
        config,
        pixels,
        tensors: all,
    }
}

fn open(
    root: &Path,
    config: &Value,
    pixels: &Value,
    tensors: &[(String, Tensor)],
) -> nq_formats::Result<Checkpoint> {
    write(root, config, tensors);
    fs::write(root.join("preprocessor_config.json"), pixels.to_string()).unwrap();
    Checkpoint::open(root)
}

/// A tower is read with the sizes of its images, and what nq does not compute is refused by name.
#[test]
fn a_tower_is_read_or_refused_by_name() {
    let Published {
        dir,
        config,
        pixels,
        tensors: all,
    } = published("qwen35");
    let mut n = 0;
    let mut open = |config: &Value, pixels: &Value, tensors: &[(String, Tensor)]| {
        n += 1;
        open(
            &dir.path().join(format!("sees{n}")),
            config,
            pixels,
            tensors,
        )
    };
    let checkpoint = open(&config, &pixels, &all).unwrap();
    assert!(
        checkpoint
            .left_over()
            .iter()
            .all(|l| !l.name.contains("visual"))
    );
    let vision = checkpoint.vision().unwrap();
    assert_eq!(
        (vision.tokens.pad, vision.position_side, vision.head_dim()),
        (290, 3, 4)
    );
    assert_eq!(
        (
            vision.pixels.most,
            vision.pixels.mean[2],
            vision.most_tokens()
        ),
        (1024, 0.3, 64)
    );
    assert_eq!(
        checkpoint
            .store()
            .matrix(PATCH_EMBED, Dims::new(8, 24))
            .unwrap()
            .dims(),
        Dims::new(8, 24)
    );

    let mut refused = |key: &str, value: Value, found: &str| {
        let mut config = config.clone();
        match config.pointer_mut(key) {
            Some(place) => *place = value,
            None => config["vision_config"][key] = value,
        }
        let error = open(&config, &pixels, &all).err().unwrap().to_string();
        let key = key.rsplit('/').next().unwrap();
        assert!(
            error.contains(key) && error.contains(found),
            "{key}: {error}"
        );
    };
    refused("hidden_act", "gelu".into(), "tanh");
    refused("deepstack_visual_indexes", json!([3]), "[3]");
    refused("in_channels", 1.into(), "red, green and blue");
    refused("num_heads", 3.into(), "multiple of 4 times");
    refused("num_position_embeddings", 10.into(), "a square");
    refused("out_hidden_size", 7.into(), "found 7");
    refused("patch_size", 65.into(), "1 to 64");
    refused("model_type", "qwen2_5_vl".into(), "Qwen3.5");

    refused("/image_token_id", 1_000_000.into(), "a token below");
    // A tower that no token stands for is left out, by name.
    let mut without = config.clone();
    without
        .as_object_mut()
        .unwrap()
        .remove("vision_start_token_id");
    let text = open(&without, &pixels, &all).unwrap();
    assert!(text.vision().is_none());
    let mut left = text.left_over().iter();
    assert!(left.any(|l| l.name == "vision_start_token_id"));
    let mut refused = |key: &str, value: Value, found: &str| {
        let mut pixels = pixels.clone();
        pixels[key] = value;
        let error = open(&config, &pixels, &all).err().unwrap().to_string();
        assert!(
            error.contains("preprocessor_config.json") && error.contains(key),
            "{error}"
        );
        assert!(error.contains(found), "{key}: {error}");
    };
    refused(
        "size",
        json!({"shortest_edge": 64, "longest_edge": 1u64 << 40}),
        "64 to 1099511627776",
    );
    refused(
        "size",
        json!({"shortest_edge": 2048, "longest_edge": 1024}),
        "2048 to 1024",
    );
    refused("patch_size", 16.into(), "as config.json says");
    refused("image_std", json!([0.5, 0.0, 0.5]), "three numbers");
    refused("do_normalize", false.into(), "normalized");
    refused("resample", 2.into(), "bicubic");
    refused("rescale_factor", 1.0.into(), "8 bits");
}

/// The values of every parameter of a tower.
fn tower(checkpoint: &Checkpoint) -> Vec<Vec<f32>> {
    let store: &dyn WeightStore = checkpoint.store();
    let parameters = checkpoint.vision().unwrap().parameters().into_iter();
    let values = parameters.map(|p| match p.shape {
        Shape::Vector(len) => store.vector(&p.name, len).unwrap().to_f32().unwrap(),
        Shape::Matrix(rows, cols) => {
            let weight = store.matrix(&p.name, Dims::new(rows, cols)).unwrap();
            let mut values = vec![0.0; rows * cols];
            for (row, values) in values.chunks_exact_mut(cols).enumerate() {
                weight.dequantize_row(row, values).unwrap();
            }
            values
        }
    });
    values.collect()
}

/// Writes a folder of nq with the tower of `source` and the text model's weights of `store`.
fn write_nq(source: &Checkpoint, store: &dyn WeightStore, out: &Path) -> Checkpoint {
    let options = WriterOptions::default();
    let opened = Writer::open(out, source.files(), &json!({}), options).unwrap();
    let Opened::Writer(writer) = opened else {
        panic!("nothing was complete");
    };
    for (name, shape) in parameters(source.config()) {
        match shape {
            Shape::Vector(len) => {
                let tensor = store.vector(&name, len).unwrap();
                writer.put(&name, &[(name.clone(), Param::Vector(&tensor))])
            }
            Shape::Matrix(rows, cols) => {
                let weight = store.matrix(&name, Dims::new(rows, cols)).unwrap();
                writer.put(&name, &[(name.clone(), Param::Matrix(&weight))])
            }
        }
        .unwrap();
    }
    writer.put_tower(source).unwrap();
    writer.put_tower(source).unwrap(); // staged already
    let record = QuantizationRecord {
        method: "test".into(),
        ..Default::default()
    };
    writer.finish(record, &()).unwrap();
    Checkpoint::open(out).unwrap()
}

#[test]
fn folders_of_nq_hold_the_tower_as_it_was() {
    let Published {
        dir,
        config,
        pixels,
        tensors,
    } = published("qwen35");
    let source = open(&dir.path().join("source"), &config, &pixels, &tensors).unwrap();
    let made = write_nq(&source, source.store(), &dir.path().join("out"));
    assert_eq!(made.vision(), source.vision());
    assert_eq!(made.left_over(), []);
    assert_eq!(tower(&made), tower(&source));
    assert_eq!(made.tower_bytes(), source.tower_bytes());
    assert!(made.tower_bytes() > 0 && made.bits_per_weight() < 33.0);
    for checkpoint in [source, made] {
        let entries = checkpoint.store().entries().into_iter();
        let of_tower = entries.filter(|e| e.name.contains("visual."));
        let parts = checkpoint.part_bytes();
        assert_eq!(parts.tower, of_tower.map(|e| e.bytes).sum::<u64>());
        let all = parts.body + parts.embedding_and_head + parts.mtp + parts.tower;
        assert_eq!(all, checkpoint.tensor_bytes());
    }
}

/// Where a test writes: a folder of `NQ_VISION`, to look at what was written, or a temporary one.
fn root(temporary: &tempfile::TempDir, name: &str) -> PathBuf {
    let kept = std::env::var_os("NQ_VISION");
    kept.map_or(temporary.path().into(), |kept| Path::new(&kept).join(name))
}

/// Folders of other formats hold the whole model, with the names of published ones, and its tower as it was.
#[test]
fn folders_of_other_formats_hold_the_tower_as_it_was() {
    for gguf in ["qwen35", "qwen3vl"] {
        let Published {
            dir,
            config,
            pixels,
            tensors,
        } = published(gguf);
        let root = root(&dir, gguf);
        let source = open(&root.join("source"), &config, &pixels, &tensors).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            let tokenizer = dir.path().join("m").join(file);
            fs::copy(tokenizer, root.join("source").join(file)).unwrap();
        }
        let scheme = |name: &str| {
            let scheme = AffineScheme::new(Bits::B4, Group::Size(16), Zeros::Integer);
            is_layer_linear(name).then_some(scheme)
        };
        let random = synth::quantized_checkpoint("m", source.config(), 3, scheme).unwrap();
        let made = write_nq(&source, random.store(), &root.join("nq"));
        for format in [
            ExportFormat::CompressedTensors,
            ExportFormat::Gptq,
            ExportFormat::Awq,
        ] {
            let out = root.join(format!("{format:?}"));
            export(&made, format, &out, &ExportOptions::default(), &()).unwrap();
            let found = Checkpoint::open(&out).unwrap();
            assert_eq!(found.left_over(), [], "{gguf} as {format:?}");
            assert_eq!(found.vision(), source.vision(), "{gguf} as {format:?}");
            assert_eq!(tower(&found), tower(&source), "{gguf} as {format:?}");
            for d in compare(&made, &found, &()).unwrap() {
                assert!(d.max <= 1e-7, "{gguf} as {format:?}: {d:?}");
            }
            let bytes = fs::read(out.join("model.safetensors")).unwrap();
            let file = SafetensorsFile::parse(&out, bytes.into()).unwrap();
            let text = |n: &str| n.starts_with("model.language_model.") || n == "lm_head.weight";
            assert!(
                file.names()
                    .all(|n| text(n) || n.starts_with("model.visual."))
            );
            let config: Value =
                serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
            let class = find(|a| a.gguf, gguf).unwrap().also[0].0;
            assert_eq!(config["architectures"][0], class);
            assert!(config["quantization_config"].is_object());
        }
    }
}

/// The tensors of a tower of one block as llama.cpp's converter names them: patches in a tensor for each frame.
const MMPROJ: [&str; 22] = [
    "mm.0.bias",
    "mm.0.weight",
    "mm.2.bias",
    "mm.2.weight",
    "v.blk.0.attn_out.bias",
    "v.blk.0.attn_out.weight",
    "v.blk.0.attn_qkv.bias",
    "v.blk.0.attn_qkv.weight",
    "v.blk.0.ffn_down.bias",
    "v.blk.0.ffn_down.weight",
    "v.blk.0.ffn_up.bias",
    "v.blk.0.ffn_up.weight",
    "v.blk.0.ln1.bias",
    "v.blk.0.ln1.weight",
    "v.blk.0.ln2.bias",
    "v.blk.0.ln2.weight",
    "v.patch_embd.bias",
    "v.patch_embd.weight",
    "v.patch_embd.weight.1",
    "v.position_embd.weight",
    "v.post_ln.bias",
    "v.post_ln.weight",
];

/// The same of a merger behind it.
const DEEPSTACK: [&str; 6] = [
    "v.deepstack.0.fc1.bias",
    "v.deepstack.0.fc1.weight",
    "v.deepstack.0.fc2.bias",
    "v.deepstack.0.fc2.weight",
    "v.deepstack.0.norm.bias",
    "v.deepstack.0.norm.weight",
];

/// A tower goes to a file of its own beside the GGUF file of the text model, and is read from there as it was.
#[test]
fn a_tower_is_written_beside_a_gguf_model_and_read_from_there() {
    for (gguf, more) in [("qwen35", &[][..]), ("qwen3vl", &DEEPSTACK)] {
        let Published {
            dir,
            config,
            pixels,
            tensors,
        } = published(gguf);
        let root = root(&dir, &format!("{gguf}-gguf"));
        let source = open(&root.join("source"), &config, &pixels, &tensors).unwrap();
        let folder = root.join("gguf");
        let (model, mmproj) = (folder.join("model.gguf"), folder.join("mmproj-model.gguf"));
        let names = [
            ("<122>", "<|image_pad|>"),
            ("<123>", "<|vision_start|>"),
            ("<124>", "<|vision_end|>"),
        ];
        for named in [false, true] {
            for file in ["tokenizer.json", "tokenizer_config.json"] {
                let mut text = fs::read_to_string(dir.path().join("m").join(file)).unwrap();
                for (from, to) in names.iter().filter(|_| named) {
                    text = text.replace(from, to);
                }
                fs::write(root.join("source").join(file), text).unwrap();
            }
            let options = ExportOptions {
                force: named,
                ..ExportOptions::default()
            };
            let report = export(&source, ExportFormat::Gguf, &model, &options, &()).unwrap();
            let said = |note: &String| note.contains("mmproj-model.gguf");
            assert!(report.notes.iter().any(said), "{:?}", report.notes);
            if !named {
                let refused = Checkpoint::open(&folder).err().unwrap().to_string();
                assert!(refused.contains("image_token_id"), "{refused}");
            }
        }
        let bytes = fs::read(&mmproj).unwrap();
        let file = GgufFile::parse(&mmproj, bytes.clone().into()).unwrap();
        let found: Vec<&String> = file.tensors().keys().collect();
        let mut wanted = [&MMPROJ, more].concat();
        wanted.sort_unstable();
        assert_eq!(found, wanted);

        let found = Checkpoint::open(&folder).unwrap();
        assert_eq!(found.vision(), source.vision());
        assert_eq!(tower(&found), tower(&source));
        assert_eq!(found.tower_bytes(), source.tower_bytes());
        assert_eq!(found.config().rope, source.config().rope);
        let of_tower = |l: &LeftOver| l.name.starts_with("v.") || l.name.starts_with("mm.");
        let left = found.left_over();
        assert!(!left.iter().any(of_tower), "{left:?}");

        // Of several, the one of the model's name; otherwise one in 16 bits, or the first.
        for other in ["mmproj-F32.gguf", "mmproj-BF16.gguf"] {
            fs::write(folder.join(other), &bytes).unwrap();
            let left = |model: &Path| Checkpoint::open(model).unwrap().left_over().to_vec();
            assert!(left(&model).iter().any(|l| l.name == other));
            let renamed = folder.join("m.gguf");
            fs::rename(&model, &renamed).unwrap();
            assert!(left(&renamed).iter().all(|l| l.name != other));
            fs::rename(&renamed, &model).unwrap();
        }
        let kind = bytes.windows(14).position(|w| w == b"qwen3vl_merger");
        let mut other = bytes.clone();
        other[kind.unwrap()..][..14].fill(b'x');
        fs::write(&mmproj, other).unwrap();
        let text = Checkpoint::open(&model).unwrap();
        assert!(text.vision().is_none());
        let said = |l: &LeftOver| l.name == "mmproj-model.gguf" && l.why.contains("Qwen3-VL");
        assert!(text.left_over().iter().any(said), "{:?}", text.left_over());
        for other in ["mmproj-model.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf"] {
            fs::remove_file(folder.join(other)).unwrap();
        }
        assert!(Checkpoint::open(&model).unwrap().vision().is_none());
        fs::write(&mmproj, bytes).unwrap(); // to be looked at
    }
}

/// Devices plan by the schemes of weights, which a tower beside them must not hide.
#[test]
fn a_random_tower_leaves_schemes_known() {
    let config = nq_testkit::models::tiny("qwen35");
    let scheme = AffineScheme::new(Bits::B4, Group::Size(8), Zeros::Integer);
    let some = move |name: &str| is_layer_linear(name).then_some(scheme);
    let plain = || synth::quantized_checkpoint("m", &config, 0, some).unwrap();
    let family = find(|a| a.gguf, "qwen35").unwrap();
    let vision = family.presets.iter().find_map(|preset| preset.vision());
    let (plain, sees) = (plain(), plain().with_random_tower(vision.unwrap(), 0));
    let mut told = 0;
    for (name, _) in parameters(&config) {
        let expected = plain.store().scheme_in_levels(&name);
        assert_eq!(sees.store().scheme_in_levels(&name), expected, "{name}");
        assert_eq!(sees.store().is_float(&name), plain.store().is_float(&name));
        told += usize::from(expected.is_some());
    }
    assert!(told > 0);
}
