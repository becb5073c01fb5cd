//! Helpers shared by the integration tests.

use bytes::Bytes;
use half::f16;
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Checkpoint, GroupValues, Levels, Parts, Scales, Tensor,
    Weight, Zeros, nq, pack,
};
use nq_model::{DType, Dims};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::Arc;

pub(crate) use nq_testkit::{assets, shared};

/// A safetensors file: length, `header`, data.
pub(crate) fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

/// A config.json of a tiny Qwen3 model, with `extra` keys (JSON, ending in a comma) first.
pub(crate) fn tiny_config(extra: &str) -> String {
    format!(
        r#"{{{extra}"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":8,
        "intermediate_size":16,"num_hidden_layers":1,"num_attention_heads":2,
        "num_key_value_heads":1,"head_dim":4,"vocab_size":16,"max_position_embeddings":32,
        "rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":3}}"#
    )
}

/// Asserts that `error`'s message contains all of `parts`.
#[track_caller]
pub(crate) fn names<T>(result: Result<T, nq_formats::Error>, parts: &[&str]) {
    let message = match result {
        Ok(_) => panic!("accepted; expected an error naming {parts:?}"),
        Err(e) => e.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// Asserts that the quantized folder `dest` is refused with each of `parts` after `change` of its quantization's settings.
#[track_caller]
pub(crate) fn refuses_settings(dest: &Path, parts: &[&str], change: &dyn Fn(&mut Value)) {
    let path = dest.join("config.json");
    let original = fs::read(&path).unwrap();
    let mut config: Value = serde_json::from_slice(&original).unwrap();
    change(&mut config["quantization_config"]);
    fs::write(&path, config.to_string()).unwrap();
    names(Checkpoint::open(dest).and_then(|c| nq::verify(&c)), parts);
    fs::write(&path, original).unwrap();
}

/// A generator for test values (SplitMix64).
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in [-1, 1).
    pub(crate) fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// A quantized weight with random contents.
pub(crate) fn random_affine(
    rng: &mut Rng,
    scheme: AffineScheme,
    Dims { rows, cols }: Dims,
    with_g_idx: bool,
) -> AffineWeight {
    let groups = scheme.group.count(cols);
    let mut packed = |bits: Bits, width: usize| {
        let codes: Vec<u8> = (0..rows * width)
            .map(|_| rng.next() as u8 & bits.max_code())
            .collect();
        Bytes::from(pack::pack_rows(bits, &codes, width))
    };
    let codes = packed(scheme.bits, cols);
    let integer = packed(scheme.value_bits(), groups);
    let small = match scheme.scales {
        Scales::Half => [Bytes::new(), Bytes::new()],
        Scales::TwoLevel(two) => [packed(two.bits, groups), packed(two.bits, groups)],
    };
    let mut halves = |n: usize| -> Arc<[f16]> {
        (0..rows * n)
            .map(|_| f16::from_f32(rng.signed() / 16.0))
            .collect()
    };
    let [scales, offsets] = small.map(|small| match scheme.scales {
        Scales::Half => GroupValues::Half(halves(groups)),
        Scales::TwoLevel(two) => GroupValues::TwoLevel {
            small,
            of_spans: halves(two.span.count(cols)),
        },
    });
    let mut level = |_| rng.next() as u8;
    let parts = Parts {
        codes,
        scales,
        zeros: (scheme.zeros == Zeros::Integer).then_some(integer),
        offsets: (scheme.zeros == Zeros::Offset).then_some(offsets),
        levels: (scheme.levels == Levels::Table)
            .then(|| (0..1 << scheme.bits.width()).map(&mut level).collect()),
        g_idx: with_g_idx.then(|| (0..cols).map(|_| rng.below(groups) as u32).collect()),
    };
    AffineWeight::assemble(scheme, Dims::new(rows, cols), parts).unwrap()
}

/// Asserts that two weights are the same, part by part and value by value.
#[track_caller]
pub(crate) fn assert_same(a: &Weight, b: &Weight) {
    let Dims { rows, cols } = a.dims();
    assert_eq!(a.dims(), b.dims());
    assert_eq!(a.scheme_name(), b.scheme_name());
    assert_eq!(a.bytes(), b.bytes());
    let (mut x, mut y) = (vec![0.0; cols], vec![0.0; cols]);
    for row in 0..rows {
        a.dequantize_row(row, &mut x).unwrap();
        b.dequantize_row(row, &mut y).unwrap();
        assert_eq!(x, y, "row {row}");
    }
}

/// A dense bf16 tensor with random contents.
pub(crate) fn random_dense(rng: &mut Rng, shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let bytes: Vec<u8> = (0..n)
        .flat_map(|_| half::bf16::from_f32(rng.signed()).to_le_bytes())
        .collect();
    Tensor::new(DType::BF16, shape.to_vec(), bytes.into()).unwrap()
}
