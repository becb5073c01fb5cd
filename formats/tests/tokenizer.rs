//! A tokenizer must fit its model.

mod common;

use common::{assets, names, shared, tiny_config};
use nq_formats::{Checkpoint, tokenizer};
use std::fs;
use std::path::Path;

#[test]
fn tokenizers_fit_their_models() {
    let demo = assets().join("demo");
    tokenizer::check(&Checkpoint::open(&demo).unwrap()).unwrap();
    let largest = |path: &Path| {
        tokenizer::largest_id(path, &fs::read(path).unwrap())
            .unwrap()
            .unwrap()
    };
    assert_eq!(largest(&demo.join("tokenizer.json")), 4095);
    if let Some(published) = shared("data/qwen3/tokenizer.json") {
        assert_eq!(largest(&published), 151_668);
    }
}

#[test]
fn others_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, contents: &[u8]| fs::write(dir.path().join(name), contents).unwrap();
    put("config.json", tiny_config("").as_bytes());
    let header = r#"{"model.layers.0.input_layernorm.weight":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}"#;
    put("model.safetensors", &common::safetensors(header, &[0; 2]));
    let check = || tokenizer::check(&Checkpoint::open(dir.path()).unwrap());
    names(check(), &["no tokenizer.json"]);
    put("tokenizer.json", br#"{"model":{"vocab":{"a":0,"b":15}}}"#);
    check().unwrap();
    // A tokenizer of another model: more tokens than the embedding has rows.
    put("tokenizer.json", br#"{"model":{"vocab":{"a":0,"b":16}}}"#);
    names(
        check(),
        &[
            "tokenizer.json",
            "largest token id",
            "vocab_size 16",
            "found 16",
        ],
    );
    put(
        "tokenizer.json",
        br#"{"added_tokens":[{"id":151643}],"model":{"vocab":{"a":0}}}"#,
    );
    names(check(), &["vocab_size 16", "found 151643"]);
    for bad in [
        "",
        "[]",
        r#"{"model":{"vocab":["a"]}}"#,
        r#"{"model":{"vocab":{"a":-1}}}"#,
    ] {
        put("tokenizer.json", bad.as_bytes());
        names(check(), &["tokenizer.json", "model.vocab"]);
    }
}
