//! A tokenizer must fit its model.

use crate::common::{self, names, shared, tiny_config};
use nq_formats::{Checkpoint, Files, tokenizer};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

#[test]
fn tokenizers_fit_their_models() {
    let demo = nq_testkit::demo();
    Checkpoint::open(&demo).unwrap().check_tokenizer().unwrap();
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
    let check = || Checkpoint::open(dir.path()).unwrap().check_tokenizer();
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

/// A folder of a tiny model with a tokenizer of one special token and one that is not.
struct TokenizerFolder(tempfile::TempDir);

impl TokenizerFolder {
    fn new(config: &Value) -> Self {
        let folder = TokenizerFolder(tempfile::tempdir().unwrap());
        let header = r#"{"model.layers.0.input_layernorm.weight":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}"#;
        folder.put("model.safetensors", &common::safetensors(header, &[0; 2]));
        folder.put("config.json", tiny_config("").as_bytes());
        let token = |id: u32, content: &str, special: bool| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": !special, "special": special})
        };
        let tokenizer = json!({
            "added_tokens": [token(4, "<|im_end|>", false), token(5, "<|x|>", true)],
            "model": {"vocab": {"a": 0}},
        });
        folder.put("tokenizer.json", tokenizer.to_string().as_bytes());
        folder.put("tokenizer_config.json", config.to_string().as_bytes());
        folder
    }

    fn put(&self, name: &str, contents: &[u8]) {
        fs::write(self.0.path().join(name), contents).unwrap();
    }

    fn open(&self) -> nq_formats::Result<Checkpoint> {
        Checkpoint::open(self.0.path())
    }

    fn left_over(&self) -> Vec<String> {
        let opened = self.open().unwrap();
        let left = opened.left_over().iter();
        left.map(|l| format!("{}: {}", l.name, l.why)).collect()
    }
}

/// The flags of tokenizer_config.json are those of the tokenizer, as in transformers.
#[test]
fn added_tokens_have_the_flags_of_the_tokenizer_config() {
    let config = |id: &str, token: Value| {
        let said = Value::from_iter([(id, token)]);
        json!({"added_tokens_decoder": said, "chat_template": "<|im_end|>"})
    };
    let ends = |folder: &TokenizerFolder| folder.open().unwrap().eos_token_ids().to_vec();
    let plain = TokenizerFolder::new(&json!({"chat_template": "<|im_end|>"}));
    assert_eq!(ends(&plain), [3]);
    let files = Files::Folder(plain.0.path().into());
    let written = fs::read(plain.0.path().join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer::applied(&files).unwrap(), written);

    let special = json!({"content": "<|im_end|>", "lstrip": true, "special": true});
    let folder = TokenizerFolder::new(&config("4", special));
    assert_eq!(ends(&folder), [3, 4]);
    assert!(folder.left_over().is_empty());
    let files = Files::Folder(folder.0.path().into());
    let applied: Value = serde_json::from_slice(&tokenizer::applied(&files).unwrap()).unwrap();
    let expected = json!({"id": 4, "content": "<|im_end|>", "single_word": false, "lstrip": true,
        "rstrip": false, "normalized": false, "special": true});
    assert_eq!(applied["added_tokens"][0], expected);
    assert_eq!(applied["added_tokens"][1]["content"], "<|x|>");
    assert_eq!(applied["model"]["vocab"]["a"], 0);

    // Those that tokenizer.json does not have, or has elsewhere, are said.
    let folder = TokenizerFolder::new(&json!({"added_tokens_decoder": {
        "5": {"content": "<|im_end|>", "normalized": true}, "6": {"content": "<|y|>"}}}));
    let left = folder.left_over();
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(left[0].contains("added_tokens_decoder 5: tokenizer.json has \"<|im_end|>\" as 4"));
    assert!(left[1].contains("added_tokens_decoder 6 \"<|y|>\": tokenizer.json has no such"));
    let malformed = TokenizerFolder::new(&config("4", json!({"content": 4})));
    names(
        malformed.open(),
        &[
            "tokenizer_config.json",
            "added_tokens_decoder 4",
            "an added token",
        ],
    );
    let split = TokenizerFolder::new(&json!({"split_special_tokens": true}));
    names(split.open(), &["split_special_tokens true"]);
}

#[test]
fn keys_of_the_tokenizer_config_are_accounted_for() {
    let table = nq_formats::keys::table();
    let rows = table
        .lines()
        .filter(|l| l.starts_with("| tokenizer_config.json |"));
    let keys = rows.flat_map(|row| row.split('|').nth(2).unwrap().split(','));
    let mut all: serde_json::Map<String, Value> = keys
        .map(|key| (key.trim().trim_matches('`').to_owned(), json!("x")))
        .collect();
    assert!(all.len() > 30);
    for key in ["eos_token", "bos_token", "pad_token", "unk_token"] {
        all[key] = json!({"content": "<|x|>"});
    }
    for key in ["add_bos_token", "add_eos_token"] {
        all[key] = json!(false);
    }
    assert!(
        TokenizerFolder::new(&Value::from(all))
            .left_over()
            .is_empty()
    );

    let folder = TokenizerFolder::new(&json!({
        "eos_token": "<|end|>",
        "image_token": "<|x|>",
        "pad_token": null,
        "add_eos_token": true,
        "add_bos_token": false,
        "additional_special_tokens": ["<|x|>", "<|z|>"],
        "chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}],
        "new_key": 1,
        "off": false,
    }));
    fs::create_dir(folder.0.path().join("additional_chat_templates")).unwrap();
    folder.put("additional_chat_templates/rag.jinja", b"c");
    folder.put("additional_chat_templates/tool_use.jinja", b"d");
    let left = folder.left_over();
    for part in [
        "tokenizer_config.json: eos_token \"<|end|>\": tokenizer.json has no such added token",
        "tokenizer_config.json: additional_special_tokens \"<|z|>\": tokenizer.json has no",
        "tokenizer_config.json: add_eos_token true: the post-processor",
        "tokenizer_config.json: chat_template rag: chats have the template default",
        "additional_chat_templates/rag.jinja: chats have",
        "tokenizer_config.json: new_key: a key that nq does not know",
    ] {
        assert!(left.iter().any(|l| l.starts_with(part)), "{part}: {left:?}");
    }
    assert_eq!(left.len(), 6, "{left:?}");
}
