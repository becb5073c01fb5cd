//! The tokenizer compared with Hugging Face's: the published Qwen3 tokenizer and the demo
//! model's. Data beside the repository is used where present.

#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use nq_formats::Files;
use nq_formats::gguf::GgufFile;
use nq_runtime::{Detokenizer, Tokenizer};
use nq_testkit::{repository, shared};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::time::Instant;

fn open(folder: PathBuf) -> Tokenizer {
    Tokenizer::from_files(&Files::Folder(folder)).unwrap()
}

fn demo() -> Tokenizer {
    open(nq_testkit::demo())
}

fn json_lines(path: &Path) -> Vec<serde_json::Value> {
    std::fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

fn ids(v: &serde_json::Value) -> Vec<u32> {
    serde_json::from_value(v.clone()).unwrap()
}

fn sha256_le(ids: &[u32]) -> String {
    let mut hash = Sha256::new();
    for id in ids {
        hash.update(id.to_le_bytes());
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Pieces of a streamed decode.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(tokenizer, skip_special);
    let mut pieces: Vec<String> = ids.iter().filter_map(|&i| detokenizer.push(i)).collect();
    pieces.extend(detokenizer.flush());
    pieces
}

#[test]
fn qwen3_encodings_are_hugging_faces() {
    let Some(dir) = shared("data/qwen3") else {
        return;
    };
    let vectors = json_lines(&dir.join("tests/encode_vectors.jsonl"));
    assert_eq!(vectors.len(), 223);
    let tokenizer = open(dir);
    for v in &vectors {
        let text = v["text"].as_str().unwrap();
        let expected = ids(&v["ids"]);
        assert_eq!(tokenizer.encode(text).unwrap(), expected, "{text:?}");
        let decoded = tokenizer.decode(&expected, false);
        assert_eq!(stream(&tokenizer, &expected, false).concat(), decoded);
        assert_eq!(
            tokenizer.encode(&decoded).unwrap(),
            expected,
            "a text's ids decode to a text of the same ids: {text:?}"
        );
    }
}

#[test]
fn qwen3_encodes_wikitext_as_published() {
    let (Some(dir), Some(text)) = (shared("data/qwen3"), shared("data/wiki.test.raw")) else {
        return;
    };
    let record: serde_json::Value = serde_json::from_slice(
        &std::fs::read(dir.join("tests/wiki_test_raw_tokens.json")).unwrap(),
    )
    .unwrap();
    let tokenizer = open(dir);
    let text = std::fs::read_to_string(text).unwrap();
    let start = Instant::now();
    let found = tokenizer.encode(&text).unwrap();
    println!("{} tokens in {:.2?}", found.len(), start.elapsed());
    assert_eq!(found.len(), 299_078);
    assert_eq!(sha256_le(&found), record["sha256_of_ids_as_u32_le"]);
    assert_eq!(tokenizer.decode(&found, false), text);
}

/// llama.cpp's ids of its test texts, in the vocabulary beside them, from GGUF. It does not compose characters, as
/// transformers does.
#[test]
fn qwen35_encodings_are_llama_cpps() {
    let Some(path) = shared("data/qwen3.5/ggml-vocab-qwen35.gguf") else {
        return;
    };
    let beside = |end: &str| std::fs::read_to_string(format!("{}{end}", path.display())).unwrap();
    let (texts, expected) = (beside(".inp"), beside(".out"));
    let file = GgufFile::parse(&path, std::fs::read(&path).unwrap().into()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let json = nq_formats::gguf::tokenizer::tokenizer_json(&file).unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    let tokenizer = open(dir.path().into());
    assert_eq!(tokenizer.vocab_size(), 151_936);
    let texts: Vec<&str> = texts.split_terminator("\n__ggml_vocab_test__\n").collect();
    let expected: Vec<&str> = expected.lines().collect();
    assert_eq!((texts.len(), expected.len()), (50, 50));
    let mut composed = 0;
    for (text, expected) in texts.iter().zip(expected) {
        let ids = tokenizer.encode(text).unwrap();
        if text.contains(['\u{300}', '\u{301}']) {
            composed += 1;
            continue;
        }
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        assert_eq!(ids.join(" "), expected.trim(), "{text:?}");
    }
    assert_eq!(composed, 3);
    assert_eq!(tokenizer.encode("e\u{301}").unwrap(), [963]);
}

/// Qwen3.5 counts marks as letters: a mark and the letters around it are one word, which merges cross.
#[test]
fn marks_belong_to_words() {
    // Tokens of q, the two bytes of a tilde below (U+0330) and x.
    let tokenizer = |letters: &str, no_letters: &str| {
        let pattern = format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}| ?[^\s{no_letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false,
            "trim_offsets": false, "use_regex": false});
        let file = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
                byte_level]},
            "post_processor": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": false,
                "vocab": {"q": 0, "Ì": 1, "°": 2, "x": 3, "Ì°": 4, "qÌ°": 5, "Ì°x": 6},
                "merges": [["Ì", "°"], ["q", "Ì°"], ["Ì°", "x"]]},
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        open(dir.path().into())
    };
    let text = "q\u{330}x";
    let ids = tokenizer(r"\p{L}", r"\p{L}").encode(text).unwrap();
    assert_eq!(ids, [0, 6]); // q | mark and x
    let ids = tokenizer(r"[\p{L}\p{M}]", r"\p{L}\p{M}")
        .encode(text)
        .unwrap();
    assert_eq!(ids, [5, 3]); // one word: its first merge is q and the mark
}

