//! Mixtures of experts in files: the layouts of published checkpoints, round trips, and files with
//! contradictions.

use crate::common::assert_same;
use nq_formats::export::{Change, ExportFormat, ExportOptions, Mix, compare, export};
use nq_formats::gguf::BlockType;
use nq_formats::serialize::{ShardLayout, TensorSpec, write_folder};
use nq_formats::shards::Shards;
use nq_formats::synth;
use nq_formats::{
    AffineScheme, Bits, Checkpoint, Exactness, Files, Group, Tensor, Weight, Zeros, nq,
};
use nq_model::names::{Shape, is_kept, is_layer_linear, parameters, stack};
use nq_model::{DType, Dims, ModelConfig, Preset};
use nq_testkit::models::experts;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub(crate) fn small() -> ModelConfig {
    ModelConfig {
        hidden_size: 128,
        intermediate_size: 80,
        experts: Some(experts(5, 64, 0)),
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        eos_token_ids: vec![299],
        ..Preset::find("30b-a3b").unwrap().config()
    }
}

/// Rewrites a folder's tensors: `change` gets all of them by name.
pub(crate) fn rewritten(
    from: &Path,
    to: &Path,
    change: impl FnOnce(&mut BTreeMap<String, Tensor>, &mut Map<String, Value>),
) {
    let files = Files::Folder(from.into());
    let shards = Shards::open(&files).unwrap();
    let names = shards.names().map(str::to_owned);
    let mut tensors: BTreeMap<String, Tensor> = names
        .map(|n| (n.clone(), shards.get(&n).unwrap()))
        .collect();
    let mut config: Map<String, Value> =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut tensors, &mut config);
    let spec = |(name, t): (&String, &Tensor)| TensorSpec {
        name: name.clone(),
        dtype: t.dtype(),
        shape: t.shape().to_vec(),
    };
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let layout = ShardLayout::new(tensors.iter().map(spec).collect(), &metadata, u64::MAX);
    let text = Value::Object(config).to_string();
    let others = ["tokenizer.json", "tokenizer_config.json"];
    let mut beside: BTreeMap<String, bytes::Bytes> = others
        .map(|n| (n.to_owned(), fs::read(from.join(n)).unwrap().into()))
        .into();
    beside.insert("config.json".into(), text.into());
    write_folder(to, &beside, &layout, &(), &mut |spec, sink| {
        sink.write(tensors[&spec.name].data())
    })
    .unwrap();
}

/// Asserts that all matrices of two checkpoints are the same.
#[track_caller]
fn assert_equal(a: &Checkpoint, b: &Checkpoint) {
    for (name, shape) in parameters(a.config()) {
        if let Shape::Matrix(rows, cols) = shape {
            let [a, b] = [a, b].map(|m| m.store().matrix(&name, Dims::new(rows, cols)).unwrap());
            assert_same(&a, &b);
        }
    }
}

pub(crate) fn error(path: &Path) -> String {
    match Checkpoint::open(path) {
        Err(e) => e.to_string(),
        Ok(opened) => nq::verify(&opened).unwrap_err().to_string(),
    }
}

#[test]
fn presets_are_the_published_mixtures() {
    let config = |name| Preset::find(name).unwrap().config();
    let c = config("qwen3-30b-a3b");
    assert_eq!(c.parameters(), 30_532_122_624);
    // 3.3 billion: attention, 8 experts and the router of each layer, the head, the embedding.
    assert_eq!(c.active_parameters(), 3_353_032_704);
    for (name, billions) in [("235B-A22B", 235), ("480b-a35b", 480)] {
        assert_eq!(config(name).parameters() / 1_000_000_000, billions);
    }
    for preset in Preset::all().filter(|p| p.config().experts.is_some()) {
        let c = preset.config();
        let text = Value::Object(nq_formats::config::to_json(&c)).to_string();
        assert_eq!(
            nq_formats::config::parse(Path::new("c"), text.as_bytes()).unwrap(),
            c
        );
        // Planned without a weight being drawn.
        let memory = synth::checkpoint("m", &c, 0).unwrap();
        assert_eq!(memory.tensor_bytes(), 2 * c.parameters() as u64);
    }
}

