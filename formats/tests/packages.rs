//! Packed weights compared with the readings of the formats' own Python packages
//! (`fixtures/packages/make.py`): the same numbers, bit for bit.

use nq_formats::hash::sha256_hex;
use nq_formats::{Checkpoint, Exactness};
use nq_model::names::{Shape, is_layer_linear, parameters};
use nq_model::{DType, Dims};
use serde_json::Value;
use std::fs;
use std::path::Path;

const CONFIG: &str = r#""architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":32,
"intermediate_size":64,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,
"head_dim":16,"vocab_size":16,"max_position_embeddings":32,"rms_norm_eps":1e-6,
"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":3,"torch_dtype":"bfloat16""#;

/// Reads fixture `name` and compares every Linear with the package's reading of it.
fn check(name: &str) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/packages");
    let expected = fs::read(fixtures.join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let settings = fs::read_to_string(fixtures.join(format!("{name}.json"))).unwrap();
    let config = format!(r#"{{{CONFIG},"quantization_config":{settings}}}"#);
    fs::write(dir.path().join("config.json"), config).unwrap();
    let weights = fixtures.join(format!("{name}.safetensors"));
    fs::copy(weights, dir.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let store = checkpoint.store();
    let mut compared = 0;
    for (parameter, shape) in parameters(checkpoint.config()) {
        let Shape::Matrix(rows, cols) = shape else {
            continue;
        };
        if !is_layer_linear(&parameter) {
            continue;
        }
        assert_ne!(
            store.exactness(&parameter),
            Exactness::ValuesRounded(DType::BF16)
        );
        let weight = store.matrix(&parameter, Dims::new(rows, cols)).unwrap();
        let mut bytes = Vec::new();
        let mut row = vec![0f32; cols];
        for r in 0..rows {
            weight.dequantize_row(r, &mut row).unwrap();
            // Packages do not yield -0 if a code equals its zero-point; the number is the same.
            bytes.extend(row.iter().flat_map(|v| (v + 0.0).to_le_bytes()));
        }
        let linear = parameter.trim_start_matches("model.layers.0.");
        assert_eq!(
            sha256_hex(&bytes),
            expected[name][linear],
            "{name} {linear}"
        );
        compared += 1;
    }
    assert_eq!(compared, 7);
}

#[test]
fn gptq_is_read_as_gptqmodel_reads_it() {
    check("gptq4");
    check("gptq8");
}

#[test]
fn awq_is_read_as_autoawq_reads_it() {
    check("awq");
}

#[test]
fn compressed_tensors_is_read_as_its_package_reads_it() {
    check("compressed-tensors");
}