#[test]
fn qwen3_vocabulary_is_checked_against_the_model() {
    let Some(dir) = shared("data/qwen3") else {
        return;
    };
    let tokenizer = open(dir);
    assert_eq!(tokenizer.vocab_size(), 151_669);
    assert_eq!(tokenizer.max_id(), 151_668);
    tokenizer.check_vocab(151_936).unwrap();
    let message = tokenizer.check_vocab(4096).unwrap_err().to_string();
    for part in ["tokenizer.json", "4096", "151668"] {
        assert!(message.contains(part), "{message}");
    }
    let message = demo().check_vocab(151_936).unwrap_err().to_string();
    for part in ["tokenizer.json", "4096", "151936"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn demo_ids_are_transformers() {
    let golden: serde_json::Value = serde_json::from_slice(
        &std::fs::read(repository().join("assets/demo-golden.json")).unwrap(),
    )
    .unwrap();
    let tokenizer = demo();
    let mut checked = 0;
    for row in golden["ppl"].as_array().unwrap() {
        let path = match row["text"].as_str().unwrap() {
            "demo-eval.txt" => repository().join("assets/demo-eval.txt"),
            name => match shared(&format!("data/{name}")) {
                Some(path) => path,
                None => continue,
            },
        };
        let found = tokenizer
            .encode(&std::fs::read_to_string(path).unwrap())
            .unwrap();
        assert_eq!(found.len() as u64, row["tokens"].as_u64().unwrap(), "{row}");
        assert_eq!(sha256_le(&found), row["ids_sha256"], "{row}");
        checked += 1;
    }
    assert!(checked >= 2);
    for row in golden["logits"].as_array().unwrap() {
        let text = row["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), ids(&row["ids"]), "{text}");
    }
    for row in golden["greedy"].as_array().unwrap() {
        let found = tokenizer.decode(&ids(&row["ids"]), false);
        assert_eq!(found, row["text"].as_str().unwrap());
    }
}

/// Long texts are encoded in pieces; the ids must be those of one piece. Lines are assembled
/// from what the pre-tokenizer's alternatives treat differently.
#[test]
fn pieces_do_not_change_ids() {
    let parts = [
        "word",
        " two",
        "  x",
        "!",
        "?!\n",
        "\n",
        "\r\n",
        "\n\n",
        " ",
        "   ",
        "\t",
        "'s",
        "'LL",
        "9",
        "é",
        "e\u{301}",
        "\u{330}",
        "\u{2003}",
        "\u{a0}",
        "日本",
        "<|im_end|>",
        "<think>",
        "\n ",
        ".\n\n",
    ];
    let mut state = 1u64;
    let mut text = String::new();
    while text.len() < 200_000 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        text.push_str(parts[(state >> 40) as usize % parts.len()]);
    }
    // Qwen3's pattern and Qwen3.5's.
    let file = std::fs::read_to_string(repository().join("assets/demo/tokenizer.json")).unwrap();
    let with_marks = file
        .replace(r"?\\p{L}+", r"?[\\p{L}\\p{M}]+")
        .replace(r"[^\\s\\p{L}\\p{N}]", r"[^\\s\\p{L}\\p{M}\\p{N}]");
    assert_eq!(with_marks.len(), file.len() + 14);
    for file in [file, with_marks] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), &file).unwrap();
        let tokenizer = open(dir.path().into());
        let whole = tokenizers::Tokenizer::from_bytes(file).unwrap();
        let whole = whole.encode(text.as_str(), false).unwrap();
        assert_eq!(tokenizer.encode(&text).unwrap(), whole.get_ids());
    }
}