#[test]
fn experts_kept_apart_and_fused_are_the_same_stacks() {
    let dir = tempfile::tempdir().unwrap();
    let apart = dir.path().join("apart");
    synth::write(&apart, &small(), 7, &()).unwrap();
    let folder = Checkpoint::open(&apart).unwrap();
    assert_eq!(folder.config(), &small());
    nq::verify_values(&folder).unwrap();
    assert_eq!(folder.bits_per_weight(), 16.0);
    let shards = Shards::open(&Files::Folder(apart.clone())).unwrap();
    let one = shards.get("model.layers.1.mlp.experts.4.down_proj.weight");
    assert_eq!(one.unwrap().shape(), [128, 64]);
    let memory = synth::checkpoint("m", &small(), 7).unwrap();
    assert_equal(&folder, &memory);
    assert_eq!(folder.tensor_bytes(), memory.tensor_bytes());

    let fused = dir.path().join("fused");
    rewritten(&apart, &fused, |tensors, _| {
        for layer in 0..2 {
            let mut take = |e: usize, linear: &str| {
                let name = format!("model.layers.{layer}.mlp.experts.{e}.{linear}.weight");
                tensors.remove(&name).unwrap().data().to_vec()
            };
            let (mut gate_up, mut down) = (Vec::new(), Vec::new());
            for e in 0..5 {
                gate_up.extend(take(e, "gate_proj"));
                gate_up.extend(take(e, "up_proj"));
                down.extend(take(e, "down_proj"));
            }
            let stack = |shape, data: Vec<u8>| Tensor::new(DType::BF16, shape, data.into());
            let prefix = format!("model.layers.{layer}.mlp.experts");
            let gate_up = stack(vec![5, 128, 128], gate_up).unwrap();
            tensors.insert(format!("{prefix}.gate_up_proj"), gate_up);
            let down = stack(vec![5, 128, 64], down).unwrap();
            tensors.insert(format!("{prefix}.down_proj"), down);
        }
    });
    let opened = Checkpoint::open(&fused).unwrap();
    nq::verify_values(&opened).unwrap();
    assert_equal(&folder, &opened);
    // Another number of experts in as many values.
    let lying = dir.path().join("lying");
    rewritten(&fused, &lying, |_, config| {
        config.insert("num_experts".into(), 10.into());
        config.insert("moe_intermediate_size".into(), 32.into());
    });
    let found = error(&lying);
    assert!(found.contains("gate"), "{found}");
}

