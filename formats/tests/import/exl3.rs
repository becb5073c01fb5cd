//! EXL3: weights expanded value by value from the description of the format, and files that contradict it.

use crate::common::{Rng, names, random_dense};
use half::f16;
use nq_formats::serialize::write_tensors;
use nq_formats::{Checkpoint, Exactness, QuantizedWeight, Scheme, Tensor, Weight, nq};
use nq_model::names::{Shape, expert_name, is_layer_linear, parameters, stack};
use nq_model::{DType, Dims};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const CONFIG: &str = r#"{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":128,
    "intermediate_size":256,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":2,"head_dim":64,
    "vocab_size":128,"max_position_embeddings":32,"rms_norm_eps":1e-6,"rope_theta":10000.0,"eos_token_id":3,
    "tie_word_embeddings":false,
    "quantization_config":{"quant_method":"exl3","version":"1.6.5","bits":2.5,"head_bits":6,"codebook":"mul1"}}"#;

fn integers(shape: &[usize], values: impl Iterator<Item = i16>) -> Tensor {
    let data: Vec<u8> = values.flat_map(i16::to_le_bytes).collect();
    Tensor::new(DType::I16, shape.to_vec(), data.into()).unwrap()
}

fn halves(values: &[f32]) -> Tensor {
    let data = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes());
    let data: Vec<u8> = data.collect();
    Tensor::new(DType::F16, vec![values.len()], data.into()).unwrap()
}

fn scalar(value: u32) -> Tensor {
    let data = value.to_le_bytes().to_vec();
    Tensor::new(DType::I32, vec![], data.into()).unwrap()
}

