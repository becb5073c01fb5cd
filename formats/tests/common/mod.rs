//! Helpers shared by the integration tests.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

/// The repository's assets folder.
pub(crate) fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets")
}

/// The shared test data, or `None` with a printed note where it is absent.
pub(crate) fn shared(file: &str) -> Option<PathBuf> {
    let root = std::env::var_os("NQ_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let path = root.join(file);
    if path.exists() {
        return Some(path);
    }
    #[allow(clippy::print_stdout)]
    {
        println!("skipped: no {} here", path.display());
    }
    None
}

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

/// Asserts that `error`'s message holds every one of `parts`.
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