#[test]
fn special_tokens_in_text_are_parsed() {
    let tokenizer = demo();
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    let think = tokenizer.token_id("<think>").unwrap();
    let found = tokenizer.encode("<think>a<|im_end|>").unwrap();
    assert_eq!((found[0], *found.last().unwrap()), (think, end));
    assert_eq!(tokenizer.decode(&found, false), "<think>a<|im_end|>");
    assert_eq!(tokenizer.decode(&found, true), "<think>a");
    assert_eq!(stream(&tokenizer, &found, true).concat(), "<think>a");
    assert_eq!(tokenizer.token_id("<|no_such_token|>"), None);
}

#[test]
fn streamed_pieces_are_whole_characters() {
    let tokenizer = demo();
    // Characters outside the demo vocabulary are one byte per token.
    let text = "a 🦙 é 日本語 👩‍👩‍👧 z";
    let found = tokenizer.encode(text).unwrap();
    let pieces = stream(&tokenizer, &found, false);
    assert_eq!(pieces.concat(), text);
    assert!(pieces.iter().all(|p| !p.contains('\u{FFFD}')), "{pieces:?}");
    assert!(pieces.iter().any(|p| p == "🦙" || p == " 🦙"));
}

/// Any sequence of ids, valid UTF-8 or not, streams to what it decodes to at once, which is also
/// what the tokenizers crate decodes.
#[test]
fn streaming_equals_decoding_for_any_ids() {
    let tokenizer = demo();
    let oracle =
        tokenizers::Tokenizer::from_file(repository().join("assets/demo/tokenizer.json")).unwrap();
    let mut state = 7u64;
    let mut next = |n: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % n
    };
    for round in 0..3000 {
        let len = next(12);
        // Low ids are single bytes: mostly broken characters.
        let limit = if round % 3 == 0 { 4200 } else { 256 };
        let ids: Vec<u32> = (0..len).map(|_| next(limit) as u32).collect();
        for skip in [false, true] {
            let decoded = tokenizer.decode(&ids, skip);
            assert_eq!(decoded, oracle.decode(&ids, skip).unwrap(), "{ids:?}");
            assert_eq!(stream(&tokenizer, &ids, skip).concat(), decoded, "{ids:?}");
        }
    }
}