/// As transformers keeps them: an FP8 tensor for all experts of a layer, with a scale for each block of each expert.
#[test]
fn fused_experts_in_fp8_have_scales_of_blocks() {
    use nq_formats::import::fp8::e4m3;
    let dir = tempfile::tempdir().unwrap();
    let (apart, fused) = (dir.path().join("apart"), dir.path().join("fused"));
    synth::write(&apart, &small(), 7, &()).unwrap();
    // Codes and scales by their places. Blocks of 48 x 40 do not divide the sides.
    let byte = |at: usize| (at * 7 % 120) as u8 | (at as u8 & 1) << 7;
    let scale = |block: usize| half::bf16::from_f32(0.01 + block as f32 / 512.0);
    rewritten(&apart, &fused, |tensors, config| {
        tensors.retain(|name, _| !name.contains(".mlp.experts."));
        for layer in 0..2 {
            for (part, rows, cols) in [("gate_up_proj", 128, 128), ("down_proj", 128, 64)] {
                let name = format!("model.layers.{layer}.mlp.experts.{part}");
                let bytes: Vec<u8> = (0..5 * rows * cols).map(byte).collect();
                let codes = Tensor::new(DType::F8E4M3, vec![5, rows, cols], bytes.into());
                let blocks = [5usize, 128usize.div_ceil(48), cols.div_ceil(40)];
                let scales = (0..blocks.iter().product()).flat_map(|i| scale(i).to_le_bytes());
                let scales: Vec<u8> = scales.collect();
                let scales = Tensor::new(DType::BF16, blocks.to_vec(), scales.into());
                tensors.insert(format!("{name}_scale_inv"), scales.unwrap());
                tensors.insert(name, codes.unwrap());
            }
        }
        config.insert(
            "quantization_config".into(),
            serde_json::json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]}),
        );
    });
    let opened = Checkpoint::open(&fused).unwrap();
    nq::verify(&opened).unwrap();
    let mut checked = 0;
    for (name, shape) in parameters(&small()) {
        let (Shape::Matrix(rows, cols), Some(_)) = (shape, stack(&name)) else {
            continue;
        };
        let weight = opened.store().matrix(&name, Dims::new(rows, cols)).unwrap();
        assert_eq!(
            opened.store().exactness(&name),
            Exactness::ValuesRounded(DType::BF16)
        );
        let height = rows / 5;
        let first = if name.ends_with("up_proj") { 64 } else { 0 };
        let mut values = vec![0.0; cols];
        for row in 0..rows {
            weight.dequantize_row(row, &mut values).unwrap();
            let (expert, inner) = (row / height, row % height + first);
            for (col, &found) in values.iter().enumerate() {
                let code = e4m3(byte((expert * 128 + inner) * cols + col));
                let block = (expert * 3 + inner / 48) * cols.div_ceil(40) + col / 40;
                let value = half::bf16::from_f32(code * scale(block).to_f32());
                assert_eq!(found, value.to_f32(), "{name} {row} {col}");
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 2 * 5 * 3 * 64 * 128);
}

/// The schemes of parameters: set where a scheme applies, and nowhere else.
fn quantized(scheme: AffineScheme) -> Checkpoint {
    synth::quantized_checkpoint("random", &small(), 3, move |name| {
        is_layer_linear(name).then_some(scheme)
    })
    .unwrap()
}

fn scheme(bits: Bits, zeros: Zeros) -> AffineScheme {
    AffineScheme::new(bits, Group::Size(32), zeros)
}

#[test]
fn every_format_holds_a_mixture() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (format, scheme)) in [
        (
            ExportFormat::CompressedTensors,
            scheme(Bits::B4, Zeros::None),
        ),
        (
            ExportFormat::CompressedTensors,
            scheme(Bits::B8, Zeros::Integer),
        ),
        (ExportFormat::Gptq, scheme(Bits::B4, Zeros::None)),
        (ExportFormat::Gptq, scheme(Bits::B8, Zeros::None)),
        (ExportFormat::Awq, scheme(Bits::B4, Zeros::Integer)),
        (ExportFormat::Gguf, scheme(Bits::B4, Zeros::None)),
        (ExportFormat::Gguf, scheme(Bits::B8, Zeros::None)),
    ]
    .into_iter()
    .enumerate()
    {
        let source = quantized(scheme);
        let out = dir.path().join(format!("{i}.gguf"));
        let report = export(&source, format, &out, &ExportOptions::default(), &()).unwrap();
        let stacks = report.weights.iter().filter(|w| stack(&w.name).is_some());
        assert_eq!(stacks.count(), 6);
        let opened = Checkpoint::open(&out).unwrap();
        assert_eq!(opened.config().experts, small().experts);
        nq::verify_values(&opened).unwrap();
        let differences = compare(&source, &opened, &()).unwrap();
        for d in differences.iter().filter(|d| d.changed > 0) {
            let rounded = format == ExportFormat::CompressedTensors && is_layer_linear(&d.name);
            assert!(rounded && d.relative < 0.01, "{format:?}: {d:?}");
        }
        for (name, shape) in parameters(&small()) {
            let Shape::Matrix(rows, cols) = shape else {
                continue;
            };
            let w = opened.store().matrix(&name, Dims::new(rows, cols)).unwrap();
            let scheme = match &w {
                Weight::Quantized(q) => Some(q.scheme()),
                Weight::Dense(_) => None,
            };
            assert_eq!(
                scheme.is_some(),
                is_layer_linear(&name),
                "{format:?}: {name}"
            );
            assert_eq!(opened.store().is_float(&name), scheme.is_none(), "{name}");
            // Blocks of GGUF are told as they are in levels.
            if format != ExportFormat::Gguf {
                assert_eq!(opened.store().scheme(&name), scheme, "{format:?}: {name}");
            }
        }
        // The same as nq's own folder, which stores stacks as one.
        let own = dir.path().join(format!("{i}-nq"));
        let report = export(
            &opened,
            ExportFormat::Nq,
            &own,
            &ExportOptions::default(),
            &(),
        );
        assert!(report.unwrap().weights.iter().any(|w| is_kept(&w.name)));
        let own = Checkpoint::open(&own).unwrap();
        nq::verify_values(&own).unwrap();
        assert_equal(&opened, &own);
        // Stores over others say what those say, unless they change it.
        for (name, _) in parameters(&small()) {
            let told = own.store().scheme(&name);
            assert_eq!(told.is_some(), is_layer_linear(&name), "{name}");
        }
        let record = nq::record(&own).unwrap().unwrap();
        assert!(
            !record.overrides.keys().any(|name| is_kept(name)),
            "{record:?}"
        );
    }
}