/// Twice the bits of a weight, the multiplier that it names, and whether it has signs instead of scales.
type Kind = (usize, Option<(&'static str, u32)>, bool);

const KINDS: [Kind; 7] = [
    (4, None, false),
    (7, Some((".mul1", 0x83DC_D12D)), false),
    (6, Some((".mcg", 0xCBAC_1FED)), true),
    (8, Some((".mul1", 0x83DC_D12D)), false),
    (12, None, true),
    (16, Some((".mcg", 0xCBAC_1FED)), false),
    (3, Some((".mul1", 0x83DC_D12D)), false),
];

/// A random weight's tensors, and its values `[out, in]`.
fn random(
    rng: &mut Rng,
    kind: Kind,
    Dims { rows, cols }: Dims,
) -> (Vec<(String, Tensor)>, Vec<f64>) {
    let (half_bits, code, signs_alone) = kind;
    let width = 8 * half_bits;
    let packed: Vec<u16> = (0..cols / 16 * (rows / 16) * width)
        .map(|_| rng.next() as u16)
        .collect();
    let scales = |rng: &mut Rng, n: usize| -> Vec<f32> {
        let scale = |rng: &mut Rng| match (rng.signed(), signs_alone) {
            (v, true) => v.signum(),
            (v, false) => f16::from_f32(v + 0.01 * v.signum()).to_f32(),
        };
        (0..n).map(|_| scale(rng)).collect()
    };
    let (inputs, outputs) = (scales(rng, cols), scales(rng, rows));
    let mut turned = vec![0f64; cols * rows];
    for (tile, packed) in packed.chunks_exact(width).enumerate() {
        let (down, across) = (tile / (rows / 16), tile % (rows / 16));
        let mut bits = Vec::new();
        for pair in packed.chunks_exact(2) {
            let word = u32::from(pair[1]) << 16 | u32::from(pair[0]);
            bits.extend((0..32).rev().map(|i| word >> i & 1));
        }
        let mut end = 0;
        for t in 0..256 {
            end += half_bits / 2 + (half_bits % 2) * (t % 2);
            let state = (0..16).fold(0u32, |s, i| {
                s << 1 | bits[(bits.len() + end - 16 + i) % bits.len()]
            });
            let value = match code {
                Some((".mul1", multiplier)) => {
                    let hash = state.wrapping_mul(multiplier);
                    let sum: u32 = (0..4).map(|i| hash >> (8 * i) & 255).sum();
                    let half = |bits| f16::from_bits(bits).to_f64();
                    f16::from_f64(f64::from(1024 + sum) * half(0x1EEE) + half(0xC931)).to_f64()
                }
                other => {
                    let hash = match other {
                        None => state.wrapping_mul(89_226_354).wrapping_add(64_248_484),
                        Some((_, multiplier)) => state.wrapping_mul(multiplier),
                    };
                    let both = (hash & 0x8FFF_8FFF) ^ 0x3B60_3B60;
                    let half = |bits: u32| f16::from_bits(bits as u16).to_f64();
                    f16::from_f64(half(both) + half(both >> 16)).to_f64()
                }
            };
            let (lane, j) = (t / 8, t % 8);
            let input = 16 * down + 2 * (lane % 4) + j % 2 + if j & 2 != 0 { 8 } else { 0 };
            let output = 16 * across + lane / 4 + if j & 4 != 0 { 8 } else { 0 };
            turned[input * rows + output] = value;
        }
    }
    // Sums of 128 by 128, sign by sign.
    let sign = |i: usize, j: usize| 1.0 - 2.0 * f64::from(((i % 128) & (j % 128)).count_ones() % 2);
    let mut half = vec![0f64; cols * rows];
    for input in 0..cols {
        for from in input / 128 * 128..input / 128 * 128 + 128 {
            for output in 0..rows {
                half[input * rows + output] += sign(input, from) * turned[from * rows + output];
            }
        }
    }
    let mut values = vec![0f64; rows * cols];
    for output in 0..rows {
        for input in 0..cols {
            let first = output / 128 * 128;
            let sum: f64 = (first..first + 128)
                .map(|from| sign(output, from) * half[input * rows + from])
                .sum();
            let scales = f64::from(inputs[input]) * f64::from(outputs[output]);
            values[output * cols + input] = sum / 128.0 * scales;
        }
    }
    let trellis = packed.into_iter().map(|w| w as i16);
    let mut tensors = vec![(
        ".trellis".to_owned(),
        integers(&[cols / 16, rows / 16, width], trellis),
    )];
    for (values, names) in [(inputs, [".suh", ".su"]), (outputs, [".svh", ".sv"])] {
        tensors.push(match signs_alone {
            false => (names[0].into(), halves(&values)),
            true => {
                let word = |signs: &[f32]| {
                    let bits = (0..16).filter(|i| signs[*i] < 0.0);
                    bits.fold(0u16, |word, i| word | 1 << i) as i16
                };
                let words = values.chunks(16).map(word);
                (names[1].into(), integers(&[values.len() / 16], words))
            }
        });
    }
    tensors.extend(code.map(|(suffix, multiplier)| (suffix.to_owned(), scalar(multiplier))));
    (tensors, values)
}

/// Of parts of 128 x 128 of projections that exllamav3 1.6.5 has quantized, some columns are as exllamav3 computes
/// them (`fixtures/exl3.py`), up to its rounding to f16.
#[test]
fn weights_are_those_of_exllamav3() {
    let fixture = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/exl3.safetensors"
    );
    let bytes = fs::read(fixture).unwrap();
    let fixture = SafeTensors::deserialize(&bytes).unwrap();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let config = nq_formats::config::parse(Path::new("c"), CONFIG.as_bytes()).unwrap();
    let part_of = |code: &str, part: &str| fixture.tensor(&format!("{code}.{part}")).unwrap();
    let layer = "model.layers.0.self_attn";
    let weights = [
        (format!("{layer}.q_proj"), "first"),
        (format!("{layer}.k_proj"), "mcg"),
    ];
    let mut tensors = vec![(format!("{layer}.k_proj.mcg"), scalar(0xCBAC_1FED))];
    for (name, code) in &weights {
        for (part, dtype) in [
            ("trellis", DType::I16),
            ("suh", DType::F16),
            ("svh", DType::F16),
        ] {
            let from = part_of(code, part);
            let data = from.data().to_vec().into();
            let tensor = Tensor::new(dtype, from.shape().to_vec(), data).unwrap();
            tensors.push((format!("{name}.{part}"), tensor));
        }
    }
    let mut rng = Rng(6);
    for (name, shape) in parameters(&config) {
        if weights.iter().all(|(own, _)| *own != name) {
            let tensor = random_dense(&mut rng, &shape.dims());
            tensors.push((format!("{name}.weight"), tensor));
        }
    }
    let path = dir.path().join("model.safetensors");
    write_tensors(&path, &tensors, &BTreeMap::new()).unwrap();
    let opened = Checkpoint::open(dir.path()).unwrap();
    for (name, code) in &weights {
        let stored = opened.store().stored(name, Dims::new(128, 128)).unwrap();
        let (halves, _) = part_of(code, "columns").data().as_chunks::<2>();
        let columns: Vec<f32> = (halves.iter())
            .map(|b| f16::from_le_bytes(*b).to_f32())
            .collect();
        let size = columns.iter().fold(0f32, |m, v| m.max(v.abs()));
        assert!(size > 0.0);
        let mut row = vec![0f32; 128];
        for output in 0..128 {
            stored.dequantize_row(output, &mut row).unwrap();
            for (nth, input) in [0, 17, 34, 51, 68, 85, 102, 127].into_iter().enumerate() {
                let (found, expected) = (row[input], columns[nth * 128 + output]);
                assert!(
                    (found - expected).abs() < 2e-3 * size,
                    "{name}: {found} for {expected} at {output}, {input}"
                );
            }
        }
    }
}

/// Experts of a layer that are alike are a stack in their codes, with the scales of inputs of each; others are values.
#[test]
fn experts_are_stacks_of_codes() {
    let dir = tempfile::tempdir().unwrap();
    let config = CONFIG
        .replace("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
        .replace("\"qwen3\"", "\"qwen3_moe\"")
        .replace(
            "\"num_hidden_layers\":1",
            "\"num_hidden_layers\":2,\"num_experts\":2,\"num_experts_per_tok\":1,\"moe_intermediate_size\":256,\
             \"norm_topk_prob\":true",
        );
    fs::write(dir.path().join("config.json"), &config).unwrap();
    let config = nq_formats::config::parse(Path::new("c"), config.as_bytes()).unwrap();
    let whole = KINDS
        .into_iter()
        .filter(|(half_bits, ..)| half_bits % 2 == 0);
    let (mut rng, mut tensors, mut stacks) = (Rng(7), Vec::new(), Vec::new());
    let mut kinds = whole.cycle();
    for (name, shape) in parameters(&config) {
        match shape {
            Shape::Matrix(rows, cols) if stack(&name).is_some() => {
                let mut kind = kinds.next().unwrap();
                for expert in 0..2 {
                    // Those of the second layer differ.
                    if name.contains("layers.1.") {
                        kind = kinds.next().unwrap();
                    }
                    let (parts, _) = random(&mut rng, kind, Dims::new(rows / 2, cols));
                    let name = expert_name(&name, expert);
                    tensors.extend(parts.into_iter().map(|(s, t)| (format!("{name}{s}"), t)));
                }
                stacks.push((name, Dims::new(rows, cols)));
            }
            shape => tensors.push((
                format!("{name}.weight"),
                random_dense(&mut rng, &shape.dims()),
            )),
        }
    }
    let path = dir.path().join("model.safetensors");
    write_tensors(&path, &tensors, &BTreeMap::new()).unwrap();
    let opened = Checkpoint::open(dir.path()).unwrap();
    nq::verify(&opened).unwrap();
    let store = opened.store();
    assert_eq!(stacks.len(), 6);
    for (name, dims) in stacks {
        let Weight::Dense(values) = store.matrix(&name, dims).unwrap() else {
            panic!("{name} is expanded");
        };
        assert!(store.is_float(&name));
        let coded = store.matrix_in_levels(&name, dims).unwrap();
        match (coded, store.scheme_in_levels(&name)) {
            (Weight::Quantized(QuantizedWeight::Exl3(w)), Some(Scheme::Exl3(scheme))) => {
                assert!(name.contains("layers.0."), "{name}");
                assert_eq!((w.scheme(), w.experts()), (scheme, 2));
                assert_eq!(w.to_f16().unwrap().data(), values.data(), "{name}");
            }
            (Weight::Dense(held), None) => {
                assert!(name.contains("layers.1."), "{name}");
                assert_eq!(held.data(), values.data(), "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn weights_are_expanded_as_the_format_says() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let config = nq_formats::config::parse(Path::new("c"), CONFIG.as_bytes()).unwrap();
    let (mut rng, mut tensors, mut expected) = (Rng(5), Vec::new(), BTreeMap::new());
    let mut kinds = KINDS.into_iter().cycle();
    for (name, shape) in parameters(&config) {
        match shape {
            Shape::Matrix(rows, cols) if is_layer_linear(&name) || name == "lm_head" => {
                let kind = kinds.next().unwrap();
                let (parts, values) = random(&mut rng, kind, Dims::new(rows, cols));
                tensors.extend(parts.into_iter().map(|(s, t)| (format!("{name}{s}"), t)));
                expected.insert(name, ((rows, cols), values));
            }
            shape => tensors.push((
                format!("{name}.weight"),
                random_dense(&mut rng, &shape.dims()),
            )),
        }
    }
    let path = dir.path().join("model.safetensors");
    let write =
        |tensors: &[(String, Tensor)]| write_tensors(&path, tensors, &BTreeMap::new()).unwrap();
    write(&tensors);
    let opened = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(opened.store().format(), "exl3");
    assert!(opened.left_over().is_empty(), "{:?}", opened.left_over());
    nq::verify(&opened).unwrap();
    let (mut whole, mut halves_of_bits) = (0, 0);
    for (name, (dims, values)) in &expected {
        let store = opened.store();
        let weight = store.matrix(name, Dims::new(dims.0, dims.1)).unwrap();
        assert!(matches!(&weight, Weight::Dense(t) if t.dtype() == DType::F16));
        assert_eq!(store.exactness(name), Exactness::ValuesRounded(DType::F16));
        // Devices have codes of whole bits as they are, the same values to the bit.
        let coded = store
            .matrix_in_codes(name, Dims::new(dims.0, dims.1))
            .unwrap();
        let scheme = store.scheme_in_levels(name);
        match (&coded, scheme) {
            (Weight::Quantized(QuantizedWeight::Exl3(w)), Some(Scheme::Exl3(scheme))) => {
                assert_eq!((w.scheme(), scheme.bits().fract()), (scheme, 0.0));
                let Weight::Dense(values) = &weight else {
                    unreachable!("checked above")
                };
                assert_eq!(w.to_f16().unwrap().data(), values.data(), "{name}");
                whole += 1;
            }
            (Weight::Dense(_), None) => halves_of_bits += 1,
            other => panic!("{name}: {other:?}"),
        }
        let stored = store.stored(name, Dims::new(dims.0, dims.1)).unwrap();
        let size = values.iter().fold(0f64, |m, v| m.max(v.abs()));
        let mut row = vec![0f32; dims.1];
        for (r, values) in values.chunks_exact(dims.1).enumerate() {
            stored.dequantize_row(r, &mut row).unwrap();
            for (v, expected) in row.iter().zip(values) {
                let error = (f64::from(*v) - expected).abs();
                assert!(error < 1e-6 * size, "{name}: {v} for {expected} in row {r}");
            }
            let exact = row.clone();
            weight.dequantize_row(r, &mut row).unwrap();
            let rounded = exact.iter().map(|v| f16::from_f32(*v).to_f32());
            assert!(row.iter().copied().eq(rounded), "{name}");
        }
    }

    assert!(
        whole >= 5 && halves_of_bits >= 2,
        "{whole}, {halves_of_bits}"
    );

    let refused = |name: &str, tensor: Option<Tensor>, expect: &[&str]| {
        let others = tensors.iter().filter(|(n, _)| n != name).cloned();
        let changed = tensor.map(|t| (name.to_owned(), t));
        write(&others.chain(changed).collect::<Vec<_>>());
        let checked = Checkpoint::open(dir.path()).and_then(|c| nq::verify(&c));
        names(checked, expect);
    };
    let q = "model.layers.0.self_attn.q_proj";
    let trellis = format!("{q}.trellis");
    let zeros =
        |shape: [usize; 3]| integers(&shape, std::iter::repeat_n(0, shape.iter().product()));
    refused(
        &trellis,
        Some(zeros([8, 8, 40])),
        &[&trellis, "mul1", "40 values"],
    );
    refused(&trellis, Some(zeros([8, 8, 0])), &[&trellis, "0 values"]);
    refused(
        &trellis,
        Some(zeros([8, 8, 144])),
        &[&trellis, "144 values"],
    );
    refused(
        &trellis,
        Some(zeros([4, 16, 32])),
        &[&trellis, "[8, 8, 32]", "[4, 16, 32]"],
    );
    let suh = format!("{q}.suh");
    refused(&suh, None, &[&suh, "no such tensor"]);
    refused(
        &suh,
        Some(halves(&[f32::INFINITY; 128])),
        &[&suh, "finite", "inf at 0"],
    );
    let mul1 = "model.layers.0.self_attn.k_proj.mul1";
    refused(mul1, Some(scalar(7)), &[mul1, "0x83DCD12D", "0x7"]);
}
