//! Runs the fuzz targets over `fuzz/seeds` and mutations of valid files, so that every test run
//! tries some.

#[path = "../../fuzz/src/targets.rs"]
mod targets;

use crate::common::{Rng, assets, random_affine, random_dense, safetensors};
use nq_formats::export::Mix;
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::gguf::{BlockType, GgufFile, GgufPlan, Value};
use nq_formats::nq::{Opened, Param, QuantizationRecord, Writer, WriterOptions};
use nq_formats::serialize::write_tensors;
use nq_formats::{
    AffineScheme, Bits, Checkpoint, Files, Group, QuantizedWeight, Tensor, Weight, Zeros,
};
use nq_model::names::{Shape, expert_name, is_layer_linear, parameters, stack};
use nq_model::{DType, Dims};
use std::fs;
use std::path::Path;

/// Fragments of these kinds of files, inserted at random places.
const TOKENS: [&str; 20] = [
    "null",
    "-1",
    "0",
    "1e999",
    "18446744073709551615",
    "4294967296",
    "[]",
    "{}",
    "\"",
    "}",
    "\"data_offsets\":[0,8]",
    "\"dtype\":\"F4\"",
    "\"bits\":3",
    "\"group\":0",
    "true",
    "\u{0}",
    "\"yarn\"",
    "[[[[[[[[[[",
    "nan",
    ",",
];

fn mutate(rng: &mut Rng, seed: &[u8]) -> Vec<u8> {
    let mut data = seed.to_vec();
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(data.len().max(1));
        match rng.below(6) {
            0 if !data.is_empty() => data[at] ^= 1 << rng.below(8),
            1 => data.truncate(at),
            2 => {
                let token = TOKENS[rng.below(TOKENS.len())].bytes();
                drop(data.splice(at..at, token));
            }
            3 => {
                let end = (at + rng.below(20)).min(data.len());
                drop(data.drain(at.min(end)..end));
            }
            4 if !data.is_empty() => {
                let end = (at + rng.below(40)).min(data.len());
                let copy = data[at..end].to_vec();
                let to = rng.below(data.len());
                drop(data.splice(to..to, copy));
            }
            _ if !data.is_empty() => {
                // Change a digit: of lengths, offsets and shapes.
                let digits: Vec<usize> = (0..data.len())
                    .filter(|&i| data[i].is_ascii_digit())
                    .collect();
                if !digits.is_empty() {
                    data[digits[rng.below(digits.len())]] = b'0' + rng.below(10) as u8;
                }
            }
            _ => {}
        }
    }
    // Half of the files get a header length that fits again, to reach the code behind it.
    if rng.below(2) == 0
        && let Some(end) = data.iter().position(|&b| b == b'\n')
        && data.len() > 8
        && end > 8
    {
        data[..8].copy_from_slice(&(end as u64 - 8).to_le_bytes());
    }
    data
}

/// Runs `target`, called `name`, on every file of `fuzz/seeds/NAME`, every seed and `rounds` mutations of each.
fn run(name: &str, target: fn(&[u8]), seeds: &[Vec<u8>], rounds: usize) {
    nq_testkit::fuzz::replay(name, target, seeds);
    let mut rng = Rng(1);
    for seed in seeds {
        target(seed);
        for _ in 0..rounds {
            let data = mutate(&mut rng, seed);
            target(&data);
        }
    }
}

#[test]
fn safetensors_files() {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
        r#""b":{"dtype":"U8","shape":[0,3],"data_offsets":[8,8]},"#,
        r#""c":{"dtype":"BF16","shape":[2,2],"data_offsets":[8,16]}}"#,
        "\n"
    );
    run(
        "safetensors",
        targets::safetensors,
        &[safetensors(header, &[7; 16])],
        30_000,
    );
}

#[test]
fn configs() {
    let demo = |name: &str| fs::read(nq_testkit::demo().join(name)).unwrap();
    let yarn = format!(
        r#"{{{},"rope_scaling":{{"rope_type":"yarn","factor":4.0,
        "original_max_position_embeddings":32}}}}"#,
        targets::SHAPE
    );
    let nested = format!("{{{}}}", targets::SHAPE).replace(
        r#""rope_theta":10000.0"#,
        r#""rope_parameters":{"rope_theta":5e5,"rope_type":"default"}"#,
    );
    let tokenizer = br#"{"added_tokens":[{"id":3}],"model":{"vocab":{"a":0,"b":1}}}"#;
    let seeds = [
        demo("config.json"),
        demo("generation_config.json"),
        yarn.into_bytes(),
        nested.into_bytes(),
        format!("{{{}}}", targets::MIXTURE).into_bytes(),
        tokenizer.to_vec(),
    ];
    run("config", targets::config, &seeds, 6_000);
}