#[test]
fn unquantized_mixtures_become_gguf_and_any_mix_keeps_routers() {
    let dir = tempfile::tempdir().unwrap();
    let source = synth::checkpoint("m", &small(), 7).unwrap();
    for (i, mix) in [Mix::Keep, Mix::All(BlockType::Q8_0), Mix::Q4KM]
        .into_iter()
        .enumerate()
    {
        let out = dir.path().join(format!("{i}.gguf"));
        let options = ExportOptions {
            mix,
            ..ExportOptions::default()
        };
        let report = export(&source, ExportFormat::Gguf, &out, &options, &()).unwrap();
        for w in report.weights.iter().filter(|w| is_kept(&w.name)) {
            assert_eq!((&*w.to, w.change), ("F32", Change::Kept(Exactness::Exact)));
        }
        let opened = Checkpoint::open(&out).unwrap();
        nq::verify_values(&opened).unwrap();
        let entries = opened.store().entries();
        let shape = |name: &str| &entries.iter().find(|e| e.name == name).unwrap().shape;
        assert_eq!(shape("blk.1.ffn_gate_exps.weight"), &[5, 64, 128]);
        assert_eq!(shape("blk.1.ffn_down_exps.weight"), &[5, 128, 64]);
        assert_eq!(shape("blk.0.ffn_gate_inp.weight"), &[5, 128]);
        if mix == Mix::Keep {
            let differences = compare(&source, &opened, &()).unwrap();
            assert!(
                differences.iter().all(|d| d.changed == 0),
                "{differences:?}"
            );
        }
    }
    let mut other = small();
    other.experts.as_mut().unwrap().normalized = false;
    let source = synth::checkpoint("m", &other, 7).unwrap();
    let out = dir.path().join("other.gguf");
    let refused = export(
        &source,
        ExportFormat::Gguf,
        &out,
        &ExportOptions::default(),
        &(),
    );
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("norm_topk_prob"), "{refused}");
}