#[test]
fn unusable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::Folder(dir.path().into());
    let error = |what: &str| {
        let e = Tokenizer::from_files(&files).err().expect(what).to_string();
        assert!(e.contains("tokenizer.json"), "{e}");
        e
    };
    error("absent");
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, "{").unwrap();
    error("truncated");
    let text = std::fs::read_to_string(repository().join("assets/demo/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["decoder"] = serde_json::Value::Null;
    std::fs::write(&path, json.to_string()).unwrap();
    assert!(error("no decoder").contains("ByteLevel"));
}

/// Models whose tokens are other ones are told apart, by the first that differs.
#[test]
fn other_vocabularies_are_refused_by_the_first_difference() {
    use serde_json::{Value, json};
    let ours = demo();
    ours.check_same(&demo()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(repository().join("assets/demo/tokenizer.json")).unwrap();
    let whole: Value = serde_json::from_str(&text).unwrap();
    let refused = |json: &Value, part: &str| {
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let other = open(dir.path().into());
        let error = ours.check_same(&other).unwrap_err().to_string();
        let file = dir.path().display().to_string();
        for part in [part, &file, "assets/demo"] {
            assert!(error.contains(part), "{part} is not in {error}");
        }
    };
    let mut plain = whole.clone();
    let special = &mut plain["added_tokens"][0];
    let id = special["id"].clone();
    special["special"] = json!(false);
    refused(&plain, &format!("token {id} is special"));
    let mut longer = whole.clone();
    let next = ours.max_id() + 1;
    let tokens = longer["added_tokens"].as_array_mut().unwrap();
    let mut added = tokens[0].clone();
    (added["id"], added["content"]) = (json!(next), json!("<|new|>"));
    added["special"] = json!(true);
    tokens.push(added);
    refused(
        &longer,
        &format!("token {next} is none there and special \"<|new|>\" here"),
    );
}

/// What the tokenizers crate panics on, or takes time or memory without bound for, is refused by
/// name before it gets there.
#[test]
fn harmful_parts_are_refused_by_name() {
    use serde_json::{Value, json};
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(repository().join("assets/demo/tokenizer.json")).unwrap();
    let whole: Value = serde_json::from_str(&text).unwrap();
    let refused = |pointer: &str, value: Value, parts: &[&str]| {
        let mut json = whole.clone();
        *json.pointer_mut(pointer).unwrap() = value;
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let error = Tokenizer::from_files(&Files::Folder(dir.path().into())).err();
        let error = error.expect(pointer).to_string();
        for part in parts.iter().chain(&["tokenizer.json"]) {
            assert!(error.contains(part), "{part} is not in {error}");
        }
    };
    let precompiled = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    refused(
        "/normalizer",
        precompiled.clone(),
        &["normalizer", "NFC", "Precompiled"],
    );
    let replace = json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
    refused("/normalizer", replace.clone(), &["normalizer", "Replace"]);
    let sequence = |parts: Value| json!({"type": "Sequence", "normalizers": parts});
    refused(
        "/normalizer",
        sequence(json!([{"type": "NFC"}, replace])),
        &["normalizer", "Replace"],
    );
    let nested = sequence(json!([sequence(json!([precompiled]))]));
    refused("/normalizer", nested, &["normalizer", "Sequence"]);
    let split =
        json!({"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": false});
    refused("/pre_tokenizer", split, &["pre_tokenizer", "pattern"]);
    refused(
        "/pre_tokenizer",
        json!({"type": "Metaspace"}),
        &["pre_tokenizer", "Metaspace"],
    );
    refused(
        "/decoder",
        json!({"type": "WordPiece"}),
        &["decoder", "ByteLevel", "WordPiece"],
    );
    refused(
        "/model/continuing_subword_prefix",
        json!("##"),
        &["continuing_subword_prefix", "##"],
    );
    refused(
        "/model/end_of_word_suffix",
        json!("</w>"),
        &["end_of_word_suffix", "</w>"],
    );
    refused("/model/dropout", json!(0.5), &["dropout", "0.5"]);
    refused(
        "/model/type",
        json!("Unigram"),
        &["model.type", "BPE", "Unigram"],
    );
    refused(
        "/model/merges",
        json!([["a", "no such token"]]),
        &["no such token"],
    );
}

/// A tokenizer saved with the limits of a training run must not cut texts.
#[test]
fn truncation_in_the_file_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(repository().join("assets/demo/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["truncation"] = serde_json::json!(
        {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let limited = Tokenizer::from_files(&Files::Folder(dir.path().into())).unwrap();
    let sentence = "This sentence has more than two tokens.";
    assert_eq!(
        limited.encode(sentence).unwrap(),
        demo().encode(sentence).unwrap()
    );
}