#[test]
fn changes_to_a_folder() {
    let names = [
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.weight",
        "v_head.summary.weight",
        "sliding_window",
        "rope_theta_",
        "logit_scale",
        "",
    ];
    let seed = |(i, name): (usize, &&str)| [&[i as u8, 3 * i as u8], name.as_bytes()].concat();
    let mut seeds: Vec<Vec<u8>> = names.iter().enumerate().map(seed).collect();
    // Every tensor dropped, and renamed.
    seeds.extend((0..13).flat_map(|place| [vec![2, place], vec![1, place, b'x']]));
    // Likewise of a hybrid with an MTP layer.
    seeds.extend((0..48).flat_map(|place| [vec![6, place], vec![5, place, b'x']]));
    seeds.push(b"\x01\x00lm_head.weight".to_vec());
    run("account", targets::account, &seeds, 100);
}

/// An nq folder of the shape that the target uses, in the form of its input.
fn nq_seed(scheme: AffineScheme, with_g_idx: bool) -> Vec<u8> {
    let config = format!("{{{}}}", targets::SHAPE);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), &config).unwrap();
    let dest = dir.path().join("out");
    let source = Files::Folder(dir.path().into());
    let plan = serde_json::Value::Null;
    let Opened::Writer(writer) =
        Writer::open(&dest, &source, &plan, WriterOptions::default()).unwrap()
    else {
        panic!("nothing is complete")
    };
    let mut rng = Rng(3);
    let shape = nq_formats::config::parse(Path::new("c"), config.as_bytes()).unwrap();
    for (name, shape) in parameters(&shape) {
        let (vector, matrix);
        let param = match shape {
            Shape::Vector(n) => {
                vector = random_dense(&mut rng, &[n]);
                Param::Vector(&vector)
            }
            Shape::Matrix(r, c) => {
                let weight = random_affine(&mut rng, scheme, Dims::new(r, c), with_g_idx);
                matrix = Weight::Quantized(QuantizedWeight::Affine(weight));
                Param::Matrix(&matrix)
            }
        };
        writer.put(&name, &[(name.clone(), param)]).unwrap();
    }
    writer.finish(QuantizationRecord::default(), &()).unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(dest.join("config.json")).unwrap()).unwrap();
    let mut seed = config["quantization_config"].to_string().into_bytes();
    seed.push(0);
    seed.extend(fs::read(dest.join("model.safetensors")).unwrap());
    seed
}