/// FP8 as in the official checkpoints: blocks of 128 of each expert.
#[test]
fn experts_in_fp8_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, fp8) = (dir.path().join("plain"), dir.path().join("fp8"));
    synth::write(&plain, &small(), 7, &()).unwrap();
    rewritten(&plain, &fp8, |tensors, config| {
        config.insert(
            "quantization_config".into(),
            json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 16]}),
        );
        let names: Vec<String> = tensors.keys().cloned().collect();
        for name in names.iter().filter(|n| n.contains("_proj")) {
            let shape = tensors[name].shape().to_vec();
            let values = (0..shape[0] * shape[1])
                .map(|i| (i * 7 % 100) as u8)
                .collect::<Vec<_>>();
            let weight = Tensor::new(DType::F8E4M3, shape.clone(), values.into());
            tensors.insert(name.clone(), weight.unwrap());
            let blocks = vec![shape[0].div_ceil(32), shape[1].div_ceil(16)];
            let scales = (0..blocks[0] * blocks[1])
                .map(|i| 0.001 * (i + 1) as f32)
                .collect();
            let scales = Tensor::from_f32(blocks, scales).unwrap();
            tensors.insert(name.replace(".weight", ".weight_scale_inv"), scales);
        }
    });
    let opened = Checkpoint::open(&fp8).unwrap();
    nq::verify_values(&opened).unwrap();
    let name = "model.layers.0.mlp.experts.up_proj";
    let weight = opened.store().matrix(name, Dims::new(5 * 64, 128)).unwrap();
    let stored = opened.store().stored(name, Dims::new(5 * 64, 128)).unwrap();
    let (mut a, mut b) = ([0.0; 128], [0.0; 128]);
    weight.dequantize_row(3 * 64 + 1, &mut a).unwrap();
    stored.dequantize_row(3 * 64 + 1, &mut b).unwrap();
    // Row 1 of expert 3, column 17: the second block of the first four.
    let code = ((128 + 17) * 7 % 100) as u8;
    let value = nq_formats::import::fp8::e4m3(code) * 0.002;
    assert!((b[17] - value).abs() < 1e-9 && (a[17] - value).abs() <= value.abs() / 256.0);
    assert_eq!(
        opened.store().exactness(name),
        Exactness::ValuesRounded(DType::BF16)
    );
}

#[test]
fn configurations_say_what_they_mean_or_are_refused() {
    let parse = |change: &dyn Fn(&mut Map<String, Value>)| {
        let mut json = nq_formats::config::to_json(&small());
        change(&mut json);
        let text = Value::Object(json).to_string();
        nq_formats::config::parse(Path::new("config.json"), text.as_bytes())
    };
    let set = |key: &'static str, value: Value| {
        parse(&move |json| {
            json.insert(key.into(), value.clone());
        })
    };
    let experts = |c: nq_formats::Result<ModelConfig>| c.unwrap().experts.unwrap();
    assert_eq!(Some(experts(parse(&|_| {}))), small().experts);
    let missing = |key: &'static str| {
        parse(&move |json| {
            json.shift_remove(key);
        })
    };
    assert!(!experts(missing("norm_topk_prob")).normalized);
    for key in ["mlp_only_layers", "decoder_sparse_step"] {
        assert_eq!(Some(experts(missing(key))), small().experts);
    }
    // transformers 5 has another key for the count.
    let renamed = parse(&|json| {
        let count = json.shift_remove("num_experts").unwrap();
        json.insert("num_local_experts".into(), count);
    });
    assert_eq!(Some(experts(renamed)), small().experts);
    let coder = parse(&|json| {
        json.shift_remove("attention_bias");
        json.extend([
            ("shared_expert_intermediate_size".to_owned(), json!(0)),
            ("qkv_bias".to_owned(), json!(false)),
            ("use_qk_norm".to_owned(), json!(true)),
        ]);
    });
    assert_eq!(Some(experts(coder)), small().experts);
    for (result, named) in [
        (set("mlp_only_layers", json!([1])), "mlp_only_layers with 1"),
        (
            set("decoder_sparse_step", json!(2)),
            "decoder_sparse_step 2",
        ),
        (
            set("shared_expert_intermediate_size", json!(64)),
            "shared_expert",
        ),
        (set("use_qk_norm", json!(false)), "use_qk_norm"),
        (set("qkv_bias", json!(true)), "qkv_bias"),
        (set("num_experts", json!(0)), "num_experts"),
        (set("num_experts", json!(1u64 << 40)), "num_experts"),
        (set("num_experts", json!(70_000)), "at most 65536"),
        (set("num_experts", json!(1)), "num_experts_per_tok"),
        (set("num_experts_per_tok", json!(0)), "num_experts_per_tok"),
        (set("num_experts_per_tok", json!(6)), "num_experts_per_tok"),
        (set("num_local_experts", json!(6)), "num_local_experts"),
        (
            set("moe_intermediate_size", json!(0)),
            "moe_intermediate_size",
        ),
        (set("norm_topk_prob", json!("yes")), "norm_topk_prob"),
        (missing("num_experts"), "num_"),
        (missing("moe_intermediate_size"), "moe_intermediate_size"),
    ] {
        let found = result.unwrap_err().to_string();
        assert!(found.contains(named), "{named}: {found}");
    }
}

#[test]
fn files_that_lie_about_experts_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain");
    synth::write(&plain, &small(), 7, &()).unwrap();
    type Change = fn(&mut BTreeMap<String, Tensor>, &mut Map<String, Value>);
    let cases: [(&str, Change); 6] = [
        ("model.layers.1.mlp.experts.3.up_proj.weight", |t, _| {
            t.remove("model.layers.1.mlp.experts.3.up_proj.weight");
        }),
        // One expert more than the configuration says.
        ("num_experts", |t, _| {
            let name = "model.layers.0.mlp.experts.4.gate_proj.weight";
            let more = t[name].clone();
            t.insert(name.replace(".4.", ".5."), more);
        }),
        ("[6, 128], found BF16 [5, 128]", |_, c| {
            c.insert("num_experts".into(), 6.into());
        }),
        ("model.layers.0.mlp.gate.weight", |t, _| {
            let router = t["model.layers.0.mlp.gate.weight"]
                .data()
                .slice(..4 * 128 * 2);
            let router = Tensor::new(DType::BF16, vec![4, 128], router).unwrap();
            t.insert("model.layers.0.mlp.gate.weight".into(), router);
        }),
        ("model.layers.0.mlp.experts.2.down_proj.weight", |t, _| {
            let name = "model.layers.0.mlp.experts.2.down_proj.weight";
            let turned = Tensor::new(DType::BF16, vec![64, 128], t[name].data().clone());
            t.insert(name.into(), turned.unwrap());
        }),
        ("BF16, as the first, found F16 at expert 1", |t, _| {
            let name = "model.layers.0.mlp.experts.1.gate_proj.weight";
            let other = Tensor::new(DType::F16, vec![64, 128], t[name].data().clone());
            t.insert(name.into(), other.unwrap());
        }),
    ];
    for (i, (named, change)) in cases.into_iter().enumerate() {
        let lying = dir.path().join(i.to_string());
        rewritten(&plain, &lying, change);
        let found = error(&lying);
        assert!(found.contains(named), "{named}: {found}");
    }
    let nan = dir.path().join("nan");
    rewritten(&plain, &nan, |t, _| {
        let name = "model.layers.1.mlp.experts.3.up_proj.weight";
        let mut data = t[name].data().to_vec();
        data[2 * (128 * 2 + 5)..][..2].copy_from_slice(&[0xFF, 0x7F]);
        let weight = Tensor::new(DType::BF16, vec![64, 128], data.into()).unwrap();
        t.insert(name.into(), weight);
    });
    let opened = Checkpoint::open(&nan).unwrap();
    let found = nq::verify_values(&opened).unwrap_err().to_string();
    let row = 3 * 64 + 2;
    let named = format!("row {row}, column 5");
    assert!(
        found.contains("mlp.experts.up_proj") && found.contains(&named),
        "{found}"
    );
}