/// A part of a quantized weight: suffix of its name, type, shape.
type PartShape = (&'static str, DType, Vec<usize>);

/// A folder in another tool's format for a model of this shape: `settings` and, for each Linear
/// `[out, in]`, with experts separate, its `parts`, filled with one byte.
fn imported_seed(
    shape: &str,
    settings: &str,
    parts: impl Fn(usize, usize) -> Vec<PartShape>,
) -> Vec<u8> {
    let config = format!("{{{shape}}}");
    let shape = nq_formats::config::parse(Path::new("c"), config.as_bytes()).unwrap();
    let own = |name: String, rows: usize| match stack(&name) {
        None => vec![(name, rows)],
        Some(linear) => {
            let n = linear.copies(&shape);
            (0..n).map(|e| (expert_name(&name, e), rows / n)).collect()
        }
    };
    let mut tensors = Vec::new();
    let mut rng = Rng(4);
    for (name, shape) in parameters(&shape) {
        match shape {
            Shape::Matrix(rows, cols) if is_layer_linear(&name) => {
                for (name, rows) in own(name, rows) {
                    for (suffix, dtype, shape) in parts(rows, cols) {
                        let bytes = shape.iter().product::<usize>() * dtype.size();
                        // Floats of 32 bits are then .75, others small.
                        let byte = if dtype == DType::F32 { 0x3F } else { 1 };
                        let tensor = Tensor::new(dtype, shape, vec![byte; bytes].into()).unwrap();
                        tensors.push((format!("{name}{suffix}"), tensor));
                    }
                }
            }
            _ => {
                let tensor = random_dense(&mut rng, &shape.dims());
                tensors.push((format!("{name}.weight"), tensor));
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write_tensors(&path, &tensors, &Default::default()).unwrap();
    let mut seed = settings.as_bytes().to_vec();
    seed.push(0);
    seed.extend(fs::read(path).unwrap());
    seed
}

#[test]
fn quantized_folders() {
    let gptq = r#"{"quant_method":"gptq","bits":4,"group_size":8,"desc_act":false}"#;
    let awq = r#"{"quant_method":"awq","bits":4,"group_size":8,"zero_point":true}"#;
    let packed = r#"{"quant_method":"compressed-tensors","format":"pack-quantized",
        "config_groups":{"g":{"weights":{"num_bits":4,"symmetric":false,"type":"int",
        "strategy":"group","group_size":8}}}}"#;
    let fp8 = r#"{"quant_method":"fp8","fmt":"e4m3","weight_block_size":[8,8]}"#;
    let modelopt = r#"{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION"}"#;
    let floats = r#"{"quant_method":"compressed-tensors","format":"mixed-precision",
        "config_groups":{"g":{"weights":{"num_bits":4,"type":"float","strategy":"tensor_group",
        "group_size":16}}}}"#;
    use DType::{BF16, F8E4M3, F16, F32, I32, U8};
    let scheme = |bits, zeros| AffineScheme::new(bits, Group::Size(4), zeros);
    let of_gptq = |rows: usize, cols: usize| {
        vec![
            (".qweight", I32, vec![cols / 8, rows]),
            (".qzeros", I32, vec![cols / 8, rows / 8]),
            (".scales", F16, vec![cols / 8, rows]),
        ]
    };
    let of_awq = |rows: usize, cols: usize| {
        vec![
            (".qweight", I32, vec![cols, rows / 8]),
            (".qzeros", I32, vec![cols / 8, rows / 8]),
            (".scales", F16, vec![cols / 8, rows]),
        ]
    };
    let of_packed = |rows: usize, cols: usize| {
        vec![
            (".weight_packed", I32, vec![rows, cols / 8]),
            (".weight_scale", BF16, vec![rows, cols / 8]),
            (".weight_zero_point", I32, vec![rows / 8, cols / 8]),
        ]
    };
    let of_fp8 = |rows: usize, cols: usize| {
        vec![
            (".weight", F8E4M3, vec![rows, cols]),
            (".weight_scale_inv", BF16, vec![rows / 8, cols / 8]),
        ]
    };
    // Weights with 16 inputs in NVFP4, the others in FP8.
    let small_floats = |rows: usize, cols: usize, [codes, whole]: [&'static str; 2]| match cols % 16
    {
        0 => vec![
            (codes, U8, vec![rows, cols / 2]),
            (".weight_scale", F8E4M3, vec![rows, cols / 16]),
            (whole, F32, vec![1]),
        ],
        _ => vec![
            (".weight", F8E4M3, vec![rows, cols]),
            (".weight_scale", F32, vec![rows, 1]),
        ],
    };
    let of_modelopt =
        |rows: usize, cols: usize| small_floats(rows, cols, [".weight", ".weight_scale_2"]);
    let of_floats = |rows: usize, cols: usize| {
        small_floats(rows, cols, [".weight_packed", ".weight_global_scale"])
    };
    let (dense, mixture) = (targets::SHAPE, targets::MIXTURE);
    let seeds = [
        (dense, nq_seed(scheme(Bits::B4, Zeros::None), false)),
        (dense, nq_seed(scheme(Bits::B4, Zeros::Integer), true)),
        (dense, nq_seed(scheme(Bits::B4, Zeros::Offset), false)),
        (dense, imported_seed(dense, gptq, of_gptq)),
        (dense, imported_seed(dense, awq, of_awq)),
        (dense, imported_seed(dense, packed, of_packed)),
        (dense, imported_seed(dense, fp8, of_fp8)),
        (dense, imported_seed(dense, modelopt, of_modelopt)),
        (dense, imported_seed(dense, floats, of_floats)),
        (mixture, imported_seed(mixture, gptq, of_gptq)),
        (mixture, imported_seed(mixture, modelopt, of_modelopt)),
        (mixture, imported_seed(mixture, fp8, of_fp8)),
        (
            dense,
            nq_seed(scheme(Bits::B6, Zeros::Offset).two_level(Bits::B5), true),
        ),
        (
            dense,
            nq_seed(scheme(Bits::B3, Zeros::Integer).with_table(), false),
        ),
    ];
    // The seeds themselves must open: otherwise no mutation would reach the reader.
    for (shape, seed) in &seeds {
        let end = seed.iter().position(|b| *b == 0).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let record = std::str::from_utf8(&seed[..end]).unwrap();
        let config = format!(r#"{{{shape},"quantization_config":{record}}}"#);
        fs::write(dir.path().join("config.json"), config).unwrap();
        fs::write(dir.path().join("model.safetensors"), &seed[end + 1..]).unwrap();
        let opened = Checkpoint::open(dir.path()).unwrap();
        nq_formats::nq::verify(&opened).unwrap();
    }
    let seeds = seeds.map(|(_, seed)| seed);
    run("folder", targets::folder, &seeds, 5_000);
}

/// The demo model's tokenizer with a vocabulary of a few tokens.
fn small_tokenizer() -> String {
    let demo = fs::read(assets().join("demo/tokenizer.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&demo).unwrap();
    tokenizer["added_tokens"] = serde_json::json!([]);
    tokenizer["model"]["vocab"] = serde_json::json!({"a": 0, "b": 1, "ab": 2, "c": 3});
    tokenizer["model"]["merges"] = serde_json::json!([["a", "b"]]);
    tokenizer.to_string()
}

/// A GGUF model of the shape of [`nq_seed`], with tensors of `kind`.
fn gguf_seed(kind: BlockType) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    // Rows of one whole block.
    let width = kind.elements().max(32);
    let config = format!("{{{}}}", targets::SHAPE)
        .replace("\"hidden_size\":8", &format!("\"hidden_size\":{width}"))
        .replace(
            "\"intermediate_size\":16",
            &format!("\"intermediate_size\":{width}"),
        )
        .replace("\"head_dim\":8", &format!("\"head_dim\":{}", width / 2));
    let shape = nq_formats::config::parse(Path::new("c"), config.as_bytes()).unwrap();
    let mut rng = Rng(5);
    let tensors: Vec<_> = parameters(&shape)
        .into_iter()
        .map(|(name, shape)| {
            let tensor = random_dense(&mut rng, &shape.dims());
            (format!("{name}.weight"), tensor)
        })
        .collect();
    let weights = dir.path().join("model.safetensors");
    write_tensors(&weights, &tensors, &Default::default()).unwrap();
    fs::write(dir.path().join("config.json"), &config).unwrap();
    fs::write(dir.path().join("tokenizer.json"), small_tokenizer()).unwrap();
    let source = Checkpoint::open(dir.path()).unwrap();
    let out = dir.path().join("x.gguf");
    let options = ExportOptions {
        mix: Mix::All(kind),
        ..ExportOptions::default()
    };
    export(&source, ExportFormat::Gguf, &out, &options, &()).unwrap();
    fs::read(out).unwrap()
}

/// A GGUF file with one tensor of each type and no model.
fn gguf_types() -> Vec<u8> {
    let mut plan = GgufPlan::new();
    plan.set("general.architecture", Value::String("qwen3".into()));
    for kind in BlockType::all() {
        let shape = vec![2, kind.elements()];
        plan.add(format!("t.{kind}"), kind, shape).unwrap();
    }
    let mut rng = Rng(6);
    let mut file = plan.head();
    for tensor in plan.tensors() {
        file.extend((0..tensor.bytes()).map(|_| rng.below(256) as u8));
        file.resize(file.len().next_multiple_of(32), 0);
    }
    file
}

#[test]
fn gguf_blocks() {
    let mut rng = Rng(7);
    let kinds = BlockType::all().filter(|k| k.layout().is_some());
    let seeds: Vec<Vec<u8>> = kinds
        .map(|kind| {
            let mut seed = vec![kind.id() as u8];
            seed.extend((0..2 * kind.bytes()).map(|_| rng.below(256) as u8));
            seed
        })
        .collect();
    run("blocks", targets::blocks, &seeds, 200);
}

#[test]
fn gguf_files() {
    let kinds = [
        BlockType::F16,
        BlockType::Q4_K,
        BlockType::Q6_K,
        BlockType::Q5_0,
    ];
    let seeds = kinds.map(gguf_seed);
    for seed in &seeds {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gguf");
        fs::write(&path, seed).unwrap();
        nq_formats::nq::verify(&Checkpoint::open(&path).unwrap()).unwrap();
    }
    let types = gguf_types();
    GgufFile::parse(Path::new("x.gguf"), types.clone().into()).unwrap();
    run("gguf", targets::gguf, &[&seeds[..], &[types]].concat(), 300);
}
